"""Host time of the engine per decode step: 256 greedy sequences, loops of 8 steps, and a model that
takes no time.

    python scripts/bench_host.py --json docs/benchmarks/host.json

The engine is the real one: scheduler, allocator, prefix cache, row tables, text. Only the compiled
programs are stubs that return random tokens at once, and their time is not counted. A call of the
engine launches a step or loop and reads the one before it; calls in which either was a step that
computed new prompts are not counted. Rows whose last tokens are coming are not in the next loop.

Lines: sequences that begin together; such of every age, some of which end in each loop, a new
request taking each free place; the same with text. Each with Python's garbage collector on and off,
in turns. A dispatch is one decode loop; its time is divided by the loop's steps. Parts: plan
(scheduler, allocator, prefix index), inputs (row tables, packed arrays), outputs of the loop before
(tokens, ends, text, pages given back).
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from bench_generate import environment

from jaxkv.build.model import DEMO, Model
from jaxkv.build.tokenizer import load_tokenizer
from jaxkv.config import DECODE_STEPS, EngineConfig, SamplingParams
from jaxkv.engine.engine import Engine
from jaxkv.engine.plan import LoopPlan, StepPlan
from jaxkv.kv.codecs import get_codec
from jaxkv.kv.layout import HeadMajorLayout
from jaxkv.kv.state import PagedKV, empty_store
from jaxkv.models.families import read_config, read_family
from jaxkv.models.spec import ModelSpec
from jaxkv.ops.sampling import NO_TOKEN, NUM_LOGPROBS, Sampled, Scores
from jaxkv.programs.buckets import drawn_rows, row_buckets, token_buckets
from jaxkv.programs.step import Newest
from jaxkv.requests.intake import Intake
from jaxkv.requests.request import Submission
from jaxkv.weights.tree import Weights

TARGET_US = {"p50": 150, "p99": 500}
PARTS = ("plan", "inputs", "outputs")
NUM_DRAWN = 64


@dataclass(slots=True)
class Clock:
    """When the parts of the present step began, in seconds, and how long the stub took."""

    planned: float = 0.0
    called: float = 0.0
    stub_s: float = 0.0
    plan: LoopPlan | StepPlan | None = None


class StubPrograms:
    """`Programs` whose steps and loops sample random tokens at once and leave the KV state
    alone.
    """

    placement = None
    num_compiled = num_loaded = 0
    compile_s = waited_s = 0.0

    def __init__(self, config: EngineConfig, spec: ModelSpec, clock: Clock) -> None:
        self.spec = spec
        self.is_compiling = False
        self.token_buckets = token_buckets(config.max_num_batched_tokens)
        self.row_buckets = row_buckets(config.max_num_seqs)
        self.drawn_rows = drawn_rows(config.max_num_seqs)
        self._max_rows = config.max_num_seqs
        self._clock = clock
        self._num_calls = 0
        shape = (NUM_DRAWN, config.decode_steps, config.max_num_seqs)
        self._drawn = np.random.default_rng(0).integers(3, spec.vocab_size, shape, np.int32)

    def num_step_rows(self, num_tokens: int) -> int:
        return min(self._max_rows, num_tokens)

    def given(self, weights: Weights, num_tokens: int) -> Weights:
        return weights

    def step(self, num_tokens: int) -> Callable[..., tuple]:
        def run(_weights: Any, kv: PagedKV, _newest: Newest, _batch: Any) -> tuple:
            return kv, None, None, None

        return run

    def draw(self, num_rows: int) -> Callable[..., tuple]:
        def run(_head: Any, _last: None, newest: Newest, sampling: Any) -> tuple:
            return newest, self._sampled(np.ones_like(sampling.top_k_B), (), 1)

        return run

    def loop(self, num_rows: int) -> Callable[..., tuple]:
        def run(
            _weights: Any, kv: PagedKV, newest: Newest, rows: Any, _sampling: Any, n: np.int32
        ) -> tuple:
            width = self._drawn.shape[1]
            sampled = self._sampled(np.minimum(rows.budget_B, n), (width,), width)
            return kv, newest, rows, sampled, None

        return run

    def _sampled(self, budget_B: np.ndarray, lead: tuple[int, ...], num_steps: int) -> Sampled:
        """Tokens of `num_steps` steps, none past a row's budget; arrays are [*lead, B]."""
        self._clock.called = time.perf_counter()
        drawn = self._drawn[self._num_calls % NUM_DRAWN, :num_steps, : len(budget_B)]
        self._num_calls += 1
        token = np.where(np.arange(num_steps)[:, None] < budget_B, drawn, NO_TOKEN)
        shape = (*lead, len(budget_B))
        none, best = np.zeros(shape, np.float32), np.zeros((*shape, NUM_LOGPROBS), np.float32)
        scores = Scores(none, none.astype(np.int32), best.astype(np.int32), best)
        out = Sampled(token.reshape(shape), scores)
        self._clock.stub_s = time.perf_counter() - self._clock.called
        return out


@dataclass(slots=True)
class Figures:
    """Of one line: microseconds per step of every decode loop, in all and by part, and what else
    was seen.
    """

    total_us: list[float] = field(default_factory=list)
    part_us: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    live_len: list[float] = field(default_factory=list)
    num_rows: list[int] = field(default_factory=list)
    num_finished: int = 0
    gc_ms: dict[int, list[float]] = field(
        default_factory=lambda: {generation: [] for generation in range(3)}
    )

    def summary(self) -> dict[str, Any]:
        shown = {"total": self.total_us, **self.part_us}
        return {
            "num_loops": len(self.total_us),
            "mean_live_len": float(np.mean(self.live_len)),
            "mean_rows": float(np.mean(self.num_rows)),
            "num_finished": self.num_finished,
            "us_per_step": {name: spread(values) for name, values in shown.items()},
            "collections": {
                str(generation): {
                    "num": len(values),
                    "sum_ms": sum(values),
                    "max_ms": max(values, default=0.0),
                }
                for generation, values in self.gc_ms.items()
            },
        }


def spread(values: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(values, [50, 99])
    return {
        "p50": float(p50),
        "p99": float(p99),
        "mean": float(np.mean(values)),
        "max": max(values),
    }


class Load:
    """One engine that always has `rows` sequences, and their places filled again before each
    loop.
    """

    def __init__(
        self, options: argparse.Namespace, *, detokenize: bool = False, together: bool = False
    ) -> None:
        self.rng = np.random.default_rng(options.seed)
        self.options = options
        self.detokenize = detokenize
        self.clock = Clock()
        self.config = engine_config(options)
        model = demo_model()
        self.intake = Intake(model, self.config, cache_root=lambda: b"bench", share_prefixes=True)
        self.engine = make_engine(self.config, model.spec, self.clock)
        for _ in range(options.rows):
            # If not together, as in the middle of a long run: requests of every age.
            self.engine.add(self.request(part_done=0.0 if together else self.rng.random()))

    @property
    def utilization(self) -> float:
        """Held / allocated slots of the KV cache so far; last pages and what a loop may write count
        as allocated.
        """
        return next(
            metric.value
            for metric in self.engine.metrics()
            if metric.name == "kv_cache_utilization"
        )

    def request(self, *, part_done: float = 0.0) -> Submission:
        low, high = self.options.prompt_len
        prompt_len = int(self.rng.integers(low, high + 1))
        output_len = self.options.output_len
        done = int(part_done * output_len)
        tokens = self.rng.integers(
            3, self.engine.programs.spec.vocab_size, prompt_len + done
        ).tolist()
        params = SamplingParams(
            temperature=0.0,
            max_tokens=output_len - done,
            ignore_eos=True,
            detokenize=self.detokenize,
        )
        (submission,) = self.intake.accept([{"prompt_token_ids": tokens}], [params])
        return submission

    def run(self, num_loops: int, figures: Figures) -> None:
        """Takes steps until `num_loops` more decode loops are in `figures`."""
        until, before = len(figures.total_us) + num_loops, None
        while len(figures.total_us) < until:
            started = time.perf_counter()
            got = self.engine.step()
            ended = time.perf_counter()
            # It launches one and reads the one before.
            if isinstance(self.clock.plan, LoopPlan) and isinstance(before, LoopPlan):
                self._note(figures, started, ended)
            before = self.clock.plan
            finished = [request for request in got if request.finish_reason is not None]
            figures.num_finished += len(finished)
            for _ in finished:
                self.engine.add(self.request())

    def _note(self, figures: Figures, started: float, ended: float) -> None:
        clock, scale = self.clock, 1e6 / self.config.decode_steps
        returned = clock.called + clock.stub_s
        parts = (clock.planned - started, clock.called - clock.planned, ended - returned)
        for name, part_s in zip(PARTS, parts, strict=True):
            figures.part_us[name].append(part_s * scale)
        figures.total_us.append((ended - started - clock.stub_s) * scale)
        figures.num_rows.append(len(clock.plan.work))
        figures.live_len.append(
            float(np.mean([request.hold.handle().length for request in clock.plan.requests]))
        )


def engine_config(options: argparse.Namespace) -> EngineConfig:
    longest = options.prompt_len[1] + options.output_len
    return EngineConfig(
        max_model_len=longest,
        max_num_seqs=options.rows,
        max_num_batched_tokens=max(2048, options.rows),
        block_size=options.block_size,
        num_pages=options.rows * -(-longest // options.block_size),
        decode_steps=DECODE_STEPS,
        seed=0,
    )


def demo_model() -> Model:
    """The demo model's vocabulary and tokenizer; its weights are not needed."""
    spec, layout = read_family(read_config(DEMO))
    return Model(
        directory=DEMO,
        spec=spec,
        layout=layout,
        stored_dtype=None,
        weights={},
        tokenizer=load_tokenizer(DEMO),
        generation={},
        eos_ids=frozenset({1}),
        eos_id=1,
    )


def make_engine(config: EngineConfig, spec: ModelSpec, clock: Clock) -> Engine:
    """With a KV state of one page, since nothing reads it, and a scheduler that tells the clock
    when it has planned.
    """
    codec = get_codec("float32", platform="cpu")
    layout = HeadMajorLayout(num_kv_heads=1, head_dim=8, page_size=config.block_size, codec=codec)
    kv = PagedKV((empty_store(num_layers=1, layout=layout, num_pages=1),))
    programs: Any = StubPrograms(config, spec, clock)
    weights: Any = {"norm": None, "embed": None}  # the stub looks at none
    engine = Engine(weights, kv, programs, config, make_kv=lambda: kv, decode_token=None)
    plan = engine.scheduler.plan

    def planned() -> LoopPlan | StepPlan | None:
        clock.plan = plan()
        clock.planned = time.perf_counter()
        return clock.plan

    engine.scheduler.plan = planned
    return engine


@contextmanager
def collector(figures: Figures, *, enabled: bool) -> Iterator[None]:
    """Python's garbage collector on or off, and what it takes."""
    started = 0.0

    def note(phase: str, about: dict[str, int]) -> None:
        nonlocal started
        if phase == "start":
            started = time.perf_counter()
        else:
            figures.gc_ms[about["generation"]].append((time.perf_counter() - started) * 1e3)

    gc.collect()
    if not enabled:
        gc.disable()
    gc.callbacks.append(note)
    try:
        yield
    finally:
        gc.callbacks.remove(note)
        gc.enable()


def plain_loop_ns() -> float:
    """Nanoseconds per round of a loop that adds and stores: how fast this machine runs Python at
    the moment, the median of seven. That of a virtual machine may be half of what it was a minute
    ago.
    """
    seen, kept = [], {}
    for _ in range(7):
        started, total = time.perf_counter(), 0
        for i in range(100_000):
            total += i
            kept[i & 1023] = total
        seen.append((time.perf_counter() - started) * 1e4)
    return float(np.median(seen))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every line's figures, in turns of a few loops."""
    loads = {
        "together": Load(options, together=True),
        "tokens": Load(options),
        "text": Load(options, detokenize=True),
    }
    lines = {(name, state): Figures() for name in loads for state in ("gc on", "gc off")}
    for load in loads.values():
        load.run(2, Figures())
    for turn in range(options.turns):
        num_loops = (
            options.loops * (turn + 1) // options.turns - options.loops * turn // options.turns
        )
        for (name, state), figures in lines.items():
            with collector(figures, enabled=state == "gc on"):
                loads[name].run(num_loops, figures)
    for load in loads.values():
        load.engine.check()
    return {
        ", ".join(line): figures.summary() | {"kv_cache_utilization": loads[line[0]].utilization}
        for line, figures in lines.items()
    }


def table(lines: dict[str, Any]) -> str:
    rows = [
        (
            f"{'microseconds per step':24s}{'p50':>9s}{'p99':>9s}{'mean':>9s}{'max':>9s}  "
            f"collections: number, longest"
        )
    ]
    for name, line in lines.items():
        seen = [f"{of['num']} ({of['max_ms']:.1f} ms)" for of in line["collections"].values()]
        for part, of in line["us_per_step"].items():
            values = "".join(f"{of[key]:9.1f}" for key in ("p50", "p99", "mean", "max"))
            label = name if part == "total" else "  " + part
            rows.append(f"{label:24s}{values}  {', '.join(seen)}".rstrip())
            seen = []
    return "\n".join(rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--loops", type=int, default=400, help="of each line")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument(
        "--prompt-len", type=int, nargs=2, default=(256, 768), metavar=("LOW", "HIGH")
    )
    parser.add_argument("--output-len", type=int, default=512)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write everything that was measured")
    return parser.parse_args()


def main() -> None:
    options = parse()
    jax.config.update("jax_platforms", "cpu")
    result = environment() | {"command": " ".join(sys.argv), "target_us_per_step": TARGET_US}
    before = plain_loop_ns()
    result["lines"] = measure(options)
    result["plain_loop_ns"] = before, plain_loop_ns()
    first = result["lines"]["tokens, gc on"]
    print(
        f"{options.rows} rows ({first['mean_rows']:.0f} in a loop), loops of {DECODE_STEPS} steps, "
        f"{first['mean_live_len']:.0f} tokens live per row, {first['kv_cache_utilization']:.1%} "
        f"of slots held"
    )
    print(table(result["lines"]))
    print(
        "a round of a plain loop, before and after: "
        + ", ".join(f"{ns:.0f} ns" for ns in result["plain_loop_ns"])
    )
    for line in ("together, gc on", "tokens, gc on"):
        met = result["lines"][line]["us_per_step"]["total"]
        print(
            f"{line}: "
            + ", ".join(
                f"{name} {met[name]:.0f} us (target {most})" for name, most in TARGET_US.items()
            )
        )
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
