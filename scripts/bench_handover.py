"""What a stream of long prompts does to the outputs beside it, with prompts and outputs on one
engine and on two.

    python scripts/bench_handover.py --json docs/benchmarks/handover.json

A random Llama checkpoint, given token ids. Some requests generate, and beside them one long prompt
after the other is computed, the next one as soon as one is done, until there were --prompts of
them. Engines take turns in one process: "joint" computes a prompt in one step, "chunked" in steps
of --chunk tokens, "handover" on another device (`LLM(disaggregate=(1, 1))`). Each has --rounds of
them, after one that does not count.

gap: the time from one delivery of tokens to a request to the next, over all requests that generate
while there are prompts. A delivery may be several tokens (a decode loop), so tokens per second
stand beside it. On a CPU the two devices are virtual: both engines share its cores.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from bench_generate import environment
from bench_models import SHAPES, make_checkpoint

from jaxkv import LLM, SamplingParams
from jaxkv.testing import front_of, intake_of


class Side:
    """An engine and what was measured with it."""

    def __init__(self, directory: Path, options: argparse.Namespace, **changes: Any) -> None:
        longest = max(options.prompt_len + 1, 16 + options.output_len)
        limits = {"max_model_len": longest, "max_num_seqs": options.rows + 1}
        self.llm = LLM(directory, skip_tokenizer_init=True, **limits, **changes)
        self.llm.wait_until_compiled()
        self.options = options
        self.rng = np.random.default_rng(0)
        self.gaps: list[float] = []
        self.num_tokens, self.seconds, self.num_prompts = 0, 0.0, 0

    def submit(self, length: int, num_new: int) -> Any:
        ids = self.rng.integers(3, 256, length).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
        (submission,) = intake_of(self.llm).accept([{"prompt_token_ids": ids}], [params], None)
        front_of(self.llm).add(submission)
        return submission.samples[0]

    def round(self) -> None:
        front, options = front_of(self.llm), self.options
        rows = [self.submit(16, options.output_len) for _ in range(options.rows)]
        while not all(row.num_new for row in rows):
            front.step()
        begin = time.perf_counter()
        seen = {row: (row.num_new, begin) for row in rows}
        first, num_prompts, long = sum(row.num_new for row in rows), 0, None
        while num_prompts < options.prompts:
            if long is None:
                long = self.submit(options.prompt_len, 1)
            front.step()
            now = time.perf_counter()
            for row in rows:
                count, before = seen[row]
                if row.num_new > count:
                    self.gaps.append(now - before)
                    seen[row] = (row.num_new, now)
            if long.finish_reason is not None:
                num_prompts, long = num_prompts + 1, None
            if any(row.finish_reason is not None for row in rows):
                break
        self.seconds += time.perf_counter() - begin
        self.num_tokens += sum(row.num_new for row in rows) - first
        self.num_prompts += num_prompts
        while front.has_work:
            front.step()

    def figures(self) -> dict[str, float]:
        gaps = np.array(self.gaps) * 1e3
        return {
            "gap_p50_ms": float(np.percentile(gaps, 50)),
            "gap_p99_ms": float(np.percentile(gaps, 99)),
            "gap_max_ms": float(gaps.max()),
            "output_tokens_per_s": self.num_tokens / self.seconds,
            "prompts_per_s": self.num_prompts / self.seconds,
            "num_gaps": len(gaps),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--shape", default="110m", choices=sorted(SHAPES))
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--prompt-len", type=int, default=1000)
    parser.add_argument("--output-len", type=int, default=400)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2)
    whole = options.prompt_len + options.rows + 1
    with tempfile.TemporaryDirectory() as directory:
        path = make_checkpoint(Path(directory), options.shape, seed=0)
        sides = {
            "joint": Side(path, options, max_num_batched_tokens=whole),
            "chunked": Side(path, options, max_num_batched_tokens=options.chunk),
            "handover": Side(path, options, max_num_batched_tokens=whole, disaggregate=(1, 1)),
        }
        for number in range(1 + options.rounds):
            for side in sides.values():
                if number == 1:
                    side.gaps, side.num_tokens, side.seconds, side.num_prompts = [], 0, 0.0, 0
                side.round()
    found = {name: side.figures() for name, side in sides.items()}
    for name, figures in found.items():
        print(f"{name:9}", "  ".join(f"{key} {value:.1f}" for key, value in figures.items()))
    if options.json:
        asked = {key: str(value) for key, value in vars(options).items() if key != "json"}
        result = {"options": asked, "environment": environment(), "sides": found}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
