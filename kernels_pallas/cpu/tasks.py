"""Writes what XLA calls: a handler of its foreign function interface, whose tasks are claimed one
by one by the calling thread and by threads of XLA's pool. Those may come late or never: the call
waits only for tasks that somebody has begun.

Offsets are those of jaxlib's `xla/ffi/api/c_api.h`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kernels_pallas.cpu.function import Function

# Offsets in bytes within the structures of the interface.
EXTENSION, API, CONTEXT, ARGUMENTS, RESULTS = 8, 16, 24, 72, 112  # of a call
METADATA, MAJOR, MINOR = 24, 24, 28  # of an extension, and of what it points to
DTYPE, DATA, RANK, DIMS = 16, 24, 32, 40  # of a buffer
DESTROY_ERROR, SCHEDULE, NUM_THREADS = 64, 136, 144  # of the functions that XLA offers
FLOAT32, BFLOAT16 = 11, 16  # of dtypes
VERSION = (0, 3)
"""The handlers ask for this version of the interface. Later ones of the same first number only add
to the ends of structures.
"""

COUNTERS = ("next", "done", "users", "tasks")
"""The threads of a call share these, 8 bytes each, and what its tasks need."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Is an operand, or the result, of a call."""

    f: Function
    address: str

    @property
    def data(self) -> str:
        return self.f.load("ptr", self.address, DATA)

    def num_bytes(self) -> str:
        """Gives the bytes of a number, of float32, bfloat16 or int8."""
        f = self.f
        dtype = f.load("i32", self.address, DTYPE, align=4)
        is_float, is_half = (f.let(f"icmp eq i32 {dtype}, {x}") for x in (FLOAT32, BFLOAT16))
        less = f.let(f"select i1 {is_half}, i64 2, i64 1")
        return f.let(f"select i1 {is_float}, i64 4, i64 {less}")

    @property
    def rank(self) -> str:
        return self.f.load("i64", self.address, RANK)

    def dim(self, axis: int) -> str:
        """Returns the size of an axis; one below 0 is counted from the last one on."""
        place = 8 * axis if axis >= 0 else self.f.mul(self.f.add(self.rank, axis), 8)
        return self.f.load("i64", self.f.load("ptr", self.address, DIMS), place)

    def integer(self) -> str:
        """Reads the first number, of int32."""
        number = self.f.load("i32", self.data, align=4)
        return self.f.let(f"sext i32 {number} to i64")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """Says what a handler does. lanes: as `Function` has them. shared: what its tasks need, by
    name: "ptr" or "i64". begin: gives their values, and the number of tasks under "tasks", from the
    operands and, as the last ones, the results. do: writes a task, which has a number.
    """

    name: str
    num_operands: int
    num_results: int = 1
    lanes: int = 8
    shared: Mapping[str, str]
    begin: Callable[[Function, Sequence[Buffer]], Mapping[str, str]]
    do: Callable[[Function, Mapping[str, str], str], None]

    def functions(self) -> list[Function]:
        return [self._work(), self._helper(), self._handler()]

    def _address(self, f: Function, name: str) -> str:
        return f.at("%shared", 8 * [*COUNTERS, *self.shared].index(name))

    def _work(self) -> Function:
        """Writes the function that does tasks until none is left."""
        f = Function(f"define internal void @{self.name}_work(ptr %shared)", self.lanes)
        known = {
            name: f.let(f"load {kind}, ptr {self._address(f, name)}")
            for name, kind in self.shared.items()
        }
        tasks = f.let(f"load i64, ptr {self._address(f, 'tasks')}")
        f.do("br label %claim")
        f.label("claim")
        task = f.let(f"atomicrmw add ptr {self._address(f, 'next')}, i64 1 monotonic")
        is_left = f.let(f"icmp slt i64 {task}, {tasks}")
        f.do(f"br i1 {is_left}, label %do, label %out")
        f.label("do")
        self.do(f, known, task)
        f.let(f"atomicrmw add ptr {self._address(f, 'done')}, i64 1 release")
        f.do("br label %claim")
        f.label("out")
        f.do("ret void")
        return f

    def _helper(self) -> Function:
        """Writes what a thread of XLA's pool runs."""
        f = Function(f"define internal void @{self.name}_helper(ptr %shared)")
        f.do(f"call void @{self.name}_work(ptr %shared)")
        f.do("call void @release(ptr %shared)")
        f.do("ret void")
        return f

    def _handler(self) -> Function:
        """Writes the function that XLA calls."""
        f = Function(f"define ptr @{self.name}(ptr %call)")
        extension = f.load("ptr", "%call", EXTENSION)
        with f.where(f.let(f"icmp ne ptr {extension}, null")):  # asks which version this is for
            metadata = f.load("ptr", extension, METADATA)
            for offset, version in zip((MAJOR, MINOR), VERSION, strict=True):
                f.store(f"i32 {version}", metadata, offset, align=4)
            f.do("ret ptr null")
            f.label(f.name("asked"))
        arguments, results = f.load("ptr", "%call", ARGUMENTS), f.load("ptr", "%call", RESULTS)
        given = [f.load("ptr", arguments, 8 * i) for i in range(self.num_operands)]
        given += [f.load("ptr", results, 8 * i) for i in range(self.num_results)]
        values = self.begin(f, [Buffer(f, x) for x in given])
        tasks = values["tasks"]
        helpers = f.most(f.least(f.add(_num_threads(f), -1), f.add(tasks, -1)), 0)
        f.do(f"%shared = call ptr @malloc(i64 {8 * len([*COUNTERS, *self.shared])})")
        start = {"next": "0", "done": "0", "users": f.add(helpers, 1), **values}
        for name in (*COUNTERS, *self.shared):
            kind = self.shared.get(name, "i64")
            f.do(f"store {kind} {start[name]}, ptr {self._address(f, name)}")
        with f.each(0, helpers, 1):
            error = _ask(f, SCHEDULE, (f"ptr @{self.name}_helper", "ptr %shared"))
            with f.where(f.let(f"icmp ne ptr {error}, null")):  # nobody will come
                _destroy(f, error)
                f.do("call void @release(ptr %shared)")
        f.do(f"call void @{self.name}_work(ptr %shared)")
        f.do("br label %wait")
        f.label("wait")
        done = f.let(f"load atomic i64, ptr {self._address(f, 'done')} acquire, align 8")
        f.do(f"br i1 {f.let(f'icmp eq i64 {done}, {tasks}')}, label %out, label %yield")
        f.label("yield")
        f.let("call i32 @sched_yield()")
        f.do("br label %wait")
        f.label("out")
        f.do("call void @release(ptr %shared)")
        f.do("ret ptr null")
        return f


def release() -> Function:
    """Writes the function by which a thread lets go of what it shares: the last one frees it."""
    f = Function("define internal void @release(ptr %shared)")
    users = f.at("%shared", 8 * COUNTERS.index("users"))
    before = f.let(f"atomicrmw sub ptr {users}, i64 1 acq_rel")
    with f.where(f.let(f"icmp eq i64 {before}, 1")):
        f.do("call void @free(ptr %shared)")
    f.do("ret void")
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
