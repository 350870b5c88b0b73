"""Reads `speculative_config`, whose keys are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxkv.config import Speculation, is_int

KEYS = (
    "method",
    "num_speculative_tokens",
    "prompt_lookup_max",
    "prompt_lookup_min",
    "disable_by_batch_size",
)

MOST_TOKENS = 32
"""Tokens ahead at most: each takes memory for its logits."""

DEFAULT_LOOKUP = 5
"""How many tokens must have come before, as in vLLM, where neither end is given."""

ROWS_PER_SPECULATING = 8
"""By default as many rows speculate as this part of `max_num_seqs`: with more of them a step has
enough to compute without proposals.
"""


def read_speculation(given: Mapping[str, Any], max_num_seqs: int) -> Speculation:
    """Returns what the keys ask for. Raises: ValueError naming the key for what is not possible."""
    for key, value in given.items():
        if key not in KEYS and value is not None:
            raise ValueError(
                f"speculative_config: expected the keys {', '.join(KEYS)}, got {key!r}"
            )
    if given.get("method") != "ngram":
        raise ValueError(
            f"speculative_config: expected method 'ngram', the only one here, got "
            f"{given.get('method')!r}"
        )

    def number(key: str, default: int | None, most: int | None = None) -> int:
        value: Any = default if given.get(key) is None else given[key]
        if not is_int(value) or value < 1 or (most is not None and value > most):
            to = "" if most is None else f" and <= {most}"
            raise ValueError(
                f"speculative_config: expected {key} to be a number >= 1{to}, got {value!r}"
            )
        return int(value)

    num_tokens = number("num_speculative_tokens", None, MOST_TOKENS)
    either = given.get("prompt_lookup_max") or given.get("prompt_lookup_min") or DEFAULT_LOOKUP
    longest = number("prompt_lookup_max", either)
    return Speculation(
        num_tokens=num_tokens,
        longest=longest,
        shortest=number("prompt_lookup_min", longest, longest),
        most_rows=number(
            "disable_by_batch_size", max(1, max_num_seqs // ROWS_PER_SPECULATING), max_num_seqs
        ),
    )
