"""Multiplies with a matrix of 4-bit integers where it lies, on processors with AVX2: y = x @
w[index].T.

Values [N, G, F, C] are two in a byte, the first in the lower half, in G groups of C columns that
have scales and zero points. A number of w, (value - zero) * scale, is never made: of a part of a
group, which has `part_of` so many columns c,

    y += scale * (sum_c x_c * (value_c + 8) - (8 + zero) * sum_c x_c)

For the first sum, a half of a byte is left where it is among 32 bits, and becomes a float32 which
is multiplied: three instructions for 8 values. There it counts 2^place times as much (`PLACES`).

x [T, D] is arranged: of 64 columns 0, 8, ... 56 come first, whose values are in the same place,
then 1, 9, ...; and divided by 2^place. scales and zeros are [G, F], or zeros [0, 0] where there are
none. All three and y [T, F] are float32, and so are the sums of x [T, D / part], a result beside y.

A sum is in the same order whatever T is: 8 partial sums over a part, added up in pairs, and such
totals one after the other. With one token, w is read where it lies; with more, 8 outputs of a part
are first written to a panel in the first-level cache (`matmul`). A task goes over a part of all of
its outputs before the next part: these lie side by side in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from kernels_pallas.cpu import matmul
from kernels_pallas.cpu.function import EIGHT, FLOATS, FOUR, Function
from kernels_pallas.cpu.products import TASK_OUTPUTS, TASK_TOKENS, UNSIGNED, Operands, kernel

HANDLER = "jaxkv_int4"

BLOCK = 64
"""Columns of a register."""

PLACES = (0, 4, 8, 12, 16, 20, 24, 24)
"""Halves of bytes begin at these of 32 bits; the last one is moved there, away from the sign."""

MORE = ("scales", "zeros")
POINTERS = ("x", "w", "y", "sums", *MORE)
SIZES = {"T": "num_tokens", "N": "num_outputs", "first": "first_output"}
SIZES |= {name: name for name in ("D", "F", "C", "part")}
"""What the function for a task takes, and under which names a task has it."""


def functions() -> list[Function]:
    """Writes the handler, and what it calls."""
    operands = Operands(
        x_bytes=4, w_bits=4, counted=UNSIGNED, more=MORE, beside=("sums",), in_groups=True
    )
    return [_task(), *kernel(HANDLER, operands, _call, _add_up).functions()]


def part_of(columns: int) -> int | None:
    """Returns how many columns of a group are added up at once; None where groups of so many are
    not multiplied here.
    """
    part = min(columns, matmul.DEPTH)
    return part if columns % BLOCK == 0 and columns % part == 0 else None


def _call(f: Function, part: Mapping[str, str]) -> None:
    own = {**part, "part": f.least(part["C"], matmul.DEPTH)}
    given = [f"ptr {own[name]}" for name in POINTERS]
    given += [f"i64 {own[name]}" for name in SIZES.values()]
    f.do(f"call void @task_int4({', '.join(given)})")


def _add_up(f: Function, known: Mapping[str, str]) -> None:
    """Writes the sums of the parts of each token."""
    D, part = known["D"], f.least(known["C"], matmul.DEPTH)
    parts, added = f.let(f"sdiv i64 {D}, {part}"), f.variable(FLOATS)
    with f.each(0, f.mul(known["used"], parts), 1) as number:
        f.store(f"{FLOATS} zeroinitializer", added)
        x = f.at(known["x"], f.mul(f.mul(number, part), 4))
        with f.each(0, part, BLOCK) as column:
            place = f.at(x, f.mul(column, 4))
            for k, bits in enumerate(PLACES):
                numbers, before = f.load(FLOATS, place, 32 * k, align=4), f.load(FLOATS, added)
                f.store(f"{FLOATS} {f.fma(numbers, f.constant(2.0**bits), before)}", added)
        total = f.across(partial(f.floats, "fadd"), f.load(FLOATS, added))
        total = f.let(f"extractelement {FLOATS} {total}, i64 0")
        f.store(f"float {total}", known["sums"], f.mul(number, 4), align=4)


def _task() -> Function:
    """Writes the function for some outputs of some tokens."""
    given = [*(f"ptr %{name}" for name in POINTERS), *(f"i64 %{name}" for name in SIZES)]
    f = Function(f"define internal void @task_int4({', '.join(given)}) noinline")
    panel = f.variable(f"[{matmul.LANES * matmul.DEPTH} x float]", align=64)
    y = f.variable(f"[{TASK_TOKENS * TASK_OUTPUTS} x float]", align=64)
    has_zeros, none = f.let("icmp ne ptr %zeros, null"), f.variable(FOUR, align=16)
    f.store(f"{FOUR} zeroinitializer", none, align=16)
    zeros = f.let(f"select i1 {has_zeros}, ptr %zeros, ptr {none}")
    zero_width = f.let(f"select i1 {has_zeros}, i64 4, i64 0")
    is_one = f.let("icmp eq i64 %T, 1")
    is_more = f.let(f"xor i1 {is_one}, true")
    with f.each(0, f.mul("%T", 4 * TASK_OUTPUTS), 32) as place:
        f.store(f"{FLOATS} zeroinitializer", y, place, align=32)
    with f.each(0, "%D", "%part") as start:
        group = f.let(f"sdiv i64 {start}, %C")
        row = f.add(f.mul(group, "%F"), "%first")
        column = f.sub(start, f.mul(group, "%C"))
        w = f.at("%w", _bytes(f, f.add(f.mul(row, "%C"), column)))
        part = _Part(
            dtype="float32",
            start=start,
            depth="%part",
            panel=panel,
            y_width=TASK_OUTPUTS,
            number=f.let(f"sdiv i64 {start}, %part"),
            scales=f.at("%scales", f.mul(row, 4)),
            zeros=f.at(zeros, f.mul(row, zero_width)),
            zero_width=zero_width,
        )
        with f.where(is_one), f.each(0, "%N", matmul.OUTPUTS) as output:
            _multiply_one(f, part, w, output, y)
        with f.where(is_more), f.each(0, "%N", matmul.LANES) as output:
            _fill(f, f.at(w, f.mul(output, _bytes(f, "%C"))), panel)
            own = replace(
                part,
                scales=f.at(part.scales, f.mul(output, 4)),
                zeros=f.at(part.zeros, f.mul(output, zero_width)),
            )
            matmul.multiply_all(f, own, f.at(y, f.mul(output, 4)))
    with f.each(0, "%T", 1) as t, f.each(0, "%N", matmul.LANES) as output:
        numbers = f.load(FLOATS, y, f.mul(f.add(f.mul(t, TASK_OUTPUTS), output), 4), align=32)
        f.store(f"{FLOATS} {numbers}", "%y", f.mul(f.add(f.mul(t, "%F"), output), 4), align=4)
    f.do("ret void")
    return f


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part(matmul.Part):
    """Says also which part of a row it is, and where its scales and zero points are, which are
    zero_width bytes each: 0 where there are none.
    """

    number: str
    scales: str
    zeros: str
    zero_width: str

    def added(self, f: Function, before: str, found: str, row: str, output: str) -> str:
        zeros = f.load(FOUR, self.zeros, f.mul(output, self.zero_width), align=4)
        eight = f"<{', '.join(['float 8.0'] * 4)}>"
        offsets = f.let(f"fadd {FOUR} {zeros}, {eight}")
        parts = f.let("sdiv i64 %D, %part")
        of_x = f.load("float", "%sums", f.mul(f.add(f.mul(row, parts), self.number), 4), align=4)
        one = f.let(f"insertelement {FOUR} poison, float {f.let(f'fneg float {of_x}')}, i64 0")
        found = _fma(f, offsets, f.shuffle(FOUR, one, one, [0] * 4), found)
        return _fma(f, f.load(FOUR, self.scales, f.mul(output, 4), align=4), found, before)


def _fma(f: Function, a: str, b: str, c: str) -> str:
    return f.let(f"call {FOUR} @llvm.fma.v4f32({FOUR} {a}, {FOUR} {b}, {FOUR} {c})")


def _multiply_one(f: Function, part: _Part, w: str, output: str, y: str) -> None:
    """Adds the products of the one token with OUTPUTS rows of w to y."""
    width = _bytes(f, "%C")
    rows = [f.at(w, f.mul(f.add(output, i), width)) for i in range(matmul.OUTPUTS)]
    later = f.mul(width, "%F")  # the same rows of the next group
    x, product = f.at("%x", f.mul(part.start, 4)), matmul.OneToken(f)
    with f.each(0, part.depth, BLOCK) as column:
        place, offset = f.at(x, f.mul(column, 4)), _bytes(f, column)
        numbers = [f.load(FLOATS, place, 32 * k, align=4) for k in range(len(PLACES))]
        for i, row in enumerate(rows):
            address = f.at(row, offset)
            f.fetch(f.at(address, later))
            product.add(i, numbers, _read(f, address))
    product.finish(part, output, y)


def _fill(f: Function, w: str, panel: str) -> None:
    """Writes what is multiplied of LANES rows of w to the panel."""
    width = _bytes(f, "%C")
    later = f.mul(width, "%F")
    with f.each(0, matmul.LANES, 1) as row:
        of_row, to = f.at(w, f.mul(row, width)), f.at(panel, f.mul(row, 4 * matmul.DEPTH))
        with f.each(0, "%part", BLOCK) as column:
            address, place = f.at(of_row, _bytes(f, column)), f.at(to, f.mul(column, 4))
            f.fetch(f.at(address, later))
            for k, numbers in enumerate(_read(f, address)):
                f.store(f"{FLOATS} {numbers}", place, 32 * k, align=32)


def _bytes(f: Function, columns: str) -> str:
    """Returns how many bytes the values of so many columns take."""
    return f.let(f"ashr exact i64 {columns}, 1")


def _read(f: Function, address: str) -> list[str]:
    """Reads BLOCK values where they are in 32 bits, 8 more each, as float32."""

    def all_of(number: int) -> str:
        return f"<{', '.join([f'i32 {number}'] * 8)}>"

    bits = f.load(EIGHT, address, align=1)
    bits = f.let(f"xor {EIGHT} {bits}, {all_of(0x88888888)}")
    found = []
    for k, place in enumerate(PLACES):
        moved = bits if 4 * k == place else f.let(f"lshr {EIGHT} {bits}, {all_of(4 * k - place)}")
        half = f.let(f"and {EIGHT} {moved}, {all_of(15 << place)}")
        found.append(f.let(f"sitofp {EIGHT} {half} to {FLOATS}"))
    return found
