"""Runs a layer that predicts later tokens out of the model's hidden states (multi-token
prediction).

M [norm(embedding of a token); norm(hidden state of the one before it)] goes through a block like
the model's, whose keys and values are the layer's own, and behind a norm of its own through the
model's head. Source: arXiv 2412.19437, section 2.2.

In EAGLE-3 what it takes of the token before is one product of several of the model's streams. That
comes into the block, whose attention takes the embedding beside it; a head of its own may be for
the most frequent tokens only. Sources: arXiv 2503.01840, section 3; vLLM's Eagle3LlamaForCausalLM.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxkv.axes import MeshAxes
from jaxkv.kv.state import PagedKV
from jaxkv.models import decoder
from jaxkv.models.spec import HiddenStates, ModelSpec
from jaxkv.models.stream import normed
from jaxkv.ops.attention import Attention, Batch
from jaxkv.ops.layers import linear
from jaxkv.ops.matrices import Matrix
from jaxkv.weights.tree import HEAD, Weights, draft_of

AUX_JOIN, AUX_NORM, EACH_NORM = "aux_join", "aux_norm", "aux_norm_{}"
"""Leaves that make one hidden state of several streams side by side: a matrix [D, S * D], and
before it a norm over all of them or one of each.
"""


def with_shared(own: Weights, weights: Weights) -> Weights:
    """Returns the layer's tree (`families.predictor`) with the embeddings and the head of the
    model's weights, where it has none of its own.
    """
    found = {**own, "embed": own.get("own_tokens", weights["embed"])}
    if "own_head" in own:
        return {**found, HEAD: own["own_head"]}
    head = {name: leaf for name, leaf in decoder.head_of(weights).items() if name != "norm"}
    if HEAD not in head:  # the embeddings are it, which the layer may have others of
        head[HEAD] = head["embed"]
    return head | found


def hidden_of(
    weights: Weights,
    aux_TX: jax.Array,
    hidden_states: HiddenStates,
    *,
    spec: ModelSpec,
    own: ModelSpec,
) -> jax.Array:
    """Makes the hidden states that the layer takes, [T, D] float32, of what it takes of its model
    (`decoder.forward`). weights: of both. spec, own: the model's and the layer's.
    """
    if not hidden_states.layers:
        return normed(aux_TX, weights, "norm", spec)
    draft = draft_of(weights)
    aux_TX = normed(aux_TX, draft, AUX_NORM, own)
    parts = jnp.split(aux_TX, len(hidden_states.layers), axis=1)
    each = [normed(x_TD, draft, EACH_NORM.format(i), own) for i, x_TD in enumerate(parts)]
    return linear(jnp.concatenate(each, axis=1), Matrix(draft[AUX_JOIN]))


def chained(
    weights: Weights, x_TD: jax.Array, hidden_states: HiddenStates, *, spec: ModelSpec
) -> jax.Array:
    """Returns what stands in place of `hidden_of` for tokens that the layer has drawn, of what
    `predict` has made. weights: as `with_shared` returns them.
    """
    return normed(x_TD, weights, "norm", spec) if hidden_states.chains_normed else x_TD


def predict(
    weights: Weights,
    kv: PagedKV,
    batch: Batch,
    hidden_TD: jax.Array,
    *,
    spec: ModelSpec,
    backend: str | Attention,
    axis: MeshAxes | None = None,
) -> tuple[PagedKV, jax.Array]:
    """Runs the packed tokens through the layer and stores its keys and values.

    weights: as `with_shared` returns them. hidden_TD: float32, of the token before each, as
    `hidden_of` makes them; or `chained`, where this layer has drawn the token.
    Returns the new state and what `decoder.logits` makes logits of the token after it from, [T, D]
    float32.
    """
    x_TD = normed(hidden_TD, weights, "hidden_norm", spec)
    token_TD = decoder.embed(weights, batch.token_T, spec=spec, axis=axis)
    # Layers are trained without an entry of the first token, before which there is none. Its keys
    # and values are zeros (but for biases), which later tokens attend to the least.
    is_first_T = jnp.asarray(batch.position_T) == 0
    token_TD = jnp.where(is_first_T[:, None], 0, token_TD)
    if "join" in weights:
        joined = [normed(token_TD, weights, "token_norm", spec), x_TD]
        x_TD = linear(jnp.concatenate(joined, axis=1), Matrix(weights["join"]))
    ran = decoder.forward(
        *(weights, kv, batch),
        spec=spec,
        backend=backend,
        axis=axis,
        embedded_TD=token_TD,
        stream_TD=x_TD,
    )
    return ran.kv, ran.x_TD
