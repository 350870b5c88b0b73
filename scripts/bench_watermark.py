"""How often requests are preempted, by the part of the pool that admission leaves free
(`scheduler.WATERMARK`).

    python scripts/bench_watermark.py

The real scheduler, allocator and prefix cache with programs that take no time (those of
bench_host.py), on a pool that is too small for its rows. Each line runs the same requests to their
end, with the prefix cache reset before every step, so that a preempted request loses everything.
Tokens computed per token needed is what preemption costs; fewer rows in a step are what a higher
watermark costs.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
from bench_host import Clock, demo_model, engine_config, make_engine

from jaxkv.config import SamplingParams
from jaxkv.engine import scheduler
from jaxkv.requests.intake import Intake


def run(options: argparse.Namespace, watermark: float) -> str:
    scheduler.WATERMARK = watermark
    whole = engine_config(options)
    config = replace(whole, num_pages=int(whole.num_pages * options.pool))
    model, rng = demo_model(), np.random.default_rng(options.seed)
    engine = make_engine(config, model.spec, Clock())
    intake = Intake(model, config, cache_root=lambda: b"bench", share_prefixes=False)
    needed = 0
    for _ in range(options.requests):
        prompt_len, output_len = (
            int(rng.integers(*options.prompt_len)),
            int(rng.integers(1, options.output_len)),
        )
        prompt = {"prompt_token_ids": rng.integers(3, model.spec.vocab_size, prompt_len).tolist()}
        params = SamplingParams(
            temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False
        )
        engine.add(intake.accept([prompt], [params])[0])
        needed += prompt_len + output_len - 1
    computed, rows, num_steps = 0, 0, 0
    launched = engine.scheduler.launched

    def counted(plan: scheduler.StepPlan | scheduler.LoopPlan) -> list:
        nonlocal computed, rows, num_steps
        computed += sum(count for _, count in plan.work)
        rows, num_steps = rows + len(engine.scheduler.running), num_steps + 1
        return launched(plan)

    engine.scheduler.launched = counted
    while engine.has_work:
        engine.scheduler.allocator.forget()
        engine.step()
    engine.check()
    metrics = {metric.name: metric for metric in engine.metrics()}
    preempted, held = (
        engine.scheduler.num_preemptions / options.requests,
        metrics["kv_cache_utilization"].value,
    )
    counts = f"{preempted:14.2f}{computed / needed:12.3f}{rows / num_steps:10.1f}{num_steps:8d}"
    return f"{watermark:9.0%}{counts}{held:10.1%}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--watermarks", type=float, nargs="+", default=(0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
    )
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument(
        "--prompt-len", type=int, nargs=2, default=(32, 512), metavar=("LOW", "HIGH")
    )
    parser.add_argument("--output-len", type=int, default=512, help="at most")
    parser.add_argument(
        "--pool", type=float, default=0.25, help="part of what all rows at full length would take"
    )
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    options = parse()
    print("watermark  preempted/req  computed  rows/step   steps      held")
    for watermark in options.watermarks:
        print(run(options, watermark))


if __name__ == "__main__":
    main()
