"""Compares both forms of latent attention over a chunk of a prompt, as the XLA backend runs them:
absorbed, and expanded (`jaxkv.ops.attention.expanded`). One layer of DeepSeek's sizes.

    python scripts/bench_latent.py --heads 16 --tokens 512 --context 512 2048 4096

Prints CPU seconds of this process, medians of turns: other work beside it does not change them
much.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.kv.codecs import get_codec
from jaxkv.kv.layout import HeadMajorLayout
from jaxkv.kv.state import PageTables, empty_store
from jaxkv.ops.attention import Batch, LatentMaps, Place, xla
from jaxkv.ops.matrices import HeadMatrices

RANK, PLAIN, ROTATED, VALUE = 512, 128, 64, 128
PAGE = 16


def chunk(
    tokens: int, context: int, heads: int, dtype: str
) -> tuple[jax.Array, Place, Batch, LatentMaps]:
    """Returns queries of the last tokens of one row, its pages, and random matrices."""
    rng = np.random.default_rng(0)

    def drawn(*shape: int, dtype: str) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) * 0.1, dtype)

    codec, num_pages = get_codec(dtype, platform="cpu", dtype=dtype), -(-context // PAGE)
    layout = HeadMajorLayout(
        num_kv_heads=1, head_dim=RANK + ROTATED, page_size=PAGE, codec=codec, latent_dim=RANK
    )
    empty = empty_store(num_layers=1, layout=layout, num_pages=num_pages)
    pages = codec.encode(drawn(num_pages, 1, PAGE, RANK + ROTATED, dtype="float32"))
    table_1W = np.arange(num_pages, dtype=np.int32)[None]
    tables = PageTables(table_1W, table_1W * PAGE, np.array([context], np.int32))
    position_T = np.arange(context - tokens, context, dtype=np.int32)
    batch = Batch(
        token_T=np.zeros(tokens, np.int32),
        position_T=position_T,
        row_T=np.zeros(tokens, np.int32),
        start_B=np.array([0], np.int32),
        count_B=np.array([tokens], np.int32),
        num_decode=np.int32(0),
        num_rows=np.int32(1),
    )
    up = (drawn(1, heads, RANK, PLAIN, dtype=dtype), drawn(1, heads, VALUE, RANK, dtype=dtype))
    maps = LatentMaps(*(HeadMatrices(x, jnp.int32(0)) for x in up))
    q_TNH = drawn(tokens, heads, PLAIN + ROTATED, dtype="float32")
    return q_TNH, Place(empty.with_arrays(pages), 0, tables), batch, maps


def measure(tokens: int, context: int, heads: int, dtype: str, *, rounds: int) -> list[float]:
    """Returns CPU seconds of both forms, medians."""
    q_TNH, at, batch, maps = chunk(tokens, context, heads, dtype)
    default, forms = xla.LEAST_QUERIES, []
    for xla.LEAST_QUERIES in (tokens + 1, tokens):
        form = jax.jit(partial(xla.read, scale=(PLAIN + ROTATED) ** -0.5, window=None))
        forms.append(form.lower(q_TNH, at, batch, maps=maps).compile())
    xla.LEAST_QUERIES = default
    first, second = (form(q_TNH, at, batch, maps=maps)[0] for form in forms)
    apart = 1e-4 if dtype == "float32" else 1e-2
    np.testing.assert_allclose(first, second, rtol=0, atol=apart)
    taken: list[list[float]] = [[], []]
    for _ in range(rounds):
        for form, seconds in zip(forms, taken, strict=True):
            before = time.process_time()
            jax.block_until_ready(form(q_TNH, at, batch, maps=maps))
            seconds.append(time.process_time() - before)
    return [float(np.median(seconds)) for seconds in taken]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--context", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if min(args.context) < args.tokens:
        parser.error(f"--context: expected at least --tokens {args.tokens}, got {args.context}")
    for context in args.context:
        sizes = (args.tokens, context, args.heads, args.dtype)
        first, second = measure(*sizes, rounds=args.rounds)
        print(f"{args.tokens} of {context} tokens: absorbed {first:.2f} s, expanded {second:.2f} s")


if __name__ == "__main__":
    main()
