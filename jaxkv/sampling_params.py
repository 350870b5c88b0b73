"""Has the names of `vllm.sampling_params` that exist here."""

from jaxkv.config import BeamSearchParams, RequestOutputKind, SamplingParams

__all__ = ["BeamSearchParams", "RequestOutputKind", "SamplingParams"]
