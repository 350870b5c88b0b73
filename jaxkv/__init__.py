"""jaxkv: language-model inference in JAX on an immutable paged KV state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxkv.version import VERSION as __version__

if TYPE_CHECKING:
    from jaxkv.api.async_llm import AsyncLLM
    from jaxkv.api.llm import LLM
    from jaxkv.api.session import Session
    from jaxkv.config import BeamSearchParams, SamplingParams
    from jaxkv.engine.metrics import prometheus_text
    from jaxkv.errors import CapacityError, CheckpointError, EngineDeadError, SavedFileError
    from jaxkv.requests.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        Logprob,
        RequestMetrics,
        RequestOutput,
    )

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CapacityError",
    "CheckpointError",
    "CompletionOutput",
    "EngineDeadError",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SavedFileError",
    "Session",
    "__version__",
    "prometheus_text",
]

_HOMES = {
    "LLM": "jaxkv.api.llm",
    "AsyncLLM": "jaxkv.api.async_llm",
    "SamplingParams": "jaxkv.config",
    "BeamSearchParams": "jaxkv.config",
    "BeamSearchOutput": "jaxkv.requests.outputs",
    "BeamSearchSequence": "jaxkv.requests.outputs",
    "RequestOutput": "jaxkv.requests.outputs",
    "CompletionOutput": "jaxkv.requests.outputs",
    "Logprob": "jaxkv.requests.outputs",
    "RequestMetrics": "jaxkv.requests.outputs",
    "prometheus_text": "jaxkv.engine.metrics",
    "CapacityError": "jaxkv.errors",
    "CheckpointError": "jaxkv.errors",
    "EngineDeadError": "jaxkv.errors",
    "SavedFileError": "jaxkv.errors",
    "Session": "jaxkv.api.session",
}


def __getattr__(name: str) -> Any:
    # Names are imported when first used, so that `import jaxkv` costs nothing.
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxkv' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
