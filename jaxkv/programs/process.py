"""Refuses to compute in a process that was forked from one in which JAX had started."""

from __future__ import annotations

import os

from jax._src import xla_bridge


class _Forks:
    """Knows whether this process is such a fork, by what it sees of every fork."""

    def __init__(self) -> None:
        self.is_one = False
        self._had_started = False
        os.register_at_fork(before=self._begin, after_in_child=self._end)

    def _begin(self) -> None:
        self._had_started = xla_bridge.backends_are_initialized()

    def _end(self) -> None:
        self.is_one = self._had_started


_FORKS = _Forks()


def is_forked() -> bool:
    """Tells whether this process was forked from one in which JAX had started: XLA's threads are
    in that one only, and what waits for them here waits for ever.
    """
    return _FORKS.is_one


def check_process() -> None:
    """Raises RuntimeError in such a process, where to compute would wait for ever."""
    if is_forked():
        raise RuntimeError(
            "expected a process of its own, got one that was forked when JAX had started, which "
            "has none of its threads: fork before anything computes, or start it with "
            'multiprocessing.get_context("spawn")'
        )
