"""The table of models is made of what holds."""

import pytest

from parity import torch  # noqa: F401


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile", "torch")
def test_a_row_says_yes(script, tmp_path):
    case = script("model_table").Case("llama", tmp_path)
    columns = ("tokens", "cached", "TPU kernels", "GPU kernels")
    assert [case.check(column) for column in columns] == ["yes"] * len(columns)
