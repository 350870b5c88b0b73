"""Says what a page looks like: the one place that knows where a backend keeps which key and value.

A `PageLayout` says which arrays a page is made of, and goes between those and the canonical form,
keys and values [layers, tokens, KV heads, dim], which is alike for all backends and codecs. Where
values are the first numbers of their keys (latent attention), pages hold the keys alone.

- `pack` encodes vectors just as a backend's own writes do.
- `unpack` gives the vectors that the pages stand for, float32 and not rotated. A plain codec gives
  back what it was given, rounded to its dtype. A quantising codec gives the nearest that it has;
  packing that again need not give the same bytes. To keep the bytes, keep the arrays of the pages.
- Keys are as the layers store them: with their positions, and shifted and scaled for those models
  whose keys are fitted to being quantised (`programs.fit_keys`).

Between the two forms there are vectors in page order [.., D, V, S, H]: of each device first the
keys of its K heads, then their values, each head with the S tokens of a page. V is `num_vectors`:
2K, or K without values. Where blocks or pools of keys are chosen (`ops.attention.index`), what
they are chosen by is one more vector behind the keys: of every device the same, and the last head
of the keys in the canonical form.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.kv.codecs import KINDS, Codec, Elements, ScaledCodec, decode, decode_elements
from jaxkv.kv.codecs.int4 import Int4Codec
from kernels_pallas import gpu, tpu
from kernels_pallas.tpu.layout import LANES

once = jax.lax.optimization_barrier
"""Keeps XLA:CPU from computing indices and masks anew for each element of whatever reads them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PageLayout(ABC):
    """Describes the part of one page of one layer that one device has.

    num_kv_heads: K of that part. page_size: S tokens. codec: how vectors are stored. latent_dim:
    values are the first so many numbers of the keys, which every device has all of; None: they are
    stored beside them. has_index_key: tokens have one more key, by which blocks are chosen.
    Hashable: a static part of the KV state. Where heads are divided over D devices, the first axis
    of each of a page's arrays is D times as long, device by device.
    """

    num_kv_heads: int
    head_dim: int
    page_size: int
    codec: Codec
    latent_dim: int | None = None
    has_index_key: bool = False

    @property
    def num_keys(self) -> int:
        """Counts the keys that a page has of each token."""
        return self.num_kv_heads + self.has_index_key

    @property
    def num_vectors(self) -> int:
        """Counts the vectors that a page has of each token."""
        return self.num_keys + (self.num_kv_heads if self.latent_dim is None else 0)

    @property
    @abstractmethod
    def arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Describes the arrays of a page: its elements, and its scales where those are apart."""

    @abstractmethod
    def _encode(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """Vectors [.., V, S, H] -> each of `arrays`, [.., *shape]."""

    @abstractmethod
    def _decode(self, arrays: tuple[jax.Array, ...]) -> jax.Array:
        """Inverts `_encode`, but for what the codec loses; float32."""

    @property
    def nbytes(self) -> int:
        """Bytes of a page of one layer on one device."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in self.arrays)

    def num_devices(self, pages: jax.Array) -> int:
        """Returns how many devices divide the heads of the first of a pool's arrays, as it is
        seen here: inside of `shard_map` one.
        """
        return pages.shape[-len(self.arrays[0].shape)] // self.arrays[0].shape[0]

    def encode(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """Stores vectors in page order [.., D, V, S, H] as the arrays of pages."""
        lead = x.shape[:-4]
        return tuple(
            stored.reshape(*lead, x.shape[-4] * page.shape[0], *page.shape[1:])
            for stored, page in zip(self._encode(x), self.arrays, strict=True)
        )

    def decode(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Returns the vectors that pages stand for, in page order [.., D, V, S, H], float32."""
        num_devices = self.num_devices(arrays[0])
        return self._decode(
            tuple(
                x.reshape(*x.shape[: -len(page.shape)], num_devices, *page.shape)
                for x, page in zip(arrays, self.arrays, strict=True)
            )
        )

    def split(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the keys and values, [.., K, S, H], of vectors in page order."""
        if self.latent_dim is not None:
            return x, x[..., : self.latent_dim]
        return x[..., : self.num_kv_heads, :, :], x[..., self.num_keys :, :, :]

    def pack(self, k_LTKH: jax.Array, v_LTKH: jax.Array | None) -> tuple[jax.Array, ...]:
        """Stores the keys and values of T tokens, in order, in ceil(T / S) pages of each layer:
        arrays [L, P, *shape]. Slots past the last token get the vector 0. No values where keys have
        them (`latent_dim`).

        Raises: ValueError for keys and values of another shape.
        """
        num_layers, num_tokens, num_keys, head_dim = k_LTKH.shape
        num_heads = num_keys - self.has_index_key
        num_devices, rest = divmod(num_heads, self.num_kv_heads)
        v_shape = None if v_LTKH is None else v_LTKH.shape
        expected = (num_layers, num_tokens, num_heads, head_dim)
        if (
            rest
            or head_dim != self.head_dim
            or v_shape != (expected if self.latent_dim is None else None)
        ):
            what = "keys and values" if self.latent_dim is None else "keys alone"
            more = ", and one more key" if self.has_index_key else ""
            raise ValueError(
                f"expected {what} [layers, tokens, {self.num_kv_heads}, {self.head_dim}] or a "
                f"multiple of those heads{more}, got {k_LTKH.shape} and {v_shape}"
            )

        def by_device(x: jax.Array) -> jax.Array:
            return x.reshape(num_layers, num_tokens, num_devices, -1, head_dim)

        parts = [by_device(k_LTKH[:, :, :num_heads])]
        if self.has_index_key:
            every = (num_layers, num_tokens, num_devices, head_dim)
            parts.append(by_device(jnp.broadcast_to(k_LTKH[:, :, num_heads:], every)))
        if v_LTKH is not None:
            parts.append(by_device(v_LTKH))
        x = jnp.concatenate(parts, axis=3)
        size, of_axes = self.page_size, [(0, 0)] * 5
        of_axes[1] = (0, -num_tokens % size)
        x = jnp.pad(x, of_axes).reshape(num_layers, -1, size, *x.shape[2:])
        return self.encode(x.transpose(0, 1, 3, 4, 2, 5))  # [L, P, D, V, S, H]

    def unpack(self, arrays: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Returns the keys and the values [L, P * S, K, H] float32, of all devices, that pages
        [L, P, *shape] stand for; values may be narrower (`latent_dim`), keys one more
        (`has_index_key`). Those of slots that nobody holds are anything.
        """

        def by_token(x: jax.Array) -> jax.Array:
            num_layers, num_pages = x.shape[:2]
            x = x.transpose(0, 1, 4, 2, 3, 5)  # [L, P, S, D, K, H]
            return x.reshape(num_layers, num_pages * self.page_size, -1, x.shape[-1])

        x = self.decode(arrays)
        k, v = map(by_token, self.split(x))
        if self.has_index_key:
            own = by_token(x[:, :, :1, self.num_kv_heads : self.num_keys])
            k = jnp.concatenate([k, own], axis=2)
        return k, v


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadMajorLayout(PageLayout):
    """Pages of the XLA backend: [V, S, X], keys before values, X elements of the codec per vector.
    One head of one page is contiguous, and so is a whole page.
    """

    @property
    def arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        shape = (self.num_vectors, self.page_size, self.codec.width(self.head_dim))
        return (jax.ShapeDtypeStruct(shape, self.codec.storage_dtype),)

    @property
    def to_values(self) -> int:
        """Counts how many vectors behind a head's key its value is: 0 where the key has it."""
        return self.num_vectors - self.num_kv_heads

    def gather(self, pages: jax.Array, page_RKC: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns what is stored of keys and of values, [R, K, C, S, X], in pages of a pool that
        each head has of its own, or [R, 1, C] that all heads share.
        """
        heads = range(self.num_kv_heads)
        keys = self.gather_vectors(pages, page_RKC, heads)
        if not self.to_values:
            return keys, keys
        values = [head + self.to_values for head in heads]
        return keys, self.gather_vectors(pages, page_RKC, values)

    def gather_vectors(
        self, pages: jax.Array, page_RKC: jax.Array, vectors: Sequence[int]
    ) -> jax.Array:
        """Returns these K of the V vectors of tokens, as `gather` does keys."""
        by_vector = pages.reshape(-1, self.page_size, pages.shape[3])
        vector_1K1 = jnp.asarray(vectors, jnp.int32)[None, :, None]
        index_RKC = once(page_RKC * pages.shape[1] + vector_1K1)
        return by_vector.at[index_RKC].get(mode="clip")

    def gather_ends(self, pages: jax.Array, page_C: jax.Array, begin: int) -> jax.Array:
        """Returns the numbers from `begin` on of what tokens of pages have, [C, S, X], where that
        is one vector.
        """
        # A gather of whole pages, cut afterwards, would read what is before them too.
        size = (1, 1, self.page_size, pages.shape[3] - begin)
        return jax.vmap(lambda page: jax.lax.dynamic_slice(pages, (page, 0, 0, begin), size))(
            page_C
        )[:, 0, 0]

    def put_ends(
        self, pages: jax.Array, row_T: jax.Array, slot_T: jax.Array, x_TX: jax.Array, begin: int
    ) -> jax.Array:
        """Stores what `gather_ends` returns of single tokens; a row past the pool is dropped."""
        place = pages.at[row_T, 0, slot_T, begin : begin + x_TX.shape[1]]
        return place.set(self.codec.encode(x_TX), mode="drop")

    def encode_tokens(self, x_TVH: jax.Array) -> tuple[jax.Array, ...]:
        """Returns what tokens have in their slots: [T, V, ..] for each of `by_slot`."""
        return (self.codec.encode(x_TVH),)

    def by_slot(self, pools: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Views the arrays of many pages as [N, V, S, ..]."""
        (pages,) = pools
        return (pages,)

    def _encode(self, x: jax.Array) -> tuple[jax.Array, ...]:
        return (self.codec.encode(x),)

    def _decode(self, arrays: tuple[jax.Array, ...]) -> jax.Array:
        return decode(self.codec, arrays[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneRowsLayout(HeadMajorLayout):
    """Pages of the XLA backend on a TPU where vectors are no whole registers of lanes, or parts of
    them are written alone: [R, S, 128], all that a token has, one vector behind the other, padded
    and cut into R rows of 128 lanes.

    XLA:TPU copies a pool of other widths wherever it writes (docs/benchmarks/memory.md).
    """

    @property
    def width(self) -> int:
        """Counts the elements of a vector."""
        return self.codec.width(self.head_dim)

    @property
    def arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        num_rows = -(-self.num_vectors * self.width // LANES)
        shape = (num_rows, self.page_size, LANES)
        return (jax.ShapeDtypeStruct(shape, self.codec.storage_dtype),)

    def encode_tokens(self, x_TVH: jax.Array) -> tuple[jax.Array, ...]:
        return (self._rows(self.codec.encode(x_TVH)),)

    def gather_vectors(
        self, pages: jax.Array, page_RKC: jax.Array, vectors: Sequence[int]
    ) -> jax.Array:
        # Whole pages: of those that each head has of its own all heads are read.
        found = self.vectors(pages.at[page_RKC].get(mode="clip")).swapaxes(2, 3)
        return found[:, jnp.arange(page_RKC.shape[1]), jnp.asarray(vectors)]

    def gather_ends(self, pages: jax.Array, page_C: jax.Array, begin: int) -> jax.Array:
        by_row = pages.reshape(-1, *pages.shape[2:])
        row_1R = self._rows_from(begin, pages)
        found = by_row.at[once(page_C[:, None] * pages.shape[1] + row_1R)].get(mode="clip")
        return found.swapaxes(1, 2).reshape(len(page_C), self.page_size, -1)

    def put_ends(
        self, pages: jax.Array, row_T: jax.Array, slot_T: jax.Array, x_TX: jax.Array, begin: int
    ) -> jax.Array:
        row_1R = self._rows_from(begin, pages)
        x_TX = jnp.pad(x_TX, ((0, 0), (0, row_1R.size * LANES - x_TX.shape[1])))
        x_TRX = self.codec.encode(x_TX).reshape(len(x_TX), -1, LANES)
        # Row by row: as in `kv.state.write`.
        return pages.at[row_T[:, None], row_1R, slot_T[:, None]].set(x_TRX, mode="drop")

    def _rows_from(self, begin: int, pages: jax.Array) -> jax.Array:
        """Numbers the rows of 128 lanes from a vector's number `begin` on, [1, R]."""
        if begin % LANES:
            raise NotImplementedError(f"expected a multiple of {LANES} numbers, got {begin}")
        return jnp.arange(begin // LANES, pages.shape[1])[None]

    def vectors(self, pages: jax.Array) -> jax.Array:
        """Returns what is stored in pages [.., R, S, 128] vector by vector, [.., V, S, X]."""
        x = pages.swapaxes(-3, -2)
        x = x.reshape(*x.shape[:-2], -1)[..., : self.num_vectors * self.width]
        return x.reshape(*x.shape[:-1], self.num_vectors, self.width).swapaxes(-3, -2)

    def _rows(self, stored: jax.Array) -> jax.Array:
        """Cuts what tokens have, [.., V, X], into rows [.., R, 128]."""
        x = stored.reshape(*stored.shape[:-2], -1)
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % LANES)])
        return x.reshape(*x.shape[:-1], -1, LANES)

    def _encode(self, x: jax.Array) -> tuple[jax.Array, ...]:
        return (self._rows(self.codec.encode(x).swapaxes(-3, -2)).swapaxes(-3, -2),)

    def _decode(self, arrays: tuple[jax.Array, ...]) -> jax.Array:
        return decode(self.codec, self.vectors(arrays[0]))


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalesApartLayout(HeadMajorLayout):
    """int8 and int4 pages of the GPU backend (`kernels_pallas.gpu.QuantisedPages`): numbers [V, S,
    H or H/2], and beside them, head by head, the scales [1, V * S], with offsets where there are.
    """

    @property
    def arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        width, scale_dtype = self.head_dim, jnp.bfloat16
        if isinstance(self.codec, Int4Codec):
            width, scale_dtype = self.head_dim // 2, jnp.int32
        numbers = jax.ShapeDtypeStruct((self.num_vectors, self.page_size, width), jnp.int8)
        num_scales = self.num_vectors * self.page_size
        return numbers, jax.ShapeDtypeStruct((1, num_scales), scale_dtype)

    def encode_tokens(self, x_TVH: jax.Array) -> tuple[jax.Array, ...]:
        return self._quantise(x_TVH)

    def by_slot(self, pools: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        numbers, scales = pools
        return numbers, scales.reshape(numbers.shape[:3])

    def _quantise(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        numbers, scale, offset = quantised(self.codec, x)
        if offset is None:
            return numbers, scale.astype(jnp.bfloat16)
        return gpu.pack_numbers(numbers), gpu.pack_scales(scale, offset)

    def _encode(self, x: jax.Array) -> tuple[jax.Array, ...]:
        numbers, scale = self._quantise(x)
        return numbers, scale.reshape(*scale.shape[:-2], 1, -1)

    def _decode(self, arrays: tuple[jax.Array, ...]) -> jax.Array:
        numbers, scales = arrays
        scales = scales.reshape(numbers.shape[:-1])
        if not isinstance(self.codec, Int4Codec):
            return decode_elements(self.codec, Elements(numbers, scales.astype(jnp.float32)))
        # A 4-bit number stands for the middle of its step.
        values = gpu.unpack_numbers(numbers) + 0.5
        return decode_elements(self.codec, Elements(values, *gpu.unpack_scales(scales)))


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneLayout(PageLayout):
    """Pages of the TPU backend, whose rows are whole registers of lanes (`kernels_pallas.tpu`):
    elements of a plain codec, or packed numbers and, beside them, their scales and offsets.
    """

    @property
    def lanes(self) -> tpu.Layout:
        """Raises: NotImplementedError for a head_dim that the kernels do not take."""
        if self.latent_dim is not None:
            return tpu.latent_layout_of(width=self.head_dim, rank=self.latent_dim)
        return tpu.layout_of(kv_heads=self.num_kv_heads, head_dim=self.head_dim)

    @property
    def packing(self) -> tpu.Packing | None:
        return packing_of(self.codec)

    @property
    def arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        lanes, packing = self.lanes, self.packing
        if packing is None:
            shape = (lanes.rows, self.page_size, lanes.width)
            return (jax.ShapeDtypeStruct(shape, self.codec.storage_dtype),)
        shapes = packing.page_shapes(lanes, self.page_size)
        return tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)

    def _encode(self, x: jax.Array) -> tuple[jax.Array, ...]:
        if self.packing is None:
            return (tpu.pack(self.lanes, self.codec.encode(x)),)
        flat = quantised(self.codec, x.reshape(-1, *x.shape[-3:]))
        packed = tpu.pack_pages(self.lanes, self.packing, flat)
        return tuple(y.reshape(*x.shape[:-3], *y.shape[1:]) for y in packed)

    def _decode(self, arrays: tuple[jax.Array, ...]) -> jax.Array:
        words, *rest = arrays
        if self.packing is None:
            return decode(self.codec, tpu.unpack(self.lanes, words))
        numbers = tpu.unpack(self.lanes, self.packing.unpack_values(words))
        flat = rest[0].reshape(-1, *rest[0].shape[-2:])
        found = tpu.unpack_scales(self.packing, flat, self.num_kv_heads, self.page_size)
        # Of latent rows the words say the same twice.
        scale, *offset = (y[:, : self.num_vectors].reshape(numbers.shape[:-1]) for y in found)
        # A 4-bit number stands for the middle of its step (`Quantised`).
        values = numbers + 0.5 if offset else numbers
        return decode_elements(self.codec, Elements(values, scale, *offset))


LAYOUTS = {
    one.__name__: one for one in (HeadMajorLayout, LaneRowsLayout, ScalesApartLayout, LaneLayout)
}


def described(layout: PageLayout) -> dict[str, Any]:
    """Returns a layout as JSON has it."""
    fields = asdict(layout)
    codec = {"type": type(layout.codec).__name__, **fields.pop("codec")}
    return {"type": type(layout).__name__, "codec": codec, **fields}


def layout_of(description: Mapping[str, Any]) -> PageLayout:
    """Inverts `described`. Raises: LookupError, TypeError or ValueError for what it has not made.
    Values of fields are not looked at.
    """
    fields = dict(description)
    of_codec: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in dict(fields.pop("codec")).items()
    }
    kind: Any = KINDS[of_codec.pop("type")]
    codec = kind(**of_codec)
    return LAYOUTS[fields.pop("type")](codec=codec, **fields)


def packing_of(codec: Codec) -> tpu.Packing | None:
    """Returns how the TPU kernels pack what the codec stores; None for floats, and for what they do
    not take.
    """
    if is_int8(codec):
        return tpu.Packing(8)
    return tpu.Packing(4) if isinstance(codec, Int4Codec) else None


def quantised(codec: Codec, x: jax.Array) -> tpu.Quantised:
    """Returns vectors [.., H] as the numbers that kernels take, and their scales and offsets.
    Raises: TypeError for a codec of others (`has_numbers`).
    """
    if isinstance(codec, Int4Codec):
        codes, scale, middle = codec.quantise(x)
        return tpu.Quantised(codes.astype(jnp.int8) - 8, scale, middle)
    if isinstance(codec, ScaledCodec):
        return tpu.Quantised(*codec.quantise(x))
    raise TypeError(f"expected a codec whose numbers the kernels take, got {codec.name}")


def is_int8(codec: Codec) -> bool:
    """Says whether it stores a whole number of 8 bits and a scale."""
    return isinstance(codec, ScaledCodec) and codec.kind == "int8"


def has_numbers(codec: Codec) -> bool:
    """Says whether the kernels' matmuls take the numbers that it stores: int8 and int4."""
    return is_int8(codec) or isinstance(codec, Int4Codec)
