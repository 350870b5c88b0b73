"""What stands behind a model that pools: heads that do not fit are refused when they are loaded, and
scores of any size come without a warning.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxkv.build.pooling import ACTIVATIONS, Pooling
from jaxkv.errors import CheckpointError

WEIGHT = np.ones((2, 4), np.float32)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_scores_of_any_size_give_no_warning(name):
    x = np.array([-1e4, -90, -3, 0, 2, 90, 1e4], np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = ACTIVATIONS[name](x)
    assert found.dtype == np.float32
    if name == "Sigmoid":
        exact = 1 / (1 + np.exp(-x[1:-1].astype(np.float64)))
        np.testing.assert_allclose(found, [0, *exact, 1], rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"score.weight": WEIGHT[:, :3]}, r"score.weight: expected \[out, 4\], got shape \(2, 3\)"),
        ({"score.weight": WEIGHT[:1]}, "expected 2 rows"),
        ({"score.weight": WEIGHT * np.nan}, "expected finite values"),
        ({"score.weight": WEIGHT, "score.bias": WEIGHT[:, 0] * np.inf}, "expected finite values"),
        ({"score.weight": WEIGHT, "score.bias": WEIGHT}, "expected a bias of 2 numbers"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(arrays, message):
    with pytest.raises(CheckpointError, match=message):
        Pooling(labels=2).with_head(arrays, Path("weights"), 4)


@pytest.mark.parametrize("weight", [WEIGHT[:, :3], WEIGHT * np.nan], ids=["narrow", "nan"])
def test_a_dense_layer_that_does_not_fit_is_refused(tmp_path, weight):
    (tmp_path / "2_Dense").mkdir()
    save_file({"linear.weight": weight}, tmp_path / "2_Dense" / "model.safetensors")
    pooling = Pooling(folders=(("2_Dense", "Tanh"),))
    with pytest.raises(CheckpointError, match=r"2_Dense: expected (\[out, 4\]|finite values)"):
        pooling.loaded(tmp_path, None, 4)
