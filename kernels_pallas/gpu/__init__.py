"""Paged attention for NVIDIA GPUs of the Hopper generation, in Mosaic GPU."""

from typing import TYPE_CHECKING

from kernels_pallas.gpu.pages import (
    QuantisedPages,
    pack_numbers,
    pack_scales,
    padded_head_dim,
    unpack_numbers,
    unpack_scales,
)
from kernels_pallas.gpu.schedule import Schedule, make_schedule

if TYPE_CHECKING:
    from kernels_pallas.gpu.attention import ragged_paged_attention
else:

    def ragged_paged_attention(*operands, **options):
        """Imports the kernels when they are first called: Pallas takes 0.3 s."""
        from kernels_pallas.gpu import attention

        return attention.ragged_paged_attention(*operands, **options)


__all__ = [
    "QuantisedPages",
    "Schedule",
    "make_schedule",
    "pack_numbers",
    "pack_scales",
    "padded_head_dim",
    "ragged_paged_attention",
    "unpack_numbers",
    "unpack_scales",
]
