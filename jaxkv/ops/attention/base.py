"""Paged attention backends: the contract, and the ragged batch that they read.

A backend is one file here. What it promises of `Backend.attend`:
- every token's key and value are in its slot of the pages afterwards, and of what anybody holds
  nothing else has changed;
- query t of row r sees exactly the held slots of r whose position is at most t's own, and, with a
  window, above position - window, those of the step itself included; with a chunk, only those whose
  position divided by it is the same whole number as t's own;
- memory that a row does not hold never influences its result, whatever it contains (NaN included);
- rows with one token in this step (decoding, or the last of a prompt) come first in packed order,
  longer chunks after them; outputs of padding tokens are unspecified;
- what rows observe (`PageTables.since_B`) is added to the statistics that it is given;
- sums are float32; queries and softmax weights may be rounded to the dtype that the pages decode
  to, once;
- what it cannot do it refuses with NotImplementedError when traced, naming the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.axes import MeshAxes
from jaxkv.kv.codecs import Codec
from jaxkv.kv.layout import PageLayout
from jaxkv.kv.state import PageTables, Statistics, Store, empty_store
from jaxkv.ops.attention.distances import Distances
from jaxkv.ops.attention.divided import on_one
from jaxkv.ops.attention.index import AnyIndex
from jaxkv.ops.matrices import HeadMatrices
from jaxkv.pytree import pytree, static

CHOSEN_ON_XLA = "attention that chooses keys by an index runs on xla"
DISTANCES_ON_XLA = "scores by distance run on xla"


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """Says what attention is asked to do in the layers of one KV group, on one device. `cap` and
    `has_sinks`: as in `models.spec.AttentionSpec`. has_readers: some layers attend to what others
    have stored. latent_dim: values are the first so many numbers of keys; None: they are apart.
    chunk: in tokens; None: sequences are not cut. has_index: keys are chosen (`index`), by one more
    key of each token if `has_index_key`. has_entries: entries of several tokens lie behind their
    rows (`index.Entries`). has_unlike: layers of the model differ in `num_heads`. has_distances:
    scores get what queries give distances (`distances`).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    cap: float = 0.0
    has_sinks: bool = False
    has_readers: bool = False
    latent_dim: int | None = None
    chunk: int | None = None
    has_index: bool = False
    has_index_key: bool = False
    has_entries: bool = False
    has_unlike: bool = False
    has_distances: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Says what an engine asks of a backend beside the heads: rows of so many pages, which store
    values in `codec`.
    """

    page_size: int
    num_rows: int
    pages_per_row: int
    codec: Codec
    platform: str
    compute_capability: str | None = None
    """Of a GPU by NVIDIA: "9.0"."""
    kv_policy: str | None = None
    """One that wants more than page tables (`Policy.asks_backend`)."""
    token_parts: int = 1
    """Devices between which the tokens of each page are divided."""


class Place(NamedTuple):
    """Says where a layer keeps its keys and values: its store, its number among the layers of its
    KV group (int32, may be traced), the tables of its rows, whose lengths count the step's tokens,
    and what they have observed in layers before.
    """

    store: Store
    layer: int | jax.Array
    tables: PageTables
    statistics: Statistics | None = None


class LatentMaps(NamedTuple):
    """Holds what latent attention has beside its rows `[latent | rotated]` of R + P numbers, by
    head: matrices [R, C] through which queries meet latents, and [V, R] which make values of them.
    Source: arXiv 2405.04434, section 2.1.2.
    """

    k_up: HeadMatrices
    v_up: HeadMatrices

    def absorb(self, q_TNH: jax.Array) -> jax.Array:
        """Returns queries [T, N, R + P] that meet rows as these [T, N, C + P] would meet keys."""
        size = self.k_up.num_columns
        latent = self.k_up.dot(q_TNH[..., :size])
        return jnp.concatenate([latent, q_TNH[..., size:].astype(latent.dtype)], axis=-1)

    def values_of(self, out_TNR: jax.Array) -> jax.Array:
        """Returns each head's value [T, N, V] of what it has gathered of latents."""
        return self.v_up.dot(out_TNR)

    def expand(self, row_JH: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Makes keys [N, J, C + P] and values [N, J, V] of rows, float32."""
        latent_JR, rotated_JP = jnp.split(row_JH, [self.k_up.num_rows], axis=-1)
        k_NJC, v_NJV = self.k_up.dot_back(latent_JR), self.v_up.dot_all(latent_JR)
        rotated_NJP = jnp.broadcast_to(rotated_JP, (k_NJC.shape[0], *rotated_JP.shape))
        return jnp.concatenate([k_NJC, rotated_NJP], axis=-1), v_NJV


@dataclass(frozen=True, slots=True)
class Terms:
    """Says how a layer's queries meet keys, and what comes out.

    scale: of the scores. cap: if not 0, they are cap * tanh(score / cap). sinks_N: each head's
    score of one more key, whose value is 0. index: how the step's tokens choose keys; None where
    they attend to all. distances: what their queries give the distance to a key; None for nothing.
    maps: of latent attention, whose queries [T, N, C + P] are as they would meet keys, and out
    [T, N, V] has each head's values; the backend decides what goes through them, and when.
    out_dtype: out is float32, or rounded to this already, which is what its caller does with it.
    """

    scale: float
    out_dtype: np.dtype
    cap: float = 0.0
    sinks_N: jax.Array | None = None
    maps: LatentMaps | None = None
    index: AnyIndex | None = None
    distances: Distances | None = None


class Attended(NamedTuple):
    """Holds what a layer's attention returns: out [T, N, H], H of the values where keys are wider,
    the store with the step's keys and values, and the statistics with this layer's added.
    """

    out_TNH: jax.Array
    store: Store
    statistics: Statistics | None


class Attention(Protocol):
    """Defines what a decoder asks for. Whatever is measured in place of paged attention is one too
    (`programs.fit_keys`).
    """

    def prepare(self, store: Store, tables: PageTables, batch: Batch, heads: Heads) -> Any:
        """Makes what is equal for all layers, once per step and KV group, whose lengths are those
        before the step: a pytree, of the same structure and shapes for every window that is not
        None.
        """
        ...

    def attend(
        self,
        q_TNH: jax.Array,
        k_TKH: jax.Array | None,
        v_TKH: jax.Array | None,
        at: Place,
        batch: Batch,
        prepared: Any,
        terms: Terms,
    ) -> Attended:
        """Attends one layer's queries, after storing its keys and values. No values: keys have
        them (`Heads.latent_dim`); no keys: another layer has stored both at the same place.
        """
        ...


class Backend(Attention, Protocol):
    aligned_len: ClassVar[int]
    """Where pages behind a window have gone, a row's table begins at a multiple of so many tokens,
    with columns that are BEHIND in front (`kv.state`); 1: with its first page.
    """

    @property
    def tokens_over(self) -> MeshAxes | None:
        """Names the mesh axes over whose devices the tokens of each page are divided, in equal
        parts, as far as those have the same heads (`divided.token_axes`); None: each has them all.
        """
        ...

    def refuses(self, heads: Heads, needs: Needs) -> str | None:
        """Why it cannot do this, None if it can."""
        ...

    def page_layout(self, heads: Heads, page_size: int, codec: Codec) -> PageLayout:
        """Returns how it keeps the keys and values of a page. Its heads may be larger than the
        model's: then whoever asks it to attend puts zeros behind queries, keys and values.
        """
        ...


@pytree
class Batch:
    """A ragged step: packed tokens of up to B rows. Row r's tokens are `start_B[r] : start_B[r] +
    count_B[r]`.

    token_T, position_T  int32; position counts from the row's first token.
    row_T       int32 in [0, B), or B for a padding token.
    start_B, count_B     int32; packed offset and number of the row's tokens in this step (0: row
                         not in the step).
    num_decode  int32 scalar: rows 0..num_decode-1 have one token each, at packed offset = row.
    num_rows    int32 scalar: rows num_decode..num_rows-1 are prefill chunks, packed in this order.
    target_T    int32: the token that follows in a prompt whose logprobs are wanted, else below 0;
                None: none is.
    decode_only static: every row is a decode row, T = B.
    chunk_len   static: all rows decode, which is in the numbers that they get too, but as chunks of
                up to so many tokens, one included; None: it is a step like any other.
    """

    token_T: jax.Array
    position_T: jax.Array
    row_T: jax.Array
    start_B: jax.Array
    count_B: jax.Array
    num_decode: jax.Array
    num_rows: jax.Array
    target_T: jax.Array | None = None
    decode_only: bool = static(default=False)
    chunk_len: int | None = static(default=None)

    @property
    def is_row_T(self) -> jax.Array:
        """Tells which tokens are a row's, and not padding."""
        return jnp.asarray(self.row_T) < len(self.start_B)


def refuse_latents(terms: Terms) -> None:
    """Raises: NotImplementedError for latent attention; for what has no form of it."""
    if terms.maps is not None:
        raise NotImplementedError("latent attention: expected keys and values of each head")


def refuse_xla_only(terms: Terms) -> None:
    """Raises: NotImplementedError for what no kernel does: keys that are chosen by an index, scores
    by distance.
    """
    if terms.index is not None:
        raise NotImplementedError(CHOSEN_ON_XLA)
    if terms.distances is not None:
        raise NotImplementedError(DISTANCES_ON_XLA)


def refuse_chunks(heads: Heads) -> None:
    """Raises: NotImplementedError for attention within chunks; for backends without it."""
    if heads.chunk is not None:
        raise NotImplementedError("attention within chunks runs on xla")


def refuse_statistics(at: Place) -> None:
    """Raises: NotImplementedError where statistics are asked for; for backends without them."""
    if at.statistics is not None:
        raise NotImplementedError("statistics: only the xla backend observes attention")


def runs_on_xla(heads: Heads) -> str | None:
    """Returns why no kernel does what attention has to do there, None if one may."""
    if not heads.head_dim:
        return "a model without attention"
    if heads.has_index:
        return CHOSEN_ON_XLA
    if heads.has_distances:
        return DISTANCES_ON_XLA
    if heads.has_unlike:
        return "layers of unlike numbers of query heads run on xla"
    return None


def of_part(heads: Heads, page_size: int, num_parts: int) -> tuple[Heads, int]:
    """Returns what attention is on a device that has one of so many parts of each page's tokens:
    the heads of those that have the others, and the tokens of a page there.
    """
    return replace(heads, num_heads=num_parts * heads.num_heads), page_size // num_parts


def refused_when_traced(backend: Backend, heads: Heads, needs: Needs) -> str | None:
    """Returns what `backend` raises as NotImplementedError while one layer of the smallest step
    with all rows is traced, None if that goes through: what kernels cannot do only they know.
    Where devices divide pages one of them is traced (`of_part`).
    """
    heads, page_size = of_part(heads, needs.page_size, needs.token_parts)

    def attend() -> jax.Array:
        row_B = jnp.zeros(needs.num_rows, jnp.int32)
        table_BW = jnp.zeros((needs.num_rows, needs.pages_per_row), jnp.int32)
        layout = backend.page_layout(heads, page_size, needs.codec)
        store = empty_store(num_layers=1, layout=layout, num_pages=1)
        tables = PageTables(table_BW, table_BW, row_B)
        batch = Batch(row_B, row_B, row_B, row_B, row_B, jnp.int32(0), jnp.int32(0))
        q_TNH = jnp.zeros((needs.num_rows, heads.num_heads, layout.head_dim))
        k_TKH = jnp.zeros((needs.num_rows, heads.num_kv_heads, layout.head_dim))
        v_TKH = None if heads.latent_dim is not None else k_TKH
        sinks_N = jnp.zeros(heads.num_heads) if heads.has_sinks else None
        return backend.attend(
            q_TNH,
            None if heads.has_readers else k_TKH,
            None if heads.has_readers else v_TKH,
            Place(store, 0, tables),
            batch,
            backend.prepare(store, tables, batch, heads),
            Terms(1.0, np.dtype(needs.codec.dtype), heads.cap, sinks_N),
        ).out_TNH

    try:
        jax.eval_shape(on_one(attend, backend.tokens_over))
    except NotImplementedError as error:
        return str(error)
    return None
