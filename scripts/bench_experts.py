"""What sorting tokens by their experts saves on a CPU, against every expert on every token.

    python scripts/bench_experts.py --json docs/benchmarks/experts_cpu.json

All ways compute the same layer in the same process, by turns, and are compared. Times are the best
of the runs; CPU times (`_cpu_ms`), which other work disturbs less, are medians. `dense` is the
definition, three einsums over all experts; `loop` is the same with one expert after the other on
all tokens, by the matmuls that the fast way uses. Where a step waits for weights, the fast way can
save what it does not read: all but `experts_used` of the experts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_generate import environment

from jaxkv.ops.experts import Router, run_experts
from jaxkv.ops.layers import mlp
from jaxkv.ops.matrices import Matrix

NUM_EXPERTS, NUM_USED = 32, 4
WEIGHTS = ("gate", "up", "down")


def dense(x_TD: jax.Array, weight_TE: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    """Runs every expert on every token: [T, D] float32."""
    einsum = partial(jnp.einsum, preferred_element_type=jnp.float32)
    x_TD = x_TD.astype(w["gate"].dtype)
    gate_ETF, up_ETF = (einsum("td,efd->etf", x_TD, w[name]) for name in ("gate", "up"))
    h_ETF = (jax.nn.silu(gate_ETF) * up_ETF).astype(x_TD.dtype)
    return jnp.einsum("etd,te->td", einsum("etf,edf->etd", h_ETF, w["down"]), weight_TE)


def one_expert(w: dict[str, jax.Array], x_RD: jax.Array, expert: jax.Array) -> jax.Array:
    return mlp(x_RD, {name: Matrix(leaf, expert) for name, leaf in w.items()}, activation="silu")


def loop(x_TD: jax.Array, weight_TE: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    """Runs one expert after the other on all tokens."""

    def add(expert: jax.Array, y_TD: jax.Array) -> jax.Array:
        return y_TD + one_expert(w, x_TD, expert) * weight_TE[:, expert, None]

    return jax.lax.fori_loop(0, NUM_EXPERTS, add, jnp.zeros(x_TD.shape, jnp.float32))


def sorted_by_expert(
    x_TD: jax.Array, expert_TK: jax.Array, weight_TK: jax.Array, w: dict[str, jax.Array]
) -> jax.Array:
    run = partial(one_expert, w)
    return run_experts(x_TD, expert_TK, weight_TK, run, num_experts=NUM_EXPERTS)


def measure(num_tokens: int, hidden: int, dtype: str, num_runs: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shape = (NUM_EXPERTS, hidden, hidden)
    w = {name: jnp.asarray(rng.normal(0, hidden**-0.5, shape), dtype) for name in WEIGHTS}
    x_TD = jnp.asarray(rng.normal(size=(num_tokens, hidden)), jnp.float32)
    logits_TE = jnp.asarray(rng.normal(size=(num_tokens, NUM_EXPERTS)), jnp.float32)
    expert_TK, weight_TK = Router(num_used=NUM_USED, is_normalised=True)(logits_TE)
    rows = np.arange(num_tokens)[:, None]
    weight_TE = jnp.zeros_like(logits_TE).at[rows, expert_TK].set(weight_TK)
    ways: dict[str, Callable[[], jax.Array]] = {
        "dense": partial(jax.jit(dense), x_TD, weight_TE, w),
        "loop": partial(jax.jit(loop), x_TD, weight_TE, w),
        "fast": partial(jax.jit(sorted_by_expert), x_TD, expert_TK, weight_TK, w),
    }
    results = {name: np.asarray(way()) for name, way in ways.items()}
    apart = max(np.abs(results[name] - results["dense"]).max() for name in ("loop", "fast"))
    taken: dict[str, list[float]] = {name: [] for name in ways}
    of_cpu: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(num_runs):
        for name, way in ways.items():
            start, before = time.perf_counter(), time.process_time()
            way().block_until_ready()
            taken[name].append(time.perf_counter() - start)
            of_cpu[name].append(time.process_time() - before)
    seconds = {name: min(times) for name, times in taken.items()}
    return {
        "hidden": hidden,
        "tokens": num_tokens,
        "dtype": dtype,
        "experts_used": len(np.unique(expert_TK)),
        **{f"{name}_ms": round(1000 * one, 3) for name, one in seconds.items()},
        **{f"{name}_cpu_ms": round(1000 * np.median(of), 3) for name, of in of_cpu.items()},
        "dense_over_fast": round(seconds["dense"] / seconds["fast"], 2),
        "loop_over_fast": round(seconds["loop"] / seconds["fast"], 2),
        "largest_difference": float(f"{apart / results['dense'].std():.1e}"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 512])
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--json", type=Path, help="where the rows go too")
    asked = parser.parse_args()
    about = environment() | {"experts": NUM_EXPERTS, "used": NUM_USED, "runs": asked.runs}
    rows = []
    for dtype, hidden, num_tokens in product(("bfloat16", "float32"), asked.hidden, asked.tokens):
        rows.append(measure(num_tokens, hidden, dtype, asked.runs))
        print(json.dumps(rows[-1]), flush=True)
    if asked.json is not None:
        asked.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
