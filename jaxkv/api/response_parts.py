"""Takes what a model answers in a chat apart: what it reasons, what it says, and the tools that it
calls.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxkv.requests.grammar import Marks, marks_of

TEMPLATES = Path(__file__).parent / "response_templates"
"""Has templates for models whose checkpoints have none."""

OF_CHECKPOINT = "checkpoint"

REASONING = ("reasoning", "reasoning_content", "thinking")
CONTENT, CALLS = "content", "tool_calls"
"""Fields that a template may have. Authors of templates call what a model reasons differently."""

UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""Lists what a parser raises where a call is not what its template says."""


@dataclass(frozen=True, slots=True)
class Parser:
    """Makes transformers' parser of an answer to a prompt, beside tools, when it is called.

    make: the tokenizer's, of a template. marks: the texts around reasoning that a grammar has to
    wait for, None where the tokenizer has no tokens for them. The first is empty where every answer
    begins with reasoning. closes: the tokens of the second.
    """

    make: Callable[..., Any]
    template: Mapping[str, Any]
    marks: tuple[str, str] | None
    closes: tuple[int, ...] = ()

    def __call__(self, prompt: str, tools: Sequence[Mapping[str, Any]] = ()) -> Any:
        return self.make(self.template, prefix=prompt, tools=list(tools))


@dataclass(frozen=True, slots=True)
class Call:
    """Is what is new of a call of a tool, the `number`-th of its answer. name: None where it has
    been said. arguments: JSON.
    """

    number: int
    name: str | None
    arguments: str


@dataclass(slots=True)
class Said:
    """Is what is new of an answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


@dataclass(frozen=True, slots=True)
class Forced:
    """Says which tools an answer has to call: any of them, or the one of a name. is_single: one
    call only.
    """

    name: str | None = None
    is_single: bool = False

    def schema(self, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the JSON schema of the answer: of a list of calls, or of the arguments of the one
        tool. Raises: ValueError for tools that are none, or where none has the name.
        """
        parameters = dict(map(_function, tools))
        if self.name is not None:
            if self.name not in parameters:
                names = ", ".join(parameters) or "none"
                raise ValueError(f"tool_choice: expected one of the tools: {names:.200}")
            return parameters[self.name]
        if not parameters:
            raise ValueError("tool_choice: expected tools with it, got none")
        shared: dict[str, dict[str, Any]] = {}
        calls = [_call(name, schema, shared) for name, schema in parameters.items()]
        most = {"maxItems": 1} if self.is_single else {}
        return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}, **shared}


def _function(tool: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the name of a tool and the schema of its arguments. Raises: ValueError."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    parameters = function.get("parameters") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name or not isinstance(parameters, dict | None):
        expected = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
        raise ValueError(f"tools: expected {expected}, got {json.dumps(tool):.80}")
    return name, parameters or {"type": "object"}


def _call(
    name: str, parameters: Mapping[str, Any], shared: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Returns the schema of a call. What schemas refer to by "#/$defs/..." goes to `shared`, as it
    has to stand at the root. Raises: ValueError where two differ.
    """
    own = dict(parameters)
    for key in ("$defs", "definitions"):
        named = own.pop(key, None) or {}
        if not isinstance(named, dict):
            raise ValueError(f"tools: {key}: expected an object, got {json.dumps(named):.80}")
        for one, schema in named.items():
            if shared.setdefault(key, {}).setdefault(one, schema) != schema:
                raise ValueError(f"tools: expected one schema named {one!r:.80} in {key}, got two")
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": own},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


class Reader(ABC):
    """Takes the text of an answer as it comes, and says what is new in it."""

    @abstractmethod
    def feed(self, text: str, end: str | None = None) -> Said:
        """Returns what is new with more of the text. end: its finish_reason, None before."""


class Plain(Reader):
    """Takes all text as content."""

    def feed(self, text: str, end: str | None = None) -> Said:
        return Said(content=text)


class Arguments(Reader):
    """Takes all text as the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def feed(self, text: str, end: str | None = None) -> Said:
        if not text:
            return Said()
        name, self._name = self._name, None
        return Said(calls=[Call(0, name, text)])


class Listed(Reader):
    """Reads the list of calls that `Forced.schema` describes. Each call is new as a whole; what is
    left of one that was cut off is content.
    """

    def __init__(self) -> None:
        self._left = ""
        self._number = 0

    def feed(self, text: str, end: str | None = None) -> Said:
        said, self._left = Said(), self._left + text
        while "}" in text:
            start = self._left.find("{")
            try:
                call, stop = json.JSONDecoder().raw_decode(self._left, max(start, 0))
            except (ValueError, RecursionError):  # not whole yet, or deeper than Python reads
                break
            arguments = _written(call["parameters"])
            said.calls.append(Call(self._number, call["name"], arguments))
            self._left = self._left[stop:]
            self._number += 1
        if end is not None:
            said.content = self._left.strip("[], \n\t\r")
        return said


class Marked(Reader):
    """Takes an answer apart by marks in it, with a parser of transformers.

    with_calls: tools may be called; else what looks like a call is content, as is a call that
    cannot be read, and what follows it, and an answer without any marks where all that counts is
    marked. Blank space around reasoning and content is left out.
    """

    def __init__(self, parser: Any, *, with_calls: bool) -> None:
        self._parser = parser
        self._with_calls = with_calls
        self._number = 0
        self._call = self._unread = ""
        self._has_taken = False
        self._blank: dict[str, str] = {}

    def feed(self, text: str, end: str | None = None) -> Said:
        said = Said()
        if self._parser is None:
            said.content = text
            return said
        self._unread += text
        try:
            self._add(said, self._parser.feed(text))
            if end is not None:
                self._add(said, self._parser.finalize()[1], is_cut=end != "stop")
        except UNREADABLE:  # no JSON; what the parser was about to say is lost with it
            said.content += self._call + self._unread
            self._parser = None
        if end is not None and not self._has_taken:
            said.content = self._unread
        return said

    def _add(
        self, said: Said, events: Sequence[Mapping[str, Any]], *, is_cut: bool = False
    ) -> None:
        for event in events:
            kind, name = event["type"], event["field"]
            if name == CALLS and self._with_calls:
                if kind == "region_chunk":
                    self._call += event["text"]
                if kind == "region_close":
                    calls = [] if is_cut else self._calls(event["value"])
                    said.calls += calls
                    said.content += "" if calls else self._call
                    self._call = ""
            elif kind == "region_chunk":
                where = "reasoning" if name in REASONING else CONTENT
                # None before there is anything but blank space, which is shown before more only.
                blank = self._blank.get(where)
                text = event["text"].lstrip() if blank is None else blank + event["text"]
                if shown := text.rstrip():
                    setattr(said, where, getattr(said, where) + shown)
                if blank is not None or shown:
                    self._blank[where] = text[len(shown) :]
        self._forget(events)

    def _forget(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Leaves of what is unread what these events did not take: the beginning of a mark."""
        for event in events:
            self._has_taken = True
            if "text" in event:
                self._unread = self._unread.partition(event["text"])[2]
        if events and "text" not in events[-1]:
            self._unread = ""

    def _calls(self, value: Any) -> list[Call]:
        """Returns the calls of a region, none where one of them is without a name."""
        calls: list[Call] = []
        for one in value if isinstance(value, list) else [value]:
            function = one.get("function") if isinstance(one, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                return []
            arguments = function.get("arguments", function.get("parameters", {}))
            if not isinstance(arguments, str):
                arguments = _written(arguments)
            calls.append(Call(self._number + len(calls), function["name"], arguments))
        self._number += len(calls)
        return calls


class Behind(Reader):
    """Takes an answer apart that has a form of its own behind what the model reasons.

    marks: the texts around reasoning. is_open: whether the answer goes on with it, None where its
    beginning says so. reasoning: reads the text up to the second mark, form: what is behind.
    """

    def __init__(
        self, marks: tuple[str, str], is_open: bool | None, reasoning: Reader, form: Reader
    ) -> None:
        self._opens, self._closes = marks
        self._is_open = is_open
        self._reasoning, self._form = reasoning, form
        self._held = ""
        """Has what may be the beginning of a mark: of the first all of the text."""

    def feed(self, text: str, end: str | None = None) -> Said:
        if self._is_open is None:
            text = self._held + text
            if end is None and self._opens.startswith(text):
                self._held = text
                return Said()
            self._is_open, self._held = text.startswith(self._opens), ""
        if not self._is_open:
            return self._form.feed(text, end)
        seen = self._held + text
        at = seen.find(self._closes)
        if at < 0:
            self._held = seen[max(0, len(seen) - len(self._closes) + 1) :]
            return self._reasoning.feed(text, end)
        at += len(self._closes) - len(self._held)
        self._is_open = False
        said, rest = self._reasoning.feed(text[:at], "stop"), self._form.feed(text[at:], end)
        return Said(said.reasoning, said.content + rest.content, said.calls + rest.calls)


def _written(arguments: Any) -> str:
    """Writes arguments as JSON that any client reads, where a model has written half of a surrogate
    pair too.
    """
    return json.dumps(arguments, ensure_ascii=False).encode(errors="backslashreplace").decode()


def reader_of(parser: Parser, prompt: str, tools: Sequence[Mapping[str, Any]]) -> Reader:
    """Returns what reads the answer to a prompt; a prompt that cannot be read leaves all of it
    content.
    """
    try:
        return Marked(parser(prompt, tools), with_calls=bool(tools))
    except UNREADABLE:
        return Plain()


def parser_of(tokenizer: Any, asked: str) -> Parser:
    """Returns what makes parsers by a response template of transformers: the checkpoint's, one of
    `TEMPLATES` by its name, or that of a file. Raises: ValueError.
    """
    template = read_template(asked)
    if template is None:
        template = getattr(tokenizer, "response_template", None)
        if template is None:
            raise ValueError(
                "response_template: the checkpoint's tokenizer_config.json has none; expected "
                f"{_names()} or a file"
            )
    make = getattr(tokenizer, "get_response_parser", None)
    if make is None:
        raise ValueError("response_template: expected transformers >= 5.13, which reads them")
    fields = template.get("fields") if isinstance(template, dict) else None
    if isinstance(fields, dict) and (other := sorted(fields.keys() - {*REASONING, CONTENT, CALLS})):
        known = ", ".join((*REASONING, CONTENT, CALLS))
        raise ValueError(f"response_template: expected fields of {known}, got {other[0]!r:.80}")

    try:
        make(template, prefix="", tools=[])
    except ValueError as error:
        raise ValueError(f"response_template: {asked}: {error}") from error
    marks = _marks(tokenizer, template["fields"])
    if marks is None:
        return Parser(make, template, None)
    return Parser(make, template, marks.texts, marks.closes)


def _marks(tokenizer: Any, fields: Mapping[str, Any]) -> Marks | None:
    """Returns the marks around reasoning by the fields of a template, where a tokenizer has tokens
    for them: those of its own field, if it has one of each, or where content is marked, all up to
    its (first) mark.
    """
    reasoning: Mapping[str, Any] = next((fields[one] for one in REASONING if one in fields), {})
    opens, closes = (
        one[0] if isinstance(one, list) and len(one) == 1 else one
        for one in (reasoning.get("open"), reasoning.get("close"))
    )
    if (content := fields.get(CONTENT, {}).get("open")) is not None:
        opens, closes = "", content[0] if isinstance(content, list) else content
    if not reasoning or not isinstance(opens, str) or not isinstance(closes, str):
        return None
    try:
        return marks_of(tokenizer, (opens, closes))
    except ValueError:
        return None  # such a model reasons in another way, if at all


def read_template(asked: str) -> Any:
    """Returns one of `TEMPLATES`, or that of a file; None for the checkpoint's. Raises: ValueError
    where there is no such file, or it is no JSON.
    """
    if asked == OF_CHECKPOINT:
        return None
    file = TEMPLATES / f"{asked}.json"
    if "/" in asked or not file.is_file():
        file = Path(asked)
    try:
        return json.loads(file.read_text())
    except OSError as error:
        raise ValueError(
            f"response_template: expected {OF_CHECKPOINT}, {_names()} or a file: {error}"
        ) from error
    except ValueError as error:
        raise ValueError(f"response_template: {file}: expected JSON: {error}") from error


def _names() -> str:
    return ", ".join(sorted(file.stem for file in TEMPLATES.glob("*.json")))
