"""Paged attention by the Pallas kernels for TPU, which write the step's keys and values in the same pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.kv.state import GroupKV
from jaxkv.ops.attention.base import Batch, Heads, Needs
from kernels_pallas.tpu import Schedule, Tiles, choose_tiles, layout_of, make_schedule, ragged_paged_attention
from kernels_pallas.tpu.attention import PAGE_SIZES, refuses_tables


@dataclass(frozen=True, slots=True)
class PallasTpu:
    """See `base.Backend`. `interpret`: for tests on a CPU, as `pallas_call` takes it."""

    interpret: Any = False

    def refuses(self, heads: Heads, needs: Needs) -> str | None:
        if needs.platform != "tpu" and not self.interpret:
            return f"expected a TPU, got {needs.platform}"
        if needs.page_size not in PAGE_SIZES:
            return f"expected a block_size out of {PAGE_SIZES}, got {needs.page_size}"
        try:
            layout_of(kv_heads=heads.num_kv_heads, head_dim=heads.head_dim)
        except NotImplementedError as error:
            return str(error)
        rows = jax.ShapeDtypeStruct((needs.num_rows,), jnp.int32)
        table = jax.ShapeDtypeStruct((needs.num_rows, needs.pages_per_row), jnp.int32)
        static: Any = {"num_tokens": needs.num_rows, "page_size": needs.page_size, "window": heads.window}
        tiles = _tiles(heads, page_size=needs.page_size, itemsize=needs.itemsize)
        loop = partial(make_schedule, **static, tiles=tiles, decode_only=True)
        reason = refuses_tables(jax.eval_shape(loop, table, table, rows, rows, rows, jnp.int32(0), jnp.int32(0)))
        return None if reason is None else f"{reason}: lower max_model_len or max_num_seqs"

    def page_shape(self, heads: Heads, page_size: int) -> tuple[int, int, int]:
        layout = layout_of(kv_heads=heads.num_kv_heads, head_dim=heads.head_dim)
        return layout.rows, page_size, layout.width

    def prepare(self, group: GroupKV, batch: Batch, heads: Heads) -> Schedule:
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
            tiles=_tiles(heads, page_size=group.page_size, itemsize=group.pages.dtype.itemsize),
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


def _tiles(heads: Heads, *, page_size: int, itemsize: int) -> Tiles:
    layout = layout_of(kv_heads=heads.num_kv_heads, head_dim=heads.head_dim)
    return choose_tiles(layout=layout, page_size=page_size, itemsize=itemsize, num_heads=heads.num_heads)
