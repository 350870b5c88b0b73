"""Configs of experts that cannot be are refused by name, and so are experts that are not there."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from families import ROPE, YARN, text_config
from jaxkv.errors import CheckpointError
from jaxkv.models.families import ConfigReader, read_config, read_family
from jaxkv.models.families.base import Part
from jaxkv.weights.load import Kept, load_weights
from tiny import make_checkpoint


@pytest.mark.parametrize(
    ("variant", "key", "value", "expected"),
    [
        ("qwen3_moe", "num_experts", 0, "a whole number from 1 to 4096"),
        ("qwen3_moe", "num_experts", 10**9, "a whole number from 1 to 4096"),
        ("mixtral", "num_local_experts", "8", "a whole number from 1 to 4096"),
        ("qwen3_moe", "num_experts_per_tok", 7, "at most the 6 experts that there are"),
        ("mixtral", "num_experts_per_tok", 0, "a whole number from 1"),
        ("qwen3_moe", "moe_intermediate_size", -1, "a whole number from 1"),
        ("qwen3_moe", "mlp_only_layers", "all", "a list of whole numbers from 0"),
        ("qwen3_moe", "decoder_sparse_step", 0, "a whole number from 1"),
        ("dots1", "n_group", 3, "groups of two or more of the 8 experts"),
        ("dots1", "n_group", 8, "groups of two or more of the 8 experts"),
        ("dots1", "topk_group", 5, "a whole number from 1 to 4"),
        ("dots1", "num_experts_per_tok", 5, "at most the 4 experts of the groups"),
        ("dots1", "first_k_dense_replace", 4, "a whole number from 0 to 3"),
        ("dots1", "num_nextn_predict_layers", -1, "a whole number from 0"),
        ("exaone_moe", "n_group", 4, "groups of two or more of the 6 experts"),
        ("hunyuan_v1_moe", "moe_topk", [2, 1, 2], "a number, or 3 that are equal"),
        ("hunyuan_v1_moe", "moe_topk", [2], "a number, or 3 that are equal"),
        ("mellum", "mlp_layer_types", ["dense", "sparse", "moe"], "a list of 3 out of"),
        ("phimoe", "num_experts_per_tok", 1, "2 (the router chooses one, then another)"),
        ("phimoe", "router_jitter_noise", 0, "a number from 1e-30"),
        ("llama4_text", "attention_chunk_size", 0, "a whole number from 1"),
        ("llama4_text", "moe_layers", 1, "a list of whole numbers from 0"),
        ("llama4_text", "no_rope_layers", [1, 0], "a list of 3 out of 0 and 1"),
        ("llama4_text", "layer_types", ["sliding_attention"] * 3, "a list of 3 out of"),
        ("gemma4_text-experts", "top_k_experts", 7, "at most the 6 experts that there are"),
        ("afmoe", "num_dense_layers", 4, "a whole number from 0 to 3"),
        ("granitemoeshared", "shared_intermediate_size", -4, "a whole number from 0"),
    ],
)
def test_a_config_that_cannot_be_is_refused(variant, key, value, expected):
    config: dict[str, Any] = text_config(variant) | {key: value}
    with pytest.raises(CheckpointError, match=f"{key}: expected {re.escape(expected)}"):
        read_family(ConfigReader(config, "config.json"))


@pytest.mark.parametrize(
    ("variant", "none", "alike"),
    [
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}, "qwen3"),
        ("mellum", {"mlp_layer_types": ["dense"] * 3, "layer_types": None}, "qwen3"),
    ],
)
def test_a_model_of_which_no_layer_has_experts_is_a_dense_one(variant, none, alike):
    config = ConfigReader(text_config(variant) | none | {"rope_parameters": ROPE}, "config.json")
    (spec, layout), (other, others) = map(read_family, (config, config.replaced(model_type=alike)))
    assert layout == others
    assert replace(spec, family=alike) == other


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("qwen3_moe", "model.layers.2.mlp.experts.5.down_proj.weight"),
        ("qwen3_moe", "model.layers.0.mlp.gate.weight"),
        ("llama4_text", "model.layers.1.feed_forward.experts.gate_up_proj"),
        ("afmoe", "model.layers.1.mlp.expert_bias"),
    ],
)
def test_an_expert_that_is_not_there_is_named(tmp_path, variant, name):
    make_checkpoint(tmp_path, text_config(variant))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"missing tensor {re.escape(name)}"):
        load_weights(tmp_path, *read_family(read_config(tmp_path)), Kept(dtype="float32"))


def test_layers_that_predict_later_tokens_are_left_alone(tmp_path):
    make_checkpoint(tmp_path, text_config("dots1") | {"num_nextn_predict_layers": 1})
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in (3, 4):
        extra = {f"model.layers.{layer}.eh_proj.weight": np.zeros((2, 2), np.float32)}
        save_file(tensors | extra, tmp_path / "model.safetensors")
        args = tmp_path, *read_family(read_config(tmp_path))
        if layer == 3:
            load_weights(*args, Kept(dtype="float32"))
        else:
            with pytest.raises(CheckpointError, match=r"does not use: model\.layers\.4\.eh_proj"):
                load_weights(*args, Kept(dtype="float32"))


def test_scaled_embeddings_of_every_kind_have_phi_3_5_moe_s_own_factor():
    rope = YARN | {"short_mscale": 1.3, "long_mscale": 1.3}
    config = ConfigReader(text_config("phimoe") | {"rope_parameters": rope}, "config.json")
    assert read_family(config)[0].rope.attention_factor == 1.3


def test_a_tensor_of_all_experts_may_come_either_way_round():
    place = {"num_blocks": 2, "start": 1, "stop": 3, "of_all": True}
    part = Part(shape=(2, 4, 6), either_way=True, **place)
    stored = np.arange(48.0).reshape(part.shape)
    want = np.concatenate([stored[0, 1:3], stored[1, 1:3]])
    for one in (stored, stored.swapaxes(1, 2)):
        assert one.shape in part.shapes
        np.testing.assert_array_equal(part.take(one), want)
    assert Part(shape=(2, 4, 6), **place).shapes == ((2, 4, 6),)


def test_rows_of_gates_by_turns_or_in_front_make_the_same_weights(tmp_path):
    """Inkling as published, and its text part as transformers writes it alone."""
    make_checkpoint(tmp_path, text_config("inkling_text"))
    published = load_file(tmp_path / "model.safetensors")
    alone: dict[str, np.ndarray] = {}
    for name, stored in published.items():
        if not name.endswith(("w13_dn.weight", ".gate_up_proj")):
            alone[name] = stored
            continue
        turns = {"gate": stored[..., 0::2, :], "up": stored[..., 1::2, :]}
        if ".experts." in name:
            alone[name] = np.concatenate([*turns.values()], axis=-2)
            continue
        for which, rows in turns.items():
            alone[re.sub("w13_dn|gate_up_proj", f"{which}_proj", name)] = rows
    family, kept = read_family(read_config(tmp_path)), Kept(dtype="float32")
    want, got = (load_weights(one, *family, kept) for one in (published, alone))
    assert len(alone) > len(published)
    jax.tree.map(np.testing.assert_array_equal, got, want)
