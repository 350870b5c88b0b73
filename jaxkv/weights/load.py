"""Brings a checkpoint's tensors to the weight tree on the device, without holding the checkpoint
twice.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxkv.axes import Array, ArrayInfo
from jaxkv.config import bfloat16_as_bits
from jaxkv.errors import CheckpointError
from jaxkv.models.families import Layout, Leaf
from jaxkv.models.families.base import Part
from jaxkv.models.families.experts import in_other_form
from jaxkv.models.spec import ModelSpec
from jaxkv.ops.matrices import values
from jaxkv.placement import Placement
from jaxkv.processes import to_devices
from jaxkv.weights.packing import (
    INT4,
    ZEROS,
    Packing,
    Quantise,
    from_pairs,
    in_pairs,
    needs_a_program,
    packing_for,
)
from jaxkv.weights.quantised import Dequantised
from jaxkv.weights.safetensors import Checkpoint
from jaxkv.weights.tree import HEAD, TreeLeaf, is_matrix, make_tree, tree_leaves

Tensors = Checkpoint | Dequantised
Fill = Callable[..., tuple[Array, Array]]
"""`programs.filling.fill`."""

Told = Callable[[int], object]
"""Takes how many values more have been read."""

FLOATS = ("float32", "bfloat16", "float16", "float64")
INTEGERS = ("int32", "int64")
READERS = 4
"""Tensors of one leaf that are read at a time, each of which a quantised checkpoint may have to
compute.
"""

CHECKED = 2**18
"""Values that are converted and looked at together, so that they are still in the processor's
cache.
"""

TURNED = 64
"""Rows of a matrix stored transposed that are read together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Says how weights are kept: on the devices of `placement` as `dtype` (`TreeLeaf.kept_as`),
    bfloat16 as raw uint16 bits if `as_bits`. Matrices that are not stored quantised are quantised
    by the method `quantization` (`packing.METHODS`), which `quantise` does. Without `check` nobody
    looks at the values. `fill` puts arrays of devices in their place; without it they are read in
    host memory.
    """

    dtype: str
    as_bits: bool = False
    placement: Placement | None = None
    check: bool = True
    quantization: str | None = None
    quantise: Quantise = needs_a_program
    fill: Fill | None = None

    @property
    def placed(self) -> Placement:
        """Returns the placement, that on the default device where there is none."""
        return self.placement or Placement((jax.devices()[0],))

    def packing(self, leaf: TreeLeaf) -> Packing | None:
        """Returns what a leaf is quantised to that is not stored so; None where it is not."""
        if self.quantization is None or not is_matrix(leaf):
            return None
        parts = self.num_parts(leaf)
        return packing_for(self.quantization, leaf.shape[-1], parts, dtype=self.dtype)

    def num_parts(self, leaf: TreeLeaf) -> int:
        """Returns into how many parts the columns of a matrix are divided."""
        return self.placed.num_parts_of_columns(leaf.path)

    def put(self, host: np.ndarray, leaf: TreeLeaf) -> dict[str, Array]:
        """Puts a leaf that is not kept quantised on its devices."""
        is_short = host.dtype.itemsize == 2
        host = host.view(np.uint16) if self.as_bits and is_short else host
        return {"": put(host, leaf.path, self.placement)}

    def filled(
        self, leaf: TreeLeaf, given: Sequence[jax.Array], part: Part | None = None
    ) -> dict[str, Array] | None:
        """Makes a leaf of floats that is not kept quantised of arrays on devices, or of that part
        of each: one after the other, so that no more than one has a copy meanwhile. None where they
        are not in the order of the leaf's first axes, or a value is not finite.
        """
        shape = leaf.shape
        counts = (math.prod(shape[:front]) for front in range(len(shape) + 1))
        front = next((i for i, count in enumerate(counts) if count == len(given)), None)
        if front is None or self.fill is None:
            return None
        axes = self.placed.weight(leaf.path, shape)
        where = self.placed.sharding(axes)
        dtype = leaf.kept_as(self.dtype)
        is_bits = self.as_bits and dtype.itemsize == 2
        stack = jnp.zeros(shape, np.uint16 if is_bits else dtype, device=where)
        is_finite = jnp.ones((), bool, device=self.placed.sharding())
        divided, whole = PartitionSpec(*axes[front:]), PartitionSpec()
        for number, one in enumerate(given):
            place = np.unravel_index(number, shape[:front]) if front else ()
            starts = tuple(np.asarray(i, np.int32) for i in place)
            parts = divided if one.shape == shape[front:] else whole
            here = to_devices(one, self.placed.sharding(parts))
            stack, is_finite = self.fill(stack, is_finite, here, starts, part, where)
            stack.block_until_ready()
        return {"": stack} if not self.check or is_finite else None

    def quantised(
        self, matrices: Iterable[np.ndarray], shape: tuple[int, ...], packing: Packing
    ) -> dict[str, np.ndarray]:
        """Makes the arrays of a quantised leaf [..., F, D] of its matrices of floats, in order."""
        made = _empty(packing, (math.prod(shape[:-2]), *shape[-2:]))
        for index, w_FD in enumerate(matrices):
            _fill(made, index, self.quantise(w_FD, packing))
        return _stacked_as(shape, made)

    def put_packed(self, parts: dict[str, np.ndarray], leaf: TreeLeaf) -> dict[str, Array]:
        """Puts the arrays of a quantised leaf, whose values of 4 bits are in pairs, on its devices,
        without zero points that all are 0.
        """
        platform = self.placed.devices[0].platform
        # Versions of jax that keep bits of bfloat16 refuse arrays of int4 as arguments.
        as_int4 = parts[""].dtype == np.uint8 and not bfloat16_as_bits(platform)
        if as_int4 and platform != "cpu":
            parts[""] = from_pairs(parts[""])
        if ZEROS in parts and not parts[ZEROS].any():
            del parts[ZEROS]
        found = {end: put(x, leaf.path + end, self.placement) for end, x in parts.items()}
        if as_int4 and platform == "cpu":
            # A fifth of the time; an accelerator would need twice the leaf's bytes more for it.
            pairs = jax.lax.bitcast_convert_type(found[""], jnp.int4)
            found[""] = pairs.reshape(*pairs.shape[:-2], -1)
        return found


def load_weights(
    source: Path | Mapping[str, Any], spec: ModelSpec, layout: Layout, kept: Kept
) -> dict[str, Any]:
    """Returns the weight tree (`weights.tree`) of a directory, or of the arrays of a checkpoint
    under its names. Matrices that are stored quantised stay so where a matmul can read them.

    Tensors go one by one from the mapped file to the device and their file pages are dropped at
    once.
    Raises: CheckpointError naming every missing, unexpected or misshapen tensor, before anything is
    allocated; naming the first tensor that holds NaN or infinity, where anybody looks.
    """
    checkpoint, layout = open_checkpoint(source, spec, layout)
    with checkpoint:
        leaves = [_in_pieces(checkpoint, leaf) for leaf in _present(checkpoint, spec, layout)]
        _check(checkpoint, spec, layout, leaves)
        with progress(leaves, jnp.dtype(kept.dtype)) as told:

            def load(leaf: TreeLeaf) -> dict[str, Array]:
                packing = _packing(checkpoint, leaf, kept)
                if packing is not None:
                    return kept.put_packed(_packed(checkpoint, leaf, packing, kept, told), leaf)
                given = _on_devices(checkpoint, leaf)
                if given and (found := kept.filled(leaf, given, leaf.one.part)) is not None:
                    told(math.prod(leaf.shape))
                    return found
                host = _stack(checkpoint, leaf, leaf.kept_as(kept.dtype), kept.check, told)
                return kept.put(host, leaf)

            return make_tree((leaf, load(leaf)) for leaf in leaves)


@contextmanager
def progress(leaves: Sequence[TreeLeaf], dtype: np.dtype) -> Iterator[Told]:
    """Shows on a terminal how much of the weights is there and bytes per second, once that has
    taken a second; gives what to tell of so many values more.
    """
    from tqdm import tqdm

    total = sum(math.prod(leaf.shape) for leaf in leaves) * dtype.itemsize
    with tqdm(
        total=total,
        desc="Loading weights",
        unit="B",
        unit_scale=True,
        delay=1,
        leave=False,
        disable=None,
    ) as bar:
        yield lambda count: bar.update(count * dtype.itemsize)


TEXT = (
    # Qwen Omni, whose thinker is what writes; other parts speak.
    (re.compile(r"^thinker\.lm_head\."), "lm_head."),
    (re.compile(r"^thinker\.model\.(language_model\.)?(?=embed_tokens|layers|norm)"), "model."),
    (re.compile(r"^((model\.)?language_model|text_model)\.lm_head\."), "lm_head."),
    # Kimi K2.5 and Qianfan-OCR as transformers 5 writes them; published files have `layers`.
    (re.compile(r"^language_model\.model\.(blocks|encoder\.layers)\."), "model.layers."),
    (re.compile(r"^(model\.(language|text)_model|(language|text)_model\.model)\."), "model."),
    # Nemotron 3 Omni as published, and InternVL on InternLM2.
    (re.compile(r"^language_model\.(?=(backbone|output)\.)"), ""),
    # Cosmos 3.
    (re.compile(r"^(?=(embed_tokens|layers|norm)\.)"), "model."),
)
"""How models of several parts call the tensors of their text part, and what it calls them."""


def name_in_text(name: str) -> str:
    """Returns what the text part calls a tensor of a model of several parts."""
    matching = ((pattern, other) for pattern, other in TEXT if pattern.match(name))
    pattern, other = next(matching, (None, ""))
    return name if pattern is None else pattern.sub(other, name)


def open_checkpoint(
    source: Path | Mapping[str, Any], spec: ModelSpec, layout: Layout
) -> tuple[Tensors, Layout]:
    """Opens the tensors of the layout's model: under their names in the text part where it is a
    part of another model, and as if they were not quantised. Returns the layout with them, with
    experts in the form that the checkpoint has them in.
    """
    if isinstance(source, Mapping):
        checkpoint = Checkpoint.of_arrays(source)
    else:
        checkpoint = Checkpoint.open(source)
    known = _sources(spec, layout)
    modules = {source.rpartition(".")[0] for source in known}
    in_layers = {leaf.source.partition("{")[0] for leaf in layout.layers[0].values()}
    own_name, is_part = renaming(layout, known), layout.part_of is not None

    def rename(name: str) -> str | None:
        renamed = own_name(name)
        module = renamed.rpartition(".")[0]
        is_known = not {module, module.removesuffix(".weight")}.isdisjoint(modules)
        is_text = name_in_text(name) != name or renamed.startswith(tuple(in_layers))
        return renamed if is_known or is_text or not is_part else None

    checkpoint = checkpoint.renamed(rename)
    checkpoint = _with_embeddings(checkpoint, layout)
    checkpoint = _divided_anew(checkpoint, spec, layout)
    layout = _as_stored(checkpoint.entries, spec, layout)
    if layout.quantisation is None:
        return checkpoint, layout
    return Dequantised(checkpoint, layout.quantisation, _sources(spec, layout)), layout


def _with_embeddings(checkpoint: Checkpoint, layout: Layout) -> Checkpoint:
    """Returns the checkpoint, a tied one that has the head alone with embeddings in its place: some
    programs leave out the second of two tensors that are one, and others the first.
    """
    head = layout.top.get("head")
    if head is None or head.same_as != "embed":
        return checkpoint
    embed = layout.top["embed"].source
    if embed in checkpoint.entries:
        return checkpoint
    return checkpoint.renamed(lambda name: embed if name == head.source else name)


def _divided_anew(checkpoint: Checkpoint, spec: ModelSpec, layout: Layout) -> Checkpoint:
    """Returns the checkpoint, with each row of `Layout.joined` in the tensor that it belongs to
    where these were divided evenly.
    """
    leaves = tree_leaves(spec, layout)
    wanted = {source: leaf.one.stored_shapes[0] for leaf in leaves for source in leaf.sources}
    groups = [
        tuple(name.format(layer=layer) for name in names)
        for names, layer in itertools.product(layout.joined, range(spec.num_layers))
    ]
    arrays: dict[str, np.ndarray] = {}
    for names in dict.fromkeys(groups):
        if any(name not in checkpoint.entries for name in names):
            continue
        shapes = [checkpoint.entries[name].shape for name in names]
        total, counts = sum(shape[0] for shape in shapes), [wanted[name][0] for name in names[:-1]]
        part = -(-total // len(names))
        is_even = all(shape == (part, *shapes[-1][1:]) for shape in shapes[:-1])
        if is_even and sum(counts) < total and counts != [part] * len(counts):
            rows = np.concatenate([checkpoint.read(name) for name in names])
            arrays |= zip(names, np.split(rows, np.cumsum(counts)), strict=True)
    return checkpoint.with_arrays(arrays) if arrays else checkpoint


def _sources(spec: ModelSpec, layout: Layout) -> set[str]:
    return {source for leaf in tree_leaves(spec, layout) for source in leaf.sources}


def _as_stored(names: Collection[str], spec: ModelSpec, layout: Layout) -> Layout:
    """Returns the layout with layers, and experts, in the form in which tensors of these names have
    them.
    """
    also = replace(layout, layers=layout.also, also=()) if layout.also else layout
    if not (_sources(spec, also) - _sources(spec, layout)).isdisjoint(names):
        return also

    def is_there(leaves: Mapping[str, Leaf], layer: int) -> bool:
        one = leaves["expert_up"].source.format(layer=layer, pair=layer // 2, half=0, expert=0)
        return any(name.startswith(one.removesuffix("weight")) for name in names)

    def stored(kind: int, leaves: Mapping[str, Leaf]) -> Mapping[str, Leaf]:
        other, layer = in_other_form(leaves), spec.layers_of(kind)[0]
        if other is None or is_there(leaves, layer) or not is_there(other, layer):
            return leaves
        return other

    return replace(layout, layers=tuple(stored(*one) for one in enumerate(layout.layers)))


def renaming(layout: Layout, known: Collection[str]) -> Callable[[str], str]:
    """Returns what makes the model's own names of those in checkpoints. known: all of its own."""
    spellings = (*layout.spellings, _base_names(layout, known))

    def rename(name: str) -> str:
        if layout.part_of is not None:
            name = name_in_text(name)
        for pattern, other in spellings:
            name = re.sub(pattern, other, name)
        return name

    return rename


def _base_names(layout: Layout, known: Collection[str]) -> tuple[str, str]:
    """Returns the pattern of names in a checkpoint of the model without its head, such as GPT-2's
    `h.0.ln_1.weight`, and what they begin with in one of the whole model.
    """
    prefix = next(iter(layout.layers[0].values())).source.partition(".")[0]
    parts = {name.split(".")[1] for name in known if name.startswith(f"{prefix}.")}
    return rf"^(?=({'|'.join(map(re.escape, sorted(parts)))})\.)", f"{prefix}."


def put(host: np.ndarray, path: str, placement: Placement | None) -> Array:
    """Puts a leaf of the weight tree on its devices, on the default one without a placement."""
    where = None if placement is None else placement.sharding(placement.weight(path, host.shape))
    return to_devices(host, where).block_until_ready()


def _on_devices(checkpoint: Tensors, leaf: TreeLeaf) -> list[jax.Array]:
    """Returns the arrays of a leaf of floats if all of them are on devices, else none."""
    if isinstance(checkpoint, Dequantised) or leaf.one.info.below is not None:
        return []
    if leaf.one.pieces is not None:  # which may be of several sizes
        return []
    given = (checkpoint.on_devices(name) for name in leaf.sources)
    found = [one for one in given if one is not None]
    return found if len(found) == len(leaf.sources) else []


def _packing(checkpoint: Tensors, leaf: TreeLeaf, kept: Kept) -> Packing | None:
    """Returns what the leaf is to be kept in, None for the dtype of the model."""
    if isinstance(checkpoint, Dequantised) and kept.quantization is None and is_matrix(leaf):
        return checkpoint.packing(leaf.sources, leaf.one.part, kept.num_parts(leaf), kept.dtype)
    return kept.packing(leaf)


def _packed(
    checkpoint: Tensors, leaf: TreeLeaf, packing: Packing, kept: Kept, told: Told
) -> dict[str, np.ndarray]:
    """Makes the arrays of a quantised leaf, matrix by matrix."""
    count, (F, D) = math.prod(leaf.shape[:-2]), leaf.shape[-2:]
    made = _empty(packing, (count, F, D))
    per_source = count // len(leaf.sources)

    def matrices(name: str) -> Iterator[dict[str, np.ndarray]]:
        if isinstance(checkpoint, Dequantised):
            yield from checkpoint.packed(name, packing, leaf.one.part)
            return
        stored = (w_FD for x in _parts(checkpoint, leaf, name) for w_FD in x.reshape(-1, F, D))
        for number, given in enumerate(stored):
            w_FD = np.empty((F, D), np.float32)
            _convert(given, w_FD, _what(checkpoint, name), leaf, kept.check, number * w_FD.size)
            yield kept.quantise(w_FD, packing)

    def make(index: int) -> None:
        name = leaf.sources[index]
        for number, parts in enumerate(matrices(name), index * per_source):
            for x in parts.values() if kept.check else ():
                if not is_finite(x):
                    file = checkpoint.entries[name].file
                    raise _not_finite(f"{file}: what makes {name}", x.reshape(-1), 0)
            _fill(made, number, parts)
        checkpoint.release(name)

    # Quantising has threads of its own.
    with ThreadPoolExecutor(READERS if isinstance(checkpoint, Dequantised) else 1) as threads:
        for _ in threads.map(make, range(len(leaf.sources))):
            told(per_source * F * D)
    return _stacked_as(leaf.shape, made)


def _present(checkpoint: Tensors, spec: ModelSpec, layout: Layout) -> list[TreeLeaf]:
    """Returns the leaves without those that repeat another one (a tied head: absent, or stored
    twice with equal values).
    """

    def repeats(leaf: TreeLeaf) -> bool:
        if leaf.one.same_as is None:
            return False
        source, other = leaf.one.source, layout.top.get(leaf.one.same_as)
        original = leaf.one.same_as if other is None else other.source
        return source not in checkpoint.entries or _equal(checkpoint, source, original)

    return [leaf for leaf in tree_leaves(spec, layout) if not repeats(leaf)]


def _in_pieces(checkpoint: Tensors, leaf: TreeLeaf) -> TreeLeaf:
    """Returns the leaf with the tensors that have its rows in this checkpoint."""
    if leaf.one.pieces is None:
        return leaf
    return leaf._replace(
        sources=tuple(
            name
            for source in leaf.sources
            for name in _pieces(checkpoint, source, leaf.one.pieces) or [source]
        )
    )


def _pieces(checkpoint: Tensors, source: str, pieces: str) -> list[str]:
    """Returns the names of the tensors that have the rows of one that is not there."""
    if source in checkpoint.entries:
        return []
    prefix = source.rpartition(".")[0]
    names = (f"{prefix}.{pieces.format(number=number)}" for number in itertools.count())
    return list(itertools.takewhile(checkpoint.entries.__contains__, names))


def _misfits(checkpoint: Tensors, leaf: TreeLeaf) -> list[str]:
    """Lists what is wrong with the tensors of a leaf whose rows may be in several."""
    shape = leaf.one.info.shape
    found = [checkpoint.entries[name] for name in leaf.sources if name in checkpoint.entries]
    wrong = [
        f"{one.name}: expected rows of {shape[1:]} numbers from config.json, got {one.shape}"
        for one in found
        if one.shape[1:] != shape[1:]
    ]
    num_rows = sum(one.shape[0] for one in found if len(one.shape) == len(shape))
    if not wrong and len(found) == len(leaf.sources) and num_rows != leaf.shape[0] * shape[0]:
        wrong.append(
            f"{leaf.sources[0]}: expected {leaf.shape[0] * shape[0]} rows from config.json, in "
            f"it and those that follow, got {num_rows}"
        )
    return wrong


def _equal(checkpoint: Tensors, one: str, other: str) -> bool:
    a, b = checkpoint.entries[one], checkpoint.entries.get(other)
    if b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    views = [checkpoint.read(name).reshape(-1).view(np.uint8) for name in (one, other)]
    same = all(
        np.array_equal(views[0][i : i + 2**24], views[1][i : i + 2**24])
        for i in range(0, a.nbytes, 2**24)
    )
    checkpoint.release(one)
    checkpoint.release(other)
    return same


def _check(checkpoint: Tensors, spec: ModelSpec, layout: Layout, leaves: list[TreeLeaf]) -> None:
    expected = {source: leaf.one for leaf in leaves for source in leaf.sources}
    repeated = {leaf.source for leaf in layout.top.values()} - set(expected)
    entries = checkpoint.entries
    unknown = [
        name
        for name in entries
        if name not in expected
        and name not in repeated
        and name not in layout.told
        and not any(re.fullmatch(p, name) for p in layout.derived)
    ]
    problems = [f"missing tensor {name}" for name in expected if name not in entries]
    problems += [f"tensor that {spec.family} does not use: {name}" for name in unknown]
    for in_pieces in (leaf for leaf in leaves if leaf.one.pieces is not None):
        problems += _misfits(checkpoint, in_pieces)
    for name, numbers in layout.told.items():
        if name in entries and checkpoint.read(name).tolist() != list(numbers):
            problems.append(f"{name}: expected the numbers that config.json tells, got others")
    for name, leaf in expected.items():
        entry, kinds = entries.get(name), dtypes_of(leaf.info)
        misfits = leaf.pieces is None and entry and entry.shape not in leaf.stored_shapes
        if entry is not None and misfits:
            wanted = " or ".join(map(str, leaf.stored_shapes))
            problems.append(f"{name}: expected shape {wanted} from config.json, got {entry.shape}")
        elif entry is not None and entry.dtype.name not in kinds:
            problems.append(f"{name}: expected one of {', '.join(kinds)}, got {entry.dtype.name}")
    if problems:
        what_to_do = "take all tensors of one checkpoint and the config.json that belongs to it"
        raise CheckpointError.of(checkpoint.directory, problems, what_to_do)


def dtypes_of(info: ArrayInfo) -> tuple[str, ...]:
    """Returns the dtypes that the values of an array may be given in."""
    return FLOATS if info.below is None else INTEGERS


def with_quantised_head(weights: Mapping[str, Any], packing: Packing, kept: Kept) -> dict[str, Any]:
    """Returns the tree with its head, or the embeddings that are it, as a quantised leaf, which is
    a stack of one. Tokens are still looked up in the embeddings as they were.
    """
    host = np.asarray(values(weights[HEAD if HEAD in weights else "embed"]))
    parts = kept.quantised([host], (1, *host.shape), packing)
    found = {HEAD + suffix: put(x, HEAD + suffix, kept.placement) for suffix, x in parts.items()}
    return {**weights, **found}


def _stacked_as(shape: tuple[int, ...], made: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns arrays of matrices one behind the other as those of a leaf [..., F, D]."""
    return {suffix: x.reshape(*shape[:-2], *x.shape[1:]) for suffix, x in made.items()}


def _empty(packing: Packing, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Allocates the arrays of a quantised leaf, values of 4 bits in pairs."""
    arrays = packing.arrays(shape, in_pairs=True).items()
    return {suffix: aligned_empty(shape, dtype) for suffix, (shape, dtype) in arrays}


def _fill(made: dict[str, np.ndarray], index: int, parts: dict[str, np.ndarray]) -> None:
    """Puts the arrays of one matrix in their place."""
    for suffix, x in parts.items():
        made[suffix][index] = in_pairs(x) if x.dtype == INT4 else x


def _stack(
    checkpoint: Tensors, leaf: TreeLeaf, dtype: np.dtype, check: bool, told: Told
) -> np.ndarray:
    """Makes the leaf in one host array, converted as it is copied from the file, and looked at if
    `check`.
    """
    host = aligned_empty(leaf.shape, dtype)

    def read(piece_of_host: np.ndarray, name: str) -> None:
        start = 0
        for given in _parts(checkpoint, leaf, name):
            piece = piece_of_host[start : start + given.size]
            _convert(given, piece, _what(checkpoint, name), leaf, check, start)
            start += given.size
        checkpoint.release(name)

    sizes = [host.size // len(leaf.sources)] * len(leaf.sources)
    if leaf.one.pieces is not None:
        sizes = [math.prod(checkpoint.entries[name].shape) for name in leaf.sources]
    pieces = np.split(host.reshape(-1), np.cumsum(sizes)[:-1])
    with ThreadPoolExecutor(READERS) as threads:  # numpy lets others run meanwhile
        for piece, _ in zip(pieces, threads.map(read, pieces, leaf.sources), strict=True):
            told(piece.size)
    return host


def _parts(checkpoint: Tensors, leaf: TreeLeaf, name: str) -> Iterable[np.ndarray]:
    """Gives what the leaf has of a tensor, in pieces one behind the other."""
    stored = checkpoint.read(name)
    one = leaf.one
    return [stored] if one.part is None else one.part.pieces(stored, one.num_experts)


def _what(checkpoint: Tensors, name: str) -> str:
    return f"{checkpoint.entries[name].file}: tensor {name}"


def _convert(
    given: np.ndarray, to: np.ndarray, what: str, leaf: TreeLeaf, check: bool, start: int = 0
) -> None:
    """Copies values of the array `what` from number `start` on, and looks at them if `check`."""
    to = to.reshape(-1)
    for stored in _pieces_in_order(given):
        piece, to = np.split(to, [stored.size])
        with np.errstate(over="ignore", invalid="ignore"):  # what does not fit is named below
            piece[...] = stored
        if check:
            check_below(what, stored, leaf.one.info.below, start)
            if not is_finite(piece):
                raise _not_finite(what, piece, start)
        start += stored.size


def _pieces_in_order(x: np.ndarray) -> Iterator[np.ndarray]:
    """Gives the values in pieces of at most `CHECKED`, or as many rows as are worth turning."""
    if x.ndim != 2 or x.strides[1] == x.itemsize:
        flat = x.reshape(-1)
        yield from (flat[i : i + CHECKED] for i in range(0, flat.size, CHECKED))
        return
    # Of a matrix that is stored transposed a value is in each page of memory. Copies of so many
    # columns fit in the cache, and numpy turns them faster as whole numbers.
    bits = x.view(f"u{x.itemsize}")
    for i in range(0, len(x), TURNED):
        columns = np.ascontiguousarray(bits[i : i + TURNED].T)
        yield columns.T.reshape(-1).view(x.dtype)


def is_finite(x: np.ndarray) -> bool:
    """Tells whether no value of a float32 or bfloat16 array is NaN or infinite.

    By their bits, since numpy's `isfinite` takes five times as long for bfloat16.
    """
    if x.dtype.kind == "i" or x.dtype.name in ("int4", "uint4"):
        return True
    if x.itemsize == 1 or x.dtype == np.float16:
        return bool(np.isfinite(x).all())
    bits = x.view(f"u{x.itemsize}")
    without_sign = bits.dtype.type(2 ** (8 * x.itemsize - 1) - 1)
    infinity = 0x7F80 << 8 * (x.itemsize - 2)
    return int((bits & without_sign).max(initial=0)) < infinity


def _not_finite(what: str, x: np.ndarray, start: int) -> CheckpointError:
    """Makes the error of an array whose first value is number `start` of `what`."""
    index = int(np.flatnonzero(~np.isfinite(x))[0])
    return CheckpointError(
        f"{what}: expected finite values as {x.dtype.name}, got {float(x[index])} at index "
        f"{start + index} of its values in order; fetch the file again, or "
        f'load_format="unchecked" to compute with it all the same'
    )


def check_below(what: str, x: np.ndarray, below: int | None, start: int = 0) -> None:
    """Looks at whole numbers, the first of which is number `start` of `what`; None allows all.

    Raises: CheckpointError naming the first one that is not from 0 on and less than `below`.
    """
    if below is None:
        return
    wrong = np.flatnonzero((x < 0) | (x >= below))
    if wrong.size:
        raise CheckpointError(
            f"{what}: expected whole numbers from 0 to {below - 1}, got "
            f"{x.reshape(-1)[wrong[0]]} at index {start + wrong[0]} of its values in order; take "
            f"what belongs to this config.json"
        )


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocates host memory that a CPU device takes over instead of copying, because it starts at a
    multiple of 64 bytes.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].view(dtype).reshape(shape)
