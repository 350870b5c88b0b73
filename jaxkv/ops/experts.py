"""Runs mixtures of experts: each token goes through the few MLPs that its router chooses. No token
is ever dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jaxkv.axes import Array, MeshAxes
from jaxkv.ops.layers import rounded, softmax, total, total_over

CPU_ROWS, ROWS = ((2, 4), (31, 16), (None, 64)), 128
"""Tokens that an expert takes at once: on a CPU 4 where experts have 2 each or less on average, and
so on. A result's bits do not depend on it: there matmuls add up alike for all numbers of rows.
"""

FEW_PAIRS = 512
"""Of up to so many tokens and their experts, blocks have three times as many rows in all, which
have to be kept at once (docs/benchmarks/cpu.md).
"""


def _sqrtsoftplus(x: Array) -> Array:
    return jnp.sqrt(jax.nn.softplus(x))


SCORES: dict[str, Callable[[Array], Array]] = {
    "softmax": softmax,
    "sigmoid": jax.nn.sigmoid,
    "sqrtsoftplus": _sqrtsoftplus,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Router:
    """Says how a token chooses `num_used` experts and what their outputs count.

    score: which of `SCORES` of the logits, of those of the chosen ones only if `of_chosen`.
    by_logits: a bias is added to logits, not to scores. is_normalised: the weights are divided by
    their sum. scale: of all weights. num_groups: experts are in so many groups, and those of
    `num_groups_used` can be chosen: of the largest sums of two scores, or if not `by_two` the
    largest scores. others_count_zero: in the choice experts of other groups count 0, so they come
    before those whose biased scores are less. margin: if not 0, experts are chosen one after the
    other, and each weighs as in a softmax over those left whose logits are less than such a part of
    their size behind it.
    logit_scale: of the logits, which are then cap * tanh(logit / cap), where cap is not 0.
    on_input: a weight multiplies what comes into its expert, not what goes out. shared_scale: of
    what the MLP for all tokens gives. num_identity: so many experts, the last ones, give back what
    comes in. num_empty: so many more behind those give nothing. is_shortcut: experts take what
    comes into the layer's MLP, and what they give joins the stream behind the next layer.
    num_sinks: so many logits behind those of experts are of equal parts of the MLP for all tokens,
    which they weigh (`with_sinks`).
    Sources: arXiv 2401.04088, section 2.1; with groups arXiv 2412.19437, section 2.1.2; one after
    the other arXiv 2409.12136, as its authors' code has it; the last two arXiv 2509.01322.
    """

    num_used: int
    score: str = "softmax"
    of_chosen: bool = False
    by_logits: bool = False
    is_normalised: bool = False
    scale: float = 1.0
    num_groups: int = 1
    num_groups_used: int = 1
    by_two: bool = True
    others_count_zero: bool = False
    margin: float = 0.0
    on_input: bool = False
    logit_scale: float = 1.0
    cap: float = 0.0
    shared_scale: float = 1.0
    num_identity: int = 0
    num_empty: int = 0
    is_shortcut: bool = False
    num_sinks: int = 0

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise ValueError(f"score: expected one of {', '.join(SCORES)}, got {self.score!r}")

    def __call__(
        self, logits_TE: Array, bias_E: Array | None = None, given_TK: Array | None = None
    ) -> tuple[Array, Array]:
        """Returns the experts of each token [T, K] int32, and their weights [T, K] float32. The
        bias counts for the choice only. given_TK: experts that take the place of the chosen ones.

        Raises: ValueError for a bias, or experts that are given, where scores depend on which are
        chosen.
        """
        if self.margin or self.of_chosen:
            for what, given in (("a table of them", given_TK), ("a bias of the choice", bias_E)):
                if given is not None:
                    raise ValueError(
                        "router: expected experts that it chooses by their logits alone, because "
                        f"what they count depends on the choice (margin, of_chosen), got {what}"
                    )
        logits_TE = logits_TE if self.logit_scale == 1.0 else logits_TE * self.logit_scale
        if self.cap:
            logits_TE = self.cap * jnp.tanh(logits_TE / self.cap)
        score = SCORES[self.score]
        if self.margin:
            return self._in_turn(logits_TE)
        if self.of_chosen:
            chosen_TK, expert_TK = jax.lax.top_k(logits_TE, self.num_used)
            return expert_TK, score(chosen_TK) * self.scale
        score_TE = score(logits_TE)
        expert_TK = self._best(logits_TE, score_TE, bias_E) if given_TK is None else given_TK
        weight_TK = jnp.take_along_axis(score_TE, expert_TK, axis=1)
        if self.is_normalised:
            weight_TK /= total(weight_TK)[:, None] + 1e-20
        return expert_TK, weight_TK * self.scale

    @property
    def num_others(self) -> int:
        """Counts the logits that are not of experts."""
        return self.num_identity + self.num_empty + self.num_sinks

    def with_sinks(self, logits_TE: Array, bias_E: Array | None) -> tuple[Array, Array, Array]:
        """Returns experts and weights, and the weights of the parts of the MLP for all tokens, [T,
        num_sinks]: sigmoid scores, divided by their sum over both. Source: Inkling, as transformers
        has it.
        """
        logits_TE, sinks_TS = jnp.split(logits_TE, [logits_TE.shape[1] - self.num_sinks], axis=1)
        expert_TK = self._best(logits_TE, SCORES[self.score](logits_TE), bias_E)
        chosen_TK = jnp.take_along_axis(logits_TE, expert_TK, axis=1)
        # By logarithms: scores may all be so small that they are 0.
        log_TX = jax.nn.log_sigmoid(jnp.concatenate([chosen_TK, sinks_TS], axis=1))
        weight_TX = softmax(log_TX) * self.scale
        return expert_TK, weight_TX[:, : self.num_used], weight_TX[:, self.num_used :]

    def _best(self, logits_TE: Array, score_TE: Array, bias_E: Array | None) -> Array:
        rank_TE = logits_TE if self.by_logits else score_TE
        if bias_E is not None:
            rank_TE = rank_TE + bias_E[None, :]
        return jax.lax.top_k(self._within_groups(rank_TE), self.num_used)[1]

    def _in_turn(self, logits_TE: Array) -> tuple[Array, Array]:
        left_TE, found = logits_TE, []
        for _ in range(self.num_used):
            best_T1 = left_TE.max(axis=1, keepdims=True)
            expert_T1 = jnp.argmax(left_TE, axis=1, keepdims=True)
            size_TE = jnp.maximum(jnp.abs(logits_TE), best_T1)
            # Not `<=`: a best logit of 0 gives 0 / 0 for itself, and is near itself.
            is_near = ~((best_T1 - logits_TE) / size_TE > self.margin)
            mass_T1 = total(jnp.where(is_near, jnp.exp(left_TE - best_T1), 0))[:, None]
            found.append((expert_T1, 1 / mass_T1))
            left_TE = jnp.where(jnp.arange(left_TE.shape[1])[None] == expert_T1, -jnp.inf, left_TE)
        expert_TK, weight_TK = (jnp.concatenate(x, axis=1) for x in zip(*found, strict=True))
        return expert_TK, weight_TK

    def _within_groups(self, rank_TE: Array) -> Array:
        """Leaves -inf, or 0, for experts of groups that are not chosen."""
        if self.num_groups == 1:
            return rank_TE
        rank_TGX = rank_TE.reshape(rank_TE.shape[0], self.num_groups, -1)
        best_TG = jax.lax.top_k(rank_TGX, 2)[0].sum(2) if self.by_two else rank_TGX.max(2)
        least_T1 = jax.lax.top_k(best_TG, self.num_groups_used)[0][:, -1:]
        kept = (best_TG >= least_T1)[..., None]
        outside = 0.0 if self.others_count_zero else -jnp.inf
        return jnp.where(kept, rank_TGX, outside).reshape(rank_TE.shape)


def weighed_parts(up_TF: Array, weight_TS: Array, axis: MeshAxes | None) -> Array:
    """Weighs equal parts of what goes down in the MLP for all tokens, of which devices along `axis`
    have some columns.
    """
    width = up_TF.shape[1]
    num_devices = 1 if axis is None else jax.lax.axis_size(axis)
    first = 0 if axis is None else jax.lax.axis_index(axis) * width
    part_F = (first + jnp.arange(width)) // (width * num_devices // weight_TS.shape[1])
    return up_TF * weight_TS[:, part_F]


def run_experts(
    x_TD: Array,
    expert_TK: Array,
    weight_TK: Array,
    run: Callable[[Array, Array], Array],
    *,
    num_experts: int,
    on_input: bool = False,
    norm: Callable[[Array], Array] | None = None,
    is_native: bool = False,
) -> Array:
    """Adds up what each token's experts make of it, [T, D] float32, as `each_expert` gives it.
    on_input: as in `Router`. norm: of what each expert gives, before that is weighed.
    """
    y_TKD = each_expert(
        x_TD,
        expert_TK,
        run,
        num_experts=num_experts,
        weight_TK=weight_TK if on_input else None,
        is_native=is_native,
    )
    y_TKD = y_TKD if norm is None else norm(y_TKD)
    return total_over(y_TKD if on_input else rounded(y_TKD * weight_TK[..., None]), 1)


def each_expert(
    x: Array,
    expert_TK: Array,
    run: Callable[[Array, Array], Array],
    *,
    num_experts: int,
    weight_TK: Array | None = None,
    is_native: bool = False,
) -> Array:
    """Returns what each of a token's experts makes of it, [T, K, F] float32; `run(x, expert)` is
    one expert on some rows. A token of an expert from `num_experts` on is in none, which makes 0.

    x: tokens [T, D], or what each expert of a token takes, [T, K, D]. weight_TK: multiplies that.
    Tokens are sorted by expert and taken in blocks of one expert each, one after the other; a
    block's last rows may be those of the next expert, whose own block overwrites what this one
    wrote there. Cost: an expert's weights are read once for each of its blocks.

    is_native: all that `run` multiplies with is (`Matrix.is_native`), so that a CPU may run few
    tokens' blocks at once.
    """
    num_each = expert_TK.size / num_experts
    on_cpu = next(rows for most, rows in CPU_ROWS if most is None or num_each <= most)
    cpu, default = (partial(_by_blocks, run, num_experts, size) for size in (on_cpu, ROWS))
    if is_native and expert_TK.size <= FEW_PAIRS:
        cpu = partial(_at_once, run, num_experts)
    return jax.lax.platform_dependent(x, expert_TK, weight_TK, cpu=cpu, default=default)


def _at_once(
    run: Callable[[Array, Array], Array],
    num_experts: int,
    x: Array,
    expert_TK: Array,
    weight_TK: Array | None,
) -> Array:
    """Runs all blocks by `vmap`, of which each product is one call. Rows of zeros, which are not
    multiplied, fill blocks up.
    """
    (num_tokens, num_used), num_pairs = expert_TK.shape, expert_TK.size
    # Blocks of twice the average: more rows would be zeros, with less more weights read twice.
    num_rows = 1 << max(0, math.ceil(math.log2(2 * num_pairs / num_experts)))
    num_rows = min(num_rows, num_tokens)
    num_blocks = min(num_pairs // num_rows + num_experts, num_pairs)
    expert_P, number_P = expert_TK.reshape(-1), jnp.arange(num_pairs)
    size_E = jnp.zeros(num_experts, jnp.int32).at[expert_P].add(1, mode="drop")
    blocks_E = -(-size_E // num_rows)
    end_E = jnp.cumsum(blocks_E)
    first_E = (end_E - blocks_E) * num_rows - (jnp.cumsum(size_E) - size_E)
    place_P = jnp.zeros_like(number_P).at[jnp.argsort(expert_P, stable=True)].set(number_P)
    # The row of a pair of a token and its expert; no row, past the last one, of an expert in none.
    row_P = place_P + first_E.at[expert_P].get(mode="fill", fill_value=num_blocks * num_rows)
    pair_R = jnp.full(num_blocks * num_rows, num_pairs).at[row_P].set(number_P, mode="drop")
    from_R = pair_R if x.ndim == 3 else pair_R // num_used
    x_RD = x.reshape(-1, x.shape[-1]).at[from_R].get(mode="fill", fill_value=0)
    if weight_TK is not None:
        x_RD *= weight_TK.reshape(-1).at[pair_R].get(mode="fill", fill_value=0)[:, None]
    expert_B = jnp.searchsorted(end_E, jnp.arange(num_blocks), side="right", method="compare_all")
    y_BRF = jax.vmap(run)(
        x_RD.reshape(num_blocks, num_rows, -1), jnp.minimum(expert_B, num_experts - 1)
    )
    y_RF = y_BRF.reshape(num_blocks * num_rows, -1)
    return y_RF.at[row_P].get(mode="fill", fill_value=0).reshape(num_tokens, num_used, -1)


def _by_blocks(
    run: Callable[[Array, Array], Array],
    num_experts: int,
    num_rows: int,
    x: Array,
    expert_TK: Array,
    weight_TK: Array | None,
) -> Array:
    num_tokens, num_used = expert_TK.shape
    expert_P = expert_TK.reshape(-1)
    order_P = jnp.argsort(expert_P, stable=True)
    size_E = jnp.zeros(num_experts, jnp.int32).at[expert_P].add(1, mode="drop")
    start_E, blocks_E = jnp.cumsum(size_E) - size_E, -(-size_E // num_rows)
    end_E = jnp.cumsum(blocks_E)
    x_XD, is_of_each = x.reshape(-1, x.shape[-1]), x.ndim == 3
    from_P = jnp.pad(order_P if is_of_each else order_P // num_used, (0, num_rows))
    weight_P = None
    if weight_TK is not None:
        weight_P = jnp.pad(weight_TK.reshape(-1)[order_P], (0, num_rows))

    def block(i: Array, y_PF: Array) -> Array:
        expert = jnp.searchsorted(end_E, i, side="right")
        start = start_E[expert] + (i - end_E[expert] + blocks_E[expert]) * num_rows
        x_RD = x_XD[jax.lax.dynamic_slice(from_P, (start,), (num_rows,))]
        if weight_P is not None:
            x_RD *= jax.lax.dynamic_slice(weight_P, (start,), (num_rows,))[:, None]
        return jax.lax.dynamic_update_slice(y_PF, run(x_RD, expert), (start, 0))

    made = jax.eval_shape(run, jax.ShapeDtypeStruct((num_rows, x.shape[-1]), x.dtype), end_E[-1])
    y_PF = jnp.zeros((from_P.shape[0], made.shape[1]), jnp.float32)
    y_PF = jax.lax.fori_loop(0, end_E[-1], block, y_PF)
    place_P = jnp.zeros_like(order_P).at[order_P].set(jnp.arange(order_P.shape[0]))
    y_TKF = y_PF[place_P].reshape(num_tokens, num_used, -1)
    # Behind the last expert's rows are those of its last block, which nobody writes over.
    return jnp.where((expert_TK < num_experts)[..., None], y_TKF, 0)
