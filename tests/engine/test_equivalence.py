"""However it is computed, the tokens are the same: paged = dense, chunked = whole, any page size,
batch and neighbours.

Before every step all memory that no request owns is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from dense import Dense
from jaxkv import LLM, RequestOutput, SamplingParams
from jaxkv.testing import engine_of
from poison import poison_kv, poisoned
from tiers import some
from tiny import make_checkpoint, tiny_config

pytestmark = pytest.mark.usefixtures("quick_compile")

NUM_NEW = 12
LEAD = {"float32": 1e-4, "bfloat16": 0.05}
"""Of a greedy token over the next likeliest, in logits; more than rounding can turn round."""


@dataclass(frozen=True)
class Model:
    """A tiny checkpoint, its dense reference, and 16 prompts whose greedy tokens no rounding can
    change, each of which is looked for when it is asked for.
    """

    dense: Dense

    def prompt(self, number: int) -> list[int]:
        return found(self.dense, number)[0]

    def expected(self, number: int) -> list[int]:
        return found(self.dense, number)[1]

    def small_pages(self, **options: object) -> LLM:
        """4 rows, pages of 8 and few of them, 64 tokens at once."""
        limits = {
            "block_size": 8,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 4,
            "num_gpu_blocks_override": 19,
        }
        return self._llm(**limits | options)

    def large_pages(self, **options: object) -> LLM:
        """16 rows, pages of 128, 16 tokens at once."""
        return self._llm(
            **{"block_size": 128, "max_num_batched_tokens": 16, "max_num_seqs": 16} | options
        )

    def _llm(self, **options: object) -> LLM:
        dtypes = {"dtype": "float32", "kv_cache_dtype": self.dense.kv_dtype}
        return LLM(
            self.dense.directory, skip_tokenizer_init=True, lazy_compile=True, **dtypes | options
        )


WINDOWS = {
    "qwen3": (None, None, None),
    "qwen2-mixed-windows": (None, 8, 8),
    "mistral-window": (8, 8, 8),
}
LENGTHS = (1, 5, 23, 41, 130, 8, 9, 7, 16, 17, 15, 31, 64, 127, 128, 129)
WHOLE = [0, 1, 2, 11]
"""Prompts that a step of 64 tokens takes whole."""


def make_model(directory: Path, variant: str, kv_dtype: str) -> Model:
    return Model(
        Dense(make_checkpoint(directory, tiny_config(variant)), WINDOWS[variant], kv_dtype)
    )


@cache
def found(dense: Dense, number: int) -> tuple[list[int], list[int]]:
    """(prompt, its greedy tokens)."""
    rng, lead = np.random.default_rng([21, number]), 0.0
    while lead < LEAD[dense.kv_dtype]:
        ids = rng.integers(0, 151, LENGTHS[number]).tolist()
        tokens, lead = dense.greedy(ids, NUM_NEW)
    return ids, tokens


CASES = [("qwen3", "float32"), ("qwen2-mixed-windows", "bfloat16")]
CASES += [("qwen3", "bfloat16"), ("qwen2-mixed-windows", "float32"), ("mistral-window", "bfloat16")]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made: dict[tuple[str, str], Model] = {}

    def model(variant: str, kv_dtype: str) -> Model:
        key = (variant, kv_dtype)
        if key not in made:
            made[key] = make_model(tmp_path_factory.mktemp(variant), *key)
        return made[key]

    return model


def generate(
    llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[RequestOutput]:
    """With NaN around; nothing is held afterwards."""
    with poisoned(engine_of(llm)):
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False
        )
    assert engine_of(llm).scheduler.allocator.num_used == 0
    return outputs


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=20)


def logprobs_of(dense: Dense, ids: list[int]) -> np.ndarray:
    """[NUM_NEW, V] of the last NUM_NEW tokens."""
    logits = dense.logits(ids[:-1])[-NUM_NEW:]
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def assert_dense(model: Model, outputs: list[RequestOutput], indices: list[int]) -> None:
    """Tokens equal the reference's, and so do the log-probabilities of each one's 20 likeliest, up
    to rounding.

    What rounding does is seen on the reference itself, computed in float32 throughout. Where it
    rounds keys and values to bfloat16, that one does not: prefill also rounds the queries that meet
    the keys and the weights that meet the values, which does as much as rounding those.
    """
    assert tokens_of(outputs) == [model.expected(i) for i in indices]
    other = replace(model.dense, kv_dtype="float32", dtype="float32")
    differences, effects = [], []
    for i, output in zip(indices, outputs, strict=True):
        ids = model.prompt(i) + model.expected(i)
        entries = output.outputs[0].logprobs
        assert [len(entry) for entry in entries] == [20] * NUM_NEW
        at = np.array([list(entry) for entry in entries])
        want, rounded = (
            np.take_along_axis(logprobs_of(dense, ids), at, axis=1)
            for dense in (model.dense, other)
        )
        assert (want.dtype, rounded.dtype) == (np.float64, np.float32)
        got = np.array([[logprob.logprob for logprob in entry.values()] for entry in entries])
        differences.append(np.abs(got - want))
        effects.append(np.abs(rounded - want))
        # Roundings of like size: their maxima over 240 values were up to 1.9 apart (float32 pages;
        # 1.2 with bfloat16).
        assert differences[-1].max() < 3 * effects[-1].max()  # false for NaN
    assert np.median(differences) < 1.5 * np.median(effects)


@pytest.mark.parametrize(("variant", "kv_dtype"), some(CASES, CASES[1]))
def test_small_pages_and_whole_prompts_equal_dense(models, variant, kv_dtype):
    model = models(variant, kv_dtype)
    llm = model.small_pages()
    for _ in range(2):  # the second time through pages in the order in which they came back
        assert_dense(model, generate(llm, [model.prompt(i) for i in WHOLE], GREEDY), WHOLE)


@pytest.mark.slow
def test_a_pool_with_too_few_pages_for_all_gives_the_same_tokens(models):
    model = models("qwen3", "float32")
    indices = [3, 12, 3, 12, 11, 3]  # of 7, 10 and 6 pages; there are 19
    assert_dense(
        model, generate(model.small_pages(), [model.prompt(i) for i in indices], GREEDY), indices
    )


@pytest.mark.parametrize(("variant", "kv_dtype"), some(CASES))
def test_large_pages_chunked_prompts_and_a_batch_of_16_equal_dense_and_a_batch_of_1(
    models, variant, kv_dtype
):
    model = models(variant, kv_dtype)
    llm = model.large_pages()
    together = list(range(len(LENGTHS)))
    assert_dense(model, generate(llm, [model.prompt(i) for i in together], GREEDY), together)
    singly = [0, 2, 4, 13, 8]
    assert_dense(model, [generate(llm, [model.prompt(i)], GREEDY)[0] for i in singly], singly)
    backwards = together[::-1]
    assert_dense(model, generate(llm, [model.prompt(i) for i in backwards], GREEDY), backwards)


def test_rounding_of_the_pages_is_seen_by_the_comparison(models):
    """A reference that does not round is far off: bfloat16 pages are equal, not merely near."""
    model = models("qwen2-mixed-windows", "bfloat16")
    exact = replace(model.dense, kv_dtype="float32")
    for ids in map(model.prompt, range(5)):
        assert (
            np.median(np.abs(exact.logits(ids) - model.dense.logits(ids))) > 2e-3
        )  # float32 roundings add up to 2e-5


@pytest.mark.parametrize("lengths", [(15, 23), (9, 6, 23), (1, 14, 41), (16, 5, 1), (1, 1, 1)])
def test_chunks_of_one_token_behind_longer_ones_equal_dense(models, lengths):
    """A budget of 16 tokens leaves one for the first chunk of the last prompt."""
    model = models("qwen3", "float32")
    llm = model.large_pages()
    prompts = [model.prompt(4)[:length] for length in lengths]
    got = tokens_of(generate(llm, prompts, replace(GREEDY, max_tokens=4)))
    assert got == [model.dense.greedy(ids, 4)[0] for ids in prompts]


def test_memory_that_is_read_is_seen_to_be_poisoned(models):
    """The tests above could not pass if a page in use were NaN."""
    llm = models("qwen3", "float32").small_pages()
    engine = engine_of(llm)
    step = engine.step

    def step_on_nan() -> list:
        engine.kv = poison_kv(engine.kv, [])
        return step()

    engine.step = step_on_nan
    (output,) = llm.generate(
        [{"prompt_token_ids": list(range(41))}], replace(GREEDY, max_tokens=2), use_tqdm=False
    )
    first, second = output.outputs[0].logprobs
    assert np.isfinite([entry.logprob for entry in first.values()]).all()
    assert np.isnan([entry.logprob for entry in second.values()]).all()


# Seeds
# ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sampler(models):
    """A new engine with one prompt for all: only seeds make a difference. Compiled once."""
    model = models("qwen3", "float32")

    def new_llm(**options: object) -> LLM:
        return model.large_pages(**options)

    return new_llm, model.prompt(1)


def drawing(seed: int | None = None, **fields: object) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=8, ignore_eos=True, **{"temperature": 1.5} | fields)


def test_a_seed_gives_its_tokens_whatever_the_neighbours_and_the_place_in_the_batch(sampler):
    new_llm, prompt = sampler
    llm = new_llm()
    params = [
        drawing(seed, top_p=0.9 + 0.1 * (seed % 2), top_k=50 * (seed % 3)) for seed in range(10)
    ]
    together = tokens_of(generate(llm, [prompt] * 10, params))
    assert tokens_of(generate(llm, [prompt] * 10, params[::-1])) == together[::-1]
    alone = [tokens_of(generate(llm, [prompt], one))[0] for one in params[:4]]
    assert alone == together[:4]
    others = [
        drawing(99, temperature=0.0),
        drawing(7, temperature=0.5),
        params[2],
        drawing(None, min_p=0.2),
    ]
    neighbours = generate(llm, [[9, 9, 9] * 7, [1] * 30, prompt, prompt[:2]], others)
    assert tokens_of(neighbours)[2] == together[2]
    assert tokens_of(generate(new_llm(seed=5), [prompt] * 10, params)) == together


def test_different_seeds_differ_and_equal_seeds_do_not(sampler):
    new_llm, prompt = sampler
    seeds = [0, 1, 2**31, 2**32, 2**32 + 1, 2**63, 2**64 - 2, 17, 18]
    tokens = tokens_of(
        generate(new_llm(), [prompt] * len(seeds), [drawing(seed) for seed in seeds])
    )
    assert len(set(map(tuple, tokens))) == len(seeds)
    twins = tokens_of(
        generate(new_llm(), [prompt] * 3, [drawing(-2), drawing(2**64 - 2), drawing(-2)])
    )
    assert twins == [tokens[6]] * 3  # a negative seed is its 64-bit pattern


def test_requests_without_a_seed_differ_and_a_new_engine_repeats_them(sampler):
    new_llm, prompt = sampler
    llm = new_llm(seed=3)
    first = tokens_of(generate(llm, [prompt] * 5, drawing()))
    second = tokens_of(generate(llm, [prompt] * 5, drawing(-1)))  # as in vLLM, -1 is none
    assert len(set(map(tuple, first + second))) == 10
    again = new_llm(seed=3)
    assert [tokens_of(generate(again, [prompt], drawing()))[0] for _ in range(7)] == (
        first + second
    )[:7]
    other = tokens_of(generate(new_llm(seed=4), [prompt] * 5, drawing()))
    assert len(set(map(tuple, first + second + other))) == 15


def test_chunking_and_pages_do_not_change_what_a_seed_draws(models, sampler):
    new_llm, _ = sampler
    model = models("qwen3", "float32")
    prompts = [model.prompt(i) for i in WHOLE]
    params = [drawing(seed) for seed in range(4)]
    assert tokens_of(generate(model.small_pages(), prompts, params)) == tokens_of(
        generate(new_llm(), prompts, params)
    )
