"""With a draft model the tokens are those without, whatever it proposes. One that is the model
itself proposes what the model draws: its pages are complete wherever the model's are.

Before every step all memory that no request owns is NaN, in the pages of both.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import jaxkv.engine.speculation
from ahead import assert_same, counted, prompts_of
from families import text_config
from jaxkv import LLM, SamplingParams
from jaxkv.testing import blueprint_of, engine_of
from jaxkv.tools.chips import parse_target
from jaxkv.tools.deployment import deploy
from poison import poisoned
from tiers import some
from tiny import SMALL, VARIANTS, make_checkpoint, tiny_config

pytestmark = pytest.mark.usefixtures("quick_compile", "one_loop")

GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=0.8, top_p=0.95, seed=3)
ROWS = SMALL["max_num_seqs"]


@pytest.fixture(autouse=True)
def _always(monkeypatch) -> None:
    """Proposes wherever it may, whatever the draft model costs."""
    monkeypatch.setattr(jaxkv.engine.speculation, "LEAST_GAIN", 0.0)


def ahead_by(directory: Path, **keys: object) -> dict:
    config = {"model": directory, "num_speculative_tokens": 3, "disable_by_batch_size": ROWS}
    return {"speculative_config": config | keys}


def make(directory: Path, variant: str, *, seed: int = 0, **changes: object) -> Path:
    config = tiny_config(variant) if variant in VARIANTS else text_config(variant)
    return make_checkpoint(directory, config | changes, seed=seed)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("draft") / "model", "qwen3")


@pytest.fixture(scope="module")
def plain(model) -> LLM:
    return LLM(model, **SMALL)


@pytest.fixture(scope="module")
def twin(model) -> LLM:
    """An engine whose draft model is the model."""
    return LLM(model, **SMALL, **ahead_by(model))


def share_held(llm: LLM, prompts: list, params: SamplingParams | list[SamplingParams]) -> float:
    """Returns which part of what is proposed meanwhile holds."""
    before = counted(llm)
    with poisoned(engine_of(llm)):
        llm.generate(prompts, params, use_tqdm=False)
    after = counted(llm)
    drafted, held = (after[name] - before[name] for name in ("draft_tokens", "accepted_tokens"))
    assert drafted > 10
    return held / drafted


DRAFTS = ["llama", "deepseek_v3"]


@pytest.mark.parametrize("variant", some(DRAFTS, "llama"))
def test_tokens_are_those_without_a_draft_model(tmp_path, model, plain, variant):
    """Of another family, with other heads and pages; prompts are longer than a step."""
    changes = {"num_hidden_layers": 1, "num_key_value_heads": 3} if variant == "llama" else {}
    other = make(tmp_path / "draft", variant, seed=1, **changes)
    ahead = LLM(model, **SMALL, **ahead_by(other, quantization="int8"))
    prompts = prompts_of(151, 7)
    few = {"allowed_token_ids": [5, 7, 9, 11]}
    assert_same(plain, ahead, prompts, replace(GREEDY, logprobs=3, **few))
    asked = [replace(DRAWN, seed=seed, **few) for seed in range(6)]
    asked.append(replace(DRAWN, repetition_penalty=1.3, min_tokens=9, stop_token_ids=[9], **few))
    assert_same(plain, ahead, prompts, asked)
    found = counted(ahead)
    assert 0 < found["accepted_tokens"] < found["draft_tokens"]


def test_a_draft_model_that_is_the_model_proposes_what_comes(twin):
    """Sampled tokens too: it draws by the row's seed."""
    prompts = prompts_of(151, 4)
    asked = [GREEDY, DRAWN, replace(DRAWN, seed=4, top_k=9, presence_penalty=0.7, min_tokens=20)]
    asked.append(replace(GREEDY, repetition_penalty=1.4, logit_bias={9: 3.0}))
    assert share_held(twin, prompts, asked) == 1


def test_its_pages_are_complete_wherever_those_of_the_model_are(twin):
    """Behind loops and steps that proposed nothing, in pages that others have filled, in copies."""
    engine = engine_of(twin)
    prompts = prompts_of(151, 5)[3:]
    long = [{"prompt_token_ids": 2 * one["prompt_token_ids"]} for one in prompts]
    # As many rows as do not propose fill the pages, and steps do while others come.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._speculator, "most_rows", 0)
        filled = [one.outputs[0].token_ids for one in twin.generate(long, GREEDY, use_tqdm=False)]
    again = [
        {"prompt_token_ids": one["prompt_token_ids"] + list(ids)}
        for one, ids in zip(long, filled, strict=True)
    ]
    hits = engine.scheduler.num_found
    assert share_held(twin, again, DRAWN) == 1
    assert engine.scheduler.num_found > hits
    assert share_held(twin, again[:1], replace(DRAWN, n=3)) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._speculator, "wants", wants_by_turns(engine._speculator.wants))
        assert share_held(twin, long, [DRAWN, replace(GREEDY, max_tokens=50)]) == 1


def wants_by_turns(wants):
    turns = iter(range(1000))
    return lambda requests: next(turns) % 2 == 0 and wants(requests)


@pytest.mark.slow
def test_preempted_rows_and_pages_back_from_the_host(model, plain):
    few = SMALL | {"num_gpu_blocks_override": 14, "kv_host_bytes": 2**22}
    ahead = LLM(model, **few, **ahead_by(model))
    prompts = prompts_of(151, 5)[::-1]
    assert_same(plain, ahead, prompts, replace(DRAWN, max_tokens=40))
    engine = engine_of(ahead)
    assert engine.scheduler.num_preemptions > 0
    assert share_held(ahead, prompts_of(151, 6)[:1] + prompts[:1], GREEDY) == 1
    assert sum(one.value for one in ahead.get_metrics() if "host" in one.name and "hit" in one.name)


def test_memory_is_what_was_planned_and_nothing_compiles_later(model, plain, twin):
    engine, blueprint, alone = engine_of(twin), blueprint_of(twin), blueprint_of(plain)
    assert blueprint.page_nbytes * blueprint.limits.num_pages == engine.kv.nbytes
    assert blueprint.page_nbytes == 2 * alone.page_nbytes
    assert blueprint.weight_bytes == 2 * alone.weight_bytes
    assert "\ndraft     " in twin.describe()
    target, pages = parse_target("v6e:1x1"), {"block_size": 64, "backend": "xla"}
    planned, without = (
        deploy(model, target, **pages, **options).blueprint for options in (ahead_by(model), {})
    )
    assert planned.page_nbytes == 2 * without.page_nbytes
    twin.wait_until_compiled()
    programs = engine.programs
    assert {kind for kind, _ in programs._every} == {"step", "draw", "loop", "copy", "speculate"}
    twin.generate(prompts_of(151, 6), [GREEDY, DRAWN] * 3, use_tqdm=False)
    assert programs.num_compiled == programs.num_programs


def test_it_stays_over_sleep_and_other_weights(twin, model, tmp_path):
    prompts = prompts_of(151, 2)
    for level in (1, 2):
        twin.sleep(level=level)
        if level == 2:
            twin.update_weights(model)
        twin.wake_up()
        assert share_held(twin, prompts, DRAWN) == 1
    twin.update_weights(make(tmp_path / "other", "qwen3", seed=5))
    assert share_held(twin, prompts, DRAWN) < 1
    twin.update_weights(model)


def test_what_it_cannot_do_is_refused_by_name(model, tmp_path):
    def refused(kind: type[Exception], match: str, directory: Path = model, **options) -> None:
        with pytest.raises(kind, match=match):
            LLM(model, **SMALL | ahead_by(directory) | options)

    def asked(**keys: object) -> dict:
        return ahead_by(model, **keys)

    small = make(tmp_path / "small", "qwen3", vocab_size=97)
    short = make(tmp_path / "short", "llama", max_position_embeddings=64)
    refused(ValueError, "vocabulary of 151 tokens, got one of 97", small)
    refused(ValueError, "max_model_len=128 tokens, got one for 64", short)
    refused(NotImplementedError, "without recurrent states", make(tmp_path / "r", "lfm2"))
    refused(NotImplementedError, "kv_policy streaming", kv_policy="streaming", kv_budget=64)
    refused(ValueError, "expected model with", **asked(model=None, method="draft_model"))
    refused(ValueError, "got 'prompt_lookup_max'", **asked(prompt_lookup_max=3))
    refused(ValueError, "draft_tensor_parallel_size 1", **asked(draft_tensor_parallel_size=2))
