"""Gives the content of chat messages the form that a template reads: one text, or a list of parts;
and the arguments of tool calls theirs, which is an object.

Clients send either form (`"content": "Hi"` or `"content": [{"type": "text", "text": "Hi"}]`), and
most templates know only the first: with the second they print Python's list, or leave it out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import lru_cache
from typing import Any


class RefusedChatError(ValueError):
    """One conversation is refused, by its form or by the template."""


class Form(Enum):
    """Says which forms of content a template reads: one that loops over content reads PARTS, and
    TEXT beside them if it asks anywhere whether something is a string.
    """

    TEXT = "a text"
    PARTS = "a list of parts"
    BOTH = "a text or a list of parts"


REASONING = ("reasoning", "reasoning_content")
"""Names what an assistant has reasoned: vLLM's, which our answers have, and most templates'."""

FORMATS = {"auto": None, "string": Form.TEXT, "openai": Form.PARTS}
"""vLLM's names of the forms; None: as the template reads."""


@lru_cache(maxsize=16)
def form_of(template: str) -> Form:
    """Returns what a template reads, by its syntax tree: a loop counts that goes over
    `<anything>.content`, `<anything>["content"]`, or a name that is `content` (as in macros) or
    was set to one of those.

    Raises: jinja2.TemplateSyntaxError.
    """
    from jinja2 import nodes

    tree, names = _parsed(template), {"content"}

    def is_content(node: nodes.Node | None) -> bool:
        while isinstance(node, nodes.Filter):  # content | selectattr("type", "equalto", "text")
            node = node.node
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        return isinstance(node, nodes.Name) and node.name in names

    for one in tree.find_all(nodes.Assign):
        if isinstance(one.target, nodes.Name) and is_content(one.node):
            names.add(one.target.name)
    if not any(is_content(loop.iter) for loop in tree.find_all(nodes.For)):
        return Form.TEXT
    asks = any(test.name == "string" for test in tree.find_all(nodes.Test))
    return Form.BOTH if asks else Form.PARTS


@lru_cache(maxsize=16)
def names_read(template: str) -> frozenset[str]:
    """Returns the names of variables that a template reads anywhere.

    Raises: jinja2.TemplateSyntaxError.
    """
    from jinja2 import nodes

    found = _parsed(template).find_all(nodes.Name)
    return frozenset(one.name for one in found if one.ctx == "load")


def _parsed(template: str) -> Any:
    from jinja2 import Environment

    return Environment(extensions=["jinja2.ext.loopcontrols", _generation_tag()]).parse(template)


def _generation_tag() -> Any:
    """Returns the extension that reads {% generation %}, which transformers' templates may have."""
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation


def with_known_roles(
    messages: Sequence[Mapping[str, Any]], template: str
) -> Sequence[Mapping[str, Any]]:
    """Returns the messages with OpenAI's newer role "developer" as "system" where the template
    never names it, as in vLLM: most templates leave out or refuse a role that they do not know.
    """
    if '"developer"' in template or "'developer'" in template:
        return messages
    return [
        {**message, "role": "system"} if message.get("role") == "developer" else message
        for message in messages
    ]


def formed(messages: Sequence[Mapping[str, Any]], form: Form) -> list[Mapping[str, Any]]:
    """Returns the messages with each content in a form that the template reads.

    For a template that reads texts, parts are joined by line breaks; for one that reads only parts,
    a text becomes one. One that reads both gets what was given, but a single part as its text.
    Raises: RefusedChatError naming the message and part that is no text.
    """
    return [_formed(number, message, form) for number, message in enumerate(messages)]


def read_messages(messages: Any) -> list[Mapping[str, Any]]:
    """Returns the messages of a conversation with the arguments of tool calls as objects, as
    templates read them; OpenAI's have them as JSON in a text, which a template would write as JSON
    once more. What an assistant has reasoned goes by both names that templates have for it.

    Raises: RefusedChatError for what is no conversation, naming the message whose role is no text,
    or whose arguments are no JSON.
    """
    listed = isinstance(messages, Sequence) and all(
        isinstance(message, Mapping) for message in messages
    )
    if not listed or not messages:
        expected = 'a list of {"role": ..., "content": ...} messages'
        raise RefusedChatError(f"expected {expected}, got {messages!r:.80}")
    for number, message in enumerate(messages):
        if not isinstance(role := message.get("role"), str):
            raise RefusedChatError(
                f'message {number}: role: expected a text such as "user", got {role!r:.80}'
            )
    return [
        _with_reasoning(_with_objects(number, message)) for number, message in enumerate(messages)
    ]


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    given = [message[name] for name in REASONING if message.get(name) is not None]
    if message["role"] != "assistant" or not given:
        return message
    return {**message, **dict.fromkeys(REASONING, given[0])}


def _with_objects(number: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return message
    read = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and isinstance(text := function.get("arguments"), str):
            try:
                function = {**function, "arguments": json.loads(text) if text else {}}
            except (ValueError, RecursionError) as error:
                raise RefusedChatError(
                    f"message {number}: expected JSON in the arguments of a tool call, got "
                    f"{text!r:.80}"
                ) from error
            call = {**call, "function": function}
        read.append(call)
    return {**message, "tool_calls": read}


def _formed(number: int, message: Mapping[str, Any], form: Form) -> Mapping[str, Any]:
    content = message.get("content")
    if content is None:
        return message
    if isinstance(content, str):
        return message if form is not Form.PARTS else {**message, "content": _parts([content])}
    if not isinstance(content, list | tuple):
        raise RefusedChatError(
            f"message {number}: content: expected a text or a list of parts, got "
            f"{type(content).__name__}"
        )
    texts = [_text(f"message {number}: content part {i}", part) for i, part in enumerate(content)]
    if form is Form.TEXT or (form is Form.BOTH and len(texts) < 2):
        return {**message, "content": "\n".join(texts)}
    return {**message, "content": _parts(texts)}


def _parts(texts: Sequence[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _text(where: str, part: Any) -> str:
    """Returns the text of a part: {"type": "text", "text": ...}, or a text as such."""
    if isinstance(part, str):
        return part
    expected = '{"type": "text", "text": ...} (models here read text only)'
    if not isinstance(part, Mapping):
        raise RefusedChatError(f"{where}: expected {expected}, got {type(part).__name__}")
    kind = part.get("type", "text")
    if not isinstance(kind, str) or kind != "text":
        raise RefusedChatError(f"{where}: expected {expected}, got type {kind!r:.80}")
    if not isinstance(text := part.get("text"), str):
        raise RefusedChatError(f"{where}: expected {expected}, got text of {type(text).__name__}")
    others = sorted(str(key) for key, value in part.items() if value is not None)
    # cache_control is a hint to other servers; here the prefix cache needs none.
    if others := [key for key in others if key not in ("type", "text", "cache_control")]:
        raise RefusedChatError(f"{where}: expected {expected}, got also {', '.join(others)}")
    return text


def check_rendered(text: str, messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises RefusedChatError if a template has not written the parts that it was given: it may
    loop over those of some messages, and print or leave out those of others.

    Only texts of users and systems must be there: templates drop reasoning of earlier turns, and
    write results of tools as JSON.
    """
    prints, end = "[{'" in text, 0
    for number, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list) or not content:
            continue
        if prints and str(content) in text:
            raise RefusedChatError(
                f"message {number}: the chat template prints a list of parts of a message "
                f'"{message.get("role")}" as it is; join them to one text'
            )
        if message.get("role") not in ("system", "developer", "user"):
            continue
        for index, part in enumerate(content):
            part_text = part["text"].strip()
            # Most are behind the part before: to look from the start for each of thousands takes
            # seconds.
            if (start := text.find(part_text, end)) >= 0:
                end = start + len(part_text)
            elif part_text not in text:
                raise RefusedChatError(
                    f"message {number}: content part {index}: the chat template leaves it out; "
                    "join the parts to one text"
                )
