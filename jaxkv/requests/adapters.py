"""Reads the adapters that requests name, and keeps those used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from jaxkv.build.blueprint import Blueprint
from jaxkv.lora.request import LoRARequest
from jaxkv.weights.adapters import CONFIG, TENSORS, Adapter, read_adapter

Key = tuple[Any, ...]


class AdapterFiles:
    """Keeps so many adapters in host memory, beside those that requests have. Any thread may ask.

    What is kept is known by its files' names, sizes, times and inodes: files that change are read
    again, and requests that came before go on with what they were.
    """

    def __init__(self, blueprint: Blueprint) -> None:
        options = blueprint.options
        self._blueprint = blueprint
        self._most = options.max_cpu_loras or options.max_loras
        self._kept: OrderedDict[Key, Adapter] = OrderedDict()
        self._lock = Lock()

    def get(self, request: LoRARequest | None) -> Adapter | None:
        """Returns the adapter of a request, None for none. Raises: ValueError without enable_lora,
        CheckpointError for files that are broken or of another model.
        """
        if request is None:
            return None
        if not isinstance(request, LoRARequest):
            raise ValueError(
                f"lora_request: expected a LoRARequest or None, got {type(request).__name__}"
            )
        options = self._blueprint.options
        if not options.enable_lora:
            raise ValueError(
                f"lora_request: expected None without LLM(enable_lora=True), got {request!r:.200}"
            )
        directory = Path(request.path).expanduser()
        with self._lock:
            key = _key(directory)
            adapter = self._kept.pop(key, None)
            if adapter is None:
                adapter = read_adapter(
                    directory,
                    self._blueprint.spec,
                    self._blueprint.layout,
                    self._blueprint.placement,
                    rank=options.max_lora_rank,
                    dtype=self._blueprint.dtype,
                )
            self._kept[key] = adapter
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return adapter


def _key(directory: Path) -> Key:
    files = [directory.absolute() / name for name in (CONFIG, TENSORS)]
    stats = [file.stat() for file in files if file.is_file()]
    return (files[0], *((one.st_ino, one.st_size, one.st_mtime_ns) for one in stats))


def listed_adapters(given: Any, count: int) -> Sequence[LoRARequest | None]:
    """Returns an adapter or None for each prompt: one for all, or one each. Raises: ValueError."""
    if not isinstance(given, list | tuple):
        return [given] * count
    if len(given) != count:
        raise ValueError(
            f"lora_request: expected one for all or {count} (one per prompt), got {len(given)}"
        )
    return given
