"""The errors that jaxkv raises on purpose; a caller's plain mistake is a ValueError."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self


class CheckpointError(ValueError):
    """A checkpoint or its config is broken, unsafe or inconsistent; the message names the file,
    expected and got.
    """

    @classmethod
    def of(cls, where: object, problems: Sequence[str], what_to_do: str) -> Self:
        """Makes the error of several problems, of which it names the first ten."""
        more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
        return cls(f"{where}: {'; '.join(problems[:10])}{more}; {what_to_do}")


NO_GGUF = "GGUF is not read: pass a directory or hub id that has the model as *.safetensors"
"""Says what to do where a model's only weights are of this format."""


class SavedFileError(ValueError):
    """A file of saved keys and values is broken, or of another model; the message names the file,
    expected and got.
    """


class CapacityError(RuntimeError):
    """A finite resource (pages, rows) is exhausted; the message says how much was needed and how
    much is free.
    """


class DirectoryInUseError(RuntimeError):
    """The directory of `kv_disk` is another engine's, in this process or another; the message names
    it.
    """


class EngineDeadError(RuntimeError):
    """The engine of an `LLM` or `AsyncLLM` has ended: it was shut down, or died of the exception
    that is this one's cause.
    """


class KernelError(RuntimeError):
    """A kernel has failed its self-test on this device; the message says how, and where the report
    is.
    """


class Catch:
    """Catches an exception of its block for those whom it concerns; an exit or interrupt (no
    `Exception`) goes on.
    """

    error: Exception | None = None

    def __enter__(self) -> Catch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.error = error if isinstance(error, Exception) else None
        return self.error is not None
