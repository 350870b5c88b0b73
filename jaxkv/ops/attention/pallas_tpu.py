"""Paged attention by the Pallas kernels for TPU, which write the step's keys and values in the same pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxkv.kv.state import GroupKV
from jaxkv.ops.attention.base import Batch, Heads
from kernels_pallas.tpu import Schedule, choose_tiles, layout_of, make_schedule, ragged_paged_attention
from kernels_pallas.tpu.attention import PAGE_SIZES


@dataclass(frozen=True, slots=True)
class PallasTpu:
    """See `base.Backend`. `interpret`: for tests on a CPU, as `pallas_call` takes it."""

    interpret: Any = False

    def refuses(self, heads: Heads, *, page_size: int, platform: str) -> str | None:
        if platform != "tpu" and not self.interpret:
            return f"expected a TPU, got {platform}"
        if page_size not in PAGE_SIZES:
            return f"expected a block_size out of {PAGE_SIZES}, got {page_size}"
        try:
            layout_of(kv_heads=heads.num_kv_heads, head_dim=heads.head_dim)
        except NotImplementedError as error:
            return str(error)
        return None

    def page_shape(self, heads: Heads, page_size: int) -> tuple[int, int, int]:
        layout = layout_of(kv_heads=heads.num_kv_heads, head_dim=heads.head_dim)
        return layout.rows, page_size, layout.width

    def prepare(self, group: GroupKV, batch: Batch, heads: Heads) -> Schedule:
        tiles = choose_tiles(
            layout=layout_of(kv_heads=heads.num_kv_heads, head_dim=heads.head_dim),
            page_size=group.page_size,
            itemsize=group.pages.dtype.itemsize,
            num_heads=heads.num_heads,
        )
        return make_schedule(
            group.table_BW,
            group.first_BW,
            group.len_B + batch.count_B,
            batch.start_B,
            batch.count_B,
            batch.num_decode,
            batch.num_rows,
            num_tokens=batch.token_T.shape[0],
            page_size=group.page_size,
            window=heads.window,
            tiles=tiles,
            decode_only=batch.decode_only,
        )

    def attend(
        self,
        q_TNH: jax.Array,
        k_TKH: jax.Array,
        v_TKH: jax.Array,
        group: GroupKV,
        batch: Batch,
        prepared: Schedule,
        *,
        layer: int | jax.Array,
        scale: float,
    ) -> tuple[jax.Array, GroupKV]:
        out_TNH, pages, _ = ragged_paged_attention(
            q_TNH,
            k_TKH,
            v_TKH,
            group.pages,
            prepared,
            layer=layer,
            num_pages=group.num_pages,
            scale=scale,
            interpret=self.interpret,
        )
        return out_TNH, replace(group, pages=pages)
