"""Hunyuan V4: several streams without a matrix between them, gated latent attention with sinks that
chooses keys by the index heads of some layers, and experts as DeepSeek V3 chooses them. Source:
transformers' hy_v4.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import MAX_NUMBER, ConfigReader
from jaxkv.models.families.base import LAYER, Layout, leaf
from jaxkv.models.families.experts import listed_dense, read_grouped
from jaxkv.models.families.latent import read_index, read_latent, with_shared
from jaxkv.models.families.streams import connections, joining, read_streams
from jaxkv.models.spec import GateLimits, ModelSpec, Scales

SPELLINGS = (
    (r"\.hc_pre\.hc_", ".hc_"),
    (r"\.learnable_sink_param$", ".sinks"),
    (r"\.linear_gate\.", ".gate_proj."),
)


def read(config: ConfigReader, *, interleaved: bool = False) -> tuple[ModelSpec, Layout]:
    """Reads the model, or one that is alike but for how numbers are paired to be rotated."""
    num_layers = config.num_layers
    hyper = replace(
        read_streams(config),
        most=config.number("hc_magnitude", 2.0),
        has_eps_on_way_out=True,
    )
    experts, router = read_grouped(config)
    limit = config.number("swiglu_limit", 10.0, at_least=-MAX_NUMBER)  # 0 or less for none
    index = read_index(config, interleaved=interleaved)
    found = read_latent(
        config.replaced(num_key_value_heads=config.size("num_attention_heads")),
        interleaved=interleaved,
        activations=("silu",),  # that of transformers' experts, whatever a config says
        experts=replace(
            experts, fused=("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
        ).leaves,
        router=router,
        is_dense=listed_dense(config, (0,)),
        index=replace(index, rotates_last=True, norm_eps=config.number("rms_norm_eps", 1e-5)),
        scales=Scales(limits=GateLimits(routed=(max(0.0, limit),) * num_layers), hyper=hyper),
    )
    otherwise = [layer for layer in range(num_layers) if layer and (layer - 1) % 4]
    spec, layout = with_shared(found, config, otherwise)
    value = layout.layers[0]["o"].info.shape[1]
    gate = (value, spec.hidden_size), ("heads", "model")
    sinks = leaf(f"{LAYER}self_attn.sinks", (spec.num_heads,), ("heads",))
    own = connections(hyper, spec.hidden_size, ("hc_attn_layer.hc_", "hc_mlp_layer.hc_")) | {
        "attn_gate": leaf(f"{LAYER}self_attn.gate_proj.weight", *gate),
        "sinks": sinks,
    }
    top = joining(hyper, spec.hidden_size, "model.hc_head.hc_head_")
    attention = replace(spec.attention, has_sinks=True)
    layout = replace(layout.in_each_layer(**own).with_top(**top), spellings=SPELLINGS)
    return replace(spec, attention=attention), layout
