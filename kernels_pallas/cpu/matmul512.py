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

from kernels_pallas.cpu.function import FOUR, SIXTEEN, Function, blocks, integers, totals
from kernels_pallas.cpu.products import UNSIGNED, UNSIGNED_HALVES, Operands, kernel

OFFSET = -0x7F7F7F80
"""Four bytes of 128, which are added to values of int8."""

HANDLERS = {dtype: f"jaxkv_matmul512_{dtype}" for dtype in ("bfloat16", "float32", "int8")}
OPERANDS = {
    "bfloat16": Operands(x_bytes=2, w_bytes=2, counted=UNSIGNED_HALVES),
    "float32": Operands(x_bytes=4, w_bytes=4, counted=UNSIGNED),
    "int8": Operands(x_bytes=1, w_bytes=1, zero=OFFSET),
}
COLUMNS = {"bfloat16": 32, "float32": 16, "int8": 64}
"""Numbers of x and w in a register."""

MULTIPLE = 16
"""F is a multiple of it."""

LONGEST = 2**16
"""Sums of so many products of numbers of 8 bits, one with a sign, are below 2^31."""

OUTPUTS, ROWS = 4, (6, 3, 2, 1)
"""Rows of w and of x that are multiplied at once: as many sixes of x as there are, then less."""

DEPTH = {"bfloat16": 2048, "float32": 1024, "int8": 4096}
"""Columns that are added up at once: those of 6 rows of x stay in the first-level cache."""

WHOLE = "<16 x i32>"
PAIRS = "<32 x bfloat>"

DECLARED = (
    f"declare {SIXTEEN} @llvm.x86.avx512bf16.dpbf16ps.512({SIXTEEN}, {PAIRS}, {PAIRS})",
    f"declare {WHOLE} @llvm.x86.avx512.vpdpbusd.512({WHOLE}, {WHOLE}, {WHOLE})",
)
"""The functions call these too."""

TILE = "ptr %x, ptr %w, ptr %y, i64 %T, i64 %N, i64 %D, i64 %F"


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
    """Writes the function for some outputs of some tokens."""
    f = Function(f"define internal void @tile512_{dtype}({TILE}) noinline", lanes=16)
    with f.each(0, "%D", DEPTH[dtype]) as start:
        depth = f.least(f.sub("%D", start), DEPTH[dtype])
        for rows, first, stop in blocks(f, "%T", ROWS):
            with f.each(first, stop, rows) as t, f.each(0, "%N", OUTPUTS) as output:
                _multiply(f, dtype, [f.add(t, r) for r in range(rows)], output, start, depth)
    f.do("ret void")
    return f


def _multiply(
    f: Function, dtype: str, rows: Sequence[str], output: str, start: str, depth: str
) -> None:
    """Adds the products of rows of x with OUTPUTS rows of w to y."""
    width = OPERANDS[dtype].w_bytes

    def row(of: str, number: str) -> str:
        return f.at(of, f.mul(f.add(f.mul(number, "%D"), start), width))

    w = [row("%w", f.add(output, i)) for i in range(OUTPUTS)]
    x = [row("%x", number) for number in rows]
    kind = WHOLE if dtype == "int8" else SIXTEEN
    # Of int8 one more row, of what was added to x, is taken from the others.
    sums = [[f.variable(kind, align=64) for _ in w] for _ in range(len(x) + (dtype == "int8"))]
    for place in chain(*sums):
        f.store(f"{kind} zeroinitializer", place, align=64)
    with f.each(0, depth, COLUMNS[dtype]) as column:
        offset = f.mul(column, width)
        read = [_read(f, dtype, address, offset) for address in x]
        if dtype == "int8":
            read.append(integers([OFFSET] * 16))
        for i, address in enumerate(w):
            if len(rows) < ROWS[0]:  # what is multiplied next
                f.fetch(f.at(address, f.add(offset, f.mul("%D", OUTPUTS * width))))
            weights = _read(f, dtype, address, offset)
            for number, of_row in zip(read, sums, strict=True):
                before = f.load(kind, of_row[i], align=64)
                f.store(f"{kind} {_added(f, dtype, before, number, weights)}", of_row[i], align=64)
    is_first = f.let(f"icmp eq i64 {start}, 0")
    of_rows = [[f.load(kind, place, align=64) for place in row] for row in sums]
    all_found = totals(f, of_rows, whole=dtype == "int8")
    add, four = ("add", "<4 x i32>") if dtype == "int8" else ("fadd", FOUR)
    for number, found in zip(rows, all_found, strict=False):
        if dtype == "int8":
            found = f.let(f"sub {four} {found}, {all_found[-1]}")
        place = f.mul(f.add(f.mul(number, "%F"), output), 4)
        before = f.load(four, "%y", place, align=4)
        before = f.let(f"select i1 {is_first}, {four} zeroinitializer, {four} {before}")
        f.store(f"{four} {f.let(f'{add} {four} {before}, {found}')}", "%y", place, align=4)


def _read(f: Function, dtype: str, address: str, offset: str) -> str:
    kind = {"bfloat16": PAIRS, "float32": SIXTEEN, "int8": WHOLE}[dtype]
    return f.load(kind, address, offset, align=OPERANDS[dtype].w_bytes)


def _added(f: Function, dtype: str, before: str, x: str, w: str) -> str:
    """Adds products to sums."""
    if dtype == "float32":
        return f.fma(x, w, before)
    if dtype == "int8":
        operands = f"{WHOLE} {before}, {WHOLE} {x}, {WHOLE} {w}"
        return f.let(f"call {WHOLE} @llvm.x86.avx512.vpdpbusd.512({operands})")
    operands = f"{SIXTEEN} {before}, {PAIRS} {x}, {PAIRS} {w}"
    return f.let(f"call {SIXTEEN} @llvm.x86.avx512bf16.dpbf16ps.512({operands})")


def _call(dtype: str, f: Function, part: Mapping[str, str]) -> None:
    addresses = ", ".join(f"ptr {part[name]}" for name in ("x", "w", "y"))
    sizes = ", ".join(f"i64 {part[name]}" for name in ("num_tokens", "num_outputs", "D", "F"))
    f.do(f"call void @tile512_{dtype}({addresses}, {sizes})")
