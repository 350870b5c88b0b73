"""`jaxkv selftest`: tries the attention kernels of this machine's device beside XLA, at shapes that
have every mechanism between them; on a CPU in Pallas' interpreters.

All runs in a process of its own, which has the device; the command itself never looks for one. So
a kernel that hangs or dies ends that process, and the next case begins in another.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax

    from jaxkv.build.selftest import Verdict
    from jaxkv.ops.attention import Backend
    from jaxkv.programs.selftest import Case

START_S = 300.0
"""A process that is silent for so long beyond a case's limit is ended."""

MOST_S = 86400
"""Longest limit: a day. No thread can wait for ever."""

ENVIRONMENT = {"PJRT_NPROC": "16"}
"""Threads of a GPU that wait for each other in the interpreter each hold one of XLA's."""

Message = dict[str, Any]


def run(
    *,
    kernel: str | None,
    every: bool,
    as_json: bool,
    limit_s: float | None,
) -> int:
    """Runs the command: a line for each case, or JSON. Returns 1 if something failed, else 0.

    Raises: ValueError for a limit or kernel that cannot be, RuntimeError where there is no device.
    """
    if limit_s is not None and not 0 < limit_s <= MOST_S:
        raise ValueError(f"--limit: expected seconds above 0, at most {MOST_S}, got {limit_s:g}")
    given = {"kernel": kernel, "every": every, "limit_s": limit_s}
    head, *found = _shown(_messages(given), as_json)
    failed = [one for one in found if one["fault"] is not None]
    if as_json:
        print(json.dumps(head | {"found": found}, indent=1))
        return int(bool(failed))
    for one in failed:
        print(f"error: {one['backend']}, {one['case']}: {one['fault']}")
        if one["report"] is not None:
            print(f"  for an issue: {one['report']}")
    print(f"{len(found)} tried, {len(failed)} failed.")
    return int(bool(failed))


def _shown(messages: Iterator[Message], as_json: bool) -> Iterator[Message]:
    for message in messages:
        if not as_json:
            print(_line(message), flush=True)
        yield message


def _line(message: Message) -> str:
    if "cases" in message:
        return f"{message['device']} ({message['versions']}): {len(message['cases'])} cases"
    verdict = "ok" if message["fault"] is None else "FAILED"
    times = f"compiled in {message['compile_s']:.1f} s, ran {message['run_s'] * 1e3:.1f} ms"
    return f"{verdict:8s}{message['backend']:19s}{message['case']:78s}  {times}"


def _messages(given: Message) -> Iterator[Message]:
    """Yields what the other processes say: the device and the cases first, then a verdict on each.
    One that a process did not live to give is on its end.
    """
    cases: list[list[str]] | None = None
    num_done = 0
    while cases is None or num_done < len(cases):
        last = "it said nothing"
        with _start(given | {"skip": num_done}) as process:
            for line in _lines(process, START_S + (given["limit_s"] or START_S)):
                if not line.startswith("{"):
                    last = line.strip() or last
                    continue
                message = json.loads(line)
                if "cases" not in message:
                    num_done += 1
                elif cases is not None:  # of a second process
                    continue
                else:
                    cases = message["cases"]
                yield message
        how = f"the process ended with status {process.returncode}: {last}"
        if cases is None:
            raise RuntimeError(f"selftest: {how}")
        if num_done < len(cases):
            backend, case = cases[num_done]
            nothing = {"compile_s": 0.0, "run_s": 0.0, "trace": None, "report": None}
            yield {"backend": backend, "case": case, "fault": how} | nothing
            num_done += 1


def _start(given: Message) -> subprocess.Popen[str]:
    # The same jaxkv and kernels as here, wherever they were imported from.
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "jaxkv.tools.selftest", json.dumps(given)],
        env=ENVIRONMENT | os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _lines(process: subprocess.Popen[str], silent_s: float) -> Iterator[str]:
    """Yields the lines that a process writes, and ends it where there is none for too long."""
    if process.stdout is None:
        raise TypeError("expected a process whose output is piped")
    while True:
        timer = Timer(silent_s, process.kill)
        timer.start()
        try:
            line = process.stdout.readline()
        finally:  # or else an interrupted command would wait for it
            timer.cancel()
        if not line:
            return
        yield line


# --- the other side


def main(given: Message) -> int:
    """Tries what is left, and says what comes out as lines of JSON. Raises: as `_jobs`."""
    import jax

    from jaxkv.build.selftest import LIMIT_S, find_verdict, report_folder
    from jaxkv.errors import KernelError

    device = jax.devices()[0]
    jobs = list(_jobs(device, given["kernel"], every=given["every"]))
    named = [(name, str(case)) for name, _, case in jobs]
    _say({"device": device.device_kind, "versions": f"jax {jax.__version__}", "cases": named})
    folder = report_folder(device)
    for name, backend, case in jobs[given["skip"] :]:
        try:
            verdict = find_verdict(
                case, name, backend, device, folder, again=True, limit_s=given["limit_s"] or LIMIT_S
            )
        except KernelError as error:
            print(error, flush=True)
            os._exit(3)  # whatever waits for the device would wait for ever
        _say(_said(verdict))
    return 0


def _said(verdict: Verdict) -> Message:
    """Returns a verdict as a message, which names the report of a fault, where one was written."""
    report = verdict.report if verdict.fault else None
    return asdict(verdict) | {"report": None if report is None else str(report)}


def _say(message: Message) -> None:
    print(json.dumps(message), flush=True)


def _jobs(
    device: jax.Device, kernel: str | None, *, every: bool
) -> Iterator[tuple[str, Backend, Case]]:
    """Lists (name, backend, case). Raises: ValueError for kernels that are not for this device."""
    import jax

    from jaxkv.tools.selftest_shapes import GPU_INTERPRETED_FROM, PLATFORMS, SHAPES

    on_cpu = device.platform == "cpu"
    kernels = [one for one, platform in PLATFORMS.items() if platform == device.platform or on_cpu]
    if kernel is None and on_cpu and jax.__version_info__ < GPU_INTERPRETED_FROM:
        kernels.remove("mosaic_gpu")
    if not kernels or kernel not in (None, *kernels):
        raise ValueError(
            f"selftest: expected one of {', '.join(PLATFORMS)} on its own device or on a CPU, got "
            f"{kernel or 'none'} on {device.device_kind}"
        )
    for shape in SHAPES:
        if shape.kernel not in kernels or kernel not in (None, shape.kernel):
            continue
        if every or shape.is_usual:
            backend, cases = shape.backend, shape.cases()
            if on_cpu:
                backend, cases = shape.interpreted()
            for case in cases:
                yield shape.name, backend, case


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
