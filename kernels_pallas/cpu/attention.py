"""Attends to paged keys and values where they lie: each token to what it sees of its row.

q and y [T, N, H] float32; pages [P, V, S, X], of which the first half of V are the keys of K heads
and the rest their values, X numbers of bfloat16 or float32, or H of int8 and the bits of a bfloat16
that they are multiplied with; H is a multiple of four vectors, S of one and at most `BLOCK`. table
[B, W] and first [B, W] int32: a row's pages, counted from `base`, and the positions of their first
slots. tokens [T, 5] int32: a token's row, below 0 for none; its position; how many positions it
sees, itself included; the number of its slot in the row's table, plus 1; and 1 if its row is a
chunk, which may be attended another way than decode rows (`chunk`). Tokens of a row are side by
side, in order. sinks [N]: scores of one more key, whose value is 0; cap: if not 0, scores
are cap * tanh(score / cap). An id beyond the ends means the first or the last page.

A task is one KV head of `each` tokens side by side, and attends those of a row together, 24 queries
at a time, or 48 of a chunk. Blocks of up to 128 slots are attended one after the other by a running
softmax (arXiv 2205.14135, algorithm 1): scores of a few queries and 4 slots at a time, partial sums
in a vector as `matmul` has them; then weights; then values, a slot after the other, 4 vectors of a
few queries at a time. A block's values are fetched into the cache beside its scores, the next one's
keys beside its values.

Sums are float32 in an order that nothing but the slots of the row's table decides: neighbours do
not change a bit, nor how many tokens of a row are attended at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from kernels_pallas.cpu.chunk import Chunk
from kernels_pallas.cpu.function import Function
from kernels_pallas.cpu.queries import BLOCK, BYTES, Group
from kernels_pallas.cpu.tasks import Buffer, Kernel

HANDLERS = {
    lanes: {dtype: f"jaxkv_attend{32 * lanes}_{dtype}" for dtype in ("bfloat16", "float32", "int8")}
    for lanes in (8, 16)
}
"""These are named by the floats of a vector, and by what pages have."""

TOKEN = ("row", "position", "reach", "stop", "is_chunk")
"""This is known of a token."""

ARGUMENTS = {
    **dict.fromkeys(("q", "keys", "values", "tokens", "table", "first", "sinks", "y"), "ptr"),
    "cap": "float",
    **dict.fromkeys(("count", "G", "N", "H", "S", "X", "page", "base", "last"), "i64"),
}
"""The function for one KV head of `count` tokens of a row takes these: addresses of its first
numbers, and X and the bytes of a page.
"""


def functions(lanes: int) -> list[Function]:
    """Writes the `HANDLERS` for vectors of so many floats, and what they call."""
    written = []
    for dtype, handler in HANDLERS[lanes].items():
        written += [_attend(handler, kind, dtype, lanes) for kind in _kinds(dtype, lanes)]
        written += _kernel(dtype, lanes).functions()
    return written


def _kinds(dtype: str, lanes: int) -> list[type[Group]]:
    """Lists how groups of queries are attended: of decode rows, and of chunks where that is another
    way.
    """
    return [Group, Chunk] if has_chunks(dtype, lanes) else [Group]


def has_chunks(dtype: str, lanes: int) -> bool:
    """Tells whether chunks are attended as `Chunk` does."""
    return dtype == "bfloat16" and lanes == 16


def _attend(handler: str, kind: type[Group], dtype: str, lanes: int) -> Function:
    """Writes the function for one KV head of tokens of a row."""
    arguments = ", ".join(f"{of} %{name}" for name, of in ARGUMENTS.items())
    f = Function(f"define internal void @{handler}_{kind.suffix}({arguments}) noinline", lanes)
    scores = f.variable(f"[{kind.MOST * BLOCK} x float]", align=64)
    offsets, positions, reaches = (f.variable(f"[{kind.MOST} x i64]") for _ in range(3))
    top, total, shrink = (f.variable(f"[{kind.MOST} x float]") for _ in range(3))
    block = f.mul(f.let(f"sdiv i64 {BLOCK}, %S"), "%S")
    num_queries = f.mul("%count", "%G")
    with f.each(0, num_queries, kind.MOST) as first:
        count = f.least(f.sub(num_queries, first), kind.MOST)
        with f.each(0, count, 1) as query:
            number = f.add(first, query)
            token, head = f.let(f"sdiv i64 {number}, %G"), f.let(f"srem i64 {number}, %G")
            offset = f.mul(f.mul(f.add(f.mul(token, "%N"), head), "%H"), 4)
            f.store(f"i64 {offset}", offsets, f.mul(query, 8))
            for what, to in (("position", positions), ("reach", reaches)):
                f.store(f"i64 {_of_token(f, '%tokens', token, what)}", to, f.mul(query, 8))
            # A sink that is MASKED is forgotten with the first slot seen.
            sink = f.load("float", "%sinks", f.mul(head, 4), align=4)
            f.store(f"float {sink}", top, f.mul(query, 4), align=4)
            f.store("float 1.0", total, f.mul(query, 4), align=4)
            with f.each(0, f.mul("%H", 4), 4 * f.lanes) as place:
                f.store(f"{f.vector} zeroinitializer", f.at("%y", offset), place, align=4)
        tokens = [
            f.let(f"sdiv i64 {number}, %G") for number in (first, f.add(first, f.add(count, -1)))
        ]
        reach = _of_token(f, "%tokens", tokens[0], "reach")
        stop = _of_token(f, "%tokens", tokens[1], "stop")
        group = kind(
            f=f,
            dtype=dtype,
            count=count,
            block=block,
            offsets=offsets,
            positions=positions,
            reaches=reaches,
            scores=scores,
            top=top,
            total=total,
            shrink=shrink,
            oldest=f.sub(_of_token(f, "%tokens", tokens[0], "position"), reach),
            newest=_of_token(f, "%tokens", tokens[1], "position"),
            stop=stop,
        )
        group.begin()
        unseen = f.most(f.sub(_of_token(f, "%tokens", tokens[0], "stop"), reach), 0)
        with f.each(f.sub(unseen, f.let(f"srem i64 {unseen}, {block}")), stop, block) as begin:
            held = f.least(f.sub(stop, begin), block)
            group.score(begin, held)
            group.weigh(f.mul(f.divided(held, "%S"), "%S"))
            group.gather(begin, held)
        group.end()
    f.do("ret void")
    return f


def _of_token(f: Function, tokens: str, number: str, what: str) -> str:
    place = f.add(f.mul(number, 4 * len(TOKEN)), 4 * TOKEN.index(what))
    return f.let(f"sext i32 {f.load('i32', tokens, place, align=4)} to i64")


def _kernel(dtype: str, lanes: int) -> Kernel:
    pointers = ("q", "pages", "tokens", "table", "first", "sinks", "y", "cap")
    counts = ("each", "T", "N", "H", "K", "S", "X", "B", "W", "base", "last")
    return Kernel(
        name=HANDLERS[lanes][dtype],
        num_operands=9,
        shared=dict.fromkeys(pointers, "ptr") | dict.fromkeys(counts, "i64"),
        begin=partial(_begin, dtype),
        lanes=lanes,
        do=partial(_do, dtype),
    )


def _begin(dtype: str, f: Function, given: Sequence[Buffer]) -> Mapping[str, str]:
    q, pages, tokens, table, first, sinks, cap, base, each, y = given
    heads, at_once = f.let(f"sdiv i64 {pages.dim(1)}, 2"), each.integer()
    return {
        "tasks": f.mul(f.divided(q.dim(0), at_once), heads),
        "each": at_once,
        "T": q.dim(0),
        "N": q.dim(1),
        "H": q.dim(2),
        "K": heads,
        "S": pages.dim(2),
        "X": f.mul(pages.dim(3), BYTES[dtype]),
        "B": table.dim(0),
        "W": table.dim(1),
        "base": base.integer(),
        "last": f.add(pages.dim(0), -1),
        "q": q.data,
        "pages": pages.data,
        "tokens": tokens.data,
        "table": table.data,
        "first": first.data,
        "sinks": sinks.data,
        "cap": cap.data,
        "y": y.data,
    }


def _do(dtype: str, f: Function, known: Mapping[str, str], task: str) -> None:
    """Writes a task. Tokens come one after the other, with their KV heads."""
    N, H, K, S, X, W, B = (known[name] for name in ("N", "H", "K", "S", "X", "W", "B"))
    head, G = f.let(f"srem i64 {task}, {K}"), f.let(f"sdiv i64 {N}, {K}")
    begin = f.mul(f.let(f"sdiv i64 {task}, {K}"), known["each"])
    end = f.least(f.add(begin, known["each"]), known["T"])
    first_head, of_head = f.mul(head, G), f.mul(S, X)
    count = f.variable("i64")
    with f.each(begin, end, 1) as token:
        row = _of_token(f, known["tokens"], token, "row")
        is_row = f.let(f"icmp ult i64 {row}, {B}")  # nor one below 0
        offset = f.mul(f.mul(f.add(f.mul(token, N), first_head), H), 4)
        with (
            f.where(f.let(f"xor i1 {is_row}, true")),
            f.each(0, f.mul(f.mul(G, H), 4), 4 * f.lanes) as place,
        ):
            f.store(f"{f.vector} zeroinitializer", f.at(known["y"], offset), place, align=4)
        before = _of_token(f, known["tokens"], f.most(f.add(token, -1), begin), "row")
        is_first = f.let(f"icmp eq i64 {token}, {begin}")
        is_new = f.let(f"or i1 {is_first}, {f.let(f'icmp ne i64 {row}, {before}')}")
        with f.where(f.let(f"and i1 {is_row}, {is_new}")):
            f.store("i64 0", count)
            with f.each(token, end, 1) as other:
                is_own = f.let(f"icmp eq i64 {row}, {_of_token(f, known['tokens'], other, 'row')}")
                more = f.add(f.load("i64", count), f.let(f"zext i1 {is_own} to i64"))
                f.store(f"i64 {more}", count)
            in_table = f.mul(f.mul(row, W), 4)
            values = {
                "q": f.at(known["q"], offset),
                "keys": f.at(known["pages"], f.mul(head, of_head)),
                "values": f.at(known["pages"], f.mul(f.add(head, K), of_head)),
                "tokens": f.at(known["tokens"], f.mul(token, 4 * len(TOKEN))),
                "table": f.at(known["table"], in_table),
                "first": f.at(known["first"], in_table),
                "sinks": f.at(known["sinks"], f.mul(first_head, 4)),
                "y": f.at(known["y"], offset),
                "cap": f.load("float", known["cap"], align=4),
                "count": f.load("i64", count),
                "G": G,
                "N": N,
                "H": H,
                "S": S,
                "X": X,
                "page": f.mul(f.mul(K, 2), of_head),
                "base": known["base"],
                "last": known["last"],
            }
            operands = ", ".join(f"{kind} {values[name]}" for name, kind in ARGUMENTS.items())
            is_chunk = _of_token(f, known["tokens"], token, "is_chunk")
            kinds = _kinds(dtype, f.lanes)
            for number, kind in enumerate(kinds):
                condition = f.let(f"icmp eq i64 {is_chunk}, {number}") if kinds[1:] else "true"
                with f.where(condition):
                    f.do(f"call void @{HANDLERS[f.lanes][dtype]}_{kind.suffix}({operands})")
