"""Reads OpenAI's requests for responses as those for chats, and writes their answers.

Nothing is kept: each request brings the whole conversation.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxkv.api.openai_answers import Answer
from jaxkv.api.openai_format import CHAT, Asked, BodyError, Keys, read_body
from jaxkv.api.response_parts import Parser
from jaxkv.config import SamplingParams
from jaxkv.requests.outputs import RequestOutput
from jaxkv.structured import is_reasoning

RESPONSES = "/v1/responses"

NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
"""Names of chats' keys, which are not taken here, and what they are called in responses."""

NOT_HERE = ("n", "logprobs", "echo", "return_token_ids")
STORING = ("previous_response_id", "conversation", "background", "prompt")

Event = dict[str, Any]
Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AskedResponse:
    """Holds the request for a chat that a body comes to, and what its answers repeat of it."""

    chat: Asked
    about: Mapping[str, Any]

    @property
    def model(self) -> str | None:
        return self.chat.model


def read_response(
    body: Mapping[str, Any], defaults: SamplingParams, *, parser: Parser | None = None
) -> AskedResponse:
    """Reads the body of a request to RESPONSES, as `read_body` does that of a chat. Raises:
    BodyError.
    """
    for key in (*NAMES, *NOT_HERE):
        if body.get(key) is not None:
            near = f" (nearest: {NAMES[key]})" if key in NAMES else ""
            raise BodyError(f"{key}: unknown, or not supported{near}", key)
    chat: dict[str, Any] = dict(body)
    keys = Keys(body)
    for name in STORING:
        if chat.pop(name, None) not in (None, False):
            raise BodyError(f"{name}: expected none: nothing is kept here", name)
    _check(keys, chat, "store", bool, (True, False))
    _check(keys, chat, "truncation", str, ("disabled",))
    _check(keys, chat, "top_logprobs", int, (0,))
    _check(keys, chat, "include", list, ([], ["reasoning.encrypted_content"]))
    _check(keys, chat, "stream_options", dict, ({}, {"include_obfuscation": False}))
    instructions = keys.take("instructions", str)
    chat["messages"] = [
        *([] if instructions is None else [{"role": "system", "content": instructions}]),
        *_messages(keys.take_any("input")),
    ]
    chat["max_completion_tokens"] = keys.take("max_output_tokens", int)
    chat["tools"] = [*map(_tool, keys.take("tools", list, []))] or None
    chat["tool_choice"] = _choice(keys.take_any("tool_choice"))
    chat["response_format"] = _form(keys.take("text", dict, {}))
    chat["reasoning_effort"] = _effort(keys.take("reasoning", dict, {}))
    for name in ("input", "instructions", "max_output_tokens", "text", "reasoning"):
        chat.pop(name, None)
    try:
        asked = read_body(CHAT, chat, defaults, parser=parser)
    except BodyError as error:
        named = None if error.key is None else NAMES.get(error.key, error.key)
        raise BodyError(_renamed(str(error)), named) from error
    about = {
        "instructions": instructions,
        "max_output_tokens": asked.params.max_tokens,
        "temperature": asked.params.temperature,
        "top_p": asked.params.top_p,
        "tools": body.get("tools") or [],
        "tool_choice": body.get("tool_choice") or "auto",
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "text": body.get("text") or {"format": {"type": "text"}},
        "reasoning": body.get("reasoning"),
        "metadata": body.get("metadata") or {},
        "user": body.get("user"),
    }
    return AskedResponse(replace(asked, keys=tuple(body), include_usage=False), about)


def _check(keys: Keys, chat: dict[str, Any], name: str, kind: type, taken: tuple[Any, ...]) -> None:
    """Takes a key that changes nothing. Raises: BodyError for a value that would."""
    chat.pop(name, None)
    value = keys.take(name, kind)
    if value is not None and value not in taken:
        expected = " or ".join(map(json.dumps, taken))
        raise BodyError(f"{name}: expected {expected}, got {json.dumps(value):.80}", name)


def _renamed(message: str) -> str:
    """Returns the message of a chat's error with the name that a key has here."""
    name, colon, rest = message.partition(":")
    return NAMES.get(name, name) + colon + rest


def _messages(given: Any) -> list[dict[str, Any]]:
    """Returns a chat's messages: what an assistant has reasoned, said and called in items that
    follow each other is one. Raises: BodyError.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise BodyError("input: expected a text or a list of items, at least one", "input")
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None
    for number, item in enumerate(given):
        where = f"input: item {number}: expected"
        kind = item.get("type") or "message" if isinstance(item, dict) else None
        if kind == "function_call_output":
            call, output = _fields(item, where, "call_id", "output")
            messages.append({"role": "tool", "tool_call_id": call, "content": output})
        elif kind == "message" and item.get("role") != "assistant":
            role, content = _fields(item, where, "role", "content")
            messages.append({"role": role, "content": content})
        else:
            name, value = _of_assistant(kind, item, where)
            if turn is None or any(turn.get(one) for one in BEHIND.get(name, ())):
                turn = {"role": "assistant", "content": None}
                messages.append(turn)
            turn[name] = [*turn.get(name, ()), value] if name == "tool_calls" else value
            continue
        turn = None
    return messages


BEHIND = {
    "reasoning": ("reasoning", "content", "tool_calls"),
    "content": ("content", "tool_calls"),
}
"""What comes behind each part of an assistant's message, and so begins another one."""


def _of_assistant(kind: Any, item: Any, where: str) -> tuple[str, Any]:
    """Returns the part of an assistant's message that an item is, and its name. Raises:
    BodyError.
    """
    if kind == "message":
        return "content", _fields(item, where, "content")[0]
    if kind == "function_call":
        name, arguments, call = _fields(item, where, "name", "arguments", "call_id")
        function = {"name": name, "arguments": arguments}
        return "tool_calls", {"id": call, "type": "function", "function": function}
    if kind == "reasoning":
        name = "content" if item.get("content") else "summary"
        return "reasoning", _fields(item, where, name)[0]
    expected = "a message, function_call, function_call_output or reasoning"
    raise BodyError(f"{where} {expected}, got {json.dumps(item):.80}", "input")


def _fields(item: Mapping[str, Any], where: str, *names: str) -> list[str]:
    """Returns the texts of an item. Raises: BodyError."""
    found = []
    for name in names:
        value = item.get(name)
        if isinstance(value, list):
            parts = [one if isinstance(one, dict) else {} for one in value]
            texts = [one["text"] for one in parts if isinstance(one.get("text"), str)]
            if len(texts) == len(parts) and all(one.get("type") in TEXTS for one in parts):
                value = "\n".join(texts)
        if not isinstance(value, str):
            raise BodyError(f"{where} {name} to be a text, got {json.dumps(value):.80}", "input")
        found.append(value)
    return found


TEXTS = {"input_text", "output_text", "text", "reasoning_text", "summary_text"}
"""Kinds of parts that are texts."""


def _tool(given: Any) -> dict[str, Any]:
    """Returns a chat's form of a function; `strict` says nothing, as what has to be called is
    always as its schema says. Raises: BodyError.
    """
    known = {"type", "name", "description", "parameters", "strict"}
    tool = _without_none(given) if isinstance(given, dict) else {}
    if tool.get("type") != "function" or not tool.keys() <= known:
        expected = '{"type": "function", "name": ..., "parameters": {...}}'
        raise BodyError(f"tools: expected {expected}, got {json.dumps(given):.80}", "tools")
    function = {key: value for key, value in tool.items() if key not in ("type", "strict")}
    return {"type": "function", "function": function}


def _choice(given: Any) -> Any:
    """Returns a chat's form of the choice of a tool."""
    if isinstance(given, dict) and given.keys() == {"type", "name"}:
        return {"type": given["type"], "function": {"name": given["name"]}}
    return given


def _form(text: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns a chat's response_format. Raises: BodyError."""
    given = _without_none(text)
    form, verbosity = given.pop("format", None), given.pop("verbosity", "medium")
    if given or verbosity != "medium" or not isinstance(form, dict | None):
        expected = '{"format": {"type": "text", "json_object" or "json_schema", ...}}'
        raise BodyError(f"text: expected {expected}, got {json.dumps(text):.80}", "text")
    if form is None or form.get("type") != "json_schema":
        return form
    schema = _without_none(form)
    del schema["type"]
    return {"type": "json_schema", "json_schema": schema}


def _effort(reasoning: Mapping[str, Any]) -> Any:
    """Returns a chat's reasoning_effort. Raises: BodyError."""
    given = _without_none(reasoning)
    effort, summary = given.pop("effort", None), given.pop("summary", "auto")
    if given or summary != "auto":  # whatever it is, the text itself is shown
        raise BodyError(
            f'reasoning: expected {{"effort": ...}}, got {json.dumps(reasoning):.80}', "reasoning"
        )
    return effort


def _without_none(given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if value is not None}


class ResponseAnswer:
    """Writes the answer to one request: whole, or in events as its output grows.

    chat: writes the same answer as a chat, of which one choice is taken.
    """

    def __init__(self, asked: AskedResponse, chat: Answer) -> None:
        self._asked = asked
        self._chat = chat
        self._number = uuid.uuid4().hex
        self._items: list[Item] = []
        self._num_events = 0
        self._reason: str | None = None
        self._output: RequestOutput | None = None

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Returns the body of an answer that is not streamed."""
        (self._output,) = outputs
        (choice,) = self._chat.whole(outputs)["choices"]
        for _ in self._said(choice["message"]):
            pass
        self._reason = choice["finish_reason"]
        return self._ended()[-1]["response"]

    def begin(self) -> list[Event]:
        """Returns the events before anything is said."""
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=self._response("in_progress")) for kind in kinds]

    def events(self, output: RequestOutput) -> Iterator[Event]:
        """Yields the events of what is new in an output, with those of its end if it has one."""
        self._output = output
        for chunk in self._chat.chunks(0, output):
            (choice,) = chunk["choices"]
            yield from self._said(choice["delta"])
            self._reason = choice["finish_reason"]
        if self._reason is not None:
            yield from self._ended()

    def _said(self, said: Mapping[str, Any]) -> Iterator[Event]:
        """Yields the events of a chat's message, or of a part of it."""
        for name, kind in (("reasoning", "reasoning"), ("content", "message")):
            if text := said.get(name):
                yield from self._add(kind, text)
        for call in said.get("tool_calls") or ():
            function = call["function"]
            if "id" in call:
                new = {"call_id": call["id"], "name": function["name"], "arguments": ""}
                yield from self._open("function_call", new)
            yield from self._add("function_call", function["arguments"])

    def _add(self, kind: str, text: str) -> Iterator[Event]:
        """Adds text to the newest item, or to a new one where that is of another kind."""
        if not self._items or self._items[-1]["type"] != kind:
            more: Item = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
            yield from self._open(kind, {**more, "content": []})
            self._items[-1]["content"] = [_part(kind, "")]
            yield self._of_item("response.content_part.added", 0, part=_part(kind, ""))
        item = self._items[-1]
        if kind == "function_call":
            item["arguments"] += text
            yield self._of_item("response.function_call_arguments.delta", None, delta=text)
            return
        item["content"][0]["text"] += text
        scores: Item = {} if kind == "reasoning" else {"logprobs": []}
        yield self._of_item(f"{TEXT_OF[kind]}.delta", 0, delta=text, **scores)

    def _open(self, kind: str, more: Item) -> Iterator[Event]:
        """Begins an item, which ends the one before."""
        yield from self._close("completed")
        number = f"{PREFIX[kind]}_{self._number}_{len(self._items)}"
        self._items.append({"id": number, "type": kind, "status": "in_progress", **more})
        yield self._event(
            "response.output_item.added",
            output_index=len(self._items) - 1,
            item={**self._items[-1]},
        )

    def _close(self, status: str) -> Iterator[Event]:
        """Ends the newest item, if there is one."""
        if not self._items:
            return
        item, kind = self._items[-1], self._items[-1]["type"]
        item["status"] = status
        if kind == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self._of_item("response.function_call_arguments.done", None, **done)
        else:
            (part,) = item["content"]
            scores: Item = {} if kind == "reasoning" else {"logprobs": []}
            yield self._of_item(f"{TEXT_OF[kind]}.done", 0, text=part["text"], **scores)
            yield self._of_item("response.content_part.done", 0, part=part)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _ended(self) -> list[Event]:
        """Returns the events of the end, of which the last one has the whole response."""
        status = "incomplete" if self._reason == "length" else "completed"
        last = [*self._close(status)]
        return [*last, self._event(f"response.{status}", response=self._response(status))]

    def _event(self, kind: str, **more: Any) -> Event:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **more}

    def _of_item(self, kind: str, index: int | None, **more: Any) -> Event:
        """Returns an event of the newest item, and maybe of a part of its content."""
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        place |= {} if index is None else {"content_index": index}
        return self._event(kind, **place, **more)

    def _response(self, status: str) -> dict[str, Any]:
        is_cut, is_over = status == "incomplete", status != "in_progress"
        return {
            "id": f"resp_{self._number}",
            "object": "response",
            "created_at": self._chat.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self._chat.model,
            "output": self._items if is_over else [],
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": self._usage() if is_over else None,
            **self._asked.about,
        }

    def _usage(self) -> dict[str, Any]:
        output = self._output
        if output is None:
            raise RuntimeError("a response has ended without an output")
        (said,) = output.outputs
        num_prompt, num_new = len(output.prompt_token_ids), len(said.token_ids)
        cached = {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": 0}
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": cached,
            "output_tokens": num_new,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning(output)},
            "total_tokens": num_prompt + num_new,
        }

    def _num_reasoning(self, output: RequestOutput) -> int:
        """Counts the tokens up to the mark that ends reasoning, 0 where nobody knows the marks."""
        parser, decode = self._chat.parser, self._chat.decode
        if parser is None or parser.marks is None:
            return 0
        opens = parser.marks[0]
        prompt = decode(output.prompt_token_ids) if output.prompt is None else output.prompt
        tokens = output.outputs[0].token_ids
        is_open = is_reasoning(prompt, parser.marks)
        if is_open is None:
            is_open = decode(tokens[:8]).lstrip().startswith(opens)
        if not is_open:
            return 0
        size = len(parser.closes)
        ends = (n for n in range(size, len(tokens)) if tuple(tokens[n - size : n]) == parser.closes)
        return next(ends, len(tokens))


TEXT_OF = {"reasoning": "response.reasoning_text", "message": "response.output_text"}
PREFIX = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


def _part(kind: str, text: str) -> Item:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
