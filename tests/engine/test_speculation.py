"""With proposals the tokens and log-probabilities are those without, whatever is asked for, and in
fewer steps.

Before every step all memory that no request owns is NaN.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import jaxkv.engine.speculation
from ahead import assert_same, counted, prompts_of
from families import text_config
from jaxkv import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from jaxkv.config import Speculation
from jaxkv.engine.speculation import Speculator
from jaxkv.programs.speculation import Drafts
from jaxkv.sampling_params import StructuredOutputsParams
from jaxkv.testing import config_of, engine_of
from speculating import num_accepted
from tiny import SMALL, VARIANTS, make_checkpoint, tiny_config

pytestmark = pytest.mark.usefixtures("quick_compile", "one_loop")

AHEAD = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
    "disable_by_batch_size": SMALL["max_num_seqs"],
}
NUM_NEW = 40
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=3)
FEW = replace(GREEDY, allowed_token_ids=[5, 7, 9, 11])
"""With so few tokens a proposal often holds, whatever the model."""

LIMITS = SMALL | {"max_num_batched_tokens": 48}
OPTIONS = LIMITS | {"skip_tokenizer_init": False, "max_logprobs": 420}


@pytest.fixture(autouse=True)
def _always(monkeypatch) -> None:
    """Proposes wherever it may: a model with random weights seldom says what its prompt says."""
    monkeypatch.setattr(jaxkv.engine.speculation, "LEAST_GAIN", 0.0)


@pytest.fixture(scope="module")
def pair(checkpoint) -> tuple[LLM, LLM]:
    """The same engine without and with proposals."""
    return LLM(checkpoint, **OPTIONS), LLM(checkpoint, **OPTIONS, speculative_config=AHEAD)


CASES = [
    ("qwen3", {"block_size": 8}),
    ("qwen2-mixed-windows", {"block_size": 16, "kv_cache_dtype": "bfloat16"}),
    ("deepseek_v3", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "options"), CASES)
def test_greedy_and_sampled_tokens_are_those_without_proposals(tmp_path, variant, options):
    config = (tiny_config if variant in VARIANTS else text_config)(variant)
    directory = make_checkpoint(tmp_path / "model", config)
    limits = LIMITS | options | {"max_num_seqs": 2}
    plain = LLM(directory, **limits)
    ahead = LLM(directory, **limits, speculative_config=AHEAD | {"disable_by_batch_size": 2})
    prompts = prompts_of(151)
    assert_same(plain, ahead, prompts, FEW)
    drawn = replace(FEW, temperature=0.7, top_p=0.9, logprobs=None)
    assert_same(plain, ahead, prompts, [replace(drawn, seed=seed) for seed in range(6)])
    assert counted(ahead)["accepted_tokens"] > 50


@pytest.mark.slow
def test_preempted_rows_get_the_same_tokens(tmp_path):
    """Fourteen pages are too few for four rows of up to 9."""
    directory = make_checkpoint(tmp_path / "model", tiny_config("qwen3"))
    few = LIMITS | {"num_gpu_blocks_override": 14}
    plain = LLM(directory, **LIMITS)
    ahead = LLM(directory, **few, speculative_config=AHEAD)
    assert_same(plain, ahead, prompts_of(151, 5)[::-1], FEW)
    assert engine_of(ahead).scheduler.num_preemptions > 0
    assert counted(ahead)["accepted_tokens"] > 10


def test_whatever_a_request_asks_for_it_gets_the_same(pair):
    plain, ahead = pair
    drawn = replace(FEW, temperature=0.8, seed=5)
    asked = [
        replace(FEW, repetition_penalty=1.3, presence_penalty=0.5),
        replace(FEW, repetition_penalty=0.7, frequency_penalty=-0.4),
        replace(FEW, logit_bias={9: 2.0, 11: 1.5}, min_tokens=9, stop_token_ids=[9]),
        replace(drawn, stop_token_ids=[7], min_tokens=20),
        replace(drawn, prompt_logprobs=2, presence_penalty=-0.3, top_p=0.95),
        replace(drawn, max_tokens=25, stop=["a", "e", "the"], top_k=4, ignore_eos=False),
        replace(FEW, logprobs=-1, max_tokens=9),
        replace(FEW, bad_words=["t", "The end"]),
        replace(GREEDY, structured_outputs=StructuredOutputsParams(regex="(ab)+"), max_tokens=12),
    ]
    before = counted(ahead)["accepted_tokens"]
    alone = prompts_of(420)[-1:]
    for params in asked:
        assert_same(plain, ahead, alone, params)
    assert counted(ahead)["accepted_tokens"] > before + 60
    # Where nobody looks at each token, the device alone knows of a stop token before the last one.
    ended = replace(
        drawn,
        allowed_token_ids=[7, 9],
        stop_token_ids=[7],
        temperature=50.0,
        max_tokens=4,
        logprobs=None,
    )
    for seed in (11, 16, 21, 23):
        assert_same(plain, ahead, [{"prompt_token_ids": [9, 7] * 4}], replace(ended, seed=seed))
    assert_same(plain, ahead, prompts_of(420, len(asked)), asked)


def test_beams_find_the_same_sequences(pair):
    found = [
        [one.tokens for one in output.sequences]
        for llm in pair
        for output in llm.beam_search(
            prompts_of(420, 3), BeamSearchParams(beam_width=2, max_tokens=12)
        )
    ]
    assert found[:3] == found[3:]


def test_requests_that_come_and_go_get_the_same_tokens(pair):
    """One is added after every step, so that proposing loops and plain steps go by turns."""
    prompts = prompts_of(420, 8)
    taken = []
    for llm in pair:
        requests = (
            (prompt, replace(GREEDY, max_tokens=9 + 5 * n)) for n, prompt in enumerate(prompts)
        )
        outputs = dict(llm.as_completed(requests))
        taken.append([outputs[n].outputs[0].token_ids for n in range(8)])
    assert taken[0] == taken[1]


def test_sessions_are_forked_and_taken_back(pair):
    before, found = counted(pair[1])["accepted_tokens"], []
    for llm in pair:
        start = llm.session({"prompt_token_ids": [5, 7, 9, 11] * 6})
        whole, out = start.generate(FEW)
        (fork,) = whole.rewind(tokens=7).fork(1)
        _, other = fork.generate(replace(FEW, temperature=0.8, top_p=0.9, seed=5))
        _, again = start.generate(FEW)
        assert again.token_ids == out.token_ids
        found.append([out.token_ids, other.token_ids, whole.tokens])
    assert found[0] == found[1]
    assert counted(pair[1])["accepted_tokens"] > before


def test_after_sleep_the_text_of_rows_is_written_anew(pair):
    plain, ahead = pair
    assert_same(plain, ahead, prompts_of(420, 3), FEW)
    before = counted(ahead)["accepted_tokens"]
    ahead.sleep(1)
    ahead.wake_up()
    assert_same(plain, ahead, prompts_of(420, 3), FEW)
    assert counted(ahead)["accepted_tokens"] > before


def test_who_is_cancelled_leaves_its_row_to_others(pair, checkpoint):
    """Requests go after their first tokens; those that follow get their rows."""
    plain, _ = pair
    llm = AsyncLLM(checkpoint, **OPTIONS, speculative_config=AHEAD)
    prompts = prompts_of(420, 12)

    async def ask(number: int) -> list[int]:
        tokens: list[int] = []
        async for output in llm.generate(prompts[number], FEW):
            tokens = output.outputs[0].token_ids
            if number % 3 == 1:
                break
        return tokens

    async def ask_all() -> list[list[int]]:
        return await asyncio.gather(*map(ask, range(12)))

    try:
        got = asyncio.run(ask_all())
    finally:
        llm.shutdown()
    want = [one.outputs[0].token_ids for one in plain.generate(prompts, FEW, use_tqdm=False)]
    assert all(mine == theirs[: len(mine)] for mine, theirs in zip(got, want, strict=True))
    assert [len(tokens) for tokens in got[::3]] == [NUM_NEW] * 4
    assert num_accepted(llm) > 0


def test_what_is_counted_adds_up(pair):
    _, ahead = pair
    found = counted(ahead)
    by_position = [found[f"at {k}"] for k in range(4)]
    assert sum(by_position) == found["accepted_tokens"] <= found["draft_tokens"]
    assert by_position == sorted(by_position, reverse=True)
    assert found["drafts"] <= found["draft_tokens"] <= 4 * found["drafts"]


def test_fewer_steps_give_the_tokens_and_rows_that_gain_nothing_stop_proposing(pair, monkeypatch):
    monkeypatch.undo()
    _, ahead = pair
    engine = engine_of(ahead)
    loops: list[str] = []
    for kind in ("loop", "speculate"):
        get = getattr(engine.programs, kind)
        monkeypatch.setattr(
            engine.programs, kind, lambda rows, kind=kind, get=get: loops.append(kind) or get(rows)
        )
    one = {"prompt_token_ids": [7, 8, 9] * 5}
    # Of one token only is the text that repeats itself, and of all alike the one that does not.
    always = replace(GREEDY, allowed_token_ids=[9], max_tokens=60, logprobs=None)
    before = counted(ahead)["accepted_tokens"]
    ahead.generate(one, always, use_tqdm=False)
    assert "loop" not in loops
    assert counted(ahead)["accepted_tokens"] - before >= 0.75 * 60
    loops.clear()
    never = replace(GREEDY, temperature=1e6, seed=3, max_tokens=100, logprobs=None)
    ahead.generate(one, never, use_tqdm=False)
    assert loops.count("speculate") <= 4 < loops.count("loop")
    loops.clear()
    ahead.generate([one] * 3, always, use_tqdm=False)
    assert "loop" not in loops
    monkeypatch.setattr(engine._speculator, "most_rows", 2)
    loops.clear()
    ahead.generate([one] * 3, always, use_tqdm=False)
    assert "speculate" not in loops


def test_without_it_the_programs_are_those_of_before_and_with_it_counted(pair):
    plain, ahead = (engine_of(llm).programs for llm in pair)
    assert {kind for kind, _ in plain._every} == {"step", "draw", "loop", "copy"}
    added = {*ahead._every} - {*plain._every}
    assert added == {("speculate", 4), ("text", 128)}
    assert config_of(pair[0]).decode_steps == 8
    assert config_of(pair[1]).decode_steps == 10


def test_what_it_cannot_do_is_refused_by_name(checkpoint, tmp_path):
    def refused(kind: type[Exception], match: str, directory=checkpoint, **options) -> None:
        with pytest.raises(kind, match=match):
            LLM(directory, **SMALL | {"speculative_config": AHEAD} | options)

    def asked(**keys: object) -> dict:
        return AHEAD | keys

    refused(NotImplementedError, "kv_policy streaming", kv_policy="streaming", kv_budget=64)
    refused(NotImplementedError, "a model that pools", runner="pooling")
    refused(ValueError, "expected None with disaggregate", disaggregate=(1, 1))
    refused(ValueError, "got 'eagle'", speculative_config=asked(method="eagle"))
    refused(ValueError, "got 'model'", speculative_config=asked(model="other"))
    refused(ValueError, "num_speculative_tokens", speculative_config={"method": "ngram"})
    refused(ValueError, "<= 32", speculative_config=asked(num_speculative_tokens=33))
    refused(ValueError, "prompt_lookup_min", speculative_config=asked(prompt_lookup_min=4))
    refused(ValueError, "disable_by_batch_size", speculative_config=asked(disable_by_batch_size=9))


@pytest.mark.parametrize(
    ("platform", "num_rows", "per_step", "gains"),
    [
        ("cpu", 1, 2.0, True),
        ("cpu", 1, 1.5, False),
        ("cpu", 4, 2.0, False),
        ("cpu", 4, 3.0, True),
        ("gpu", 1, 1.5, True),
        ("tpu", 4, 1.5, True),
        ("tpu", 4, 1.1, False),
    ],
)
def test_rows_propose_while_steps_give_more_tokens_than_they_cost(
    monkeypatch, platform, num_rows, per_step, gains
):
    """A step with proposals costs more with more rows, and on a processor."""
    monkeypatch.undo()
    programs = SimpleNamespace(
        config=SimpleNamespace(max_num_seqs=8, max_len=64),
        device=SimpleNamespace(platform=platform),
        draft=None,
        draft_weights={},
        weights={"embed": np.zeros((8, 8), np.float32)},
    )
    asked = Speculation(method="ngram", num_tokens=4, most_rows=8)
    speculator = Speculator(programs, asked)
    requests = [SimpleNamespace(row=row, id=row, num_tokens=99) for row in range(num_rows)]
    assert speculator.wants(requests)
    steps_B, zeros_B = np.full(num_rows, 10), np.zeros(num_rows, int)
    accepted_Bk = np.zeros((num_rows, 4), int)
    accepted_Bk[:, 0] = round(10 * (per_step - 1))
    for _ in range(5):
        speculator.reader(requests, Drafts(zeros_B, steps_B, accepted_Bk, accepted_Bk))()
    assert speculator.wants(requests) == gains
