"""Between token ids and text: how long a token's text can be, and decoding a growing sequence piece
by piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

UNFINISHED = "\ufffd"
"""What a tokenizer writes for bytes that are not (yet) a whole UTF-8 character."""

MAX_PENDING = 64
"""Tokens after which bytes that never became a character are given out as they are."""

MOST_NORMALIZED = 4
"""Characters that a tokenizer may turn into one before it looks for tokens (a letter and its marks,
several spaces).
"""


def longest_token(tokenizer: Any) -> float:
    """Returns the most characters of a text that one token may stand for: infinite where any
    unknown word is one.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    vocabulary = tokenizer.get_vocab()
    # With a token for each byte nothing is unknown, whatever token the files name for that.
    has_bytes = "<0x00>" in vocabulary or vocabulary.keys() >= set(ByteLevel.alphabet())
    if tokenizer.unk_token is not None and not has_bytes:
        return math.inf
    return MOST_NORMALIZED * max(map(len, vocabulary))


def whole_suffix(decode: Callable[[Sequence[int]], str], tokens: Sequence[int]) -> list[int]:
    """Returns the fewest last tokens that show text of whole characters, [] if none do: the left
    neighbours of what follows.
    """
    for count in range(1, 1 + min(len(tokens), MAX_PENDING)):
        text = decode(tokens[-count:])
        if text and UNFINISHED not in text:
            return list(tokens[-count:])
    return []


class TextStream:
    """Makes the text of a growing sequence of tokens, complete characters only, up to the first
    stop string.

    `decode` maps token ids to text. Appending is cheap at any length: only the last few tokens are
    decoded again, because a tokenizer may need its left neighbour to place a space or to finish a
    character. The first token's neighbours are the last ones of `prompt`. How tokens are grouped
    into pushes does not change the text.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str],
        *,
        include_stop: bool,
        prompt: Sequence[int] = (),
    ) -> None:
        self._decode = decode
        self._stops = stops
        self._include_stop = include_stop
        self._window = whole_suffix(decode, prompt)
        self._context = len(self._window)
        self._shown = len(decode(self._window)) if self._window else 0
        self._holdback = max((len(stop) for stop in stops), default=1) - 1
        self._given = 0
        self._searched = 0
        self.text = ""

    def push(self, tokens: Sequence[int], *, search: bool = True) -> str | None:
        """Adds tokens; returns the stop string that the text now contains, which ends it there, or
        None.

        Without `search` the new text is not looked at (min_tokens not reached yet).
        """
        decoded = self._decode([*self._window, *tokens])
        if len(tokens) > 1 and UNFINISHED in decoded:
            # A sentencepiece decoder shows nothing of a run of bytes that ends inside a character,
            # so step through it.
            for token in tokens:
                self._extend([token], self._decode([*self._window, token]))
        else:
            self._extend(tokens, decoded)
        if not search:
            self._searched = len(self.text)
            return None
        return self._find_stop()

    def _extend(self, tokens: Sequence[int], decoded: str) -> None:
        """Adds tokens that make the window's text `decoded`."""
        if len(decoded) == self._shown and not self._decode([*tokens, *tokens]):
            # special tokens: they show nothing, not even twice, as a space that is cut at the
            # start would
            return
        self._window += tokens
        whole = decoded.rstrip(UNFINISHED)
        if len(self._window) - self._context > MAX_PENDING:
            whole = decoded
        if len(whole) > self._shown:
            self.text += whole[self._shown :]
            self._shown = len(whole)
        if whole == decoded:
            self._narrow()

    def end(self) -> None:
        """Ends the sequence: nothing is held back any more. A last character that is not whole is
        left out.
        """
        self._holdback = 0

    @property
    def shown(self) -> str:
        """Returns the text without an ending that may turn out to begin a stop string."""
        return self.text[: max(0, len(self.text) - self._holdback)]

    def take(self) -> str:
        """Returns what is new in `shown` since the last call."""
        end = max(self._given, len(self.text) - self._holdback)
        new, self._given = self.text[self._given : end], end
        return new

    def _narrow(self) -> None:
        """Keeps what the next tokens need on their left: all until some show, one of bytes that
        never became text.
        """
        if self._shown:
            self._window = whole_suffix(self._decode, self._window) or self._window[-1:]
            self._shown = len(self._decode(self._window))
        self._context = len(self._window)

    def _find_stop(self) -> str | None:
        """Finds the earliest stop string that the text since the last search has completed; cuts
        the text there.
        """
        found = [
            (self.text.find(stop, max(0, self._searched - len(stop) + 1)), stop)
            for stop in self._stops
        ]
        self._searched = len(self.text)
        found = [(at, stop) for at, stop in found if at >= 0]
        if not found:
            return None
        at, stop = min(found)
        self.text = self.text[: at + len(stop) if self._include_stop else at]
        self._holdback = 0
        return stop
