"""The device interface: one jitted function per kind of step, each a pure function of (weights,
state, inputs).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from jaxkv.kv.state import PagedKV, Statistics
from jaxkv.models import decoder
from jaxkv.models.spec import ModelSpec
from jaxkv.ops.attention import Backend, Batch
from jaxkv.ops.sampling import (
    NO_TOKEN,
    NUM_LOGPROBS,
    Sampled,
    Sampling,
    Scores,
    empty_scores,
    is_stop,
    sample,
    score,
)
from jaxkv.placement import Placement, on_every_device
from jaxkv.weights.tree import Weights

SCORED_TOKENS = 64
"""Prompt tokens whose logits exist at once when prompt logprobs are wanted."""


def last_logits(
    weights: Weights,
    kv: PagedKV,
    batch: Batch,
    *,
    spec: ModelSpec,
    backend: str | Backend,
    axis: str | None = None,
) -> tuple[PagedKV, jax.Array]:
    """Returns (new state, logits [B, V] float32 at the last token of each row)."""
    kv, x_TD, _ = decoder.forward(weights, kv, batch, spec=spec, backend=backend, axis=axis)
    return kv, decoder.logits(weights, x_TD[last_token(batch)], spec=spec, axis=axis)


@partial(jax.jit, static_argnames=("spec", "backend", "placement"), donate_argnames=("kv",))
def logits_step(
    weights: Weights,
    kv: PagedKV,
    batch: Batch,
    *,
    spec: ModelSpec,
    backend: str,
    placement: Placement | None = None,
) -> tuple[PagedKV, jax.Array]:
    """Runs a ragged step and returns the logits of each row's last token, [B, V] float32, instead
    of sampling from them. Consumes `kv`; otherwise as `step`.
    """
    body = partial(last_logits, spec=spec, backend=backend)
    return on_every_device(body, placement, num_outputs=2)(weights, kv, batch)


def last_token(batch: Batch) -> jax.Array:
    """Returns the packed index of each row's last token in the step, [B] int32 (0 for a row without
    tokens).
    """
    return jnp.maximum(batch.start_B + batch.count_B - 1, 0)


def prompt_scores(
    weights: Weights,
    x_TD: jax.Array,
    target_T: jax.Array | None,
    *,
    spec: ModelSpec,
    num_logprobs: int,
    axis: str | None = None,
) -> Scores:
    """Computes `score` of the next token of each packed one, where it is wanted (target_T >= 0),
    else anything.

    Goes over pieces from the first to the last wanted token: with none wanted there is nothing to
    do, and the logits of all tokens never exist together.
    """
    num_tokens = x_TD.shape[0]
    scores = empty_scores((num_tokens,), spec.vocab_size, num_logprobs)
    if target_T is None:
        return scores
    size = min(SCORED_TOKENS, num_tokens)
    index_T = jnp.arange(num_tokens, dtype=jnp.int32)
    first = jnp.min(jnp.where(target_T >= 0, index_T, num_tokens))
    end = jnp.max(jnp.where(target_T >= 0, index_T + 1, 0))

    def score_piece(piece: jax.Array, scores: Scores) -> Scores:
        # The last piece begins earlier rather than end past the end; what overlaps is the same
        # again.
        start = jnp.minimum(first + piece * size, num_tokens - size)
        x_CD, target_C = (jax.lax.dynamic_slice_in_dim(x, start, size) for x in (x_TD, target_T))
        logits_CV = decoder.logits(weights, x_CD, spec=spec, axis=axis)
        found = score(logits_CV, jnp.maximum(target_C, 0), num_logprobs=num_logprobs)
        return jax.tree.map(
            lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, start, 0), scores, found
        )

    return jax.lax.fori_loop(0, (end - first + size - 1) // size, score_piece, scores)


@struct.dataclass
class Newest:
    """Holds what every row of the engine sampled last, which the next step begins with before the
    host has seen it.

    token_R  int32, NO_TOKEN where it ended the row.
    row_B    int32: which of them each row of this step is, past the last one for padding.
    """

    token_R: jax.Array
    row_B: jax.Array

    def fill_in(self, token_B: jax.Array) -> jax.Array:
        """Returns token_B with the newest token where it is NO_TOKEN, which stays where the row has
        ended.
        """
        newest_B = self.token_R.at[self.row_B].get(mode="fill", fill_value=NO_TOKEN)
        return jnp.where(token_B == NO_TOKEN, newest_B, token_B)

    def after(self, token_B: jax.Array, ended_B: jax.Array) -> Newest:
        """Returns what every row sampled last once these have sampled."""
        token_R = self.token_R.at[self.row_B].set(
            jnp.where(ended_B, NO_TOKEN, token_B), mode="drop"
        )
        return replace(self, token_R=token_R)


@partial(
    jax.jit,
    static_argnames=("spec", "backend", "num_logprobs", "placement"),
    donate_argnames=("kv",),
)
def step(
    weights: Weights,
    kv: PagedKV,
    newest: Newest,
    batch: Batch,
    sampling: Sampling,
    *,
    spec: ModelSpec,
    backend: str | Backend,
    num_logprobs: int = NUM_LOGPROBS,
    placement: Placement | None = None,
) -> tuple[PagedKV, Newest, Sampled, Scores, Statistics | None]:
    """Runs one ragged step: prefill chunks and decode tokens together, one sampled token per row,
    and the prompt tokens' own scores where batch.target_T asks for them; last what rows have
    observed.

    NO_TOKEN in batch.token_T is the row's newest token, its only one in this step; what a row that
    has ended by then samples means nothing.
    Consumes `kv` (donated). Compiled once per number of packed tokens T and of rows B. With a
    `placement` on several devices each has its parts of weights and pages.
    """
    body = partial(_step, spec=spec, backend=backend, num_logprobs=num_logprobs)
    return on_every_device(body, placement, num_outputs=5)(weights, kv, newest, batch, sampling)


def _step(
    weights: Weights,
    kv: PagedKV,
    newest: Newest,
    batch: Batch,
    sampling: Sampling,
    *,
    spec: ModelSpec,
    backend: str | Backend,
    num_logprobs: int,
    axis: str | None,
) -> tuple[PagedKV, Newest, Sampled, Scores, Statistics | None]:
    # Only a row of one token has its newest one to come.
    first_B = newest.fill_in(batch.token_T[batch.start_B])
    newest_T = first_B.at[batch.row_T].get(mode="fill", fill_value=0)
    token_T = jnp.where(batch.token_T == NO_TOKEN, newest_T, batch.token_T)
    batch = replace(batch, token_T=jnp.maximum(token_T, 0))
    kv, x_TD, statistics = decoder.forward(
        weights,
        kv,
        batch,
        Statistics.nothing(kv.rows[0]),
        spec=spec,
        backend=backend,
        axis=axis,
    )
    last_B = last_token(batch)
    logits_BV = decoder.logits(weights, x_TD[last_B], spec=spec, axis=axis)
    sampled = sample(logits_BV, sampling, batch.position_T[last_B] + 1, num_logprobs=num_logprobs)
    scores = prompt_scores(
        weights, x_TD, batch.target_T, spec=spec, num_logprobs=num_logprobs, axis=axis
    )
    ended_B = is_stop(sampled.token_B, sampling) | (first_B == NO_TOKEN)
    return kv, newest.after(sampled.token_B, ended_B), sampled, scores, statistics
