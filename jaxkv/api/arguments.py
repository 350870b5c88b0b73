"""Checks arguments of the calls of `LLM` and `AsyncLLM`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv.build.options import Check, one_of
from jaxkv.config import SamplingParams, is_int, own
from jaxkv.engine.engine import PAGES, WEIGHTS

CONTENT_FORMAT = one_of("auto", "string", "openai")
POSITIVE_OR_NONE = Check(
    expected="None or a number >= 1", holds=lambda x: x is None or (is_int(x) and x >= 1)
)

SLEEPING = (WEIGHTS, PAGES)
SLEEP_LEVEL = Check(expected="1 or 2", holds=lambda x: is_int(x) and x in (1, 2))
WAKE_TAGS = Check(
    expected='None or some of "weights" and "kv_cache"',
    holds=lambda x: (
        x is None
        or (isinstance(x, list | tuple) and len(x) > 0 and all(tag in SLEEPING for tag in x))
    ),
)
IS_PREFIX = Check(expected="a text", holds=lambda x: isinstance(x, str))
IS_BAR = Check(
    expected="True, False or a class such as tqdm",
    holds=lambda x: isinstance(x, bool) or callable(x),
)


def listed_params(
    params: SamplingParams | Sequence[SamplingParams] | None,
    count: int,
    default: Callable[[], SamplingParams],
) -> Sequence[SamplingParams]:
    """Returns parameters for so many prompts. Raises: ValueError for another number of them."""
    if params is None:
        return [default()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if isinstance(params, str | Mapping) or not isinstance(params, Sequence):
        raise ValueError(
            f"sampling_params: expected SamplingParams or a list, got {type(params).__name__}"
        )
    if len(params) != count:
        raise ValueError(
            f"sampling_params: expected one or {count} (one per prompt), got {len(params)}"
        )
    return params


def listed_priorities(priority: Any, count: int) -> Sequence[int] | None:
    """Returns a priority for each prompt, None without any. Raises: ValueError."""
    given = priority.tolist() if isinstance(priority, np.ndarray) else own(priority)
    if given is None or is_int(given):
        return None if given is None else [given] * count
    if not isinstance(given, (list, tuple)) or len(given) != count:
        raise ValueError(
            f"priority: expected a list of {count} numbers or one, got {priority!r:.80}"
        )
    return given


def check_requests(requests: Any, params: str) -> None:
    """Raises ValueError for what is no iterable of requests with parameters of this class."""
    if not isinstance(requests, Iterable):
        raise ValueError(
            f"requests: expected an iterable of (prompt, {params} or None), got "
            f"{type(requests).__name__}"
        )


def request_of(given: Any, params: str) -> tuple[Any, Any, Any]:
    """Returns the prompt, the parameters and the adapter, which may be left out, of one of several
    requests. Raises: ValueError.
    """
    if not isinstance(given, tuple) or len(given) not in (2, 3):
        raise ValueError(f"expected (prompt, {params} or None), got {type(given).__name__}")
    prompt, own, lora_request = (*given, None)[:3]
    return prompt, own, lora_request


def check_none(name: str, value: Any) -> None:
    """Raises ValueError for a value of an argument that sets nothing here."""
    if value is not None and value != {}:
        raise ValueError(
            f"{name}: expected None (a vLLM argument that is not built here), got {value!r:.80}"
        )
