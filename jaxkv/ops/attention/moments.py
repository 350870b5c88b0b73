"""Attention of one sequence that keeps, instead of pages, what its keys and queries are on
average.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.kv.codecs import Codec
from jaxkv.kv.state import GroupKV
from jaxkv.ops.attention.base import Batch, Heads, Needs


@dataclass(frozen=True, slots=True)
class Moments:
    """See `base.Backend`. Only for `programs.fit_keys`, so not among the backends that have names.

    The "page" of a layer is [K, 3, H] float32: the mean of the keys, their variance, and the mean
    of the squares of the queries that meet them. All packed tokens are one sequence from position 0
    on.
    """

    def refuses(self, heads: Heads, needs: Needs) -> str | None:
        return None

    def page_arrays(
        self, heads: Heads, page_size: int, codec: Codec
    ) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct((heads.num_kv_heads, 3, heads.head_dim), jnp.float32),)

    def prepare(self, group: GroupKV, batch: Batch, heads: Heads) -> int | None:
        return heads.window

    def attend(
        self,
        q_TNH: jax.Array,
        k_TKH: jax.Array,
        v_TKH: jax.Array,
        group: GroupKV,
        batch: Batch,
        prepared: int | None,
        *,
        layer: int | jax.Array,
        scale: float,
        out_dtype: np.dtype,
    ) -> tuple[jax.Array, GroupKV]:
        options: Any = {"local_window_size": None if prepared is None else (prepared - 1, 0)}
        of_one = (x[None] for x in (q_TNH, k_TKH, v_TKH))
        out_TNH = jax.nn.dot_product_attention(*of_one, scale=scale, is_causal=True, **options)[0]
        q_TKGH = q_TNH.reshape(q_TNH.shape[0], k_TKH.shape[1], -1, q_TNH.shape[2])
        found = [jnp.mean(k_TKH, axis=0), jnp.var(k_TKH, axis=0), jnp.mean(q_TKGH**2, axis=(0, 2))]
        return out_TNH, replace(group, pages=group.pages.at[layer].set(jnp.stack(found, axis=1)))
