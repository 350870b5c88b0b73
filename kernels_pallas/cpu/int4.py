"""Multiplies with a matrix of 4-bit integers where it lies, on processors with AVX2: y = x @
w[index].T.

Values [N, G, F, C] are two in a byte, the first in the lower half, in G groups of C columns that
have scales and zero points. Neither is a number of w, (value - zero) * scale, made, nor a value
converted: whole numbers of 16 bits are multiplied. Of a part of a group, which has `part_of` so
many columns c, and of a row of x, x_c is about step * q_c, and

    y += scale * step * (sum_c q_c * (value_c + 8) - (8 + zero) * sum_c q_c)

where both sums are exact whole numbers. step is the power of two for which the largest |q_c| is
from 2^14 to 2^15. So x is rounded by at most 2^-15 of its largest number in the part, or twice that
where this one is 2^15; bfloat16 rounds that number by up to 2^-9. A part of x that has an infinity
or NaN gives NaN.

q [T, D / 64, 4, 16] int16 is a result beside y. Of 64 columns, 0, 4, ... 60 come first, whose
values are in the same place of 16 bits of w, then 1, 5, ... Another result has what belongs to a
part, [T, D / part, 2]: its step, and the sum of q, float32 as x and y [T, F] are. scales [N, G, F]
are bfloat16 and zeros int8, or [1, G, F] for any index, or zeros [1, 0, 0] where there are none.

A task goes over a part of all of its outputs before the next part: these lie side by side in
memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kernels_pallas.cpu.function import (
    EIGHT,
    FLOATS,
    FOUR,
    SHORTS,
    Function,
    blocks,
    integers,
    totals,
)
from kernels_pallas.cpu.products import (
    TASK_OUTPUTS,
    TASK_TOKENS,
    UNSIGNED,
    Operands,
    kernel,
    used_rows,
)

HANDLER = "jaxkv_int4"

DECLARED = (
    f"declare {SHORTS} @llvm.x86.avx2.packssdw({EIGHT}, {EIGHT})",
    f"declare {EIGHT} @llvm.x86.avx.cvt.ps2dq.256({FLOATS})",
    f"declare i32 @llvm.vector.reduce.smax.v8i32({EIGHT})",
)
"""The functions call these too."""

BLOCK, LONGEST, UNROLLED = 64, 512, 128
"""Columns of a register, the most that are a part, and those of a part that has a function of its
own, which does without loops over blocks.
"""

OUTPUTS, ROWS = 4, (4, 2, 1)
"""Rows of w of which totals are made at once, and rows of x that are multiplied at once: as many
fours as there are, then less.
"""

MORE = ("scales", "zeros")
POINTERS = ("x", "w", "y", "q", "steps", *MORE)
SIZES = {"T": "num_tokens", "N": "num_outputs", "first": "first_output"}
SIZES |= {name: name for name in ("D", "F", "C", "part")}
"""What the function for a task takes, and under which names a task has it."""

EXPONENT, LEAST_EXPONENT = 0x7F800000, 27 << 23
"""Bits of a float32: its exponent, and that of 2^-100, below which numbers count as zeros."""


def functions() -> list[Function]:
    """Writes the handler, and what it calls."""
    operands = Operands(
        x_bytes=4,
        w_bits=4,
        counted=UNSIGNED,
        more=MORE,
        beside=("q", "steps"),
        in_groups=True,
    )
    tasks = [_task(columns) for columns in (None, UNROLLED)]
    return [*tasks, *kernel(HANDLER, operands, _call, _round).functions()]


def part_of(columns: int) -> int | None:
    """Returns how many columns of a group are added up at once; None where groups of so many are
    not multiplied here.
    """
    part = min(columns, LONGEST)
    return part if columns % BLOCK == 0 and columns % part == 0 else None


def _call(f: Function, part: Mapping[str, str]) -> None:
    columns, D = f.least(part["C"], LONGEST), part["D"]
    q = f.mul(part["first_token"], f.mul(D, 2))
    steps = f.mul(part["first_token"], f.mul(f.let(f"sdiv i64 {D}, {columns}"), 8))
    own = {
        **part,
        "part": columns,
        "q": f.at(part["q"], q),
        "steps": f.at(part["steps"], steps),
    }
    given = [f"ptr {own[name]}" for name in POINTERS]
    given += [f"i64 {own[name]}" for name in SIZES.values()]
    for condition, name in (("ne", _name(None)), ("eq", _name(UNROLLED))):
        with f.where(f.let(f"icmp {condition} i64 {columns}, {UNROLLED}")):
            f.do(f"call void @{name}({', '.join(given)})")


def _round(f: Function, known: Mapping[str, str]) -> None:
    """Writes q, and the steps and sums of all parts of x."""
    part = f.least(known["C"], LONGEST)
    parts, largest = f.let(f"sdiv i64 {known['D']}, {part}"), f.variable(EIGHT, align=32)
    total = f.variable(EIGHT, align=32)
    with (
        used_rows(f, known) as (row, count),
        f.each(f.mul(row, parts), f.mul(f.add(row, count), parts), 1) as number,
    ):
        first = f.mul(number, part)
        x, q = f.at(known["x"], f.mul(first, 4)), f.at(known["q"], f.mul(first, 2))
        for place in (largest, total):
            f.store(f"{EIGHT} zeroinitializer", place, align=32)
        with f.each(0, part, 8) as column:
            bits = f.load(EIGHT, x, f.mul(column, 4), align=4)
            bits = f.let(f"and {EIGHT} {bits}, {integers([UNSIGNED] * 8)}")
            before = f.load(EIGHT, largest, align=32)
            is_more = f.let(f"icmp sgt {EIGHT} {bits}, {before}")
            more = f.let(f"select <8 x i1> {is_more}, {EIGHT} {bits}, {EIGHT} {before}")
            f.store(f"{EIGHT} {more}", largest, align=32)
        bits = f"{EIGHT} {f.load(EIGHT, largest, align=32)}"
        step, factor = _steps(f, f.let(f"call i32 @llvm.vector.reduce.smax.v8i32({bits})"))
        factors = f.filled("float", factor)
        with f.each(0, part, BLOCK) as column:
            _round_block(f, f.at(x, f.mul(column, 4)), factors, f.at(q, f.mul(column, 2)), total)
        whole = f"{EIGHT} {f.load(EIGHT, total, align=32)}"
        whole = f.let(f"call i32 @llvm.vector.reduce.add.v8i32({whole})")
        place = f.at(known["steps"], f.mul(number, 8))
        f.store(f"float {step}", place, align=4)
        f.store(f"float {f.let(f'sitofp i32 {whole} to float')}", place, 4, align=4)


def _steps(f: Function, largest: str) -> tuple[str, str]:
    """Returns the step of a part and its inverse, from the bits of its largest number."""
    exponent = f.let(f"and i32 {largest}, {EXPONENT}")
    is_some = f.let(f"icmp sge i32 {exponent}, {LEAST_EXPONENT}")
    is_finite = f.let(f"icmp ne i32 {exponent}, {EXPONENT}")
    step = f.let(f"sub i32 {exponent}, {14 << 23}")
    factor = f.let(f"sub i32 {(2 * 127 + 14) << 23}, {exponent}")
    step, factor = (f.let(f"select i1 {is_some}, i32 {x}, i32 0") for x in (step, factor))
    nan = f.let("bitcast float 0x7FF8000000000000 to i32")
    step = f.let(f"select i1 {is_finite}, i32 {step}, i32 {nan}")
    return f.let(f"bitcast i32 {step} to float"), f.let(f"bitcast i32 {factor} to float")


def _round_block(f: Function, x: str, factors: str, q: str, total: str) -> None:
    """Writes q of BLOCK columns, and adds it to `total`."""
    ones = f"<{', '.join(['i16 1'] * 16)}>"
    quarters = []
    for place in range(0, 4 * BLOCK, 64):
        whole = []
        for numbers in (f.load(FLOATS, x, place + i, align=4) for i in (0, 32)):
            numbers = f"{FLOATS} {f.floats('fmul', numbers, factors)}"
            whole.append(f"{EIGHT} {f.let(f'call {EIGHT} @llvm.x86.avx.cvt.ps2dq.256({numbers})')}")
        short = f.let(f"call {SHORTS} @llvm.x86.avx2.packssdw({', '.join(whole)})")
        operands = f"{SHORTS} {short}, {SHORTS} {ones}"
        pairs = f.let(f"call {EIGHT} @llvm.x86.avx2.pmadd.wd({operands})")
        added = f.let(f"add {EIGHT} {f.load(EIGHT, total, align=32)}, {pairs}")
        f.store(f"{EIGHT} {added}", total, align=32)
        # It has four numbers of either vector by turns. They come side by side with those of the
        # next four columns.
        order = [i + far for first in (0, 4) for i in range(first, first + 4) for far in (0, 8)]
        short = f.shuffle(SHORTS, short, short, order)
        quarters.append(f.let(f"bitcast {SHORTS} {short} to {EIGHT}"))
    halves = quarters[:2], quarters[2:]
    for kind in range(4):
        first, last = (f.shuffle(EIGHT, a, b, range(kind, 16, 4)) for a, b in halves)
        f.store(f"{EIGHT} {f.shuffle('<4 x i32>', first, last, range(8))}", q, 32 * kind, align=2)


def _name(columns: int | None) -> str:
    return f"task_int4_{columns or 'any'}"


def _task(columns: int | None) -> Function:
    """Writes the function for some outputs of some tokens. columns: of a part, None for any."""
    given = [*(f"ptr %{name}" for name in POINTERS), *(f"i64 %{name}" for name in SIZES)]
    f = Function(f"define internal void @{_name(columns)}({', '.join(given)}) noinline")
    y = f.variable(f"[{TASK_TOKENS * TASK_OUTPUTS} x float]", align=64)
    has_zeros, none = f.let("icmp ne ptr %zeros, null"), f.variable("<4 x i8>")
    f.store("<4 x i8> zeroinitializer", none)
    zeros = f.let(f"select i1 {has_zeros}, ptr %zeros, ptr {none}")
    zero_width = f.let(f"zext i1 {has_zeros} to i64")
    with f.each(0, f.mul("%T", 4 * TASK_OUTPUTS), 32) as place:
        f.store(f"{FLOATS} zeroinitializer", y, place, align=32)
    with f.each(0, "%D", "%part") as start:
        row, w = _place(f, start)
        part = _Part(
            w=w,
            later=_place(f, f.add(start, "%part"))[1],
            start=start,
            number=f.let(f"sdiv i64 {start}, %part"),
            scales=f.at("%scales", f.mul(row, 2)),
            zeros=f.at(zeros, f.mul(row, zero_width)),
            zero_width=zero_width,
            y=y,
            columns=columns,
        )
        for rows, first, stop in blocks(f, "%T", ROWS):
            with f.each(first, stop, rows) as t, f.each(0, "%N", OUTPUTS) as output:
                _multiply(f, part, [f.add(t, r) for r in range(rows)], output)
    with f.each(0, "%T", 1) as t, f.each(0, "%N", 8) as output:
        numbers = f.load(FLOATS, y, f.mul(f.add(f.mul(t, TASK_OUTPUTS), output), 4), align=32)
        f.store(f"{FLOATS} {numbers}", "%y", f.mul(f.add(f.mul(t, "%F"), output), 4), align=4)
    f.do("ret void")
    return f


def _place(f: Function, start: str) -> tuple[str, str]:
    """Returns which row of scales, and where values, of the first output from a column on are."""
    group = f.let(f"sdiv i64 {start}, %C")
    row = f.add(f.mul(group, "%F"), "%first")
    column = f.sub(start, f.mul(group, "%C"))
    return row, f.at("%w", _bytes(f, f.add(f.mul(row, "%C"), column)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """Says which part is multiplied: where its values are, and those of the next one, and its
    scales and zero points, which are zero_width bytes each: 0 where there are none. columns: how
    many it has, None where only `%part` knows.
    """

    w: str
    later: str
    start: str
    number: str
    scales: str
    zeros: str
    zero_width: str
    y: str
    columns: int | None


def _multiply(f: Function, part: _Part, rows: Sequence[str], output: str) -> None:
    """Adds the products of rows of x with OUTPUTS rows of w to y."""
    q = [f.at("%q", f.mul(f.add(f.mul(row, "%D"), part.start), 2)) for row in rows]
    if part.columns is not None:  # a line of the cache for each output
        for i in range(OUTPUTS):
            f.fetch(f.at(part.later, f.mul(f.add(output, i), _bytes(f, "%C"))))
    of_output = [_sums(f, part, q, f.add(output, i)) for i in range(OUTPUTS)]
    zeros = f.load("<4 x i8>", part.zeros, f.mul(output, part.zero_width), align=1)
    zeros = f.let(f"sitofp <4 x i8> {zeros} to {FOUR}")
    offsets = f.let(f"fsub {FOUR} <{', '.join(['float -8.0'] * 4)}>, {zeros}")
    scales = f.load("<4 x i16>", part.scales, f.mul(output, 2), align=2)
    scales = f.let(f"zext <4 x i16> {scales} to <4 x i32>")
    scales = f.let(f"shl <4 x i32> {scales}, {integers([16] * 4)}")
    scales = f.let(f"bitcast <4 x i32> {scales} to {FOUR}")
    parts = f.let("sdiv i64 %D, %part")
    for row, sums in zip(rows, zip(*of_output, strict=True), strict=True):
        (found,) = totals(f, [sums], whole=True)
        found = f.let(f"sitofp <4 x i32> {found} to {FOUR}")
        of_x = f.at("%steps", f.mul(f.add(f.mul(row, parts), part.number), 8))
        step, total = (_four(f, f.load("float", of_x, i, align=4)) for i in (0, 4))
        found = _fma(f, offsets, total, found)
        place = f.mul(f.add(f.mul(row, TASK_OUTPUTS), output), 4)
        factor = f.let(f"fmul {FOUR} {scales}, {step}")
        added = _fma(f, factor, found, f.load(FOUR, part.y, place, align=16))
        f.store(f"{FOUR} {added}", part.y, place, align=16)


def _sums(f: Function, part: _Part, q: Sequence[str], output: str) -> list[str]:
    """Returns the sums of products of each row of x with a row of w, eight numbers each. In a loop,
    what is read of w is fetched of the next part.
    """
    row = f.mul(output, _bytes(f, "%C"))
    w, later = f.at(part.w, row), f.at(part.later, row)
    sums = [[f.variable(EIGHT, align=32) for _ in range(2)] for _ in q]
    for of_row in sums:
        for place in of_row:
            f.store(f"{EIGHT} zeroinitializer", place, align=32)
    for number in range((part.columns or 0) // BLOCK):
        _add(f, w, q, str(number * BLOCK), sums)
    if part.columns is None:
        with f.each(0, "%part", BLOCK) as column:
            f.fetch(f.at(later, _bytes(f, column)), stays=True)
            _add(f, w, q, column, sums)
    found = []
    for of_row in sums:
        lower, upper = (f.load(EIGHT, place, align=32) for place in of_row)
        upper = f.let(f"ashr exact {EIGHT} {upper}, {integers([4] * 8)}")
        found.append(f.let(f"add {EIGHT} {lower}, {upper}"))
    return found


def _add(f: Function, w: str, q: Sequence[str], column: str, sums: Sequence[Sequence[str]]) -> None:
    """Adds products of BLOCK columns: of values in the lower half of a byte to the first sum of a
    row of x, of those in the upper half, which count 16 times as much, to the second one.
    """
    bits = f.load(EIGHT, w, _bytes(f, column), align=1)
    bits = f.let(f"xor {EIGHT} {bits}, {integers([0x88888888 - 2**32] * 8)}")
    for place in range(4):
        if place == 2:
            bits = f.let(f"lshr {EIGHT} {bits}, {integers([8] * 8)}")
        upper = place % 2
        values = f.let(f"and {EIGHT} {bits}, {integers([0xF000F << 4 * upper] * 8)}")
        values = f.let(f"bitcast {EIGHT} {values} to {SHORTS}")
        offset = f.add(f.mul(column, 2), 32 * place)
        for row, of_row in zip(q, sums, strict=True):
            operands = f"{SHORTS} {values}, {SHORTS} {f.load(SHORTS, row, offset, align=2)}"
            pairs = f.let(f"call {EIGHT} @llvm.x86.avx2.pmadd.wd({operands})")
            added = f.let(f"add {EIGHT} {f.load(EIGHT, of_row[upper], align=32)}, {pairs}")
            f.store(f"{EIGHT} {added}", of_row[upper], align=32)


def _fma(f: Function, a: str, b: str, c: str) -> str:
    return f.let(f"call {FOUR} @llvm.fma.v4f32({FOUR} {a}, {FOUR} {b}, {FOUR} {c})")


def _four(f: Function, number: str) -> str:
    one = f.let(f"insertelement {FOUR} poison, float {number}, i64 0")
    return f.shuffle(FOUR, one, one, [0] * 4)


def _bytes(f: Function, columns: str) -> str:
    """Returns how many bytes the values of so many columns take."""
    return f.let(f"ashr exact i64 {columns}, 1")
