"""Writes files that are there complete or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

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
