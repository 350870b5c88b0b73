"""Describes what an engine is and has, in lines for people."""

from __future__ import annotations

from jaxkv.build.blueprint import Blueprint
from jaxkv.build.memory import Budget
from jaxkv.build.model import Model
from jaxkv.config import EngineConfig, Speculation
from jaxkv.engine.engine import Engine
from jaxkv.models.families import Layout
from jaxkv.ops import native
from jaxkv.weights.tree import describe_packed


def describe(
    model: Model, blueprint: Blueprint, engine: Engine, budget: Budget, compile_cache: object
) -> str:
    """Returns a line each on model, weights, KV cache, limits, programs, backend and memory."""
    programs = engine.programs
    spec, config = blueprint.spec, blueprint.limits
    used = engine.scheduler.allocator.num_used
    return "\n".join(
        (
            (
                f"model     {model.directory} ({spec.family}, {spec.num_layers} layers, "
                f"{spec.query_heads} query heads{_part(model.layout.part_of)})"
            ),
            (
                f"weights   {model.weight_bytes / 2**20:.1f} MiB {blueprint.dtype} on "
                f"{blueprint.placement}{describe_packed(model.weights)}"
                f"{_stored(model.layout)}"
            ),
            *_draft(model.draft),
            f"kv cache  {config.num_tokens} tokens = {config.num_pages} pages of "
            f"{config.block_size}, "
            f"{spec.token_numbers} numbers per token and layer{_parts(blueprint)} in "
            f"{blueprint.kv_cache_dtype}, "
            f"{used} pages in use{_row(blueprint, engine)}",
            f"limits    {config.max_num_seqs} rows, {config.max_model_len} tokens per row, "
            f"{config.max_num_batched_tokens} tokens per step, {config.decode_steps} decode "
            f"steps per loop{_ahead(config.speculation)}",
            f"programs  {programs.num_compiled - programs.num_loaded} compiled"
            f"{f', {programs.num_loaded} loaded' if programs.num_loaded else ''} in "
            f"{programs.compile_s:.1f} s: steps of "
            f"{', '.join(map(str, programs.token_buckets))} tokens, loops of "
            f"{', '.join(map(str, programs.row_buckets))} rows",
            f"cache     of compiled programs: {compile_cache}",
            f"backend   {blueprint.backend} ({blueprint.backend_reason})",
            *_matmuls(blueprint),
            *budget.lines(programs),
        )
    )


def _matmuls(blueprint: Blueprint) -> list[str]:
    """Says by what a CPU multiplies."""
    if blueprint.platform != "cpu":
        return []
    return [f"matmuls   {native.described()}"]


def _parts(blueprint: Blueprint) -> str:
    """Says how many devices have a number, where that is not one of them."""
    placement = blueprint.placement
    groups = [group for group in blueprint.spec.groups if group.layers]
    found = []
    if placement.context > 1:
        counts = {placement.token_parts(group.num_parts(placement.size)) for group in groups}
        found.append(f"{' or '.join(map(str, sorted(counts)))} devices divide each page's tokens")
    if blueprint.kv_copies and any(group.latent_dim for group in groups):
        found.append(f"of latent attention {blueprint.kv_copies} devices have the same")
    elif blueprint.kv_copies:
        found.append(f"{blueprint.kv_copies} copies of each KV head")
    return f" ({', '.join(found)})" if found else ""


def _row(blueprint: Blueprint, engine: Engine) -> str:
    """Says what bounds the pages of a row, if anything but its length does."""
    config, demoted = blueprint.limits, blueprint.low_codecs
    if engine.scheduler.tiers is not None:
        return engine.scheduler.tiers.describe()
    if config.read_pages:
        return (
            f"; kv_policy {config.kv_policy}: {config.read_pages} pages of a row are read "
            f"for a new token"
        )
    if config.has_windows:
        return _windows(config)
    if not config.row_pages:
        return ""
    low = "" if demoted is None else f" and {config.low_row_pages} in {demoted[0].name}"
    return f"; kv_policy {config.kv_policy}: {config.row_pages} pages per row{low}"


def _ahead(speculation: Speculation | None) -> str:
    """Says how loops propose tokens ahead."""
    if speculation is None:
        return ""
    return (
        f"; up to {speculation.num_tokens} tokens ahead ({speculation.method}) with at most "
        f"{speculation.most_rows} rows"
    )


def _draft(draft: Model | None) -> list[str]:
    """Says which model proposes tokens, if one does."""
    if draft is None:
        return []
    return [
        f"draft     {draft.directory} ({draft.spec.family}, {draft.spec.num_layers} layers), "
        f"{draft.weight_bytes / 2**20:.1f} MiB of the weights{describe_packed(draft.weights)}"
    ]


def _windows(config: EngineConfig) -> str:
    """Says how many pages of a row stay in its page tables, where a window bounds them."""
    longest = -(-config.max_model_len // config.block_size)
    held = {window: config.held_pages(longest, window) for window in config.windows if window}
    bounded = {window: pages for window, pages in held.items() if pages < longest}
    listed = [
        f"window {window}: {pages} pages per row"
        + (f" in {config.windows.count(window)} of {len(config.windows)} page tables")
        * (len(config.windows) > 1)
        for window, pages in bounded.items()
    ]
    return "".join(f"; {one}" for one in listed)


def _part(whole: str | None) -> str:
    return (
        "" if whole is None else f"; the text part of {whole}, whose other tensors are not loaded"
    )


def _stored(layout: Layout) -> str:
    how = layout.quantisation
    return "" if how is None else f"; stored as {how.method}"
