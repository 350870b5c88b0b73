"""openPangu-Embedded: Llama with biases in attention. Source: arXiv 2505.22375; vLLM's
PanguEmbeddedForCausalLM.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import QKV, Layout, read_decoder
from jaxkv.models.spec import ModelSpec

DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 32768, "rope_theta": 1.6e7}
"""What its authors' PanguEmbeddedConfig, which transformers does not have, takes for keys that a
file leaves out, beside biases.
"""


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    config = config.with_defaults(DEFAULTS)
    return read_decoder(config, biased=(*QKV, "o") * config.flag("bias", True))
