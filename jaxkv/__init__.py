"""jaxkv: language-model inference in JAX on an immutable paged KV state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxkv.version import VERSION as __version__

if TYPE_CHECKING:
    from jaxkv.api.async_llm import AsyncLLM
    from jaxkv.api.llm import LLM
    from jaxkv.api.session import Session
    from jaxkv.build.engine_args import AsyncEngineArgs, EngineArgs
    from jaxkv.config import BeamSearchParams, RequestOutputKind, SamplingParams
    from jaxkv.engine.metrics import prometheus_text
    from jaxkv.errors import (
        CapacityError,
        CheckpointError,
        DirectoryInUseError,
        EngineDeadError,
        SavedFileError,
    )
    from jaxkv.lora.request import LoRARequest
    from jaxkv.requests.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        Logprob,
        RequestMetrics,
        RequestOutput,
    )
    from jaxkv.requests.pooling import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingParams,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from jaxkv.requests.prompts import Prompt as PromptType
    from jaxkv.requests.prompts import TextPrompt, TokensPrompt
    from jaxkv.structured import StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CapacityError",
    "CheckpointError",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "DirectoryInUseError",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineDeadError",
    "LoRARequest",
    "Logprob",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "SavedFileError",
    "ScoringOutput",
    "ScoringRequestOutput",
    "Session",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "prometheus_text",
]

_HOMES = {
    "jaxkv.api.llm": ("LLM",),
    "jaxkv.api.async_llm": ("AsyncLLM",),
    "jaxkv.api.session": ("Session",),
    "jaxkv.build.engine_args": ("AsyncEngineArgs", "EngineArgs"),
    "jaxkv.config": ("BeamSearchParams", "RequestOutputKind", "SamplingParams"),
    "jaxkv.engine.metrics": ("prometheus_text",),
    "jaxkv.errors": (
        "CapacityError",
        "CheckpointError",
        "DirectoryInUseError",
        "EngineDeadError",
        "SavedFileError",
    ),
    "jaxkv.lora.request": ("LoRARequest",),
    "jaxkv.inputs": ("PromptType", "TextPrompt", "TokensPrompt"),
    "jaxkv.requests.pooling": ("PoolingParams",),
    "jaxkv.structured": ("StructuredOutputsParams",),
    "jaxkv.outputs": (
        "ClassificationOutput",
        "ClassificationRequestOutput",
        "EmbeddingOutput",
        "EmbeddingRequestOutput",
        "PoolingOutput",
        "PoolingRequestOutput",
        "ScoringOutput",
        "ScoringRequestOutput",
        "BeamSearchOutput",
        "BeamSearchSequence",
        "CompletionOutput",
        "Logprob",
        "RequestMetrics",
        "RequestOutput",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    # Names are imported when first used, so that `import jaxkv` costs nothing.
    import importlib

    if name not in _HOME_OF:
        from jaxkv.build.vllm_arguments import ABSENT, refuse_names

        return refuse_names(__name__, ABSENT)(name)
    return getattr(importlib.import_module(_HOME_OF[name]), name)
