"""Paged attention by the Pallas kernels for TPU, which write the step's keys and values in the same pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.kv.codecs import Codec, PlainCodec
from jaxkv.kv.state import GroupKV
from jaxkv.ops.attention.base import Batch, Heads, Needs
from kernels_pallas.tpu import Schedule, choose_tiles, layout_of, make_schedule, ragged_paged_attention


@dataclass(frozen=True, slots=True)
class PallasTpu:
    """See `base.Backend`. `interpret`: for tests on a CPU, as `pallas_call` takes it."""

    interpret: Any = False

    def refuses(self, heads: Heads, needs: Needs) -> str | None:
        if needs.platform != "tpu" and not self.interpret:
            return f"expected a TPU, got {needs.platform}"
        if not isinstance(needs.codec, PlainCodec):
            return f"kv_cache_dtype: expected bfloat16 or float32, got {needs.codec.name}"
        try:
            jax.eval_shape(partial(self._try, heads, needs))
        except NotImplementedError as error:
            return str(error)
        return None

    def _try(self, heads: Heads, needs: Needs) -> jax.Array:
        """One layer of the smallest step with all rows, to hear from the kernels what they do not take."""
        batch = jnp.zeros(needs.num_rows, jnp.int32)
        table_BW = jnp.zeros((needs.num_rows, needs.pages_per_row), jnp.int32)
        pages = jnp.zeros((1, *self.page_shape(heads, needs.page_size, needs.codec)), needs.codec.storage_dtype)
        group = GroupKV(pages, table_BW, table_BW, batch, codec=needs.codec, num_layers=1)
        made = Batch(batch, batch, batch, batch, batch, jnp.int32(0), jnp.int32(0))
        q_TNH = jnp.zeros((needs.num_rows, heads.num_heads, heads.head_dim))
        k_TKH = jnp.zeros((needs.num_rows, heads.num_kv_heads, heads.head_dim))
        prepared = self.prepare(group, made, heads)
        options: Any = {"layer": 0, "scale": 1.0, "out_dtype": needs.codec.storage_dtype}
        return self.attend(q_TNH, k_TKH, k_TKH, group, made, prepared, **options)[0]

    def page_shape(self, heads: Heads, page_size: int, codec: Codec) -> tuple[int, int, int]:
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
            tiles=choose_tiles(
                layout=layout_of(kv_heads=heads.num_kv_heads, head_dim=heads.head_dim),
                page_size=group.page_size,
                itemsize=group.pages.dtype.itemsize,
                num_heads=heads.num_heads,
            ),
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
        out_TNH, pages, _ = ragged_paged_attention(
            q_TNH,
            k_TKH,
            v_TKH,
            group.pages,
            prepared,
            layer=layer,
            num_pages=group.num_pages,
            scale=scale,
            out_dtype=out_dtype,
            interpret=self.interpret,
        )
        return out_TNH, replace(group, pages=pages)
