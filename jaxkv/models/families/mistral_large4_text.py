"""The text part of Mistral Large 4: latent attention that chooses keys as DeepSeek-V3.2's does,
with queries that grow with their position as each head has learned to, frequencies that are learned
too, layers that rotate nothing, and layers that take the latents of others. Source: transformers'
MistralLarge4.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.config import is_int
from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import LAYER, Layout, Leaf, leaf, read_forms
from jaxkv.models.families.experts import first_dense, listed_dense, read_grouped
from jaxkv.models.families.hybrid import with_leaves
from jaxkv.models.families.latent import every_few, read_index, read_latent, with_shared
from jaxkv.models.families.smollm3 import read_rotates
from jaxkv.models.spec import ModelSpec, Scales

ATTENTION = f"{LAYER}self_attn."

SPELLINGS = (
    (r"^tok_embeddings\.", "model.embed_tokens."),
    (r"^lerope\.", "model.rotary_emb."),
    (r"^norm\.", "model.norm."),
    (r"^output\.", "lm_head."),
    (r"^layers\.", "model.layers."),
    (r"^(model\.layers\.\d+)\.attention\.", r"\1.self_attn."),
    (r"^(model\.layers\.\d+)\.attention_norm\.", r"\1.input_layernorm."),
    (r"^(model\.layers\.\d+)\.ffn_norm\.", r"\1.post_attention_layernorm."),
    (r"^(model\.layers\.\d+)\.feed_forward\.", r"\1.mlp."),
    (r"^(model\.layers\.\d+)\.(gate|experts|shared_experts)\.", r"\1.mlp.\2."),
    (r"\.self_attn\.wq\.", ".self_attn.q_proj."),
    (r"\.self_attn\.wo\.", ".self_attn.o_proj."),
    (r"\.self_attn\.wkv_a_with_mqa\.", ".self_attn.kv_a_proj_with_mqa."),
    (r"\.self_attn\.wkv_b\.", ".self_attn.kv_b_proj."),
    (r"\.self_attn\.kv_a_norm\.", ".self_attn.kv_a_layernorm."),
    (r"\.ssmax_scaling\.s$", ".softmax_scaling.scale"),
    (r"\.ssmax_scaling\.b$", ".softmax_scaling.bias"),
    (r"^(model\.layers\..*)\.w1\.", r"\1.gate_proj."),
    (r"^(model\.layers\..*)\.w2\.", r"\1.down_proj."),
    (r"^(model\.layers\..*)\.w3\.", r"\1.up_proj."),
)
"""Checkpoints have Mistral's own names of tensors, and here they have those of transformers."""


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    num_layers = config.num_layers
    config.refuse("q_lora_rank")
    config.refuse("mlp_bias", False)
    rotates = read_rotates(config, num_layers)
    dense = listed_dense(config, first_dense(config))
    forms = [(rotates[layer], layer in dense) for layer in range(num_layers)]
    row_size = _read_form(config, True, False)[0].groups[0].head_dim

    def read_form(form: tuple[bool, bool]) -> tuple[ModelSpec, Layout]:
        spec, layout = _read_form(config, *form)
        # Rows of one size, so that all layers share pages: those that rotate nothing are padded.
        return replace(spec, groups=(replace(spec.groups[0], head_dim=row_size),)), layout

    found = with_shared(read_forms(forms, read_form), config, every_few(config, num_layers))
    spec, layout = _with_sources(found, config, rotates)
    (rotated,) = {rope.dim for rope in (spec.rope, *spec.layer_ropes) if rope}
    growth = leaf("model.rotary_emb.alpha", (rotated // 2,), (None,))
    return spec, replace(layout.with_top(rope_growth=growth), spellings=SPELLINGS)


def _read_form(config: ConfigReader, rotates: bool, is_dense: bool) -> tuple[ModelSpec, Layout]:
    """Reads the model as if all its layers rotated, or did not, and had experts, or none."""
    experts, router = read_grouped(config)
    index = replace(read_index(config, interleaved=True), of_stream=True)
    if not rotates:  # then the rotated part is as the other one
        plain, rotated = config.size("qk_nope_head_dim"), config.size("qk_rope_head_dim")
        config = config.replaced(qk_nope_head_dim=plain + rotated, qk_rope_head_dim=0)
    spec, layout = read_latent(
        config,
        rotates=rotates,
        experts=None if is_dense else replace(experts, bias=None).leaves,
        router=None if is_dense else replace(router, score="softmax", is_normalised=True),
        index=index,
        scales=Scales(logit_cap=config.number("final_logit_softcapping", 30.0)),
    )
    own = _growth("q", ATTENTION, spec.num_heads, "heads")
    own |= _growth("index_q", f"{ATTENTION}indexer.", index.num_heads, None)
    for end, name in (("", "weight"), ("_bias", "bias")):
        source = f"{ATTENTION}indexer.q_input_norm.{name}"
        own[f"index_q_norm{end}"] = leaf(source, (spec.hidden_size,), ("model",))
    attention = replace(spec.attention, latent_eps=spec.norm_eps)
    spec = replace(spec, attention=attention)
    return spec, layout.in_each_layer(**own)


def _growth(name: str, prefix: str, count: int, axis: str | None) -> dict[str, Leaf]:
    """Describes how the queries of each head grow."""
    return {
        f"{name}_growth{end}": leaf(f"{prefix}softmax_scaling.{source}", (count,), (axis,))
        for end, source in (("", "scale"), ("_bias", "bias"))
    }


def _with_sources(
    found: tuple[ModelSpec, Layout], config: ConfigReader, rotates: list[bool]
) -> tuple[ModelSpec, Layout]:
    """Returns a decoder of which some layers take the latents of layers before them."""
    given, own = config.get("kv_source_layers"), list(range(len(rotates)))
    if given is None or given == own:
        return found
    key = "kv_source_layers"
    if (
        not isinstance(given, list)
        or len(given) != len(own)
        or not all(is_int(one) and 0 <= one <= layer for layer, one in enumerate(given))
        or any(given[one] != one for one in given)
    ):
        raise config.fail(key, f"for each of {len(own)} layers itself, or one before that is its")
    sources = sorted({one for layer, one in enumerate(given) if one != layer})
    for layer, source in enumerate(given):
        alike = [one for one in sources if one < layer and rotates[one] == rotates[layer]]
        if source != layer and [source] != alike[-1:]:
            raise config.fail(key, "the last source that rotates as the layer does, or does not")
    taking = [layer for layer, one in enumerate(given) if one != layer]
    unread = {"kv_down", "kv_down_bias", "kv_down_norm"}
    spec, layout = with_leaves(
        found, taking, lambda leaves: {x: y for x, y in leaves.items() if x not in unread}
    )
    attention = replace(spec.attention, latent_sources=tuple(sources))
    return replace(spec, attention=attention), layout
