"""Configs of every spelling give one spec, and whatever is wrong with a checkpoint is one
CheckpointError naming it.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import families
from jaxkv.errors import CheckpointError
from jaxkv.models.families import (
    DEFAULTS,
    FAMILIES,
    TEXT_OF,
    ConfigReader,
    Layout,
    Leaf,
    read_config,
    read_family,
)
from jaxkv.models.rope import Ropes, rope_frequencies
from jaxkv.models.spec import KVGroup, ModelSpec, RopeSpec
from jaxkv.ops.layers import ACTIVATIONS
from jaxkv.weights.load import Kept, load_weights
from tiers import some
from tiny import BASE, LLAMA3, VARIANTS, YARN, make_checkpoint, tiny_config

PATH = Path("dir/config.json")


def read(config: dict) -> tuple[ModelSpec, Layout]:
    return read_family(ConfigReader(config, PATH))


def spec_of(variant: str, **changes: object) -> ModelSpec:
    return read(tiny_config(variant, **changes))[0]


# What a config means
# --------------------------------------------------------------------------------------------------


LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
"""The families whose configs are spelt alike; the others: tests/models/test_every_family.py."""


def test_every_variant_reads():
    assert {config["model_type"] for config in VARIANTS.values()} == set(LLAMA_LIKE)
    for variant in VARIANTS:
        spec = spec_of(variant)
        assert spec.family == VARIANTS[variant]["model_type"]
        assert sorted(layer for group in spec.groups for layer in group.layers) == [0, 1, 2]


def test_a_key_that_changes_anything_is_one_that_was_asked_for():
    """Overrides of config.json are refused by it."""
    for variant in families.VARIANTS:
        config = families.text_config(variant)
        reader = ConfigReader(config, "config.json")
        whole = read_family(reader)
        for key in config.keys() - reader.asked.keys():
            others = {name: value for name, value in config.items() if name != key}
            assert read_family(ConfigReader(others, "config.json")) == whole, (variant, key)


@pytest.mark.parametrize("family", LLAMA_LIKE)
@pytest.mark.parametrize(
    ("old", "new", "meaning"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}, RopeSpec(theta=5e5)),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
            RopeSpec(kind="linear", theta=1e4, factor=2.0),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
            LLAMA3 | {"rope_theta": 5e5},
            RopeSpec(
                kind="llama3",
                theta=5e5,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_len=64,
            ),
        ),
        (  # Llama 4 Scout's, which leave nothing between
            {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}},
            LLAMA3 | {"rope_theta": 5e5, "high_freq_factor": 1.0},
            RopeSpec(
                kind="llama3",
                theta=5e5,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=1.0,
                original_max_len=64,
            ),
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": YARN | {"rope_type": None, "type": "yarn"}},
            YARN | {"rope_theta": 1e6},
            RopeSpec(
                kind="yarn",
                theta=1e6,
                factor=4.0,
                original_max_len=64,
                attention_factor=0.1 * np.log(4.0) + 1.0,
            ),
        ),
    ],
    ids=["default", "linear", "llama3", "scout", "yarn"],
)
def test_rope_parameters_and_rope_scaling_are_two_spellings_of_one_spec(family, old, new, meaning):
    base = BASE | {"model_type": family, "sliding_window": None}
    if "rope_scaling" in old:
        old = old | {
            "rope_scaling": {k: v for k, v in old["rope_scaling"].items() if v is not None}
        }
    specs = [read(base | old)[0], read(base | {"rope_parameters": new})[0]]
    assert specs[0] == specs[1]
    assert specs[0].rope == meaning


def test_both_spellings_may_stand_side_by_side_if_they_agree():
    """transformers writes some families' files so."""
    both = {"rope_parameters": YARN | {"rope_theta": 1e4}, "rope_scaling": YARN}
    assert spec_of("llama", **both) == spec_of("llama-yarn")


def test_the_longest_context_is_what_a_scaled_rope_is_meant_for():
    assert spec_of("llama").max_len == spec_of("llama-3").max_len == 256
    assert spec_of("llama-linear").max_len == 512
    assert spec_of("llama-yarn").max_len == 256
    assert spec_of("llama-yarn", rope_parameters=YARN | {"factor": 16}).max_len == 1024


def test_layers_of_gemma_4_that_are_alike_are_so_in_what_transformers_writes_of_them():
    from transformers import AutoConfig

    config = families.text_config("gemma4_text") | {"global_head_dim": 8}
    assert read(AutoConfig.for_model(**deepcopy(config)).to_dict()) == read(config)


def test_heads_of_two_sizes_with_one_rope_are_rotated_whole():
    rope = {"rope_type": "default", "rope_theta": 1e4}
    ropes = {"rope_parameters": {"sliding_attention": rope, "full_attention": rope}}
    spec, _ = read(families.text_config("gemma4_text") | ropes)
    assert {group.head_dim for group in spec.groups} == {8, 16}
    tables = Ropes(spec, jnp.arange(3))
    for group in spec.groups:
        found = tables.of(group.layers)(jnp.int32(group.layers[0]))
        angle_TP = np.arange(3)[:, None] * rope_frequencies(spec.rope, group.head_dim)[None]
        np.testing.assert_allclose(found.cos_TP, np.cos(angle_TP), atol=1e-6)


PART = families.ROPE | {"partial_rotary_factor": 0.5}
HALF = PART | {"rope_type": "proportional"}
WHOLE = PART | {"partial_rotary_factor": 1.0}


@pytest.mark.parametrize(
    ("variant", "reference", "ropes", "kind"),
    [
        ("deepseek_v3", "DeepseekV3", HALF, ""),
        *(
            ("deepseek_v4", "DeepseekV4", {"main": x, "compress": PART}, "main_")
            for x in (HALF, WHOLE)
        ),
    ],
)
def test_the_share_that_latent_attention_rotates_is_that_of_transformers(
    variant, reference, ropes, kind
):
    pytest.importorskip("torch")
    from transformers import AutoConfig

    config = families.text_config(variant) | {"rope_parameters": ropes}
    modeling = import_module(f"transformers.models.{variant}.modeling_{variant}")
    made = getattr(modeling, f"{reference}RotaryEmbedding")(
        AutoConfig.for_model(**deepcopy(config))
    )
    angle_TP = np.arange(3)[:, None] * getattr(made, f"{kind}inv_freq").numpy()[None]
    found = Ropes(read(config)[0], jnp.arange(3)).of([0])(jnp.int32(0))
    np.testing.assert_allclose(found.cos_TP, np.cos(angle_TP), atol=1e-6)


def test_a_tied_head_has_all_rows_of_the_embedding():
    """As transformers ties it, whatever `output_vocab_size` says of a head of its own."""
    config = families.text_config("apertus1p5_text")
    sizes = {
        tied: read(config | {"tie_word_embeddings": tied})[0].vocab_size for tied in (False, True)
    }
    assert sizes == {False: config["output_vocab_size"], True: config["vocab_size"]}


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_opposite_angles_stay_so_in_a_longer_context(kind):
    """nanochat's, of embeddings that follow from how long a sequence may get."""
    config = families.text_config("nanochat")
    width = config["hidden_size"] // config["num_attention_heads"] // 2
    factors = {"long_factor": [4.0] * width, "short_factor": [1.0] * width}
    ropes = families.ROPE | {"rope_type": kind, "original_max_position_embeddings": 32}
    ropes |= factors if kind == "longrope" else {"factor": 2.0}
    spec, _ = read(config | {"rope_parameters": ropes})
    plain = replace(spec, rope=replace(spec.rope, reverse=False))
    position_T, context_T = jnp.arange(3), jnp.int32([100] * 3)

    found, other = (
        Ropes(one, position_T, context_T).of([0])(jnp.int32(0)) for one in (spec, plain)
    )

    np.testing.assert_array_equal(found.sin_TP, -other.sin_TP)
    np.testing.assert_array_equal(found.cos_TP, other.cos_TP)
    assert np.any(found.sin_TP)


def test_null_kv_heads_are_the_query_heads_and_absent_ones_the_family_s_default():
    config = tiny_config("mistral", num_attention_heads=16, hidden_size=64)
    assert read(config | {"num_key_value_heads": None})[0].groups[0].num_kv_heads == 16
    del config["num_key_value_heads"]
    assert read(config)[0].groups[0].num_kv_heads == 8


def test_windows_put_layers_into_groups():
    def groups(variant: str, **changes: object) -> dict[int | None, tuple[int, ...]]:
        return {group.window: group.layers for group in spec_of(variant, **changes).groups}

    assert groups("llama") == {None: (0, 1, 2)}
    assert groups("mistral") == {None: (0, 1, 2)}
    assert groups("mistral-window") == {8: (0, 1, 2)}
    without_key = {
        key: value for key, value in tiny_config("mistral").items() if key != "sliding_window"
    }
    for max_len, window in ((8192, 4096), (4096, None)):
        spec, _ = read(without_key | {"max_position_embeddings": max_len})
        assert [group.window for group in spec.groups] == [window]
    assert groups("qwen2") == {None: (0, 1, 2)}
    assert groups("qwen2-mixed-windows") == {None: (0,), 8: (1, 2)}
    assert groups("qwen2-mixed-windows", use_sliding_window=False) == {None: (0, 1, 2)}
    assert groups("qwen2-mixed-windows", max_window_layers=0) == {8: (0, 1, 2)}
    assert groups("qwen2-mixed-windows", max_window_layers=28) == {None: (0, 1, 2)}
    assert groups("qwen3-layer-types") == {8: (0, 2), None: (1,)}
    asked = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    spec, _ = read(families.text_config("qwen3_moe") | asked)
    assert [group.window for group in spec.groups] == [8]
    assert spec_of("qwen3-layer-types").group_of(2) == (0, 1)
    assert spec_of("smollm2").groups == (KVGroup(layers=(0, 1, 2), num_kv_heads=3, head_dim=8),)


@pytest.mark.parametrize("family", ["apertus", "cwm", "gpt_oss", "ministral3", "mistral4"])
def test_a_config_that_says_nothing_of_rotation_scales_it_as_transformers_does(family):
    from transformers import AutoConfig

    variant = next(name for name in families.VARIANTS if name.split("-")[0] == family)
    config = families.SMALL | families.VARIANTS[variant] | {"model_type": family}
    keys = ("rope_parameters", "rope_scaling", "rope_theta")
    silent = {key: value for key, value in config.items() if key not in keys}
    for said in ({}, {"rope_theta": 3e4}, {"rope_theta": 3e4, "rope_scaling": None}):
        theirs = AutoConfig.for_model(family, **said).rope_parameters
        spec, _ = read(silent | said)
        assert spec.rope.kind == theirs["rope_type"] != "default"
        assert spec == read(silent | {"rope_parameters": theirs})[0]
    assert read(silent) == read(silent | dict.fromkeys(keys))
    assert read(silent | {"rope_parameters": {}})[0].rope.kind == "default"


def test_contexts_of_the_first_command_r_are_as_long_as_their_files_say():
    config = families.text_config("cohere") | {"max_position_embeddings": 64}
    assert read(config)[0].max_len == 64
    assert read(config | {"model_max_length": 1024})[0].max_len == 1024


OLD_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
OLD_LONG = {key: value for key, value in families.LONG.items() if "_factor" in key}
OLD_LONG |= {"type": "longrope"}


@pytest.mark.parametrize(
    ("variant", "said"),
    [
        ("gpt_neox", {"rope_theta": 3e4, "partial_rotary_factor": 0.5}),  # which it does not read
        ("gpt_neox", {"rotary_emb_base": 3e4, "rotary_pct": 0.5}),
        ("olmo3", {}),
        ("olmo3", {"rope_theta": 3e4, "rope_scaling": OLD_YARN}),
        ("olmo3", {"rope_parameters": {"full_attention": OLD_YARN}, "rope_theta": 3e4}),
        ("gemma3_text", {"rope_theta": 3e4, "rope_scaling": OLD_YARN}),
        ("gemma3_text", {"rope_local_base_freq": 3e4}),
        ("modernbert_decoder", {"rope_scaling": OLD_YARN, "local_rope_theta": 3e4}),
        ("modernbert_decoder", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("llama", {"rope_scaling": OLD_LONG, "original_max_position_embeddings": 64}),
        ("llama", {"rope_scaling": OLD_YARN, "original_max_position_embeddings": 32}),
        ("llama", {"rope_scaling": OLD_YARN | {"rope_type": "dynamic"}}),
        ("phi3", {"rope_scaling": OLD_LONG | {"original_max_position_embeddings": 64}}),
        ("phi3", {"rope_scaling": OLD_LONG | {"type": "yarn"}}),
        ("ministral3", {"rope_scaling": OLD_YARN | {"llama_4_scaling_beta": 0.3}}),
        ("minimax_m2", {"rope_theta": 3e4, "rotary_dim": 4}),
    ],
)
def test_a_file_s_own_words_for_its_rotation_mean_what_transformers_makes_of_them(variant, said):
    from transformers import AutoConfig

    config = families.text_config(variant)
    silent = {key: value for key, value in config.items() if key != "rope_parameters"}
    # It writes in what it is given.
    theirs = AutoConfig.for_model(**deepcopy(silent | said)).rope_parameters
    again = silent | {"rope_parameters": theirs}
    key = "original_max_position_embeddings"
    again |= {key: said[key]} if key in said else {}
    assert read(silent | said) == read(again)


def test_an_original_length_beside_sections_by_kind_counts_for_none_of_them():
    """Beside one section for all layers it counts more than within, as in transformers."""
    key, yarn = "original_max_position_embeddings", OLD_YARN | {"rope_theta": 1e4}
    for variant, section, expected in (
        ("olmo3", {"full_attention": yarn}, yarn[key]),
        ("llama", yarn, 32),
    ):
        said = {"rope_parameters": section, key: 32}
        spec, _ = read(families.text_config(variant) | said)
        ropes = spec.layer_ropes or (spec.rope,)
        assert {rope.original_max_len for rope in ropes if rope.kind == "yarn"} == {expected}


def test_rotations_that_transformers_does_not_read_are_refused():
    flat = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    for said, expected in (
        ({"rope_parameters": flat}, "rope_parameters: expected sections"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope_type: expected the"),
        ({"rope_scaling": flat}, "rope_scaling: expected none beside"),
    ):
        for variant in ("gemma3_text", "olmo3"):
            with pytest.raises(CheckpointError, match=expected):
                read(families.text_config(variant) | said)
    old = {"rope_scaling": {"type": "linear", "factor": 2.0}}
    with pytest.raises(CheckpointError, match="rope_type: expected the"):
        read(families.text_config("modernbert_decoder") | old)


@pytest.mark.parametrize(
    ("variant", "said"),
    [
        ("dots1", {"sliding_window": 8, "max_window_layers": 1}),
        ("qwen2_moe", {"sliding_window": 8, "max_window_layers": 2, "use_sliding_window": True}),
        ("qwen2_moe", {"sliding_window": 8, "max_window_layers": 0, "use_sliding_window": True}),
        ("exaone4", {"sliding_window_pattern": "LLLG"}),  # beside layer_types
        ("exaone_moe", {"sliding_window_pattern": "LLLG"}),
        ("gemma", {"hidden_act": "gelu"}),  # meant is the one by tanh
        ("cohere2", {"head_dim": None}),  # made of other sizes
        ("cohere2_moe", {"rope_theta": 3e4, "rope_scaling": OLD_YARN}),  # which is not read
        ("lfm3", {"rope_parameters": {"full_attention": {}, "sliding_attention": {}}}),
        ("hyperclovax", {"attention_multiplier": None}),
        ("laguna", {"partial_rotary_factor": 0.5, "rope_parameters": None}),
        ("nemotron_h", {"mamba_dt_min": 0.1, "mamba_n_groups": 3, "mamba_conv_bias": False}),
        ("recurrent_gemma", {"head_dim": None}),
        ("diffllama-biases", {"num_key_value_heads": None, "rope_parameters": None}),
        ("jetmoe", {"kv_channels": None, "num_attention_heads": None, "head_dim": 8}),
        ("rwkv", {"intermediate_size": None, "max_position_embeddings": None}),
        ("zamba", {"mamba_dt_rank": "auto", "attention_head_dim": 16}),
        ("zamba2", {"layers_block_type": ["mamba", "hybrid", "hybrid", "mamba", "hybrid"]}),
        ("zamba2-plain", {"use_long_context": True, "num_key_value_heads": None}),
        ("xlstm", {"num_blocks": 3, "embedding_dim": 128, "gate_soft_cap": None}),
        ("dory", {"layer_types": None, "n_recurrent_layers": 2, "rope_parameters": None}),
        ("dory", {"n_recurrent_loops": None, "ngpt_alpha_init": None}),
        ("hrm_text", {"H_cycles": None, "L_cycles": None}),
        ("hrm_text", {"embedding_scale": None, "initializer_range": 0.5}),
        ("zaya-plain", {"layer_types": None, "rope_parameters": None, "router_hidden_size": None}),
        (
            "inkling_text",
            {"layer_types": None, "num_hidden_layers": 7, "mlp_layer_types": None},
        ),
        (
            "inkling_text",
            {"layer_types": None, "local_layer_ids": [0, 2], "num_hidden_layers": 4}
            | {"mlp_layer_types": None, "dense_mlp_idx": 2, "dense_intermediate_size": 56}
            | {"conv_kernel_size": None, "sconv_kernel_size": 3, "model_max_length": 512}
            | {"max_position_embeddings": None, "log_scaling_alpha": None},
        ),
        (
            "inkling2_text",
            {"layer_types": None, "num_hidden_layers": 7, "n_layers_per_attn_res_block": None}
            | {"log_scaling_alpha": None, "log_scaling_n_floor": None, "scoring_func": None}
            | {"conv_kernel_size": None, "sconv_kernel_size": 3, "routed_scaling_factor": 2.0},
        ),
        (
            "inkling2_loop_text",
            {"layer_types": None, "loop_layer_index_end": None, "loop_num_passes": None}
            | {"loop_config": {"core_start": 4, "core_end": 6, "num_passes": 2, "gate_rank": 5}},
        ),
        ("kimi_linear", {"num_experts_per_tok": 2, "norm_topk_prob": False}),  # other names
        ("mixtral", {"num_experts": 5, "num_local_experts": None}),
        ("glm_moe_dsa-shared", {"indexer_types": None, "index_topk_freq": 2}),
        ("hy_v4", {"indexer_types": None, "mlp_layer_types": None, "num_hidden_layers": 7}),
        ("glm_moe_dsa-shared", {"indexer_types": None, "index_topk_pattern": "FSSFS"}),
        ("bailing_hybrid", {"head_dim": 12, "short_conv_kernel_size": 3}),
        ("minimax_m3_vl_text", {"layer_types": None, "mlp_layer_types": None}),
        (  # experts' width has two names
            "deepseek_v4",
            {"layer_types": None, "mlp_layer_types": None, "compress_rates": None}
            | {"intermediate_size": None},
        ),
        (
            "deepseek_v4",
            {"layer_types": None, "compress_ratios": [0, 4, 128, 4, 0], "compress_rate_csa": 8}
            | {"mlp_layer_types": None, "num_hash_layers": 0, "compress_rates": None}
            | {"partial_rotary_factor": None, "qk_rope_head_dim": 4, "intermediate_size": None}
            | {"rope_parameters": families.YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        ),
        (
            "minimax_m3_vl_text",
            {"layer_types": None, "mlp_layer_types": None, "moe_layer_freq": [0, 1, 1]}
            | {
                "sparse_attention_config": {
                    "sparse_attention_freq": [0, 0, 1],
                    "sparse_index_dim": 8,
                    "sparse_block_size": 16,
                    "sparse_topk_blocks": 2,
                    "sparse_local_block": 0,
                }
            },
        ),
        (
            "qwen4_exp_text",
            {"layer_types": None, "num_hidden_layers": 5, "ple_embed_dim": None}
            | {"output_gate_type": None, "ple_layer_ids": [5, 2, 5], "eos_token_id": 7},
        ),
        (
            "qwen4_exp_text",
            {"layer_types": ["linear_attention", "full_attention"] * 2, "ple_layer_ids": None}
            | {"eos_token_id": None, "full_attention_interval": 2},
        ),
        ("axk2", {"first_k_dense_replace": None, "moe_layer_freq": 2, "gated_norm_rank": None}),
        ("axk2-light", {"n_routed_experts": None, "num_local_experts": 6}),
        ("mllama_text_model", {"cross_attention_layers": None, "num_hidden_layers": 10}),
        ("step3p5", {"mlp_layer_types": None}),  # only layers without a window are scaled
        ("step3p5", {"layer_types": None, "moe_layers_enum": None, "sliding_window": None}),
        (
            "step3p5",
            {"num_sliding_attention_heads": None, "rope_scaling": None, "rope_theta": 1e5}
            | {
                "attention_other_setting": {"num_attention_heads": 8},
                "partial_rotary_factors": None,
            }
            | {"num_nextn_predict_layers": 1, "query_pre_attn_scalar": None}
            | {"layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"]},
        ),
        (
            "mistral_large4_text",
            {"no_rope_layers": None, "kv_source_layers": None, "indexer_types": None}
            | {"first_k_dense_replace": None, "mlp_layer_types": None, "rope_parameters": None},
        ),
        (
            "mistral_large4_text",
            {"indexer_types": None, "index_topk_freq": 2, "no_rope_layers": None}
            | {"no_rope_layer_interval": 2, "kv_source_layers": None},
        ),
        (
            "dots3_note_text",
            {"use_dsa": False, "moe_layer_freq": [0, 1, 1, 0, 1, 1, 1], "rope_theta": 1e5}
            | {"swa_qk_rope_head_dim": 4, "sliding_window": None, "sliding_window_size": 5}
            | {"moe_shared_expert_intermediate_size": 28, "first_k_dense_replace": 2}
            | {"attention_gate_type": "headwise", "k_rope_only_layernorm": True},
        ),
        (
            "dots3_note_text",
            {"layer_types": ["full_attention", "sliding_attention"] * 6, "num_hidden_layers": 12}
            | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "moe_layer_freq": 3},
        ),
        (
            "dots3_note_text",
            {"layer_types": ["full_attention", "indexed_attention"] + ["sliding_attention"] * 4}
            | {"per_layer_config": {str(i): {"v_head_dim": 6} for i in range(2, 6)}},
        ),
        ("dots3_note_text", {"use_sliding_window": False, "swa_rope_theta": 7e3}),
        (
            "dots3_note_text",
            {"model_type": "dots3_note", "vision_config": families.DOTS3[0]} | families.DOTS3[1],
        ),
        ("cohere_compass_text", {"logit_scale": None, "layer_types": None}),
        (
            "hunyuan_vl_text",
            {"rope_parameters": None, "rope_theta": 3e4, "head_dim": None}
            | {
                "rope_scaling": {
                    "type": "xdrope",
                    "alpha": 10.0,
                    "factor": 1.0,
                    "xdrope_section": [1] * 4,
                }
            }
            | {"attention_head_dim": 8},
        ),
        (
            "molmo2_text",
            {"attention_bias": None, "qkv_bias": True, "rms_norm_eps": None}
            | {"layer_norm_eps": 1e-3},
        ),
        ("molmo2_text-olmo", {"rope_scaling_layers": None}),
        ("muse_glimmer_text", {"output_multiplier": None, "layer_rope_theta": [0.0, 1e4, 0, 1e4]}),
        ("muse_spark_text", {"mlp_layer_types": None, "layer_types": ["full_attention"] * 4}),
        ("qwen2_5_omni_text", {"sliding_window": 8, "max_window_layers": 1}),
        ("qwen2_5_omni_text", {"sliding_window": 8, "use_sliding_window": True}),
        ("qwen3_omni_moe_text", {"mlp_only_layers": None, "decoder_sparse_step": 2}),
    ],
)
def test_a_config_means_what_transformers_writes_for_it(variant, said):
    from transformers import AutoConfig

    config = families.text_config(variant) | said
    config = {key: value for key, value in config.items() if value is not None}
    theirs = AutoConfig.for_model(**deepcopy(config)).to_dict()
    assert read(config) == read(json.loads(json.dumps(theirs)))


def test_xlstm_has_two_names_of_its_sizes():
    config = families.text_config("xlstm")
    names = {"hidden_size": "embedding_dim", "num_hidden_layers": "num_blocks"}
    assert read({names.get(key, key): value for key, value in config.items()}) == read(config)


def test_fused_matrices_of_xlstm_are_those_of_single_ones(tmp_path):
    """transformers 5.24 fails to make a model of them."""
    config, fused = families.text_config("xlstm"), tmp_path / "fused"
    tensors = load_file(make_checkpoint(tmp_path / "single", config) / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        stem = f"backbone.blocks.{layer}."
        for name, parts in (
            ("mlstm_layer.qkv_opreact.weight", [f"mlstm_layer.{one}.weight" for one in "qkv"]),
            ("mlstm_layer.ifgate_preact.weight", ["mlstm_layer.igate_preact.weight"]),
            ("mlstm_layer.ifgate_preact.bias", ["mlstm_layer.igate_preact.bias"]),
            ("ffn.proj_up_gate_z.weight", ["ffn.proj_up_gate.weight", "ffn.proj_up.weight"]),
        ):
            last = {"q": "ogate", "i": "fgate"}.get(name.split(".")[1][0])
            if last is not None:
                parts = [*parts, f"mlstm_layer.{last}_preact.{name.rpartition('.')[2]}"]
            tensors[stem + name] = np.concatenate([tensors.pop(stem + part) for part in parts])
    fused.mkdir()
    save_file(tensors, fused / "model.safetensors")
    (fused / "config.json").write_text(json.dumps(config | {"weight_mode": "fused"}))
    one, two = (
        load_weights(folder, *read_family(read_config(folder)), Kept(dtype="float32"))
        for folder in (tmp_path / "single", fused)
    )
    jax.tree.map(np.testing.assert_array_equal, one, two)


def test_the_4_of_the_first_files_of_llama_4_is_true():
    """transformers 4.51, which wrote it, asked only whether it is something."""
    config, key = families.text_config("llama4_text"), "attn_temperature_tuning"
    assert read(config | {key: 4}) == read(config | {key: True}) != read(config | {key: False})


def test_mistral_that_says_what_each_layer_is_is_ministral(tmp_path):
    """As in transformers, which looks for it when it reads a file."""
    from transformers import AutoConfig

    config = families.text_config("ministral") | {"model_type": "mistral"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = AutoConfig.from_pretrained(tmp_path).to_dict()
    (one, its), (other, others) = read(config), read(theirs)
    assert its == others
    assert replace(one, family="ministral") == other


@pytest.mark.parametrize(
    ("said", "least"),
    [
        ({}, -5.0),
        ({"linear_lower_bound": None}, 0.0),
        ({"linear_attn_config": {"gate_lower_bound": None}}, -5.0),
        ({"linear_attn_config": {"gate_lower_bound": -2.0, "safe_gate": False}}, -2.0),
        ({"linear_attn_config": {"gate_lower_bound": None, "safe_gate": False}}, 0.0),
    ],
)
def test_decays_of_glm5_next_have_a_least_where_transformers_has_one(said, least):
    from transformers import AutoConfig

    config = families.text_config("glm5_next_text") | said
    theirs = AutoConfig.for_model(**config).linear_lower_bound
    assert read(config)[0].states[0].mixer.least_decay == (theirs or 0.0) == least


@pytest.mark.parametrize(
    ("variant", "eps"), [("deepseek_v3", 1e-6), ("hy_v4", 1e-6), ("glm5_next_text", 1e-3)]
)
def test_norms_inside_of_latent_attention_have_an_eps_of_their_own_but_in_glm5_next(variant, eps):
    """The classes in transformers have it so."""
    spec, _ = read(families.text_config(variant) | {"rms_norm_eps": 1e-3})
    assert (spec.norm_eps, spec.attention.latent_eps) == (1e-3, eps)


def test_experts_outside_of_the_groups_of_axk2_are_chosen_before_those_below_zero():
    """Here all scores with their bias are below zero, so both experts of the other group are."""
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig
    from transformers.models.axk2.modeling_axk2 import AXK2TopkRouter

    few = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    config, rng = families.text_config("axk2") | few, np.random.default_rng(0)
    theirs, bias = AXK2TopkRouter(AutoConfig.for_model(**config)), np.float32([-2, -2, -3.5, -3.5])
    x, w = (rng.normal(size=(rows, config["hidden_size"])).astype(np.float32) for rows in (5, 4))
    theirs.weight.data, theirs.e_score_correction_bias.data = map(torch.from_numpy, (w, bias))
    with torch.no_grad():
        logits, weight, chosen = (one.numpy() for one in theirs(torch.from_numpy(x)))
    found, own = read(config)[0].router(logits, bias)
    assert np.sort(found).tolist() == np.sort(chosen).tolist() == [[2, 3]] * 5
    np.testing.assert_allclose(np.sort(own), np.sort(weight), rtol=1e-5)


def test_an_alpha_of_hunyuan_is_a_larger_base():
    pytest.importorskip("torch")
    from transformers import AutoConfig
    from transformers.models.hunyuan_v1_dense import modeling_hunyuan_v1_dense as reference

    said = {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}}
    config = families.text_config("hunyuan_v1_dense") | said
    theirs = reference.HunYuanDenseV1RotaryEmbedding(AutoConfig.for_model(**config)).inv_freq
    spec, _ = read(config)
    np.testing.assert_allclose(rope_frequencies(spec.rope, spec.head_dim), theirs, rtol=1e-6)
    assert not spec.depends_on_context


def test_activations_are_those_that_transformers_has_under_their_names():
    torch = pytest.importorskip("torch")
    from transformers.activations import ACT2FN

    x = np.linspace(-6, 6, 97, dtype=np.float32)
    for name, activation in ACTIVATIONS.items():
        want = ACT2FN[name](torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(activation(x), want, atol=2e-6, err_msg=name)


def test_a_model_of_several_parts_is_tied_if_either_level_says_so():
    """transformers writes both, and looks at the outer one."""
    text = families.text_config("llama") | {"tie_word_embeddings": False}
    for tied in (True, False):
        config = {"model_type": "llava", "text_config": text, "tie_word_embeddings": tied}
        assert (read(config)[1].top["head"].same_as is not None) == tied


@pytest.mark.parametrize("variant", ["afmoe", "gpt_oss"])
def test_attention_has_biases_where_its_config_says_so(variant):
    for said in (True, False):
        layout = read(families.text_config(variant) | {"attention_bias": said})[1]
        assert [f"{name}_bias" in layout.layers[0] for name in "qkvo"] == [said] * 4


@pytest.mark.parametrize("family", LLAMA_LIKE)
def test_keys_that_a_config_leaves_out_mean_what_transformers_means(family):
    from transformers import AutoConfig

    given = {"vocab_size": 32, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 1}
    given |= {"num_attention_heads": 4 if family == "llama" else 32}
    theirs = AutoConfig.for_model(family, **given)
    spec, layout = read(given | {"model_type": family})
    (group,) = spec.groups
    assert spec.max_len == theirs.max_position_embeddings
    assert spec.head_dim == (
        getattr(theirs, "head_dim", None) or 128 // given["num_attention_heads"]
    )
    assert group.num_kv_heads == theirs.num_key_value_heads
    windowed = getattr(theirs, "use_sliding_window", family == "mistral")
    assert group.window == (theirs.sliding_window if windowed else None)
    assert (spec.norm_eps, spec.activation) == (theirs.rms_norm_eps, theirs.hidden_act)
    assert spec.rope == RopeSpec(theta=theirs.rope_parameters["rope_theta"])
    assert (layout.top["head"].same_as is not None) == theirs.tie_word_embeddings


def test_biases_and_qk_norms_are_leaves_where_the_family_has_them():
    def optional(variant: str) -> set[str]:
        return {
            name
            for name in read(tiny_config(variant))[1].layers[0]
            if name.endswith(("_bias", "q_norm", "k_norm"))
        }

    qkv, mlp = {"q_bias", "k_bias", "v_bias"}, {"gate_bias", "up_bias", "down_bias"}
    assert optional("llama") == optional("mistral") == set()
    assert optional("llama-biases") == qkv | {"o_bias"} | mlp
    assert optional("qwen2") == qkv
    assert optional("qwen3") == {"q_norm", "k_norm"}
    assert optional("qwen3-biases") == {"q_norm", "k_norm"} | qkv | {"o_bias"}


# What a config must not say
# -------------------------------------------------------------------------------------------

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "head_dim",
)


@pytest.mark.parametrize("family", LLAMA_LIKE)
@pytest.mark.parametrize(
    "value", [10**12, 2**64, -1, 0, True, False, "48", 48.0, [48], {"a": 1}], ids=repr
)
def test_an_absurd_size_is_refused_by_name(family, value):
    for key in SIZES:
        with pytest.raises(CheckpointError) as caught:
            read(BASE | {"model_type": family, "sliding_window": None, key: value})
        assert str(caught.value).startswith(f"{PATH}: {key}: expected a whole number from 1 to ")
        assert str(caught.value).endswith(f"got {value!r}")


WITH_A_READER = [name for name in families.VARIANTS if name.split("-")[0] in FAMILIES]
ONE_EACH = {name.split("-")[0]: name for name in reversed(WITH_A_READER)}.values()
"""The first variant of each family: more of them go through the same reader."""


@pytest.mark.parametrize("variant", some(WITH_A_READER, *ONE_EACH))
def test_an_absurd_size_of_any_family_is_refused_by_name(variant):
    config = families.SMALL | families.VARIANTS[variant]
    config |= {"model_type": variant.split("-")[0]}
    keys = [*SIZES, "n_embd", "n_layer", "n_head", "n_positions", "sliding_window", "num_kv_heads"]
    known = read(config)[0]
    for key in keys:
        for value in (10**12, -1, 2.5, "48", [48]):
            changed = config | {key: value}
            with suppress(CheckpointError):
                assert read(changed)[0] == known, f"{key}={value!r} is taken"


@pytest.mark.parametrize("variant", some(WITH_A_READER, *ONE_EACH))
def test_a_key_of_another_kind_is_a_checkpoint_error(variant):
    """Whatever key it is; some values of some keys are fine."""
    config = families.SMALL | families.VARIANTS[variant]
    config |= {"model_type": variant.split("-")[0]}
    defaults = json.loads(DEFAULTS.read_text()).get(config["model_type"], {})
    for key in {*config, *defaults, "rope_scaling", "rope_parameters", "layer_types"}:
        for value in (-1, "x", [], {"a": 1}, [[1]], ["full_attention"] * 3, float("nan")):
            with suppress(CheckpointError):
                read(config | {key: value})


def test_a_size_that_must_be_there_and_is_not_is_named():
    for key in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
    ):
        config = {name: value for name, value in tiny_config("llama").items() if name != key}
        with pytest.raises(CheckpointError, match=f"{key}: expected a whole number .* got None"):
            read(config)


ROPE_KEYS = "rope_parameters"
BAD = {
    "heads not divisible": (
        {"num_key_value_heads": 4},
        ["num_key_value_heads", "divisor", "6", "got 4"],
    ),
    "odd head_dim": ({"head_dim": 7}, ["head_dim", "even", "7"]),
    "odd head_dim by division": ({"hidden_size": 54}, ["head_dim", "even"]),
    "unknown activation": ({"hidden_act": "relu7"}, ["hidden_act", "silu", "'relu7'"]),
    "activation of another family": ({"hidden_act": "xielu"}, ["hidden_act", "silu", "'xielu'"]),
    "activation of another type": ({"hidden_act": ["silu"]}, ["hidden_act", "['silu']"]),
    "no epsilon": ({"rms_norm_eps": 0}, ["rms_norm_eps", "got 0"]),
    "NaN epsilon": ({"rms_norm_eps": float("nan")}, ["rms_norm_eps", "a number from", "nan"]),
    "infinite theta": ({"rope_theta": float("inf")}, ["rope_theta", "a number from", "inf"]),
    "bool theta": ({"rope_theta": True}, ["rope_theta", "True"]),
    "tied as a number": (
        {"tie_word_embeddings": 1},
        ["tie_word_embeddings", "true or false", "got 1"],
    ),
    "bias as text": ({"attention_bias": "no"}, ["attention_bias", "true or false", "'no'"]),
    "unknown rope": (
        {ROPE_KEYS: {"rope_type": "spiral"}},
        [ROPE_KEYS, "rope_type", "proportional or yarn", "'spiral'"],
    ),
    "unknown old rope": (
        {"rope_scaling": {"type": "whirl", "factor": 2.0}},
        ["rope_scaling", "type", "'whirl'"],
    ),
    "rope as a list": ({"rope_scaling": [2.0]}, ["rope_scaling", "an object", "[2.0]"]),
    "longrope without a length": (
        {ROPE_KEYS: families.LONG | {"original_max_position_embeddings": 1}},
        ["original_max_position_embeddings", "a number >= 2", "got 1"],
    ),
    "linear without a factor": (
        {"rope_scaling": {"type": "linear"}},
        ["rope_scaling", "factor", "None"],
    ),
    "llama3 without factors": (
        {ROPE_KEYS: {"rope_type": "llama3", "factor": 8.0}},
        ["low_freq_factor", "None"],
    ),
    "llama3 upside down": (
        {ROPE_KEYS: LLAMA3 | {"high_freq_factor": 0.5}},
        ["high_freq_factor", "low_freq_factor=1.0"],
    ),
    "two ropes": (
        {ROPE_KEYS: LLAMA3, "rope_scaling": YARN},
        ["rope_scaling", "none beside a different", "yarn"],
    ),
    "partly rotated": ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
    "quantised": (
        {"quantization_config": {"quant_method": "nf9"}},
        ["quantization_config", "quant_method", "gptq", "'nf9'"],
    ),
    "model type of another kind": ({"model_type": ["llama"]}, ["model_type", "['llama']"]),
    "no model type": ({"model_type": None}, ["model_type", "None"]),
    "unknown model type": (
        {"model_type": "mamba9"},
        ["model_type", "'mamba9'", "the nearest: mamba, mamba2"],
    ),
    "base is not a family": ({"model_type": "base"}, ["model_type", "'base'"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_config_is_refused_by_name(case):
    changes, fragments = BAD[case]
    with pytest.raises(CheckpointError) as caught:
        read(tiny_config("llama", **changes))
    missing = [
        fragment
        for fragment in [str(PATH), "expected", *fragments]
        if fragment not in str(caught.value)
    ]
    assert missing == [], str(caught.value)


def test_an_index_of_fewer_dimensions_than_are_rotated_is_refused_where_all_of_a_head_are():
    for kind in ("default", "proportional"):
        rope = {"rope_type": kind, "rope_theta": 1e4, "partial_rotary_factor": 1.0}
        config = families.text_config("minimax_m3_vl_text") | {"rope_parameters": rope}
        with pytest.raises(CheckpointError, match="index_head_dim: expected at least the 8 that"):
            read(config)
        assert read(config | {"index_head_dim": 8})


def test_a_cap_on_scores_that_gemma_3_does_not_have_is_refused():
    """Its config class has Gemma 2's key, and transformers' model caps nothing."""
    with pytest.raises(CheckpointError, match="attn_logit_softcapping: expected none"):
        read(families.text_config("gemma3_text") | {"attn_logit_softcapping": 50.0})


@pytest.mark.parametrize(
    ("variant", "key", "value", "expected"),
    [
        ("gemma3n_text", "altup_active_idx", 1, r"0 \(not built\)"),
        ("gemma3n_text", "altup_num_inputs", 1, "a whole number from 2"),
        ("gemma3n_text", "activation_sparsity_pattern", [0.5, 1.0] * 3, "a list of 6 numbers"),
        ("gemma3n_text", "intermediate_size", [80], "a number, or a list of 6"),
        ("bitnet", "head_dim", 4, "hidden_size=48"),
        ("bailing_hybrid", "expert_swiglu_limit_list", [1.0], "a number for each of the 4"),
        ("ernie4_5_moe", "moe_norm_min", 0.1, "1e-12"),
        ("modernbert_decoder", "classifier_activation", "relu", "gelu"),
        ("glm_moe_dsa", "indexer_types", ["shared", "full", "full"], "a first layer that is full"),
        ("glm5_next_text", "index_topk_pattern", "FFFS", r"FFFF \(not built\)"),
        ("deepseek_v4", "o_groups", 4, "a divisor of the 6 of num_attention_heads"),
        ("deepseek_v4", "num_key_value_heads", 2, "1: a row is the key of every head"),
        ("deepseek_v4", "index_head_dim", 6, "at least the 8 that are rotated"),
        ("deepseek_v4", "scoring_func", "relu", "one of sigmoid, softmax, sqrtsoftplus"),
        ("hy_v4", "hidden_act", "gelu", "one of silu"),
        ("hy_v4", "swiglu_limit", 10**309, "a number from -1e"),
        ("hy_v4", "swiglu_limit", float("nan"), "a number from -1e"),
        ("bloom", "n_head", 2**20, "a whole number from 1 to 16384"),
        ("mpt", "n_heads", 2**20, "a whole number from 1 to 16384"),
        ("falcon-falls", "num_attention_heads", 2**20, "a whole number from 1 to 16384"),
        ("minimax_m3_vl_text", "index_n_heads", 4, "2, one for each KV head"),
        ("minimax_m3_vl_text", "index_local_blocks", 4, "at most the 3 of index_topk_blocks"),
        ("deepseek_v4", "compress_rates", {"compressed_sparse_attention": 3}, "divisors of 128"),
        ("glm5_next_text", "index_kpool", 24, r"a divisor of 128 \(nothing else"),
        ("minimax_m3_vl_text", "index_head_dim", 12, "at most the 8 of head_dim"),
        ("minimax_m3_vl_text", "index_head_dim", 2, "at least the 4 that are rotated"),
        ("minimax_m3_vl_text", "index_block_size", 24, r"a divisor of 128 \(nothing else"),
        ("minimax_m3_vl_text", "swiglu_alpha", 1.0, "1.702"),
        ("qwen4_exp_text", "hc_count", 1, "a whole number from 2"),
        ("qwen4_exp_text", "indexer_budget", 10, "a multiple of indexer_compress_ratio=4"),
        ("qwen4_exp_text", "indexer_compress_ratio", 24, r"a divisor of 128 \(nothing else"),
        ("qwen4_exp_text", "indexer_compress_ratio", None, "a whole number"),
        ("qwen4_exp_text", "indexer_kv_heads", 2, "1"),
        ("qwen4_exp_text", "indexer_head_dim", 2, "from the 4 that are rotated to the 8"),
        ("qwen4_exp_text", "indexer_head_dim", 12, "from the 4 that are rotated to the 8"),
        ("qwen4_exp_text", "output_gate_type", "gelu", "one of sigmoid, silu"),
        (
            "qwen4_exp_text",
            "rope_parameters",
            families.ROPE | {"rope_type": "dynamic", "factor": 2.0, "partial_rotary_factor": 0.5},
            "a rotation that does not depend on how long",
        ),
        ("qwen4_exp_text", "ple_layer_ids", [1, 2], "a list of layers, the first 1, with linear"),
        ("qwen4_exp_text", "ple_layer_ids", [0], "a list of layers, the first 1, with linear"),
        ("qwen4_exp_text", "ple_embed_dim", 25, "a multiple of the 6 tables"),
        ("qwen4_exp_text", "eos_token_id", [], "a token below 151"),
        ("qwen4_exp_text", "ngram_size", 1, "a whole number from 2"),
        ("qwen4_exp_text", "ple_conv_kernel_size", 1, "a whole number from 2"),
        ("qwen4_exp_text", "heads_per_ngram", 4000, "at most 4096 tables"),
        ("qwen4_exp_text", "ngram_vocab_size_base", 2**30, "tables with fewer than"),
        ("qwen4_exp_text", "seed", -1, "a whole number from 0"),
        ("openai_gpt", "afn", "gelu_new", "one of gelu, relu"),
        ("xglm", "pad_token_id", 5, "0 or 1"),
        ("mllama_text_model", "cross_attention_layers", [0, 1, 2, 3, 4], "fewer than the 5"),
        ("mllama_text_model", "cross_attention_layers", ["1"], "a list of whole numbers"),
        ("step3p5", "per_layer_config", {"1": {"head_dim": 4}}, "num_attention_heads only"),
        ("step3p5", "moe_layers_enum", "2;3", "a list of layers, or a text"),
        ("step3p5", "swiglu_limits", [1.0], "a number or null for each of the 4 layers"),
        ("step3p5", "swiglu_limits", [-1.0] * 4, "a number from 0"),
        ("step3p5", "use_qk_norm", False, "True"),
        (
            "dots3_note_text",
            "per_layer_config",
            {"2": {"head_dim": 18, "qk_nope_head_dim": 10}},
            "equal sizes in all layers of sliding",
        ),
        ("dots3_note_text", "per_layer_config", {"6": {}}, "an object with numbers below 6"),
        ("dots3_note_text", "per_layer_config", {"2": {"skip": ["mlp"]}}, "num_attention_heads, "),
        ("dots3_note_text", "num_key_value_heads", 2, "6, one for each query head"),
        ("dots3_note_text", "apply_mla_qkv_lora_rescale", False, r"True \(not built\)"),
        ("dots3_note_text", "swa_attention_gate_type", "elementwise", r"headwise \(not built\)"),
        ("dots3_note_text", "moe_layer_freq", [1, 1], "a number for each of 6 layers"),
        ("dots3_note_text", "q_lora_rank", None, "a whole number from 1"),
        ("dots3_note_text", "index_head_dim", 6, "at least the 8 of qk_rope_head_dim"),
        (
            "dots3_note_text",
            "rope_parameters",
            {"sliding_attention": {"rope_theta": 1e4}},
            "a section of indexed_attention too",
        ),
        ("laguna", "num_attention_heads_per_layer", [6], "a number for each of the 3 layers"),
        ("laguna", "num_attention_heads_per_layer", [6, 0, 6], "a whole number"),
        ("mistral_large4_text", "q_lora_rank", 16, r"none \(not built\)"),
        ("mistral_large4_text", "no_rope_layers", [1, 0], "a list of 6 out of 0 and 1"),
        ("mistral_large4_text", "kv_source_layers", [0, 1], "for each of 6 layers itself, or one"),
        ("mistral_large4_text", "kv_source_layers", [0, 1, 2, 3, 5, 5], "for each of 6 layers"),
        ("mistral_large4_text", "kv_source_layers", [0, 0, 1, 3, 4, 5], "for each of 6 layers"),
        ("mistral_large4_text", "kv_source_layers", [0, 0, 2, 3, 4, 5], "the last source that"),
        ("mistral_large4_text", "kv_source_layers", [0, 1, 2, 2, 4, 0], "the last source that"),
        ("molmo2_text", "qk_norm_type", "llama", "one of olmo, qwen3"),
        (
            "muse_glimmer_text",
            "layer_rope_theta",
            [1e4, 0, 5e4, 0],
            "for each of the 4 layers 0 or",
        ),
        ("muse_glimmer_text", "layer_rope_theta", [1e4, 0], "for each of the 4 layers 0 or"),
        ("muse_glimmer_text", "layer_rope_theta", 1e4, "for each of the 4 layers 0 or"),
        ("muse_glimmer_text", "final_logit_softcapping", 0.0, "a number from"),
        ("molmo2_text", "rope_scaling_layers", ["0"], "a list of whole numbers"),
        ("qwen3_omni_moe_text", "use_sliding_window", True, r"False \(not built\)"),
        ("axk2", "q_lora_rank", None, "a whole number"),
        ("dots1", "norm_topk_prob", None, "true or false, got None"),
        ("doge", "is_moe", True, r"False \(not built\)"),
        ("diffllama", "num_key_value_heads", 1, "an even number, as heads are in pairs"),
        ("jetmoe", "num_experts_per_tok", 7, "at most the 6 experts"),
        ("rwkv", "attention_hidden_size", 40, r"48 \(not built\)"),
        ("rwkv", "layer_norm_epsilon", 1e-6, r"1e-05 \(not built\)"),
        ("zamba", "n_mamba_heads", 5, "a divisor of the 96 channels"),
        ("zamba", "attention_hidden_size", 48, r"96 \(not built\)"),
        ("zamba", "attention_head_dim", 8, r"16 \(not built\)"),
        ("xlstm", "use_bias", True, r"False \(not built\)"),
        ("xlstm", "gate_soft_cap", 40.0, "at most 30.0"),
        ("xlstm", "qk_dim_factor", 0.51, "a part of hidden_size=128 that 4 heads divide"),
        ("xlstm", "inference_state_dtype", "bfloat16", r"float32 \(not built\)"),
        ("xlstm", "embedding_dim", 64, "128, as hidden_size says"),
        ("dory", "recurrent_kv_cache_mode", "last_loop", r"per_loop \(not built\)"),
        ("dory", "n_recurrent_layers", 3, "4 layers with input and output ones"),
        ("dory", "n_recurrent_layers", 0, "a whole number from 1"),
        ("dory", "n_recurrent_loops", 10**4, "a whole number from 1 to 4096"),
        ("dory", "layer_types", ["mlp", "full_attention"] * 2, "attention and mlp by"),
        ("hrm_text", "H_cycles", 1000, "at most 4096 layers, each time"),
        ("inkling_text", "n_shared_experts", 0, "a whole number from 1"),
        ("inkling_text", "unpadded_vocab_size", 161, "a whole number from 1 to 160"),
        ("inkling_text", "conv_kernel_size", 1, "a whole number from 2"),
        ("inkling2_text", "scoring_func", "tanh", "one of sigmoid, sqrtsoftplus"),
        ("inkling2_text", "mlp_up_softcap", 0.0, "a number from"),
        ("inkling2_loop_text", "loop_layer_index_start", 3, "a multiple of n_layers_per_attn_"),
        ("inkling2_loop_text", "loop_layer_index_end", 5, "a multiple of n_layers_per_attn_"),
        ("inkling2_loop_text", "loop_layer_index_end", 2, "more than loop_layer_index_start=2"),
        ("inkling2_loop_text", "loop_layer_index_end", 8, "a whole number from 1 to 6"),
        ("inkling2_loop_text", "loop_num_passes", 3000, "at most 4096 layers in all passes"),
        ("zaya", "num_experts_per_tok", 2, r"1 \(not built\)"),
        ("zaya", "cca_time0", 1, "a whole number from 2"),
        ("zaya", "cca_time1", 1, "a whole number from 2"),
        ("zamba2", "tie_word_embeddings", False, r"True \(not built\)"),
        ("zamba2", "hybrid_layer_ids", [4, 2, 1], r"\[1, 2, 4\] \(not built\)"),
        ("zamba2", "num_attention_heads", 7, "a divisor of 2 \\* hidden_size=96"),
        ("axk2", "topk_group", None, "a number, as n_group is one"),
        ("axk2", "n_group", None, "a number, as topk_group is one"),
        ("axk2", "gated_norm_rank", 0, "a whole number"),
        ("deepseek_v2", "mlp_bias", True, "False"),  # of shared experts too
        ("deepseek_v4", "mlp_bias", True, "False"),
    ],
)
def test_what_a_family_is_not_built_for_is_refused_by_name(variant, key, value, expected):
    with pytest.raises(CheckpointError, match=f"{key}: expected {expected}"):
        read(families.text_config(variant) | {key: value})


@pytest.mark.parametrize("pairs", [[[["local"] * 10**5, 4096]], [[["local"], 2]] * 2])
def test_more_kinds_than_layers_are_refused_before_they_are_listed(pairs):
    config = families.text_config("gpt_neo") | {"attention_layers": None, "attention_types": pairs}
    with pytest.raises(CheckpointError, match="attention_types: expected kinds of 3 layers in all"):
        read(config)


def test_packed_ternary_weights_are_refused_by_name():
    said = {"quantization_config": {"quant_method": "bitnet", "quantization_mode": "offline"}}
    with pytest.raises(CheckpointError, match=r"quant_method: expected one of .* got 'bitnet'"):
        read(families.text_config("bitnet") | said)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"layer_types": ["full_attention"]}, ["layer_types", "a list of 3"]),
        (
            {"layer_types": ["full_attention"] * 2 + ["linear_attention"]},
            ["layer_types", "linear_attention"],
        ),
        (
            {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": False},
            ["use_sliding_window"],
        ),
        ({"layer_types": [["full_attention"]] * 3}, ["layer_types"]),
        ({"layer_types": "full_attention"}, ["layer_types"]),
        ({"use_sliding_window": True, "sliding_window": -4}, ["sliding_window", "-4"]),
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": -1},
            ["max_window_layers", "-1"],
        ),
        ({"use_sliding_window": "yes"}, ["use_sliding_window", "'yes'"]),
    ],
)
def test_bad_windows_are_refused_by_name(family, changes, fragments):
    with pytest.raises(CheckpointError) as caught:
        read(BASE | {"model_type": family} | changes)
    assert [fragment for fragment in fragments if fragment not in str(caught.value)] == [], str(
        caught.value
    )


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (b"{", "JSON"),
        (b"[1]", "a JSON object"),
        (b"[" * 100_000, "JSON"),
        (b"\xff\xfe", "JSON"),
        (b"", "JSON"),
    ],
)
def test_a_config_that_is_no_json_object_is_refused(tmp_path, content, fragment):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=fragment) as caught:
        read_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_a_missing_or_huge_config_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: not found"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b" " * 10_000_001)
    with pytest.raises(CheckpointError, match="at most 10000000 bytes"):
        read_config(tmp_path)


# Tensors
# --------------------------------------------------------------------------------------------------------------


def load(directory: Path, **options: object) -> dict:
    return load_weights(
        directory, *read_family(read_config(directory)), Kept(**{"dtype": "float32"} | options)
    )


def changed(
    directory: Path, variant: str, change: dict[str, np.ndarray | None], **config: object
) -> Path:
    """A tiny checkpoint with some tensors replaced, added or (None) taken away."""
    make_checkpoint(directory, tiny_config(variant, **config))
    tensors = load_file(directory / "model.safetensors") | change
    save_file(
        {name: x for name, x in tensors.items() if x is not None}, directory / "model.safetensors"
    )
    return directory


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.2.post_attention_layernorm.weight",
        "model.layers.1.self_attn.q_norm.weight",
        "model.layers.1.self_attn.k_norm.weight",
        "model.layers.2.mlp.down_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
    ],
)
def test_a_missing_tensor_and_a_tensor_of_another_shape_are_named(tmp_path, name):
    shape = load_file(make_checkpoint(tmp_path, tiny_config("qwen3")) / "model.safetensors")[
        name
    ].shape
    with pytest.raises(CheckpointError, match=f"missing tensor {name}") as caught:
        load(changed(tmp_path, "qwen3", {name: None}))
    assert str(tmp_path) in str(caught.value)
    for wrong in ((shape[0] + 1, *shape[1:]), shape[::-1] if len(shape) > 1 else (), (*shape, 1)):
        with pytest.raises(CheckpointError) as caught:
            load(changed(tmp_path, "qwen3", {name: np.zeros(wrong, np.float32)}))
        assert f"{name}: expected shape {shape} from config.json, got {wrong}" in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.mlp.gate_proj.bias",
        "model.layers.3.input_layernorm.weight",
        "model.layers.0.self_attn.q_proj.weight_scale",
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.norm.bias",
        "vision.weight",
    ],
)
def test_a_tensor_that_nobody_takes_is_refused_by_name(tmp_path, name):
    with pytest.raises(CheckpointError, match=f"llama does not use: {name}"):
        load(changed(tmp_path, "llama", {name: np.zeros(48, np.float32)}))


@pytest.mark.parametrize(
    "name",
    ["layers.0.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq", "rotary_emb.cos_cached"],
)
def test_derived_tensors_of_old_checkpoints_are_ignored(tmp_path, name):
    load(changed(tmp_path, "llama", {f"model.{name}": np.zeros(4, np.float32)}))


@pytest.mark.parametrize(
    ("variant", "name"),
    [("hy_v4", "mtp_layers.0.eh_proj.weight"), ("glm5_next_text", "layers.4.eh_proj.weight")],
)
def test_layers_that_predict_are_ignored_where_a_config_does_not_name_them(tmp_path, variant, name):
    make_checkpoint(tmp_path, families.text_config(variant))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {f"model.{name}": np.zeros(4, np.float32)}, tmp_path / "model.safetensors")
    load(tmp_path)


@pytest.mark.parametrize(("variant", "prefix"), [("gpt2", "transformer."), ("llama", "model.")])
def test_names_as_a_model_without_a_head_has_them_are_taken_too(tmp_path, variant, prefix):
    """GPT-2's are published so, with masks beside them."""
    config = families.text_config(variant) | {"tie_word_embeddings": True}
    want = load(make_checkpoint(tmp_path, config))
    tensors = load_file(tmp_path / "model.safetensors")
    assert all(name.startswith(prefix) for name in tensors)
    tensors = {name.removeprefix(prefix): x for name, x in tensors.items()}
    if variant == "gpt2":
        tensors["h.0.attn.bias"] = np.ones((1, 1, 8, 8), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path), want)


def test_names_of_axk2_as_transformers_modules_have_them_are_taken_too(tmp_path):
    """Its checkpoints have others."""
    want = load(make_checkpoint(tmp_path, families.text_config("axk2")))
    tensors = load_file(tmp_path / "model.safetensors")
    names = {"W_down": "mlp.fc1", "W_up": "mlp.fc2", "q_b_proj": "q_gate_proj"}
    for old, new in names.items():
        assert any(f".{old}." in name for name in tensors)
        tensors = {name.replace(f".{old}.", f".{new}."): x for name, x in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path), want)


def as_published(directory: Path, outer: dict, rename: dict[str, str], more: list[str]) -> None:
    """Makes a text part's checkpoint one of a model of several parts: its tensors under other
    names, beside some that are of no text part.
    """
    tensors = load_file(directory / "model.safetensors")
    for old, new in rename.items():
        tensors = {re.sub(old, new, name): x for name, x in tensors.items()}
    tensors |= {name: np.zeros(4, np.float32) for name in more}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(outer))


SPOKEN = ["talker.model.layers.0.input_layernorm.weight", "token2wav.code2wav.x.weight"]
PICTURED = [
    "blocks.0.attn.qkv.weight",
    "layers.0.self_attn.add_q_proj.weight",
    "layers.0.input_layernorm_moe_gen.weight",
    "norm_moe_gen.weight",
    "time_embedder.linear_1.weight",
]


@pytest.mark.parametrize(
    ("variant", "outer", "rename", "more"),
    [
        ("qwen2_5_omni_text", "qwen2_5_omni", {"^": "thinker."}, SPOKEN),
        (
            "qwen3_omni_moe_text",
            "qwen3_omni_moe",
            {r"^model\.": "model.language_model.", "^": "thinker."},
            [*SPOKEN, "thinker.model.visual.blocks.0.attn.qkv.weight", "code2wav.x.weight"],
        ),
        (
            "nemotron_h",
            "nemotron_h_omni",
            {"^": "language_model."},
            ["vision_model.radio_model.x.weight", "language_model.mtp.layers.0.norm.weight"],
        ),
        (
            "qwen3_vl_text",
            "cosmos3_omni",
            {r"^model\.": "", r"\.([qkv])_proj\.": r".to_\1.", "o_proj": "to_out"}
            | {r"\.([qk])_norm\.": r".norm_\1."},
            PICTURED,
        ),
        (
            "cosmos3_edge_text",
            "cosmos3_edge",
            {r"^model\.": "", r"\.([qkv])_proj\.": r".to_\1.", "o_proj": "to_out"}
            | {"fc1": "up_proj", "fc2": "down_proj"},
            PICTURED,
        ),
        (
            "hy_v4_vl_text",
            "hy_v4_vl",
            {r"_layer\.hc_": "_layer.hc_pre.hc_", "sinks": "learnable_sink_param"}
            | {r"self_attn\.gate_proj": "self_attn.linear_gate"},
            ["vit.layers.0.input_layernorm.weight", "model.mtp_layers.0.eh_proj.weight"],
        ),
        (
            "molmo2_text",
            "molmo2",
            {},
            [
                "model.transformer.wte.new_embedding",
                "model.vision_backbone.image_vit.transformer.resblocks.0.attention.wq.weight",
            ],
        ),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_names_and_sections_as_models_of_several_parts_are_published(
    tmp_path, variant, outer, rename, more
):
    config = families.text_config(variant)
    want = load(make_checkpoint(tmp_path, config))
    whole = {"model_type": outer, "text_config": config}
    if variant == "nemotron_h":
        whole = {"model_type": outer, "llm_config": config}
    if "omni_" in variant:
        inner = {"model_type": f"{outer}_thinker", "text_config": config}
        whole = {"model_type": outer, "thinker_config": inner, "talker_config": {"x": 1}}
    as_published(tmp_path, whole, rename, more)
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path), want)


def test_a_text_part_that_does_not_say_what_it_is_is_what_transformers_takes_it_for():
    pytest.importorskip("transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    unknown = {"internvl_chat", "kimi_vl"}  # whose classes stand beside the checkpoints
    for outer in TEXT_OF.keys() - unknown:
        family, parts = TEXT_OF[outer], CONFIG_MAPPING[outer].sub_configs_defaults
        assert (parts.get("text_config") or parts["thinker_config"]).model_type == family


def test_voxtral_has_defaults_of_its_own_for_its_text_part():
    from transformers import AutoConfig

    text = {"vocab_size": 151, "num_hidden_layers": 3}
    theirs = AutoConfig.for_model("voxtral", text_config=text).text_config.to_dict()
    spec, _ = read({"model_type": "voxtral", "text_config": text})
    assert spec == read(json.loads(json.dumps(theirs)))[0]
    assert (spec.hidden_size, spec.head_dim, spec.rope.theta) == (3072, 128, 1e8)


def test_a_thinker_without_a_section_or_a_model_type_is_found_all_the_same(tmp_path):
    config = families.text_config("qwen2_5_omni_text")
    del config["model_type"]
    for inner in (config, {"text_config": config, "tie_word_embeddings": True}):
        spec, layout = read({"model_type": "qwen2_5_omni", "thinker_config": inner})
        assert (spec.family, layout.part_of) == ("qwen2_5_omni_text", "qwen2_5_omni")
        assert (layout.top["head"].same_as is not None) == ("text_config" in inner)


NGRAMS = "model.layers.0.ple.ple_embedding."


def with_pieces(tmp_path: Path, counts: tuple[int, ...], **more: np.ndarray) -> Path:
    """Writes a checkpoint whose first table of n-grams is in tensors of so many rows."""
    make_checkpoint(tmp_path, families.text_config("qwen4_exp_text"))
    tensors = load_file(tmp_path / "model.safetensors")
    table, begin = tensors.pop(f"{NGRAMS}ngram_embedding.weight"), 0
    for number, rows in enumerate(counts):
        name = f"{NGRAMS}ngram_embedding.shard_{number}.weight"
        tensors[name] = np.ascontiguousarray(table[begin : begin + rows])
        begin += rows
    tensors |= {NGRAMS + name: x for name, x in more.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("counts", [(632,), (200, 200, 200, 32), (1,) * 632])
def test_rows_of_a_table_may_be_in_one_tensor_or_in_several(tmp_path, counts):
    want = load(make_checkpoint(tmp_path, families.text_config("qwen4_exp_text")))
    jax.tree.map(np.testing.assert_array_equal, load(with_pieces(tmp_path, counts)), want)


def test_a_table_with_rows_missing_is_named(tmp_path):
    name = rf"{NGRAMS}ngram_embedding\.shard_0\.weight: expected 632 rows .*, got 500"
    with pytest.raises(CheckpointError, match=name):
        load(with_pieces(tmp_path, (300, 200)))
    name = r"missing tensor .*ngram_embedding\.weight"
    with pytest.raises(CheckpointError, match=name):
        load(with_pieces(tmp_path, ()))


def test_hashes_of_n_grams_that_a_checkpoint_has_are_those_of_its_config(tmp_path):
    _, layout = read(families.text_config("qwen4_exp_text"))
    stored = {name: np.array(layout.told[NGRAMS + name]) for name in TOLD}
    load(with_pieces(tmp_path, (632,), **stored))
    for name in TOLD:
        with pytest.raises(CheckpointError, match=f"{NGRAMS}{name}: expected the numbers"):
            load(with_pieces(tmp_path, (632,), **stored | {name: stored[name] + 1}))


TOLD = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")


def test_integers_are_no_weights_and_every_problem_is_listed(tmp_path):
    change = {
        "model.norm.weight": np.zeros(48, np.int8),
        "lm_head.weight": None,
        "extra": np.zeros(1, np.float32),
    }
    with pytest.raises(CheckpointError) as caught:
        load(changed(tmp_path, "llama", change))
    for fragment in (
        "model.norm.weight: expected one of float32",
        "got int8",
        "missing tensor lm_head",
        "use: extra",
    ):
        assert fragment in str(caught.value)


def test_many_problems_keep_the_message_short(tmp_path):
    change = {f"extra.{i}": np.zeros(1, np.float32) for i in range(100)}
    with pytest.raises(CheckpointError, match=r"and 90 more; take all"):
        load(changed(tmp_path, "llama", change))


@pytest.mark.parametrize("variant", ["llama", "qwen2-mixed-windows"])
def test_weights_are_the_checkpoints_values_stacked_by_layer(tmp_path, variant):
    make_checkpoint(tmp_path, tiny_config(variant), shards=3)
    tensors = {k: v for file in tmp_path.glob("*.safetensors") for k, v in load_file(file).items()}
    spec, layout = read_family(read_config(tmp_path))
    for dtype, as_bits in (("float32", False), ("bfloat16", False), ("bfloat16", True)):
        weights = load(tmp_path, dtype=dtype, as_bits=as_bits)

        def value(leaf: np.ndarray, as_bits: bool = as_bits) -> np.ndarray:
            leaf = np.asarray(leaf)
            assert not as_bits or leaf.dtype in (np.uint16, np.float32)
            is_short = leaf.dtype == np.uint16
            return (leaf.view(ml_dtypes.bfloat16) if is_short else leaf).astype(np.float32)

        def kept(leaf: Leaf, dtype: str = dtype) -> np.dtype:
            return np.dtype(np.float32 if len(leaf.info.shape) == 1 else dtype)

        for name, leaf in layout.top.items():
            want = tensors[leaf.source].astype(kept(leaf)).astype(np.float32)
            np.testing.assert_array_equal(value(weights[name]), want)
        for layer in range(spec.num_layers):
            for name, leaf in layout.layers[0].items():
                got = weights["layers"][name][layer]
                want = (
                    tensors[leaf.source.format(layer=layer)].astype(kept(leaf)).astype(np.float32)
                )
                np.testing.assert_array_equal(value(got), want)


def embedding_of(directory: Path) -> np.ndarray:
    return load_file(directory / "model.safetensors")["model.embed_tokens.weight"]


def test_a_tied_head_stored_twice_is_dropped_if_equal_and_used_if_not(tmp_path):
    embed = embedding_of(make_checkpoint(tmp_path, tiny_config("qwen2")))
    assert "head" not in load(tmp_path)
    assert "head" not in load(changed(tmp_path, "qwen2", {"lm_head.weight": embed}))
    other = embed.copy()
    other[-1, -1] += 1
    weights = load(changed(tmp_path, "qwen2", {"lm_head.weight": other}))
    np.testing.assert_array_equal(weights["head"], other)
    np.testing.assert_array_equal(weights["embed"], embed)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: expected shape"):
        load(changed(tmp_path, "qwen2", {"lm_head.weight": other[:-1]}))


def test_an_untied_head_equal_to_the_embedding_stays_a_head(tmp_path):
    embed = embedding_of(make_checkpoint(tmp_path, tiny_config("llama")))
    assert "head" in load(changed(tmp_path, "llama", {"lm_head.weight": embed}))


def test_a_checkpoint_of_half_or_double_precision_becomes_the_asked_dtype(tmp_path):
    tensors = load_file(make_checkpoint(tmp_path, tiny_config("llama")) / "model.safetensors")
    for stored in (np.float16, np.float64, ml_dtypes.bfloat16):
        save_file(
            {name: x.astype(stored) for name, x in tensors.items()}, tmp_path / "model.safetensors"
        )
        got = np.asarray(load(tmp_path)["norm"])
        np.testing.assert_array_equal(
            got, tensors["model.norm.weight"].astype(stored).astype(np.float32)
        )


def test_the_spec_of_a_config_file_is_the_spec_of_its_values(tmp_path):
    for variant in VARIANTS:
        (tmp_path / "config.json").write_text(json.dumps(tiny_config(variant)))
        assert read_family(read_config(tmp_path))[0] == spec_of(variant)


@pytest.mark.parametrize(("keep", "max_len"), [(64, 64), (1000, 256)])
def test_doge_is_read_for_sequences_whose_keys_are_all_attended_to(keep, max_len):
    """Of longer ones transformers leaves out the keys that are worth the least."""
    spec, _ = read(families.text_config("doge") | {"keep_window_size": keep})
    assert spec.max_len == max_len
