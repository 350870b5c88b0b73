"""Attends to paged keys and values where they lie: the newest token of each row to what it sees.

q and y [B, N, H] float32; pages [P, V, S, X], of which the first half of V are the keys of K heads
and the rest their values, X numbers of bfloat16 or float32, or H of int8 and the bits of a bfloat16
that they are multiplied with; H and S are multiples of 8, S is at most `BLOCK`. table [B, W] and
first [B, W] int32: a row's pages, counted from `base`, and the positions of their first slots.
rows [B, 3] int32: how many slots a row holds, its token's position, and how many positions the
token sees, itself included. sinks [N]: scores of one more key, whose value is 0; cap: if not 0,
scores are cap * tanh(score / cap). An id beyond the ends means the first or the last page.

A task is one KV head of one row, 8 of its query heads at a time. Blocks of up to 128 slots are
attended one after the other by a running softmax (arXiv 2205.14135, algorithm 1): scores of 3 heads
and 4 slots at a time, 8 partial sums each as `matmul` has them; then weights; then values, a slot
after the other, 32 numbers of 3 heads at a time. A block's values are fetched into the cache beside
its scores, the next one's keys beside its values. Sums are float32 in an order that nothing but the
slots of the row's table decides, so neighbours do not change a bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from kernels_pallas.cpu.function import (
    EIGHT,
    FLOATS,
    FOUR,
    Function,
    blocks,
    exponential,
    four_totals,
    integers,
    numbers,
    of_bfloat16,
)
from kernels_pallas.cpu.tasks import Buffer, Kernel

HANDLERS = {dtype: f"jaxkv_attend_{dtype}" for dtype in ("bfloat16", "float32", "int8")}
BYTES = {"bfloat16": 2, "float32": 4, "int8": 1}

MULTIPLE = 8
"""H and S are multiples of it."""

BLOCK = 128
"""Slots of a block, at most; it has whole pages."""

HEADS = 8
"""Query heads whose scores are held at once."""

TILE_HEADS, TILE_SLOTS, TILE_VECTORS = (3, 2, 1), 4, (4, 1)
"""Heads, and slots of keys or eight numbers of values, that are multiplied at once."""

MASKED = -1e30
"""Score of a slot that is not seen."""

ARGUMENTS = {
    **dict.fromkeys(("q", "keys", "values", "table", "first", "sinks", "y"), "ptr"),
    "cap": "float",
    **dict.fromkeys(
        ("length", "position", "reach", "G", "H", "S", "X", "page", "base", "last"), "i64"
    ),
}
"""What the function for one KV head of one row takes: addresses of its first numbers, and X and the
bytes of a page.
"""


def functions() -> list[Function]:
    """Writes the `HANDLERS`, and what they call."""
    written = []
    for dtype in HANDLERS:
        written += [_attend(dtype), *_kernel(dtype).functions()]
    return written


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Is a group of query heads in the function being written, of which there are `count`. block:
    slots of a block. q, y: queries and results. On the stack: scores or weights [HEADS, BLOCK], and
    the running softmax's maximum, sum, and what it has just been multiplied with.
    """

    f: Function
    dtype: str
    count: str
    block: str
    q: str
    y: str
    scores: str
    top: str
    total: str
    shrink: str

    def begin(self, sinks: str) -> None:
        """Begins with the sinks. One that is MASKED is forgotten with the first slot seen."""
        f = self.f
        with f.each(0, self.count, 1) as head:
            place = f.mul(head, 4)
            f.store(f"float {f.load('float', sinks, place, align=4)}", self.top, place, align=4)
            f.store("float 1.0", self.total, place, align=4)
        with f.each(0, f.mul(f.mul(self.count, "%H"), 4), 32) as place:
            f.store(f"{FLOATS} zeroinitializer", self.y, place, align=4)

    def score(self, begin: str, held: str) -> None:
        """Writes the scores of a block's slots."""
        f = self.f
        with f.each(0, held, "%S") as done:
            page = self._page(f.add(begin, done))
            keys, values = (f.at(of, page.offset) for of in ("%keys", "%values"))
            with f.each(0, f.mul("%S", "%X"), 64) as line:
                f.fetch(f.at(values, line))
            for size, first, stop in blocks(f, self.count, TILE_HEADS):
                with f.each(first, stop, size) as head, f.each(0, "%S", TILE_SLOTS) as slot:
                    self._score_tile(keys, [f.add(head, i) for i in range(size)], slot, done)
            with f.each(0, self.count, 1) as head, f.each(0, "%S", 8) as slot:
                self._mask(page, slot, f.add(f.mul(head, BLOCK), f.add(done, slot)))

    def weigh(self, width: str) -> None:
        """Turns scores into weights, and brings sums to the new maximum."""
        f = self.f
        with f.each(0, self.count, 1) as head:
            scores, place = f.at(self.scores, f.mul(head, 4 * BLOCK)), f.mul(head, 4)
            old = f.eight_of("float", f.load("float", self.top, place, align=4))
            best, total = f.variable(FLOATS, align=32), f.variable(FLOATS, align=32)
            f.store(f"{FLOATS} {old}", best, align=32)
            f.store(f"{FLOATS} zeroinitializer", total, align=32)
            with f.each(0, width, 8) as slot:
                here = f.load(FLOATS, scores, f.mul(slot, 4), align=32)
                before = f.load(FLOATS, best, align=32)
                f.store(f"{FLOATS} {f.larger(here, before)}", best, align=32)
            top = f.across(f.larger, f.load(FLOATS, best, align=32))
            # Where nothing was seen the largest score is MASKED itself.
            level = f.larger(top, numbers(MASKED / 2))
            with f.each(0, width, 8) as slot:
                here = f.load(FLOATS, scores, f.mul(slot, 4), align=32)
                weight = exponential(f, f.floats("fsub", here, level))
                f.store(f"{FLOATS} {weight}", scores, f.mul(slot, 4), align=32)
                before = f.load(FLOATS, total, align=32)
                f.store(f"{FLOATS} {f.floats('fadd', before, weight)}", total, align=32)
            shrink = exponential(f, f.floats("fsub", old, top))
            before = f.eight_of("float", f.load("float", self.total, place, align=4))
            gained = f.across(partial(f.floats, "fadd"), f.load(FLOATS, total, align=32))
            found = f.fma(before, shrink, gained)
            for value, to in ((top, self.top), (shrink, self.shrink), (found, self.total)):
                f.store(f"float {_first(f, value)}", to, place, align=4)

    def gather(self, begin: str, held: str) -> None:
        """Adds weighted values to the results."""
        f = self.f
        vectors = f.let("sdiv i64 %H, 8")
        for width, first_vector, last_vector in blocks(f, vectors, TILE_VECTORS):
            for size, first, stop in blocks(f, self.count, TILE_HEADS):
                with (
                    f.each(first_vector, last_vector, width) as vector,
                    f.each(first, stop, size) as head,
                ):
                    columns = [f.mul(f.add(vector, i), 8) for i in range(width)]
                    self._gather_tile(columns, [f.add(head, i) for i in range(size)], begin, held)

    def end(self) -> None:
        """Divides the results by the sums of their weights."""
        f = self.f
        with f.each(0, self.count, 1) as head:
            total = f.eight_of("float", f.load("float", self.total, f.mul(head, 4), align=4))
            y = f.at(self.y, f.mul(f.mul(head, "%H"), 4))
            with f.each(0, f.mul("%H", 4), 32) as place:
                numerator = f.load(FLOATS, y, place, align=4)
                f.store(f"{FLOATS} {f.floats('fdiv', numerator, total)}", y, place, align=4)

    def _page(self, slot: str) -> Page:
        """Looks up the page that has a slot of the row's table, and which of its slots are seen."""
        f = self.f
        place = f.let(f"sdiv i64 {slot}, %S")
        number, first = (
            f.let(f"sext i32 {f.load('i32', of, f.mul(place, 4), align=4)} to i64")
            for of in ("%table", "%first")
        )
        number = f.most(f.least(f.add("%base", number), "%last"), 0)
        newest = f.add(f.sub("%position", first), 1)
        oldest = f.most(f.sub(newest, "%reach"), 0)
        stop = f.least(f.least(f.sub("%length", slot), "%S"), newest)
        return Page(f.mul(number, "%page"), oldest, stop)

    def _score_tile(self, keys: str, heads: Sequence[str], slot: str, done: str) -> None:
        f, dtype = self.f, self.dtype
        of_slots = [f.at(keys, f.mul(f.add(slot, i), "%X")) for i in range(TILE_SLOTS)]
        of_heads = [f.at(self.q, f.mul(f.mul(head, "%H"), 4)) for head in heads]
        sums = [[f.variable(FLOATS, align=32) for _ in of_slots] for _ in of_heads]
        for place in (place for of_head in sums for place in of_head):
            f.store(f"{FLOATS} zeroinitializer", place, align=32)
        with f.each(0, "%H", 8) as column:
            queries = [f.load(FLOATS, q, f.mul(column, 4), align=4) for q in of_heads]
            for i, of_slot in enumerate(of_slots):
                key = _read(f, dtype, of_slot, column)
                for query, of_head in zip(queries, sums, strict=True):
                    added = f.fma(key, query, f.load(FLOATS, of_head[i], align=32))
                    f.store(f"{FLOATS} {added}", of_head[i], align=32)
        scales = None
        if dtype == "int8":
            scales = "poison"
            for i, of_slot in enumerate(of_slots):
                scale = _scale(f, of_slot)
                scales = f.let(f"insertelement {FOUR} {scales}, float {scale}, i64 {i}")
        for head, of_head in zip(heads, sums, strict=True):
            found = four_totals(f, [f.load(FLOATS, place, align=32) for place in of_head])
            if scales is not None:
                found = f.let(f"fmul {FOUR} {found}, {scales}")
            place = f.add(f.mul(head, BLOCK), f.add(done, slot))
            f.store(f"{FOUR} {found}", self.scores, f.mul(place, 4), align=16)

    def _mask(self, page: Page, slot: str, place: str) -> None:
        """Caps eight scores, and masks those of slots that are not seen."""
        f, at = self.f, self.f.at(self.scores, self.f.mul(place, 4))
        with f.where(f.let("fcmp une float %cap, 0.0")):
            cap = f.eight_of("float", "%cap")
            ratio = f.floats("fdiv", f.load(FLOATS, at, align=32), cap)
            # tanh z = 1 - 2 / (e^2z + 1)
            grown = exponential(f, f.floats("fadd", ratio, ratio))
            part = f.floats("fdiv", numbers(2.0), f.floats("fadd", grown, numbers(1.0)))
            capped = f.floats("fmul", cap, f.floats("fsub", numbers(1.0), part))
            f.store(f"{FLOATS} {capped}", at, align=32)
        slots = f.let(f"add {EIGHT} {_many(f, slot)}, {integers(range(8))}")
        is_seen = [
            f.let(f"icmp {how} {EIGHT} {slots}, {_many(f, bound)}")
            for how, bound in (("sge", page.oldest), ("slt", page.stop))
        ]
        both = f.let(f"and <8 x i1> {is_seen[0]}, {is_seen[1]}")
        score = f.load(FLOATS, at, align=32)
        masked = f.let(f"select <8 x i1> {both}, {FLOATS} {score}, {FLOATS} {numbers(MASKED)}")
        f.store(f"{FLOATS} {masked}", at, align=32)

    def _gather_tile(
        self, columns: Sequence[str], heads: Sequence[str], begin: str, held: str
    ) -> None:
        f = self.f
        results = [f.at(self.y, f.mul(f.mul(head, "%H"), 4)) for head in heads]
        sums = [[f.variable(FLOATS, align=32) for _ in columns] for _ in heads]
        for head, y, of_head in zip(heads, results, sums, strict=True):
            shrink = f.load("float", self.shrink, f.mul(head, 4), align=4)
            shrink = f.eight_of("float", shrink)
            for column, place in zip(columns, of_head, strict=True):
                before = f.load(FLOATS, y, f.mul(column, 4), align=4)
                f.store(f"{FLOATS} {f.floats('fmul', before, shrink)}", place, align=32)
        with f.each(0, held, "%S") as done:
            page = self._page(f.add(begin, done))
            # Keys of the next block are fetched meanwhile: those of the same places.
            following = f.least(f.add(f.add(begin, done), self.block), f.add("%length", -1))
            later = f.at("%keys", self._page(following).offset)
            with f.each(page.oldest, page.stop, 1) as slot:
                in_page = f.mul(slot, "%X")
                f.fetch(f.at(later, f.add(in_page, f.mul(columns[0], BYTES[self.dtype]))))
                values = f.at("%values", f.add(page.offset, in_page))
                scale = _scale(f, values) if self.dtype == "int8" else None
                read = [_read(f, self.dtype, values, column) for column in columns]
                for head, of_head in zip(heads, sums, strict=True):
                    place = f.add(f.mul(head, BLOCK), f.add(done, slot))
                    weight = f.load("float", self.scores, f.mul(place, 4), align=4)
                    if scale is not None:
                        weight = f.let(f"fmul float {weight}, {scale}")
                    weight = f.eight_of("float", weight)
                    for value, to in zip(read, of_head, strict=True):
                        added = f.fma(value, weight, f.load(FLOATS, to, align=32))
                        f.store(f"{FLOATS} {added}", to, align=32)
        for y, of_head in zip(results, sums, strict=True):
            for column, place in zip(columns, of_head, strict=True):
                found = f.load(FLOATS, place, align=32)
                f.store(f"{FLOATS} {found}", y, f.mul(column, 4), align=4)


@dataclass(frozen=True, slots=True)
class Page:
    """Says where a page is, in bytes, and which of its slots are seen: oldest <= slot < stop."""

    offset: str
    oldest: str
    stop: str


def _attend(dtype: str) -> Function:
    """Writes the function for one KV head of one row."""
    arguments = ", ".join(f"{kind} %{name}" for name, kind in ARGUMENTS.items())
    f = Function(f"define internal void @{HANDLERS[dtype]}_head({arguments}) noinline")
    scores = f.variable(f"[{HEADS * BLOCK} x float]", align=32)
    top, total, shrink = (f.variable(f"[{HEADS} x float]") for _ in range(3))
    size = f.mul(f.let(f"sdiv i64 {BLOCK}, %S"), "%S")
    unseen = f.most(f.sub("%length", "%reach"), 0)
    with f.each(0, "%G", HEADS) as first:
        offset = f.mul(f.mul(first, "%H"), 4)
        group = Group(
            f=f,
            dtype=dtype,
            count=f.least(f.sub("%G", first), HEADS),
            block=size,
            q=f.at("%q", offset),
            y=f.at("%y", offset),
            scores=scores,
            top=top,
            total=total,
            shrink=shrink,
        )
        group.begin(f.at("%sinks", f.mul(first, 4)))
        with f.each(f.sub(unseen, f.let(f"srem i64 {unseen}, {size}")), "%length", size) as begin:
            held = f.least(f.sub("%length", begin), size)
            group.score(begin, held)
            group.weigh(f.mul(f.divided(held, "%S"), "%S"))
            group.gather(begin, held)
        group.end()
    f.do("ret void")
    return f


def _kernel(dtype: str) -> Kernel:
    pointers = ("q", "pages", "table", "first", "rows", "sinks", "y", "cap")
    counts = ("N", "H", "K", "S", "X", "W", "base", "last")
    return Kernel(
        name=HANDLERS[dtype],
        num_operands=8,
        shared=dict.fromkeys(pointers, "ptr") | dict.fromkeys(counts, "i64"),
        begin=partial(_begin, dtype),
        do=partial(_do, dtype),
    )


def _begin(dtype: str, f: Function, given: Sequence[Buffer]) -> Mapping[str, str]:
    q, pages, table, first, rows, sinks, cap, base, y = given
    heads = f.let(f"sdiv i64 {pages.dim(1)}, 2")
    return {
        "tasks": f.mul(q.dim(0), heads),
        "N": q.dim(1),
        "H": q.dim(2),
        "K": heads,
        "S": pages.dim(2),
        "X": f.mul(pages.dim(3), BYTES[dtype]),
        "W": table.dim(1),
        "base": base.integer(),
        "last": f.add(pages.dim(0), -1),
        "q": q.data,
        "pages": pages.data,
        "table": table.data,
        "first": first.data,
        "rows": rows.data,
        "sinks": sinks.data,
        "cap": cap.data,
        "y": y.data,
    }


def _do(dtype: str, f: Function, known: Mapping[str, str], task: str) -> None:
    """Writes a task: rows come one after the other, with their KV heads."""
    N, H, K, S, X, W = (known[name] for name in ("N", "H", "K", "S", "X", "W"))
    row, head = f.let(f"sdiv i64 {task}, {K}"), f.let(f"srem i64 {task}, {K}")
    per_head, of_head = f.let(f"sdiv i64 {N}, {K}"), f.mul(S, X)
    first_head = f.mul(head, per_head)
    numbers_before = f.mul(f.mul(f.add(f.mul(row, N), first_head), H), 4)
    in_table, in_rows = f.mul(f.mul(row, W), 4), f.at(known["rows"], f.mul(row, 12))
    length, position, reach = (
        f.let(f"sext i32 {f.load('i32', in_rows, 4 * i, align=4)} to i64") for i in range(3)
    )
    values = {
        "q": f.at(known["q"], numbers_before),
        "keys": f.at(known["pages"], f.mul(head, of_head)),
        "values": f.at(known["pages"], f.mul(f.add(head, K), of_head)),
        "table": f.at(known["table"], in_table),
        "first": f.at(known["first"], in_table),
        "sinks": f.at(known["sinks"], f.mul(first_head, 4)),
        "y": f.at(known["y"], numbers_before),
        "cap": f.load("float", known["cap"], align=4),
        "length": length,
        "position": position,
        "reach": reach,
        "G": per_head,
        "H": H,
        "S": S,
        "X": X,
        "page": f.mul(f.mul(K, 2), of_head),
        "base": known["base"],
        "last": known["last"],
    }
    operands = ", ".join(f"{kind} {values[name]}" for name, kind in ARGUMENTS.items())
    f.do(f"call void @{HANDLERS[dtype]}_head({operands})")


def _read(f: Function, dtype: str, address: str, column: str) -> str:
    """Reads eight numbers of a key or value, as float32."""
    if dtype == "bfloat16":
        return of_bfloat16(f, address, f.mul(column, 2))
    if dtype == "float32":
        return f.load(FLOATS, address, f.mul(column, 4), align=4)
    stored = f.load("<8 x i8>", address, column, align=1)
    return f.let(f"sitofp {EIGHT} {f.let(f'sext <8 x i8> {stored} to {EIGHT}')} to {FLOATS}")


def _scale(f: Function, address: str) -> str:
    """Reads what the numbers of a key or value of int8 are multiplied with."""
    bits = f.let(f"zext i16 {f.load('i16', address, '%H', align=1)} to i32")
    return f.let(f"bitcast i32 {f.let(f'shl i32 {bits}, 16')} to float")


def _many(f: Function, number: str) -> str:
    return f.eight_of("i32", f.let(f"trunc i64 {number} to i32"))


def _first(f: Function, vector: str) -> str:
    return f.let(f"extractelement {FLOATS} {vector}, i64 0")
