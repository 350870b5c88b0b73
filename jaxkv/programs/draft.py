"""Runs a draft model: a smaller one, which has its keys and values beside the model's in every page
and proposes the tokens that the model is to verify (`programs.speculation`).

Whatever the model stores, the draft model has stored when the program ends, at the same place. So
pages that are shared, forked, moved to a host or found again are complete for both, and what is
taken back of one is taken back of the other.

A draft model may be a layer that predicts out of the model's hidden states (`models.predictor`).
For a token it needs that of the token before it, which may be of an earlier step, or of another
request whose pages are found again. So every page has the hidden state of its last token, in one
more store behind the layer's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxkv.axes import MeshAxes
from jaxkv.kv.state import PagedKV
from jaxkv.models import decoder
from jaxkv.models.predictor import chained, hidden_of, predict, with_shared
from jaxkv.models.spec import HiddenStates, ModelSpec
from jaxkv.ops.attention import Backend, Batch
from jaxkv.ops.sampling import NO_TOKEN, Sampling, sample
from jaxkv.pytree import pytree
from jaxkv.weights.tree import Weights, draft_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """Says of a draft model what programs have as `spec` and `backend` of the model. hidden_states:
    what it takes of the model, where it is a layer that predicts out of that.
    """

    spec: ModelSpec
    backend: str | Backend
    hidden_states: HiddenStates | None = None

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Returns the layers of the model whose streams it takes (`decoder.forward`)."""
        return () if self.hidden_states is None else self.hidden_states.layers

    def hidden_of(self, weights: Weights, aux_TX: jax.Array, spec: ModelSpec) -> jax.Array:
        """Makes what it takes of the model, of this spec, [T, D]."""
        if self.hidden_states is None:
            raise TypeError("expected a layer that predicts, got a draft model")
        return hidden_of(weights, aux_TX, self.hidden_states, spec=spec, own=self.spec)


def follow(
    weights: Weights,
    kv: PagedKV,
    batch: Batch,
    aux_TX: jax.Array | None,
    draft: Draft | None,
    *,
    spec: ModelSpec,
    axis: MeshAxes | None,
) -> PagedKV:
    """Has the draft model store its keys and values of a step's tokens; the same state without one.

    kv: with the rows as they are before the step, which they are in what it returns too. aux_TX:
    those streams of the model, of this spec, that the draft model takes, if any.
    """
    if draft is None:
        return kv
    if draft.hidden_states is not None:
        if aux_TX is None:
            raise ValueError("expected the model's hidden states, got none")
        hidden_TD = draft.hidden_of(weights, aux_TX, spec)
        before_TD = jnp.concatenate([jnp.zeros_like(hidden_TD[:1]), hidden_TD[:-1]])
        first_B = jnp.where(batch.count_B > 0, batch.start_B, hidden_TD.shape[0])
        before_TD = before_TD.at[first_B].set(last_hidden(kv), mode="drop")
        kv = with_hidden(kv, batch, hidden_TD, batch.count_B)
        own, _ = _predict(weights, kv.of_draft, batch, before_TD, draft=draft, axis=axis)
        return kv.with_draft(own)
    ran = decoder.forward(
        draft_of(weights),
        kv.of_draft,
        batch,
        spec=draft.spec,
        backend=draft.backend,
        axis=axis,
    )
    return kv.with_draft(ran.kv)


def draw_ahead(
    weights: Weights,
    kv: PagedKV,
    token_B: jax.Array,
    position_B: jax.Array,
    count_B: jax.Array,
    sampling: Sampling,
    recent_nB: jax.Array,
    *,
    draft: Draft,
    num_tokens: int,
    axis: MeshAxes | None,
) -> tuple[PagedKV, jax.Array]:
    """Returns the state and what the draft model draws behind the newest token of each row,
    [B, num_tokens] int32.

    It draws with the row's own parameters and seed for the position, so that it draws what the
    model will as often as their logits allow, sampled tokens too. count_B: the tokens that it
    stores of each row, the newest first; 0 for rows that rest, and at most num_tokens + 1, so that
    none is missing should all of them hold. What is behind count_B - 1 is for nobody.
    sampling: as of the next token. recent_nB: as in `sample`.
    """
    num_rows = token_B.shape[0]

    def draw(carry: tuple) -> tuple:
        i, own, token_B, ahead_Bk = carry
        live_B = (i < count_B).astype(jnp.int32)
        batch = packed(token_B[:, None], position_B + i, live_B)
        own, x_BD, *_ = decoder.forward(
            draft_of(weights), own, batch, spec=draft.spec, backend=draft.backend, axis=axis
        )
        logits_BV = decoder.logits(draft_of(weights), x_BD, spec=draft.spec, axis=axis)
        token_B = _drawn(logits_BV, sampling, position_B, recent_nB, ahead_Bk, i)
        return i + 1, own, token_B, ahead_Bk.at[:, i].set(token_B, mode="drop")

    none_Bk = jnp.full((num_rows, num_tokens), NO_TOKEN, jnp.int32)
    carry = (jnp.int32(0), kv.of_draft, token_B, none_Bk)
    _, own, _, ahead_Bk = jax.lax.while_loop(lambda x: x[0] < jnp.max(count_B), draw, carry)
    return kv.with_draft(own), ahead_Bk


def _drawn(
    logits_BV: jax.Array,
    sampling: Sampling,
    position_B: jax.Array,
    recent_nB: jax.Array,
    ahead_Bk: jax.Array,
    i: jax.Array | int,
) -> jax.Array:
    """Draws the token i + 1 behind each row's newest one, which is at `position`."""
    now = replace(
        sampling,
        logprobs_B=jnp.zeros_like(sampling.logprobs_B),
        min_left_B=jnp.maximum(sampling.min_left_B - i, 0),
    )
    recent = jnp.concatenate([recent_nB, ahead_Bk.T])
    return sample(logits_BV, now, position_B + 1 + i, recent, num_logprobs=1).token_B


@pytree
class Fresh:
    """Holds the newest tokens of rows, of which a layer that predicts has stored nothing yet.

    token_BA    int32: the first `count` of each row, the last of them the row's newest token.
    hidden_BAD  float32: the model's hidden states of the tokens before them.
    """

    token_BA: jax.Array
    count_B: jax.Array
    hidden_BAD: jax.Array

    @classmethod
    def newest(cls, kv: PagedKV, token_B: jax.Array, live_B: jax.Array, num_tokens: int) -> Fresh:
        """Returns those of rows whose newest token is all that is missing, as `num_tokens` are
        proposed at once.
        """
        return cls.of(
            token_B[:, None], live_B.astype(jnp.int32), last_hidden(kv)[:, None], num_tokens
        )

    @classmethod
    def of(
        cls, token_BA: jax.Array, count_B: jax.Array, hidden_BAD: jax.Array, num_tokens: int
    ) -> Fresh:
        """Returns these, at most num_tokens + 1 of each row, with room for so many."""
        missing = num_tokens + 1 - token_BA.shape[1]
        token_BA = jnp.pad(token_BA, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        return cls(token_BA, count_B, jnp.pad(hidden_BAD, ((0, 0), (0, missing), (0, 0))))


def catch_up(
    weights: Weights,
    kv: PagedKV,
    fresh: Fresh,
    position_B: jax.Array,
    budget_B: jax.Array,
    *,
    draft: Draft,
    axis: MeshAxes | None,
) -> tuple[PagedKV, jax.Array]:
    """Has the layer that predicts store its keys and values of fresh tokens; not of the newest one
    in rows without a budget, which the model has not stored either.

    position_B: of the newest tokens. Returns the layer's state, with its rows behind the tokens,
    and what it has made of each row's last one, [B, D].
    """
    count_B = jnp.where(budget_B > 0, fresh.count_B, jnp.maximum(fresh.count_B - 1, 0))
    first_B = position_B - fresh.count_B + 1
    batch = packed(fresh.token_BA, first_B, count_B)
    row_T = jnp.minimum(batch.row_T, count_B.shape[0] - 1)
    before_TD = fresh.hidden_BAD.at[row_T, batch.position_T - first_B[row_T]].get(mode="clip")
    own = kv.of_draft
    rows = tuple(replace(one, len_B=jnp.where(count_B > 0, first_B, one.len_B)) for one in own.rows)
    own, x_TD = _predict(weights, replace(own, rows=rows), batch, before_TD, draft=draft, axis=axis)
    return own, x_TD[jnp.maximum(batch.start_B + count_B - 1, 0)]


def predict_ahead(
    weights: Weights,
    kv: PagedKV,
    fresh: Fresh,
    position_B: jax.Array,
    budget_B: jax.Array,
    sampling: Sampling,
    recent_nB: jax.Array,
    *,
    draft: Draft,
    num_tokens: int,
    axis: MeshAxes | None,
) -> tuple[PagedKV, jax.Array]:
    """Returns the state and what the layer that predicts draws behind the newest token of each row,
    [B, num_tokens] int32, as `draw_ahead` does.

    Of a token that it has drawn it takes its own hidden state in place of the model's. What it
    stores of such tokens is replaced when they are `fresh`.
    """
    hidden_states = draft.hidden_states
    if hidden_states is None:
        raise TypeError("expected a layer that predicts, got a draft model")
    own, x_BD = catch_up(weights, kv, fresh, position_B, budget_B, draft=draft, axis=axis)
    shared = with_shared(draft_of(weights), weights)

    def drawn(x_BD: jax.Array, i: jax.Array | int, ahead_Bk: jax.Array) -> jax.Array:
        logits_BV = decoder.logits(shared, x_BD, spec=draft.spec, axis=axis)
        token_B = _drawn(logits_BV, sampling, position_B, recent_nB, ahead_Bk, i)
        return ahead_Bk.at[:, i].set(token_B)

    def draw(carry: tuple) -> tuple:
        i, own, x_BD, ahead_Bk = carry
        live_B = (i < budget_B - 1).astype(jnp.int32)
        batch = packed(ahead_Bk[:, i - 1, None], position_B + i, live_B)
        hidden_BD = chained(shared, x_BD, hidden_states, spec=draft.spec)
        own, x_BD = _predict(weights, own, batch, hidden_BD, draft=draft, axis=axis)
        return i + 1, own, x_BD, drawn(x_BD, i, ahead_Bk)

    most = jnp.minimum(num_tokens, jnp.max(budget_B) - 1)
    none_Bk = jnp.full((position_B.shape[0], num_tokens), NO_TOKEN, jnp.int32)
    carry = (jnp.int32(1), own, x_BD, drawn(x_BD, 0, none_Bk))
    _, own, _, ahead_Bk = jax.lax.while_loop(lambda x: x[0] < most, draw, carry)
    return kv.with_draft(own), ahead_Bk


def _predict(
    weights: Weights,
    own: PagedKV,
    batch: Batch,
    before_TD: jax.Array,
    *,
    draft: Draft,
    axis: MeshAxes | None,
) -> tuple[PagedKV, jax.Array]:
    """Runs `predict` with the layer's stores of its own state, of which the last one stays."""
    *stores, hidden = own.stores
    found, x_TD = predict(
        with_shared(draft_of(weights), weights),
        replace(own, stores=tuple(stores)),
        batch,
        before_TD,
        spec=draft.spec,
        backend=draft.backend,
        axis=axis,
    )
    return replace(found, stores=(*found.stores, hidden)), x_TD


def last_hidden(kv: PagedKV) -> jax.Array:
    """Returns the hidden state of the last token of each row, [B, D] float32, as its page has it;
    zeros for rows without tokens.
    """
    rows, size, store = kv.rows[0], kv.stores[0].page_size, kv.stores[-1]
    column_B1 = jnp.maximum(rows.len_B - 1, 0)[:, None] // size
    page_B = jnp.take_along_axis(jnp.asarray(rows.table_BW), column_B1, axis=1)[:, 0]
    hidden_BD = store.pages[page_B].reshape(page_B.shape[0], -1)[:, : store.layout.head_dim]
    return jnp.where(jnp.asarray(rows.len_B)[:, None] > 0, hidden_BD, 0)


def with_hidden(kv: PagedKV, batch: Batch, hidden_TD: jax.Array, count_B: jax.Array) -> PagedKV:
    """Returns the state with the hidden states, of the first `count` of each row's tokens, that are
    the last ones of their pages. kv: with the rows as before the step.
    """
    rows, size, store = kv.rows[0], kv.stores[0].page_size, kv.stores[-1]
    num_rows, width = rows.table_BW.shape
    row_T = jnp.minimum(batch.row_T, num_rows - 1)
    end_T, position_T = (rows.len_B + count_B)[row_T], jnp.asarray(batch.position_T)
    is_last_T = (position_T + 1 == end_T) | ((position_T + 1) % size == 0)
    is_last_T &= (jnp.asarray(batch.row_T) < num_rows) & (position_T < end_T)
    page_T = jnp.asarray(rows.table_BW)[row_T, jnp.minimum(position_T // size, width - 1)]
    page_T = jnp.where(is_last_T, page_T, store.num_pages)
    width = math.prod(store.pages.shape[1:])  # more than the state where that is no whole rows
    new = jnp.pad(hidden_TD, ((0, 0), (0, width - hidden_TD.shape[1])))
    new = new.reshape(-1, *store.pages.shape[1:])
    store = replace(store, pages=store.pages.at[page_T].set(new, mode="drop"))
    return replace(kv, stores=(*kv.stores[:-1], store))


def packed(token_BA: jax.Array, position_B: jax.Array, count_B: jax.Array) -> Batch:
    """Packs the first `count` of each row's tokens, the first of them at `position`: decode rows
    where each has one at most.
    """
    num_rows, size = token_BA.shape
    row_B = jnp.arange(num_rows, dtype=jnp.int32)
    if size == 1:
        return Batch(
            token_T=jnp.maximum(token_BA[:, 0], 0),
            position_T=position_B,
            row_T=jnp.where(count_B > 0, row_B, num_rows),
            start_B=row_B,
            count_B=count_B,
            num_decode=jnp.int32(num_rows),
            num_rows=jnp.int32(num_rows),
            decode_only=True,
        )
    start_B = jnp.cumsum(count_B, dtype=jnp.int32) - count_B
    offset_1A = jnp.arange(size, dtype=jnp.int32)[None]
    place_BA = jnp.where(
        offset_1A < count_B[:, None], start_B[:, None] + offset_1A, num_rows * size
    )

    def pack(x_BA: jax.Array, fill: int) -> jax.Array:
        full_T = jnp.full(num_rows * size, fill, jnp.int32)
        return full_T.at[place_BA].set(x_BA, mode="drop")

    return Batch(
        token_T=pack(jnp.maximum(token_BA, 0), 0),
        position_T=pack(position_B[:, None] + offset_1A, 0),
        row_T=pack(jnp.broadcast_to(row_B[:, None], token_BA.shape), num_rows),
        start_B=start_B,
        count_B=count_B,
        num_decode=jnp.int32(0),
        num_rows=jnp.int32(num_rows),
        chunk_len=size,
    )
