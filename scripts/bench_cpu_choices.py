"""The measurements behind docs/architecture.md's choices for a CPU: each prints both sides,
measured in this run.

    python scripts/bench_cpu_choices.py
    python scripts/bench_cpu_choices.py --only matmuls packed attention

Medians of several calls, in milliseconds; on a shared machine read ratios.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterable
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxkv.kv.codecs import Codec, PlainCodec, get_codec
from jaxkv.kv.layout import HeadMajorLayout
from jaxkv.kv.state import PageTables, Store
from jaxkv.ops import native
from jaxkv.ops.attention import Batch, Place, sweep, xla
from jaxkv.ops.attention import native as attention_native
from jaxkv.ops.layers import _linear_in_pieces
from jaxkv.ops.matrices import Matrix, Packed


def median_ms(f: Callable[..., Any], *args: Any) -> float:
    jax.block_until_ready(f(*args))
    times = []
    for _ in range(15):
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        times.append(time.perf_counter() - start)
    return median(times) * 1e3


def by_turns(functions: Iterable[Callable[..., Any]], *args: Any, rounds: int) -> str:
    """Says how many CPU / wall milliseconds two functions take, and how many times as fast the
    second one is.
    """
    functions = list(functions)
    spent: list[list[tuple[float, float]]] = [[] for _ in functions]
    for function in functions:
        jax.block_until_ready(function(*args))
    for _ in range(rounds):
        for function, times in zip(functions, spent, strict=True):
            begun = time.process_time(), time.perf_counter()
            jax.block_until_ready(function(*args))
            ended = time.process_time(), time.perf_counter()
            times.append(((ended[0] - begun[0]) * 1e3, (ended[1] - begun[1]) * 1e3))
    cells = [" / ".join(f"{ms:6.1f}" for ms in np.median(times, axis=0)) for times in spent]
    ratio = median(a[1] / b[1] for a, b in zip(*spent, strict=True))
    return f"{'   '.join(cells)}  {ratio:.2f} times"


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


def matmuls() -> None:
    """Eight layers' matmuls of two sizes by XLA and by machine code of jaxkv, by turns: CPU and
    wall milliseconds.
    """
    if (reason := native.matmul_unused_because()) is not None:
        print(f"\nmatmuls by machine code: {reason}")
        return
    print("\n8 matmuls out of the stack, CPU / wall ms by turns: XLA, machine code")

    def by_xla(x_TD: jax.Array, w: Matrix) -> jax.Array:
        return _linear_in_pieces(x_TD.astype(w.dtype), w)

    def by_machine_code(x_TD: jax.Array, w: Matrix) -> jax.Array:
        return w.dot_natively(x_TD)

    def all_layers(form: Callable[..., jax.Array], x_TD: jax.Array, stack: jax.Array) -> jax.Array:
        add = lambda i, y_TF: y_TF + form(x_TD, Matrix(stack, i))  # noqa: E731
        return jax.lax.fori_loop(0, 8, add, jnp.zeros((x_TD.shape[0], stack.shape[1])))

    for shape, dtype in itertools.product(((2048, 768), (5632, 2048)), ("bfloat16", "float32")):
        stack = jax.random.normal(jax.random.key(0), (8, *shape)).astype(dtype)
        x_TD = jax.random.normal(jax.random.key(1), (512, shape[1]))
        run = {form: jax.jit(partial(all_layers, form)) for form in (by_xla, by_machine_code)}
        for rows in (2, 8, 32, 512):
            said = by_turns(run.values(), x_TD[:rows], stack, rounds=15)
            what = f"{dtype:8s} {shape[1]} x {shape[0]} {rows:3d} rows"
            print(f"  {what}  {said}", flush=True)


def packed() -> None:
    """Eight layers' matmuls with quantised weights by XLA and by machine code of jaxkv, by turns;
    the first lines are of bfloat16.
    """
    if (reason := native.matmul_unused_because()) is not None:
        print(f"\nquantised weights by machine code: {reason}")
        return
    print("\n8 matmuls of 2048 x 5632, CPU / wall ms by turns: XLA, machine code")

    def by_xla(x_TD: jax.Array, w: Matrix | Packed) -> jax.Array:
        return _linear_in_pieces(x_TD, w)

    def by_machine_code(x_TD: jax.Array, w: Matrix | Packed) -> jax.Array:
        return w.dot_natively(x_TD)

    def all_layers(form: Callable[..., jax.Array], group: int, x_TD: Any, *leaves: Any) -> Any:
        def add(i: jax.Array, y_TF: jax.Array) -> jax.Array:
            if not group:
                return y_TF + form(x_TD, Matrix(leaves[0], i))
            kept = (*leaves, None, None, None)
            return y_TF + form(x_TD, Packed(*kept, i, np.dtype(ml_dtypes.bfloat16)))

        return jax.lax.fori_loop(0, 8, add, jnp.zeros((x_TD.shape[0], 5632)))

    x_TD = jax.random.normal(jax.random.key(0), (512, 2048)).astype(jnp.bfloat16)
    kinds = (("bfloat16", 0), ("int4", 128), ("int4", 32), ("int8", 2048), ("float8_e4m3fn", 128))
    for kind, group in kinds:
        if group:
            shape = (8, 2048 // group, 5632)
            values = jax.random.randint(jax.random.key(1), (*shape, group), -8, 8, jnp.int8)
            leaves = [values.astype(kind), jnp.full(shape, 0.01, jnp.bfloat16)]
        else:
            leaves = [jax.random.normal(jax.random.key(1), (8, 5632, 2048)).astype(kind)]
        run = {
            form: jax.jit(partial(all_layers, form, group)) for form in (by_xla, by_machine_code)
        }
        for rows in (1, 8, 32, 512):
            said = by_turns(run.values(), x_TD[:rows], *leaves, rounds=9)
            print(f"  {kind:13s} groups of {group:4d} {rows:3d} rows  {said}", flush=True)


def attention() -> None:
    """Attention of decode rows, and of a prompt, in twelve layers by XLA and by machine code of
    jaxkv, by turns.
    """
    if (reason := native.unused_because()) is not None:
        print(f"\nattention by machine code: {reason}")
        return
    print(
        "\nattention, 12 layers, 12 query / 4 KV heads of 64, pages of 16, CPU / wall ms by turns: "
        "XLA, machine code"
    )
    cases = [(1, 128, 1), (1, 1024, 1), (8, 128, 1), (8, 1024, 1), (32, 128, 1), (32, 1024, 1)]
    cases += [(1, 512, 512), (1, 2048, 2048), (1, 4096, 512)]
    codecs = [PlainCodec(dtype="bfloat16"), PlainCodec(dtype="float32")]
    codecs.append(get_codec("int8", platform="cpu"))
    for (rows, length, tokens), codec in itertools.product(cases, codecs):
        store, tables, batch, q_TNH = attended(rows, length, tokens, codec)
        handler = attention_native.handler_for(Place(store, 0, tables))
        if handler is None:
            raise RuntimeError(f"expected machine code for pages of {codec.name}")
        by_machine_code = partial(attention_native.attend, handler=handler)

        def all_layers(form: Callable[..., Any], q_TNH: jax.Array, *given: Any) -> jax.Array:
            store, tables, batch = given

            def layer(i: jax.Array, q_TNH: jax.Array) -> jax.Array:
                asked = sweep.Scores(None, None, 0.0, None)
                return q_TNH + form(q_TNH, Place(store, i, tables), batch, asked=asked)[0]

            return jax.lax.fori_loop(0, store.num_layers, layer, q_TNH)

        run = [jax.jit(partial(all_layers, form)) for form in (xla.attend_rows, by_machine_code)]
        said = by_turns(run, q_TNH, store, tables, batch, rounds=9)
        what = f"{tokens:4d} tokens of" if tokens > 1 else f"{rows:4d} rows of  "
        print(f"  {codec.name:8s} {what} {length:4d}  {said}", flush=True)


def attended(rows: int, length: int, tokens: int, codec: Codec) -> tuple[Any, ...]:
    """Makes pages of twelve layers whose rows hold so many tokens, the last `tokens` of which are a
    step's, and their queries.
    """
    size, num_layers = 16, 12
    rng, width = np.random.default_rng(0), length // size
    table = rng.permutation(rows * width).reshape(rows, width)
    first = np.tile(np.arange(width) * size, (rows, 1))
    held, number = np.full(rows, length), np.arange(rows)
    tables = PageTables(*(jnp.asarray(x, jnp.int32) for x in (table, first, held)))
    layout = HeadMajorLayout(num_kv_heads=4, head_dim=64, page_size=size, codec=codec)
    vectors = rng.standard_normal((num_layers * rows * width, 8, size, 64), np.float32)
    store = Store(jax.jit(codec.encode)(vectors), layout, num_layers=num_layers)
    batch = Batch(
        token_T=jnp.zeros(rows * tokens, jnp.int32),
        position_T=jnp.tile(jnp.arange(length - tokens, length, dtype=jnp.int32), rows),
        row_T=jnp.repeat(jnp.asarray(number, jnp.int32), tokens),
        start_B=jnp.asarray(number * tokens, jnp.int32),
        count_B=jnp.full(rows, tokens, jnp.int32),
        num_decode=jnp.int32(rows if tokens == 1 else 0),
        num_rows=jnp.int32(rows),
        decode_only=tokens == 1,
    )
    return (
        store,
        tables,
        batch,
        jnp.asarray(rng.standard_normal((rows * tokens, 12, 64)), "float32"),
    )


PARTS = (matmul_layouts, layer_forms, matmuls, packed, attention)


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
