"""The engine's logprobs are those of the flax model that it was given, round after round, and only
the first round compiles.
"""

import itertools

import pytest

pytest.importorskip("flax")
pytest.importorskip("optax")

pytestmark = pytest.mark.usefixtures("quick_compile")


def check(rounds) -> None:
    assert max(one.apart for one in rounds) < 1e-5
    assert rounds[0].num_compiled == rounds[-1].num_compiled > 4


@pytest.mark.slow
def test_rollouts_have_the_training_forward_s_logprobs(script, monkeypatch):
    demo = script("rl_demo")
    monkeypatch.setattr(demo, "PROMPTS", 2)
    monkeypatch.setattr(demo, "OUTPUT_LEN", 8)
    rounds = list(itertools.islice(demo.train(seed=0, dtype="float32"), 3))
    check(rounds)
    assert len({one.reward for one in rounds}) > 1


@pytest.mark.slow
def test_rewards_rise(script):
    rounds = list(itertools.islice(script("rl_demo").train(seed=0, dtype="float32"), 25))
    check(rounds)
    assert rounds[0].reward < 0.1
    assert rounds[-1].reward > 0.6
