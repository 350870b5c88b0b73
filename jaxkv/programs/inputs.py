"""Inputs of steps and loops that ask for nothing, to fill in or to take shapes from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxkv.config import MAX_INT32, EngineConfig, SamplingParams
from jaxkv.kv.policies import get_policy
from jaxkv.kv.state import PagedKV, PageTables
from jaxkv.ops.attention import Batch
from jaxkv.ops.sampling import NO_TOKEN, NUM_BIASES, NUM_STOP_TOKENS, Sampling
from jaxkv.processes import to_devices
from jaxkv.programs.loop import Rows
from jaxkv.programs.step import Newest


def empty_batch(num_tokens: int, num_rows: int) -> Batch:
    """Makes a batch of padding (numpy), to fill in or to take shapes from."""
    return Batch(
        token_T=_full((num_tokens,), 0),
        position_T=_full((num_tokens,), 0),
        row_T=_full((num_tokens,), num_rows),
        start_B=_full((num_rows,), 0),
        count_B=_full((num_rows,), 0),
        num_decode=_full((), 0),
        num_rows=_full((), 0),
        target_T=_full((num_tokens,), NO_TOKEN),
    )


def next_chunks(left: Mapping[int, np.ndarray], num_tokens: int) -> dict[int, np.ndarray]:
    """Returns what a step of at most `num_tokens` takes of each row's tokens, rows with a single
    one first.
    """
    chunks = {}
    for row, ids in left.items():
        if num_tokens:
            chunks[row] = ids[:num_tokens]
            num_tokens -= len(chunks[row])
    return dict(sorted(chunks.items(), key=lambda chunk: len(chunk[1]) > 1))


def packed_batch(
    chunks: Sequence[Sequence[int] | np.ndarray],
    positions: Sequence[int],
    num_tokens: int,
    num_rows: int,
) -> Batch:
    """Returns a batch of the next tokens of some rows, each from its position on, and of padding.

    Chunks of a single token come first.
    """
    batch, start = empty_batch(num_tokens, num_rows), 0
    for row, (ids, position) in enumerate(zip(chunks, positions, strict=True)):
        end = start + len(ids)
        batch.token_T[start:end] = ids
        batch.position_T[start:end] = np.arange(position, position + len(ids))
        batch.row_T[start:end] = row
        batch.start_B[row] = start
        batch.count_B[row] = len(ids)
        start = end
    batch.num_decode[...] = sum(len(ids) == 1 for ids in chunks)
    batch.num_rows[...] = len(chunks)
    return batch


def bind_tables(
    kv: PagedKV,
    pages: Sequence[Sequence[int]],
    lengths: Sequence[int],
    *,
    num_rows: int,
    width: int,
    page_size: int,
    sharding: jax.sharding.Sharding | None = None,
) -> PagedKV:
    """Returns the state with these rows, and padding up to `num_rows`: the pages of each in order,
    and its tokens that they hold.

    sharding: where the tables go; numpy arrays without one.
    """
    table_BW, len_B = np.zeros((num_rows, width), np.int32), np.zeros(num_rows, np.int32)
    for row, (own, length) in enumerate(zip(pages, lengths, strict=True)):
        table_BW[row, : len(own)], len_B[row] = own, length
    first_BW = np.tile(np.arange(width, dtype=np.int32) * page_size, (num_rows, 1))

    tables: Any = (table_BW, first_BW, len_B)
    if sharding is not None:
        tables = [to_devices(x, sharding) for x in tables]
    return replace(kv, rows=(PageTables(*tables),))


def empty_sampling(
    num_rows: int, *, vocab_size: int, max_len: int, make: Callable[..., Any] | None = None
) -> Sampling:
    """Makes greedy parameters for every row; numpy arrays, or what `make(shape, value,
    dtype=int32)` makes of them.
    """
    full = _full if make is None else make
    return Sampling(
        temperature_B=full((num_rows,), 0, np.float32),
        top_k_B=full((num_rows,), MAX_INT32),
        top_p_B=full((num_rows,), 1, np.float32),
        min_p_B=full((num_rows,), 0, np.float32),
        seed_B2=full((num_rows, 2), 0, np.uint32),
        sample_B=full((num_rows,), 0),
        stop_BE=full((num_rows, NUM_STOP_TOKENS), NO_TOKEN),
        ignored_B=full((num_rows,), NO_TOKEN),
        min_left_B=full((num_rows,), 0),
        logprobs_B=full((num_rows,), False, np.bool_),
        masked_B=full((num_rows,), False, np.bool_),
        allowed_BM=full((num_rows, -(-vocab_size // 32)), 0, np.uint32),
        bias_id_BE=full((num_rows, NUM_BIASES), NO_TOKEN),
        bias_BE=full((num_rows, NUM_BIASES), 0, np.float32),
        repetition_B=full((num_rows,), 1, np.float32),
        frequency_B=full((num_rows,), 0, np.float32),
        presence_B=full((num_rows,), 0, np.float32),
        history_BN=full((num_rows, max_len), NO_TOKEN),
        prompt_len_B=full((num_rows,), 0),
    )


def set_drawn(
    sampling: Sampling,
    row: int,
    params: SamplingParams,
    *,
    stop_ids: Collection[int],
    seed: int,
    sample: int,
) -> None:
    """Sets how a row's tokens are drawn and which of them end it, in arrays of numpy."""
    sampling.temperature_B[row] = params.temperature
    sampling.top_k_B[row] = params.top_k if params.top_k > 0 else MAX_INT32
    sampling.top_p_B[row] = params.top_p
    sampling.min_p_B[row] = params.min_p
    sampling.seed_B2[row] = divmod(seed, 2**32)
    sampling.sample_B[row] = sample
    sampling.stop_BE[row] = NO_TOKEN
    sampling.stop_BE[row, : len(stop_ids)] = sorted(stop_ids)


def empty_rows(num_rows: int) -> Rows:
    """Makes resting rows (numpy)."""
    return Rows(
        token_B=_full((num_rows,), 0),
        position_B=_full((num_rows,), 0),
        budget_B=_full((num_rows,), 0),
    )


def empty_newest(num_engine_rows: int, num_rows: int) -> Newest:
    """Says that no row has sampled anything, and that all of the step's are padding (numpy)."""
    return Newest(
        token_R=_full((num_engine_rows,), NO_TOKEN), row_B=_full((num_rows,), num_engine_rows)
    )


def abstract_full(shape: tuple[int, ...], value: int, dtype: Any = np.int32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _full(shape: tuple[int, ...], value: int, dtype: Any = np.int32) -> Any:
    """Makes a numpy array where a type says jax.Array: an input of a compiled program may be
    either.
    """
    return np.full(shape, value, dtype)


def empty_tables(
    config: EngineConfig, num_rows: int, make: Callable[..., Any]
) -> tuple[PageTables, ...]:
    """Returns tables of rows without pages, as `make(shape, value)` makes their arrays: one for
    each window of the config, and what its policy asks for.
    """

    def of(width: int) -> PageTables:
        table_BW = make((num_rows, width), 0)
        return PageTables(table_BW, table_BW, make((num_rows,), 0))

    policy = get_policy(config.kv_policy)
    tables = of(config.table_width)
    if config.has_contexts:
        tables = replace(tables, context_B=make((num_rows,), 0))
    if config.has_states:
        tables = replace(tables, slot_B=make((num_rows,), 0))
    if config.num_adapters:
        tables = replace(tables, adapter_B=make((num_rows,), config.num_adapters))
    if policy is not None:
        tables = replace(
            tables,
            low=of(config.low_row_pages) if policy.low else None,
            since_B=make((num_rows,), 0) if policy.observes != 0 else None,
            focused=policy.focused,
        )
    return (tables,) * len(config.windows)
