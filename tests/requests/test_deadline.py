"""What takes too long is ended in its thread, and nothing comes afterwards."""

import subprocess
import sys
import threading
import time
from collections import Counter

import pytest

from jaxkv.requests.deadline import TemplateTimeoutError, within_time


def count(num: int) -> int:
    x = 0
    for i in range(num):
        x += i
    return x


def test_what_ends_in_time_returns_and_raises_as_without():
    assert within_time(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        within_time(lambda: 1 // 0)


def hammer(monkeypatch, outcomes: list[Counter]) -> None:
    """Ends at about the limit, some before it and some behind it; every twentieth never does."""
    started = time.perf_counter()
    count(200_000)
    taken_s = time.perf_counter() - started
    got = Counter()
    for i in range(40):
        monkeypatch.setattr("jaxkv.requests.deadline.TEMPLATE_S", taken_s * (i % 20) / 10)
        num = 200_000 if i % 20 < 19 else 10**12
        try:
            got[within_time(lambda num=num: count(num)) == count(200_000)] += 1
        except TemplateTimeoutError:
            got["timeout"] += 1
        count(2_000)
    outcomes.append(got)


def test_nothing_comes_after_the_end_in_any_thread(monkeypatch):
    outcomes: list[Counter] = []
    hammer(monkeypatch, outcomes)
    thread = threading.Thread(target=hammer, args=(monkeypatch, outcomes))
    thread.start()
    thread.join()
    assert len(outcomes) == 2
    for got in outcomes:
        assert got.keys() <= {True, "timeout"}
        assert got["timeout"] >= 2
        assert got.total() == 40
    monkeypatch.setattr("jaxkv.requests.deadline.TEMPLATE_S", 0.05)
    with pytest.raises(
        TemplateTimeoutError, match=r"expected the chat template to end within 0\.05 s"
    ):
        within_time(lambda: count(10**12))


def test_nothing_is_left_behind_that_a_tracer_stumbles_over():
    """Python 3.11 would stand still in the first function that is called under a tracer."""
    code = """
import sys
from jaxkv.requests import deadline

def trace(*_):
    return trace

deadline.within_time(lambda: None)
deadline.TEMPLATE_S = 0.01
try:
    deadline.within_time(lambda: [None for _ in iter(int, 1)])
except deadline.TemplateTimeoutError:
    sys.settrace(trace)
    deadline.within_time(lambda: print("done"))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "done\n"
