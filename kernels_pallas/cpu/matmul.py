"""Multiplies with a matrix where it lies: y = x @ w[index].T.

w [N, F, D] bfloat16 or float32, x [T, D] and y [T, F] float32; D and F are multiples of 16. Or w is
int8, x int16 with values of int8, and y int32. An index beyond the ends means the first or the last
matrix, as in XLA's slices.

A sum is float32, in the same order whatever T is: 8 partial sums, each over every eighth of 512
columns, are added up in pairs, and such totals one after the other. No product is rounded before it
is added. So a vector of a row of x and one of w are multiplied as they lie in memory, 3 rows of x
with 4 of w at a time: 12 of AVX2's 16 registers are sums.

A task takes 64 outputs of up to 96 tokens. Where tokens are few, w is read where it lies, and the
next 8 outputs are fetched meanwhile. Where they are many, 8 outputs and 512 columns of it are
first written in float32 to a panel, which stays in the first-level cache (16 KiB). XLA:CPU in place
of that writes a packed copy of all of w to memory, in each call. Source of the blocking: Goto and
van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008), section 4.

What XLA calls are the `HANDLERS` of its foreign function interface; offsets are those of
jaxlib's `xla/ffi/api/c_api.h`. Tasks are claimed one by one by the calling thread and by threads of
XLA's pool, which may come late or never: the call waits only for tasks that somebody has begun.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain

HANDLERS = {dtype: f"jaxkv_matmul_{dtype}" for dtype in ("bfloat16", "float32", "int8")}
W_BYTES = {"bfloat16": 2, "float32": 4, "int8": 1}
X_BYTES = {"bfloat16": 4, "float32": 4, "int8": 2}
"""These give the name of a handler and the bytes of a number of w and of x, by the dtype of w."""

MULTIPLE = 16
"""F and D are multiples of it."""

LANES, DEPTH = 8, 512
"""Outputs of a tile, and columns that are added up at once: those of a panel."""

OUTPUTS, ROWS = 4, (3, 2, 1)
"""Rows of w and of x that are multiplied at once: as many threes of x as there are, then less."""

FEW = 8
"""Up to so many tokens are multiplied without a panel."""

TASK_OUTPUTS, TASK_TOKENS = 64, 96
"""A task has at most so many: panels are made anew for every 96 tokens, whose x stays in the
second-level cache meanwhile.
"""

FLOATS, FOUR = "<8 x float>", "<4 x float>"
EIGHT, SHORTS = "<8 x i32>", "<16 x i16>"

# Offsets in bytes within the structures of the interface.
EXTENSION, API, CONTEXT, ARGUMENTS, RESULTS = 8, 16, 24, 72, 112  # of a call
METADATA, MAJOR, MINOR = 24, 24, 28  # of an extension, and of what it points to
DATA, DIMS = 24, 40  # of a buffer
DESTROY_ERROR, SCHEDULE, NUM_THREADS = 64, 136, 144  # of the functions that XLA offers
VERSION = (0, 3)
"""The handlers ask for this version of the interface. Later ones of the same first number only add
to the ends of structures.
"""

TILE = "ptr %x, ptr %w, ptr %y, i64 %T, i64 %D, i64 %F"
"""The function for one tile takes these: addresses are those of its first numbers."""

SHARED = ("next", "done", "users", "tasks", "blocks", "x", "w", "y", "T", "D", "F")
"""The threads of a call share these, 8 bytes each."""


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

    def least(self, a: object, b: object) -> str:
        is_less = self.let(f"icmp slt i64 {a}, {b}")
        return self.let(f"select i1 {is_less}, i64 {a}, i64 {b}")

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


def llvm_ir() -> str:
    """Returns the text of a module with `HANDLERS`."""
    declared = [
        f"declare {FLOATS} @llvm.fma.v8f32({FLOATS}, {FLOATS}, {FLOATS})",
        f"declare {EIGHT} @llvm.x86.avx2.pmadd.wd({SHORTS}, {SHORTS})",
        "declare i32 @llvm.vector.reduce.add.v8i32(<8 x i32>)",
        "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
        "declare ptr @malloc(i64)",
        "declare void @free(ptr)",
        "declare i32 @sched_yield()",
    ]
    functions = [_release()]
    for dtype in HANDLERS:
        tile = _tile_int8() if dtype == "int8" else _tile(dtype)
        functions += [tile, _work(dtype), _helper(dtype), _handler(dtype)]
    return "\n".join([*declared, "", *(one.text() for one in functions)])


def _tile(dtype: str) -> Function:
    """Writes the function for LANES outputs of some tokens where w is of floating point."""
    f = Function(f"define internal void @tile_{dtype}({TILE}) noinline")
    panel = f.variable(f"[{LANES * DEPTH} x float]", align=64)
    totals = f.variable(f"[{TASK_TOKENS * LANES} x float]", align=64)
    with f.each(0, f.mul("%T", 4 * LANES), 32) as place:
        f.store(f"{FLOATS} zeroinitializer", totals, place, align=32)
    with f.each(0, "%D", DEPTH) as start:
        depth = f.least(f.let(f"sub i64 %D, {start}"), DEPTH)
        are_few = f.let(f"icmp sle i64 %T, {FEW}")
        with f.where(are_few):
            _multiply_all(f, Part(dtype, start, depth, None), totals)
        with f.where(f.let(f"xor i1 {are_few}, true")):
            _fill(f, panel, Part(dtype, start, depth, None))
            _multiply_all(f, Part(dtype, start, depth, panel), totals)
    # In one go: rows of y are far apart.
    with f.each(0, "%T", 1) as t:
        row = f.load(FLOATS, totals, f.mul(t, 4 * LANES), align=32)
        f.store(f"{FLOATS} {row}", "%y", f.mul(f.mul(t, "%F"), 4), align=4)
    f.do("ret void")
    return f


@dataclass(frozen=True, slots=True)
class Part:
    """Says which columns of a tile are multiplied, and in which panel [LANES, DEPTH] they are."""

    dtype: str
    start: str
    depth: str
    panel: str | None

    def row(self, f: Function, number: object) -> str:
        """Returns where a row of w begins."""
        if self.panel is not None:
            return f.at(self.panel, f.mul(number, 4 * DEPTH))
        return f.at("%w", f.mul(f.add(f.mul(number, "%D"), self.start), W_BYTES[self.dtype]))

    def next_tile(self, f: Function, number: object) -> str:
        """Returns what is to be fetched while a row is read: one line of the next tile after the
        other, which memory gives faster than rows side by side.
        """
        columns = f.add(f.mul(f.add("%D", self.start), LANES), f.mul(number, self.depth))
        return f.at("%w", f.mul(columns, W_BYTES[self.dtype]))

    def read(self, f: Function, row: str, column: str) -> str:
        """Reads eight columns of a row, as float32."""
        if self.panel is not None:
            return f.load(FLOATS, row, f.mul(column, 4), align=32)
        if self.dtype == "float32":
            return f.load(FLOATS, row, f.mul(column, 4), align=4)
        bits = f.load("<8 x i16>", row, f.mul(column, 2), align=2)
        bits = f.let(f"zext <8 x i16> {bits} to {EIGHT}")
        bits = f.let(f"shl {EIGHT} {bits}, {_constant([16] * 8)}")
        return f.let(f"bitcast {EIGHT} {bits} to {FLOATS}")


def _fill(f: Function, panel: str, part: Part) -> None:
    """Writes columns of w to the panel."""
    with f.each(0, LANES, 1) as row:
        source, later = part.row(f, row), part.next_tile(f, row)
        to = f.at(panel, f.mul(row, 4 * DEPTH))
        with f.each(0, part.depth, MULTIPLE) as column:
            f.fetch(f.at(later, f.mul(column, W_BYTES[part.dtype])))
            for i in range(0, MULTIPLE, 8):
                at_column = f.add(column, i)
                numbers = part.read(f, source, at_column)
                f.store(f"{FLOATS} {numbers}", to, f.mul(at_column, 4), align=32)


def _multiply_all(f: Function, part: Part, totals: str) -> None:
    for rows, first, stop in _blocks(f, ROWS):
        with f.each(first, stop, rows) as t, f.each(0, LANES, OUTPUTS) as output:
            _multiply(f, part, [f.add(t, r) for r in range(rows)], output, totals)


def _multiply(f: Function, part: Part, rows: Sequence[str], output: str, totals: str) -> None:
    """Adds the products of rows of x with OUTPUTS rows of w to their totals [T, LANES]."""
    w = [part.row(f, f.add(output, i)) for i in range(OUTPUTS)]
    x = [f.at("%x", f.mul(f.add(f.mul(row, "%D"), part.start), 4)) for row in rows]
    sums = [[f.variable(FLOATS, align=32) for _ in w] for _ in x]
    for place in chain(*sums):
        f.do(f"store {FLOATS} zeroinitializer, ptr {place}, align 32")
    later = part.next_tile(f, output) if part.panel is None else None
    with f.each(0, part.depth, MULTIPLE) as begin:
        if later is not None:
            width = OUTPUTS * W_BYTES[part.dtype]
            for line in range(0, MULTIPLE * width, 64):
                f.fetch(f.at(later, f.add(f.mul(begin, width), line)))
        for column in (begin, f.add(begin, 8)):
            numbers = [f.load(FLOATS, row, f.mul(column, 4), align=4) for row in x]
            for i, address in enumerate(w):
                weights = part.read(f, address, column)
                for number, of_row in zip(numbers, sums, strict=True):
                    before = f.load(FLOATS, of_row[i], align=32)
                    operands = f"{FLOATS} {weights}, {FLOATS} {number}, {FLOATS} {before}"
                    added = f.let(f"call {FLOATS} @llvm.fma.v8f32({operands})")
                    f.store(f"{FLOATS} {added}", of_row[i], align=32)
    for row, of_row in zip(rows, sums, strict=True):
        found = _four_totals(f, [f.load(FLOATS, place, align=32) for place in of_row])
        place = f.mul(f.add(f.mul(row, LANES), output), 4)
        added = f.let(f"fadd {FOUR} {f.load(FOUR, totals, place, align=16)}, {found}")
        f.store(f"{FOUR} {added}", totals, place, align=16)


def _four_totals(f: Function, sums: Sequence[str]) -> str:
    """Adds up four vectors, each in pairs: numbers side by side, pairs of those, both halves."""

    def in_pairs(a: str, b: str) -> str:
        even = [0, 2, 8, 10, 4, 6, 12, 14]
        sides = [_shuffle(f, FLOATS, a, b, [i + odd for i in even]) for odd in (0, 1)]
        return f.let(f"fadd {FLOATS} {sides[0]}, {sides[1]}")

    both = in_pairs(in_pairs(*sums[:2]), in_pairs(*sums[2:]))
    low, high = (_shuffle(f, FLOATS, both, both, list(range(i, i + 4))) for i in (0, 4))
    return f.let(f"fadd {FOUR} {low}, {high}")


def _shuffle(f: Function, kind: str, a: str, b: str, lanes: list[int]) -> str:
    mask = f"<{len(lanes)} x i32> {_constant(lanes)}"
    return f.let(f"shufflevector {kind} {a}, {kind} {b}, {mask}")


def _tile_int8() -> Function:
    """Writes the function for LANES outputs of some tokens where w is int8: four rows of w and up
    to three of x at a time, from which 16 columns each are multiplied and added up in pairs.
    """
    f = Function(f"define internal void @tile_int8({TILE}) noinline")
    with f.each(0, LANES, OUTPUTS) as output:
        outputs = [f.add(output, i) for i in range(OUTPUTS)]
        for rows, start, stop in _blocks(f, ROWS):
            with f.each(start, stop, rows) as t:
                _multiply_int8(f, [f.add(t, r) for r in range(rows)], outputs)
    f.do("ret void")
    return f


def _multiply_int8(f: Function, rows: Sequence[str], outputs: Sequence[str]) -> None:
    """Writes the products of rows of x with rows of w, which are exact."""
    x = [f.at("%x", f.mul(f.mul(row, "%D"), X_BYTES["int8"])) for row in rows]
    w = [f.at("%w", f.mul(output, "%D")) for output in outputs]
    sums = {
        (one, row): f.variable(EIGHT, align=32) for one in range(len(w)) for row in range(len(x))
    }
    for place in sums.values():
        f.do(f"store {EIGHT} zeroinitializer, ptr {place}, align 32")
    next_tile = f.at(w[0], f.mul("%D", LANES))
    with f.each(0, "%D", 16) as column:
        f.fetch(f.at(next_tile, f.mul(column, OUTPUTS)))
        numbers = [f.load(SHORTS, row, f.mul(column, X_BYTES["int8"]), align=2) for row in x]
        for one, of_output in enumerate(w):
            weights = f.load("<16 x i8>", of_output, column, align=1)
            weights = f.let(f"sext <16 x i8> {weights} to {SHORTS}")
            for row, values in enumerate(numbers):
                operands = f"{SHORTS} {weights}, {SHORTS} {values}"
                pairs = f.let(f"call {EIGHT} @llvm.x86.avx2.pmadd.wd({operands})")
                place = sums[one, row]
                added = f.let(f"add {EIGHT} {pairs}, {f.load(EIGHT, place, align=32)}")
                f.store(f"{EIGHT} {added}", place, align=32)
    for (one, row), place in sums.items():
        number = f"{EIGHT} {f.load(EIGHT, place, align=32)}"
        total = f.let(f"call i32 @llvm.vector.reduce.add.v8i32({number})")
        to = f.mul(f.add(f.mul(rows[row], "%F"), outputs[one]), 4)
        f.store(f"i32 {total}", "%y", to, align=4)


def _blocks(f: Function, sizes: Sequence[int]) -> Iterator[tuple[int, str, str]]:
    """Divides the tokens: as many blocks of the first size as there are, then smaller ones. Yields
    the size, the first token and the end.
    """
    done = "0"
    for size in sizes:
        whole = f.let(f"sdiv i64 {f.let(f'sub i64 %T, {done}')}, {size}")
        stop = f.add(done, f.mul(whole, size))
        yield size, done, stop
        done = stop


def _work(dtype: str) -> Function:
    """Writes the function that does tasks until none is left."""
    f = Function(f"define internal void @work_{dtype}(ptr %shared)")
    tasks, blocks, T, D, F = (_shared(f, name) for name in ("tasks", "blocks", "T", "D", "F"))
    x, w, y = (_shared(f, name, "ptr") for name in ("x", "w", "y"))
    f.do("br label %claim")
    f.label("claim")
    task = f.let(f"atomicrmw add ptr {_address(f, 'next')}, i64 1 monotonic")
    is_left = f.let(f"icmp slt i64 {task}, {tasks}")
    f.do(f"br i1 {is_left}, label %do, label %out")
    f.label("do")
    first_token = f.mul(f.let(f"srem i64 {task}, {blocks}"), TASK_TOKENS)
    num_tokens = f.least(f.let(f"sub i64 {T}, {first_token}"), TASK_TOKENS)
    first = f.mul(f.let(f"sdiv i64 {task}, {blocks}"), TASK_OUTPUTS)
    with f.each(first, f.least(f.add(first, TASK_OUTPUTS), F), LANES) as output:
        own_x = f.at(x, f.mul(f.mul(first_token, D), X_BYTES[dtype]))
        own_w = f.at(w, f.mul(f.mul(output, D), W_BYTES[dtype]))
        own_y = f.at(y, f.mul(f.add(f.mul(first_token, F), output), 4))
        operands = f"ptr {own_x}, ptr {own_w}, ptr {own_y}, i64 {num_tokens}, i64 {D}, i64 {F}"
        f.do(f"call void @tile_{dtype}({operands})")
    f.let(f"atomicrmw add ptr {_address(f, 'done')}, i64 1 release")
    f.do("br label %claim")
    f.label("out")
    f.do("ret void")
    return f


def _release() -> Function:
    """Writes the function by which a thread lets go of what it shares: the last one frees it."""
    f = Function("define internal void @release(ptr %shared)")
    before = f.let(f"atomicrmw sub ptr {_address(f, 'users')}, i64 1 acq_rel")
    with f.where(f.let(f"icmp eq i64 {before}, 1")):
        f.do("call void @free(ptr %shared)")
    f.do("ret void")
    return f


def _helper(dtype: str) -> Function:
    """Writes what a thread of XLA's pool runs."""
    f = Function(f"define internal void @helper_{dtype}(ptr %shared)")
    f.do(f"call void @work_{dtype}(ptr %shared)")
    f.do("call void @release(ptr %shared)")
    f.do("ret void")
    return f


def _handler(dtype: str) -> Function:
    """Writes the function that XLA calls with (x, w, index) and y."""
    f = Function(f"define ptr @{HANDLERS[dtype]}(ptr %call)")
    extension = f.load("ptr", "%call", EXTENSION)
    with f.where(f.let(f"icmp ne ptr {extension}, null")):  # asks which version this is for
        metadata = f.load("ptr", extension, METADATA)
        for offset, version in zip((MAJOR, MINOR), VERSION, strict=True):
            f.store(f"i32 {version}", metadata, offset, align=4)
        f.do("ret ptr null")
        f.label(f.name("asked"))
    arguments, results = f.load("ptr", "%call", ARGUMENTS), f.load("ptr", "%call", RESULTS)
    x, w, index = (f.load("ptr", arguments, 8 * i) for i in range(3))
    x_dims, w_dims = f.load("ptr", x, DIMS), f.load("ptr", w, DIMS)
    T, D, F = f.load("i64", x_dims), f.load("i64", x_dims, 8), f.load("i64", w_dims, 8)
    number = f.let(f"sext i32 {f.load('i32', f.load('ptr', index, DATA), align=4)} to i64")
    number = f.least(number, f.add(f.load("i64", w_dims), -1))
    is_negative = f.let(f"icmp slt i64 {number}, 0")
    number = f.let(f"select i1 {is_negative}, i64 0, i64 {number}")
    own_w = f.at(f.load("ptr", w, DATA), f.mul(f.mul(f.mul(F, D), number), W_BYTES[dtype]))
    blocks, chunks = _divided(f, T, TASK_TOKENS), _divided(f, F, TASK_OUTPUTS)
    tasks = f.mul(blocks, chunks)
    f.do(f"%shared = call ptr @malloc(i64 {8 * len(SHARED)})")
    helpers = f.least(f.add(_num_threads(f), -1), f.add(tasks, -1))
    start = {"next": "i64 0", "done": "i64 0", "users": f"i64 {f.add(helpers, 1)}"}
    start |= {"tasks": f"i64 {tasks}", "blocks": f"i64 {blocks}"}
    start |= {"T": f"i64 {T}", "D": f"i64 {D}", "F": f"i64 {F}", "w": f"ptr {own_w}"}
    start |= {"x": f"ptr {f.load('ptr', x, DATA)}"}
    start |= {"y": f"ptr {f.load('ptr', f.load('ptr', results), DATA)}"}
    for name in SHARED:
        f.do(f"store {start[name]}, ptr {_address(f, name)}")
    with f.each(0, helpers, 1):
        error = _ask(f, SCHEDULE, (f"ptr @helper_{dtype}", "ptr %shared"))
        with f.where(f.let(f"icmp ne ptr {error}, null")):  # nobody will come
            _destroy(f, error)
            f.do("call void @release(ptr %shared)")
    f.do(f"call void @work_{dtype}(ptr %shared)")
    f.do("br label %wait")
    f.label("wait")
    done = f.let(f"load atomic i64, ptr {_address(f, 'done')} acquire, align 8")
    f.do(f"br i1 {f.let(f'icmp eq i64 {done}, {tasks}')}, label %out, label %yield")
    f.label("yield")
    f.let("call i32 @sched_yield()")
    f.do("br label %wait")
    f.label("out")
    f.do("call void @release(ptr %shared)")
    f.do("ret ptr null")
    return f


def _num_threads(f: Function) -> str:
    """Asks XLA how many threads its pool has; 1 where it has none."""
    found = f.variable("i64")
    f.do(f"store i64 1, ptr {found}")
    error = _ask(f, NUM_THREADS, (f"ptr {found}",))
    with f.where(f.let(f"icmp ne ptr {error}, null")):
        _destroy(f, error)
        f.do(f"store i64 1, ptr {found}")
    return f.let(f"load i64, ptr {found}")


def _ask(f: Function, function: int, values: Sequence[str]) -> str:
    """Calls a function of XLA's with the call's context and `values`. Returns its error or null."""
    size = 24 + 8 * len(values)
    asked = f.variable(f"[{size // 8} x i64]")
    f.do(f"store i64 {size}, ptr {asked}")
    f.store("ptr null", asked, 8)
    f.store(f"ptr {f.load('ptr', '%call', CONTEXT)}", asked, 16)
    for i, value in enumerate(values):
        f.store(value, asked, 24 + 8 * i)
    return f.let(f"call ptr {f.load('ptr', f.load('ptr', '%call', API), function)}(ptr {asked})")


def _destroy(f: Function, error: str) -> None:
    asked = f.variable("[3 x i64]")
    f.do(f"store i64 24, ptr {asked}")
    f.store("ptr null", asked, 8)
    f.store(f"ptr {error}", asked, 16)
    destroy = f.load("ptr", f.load("ptr", "%call", API), DESTROY_ERROR)
    f.do(f"call void {destroy}(ptr {asked})")


def _divided(f: Function, number: str, by: int) -> str:
    """Returns number / by, rounded up."""
    return f.let(f"sdiv i64 {f.add(number, by - 1)}, {by}")


def _address(f: Function, name: str) -> str:
    return f.at("%shared", 8 * SHARED.index(name))


def _shared(f: Function, name: str, kind: str = "i64") -> str:
    return f.let(f"load {kind}, ptr {_address(f, name)}")


def _constant(numbers: Sequence[int]) -> str:
    return f"<{', '.join(f'i32 {number}' for number in numbers)}>"
