"""Converted checkpoints: the stacked weight tree as an orbax checkpoint, made once and read back
without any work.

A converted directory holds copies of the model's other files, `jaxkv.json` (format, dtype, spec,
the CRC-32 of each array, which loading compares, and how quantised ones are packed) and `orbax/`,
which orbax's v1 API loads too. Its arrays are stored uncompressed, whole and without OCDBT, so that
each is one plain file, and `load_converted` reads that file straight into the memory which the
device takes over. Through orbax it took five times as long and 1.4 times the memory
(docs/benchmarks/start.md).
"""

from __future__ import annotations

import glob
import json
import logging
import math
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.axes import Array
from jaxkv.errors import CheckpointError
from jaxkv.files import lock
from jaxkv.models.families import ConfigReader, Layout, read_config, read_family
from jaxkv.models.spec import ModelSpec
from jaxkv.placement import Placement
from jaxkv.weights.formats import KEPT
from jaxkv.weights.load import Kept, aligned_empty, load_weights, progress
from jaxkv.weights.packing import (
    FACTOR,
    INT4,
    METHODS,
    SCALES,
    TABLE,
    ZEROS,
    Packing,
    in_pairs,
)
from jaxkv.weights.tree import TreeLeaf, is_matrix, make_tree, tree_leaves

FORMAT = 14
"""To be raised with every change of the weight tree, of ModelSpec or of the header."""

HEADER = "jaxkv.json"
LOCK = "jaxkv.lock"
"""Is in a folder that is not finished, and locked as long as its process runs."""
ARRAYS = ("orbax", "weights")
COPIED = ("*.json", "*.jinja", "*.model", "*.txt")
ZARR_DTYPES = {"float32": "<f4", "bfloat16": "bfloat16"}
OTHER_DTYPES = {"float16": "<f2", "int8": "|i1", "uint8": "|u1", "int32": "<i4"}
"""What quantised matrices and tables are stored as beside those."""
PIECE = 2**23
"""Values that are read at once: what a conversion takes beside the weights."""


def convert(directory: Path, out: Path, *, dtype: str) -> int:
    """Stores the checkpoint in `directory` as `dtype` in the new directory `out`; returns the bytes
    of its weights.

    `out` appears complete, with every array read back and compared, or not at all.
    Raises: ValueError for a dtype other than float32 and bfloat16, CheckpointError for anything
    wrong with the checkpoint, FileExistsError if there is an `out`, FileNotFoundError without a
    folder for it, other kinds of OSError if it cannot be written.
    """
    out = out.absolute()
    if dtype not in ZARR_DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(ZARR_DTYPES)}, got {dtype!r}")
    _refuse_taken(out)
    if not out.parent.is_dir():
        raise FileNotFoundError(f"{out}: expected a folder {out.parent} to make it in; make it")
    if os.path.lexists(directory / HEADER):
        raise CheckpointError(
            f"{directory}: expected a checkpoint, got what `jaxkv convert` has made of one"
        )
    spec, layout = read_family(read_config(directory))
    kept = Kept(dtype=dtype, placement=Placement((jax.devices("cpu")[0],)))
    weights = load_weights(directory, spec, layout, kept)
    with _folder_beside(out) as folder:
        unfinished = folder / out.name
        unfinished.mkdir()
        for file in {
            file for pattern in COPIED for file in directory.glob(pattern) if file.is_file()
        }:
            if not file.name.endswith(".safetensors.index.json"):
                shutil.copyfile(file, unfinished / file.name)
        packings = _packings(weights)
        host = jax.tree.map(lambda x: _for_disk(np.asarray(x)), weights)
        sums = {path: zlib.crc32(x.view(np.uint8).data) for path, x in _by_path(host).items()}
        header = {"format": FORMAT, "dtype": dtype, "spec": _as_json(spec), "crc32": sums}
        header["packing"] = packings
        (unfinished / HEADER).write_text(json.dumps(header, indent=1))
        num_bytes = sum(x.nbytes for x in jax.tree.leaves(host))
        if (free := shutil.disk_usage(folder).free) < num_bytes:
            raise OSError(
                f"{out}: expected {num_bytes} bytes that are free for the weights, got {free}: "
                f"make room, or choose another disk"
            )
        _save(unfinished, host)
        _compare(unfinished, spec, layout, host)
        _refuse_taken(out)  # somebody else may have made it meanwhile
        unfinished.rename(out)
    return num_bytes


@contextmanager
def _folder_beside(out: Path) -> Iterator[Path]:
    """Makes a folder for what is not finished, and removes it at the end; before, what processes
    have left there that were killed.
    """
    for held in out.parent.glob(f".{glob.escape(out.name)}-*/{LOCK}"):
        with suppress(OSError), held.open("r+b") as file:  # another process may have it
            lock(file)
            shutil.rmtree(held.parent, ignore_errors=True)
    folder, is_done = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent)), False
    try:
        with (folder / "unlocked").open("xb") as file:  # which nobody removes
            with suppress(OSError):  # where files cannot be locked, what is left stays
                lock(file)
                os.rename(file.name, folder / LOCK)
            yield folder
        is_done = True
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        # After an error threads of orbax may be writing there still, which makes it anew.
        times_gone = 0
        for _ in range(0 if is_done else 100):
            time.sleep(0.1)
            times_gone = 0 if folder.exists() else times_gone + 1
            if times_gone == 5:
                break
            shutil.rmtree(folder, ignore_errors=True)


def _refuse_taken(out: Path) -> None:
    if os.path.lexists(out):
        raise FileExistsError(
            f"{out}: expected nothing there yet; choose another name or remove it"
        )


def stored_dtype(directory: Path, spec: ModelSpec) -> str | None:
    """Returns the dtype of a converted directory's weights; None for any other directory.

    Raises: CheckpointError for a header of another format, or one that disagrees with `spec`, read
    from config.json.
    """
    if not os.path.lexists(directory / HEADER):
        return None
    header = read_config(directory, HEADER)
    if header.get("format") != FORMAT:
        raise header.fail(
            "format", f"{FORMAT} (convert the model again with this version of jaxkv)"
        )
    if header.get("dtype") not in list(ZARR_DTYPES):
        raise header.fail("dtype", f"one of {', '.join(ZARR_DTYPES)}")
    stored, expected = header.section("spec").values, _as_json(spec)
    if differing := sorted(
        key for key in stored.keys() | expected if stored.get(key) != expected.get(key)
    ):
        raise CheckpointError(
            f"{header.where}: spec: expected what config.json says, got another "
            f"{', '.join(differing)[:200]}; convert the model again, from a config.json that says "
            f"what hf_overrides would"
        )
    return header.values["dtype"]


def load_converted(directory: Path, spec: ModelSpec, layout: Layout, kept: Kept) -> dict[str, Any]:
    """Loads from a converted directory what `load_weights` gives; a dtype other than the stored one
    is converted.

    Raises: CheckpointError naming every missing, unexpected or misshapen array, before anything is
    allocated; naming the first array that is not the one that was stored, where anybody looks.
    """
    arrays = _locate(directory, spec, layout)
    sums = read_config(directory, HEADER).section("crc32")
    if kept.quantization is not None and any(len(parts) > 1 for _, parts in arrays):
        raise ValueError(
            f"quantization: expected None for weights that are stored quantised ({directory}), got "
            f"{kept.quantization!r}"
        )

    def pieces(part: _Stored, shape: tuple[int, ...], dtype: np.dtype) -> Iterator[np.ndarray]:
        """Reads an array in pieces of this shape, and compares its CRC-32 behind the last."""
        one, crc32, size = replace(part, shape=shape), 0, math.prod(shape)
        with part.file.open("rb") as stream:
            for _ in range(math.prod(part.shape) // size):
                host, crc32 = _read(stream, one, dtype, kept.check, crc32)
                told(size)
                yield host
        if kept.check and crc32 != sums.values.get(part.path):
            raise CheckpointError(
                f"{part.file}: expected the CRC-32 {sums.values.get(part.path)!r:.80} of "
                f"{sums.where}, got {crc32}: one of the two has changed since; convert the model "
                f'again, or load_format="unchecked" to compute with it all the same'
            )

    def read(part: _Stored, dtype: np.dtype) -> np.ndarray:
        (host,) = pieces(part, part.shape, dtype)
        return host

    def load(leaf: TreeLeaf, parts: dict[str, _Stored]) -> dict[str, Array]:
        if len(parts) > 1:
            return kept.put_packed({end: read(x, x.dtype) for end, x in parts.items()}, leaf)
        if (packing := kept.packing(leaf)) is not None:
            # All of them in float32 at once would take twice what is stored in bfloat16.
            matrices = pieces(parts[""], leaf.shape[-2:], np.dtype(np.float32))
            return kept.put_packed(kept.quantised(matrices, leaf.shape, packing), leaf)
        return kept.put(read(parts[""], leaf.kept_as(kept.dtype)), leaf)

    with progress([leaf for leaf, _ in arrays], jnp.dtype(kept.dtype)) as told:
        return make_tree((leaf, load(leaf, parts)) for leaf, parts in arrays)


@dataclass(frozen=True, slots=True)
class _Stored:
    """Says where an array lies, and what it is: two values of 4 bits share a byte, and 8-bit
    floats are stored as their bits.
    """

    path: str
    file: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def on_disk(self) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Returns shape and dtype of the file."""
        if self.dtype == INT4:
            return (*self.shape[:-1], self.shape[-1] // 2), np.dtype(np.uint8)
        is_float8 = self.dtype.itemsize == 1 and self.dtype != np.int8
        return self.shape, np.dtype(np.uint8) if is_float8 else self.dtype


def _for_disk(x: np.ndarray) -> np.ndarray:
    """Returns what is stored of an array."""
    if x.dtype == INT4:
        return in_pairs(x)
    return x.view(np.uint8) if x.dtype.itemsize == 1 and x.dtype != np.int8 else x


def _packings(weights: dict[str, Any]) -> dict[str, Any]:
    """Returns what the quantised leaves are kept in, by their paths as in `TreeLeaf.path`."""
    arrays, found = _by_path(weights), {}
    for path in (path.removesuffix(SCALES) for path in arrays if path.endswith(SCALES)):
        values, scales = arrays[path], arrays[path + SCALES]
        dtype, width = ("int4", 2) if values.dtype == np.uint8 else (values.dtype.name, 1)
        found[path] = {
            "dtype": dtype,
            "group": width * values.shape[-1] if values.shape[-3] > 1 else 0,
            "scales": scales.dtype.name,
            "has_zeros": path + ZEROS in arrays,
            "has_table": path + TABLE in arrays,
            "has_factor": path + FACTOR in arrays,
        }
    return found


def _read_packings(header: ConfigReader) -> dict[str, Packing]:
    found, given = {}, header.section("packing")
    for path in given.values:
        one = given.section(path)
        dtype = one.choice("dtype", None, [kind.name for kind in METHODS.values()])
        scales = one.choice("scales", None, [kind.name for kind in KEPT])
        group = 0 if one.get("group") == 0 else one.size("group")
        has = {key: one.flag(key, False) for key in ("has_zeros", "has_table", "has_factor")}
        found[path] = Packing(jnp.dtype(dtype), group, jnp.dtype(scales), **has)
    return found


def _as_json(spec: ModelSpec) -> dict[str, Any]:
    """Returns the spec as JSON gives it back: tuples are lists. What is stored depends on no codec
    of a KV cache.
    """
    return json.loads(json.dumps(asdict(spec.joined())))


def _save(directory: Path, weights: dict[str, Any]) -> None:
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    saving = context.array.saving
    saving.use_ocdbt = saving.use_zarr3 = saving.use_compression = False
    # Nothing here limits the size of a file: an array is never split.
    saving.ocdbt_target_data_file_size = 0
    context.memory.deepcopy_host_arrays = False
    log = logging.getLogger("absl")
    level = log.level
    # Orbax warns after every save without OCDBT that it found nothing of OCDBT to merge. It shows
    # the traceback of each thread that fails, and what they raise comes here all the same.
    log.setLevel(logging.CRITICAL)
    try:
        with context:
            ocp.save(directory / ARRAYS[0], weights, checkpointable_name=ARRAYS[1])
    except ValueError as error:  # which tensorstore raises for a disk that has become full
        raise OSError(f"expected arrays that can be written, got {error}") from error
    finally:
        log.setLevel(level)


def _by_path(weights: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns the arrays by their paths as in `TreeLeaf.path`."""
    leaves = jax.tree_util.tree_leaves_with_path(weights)
    return {".".join(key.key for key in path): x for path, x in leaves}


def _compare(directory: Path, spec: ModelSpec, layout: Layout, weights: dict[str, Any]) -> None:
    parts = [part for _, of_leaf in _locate(directory, spec, layout) for part in of_leaf.values()]
    written = _by_path(weights)
    found = {part.path for part in parts}
    if found != written.keys():
        raise CheckpointError(
            f"{directory}: expected the arrays {sorted(written)}, got {sorted(found)}"
        )
    for part in parts:
        with part.file.open("rb") as stream:
            got, _ = _read(stream, part, part.dtype, check=False)
        if not np.array_equal(_for_disk(got).view(np.uint8), written[part.path].view(np.uint8)):
            raise CheckpointError(f"{part.file}: expected the values that were written, got others")


def _locate(
    directory: Path, spec: ModelSpec, layout: Layout
) -> list[tuple[TreeLeaf, dict[str, _Stored]]]:
    """Returns each leaf that is there with its arrays by what follows its name, all checked."""
    dtype = stored_dtype(directory, spec)
    if dtype is None:
        raise CheckpointError(
            f"{directory / HEADER}: not found; expected a directory made by `jaxkv convert`"
        )
    packings = _read_packings(read_config(directory, HEADER))
    leaves = tree_leaves(spec, layout)
    folder = directory.joinpath(*ARRAYS)
    found = {path.name for path in folder.iterdir() if path.is_dir()} if folder.is_dir() else set()
    arrays, problems, known = [], [], set[str]()
    for leaf in leaves:
        packing = packings.get(leaf.path)
        if packing is not None and (not is_matrix(leaf) or leaf.shape[-1] % (packing.group or 1)):
            problems.append(f"{leaf.path}: expected a matrix of groups of {packing.group} columns")
            continue
        plain = {"": (leaf.shape, leaf.kept_as(dtype))}
        parts = {
            suffix: _Stored(
                leaf.path + suffix,
                folder / (leaf.path + suffix) / ".".join("0" * len(shape)),
                shape,
                kind,
            )
            for suffix, (shape, kind) in (packing.arrays(leaf.shape) if packing else plain).items()
        }
        known |= {part.path for part in parts.values()}
        missing = [part.path for part in parts.values() if part.path not in found]
        if not missing:
            arrays.append((leaf, parts))
            problems += [problem for part in parts.values() for problem in _problems(part)]
        elif leaf.one.same_as is None:
            problems += [f"missing array {path}" for path in missing]
    problems += [f"array that {spec.family} does not use: {name}" for name in sorted(found - known)]
    if problems:
        raise CheckpointError.of(folder, problems, "convert the checkpoint again")
    return arrays


def _problems(part: _Stored) -> list[str]:
    """Lists what is wrong with an array's metadata and file; its one chunk is the whole array."""
    name, (shape, dtype) = part.path, part.on_disk
    file = part.file
    if not file.is_file() or not (file.parent / ".zarray").is_file():
        return [f"{name}: expected the files .zarray and {file.name}"]
    expected = {
        "zarr_format": 2,
        "shape": [*shape],
        "chunks": [*shape],
        "dtype": (ZARR_DTYPES | OTHER_DTYPES)[dtype.name],
        "order": "C",
        "compressor": None,
        "filters": None,
        "dimension_separator": ".",
    }
    metadata = read_config(file.parent, ".zarray").values
    problems = [
        f"{name}: {key}: expected {value}, got {str(metadata.get(key))[:80]}"
        for key, value in expected.items()
        if metadata.get(key) != value
    ]
    nbytes = math.prod(shape) * dtype.itemsize
    if (size := file.stat().st_size) != nbytes:
        problems.append(f"{name}: {file.name}: expected {nbytes} bytes, got {size}")
    return problems


def _read(
    stream: BufferedReader, part: _Stored, dtype: np.dtype, check: bool, crc32: int = 0
) -> tuple[np.ndarray, int]:
    """Reads the next values of the file in one host array, converted piece by piece from another
    dtype, those of 4 bits in pairs. Returns it with the CRC-32 of what was read behind what has
    `crc32`, which is not looked at without `check`.

    Raises: CheckpointError for a file that ends before.
    """
    shape, stored = part.on_disk
    is_same = part.dtype == dtype
    host = aligned_empty(shape, stored if is_same else dtype)
    flat = host.reshape(-1)
    for start in range(0, flat.size, PIECE):
        piece = flat[start : start + PIECE]
        raw = piece if is_same else np.empty(piece.shape, stored)
        if stream.readinto(raw.view(np.uint8).data) != raw.nbytes:
            raise CheckpointError(
                f"{stream.name}: expected {raw.nbytes} more bytes, got its end: it was changed"
            )
        if check:
            crc32 = zlib.crc32(raw.view(np.uint8).data, crc32)
        if raw is not piece:
            piece[...] = raw
    return host.view(part.dtype) if is_same and part.dtype != INT4 else host, crc32
