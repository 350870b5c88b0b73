"""Projects tokens to queries, keys and values of heads, and to keys by which blocks are chosen."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxkv.axes import MeshAxes
from jaxkv.models import boosts, differential
from jaxkv.models.rope import rope_frequencies
from jaxkv.models.spec import BlockIndexSpec, ModelSpec
from jaxkv.models.stream import normed, scaled
from jaxkv.ops.attention import BlockIndex, Distances, Index, PoolKeys
from jaxkv.ops.attention.index import Choice
from jaxkv.ops.layers import linear
from jaxkv.ops.matrices import values
from jaxkv.ops.rotation import Rotation, apply_rope
from jaxkv.weights.tree import Weights


def product(x_TD: jax.Array, w: Weights, name: str) -> jax.Array:
    """Multiplies tokens with a matrix whose result is divided into heads."""
    # Else XLA splits the weight into heads, not the result, and copies it for that (tpu7x: in HBM;
    # v6e: into VMEM, docs/benchmarks/tpu_loop.md).
    return jax.lax.optimization_barrier(linear(x_TD, w[name], w.get(f"{name}_bias")))


def project(
    x_TD: jax.Array,
    w: Weights,
    rope: Rotation | None,
    spec: ModelSpec,
    head_dim: int,
    axis: MeshAxes | None,
    made: Mapping[str, jax.Array],
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Computes rotated queries [T, N, H] and keys [T, K, H], and values [T, K, H or less], which
    are what keys are made of where the weights have none; without keys and values where they have
    neither. With qk-norm where the weights have it. made: by name, products that are there already.

    Keys and queries are suited to being quantised where the weights say how (`programs.fit_keys`).
    """
    attention, has_pairs = spec.attention, differential.FIRST[0] in w
    head_dim //= 2 if has_pairs else 1
    head_dim -= boosts.NUM_DIMS if boosts.BOOST in w else 0

    def product_of(name: str) -> jax.Array:
        return made[name] if name in made else product(x_TD, w, name)

    def bounded(y: jax.Array) -> jax.Array:
        return jnp.clip(y, -attention.clip, attention.clip) if attention.clip else y

    def heads(y: jax.Array, name: str) -> jax.Array:
        if attention.qk_norm == "whole":
            y = normed(y, w, f"{name}_norm", spec, axis=axis)
        return bounded(y).reshape(y.shape[0], -1, head_dim)

    def by_head(x: jax.Array, name: str) -> jax.Array:
        if attention.qk_norm == "whole":
            return x
        own = w
        if attention.qk_norm == "heads" and name in w:
            own = {name: w[name].reshape(-1, head_dim)}
        return normed(x, own, name, spec)

    def rotated(y: jax.Array, name: str) -> jax.Array:
        x = heads(y, name)
        if not attention.norm_after_rope:
            x = by_head(x, f"{name}_norm")
        if rope is not None:
            x = apply_rope(x, rope)
        is_next = attention.norm_after_rope and rope is not None
        return by_head(x, f"{name}_norm") if is_next else x

    q = rotated(product_of("q"), "q")
    if "q_root" in w:
        q = q * jnp.square(w["q_root"].astype(jnp.float32)).reshape(1, -1, head_dim)
    if "k" not in w:
        return q, None, None
    key = product_of("k")
    k = rotated(key, "k")
    value = scaled(bounded(product_of("v") if "v" in w else key), spec.scales.values)
    v = value.reshape(*k.shape[:2], -1)
    if "v_norm" in spec.unit_norms:
        v = normed(v, {}, "v_norm", spec)
    if has_pairs:
        q, k, v = differential.paired(q, k, v)
    if boosts.BOOST in w:
        q, k = boosts.with_boosts(q, k, v, w, head_dim, axis)
    if "k_affine" in w:
        mean_1KH, factor_1KH = jnp.moveaxis(w["k_affine"].reshape(1, -1, 2, k.shape[2]), 2, 0)
        # What is stored of a key must not depend on whether the compiler rounds this product before
        # it adds it up.
        k = jax.lax.optimization_barrier((k - mean_1KH) * factor_1KH)
        q = q / jnp.repeat(factor_1KH, q.shape[1] // k.shape[1], axis=1)
    return q, k, v


def with_index_key(
    x_TD: jax.Array, k_TKH: jax.Array | None, w: Weights, rope: Rotation | None, spec: ModelSpec
) -> tuple[jax.Array | None, Choice | None]:
    """Puts behind the keys of tokens the one that blocks are chosen by, zeros where the layer
    attends to all. Returns them, and how these tokens choose; without a change where no layer does.
    """
    asked = spec.attention.index
    if asked is None or k_TKH is None:
        return k_TKH, None
    if "index_q" not in w:
        return jnp.pad(k_TKH, ((0, 0), (0, 1), (0, 0))), None

    def heads(name: str) -> jax.Array:
        x_TF = jax.lax.optimization_barrier(linear(x_TD, w[name]))  # as in `project`
        return x_TF.reshape(x_TD.shape[0], -1, asked.head_dim)

    def made(name: str) -> jax.Array:
        x_TIH = normed(heads(name), w, f"{name}_norm", spec)
        return x_TIH if rope is None else apply_rope(x_TIH, rope)

    query_TIH, sizes = made("index_q"), {"num_chosen": asked.num_chosen, "pool": asked.pool}
    index: Choice
    if isinstance(asked, BlockIndexSpec):
        index, key_T1H = BlockIndex(query_TIH, num_local=asked.num_local, **sizes), made("index_k")
    else:  # the mean of keys as they are is normed and rotated, when all of a pool are there
        weight_TI = jnp.full(query_TIH.shape[:2], asked.head_dim**-0.5)
        index = Index(query_TIH, weight_TI, **sizes, pool_keys=_pool_keys(w, spec))
        key_T1H = heads("index_k")
    key_T1H = jnp.pad(key_T1H, ((0, 0), (0, 0), (0, k_TKH.shape[2] - asked.head_dim)))
    return jnp.concatenate([k_TKH, key_T1H], axis=1), index


def distances_of(
    x_TD: jax.Array, w: Weights, num_heads: int, warmth_T1: jax.Array | None, spec: ModelSpec
) -> Distances | None:
    """Returns what tokens give distances, which grows with their position as queries do; None in a
    layer where they give nothing.
    """
    if "distance" not in w:
        return None
    weight_TNX = product(x_TD, w, "distance").reshape(len(x_TD), num_heads, -1)
    if "distance_norm" in w:
        scale_NX = w["distance_norm"].reshape(num_heads, -1)
        weight_TNX = normed(weight_TNX, {"distance_norm": scale_NX}, "distance_norm", spec)
    if warmth_T1 is not None:
        weight_TNX = weight_TNX * warmth_T1[..., None]
    profile_XE = w["distance_profiles"].astype(jnp.float32).reshape(weight_TNX.shape[2], -1)
    sink_TN = linear(x_TD, w["token_sinks"]) if "token_sinks" in w else None
    return Distances(weight_TNX.astype(jnp.float32), profile_XE, sink_TN)


def _pool_keys(w: Weights, spec: ModelSpec) -> PoolKeys:
    """Returns what makes keys of pools, in a model whose layers rotate alike."""
    scale_H = values(w["index_k_norm"]).astype(jnp.float32) + spec.norm.endswith("_one")
    return PoolKeys(
        scale_H,
        jnp.asarray(rope_frequencies(spec.rope, spec.head_dim)),
        eps=spec.norm_eps,
        factor=spec.rope.attention_factor,
        interleaved=spec.rope.interleaved,
    )
