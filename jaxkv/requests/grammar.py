"""Which tokens may come next where a text must be what a schema or grammar describes: llguidance's
parser, on the host.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from jaxkv.requests.trial import TRIALS
from jaxkv.structured import StructuredOutputsParams, is_reasoning


@dataclass(frozen=True, slots=True)
class Marks:
    """Holds the texts around what a model reasons, and their tokens. opens: None where every answer
    begins with reasoning.
    """

    texts: tuple[str, str]
    opens: int | None
    closes: tuple[int, ...]


def marks_of(tokenizer: Any, texts: tuple[str, str]) -> Marks:
    """Returns the marks of two texts, of which the first may be empty. Raises: ValueError where
    they do not begin and end with tokens that a tokenizer has beside those of its model: others may
    be written in several ways.
    """
    opens, closes = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    ends = {*opens, *closes[:1], *closes[-1:]}
    if len(opens) > 1 or not closes or not ends <= set(tokenizer.get_added_vocab().values()):
        raise ValueError(
            "structured_outputs: reasoning: expected marks that the tokenizer has tokens for, got "
            f"{texts!r:.80}"
        )
    return Marks(texts, opens[0] if opens else None, tuple(closes))


class Grammar:
    """Follows the tokens of one request through its grammar.

    What llguidance cannot follow any more (`error`: its limits on time and memory) allows
    everything, and ends the request with the next token.
    """

    def __init__(self, matcher: Any, num_words: int) -> None:
        self._matcher = matcher
        self._num_words = num_words
        self._mask: np.ndarray | None = None
        """That of the next token, if somebody has asked for it."""

    def copy(self) -> Grammar:
        """Returns one for another request, as far as this one has come."""
        return Grammar(self._matcher.deep_copy(), self._num_words)

    def behind(self, marks: Marks) -> BehindReasoning:
        """Returns one that holds behind reasoning between these marks."""
        return BehindReasoning(self._matcher.deep_copy(), self._num_words, marks)

    @property
    def is_free(self) -> bool:
        """Tells whether any token may come now, and any behind it up to one of `halts`."""
        return False

    @property
    def halts(self) -> frozenset[int]:
        """Returns the tokens behind which it may be free no more."""
        return frozenset()

    @property
    def error(self) -> str:
        """Returns why it cannot be followed, "" where it can; without the parser's own state, which
        llguidance puts behind.
        """
        if not self._matcher.is_error():
            return ""
        return " ".join(self._matcher.get_error().partition("<state>")[0].split())[:300]

    @property
    def is_done(self) -> bool:
        """Tells whether no text can follow."""
        return self._matcher.is_stopped()

    def mask(self) -> np.ndarray:
        """Returns the tokens that may come, uint32 [ceil(V/32)] as `masks.token_mask` has them."""
        if self._mask is None:
            self._mask = self._make_mask()
        return self._mask

    def _make_mask(self) -> np.ndarray:
        if not self._matcher.is_error():
            found = self._matcher.compute_bitmask()
            if not self._matcher.is_error():
                return np.frombuffer(found, "<u4")[: self._num_words]
        return np.full(self._num_words, 2**32 - 1, np.uint32)

    def forced(self) -> int | None:
        """Returns the only token that may come, None where there are others.

        That token has probability 1, whatever the model says. Where bytes are forced that can be
        said in several tokens, llguidance leaves the tokenizer's own choice of them.
        """
        mask = self.mask()
        words = np.flatnonzero(mask)
        if len(words) != 1:
            return None
        word = int(mask[words[0]])
        return None if word & (word - 1) else 32 * int(words[0]) + word.bit_length() - 1

    def accept(self, token: int) -> None:
        """Goes on with a token that was drawn, or forced."""
        self._mask = None
        self._matcher.consume_token(token)


class BehindReasoning(Grammar):
    """Follows a grammar that holds behind what a model reasons: until then any token may come.

    is_open: whether it reasons now, None where the next token says so.
    """

    def __init__(
        self, matcher: Any, num_words: int, marks: Marks, *, is_open: bool | None = None
    ) -> None:
        super().__init__(matcher, num_words)
        self._marks = marks
        self._is_open = is_open
        self._last: tuple[int, ...] = ()
        """Has the tokens that may be the beginning of the second mark."""

    def copy(self) -> BehindReasoning:
        made = self._begun(self._is_open)
        made._last = self._last
        return made

    def answering(self, prompt: str) -> BehindReasoning:
        """Returns one for the answer to a prompt, which may have begun reasoning, or ended it."""
        return self._begun(is_reasoning(prompt, self._marks.texts))

    @property
    def is_free(self) -> bool:
        return self._is_open is True

    @property
    def halts(self) -> frozenset[int]:
        return frozenset(self._marks.closes[-1:])

    def _begun(self, is_open: bool | None) -> BehindReasoning:
        matcher = self._matcher.deep_copy()
        return BehindReasoning(matcher, self._num_words, self._marks, is_open=is_open)

    def _make_mask(self) -> np.ndarray:
        if self._is_open:
            return np.full(self._num_words, 2**32 - 1, np.uint32)
        mask = super()._make_mask()
        if self._is_open is None and (opens := self._marks.opens) is not None:
            mask = mask.copy()
            mask[opens // 32] |= np.uint32(1 << opens % 32)
        return mask

    def forced(self) -> int | None:
        return super().forced() if self._is_open is False else None

    def accept(self, token: int) -> None:
        if self._is_open is None and token == self._marks.opens:
            self._is_open, self._mask = True, None
        elif self._is_open:
            closes = self._marks.closes
            self._last = (*self._last, token)[-len(closes) :]
            self._is_open, self._mask = self._last != closes, None
        else:
            self._is_open = False
            super().accept(token)


KEPT = 64
"""So many grammars that were asked for last are kept: many requests have the same."""


class Grammars:
    """Compiles grammars for one tokenizer, for any thread. Cost: reads its vocabulary once."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Collection[int]) -> None:
        try:
            import llguidance.hf
        except ImportError as error:
            raise ValueError(
                "structured_outputs: expected the package llguidance, which is not installed: "
                'pip install "jaxkv[structured]"'
            ) from error
        if tokenizer is None or not eos_ids:
            raise ValueError(
                "structured_outputs: expected a tokenizer and an end token of the model"
            )
        if not tokenizer.is_fast:
            raise ValueError(
                "structured_outputs: expected a tokenizer of the tokenizers library, got "
                f"{type(tokenizer).__name__}, which is Python code of its own"
            )
        self._llguidance = llguidance
        self._num_words = -(-vocab_size // 32)
        self._kept: OrderedDict[str, Grammar | str] = OrderedDict()
        """Has for a grammar in llguidance's own form what came of it: it, or what is wrong."""
        self._alive: WeakValueDictionary[str, Grammar] = WeakValueDictionary()
        self._lock = Lock()
        self._tokenizer = llguidance.hf.from_tokenizer(
            tokenizer, n_vocab=vocab_size, eos_token=sorted(eos_ids)
        )

    def compile(self, asked: StructuredOutputsParams, *, is_tried: bool = False) -> Grammar:
        """Compiles what was asked for, or finds it again while anybody has it. What is returned is
        for copies to follow: see `Grammar.copy`, and `Grammar.behind`; both hold from the start of
        a text on. is_tried: another process has found that it does not take too long.

        Raises: ValueError with llguidance's reason for an invalid schema or grammar, and for what
        it has no room or time for.
        """
        source = self._source(asked)
        with self._lock:
            found = self._known(source)
        if found is None:
            try:
                found = self._built(source) if is_tried else self._made(source)
            except TimeoutError as error:  # which says nothing of the next time
                raise ValueError(f"structured_outputs: expected {error}") from error
        with self._lock:
            self._kept[source] = found
            self._kept.move_to_end(source)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            if isinstance(found, str):
                raise ValueError(f"structured_outputs: expected {found}")
            self._alive[source] = found
        return found

    def knows(self, asked: StructuredOutputsParams) -> bool:
        """Tells whether `compile` returns or raises at once. Raises: ValueError where it does."""
        source = self._source(asked)
        with self._lock:
            return self._known(source) is not None

    def _known(self, source: str) -> Grammar | str | None:
        return self._kept.get(source) or self._alive.get(source)

    def _made(self, source: str) -> Grammar | str:
        try:
            TRIALS.check(source)
        except ValueError as error:
            return str(error)
        return self._built(source)

    def _built(self, source: str) -> Grammar | str:
        grammar = Grammar(
            self._llguidance.LLMatcher(self._tokenizer, source, log_level=0), self._num_words
        )
        grammar.mask()  # some of what is too much for it is found there
        return f"a valid grammar, got {grammar.error}" if grammar.error else grammar

    def _source(self, asked: StructuredOutputsParams) -> str:
        """Returns a grammar in llguidance's own form. Raises: ValueError."""
        try:
            return self._written(asked)
        except ValueError as error:
            raise ValueError(
                f"structured_outputs: expected a valid grammar, got {error}"
            ) from error

    def _written(self, asked: StructuredOutputsParams) -> str:
        make = self._llguidance.LLMatcher
        if asked.json is not None or asked.json_object:
            schema = asked.json if isinstance(asked.json, str) else '{"type": "object"}'
            return make.grammar_from_json_schema(
                schema,
                defaults={
                    "whitespace_flexible": not asked.disable_any_whitespace,
                    "whitespace_pattern": asked.whitespace_pattern,
                },
            )
        if asked.regex is not None:
            return make.grammar_from_regex(asked.regex)
        if asked.choice is not None:
            return self._llguidance.grammar_from("choice", json.dumps(list(asked.choice)))
        return self._llguidance.grammar_from("grammar", asked.grammar or "")
