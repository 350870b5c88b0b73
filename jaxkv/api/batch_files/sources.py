"""Reads the lines of a batch: from JSON lines, gzipped or not, Parquet or standard input."""

from __future__ import annotations

import gzip
import itertools
import json
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, Protocol

MAX_LINE_BYTES = 2**24
"""Bounds a line of input: twice what a million token ids take."""

MAX_DEPTH = 64
"""Bounds the nesting of lists and objects in a line: chat templates recurse over a message."""

PARQUET_ROWS = 256
"""Rows of a Parquet file that are held at once."""

_OBJECTS = ("body", "messages", "params")
"""Columns of a Parquet file that may hold JSON as text."""


class Lines(Protocol):
    """Gives lines of bytes: what a file opened in binary mode does."""

    def readline(self, limit: int, /) -> bytes: ...
    def seekable(self) -> bool: ...
    def seek(self, position: int, /) -> Any: ...
    def fileno(self) -> int: ...


@contextmanager
def open_lines(path: str) -> Iterator[Lines]:
    """Opens an input by its name: `-` is standard input, `*.gz` gzipped lines, `*.parquet` a table
    whose columns are the keys of a line (a null is an absent key).

    Raises: OSError; ValueError for a Parquet file that is none, or without pyarrow. What is read
    later raises OSError for a broken gzip file.
    """
    if path == "-":
        yield sys.stdin.buffer
    elif path.endswith(".parquet"):
        with open(path, "rb") as file:
            yield ParquetLines(file)
    elif path.endswith(".gz"):
        with gzip.open(path, "rb") as unpacked:
            yield _Gzip(unpacked, path)
    else:
        with open(path, "rb") as file:
            yield file


class _Gzip:
    """Gives the lines of a gzip file, whose end may be missing, or anything in it be damaged."""

    def __init__(self, file: gzip.GzipFile, path: str) -> None:
        self._file, self._path = file, path
        self.seekable, self.seek, self.fileno = file.seekable, file.seek, file.fileno

    def readline(self, limit: int) -> bytes:
        try:
            return self._file.readline(limit)
        except EOFError as error:
            raise OSError(f"{self._path}: expected a whole gzip file, got one cut off") from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise OSError(
                f"{self._path}: expected a gzip file, got a broken one: {error}"
            ) from error


class ParquetLines:
    """Gives the rows of a Parquet file as lines of JSON, PARQUET_ROWS of them in memory.

    Raises: ValueError for what is no such file, for a value that JSON does not have, and without
    pyarrow.
    """

    def __init__(self, file: BinaryIO) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise ValueError(f'{file.name}: expected pyarrow: pip install "jaxkv[data]"') from error
        self.fileno = file.fileno
        self._name = file.name
        try:
            self._table = pyarrow.parquet.ParquetFile(file)
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{file.name}: expected a Parquet file: {error}") from error
        self.seek(0)

    def seekable(self) -> bool:
        return True

    def seek(self, position: int) -> None:
        """Goes back to the first row. Raises: ValueError for any other position."""
        if position:
            raise ValueError(f"position: expected 0, got {position}")
        self._lines, self._rest = self._encoded(), b""

    def readline(self, limit: int) -> bytes:
        line = self._rest or next(self._lines, b"")
        self._rest = line[limit:]
        return line[:limit]

    def _encoded(self) -> Iterator[bytes]:
        number = itertools.count(1)
        for batch in self._table.iter_batches(PARQUET_ROWS):
            for row in batch.to_pylist():
                at = next(number)
                try:
                    yield json.dumps(_without_nulls(row)).encode() + b"\n"
                except (TypeError, ValueError) as error:
                    raise ValueError(
                        f"{self._name}, row {at}: expected values that JSON has: {error}"
                    ) from error


def _without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row without nulls, which a column has where other rows have a value, and with the
    objects that stand in it as text.
    """
    kept: dict[str, Any] = _pruned(row)
    for key in _OBJECTS:
        if isinstance(kept.get(key), str):
            # What is no JSON stays a text, which the line is then refused for.
            with suppress(ValueError, RecursionError):
                value = json.loads(kept[key], object_pairs_hook=_unique)
                _check_depth(value, MAX_DEPTH)
                kept[key] = value
    return kept


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _pruned(one) for key, one in value.items() if one is not None}
    return [_pruned(one) for one in value] if isinstance(value, list) else value


def numbered_lines(file: Lines, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Yields the lines with their ends, numbered from 1; None for one of more than `max_bytes`, of
    which no more is held.
    """
    for number in itertools.count(1):
        line = file.readline(max_bytes + 1)
        if not line:
            return
        if len(line) <= max_bytes:
            yield number, line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(max_bytes)
        yield number, None


def is_blank(raw: bytes | None) -> bool:
    """Tells whether a line says nothing; one that is too long (None) does."""
    return raw is not None and not raw.strip()


def parse(raw: bytes | None, max_bytes: int) -> dict[str, Any]:
    """Reads the object that a line holds. Raises: ValueError for everything else, however odd."""
    if raw is None:
        raise ValueError(f"expected at most {max_bytes} bytes in a line")
    try:
        value = json.loads(
            raw.decode("utf-8-sig"), parse_constant=_refuse_constant, object_pairs_hook=_unique
        )
        _check_depth(value, MAX_DEPTH)
    except UnicodeDecodeError as error:
        raise ValueError(f"expected JSON in UTF-8, not compressed, got {error}") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"expected JSON, got an error at character {error.pos}: {error.msg}"
        ) from error
    except RecursionError as error:
        raise ValueError(f"expected at most {MAX_DEPTH} nested lists and objects") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"expected JSON, got {name}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    whole = dict(pairs)
    if len(whole) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        repeated = ", ".join(sorted(key for key, count in counts.items() if count > 1))
        raise ValueError(f"expected each key once, got several of {repeated}")
    return whole


def _check_depth(value: Any, left: int) -> None:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if inner and not left:
        raise ValueError(f"expected at most {MAX_DEPTH} nested lists and objects")
    for one in inner:
        if isinstance(one, (dict, list)):
            _check_depth(one, left - 1)
