"""Attends to paged keys and values where they lie: each token to what it sees of its row.

q and y [T, N, H] float32; pages [P, V, S, X], of which the first half of V are the keys of K heads
and the rest their values, X numbers of bfloat16 or float32, or H of int8 and the bits of a bfloat16
that they are multiplied with; H is a multiple of four vectors, S of one and at most `BLOCK`. table
[B, W] and first [B, W] int32: a row's pages, counted from `base`, and the positions of their first
slots. tokens [T, 4] int32: a token's row, below 0 for none; its position; how many positions it
sees, itself included; and the number of its slot in the row's table, plus 1. Tokens of a row are
side by side, in order. sinks [N]: scores of one more key, whose value is 0; cap: if not 0, scores
are cap * tanh(score / cap). An id beyond the ends means the first or the last page.

A task is one KV head of `each` tokens side by side, and attends those of a row together, 24 queries
at a time. Blocks of up to 128 slots are attended one after the other by a running softmax (arXiv
2205.14135, algorithm 1): scores of a few queries and 4 slots at a time, partial sums in a vector as
`matmul` has them; then weights; then values, a slot after the other, 4 vectors of a few queries at
a time. A block's values are fetched into the cache beside its scores, the next one's keys beside
its values.

Sums are float32 in an order that nothing but the slots of the row's table decides: neighbours do
not change a bit, nor how many tokens of a row are attended at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from kernels_pallas.cpu.function import (
    FOUR,
    Function,
    blocks,
    exponential,
    integers,
    of_bfloat16,
    totals,
)
from kernels_pallas.cpu.tasks import Buffer, Kernel

HANDLERS = {
    lanes: {dtype: f"jaxkv_attend{32 * lanes}_{dtype}" for dtype in ("bfloat16", "float32", "int8")}
    for lanes in (8, 16)
}
"""These are named by the floats of a vector, and by what pages have."""

BYTES = {"bfloat16": 2, "float32": 4, "int8": 1}

BLOCK = 128
"""Slots of a block, at most; it has whole pages."""

QUERIES = 24
"""Queries of a row whose scores are held at once."""

TILE_QUERIES, TILE_SLOTS, TILE_VECTORS = {8: (3, 1), 16: (4, 3, 1)}, 4, 4
"""Queries (by the floats of a vector), and slots of keys or vectors of values, are multiplied so
many at once: more forms would take longer to make.
"""

TOKEN = ("row", "position", "reach", "stop")
"""This is known of a token."""

MASKED = -1e30
"""Score of a slot that is not seen."""

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
    for dtype in HANDLERS[lanes]:
        written += [_attend(dtype, lanes), *_kernel(dtype, lanes).functions()]
    return written


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Is a group of queries in the function being written, of which there are `count`: a token's
    one after the other, then the next one's. block: slots of a block.

    On the stack, of each: where it and its result are, in bytes; its position, and how many it
    sees; scores or weights [QUERIES, BLOCK]; and the running softmax's maximum, sum, and what it
    has just been multiplied with. oldest, newest: the first one's position less what it sees, and
    the last one's, which bound what any of them sees; stop: the last one's slot, plus 1.
    """

    f: Function
    dtype: str
    count: str
    block: str
    offsets: str
    positions: str
    reaches: str
    scores: str
    top: str
    total: str
    shrink: str
    oldest: str
    newest: str
    stop: str

    def score(self, begin: str, held: str) -> None:
        """Writes the scores of a block's slots."""
        f = self.f
        with f.each(0, held, "%S") as done:
            page = self._page(f.add(begin, done))
            keys, values = (f.at(of, page.offset) for of in ("%keys", "%values"))
            with f.each(0, f.mul("%S", "%X"), 64) as line:
                f.fetch(f.at(values, line))
            for size, first, stop in blocks(f, self.count, TILE_QUERIES[f.lanes]):
                with f.each(first, stop, size) as query, f.each(0, "%S", TILE_SLOTS) as slot:
                    self._score_tile(keys, [f.add(query, i) for i in range(size)], slot, done)
            with f.each(0, self.count, 1) as query:
                position, reach = (
                    f.load("i64", of, f.mul(query, 8)) for of in (self.positions, self.reaches)
                )
                newest = f.add(f.sub(position, page.first), 1)
                oldest, stop = f.sub(newest, reach), f.least(newest, page.held)
                with f.each(0, "%S", f.lanes) as slot:
                    place = f.add(f.mul(query, BLOCK), f.add(done, slot))
                    self._mask(oldest, stop, slot, place)

    def weigh(self, width: str) -> None:
        """Turns scores into weights, and brings sums to the new maximum."""
        f = self.f
        with f.each(0, self.count, 1) as query:
            scores, place = f.at(self.scores, f.mul(query, 4 * BLOCK)), f.mul(query, 4)
            old = f.filled("float", f.load("float", self.top, place, align=4))
            best, total = f.variable(f.vector, align=64), f.variable(f.vector, align=64)
            f.store(f"{f.vector} {old}", best, align=64)
            f.store(f"{f.vector} zeroinitializer", total, align=64)
            with f.each(0, width, f.lanes) as slot:
                here = f.load(f.vector, scores, f.mul(slot, 4), align=64)
                before = f.load(f.vector, best, align=64)
                f.store(f"{f.vector} {f.larger(here, before)}", best, align=64)
            top = f.across(f.larger, f.load(f.vector, best, align=64))
            # Where nothing was seen the largest score is MASKED itself.
            level = f.larger(top, f.constant(MASKED / 2))
            with f.each(0, width, f.lanes) as slot:
                here = f.load(f.vector, scores, f.mul(slot, 4), align=64)
                weight = exponential(f, f.floats("fsub", here, level))
                f.store(f"{f.vector} {weight}", scores, f.mul(slot, 4), align=64)
                before = f.load(f.vector, total, align=64)
                f.store(f"{f.vector} {f.floats('fadd', before, weight)}", total, align=64)
            shrink = exponential(f, f.floats("fsub", old, top))
            before = f.filled("float", f.load("float", self.total, place, align=4))
            gained = f.across(partial(f.floats, "fadd"), f.load(f.vector, total, align=64))
            found = f.fma(before, shrink, gained)
            for value, to in ((top, self.top), (shrink, self.shrink), (found, self.total)):
                f.store(f"float {_first(f, value)}", to, place, align=4)

    def gather(self, begin: str, held: str) -> None:
        """Adds weighted values to the results."""
        f = self.f
        width = TILE_VECTORS * f.lanes
        for size, first, stop in blocks(f, self.count, TILE_QUERIES[f.lanes]):
            with f.each(0, "%H", width) as column, f.each(first, stop, size) as query:
                columns = [f.add(column, i * f.lanes) for i in range(TILE_VECTORS)]
                self._gather_tile(columns, [f.add(query, i) for i in range(size)], begin, held)

    def end(self) -> None:
        """Divides the results by the sums of their weights."""
        f = self.f
        with f.each(0, self.count, 1) as query:
            total = f.filled("float", f.load("float", self.total, f.mul(query, 4), align=4))
            y = self._of("%y", query)
            with f.each(0, f.mul("%H", 4), 4 * f.lanes) as place:
                numerator = f.load(f.vector, y, place, align=4)
                f.store(f"{f.vector} {f.floats('fdiv', numerator, total)}", y, place, align=4)

    def _of(self, base: str, query: str) -> str:
        """Returns where a query, or its result, is."""
        return self.f.at(base, self.f.load("i64", self.offsets, self.f.mul(query, 8)))

    def _page(self, slot: str) -> Page:
        """Looks up the page that has a slot of the row's table."""
        f = self.f
        place = f.let(f"sdiv i64 {slot}, %S")
        number, first = (
            f.let(f"sext i32 {f.load('i32', of, f.mul(place, 4), align=4)} to i64")
            for of in ("%table", "%first")
        )
        number = f.most(f.least(f.add("%base", number), "%last"), 0)
        return Page(f.mul(number, "%page"), first, f.least(f.sub(self.stop, slot), "%S"))

    def _score_tile(self, keys: str, queries: Sequence[str], slot: str, done: str) -> None:
        f, dtype = self.f, self.dtype
        of_slots = [f.at(keys, f.mul(f.add(slot, i), "%X")) for i in range(TILE_SLOTS)]
        addresses = [self._of("%q", query) for query in queries]
        sums = [[f.variable(f.vector, align=64) for _ in of_slots] for _ in queries]
        for place in chain(*sums):
            f.store(f"{f.vector} zeroinitializer", place, align=64)
        with f.each(0, "%H", f.lanes) as column:
            read = [f.load(f.vector, q, f.mul(column, 4), align=4) for q in addresses]
            for i, of_slot in enumerate(of_slots):
                key = _read(f, dtype, of_slot, column)
                for q, of_query in zip(read, sums, strict=True):
                    added = f.fma(key, q, f.load(f.vector, of_query[i], align=64))
                    f.store(f"{f.vector} {added}", of_query[i], align=64)
        scales = None
        if dtype == "int8":
            scales = "poison"
            for i, of_slot in enumerate(of_slots):
                scale = _scale(f, of_slot)
                scales = f.let(f"insertelement {FOUR} {scales}, float {scale}, i64 {i}")
        found = totals(f, [[f.load(f.vector, place, align=64) for place in one] for one in sums])
        for query, four in zip(queries, found, strict=True):
            if scales is not None:
                four = f.let(f"fmul {FOUR} {four}, {scales}")
            place = f.add(f.mul(query, BLOCK), f.add(done, slot))
            f.store(f"{FOUR} {four}", self.scores, f.mul(place, 4), align=16)

    def _mask(self, oldest: str, stop: str, slot: str, place: str) -> None:
        """Caps eight scores, and masks those of slots that are not seen."""
        f, at = self.f, self.f.at(self.scores, self.f.mul(place, 4))
        with f.where(f.let("fcmp une float %cap, 0.0")):
            cap = f.filled("float", "%cap")
            ratio = f.floats("fdiv", f.load(f.vector, at, align=64), cap)
            # tanh z = 1 - 2 / (e^2z + 1)
            grown = exponential(f, f.floats("fadd", ratio, ratio))
            part = f.floats("fdiv", f.constant(2.0), f.floats("fadd", grown, f.constant(1.0)))
            capped = f.floats("fmul", cap, f.floats("fsub", f.constant(1.0), part))
            f.store(f"{f.vector} {capped}", at, align=64)
        slots = f.let(f"add {f.whole} {_many(f, slot)}, {integers(range(f.lanes))}")
        is_seen = [
            f.let(f"icmp {how} {f.whole} {slots}, {_many(f, bound)}")
            for how, bound in (("sge", oldest), ("slt", stop))
        ]
        both = f.let(f"and <{f.lanes} x i1> {is_seen[0]}, {is_seen[1]}")
        score = f.load(f.vector, at, align=64)
        masked = f.select(both, score, f.constant(MASKED))
        f.store(f"{f.vector} {masked}", at, align=64)

    def _gather_tile(
        self, columns: Sequence[str], queries: Sequence[str], begin: str, held: str
    ) -> None:
        f = self.f
        results = [self._of("%y", query) for query in queries]
        sums = [[f.variable(f.vector, align=64) for _ in columns] for _ in queries]
        for query, y, of_query in zip(queries, results, sums, strict=True):
            shrink = f.load("float", self.shrink, f.mul(query, 4), align=4)
            shrink = f.filled("float", shrink)
            for column, place in zip(columns, of_query, strict=True):
                before = f.load(f.vector, y, f.mul(column, 4), align=4)
                f.store(f"{f.vector} {f.floats('fmul', before, shrink)}", place, align=64)
        with f.each(0, held, "%S") as done:
            page = self._page(f.add(begin, done))
            # Keys of the next block are fetched meanwhile: those of the same places.
            following = f.least(f.add(f.add(begin, done), self.block), f.add(self.stop, -1))
            later = f.at("%keys", self._page(following).offset)
            # Not those that no query sees: what they hold may be anything.
            oldest = f.most(f.add(f.sub(self.oldest, page.first), 1), 0)
            stop = f.least(f.add(f.sub(self.newest, page.first), 1), page.held)
            with f.each(oldest, stop, 1) as slot:
                in_page = f.mul(slot, "%X")
                f.fetch(f.at(later, f.add(in_page, f.mul(columns[0], BYTES[self.dtype]))))
                values = f.at("%values", f.add(page.offset, in_page))
                scale = _scale(f, values) if self.dtype == "int8" else None
                read = [_read(f, self.dtype, values, column) for column in columns]
                for query, of_query in zip(queries, sums, strict=True):
                    place = f.add(f.mul(query, BLOCK), f.add(done, slot))
                    weight = f.load("float", self.scores, f.mul(place, 4), align=4)
                    if scale is not None:
                        weight = f.let(f"fmul float {weight}, {scale}")
                    weight = f.filled("float", weight)
                    for value, to in zip(read, of_query, strict=True):
                        added = f.fma(value, weight, f.load(f.vector, to, align=64))
                        f.store(f"{f.vector} {added}", to, align=64)
        for y, of_query in zip(results, sums, strict=True):
            for column, place in zip(columns, of_query, strict=True):
                found = f.load(f.vector, place, align=64)
                f.store(f"{f.vector} {found}", y, f.mul(column, 4), align=4)


@dataclass(frozen=True, slots=True)
class Page:
    """Says where a page is, in bytes, the position of its first slot, and how many of its slots
    come before the group's `stop`.
    """

    offset: str
    first: str
    held: str


def _attend(dtype: str, lanes: int) -> Function:
    """Writes the function for one KV head of tokens of a row."""
    arguments = ", ".join(f"{kind} %{name}" for name, kind in ARGUMENTS.items())
    f = Function(
        f"define internal void @{HANDLERS[lanes][dtype]}_head({arguments}) noinline", lanes
    )
    scores = f.variable(f"[{QUERIES * BLOCK} x float]", align=64)
    offsets, positions, reaches = (f.variable(f"[{QUERIES} x i64]") for _ in range(3))
    top, total, shrink = (f.variable(f"[{QUERIES} x float]") for _ in range(3))
    block = f.mul(f.let(f"sdiv i64 {BLOCK}, %S"), "%S")
    num_queries = f.mul("%count", "%G")
    with f.each(0, num_queries, QUERIES) as first:
        count = f.least(f.sub(num_queries, first), QUERIES)
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
        group = Group(
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
            f.do(f"call void @{HANDLERS[f.lanes][dtype]}_head({operands})")


def _read(f: Function, dtype: str, address: str, column: str) -> str:
    """Reads eight numbers of a key or value, as float32."""
    if dtype == "bfloat16":
        return of_bfloat16(f, address, f.mul(column, 2))
    if dtype == "float32":
        return f.load(f.vector, address, f.mul(column, 4), align=4)
    stored = f.load(f"<{f.lanes} x i8>", address, column, align=1)
    return f.let(
        f"sitofp {f.whole} {f.let(f'sext <{f.lanes} x i8> {stored} to {f.whole}')} to {f.vector}"
    )


def _scale(f: Function, address: str) -> str:
    """Reads what the numbers of a key or value of int8 are multiplied with."""
    bits = f.let(f"zext i16 {f.load('i16', address, '%H', align=1)} to i32")
    return f.let(f"bitcast i32 {f.let(f'shl i32 {bits}, 16')} to float")


def _many(f: Function, number: str) -> str:
    return f.filled("i32", f.let(f"trunc i64 {number} to i32"))


def _first(f: Function, vector: str) -> str:
    return f.let(f"extractelement {f.vector} {vector}, i64 0")
