"""Bounds what a model reasons before it answers: `SamplingParams.thinking_token_budget`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxkv.structured import is_reasoning


@dataclass(frozen=True, slots=True)
class Bounds:
    """Holds what bounds reasoning: the two texts around it, of the second one only the marks in it,
    and their tokens. opens: None where every answer begins with reasoning.

    ends: the tokens that end reasoning which has had its `budget`; `closes` are the marks among
    them, those by which a model ends it, with what is between them.
    """

    texts: tuple[str, str]
    opens: int | None
    closes: tuple[int, ...]
    ends: tuple[int, ...]
    budget: int

    @property
    def start(self) -> int:
        """Counts the tokens before the marks: a sentence that leads to the answer."""
        size = len(self.closes)
        return next(i for i in range(len(self.ends)) if self.ends[i : i + size] == self.closes)


def bounds_of(tokenizer: Any, texts: tuple[str, str], budget: int) -> Bounds:
    """Returns the bounds of reasoning between two texts, of which the first may be empty. Raises:
    ValueError without a mark in each of the others that the tokenizer has a token for, since other
    texts may be written in several ways.
    """
    if tokenizer is None:
        raise ValueError(
            "thinking_token_budget: expected a tokenizer with it, got skip_tokenizer_init=True"
        )
    opens, ends = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    added = set(tokenizer.get_added_vocab().values())
    marks = [i for i, token in enumerate(ends) if token in added]
    if len(opens) > 1 or not marks or not added.issuperset(opens):
        raise ValueError(
            "thinking_token_budget: expected marks around reasoning that the tokenizer has tokens "
            f"for, got {texts!r:.80}"
        )
    closes = ends[marks[0] : marks[-1] + 1]
    of_marks = tokenizer.decode(closes, skip_special_tokens=False)
    return Bounds((texts[0], of_marks), opens[0] if opens else None, closes, ends, budget)


class Thinking:
    """Counts what one answer reasons, and says by which tokens that ends where the budget is used.

    Reasoning is what the prompt has begun, from its mark on, or what the answer begins with, behind
    nothing but blank space: what a model reasons later is not counted. So the device may draw
    `room` tokens before anybody looks at them.
    """

    def __init__(self, bounds: Bounds, prompt: Sequence[int], text: str, tokenizer: Any) -> None:
        """text: of the prompt."""
        self._bounds = bounds
        self._tokenizer = tokenizer
        self._left: int | None = None
        """Counts the tokens that it may still reason; None before it does."""
        self._last: tuple[int, ...] = ()
        """Has the tokens that may be the beginning of the marks."""
        self._next: int | None = None
        """Is the place among `ends` of the token that has to come; None where any may."""
        self.is_over = False
        is_open = is_reasoning(text, bounds.texts)
        if is_open:
            self._open(bounds.budget - _num_behind(prompt, bounds.opens))
        self.is_over = is_open is False

    def copy(self) -> Thinking:
        """Returns one for another answer to the prompt, as far as this one has come."""
        made = object.__new__(Thinking)
        made.__dict__.update(self.__dict__)
        return made

    @property
    def room(self) -> int | None:
        """Returns how many tokens may come before the next one is decided; None: all."""
        if self.is_over:
            return None
        if self._next is not None:
            return 1
        return self._bounds.budget + 1 if self._left is None else self._left

    @property
    def forced(self) -> int | None:
        """Returns the token that has to come, None where any may."""
        return None if self._next is None else self._bounds.ends[self._next]

    def accept(self, token: int) -> None:
        """Goes on with a token that was drawn, or forced."""
        if self._next is not None:
            self._next += 1
            if self._next == len(self._bounds.ends):
                self._next, self.is_over = None, True
        elif self._left is not None:
            closes = self._bounds.closes
            self._last = (*self._last, token)[-len(closes) :]
            if self._last == closes:
                self.is_over = True
            else:
                self._open(self._left - 1)
        elif token == self._bounds.opens:
            self._open(self._bounds.budget)
        elif self._tokenizer.decode([token]).strip():
            self.is_over = True

    def _open(self, left: int) -> None:
        """Has `left` more tokens to reason: with none the end has to come, of which a model may
        have written the beginning.
        """
        self._left = max(0, left)
        if not self._left:
            closes, last = self._bounds.closes, self._last
            sizes = range(len(closes) - 1, 0, -1)
            written = next((n for n in sizes if last[-n:] == closes[:n]), 0)
            self._next = self._bounds.start + written if written else 0


def _num_behind(prompt: Sequence[int], opens: int | None) -> int:
    """Counts the tokens behind the last mark of a prompt."""
    if opens is None:
        return 0
    return next((n for n, token in enumerate(reversed(prompt)) if token == opens), 0)
