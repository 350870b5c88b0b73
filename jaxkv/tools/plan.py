"""`jaxkv plan`: what a model takes on chips, and how much context the KV cache that is left room
for holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from jaxkv.build.blueprint import Blueprint
from jaxkv.build.memory import MIB, Budget
from jaxkv.build.pool import fit_pages, most_pages
from jaxkv.config import EngineConfig
from jaxkv.errors import CapacityError
from jaxkv.kv.state import PagedKV
from jaxkv.pictures.memory import stacked_bars
from jaxkv.programs.compiled import Programs
from jaxkv.tools.chips import GIB
from jaxkv.tools.deployment import Deployment

PARTS = {
    "weights": "weight_bytes",
    "recurrent states": "state_bytes",
    "KV cache": "pool_bytes",
    "temporaries": "temp_bytes",
    "code, inputs": "kept_bytes",
    "left": "left",
}
"""What the memory is divided into: name and attribute of `Plan`."""

CODE_BYTES = 17 * MIB
"""Of one compiled program, whatever the model, since its layers are a loop
(docs/benchmarks/plan.md).
"""

SAMPLING_ROWS = 62
"""Arrays over the vocabulary beside the logits, counted in rows of them: eight rows are sampled at
once.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The memory of one device, in bytes: what takes a part of `limit`, and the largest pool that
    leaves room for it.

    temp_bytes: the hungriest program's, while it runs. kept_bytes: code of all programs and
    sampling parameters, which stay. source: formula or compiler.
    """

    source: str
    limit: int
    weight_bytes: int
    state_bytes: int
    temp_bytes: int
    kept_bytes: int
    num_pages: int
    page_nbytes: int
    limits: EngineConfig

    @property
    def pool_bytes(self) -> int:
        return self.num_pages * self.page_nbytes

    @property
    def num_tokens(self) -> int:
        return replace(self.limits, num_pages=self.num_pages).num_tokens

    @property
    def left(self) -> int:
        """Returns the margin, and what is less than a page."""
        taken = self.weight_bytes + self.state_bytes + self.temp_bytes + self.kept_bytes
        return self.limit - taken - self.pool_bytes

    def num_sequences(self, context: int) -> int:
        """Sequences of so many tokens that the pool holds, each in pages of its own."""
        pages = -(-context // self.limits.block_size)
        return self.num_pages // self.limits.row_pages_for(pages)


def plan_by_formula(deployment: Deployment) -> Plan:
    """Plans without a compiler. Raises: CapacityError if there is no room for a page."""
    _check_weights(deployment)
    temp_bytes = temporaries(deployment)
    rows = _with_rows(deployment.blueprint)
    programs = Programs(
        {}, PagedKV(stores=()), spec=rows.spec, config=rows.limits, backend=rows.backend
    )
    kept = programs.wide_bytes + programs.num_programs * CODE_BYTES
    num_pages = most_pages(deployment.memory, rows.page_nbytes, kept, [(temp_bytes, 0)])
    num_pages = min(num_pages, _at_most(deployment))
    return _plan(deployment, "formula", num_pages, temp_bytes=temp_bytes, kept_bytes=kept)


def plan_by_compiler(deployment: Deployment) -> Plan:
    """Sizes the pool as `LLM` does: the largest programs for two pools, then for the one that was
    chosen.

    Raises: CapacityError if there is no room for a page, RuntimeError if the target's compiler is
    not installed.
    """
    _check_weights(deployment)
    memory, rows = deployment.memory, _with_rows(deployment.compilable)
    page_nbytes, programs_for = rows.page_nbytes, partial(rows.programs, rows.abstract_weights())
    at_most = min(memory.free // page_nbytes, _at_most(deployment))
    num_pages, _ = fit_pages(memory, page_nbytes, at_most, programs_for)
    num_pages = min(num_pages, _at_most(deployment))
    programs = programs_for(num_pages)
    programs.compile_largest()
    reason, advice = "as many as memory allows", "lower max_num_batched_tokens or max_num_seqs"
    Budget(
        memory=memory, num_pages=num_pages, page_nbytes=page_nbytes, reason=reason, advice=advice
    ).check(programs)
    return _plan(
        deployment,
        "compiler",
        num_pages,
        temp_bytes=max(one.temp_bytes for one in programs.memory),
        kept_bytes=programs.wide_bytes
        + programs.num_programs * max(one.code_bytes for one in programs.memory),
    )


def _at_most(deployment: Deployment) -> int:
    """Counts the pages that are of any use: where they hold nothing, those of all rows."""
    blueprint = deployment.blueprint
    if blueprint.spec.kv_layers:
        return 2**31
    return blueprint.limits.max_num_seqs * blueprint.limits.pages_per_row


def temporaries(deployment: Deployment) -> int:
    """Returns about what the temporaries of the hungriest program take on each device, whatever the
    pages (docs/benchmarks/plan.md).

    Logits of all rows, whole on each device, and what sampling makes of them; hidden states of the
    largest step, twice where devices add theirs up. Nothing copies the pool.
    """
    blueprint = deployment.blueprint
    spec, limits = blueprint.spec, blueprint.limits
    logits = 4 * spec.vocab_size * (limits.max_num_seqs + SAMPLING_ROWS)
    copies = 1 if blueprint.num_devices == 1 else 2
    hidden = 4 * limits.max_num_batched_tokens * spec.hidden_size * copies
    return logits + hidden


def _check_weights(deployment: Deployment) -> None:
    memory = deployment.memory
    if memory.free <= 0:
        needed, limit = memory.taken / GIB, (memory.free + memory.taken) / GIB
        available = f"{limit:.2f} GiB available ({memory.source})"
        what = "weights and recurrent states" if memory.state_bytes else "weights"
        raise CapacityError(
            f"{needed:.2f} GiB of {what}, {available}: take more devices, or larger ones"
        )


def _plan(
    deployment: Deployment, source: str, num_pages: int, *, temp_bytes: int, kept_bytes: int
) -> Plan:
    memory = deployment.memory
    return Plan(
        source=source,
        limit=memory.free + memory.taken,
        weight_bytes=memory.used,
        state_bytes=memory.state_bytes,
        temp_bytes=temp_bytes,
        kept_bytes=kept_bytes,
        num_pages=num_pages,
        page_nbytes=deployment.blueprint.page_nbytes,
        limits=deployment.blueprint.limits,
    )


def _with_rows(blueprint: Blueprint) -> Blueprint:
    """Returns the blueprint with the row length that the pool allows at least."""
    return blueprint.with_pages(blueprint.limits.pages_per_row)


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A deployment with its plans, or with the reason why there is none."""

    deployment: Deployment
    plans: tuple[Plan, ...] = ()
    refusal: str | None = None

    def _repr_html_(self) -> str | None:
        return picture([self]) if self.plans else None


def make_plans(deployment: Deployment, *, compile_too: bool) -> Planned:
    """Makes a plan for each target. Raises: RuntimeError if the target's compiler is to be asked
    and not installed.
    """
    ways = (plan_by_formula, plan_by_compiler)[: 1 + compile_too]
    try:
        return Planned(deployment=deployment, plans=tuple(way(deployment) for way in ways))
    except CapacityError as error:
        return Planned(deployment=deployment, refusal=str(error).splitlines()[0])


def describe(planned: Planned, *, contexts: Sequence[int], sequences: int) -> str:
    """Shows one deployment's plans side by side. Units: GiB and KiB are 2**30 and 2**10 bytes."""
    deployment, plans = planned.deployment, planned.plans
    blueprint = deployment.blueprint
    context = blueprint.options.decode_context_parallel_size
    divided = f", decode_context_parallel_size {context}" if context > 1 else ""
    head = (
        f"{deployment.target}, tensor_parallel_size {blueprint.num_devices}{divided}, backend "
        f"{blueprint.backend} ({blueprint.backend_reason})"
    )
    if planned.refusal is not None:
        return f"{head}\n  does not fit: {planned.refusal}"
    lines = [
        head,
        _row("each device, GiB", [plan.source for plan in plans]),
        _row(f"limit: {deployment.memory.source}", [f"{plan.limit / GIB:.2f}" for plan in plans]),
    ]
    for name, attribute in _parts(plans).items():
        lines.append(_row(name, [f"{getattr(plan, attribute) / GIB:.2f}" for plan in plans]))
    lines.append(_row("tokens", [f"{plan.num_tokens:,}" for plan in plans]))
    for context in contexts:
        lines.append(
            _row(
                f"sequences of {context:,}", [f"{plan.num_sequences(context):,}" for plan in plans]
            )
        )
    if sequences:
        for context in contexts:
            fits = ["yes" if plan.num_sequences(context) >= sequences else "no" for plan in plans]
            lines.append(_row(f"{sequences} sequences of {context:,} fit", fits))
    return "\n".join([lines[0], *(f"  {line}" for line in lines[1:])])


def describe_model(deployment: Deployment, *, contexts: Sequence[int], sequences: int) -> str:
    """Describes what does not depend on the chips: the cache of a token, and of a sequence or
    several.
    """
    blueprint = deployment.blueprint
    spec, token = blueprint.spec, blueprint.token_nbytes
    heads = (
        f"{spec.query_heads} query and {spec.groups[0].num_kv_heads} KV heads of {spec.head_dim}"
    )
    if blueprint.kv_copies:
        heads += f" ({blueprint.kv_copies} copies of each)"
    if not spec.kv_layers:
        heads = "no attention"
    elif spec.groups[0].latent_dim is not None:
        ranks = " or ".join(map(str, sorted({group.latent_dim or 0 for group in spec.groups})))
        heads = f"{spec.query_heads} query heads over one latent row of {ranks}"
    kinds = (
        f"weights {blueprint.dtype}, KV cache of {spec.token_numbers} numbers per token and layer "
        f"in {blueprint.kv_cache_dtype}, kv_policy {blueprint.limits.kv_policy}"
    )
    lines = [f"{deployment.name}: {spec.family}, {spec.num_layers} layers, {heads}, {kinds}"]
    lines.append(_row("KV cache of a token", [f"{token / 2**10:.2f} KiB"]))
    is_whole = blueprint.num_devices > 1 and blueprint.placement.context == 1
    if spec.groups and spec.groups[0].latent_dim and is_whole:
        own = token / blueprint.num_devices / 2**10
        lines.append(_row("all of it on each device", [f"{own:.2f} KiB"]))
    if spec.states:
        nbytes = blueprint.slot_nbytes * blueprint.num_devices
        lines.append(_row("recurrent state of a row", [f"{nbytes / 2**10:.2f} KiB"]))
    for context in contexts:
        nbytes = blueprint.sequence_nbytes(context)
        lines.append(_row(f"of a sequence of {context:,}", [f"{nbytes / GIB:.2f} GiB"]))
        if sequences:
            lines.append(_row(f"of {sequences} of them", [f"{sequences * nbytes / GIB:.2f} GiB"]))
    return "\n".join([lines[0], *(f"  {line}" for line in lines[1:])])


def _parts(plans: Sequence[Plan]) -> dict[str, str]:
    """Returns those of `PARTS` that the plans have: most models keep no recurrent states."""
    has_states = any(plan.state_bytes for plan in plans)
    return {name: x for name, x in PARTS.items() if x != "state_bytes" or has_states}


def _row(name: str, values: Sequence[str]) -> str:
    return f"{name:<42}" + "".join(f"{value:>14}" for value in values)


def as_json(planned: Planned, *, contexts: Sequence[int]) -> dict[str, Any]:
    """Sizes in bytes, of each device unless they are `token_nbytes`. num_sequences: how many fit,
    by their length in tokens.
    """
    blueprint = planned.deployment.blueprint
    return {
        "model": planned.deployment.name,
        "target": str(planned.deployment.target),
        "tensor_parallel_size": blueprint.num_devices,
        "decode_context_parallel_size": blueprint.options.decode_context_parallel_size,
        "backend": blueprint.backend,
        "backend_reason": blueprint.backend_reason,
        "dtype": blueprint.dtype,
        "kv_cache_dtype": blueprint.kv_cache_dtype,
        "token_nbytes": blueprint.token_nbytes,
        "limits": asdict(blueprint.limits),
        "does_not_fit": planned.refusal,
        "plans": [
            asdict(plan)
            | {"pool_bytes": plan.pool_bytes, "left": plan.left, "num_tokens": plan.num_tokens}
            | {"num_sequences": {context: plan.num_sequences(context) for context in contexts}}
            for plan in planned.plans
        ],
    }


def picture(planned: Sequence[Planned]) -> str:
    """Draws a stacked bar for each plan, as SVG. Raises: ValueError if there is none."""
    parts = _parts([plan for one in planned for plan in one.plans])
    bars = [
        (
            f"{one.deployment.target}, {plan.source}"
            if len(one.plans) > 1
            else str(one.deployment.target),
            [getattr(plan, attribute) for attribute in parts.values()],
            f"{plan.num_tokens:,} tokens, limit {plan.limit / GIB:.2f} GiB",
        )
        for one in planned
        for plan in one.plans
    ]
    if not bars:
        raise ValueError("expected a target that the model fits on, for a picture of its memory")
    return stacked_bars(f"{planned[0].deployment.name}: memory of each device", list(parts), bars)
