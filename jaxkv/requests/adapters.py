"""Reads the adapters that requests name, and keeps those used last."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

from jaxkv.build.blueprint import Blueprint
from jaxkv.errors import CheckpointError
from jaxkv.lora.request import LoRARequest
from jaxkv.weights.adapters import CONFIG, TENSORS, Adapter, read_adapter

Key = tuple[Any, ...]


class AdapterFiles:
    """Keeps so many adapters in host memory, and finds those that requests have. Any thread may
    ask, and waits for no other one's reading where an adapter is known.

    What is kept is known by its files' names, sizes, times and inodes: files that change are read
    again, and requests that came before go on with what they were.
    """

    def __init__(self, blueprint: Blueprint) -> None:
        options = blueprint.options
        self._blueprint = blueprint
        self._most = options.max_cpu_loras or options.max_loras
        self._kept: OrderedDict[Key, Adapter] = OrderedDict()
        self._alive: WeakValueDictionary[Key, Adapter] = WeakValueDictionary()
        self._lock, self._reading = Lock(), Lock()

    def get(self, request: LoRARequest) -> Adapter:
        """Returns the adapter of a request. Raises: ValueError without enable_lora, CheckpointError
        for files that are broken or of another model.
        """
        if not isinstance(request, LoRARequest):
            raise ValueError(
                f"lora_request: expected a LoRARequest or None, got {type(request).__name__}"
            )
        options = self._blueprint.options
        if not options.enable_lora:
            raise ValueError(
                f"lora_request: expected None without LLM(enable_lora=True), got {request!r:.200}"
            )
        directory = Path(os.path.expanduser(request.path))
        try:
            if (adapter := self._known(directory)) is not None:
                return adapter
            with self._reading:  # one after the other, and what many ask for once
                return self._known(directory) or self._read(directory)
        except OSError as error:
            raise CheckpointError(
                f"{directory}: expected {CONFIG} and {TENSORS} that may be read, got an error: "
                f"{error.strerror}"
            ) from error

    def _known(self, directory: Path) -> Adapter | None:
        """Returns the adapter of these files if anybody has it."""
        key = _key(directory)
        with self._lock:
            adapter = self._alive.get(key)
            if adapter is not None:
                self._keep(key, adapter)
        return adapter

    def _read(self, directory: Path) -> Adapter:
        key, blueprint = _key(directory), self._blueprint
        adapter = read_adapter(
            directory,
            blueprint.spec,
            blueprint.layout,
            blueprint.placement,
            rank=blueprint.options.max_lora_rank,
            dtype=blueprint.dtype,
        )
        if _key(directory) != key:
            raise CheckpointError(
                f"{directory}: expected files that stay as they are while they are read: write an "
                f"adapter to another directory, then rename that"
            )
        with self._lock:
            self._alive[key] = adapter
            self._keep(key, adapter)
        return adapter

    def _keep(self, key: Key, adapter: Adapter) -> None:
        self._kept[key] = adapter
        self._kept.move_to_end(key)
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)


def _key(directory: Path) -> Key:
    files = [directory.absolute() / name for name in (CONFIG, TENSORS)]
    stats = [file.stat() for file in files if file.is_file()]
    # A copy may keep the time of the last write, but nobody chooses that of the last change.
    of_each = ((one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in stats)
    return (files[0], *of_each)


def one_adapter(given: Any) -> Any:
    """Returns the adapter of a call that takes one for all. Raises: ValueError for several."""
    if isinstance(given, list | tuple):
        raise ValueError("lora_request: expected one for all, got several")
    return given


def listed_adapters(given: Any, count: int) -> Sequence[LoRARequest | None]:
    """Returns an adapter or None for each prompt: one for all, or one each. Raises: ValueError."""
    if not isinstance(given, list | tuple):
        return [given] * count
    if len(given) != count:
        raise ValueError(
            f"lora_request: expected one for all or {count} (one per prompt), got {len(given)}"
        )
    return given
