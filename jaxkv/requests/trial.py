"""Tries grammars in a process of their own, before one is followed here.

Whether a schema or grammar allows any text at all may take llguidance for ever, and memory without
end (of 22 patterns that all have to match, 10 s, of each more twice as long). No thread can be
ended while it is in such a call, a process can. It does not import jaxkv, and lives until its
standard input ends.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

CPU_S, WALL_S = 5, 20.0
"""Seconds that a grammar has, of a processor and by the clock; usual ones take milliseconds."""

MEMORY_BYTES = 4 * 2**30

TRIED = Path(__file__).with_name("trial_process.py")


class Trials:
    """Has the process, which is started with the first grammar and after each that ended it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = os.getpid()

    def check(self, source: str) -> None:
        """Returns once llguidance has made what it needs of a grammar in its own form. Raises:
        ValueError where that is not within the limits of time on a processor and of memory,
        TimeoutError where there was none to be had for so long.
        """
        is_made = False
        with self._lock:
            try:
                is_made = self._asked(self._running(), source)
            finally:
                # After a Ctrl-C too: its answer would be taken for the next one's.
                if not is_made:
                    self._end()
        if not is_made:
            raise ValueError(
                f"one that llguidance is ready to follow within {CPU_S} s of a processor and "
                f"{MEMORY_BYTES >> 30} GiB, which this one was not: leave out patterns that "
                f"all have to match, or make them shorter"
            )

    def close(self) -> None:
        """Ends the process, whatever it does; the next grammar has another one."""
        if (process := self._process) is not None and self._owner == os.getpid():
            process.kill()  # so nobody has the lock for long
        with self._lock:
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.communicate()

    @staticmethod
    def _asked(process: subprocess.Popen[str], source: str) -> bool:
        if process.stdin is None or process.stdout is None:
            raise ValueError("expected a process with pipes, got one without")
        # The process has a limit of its own; this one is for a machine that is too busy.
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(WALL_S, end)
        timer.start()
        try:
            process.stdin.write(json.dumps(source) + "\n")
            process.stdin.flush()
            is_made = process.stdout.readline() == "made\n"
        except BrokenPipeError:
            is_made = False
        finally:
            timer.cancel()
        if is_late.is_set() and not is_made:
            raise TimeoutError(
                f"a grammar that this machine has time to try within {WALL_S:.0f} s, which it was "
                f"too busy for: ask again"
            )
        return is_made

    def _running(self) -> subprocess.Popen[str]:
        """Returns the process; a fork has none."""
        if self._owner != os.getpid() or (self._process and self._process.poll() is not None):
            self._end()
            self._owner = os.getpid()
        if (process := self._process) is None:
            # In a session of its own, so that a Ctrl-C here does not reach it; -P: no file beside
            # it is taken for a module.
            process = subprocess.Popen(
                [sys.executable, "-P", str(TRIED), str(CPU_S), str(MEMORY_BYTES)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="ascii",
                start_new_session=True,
            )
            self._process = process
            if process.stdout is None or process.stdout.readline() != "ready\n":
                raise RuntimeError(f"expected {sys.executable} to import llguidance, it did not")
        return process


TRIALS = Trials()
atexit.register(TRIALS.close)
