"""DeepSeek V4: several streams, rows that are key and value at once for the last tokens and entries
for those before, and experts of which some layers look up which a token takes. Source: the
model's card, deepseek-ai/DeepSeek-V4-Flash-Base.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import (
    LAYER,
    Layout,
    Leaf,
    Names,
    Part,
    leaf,
    read_decoder,
    read_forms,
    table,
)
from jaxkv.models.families.experts import MAX_EXPERTS, Experts, read_router
from jaxkv.models.families.hybrid import without_attention
from jaxkv.models.families.latent import LANES, MAX_HEAD
from jaxkv.models.families.streams import connections, joining, read_mixed_streams
from jaxkv.models.recurrent import Compressor
from jaxkv.models.rope_config import read_rope, rope_section
from jaxkv.models.spec import (
    AttentionSpec,
    GateLimits,
    IndexSpec,
    KVGroup,
    ModelSpec,
    RopeSpec,
    Scales,
    StateSpec,
)
from jaxkv.ops.attention import EntryShape
from jaxkv.ops.attention.sweep import BLOCK
from jaxkv.weights.tree import TOKEN_EXPERTS

NEAR, CHOSEN, HEAVY = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
RATES = {CHOSEN: 4, HEAVY: 128}
OF_RATIO = {0: NEAR} | {rate: kind for kind, rate in RATES.items()}
HASHED, ROUTED = "hash_moe", "moe"
SPELLINGS = (
    (r"\.scale$", ".weight_scale_inv"),  # of quantised weights
    (r"\.self_attn\.(q|o)_(a|b)_proj\.", r".attn.w\1_\2."),  # as transformers' adapters say it
    (r"\.self_attn\.kv_proj\.", ".attn.wkv."),
    (r"\.mlp\.shared_experts\.", ".ffn.shared_experts."),
    (r"^embed\.", "model.embed_tokens."),
    (r"^head\.", "lm_head."),
    (r"^hc_head_(fn|base|scale)$", r"model.hc_head.hc_\1"),
    (r"\.shared_experts\.w1\.", ".shared_experts.gate_proj."),
    (r"\.shared_experts\.w2\.", ".shared_experts.down_proj."),
    (r"\.shared_experts\.w3\.", ".shared_experts.up_proj."),
)
NAMES = Names(attn_norm="attn_norm", mlp_norm="ffn_norm")

Form = tuple[str, str]
"""Says how a layer attends, and how it finds a token's experts."""


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    num_layers = config.num_layers
    config.refuse("mlp_bias", False)
    if config.size("num_key_value_heads", 1) != 1:
        raise config.fail("num_key_value_heads", "1: a row is the key of every head")
    rates, kinds = _rates(config), _kinds(config, num_layers)
    forms = list(zip(kinds, _mlp_kinds(config, num_layers), strict=True))
    keepers = {kind: _keeper(config, kind, rates) for kind in dict.fromkeys(kinds)}
    spec, layout = read_forms(forms, lambda form: _read_form(config, form, keepers))
    hyper = read_mixed_streams(config)
    layout = layout.with_top(**joining(hyper, spec.hidden_size, "model.hc_head.hc_"))
    return spec, replace(layout, spellings=SPELLINGS, plain=("compressor", "weights_proj"))


def _kinds(config: ConfigReader, num_layers: int) -> list[str]:
    """Reads how layers attend: by name, or by how many tokens an entry has; otherwise the first two
    heavily compressed, and then by turns.
    """
    if config.get("layer_types") is not None:
        return config.kinds("layer_types", num_layers, (NEAR, CHOSEN, HEAVY))
    if (ratios := config.get("compress_ratios")) is not None:
        if not isinstance(ratios, list) or not all(one in tuple(OF_RATIO) for one in ratios):
            raise config.fail("compress_ratios", "a list of 0, 4 and 128")
        kinds = [OF_RATIO[one] for one in ratios][:num_layers]
        return config.replaced(layer_types=kinds).kinds("layer_types", num_layers, tuple(kinds))
    return [CHOSEN if i > 1 and i % 2 else HEAVY for i in range(num_layers)]


def _mlp_kinds(config: ConfigReader, num_layers: int) -> list[str]:
    if config.get("mlp_layer_types") is not None:
        return config.kinds("mlp_layer_types", num_layers, (HASHED, ROUTED))
    num_hashed = config.size("num_hash_layers", 3, at_least=0)
    return [HASHED if i < num_hashed else ROUTED for i in range(num_layers)]


def _rates(config: ConfigReader) -> dict[str, int]:
    """Reads how many tokens an entry has."""
    given = config.section("compress_rates")
    keys = {CHOSEN: "compress_rate_csa", HEAVY: "compress_rate_hca"}
    rates = {kind: config.size(keys[kind], given.size(kind, rate)) for kind, rate in RATES.items()}
    if any(BLOCK % rate for rate in rates.values()):  # entries lie in pages, and in what is read
        raise config.fail("compress_rates", f"divisors of {BLOCK} (nothing else is built)")
    return rates


def _keeper(config: ConfigReader, kind: str, rates: Mapping[str, int]) -> Compressor | None:
    if kind == NEAR:
        return None
    sizes = [config.size("head_dim", at_most=MAX_HEAD)]
    if kind == CHOSEN:
        sizes.append(config.size("index_head_dim", at_most=MAX_HEAD))
    return Compressor(rate=rates[kind], overlaps=kind == CHOSEN, sizes=tuple(sizes))


def _read_form(
    config: ConfigReader, form: Form, keepers: Mapping[str, Compressor | None]
) -> tuple[ModelSpec, Layout]:
    kind, mlp_kind = form
    num_layers, head_dim = config.num_layers, config.size("head_dim")
    experts = Experts(
        count=config.size("n_routed_experts", at_most=MAX_EXPERTS),
        width=config.size("moe_intermediate_size"),
        router="ffn.gate",
        one="ffn.experts.{expert}.",
        gate="w1",
        up="w3",
        down="w2",
        bias="ffn.gate.bias" if mlp_kind == ROUTED else None,
        shared="ffn.shared_experts.",
        shared_width=config.size("moe_intermediate_size"),
    )
    router = read_router(
        config,
        experts.count,
        used="num_experts_per_tok",
        score=config.choice("scoring_func", "sqrtsoftplus", ("sqrtsoftplus", "softmax", "sigmoid")),
        is_normalised=True,
        scale=config.number("routed_scaling_factor", 1.5),
    )
    hyper = read_mixed_streams(config)
    of_all = (config.number("swiglu_limit", 10.0),) * num_layers
    index = IndexSpec(
        num_heads=config.size("index_n_heads", at_most=MAX_HEAD),
        head_dim=config.size("index_head_dim", at_most=MAX_HEAD),
        num_chosen=config.size("index_topk"),
        interleaved=True,
    )
    spec, layout = read_decoder(
        config.replaced(
            num_key_value_heads=1,
            intermediate_size=experts.width,
            num_nextn_predict_layers=None,
        ),
        names=NAMES,
        ropes=[_rope(config, kind)] * num_layers,
        attention=AttentionSpec(
            has_sinks=True,
            near=config.size("sliding_window"),
            index=index,
            output_groups=config.size("o_groups", 8),
        ),
        experts=experts.leaves,
        router=router,
        scales=Scales(limits=GateLimits(routed=of_all, shared=of_all), hyper=hyper),
    )
    if kind == CHOSEN and index.head_dim < spec.rope.dim:
        raise config.fail("index_head_dim", f"at least the {spec.rope.dim} that are rotated")
    keeper, layers = keepers[kind], tuple(range(num_layers))
    own = without_attention(layout.layers[0]) | _leaves(config, spec, keeper)
    own |= connections(hyper, spec.hidden_size, ("hc_attn_", "hc_ffn_"))
    if mlp_kind == HASHED:
        shape = (spec.vocab_size, router.num_used)
        own[TOKEN_EXPERTS] = table(f"{LAYER}ffn.gate.tid2eid", shape, below=experts.count)
    group = KVGroup(
        layers=layers, num_kv_heads=1, head_dim=_row(head_dim, keepers), latent_dim=head_dim
    )
    states = () if keeper is None else (StateSpec(layers=layers, mixer=keeper),)
    return replace(spec, groups=(group,), states=states), replace(layout, layers=(own,))


def _row(head_dim: int, keepers: Mapping[str, Compressor | None]) -> int:
    """Returns the numbers of a row, with its part of entries behind it."""
    made = [one for one in keepers.values() if one is not None]
    size = head_dim + max([0, *(EntryShape(x.rate, sum(x.sizes)).width for x in made)])
    return size if size <= LANES else -(-size // LANES) * LANES


def _rope(config: ConfigReader, kind: str) -> RopeSpec:
    """Reads how a layer rotates: one for those without entries, and one for those with them."""
    part = 64 / 512
    if config.get("partial_rotary_factor") is not None:
        part = config.number("partial_rotary_factor", part)
    elif config.get("qk_rope_head_dim") is not None:
        part = config.size("qk_rope_head_dim", at_most=config.head_dim) / config.head_dim
    section, name = rope_section(config), "main" if kind == NEAR else "compress"
    if isinstance(section.get("main"), dict) and isinstance(section.get("compress"), dict):
        section = section.section(name)
    elif kind == NEAR:
        theta = config.number("rope_theta", 10000.0)
        section = ConfigReader({"rope_theta": theta}, section.where)
    else:
        theta = config.number("compress_rope_theta", 160000.0)
        # The reference takes YaRN's frequencies, not its factor.
        section = section.replaced(rope_theta=theta).with_defaults({"attention_factor": 1.0})
    config = config.replaced(partial_rotary_factor=part)
    section = section.with_defaults({"partial_rotary_factor": part})
    rope = read_rope(config, section, interleaved=True, partly=True)
    return replace(rope, dim=rope.dim or config.head_dim)  # rows of pages are wider than heads


def _leaves(config: ConfigReader, spec: ModelSpec, keeper: Compressor | None) -> dict[str, Leaf]:
    """Describes the arrays of a layer's attention."""
    hidden, head_dim, heads = spec.hidden_size, spec.head_dim, spec.num_heads
    q_rank, prefix = config.size("q_lora_rank", at_most=MAX_HEAD), f"{LAYER}attn."

    def matrix(source: str, shape: tuple[int, int], *axes: str | None) -> Leaf:
        return leaf(f"{prefix}{source}.weight", shape, axes)

    def norm(source: str, size: int) -> Leaf:
        return leaf(f"{prefix}{source}.weight", (size,), (None,))

    groups, rank = spec.attention.output_groups, config.size("o_lora_rank", at_most=MAX_HEAD)
    if heads % groups:
        raise config.fail("o_groups", f"a divisor of the {heads} of num_attention_heads")
    found = {
        "q_down": matrix("wq_a", (q_rank, hidden), None, "model"),
        "q_down_norm": norm("q_norm", q_rank),
        "q": matrix("wq_b", (heads * head_dim, q_rank), "heads", None),
        "kv": matrix("wkv", (head_dim, hidden), None, "model"),
        "kv_norm": norm("norm", head_dim),
        "sinks": leaf(f"{prefix}attn_sink", (heads,), ("heads",)),
        "o_groups": matrix("wo_a", (groups * rank, heads * head_dim // groups), "heads", None),
        "o": matrix("wo_b", (hidden, groups * rank), "model", "heads"),
    }
    if keeper is None:
        return found
    sources = {"entry": "compressor.", "index": "indexer.compressor."}
    for (name, source), size in zip(sources.items(), keeper.sizes, strict=False):
        width = size * (1 + keeper.overlaps)
        found[f"{name}_kv"] = matrix(f"{source}wkv", (width, hidden), None, "model")
        found[f"{name}_gate"] = matrix(f"{source}wgate", (width, hidden), None, "model")
        # A vector here: what no matmul reads is not quantised.
        whole = Part(shape=(keeper.rate, width))
        place = f"{prefix}{source}ape"
        found[f"{name}_place"] = leaf(place, (keeper.rate * width,), (None,), part=whole)
        found[f"{name}_norm"] = norm(f"{source}norm", size)
    if len(keeper.sizes) > 1 and isinstance(index := spec.attention.index, IndexSpec):
        queries = (index.num_heads * index.head_dim, q_rank)
        found["index_q"] = matrix("indexer.wq_b", queries, None, None)
        weights = (index.num_heads, hidden)
        found["index_weight"] = matrix("indexer.weights_proj", weights, None, "model")
    return found
