"""jaxkv beside transformers: prefill, decode and a mixed load, on one checkpoint in one run, both
on the CPU.

    python scripts/bench_generate.py --vs transformers --json result.json
    python scripts/bench_generate.py --shape 1.1b --only decode8,mixed --malloc both

The checkpoint has random weights and both engines are given token ids, so nothing is downloaded;
output is greedy and of the asked length, which is checked, and in float32 both must give the same
tokens. Each engine has a process of its own and one model in memory (with --malloc both two
processes); what one has to compile or load is not counted.

Every line first tries each mode of both engines once; the fastest two go into the rounds, which
take turns (A, B, A, B, ...) with new prompts each, and the mode with the best median stands for its
engine. Without --vs jaxkv runs alone. Line as_completed is the mixed load through LLM.as_completed,
beside LLM.generate.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import numpy as np
from bench_engines import Mode, Work, describe, greedy_float32, measure, num_cores, start_worker
from bench_models import SHAPES, make_checkpoint

FINALISTS = 2


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
    "prefill8": Line(kind="prefill", num_prompts=8, prompt_len=512),
    "decode1": Line(kind="decode", num_prompts=1, output_len=65),
    "decode8": Line(kind="decode", num_prompts=8, output_len=65),
    "decode32": Line(kind="decode", num_prompts=32, output_len=65),
    "mixed": Line(kind="mixed"),
    "as_completed": Line(kind="mixed"),
}


def make_work(line: Line, options: argparse.Namespace, *, round_id: int) -> Work:
    """The line's prompts; lengths depend on the seed, tokens on the round too, so that no prefix
    cache helps.
    """
    lens, tokens = (
        np.random.default_rng(options.seed),
        np.random.default_rng([options.seed, round_id]),
    )
    prompt_lens, output_lens = (
        [line.prompt_len] * line.num_prompts,
        [line.output_len] * line.num_prompts,
    )
    if line.kind == "mixed":
        prompt_lens = lens.integers(32, 513, options.requests).tolist()
        output_lens = lens.integers(16, 257, options.requests).tolist()
    vocab = SHAPES[options.shape]["vocab_size"]
    return Work(
        prompts=[tokens.integers(3, vocab, n).tolist() for n in prompt_lens],
        output_lens=output_lens,
    )


def tokens_per_s(line: Line, work: Work, run_s: Callable[[Work], float]) -> float:
    """Speed by the line's unit. Decode is the whole less the same work with one token each,
    measured next to it.

    Raises: RuntimeError if the one token takes longer than all, three times.
    """
    if line.kind != "decode":
        num_tokens = (
            sum(map(len, work.prompts)) if line.kind == "prefill" else sum(work.output_lens)
        )
        return num_tokens / run_s(work)
    for _ in range(3):
        first_s = run_s(Work(prompts=work.prompts, output_lens=[1] * len(work.prompts)))
        whole_s = run_s(work)
        if whole_s > first_s:
            return sum(n - 1 for n in work.output_lens) / (whole_s - first_s)
    raise RuntimeError(
        f"one token took {first_s:.2f} s, all {whole_s:.2f} s: the machine is too busy to "
        f"measure this"
    )


def sides(name: str, options: argparse.Namespace) -> dict[str, list[Mode]]:
    """What the line compares, the reference last, and the modes that each side may win with."""
    settings = ["default", "tuned"] if options.malloc == "both" else [options.malloc]

    def jaxkv(method: str) -> list[Mode]:
        return [
            Mode(engine="jaxkv", malloc=m, dtype=options.dtype, method=method) for m in settings
        ]

    if name == "as_completed":
        return {"as_completed": jaxkv("as_completed"), "generate": jaxkv("generate")}
    if options.vs is None:
        return {"jaxkv": jaxkv("generate")}
    kinds = [("padded", None, "prompt")]
    if LINES[name].kind == "decode" and options.compile:
        kinds.append(("compiled", None, "prompt"))
    if LINES[name].kind == "mixed":
        kinds = [("padded", size, order) for size in (8, 16, 32) for order in ("prompt", "output")]
        kinds.append(("continuous", 16, "prompt"))
    common = [(malloc, dtype) for malloc in settings for dtype in ("bfloat16", "float32")]
    modes = [
        Mode(
            engine="transformers",
            malloc=malloc,
            dtype=dtype,
            method=method,
            batch_size=size,
            sort_by=order,
        )
        for malloc, dtype in common
        for method, size, order in kinds
    ]
    return {
        "jaxkv": jaxkv("generate"),
        "transformers": [mode for mode in modes if options.modes in str(mode)],
    }


class Bench:
    """The worker processes, made when first needed, and the measurements in them."""

    def __init__(self, directory: Path, options: argparse.Namespace) -> None:
        self.directory = directory
        self.options = options
        self.workers: dict[tuple[str, str], ProcessPoolExecutor] = {}
        self.engines: dict[str, str] = {}

    def worker(self, mode: Mode) -> ProcessPoolExecutor:
        key = (mode.engine, mode.malloc)
        if key not in self.workers:
            self.workers[key] = start_worker(mode.malloc)
            text = (
                self.workers[key].submit(describe, self.directory, mode.engine, mode.dtype).result()
            )
            self.engines[f"{mode.engine}, {mode.malloc} malloc"] = text
            log(text)
        return self.workers[key]

    def speed(self, line: Line, mode: Mode, *, round_id: int) -> float:
        """Tokens per second of one measurement."""
        worker, work = self.worker(mode), make_work(line, self.options, round_id=round_id)
        speed = tokens_per_s(
            line, work, lambda work: worker.submit(measure, self.directory, mode, work).result()
        )
        log(f"  round {round_id}: {speed:9.1f} tokens/s  {mode.engine} {mode}")
        return speed

    def probe(self, line: Line, modes: list[Mode]) -> tuple[list[Mode], dict[str, float | str]]:
        """The fastest modes, and the speed or error of every one. Raises: RuntimeError if none
        works.
        """
        speeds: dict[Mode, float] = {}
        seen: dict[str, float | str] = {}
        for mode in modes:
            try:
                speeds[mode] = self.speed(line, mode, round_id=0)
                seen[str(mode)] = speeds[mode]
            except RuntimeError as error:  # a mode that this machine cannot run is a result too
                seen[str(mode)] = f"{type(error).__name__}: {error}"
                log(f"  {mode.engine} {mode}: {seen[str(mode)]}")
        if not speeds:
            raise RuntimeError(
                f"no mode works: {seen or 'none has the text of --modes in its name'}"
            )
        return sorted(speeds, key=speeds.__getitem__, reverse=True)[:FINALISTS], seen

    def compare(self, name: str) -> dict:
        """One line: probes, rounds in turns, and the ratio of the first side's median to the
        second's.
        """
        line, result, speeds = LINES[name], {}, {}
        log(f"{name}:")
        for side, modes in sides(name, self.options).items():
            finalists, probes = self.probe(line, modes)
            speeds[side] = {mode: [] for mode in finalists}
            result[side] = {"probes": probes}
        for round_id in range(1, self.options.rounds + 1):
            for place in range(FINALISTS):
                for of_mode in speeds.values():
                    for mode in list(of_mode)[place : place + 1]:
                        of_mode[mode].append(self.speed(line, mode, round_id=round_id))
        for side, of_mode in speeds.items():
            best = max(of_mode, key=lambda mode: median(of_mode[mode]))
            values = of_mode[best]
            result[side] |= {
                "mode": str(best),
                "median": median(values),
                "min": min(values),
                "max": max(values),
            }
            result[side]["rounds"] = {str(mode): values for mode, values in of_mode.items()}
        medians = [side["median"] for side in result.values()]
        return {
            "unit": "tokens/s",
            "sides": result,
            "ratio": medians[0] / medians[1] if len(medians) == 2 else None,
        }

    def check_agreement(self) -> int:
        """Prompts on which both engines give the same float32 tokens. Raises: RuntimeError unless
        it is every one.
        """
        work = make_work(
            Line(kind="decode", num_prompts=4, output_len=16), self.options, round_id=0
        )
        made = {}
        for engine in ("jaxkv", "transformers"):
            with start_worker("default") as worker:
                made[engine] = worker.submit(greedy_float32, self.directory, engine, work).result()
        if made["jaxkv"] != made["transformers"]:
            raise RuntimeError(f"greedy float32 tokens differ: {made}")
        log(f"greedy float32 tokens agree on {len(work.prompts)} prompts")
        return len(work.prompts)


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
    hardware = {"cpu": (models or [platform.processor()])[0], "cores": num_cores()}
    return {"versions": versions, **hardware, "load_before": os.getloadavg()[0]}


def table(lines: dict[str, dict]) -> str:
    """One row per side: median, range and mode; the ratio stands with the first."""
    rows = [f"{'line':13s}{'side':14s}{'tokens/s':>10s}  {'min - max':19s}  {'ratio':8s}mode"]
    for name, result in lines.items():
        ratio = "" if result["ratio"] is None else f"{result['ratio']:.2f}"
        for side, of in result["sides"].items():
            span = f"{of['min']:.1f} - {of['max']:.1f}"
            rows.append(
                f"{name:13s}{side:14s}{of['median']:10.1f}  {span:19s}  {ratio:8s}{of['mode']}"
            )
            name = ratio = ""
    return "\n".join(rows)


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="110m")
    parser.add_argument("--vs", choices=["transformers"])
    parser.add_argument(
        "--only", default=",".join(LINES), help="lines, separated by commas (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64, help="of the mixed load")
    parser.add_argument(
        "--dtype", default="auto", help="jaxkv's; transformers is tried in bfloat16 and float32"
    )
    parser.add_argument(
        "--malloc", choices=["default", "tuned", "both"], default="default", help="glibc's settings"
    )
    parser.add_argument(
        "--compile", action="store_true", help="try torch.compile with a static cache for decode"
    )
    parser.add_argument(
        "--checkpoint", type=Path, help="where to write or find it (default: a temporary directory)"
    )
    parser.add_argument(
        "--modes",
        default="",
        help="try only the modes of transformers with this text in their name",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write everything that was measured")
    options = parser.parse_args()
    options.only = options.only.split(",")
    if unknown := set(options.only) - LINES.keys():
        parser.error(
            f"--only: expected some of {', '.join(LINES)}, got {', '.join(sorted(unknown))}"
        )
    if min(options.rounds, options.requests) < 1:
        parser.error(
            f"--rounds, --requests: expected at least 1, got {options.rounds}, {options.requests}"
        )
    if options.vs and find_spec("torch") is None:
        parser.error(
            "--vs transformers: torch is not installed (`.[parity]` has it); without --vs jaxkv "
            "runs alone"
        )
    return options


def main() -> None:
    options = parse()
    result = environment()
    if result["load_before"] > 0.5:
        log(
            f"load average {result['load_before']:.1f}: other programs run, do not use these "
            f"figures"
        )
    shown = {
        name: value for name, value in vars(options).items() if name not in ("json", "checkpoint")
    }
    with tempfile.TemporaryDirectory() as temporary:
        directory = make_checkpoint(
            options.checkpoint or Path(temporary), options.shape, seed=options.seed
        )
        bench = Bench(directory, options)
        agreement = bench.check_agreement() if options.vs else None
        result |= {
            "options": shown,
            "prompts_that_agree": agreement,
            "engines": bench.engines,
            "lines": {},
        }
        for name in options.only:
            result["lines"][name] = bench.compare(name)
            if options.json:  # after every line: a long run that is broken off leaves what it has
                options.json.write_text(json.dumps(result, indent=1))
        for worker in bench.workers.values():
            worker.shutdown()
    print(table(result["lines"]))


if __name__ == "__main__":
    main()
