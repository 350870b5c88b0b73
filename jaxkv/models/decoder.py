"""Runs every family: a model is a `ModelSpec` and a weight tree (`weights.tree`).

A layer is a mixer, where tokens meet (attention over the pages of the layer's KV group), and a
feed-forward, where each token is alone (a gated MLP): `mix` and `feed_forward` in `forward`. One
body, compiled once, runs all layers. Layers in different KV groups part only where they read and
write their pages, by a branch on the layer's `Place`.

How to add a layer of another kind: its family lists its tensors in `Layout.layer`, and `mix` or
`feed_forward` picks it by the tensors that `w` has, as `_project` does for qk-norm; it takes the
normed [T, D] and returns what joins the stream. Layers of several kinds in one model need a stack
for each kind in `weights.tree` and a branch on the kind, made as `_in_its_group` makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.kv.state import GroupKV, PagedKV
from jaxkv.models.rope import rope_frequencies
from jaxkv.models.spec import ModelSpec
from jaxkv.ops.attention import BACKENDS, Attention, Batch, Heads
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
from jaxkv.weights.tree import Weights, layer_weights

Groups = tuple[GroupKV, ...]
Held = tuple[dict[str, Any], ...]
"""What layers change, by group (`_changing`): the rest of a group stays outside of loops."""


class Place(NamedTuple):
    """Says where a layer keeps its keys and values: the number of its KV group (None where there is
    only one), and its own number in that group. Both are traced int32.
    """

    group: jax.Array | None
    number: jax.Array


def forward(
    weights: Weights,
    kv: PagedKV,
    batch: Batch,
    *,
    spec: ModelSpec,
    backend: str | Attention,
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

    def mix(h_TD: jax.Array, w: Weights, groups: Groups, place: Place) -> tuple[jax.Array, Groups]:
        q, k, v = _project(h_TD, w, rope, spec)

        def attend(
            g: int, group: GroupKV, number: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
        ) -> tuple[jax.Array, GroupKV]:
            return attention.attend(
                q,
                k,
                v,
                group,
                batch,
                prepared_G[g],
                layer=number,
                scale=spec.head_dim**-0.5,
                out_dtype=w["o"].dtype,
            )

        out, groups = _in_its_group(attend, groups, place, q, k, v)
        out_TF = out.reshape(out.shape[0], -1)
        return linear_over(out_TF, w["o"], w.get("o_bias"), axis=axis), groups

    def feed_forward(h_TD: jax.Array, w: Weights) -> jax.Array:
        return gated_mlp(h_TD, w, activation=spec.activation, axis=axis)

    def layer(
        x_TD: jax.Array, w: Weights, groups: Groups, place: Place
    ) -> tuple[jax.Array, Groups]:
        h_TD = rms_norm(x_TD, w["attn_norm"], eps=spec.norm_eps)
        mixed_TD, groups = mix(h_TD, w, groups, place)
        x_TD = x_TD + mixed_TD
        h_TD = rms_norm(x_TD, w["mlp_norm"], eps=spec.norm_eps)
        return x_TD + feed_forward(h_TD, w), groups

    x_TD = _embed(weights["embed"], batch.token_T, spec, axis)
    groups, x_TD = _loop_layers(layer, x_TD, kv.groups, weights, spec)
    new = replace(kv, groups=groups)
    return new if axis is None else _with_statistics_of_all(new, kv, axis), x_TD


def heads_of(spec: ModelSpec, *, num_devices: int = 1) -> tuple[Heads, ...]:
    """Returns what attention has to do in each KV group, on each device that has some heads."""
    return tuple(
        Heads(
            num_heads=spec.num_heads // num_devices,
            num_kv_heads=group.num_kv_heads // num_devices,
            head_dim=group.head_dim,
            window=group.window,
        )
        for group in spec.groups
    )


def head_of(weights: Weights) -> Weights:
    """Returns what `logits` takes of the weights: the final norm, and the head or the embeddings
    that are it.
    """
    return {name: weights[name] for name in ("norm", "head" if "head" in weights else "embed")}


def logits(
    weights: Weights, x_TD: jax.Array, *, spec: ModelSpec, axis: str | None = None
) -> jax.Array:
    """Applies the final norm and the head: [T, D] -> [T, V] float32."""
    x_TD = rms_norm(x_TD, values(weights["norm"]), eps=spec.norm_eps)
    head_VD = weights["head" if "head" in weights else "embed"]
    part_TV = linear(x_TD, Matrix(head_VD))
    if axis is None or part_TV.shape[1] == spec.vocab_size:
        return part_TV
    return jax.lax.all_gather(part_TV, axis, axis=1, tiled=True)


def _embed(embed_VD: jax.Array, token_T: jax.Array, spec: ModelSpec, axis: str | None) -> jax.Array:
    """Looks up the tokens' embeddings [T, D] float32, of which a device may have some rows."""
    num_rows = embed_VD.shape[0]
    if axis is None or num_rows == spec.vocab_size:
        return values(embed_VD.at[token_T].get(mode="clip")).astype(jnp.float32)
    local_T = token_T - jax.lax.axis_index(axis) * num_rows
    x_TD = values(embed_VD.at[local_T].get(mode="clip")).astype(jnp.float32)
    return jax.lax.psum(jnp.where(((local_T >= 0) & (local_T < num_rows))[:, None], x_TD, 0), axis)


def _project(
    x_TD: jax.Array, w: Weights, rope: tuple[jax.Array, jax.Array], spec: ModelSpec
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes rotated queries [T, N, H] and keys [T, K, H], and values [T, K, H]; with qk-norm
    where the weights have it.

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
    """Adds up over devices what their own heads have added to the statistics."""

    def of(new: GroupKV, old: GroupKV) -> GroupKV:
        gained = jax.tree.map(
            lambda x, y: jax.lax.psum(x - y, axis), new.statistics, old.statistics
        )
        return replace(new, statistics=jax.tree.map(jnp.add, old.statistics, gained))

    return replace(kv, groups=tuple(map(of, kv.groups, before.groups)))


def _in_its_group(
    attend: Callable[..., tuple[jax.Array, GroupKV]],
    groups: Groups,
    place: Place,
    *inputs: jax.Array,
) -> tuple[jax.Array, Groups]:
    """Returns attend(g, group, number, *inputs) for the group g that `place` names, and all groups
    after it. The others pass through untouched, without a copy.
    """

    def branch(g: int) -> Callable[..., tuple[jax.Array, tuple[Any, ...]]]:
        def run(held: Held, *inputs: jax.Array) -> tuple[jax.Array, Held]:
            out, group = attend(g, replace(groups[g], **held[g]), *inputs)
            return out, (*held[:g], _changing(group), *held[g + 1 :])

        return run

    branches, held = [branch(g) for g in range(len(groups))], tuple(map(_changing, groups))
    if place.group is None:
        out, held = branches[0](held, place.number, *inputs)
    else:
        out, held = jax.lax.switch(place.group, branches, held, place.number, *inputs)
    return out, _with(groups, held)


def _changing(group: GroupKV) -> dict[str, Any]:
    """Returns what a layer changes of its group."""
    return {name: getattr(group, name) for name in ("pages", "scales", "statistics", "extremes")}


def _with(groups: Groups, held: Held) -> Groups:
    return tuple(replace(group, **one) for group, one in zip(groups, held, strict=True))


def _loop_layers(
    layer: Callable[..., tuple[jax.Array, Groups]],
    x_TD: jax.Array,
    groups: Groups,
    weights: Weights,
    spec: ModelSpec,
) -> tuple[Groups, jax.Array]:
    """Threads x and the pools through the layers in one loop on the device.

    The pools are carried whole with the layer's index passed down: as scan xs/ys they would be
    copied (7.25 GiB against 0.1 MiB of temporaries for a 7 GiB pool, compiled for v5e).
    """
    places_L2 = np.array([spec.group_of(number) for number in range(spec.num_layers)], np.int32)

    def step(number: jax.Array, carry: tuple[jax.Array, Held]) -> tuple[jax.Array, Held]:
        x_TD, held = carry
        if len(groups) == 1:
            place = Place(None, number)
        else:
            place = Place(*jnp.asarray(places_L2)[number])
        w = layer_weights(weights, number)
        x_TD, new = layer(x_TD, w, _with(groups, held), place)
        return x_TD, tuple(map(_changing, new))

    with jax.named_scope("layers"):  # by which `jaxkv check` knows the loop in a compiled program
        carry = (x_TD, tuple(map(_changing, groups)))
        x_TD, held = jax.lax.fori_loop(0, spec.num_layers, step, carry)
    return _with(groups, held), x_TD
