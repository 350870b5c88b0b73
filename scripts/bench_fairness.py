"""Time between tokens of requests that decode while long prompts come in, for several token budgets
of a step.

    python scripts/bench_fairness.py --json docs/benchmarks/fairness.json

Decode rows are in every step and prompts fill what is left of its budget (max_num_batched_tokens),
so between two tokens of a request lies at most one full step, however long the prompts beside it
are. Some requests decode all the time; then the same with one prompt of --long tokens in the engine
at any time. For each budget: the time between two deliveries of tokens to a decoding request
without (a loop of 8 steps each) and with long prompts, the most steps of the engine between two,
and the time of a prompt that fills one step, alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from bench_generate import environment
from bench_models import SHAPES, make_checkpoint

from jaxkv import LLM, SamplingParams
from jaxkv.requests.request import Request, Submission
from jaxkv.testing import engine_of, intake_of


class Load:
    """An engine with `rows` requests that decode, and nothing shared between prompts."""

    def __init__(self, directory: Path, options: argparse.Namespace, budget: int) -> None:
        self.options = options
        self.rng = np.random.default_rng(options.seed)
        self.llm = LLM(
            directory,
            skip_tokenizer_init=True,
            max_model_len=2048,
            max_num_seqs=options.rows + 1,
            max_num_batched_tokens=budget,
            enable_prefix_caching=False,
        )
        self.llm.wait_until_compiled()
        self.engine = engine_of(self.llm)

    def add(self, prompt_len: int, output_len: int) -> Submission:
        tokens = self.rng.integers(3, SHAPES[self.options.shape]["vocab_size"], prompt_len).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        (submission,) = intake_of(self.llm).accept([{"prompt_token_ids": tokens}], [params])
        self.engine.add(submission)
        return submission

    def gaps(self, *, long: bool) -> tuple[list[float], int]:
        """Seconds between deliveries, of all decoding requests, after the first of each; the most
        steps between two.
        """
        decoding = [self.add(32, self.options.output_len) for _ in range(self.options.rows)]
        last: dict[Request, tuple[float, int]] = {}
        gaps, beside, most, num_steps = [], None, 0, 0
        while not all(submission.is_finished for submission in decoding):
            if long and len(last) == len(decoding) and (beside is None or beside.is_finished):
                beside = self.add(self.options.long, 1)
            got, now = self.engine.step(), time.perf_counter()
            num_steps += 1
            for request in got:
                if request.params.max_tokens == self.options.output_len:
                    if request in last:
                        gaps.append(now - last[request][0])
                        most = max(most, num_steps - last[request][1])
                    last[request] = now, num_steps
        if beside is not None:
            self.engine.abort(beside)
        return gaps, most

    def full_step_s(self, budget: int) -> float:
        """The time of one step of as many prompt tokens as it may have, the shortest of five."""
        seen = []
        for _ in range(5):
            submission, started = self.add(budget, 1), time.perf_counter()
            while not submission.is_finished:
                self.engine.step()
            seen.append(time.perf_counter() - started)
        return min(seen)


def measure(directory: Path, options: argparse.Namespace, budget: int) -> dict[str, Any]:
    load = Load(directory, options, budget)
    load.gaps(long=True)
    (alone, _), (beside, most) = load.gaps(long=False), load.gaps(long=True)
    load.engine.check()
    return {
        "full_step_ms": load.full_step_s(budget) * 1e3,
        "alone_ms": spread(alone),
        "beside_long_prompts_ms": spread(beside),
        "most_steps_between_tokens": most,
    }


def spread(gaps: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(gaps, [50, 99]) * 1e3
    return {"p50": float(p50), "p99": float(p99), "max": max(gaps) * 1e3}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="110m")
    parser.add_argument(
        "--budgets", type=int, nargs="+", default=(128, 512, 1024), metavar="TOKENS"
    )
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--long", type=int, default=1900, help="tokens of each long prompt")
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--checkpoint", type=Path, help="where to write or find it (default: a temporary directory)"
    )
    parser.add_argument("--json", type=Path, help="write everything that was measured")
    return parser.parse_args()


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as scratch:
        directory = make_checkpoint(
            options.checkpoint or Path(scratch) / "model", options.shape, seed=options.seed
        )
        lines = {str(budget): measure(directory, options, budget) for budget in options.budgets}
    titles = (
        ("ms", 8),
        ("full step", 12),
        ("alone p50", 12),
        ("p99", 10),
        ("beside p50", 12),
        ("p99", 10),
        ("max", 10),
    )
    print("".join(f"{title:>{width}s}" for title, width in (*titles, ("steps", 7))))
    for budget, line in lines.items():
        alone, beside = line["alone_ms"], line["beside_long_prompts_ms"]
        shown = [(line["full_step_ms"], 12), (alone["p50"], 12), (alone["p99"], 10)]
        shown += [(beside["p50"], 12), (beside["p99"], 10), (beside["max"], 10)]
        values = "".join(f"{value:{width}.1f}" for value, width in shown)
        print(f"{budget:>8s}{values}{line['most_steps_between_tokens']:7d}")
    if options.json:
        result = environment() | {"command": " ".join(sys.argv), "budgets": lines}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
