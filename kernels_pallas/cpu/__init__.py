"""Kernels for CPUs, as text in LLVM's intermediate representation: Pallas has no compiler for
CPUs.
"""
