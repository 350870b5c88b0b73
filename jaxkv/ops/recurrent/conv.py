"""Convolves each channel with the last few tokens of its row."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxkv.axes import Array
from jaxkv.ops.recurrent.rows import Rows, read, write


def short_conv(
    x_TX: Array, kernel_XK: Array, pool: Array, where: Rows, bias_X: Array | None = None
) -> tuple[Array, Array]:
    """Computes y[t] = sum over j of kernel[:, K-1-j] * x[t-j], plus the bias, within each row.

    Here X is channels, and K the kernel's width. pool: the last K-1 inputs of each row, oldest
    first, [layers * num_slots, X, K-1].
    Returns (y [T, X] float32, the pool with the step's inputs). What is before a row's first token
    counts as 0. Source: the causal depthwise convolution of Mamba, arXiv 2312.00752, section 3.4.
    """
    batch, kernel_XK = where.batch, kernel_XK.astype(jnp.float32)
    if where.after_BA is not None and not batch.decode_only:
        return _convolve_each(x_TX, kernel_XK, pool, where, bias_X)
    x_TX, (num_tokens, num_before) = x_TX.astype(jnp.float32), (x_TX.shape[0], pool.shape[2])
    tail_BXJ = read(pool, where.index_B, where.is_new_B)
    start_B, count_B = jnp.asarray(batch.start_B), jnp.asarray(batch.count_B)
    y_TX = x_TX * kernel_XK[None, :, num_before]
    if not batch.decode_only:
        row_T = jnp.asarray(batch.row_T)
        offset_T = jnp.arange(num_tokens) - start_B.at[row_T].get(mode="clip")
        for back in range(1, min(num_before, num_tokens - 1) + 1):
            earlier_TX = jnp.pad(x_TX[:-back], ((back, 0), (0, 0)))
            within_T1 = (offset_T >= back)[:, None]
            y_TX += jnp.where(within_T1, earlier_TX, 0) * kernel_XK[None, :, num_before - back]
    # What comes from before the step reaches the first tokens of each row only.
    for offset in range(1 if batch.decode_only else num_before):
        own_1XJ = kernel_XK[None, :, : num_before - offset]
        y_BX = (tail_BXJ[:, :, offset:] * own_1XJ).sum(axis=2)
        if batch.decode_only:
            y_TX += y_BX
            break
        token_B = jnp.where(offset < count_B, start_B + offset, num_tokens)
        y_TX = y_TX.at[token_B].add(y_BX, mode="drop")
    if bias_X is not None:
        y_TX += bias_X.astype(jnp.float32)[None]
    # The new tail: inputs count - J to count - 1 of the step, or what was there before.
    from_BJ = count_B[:, None] - num_before + jnp.arange(num_before)[None]
    new_BJX = x_TX.at[jnp.where(from_BJ < 0, 0, start_B[:, None] + from_BJ)].get(mode="clip")
    place_BJ = jnp.clip(from_BJ + num_before, 0, num_before - 1)
    old_BXJ = jnp.take_along_axis(tail_BXJ, place_BJ[:, None, :], axis=2)
    tail_BXJ = jnp.where((from_BJ < 0)[:, None, :], old_BXJ, new_BJX.transpose(0, 2, 1))
    return y_TX, write(pool, where.written_BA[:, 0], tail_BXJ)


def _convolve_each(
    x_TX: Array, kernel_XK: Array, pool: Array, where: Rows, bias_X: Array | None
) -> tuple[Array, Array]:
    """Takes the rows token by token, as steps with one token of each do, and stores the last inputs
    after each.
    """
    start_B, count_B = jnp.asarray(where.batch.start_B), jnp.asarray(where.batch.count_B)
    x_TX, written_BA, num_before = x_TX.astype(jnp.float32), where.written_BA, pool.shape[2]

    def token(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        tail_BXJ, y_TX, pool = carry
        token_B = jnp.where(j < count_B, start_B + j, x_TX.shape[0])
        x_BX = x_TX.at[token_B].get(mode="fill", fill_value=0)
        y_BX = x_BX * kernel_XK[None, :, num_before]
        y_BX += (tail_BXJ * kernel_XK[None, :, :num_before]).sum(axis=2)
        tail_BXJ = jnp.concatenate([tail_BXJ, x_BX[:, :, None]], axis=2)[:, :, 1:]
        pool = write(pool, written_BA[:, j], tail_BXJ)
        return tail_BXJ, y_TX.at[token_B].set(y_BX, mode="drop"), pool

    tail_BXJ = read(pool, where.index_B, where.is_new_B)
    carry = (tail_BXJ, jnp.zeros_like(x_TX), pool)
    _, y_TX, pool = jax.lax.fori_loop(0, jnp.max(count_B), token, carry)
    return (y_TX if bias_X is None else y_TX + bias_X.astype(jnp.float32)[None]), pool
