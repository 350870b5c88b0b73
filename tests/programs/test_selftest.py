"""A kernel's self-test passes the kernel that is right, and catches one that is made wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxkv.kv.codecs import get_codec
from jaxkv.ops.attention import Heads, pallas_tpu
from jaxkv.ops.attention.pallas_tpu import PallasTpu
from jaxkv.programs import selftest
from jaxkv.programs.selftest import Case, make_rows, try_case
from kernels_pallas.tpu import Tiles, checks
from tiers import some

# What runs is the interpreter.
pytestmark = pytest.mark.usefixtures("quick_compile")

TILES = Tiles(decode_pages=2, decode_heads=1, prefill_pages=2, prefill_queries=16)
BACKEND = PallasTpu(interpret=pltpu.InterpretParams(), tiles=TILES)
CASE = Case(
    heads=Heads(num_heads=2, num_kv_heads=1, head_dim=128, window=20),
    codec=get_codec("bfloat16", platform="tpu"),
    page_size=16,
    decode_only=True,
    longest=64,
)
WITHOUT_WINDOW = replace(CASE, heads=replace(CASE.heads, window=None))
CHUNKS = replace(CASE, decode_only=False)


@pytest.fixture(scope="module", autouse=True)
def xla_runs_once():
    """What XLA gives for a case is computed once in this module."""
    wanted, known = selftest._wanted, {}

    def once(case, *others):
        if case not in known:
            known[case] = wanted(case, *others)
        return known[case]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selftest, "_wanted", once)
        yield


def fault_of(case: Case) -> str | None:
    return try_case(case, BACKEND, jax.devices()[0]).fault


def with_schedule(monkeypatch: pytest.MonkeyPatch, change: Callable[..., dict[str, Any]]) -> None:
    """The kernels are given what `change` makes of (table_BW, len_B, window)."""
    make = pallas_tpu.make_schedule

    def made(table_BW, first_BW, len_B, *rest, window, page_size, **others):
        new = {"table_BW": table_BW, "window": window} | change(
            table_BW=table_BW, len_B=len_B, window=window, page_size=page_size
        )
        options = {"window": new["window"], "page_size": page_size}
        return make(new["table_BW"], first_BW, len_B, *rest, **options, **others)

    monkeypatch.setattr(pallas_tpu, "make_schedule", made)


def mask_off_by_one(monkeypatch):
    with_schedule(monkeypatch, lambda window, **_: {"window": window + 1})


def stale_page(monkeypatch):
    """The longest row, number 4, reads in place of its second page another one that is held."""
    with_schedule(
        monkeypatch,
        lambda table_BW, **_: {"table_BW": table_BW.at[4, 1].set(table_BW[0, 1])},
    )


def write_into_a_page_that_two_rows_share(monkeypatch):
    """Row 0, whose token begins a page, has it in its first page, which row 1 holds too."""
    with_schedule(
        monkeypatch,
        lambda table_BW, page_size, **_: {"table_BW": table_BW.at[0, 2].set(table_BW[0, 0])},
    )


def wrong_scale(monkeypatch):
    attend = pallas_tpu.ragged_paged_attention

    def scaled(*operands, scale, **others):
        return attend(*operands, scale=scale * 1.03, **others)

    monkeypatch.setattr(pallas_tpu, "ragged_paged_attention", scaled)


class Forgotten:
    """A copy that is never made or, with `start`, begun and never waited for."""

    def __init__(self, copy: Any, *, start: bool) -> None:
        self.start = copy.start if start else lambda *_: None
        self.wait = lambda: None


def without_copies(monkeypatch, is_forgotten: Callable[[Any, Any], bool], *, start: bool) -> None:
    make = pltpu.make_async_copy

    def made(source, target, semaphore):
        copy = make(source, target, semaphore)
        return Forgotten(copy, start=start) if is_forgotten(source, target) else copy

    monkeypatch.setattr(pltpu, "make_async_copy", made)


def memory_of(ref: Any) -> str:
    return str(getattr(ref, "memory_space", None) or ref.ref.memory_space)


def missing_write_back(monkeypatch):
    without_copies(
        monkeypatch,
        lambda source, target: "vmem" in memory_of(source) and "vmem" not in memory_of(target),
        start=False,
    )


def missing_wait(monkeypatch):
    """Of what comes into VMEM: the kernel works on what has been there."""
    without_copies(monkeypatch, lambda source, target: "vmem" in memory_of(target), start=True)


@pytest.mark.parametrize(
    ("wrong", "case", "expected"),
    some(
        WRONG := [
            (stale_page, WITHOUT_WINDOW, "outputs are .* of row 4"),  # always: by output, by slot,
            (missing_write_back, CASE, "keys of .* slots that are held"),
            (missing_wait, CASE, ""),  # and what does not wait
            (mask_off_by_one, CASE, "outputs are"),
            (wrong_scale, WITHOUT_WINDOW, "outputs are"),
            (
                write_into_a_page_that_two_rows_share,
                WITHOUT_WINDOW,
                "keys of .* slots that are held",
            ),
            (mask_off_by_one, CHUNKS, "outputs are"),
            (missing_write_back, CHUNKS, "keys of"),
            (missing_wait, CHUNKS, ""),
        ],
        *WRONG[:3],
    ),
)
def test_a_kernel_that_is_wrong_is_caught(monkeypatch, wrong, case, expected):
    wrong(monkeypatch)
    fault = fault_of(case)
    assert fault is not None
    assert re.search(expected, fault), fault


@pytest.mark.parametrize("case", [CASE, pytest.param(CHUNKS, marks=pytest.mark.slow)], ids=str)
def test_the_kernels_as_they_are_pass(case):
    assert fault_of(case) is None


def test_rows_share_a_page_and_write_beside_it():
    rows = make_rows(CASE, np.random.default_rng(0))
    assert rows.table_BW[0, 0] == rows.table_BW[1, 0]
    assert list(rows.count_B[:2]) == [1, 1]


@pytest.mark.parametrize(("given", "unchecked"), [(None, True), ("0", True), ("1", False)])
def test_a_switch_turns_mosaics_checks_on(monkeypatch, given, unchecked):
    monkeypatch.delenv(checks.SWITCH, raising=False)
    if given is not None:
        monkeypatch.setenv(checks.SWITCH, given)
    params = checks.compiler_params(vmem_limit_bytes=9)
    assert params.disable_bounds_checks is params.disable_semaphore_checks is unchecked
    assert params.vmem_limit_bytes == 9
