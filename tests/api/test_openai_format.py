"""OpenAI's keys become the parameters that they mean, or are refused by their names."""

import json
from dataclasses import replace

import pytest

from jaxkv.api.openai_answers import Answer
from jaxkv.api.openai_format import CHAT, COMPLETIONS, MOST, SAME, BodyError, read_body
from jaxkv.api.response_parts import Parser
from jaxkv.config import SamplingParams
from jaxkv.requests.outputs import CompletionOutput, Logprob, RequestOutput
from jaxkv.structured import StructuredOutputsParams

DEFAULTS = SamplingParams(temperature=0.5, top_k=7)
MESSAGES = [{"role": "user", "content": "a"}]


def read(url: str, **body: object):
    content = {"messages": MESSAGES} if url == CHAT else {"prompt": "a"}
    return read_body(url, {**content, **body}, DEFAULTS)


def test_what_is_not_said_is_the_models_and_the_endpoints():
    completion, chat = read(COMPLETIONS, top_p=None, n=None), read(CHAT, store=None, user="me")
    assert completion.params == DEFAULTS
    assert (chat.params.max_tokens, chat.params.temperature) == (None, 0.5)
    assert (completion.inputs, chat.inputs) == ([{"prompt": "a"}], [{"messages": MESSAGES}])


def test_each_key_of_the_same_name_sets_its_field():
    given = {
        "frequency_penalty": 0.1,
        "presence_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": 1},
        "max_tokens": 9,
        "min_tokens": 2,
        "n": 2,
        "seed": 3,
        "stop": ["x"],
        "temperature": 0.9,
        "top_p": 0.8,
        "top_k": 4,
        "min_p": 0.1,
        "allowed_token_ids": [5],
        "bad_words": ["w"],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "stop_token_ids": [6],
        "kv_policy": "streaming",
        "kv_budget": 64,
        "kv_protect": [(0, 1)],
        "thinking_token_budget": 7,
    }
    assert given.keys() == set(SAME)
    for url in (COMPLETIONS, CHAT):
        assert read(url, **given).params == SamplingParams(**given)


@pytest.mark.parametrize(
    ("body", "inputs"),
    [
        ({"prompt": ["a", [1, 2]]}, [{"prompt": "a"}, {"prompt_token_ids": [1, 2]}]),
        ({"prompt": [1, 2]}, [{"prompt_token_ids": [1, 2]}]),
        ({"prompt": ["a"]}, [{"prompt": "a"}]),
        ({"prompt": "a", "cache_salt": "s"}, [{"prompt": "a", "cache_salt": "s"}]),
    ],
)
def test_prompts_are_texts_or_tokens_one_or_several(body, inputs):
    assert read(COMPLETIONS, **body).inputs == inputs


def test_the_two_ways_to_ask_for_log_probabilities():
    assert [read(COMPLETIONS, **one).params.logprobs for one in ({}, {"logprobs": 0})] == [None, 0]
    asked = ({"logprobs": False}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 4})
    assert [read(CHAT, **one).params.logprobs for one in asked] == [None, 0, 4]


@pytest.mark.parametrize(
    ("url", "body", "key"),
    [
        (COMPLETIONS, {"prompt": None}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": 5}, "prompt"),
        (COMPLETIONS, {"best_of": 2}, "best_of"),
        (COMPLETIONS, {"suffix": "b"}, "suffix"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"logprobs": True}, "logprobs"),
        (COMPLETIONS, {"logprobs": -1}, "logprobs"),
        (COMPLETIONS, {"messages": MESSAGES}, "messages"),
        (COMPLETIONS, {"temperature": "hot"}, "temperature"),
        (COMPLETIONS, {"stop": ["x"] * 65}, "stop"),
        (COMPLETIONS, {"model": 5}, "model"),
        (COMPLETIONS, {"user": 5}, "user"),
        (COMPLETIONS, {"stream": "yes"}, "stream"),
        (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options"),
        (COMPLETIONS, {"stream": True, "stream_options": {"other": 1}}, "stream_options"),
        (COMPLETIONS, {"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
        (
            COMPLETIONS,
            {
                "stream": True,
                "stream_options": {"include_usage": False, "continuous_usage_stats": True},
            },
            "stream_options",
        ),
        (CHAT, {"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        (CHAT, {"top_logprobs": 5}, "top_logprobs"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format"),
        (CHAT, {"structured_outputs": {"regex": "a", "other": 1}}, "structured_outputs"),
        (CHAT, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        (CHAT, {"parallel_tool_calls": 1}, "parallel_tool_calls"),
        (COMPLETIONS, {"parallel_tool_calls": False}, "parallel_tool_calls"),
        (CHAT, {"store": 0}, "store"),
        (CHAT, {"functions": []}, "functions"),
        (CHAT, {"detokenize": False}, "detokenize"),
    ],
)
def test_what_is_not_done_is_refused_by_its_key(url, body, key):
    with pytest.raises(BodyError) as caught:
        read(url, **body)
    assert caught.value.key == key
    assert key in str(caught.value)


NEUTRAL = {
    "use_beam_search": False,
    "length_penalty": 1.0,
    "priority": 0,
    "return_token_ids": False,
    "include_reasoning": True,
    "echo": False,
    "spaces_between_special_tokens": True,
    "stream_options": {
        "include_usage": False,
        "continuous_usage_stats": False,
        "include_obfuscation": False,
    },
}


@pytest.mark.parametrize(
    ("url", "own"),
    [
        (COMPLETIONS, {"add_special_tokens": True}),
        (CHAT, {"add_special_tokens": False, "logprobs": False, "top_logprobs": 0}),
    ],
)
def test_values_that_ask_for_nothing_are_taken(url, own):
    asked = read(url, stream=True, **NEUTRAL, **own)
    assert replace(asked, keys=()) == replace(read(url, stream=True), keys=())
    others = {"use_beam_search": True, "length_penalty": 0.5, "priority": 1, "top_logprobs": 1}
    others |= {"add_special_tokens": not own["add_special_tokens"], "include_reasoning": False}
    for name, value in others.items():
        with pytest.raises(BodyError, match=rf"^{name}: "):
            read(url, **{name: value})


def test_a_parser_sees_special_tokens_and_a_forced_call_has_none():
    tools = [{"type": "function", "function": {"name": "look"}}]
    for marks in (None, ("<think>", "</think>")):
        parser = Parser(lambda *_, **__: None, {}, marks)
        parsed = [
            read_body(CHAT, {"messages": MESSAGES, "tools": tools, **body}, DEFAULTS, parser=parser)
            for body in ({}, {"tool_choice": "required"}, {"tool_choice": "none"})
        ]
        # But where it waits for the marks of reasoning.
        skips = [one.params.skip_special_tokens for one in parsed]
        assert skips == [False, marks is None, False]
        assert [len(one.tools) for one in parsed] == [1, 1, 0]
        assert parsed[1].params.structured_outputs.reasoning == marks
        assert [one.params.reasoning for one in parsed] == [marks] * 3
        own = replace(DEFAULTS, reasoning=("<a>", "so</a>"))
        body = {"messages": MESSAGES, "thinking_token_budget": 5}
        params = read_body(CHAT, body, own, parser=parser).params
        assert (params.reasoning, params.thinking_token_budget) == (own.reasoning, 5)
    assert read(CHAT, tools=tools).params.skip_special_tokens
    with pytest.raises(BodyError, match=r"^tool_choice: expected no other form of the answer$"):
        read(CHAT, tools=tools, tool_choice="required", response_format={"type": "json_object"})


def test_lists_are_no_longer_than_what_is_checked_quickly():
    for name, most in MOST.items():
        one = {"1": 0} if name == "logit_bias" else [0]
        many = {str(i): 0 for i in range(most + 1)} if isinstance(one, dict) else one * (most + 1)
        with pytest.raises(BodyError, match=rf"^{name}: expected at most {most}, got {most + 1}$"):
            read(COMPLETIONS, **{name: many})
    assert read(COMPLETIONS, allowed_token_ids=[3] * 2**18).params.allowed_token_ids


def test_names_of_other_interfaces_are_refused_with_the_nearest_key():
    for name, near in {
        "max_new_tokens": "max_tokens",
        "guided_json": "structured_outputs",
        "truncate_prompt_tokens": "token ids that are cut before",
        "prompt_logprobs": "echo with logprobs, of a completion",
        "functions": "tools",
    }.items():
        with pytest.raises(BodyError, match=rf"^{name}: unknown, .* \(nearest: {near}\)$"):
            read(COMPLETIONS, **{name: 5})


def test_what_a_stream_says_of_its_usage():
    asked = [
        read(COMPLETIONS, stream=True, stream_options=options)
        for options in (
            {},
            {"include_usage": True},
            {"include_usage": True, "continuous_usage_stats": True},
            {"continuous_usage_stats": True},
        )
    ]
    told = [(one.include_usage, one.usage_in_chunks) for one in asked]
    assert told == [(False, False), (True, False), (True, True), (True, True)]


def test_whole_numbers_may_be_written_as_floats():
    whole = {"max_tokens": 5.0, "n": 2.0, "seed": 7.0, "temperature": 1.0}
    params = read(COMPLETIONS, **whole).params
    assert (params.max_tokens, params.n, params.seed, params.temperature) == (5, 2, 7, 1.0)
    for value in (5.5, 1e300):
        with pytest.raises(BodyError, match=r"^max_tokens: expected"):
            read(COMPLETIONS, max_tokens=value)


def test_answers_are_json_without_infinities_and_bytes_of_part_of_a_character_are_not_known():
    scores = {3: Logprob(-1.0, 1, "\ufffd"), 4: Logprob(float("-inf"), 2, "é")}
    one = CompletionOutput(0, "é", [4], logprobs=[scores], finish_reason="capacity")
    output = RequestOutput("0", "a", [1, 2], [one], True, num_cached_tokens=1)
    asked = read(CHAT, logprobs=True, top_logprobs=1)
    answer = Answer(asked=asked, model="m", decode=lambda _: "?", id="i", created=1)
    body = json.loads(json.dumps(answer.whole([output]), allow_nan=False))
    (choice,) = body.pop("choices")
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert choice["finish_reason"] == "length"
    top = [{"token": "\ufffd", "logprob": -1.0, "bytes": None}]
    entry = {"token": "é", "logprob": -9999.0, "bytes": list("é".encode()), "top_logprobs": top}
    assert choice["logprobs"]["content"] == [entry]


def test_the_token_behind_a_bare_echo_ends_nothing():
    asked = read(COMPLETIONS, echo=True, max_tokens=0, min_tokens=1, stop="b", stop_token_ids=[3])
    assert asked.params == replace(DEFAULTS, max_tokens=1, ignore_eos=True)
    assert not asked.has_output


def test_a_stream_shows_what_is_new_and_an_end_once():
    answer = Answer(asked=read(COMPLETIONS, n=2), model="m", decode=lambda _: "?")
    first, second = (
        CompletionOutput(0, "ab", [1], finish_reason="stop"),
        CompletionOutput(1, "", []),
    )
    shown = []
    for text, reason in (("", None), ("c", None), ("cd", None), ("cd", "length")):
        second.text, second.finish_reason = text, reason
        chunks = answer.chunks(0, RequestOutput("0", "a", [1], [first, second]))
        choices = [chunk["choices"][0] for chunk in chunks]
        shown.append([(one["index"], one["text"], one["finish_reason"]) for one in choices])
    assert shown == [[(0, "ab", "stop")], [(1, "c", None)], [(1, "d", None)], [(1, "", "length")]]


@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
def test_tokens_of_prompt_and_choices_are_shown_where_they_are_wanted(url):
    def output(num: int) -> RequestOutput:
        reason = "stop" if num == 4 else None
        ones = [
            CompletionOutput(i, "abcd"[:num], [7, 8, 9, i][:num], finish_reason=reason)
            for i in (0, 1)
        ]
        return RequestOutput("0", "a", [1, 2], ones, num == 4)

    for wanted in (True, False):
        asked = read(url, n=2, temperature=1, return_token_ids=wanted)
        whole = Answer(asked=asked, model="m", decode=str).whole([output(4)])
        stream, found = Answer(asked=asked, model="m", decode=str), [[], []]
        chunks = [chunk for num in (0, 1, 3, 4) for chunk in stream.chunks(0, output(num))]
        prompts = [one["prompt_token_ids"] for one in chunks if "prompt_token_ids" in one]
        for choice in (one for chunk in chunks for one in chunk["choices"]):
            found[choice["index"]] += choice.get("token_ids", [])
            prompts += [choice["prompt_token_ids"]] if "prompt_token_ids" in choice else []
        assert [one.get("token_ids", []) for one in whole["choices"]] == found
        assert found == ([[7, 8, 9, 0], [7, 8, 9, 1]] if wanted else [[], []])
        assert prompts == ([[1, 2]] * 2 if wanted else [])
        of_whole = [whole] if url == CHAT else whole["choices"]
        assert all(one.get("prompt_token_ids") == ([1, 2] if wanted else None) for one in of_whole)


def test_a_stream_makes_text_of_an_echoed_prompt_once():
    decoded = []
    answer = Answer(
        asked=read(COMPLETIONS, n=2, echo=True, prompt=[[5, 6]], temperature=1),
        model="m",
        decode=lambda tokens: decoded.append([*tokens]) or "five six",
    )
    ones, texts = [CompletionOutput(index, "", []) for index in range(2)], ["", ""]
    for text in ("", " a", " a b"):
        ones[1].text = text
        for chunk in answer.chunks(0, RequestOutput("0", None, [5, 6], ones)):
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert (texts, decoded) == (["five six", "five six a b"], [[5, 6]])


def test_a_form_that_is_asked_for_is_a_structured_output():
    schema = {"type": "object"}
    named = {"name": "x", "schema": schema, "strict": True}
    for body, want in (
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputsParams(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": named}},
            StructuredOutputsParams(json=schema),
        ),
        ({"structured_outputs": {"choice": ["a"]}}, StructuredOutputsParams(choice=["a"])),
    ):
        body |= {"messages": [{"role": "user", "content": "x"}]}
        assert read_body(CHAT, body, SamplingParams()).params.structured_outputs == want
