"""Compiles in a process of its own: libtpu reads once where to dump, and may die of what it
compiles.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxkv.tools.chips import ENVIRONMENT
from jaxkv.tools.engine_job import EngineJob, compile_engine
from jaxkv.tools.kernels import Case, count

DUMP = (
    "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final.*"
)
"""What `schedule.read_schedule` reads; all other passes are 26 times as much text, whose writing
takes a third of the time.
"""

JOBS: dict[str, Any] = {"Case": Case, "EngineJob": EngineJob}


def compile_apart(job: Case | EngineJob) -> dict[str, Any]:
    """Returns what `count` or `compile_engine` found and `compile_s`; where the compiler or the
    kernels refuse, `reason` only.

    Raises: ValueError with the message of one that the caller can mend.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | ENVIRONMENT | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
        if isinstance(job, Case):
            environment["LIBTPU_INIT_ARGS"] = DUMP.format(folder)
        # The same jaxkv and kernels as here, wherever they were imported from.
        root = str(Path(__file__).parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [root, os.environ.get("PYTHONPATH")])
        )
        command = [sys.executable, "-P", "-m", "jaxkv.tools.apart"]
        given = json.dumps([type(job).__name__, asdict(job), folder])
        done = subprocess.run(
            command, input=given, env=environment, capture_output=True, text=True, check=False
        )
    found = _read(done)
    if isinstance(job, EngineJob) and "refused" in found:
        raise ValueError(f"{job.target}: {found['refused']}")
    return found | {"compile_s": round(time.perf_counter() - started, 1)}


def _read(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    if done.returncode < 0:
        return {"reason": f"the compiler died of signal {-done.returncode}"}
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    return {"reason": f"the compiling process ended with status {done.returncode}: {last}"}


def main() -> None:
    """Runs the other side of `compile_apart`."""
    name, given, folder = json.load(sys.stdin)
    job = JOBS[name](**{key: _as_tuple(value) for key, value in given.items()})
    from jax.errors import JaxRuntimeError

    from jaxkv.errors import CapacityError

    try:
        found = count(job, Path(folder)) if isinstance(job, Case) else compile_engine(job)
    except (CapacityError, JaxRuntimeError) as error:
        found = {"reason": str(error)}
    except (ValueError, NotImplementedError, OSError) as error:
        # What a kernel does not take is found out here; an engine's front door has refused what the
        # caller gave.
        found = {"reason" if isinstance(job, Case) else "refused": str(error)}
    print(json.dumps(found))


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


if __name__ == "__main__":
    main()
