"""Runs a draft model: a smaller one, which has its keys and values beside the model's in every page
and proposes the tokens that the model is to verify (`programs.speculation`).

Whatever the model stores, the draft model has stored when the program ends, at the same place. So
pages that are shared, forked, moved to a host or found again are complete for both, and what is
taken back of one is taken back of the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxkv.kv.state import PagedKV
from jaxkv.models import decoder
from jaxkv.models.spec import ModelSpec
from jaxkv.ops.attention import Backend, Batch
from jaxkv.ops.sampling import NO_TOKEN, Sampling, sample
from jaxkv.weights.tree import Weights, draft_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """Says of a draft model what programs have as `spec` and `backend` of the model."""

    spec: ModelSpec
    backend: str | Backend


def follow(
    weights: Weights, kv: PagedKV, batch: Batch, draft: Draft | None, *, axis: str | None
) -> PagedKV:
    """Has the draft model store its keys and values of a step's tokens; the same state without one.

    kv: with the rows as they are before the step, which they are in what it returns too.
    """
    if draft is None:
        return kv
    own, _, _ = decoder.forward(
        draft_of(weights),
        kv.of_draft,
        batch,
        spec=draft.spec,
        backend=draft.backend,
        axis=axis,
    )
    return kv.with_draft(own)


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
    axis: str | None,
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
    quiet = replace(sampling, logprobs_B=jnp.zeros_like(sampling.logprobs_B))

    def draw(carry: tuple) -> tuple:
        i, own, token_B, ahead_Bk = carry
        live_B = (i < count_B).astype(jnp.int32)
        batch = packed(token_B[:, None], position_B + i, live_B)
        own, x_BD, _ = decoder.forward(
            draft_of(weights), own, batch, spec=draft.spec, backend=draft.backend, axis=axis
        )
        logits_BV = decoder.logits(draft_of(weights), x_BD, spec=draft.spec, axis=axis)
        now = replace(quiet, min_left_B=jnp.maximum(sampling.min_left_B - i, 0))
        recent = jnp.concatenate([recent_nB, ahead_Bk.T])
        found = sample(logits_BV, now, position_B + 1 + i, recent, num_logprobs=1)
        return i + 1, own, found.token_B, ahead_Bk.at[:, i].set(found.token_B, mode="drop")

    none_Bk = jnp.full((num_rows, num_tokens), NO_TOKEN, jnp.int32)
    carry = (jnp.int32(0), kv.of_draft, token_B, none_Bk)
    _, own, _, ahead_Bk = jax.lax.while_loop(lambda x: x[0] < jnp.max(count_B), draw, carry)
    return kv.with_draft(own), ahead_Bk


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
