"""config.json files as they are published, abbreviated: each reads as a model of as many parameters as
its safetensors files are said to hold.
"""

import math
from fnmatch import fnmatchcase

import pytest

from jaxkv.models import quantisation
from jaxkv.models.families import ConfigReader, read_family
from jaxkv.models.quantisation import Quantisation, read_quantisation
from jaxkv.weights.tree import tree_leaves

NARROW = (1.3125, 2.625, 2.625, 1.3125, 5.25, 1.3125, 2.625, 1.3125, 1.3125, 1.3125)
NARROWER = (1.3125, 1, 1, 1.3125, 1, 1, 1, 1.3125, 1.3125, 0.5, 0.5, 1, 1, 0.5, 0.5, 1, 0.5, 0.5)
NEMOTRON = (
    *[(8, 2.625), *[(8, 5.25)] * 5, *[(None, 2.625)] * 2, *[(8, 5.25)] * 3, (None, 3.28125)],
    *[*[(8, 5.25)] * 30, *((None, width) for width in NARROW), (8, 5.25)],
    *[*((None, width) for width in NARROWER), *[(8, 5.25)] * 9],
)
"""Query heads of each KV head of the layers of Llama-3.3-Nemotron-Super-49B, None for no attention,
and widths of their MLPs.
"""

PUBLISHED = {
    "gpt2": (
        124_439_808,
        {
            "model_type": "gpt2",
            "n_ctx": 1024,
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 1024,
            "vocab_size": 50257,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-05,
            "resid_pdrop": 0.1,
        },
    ),
    "pythia-1.4b": (
        1_414_647_808,
        {
            "model_type": "gpt_neox",
            "hidden_act": "gelu",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "layer_norm_eps": 1e-05,
            "max_position_embeddings": 2048,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "rotary_emb_base": 10000,
            "rotary_pct": 0.25,
            "tie_word_embeddings": False,
            "use_parallel_residual": True,
            "vocab_size": 50304,
        },
    ),
    "gemma-2b": (
        2_506_172_416,
        {
            "model_type": "gemma",
            "head_dim": 256,
            "hidden_act": "gelu",
            "hidden_activation": None,
            "hidden_size": 2048,
            "intermediate_size": 16384,
            "max_position_embeddings": 8192,
            "num_attention_heads": 8,
            "num_hidden_layers": 18,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "vocab_size": 256000,
        },
    ),
    "gemma-2-9b": (
        9_241_705_984,
        {
            "model_type": "gemma2",
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 3584,
            "intermediate_size": 14336,
            "max_position_embeddings": 8192,
            "num_attention_heads": 16,
            "num_hidden_layers": 42,
            "num_key_value_heads": 8,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "sliding_window_size": 4096,
            "vocab_size": 256000,
        },
    ),
    "gemma-3-1b": (
        999_885_952,
        {
            "model_type": "gemma3_text",
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "max_position_embeddings": 32768,
            "num_attention_heads": 4,
            "num_hidden_layers": 26,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "vocab_size": 262144,
        },
    ),
    "phi-2": (
        2_779_683_840,
        {
            "model_type": "phi",
            "hidden_act": "gelu_new",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "layer_norm_eps": 1e-05,
            "max_position_embeddings": 2048,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "partial_rotary_factor": 0.4,
            "qk_layernorm": False,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "vocab_size": 51200,
        },
    ),
    "phi-3.5-mini": (
        3_821_079_552,
        {
            "model_type": "phi3",
            "attention_bias": False,
            "hidden_act": "silu",
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "long_factor": [1.1] * 48,
                "short_factor": [1.0] * 48,
                "type": "longrope",
            },
            "rope_theta": 10000.0,
            "sliding_window": 262144,
            "tie_word_embeddings": False,
            "vocab_size": 32064,
        },
    ),
    "phi-4": (
        14_659_507_200,
        {
            "model_type": "phi3",
            "hidden_act": "silu",
            "hidden_size": 5120,
            "intermediate_size": 17920,
            "max_position_embeddings": 16384,
            "num_attention_heads": 40,
            "num_hidden_layers": 40,
            "num_key_value_heads": 10,
            "original_max_position_embeddings": 16384,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 250000,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "vocab_size": 100352,
        },
    ),
    "phi-4-mini": (
        3_836_021_760,
        {
            "model_type": "phi3",
            "full_attn_mod": 1,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "num_attention_heads": 24,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "long_factor": [1.1] * 48,
                "short_factor": [1.0] * 48,
                "type": "longrope",
            },
            "rope_theta": 10000.0,
            "sliding_window": 262144,
            "tie_word_embeddings": True,
            "vocab_size": 200064,
        },
    ),
    "olmo-2-7b": (
        7_298_617_344,
        {
            "model_type": "olmo2",
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "max_position_embeddings": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-06,
            "rope_theta": 500000,
            "tie_word_embeddings": False,
            "vocab_size": 100352,
        },
    ),
    "falcon-7b": (
        6_921_720_704,
        {
            "model_type": "falcon",
            "alibi": False,
            "bias": False,
            "hidden_size": 4544,
            "layer_norm_epsilon": 1e-05,
            "multi_query": True,
            "new_decoder_architecture": False,
            "num_attention_heads": 71,
            "num_hidden_layers": 32,
            "parallel_attn": True,
            "vocab_size": 65024,
        },
    ),
    "starcoder2-3b": (
        3_030_371_328,
        {
            "model_type": "starcoder2",
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "max_position_embeddings": 16384,
            "mlp_type": "default",
            "norm_epsilon": 1e-05,
            "norm_type": "layer_norm",
            "num_attention_heads": 24,
            "num_hidden_layers": 30,
            "num_key_value_heads": 2,
            "rope_theta": 999999.4420358813,
            "sliding_window": 4096,
            "use_bias": True,
            "vocab_size": 49152,
        },
    ),
    "stablelm-2-1.6b": (
        1_644_515_328,
        {
            "model_type": "stablelm",
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "layer_norm_eps": 1e-05,
            "max_position_embeddings": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": 24,
            "num_key_value_heads": 32,
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000,
            "tie_word_embeddings": False,
            "use_qkv_bias": True,
            "vocab_size": 100352,
        },
    ),
    "smollm3": (
        3_075_098_624,
        {
            "model_type": "smollm3",
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "max_position_embeddings": 65536,
            "no_rope_layer_interval": 4,
            "num_attention_heads": 16,
            "num_hidden_layers": 36,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_theta": 5000000.0,
            "use_sliding_window": False,
            "vocab_size": 128256,
        },
    ),
    "glm-4-9b": (
        9_399_951_360,
        {
            "model_type": "glm",
            "attention_bias": True,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 13696,
            "max_position_embeddings": 131072,
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1.5625e-07,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "vocab_size": 151552,
        },
    ),
    "exaone-4-1.2b": (
        1_279_391_488,
        {
            "model_type": "exaone4",
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 4096,
            "max_position_embeddings": 65536,
            "num_attention_heads": 32,
            "num_hidden_layers": 30,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 16.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 1000000,
            "sliding_window": None,
            "sliding_window_pattern": None,
            "tie_word_embeddings": True,
            "vocab_size": 102400,
        },
    ),
    "seed-oss": (
        36_151_104_512,
        {
            "model_type": "seed_oss",
            "attention_bias": True,
            "attention_out_bias": False,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "intermediate_size": 27648,
            "max_position_embeddings": 524288,
            "mlp_bias": False,
            "num_attention_heads": 80,
            "num_hidden_layers": 64,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"rope_type": "default"},
            "rope_theta": 10000000.0,
            "tie_word_embeddings": False,
            "vocab_size": 155136,
        },
    ),
    "mistral-small-3.1": (
        23_572_403_200,
        {
            "model_type": "mistral3",
            "text_config": {
                "attention_dropout": 0.0,
                "head_dim": 128,
                "hidden_act": "silu",
                "hidden_size": 5120,
                "intermediate_size": 32768,
                "max_position_embeddings": 131072,
                "model_type": "mistral",
                "num_attention_heads": 32,
                "num_hidden_layers": 40,
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-05,
                "rope_theta": 1000000000.0,
                "sliding_window": None,
                "vocab_size": 131072,
            },
            "vision_config": {"hidden_size": 1024},
        },
    ),
    "qwen2.5-vl-7b": (
        7_615_616_512,
        {
            "model_type": "qwen2_5_vl",
            "hidden_act": "silu",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "max_position_embeddings": 128000,
            "max_window_layers": 28,
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "use_sliding_window": False,
            "tie_word_embeddings": False,
            "vision_config": {"depth": 32},
            "vocab_size": 152064,
        },
    ),
    "gpt-j-6b": (
        6_050_882_784,
        {
            "model_type": "gptj",
            "activation_function": "gelu_new",
            "n_embd": 4096,
            "n_head": 16,
            "n_inner": None,
            "n_layer": 28,
            "n_positions": 2048,
            "rotary": True,
            "rotary_dim": 64,
            "tie_word_embeddings": False,
            "vocab_size": 50400,
        },
    ),
    "minicpm-2b": (
        2_724_880_896,
        {
            "model_type": "minicpm",
            "hidden_act": "silu",
            "hidden_size": 2304,
            "intermediate_size": 5760,
            "max_position_embeddings": 4096,
            "num_attention_heads": 36,
            "num_hidden_layers": 40,
            "num_key_value_heads": 36,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "scale_emb": 12,
            "dim_model_base": 256,
            "scale_depth": 1.4,
            "vocab_size": 122753,
            "tie_word_embeddings": True,
        },
    ),
    "starcoder": (
        15_517_456_384,
        {
            "model_type": "gpt_bigcode",
            "activation_function": "gelu",
            "attention_softmax_in_fp32": True,
            "multi_query": True,
            "n_embd": 6144,
            "n_head": 48,
            "n_inner": 24576,
            "n_layer": 40,
            "n_positions": 8192,
            "scale_attn_weights": True,
            "vocab_size": 49152,
        },
    ),
    "mixtral-8x7b": (
        46_702_792_704,
        {
            "model_type": "mixtral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "num_attention_heads": 32,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "sliding_window": None,
            "vocab_size": 32000,
        },
    ),
    "qwen3-30b-a3b": (
        30_532_122_624,
        {
            "model_type": "qwen3_moe",
            "decoder_sparse_step": 1,
            "head_dim": 128,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_position_embeddings": 40960,
            "max_window_layers": 48,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
            "vocab_size": 151936,
        },
    ),
    "olmoe-1b-7b": (
        6_919_161_856,
        {
            "model_type": "olmoe",
            "clip_qkv": None,
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "max_position_embeddings": 4096,
            "num_attention_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 16,
            "num_key_value_heads": 16,
            "vocab_size": 50304,
        },
    ),
    "gpt-oss-20b": (
        20_914_757_184,
        {
            "model_type": "gpt_oss",
            "attention_bias": True,
            "head_dim": 64,
            "hidden_size": 2880,
            "initial_context_length": 4096,
            "intermediate_size": 2880,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "max_position_embeddings": 131072,
            "num_attention_heads": 64,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "num_key_value_heads": 8,
            "num_local_experts": 32,
            "quantization_config": {
                "quant_method": "mxfp4",
                "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
            },
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "truncate": False,
            },
            "rope_theta": 150000,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "tie_word_embeddings": False,
            "vocab_size": 201088,
        },
    ),
    "ling-3.0-tiny": (
        7_893_392_800,
        {
            "model_type": "bailing_hybrid",
            "expert_swiglu_limit_list": None,
            "first_k_dense_replace": 1,
            "gated_attention_proj_granularity_type": "head_wise",
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 1536,
            "intermediate_size": 4608,
            "kda_lower_bound": -5,
            "kda_safe_gate": True,
            "kv_lora_rank": 512,
            "layer_group_size": 4,
            "linear_silu": True,
            "max_position_embeddings": 131072,
            "moe_intermediate_size": 512,
            "n_group": 8,
            "no_kda_lora": True,
            "norm_topk_prob": True,
            "num_attention_heads": 16,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 24,
            "num_key_value_heads": 16,
            "num_kv_heads_for_linear_attn": 0,
            "num_nextn_predict_layers": 0,
            "num_shared_experts": 1,
            "partial_rotary_factor": 0.5,
            "q_lora_rank": 256,
            "qk_head_dim": 192,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-06,
            "rope_interleave": True,
            "rope_parameters": {
                "partial_rotary_factor": 0.5,
                "rope_theta": 6000000,
                "rope_type": "default",
            },
            "rotary_dim": 64,
            "routed_scaling_factor": 2.5,
            "score_function": "sigmoid",
            "short_conv_kernel_size": 4,
            "tie_word_embeddings": False,
            "topk_group": 4,
            "use_bias": False,
            "use_mla_nope": False,
            "use_qk_norm": True,
            "use_qkv_bias": False,
            "v_head_dim": 128,
            "vocab_size": 157184,
        },
    ),
    "ling-lite-1.5": (
        16_801_974_272,
        {
            "model_type": "bailing_moe",
            "first_k_dense_replace": 0,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 1408,
            "max_position_embeddings": 32768,
            "moe_intermediate_size": 1408,
            "norm_head": False,
            "norm_softmax": False,
            "norm_topk_prob": True,
            "num_attention_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "num_shared_experts": 2,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 600000,
            "tie_word_embeddings": False,
            "use_bias": False,
            "use_qkv_bias": False,
            "vocab_size": 126464,
        },
    ),
    "ling-mini-2.0": (
        16_255_643_392,
        {
            "model_type": "bailing_moe",
            "first_k_dense_replace": 1,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "max_position_embeddings": 32768,
            "moe_intermediate_size": 512,
            "moe_router_enable_expert_bias": True,
            "moe_shared_expert_intermediate_size": 512,
            "n_group": 8,
            "norm_topk_prob": True,
            "num_attention_heads": 16,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 20,
            "num_key_value_heads": 4,
            "num_shared_experts": 1,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 600000,
            "routed_scaling_factor": 2.5,
            "router_dtype": "fp32",
            "score_function": "sigmoid",
            "tie_word_embeddings": False,
            "topk_group": 4,
            "use_bias": False,
            "use_qk_norm": True,
            "use_qkv_bias": False,
            "use_rmsnorm": True,
            "vocab_size": 157184,
        },
    ),
    "deepseek-moe-16b": (
        16_375_728_128,
        {
            "model_type": "deepseek",
            "attention_bias": False,
            "first_k_dense_replace": 1,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "max_position_embeddings": 4096,
            "moe_intermediate_size": 1408,
            "moe_layer_freq": 1,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "num_attention_heads": 16,
            "num_experts_per_tok": 6,
            "num_hidden_layers": 28,
            "num_key_value_heads": 16,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 10000,
            "scoring_func": "softmax",
            "tie_word_embeddings": False,
            "vocab_size": 102400,
        },
    ),
    "glm-4-9b-chat": (
        9_399_951_360,
        {
            "model_type": "chatglm",
            "add_bias_linear": False,
            "add_qkv_bias": True,
            "apply_residual_connection_post_layernorm": False,
            "ffn_hidden_size": 13696,
            "fp32_residual_connection": False,
            "hidden_size": 4096,
            "kv_channels": 128,
            "layernorm_epsilon": 1.5625e-07,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "num_attention_heads": 32,
            "num_layers": 40,
            "original_rope": True,
            "padded_vocab_size": 151552,
            "post_layer_norm": True,
            "rmsnorm": True,
            "rope_ratio": 500,
            "seq_length": 131072,
            "tie_word_embeddings": False,
        },
    ),
    "llama-3.3-nemotron-super-49b": (
        49_867_145_216,
        {
            "model_type": "nemotron-nas",
            "attention_bias": False,
            "block_configs": [
                {
                    "attention": {"n_heads_in_group": group, "no_op": group is None},
                    "ffn": {"ffn_mult": width, "no_op": False, "replace_with_linear": False},
                }
                for group, width in NEMOTRON
            ],
            "hidden_act": "silu",
            "hidden_size": 8192,
            "intermediate_size": None,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "num_attention_heads": 64,
            "num_hidden_layers": 80,
            "num_key_value_heads": None,
            "rms_norm_eps": 1e-05,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "vocab_size": 128256,
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_a_model_of_the_published_size(name):
    num_parameters, config = PUBLISHED[name]
    spec, layout = read_family(ConfigReader(config, name))
    leaves = [leaf for leaf in tree_leaves(spec, layout) if leaf.one.same_as is None]
    assert sum(math.prod(leaf.shape) for leaf in leaves) == num_parameters


def test_a_first_minicpm_that_leaves_out_the_tie_is_tied():
    config = PUBLISHED["minicpm-2b"][1]
    early = {key: value for key, value in config.items() if key != "tie_word_embeddings"}
    assert read_family(ConfigReader(early, "early")) == read_family(ConfigReader(config, "early"))


def test_the_text_part_of_exaone_4_5_has_an_older_name():
    text = PUBLISHED["exaone-4-1.2b"][1]
    for name in ("exaone4", "exaone4_5_text"):
        config = {"model_type": "exaone4_5", "text_config": text | {"model_type": name}}
        spec, layout = read_family(ConfigReader(config, name))
        assert (spec.family, layout.part_of) == ("exaone4", "exaone4_5")


def test_windows_of_published_configs():
    def windows(name: str) -> dict[int | None, int]:
        spec, _ = read_family(ConfigReader(PUBLISHED[name][1], name))
        return {group.window: len(group.layers) for group in spec.groups}

    assert windows("gemma-2-9b") == {4096: 21, None: 21}
    assert windows("gemma-3-1b") == {512: 22, None: 4}
    assert windows("gpt-oss-20b") == {128: 12, None: 12}
    assert windows("starcoder2-3b") == {4096: 30}
    assert windows("qwen2.5-vl-7b") == {None: 28}
    assert windows("phi-3.5-mini") == {None: 32}  # a window as long as the context is none
    assert windows("exaone-4-1.2b") == {None: 30}


def test_modules_that_compressed_tensors_names_by_regular_expressions_are_not_quantised():
    patterns = [r"re:.*lm_head", r"re:^model\.layers\.0\..*$", "re:.*mlp.gate$", "model.norm"]
    how = Quantisation(method="fp8", kind="scaled", skipped=tuple(patterns))
    modules = ["lm_head", "model.layers.0.mlp.up_proj", "model.layers.3.mlp.gate", "model.norm"]
    assert all(map(how.skips, modules))
    assert not how.skips("model.layers.1.mlp.up_proj")
    assert not how.skips("model.layers.1.mlp.gate_proj")


def test_modules_that_are_not_quantised_are_those_that_transformers_leaves(monkeypatch):
    """Only names with wildcards become patterns: there may be thousands of others."""
    quantizers = pytest.importorskip("transformers.quantizers.quantizers_utils")
    patterns = set()

    def fits(name: str, pattern: str) -> bool:
        patterns.add(pattern)
        return fnmatchcase(name, pattern)

    monkeypatch.setattr(quantisation, "fnmatchcase", fits)
    names = ["model.layers.1", "model.layers.*.mlp.gate", "lm_head", "model.layers.0.self_attn"]
    how = Quantisation(method="fp8", kind="scaled", skipped=tuple(names))
    ends = ("self_attn.q_proj", "mlp.gate", "mlp.gate_proj", "mlp.up_proj")
    modules = [f"model.layers.{layer}.{end}" for layer in (0, 1, 2, 10) for end in ends]
    for module in [*modules, "lm_head"]:
        assert how.skips(module) != quantizers.should_convert_module(module, names), module
    assert patterns == {"model.layers.*.mlp.gate.*"}


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
def test_modules_that_a_config_of_fp8_names_are_not_quantised(key):
    about = {"quant_method": "fp8", key: ["model.layers.0.self_attn", "lm_head"]}
    how = read_quantisation(ConfigReader({"quantization_config": about}, "config.json"))
    assert all(map(how.skips, ("lm_head", "model.layers.0.self_attn.q_proj")))
    assert not how.skips("model.layers.1.self_attn.q_proj")
