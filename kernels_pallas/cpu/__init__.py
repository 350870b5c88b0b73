"""Kernels for CPUs, as text in LLVM's intermediate representation: Pallas has no compiler for
CPUs.
"""

from __future__ import annotations

from types import ModuleType

from kernels_pallas.cpu import attention, matmul, matmul512
from kernels_pallas.cpu.function import DECLARED
from kernels_pallas.cpu.tasks import release


def llvm_ir(kernel: ModuleType) -> str:
    """Returns the text of a module with the `HANDLERS` of a kernel: one of those here."""
    declared = (*DECLARED, *matmul512.DECLARED) if kernel is matmul512 else DECLARED
    written = [release(), *kernel.functions()]
    return "\n".join([*declared, "", *(one.text() for one in written)])


__all__ = ["attention", "llvm_ir", "matmul", "matmul512"]
