"""Writes how a group of queries of a chunk is attended where pages are bfloat16 and a processor
multiplies that (AVX-512 BF16): queries and weights are rounded to it, as XLA does in chunks.

An instruction multiplies 16 pairs of numbers with one pair and adds both products to 16 sums. So
keys of 64 slots are first turned, slots across the lanes, in pairs of columns; and values of two
slots are laid side by side, 64 columns of a block at once. All queries of the group are multiplied
with both. Sums are in an order that nothing but the slots of the row's table decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import ClassVar

from kernels_pallas.cpu.function import SIXTEEN, Function, blocks
from kernels_pallas.cpu.queries import BLOCK, Group

WHOLE, HALF, PAIRS = "<16 x i32>", "<16 x bfloat>", "<32 x bfloat>"

DECLARED = (
    f"declare {SIXTEEN} @llvm.x86.avx512bf16.dpbf16ps.512({SIXTEEN}, {PAIRS}, {PAIRS})",
    f"declare {HALF} @llvm.x86.avx512bf16.cvtneps2bf16.512({SIXTEEN})",
)
"""The functions call these too."""

LONGEST = 512
"""Numbers of a head, at most."""

VECTORS, PART = 4, 64
"""So many vectors of slots or columns are multiplied at once: that many of either."""

TILE_QUERIES = (6, 1)


@dataclass(kw_only=True, slots=True)
class Chunk(Group):
    """Is a group of queries whose products are of bfloat16.

    On the stack: queries [MOST, LONGEST] and weights [MOST, BLOCK] of bfloat16; keys of 64 slots
    [LONGEST / 2, 64] and 64 columns of a block's values [BLOCK / 2, 64], in pairs.
    """

    MOST: ClassVar[int] = 48
    suffix: ClassVar[str] = "chunk"

    queries: str = field(init=False)
    weights: str = field(init=False)
    turned: str = field(init=False)
    paired: str = field(init=False)

    def __post_init__(self) -> None:
        def room(numbers: int) -> str:
            return self.f.variable(f"[{numbers} x bfloat]", align=64)

        self.queries, self.weights = room(self.MOST * LONGEST), room(self.MOST * BLOCK)
        self.turned, self.paired = room(LONGEST * PART), room(BLOCK * PART)

    def begin(self) -> None:
        f = self.f
        with f.each(0, self.count, 1) as query:
            given, to = self._of("%q", query), f.at(self.queries, f.mul(query, 2 * LONGEST))
            with f.each(0, "%H", 16) as column:
                numbers = f.load(SIXTEEN, given, f.mul(column, 4), align=4)
                self._store_rounded(numbers, f.at(to, f.mul(column, 2)))

    def score(self, begin: str, held: str) -> None:
        f = self.f
        with f.each(0, held, PART) as part:
            with f.each(0, f.least(f.sub(held, part), PART), 16) as piece:
                self._turn(f.add(begin, f.add(part, piece)), piece)
            for size, first, stop in blocks(f, self.count, TILE_QUERIES):
                with f.each(first, stop, size) as query:
                    numbers = [f.add(query, i) for i in range(size)]
                    of_query = [f.mul(number, 2 * LONGEST) for number in numbers]
                    sums = [[self._zero() for _ in range(VECTORS)] for _ in numbers]
                    self._multiply(self.queries, of_query, self.turned, f.mul("%H", 2), sums)
                    for number, row in zip(numbers, sums, strict=True):
                        place = f.mul(f.add(f.mul(number, BLOCK), part), 4)
                        self._store_sums(row, f.at(self.scores, place))
        self._mask_all(begin, held)

    def gather(self, begin: str, held: str) -> None:
        f = self.f
        width = f.mul(f.divided(held, "%S"), "%S")
        with f.each(0, "%H", PART) as column:
            with f.each(0, width, 16) as piece:
                self._pair(f.add(begin, piece), piece, column)
            for size, first, stop in blocks(f, self.count, TILE_QUERIES):
                with f.each(first, stop, size) as query:
                    numbers = [f.add(query, i) for i in range(size)]
                    of_query = [f.mul(number, 2 * BLOCK) for number in numbers]
                    results = [f.at(self._of("%y", one), f.mul(column, 4)) for one in numbers]
                    sums = [self._shrunk(*one) for one in zip(numbers, results, strict=True)]
                    self._multiply(self.weights, of_query, self.paired, f.mul(width, 2), sums)
                    for y, row in zip(results, sums, strict=True):
                        self._store_sums(row, y)

    def _keep(self, weights: str, query: str, slot: str) -> None:
        place = self.f.mul(self.f.add(self.f.mul(query, BLOCK), slot), 2)
        self._store_rounded(weights, self.f.at(self.weights, place))

    def _store_rounded(self, numbers: str, to: str) -> None:
        f = self.f
        call = f"call {HALF} @llvm.x86.avx512bf16.cvtneps2bf16.512({SIXTEEN} {numbers})"
        f.store(f"{HALF} {f.let(call)}", to, align=32)

    def _zero(self) -> str:
        place = self.f.variable(SIXTEEN, align=64)
        self.f.store(f"{SIXTEEN} zeroinitializer", place, align=64)
        return place

    def _shrunk(self, query: str, y: str) -> list[str]:
        """Returns sums that go on from a query's result, brought to its new maximum."""
        f, places = self.f, [self.f.variable(SIXTEEN, align=64) for _ in range(VECTORS)]
        shrink = f.filled("float", f.load("float", self.shrink, f.mul(query, 4), align=4))
        for i, place in enumerate(places):
            before = f.load(SIXTEEN, y, 64 * i, align=4)
            f.store(f"{SIXTEEN} {f.floats('fmul', before, shrink)}", place, align=64)
        return places

    def _store_sums(self, sums: Sequence[str], to: str) -> None:
        for i, place in enumerate(sums):
            value = self.f.load(SIXTEEN, place, align=64)
            self.f.store(f"{SIXTEEN} {value}", to, 64 * i, align=4)

    def _multiply(
        self,
        rows: str,
        of_query: Sequence[str],
        pairs: str,
        width: str,
        sums: Sequence[Sequence[str]],
    ) -> None:
        """Adds the products of some queries' rows, `width` bytes from their places on, with pairs
        [width / 4, PART] to sums.
        """
        f = self.f
        with f.each(0, width, 4) as pair:
            across = f.at(pairs, f.mul(pair, PART))
            read = [f.load(PAIRS, across, 64 * i, align=64) for i in range(VECTORS)]
            for place, of_row in zip(of_query, sums, strict=True):
                one = f.load("i32", rows, f.add(place, pair), align=4)
                one = f.let(f"bitcast {WHOLE} {f.filled('i32', one)} to {PAIRS}")
                for two, to in zip(read, of_row, strict=True):
                    before = f.load(SIXTEEN, to, align=64)
                    operands = f"{SIXTEEN} {before}, {PAIRS} {one}, {PAIRS} {two}"
                    added = f"call {SIXTEEN} @llvm.x86.avx512bf16.dpbf16ps.512({operands})"
                    f.store(f"{SIXTEEN} {f.let(added)}", to, align=64)

    def _turn(self, slot: str, piece: str) -> None:
        """Writes 16 keys as columns."""
        f = self.f
        in_page = f.let(f"srem i64 {slot}, %S")
        keys = f.at("%keys", f.add(self._page(slot).offset, f.mul(in_page, "%X")))
        to = f.at(self.turned, f.mul(piece, 4))
        with f.each(0, f.mul("%H", 2), 64) as column:
            rows = [f.load(WHOLE, keys, f.add(f.mul(i, "%X"), column), align=2) for i in range(16)]
            for i, turned in enumerate(_transposed(f, rows)):
                place = f.mul(f.add(column, 4 * i), PART)
                f.store(f"{WHOLE} {turned}", to, place, align=64)

    def _pair(self, slot: str, piece: str, column: str) -> None:
        """Writes columns of 16 slots' values, those of two slots side by side, zeros for slots that
        no query sees: what they hold may be anything.
        """
        f = self.f
        in_page = f.let(f"srem i64 {slot}, %S")
        page = self._page(f.sub(slot, in_page))
        oldest, stop = self._seen(page)
        values = f.at("%values", f.add(page.offset, f.mul(column, 2)))
        with f.each(0, 16, 2) as i:
            to = f.at(self.paired, f.mul(f.add(piece, i), 2 * PART))
            slots = [f.add(in_page, f.add(i, odd)) for odd in (0, 1)]
            is_seen = [
                f.let(
                    f"and i1 {f.let(f'icmp sge i64 {one}, {oldest}')}, "
                    f"{f.let(f'icmp slt i64 {one}, {stop}')}"
                )
                for one in slots
            ]
            for half in (0, 1):
                both = []
                for one, seen in zip(slots, is_seen, strict=True):
                    place = f.add(f.mul(one, "%X"), 64 * half)
                    number = f.load("<32 x i16>", values, place, align=2)
                    choice = f"i1 {seen}, <32 x i16> {number}, <32 x i16> zeroinitializer"
                    both.append(f.let(f"select {choice}"))
                for quarter in (0, 16):
                    lanes = chain(*((j, j + 32) for j in range(quarter, quarter + 16)))
                    pairs = f.shuffle("<32 x i16>", both[0], both[1], list(lanes))
                    f.store(f"<32 x i16> {pairs}", to, 128 * half + 4 * quarter, align=64)


def _transposed(f: Function, rows: Sequence[str]) -> list[str]:
    """Returns the columns of 16 vectors of whole numbers."""

    def mixed(two: Sequence[str], lanes: Sequence[int]) -> str:
        a, b = two
        return f.shuffle(WHOLE, a, b, lanes)

    def in_quarters(lanes: Sequence[int]) -> list[int]:
        return [4 * quarter + lane for quarter in range(4) for lane in lanes]

    low, high = in_quarters((0, 16, 1, 17)), in_quarters((2, 18, 3, 19))
    two = [mixed(rows[i : i + 2], lanes) for i in range(0, 16, 2) for lanes in (low, high)]
    low, high = in_quarters((0, 1, 16, 17)), in_quarters((2, 3, 18, 19))
    four = [
        mixed((two[i + j], two[i + j + 2]), lanes)
        for i in range(0, 16, 4)
        for j in (0, 1)
        for lanes in (low, high)
    ]  # four[i + c] has in quarter k column 4 k + c of rows i to i + 3
    even, odd = ([i + j for i in (0, 8, 16, 24) for j in range(k, k + 4)] for k in (0, 4))
    columns = [""] * 16
    for c in range(4):
        for k, lanes in enumerate((even, odd)):
            halves = [mixed((four[i + c], four[i + 4 + c]), lanes) for i in (0, 8)]
            columns[4 * k + c] = mixed(halves, even)
            columns[4 * (k + 2) + c] = mixed(halves, odd)
    return columns
