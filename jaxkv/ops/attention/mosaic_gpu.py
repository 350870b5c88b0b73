"""Paged attention by the Pallas kernels for GPUs of the Hopper generation; XLA writes the step's
keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.kv.codecs import Codec, PlainCodec
from jaxkv.kv.layout import HeadMajorLayout, ScalesApartLayout, has_numbers
from jaxkv.kv.state import PageTables, Store, destinations, write
from jaxkv.ops.attention.base import (
    Attended,
    Batch,
    Heads,
    Needs,
    Place,
    Terms,
    refuse_chunks,
    refuse_latents,
    refuse_statistics,
    refuse_xla_only,
    refused_when_traced,
    runs_on_xla,
)
from kernels_pallas.gpu import (
    QuantisedPages,
    Schedule,
    make_schedule,
    padded_head_dim,
    ragged_paged_attention,
)
from kernels_pallas.rows import Rows

HOPPER = "9.0"
"""The compute capability whose matmul instructions the kernels use; no other one has them."""

PROCESSORS = 132
"""An H100 or H200 has so many: where the GPU that is compiled for is not here."""


@dataclass(frozen=True, slots=True)
class MosaicGpu:
    """See `base.Backend`. For tests on a CPU: `interpret`, as `plgpu.kernel` takes it, and how many
    processors.
    """

    aligned_len: ClassVar[int] = 1
    tokens_over: ClassVar[None] = None
    interpret: Any = None
    num_processors: int | None = None

    def refuses(self, heads: Heads, needs: Needs) -> str | None:
        if not self.interpret:
            if needs.platform != "gpu":
                return f"expected a GPU, got {needs.platform}"
            if needs.compute_capability != HOPPER:
                return (
                    f"expected a GPU of compute capability {HOPPER} (H100, H200), got "
                    f"{needs.compute_capability}"
                )
        codec = needs.codec
        if not isinstance(codec, PlainCodec) and not has_numbers(codec):
            return f"kv_cache_dtype: expected bfloat16, int8 or int4, got {codec.name}"
        if codec.dtype != "bfloat16" and has_numbers(codec):
            return f"kv_cache_dtype {codec.name}: expected a model in bfloat16, got {codec.dtype}"
        if (reason := runs_on_xla(heads)) is not None:
            return reason
        if needs.token_parts > 1:
            return "pages whose tokens devices divide run on xla"
        if heads.latent_dim is not None:
            return "latent attention: expected values apart from keys; its kernel is not built"
        return refused_when_traced(self, heads, needs)

    def page_layout(self, heads: Heads, page_size: int, codec: Codec) -> HeadMajorLayout:
        kind = ScalesApartLayout if has_numbers(codec) else HeadMajorLayout
        return kind(
            num_kv_heads=heads.num_kv_heads,
            head_dim=padded_head_dim(heads.head_dim),
            page_size=page_size,
            codec=codec,
        )

    def prepare(
        self, store: Store, tables: PageTables, batch: Batch, heads: Heads
    ) -> tuple[jax.Array, Schedule]:
        refuse_chunks(heads)
        start_T = batch.start_B.at[batch.row_T].get(mode="fill", fill_value=0)
        offset_T = jnp.arange(batch.token_T.shape[0], dtype=jnp.int32) - start_T
        len_B = tables.len_B + batch.count_B
        rows = Rows(
            tables.table_BW,
            tables.first_BW,
            len_B,
            batch.start_B,
            batch.count_B,
            store.page_size,
            heads.window,
        )
        schedule = make_schedule(
            rows,
            batch.num_decode,
            batch.num_rows,
            num_tokens=batch.token_T.shape[0],
            num_heads=heads.num_heads,
            kv_heads=heads.num_kv_heads,
            head_dim=store.layout.head_dim,
            num_processors=self.num_processors or num_processors(),
            decode_only=batch.decode_only,
        )
        return destinations(store, tables, row_T=batch.row_T, offset_T=offset_T), schedule

    def attend(
        self,
        q_TNH: jax.Array,
        k_TKH: jax.Array | None,
        v_TKH: jax.Array | None,
        at: Place,
        batch: Batch,
        prepared: tuple[jax.Array, Schedule],
        terms: Terms,
    ) -> Attended:
        refuse_latents(terms)
        refuse_xla_only(terms)
        refuse_statistics(at)
        if k_TKH is None or v_TKH is None:
            raise NotImplementedError("layers that attend to what another has stored run on xla")
        dest_T, schedule = prepared
        store = write(at.store, k_TKH, v_TKH, dest_T=dest_T, layer=at.layer)
        pages: Any = store.pages
        if store.scales is not None:
            pages = QuantisedPages(store.pages, store.scales)
        out_TNH = ragged_paged_attention(
            store.codec.rotate(q_TNH),
            pages,
            schedule,
            layer=at.layer,
            num_pages=store.num_pages,
            scale=terms.scale,
            softcap=terms.cap or None,
            sinks_N=terms.sinks_N,
            out_dtype=terms.out_dtype if store.scales is None else np.dtype(np.float32),
            interpret=self.interpret,
        )
        return Attended(store.codec.restore(out_TNH).astype(terms.out_dtype), store, None)


def num_processors() -> int:
    """Counts those of the GPU that runs it: grids are cut for them."""
    (device, *_) = jax.devices()
    return device.core_count if device.platform == "gpu" else PROCESSORS
