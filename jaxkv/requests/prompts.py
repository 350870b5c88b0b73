"""Reads prompts in all forms that people write them in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict, TypeGuard

import numpy as np

from jaxkv.config import are_plain, is_int, own


class TextPrompt(TypedDict):
    """Writes a prompt as a text. Only prompts with the same cache_salt share cached prefixes."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """Writes a prompt as token ids; a text beside them is what outputs show as the prompt."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, a `TextPrompt` or a `TokensPrompt`."""


class Pair(NamedTuple):
    """Holds two texts that are scored together, as one prompt."""

    first: str
    second: str


_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}
_OF_VLLM = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "token_type_ids")
"""Keys that vLLM's prompts may have as well: None and {} mean nothing."""


def listed(prompts: Any) -> list[Prompt]:
    """Returns the prompts of a call: one, or a sequence or array of them. Whole numbers alone are
    one prompt, of token ids.

    Raises: ValueError for what is none of these, an iterator for example.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items = _items(prompts)
    if items is None:
        raise ValueError(
            f"prompts: expected a prompt or a list of them, got {type(prompts).__name__}"
        )
    return [items] if are_token_ids(items) else items


def are_token_ids(items: Any) -> bool:
    """Tells whether it is a list of whole numbers, at least one."""
    if not isinstance(items, list | tuple) or not items:
        return False
    return are_plain(items) or all(is_int(own(x)) for x in items)


def is_conversation(prompt: Any) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    """Tells whether it can only be meant as a list of chat messages."""
    is_list = isinstance(prompt, list | tuple) and not are_token_ids(prompt)
    return is_list and not any(isinstance(one, str) for one in prompt)


def parse(prompt: Prompt) -> tuple[str | None, Sequence[Any] | np.ndarray | None, str]:
    """Returns (text, token ids, cache_salt) of one prompt: token ids as they came, which nobody has
    looked at yet, and None where the text is all there is.

    Raises: ValueError for another form.
    """
    if isinstance(prompt, str):
        return prompt, None, ""
    if not isinstance(prompt, Mapping):
        ids = _items(prompt)
        if ids is None or (ids and not are_token_ids(ids)):
            other = next((x for x in ids or () if not is_int(own(x))), None)
            holding = "" if other is None else f" with {other!r:.50}"
            raise ValueError(
                f'expected a text, token ids, {{"prompt": text}} or {{"prompt_token_ids": [...]}}, '
                f"got {type(prompt).__name__}{holding}"
            )
        return None, ids, ""
    unknown = {key for key in prompt.keys() - _KEYS if key not in _OF_VLLM or prompt[key]}
    if unknown:
        names = ", ".join(sorted(map(str, unknown)))
        hint = "; messages are for chat" if "role" in unknown else ""
        if "input_ids" in unknown:
            hint = "; what a tokenizer returns as input_ids is a prompt by itself"
        known = "prompt or prompt_token_ids, and cache_salt"
        raise ValueError(f"expected a prompt with {known}, got keys unknown here: {names}{hint}")
    salt = prompt.get("cache_salt", "")
    if not isinstance(salt, str):
        raise ValueError(f"cache_salt: expected a text, got {type(salt).__name__}")
    if any("\ud800" <= c <= "\udfff" for c in salt):
        raise ValueError(f"cache_salt: expected valid Unicode, got {salt!r:.50}")
    text, given = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"prompt: expected a text, got {type(text).__name__}")
    if given is None:
        if text is None:
            raise ValueError('expected "prompt" or "prompt_token_ids", got neither')
        return text, None, salt
    is_list = given.ndim > 0 if isinstance(given, np.ndarray) else isinstance(given, Sequence)
    if not is_list or isinstance(given, str | bytes):
        raise ValueError(
            f"prompt_token_ids: expected a list of token ids, got {type(given).__name__}"
        )
    return text, given, salt


def _items(value: Any) -> list[Any] | None:
    """Returns what a sequence or array holds, None for what is neither."""
    if hasattr(value, "__array__"):
        value = np.asarray(value).tolist()  # of no axes: one value
    if isinstance(value, str | bytes | Mapping):
        return None
    is_sequence = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    return list(value) if is_sequence else None
