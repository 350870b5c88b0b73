"""Measures conversations that take turns in a pool for a quarter of them, with and without host
memory for the rest, alternating in one process, and writes docs/benchmarks/host_memory.json.

    python scripts/bench_host_memory.py

The demo model. 32 conversations, 8 turns, each 48 random tokens and 16 generated ones.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path

import jax
import numpy as np

from jaxkv import LLM, SamplingParams
from jaxkv.version import VERSION

ROOT = Path(__file__).parents[1]
TALKS, TURNS, ASKED, SAID, ROUNDS = 32, 8, 48, 16, 3
PAGE = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=SAID, ignore_eos=True, detokenize=False)


def run(llm: LLM) -> dict[str, float]:
    """Runs all turns; returns tokens per second, asked and generated, and what was found."""
    rng = np.random.default_rng(0)
    llm.reset_prefix_cache()
    talks: list[list[int]] = [[] for _ in range(TALKS)]
    start, num_found, num_asked = time.perf_counter(), 0, 0
    for _ in range(TURNS):
        for talk in talks:
            talk += rng.integers(3, 2000, ASKED).tolist()
        prompts = [{"prompt_token_ids": talk} for talk in talks]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        for talk, output in zip(talks, outputs, strict=True):
            num_found += output.num_cached_tokens
            num_asked += len(talk)
            talk += output.outputs[0].token_ids
    taken = time.perf_counter() - start
    return {
        "tokens/s": TALKS * TURNS * (ASKED + SAID) / taken,
        "prompt tokens found": num_found / num_asked,
    }


def main() -> None:
    longest = -(-TURNS * (ASKED + SAID) // PAGE)
    options = {
        "max_num_seqs": 8,
        "max_model_len": 1024,
        "block_size": PAGE,
        "num_gpu_blocks_override": TALKS * longest // 4,
    }
    sides = {"without": LLM(**options), "with": LLM(**options, kv_host_bytes=2**30)}
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for llm in sides.values():
        llm.wait_until_compiled()
        run(llm)
    for _ in range(ROUNDS):
        for side, llm in sides.items():
            found[side].append(run(llm))
    rates = {side: [one["tokens/s"] for one in runs] for side, runs in found.items()}
    report = {
        side: {
            "tokens/s, each round": [round(rate) for rate in rates[side]],
            "prompt tokens found": round(found[side][0]["prompt tokens found"], 3),
        }
        for side in sides
    }
    medians = {side: statistics.median(rates[side]) for side in sides}
    report["ratio of the medians"] = round(medians["with"] / medians["without"], 2)
    report["hardware"] = f"{os.cpu_count()} CPU cores"
    report["versions"] = {"jaxkv": VERSION, "jax": jax.__version__}
    print(json.dumps(report, indent=1))
    (ROOT / "docs/benchmarks/host_memory.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
