"""Ends a chat template that takes too long."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

TEMPLATE_S = 5.0
"""Seconds that a chat template has for one conversation; usual ones take milliseconds."""


class TemplateTimeoutError(Exception):
    """A chat template has not ended within `TEMPLATE_S`."""

    def __init__(self) -> None:
        super().__init__(f"expected the chat template to end within {TEMPLATE_S:g} s, it did not")


def within_time(render: Callable[[], T]) -> T:
    """Returns what `render` returns. Raises: TemplateTimeoutError in it after `TEMPLATE_S`.

    A watching thread has CPython raise it in this one, between two bytecodes. What else could end a
    template does not: Jinja's sandbox is asked for names and calls, and an empty loop has none; the
    range of one loop is limited there, but not that of loops in loops; SIGALRM reaches the main
    thread only, and may be in use; a process of its own would have to import transformers and be
    given the tokenizer. A single call in C, such as a power with millions of digits, ends first.
    """
    thread_id, lock = threading.get_ident(), threading.Lock()
    has_begun, is_over, is_sent = threading.Event(), threading.Event(), threading.Event()

    def watch() -> None:
        has_begun.wait()  # within `Thread.start` one that comes leaves another error behind
        # Once only: when it has come, none is on its way any more, wherever it came.
        if not is_over.wait(TEMPLATE_S):
            with lock:
                if not is_over.is_set():
                    is_sent.set()
                    _raise_here(thread_id)

    try:
        threading.Thread(target=watch, name="jaxkv-deadline", daemon=True).start()
        has_begun.set()
        return render()
    finally:
        with lock:
            is_over.set()
        has_begun.set()
        if is_sent.is_set():
            _receive(thread_id)


def _receive(thread_id: int) -> None:
    """Sees to it that none is on its way to this thread any more: it might come much later.

    A second one takes the place of the first. Taking it back instead leaves Python 3.11 looking for
    it for ever, between any two bytecodes; under a tracer it then stands still.
    """
    with suppress(TemplateTimeoutError):
        _raise_here(thread_id)
        while True:
            pass


def _raise_here(thread_id: int) -> None:
    """Has the thread raise the exception between two of its next bytecodes."""
    kind = ctypes.py_object(TemplateTimeoutError)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), kind)
