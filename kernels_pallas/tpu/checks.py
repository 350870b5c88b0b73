"""Says with which of Mosaic's own checks the kernels are compiled."""

from __future__ import annotations

import os
from typing import Any

from jax.experimental.pallas import tpu as pltpu

SWITCH = "JAXKV_KERNEL_CHECKS"
"""An environment variable; if it is 1, a kernel that reads or writes out of bounds, or leaves a
semaphore with a count, ends with an error instead of silently.
"""


def compiler_params(**given: Any) -> pltpu.CompilerParams:
    """Makes the parameters of a kernel, without checks unless `SWITCH` asks for them."""
    unchecked = os.environ.get(SWITCH) != "1"
    return pltpu.CompilerParams(
        **given, disable_bounds_checks=unchecked, disable_semaphore_checks=unchecked
    )
