"""What layers share is on the device once, and does what a copy for each of them would do."""

from __future__ import annotations

import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import families
from adapters import make_adapter
from families import hf_config, make_hf_model
from jaxkv.errors import CheckpointError
from jaxkv.models.families import read_config, read_family
from jaxkv.ops.attention.dense import Dense
from jaxkv.placement import place
from jaxkv.testing import model_of
from jaxkv.weights.adapters import read_adapter
from jaxkv.weights.load import Kept, load_weights
from jaxkv.weights.orbax import convert, load_converted
from jaxkv.weights.tree import LOW_DOWN, tree_leaves
from parity import logits_of, prompts, tiny_llm, torch
from tiers import some
from tiny import make_checkpoint

__all__ = ["torch"]

pytestmark = pytest.mark.usefixtures("quick_compile", "one_loop")

LAYERS, HYBRID = 3, "layers_1"


def test_the_tree_has_as_many_numbers_as_transformers_has_parameters(torch, tmp_path):
    model = make_hf_model(torch, hf_config("zamba2"), tmp_path)
    spec, layout = read_family(read_config(tmp_path))
    leaves = [leaf for leaf in tree_leaves(spec, layout) if leaf.one.same_as is None]
    (twice,) = [leaf for leaf in leaves if leaf.name == f"{LOW_DOWN}gate"]  # it is `up`'s, too
    count = sum(int(np.prod(leaf.shape)) for leaf in leaves) - int(np.prod(twice.shape))
    assert count == sum(one.numel() for one in model.parameters())


@pytest.mark.parametrize("variant", ["dory", "hrm_text"])
def test_layers_that_run_more_than_once_are_in_the_tree_once(torch, tmp_path, variant):
    model = make_hf_model(torch, hf_config(variant), tmp_path)
    spec, layout = read_family(read_config(tmp_path))
    count = sum(int(np.prod(leaf.shape)) for leaf in tree_leaves(spec, layout))
    assert count == sum(one.numel() for one in model.parameters())
    assert spec.kv_layers == tuple(range(spec.num_layers))  # but each time has its keys


def test_published_files_of_dory_count_attention_and_the_mlp_as_two(torch, tmp_path):
    """Source of the names: transformers' LayerPairCollapse."""
    make_hf_model(torch, hf_config("dory"), tmp_path / "1")
    tensors, other = load_file(tmp_path / "1" / "model.safetensors"), tmp_path / "2"
    rates = {"lambda_1": "attn_alpha", "lambda_2": "mlp_alpha"}

    def published(name: str) -> str:
        if ".layers." not in name:
            return name
        first, number, module, *rest = name.split(".")[1:]
        number = 2 * int(number) + (module in ("mlp", "lambda_2"))
        return ".".join(["backbone", first, str(number), rates.get(module, "mixer"), *rest])

    other.mkdir()
    save_file({published(name): x for name, x in tensors.items()}, other / "model.safetensors")
    shutil.copy(tmp_path / "1" / "config.json", other)
    spec, layout = read_family(read_config(other))
    one, two = (load_weights(tmp_path / name, spec, layout, Kept(dtype="float32")) for name in "12")
    jax.tree.map(np.testing.assert_array_equal, one, two)


# As they are, zamba2 of test_every_family.py has them always.
@pytest.mark.parametrize("quantization", some([None, "int8", "int4", "int8_dynamic"], "int4"))
def test_a_copy_for_each_layer_says_the_same(tmp_path, quantization):
    path = make_checkpoint(tmp_path, families.text_config("zamba2") | {"adapter_rank": 16})
    llm = tiny_llm(path, quantization=quantization)
    weights = model_of(llm).weights
    turns = np.arange(LAYERS) % 2
    own = {
        name: leaf if leaf.shape[0] == LAYERS else leaf[turns]
        for name, leaf in weights[HYBRID].items()
    }
    assert own["q"].shape[0] == LAYERS > weights[HYBRID]["q"].shape[0]
    copied = logits_of(llm, prompts(), weights={**weights, HYBRID: own}, backend=Dense())
    for got, want in zip(logits_of(llm, prompts(), backend=Dense()), copied, strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_converted_model_has_what_layers_share_once_too(tmp_path):
    source = make_checkpoint(tmp_path / "in", families.text_config("zamba2"))
    num_bytes = convert(source, tmp_path / "out", dtype="float32")
    spec, layout = read_family(read_config(source))
    want, got = (
        read(tmp_path / name, spec, layout, Kept(dtype="float32"))
        for name, read in (("in", load_weights), ("out", load_converted))
    )
    assert num_bytes == sum(one.nbytes for one in jax.tree.leaves(want))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_an_adapter_of_what_layers_share_is_refused_by_name(tmp_path):
    path = make_checkpoint(tmp_path / "base", families.text_config("zamba2"))
    module = "model.layers.1.shared_transformer.self_attn.q_proj"
    adapter = make_adapter(tmp_path / "adapter", path, targets=(module,))
    spec, layout = read_family(read_config(path))
    placement = place(spec, layout, jax.devices())
    with pytest.raises(CheckpointError, match=rf"expected LoRA of .*, got tensor '.*{module}"):
        read_adapter(adapter, spec, layout, placement, rank=8, dtype="float32")
