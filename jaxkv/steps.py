"""The device interface: one jitted function per kind of step, each a pure function of (weights, state, inputs)."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jaxkv.kv import state
from jaxkv.kv.state import PagedKV
from jaxkv.models import decoder
from jaxkv.models.decoder import Weights
from jaxkv.models.spec import ModelSpec
from jaxkv.ops.attention import Batch
from jaxkv.ops.sampling import Sampled, Sampling, sample


def last_logits(
    weights: Weights, kv: PagedKV, batch: Batch, *, spec: ModelSpec, backend: str
) -> tuple[PagedKV, jax.Array]:
    """(new state, logits [B, V] float32 at the last token of each row)."""
    kv, x_TD = decoder.forward(weights, kv, batch, spec=spec, backend=backend)
    return kv, decoder.logits(weights, x_TD[last_token(batch)], spec=spec)


def last_token(batch: Batch) -> jax.Array:
    """Packed index of each row's last token in the step, [B] int32 (0 for a row without tokens)."""
    return jnp.maximum(batch.start_B + batch.count_B - 1, 0)


@partial(jax.jit, static_argnames=("spec", "backend"), donate_argnames=("kv",))
def step(
    weights: Weights, kv: PagedKV, batch: Batch, sampling: Sampling, *, spec: ModelSpec, backend: str
) -> tuple[PagedKV, Sampled]:
    """One ragged step: prefill chunks and decode tokens together, one sampled token per row.

    Consumes `kv` (donated). Compiled once per number of packed tokens T and of rows B.
    """
    kv, logits_BV = last_logits(weights, kv, batch, spec=spec, backend=backend)
    position_B = batch.position_T[last_token(batch)] + 1
    return kv, sample(logits_BV, sampling, position_B)


@partial(jax.jit, donate_argnames=("kv",))
def copy_pages(kv: PagedKV, source_C: jax.Array, target_C: jax.Array) -> PagedKV:
    """Jitted `kv.state.copy_pages`; consumes `kv`."""
    return state.copy_pages(kv, source_C, target_C)
