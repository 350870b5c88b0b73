"""Fits the keys of a model to being quantised, once, when it is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.axes import MeshAxes
from jaxkv.kv.codecs import PlainCodec
from jaxkv.kv.layout import PageLayout
from jaxkv.kv.state import PagedKV, PageTables, Store, empty_store
from jaxkv.models import decoder
from jaxkv.models.paged import heads_of
from jaxkv.models.spec import KVGroup, ModelSpec
from jaxkv.ops.attention import Attended, Batch, Heads, Place, Terms
from jaxkv.ops.attention.base import refuse_chunks, refuse_latents, refuse_xla_only
from jaxkv.ops.attention.divided import sharing
from jaxkv.placement import Placement, on_every_device
from jaxkv.processes import to_host
from jaxkv.weights.tree import Weights


@dataclass(frozen=True, kw_only=True, slots=True)
class MomentsLayout(PageLayout):
    """Describes the "pages" of `Moments`, which hold no tokens."""

    @property
    def arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct((self.num_kv_heads, 3, self.head_dim), jnp.float32),)

    def _encode(self, x: jax.Array) -> tuple[jax.Array, ...]:
        raise NotImplementedError("moments hold no keys and values")

    def _decode(self, arrays: tuple[jax.Array, ...]) -> jax.Array:
        raise NotImplementedError("moments hold no keys and values")


@dataclass(frozen=True, slots=True)
class Moments:
    """Runs attention over one sequence that no page holds, and keeps what its keys and queries are
    on average (`ops.attention.Attention`).

    The "page" of a layer is [K, 3, H] float32: the mean of the keys, their variance, and the mean
    of the squares of the queries that meet them. All packed tokens are one sequence from position 0
    on.
    """

    def prepare(self, store: Store, tables: PageTables, batch: Batch, heads: Heads) -> int | None:
        refuse_chunks(heads)
        return heads.window

    def attend(
        self,
        q_TNH: jax.Array,
        k_TKH: jax.Array | None,
        v_TKH: jax.Array | None,
        at: Place,
        batch: Batch,
        prepared: int | None,
        terms: Terms,
    ) -> Attended:
        refuse_latents(terms)
        refuse_xla_only(terms)
        if terms.cap or terms.sinks_N is not None or k_TKH is None or v_TKH is None:
            raise NotImplementedError("expected scores that may all change alike, and own keys")
        out_TNH = jax.nn.dot_product_attention(
            *(x[None] for x in (q_TNH, k_TKH, v_TKH)),
            scale=terms.scale,
            is_causal=True,
            local_window_size=None if prepared is None else (prepared - 1, 0),
        )[0]
        q_TKGH = q_TNH.reshape(q_TNH.shape[0], k_TKH.shape[1], -1, q_TNH.shape[2])
        found = [jnp.mean(k_TKH, axis=0), jnp.var(k_TKH, axis=0), jnp.mean(q_TKGH**2, axis=(0, 2))]
        pages = at.store.pages.at[at.layer].set(jnp.stack(found, axis=1))
        return Attended(out_TNH, at.store.with_arrays(pages), None)


def fit_keys(
    weights: Weights, token_T: np.ndarray, *, spec: ModelSpec, placement: Placement | None
) -> np.ndarray:
    """Returns what suits keys to being quantised, [L, K*2*H] float32: by layer, of each KV head a
    mean m and factors f.

    As the leaf `k_affine` of the layers' weights it has the key f * (k - m) stored for k, and q / f
    meet it for q (`decoder`). Scores change by q . m, the same for all keys of a query. The error e
    of a stored key, alike in all channels after a rotation and in proportion to the key's length,
    changes them by (q / f) . e: on average least for f^2 = |q| / |k - m| in each channel
    (Cauchy-Schwarz), taken over a sequence of these T tokens.
    """
    num_devices = 1
    if placement is not None:
        # Moments are of no tokens that devices could divide.
        placement, num_devices = replace(placement, context=1), placement.size
    none: Any = np.zeros((1, 1), np.int32)
    codec, stores = PlainCodec(dtype="float32"), []
    for group, heads in zip(spec.groups, heads_of(spec, num_devices=num_devices), strict=True):
        made = empty_store(
            num_layers=len(group.layers),
            layout=MomentsLayout(
                num_kv_heads=heads.num_kv_heads,
                head_dim=heads.head_dim,
                page_size=1,
                codec=codec,
            ),
            num_pages=1,
            num_devices=group.num_parts(num_devices),
        )
        stores.append(made)
    position_T: Any = np.arange(len(token_T), dtype=np.int32)
    counts: Any = (none[0], none[0] + len(token_T), np.int32(0), np.int32(1))
    tokens: Any = token_T.astype(np.int32)
    batch = Batch(tokens, position_T, position_T * 0, *counts)
    (kv,) = _moments(
        weights,
        PagedKV(tuple(stores), (PageTables(none, none, none[0]),)),
        batch,
        spec=spec,
        placement=placement,
    )
    found = [to_host(store.pages) for store in kv.stores]
    places = map(spec.group_of, range(spec.num_layers))
    return np.stack([_affine(found[g][index]) for g, index in places])


def _affine(moments_K3H: np.ndarray) -> np.ndarray:
    mean, variance, of_queries = moments_K3H.transpose(1, 0, 2)
    known = (variance > 0) & (of_queries > 0)
    quarter = np.log2(np.where(known, of_queries, 1) / np.where(known, variance, 1)) / 4
    # A factor that all channels share changes nothing: without it they stay about as large as they
    # were.
    quarter -= np.mean(quarter, axis=-1, keepdims=True)
    factor = np.exp2(np.where(known, quarter, 0))
    return np.stack([mean, factor], axis=1).astype(np.float32).reshape(-1)


@partial(jax.jit, static_argnames=("spec", "placement"))
@on_every_device
def _moments(
    weights: Weights, kv: PagedKV, batch: Batch, *, spec: ModelSpec, axis: MeshAxes | None
) -> tuple[PagedKV]:
    kv, *_ = decoder.forward(weights, kv, batch, spec=spec, backend=Moments(), axis=axis)

    def over_all(store: Store, group: KVGroup) -> Store:
        # Devices that share KV heads have met each its own queries.
        num_devices = 1 if axis is None else jax.lax.axis_size(axis)
        over = sharing(axis, group.num_parts(num_devices))
        return store if over is None else store.with_arrays(jax.lax.pmean(store.pages, over))

    return (replace(kv, stores=tuple(map(over_all, kv.stores, spec.groups))),)
