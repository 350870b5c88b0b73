"""What programs are compiled with beside XLA's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from jaxkv.weights.tree import Weights

COMPILER_OPTIONS = {
    "TPU7x": {"xla_tpu_control_large_2nd_minor_layout_for_x16": "0"},
    "TPU v5 lite": {"xla_tpu_scoped_vmem_limit_kib": "65536"},
    "TPU v6 lite": {"xla_tpu_scoped_vmem_limit_kib": "65536"},
    "gpu": {"xla_gpu_enable_triton_gemm": "False", "xla_gpu_dot_merger_threshold_mb": "0"},
}
"""By kind of device, or by platform. TPU7x: XLA would have bfloat16 matrices in tiles of 16 rows,
but takes arguments in tiles of 8, and so lays out all stacked weights anew in every step (7 GiB for
Llama-3.1-8B; libtpu 0.0.42.1 and 0.0.50.1). v5e and v6e: half of their VMEM rather than an eighth
or a quarter for what one operation has there, so that a matmul reads its weight in larger parts
(docs/benchmarks/tpu_loop.md). GPU: XLA copies a layer's matrix out of its stack before Triton
multiplies with it, and to join it with others, where cuBLAS reads it in the stack
(docs/benchmarks/gpu_kernels.md).
"""

if jax.__version_info__ < (0, 11):
    # A third less to compile, and no slower (docs/benchmarks/start.md); later versions have no such
    # option.
    COMPILER_OPTIONS["cpu"] = {"xla_cpu_use_fusion_emitters": "False"}


def compiler_options(device: Any, weights: Weights) -> Mapping[str, str] | None:
    """Returns the options for programs of a device that take these weights; None for XLA's own."""
    options = COMPILER_OPTIONS.get(device.device_kind) or COMPILER_OPTIONS.get(device.platform)
    if device.platform == "gpu" and any(x.dtype.itemsize == 1 for x in jax.tree.leaves(weights)):
        # Triton turns quantised numbers into others inside a matmul. cuBLAS would have them written
        # out first, which is more than the copy.
        return None
    return options
