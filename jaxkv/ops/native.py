"""Runs machine code of our own on a CPU (`kernels_pallas.cpu`), which llvmlite makes: `pip install
"jaxkv[cpu]"`. It multiplies with weights, and attends (`ops.attention.native`). Without it XLA
does.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Lock, Thread
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from jaxkv.axes import Array
from jaxkv.files import write_whole
from jaxkv.version import digest_of_sources
from kernels_pallas.cpu import handlers, int4, llvm_ir, matmul512, packed
from kernels_pallas.cpu import matmul as matmul256

VARIABLE = "JAXKV_CPU_KERNELS"
"""Names the variable of the environment that may say "xla" or "native", where a CPU is not to
choose.
"""

NEEDED = ("avx2", "fma")
WIDE = ("avx512f", "avx512bw", "avx512vl", "avx512bf16", "avx512vnni")
"""Machine code with vectors of 512 bits needs these."""

EXIT_S = 5.0
"""The end of a process waits so long for the imports of what makes machine code."""

_lock, _packed_lock = Lock(), Lock()
_folder: Path | None = None


class _Code(NamedTuple):
    """Says what machine code there is: why none, and by what it multiplies or why it does not."""

    missing: str | None
    matmul: ModuleType | None
    not_multiplying: str | None


def unused_because() -> str | None:
    """Says why there is no machine code; None where there is, which the first call makes.

    Raises: ValueError for another value of `VARIABLE`. Where it asks for machine code, ImportError
    without llvmlite, NotImplementedError on a processor that it is not for.
    """
    return _code().missing


def matmul_unused_because() -> str | None:
    """Says why XLA multiplies; None where machine code does. Raises: as `unused_because`."""
    return _code().not_multiplying


def is_wide() -> bool:
    """Tells whether there is machine code for AVX-512. Raises: as `unused_because`."""
    return _code().matmul is matmul512


def described() -> str:
    """Says what a CPU multiplies by. Raises: as `unused_because`."""
    code = _code()
    if code.matmul is None:
        return f"XLA ({code.not_multiplying})"
    return f"machine code of jaxkv ({'AVX-512' if code.matmul is matmul512 else 'AVX2'})"


def prepare(folder: Path | None) -> None:
    """Has the machine code made by a thread, in a second, while the caller does something else.

    folder: keeps it for the next start; nobody else may write to it. Raises: ValueError for another
    word in the environment.
    """
    global _folder
    _folder = folder
    if _asked() is None:  # else what the processor lacks the caller is to hear
        _begin()


@cache
def _begin() -> None:
    """Starts the thread. The end of the process waits for it, so that LLVM does not lose its memory
    while it works, however slow the machine is. Only for imports it does not wait for ever: a
    Ctrl-C during one may leave a lock of Python's taken, which those of the thread then wait for.
    """
    has_imported = Event()

    def make() -> None:
        try:
            _import_all()
        finally:
            has_imported.set()
        make_all()

    def end() -> None:
        if has_imported.wait(EXIT_S):
            thread.join()

    thread = Thread(target=make, name="jaxkv-native", daemon=True)
    thread.start()
    atexit.register(end)


def _import_all() -> None:
    """Imports what makes machine code. JAX imports more when it is asked for its devices."""
    if jax.default_backend() == "cpu" and find_spec("llvmlite") is not None:
        import llvmlite.binding  # noqa: F401


def make_all() -> None:
    """Gives XLA all that a compiled program may call. Raises: as `unused_because`."""
    code = _code()
    if code.matmul is not None:
        _make_packed(code.matmul)


def _make_packed(matmul: ModuleType) -> None:
    """Makes what multiplies with quantised weights: when a program with some is traced, or one that
    was kept is read, which may call it.
    """
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features().flatten()
    with _packed_lock:
        _register(llvm, features, "packed512" if matmul is matmul512 else "packed")


def _code() -> _Code:
    with _lock:
        return _decided()


def _asked() -> str | None:
    asked = os.environ.get(VARIABLE)
    if asked not in (None, "xla", "native"):
        raise ValueError(f'{VARIABLE}: expected "xla" or "native", got "{asked}"')
    return asked


@cache
def _decided() -> _Code:
    asked = _asked()

    def none(reason: str) -> _Code:
        return _Code(reason, None, reason)

    if asked == "xla":
        return none(f"{VARIABLE} asks for it")
    if jax.default_backend() != "cpu":
        return none(f"jax runs on a {jax.default_backend()}")
    if find_spec("llvmlite") is None:
        missing = 'llvmlite is not installed: pip install "jaxkv[cpu]"'
        if asked is None:
            return none(missing)
        raise ImportError(f"{VARIABLE}=native: {missing}")
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    if lacking := [name for name in NEEDED if not features.get(name)]:
        reason = f"the processor has no {' and no '.join(lacking)}"
        if asked is None:
            return none(reason)
        raise NotImplementedError(f"{VARIABLE}=native: {reason}; unset it, or ask for xla")
    lacking = [name for name in WIDE if not features.get(name)]
    _register(llvm, features.flatten(), "attention" if lacking else "attention512")
    if lacking and asked is None and features.get("avx512f"):
        # XLA multiplies 16 numbers at a time there, the other kernel eight.
        which = f"a processor with avx512f and no {' and no '.join(lacking)}"
        return _Code(None, None, f"not measured on {which}: {VARIABLE}=native tries it")
    _register(llvm, features.flatten(), "matmul" if lacking else "matmul512")
    return _Code(None, matmul256 if lacking else matmul512, None)


@cache
def _register(llvm: Any, features: str, kernel: str) -> None:
    """Gives XLA the machine code of a kernel, which is made anew where the folder has not kept it
    for this processor and version.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    processor = llvm.get_host_cpu_name()
    about = "\n".join([version("llvmlite"), processor, features, digest_of_sources()]).encode()
    file = None if _folder is None else _folder / kernel
    code = None if file is None else _read(file, about)
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=processor, features=features, opt=3
    )
    if code is None:
        module = llvm.parse_assembly(llvm_ir(kernel))
        module.verify()
        # With a speed_level of 3 LLVM takes longer, and what it makes does not take shorter.
        options = llvm.create_pipeline_tuning_options(speed_level=1)
        passes = llvm.create_pass_builder(machine, options)
        passes.getModulePassManager().run(module, passes)
        code = machine.emit_object(module)
        if file is not None:
            _write(file, about, code)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    form = ctypes.CFUNCTYPE(ctypes.c_void_p)
    for name in handlers(kernel):
        handler = jax.ffi.pycapsule(form(engine.get_function_address(name)))
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
    engine.detach()  # never freed: XLA's threads may be in it when the interpreter ends


def _read(file: Path, about: bytes) -> bytes | None:
    """Returns machine code that was kept; None if there is none, or it is damaged, or was made of
    something else.
    """
    try:
        data = file.read_bytes()
    except OSError:
        return None
    digest, code = data[:32], data[32:]
    return code if digest == hashlib.sha256(about + code).digest() else None


def _write(file: Path, about: bytes, code: bytes) -> None:
    try:
        write_whole(file, [hashlib.sha256(about + code).digest(), code])
    except OSError as error:
        warnings.warn(f"machine code is not kept for the next start: {error}", stacklevel=2)


def takes(shape: tuple[int, ...], dtype: np.dtype) -> bool:
    """Tells whether the machine code multiplies with matrices [..., F, D] of this dtype."""
    kernel = _code().matmul
    if kernel is None or dtype.name not in kernel.HANDLERS:
        return False
    outputs, columns = shape[-2:]
    fits = outputs % kernel.MULTIPLE == 0 and columns % kernel.COLUMNS[dtype.name] == 0
    return fits and (dtype.name != "int8" or columns <= kernel.LONGEST)


@jax.custom_jvp
def matmul(x_TD: Array, w_NFD: Array, index: int | Array) -> Array:
    """Computes x @ w[index].T, [T, F] float32, with x in the dtype of w.

    The bits of a row do not depend on T. w may have the bits of bfloat16 values, as uint16.
    """
    dtype = "float32" if w_NFD.dtype == jnp.float32 else "bfloat16"
    return _call(dtype, _multiplied_as(x_TD, w_NFD.dtype), w_NFD, index, jnp.float32)


def _multiplied_as(x_TD: Array, dtype: np.dtype) -> Array:
    """Returns x as the machine code multiplies it with float32, or with bfloat16 or its bits."""
    x_TD = x_TD.astype(jnp.float32)
    if dtype == jnp.float32:
        return x_TD
    if is_wide():
        return x_TD.astype(jnp.bfloat16)
    # No conversion to bfloat16 and back, which compilers may leave out.
    return jax.lax.reduce_precision(x_TD, exponent_bits=8, mantissa_bits=7)


def matmul_int8(x_TD: Array, w_NFD: Array, index: int | Array) -> Array:
    """Computes x @ w[index].T of int8, [T, F] int32."""
    if _code().matmul is matmul512:
        x_TD = jax.lax.bitcast_convert_type(x_TD, jnp.uint8) ^ 128  # 128 is added
    else:
        x_TD = x_TD.astype(jnp.int16)
    return _call("int8", x_TD, w_NFD, index, jnp.int32)


def takes_packed(shape: tuple[int, ...], kind: np.dtype, dtype: np.dtype) -> bool:
    """Tells whether the machine code multiplies with matrices of values [..., G, F, C] of this
    kind, in bytes of two or one by one, that stand for numbers of a dtype.
    """
    if _code().matmul is None or (_kind(kind), dtype.name) not in packed.HANDLERS:
        return False
    outputs, columns = shape[-2], shape[-1] * (2 if kind == jnp.uint8 else 1)
    return outputs % packed.MULTIPLE == 0 and columns % packed.COLUMNS == 0


def _kind(values: np.dtype) -> str:
    return "int4" if values == jnp.uint8 else values.name


def matmul_packed(
    x_TD: Array,
    values_NGFC: Array,
    index: int | Array,
    scales_NGF: Array | None,
    zeros_NGF: Array | None,
    table: Array | None,
    dtype: np.dtype,
) -> Array:
    """Computes x @ w.T, [T, F] float32, with x and w in `dtype`, where w is (what the values
    [index] stand for - zeros) * scales. The bits of a row do not depend on T.

    scales_NGF: bfloat16 or float32, zeros_NGF: int8 or float32, of all matrices or, with an N of 1,
    of the one [index]. None where there are none; with no scales there are no zeros. table: what
    values of 4 bits stand for, [16]. Raises: TypeError for scales or zeros of another dtype.
    """
    make_all()
    x_TD = _multiplied_as(x_TD, dtype)
    kind, (_, groups, outputs, _) = _kind(values_NGFC.dtype), values_NGFC.shape
    D = x_TD.shape[1]
    if scales_NGF is None:
        scales_NGF = jnp.ones((1, groups, outputs) if kind == "int4" else (1, 0, 0))
    if zeros_NGF is None:
        zeros_NGF = jnp.zeros((1, 0, 0))
    if table is None:
        table = jnp.asarray([*range(8), *range(-8, 0)])
    names = packed.HANDLERS512 if is_wide() else packed.HANDLERS
    more = (scales_NGF, zeros_NGF)
    for x, least in zip(more, (jnp.bfloat16, jnp.int8), strict=True):
        if x.dtype not in (least, jnp.float32):  # the machine code tells them by their bytes
            raise TypeError(f"expected scales or zeros of {least.dtype} or float32, got {x.dtype}")
    beside = []
    for by in (128, 64):
        if kind == "int4" and (f"int4_by_{by}", dtype.name) in names and D // groups % by == 0:
            kind = f"int4_by_{by}"
            beside.append(((D,), x_TD.dtype))
    product = _Product(names[kind, dtype.name], outputs, jnp.float32, tuple(beside))
    return product(x_TD, values_NGFC, index, *more, table.astype(jnp.float32)[None, None])


def takes_int4(kind: np.dtype, columns: int, dtype: np.dtype) -> bool:
    """Tells whether `matmul_int4` multiplies with matrices of values of this kind that stand for
    numbers of a dtype, with groups of so many columns, where `takes_packed` does.
    """
    is_other = _kind(kind) != "int4" or dtype == jnp.float32
    return not is_other and not is_wide() and int4.part_of(columns) is not None


def matmul_int4(
    x_TD: Array,
    values_NGFC: Array,
    index: int | Array,
    scales_NGF: Array | None,
    zeros_NGF: Array | None,
) -> Array:
    """Computes x @ w[index].T, [T, F] float32, where w is (values - zeros) * scales, and x is
    rounded to 16 bits (`kernels_pallas.cpu.int4`). The bits of a row do not depend on T.

    scales_NGF: bfloat16, as zeros of int8 of all matrices or, with an N of 1, of the one [index].
    None where there are none.
    """
    make_all()
    D, (_, groups, outputs, _) = x_TD.shape[1], values_NGFC.shape
    part = int4.part_of(D // groups)
    if part is None:
        raise ValueError(f"groups: expected columns that `takes_int4`, got {D // groups}")
    beside = ((D,), "int16"), ((D // part, 2), "float32")
    if scales_NGF is None:
        scales_NGF = jnp.ones((1, groups, outputs), jnp.bfloat16)
    if zeros_NGF is None:
        zeros_NGF = jnp.zeros((1, 0, 0), jnp.int8)
    product = _Product(int4.HANDLER, outputs, jnp.float32, beside)
    return product(x_TD.astype(jnp.float32), values_NGFC, index, scales_NGF, zeros_NGF)


def _call(dtype: str, x_TD: Array, w_NFD: Array, index: int | Array, out_dtype: Any) -> Array:
    """Raises: RuntimeError where there is no machine code that multiplies."""
    kernel = _code().matmul
    if kernel is None:
        raise RuntimeError(f"expected machine code, but XLA multiplies: {_code().not_multiplying}")
    return _Product(kernel.HANDLERS[dtype], w_NFD.shape[1], out_dtype)(x_TD, w_NFD, index)


@dataclass(frozen=True, slots=True)
class _Product:
    """Calls a handler of `kernels_pallas.cpu.products`. beside: of further results the shape of
    what a row of x has, and the dtype.
    """

    handler: str
    num_outputs: int
    dtype: Any
    beside: tuple[tuple[tuple[int, ...], Any], ...] = ()

    def __call__(self, x_TD: Array, w: Array, index: int | Array, *more: Array) -> Array:
        """Returns x @ w[index].T. What `vmap` makes several of is one call, if w is one for all:
        each with its index, and its own of `more` where these differ.
        """
        call = custom_vmap(self._call)

        @call.def_vmap
        def together(
            count: int, is_mapped: Sequence[bool], x_TD: Array, w: Array, *others: Array
        ) -> tuple[Array, bool]:
            if is_mapped[1]:
                axes = [0 if mapped else None for mapped in is_mapped]
                return jax.vmap(self._call, in_axes=axes)(x_TD, w, *others), True
            x_PTD, index_P = (
                x if mapped else jnp.broadcast_to(x, (count, *x.shape))
                for x, mapped in ((x_TD, is_mapped[0]), (others[0], is_mapped[2]))
            )
            return self._call(x_PTD, w, index_P, *others[1:]), True

        return call(x_TD, w, jnp.asarray(index, jnp.int32), *more)

    def _call(self, x: Array, *operands: Array) -> Array:
        front = x.shape[:-2]
        results = [((*x.shape[:-1], self.num_outputs), self.dtype), (front or (1,), jnp.int32)]
        results += [((*x.shape[:-1], *shape), dtype) for shape, dtype in self.beside]
        made = [jax.ShapeDtypeStruct(*result) for result in results]
        y, *_ = jax.ffi.ffi_call(self.handler, made, vmap_method="sequential")(x, *operands)
        return y


@matmul.defjvp
def _derivative(primals: Any, tangents: Any) -> Any:
    x_TD, w_NFD, index = primals

    def plain(x_TD: Array, w_NFD: Array) -> Array:
        w_FD = jax.lax.dynamic_index_in_dim(w_NFD, index, keepdims=False)
        return jax.lax.dot_general(
            x_TD.astype(w_FD.dtype),
            w_FD,
            (((1,), (1,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST if w_FD.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )

    _, tangent_TF = jax.jvp(plain, (x_TD, w_NFD), tangents[:2])
    return matmul(x_TD, w_NFD, index), tangent_TF
