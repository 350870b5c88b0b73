"""Runs a recurrent rule over the rows of a ragged step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.axes import Array
from jaxkv.ops.recurrent.base import Rule
from jaxkv.ops.recurrent.rows import NOWHERE, Rows, read, write

DECODE_ROWS = 8
"""Rows that take their one token together: the states of so many are in flight at once."""

SHORT = 32
"""Tokens of a block where no more of a row are left in a step, on a CPU: elsewhere blocks are as
long whatever is left, as XLA for TPUs copies all states around a condition.
"""


def run(rule: Rule, inputs_T: Any, pool: Array, where: Rows) -> tuple[Array, Array]:
    """Applies the rule to every token of the step, and stores the rows' states.

    inputs_T: a pytree of arrays [T, ...]. pool: states [layers * num_slots, ...].
    Returns (outputs [T, ...] float32, 0 for padding tokens; the pool, in which nothing but these
    rows' states has changed). Rows with one token are taken several at a time; longer ones in
    blocks of up to `rule.block_len` tokens, one after the other, as many as there are. Cost: what
    is computed in between is of the size of a block. Where the state after each token is wanted
    (`Rows.after_BA`) all rows go token by token, as they do in steps with one token of each.
    """
    num_tokens, num_rows = jax.tree.leaves(inputs_T)[0].shape[0], where.slot_B.shape[0]
    shapes = jax.eval_shape(rule.step, _states_of(pool, num_tokens), inputs_T)
    y_T = jnp.zeros(shapes[1].shape, jnp.float32)
    if where.after_BA is not None and not where.batch.decode_only:
        return _run_each(rule, inputs_T, y_T, pool, where, min(DECODE_ROWS, num_rows))
    y_T, pool = _run_single(rule, inputs_T, y_T, pool, where, min(DECODE_ROWS, num_rows))
    if where.batch.decode_only:
        return y_T, pool
    return _run_chunks(rule, inputs_T, y_T, pool, where, rule.block_len)


def _states_of(pool: Array, num_rows: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((num_rows, *pool.shape[1:]), jnp.float32)


def _run_single(
    rule: Rule, inputs_T: Any, y_T: Array, pool: Array, where: Rows, size: int
) -> tuple[Array, Array]:
    """Takes the rows with one token, which come first, `size` at a time."""
    num_decode, index_B, is_new_B = where.batch.num_decode, where.index_B, where.is_new_B
    written_B = where.written_BA[:, 0]
    # As many tokens as rows at least are there to be sliced.
    missing = max(0, index_B.shape[0] - y_T.shape[0])
    padded_T, y_T = jax.tree.map(lambda x: _padded(x, missing), (inputs_T, y_T))

    def some(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        y_T, pool = carry
        # The last ones start early rather than end late: those of before are left alone.
        start = jnp.minimum(i * size, index_B.shape[0] - size)
        row_R = start + jnp.arange(size)
        is_now_R = (row_R >= i * size) & (row_R < num_decode)
        index_R = jnp.where(is_now_R, _slice(index_B, start, size), NOWHERE)
        state_R = read(pool, index_R, _slice(is_new_B, start, size))
        state_R, y_R = rule.step(state_R, _cleared(padded_T, start, index_R < NOWHERE))
        y_T = _replaced(y_T, start, is_now_R, y_R)
        written_R = jnp.where(is_now_R, _slice(written_B, start, size), NOWHERE)
        return y_T, write(pool, written_R, state_R)

    y_T, pool = jax.lax.fori_loop(0, -(-num_decode // size), some, (y_T, pool))
    return y_T[: y_T.shape[0] - missing], pool


def _run_each(
    rule: Rule, inputs_T: Any, y_T: Array, pool: Array, where: Rows, size: int
) -> tuple[Array, Array]:
    """Takes all rows token by token, `size` rows at a time, and stores the state after each."""
    index_B, is_new_B, written_BA = where.index_B, where.is_new_B, where.written_BA
    start_B, count_B = where.batch.start_B, where.batch.count_B
    num_rows = index_B.shape[0]

    def some(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        # The last ones start early rather than end late: those of before are left alone.
        first = jnp.minimum(i * size, num_rows - size)
        is_now_R = first + jnp.arange(size) >= i * size
        index_R = jnp.where(is_now_R, _slice(index_B, first, size), NOWHERE)
        count_R = jnp.where(index_R < NOWHERE, _slice(count_B, first, size), 0)
        start_R, written_RA = _slice(start_B, first, size), _slice(written_BA, first, size)

        def token(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            state_R, y_T, pool = carry
            is_token_R = j < count_R
            token_R = jnp.where(is_token_R, start_R + j, y_T.shape[0])
            state_R, y_R = rule.step(state_R, _taken(inputs_T, token_R))
            pool = write(pool, jnp.where(is_token_R, written_RA[:, j], NOWHERE), state_R)
            return state_R, y_T.at[token_R].set(y_R, mode="drop"), pool

        state_R = read(pool, index_R, _slice(is_new_B, first, size))
        _, *found = jax.lax.fori_loop(0, jnp.max(count_R), token, (state_R, *carry))
        return found[0], found[1]

    return jax.lax.fori_loop(0, -(-num_rows // size), some, (y_T, pool))


def _run_chunks(
    rule: Rule, inputs_T: Any, y_T: Array, pool: Array, where: Rows, size: int
) -> tuple[Array, Array]:
    """Takes the rows with several tokens, `size` tokens of one of them at a time.

    How long a block is depends on the row's own tokens, and they come first in it: in which order a
    matmul adds up depends on both.
    """
    num_tokens = y_T.shape[0]
    padded_T, y_T = jax.tree.map(lambda x: _padded(x, size), (inputs_T, y_T))
    batch, index_B, is_new_B = where.batch, where.index_B, where.is_new_B
    is_chunk_B = jnp.arange(index_B.shape[0]) >= batch.num_decode
    blocks_B = jnp.where(is_chunk_B & (index_B < NOWHERE), -(-batch.count_B // size), 0)
    end_B = jnp.cumsum(blocks_B)

    def short(state: Array, own_C: Any) -> tuple[Array, Array]:
        state, y_C = rule.block(state, jax.tree.map(lambda x: x[:SHORT], own_C))
        return state, _padded(y_C, size - SHORT)

    def by_length(length: Array, state: Array, own_C: Any) -> tuple[Array, Array]:
        return jax.lax.cond(length <= SHORT, short, rule.block, state, own_C)

    def block(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        y_T, pool = carry
        row = jnp.searchsorted(end_B, i, side="right")
        number = i - (end_B - blocks_B)[row]
        begin = batch.start_B[row] + number * size
        end = batch.start_B[row] + jnp.minimum((number + 1) * size, batch.count_B[row])
        is_own_C = begin + jnp.arange(size) < end  # tokens of other rows count as zeros
        is_first = is_new_B[row] & (number == 0)
        state = read(pool, index_B[row, None], is_first[None])[0]
        # Else XLA:CPU computes inputs again inside of each product.
        own_C = jax.lax.optimization_barrier(_cleared(padded_T, begin, is_own_C))
        if size <= SHORT:
            state, y_C = rule.block(state, own_C)
        elif num_tokens <= SHORT:
            state, y_C = short(state, own_C)
        else:
            state, y_C = jax.lax.platform_dependent(
                end - begin,
                state,
                own_C,
                cpu=by_length,
                default=lambda _, *given: rule.block(*given),
            )
        return _replaced(y_T, begin, is_own_C, y_C), write(pool, index_B[row, None], state[None])

    y_T, pool = jax.lax.fori_loop(0, end_B[-1], block, (y_T, pool))
    return y_T[: y_T.shape[0] - size], pool


def _padded(x: Array, missing: int) -> Array:
    return jnp.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1))) if missing else x


def _slice(x: Array, start: Array, size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size)


def _cleared(inputs_T: Any, start: Array, is_real_C: Array) -> Any:
    """Returns the inputs of some tokens, zeros where there is none."""

    def of(x: Array) -> Array:
        x_C = _slice(x, start, is_real_C.shape[0]).astype(jnp.float32)
        return jnp.where(is_real_C.reshape(-1, *[1] * (x.ndim - 1)), x_C, 0)

    return jax.tree.map(of, inputs_T)


def _taken(inputs_T: Any, token_R: Array) -> Any:
    """Returns the inputs of these tokens, zeros of those past the last."""

    def of(x: Array) -> Array:
        return x.at[token_R].get(mode="fill", fill_value=0).astype(jnp.float32)

    return jax.tree.map(of, inputs_T)


def _replaced(y_T: Array, start: Array, is_real_C: Array, y_C: Array) -> Array:
    """Returns the outputs with those of the real ones of some tokens."""
    is_real_C = is_real_C.reshape(-1, *[1] * (y_T.ndim - 1))
    kept_C = jnp.where(is_real_C, y_C, _slice(y_T, start, is_real_C.shape[0]))
    return jax.lax.dynamic_update_slice_in_dim(y_T, kept_C, start, axis=0)
