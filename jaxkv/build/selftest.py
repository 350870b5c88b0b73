"""Lets an engine have a kernel only where it has been seen to be right: before its first use with
these heads, on this kind of device and with these versions, it is tried there beside XLA
(`programs.selftest`). What came out is remembered in the user's cache folder.

The trial runs in the engine's own process, in a thread that is waited for. A process of its own, as
`jaxkv selftest` has, would end a kernel that hangs and then go on; but a TPU is one process's at a
time, and by the time that an engine is made this process has the device: `LLM` has asked what it
is, a notebook has used it. So nothing can be done about a device that hangs but to say so and to
remember it: that engine's start fails, and the next one takes XLA. While a kernel is tried a locked
file says so. One that is there and not locked is of a process that died of it, or was killed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from threading import Thread

import jax

from jaxkv.build.blueprint import Blueprint
from jaxkv.build.compile_cache import open_folder
from jaxkv.build.options import EngineOptions
from jaxkv.errors import Catch, KernelError
from jaxkv.files import lock, write_whole
from jaxkv.kv.codecs import Codec
from jaxkv.models.paged import heads_of
from jaxkv.ops.attention import Backend, Heads
from jaxkv.ops.attention.base import of_part
from jaxkv.ops.attention.xla import Xla
from jaxkv.processes import num_processes, of_all, own_device
from jaxkv.programs.selftest import Case, cases_of, try_case
from jaxkv.version import VERSION, digest_of_sources

LOG = logging.getLogger("jaxkv")

LIMIT_S = 300.0
"""A trial takes 1 to 3 s, and some 30 s of compiling: one that takes longer has hung."""

LONGEST, LONGEST_BYTES = 8200, 64 << 20
"""Tokens of the longest row that is tried: more than what a kernel has on its way at a time. With
large heads fewer, of which float32 vectors take so much.
"""

HUNG = "it did not end"
DIED = "the process that tried it died, or was killed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Holds what is known of a case: what is wrong, None if nothing is, seconds of compiling and of
    one run (0 of one that did not end), the traceback of an exception, and the file that says all
    this; None where nothing can be written.
    """

    case: str
    backend: str
    fault: str | None
    compile_s: float = 0.0
    run_s: float = 0.0
    trace: str | None = None
    report: Path | None = None


def make_tested(make: Callable[[EngineOptions], Blueprint], options: EngineOptions) -> Blueprint:
    """Makes the blueprint of an engine on devices that are here: a kernel that fails its self-test
    makes "auto" take XLA.

    Raises: as `make`, and KernelError for a kernel that was asked for by name and fails, or that
    hangs.
    """
    blueprint = make(options)
    if not needs_trial(blueprint):
        return blueprint
    verdict = next((one for one in _verdicts(blueprint) if one.fault is not None), None)
    if num_processes(blueprint.placement.devices) > 1 and of_all(verdict is not None).any():
        verdict = verdict or Verdict(
            case="on another host", backend=blueprint.backend, fault="its own log says how"
        )
    if verdict is None:
        return replace(blueprint, backend_reason=f"{blueprint.backend_reason}, self-test passed")
    why = (
        f"{verdict.backend} failed its self-test ({verdict.case}): {verdict.fault}; report, which "
        f"is to be removed to try again: {verdict.report or 'none, no folder can be written'}"
    )
    if options.backend != "auto":
        raise KernelError(f"backend={options.backend!r}: {why}")
    LOG.warning("backend: xla, as %s", why)
    instead = make(replace(options, backend="xla"))
    reason = f"chosen by auto on a {blueprint.platform}: {why}"
    return replace(instead, options=options, backend_reason=reason)


def needs_trial(blueprint: Blueprint) -> bool:
    """Says whether the engine has kernels, on a device. On a CPU they are interpreted, in tests."""
    return blueprint.platform != "cpu" and not isinstance(blueprint.attention, Xla)


def _verdicts(blueprint: Blueprint) -> Iterator[Verdict]:
    """Tries the kernel with what each KV group asks for, until somebody has heard enough."""
    device, count = own_device(blueprint.placement.devices), blueprint.num_devices
    folder, spec, cases = report_folder(device), blueprint.spec, []
    of_groups = zip(spec.groups, heads_of(spec, num_devices=count), blueprint.codecs, strict=True)
    for group, heads, codec in of_groups:
        num_parts = group.num_parts(count)
        token_parts = blueprint.placement.token_parts(num_parts)
        attention = blueprint.attention_over(num_parts)
        own, page_size = of_part(heads, blueprint.limits.block_size, token_parts)
        cases += [(case, attention) for case in make_cases(own, codec, page_size)]
    for case, attention in dict.fromkeys(cases):
        yield find_verdict(case, blueprint.backend, attention, device, folder)


def make_cases(heads: Heads, codec: Codec, page_size: int) -> list[Case]:
    """Returns the cases for a device, whose longest row is longer than what a kernel has on its way
    at a time.
    """
    token_bytes = 4 * 2 * heads.num_kv_heads * heads.head_dim
    return cases_of(heads, codec, page_size, longest=min(LONGEST, LONGEST_BYTES // token_bytes))


def report_folder(device: jax.Device) -> Path | None:
    """Returns where verdicts are kept; None where the user has no folder for them."""
    try:
        return open_folder(device, "selftest")
    except (OSError, RuntimeError):  # RuntimeError: there is no home directory
        return None


def find_verdict(
    case: Case,
    name: str,
    backend: Backend,
    device: jax.Device,
    folder: Path | None,
    *,
    again: bool = False,
    limit_s: float = LIMIT_S,
) -> Verdict:
    """Returns what is remembered in the folder, or else tries the kernel and keeps what came out.

    again: what is remembered does not count. Raises: KernelError where the kernel does not end
    within `limit_s`, or leaves a device that does nothing any more: this process cannot go on.
    """
    if folder is None:
        verdict, ended = _watch(case, name, backend, device, limit_s)
    else:
        report = folder / f"{_key(case, backend)}.json"
        if not again and (known := _read(report)) is not None:
            return known
        with _marked(report.with_suffix(".running")) as died:
            if died and not again:
                verdict, ended = Verdict(case=str(case), backend=name, fault=DIED), True
            else:
                verdict, ended = _watch(case, name, backend, device, limit_s)
            if _write(report, verdict, device):
                verdict = replace(verdict, report=report)
    if not ended:
        then = f"backend='auto' then takes XLA (report: {verdict.report})"
        if verdict.report is None:
            then = "with backend='xla', as no folder can be written that would remember it"
        raise KernelError(
            f"{name}: self-test ({verdict.case}): {verdict.fault}; this process cannot go on with "
            f"the device. Start again: {then}"
        )
    return verdict


def _watch(
    case: Case, name: str, backend: Backend, device: jax.Device, limit_s: float
) -> tuple[Verdict, bool]:
    """Tries it in a thread. Returns the verdict, and whether the device can go on."""
    found: list[tuple[Verdict, bool]] = []

    def work() -> None:
        with Catch() as caught:
            trial = try_case(case, backend, device)
        if caught.error is None:
            verdict = Verdict(case=str(case), backend=name, **trial._asdict())
            found.append((verdict, True))
            return
        lines = str(caught.error).strip().splitlines() or [""]
        verdict = Verdict(
            case=str(case),
            backend=name,
            fault=f"{type(caught.error).__name__}: {lines[0]}",
            trace="".join(traceback.format_exception(caught.error)),
        )
        with Catch() as dead:  # an access that is out of bounds ends all work on a GPU
            jax.block_until_ready(jax.device_put(0, device) + 1)
        found.append((verdict, dead.error is None))

    thread = Thread(target=work, name="jaxkv-selftest", daemon=True)
    thread.start()
    thread.join(limit_s)
    hung = Verdict(case=str(case), backend=name, fault=f"{HUNG} within {limit_s:g} s")
    return found[0] if found else (hung, False)


# --- what is remembered


def _key(case: Case, backend: Backend) -> str:
    """Names what a verdict depends on beside the device and its runtime, which the folder does."""
    versions = (VERSION, version("jax"), version("jaxlib"), digest_of_sources())
    checks = os.environ.get("JAXKV_KERNEL_CHECKS")
    return hashlib.sha256(repr((case, backend, versions, checks)).encode()).hexdigest()[:24]


def _read(report: Path) -> Verdict | None:
    """Returns what a report says; None if there is none, or one that is damaged."""
    try:
        known = json.loads(report.read_text())["verdict"]
        return Verdict(**known | {"report": report})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(report: Path, verdict: Verdict, device: jax.Device) -> bool:
    """Writes all that whoever looks into a fault will ask for; returns whether it could."""
    about = {
        "verdict": asdict(verdict) | {"report": None},
        "device": device.device_kind,
        "runtime": device.client.platform_version,
        "versions": {"jaxkv": VERSION} | {one: version(one) for one in ("jax", "jaxlib")},
        "flags": {one: os.environ.get(one) for one in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")},
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    try:
        write_whole(report, [json.dumps(about, indent=1).encode() + b"\n"])
    except OSError:  # a full disk is no reason not to start
        return False
    return True


@contextmanager
def _marked(path: Path) -> Iterator[bool]:
    """Leaves a file as long as its block runs; yields whether there was one of a process that has
    died. Where another process is trying the same at the moment there is nothing to leave, nor
    where files cannot be locked, as on some network file systems.
    """
    file = _locked(path)
    if file is None:
        yield False
        return
    try:
        died = os.fstat(file).st_size > 0
        with suppress(OSError):  # the disk is full
            os.write(file, b"running\n")
        yield died
    finally:  # also for an interrupt, which says nothing about the kernel
        with suppress(OSError):
            os.ftruncate(file, 0)  # somebody may have opened it and lock it once it is closed here
            path.unlink(missing_ok=True)
        os.close(file)


def _locked(path: Path) -> int | None:
    """Opens and locks a file; None where that cannot be done now."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        return None
    try:
        lock(file)
    except OSError:
        os.close(file)
        return None
    return file
