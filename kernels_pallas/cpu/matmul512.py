"""Multiplies as `matmul` does, where a processor has AVX-512 and its instructions for bfloat16 and
int8: y = x @ w[index].T.

w [N, F, D] and x [T, D] bfloat16, y [T, F] float32; or all three float32; or w is int8, x uint8
with 128 added to values of int8, and y int32, with D at most `LONGEST`. D is a multiple of
`COLUMNS`, F of 16. An index beyond the ends means the first or the last matrix.

Numbers of x and w are multiplied as they lie in memory, nothing is converted or copied: an
instruction multiplies 32 of bfloat16 and adds the products in pairs to 16 sums, or 64 of 8 bits in
fours. 6 rows of x are multiplied with 4 of w at a time: 24 of 32 registers are sums.

A sum is in the same order whatever T is: 16 partial sums over `DEPTH` columns are added up in
halves, and such totals one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain

from kernels_pallas.cpu.function import SIXTEEN, Function, blocks, integers, totals
from kernels_pallas.cpu.products import UNSIGNED, UNSIGNED_HALVES, Operands, kernel

OFFSET = -0x7F7F7F80
"""Four bytes of 128, which are added to values of int8."""

HANDLERS = {dtype: f"jaxkv_matmul512_{dtype}" for dtype in ("bfloat16", "float32", "int8")}
OPERANDS = {
    "bfloat16": Operands(x_bytes=2, w_bits=16, counted=UNSIGNED_HALVES),
    "float32": Operands(x_bytes=4, w_bits=32, counted=UNSIGNED),
    "int8": Operands(x_bytes=1, w_bits=8, zero=OFFSET),
}
COLUMNS = {"bfloat16": 32, "float32": 16, "int8": 64}
"""Numbers of x and w in a register."""

MULTIPLE = 16
"""F is a multiple of it."""

LONGEST = 2**16
"""Sums of so many products of numbers of 8 bits, one with a sign, are below 2^31."""

OUTPUTS, ROWS = 4, (6, 3, 2, 1)
"""Rows of w and of x that are multiplied at once: as many sixes of x as there are, then less."""

FEW = 32
"""Of up to so many rows of x, memory takes longer to bring w than they take to be multiplied. All
are multiplied with some rows of w before others, and the next ones are fetched meanwhile, one line
after the other, which memory gives faster than rows side by side.
"""

FEWEST, SHORT = 3, 4096
"""Of up to so many rows of x, rows of w with fewer bytes than that are multiplied one after the
other, as memory has them, which the processor fetches ahead better than rows side by side. A line
is asked for before it is read all the same, which makes it faster (docs/benchmarks/cpu.md).
"""

DEPTH = {"bfloat16": 2048, "float32": 1024, "int8": 4096}
"""Columns that are added up at once: those of 6 rows of x stay in the first-level cache."""

WHOLE = "<16 x i32>"
PAIRS = "<32 x bfloat>"

DECLARED = (
    f"declare {SIXTEEN} @llvm.x86.avx512bf16.dpbf16ps.512({SIXTEEN}, {PAIRS}, {PAIRS})",
    f"declare {WHOLE} @llvm.x86.avx512.vpdpbusd.512({WHOLE}, {WHOLE}, {WHOLE})",
)
"""The functions call these too."""

TILE = "ptr %x, ptr %w, ptr %y, i64 %T, i64 %N, i64 %D, i64 %F, i64 %all"


def functions() -> list[Function]:
    """Writes the `HANDLERS`, and what they call."""
    written = []
    for dtype in HANDLERS:
        written += [
            _tile(dtype),
            *kernel(HANDLERS[dtype], OPERANDS[dtype], partial(_call, dtype)).functions(),
        ]
    return written


def _tile(dtype: str) -> Function:
    """Writes the function for some outputs of some tokens. What is fetched for the next outputs is
    of other columns than those multiplied where D is above DEPTH, but in the end all of them.
    """
    f = Function(f"define internal void @tile512_{dtype}({TILE}) noinline", lanes=16)
    width, depth = width_of(dtype), DEPTH[dtype]
    are_fewest, are_few = (f.let(f"icmp sle i64 %all, {count}") for count in (FEWEST, FEW))
    is_short = f.let(f"icmp slt i64 %D, {SHORT // width}")
    in_turn = f.let(f"and i1 {are_fewest}, {is_short}")
    with f.where(in_turn), f.each(0, "%N", 1) as output:
        row = row_of(f, dtype, "%w", output, "0")
        for rows, first, stop in blocks(f, "%T", ROWS[1:]):
            with f.each(first, stop, rows) as t:
                _add(f, dtype, rows, t, output, "0", row, outputs=1)
    are_more = f.let(f"xor i1 {are_few}, {in_turn}")
    with f.where(are_more), f.each(0, "%N", OUTPUTS) as output, f.each(0, "%D", depth) as start:
        later = f.mul(f.add(f.mul("%D", f.add(output, OUTPUTS)), f.mul(start, OUTPUTS)), width)
        for rows, first, stop in blocks(f, "%T", ROWS):
            with f.each(first, stop, rows) as t:
                _add(f, dtype, rows, t, output, start, f.at("%w", later))
    with f.where(f.let(f"xor i1 {are_few}, true")), f.each(0, "%D", depth) as start:
        for rows, first, stop in blocks(f, "%T", ROWS):
            with f.each(first, stop, rows) as t, f.each(0, "%N", OUTPUTS) as output:
                _add(f, dtype, rows, t, output, start)
    f.do("ret void")
    return f


def _add(
    f: Function,
    dtype: str,
    rows: int,
    t: str,
    output: str,
    start: str,
    later: str | None = None,
    outputs: int = OUTPUTS,
) -> None:
    """Adds the products of rows of x, from t on, with `outputs` rows of w, of columns from `start`
    on; `later` as `multiply` has it.
    """
    depth = f.least(f.sub("%D", start), DEPTH[dtype])
    w = [row_of(f, dtype, "%w", f.add(output, i), start) for i in range(outputs)]
    multiply(f, dtype, [f.add(t, r) for r in range(rows)], w, output, start, depth, later)


def width_of(dtype: str) -> int:
    """Returns the bytes of a number of x or w."""
    return OPERANDS[dtype].x_bytes


def row_of(f: Function, dtype: str, matrix: str, number: str, start: str) -> str:
    """Returns where a column of a row of D numbers is."""
    return f.at(matrix, f.mul(f.add(f.mul(number, "%D"), start), width_of(dtype)))


def multiply(
    f: Function,
    dtype: str,
    rows: Sequence[str],
    w: Sequence[str],
    output: str,
    start: str,
    depth: str,
    later: str | None = None,
) -> None:
    """Adds the products of rows of x with OUTPUTS rows of w, or with one, from column `start` on,
    to y. w: addresses of that column. later: what lies from there on is fetched meanwhile.
    """
    product = Product(f, dtype, rows, start, len(w))
    with f.each(0, depth, COLUMNS[dtype]) as column:
        numbers = product.read(column)
        for i, address in enumerate(w):
            place = f.at(address, f.mul(column, width_of(dtype)))
            if later is not None:
                line = f.add(f.mul(column, len(w) * width_of(dtype)), 64 * i)
                f.fetch(f.at(later, line), stays=True)
            product.add(i, numbers, f.load(_kind(dtype), place, align=width_of(dtype)))
    product.finish(output)


class Product:
    """Holds the sums for some rows of x and of w, of columns from `start` on."""

    def __init__(
        self, f: Function, dtype: str, rows: Sequence[str], start: str, outputs: int = OUTPUTS
    ) -> None:
        self.f, self.dtype, self.rows, self.start, self.outputs = f, dtype, rows, start, outputs
        self.x = [row_of(f, dtype, "%x", number, start) for number in rows]
        self.kind = WHOLE if dtype == "int8" else SIXTEEN
        # Of int8 one more row, of what was added to x, is taken from the others.
        count = len(rows) + (dtype == "int8")
        self.sums = [
            [f.variable(self.kind, align=64) for _ in range(outputs)] for _ in range(count)
        ]
        for place in chain(*self.sums):
            f.store(f"{self.kind} zeroinitializer", place, align=64)

    def read(self, column: str) -> list[str]:
        """Reads the rows of x from a column behind `start` on, a register each."""
        f, width = self.f, width_of(self.dtype)
        offset = f.mul(column, width)
        numbers = [f.load(_kind(self.dtype), row, offset, align=width) for row in self.x]
        return [*numbers, integers([OFFSET] * 16)] if self.dtype == "int8" else numbers

    def add(self, output: int, numbers: Sequence[str], weights: str) -> None:
        """Adds the products of what was read with numbers of a row of w."""
        f = self.f
        for number, of_row in zip(numbers, self.sums, strict=True):
            place = of_row[output]
            before = f.load(self.kind, place, align=64)
            after = added(f, self.dtype, before, number, weights)
            f.store(f"{self.kind} {after}", place, align=64)

    def finish(self, output: str) -> None:
        """Adds the totals to y, for outputs from this one on."""
        f, is_whole = self.f, self.dtype == "int8"
        of_rows = [[f.load(self.kind, place, align=64) for place in row] for row in self.sums]
        all_found = totals(f, of_rows, whole=is_whole)
        for number, found in zip(self.rows, all_found, strict=False):
            if is_whole:
                found = f.let(f"sub <{self.outputs} x i32> {found}, {all_found[-1]}")
            place = f.mul(f.add(f.mul(number, "%F"), output), 4)
            add_totals(f, found, self.start, place, outputs=self.outputs, whole=is_whole)


def add_totals(
    f: Function,
    found: str,
    start: str,
    place: str,
    *,
    outputs: int = OUTPUTS,
    whole: bool = False,
) -> None:
    """Adds totals of columns from `start` on to what y has so many bytes behind its first number:
    those of the first columns to 0.
    """
    add, number = ("add", "i32") if whole else ("fadd", "float")
    kind, is_first = f"<{outputs} x {number}>", f.let(f"icmp eq i64 {start}, 0")
    before = f.load(kind, "%y", place, align=4)
    before = f.let(f"select i1 {is_first}, {kind} zeroinitializer, {kind} {before}")
    f.store(f"{kind} {f.let(f'{add} {kind} {before}, {found}')}", "%y", place, align=4)


def _kind(dtype: str) -> str:
    return {"bfloat16": PAIRS, "float32": SIXTEEN, "int8": WHOLE}[dtype]


def added(f: Function, dtype: str, before: str, x: str, w: str) -> str:
    """Adds products to sums."""
    if dtype == "float32":
        return f.fma(x, w, before)
    if dtype == "int8":
        operands = f"{WHOLE} {before}, {WHOLE} {x}, {WHOLE} {w}"
        return f.let(f"call {WHOLE} @llvm.x86.avx512.vpdpbusd.512({operands})")
    operands = f"{SIXTEEN} {before}, {PAIRS} {x}, {PAIRS} {w}"
    return f.let(f"call {SIXTEEN} @llvm.x86.avx512bf16.dpbf16ps.512({operands})")


def _call(dtype: str, f: Function, part: Mapping[str, str]) -> None:
    w = f.at(part["w"], f.mul(f.mul(part["first_output"], part["D"]), width_of(dtype)))
    numbers = ("num_tokens", "num_outputs", "D", "F", "used")
    sizes = ", ".join(f"i64 {part[name]}" for name in numbers)
    f.do(f"call void @tile512_{dtype}(ptr {part['x']}, ptr {w}, ptr {part['y']}, {sizes})")
