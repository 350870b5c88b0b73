"""Compressed attention: of older tokens the cache has entries, each made of several tokens, and of
the last ones a row each, which is key and value of every head at once.

An entry is a weighed sum over its tokens, number by number, with a softmax over what they say of
each. Its numbers are behind the rows of its own tokens, an equal part behind each, so that pages
are shared, forked and cut off as those of any model; until it is made its tokens' part in it is a
state of the row. Rows and entries have their rotated numbers first, the others behind.
Source: DeepSeek-V4's paper, section 2.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxkv.axes import Array
from jaxkv.models.recurrent import Compressor
from jaxkv.models.rope import rope_frequencies
from jaxkv.models.spec import IndexSpec, ModelSpec
from jaxkv.ops.attention import Entries, EntryShape, Index
from jaxkv.ops.layers import linear, rms_norm, total_over
from jaxkv.ops.matrices import values
from jaxkv.ops.recurrent.rows import NOWHERE, Rows, read, write
from jaxkv.ops.rotation import Rotation, apply_rope, rope_tables
from jaxkv.weights.tree import Weights

PARTS = ("entry", "index")
"""What leaves of an entry's parts begin with: that which is attended to, and what chooses it."""


States = tuple[tuple[Array, ...], ...]
"""For each entry of `ModelSpec.states` its arrays."""


class Compression:
    """Projects the tokens of a step in any of some layers, which compress alike. states: which of
    `ModelSpec.states` they have, and what gives the places of a layer's; None: they have no
    entries.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layers: Sequence[int],
        states: tuple[int, Callable[[Array], Rows]] | None,
    ) -> None:
        self._spec, self._states = spec, states
        self._rope = (spec.layer_ropes or (spec.rope,) * spec.num_layers)[layers[0]]

    def __call__(
        self, x_TD: Array, w: Weights, rope: Rotation | None, states: States, number: Array
    ) -> tuple[Array, Array, Entries, States]:
        """Computes rotated queries [T, N, H] and rows [T, 1, H] in layer `number` (int32). Returns
        them, how these tokens attend, and the states with what they say.
        """
        spec, asked = self._spec, self._spec.attention
        low_TQ = _normed(linear(x_TD, w["q_down"]), w, "q_down_norm", spec)
        # As in attention of other kinds: else XLA may split the weight into heads, not the result.
        q_TF = jax.lax.optimization_barrier(linear(low_TQ, w["q"]))
        q_TNH = q_TF.reshape(x_TD.shape[0], -1, spec.head_dim)
        q_TNH = rms_norm(q_TNH, jnp.ones(spec.head_dim, jnp.float32), eps=spec.norm_eps)
        row_TH = _normed(jax.lax.optimization_barrier(linear(x_TD, w["kv"])), w, "kv_norm", spec)
        q_TNH, row_T1H = rotated(q_TNH, rope), rotated(row_TH[:, None], rope)
        if self._states is None:
            return q_TNH, row_T1H, Entries(None, None, None, asked.near, None), states
        choice = None
        if isinstance(asked.index, IndexSpec) and "index_q" in w:
            choice = _chooser(x_TD, low_TQ, w, rope, asked.index)
        number_of, rows_of = self._states
        keeper, (pool,) = spec.states[number_of].mixer, states[number_of]
        if not isinstance(keeper, Compressor):
            raise TypeError(f"expected states of what is compressed, got {keeper}")
        entry_EX, last_E, pool = self._entries(x_TD, w, keeper, pool, rows_of(number))
        shape = EntryShape(keeper.rate, sum(keeper.sizes))
        how = Entries(entry_EX, last_E, choice, asked.near, shape)
        return q_TNH, row_T1H, how, put(states, number_of, (pool,))

    def _entries(
        self, x_TD: Array, w: Weights, keeper: Compressor, pool: Array, rows: Rows
    ) -> tuple[Array, Array, Array]:
        """Makes the entries whose last token is in this step. Returns (entries [E, X], the last
        token of each, past the step's for none, the states with what these tokens say).
        """
        batch, num_tokens, count = rows.batch, x_TD.shape[0], keeper.num_kept
        position_T = jnp.asarray(batch.position_T)
        said = (_said(x_TD, w, name, position_T, keeper.rate) for name in _parts(w))
        said_TX = jnp.concatenate([x for part in said for x in part], axis=1)
        is_last_T = batch.is_row_T & ((position_T + 1) % keeper.rate == 0)
        size = min(num_tokens, num_tokens // keeper.rate + batch.start_B.shape[0])
        (last_E,) = jnp.nonzero(is_last_T, size=size, fill_value=num_tokens)
        back_1P = jnp.arange(count - 1, -1, -1)[None]

        def make() -> Array:
            row_E = jnp.asarray(batch.row_T).at[last_E].get(mode="fill", fill_value=0)
            offset_E1 = (last_E - jnp.asarray(batch.start_B)[row_E])[:, None]
            position_EP = position_T.at[last_E].get(mode="fill", fill_value=0)[:, None] - back_1P
            here = said_TX.at[last_E[:, None] - back_1P].get(mode="clip")
            place_EP = rows.index_B[row_E][:, None], position_EP % count
            before = pool.at[place_EP].get(mode="clip").astype(jnp.float32)
            said_EPX = jnp.where((offset_E1 >= back_1P)[..., None], here, before)
            rotation = self._rotation(position_EP[:, -1] - keeper.rate + 1)
            return _weighed(said_EPX, position_EP >= 0, w, keeper, rotation, self._spec)

        made = jax.eval_shape(make)
        # Most steps of decoding complete none.
        entry_EX = jax.lax.cond(jnp.any(is_last_T), make, lambda: jnp.zeros(made.shape, made.dtype))
        return entry_EX, last_E, _kept(pool, said_TX, rows, count)

    def _rotation(self, position_E: Array) -> Rotation | None:
        if (rope := self._rope) is None:
            return None
        inv_freq = rope_frequencies(rope, self._spec.head_dim)
        return Rotation(*rope_tables(position_E, inv_freq, rope.attention_factor), rope.interleaved)


def put(states: States, number: int, own: tuple[Array, ...]) -> States:
    """Returns states with other ones of an entry of `ModelSpec.states`."""
    return (*states[:number], own, *states[number + 1 :])


def rotated(x_TNH: Array, rope: Rotation | None) -> Array:
    """Rotates the last numbers of each head, and puts them first."""
    if rope is None:
        return x_TNH
    return apply_rope(jnp.roll(x_TNH, 2 * rope.cos_TP.shape[1], axis=2), rope)


def restored(out_TNH: Array, rope: Rotation | None) -> Array:
    """Inverts `rotated` in what attention gives: values are rotated as keys."""
    if rope is None:
        return out_TNH
    back = rope._replace(sin_TP=-rope.sin_TP)
    return jnp.roll(apply_rope(out_TNH, back), -2 * rope.cos_TP.shape[1], axis=2)


def _chooser(
    x_TD: Array, low_TQ: Array, w: Weights, rope: Rotation | None, asked: IndexSpec
) -> Index:
    """Computes what chooses entries for these tokens."""
    q_TF = jax.lax.optimization_barrier(linear(low_TQ, w["index_q"]))
    q_TIH = q_TF.reshape(x_TD.shape[0], asked.num_heads, asked.head_dim)
    factor = (asked.num_heads * asked.head_dim) ** -0.5
    return Index(rotated(q_TIH, rope), linear(x_TD, w["index_weight"]) * factor, asked.num_chosen)


def _parts(w: Weights) -> list[str]:
    return [name for name in PARTS if f"{name}_kv" in w]


def _said(x_TD: Array, w: Weights, name: str, position_T: Array, rate: int) -> tuple[Array, Array]:
    """Computes the numbers that tokens have in an entry's part, and what they say of each."""
    place_PX = values(w[f"{name}_place"]).astype(jnp.float32).reshape(rate, -1)
    said_TX = linear(x_TD, w[f"{name}_gate"]) + place_PX[position_T % rate]
    return linear(x_TD, w[f"{name}_kv"]), said_TX


def _weighed(
    said_EPX: Array,
    is_there_EP: Array,
    w: Weights,
    keeper: Compressor,
    rotation: Rotation | None,
    spec: ModelSpec,
) -> Array:
    """Makes entries of what their tokens say, part by part, [E, X]."""
    made, begin = [], 0
    for name, size in zip(_parts(w), keeper.sizes, strict=True):
        width = size * (1 + keeper.overlaps)
        kv, said = (said_EPX[..., begin + i * width : begin + (i + 1) * width] for i in range(2))
        begin += 2 * width
        if keeper.overlaps:  # tokens have numbers for the entry behind theirs, and for their own
            kv, said = (
                jnp.concatenate([x[:, : keeper.rate, :size], x[:, keeper.rate :, size:]], axis=1)
                for x in (kv, said)
            )
        is_there = is_there_EP[..., None]
        said = jnp.where(is_there, said, -jnp.inf)
        weight = jnp.exp(said - said.max(axis=1, keepdims=True))
        weight /= total_over(weight, 1)[:, None]
        entry_EH = total_over(jnp.where(is_there, kv, 0) * weight, 1)
        entry_EH = _normed(entry_EH, w, f"{name}_norm", spec)
        made.append(rotated(entry_EH[:, None], rotation)[:, 0])
    return jnp.concatenate(made, axis=1)


def _kept(pool: Array, said_TX: Array, rows: Rows, count: int) -> Array:
    """Returns the states with what the last `count` tokens of each row say."""
    batch, num_tokens = rows.batch, said_TX.shape[0]
    position_T, row_T = jnp.asarray(batch.position_T), jnp.asarray(batch.row_T)
    start_B, count_B = jnp.asarray(batch.start_B), jnp.asarray(batch.count_B)
    if rows.after_BA is None:
        index_T = rows.index_B.at[row_T].get(mode="fill", fill_value=NOWHERE)
        left_T = (start_B + count_B).at[row_T].get(mode="clip") - jnp.arange(num_tokens)
        index_T = jnp.where(left_T <= count, index_T, NOWHERE)  # of others a later one is there
        return pool.at[index_T, position_T % count].set(said_TX.astype(pool.dtype), mode="drop")

    def token(j: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        own_BPX, pool = carry
        token_B = jnp.where(j < count_B, start_B + j, num_tokens)
        place_B = position_T.at[token_B].get(mode="fill", fill_value=0) % count
        row_B = jnp.where(j < count_B, jnp.arange(len(start_B)), NOWHERE)
        said_BX = said_TX.at[token_B].get(mode="fill", fill_value=0)
        own_BPX = own_BPX.at[row_B, place_B].set(said_BX, mode="drop")
        return own_BPX, write(pool, rows.written_BA[:, j], own_BPX)

    carry = (read(pool, rows.index_B, rows.is_new_B), pool)
    return jax.lax.fori_loop(0, jnp.max(count_B), token, carry)[1]


def _normed(x: Array, w: Weights, name: str, spec: ModelSpec) -> Array:
    return rms_norm(x, values(w[name]).astype(jnp.float32), eps=spec.norm_eps)
