"""Has the names of `vllm.outputs` that exist here, with those of beam search."""

from jaxkv.requests.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
)

__all__ = [
    "BeamSearchOutput",
    "BeamSearchSequence",
    "CompletionOutput",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
]
