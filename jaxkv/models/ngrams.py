"""Adds to a token's streams what its n-grams say: rows of tables that it and the tokens before it
are hashed to. Each stream gates it, and a convolution adds that of tokens before. Source:
transformers' qwen4_exp.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.axes import Array, MeshAxes
from jaxkv.models.hyper import by_token, normed_by_stream
from jaxkv.models.recurrent import Ngrams
from jaxkv.models.spec import ModelSpec
from jaxkv.ops.layers import linear, total
from jaxkv.ops.ngrams import table_rows
from jaxkv.ops.recurrent import Rows, short_conv
from jaxkv.weights.tree import Weights

LEAST = 1e-6
"""The least number whose square root gates."""


def with_ngrams(
    x_NTD: Array,
    w: Weights,
    keeper: Ngrams,
    states: tuple[Array, ...],
    rows: Rows,
    spec: ModelSpec,
    axis: MeshAxes | None,
) -> tuple[Array, tuple[Array, ...]]:
    """Returns the streams with what n-grams say of their tokens, and the states after these. axis:
    the mesh axis over which the numbers of a table's rows are divided.
    """
    tokens, inputs = states
    token_TN, tokens = _with_earlier(jnp.asarray(rows.batch.token_T), keeper, tokens, rows)
    row_TM = table_rows(token_TN, keeper.multipliers, keeper.table_sizes)
    found_TMX = w["ngram_rows"].rows_at(row_TM)
    if axis is not None:
        found_TMX = jax.lax.all_gather(found_TMX, axis, axis=2, tiled=True)
    found_TE = found_TMX.reshape(len(row_TM), -1)
    x_TND = by_token(x_NTD)
    key_TND = linear(found_TE, w["ngram_key"]).reshape(x_TND.shape)
    key_TND = normed_by_stream(key_TND, w, "ngram_key_norm", spec)
    query_TND = normed_by_stream(x_TND, w, "ngram_query_norm", spec)
    met_TN = total(key_TND * query_TND) * x_TND.shape[2] ** -0.5
    gate_TN = jnp.sqrt(jnp.maximum(jnp.abs(met_TN), LEAST)) * jnp.sign(met_TN)
    said_TND = jax.nn.sigmoid(gate_TN)[..., None] * linear(found_TE, w["ngram_value"])[:, None]
    input_TND = normed_by_stream(said_TND, w, "ngram_conv_norm", spec)
    kernel_FK = w["ngram_conv"].reshape(-1, keeper.kernel)
    of_tokens = input_TND.reshape(len(input_TND), -1), kernel_FK, inputs, rows
    conv_TF, inputs = short_conv(*of_tokens, dilation=keeper.size)
    said_TND += jax.nn.silu(conv_TF).reshape(said_TND.shape)
    # As in `decoder.forward`: nothing is multiplied with rows of zeros.
    said_TND = jnp.where(rows.batch.is_row_T[:, None, None], said_TND, 0)
    return x_NTD + said_TND.transpose(1, 0, 2), (tokens, inputs)


def _with_earlier(token_T: Array, keeper: Ngrams, pool: Array, rows: Rows) -> tuple[Array, Array]:
    """Returns tokens and those before them, the last first, [T, N], and the states with the last
    ones. Tokens of another text, or before the first, are ends of a text.

    They are convolved, one channel for each place: float32 holds ids below 2**24, and what is
    before the first token is 0, so ids are kept plus one.
    """
    earlier = keeper.size - 1
    kernel_NK = np.zeros((earlier, keeper.size), np.float32)
    kernel_NK[np.arange(earlier), np.arange(earlier)[::-1]] = 1
    kept_TN = jnp.broadcast_to((token_T + 1)[:, None], (len(token_T), earlier))
    before_TN, pool = short_conv(kept_TN, jnp.asarray(kernel_NK), pool, rows)
    found, before_TN = [token_T], before_TN.astype(jnp.int32) - 1
    is_over_T = jnp.zeros(token_T.shape, bool)
    for i in range(earlier):
        one_T = jnp.where(is_over_T | (before_TN[:, i] < 0), keeper.end, before_TN[:, i])
        found.append(one_T)
        is_over_T = one_T == keeper.end
    return jnp.stack(found, axis=1), pool
