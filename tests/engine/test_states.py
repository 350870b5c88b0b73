"""Rows with a recurrent state: however they are computed, shared, forked or interrupted, the tokens
are those of a row alone.

Before every step all memory that no request owns is NaN, and so are the states in slots that no row
and no snapshot has.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from families import hf_config, make_hf_model, text_config
from jaxkv import LLM, BeamSearchParams, RequestOutput, SamplingParams, functional
from jaxkv.testing import engine_of
from parity import torch
from poison import poisoned

__all__ = ["torch"]

pytestmark = pytest.mark.usefixtures("quick_compile", "one_loop")

NUM_NEW = 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
LENGTHS = (1, 5, 23, 41, 17)


VARIANTS = {  # with the bytes of one row's state
    "lfm2": 2 * 48 * 2 * 4,  # the last two inputs of 48 channels, in two layers
    "mamba2": 3 * (12 * 8 * 16 + (12 * 8 + 2 * 2 * 16) * 3) * 4,  # without any attention
    "rwkv": 2 * (48 + 48 * 3 + 48) * 4,  # what came before each of two mixers, sums of one
    "granitemoehybrid": 2 * (12 * 8 * 16 + (12 * 8 + 2 * 16) * 3) * 4,  # Mamba2
    "nemotron_h": (12 * 8 * 16 + (12 * 8 + 2 * 2 * 16) * 3) * 4,  # beside layers without any mixer
    "zamba2": 5 * (12 * 8 * 16 + (12 * 8 + 2 * 2 * 16) * 3) * 4,  # behind blocks that layers share
    "qwen3_next": 3 * (4 * 8 * 12 + (2 * 2 * 8 + 4 * 12) * 3) * 4,  # the gated delta rule
    # Beside the delta rule n-grams of up to 4 tokens, and inputs of a dilated convolution.
    "qwen4_exp_text": 2 * (4 * 8 * 12 + (2 * 2 * 8 + 4 * 12) * 3 + 3 * 3 + 3 * 48 * 2 * 4) * 4,
    "xlstm": 3 * (4 * 16 * (32 + 1) + 4) * 4,  # sums of keys, and exponents
    "zaya-plain": 3 * (8 + (6 + 2) * 8 * (1 + 1)) * 4,  # values, inputs of two convolutions
    # Inputs of convolutions of keys and values, and of what blocks give.
    "inkling_text-plain": 3 * (2 * 2 * 8 * 2 + 2 * 48 * 2) * 4,
    # What makes entries, with what chooses them and without.
    "deepseek_v4": (2 * 8 * 2 * 2 * (16 + 12) + 8 * 2 * 16) * 4,
}


def each(*fast: str) -> list[Any]:
    """Lists the variants, of which all but these are slow."""
    slow = pytest.mark.slow
    return [pytest.param(x, marks=() if x in fast else slow, id=x) for x in VARIANTS]


@pytest.fixture(scope="module", params=each("lfm2"))
def variant(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(variant, tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp(variant)


@pytest.fixture(scope="module")
def model(torch, variant, folder) -> Any:
    """Computes the same in transformers."""
    return make_hf_model(torch, hf_config(variant), folder)


@pytest.fixture(scope="module")
def llm(model, folder) -> LLM:
    """Prompts come in chunks, and rows have too few pages for all of them."""
    return new_llm(folder)


def new_llm(folder: Path, **options: Any) -> LLM:
    limits = {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 20, "block_size": 8}
    made = {"skip_tokenizer_init": True, "dtype": "float32", "lazy_compile": True}
    return LLM(folder, max_num_seqs=4, **limits | made | options)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 151, length).tolist()


PROMPTS = [prompt_of(length, seed) for seed, length in enumerate(LENGTHS)]


def generate(
    llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY
) -> list[RequestOutput]:
    """With NaN around; nothing is held afterwards."""
    with poisoned(engine_of(llm)):
        outputs = llm.generate([{"prompt_token_ids": x} for x in prompts], params, use_tqdm=False)
    assert engine_of(llm).scheduler.allocator.num_used == 0
    return outputs


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def alone(torch, model) -> list[list[int]]:
    """Returns what transformers makes of each prompt."""
    return [of_transformers(torch, model, ids)[0] for ids in PROMPTS]


def of_transformers(torch: Any, model: Any, ids: list[int], **options: Any) -> list[list[int]]:
    given = {"do_sample": False, "max_new_tokens": NUM_NEW, "pad_token_id": 0} | options
    return model.generate(torch.tensor([ids]), **given)[:, len(ids) :].tolist()


@pytest.mark.parametrize("variant", each("mamba2"), indirect=True)
def test_rows_together_in_chunks_and_preempted_get_what_they_get_alone(llm, alone):
    before = engine_of(llm).scheduler.num_preemptions
    assert tokens_of(generate(llm, PROMPTS + PROMPTS)) == alone * 2
    assert engine_of(llm).scheduler.num_preemptions > before


def test_a_prefix_that_is_found_gives_the_tokens_of_one_that_is_not(llm, alone):
    for ids, expected, num_cached in zip(PROMPTS, alone, (0, 0, 16, 40, 16), strict=True):
        llm.reset_prefix_cache()
        first, again = (generate(llm, [ids])[0] for _ in range(2))
        assert tokens_of([first, again]) == [expected] * 2
        # Up to the last page border that is not behind the last token.
        assert (first.num_cached_tokens, again.num_cached_tokens) == (0, num_cached)


@pytest.mark.slow
def test_a_state_stays_beside_a_page_of_which_a_window_of_one_token_sees_nothing(tmp_path):
    config = text_config("recurrent_gemma") | {"attention_window_size": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    llm = new_llm(tmp_path, load_format="dummy")
    first, again = (generate(llm, [PROMPTS[3]])[0] for _ in range(2))
    assert tokens_of([first]) == tokens_of([again])
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 40)


def test_what_prompts_have_in_common_is_kept_once_it_is_seen_to_be_common(torch, model, llm):
    common = prompt_of(30, 7)
    prompts = [common + prompt_of(20, seed) for seed in (8, 9, 10)]
    llm.reset_prefix_cache()
    found = [generate(llm, [ids])[0] for ids in prompts]
    assert tokens_of(found) == [of_transformers(torch, model, ids)[0] for ids in prompts]
    assert [output.num_cached_tokens for output in found] == [0, 0, 24]


def test_samples_of_one_prompt_go_on_from_one_state(llm, alone):
    llm.reset_prefix_cache()
    before = engine_of(llm).scheduler.num_found
    drawn = replace(GREEDY, n=3, temperature=1.0, top_k=1)
    (output,) = generate(llm, [PROMPTS[3]], drawn)
    assert [list(one.token_ids) for one in output.outputs] == [alone[3]] * 3
    assert engine_of(llm).scheduler.num_found >= before + 2 * 32


def test_beams_take_states_over(torch, model, llm):
    params = BeamSearchParams(beam_width=4, max_tokens=10, ignore_eos=True)
    with poisoned(engine_of(llm)):
        found = llm.beam_search([{"prompt_token_ids": x} for x in PROMPTS[2::2]], params)
    for ids, output in zip(PROMPTS[2::2], found, strict=True):
        beams = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 10}
        beams["use_cache"] = False  # transformers gives states of RWKV to no beam
        got = [one.tokens[len(ids) :] for one in output.sequences]
        assert got == of_transformers(torch, model, ids, **beams)


def test_an_aborted_request_leaves_no_slot_behind(llm, alone):
    stream = llm.stream({"prompt_token_ids": PROMPTS[3]}, replace(GREEDY, max_tokens=40))
    next(stream)
    stream.close()
    engine_of(llm).check()
    assert tokens_of(generate(llm, PROMPTS)) == alone


def test_snapshots_leave_with_their_pages(llm):
    llm.reset_prefix_cache()
    snapshots = engine_of(llm).scheduler.allocator.snapshots
    assert not snapshots._slot_of
    first, second = prompt_of(20, 20), prompt_of(128, 21)
    generate(llm, [first])
    assert len(snapshots._slot_of) == 1
    generate(llm, [second])  # takes every page
    assert len(snapshots._slot_of) == 1
    assert [generate(llm, [ids])[0].num_cached_tokens for ids in (second, first)] == [120, 0]


def test_what_cannot_hold_for_recurrent_states_is_refused_by_name(model, folder):
    with pytest.raises(NotImplementedError, match="recurrent states, which rows here cannot share"):
        functional.load(folder, skip_tokenizer_init=True)
    with pytest.raises(NotImplementedError, match="kv_policy streaming: expected full for a model"):
        new_llm(folder, kv_policy="streaming", kv_budget=64)


def test_states_are_counted(llm, variant):
    blueprint = llm._blueprint
    assert blueprint.state_nbytes == VARIANTS[variant] * (4 + 8)  # rows and snapshots
    states = sum(x.nbytes for arrays in engine_of(llm).kv.states for x in arrays)
    assert states == blueprint.state_nbytes
    assert "recurrent states of all slots" in llm.describe()
