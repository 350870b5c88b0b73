"""Runs the layers of the decoder. Each is a mixer, where tokens meet (attention over the pages of
the layer's KV group), and a feed-forward, where each token is alone (an MLP).

What a layer does is read in the tensors that it has: a norm, a bias, a gate or values that are not
there are left out. How to add a layer of another kind: its family lists its tensors as one more of
`Layout.layers`, and `mix` or the MLP picks what it does by them. Each kind has a stack of weights
and a body of its own, between which the loop over layers branches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.axes import MeshAxes
from jaxkv.kv.state import PagedKV
from jaxkv.models import (
    alibi,
    altup,
    attention_experts,
    compressed,
    convolved,
    differential,
    hyper,
    latent,
    passes,
    routing,
)
from jaxkv.models.compressed import Compression, put
from jaxkv.models.depth import Depth
from jaxkv.models.ngrams import with_ngrams
from jaxkv.models.paged import Held, PagedAttention
from jaxkv.models.projections import distances_of, product, project, with_index_key
from jaxkv.models.recurrent import (
    SHORT_CONV,
    SOURCE,
    Compressor,
    Convolved,
    Mixer,
    Ngrams,
    ShortConvs,
)
from jaxkv.models.rope import Ropes
from jaxkv.models.spec import DepthSpec, ModelSpec, QueryTemperature
from jaxkv.models.stream import (
    joined,
    laurel,
    moved,
    normed,
    of_layer,
    scaled,
    to_others,
    towards,
    weighed,
)
from jaxkv.ops.adapters import TokenAdapters
from jaxkv.ops.attention import AnyIndex, Batch, LatentMaps
from jaxkv.ops.experts import Router, run_experts, weighed_parts
from jaxkv.ops.layers import (
    add_up,
    linear,
    linear_by_group,
    linear_float32,
    linear_over,
    mlp,
)
from jaxkv.ops.recurrent import Rows
from jaxkv.ops.rotation import Rotation
from jaxkv.weights.tree import (
    EXPERT,
    TOKEN_EXPERTS,
    Weights,
    layer_weights,
    num_adapters,
    num_modules,
    stack_name,
)

SEEN = "router_seen"
"""Under this name a layer's weights have what its router makes logits of, where its experts take
something else.
"""

GATES = {"sigmoid": jax.nn.sigmoid, "softplus": jax.nn.softplus}

Carry = tuple[jax.Array, Held]
"""The stream [T, D], or several (`models.altup`), and what layers change, from layer to layer."""

Convolve = Callable[[str, jax.Array, Weights, Held, jax.Array], Carry]
"""Convolves what the leaf of this name convolves, [T, X], in the layer of this number."""

Mix = Callable[[jax.Array, Weights, Held, jax.Array], Carry]
"""Mixes the tokens [T, D] that come into the layer of this number (int32) with these weights."""


class Layers:
    """Runs the layers of one step by their number.

    own_LTP: what each layer gets of the tokens beside the stream, None for nothing. embedded_TD:
    the tokens' embeddings. aux_layers, axis: as in `decoder.forward`.
    """

    def __init__(
        self,
        weights: Weights,
        kv: PagedKV,
        batch: Batch,
        attend: PagedAttention,
        own_LTP: jax.Array | None,
        embedded_TD: jax.Array,
        aux_layers: tuple[int, ...],
        *,
        spec: ModelSpec,
        axis: MeshAxes | None,
    ) -> None:
        self._weights, self._spec, self._axis = weights, spec, axis
        self._embedded_TD = embedded_TD
        # Past the last one for all other layers.
        self._place_L = np.full(spec.num_layers + 1, len(aux_layers), np.int32)
        self._place_L[list(aux_layers)] = range(len(aux_layers))
        self._kv, self._batch = kv, batch
        self._attend, self._own_LTP = attend, own_LTP
        contexts, growth_C = _contexts(kv, batch), weights.get("rope_growth")
        self._ropes = Ropes(spec, batch.position_T, contexts, growth_C)
        self._adapters = _adapters_of(weights, kv, batch)
        self._is_real_T = batch.is_row_T
        self._bodies = [self._body(kind) for kind in range(spec.num_kinds)]
        self._kind_L = np.array(spec.layer_kinds or (0,) * spec.num_layers, np.int32)

    def __call__(self, number: jax.Array, carry: Carry) -> Carry:
        """Runs layer `number` (int32)."""
        x, held = carry
        if held.kept_STD is not None:
            norm = partial(normed, w={}, name="norm", spec=self._spec)
            x, kept_STD = passes.begin(x, held.kept_STD, number, norm, self._spec)
            held = held._replace(kept_STD=kept_STD)
        if held.aux_STD is not None:
            place = jnp.asarray(self._place_L)[number]
            held = held._replace(aux_STD=held.aux_STD.at[place].set(x, mode="drop"))
        if len(self._bodies) == 1:
            return self._bodies[0](number, (x, held))
        return jax.lax.switch(jnp.asarray(self._kind_L)[number], self._bodies, number, (x, held))

    def _body(self, kind: int) -> Callable[[jax.Array, Carry], Carry]:
        """Returns what runs any layer of a kind."""
        spec, layers = self._spec, self._spec.layers_of(kind)
        index_L = np.zeros(spec.num_layers, np.int32)
        count = num_modules(self._weights, kind)
        index_L[list(layers)] = np.arange(len(layers)) % count
        block = self._block(layers, kind)

        def run(number: jax.Array, carry: Carry) -> Carry:
            x, held = carry
            index = number if count == spec.num_layers else jnp.asarray(index_L)[number]
            w = layer_weights(self._weights, index, kind, self._adapters)
            own_TP = None if self._own_LTP is None else self._own_LTP[number]
            if altup.ROUTER in w:
                predicted_ATD = altup.predict(x, w, spec)
                x_TD, held = block(predicted_ATD[0], w, held, number)
                x_ATD = altup.correct(predicted_ATD, x_TD, w, spec)
                return to_others(x_ATD, own_TP, w, spec), held
            x_TD, held = block(x, w, held, number)
            if own_TP is not None:
                x_TD = x_TD + of_layer(x_TD, own_TP, w, spec)
            return x_TD * w["scalar"][None] if "scalar" in w else x_TD, held

        return run

    def _block(self, layers: Sequence[int], kind: int) -> Mix:
        """Returns what runs mixer and feed-forward of any of these layers, which are of a kind."""
        spec, mix, stream = self._spec, self._mix(layers), self._spec.scales.stream
        cutoffs = spec.scales.gate_cutoffs
        cutoff = cutoffs[kind] if cutoffs else None
        convolve = self._short_convs(layers[0])
        if spec.scales.hyper is not None:
            return self._between_streams(layers, mix)
        if spec.scales.depth is not None:
            return self._over_depth(layers, mix, spec.scales.depth)
        if "ahead_norm" in self._weights[stack_name(kind)]:
            return self._behind_block(layers)

        def run(x_TD: jax.Array, w: Weights, held: Held, number: jax.Array) -> Carry:
            h_TD = normed(x_TD, w, "attn_norm", spec)
            mixed_TD, held = mix(self._beside_tokens(h_TD, w), w, held, number)
            mixed_TD, held = convolve("attn", mixed_TD, w, held, number)
            mixed_TD = scaled(normed(mixed_TD, w, "post_attn_norm", spec), spec.scales.residual)
            mixed_TD = towards(mixed_TD, h_TD, w, "attn_rate")
            if stream is not None:
                x_TD, mixed_TD = weighed(h_TD, mixed_TD, stream.mixer[kind])
            x_TD, mixed_TD = moved(x_TD, w, "attn_stream"), moved(mixed_TD, w, "attn_out")
            if spec.is_parallel:
                # Some have one norm for both.
                own = "mlp_norm" in w or "mlp_norm" in spec.unit_norms
                h_TD = normed(x_TD, w, "mlp_norm", spec) if own else h_TD
                x_TD = x_TD + mixed_TD
            else:
                x_TD = joined(x_TD, mixed_TD, w, "attn", spec)
                if "laurel_down" in w:
                    x_TD = (x_TD + laurel(h_TD, w, spec)) * 2**-0.5
                x_TD = normed(x_TD, w, "joined_attn_norm", spec)
                h_TD = normed(x_TD, w, "mlp_norm", spec)
            w, held = self._with_view(h_TD, w, held)
            out_TD = self._feed_forward(x_TD, h_TD, w, cutoff, number)
            out_TD = out_TD * w["mlp_scalar"][None] if "mlp_scalar" in w else out_TD
            out_TD, held = convolve("mlp", out_TD, w, held, number)
            out_TD = scaled(normed(out_TD, w, "post_mlp_norm", spec), spec.scales.residual)
            out_TD = towards(out_TD, h_TD, w, "mlp_rate")
            if stream is not None:
                x_TD, out_TD = weighed(h_TD, out_TD, stream.mlp)
            x_TD, out_TD = moved(x_TD, w, "mlp_stream"), moved(out_TD, w, "mlp_out")
            x_TD = joined(x_TD, out_TD, w, "mlp", spec)
            x_TD = normed(x_TD, w, "joined_mlp_norm", spec)
            return (
                self._shortcut(x_TD, h_TD, w, held, number) if spec.has_shortcut else (x_TD, held)
            )

        return run

    def _beside_tokens(self, h_TD: jax.Array, w: Weights) -> jax.Array:
        """Returns what attention takes: the stream, in some layers beside the embeddings."""
        if "token_norm" not in w:
            return h_TD
        token_TD = normed(self._embedded_TD, w, "token_norm", self._spec)
        return jnp.concatenate([token_TD, h_TD], axis=1)

    def _between_streams(self, layers: Sequence[int], mix: Mix) -> Mix:
        """Returns what runs mixer and feed-forward between several streams."""
        spec, add_ngrams = self._spec, self._ngrams(layers)

        def run(x_NTD: jax.Array, w: Weights, held: Held, number: jax.Array) -> Carry:
            x_NTD, held = add_ngrams(x_NTD, w, held, number)
            x_TD, leave = hyper.enter(x_NTD, w, "attn_hyper", spec)
            mixed_TD, held = mix(normed(x_TD, w, "attn_norm", spec), w, held, number)
            x_NTD = leave(mixed_TD)
            x_TD, leave = hyper.enter(x_NTD, w, "mlp_hyper", spec)
            h_TD = normed(x_TD, w, "mlp_norm", spec)
            return leave(self._feed_forward(x_TD, h_TD, w, None, number)), held

        return run

    def _over_depth(self, layers: Sequence[int], mix: Mix, asked: DepthSpec) -> Mix:
        """Returns what runs mixer and feed-forward on what they choose among what layers gave."""
        over, convolve = Depth(asked, self._spec, self._weights), self._short_convs(layers[0])

        def run(x_TD: jax.Array, w: Weights, held: Held, number: jax.Array) -> Carry:
            if held.given is None:
                raise TypeError("expected what layers have given, got None")
            x_TD, given = over.begin(x_TD, held.given, number)
            h_TD, w = over.enter_mixer(x_TD, w, given, number)
            mixed_TD, held = mix(h_TD, w, held, number)
            mixed_TD, held = convolve("attn", mixed_TD, w, held, number)
            x_TD, given = over.join(x_TD, mixed_TD, given, number)
            h_TD = over.enter_mlp(x_TD, w, given, number)
            out_TD = self._feed_forward(x_TD, h_TD, w, None, number)
            out_TD, held = convolve("mlp", out_TD, w, held, number)
            return x_TD + out_TD, held._replace(given=given)

        return run

    def _behind_block(self, layers: Sequence[int]) -> Mix:
        """Returns what runs a recurrence behind attention and feed-forward, which take the stream
        side by side with the embeddings, and whose result only the recurrence sees. Source: Zamba,
        arXiv 2405.16712, section 2.
        """
        spec, attend, (mix,) = self._spec, self._attention(layers), self._recurrences(layers)

        def run(x_TD: jax.Array, w: Weights, held: Held, number: jax.Array) -> Carry:
            both_TX = jnp.concatenate([x_TD, self._embedded_TD], axis=1)
            out_TD, held = attend(normed(both_TX, w, "ahead_norm", spec), w, held, number)
            h_TD = normed(out_TD, w, "mlp_norm", spec)
            out_TD = linear(self._feed_forward(out_TD, h_TD, w, None, number), w["ahead_out"])
            mixed_TD, held = mix(normed(x_TD + out_TD, w, "attn_norm", spec), w, held, number)
            return x_TD + mixed_TD, held

        return run

    def _mix(self, layers: Sequence[int]) -> Mix:
        """Returns what mixes tokens in any of these layers: attention, a recurrence, both side by
        side, which are added up, or nothing.
        """
        mixers = [self._attention(layers)] if self._spec.has_attention(layers[0]) else []
        mixers += self._recurrences(layers)

        def mix(h_TD: jax.Array, w: Weights, held: Held, number: jax.Array) -> Carry:
            found = []
            for one in mixers:
                mixed_TD, held = one(h_TD, w, held, number)
                found.append(mixed_TD)
            return (sum(found[1:], found[0]) if found else jnp.zeros_like(h_TD)), held

        return mix

    def _attention(self, layers: Sequence[int]) -> Mix:
        """Returns what attends in any of these layers."""
        spec = self._spec
        groups = sorted({spec.group_of(layer)[0] for layer in layers})
        group, rotation_of = spec.groups[groups[0]], self._ropes.of(layers)
        head_dim, scale = group.head_dim, spec.scale_of(group)
        slopes_N, position_T = np.array(spec.attention.slopes), jnp.asarray(self._batch.position_T)
        head_dim -= alibi.NUM_DIMS if slopes_N.size else 0
        temperature, warmth_T1 = spec.attention.temperature, None
        if temperature is not None and layers[0] in (temperature.layers or layers):
            warmth_T1 = _query_factor(temperature, self._batch.position_T)[:, None]
        convolve, compress = self._short_convs(layers[0]), None
        if spec.attention.near:
            own = [(number, self._rows_of(number)) for number in spec.states_of(layers[0])]
            compress = Compression(spec, layers, own[0] if own else None)

        def attend(h_TD: jax.Array, w: Weights, held: Held, number: jax.Array) -> Carry:
            rope, gate_TX = rotation_of(number), h_TD
            w = self._with_chosen(h_TD, w, head_dim)
            k: jax.Array | None
            index: AnyIndex | None
            if "k_up" in w:
                q, k, index, gate_TX, before = latent.project(
                    h_TD, w, rope, spec, head_dim, position_T, number, held.before
                )
                maps, v, held = LatentMaps(w["k_up"], w["v_up"]), None, held._replace(before=before)
            elif compress is not None:
                q, k, index, states = compress(h_TD, w, rope, held.states, number)
                maps, v, held = None, None, held._replace(states=states)
            elif convolved.MIX in w:
                q, k, v, held = self._convolved(h_TD, w, rope, held, number, layers[0])
                maps, index = None, None
            else:
                made = {}
                for name in ("k", "v") if f"k{SHORT_CONV}" in w else ():
                    made_TX = product(w.get(f"{name}{SOURCE}", h_TD), w, name)
                    made[name], held = convolve(name, made_TX, w, held, number)
                q, k, v = project(h_TD, w, rope, spec, head_dim, self._axis, made)
                maps = None
                k, index = with_index_key(h_TD, k, w, rope, spec)
            if slopes_N.size and k is not None:
                q, k = alibi.with_positions(
                    *(q, k, position_T, slopes_N), scale=scale, axis=self._axis
                )
            if warmth_T1 is not None:
                q = q * warmth_T1[..., None]
            if spec.attention.by_depth:
                q = q / (number + 1)
            sinks_N, dtype = w.get("sinks"), w["o"].dtype
            out_TNH, held = self._attend(
                held,
                number,
                *(q, k, v),
                groups=groups,
                scale=scale,
                sinks_N=sinks_N,
                maps=maps,
                index=index,
                distances=distances_of(h_TD, w, q.shape[1], warmth_T1, spec),
                out_dtype=dtype,
            )
            if compress is not None:
                out_TNH = compressed.restored(out_TNH, rope)
            if differential.FIRST[0] in w:
                out_TNH = differential.difference(out_TNH, w, number, eps=spec.norm_eps)
            value_dim = w["o"].num_columns // out_TNH.shape[1]
            if "o_groups" in w:
                num_groups = spec.attention.output_groups
                value_dim = num_groups * w["o_groups"].num_columns // spec.num_heads
            out_TNH = normed(out_TNH[..., :value_dim], w, "attn_out_norm", spec)
            out_TF = out_TNH.reshape(q.shape[0], -1)
            if "attn_gate" in w:
                gate_TF = linear(gate_TX, w["attn_gate"], w.get("attn_gate_bias"))
                if "attn_gate_root" in w:
                    gate_TF *= jnp.square(w["attn_gate_root"].astype(jnp.float32))[None]
                gate_TF = GATES[spec.attention.gate](scaled(gate_TF, spec.attention.gate_factor))
                size = out_TF.shape[1] // gate_TF.shape[1]  # of a head, where each has one gate
                gate_TF = gate_TF if size == 1 else jnp.repeat(gate_TF, size, axis=1)
                out_TF = out_TF.astype(jnp.float32) * gate_TF
            out_TF = normed(out_TF, w, "o_norm", spec, axis=self._axis)
            if "o_groups" in w:
                out_TF = linear_by_group(out_TF, w["o_groups"])
            return linear_over(out_TF, w["o"], w.get("o_bias"), axis=self._axis), held

        return attend

    def _convolved(
        self,
        h_TD: jax.Array,
        w: Weights,
        rope: Rotation | None,
        held: Held,
        number: jax.Array,
        layer: int,
    ) -> tuple[jax.Array, jax.Array, jax.Array, Held]:
        """Projects tokens whose queries and keys see the last ones in a layer that is alike."""
        (number_of,) = self._spec.states_of(layer)
        keeper, own = self._spec.states[number_of].mixer, held.states[number_of]
        if not isinstance(keeper, Convolved):
            raise TypeError(f"expected states of what is convolved, got {keeper}")
        rows = self._rows_of(number_of)(number)
        q, k, v, own = convolved.project(
            *(h_TD, w, rope, keeper, own, rows),
            head_dim=self._spec.head_dim,
            axis=self._axis,
        )
        return q, k, v, held._replace(states=put(held.states, number_of, own))

    def _short_convs(self, layer: int) -> Convolve:
        """Returns what adds to what a block gives, or to keys or values, a convolution of them with
        those of the last tokens, in a layer that is alike and has it.
        """
        listed = [
            (number, self._spec.states[number].mixer) for number in self._spec.states_of(layer)
        ]
        keepers = [(number, one) for number, one in listed if isinstance(one, ShortConvs)]
        if not keepers:
            return lambda name, y_TX, w, held, number: (y_TX, held)
        ((number_of, keeper),) = keepers
        rows_of = self._rows_of(number_of)

        def convolve(
            name: str, y_TX: jax.Array, w: Weights, held: Held, number: jax.Array
        ) -> Carry:
            own = held.states[number_of]
            y_TX, own = keeper(name, y_TX, w, own, rows_of(number))
            return y_TX, held._replace(states=put(held.states, number_of, own))

        return convolve

    def _with_chosen(self, h_TD: jax.Array, w: Weights, head_dim: int) -> Weights:
        """Returns the layer's weights with those that these tokens choose to attend by, if any."""
        router = self._spec.router
        if router is None or attention_experts.ROUTER not in w:
            return w
        return attention_experts.with_chosen(h_TD, w, router, self._is_real_T, head_dim)

    def _recurrences(self, layers: Sequence[int]) -> list[Mix]:
        """Lists what mixes tokens by recurrent states in any of these layers."""
        states = [(one, self._spec.states[one].mixer) for one in self._spec.states_of(layers[0])]
        return [
            self._recurrence(number_of, mixer)
            for number_of, mixer in states
            if not isinstance(mixer, (Compressor, Convolved, Ngrams, ShortConvs))
        ]

    def _recurrence(self, number_of: int, mixer: Mixer) -> Mix:
        """Returns what mixes tokens by these recurrent states in any of the layers that have
        them.
        """
        rows_of = self._rows_of(number_of)

        def mix(h_TD: jax.Array, w: Weights, held: Held, number: jax.Array) -> Carry:
            own = held.states[number_of]
            mixed_TD, own = mixer(h_TD, w, own, rows_of(number), axis=self._axis)
            return mixed_TD, held._replace(states=put(held.states, number_of, own))

        return mix

    def _ngrams(self, layers: Sequence[int]) -> Mix:
        """Returns what adds to the streams of any of these layers what n-grams say; nothing in most
        layers.
        """
        spec = self._spec
        mixers = [(number, spec.states[number].mixer) for number in spec.states_of(layers[0])]
        keepers = [(number, mixer) for number, mixer in mixers if isinstance(mixer, Ngrams)]
        if not keepers:
            return lambda x_NTD, w, held, number: (x_NTD, held)
        ((number_of, keeper),) = keepers
        rows_of = self._rows_of(number_of)

        def add(x_NTD: jax.Array, w: Weights, held: Held, number: jax.Array) -> Carry:
            own = held.states[number_of]
            rows = rows_of(number)
            x_NTD, own = with_ngrams(x_NTD, w, keeper, own, rows, spec, self._axis)
            return x_NTD, held._replace(states=put(held.states, number_of, own))

        return add

    def _rows_of(self, number_of: int) -> Callable[[jax.Array], Rows]:
        """Returns what gives the places of a layer's states, by its number (int32), in an entry of
        `ModelSpec.states`.
        """
        spec, batch, kv = self._spec, self._batch, self._kv
        slot_B, state = kv.rows[0].slot_B, spec.states[number_of]
        if slot_B is None:
            raise ValueError("expected page tables with the slots of recurrent states, got none")
        index_L = np.zeros(spec.num_layers, np.int32)
        index_L[list(state.layers)] = range(len(state.layers))
        num_slots = kv.states[number_of][0].shape[0] // len(state.layers)
        slot_B, after_BA = jnp.where(batch.count_B > 0, slot_B, num_slots), kv.rows[0].after_BA
        len_B = jnp.asarray(batch.position_T)[batch.start_B]

        def rows_of(number: jax.Array) -> Rows:
            layer = jnp.asarray(index_L)[number]
            return Rows(slot_B, len_B, batch, layer, num_slots, after_BA)

        return rows_of

    def _feed_forward(
        self,
        x_TD: jax.Array,
        h_TD: jax.Array,
        w: Weights,
        cutoff: float | None,
        number: jax.Array,
    ) -> jax.Array:
        """Runs the MLP of a layer, the experts that its router chooses, or both side by side: then
        the experts have norms of their own, before which they take the stream x. Some layers have
        neither.
        """
        spec, router, limits = self._spec, self._spec.router, self._spec.scales.limits
        if "up" not in w and "router" not in w:
            return jnp.zeros_like(h_TD)
        if router is None or "router" not in w or spec.has_shortcut:
            norm = partial(normed, w=w, name="down_norm", spec=spec, axis=self._axis)
            out_TD = mlp(
                h_TD,
                w,
                activation=spec.activation,
                gate_factor=spec.scales.gate,
                limit=_limit(limits.dense, number),
                limits_act=limits.of_act,
                cutoff=cutoff,
                norm=norm if "down_norm" in w or "down_norm" in spec.unit_norms else None,
                axis=self._axis,
            )
            return scaled(out_TD, spec.scales.mlp)
        if "up" not in w:
            return self._experts(h_TD, w, router, number)
        dense_TD = mlp(h_TD, w, activation=spec.activation, axis=self._axis)
        routed_TD = self._experts(x_TD, w, router, number)
        return normed(dense_TD, w, "post_dense_norm", spec) + normed(
            routed_TD, w, "post_routed_norm", spec
        )

    def _with_view(self, h_TD: jax.Array, w: Weights, held: Held) -> tuple[Weights, Held]:
        """Returns the layer's weights with what its router sees, if it sees what others saw."""
        if routing.VIEW not in w:
            return w, held
        seen_TX, view_TX = routing.views(h_TD, w, held.view_TX, self._spec)
        return {**w, SEEN: seen_TX}, held._replace(view_TX=view_TX)

    def _norm_of_experts(
        self, w: Weights, axis: MeshAxes | None
    ) -> Callable[[jax.Array], jax.Array] | None:
        """Returns the norm of what each expert gives, None where there is none. It is of what all
        devices along the axis give together, and the first one's counts where they are added up
        again.
        """
        if "routed_out_norm" not in w:
            return None

        def norm(y_TKD: jax.Array) -> jax.Array:
            y_TKD = normed(add_up(y_TKD, None, axis), w, "routed_out_norm", self._spec)
            return y_TKD if axis is None else jnp.where(jax.lax.axis_index(axis) == 0, y_TKD, 0)

        return norm

    def _shortcut(
        self, x_TD: jax.Array, h_TD: jax.Array, w: Weights, held: Held, number: jax.Array
    ) -> Carry:
        """Sets aside what a layer's experts make of the input to its MLP; the layer behind it,
        which has none, adds it to the stream.
        """
        router = self._spec.router
        if router is not None and "router" in w:
            return x_TD, held._replace(aside_TD=self._experts(h_TD, w, router, number))
        return x_TD if held.aside_TD is None else x_TD + held.aside_TD, held

    def _experts(self, x_TD: jax.Array, w: Weights, router: Router, number: jax.Array) -> jax.Array:
        """Runs the experts that the router chooses, and the shared one."""
        spec, limits = self._spec, self._spec.scales.limits
        run_mlp = partial(
            mlp,
            activation=spec.activation,
            limits_act=limits.of_act,
            soft_limits=limits.soft,
        )
        num_experts = w["router"].num_rows - router.num_others
        seen_TX = w[SEEN] if SEEN in w else normed(x_TD, w, "router_norm", spec)
        logits_TE = linear_float32(seen_TX, w["router"])
        if "router_offset" in w:
            logits_TE += w["router_offset"].astype(jnp.float32)[None, :]
        given_TK = None
        if TOKEN_EXPERTS in w:
            given_TK = w[TOKEN_EXPERTS].rows(jnp.asarray(self._batch.token_T), router.num_used)
        if router.num_sinks:
            expert_TK, weight_TK, shared_TS = router.with_sinks(logits_TE, w.get("router_bias"))
        else:
            expert_TK, weight_TK = router(logits_TE, w.get("router_bias"), given_TK)
            shared_TS = None
        if "router_gain" in w:
            weight_TK *= w["router_gain"].astype(jnp.float32)[expert_TK]
        x_TD = normed(x_TD, w, "routed_norm", spec)
        given_T1 = None
        if router.num_identity:
            end = num_experts + router.num_identity
            is_identity_TK = (expert_TK >= num_experts) & (expert_TK < end)
            given_T1 = jnp.where(is_identity_TK, weight_TK, 0).sum(axis=1, keepdims=True)
        expert_TK = jnp.where(self._is_real_T[:, None], expert_TK, num_experts)

        experts = {
            name.removeprefix(EXPERT): leaf for name, leaf in w.items() if name.startswith(EXPERT)
        }
        divided = self._axis  # over which each expert is
        if (num_own := experts["up"].leaf.shape[1]) < num_experts:  # experts are, each is whole
            expert_TK = _own_experts(expert_TK, num_own, self._axis)
            num_experts, divided = num_own, None

        def run(x_RD: jax.Array, expert: jax.Array) -> jax.Array:
            own = {name: leaf.of_expert(expert) for name, leaf in experts.items()}
            if "down_bias" in own and divided is not None:  # added up over devices: once
                is_first = jax.lax.axis_index(divided) == 0
                own["down_bias"] = jnp.where(is_first, own["down_bias"], 0)
            return run_mlp(x_RD, own, limit=_limit(limits.routed, number))

        # Experts of a size of their own. What they give is added up over devices behind the layer
        # that widens it, which has no bias.
        routed_TX = linear(x_TD, w["latent_in"]) if "latent_in" in w else x_TD
        routed_TX = normed(routed_TX, w, "latent_norm", spec)
        y_TD = run_experts(
            routed_TX,
            expert_TK,
            weight_TK,
            run,
            num_experts=num_experts,
            on_input=router.on_input,
            norm=self._norm_of_experts(w, divided),
            is_native=all(leaf.is_native for leaf in experts.values()),
        )
        y_TD = linear(y_TD, w["latent_out"]) if "latent_out" in w else y_TD
        if "shared_up" in w:
            names = ("gate", "up", "down")
            own = {name: w[f"shared_{name}"] for name in names if f"shared_{name}" in w}
            weigh = None
            if shared_TS is not None:
                weigh = partial(weighed_parts, weight_TS=shared_TS, axis=self._axis)
            shared_TD = run_mlp(x_TD, own, limit=_limit(limits.shared, number), norm=weigh)
            if "shared_weight" in w:
                shared_TD *= jax.nn.sigmoid(linear(x_TD, w["shared_weight"]))
            y_TD += scaled(shared_TD, router.shared_scale)
        y_TD = add_up(y_TD, w.get("routed_bias"), self._axis)
        return y_TD if given_T1 is None else y_TD + given_T1 * x_TD


def _own_experts(expert_TK: jax.Array, num_own: int, axis: MeshAxes | None) -> jax.Array:
    """Returns which of this device's experts tokens have chosen: past the last one for those of
    other devices, and for none.
    """
    if axis is None:
        raise ValueError(f"expected as many experts as the router knows, got {num_own}")
    expert_TK = expert_TK - jax.lax.axis_index(axis) * num_own
    return jnp.where((expert_TK >= 0) & (expert_TK < num_own), expert_TK, num_own)


def _limit(limit_L: tuple[float, ...], number: jax.Array) -> float | jax.Array | None:
    """Returns the limit of a layer, of those that each has, 0 for none; None where none has any."""
    if not any(limit_L):
        return None
    if len(set(limit_L)) == 1:
        return limit_L[0]
    return jnp.asarray([limit or np.inf for limit in limit_L], jnp.float32)[number]


def _query_factor(temperature: QueryTemperature, position_T: jax.Array) -> jax.Array:
    """Returns the factor of each token's queries, [T]."""
    period_T = (position_T + temperature.offset).astype(jnp.float32) / temperature.period
    if temperature.is_smooth:
        return 1 + temperature.beta * jnp.log(jnp.maximum(period_T, 1))
    return 1 + temperature.beta * jnp.log1p(jnp.floor(period_T))


def _contexts(kv: PagedKV, batch: Batch) -> jax.Array | None:
    """Returns how long each token's sequence may get, [T]; None where nothing depends on it."""
    context_B = kv.rows[0].context_B
    return None if context_B is None else jnp.asarray(context_B).at[batch.row_T].get(mode="clip")


def _adapters_of(weights: Weights, kv: PagedKV, batch: Batch) -> TokenAdapters | None:
    """Returns which adapters the tokens go through; None where no row can have any."""
    adapter_B, count = kv.rows[0].adapter_B, num_adapters(weights)
    if adapter_B is None or not count:  # a draft model has none
        return None
    slot_T = jnp.asarray(adapter_B).at[batch.row_T].get(mode="fill", fill_value=count)
    return TokenAdapters.of(slot_T, count)
