"""Prefill of a recurrent layer in blocks against token by token, both in this run.

    python scripts/bench_recurrent.py --out docs/benchmarks/recurrent.json

The rules alone, without projections: what a layer of the named model does with its queries, keys
and values. Medians of alternating calls, in tokens per second; on a shared machine read the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.ops.attention import Batch
from jaxkv.ops.recurrent import LinearAttention, Rows, Tokens, run

SHAPES = {
    # (key heads, value heads, key dim, value dim, decay by channel, delta rule)
    "gated delta, Qwen3-Next": (16, 32, 128, 128, False, True),
    "KDA, Kimi Linear": (32, 32, 128, 128, True, True),
    "SSD, Mamba2 of 64 heads": (1, 64, 128, 64, False, False),
}


def tokens_of(
    rng: np.random.Generator, count: int, shape: tuple[int, int, int, int, bool, bool]
) -> Tokens:
    keys, heads, x, y, by_channel, has_delta = shape
    q, k = rng.normal(size=(2, count, keys, x)) / x**0.5
    decay = -np.exp(rng.normal(-2, 1, (count, heads, x) if by_channel else (count, heads)))
    beta = rng.uniform(size=(count, heads)) if has_delta else None
    arrays = Tokens(q, k, rng.normal(size=(count, heads, y)), decay, beta)
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), arrays)


def one_row(count: int) -> Batch:
    """Returns a step of one prompt's chunk."""
    return Batch(
        token_T=jnp.zeros(count, jnp.int32),
        position_T=jnp.arange(count, dtype=jnp.int32),
        row_T=jnp.zeros(count, jnp.int32),
        start_B=jnp.zeros(1, jnp.int32),
        count_B=jnp.full(1, count, jnp.int32),
        num_decode=jnp.int32(0),
        num_rows=jnp.int32(1),
    )


def measure(name: str, count: int, calls: int) -> dict[str, object]:
    _, heads, x, y, by_channel, _ = shape = SHAPES[name]
    rule, tokens = (
        LinearAttention(by_channel=by_channel),
        tokens_of(np.random.default_rng(0), count, shape),
    )
    pool = jnp.zeros((1, heads, x, y), jnp.float32)

    @jax.jit
    def in_blocks(tokens: Tokens, pool: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = Rows(jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32), one_row(count), 0, 1)
        return run(rule, tokens, pool, rows)

    @jax.jit
    def one_by_one(tokens: Tokens, pool: jax.Array) -> tuple[jax.Array, jax.Array]:
        by_token = jax.tree.map(lambda a: a[:, None], tokens)
        pool, y_T = jax.lax.scan(rule.step, pool, by_token)
        return y_T[:, 0], pool

    sides = {"blocks": in_blocks, "tokens": one_by_one}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    found = {side: function(tokens, pool) for side, function in sides.items()}
    apart = float(jnp.abs(found["blocks"][0] - found["tokens"][0]).max())
    for _ in range(calls):
        for side, function in sides.items():
            start = time.perf_counter()
            jax.block_until_ready(function(tokens, pool))
            seconds[side].append(time.perf_counter() - start)
    speed = {side: round(count / float(np.median(times))) for side, times in seconds.items()}
    ratio = round(speed["blocks"] / speed["tokens"], 2)
    line = f"{name:26s} {count:5d} tokens: {speed['blocks']:8,d} / {speed['tokens']:8,d} tokens/s"
    print(f"{line}, {ratio} times; outputs at most {apart:.1e} apart")
    return {"layer": name, "tokens": count, "tokens_per_s": speed, "ratio": ratio, "apart": apart}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    parser.add_argument("--calls", type=int, default=7)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512, 2048])
    args = parser.parse_args()
    made = [measure(name, count, args.calls) for name in SHAPES for count in args.tokens]
    about = {"jax": jax.__version__, "platform": jax.default_backend(), "cores": os.cpu_count()}
    if args.out is not None:
        about |= {"python": platform.python_version(), "machine": platform.machine()}
        args.out.write_text(json.dumps(about | {"measured": made}, indent=1) + "\n")


if __name__ == "__main__":
    main()
