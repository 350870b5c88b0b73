"""jaxkv: language-model inference in JAX on an immutable paged KV state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxkv.version import VERSION as __version__

if TYPE_CHECKING:
    from jaxkv.async_llm import AsyncLLM
    from jaxkv.config import BeamSearchParams, SamplingParams
    from jaxkv.engine.metrics import prometheus_text
    from jaxkv.engine.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        Logprob,
        RequestMetrics,
        RequestOutput,
    )
    from jaxkv.errors import CapacityError, CheckpointError, EngineDeadError
    from jaxkv.llm import LLM

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
    "__version__",
    "prometheus_text",
]

_HOMES = {
    "LLM": "jaxkv.llm",
    "AsyncLLM": "jaxkv.async_llm",
    "SamplingParams": "jaxkv.config",
    "BeamSearchParams": "jaxkv.config",
    "BeamSearchOutput": "jaxkv.engine.outputs",
    "BeamSearchSequence": "jaxkv.engine.outputs",
    "RequestOutput": "jaxkv.engine.outputs",
    "CompletionOutput": "jaxkv.engine.outputs",
    "Logprob": "jaxkv.engine.outputs",
    "RequestMetrics": "jaxkv.engine.outputs",
    "prometheus_text": "jaxkv.engine.metrics",
    "CapacityError": "jaxkv.errors",
    "CheckpointError": "jaxkv.errors",
    "EngineDeadError": "jaxkv.errors",
}


def __getattr__(name: str) -> Any:
    # Names are imported when first used, so that `import jaxkv` costs nothing.
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxkv' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
