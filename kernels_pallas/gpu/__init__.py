"""Paged attention for NVIDIA GPUs of the Hopper generation, in Mosaic GPU."""

from kernels_pallas.gpu.attention import Int8Pages, ragged_paged_attention
from kernels_pallas.gpu.schedule import Schedule, make_schedule

__all__ = ["Int8Pages", "Schedule", "make_schedule", "ragged_paged_attention"]
