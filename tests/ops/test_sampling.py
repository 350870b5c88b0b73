"""Sampling equals a numpy reference made with sorts (and transformers' processors), and draws what
it says it draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.ops.layers import by_pieces
from jaxkv.ops.logits import NO_TOKEN
from jaxkv.ops.sampling import (
    GREEDY_BELOW,
    NUM_LOGPROBS,
    NUM_STOP_TOKENS,
    Sampled,
    Sampling,
    _ordered_bits,
    _sample,
    _top_k_top_p,
    is_stop,
    sample,
)
from jaxkv.programs.inputs import empty_sampling

pytestmark = pytest.mark.usefixtures("quick_compile")

V = 48
WIDE = 1000
"""The largest vocabulary here: masks are made for it and cut."""

MAX_LEN = 40
OFF = np.iinfo(np.int32).max
SAMPLE = jax.jit(sample)
TOP_K_TOP_P = jax.jit(_top_k_top_p)


def make_sampling(num_rows: int, **fields: object) -> Sampling:
    """Parameters by name without the suffix (`temperature=...`), one for all or one per row; seed =
    row.
    """
    made = empty_sampling(num_rows, vocab_size=WIDE, max_len=MAX_LEN)
    made.seed_B2[:, 1] = np.arange(num_rows)
    for name, value in fields.items():
        suffixes = (
            suffix for suffix in ("_B", "_B2", "_BE", "_BM", "_BN") if hasattr(made, name + suffix)
        )
        array = getattr(made, name + next(suffixes))
        array[:] = value
    return made


def draw(logits_BV: np.ndarray, sampling: Sampling, position: int | Sequence[int] = 7) -> Sampled:
    """`sample` of the rows, filled up to 64 or 2048 of them with greedy ones: few shapes, few
    compilations.
    """
    num_rows = len(logits_BV)
    padding = (64 if num_rows <= 64 else 2048) - num_rows
    position_B = np.broadcast_to(np.int32(position), (num_rows,))
    rows = (np.asarray(logits_BV, np.float32), sampling, position_B)
    filled = jax.tree.map(lambda x: np.pad(x, ((0, padding),) + ((0, 0),) * (x.ndim - 1)), rows)
    return jax.tree.map(lambda x: np.asarray(x)[:num_rows], SAMPLE(*filled))


def logits_of(*rows: Sequence[float]) -> np.ndarray:
    """[B, V] from the first logits of each row; the others are impossible."""
    return np.float32([[*row, *[-np.inf] * (V - len(row))] for row in rows])


# References: one row, float64, sorts
# ----------------------------------------------------------------------------------


def softmax(x_V: np.ndarray) -> np.ndarray:
    weight_V = np.exp(x_V - x_V.max())
    return weight_V / weight_V.sum()


def keep_min_p(x_V: np.ndarray, min_p: float) -> np.ndarray:
    """Tokens at least min_p times as likely as the likeliest."""
    return softmax(x_V) >= min_p * softmax(x_V).max()


def keep_top_k(x_V: np.ndarray, k: int) -> np.ndarray:
    """The k largest, and what ties with the last of them."""
    return x_V >= np.sort(x_V)[-min(k, len(x_V))]


def keep_top_p(x_V: np.ndarray, p: float) -> np.ndarray:
    """The fewest of the largest that weigh p together, and what ties with the last of them."""
    if p >= 1:
        return np.ones(len(x_V), bool)
    falling_V = np.sort(x_V)[::-1]
    needed = np.searchsorted(np.cumsum(softmax(falling_V)), p)
    return x_V >= falling_V[needed]


def masked(
    x_V: np.ndarray, *, temperature: float, min_p: float, top_k: int, top_p: float
) -> np.ndarray:
    """Scaled logits with -inf where a token may not be drawn: temperature, min-p, top-k, top-p, as
    in vLLM.
    """
    x_V = np.asarray(x_V, np.float64) / temperature
    for keep, value in ((keep_min_p, min_p), (keep_top_k, top_k), (keep_top_p, top_p)):
        x_V = np.where(keep(x_V, value), x_V, -np.inf)
    return x_V


def gumbel(seed_2: np.ndarray, sample_index: int, position: int, size: int) -> np.ndarray:
    """The documented key of a draw: fold_in(fold_in(seed, sample index), position)."""
    key = jax.random.wrap_key_data(jnp.asarray(seed_2), impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, sample_index), position)
    return np.asarray(jax.random.gumbel(key, (size,)))


def random_parameters(rng: np.random.Generator, num_rows: int) -> dict[str, np.ndarray]:
    """Each filter is off for a third of the rows, or so."""
    return {
        "temperature": rng.choice([0.3, 0.7, 1.0, 1.7], num_rows).astype(np.float32),
        "min_p": (rng.choice([0, 0.02, 0.1, 0.5], num_rows) * rng.uniform(0.9, 1, num_rows)).astype(
            np.float32
        ),
        "top_k": rng.choice([1, 2, 5, 20, V, V + 1, OFF, OFF], num_rows),
        "top_p": np.where(rng.random(num_rows) < 0.3, 1, rng.uniform(0.02, 0.99, num_rows)).astype(
            np.float32
        ),
    }


def row_of(parameters: dict[str, np.ndarray], row: int) -> dict[str, object]:
    return {name: values[row].item() for name, values in parameters.items()}


# Masks
# ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
def test_top_k_and_top_p_keep_what_a_sort_keeps(spread):
    rng = np.random.default_rng(0)
    x_BV = rng.normal(0, spread, (300, V)).astype(np.float32)
    x_BV[::3] = np.round(x_BV[::3] * 2) / 2  # many ties
    x_BV[::5, :7] = -np.inf
    x_BV[1::50] = 0.0
    top = random_parameters(rng, len(x_BV))
    got_BV = np.asarray(TOP_K_TOP_P(x_BV, top["top_k"], top["top_p"]))
    for row, x_V in enumerate(x_BV):
        one = row_of(top, row) | {"temperature": 1.0, "min_p": 0.0}
        want_V = masked(x_V, **one)
        np.testing.assert_array_equal(got_BV[row], want_V.astype(np.float32), err_msg=str(one))


@pytest.mark.parametrize(
    ("x", "k", "p", "kept"),
    [
        ([3, 1, 2, 2, 0], 1, 1.0, [0]),
        ([3, 1, 2, 2, 0], 2, 1.0, [0, 2, 3]),  # the second and third tie
        ([3, 1, 2, 2, 0], 3, 1.0, [0, 2, 3]),
        ([3, 1, 2, 2, 0], 4, 1.0, [0, 1, 2, 3]),
        ([3, 1, 2, 2, 0], 5, 1.0, [0, 1, 2, 3, 4]),
        ([3, 1, 2, 2, 0], 6, 1.0, [0, 1, 2, 3, 4]),
        ([3, 1, 2, 2, 0], OFF, 1.0, [0, 1, 2, 3, 4]),
        ([3, 1, 2, 2, 0], OFF, 1e-6, [0]),
        ([0, 0, 0, 0, 0], 1, 1e-6, [0, 1, 2, 3, 4]),
        ([0, 0, 0, 0, -9], OFF, 0.7, [0, 1, 2, 3]),
        ([9, 9, -9, -9, -9], OFF, 0.3, [0, 1]),
        ([-1, -2, -3, -1e30, -np.inf], 4, 1.0, [0, 1, 2, 3]),
        ([-0.0, 0.0, -1, -1, -1], 1, 1.0, [0, 1]),  # -0 ties with 0
        ([np.log(6), np.log(3), 0, -40, -40], OFF, 0.59, [0]),
        ([np.log(6), np.log(3), 0, -40, -40], OFF, 0.61, [0, 1]),
        ([np.log(6), np.log(3), 0, -40, -40], OFF, 0.91, [0, 1, 2]),
        ([np.log(6), np.log(3), 0, -40, -40], 2, 0.65, [0]),  # p counts from what top-k left: 2/3
    ],
)
def test_top_k_and_top_p_at_their_edges(x, k, p, kept):
    got = TOP_K_TOP_P(np.float32([x]), np.int32([k]), np.float32([p]))
    assert np.flatnonzero(np.isfinite(np.asarray(got)[0])).tolist() == kept


def test_one_token_of_vocabulary_is_always_that_token():
    logits_BV = np.float32([[-3.0], [0.0]])
    for fields in (
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 1, "top_p": 0.1, "min_p": 1.0},
    ):
        assert draw(logits_BV, make_sampling(2, **fields)).token_B.tolist() == [0, 0]


def test_the_bit_order_of_floats_is_their_order():
    x = np.float32(
        [-np.inf, -3e38, -1.5, -1e-37, -0.0, 0.0, 1e-37, 1e-3, 1.0, 1.0000001, 3e38, np.inf]
    )
    order = np.asarray(_ordered_bits(jnp.asarray(x))).astype(np.int64)
    assert np.sign(np.diff(order)).tolist() == np.sign(np.diff(x)).tolist()


def test_every_draw_is_the_gumbel_maximum_over_the_masked_scaled_logits():
    rng = np.random.default_rng(1)
    num_rows = 600
    logits_BV = rng.normal(0, 1, (num_rows, V)).astype(np.float32)
    parameters = random_parameters(rng, num_rows)
    seed_B2 = rng.integers(0, 2**32, (num_rows, 2), dtype=np.uint32)
    sample_B, position_B = rng.integers(0, 3, num_rows), rng.integers(0, 99, num_rows)
    sampling = make_sampling(num_rows, **parameters, seed=seed_B2, sample=sample_B)
    token_B = draw(logits_BV, sampling, position_B).token_B
    noise_BV = [gumbel(seed_B2[row], sample_B[row], position_B[row], V) for row in range(num_rows)]
    want_B = [
        (masked(logits_BV[row], **row_of(parameters, row)) + noise_BV[row]).argmax()
        for row in range(num_rows)
    ]
    assert token_B.tolist() == want_B


def test_a_filter_never_lets_a_masked_token_through_and_every_kept_one_is_drawn():
    logits_V = np.random.default_rng(2).normal(0, 0.3, V).astype(np.float32)
    for one in (
        {"temperature": 1.0, "min_p": 0.8, "top_k": OFF, "top_p": 1.0},
        {"temperature": 0.5, "min_p": 0.5, "top_k": OFF, "top_p": 1.0},
        {"temperature": 2.0, "min_p": 0.0, "top_k": 9, "top_p": 1.0},
        {"temperature": 0.5, "min_p": 0.0, "top_k": OFF, "top_p": 0.4},
        {"temperature": 1.0, "min_p": 0.6, "top_k": 30, "top_p": 0.7},
    ):
        token_B = draw(np.tile(logits_V, (2000, 1)), make_sampling(2000, **one)).token_B
        assert (
            sorted(set(token_B.tolist()))
            == np.flatnonzero(np.isfinite(masked(logits_V, **one))).tolist()
        )


def test_the_masks_equal_transformers_processors():
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as hf

    rng = np.random.default_rng(3)
    logits_BV = rng.normal(0, 2, (200, V)).astype(np.float32)
    parameters = random_parameters(rng, len(logits_BV))
    kept_BV = np.asarray(TOP_K_TOP_P(logits_BV, parameters["top_k"], parameters["top_p"]))
    for row, logits_V in enumerate(logits_BV):
        one = row_of(parameters, row)
        top = [hf.TopKLogitsWarper(min(one["top_k"], V))] + [hf.TopPLogitsWarper(one["top_p"])] * (
            one["top_p"] < 1
        )
        scores = torch.tensor(logits_V)[None]
        for processor in top:
            scores = processor(None, scores)
        np.testing.assert_array_equal(kept_BV[row], scores[0].numpy())
        scores = torch.tensor(logits_V)[None]
        for processor in [
            hf.TemperatureLogitsWarper(one["temperature"]),
            hf.MinPLogitsWarper(one["min_p"]),
            *top,
        ]:
            scores = processor(None, scores)
        np.testing.assert_allclose(
            masked(logits_V, **one), scores[0].numpy(), rtol=1e-6
        )  # one float32 division


# Draws
# ----------------------------------------------------------------------------------------------------------------


def test_a_temperature_below_the_threshold_is_greedy_and_one_at_it_draws():
    logits_BV = logits_of(*[[0.0, -GREEDY_BELOW, -1.0]] * 64)
    for temperature in (0.0, 1e-30, 0.99 * GREEDY_BELOW):
        assert not draw(logits_BV, make_sampling(64, temperature=temperature)).token_B.any()
    assert set(draw(logits_BV, make_sampling(64, temperature=GREEDY_BELOW)).token_B.tolist()) == {
        0,
        1,
    }


@pytest.mark.parametrize("fields", [{}, {"top_k": 3, "top_p": 0.9}])
def test_the_largest_temperature_and_penalty_draw_what_may_come_only(fields):
    logits_BV = logits_of(*[[-3.0, -4.0, -2.0]] * 64)
    drawn = [
        draw(logits_BV, make_sampling(64, temperature=temperature, **fields)).token_B.tolist()
        for temperature in (1e30, np.finfo(np.float32).max)
    ]
    assert set(drawn[0]) == {0, 1, 2}
    assert drawn[1] == drawn[0]
    fields |= {"repetition": 1e38, "history": [5, 6, 7, *[NO_TOKEN] * (MAX_LEN - 3)]}
    for temperature in (0.0, GREEDY_BELOW, 1.0):
        sampling = make_sampling(64, temperature=temperature, **fields)
        assert set(draw(np.roll(logits_BV, 5, axis=1), sampling).token_B.tolist()) <= {5, 6, 7}


def test_greedy_takes_the_first_of_equals_whatever_the_filters_and_beside_rows_that_draw():
    logits_BV = logits_of([0, 2, 2, 1], [5, 0, 0, 5], [0, 0, 0, 0], [1, 2, 3, 4])
    temperature = np.float32([0, 0, 1, 0])
    for fields in ({}, {"top_k": 1}, {"top_p": 0.1}, {"min_p": 1.0}):
        token_B = draw(logits_BV, make_sampling(4, temperature=temperature, **fields)).token_B
        assert token_B[[0, 1, 3]].tolist() == [1, 0, 3]


def test_a_min_p_of_1_keeps_the_likeliest_and_what_ties_with_it():
    logits_BV = logits_of(*[[1, 3, 2.9, 3, 0]] * 64)
    assert set(draw(logits_BV, make_sampling(64, temperature=0.7, min_p=1.0)).token_B.tolist()) == {
        1,
        3,
    }


@pytest.mark.parametrize(
    "one",
    [
        {"temperature": 1.0, "min_p": 0.0, "top_k": OFF, "top_p": 1.0},
        {"temperature": 1.6, "min_p": 0.05, "top_k": 8, "top_p": 0.9},
    ],
)
@pytest.mark.parametrize("varied", ["seed", "sample", "position"])
def test_draws_follow_the_probabilities_over_seeds_samples_and_positions(one, varied):
    (logits_V,) = logits_of(np.random.default_rng(4).normal(0, 1, 12))
    num_rows = 2048
    count_B = np.arange(num_rows)
    fields = {"seed": np.uint32([[1, 2]]), "sample": 0} | (
        {varied: count_B} if varied == "sample" else {}
    )
    if varied == "seed":
        fields["seed"] = np.stack([count_B % 7, count_B], axis=1)
    position = count_B if varied == "position" else 3
    token_B = draw(
        np.tile(logits_V, (num_rows, 1)), make_sampling(num_rows, **one, **fields), position
    ).token_B
    probability_V = softmax(masked(logits_V, **one))
    observed_V = np.bincount(token_B, minlength=V)
    possible_V = probability_V > 0
    assert not observed_V[~possible_V].any()
    expected_V = num_rows * probability_V[possible_V]
    chi_square = ((observed_V[possible_V] - expected_V) ** 2 / expected_V).sum()
    # Degrees of freedom f: mean f, variance 2f. Four standard deviations; the seeds are fixed, so
    # it never flickers.
    freedom = possible_V.sum() - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


def test_a_row_depends_on_its_own_seed_sample_and_position_only():
    rng = np.random.default_rng(5)
    num_rows = 32
    logits_BV = rng.normal(0, 1, (num_rows, V)).astype(np.float32)
    parameters = random_parameters(rng, num_rows)
    parameters["temperature"][::5] = 0
    seed_B2 = rng.integers(0, 2**32, (num_rows, 2), dtype=np.uint32)
    position_B = rng.integers(0, 99, num_rows)
    together = draw(
        logits_BV, make_sampling(num_rows, **parameters, seed=seed_B2), position_B
    ).token_B
    order = rng.permutation(num_rows)
    shuffled = {name: values[order] for name, values in parameters.items()}
    moved = draw(
        logits_BV[order],
        make_sampling(num_rows, **shuffled, seed=seed_B2[order]),
        position_B[order],
    ).token_B
    assert moved.tolist() == together[order].tolist()
    for row in range(num_rows):  # beside greedy neighbours with other logits
        alone = make_sampling(num_rows)
        for name, values in (parameters | {"seed": seed_B2}).items():
            getattr(alone, name + ("_B2" if name == "seed" else "_B"))[row] = values[row]
        others = rng.normal(0, 1, logits_BV.shape)
        others[row] = logits_BV[row]
        assert draw(others, alone, position_B).token_B[row] == together[row]


def test_both_words_of_the_seed_the_sample_and_the_position_matter():
    logits_BV = np.zeros((1, WIDE), np.float32)
    drawn = [
        draw(
            logits_BV, make_sampling(1, temperature=1.0, seed=seed, sample=index), position
        ).token_B.item()
        for seed in ([0, 0], [1, 0], [0, 1], [1, 1])
        for index in range(3)
        for position in range(3)
    ]
    assert len(set(drawn)) > 30  # 36 draws out of 1,000 equal ones: about 0.6 collisions


# Stop tokens and logprobs
# ---------------------------------------------------------------------------------------------


def test_stop_tokens_cannot_come_before_min_tokens_and_can_after():
    rng = np.random.default_rng(6)
    logits_BV = rng.normal(0, 1, (4, V)).astype(np.float32)
    order_BV = np.argsort(-logits_BV, axis=1)
    stop_BE = np.full((4, NUM_STOP_TOKENS), -1)
    stop_BE[:, :2], stop_BE[:, -1] = (
        order_BV[:, :2],
        order_BV[:, 3],
    )  # the best, the second and the fourth
    stop_BE[3] = -1
    fields = {"stop": stop_BE, "min_left": np.array([0, 1, 5, 5])}
    token_B = draw(logits_BV, make_sampling(4, **fields)).token_B
    assert token_B.tolist() == [order_BV[row, best] for row, best in enumerate((0, 2, 2, 0))]
    assert np.asarray(is_stop(token_B, make_sampling(4, **fields))).tolist() == [
        True,
        False,
        False,
        False,
    ]
    for seed in range(30):
        drawn = draw(logits_BV, make_sampling(4, **fields, temperature=2.0, seed=[seed, 0])).token_B
        assert not (drawn[1:3, None] == stop_BE[1:3]).any()


def test_an_ignored_end_token_cannot_come_before_min_tokens_of_its_own_row():
    logits_BV = np.eye(V, dtype=np.float32)[[3, 3, 3, 3]]
    fields = {"ignored": np.array([3, 3, -1, 3]), "min_left": np.array([0, 1, 1, 5])}
    token_B = draw(logits_BV, make_sampling(4, **fields)).token_B
    assert (np.asarray(token_B) == 3).tolist() == [True, False, True, False]
    assert not np.asarray(is_stop(np.full(4, 3), make_sampling(4, **fields))).any()


def test_the_last_token_of_the_vocabulary_is_not_masked_by_unused_stop_slots():
    logits_BV = np.eye(V, dtype=np.float32)[[V - 1, V - 1]]
    stop_BE = np.full((2, NUM_STOP_TOKENS), -1)
    stop_BE[:, 0] = 3
    assert draw(logits_BV, make_sampling(2, stop=stop_BE, min_left=4)).token_B.tolist() == [
        V - 1,
        V - 1,
    ]


@pytest.mark.parametrize("size", [5, V])
def test_logprobs_are_log_softmax_of_the_models_logits_with_rank_and_best_tokens(size):
    rng = np.random.default_rng(7)
    logits_BV = rng.normal(0, 3, (6, size)).astype(np.float32)
    stop_BE = np.full((6, NUM_STOP_TOKENS), -1)
    stop_BE[:, 0] = logits_BV.argmax(axis=1)  # masked, so that what is drawn is not the best
    wanted = np.arange(6) == 2  # one row that asks is enough
    fields = {"temperature": 0.7, "top_k": 3, "stop": stop_BE, "min_left": 1, "logprobs": wanted}
    out = draw(logits_BV, make_sampling(6, **fields))
    want_BV = logits_BV - np.log(np.exp(logits_BV.astype(np.float64)).sum(axis=1, keepdims=True))
    order_BK = np.argsort(-want_BV, axis=1)[:, :NUM_LOGPROBS]
    assert out.scores.best_TK.tolist() == order_BK.tolist()
    # float32 logits of up to 9 less their logsumexp: two roundings of 5e-7.
    np.testing.assert_allclose(
        out.scores.best_logprob_TK, np.take_along_axis(want_BV, order_BK, 1), atol=2e-6, rtol=0
    )
    np.testing.assert_allclose(
        out.scores.logprob_T, want_BV[np.arange(6), out.token_B], atol=2e-6, rtol=0
    )
    rank_B = [
        int((want_BV[row] > want_BV[row, token]).sum()) + 1 for row, token in enumerate(out.token_B)
    ]
    assert out.scores.rank_T.tolist() == rank_B
    assert min(rank_B) > 1


def test_a_rank_counts_the_tokens_that_are_as_likely_or_likelier():
    out = draw(
        logits_of([1, 3, 3, 2], [1, 3, 3, 4]), make_sampling(2, logprobs=True, temperature=0.0)
    )
    assert out.scores.rank_T.tolist() == [2, 1]
    stop_BE = np.full((1, NUM_STOP_TOKENS), -1)
    stop_BE[0, 0] = 3
    out = draw(logits_of([1, 3, 3, 4]), make_sampling(1, logprobs=True, stop=stop_BE, min_left=1))
    assert (out.token_B.tolist(), out.scores.rank_T.tolist()) == ([1], [3])


def test_without_a_row_that_asks_logprobs_are_zeros_and_the_tokens_the_same():
    logits_BV = np.random.default_rng(8).normal(0, 1, (5, V)).astype(np.float32)
    without, given = (
        draw(logits_BV, make_sampling(5, temperature=1.0, logprobs=flag)) for flag in (False, True)
    )
    assert without.token_B.tolist() == given.token_B.tolist()
    assert not without.scores.logprob_T.any()
    assert not without.scores.best_logprob_TK.any()
    assert given.scores.logprob_T.all()


def test_rows_in_pieces_of_which_the_last_begins_early_give_the_same():
    """As a TPU samples: 21 rows of which some draw, some are masked and penalised, and some ask for
    logprobs.
    """
    rng = np.random.default_rng(3)
    every_third = np.arange(21) % 3 == 0
    sampling = make_sampling(
        21, temperature=rng.choice([0, 0.7, 1.5], 21), top_p=rng.choice([0.5, 1], 21)
    )
    sampling.masked_B[:], sampling.allowed_BM[:] = (
        every_third,
        rng.integers(0, 2**32, dtype=np.uint32),
    )
    sampling.frequency_B[:], sampling.history_BN[:, :9] = (
        every_third[::-1],
        rng.integers(0, V, (21, 9)),
    )
    sampling.logprobs_B[:] = np.arange(21) == 20
    recent_Bn = rng.integers(-1, V, (21, 4)).astype(np.int32)
    rows = (
        rng.normal(size=(21, V)).astype(np.float32),
        sampling,
        np.arange(21, dtype=np.int32),
        recent_Bn,
    )
    whole = partial(_sample, num_logprobs=4)
    at_once, in_pieces = jax.jit(whole)(*rows), jax.jit(partial(by_pieces, whole, size=8))(*rows)
    np.testing.assert_array_equal(in_pieces.token_B, at_once.token_B)
    # Only of a row that asks, and those beside it, does it matter what they are.
    for name in ("logprob_T", "rank_T", "best_TK", "best_logprob_TK"):
        ours, theirs = (getattr(x.scores, name)[20] for x in (in_pieces, at_once))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5, err_msg=name)
    few = jax.tree.map(lambda x: x[:5], rows)
    np.testing.assert_array_equal(by_pieces(whole, *few, size=8).token_B, at_once.token_B[:5])
