"""Defines how callers say what an output must look like, under vLLM's names."""

from __future__ import annotations

import json as json_module
from dataclasses import dataclass
from typing import Any

MAX_CHARS = 2**18
"""A schema or grammar may have as many: compiling one takes time in which no step is planned."""

SCHEMAS = {"items", "prefixItems", "anyOf", "allOf", "oneOf", "additionalProperties"}
NAMED = {"properties", "patternProperties", "$defs", "definitions"}
"""Keywords of a JSON schema under which schemas are, alone or in a list, and by name."""

KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(slots=True)
class StructuredOutputsParams:
    """Says what a request's text must be: exactly one of the first five fields.

    json: what a JSON schema describes: a dict, the text of one, or a class of pydantic's. regex: in
    the syntax of Rust's regex crate, from the first character to the last. choice: one of these
    texts. grammar: of a context-free grammar, in Lark's syntax or GBNF. json_object=True: any JSON
    object. disable_any_whitespace: JSON without line breaks and spaces that say nothing;
    whitespace_pattern: JSON with what this regex describes between its parts.
    disable_additional_properties: objects of a schema that does not speak of other properties have
    none; by default they may have any, as JSON Schema says. disable_fallback changes nothing, as
    there is one implementation, and structural_tag has one possible value.
    reasoning: the texts that begin and end what a model reasons, as ("<think>", "</think>"), each a
    token of its own, the second one maybe several. Reasoning that the prompt or the text has begun
    is as the model likes, and the text behind it what was asked for; a text that begins otherwise
    is that from its start. ("", end): a text always begins with reasoning.
    Raises: ValueError naming the field for anything else. Whether a schema or grammar is valid is
    found when a request is accepted.
    """

    json: str | dict[str, Any] | type | None = None
    regex: str | None = None
    choice: list[str] | tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None
    reasoning: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if self.structural_tag is not None:
            raise _wrong("structural_tag", "None (nearest: grammar)", self.structural_tag)
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs: expected exactly one of {', '.join(KINDS)}, got "
                f"{', '.join(given) or 'none'}"
            )
        for name in (
            "json_object",
            "disable_fallback",
            "disable_any_whitespace",
            "disable_additional_properties",
        ):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "json_object" and value is None):
                raise _wrong(name, "True or False", value)
        if self.json is not None:
            self.json = _schema(self.json, closes=self.disable_additional_properties)
        for name in ("regex", "grammar", "whitespace_pattern"):
            if (value := getattr(self, name)) is not None:
                _check_text(name, value)
        if self.choice is not None:
            is_list = isinstance(self.choice, list | tuple) and len(self.choice) > 0
            if not is_list or not all(isinstance(one, str) and one for one in self.choice):
                raise _wrong("choice", "a list of texts, at least one and none empty", self.choice)
            _check_text("choice", "".join(self.choice))
        if self.reasoning is not None:
            self.reasoning = _marks(self.reasoning)


def read_structured(given: dict[str, Any]) -> StructuredOutputsParams:
    """Returns what an object of JSON asks for. Raises: ValueError."""
    known = StructuredOutputsParams.__dataclass_fields__.keys()
    if unknown := sorted(given.keys() - known):
        message = f"structured_outputs: expected some of {', '.join(known)}, got {unknown}"
        raise ValueError(message[:300])
    return StructuredOutputsParams(**given)


def _wrong(name: str, expected: str, got: Any) -> ValueError:
    return ValueError(f"structured_outputs: {name}: expected {expected}, got {got!r:.80}")


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise _wrong(name, "a text", value)
    if len(value) > MAX_CHARS:
        raise _wrong(name, f"at most {MAX_CHARS} characters", len(value))
    if any("\ud800" <= c <= "\udfff" for c in value):
        raise _wrong(name, "valid Unicode", value)


def _marks(given: Any) -> tuple[str, str]:
    if not are_marks(given):
        raise _wrong("reasoning", 'two texts, as ["<think>", "</think>"]', given)
    _check_text("reasoning", "".join(given))
    return given[0], given[1]


def are_marks(given: Any) -> bool:
    """Tells whether these are two texts, of which the first may be empty."""
    is_pair = isinstance(given, list | tuple) and len(given) == 2
    return is_pair and all(isinstance(one, str) for one in given) and bool(given[1])


def is_reasoning(prompt: str, marks: tuple[str, str]) -> bool | None:
    """Tells whether the answer to a prompt goes on with reasoning between two marks; None where its
    own beginning says so.
    """
    opens, closes = marks
    end = prompt.rfind(closes)
    if opens and prompt.rfind(opens) > end:
        return True
    if end >= 0 and not prompt[end + len(closes) :].strip():
        return False  # as templates write it for an answer without reasoning
    return None if opens else True


def _schema(given: Any, *, closes: bool) -> str:
    """Returns the text of a JSON schema, of which later changes of `given` change nothing."""
    if isinstance(given, type) and hasattr(given, "model_json_schema"):
        given = given.model_json_schema()
    try:
        text = given if isinstance(given, str) else json_module.dumps(given, allow_nan=False)
        if len(text) <= MAX_CHARS:
            schema = json_module.loads(text)
            if closes:
                text = json_module.dumps(_closed(schema))
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong("json", f"a JSON schema ({error})", given) from error
    _check_text("json", text)
    if not isinstance(schema, dict):
        raise _wrong("json", "a JSON schema, an object", given)
    return text


def _closed(schema: Any) -> Any:
    """Returns a schema whose objects have no properties that it does not name."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for key in SCHEMAS.intersection(schema):
        made[key] = _closed(schema[key])
    for key in NAMED.intersection(schema):
        if isinstance(schema[key], dict):
            made[key] = {name: _closed(one) for name, one in schema[key].items()}
    if "properties" in schema and not schema.keys() & {"additionalProperties", "patternProperties"}:
        made["additionalProperties"] = False
    return made
