"""Knows the names that requests to a server may call: its model's and those of its adapters."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxkv.api.async_llm import AsyncLLM
from jaxkv.api.lora_modules import check_name, names_of, read_lora_modules
from jaxkv.api.openai_format import Keys
from jaxkv.api.server.limits import Refusal
from jaxkv.api.server.options import ServeOptions
from jaxkv.errors import CheckpointError
from jaxkv.lora.request import LoRARequest
from jaxkv.weights.adapters import CONFIG, TENSORS

LOG = logging.getLogger("jaxkv.server")

MAX_ADAPTERS = 10_000
"""Names that a server has for adapters at once: each takes memory."""


class Names:
    """Has an adapter for each name that is not one of the model's own, the first of which is
    `model`. Those of the options are there from the start, clients may load and unload others where
    the options have a `lora_dir`.
    """

    def __init__(self, llm: AsyncLLM, options: ServeOptions, model: str) -> None:
        self.model = model
        self._models = tuple(dict.fromkeys((model, *(options.served_model_name or ()))))
        self._llm = llm
        self._adapters = read_lora_modules(options.lora_modules or (), self._models)
        self._numbers = itertools.count(len(self._adapters) + 1)
        self._directory = None if options.lora_dir is None else Path(options.lora_dir).resolve()

    def __iter__(self) -> Iterator[str]:
        """Yields the model's names, then those of adapters."""
        return iter((*self._models, *self._adapters))

    async def read(self) -> None:
        """Reads all adapters once. Raises: ValueError for one that is broken."""
        for lora in self._adapters.values():
            await self._llm.add_lora(lora)

    def adapter(self, name: str | None) -> LoRARequest | None:
        """Returns the adapter of this name, None for one of the model's, whole or its last part,
        and for no name. Raises: Refusal for any other.
        """
        if name is None or name in names_of(self._models):
            return None
        if (lora := self._adapters.get(name)) is None:
            others = " or an adapter of /v1/models" if self._adapters else ""
            raise Refusal(
                404,
                f"model: expected {self.model!r}{others}, got {name!r:.80}",
                key="model",
                code="model_not_found",
            )
        return lora

    def shown(self, name: str | None) -> str:
        """Returns what an answer to a request of this name says: the adapter's, or the first of the
        model's.
        """
        return name if name in self._adapters else self.model

    async def load(self, body: dict[str, Any]) -> str:
        """Gives an adapter in `lora_dir` a name, once it has been read, and returns the name.
        Raises: Refusal; ValueError naming the key of the body that is wrong.
        """
        directory = self._writable()
        keys = Keys(body)
        name, path = keys.take("lora_name", str, ""), keys.take("lora_path", str, "")
        replaces = keys.take("load_inplace", bool, False)
        keys.end()

        def check() -> None:
            taken = names_of(self._models)
            check_name(name, taken if replaces else {*taken, *self}, "lora_name")
            if name not in self._adapters and len(self._adapters) >= MAX_ADAPTERS:
                raise ValueError(f"lora_name: expected at most {MAX_ADAPTERS} adapters at once")

        check()
        inside = await asyncio.to_thread(_inside, directory, path)
        lora = LoRARequest(name, next(self._numbers), inside)
        try:
            await self._llm.add_lora(lora)
        except CheckpointError as error:
            raise ValueError(f"lora_path: {str(error).replace(str(inside), path)}") from error
        check()  # others may have come meanwhile
        self._adapters[name] = lora
        return name

    def unload(self, body: dict[str, Any]) -> str:
        """Takes a name away, and returns it; requests under way keep their adapter. Raises:
        Refusal; ValueError naming the key of the body that is wrong.
        """
        self._writable()
        keys = Keys(body)
        name, number = keys.take("lora_name", str, ""), keys.take("lora_int_id", int)
        keys.end()
        lora = self._adapters.get(name)
        if lora is None or number not in (None, lora.lora_int_id):
            raise Refusal(
                404,
                f"lora_name: expected the name of an adapter, got {name!r:.80}",
                key="lora_name",
                code="model_not_found",
            )
        del self._adapters[name]
        return name

    def _writable(self) -> Path:
        if self._directory is None:
            raise Refusal(
                403,
                "expected a server with --lora-dir, the directory whose adapters may be loaded",
                code="not_allowed",
            )
        return self._directory


def _inside(directory: Path, path: str) -> Path:
    """Returns where an adapter is. Raises: ValueError unless it and its files are in `directory`,
    whatever links say.
    """
    try:
        where = (directory / path).resolve()
        files = [where, *((where / name).resolve() for name in (CONFIG, TENSORS))]
        is_inside = bool(path) and all(one.is_relative_to(directory) for one in files)
    except (OSError, RuntimeError, ValueError):  # a loop of links, a name that cannot be one
        is_inside = False
    if not is_inside:
        raise ValueError(
            f"lora_path: expected an adapter in the directory of --lora-dir, got {path!r:.80}"
        )
    return where
