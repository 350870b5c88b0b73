"""Keeps pages in files of a directory, one each, under the keys that they were listed by. Who has
the directory next, in another process too, finds them.

A file's name is the page's key in hexadecimal. It has MAGIC, the SHA-256 of key and contents, and
the contents: what each array of each store has of the page, one behind the other.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np

from jaxkv.files import UNFINISHED, write_whole
from jaxkv.holding.directory import Directory
from jaxkv.holding.host import HostPage

P = ParamSpec("P")
T = TypeVar("T")

MAGIC = b"jaxkvpg1"
HEADER_BYTES = len(MAGIC) + hashlib.sha256().digest_size
WAITING_BYTES = 2**28
"""Bytes of pages that may wait to be written: those beyond, as a slow disk has, are left out."""
_KEY = "[0-9a-f]{64}(?:[0-9a-f]{2})?"
_NAME = re.compile(rf"({_KEY})\.page")
_UNFINISHED = re.compile(rf"({_KEY}|secret)\.\w+{re.escape(UNFINISHED)}")

PageShapes = tuple[tuple[tuple[tuple[int, ...], np.dtype], ...], ...]
"""Shape [L, ...] and dtype of each array of each store."""


@dataclass(slots=True)
class Found:
    """Holds what was read: pages by key, keys whose file is missing or damaged, and how many pages
    it took so many seconds to read.
    """

    pages: dict[bytes, HostPage] = field(default_factory=dict)
    missing: list[bytes] = field(default_factory=list)
    damaged: list[bytes] = field(default_factory=list)
    num_read: int = 0
    seconds: float = 0.0


class DiskPages:
    """Keeps the pages used last, in at most `most_bytes` of files. Host only.

    The index is the caller's thread's alone. One thread writes and deletes, in the order that it is
    told, and another one reads; neither is ever waited for but by `clear` and `close`.
    """

    def __init__(self, directory: Directory, most_bytes: int, shapes: PageShapes) -> None:
        self.path, self.most_bytes, self._shapes = directory.path, most_bytes, shapes
        self.page_bytes = HEADER_BYTES + sum(map(_nbytes, _flat(shapes)))
        if most_bytes < self.page_bytes:
            raise ValueError(
                f"kv_disk_bytes: expected room for a page, {self.page_bytes} bytes, got "
                f"{most_bytes}"
            )
        self.num_found = self.num_damaged = self.num_left_out = 0
        """Count tokens that requests took from here, files that were not what their hash says, and
        pages that have left the device unwritten because too many waited.
        """
        self.is_writing = True
        """False since a write has failed."""
        self._size_of = _listed(self.path)
        self.num_bytes = sum(self._size_of.values())
        self._waiting: OrderedDict[bytes, tuple[Future[None], HostPage]] = OrderedDict()
        self._writer = ThreadPoolExecutor(1, "jaxkv-disk-writer")
        self._reader = ThreadPoolExecutor(1, "jaxkv-disk-reader")
        self._make_room(0)
        # Both threads end what they are told when the process exits, and this comes after it.
        self.close = weakref.finalize(self, _close, self._writer, self._reader, directory)
        """Writes what waits and lets others have the directory; also when nobody has this."""

    def __len__(self) -> int:
        return len(self._size_of)

    def __contains__(self, key: bytes) -> bool:
        return key in self._size_of

    def wants(self, key: bytes) -> bool:
        """Tells whether `put` would keep the page."""
        return self._lacks(key) and len(self._waiting) * self.page_bytes < WAITING_BYTES

    def left(self, key: bytes) -> None:
        """Notes that a page has left the device which was not put here: it is left out unless it
        is here already.
        """
        self.num_left_out += self._lacks(key)

    def _lacks(self, key: bytes) -> bool:
        return self.is_writing and key not in self._size_of

    def put(self, key: bytes, page: HostPage) -> None:
        """Has a page that it `wants` written, in place of those that were used least lately."""
        self._make_room(self.page_bytes)
        written = _told(self._writer, _write, self._path(key), key, page)
        if written is not None:
            self._size_of[key] = self.page_bytes
            self.num_bytes += self.page_bytes
            self._waiting[key] = written, page

    def used(self, keys: Sequence[bytes]) -> None:
        """Notes the use of what is kept of a sequence, so that its first pages stay longest, after
        a restart too.
        """
        kept = [key for key in reversed(keys) if key in self._size_of]
        for key in kept:
            self._size_of.move_to_end(key)
        if kept:
            _told(self._writer, _touch, self.path, kept)

    def read(self, keys: Sequence[bytes]) -> Future[Found]:
        """Begins to read these pages. What comes is for `has_read` to note."""
        waiting = {key: self._waiting[key][1] for key in keys if key in self._waiting}
        paths = {key: self._path(key) for key in keys if key not in waiting}
        read = _told(self._reader, _read_all, paths, self._shapes, waiting)
        if read is None:
            read = Future[Found]()
            read.set_result(Found())
        return read

    def has_read(self, found: Found) -> None:
        """Forgets what was not there as it should be."""
        self.num_damaged += len(found.damaged)
        for key in (*found.missing, *found.damaged):
            if key in self._size_of and key not in self._waiting:
                self._delete(key)

    def settle(self) -> None:
        """Takes note of what is written. Where that has failed nothing more is, with a warning."""
        while self._waiting:
            key, (written, _) = next(iter(self._waiting.items()))
            if not written.done():
                return
            del self._waiting[key]
            if written.cancelled() or (error := written.exception()) is None:
                continue
            self.num_bytes -= self._size_of.pop(key, 0)
            if not isinstance(error, OSError):
                raise error
            if self.is_writing:
                self._stop(error)

    def clear(self) -> None:
        """Deletes all pages, those of other models that have had the directory too."""
        for written, _ in self._waiting.values():
            written.cancel()
        self._waiting.clear()
        told = [_told(self._writer, _delete, self._path(key)) for key in self._size_of]
        self._size_of.clear()
        self.num_bytes = 0
        wait([deleted for deleted in told if deleted is not None])

    def start_again(self) -> None:
        """Counts anew, whatever state an interrupt has left things in."""
        self.num_bytes = sum(self._size_of.values())

    def _stop(self, error: OSError) -> None:
        self.is_writing = False
        for key, (written, _) in list(self._waiting.items()):
            if written.cancel():
                del self._waiting[key]
                self.num_bytes -= self._size_of.pop(key, 0)
        warnings.warn(f"kv_disk: no more pages are written to {self.path}: {error}", stacklevel=2)

    def _make_room(self, num_bytes: int) -> None:
        while self._size_of and self.num_bytes + num_bytes > self.most_bytes:
            self._delete(next(iter(self._size_of)))

    def _delete(self, key: bytes) -> None:
        self._waiting.pop(key, None)
        self.num_bytes -= self._size_of.pop(key)
        _told(self._writer, _delete, self._path(key))

    def _path(self, key: bytes) -> Path:
        return _path_of(self.path, key)


def _listed(folder: Path) -> OrderedDict[bytes, int]:
    """Returns key and size of each page, the one used least lately first. Removes files of its own
    that a process that was killed has not finished, and no others.
    """
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if _UNFINISHED.fullmatch(entry.name):
                os.unlink(entry.path)
            elif (name := _NAME.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                found.append((status.st_mtime_ns, bytes.fromhex(name[1]), status.st_size))
    return OrderedDict((key, size) for _, key, size in sorted(found))


def _told(
    thread: ThreadPoolExecutor, function: Callable[P, T], *args: P.args, **keywords: P.kwargs
) -> Future[T] | None:
    """Gives a thread something to do. None: it takes nothing more, as the process ends."""
    try:
        return thread.submit(function, *args, **keywords)
    except RuntimeError:
        return None


def _write(path: Path, key: bytes, page: HostPage) -> None:
    parts = [array.reshape(-1).view(np.uint8).data for arrays in page for array in arrays]
    write_whole(path, [MAGIC + _digest(key, parts), *parts], sync=True)


def _delete(path: Path) -> None:
    # Whatever keeps it from being deleted, it is not found any more before the next start.
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _path_of(folder: Path, key: bytes) -> Path:
    return folder / f"{key.hex()}.page"


def _touch(folder: Path, keys: Sequence[bytes]) -> None:
    """Makes the files of these keys the newest ones, each newer than the one before it."""
    now = time.time_ns()
    for i, key in enumerate(keys):
        with suppress(OSError):  # it has been deleted meanwhile, or the disk takes nothing more
            os.utime(_path_of(folder, key), ns=(now + i, now + i))


def _read_all(
    paths: dict[bytes, Path], shapes: PageShapes, waiting: dict[bytes, HostPage]
) -> Found:
    found, start = Found(dict(waiting)), time.perf_counter()
    for key, path in paths.items():
        try:
            data = memoryview(path.read_bytes())
        except FileNotFoundError:
            found.missing.append(key)
            continue
        except OSError:  # the disk cannot read it
            found.damaged.append(key)
            continue
        page = _page(key, data, shapes)
        if page is None:
            found.damaged.append(key)
        else:
            found.pages[key] = page
            found.num_read += 1
    found.seconds = time.perf_counter() - start
    return found


def _page(key: bytes, data: memoryview, shapes: PageShapes) -> HostPage | None:
    """Returns the page of a file; None unless the file is the one that was written for this key."""
    body = data[HEADER_BYTES:]
    if len(body) != sum(map(_nbytes, _flat(shapes))):
        return None
    if data[:HEADER_BYTES] != MAGIC + _digest(key, [body]):
        return None
    page, start = [], 0
    for of_store in shapes:
        arrays = []
        for shape, dtype in of_store:
            end = start + _nbytes((shape, dtype))
            arrays.append(np.frombuffer(body[start:end], dtype).reshape(shape))
            start = end
        page.append(tuple(arrays))
    return tuple(page)


def _digest(key: bytes, parts: Sequence[memoryview]) -> bytes:
    digest = hashlib.sha256(key)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _flat(shapes: PageShapes) -> list[tuple[tuple[int, ...], np.dtype]]:
    return [one for of_store in shapes for one in of_store]


def _nbytes(array: tuple[tuple[int, ...], np.dtype]) -> int:
    shape, dtype = array
    return int(np.prod(shape)) * dtype.itemsize


def _close(writer: ThreadPoolExecutor, reader: ThreadPoolExecutor, directory: Directory) -> None:
    try:
        writer.shutdown()
    finally:  # an interrupt leaves out what still waits
        writer.shutdown(wait=False, cancel_futures=True)
        reader.shutdown(wait=False, cancel_futures=True)
        directory.close()
