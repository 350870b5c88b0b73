"""The TPU compiler takes the kernels, and what it issues for decode stays below what their DMAs take. Compiles only."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("libtpu") is None, reason='libtpu is missing: pip install "jax[tpu]"')
CASE = {"shape": "70b-tp8", "chip": "v6e", "page_size": 64, "queries": 64, "dtype": "bfloat16"}


@pytest.mark.slow
def test_decode_has_no_spills_and_fits_its_budget(script):
    cost = script("tpu_cost")
    found = cost.run(cost.Case(kernel="decode", context=2048, batch=64, **CASE))
    assert found["spills"] == 0
    assert found["ratio"] <= 0.48
    assert found["loop_own"] * found["loop_trips"] <= found["issue_cycles"]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["decode", "prefill"])
def test_pages_past_2_to_the_31_bytes_compile_without_a_copy_of_the_pool(script, kernel):
    cost = script("tpu_cost")
    found = cost.run(cost.Case(kernel=kernel, context=512, batch=4, far=True, **CASE))
    assert found["temporary_bytes"] < 2**24
