"""Decode attention on a CPU by what the pages are stored in: bytes per value, and time per layer.

    python scripts/bench_codecs.py
    python scripts/bench_codecs.py --context 1024 --json codecs.json
    # what observing costs, with intervals
    python scripts/bench_codecs.py --codecs float32,bfloat16,int8 --rounds 61

Rows of one query each, pages of 16 tokens in a permuted table, XLA path. The codecs take turns;
medians. Encoding is of as many vectors as a step of 2,048 tokens stores. "masses", of all pages, is
what h2o_page asks for, "masses and entropies" what entropy does; "a quarter read": the choice of a
quarter of the pages included (docs/kv-policies.md).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_generate import environment

from jaxkv.kv.codecs import CODECS, bits_per_value, get_codec
from jaxkv.kv.codecs.base import Codec
from jaxkv.kv.layout import HeadMajorLayout
from jaxkv.kv.state import PageTables, Statistics, Store
from jaxkv.ops.attention import Batch, Place, xla

SHAPES = {"32/8 heads of 128": (32, 8, 128), "12/4 heads of 64": (12, 4, 64)}
PAGE = 16
OBSERVED = ("float32", "bfloat16", "int8")
VARIANTS = ("masses", "masses and entropies", "a quarter read")


def attention(
    codec: Codec,
    heads: tuple[int, int, int],
    options: argparse.Namespace,
    variant: str | None = None,
) -> Callable[[], Any]:
    num_heads, kv_heads, head_dim = heads
    batch, context, rng = options.batch, options.context, np.random.default_rng(0)
    num_pages = batch * context // PAGE
    layout = HeadMajorLayout(num_kv_heads=kv_heads, head_dim=head_dim, page_size=PAGE, codec=codec)
    k, v = jnp.asarray(rng.normal(size=(2, 1, num_pages * PAGE, kv_heads, head_dim)), jnp.float32)
    table_BW = rng.permutation(num_pages).reshape(batch, -1).astype(np.int32)
    first_BW = np.broadcast_to(np.arange(context // PAGE, dtype=np.int32) * PAGE, table_BW.shape)
    (pages,) = (x[0] for x in jax.jit(layout.pack)(k, v))
    arrays: Any = (table_BW, first_BW, np.full(batch, context, np.int32))
    store, tables = Store(pages, layout=layout, num_layers=1), PageTables(*arrays)
    if variant == "a quarter read":
        keys = layout.unpack([pages[None]])[0].reshape(num_pages, PAGE, kv_heads, head_dim)
        extremes = jnp.stack([keys.min(axis=1), keys.max(axis=1)], axis=1)
        store = replace(store, extremes=extremes, num_read=context // PAGE // 4)
    if variant in VARIANTS[:2]:
        since: Any = np.zeros(batch, np.int32)
        tables = replace(tables, since_B=since, focused=variant == VARIANTS[1])
    row_B: Any = np.arange(batch, dtype=np.int32)
    last_B: Any = np.full(batch, context - 1, np.int32)
    counts: Any = (np.ones(batch, np.int32), np.int32(batch), np.int32(batch))
    made = Batch(row_B, last_B, row_B, row_B, *counts, decode_only=True)
    q_BNH = jnp.asarray(rng.normal(size=(batch, num_heads, head_dim)), jnp.float32)
    at = Place(store, 0, tables, Statistics.nothing(tables))
    read = jax.jit(partial(xla.read, scale=head_dim**-0.5, window=None))
    return lambda: read(q_BNH, at, made)


def encoding(codec: Codec, heads: tuple[int, int, int]) -> Callable[[], Any]:
    _, kv_heads, head_dim = heads
    x = jnp.asarray(
        np.random.default_rng(1).normal(size=(2048, 2 * kv_heads, head_dim)), jnp.float32
    )
    encode = jax.jit(codec.encode)
    return lambda: encode(x)


def milliseconds(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Of each round, in turns."""
    seen: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        jax.block_until_ready(run())
    for _ in range(rounds):
        for name, run in runs.items():
            started = time.perf_counter()
            jax.block_until_ready(run())
            seen[name].append((time.perf_counter() - started) * 1e3)
    return seen


def ratio(values: list[float], of: list[float]) -> tuple[float, float, float]:
    """Median of the rounds' ratios with its 95% interval, by order (binomial)."""
    found = sorted(a / b for a, b in zip(values, of, strict=True))
    half = round(0.98 * len(found) ** 0.5)
    low, middle, high = (
        found[min(max(0, len(found) // 2 + i), len(found) - 1)] for i in (-half, 0, half)
    )
    return middle, low, high


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--codecs", default=",".join(CODECS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    result: dict[str, Any] = environment() | {"command": " ".join(sys.argv), "shapes": {}}
    for shape, heads in SHAPES.items():
        codecs = {
            name: get_codec(name, platform="cpu", dtype="float32")
            for name in options.codecs.split(",")
        }
        of_attention = {}
        for name, codec in codecs.items():
            of_attention[name] = attention(codec, heads, options)
            for variant in VARIANTS if name in OBSERVED else ():
                of_attention[f"{name}, {variant}"] = attention(codec, heads, options, variant)
        rounds = milliseconds(of_attention, options.rounds)
        attend = {name: median(values) for name, values in rounds.items()}
        encoded = milliseconds(
            {name: encoding(codec, heads) for name, codec in codecs.items()}, options.rounds
        )
        encode = {name: median(values) for name, values in encoded.items()}
        result["shapes"][shape] = of = {
            name: {
                "bits": bits_per_value(codec, heads[2]),
                "attention_ms": attend[name],
                "encode_ms": encode[name],
            }
            for name, codec in codecs.items()
        }
        print(f"{shape:20s}{'bits':>8s}{'of bfloat16':>13s}{'attention ms':>14s}{'encode ms':>11s}")
        for name, one in of.items():
            times = f"{one['attention_ms']:14.1f}{one['encode_ms']:11.1f}"
            print(f"  {name:18s}{one['bits']:8.3f}{16 / one['bits']:12.2f}x{times}")
        for name in [name for name in attend if name not in codecs]:
            compared = ratio(rounds[name], rounds[name.partition(",")[0]])
            of[name] = {"attention_ms": attend[name], "ratio": compared}
            print(
                f"  {name:39s}{attend[name]:14.1f}   x{compared[0]:.3f} ({compared[1]:.3f} to "
                f"{compared[2]:.3f})"
            )
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
