"""Lists the arguments of vLLM's engine that set nothing here: which values of them mean nothing, so
that scripts may go on passing them, and what is nearest to the others.

Names and defaults are those of vLLM 0.11.2 (its `EngineArgs`), with some of older versions.
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
        if any(value == one and type(value) is type(one) for one in taken):
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
    # How CUDA runs the model.
    "max_seq_len_to_capture": 8192,
    "max_context_len_to_capture": None,
    "cuda_graph_sizes": None,
    "cudagraph_capture_sizes": None,
    "max_cudagraph_capture_size": None,
    "disable_custom_all_reduce": False,
    "disable_cascade_attn": False,
    "disable_nccl_for_dp_synchronization": False,
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
    "pt_load_map_location": "cpu",
    # vLLM's own engine does not use it either; kv_host_bytes is an option of ours.
    "swap_space": 4,
    # Of adapters, which enable_lora alone would turn on, and of images, which no prompt may have.
    "max_loras": 1,
    "max_lora_rank": 16,
    "max_cpu_loras": None,
    "lora_dtype": "auto",
    "lora_extra_vocab_size": 256,
    "fully_sharded_loras": False,
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
    "data_parallel_backend": Foreign(default="mp", nearest=_DEVICES),
    "enable_chunked_prefill": Foreign(default=True, nearest="max_num_batched_tokens"),
    "scheduling_policy": Foreign(default="fcfs", also=("priority",), nearest="generate(priority=)"),
    "logprobs_mode": Foreign(default="raw_logprobs"),
    "kv_offloading_size": Foreign(default=None, nearest="kv_host_bytes"),
    "cpu_offload_gb": Foreign(default=0, also=(0.0,), nearest="quantization"),
    "limit_mm_per_prompt": Foreign(default=None, also=({"image": 0}, {"image": 0, "video": 0})),
    "speculative_config": Foreign(default=None),
    "rope_scaling": Foreign(default=None, nearest="hf_overrides"),
    "rope_theta": Foreign(default=None, nearest="hf_overrides"),
    "hf_config_path": Foreign(default=None, nearest="hf_overrides"),
    "structured_outputs_config": Foreign(default=None, nearest="allowed_token_ids of a request"),
    "guided_decoding_backend": Foreign(default=None, nearest="allowed_token_ids of a request"),
    "logits_processors": Foreign(default=None, nearest="logit_bias of a request"),
    "trust_remote_code": Foreign(default=False, nearest="a family of jaxkv.models.families"),
    "compilation_config": Foreign(default=None, also=(0, 1, 2, 3), nearest="lazy_compile"),
    "mamba_cache_dtype": Foreign(default="auto"),
    "mamba_ssm_cache_dtype": Foreign(default="auto", also=("float32",)),
    "override_attention_dtype": Foreign(default=None, nearest="dtype"),
    "kv_transfer_config": Foreign(default=None, nearest="LLM.session, saved and restored"),
    "kv_events_config": Foreign(default=None, nearest="LLM.page_table"),
    "otlp_traces_endpoint": Foreign(default=None, nearest="LLM.get_metrics"),
    "enable_log_requests": Foreign(default=False, nearest="RequestOutput.metrics"),
    "pipeline_parallel_size": Foreign(default=1, nearest=_DEVICES),
    "data_parallel_size": Foreign(default=1, nearest=_DEVICES),
    "decode_context_parallel_size": Foreign(default=1, nearest=_DEVICES),
    "enable_expert_parallel": Foreign(default=False, nearest=_DEVICES),
    "nnodes": Foreign(default=1, nearest=_DEVICES),
}
_DEFAULT_ONLY: dict[str, Any] = {
    "enable_prompt_embeds": False,
    "code_revision": None,
    "enable_lora": False,
    "default_mm_loras": None,
    "enable_prompt_adapter": False,
    "master_addr": "127.0.0.1",
    "master_port": 29501,
    "node_rank": 0,
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
    "reasoning_parser": "",
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

_NONE_IS_DEFAULT = ("seed", "max_num_batched_tokens", "enable_prefix_caching", "generation_config")
_EAGER = "enforce_eager"


def as_options(given: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keywords of `EngineOptions` (`known`) that arguments in vLLM's words stand for.

    Raises: ValueError naming arguments that nobody knows, or values that mean something which is
    not built.
    """
    if unknown := sorted(given.keys() - known.keys() - FOREIGN.keys() - {_EAGER}):
        names = [*known, *FOREIGN, _EAGER]
        raise ValueError("\n".join(_unknown(name, names) for name in unknown))
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

ABSENT_PARAMS = dict.fromkeys(
    ("StructuredOutputsParams", "GuidedDecodingParams"), "allowed_token_ids of SamplingParams"
)
ABSENT_INPUTS = dict.fromkeys(
    ("EmbedsPrompt", "ExplicitEncoderDecoderPrompt", "DataPrompt", "SingletonPrompt"), ""
)
ABSENT_METRICS = {"Vector": "Counter"}
"""The same of its modules `sampling_params`, `inputs` and `v1.metrics.reader`."""

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
}
"""The same of its `LLM`."""

ABSENT_FROM_ASYNC = {
    "add_request": "generate",
    "encode": "",
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
    "add_lora": "",
    "remove_lora": "",
    "list_loras": "",
    "pin_lora": "",
    "collective_rpc": "",
    "from_vllm_config": "from_engine_args",
    "wait_for_requests_to_drain": "awaiting the requests",
    "scale_elastic_ep": "",
}
"""The same of its `AsyncLLM`."""


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


def _unknown(name: str, names: list[str]) -> str:
    close = get_close_matches(name, names, n=1)
    return f"LLM: unknown argument {name}" + (f", did you mean {close[0]}?" if close else "")
