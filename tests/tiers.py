"""Which cases of a test run always, and which with the slow tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], *fast: Any) -> list[Any]:
    """All cases, slow but for these: where each has programs of its own, what takes time is to
    compile them.
    """
    known = list(cases)
    if unknown := [case for case in fast if case not in known]:
        raise ValueError(f"expected cases out of {known}, got {unknown}")
    several = all(isinstance(case, tuple) for case in known)
    return [
        case
        if case in fast
        else pytest.param(*(case if several else (case,)), marks=pytest.mark.slow)
        for case in known
    ]
