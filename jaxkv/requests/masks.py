"""Bad words as tokens, and the bit mask of the tokens that a row may draw."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

Word = tuple[int, ...]
"""The tokens of a bad word."""


def encode_words(tokenizer: Any, words: Sequence[str]) -> tuple[Word, ...]:
    """Encodes the tokens of each word as a text begins with it, and as it follows a space where
    that is another first token and no more of them: what vLLM forbids.
    """
    found: list[Word] = []
    for word in words:
        plain, spaced = (
            tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False))
            for space in ("", " ")
        )
        if not plain:
            raise ValueError(f"bad_words: expected words that the tokenizer knows, got {word!r}")
        found.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            found.append(spaced)
    return tuple(dict.fromkeys(found))


def ends_of(words: Iterable[Word], generated: Sequence[int]) -> set[int]:
    """Returns the tokens that would complete one of the words after what has been generated."""
    return {
        word[-1]
        for word in words
        if len(word) == 1 or tuple(generated[1 - len(word) :]) == word[:-1]
    }


def token_mask(
    vocab_size: int, allowed: Iterable[int] | None, forbidden: Iterable[int]
) -> np.ndarray:
    """Packs uint32 [ceil(V/32)]: bit t % 32 of word t // 32 is set for every allowed token (None:
    all) but the forbidden.
    """
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    bits[slice(vocab_size) if allowed is None else np.array([*allowed])] = True
    bits[np.array([*forbidden], int)] = False
    return np.packbits(bits, bitorder="little").view("<u4")
