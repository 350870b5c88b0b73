"""Reads safetensors checkpoints straight from the page cache and trusts nothing that a file says.

A file is a little-endian u64 header length, a JSON header and one byte buffer that the tensors fill
exactly. Every claim of a header is checked against the size of its file before a tensor is mapped.
Source: github.com/huggingface/safetensors, section "Format".
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import reprlib
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import ml_dtypes
import numpy as np
import numpy.typing as npt

from jaxkv.errors import NO_GGUF, CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
IN_MEMORY = Path("arrays in memory")
"""Stands for the directory of tensors that are in no file."""

Maps = dict[Path, mmap.mmap | memoryview | jax.Array]
MAX_JSON_BYTES = 100_000_000
MAX_TENSORS = 2**20
MAX_RANK = 8
MAX_SIZE = 2**63 - 1

# F4 and F6 are missing on purpose: the format packs them below one byte per value, numpy cannot
# view that.
DTYPES: Mapping[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype(np.bool_),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}

_REFETCH = "copy or download the checkpoint again"
_RESAVE = "write the file again with save_file of the safetensors package"
_CONVERT = (
    "pickle is never loaded because it can run code; where you trust it, convert it once with "
    "transformers' "
    "model.save_pretrained(directory, safe_serialization=True) or safetensors.torch.save_file"
)
_SHARD_NAME = re.compile(r"\w[\w .,()=@+-]{0,200}\.safetensors")
_short = reprlib.Repr()
_short.maxstring = 160
_short.maxlist = 10
_show = _short.repr


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """Says where one tensor lies: `nbytes` bytes from byte `start` of `file`, checked to be inside
    it.
    """

    name: str
    file: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    nbytes: int


class Checkpoint:
    """The tensors of a directory by name, as views on read-only mappings that this object owns.

    A view stays valid for as long as it lives, also after `close`. As with any mapping, a file that
    another process shortens meanwhile ends this one (SIGBUS).
    """

    def __init__(self, directory: Path, entries: dict[str, TensorEntry], maps: Maps) -> None:
        self.directory = directory
        self.entries: Mapping[str, TensorEntry] = MappingProxyType(entries)
        self._maps = maps

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> Checkpoint:
        """Maps the index's shards, or model.safetensors, or the only *.safetensors file; reads
        headers, no weights.

        Raises: CheckpointError naming file, tensor, expected and got.
        """
        directory = Path(directory)
        index = directory / INDEX_NAME
        weight_map = _read_index(index) if os.path.lexists(index) else None
        names = (
            [_single_name(directory)] if weight_map is None else sorted(set(weight_map.values()))
        )
        entries: dict[str, TensorEntry] = {}
        maps: Maps = {}
        for file in (directory / name for name in names):
            shard, maps[file] = _open_file(file)
            for entry in shard:
                if (other := entries.setdefault(entry.name, entry)) is not entry:
                    raise _wrong(
                        file, "no other shard to hold it", f"{other.file.name} too", name=entry.name
                    )
        return cls(directory, entries, maps)

    @classmethod
    def open_file(cls, file: Path) -> Checkpoint:
        """Maps one file. Raises: CheckpointError as `open` does."""
        entries, mapping = _open_file(file)
        return cls(file.parent, {entry.name: entry for entry in entries}, {file: mapping})

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, npt.NDArray[Any] | jax.Array]) -> Checkpoint:
        """Makes a checkpoint of arrays: those of numpy are read without a copy, those of jax stay
        on their devices until they are read.
        """
        entries: dict[str, TensorEntry] = {}
        maps: Maps = {}
        for name, array in arrays.items():
            file = IN_MEMORY / name
            if isinstance(array, jax.Array):
                maps[file] = array
            else:
                maps[file] = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            entries[name] = TensorEntry(
                name=name,
                file=file,
                dtype=array.dtype,
                shape=array.shape,
                start=0,
                nbytes=array.nbytes,
            )
        return cls(IN_MEMORY, entries, maps)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.entries)

    def renamed(self, rename: Callable[[str], str | None]) -> Checkpoint:
        """Returns the same tensors under other names, without those for which there is None.

        Raises: CheckpointError if two have one name.
        """
        entries: dict[str, TensorEntry] = {}
        for name, entry in self.entries.items():
            if (new := rename(name)) is not None and entries.setdefault(new, entry) is not entry:
                raise _wrong(entry.file, f"one tensor to be {new}", entries[new].name, name=name)
        return Checkpoint(self.directory, entries, self._maps)

    def with_arrays(self, arrays: Mapping[str, npt.NDArray[Any]]) -> Checkpoint:
        """Returns the same tensors, with these in the place of those of their names."""
        other = Checkpoint.of_arrays(arrays)
        entries, maps = {**self.entries, **other.entries}, {**self._maps, **other._maps}
        return Checkpoint(self.directory, entries, maps)

    def loaded(self) -> Checkpoint:
        """Returns the same tensors with their files in memory, which end nothing when another
        process shortens them. Raises: CheckpointError if one is shorter by now.
        """
        maps: Maps = {}
        for file, mapping in self._maps.items():
            with file.open("rb") as stream:
                whole = stream.read(len(mapping))
            if len(whole) != len(mapping):
                raise _wrong(file, f"{len(mapping)} bytes", f"{len(whole)}, as it changes")
            maps[file] = memoryview(whole)
        return Checkpoint(self.directory, dict(self.entries), maps)

    def read(self, name: str) -> npt.NDArray[Any]:
        """Reads the tensor as a read-only, zero-copy view; an offset that the dtype does not divide
        gives an unaligned one.

        Raises: CheckpointError if there is no such tensor, ValueError after `close`.
        """
        entry, mapping = self._locate(name)
        if isinstance(mapping, jax.Array):
            return in_host_memory(mapping)
        flat = np.frombuffer(
            mapping, dtype=entry.dtype, count=math.prod(entry.shape), offset=entry.start
        )
        return flat.reshape(entry.shape)

    def on_devices(self, name: str) -> jax.Array | None:
        """Returns the tensor if it is an array of jax. Raises: as `read`."""
        _, mapping = self._locate(name)
        return mapping if isinstance(mapping, jax.Array) else None

    def release(self, name: str) -> None:
        """Takes the tensor's pages out of this process; a view still alive reads them again from
        the page cache.

        So the pages at both ends, shared with neighbours, go too. Does nothing where the system is
        not Linux.
        """
        entry, mapping = self._locate(name)
        if sys.platform == "linux" and entry.nbytes and isinstance(mapping, mmap.mmap):
            first = entry.start // mmap.PAGESIZE * mmap.PAGESIZE
            mapping.madvise(mmap.MADV_DONTNEED, first, entry.start + entry.nbytes - first)

    def close(self) -> None:
        """Lets go of the mappings; one that views still use is unmapped when the last of them
        dies.
        """
        self._maps.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _locate(self, name: str) -> tuple[TensorEntry, mmap.mmap | memoryview | jax.Array]:
        entry = self.entries.get(name)
        if entry is None:
            raise _wrong(
                self.directory,
                f"a name among its {len(self.entries)} tensors",
                repr(name),
                "see `names`",
            )
        if entry.file not in self._maps:
            raise ValueError(
                f"{self.directory}: the checkpoint is closed; read tensors before close()"
            )
        return entry, self._maps[entry.file]


def in_host_memory(x: jax.Array) -> npt.NDArray[Any]:
    """Reads an array in host memory, which is where a CPU has it. Of others a copy is read: what
    jax brings to host memory lives as long as the array that it is of.
    """
    is_there = all(device.platform == "cpu" for device in x.devices())
    return np.asarray(x if is_there else x.copy())


def _wrong(
    file: Path, expected: str, got: str, advice: str = _REFETCH, *, name: str | None = None
) -> CheckpointError:
    tensor = "" if name is None else f"tensor {_show(name)}: "
    return CheckpointError(f"{file}: {tensor}expected {expected}, got {got}; {advice}")


def _single_name(directory: Path) -> str:
    if not directory.is_dir():
        raise _wrong(directory, f"a directory with {SINGLE_NAME}", "none", "check the path")
    if os.path.lexists(directory / SINGLE_NAME):
        return SINGLE_NAME
    files = sorted(path.name for path in directory.iterdir())
    found = [name for name in files if name.endswith(".safetensors")]
    if len(found) == 1:
        return found[0]
    expected = f"{INDEX_NAME}, {SINGLE_NAME} or exactly one *.safetensors"
    for ends, advice in (((".bin", ".pt", ".pth"), _CONVERT), ((".gguf",), NO_GGUF)):
        others = [name for name in files if name.endswith(ends)]
        if others and not found:
            raise _wrong(directory, expected, _show(others), advice)
    raise _wrong(directory, expected, _show(found))


def _check_regular(file: Path) -> None:
    if not os.path.isfile(file):
        raise _wrong(file, "a regular file", "none (missing or a broken link)")


def _load_object(file: Path, raw: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_reject_duplicates)
    except (ValueError, RecursionError) as error:
        raise _wrong(
            file, f"{what} in UTF-8 JSON without duplicate keys", f"an error: {error}"
        ) from error
    if not isinstance(value, dict):
        raise _wrong(file, f"{what} to be a JSON object", _show(value))
    return value


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        key, count = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"key {_show(key)} occurs {count} times")
    return unique


def _read_index(index: Path) -> dict[str, str]:
    _check_regular(index)
    if (size := index.stat().st_size) > MAX_JSON_BYTES:
        raise _wrong(index, f"at most {MAX_JSON_BYTES} bytes", str(size))
    weight_map = _load_object(index, index.read_bytes(), "the index").get("weight_map")
    if not isinstance(weight_map, dict) or not 0 < len(weight_map) <= MAX_TENSORS:
        raise _wrong(index, f"weight_map with 1 to {MAX_TENSORS} tensors", _show(weight_map))
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _SHARD_NAME.fullmatch(shard):
            expected = "the plain name of a .safetensors file beside the index"
            raise _wrong(
                index,
                expected,
                _show(shard),
                "do not load it unless you know who wrote it",
                name=name,
            )
    return weight_map


def _open_file(file: Path) -> tuple[list[TensorEntry], mmap.mmap]:
    _check_regular(file)
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size < 8:
            raise _wrong(file, "at least 8 bytes", f"a truncated file of {size}")
        first = stream.read(8)
        if first == b"version ":
            raise _wrong(file, "a safetensors file", "a pointer of Git LFS", "run git lfs pull")
        header_bytes = int.from_bytes(first, "little")
        if header_bytes > MAX_JSON_BYTES:
            raise _wrong(
                file,
                f"a header of at most {MAX_JSON_BYTES} bytes",
                f"{header_bytes} (another format?)",
            )
        if 8 + header_bytes > size:
            raise _wrong(file, f"a header of {header_bytes} bytes", f"a truncated file of {size}")
        header = _load_object(file, stream.read(header_bytes), "the header")
        entries = _parse_header(file, header, 8 + header_bytes, size)
        return entries, mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_READ)


def _parse_header(
    file: Path, header: dict[str, Any], data_start: int, size: int
) -> list[TensorEntry]:
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise _wrong(file, "__metadata__ to map strings to strings", _show(metadata), _RESAVE)
    if len(header) > MAX_TENSORS:
        raise _wrong(file, f"at most {MAX_TENSORS} tensors", str(len(header)), _RESAVE)
    entries = [_parse_entry(file, name, value, data_start, size) for name, value in header.items()]
    end = data_start
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.nbytes)):
        if entry.start != end:
            problem = "overlap" if entry.start < end else "hole"
            raise _wrong(
                file,
                f"its first byte at {end}",
                f"{entry.start} ({problem})",
                _RESAVE,
                name=entry.name,
            )
        end += entry.nbytes
    if end != size:
        raise _wrong(file, f"{end} bytes", f"{size - end} trailing bytes after them", _RESAVE)
    return entries


def _parse_entry(file: Path, name: str, value: Any, data_start: int, size: int) -> TensorEntry:
    def wrong(expected: str, got: object) -> CheckpointError:
        return _wrong(file, expected, _show(got), _RESAVE, name=name)

    if not isinstance(value, dict) or not value.keys() >= {"dtype", "shape", "data_offsets"}:
        raise wrong("an object with dtype, shape and data_offsets", value)
    dtype_name, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype_name, str) or dtype_name not in DTYPES:
        raise wrong(f"a dtype of {', '.join(DTYPES)}", dtype_name)
    if not _are_sizes(shape) or len(shape) > MAX_RANK:
        raise wrong(f"a shape of at most {MAX_RANK} non-negative integers", shape)
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise wrong("data_offsets of two non-negative integers, begin <= end", offsets)
    dtype, (begin, end) = DTYPES[dtype_name], offsets
    # max: numpy refuses a shape such as (0, 2**62, 2**62) although it holds nothing.
    if math.prod(max(dim, 1) for dim in shape) * dtype.itemsize > MAX_SIZE:
        raise wrong(f"a shape of at most {MAX_SIZE} bytes", shape)
    nbytes = math.prod(shape) * dtype.itemsize
    if end - begin != nbytes:
        raise wrong(f"data_offsets {nbytes} bytes apart for {dtype_name} {shape}", offsets)
    if data_start + end > size:
        raise _wrong(
            file, f"data up to byte {data_start + end}", f"a truncated file of {size}", name=name
        )
    return TensorEntry(
        name=name,
        file=file,
        dtype=dtype,
        shape=tuple(shape),
        start=data_start + begin,
        nbytes=nbytes,
    )


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item <= MAX_SIZE for item in value
    )
