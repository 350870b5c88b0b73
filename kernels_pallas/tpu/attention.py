"""Ragged paged attention: the one function that an engine calls per layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.tpu.decode import Static, decode
from kernels_pallas.tpu.layout import layout_of, pack_queries, unpack_outputs
from kernels_pallas.tpu.schedule import Schedule


class Statistics(NamedTuple):
    max_TN: jax.Array
    sum_TN: jax.Array
    entropy_TN: jax.Array


def ragged_paged_attention(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    pages: jax.Array,
    schedule: Schedule,
    *,
    layer: int | jax.Array,
    num_pages: int,
    scale: float,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
    statistics: bool = False,
    page_mass: bool = False,
    interpret: Any = False,
) -> Any:
    layout = layout_of(kv_heads=k_TKH.shape[1], head_dim=q_TNH.shape[2])
    base = jnp.reshape(jnp.asarray(layer * num_pages, jnp.int32), (1,))
    q_TJMX = pack_queries(layout, q_TNH.astype(pages.dtype))
    from kernels_pallas.tpu.layout import pack
    new_TCX = pack(layout, jnp.concatenate([k_TKH, v_TKH], 1)[:, :, None].astype(pages.dtype))[:, :, 0]
    static = Static(layout=layout, page_size=pages.shape[2], block=schedule.tiles.decode_pages, scale=scale,
        window=schedule.window is not None, softcap=softcap, sinks=sinks_N is not None, statistics=statistics, page_mass=page_mass, wait_by_page=interpret is True)
    sinks = None if sinks_N is None else sinks_N.reshape(layout.joined, -1)
    out, pages, stats, mass = decode(q_TJMX, new_TCX, sinks, pages, schedule, base, static=static, interpret=interpret)
    return unpack_outputs(layout, out), pages, stats, mass
