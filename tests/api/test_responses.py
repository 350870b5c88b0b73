"""Responses say what chats say, in OpenAI's own forms of items and events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from transformers import AutoTokenizer

from jaxkv import SamplingParams
from jaxkv.api.openai_answers import Answer
from jaxkv.api.openai_format import CHAT, BodyError, read_body
from jaxkv.api.openai_responses import ResponseAnswer, read_response
from jaxkv.api.response_parts import Parser, parser_of
from jaxkv.requests.outputs import CompletionOutput, RequestOutput
from tokenizers_ import save_tokenizer

DEFAULTS = SamplingParams(temperature=0.5, top_p=0.75)
LOOK = {"type": "object", "properties": {"x": {"type": "string"}}}
CALL = '{"name": "look", "arguments": {"x": "é"}}'
REASONED = "<think>\nHm, é.</think>"
TEXT = f"{REASONED}\nI look.<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"
EVENTS = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def parser(tmp_path_factory) -> Parser:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    parser = parser_of(AutoTokenizer.from_pretrained(directory), "qwen3")
    marks = ("<think>", "</think>")
    return replace(parser, marks=marks, closes=tuple(map(ord, marks[1])))


def grown(text: str, width: int, end: str = "stop") -> Iterator[RequestOutput]:
    """Outputs whose tokens are characters."""
    for size in [*range(width, len(text), width), len(text)]:
        reason = end if size == len(text) else None
        said = CompletionOutput(0, text[:size], [*map(ord, text[:size])], finish_reason=reason)
        yield RequestOutput("0", "A:", [65, 58], [said], finished=reason is not None)


def writer(parser: Parser | None, **body) -> ResponseAnswer:
    asked = read_response({"input": "Hi", **body}, DEFAULTS, parser=parser)
    decode = lambda tokens: "".join(map(chr, tokens))  # noqa: E731
    chat = Answer(asked=asked.chat, model="tiny", decode=decode, parser=parser, id="chatcmpl-0")
    return ResponseAnswer(asked, chat)


def shown(response: dict) -> dict:
    """Without what is another one each time, after OpenAI's client has taken it."""
    Response.model_validate(response, strict=False)
    text = json.dumps({**response, "created_at": 0, "completed_at": None})
    return json.loads(text.replace(response["id"].removeprefix("resp_"), "0"))


TOOLS = [{"type": "function", "name": "look", "parameters": LOOK, "strict": True}]


@pytest.mark.parametrize("width", [1, 7, 1000])
def test_a_stream_ends_with_what_a_whole_answer_is(parser, width):
    """And its events add up to it."""
    body = {"tools": TOOLS, "max_output_tokens": 999, "temperature": 0.25}
    whole = shown(writer(parser, **body).whole([*grown(TEXT, 1000)]))
    writes = writer(parser, **body, stream=True)
    events = [*writes.begin()]
    for output in grown(TEXT, width):
        events += [json.loads(json.dumps(event)) for event in writes.events(output)]
    for number, event in enumerate(events):
        assert EVENTS.validate_python(event).type == event["type"]
        assert event["sequence_number"] == number
    kinds = [event["type"] for event in events]
    assert kinds[:3] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
    ]
    assert shown(events[-1]["response"]) == whole
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert items == events[-1]["response"]["output"]
    for index, item in enumerate(items):
        of_item = [event for event in events if event.get("output_index") == index]
        added, *_, done = of_item
        assert added["item"]["status"] == "in_progress"
        assert not added["item"].get("content")
        assert not added["item"].get("arguments")
        assert (done["item"], item["status"]) == (item, "completed")
        deltas = "".join(event["delta"] for event in of_item if "delta" in event)
        text = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        last = next(event for event in of_item if event["type"].endswith((".done",)))
        assert text == deltas == last.get("text", last.get("arguments"))


def test_items_are_what_a_chat_says(parser):
    response = writer(parser, tools=TOOLS).whole([*grown(TEXT, 1000)])
    chat = read_body(
        CHAT,
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "tools": [{"type": "function", "function": {"name": "look"}}],
        },
        DEFAULTS,
        parser=parser,
    )
    answer = Answer(asked=chat, model="tiny", decode=lambda ids: "", parser=parser)
    said = answer.whole([*grown(TEXT, 1000)])["choices"][0]["message"]
    reasoning, message, *calls = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": said["reasoning"]}]
    assert message["content"][0]["text"] == said["content"] == "I look."
    assert [(one["name"], one["arguments"]) for one in calls] == [
        (one["function"]["name"], one["function"]["arguments"]) for one in said["tool_calls"]
    ]
    assert len({one["call_id"] for one in calls}) == len(calls) == 2
    assert response["usage"] == {
        "input_tokens": 2,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": len(TEXT),
        "output_tokens_details": {"reasoning_tokens": len(REASONED)},
        "total_tokens": len(TEXT) + 2,
    }
    one = writer(parser, tools=TOOLS, parallel_tool_calls=False).whole([*grown(TEXT, 1000)])
    assert [item["type"] for item in one["output"]] == ["reasoning", "message", "function_call"]


def test_an_answer_that_is_cut_off_is_incomplete(parser):
    for text, count in ((TEXT[: TEXT.index("I look.") + 4], len(REASONED)), ("<think>Hm", 9)):
        response = writer(parser, tools=TOOLS).whole([*grown(text, 1000, "length")])
        assert response["status"] == response["output"][-1]["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": count}
    plain = writer(None).whole([*grown(TEXT, 1000)])
    assert [item["content"][0]["text"] for item in plain["output"]] == [TEXT]
    assert plain["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}


def test_a_conversation_is_the_chat_that_its_items_are(parser):
    """Those of an answer may be sent back as they came."""
    answer = writer(parser, tools=TOOLS).whole([*grown(TEXT, 1000)])["output"]
    first, second = (item["call_id"] for item in answer if item["type"] == "function_call")
    given = [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "One"},
                {"type": "input_text", "text": "two"},
            ],
        },
        *answer,
        {"type": "function_call_output", "call_id": first, "output": "1"},
        {
            "type": "function_call_output",
            "call_id": second,
            "output": [{"type": "input_text", "text": "2"}],
        },
        {"type": "message", "role": "assistant", "content": "So."},
        {"role": "assistant", "content": "And so."},
        {"role": "developer", "content": "Be brief."},
    ]
    form = {"type": "json_schema", "name": "x", "schema": LOOK, "strict": True}
    body = {
        "model": "tiny",
        "instructions": "Be kind.",
        "input": given,
        "tools": TOOLS,
        "tool_choice": {"type": "function", "name": "look"},
        "max_output_tokens": 9,
        "reasoning": {"effort": "low", "summary": "auto"},
        "store": True,
        "include": ["reasoning.encrypted_content"],
        "truncation": "disabled",
        "top_k": 3,
        "seed": 4,
        "user": "me",
        "metadata": {"a": "b"},
    }
    call = {"name": "look", "arguments": '{"x": "é"}'}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "One\ntwo"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning": "Hm, é.",
            "tool_calls": [
                {"id": one, "type": "function", "function": call} for one in (first, second)
            ],
        },
        {"role": "tool", "tool_call_id": first, "content": "1"},
        {"role": "tool", "tool_call_id": second, "content": "2"},
        {"role": "assistant", "content": "So."},
        {"role": "assistant", "content": "And so."},
        {"role": "developer", "content": "Be brief."},
    ]
    function = {"name": "look", "parameters": LOOK}
    chat = {
        "model": "tiny",
        "messages": messages,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "max_completion_tokens": 9,
        "reasoning_effort": "low",
        "top_k": 3,
        "seed": 4,
    }
    asked = read_response(body, DEFAULTS).chat
    assert replace(asked, keys=()) == replace(read_body(CHAT, chat, DEFAULTS), keys=())
    assert asked.keys == tuple(body)
    only = read_response({"input": "Hi", "text": {"format": form}}, DEFAULTS).chat
    json_schema = {"name": "x", "schema": LOOK, "strict": True}
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    chat |= {"response_format": {"type": "json_schema", "json_schema": json_schema}}
    assert replace(only, keys=()) == replace(read_body(CHAT, chat, DEFAULTS), keys=())


@pytest.mark.parametrize(
    ("changes", "key", "says"),
    [
        ({"input": None}, "input", "expected a text or a list of items"),
        ({"input": []}, "input", "expected a text or a list of items"),
        ({"input": [3]}, "input", "item 0: expected a message, function_call, "),
        (
            {"input": [{"type": "item_reference", "id": "a"}]},
            "input",
            "item 0: expected a message, ",
        ),
        (
            {"input": [{"role": 1, "content": "a"}]},
            "input",
            "item 0: expected role to be a text, got 1",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input",
            "input_image",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "text": "a"}]}]},
            "input",
            "input_file",
        ),
        (
            {"input": [{"type": "function_call", "name": "a"}]},
            "input",
            "arguments to be a text, got null",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools", 'got {"type": "web_search"}'),
        ({"tools": [None]}, "tools", "got null"),
        ({"tools": [3]}, "tools", "got 3"),
        ({"tools": [{**TOOLS[0], "more": 1}]}, "tools", "expected"),
        ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice", "expected"),
        ({"text": {"verbosity": "low"}}, "text", "expected"),
        ({"text": {"format": 3}}, "text", "expected"),
        ({"text": {"format": {"type": "xml"}}}, "text", "expected"),
        ({"reasoning": {"effort": "low", "summary": "detailed"}}, "reasoning", "expected"),
        ({"reasoning": 3}, "reasoning", "expected an object"),
        ({"max_output_tokens": 0}, "max_output_tokens", "expected None or a number >= 1, got 0"),
        ({"max_output_tokens": "9"}, "max_output_tokens", "expected a whole number"),
        ({"max_tokens": 9}, "max_tokens", "nearest: max_output_tokens"),
        ({"messages": []}, "messages", "nearest: input"),
        ({"n": 2}, "n", "not supported"),
        ({"return_token_ids": True}, "return_token_ids", "not supported"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is kept here"),
        ({"background": True}, "background", "nothing is kept here"),
        ({"truncation": "auto"}, "truncation", 'expected "disabled", got "auto"'),
        ({"include": ["file_search_call.results"]}, "include", "expected"),
        ({"top_logprobs": 3}, "top_logprobs", "expected 0, got 3"),
        ({"temperature": -1}, "temperature", "expected"),
        ({"wizard": 1}, "wizard", "unknown, or not supported"),
    ],
    ids=str,
)
def test_what_is_not_possible_is_refused_by_its_key(changes, key, says):
    with pytest.raises(BodyError) as refused:
        read_response({"input": "Hi", **changes}, DEFAULTS)
    assert refused.value.key == key
    assert str(refused.value).startswith(f"{key}: ")
    assert says in str(refused.value)
