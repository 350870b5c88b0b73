"""Reads which adapters a server or a batch has under which names, as vLLM's `--lora-modules` says
it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from jaxkv.lora.request import LoRARequest

MAX_NAME_CHARS = 200

KEYS = {"name", "path", "base_model_name"}


def read_lora_modules(given: Sequence[str], models: Sequence[str]) -> dict[str, LoRARequest]:
    """Returns the adapters by name. given: "name=path", or JSON, an object {"name": ..., "path":
    ...} or a list of them, in which "base_model_name" may be the model's. models: its names,
    which no adapter may have, nor the last part of one.

    Raises: ValueError. Nothing is read of what the paths name.
    """
    taken, found = names_of(models), dict[str, LoRARequest]()
    for text in given:
        for one in _objects(text):
            name, path = one["name"], one["path"]
            base = one.get("base_model_name")
            if base is not None and base not in taken:
                expected = " or ".join(map(repr, taken))
                raise _error(f"base_model_name {expected}", base)
            check_name(name, {*taken, *found}, "lora_modules")
            found[name] = LoRARequest(name, len(found) + 1, path)
    return found


def names_of(models: Sequence[str]) -> tuple[str, ...]:
    """Returns what requests may call a model of these names: also by the last part of each."""
    return tuple(dict.fromkeys(name for model in models for name in (model, Path(model).name)))


def check_name(name: str, taken: Collection[str], key: str) -> None:
    """Raises ValueError for a name of an adapter that is empty, too long, or somebody else's."""
    if not name or len(name) > MAX_NAME_CHARS:
        raise ValueError(
            f"{key}: expected a name of 1 to {MAX_NAME_CHARS} characters, got {name!r:.80}"
        )
    if name in taken:
        raise ValueError(f"{key}: expected a name that no model here has, got {name!r:.80}")


def _objects(text: str) -> list[dict[str, Any]]:
    if not text.lstrip().startswith(("{", "[")):
        name, equals, path = text.partition("=")
        if not (equals and path):
            raise _error("name=path", text)
        return [{"name": name, "path": path}]
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _error("name=path or JSON", text) from error
    objects = given if isinstance(given, list) else [given]
    for one in objects:
        is_whole = isinstance(one, dict) and {"name", "path"} <= one.keys() <= KEYS
        if not is_whole or not all(isinstance(value, str) for value in one.values()):
            raise _error('{"name": ..., "path": ...}, maybe with "base_model_name"', one)
    return objects


def _error(expected: str, got: Any) -> ValueError:
    return ValueError(f"lora_modules: expected {expected}, got {got!r:.120}")
