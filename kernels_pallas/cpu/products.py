"""Divides a product with a matrix into tasks: y [T, F] = x [T, D] @ w[index].T, w [N, F, D], or
[N, G, F, D / G] where groups of columns lie apart.

Rows that are zeros behind the last one that is not are not multiplied, as y is zero there: so
padding costs little, and nobody has to say what is padding. An index beyond the ends means the
first or the last matrix, as in XLA's slices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    as w is one, or [1, A, B] for any index, or [1, 0, 0] for none. beside: results behind y.
    in_groups: w has groups of columns.
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
    y are addresses of the first ones, whose numbers are `first_token` and `first_output`, and
    `num_tokens` and `num_outputs` says how many. C is the columns of a group, and for each of
    `more` there is how many bytes its numbers have, 0 for none. prepare: writes what is done once
    before, and may change what tasks know.
    """
    numbers, addresses = (
        ("blocks", "T", "used", "D", "F", "C", *[f"{name}_bytes" for name in operands.more]),
        ("x", "w", "y", *operands.more, *operands.beside),
    )
    return Kernel(
        name=name,
        num_operands=3 + len(operands.more),
        num_results=1 + len(operands.beside),
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
    names = ("x", "w", "index", *operands.more, "y", *operands.beside)
    of = dict(zip(names, given, strict=True))
    x, w = of["x"], of["w"]
    T, D, F = x.dim(0), x.dim(1), w.dim(1 + operands.in_groups)
    number = f.most(f.least(of["index"].integer(), f.add(w.dim(0), -1)), 0)
    num_blocks = f.divided(T, TASK_TOKENS)
    x_data = x.data
    known = {
        "tasks": f.mul(num_blocks, f.divided(F, TASK_OUTPUTS)),
        "blocks": num_blocks,
        "T": T,
        "used": _used(operands, f, x_data, T, f.mul(D, operands.x_bytes)),
        "D": D,
        "F": F,
        "C": f.let(f"sdiv i64 {D}, {w.dim(1)}") if operands.in_groups else D,
        "x": x_data,
        "w": f.at(
            w.data, f.let(f"sdiv i64 {f.mul(f.mul(f.mul(F, D), number), operands.w_bits)}, 8")
        ),
        "y": of["y"].data,
        **{name: _data(f, of[name], number) for name in operands.more},
        **{f"{name}_bytes": _num_bytes(f, of[name]) for name in operands.more},
        **{name: of[name].data for name in operands.beside},
    }
    if prepare is not None:
        prepare(f, known)
    return known


def _num_bytes(f: Function, stack: Buffer) -> str:
    """Returns how many bytes a number of a stack has, 0 where it has none."""
    is_none = f.let(f"icmp eq i64 {stack.dim(1)}, 0")
    return f.let(f"select i1 {is_none}, i64 0, i64 {stack.num_bytes()}")


def _data(f: Function, stack: Buffer, number: str) -> str:
    """Returns where what a stack has for a matrix is, null for none."""
    is_none = f.let(f"icmp eq i64 {stack.dim(1)}, 0")
    own = f.least(number, f.add(stack.dim(0), -1))
    offset = f.mul(f.mul(f.mul(own, stack.dim(1)), stack.dim(2)), stack.num_bytes())
    return f.let(f"select i1 {is_none}, ptr null, ptr {f.at(stack.data, offset)}")


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
    first_token = f.mul(f.let(f"srem i64 {task}, {num_blocks}"), TASK_TOKENS)
    stop = f.least(f.sub(T, first_token), TASK_TOKENS)
    num_tokens = f.most(f.least(f.sub(known["used"], first_token), TASK_TOKENS), 0)
    first = f.mul(f.let(f"sdiv i64 {task}, {num_blocks}"), TASK_OUTPUTS)
    num_outputs = f.least(f.sub(F, first), TASK_OUTPUTS)
    y = f.at(known["y"], f.mul(f.add(f.mul(first_token, F), first), 4))
    with f.each(num_tokens, stop, 1) as t:
        row = f.at(y, f.mul(f.mul(t, F), 4))
        f.do(f"call void @llvm.memset.p0.i64(ptr {row}, i8 0, i64 {f.mul(num_outputs, 4)}, i1 0)")
    part = {
        "x": f.at(known["x"], f.mul(f.mul(first_token, D), operands.x_bytes)),
        "y": y,
        "first_token": first_token,
        "first_output": first,
        "num_tokens": num_tokens,
        "num_outputs": num_outputs,
    }
    with f.where(f.let(f"icmp sgt i64 {num_tokens}, 0")):
        multiply(f, {**known, **part})
