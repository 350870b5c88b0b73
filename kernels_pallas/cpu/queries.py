"""Writes how a group of queries of one row is attended, block by block (`attention`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import ClassVar

from kernels_pallas.cpu.function import (
    FOUR,
    Function,
    blocks,
    exponential,
    integers,
    of_bfloat16,
    totals,
)

BYTES = {"bfloat16": 2, "float32": 4, "int8": 1}

BLOCK = 128
"""Slots of a block, at most; it has whole pages."""

TILE_QUERIES, TILE_SLOTS, TILE_VECTORS = {8: (3, 1), 16: (4, 3, 1)}, 4, 4
"""Queries (by the floats of a vector), and slots of keys or vectors of values, are multiplied so
many at once: more forms would take longer to make.
"""

MASKED = -1e30
"""Score of a slot that is not seen."""


@dataclass(kw_only=True, slots=True)
class Group:
    """Is a group of queries in the function being written, of which there are `count`: a token's
    one after the other, then the next one's. block: slots of a block.

    On the stack, of each: where it and its result are, in bytes; its position, and how many it
    sees; scores or weights [MOST, BLOCK]; and the running softmax's maximum, sum, and what it
    has just been multiplied with. oldest, newest: the first one's position less what it sees, and
    the last one's, which bound what any of them sees; stop: the last one's slot, plus 1.
    """

    MOST: ClassVar[int] = 24
    """Queries of a row whose scores are held at once."""
    suffix: ClassVar[str] = "head"

    f: Function
    dtype: str
    count: str
    block: str
    offsets: str
    positions: str
    reaches: str
    scores: str
    top: str
    total: str
    shrink: str
    oldest: str
    newest: str
    stop: str

    def begin(self) -> None:
        """Does what is done once for the group."""

    def score(self, begin: str, held: str) -> None:
        """Writes the scores of a block's slots."""
        f = self.f
        with f.each(0, held, "%S") as done:
            page = self._page(f.add(begin, done))
            keys, values = (f.at(of, page.offset) for of in ("%keys", "%values"))
            with f.each(0, f.mul("%S", "%X"), 64) as line:
                f.fetch(f.at(values, line))
            for size, first, stop in blocks(f, self.count, TILE_QUERIES[f.lanes]):
                with f.each(first, stop, size) as query, f.each(0, "%S", TILE_SLOTS) as slot:
                    self._score_tile(keys, [f.add(query, i) for i in range(size)], slot, done)
        self._mask_all(begin, held)

    def _mask_all(self, begin: str, held: str) -> None:
        f = self.f
        with f.each(0, held, "%S") as done:
            page = self._page(f.add(begin, done))
            with f.each(0, self.count, 1) as query:
                position, reach = (
                    f.load("i64", of, f.mul(query, 8)) for of in (self.positions, self.reaches)
                )
                newest = f.add(f.sub(position, page.first), 1)
                oldest, stop = f.sub(newest, reach), f.least(newest, page.held)
                with f.each(0, "%S", f.lanes) as slot:
                    place = f.add(f.mul(query, BLOCK), f.add(done, slot))
                    self._mask(oldest, stop, slot, place)

    def weigh(self, width: str) -> None:
        """Turns scores into weights, and brings sums to the new maximum."""
        f = self.f
        with f.each(0, self.count, 1) as query:
            scores, place = f.at(self.scores, f.mul(query, 4 * BLOCK)), f.mul(query, 4)
            old = f.filled("float", f.load("float", self.top, place, align=4))
            best, total = f.variable(f.vector, align=64), f.variable(f.vector, align=64)
            f.store(f"{f.vector} {old}", best, align=64)
            f.store(f"{f.vector} zeroinitializer", total, align=64)
            with f.each(0, width, f.lanes) as slot:
                here = f.load(f.vector, scores, f.mul(slot, 4), align=64)
                before = f.load(f.vector, best, align=64)
                f.store(f"{f.vector} {f.larger(here, before)}", best, align=64)
            top = f.across(f.larger, f.load(f.vector, best, align=64))
            # Where nothing was seen the largest score is MASKED itself.
            level = f.larger(top, f.constant(MASKED / 2))
            with f.each(0, width, f.lanes) as slot:
                here = f.load(f.vector, scores, f.mul(slot, 4), align=64)
                weight = exponential(f, f.floats("fsub", here, level))
                self._keep(weight, query, slot)
                before = f.load(f.vector, total, align=64)
                f.store(f"{f.vector} {f.floats('fadd', before, weight)}", total, align=64)
            shrink = exponential(f, f.floats("fsub", old, top))
            before = f.filled("float", f.load("float", self.total, place, align=4))
            gained = f.across(partial(f.floats, "fadd"), f.load(f.vector, total, align=64))
            found = f.fma(before, shrink, gained)
            for value, to in ((top, self.top), (shrink, self.shrink), (found, self.total)):
                f.store(f"float {_first(f, value)}", to, place, align=4)

    def _keep(self, weights: str, query: str, slot: str) -> None:
        place = self.f.mul(self.f.add(self.f.mul(query, BLOCK), slot), 4)
        self.f.store(f"{self.f.vector} {weights}", self.scores, place, align=64)

    def gather(self, begin: str, held: str) -> None:
        """Adds weighted values to the results."""
        f = self.f
        width = TILE_VECTORS * f.lanes
        for size, first, stop in blocks(f, self.count, TILE_QUERIES[f.lanes]):
            with f.each(0, "%H", width) as column, f.each(first, stop, size) as query:
                columns = [f.add(column, i * f.lanes) for i in range(TILE_VECTORS)]
                self._gather_tile(columns, [f.add(query, i) for i in range(size)], begin, held)

    def end(self) -> None:
        """Divides the results by the sums of their weights."""
        f = self.f
        with f.each(0, self.count, 1) as query:
            total = f.filled("float", f.load("float", self.total, f.mul(query, 4), align=4))
            y = self._of("%y", query)
            with f.each(0, f.mul("%H", 4), 4 * f.lanes) as place:
                numerator = f.load(f.vector, y, place, align=4)
                f.store(f"{f.vector} {f.floats('fdiv', numerator, total)}", y, place, align=4)

    def _of(self, base: str, query: str) -> str:
        """Returns where a query, or its result, is."""
        return self.f.at(base, self.f.load("i64", self.offsets, self.f.mul(query, 8)))

    def _seen(self, page: Page) -> tuple[str, str]:
        """Returns the first slot of a page that a query sees, and the end of them."""
        f = self.f
        oldest = f.most(f.add(f.sub(self.oldest, page.first), 1), 0)
        return oldest, f.least(f.add(f.sub(self.newest, page.first), 1), page.held)

    def _page(self, slot: str) -> Page:
        """Looks up the page that has a slot of the row's table."""
        f = self.f
        place = f.let(f"sdiv i64 {slot}, %S")
        number, first = (
            f.let(f"sext i32 {f.load('i32', of, f.mul(place, 4), align=4)} to i64")
            for of in ("%table", "%first")
        )
        number = f.most(f.least(f.add("%base", number), "%last"), 0)
        return Page(f.mul(number, "%page"), first, f.least(f.sub(self.stop, slot), "%S"))

    def _score_tile(self, keys: str, queries: Sequence[str], slot: str, done: str) -> None:
        f, dtype = self.f, self.dtype
        of_slots = [f.at(keys, f.mul(f.add(slot, i), "%X")) for i in range(TILE_SLOTS)]
        addresses = [self._of("%q", query) for query in queries]
        sums = [[f.variable(f.vector, align=64) for _ in of_slots] for _ in queries]
        for place in chain(*sums):
            f.store(f"{f.vector} zeroinitializer", place, align=64)
        with f.each(0, "%H", f.lanes) as column:
            read = [f.load(f.vector, q, f.mul(column, 4), align=4) for q in addresses]
            for i, of_slot in enumerate(of_slots):
                key = _read(f, dtype, of_slot, column)
                for q, of_query in zip(read, sums, strict=True):
                    added = f.fma(key, q, f.load(f.vector, of_query[i], align=64))
                    f.store(f"{f.vector} {added}", of_query[i], align=64)
        scales = None
        if dtype == "int8":
            scales = "poison"
            for i, of_slot in enumerate(of_slots):
                scale = _scale(f, of_slot)
                scales = f.let(f"insertelement {FOUR} {scales}, float {scale}, i64 {i}")
        found = totals(f, [[f.load(f.vector, place, align=64) for place in one] for one in sums])
        for query, four in zip(queries, found, strict=True):
            if scales is not None:
                four = f.let(f"fmul {FOUR} {four}, {scales}")
            place = f.add(f.mul(query, BLOCK), f.add(done, slot))
            f.store(f"{FOUR} {four}", self.scores, f.mul(place, 4), align=16)

    def _mask(self, oldest: str, stop: str, slot: str, place: str) -> None:
        """Caps a vector of scores, and masks those of slots that are not seen."""
        f, at = self.f, self.f.at(self.scores, self.f.mul(place, 4))
        with f.where(f.let("fcmp une float %cap, 0.0")):
            cap = f.filled("float", "%cap")
            ratio = f.floats("fdiv", f.load(f.vector, at, align=64), cap)
            # tanh z = 1 - 2 / (e^2z + 1)
            grown = exponential(f, f.floats("fadd", ratio, ratio))
            part = f.floats("fdiv", f.constant(2.0), f.floats("fadd", grown, f.constant(1.0)))
            capped = f.floats("fmul", cap, f.floats("fsub", f.constant(1.0), part))
            f.store(f"{f.vector} {capped}", at, align=64)
        slots = f.let(f"add {f.whole} {_many(f, slot)}, {integers(range(f.lanes))}")
        is_seen = [
            f.let(f"icmp {how} {f.whole} {slots}, {_many(f, bound)}")
            for how, bound in (("sge", oldest), ("slt", stop))
        ]
        both = f.let(f"and <{f.lanes} x i1> {is_seen[0]}, {is_seen[1]}")
        score = f.load(f.vector, at, align=64)
        masked = f.select(both, score, f.constant(MASKED))
        f.store(f"{f.vector} {masked}", at, align=64)

    def _gather_tile(
        self, columns: Sequence[str], queries: Sequence[str], begin: str, held: str
    ) -> None:
        f = self.f
        results = [self._of("%y", query) for query in queries]
        sums = [[f.variable(f.vector, align=64) for _ in columns] for _ in queries]
        for query, y, of_query in zip(queries, results, sums, strict=True):
            shrink = f.load("float", self.shrink, f.mul(query, 4), align=4)
            shrink = f.filled("float", shrink)
            for column, place in zip(columns, of_query, strict=True):
                before = f.load(f.vector, y, f.mul(column, 4), align=4)
                f.store(f"{f.vector} {f.floats('fmul', before, shrink)}", place, align=64)
        with f.each(0, held, "%S") as done:
            page = self._page(f.add(begin, done))
            # Keys of the next block are fetched meanwhile: those of the same places.
            following = f.least(f.add(f.add(begin, done), self.block), f.add(self.stop, -1))
            later = f.at("%keys", self._page(following).offset)
            # Not those that no query sees: what they hold may be anything.
            with f.each(*self._seen(page), 1) as slot:
                in_page = f.mul(slot, "%X")
                f.fetch(f.at(later, f.add(in_page, f.mul(columns[0], BYTES[self.dtype]))))
                values = f.at("%values", f.add(page.offset, in_page))
                scale = _scale(f, values) if self.dtype == "int8" else None
                read = [_read(f, self.dtype, values, column) for column in columns]
                for query, of_query in zip(queries, sums, strict=True):
                    place = f.add(f.mul(query, BLOCK), f.add(done, slot))
                    weight = f.load("float", self.scores, f.mul(place, 4), align=4)
                    if scale is not None:
                        weight = f.let(f"fmul float {weight}, {scale}")
                    weight = f.filled("float", weight)
                    for value, to in zip(read, of_query, strict=True):
                        added = f.fma(value, weight, f.load(f.vector, to, align=64))
                        f.store(f"{f.vector} {added}", to, align=64)
        for y, of_query in zip(results, sums, strict=True):
            for column, place in zip(columns, of_query, strict=True):
                found = f.load(f.vector, place, align=64)
                f.store(f"{f.vector} {found}", y, f.mul(column, 4), align=4)


@dataclass(frozen=True, slots=True)
class Page:
    """Says where a page is, in bytes, the position of its first slot, and how many of its slots
    come before the group's `stop`.
    """

    offset: str
    first: str
    held: str


def _read(f: Function, dtype: str, address: str, column: str) -> str:
    """Reads a vector of a key or value, as float32."""
    if dtype == "bfloat16":
        return of_bfloat16(f, address, f.mul(column, 2))
    if dtype == "float32":
        return f.load(f.vector, address, f.mul(column, 4), align=4)
    stored = f.load(f"<{f.lanes} x i8>", address, column, align=1)
    return f.let(
        f"sitofp {f.whole} {f.let(f'sext <{f.lanes} x i8> {stored} to {f.whole}')} to {f.vector}"
    )


def _scale(f: Function, address: str) -> str:
    """Reads what the numbers of a key or value of int8 are multiplied with."""
    bits = f.let(f"zext i16 {f.load('i16', address, '%H', align=1)} to i32")
    return f.let(f"bitcast i32 {f.let(f'shl i32 {bits}, 16')} to float")


def _many(f: Function, number: str) -> str:
    return f.filled("i32", f.let(f"trunc i64 {number} to i32"))


def _first(f: Function, vector: str) -> str:
    return f.let(f"extractelement {f.vector} {vector}, i64 0")
