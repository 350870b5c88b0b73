"""Families of which transformers has no class are ones that it has under other names, or Llama of its
pieces: equal leaves and specs, or equal logits.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import families
from families import GROUPED, HEAD, SMALL, hf_config, make_hf_model
from jaxkv.errors import CheckpointError
from jaxkv.models.families import ConfigReader, Layout, read_family
from jaxkv.models.spec import AttentionSpec, ModelSpec
from parity import assert_logits_equal, tiny_llm, torch

__all__ = ["torch"]

pytestmark = pytest.mark.usefixtures("quick_compile", "one_loop")

MLP = ("gate", "up", "down")
LING = {
    "model_type": "bailing_moe",
    "num_experts": 8,
    "num_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "use_bias": False,
    "norm_head": False,
}
LING2 = (
    LING
    | HEAD
    | {
        "use_rmsnorm": True,
        "use_qk_norm": True,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "moe_shared_expert_intermediate_size": 24,
        "partial_rotary_factor": 0.5,
    }
)

V2 = families.text_config("deepseek_v2-lite")
V2 = {key: value for key, value in V2.items() if key not in ("n_group", "norm_topk_prob")}


def read(*parts: dict[str, Any]) -> tuple[ModelSpec, Layout]:
    config = SMALL
    for part in parts:
        config = config | part
    return read_family(ConfigReader(config, "config.json"))


def test_the_second_ling_is_sarvam_with_partly_rotated_heads():
    sarvam = LING2 | {"model_type": "sarvam_moe", "n_routed_experts": 8, "n_shared_experts": 2}
    sarvam |= {"rope_theta": 6e5, "rms_norm_eps": 1e-6}
    (one, its), (other, others) = read(LING2), read(sarvam)
    assert its == others
    assert its.layers[1].keys() >= {"router_bias", "shared_up", "q_norm"}
    assert replace(one, family=other.family) == other
    assert one.rope.dim == one.head_dim // 2


def test_the_rotated_part_of_ling_may_be_said_as_a_size():
    part = LING2 | {"partial_rotary_factor": None, "rotary_dim": 4, "model_type": "bailing_moe_v2"}
    spec, layout = read(LING2)
    assert read(part) == (spec, layout)
    with pytest.raises(CheckpointError, match="rotary_dim"):
        read(part, {"partial_rotary_factor": 1.0})


def test_deepseek_moe_is_llama_with_the_experts_of_deepseek_v2():
    heads = {"num_key_value_heads": 6}
    (llama, dense), (v2, latent) = read(heads, {"model_type": "llama"}), read(V2)
    spec, layout = read(V2, {"model_type": "deepseek"})
    assert spec == replace(llama, family="deepseek", layer_kinds=(0, 1, 1), router=v2.router)
    attends = {name: one for name, one in dense.layers[0].items() if name not in MLP}
    routed = {
        name: one
        for name, one in latent.layers[1].items()
        if name.startswith(("router", "expert_", "shared_"))
    }
    assert layout == replace(dense, layers=(dense.layers[0], attends | routed))


@pytest.mark.parametrize("is_normalised", [False, True])
def test_the_first_ling_is_deepseek_moe_with_one_matrix_of_queries_keys_and_values(is_normalised):
    said = {"norm_topk_prob": is_normalised, "routed_scaling_factor": 1.0}
    deepseek = GROUPED | said | {"model_type": "deepseek"}
    eps = {"rms_norm_eps": 1e-5}
    (one, its), (other, others) = read(LING, said), read(deepseek, eps)
    assert replace(one, family=other.family) == other
    assert one.router is not None
    assert one.router.is_normalised == is_normalised
    second = read(LING2)[1].layers[1]
    theirs = others.layers[1] | {name: second[name] for name in "qkvo"}
    assert its.layers[1] == theirs


def test_orion_is_stablelm_that_rotates_whole_heads():
    stablelm = {"model_type": "stablelm", "partial_rotary_factor": 1.0, "layer_norm_eps": 1e-4}
    orion = {"model_type": "orion", "rms_norm_eps": 1e-4}
    (one, its), (other, others) = read(orion), read(stablelm)
    assert its == others
    assert "norm_bias" in its.top
    assert replace(one, family=other.family) == replace(other, attention=AttentionSpec())


@pytest.mark.parametrize("is_biased", [False, True])
def test_pangu_embedded_is_llama_that_may_have_biases(is_biased):
    pangu = {"model_type": "PanguEmbedded", "bias": is_biased}
    llama = {"model_type": "llama", "attention_bias": is_biased}
    llama |= {"rms_norm_eps": 1e-5, "rope_theta": 1.6e7}
    (one, its), (other, others) = read(pangu), read(llama)
    assert its == others
    assert replace(one, family=other.family) == other


def write(directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_chatglm_is_glm_with_one_matrix_of_queries_keys_and_values(torch, tmp_path):
    config = hf_config("glm")
    config.rope_parameters["rope_theta"] = 5e5
    model = make_hf_model(torch, config, tmp_path / "glm")
    tensors = load_file(tmp_path / "glm" / "model.safetensors")
    for layer in range(config.num_hidden_layers):
        stem = f"model.layers.{layer}.self_attn."
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"{stem}{name}_proj.{kind}") for name in "qkv"]
            tensors[f"{stem}query_key_value.{kind}"] = np.concatenate(parts)
    names = {"model.layers": "transformer.encoder.layers", "lm_head": "transformer.output_layer"}
    names |= {"model.embed_tokens": "transformer.embedding.word_embeddings"}
    names |= {"model.norm": "transformer.encoder.final_layernorm"}
    names |= {"self_attn.o_proj": "self_attention.dense", "self_attn": "self_attention"}
    names |= {"gate_up_proj": "dense_h_to_4h", "down_proj": "dense_4h_to_h"}
    for name, own in names.items():
        tensors = {key.replace(name, own): x for key, x in tensors.items()}
    tensors["transformer.rotary_pos_emb.inv_freq"] = np.ones(2, np.float32)
    own = {
        "model_type": "chatglm",
        "padded_vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "multi_query_attention": True,
        "multi_query_group_num": config.num_key_value_heads,
        "kv_channels": config.head_dim,
        "seq_length": 256,
        "layernorm_epsilon": config.rms_norm_eps,
        "rope_ratio": 50,
        "add_qkv_bias": True,
        "original_rope": True,
    }
    assert_logits_equal(torch, model, tiny_llm(write(tmp_path / "chatglm", own, tensors)))


FORMS = ((3, 6.0), (None, 2.625), (None, None), (6, 6.0), (3, None), (None, 13.0), (3, 6.0))
"""Query heads of each KV head of layers of a Nemotron, and widths of their MLPs."""


def block(group: int | None, width: float | None) -> dict[str, Any]:
    attention = {"n_heads_in_group": group, "no_op": group is None, "replace_with_linear": False}
    ffn = {"ffn_mult": width, "no_op": width is None, "replace_with_linear": False}
    return {"attention": attention | {"window_length": None}, "ffn": ffn | {"sparsify": None}}


NAS = {
    "model_type": "nemotron-nas",
    "num_hidden_layers": len(FORMS),
    "num_key_value_heads": None,
    "intermediate_size": None,
    "block_configs": [block(*form) for form in FORMS],
}


def test_nemotron_nas_is_llama_with_layers_left_out_or_of_other_sizes(torch, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

    class Nothing(torch.nn.Module):
        def forward(self, *given, hidden_states=None, **more):
            if hidden_states is not None:
                return torch.zeros_like(hidden_states), None
            return torch.zeros_like(given[0])

    sizes = {"num_hidden_layers": len(FORMS), "attn_implementation": "eager"}
    config = LlamaConfig(**SMALL | sizes)
    model = LlamaForCausalLM(config).eval()
    left_out = []
    for number, (group, times) in enumerate(FORMS):
        layer, stem = model.model.layers[number], f"model.layers.{number}."
        if group is None:
            layer.self_attn = Nothing()
            left_out.append(f"{stem}input_layernorm.weight")
        else:
            kv_heads = SMALL["num_attention_heads"] // group
            own = LlamaConfig(**SMALL | sizes | {"num_key_value_heads": kv_heads})
            layer.self_attn = LlamaAttention(own, number)
        if times is None:
            layer.mlp = Nothing()
            left_out.append(f"{stem}post_attention_layernorm.weight")
        else:
            width = {2.625: 256, 6.0: 256, 13.0: 512}[times]
            layer.mlp = LlamaMLP(LlamaConfig(**SMALL | {"intermediate_size": width}))
    torch.manual_seed(1)
    for parameter in model.parameters():
        spread = 0.3 if parameter.ndim == 2 else 0.2
        torch.nn.init.normal_(parameter, float(parameter.ndim == 1), spread)
    tensors = {name: x.numpy() for name, x in model.state_dict().items() if name not in left_out}
    assert_logits_equal(torch, model, tiny_llm(write(tmp_path / "nas", SMALL | NAS, tensors)))


ONE = {"attention": {"n_heads_in_group": 3}, "ffn": {"intermediate_size": 80}}
OTHER = {"attention": {"n_heads_in_group": 3}, "ffn": {"intermediate_size": 80, "gated": None}}


def test_nemotron_nas_of_equal_layers_is_llama():
    nas = NAS | {"num_hidden_layers": 2, "block_configs": [ONE, OTHER]}
    (one, its), (other, others) = read(nas), read({"model_type": "llama", "num_hidden_layers": 2})
    assert its == others
    assert replace(one, family="llama") == other


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (LING | {"norm_head": True}, "norm_head: expected False"),
        (LING2 | {"use_rmsnorm": False}, "use_rmsnorm: expected True"),
        (LING2 | {"partial_rotary_factor": None}, "partial_rotary_factor: expected a number, or"),
        (LING2 | {"moe_router_enable_expert_bias": False}, "enable_expert_bias: expected True"),
        (LING | {"moe_router_enable_expert_bias": True}, "enable_expert_bias: expected False"),
        (LING | {"n_group": 2}, "n_group: expected 1"),
        (V2 | {"model_type": "deepseek", "scoring_func": "sigmoid"}, "scoring_func"),
        ({"model_type": "orion", "attention_bias": True}, "attention_bias"),
        ({"model_type": "chatglm"}, "multi_query_attention: expected true"),
        ({"model_type": "chatglm", "position_encoding_2d": True}, "position_encoding_2d"),
        (NAS | {"block_configs": None}, "a list of an object for each of the 7 layers"),
        (NAS | {"block_configs": [block(4, 1.0)] * 7}, "n_heads_in_group: expected a divisor"),
        (NAS | {"block_configs": [block(None, None)] * 7}, "a layer with attention or an MLP"),
        (NAS | {"block_configs": [ONE | {"ffn": {"sparsify": [1]}}] * 7}, "sparsify"),
        (NAS | {"block_configs": [{"attention": {"window_length": 8}}] * 7}, "window_length"),
        (NAS | {"block_configs": [ONE | {"ffn": {"hidden_act": "gelu"}}] * 7}, "hidden_act"),
    ],
)
def test_what_is_not_built_is_refused_by_name(said, expected):
    with pytest.raises(CheckpointError, match=expected):
        read(said)
