"""ChatGLM2, ChatGLM3 and GLM-4 of 2024 as they were published: GLM with queries, keys and values in
one matrix. Sources: arXiv 2406.12793; vLLM's ChatGLMForCausalLM.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import QKV, Layout, Names, read_decoder
from jaxkv.models.spec import ModelSpec

NAMES = Names(
    embed="transformer.embedding.word_embeddings",
    norm="transformer.encoder.final_layernorm",
    head="transformer.output_layer",
    layer="transformer.encoder.layers.{layer}.",
    qkv="self_attention.query_key_value",
    o="self_attention.dense",
    gate_up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)
RENAMED = {
    "vocab_size": "padded_vocab_size",
    "num_hidden_layers": "num_layers",
    "intermediate_size": "ffn_hidden_size",
    "num_key_value_heads": "multi_query_group_num",
    "head_dim": "kv_channels",
    "max_position_embeddings": "seq_length",
}
HARMLESS = {
    "position_encoding_2d": False,  # of the first ChatGLM, which has this model_type too
    **dict.fromkeys(("rmsnorm", "post_layer_norm"), True),
    **dict.fromkeys(("add_bias_linear", "interleaved_qkv"), False),
    **dict.fromkeys(("apply_residual_connection_post_layernorm", "prefix_projection"), False),
    "quantization_bit": 0,
    "pre_seq_len": 0,
}
"""Keys of published configs, with what they say in those that are read."""

THETA, ROTATED = 10000.0, 0.5


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    for key, harmless in HARMLESS.items():
        config.refuse(key, harmless)
    if not config.flag("multi_query_attention", False):  # rows of other models are head by head
        raise config.fail("multi_query_attention", "true")
    # As in vLLM and in the code of ChatGLM3 and GLM-4, whatever else has this key.
    theta = THETA * config.number("rope_ratio", 1.0)
    # The default is that of its authors' ChatGLMConfig, which transformers does not have.
    config = config.with_defaults({"layernorm_epsilon": 1e-5})
    config = config.replaced(hidden_act="silu", rope_theta=theta, partial_rotary_factor=ROTATED)
    spec, layout = read_decoder(
        config.renamed(**RENAMED),
        names=NAMES,
        biased=QKV * config.flag("add_qkv_bias", False),
        interleaved=config.flag("original_rope", True),
        partly=True,
        eps="layernorm_epsilon",
    )
    return spec, layout.with_unread(r"transformer\.rotary_pos_emb\.inv_freq")
