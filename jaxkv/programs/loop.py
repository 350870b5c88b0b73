"""The on-device decode loop: up to n tokens per row without the host in between."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from jaxkv.axes import MeshAxes
from jaxkv.kv.state import PagedKV, Statistics
from jaxkv.models import decoder
from jaxkv.models.spec import ModelSpec
from jaxkv.ops.attention import Backend
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
from jaxkv.programs.draft import Draft, follow, packed
from jaxkv.programs.step import Newest
from jaxkv.pytree import pytree
from jaxkv.weights.tree import Weights


@pytree
class Rows:
    """Describes rows that decode: token_B (sampled, not yet stored), its position_B, and budget_B,
    the tokens still allowed.

    All int32. token_B is NO_TOKEN where only `Newest` has it. A row with budget 0, or that has
    ended, rests: it stores nothing and samples nothing. The pages for `budget` more tokens are the
    host's promise, so the loop cannot run out of memory half way.
    """

    token_B: jax.Array
    position_B: jax.Array
    budget_B: jax.Array


STATIC = ("spec", "backend", "width", "num_logprobs", "draft", "placement")


@partial(jax.jit, static_argnames=STATIC, donate_argnames=("kv", "rows"))
@on_every_device
def decode_loop(
    weights: Weights,
    kv: PagedKV,
    newest: Newest,
    rows: Rows,
    sampling: Sampling,
    n: jax.Array,
    *,
    spec: ModelSpec,
    backend: str | Backend,
    width: int,
    num_logprobs: int = NUM_LOGPROBS,
    draft: Draft | None = None,
    axis: MeshAxes | None,
) -> tuple[PagedKV, Newest, Rows, Sampled, Statistics | None]:
    """Generates up to n tokens for each row, ending early when every row has met a stop token or
    its budget.

    n is traced (n <= width); `out` arrays are [width, B, ...] with NO_TOKEN where a row rested.
    Consumes kv and rows. Equals n calls of `step` with one token per row; last what rows
    have observed. `draft` and `placement` as there.
    """
    num_rows, aux_layers = rows.token_B.shape[0], () if draft is None else draft.aux_layers
    token_B = newest.fill_in(rows.token_B)
    rows = replace(rows, token_B=token_B, budget_B=jnp.where(token_B == NO_TOKEN, 0, rows.budget_B))
    whole, first = kv, rows
    forward = partial(decoder.forward, spec=spec, backend=backend, axis=axis, aux_layers=aux_layers)

    def advance(carry: tuple) -> tuple:
        i, kv, rows, min_left_B, out, statistics, aux_nBX = carry
        live_B = rows.budget_B > 0
        batch = packed(rows.token_B[:, None], rows.position_B, live_B.astype(jnp.int32))
        kv, x_TD, statistics, aux_TX = forward(weights, kv, batch, statistics)
        if aux_nBX is not None:
            aux_nBX = jax.lax.dynamic_update_index_in_dim(aux_nBX, aux_TX, i, 0)
        logits_BV = decoder.logits(weights, x_TD, spec=spec, axis=axis)
        now = replace(sampling, min_left_B=min_left_B)
        sampled = sample(
            logits_BV, now, rows.position_B + 1, out.token_B, num_logprobs=num_logprobs
        )
        out = jax.tree.map(
            lambda all_nB, one_B: jax.lax.dynamic_update_index_in_dim(all_nB, one_B, i, 0),
            out,
            replace(sampled, token_B=jnp.where(live_B, sampled.token_B, NO_TOKEN)),
        )
        budget_B = jnp.where(live_B & ~is_stop(sampled.token_B, now), rows.budget_B - 1, 0)
        rows = replace(
            rows,
            token_B=jnp.where(live_B, sampled.token_B, rows.token_B),
            position_B=rows.position_B + live_B,
            budget_B=budget_B,
        )
        return i + 1, kv, rows, jnp.maximum(min_left_B - 1, 0), out, statistics, aux_nBX

    def unfinished(carry: tuple) -> jax.Array:
        return (carry[0] < n) & jnp.any(carry[2].budget_B > 0)

    out = empty_sampled(width, num_rows, spec.vocab_size, num_logprobs)
    aux_nBX = None
    if draft is not None and draft.hidden_states is not None:
        size = max(1, len(aux_layers)) * spec.hidden_size
        aux_nBX = jnp.zeros((width, num_rows, size), jnp.float32)
    statistics = Statistics.nothing(kv.rows[0])
    carry = (0, kv.of_model, rows, sampling.min_left_B, out, statistics, aux_nBX)
    _, kv, rows, _, out, statistics, aux_nBX = jax.lax.while_loop(unfinished, advance, carry)
    if draft is not None:
        # All of the loop's tokens at once: its weights are read once for them.
        stored_BA = jnp.concatenate([first.token_B[:, None], out.token_B.T[:, :-1]], axis=1)
        count_B = jnp.sum(out.token_B != NO_TOKEN, axis=0, dtype=jnp.int32)
        batch = packed(stored_BA, first.position_B, count_B)
        aux_TX = None
        if aux_nBX is not None:
            row_T = jnp.minimum(batch.row_T, num_rows - 1)
            offset_T = batch.position_T - first.position_B[row_T]
            aux_TX = aux_nBX.at[offset_T, row_T].get(mode="clip")
        whole = follow(weights, whole, batch, aux_TX, draft, spec=spec, axis=axis)
    kv = whole.with_model(kv)
    ended_B = is_stop(rows.token_B, sampling) | (rows.token_B == NO_TOKEN)
    return kv, newest.after(rows.token_B, ended_B), rows, out, statistics
