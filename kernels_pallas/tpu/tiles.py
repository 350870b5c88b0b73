"""Block sizes of the attention kernels, chosen by the schedule that the TPU compiler makes.

What it came to is kept in kernels_pallas/tuned/ (scripts/tune_tpu.py), which `jaxkv check` holds
the kernels to.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels_pallas.tpu.layout import LANES, SUBLANES, Layout
from kernels_pallas.tpu.packing import Packing

TILE = 16
"""Slots that are written together: the rows of a bfloat16 register tile, so that DMAs begin at a
tile's border.
"""

SLOTS = 3
"""Blocks in VMEM during decode: one is attended while two are on their way."""

AHEAD = 6
"""Rows of heads whose scores are computed before the first one's values are: the most without a
register spill.
"""

DECODE_BYTES = 4 << 20
"""A block of decode pages has at most so many: enough to cover a DMA's latency, and three of them
fit the VMEM of every generation.
"""

DECODE_HEADS = 8
"""Rows of heads that decode works on without a loop: more spill registers."""

DECODE_TOKENS = 2048
PACKED_DECODE_TOKENS = 1024
"""Packed pages with several rows of heads take so many: with twice as many tokens twice as many
registers spill.
"""

LATENT_TOKENS = 512
"""Slots of a block of latent pages whose scores are in registers together."""

LATENT_AHEAD = 2
"""Parts of a block of latent pages whose scores are made before the first one's values are."""

PART_BYTES = 40 << 20
"""Decode rows of one call whose softmaxes are parts have so many bytes in VMEM: all heads of all
devices, which of 128 are 85 rows.
"""

PREFILL_TOKENS = 512
PREFILL_WIDE_HEADS = 8
"""Rows of heads from which prefill takes half of PREFILL_TOKENS at once, what the matmul unit adds
up in one go: with fewer rows there is not enough to do beside the softmax of so few tokens.
"""

PREFILL_STEPS = 16
"""A block of bfloat16 pages has two parts of so many tokens, if two times all rows of heads are no
more than this: where all queries see it, the softmax of one part's last row of heads runs beside
the matmuls of the next part. With fewer rows of heads a block's own costs weigh more, and more of
them are too much code.
"""

PREFILL_ROWS = 512
PREFILL_BYTES = 24 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Sizes blocks. decode_pages: pages of one; decode_heads: rows of heads that decode works on
    without a loop; prefill_pages: pages whose scores prefill works on together, prefill_parts: as
    many times of them in a block; prefill_queries: tokens of one, a multiple of TILE.
    """

    decode_pages: int
    decode_heads: int
    prefill_pages: int
    prefill_queries: int
    prefill_parts: int = 1

    @property
    def prefill_block(self) -> int:
        return self.prefill_pages * self.prefill_parts

    @property
    def decode_spare(self) -> int:
        """Counts list entries past the last decode item: prefetches and the last round read on."""
        return 2 * SLOTS


def choose_tiles(
    *, layout: Layout, page_size: int, itemsize: int, num_heads: int, packing: Packing | None = None
) -> Tiles:
    """Chooses sizes for pages [.., C, S, X], met by `num_heads` query heads. itemsize: bytes of a
    matmul's input, and of an element of the pages where they are not packed.
    """
    page_bytes = (
        layout.rows
        * page_size
        * layout.width
        * (8 * itemsize if packing is None else packing.num_bits)
        // 8
    )
    per_row = max(1, num_heads // layout.joined)
    # Of each query row in VMEM: the query twice, accumulator and result, running max and sum.
    row_bytes = layout.joined * (
        2 * layout.key_width * itemsize + 2 * layout.out_width * 4 + 2 * LANES * 4
    )
    rows = min(PREFILL_ROWS, PREFILL_BYTES // row_bytes)
    is_wide = layout.joined >= PREFILL_WIDE_HEADS
    prefill_tokens = PREFILL_TOKENS // (2 if is_wide else 1)
    in_parts = is_wide and 2 * layout.joined <= PREFILL_STEPS and packing is None and itemsize == 2
    decode_tokens = DECODE_TOKENS if packing is None or layout.joined == 1 else PACKED_DECODE_TOKENS
    return Tiles(
        decode_heads=max(
            n for n in range(1, layout.joined + 1) if layout.joined % n == 0 and n <= DECODE_HEADS
        ),
        decode_pages=max(1, min(DECODE_BYTES // page_bytes, decode_tokens // page_size)),
        prefill_pages=max(1, min(DECODE_BYTES // page_bytes, prefill_tokens // page_size)),
        prefill_queries=max(TILE, rows // per_row // TILE * TILE),
        prefill_parts=2 if in_parts else 1,
    )


def most_rows_of_parts(*, layout: Layout, itemsize: int, num_heads: int) -> int:
    """Returns how many decode rows' queries, results and softmaxes (`paged_decode_part`) fit in
    VMEM beside the blocks of pages.
    """
    padded = -(-num_heads // (layout.joined * SUBLANES)) * SUBLANES
    lanes = layout.key_width * itemsize + 4 * (layout.out_width + LANES)
    return max(1, PART_BYTES // (layout.joined * padded * lanes))


def sizes_attended(
    pages: int, *, layout: Layout, itemsize: int, packing: Packing | None = None
) -> list[int]:
    """Lists for how many of the `pages` of a decode block there is code; a block runs that for the
    fewest that hold what its row has in it.

    A quarter, half or all of bfloat16 pages. Others, latent ones and keys beside their values have
    one size: their code spills registers on some chip, and each copy of it would spill as many.
    """
    if packing is not None or itemsize > 2 or layout.kind in ("latent", "beside"):
        return [pages]
    return sorted({max(1, pages // 4), max(1, pages // 2), pages})
