"""Layers with a window: pages that no later query sees are given back, and nobody misses them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dense import Dense
from jaxkv import LLM, RequestOutput, SamplingParams
from jaxkv.build import limits
from jaxkv.errors import CapacityError
from jaxkv.models.spec import ModelSpec
from jaxkv.testing import config_of, engine_of
from poison import poisoned
from tiny import make_checkpoint, tiny_config

pytestmark = pytest.mark.usefixtures("quick_compile", "one_loop")

WINDOW, SIZE, CHUNK = 64, 16, 48
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)


KINDS = [(WINDOW,) * 4, (WINDOW, None, WINDOW, WINDOW)]
tables_of_their_own = pytest.mark.parametrize(
    "dense", [pytest.param(KINDS[0], marks=pytest.mark.slow), KINDS[1]], indirect=True, ids=str
)
"""A table for each group of layers; one that all share is slow: test_scheduler_random.py has it."""


@pytest.fixture(scope="module", params=KINDS, ids=str)
def dense(request, tmp_path_factory) -> Dense:
    """All layers with a window, which share a page table; or three of four, each with its own."""
    kinds = ["full_attention" if one is None else "sliding_attention" for one in request.param]
    config = tiny_config(
        "qwen3-layer-types",
        sliding_window=WINDOW,
        num_hidden_layers=len(kinds),
        layer_types=kinds,
        max_position_embeddings=2304,
    )
    directory = make_checkpoint(tmp_path_factory.mktemp("windows") / "model", config)
    return Dense(directory, request.param, "float32")


def new_llm(dense: Dense, **options: Any) -> LLM:
    sizes = {"max_num_seqs": 4, "block_size": SIZE, "max_num_batched_tokens": CHUNK}
    made = {"skip_tokenizer_init": True, "dtype": "float32", "lazy_compile": True}
    return LLM(dense.directory, **sizes | made | options)


@pytest.fixture(scope="module")
def llm(dense) -> LLM:
    return new_llm(dense, deterministic=True)


def prompt_of(length: int, seed: int = 0) -> dict[str, list[int]]:
    return {"prompt_token_ids": np.random.default_rng(seed).integers(3, 151, length).tolist()}


def generate(llm: LLM, prompts: list[Any], params: SamplingParams = GREEDY) -> list[RequestOutput]:
    with poisoned(engine_of(llm)):
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert engine_of(llm).scheduler.allocator.num_used == 0
    return outputs


def figures(output: RequestOutput) -> list[Any]:
    (one,) = output.outputs
    logprobs = [[entry.logprob for entry in step.values()] for step in one.logprobs]
    return [one.token_ids, logprobs]


@tables_of_their_own
def test_a_row_of_2048_tokens_holds_window_chunk_and_a_page(dense, monkeypatch):
    """And gets, with NaN in all memory that it does not hold, what it gets of an engine that keeps
    everything, to the bit.
    """
    llm, most = new_llm(dense, deterministic=True), 0
    engine = engine_of(llm)
    launch = engine._launch

    def watching(*arguments: Any) -> Any:
        nonlocal most
        holds = [request.hold for request in engine.scheduler.running]
        most = max(most, *(len(part.pages) for hold in holds for part in hold.parts if part.window))
        return launch(*arguments)

    monkeypatch.setattr(engine, "_launch", watching)
    (output,) = generate(llm, [prompt := prompt_of(2048)])
    config, num_whole = config_of(llm), dense.windows.count(None)
    width = config.window_pages(WINDOW)
    assert SIZE < most * SIZE <= width * SIZE <= WINDOW + CHUNK + SIZE
    assert config.windows == ((WINDOW,) if not num_whole else (WINDOW, WINDOW, WINDOW, 0))
    # The pool is what four such rows take, not four of 2,304 tokens in all layers.
    num_windowed = len(config.windows) - num_whole
    assert config.num_pages == 4 * (num_windowed * width + num_whole * 2304 // SIZE)
    assert f"window {WINDOW}: {width} pages per row" in llm.describe()
    assert f"window {WINDOW}" not in new_llm(dense, max_model_len=128).describe()

    monkeypatch.setattr(ModelSpec, "longest_window", None)
    monkeypatch.setattr(limits, "MAX_TABLES", 0)
    whole = new_llm(dense, deterministic=True, max_num_seqs=2)
    assert config_of(whole).num_pages == 2 * 2304 // SIZE
    assert figures(generate(whole, [prompt])[0]) == figures(output)


@tables_of_their_own
def test_it_is_what_a_dense_decoder_computes(llm, dense):
    prompts = [prompt_of(300), prompt_of(90, seed=1), prompt_of(20, seed=2)]
    for prompt, output in zip(prompts, generate(llm, prompts), strict=True):
        (one,), ids = output.outputs, prompt["prompt_token_ids"]
        logits = dense.logits([*ids, *one.token_ids][:-1])[len(ids) - 1 :]
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        for want, entry in zip(logprobs, one.logprobs, strict=True):
            for token, found in entry.items():
                assert found.logprob == pytest.approx(want[token], abs=1e-4)


@tables_of_their_own
def test_a_hit_is_a_miss_to_the_bit_and_takes_the_window_only(dense):
    pages = 60 if None not in dense.windows else 3 * 20 + 66
    llm = new_llm(dense, deterministic=True, num_gpu_blocks_override=pages)
    prompt, other = prompt_of(500), prompt_of(40, seed=1)
    longer = {"prompt_token_ids": prompt["prompt_token_ids"] + other["prompt_token_ids"]}
    alone = new_llm(dense, deterministic=True, enable_prefix_caching=False)
    want = [figures(output) for output in generate(alone, [prompt, longer])]
    (miss,) = generate(llm, [prompt])
    hit, further = generate(llm, [prompt, longer])
    assert [figures(miss), figures(hit), figures(further)] == [want[0], *want]
    assert (miss.num_cached_tokens, hit.num_cached_tokens) == (0, 496)
    assert further.num_cached_tokens == 496
    # Other prompts take the room of its first pages; those of the window are the last to go.
    generate(llm, [prompt_of(900, seed=2)])
    (again,) = generate(llm, [prompt])
    assert figures(again) == want[0]


@tables_of_their_own
def test_rows_that_push_each_other_out_get_what_they_get_alone(dense):
    llm = new_llm(dense, deterministic=True)
    # A row of 250 tokens needs 9 pages of a table with a window, and 16 of one without.
    pages = 12 if None not in dense.windows else 12 * 3 + 16
    tight = new_llm(dense, deterministic=True, num_gpu_blocks_override=pages)
    prompts = [prompt_of(n, seed=n) for n in (20, 150, 25, 18)]
    params = replace(GREEDY, max_tokens=100)
    want = [figures(generate(llm, [prompt], params)[0]) for prompt in prompts]
    assert [figures(output) for output in generate(tight, prompts, params)] == want
    assert engine_of(tight).scheduler.num_preemptions > 0


@tables_of_their_own
def test_a_pool_has_a_page_for_each_table_of_a_row(dense):
    num_tables = 1 if None not in dense.windows else 4
    smallest = new_llm(dense, num_gpu_blocks_override=num_tables)
    assert config_of(smallest).max_len == smallest.num_kv_tokens == SIZE
    generate(smallest, [prompt_of(9)])
    if num_tables > 1:
        with pytest.raises(CapacityError, match="4 pages needed for one in each page table"):
            new_llm(dense, num_gpu_blocks_override=num_tables - 1)
