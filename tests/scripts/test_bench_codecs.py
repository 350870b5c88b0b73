"""The benchmark of codecs attends as it says, whether it observes or not."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxkv.kv.codecs import get_codec


@pytest.mark.usefixtures("quick_compile")
def test_observing_changes_no_result_and_a_quarter_is_another_one(script):
    bench = script("bench_codecs")
    codec, options = get_codec("int8", platform="cpu"), SimpleNamespace(batch=2, context=64)

    def result(variant: str | None) -> np.ndarray:
        return np.asarray(bench.attention(codec, (4, 2, 8), options, variant)()[0])

    plain, *observed, quarter = map(result, (None, *bench.VARIANTS))
    for one in observed:
        np.testing.assert_allclose(one, plain, rtol=1e-5, atol=1e-6)
    assert np.abs(quarter - plain).max() > 0.01
