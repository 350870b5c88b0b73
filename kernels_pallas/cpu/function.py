"""Writes functions in LLVM's intermediate representation, for processors with AVX2 or AVX-512:
eight or sixteen numbers of 32 bits at a time.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

FLOATS, FOUR = "<8 x float>", "<4 x float>"
EIGHT, SHORTS = "<8 x i32>", "<16 x i16>"

SIXTEEN = "<16 x float>"

DECLARED = (
    f"declare {FLOATS} @llvm.fma.v8f32({FLOATS}, {FLOATS}, {FLOATS})",
    f"declare {FOUR} @llvm.fma.v4f32({FOUR}, {FOUR}, {FOUR})",
    f"declare {FLOATS} @llvm.rint.v8f32({FLOATS})",
    f"declare {SIXTEEN} @llvm.fma.v16f32({SIXTEEN}, {SIXTEEN}, {SIXTEEN})",
    f"declare {SIXTEEN} @llvm.rint.v16f32({SIXTEEN})",
    f"declare {EIGHT} @llvm.x86.avx2.pmadd.wd({SHORTS}, {SHORTS})",
    f"declare i32 @llvm.vector.reduce.add.v8i32({EIGHT})",
    f"declare i32 @llvm.vector.reduce.or.v8i32({EIGHT})",
    "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
    "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)",
    "declare ptr @malloc(i64)",
    "declare void @free(ptr)",
    "declare i32 @sched_yield()",
)
"""The functions call these."""


@dataclass(slots=True)
class Function:
    """A function in LLVM's intermediate representation, written line by line. lanes: so many floats
    are a vector.
    """

    header: str
    lanes: int = 8
    lines: list[str] = field(default_factory=list)
    variables: list[str] = field(default_factory=list)
    """Memory on the stack. LLVM makes registers of those that are single values."""
    count: int = 0

    def name(self, prefix: str = "v") -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def do(self, text: str) -> None:
        self.lines.append(f"  {text}")

    def let(self, text: str) -> str:
        """Names the result of an instruction."""
        name = f"%{self.name()}"
        self.do(f"{name} = {text}")
        return name

    def variable(self, kind: str, align: int = 8) -> str:
        name = f"%{self.name()}"
        self.variables.append(f"  {name} = alloca {kind}, align {align}")
        return name

    def add(self, a: object, b: object) -> str:
        return self.let(f"add i64 {a}, {b}")

    def mul(self, a: object, b: object) -> str:
        return self.let(f"mul i64 {a}, {b}")

    def sub(self, a: object, b: object) -> str:
        return self.let(f"sub i64 {a}, {b}")

    def divided(self, number: str, by: object) -> str:
        """Returns number / by, rounded up."""
        return self.let(f"sdiv i64 {self.add(number, self.add(by, -1))}, {by}")

    def least(self, a: object, b: object) -> str:
        is_less = self.let(f"icmp slt i64 {a}, {b}")
        return self.let(f"select i1 {is_less}, i64 {a}, i64 {b}")

    def most(self, a: object, b: object) -> str:
        is_more = self.let(f"icmp sgt i64 {a}, {b}")
        return self.let(f"select i1 {is_more}, i64 {a}, i64 {b}")

    @property
    def vector(self) -> str:
        return f"<{self.lanes} x float>"

    @property
    def whole(self) -> str:
        return f"<{self.lanes} x i32>"

    def floats(self, operation: str, a: str, b: str) -> str:
        """Does what an instruction does with two numbers, with those of two vectors."""
        return self.let(f"{operation} {self.vector} {a}, {b}")

    def fma(self, a: str, b: str, c: str) -> str:
        """Returns a * b + c of vectors."""
        operands = f"{self.vector} {a}, {self.vector} {b}, {self.vector} {c}"
        return self.let(f"call {self.vector} @llvm.fma.v{self.lanes}f32({operands})")

    def select(self, condition: str, a: str, b: str) -> str:
        """Returns numbers of a vector where a condition holds, of another one elsewhere."""
        condition = f"<{self.lanes} x i1> {condition}"
        return self.let(f"select {condition}, {self.vector} {a}, {self.vector} {b}")

    def larger(self, a: str, b: str) -> str:
        """Returns the larger ones of two vectors' numbers."""
        return self.select(self.floats("fcmp ogt", a, b), a, b)

    def filled(self, kind: str, number: str) -> str:
        """Returns a vector of the same number."""
        vector = f"<{self.lanes} x {kind}>"
        one = self.let(f"insertelement {vector} poison, {kind} {number}, i64 0")
        return self.shuffle(vector, one, one, [0] * self.lanes)

    def constant(self, value: float) -> str:
        """Returns a vector of a number, rounded to float32."""
        (rounded,) = struct.unpack("f", struct.pack("f", value))
        (bits,) = struct.unpack("Q", struct.pack("d", rounded))
        return f"<{', '.join([f'float 0x{bits:016X}'] * self.lanes)}>"

    def across(self, operation: Callable[[str, str], str], numbers: str) -> str:
        """Brings a vector's numbers together in pairs; each of those that come out is all."""
        distance = 1
        while distance < self.lanes:
            lanes = [i ^ distance for i in range(self.lanes)]
            numbers = operation(numbers, self.shuffle(self.vector, numbers, numbers, lanes))
            distance *= 2
        return numbers

    def shuffle(self, kind: str, a: str, b: str, lanes: Sequence[int]) -> str:
        mask = f"<{len(lanes)} x i32> {integers(lanes)}"
        return self.let(f"shufflevector {kind} {a}, {kind} {b}, {mask}")

    def at(self, base: str, offset: object) -> str:
        """Returns an address so many bytes behind another."""
        return self.let(f"getelementptr i8, ptr {base}, i64 {offset}")

    def load(self, kind: str, base: str, offset: object = 0, align: int = 8) -> str:
        return self.let(f"load {kind}, ptr {self.at(base, offset)}, align {align}")

    def store(self, value: str, base: str, offset: object = 0, align: int = 8) -> None:
        self.do(f"store {value}, ptr {self.at(base, offset)}, align {align}")

    def fetch(self, address: str, *, stays: bool = False) -> None:
        """Has memory brought into the cache, for one use, or to stay there for more."""
        locality = 2 if stays else 0
        self.do(f"call void @llvm.prefetch.p0(ptr {address}, i32 0, i32 {locality}, i32 1)")

    def label(self, name: str) -> None:
        self.lines.append(f"{name}:")

    @contextmanager
    def each(self, start: object, stop: object, step: object) -> Iterator[str]:
        """Repeats what is written inside for i = start, start + step, ... below stop."""
        head, body, end = self.name("head"), self.name("body"), self.name("end")
        place = self.variable("i64")
        self.do(f"store i64 {start}, ptr {place}")
        self.do(f"br label %{head}")
        self.label(head)
        i = self.let(f"load i64, ptr {place}")
        goes_on = self.let(f"icmp slt i64 {i}, {stop}")
        self.do(f"br i1 {goes_on}, label %{body}, label %{end}")
        self.label(body)
        yield i
        self.do(f"store i64 {self.add(i, step)}, ptr {place}")
        self.do(f"br label %{head}")
        self.label(end)

    @contextmanager
    def where(self, condition: str) -> Iterator[None]:
        """Does what is written inside only where the condition holds."""
        body, end = self.name("then"), self.name("end")
        self.do(f"br i1 {condition}, label %{body}, label %{end}")
        self.label(body)
        yield
        self.do(f"br label %{end}")
        self.label(end)

    def text(self) -> str:
        return "\n".join([f"{self.header} {{", "entry:", *self.variables, *self.lines, "}\n"])


def integers(numbers: Sequence[int]) -> str:
    """Returns a constant vector."""
    return f"<{', '.join(f'i32 {number}' for number in numbers)}>"


def exponential(f: Function, x: str) -> str:
    """Returns e to the power of a vector's numbers: 0 below -87.7, and no more than e^88.

    With x = n log 2 + r, where n is whole and r at most log 2 / 2, it is 2^n times the first eight
    terms of e^r, whose error is 5e-9. Of log 2 so many bits are taken at first that their product
    with n is exact.
    """
    for bound, outside in ((-88.0, "olt"), (88.0, "ogt")):
        is_outside = f.floats(f"fcmp {outside}", x, f.constant(bound))
        x = f.select(is_outside, f.constant(bound), x)
    n = f.floats("fmul", x, f.constant(1 / math.log(2)))
    n = f.let(f"call {f.vector} @llvm.rint.v{f.lanes}f32({f.vector} {n})")
    first = math.floor(math.log(2) * 2**15) / 2**15
    r = f.fma(n, f.constant(-first), x)
    r = f.fma(n, f.constant(first - math.log(2)), r)
    found = f.constant(1 / math.factorial(7))
    for k in reversed(range(7)):
        found = f.fma(found, r, f.constant(1 / math.factorial(k)))
    bits = f.let(f"fptosi {f.vector} {n} to {f.whole}")
    bits = f.let(f"add {f.whole} {bits}, {integers([127] * f.lanes)}")
    bits = f.let(f"shl {f.whole} {bits}, {integers([23] * f.lanes)}")
    return f.floats("fmul", found, f.let(f"bitcast {f.whole} {bits} to {f.vector}"))


def of_bfloat16(f: Function, address: str, offset: object) -> str:
    """Reads a vector of bfloat16 as float32."""
    bits = f.load(f"<{f.lanes} x i16>", address, offset, align=2)
    bits = f.let(f"zext <{f.lanes} x i16> {bits} to {f.whole}")
    bits = f.let(f"shl {f.whole} {bits}, {integers([16] * f.lanes)}")
    return f.let(f"bitcast {f.whole} {bits} to {f.vector}")


def totals(f: Function, rows: Sequence[Sequence[str]], *, whole: bool = False) -> list[str]:
    """Adds up the vectors of rows, of floats or of whole numbers, of which each row has four or,
    of sixteen numbers, one: gives the totals of each row. Eight numbers are added up in pairs:
    those side by side, pairs of those, both halves; sixteen in halves until one is left.
    """
    operation, number = ("add", "i32") if whole else ("fadd", "float")
    kind = f"<{f.lanes} x {number}>"

    def added(two: Sequence[str], lanes: Sequence[int], distance: int) -> str:
        """Adds numbers of two vectors, counted on from one to the other, to those so far behind."""
        a, b = two
        first, second = (f.shuffle(kind, a, b, [i + far for i in lanes]) for far in (0, distance))
        return f.let(f"{operation} <{len(lanes)} x {number}> {first}, {second}")

    def of_eight(row: Sequence[str]) -> str:
        even = [0, 2, 8, 10, 4, 6, 12, 14]
        pairs = [added(row[i : i + 2], even, 1) for i in (0, 2)]
        both = added(pairs, even, 1)
        return added((both, both), range(4), 4)

    def of_sixteen(rows: Sequence[Sequence[str]]) -> list[str]:
        """Adds up four rows at once. In the end a quarter of a vector has a row's totals."""
        quarters, columns = (0, 4, 8, 12), []
        for column in zip(*(rows[i % len(rows)] for i in range(4)), strict=True):
            halves = [added(column[i : i + 2], [*range(8), *range(16, 24)], 8) for i in (0, 2)]
            lanes = [i + j for i in (0, 8, 16, 24) for j in range(4)]
            columns.append(added(halves, lanes, 4))
        lanes = [i + j for i in quarters for j in (0, 1, 16, 17)]
        pairs = [added(columns[i : i + 2], lanes, 2) for i in (0, 2)]
        found = added(pairs, [i + j for i in quarters for j in (0, 2, 16, 18)], 1)
        return [f.shuffle(kind, found, found, range(i, i + 4)) for i in quarters[: len(rows)]]

    def of_one(found: str) -> str:
        for half in (8, 4, 2, 1):
            both = f"<{2 * half} x {number}>"
            first, second = (f.shuffle(both, found, found, range(i, i + half)) for i in (0, half))
            found = f.let(f"{operation} <{half} x {number}> {first}, {second}")
        return found

    if f.lanes == 8:
        return [of_eight(row) for row in rows]
    if len(rows[0]) == 1:
        return [of_one(only) for (only,) in rows]
    return [total for i in range(0, len(rows), 4) for total in of_sixteen(rows[i : i + 4])]


def blocks(f: Function, count: str, sizes: Sequence[int]) -> Iterator[tuple[int, str, str]]:
    """Divides `count` things: as many blocks of the first size as there are, then smaller ones.
    Yields the size, the first of its things and their end.
    """
    done = "0"
    for size in sizes:
        whole = f.let(f"sdiv i64 {f.sub(count, done)}, {size}")
        stop = f.add(done, f.mul(whole, size))
        yield size, done, stop
        done = stop
