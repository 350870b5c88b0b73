"""Scores that queries give the distance to a key, whatever the key is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Distances(NamedTuple):
    """Adds to the score of a query and a key d tokens before it what the query's head gives that
    distance: sum over r of weight[.., r] * profile[r, d], and nothing from `profile.shape[1]` on.

    weight_TNR: of each token's heads, float32. profile_RE: float32. sink_TN: the score that each
    of them gives one more key, whose value is 0, wherever it is; None for no such key. Sources:
    Inkling, and for the last Inkling 2, as transformers has them.
    """

    weight_TNR: jax.Array
    profile_RE: jax.Array
    sink_TN: jax.Array | None = None

    def with_tokens(self, change: Callable[[jax.Array], jax.Array]) -> Distances:
        """Returns it for other tokens, which `change` makes of arrays [T, ..]."""
        sink_TN = None if self.sink_TN is None else change(self.sink_TN)
        return self._replace(weight_TNR=change(self.weight_TNR), sink_TN=sink_TN)

    def scores(self, distance_RTKJ: jax.Array, num_kv_heads: int) -> jax.Array:
        """Returns what the heads of R rows with T / R tokens each give these distances, of keys of
        each KV head or of all alike: [R, num_kv_heads, T / R * G, J], the G heads of a KV head side
        by side. What is not seen gets any number.
        """
        num_rows, each, own, num_keys = distance_RTKJ.shape
        shape = (num_rows, each, num_kv_heads, -1, self.weight_TNR.shape[2])
        weight_RTKGX = self.weight_TNR.reshape(shape)
        # A row of zeros stands for all that is farther.
        table_EX = jnp.pad(self.profile_RE.T, ((0, 1), (0, 0)))
        of_key_RTKJX = table_EX[jnp.clip(distance_RTKJ, 0, self.profile_RE.shape[1])]
        whole = (num_rows, each, num_kv_heads, num_keys, shape[-1])
        of_key_RTKJX = jnp.broadcast_to(of_key_RTKJX, whole) if own == 1 else of_key_RTKJX
        score_RTKGJ = jnp.einsum(
            "rtkgx,rtkjx->rtkgj", weight_RTKGX, of_key_RTKJX, precision=jax.lax.Precision.HIGHEST
        )
        return score_RTKGJ.swapaxes(1, 2).reshape(num_rows, num_kv_heads, -1, num_keys)

    def sinks(self, like: tuple[int, ...]) -> jax.Array | None:
        """Returns the scores of that one more key, in an array of queries like [R, K, M], whose
        last ones may be padding.
        """
        if self.sink_TN is None:
            return None
        (num_rows, num_kv_heads, num_queries), num_heads = like, self.sink_TN.shape[1]
        shape = (num_rows, -1, num_kv_heads, num_heads // num_kv_heads)
        score_RTKG = self.sink_TN.reshape(shape)
        score_RKM = score_RTKG.swapaxes(1, 2).reshape(num_rows, num_kv_heads, -1)
        missing = num_queries - score_RKM.shape[2]
        return jnp.pad(score_RKM, ((0, 0), (0, 0), (0, missing)))
