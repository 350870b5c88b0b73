"""The one decoder: every family is a `ModelSpec` and a weight tree, and runs through these
functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.kv.state import GroupKV, PagedKV
from jaxkv.models.rope import rope_frequencies
from jaxkv.models.spec import ModelSpec
from jaxkv.ops.attention import BACKENDS, Backend, Batch, Heads
from jaxkv.ops.layers import (
    Matrix,
    apply_rope,
    gated_mlp,
    linear,
    linear_over,
    rms_norm,
    rope_tables,
    values,
)

Weights = Mapping[str, Any]
"""{"embed": [V, D], "layers": stacked tree or tuple of trees, "norm": [D], "head": [V, D] only if
untied}.

A uint16 leaf holds the bits of bfloat16 values (`config.bfloat16_as_bits`).
"""


def forward(
    weights: Weights,
    kv: PagedKV,
    batch: Batch,
    *,
    spec: ModelSpec,
    backend: str | Backend,
    axis: str | None = None,
) -> tuple[PagedKV, jax.Array]:
    """Runs the packed tokens through all layers and stores their keys and values.

    `axis`: the mesh axis over which weights and pages are divided (`placement.Placement`), here and
    in `logits`.
    Returns the new state (lengths grown by this step's tokens) and the hidden states [T, D] float32
    before the final
    norm. Cost: every array but the pages is of size T.
    """
    attention = BACKENDS[backend] if isinstance(backend, str) else backend
    heads_G = heads_of(spec, num_devices=1 if axis is None else jax.lax.axis_size(axis))
    prepared_G = [
        attention.prepare(group, batch, heads)
        for group, heads in zip(kv.groups, heads_G, strict=True)
    ]
    kv = replace(
        kv, groups=tuple(replace(group, len_B=group.len_B + batch.count_B) for group in kv.groups)
    )
    rope = rope_tables(batch.position_T, *rope_frequencies(spec))

    def block(
        x_TD: jax.Array, group: GroupKV, w: Weights, g: int, index: int | jax.Array
    ) -> tuple[jax.Array, GroupKV]:
        q, k, v = _project(rms_norm(x_TD, w["attn_norm"], eps=spec.norm_eps), w, rope, spec)
        options: Any = {"scale": spec.head_dim**-0.5, "out_dtype": w["o"].dtype}
        out, group = attention.attend(q, k, v, group, batch, prepared_G[g], layer=index, **options)
        x_TD = x_TD + linear_over(out.reshape(out.shape[0], -1), w["o"], w.get("o_bias"), axis=axis)
        h_TD = rms_norm(x_TD, w["mlp_norm"], eps=spec.norm_eps)
        return x_TD + gated_mlp(h_TD, w, activation=spec.activation, axis=axis), group

    x_TD = _embed(weights["embed"], batch.token_T, spec, axis)
    new, x_TD = _loop_layers(block, x_TD, kv, weights["layers"], spec)
    return new if axis is None else _with_statistics_of_all(new, kv, axis), x_TD


def heads_of(spec: ModelSpec, *, num_devices: int = 1) -> tuple[Heads, ...]:
    """What attention has to do in each KV group, on each of the devices that divide the heads."""
    return tuple(
        Heads(
            num_heads=spec.num_heads // num_devices,
            num_kv_heads=group.num_kv_heads // num_devices,
            head_dim=group.head_dim,
            window=group.window,
        )
        for group in spec.groups
    )


def logits(
    weights: Weights, x_TD: jax.Array, *, spec: ModelSpec, axis: str | None = None
) -> jax.Array:
    """Final norm and head: [T, D] -> [T, V] float32."""
    x_TD = rms_norm(x_TD, values(weights["norm"]), eps=spec.norm_eps)
    head_VD = weights.get("head", weights["embed"])
    part_TV = linear(x_TD, Matrix(head_VD))
    if axis is None or part_TV.shape[1] == spec.vocab_size:
        return part_TV
    return jax.lax.all_gather(part_TV, axis, axis=1, tiled=True)


def _embed(embed_VD: jax.Array, token_T: jax.Array, spec: ModelSpec, axis: str | None) -> jax.Array:
    """The tokens' embeddings [T, D] float32, of which a device may have some of the rows."""
    num_rows = embed_VD.shape[0]
    if axis is None or num_rows == spec.vocab_size:
        return values(embed_VD.at[token_T].get(mode="clip")).astype(jnp.float32)
    local_T = token_T - jax.lax.axis_index(axis) * num_rows
    x_TD = values(embed_VD.at[local_T].get(mode="clip")).astype(jnp.float32)
    return jax.lax.psum(jnp.where(((local_T >= 0) & (local_T < num_rows))[:, None], x_TD, 0), axis)


def _project(
    x_TD: jax.Array, w: Weights, rope: tuple[jax.Array, jax.Array], spec: ModelSpec
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotated queries [T, N, H] and keys [T, K, H], and values [T, K, H]; with qk-norm where the
    weights have it.

    Keys and queries are suited to being quantised where the weights say how (`programs.fit_keys`).
    """

    def heads(name: str) -> jax.Array:
        y = linear(x_TD, w[name], w.get(f"{name}_bias"))
        return y.reshape(y.shape[0], -1, spec.head_dim)

    q, k, v = heads("q"), heads("k"), heads("v")
    if "q_norm" in w:
        q = rms_norm(q, w["q_norm"], eps=spec.norm_eps)
        k = rms_norm(k, w["k_norm"], eps=spec.norm_eps)
    q, k = apply_rope(q, *rope), apply_rope(k, *rope)
    if "k_affine" in w:
        mean_1KH, factor_1KH = jnp.moveaxis(w["k_affine"].reshape(1, -1, 2, spec.head_dim), 2, 0)
        # What is stored of a key must not depend on whether the compiler rounds this product before
        # it adds it up.
        k = jax.lax.optimization_barrier((k - mean_1KH) * factor_1KH)
        q = q / jnp.repeat(factor_1KH, q.shape[1] // k.shape[1], axis=1)
    return q, k, v


def _with_statistics_of_all(kv: PagedKV, before: PagedKV, axis: str) -> PagedKV:
    """Each device has seen its own heads attend: what they have added to the statistics, added
    up.
    """

    def of(new: GroupKV, old: GroupKV) -> GroupKV:
        gained = jax.tree.map(
            lambda x, y: jax.lax.psum(x - y, axis), new.statistics, old.statistics
        )
        return replace(new, statistics=jax.tree.map(jnp.add, old.statistics, gained))

    return replace(kv, groups=tuple(map(of, kv.groups, before.groups)))


def _loop_layers(
    block: Callable[..., tuple[jax.Array, GroupKV]],
    x_TD: jax.Array,
    kv: PagedKV,
    layers: Any,
    spec: ModelSpec,
) -> tuple[PagedKV, jax.Array]:
    """Threads x and the pool through the layers: a Python loop over a tuple of trees, one on the
    device over a stack.

    The pool is carried whole with the layer's index passed down: as scan xs/ys it would be copied
    (7.25 GiB against 0.1 MiB of temporaries for a 7 GiB pool, compiled for v5e). A stacked tree
    needs all layers in one group.
    """
    if isinstance(layers, tuple):
        groups = list(kv.groups)
        for number, leaves in enumerate(layers):
            g, index = spec.group_of(number)
            w = {
                name: values(leaf) if leaf.ndim == 1 else Matrix(leaf)
                for name, leaf in leaves.items()
            }
            x_TD, groups[g] = block(x_TD, groups[g], w, g, index)
        return replace(kv, groups=tuple(groups)), x_TD
    (group,) = kv.groups

    def changing(group: GroupKV) -> dict[str, Any]:
        return {
            name: getattr(group, name) for name in ("pages", "scales", "statistics", "extremes")
        }

    def step(index: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        x_TD, held = carry
        w = {
            name: values(leaf[index]) if leaf.ndim == 2 else Matrix(leaf, index)
            for name, leaf in layers.items()
        }
        x_TD, new = block(x_TD, replace(group, **held), w, 0, index)
        return x_TD, changing(new)

    with jax.named_scope("layers"):  # by which `jaxkv check` knows the loop in a compiled program
        x_TD, held = jax.lax.fori_loop(0, spec.num_layers, step, (x_TD, changing(group)))
    return replace(kv, groups=(replace(group, **held),)), x_TD
