"""The measurements behind docs/architecture.md's choices for a CPU: each prints both sides,
measured in this run.

    python scripts/bench_cpu_choices.py
    python scripts/bench_cpu_choices.py --only few_rows per_layer

Medians of several calls, in milliseconds; on a shared machine read ratios.
"""

from __future__ import annotations

import argparse
import tempfile
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
from bench_models import make_checkpoint

from jaxkv import SamplingParams, functional
from jaxkv.config import bfloat16_as_bits
from jaxkv.kv.codecs import PlainCodec
from jaxkv.kv.layout import HeadMajorLayout
from jaxkv.kv.state import PageTables, Store
from jaxkv.ops.attention import Batch, Place, sweep, xla
from jaxkv.ops.layers import linear, rows_of_pieces
from jaxkv.ops.matrices import Matrix, Packed, PerLayer, dot
from jaxkv.programs.layer_arrays import LayerArrays


def median_ms(f: Callable[..., Any], *args: Any, calls: int = 15) -> float:
    jax.block_until_ready(f(*args))
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        times.append(time.perf_counter() - start)
    return sorted(times)[calls // 2] * 1e3


def matmul_layouts() -> None:
    """Weight layout and result type of one 2048 x 5632 matmul."""
    print("\nmatmul 2048 x 5632, ms: [in,out] / [out,in], each without / with a float32 result")
    for dtype in (jnp.bfloat16, jnp.float32):
        w_io = jax.random.normal(jax.random.key(0), (2048, 5632)).astype(dtype)
        w_oi = jnp.array(w_io.T)
        for rows in (1, 2, 8, 32, 512):
            x = jnp.ones((rows, 2048), dtype)
            cells = []
            for w, axis in ((w_io, 0), (w_oi, 1)):
                for result in (None, jnp.float32):
                    dims = (((1,), (axis,)), ((), ()))
                    dot = jax.jit(
                        lambda x, w, d=dims, r=result: jax.lax.dot_general(
                            x, w, d, preferred_element_type=r
                        )
                    )
                    cells.append(f"{median_ms(dot, x, w):7.2f}")
            print(f"  {jnp.dtype(dtype).name:9s} {rows:4d} rows {' '.join(cells)}")


def layer_forms() -> None:
    """Twelve layers' MLPs: one leaf per layer, scan over stacked values, scan over stacked bits."""
    print("\n12 layers' MLP 768 x 2048 bfloat16, ms: leaf per layer / scan / scan over uint16 bits")
    num_layers, shape = 12, (2048, 768)
    keys = jax.random.split(jax.random.key(0), 3)
    stacked = [
        (0.03 * jax.random.normal(k, (num_layers, *shape))).astype(jnp.bfloat16) for k in keys
    ]
    bits = [jax.lax.bitcast_convert_type(w, jnp.uint16) for w in stacked]
    leaves = [[jnp.array(w[i]) for w in stacked] for i in range(num_layers)]

    def dot(x: jax.Array, w: jax.Array, axis: int) -> jax.Array:
        dims = (((1,), (axis,)), ((), ()))
        return jax.lax.dot_general(x.astype(w.dtype), w, dims, preferred_element_type=jnp.float32)

    def layer(x: jax.Array, w: list[jax.Array]) -> jax.Array:
        if w[0].dtype == jnp.uint16:
            w = [jax.lax.bitcast_convert_type(one, jnp.bfloat16) for one in w]
        return x + dot(jax.nn.silu(dot(x, w[0], 1)) * dot(x, w[1], 1), w[2], 0)

    def looped(x: jax.Array, leaves: list[list[jax.Array]]) -> jax.Array:
        for w in leaves:
            x = layer(x, w)
        return x

    scanned = jax.jit(lambda x, w: jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0])
    for rows in (2, 8, 32, 256):
        x = jnp.ones((rows, 768))
        times = (
            median_ms(jax.jit(looped), x, leaves),
            median_ms(scanned, x, stacked),
            median_ms(scanned, x, bits),
        )
        print(f"  {rows:4d} rows " + " ".join(f"{t:8.2f}" for t in times))


def few_rows(rounds: int = 15) -> None:
    """Twelve layers' matmuls of few rows in forms that pack or copy less of the weight, by turns:
    CPU milliseconds, and whether a row gets the bits that it gets among 512.
    """
    print(
        "\n12 x 768 x 2048, few rows, CPU ms by turns: out of the stack / an array per layer, as "
        "engines do it in bfloat16 / weight as the left operand / that in float32 / int8_dynamic"
    )
    num_layers, shape = 12, (2048, 768)
    drawn = 0.03 * jax.random.normal(jax.random.key(0), (num_layers, *shape))
    x_TD = jax.random.normal(jax.random.key(1), (512, shape[1]))

    def left(dtype: Any, x_TD: jax.Array, stack: jax.Array, layer: jax.Array) -> jax.Array:
        w = Matrix(stack, layer)

        def piece(i: jax.Array) -> jax.Array:
            w_FD = w.rows(i * (shape[0] // 2), shape[0] // 2).astype(dtype)
            return dot(w_FD, x_TD.astype(w.dtype).astype(dtype))

        return jax.lax.map(piece, jnp.arange(2)).reshape(shape[0], -1).T

    def dynamic(x_TD: jax.Array, w: tuple[jax.Array, jax.Array], layer: jax.Array) -> jax.Array:
        w_GFC, scales_GF = w
        dtype = np.dtype(jnp.bfloat16)
        return linear(x_TD, Packed(w_GFC, scales_GF, None, None, None, layer, dtype, True))

    def all_layers(form: Callable[..., jax.Array], x_TD: jax.Array, w: Any) -> jax.Array:
        add = lambda i, y_TF: y_TF + form(x_TD, w, i)  # noqa: E731
        return jax.lax.fori_loop(0, num_layers, add, jnp.zeros((x_TD.shape[0], shape[0])))

    for dtype in (jnp.bfloat16, jnp.float32):
        stack = drawn.astype(dtype)
        rows_of = rows_of_pieces(Matrix(stack))
        arrays = PerLayer(tuple(tuple(jnp.array(w[a:b]) for a, b in rows_of) for w in stack))
        if dtype == jnp.bfloat16 and bfloat16_as_bits("cpu"):
            stack = jax.lax.bitcast_convert_type(stack, jnp.uint16)
        forms: dict[str, tuple[Callable[..., jax.Array], Any]] = {
            "stack": (lambda x_TD, stack, i: linear(x_TD, Matrix(stack, i)), stack),
            "per layer": (lambda x_TD, arrays, i: linear(x_TD, Matrix(arrays, i)), arrays),
            "left": (partial(left, dtype), stack),
        }
        if dtype == jnp.bfloat16:
            forms["left float32"] = partial(left, jnp.float32), stack
            scales = jnp.abs(drawn).max(axis=-1)[:, None] / 127
            rounded = jnp.round(drawn[:, None] / scales[..., None]).astype(jnp.int8)
            forms["int8_dynamic"] = dynamic, (rounded, scales)
        run = {name: jax.jit(partial(all_layers, form)) for name, (form, _) in forms.items()}
        expected = {name: np.asarray(run[name](x_TD, w)) for name, (_, w) in forms.items()}
        for rows in (2, 8, 32):
            spent: dict[str, list[float]] = {name: [] for name in forms}
            cells = dict.fromkeys(forms, "")
            for _ in range(rounds + 1):
                for name, (_, w) in forms.items():
                    start = time.process_time()
                    y_TF = jax.block_until_ready(run[name](x_TD[:rows], w))
                    spent[name].append((time.process_time() - start) * 1e3)
                    is_same = np.array_equal(y_TF, expected[name][:rows])
                    cells[name] = "same" if is_same else "other"
            shown = [f"{median(of[1:]):6.1f} {cells[name]}" for name, of in spent.items()]
            print(f"  {jnp.dtype(dtype).name:9s} {rows:3d} rows  {'   '.join(shown)}", flush=True)


def per_layer(rounds: int = 9) -> None:
    """Whole steps of the 110M shape with the layers' matrices in stacks, and each as an array of
    its own that lies there, as engines have them.
    """
    print("\n110M shape, bfloat16, by turns, CPU / wall ms of a step: stacks / arrays per layer")
    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoint(Path(folder) / "model", "110m", seed=0)
        stacked = functional.load(path, dtype="bfloat16", skip_tokenizer_init=True)
        models = [stacked, replace(stacked, weights=LayerArrays().of(stacked.weights))]
        for rows, prompt_len, num_steps in ((1, 32, 16), (8, 32, 16), (32, 32, 8), (1, 512, 0)):
            ids = np.random.default_rng(0).integers(3, 32_000, (rows, prompt_len))
            sizes = {"num_pages": rows * 36, "num_rows": rows, "max_num_batched_tokens": 512}
            states = [functional.empty(model, **sizes) for model in models]
            spent: list[list[tuple[float, float]]] = [[], []]
            results: list[Any] = [None, None]
            for turn in range(rounds + 1):
                for i in (0, 1) if turn % 2 else (1, 0):
                    kv, model = states[i], models[i]
                    for row in range(rows):
                        kv = functional.rewind(kv, row, 0)
                    begun = time.process_time(), time.perf_counter()
                    kv, logits = functional.prefill(model, kv, ids)
                    results[i] = np.asarray(logits)
                    if num_steps:
                        next_B = results[i].argmax(axis=1)
                        begun = time.process_time(), time.perf_counter()
                        kv, results[i] = functional.decode(model, kv, next_B, num_steps, ON)
                    ended = time.process_time(), time.perf_counter()
                    states[i] = kv
                    spent[i].append((ended[0] - begun[0], ended[1] - begun[1]))
            per = max(num_steps, 1)
            cells = [
                " / ".join(f"{ms:7.1f}" for ms in np.median(one[1:], axis=0) * 1e3 / per)
                for one in spent
            ]
            ratio = median(x[0] / y[0] for x, y in zip(*(one[1:] for one in spent), strict=True))
            is_same = "same" if np.array_equal(*results) else "other"
            what = f"decode {rows:2d} rows" if num_steps else "prefill of 512"
            print(f"  {what}  {cells[0]}   {cells[1]}   CPU {ratio:.2f} times, {is_same} values")


ON = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


def decode_attention() -> None:
    """One layer's decode attention over 1,024 tokens a row, by page storage and by tokens gathered
    at once.
    """
    print(
        "\ndecode attention, 12 query / 4 KV heads of 64, 1,024 tokens a row, page 16, ms by "
        "tokens gathered at once"
    )
    size, length, rng = 16, 1024, np.random.default_rng(0)
    default = sweep.BLOCK
    for rows in (1, 8, 32):
        width = length // size
        table = rng.permutation(rows * width).reshape(rows, width).astype(np.int32)
        values = jnp.asarray(rng.standard_normal((rows * width, 8, size, 64)), jnp.bfloat16)
        first = np.tile(np.arange(width, dtype=np.int32) * size, (rows, 1))
        each = np.arange(rows, dtype=np.int32)
        batch = Batch(
            token_T=each,
            position_T=np.full(rows, length - 1, np.int32),
            row_T=each,
            start_B=each,
            count_B=np.ones(rows, np.int32),
            num_decode=np.int32(rows),
            num_rows=np.int32(rows),
            decode_only=True,
        )
        q = jnp.asarray(rng.standard_normal((rows, 12, 64)), jnp.float32)
        for name, codec in (
            ("bits", PlainCodec(dtype="bfloat16", as_bits=True)),
            ("bfloat16", PlainCodec(dtype="bfloat16")),
            ("float32", PlainCodec(dtype="float32")),
        ):
            layout = HeadMajorLayout(num_kv_heads=4, head_dim=64, page_size=size, codec=codec)
            store = Store(codec.encode(values), layout, num_layers=1)
            at = Place(store, 0, PageTables(table, first, np.full(rows, length, np.int32)))
            cells = []
            for tokens in (64, 128, 256, 512, 1024):
                sweep.BLOCK = tokens
                attend = jax.jit(
                    lambda q, at, batch: xla.read(q, at, batch, scale=0.125, window=None)
                )
                cells.append(f"{tokens}: {median_ms(attend, q, at, batch, calls=9):6.2f}")
            print(f"  {rows:3d} rows {name:9s} " + "  ".join(cells))
    sweep.BLOCK = default


PARTS = (matmul_layouts, layer_forms, few_rows, per_layer, decode_attention)


if __name__ == "__main__":
    names = [part.__name__ for part in PARTS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    only = parser.parse_args().only
    print(f"jax {jax.__version__}, {jax.devices()[0]}")
    for part in PARTS:
        if part.__name__ in only:
            part()
