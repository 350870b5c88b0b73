"""Attends with queries of experts: each that a token has chosen makes a query head for every KV
head, and has an output matrix of its own. Source: Mixture of Attention Heads, arXiv 2210.05144;
JetMoE, arXiv 2404.07413, section 2.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.ops.experts import Router, each_expert, run_experts
from jaxkv.ops.layers import linear, linear_float32
from jaxkv.ops.matrices import Chosen

ROUTER, QUERIES, OUTPUT = "attn_router", "expert_q", "expert_o"


def with_chosen(
    h_TD: jax.Array, w: Mapping[str, Any], router: Router, is_real_T: jax.Array, head_dim: int
) -> dict[str, Any]:
    """Returns the layer's weights with those that make queries of these tokens, and what joins the
    stream of what they find. The query heads of a KV head are those of its expert one, expert two,
    and so on.
    """
    num_experts, num_used = w[ROUTER].num_rows, router.num_used
    expert_TC, weight_TC = router(linear_float32(h_TD, w[ROUTER]))
    expert_TC = jnp.where(is_real_T[:, None], expert_TC, num_experts)

    def run(name: str, x_RD: jax.Array, expert: jax.Array) -> jax.Array:
        return linear(x_RD, w[name].of_expert(expert))

    def queries(x_TD: jax.Array) -> jax.Array:
        q_TCF = each_expert(
            x_TD,
            expert_TC,
            partial(run, QUERIES),
            num_experts=num_experts,
            is_native=w[QUERIES].is_native,
        )
        q_TCKH = q_TCF.reshape(len(x_TD), num_used, -1, head_dim)
        return q_TCKH.swapaxes(1, 2).reshape(len(x_TD), -1)

    def output(x_TF: jax.Array) -> jax.Array:
        x_TKCH = x_TF.reshape(len(x_TF), -1, num_used, head_dim)
        x_TCF = x_TKCH.swapaxes(1, 2).reshape(len(x_TF), num_used, -1)
        given = (x_TCF, expert_TC, weight_TC)
        return run_experts(
            *given,
            partial(run, OUTPUT),
            num_experts=num_experts,
            is_native=w[OUTPUT].is_native,
        )

    dtype, columns = w[OUTPUT].dtype, w[OUTPUT].num_columns
    made = {
        "q": Chosen(w[QUERIES].num_columns, dtype, queries),
        "o": Chosen(num_used * columns, dtype, output),
    }
    return {**w, **made}
