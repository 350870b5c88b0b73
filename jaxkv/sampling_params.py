"""Has the names of `vllm.sampling_params` that exist here."""

from jaxkv.build.vllm_arguments import ABSENT_PARAMS, refuse_names
from jaxkv.config import BeamSearchParams, RequestOutputKind, SamplingParams
from jaxkv.structured import StructuredOutputsParams

__all__ = ["BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]

__getattr__ = refuse_names(__name__, ABSENT_PARAMS)
