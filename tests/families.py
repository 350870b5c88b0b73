"""Tiny models of every family, made by transformers with every weight drawn anew, as checkpoints.

transformers' own initialisation (norms 1, biases 0) would give the same logits when a loader drops
them.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

SMALL = {
    "vocab_size": 151,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
GLM_ROPE = ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1]}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.5, 2.0, 3.0, 5.0],
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOW = {"sliding_window": 8, "layer_types": MIXED}
V4_NEAR, V4_CHOSEN = "sliding_attention", "compressed_sparse_attention"
V4_HEAVY = "heavily_compressed_attention"
HEAD = {"head_dim": 8}
DORY = HEAD | {"num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1}
DORY |= {"initializer_range": 0.3, "ngpt_alpha_init": 0.5, "sliding_window": 8}
DORY |= {"layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2}
XLSTM = {"hidden_size": 128, "num_heads": 4}  # states in transformers are multiples of 64 wide
INKLING = HEAD | {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
INKLING |= {"swa_num_attention_heads": 6, "swa_num_key_value_heads": 2, "swa_head_dim": 8}
INKLING |= {"sliding_window_size": 8, "rel_extent": 12, "d_rel": 4}
INKLING |= {"layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"]}
INKLING2 = {key: value for key, value in INKLING.items() if key != "moe_intermediate_size"}
INKLING2 |= {"intermediate_size": 40, "n_layers_per_attn_res_block": 2}
INKLING2 |= {"num_hidden_layers": 4, "layer_types": ["hybrid_sliding", "hybrid"] * 2}
ZAYA = HEAD | {"num_experts": 5, "moe_intermediate_size": 40, "router_hidden_size": 20}
GPT2 = {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 256}
FALCON = {"num_kv_heads": 2, "ffn_hidden_size": 80}

GEMMA4 = {
    "num_hidden_layers": 6,
    "head_dim": 8,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 151,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "final_logit_softcapping": 2.0,
    "tie_word_embeddings": True,
}

# With the factor that they have by default float32 and float64 of Muse Spark are 1e-4 of the logits'
# deviation apart in transformers itself.
MUSE = {"num_hidden_layers": 4, "sliding_window": 8, "post_norm_eps": 0.1, "qk_scale_factor": 1.5}

# With 8 inputs of a layer's own the gates of some token are all so small that transformers' float32
# is 6e-5 of the logits' deviation away from its float64.
GEMMA3N = {
    "num_hidden_layers": 6,
    "head_dim": 8,
    "intermediate_size": [80, 80, 80, 80, 64, 80],
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 140,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.8, 0.8, 0.0, 0.0, 0.0, 0.7],
    "altup_num_inputs": 3,
    "laurel_rank": 5,
    "final_logit_softcapping": 2.0,
    "tie_word_embeddings": True,
}

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GROUPED = {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3}
GROUPED |= {"n_group": 4, "topk_group": 2, "moe_intermediate_size": 24}
GROUPED |= {"first_k_dense_replace": 1, "routed_scaling_factor": 1.7, "norm_topk_prob": True}
LATENT = {"num_key_value_heads": 6, "kv_lora_rank": 24, "q_lora_rank": 20}
LATENT |= {"qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16}
INDEX = {"index_topk": 8, "index_head_dim": 12, "index_n_heads": 16}
YARN = ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
YARN |= {"mscale": 0.7, "mscale_all_dim": 1.3}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
LINEAR |= {"linear_value_head_dim": 12, "num_hidden_layers": 4}
QWEN4 = EXPERTS | LINEAR | HEAD | {"shared_expert_intermediate_size": 40, "hc_count": 3}
QWEN4 |= {"hc_lowrank": 7, "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}
QWEN4 |= {"layer_types": ["linear_attention", "indexed_attention"] * 2}
QWEN4 |= {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 6}
QWEN4 |= {"indexer_budget": 8, "indexer_compress_ratio": 4}

LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 3}

SHARED = {"shared_intermediate_size": 40, "attention_multiplier": 0.2}

LLAMA4 = LOCAL | HEAD | {"attention_chunk_size": 8, "floor_scale": 8, "attn_scale": 0.3}
LLAMA4 |= {"intermediate_size_mlp": 64, "moe_layers": [1, 2], "no_rope_layers": [1, 0, 1]}

HYBRID = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
MAMBA2 = {"mamba_n_heads": 12, "mamba_d_state": 16}
ZAMBA = ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"]

VARIANTS: dict[str, dict[str, Any]] = {
    "afmoe": WINDOW
    | EXPERTS
    | HEAD
    | {"num_shared_experts": 2, "num_dense_layers": 1, "mup_enabled": True, "route_scale": 1.7},
    "apertus": {},
    "aria_text": {"moe_num_experts": 6, "moe_topk": 2, "moe_num_shared_experts": 2},
    "arcee": HEAD | {"attention_bias": True, "mlp_bias": True},
    "biogpt": {"tie_word_embeddings": True},
    "biogpt-unscaled": {"scale_embedding": False, "hidden_act": "relu"},
    "bitnet": {},
    "bitnet-biases": HEAD | {"attention_bias": True, "hidden_act": "silu"},
    "bloom": {"tie_word_embeddings": True},
    "cohere": {"logit_scale": 0.3, "tie_word_embeddings": True},
    "cohere-qk-norm": {"use_qk_norm": True, "attention_bias": True},
    "cohere2": WINDOW | HEAD | {"logit_scale": 0.3},
    "cohere2_moe": WINDOW
    | HEAD
    | EXPERTS
    | {"logit_scale": 0.3, "mlp_layer_types": ["dense", "sparse", "sparse"]}
    | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    | {"num_shared_experts": 2, "prefix_dense_intermediate_size": 64},
    "cohere2_moe-sigmoid": HEAD
    | EXPERTS
    | {"expert_selection_fn": "sigmoid", "sliding_window": 8, "first_k_dense_replace": 1}
    | {"rms_norm_eps": 1e-6, "shared_expert_combination_strategy": "sum", "num_shared_experts": 1},
    "ctrl": GPT2 | {"dff": 80, "tie_word_embeddings": True, "layer_norm_epsilon": 0.1},
    "cwm": WINDOW | HEAD,
    "axk1": GROUPED | LATENT | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "axk2": GROUPED
    | LATENT
    | INDEX
    | {"gated_norm_rank": 6, "rope_parameters": YARN, "attention_bias": True}
    | {"topk_group": 3},  # with 2 some tokens choose among experts that all count 0
    "axk2-light": GROUPED
    | LATENT
    | INDEX
    | {"gated_norm_rank": 6, "n_group": None, "topk_group": None},
    "dbrx": {"d_model": 48, "num_hidden_layers": 2}
    | {"attn_config": {"kv_n_heads": 2, "clip_qkv": 0.7, "rope_theta": 5e5}}
    | {"ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 6, "moe_top_k": 2}}
    | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    "deepseek_v2": GROUPED
    | LATENT
    | {"topk_method": "group_limited_greedy", "rope_parameters": YARN, "attention_bias": True},
    "deepseek_v2-lite": GROUPED | LATENT | {"q_lora_rank": None, "n_group": None},
    "deepseek_v3": GROUPED | LATENT | {"rope_parameters": YARN, "attention_bias": True},
    "deepseek_v3-in-halves": GROUPED | LATENT | {"rope_interleave": False, "q_lora_rank": None},
    "deepseek_v32": GROUPED | LATENT | INDEX | {"rope_parameters": YARN, "attention_bias": True},
    "diffllama": {"num_attention_heads": 8, "num_key_value_heads": 4} | HEAD,
    "diffllama-biases": {"num_attention_heads": 4, "num_key_value_heads": 4}
    | HEAD
    | {"attention_bias": True, "rope_parameters": YARN},
    "doge": {},
    "doge-biases": {"sliding_window": 8, "attention_bias": True, "mlp_bias": True},
    "dots1": GROUPED | HEAD,
    "ernie4_5": HEAD | {"use_bias": True},
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24}
    | {"moe_layer_start_index": 1, "moe_num_shared_experts": 2},
    "ernie4_5_vl_moe_text": {"moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 2}
    | {"moe_intermediate_size": [24, 16], "tie_word_embeddings": False}
    | {"rope_parameters": ROPE | {"mrope_section": [1, 1, 2]}},
    "emu3_text_model": HEAD,
    "exaone": HEAD | {"attention_bias": True},
    "exaone4": WINDOW,
    "exaone4-full": {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    "falcon": FALCON | {"multi_query": True, "new_decoder_architecture": False},
    "falcon-new": FALCON | {"new_decoder_architecture": True, "bias": True},
    "falcon-new-one-norm": FALCON
    | {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
    "falcon-falls": FALCON
    | {"num_attention_heads": 4, "num_kv_heads": 4, "alibi": True, "multi_query": False}
    | {"new_decoder_architecture": False, "parallel_attn": False, "bias": True},
    "falcon-in-turn": FALCON | {"multi_query": True, "parallel_attn": False, "bias": True},
    "flint": WINDOW
    | EXPERTS
    | HEAD
    | {"shared_expert_intermediate_size": 40, "mlp_only_layers": [0], "attention_bias": True},
    "gemma": {"head_dim": 16, "tie_word_embeddings": True},
    "gemma2": WINDOW
    | {"head_dim": 16, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0}
    | {"final_logit_softcapping": 2.0},
    "gemma3_text": WINDOW
    | {"head_dim": 16, "query_pre_attn_scalar": 20, "final_logit_softcapping": 2.0}
    | {
        "rope_parameters": {
            "sliding_attention": ROPE,
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
        }
    },
    "gemma3_text-uncapped": WINDOW | {"head_dim": 16, "query_pre_attn_scalar": 20},
    "gemma3n_text": GEMMA3N,
    "gemma3n_text-alone": GEMMA3N
    | {"num_kv_shared_layers": 0, "altup_correct_scale": False, "altup_num_inputs": 2}
    | {"attention_bias": True, "intermediate_size": 80},
    "gemma4_text": GEMMA4 | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    "gemma4_text-k-is-v": GEMMA4
    | {"attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "num_global_key_value_heads": 1},
    "gemma4_text-experts": GEMMA4
    | {"attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "num_global_key_value_heads": 1}
    | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24},
    "gemma4_unified_text": {key: one for key, one in GEMMA4.items() if "per_layer" not in key}
    | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "glm": {"head_dim": 8, "attention_bias": True},
    "glm4": {"head_dim": 8, "attention_bias": True},
    "glm4v_moe_text": GROUPED | HEAD | {"rope_parameters": GLM_ROPE, "attention_bias": True},
    "glm4v_text": {"rope_parameters": GLM_ROPE},
    "glm_ocr_text": HEAD | {"rope_parameters": GLM_ROPE},
    "gpt2": GPT2 | {"scale_attn_by_inverse_layer_idx": True},
    "gpt2-inner": GPT2 | {"n_inner": 80, "scale_attn_weights": False},
    "gpt_neox": {"rope_parameters": ROPE | {"partial_rotary_factor": 0.25}},
    "gpt_neox-in-turn": {"use_parallel_residual": False, "attention_bias": False},
    "gpt_neox_japanese": {"intermediate_multiple_size": 2}
    | {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
    "gpt_bigcode": GPT2,
    "gpt_bigcode-all-heads": GPT2 | {"multi_query": False, "n_inner": 80},
    "gpt_neo": {"num_layers": 3, "num_heads": 6, "window_size": 8}
    | {
        "attention_types": [[["local", "global", "local"], 1]],
        "attention_layers": ["local", "global", "local"],
    },
    "gptj": GPT2 | {"rotary_dim": 4},
    "codegen": GPT2 | {"rotary_dim": 4},
    "glm4_moe_lite": GROUPED | LATENT,
    "minicpm3": LATENT | {"scale_emb": 3, "scale_depth": 0.7, "dim_model_base": 24},
    "mistral4": GROUPED
    | LATENT
    | {
        "rope_parameters": YARN
        | {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 16}
    },
    "longcat_flash": LATENT
    | {"num_layers": 2, "num_hidden_layers": 4, "ffn_hidden_size": 80, "head_dim": 8}
    | {"moe_topk": 3, "n_routed_experts": 6, "zero_expert_num": 4, "expert_ffn_hidden_size": 24},
    "sarvam_moe": GROUPED | HEAD,
    "rwkv": {"num_hidden_layers": 2, "rescale_every": 0},
    "rwkv-halved": {"rescale_every": 1, "intermediate_size": None},
    "sarvam_mla": GROUPED | LATENT | {"q_lora_rank": None},
    "youtu": LATENT | {"tie_word_embeddings": True},
    "glm_moe_dsa": GROUPED | LATENT | INDEX,
    "glm_moe_dsa-shared": GROUPED
    | LATENT
    | INDEX
    | {"num_hidden_layers": 5, "indexer_types": ["full", "full", "shared", "full", "shared"]}
    | {"kv_lora_rank": 112},  # with which rows are of more than 128 numbers
    "glm4_moe": GROUPED | HEAD | {"use_qk_norm": True, "attention_bias": True},
    "gpt_oss": LOCAL
    | HEAD
    | {"sliding_window": 8, "layer_types": MIXED, "swiglu_limit": 7.0}
    | {
        "rope_parameters": ROPE
        | {"rope_type": "yarn", "factor": 4.0, "truncate": False}
        | {"original_max_position_embeddings": 64}
    },
    "granitemoe": LOCAL
    | {"attention_multiplier": 0.2, "embedding_multiplier": 1.5}
    | {"residual_multiplier": 0.7, "logits_scaling": 2.0},
    "granite_swa": WINDOW
    | {
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "layer_rope_theta": [1e4, 0, 5e5],
    },
    "granitemoehybrid": HYBRID
    | LOCAL
    | MAMBA2
    | {"shared_intermediate_size": 40, "attention_multiplier": 0.2, "residual_multiplier": 0.7},
    "granitemoehybrid-dense": HYBRID
    | MAMBA2
    | {"num_local_experts": 0, "shared_intermediate_size": 80, "mamba_n_groups": 3}
    | {"position_embedding_type": "rope", "mamba_proj_bias": True},
    "bamba": MAMBA2 | {"attn_layer_indices": [1], "mamba_n_groups": 2, "mamba_conv_bias": False},
    "falcon_h1": HEAD
    | MAMBA2
    | {"mamba_d_ssm": 96, "mamba_n_groups": 2, "mamba_rms_norm": True, "projectors_bias": True}
    | {"attention_in_multiplier": 0.8, "attention_out_multiplier": 1.3, "key_multiplier": 0.6}
    | {"mlp_multipliers": [0.7, 1.2], "ssm_multipliers": [0.8, 1.1, 0.9, 1.2, 0.7]}
    | {"ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.9, "embedding_multiplier": 1.4}
    | {"lm_head_multiplier": 0.6},
    "falcon_h1-plain": HEAD | MAMBA2 | {"mamba_d_ssm": 96},
    "hrm_text": {"num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True}
    | HEAD
    | {"H_cycles": 3, "L_cycles": 2, "embedding_scale": 3.0},
    "dory": DORY | {"attention_bias": True, "mlp_bias": True, "n_recurrent_loops": 3},
    "dory-once": DORY | {"n_recurrent_loops": 1, "tie_word_embeddings": True},
    "inkling_text": INKLING
    | {
        "vocab_size": 160,
        "unpadded_vocab_size": 151,
        "swa_num_key_value_heads": 6,
        "swa_head_dim": 16,
    }
    | {"log_scaling_n_floor": 5, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "inkling2_text": INKLING2
    | {"vocab_size": 160, "unpadded_vocab_size": 151}
    | {"swa_num_key_value_heads": 6, "swa_head_dim": 16, "log_scaling_n_floor": 5}
    | {"qk_l2_clip_threshold": 2.0, "rel_l2_clip_threshold": 1.0, "final_logit_softcapping": 5.0}
    | {"mlp_gate_softcap": 0.5, "mlp_up_softcap": 0.8},
    "inkling2_text-plain": INKLING2
    | {"layer_types": ["hybrid"] * 3, "num_hidden_layers": 3, "conv_kernel_size": 3}
    | {"n_layers_per_attn_res_block": 1, "unpadded_vocab_size": 151},
    "inkling2_loop_text": INKLING2
    | {"num_hidden_layers": 6, "layer_types": ["hybrid_sliding", "hybrid"] * 3}
    | {"unpadded_vocab_size": 151, "swa_head_dim": 16, "loop_gate_rank": 10}
    | {"loop_layer_index_start": 2, "loop_layer_index_end": 4, "loop_num_passes": 2},
    "inkling2_loop_text-short": INKLING2
    | {"unpadded_vocab_size": 151, "swa_head_dim": 16, "loop_gate_rank": 10}
    | {"loop_layer_index_start": 2, "loop_layer_index_end": 4, "loop_num_passes": 2},
    "inkling2_loop_text-once": INKLING2
    | {"n_layers_per_attn_res_block": 1, "unpadded_vocab_size": 151, "loop_gate_rank": 10}
    | {"loop_layer_index_start": 1, "loop_layer_index_end": 3, "loop_num_passes": 1},
    "inkling_text-plain": INKLING
    | {"layer_types": ["hybrid"] * 3, "n_shared_experts": 1, "conv_kernel_size": 3},
    "zaya": ZAYA
    | {"sliding_window": 8, "lm_head_bias": True, "attention_bias": True}
    | {"layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "cca_time0": 3, "cca_time1": 3},
    "zaya-plain": ZAYA | {"tie_word_embeddings": True},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ZAMBA[:4], "num_key_value_heads": 6}
    | {"n_mamba_heads": 2, "mamba_dt_rank": 5, "mamba_d_state": 8, "tie_word_embeddings": True},
    "zamba2": {"num_hidden_layers": 5, "layers_block_type": ZAMBA, "num_key_value_heads": 6}
    | {"num_mem_blocks": 2, "use_mem_rope": True, "use_shared_attention_adapter": True}
    | {"adapter_rank": 10, "n_mamba_heads": 12, "mamba_ngroups": 2, "mamba_d_state": 16}
    | {"hidden_act": "gelu", "tie_word_embeddings": True},
    "zamba2-plain": {"layers_block_type": ["hybrid", "linear_attention", "hybrid"]}
    | {"adapter_rank": 5, "n_mamba_heads": 12, "mamba_d_state": 16, "add_bias_linear": True}
    | {"tie_word_embeddings": True},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 8}
    | {"num_experts": 6, "mamba_dt_rank": 5, "mamba_proj_bias": True},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2-biases": {"conv_bias": True, "conv_L_cache": 4, "full_attn_idxs": [1]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1}
    | EXPERTS
    | {"routed_scaling_factor": 1.7},
    "lfm3": WINDOW | HEAD | {"layer_types": ["conv", "full_attention", "sliding_attention"]},
    "nemotron_h": HEAD
    | GROUPED
    | {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]}
    | {"mamba_num_heads": 12, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2}
    | {"moe_shared_expert_intermediate_size": 40},
    "nemotron_h-latent": HEAD
    | GROUPED
    | {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]}
    | {"mamba_num_heads": 12, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2}
    | {"moe_shared_expert_intermediate_size": 40, "moe_latent_size": 20},
    "mamba": {"state_size": 8, "time_step_rank": 5},
    "mamba-biases": {"use_bias": True, "use_conv_bias": False, "conv_kernel": 3},
    "falcon_mamba": {"state_size": 8},
    "mamba2": {"num_heads": 12, "head_dim": 8, "n_groups": 2, "state_size": 16},
    "xlstm": XLSTM | {"output_logit_soft_cap": 5.0, "eps": 0.5, "norm_eps": 1e-3},
    "openai_gpt": GPT2 | {"tie_word_embeddings": True},
    "opt": {"word_embed_proj_dim": 48, "ffn_dim": 80},
    "opt-behind": {"word_embed_proj_dim": 20, "ffn_dim": 80, "do_layer_norm_before": False}
    | {"tie_word_embeddings": True},
    "granite": {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.5,
        "attention_bias": True,
    },
    "helium": HEAD,
    "hunyuan_v1_dense": HEAD | {"attention_bias": True},
    "hyperclovax": HEAD
    | {"attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 2.5},
    "internlm3": HEAD | {"qkv_bias": True, "bias": True},
    "iquestcoder": HEAD | {"attention_bias": True},
    "jais2": HEAD,
    "mistral": HEAD | {"sliding_window": None},
    "ministral": WINDOW | HEAD,
    "ministral3": HEAD
    | {
        "rope_parameters": ROPE
        | {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.3,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }
    },
    "modernbert_decoder": {"num_hidden_layers": 4, "local_attention": 17, "norm_bias": True}
    | {"classifier_bias": True, "tie_word_embeddings": True, "mlp_bias": True},
    "modernbert_decoder-plain": {"sliding_window": 7, "decoder_bias": False}
    | {"attention_bias": True},
    "nanochat": {"final_logit_softcapping": 2.0},
    "nemotron": {"attention_bias": True, "mlp_bias": True},
    "olmo": {"clip_qkv": 0.5, "attention_bias": True},
    "mimo_v2_flash": WINDOW
    | GROUPED
    | {
        "head_dim": 12,
        "v_head_dim": 8,
        "num_key_value_heads": 1,
        "attention_bias": True,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "rope_parameters": {
            "sliding_attention": ROPE | {"partial_rotary_factor": 0.334},
            "full_attention": ROPE | {"rope_theta": 1e5, "partial_rotary_factor": 0.5},
        },
    },
    "minimax": LOCAL
    | HEAD
    | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    | {"full_attn_alpha_factor": 1.5, "full_attn_beta_factor": 0.8, "mlp_alpha_factor": 1.3}
    | {"linear_attn_alpha_factor": 0.7, "linear_attn_beta_factor": 1.2, "mlp_beta_factor": 0.6},
    "minimax_m2": LOCAL | HEAD | {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
    "mixtral": LOCAL | {"sliding_window": 8},
    "exaone_moe": WINDOW | EXPERTS | {"num_shared_experts": 2, "n_group": 2},
    "flex_olmo": {"num_experts": 6, "num_experts_per_tok": 2, "num_key_value_heads": 3},
    "granitemoe_swa": WINDOW | LOCAL | SHARED | {"layer_rope_theta": [1e4, 0, 5e5]},
    "granitemoeshared": LOCAL | SHARED,
    "hunyuan_v1_moe": HEAD | {"num_experts": 6, "moe_topk": [2, 2, 2], "attention_bias": True},
    "hy_v3": EXPERTS | HEAD | {"num_shared_experts": 2},
    "mellum": WINDOW | EXPERTS | HEAD | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "phimoe": LOCAL
    | {"num_experts_per_tok": 2, "router_jitter_noise": 0.2}
    | {"attention_bias": True, "lm_head_bias": True},
    "phimoe-longrope": LOCAL
    | {"num_experts_per_tok": 2, "original_max_position_embeddings": 64}
    | {"rope_parameters": LONG | {"short_mscale": 1.2, "long_mscale": 1.2}},
    "laguna": WINDOW
    | EXPERTS
    | HEAD
    | {"shared_expert_intermediate_size": 40, "gating": "per-element"}
    | {"mlp_layer_types": ["dense", "sparse", "sparse"], "moe_routed_scaling_factor": 1.7}
    | {"num_attention_heads_per_layer": [6, 4, 6], "moe_router_logit_softcapping": 1.5}
    | {
        "rope_parameters": {
            "sliding_attention": ROPE,
            "full_attention": ROPE | {"rope_theta": 1e5, "partial_rotary_factor": 0.5},
        }
    },
    "laguna-by-head": WINDOW
    | EXPERTS
    | HEAD
    | {"shared_expert_intermediate_size": 40, "gating": True, "attention_bias": True},
    "llama4_text": LLAMA4,
    "llama4_text-no-norm": LLAMA4
    | {"use_qk_norm": False, "attn_temperature_tuning": False, "moe_layers": [0, 1, 2]},
    "solar_open": GROUPED | HEAD | {"attention_bias": True},
    "olmo2": {"attention_bias": True},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "olmo_hybrid": LINEAR
    | {"attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": None}},
    "olmo_hybrid-rotated": LINEAR
    | {"layer_types": ["full_attention", "linear_attention"] * 2, "rope_parameters": ROPE}
    | {"linear_allow_neg_eigval": False, "linear_value_head_dim": 4},
    "olmo3": WINDOW
    | {
        "rope_parameters": {
            "sliding_attention": ROPE,
            "full_attention": ROPE
            | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        }
    },
    "paddleocr_vl_text": HEAD
    | {"use_bias": True, "rope_parameters": ROPE | {"mrope_section": [1, 1, 2]}},
    "persimmon": {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
    "persimmon-no-norm": {"qk_layernorm": False, "tie_word_embeddings": True},
    "mpt": {"tie_word_embeddings": True} | {"attn_config": {"clip_qkv": 0.7, "softmax_scale": 0.4}},
    "phi": {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
    "phi-qk-norm": {"qk_layernorm": True, "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
    "phi3": {"sliding_window": 8},
    "phi3-longrope": {"rope_parameters": LONG, "original_max_position_embeddings": 64},
    "phi4_multimodal": {
        "rope_parameters": LONG
        | {"partial_rotary_factor": 0.5, "short_factor": [1.0, 1.3], "long_factor": [1.5, 3.0]},
        "original_max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 8,
            "crop_size": 16,
        },
        "audio_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_blocks": 2,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 16,
            "depthwise_separable_out_channel": 16,
            "nemo_conv_channels": 16,
            "input_size": 16,
        },
    },
    "qwen2_vl_text": {"rope_parameters": ROPE | {"mrope_section": [1, 1, 2]}},
    "qwen2_5_omni_text": {"rope_parameters": ROPE | {"mrope_section": [1, 1, 2]}},
    "qwen2_5_vl_text": {"rope_parameters": ROPE | {"mrope_section": [1, 1, 2]}},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 40, "qkv_bias": True},
    "qwen3_moe": EXPERTS | HEAD | {"mlp_only_layers": [1], "norm_topk_prob": True},
    "qwen3_next": EXPERTS
    | LINEAR
    | HEAD
    | {"shared_expert_intermediate_size": 40, "mlp_only_layers": [1], "attention_bias": True},
    "qwen3_5_text": LINEAR | HEAD | {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
    "qwen3_5_moe_text": EXPERTS | LINEAR | HEAD | {"shared_expert_intermediate_size": 40},
    "qwen3_omni_moe_text": EXPERTS
    | HEAD
    | {"mlp_only_layers": [1], "rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}},
    "qwen4_exp_text": QWEN4
    | {"ple_layer_ids": [1, 3], "ple_embed_dim": 24, "ngram_size": 4, "heads_per_ngram": 2}
    | {"ngram_vocab_size_base": 90, "make_ngram_vocab_size_divisible_by": 8}
    | {"ple_conv_kernel_size": 3, "split_ngram_parts": 5, "eos_token_id": [148, 2]},
    "qwen4_exp_text-plain": QWEN4 | {"output_gate_type": "sigmoid", "norm_topk_prob": False},
    "qwen3_vl_moe_text": EXPERTS
    | HEAD
    | {"moe_intermediate_size": 32, "rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}},
    "qwen3_vl_text": HEAD | {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}},
    "recurrent_gemma": {"attention_window_size": 8, "num_hidden_layers": 4, "logits_soft_cap": 2.0},
    "seed_oss": HEAD | {"attention_bias": True, "mlp_bias": True},
    "smollm3": {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": True},
    "stablelm": {"use_qkv_bias": True},
    "stablelm-parallel": {"use_parallel_residual": True, "qk_layernorm": True},
    "starcoder2": {"sliding_window": 8},
    "vaultgemma": WINDOW | {"head_dim": 16, "query_pre_attn_scalar": 20},
    "xglm": {"d_model": 48, "ffn_dim": 80, "num_layers": 3, "attention_heads": 6}
    | {"tie_word_embeddings": True},
    "kimi_linear": {"num_hidden_layers": 4, "num_key_value_heads": 6, "v_head_dim": 16}
    | {"kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8}
    | {"linear_head_dim": 8, "linear_num_heads": 4, "moe_intermediate_size": 24}
    | {"num_local_experts": 8, "num_experts_per_tok": 3, "topk_group": 2}
    | {"num_expert_group": 4}
    | {"layer_types": ["linear_attention", "full_attention"] * 2},
    "hy_v4": GROUPED
    | LATENT
    | INDEX
    | {"num_hidden_layers": 3, "hc_mult": 3, "hc_magnitude": 1.4, "swiglu_limit": 0.7}
    | {"indexer_types": ["full", "shared", "full"], "mlp_layer_types": ["dense", *["sparse"] * 2]},
    "glm5_next_text": {"num_hidden_layers": 4, "num_key_value_heads": 6, "v_head_dim": 16}
    | {"kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 0}
    | {"linear_head_dim": 8, "linear_num_heads": 4, "moe_intermediate_size": 24, "hc_mult": 3}
    | {"n_routed_experts": 8, "num_experts_per_tok": 3, "topk_group": 2, "n_group": 4}
    | {"index_topk": 8, "index_head_dim": 12, "index_n_heads": 16, "index_kpool": 4}
    | {"rms_norm_eps": 1e-2}
    | {"layer_types": ["linear_attention", "indexed_attention"] * 2, "swiglu_limit": 0.7}
    | {"mlp_layer_types": ["dense", *["sparse"] * 3]},
    "jetmoe": LOCAL
    | {"kv_channels": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}
    | {"rms_norm_eps": 0.1},  # of the last norm only
    "lara_mini": LINEAR
    | HEAD
    | EXPERTS
    | {"sliding_window": 8, "shared_expert_intermediate_size": 32, "num_hidden_layers": 5},
    "apertus1p5_text": {"vocab_size": 180, "output_vocab_size": 151},
    "kolibri1": HEAD
    | EXPERTS
    | {"layer_types": MIXED, "sliding_window": 8, "shared_expert_intermediate_size": 32},
    "bailing_hybrid": {"num_hidden_layers": 4, "num_key_value_heads": 6, "v_head_dim": 16}
    | {"kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "head_dim": 10}
    | {"num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "layer_group_size": 2},
    "step3p5": {"num_hidden_layers": 4, "num_attention_heads": 4, "num_sliding_attention_heads": 6}
    | {"head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 3, "share_expert_dim": 20}
    | {"moe_intermediate_size": 24, "moe_layers_enum": "2,3", "moe_router_scaling_factor": 1.7}
    | {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"] * 2}
    | {"swiglu_limits": [0.0, 0.0, 0.7, 0.5], "swiglu_limits_shared": [0.0, 0.4, 0.0, 0.6]}
    | {"rope_theta": [1e5, 1e4] * 2, "query_pre_attn_scalar": 6}
    | {"partial_rotary_factors": [0.5, 1.0] * 2}
    | {
        "rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0}
        | {"high_freq_factor": 32.0, "original_max_position_embeddings": 64}
    },
    "mistral_large4_text": {"num_hidden_layers": 6, "num_key_value_heads": 6, "head_dim": 8}
    | {"moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3}
    | {"n_group": 4, "topk_group": 2, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 10}
    | {"qk_nope_head_dim": 12, "index_topk": 9, "index_head_dim": 12, "index_n_heads": 16}
    | {"no_rope_layers": [1, 0, 1, 1, 0, 1], "kv_source_layers": [0, 1, 2, 0, 1, 0]}
    | {"indexer_types": ["full", "full", "full", "shared", "shared", "full"]}
    | {"first_k_dense_replace": 1, "final_logit_softcapping": 5.0}
    | {"rope_parameters": YARN | {"attention_factor": 1.0}},
    "dots3_note_text": {"num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 6}
    | {"q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8}
    | {"v_head_dim": 10, "head_dim": 20, "index_topk": 8, "index_head_dim": 12}
    | {"index_n_heads": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4}
    | {"swa_q_lora_rank": 28, "swa_kv_lora_rank": 40, "swa_head_dim": 16, "swa_v_head_dim": 14}
    | {"swa_qk_nope_head_dim": 12, "sliding_window": 8, "moe_intermediate_size": 24}
    | {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
    | {"shared_experts_intermediate_size": 20, "n_shared_experts": 2, "rms_norm_eps": 1e-2}
    | {"routed_scaling_factor": 1.7},
    "cohere_compass_text": WINDOW
    | {"logit_scale": 0.3}
    | {"rope_parameters": {"full_attention": None, "sliding_attention": ROPE}},
    "cosmos3_edge_text": HEAD
    | {"attention_bias": True, "mlp_bias": True}
    | {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}},
    "granite4_vision_text": {"attention_multiplier": 0.2, "embedding_multiplier": 3.0}
    | {"residual_multiplier": 0.4, "logits_scaling": 2.5},
    "hunyuan_vl_text": HEAD
    | {
        "rope_parameters": ROPE
        | {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mrope_section": [1, 1, 1, 1]}
    },
    "hy_v4_vl_text": GROUPED
    | LATENT
    | INDEX
    | {"num_hidden_layers": 3, "hc_mult": 3, "hc_magnitude": 1.4, "swiglu_limit": 0.7}
    | {"indexer_types": ["full", "shared", "full"], "mlp_layer_types": ["dense", *["sparse"] * 2]}
    | {"rms_norm_eps": 1e-2, "rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}},
    "molmo2_text": HEAD | {"additional_vocab_size": 8, "attention_bias": True},
    "molmo2_text-olmo": HEAD
    | {"additional_vocab_size": 151, "qk_norm_type": "olmo", "norm_after": True}
    | {"rope_scaling_layers": [1], "rope_parameters": YARN},
    "muse_glimmer_text": HEAD | MUSE,
    "muse_spark_text": HEAD
    | MUSE
    | {"mlp_layer_types": ["dense"] + ["sparse"] * 3, "moe_hidden_size": 32}
    | {"moe_intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2}
    | {"residual_gate_temperature": 0.05},
    "mllama_text_model": {"num_hidden_layers": 5, "cross_attention_layers": [1, 3]},
    "minimax_m3_vl_text": HEAD
    | {"intermediate_size": 32, "dense_intermediate_size": 80, "shared_intermediate_size": 24}
    | {"num_local_experts": 8, "num_experts_per_tok": 3, "index_n_heads": 2, "index_head_dim": 6}
    | {"index_block_size": 4, "index_topk_blocks": 3, "index_local_blocks": 2}
    | {"layer_types": ["full_attention", *["minimax_m3_sparse"] * 2]}
    | {"mlp_layer_types": ["dense", *["sparse"] * 2]}
    | {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
    "deepseek_v4": {"num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 16}
    | {"q_lora_rank": 20, "moe_intermediate_size": 24, "n_routed_experts": 8, "hc_mult": 3}
    | {"num_experts_per_tok": 3, "sliding_window": 8, "o_groups": 2, "o_lora_rank": 10}
    | {"index_n_heads": 16, "index_head_dim": 12, "index_topk": 3, "partial_rotary_factor": 0.5}
    | {"layer_types": [V4_NEAR, V4_CHOSEN, V4_HEAVY, V4_CHOSEN], "swiglu_limit": 0.7}
    | {"compress_rates": {V4_CHOSEN: 4, V4_HEAVY: 8}}
    | {"mlp_layer_types": ["hash_moe", *["moe"] * 3]},
    "llama": {},
    "llama-dynamic": {
        "rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 2.0},
        "max_position_embeddings": 32,
    },
}


PLAIN = {"qwen2": {}, "qwen3": HEAD}
"""Variants for text parts of other models only: tests/tiny.py has more of these families."""

SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
QWEN_VISION = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2}
PARTS = (
    "cosmos3_edge_text",
    "emu3_text_model",
    "glm4v_moe_text",
    "glm4v_text",
    "glm5_next_text",
    "glm_ocr_text",
    "granite4_vision_text",
    "hunyuan_vl_text",
    "hy_v4_vl_text",
    "mistral_large4_text",
    "step3p5",
    "mllama_text_model",
    "molmo2_text",
    "molmo2_text-olmo",
    "muse_glimmer_text",
    "muse_spark_text",
    "paddleocr_vl_text",
    "ernie4_5_vl_moe_text",
    "qwen2_vl_text",
    "qwen2_5_omni_text",
    "qwen2_5_vl_text",
    "qwen3_omni_moe_text",
    "qwen3_vl_text",
    "qwen3_vl_moe_text",
)
ALONE = tuple(name for name in VARIANTS if name not in PARTS)
"""Variants that transformers has a model of; the others are parts of one."""

CLIP = SIGLIP | {"model_type": "clip_vision_model"}
LIST = {"image_size": [16, 16], "patch_size": [8, 8]}

WHISPER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
WHISPER |= {"num_attention_heads": 2, "num_mel_bins": 8, "max_source_positions": 8}
QWEN_AUDIO = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2}
QWEN_AUDIO |= {"encoder_ffn_dim": 16, "num_mel_bins": 8, "max_source_positions": 8}
MARKS = {"vision_start_token_id": 148, "audio_start_token_id": 149}
"""Tokens that transformers 5.24 asks for, though its config need not have the first."""

DEEP_VISION = QWEN_VISION | {"out_hidden_size": 48, "deepstack_visual_indexes": [0]}
MOLMO_VISION = SIGLIP | {"num_key_value_heads": 2, "head_dim": 8, "image_size": [16, 16]}
MOLMO_ADAPTER = {"hidden_size": 16, "num_attention_heads": 2, "head_dim": 8}
MOLMO_ADAPTER |= {"num_key_value_heads": 2, "intermediate_size": 16, "text_hidden_size": 48}
MOLMO_ADAPTER |= {"vision_feature_layer": [0]}

MUSE_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
MUSE_VISION |= {"num_attention_heads": 2, "pos_emb_height": 2, "pos_emb_width": 2}
INKLING2_VISION = {"hidden_size": 16, "num_hidden_layers": 1, "patch_size": 4}
INKLING2_VISION |= {"num_attention_heads": 2, "text_hidden_size": 48}
INKLING2_VISION |= {"projection_hidden_dim": 16, "posemb_grid_size": 4}
MUSE_AUDIO = {"patch_sizes": [4, 4], "hidden_sizes": [8, 8], "depths": [1, 1]}
MUSE_AUDIO |= {"num_hidden_layers": 2, "out_hidden_size": 48}

GRANITE_SPEECH = {
    "encoder_config": {"input_dim": 8, "hidden_dim": 16, "num_layers": 1, "num_heads": 2},
    "projector_config": {"model_type": "blip_2_qformer", "hidden_size": 16}
    | {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    | {"encoder_hidden_size": 16},
    "has_lora_adapter": False,
}

DOTS3: tuple[dict[str, Any], dict[str, Any]] = (
    {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    | {"adapter_in_dim": 16, "adapter_out_dim": 48, "mlp_layer_types": ["dense"]},
    {
        "audio_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        | {"num_attention_heads": 2, "downsample_hidden_size": 8, "adapter_input_size": 16}
        | {"adapter_out_dim": 48, "max_position_embeddings": 64}
    },
)

WRAPPED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "aria": ("aria_text", SIGLIP, {"projector_patch_to_query_dict": {"4": 2}}),
    "deepseek_vl": ("llama", SIGLIP, {}),
    "dots3_note": ("dots3_note_text", *DOTS3),
    "emu3": (
        "emu3_text_model",
        {},
        {"vocabulary_map": {"<|visual token 000000|>": 3, "<image>": 4}}
        | {"vq_config": {"base_channels": 32, "codebook_size": 8, "num_res_blocks": 1}},
    ),
    "exaone4_5": ("exaone4", QWEN_VISION | {"out_hidden_size": 48, "num_key_value_heads": 2}, {}),
    "gemma4_unified": ("gemma4_unified_text", {"mm_embed_dim": 16}, {}),
    "paddleocr_vl": ("paddleocr_vl_text", SIGLIP, {}),
    "glm4v": ("glm4v_text", QWEN_VISION | {"out_hidden_size": 48}, {}),
    "ernie4_5_vl_moe": (
        "ernie4_5_vl_moe_text",
        {"depth": 1, "num_heads": 2, "hidden_size": 16, "intermediate_size": 16, "patch_size": 4},
        {},
    ),
    "glm4v_moe": ("glm4v_moe_text", QWEN_VISION | {"out_hidden_size": 48}, {}),
    "glm5_next": ("glm5_next_text", QWEN_VISION | {"out_hidden_size": 48}, {}),
    "minimax_m3_vl": (
        "minimax_m3_vl_text",
        SIGLIP | {"image_size": 16},
        {"projector_hidden_size": 16},
    ),
    "step3p7": ("step3p5", SIGLIP, {}),
    "mistral_large4": (
        "mistral_large4_text",
        SIGLIP | {"model_type": "pixtral", "head_dim": 8},
        {},
    ),
    "mllama": (
        "mllama_text_model",
        {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "attention_heads": 2}
        | {"num_global_layers": 1, "image_size": 16, "patch_size": 8, "vision_output_dim": 32}
        | {"intermediate_layers_indices": [0]},
        {},
    ),
    "glm46v": ("glm4v_text", QWEN_VISION | {"out_hidden_size": 48}, {}),
    "glm_ocr": ("glm_ocr_text", QWEN_VISION | {"out_hidden_size": 48}, {}),
    "got_ocr2": (
        "qwen2",
        SIGLIP | {"mlp_dim": 16, "output_channels": 8, "global_attn_indexes": [0]},
        {},
    ),
    "hyperclovax_vision_v2": ("hyperclovax", QWEN_VISION | {"out_hidden_size": 48}, {}),
    "idefics2": (
        "mistral",
        SIGLIP,
        {"perceiver_config": {"hidden_size": 48, "resampler_depth": 1, "resampler_n_heads": 4}},
    ),
    "idefics3": ("llama", SIGLIP, {}),
    "inkling_mm_model": (
        "inkling_text",
        {"hidden_size": 16, "num_hidden_layers": 2, "patch_size": 4},
        {"audio_config": {"n_mel_bins": 4, "mel_vocab_size": 8}},
    ),
    "inkling2": ("inkling2_text", INKLING2_VISION, {}),
    "inkling2_loop": ("inkling2_loop_text", INKLING2_VISION, {}),
    "internvl": ("qwen2", SIGLIP | LIST, {}),
    "janus": (
        "llama",
        SIGLIP | {"projection_dim": 48},
        {
            "vq_config": {"base_channels": 32, "num_embeddings": 8, "projection_dim": 48}
            | {"image_token_embed_dim": 48, "latent_channels": 32}
        },
    ),
    "lfm2_vl": ("lfm2", SIGLIP | {"model_type": "siglip2_vision_model", "num_patches": 4}, {}),
    "lfm3_vl": (
        "lfm3",
        SIGLIP | {"num_key_value_heads": 2, "layer_types": ["full_attention"]},
        {"projector_hidden_size": 16},
    ),
    "lighton_ocr": ("qwen3", SIGLIP | {"model_type": "pixtral", "head_dim": 8}, {}),
    "llava_next": ("llama", CLIP, {}),
    "llava_next_video": ("llama", CLIP, {}),
    "llava_onevision": ("qwen2", SIGLIP, {}),
    "minicpm_ocr": ("qwen3_5_text", SIGLIP | {"insert_layer_id": 0}, {}),
    "minicpmv4_6": ("qwen3_5_text", SIGLIP | {"insert_layer_id": 0}, {}),
    "minicpmv4_7": ("qwen3_5_text", SIGLIP | {"insert_layer_id": 0}, {}),
    "ovis2": ("qwen2", SIGLIP | {"vocab_size": 16}, {"hidden_size": 48, "vocab_size": 151}),
    "qianfan_ocr": ("qwen3", SIGLIP | LIST, {}),
    "smolvlm": ("llama", SIGLIP, {}),
    "video_llama_3": ("qwen2", SIGLIP, {}),
    "video_llava": ("llama", CLIP, {}),
    "vipllava": ("llama", CLIP, {"vision_feature_layers": [-1]}),
    "gemma3": ("gemma3_text-uncapped", SIGLIP, {"mm_tokens_per_image": 4}),
    "gemma4": ("gemma4_text", SIGLIP | {"head_dim": 8}, {}),
    "llama4": (
        "llama4_text",
        SIGLIP | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
        {},
    ),
    "kimi_k25": (
        "deepseek_v3",
        {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        | {"num_attention_heads": 2, "patch_size": 8},
        {},
    ),
    "llava": ("llama", SIGLIP | {"model_type": "clip_vision_model"}, {}),
    "mistral3": ("mistral", SIGLIP | {"model_type": "pixtral", "head_dim": 8}, {}),
    "qwen2_vl": ("qwen2_vl_text", {"depth": 1, "num_heads": 2, "embed_dim": 16}, {}),
    "qwen2_5_vl": ("qwen2_5_vl_text", QWEN_VISION | {"out_hidden_size": 48}, {}),
    "qwen3_5": ("qwen3_5_text", QWEN_VISION | {"out_hidden_size": 48}, {}),
    "qwen3_5_moe": ("qwen3_5_moe_text", QWEN_VISION | {"out_hidden_size": 48}, {}),
    "qwen3_vl_moe": (
        "qwen3_vl_moe_text",
        QWEN_VISION | {"out_hidden_size": 48, "deepstack_visual_indexes": [0]},
        {},
    ),
    "qwen4_exp": ("qwen4_exp_text", QWEN_VISION | {"out_hidden_size": 48}, {}),
    "qwen3_vl": (
        "qwen3_vl_text",
        QWEN_VISION | {"out_hidden_size": 48, "deepstack_visual_indexes": [0]},
        {},
    ),
    "audioflamingo3": ("qwen2", {}, {"audio_config": WHISPER}),
    "aya_vision": ("cohere2", SIGLIP | {"vision_use_head": False}, {}),
    "cohere2_vision": ("cohere2", SIGLIP, {"alignment_intermediate_size": 32}),
    "cohere_compass": ("cohere_compass_text", DEEP_VISION, {}),
    "cosmos3_edge": ("cosmos3_edge_text", SIGLIP, {"projector_hidden_size": 16}),
    "cosmos3_omni": ("qwen3_vl_text", DEEP_VISION, {}),
    "deepseek_vl_hybrid": (
        "llama",
        SIGLIP,
        {
            "high_res_vision_config": SIGLIP
            | {"mlp_dim": 16, "output_channels": 8, "global_attn_indexes": [0]}
        },
    ),
    "fast_vlm": ("qwen2", CLIP, {}),
    "glmga": ("glm4v_text", QWEN_VISION | {"out_hidden_size": 48}, {}),
    "granite4_vision": (
        "granite4_vision_text",
        CLIP | {"hidden_size": 64},
        {"downsample_rate": "1/2", "deepstack_layer_map": [[0, 0]]}
        | {"qformer_config": {"model_type": "blip_2_qformer", "intermediate_size": 16}},
    ),
    "granite_speech": ("granite", {}, GRANITE_SPEECH),
    "granite_speech_plus": ("granite", {}, GRANITE_SPEECH),
    "hunyuan_vl": ("hunyuan_vl_text", SIGLIP | {"max_image_size": 16}, {}),
    "hy_v4_vl": ("hy_v4_vl_text", SIGLIP | {"max_image_size": 16, "out_hidden_size": 48}, {}),
    "molmo2": ("molmo2_text", MOLMO_VISION, {"adapter_config": MOLMO_ADAPTER}),
    "molmo2-olmo": ("molmo2_text-olmo", MOLMO_VISION, {"adapter_config": MOLMO_ADAPTER}),
    "muse_glimmer": ("muse_glimmer_text", MUSE_VISION, {"projector_hidden_size": 16}),
    "muse_spark": (
        "muse_spark_text",
        MUSE_VISION,
        {"projector_hidden_size": 16, "audio_config": MUSE_AUDIO},
    ),
    "musicflamingo": (
        "qwen2",
        {},
        {"audio_config": WHISPER | {"model_type": "audioflamingo3_encoder"}},
    ),
    "nemotron_h_omni": (
        "nemotron_h",
        {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_ratio": 1.0}
        | {"image_size": 16, "patch_size": 8, "max_img_size": 16, "video_temporal_patch_size": 2},
        {"projector_hidden_size": 16, "vision_hidden_size": 16},
    ),
    "perception_lm": ("llama", CLIP | {"model_args": {"embed_dim": 16}}, {}),
    "qwen2_5_omni": ("qwen2_5_omni_thinker", {}, {"enable_audio_output": False}),
    "qwen2_5_omni_thinker": (
        "qwen2_5_omni_text",
        QWEN_VISION | {"out_hidden_size": 48, "fullatt_block_indexes": [0]},
        {"audio_config": QWEN_AUDIO | {"n_window": 4, "output_dim": 48}} | MARKS,
    ),
    "qwen2_audio": ("qwen2", {}, {"audio_config": QWEN_AUDIO}),
    "qwen3_omni_moe": ("qwen3_omni_moe_thinker", {}, {"enable_audio_output": False}),
    "qwen3_omni_moe_thinker": (
        "qwen3_omni_moe_text",
        DEEP_VISION,
        {
            "audio_config": QWEN_AUDIO
            | {"n_window": 4, "output_dim": 48, "downsample_hidden_size": 8}
        }
        | MARKS,
    ),
    "voxtral": ("llama", {}, {"audio_config": WHISPER}),
}
"""Models of several parts: the variant of the text part, what the vision part has, if there is one,
and what both have. One whose text part is here has it within another one.
"""


UNSCALED: dict[str, Callable[[Any], float]] = {
    "aya_vision": lambda text: text.logit_scale,
    "cohere2_vision": lambda text: text.logit_scale,
    "granite_speech": lambda text: 1 / text.logits_scaling,
    "granite_speech_plus": lambda text: 1 / text.logits_scaling,
}
"""Models whose logits transformers 5.24 does not scale, and the factor: the text part's own class
multiplies by it, as vLLM does, and so was it trained.
"""

MECHANISMS = {
    "apertus",  # an activation with parameters
    "axk2",  # latent attention, gates of it that are made of what queries are, and of norms
    "bitnet",  # norms within attention and MLP
    "bloom",  # scores that fall with distance, a norm behind the embeddings
    "cohere-qk-norm",  # weights of its own for each head, side by side, interleaved
    "deepseek_v4",  # entries of several tokens, experts by token, outputs by groups of heads
    "diffllama",  # pairs of heads, of which the second is taken off
    "dots3_note_text",  # latents of two sizes that are scaled, windows beside an index
    "doge",  # keys that add to scores what they are worth, a stream that is weighed
    "dory",  # vectors of length 1, steps towards what blocks give, layers that run more than once
    "falcon",  # one KV head, fused
    "falcon-new",  # fused by head, two norms
    "falcon_h1",  # Mamba2 and attention side by side, factors on everything
    "gemma2",  # capped logits, norms less one, a scale of its own
    "gemma3n_text",  # several streams, maps of low rank, gates that are cut off
    "gemma4_text",  # kinds of layers, keys of others, inputs of their own
    "glm5_next",  # several streams with a matrix between them, keys chosen by pools, least decays
    "glm_moe_dsa-shared",  # keys chosen by an index, some by that of a layer before
    "gpt2",  # learned positions, transposed weights
    "granite_swa",  # sinks
    "hrm_text",  # two stacks by turns, on the sum of what they gave
    "inkling2_loop_text-short",  # entries of layers, messages, sinks by token, bounded lengths
    "inkling_mm_model",  # scores by distance, convolutions of four kinds, shared experts that weigh
    "jetmoe",  # experts' queries and outputs of attention
    "mimo_v2_flash",  # values smaller than keys, KV heads by the kind of layer, experts
    "llama4",  # chunks, layers without rotation, weighed inputs of experts; text part of a model
    "longcat_flash",  # experts whose results join later, or that give back what comes in
    "minimax_m3_vl",  # blocks of keys chosen by each KV head
    "mllama",  # layers that are left out, embeddings behind the vocabulary's
    "minimax",  # a stream that goes on from behind norms, decays by layer
    "ministral3",  # queries that grow
    "muse_spark",  # norms unlike the others, and of each expert's result, gates of what joins
    "modernbert_decoder",  # a block before the head
    "nanochat",  # norms without weights, the other way round
    "nemotron",  # LayerNorms less one, no gate
    "nemotron_h-latent",  # layers of one block each, experts without a gate and of their own size
    "opt-behind",  # norms of what blocks have joined, embeddings smaller than the stream
    "olmo2",  # norms over all heads, behind the blocks
    "qwen4_exp",  # gated streams, n-grams of token ids, pools chosen by the mean of their keys
    "qwen3_next",  # a recurrence beside gated attention, experts
    "rwkv",  # what came before each token, averages of values
    "stablelm-parallel",  # a tensor for each head
    "xglm",  # sines of positions
    "xlstm",  # exponential gates, what queries find over what they find of keys
    "zamba",  # Mamba by heads
    "zaya",  # queries and keys that see the last tokens, routers that see what others saw
    "zamba2",  # blocks that layers share, whose result only a recurrence sees
}
"""One variant for each mechanism: gemma3_text and phi3-longrope have tests of their own."""


def hf_config(variant: str) -> Any:
    """Returns transformers' config of a tiny model."""
    from transformers import AutoConfig

    if variant in WRAPPED:
        part, vision, more = WRAPPED[variant]
        if part in WRAPPED:
            return AutoConfig.for_model(variant, thinker_config=hf_config(part).to_dict(), **more)
        own = text_config(part)
        tie = {"tie_word_embeddings": own["tie_word_embeddings"]}
        given = {"text_config": own} | tie | more
        given |= {"vision_config": vision} if vision else {}
        return AutoConfig.for_model(variant.split("-")[0], **given)
    return AutoConfig.for_model(**text_config(variant))


def text_config(variant: str) -> dict[str, Any]:
    """Returns what a tiny model's config.json says, of its own: transformers writes in it."""
    changes = (VARIANTS | PLAIN)[variant]
    left_out = OWN if {"n_embd", "attention_heads"} & changes.keys() else ()
    config = {key: value for key, value in SMALL.items() if key not in left_out}
    family = variant.split("-")[0]
    return deepcopy(config | changes | {"model_type": HYPHENATED.get(family, family)})


HYPHENATED = {"modernbert_decoder": "modernbert-decoder", "openai_gpt": "openai-gpt"}
"""What transformers calls families whose name no file can have."""


OWN = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
"""Keys of most families that GPT-2 has other names for."""


SEEDS = {"gemma4": 3}
"""In place of 1, with which transformers' own float32 is 7e-5 of the logits' deviation away from its
float64.
"""


def make_hf_model(torch: Any, config: Any, directory: Path, *, seed: int | None = None) -> Any:
    """Returns the model of a config in float32, all weights drawn anew, which is also written to
    the directory.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, AutoModelForSeq2SeqLM

    # Mistral 4 is listed there though it is a text model.
    has_parts = config.model_type in (*WRAPPED, "mistral4")
    auto = AutoModelForMultimodalLM if has_parts else AutoModelForCausalLM
    if config.model_type in ("audioflamingo3", "musicflamingo"):
        auto = AutoModelForSeq2SeqLM
    # Falcon's eager attention lets scores fall twice.
    falls = config.model_type == "falcon" and config.alibi
    config._attn_implementation = "sdpa" if falls else "eager"
    model = auto.from_config(config, dtype=torch.float32).eval()
    rng = np.random.default_rng(SEEDS.get(config.model_type, 1) if seed is None else seed)
    ends = ("e_score_correction_bias", "balancing_biases", "expert_bias", "layer_scalar")
    biases = [one for one in model.named_buffers() if one[0].endswith(ends)]
    for name, parameter in [*sorted(model.named_parameters()), *sorted(biases)]:
        parameter.data.copy_(torch.from_numpy(drawn(rng, name, tuple(parameter.shape))))
    for _, table in sorted(x for x in model.named_buffers() if x[0].endswith("tid2eid")):
        chosen = rng.permuted(np.tile(np.arange(config.n_routed_experts), (len(table), 1)), axis=1)
        table.copy_(torch.from_numpy(chosen[:, : table.shape[1]]))
    model.save_pretrained(directory)
    if config.model_type == "llama4":  # the whole model's own code fails in transformers 5.24
        model = model.language_model
    model = getattr(model, "thinker", model)
    if config.model_type in UNSCALED:
        scale = UNSCALED[config.model_type](config.text_config)
        model.lm_head.register_forward_hook(lambda head, given, logits: logits * scale)
    model.generation_config.eos_token_id = None
    return model


def drawn(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Vectors away from what they are made as, matrices of the size that keeps activations near
    1.
    """
    is_scale = name.endswith("weight") and len(shape) <= 2 and ("norm" in name or "ln" in name)
    if is_scale or name.endswith("layer_scalar"):
        return rng.normal(1.0, 0.3, shape).astype(np.float32)
    fan_in = shape[0] if "c_" in name else shape[-1]
    is_table = "embed" in name or "wte" in name or "wpe" in name
    # Where nothing is added to the stream between a block's norms, float32 and float64 differ by
    # 1e-2 of the logits' deviation with larger ones in transformers itself, and by 1e-3 where layers
    # run again and again.
    has_little = "shared_transf" in name or "_module." in name
    factor = 0.8 if has_little else 4.0 if is_table else 2.0
    scale = 0.3 if len(shape) == 1 else fan_in**-0.5 * factor
    return rng.normal(0.0, scale, shape).astype(np.float32)
