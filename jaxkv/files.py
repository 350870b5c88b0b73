"""Writes files that are there complete or not at all, and locks files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

UNFINISHED = ".part"
"""What is being written has a name that ends so."""


def write_whole(path: Path, parts: Iterable[bytes | memoryview], *, sync: bool = False) -> None:
    """Writes a file, readable for this user only, in the place of what there was. Processes that
    write it at once leave one of theirs.

    sync: it is on the disk when this returns, and survives a power failure.
    Raises: OSError. What was begun is gone then, and behind an interrupt.
    """
    handle, name = tempfile.mkstemp(UNFINISHED, f"{path.stem}.", path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(parts)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def lock(file: int | BinaryIO) -> None:
    """Takes a file for this process until it is closed, or the process ends however it does.

    Raises: BlockingIOError if it is taken, another OSError where files cannot be locked.
    """
    try:
        import fcntl
    except ImportError as error:  # on Windows
        raise OSError("files cannot be locked on this system") from error
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
