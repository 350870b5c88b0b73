"""Paged attention by the Pallas kernels for TPU, which write the step's keys and values in the same
pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.kv.codecs import Codec, PlainCodec
from jaxkv.kv.layout import LaneLayout, packing_of
from jaxkv.kv.state import GroupKV, empty_group
from jaxkv.ops.attention.base import Batch, Heads, Needs
from kernels_pallas.tpu import (
    Packed,
    Schedule,
    choose_tiles,
    make_schedule,
    ragged_paged_attention,
)


@dataclass(frozen=True, slots=True)
class PallasTpu:
    """See `base.Backend`. `interpret`: for tests on a CPU, as `pallas_call` takes it."""

    aligned_len: ClassVar[int] = 1
    interpret: Any = False

    def refuses(self, heads: Heads, needs: Needs) -> str | None:
        if needs.platform != "tpu" and not self.interpret:
            return f"expected a TPU, got {needs.platform}"
        if not isinstance(needs.codec, PlainCodec) and packing_of(needs.codec) is None:
            return (
                f"kv_cache_dtype: expected bfloat16, float32, int8 or int4, got {needs.codec.name}"
            )
        if needs.codec.dtype != "bfloat16" and packing_of(needs.codec) is not None:
            return (
                f"kv_cache_dtype {needs.codec.name}: expected a model in bfloat16, got "
                f"{needs.codec.dtype}"
            )
        try:
            jax.eval_shape(partial(self._try, heads, needs))
        except NotImplementedError as error:
            return str(error)
        return None

    def _try(self, heads: Heads, needs: Needs) -> jax.Array:
        """Attends one layer of the smallest step with all rows, to hear from the kernels what they
        do not take.
        """
        batch = jnp.zeros(needs.num_rows, jnp.int32)
        table_BW = jnp.zeros((needs.num_rows, needs.pages_per_row), jnp.int32)
        layout = self.page_layout(heads, needs.page_size, needs.codec)
        group = empty_group(num_layers=1, layout=layout, num_pages=1)
        group = replace(group, table_BW=table_BW, first_BW=table_BW, len_B=batch)
        made = Batch(batch, batch, batch, batch, batch, jnp.int32(0), jnp.int32(0))
        q_TNH = jnp.zeros((needs.num_rows, heads.num_heads, heads.head_dim))
        k_TKH = jnp.zeros((needs.num_rows, heads.num_kv_heads, heads.head_dim))
        prepared = self.prepare(group, made, heads)
        out_TNH, _ = self.attend(
            q_TNH,
            k_TKH,
            k_TKH,
            group,
            made,
            prepared,
            layer=0,
            scale=1.0,
            out_dtype=np.dtype(needs.codec.dtype),
        )
        return out_TNH

    def page_layout(self, heads: Heads, page_size: int, codec: Codec) -> LaneLayout:
        return LaneLayout(
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            page_size=page_size,
            codec=codec,
        )

    def prepare(self, group: GroupKV, batch: Batch, heads: Heads) -> Schedule:
        layout = _layout_of(group)
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
            tiles=choose_tiles(
                layout=layout.lanes,
                page_size=group.page_size,
                itemsize=jnp.dtype(group.codec.dtype).itemsize,
                num_heads=heads.num_heads,
                packing=layout.packing,
            ),
            packed=layout.packing is not None,
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
        out_dtype: np.dtype,
    ) -> tuple[jax.Array, GroupKV]:
        codec = group.codec
        quantised = None if group.scales is None else _layout_of(group).quantise
        out_TNH, pages = ragged_paged_attention(
            codec.rotate(q_TNH),
            k_TKH if quantised is None else quantised(k_TKH),
            v_TKH if quantised is None else quantised(v_TKH),
            group.pages if group.scales is None else Packed(group.pages, group.scales),
            prepared,
            layer=layer,
            num_pages=group.num_pages,
            scale=scale,
            out_dtype=out_dtype if quantised is None else jnp.float32,
            interpret=self.interpret,
        )
        if isinstance(pages, Packed):
            return codec.restore(out_TNH).astype(out_dtype), replace(
                group, pages=pages.words, scales=pages.scales
            )
        return out_TNH, replace(group, pages=pages)


def _layout_of(group: GroupKV) -> LaneLayout:
    if not isinstance(group.layout, LaneLayout):
        raise TypeError(f"expected pages of the TPU kernels, got {group.layout}")
    return group.layout
