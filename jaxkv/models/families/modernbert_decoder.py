"""ModernBERT's decoder: a norm of embeddings in place of the first layer's, layers with windows of
half the size that is said, and a block between the final norm and the head. Source: arXiv
2507.11412.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import (
    FULL,
    SLIDING,
    Layout,
    Leaf,
    Names,
    attn_biased,
    leaf,
    mlp_biased,
    read_decoder,
    read_forms,
)
from jaxkv.models.families.gemma3_text import read_scaling
from jaxkv.models.rope_config import read_layer_ropes
from jaxkv.models.spec import ModelSpec

NAMES = Names(
    embed="model.embeddings.tok_embeddings",
    norm="model.final_norm",
    head="decoder",
    attn_norm="attn_norm",
    mlp_norm="mlp_norm",
    q="attn.q_proj",
    k="attn.k_proj",
    v="attn.v_proj",
    o="attn.Wo",
    gate_up="mlp.Wi",
    down="mlp.Wo",
)
THETAS = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    config.refuse("classifier_activation", config.get("hidden_activation", "gelu"))
    num_layers = config.num_layers
    kinds = _kinds(config, num_layers)
    # A window of its own counts more: transformers writes both.
    if SLIDING in kinds and config.get("sliding_window") is None:
        window = config.size("local_attention", 128, at_least=2)
        config = config.replaced(sliding_window=window // 2)
    ropes = read_layer_ropes(_with_thetas(config), kinds)
    has_bias = config.flag("norm_bias", False)
    biased = ("attn_norm", "mlp_norm", "norm") * has_bias
    biased += attn_biased(config)
    biased += mlp_biased(config)
    biased += ("head",) * config.flag("decoder_bias", True)

    def read_form(is_first: bool) -> tuple[ModelSpec, Layout]:
        return read_decoder(
            config.replaced(num_key_value_heads=None, head_dim=None),
            names=replace(NAMES, attn_norm=None) if is_first else NAMES,
            biased=biased,
            kinds=kinds,
            ropes=ropes,
            eps="norm_eps",
            activation="hidden_activation",
            norm="layer",
        )

    spec, layout = read_forms([layer == 0 for layer in range(num_layers)], read_form)
    return spec, layout.with_top(**_around(config, spec, has_bias))


def _around(config: ConfigReader, spec: ModelSpec, has_bias: bool) -> dict[str, Leaf]:
    """Lists the tensors behind the embeddings and before the head."""
    hidden = spec.hidden_size
    found = {"head_dense": leaf("lm_head.dense.weight", (hidden, hidden), (None, "model"))}
    if config.flag("classifier_bias", False):
        found["head_dense_bias"] = leaf("lm_head.dense.bias", (hidden,), ("model",))
    for name, source in (("embed_norm", "model.embeddings.norm"), ("head_norm", "lm_head.norm")):
        found[name] = leaf(f"{source}.weight", (hidden,), ("model",))
        if has_bias:
            found[f"{name}_bias"] = leaf(f"{source}.bias", (hidden,), ("model",))
    return found


def _kinds(config: ConfigReader, num_layers: int) -> list[str]:
    if config.get("layer_types") is not None:
        return config.kinds("layer_types", num_layers, (FULL, SLIDING))
    every = config.size("global_attn_every_n_layers", 3)
    return [SLIDING if layer % every else FULL for layer in range(num_layers)]


def _with_thetas(config: ConfigReader) -> ConfigReader:
    """Returns a reader whose sections of rotary embeddings are of each kind of layers, with what
    older files say of both under `rope_scaling`.
    """
    both = read_scaling(config)
    sections = config.section("rope_parameters")
    if sections.values and not {FULL, SLIDING} & sections.values.keys():
        raise config.fail("rope_parameters", f"sections {FULL} and {SLIDING}")
    given = {
        kind: {"rope_theta": config.number(key, theta)}
        | {**sections.section(kind).values, **both.values}
        for kind, (key, theta) in THETAS.items()
    }
    return config.replaced(rope_parameters=given, rope_scaling=None)
