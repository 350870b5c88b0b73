"""Paged attention for NVIDIA GPUs of the Hopper generation, in Mosaic GPU."""

from kernels_pallas.gpu.attention import Statistics, ragged_paged_attention
from kernels_pallas.gpu.schedule import Schedule, make_schedule

__all__ = ["Schedule", "Statistics", "make_schedule", "ragged_paged_attention"]
