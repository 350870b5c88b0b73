"""Programs behind a step, which take its hidden states: one draws the next tokens, one scores the
prompt's.

They have the final norm and the head of the weights only (`decoder.head_of`).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jaxkv.axes import MeshAxes
from jaxkv.models import decoder
from jaxkv.models.spec import ModelSpec
from jaxkv.ops.sampling import (
    NUM_LOGPROBS,
    Sampled,
    Sampling,
    Scores,
    empty_scores,
    is_stop,
    sample,
    score,
)
from jaxkv.placement import on_every_device
from jaxkv.programs.step import Last, Newest
from jaxkv.weights.tree import Weights

SCORED_TOKENS = 64
"""Prompt tokens whose logits exist at once when prompt logprobs are wanted."""

STATIC = ("spec", "num_logprobs", "placement")


@partial(jax.jit, static_argnames=STATIC)
@on_every_device
def draw(
    weights: Weights,
    last: Last,
    newest: Newest,
    sampling: Sampling,
    *,
    spec: ModelSpec,
    num_logprobs: int = NUM_LOGPROBS,
    axis: MeshAxes | None,
) -> tuple[Newest, Sampled]:
    """Draws the token that follows the last one of each of the step's first rows, of which there
    are as many as `sampling` has.

    Compiled once per number of rows B, whatever the step's tokens.
    """
    last = last.first(len(sampling.temperature_B))
    logits_BV = decoder.logits(weights, last.hidden_RD, spec=spec, axis=axis)
    sampled = sample(logits_BV, sampling, last.position_R, num_logprobs=num_logprobs)
    ended_B = is_stop(sampled.token_B, sampling) | last.ended_R
    return newest.after(sampled.token_B, ended_B), sampled


@partial(jax.jit, static_argnames=STATIC)
@on_every_device
def prompt_scores(
    weights: Weights,
    x_TD: jax.Array,
    target_T: jax.Array,
    *,
    spec: ModelSpec,
    num_logprobs: int = NUM_LOGPROBS,
    axis: MeshAxes | None,
) -> Scores:
    """Computes `score` of the next token of each packed one, where it is wanted (target_T >= 0),
    else anything.

    Goes over pieces from the first to the last wanted token: the logits of all tokens never exist
    together.
    """
    num_tokens = x_TD.shape[0]
    scores = empty_scores((num_tokens,), spec.vocab_size, num_logprobs)
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
