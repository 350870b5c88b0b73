"""Paged attention by the Pallas kernels for TPU, which write the step's keys and values in the same
pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.kv.codecs import Codec, PlainCodec
from jaxkv.kv.codecs.int4 import Int4Codec
from jaxkv.kv.layout import LaneLayout, packing_of, quantised
from jaxkv.kv.state import PageTables, Store
from jaxkv.ops.attention.base import (
    Attended,
    Batch,
    Heads,
    Needs,
    Place,
    Terms,
    refuse_chunks,
    refuse_statistics,
    refuse_xla_only,
    refused_when_traced,
    runs_on_xla,
)
from kernels_pallas.tpu import (
    Packed,
    Schedule,
    Tiles,
    choose_tiles,
    make_schedule,
    padded_head_dim,
    ragged_latent_attention,
    ragged_paged_attention,
)


@dataclass(frozen=True, slots=True)
class PallasTpu:
    """See `base.Backend`. For tests on a CPU: `interpret`, as `pallas_call` takes it, and `tiles`
    that an interpreter is not long at.
    """

    aligned_len: ClassVar[int] = 1
    interpret: Any = False
    tiles: Tiles | None = None

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
        if (reason := runs_on_xla(heads)) is not None:
            return reason
        if heads.latent_dim is not None:
            if needs.divides_tokens:
                return "pages whose tokens devices divide run on xla"
            if heads.cap or heads.has_sinks:
                return "latent attention: expected scores without a cap and without sinks"
            if isinstance(needs.codec, Int4Codec):  # it mixes what is value with what is not
                return "latent attention: kv_cache_dtype: expected bfloat16, float32 or int8"
        return refused_when_traced(self, heads, needs)

    def page_layout(self, heads: Heads, page_size: int, codec: Codec) -> LaneLayout:
        return LaneLayout(
            num_kv_heads=heads.num_kv_heads,
            head_dim=padded_head_dim(heads.head_dim, latent=heads.latent_dim is not None),
            page_size=page_size,
            codec=codec,
            latent_dim=heads.latent_dim,
        )

    def prepare(self, store: Store, tables: PageTables, batch: Batch, heads: Heads) -> Schedule:
        refuse_chunks(heads)
        layout = _layout_of(store)
        return make_schedule(
            tables.table_BW,
            tables.first_BW,
            tables.len_B + batch.count_B,
            batch.start_B,
            batch.count_B,
            batch.num_decode,
            batch.num_rows,
            num_tokens=batch.token_T.shape[0],
            page_size=store.page_size,
            window=heads.window,
            tiles=self.tiles
            or choose_tiles(
                layout=layout.lanes,
                page_size=store.page_size,
                itemsize=jnp.dtype(store.codec.dtype).itemsize,
                num_heads=heads.num_heads,
                packing=layout.packing,
            ),
            packed=layout.packing is not None,
            decode_only=batch.decode_only,
        )

    def attend(
        self,
        q_TNH: jax.Array,
        k_TKH: jax.Array | None,
        v_TKH: jax.Array | None,
        at: Place,
        batch: Batch,
        prepared: Schedule,
        terms: Terms,
    ) -> Attended:
        refuse_statistics(at)
        refuse_xla_only(terms)
        store, layout = at.store, _layout_of(at.store)
        codec, rank = store.codec, layout.latent_dim
        if terms.maps is not None:  # the kernel has this form alone
            q_TNH = terms.maps.absorb(q_TNH)
            q_TNH = jnp.pad(q_TNH, ((0, 0), (0, 0), (0, layout.head_dim - q_TNH.shape[2])))
        quantise = (lambda x: x) if store.scales is None else partial(quantised, codec)
        pool = store.pages if store.scales is None else Packed(store.pages, store.scales)
        rounded = terms.out_dtype if store.scales is None else np.dtype(np.float32)
        if rank is not None and k_TKH is not None:
            out_TNH, pages = ragged_latent_attention(
                q_TNH,
                quantise(k_TKH[:, 0]),
                pool,
                prepared,
                rank=rank,
                layer=at.layer,
                num_pages=store.num_pages,
                scale=terms.scale,
                out_dtype=rounded,
                interpret=self.interpret,
            )
        elif k_TKH is not None and v_TKH is not None:
            out_TNH, pages = ragged_paged_attention(
                codec.rotate(q_TNH),
                quantise(k_TKH),
                quantise(v_TKH),
                pool,
                prepared,
                layer=at.layer,
                num_pages=store.num_pages,
                scale=terms.scale,
                softcap=terms.cap or None,
                sinks_N=terms.sinks_N,
                out_dtype=rounded,
                interpret=self.interpret,
            )
        else:  # decode writes where it attends
            raise NotImplementedError("layers that attend to what another has stored run on xla")
        if isinstance(pages, Packed):
            store = store.with_arrays(pages.words, pages.scales)
            restored = out_TNH if rank is not None else codec.restore(out_TNH)
            out_TNH = restored.astype(terms.out_dtype)
        else:
            store = store.with_arrays(pages)
        if terms.maps is not None:
            out_TNH = terms.maps.values_of(out_TNH[..., :rank])
        return Attended(out_TNH, store, None)


def _layout_of(store: Store) -> LaneLayout:
    if not isinstance(store.layout, LaneLayout):
        raise TypeError(f"expected pages of the TPU kernels, got {store.layout}")
    return store.layout
