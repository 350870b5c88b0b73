"""Reasoning ends at its budget, and all before and behind that is what the model says without one."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from jaxkv import LLM, SamplingParams, StructuredOutputsParams
from jaxkv.requests.thinking import Thinking, bounds_of
from jaxkv.testing import engine_of

pytestmark = pytest.mark.usefixtures("quick_compile", "one_loop")

OPTIONS = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "max_model_len": 1024,
    "num_gpu_blocks_override": 600,
    "lazy_compile": True,
    "dtype": "float32",
    "hf_overrides": {"max_position_embeddings": 1024},
}


OPENS, CLOSES = MARKS = "<|user|>", "<|end|>"
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, skip_special_tokens=False)


@pytest.fixture(scope="module")
def llm(checkpoint) -> LLM:
    return LLM(
        checkpoint,
        **OPTIONS,
        reasoning_config={"reasoning_start_str": OPENS, "reasoning_end_str": CLOSES},
    )


@pytest.fixture(scope="module")
def ids(llm):
    """The tokens of a text."""
    tokenizer = llm.get_tokenizer()
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def generated(llm: LLM, prompts: list, params: SamplingParams | list[SamplingParams]) -> list:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    engine_of(llm).check()
    return [said.token_ids for output in outputs for said in output.outputs]


def continued(llm: LLM, ids, prompt: str, params: SamplingParams, ends: str, budget: int) -> list:
    """What a caller gets who ends reasoning by hand: by asking again with the end in the prompt."""
    bare = replace(params, thinking_token_budget=None)
    (before,) = generated(llm, [prompt], replace(bare, max_tokens=budget)) if budget else [[]]
    said = [*before, *ids(ends)]
    whole = [*llm.get_tokenizer().encode(prompt), *said]
    left = params.max_tokens - len(said)
    (behind,) = generated(llm, [{"prompt_token_ids": whole}], replace(bare, max_tokens=left))
    return [*said, *behind]


def test_an_answer_goes_on_as_if_its_caller_had_ended_the_reasoning(llm, ids):
    (closes,), (opens,) = ids(CLOSES), ids(OPENS)
    never = {closes: -100.0, opens: -100.0}
    for budget, ends, logprobs in (
        (0, CLOSES, None),
        (1, CLOSES, None),
        (13, CLOSES, None),
        (13, "so I say " + CLOSES + "\n", None),
        (13, CLOSES, 2),
        (0, "so" + CLOSES, 0),
    ):
        prompt = "The end" + OPENS
        params = replace(GREEDY, logit_bias=never)
        want = continued(llm, ids, prompt, params, ends, budget)
        asked = replace(params, thinking_token_budget=budget, reasoning=(OPENS, ends))
        asked = replace(asked, logprobs=logprobs)
        (output,) = llm.generate(prompt, asked, use_tqdm=False)
        (said,) = output.outputs
        assert said.token_ids == want, (budget, ends, logprobs)
        whole = llm.get_tokenizer().decode(want)
        assert said.text == whole.rstrip("\ufffd")  # of half a character
        assert said.finish_reason == "length"
        if logprobs is not None:
            assert [*map(list, said.logprobs)] == [
                [token, *(other for other in entry if other != token)]
                for token, entry in zip(want, said.logprobs, strict=True)
            ]
        engine_of(llm).check()


def test_reasoning_that_ends_by_itself_has_its_tokens_as_without_a_budget(llm, ids):
    """A bias has the model write marks: with a budget that is enough nothing changes, and of what
    the prompt has begun the tokens behind its mark count."""
    (closes,), (opens,) = ids(CLOSES), ids(OPENS)
    marked = replace(GREEDY, temperature=1.0, logit_bias={closes: 3.5, opens: 3.5})
    cases = product(("The end", "One" + OPENS, "One" + OPENS + "by one"), range(6))
    given = [(prompt, replace(marked, seed=seed)) for prompt, seed in cases]
    prompts, params = [list(column) for column in zip(*given, strict=True)]
    free = generated(llm, prompts, params)
    budget = 9
    bounded = generated(
        llm, prompts, [replace(one, thinking_token_budget=budget) for one in params]
    )
    num_cut = num_whole = 0
    for prompt, alone, cut in zip(prompts, free, bounded, strict=True):
        text = alone
        left = budget - len(ids(prompt.partition(OPENS)[2]))
        if OPENS not in prompt:
            if alone[0] != opens:  # no reasoning
                assert cut == alone
                continue
            text = alone[1:]
        if closes in text[:left]:
            assert cut == alone
            num_whole += 1
        else:
            at = left + len(alone) - len(text)
            assert cut[: at + 1] == [*alone[:at], closes]
            num_cut += 1
    assert min(num_cut, num_whole) >= 3


def some(ids) -> tuple[list[str], list[SamplingParams]]:
    """Prompts that have begun reasoning and others, with budgets that end it and others."""
    (closes,), (opens,) = ids(CLOSES), ids(OPENS)
    rng = np.random.default_rng(3)
    given = [
        SamplingParams(
            seed=seed,
            max_tokens=int(rng.integers(1, 50)),
            thinking_token_budget=int(rng.integers(0, 20)),
            logit_bias={closes: 1.0, opens: 3.0},
            n=1 + seed % 2,
            stop=["zz"] if seed % 3 == 0 else None,
            detokenize=seed % 3 != 1,
        )
        for seed in range(16)
    ]
    return [["The end", "One" + OPENS + "by", "Once"][seed % 3] for seed in range(16)], given


def test_tokens_are_the_same_alone_and_beside_others_and_where_each_is_looked_at(llm, ids):
    prompts, given = some(ids)
    together = generated(llm, prompts, given)
    alone = [
        tokens for p, one in zip(prompts, given, strict=True) for tokens in generated(llm, [p], one)
    ]
    assert together == alone
    assert generated(llm, prompts, [replace(one, logprobs=0) for one in given]) == alone


@pytest.mark.slow
@pytest.mark.parametrize("change", ["few pages", "host", "ngram", "draft_model"])
def test_tokens_are_the_same_where_pages_are_few_and_tokens_are_proposed(
    llm, ids, checkpoint, change
):
    prompts, given = some(ids)
    speculation = {"num_speculative_tokens": 3, "disable_by_batch_size": 8, "method": change}
    changed = {
        "few pages": {"num_gpu_blocks_override": 8, "max_model_len": 112},
        "host": {"num_gpu_blocks_override": 8, "max_model_len": 112, "kv_host_bytes": 2**20},
        "ngram": {"speculative_config": speculation | {"prompt_lookup_max": 1}},
        "draft_model": {
            "speculative_config": speculation | {"model": checkpoint},
            "max_model_len": 256,
        },
    }[change]
    options = OPTIONS | changed | {"reasoning_config": llm._blueprint.options.reasoning_config}
    with LLM(checkpoint, **options) as other:
        assert generated(other, prompts, given) == generated(llm, prompts, given)
        metrics = {one.name: one for one in other.get_metrics("")}
        if "num_gpu_blocks_override" in changed:
            assert metrics["num_preemptions"].value > 0
        else:
            assert metrics["spec_decode_num_draft_tokens"].value > 0


def test_a_form_begins_where_the_budget_ends(llm):
    pytest.importorskip("llguidance")
    form = StructuredOutputsParams(regex="[0-9]{3}", reasoning=MARKS)
    params = SamplingParams(
        seed=1,
        max_tokens=40,
        thinking_token_budget=11,
        structured_outputs=form,
        skip_special_tokens=False,
        logit_bias={llm.get_tokenizer().convert_tokens_to_ids(CLOSES): -100.0},
    )
    for one in (params, replace(params, logprobs=1)):
        (output,) = llm.generate("The end" + OPENS, one, use_tqdm=False)
        (said,) = output.outputs
        reasoned, _, answer = said.text.partition(CLOSES)
        assert said.token_ids.index(llm.get_tokenizer().convert_tokens_to_ids(CLOSES)) == 11
        assert (len(answer), answer.isdecimal(), said.finish_reason) == (3, True, "stop")
        assert CLOSES not in reasoned


def test_a_row_with_a_budget_runs_in_whole_loops(llm, ids, monkeypatch):
    """Its neighbours do not wait for it either."""
    plans, plan = [], engine_of(llm).scheduler.plan
    monkeypatch.setattr(engine_of(llm).scheduler, "plan", lambda: plans.append(plan()) or plans[-1])
    bare = replace(GREEDY, max_tokens=64, logit_bias={ids(CLOSES)[0]: -100.0})
    generated(llm, ["One" + OPENS] * 2, bare)
    num_bare = len(plans)
    generated(llm, ["One" + OPENS] * 2, [bare, replace(bare, thinking_token_budget=20)])
    assert len(plans) - num_bare <= num_bare + 3


class Words:
    """Decodes a token as its place in a list of texts."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        found = []
        while text:
            token = next(i for i, one in enumerate(self.texts) if text.startswith(one))
            text = text.removeprefix(self.texts[token])
            found.append(token)
        return found

    def decode(self, tokens, skip_special_tokens: bool = True) -> str:
        return "".join(self.texts[token] for token in tokens)

    def get_added_vocab(self) -> dict[str, int]:
        return {one: i for i, one in enumerate(self.texts) if one.startswith("<")}


def test_marks_of_several_tokens_are_ended_from_where_the_model_is():
    words = Words("<a>", "<end>", "say", "<b>", "hm", " ", "now ", "\n")
    marks = ("", "now <end>say<b>\n")
    bounds = bounds_of(words, marks, 4)
    assert (bounds.closes, bounds.ends) == ((1, 2, 3), (6, 1, 2, 3, 7))

    def rest(*tokens: int) -> list[int]:
        one = Thinking(bounds, [4], "hm", words)
        for token in tokens:
            assert one.forced is None
            assert one.room == 4 - tokens.index(token) or len(set(tokens)) < len(tokens)
            one.accept(token)
        found = []
        while (token := one.forced) is not None:
            assert one.room == 1
            found.append(token)
            one.accept(token)
        assert one.is_over is (one.room is None)
        return found

    assert rest(4, 4, 4) == []
    assert rest(4, 4, 4, 4) == [6, 1, 2, 3, 7]
    assert rest(4, 4, 4, 1) == [2, 3, 7]
    assert rest(4, 4, 1, 2) == [3, 7]
    assert rest(4, 1, 2, 3) == []
    assert rest(4, 1, 2, 4) == [6, 1, 2, 3, 7]


def test_reasoning_begins_behind_blank_space_only():
    words = Words("<a>", "<end>", "hm", " ", "\n")
    bounds = bounds_of(words, ("<a>", "<end>"), 2)
    for prompt, tokens, room in (
        ("hm", (), 3),
        ("hm", (3, 4), 3),
        ("hm", (3, 4, 0), 2),
        ("hm", (0, 2), 1),
        ("hm", (2,), None),
        ("hm<a>", (), 2),
        ("hm<a>\n", (), 1),
        ("hm<a>hmhm", (), 1),  # the end has to come
        ("hm<a>hmhmhm<end>\n", (), None),
        ("hm<a>hm<end>hm", (), 3),
    ):
        one = Thinking(bounds, words.encode(prompt), prompt, words)
        for token in tokens:
            one.accept(token)
        assert one.room == one.copy().room == room, (prompt, tokens)
        assert (one.forced == 1) is (prompt == "hm<a>hmhm")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"thinking_token_budget": -2}, "thinking_token_budget: expected None, -1"),
        ({"thinking_token_budget": True}, "thinking_token_budget: expected None, -1"),
        ({"thinking_token_budget": 1.0}, "thinking_token_budget: expected None, -1"),
        ({"reasoning": "<think>"}, "reasoning: expected None or two texts"),
        ({"reasoning": ("<think>", "")}, "reasoning: expected None or two texts"),
        ({"reasoning": ("<think>", "\ud800")}, "reasoning: expected None or two texts"),
    ],
)
def test_what_is_no_budget_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**given)


def test_what_the_tokenizer_has_no_marks_for_is_refused(llm, checkpoint):
    asked = SamplingParams(thinking_token_budget=3)
    for texts in (("The", CLOSES), (OPENS, "end"), (OPENS + OPENS, CLOSES)):
        with pytest.raises(ValueError, match="thinking_token_budget: expected marks around"):
            llm.generate("x", replace(asked, reasoning=texts), use_tqdm=False)
    for given in (
        {},
        {"reasoning_start_str": "", "reasoning_end_str": ""},
        {"reasoning_end_str": "a"},
    ):
        with pytest.raises(ValueError, match="reasoning_config: expected None or"):
            LLM(checkpoint, **OPTIONS, reasoning_config=given)
