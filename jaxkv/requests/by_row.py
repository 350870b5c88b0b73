"""Checks what callers of `jaxkv.functional` ask of the rows of a state: prompts, tokens, sampling
parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import jax
import numpy as np

from jaxkv.config import SamplingParams, is_int, own
from jaxkv.errors import CapacityError
from jaxkv.ops.sampling import NO_TOKEN, Sampling
from jaxkv.programs.inputs import empty_sampling, set_drawn
from jaxkv.requests.checks import stop_ids

T = TypeVar("T")

TAKEN = ("temperature", "top_k", "top_p", "min_p", "seed", "stop_token_ids", "ignore_eos")
"""The fields of `SamplingParams` that need neither a text nor the tokens before the newest one."""


def check_rows(rows: Iterable[Any], num_rows: int) -> None:
    """Raises ValueError for the first that is not a row."""
    for row in rows:
        if not is_int(own(row)) or not 0 <= row < num_rows:
            raise ValueError(f"row: expected an int from 0 to {num_rows - 1}, got {row!r}")


def by_row(given: Any, num_rows: int, read: Callable[[str, Any], T]) -> dict[int, T]:
    """Returns what is given by row, each as `read` has it; a list or an array begins with row 0.

    Raises: ValueError for a row that there is not, CapacityError for a list that is too long, but
    before that what `read` does: tokens that are not in a list of their own are no rows.
    """
    each = given.values() if isinstance(given, Mapping) else given
    each = each if isinstance(each, Iterable) and not isinstance(each, jax.Array) else [each]
    if any(isinstance(one, jax.core.Tracer) for one in each):
        raise ValueError(
            "expected numbers, got what a program under `jit`, `vmap` or `grad` traces: in there "
            "use `embed` and `extend`"
        )
    if not isinstance(given, Mapping):
        given = np.asarray(given) if isinstance(given, jax.Array) else given
        is_list = isinstance(given, Sequence) and not isinstance(given, str | bytes)
        if not is_list and not (isinstance(given, np.ndarray) and given.ndim):
            raise ValueError(
                f"expected {{row: ...}} or a list that begins with row 0, got {given!r:.80}"
            )
        given = dict(enumerate(given))
    else:
        check_rows(given, num_rows)
    if not given:
        raise ValueError("expected at least one row, got none")
    found = {row: read(f"row {row}", value) for row, value in given.items()}
    if len(given) > num_rows:
        raise CapacityError(f"{len(given)} rows needed, {num_rows} there: make a larger state")
    return found


def prompts_by_row(given: Any, num_rows: int, vocab_size: int) -> dict[int, np.ndarray]:
    """Returns the token ids of each row. Raises: ValueError, CapacityError."""
    return by_row(given, num_rows, lambda what, ids: checked_ids(what, ids, vocab_size))


def tokens_by_row(given: Any, num_rows: int, vocab_size: int) -> dict[int, int]:
    """Returns one token of each row, or NO_TOKEN. Raises: ValueError, CapacityError."""

    def checked(what: str, token: Any) -> int:
        if np.ndim(token) == 0 and token == NO_TOKEN:
            return NO_TOKEN
        return int(checked_ids(what, [token], vocab_size)[0])

    return by_row(given, num_rows, checked)


def checked_ids(what: str, ids: Any, vocab_size: int) -> np.ndarray:
    """Returns ids [T] of the vocabulary. Raises: ValueError."""
    id_T = np.asarray(ids)
    if id_T.ndim != 1 or not id_T.size or id_T.dtype.kind not in "iu":
        raise ValueError(f"{what}: expected token ids, got {ids!r:.80}")
    if len(bad := id_T[(id_T < 0) | (id_T >= vocab_size)]):
        raise ValueError(
            f"{what}: expected token ids from 0 to {vocab_size - 1}, got {bad[:5].tolist()}"
        )
    return id_T


def sampling_of(
    rows: Sequence[int],
    asked: SamplingParams | Sequence[SamplingParams],
    *,
    eos_ids: frozenset[int],
    num_rows: int,
    vocab_size: int,
) -> Sampling:
    """Returns the parameters of these rows, one for all or one each, and of padding up to
    `num_rows` (numpy).

    Rows without a seed draw apart from each other.
    Raises: ValueError for a field that is not in TAKEN. `max_tokens` says nothing here.
    """
    each = [asked] * len(rows) if isinstance(asked, SamplingParams) else asked
    if not isinstance(each, Sequence):
        raise ValueError(f"sampling: expected SamplingParams or a list, got {asked!r:.80}")
    if len(each) != len(rows):
        raise ValueError(f"sampling: expected one or {len(rows)}, one per row, got {len(each)}")
    # Without penalties there is no history.
    made = empty_sampling(num_rows, vocab_size=vocab_size, max_len=1)
    for b, (row, params) in enumerate(zip(rows, each, strict=True)):
        _check_taken(params)
        params = params.clone()
        stops = stop_ids(params, eos_ids, vocab_size)
        seed, sample = (0, row) if params.seed in (None, -1) else (params.seed % 2**64, 0)
        set_drawn(made, b, params, stop_ids=stops, seed=seed, sample=sample)
    return made


def _check_taken(params: Any) -> None:
    """Raises: ValueError for what is no parameters, or has others than those in TAKEN."""
    if not isinstance(params, SamplingParams):
        raise ValueError(f"sampling: expected SamplingParams, got {type(params).__name__}")
    changed = [x.name for x in fields(params) if getattr(params, x.name) != x.default]
    if others := set(changed) - {*TAKEN, "max_tokens"}:
        raise ValueError(
            f"sampling: expected only {', '.join(TAKEN)}, got {', '.join(sorted(others))}: use LLM"
        )
