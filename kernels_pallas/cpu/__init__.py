"""Kernels for CPUs, as text in LLVM's intermediate representation: Pallas has no compiler for
CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kernels_pallas.cpu import attention, chunk, int4, matmul, matmul512, packed
from kernels_pallas.cpu.function import DECLARED, Function
from kernels_pallas.cpu.tasks import release

WRITTEN: dict[str, tuple[Mapping[Any, str], Callable[[], list[Function]]]] = {
    "matmul": (matmul.HANDLERS, matmul.functions),
    "matmul512": (matmul512.HANDLERS, matmul512.functions),
    "packed": (
        {**packed.HANDLERS, "int4": int4.HANDLER},
        lambda: [*packed.functions(8), *int4.functions()],
    ),
    "packed512": (packed.HANDLERS512, partial(packed.functions, 16)),
    "attention": (attention.HANDLERS[8], partial(attention.functions, 8)),
    "attention512": (attention.HANDLERS[16], partial(attention.functions, 16)),
}
"""Handlers that are made together, and what writes them. Those with 512 need AVX-512."""

MORE = {
    "matmul512": matmul512.DECLARED,
    "packed": (*packed.DECLARED, *int4.DECLARED),
    "packed512": packed.DECLARED512,
    "attention512": chunk.DECLARED,
}
"""Declarations of what only some of them call."""


def handlers(name: str) -> tuple[str, ...]:
    """Names what XLA can call of one of `WRITTEN`."""
    return tuple(WRITTEN[name][0].values())


def llvm_ir(name: str) -> str:
    """Returns the text of a module with one of `WRITTEN`."""
    declared = (*DECLARED, *MORE.get(name, ()))
    written = [release(), *WRITTEN[name][1]()]
    return "\n".join([*declared, "", *(one.text() for one in written)])


__all__ = ["attention", "handlers", "int4", "llvm_ir", "matmul", "matmul512", "packed"]
