"""Multiplies with a matrix of 4 or 8 bits where it lies, whose groups of columns have scales: y =
x @ w[index].T.

Values [N, G, F, D / G] are of 4 bits, two in a byte with the first in the lower half, int8 or
float8_e4m3fn; a group's columns are a multiple of `COLUMNS`, F of 16. Those of 4 bits stand for the
16 numbers of `table` [1, 1, 16]. What they stand for, less the zero point of the group, times its
scale is a number of w, rounded to the dtype of x: scales and zeros [N, G, F], or [1, G, F] of the
matrix that the index says, or [1, 0, 0] where there are none. All three are float32, but scales may
be bfloat16, and zeros int8. A result beside y gets x in the order in which columns are read, where
this is not theirs.

Some rows of w are written as those numbers to a panel in the first-level cache, and multiplied from
there as `matmul` and `matmul512` do, with the same sums. A vector of 16 numbers is the table of 4
bits: a group's own one is made of it, with its scale and zero point, and one instruction looks up
as many values as a vector has numbers. For one token, and with AVX-512 for up to `FEW`, there is no
panel: numbers are multiplied as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from kernels_pallas.cpu import matmul, matmul512
from kernels_pallas.cpu.function import (
    FLOATS,
    SIXTEEN,
    Function,
    blocks,
    integers,
    of_bfloat16,
    totals,
)
from kernels_pallas.cpu.products import (
    TASK_OUTPUTS,
    UNSIGNED,
    UNSIGNED_HALVES,
    Operands,
    kernel,
    used_rows,
)

BITS = {"int4": 4, "int4_by_64": 4, "int4_by_128": 4, "int8": 8, "float8_e4m3fn": 8}
"""Kinds of values, those of 4 bits under three names: with AVX-512 those for bfloat16 in groups of
a multiple of 64 or 128 columns are read by so many, every second or fourth one together.
"""

DTYPES = ("bfloat16", "float32")
"""Numbers of w are of one of these."""

HANDLERS, HANDLERS512 = (
    {
        (kind, dtype): f"jaxkv_{name}_{kind}_{dtype}"
        for kind in BITS
        for dtype in DTYPES
        if "_by_" not in kind or (name, dtype) == ("packed512", "bfloat16")
    }
    for name in ("packed", "packed512")
)

COLUMNS, MULTIPLE = 32, 16
"""A group's columns are a multiple of the one, F of the other."""

AT_ONCE = 8
"""Rows of w that are multiplied with one token, each with a sum of its own: a fifth faster than 4,
and than 16 (docs/benchmarks/cpu.md).
"""

FEW = 4
"""So many tokens are multiplied with numbers as they come: the sums of more, with 4 rows of w, have
no room in registers beside what makes numbers (docs/benchmarks/cpu.md).
"""

PAIRS, WORDS = "<32 x bfloat>", "<32 x i16>"

DECLARED = ("declare <32 x i8> @llvm.x86.avx2.pshuf.b(<32 x i8>, <32 x i8>)",)
DECLARED512 = (
    *matmul512.DECLARED,
    f"declare {PAIRS} @llvm.x86.avx512bf16.cvtne2ps2bf16.512({SIXTEEN}, {SIXTEEN})",
    f"declare {SIXTEEN} @llvm.x86.avx512.permvar.sf.512({SIXTEEN}, <16 x i32>)",
    "declare <32 x i16> @llvm.x86.avx512.permvar.hi.512(<32 x i16>, <32 x i16>)",
)
"""The functions call these too."""

ADDRESSES = ("x", "w", "y", "scales", "zeros", "table")
SIZES = {"first": "first_output", "T": "num_tokens", "N": "num_outputs"}
SIZES |= {name: name for name in ("D", "F", "C", "scales_bytes", "zeros_bytes")}
"""Numbers that the function for a task takes, by their names there, and how a task calls them."""


@dataclass(frozen=True, slots=True)
class Form:
    """Says what values become what, by vectors of how many numbers."""

    kind: str
    dtype: str
    lanes: int
    is_scaled: bool = True

    @property
    def name(self) -> str:
        names = HANDLERS if self.lanes == 8 else HANDLERS512
        return names[self.kind, self.dtype]

    @property
    def tile(self) -> str:
        return f"tile_{self.name}{'' if self.is_scaled else '_as_they_are'}"

    @property
    def is_rounded(self) -> bool:
        """Tells whether numbers are float32 with values of bfloat16."""
        return self.dtype == "bfloat16" and self.lanes == 8

    @property
    def operands(self) -> Operands:
        is_short = self.lanes == 16 and self.dtype == "bfloat16"
        return Operands(
            x_bytes=2 if is_short else 4,
            w_bits=BITS[self.kind],
            counted=UNSIGNED_HALVES if is_short else UNSIGNED,
            more=ADDRESSES[3:],
            beside=("ordered",) if self.columns > COLUMNS else (),
            in_groups=True,
        )

    @property
    def columns(self) -> int:
        """Returns how many columns of a row are read at once."""
        return int(self.kind.partition("_by_")[2] or COLUMNS)

    @property
    def width(self) -> int:
        """Returns the bytes of a number in a panel."""
        return self.operands.x_bytes

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of a vector in a panel."""
        return 4 * self.lanes

    @property
    def vector(self) -> str:
        if self.width == 2:
            return PAIRS
        return SIXTEEN if self.lanes == 16 else FLOATS


def functions(lanes: int) -> list[Function]:
    """Writes the handlers, and what they call."""
    written = []
    for kind, dtype in HANDLERS if lanes == 8 else HANDLERS512:
        form = Form(kind, dtype, lanes)
        for one in (form, replace(form, is_scaled=False))[: 1 + (BITS[kind] == 8)]:
            written.append(_tile(one) if lanes == 8 else _tile512(one))
        written += kernel(
            form.name, form.operands, partial(_call, form), partial(_prepare, form)
        ).functions()
    return written


def _header(form: Form) -> str:
    addresses = ", ".join(f"ptr %{name}" for name in ADDRESSES)
    sizes = ", ".join(f"i64 %{name}" for name in SIZES)
    return f"define internal void @{form.tile}({addresses}, {sizes}) noinline"


def _prepare(form: Form, f: Function, known: dict[str, str]) -> None:
    """Writes x in the order in which columns are read."""
    if form.columns == COLUMNS:
        return
    size, width = 2 * form.columns, f.mul(known["D"], 2)
    with used_rows(f, known) as (row, count):
        first = f.mul(row, width)
        with f.each(first, f.add(first, f.mul(count, width)), size) as place:
            columns = [
                f.load(WORDS, known["x"], f.add(place, far), align=2) for far in range(0, size, 64)
            ]
            for i, numbers in enumerate(_dealt(f, columns)):
                f.store(f"{WORDS} {numbers}", known["ordered"], f.add(place, 64 * i), align=2)
    known["x"] = known["ordered"]


def _dealt(f: Function, vectors: Sequence[str]) -> list[str]:
    """Deals numbers out to as many vectors as they come in: the first one to the first, ..."""
    if len(vectors) == 1:
        return list(vectors)
    pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
    halves = [[f.shuffle(WORDS, *two, range(odd, 64, 2)) for two in pairs] for odd in (0, 1)]
    even, odd = (_dealt(f, half) for half in halves)
    return [one for both in zip(even, odd, strict=True) for one in both]


def _call(form: Form, f: Function, part: Mapping[str, str]) -> None:
    if BITS[form.kind] == 4:
        _call_tiles(form, f, part)
        return
    has_none = f.let(f"icmp eq ptr {part['scales']}, null")
    with f.where(has_none):
        _call_tiles(replace(form, is_scaled=False), f, part)
    with f.where(f.let(f"xor i1 {has_none}, true")):
        _call_tiles(form, f, part)


def _call_tiles(form: Form, f: Function, part: Mapping[str, str]) -> None:
    def call(y: str, first: str) -> None:
        own = {**part, "y": y, "first_output": first}
        addresses = ", ".join(f"ptr {own[name]}" for name in ADDRESSES)
        sizes = ", ".join(f"i64 {own[name]}" for name in SIZES.values())
        f.do(f"call void @{form.tile}({addresses}, {sizes})")

    if form.lanes == 16:
        call(part["y"], part["first_output"])
        return
    with f.each(0, part["num_outputs"], matmul.LANES) as output:
        call(f.at(part["y"], f.mul(output, 4)), f.add(part["first_output"], output))


def _tile(form: Form) -> Function:
    """Writes the function for a few outputs of some tokens with AVX2."""

    def add(f: Function, start: str, depth: str, panel: str, y: str) -> None:
        part = matmul.Part("float32", start, depth, panel)
        rows = _Rows(form, f, start, depth, matmul.DEPTH, matmul.LANES)
        rows.widen(matmul.LANES)
        is_one = f.let("icmp eq i64 %T, 1")
        with f.where(is_one), f.each(0, matmul.LANES, matmul.OUTPUTS) as output:
            _multiply_one(rows, part, output, y)
        with f.where(f.let(f"xor i1 {is_one}, true")):
            rows.fill("0", matmul.LANES, panel, matmul.DEPTH)
            matmul.multiply_all(f, part, y)

    return matmul.tile(_header(form), add)


def _multiply_one(rows: _Rows, part: matmul.Part, output: str, y: str) -> None:
    """Adds the products of the one token with OUTPUTS rows of w to y."""
    f, x = rows.f, rows.f.at("%x", rows.f.mul(part.start, 4))
    sums = [f.variable(FLOATS, align=32) for _ in range(matmul.OUTPUTS)]
    for place in sums:
        f.store(f"{FLOATS} zeroinitializer", place, align=32)
    with rows.pieces(output, matmul.OUTPUTS) as (column, reads):
        place = f.at(x, f.mul(column, 4))
        numbers = [f.load(FLOATS, place, 4 * j, align=4) for j in range(0, COLUMNS, 8)]
        for to, read in zip(sums, reads, strict=True):
            for number, weights in zip(numbers, read(), strict=True):
                added = f.fma(weights, number, f.load(FLOATS, to, align=32))
                f.store(f"{FLOATS} {added}", to, align=32)
    (found,) = totals(f, [[f.load(FLOATS, place, align=32) for place in sums]])
    matmul.add_totals(f, found, f.at(y, f.mul(output, 4)))


def _tile512(form: Form) -> Function:
    """Writes the function for some outputs of some tokens with AVX-512."""
    f = Function(_header(form), lanes=16)
    most, size = matmul512.DEPTH[form.dtype], matmul512.OUTPUTS
    panel = f.variable(f"[{size * most * form.width} x i8]", align=64)
    rows_of_w = [f.at(panel, i * most * form.width) for i in range(size)]
    with f.each(0, "%D", most) as start:
        depth = f.least(f.sub("%D", start), most)
        rows = _Rows(form, f, start, depth, most, TASK_OUTPUTS)
        rows.widen("%N")
        for count in range(1, FEW + 1):
            with f.where(f.let(f"icmp eq i64 %T, {count}")):
                if count == 1 and form.columns == 128:
                    _multiply_one_by_groups(rows)
                    continue
                outputs = AT_ONCE if count == 1 else size
                with f.each(0, "%N", outputs) as output:
                    _multiply_few512(rows, count, output, outputs)
        are_more = f.let(f"icmp sgt i64 %T, {FEW}")
        with f.where(are_more), f.each(0, "%N", size) as output:
            rows.fill(output, size, panel, most)
            for count, first, stop in blocks(f, "%T", matmul512.ROWS):
                with f.each(first, stop, count) as t:
                    tokens = [f.add(t, r) for r in range(count)]
                    matmul512.multiply(f, form.dtype, tokens, rows_of_w, output, start, depth)
    f.do("ret void")
    return f


def _multiply_few512(rows: _Rows, count: int, output: str, outputs: int) -> None:
    """Adds the products of so many tokens with `outputs` rows of w to y."""
    f, form, size = rows.f, rows.form, matmul512.OUTPUTS
    tokens = [str(t) for t in range(count)]
    products = [
        matmul512.Product(f, form.dtype, tokens, rows.start) for _ in range(0, outputs, size)
    ]
    with rows.pieces(output, outputs) as (column, reads):
        step = matmul512.COLUMNS[form.dtype]
        of_rows = [read() for read in reads]
        for j in range(form.columns // step):
            numbers = products[0].read(f.add(column, j * step))
            for i, weights in enumerate(of_rows):
                products[i // size].add(i % size, numbers, weights[j])
    for i, product in enumerate(products):
        product.finish(f.add(output, i * size))


def _multiply_one_by_groups(rows: _Rows) -> None:
    """Adds the products of the one token with the task's rows of w to y: of all rows with some
    columns, which lie side by side, before the next columns, which are fetched meanwhile.
    """
    f, form, size = rows.f, rows.form, matmul512.OUTPUTS
    sums = f.variable(f"[{TASK_OUTPUTS} x {SIXTEEN}]", align=64)
    with f.each(0, "%N", 1) as output:
        f.store(f"{SIXTEEN} zeroinitializer", sums, f.mul(output, 64), align=64)
    with f.each(rows.start, rows.stop, form.columns) as column:
        x = [f.load(PAIRS, "%x", f.add(f.mul(column, 2), 64 * i), align=2) for i in range(4)]
        group, values = rows.find(column, "0")
        # Behind the last columns come the first ones of the next task.
        is_last = f.let(f"icmp eq i64 {column}, {f.sub('%D', form.columns)}")
        next_column = f.let(f"select i1 {is_last}, i64 0, i64 {f.add(column, form.columns)}")
        _, later = rows.find(next_column, f.let(f"select i1 {is_last}, i64 %N, i64 0"))
        with f.each(0, "%N", size) as output:
            for row in [f.add(output, i) for i in range(size)]:
                offset, place = f.mul(row, rows.row_bytes), f.mul(row, 64)
                f.fetch(f.at(later, offset), stays=True)
                added = f.load(SIXTEEN, sums, place, align=64)
                weights = _GroupOf4(rows, group, row).read(f.at(values, offset))
                for of_x, of_w in zip(x, weights, strict=True):
                    added = matmul512.added(f, form.dtype, added, of_x, of_w)
                f.store(f"{SIXTEEN} {added}", sums, place, align=64)
    with f.each(0, "%N", size) as output:
        places = [f.mul(f.add(output, i), 64) for i in range(size)]
        (found,) = totals(f, [[f.load(SIXTEEN, sums, place, align=64) for place in places]])
        matmul512.add_totals(f, found, rows.start, f.mul(output, 4))


class _Rows:
    """Is columns [start, start + depth) of a task's rows of w. Of scales and zero points of their
    groups it has a copy in float32: [groups, num_rows], zero points of 0 where there are none.
    columns: the most that `depth` may be.
    """

    def __init__(
        self, form: Form, f: Function, start: str, depth: str, columns: int, num_rows: int
    ) -> None:
        self.form, self.f, self.start, self.stop = form, f, start, f.add(start, depth)
        self.num_rows = num_rows
        self.first_group = f.let(f"sdiv i64 {start}, %C")
        self.stop_group = f.divided(self.stop, "%C")
        self.row_bytes = self.bytes_of("%C")
        room = f"[{(columns // COLUMNS + 1) * num_rows} x float]"
        self.copies = {name: f.variable(room, align=64) for name in READ_AS}

    def bytes_of(self, count: str) -> str:
        """Returns the bytes of so many values."""
        return self.f.let(f"ashr exact i64 {count}, 1") if BITS[self.form.kind] == 4 else count

    def widen(self, num_rows: object) -> None:
        """Writes scales and zero points of so many rows."""
        if not self.form.is_scaled:
            return
        f = self.f
        with (
            f.each(self.first_group, self.stop_group, 1) as group,
            f.each(0, num_rows, f.lanes) as row,
        ):
            place = f.add(f.add(f.mul(group, "%F"), "%first"), row)
            to = self.place_of(group, row)
            for name, widths in READ_AS.items():
                for width in widths:
                    with f.where(f.let(f"icmp eq i64 %{name}_bytes, {width}")):
                        numbers = _read_as(f, f.at(f"%{name}", f.mul(place, width)), width)
                        f.store(f"{f.vector} {numbers}", self.copies[name], to, align=4 * f.lanes)

    def place_of(self, group: str, row: str) -> str:
        """Returns how many bytes from the first one the copy of a number is."""
        f = self.f
        groups = f.mul(f.sub(group, self.first_group), self.num_rows)
        return f.mul(f.add(groups, row), 4)

    def find(self, column: str, row: str) -> tuple[str, str]:
        """Returns the group of a column, and where the column's value is in a row of the task."""
        f = self.f
        group = f.let(f"sdiv i64 {column}, %C")
        place = f.add(f.mul(group, "%F"), f.add("%first", row))
        value = f.add(f.mul(place, "%C"), f.sub(column, f.mul(group, "%C")))
        return group, f.at("%w", self.bytes_of(value))

    def fill(self, row: str, num_rows: int, panel: str, panel_columns: int) -> None:
        """Writes so many rows from this one on to the panel."""
        f, form = self.f, self.form
        with self.pieces(row, num_rows) as (column, reads):
            place = f.at(panel, f.mul(column, form.width))
            for i, read in enumerate(reads):
                to = f.at(place, i * panel_columns * form.width)
                for j, numbers in enumerate(read()):
                    offset = j * form.num_bytes
                    f.store(f"{form.vector} {numbers}", to, offset, align=form.num_bytes)

    @contextmanager
    def pieces(
        self, row: str, num_rows: int
    ) -> Iterator[tuple[str, list[Callable[[], list[str]]]]]:
        """Repeats what is written inside for every `form.columns` of columns. Yields their first
        one, counted from `start`, and for each of so many rows what reads its numbers, in vectors;
        meanwhile as much of the next rows is fetched, one line after the other.
        """
        f, form = self.f, self.form
        with f.each(self.first_group, self.stop_group, 1) as group:
            first = f.mul(group, "%C")
            begin = f.most(first, self.start)
            end = f.least(f.add(first, "%C"), self.stop)
            kind = _GroupOf4 if BITS[form.kind] == 4 else _Group
            groups = [kind(self, group, f.add(row, i)) for i in range(num_rows)]
            _, values = self.find(first, row)
            _, next_rows = self.find(first, f.add(row, num_rows))
            num_bytes = num_rows * form.columns * BITS[form.kind] // 8
            with f.each(begin, end, form.columns) as column:
                inside = self.bytes_of(f.sub(column, first))
                lines = f.at(next_rows, f.mul(inside, num_rows))
                for line in range(0, num_bytes, 64):
                    # In the second-level cache AVX2 takes 5% to 13% longer, AVX-512 2% less.
                    f.fetch(f.at(lines, line), stays=f.lanes == 16)
                places = [
                    f.at(values, f.add(inside, f.mul(self.row_bytes, i))) for i in range(num_rows)
                ]
                yield (
                    f.sub(column, self.start),
                    [partial(of.read, at) for of, at in zip(groups, places, strict=True)],
                )


READ_AS = {"scales": (2, 4), "zeros": (0, 1, 4)}
"""Bytes that a scale and a zero point may have, 0 where there is none."""


def _read_as(f: Function, address: str, num_bytes: int) -> str:
    """Reads a vector of float32, bfloat16 or int8 as float32; of 0 bytes zeros."""
    if num_bytes == 0:
        return "zeroinitializer"
    if num_bytes == 4:
        return f.load(f.vector, address, align=4)
    if num_bytes == 2:
        return of_bfloat16(f, address, 0)
    short = f.load(f"<{f.lanes} x i8>", address, align=1)
    return f.let(f"sitofp <{f.lanes} x i8> {short} to {f.vector}")


class _Group:
    """Is a group of columns of a row of w, of values of 8 bits."""

    def __init__(self, rows: _Rows, group: str, row: str) -> None:
        form, f = self.form, self.f = rows.form, rows.f
        # A float16 of the bits of a float8 has another bias: it is 2^8 times as small.
        self.scale = 256.0 if form.kind == "float8_e4m3fn" else 1.0
        if form.is_scaled:
            place = rows.place_of(group, row)
            scale, zero = (
                f.filled("float", f.load("float", rows.copies[name], place, align=4))
                for name in ("scales", "zeros")
            )
            self.own_scale = f.floats("fmul", scale, f.constant(self.scale))
            self.zero = f.floats("fmul", zero, f.constant(1 / self.scale))

    def read(self, values: str) -> list[str]:
        """Reads `form.columns` numbers of w, in vectors."""
        lanes = self.f.lanes
        numbers = [self._number(values, column) for column in range(0, COLUMNS, lanes)]
        return [_shortened(self.f, numbers)] if self.form.width == 2 else numbers

    def _number(self, values: str, column: int) -> str:
        """Reads a vector of numbers of w, in float32."""
        f, lanes = self.f, self.f.lanes
        narrow = f.load(f"<{lanes} x i8>", values, column, align=1)
        if self.form.kind == "int8":
            whole = f.let(f"sext <{lanes} x i8> {narrow} to {f.whole}")
            return self._scaled(f.let(f"sitofp {f.whole} {whole} to {f.vector}"))
        kind = f"<{lanes} x i16>"
        bits = f.let(f"sext <{lanes} x i8> {narrow} to {kind}")
        bits = f.let(f"shl {kind} {bits}, {_all(7, lanes)}")
        bits = f.let(f"and {kind} {bits}, {_all(~0x4000, lanes)}")  # one of two signs
        numbers = f.let(f"bitcast {kind} {bits} to <{lanes} x half>")
        return self._scaled(f.let(f"fpext <{lanes} x half> {numbers} to {f.vector}"))

    def _scaled(self, numbers: str) -> str:
        f = self.f
        if not self.form.is_scaled:  # as exact in bfloat16
            return numbers if self.scale == 1.0 else f.floats("fmul", numbers, f.constant(256.0))
        found = f.floats("fmul", f.floats("fsub", numbers, self.zero), self.own_scale)
        return _rounded(f, found) if self.form.is_rounded else found


class _GroupOf4(_Group):
    """Is a group of values of 4 bits, which are looked up in a table of its own."""

    def __init__(self, rows: _Rows, group: str, row: str) -> None:
        super().__init__(rows, group, row)
        form, f, lanes = self.form, self.f, self.f.lanes
        table = [
            self._scaled(f.load(f.vector, "%table", 4 * i, align=4)) for i in range(0, 16, lanes)
        ]
        if form.width == 2:  # twice, so that a fifth bit of an index does not count
            self.tables = [f.let(f"bitcast {PAIRS} {_shortened(f, table * 2)} to <32 x i16>")]
        elif lanes == 16:
            self.tables = table
        else:
            self.tables = self._bytes_of(table)

    def read(self, values: str) -> list[str]:
        f = self.f
        if f.lanes == 8:
            return self._by_bytes(values)
        if self.form.width == 4:
            return [self._by_numbers(f.at(values, i)) for i in (0, 8)]
        if self.form.kind == "int4_by_128":
            words = f.load(WORDS, values, align=1)
            return [self._found(words)] + [
                self._found(f.let(f"lshr {WORDS} {words}, {_all(bits, 32)}")) for bits in (4, 8, 12)
            ]
        if self.form.kind == "int4_by_64":
            even = f.let(f"zext <32 x i8> {f.load('<32 x i8>', values, align=1)} to <32 x i16>")
            return [self._found(even), self._found(f.let(f"lshr <32 x i16> {even}, {_all(4, 32)}"))]
        both = self._widened(values, 16)
        both = f.let(f"or {f.whole} {both}, {f.let(f'shl {f.whole} {both}, {_all(12, 16, 32)}')}")
        return [self._found(f.let(f"bitcast {f.whole} {both} to <32 x i16>"))]

    def _found(self, indices: str) -> str:
        """Looks up 32 numbers of bfloat16."""
        f, operands = self.f, f"<32 x i16> {self.tables[0]}, <32 x i16> {indices}"
        found = f.let(f"call <32 x i16> @llvm.x86.avx512.permvar.hi.512({operands})")
        return f.let(f"bitcast <32 x i16> {found} to {PAIRS}")

    def _widened(self, address: str, count: int) -> str:
        narrow = self.f.load(f"<{count} x i8>", address, align=1)
        return self.f.let(f"zext <{count} x i8> {narrow} to <{count} x i32>")

    def _by_numbers(self, values: str) -> str:
        f = self.f
        low = self._widened(values, 8)
        high = f.let(f"lshr <8 x i32> {low}, {_all(4, 8, 32)}")
        # Of an index the lowest four bits count.
        indices = f.shuffle("<8 x i32>", low, high, [i // 2 + 8 * (i % 2) for i in range(16)])
        operands = f"{f.vector} {self.tables[0]}, {f.whole} {indices}"
        return f.let(f"call {f.vector} @llvm.x86.avx512.permvar.sf.512({operands})")

    def _bytes_of(self, table: Sequence[str]) -> list[str]:
        """Returns the first, second, ... bytes of the table's numbers, each twice; of bfloat16 the
        last two.
        """
        f = self.f
        first, second = table
        numbers = f.shuffle(f.vector, first, second, range(16))
        bits = f.let(f"bitcast {SIXTEEN} {numbers} to <16 x i32>")
        found = []
        for place in (16, 24) if self.form.is_rounded else (0, 8, 16, 24):
            one = f.let(f"lshr <16 x i32> {bits}, {_all(place, 16, 32)}")
            one = f.let(f"trunc <16 x i32> {one} to <16 x i8>")
            found.append(f.shuffle("<16 x i8>", one, one, [*range(16)] * 2))
        return found

    def _by_bytes(self, values: str) -> list[str]:
        """Looks up byte by byte, 32 at once. An instruction brings together what two registers have
        in the same half: so the bytes of columns 0 to 3, 8 to 11, ... are in the first one.
        """
        f, words = self.f, "<16 x i16>"
        order = [i + j for i in (0, 2) for j in (0, 0, 1, 1)]
        order = [4 * i + j for half in (order[:4], order[4:]) for i in range(4) for j in half]
        narrow = f.load("<16 x i8>", values, align=1)
        twice = f.let(
            f"bitcast <32 x i8> {f.shuffle('<16 x i8>', narrow, narrow, order)} to {words}"
        )
        low = f.let(f"and {words} {twice}, {_all(0x000F, 16)}")
        high = f.let(
            f"and {words} {f.let(f'lshr {words} {twice}, {_all(4, 16)}')}, {_all(0x0F00, 16)}"
        )
        indices = f.let(f"bitcast {words} {f.let(f'or {words} {low}, {high}')} to <32 x i8>")
        found = [
            f.let(f"call <32 x i8> @llvm.x86.avx2.pshuf.b(<32 x i8> {table}, <32 x i8> {indices})")
            for table in self.tables
        ]
        pairs = [_side_by_side(f, 8, *found[i : i + 2]) for i in range(0, len(found), 2)]
        if len(pairs) == 1:
            pairs.insert(0, ["zeroinitializer"] * 2)
        numbers = [_side_by_side(f, 16, low, high) for low, high in zip(*pairs, strict=True)]
        return [f.let(f"bitcast {words} {x} to {FLOATS}") for two in numbers for x in two]


def _side_by_side(f: Function, bits: int, a: str, b: str) -> list[str]:
    """Brings numbers of so many bits of two registers together in pairs, in each half of both.
    Returns two vectors of 16 bits.
    """
    count = 256 // bits
    kind, half = f"<{count} x i{bits}>", count // 2
    found = []
    for start in (0, half // 2):
        lanes = [i + j for i in (0, half) for j in range(start, start + half // 2)]
        mask = [i + far for i in lanes for far in (0, count)]
        one = f.shuffle(kind, a, b, mask)
        found.append(f.let(f"bitcast {kind} {one} to <16 x i16>"))
    return found


def _shortened(f: Function, numbers: Sequence[str]) -> str:
    """Rounds two vectors to one of bfloat16."""
    first, second = numbers
    operands = f"{SIXTEEN} {second}, {SIXTEEN} {first}"
    return f.let(f"call {PAIRS} @llvm.x86.avx512bf16.cvtne2ps2bf16.512({operands})")


def _rounded(f: Function, numbers: str) -> str:
    """Rounds to numbers of bfloat16, of two that are as near to the even one."""
    bits = f.let(f"bitcast {f.vector} {numbers} to {f.whole}")
    last = f.let(f"lshr {f.whole} {bits}, {integers([16] * f.lanes)}")
    last = f.let(f"and {f.whole} {last}, {integers([1] * f.lanes)}")
    bits = f.let(f"add {f.whole} {bits}, {integers([0x7FFF] * f.lanes)}")
    bits = f.let(f"add {f.whole} {bits}, {last}")
    bits = f.let(f"and {f.whole} {bits}, {integers([-0x10000] * f.lanes)}")
    return f.let(f"bitcast {f.whole} {bits} to {f.vector}")


def _all(number: int, count: int, bits: int = 16) -> str:
    """Returns a constant vector of one number."""
    return f"<{', '.join([f'i{bits} {number}'] * count)}>"
