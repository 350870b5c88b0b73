"""The programs of an engine on chips that need not be here: their memory, large copies and
collectives.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

from jaxkv.tools.chips import parse_target


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """What `deploy` takes. pages: instead of as many as fit; every: all programs, not only the
    largest step and loop and the copy of pages.
    """

    model: str
    target: str
    options: tuple[tuple[str, Any], ...] = ()
    pages: int | None = None
    every: bool = False

    def __str__(self) -> str:
        return f"{self.model} on {self.target}"


def compile_engine(engine: Engine) -> dict[str, Any]:
    """Compiles in this process and reads what came out; `chips.ENVIRONMENT` must hold before jax
    looks for devices.

    Raises: as `deploy` and `plan_pool`, CapacityError too where the compiler finds no room.
    """
    from jaxkv.build.pool import plan_pool
    from jaxkv.models.decoder import heads_of
    from jaxkv.tools.deployment import deploy

    made = deploy(engine.model, parse_target(engine.target), **dict(engine.options))
    budget = plan_pool(
        made.limits,
        made.page_nbytes,
        made.memory,
        memory_bytes=None,
        pages_override=engine.pages,
        programs_for=made.programs_for,
    )
    programs = made.programs_for(replace(made.limits, num_pages=budget.num_pages), budget.num_pages)
    if engine.every:
        programs.compile_all()
    else:
        programs.compile_largest()
        programs.copy()
    budget.check(programs)
    slices = large_sizes(programs)
    (heads, *_) = heads_of(made.spec, num_devices=made.tensor_parallel_size)
    return {
        "model": made.name,
        "num_devices": made.tensor_parallel_size,
        "backend": made.backend,
        "backend_reason": made.backend_reason,
        "num_pages": budget.num_pages,
        "pages_reason": budget.reason,
        "page_size": made.limits.block_size,
        "kv_dtype": made.kv_cache_dtype,
        "heads": [heads.num_heads, heads.num_kv_heads, heads.head_dim],
        "memory": budget.lines(programs),
        "programs": [
            describe_program(name, program, slices) for name, program in programs.compiled.items()
        ],
    }


def large_sizes(programs: Any) -> dict[str, int]:
    """By the name of each argument that is pages or a matrix of weights: the elements of one
    layer's part of it, as a device has them. What is as large as that and written once more is a
    copy that should not be.
    """
    from jax.tree_util import keystr, tree_leaves_with_path

    from jaxkv.weights.tree import is_stacked

    def elements(leaf: Any) -> int:
        return prod(leaf.sharding.shard_shape(leaf.shape))

    weights, groups = programs.weights, programs.groups
    sizes = {}
    for i, group in enumerate(groups):
        for name, pool in zip(("pages", "scales"), group.pools, strict=False):
            sizes[f"kv.groups[{i}].{name}"] = elements(pool) // group.num_layers
    for path, leaf in tree_leaves_with_path(weights):
        num_layers = leaf.shape[0] if is_stacked(path) else 1
        if leaf.ndim - is_stacked(path) == 2:
            sizes[f"weights{keystr(path)}"] = elements(leaf) // num_layers
    return sizes


def describe_program(name: str, program: Any, slices: dict[str, int]) -> dict[str, Any]:
    """Of a compiled program; slices: see `read_program`."""
    from jaxkv.tools.hlo import read_program

    memory = program.memory_analysis()
    copies, collectives = read_program(program.as_text(), slices=slices)
    return {
        "name": name,
        "argument_bytes": memory.argument_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "copies": [asdict(copy) for copy in copies],
        "collectives": [asdict(each) for each in collectives],
    }
