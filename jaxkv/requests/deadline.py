"""Ends a chat template that takes too long."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
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
    thread_id, lock, is_over = threading.get_ident(), threading.Lock(), threading.Event()

    def watch() -> None:
        # Once only: when it has come, none is on its way any more, wherever it came.
        if not is_over.wait(TEMPLATE_S):
            with lock:
                if not is_over.is_set():
                    _raise_in(thread_id, TemplateTimeoutError)

    try:
        threading.Thread(target=watch, name="jaxkv-deadline", daemon=True).start()
        return render()
    finally:
        is_over.set()
        with lock:
            # It may be on its way still, and would come later.
            _raise_in(thread_id, None)


def _raise_in(thread_id: int, kind: type[Exception] | None) -> None:
    """Has the thread raise an exception of this kind soon; None: none after all."""
    what = None if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), what)
