"""How long LLM(...) takes in a fresh process until the first token and until all programs are
compiled: a checkpoint and its conversion, each with a cold and a warm cache.

    python scripts/bench_start.py --json docs/benchmarks/start.json
    python scripts/bench_start.py --models demo,110M --before ../other-checkout

Makes checkpoints of random values in a temporary folder (9 GB for the larger shape), with the demo
model's tokenizer. --before runs the jaxkv of another checkout beside this one, start by start, on
checkpoints only. All starts of a round follow each other; medians over the rounds. Seconds count
from the start of the process; cpu_s adds up all threads until all programs are there, and stays
what it is when a shared machine makes the process wait. The first tokens of all starts of a
checkpoint must be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "demo": {},
    "110M": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
    "1.1B": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    },
}
FIGURES = ("start_s", "first_token_s", "all_s", "cpu_s", "weights_s", "compile_s", "peak_ratio")
ROOT = Path(__file__).parents[1]
PROMPT = "The capital of France is"


def make_checkpoint(directory: Path, shape: dict[str, Any]) -> Path:
    """A Llama checkpoint in bfloat16 whose tensors are pieces of one random array: values do not
    matter here.
    """
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    from jaxkv.models.families import read_config, read_family

    directory.mkdir(parents=True)
    config = {
        "model_type": "llama",
        "vocab_size": 32000,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
    } | shape
    (directory / "config.json").write_text(json.dumps(config))
    spec, layout = read_family(read_config(directory))
    leaves = {leaf.source: leaf.info.shape for leaf in layout.top.values() if leaf.same_as is None}
    for layer in range(spec.num_layers):
        leaves |= {
            leaf.source.format(layer=layer): leaf.info.shape for leaf in layout.layers[0].values()
        }
    values = (0.02 * np.random.default_rng(0).standard_normal(2**20)).astype(ml_dtypes.bfloat16)
    save_file(
        {name: np.resize(values, size) for name, size in leaves.items()},
        directory / "model.safetensors",
    )
    return directory


def start_here(directory: str) -> None:
    """In a fresh process: makes the engine and prints its figures as JSON. The process imports
    nothing that the engine does not.
    """
    import jax
    import numpy as np

    from jaxkv import LLM, SamplingParams
    from jaxkv.build import model

    measured: dict[str, Any] = {"weights_s": 0.0, "peak_ratio": 0.0}

    def timed(load: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            jax.block_until_ready(
                jax.device_put(np.zeros(9), jax.devices()[0])
            )  # what JAX itself takes comes first
            before, started = memory("VmRSS"), time.perf_counter()
            weights = load(*args, **kwargs)
            measured["weights_s"] = time.perf_counter() - started
            num_bytes = sum(x.nbytes for x in jax.tree.leaves(weights))
            measured["peak_ratio"] = (memory("VmHWM") - before) / num_bytes
            return weights

        return run

    model.load_weights, model.load_converted = (
        timed(model.load_weights),
        timed(model.load_converted),
    )
    llm = LLM(directory or None, tokenizer=model.DEMO if directory else None)
    measured["start_s"] = time.time()
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    tokens: list[int] = []
    for output in llm.stream(PROMPT, params):
        measured.setdefault("first_token_s", time.time())
        tokens += output.outputs[0].token_ids
    # An earlier version compiles everything before the constructor returns.
    if hasattr(llm, "wait_until_compiled"):
        llm.wait_until_compiled()
    measured |= {"all_s": time.time(), "cpu_s": time.process_time(), "compile_s": llm.compile_s}
    print(json.dumps(measured | {"tokens": tokens}))


def memory(name: str) -> int:
    """Bytes of this process by their name in /proc."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def start(directory: str, cache: Path, root: Path) -> dict[str, Any]:
    """Starts the jaxkv in `root` in a process of its own."""
    settings = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE")
    env = {name: value for name, value in os.environ.items() if name not in settings}
    env |= {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(root)}
    started = time.time()
    done = subprocess.run(
        [sys.executable, __file__, "--start", directory],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    since = {name: figures[name] - started for name in ("start_s", "first_token_s", "all_s")}
    return figures | since


def measure(name: str, rounds: int, work: Path, sides: dict[str, Path]) -> list[dict[str, Any]]:
    forms = {"source": ""}  # the demo model
    if SHAPES[name]:
        from jaxkv.weights.orbax import convert

        source = make_checkpoint(work / "source", SHAPES[name])
        if len(sides) == 1:
            convert(source, work / "converted", dtype="bfloat16")
        # Another version may not read what this one has converted.
        forms = {"source": str(work / "source")}
        if len(sides) == 1:
            forms["converted"] = str(work / "converted")
    runs: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for _ in range(rounds):
        for state in ("cold", "warm"):
            for form, directory in forms.items():
                for side, root in sides.items():
                    cache = work / "cache" / side / form
                    if state == "cold":
                        shutil.rmtree(cache, ignore_errors=True)
                    found = start(directory, cache, root)
                    runs.setdefault((form, state, side), []).append(found)
    rows = []
    for (form, state, side), results in runs.items():
        said = {tuple(run["tokens"]) for run in [*results, *runs[form, "cold", side]]}
        if len(said) > 1:
            raise RuntimeError(f"{name}, {form}, {side}: starts gave different tokens: {said}")
        medians = {
            figure: round(statistics.median(run[figure] for run in results), 3)
            for figure in FIGURES
        }
        rows.append(
            {"model": name, "form": form, "cache": state, "side": side, "rounds": rounds} | medians
        )
        print(
            f"{name:5s} {form:10s}{state:5s}{side:7s}"
            + "".join(f"{medians[figure]:14.2f}" for figure in FIGURES),
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(SHAPES), help="of " + ", ".join(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--json", type=Path, help="file to write; what is there for other versions of JAX stays"
    )
    parser.add_argument(
        "--before", type=Path, metavar="DIR", help="another checkout, to be started beside this one"
    )
    parser.add_argument("--start", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.start is not None:
        start_here(args.start)
        return
    sides = {"after": ROOT} if args.before is None else {"before": args.before, "after": ROOT}
    machine = {
        "python": platform.python_version(),
        "jax": metadata.version("jax"),
        "cores": os.cpu_count(),
    }
    head = "".join(f"{figure:>14s}" for figure in FIGURES)
    print(f"{machine}\nmodel form      cache side  {head}")
    rows = []
    for name in args.models.split(","):
        with tempfile.TemporaryDirectory() as work:
            rows += measure(name, args.rounds, Path(work), sides)
    if args.json:
        kept = json.loads(args.json.read_text()) if args.json.exists() else {}
        args.json.write_text(
            json.dumps(kept | {machine["jax"]: machine | {"rows": rows}}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
