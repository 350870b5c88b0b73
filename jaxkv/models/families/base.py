"""Defines what a family file gives: `read(config) -> (ModelSpec, Layout)`, from config.json to spec
and expected tensors.

A family is one file here, named after its `model_type`. It promises that the layout lists every
tensor that the model
computes with: the loader refuses a checkpoint with one missing and one with a tensor that nobody
takes.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxkv.axes import ArrayInfo
from jaxkv.config import is_int
from jaxkv.errors import CheckpointError
from jaxkv.models.spec import KVGroup, ModelSpec, RopeSpec
from jaxkv.ops.layers import ACTIVATIONS

MAX_SIZE = 2**24
MAX_LAYERS = 2**12
MIN_NUMBER, MAX_NUMBER = 1e-30, 1e30
"""Bounds of every other number: inside float32's range with room to divide."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """Describes one array of the weight tree: its name in the checkpoint (`{layer}` is filled in)
    and its description.

    `same_as` names a leaf that this one may repeat: absent or equal in the checkpoint, it is left
    out of the tree.
    """

    source: str
    info: ArrayInfo
    same_as: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Leaves outside the layers, leaves of each layer, and patterns of names that hold nothing of
    their own.
    """

    top: Mapping[str, Leaf]
    layer: Mapping[str, Leaf]
    derived: tuple[str, ...] = field(default=())


class ConfigReader:
    """config.json with checked access: every error says where it is, the key, what was expected and
    what came.

    A key that is null counts as absent: the reader's `default` holds.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def fail(self, key: str, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{self.where}: {key}: expected {expected}, got {reprlib.repr(self.values.get(key))}"
        )

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None, *, at_most: int = MAX_SIZE) -> int:
        """Reads a whole number from 1 to `at_most`."""
        value = self.get(key, default)
        if not is_int(value) or not 1 <= value <= at_most:
            raise self.fail(key, f"a whole number from 1 to {at_most}")
        return value

    def number(
        self, key: str, default: float | None = None, *, at_least: float = MIN_NUMBER
    ) -> float:
        """Reads a number from `at_least` to 1e30."""
        value = self.get(key, default)
        if not (is_int(value) or isinstance(value, float)) or not at_least <= value <= MAX_NUMBER:
            raise self.fail(key, f"a number from {at_least:g} to {MAX_NUMBER:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value

    def section(self, key: str) -> ConfigReader:
        """Reads the object under `key`, empty if there is none, as a reader of its own."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.fail(key, "an object")
        return ConfigReader(value, f"{self.where}: {key}")


def read_rope(config: ConfigReader, *, max_len: int) -> RopeSpec:
    """Reads both spellings: `rope_parameters` (transformers 5), and `rope_theta` beside
    `rope_scaling` (older files).
    """
    rope, older = config.section("rope_parameters"), config.section("rope_scaling")
    if rope.values and older.values and rope.values != older.values:
        raise config.fail(
            "rope_scaling",
            "none beside a different rope_parameters: merge them into rope_parameters",
        )
    rope = rope if rope.values else older
    key = "type" if "rope_type" not in rope.values and "type" in rope.values else "rope_type"
    kind = rope.get(key, "default")
    theta = rope.number(
        "rope_theta", config.number("rope_theta", 10000.0, at_least=1.001), at_least=1.001
    )
    for reader in (config, rope):
        if reader.get("partial_rotary_factor", 1.0) != 1.0:
            raise reader.fail("partial_rotary_factor", "1 (a partly rotated head is not built yet)")
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind == "linear":
        return RopeSpec(kind=kind, theta=theta, factor=rope.number("factor"))
    if kind not in ("llama3", "yarn"):
        raise rope.fail(key, "default, linear, llama3 or yarn")
    original_max_len = config.size("original_max_position_embeddings", max_len)
    original_max_len = rope.size("original_max_position_embeddings", original_max_len)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high <= low:
            raise rope.fail("high_freq_factor", f"a number above low_freq_factor={low}")
        return RopeSpec(
            kind=kind,
            theta=theta,
            factor=rope.number("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_len=original_max_len,
        )
    factor = rope.number("factor", max_len / original_max_len)
    return RopeSpec(
        kind=kind,
        theta=theta,
        factor=factor,
        beta_fast=rope.number("beta_fast", 32.0, at_least=1e-3),
        beta_slow=rope.number("beta_slow", 1.0, at_least=1e-3),
        attention_factor=_yarn_attention_factor(rope, factor),
        truncate=rope.flag("truncate", True),
        original_max_len=original_max_len,
    )


def _yarn_attention_factor(rope: ConfigReader, factor: float) -> float:
    """Returns the factor on cos and sin: given, or 0.1 ln(factor) + 1 (arXiv 2309.00071, section
    3.4), or DeepSeek's mscale.
    """

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return mscale(rope.number("mscale")) / mscale(rope.number("mscale_all_dim"))
    return mscale(1.0)


def extended_len(rope: RopeSpec, max_len: int) -> int:
    """Returns the longest context that the scaled embedding is meant for: what vLLM derives from
    the same keys.
    """
    if rope.kind == "linear":
        return min(int(max_len * rope.factor), MAX_SIZE)
    if rope.kind == "yarn":
        return min(max(max_len, int(rope.original_max_len * rope.factor)), MAX_SIZE)
    return max_len


def sliding_window(config: ConfigReader) -> int | None:
    """Returns the window that layers may use. An absent key means 4096, transformers' default; null
    means none.
    """
    return (
        config.size("sliding_window", 4096)
        if config.values.get("sliding_window", 4096) is not None
        else None
    )


def layer_windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Reads each layer's window in Qwen's spelling: `layer_types`, or `use_sliding_window` from
    `max_window_layers` on.
    """
    window = sliding_window(config) if config.flag("use_sliding_window", False) else None
    first = config.get("max_window_layers", 28)
    if not is_int(first) or first < 0:
        raise config.fail("max_window_layers", "a whole number >= 0")
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple(window if layer >= first else None for layer in range(num_layers))
    known = {"full_attention": None, "sliding_attention": window}
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or not all(kind in list(known) for kind in kinds)
    ):
        raise config.fail("layer_types", f"a list of {num_layers} out of {sorted(known)}")
    if "sliding_attention" in kinds and window is None:
        raise config.fail("use_sliding_window", "true, because layer_types has sliding_attention")
    return tuple(known[kind] for kind in kinds)


def read_llama_like(
    config: ConfigReader,
    *,
    family: str,
    windows: Callable[[ConfigReader, int], tuple[int | None, ...]] | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    max_len: int = 2048,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> tuple[ModelSpec, Layout]:
    """Reads spec and layout of the pre-norm, gated-MLP, rotary decoder that most families are.

    `num_kv_heads`, `head_dim` and `max_len` are the family's defaults for configs that leave them
    out (for the first
    two: the query heads' number, and D / N). `windows(config, num_layers)` gives each layer's
    window; without it attention is full everywhere.
    """
    if config.get("quantization_config") is not None:
        raise config.fail("quantization_config", "none (quantised checkpoints are not built yet)")
    hidden, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    num_layers = config.size("num_hidden_layers", at_most=MAX_LAYERS)
    # transformers: a null number means one KV head per query head, an absent one the family's
    # default.
    absent = "num_key_value_heads" not in config.values
    kv_heads = config.size(
        "num_key_value_heads", num_kv_heads if absent and num_kv_heads else num_heads
    )
    head_dim = config.size("head_dim", head_dim or max(1, hidden // num_heads))
    if num_heads % kv_heads:
        raise config.fail("num_key_value_heads", f"a divisor of num_attention_heads={num_heads}")
    if head_dim % 2:
        raise config.fail("head_dim", "an even number (rotary embedding pairs dimensions)")
    activation = config.get("hidden_act", "silu")
    if activation not in list(ACTIVATIONS):
        raise config.fail("hidden_act", f"one of {sorted(ACTIVATIONS)}")
    max_len = config.size("max_position_embeddings", max_len)
    rope = read_rope(config, max_len=max_len)
    spec = ModelSpec(
        family=family,
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        head_dim=head_dim,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        activation=activation,
        rope=rope,
        groups=group_layers(
            windows(config, num_layers) if windows else (None,) * num_layers,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
        ),
        max_len=extended_len(rope, max_len),
    )
    ffn = config.size("intermediate_size")
    layer = _attention_leaves(spec, qkv_bias=qkv_bias, o_bias=o_bias, qk_norm=qk_norm)
    layer |= _mlp_leaves(hidden, ffn, bias=mlp_bias)
    tied = config.flag("tie_word_embeddings", False)
    top = {
        "embed": _leaf("model.embed_tokens.weight", (spec.vocab_size, hidden), ("vocab", "model")),
        "norm": _leaf("model.norm.weight", (hidden,), ("model",)),
        "head": _leaf(
            "lm_head.weight",
            (spec.vocab_size, hidden),
            ("vocab", "model"),
            "embed" if tied else None,
        ),
    }
    return spec, Layout(
        top=top, layer=layer, derived=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
    )


def group_layers(
    windows: tuple[int | None, ...], *, num_kv_heads: int, head_dim: int
) -> tuple[KVGroup, ...]:
    """Layers of equal window become one KV group, in the order in which the windows first
    appear.
    """
    return tuple(
        KVGroup(
            layers=tuple(layer for layer, other in enumerate(windows) if other == window),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            window=window,
        )
        for window in dict.fromkeys(windows)
    )


def _leaf(
    source: str, shape: tuple[int, ...], axes: tuple[str | None, ...], same_as: str | None = None
) -> Leaf:
    return Leaf(source, ArrayInfo(shape, np.dtype(np.float32), axes), same_as)


def _projection(
    name: str, source: str, shape: tuple[int, int], axes: tuple[str, str], *, bias: bool
) -> dict[str, Leaf]:
    """Describes a linear layer's weight [out, in] and, if it has one, its bias [out]."""
    leaves = {name: _leaf(f"model.layers.{{layer}}.{source}.weight", shape, axes)}
    if bias:
        leaves[f"{name}_bias"] = _leaf(f"model.layers.{{layer}}.{source}.bias", shape[:1], axes[:1])
    return leaves


def _attention_leaves(
    spec: ModelSpec, *, qkv_bias: bool, o_bias: bool, qk_norm: bool
) -> dict[str, Leaf]:
    hidden, queries = spec.hidden_size, spec.num_heads * spec.head_dim
    keys = spec.groups[0].num_kv_heads * spec.head_dim
    leaves = {
        "attn_norm": _leaf("model.layers.{layer}.input_layernorm.weight", (hidden,), ("model",))
    }
    leaves |= _projection(
        "q", "self_attn.q_proj", (queries, hidden), ("heads", "model"), bias=qkv_bias
    )
    leaves |= _projection(
        "k", "self_attn.k_proj", (keys, hidden), ("kv_heads", "model"), bias=qkv_bias
    )
    leaves |= _projection(
        "v", "self_attn.v_proj", (keys, hidden), ("kv_heads", "model"), bias=qkv_bias
    )
    leaves |= _projection(
        "o", "self_attn.o_proj", (hidden, queries), ("model", "heads"), bias=o_bias
    )
    if qk_norm:
        for name in ("q_norm", "k_norm"):
            source = f"model.layers.{{layer}}.self_attn.{name}.weight"
            leaves[name] = _leaf(source, (spec.head_dim,), ("head_dim",))
    return leaves


def _mlp_leaves(hidden: int, ffn: int, *, bias: bool) -> dict[str, Leaf]:
    leaves = {
        "mlp_norm": _leaf(
            "model.layers.{layer}.post_attention_layernorm.weight", (hidden,), ("model",)
        )
    }
    leaves |= _projection("gate", "mlp.gate_proj", (ffn, hidden), ("ffn", "model"), bias=bias)
    leaves |= _projection("up", "mlp.up_proj", (ffn, hidden), ("ffn", "model"), bias=bias)
    leaves |= _projection("down", "mlp.down_proj", (hidden, ffn), ("model", "ffn"), bias=bias)
    return leaves
