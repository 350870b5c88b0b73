"""Describes what a model is, apart from what its weights already show."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

from jaxkv.models.recurrent import Compressor, Convolved, Mixer, Ngrams, ShortConvs, StateArray
from jaxkv.ops.experts import Router


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """Rotary embedding; `kind` is one of default, linear, dynamic, llama3, longrope, proportional,
    yarn, the rest are that kind's parameters.

    dim: dimensions of each head that are rotated, the first ones; 0: all. interleaved: dimension 2i
    is paired with 2i + 1, else i with i + dim / 2. reverse: by the opposite angle. factors: of
    longrope, what divides each frequency. part: of proportional, of the pairs that rotate. Lengths
    are in tokens. Sources: RoFormer arXiv 2104.09864 (default), arXiv 2306.15595 (linear, dynamic),
    Llama 3.1 (llama3), LongRoPE arXiv 2402.13753 (longrope), Gemma 4 (proportional), YaRN arXiv
    2309.00071 (yarn).
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    part: float = 1.0
    dim: int = 0
    interleaved: bool = False
    reverse: bool = False
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    @property
    def depends_on_context(self) -> bool:
        """Says whether a sequence that may get longer than `original_max_len` has other
        frequencies.
        """
        return self.kind in ("dynamic", "longrope")


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryTemperature:
    """Says how queries grow with their position: by 1 + beta * ln(1 + floor((position + offset) /
    period)), or if `is_smooth` by 1 + beta * ln(max(1, (position + offset) / period)). layers:
    those where they do; () for all. Sources: Llama 4's attention temperature tuning; Inkling, as
    transformers has it.
    """

    beta: float
    period: float
    offset: int = 0
    is_smooth: bool = False
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexSpec:
    """Says how a token chooses the `num_chosen` keys that it attends to: by the scores of
    `num_heads` index heads of `head_dim` numbers, which are rotated in pairs as
    `RopeSpec.interleaved` says. pool: so many tokens are chosen together (`ops.attention.Index`).
    rotates_last: the last of these numbers are rotated, not the first. norm_eps: of the norm of
    keys. has_shared: layers without index heads choose by those of the last layer before them that
    has some. of_stream: index heads' queries are made of the stream behind a norm of their own, not
    of what other queries are made of. Where values are stored beside keys
    (`KVGroup.has_index_key`), the mean of a pool's keys is normed and rotated, and index heads
    count alike. Sources: DeepSeek-V3.2, arXiv 2512.02556, section 2.1; IndexShare, arXiv
    2603.12201; Qwen4-Exp, as transformers has it.
    """

    num_heads: int
    head_dim: int
    num_chosen: int
    interleaved: bool
    pool: int = 1
    rotates_last: bool = False
    norm_eps: float = 1e-6
    has_shared: bool = False
    of_stream: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockIndexSpec:
    """Says how the query heads of each KV head choose the `num_chosen` blocks of `pool` keys that
    they attend to: by an index head of `head_dim` numbers for each KV head, among them always the
    `num_local` last blocks (`ops.attention.BlockIndex`). A layer without index heads attends to all
    keys. Source: MiniMaxAI/MiniMax-M3.
    """

    head_dim: int
    num_chosen: int
    pool: int
    num_local: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """Says what attention does beside what its tensors show.

    scale: of the scores, head_dim**-0.5 if None, where a KV group has none of its own
    (`ModelSpec.scale_of`). cap: scores are cap * tanh(score / cap), where it is not 0. qk_norm:
    what a norm of queries and keys is over, each "head" alike, "heads" with weights of their own,
    or the "whole" of them; before the rotation, or `norm_after_rope` where there is one. clip:
    bounds queries, keys and values from both sides, where it is not 0, behind a norm of the whole.
    kv_sources: for each layer the one whose keys and values it attends to; () if each has its own.
    latent_sources: layers whose latents those behind them that make none
    repeat in their rows (of those that rotate the last one's, if they do too). latent_eps: of the
    norms inside of latent attention. scales_latents: behind their norms latents, and what queries
    are made of, are multiplied by (hidden size / their own size)**0.5. gate: the activation of
    gates of what attention gives, which are one for each head or each number. gate_factor: of what
    goes into it.
    slopes: of each query head, by which scores fall with distance (`models.alibi`); () for none.
    by_depth: scores are divided by the number of their layer, 1 for the first. Source: Mistral by
    Stanford CRFM.
    has_distances: scores get what a query gives the distance to a key (`ops.attention.Distances`).
    index: how keys are chosen; None: all are attended to.
    near: so many last tokens are attended to one by one, and older ones by entries of several
    (`models.compressed`), which `index` chooses where layers have index heads; 0: all one by one.
    output_groups: what attention gives goes in so many groups of heads through matrices of their
    own (`o_groups`), and then through one for all. Source: DeepSeek-V4's reference code.
    """

    scale: float | None = None
    cap: float = 0.0
    qk_norm: str = "head"
    norm_after_rope: bool = False
    clip: float = 0.0
    temperature: QueryTemperature | None = None
    has_sinks: bool = False
    kv_sources: tuple[int, ...] = ()
    latent_sources: tuple[int, ...] = ()
    latent_eps: float = 1e-6
    scales_latents: bool = False
    gate: str = "sigmoid"
    gate_factor: float = 1.0
    slopes: tuple[float, ...] = ()
    by_depth: bool = False
    has_distances: bool = False
    index: IndexSpec | BlockIndexSpec | None = None
    near: int = 0
    output_groups: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class NormedStream:
    """Says that the stream goes on from behind the norm before each block: a block's norm makes h
    of it, and a * h + b * block(h) is what follows. mixer: (a, b) of the mixers, for each kind of
    layers. mlp: of feed-forwards. Source: MiniMax-01, arXiv 2501.08313.
    """

    mixer: tuple[tuple[float, float], ...]
    mlp: tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """Says what comes into `layer`, with which some layers begin anew: the stream, behind the last
    norm if `is_normed`, is kept under the number `keeps`, if any, and what is kept under `joins`
    is added to it (`models.passes`). That norm has no weights.
    """

    layer: int
    joins: int
    keeps: int | None = None
    is_normed: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthSpec:
    """Says that what comes into blocks is chosen among what layers before them gave, so many
    (`size`) of which are one (`models.depth`). The layers from `start` to before `stop`, none by
    default, run `num_times`, one time behind the other, and get messages of their last time.
    """

    size: int
    start: int = 0
    stop: int = 0
    num_times: int = 1

    @property
    def again(self) -> range:
        """Lists the layers that run again."""
        return range(self.start, self.stop)

    def order(self, num_layers: int) -> tuple[int, ...]:
        """Lists the number that each layer has among those of one time, of so many of all times."""
        more = (*self.again,) * (self.num_times - 1)
        return (*range(self.stop), *more, *range(self.stop, num_layers - len(more)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Sinusoid:
    """Says that sines, and then cosines, of a token's position join its embedding, with frequencies
    theta**(-2i / hidden size). offset: of positions. Source: arXiv 1706.03762, section 3.5.
    """

    theta: float = 10000.0
    offset: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class HyperSpec:
    """Says how many streams tokens have (`models.hyper`), and in how many rounds a matrix between
    them is made to add up to 1; 0: they go on as they are. eps: what sums and shares are more than,
    those of what a block gives if `has_eps_on_way_out`. most: what joins a stream of a block at
    most. Gated streams, which their tensors show, have no more than a number.
    """

    num_streams: int
    eps: float = 0.0
    num_rounds: int = 0
    most: float = 2.0
    has_eps_on_way_out: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class GateLimits:
    """Bounds what MLPs multiply: gates above, or what an activation makes of them if `of_act`, and
    what they meet on both sides. For each layer, 0 for none, or () where none has any; of the MLP
    of `dense` layers, of `routed` experts, and of the one that all tokens `shared`. soft: of gates
    and of what they meet in experts, as in `ops.layers.softcapped_swiglu`.
    """

    dense: tuple[float, ...] = ()
    routed: tuple[float, ...] = ()
    shared: tuple[float, ...] = ()
    of_act: bool = False
    soft: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnNorm:
    """Says in what a norm is unlike the model's others.

    eps: in the place of `ModelSpec.norm_eps`, None for that. is_plain: its weights are stored as
    they are, though those of others are less one. weighs_first: weights multiply what comes in,
    not what the norm gives. longest: it does so, and only shortens vectors that are longer.
    """

    eps: float | None = None
    is_plain: bool = False
    weighs_first: bool = False
    longest: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Scales:
    """Holds factors on embeddings, on values, on an MLP's gate and on its output, on what joins the
    stream, and on logits, which `logit_cap` then bounds as `AttentionSpec.cap` bounds scores.

    embed_is_rounded: the factor is, to the dtype of the embeddings, as it was in training. stream:
    where it goes on from behind norms. positions: what joins embeddings. gate_cutoffs: for each
    kind of layers how many standard deviations above their mean a token's gates count from, None
    for all; () if all layers have None. Source: Spark Transformer, arXiv 2506.06644, section 3.
    limits: of gates. hyper: of several streams. norms: by name, those that are unlike the others.
    join_temperature: divides what gates of what joins the stream are made of. passes: what comes
    into layers that run more than once. depth: what comes into blocks.
    """

    embed: float = 1.0
    embed_is_rounded: bool = False
    values: float = 1.0
    gate: float = 1.0
    mlp: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    logit_cap: float = 0.0
    stream: NormedStream | None = None
    gate_cutoffs: tuple[float | None, ...] = ()
    positions: Sinusoid | None = None
    limits: GateLimits = GateLimits()
    hyper: HyperSpec | None = None
    norms: tuple[tuple[str, OwnNorm], ...] = ()
    join_temperature: float = 1.0
    passes: tuple[Pass, ...] = ()
    depth: DepthSpec | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class KVGroup:
    """Layers that share a cache shape and a window, and so a page table.

    `window` counts the tokens that a query sees at most, itself included; None sees everything
    before it. is_chunked: sequences are cut into chunks of `window` tokens, and a query sees its
    own. Source: Llama 4's reference code.
    latent_dim: one row of `head_dim` numbers per token is the key of every query head, whose first
    so many are the value (latent attention); None: values are as large as keys, and beside them.
    Where keys are chosen (`AttentionSpec.index`) the last numbers of a row are its key for that.
    has_index_key: each token has one more key, by which blocks or pools are chosen. num_heads: of
    queries, where groups differ in it, and scale: of scores; None: as the model says.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    is_chunked: bool = False
    latent_dim: int | None = None
    has_index_key: bool = False
    num_heads: int | None = None
    scale: float | None = None

    @property
    def token_numbers(self) -> int:
        """Counts the numbers that one layer keeps of a token."""
        vectors = self.num_kv_heads * (2 if self.latent_dim is None else 1) + self.has_index_key
        return vectors * self.head_dim

    def num_parts(self, num_devices: int) -> int:
        """Returns into how many parts so many devices divide the KV heads; where that is fewer,
        neighbouring devices have the same ones.
        """
        return 1 if self.latent_dim is not None else math.gcd(self.num_kv_heads, num_devices)


NO_KEYS = KVGroup(layers=(), num_kv_heads=1, head_dim=0, latent_dim=0)
"""The KV group of a model without attention. Its pages hold nothing: they are what tokens are
counted in, so that prefixes, snapshots of states and admission are those of any model.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSpec:
    """Layers whose mixer keeps a recurrent state, of one size however long a row is; or what is to
    be an entry of their keys (`models.compressed`), what comes before a token's queries and keys
    (`models.convolved`), or before what is convolved, or tokens and what they say
    (`models.ngrams`).
    """

    layers: tuple[int, ...]
    mixer: Mixer | Compressor | Convolved | Ngrams | ShortConvs

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """Describes the state of a row in one layer."""
        return self.mixer.arrays


@dataclass(frozen=True, kw_only=True, slots=True)
class HiddenStates:
    """Says what a layer that predicts (`models.predictor`) takes of its model: the streams that
    come into these layers of it, the number of layers for what comes out of the last one; () for
    that behind the final norm. chains_normed: of a token that it has drawn itself it takes its own
    stream behind its norm, else before.
    """

    layers: tuple[int, ...] = ()
    chains_normed: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A decoder-only transformer. Biases, most norms, a gate and an untied head are not here: their
    tensors are the flag.

    norm: "rms", "length" (divided by the length, not by its part of the size) or "layer" (with the
    mean taken off), with "_one" where the weights are stored less one. unit_norms: norms without
    weights. rope: of all layers, unless `layer_ropes` has one for each, None where a layer rotates
    nothing. is_parallel: attention and feed-forward both take what came into the layer.

    layer_kinds: for each layer the number of its kind, whose tensors have shapes of their own; ()
    if all are alike. router: of layers with experts. states: layers with recurrent states, beside
    keys and values or without any. A layer without keys and values of its own is in no KV group; a
    model without any has `NO_KEYS`.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    rope: RopeSpec
    groups: tuple[KVGroup, ...]
    max_len: int
    """Longest context the checkpoint declares, in tokens."""
    attention: AttentionSpec = AttentionSpec()
    norm: str = "rms"
    unit_norms: tuple[str, ...] = ()
    layer_ropes: tuple[RopeSpec | None, ...] = ()
    is_parallel: bool = False
    scales: Scales = Scales()
    layer_kinds: tuple[int, ...] = ()
    router: Router | None = None
    states: tuple[StateSpec, ...] = ()

    @property
    def depends_on_context(self) -> bool:
        """Says whether a sequence is rotated by how long it may get."""
        return any(rope.depends_on_context for rope in (self.rope, *self.layer_ropes) if rope)

    def context_of(self, max_len: int) -> int:
        """Returns what a sequence's keys depend on of how long it may get: 0 if they do not."""
        ropes = {rope for rope in (self.rope, *self.layer_ropes) if rope}
        beyond = {rope.kind for rope in ropes if max_len > rope.original_max_len > 0}
        return max_len if "dynamic" in beyond else int("longrope" in beyond)

    def scale_of(self, group: KVGroup) -> float:
        """Returns what scores are multiplied by in the layers of a KV group."""
        scale = self.attention.scale if group.scale is None else group.scale
        return self.head_dim**-0.5 if scale is None else scale

    @property
    def query_heads(self) -> str:
        """Says how many query heads a layer has: "64", or "64 or 96"."""
        counts = {group.num_heads or self.num_heads for group in self.groups}
        return " or ".join(map(str, sorted(counts)))

    @property
    def has_shortcut(self) -> bool:
        """Says whether what a layer's experts give joins the stream behind the next layer."""
        return self.router is not None and self.router.is_shortcut

    @property
    def entry_len(self) -> int:
        """Counts the tokens that one entry is made of, in all layers; 1 where there are none."""
        mixers = [state.mixer for state in self.states]
        return math.lcm(*(one.rate for one in mixers if isinstance(one, Compressor)))

    @property
    def num_kinds(self) -> int:
        return 1 + max(self.layer_kinds, default=0)

    def layers_of(self, kind: int) -> tuple[int, ...]:
        """Lists the layers of a kind."""
        kinds = self.layer_kinds or (0,) * self.num_layers
        return tuple(layer for layer, other in enumerate(kinds) if other == kind)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Lists the layers that have keys and values of their own."""
        return tuple(sorted(layer for group in self.groups for layer in group.layers))

    def has_attention(self, layer: int) -> bool:
        """Says whether a layer attends to keys and values, its own or another layer's."""
        return self.source_of(layer) in self.kv_layers

    def states_of(self, layer: int) -> tuple[int, ...]:
        """Lists the entries of `states` that a layer has."""
        return tuple(number for number, state in enumerate(self.states) if layer in state.layers)

    def source_of(self, layer: int) -> int:
        """Returns the layer whose keys and values this one attends to."""
        sources = self.attention.kv_sources
        return sources[layer] if sources else layer

    def group_of(self, layer: int) -> tuple[int, int]:
        """Returns (group, index within that group) of a layer's keys and values."""
        layer = self.source_of(layer)
        for g, group in enumerate(self.groups):
            if layer in group.layers:
                return g, group.layers.index(layer)
        raise ValueError(f"expected a layer below {self.num_layers}, got {layer}")

    def cut(self, size: int) -> ModelSpec:
        """Returns this model with its KV groups cut into as few as have at most `size` layers."""
        groups = []
        for group in self.groups:
            count, num_layers = -(-len(group.layers) // size), len(group.layers)
            ends = [num_layers * i // count for i in range(count + 1)]
            groups += [replace(group, layers=group.layers[a:b]) for a, b in pairwise(ends)]
        return replace(self, groups=tuple(groups))

    @property
    def token_numbers(self) -> str:
        """Says how many numbers a layer keeps of a token: "2048", or "256 or 512"."""
        return " or ".join(map(str, sorted({group.token_numbers for group in self.groups})))

    @property
    def longest_window(self) -> int | None:
        """Returns the tokens that a query sees at most in any layer; None if some layer sees
        everything.
        """
        windows = [group.window for group in self.groups if group.window is not None]
        return max(windows, default=None) if len(windows) == len(self.groups) else None

    def apart(self, layers: frozenset[int]) -> ModelSpec:
        """Returns this model with these layers in KV groups of their own."""
        groups = []
        for group in self.groups:
            if not group.layers:
                groups.append(group)
            for named in (False, True):
                if some := tuple(layer for layer in group.layers if (layer in layers) == named):
                    groups.append(replace(group, layers=some))
        return replace(self, groups=tuple(groups))

    def joined(self) -> ModelSpec:
        """Returns the model that `apart` and `cut` were asked for."""
        layers: dict[KVGroup, list[int]] = {}
        for group in self.groups:
            layers.setdefault(replace(group, layers=()), []).extend(group.layers)
        return replace(
            self, groups=tuple(replace(g, layers=tuple(sorted(of))) for g, of in layers.items())
        )
