"""Overload for a while: twice what fits, with aborts, and nothing may be left behind.

    python scripts/soak.py --seconds 120

The built-in demo model, a pool with room for half the tokens that its rows come to have, and twice
as many requests at the engine as rows: prompts that begin alike or not, 1 to 3 samples, priorities,
stop strings, logprobs; some are aborted while they wait or run, some are streams that are closed
after a few pieces.

Pages, rows and requests are checked all the time. At the end no page may be in use, nothing may
have been traced or compiled since the first quarter of the run (the warm-up), and resident memory
must not have grown by more than --max-growth-mib since then. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
from bench_generate import environment
from bench_start import memory

from jaxkv import LLM, SamplingParams
from jaxkv.requests.request import Submission
from jaxkv.testing import engine_of, intake_of

OVERLOAD = 2
WARM_UP = 0.25
PROMPT_LEN = (1, 160)
OUTPUT_LEN = (1, 96)
PAGE_SIZE = 16


def half_the_pages(rows: int) -> int:
    """Pages for half the tokens of so many rows, whose sequences have their mean length."""
    mean_len = (sum(PROMPT_LEN) + sum(OUTPUT_LEN)) // 2
    return rows * mean_len // PAGE_SIZE // OVERLOAD


class Compilations:
    """How often JAX has traced, lowered or compiled anything since this was made."""

    def __init__(self) -> None:
        self.num_seen = 0
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event: str, duration_s: float, **about: Any) -> None:
        self.num_seen += event.startswith("/jax/core/compile/")


class Soak:
    """The engine of an LLM under random traffic. Mutable; `finish` returns what went wrong."""

    def __init__(self, *, seed: int, rows: int, step_tokens: int) -> None:
        self.rows = rows
        self.rng = random.Random(seed)
        self.compilations = Compilations()
        self.llm = LLM(
            max_num_seqs=rows,
            max_model_len=PROMPT_LEN[1] + OUTPUT_LEN[1],
            max_num_batched_tokens=step_tokens,
            block_size=PAGE_SIZE,
            num_gpu_blocks_override=half_the_pages(rows),
        )
        self.llm.wait_until_compiled()
        self.engine = engine_of(self.llm)
        self.live: list[Submission] = []
        self.counts: Counter[str] = Counter()
        self.rss_mib: list[tuple[float, float]] = []
        self.warm: dict[str, float] = {}
        words = self.llm.get_tokenizer()
        text = (
            "Once upon a time there was a little girl who liked to play in the garden with her "
            "small brown dog. "
        )
        self.beginnings = [words.encode(f"{i}. {text * 8}")[: 16 * (i + 1)] for i in range(8)]

    def run(self, seconds: float) -> None:
        """Requests for so long, and until those that then run are through."""
        started = time.monotonic()
        for turn in itertools.count():
            passed = time.monotonic() - started
            if passed > seconds:
                break
            self._turn()
            self.engine.check()
            if turn % 50 == 0:
                self.rss_mib.append((passed, memory("VmRSS") / 2**20))
            if not self.warm and passed > WARM_UP * seconds:
                self.warm = self._resources()
        self.counts["seconds"] = round(time.monotonic() - started)

    def _turn(self) -> None:
        while sum(len(submission.samples) for submission in self.live) < OVERLOAD * self.rows:
            self.live.append(self._arrival())
            self.engine.add(self.live[-1])
        if self.rng.random() < 0.1:
            self._abort()
        if self.rng.random() < 0.02:
            self._read_a_stream()
        self.engine.step()
        finished = [submission for submission in self.live if submission.is_finished]
        for submission in finished:
            self.live.remove(submission)
            self._count(submission)

    def _arrival(self) -> Submission:
        prompt, params = self._request()
        (submission,) = intake_of(self.llm).accept(
            [prompt], [params], [self.rng.choice((0, 0, 0, -1, 1))]
        )
        self.counts["arrived"] += 1
        return submission

    def _request(self) -> tuple[dict[str, Any], SamplingParams]:
        beginning = self.rng.choice(self.beginnings) if self.rng.random() < 0.5 else []
        most = PROMPT_LEN[1] - len(beginning)
        own = [self.rng.randrange(3, 2048) for _ in range(self.rng.randint(PROMPT_LEN[0], most))]
        params = SamplingParams(
            n=self.rng.choice((1, 1, 2, 3)),
            temperature=self.rng.choice((0.7, 1.0, 1.5)),
            top_p=self.rng.choice((0.9, 1.0)),
            max_tokens=self.rng.randint(*OUTPUT_LEN),
            ignore_eos=self.rng.random() < 0.5,
            stop=self.rng.choice((None, None, "the", ["girl", ". "])),
            logprobs=self.rng.choice((None, None, None, 3)),
        )
        return {"prompt_token_ids": beginning + own}, params

    def _abort(self) -> None:
        submission = self.live.pop(self.rng.randrange(len(self.live)))
        self.counts["aborted"] += 1
        self.counts["aborted while running"] += any(
            request.row is not None for request in submission.samples
        )
        self.engine.abort(submission)

    def _read_a_stream(self) -> None:
        """What a caller does who closes a stream early; the others go on meanwhile."""
        self.counts["streams closed early"] += 1
        with closing(self.llm.stream(*self._request())) as pieces:
            for _ in itertools.islice(pieces, self.rng.randint(1, 4)):
                pass

    def _count(self, submission: Submission) -> None:
        self.counts["finished"] += 1
        for request in submission.samples:
            self.counts[f"samples ended by {request.finish_reason}"] += 1
            self.counts["output tokens"] += request.num_new

    def _resources(self) -> dict[str, float]:
        programs = self.engine.programs.num_compiled
        return {
            "programs": programs,
            "compilations": self.compilations.num_seen,
            "mib": memory("VmRSS") / 2**20,
        }

    def finish(self, *, max_growth_mib: float) -> tuple[dict[str, Any], list[str]]:
        """Ends what is left; the figures, and a line for each thing that is not as it must be."""
        for submission in self.live:
            self.engine.abort(submission)
        self.engine.check()
        now, scheduler = self._resources(), self.engine.scheduler
        growth_mib = max([now["mib"], *(mib for _, mib in self.rss_mib)]) - self.warm["mib"]
        figures = dict(sorted(self.counts.items())) | {
            "finished per s": self.counts["finished"] / max(1, self.counts["seconds"]),
            "preemptions": scheduler.num_preemptions,
            "cache hit rate": scheduler.num_found / max(1, scheduler.num_looked_up),
            "pages in use": scheduler.allocator.num_used,
            "new programs": now["programs"] - self.warm["programs"],
            "new compilations": now["compilations"] - self.warm["compilations"],
            "resident MiB after warm-up": self.warm["mib"],
            "largest growth in MiB since": growth_mib,
        }
        most = {"pages in use": 0, "new programs": 0, "new compilations": 0}
        most["largest growth in MiB since"] = max_growth_mib
        bad = [
            f"{name}: {figures[name]:.1f}, at most {limit}"
            for name, limit in most.items()
            if figures[name] > limit
        ]
        return figures, bad


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--max-growth-mib", type=float, default=16)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--step-tokens", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write everything that was counted")
    return parser.parse_args()


def main() -> None:
    options = parse()
    soak = Soak(seed=options.seed, rows=options.rows, step_tokens=options.step_tokens)
    print(soak.llm.describe())
    soak.run(options.seconds)
    figures, bad = soak.finish(max_growth_mib=options.max_growth_mib)
    for name, value in figures.items():
        print(f"{name:30s}{value:12.2f}" if isinstance(value, float) else f"{name:30s}{value:9d}")
    if options.json:
        result = environment() | {
            "command": " ".join(sys.argv),
            "figures": figures,
            "breaches": bad,
        }
        options.json.write_text(
            json.dumps(result | {"resident_mib": soak.rss_mib}, indent=1) + "\n"
        )
    sys.exit("; ".join(bad) if bad else 0)


if __name__ == "__main__":
    main()
