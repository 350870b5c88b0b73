"""Divides a product with a matrix into tasks: y [T, F] = x [T, D] @ w[index].T, w [N, F, D], or
[N, G, F, D / G] where groups of columns lie apart.

Or it is several products, each with a matrix of its own, or with the same: x [P, T, D], index [P].

Rows that are zeros behind the last one that is not are not multiplied, as y is zero there: so
padding costs little, and nobody has to say what is padding. An index beyond the ends means the
first or the last matrix, as in XLA's slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from kernels_pallas.cpu.function import EIGHT, Function, integers
from kernels_pallas.cpu.tasks import Buffer, Kernel

TASK_OUTPUTS, TASK_TOKENS = 64, 96
"""A task has at most so many: what `matmul` copies of w it copies anew for every 96 tokens, whose x
stays in the second-level cache meanwhile.
"""

UNSIGNED, UNSIGNED_HALVES = 0x7FFFFFFF, 0x7FFF7FFF
"""Bits of a number of floating point, or of two of 16 bits, but for signs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operands:
    """Says what a handler multiplies: how many bytes a number of x and how many bits one of w has;
    the 32 bits that a zero in x has, and those of them that count, as two zeros of floating point
    differ by sign. more: operands behind the index, of float32, bfloat16 or int8: a stack [N, A, B]
    as w is one, or [1, A, B] for any index, or [1, 0, 0] for none, or one for each product, with an
    axis in front. beside: results behind y and `used`. in_groups: w has groups of columns.
    """

    x_bytes: int
    w_bits: int
    zero: int = 0
    counted: int = -1
    more: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    in_groups: bool = False


def kernel(
    name: str,
    operands: Operands,
    multiply: Callable[[Function, Mapping[str, str]], None],
    prepare: Callable[[Function, dict[str, str]], None] | None = None,
) -> Kernel:
    """Returns the handler of this name. multiply: writes what multiplies outputs of tokens: x and
    y are addresses of the first ones, whose numbers are `first_token`, counted on from one product
    to the next, and `first_output`, and `num_tokens` and `num_outputs` says how many. C is the
    columns of a group, and for each of `more` there is how many bytes its numbers have, 0 for none.
    prepare: writes what is done once before, with `used_rows` of x, and may change what tasks know.
    """
    sizes = [f"{name}_{size}" for name in operands.more for size in ("bytes", "entry", "own")]
    sizes += [f"{name}_last" for name in ("w", *operands.more)]
    numbers = ("products", "blocks", "T", "D", "F", "C", *sizes)
    addresses = ("x", "w", "index", "y", "used", *operands.more, *operands.beside)
    return Kernel(
        name=name,
        num_operands=3 + len(operands.more),
        num_results=2 + len(operands.beside),
        shared=dict.fromkeys(numbers, "i64") | dict.fromkeys(addresses, "ptr"),
        begin=partial(_begin, operands, prepare),
        do=partial(_do, operands, multiply),
    )


def _begin(
    operands: Operands,
    prepare: Callable[[Function, dict[str, str]], None] | None,
    f: Function,
    given: Sequence[Buffer],
) -> Mapping[str, str]:
    names = ("x", "w", "index", *operands.more, "y", "used", *operands.beside)
    of = dict(zip(names, given, strict=True))
    x, w = of["x"], of["w"]
    T, D, F = x.dim(-2), x.dim(-1), w.dim(1 + operands.in_groups)
    num_products, num_blocks = _in_front(f, x, 2), f.divided(T, TASK_TOKENS)
    known = {
        "tasks": f.mul(f.mul(num_products, num_blocks), f.divided(F, TASK_OUTPUTS)),
        "products": num_products,
        "blocks": num_blocks,
        "T": T,
        "D": D,
        "F": F,
        "C": f.let(f"sdiv i64 {D}, {w.dim(1)}") if operands.in_groups else D,
        "w_last": f.add(w.dim(0), -1),
        **{name: buffer.data for name, buffer in of.items()},
    }
    width = f.mul(D, operands.x_bytes)
    with f.each(0, num_products, 1) as product:
        used = _used(operands, f, f.at(known["x"], f.mul(f.mul(product, T), width)), T, width)
        f.store(f"i32 {f.let(f'trunc i64 {used} to i32')}", known["used"], f.mul(product, 4), 4)
    for name in operands.more:
        known |= _stack(f, name, of[name])
    if prepare is not None:
        prepare(f, known)
    return known


@contextmanager
def used_rows(f: Function, known: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Repeats what is written inside for each product. Yields its first row of x, and how many are
    multiplied.
    """
    with f.each(0, known["products"], 1) as product:
        yield f.mul(product, known["T"]), _integer(f, known["used"], product)


def _in_front(f: Function, buffer: Buffer, rank: int) -> str:
    """Returns the size of the axis that a buffer may have more, 1 without."""
    has_more = f.let(f"icmp sgt i64 {buffer.rank}, {rank}")
    return f.let(f"select i1 {has_more}, i64 {buffer.dim(0)}, i64 1")


def _integer(f: Function, address: str, place: object) -> str:
    """Reads one of several int32."""
    number = f.load("i32", address, f.mul(place, 4), align=4)
    return f.let(f"sext i32 {number} to i64")


def _stack(f: Function, name: str, stack: Buffer) -> dict[str, str]:
    """Returns where a stack is, null where it has nothing; the bytes of its numbers, 0 where it has
    none, and of its entries; the last entry, and the bytes of what a product has of its own.
    """
    count, num_bytes = f.mul(stack.dim(-2), stack.dim(-1)), stack.num_bytes()
    is_none = f.let(f"icmp eq i64 {count}, 0")
    has_own = f.let(f"icmp sgt i64 {stack.rank}, 3")
    entry = f.mul(count, num_bytes)
    return {
        name: f.let(f"select i1 {is_none}, ptr null, ptr {stack.data}"),
        f"{name}_bytes": f.let(f"select i1 {is_none}, i64 0, i64 {num_bytes}"),
        f"{name}_entry": entry,
        f"{name}_last": f.add(stack.dim(-3), -1),
        f"{name}_own": f.let(f"select i1 {has_own}, i64 {f.mul(entry, stack.dim(-3))}, i64 0"),
    }


def _used(operands: Operands, f: Function, x: str, T: str, width: str) -> str:
    """Returns how many rows of x there are without the last ones that are zeros."""
    used, found = f.variable("i64"), f.variable(EIGHT, align=32)
    f.store(f"i64 {T}", used)
    f.do("br label %look")
    f.label("look")
    last = f.add(f.load("i64", used), -1)
    f.do(f"br i1 {f.let(f'icmp slt i64 {last}, 0')}, label %known, label %row")
    f.label("row")
    f.store(f"{EIGHT} zeroinitializer", found, align=32)
    row = f.at(x, f.mul(last, width))
    with f.each(0, width, 32) as place:
        bits = f.load(EIGHT, row, place, align=4)
        bits = f.let(f"xor {EIGHT} {bits}, {integers([operands.zero] * 8)}")
        bits = f.let(f"or {EIGHT} {bits}, {f.load(EIGHT, found, align=32)}")
        f.store(f"{EIGHT} {bits}", found, align=32)
    counted = f"{EIGHT} {f.load(EIGHT, found, align=32)}, {integers([operands.counted] * 8)}"
    bits = f.let(f"call i32 @llvm.vector.reduce.or.v8i32({EIGHT} {f.let(f'and {counted}')})")
    f.do(f"br i1 {f.let(f'icmp eq i32 {bits}, 0')}, label %less, label %known")
    f.label("less")
    f.store(f"i64 {last}", used)
    f.do("br label %look")
    f.label("known")
    return f.load("i64", used)


def _do(
    operands: Operands,
    multiply: Callable[[Function, Mapping[str, str]], None],
    f: Function,
    known: Mapping[str, str],
    task: str,
) -> None:
    T, D, F, num_blocks = (known[name] for name in ("T", "D", "F", "blocks"))
    chunk = f.let(f"sdiv i64 {task}, {num_blocks}")
    num_chunks = f.divided(F, TASK_OUTPUTS)
    product = f.let(f"sdiv i64 {chunk}, {num_chunks}")
    used = _integer(f, known["used"], product)
    first_token = f.mul(f.let(f"srem i64 {task}, {num_blocks}"), TASK_TOKENS)
    stop = f.least(f.sub(T, first_token), TASK_TOKENS)
    num_tokens = f.most(f.least(f.sub(used, first_token), TASK_TOKENS), 0)
    first = f.mul(f.let(f"srem i64 {chunk}, {num_chunks}"), TASK_OUTPUTS)
    num_outputs = f.least(f.sub(F, first), TASK_OUTPUTS)
    row = f.add(f.mul(product, T), first_token)
    y = f.at(known["y"], f.mul(f.add(f.mul(row, F), first), 4))
    with f.each(num_tokens, stop, 1) as t:
        line = f.at(y, f.mul(f.mul(t, F), 4))
        f.do(f"call void @llvm.memset.p0.i64(ptr {line}, i8 0, i64 {f.mul(num_outputs, 4)}, i1 0)")
    number = _integer(f, known["index"], product)
    of_matrix = f.mul(f.mul(F, D), f.most(f.least(number, known["w_last"]), 0))
    part = {
        "x": f.at(known["x"], f.mul(f.mul(row, D), operands.x_bytes)),
        "w": f.at(known["w"], f.let(f"sdiv i64 {f.mul(of_matrix, operands.w_bits)}, 8")),
        "y": y,
        "used": used,
        "first_token": row,
        "first_output": first,
        "num_tokens": num_tokens,
        "num_outputs": num_outputs,
    }
    for name in operands.more:
        place = f.mul(f.most(f.least(number, known[f"{name}_last"]), 0), known[f"{name}_entry"])
        part[name] = f.at(known[name], f.add(place, f.mul(product, known[f"{name}_own"])))
    with f.where(f.let(f"icmp sgt i64 {num_tokens}, 0")):
        multiply(f, {**known, **part})
