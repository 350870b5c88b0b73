"""The laboratory's models, and attention over keys and values that have been stored, with and
without pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.build.model import DEMO, calibration_tokens
from jaxkv.build.tokenizer import load_tokenizer
from jaxkv.kv.codecs import Codec, PlainCodec, decode, get_codec
from jaxkv.kv.state import PagedKV, PageTables, Store, empty_store
from jaxkv.models.decoder import forward, logits
from jaxkv.models.families import read_config, read_family
from jaxkv.models.paged import heads_of
from jaxkv.models.spec import ModelSpec
from jaxkv.ops.attention import BACKENDS, Attended, Batch, Heads, Place, Terms
from jaxkv.programs.fit_keys import fit_keys
from jaxkv.weights.load import Kept, load_weights

LENGTH, PAGE = 1152, 16
"""Tokens of the longest sequence, and of a page."""

OUTLIER_PAIRS, OUTLIER = 3, 8.0
OFFSET = 4.0
"""Of the constant vector: keys of this model are about 1 large."""


@dataclass(frozen=True)
class Exact:
    """Which keys and values have not been through the codec: of the first tokens of a sequence, of
    the tokens that a query has just passed, of the layers at both ends.
    """

    first: int = 0
    recent: int = 0
    layers: int = 0


EXCEPTIONS = {
    "": Exact(),
    "first page exact": Exact(first=PAGE),
    "last 64 tokens exact": Exact(recent=64),
    "first and last layer exact": Exact(layers=1),
}


QJL = "one bit of keys as QJL"


@dataclass(frozen=True)
class Qjl:
    """A reference, for the laboratory alone: what `codec` leaves of a key is stored as its length
    and, a bit for each coordinate, the signs of a random projection. Products with queries are then
    right on average.

    Source: TurboQuant, arXiv 2504.19874, algorithm 2, and QJL, arXiv 2406.03482.
    """

    codec: Codec

    def stored(self, x: jax.Array) -> jax.Array:
        """The vectors that are left of vectors [..., H]."""
        kept = decode(self.codec, self.codec.encode(x))
        rest, size = x - kept, x.shape[-1]
        projection = np.random.default_rng(0).normal(size=(size, size)).astype(np.float32)
        signs = jnp.sign(jnp.matmul(rest, projection.T, precision="highest"))
        length = jnp.linalg.norm(rest, axis=-1, keepdims=True)
        return kept + (np.pi / 2) ** 0.5 / size * length * jnp.matmul(
            signs, projection, precision="highest"
        )


@dataclass(frozen=True)
class Pages:
    """How keys and values are stored: `fitted` as by `programs.fit_keys`, read by `exact` or, None,
    by the engine.
    """

    codec: Codec
    fitted: bool
    exact: Exact | None = None
    qjl: Qjl | None = None
    """Of keys, in place of `codec`."""


class Unpaged:
    """Attention of one sequence without pages, in all of its layers alike: `attend` is to come.
    The "page" of a layer is what it measures.
    """

    def prepare(self, store: Store, tables: PageTables, batch: Batch, heads: Heads) -> None:
        return None


@dataclass(frozen=True)
class Stored(Unpaged):
    """Attention of one sequence whose keys and values have been stored, but for `exact`.

    The "page" of a layer is the relative squared error of its output. `passes`: what the next layer
    gets is the output of exact keys and values, so that all errors are of one layer alone.
    """

    codec: Codec
    exact: Exact
    num_layers: int
    passes: bool
    qjl: Qjl | None = None

    def attend(
        self,
        q_TNH: Any,
        k_TKH: Any,
        v_TKH: Any,
        at: Place,
        batch: Batch,
        prepared: Any,
        terms: Terms,
    ) -> Attended:
        num_tokens, kv_heads = k_TKH.shape[:2]
        position = jnp.arange(num_tokens)
        distance = position[:, None] - position[None, :]
        is_exact = (position[None, :] < self.exact.first) | (distance < self.exact.recent)
        last = self.num_layers - self.exact.layers
        is_exact |= (at.layer < self.exact.layers) | (at.layer >= last)
        q_TKGH = q_TNH.reshape(num_tokens, kv_heads, -1, q_TNH.shape[2])

        def attention(stored: bool) -> jax.Array:
            pairs = [(x, x) for x in (k_TKH, v_TKH)]
            if stored:
                pairs = [(decode(self.codec, self.codec.encode(x)), x) for x, _ in pairs]
            if stored and self.qjl is not None:
                pairs[0] = (self.qjl.stored(k_TKH), k_TKH)
            of_keys = [
                jnp.einsum("tkgh,skh->kgts", q_TKGH, x, precision="highest") for x in pairs[0]
            ]
            s = jnp.where(is_exact, of_keys[1], of_keys[0]) * terms.scale
            p = jax.nn.softmax(jnp.where(distance >= 0, s, -jnp.inf), axis=-1)
            parts = (jnp.where(is_exact, 0, p), jnp.where(is_exact, p, 0))
            outs = [
                jnp.einsum("kgts,skh->tkgh", *x, precision="highest")
                for x in zip(parts, pairs[1], strict=True)
            ]
            return (outs[0] + outs[1]).reshape(q_TNH.shape)

        true, found = attention(False), attention(True)
        error = jnp.sum((found - true) ** 2) / jnp.sum(true**2)
        store = at.store.with_arrays(at.store.pages.at[at.layer].set(error))
        return Attended(true if self.passes else found, store, None)


class Model:
    """The function of a model like the demo one, with `variant` "outliers" in another form."""

    def __init__(self, variant: str, seed: int, directory: Path = DEMO) -> None:
        self.spec, layout = read_family(read_config(directory))
        self.weights = load_weights(directory, self.spec, layout, Kept(dtype="float32"))
        layers = self.weights["layers"]
        (group,) = self.spec.groups
        shape = (self.spec.num_layers, group.num_kv_heads, self.spec.head_dim)
        less = np.zeros(shape, np.float32)
        if variant == "outliers":
            rng = np.random.default_rng(seed)
            layers = self._with_outliers(layers, rng)
            # Few channels of the constant vector are large, as in models that have such keys.
            less = (-OFFSET * rng.normal(size=shape) * (rng.random(shape) < 0.15)).astype(
                np.float32
            )
        self.weights["layers"] = layers | {"k_affine": affine(less, np.ones_like(less))}
        token_T = calibration_tokens(self.spec, load_tokenizer(directory))
        found = fit_keys(self.weights, token_T, spec=self.spec, placement=None)
        mean, factor = np.moveaxis(found.reshape(*shape[:2], 2, -1), 2, 0)
        self.fitted = self.weights | {"layers": layers | {"k_affine": affine(less + mean, factor)}}

    def _with_outliers(
        self, layers: dict[str, jax.Array], rng: np.random.Generator
    ) -> dict[str, jax.Array]:
        (group,) = self.spec.groups
        count, heads, head_dim = self.spec.num_layers, group.num_kv_heads, self.spec.head_dim
        factor = np.ones((count, heads, head_dim), np.float32)
        for layer in range(count):
            for head in range(heads):
                pairs = rng.choice(head_dim // 2, OUTLIER_PAIRS, replace=False)
                factor[layer, head, pairs] = factor[layer, head, pairs + head_dim // 2] = OUTLIER
        of_queries = factor.repeat(self.spec.num_heads // heads, axis=1)
        k, q = (x.reshape(count, -1, 1) for x in (factor, of_queries))
        return layers | {"k": layers["k"] * k, "q": layers["q"] / q}

    def run(self, pages: Pages, token_T: np.ndarray) -> np.ndarray:
        """Logits [T, V] of a sequence of at most LENGTH tokens, after each of them."""
        padded = np.zeros(LENGTH, np.int32)
        padded[: len(token_T)] = token_T
        weights = self.fitted if pages.fitted else self.weights
        make = program(self.spec, pages.codec) if pages.exact is None else stored(self.spec, pages)
        return np.asarray(make(weights, padded, np.int32(len(token_T))))[: len(token_T)]

    def attention_error(self, pages: Pages, token_T: np.ndarray) -> float:
        """Of WINDOW tokens, mean over the layers."""
        weights = self.fitted if pages.fitted else self.weights
        return float(attention_error(self.spec, pages.codec)(weights, token_T))


def affine(mean: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """Two [L, K, H] as the leaf `k_affine`."""
    return np.stack([mean, factor], axis=2).reshape(len(mean), -1)


def dense(
    weights: Any, token_T: jax.Array, spec: ModelSpec, attention: Any
) -> tuple[jax.Array, jax.Array]:
    """(hidden states, attention's relative squared error by layer) of one sequence without
    pages.
    """
    none: Any = np.zeros((1, 1), np.int32)
    store = Store(
        jnp.zeros(spec.num_layers),
        layout=BACKENDS["xla"].page_layout(heads_of(spec)[0], 1, PlainCodec(dtype="float32")),
        num_layers=spec.num_layers,
    )
    position_T = jnp.arange(len(token_T), dtype=jnp.int32)
    counts: Any = (none[0], none[0] + len(token_T), jnp.int32(0), jnp.int32(1))
    batch = Batch(token_T, position_T, position_T * 0, *counts)
    kv = PagedKV((store,), (PageTables(none, none, none[0]),))
    kv, x_TD, *_ = forward(weights, kv, batch, spec=spec, backend=attention)
    return x_TD, kv.stores[0].pages


@cache
def attention_error(spec: ModelSpec, codec: Codec) -> Any:
    attention = Stored(codec, Exact(), spec.num_layers, passes=True)
    return jax.jit(
        lambda weights, token_T: jnp.mean(jnp.sqrt(dense(weights, token_T, spec, attention)[1]))
    )


@cache
def stored(spec: ModelSpec, pages: Pages) -> Any:
    """`program` by dense attention. What comes after the sequence is not seen by it."""
    attention = Stored(
        pages.codec, pages.exact or Exact(), spec.num_layers, passes=False, qjl=pages.qjl
    )
    return jax.jit(
        lambda weights, token_T, _: logits(
            weights, dense(weights, token_T, spec, attention)[0], spec=spec
        )
    )


@cache
def program(spec: ModelSpec, codec: Codec) -> Any:
    """(weights, tokens [LENGTH], how many of them are real) -> logits after each of them."""

    @jax.jit
    def run(weights: Any, token_T: jax.Array, length: jax.Array) -> jax.Array:
        (heads,) = heads_of(spec)
        store = empty_store(
            num_layers=spec.num_layers,
            layout=BACKENDS["xla"].page_layout(heads, PAGE, codec),
            num_pages=LENGTH // PAGE,
        )
        table_BW = jnp.arange(LENGTH // PAGE, dtype=jnp.int32)[None]
        tables = PageTables(table_BW, table_BW * PAGE, jnp.zeros(1, jnp.int32))
        kv = PagedKV((store,), (tables,))
        position_T = jnp.arange(LENGTH, dtype=jnp.int32)
        row_T = jnp.where(position_T < length, 0, 1)
        counts: Any = (jnp.zeros(1, jnp.int32), length[None], jnp.int32(0), jnp.int32(1))
        batch = Batch(token_T, position_T, row_T, *counts)
        _, x_TD, *_ = forward(weights, kv, batch, spec=spec, backend="xla")
        return logits(weights, x_TD, spec=spec)

    return run


def pages_of(name: str) -> Pages:
    """What the name of a row stands for."""
    codec_name, _, exception = name.partition(", ")
    codec_name, _, fit = codec_name.partition(" ")
    codec = get_codec(codec_name, platform="cpu", dtype="float32")
    fitted = fit == "fitted" or (not fit and codec.fits_keys)
    if exception == QJL:
        one_bit_less = get_codec("turboquant3", platform="cpu", dtype="float32")
        return Pages(codec, fitted, Exact(), Qjl(one_bit_less))
    return Pages(codec, fitted, EXCEPTIONS[exception] if exception else None)
