"""Whatever pages store, however many there are, and on whatever they are attended to, tokens that
were proposed ahead are those of the plain engine; drawn ones have the model's distribution.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxkv import LLM, SamplingParams
from jaxkv.ops.attention import BACKENDS
from jaxkv.ops.attention.pallas_tpu import PallasTpu
from jaxkv.programs import speculation
from jaxkv.testing import engine_of
from predicting import make_predicting
from speculating import (
    DRAWN,
    FEW,
    GREEDY,
    NGRAM,
    ahead_of,
    num_accepted,
    prompts_of,
    proposes_always,
    tokens_of,
)
from tiny import SMALL, make_checkpoint, tiny_config

__all__ = ["proposes_always"]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compile", "proposes_always")]

LIMITS = SMALL | {"max_num_seqs": 2, "max_num_batched_tokens": 16}
"""Few programs: most of a test is to compile them."""


# --- greedy tokens


PLAIN = ("float32", "bfloat16")
QUANTISED = ("int8", "fp8_e4m3", "fp8_e5m2", "int4", "turboquant4", "turboquant3", "turboquant2.5")


@pytest.mark.parametrize(("page_size", "num_left"), [(8, 14), (16, None)])
@pytest.mark.parametrize("codec", [*PLAIN, *QUANTISED])
@pytest.mark.parametrize("method", ["ngram", "draft_model", "mtp"])
def test_greedy_tokens_of_200_prompts(tmp_path, method, codec, page_size, num_left):
    """With pages for all rows and, the engine being the same, with `num_left` of them, too few."""
    config, proposes = tiny_config("qwen3", num_hidden_layers=2), NGRAM
    if method == "mtp":
        directory = make_predicting(tmp_path / "model", "glm4_moe", head_dim=16)
        proposes = {"method": method, "num_speculative_tokens": 4}
    else:
        directory = make_checkpoint(tmp_path / "model", config)
    if method == "draft_model":
        draft = make_checkpoint(tmp_path / "draft", config | {"num_hidden_layers": 1}, seed=2)
        proposes = {"method": method, "model": str(draft), "num_speculative_tokens": 4}
    # Else what is computed anew behind a preemption need not get the bits that pages had.
    exact = {"deterministic": codec != "float32" and num_left is not None}
    limits = LIMITS | {"block_size": page_size, "kv_cache_dtype": codec} | exact
    plain, ahead = LLM(directory, **limits), LLM(directory, **limits, **ahead_of(2, proposes))
    prompts = prompts_of(200, 151, 60)
    asked = [(FEW, GREEDY)[number % 2] for number in range(200)]
    want = tokens_of(plain.generate(prompts, asked, use_tqdm=False))
    assert tokens_of(ahead.generate(prompts, asked, use_tqdm=False)) == want
    engine_of(ahead).check()
    assert num_accepted(ahead) > 300
    if num_left is None:
        return

    scheduler = engine_of(ahead).scheduler
    ahead.reset_prefix_cache()
    scheduler.allocator.take(scheduler.allocator.num_free - num_left)
    assert tokens_of(ahead.generate(prompts, asked, use_tqdm=False)) == want
    assert scheduler.num_preemptions > 0
    assert scheduler.allocator.num_free == num_left


# --- drawn tokens

VOCAB_SIZE, NUM_DRAWN, NUM_SAMPLES = 4, 4, 25_000
"""10^5 draws, four of each request."""

TEMPERATURE = 1.5
LEAST_P = 1e-3
"""A right engine fails once in so many seeds; these are fixed."""


@pytest.fixture(scope="module")
def drawing(tmp_path_factory):
    """Makes engines of a model with four tokens."""
    config = tiny_config("qwen3", num_hidden_layers=1, vocab_size=VOCAB_SIZE)
    directory = make_checkpoint(tmp_path_factory.mktemp("few") / "model", config)
    limits = SMALL | {"max_model_len": 32} | ahead_of(SMALL["max_num_seqs"])
    return lambda: LLM(directory, **limits)


PROMPT = {"prompt_token_ids": [3, 0, 1, 3, 0, 1, 3, 0]}


def drawn(llm: LLM, count: int) -> Counter[tuple[int, ...]]:
    """Counts what so many requests got, each with a seed of its own."""
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=NUM_DRAWN, ignore_eos=True)
    asked = [replace(params, seed=number) for number in range(count)]
    outputs = llm.generate([PROMPT] * count, asked, use_tqdm=False)
    return Counter(map(tuple, tokens_of(outputs)))


def probabilities(llm: LLM) -> dict[tuple[int, ...], float]:
    """Computes those of all sequences from the log-probabilities of each token, as steps give them
    in which nothing is proposed.
    """
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=VOCAB_SIZE, ignore_eos=True)
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NUM_DRAWN):
        prompts = [{"prompt_token_ids": [*PROMPT["prompt_token_ids"], *before]} for before in found]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        longer = {}
        for (before, p), output in zip(found.items(), outputs, strict=True):
            (entry,) = output.outputs[0].logprobs
            weights = {token: np.exp(one.logprob / TEMPERATURE) for token, one in entry.items()}
            total = sum(weights.values())
            longer |= {(*before, token): p * one / total for token, one in weights.items()}
        found = longer
    return found


def chi_square_p(counts: Counter, expected: dict[tuple[int, ...], float]) -> float:
    """Returns how often counts are further than these from what is expected, where it is right."""
    num = sum(counts.values())
    often = {one: p * num for one, p in expected.items() if p * num >= 5}
    square = sum((counts[one] - mean) ** 2 / mean for one, mean in often.items())
    # The others count as one (W. G. Cochran, 1954).
    rest, mean = num - sum(counts[one] for one in often), num - sum(often.values())
    if mean >= 5:
        square += (rest - mean) ** 2 / mean
    return float(jax.scipy.stats.chi2.sf(square, len(often) - (mean < 5)))


def keep_what_is_proposed(patch: pytest.MonkeyPatch) -> None:
    """Breaks the step: it takes proposals for what it has drawn."""
    at_each, sample, seen = speculation._at_each, speculation.sample, []

    def noted(sampling, state, ahead_Ba):
        seen.append(ahead_Ba)
        return at_each(sampling, state, ahead_Ba)

    def kept(*arguments, **options):
        found = sample(*arguments, **options)
        ahead_BA = jax.numpy.pad(seen[-1], ((0, 0), (0, 1)), constant_values=speculation.NO_TOKEN)
        is_ahead_S = ahead_BA.ravel() != speculation.NO_TOKEN
        return replace(found, token_B=jax.numpy.where(is_ahead_S, ahead_BA.ravel(), found.token_B))

    patch.setattr(speculation, "_at_each", noted)
    patch.setattr(speculation, "sample", kept)


def test_drawn_tokens_have_the_distribution_of_the_model(drawing):
    """Four tokens at once are counted, so that what depends on those before counts too."""
    ahead = drawing()
    expected = probabilities(ahead)
    assert len(expected) == VOCAB_SIZE**NUM_DRAWN
    assert chi_square_p(drawn(ahead, NUM_SAMPLES), expected) > LEAST_P
    assert num_accepted(ahead) > NUM_SAMPLES / 10


def test_a_step_that_keeps_what_is_proposed_is_found_out(drawing, own, monkeypatch):
    keep_what_is_proposed(monkeypatch)
    jax.clear_caches()
    own.cache_clear()
    ahead = drawing()
    assert chi_square_p(drawn(ahead, NUM_SAMPLES // 20), probabilities(ahead)) < 1e-12
    own.cache_clear()


# --- other devices


def test_steps_of_several_tokens_on_the_tpu_kernels(monkeypatch, tmp_path):
    monkeypatch.setitem(BACKENDS, "interpreted", PallasTpu(interpret=True))
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    path = make_checkpoint(tmp_path / "model", tiny_config("qwen3", num_hidden_layers=2, **heads))
    limits = LIMITS | {"block_size": 16, "num_gpu_blocks_override": 8, "backend": "interpreted"}
    plain, ahead = LLM(path, **limits), LLM(path, **limits, **ahead_of(2))
    want, got = (
        tokens_of(llm.generate(prompts_of(3, 151, 30), [FEW, GREEDY, DRAWN], use_tqdm=False))
        for llm in (plain, ahead)
    )
    assert got == want
    assert num_accepted(ahead) > 0


# In a process of its own: how many devices a CPU has is fixed when JAX starts.
TWO_DEVICES = """
import json, sys
import jaxkv.engine.speculation
from jaxkv import LLM, SamplingParams
from jaxkv.testing import engine_of

jaxkv.engine.speculation.LEAST_GAIN = 0.0
path, options, method, prompts, tokens = sys.argv[1], *map(json.loads, sys.argv[2:])
greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
few = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, allowed_token_ids=tokens)
drawn = SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True, allowed_token_ids=tokens)
found = []
for more in ({}, method):
    llm = LLM(path, **options, **more)
    outputs = llm.generate(prompts, [greedy, few, drawn], use_tqdm=False)
    found.append([output.outputs[0].token_ids for output in outputs])
print(json.dumps([*found, int(engine_of(llm)._speculator.accepted_k.sum())]))
"""


def test_two_devices_accept_alike(tmp_path):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 152}
    path = make_checkpoint(tmp_path / "model", tiny_config("qwen3", num_hidden_layers=2, **heads))
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    options = LIMITS | {"tensor_parallel_size": 2}
    asked = map(json.dumps, (options, ahead_of(2), prompts_of(3, 152, 40), FEW.allowed_token_ids))
    done = subprocess.run(
        [sys.executable, "-c", TWO_DEVICES, path, *asked],
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    want, got, accepted = json.loads(done.stdout)
    assert got == want
    assert accepted > 0
