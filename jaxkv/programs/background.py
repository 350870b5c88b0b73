"""Compiles in a thread of its own, so that the first request need not wait for the last program."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterable
from itertools import chain, zip_longest
from threading import Event, Thread
from weakref import WeakMethod, WeakSet

import jax  # noqa: F401

Key = tuple[str, int]
"""A kind of program and its size."""


class Background:
    """Gives `make`, a method that raises nothing, one key after the other, until there are no more
    or its object has gone; then calls `at_end`.

    The thread is a daemon that ends with the program that it is at: nothing interrupts a compiler,
    and JAX must not take its backends down under one.
    """

    def __init__(
        self, wanted: Iterable[Key], make: Callable[[Key], None], *, at_end: Callable[[], None]
    ) -> None:
        self._stopping = Event()
        self._thread = Thread(
            target=_run,
            args=(tuple(wanted), WeakMethod(make), self._stopping, at_end),
            name="jaxkv-compile",
            daemon=True,
        )
        _RUNNING.add(self)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Returns when it has ended."""
        self._thread.join()

    def stop(self) -> None:
        """Ends it with the program that it is at, and waits for that."""
        self._stopping.set()
        self._thread.join()


class Progress:
    """Writes one line on the terminal, if standard error is one, and takes it away again."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._is_shown = False

    def show(self, number: int) -> None:
        if sys.stderr is not None and sys.stderr.isatty():
            self._is_shown = True
            sys.stderr.write(f"\rcompiling {min(number, self._total)}/{self._total}")
            sys.stderr.flush()

    def clear(self) -> None:
        if self._is_shown:
            self._is_shown = False
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def likely_first(keys: Iterable[Key]) -> list[Key]:
    """Orders programs as they are likely wanted: of each kind the smallest, then of each the next;
    at the end the kinds of which there is one only. A prompt is often short, and often alone.
    """
    kinds: dict[str, list[Key]] = {}
    for key in keys:
        kinds.setdefault(key[0], []).append(key)
    several = [sorted(one) for one in kinds.values() if len(one) > 1]
    single = [key for one in kinds.values() if len(one) == 1 for key in one]
    return [key for key in chain(*zip_longest(*several), single) if key is not None]


def _run(
    wanted: tuple[Key, ...],
    make: WeakMethod,
    stopping: Event,
    at_end: Callable[[], None],
) -> None:
    try:
        for key in wanted:
            call = make()
            if call is None or stopping.is_set():
                return
            call(key)
            del call
    finally:
        at_end()


_RUNNING: WeakSet[Background] = WeakSet()


def _stop_all() -> None:
    for one in list(_RUNNING):
        one.stop()


# What is registered last is called first: JAX has registered when it was imported, above.
atexit.register(_stop_all)
