"""The programs of an engine on chips that need not be here: their memory, large copies and
collectives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from jaxkv.tools.chips import parse_target

if TYPE_CHECKING:
    from jaxkv.build.blueprint import Blueprint


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineJob:
    """Names an engine whose programs are to be compiled. options: any of `deploy`'s; every: all
    programs, not only the largest of each kind and the copy of pages.
    """

    model: str
    target: str
    options: tuple[tuple[str, Any], ...]
    every: bool = False

    def __hash__(self) -> int:
        return hash((self.model, self.target, repr(self.options), self.every))

    def __str__(self) -> str:
        return f"{self.model} on {self.target}"


def compile_engine(job: EngineJob) -> dict[str, Any]:
    """Compiles one engine in this process and reads what came out; `chips.ENVIRONMENT` must hold
    before jax looks for devices.

    Raises: as `deploy` and `Blueprint.budget`, CapacityError too where the compiler finds no room.
    """
    from jaxkv.tools.deployment import deploy

    deployment = deploy(job.model, parse_target(job.target), **dict(job.options))
    made = deployment.compilable
    weights = made.abstract_weights()
    budget = made.budget(deployment.memory, weights)
    programs = made.with_pages(budget.num_pages).programs(weights)
    budget.hand_over(programs)
    if job.every:
        programs.compile_all()
    programs.compile_largest()
    programs.copy()
    budget.check(programs)
    slices = large_sizes(programs)
    return {
        "model": deployment.name,
        "num_devices": made.num_devices,
        "backend": made.backend,
        "backend_reason": made.backend_reason,
        "num_pages": budget.num_pages,
        "pages_reason": budget.reason,
        "kv_dtype": made.kv_cache_dtype,
        "attention": list(attention_of(made)),
        "memory": budget.lines(programs),
        "programs": [
            describe_program(name, program, slices) for name, program in programs.compiled.items()
        ],
    }


def attention_of(made: Blueprint) -> Iterator[dict[str, Any]]:
    """Yields what attention is on one device, once for KV groups alike, as `tools.kernels.Case` has
    it: heads, the tokens of a page, and whether those are a part of the page.
    """
    from jaxkv.models.paged import heads_of
    from jaxkv.ops.attention.base import of_part
    from kernels_pallas.tpu import padded_head_dim

    seen = []
    of_groups = zip(
        made.spec.groups, heads_of(made.spec, num_devices=made.num_devices), strict=True
    )
    for group, heads in of_groups:
        num_parts = made.placement.token_parts(group.num_parts(made.num_devices))
        heads, page_size = of_part(heads, made.limits.block_size, num_parts)
        head_dim = padded_head_dim(heads.head_dim, latent=heads.latent_dim is not None)
        rank = () if heads.latent_dim is None else (heads.latent_dim,)
        one = {
            "heads": (heads.num_heads, heads.num_kv_heads, head_dim, *rank),
            "page_size": page_size,
            "is_part": page_size != made.limits.block_size,
        }
        if one not in seen:
            seen.append(one)
            yield one


def large_sizes(programs: Any) -> dict[str, int]:
    """Returns, by the name of each argument that is pages or a matrix of weights: the elements of
    one layer's part of it, or one expert's, as a device has them. What is as large as that and
    written once more is a copy that should not be.
    """
    from jax.tree_util import keystr, tree_leaves_with_path

    from jaxkv.weights.packing import base_name
    from jaxkv.weights.tree import num_stacked

    def elements(leaf: Any) -> int:
        return prod(leaf.sharding.shard_shape(leaf.shape))

    weights, stores = programs.weights, programs.stores
    sizes = {}
    for i, store in enumerate(stores):
        for name, pool in zip(("pages", "scales"), store.arrays, strict=False):
            sizes[f"kv.stores[{i}].{name}"] = elements(pool) // store.num_layers
    for path, leaf in tree_leaves_with_path(weights):
        stacked = num_stacked(path)
        is_quantised = leaf.ndim == max(stacked, 1) + 3  # a head is a stack of one
        is_matrix = leaf.ndim - stacked == 2 and base_name(path[-1].key) == path[-1].key
        if is_quantised or is_matrix:
            sizes[f"weights{keystr(path)}"] = elements(leaf) // prod(leaf.shape[:stacked])
    return sizes


def describe_program(name: str, program: Any, slices: dict[str, int]) -> dict[str, Any]:
    """Describes a compiled program; slices: see `read_program`."""
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
