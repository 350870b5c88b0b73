"""Times matmuls with weights that oneDNN keeps packed, called from a compiled program through XLA's
foreign function interface, beside XLA's own. Needs `pip install numba onednn` (1.2 GB) and Linux.

The handler is machine code that numba makes, so nobody needs a C compiler. It reads XLA's call
frame at the offsets that jaxlib's `xla/ffi/api/c_api.h` gives: the input, the layer's number, and
an attribute with the address of a table that says which primitive a layer has. oneDNN's numbers are
those of its `dnnl_types.h`.

    OCL_ICD_FILENAMES=$VIRTUAL_ENV/lib/libintelocl.so LD_LIBRARY_PATH=$VIRTUAL_ENV/lib \\
        python scripts/bench_packed_matmul.py
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

POINTER, INT64 = ctypes.c_void_p, ctypes.c_int64
CPU, IN_ORDER, ANY_LAYOUT, WEIGHTS_OF = 1, 1, 1, 131
BFLOAT16, FLOAT32 = 2, 3
SOURCE, DESTINATION, WEIGHTS = 1, 17, 33
ALLOCATE = 2**64 - 1
MAX_DIMS = 12

ARGS, RESULTS, ATTRIBUTES, EXTENSION = 72, 112, 160, 8
"""Offsets within a call frame of pointers to its arguments, results and attributes, and to an
extension, which asks for the version of the interface.
"""
DATA, METADATA, VERSION, INTERFACE = 24, 24, 24, (0, 5)
FIELDS = 5
"""A layer in a table has so many: primitive, stream, source, destination, arguments."""

dnnl = ctypes.CDLL(f"{sys.prefix}/lib/libdnnl.so.3")
dnnl.dnnl_primitive_desc_query_md.restype = POINTER


class Argument(ctypes.Structure):
    """One of what a primitive is executed on."""

    _fields_ = (("role", ctypes.c_int), ("memory", POINTER))


def made(name: str, *args: Any) -> Any:
    """Calls a function that stores a handle, and returns that. Raises: RuntimeError."""
    handle = POINTER()
    status = getattr(dnnl, f"dnnl_{name}")(ctypes.byref(handle), *args)
    if status:
        raise RuntimeError(f"dnnl_{name}: expected status 0, got {status}")
    return handle


ENGINE = made("engine_create", CPU, ctypes.c_size_t(0))
STREAM = made("stream_create", ENGINE, IN_ORDER)


def form(shape: tuple[int, int], dtype: int, strides: tuple[int, int] | None = None) -> Any:
    """Describes a matrix, in whatever layout is best where no strides are given."""
    dims = (INT64 * MAX_DIMS)(*shape)
    if strides is None:
        return made("memory_desc_create_with_tag", 2, dims, dtype, ANY_LAYOUT)
    strided = (INT64 * MAX_DIMS)(*strides)
    return made("memory_desc_create_with_strides", 2, dims, dtype, strided)


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [F, D], packed for so many rows."""

    fields: tuple[int, ...]
    kept: tuple[Any, ...]

    @classmethod
    def of(cls, w_FD: np.ndarray, rows: int) -> Packed:
        width, depth = w_FD.shape
        source = form((rows, depth), BFLOAT16, (depth, 1))
        result = form((rows, width), FLOAT32, (width, 1))
        anyhow = form((depth, width), BFLOAT16)
        what = made("matmul_primitive_desc_create", ENGINE, source, anyhow, None, result, None)
        best = POINTER(dnnl.dnnl_primitive_desc_query_md(what, WEIGHTS_OF, 0))
        plain = form((depth, width), BFLOAT16, (1, depth))
        weights = made("memory_create", best, ENGINE, POINTER(ALLOCATE))
        given = made("memory_create", plain, ENGINE, POINTER(w_FD.ctypes.data))
        reorder = made("reorder_primitive_desc_create", plain, ENGINE, best, ENGINE, None)
        roles = (Argument * 2)(Argument(SOURCE, given), Argument(DESTINATION, weights))
        dnnl.dnnl_primitive_execute(made("primitive_create", reorder), STREAM, 2, roles)
        dnnl.dnnl_stream_wait(STREAM)
        x, y = (made("memory_create", one, ENGINE, POINTER()) for one in (source, result))
        roles = (Argument * 3)(
            Argument(SOURCE, x), Argument(WEIGHTS, weights), Argument(DESTINATION, y)
        )
        primitive = made("primitive_create", what)
        fields = (primitive.value, STREAM.value, x.value, y.value, ctypes.addressof(roles))
        return cls(fields, (roles,))


@intrinsic
def pointer(context: Any, address: Any) -> Any:
    """Takes a number as an address."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@numba.njit(inline="always")
def load(address: int, offset: int) -> int:
    return numba.carray(pointer(address + offset), (1,), dtype=np.int64)[0]


def function(name: str, *args: Any) -> Any:
    address = ctypes.cast(getattr(dnnl, name), POINTER).value
    return ctypes.CFUNCTYPE(ctypes.c_int, *args)(address)


set_data = function("dnnl_memory_set_data_handle", INT64, INT64)
execute = function("dnnl_primitive_execute", INT64, INT64, ctypes.c_int, INT64)
wait = function("dnnl_stream_wait", INT64)


@numba.cfunc("int64(int64)", nopython=True)
def handler(frame: int) -> int:
    """Multiplies the input with the packed weight of a layer. Returns 0: no error."""
    extension = load(frame, EXTENSION)
    if extension != 0:
        version = numba.carray(pointer(load(extension, METADATA) + VERSION), (2,), dtype=np.int32)
        version[0], version[1] = INTERFACE
        return 0
    args = load(frame, ARGS)
    layer = numba.carray(pointer(load(load(args, 8), DATA)), (1,), dtype=np.int32)[0]
    table = load(load(load(load(frame, ATTRIBUTES), 0), 8), 0)
    fields = table + layer * (8 * FIELDS)
    set_data(load(fields, 16), load(load(args, 0), DATA))
    set_data(load(fields, 24), load(load(load(frame, RESULTS), 0), DATA))
    execute(load(fields, 0), load(fields, 8), 3, load(fields, 32))
    wait(load(fields, 8))
    return 0


def milliseconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return 1e3 * (time.perf_counter() - start)


def by_onednn(x_TD: jax.Array, i: jax.Array, table: np.ndarray, width: int) -> jax.Array:
    call = jax.ffi.ffi_call("packed", jax.ShapeDtypeStruct((x_TD.shape[0], width), jnp.float32))
    return call(x_TD.astype(jnp.bfloat16), i, table=np.int64(table.ctypes.data))


def by_xla(x_TD: jax.Array, i: jax.Array, w_LFD: jax.Array) -> jax.Array:
    return jax.lax.dot_general(
        x_TD.astype(jnp.bfloat16),
        w_LFD[i],
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )


def compare(up_LFD: np.ndarray, down_LDF: np.ndarray, rows: int, rounds: int) -> None:
    """Prints how long all layers take on either side, by turns, and how far apart they are."""
    num_layers, ffn, width = up_LFD.shape
    packed = [[Packed.of(w, rows) for w in stack] for stack in (up_LFD, down_LDF)]
    up, down = (np.array([one.fields for one in stack], np.int64) for stack in packed)

    @jax.jit
    def onednn(x_TD: jax.Array) -> jax.Array:
        def step(i: jax.Array, x_TD: jax.Array) -> jax.Array:
            return 1e-3 * by_onednn(by_onednn(x_TD, i, up, ffn), i, down, width)

        return jax.lax.fori_loop(0, num_layers, step, x_TD)

    @jax.jit
    def xla(x_TD: jax.Array, up_LFD: jax.Array, down_LDF: jax.Array) -> jax.Array:
        def step(i: jax.Array, x_TD: jax.Array) -> jax.Array:
            return 1e-3 * by_xla(by_xla(x_TD, i, up_LFD), i, down_LDF)

        return jax.lax.fori_loop(0, num_layers, step, x_TD)

    x_TD = jnp.asarray(np.random.default_rng(1).standard_normal((rows, width)), jnp.float32)
    stacks = jnp.asarray(up_LFD), jnp.asarray(down_LDF)
    sides: dict[str, Callable[[], Any]] = {
        "oneDNN": lambda: onednn(x_TD),
        "XLA": lambda: xla(x_TD, *stacks),
    }
    ours, theirs = (np.asarray(run()) for run in sides.values())
    off = np.abs(ours - theirs).max() / np.abs(theirs).max()
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            taken[name].append(milliseconds(run))
    figures = ", ".join(
        f"{name} {statistics.median(times):.2f} (least {min(times):.2f})"
        for name, times in taken.items()
    )
    print(f"{rows:4d} rows, ms: {figures}; largest difference {off:.1e} of the largest")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--ffn", type=int, default=2048)
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 8, 32, 512])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    jax.ffi.register_ffi_target("packed", jax.ffi.pycapsule(handler.address), platform="cpu")
    rng = np.random.default_rng(0)
    shapes = (args.layers, args.ffn, args.width), (args.layers, args.width, args.ffn)
    stacks = [rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in shapes]
    print(f"jax {jax.__version__}; {args.layers} layers of {args.width} x {args.ffn}, bfloat16")
    for rows in args.rows:
        compare(*stacks, rows, args.rounds)


if __name__ == "__main__":
    main()
