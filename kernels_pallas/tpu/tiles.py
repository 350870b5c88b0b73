"""Block sizes of the attention kernels, chosen by the schedule that the TPU compiler makes (scripts/tpu_cost.py)."""

from __future__ import annotations

from dataclasses import dataclass

TILE = 16
"""Slots that are written together: the rows of a bfloat16 register tile, so that DMAs begin at a tile's border."""

SLOTS = 3
"""Blocks in VMEM during decode: one is attended while two are on their way."""

DECODE_BYTES = 4 << 20
"""Of one block of decode pages: enough to cover a DMA's latency, three of them fit the VMEM of every generation."""

DECODE_TOKENS = 2048
PREFILL_TOKENS = 512
PREFILL_ROWS = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """decode_pages, prefill_pages: pages of one block; prefill_queries: tokens of one query block, a multiple of TILE."""

    decode_pages: int
    prefill_pages: int
    prefill_queries: int

    @property
    def decode_spare(self) -> int:
        """List entries past the last decode item: prefetches and the last round read them."""
        return 2 * SLOTS


def choose_tiles(*, page_shape: tuple[int, int, int], itemsize: int, queries_per_row: int) -> Tiles:
    """For pages [C, S, X]; queries_per_row: query heads that meet one row of keys."""
    rows, size, width = page_shape
    page_bytes = rows * size * width * itemsize
    return Tiles(
        decode_pages=max(1, min(DECODE_BYTES // page_bytes, DECODE_TOKENS // size)),
        prefill_pages=max(1, min(DECODE_BYTES // page_bytes, PREFILL_TOKENS // size)),
        prefill_queries=max(TILE, PREFILL_ROWS // queries_per_row // TILE * TILE),
    )
