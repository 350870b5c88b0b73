"""Holds every option of `jaxkv serve` that is not one of the engine, once: as `EngineOptions` does
for those.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from jaxkv.api.response_parts import read_template
from jaxkv.build.options import IS_SIZE, IS_TEXT, IS_TEXT_OR_NONE, Check, option
from jaxkv.config import is_int

KEY_VARIABLE = "JAXKV_API_KEY"

ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+")
"""An origin as browsers send it: without a path, and so without a slash at its end."""


def _list_or_none(holds: Callable[[str], bool]) -> Callable[[Any], bool]:
    """Returns what tells whether a value is None or a list of texts for which `holds` does."""
    return lambda value: (
        value is None
        or (
            isinstance(value, list | tuple)
            and all(isinstance(one, str) and holds(one) for one in value)
        )
    )


IS_TEXTS = Check(expected="None or a list of texts", holds=_list_or_none(lambda one: True))
IS_KEYS = Check(
    expected="None or a list of texts, none empty",
    holds=lambda value: (
        value not in ([], ()) and _list_or_none(lambda key: bool(key.strip()))(value)
    ),
    is_secret=True,
)
IS_NAMES = Check(
    expected="None or a list of names, none empty",
    holds=lambda value: value not in ([], ()) and _list_or_none(bool)(value),
)
IS_ORIGINS = Check(
    expected="None, or a list of * and of origins such as https://example.com",
    holds=_list_or_none(lambda one: ORIGIN.fullmatch(one) is not None),
)
IS_PORT = Check(
    expected="a number from 0 to 65535", holds=lambda value: is_int(value) and 0 <= value <= 65535
)
MAX_S = 86400
IS_SECONDS = Check(
    expected=f"a number of seconds from 0 to {MAX_S}",
    holds=lambda value: type(value) in (int, float) and 0 <= value <= MAX_S,
)
IS_SOME_SECONDS = Check(
    expected=f"a number of seconds above 0, at most {MAX_S}",
    holds=lambda value: type(value) in (int, float) and 0 < value <= MAX_S,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """Says where and for whom a server answers, and within which limits.

    Raises: ValueError naming the option for a value that is not possible.
    """

    host: str = option(
        "127.0.0.1",
        "address to listen at; 0.0.0.0 is all of this machine's",
        check=IS_TEXT,
    )
    port: int = option(8000, "port to listen at; 0 takes one that is free", check=IS_PORT)
    api_key: Sequence[str] | None = option(
        None,
        f"keys, one of which every request must bring (default: {KEY_VARIABLE} of the environment, "
        "which other users of this machine cannot see; without either, everybody is answered)",
        check=IS_KEYS,
    )
    served_model_name: Sequence[str] | None = option(
        None,
        "names of the model in requests, the first of which answers have (default: MODEL as given)",
        check=IS_NAMES,
    )
    response_template: str | None = option(
        None,
        "takes answers of chats apart into reasoning, content and tool calls: qwen3, qwen3_coder, "
        "gpt_oss, deepseek_r1, a file with a response template of transformers, or checkpoint for "
        "that of tokenizer_config.json (default: all is content)",
        check=IS_TEXT_OR_NONE,
    )
    lora_modules: Sequence[str] | None = option(
        None,
        "adapters that requests may name as their model, with --enable-lora: NAME=PATH, or JSON: "
        '{"name": "sql", "path": "path/to/adapter"}',
        check=IS_TEXTS,
    )
    lora_dir: str | None = option(
        None,
        "directory whose adapters clients may load and unload, with --enable-lora and a key",
        check=IS_TEXT_OR_NONE,
    )
    allowed_origins: Sequence[str] | None = option(
        None,
        "origins whose pages may ask from a browser, such as https://chat.example.com, or * for "
        "all (default: none)",
        check=IS_ORIGINS,
    )
    max_concurrent_sequences: int = option(
        256,
        "sequences (prompts times n) that run or wait at once; requests beyond are answered 429",
        check=IS_SIZE,
    )
    max_body_bytes: int = option(
        2**24,
        "largest body of a request; 8 times as much is held for all requests that come in",
        check=IS_SIZE,
    )
    send_timeout_s: float = option(
        60.0,
        "seconds that a client may leave what it was sent unread before its request is ended, and "
        "that sending a request may take",
        check=IS_SOME_SECONDS,
    )
    drain_s: float = option(
        30.0,
        "seconds that requests have to end in after SIGTERM",
        check=IS_SECONDS,
    )

    @property
    def keys(self) -> Sequence[str]:
        """Returns the keys that are valid; none: everybody is answered. Raises: ValueError for an
        empty one in the environment.
        """
        if self.api_key is None and (key := os.environ.get(KEY_VARIABLE)) is not None:
            if not key.strip():
                raise ValueError(f"{KEY_VARIABLE}: expected a key, got an empty text")
            return (key,)
        return self.api_key or ()

    def __post_init__(self) -> None:
        for one in fields(self):
            if (check := one.metadata["about"].check) is not None:
                check(one.name, getattr(self, one.name))
        if self.response_template is not None:
            read_template(self.response_template)
        if self.lora_dir is not None and not self.keys:
            raise ValueError(
                f"lora_dir: expected api_key or {KEY_VARIABLE} with it: who asks may change what "
                f"others are answered with"
            )
        if self.lora_dir is not None and not os.path.isdir(self.lora_dir):
            raise ValueError(f"lora_dir: expected a directory, got {self.lora_dir!r:.200}")
