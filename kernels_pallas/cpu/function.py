"""Writes functions in LLVM's intermediate representation, for processors with AVX2: eight numbers
of 32 bits at a time.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

FLOATS, FOUR = "<8 x float>", "<4 x float>"
EIGHT, SHORTS = "<8 x i32>", "<16 x i16>"

DECLARED = (
    f"declare {FLOATS} @llvm.fma.v8f32({FLOATS}, {FLOATS}, {FLOATS})",
    f"declare {FLOATS} @llvm.rint.v8f32({FLOATS})",
    f"declare {EIGHT} @llvm.x86.avx2.pmadd.wd({SHORTS}, {SHORTS})",
    f"declare i32 @llvm.vector.reduce.add.v8i32({EIGHT})",
    "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
    "declare ptr @malloc(i64)",
    "declare void @free(ptr)",
    "declare i32 @sched_yield()",
)
"""What the functions call."""


@dataclass(slots=True)
class Function:
    """A function in LLVM's intermediate representation, written line by line."""

    header: str
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

    def floats(self, operation: str, a: str, b: str) -> str:
        """Does what an instruction does with two numbers, with eight of them."""
        return self.let(f"{operation} {FLOATS} {a}, {b}")

    def fma(self, a: str, b: str, c: str) -> str:
        """Returns a * b + c of eight numbers."""
        operands = f"{FLOATS} {a}, {FLOATS} {b}, {FLOATS} {c}"
        return self.let(f"call {FLOATS} @llvm.fma.v8f32({operands})")

    def larger(self, a: str, b: str) -> str:
        """Returns the larger ones of eight numbers."""
        is_larger = self.let(f"fcmp ogt {FLOATS} {a}, {b}")
        return self.let(f"select <8 x i1> {is_larger}, {FLOATS} {a}, {FLOATS} {b}")

    def eight_of(self, kind: str, number: str) -> str:
        """Returns eight times the same number."""
        one = self.let(f"insertelement <8 x {kind}> poison, {kind} {number}, i64 0")
        return self.shuffle(f"<8 x {kind}>", one, one, [0] * 8)

    def across(self, operation: Callable[[str, str], str], numbers: str) -> str:
        """Brings eight numbers together in pairs; each of the eight that come out is all."""
        for distance in (1, 2, 4):
            others = self.shuffle(FLOATS, numbers, numbers, [i ^ distance for i in range(8)])
            numbers = operation(numbers, others)
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

    def fetch(self, address: str) -> None:
        """Has memory brought into the cache, for one use."""
        self.do(f"call void @llvm.prefetch.p0(ptr {address}, i32 0, i32 0, i32 1)")

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


def numbers(value: float) -> str:
    """Returns a constant vector of eight times a number, rounded to float32."""
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    (bits,) = struct.unpack("Q", struct.pack("d", rounded))
    return f"<{', '.join([f'float 0x{bits:016X}'] * 8)}>"


def exponential(f: Function, x: str) -> str:
    """Returns e to the power of eight numbers: 0 below -87.7, and no more than e^88.

    With x = n log 2 + r, where n is whole and r at most log 2 / 2, it is 2^n times the first eight
    terms of e^r, whose error is 5e-9. Of log 2 so many bits are taken at first that their product
    with n is exact.
    """
    for bound, outside in ((-88.0, "olt"), (88.0, "ogt")):
        is_outside = f.let(f"fcmp {outside} {FLOATS} {x}, {numbers(bound)}")
        x = f.let(f"select <8 x i1> {is_outside}, {FLOATS} {numbers(bound)}, {FLOATS} {x}")
    n = f.floats("fmul", x, numbers(1 / math.log(2)))
    n = f.let(f"call {FLOATS} @llvm.rint.v8f32({FLOATS} {n})")
    first = math.floor(math.log(2) * 2**15) / 2**15
    r = f.fma(n, numbers(-first), x)
    r = f.fma(n, numbers(first - math.log(2)), r)
    found = numbers(1 / math.factorial(7))
    for k in reversed(range(7)):
        found = f.fma(found, r, numbers(1 / math.factorial(k)))
    whole = f.let(f"fptosi {FLOATS} {n} to {EIGHT}")
    bits = f.let(f"add {EIGHT} {whole}, {integers([127] * 8)}")
    bits = f.let(f"shl {EIGHT} {bits}, {integers([23] * 8)}")
    return f.floats("fmul", found, f.let(f"bitcast {EIGHT} {bits} to {FLOATS}"))


def of_bfloat16(f: Function, address: str, offset: object) -> str:
    """Reads eight numbers of bfloat16 as float32."""
    bits = f.load("<8 x i16>", address, offset, align=2)
    bits = f.let(f"zext <8 x i16> {bits} to {EIGHT}")
    bits = f.let(f"shl {EIGHT} {bits}, {integers([16] * 8)}")
    return f.let(f"bitcast {EIGHT} {bits} to {FLOATS}")


def four_totals(f: Function, sums: Sequence[str], *, whole: bool = False) -> str:
    """Adds up four vectors of eight floats, or whole numbers, each in pairs: numbers side by side,
    pairs of those, both halves.
    """
    add, number = ("add", "i32") if whole else ("fadd", "float")

    def added(width: int, a: str, b: str) -> str:
        return f.let(f"{add} <{width} x {number}> {a}, {b}")

    def in_pairs(a: str, b: str) -> str:
        even = [0, 2, 8, 10, 4, 6, 12, 14]
        kind = f"<8 x {number}>"
        return added(8, *(f.shuffle(kind, a, b, [i + odd for i in even]) for odd in (0, 1)))

    def halves(width: int, x: str) -> str:
        half, kind = width // 2, f"<{width} x {number}>"
        return added(half, *(f.shuffle(kind, x, x, range(i, i + half)) for i in (0, half)))

    return halves(8, in_pairs(in_pairs(*sums[:2]), in_pairs(*sums[2:])))


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
