"""Outputs are what a schema, regex, choice or grammar describes, whatever the model would say, and
whoever runs beside them says what they would say alone.
"""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxkv import LLM, SamplingParams, StructuredOutputsParams
from jaxkv.engine.plan import LoopPlan, StepPlan
from jaxkv.requests.grammar import BehindReasoning
from jaxkv.testing import engine_of

pytest.importorskip("llguidance")
pytestmark = pytest.mark.usefixtures("quick_compile", "one_loop")

OPTIONS = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "max_model_len": 1024,
    "num_gpu_blocks_override": 600,
    "lazy_compile": True,
}
WORDS = ("name", "a b", "é", 'q"x', "\\", "n\n")


@pytest.fixture(scope="module")
def llm(checkpoint) -> LLM:
    return LLM(checkpoint, **OPTIONS, hf_overrides={"max_position_embeddings": 1024})


def schema(rng: np.random.Generator, depth: int = 0) -> dict[str, Any]:
    """Draws a schema of which no text is longer than a few hundred characters."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    if depth < 3:
        kinds += ["object", "object", "array", "anyOf"]
    kind = str(rng.choice(kinds)) if depth else "object"
    if kind == "string":
        low = int(rng.integers(0, 3))
        return {"type": "string", "minLength": low, "maxLength": low + int(rng.integers(1, 8))}
    if kind == "integer":
        low = int(rng.integers(-1000, 1000))
        return {"type": "integer", "minimum": low, "maximum": low + int(rng.integers(0, 500))}
    if kind == "number":
        return {"type": "number", "minimum": -2, "maximum": 3, "multipleOf": 0.25}
    if kind == "enum":
        return {"enum": [str(w) for w in rng.permutation(WORDS)[:3]] + [1, None, 2.5]}
    if kind == "const":
        return {"const": [1, {"k": str(rng.choice(WORDS))}]}
    if kind == "pattern":
        return {"type": "string", "pattern": "^[a-c]{1,3}(-[0-9]{2})?$"}
    if kind == "array":
        low = int(rng.integers(0, 2))
        items = schema(rng, depth + 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + 2}
    if kind == "anyOf":
        return {"anyOf": [schema(rng, depth + 1), schema(rng, depth + 1)]}
    if kind == "object":
        names = [str(w) for w in rng.permutation(WORDS)[: rng.integers(1, 4)]]
        properties = {name: schema(rng, depth + 1) for name in names}
        required = names[: rng.integers(0, len(names) + 1)]
        closed = {"additionalProperties": False, "required": required}
        return {"type": "object", "properties": properties, **closed}
    return {"type": kind}


def params(**asked: Any) -> SamplingParams:
    given = StructuredOutputsParams(**asked)
    return SamplingParams(temperature=1.0, seed=5, max_tokens=800, structured_outputs=given)


def check_schemas(llm: LLM, seed: int, count: int) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    rng = np.random.default_rng(seed)
    schemas = [schema(rng) for _ in range(count)]
    given = [
        replace(params(json=one, disable_any_whitespace=True), seed=number)
        for number, one in enumerate(schemas)
    ]
    outputs = llm.generate(["{"] * count, given, use_tqdm=False)
    for one, output in zip(schemas, outputs, strict=True):
        (said,) = output.outputs
        assert said.finish_reason == "stop"
        jsonschema.validate(json.loads(said.text), one)
    engine_of(llm).check()


def test_every_output_validates_against_its_schema(llm):
    check_schemas(llm, 0, 8)


@pytest.mark.slow
def test_every_output_of_a_thousand_schemas_validates(llm):
    for seed in range(2, 12):
        check_schemas(llm, seed, 100)


def test_regex_choice_grammar_and_objects(llm):
    lark = 'start: "<" /[xy]+/ ">" | "none"'
    cases = [
        (params(regex="[0-9]{3}-[a-f]{2}"), re.compile("[0-9]{3}-[a-f]{2}")),
        (params(choice=["yes", 'n"o', "é"]), re.compile('yes|n"o|é')),
        (replace(params(grammar=lark), max_tokens=100), re.compile("<[xy]{0,100}>?|none")),
        (params(grammar='root ::= "a" [0-9] "b"'), re.compile("a[0-9]b")),
        (replace(params(regex="(ab){2}c?"), ignore_eos=True), re.compile("ababc?")),
        (replace(params(choice=["alpha", "beta"]), n=4), re.compile("alpha|beta")),
    ]
    outputs = llm.generate(["The end"] * len(cases), [one for one, _ in cases], use_tqdm=False)
    for (asked, wanted), output in zip(cases, outputs, strict=True):
        for said in output.outputs:
            assert said.finish_reason == "stop" or asked.max_tokens == 100
            assert said.stop_reason is None
            assert wanted.fullmatch(said.text), said.text
    assert {len(output.outputs) for output in outputs} == {1, 4}
    cut = replace(params(regex="[0-9]{99}"), max_tokens=3)
    (output,) = llm.generate("x", cut, use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    assert re.fullmatch("[0-9]{3,99}", output.outputs[0].text)


def test_a_class_of_pydantic_is_a_schema(llm):
    pydantic = pytest.importorskip("pydantic")

    class Car(pydantic.BaseModel):
        wheels: int = pydantic.Field(ge=3, le=4)
        kind: str = pydantic.Field(max_length=4)

    strict = {"disable_any_whitespace": True, "disable_additional_properties": True}
    (output,) = llm.generate("x", params(json=Car, **strict), use_tqdm=False)
    assert Car.model_validate_json(output.outputs[0].text).wheels in (3, 4)


def test_objects_are_closed_where_that_is_asked_for():
    inner = {"type": "object", "properties": {"properties": {"type": "string"}}}
    open_ = {"type": "object", "properties": {}, "additionalProperties": inner}
    given = {"anyOf": [{"$ref": "#/$defs/a"}, open_], "$defs": {"a": inner}, "properties": {}}
    asked = StructuredOutputsParams(json=given, disable_additional_properties=True)
    closed = inner | {"additionalProperties": False}
    want = given | {"anyOf": [given["anyOf"][0], open_ | {"additionalProperties": closed}]}
    assert json.loads(asked.json) == want | {"$defs": {"a": closed}, "additionalProperties": False}
    assert json.loads(StructuredOutputsParams(json=given).json) == given
    assert json.loads(replace(asked).json) == json.loads(asked.json)


def test_what_was_asked_for_begins_behind_reasoning(llm):
    """A bias makes the model begin and end reasoning, at once or never."""
    marks = "<|user|>", "<|end|>"
    begin, end = llm.get_tokenizer().convert_tokens_to_ids(marks)
    wanted = params(regex="[0-9]{3}", reasoning=list(marks))
    wanted = replace(wanted, max_tokens=30, skip_special_tokens=False)
    plain = replace(wanted, structured_outputs=None)
    for prompt, bias, pattern in (
        ("The end", {begin: 90.0, end: 99.0}, r"<\|user\|><\|end\|>[0-9]{3}"),
        ("The end<|user|>One", {end: 99.0}, r"<\|end\|>[0-9]{3}"),
        ("The end<|user|>One<|end|>", {begin: 99.0}, r"[0-9]{3}"),
        ("The end", {begin: -99.0}, r"[0-9]{3}"),
    ):
        for given in (prompt, {"prompt_token_ids": llm.get_tokenizer().encode(prompt)}):
            (output,) = llm.generate(given, replace(wanted, logit_bias=bias), use_tqdm=False)
            assert re.fullmatch(pattern, output.outputs[0].text), (prompt, output.outputs[0].text)
            assert output.outputs[0].finish_reason == "stop"
    never = {end: -99.0, llm.get_tokenizer().eos_token_id: -99.0}
    outputs = [
        llm.generate("The end<|user|>One", replace(one, logit_bias=never), use_tqdm=False)[0]
        for one in (wanted, plain)
    ]
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    assert outputs[0].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("marks", [("", "<|end|>"), ("", "<|end|><|user|>")])
def test_reasoning_runs_in_whole_loops_up_to_where_a_form_may_begin(llm, monkeypatch, marks):
    """Tokens are those of a row that the host sees one by one."""
    tokenizer = llm.get_tokenizer()
    closes = tokenizer.encode(marks[1], add_special_tokens=False)
    ends = dict.fromkeys(closes, 2.0 if len(closes) == 1 else 5.0)
    wanted = replace(params(regex="[0-9]{9}", reasoning=marks), max_tokens=120, logit_bias=ends)
    given = [replace(wanted, seed=seed, n=2, skip_special_tokens=False) for seed in range(3)]
    prompts, plans = ["The end", "One by one", "Once upon"], watched(llm, monkeypatch)
    free = llm.generate(prompts, given, use_tqdm=False)
    engine_of(llm).check()
    num_free = len(plans)
    monkeypatch.setattr(BehindReasoning, "is_free", False)
    seen = llm.generate(prompts, given, use_tqdm=False)
    assert num_free < 0.75 * (len(plans) - num_free)
    for one, other in zip(free, seen, strict=True):
        assert [said.token_ids for said in one.outputs] == [x.token_ids for x in other.outputs]
    texts = [said.text for output in free for said in output.outputs]
    ended = [
        text for text in texts if re.fullmatch(rf"(?s).*{re.escape(marks[1])}[0-9]{{9}}", text)
    ]
    assert ended
    # The last token of a mark stops a loop as well where it ends nothing.
    assert any("<|user|>" in text.partition(marks[1])[0] for text in texts)


def test_greedy_takes_the_likeliest_token_that_may_come(llm):
    """Which the model's own log-probabilities tell, token by token."""
    vocabulary = llm.get_tokenizer().get_vocab()
    wanted = replace(params(regex="[a-z]{5}"), temperature=0.0)
    (output,) = llm.generate("The end", wanted, use_tqdm=False)
    texts = {i: llm.get_tokenizer().decode([i]) for i in vocabulary.values()}
    first = [i for i, text in texts.items() if re.fullmatch("[a-z]{1,5}", text)]
    bias = SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=first)
    (same,) = llm.generate("The end", bias, use_tqdm=False)
    assert output.outputs[0].token_ids[0] == same.outputs[0].token_ids[0]


def test_neighbours_keep_their_loops_and_their_tokens(llm, monkeypatch):
    plain = SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True)
    words = SamplingParams(seed=4, max_tokens=60, ignore_eos=True, bad_words=["over the lazy"])
    prompts = ["The end", "One by one", "Once upon", "The quick", "by one", "jumps", "night", "x"]
    given = [replace(plain, seed=i) for i in range(6)]
    alone = llm.generate(prompts[:6], given, use_tqdm=False)
    asked = [words, replace(params(regex="[a-z ]{30}"), max_tokens=40)]
    apart = [
        llm.generate(p, one, use_tqdm=False)[0] for p, one in zip(prompts[6:], asked, strict=True)
    ]
    plans = watched(llm, monkeypatch)
    together = llm.generate(prompts, [*given, *asked], use_tqdm=False)
    for one, other in zip(together, [*alone, *apart], strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
    # Two wait for the host and six do not: loops of three steps, of which those two get one.
    loop = next(one for one in plans if isinstance(one, LoopPlan) and len(one.work) == 8)
    assert loop.num_steps == 3
    assert {r.needs_host: count for r, count in loop.work} == {True: 1, False: 3}


RECORD = {
    "type": "object",
    "properties": {
        "identification": {"type": "integer", "minimum": 0, "maximum": 99},
        "is_registered": {"type": "boolean"},
        "description": {"enum": ["short", "shorter", "medium"]},
    },
    "required": ["identification", "is_registered", "description"],
    "additionalProperties": False,
}


def watched(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[StepPlan | LoopPlan]:
    """Returns a list of the steps and loops that the engine runs from now on."""
    plans, scheduler = [], engine_of(llm).scheduler
    plan = scheduler.plan

    def noted():
        planned = plan()
        plans.extend([] if planned is None else [planned])
        return planned

    monkeypatch.setattr(scheduler, "plan", noted)
    return plans


def test_forced_tokens_take_no_step_and_change_no_token(llm, monkeypatch):
    """With log-probabilities every token is drawn, so those tell what is to come."""
    plans = watched(llm, monkeypatch)
    record = params(json=RECORD, disable_any_whitespace=True)
    given = [
        replace(record, seed=3),
        replace(record, temperature=0.0),
        replace(params(regex="(long and longer){9}[a-z]"), stop=["zzz", "ngerlon"]),
        replace(params(choice=["the only one"]), include_stop_str_in_output=True),
        replace(params(regex="abcdefgh{30}"), max_tokens=7, ignore_eos=True),
    ]
    for one in given:
        outputs, counts = [], []
        for logprobs in (0, None):
            start = len(plans)
            asked = replace(one, n=2 if one.temperature else 1, logprobs=logprobs)
            (output,) = llm.generate("The end", asked, use_tqdm=False)
            counts.append(len(plans) - start)
            outputs.append(output.outputs)
        drawn, added = outputs
        for a, b in zip(drawn, added, strict=True):
            assert (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)
            assert a.stop_reason == b.stop_reason
        longest = max(len(said.token_ids) for said in drawn)
        assert counts[0] >= longest
        assert counts[1] < 0.6 * longest
    engine_of(llm).check()


def test_forced_tokens_reach_streams_and_are_no_hits_of_the_prefix_cache(llm):
    """Though a page of them may come from there: the prompt fills one, so they begin another."""
    long = "one two three four five six seven eight nine ten " * 4
    wanted, text = params(choice=[long + "yes", long + "no"]), ""
    prompt = {"prompt_token_ids": [*range(40, 56)]}
    (whole,) = llm.generate(prompt, wanted, use_tqdm=False)
    for output in llm.stream(prompt, wanted):
        text += output.outputs[0].text
    assert text == whole.outputs[0].text
    assert text in (long + "yes", long + "no")
    assert len(output.prompt_token_ids) == 16
    assert output.num_cached_tokens == 0


def test_grammars_go_on_where_requests_are_preempted_or_weights_change(llm, checkpoint):
    wanted = replace(params(regex="[0-9]{40}"), max_tokens=60)
    stream, text = llm.stream("The end", wanted), ""
    for number, output in enumerate(stream):
        text += output.outputs[0].text
        if number in (2, 5):
            llm.update_weights(checkpoint)
    assert re.fullmatch("[0-9]{40}", text)


def test_new_weights_where_a_loop_of_reasoning_is_under_way_change_no_token(llm, checkpoint):
    """The mark ends the loop early, when its request has given its pages back."""
    (end,) = llm.get_tokenizer().encode("<|end|>", add_special_tokens=False)
    wanted = replace(params(regex="[0-9]{3}", reasoning=("", "<|end|>")), max_tokens=60)
    wanted = replace(wanted, logit_bias={end: 6.0}, n=6)
    (undisturbed,) = llm.generate("The end", wanted, use_tqdm=False)
    found: dict[int, list[int]] = {said.index: [] for said in undisturbed.outputs}
    for output in llm.stream("The end", wanted):
        for said in output.outputs:
            found[said.index] += said.token_ids
        if len(found[0]) < 20:
            llm.update_weights(checkpoint)
    assert found == {said.index: said.token_ids for said in undisturbed.outputs}


def test_what_cannot_be_followed_is_refused_at_the_front_door(llm):
    for asked, message in (
        ({"json": {"type": "objectt"}}, r"valid grammar, got Invalid type: objectt"),
        ({"json": {"not": {"type": "string"}}}, r"Unimplemented keys: \[.not.\]"),
        ({"json": "{"}, r"json: expected a JSON schema \(Expecting"),
        ({"json": "[]"}, "json: expected a JSON schema, an object"),
        ({"json": {"a": {1, 2}}}, r"json: expected a JSON schema \(Object of type set"),
        ({"json": {"$ref": "#"}}, r"valid grammar, got \w+$"),
        ({"json": '{"items":' * 900 + "{}" + "}" * 900}, "recursion"),
        ({"regex": "[a-"}, "unclosed character class"),
        ({"regex": ""}, "regex: expected a text"),
        ({"regex": "\ud800"}, "regex: expected valid Unicode"),
        ({"choice": []}, "choice: expected a list of texts"),
        ({"grammar": "start: foo"}, "unknown name: .foo."),
        ({"grammar": "x" * 2**19}, "at most 262144 characters"),
        ({}, "expected exactly one of json, regex, .*, got none"),
        ({"regex": "a", "choice": ["a"]}, "got regex, choice"),
        ({"regex": "a", "structural_tag": "x"}, "structural_tag"),
        ({"regex": "a", "reasoning": ["<think>"]}, "reasoning: expected two texts"),
        ({"regex": "a", "reasoning": ["<think>", ""]}, "reasoning: expected two texts"),
        ({"regex": "a", "reasoning": ["<|user|>", "so"]}, "reasoning: expected marks that the"),
    ):
        with pytest.raises(ValueError, match=rf"structured_outputs: .*{message}"):
            llm.generate("x", params(**asked), use_tqdm=False)
    for change in ({"min_tokens": 2}, {"bad_words": ["x"]}, {"allowed_token_ids": [3]}):
        with pytest.raises(ValueError, match=f"^{next(iter(change))}: expected none with struct"):
            replace(params(regex="a"), **change)
    with pytest.raises(ValueError, match=r"^structured_outputs: expected StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})


def test_a_session_keeps_the_last_token_of_an_answer_that_its_grammar_ended(llm):
    session = llm.session("def f(")
    for asked in ({"regex": "[0-9]{3}"}, {"choice": ["yes", "yes sir"]}, {"json_object": True}):
        after, one = session.generate(params(**asked))
        assert one.finish_reason == "stop"
        eos = llm.get_tokenizer().eos_token_id
        said = [token for token in one.token_ids if token != eos]
        assert after.tokens == (*session.tokens, *said)


def test_no_step_waits_for_a_grammar_and_each_is_compiled_once_in_a_call(llm, monkeypatch):
    from jaxkv.requests.grammar import Grammars

    free, compiled = [], Grammars.compile

    def compiling(self: Grammars, asked: StructuredOutputsParams) -> Any:
        def take() -> None:
            free.append(engine_of(llm).lock.acquire(blocking=False))
            engine_of(llm).lock.release()

        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        return compiled(self, asked)

    monkeypatch.setattr(Grammars, "compile", compiling)
    one, other = params(regex="[a-c]{3}"), params(regex="[0-9]{3}")
    outputs = llm.generate(["x", "The", "y"], [one, one, other], use_tqdm=False)
    assert free == [True, True]
    texts = [output.outputs[0].text for output in outputs]
    for text, pattern in zip(texts, ("[a-c]{3}", "[a-c]{3}", "[0-9]{3}"), strict=True):
        assert re.fullmatch(pattern, text)


def test_a_token_that_no_grammar_looked_at_is_not_given_out(llm, monkeypatch):
    from jaxkv.requests.grammar import Grammar

    made: list[int] = []
    accepted: list[bool] = []
    make, error, accept = Grammar._make_mask, Grammar.error.fget, Grammar.accept

    def lost_at_the_fifth(self: Grammar) -> np.ndarray:
        made.append(0)
        self.lost = len(made) >= 5
        return np.full_like(make(self), 2**32 - 1) if self.lost else make(self)

    def accepting(self: Grammar, token: int) -> None:
        accepted.append(self.lost)
        accept(self, token)

    monkeypatch.setattr(Grammar, "_make_mask", lost_at_the_fifth)
    monkeypatch.setattr(Grammar, "accept", accepting)
    is_lost = lambda self: "too complex" if getattr(self, "lost", False) else error(self)  # noqa: E731
    monkeypatch.setattr(Grammar, "error", property(is_lost))
    (one,) = llm.generate("x", params(regex="[a-c]{9}"), use_tqdm=False)[0].outputs
    assert (one.finish_reason, one.stop_reason) == ("abort", "too complex")
    assert accepted == [False] * len(one.token_ids) != []
    assert re.fullmatch("[a-c]{1,8}", one.text)
    engine_of(llm).check()


def test_what_the_parser_has_no_room_for_ends_its_own_request_only(llm, monkeypatch):
    from jaxkv.requests.grammar import Grammar

    lost: list[Grammar] = []
    monkeypatch.setattr(Grammar, "accept", lambda self, token: lost.append(self))
    error = property(lambda self: "too complex" if self in lost else "")
    monkeypatch.setattr(Grammar, "error", error)
    plain = SamplingParams(temperature=0.0, max_tokens=8)
    bad, good = llm.generate(["x", "The end"], [params(regex="[a-z]{9}"), plain], use_tqdm=False)
    assert (bad.outputs[0].finish_reason, bad.outputs[0].stop_reason) == ("abort", "too complex")
    assert good.outputs[0].finish_reason in ("length", "stop")
