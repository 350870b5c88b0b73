"""Paged attention for TPU."""

from typing import TYPE_CHECKING

from kernels_pallas.tpu.layout import (
    Layout,
    latent_layout_of,
    layout_of,
    pack,
    padded_head_dim,
    unpack,
)
from kernels_pallas.tpu.packing import Packed, Packing, Quantised, pack_pages, unpack_scales
from kernels_pallas.tpu.schedule import Schedule, make_schedule
from kernels_pallas.tpu.tiles import Tiles, choose_tiles, most_rows_of_parts

if TYPE_CHECKING:
    from kernels_pallas.tpu.attention import (
        latent_decode_part,
        paged_decode_part,
        ragged_latent_attention,
        ragged_paged_attention,
    )
else:

    def latent_decode_part(*operands, **options):
        """Imports the kernels when they are first called."""
        from kernels_pallas.tpu import attention

        return attention.latent_decode_part(*operands, **options)

    def paged_decode_part(*operands, **options):
        """Imports the kernels when they are first called."""
        from kernels_pallas.tpu import attention

        return attention.paged_decode_part(*operands, **options)

    def ragged_latent_attention(*operands, **options):
        """Imports the kernels when they are first called."""
        from kernels_pallas.tpu import attention

        return attention.ragged_latent_attention(*operands, **options)

    def ragged_paged_attention(*operands, **options):
        """Imports the kernels when they are first called: Pallas takes 0.3 s."""
        from kernels_pallas.tpu import attention

        return attention.ragged_paged_attention(*operands, **options)


__all__ = [
    "Layout",
    "Packed",
    "Packing",
    "Quantised",
    "Schedule",
    "Tiles",
    "choose_tiles",
    "latent_decode_part",
    "latent_layout_of",
    "layout_of",
    "make_schedule",
    "most_rows_of_parts",
    "pack",
    "pack_pages",
    "padded_head_dim",
    "paged_decode_part",
    "ragged_latent_attention",
    "ragged_paged_attention",
    "unpack",
    "unpack_scales",
]
