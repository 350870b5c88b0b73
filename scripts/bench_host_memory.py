"""Measures conversations that take turns in a pool for a quarter of them, with and without host
memory or a disk for the rest, alternating in one process; then the last turns of the same after a
restart, with the disk of the engine before and without. Writes docs/benchmarks/host_memory.json.

    python scripts/bench_host_memory.py

The demo model. 32 conversations, 8 turns, each 48 random tokens and 16 generated ones.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxkv import LLM, SamplingParams
from jaxkv.version import VERSION

FIGURES = Path(__file__).parents[1] / "docs/benchmarks/host_memory.json"
TALKS, TURNS, ASKED, SAID = 32, 8, 48, 16
AFTER = 2
"""Turns after the restart."""
PAGE = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=SAID, ignore_eos=True, detokenize=False)
OPTIONS = {
    "max_num_seqs": 8,
    "max_model_len": 1024,
    "block_size": PAGE,
    "num_gpu_blocks_override": TALKS * -(-TURNS * (ASKED + SAID) // PAGE) // 4,
}
Result = dict[str, float]


def turns(llm: LLM, talks: list[list[int]], first: int, end: int) -> Result:
    """Runs these turns of all talks; returns tokens per second, asked and generated, and what was
    found of the pages that the turns before have filled.
    """
    start, num_found, num_there, num_asked = time.perf_counter(), 0, 0, 0
    for turn in range(first, end):
        rng = np.random.default_rng(turn)
        for talk in talks:
            # The last token that was generated is in no page yet.
            num_there += max(0, len(talk) - 1) // PAGE * PAGE
            talk += rng.integers(3, 2000, ASKED).tolist()
        prompts = [{"prompt_token_ids": talk} for talk in talks]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        for talk, output in zip(talks, outputs, strict=True):
            num_found += output.num_cached_tokens
            num_asked += len(talk)
            talk += output.outputs[0].token_ids
    taken = time.perf_counter() - start
    return {
        "tokens/s": TALKS * (end - first) * (ASKED + SAID) / taken,
        "prompt tokens found": num_found / num_asked,
        "page tokens found": num_found / max(1, num_there),
    }


def run(llm: LLM) -> Result:
    """Runs all turns with an empty cache."""
    llm.reset_prefix_cache()
    return turns(llm, [[] for _ in range(TALKS)], 0, TURNS)


def report(runs: dict[str, list[Result]], *whats: str) -> dict[str, Any]:
    """Returns what stands in the file of one comparison, the first side of which is without."""
    rates = {side: [one["tokens/s"] for one in own] for side, own in runs.items()}
    found: dict[str, Any] = {
        side: {
            "tokens/s, each round": [round(rate) for rate in rates[side]],
            **{what: round(own[0][what], 3) for what in whats},
        }
        for side, own in runs.items()
    }
    without, *others = (statistics.median(own) for own in rates.values())
    found["ratio of the medians"] = [round(one / without, 2) for one in others]
    return found


def alternate(folder: Path, num_rounds: int) -> dict[str, list[Result]]:
    """Runs all turns on each side in turn."""
    sides = {
        "without": LLM(**OPTIONS),
        "kv_host_bytes": LLM(**OPTIONS, kv_host_bytes=2**30),
        "kv_disk": LLM(**OPTIONS, kv_disk=folder, kv_disk_bytes=2**31),
    }
    for llm in sides.values():
        llm.wait_until_compiled()
        run(llm)
    runs: dict[str, list[Result]] = {side: [] for side in sides}
    for _ in range(num_rounds):
        for side, llm in sides.items():
            runs[side].append(run(llm))
    for llm in sides.values():
        llm.shutdown()
    return runs


def restart(folder: Path, num_rounds: int) -> dict[str, list[Result]]:
    """Runs the last turns in a new engine on each side, several times, where an engine before has
    run the others.
    """
    first = LLM(**OPTIONS, kv_disk=folder, kv_disk_bytes=2**31)
    talks: list[list[int]] = [[] for _ in range(TALKS)]
    turns(first, talks, 0, TURNS - AFTER)
    first.shutdown()
    del first
    runs: dict[str, list[Result]] = {"without": [], "kv_disk": []}
    for n in range(num_rounds):
        for side, own in runs.items():
            copy = folder.with_name(f"copy{n}")  # what this round writes is not for the next one
            shutil.copytree(folder, copy)
            disk = {"kv_disk": copy, "kv_disk_bytes": 2**31} if side == "kv_disk" else {}
            llm = LLM(**OPTIONS, **disk)
            llm.wait_until_compiled()
            there = next(one for one in llm.get_metrics("") if one.name == "kv_disk_pages")
            # Whatever is slow for the first time; not of these talks.
            turns(llm, [[] for _ in range(TALKS)], TURNS, TURNS + 1)
            own.append(turns(llm, [list(talk) for talk in talks], TURNS - AFTER, TURNS))
            # The last token that was generated is in no page.
            filled = sum((len(talk) - 1) // PAGE for talk in talks)
            own[-1]["pages there"] = getattr(there, "value", 0) / filled
            llm.shutdown()
            del llm
            shutil.rmtree(copy)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="of each side (default: %(default)s)")
    parser.add_argument("--json", type=Path, default=FIGURES, help="another file for the figures")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        whole = report(alternate(Path(folder, "whole"), args.rounds), "prompt tokens found")
        print(json.dumps(whole, indent=1), flush=True)
        last = restart(Path(folder, "restart"), args.rounds)
        after = report(last, "pages there", "page tokens found")
    found = {
        "all turns": whole,
        f"the last {AFTER} turns after a restart": after,
        "hardware": f"{os.cpu_count()} CPU cores",
        "versions": {"jaxkv": VERSION, "jax": jax.__version__},
    }
    print(json.dumps(found, indent=1))
    args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
