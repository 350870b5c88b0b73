"""nanochat: norms without weights, also of embeddings, queries and keys. Source:
karpathy/nanochat.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, Names, attn_biased, read_decoder
from jaxkv.models.rope_config import read_rope
from jaxkv.models.spec import AttentionSpec, ModelSpec, Scales


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    rope = read_rope(config, reverse=True)
    return read_decoder(
        config,
        names=Names(
            norm=None, attn_norm=None, mlp_norm=None, gate=None, up="mlp.fc1", down="mlp.fc2"
        ),
        biased=attn_biased(config),
        ropes=[rope] * config.num_layers,
        unit_norms=("attn_norm", "mlp_norm", "norm", "embed_norm", "q_norm", "k_norm"),
        scales=Scales(logit_cap=config.cap("final_logit_softcapping")),
        attention=AttentionSpec(norm_after_rope=True),
    )
