"""Multiplies with a matrix where it lies: y = x @ w[index].T.

w [N, F, D] bfloat16 or float32, x [T, D] and y [T, F] float32; D and F are multiples of 16. Each
sum is float32, in the order of D, whatever T is; a product is not rounded before it is added. Or w
is int8, x int16 with values of int8, and y int32. An index beyond the ends means the first or the
last matrix, as in XLA's slices.

A task takes 64 outputs of up to 128 tokens. For 16 outputs and 256 columns at a time it writes a
panel of w, transposed and in float32, which stays in the first-level cache (16 KiB) while the rows
of x are multiplied with it, four at a time: 8 of AVX2's 16 registers are sums. XLA:CPU in place of
that writes a packed copy of all of w to memory, in each call. Source of the blocking: Goto and van
de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008), section 4.

What XLA calls are the `HANDLERS` of its foreign function interface; offsets are those of
jaxlib's `xla/ffi/api/c_api.h`. Tasks are claimed one by one by the calling thread and by threads of
XLA's pool, which may come late or never: the call waits only for tasks that somebody has begun.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

HANDLERS = {dtype: f"jaxkv_matmul_{dtype}" for dtype in ("bfloat16", "float32", "int8")}
W_BYTES = {"bfloat16": 2, "float32": 4, "int8": 1}
X_BYTES = {"bfloat16": 4, "float32": 4, "int8": 2}
"""These give the name of a handler and the bytes of a number of w and of x, by the dtype of w."""

LANES, DEPTH = 16, 256
"""Outputs and columns of a panel."""

ROWS = (4, 2, 1)
"""Rows of x that are multiplied with a panel at once: as many fours as there are, then less."""

FEW = 2
"""Tokens that are multiplied without a panel: those of the smallest programs."""

TASK_OUTPUTS, TASK_TOKENS = 64, 128
"""A task has at most so many: panels are made anew for every 128 tokens, whose x stays in the
second-level cache meanwhile.
"""

INT8_OUTPUTS, INT8_ROWS = 4, (3, 2, 1)
"""Rows of w and of x that are multiplied at once where w is int8."""

VECTOR, HALF = f"<{LANES} x float>", "<8 x float>"
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
        f"declare {VECTOR} @llvm.fma.v{LANES}f32({VECTOR}, {VECTOR}, {VECTOR})",
        f"declare {HALF} @llvm.fma.v8f32({HALF}, {HALF}, {HALF})",
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
    with f.where(f.let(f"icmp eq i64 %T, {FEW}")):
        _multiply_few(f, dtype)
        f.do("ret void")
        f.label(f.name("many"))
    panel = f.variable(f"[{DEPTH * LANES} x float]", align=64)
    with f.each(0, "%D", DEPTH) as start:
        depth = f.least(f.let(f"sub i64 %D, {start}"), DEPTH)
        _fill(f, panel, start, depth, dtype)
        for rows, first, stop in _blocks(f, ROWS):
            with f.each(first, stop, rows) as t:
                _multiply(f, panel, [f.add(t, r) for r in range(rows)], start, depth)
    f.do("ret void")
    return f


def _fill(f: Function, panel: str, start: str, depth: str, dtype: str) -> None:
    """Writes the part of w from column `start` on to the panel [depth, LANES], 32 bytes of 8 rows
    at a time.
    """
    with f.each(0, depth, 32 // W_BYTES[dtype]) as column, f.each(0, LANES, 8) as row:
        to = f.at(panel, f.mul(f.add(f.mul(column, LANES), row), 4))
        for i, numbers in enumerate(_columns(f, row, f.add(start, column), dtype)):
            f.store(f"{EIGHT} {numbers}", to, 4 * LANES * i, align=32)


def _multiply_few(f: Function, dtype: str) -> None:
    """Writes the outputs of FEW tokens, with w in registers: it is not needed again."""
    x = [f.at("%x", f.mul("%D", 4 * t)) for t in range(FEW)]
    sums = {(row, t): f.variable(HALF, align=32) for row in range(0, LANES, 8) for t in range(FEW)}
    for place in sums.values():
        f.do(f"store {HALF} zeroinitializer, ptr {place}, align 32")
    with f.each(0, "%D", 32 // W_BYTES[dtype]) as column:
        parts = {row: _columns(f, row, column, dtype) for row in range(0, LANES, 8)}
        for i in range(32 // W_BYTES[dtype]):
            at_column = f.mul(f.add(column, i), 4)
            for t in range(FEW):
                number = f.load("float", x[t], at_column, align=4)
                for row, numbers in parts.items():
                    w = f.let(f"bitcast {EIGHT} {numbers[i]} to {HALF}")
                    _add_product(f, number, w, sums[row, t], lanes=8)
    for (row, t), place in sums.items():
        to = f.add(f.mul("%F", 4 * t), 4 * row)
        f.store(f"{HALF} {f.load(HALF, place, align=32)}", "%y", to, align=4)


def _columns(f: Function, row: object, column: str, dtype: str) -> list[str]:
    """Reads 32 bytes of eight rows of w: returns 16 columns of bfloat16 or 8 of float32, each as
    the bits of float32. A pair of bfloat16 columns is one number of 32 bits until it is transposed.
    """
    found = _transposed(f, _eight_rows(f, row, column, dtype))
    if dtype == "float32":
        return found
    both = []
    for pairs in found:
        both.append(f.let(f"shl {EIGHT} {pairs}, {_constant([16] * 8)}"))
        both.append(f.let(f"and {EIGHT} {pairs}, {_constant([-(2**16)] * 8)}"))
    return both


def _eight_rows(f: Function, row: object, column: str, dtype: str) -> list[str]:
    """Reads 32 bytes of eight rows of w from a column on, and has as many bytes of the next tile
    fetched: one line after the other, which memory gives faster than rows side by side.
    """
    width = W_BYTES[dtype]
    for_row = f.mul("%D", width)
    next_tile = f.at("%w", f.mul(for_row, LANES))
    later = f.at(next_tile, f.mul(f.add(f.mul(column, width * LANES // 32), row), 32))
    for line in range(0, 8 * 32, 64):
        f.fetch(f.at(later, line))
    at_row = f.at("%w", f.add(f.mul(row, for_row), f.mul(column, width)))
    found = []
    for _ in range(8):
        found.append(f.load(EIGHT, at_row, align=2))
        at_row = f.at(at_row, for_row)
    return found


def _transposed(f: Function, rows: Sequence[str]) -> list[str]:
    """Transposes 8 x 8 numbers in 24 shuffles, each of which is one instruction of AVX2."""

    def shuffle(a: str, b: str, lanes: list[int]) -> str:
        return f.let(f"shufflevector {EIGHT} {a}, {EIGHT} {b}, {EIGHT} {_constant(lanes)}")

    low, high = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
    low_pairs, high_pairs = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
    of_four = []
    for a, b, c, d in (rows[:4], rows[4:]):
        ab, cd = shuffle(a, b, low), shuffle(c, d, low)
        of_four.append([shuffle(ab, cd, low_pairs), shuffle(ab, cd, high_pairs)])
        ab, cd = shuffle(a, b, high), shuffle(c, d, high)
        of_four[-1] += [shuffle(ab, cd, low_pairs), shuffle(ab, cd, high_pairs)]
    lanes = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]
    both = list(zip(*of_four, strict=True))
    return [shuffle(a, b, side) for side in lanes for a, b in both]


def _multiply(f: Function, panel: str, rows: Sequence[str], start: str, depth: str) -> None:
    """Adds the products of rows of x with the panel to those rows of y, which begin with 0."""
    y = [f.at("%y", f.mul(f.mul(row, "%F"), 4)) for row in rows]
    x = [f.at("%x", f.mul(f.add(f.mul(row, "%D"), start), 4)) for row in rows]
    sums = [f.variable(VECTOR, align=64) for _ in rows]
    for one in sums:
        f.do(f"store {VECTOR} zeroinitializer, ptr {one}, align 64")
    with f.where(f.let(f"icmp sgt i64 {start}, 0")):
        for one, result in zip(sums, y, strict=True):
            f.store(f"{VECTOR} {f.load(VECTOR, result, align=4)}", one, align=64)
    unrolled = 4
    with f.each(0, depth, unrolled) as k:
        for i in range(unrolled):
            column = f.add(k, i)
            w = f.load(VECTOR, panel, f.mul(column, 4 * LANES), align=64)
            for one, row in zip(sums, x, strict=True):
                number = f.load("float", row, f.mul(column, 4), align=4)
                _add_product(f, number, w, one, lanes=LANES)
    for one, result in zip(sums, y, strict=True):
        f.store(f"{VECTOR} {f.load(VECTOR, one, align=64)}", result, align=4)


def _tile_int8() -> Function:
    """Writes the function for LANES outputs of some tokens where w is int8: four rows of w and up
    to three of x at a time, from which 16 columns each are multiplied and added up in pairs.
    """
    f = Function(f"define internal void @tile_int8({TILE}) noinline")
    with f.each(0, LANES, INT8_OUTPUTS) as output:
        outputs = [f.add(output, i) for i in range(INT8_OUTPUTS)]
        for rows, start, stop in _blocks(f, INT8_ROWS):
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
        f.fetch(f.at(next_tile, f.mul(column, INT8_OUTPUTS)))
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


def _add_product(f: Function, number: str, w: str, place: str, *, lanes: int) -> None:
    """Adds number * w to the vector at `place`, which is rounded once."""
    kind, align = f"<{lanes} x float>", 4 * lanes
    first = f.let(f"insertelement {kind} poison, float {number}, i64 0")
    zeros = f"<{lanes} x i32> zeroinitializer"
    spread = f.let(f"shufflevector {kind} {first}, {kind} poison, {zeros}")
    values = (spread, w, f.load(kind, place, align=align))
    operands = ", ".join(f"{kind} {value}" for value in values)
    added = f.let(f"call {kind} @llvm.fma.v{lanes}f32({operands})")
    f.store(f"{kind} {added}", place, align=align)


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
