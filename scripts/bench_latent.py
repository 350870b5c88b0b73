"""Compares two forms of latent attention over a chunk of a prompt: absorbed, as the models run it,
and expanded, where every row of the context is made into keys and values of all heads first.

    python scripts/bench_latent.py --heads 16 --context 512 2048 4096

Prints CPU seconds of this process, medians: other work beside it does not change them much.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

RANK, PLAIN, ROTATED, VALUE = 512, 128, 64, 128
BLOCK = 128
"""Queries that meet all rows at once."""


def attend(q_TNH: jax.Array, k_SKH: jax.Array, v_SKV: jax.Array) -> jax.Array:
    """Attends the last T of S tokens, [T, N, V]; K is N, or 1 for all heads."""
    num_tokens, num_heads, _ = q_TNH.shape
    num_rows = k_SKH.shape[0]
    share = num_heads // k_SKH.shape[1]
    blocks = q_TNH.reshape(-1, BLOCK, k_SKH.shape[1], share, q_TNH.shape[2])
    position = jnp.arange(num_rows - num_tokens, num_rows).reshape(-1, BLOCK)

    def one(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        q, at = block
        dot = partial(jnp.einsum, preferred_element_type=jnp.float32)
        scores = dot("tkgh,skh->kgts", q, k_SKH)
        seen = at[:, None] >= jnp.arange(num_rows)[None]
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
        return dot("kgts,skv->tkgv", weights.astype(q.dtype), v_SKV)

    return jax.lax.map(one, (blocks, position)).reshape(num_tokens, num_heads, -1)


def absorbed(q_TNH: jax.Array, row_SH: jax.Array, k_up: jax.Array, v_up: jax.Array) -> jax.Array:
    """Takes queries [T, N, 192], rows [S, 576], and matrices [N, 128, 512]."""
    dtype = q_TNH.dtype
    latent = jnp.einsum("tnc,ncr->tnr", q_TNH[..., :PLAIN], k_up).astype(dtype)
    q_TNH = jnp.concatenate([latent, q_TNH[..., PLAIN:]], axis=-1)
    row_S1H = row_SH[:, None]
    out_TNR = attend(q_TNH, row_S1H, row_S1H[..., :RANK]).astype(dtype)
    return jnp.einsum("tnr,nvr->tnv", out_TNR, v_up)


def expanded(q_TNH: jax.Array, row_SH: jax.Array, k_up: jax.Array, v_up: jax.Array) -> jax.Array:
    """Takes what `absorbed` takes."""
    dtype, (num_rows, _), num_heads = q_TNH.dtype, row_SH.shape, q_TNH.shape[1]
    plain, value = (
        jnp.einsum("sr,ncr->snc", row_SH[:, :RANK], up).astype(dtype) for up in (k_up, v_up)
    )
    rotated = jnp.broadcast_to(row_SH[:, None, RANK:], (num_rows, num_heads, ROTATED))
    return attend(q_TNH, jnp.concatenate([plain, rotated], axis=-1), value)


def shapes(tokens: int, context: int, heads: int) -> list[tuple[int, ...]]:
    up = (heads, PLAIN, RANK)
    return [(tokens, heads, PLAIN + ROTATED), (context, RANK + ROTATED), up, up]


def measure(tokens: int, context: int, heads: int, *, rounds: int) -> list[float]:
    """Returns CPU seconds of both forms, medians."""
    rng = np.random.default_rng(0)
    inputs = [
        jnp.asarray(rng.normal(size=s) * 0.1, "float32") for s in shapes(tokens, context, heads)
    ]
    forms = [jax.jit(form) for form in (absorbed, expanded)]
    first, second = (form(*inputs) for form in forms)
    np.testing.assert_allclose(first, second, rtol=0, atol=1e-4)
    taken: list[list[float]] = [[], []]
    for _ in range(rounds):
        for form, seconds in zip(forms, taken, strict=True):
            before = time.process_time()
            form(*inputs).block_until_ready()
            seconds.append(time.process_time() - before)
    return [float(np.median(seconds)) for seconds in taken]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--context", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for context in args.context:
        sizes = (args.tokens, context, args.heads)
        first, second = measure(*sizes, rounds=args.rounds)
        print(f"{args.tokens} of {context} tokens: absorbed {first:.2f} s, expanded {second:.2f} s")


if __name__ == "__main__":
    main()
