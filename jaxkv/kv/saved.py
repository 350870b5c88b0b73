"""Keeps keys and values of a sequence off the device: in one file, for any page size, backend and
number of devices.

A file is in safetensors' format: `tokens`, and of each layer its keys and values [tokens, KV heads,
dim] as the model's dtype rounds them; of a quantising codec the arrays of its pages as they are,
because decoding and encoding again need not give the same bytes. Recurrent states are those behind
the last of the tokens. Its header says what they are of, and has the SHA-256 of each page over all
layers, of what is beside the pages, and of itself. It appears complete or not at all; where the
filesystem has no hard links, an empty file of its name may be there for a moment before, and stays
if the process is killed then.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxkv.errors import SavedFileError

T = TypeVar("T")

NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""How filesystems say that they have no hard links: FAT, many network and FUSE filesystems."""

FORMAT = 3
KEY, BY_TOKEN = "jaxkv", "tokens"
STORED = ("dtype", "codec", "form", "page_size", "keys")
"""These fields of an `Origin` say how keys and values are stored, not which they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Says what keys and values are of, beside their tokens: those of another origin mean nothing.

    model, weights, tokenizer: fingerprints ("" of no tokenizer). dtype: the model's. codec: the
    pages'. form: "tokens" of vectors by token, else what the arrays of pages are like. keys: a
    fingerprint of what they are fitted to being quantised by, "" where they are not.
    state_devices: how many divide recurrent states, in an order of their own; 0 without any.
    """

    model: str
    dtype: str
    codec: str
    form: str
    page_size: int
    weights: str
    tokenizer: str
    keys: str = ""
    state_devices: int = 0

    def is_stored_otherwise(self, here: Origin) -> bool:
        """Tells whether what is the same may be stored in other bytes."""
        names = [name for name in STORED if name != "page_size" or self.form != BY_TOKEN]
        return any(getattr(self, name) != getattr(here, name) for name in names)

    def check(self, here: Origin, where: str, *, convert: bool = False) -> None:
        """Raises: SavedFileError naming the first thing that is otherwise here. convert: it may be
        stored otherwise.
        """
        for name, value in asdict(self).items():
            own = getattr(here, name)
            is_free = name == "page_size" and self.form == BY_TOKEN
            is_free |= name == "tokenizer" and "" in (own, value)
            if own == value or is_free or (convert and name in STORED):
                continue
            hint = "; restore(path, convert=True) stores it anew" if name in STORED else ""
            raise SavedFileError(
                f"{where}: {name}: expected {own!r}, which this engine has, got {value!r}{hint}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedPages:
    """Holds the full pages of a sequence.

    layers: of each that has keys and values its arrays, along pages or tokens first. firsts: the
    position of their first token, past those that a window has let go. extra: what the owner wants
    to find again, as JSON has it. states: of each entry of `ModelSpec.states` its arrays, [layers,
    ...]. For those who store it anew: `layouts` of pages, as JSON has them, and `keys`, the means
    and factors [K, 2, H] of each layer whose keys are fitted.
    """

    origin: Origin
    tokens: tuple[int, ...]
    extra: Mapping[str, Any]
    layers: Mapping[int, tuple[np.ndarray, ...]] = field(default_factory=dict)
    firsts: Mapping[int, int] = field(default_factory=dict)
    states: tuple[tuple[np.ndarray, ...], ...] = ()
    layouts: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    keys: Mapping[int, np.ndarray] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Counts the bytes of pages and states."""
        return sum(x.nbytes for arrays in (*self.layers.values(), *self.states) for x in arrays)

    def save(self, path: Path) -> None:
        """Writes the file. Raises: FileExistsError if there is one, OSError if it cannot be,
        ValueError for `extra` that is no JSON.
        """
        if os.path.lexists(path):
            raise FileExistsError(f"{path}: expected a new file")
        arrays: dict[str, np.ndarray] = {"tokens": np.array(self.tokens, np.int32)}
        for layer, of_layer in self.layers.items():
            for i, array in enumerate(of_layer):
                arrays[f"{layer}.{i}"] = np.ascontiguousarray(array)
        arrays |= self._beside()
        header = {"format": FORMAT, "origin": asdict(self.origin), "extra": dict(self.extra)}
        header["firsts"] = {str(layer): first for layer, first in self.firsts.items()}
        header["layouts"] = {str(layer): dict(layout) for layer, layout in self.layouts.items()}
        header["pages"], header["beside"] = self._hashes(), self._hash_beside()
        try:
            text = json.dumps(header, sort_keys=True)
        except TypeError as error:
            raise ValueError(
                f"expected messages and chat_template_kwargs of values that JSON has: {error}"
            ) from error
        digest = hashlib.sha256(text.encode()).hexdigest()
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        try:
            try:
                save_file(arrays, name, metadata={KEY: digest + text})
            except SafetensorError as error:  # as a full disk is called there
                raise OSError(
                    f"{path}: expected a file that can be written, got {error}"
                ) from error
            with open(name, "rb") as file:
                os.fsync(file.fileno())
            _appear(Path(name), path)
        finally:
            Path(name).unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> SavedPages:
        """Reads a file and compares its hashes.

        Raises: SavedFileError for one that is broken or of something else, OSError if it cannot be
        read.
        """
        if not path.is_file():
            raise SavedFileError(f"{path}: expected a file that Session.save has written, got none")
        try:
            with safe_open(path, "np") as file:
                meta = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (AttributeError, SafetensorError) as error:  # numpy has not all of its dtypes
            raise SavedFileError(f"{path}: expected a whole file, got {error}") from error
        header = _header(meta, path)
        try:
            found = cls._of(header, arrays)
            hashes, beside = found._hashes(), found._hash_beside()
            said, said_beside = list(header["pages"]), header["beside"]
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            what = f"expected what Session.save writes, got {error!r}"
            raise SavedFileError(f"{path}: {what}") from error
        if hashes != said:
            pairs = enumerate(zip(hashes, said, strict=False))
            wrong = [page for page, (own, one) in pairs if own != one]
            raise SavedFileError(f"{path}: expected pages as their hashes say, got others: {wrong}")
        if beside != said_beside:
            raise SavedFileError(f"{path}: expected states and keys as their hash says, got others")
        return found

    @classmethod
    def _of(cls, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> SavedPages:
        layers: dict[int, dict[int, np.ndarray]] = {}
        states: dict[int, dict[int, np.ndarray]] = {}
        keys: dict[int, np.ndarray] = {}
        for name, array in arrays.items():
            kind, *numbers = name.split(".")
            if kind == "state":
                of, number = map(int, numbers)
                states.setdefault(of, {})[number] = array
            elif kind == "keys":
                keys[int(numbers[0])] = array
            elif kind != "tokens":
                layers.setdefault(int(kind), {})[int(numbers[0])] = array
        tokens = arrays["tokens"]
        if tokens.dtype != np.int32 or tokens.ndim != 1:
            raise ValueError(f"tokens: expected int32 [T], got {tokens.dtype} {tokens.shape}")
        return cls(
            origin=Origin(**header["origin"]),
            tokens=tuple(tokens.tolist()),
            extra=header["extra"],
            layers={layer: _in_order(of) for layer, of in layers.items()},
            firsts={int(layer): int(first) for layer, first in header["firsts"].items()},
            states=tuple(map(_in_order, _in_order(states))),
            layouts={int(layer): dict(layout) for layer, layout in header["layouts"].items()},
            keys=keys,
        )

    def _beside(self) -> dict[str, np.ndarray]:
        """Returns the arrays that no page has, by name."""
        of_states = {
            f"state.{number}.{i}": np.ascontiguousarray(array)
            for number, arrays in enumerate(self.states)
            for i, array in enumerate(arrays)
        }
        return of_states | {f"keys.{layer}": one for layer, one in self.keys.items()}

    def _hash_beside(self) -> str:
        """Returns one SHA-256 of the arrays that no page has."""
        digest = hashlib.sha256()
        for _, array in sorted(self._beside().items()):
            digest.update(np.ascontiguousarray(array).view(np.uint8).data)
        return digest.hexdigest()

    def _hashes(self) -> list[str]:
        """Returns the SHA-256 of each page: of its tokens, and of what it is in each layer."""
        size = self.origin.page_size
        by_token = self.origin.form == BY_TOKEN
        hashes = []
        for page in range(len(self.tokens) // size):
            own = np.array(self.tokens[page * size : (page + 1) * size], np.int32)
            digest = hashlib.sha256(own.tobytes())
            for layer, of_layer in sorted(self.layers.items()):
                start = page - self.firsts[layer] // size
                if start >= 0:
                    part = slice(start * size, (start + 1) * size) if by_token else start
                    for array in of_layer:
                        digest.update(np.ascontiguousarray(array[part]).view(np.uint8).data)
            hashes.append(digest.hexdigest())
        return hashes


def _appear(written: Path, path: Path) -> None:
    """Gives a complete file its name. Raises: FileExistsError if there is another of that name."""
    try:
        os.link(written, path)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))  # nobody else has the name then
        try:
            os.replace(written, path)
        except OSError:
            path.unlink(missing_ok=True)
            raise


def _in_order(found: Mapping[int, T]) -> tuple[T, ...]:
    """Returns what is numbered from 0 on. Raises: KeyError if a number is missing."""
    return tuple(found[number] for number in range(len(found)))


def _header(meta: Mapping[str, str], path: Path) -> dict[str, Any]:
    given = meta.get(KEY, "")
    digest, text = given[:64], given[64:]
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        raise SavedFileError(f"{path}: expected a header as its hash says, got another or none")
    try:
        header: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SavedFileError(f"{path}: expected a header in JSON, got {error}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise SavedFileError(f"{path}: expected a header of format {FORMAT}, got {text!r:.80}")
    return header


def fingerprint(parts: Sequence[bytes]) -> str:
    """Returns a short name of bytes, which others do not have."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8))
        digest.update(part)
    return digest.hexdigest()[:32]


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """Returns values as the model's dtype has them."""
    return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
