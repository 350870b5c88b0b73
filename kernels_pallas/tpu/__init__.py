"""Paged attention for TPU."""

from kernels_pallas.tpu.attention import ragged_paged_attention
from kernels_pallas.tpu.layout import Layout, layout_of, pack, unpack
from kernels_pallas.tpu.packing import Packed, Packing, Quantised, pack_pages, unpack_scales
from kernels_pallas.tpu.schedule import Schedule, make_schedule
from kernels_pallas.tpu.tiles import Tiles, choose_tiles

__all__ = [
    "Layout",
    "Packed",
    "Packing",
    "Quantised",
    "Schedule",
    "Tiles",
    "choose_tiles",
    "layout_of",
    "make_schedule",
    "pack",
    "pack_pages",
    "ragged_paged_attention",
    "unpack",
    "unpack_scales",
]
