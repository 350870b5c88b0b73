"""Reads LoRA adapters that PEFT has written: adapter_config.json and adapter_model.safetensors. All
that they say is checked against the model, and what is not built is refused by its name.

An adapter becomes, for every matrix of the layers that can have one, arrays of the largest rank,
with zeros behind its own and with its scale in what goes up. Source: LoRA, arXiv 2106.09685,
section 4.1; its scale by the square root of the rank: arXiv 2312.03732.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.config import bfloat16_as_bits, is_int
from jaxkv.errors import CheckpointError
from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families import Layout, read_config
from jaxkv.models.spec import ModelSpec
from jaxkv.placement import Placement
from jaxkv.weights.load import FLOATS, is_finite, renaming
from jaxkv.weights.safetensors import Checkpoint
from jaxkv.weights.tree import ADAPTER_DOWN, ADAPTER_UP, EXPERT, TreeLeaf, is_matrix, tree_leaves

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PICKLE = "adapter_model.bin"

PREFIX = "base_model.model."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"

READ = {"peft_type", "task_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
READ |= {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"}

WITHOUT_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "eva_config", "fan_in_fan_out", "inference_mode"),
    *("lora_dropout", "megatron_core", "peft_version", "qalora_group_size", "revision"),
}
"""Keys that say nothing about what an adapter computes once it is trained."""

PLAIN_STARTS = ("gaussian", "orthogonal", "eva", True, False)
"""Training may begin in these ways: the weights below stay as they were (`init_lora_weights`)."""

PATTERN = re.compile(r"\^?[\w.-]{1,200}")
"""Names of modules that `rank_pattern` and `alpha_pattern` may have: any regular expression could
take for ever.
"""

MODULE_CHARS, MAX_PATTERNS = 200, 4096

Patterns = tuple[tuple[re.Pattern[str], float], ...]

TASKS = ("CAUSAL_LM", "FEATURE_EXTRACTION")
"""What an adapter may have been trained for: the layers are the same, names may lack their prefix
(`load.renaming`).
"""


class Target(NamedTuple):
    """Says where a module's adapter goes: into this leaf, at this place of its stack."""

    leaf: TreeLeaf
    place: int


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """Holds an adapter in host memory, as the device has it in a slot: {stack: {name: [L, X, D] or
    [L, F, X]}}. digest: SHA-256 of what it computes, which is what it is known by.
    """

    digest: bytes
    arrays: Mapping[str, Mapping[str, np.ndarray]]


def adapted_leaves(spec: ModelSpec, layout: Layout) -> list[TreeLeaf]:
    """Lists the matrices that adapters may be added to: linear maps of the layers that each are a
    module of the checkpoint or some rows of one, but for experts, what chooses them, and what
    layers share.
    """

    def can_be(leaf: TreeLeaf) -> bool:
        is_alone = leaf.one.num_sources == leaf.one.num_experts == 1 and not leaf.one.num_shared
        is_alone = is_alone and not leaf.name.startswith((EXPERT, "router"))
        return is_matrix(leaf) and is_alone and leaf.one.source.endswith(".weight")

    return [leaf for leaf in tree_leaves(spec, layout) if can_be(leaf)]


def adapter_shapes(
    spec: ModelSpec, layout: Layout, rank: int
) -> Iterator[tuple[TreeLeaf, str, tuple[int, ...]]]:
    """Yields (leaf, name in the tree, shape) of the arrays of one adapter."""
    for leaf in adapted_leaves(spec, layout):
        num_layers, rows, columns = leaf.shape
        yield leaf, ADAPTER_DOWN + leaf.name, (num_layers, rank, columns)
        yield leaf, ADAPTER_UP + leaf.name, (num_layers, rows, rank)


def empty_adapters(
    spec: ModelSpec, layout: Layout, placement: Placement, *, count: int, rank: int, dtype: str
) -> dict[str, dict[str, jax.Array]]:
    """Allocates room for so many adapters on the devices, zeros: what `tree.with_adapters` takes.

    Raises: ValueError for a model without a matrix that can have one.
    """
    made: dict[str, dict[str, jax.Array]] = {}
    kind = np.uint16 if _as_bits(dtype, placement) else jnp.dtype(dtype)
    for leaf, name, (num_layers, *rest) in adapter_shapes(spec, layout, rank):
        shape = (num_layers, count, *rest)
        where = placement.sharding(placement.weight(f"{leaf.stack}.{name}", shape))
        made.setdefault(leaf.stack or "", {})[name] = jnp.zeros(shape, kind, device=where)
    if not made:
        raise ValueError(f"enable_lora: expected False for {spec.family}, which has no linear maps")
    return made


def _as_bits(dtype: str, placement: Placement) -> bool:
    return dtype == "bfloat16" and bfloat16_as_bits(placement.devices[0].platform)


def read_adapter(
    directory: Path,
    spec: ModelSpec,
    layout: Layout,
    placement: Placement,
    *,
    rank: int,
    dtype: str,
) -> Adapter:
    """Reads the adapter of a directory for this model, with at most this rank.

    Raises: CheckpointError naming everything that is missing, unknown or misshapen, values that
    are not finite, and what a config asks for that is not built.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: expected a directory with {CONFIG} and {TENSORS}")
    if not (directory / TENSORS).is_file():
        got = f"{PICKLE}, which is never loaded because it can run code" * (
            (directory / PICKLE).exists()
        )
        raise CheckpointError(f"{directory}: expected {TENSORS}, got {got or 'none'}")
    config = AdapterConfig.read(read_config(directory, CONFIG))
    targets, rename = _targets(spec, layout), _renaming(spec, layout)
    with Checkpoint.open_file(directory / TENSORS) as stored:
        checkpoint = stored.renamed(rename)
        config = replace(
            config,
            called={_module(rename(x)): _module(x.removeprefix(PREFIX)) for x in stored.names},
        )
        modules = _check(checkpoint, config, targets, rank)
        # Whoever replaces an adapter in use may well write into its file.
        checkpoint = checkpoint.loaded()
        kind = jnp.dtype(dtype)
        arrays: dict[str, dict[str, np.ndarray]] = {}
        for leaf, name, shape in adapter_shapes(spec, layout, rank):
            arrays.setdefault(leaf.stack or "", {})[name] = np.zeros(shape, kind)
        digest = sha256()
        for module in modules:
            with np.errstate(over="ignore", invalid="ignore"):
                down = checkpoint.read(module + DOWN).astype(np.float32)
                up = checkpoint.read(module + UP).astype(np.float32)
                up *= np.float32(config.scale_of(module))
            for values in (down, up):
                digest.update(f"{module} {values.shape} ".encode())
                digest.update(np.ascontiguousarray(values).data)
            _fill(arrays, checkpoint, module, (down, up), targets[module])
    if _as_bits(dtype, placement):
        arrays = jax.tree.map(lambda x: x.view(np.uint16), arrays)
    return Adapter(digest.digest(), arrays)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterConfig:
    """Holds what an adapter_config.json says. targets: suffixes of module names; None where it
    names them by a regular expression, which is not tried: the tensors say which they are. called:
    the names that the trained model has for modules, which those in the file are; another one than
    the model's own where that is a part of it.
    """

    where: str
    rank: int
    alpha: float
    by_root: bool
    ranks: Patterns
    alphas: Patterns
    targets: frozenset[str] | None
    excluded: frozenset[str] | None
    layers: frozenset[int] | None
    called: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, config: ConfigReader) -> AdapterConfig:
        """Reads and checks the file. Raises: CheckpointError naming the key."""
        config.choice("peft_type", None, ["LORA"])
        config.choice("task_type", TASKS[0], TASKS)
        start = config.get("init_lora_weights", True)
        if not any(start is one or (start == one and one is not True) for one in PLAIN_STARTS):
            raise config.fail(
                "init_lora_weights",
                f"one of {', '.join(map(str, PLAIN_STARTS))}, as others change the weights below "
                f"(PEFT's `path_initial_model_for_weight_conversion` makes a plain adapter of one)",
            )
        config.refuse("bias", "none")
        for key, value in config.values.items():
            if key not in READ | WITHOUT_EFFECT | {"init_lora_weights", "bias"} and value:
                raise config.fail(key, "none (not built)")
        excluded = config.get("exclude_modules")
        return cls(
            where=config.where,
            rank=config.size("r"),
            alpha=config.number("lora_alpha", at_least=0),
            by_root=config.flag("use_rslora", False),
            ranks=_patterns(config, "rank_pattern"),
            alphas=_patterns(config, "alpha_pattern"),
            # A text is a regular expression, which could take for ever: what there is is taken.
            targets=None if isinstance(excluded, str) else _names(config, "target_modules"),
            excluded=_names(config, "exclude_modules"),
            layers=_layers(config),
        )

    def rank_of(self, module: str) -> int:
        return int(_own(self.ranks, self._name(module), self.rank))

    def scale_of(self, module: str) -> float:
        """Returns what the product of a module's two matrices is multiplied with."""
        alpha, rank = _own(self.alphas, self._name(module), self.alpha), self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.by_root else rank)

    def is_target(self, module: str) -> bool:
        """Tells whether the module is one of the adapter's. Ask where `targets` is not None."""
        if self.layers is not None and _layer_of(module) not in self.layers:
            return False
        name = self._name(module)
        return _ends_with(name, self.targets) and not _ends_with(name, self.excluded)

    def _name(self, module: str) -> str:
        return self.called.get(module, module)


def _module(name: str) -> str:
    return name.removesuffix(DOWN).removesuffix(UP)


def _ends_with(module: str, names: frozenset[str] | None) -> bool:
    parts = module.split(".")
    ends = (".".join(parts[first:]) for first in range(len(parts)))
    return any(end in names for end in ends) if names else False


def _layer_of(module: str) -> int:
    return next((int(part) for part in module.split(".") if part.isdecimal()), -1)


def _own(patterns: Patterns, module: str, default: float) -> float:
    """Returns what the first pattern says that a module's name ends in, as PEFT finds it."""
    name = module[:MODULE_CHARS]
    return next((value for pattern, value in patterns if pattern.match(name)), default)


def _patterns(config: ConfigReader, key: str) -> Patterns:
    section = config.section(key)
    if len(section.values) > MAX_PATTERNS:
        raise config.fail(key, f"at most {MAX_PATTERNS} names")
    found = []
    for name in section.values:
        if not PATTERN.fullmatch(name):
            raise config.fail(key, "names of modules, not other regular expressions")
        is_rank = key == "rank_pattern"
        value = section.size(name) if is_rank else section.number(name, at_least=0)
        found.append((re.compile(rf"(.*\.)?({name})$"), value))
    return tuple(found)


def _names(config: ConfigReader, key: str) -> frozenset[str] | None:
    given = config.get(key)
    if given is None or isinstance(given, str):
        return None
    if not isinstance(given, list) or not all(isinstance(one, str) and one for one in given):
        raise config.fail(key, "a list of module names, or a text")
    return frozenset(given)


def _layers(config: ConfigReader) -> frozenset[int] | None:
    given = config.get("layers_to_transform")
    listed = [given] if is_int(given) else given
    if listed is None:
        return None
    if not isinstance(listed, list) or not all(is_int(one) and one >= 0 for one in listed):
        raise config.fail("layers_to_transform", "a layer's number or a list of them")
    return frozenset(listed) or None  # all, as in PEFT


def _targets(spec: ModelSpec, layout: Layout) -> dict[str, list[Target]]:
    """Returns by module where its adapter goes: to several leaves where its rows are several."""
    found: dict[str, list[Target]] = {}
    for leaf in adapted_leaves(spec, layout):
        for index, source in enumerate(leaf.sources):
            found.setdefault(source.removesuffix(".weight"), []).append(Target(leaf, index))
    return found


def _renaming(spec: ModelSpec, layout: Layout) -> Callable[[str], str]:
    """Returns what makes the model's own names of PEFT's."""
    own_name = renaming(
        layout, {source for leaf in tree_leaves(spec, layout) for source in leaf.sources}
    )
    return lambda name: own_name(name.removeprefix(PREFIX))


def _sizes(targets: list[Target]) -> tuple[int, int]:
    """Returns (rows, columns) of a module's weight."""
    leaf = targets[0].leaf
    stored = leaf.one.stored_shapes[0]
    part = leaf.one.part
    rows, columns = stored[::-1] if part is not None and part.transposed else stored
    return rows, columns


def _check(
    checkpoint: Checkpoint,
    config: AdapterConfig,
    targets: Mapping[str, list[Target]],
    most: int,
) -> list[str]:
    """Returns the modules that the adapter has. Raises: CheckpointError naming what is wrong."""
    entries, problems = checkpoint.entries, []
    found = {_module(name) for name in entries}
    modules = [module for module in targets if module in found]
    if config.targets is not None:
        modules = [module for module in targets if module in found or config.is_target(module)]
        beside = [one for one in modules if not config.is_target(one)]
        problems += [f"{one}: expected one of target_modules" for one in beside]
    known = {module + end for module in modules for end in (DOWN, UP)}
    kinds = ", ".join(dict.fromkeys(module.rpartition(".")[2] for module in targets))
    problems += [
        f"expected LoRA of {kinds}, got tensor {name!r:.150}"
        for name in entries
        if name not in known
    ]
    if not modules:
        problems.append(f"expected LoRA of some of {kinds}, got none")
    for module in modules:
        rank, (rows, columns) = config.rank_of(module), _sizes(targets[module])
        if rank > most:
            problems.append(
                f"{module}: expected a rank of at most max_lora_rank={most} of LLM, got {rank}"
            )
        for name, shape in ((module + DOWN, (rank, columns)), (module + UP, (rows, rank))):
            entry = entries.get(name)
            if entry is None:
                problems.append(f"missing tensor {name}")
            elif entry.shape != shape:
                problems.append(
                    f"{name}: expected shape {shape} for this model and {CONFIG}, got {entry.shape}"
                )
            elif entry.dtype.name not in FLOATS:
                problems.append(f"{name}: expected one of {', '.join(FLOATS)}, got {entry.dtype}")
    if problems:
        what_to_do = "fetch the adapter again, or take one of this model"
        raise CheckpointError.of(checkpoint.directory, problems, what_to_do)
    return modules


def _fill(
    arrays: Mapping[str, Mapping[str, np.ndarray]],
    checkpoint: Checkpoint,
    module: str,
    matrices: tuple[np.ndarray, np.ndarray],
    targets: list[Target],
) -> None:
    """Copies a module's two matrices to where they go. Raises: CheckpointError for values that are
    not finite, as they are computed with.
    """
    down, up = matrices
    rank = down.shape[0]
    for leaf, place in targets:
        own = arrays[leaf.stack or ""]
        rows = up if leaf.one.part is None else leaf.one.part.of_rows(up)
        places = (
            (module + DOWN, own[ADAPTER_DOWN + leaf.name][place, :rank], down),
            (module + UP, own[ADAPTER_UP + leaf.name][place, :, :rank], rows),
        )
        for name, part, values in places:
            with np.errstate(over="ignore", invalid="ignore"):
                part[...] = values
            if not is_finite(np.ascontiguousarray(part)):
                raise CheckpointError(
                    f"{checkpoint.entries[name].file}: tensor {name}: expected finite values as "
                    f"{part.dtype.name} with its scale, got others"
                )
