"""Multiplies with weights on a CPU by machine code of our own (`kernels_pallas.cpu`), which
llvmlite makes: `pip install "jaxkv[cpu]"`. Without it XLA multiplies.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib.util import find_spec
from threading import Lock, Thread
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.axes import Array
from kernels_pallas.cpu import matmul as kernel

VARIABLE = "JAXKV_MATMUL"
"""Names the variable of the environment that may say "xla" or "native", where a CPU is not to
choose.
"""

NEEDED = ("avx2", "fma")
NOT_MEASURED = ("avx512f",)
"""XLA may be faster with these: it multiplies 16 numbers at a time, or bfloat16 numbers."""

_lock = Lock()


def unused_because() -> str | None:
    """Says why XLA multiplies; None where the machine code does, which the first call makes.

    Raises: ValueError for another value of `VARIABLE`. Where it asks for machine code, ImportError
    without llvmlite, NotImplementedError on a processor that it is not for.
    """
    with _lock:
        return _unused_because()


def prepare() -> None:
    """Has the machine code made by a thread, in 0.5 s, while the caller does something else."""
    if os.environ.get(VARIABLE) is None:  # what is wrong with it the caller is to hear
        Thread(target=unused_because, name="jaxkv-native").start()


@cache
def _unused_because() -> str | None:
    asked = os.environ.get(VARIABLE)
    if asked not in (None, "xla", "native"):
        raise ValueError(f'{VARIABLE}: expected "xla" or "native", got "{asked}"')
    if asked == "xla":
        return f"{VARIABLE} asks for it"
    if jax.default_backend() != "cpu":
        return f"jax runs on a {jax.default_backend()}"
    if find_spec("llvmlite") is None:
        missing = 'llvmlite is not installed: pip install "jaxkv[cpu]"'
        if asked is None:
            return missing
        raise ImportError(f"{VARIABLE}=native: {missing}")
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    if lacking := [name for name in NEEDED if not features.get(name)]:
        reason = f"the processor has no {' and no '.join(lacking)}"
        if asked is None:
            return reason
        raise NotImplementedError(f"{VARIABLE}=native: {reason}; unset it, or ask for xla")
    if asked is None and (present := [name for name in NOT_MEASURED if features.get(name)]):
        return f"not measured on a processor with {', '.join(present)}: {VARIABLE}=native tries it"
    _register(llvm, features.flatten())
    return None


@cache
def _register(llvm: Any, features: str) -> None:
    """Gives XLA the machine code."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(kernel.llvm_ir())
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features, opt=3
    )
    # With a speed_level of 3 LLVM takes longer, and what it makes does not take shorter.
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=1))
    passes.getModulePassManager().run(module, passes)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    form = ctypes.CFUNCTYPE(ctypes.c_void_p)
    for name in kernel.HANDLERS.values():
        handler = jax.ffi.pycapsule(form(engine.get_function_address(name)))
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
    engine.detach()  # never freed: XLA's threads may be in it when the interpreter ends


def takes(shape: tuple[int, ...], dtype: np.dtype) -> bool:
    """Tells whether the machine code multiplies with matrices [..., F, D] of this dtype."""
    fits = all(size % kernel.MULTIPLE == 0 for size in shape[-2:])
    return fits and dtype.name in kernel.HANDLERS and unused_because() is None


@jax.custom_jvp
def matmul(x_TD: Array, w_NFD: Array, index: int | Array) -> Array:
    """Computes x @ w[index].T, [T, F] float32, with x in the dtype of w.

    The bits of a row do not depend on T. w may have the bits of bfloat16 values, as uint16.
    """
    x_TD = x_TD.astype(jnp.float32)
    if w_NFD.dtype == jnp.float32:
        return _call("float32", x_TD, w_NFD, index, jnp.float32)
    # No conversion to bfloat16 and back, which compilers may leave out.
    x_TD = jax.lax.reduce_precision(x_TD, exponent_bits=8, mantissa_bits=7)
    return _call("bfloat16", x_TD, w_NFD, index, jnp.float32)


def matmul_int8(x_TD: Array, w_NFD: Array, index: int | Array) -> Array:
    """Computes x @ w[index].T of int8, [T, F] int32."""
    return _call("int8", x_TD.astype(jnp.int16), w_NFD, index, jnp.int32)


def _call(dtype: str, x_TD: Array, w_NFD: Array, index: int | Array, out_dtype: Any) -> Array:
    result = jax.ShapeDtypeStruct((x_TD.shape[0], w_NFD.shape[1]), out_dtype)
    call = jax.ffi.ffi_call(kernel.HANDLERS[dtype], result, vmap_method="sequential")
    return call(x_TD, w_NFD, jnp.asarray(index, jnp.int32))


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
