"""Lays heads out in a page so that its rows are whole 128-lane registers and no byte is padding.

The kernels see pages [L*P, C, S, X] with X a multiple of 128, C rows of heads, and queries [.., J,
M, X] that meet row j of a page as keys and row j + `values` of it as values:

kind    when                    C      X    row of a page                            query of head n
whole   H % 128 = 0             2K     H    j < K: keys of head j; then values       all lanes
pairs   H = 64, K even          K      128  j < K/2: keys of heads 2j, 2j+1; values  its half
beside  H = 64, K odd           K      128  key of head j, value of head j           left half
latent  a row is key and value  H/128  128  lanes 128 j .. of a row                  all lanes, J=1

Other lanes of a query are zeros. A head's result is in the lanes of its query, with `beside` in
the right half, with `latent` in as many as a value has.

A product with zeros costs nothing where the matmul unit is 128 wide anyhow. `pairs` takes half the
matmuls and softmax passes of `beside` (heads 2j and 2j+1 share them), which leaves one KV head per
shard whole: TPU lanes need a partner.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

LANES, SUBLANES = 128, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Describes a page; `layout_of` makes it. rows C, width X; `joined` J rows are keys, values
    follow `values` rows later.
    """

    kind: str
    kv_heads: int
    head_dim: int
    value_dim: int = 0
    """Numbers of a value, where it is the first part of its key."""

    @property
    def rows(self) -> int:
        if self.kind == "latent":
            return self.head_dim // LANES
        return 2 * self.kv_heads if self.kind == "whole" else self.kv_heads

    @property
    def width(self) -> int:
        return self.head_dim if self.kind == "whole" else LANES

    @property
    def key_width(self) -> int:
        """Counts the lanes of a query."""
        return self.head_dim if self.kind == "latent" else self.width

    @property
    def value_rows(self) -> int:
        """Counts the rows of a page that are read as values."""
        return -(-self.value_dim // LANES) if self.kind == "latent" else self.joined

    @property
    def out_width(self) -> int:
        """Counts the lanes of what the queries of a row of heads attend to."""
        return self.value_rows * LANES if self.kind == "latent" else self.width

    @property
    def joined(self) -> int:
        return self.kv_heads // 2 if self.kind == "pairs" else self.kv_heads

    @property
    def values(self) -> int:
        return 0 if self.kind in ("beside", "latent") else self.joined


def padded_head_dim(head_dim: int, *, latent: bool = False) -> int:
    """Returns the smallest head size that the kernels take and that is at least as large; with
    `latent`, of a row that is key and value.
    """
    return LANES // 2 if head_dim <= LANES // 2 and not latent else -(-head_dim // LANES) * LANES


def layout_of(*, kv_heads: int, head_dim: int) -> Layout:
    """Raises: NotImplementedError for a head_dim other than 64 and the multiples of 128."""
    if head_dim % LANES == 0:
        return Layout(kind="whole", kv_heads=kv_heads, head_dim=head_dim)
    if head_dim == LANES // 2:
        return Layout(
            kind="beside" if kv_heads % 2 else "pairs", kv_heads=kv_heads, head_dim=head_dim
        )
    raise NotImplementedError(f"head_dim: expected 64 or a multiple of {LANES}, got {head_dim}")


def latent_layout_of(*, width: int, rank: int) -> Layout:
    """Lays out rows of `width` numbers, the first `rank` of which are the value.

    Raises: NotImplementedError for a width that is not a multiple of 128.
    """
    if width % LANES:
        raise NotImplementedError(f"latent rows: expected a multiple of {LANES}, got {width}")
    return Layout(kind="latent", kv_heads=1, head_dim=width, value_dim=rank)


def pack(layout: Layout, x: jax.Array) -> jax.Array:
    """Packs [..., 2K, S, H] (keys, then values, head-major) or latent rows [..., 1, S, H] ->
    [..., C, S, X], as many bytes.
    """
    if layout.kind == "whole":
        return x
    lead, (heads, slots, dim) = x.shape[:-3], x.shape[-3:]
    if layout.kind == "latent":
        x = x.reshape(*lead, slots, layout.rows, layout.width)
        return jnp.moveaxis(x, -2, -3)
    if layout.kind == "pairs":  # neighbouring heads become lanes
        x = x.reshape(*lead, heads // 2, 2, slots, dim)
    else:
        x = jnp.moveaxis(x.reshape(*lead, 2, heads // 2, slots, dim), -4, -3)
    return jnp.moveaxis(x, -3, -2).reshape(*lead, layout.rows, slots, layout.width)


def unpack(layout: Layout, x: jax.Array) -> jax.Array:
    """Undoes `pack`."""
    if layout.kind == "whole":
        return x
    lead, (rows, slots) = x.shape[:-3], x.shape[-3:-1]
    if layout.kind == "latent":
        return jnp.moveaxis(x, -3, -2).reshape(*lead, 1, slots, layout.head_dim)
    x = jnp.moveaxis(x.reshape(*lead, rows, slots, 2, layout.head_dim), -2, -3)
    if layout.kind == "beside":
        x = jnp.moveaxis(x, -3, -4)
    return x.reshape(*lead, 2 * layout.kv_heads, slots, layout.head_dim)


def pack_queries(layout: Layout, q_TNH: jax.Array) -> jax.Array:
    """Packs [T, N, H] -> [T, J, M, X]: the M = N/J queries that meet page row j, zeros in the lanes
    of other heads.
    """
    num_tokens, num_heads, dim = q_TNH.shape
    if layout.kind in ("whole", "latent"):
        return q_TNH.reshape(num_tokens, layout.joined, -1, dim)
    if layout.kind == "beside":
        return jnp.pad(
            q_TNH.reshape(num_tokens, layout.joined, -1, dim), ((0, 0), (0, 0), (0, 0), (0, dim))
        )
    q = q_TNH.reshape(num_tokens, layout.joined, 2, -1, 1, dim)
    own = jnp.eye(2, dtype=bool).reshape(1, 1, 2, 1, 2, 1)
    return jnp.where(own, q, jnp.zeros_like(q)).reshape(
        num_tokens, layout.joined, num_heads // layout.joined, -1
    )


def unpack_outputs(layout: Layout, out_TJMX: jax.Array) -> jax.Array:
    """Takes each head's own lanes, [T, J, M, X] -> [T, N, H]."""
    num_tokens, joined, per_row, width = out_TJMX.shape
    num_heads, dim = joined * per_row, layout.head_dim
    if layout.kind == "whole":
        return out_TJMX.reshape(num_tokens, num_heads, width)
    if layout.kind == "latent":
        return out_TJMX[..., : layout.value_dim].reshape(num_tokens, num_heads, layout.value_dim)
    if layout.kind == "beside":
        return out_TJMX[..., dim:].reshape(num_tokens, num_heads, dim)
    halves = out_TJMX.reshape(num_tokens, joined, 2, per_row // 2, 2, dim)
    return jnp.stack([halves[:, :, 0, :, 0], halves[:, :, 1, :, 1]], axis=2).reshape(
        num_tokens, num_heads, dim
    )
