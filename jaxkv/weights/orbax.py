"""Converted checkpoints: the stacked weight tree as an orbax checkpoint, made once and read back
without any work.

A converted directory holds copies of the model's other files, `jaxkv.json` (format, dtype, spec,
and the CRC-32 of each array, which loading compares) and `orbax/`, which orbax's v1 API loads too.
Its arrays are stored uncompressed, whole and without OCDBT, so that each is one plain file, and
`load_converted` reads that file straight into the memory which the device takes over. Through
orbax it took five times as long and 1.4 times the memory (docs/benchmarks/start.md).
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import tempfile
import zlib
from dataclasses import asdict
from io import BufferedReader
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.axes import Array
from jaxkv.errors import CheckpointError
from jaxkv.models.families import Layout, read_config, read_family
from jaxkv.models.spec import ModelSpec
from jaxkv.placement import Placement
from jaxkv.weights.load import aligned_empty, load_weights, put
from jaxkv.weights.tree import TreeLeaf, make_tree, tree_leaves

FORMAT = 2
"""To be raised with every change of the weight tree, of ModelSpec or of the header."""

HEADER = "jaxkv.json"
ARRAYS = ("orbax", "weights")
COPIED = ("*.json", "*.jinja", "*.model", "*.txt")
ZARR_DTYPES = {"float32": "<f4", "bfloat16": "bfloat16"}
PIECE = 2**23
"""Values that are read at once: what a conversion takes beside the weights."""


def convert(directory: Path, out: Path, *, dtype: str) -> int:
    """Stores the checkpoint in `directory` as `dtype` in the new directory `out`; returns the bytes
    of its weights.

    `out` appears complete, with every array read back and compared, or not at all.
    Raises: ValueError for a dtype other than float32 and bfloat16, CheckpointError for anything
    wrong with the checkpoint, FileExistsError if there is an `out`, OSError if it cannot be
    written.
    """
    out = out.absolute()
    if dtype not in ZARR_DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(ZARR_DTYPES)}, got {dtype!r}")
    if os.path.lexists(out):
        raise FileExistsError(
            f"{out}: expected nothing there yet; choose another name or remove it"
        )
    spec, layout = read_family(read_config(directory))
    weights = load_weights(
        directory, spec, layout, dtype=dtype, placement=Placement((jax.devices("cpu")[0],))
    )
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as folder:
        unfinished = Path(folder) / out.name
        unfinished.mkdir()
        for file in {
            file for pattern in COPIED for file in directory.glob(pattern) if file.is_file()
        }:
            if not file.name.endswith(".safetensors.index.json"):
                shutil.copyfile(file, unfinished / file.name)
        host = jax.tree.map(np.asarray, weights)
        sums = {path: zlib.crc32(x.view(np.uint8).data) for path, x in _by_path(host).items()}
        header = {"format": FORMAT, "dtype": dtype, "spec": _as_json(spec), "crc32": sums}
        (unfinished / HEADER).write_text(json.dumps(header, indent=1))
        _save(unfinished, host)
        _compare(unfinished, spec, layout, host)
        unfinished.rename(out)
    return sum(x.nbytes for x in jax.tree.leaves(host))


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
            f"{', '.join(differing)[:200]}"
        )
    return header.values["dtype"]


def load_converted(
    directory: Path,
    spec: ModelSpec,
    layout: Layout,
    *,
    dtype: str,
    as_bits: bool = False,
    placement: Placement | None = None,
    check: bool = True,
) -> dict[str, Any]:
    """Loads from a converted directory what `load_weights` gives; a dtype other than the stored one
    is converted.

    Raises: CheckpointError naming every missing, unexpected or misshapen array, before anything is
    allocated; naming the first array that is not the one that was stored, unless `check` is False.
    """
    stored, arrays = _locate(directory, spec, layout)
    sums = read_config(directory, HEADER).section("crc32")

    def load(leaf: TreeLeaf, file: Path) -> Array:
        with file.open("rb") as stream:
            host, crc32 = _read(stream, leaf.shape, stored, jnp.dtype(dtype), check)
        if check and crc32 != sums.values.get(leaf.path):
            raise CheckpointError(
                f"{file}: expected the CRC-32 {sums.values.get(leaf.path)!r:.80} of "
                f"{sums.where}, got {crc32}: one of the two has changed since; convert the model "
                f'again, or load_format="unchecked" to compute with it all the same'
            )
        return put(host.view(np.uint16) if as_bits else host, leaf.name, placement)

    return make_tree((leaf, load(leaf, file)) for leaf, file in arrays)


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
    # Orbax warns after every save without OCDBT that it found nothing of OCDBT to merge.
    log.setLevel(logging.ERROR)
    try:
        with context:
            ocp.save(directory / ARRAYS[0], weights, checkpointable_name=ARRAYS[1])
    finally:
        log.setLevel(level)


def _by_path(weights: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns the arrays by their paths as in `TreeLeaf.path`."""
    leaves = jax.tree_util.tree_leaves_with_path(weights)
    return {".".join(key.key for key in path): x for path, x in leaves}


def _compare(directory: Path, spec: ModelSpec, layout: Layout, weights: dict[str, Any]) -> None:
    stored, arrays = _locate(directory, spec, layout)
    written = _by_path(weights)
    found = {leaf.path for leaf, _ in arrays}
    if found != written.keys():
        raise CheckpointError(
            f"{directory}: expected the arrays {sorted(written)}, got {sorted(found)}"
        )
    for leaf, file in arrays:
        with file.open("rb") as stream:
            got, _ = _read(stream, leaf.shape, stored, stored, check=False)
        bits = np.dtype(f"u{stored.itemsize}")
        if not np.array_equal(got.view(bits), written[leaf.path].view(bits)):
            raise CheckpointError(f"{file}: expected the values that were written, got others")


def _locate(
    directory: Path, spec: ModelSpec, layout: Layout
) -> tuple[np.dtype, list[tuple[TreeLeaf, Path]]]:
    """Returns the stored dtype, and each leaf that is there with its file, all checked."""
    dtype = stored_dtype(directory, spec)
    if dtype is None:
        raise CheckpointError(
            f"{directory / HEADER}: not found; expected a directory made by `jaxkv convert`"
        )
    leaves = tree_leaves(spec, layout)
    folder = directory.joinpath(*ARRAYS)
    found = {path.name for path in folder.iterdir() if path.is_dir()} if folder.is_dir() else set()
    problems = [
        f"missing array {leaf.path}"
        for leaf in leaves
        if leaf.path not in found and leaf.one.same_as is None
    ]
    problems += [
        f"array that {spec.family} does not use: {name}"
        for name in sorted(found - {leaf.path for leaf in leaves})
    ]
    arrays = []
    for leaf in leaves:
        if leaf.path in found:
            file = folder / leaf.path / ".".join("0" * len(leaf.shape))
            arrays.append((leaf, file))
            problems += _problems(file, leaf.shape, dtype)
    if problems:
        shown = "; ".join(problems[:10]) + (
            f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
        )
        raise CheckpointError(f"{folder}: {shown}")
    return jnp.dtype(dtype), arrays


def _problems(file: Path, shape: tuple[int, ...], dtype: str) -> list[str]:
    """Lists what is wrong with an array's metadata and file; its one chunk is the whole array."""
    name = file.parent.name
    if not file.is_file() or not (file.parent / ".zarray").is_file():
        return [f"{name}: expected the files .zarray and {file.name}"]
    expected = {
        "zarr_format": 2,
        "shape": [*shape],
        "chunks": [*shape],
        "dtype": ZARR_DTYPES[dtype],
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
    nbytes = math.prod(shape) * jnp.dtype(dtype).itemsize
    if (size := file.stat().st_size) != nbytes:
        problems.append(f"{name}: {file.name}: expected {nbytes} bytes, got {size}")
    return problems


def _read(
    stream: BufferedReader, shape: tuple[int, ...], stored: np.dtype, dtype: np.dtype, check: bool
) -> tuple[np.ndarray, int]:
    """Reads the next values of the file in one host array of `shape`, converted piece by piece from
    another dtype. Returns it with the CRC-32 of what was read, 0 without `check`.

    Raises: CheckpointError for a file that ends before.
    """
    host, crc32 = aligned_empty(shape, dtype), 0
    flat = host.reshape(-1)
    for start in range(0, flat.size, PIECE):
        part = flat[start : start + PIECE]
        raw = part if stored == dtype else np.empty(part.shape, stored)
        if stream.readinto(raw.view(np.uint8).data) != raw.nbytes:
            raise CheckpointError(
                f"{stream.name}: expected {raw.nbytes} more bytes, got its end: it was changed"
            )
        if check:
            crc32 = zlib.crc32(raw.view(np.uint8).data, crc32)
        if raw is not part:
            part[...] = raw
    return host, crc32
