"""Reads EAGLE-3 draft layers: a block trained for a model, in a checkpoint of its own, as EAGLE's
authors and SpecForge write it (`LlamaForCausalLMEagle3`), or the speculators library. Sources:
arXiv 2503.01840, section 3; vLLM's Eagle3LlamaForCausalLM and its configs/speculators.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from jaxkv.axes import ArrayInfo
from jaxkv.models.altup import ROUTER
from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.decoder import HEAD_TOKENS
from jaxkv.models.families import DRAFT_KEYS, read_family
from jaxkv.models.families.base import LAYER, QKV, Layout, Leaf, leaf
from jaxkv.models.predictor import AUX_JOIN, AUX_NORM, EACH_NORM
from jaxkv.models.spec import HiddenStates, ModelSpec

BLOCK = "midlayer."
NOT_HERE = "(the model's)"
"""What leaves repeat where a checkpoint leaves them out: no tensor of its own has such a name."""

BLOCKS = ("llama", "qwen3")
KIND, INNER = "speculators_model_type", "transformer_layer_config"
"""Keys of the speculators library: how tokens are proposed, and the config of the block."""

IDS = "eagle_aux_hidden_state_layer_ids"
OTHERS = ("Peagle", "PEagle", "DFlash", "Eagle3Deepseek")
"""How architectures begin that are none of these."""


def read_eagle(config: ConfigReader, spec: ModelSpec, layout: Layout) -> tuple[ModelSpec, Layout]:
    """Returns spec and layout of a draft layer, as a model of that layer alone
    (`models.predictor`), for the model of this spec and layout.

    Embeddings are the model's, and a head of all tokens is: tensors of these that the checkpoint
    has are leaves.
    Raises: CheckpointError for another config, NotImplementedError for a model whose layers have
    more between them than one stream.
    """
    _check_stream(spec, layout)
    outer, block = config, config
    if is_outer := config.get(KIND) is not None:
        config.choice(KIND, None, ("eagle3",))
        block = config.section(INNER)
    names = outer.get("architectures", [])
    if isinstance(names, list) and any(str(name).startswith(OTHERS) for name in names):
        raise outer.fail("architectures", "those of EAGLE-3 with a block like Llama's or Qwen3's")
    block.choice("model_type", None, BLOCKS)
    if block.size("num_hidden_layers") != 1:
        raise block.fail("num_hidden_layers", "1")
    if block.size("vocab_size") != spec.vocab_size:
        raise block.fail("vocab_size", f"the model's, {spec.vocab_size}")
    outer.refuse("logit_scale", 1.0)
    if outer.size("target_hidden_size", spec.hidden_size) != spec.hidden_size:
        raise outer.fail("target_hidden_size", f"the model's hidden_size, {spec.hidden_size}")
    ours, theirs = read_family(block.replaced(**dict.fromkeys(DRAFT_KEYS)))
    hidden_states = _hidden_states(outer, spec.num_layers)
    hidden, vocab = ours.hidden_size, ours.vocab_size
    num_head = outer.size("draft_vocab_size", vocab, at_most=vocab)
    is_same = hidden == spec.hidden_size
    vector, axes = ((hidden,), ("model",)), ("vocab", "model")
    own = NOT_HERE if is_same else None
    top = {
        "norm": leaf("norm.weight", *vector),
        "own_tokens": leaf("embed_tokens.weight", (vocab, hidden), axes, same_as=own),
    }
    own = NOT_HERE if is_same and num_head == vocab else None
    top["own_head"] = leaf("lm_head.weight", (num_head, hidden), axes, same_as=own)
    unread = [*theirs.derived, "t2d"]
    if num_head == vocab:
        unread.append("d2t")
    else:
        info = ArrayInfo((num_head,), np.dtype(np.int32), (None,), vocab)
        top[HEAD_TOKENS] = Leaf("d2t", info)
    top |= _aux_leaves(outer, hidden_states, spec.hidden_size, hidden)
    layer = {
        name: replace(one, source=one.source.replace(LAYER, BLOCK))
        for name, one in theirs.layers[0].items()
    }
    for name in QKV:
        info = layer[name].info
        layer[name] = replace(layer[name], info=replace(info, shape=(info.shape[0], 2 * hidden)))
    layer["token_norm"] = layer.pop("attn_norm")
    hidden_norm = leaf(f"{BLOCK}hidden_norm.weight", *vector)
    if outer.flag("norm_before_residual", is_outer):
        top["hidden_norm"] = hidden_norm
    else:
        layer["attn_norm"] = hidden_norm
    layout = replace(
        theirs,
        top=top,
        layers=(layer,),
        derived=tuple(unread),
        spellings=((r"^model\.", ""), (r"^layers\.0\.", BLOCK)),
        hidden_states=hidden_states,
    )
    # It is trained on shorter texts than it may be asked for, and says how long these were.
    return replace(ours, max_len=spec.max_len), layout


def _check_stream(spec: ModelSpec, layout: Layout) -> None:
    """Raises: NotImplementedError for a model with more than a stream between layers, or whose
    layers are not those that its config counts (recurrent layers alone may be halves).
    """
    scales = spec.scales
    has_more = scales.hyper is not None or scales.depth is not None or spec.has_shortcut
    has_more = has_more or any(ROUTER in one for one in layout.layers)
    if has_more or scales.passes or not spec.kv_layers:
        raise NotImplementedError(
            f"speculative_config: method 'eagle3': expected a model of one stream, whose layers "
            f"attend, got {spec.family}"
        )


def _hidden_states(config: ConfigReader, num_layers: int) -> HiddenStates:
    """Reads what the layer takes of its model: by default streams near its begin, middle and end,
    as EAGLE-3's authors have it.
    """
    inner, chains_normed = config.section("eagle_config"), config.flag("norm_output", False)
    if not inner.flag("use_aux_hidden_state", True):
        return HiddenStates(chains_normed=chains_normed)
    of = inner if config.get(IDS) is None else config
    by_default = [2, num_layers // 2, num_layers - 3]
    ids = sorted({*of.whole_numbers(IDS, by_default, at_most=num_layers)})
    if not ids:
        raise of.fail(IDS, "numbers of the model's layers")
    if config.size("num_aux_hidden_states", len(ids)) != len(ids):
        raise config.fail("num_aux_hidden_states", f"as many as {IDS} names, {len(ids)}")
    return HiddenStates(layers=tuple(ids), chains_normed=chains_normed)


def _aux_leaves(
    config: ConfigReader, hidden_states: HiddenStates, model_size: int, hidden: int
) -> dict[str, Leaf]:
    """Returns the leaves that make one hidden state of the streams."""
    count, found = len(hidden_states.layers), dict[str, Leaf]()
    if not count:
        if model_size != hidden:
            raise config.fail("hidden_size", f"the model's, {model_size}, without streams")
        return found
    inner = config.section("eagle_config")
    if inner.flag("norm_before_fc", config.flag("norm_before_fc", False)):
        found[AUX_NORM] = leaf("input_norm.weight", (count * model_size,), ("model",))
    if config.flag("fc_norm", False):
        for number in range(count):
            source = f"fc_norm.{number}.weight"
            found[EACH_NORM.format(number)] = leaf(source, (model_size,), ("model",))
    found[AUX_JOIN] = leaf("fc.weight", (hidden, count * model_size), (None, "model"))
    return found
