"""The device interface: one jitted function per kind of step, each a pure function of (weights,
state, inputs).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from jaxkv.axes import MeshAxes
from jaxkv.kv.state import PagedKV, Statistics
from jaxkv.models import decoder
from jaxkv.models.spec import ModelSpec
from jaxkv.ops.attention import Backend, Batch
from jaxkv.ops.sampling import NO_TOKEN
from jaxkv.placement import on_every_device
from jaxkv.programs.draft import Draft, follow
from jaxkv.pytree import pytree
from jaxkv.weights.tree import Weights


@partial(jax.jit, static_argnames=("spec", "backend", "placement"), donate_argnames=("kv",))
@on_every_device
def logits_step(
    weights: Weights,
    kv: PagedKV,
    batch: Batch,
    *,
    spec: ModelSpec,
    backend: str,
    axis: MeshAxes | None,
) -> tuple[PagedKV, jax.Array]:
    """Runs a ragged step and returns the logits of each row's last token, [B, V] float32, instead
    of sampling from them. Consumes `kv`; otherwise as `step`.
    """
    kv, x_TD, *_ = decoder.forward(weights, kv, batch, spec=spec, backend=backend, axis=axis)
    return kv, decoder.logits(weights, x_TD[last_token(batch)], spec=spec, axis=axis)


def last_token(batch: Batch) -> jax.Array:
    """Returns the packed index of each row's last token in the step, [B] int32 (0 for a row without
    tokens).
    """
    return jnp.maximum(batch.start_B + batch.count_B - 1, 0)


@pytree
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


@pytree
class Last:
    """Holds what a step knows of the last token of each row, from which `programs.draw.draw` draws
    the next one.

    hidden_RD   float32, before the final norm.
    position_R  int32: where the next token goes.
    ended_R     bool: the row had ended before the step, and what is drawn for it means nothing.

    As many as the engine has rows, at least two: zeros behind those of the step.
    """

    hidden_RD: jax.Array
    position_R: jax.Array
    ended_R: jax.Array

    def first(self, count: int) -> Last:
        """Returns the first `count` rows."""
        return jax.tree.map(lambda x: x[:count], self)


@partial(
    jax.jit, static_argnames=("spec", "backend", "draft", "placement"), donate_argnames=("kv",)
)
@on_every_device
def step(
    weights: Weights,
    kv: PagedKV,
    newest: Newest,
    batch: Batch,
    *,
    spec: ModelSpec,
    backend: str | Backend,
    draft: Draft | None = None,
    axis: MeshAxes | None,
) -> tuple[PagedKV, Last, jax.Array, Statistics | None]:
    """Runs one ragged step, prefill chunks and decode tokens together, through the layers. What
    follows from its hidden states are programs of their own (`programs.draw`): the next token of
    each row from `Last`, prompt scores from those of all tokens, [T, D] float32. Last what rows
    have observed.

    NO_TOKEN in batch.token_T is the row's newest token, its only one in this step.
    Consumes `kv` (donated). Compiled once per number of packed tokens T and of rows B. With a
    `placement` on several devices each has its parts of weights and pages. `draft`: a model that
    stores its own keys and values of the tokens too.
    """
    # Only a row of one token has its newest one to come.
    first_B = newest.fill_in(batch.token_T[batch.start_B])
    newest_T = first_B.at[batch.row_T].get(mode="fill", fill_value=0)
    token_T = jnp.where(batch.token_T == NO_TOKEN, newest_T, batch.token_T)
    batch = replace(batch, token_T=jnp.maximum(token_T, 0))
    whole = kv
    kv, x_TD, statistics, aux_TX = decoder.forward(
        weights,
        whole.of_model,
        batch,
        Statistics.nothing(kv.rows[0]),
        spec=spec,
        backend=backend,
        axis=axis,
        aux_layers=() if draft is None else draft.aux_layers,
    )
    whole = follow(weights, whole, batch, aux_TX, draft, spec=spec, axis=axis)
    last_B = last_token(batch)
    # Zeros for a row that is not in the step, which cost no matmul on a CPU.
    hidden_BD = jnp.where(batch.count_B[:, None] > 0, x_TD[last_B], 0)
    of_B = Last(hidden_BD, batch.position_T[last_B] + 1, first_B == NO_TOKEN)
    behind = max(2, len(newest.token_R)) - len(last_B)
    last = jax.tree.map(lambda x: jnp.pad(x, [(0, behind)] + [(0, 0)] * (x.ndim - 1)), of_B)
    return whole.with_model(kv), last, x_TD, statistics
