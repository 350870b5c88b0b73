"""Packs quantised keys and values as the kernels keep them.

Pages hold whole numbers, packed along tokens into 32-bit words, so that one KV head saves as much
as many: ROWS rows of words, what a register holds, are a tile. In one of 8-bit numbers slot t is
byte t % 4 of row t / 4, as in a register of bytes; one of 4-bit numbers is two of those in one, the
first in the lower halves of the bytes. Beside the pages, one word per slot and KV head has two
bfloat16: what the key is to be multiplied by, and the value. 4-bit numbers have another word, of
what is added to both. A page's row of such words is [words of a slot, KV heads, slots], flat, and
rounded up to a whole register.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.tpu.layout import LANES, Layout, pack

ROWS = 8
"""A register has so many rows of 32-bit words."""


class Quantised(NamedTuple):
    """Stands for vectors [..., H]: scale * values, of 8 bits, or scale * (values + 1/2) + offset,
    of 4.

    values [..., H]: whole numbers, int8; scale, offset [...]: float32 that bfloat16 holds, offset
    None for 8 bits.
    """

    values: jax.Array
    scale: jax.Array
    offset: jax.Array | None = None


class Packed(NamedTuple):
    """Holds a pool of packed pages: words [L*P, C, S / per_word, X], scales [L*P, 1, Z], int32."""

    words: jax.Array
    scales: jax.Array


@dataclass(frozen=True, slots=True)
class Packing:
    """Says how numbers of `num_bits`, 8 or 4, lie in words."""

    num_bits: int

    @property
    def per_word(self) -> int:
        return 32 // self.num_bits

    @property
    def tile(self) -> int:
        """Counts the slots of a tile."""
        return ROWS * self.per_word

    @property
    def words_per_slot(self) -> int:
        return 2 if self.num_bits == 4 else 1

    def scales_width(self, kv_heads: int, page_size: int) -> int:
        """Counts the lanes Z of a page's row of scales."""
        return -(-self.words_per_slot * kv_heads * page_size // LANES) * LANES

    def page_shapes(
        self, layout: Layout, page_size: int
    ) -> tuple[tuple[int, int, int], tuple[int, int]]:
        """Gives the shapes of one page of `Packed`: its words, its scales."""
        words = (layout.rows, page_size // self.per_word, layout.width)
        return words, (1, self.scales_width(layout.kv_heads, page_size))

    def pack_values(self, x: jax.Array) -> jax.Array:
        """Packs whole numbers [..., S, X] -> words [..., S / per_word, X]."""
        lead, (slots, width) = x.shape[:-2], x.shape[-2:]
        tiles = x.astype(jnp.int32).reshape(
            *lead, slots // self.tile, self.per_word // 4, ROWS, 4, width
        )
        words = jnp.zeros((*lead, slots // self.tile, ROWS, width), jnp.int32)
        for half in range(self.per_word // 4):
            for byte in range(4):
                field = tiles[..., half, :, byte, :] & (2**self.num_bits - 1)
                words |= field << (8 * byte + 4 * half)
        return words.reshape(*lead, slots // self.per_word, width)

    def unpack_values(self, words: jax.Array) -> jax.Array:
        """Undoes `pack_values`, int32."""
        lead, (rows, width) = words.shape[:-2], words.shape[-2:]
        tiles = words.reshape(*lead, rows // ROWS, ROWS, width)
        places = [8 * byte + 4 * half for half in range(self.per_word // 4) for byte in range(4)]
        rest = 32 - self.num_bits
        fields = [
            jax.lax.shift_right_arithmetic(tiles << (rest - place), jnp.int32(rest))
            for place in places
        ]
        found = jnp.stack(fields, axis=-2).reshape(
            *lead, rows // ROWS, ROWS, self.per_word // 4, 4, width
        )
        return jnp.moveaxis(found, -3, -4).reshape(*lead, rows * self.per_word, width)

    def scale_words(self, layout: Layout, new_T2K: Quantised) -> jax.Array:
        """Returns [T, words, K] int32 of new keys and values [T, 2K]."""
        parts = [x for x in (new_T2K.scale, new_T2K.offset) if x is not None]
        pairs = (jax.lax.bitcast_convert_type(x, jnp.int32) for x in parts)
        return jnp.stack([_pair(*_halves(layout, x)) for x in pairs], axis=1)

    @property
    def unit(self) -> float:
        """Says what `elements` has for 1."""
        return 16.0 if self.num_bits == 4 else 1.0

    def elements(self, words: jax.Array) -> jax.Array:
        """Unpacks in a kernel: [rows, X] words -> [rows * per_word, X] bfloat16, slots in order.
        Rows are of whole tiles.
        """
        # Here, as everything else of packing does without Pallas, which takes 0.3 s to import.
        from jax.experimental.pallas import tpu as pltpu

        if self.num_bits == 8:
            return pltpu.bitcast(words, jnp.int8).astype(jnp.bfloat16)
        # A number in the upper half of a byte is 16 times itself, sign and all.
        tiles, upper = words.reshape(-1, ROWS, words.shape[-1]), jnp.int32(-0x0F0F0F10)
        halves = jnp.stack([jax.lax.shift_left(tiles, jnp.int32(4)) & upper, tiles & upper], axis=1)
        return pltpu.bitcast(halves.reshape(-1, words.shape[-1]), jnp.int8).astype(jnp.bfloat16)

    def place(self, slot: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Finds (row, shift in bits) in its tile of the slot with this number there."""
        half, slot = _divmod(slot, 4 * ROWS)
        row, byte = _divmod(slot, 4)
        return row, 8 * byte + 4 * half

    def mask(self, shape: tuple[int, ...], low: jax.Array, high: jax.Array) -> jax.Array:
        """Makes a mask in a kernel, for words [.., rows, X]: bits of slots low <= slot < high."""
        tile, row = _divmod(jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 2), ROWS)
        first = tile * self.tile + row * 4
        bits = jnp.zeros(shape, jnp.int32)
        for half in range(self.per_word // 4):
            for byte in range(4):
                slot = first + 4 * ROWS * half + byte
                field = jnp.int32(_signed((2**self.num_bits - 1) << (8 * byte + 4 * half)))
                bits |= jnp.where((slot >= low) & (slot < high), field, 0)
        return bits


def packing_of(x: Quantised) -> Packing:
    return Packing(8 if x.offset is None else 4)


def _halves(layout: Layout, x: jax.Array) -> list[jax.Array]:
    """Splits [T, 2K, ..] into what keys have and what values have: of latent rows the same."""
    return [x, x] if layout.kind == "latent" else jnp.split(x, 2, axis=1)


def _pair(low: jax.Array, high: jax.Array) -> jax.Array:
    """Joins the bits of two float32 that bfloat16 holds in one word."""
    return jax.lax.shift_right_logical(low, jnp.int32(16)) | high


def _divmod(a: jax.Array, b: int) -> tuple[jax.Array, jax.Array]:
    """Divides numbers that are not negative; `//` also handles the others, and asks what chip this
    is.
    """
    return jax.lax.div(a, jnp.int32(b)), jax.lax.rem(a, jnp.int32(b))


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def pack_new(layout: Layout, packing: Packing, new_T2K: Quantised) -> tuple[jax.Array, jax.Array]:
    """Returns (whole numbers [T, C, X] int8, scale words [T, words, K]) of new keys and values [T,
    2K, H].
    """
    values = pack(layout, new_T2K.values.astype(jnp.int8)[:, :, None])[:, :, 0]
    return values, packing.scale_words(layout, new_T2K)


def pack_pages(layout: Layout, packing: Packing, pages: Quantised) -> Packed:
    """Packs whole pages [P, 2K, S, H] as the kernels keep them. For tests and measurements: an
    engine's are written token by token.
    """
    words = packing.pack_values(pack(layout, pages.values.astype(jnp.int32)))
    parts = [
        jax.lax.bitcast_convert_type(x, jnp.int32)
        for x in (pages.scale, pages.offset)
        if x is not None
    ]
    rows = jnp.stack([_pair(*_halves(layout, x)) for x in parts], axis=1).reshape(len(words), 1, -1)
    return Packed(
        words, to_width(rows, packing.scales_width(layout.kv_heads, pages.values.shape[2]))
    )


def unpack_scales(
    packing: Packing, scales: jax.Array, kv_heads: int, page_size: int
) -> list[jax.Array]:
    """Reads scales, and offsets where there are, [P, 2K, S] float32, from `Packed.scales`."""
    size = packing.words_per_slot * kv_heads * page_size
    words = scales[:, 0, :size].reshape(len(scales), packing.words_per_slot, kv_heads, page_size)
    both = jnp.concatenate([words << 16, words & jnp.int32(-65536)], axis=2)
    return [
        jax.lax.bitcast_convert_type(both[:, i], jnp.float32) for i in range(packing.words_per_slot)
    ]


def in_slots(words_TWK: jax.Array, page_size: int, width: int) -> jax.Array:
    """Puts each token's words [T, words, K] in every slot of a page's row of scales [T, 1, Z]."""
    return to_width(jnp.repeat(words_TWK.reshape(len(words_TWK), 1, -1), page_size, axis=2), width)


def to_width(rows: jax.Array, width: int) -> jax.Array:
    return jnp.pad(rows, ((0, 0), (0, 0), (0, width - rows.shape[-1])))
