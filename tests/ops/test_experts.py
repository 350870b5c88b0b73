"""What experts make of tokens is what they make of each one alone, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.ops.experts import Router, each_expert, run_experts

NUM_EXPERTS, WIDTH = 5, 12


def run(x: np.ndarray, chosen: np.ndarray, weight: np.ndarray, w: np.ndarray) -> np.ndarray:
    def one(x_RD: jax.Array, expert: jax.Array) -> jax.Array:
        return jnp.dot(x_RD, jnp.asarray(w)[expert].T, precision=jax.lax.Precision.HIGHEST)

    @jax.jit
    def all_experts(*given: jax.Array) -> jax.Array:
        return run_experts(*given, one, num_experts=NUM_EXPERTS)

    return np.asarray(all_experts(x, chosen.astype(np.int32), weight.astype(np.float32)))


@pytest.mark.parametrize(
    ("num_tokens", "likely"),
    # Blocks of 4, 16 and 64 tokens, on a CPU: experts have 1.2, 32, 19.6 and 80 on average.
    [(3, None), (80, None), (49, 2), (200, 4)],
)
def test_every_token_goes_through_its_experts(num_tokens, likely):
    """Also where one expert has nearly all of them, in several blocks, or none."""
    rng = np.random.default_rng(0)
    chosen = np.array([rng.permutation(NUM_EXPERTS)[:2] for _ in range(num_tokens)])
    if likely is not None:
        chosen[1:] = [likely, (likely + 1) % NUM_EXPERTS]
    chosen[num_tokens // 2] = NUM_EXPERTS  # padding
    x, w = rng.normal(size=(num_tokens, WIDTH)), rng.normal(size=(NUM_EXPERTS, WIDTH, WIDTH))
    weight = rng.uniform(size=chosen.shape)
    want = np.zeros(x.shape)
    for token, experts_of in enumerate(chosen):
        for place, expert in enumerate(experts_of):
            if expert < NUM_EXPERTS:
                want[token] += weight[token, place] * (w[expert] @ x[token])
    x, w = x.astype(np.float32), w.astype(np.float32)
    got = run(x, chosen, weight, w)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(run(x[:2], chosen[:2], weight[:2], w), got[:2])  # to the bit


@pytest.mark.parametrize("num_tokens", [3, 200])
def test_each_expert_of_a_token_may_take_what_is_its_own(num_tokens):
    """And one gives more numbers than it takes; what is in no expert is 0."""
    rng = np.random.default_rng(0)
    chosen = np.array([rng.permutation(NUM_EXPERTS)[:2] for _ in range(num_tokens)])
    chosen[num_tokens // 2] = NUM_EXPERTS
    x = rng.normal(size=(num_tokens, 2, WIDTH)).astype(np.float32)
    w = rng.normal(size=(NUM_EXPERTS, 2 * WIDTH, WIDTH)).astype(np.float32)

    @jax.jit
    def each(x: jax.Array, chosen: jax.Array) -> jax.Array:
        return each_expert(
            x,
            chosen,
            lambda x_RD, expert: jnp.dot(x_RD, jnp.asarray(w)[expert].T, precision="highest"),
            num_experts=NUM_EXPERTS,
        )

    padded = np.concatenate([w, np.zeros_like(w[:1])])
    want = np.einsum("tkfd,tkd->tkf", np.float64(padded)[chosen], x)
    np.testing.assert_allclose(each(x, np.int32(chosen)), want, rtol=0, atol=2e-5)


def test_groups_bound_the_choice():
    """Two of four groups, by the sum of their two largest scores: the best expert may be in none of
    them.
    """
    logits = np.full((1, 8), -4.0, np.float32)
    logits[0, 0] = 3.0  # alone in its group
    logits[0, [2, 3]], logits[0, [6, 7]] = 2.5, 2.0
    how = {"num_used": 3, "score": "sigmoid", "num_groups": 4, "num_groups_used": 2}
    chosen, weight = Router(**how, is_normalised=True, scale=1.5)(logits)
    assert set(chosen[0].tolist()) == {2, 3, 6} or set(chosen[0].tolist()) == {2, 3, 7}
    assert float(weight.sum()) == pytest.approx(1.5)
    by_best = Router(**how, by_two=False)(logits)[0]
    assert 0 in by_best[0].tolist()
    biased = Router(**how)(logits, jnp.zeros(8).at[jnp.array([4, 5])].set(9.0))[0]
    assert {4, 5} < set(biased[0].tolist())


@pytest.mark.parametrize("rest", [[-1.0, -2.0, -3.0], [0.0, -1.0, -2.0]])
def test_a_best_logit_of_zero_is_near_itself(rest):
    """One expert after the other: each weighs 1 where no other is near, an equal one half."""
    router = Router(num_used=2, margin=0.02)
    chosen, weight = jax.jit(router.__call__)(np.array([[0.0, *rest]], np.float32))
    assert chosen.tolist() == [[0, 1]]
    assert weight.tolist() == [[0.5 if rest[0] == 0 else 1.0, 1.0]]


LOGITS = np.concatenate(
    [np.linspace(-60, 60, 241), [-1e30, -3e4, -200, -104, -87, 0, 88, 200, 1e30]]
)


def test_the_square_root_of_softplus_is_torchs():
    torch = pytest.importorskip("torch")
    logits = LOGITS.astype(np.float32)[None]
    want = torch.nn.functional.softplus(torch.tensor(logits)).sqrt().numpy()[0]
    router = Router(num_used=logits.shape[1], score="sqrtsoftplus")
    chosen, weight = map(np.asarray, jax.jit(router.__call__)(logits))
    got = np.zeros_like(want)
    got[chosen[0]] = weight[0]
    # Of logits below -87 a CPU has no exponential: what it flushes to 0 are scores below 2e-19.
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=2e-19)


def test_a_score_that_nobody_knows_is_refused():
    with pytest.raises(ValueError, match="got 'sqrtsoftmax'"):
        Router(num_used=1, score="sqrtsoftmax")


def test_experts_that_are_given_weigh_what_their_logits_say():
    """Whatever the bias, the groups and the experts of the largest scores."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(7, 8)).astype(np.float32)
    given = np.array([rng.permutation(8)[:3] for _ in logits], np.int32)
    how = {"score": "sqrtsoftplus", "is_normalised": True, "scale": 1.5}
    router = Router(num_used=3, num_groups=4, num_groups_used=2, **how)
    chosen, weight = router(logits, jnp.arange(8.0), given)
    np.testing.assert_array_equal(chosen, given)
    score = np.sqrt(np.log1p(np.exp(np.take_along_axis(logits.astype(float), given, axis=1))))
    want = score / score.sum(axis=1, keepdims=True) * 1.5
    np.testing.assert_allclose(weight, want, rtol=2e-6)
    for asked in ({"margin": 0.1}, {"of_chosen": True}):
        with pytest.raises(ValueError, match="got a table of them"):
            Router(num_used=3, **asked)(logits, None, given)
        with pytest.raises(ValueError, match="got a bias of the choice"):
            Router(num_used=3, **asked)(logits, jnp.zeros(8))
