"""The TPU compiler takes the kernels, and what it issues for decode stays below what their DMAs
take. Compiles only.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

import kernels_pallas
from jaxkv.tools.apart import compile_apart
from jaxkv.tools.check import TARGETS, budget_of, judge
from jaxkv.tools.kernels import SHAPES, Case, _against_dma, case_of, packing_of, tiles_of
from jaxkv.tools.schedule import _read_units

needs_compiler = pytest.mark.skipif(
    find_spec("libtpu") is None, reason='libtpu is missing: pip install "jaxkv[tpu]"'
)
TUNED = Path(kernels_pallas.__file__).parent / "tuned"


def budgeted() -> list[tuple[Case, dict]]:
    """Every committed budget with the case that it is for."""
    files = [(chip, json.loads((TUNED / f"{chip}.json").read_text())) for chip in TARGETS]
    return [
        (
            Case(
                name=entry["shape"],
                chip=chip,
                **entry["case"] | {"heads": tuple(entry["case"]["heads"])},
            ),
            entry,
        )
        for chip, content in files
        for entry in content["kernels"]
    ]


@pytest.mark.slow
@needs_compiler
def test_decode_has_no_spills_and_fits_its_budget():
    case = case_of("decode", "70b-tp8", "v6e")
    found = compile_apart(case)
    assert found["spills"] == 0
    assert found["ratio"] <= 0.48
    assert found["bundles"] * (found["trips"] - 1) <= found["issue_cycles"]  # the last is in part
    assert budget_of(case)
    assert judge(case, found).faults == []


@pytest.mark.parametrize(
    ("names", "numbers"),
    [
        ("MXU, XLU, VSTORE:SPILL", ["2 3 1", "1 0 0", "0 2 1"]),
        ("MATMUL, MATPUSH, XLU, VSTORE:SPILL", ["2 2 3 1", "1 7 0 0", "0 5 2 1"]),
    ],
)
def test_matmuls_have_one_name_whatever_a_version_of_libtpu_calls_them(tmp_path, names, numbers):
    table = tmp_path / "utilization.txt"
    lines = ["== CAPACITY:", names, numbers[0], "== UTILIZATION:", *numbers[1:]]
    table.write_text("\n".join(lines))
    capacity, rows = _read_units(table)
    by_name = [dict(zip(capacity, row, strict=True)) for row in rows]
    assert capacity["MXU"] == 2
    assert [(row["MXU"], row["XLU"], row["VSTORE:SPILL"]) for row in by_name] == [
        (1, 0, 0),
        (0, 2, 1),
    ]


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("kernel", ["decode", "prefill"])
def test_pages_past_2_to_the_31_bytes_compile_without_a_copy_of_the_pool(kernel):
    found = compile_apart(
        case_of(kernel, "70b-tp8", "v6e", context=512, batch=4, queries=64, far=True)
    )
    assert found["temporary_bytes"] < 2**24


@needs_compiler
def test_what_the_kernels_do_not_take_is_a_reason_not_a_crash():
    found = compile_apart(case_of("decode", "odd", "v6e", heads=(8, 1, 80)))
    assert found["reason"] == "head_dim: expected 64 or a multiple of 128, got 80"


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_bytes_of_whole_pages_are_a_whole_number(dtype):
    case = case_of("decode", "8b", "v6e", dtype=dtype)
    found = _against_dma(case, {"read_tokens": 3 * case.page_size, "issue_cycles": 1})
    packing, (_, kv_heads, _) = packing_of(case), case.heads
    scales = 0 if packing is None else 4 * packing.scales_width(kv_heads, case.page_size)
    expected = 3 * (case.page_size * case.token_nbytes + scales)
    assert (found["dma_bytes"], type(found["dma_bytes"])) == (expected, int)


def test_the_rule_gives_the_tiles_that_the_sweep_found():
    for case, entry in budgeted():
        tiles = tiles_of(case)
        assert {name: getattr(tiles, name) for name in entry["tiles"]} == entry["tiles"], case


def test_every_chip_has_the_same_budgets_and_each_is_found_for_its_case():
    cases = {
        chip: {str(entry["case"]) for case, entry in budgeted() if case.chip == chip}
        for chip in TARGETS
    }
    assert len(set(map(frozenset, cases.values()))) == 1
    for case, entry in budgeted():
        assert SHAPES[case.name] == case.heads
        assert budget_of(case) == entry
        assert entry["measured"] <= entry["ratio"] <= entry["measured"] * 1.031 + 0.001
    assert budget_of(case_of("decode", "8b", "v6e", context=77)) == {}
