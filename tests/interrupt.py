"""A KeyboardInterrupt at a line of one's choice: an exception may come between any two."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import jaxkv

ROOT = Path(jaxkv.__file__).parent
HOST = tuple(f"{ROOT / name}" for name in ("engine", "holding", "requests", "api/llm.py"))


class Interrupt:
    """Raises at the line of the host with this number, counted from the start of the block."""

    def __init__(self, at: int = -1, files: tuple[str, ...] = HOST) -> None:
        self.num_lines = 0
        self._at = at
        self._files = files

    def __enter__(self) -> Interrupt:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(self._files):
            return None
        if event == "line":
            self.num_lines += 1
            if self.num_lines - 1 == self._at:
                raise KeyboardInterrupt
        return self._trace
