"""Batch files: JSON lines in, one row per line out in order of finishing, and a restart that goes
on exactly there.

A line is {"id": text or whole number} with one of "prompt": text, "prompt_token_ids": [...] or
"messages": [{"role": ..., "content": ...}, ...], and where wanted "params": {fields of
SamplingParams that override the run's}. Blank lines are skipped. A row is one of

    {"id", "text", "finish_reason", "num_prompt_tokens", "num_output_tokens"}
    {"id", "error"}                 a request that was refused
    {"id": null, "line", "error"}   a line (numbered from 1) without an id of its own

and has "token_ids" in place of "text" where the parameters or the model leave out detokenization.

What the output is worth after a crash: each row is appended by one write, so however the process
ends (SIGKILL too) whole rows are left and at most one torn last line, which the next start cuts
off. Started again with the same arguments
it does what has no row yet: nothing is lost, nothing is there twice. A power cut also takes what
the system had not
stored: rows are synced at the end, and when one is written more than SYNC_S after the last time.
Those lines are done again where the file system lets a file grow only after its data (ext4 and XFS
by default); elsewhere a damaged row stops the next start with its line number.

A line without a seed draws with one made of the run's seed and its id. So its tokens do not depend
on what ran before, and a sampled run that was cut off ends like one that was not. An error row
counts as done: delete it to try again.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import itertools
import json
import os
import stat
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from jaxkv.config import SamplingParams, is_int

if TYPE_CHECKING:
    from jaxkv.api.llm import LLM

MAX_LINE_BYTES = 2**24
"""Of input: twice what a million token ids take."""

MAX_ROW_BYTES = 2**30
MAX_ID_LEN = 256
"""Characters of an id; all ids are held in memory."""

MAX_ERROR_LEN = 1000
"""Characters of a message, which may show a value from the line."""

MAX_DEPTH = 64
"""Of nested lists and objects in a line. Chat templates recurse over what a message holds."""

SYNC_S = 5.0

_KINDS = ("prompt", "prompt_token_ids", "messages")
_NOT_IN_LINES = {"n", "logprobs", "prompt_logprobs", "prompt_logprobs_start"}
_PARAMS = {field.name for field in fields(SamplingParams)} - _NOT_IN_LINES
_COUNTED = ("finish_reason", "num_prompt_tokens", "num_output_tokens")
_RESULTS = ({"id", "text", *_COUNTED}, {"id", "token_ids", *_COUNTED})
_ROW_START = b'{"id": '


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchCounts:
    """Counts what one run did: rows it wrote, lines it skipped because they had one, error rows in
    the whole output, tokens it generated, and seconds that took without compilation.
    """

    num_written: int
    num_skipped: int
    num_errors: int
    num_output_tokens: int
    run_s: float


class RowFile:
    """The output: which lines have their row, and whole rows appended to it. Made by `open_output`.

    Raises: ValueError if it holds a whole line that is no row, or an end that is not the beginning
    of one.
    """

    def __init__(self, file: io.FileIO) -> None:
        self.ids: set[str | int] = set()
        self.lines: set[int] = set()
        self.num_rows = self.num_errors = 0
        self._file = file
        self._synced_s = time.monotonic()
        end = 0
        file.seek(0)
        with open(file.fileno(), "rb", closefd=False) as rows:
            for number, raw in _numbered_lines(rows, MAX_ROW_BYTES):
                if raw is None or raw.endswith(b"\n"):
                    self._note(number, raw)
                    end += len(raw or b"")
                elif raw.startswith(_ROW_START[: len(raw)]):
                    file.truncate(end)
                else:
                    raise ValueError(
                        f"{file.name!s}, line {number}: expected a line end; is it the right file?"
                    )

    def append(self, row: dict[str, Any]) -> None:
        """Adds one row. Raises: OSError if not all of it could be written; the next start cuts that
        off.
        """
        line = json.dumps(row).encode() + b"\n"
        written = self._file.write(line)
        if written != len(line):
            raise OSError(
                f"{self._file.name!s}: {written} of {len(line)} bytes of a row could be written; "
                f"disk full?"
            )
        self._count(row)
        if time.monotonic() - self._synced_s > SYNC_S:
            self.sync()

    def sync(self) -> None:
        """Returns when every row so far is on the disk."""
        os.fsync(self._file.fileno())
        self._synced_s = time.monotonic()

    def _note(self, number: int, raw: bytes | None) -> None:
        if _is_blank(raw):
            return  # an editor's
        try:
            row = _parse(raw, MAX_ROW_BYTES)
            if row.keys() == {"id", "line", "error"} and row["id"] is None and is_int(row["line"]):
                self.lines.add(row["line"])
            elif row.keys() == {"id", "error"} or row.keys() in _RESULTS:
                self.ids.add(_usable_id(row))
            else:
                raise ValueError(f"unexpected keys {', '.join(row)}")
        except ValueError as error:
            raise ValueError(
                f"{self._file.name!s}, line {number}: expected a row of a batch output, got "
                f"something else "
                f"({_message(error)}); is it the right file?"
            ) from error
        self._count(row)

    def _count(self, row: dict[str, Any]) -> None:
        self.num_rows += 1
        self.num_errors += "error" in row


@contextmanager
def open_output(path: str | os.PathLike[str], source: BinaryIO) -> Iterator[RowFile]:
    """Opens the output file for the lines of `source`, made if missing, locked against other
    processes and synced at the end.

    Raises: ValueError if it is no regular file, is `source` itself or in use, and as `RowFile`
    does; OSError.
    """
    with open(path, "a+b", buffering=0) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{os.fspath(path)}: expected a regular file as output")
        if os.path.samestat(status, os.fstat(source.fileno())):
            raise ValueError(f"{os.fspath(path)}: expected an output that is not the input")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{os.fspath(path)}: another process is writing to this output"
            ) from error
        rows = RowFile(file)
        try:
            yield rows
        finally:
            rows.sync()


def run_batch(
    llm: LLM,
    source: BinaryIO,
    rows: RowFile,
    params: SamplingParams | None = None,
    *,
    use_tqdm: bool = True,
) -> BatchCounts:
    """Gives every line of `source` (opened in binary mode) that has no row yet one in `rows`.

        with open("in.jsonl", "rb") as source, open_output("out.jsonl", source) as rows:
            run_batch(LLM(), source, rows, SamplingParams(temperature=0, max_tokens=64))

    params: of lines that say nothing else (default: `LLM.get_default_sampling_params`); params.seed
    is the run's seed.
    Memory: ids, and the requests that `LLM.as_completed` takes at once.
    Raises: ValueError for params that ask for logprobs or several samples, OSError; never for what
    a line holds.
    """
    from tqdm import tqdm

    params = llm.get_default_sampling_params() if params is None else params
    for name in ("logprobs", "prompt_logprobs"):
        if (asked := getattr(params, name)) is not None:
            raise ValueError(
                f"{name}: expected None, because a row has no place for them, got {asked}"
            )
    if params.n != 1:
        raise ValueError(f"n: expected 1, because a row has place for one sample, got {params.n}")
    has_tokenizer = llm.get_tokenizer() is not None
    total = None
    if source.seekable():
        total = sum(not _is_blank(raw) for _, raw in _numbered_lines(source, MAX_LINE_BYTES))
        source.seek(0)
    requests, num_before, num_tokens = _Requests(source, rows, params), rows.num_rows, 0
    started, compile_s = time.perf_counter(), llm.compile_s
    with (
        tqdm(
            total=total, initial=num_before, desc="Processed prompts", disable=not use_tqdm
        ) as bar,
        closing(llm.as_completed(requests)) as completed,
    ):
        for index, result in completed:
            line_id, detokenize = requests.taken.pop(index)
            if isinstance(result, ValueError):
                rows.append({"id": line_id, "error": _message(result)})
            else:
                done = result.outputs[0]
                shown = (
                    {"text": done.text}
                    if detokenize and has_tokenizer
                    else {"token_ids": done.token_ids}
                )
                counted = (done.finish_reason, len(result.prompt_token_ids), len(done.token_ids))
                rows.append({"id": line_id, **shown, **dict(zip(_COUNTED, counted, strict=True))})
                num_tokens += len(done.token_ids)
            bar.update(rows.num_rows - bar.n)
        bar.update(rows.num_rows - bar.n)
    return BatchCounts(
        num_written=rows.num_rows - num_before,
        num_skipped=requests.num_skipped,
        num_errors=rows.num_errors,
        num_output_tokens=num_tokens,
        run_s=time.perf_counter() - started - (llm.compile_s - compile_s),
    )


class _Requests:
    """The lines without a row as requests for `LLM.as_completed`; a bad line gets its error row on
    the way.

    `taken` has the id of each request by its index, and whether its tokens are to be text.
    """

    def __init__(self, source: BinaryIO, rows: RowFile, params: SamplingParams) -> None:
        self.taken: dict[int, tuple[str | int, bool]] = {}
        self.num_skipped = 0
        self._source = source
        self._rows = rows
        self._params = replace(params, seed=None)
        self._seed = 0 if params.seed in (None, -1) else params.seed % 2**64
        self._seen: set[str | int] = set()

    def __iter__(self) -> Iterator[tuple[Any, SamplingParams]]:
        index = itertools.count()
        for number, raw in _numbered_lines(self._source, MAX_LINE_BYTES):
            if _is_blank(raw):
                continue
            line_id = None
            try:
                line = _parse(raw, MAX_LINE_BYTES)
                line_id = self._new_id(line)
                if line_id in self._rows.ids:
                    self._rows.ids.remove(line_id)  # it is in _seen now: once is enough
                    self.num_skipped += 1
                    continue
                prompt, params = self._request(line, line_id)
            except ValueError as error:
                self._refuse(line_id, number, f"line {number}: {_message(error)}")
                continue
            self.taken[next(index)] = line_id, params.detokenize
            yield prompt, params

    def _new_id(self, line: dict[str, Any]) -> str | int:
        line_id = _usable_id(line)
        if line_id in self._seen:
            raise ValueError(f"id: expected one that no line above has, got {line_id!r}")
        self._seen.add(line_id)
        return line_id

    def _request(self, line: dict[str, Any], line_id: str | int) -> tuple[Any, SamplingParams]:
        if unknown := sorted(line.keys() - {"id", "params", *_KINDS}):
            raise ValueError(f"unknown keys: {', '.join(unknown)}")
        given = [kind for kind in _KINDS if kind in line]
        if len(given) != 1:
            raise ValueError(
                f"expected one of {', '.join(_KINDS)}, got {' and '.join(given) or 'none'}"
            )
        if not isinstance(line.get("messages", []), list):
            raise ValueError(f"messages: expected a list, got {type(line['messages']).__name__}")
        changes = line.get("params", {})
        if not isinstance(changes, dict):
            raise ValueError(f"params: expected an object, got {type(changes).__name__}")
        if unknown := sorted(changes.keys() - _PARAMS):
            raise ValueError(f"params: unknown or not possible in a batch: {', '.join(unknown)}")
        params = replace(self._params, **changes)
        if params.seed in (None, -1):
            params = replace(params, seed=_seed_for(self._seed, line_id))
        return line["messages"] if given == ["messages"] else {given[0]: line[given[0]]}, params

    def _refuse(self, line_id: str | int | None, number: int, error: str) -> None:
        if line_id is not None:
            self._rows.append({"id": line_id, "error": error})
        elif number in self._rows.lines:
            self.num_skipped += 1
        else:
            self._rows.append({"id": None, "line": number, "error": error})


def _numbered_lines(file: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
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


def _is_blank(raw: bytes | None) -> bool:
    return raw is not None and not raw.strip()


def _parse(raw: bytes | None, max_bytes: int) -> dict[str, Any]:
    """Reads the object that a line holds. Raises: ValueError for everything else, however odd."""
    if raw is None:
        raise ValueError(f"expected at most {max_bytes} bytes in a line")
    try:
        value = json.loads(
            raw.decode("utf-8-sig"), parse_constant=_refuse_constant, object_pairs_hook=_unique
        )
        _check_depth(value, MAX_DEPTH)
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
    if repeated := sorted(
        key for key, count in Counter(key for key, _ in pairs).items() if count > 1
    ):
        raise ValueError(f"expected each key once, got several of {', '.join(repeated)}")
    return dict(pairs)


def _check_depth(value: Any, left: int) -> None:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if inner and not left:
        raise ValueError(f"expected at most {MAX_DEPTH} nested lists and objects")
    for one in inner:
        if isinstance(one, (dict, list)):
            _check_depth(one, left - 1)


def _usable_id(line: dict[str, Any]) -> str | int:
    line_id: Any = line.get("id")
    if is_int(line_id) or (isinstance(line_id, str) and len(line_id) <= MAX_ID_LEN):
        return line_id
    raise ValueError(
        f"id: expected a whole number or a text of at most {MAX_ID_LEN} characters, got "
        f"{line_id!r:.80}"
    )


def _seed_for(run_seed: int, line_id: str | int) -> int:
    """Draws 64 bits for one line, of a hash that is the same in every process, which Python's own
    for texts is not.
    """
    digest = hashlib.blake2b(json.dumps(line_id).encode(), digest_size=8).digest()
    return int(
        np.random.SeedSequence([run_seed, int.from_bytes(digest, "little")]).generate_state(
            1, np.uint64
        )[0]
    )


def _message(error: ValueError) -> str:
    return str(error)[:MAX_ERROR_LEN]
