"""Paged attention by the Pallas kernels for TPU, which write the step's keys and values in the same
pass. Where devices divide the tokens of pages, the kernel attends decode rows to what each of them
has, and XLA the chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.axes import MeshAxes
from jaxkv.kv.codecs import Codec, PlainCodec
from jaxkv.kv.codecs.int4 import Int4Codec
from jaxkv.kv.layout import (
    HeadMajorLayout,
    LaneLayout,
    LaneRowsLayout,
    PageLayout,
    packing_of,
    quantised,
)
from jaxkv.kv.state import PageTables, Store, write
from jaxkv.ops.attention import xla
from jaxkv.ops.attention.absorbed import Absorbed
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
from jaxkv.ops.attention.divided import own_store, share_of, token_axes
from jaxkv.ops.attention.softmax import Softmax
from kernels_pallas.tpu import (
    Layout,
    Packed,
    Schedule,
    Tiles,
    choose_tiles,
    latent_decode_part,
    latent_layout_of,
    layout_of,
    make_schedule,
    most_rows_of_parts,
    padded_head_dim,
    paged_decode_part,
    ragged_latent_attention,
    ragged_paged_attention,
)
from kernels_pallas.tpu.layout import LANES

READERS = "layers that attend to what another has stored run on xla"


class Divided(NamedTuple):
    """Holds what is equal for all layers of a step whose pages' tokens devices divide: where tokens
    go in this device's pages, and the work of decode rows, so many at a time, each array with one
    more axis in front.
    """

    dest_T: jax.Array
    schedules: Schedule


@dataclass(frozen=True, slots=True)
class PallasTpu:
    """See `base.Backend`. For tests on a CPU: `interpret`, as `pallas_call` takes it, and `tiles`
    that an interpreter is not long at.
    """

    aligned_len: ClassVar[int] = 1
    interpret: Any = False
    tiles: Tiles | None = None
    tokens_over: MeshAxes | None = None

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
            if heads.cap or heads.has_sinks:
                return "latent attention: expected scores without a cap and without sinks"
            if isinstance(needs.codec, Int4Codec):  # it mixes what is value with what is not
                return "latent attention: kv_cache_dtype: expected bfloat16, float32 or int8"
        if needs.token_parts > 1:
            return self._refuses_parts(heads, needs)
        return refused_when_traced(self, heads, needs)

    def _refuses_parts(self, heads: Heads, needs: Needs) -> str | None:
        reason: str | None
        if not isinstance(needs.codec, PlainCodec):  # XLA reads these pages too
            reason = f"kv_cache_dtype: expected bfloat16 or float32, got {needs.codec.name}"
        elif heads.window is not None:
            reason = f"expected attention without a window, got {heads.window}"
        elif heads.has_sinks:
            reason = "expected scores without sinks"
        else:
            reason = refused_when_traced(replace(self, tokens_over="devices"), heads, needs)
        return reason and f"a part of pages on each device: {reason}"

    def page_layout(self, heads: Heads, page_size: int, codec: Codec) -> PageLayout:
        is_latent = heads.latent_dim is not None
        head_dim = padded_head_dim(heads.head_dim, latent=is_latent)
        kind: type[PageLayout] = LaneLayout
        if self.tokens_over is not None:  # XLA reads them too; in memory they are the same
            is_whole = not is_latent and head_dim % LANES == 0
            kind = HeadMajorLayout if is_whole else LaneRowsLayout
            head_dim = heads.head_dim if is_latent else head_dim
        return kind(
            num_kv_heads=heads.num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            codec=codec,
            latent_dim=heads.latent_dim,
        )

    def prepare(
        self, store: Store, tables: PageTables, batch: Batch, heads: Heads
    ) -> Schedule | Divided:
        refuse_chunks(heads)
        if not isinstance(store.layout, LaneLayout):
            return self._prepare_parts(store, tables, batch, heads)
        layout = store.layout
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

    def _prepare_parts(
        self, store: Store, tables: PageTables, batch: Batch, heads: Heads
    ) -> Divided:
        if self.tokens_over is None:
            raise TypeError(f"expected pages of the TPU kernels, got {store.layout}")
        axis = token_axes(store, self.tokens_over)
        dest_T, *_ = xla.Xla(tokens_over=self.tokens_over).prepare(store, tables, batch, heads)
        num_parts = 1 if axis is None else jax.lax.axis_size(axis)
        store, num_heads = own_store(store), heads.num_heads * num_parts
        share, size = share_of(store, axis), store.page_size
        lanes, itemsize = _lanes_of(store), jnp.dtype(store.codec.dtype).itemsize
        len_B = jnp.asarray(tables.len_B + batch.count_B)
        # Only a row's last page is not full.
        held_B = jnp.clip(len_B % share.page_size - share.begin, 0, size)
        held_B += len_B // share.page_size * size
        last_B = (len_B - 1) % share.page_size - share.begin
        # In a step with chunks XLA has written the tokens of decode rows too.
        writes_B = (last_B >= 0) & (last_B < size) & batch.decode_only
        tiles = self.tiles or choose_tiles(
            layout=lanes, page_size=size, itemsize=itemsize, num_heads=num_heads
        )
        num_rows = min(len(len_B), batch.token_T.shape[0])
        most = most_rows_of_parts(layout=lanes, itemsize=itemsize, num_heads=num_heads)
        begin_G = jnp.arange(0, num_rows, -(-num_rows // -(-num_rows // most)))

        def of_group(begin: jax.Array, writes_b: jax.Array, *held: jax.Array) -> Schedule:
            table_bW, first_bW, held_b, start_b, count_b = held
            return make_schedule(
                *(table_bW, first_bW, held_b, start_b, count_b),
                *(batch.num_decode - begin, batch.num_rows - begin),
                num_tokens=len(held_b),
                page_size=size,
                window=None,
                tiles=tiles,
                decode_only=True,
                writes_B=writes_b,
            )

        of_rows = (writes_B, tables.table_BW, tables.first_BW, held_B, batch.start_B, batch.count_B)
        grouped = (_grouped(jnp.asarray(x)[:num_rows], len(begin_G)) for x in of_rows)
        schedules = jax.vmap(of_group)(begin_G, *grouped)
        return Divided(dest_T, schedules)

    def attend(
        self,
        q_TNH: jax.Array,
        k_TKH: jax.Array | None,
        v_TKH: jax.Array | None,
        at: Place,
        batch: Batch,
        prepared: Any,
        terms: Terms,
    ) -> Attended:
        refuse_statistics(at)
        refuse_xla_only(terms)
        store, layout = at.store, at.store.layout
        if not isinstance(layout, LaneLayout):
            if k_TKH is None:
                raise NotImplementedError(READERS)
            return self._attend_parts(q_TNH, k_TKH, v_TKH, at, batch, prepared, terms)
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
            raise NotImplementedError(READERS)
        if isinstance(pages, Packed):
            store = store.with_arrays(pages.words, pages.scales)
            restored = out_TNH if rank is not None else codec.restore(out_TNH)
            out_TNH = restored.astype(terms.out_dtype)
        else:
            store = store.with_arrays(pages)
        if terms.maps is not None:
            out_TNH = terms.maps.values_of(out_TNH[..., :rank])
        return Attended(out_TNH, store, None)

    def _attend_parts(
        self,
        q_TNH: jax.Array,
        k_TKH: jax.Array,
        v_TKH: jax.Array | None,
        at: Place,
        batch: Batch,
        prepared: Divided,
        terms: Terms,
    ) -> Attended:
        """Attends decode rows by the kernel, which writes their own tokens where there is nothing
        else to write, and chunks by XLA.
        """
        axis = token_axes(at.store, self.tokens_over)
        store, whole = own_store(at.store), at.store.layout
        if not batch.decode_only:
            store = write(store, k_TKH, v_TKH, dest_T=prepared.dest_T, layer=at.layer)
        form = Absorbed(terms.maps, store.layout, terms.scale, axis)
        num_rows = min(len(batch.count_B), len(q_TNH))
        new = k_TKH if v_TKH is None else jnp.concatenate([k_TKH, v_TKH], axis=1)
        softmax, store = self._decode_parts(
            form.enter(q_TNH[:num_rows]),
            new[:num_rows],
            store,
            at.layer,
            prepared.schedules,
            softcap=terms.cap or None,
        )
        softmax = softmax if axis is None else softmax.over(axis)
        out_TNH = form.leave(softmax.result())
        if not batch.decode_only:
            out_TNH, _ = xla.read(
                q_TNH,
                at._replace(store=store),
                batch,
                scale=terms.scale,
                window=None,
                cap=terms.cap,
                maps=terms.maps,
                tokens_over=axis,
                decoded=out_TNH,
            )
        return Attended(out_TNH, replace(store, layout=whole), None)

    def _decode_parts(
        self,
        q_BNH: jax.Array,
        new_BVH: jax.Array,
        store: Store,
        layer: int | jax.Array,
        schedules: Schedule,
        *,
        softcap: float | None,
    ) -> tuple[Softmax, Store]:
        """Returns the softmaxes of rows over this device's part of their pages, [B, N] and [B, N,
        H], and the store with their new tokens, keys before values.
        """
        lanes, num_groups = _lanes_of(store), len(schedules.decode.num)

        def of_group(x: jax.Array) -> jax.Array:
            missing = lanes.head_dim - x.shape[-1]
            return _grouped(jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, missing),)), num_groups)

        def attend(pages: jax.Array, group: tuple[jax.Array, jax.Array, Schedule]) -> Any:
            q_bNH, new_bVH, schedule = group
            if lanes.kind == "latent":
                of_kind = partial(latent_decode_part, q_bNH, new_bVH[:, 0], rank=lanes.value_dim)
            else:
                k_bKH, v_bKH = jnp.split(new_bVH, 2, axis=1)
                of_kind = partial(paged_decode_part, q_bNH, k_bKH, v_bKH, softcap=softcap)
            part, pages = of_kind(
                pages,
                schedule,
                layer=layer,
                num_pages=store.num_pages,
                scale=1.0,  # which queries have
                interpret=self.interpret,
            )
            return pages, part

        pages, parts = jax.lax.scan(
            attend, store.pages, (of_group(q_BNH), of_group(new_BVH), schedules)
        )
        out_BNH, max_BN, sum_BN = (x.reshape(-1, *x.shape[2:])[: len(q_BNH)] for x in parts)
        return Softmax(max_BN, sum_BN, out_BNH * sum_BN[..., None]), store.with_arrays(pages)


def _grouped(x: jax.Array, num_groups: int) -> jax.Array:
    """Divides rows into groups of as many each, with zeros behind the last one."""
    size = -(-len(x) // num_groups)
    missing = num_groups * size - len(x)
    return jnp.pad(x, ((0, missing),) + ((0, 0),) * (x.ndim - 1)).reshape(
        num_groups, size, *x.shape[1:]
    )


def _lanes_of(store: Store) -> Layout:
    """Returns how the kernel sees pages that XLA reads too."""
    layout = store.layout
    if layout.latent_dim is None:
        return layout_of(kv_heads=layout.num_kv_heads, head_dim=layout.head_dim)
    width = padded_head_dim(layout.head_dim, latent=True)
    return latent_layout_of(width=width, rank=layout.latent_dim)
