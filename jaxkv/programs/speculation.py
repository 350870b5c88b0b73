"""The decode loop that proposes tokens ahead, and verifies them: as many tokens for each row as the
plain loop, in fewer steps.

A step draws the token behind every proposed one exactly as a step of its own would, by its row's
seed and its position, and keeps what it draws for as long as it draws what was proposed. So what
comes out does not depend on what is proposed. A proposal that does not hold is taken back by not
counting it: the row's next step writes over its keys and values. Of a recurrent state there is one
after each token of a step, in a slot of its own, and the row goes on from the one after its last
token that counts. Source: arXiv 2211.17192, where a proposal has probability 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from jaxkv.axes import MeshAxes
from jaxkv.config import Speculation
from jaxkv.kv.state import PagedKV, copy_state
from jaxkv.models import decoder
from jaxkv.models.spec import ModelSpec
from jaxkv.ops.attention import Backend
from jaxkv.ops.prompt_lookup import look_up
from jaxkv.ops.sampling import (
    NO_TOKEN,
    NUM_LOGPROBS,
    Sampled,
    Sampling,
    empty_sampled,
    is_stop,
    sample,
)
from jaxkv.placement import on_every_device
from jaxkv.programs.draft import (
    Draft,
    Fresh,
    catch_up,
    draw_ahead,
    packed,
    predict_ahead,
    with_hidden,
)
from jaxkv.programs.loop import Rows
from jaxkv.programs.step import Newest
from jaxkv.pytree import pytree
from jaxkv.weights.tree import Weights


@pytree
class Drafts:
    """Counts what came of proposals, for each row of a loop, int32.

    plain_B, wide_B  steps that it ran in: with one token of each row, and with proposals of some.
    drafted_Bk, accepted_Bk  how often a k-th token was proposed ahead, and held.
    """

    plain_B: jax.Array
    wide_B: jax.Array
    drafted_Bk: jax.Array
    accepted_Bk: jax.Array


@pytree
class _State:
    """Holds what a step hands to the next one: text_BN, the tokens of each row up to its newest,
    None where nobody looks at them; ahead_Bk, what comes next as it is proposed, NO_TOKEN behind
    the last; how many of the rows' tokens there are in `out`; and what a layer that predicts has
    not stored yet, None where nothing does.
    """

    kv: PagedKV
    rows: Rows
    text_BN: jax.Array | None
    ahead_Bk: jax.Array
    num_B: jax.Array
    out: Sampled
    drafts: Drafts
    fresh: Fresh | None = None


STATIC = ("spec", "backend", "width", "speculation", "num_logprobs", "draft", "placement")


@partial(jax.jit, static_argnames=STATIC, donate_argnames=("kv", "text_RN"))
@on_every_device
def speculative_loop(
    weights: Weights,
    kv: PagedKV,
    newest: Newest,
    text_RN: jax.Array | None,
    rows: Rows,
    sampling: Sampling,
    *,
    spec: ModelSpec,
    backend: str | Backend,
    width: int,
    speculation: Speculation,
    num_logprobs: int = NUM_LOGPROBS,
    draft: Draft | None = None,
    axis: MeshAxes | None,
) -> tuple[PagedKV, Newest, jax.Array | None, Sampled, Drafts]:
    """Generates rows.budget_B tokens, `width` at most, for each row, up to a stop token.

    draft: proposes the tokens. Without one they are looked up in text_RN: the tokens of every row
    of the engine, int32, of which those before `rows.position_B` are looked at; else None. Wrong
    ones make bad proposals, and no other tokens.
    Consumes kv and text_RN. Otherwise as `loop.decode_loop`, whose tokens it returns.
    """
    num_rows, most = rows.token_B.shape[0], speculation.num_tokens
    token_B = newest.fill_in(rows.token_B)
    rows = replace(rows, token_B=token_B, budget_B=jnp.where(token_B == NO_TOKEN, 0, rows.budget_B))
    text_BN = None
    if text_RN is not None:
        text_BN = text_RN.at[newest.row_B].get(mode="fill", fill_value=NO_TOKEN)
    none_B, none_Bk = jnp.zeros(num_rows, jnp.int32), jnp.zeros((num_rows, most), jnp.int32)
    state = _State(
        kv,
        rows,
        _with_new(text_BN, rows.position_B, token_B[:, None], rows.budget_B[:, None] > 0),
        none_Bk,
        none_B,
        empty_sampled(width, num_rows, spec.vocab_size, num_logprobs),
        Drafts(none_B, none_B, none_Bk, none_Bk),
    )
    if draft is not None and draft.hidden_states is not None:
        state = replace(state, fresh=Fresh.newest(kv, token_B, rows.budget_B > 0, most))
    own_B, num_slots = kv.rows[0].slot_B, _num_slots(kv, spec)
    advance = partial(
        _advance,
        slots_BA=None if own_B is None else _slots_ahead(own_B, num_slots, speculation),
        weights=weights,
        sampling=sampling,
        spec=spec,
        backend=backend,
        draft=draft,
        num_logprobs=num_logprobs,
        axis=axis,
    )

    propose = partial(
        _propose,
        weights=weights,
        sampling=sampling,
        speculation=speculation,
        draft=draft,
        axis=axis,
    )

    def is_unfinished(state: _State) -> jax.Array:
        return jnp.any(state.rows.budget_B > 0)

    def turn(state: _State) -> _State:
        state = propose(state)
        is_wide = _is_wide(state)
        state = _once(~is_wide, partial(advance, num_ahead=0), state)
        return _once(is_wide, partial(advance, num_ahead=most), state)

    state = jax.lax.while_loop(is_unfinished, turn, state)
    rows, token_B, kv = state.rows, state.rows.token_B, state.kv
    if draft is not None and state.fresh is not None:
        own, _ = catch_up(
            weights, kv, state.fresh, rows.position_B, rows.budget_B, draft=draft, axis=axis
        )
        kv = kv.with_draft(own)
    if own_B is not None:
        kv = _settled(kv, own_B, num_slots)
    ended_B = is_stop(token_B, sampling) | (token_B == NO_TOKEN)
    if text_RN is not None:
        text_RN = text_RN.at[newest.row_B].set(state.text_BN, mode="drop")
    return kv, newest.after(token_B, ended_B), text_RN, state.out, state.drafts


def _num_slots(kv: PagedKV, spec: ModelSpec) -> int:
    """Counts the slots of recurrent states."""
    if not spec.states:
        return 0
    return kv.states[0][0].shape[0] // len(spec.states[0].layers)


def _slots_ahead(own_B: jax.Array, num_slots: int, speculation: Speculation) -> jax.Array:
    """Returns the slots of the states after each token of a row in a step: its own after the first,
    which counts whatever is proposed, and others after the proposed ones, [B, num_tokens + 1].
    """
    # Rows past these have no tokens.
    row_B = jnp.minimum(jnp.arange(own_B.shape[0]), speculation.most_rows - 1)
    first_B = num_slots - speculation.num_slots + row_B * speculation.num_tokens
    ahead_Bk = first_B[:, None] + jnp.arange(speculation.num_tokens)[None]
    return jnp.concatenate([own_B[:, None], ahead_Bk.astype(jnp.int32)], axis=1)


def _settled(kv: PagedKV, own_B: jax.Array, num_slots: int) -> PagedKV:
    """Copies the rows' recurrent states to their own slots, row by row."""
    slot_B = kv.rows[0].slot_B
    if slot_B is None:
        raise ValueError("expected page tables with the slots of recurrent states, got none")

    def copy(i: jax.Array, kv: PagedKV) -> PagedKV:
        return copy_state(kv, slot_B[i], own_B[i], num_slots=num_slots)

    rows, kv = kv.rows, jax.lax.fori_loop(0, own_B.shape[0], copy, replace(kv, rows=()))
    return replace(kv, rows=tuple(replace(one, slot_B=own_B) for one in rows))


def _propose(
    state: _State,
    *,
    weights: Weights,
    sampling: Sampling,
    speculation: Speculation,
    draft: Draft | None,
    axis: MeshAxes | None,
) -> _State:
    """Proposes what comes next in each row, by a draft model or out of its text."""
    kv, rows, most = state.kv, state.rows, speculation.num_tokens
    now = replace(sampling, min_left_B=jnp.maximum(sampling.min_left_B - state.num_B, 0))
    if draft is not None and state.fresh is not None:
        kv, ahead_Bk = predict_ahead(
            weights,
            kv,
            state.fresh,
            rows.position_B,
            rows.budget_B,
            now,
            state.out.token_B,
            draft=draft,
            num_tokens=most,
            axis=axis,
        )
    elif draft is not None:
        kv, ahead_Bk = draw_ahead(
            weights,
            kv,
            rows.token_B,
            rows.position_B,
            jnp.minimum(rows.budget_B, most + 1),
            now,
            state.out.token_B,
            draft=draft,
            num_tokens=most,
            axis=axis,
        )
    elif state.text_BN is not None:
        ahead_Bk = look_up(
            state.text_BN,
            rows.position_B + 1,
            num_tokens=most,
            longest=speculation.longest,
            shortest=speculation.shortest,
        )
    else:
        raise ValueError("expected a draft model or the rows' text, got neither")
    # With all of them and the token behind them it has its budget, for which there are pages.
    fits_Bk = jnp.arange(most)[None] < rows.budget_B[:, None] - 1
    return replace(state, kv=kv, ahead_Bk=jnp.where(fits_Bk, ahead_Bk, NO_TOKEN))


def _is_wide(state: _State) -> jax.Array:
    """Tells whether a step of the proposed tokens too is worth its price: the loop lasts as long as
    the rows that have most to do, and only proposals for them make it shorter.
    """
    budget_B = state.rows.budget_B
    last_B = (budget_B > 0) & (budget_B == jnp.max(budget_B))
    return 2 * jnp.sum(last_B & (state.ahead_Bk[:, 0] != NO_TOKEN)) > jnp.sum(last_B)


def _once(wanted: jax.Array, step: Callable[[_State], _State], state: _State) -> _State:
    """Runs a step if it is wanted: as a loop, since a `cond` might copy the pool."""

    def run(carry: tuple[jax.Array, _State]) -> tuple[jax.Array, _State]:
        return jnp.zeros_like(wanted), step(carry[1])

    return jax.lax.while_loop(lambda carry: carry[0], run, (wanted, state))[1]


def _advance(
    state: _State,
    *,
    num_ahead: int,
    slots_BA: jax.Array | None,
    weights: Weights,
    sampling: Sampling,
    spec: ModelSpec,
    backend: str | Backend,
    draft: Draft | None,
    num_logprobs: int,
    axis: MeshAxes | None,
) -> _State:
    """Runs one step of each row's newest token and the first `num_ahead` proposed ones. slots_BA:
    of recurrent states after each of them (`_slots_ahead`).
    """
    rows, ahead_Ba = state.rows, state.ahead_Bk[:, :num_ahead]
    live_B, size = rows.budget_B > 0, num_ahead + 1
    count_B = jnp.where(live_B, 1 + jnp.sum(ahead_Ba != NO_TOKEN, axis=1, dtype=jnp.int32), 0)
    batch = packed(
        jnp.concatenate([rows.token_B[:, None], ahead_Ba], axis=1), rows.position_B, count_B
    )
    before = state.kv.of_model
    if slots_BA is not None:
        after_BA = slots_BA[:, :size]
        before = replace(before, rows=tuple(replace(x, after_BA=after_BA) for x in before.rows))
    aux_layers = () if draft is None else draft.aux_layers
    kv, x_TD, _, aux_TX = decoder.forward(
        weights, before, batch, spec=spec, backend=backend, axis=axis, aux_layers=aux_layers
    )
    offset_1A = jnp.arange(size, dtype=jnp.int32)[None]
    index_BA = jnp.minimum(batch.start_B[:, None] + offset_1A, x_TD.shape[0] - 1)
    logits_SV = decoder.logits(weights, x_TD[index_BA.ravel()], spec=spec, axis=axis)
    each, recent_nS = _at_each(sampling, state, ahead_Ba)
    position_BA = rows.position_B[:, None] + 1 + offset_1A
    found = sample(logits_SV, each, position_BA.ravel(), recent_nS, num_logprobs=num_logprobs)

    token_BA = found.token_B.reshape(-1, size)
    ends_BA = is_stop(found.token_B, each).reshape(-1, size)
    # A token counts if all before it are what was proposed, and none of them ends the row.
    goes_on_Ba = (token_BA[:, :-1] == ahead_Ba) & ~ends_BA[:, :-1]
    got_BA = jnp.cumprod(jnp.concatenate([live_B[:, None], goes_on_Ba], axis=1), axis=1) > 0
    num_got_B = jnp.sum(got_BA, axis=1, dtype=jnp.int32)
    last_B1 = jnp.maximum(num_got_B - 1, 0)[:, None]
    token_B = jnp.where(live_B, jnp.take_along_axis(token_BA, last_B1, axis=1)[:, 0], rows.token_B)
    goes_on_B = live_B & ~is_stop(token_B, sampling)
    slot_B = state.kv.rows[0].slot_B
    if slots_BA is not None and slot_B is not None:
        last_slot_B = jnp.take_along_axis(slots_BA, last_B1, axis=1)[:, 0]
        slot_B = jnp.where(live_B, last_slot_B, slot_B)
    whole, fresh = state.kv, None
    if draft is not None and state.fresh is not None:
        hidden_TD = draft.hidden_of(weights, aux_TX, spec)
        whole = with_hidden(whole, batch, hidden_TD, num_got_B)
        num_tokens = state.ahead_Bk.shape[1]
        fresh = Fresh.of(token_BA, num_got_B, hidden_TD[index_BA], num_tokens)
    return _State(
        kv=replace(
            whole.with_model(kv),
            rows=tuple(
                replace(one, len_B=one.len_B + num_got_B, slot_B=slot_B) for one in state.kv.rows
            ),
        ),
        rows=Rows(
            token_B=token_B,
            position_B=rows.position_B + num_got_B,
            budget_B=jnp.where(goes_on_B, rows.budget_B - num_got_B, 0),
        ),
        text_BN=_with_new(state.text_BN, rows.position_B + 1, token_BA, got_BA),
        ahead_Bk=state.ahead_Bk,
        num_B=state.num_B + num_got_B,
        out=_added(state.out, found, state.num_B, got_BA),
        drafts=_counted(state.drafts, live_B, ahead_Ba, got_BA[:, 1:]),
        fresh=fresh,
    )


def _at_each(sampling: Sampling, state: _State, ahead_Ba: jax.Array) -> tuple[Sampling, jax.Array]:
    """Returns the rows' parameters for each of their positions in the step, [B * A], and the tokens
    that came since their histories, with those that are proposed before the position.
    """
    num_ahead = ahead_Ba.shape[1]
    size = num_ahead + 1
    each = jax.tree.map(lambda x_B: jnp.repeat(x_B, size, axis=0), sampling)
    min_left_BA = sampling.min_left_B[:, None] - state.num_B[:, None] - jnp.arange(size)[None]
    each = replace(each, min_left_B=jnp.maximum(min_left_BA, 0).ravel())
    recent_nS = jnp.repeat(state.out.token_B, size, axis=1)
    if num_ahead:
        is_before_1Aa = jnp.tri(size, num_ahead, -1, dtype=bool)[None]
        before_BAa = jnp.where(is_before_1Aa, ahead_Ba[:, None], NO_TOKEN)
        recent_nS = jnp.concatenate([recent_nS, before_BAa.reshape(-1, num_ahead).T])
    return each, recent_nS


def _with_new(
    text_BN: jax.Array | None, position_B: jax.Array, token_BA: jax.Array, got_BA: jax.Array
) -> jax.Array | None:
    """Writes the tokens that count into the text, from a position on; None stays that."""
    if text_BN is None:
        return None
    row_B1 = jnp.arange(text_BN.shape[0])[:, None]
    place_BA = position_B[:, None] + jnp.arange(token_BA.shape[1])[None]
    place_BA = jnp.where(got_BA, place_BA, text_BN.shape[1])
    return text_BN.at[row_B1, place_BA].set(token_BA, mode="drop")


def _added(out: Sampled, found: Sampled, num_B: jax.Array, got_BA: jax.Array) -> Sampled:
    """Returns `out` with what was found at the positions that count, behind each row's first
    `num`.
    """
    num_rows, size = got_BA.shape
    row_B1 = jnp.arange(num_rows)[:, None]
    index_BA = num_B[:, None] + jnp.arange(size)[None]
    index_BA = jnp.where(got_BA, index_BA, out.token_B.shape[0])
    return jax.tree.map(
        lambda all_nB, new_S: all_nB.at[index_BA, row_B1].set(
            new_S.reshape(num_rows, size, *new_S.shape[1:]), mode="drop"
        ),
        out,
        found,
    )


def _counted(
    drafts: Drafts, live_B: jax.Array, ahead_Ba: jax.Array, accepted_Ba: jax.Array
) -> Drafts:
    if not ahead_Ba.shape[1]:
        return replace(drafts, plain_B=drafts.plain_B + live_B)
    return replace(
        drafts,
        wide_B=drafts.wide_B + live_B,
        drafted_Bk=drafts.drafted_Bk + (ahead_Ba != NO_TOKEN),
        accepted_Bk=drafts.accepted_Bk + accepted_Ba,
    )


@partial(jax.jit, donate_argnames=("text_RN",))
def write_text(text_RN: jax.Array, row: jax.Array, token_N: jax.Array) -> jax.Array:
    """Returns the rows' text with these tokens as that of one row. Consumes text_RN."""
    return jax.lax.dynamic_update_slice_in_dim(text_RN, token_N[None], row, 0)
