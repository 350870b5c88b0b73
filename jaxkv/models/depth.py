"""Lets blocks of a layer choose among what the layers before it gave: attention over depth.

What so many layers give (`DepthSpec.size`) adds up to one entry, behind which the stream begins
anew. A block takes a mean of all entries and of the stream, each normed without weights, which its
query weighs: a vector of the layer, the same for all tokens. Layers that have three make queries,
keys and values of what each of them takes. Source: Inkling 2, as transformers has it.

Layers that run again begin with the stream that came into the first of them, and get messages: what
queries of theirs take of the entries of the last time, which gates let into what a block takes.
Source: Inkling 2 Mini, as transformers has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.axes import Array
from jaxkv.models.recurrent import SOURCE
from jaxkv.models.spec import DepthSpec, ModelSpec
from jaxkv.models.stream import normed
from jaxkv.ops.layers import linear, rms_norm, rounded, softmax, total, total_over
from jaxkv.ops.matrices import values
from jaxkv.weights.tree import Weights

QUERY = "depth_query"
"""A leaf outside the layers: what hidden states are is chosen so too."""

ATTN_QUERY, MLP_QUERY = "attn_depth", "mlp_depth"
"""Leaves of layers. The first layer has no entries to choose among, and no query before its mixer.
"""

MESSAGES, KV_MESSAGES = "message_queries", "message_kv_queries"
"""Leaves outside the layers, with two vectors for each layer that runs again: the queries of its
messages to what queries are made of and to the MLP, and to keys and to values.
"""

GATE = "_message_"
"""Leaves of such a layer have this in their names, behind what the message is to."""

EPS = 1e-6

Entries = tuple[Array, Array]
"""Entries [S, T, D], and which of them are there, [S]."""


class Given(NamedTuple):
    """Holds what layers have given. begun_TD: the stream that came into the first layer of those
    that run again. last_STD: the entries of their last time, with the stream behind it as the last
    one. None where none do.
    """

    entry_STD: Array
    begun_TD: Array | None = None
    last_STD: Array | None = None


def empty(x_TD: Array, spec: ModelSpec) -> Given | None:
    """Returns what is given before the first layer; None in a model where nothing is."""
    if (asked := spec.scales.depth) is None:
        return None
    num_own = len(set(asked.order(spec.num_layers)))
    entry_STD = jnp.zeros((_num_before(num_own, asked), *x_TD.shape), jnp.float32)
    if not asked.again:
        return Given(entry_STD)
    count = len(asked.again) // asked.size
    return Given(entry_STD, x_TD, jnp.zeros((count, *x_TD.shape), jnp.float32))


def joined(x_TD: Array, given: Given | None, weights: Weights) -> Array:
    """Returns hidden states behind the last layer, the same x in a model without entries."""
    if given is None:
        return x_TD
    entries = _first(given.entry_STD, len(given.entry_STD))
    return _mean(values(weights[QUERY]), (entries, _stream(x_TD)))


class Depth:
    """Knows what the layers of a model choose among. Layers are by their number (int32), in which
    each time through counts.
    """

    def __init__(self, asked: DepthSpec, spec: ModelSpec, weights: Weights) -> None:
        self._asked, self._spec, self._weights = asked, spec, weights
        self._own_L = np.array(asked.order(spec.num_layers), np.int32)

    def begin(self, x_TD: Array, given: Given, number: Array) -> tuple[Array, Given]:
        """Returns the stream that comes into a layer, and what is given."""
        if given.begun_TD is None or given.last_STD is None:
            return x_TD, given
        again, size = self._asked.again, self._asked.size
        begun_TD = jnp.where(number == again.start, x_TD, given.begun_TD)
        is_new = (self._own(number) == again.start) & (number > again.start)
        # The first entry of these layers is what they begin with.
        own_STD = given.entry_STD[again.start // size + 1 : again.stop // size]

        def anew(x_TD: Array) -> tuple[Array, Array]:
            return begun_TD, jnp.concatenate([own_STD, _normed(x_TD)[None]])

        last_STD = given.last_STD
        x_TD, last_STD = jax.lax.cond(is_new, anew, lambda x_TD: (x_TD, last_STD), x_TD)
        return x_TD, given._replace(begun_TD=begun_TD, last_STD=last_STD)

    def enter_mixer(
        self, x_TD: Array, w: Weights, given: Given, number: Array
    ) -> tuple[Array, Weights]:
        """Returns what queries are made of in a layer, or all, and the layer's weights with what
        keys and values are made of where that is something else.
        """
        taken = [x_TD]
        if ATTN_QUERY in w:
            entries = _first(given.entry_STD, _num_before(self._own(number), self._asked))
            query_QD = w[ATTN_QUERY].astype(jnp.float32).reshape(-1, x_TD.shape[1])
            taken = [_mean(query_D, (entries, _stream(x_TD))) for query_D in query_QD]
        h_TD = self._with_message(taken[0], w, "q", given, number)
        own = {}
        for place, name in enumerate(("k", "v"), start=1):
            norm = f"{name}{SOURCE}_norm"
            if norm not in w and f"{name}{GATE}down" not in w:
                continue
            y_TD = self._with_message(taken[place % len(taken)], w, name, given, number)
            norm = norm if norm in w else "attn_norm"
            own[f"{name}{SOURCE}"] = normed(y_TD, w, norm, self._spec)
        return normed(h_TD, w, "attn_norm", self._spec), {**w, **own}

    def join(
        self, x_TD: Array, mixed_TD: Array, given: Given, number: Array
    ) -> tuple[Array, Given]:
        """Adds to the stream what a layer's mixer gives. The stream that came into the first layer
        of an entry ends the one before, and begins anew.
        """
        own, size, entry_STD = self._own(number), self._asked.size, given.entry_STD
        begins = own % size == 0
        place = jnp.where(begins, own // size, len(entry_STD))
        entry_STD = entry_STD.at[place].set(_normed(x_TD), mode="drop")
        x_TD = jnp.where(begins, mixed_TD, x_TD + mixed_TD)
        return x_TD, given._replace(entry_STD=entry_STD)

    def enter_mlp(self, x_TD: Array, w: Weights, given: Given, number: Array) -> Array:
        """Returns what the MLP of a layer takes."""
        entries = _first(given.entry_STD, self._own(number) // self._asked.size + 1)
        h_TD = _mean(w[MLP_QUERY].astype(jnp.float32), (entries, _stream(x_TD)))
        h_TD = self._with_message(h_TD, w, "mlp", given, number)
        return normed(h_TD, w, "mlp_norm", self._spec)

    def _own(self, number: Array) -> Array:
        return jnp.asarray(self._own_L)[number] if self._asked.again else number

    def _with_message(
        self, h_TD: Array, w: Weights, name: str, given: Given, number: Array
    ) -> Array:
        """Returns what is taken with its message, in a layer that runs again."""
        if f"{name}{GATE}down" not in w or given.last_STD is None:
            return h_TD
        again = self._asked.again
        leaf, which = (KV_MESSAGES, "kv".index(name)) if name in "kv" else (MESSAGES, name == "mlp")
        query_XD = values(self._weights[leaf]).astype(jnp.float32).reshape(-1, h_TD.shape[1])
        query_D = query_XD[2 * (self._own(number) - again.start) + which]
        message_TD = _mean(query_D, (_first(given.last_STD, len(given.last_STD)),))
        both_TX = jnp.concatenate(
            [_normed(x_TD, self._spec.norm_eps) for x_TD in (h_TD, message_TD)], axis=1
        )
        low_TR = linear(both_TX, w[f"{name}{GATE}down"])
        forget_TD, gain_TD = (
            jnp.tanh(linear(low_TR, w[f"{name}{GATE}{end}"])) for end in ("forget", "gain")
        )
        is_again = number >= again.stop
        return jnp.where(is_again, (1 - forget_TD) * h_TD + gain_TD * message_TD, h_TD)


def _num_before(layer: Array | int, asked: DepthSpec) -> Array | int:
    """Counts the entries before a layer."""
    return -(-layer // asked.size)


def _first(entry_STD: Array, count: Array | int) -> Entries:
    return entry_STD, jnp.arange(len(entry_STD)) < count


def _stream(x_TD: Array) -> Entries:
    return _normed(x_TD)[None], jnp.ones(1, bool)


def _normed(x_TD: Array, eps: float = EPS) -> Array:
    return rms_norm(x_TD, jnp.ones(x_TD.shape[1], jnp.float32), eps=eps)


def _mean(query_D: Array, parts: Sequence[Entries]) -> Array:
    """Returns what a query takes of entries, [T, D]."""
    scores, found, start = [], [], 0
    for entry_STD, is_there_S in parts:
        score_ST = rounded(total(entry_STD * query_D[None, None]) * len(query_D) ** -0.5)
        scores.append(jnp.where(is_there_S[:, None], score_ST, -jnp.inf))
    weight_TS = softmax(jnp.concatenate(scores).T)
    for entry_STD, _ in parts:
        weight_ST = weight_TS[:, start : start + len(entry_STD)].T
        found.append(total_over(rounded(weight_ST[..., None] * entry_STD), 0))
        start += len(entry_STD)
    return sum(found[1:], found[0])
