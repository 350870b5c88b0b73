"""Convolves each channel with the last few tokens of its row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from jaxkv.axes import Array
from jaxkv.ops.recurrent.rows import Rows, read, write


def short_conv(
    x_TX: Array,
    kernel_XK: Array,
    pool: Array,
    where: Rows,
    bias_X: Array | None = None,
    *,
    dilation: int = 1,
    with_input: bool = False,
    said_TGK: Array | None = None,
) -> tuple[Array, Array]:
    """Computes y[t] = sum over j of kernel[:, K-1-j] * x[t - j * dilation], plus the bias, and x[t]
    if `with_input`, within each row.

    said_TGK: what each token adds to the kernel of each of G groups of channels, that of j tokens
    before under j. Here X is channels, and K the kernel's width. pool: the last (K-1) * dilation
    inputs of each row, oldest first, [layers * num_slots, X, (K-1) * dilation].
    Returns (y [T, X] float32, the pool with the step's inputs). What is before a row's first token
    counts as 0. Source: the causal depthwise convolution of Mamba, arXiv 2312.00752, section 3.4.
    """
    batch, kernel_XK = where.batch, kernel_XK.astype(jnp.float32)
    weighed = partial(_weighed, kernel_XK=kernel_XK, bias_X=bias_X, with_input=with_input)
    if where.after_BA is not None and not batch.decode_only:
        return _convolve_each(x_TX, pool, where, weighed, dilation, said_TGK)
    x_TX, (num_tokens, num_before) = x_TX.astype(jnp.float32), (x_TX.shape[0], pool.shape[2])
    tail_BXJ = read(pool, where.index_B, where.is_new_B)
    start_B, count_B = jnp.asarray(batch.start_B), jnp.asarray(batch.count_B)
    if batch.decode_only:
        y_TX = weighed(x_TX, _latest_first(tail_BXJ, dilation), said_TGK)
    else:
        row_T = jnp.asarray(batch.row_T)
        offset_T = jnp.arange(num_tokens) - start_B.at[row_T].get(mode="clip")
        earlier = []
        for back in range(dilation, num_before + 1, dilation):
            shift = min(back, num_tokens)
            earlier_TX = jnp.pad(x_TX[: num_tokens - shift], ((shift, 0), (0, 0)))
            earlier_TX = jnp.where((offset_T >= back)[:, None], earlier_TX, 0)
            # What comes from before the step reaches the first tokens of each row only.
            first_A = jnp.arange(back)[None]
            token_BA = jnp.where(first_A < count_B[:, None], start_B[:, None] + first_A, num_tokens)
            old_BAX = tail_BXJ[:, :, num_before - back :].transpose(0, 2, 1)
            earlier.append(earlier_TX.at[token_BA].set(old_BAX, mode="drop"))
        y_TX = weighed(x_TX, earlier, said_TGK)
    # The new tail: inputs count - J to count - 1 of the step, or what was there before.
    from_BJ = count_B[:, None] - num_before + jnp.arange(num_before)[None]
    new_BJX = x_TX.at[jnp.where(from_BJ < 0, 0, start_B[:, None] + from_BJ)].get(mode="clip")
    place_BJ = jnp.clip(from_BJ + num_before, 0, num_before - 1)
    old_BXJ = jnp.take_along_axis(tail_BXJ, place_BJ[:, None, :], axis=2)
    tail_BXJ = jnp.where((from_BJ < 0)[:, None, :], old_BXJ, new_BJX.transpose(0, 2, 1))
    return y_TX, write(pool, where.written_BA[:, 0], tail_BXJ)


def _convolve_each(
    x_TX: Array,
    pool: Array,
    where: Rows,
    weighed: Callable[[Array, Sequence[Array], Array | None], Array],
    dilation: int,
    said_TGK: Array | None,
) -> tuple[Array, Array]:
    """Takes the rows token by token, as steps with one token of each do, and stores the last inputs
    after each.
    """
    start_B, count_B = jnp.asarray(where.batch.start_B), jnp.asarray(where.batch.count_B)
    x_TX, written_BA = x_TX.astype(jnp.float32), where.written_BA

    def token(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        tail_BXJ, y_TX, pool = carry
        token_B = jnp.where(j < count_B, start_B + j, x_TX.shape[0])
        x_BX = x_TX.at[token_B].get(mode="fill", fill_value=0)
        said_BGK = None if said_TGK is None else said_TGK.at[token_B].get(mode="clip")
        y_BX = weighed(x_BX, _latest_first(tail_BXJ, dilation), said_BGK)
        tail_BXJ = jnp.concatenate([tail_BXJ, x_BX[:, :, None]], axis=2)[:, :, 1:]
        pool = write(pool, written_BA[:, j], tail_BXJ)
        return tail_BXJ, y_TX.at[token_B].set(y_BX, mode="drop"), pool

    tail_BXJ = read(pool, where.index_B, where.is_new_B)
    carry = (tail_BXJ, jnp.zeros_like(x_TX), pool)
    _, y_TX, pool = jax.lax.fori_loop(0, jnp.max(count_B), token, carry)
    return y_TX, pool


def _latest_first(tail_BXJ: Array, dilation: int) -> list[Array]:
    """Returns the inputs that are a multiple of so many tokens back."""
    return [tail_BXJ[:, :, -back] for back in range(dilation, tail_BXJ.shape[2] + 1, dilation)]


def _weighed(
    x_RX: Array,
    earlier: Sequence[Array],
    said_RGK: Array | None,
    *,
    kernel_XK: Array,
    bias_X: Array | None,
    with_input: bool,
) -> Array:
    """Adds up the products of some tokens and of those before each of them, the last one first.

    One after the other: of a sum over an axis XLA:CPU adds up in an order that the number of tokens
    decides. The input is the first of the sum: as a sum behind it, XLA:CPU would round it otherwise
    where that is one operation with what follows.
    """

    def weight(back: int) -> Array:
        kernel_1X = kernel_XK[None, :, -1 - back]
        if said_RGK is None:
            return kernel_1X
        size = kernel_XK.shape[0] // said_RGK.shape[1]
        return kernel_1X + jnp.repeat(said_RGK[:, :, back], size, axis=1)

    y_RX = x_RX * weight(0)
    y_RX = x_RX + y_RX if with_input else y_RX
    for back, earlier_RX in enumerate(earlier, start=1):
        y_RX += earlier_RX * weight(back)
    return y_RX if bias_X is None else y_RX + bias_X.astype(jnp.float32)[None]
