"""Compiles kernels and an engine's programs for chips that need not be here, and says what is wrong
with them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata, resources
from importlib.util import find_spec
from typing import Any

from jaxkv.tools.apart import compile_apart
from jaxkv.tools.chips import parse_target
from jaxkv.tools.engine_job import EngineJob
from jaxkv.tools.kernels import KERNELS, QUERIES, SHAPES, Case, case_of

TARGETS = ("v5e", "v6e", "tpu7x")
AT_ONCE = 2
"""Compilations at a time: each takes a core and up to some GiB."""

QUANTISED = ("int8", "int4")
"""What the kernels take of KV dtypes beside the model's own."""

USUAL = (("8b", "bfloat16"), ("70b-tp8", "bfloat16"), ("h64-tp8", "bfloat16"), ("8b", "int4"))
"""Shapes and dtypes that are checked where nothing is said."""

ALL = (
    *((name, "bfloat16") for name in SHAPES),
    *(("8b", dtype) for dtype in ("float32", *QUANTISED)),
)
"""Those of --all."""

SECONDS = {"decode": 8.0, "prefill": 25.0, "engine": 90.0}
"""A job is estimated at so much until jobs have been measured; on a machine that does nothing
else.
"""

Job = Case | EngineJob


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Holds what was found about one job, and what of it must not be."""

    job: Job
    found: dict[str, Any]
    faults: list[str]

    def as_json(self) -> dict[str, Any]:
        return asdict(self.job) | self.found | {"ok": not self.faults, "faults": self.faults}


def named_cases(
    targets: Sequence[str], names: Iterable[str], kernels: Iterable[str], **others: Any
) -> list[Case]:
    """Makes the cases of the named shapes on each chip of the targets. Raises: ValueError for a
    name that is not known.
    """
    for name in names:
        if name not in SHAPES:
            raise ValueError(f"shape: expected one of {', '.join(SHAPES)}, got {name!r}")
    chips = dict.fromkeys(parse_target(target).kind for target in targets)
    return [
        case_of(kernel, name, chip, **others)
        for chip in chips
        for name in names
        for kernel in kernels
    ]


def check(
    cases: Sequence[Case],
    engines: Sequence[EngineJob],
    *,
    kernels: Sequence[str],
    context: int | None,
    say: Callable[[str], None],
) -> list[Verdict]:
    """Compiles all of them, without cases these kernels at the engines' own shapes too, each in a
    process of its own; `say` is told of each.

    Raises: RuntimeError naming what to install; ValueError with what an engine's limits or config
    have wrong.
    """
    if find_spec("libtpu") is None:
        raise RuntimeError(
            'check: the TPU compiler is missing: pip install "jaxkv[tpu]" (Linux on x86-64)'
        )
    # What the caller has wrong shows in the engines, within seconds.
    verdicts = _run([*engines, *cases], say)
    if cases:
        return verdicts
    own = (
        case
        for verdict in verdicts
        if isinstance(verdict.job, EngineJob)
        for case in _own_cases(verdict, kernels, context)
    )
    return verdicts + _run(list(dict.fromkeys(own)), say)


def _run(jobs: Sequence[Job], say: Callable[[str], None]) -> list[Verdict]:
    if not jobs:
        return []
    found: dict[Job, dict[str, Any]] = {}
    left = sum(map(_expected_s, jobs))
    say(f"{len(jobs)} to compile, {AT_ONCE} at a time: about {_about(left / AT_ONCE)}")
    taken = expected = 0.0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        waiting = {pool.submit(compile_apart, job): job for job in jobs}
        try:
            for done in as_completed(waiting):
                job = waiting[done]
                found[job] = done.result()
                taken += found[job]["compile_s"]
                expected += _expected_s(job)
                left -= _expected_s(job)
                rest = _about(left * taken / expected / AT_ONCE)
                say(
                    f"[{len(found)}/{len(jobs)}] {job}: {found[job]['compile_s']} s"
                    + (f"; about {rest} left" if len(found) < len(jobs) else "")
                )
        finally:
            pool.shutdown(cancel_futures=True)
    return [judge(job, found[job]) for job in jobs]


def _expected_s(job: Job) -> float:
    if isinstance(job, Case):
        return SECONDS[job.kernel]
    return SECONDS["engine"]


def _about(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def judge(job: Job, found: dict[str, Any]) -> Verdict:
    if "reason" in found:
        return Verdict(job=job, found=found, faults=[found["reason"].splitlines()[0]])
    if isinstance(job, Case):
        budget = budget_of(job)
        return Verdict(
            job=job,
            found=found | {"budget": budget.get("ratio")},
            faults=_kernel_faults(found, budget),
        )
    faults = [
        f"{program['name']}: copies {copy['argument']}{_into(copy)}, {_mib(copy['nbytes'])} MiB, "
        f"{_where(copy['depth'])}"
        f" ({copy['instruction']})"
        for program in found["programs"]
        for copy in program["copies"]
    ]
    return Verdict(job=job, found=found, faults=faults)


def _kernel_faults(found: dict[str, Any], budget: dict[str, Any]) -> list[str]:
    """Lists what is past the kernel's budget; without one what was counted is only shown."""
    if not budget:
        return []
    faults = []
    if found["spills"] > budget["spills"]:
        faults.append(
            f"{found['spills']} spills of vector registers, expected at most {budget['spills']}"
        )
    if found["ratio"] > budget["ratio"]:
        faults.append(f"compute/DMA ratio {found['ratio']}, expected at most {budget['ratio']}")
    for name, one in found["at"].items():
        most = budget.get("at", {}).get(name)
        if most is not None and one["ratio"] > most:
            faults.append(f"compute/DMA ratio {one['ratio']} at {name}, expected at most {most}")
    if found["tiles"] != budget["tiles"]:
        faults.append(f"tiles {found['tiles']}, expected {budget['tiles']}, which the sweep found")
    return faults


def budget_of(case: Case) -> dict[str, Any]:
    """Returns the committed entry of kernels_pallas/tuned for this very case; nothing if there is
    none, or with other tiles.
    """
    path = resources.files("kernels_pallas") / "tuned" / f"{case.chip}.json"
    if case.tiles or not path.is_file():
        return {}
    given = json.loads(json.dumps(asdict(case)))
    entries = json.loads(path.read_text())["kernels"]
    return next(
        (one for one in entries if all(given[key] == value for key, value in one["case"].items())),
        {},
    )


def _own_cases(verdict: Verdict, kernels: Sequence[str], context: int | None) -> list[Case]:
    """Returns the kernels at each shape of the engine's KV groups, if it takes them."""
    found, engine = verdict.found, verdict.job
    if found.get("backend") != "pallas_tpu" or not isinstance(engine, EngineJob):
        return []
    chip = parse_target(engine.target).kind
    cases = []
    for one in found["attention"]:
        shape = tuple(one["heads"])
        num_heads, kv_heads, head_dim, *_ = shape
        name = f"{num_heads}/{kv_heads}x{head_dim}"
        name = next((known for known, one in SHAPES.items() if one == shape), name)
        given = {"context": context, "dtype": found["kv_dtype"], **one, "heads": shape}
        # Chunks over parts of pages run on XLA.
        own = [kernel for kernel in kernels if kernel == "decode" or not one["is_part"]]
        cases += [case_of(kernel, name, chip, **given) for kernel in own]
    return cases


def table(verdicts: Sequence[Verdict]) -> str:
    """Formats what people read: engines first, then kernels, then one line for each fault."""
    engines = [
        line
        for verdict in verdicts
        if isinstance(verdict.job, EngineJob)
        for line in _engine_lines(verdict)
    ]
    rows = [_kernel_row(verdict) for verdict in verdicts if isinstance(verdict.job, Case)]
    head = (
        "kernel",
        "shape",
        "chip",
        "dtype",
        "page",
        "bundles",
        "DMA MiB",
        "ratio",
        "budget",
        "spills",
        "VMEM MiB",
    )
    kernels = _aligned([(*head, ""), *rows]) if rows else []
    faults = [f"error: {verdict.job}: {fault}" for verdict in verdicts for fault in verdict.faults]
    num_failed = sum(bool(verdict.faults) for verdict in verdicts)
    last = f"{len(verdicts)} checked, {num_failed} failed ({versions()}). Compiled, not run."
    return "\n".join([*engines, *kernels, *faults, last])


def _engine_lines(verdict: Verdict) -> list[str]:
    found, engine = verdict.found, verdict.job
    if "reason" in found:
        return [f"{engine}: failed", *found["reason"].splitlines(), ""]
    devices = f"{found['num_devices']} devices" if found["num_devices"] > 1 else "1 device"
    head = f"{engine}: {devices}, {found['backend']} ({found['backend_reason']})"
    rows = [("program", "arguments", "aliased", "temporaries", "code", "MiB; collectives", "")]
    for program in found["programs"]:
        names = ("argument_bytes", "aliased_bytes", "temporary_bytes", "code_bytes")
        sizes = tuple(_mib(program[name]) for name in names)
        verdict_of = f"{len(program['copies'])} large copies" if program["copies"] else "ok"
        rows.append((program["name"], *sizes, _collectives(program["collectives"]), verdict_of))
    return [head, *found["memory"], *_aligned(rows), ""]


def _collectives(found: Sequence[dict[str, Any]]) -> str:
    def one(kind: str, per_layer: bool, count: int, nbytes: int) -> str:
        return f"{count} {kind} {'per layer' if per_layer else 'outside layers'} {_mib(nbytes)} MiB"

    return ", ".join(one(**each) for each in found) or "none"


def _kernel_row(verdict: Verdict) -> tuple[str, ...]:
    case, found = verdict.job, verdict.found
    if not isinstance(case, Case):
        raise TypeError(f"expected a kernel's case, got {case}")
    head = (case.kernel, case.name, case.chip, case.dtype, str(case.page_size))
    if "reason" in found:
        return (*head, *("-",) * 6, "refused")
    ratios = (_number(found["ratio"]), _number(found["budget"]))
    sizes = (_mib(found["vmem_bytes"]), "failed" if verdict.faults else "ok")
    return (
        *head,
        str(found["bundles"]),
        _mib(found["dma_bytes"]),
        *ratios,
        str(found["spills"]),
        *sizes,
    )


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # Numbers to the right.
    texts = {0, len(widths) - 1} | {
        i for i in range(len(widths)) if any(not _is_number(row[i]) for row in rows[1:])
    }
    pads = [str.ljust if i in texts else str.rjust for i in range(len(widths))]
    lines = (
        "  ".join(pad(cell, n) for pad, cell, n in zip(pads, row, widths, strict=True))
        for row in rows
    )
    return [line.rstrip() for line in lines]


def _is_number(text: str) -> bool:
    return text.replace(".", "").replace(",", "").isdigit() or text == "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f}"


def _into(copy: dict[str, Any]) -> str:
    return " into VMEM before it is used" if copy["into_vmem"] else ""


def _where(depth: int) -> str:
    return f"inside {depth} loop{'s' if depth > 1 else ''}" if depth else "once per call"


def versions() -> str:
    return ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "libtpu"))


def _kernel_dtype(model: str | None, options: dict[str, Any]) -> str:
    """Returns the dtype of the pages of kernels at named shapes. Raises: ValueError."""
    if not model and (more := options.keys() - {"dtype", "kv_cache_dtype", "block_size"}):
        raise ValueError(f"{', '.join(sorted(more))}: expected a MODEL beside it, got none")
    given = options.get("kv_cache_dtype", "auto")
    if given == "auto" or (model and given not in QUANTISED):
        given = options.get("dtype", "auto")
    given = "bfloat16" if given == "auto" else given
    if given not in (known := ("bfloat16", "float32", *QUANTISED)):
        raise ValueError(f"kv_cache_dtype: expected one of {', '.join(known)}, got {given!r}")
    return str(given)


def run(
    model: str | None,
    *,
    targets: Sequence[str],
    options: dict[str, Any],
    every: bool = False,
    shapes: Sequence[str] = (),
    kernels: Sequence[str] | None = None,
    context: int | None = None,
    as_json: bool = False,
) -> int:
    """Runs the command: a table or JSON, progress on standard error. Returns 1 if something failed,
    else 0.

    options: those of `deploy` that were given; without a model their dtype, kv_cache_dtype and
    block_size are those of the kernels. every: all programs of an engine, and without a model
    kernels at all named shapes.
    """
    targets = [str(parse_target(target)) for target in targets]
    least = QUERIES if "prefill" in (kernels or KERNELS) else 1
    if context is not None and context < least:
        raise ValueError(f"--context: expected at least {least}, got {context}")
    given = _kernel_dtype(model, options)
    if shapes or model:
        wanted = [(name, given) for name in shapes]
    elif given == "bfloat16":
        wanted = list(ALL if every else USUAL)
    else:
        wanted = list(dict.fromkeys((name, given) for name, _ in (ALL if every else USUAL)))
    cases_of = partial(named_cases, page_size=options.get("block_size"), context=context)
    cases = [
        case
        for name, dtype in wanted
        for case in cases_of(targets, [name], kernels or KERNELS, dtype=dtype)
    ]
    engines = [
        EngineJob(model=model, target=to, options=tuple(options.items()), every=every)
        for to in targets
        if model
    ]
    verdicts = check(
        cases,
        engines,
        kernels=kernels or KERNELS,
        context=context,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if as_json:
        checked = [verdict.as_json() for verdict in verdicts]
        print(json.dumps({"versions": versions(), "checked": checked}, indent=1))
    else:
        print(table(verdicts))
    return int(any(verdict.faults for verdict in verdicts))
