"""Reads the decode kernel's list of work out of scalar memory, which holds all of it or, where it
does not fit, the records of the next few items, fetched from HBM one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.tpu.block import rest
from kernels_pallas.tpu.schedule import RECORD_FIELDS, RECORD_IDS
from kernels_pallas.tpu.tiles import SLOTS

RECORDS = 8
"""Items whose records are in scalar memory, or on their way there, where not all are."""

RECORDS_AHEAD = RECORDS - 2
"""How far ahead of its block a record is asked for: the one before the block is still in use."""


class Held(NamedTuple):
    """Holds the lists of `DecodeItems`, and the flat table, in scalar memory."""

    row: Any
    start: Any
    low: Any
    high: Any
    new: Any
    first: Any
    table: Any


class Work(NamedTuple):
    """Tells what `DecodeItems` says of an item, and its page ids. begin() comes first,
    await_next(item) before an item: those of item + SLOTS can be read then; end(item) comes last,
    with the first item that was not worked on.
    """

    row: Callable[[jax.Array], jax.Array]
    low: Callable[[jax.Array], jax.Array]
    high: Callable[[jax.Array], jax.Array]
    new: Callable[[jax.Array], jax.Array]
    first: Callable[[jax.Array], jax.Array]
    pages: Callable[[jax.Array], Callable[[int | jax.Array], jax.Array]]
    begin: Callable[[], None] = lambda: None
    await_next: Callable[[jax.Array], None] = lambda item: None
    end: Callable[[jax.Array], None] = lambda item: None


def held_work(held: Held) -> Work:
    """Reads all from scalar memory."""

    def of(ref: Any) -> Callable[[jax.Array], jax.Array]:
        return lambda item: ref[item]

    def pages(item: jax.Array) -> Callable[[int | jax.Array], jax.Array]:
        start = held.start[item]  # once: between two DMAs the compiler would read it again
        return lambda i: held.table[start + i]

    return Work(
        row=of(held.row),
        low=of(held.low),
        high=of(held.high),
        new=of(held.new),
        first=of(held.first),
        pages=pages,
    )


def streamed_work(records: Any, ring: Any, asked: Any) -> Work:
    """Reads one record after the other from HBM into `ring`; asked: a semaphore for each of its
    places.
    """

    def ask(number: int | jax.Array) -> Any:
        item = jnp.int32(number)
        slot = rest(item, RECORDS)
        known = jnp.minimum(item, records.shape[0] - 1)  # the last one is of nothing
        return pltpu.make_async_copy(records.at[known], ring.at[slot], asked.at[slot])

    def field(number: int | jax.Array, item: jax.Array) -> jax.Array:
        return ring[rest(item, RECORDS), 0, number]

    def of(name: str) -> Callable[[jax.Array], jax.Array]:
        return partial(field, RECORD_FIELDS.index(name))

    def begin() -> None:
        for i in range(RECORDS_AHEAD):
            ask(i).start()
        for i in range(SLOTS):
            ask(i).wait()

    def await_next(item: jax.Array) -> None:
        ask(item + RECORDS_AHEAD).start()
        ask(item + SLOTS).wait()

    def end(item: jax.Array) -> None:
        for i in range(SLOTS, RECORDS_AHEAD):
            ask(item + i).wait()

    return Work(
        row=of("row"),
        low=of("low"),
        high=of("high"),
        new=of("new"),
        first=of("first"),
        pages=lambda item: lambda i: field(RECORD_IDS + i, item),
        begin=begin,
        await_next=await_next,
        end=end,
    )
