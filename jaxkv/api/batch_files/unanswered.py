"""Finds the lines of a batch that have no row yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxkv.api.batch_files import openai, sources
from jaxkv.api.batch_files.forms import Form, LineId
from jaxkv.api.batch_files.journal import FORMS, Ids, Rows, message_of
from jaxkv.api.batch_files.sources import Lines, is_blank, numbered_lines, parse


@dataclass(frozen=True, slots=True)
class Line:
    """Holds a line without a row: its number from 1, its bytes, and what they say.

    `refusal`: why it can have no row but one of an error, which has `line_id` only if no other line
    has that; None for a line that can be asked for.
    """

    number: int
    raw: bytes | None
    form: Form
    line_id: LineId | None
    value: Mapping[str, Any]
    refusal: str | None = None


class Unanswered:
    """Yields, once, the lines of a shard (i, n) without a row, and counts the others as skipped."""

    def __init__(self, source: Lines, rows: Rows, shard: tuple[int, int] = (0, 1)) -> None:
        self.num_skipped = 0
        self._source = source
        self._rows = rows
        self._shard = shard
        self._seen = Ids()
        self._last_form = FORMS[0]

    def __iter__(self) -> Iterator[Line]:
        for number, raw in numbered_lines(self._source, sources.MAX_LINE_BYTES):
            if is_blank(raw) or not is_of(self._shard, number):
                continue
            line = self._read(number, raw)
            if self._has_row(line):
                self.num_skipped += 1
            else:
                yield line

    def _read(self, number: int, raw: bytes | None) -> Line:
        line = read_line(number, raw, self._last_form)
        self._last_form = line.form
        if line.line_id is None:
            return line
        if line.line_id in self._seen:
            key = line.form.id_key
            message = f"{key}: expected one that no line above has, got {line.line_id!r:.300}"
            return replace(line, line_id=None, refusal=message)
        self._seen.add(line.line_id)
        return line

    def _has_row(self, line: Line) -> bool:
        if line.line_id is None:
            return line.number in self._rows.lines
        if line.line_id not in self._rows.ids:
            return False
        self._rows.ids.remove(line.line_id)  # it is in _seen now: once is enough
        return True


def read_line(number: int, raw: bytes | None, form: Form = FORMS[0]) -> Line:
    """Reads a line. raw: None for one that is too long. form: of a line that is no JSON object."""
    value: Mapping[str, Any] = {}
    try:
        value = parse(raw, sources.MAX_LINE_BYTES)
        form = form_of(value)
        return Line(number, raw, form, form.id_of(value), value)
    except ValueError as error:
        return Line(number, raw, form, None, value, message_of(error))


def form_of(value: Mapping[str, Any]) -> Form:
    """Returns the form that the keys of a line say."""
    plain, of_openai = FORMS
    return of_openai if value.keys() & openai.KEYS else plain


def is_of(shard: tuple[int, int], number: int) -> bool:
    """Tells whether a shard (i, n) has the line of this number."""
    return number % shard[1] == shard[0]
