"""A request gets its programs when they are ready, whatever the thread behind is at."""

import gc
import io
import os
import subprocess
import sys
import time
import weakref
from threading import Event, Thread
from types import FrameType, SimpleNamespace
from typing import Any

import jax
import pytest

from jaxkv import LLM, SamplingParams
from jaxkv.build.blueprint import make_blueprint
from jaxkv.build.options import EngineOptions
from jaxkv.errors import CapacityError, EngineDeadError
from jaxkv.models.families import read_config, read_family
from jaxkv.programs.background import Background, likely_first
from jaxkv.programs.compiled import Programs
from jaxkv.programs.lowerings import KINDS
from tiny import SMALL

pytestmark = pytest.mark.usefixtures("quick_compile")

EXIT = """
import sys
from jaxkv import LLM, SamplingParams
limits = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "block_size": 8, "max_model_len": 64}
llm = LLM(sys.argv[1], skip_tokenizer_init=True, dtype="float32", **limits)
if sys.argv[2] == "raise":
    raise SystemExit(3)
params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
list(llm.stream({"prompt_token_ids": [3, 1, 4]}, params))
print(llm._engine.programs.num_compiled < llm._engine.programs.num_programs)
"""


class Compiler:
    """Takes the compiler's place: what it makes is a name, after `may_end[key]` is set."""

    def __init__(self) -> None:
        self.begun: list = []
        self.waits: dict[tuple, Event] = {}
        self.fails: dict[tuple, Exception] = {}
        self.arrived = Event()

    def __call__(self, kind: str, size: int) -> str:
        key = (kind, size)
        self.begun.append(key)
        if key in self.waits:
            self.arrived.set()
            assert self.waits[key].wait(30)
        if key in self.fails:
            raise self.fails[key]
        return f"{kind} {size}"


@pytest.fixture
def compiler(monkeypatch) -> Compiler:
    compiler = Compiler()
    monkeypatch.setattr(Programs, "_compile", lambda _, kind, size: compiler(kind, size))
    return compiler


@pytest.fixture
def programs(checkpoint) -> Programs:
    spec, layout = read_family(read_config(checkpoint))
    options = EngineOptions(checkpoint, **SMALL | {"max_num_batched_tokens": 64})
    blueprint = make_blueprint(options, spec, layout, jax.devices())
    return blueprint.programs(blueprint.abstract_weights(), 200)


FIRST = ("step", 16)


def test_small_sizes_of_every_kind_come_first():
    keys = [("step", 64), ("step", 16), ("loop", 2), ("copy", 4), ("step", 256), ("loop", 8)]
    assert likely_first(keys) == [
        ("loop", 2) if key == "loop" else key
        for key in (("step", 16), "loop", ("step", 64), ("loop", 8), ("step", 256), ("copy", 4))
    ]
    assert likely_first([]) == []


def test_all_are_made_once_in_order(programs, compiler):
    programs.compile_in_background()
    programs.compile_all()
    assert compiler.begun == likely_first(programs._every)
    assert programs.num_compiled == programs.num_programs > 4
    assert programs.step(16) == "step 16"
    assert len(compiler.begun) == programs.num_programs


@pytest.mark.parametrize("ask", [Programs.is_compiling.fget, Programs.stop])
def test_who_asks_while_another_thread_sees_its_end_gets_an_answer(programs, compiler, ask):
    """Between any two operations of the interpreter the other thread may have its turn."""
    programs.compile_in_background()
    background = programs._background
    background.wait()
    for number in range(16):
        programs._background = background
        left = number

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal left
            if frame.f_code is not ask.__code__:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                left -= 1
                if left == 0:
                    programs.compile_all()
            return trace

        sys.settrace(trace)
        try:
            assert not ask(programs)
        finally:
            sys.settrace(None)


def test_one_that_is_wanted_does_not_wait_for_another(programs, compiler):
    compiler.waits[FIRST] = Event()
    programs.compile_in_background()
    assert compiler.arrived.wait(30)
    assert programs.step(64) == "step 64"
    assert programs.loop(2) == "loop 2"
    assert compiler.begun == [FIRST, ("step", 64), ("loop", 2)]
    # Another user of the one under way waits for it, and no one makes it twice.
    got = []
    user = Thread(target=lambda: got.append(programs.step(16)))
    user.start()
    compiler.waits[FIRST].set()
    user.join(30)
    programs.compile_all()
    assert got == ["step 16"]
    assert sorted(compiler.begun) == sorted(programs._every)


def test_some_are_asked_for_while_others_are_made(programs, compiler):
    scores, got = [("scores", size) for size in programs.token_buckets], []
    compiler.waits[scores[0]] = Event()
    user = Thread(target=lambda: got.append(programs.scores(16)))
    user.start()
    assert compiler.arrived.wait(30)
    programs.compile_all()
    assert programs.num_compiled >= programs.num_programs
    compiler.waits[scores[0]].set()
    user.join(30)
    assert got == ["scores 16"]
    assert sorted(compiler.begun) == sorted([*programs._every, *scores])


def test_what_the_background_takes_is_waited_for_by_nobody(programs, compiler):
    programs.compile_in_background()
    programs.compile_all()
    programs.step(16)
    assert programs.compile_s > programs.waited_s == 0
    programs.scores(16)
    assert programs.waited_s > 0


def test_the_first_token_does_not_wait_for_the_program_of_the_second(checkpoint, monkeypatch):
    compile_one, may_end, got = Programs._compile, Event(), []

    def compile_loops_late(self: Programs, kind: str, size: int) -> object:
        assert kind != "loop" or may_end.wait(60)
        return compile_one(self, kind, size)

    monkeypatch.setattr(Programs, "_compile", compile_loops_late)
    llm = LLM(checkpoint, **SMALL | {"lazy_compile": False})
    stream = llm.stream({"prompt_token_ids": [3, 1, 4]}, SamplingParams(max_tokens=2))
    user = Thread(target=lambda: got.append(next(stream)))
    user.start()
    user.join(60)
    assert [len(output.outputs[0].token_ids) for output in got] == [1]
    may_end.set()
    assert sum(len(output.outputs[0].token_ids) for output in stream) == 1


def test_what_fails_raises_where_it_is_used_and_nowhere_else(programs, compiler):
    compiler.fails = {FIRST: CapacityError("no room"), ("loop", 2): ValueError("a fault")}
    programs.compile_in_background()
    programs._background.wait()
    for _ in range(2):
        with pytest.raises(CapacityError, match="no room") as e:
            programs.step(16)
        assert e.value.__notes__ == ["This was met while compiling the step of 16 tokens."]
    with pytest.raises(ValueError, match="a fault"):
        programs.loop(2)
    assert programs.step(32) == "step 32"
    with pytest.raises(CapacityError):
        programs.compile_all()
    assert compiler.begun.count(FIRST) == 1


@pytest.mark.parametrize("is_behind", [True, False])
def test_who_waits_for_all_is_told_when_no_more_are_made(programs, compiler, is_behind):
    compiler.waits = {key: Event() for key in programs._every}
    told = []

    def wait() -> None:
        with pytest.raises(EngineDeadError, match="shut down before") as e:
            programs.compile_all()
        told.append(e.value)

    if is_behind:
        programs.compile_in_background()
    waiting, stopping = Thread(target=wait), Thread(target=programs.stop)
    waiting.start()
    assert compiler.arrived.wait(30)
    stopping.start()
    while not programs._is_stopped or (is_behind and not programs._background._stopping.is_set()):
        time.sleep(0.001)
    for may_end in compiler.waits.values():
        may_end.set()
    waiting.join(30)
    stopping.join(30)
    assert len(told) == 1
    assert len(compiler.begun) <= 2  # so many at a time


def test_an_engine_that_is_gone_has_no_more_compiled(programs, compiler):
    compiler.waits[FIRST] = Event()
    holder = SimpleNamespace(programs=programs)
    holder.programs.compile_in_background()
    assert compiler.arrived.wait(30)
    thread = programs._background._thread
    compiler.waits[FIRST].set()

    class Owner:
        def make(self, key: tuple) -> None:
            begun.append(key)
            assert free.wait(30)

    begun, free, ended, owner = [], Event(), Event(), Owner()
    background = Background([("a", 1), ("b", 2)], owner.make, at_end=ended.set)
    gone = weakref.ref(owner)
    del owner
    free.set()
    background.wait()
    gc.collect()
    assert ended.is_set()
    assert begun in ([("a", 1)], [])
    assert gone() is None
    holder.programs._background.stop()
    assert not thread.is_alive()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_sees_one_line_that_goes_away(programs, compiler, monkeypatch, is_terminal):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return is_terminal

    monkeypatch.undo()
    lowering = SimpleNamespace(compile=lambda options: "made", arguments=())
    for name, kind in KINDS.items():
        monkeypatch.setitem(KINDS, name, kind._replace(lower=lambda self, size: lowering))
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    programs.compile_in_background()
    programs._background.wait()
    total = programs.num_programs
    lines = [f"compiling {number}/{total}" for number in range(1, total + 1)]
    written = "".join(f"\r{line}" for line in lines) + "\r\x1b[K"
    assert terminal.getvalue() == (written if is_terminal else "")


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("raise", 3),
        pytest.param("return", 0, marks=pytest.mark.slow),
    ],
)
def test_a_process_ends_while_it_compiles(checkpoint, ending, code):
    arguments = [sys.executable, "-c", EXIT, str(checkpoint), ending]
    done = subprocess.run(
        arguments, env=dict(os.environ), capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (code, "")
    # It was served before the last program was there.
    assert done.stdout == ("True\n" if ending == "return" else "")
