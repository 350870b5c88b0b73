"""What quantised weights cost and save: perplexity, bytes and speed of the demo model, method by
method in one process.

    python scripts/bench_quantised.py --json docs/benchmarks/quantised.json
    python scripts/bench_quantised.py --pairs int8_dynamic 8 32

The text is code of Python's own library, whose modules differ between versions of Python: compare
methods, not versions. Seconds are the best of three runs.

--pairs decodes so many rows with one method and with bfloat16 by turns, both engines in one process
of the 110M shape: CPU seconds, which other work on the machine changes least.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import json
import platform
import textwrap
import time
from importlib import metadata
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from bench_models import make_checkpoint

from jaxkv import LLM, SamplingParams
from jaxkv.testing import model_of

METHODS = (None, "int8", "int8_dynamic", "fp8", "int4")
MODULES = (csv, heapq, textwrap, argparse, platform)
CHARACTERS, NEW_TOKENS = 4500, 96


def nll_of(llm: LLM) -> tuple[float, int]:
    """Returns the mean negative log-likelihood of the text's tokens, and how many they are."""
    texts = [Path(module.__file__ or "").read_text()[500:][:CHARACTERS] for module in MODULES]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    found = [
        next(iter(entry.values())).logprob
        for output in llm.generate(texts, params, use_tqdm=False)
        for entry in output.prompt_logprobs[1:]
    ]
    return -sum(found) / len(found), len(found)


def seconds(llm: LLM, num_rows: int) -> float:
    prompts = [{"prompt_token_ids": list(range(10, 30))}] * num_rows
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        times.append(time.perf_counter() - start)
    return min(times)


def measure(method: str | None) -> dict[str, Any]:
    llm = LLM(dtype="bfloat16", quantization=method)
    llm.wait_until_compiled()
    nll, num_tokens = nll_of(llm)
    row = {"method": method or "none", "nll": round(nll, 4), "num_tokens": num_tokens}
    row["weight_bytes"] = model_of(llm).weight_bytes
    return row | {f"rows_{n}_s": round(seconds(llm, n), 3) for n in (1, 32)}


def pairs(method: str, rows: list[int], rounds: int) -> None:
    """Prints the CPU milliseconds of a decode step behind prompts of 129 tokens, by turns."""
    with TemporaryDirectory() as folder:
        directory = make_checkpoint(Path(folder), "110m", seed=0)
        options = {"dtype": "bfloat16", "max_num_seqs": 32, "max_model_len": 256}
        options |= {"max_num_batched_tokens": 512, "skip_tokenizer_init": True}
        llms = [
            LLM(directory, quantization=one, lazy_compile=True, **options) for one in (None, method)
        ]

    def spent(llm: LLM, num_rows: int, num_tokens: int) -> float:
        # The prompts' pages are found again, but for a last token each.
        prompts = [{"prompt_token_ids": [3 + row] * 129} for row in range(num_rows)]
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        start = time.process_time()
        llm.generate(prompts, params, use_tqdm=False)
        return time.process_time() - start

    for num_rows in rows:
        found: list[list[float]] = [[], []]
        for _ in range(rounds + 1):
            for llm, of in zip(llms, found, strict=True):
                first, whole = (spent(llm, num_rows, num_tokens) for num_tokens in (1, 25))
                of.append((whole - first) / 24 * 1e3)
        plain, quantised = (median(of[1:]) for of in found)  # the first round compiles
        print(
            f"{num_rows} rows: bfloat16 {plain:.1f}, {method} {quantised:.1f} CPU ms per step, "
            f"{plain / quantised:.2f} times",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pairs", nargs="+", metavar=("METHOD", "ROWS"), help="see above")
    parser.add_argument("--rounds", type=int, default=5, help="of --pairs")
    args = parser.parse_args()
    if args.pairs:
        method, *counts = args.pairs
        if method not in METHODS or not counts or not all(map(str.isdecimal, counts)):
            parser.error(f"--pairs: expected a method and numbers of rows, got {args.pairs}")
        pairs(method, [int(count) for count in counts], args.rounds)
        return
    rows: list[dict[str, Any]] = []
    for method in METHODS:
        rows.append(measure(method))
        change = rows[-1]["nll"] / rows[0]["nll"] - 1
        print(f"{rows[-1]['method']:13} {change:+.2%} {rows[-1]}", flush=True)
    where = {"python": platform.python_version(), "jax": metadata.version("jax")}
    if args.json:
        args.json.write_text(json.dumps(where | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
