"""Multiplies with a matrix where it lies: y = x @ w[index].T.

w [N, F, D] bfloat16 or float32, x [T, D] and y [T, F] float32; D and F are multiples of 16. Or w is
int8, x int16 with values of int8, and y int32. An index beyond the ends means the first or the last
matrix, as in XLA's slices.

A sum is float32, in the same order whatever T is: 8 partial sums, each over every eighth of 512
columns, are added up in pairs, and such totals one after the other. No product is rounded before it
is added. So a vector of a row of x and one of w are multiplied as they lie in memory, 3 rows of x
with 4 of w at a time: 12 of AVX2's 16 registers are sums.

Where a task (`products`) has few tokens, w is read where it lies. Where it has many, 8 outputs and
512 columns of it are first written in float32 to a panel, which stays in the first-level cache (16
KiB). The next 8 outputs are fetched meanwhile, to the second-level cache: the first may be too
small for them. XLA:CPU in place of that writes a packed copy of all of w to memory, in each call.
Source of the blocking: Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication"
(2008), section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from kernels_pallas.cpu.function import (
    EIGHT,
    FLOATS,
    FOUR,
    SHORTS,
    Function,
    blocks,
    of_bfloat16,
    totals,
)
from kernels_pallas.cpu.products import TASK_TOKENS, UNSIGNED, Operands, kernel

HANDLERS = {dtype: f"jaxkv_matmul_{dtype}" for dtype in ("bfloat16", "float32", "int8")}
OPERANDS = {
    "bfloat16": Operands(x_bytes=4, w_bits=16, counted=UNSIGNED),
    "float32": Operands(x_bytes=4, w_bits=32, counted=UNSIGNED),
    "int8": Operands(x_bytes=2, w_bits=8),
}
"""These give the name of a handler and its operands, by the dtype of w."""

MULTIPLE = 16
COLUMNS = dict.fromkeys(HANDLERS, MULTIPLE)
"""F is a multiple of the one, D of the other."""

LONGEST = 2**17
"""Sums of so many products of int8 are below 2^31."""

LANES, DEPTH = 8, 512
"""Outputs of a tile, and columns that are added up at once: those of a panel."""

OUTPUTS, ROWS = 4, (3, 2, 1)
"""Rows of w and of x that are multiplied at once: as many threes of x as there are, then less."""

FEW = 8
"""Up to so many tokens are multiplied without a panel."""

TILE = "ptr %x, ptr %w, ptr %y, i64 %T, i64 %D, i64 %F"
"""The function for one tile takes these: addresses are those of its first numbers."""

W_BYTES = {dtype: operands.w_bits // 8 for dtype, operands in OPERANDS.items()}
"""Bytes of a number of w."""


def functions() -> list[Function]:
    """Writes the `HANDLERS`, and what they call."""
    written = []
    for dtype in HANDLERS:
        written.append(_tile_int8() if dtype == "int8" else _tile(dtype))
        do = partial(_tiles, dtype)
        written += kernel(HANDLERS[dtype], OPERANDS[dtype], do).functions()
    return written


def _tile(dtype: str) -> Function:
    """Writes the function for LANES outputs of some tokens where w is of floating point."""

    def add(f: Function, start: str, depth: str, panel: str, y: str) -> None:
        are_few = f.let(f"icmp sle i64 %T, {FEW}")
        with f.where(are_few):
            multiply_all(f, Part(dtype, start, depth, None), y)
        with f.where(f.let(f"xor i1 {are_few}, true")):
            _fill(f, panel, Part(dtype, start, depth, None))
            multiply_all(f, Part(dtype, start, depth, panel), y)

    return tile(f"define internal void @tile_{dtype}({TILE}) noinline", add)


def tile(header: str, add: Callable[[Function, str, str, str, str], None]) -> Function:
    """Writes a function for LANES outputs of some tokens. add: writes what adds the products of
    columns to y [T, LANES], of which it is given the first one, how many, and room for a panel.
    """
    f = Function(header)
    panel = f.variable(f"[{LANES * DEPTH} x float]", align=64)
    y = f.variable(f"[{TASK_TOKENS * LANES} x float]", align=64)
    with f.each(0, f.mul("%T", 4 * LANES), 32) as place:
        f.store(f"{FLOATS} zeroinitializer", y, place, align=32)
    with f.each(0, "%D", DEPTH) as start:
        add(f, start, f.least(f.sub("%D", start), DEPTH), panel, y)
    # In one go: rows of y are far apart.
    with f.each(0, "%T", 1) as t:
        row = f.load(FLOATS, y, f.mul(t, 4 * LANES), align=32)
        f.store(f"{FLOATS} {row}", "%y", f.mul(f.mul(t, "%F"), 4), align=4)
    f.do("ret void")
    return f


@dataclass(frozen=True, slots=True)
class Part:
    """Says which columns of a tile are multiplied, and in which panel [LANES, DEPTH] they are."""

    dtype: str
    start: str
    depth: str
    panel: str | None

    def row(self, f: Function, number: object) -> str:
        """Returns where a row of w begins."""
        if self.panel is not None:
            return f.at(self.panel, f.mul(number, 4 * DEPTH))
        return f.at("%w", f.mul(f.add(f.mul(number, "%D"), self.start), W_BYTES[self.dtype]))

    def next_tile(self, f: Function, number: object) -> str:
        """Returns what is to be fetched while a row is read: one line of the next tile after the
        other, which memory gives faster than rows side by side.
        """
        columns = f.add(f.mul(f.add("%D", self.start), LANES), f.mul(number, self.depth))
        return f.at("%w", f.mul(columns, W_BYTES[self.dtype]))

    def read(self, f: Function, row: str, column: str) -> str:
        """Reads eight columns of a row, as float32."""
        if self.panel is not None:
            return f.load(FLOATS, row, f.mul(column, 4), align=32)
        if self.dtype == "float32":
            return f.load(FLOATS, row, f.mul(column, 4), align=4)
        return of_bfloat16(f, row, f.mul(column, 2))


def _fill(f: Function, panel: str, part: Part) -> None:
    """Writes columns of w to the panel."""
    with f.each(0, LANES, 1) as row:
        source, later = part.row(f, row), part.next_tile(f, row)
        to = f.at(panel, f.mul(row, 4 * DEPTH))
        with f.each(0, part.depth, MULTIPLE) as column:
            f.fetch(f.at(later, f.mul(column, W_BYTES[part.dtype])), stays=True)
            for i in range(0, MULTIPLE, 8):
                at_column = f.add(column, i)
                numbers = part.read(f, source, at_column)
                f.store(f"{FLOATS} {numbers}", to, f.mul(at_column, 4), align=32)


def multiply_all(f: Function, part: Part, y: str) -> None:
    """Adds the products of all rows of x with a part of a tile to y [T, LANES]."""
    for rows, first, stop in blocks(f, "%T", ROWS):
        with f.each(first, stop, rows) as t, f.each(0, LANES, OUTPUTS) as output:
            _multiply(f, part, [f.add(t, r) for r in range(rows)], output, y)


def _multiply(f: Function, part: Part, rows: Sequence[str], output: str, y: str) -> None:
    """Adds the products of rows of x with OUTPUTS rows of w to y [T, LANES]."""
    w = [part.row(f, f.add(output, i)) for i in range(OUTPUTS)]
    x = [f.at("%x", f.mul(f.add(f.mul(row, "%D"), part.start), 4)) for row in rows]
    sums = [[f.variable(FLOATS, align=32) for _ in w] for _ in x]
    for place in chain(*sums):
        f.do(f"store {FLOATS} zeroinitializer, ptr {place}, align 32")
    later = part.next_tile(f, output) if part.panel is None else None
    with f.each(0, part.depth, MULTIPLE) as begin:
        if later is not None:
            width = OUTPUTS * W_BYTES[part.dtype]
            for line in range(0, MULTIPLE * width, 64):
                f.fetch(f.at(later, f.add(f.mul(begin, width), line)), stays=True)
        for column in (begin, f.add(begin, 8)):
            numbers = [f.load(FLOATS, row, f.mul(column, 4), align=4) for row in x]
            for i, address in enumerate(w):
                weights = part.read(f, address, column)
                for number, of_row in zip(numbers, sums, strict=True):
                    before = f.load(FLOATS, of_row[i], align=32)
                    added = f.fma(weights, number, before)
                    f.store(f"{FLOATS} {added}", of_row[i], align=32)
    found = totals(f, [[f.load(FLOATS, place, align=32) for place in of_row] for of_row in sums])
    for row, four in zip(rows, found, strict=True):
        add_totals(f, four, f.at(y, f.mul(f.add(f.mul(row, LANES), output), 4)))


def add_totals(f: Function, found: str, y: str) -> None:
    """Adds totals of OUTPUTS outputs to what is there."""
    added = f.let(f"fadd {FOUR} {f.load(FOUR, y, align=16)}, {found}")
    f.store(f"{FOUR} {added}", y, align=16)


def _tile_int8() -> Function:
    """Writes the function for LANES outputs of some tokens where w is int8: four rows of w and up
    to three of x at a time, from which 16 columns each are multiplied and added up in pairs.
    """
    f = Function(f"define internal void @tile_int8({TILE}) noinline")
    with f.each(0, LANES, OUTPUTS) as output:
        outputs = [f.add(output, i) for i in range(OUTPUTS)]
        for rows, start, stop in blocks(f, "%T", ROWS):
            with f.each(start, stop, rows) as t:
                _multiply_int8(f, [f.add(t, r) for r in range(rows)], outputs)
    f.do("ret void")
    return f


def _multiply_int8(f: Function, rows: Sequence[str], outputs: Sequence[str]) -> None:
    """Writes the products of rows of x with rows of w, which are exact."""
    x = [f.at("%x", f.mul(f.mul(row, "%D"), OPERANDS["int8"].x_bytes)) for row in rows]
    w = [f.at("%w", f.mul(output, "%D")) for output in outputs]
    sums = {
        (one, row): f.variable(EIGHT, align=32) for one in range(len(w)) for row in range(len(x))
    }
    for place in sums.values():
        f.do(f"store {EIGHT} zeroinitializer, ptr {place}, align 32")
    next_tile = f.at(w[0], f.mul("%D", LANES))
    with f.each(0, "%D", 16) as column:
        f.fetch(f.at(next_tile, f.mul(column, OUTPUTS)), stays=True)
        numbers = [
            f.load(SHORTS, row, f.mul(column, OPERANDS["int8"].x_bytes), align=2) for row in x
        ]
        for one, of_output in enumerate(w):
            weights = f.load("<16 x i8>", of_output, column, align=1)
            weights = f.let(f"sext <16 x i8> {weights} to {SHORTS}")
            for row, values in enumerate(numbers):
                operands = f"{SHORTS} {weights}, {SHORTS} {values}"
                pairs = f.let(f"call {EIGHT} @llvm.x86.avx2.pmadd.wd({operands})")
                place = sums[one, row]
                added = f.let(f"add {EIGHT} {pairs}, {f.load(EIGHT, place, align=32)}")
                f.store(f"{EIGHT} {added}", place, align=32)
    for (one, row), place in sums.items():
        number = f"{EIGHT} {f.load(EIGHT, place, align=32)}"
        total = f.let(f"call i32 @llvm.vector.reduce.add.v8i32({number})")
        to = f.mul(f.add(f.mul(rows[row], "%F"), outputs[one]), 4)
        f.store(f"i32 {total}", "%y", to, align=4)


def _tiles(dtype: str, f: Function, part: Mapping[str, str]) -> None:
    D, F = part["D"], part["F"]
    with f.each(0, part["num_outputs"], LANES) as output:
        row = f.mul(f.add(part["first_output"], output), D)
        w = f.at(part["w"], f.mul(row, W_BYTES[dtype]))
        y = f.at(part["y"], f.mul(output, 4))
        addresses = f"ptr {part['x']}, ptr {w}, ptr {y}"
        sizes = f"i64 {part['num_tokens']}, i64 {D}, i64 {F}"
        f.do(f"call void @tile_{dtype}({addresses}, {sizes})")
