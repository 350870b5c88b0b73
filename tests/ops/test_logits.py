"""Masks, bias and penalties equal numpy references and transformers' processors, in vLLM's order,
row by row.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxkv.ops.logits import NO_TOKEN
from jaxkv.ops.sampling import NUM_BIASES, NUM_LOGPROBS, Sampling, _process, sample
from jaxkv.programs.inputs import empty_sampling

B, V, N = 12, 70, 30
PROCESS = jax.jit(_process)
SAMPLE = jax.jit(sample)


def make_sampling(**fields: object) -> Sampling:
    made = empty_sampling(B, vocab_size=V, max_len=N)
    for name, value in fields.items():
        getattr(made, name)[:] = value
    return made


def random_logits(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (B, V)).astype(np.float32)


def random_histories(seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and outputs of up to 15 tokens each, with many duplicates; some are empty."""
    rng = np.random.default_rng(seed)
    halves = [
        [rng.integers(V - 12, V, rng.integers(0, 16)).tolist() for _ in range(B)] for _ in range(2)
    ]
    halves[1][3] = []
    return halves[0], halves[1]


def padded(rows: list[list[int]], width: int = N) -> np.ndarray:
    return np.array([[*row, *[NO_TOKEN] * (width - len(row))] for row in rows], np.int32)


def history_of(prompts: list[list[int]], outputs: list[list[int]]) -> dict[str, object]:
    joined = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    return {"history_BN": padded(joined), "prompt_len_B": [len(prompt) for prompt in prompts]}


def random_penalties(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    off = rng.random((3, B)) < 0.3
    return {
        "repetition_B": np.where(off[0], 1, rng.uniform(0.5, 2, B)).astype(np.float32),
        "frequency_B": np.where(off[1], 0, rng.uniform(-2, 2, B)).astype(np.float32),
        "presence_B": np.where(off[2], 0, rng.uniform(-2, 2, B)).astype(np.float32),
    }


def penalised(
    logits_V: np.ndarray,
    prompt: list[int],
    output: list[int],
    repetition: float,
    frequency: float,
    presence: float,
) -> np.ndarray:
    """vLLM's definition with counts of every token, float64."""
    x_V = logits_V.astype(np.float64)
    count_V = np.bincount(output, minlength=V)
    seen_V = np.bincount(prompt + output, minlength=V) > 0
    x_V = np.where(seen_V, np.where(x_V > 0, x_V / repetition, x_V * repetition), x_V)
    return x_V - frequency * count_V - presence * (count_V > 0)


# Penalties
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_penalties_equal_the_definition_by_counts(seed):
    logits_BV, (prompts, outputs), penalties = (
        random_logits(seed),
        random_histories(seed),
        random_penalties(seed),
    )
    got_BV = np.asarray(
        PROCESS(logits_BV, make_sampling(**penalties, **history_of(prompts, outputs)), None)
    )
    for row in range(B):
        values = [penalties[name][row] for name in ("repetition_B", "frequency_B", "presence_B")]
        want_V = penalised(logits_BV[row], prompts[row], outputs[row], *values)
        np.testing.assert_allclose(
            got_BV[row], want_V, rtol=1e-6, atol=2e-5
        )  # up to 17 float32 roundings of 30
    assert np.abs(got_BV - logits_BV).max() > 1


@pytest.mark.parametrize("num_recent", [1, 3, 8])
def test_tokens_of_the_running_loop_count_as_those_of_the_history_to_the_bit(num_recent):
    logits_BV, (prompts, outputs), penalties = (
        random_logits(5),
        random_histories(5),
        random_penalties(5),
    )
    whole = PROCESS(logits_BV, make_sampling(**penalties, **history_of(prompts, outputs)), None)
    old = [output[:-num_recent] for output in outputs]
    recent = [output[max(0, len(output) - num_recent) :] for output in outputs]
    recent_Bn = padded(recent, 8)  # a row that rested has NO_TOKEN
    split = PROCESS(logits_BV, make_sampling(**penalties, **history_of(prompts, old)), recent_Bn)
    np.testing.assert_array_equal(whole, split)


def test_the_repetition_penalty_is_transformers_one():
    torch = pytest.importorskip("torch")
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    logits_BV, (prompts, outputs) = random_logits(6), random_histories(6)
    penalty_B = np.float32(np.random.default_rng(6).uniform(0.4, 3, B))
    history = history_of(prompts, outputs)
    got_BV = np.asarray(PROCESS(logits_BV, make_sampling(repetition_B=penalty_B, **history), None))
    for row in range(B):
        ids = torch.tensor([prompts[row] + outputs[row]], dtype=torch.int64)
        scores = RepetitionPenaltyLogitsProcessor(float(penalty_B[row]))(
            ids, torch.tensor(logits_BV[row : row + 1])
        )
        np.testing.assert_allclose(
            got_BV[row], scores[0].numpy(), rtol=2.5e-7
        )  # a division rounds once, if not alike


@pytest.mark.parametrize(
    "used", ["repetition_B", "frequency_B", "presence_B", "bias_BE", "masked_B", "min_left_B"]
)
def test_a_row_that_uses_nothing_keeps_its_logits_to_the_bit_beside_rows_that_do(used):
    logits_BV = random_logits(7)
    logits_BV[0, :4] = [0.0, -0.0, -np.inf, 1e-30]
    sampling = make_sampling(**history_of(*random_histories(7)))
    sampling.stop_BE[:, 0] = 3
    if used == "bias_BE":
        sampling.bias_id_BE[1, 0] = 3
    getattr(sampling, used)[1] = {"masked_B": True, "min_left_B": 2}.get(used, 0.5)
    recent_Bn = np.full((B, 4), V - 1, np.int32)
    got_BV = np.asarray(PROCESS(logits_BV, sampling, recent_Bn))
    others = [row for row in range(B) if row != 1]
    assert got_BV[others].tobytes() == logits_BV[others].tobytes()
    assert (got_BV[1] != logits_BV[1]).any()


def test_a_history_without_tokens_penalises_none_not_even_the_last_of_the_vocabulary():
    logits_BV = random_logits(8)
    sampling = make_sampling(repetition_B=3.0, frequency_B=2.0, presence_B=2.0)
    got_BV = PROCESS(logits_BV, sampling, np.full((B, 8), NO_TOKEN, np.int32))
    np.testing.assert_array_equal(got_BV, logits_BV)


def test_a_token_of_the_prompt_alone_pays_for_repetition_only():
    logits_BV = np.ones((B, V), np.float32)
    history = history_of([[5]] * B, [[]] * B)
    sampling = make_sampling(frequency_B=2.0, presence_B=2.0, **history)
    np.testing.assert_array_equal(PROCESS(logits_BV, sampling, None), logits_BV)
    got_BV = np.asarray(PROCESS(logits_BV, make_sampling(repetition_B=2.0, **history), None))
    assert got_BV[:, 5].tolist() == [0.5] * B
    assert (got_BV == 1).sum() == B * (V - 1)


def test_an_impossible_token_stays_impossible_whatever_is_added():
    logits_BV = np.full((B, V), -np.inf, np.float32)
    logits_BV[:, 0] = 0
    sampling = make_sampling(
        repetition_B=0.5, frequency_B=-2.0, presence_B=-2.0, **history_of([[5]] * B, [[5]] * B)
    )
    sampling.bias_id_BE[:, 0], sampling.bias_BE[:, 0] = 5, 100
    np.testing.assert_array_equal(PROCESS(logits_BV, sampling, None), logits_BV)


# Masks and bias
# -------------------------------------------------------------------------------------------------------


def bits(rows: list[list[int]]) -> np.ndarray:
    """[B, M] uint32, written out bit by bit."""
    words = np.zeros((len(rows), -(-V // 32)), np.uint32)
    for row, tokens in enumerate(rows):
        for token in tokens:
            words[row, token // 32] |= np.uint32(1) << np.uint32(token % 32)
    return words


def test_only_allowed_tokens_are_left_in_masked_rows():
    logits_BV = random_logits(9)
    rng = np.random.default_rng(9)
    allowed = [[0], [31], [32], [V - 1], [63, 64]] + [
        rng.integers(0, V, 20).tolist() for _ in range(B - 5)
    ]
    masked_B = np.arange(B) % 5 != 4
    got_BV = np.asarray(
        PROCESS(logits_BV, make_sampling(masked_B=masked_B, allowed_BM=bits(allowed)), None)
    )
    for row in range(B):
        kept = sorted(set(allowed[row])) if masked_B[row] else list(range(V))
        assert np.flatnonzero(np.isfinite(got_BV[row])).tolist() == kept
        np.testing.assert_array_equal(got_BV[row, kept], logits_BV[row, kept])


def test_a_bias_is_added_to_its_tokens_as_transformers_does():
    torch = pytest.importorskip("torch")
    from transformers.generation.logits_process import SequenceBiasLogitsProcessor

    logits_BV, rng, sampling = random_logits(10), np.random.default_rng(10), make_sampling()
    biases = [
        dict(zip(rng.permutation(V)[:n].tolist(), rng.uniform(-9, 9, n).tolist(), strict=True))
        for n in range(B)
    ]
    for row, bias in enumerate(biases):
        sampling.bias_id_BE[row, : len(bias)] = list(bias)
        sampling.bias_BE[row, : len(bias)] = list(bias.values())
    got_BV = np.asarray(PROCESS(logits_BV, sampling, None))
    for row, bias in enumerate(biases):
        scores = torch.tensor(logits_BV[row : row + 1])
        if bias:
            processor = SequenceBiasLogitsProcessor(
                [[[token], value] for token, value in bias.items()]
            )
            scores = processor(torch.tensor([[0]]), scores)
        np.testing.assert_allclose(got_BV[row], scores[0].numpy(), rtol=1e-6, atol=1e-6)


def test_all_slots_of_a_bias_count():
    sampling = empty_sampling(2, vocab_size=400, max_len=1)
    sampling.bias_id_BE[0], sampling.bias_BE[0] = np.arange(400 - NUM_BIASES, 400), 1
    got_BV = np.asarray(jax.jit(_process)(np.zeros((2, 400), np.float32), sampling, None))
    assert got_BV[0].tolist() == [0.0] * (400 - NUM_BIASES) + [1.0] * NUM_BIASES
    assert not got_BV[1].any()


def test_the_order_is_masks_then_bias_then_penalties():
    """A biased logit is what the penalty divides; bias and penalties do not bring back what a mask
    took.
    """
    logits_BV = random_logits(11)
    prompts, outputs = random_histories(11)
    history = history_of(prompts, outputs)
    sampling = make_sampling(
        masked_B=True, allowed_BM=bits([list(range(20, V))] * B), min_left_B=1, **history
    )
    sampling.stop_BE[:, 0] = 25
    tokens = [3, 25, *range(V - 12, V)]
    sampling.bias_id_BE[:, : len(tokens)], sampling.bias_BE[:, : len(tokens)] = tokens, 4.0
    penalties = {"repetition_B": 1.7, "frequency_B": 0.3, "presence_B": -0.6}
    for name, value in penalties.items():
        getattr(sampling, name)[:] = value
    got_BV = np.asarray(PROCESS(logits_BV, sampling, None))
    for row in range(B):
        x_V = logits_BV[row].astype(np.float64)
        x_V[:20] = x_V[25] = -np.inf
        x_V[tokens] += 4
        want_V = penalised(x_V, prompts[row], outputs[row], *penalties.values())
        np.testing.assert_allclose(got_BV[row], want_V, rtol=1e-6, atol=2e-5)


def test_logprobs_are_of_the_logits_before_all_that():
    logits_BV = random_logits(12)
    best_B = logits_BV.argmax(axis=1)
    sampling = make_sampling(logprobs_B=True, **history_of([[]] * B, [[token] for token in best_B]))
    sampling.bias_id_BE[:, 0], sampling.bias_BE[:, 0] = (best_B + 1) % V, 50
    sampling.presence_B[:] = 2
    out = jax.tree.map(np.asarray, SAMPLE(logits_BV, sampling, np.zeros(B, np.int32)))
    assert out.token_B.tolist() == ((best_B + 1) % V).tolist()
    want_BV = logits_BV - np.log(np.exp(logits_BV.astype(np.float64)).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(
        out.scores.logprob_T, want_BV[np.arange(B), out.token_B], atol=2e-6, rtol=0
    )
    assert out.scores.best_TK.tolist() == np.argsort(-want_BV, axis=1)[:, :NUM_LOGPROBS].tolist()


@pytest.mark.parametrize(
    "used", [("repetition_B", 1.3), ("frequency_B", 0.5), ("presence_B", 0.5), ("masked_B", True)]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_draws_the_same_beside_neighbours_that_use_something(used, temperature):
    logits_BV = random_logits(13)
    history = history_of(*random_histories(13))
    sampling = make_sampling(temperature_B=temperature, allowed_BM=bits([[1, 2]] * B), **history)
    sampling.seed_B2[:, 1] = np.arange(B)
    position_B = np.arange(B, dtype=np.int32)
    alone_B = np.asarray(SAMPLE(logits_BV, sampling, position_B).token_B)
    name, value = used
    getattr(sampling, name)[::2] = value
    mixed_B = np.asarray(SAMPLE(logits_BV, sampling, position_B).token_B)
    assert mixed_B[1::2].tolist() == alone_B[1::2].tolist()
