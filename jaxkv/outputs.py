"""Has the names of `vllm.outputs` that exist here, with those of beam search."""

from jaxkv.build.vllm_arguments import ABSENT, refuse_names
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

__getattr__ = refuse_names(__name__, ABSENT)
