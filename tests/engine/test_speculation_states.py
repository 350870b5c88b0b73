"""Rows with recurrent states get the tokens and log-probabilities that they get without proposals,
though a step of several tokens has been through the ones that do not hold.

Before every step all memory that no request owns is NaN, the slots of states after proposed tokens
too.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ahead import assert_same, counted, prompts_of
from families import text_config
from jaxkv import LLM, BeamSearchParams, SamplingParams
from jaxkv.testing import blueprint_of, config_of, engine_of
from jaxkv.tools.chips import parse_target
from jaxkv.tools.deployment import deploy
from poison import poisoned
from predicting import make_predicting
from speculating import proposes_always
from tiers import some
from tiny import SMALL, make_checkpoint, tiny_config

__all__ = ["proposes_always"]

pytestmark = pytest.mark.usefixtures("proposes_always")

NGRAM = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
AHEAD = {"num_speculative_tokens": 3, "disable_by_batch_size": SMALL["max_num_seqs"]}
LIMITS = SMALL | {"max_num_batched_tokens": 48}
GREEDY = SamplingParams(
    temperature=0.0, max_tokens=24, ignore_eos=True, allowed_token_ids=[5, 7, 9, 11]
)
"""With so few tokens a proposal often holds, whatever the model."""

DRAWN = replace(GREEDY, temperature=0.7, top_p=0.9)

CASES = [
    ("qwen3_next", "ngram"),  # Gated DeltaNet
    ("qwen3_next", "mtp"),
    ("qwen4_exp_text", "ngram"),  # the last tokens, and a dilated convolution
    ("lfm2", "ngram"),  # short convolutions alone
    ("lfm2", "draft_model"),
    ("mamba2", "ngram"),  # without any attention
    ("nemotron_h", "ngram"),  # Mamba2 beside layers without any mixer
    ("falcon_mamba", "ngram"),
    ("minimax", "ngram"),  # lightning attention
    ("kimi_linear", "ngram"),  # the delta rule by channel
    ("recurrent_gemma", "ngram"),  # the RG-LRU
    ("xlstm", "ngram"),  # the mLSTM
    ("inkling_text", "ngram"),  # convolutions of four kinds
    ("inkling2_text", "ngram"),  # some of which tokens decide
    ("zaya", "ngram"),  # what comes before queries, keys and values
]

CHANGES = {"recurrent_gemma": {"num_attention_heads": 4, "num_key_value_heads": 1}}
"""Of blocks smaller than 12 XLA:CPU adds up products in an order that the tokens of a step decide."""


def make(folder: Path, variant: str, method: str = "ngram") -> tuple[Path, dict]:
    """Writes a model, and returns it with what engines that propose tokens have."""
    changes = CHANGES.get(variant, {})
    if method == "mtp":
        return make_predicting(folder / "model", variant), AHEAD | {"method": "mtp"}
    model = make_checkpoint(folder / "model", text_config(variant) | changes)
    if method == "ngram":
        return model, AHEAD | NGRAM
    draft = make_checkpoint(folder / "draft", tiny_config("qwen3"))
    return model, AHEAD | {"model": str(draft)}


@pytest.mark.parametrize(("variant", "method"), some(CASES))
def test_tokens_are_those_without_proposals(tmp_path, variant, method):
    model, config = make(tmp_path, variant, method)
    plain, ahead = LLM(model, **LIMITS), LLM(model, **LIMITS, speculative_config=config)
    prompts = prompts_of(151, 4)
    assert_same(plain, ahead, prompts, replace(GREEDY, logprobs=3))
    drawn = [replace(DRAWN, seed=seed, max_tokens=15 + 5 * seed) for seed in range(4)]
    assert_same(plain, ahead, prompts, drawn)
    found = counted(ahead)
    assert 20 < found["accepted_tokens"] < found["draft_tokens"] - 20


@pytest.mark.usefixtures("quick_compile", "one_loop")
def test_states_are_right_wherever_pages_are(tmp_path):
    """In rows that lose their pages, are forked, or go on from where the prefix cache has a state;
    and in plain loops behind those that have proposed something.
    """
    model, config = make(tmp_path, "lfm2")
    few = LIMITS | {"num_gpu_blocks_override": 30}
    plain, ahead = LLM(model, **LIMITS), LLM(model, **few, speculative_config=config)
    engine = engine_of(ahead)

    def check(prompts: list, params: SamplingParams) -> list[list[int]]:
        found = []
        for llm in (plain, ahead):
            with poisoned(engine_of(llm)):
                outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append(
                [
                    [*output.prompt_token_ids, *one.token_ids]
                    for output in outputs
                    for one in output.outputs
                ]
            )
        assert found[0] == found[1]
        return found[0]

    prompts = prompts_of(151, 6)[1:]
    whole = check(prompts, replace(GREEDY, max_tokens=60))
    assert engine.scheduler.num_preemptions > 0
    hits = engine.scheduler.num_found
    check([{"prompt_token_ids": tokens[:-2]} for tokens in whole], replace(GREEDY, max_tokens=12))
    assert engine.scheduler.num_found > hits
    check(prompts[:2], replace(DRAWN, n=3, seed=3))
    asked = (prompts[:1], BeamSearchParams(beam_width=3, max_tokens=12))
    beams = [
        [one.tokens for output in llm.beam_search(*asked) for one in output.sequences]
        for llm in (plain, ahead)
    ]
    assert beams[0] == beams[1]
    with pytest.MonkeyPatch.context() as patch:
        turns, wants = iter(range(1000)), engine._speculator.wants
        every_other = lambda requests: next(turns) % 2 == 0 and wants(requests)  # noqa: E731
        patch.setattr(engine._speculator, "wants", every_other)
        check(prompts, replace(GREEDY, max_tokens=50))
    assert counted(ahead)["accepted_tokens"] > 100


@pytest.mark.usefixtures("quick_compile", "one_loop")
def test_slots_of_proposed_tokens_are_planned(tmp_path):
    model, config = make(tmp_path, "lfm2")
    ahead = LLM(model, **LIMITS, speculative_config=config | {"disable_by_batch_size": 2})
    plain = LLM(model, **LIMITS)
    more = [blueprint_of(llm).state_nbytes for llm in (plain, ahead)]
    assert more[1] - more[0] == 2 * 3 * blueprint_of(ahead).slot_nbytes > 0
    held = [x for arrays in engine_of(ahead).kv.states for x in arrays]
    assert sum(x.nbytes for x in held) == more[1]
    assert len(config_of(ahead).snapshot_slots) == len(config_of(plain).snapshot_slots) == 8
    target = parse_target("v6e:1x1")
    planned = [
        deploy(model, target, backend="xla", max_num_seqs=32, **options).blueprint
        for options in ({}, {"speculative_config": config})
    ]
    nbytes = [blueprint.state_nbytes for blueprint in planned]
    assert np.diff(nbytes) == 4 * 3 * planned[0].slot_nbytes
