"""Attention whose output goes group by group of heads through matrices of their own, and then
through one for all.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from safetensors.numpy import load_file, save_file

import parity
from jaxkv.models.families import llama, read_config, read_family
from jaxkv.models.families.base import leaf
from jaxkv.placement import TENSOR, place
from jaxkv.testing import model_of
from jaxkv.weights.load import Kept, load_weights
from jaxkv.weights.orbax import convert, load_converted
from parity import torch
from tiny import make_checkpoint, tiny_config

__all__ = ["torch"]

pytestmark = pytest.mark.usefixtures("quick_compile")

GROUPS, RANK, HEADS, HEAD_DIM, HIDDEN = 2, 16, 6, 8, 48
INNER, OUTER = "self_attn.o_a_proj.weight", "self_attn.o_b_proj.weight"


def set_family(patch: pytest.MonkeyPatch) -> None:
    """Makes a family of Llama: two groups of three heads, 16 numbers of each for all."""
    read_llama = llama.read

    def read(config: Any) -> Any:
        spec, layout = read_llama(config)
        spec = replace(spec, attention=replace(spec.attention, output_groups=GROUPS))
        (own,) = layout.layers
        prefix, rows = "model.layers.{layer}.", GROUPS * RANK
        shape = (rows, HEADS * HEAD_DIM // GROUPS)
        outputs = {
            "o_groups": leaf(prefix + INNER, shape, ("heads", None)),
            "o": leaf(prefix + OUTER, (HIDDEN, rows), ("model", "heads")),
        }
        return spec, replace(layout, layers=(own | outputs,))

    patch.setattr(llama, "read", read)


@pytest.fixture
def path(monkeypatch, tmp_path) -> Path:
    set_family(monkeypatch)
    return make_checkpoint(tmp_path / "model", tiny_config("llama"))


def loaded(path: Path, reader: Any = load_weights, **options: Any) -> dict[str, Any]:
    return reader(path, *read_family(read_config(path)), Kept(**{"dtype": "float32"} | options))


@pytest.mark.slow
def test_layers_compute_what_transformers_do(path, torch):
    """As deepseek_v4 does among the families."""
    deepseek = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    tensors = load_file(path / "model.safetensors")
    layers = [
        {name: torch.from_numpy(tensors.pop(f"model.layers.{i}.{name}")) for name in (INNER, OUTER)}
        for i in range(3)
    ]
    (path / "plain").mkdir()
    (path / "plain" / "config.json").write_text((path / "config.json").read_text())
    for i in range(3):
        tensors[f"model.layers.{i}.self_attn.o_proj.weight"] = np.zeros((HIDDEN, HIDDEN), "float32")
    save_file(tensors, path / "plain" / "model.safetensors", metadata={"format": "pt"})
    model = parity.reference_model(torch, path / "plain")

    class Output(torch.nn.Module):
        def __init__(self, inner: Any, outer: Any) -> None:
            super().__init__()
            self.inner = deepseek.DeepseekV4GroupedLinear(inner.shape[1], inner.shape[0], GROUPS)
            self.inner.weight.data, self.outer = inner, outer

        def forward(self, x: Any) -> Any:
            return self.inner(x.reshape(*x.shape[:-1], GROUPS, -1)).flatten(2) @ self.outer.T

    for block, own in zip(model.model.layers, layers, strict=True):
        block.self_attn.o_proj = Output(*own.values())
    llm = parity.tiny_llm(path)
    parity.assert_logits_equal(torch, model, llm)
    parity.assert_generates_equal(torch, model, llm)


def test_they_are_quantised_as_other_matrices(path):
    llm = parity.tiny_llm(path, quantization="int8")
    weights = model_of(llm).weights["layers"]
    assert weights["o_groups"].dtype == np.int8
    assert weights["o_groups_scales"].shape == (3, 1, GROUPS * RANK)
    values, scales = (np.asarray(weights[f"o_groups{end}"]) for end in ("", "_scales"))
    plain = loaded(path)
    np.testing.assert_allclose(
        (values * scales[..., None])[:, 0], plain["layers"]["o_groups"], rtol=0, atol=0.02
    )
    with_values = {"o_groups": (values * scales[..., None])[:, 0]}
    for name in ("q", "k", "v", "o", "gate", "up", "down"):
        values, scales = (np.asarray(weights[f"{name}{end}"]) for end in ("", "_scales"))
        with_values[name] = (values * scales[..., None])[:, 0]
    whole = plain | {"layers": plain["layers"] | with_values}
    got, want = (parity.logits_of(llm, [[3, 4, 5]], weights=w)[0] for w in (None, whole))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * want.std())


def test_they_are_converted_as_they_are(path, tmp_path):
    convert(path, tmp_path / "out", dtype="float32")
    got, want = loaded(tmp_path / "out", load_converted), loaded(path)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_devices_have_whole_groups(path):
    spec, layout = read_family(read_config(path))
    shape = (3, GROUPS * RANK, HEADS * HEAD_DIM // GROUPS)
    placement = place(spec, layout, jax.devices() * 2, 2)
    assert placement.weight("layers.o_groups", shape) == PartitionSpec(None, TENSOR, None)
    three = replace(spec, attention=replace(spec.attention, output_groups=3))
    with pytest.raises(
        ValueError,
        match="expected a divisor of the model's 3 groups of attention heads, got 2",
    ):
        place(three, layout, jax.devices() * 2, 2)
