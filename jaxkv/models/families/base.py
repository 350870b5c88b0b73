"""Defines what a family file gives: `read(config) -> (ModelSpec, Layout)`, from config.json to spec
and expected tensors.

A family is one file here, named after its `model_type`; one whose block is known needs
`read_decoder` with what sets it apart, and one that is another under a name of its own takes that
one's `read`. It promises that the layout lists every tensor that the model computes with: the
loader refuses a checkpoint with one missing and one with a tensor that nobody takes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import jax
import numpy as np

from jaxkv.axes import ArrayInfo
from jaxkv.models.config_reader import MAX_LAYERS, ConfigReader
from jaxkv.models.quantisation import Quantisation
from jaxkv.models.rope_config import extended_len, read_rope
from jaxkv.models.spec import NO_KEYS, HiddenStates, KVGroup, ModelSpec, RopeSpec, StateSpec
from jaxkv.ops.layers import ACTIVATIONS

FULL, SLIDING = "full_attention", "sliding_attention"
LAYER = "model.layers.{layer}."
"""Begins the names of a layer's tensors in most families."""

Form = TypeVar("Form", bound=Hashable)


Arrays = TypeVar("Arrays", np.ndarray, jax.Array)


@dataclass(frozen=True, slots=True)
class Part:
    """Says which part of a stored tensor an array is: of its rows (after it is `transposed`) seen
    as `num_blocks` blocks, those from `start` to `stop` of each. `shape` is the tensor's.
    by_column: each block is transposed. side_by_side: blocks are one beside the other in the array,
    not one behind the other. turn: blocks take turns, with so many rows each; 0: one is
    behind the other. of_all: it is that of all experts, one behind the other. either_way: the
    tensor may have its last two axes swapped, which its shape then shows.
    """

    shape: tuple[int, ...]
    num_blocks: int = 1
    start: int = 0
    stop: int | None = None
    transposed: bool = False
    by_column: bool = False
    side_by_side: bool = False
    turn: int = 0
    of_all: bool = False
    either_way: bool = False

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes that the tensor may have."""
        if not self.either_way:
            return (self.shape,)
        *front, rows, columns = self.shape
        return self.shape, (*front, columns, rows)

    def take(self, stored: Arrays) -> Arrays:
        """Returns the array, of one of numpy or of jax."""
        rows = self._in_order(stored)
        return self.of_rows(rows.reshape(-1, *rows.shape[2:]) if self.of_all else rows)

    def pieces(self, stored: Arrays, num_experts: int) -> Iterator[Arrays]:
        """Gives the array in pieces one behind the other: those of so many experts in one tensor
        one by one, so that no copy is of all of them, or the whole.
        """
        if num_experts == 1 or not self.of_all:
            yield self.take(stored)
            return
        part = self.of_one(num_experts)
        yield from map(part.of_rows, self._in_order(stored))

    def _in_order(self, stored: Arrays) -> Arrays:
        """Returns the tensor with its axes as the array has them."""
        if self.either_way and stored.shape != self.shape:
            stored = stored.swapaxes(-1, -2)
        return stored.swapaxes(-1, -2) if self.transposed else stored

    def of_rows(self, rows: Arrays) -> Arrays:
        """Takes the part of rows that are in the order of the array's."""
        blocks = rows.reshape(self.num_blocks, -1, *rows.shape[1:])[:, self.start : self.stop]
        if self.turn:
            turns = blocks.reshape(self.num_blocks, -1, self.turn, *rows.shape[1:])
            return turns.swapaxes(0, 1).reshape(-1, *rows.shape[1:])
        if self.side_by_side:
            return blocks.swapaxes(0, 1).reshape(blocks.shape[1], -1)
        blocks = blocks.swapaxes(1, 2) if self.by_column else blocks
        return blocks.reshape(-1, *blocks.shape[2:])

    def of_one(self, num_experts: int) -> Part:
        """Returns the same part of the rows of one expert."""
        return replace(self, num_blocks=max(1, self.num_blocks // num_experts))


@dataclass(frozen=True, slots=True)
class Leaf:
    """Describes one array of the weight tree: its name in the checkpoint (`{layer}` is filled in,
    or `{pair}` and `{half}` where it counts two layers as one) and its description.

    `same_as` names a leaf, or a tensor, that this one may repeat: absent or equal in the
    checkpoint, it is left out of the tree. `part`: it is a part of the tensor only. `num_sources`:
    it is so many tensors one behind the other, by `{head}`. `num_experts`: a layer has so many of
    these arrays, by `{expert}` or all in one tensor. `pieces`: what the tensors with its rows are
    called, by `{number}` from 0 on, in a checkpoint that has no `source`. `num_shared`: the layers
    of a kind take turns with so many modules, which are under the name of the first layer of each
    turn; the array is one for all of these, unless `{use}` counts the layers of the kind. 0: each
    has its own.
    """

    source: str
    info: ArrayInfo
    same_as: str | None = None
    part: Part | None = None
    num_sources: int = 1
    num_experts: int = 1
    pieces: str | None = None
    num_shared: int = 0

    @property
    def stored_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes that each tensor in the checkpoint may have."""
        if self.part is not None:
            return self.part.shapes
        shape = self.info.shape
        return (shape if self.num_sources == 1 else (shape[0] // self.num_sources, *shape[1:]),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Leaves outside the layers, leaves of a layer of each kind (`ModelSpec.layer_kinds`), and
    patterns of names that hold nothing of their own.

    `part_of`: the model_type of a model of which this is the text part; its other tensors are not
    loaded. `spellings`: patterns of other names of tensors, and what they are replaced by.
    `num_predictors`: layers behind the last that predict later tokens, which only
    `families.predictor` describes. `plain`: modules that published checkpoints do not quantise,
    though their configs do not say so. `told`: tensors of whole numbers that checkpoints may have,
    and which the config tells: other ones are refused. `joined`: names, with `{layer}`, of tensors
    that transformers has as one, whose rows it divides evenly among them as it saves a model.
    `numbers`: what number each layer has in names, () for its own. Layers of a kind that run more
    than once have the same numbers by turns, and one array of each for all times. `also`: leaves of
    layers in checkpoints of another form, in place of `layers`. `hidden_states`: what a layer that
    predicts takes of its model.
    """

    top: Mapping[str, Leaf] = field(hash=False)
    layers: tuple[Mapping[str, Leaf], ...] = field(hash=False)
    derived: tuple[str, ...] = ()
    part_of: str | None = None
    spellings: tuple[tuple[str, str], ...] = ()
    quantisation: Quantisation | None = None
    num_predictors: int = 0
    plain: tuple[str, ...] = ()
    told: Mapping[str, tuple[int, ...]] = field(default_factory=dict, hash=False)
    joined: tuple[tuple[str, ...], ...] = ()
    numbers: tuple[int, ...] = ()
    also: tuple[Mapping[str, Leaf], ...] = field(default=(), hash=False)
    hidden_states: HiddenStates | None = None

    def in_each_layer(self, **leaves: Leaf) -> Layout:
        """Returns the layout with these leaves, by name, in layers of every kind too."""
        return replace(self, layers=tuple({**one, **leaves} for one in self.layers))

    def with_top(self, **leaves: Leaf) -> Layout:
        """Returns the layout with these leaves, by name, outside the layers too."""
        return replace(self, top={**self.top, **leaves})

    def with_unread(self, *patterns: str) -> Layout:
        """Returns the layout of checkpoints that may have tensors of these names too."""
        return replace(self, derived=(*self.derived, *patterns))


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """Says what a family's tensors are called, those of a layer behind `layer`. None: it has none.

    qkv, gate_up: one tensor that holds the rows of several, in place of those.
    """

    embed: str = "model.embed_tokens"
    positions: str | None = None
    norm: str | None = "model.norm"
    head: str = "lm_head"
    layer: str = LAYER
    attn_norm: str | None = "input_layernorm"
    post_attn_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    post_mlp_norm: str | None = None
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    o: str = "self_attn.o_proj"
    q_norm: str | None = None
    k_norm: str | None = None
    gate: str | None = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    qkv: str | None = None
    gate_up: str | None = None


LLAMA = Names()
QK_NORMED = Names(q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")
SANDWICH = Names(
    post_attn_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    post_mlp_norm="post_feedforward_layernorm",
)
"""Norms before and behind attention and MLP."""

POST_NORMED = Names(
    attn_norm=None,
    post_attn_norm="post_attention_layernorm",
    mlp_norm=None,
    post_mlp_norm="post_feedforward_layernorm",
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
)
"""Norms behind attention and MLP, and of queries and keys."""

QKV, MLP = ("q", "k", "v"), ("gate", "up", "down")


def attn_biased(config: ConfigReader, *, default: bool = False) -> tuple[str, ...]:
    """Lists the leaves of attention that have a bias: all or none, as `attention_bias` says."""
    return (*QKV, "o") if config.flag("attention_bias", default) else ()


def mlp_biased(config: ConfigReader, *, default: bool = False) -> tuple[str, ...]:
    """Lists the leaves of an MLP that have a bias: all or none, as `mlp_bias` says."""
    return MLP if config.flag("mlp_bias", default) else ()


def read_decoder(
    config: ConfigReader,
    *,
    names: Names = LLAMA,
    biased: Collection[str] = (),
    kinds: Sequence[str] | None = None,
    ropes: Sequence[RopeSpec | None] | None = None,
    interleaved: bool = False,
    partly: bool = False,
    fused_by_head: bool = False,
    transposed: bool = False,
    eps: str | None = "rms_norm_eps",
    activation: str = "hidden_act",
    activations: Collection[str] = tuple(ACTIVATIONS),
    experts: Callable[[str, int], Mapping[str, Leaf]] | None = None,
    is_dense: Collection[int] = (),
    value_dim: int | None = None,
    **spec: Any,
) -> tuple[ModelSpec, Layout]:
    """Reads spec and layout of a decoder of attention and MLP.

    biased: the leaves that have a bias. kinds: "full_attention" or "sliding_attention" for each
    layer, all full by default. ropes: of each layer, all that of the config by default.
    interleaved, partly: as in `read_rope`. fused_by_head: `qkv` has the rows of one KV head after
    the other. transposed: weights of layers are stored [in, out]. eps, activation: under what the
    config has them. activations: those that the family's tensors are enough for. experts: gives
    what layers have in place of an MLP (`Experts.leaves`), but for those of `is_dense`. value_dim:
    the size of a head's values, at most that of its keys, which it is by default. spec: what else
    the `ModelSpec` has.
    """
    hidden, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    num_layers = config.num_layers
    kv_heads = config.size("num_key_value_heads", num_heads)
    head_dim, max_len = config.head_dim, config.max_len
    if num_heads % kv_heads:
        raise config.fail("num_key_value_heads", f"a divisor of num_attention_heads={num_heads}")
    if ropes is None:
        rope = read_rope(config, interleaved=interleaved, partly=partly)
    else:
        rotated = [one for one in ropes if one is not None]
        rope = rotated[0] if rotated else RopeSpec()
    has_unlike = ropes is not None and set(ropes) != {rope}
    longest = extended_len(rope, max_len)
    windows = _windows(config, kinds, num_layers, longest)
    if experts is not None and len(is_dense) == num_layers:
        experts, spec = None, {**spec, "router": None}
    has_both = experts is not None and len(is_dense) > 0
    made = ModelSpec(
        family=config.values["model_type"],
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        head_dim=head_dim,
        norm_eps=config.number(eps, 1e-6) if eps else 1e-5,
        activation=config.choice(activation, "silu", activations),
        rope=rope,
        groups=group_layers(windows, num_kv_heads=kv_heads, head_dim=head_dim),
        max_len=longest,
        layer_ropes=tuple(ropes or ()) if has_unlike else (),
        layer_kinds=tuple(int(i not in is_dense) for i in range(num_layers)) if has_both else (),
        **spec,
    )
    dims = (head_dim, head_dim, value_dim or head_dim)
    layer = _LayerLeaves(made, names, biased, fused_by_head, transposed, dims).of(config)
    top = _top_leaves(made, config, names, biased, max_len)
    derived, num_predictors = _unread(config, names, num_layers)
    layers: tuple[Mapping[str, Leaf], ...] = (layer,)
    if experts is not None:
        routed = {name: one for name, one in layer.items() if name.removesuffix("_bias") not in MLP}
        routed |= experts(names.layer, hidden)
        layers = (layer, routed) if has_both else (routed,)
    return made, Layout(top=top, layers=layers, derived=derived, num_predictors=num_predictors)


def read_forms(
    forms: Sequence[Form], read: Callable[[Form], tuple[ModelSpec, Layout]]
) -> tuple[ModelSpec, Layout]:
    """Reads a decoder whose layers are of several forms, each with tensors of its own shapes.

    forms: that of each layer. read: reads a form as if all layers were of it. What is not of layers
    is the first one's; layers whose keys and values, or recurrent states, are alike are one group.
    What a form says of its number of query heads stays where forms differ in it.
    """
    listed = list(dict.fromkeys(forms))
    found = {form: read(form) for form in listed}
    specs, layouts = zip(*found.values(), strict=True)
    groups: dict[KVGroup, list[int]] = {}
    states: dict[StateSpec, list[int]] = {}
    ropes = []
    for layer, form in enumerate(forms):
        spec, _ = found[form]
        for group in (one for one in spec.groups if layer in one.layers):
            groups.setdefault(replace(group, layers=()), []).append(layer)
        for state in spec.states:
            states.setdefault(replace(state, layers=()), []).append(layer)
        ropes.append(spec.layer_ropes[layer] if spec.layer_ropes else spec.rope)
    routers = [spec.router for spec in specs if spec.router is not None]
    has_unlike = len({group.num_heads for group in groups}) > 1
    whole = replace(
        specs[0],
        groups=tuple(
            replace(group, layers=tuple(of), num_heads=group.num_heads if has_unlike else None)
            for group, of in groups.items()
        )
        or (NO_KEYS,),
        states=tuple(replace(state, layers=tuple(of)) for state, of in states.items()),
        layer_ropes=tuple(ropes) if len(set(ropes)) > 1 else specs[0].layer_ropes,
        layer_kinds=tuple(map(listed.index, forms)) if len(listed) > 1 else (),
        router=routers[0] if routers else None,
    )
    return whole, replace(layouts[0], layers=tuple(one.layers[0] for one in layouts))


def _unread(config: ConfigReader, names: Names, num_layers: int) -> tuple[tuple[str, ...], int]:
    """Returns patterns of what a checkpoint may have beside the model, rotary tables, and what
    predicts later tokens (arXiv 2412.19437, section 2.2), of which configs need say nothing unless
    it is layers behind the last; and how many of these there are.
    """
    layer = names.layer.replace(".", r"\.")
    patterns = [
        r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)",
        r"(model\.)?mtp(_[a-z]+)*\..*",
    ]
    count = config.size("num_nextn_predict_layers", 0, at_least=0, at_most=MAX_LAYERS)
    if count:
        extra = "|".join(str(num_layers + i) for i in range(count))
        patterns += [layer.format(layer=f"({extra})") + ".*"]
    return tuple(patterns), count


def read_kinds(config: ConfigReader, *, every: int = 0, first_full: bool = False) -> list[str]:
    """Reads `layer_types`; without it every so many layers, the last of them (or the first), have
    full attention, and all others a window. every: 0 for none.
    """
    num_layers, place = config.num_layers, 0 if first_full else every - 1
    otherwise = [FULL if every and i % every == place else SLIDING for i in range(num_layers)]
    return config.kinds("layer_types", num_layers, (FULL, SLIDING), otherwise)


def mistral_kinds(config: ConfigReader) -> list[str]:
    """Reads each layer's kind in Mistral's spelling: all have a window where there is one."""
    return [FULL if config.get("sliding_window") is None else SLIDING] * config.num_layers


def qwen_kinds(config: ConfigReader) -> list[str]:
    """Reads each layer's kind in Qwen's spelling: `layer_types`, or `use_sliding_window` from
    `max_window_layers` on.
    """
    num_layers = config.num_layers
    has_window = config.flag("use_sliding_window", False)
    has_window = has_window and config.get("sliding_window") is not None
    if has_window:
        config.size("sliding_window")
    first = max_window_layers(config)
    if config.get("layer_types") is None:
        return [SLIDING if has_window and i >= first else FULL for i in range(num_layers)]
    kinds = config.kinds("layer_types", num_layers, (FULL, SLIDING))
    if SLIDING in kinds and not has_window:
        raise config.fail("use_sliding_window", "true, because layer_types has sliding_attention")
    return kinds


def max_window_layers(config: ConfigReader) -> int:
    """Reads Qwen's key for the layer where windows begin, or end: 0 is the first one."""
    return config.size("max_window_layers", 28, at_least=0)


def _windows(
    config: ConfigReader, kinds: Sequence[str] | None, num_layers: int, max_len: int
) -> tuple[int | None, ...]:
    """Returns each layer's window, None where it sees everything, a sequence of `max_len` too."""
    if kinds is None or SLIDING not in kinds:
        return (None,) * num_layers
    window = config.size("sliding_window")
    if window >= max_len:
        return (None,) * num_layers
    return tuple(window if kind == SLIDING else None for kind in kinds)


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


def leaf(source: str, shape: tuple[int, ...], axes: tuple[str | None, ...], **more: Any) -> Leaf:
    """Describes an array that the checkpoint has under this name."""
    return Leaf(source, ArrayInfo(shape, np.dtype(np.float32), axes), **more)


def table(source: str, shape: tuple[int, int], *, below: int) -> Leaf:
    """Describes rows of whole numbers from 0 on and less than `below`, one behind the other, of
    which each device has all.
    """
    info = ArrayInfo((shape[0] * shape[1],), np.dtype(np.int32), (None,), below)
    return Leaf(source, info, part=Part(shape=shape))


def _top_leaves(
    spec: ModelSpec, config: ConfigReader, names: Names, biased: Collection[str], max_len: int
) -> dict[str, Leaf]:
    hidden, vocab = spec.hidden_size, spec.vocab_size
    tied = config.flag("tie_word_embeddings", False)
    leaves = {"embed": leaf(f"{names.embed}.weight", (vocab, hidden), ("vocab", "model"))}
    if names.positions is not None:
        leaves["positions"] = leaf(f"{names.positions}.weight", (max_len, hidden), (None, "model"))
    if names.norm is not None:
        leaves["norm"] = leaf(f"{names.norm}.weight", (hidden,), ("model",))
        if "norm" in biased:
            leaves["norm_bias"] = leaf(f"{names.norm}.bias", (hidden,), ("model",))
    leaves["head"] = leaf(
        f"{names.head}.weight",
        (vocab, hidden),
        ("vocab", "model"),
        same_as="embed" if tied else None,
    )
    if "head" in biased:
        leaves["head_bias"] = leaf(f"{names.head}.bias", (vocab,), ("vocab",))
    return leaves


@dataclass(frozen=True, slots=True)
class _LayerLeaves:
    """Lists the arrays of a layer. dims: sizes of a head's query, key and value."""

    spec: ModelSpec
    names: Names
    biased: Collection[str]
    fused_by_head: bool
    transposed: bool
    dims: tuple[int, int, int]

    def of(self, config: ConfigReader) -> dict[str, Leaf]:
        spec, names = self.spec, self.names
        hidden, ffn = spec.hidden_size, config.size("intermediate_size")
        heads, kv_heads = spec.num_heads, spec.groups[0].num_kv_heads
        leaves = self._norms("attn_norm", "post_attn_norm")
        if names.qkv is None:
            for name, count, dim in zip(QKV, (heads, kv_heads, kv_heads), self.dims, strict=True):
                shape = (count * dim, hidden)
                axis = "heads" if name == "q" else "kv_heads"
                leaves |= self._matrix(name, getattr(names, name), shape, (axis, "model"))
        else:
            group = heads // kv_heads
            rows = (group, 1, 1) if self.fused_by_head else (heads, kv_heads, kv_heads)
            blocks = kv_heads if self.fused_by_head else 1
            leaves |= self._fused(
                names.qkv,
                {name: count * dim for name, count, dim in zip(QKV, rows, self.dims, strict=True)},
                hidden,
                ("heads", "kv_heads", "kv_heads"),
                num_blocks=blocks,
            )
        leaves |= self._matrix("o", names.o, (hidden, heads * self.dims[2]), ("model", "heads"))
        for name, count in (("q_norm", heads), ("k_norm", kv_heads)):
            if (source := getattr(names, name)) is not None:
                leaves |= self._qk_norm(name, source, count)
        leaves |= self._norms("mlp_norm", "post_mlp_norm")
        if names.gate_up is not None:
            parts = {"gate": ffn, "up": ffn}
            leaves |= self._fused(names.gate_up, parts, hidden, ("ffn", "ffn"))
        else:
            for name in ("gate", "up"):
                if (source := getattr(names, name)) is not None:
                    leaves |= self._matrix(name, source, (ffn, hidden), ("ffn", "model"))
        return leaves | self._matrix("down", names.down, (hidden, ffn), ("model", "ffn"))

    def _norms(self, *norms: str) -> dict[str, Leaf]:
        """Describes those of these norms over the stream that there are."""
        leaves: dict[str, Leaf] = {}
        for name in norms:
            if (source := getattr(self.names, name)) is not None:
                leaves |= self._vector(name, source, self.spec.hidden_size, "model")
        return leaves

    def _vector(self, name: str, source: str, size: int, axis: str) -> dict[str, Leaf]:
        leaves = {name: self._leaf(f"{source}.weight", (size,), (axis,))}
        if name in self.biased:
            leaves[f"{name}_bias"] = self._leaf(f"{source}.bias", (size,), (axis,))
        return leaves

    def _qk_norm(self, name: str, source: str, count: int) -> dict[str, Leaf]:
        dim, kind = self.spec.head_dim, self.spec.attention.qk_norm
        axis = "heads" if name == "q_norm" else "kv_heads"
        if kind == "head":
            return self._vector(name, source, dim, "head_dim")
        if kind == "whole":
            return self._vector(name, source, count * dim, axis)
        if "{head}" in source:
            return {
                name: self._leaf(f"{source}.weight", (count * dim,), (axis,), num_sources=count)
            }
        part = Part(shape=(count, dim))
        return {name: self._leaf(f"{source}.weight", (count * dim,), (axis,), part=part)}

    def _matrix(
        self, name: str, source: str, shape: tuple[int, int], axes: tuple[str, str]
    ) -> dict[str, Leaf]:
        """Describes a linear layer's weight [out, in] and, if it has one, its bias [out]."""
        part = Part(shape=shape[::-1], transposed=True) if self.transposed else None
        leaves = {name: self._leaf(f"{source}.weight", shape, axes, part=part)}
        if name in self.biased:
            leaves[f"{name}_bias"] = self._leaf(f"{source}.bias", shape[:1], axes[:1])
        return leaves

    def _fused(
        self,
        source: str,
        rows: Mapping[str, int],
        width: int,
        axes: Sequence[str],
        *,
        num_blocks: int = 1,
    ) -> dict[str, Leaf]:
        """Describes linear layers whose weights are the rows of one, in `num_blocks` blocks that
        have so many rows of each.
        """
        total, start = num_blocks * sum(rows.values()), 0
        leaves: dict[str, Leaf] = {}
        shape = (width, total) if self.transposed else (total, width)
        for axis, (name, count) in zip(axes, rows.items(), strict=True):
            place: dict[str, Any] = {
                "num_blocks": num_blocks,
                "start": start,
                "stop": start + count,
            }
            part = Part(shape=shape, transposed=self.transposed, **place)
            size = num_blocks * count
            leaves[name] = self._leaf(f"{source}.weight", (size, width), (axis, "model"), part=part)
            if name in self.biased:
                part = Part(shape=(total,), **place)
                leaves[f"{name}_bias"] = self._leaf(f"{source}.bias", (size,), (axis,), part=part)
            start += count
        return leaves

    def _leaf(
        self, source: str, shape: tuple[int, ...], axes: tuple[str | None, ...], **more: Any
    ) -> Leaf:
        return leaf(self.names.layer + source, shape, axes, **more)
