"""Lists the arguments of vLLM's engine that set nothing here: which values of them mean nothing, so
that scripts may go on passing them, and what is nearest to the others.

Names and defaults are those of vLLM 0.11.2 and 0.33.0 (their `EngineArgs`), with some of older
versions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreign:
    """Describes one of them: vLLM's default, the other values that are taken (all, if
    `means_nothing`), and what is nearest here to the rest.
    """

    default: Any
    also: tuple[Any, ...] = ()
    means_nothing: bool = False
    nearest: str = ""

    def check(self, name: str, value: Any) -> None:
        """Raises ValueError naming the argument for a value that would mean something."""
        empty = value is None or (isinstance(value, dict | list | tuple | str) and not value)
        if self.means_nothing or empty:
            return
        taken = (self.default, *self.also)
        if any(type(value) is type(one) and value == one for one in taken):
            return
        expected = " or ".join(dict.fromkeys(map(repr, taken)))
        near = f"; nearest: {self.nearest}" if self.nearest else ""
        raise ValueError(
            f"{name}: expected {expected} (a vLLM argument of which nothing else is built here"
            f"{near}), got {value!r:.80}"
        )


_NOTHING: dict[str, Any] = {
    # What is logged and shown: nothing is logged here, and get_metrics always counts.
    "disable_log_stats": False,
    "disable_log_requests": True,
    "aggregate_engine_logging": False,
    "use_tqdm_on_load": True,
    "served_model_name": None,
    "log_level": None,
    "log_config_file": None,
    "logging_config": None,
    "jit_monitor_mode": "warn",
    "jit_monitor_verbose": False,
    "enable_logging_iteration_details": False,
    "enable_layerwise_nvtx_tracing": False,
    "enable_mfu_metrics": False,
    "enable_mm_processor_stats": False,
    "cudagraph_metrics": False,
    "kv_cache_metrics": False,
    "kv_cache_metrics_sample": 0.01,
    "per_request_spec_decode_metrics": "none",
    # How CUDA runs the model.
    "max_seq_len_to_capture": 8192,
    "max_context_len_to_capture": None,
    "cuda_graph_sizes": None,
    "cudagraph_capture_sizes": None,
    "max_cudagraph_capture_size": None,
    "disable_custom_all_reduce": False,
    "disable_cascade_attn": False,
    "disable_nccl_for_dp_synchronization": False,
    "enable_flashinfer_autotune": True,
    "ir_op_priority": None,
    "optimization_level": 2,
    "performance_mode": "balanced",
    "numa_bind": False,
    "numa_bind_nodes": None,
    "numa_bind_cpus": None,
    "distributed_timeout_seconds": None,
    "cpu_distributed_timeout_seconds": None,
    "fail_on_environ_validation": False,
    # How steps follow each other: always the next one before the last one is read.
    "async_scheduling": False,
    "disable_async_output_proc": False,
    "num_scheduler_steps": 1,
    "multi_step_stream_outputs": True,
    "use_v2_block_manager": True,
    "scheduler_delay_factor": 0.0,
    "preemption_mode": None,
    "disable_hybrid_kv_cache_manager": False,
    "prefix_caching_hash_algo": "sha256",
    # Any engine can sleep.
    "enable_sleep_mode": False,
    # How files are read.
    "max_parallel_loading_workers": None,
    "safetensors_load_strategy": "lazy",
    "safetensors_prefetch_num_threads": 8,
    "safetensors_prefetch_block_size": 2**24,
    "pt_load_map_location": "cpu",
    # vLLM's own engine does not use it either; kv_host_bytes is an option of ours.
    "swap_space": 4,
    # How vLLM makes room for adapters, and of images, which no prompt may have.
    "lora_extra_vocab_size": 256,
    "max_lora_cls_labels": None,
    "specialize_active_lora": False,
    "allowed_local_media_path": "",
    "allowed_media_domains": None,
    "disable_mm_preprocessor_cache": False,
    "mm_processor_cache_gb": 4,
    "mm_processor_cache_type": "lru",
    "mm_shm_cache_max_object_size_mb": 128,
    "mm_encoder_tp_mode": "weights",
    "skip_mm_profiling": False,
    "interleave_mm_strings": False,
    "disable_chunked_mm_input": False,
    "language_model_only": False,
    "mm_hasher_algorithm": "blake3",
    "mm_processor_device": "auto",
    "mm_ipc_gpu_memory_gb": 0,
    "mm_tensor_ipc": "direct_rpc",
    "mm_device_do_normalize": True,
    "renderer_num_workers": 1,
}
_DEVICES = "tensor_parallel_size, one process for each group of devices"
_SOME: dict[str, Foreign] = {
    "convert": Foreign(default="auto", also=("none",), nearest="runner"),
    "task": Foreign(default=None, also=("auto", "generate"), nearest='runner="pooling"'),
    "tokenizer_mode": Foreign(default="auto", also=("hf",), nearest="tokenizer"),
    "config_format": Foreign(default="auto", also=("hf",)),
    "model_impl": Foreign(default="auto", also=("vllm",)),
    "device": Foreign(default="auto", nearest="the environment variable JAX_PLATFORMS"),
    "distributed_executor_backend": Foreign(default=None, also=("mp", "uni"), nearest=_DEVICES),
    "worker_use_ray": Foreign(default=False, nearest=_DEVICES),
    "data_parallel_backend": Foreign(default="mp", nearest="data_parallel_size"),
    "enable_chunked_prefill": Foreign(default=True, nearest="max_num_batched_tokens"),
    "scheduling_policy": Foreign(default="fcfs", also=("priority",), nearest="generate(priority=)"),
    "logprobs_mode": Foreign(default="raw_logprobs"),
    "kv_offloading_size": Foreign(default=None, nearest="kv_host_bytes"),
    "cpu_offload_gb": Foreign(default=0, also=(0.0,), nearest="quantization"),
    "limit_mm_per_prompt": Foreign(default=None, also=({"image": 0}, {"image": 0, "video": 0})),
    "attention_backend": Foreign(default=None, nearest="backend"),
    "attention_config": Foreign(default=None, nearest="backend"),
    "quantization_config": Foreign(default=None, nearest="quantization"),
    "offload_backend": Foreign(default="auto", nearest="quantization"),
    "mamba_cache_mode": Foreign(default=None, also=("none", "align", "all")),
    "max_num_scheduled_tokens": Foreign(default=None, nearest="max_num_batched_tokens"),
    "max_num_active_seqs": Foreign(default=None, nearest="max_num_seqs"),
    "max_num_queued_reqs": Foreign(default=None, nearest="jaxkv serve --max-concurrent-sequences"),
    "max_num_queued_tokens": Foreign(
        default=None, nearest="jaxkv serve --max-concurrent-sequences"
    ),
    "shutdown_timeout": Foreign(default=0, nearest="jaxkv serve --drain-s"),
    "model_class_overrides": Foreign(default=None, nearest="a family of jaxkv.models.families"),
    "device_ids": Foreign(default=None, nearest="the environment variable CUDA_VISIBLE_DEVICES"),
    "profiler_config": Foreign(default=None, nearest="jax.profiler"),
    "prefill_context_parallel_size": Foreign(default=1, nearest=_DEVICES),
    "rope_scaling": Foreign(default=None, nearest="hf_overrides"),
    "rope_theta": Foreign(default=None, nearest="hf_overrides"),
    "hf_config_path": Foreign(default=None, nearest="hf_overrides"),
    "structured_outputs_config": Foreign(default=None, nearest="structured_outputs of a request"),
    "guided_decoding_backend": Foreign(default=None, nearest="structured_outputs of a request"),
    "reasoning_parser": Foreign(default="", nearest="reasoning_config"),
    "logits_processors": Foreign(default=None, nearest="logit_bias of a request"),
    "compilation_config": Foreign(default=None, also=(0, 1, 2, 3), nearest="lazy_compile"),
    "lora_dtype": Foreign(default="auto", nearest="dtype"),
    "mamba_cache_dtype": Foreign(default="auto"),
    "mamba_ssm_cache_dtype": Foreign(default="auto", also=("float32",)),
    "override_attention_dtype": Foreign(default=None, nearest="dtype"),
    "kv_transfer_config": Foreign(default=None, nearest="LLM.session, saved and restored"),
    "kv_events_config": Foreign(default=None, nearest="LLM.page_table"),
    "otlp_traces_endpoint": Foreign(default=None, nearest="LLM.get_metrics"),
    "enable_log_requests": Foreign(default=False, nearest="RequestOutput.metrics"),
    "pipeline_parallel_size": Foreign(default=1, nearest=_DEVICES),
}
_DEFAULT_ONLY: dict[str, Any] = {
    "enable_prompt_embeds": False,
    "code_revision": None,
    "lora_target_modules": None,
    "fully_sharded_loras": False,
    "enable_tower_connector_lora": False,
    "enable_mixed_moe_lora_format": False,
    "enable_moe_shared_loras": False,
    "default_mm_loras": None,
    "enable_prompt_adapter": False,
    "dcp_kv_cache_interleave_size": 1,
    "data_parallel_rank": None,
    "data_parallel_start_rank": None,
    "data_parallel_size_local": None,
    "data_parallel_address": None,
    "data_parallel_rpc_port": None,
    "data_parallel_hybrid_lb": False,
    "data_parallel_external_lb": False,
    "all2all_backend": None,
    "enable_dbo": False,
    "dbo_decode_token_threshold": 32,
    "dbo_prefill_token_threshold": 512,
    "eplb_config": None,
    "enable_eplb": False,
    "expert_placement_strategy": "linear",
    "num_redundant_experts": 0,
    "eplb_window_size": 1000,
    "eplb_step_interval": 3000,
    "eplb_log_balancedness": False,
    "disable_sliding_window": False,
    "max_num_partial_prefills": 1,
    "max_long_partial_prefills": 1,
    "long_prefill_token_threshold": 0,
    "enable_mm_embeds": False,
    "media_io_kwargs": None,
    "mm_processor_kwargs": None,
    "mm_encoder_attn_backend": None,
    "io_processor_plugin": None,
    "video_pruning_rate": None,
    "enable_multimodal_encoder_data_parallel": False,
    "ray_workers_use_nsight": False,
    "num_lookahead_slots": 0,
    "model_loader_extra_config": None,
    "ignore_patterns": None,
    "reasoning_parser_plugin": None,
    "guided_decoding_disable_fallback": None,
    "guided_decoding_disable_any_whitespace": None,
    "guided_decoding_disable_additional_properties": None,
    "logits_processor_pattern": None,
    "speculative_model": None,
    "num_speculative_tokens": None,
    "show_hidden_metrics_for_version": None,
    "collect_detailed_traces": None,
    "scheduler_cls": None,
    "pooler_config": None,
    "override_pooler_config": None,
    "worker_cls": "auto",
    "worker_extension_cls": "",
    "ec_transfer_config": None,
    "calculate_kv_scales": False,
    "mamba_block_size": None,
    "additional_config": None,
    "stream_interval": 1,
    "kv_sharing_fast_prefill": False,
    "kv_offloading_backend": None,
    "tokenizer_pool_size": 0,
    "tokens_only": False,
    "enable_return_routed_experts": False,
    "return_sampling_mask": False,
    "model_weights": "",
    "dcp_comm_backend": None,
    "dcp_q_replicate": None,
    "cp_kv_cache_interleave_size": None,
    "data_parallel_multi_port_external_lb": False,
    "enable_hc_sp": False,
    "enable_batch_sharded_sampling": None,
    "enable_ep_weight_filter": False,
    "moe_backend": "auto",
    "linear_backend": "auto",
    "sparse_indexer_topk_backend": "auto",
    "enable_elastic_ep": False,
    "elastic_ep_max_dp_size": None,
    "ubatch_size": 0,
    "dp_sync_interval": 16,
    "prefix_cache_retention_interval": None,
    "cpu_offload_params": None,
    "offload_group_size": 0,
    "offload_num_in_group": 1,
    "offload_prefetch_step": 1,
    "offload_params": None,
    "long_prefill_token_threshold_adaptive": False,
    "use_fp64_gumbel": False,
    "enable_trace_replay": False,
    "allow_deprecated_quantization": False,
    "enable_shm_tensor_arena": False,
    "mm_encoder_only": False,
    "mm_encoder_attn_dtype": None,
    "mm_encoder_fp8_scale_path": None,
    "mm_encoder_fp8_scale_save_path": None,
    "mm_encoder_fp8_scale_save_margin": 1.5,
    "video_pruning_method": "evs",
    "scheduler_reserve_full_isl": True,
    "prefill_schedule_interval": 1,
    "watermark": 0.0,
    "watermark_config": None,
    "aux_output_config": None,
    "spec_method": None,
    "spec_model": None,
    "spec_tokens": None,
    "diffusion_config": None,
    "custom_histogram_buckets": None,
    "engram_config": None,
    "mamba_config": None,
    "kernel_config": None,
    "monokernel": None,
    "ec_manager_config": None,
    "sleep_mode_backend": "cumem",
    "sleep_mode_offload_cudagraph": False,
    "sleep_preserve_parameter_names": None,
    "enable_cumem_allocator": False,
    "enable_nccl_comm_suspend": False,
    "prefix_match_unit": None,
    "enable_mamba_shared_prefix_checkpoint": False,
    "replayssm_buffer_len": 16,
    "use_replayssm": False,
    "mamba_backend": "triton",
    "mamba_ssu_algorithm": None,
    "enable_mamba_cache_stochastic_rounding": False,
    "mamba_cache_philox_rounds": 0,
    "swa_bounded_replay": True,
    "fault_tolerance_config": None,
    "enable_fault_tolerance": False,
    "watchdog_config": None,
    "weight_transfer_config": None,
    "gdn_prefill_backend": None,
    "kda_prefill_backend": None,
    "kda_decode_backend": None,
}
FOREIGN: dict[str, Foreign] = {
    **{name: Foreign(default=value, means_nothing=True) for name, value in _NOTHING.items()},
    **_SOME,
    **{name: Foreign(default=value) for name, value in _DEFAULT_ONLY.items()},
}
"""By name. `check` takes None and empty values too: they are how scripts leave something out."""

_SAME_VALUES: dict[str, dict[Any, str]] = {
    "load_format": {"safetensors": "auto", "hf": "auto"},
    "dtype": {"float": "float32"},
    "kv_cache_dtype": {"fp8": "fp8_e4m3"},
}
"""Values of options that vLLM calls otherwise."""

_OF_TRANSFORMERS = {
    "torch_dtype": "dtype",
    "device_map": "tensor_parallel_size",
    "attn_implementation": "backend",
    "cache_implementation": "kv_cache_dtype",
    "cache_dir": "download_dir",
    "token": "hf_token",
    "load_in_8bit": "quantization",
    "load_in_4bit": "quantization",
    "pretrained_model_name_or_path": "model",
}
"""Names what is nearest to arguments of its `from_pretrained` and `generate`."""

_NONE_IS_DEFAULT = ("seed", "max_num_batched_tokens", "enable_prefix_caching", "generation_config")
_EAGER = "enforce_eager"


def as_options(given: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keywords of `EngineOptions` (`known`) that arguments in vLLM's words stand for.

    Raises: ValueError naming arguments that nobody knows, or values that mean something which is
    not built.
    """
    if unknown := sorted(given.keys() - known.keys() - FOREIGN.keys() - {_EAGER}):
        raise ValueError("\n".join(_unknown(name, known) for name in unknown))
    for name in given.keys() & FOREIGN.keys():
        FOREIGN[name].check(name, given[name])
    options = {name: value for name, value in given.items() if name in known}
    for name in _NONE_IS_DEFAULT:
        if options.get(name, 0) is None:
            del options[name]
    for name, same in _SAME_VALUES.items():
        if isinstance(value := options.get(name), str):
            options[name] = same.get(value, value)
    eager = given.get(_EAGER)
    if eager is not None and not isinstance(eager, bool):
        raise ValueError(f"{_EAGER}: expected True or False, got {eager!r}")
    if eager:
        options["lazy_compile"] = True
    return options


ABSENT = {
    "AsyncLLMEngine": "AsyncLLM",
    "LLMEngine": "LLM.as_completed and LLM.stream",
    "ModelRegistry": "a file in jaxkv/models/families",
    "initialize_ray_cluster": "tensor_parallel_size",
}
"""Names of vLLM's package that do not exist here, and what is nearest."""

ABSENT_PARAMS = {
    "GuidedDecodingParams": "StructuredOutputsParams",
    "RepetitionDetectionParams": "repetition_penalty of SamplingParams",
}
ABSENT_INPUTS = {
    **dict.fromkeys(
        ("EmbedsPrompt", "ExplicitEncoderDecoderPrompt", "DataPrompt", "SingletonPrompt"), ""
    ),
    **dict.fromkeys(("TokensInput", "tokens_input", "EngineInput"), "TokensPrompt"),
    **dict.fromkeys(("EmbedsInput", "embeds_input", "MultiModalDataDict"), ""),
}
ABSENT_METRICS = {"Vector": "Counter"}
"""These three are names of its modules `sampling_params`, `inputs` and `v1.metrics.reader`."""

_OF_TRAINERS = dict.fromkeys(
    (
        *("init_weight_transfer_engine", "shutdown_weight_transfer_engine", "start_weight_update"),
        *("start_draft_weight_update", "finish_weight_update"),
        *("update_weight_version", "get_weight_version"),
    ),
    "update_weights",
)

ABSENT_FROM_LLM = {
    "llm_engine": "the methods of LLM itself",
    "model_config": "max_model_len and describe()",
    "encode": "embed, classify and reward",
    "collective_rpc": "",
    "apply_model": "",
    "preprocess_chat": "chat, whose outputs have prompt and prompt_token_ids",
    "set_tokenizer": "LLM(tokenizer=)",
    "reset_mm_cache": "",
    "start_profile": "jax.profiler",
    "stop_profile": "jax.profiler",
    "release_kv_cache_memory": "sleep",
    "get_world_size": "describe()",
    "enqueue": "as_completed",
    "enqueue_chat": "as_completed",
    "wait_for_completion": "as_completed",
    **_OF_TRAINERS,
}
"""Names of its `LLM`."""

ABSENT_FROM_ASYNC = {
    "add_request": "generate",
    "encode": "embed, classify, reward and score",
    "get_supported_tasks": "",
    "do_log_stats": "get_metrics",
    "is_tracing_enabled": "",
    "errored": "generate, which raises EngineDeadError",
    "dead_error": "generate, which raises EngineDeadError",
    "is_running": "",
    "is_stopped": "",
    "start_profile": "jax.profiler",
    "stop_profile": "jax.profiler",
    "reset_mm_cache": "",
    "remove_lora": "",
    "list_loras": "",
    "pin_lora": "",
    "collective_rpc": "",
    "from_vllm_config": "from_engine_args",
    "wait_for_requests_to_drain": "awaiting the requests",
    "scale_elastic_ep": "",
    "tokenizer": "get_tokenizer",
    "get_num_unfinished_requests": "get_metrics",
    "get_num_queued_tokens": "get_metrics",
    "check_admission": "jaxkv serve --max-concurrent-sequences",
    "pause_generation": "abort",
    "release_kv_cache_memory": "sleep",
    "get_status": "check_health",
    "get_kv_event_sources": "LLM.page_table",
    **dict.fromkeys(
        (
            *("resume_generation", "is_paused", "reset_encoder_cache", "checkpoint_prepare"),
            *("checkpoint_restore", "compute_weight_checksums", "handle_fault"),
            *("get_external_elastic_ep_status", "should_keep_api_server_alive"),
            "notify_kv_transfer_request_rejected",
        ),
        "",
    ),
    **_OF_TRAINERS,
}
"""Names of its `AsyncLLM`."""


def refuse_names(whose: str, table: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a module that says which of vLLM's names it does not have."""

    def refuse(name: str) -> Any:
        message = absence(whose, name, table)
        # `from module import name` would not show the message of an AttributeError.
        raise (ImportError if name in table else AttributeError)(message)

    return refuse


def absence(whose: str, name: str, table: Mapping[str, str]) -> str:
    """Returns the sentence for a name that does not exist."""
    if name not in table:
        return f"{whose} has no attribute {name!r}"
    near = f" (nearest: {table[name]})" if table[name] else ""
    return f"{whose} has no {name!r} yet, which vLLM has{near}"


_TAKEN_APART = "--response-template"
_OF_SERVER = {
    "enable_auto_tool_choice": _TAKEN_APART,
    "tool_call_parser": _TAKEN_APART,
    "reasoning_parser": _TAKEN_APART,
    "enable_reasoning": _TAKEN_APART,
    "chat_template": "the chat template in the checkpoint's directory",
    "chat_template_content_format": "LLM.chat(chat_template_content_format=)",
    "enforce_eager": "--lazy-compile",
    "uvicorn_log_level": "",
    "disable_uvicorn_access_log": "",
    "disable_fastapi_docs": "",
    "root_path": "a proxy",
    "ssl_keyfile": "a proxy",
    "ssl_certfile": "a proxy",
    "response_role": "",
    "enable_log_requests": "",
    "api_server_count": "",
    "allowed_methods": "--allowed-origins",
    "allowed_headers": "--allowed-origins",
    "allow_credentials": "--allowed-origins",
    "config": "the flags themselves",
    "headless": "--node-rank: no process but the first one serves",
    "uds": "--host and --port",
    "middleware": "a proxy",
    "ssl_ca_certs": "a proxy",
    "ssl_cert_reqs": "a proxy",
    "ssl_ciphers": "a proxy",
    "enable_ssl_refresh": "a proxy",
    "enable_request_id_headers": "the id of an answer",
    "trust_request_chat_template": "--chat-template",
    "default_chat_template_kwargs": "chat_template_kwargs of a request",
    "tool_parser_plugin": _TAKEN_APART,
    "tool_server": "",
    "exclude_tools_when_tool_choice_none": "what is done anyway",
    "return_tokens_as_token_ids": "",
    "enable_prompt_tokens_details": "usage, which always has them",
    "enable_force_include_usage": "stream_options of a request",
    "enable_per_request_metrics": "/metrics",
    "enable_server_load_tracking": "/metrics",
    "enable_tokenizer_info_endpoint": "/tokenize",
    "enable_log_outputs": "",
    "enable_log_deltas": "",
    "max_log_len": "",
    "log_error_stack": "",
    "disable_access_log_for_endpoints": "",
    "sse_keep_alive_interval": "",
    "fingerprint_mode": "",
    "grpc": "",
}
"""Names what is nearest to flags of its server alone."""

_SHORT = {
    "pp": "pipeline_parallel_size",
    "pcp": "prefill_context_parallel_size",
    "ac": "attention_config",
    "cc": "compilation_config",
    **dict.fromkeys(("O0", "O1", "O2", "O3"), "optimization_level"),
}


def about_flag(flag: str, known: Mapping[str, Any]) -> str:
    """Returns what to say of a flag that a command does not have: what of vLLM's it is, or which of
    the options (`known`) has such a name.
    """
    written = flag.partition("=")[0]
    name = written.strip("-").replace("-", "_")
    name = _SHORT.get(name, name)
    if name not in FOREIGN and name.startswith("no_"):
        name = name.removeprefix("no_")
    if name in FOREIGN:
        foreign = FOREIGN[name]
        if foreign.means_nothing:
            return f"{written}: vLLM's, which sets nothing here: leave it out"
        near = _OF_SERVER.get(name, "") or foreign.nearest
    elif name in _OF_SERVER:
        near = _OF_SERVER[name]
    elif name in known:
        return f"{written}: an argument of LLM that this command has no flag for"
    else:
        close = get_close_matches(name, known, n=1)
        hint = f", did you mean --{close[0].replace('_', '-')}?" if close else ""
        return f"{written}: unrecognized argument{hint}"
    return f"{written}: vLLM's, not built here" + (f" (nearest: {near})" if near else "")


def _unknown(name: str, known: Mapping[str, Any]) -> str:
    others = {flag.strip("-").replace("-", "_"): x for x in known for flag in known[x].aliases}
    others |= _OF_TRANSFORMERS
    close = [others[name]] if name in others else get_close_matches(name, known, n=1)
    close = close or get_close_matches(name, [*FOREIGN, _EAGER], n=1, cutoff=0.85)
    return f"LLM: unknown argument {name}" + (f", did you mean {close[0]}?" if close else "")
