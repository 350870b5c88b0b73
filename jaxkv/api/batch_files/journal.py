"""Keeps the output of a batch: whole rows appended to a file, and beside it what they are of."""

from __future__ import annotations

import io
import json
import os
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from jaxkv.api.batch_files.forms import Form, LineId, Plain, Written, hashed
from jaxkv.api.batch_files.openai import OpenAI
from jaxkv.api.batch_files.sources import Lines, is_blank, numbered_lines, parse
from jaxkv.files import lock

MAX_ROW_BYTES = 2**30
SYNC_S = 5.0
MANIFEST = ".manifest.json"
"""Follows an output's name in that of the file that says what its rows are of."""

FORMS: tuple[Form, ...] = (Plain(), OpenAI())
MAX_MESSAGE_LEN = 1000
"""Characters of an error, which may show a value from a line."""

_GOES_ON = "The rows before it are whole, and the same command goes on after them"
_ROW_START = b'{"id": '


class Ids:
    """Holds which ids were met, each as 16 bytes of a hash, so that long ones take no more."""

    def __init__(self) -> None:
        self._digests: set[bytes] = set()

    def __contains__(self, line_id: LineId) -> bool:
        return hashed(line_id, 16) in self._digests

    def __len__(self) -> int:
        return len(self._digests)

    def add(self, line_id: LineId) -> None:
        self._digests.add(hashed(line_id, 16))

    def remove(self, line_id: LineId) -> None:
        self._digests.remove(hashed(line_id, 16))


def _differing(one: dict[str, Any], other: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns what each of both has that the other has not."""
    return [
        {key: value for key, value in this.items() if key not in that or that[key] != value}
        for this, that in ((one, other), (other, one))
    ]


class Rows:
    """Takes rows, of which none are there yet and none are kept: those of a pipe."""

    def __init__(self, file: io.RawIOBase | BinaryIO, name: str) -> None:
        self.ids = Ids()
        self.lines: set[int] = set()
        self.num_rows = self.num_errors = 0
        self._file = file
        self._name = name

    def append(self, row: dict[str, Any]) -> None:
        """Adds one row, by one write. Raises: OSError if not all of it could be written."""
        line = json.dumps(row).encode() + b"\n"
        try:
            written = self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}; {_GOES_ON}", self._name) from error
        if written != len(line):
            raise OSError(
                f"{self._name}: {written} of {len(line)} bytes of a row could be written; disk "
                f"full? {_GOES_ON}"
            )
        self._count(read_row(row))

    def require(self, facts: Mapping[str, Any]) -> None:
        """Notes what the rows are of. Raises: ValueError if there are rows of something else."""

    def sync(self) -> None:
        """Returns when every row so far is where it shall be."""
        self._file.flush()

    def _count(self, written: Written) -> None:
        self.num_rows += 1
        self.num_errors += written.is_error


class RowFile(Rows):
    """Keeps the output file: which lines have their row, and whole rows appended to it. Made by
    `open_output`.

    Raises: ValueError if it holds a whole line that is no row, or an end that is not the beginning
    of one.
    """

    def __init__(self, file: io.FileIO, name: str) -> None:
        super().__init__(file, name)
        self._synced_s = time.monotonic()
        end = 0
        for number, raw in _rows_in(file, name):
            if raw is None or raw.endswith(b"\n"):
                end += len(raw or b"")
                if not is_blank(raw):  # which an editor has left
                    self._note(_checked(self._name, number, raw))
            else:
                file.truncate(end)

    def append(self, row: dict[str, Any]) -> None:
        """Adds one row. Raises: OSError if not all of it could be written; the next start cuts that
        off.
        """
        super().append(row)
        if time.monotonic() - self._synced_s > SYNC_S:
            self.sync()

    def sync(self) -> None:
        """Returns when every row so far is on the disk."""
        os.fsync(self._file.fileno())
        self._synced_s = time.monotonic()

    def require(self, facts: Mapping[str, Any]) -> None:
        """Notes what the rows are of beside the file, as long as it has none; else compares.

        Raises: ValueError naming what was otherwise when its rows were written, or if nobody knows.
        """
        path = self._name + MANIFEST
        known: dict[str, Any] = {}
        if os.path.exists(path):
            with open(path, "rb") as file:
                try:
                    known = parse(file.read(), MAX_ROW_BYTES)
                except ValueError as error:
                    raise ValueError(f"{path}: expected a manifest: {error}") from error
        elif self.num_rows:
            raise ValueError(
                f"{self._name}: has {self.num_rows} rows, but {os.path.basename(path)} is not "
                f"beside it, which says of which model and parameters: name another output"
            )
        facts = json.loads(json.dumps(facts))
        if self.num_rows:
            # Also what is no longer said: a run without adapters has no word of them.
            for name in {**known, **facts}:
                there, here = known.get(name), facts.get(name)
                if there != here:
                    if isinstance(there, dict) and isinstance(here, dict):
                        there, here = _differing(there, here)
                    raise ValueError(
                        f"{self._name}: {name}: expected {there!r:.300}, with which its "
                        f"{self.num_rows} rows were made, got {here!r:.300}: name another output"
                    )
            return
        try:
            with open(path + ".new", "w", encoding="utf-8") as file:
                json.dump(facts, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from error
        os.replace(path + ".new", path)

    def _note(self, written: Written) -> None:
        if written.line_id is not None:
            self.ids.add(written.line_id)
        elif written.number is not None:
            self.lines.add(written.number)
        self._count(written)


def read_row(row: Mapping[str, Any]) -> Written:
    """Reads a row of any form. Raises: ValueError for what is none."""
    for form in FORMS:
        if (written := form.read(row)) is not None:
            return written
    raise ValueError(f"unexpected keys {', '.join(row)}")


def message_of(error: ValueError) -> str:
    """Returns what a row says of an error."""
    return str(error)[:MAX_MESSAGE_LEN]


@contextmanager
def open_output(
    path: str | os.PathLike[str], source: Lines, *, retry_errors: bool = False
) -> Iterator[Rows]:
    """Opens the output for the lines of `source`: `-` is standard output, else a file, made if
    missing, locked against other processes and synced at the end.

    retry_errors: error rows are taken out first, so that their lines run again.
    Raises: ValueError if it is no regular file, is `source` itself or in use, is gzipped or
    Parquet, and as `RowFile` does; OSError.
    """
    if path == "-":
        if retry_errors:
            raise ValueError("retry_errors: expected a file as output, got standard output")
        yield Rows(sys.stdout.buffer, "standard output")
        return
    name = os.fspath(path)
    if name.endswith((".gz", ".parquet")):
        raise ValueError(f"{name}: expected JSON lines as output, to which rows can be appended")
    with open(name, "a+b", buffering=0) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{name}: expected a regular file as output")
        if os.path.samestat(status, os.fstat(source.fileno())):
            raise ValueError(f"{name}: expected an output that is not the input")
        _lock(file, name)
        # Another process that took error rows out may have ended in between.
        if not os.path.exists(name) or not os.path.samestat(status, os.stat(name)):
            raise ValueError(f"{name}: another process has put a new file here: start again")
        with closing(_without_errors(file, name) if retry_errors else file) as output:
            rows = RowFile(output, name)
            try:
                yield rows
            finally:
                rows.sync()


def _lock(file: io.FileIO, name: str) -> None:
    try:
        lock(file)
    except BlockingIOError as error:
        raise ValueError(f"{name}: another process is writing to this output") from error


def _without_errors(file: io.FileIO, path: str) -> io.FileIO:
    """Puts a file without the error rows in the place of this one, at once, and opens it locked."""
    target = os.path.realpath(path)  # a link stays one, to what it is to
    new = Path(target + ".new")
    with ExitStack() as undo:
        undo.callback(new.unlink, missing_ok=True)
        with open(new, "wb") as kept:
            for number, raw in _rows_in(file, path):
                whole = raw is None or (raw.endswith(b"\n") and not is_blank(raw))
                if whole and not _checked(path, number, raw).is_error:
                    kept.write(raw or b"")
            kept.flush()
            os.fsync(kept.fileno())
        opened = undo.enter_context(open(new, "a+b", buffering=0))
        _lock(opened, str(new))
        os.replace(new, target)
        undo.pop_all()
    return opened


def _rows_in(file: io.FileIO, name: str) -> Iterator[tuple[int, bytes | None]]:
    """Yields the numbered lines. Raises: ValueError for an end that no torn row has."""
    file.seek(0)
    with open(file.fileno(), "rb", closefd=False) as rows:
        for number, raw in numbered_lines(rows, MAX_ROW_BYTES):
            if not (raw is None or raw.endswith(b"\n") or raw.startswith(_ROW_START[: len(raw)])):
                raise ValueError(
                    f"{name}, line {number}: expected a line end; is it the right file?"
                )
            yield number, raw


def _checked(name: str, number: int, raw: bytes | None) -> Written:
    try:
        return read_row(parse(raw, MAX_ROW_BYTES))
    except ValueError as error:
        raise ValueError(
            f"{name}, line {number}: expected a row of a batch output, got something else "
            f"({message_of(error)}); is it the right file?"
        ) from error
