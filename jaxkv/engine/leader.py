"""Runs one engine in several processes, each of which has some of its devices.

Each process has the whole engine: scheduler, tables and requests are in every one, and a program
runs when all have launched it. What an engine does follows from what it is told, so the first
process tells the others all that it is told itself, in order, and they do the same. Nothing that an
engine decides by may therefore differ between processes: no clock, no order of a set, no memory
that one of them has less of. Source: Schneider 1990, "Implementing Fault-Tolerant Services Using
the State Machine Approach", of which this has the replicas, not the tolerance.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from signal import SIGINT, SIGTERM, Signals, getsignal, signal
from threading import RLock, current_thread, main_thread
from types import FrameType
from typing import Any, NoReturn, TypeVar
from weakref import finalize, ref

from jaxkv.engine.channel import Receiver, Sender, written
from jaxkv.engine.engine import Engine
from jaxkv.engine.metrics import Metric
from jaxkv.errors import CheckpointError, EngineDeadError
from jaxkv.holding.pins import Pins
from jaxkv.lora.request import LoRARequest
from jaxkv.processes import of_all
from jaxkv.programs.process import is_forked
from jaxkv.requests.asked import adapter_to_json
from jaxkv.requests.request import Request, Submission
from jaxkv.weights.adapters import Adapter
from jaxkv.weights.tree import Weights

T = TypeVar("T")

ADD, ABORT, STEP, FORGET, END = "add", "abort", "step", "forget", "end"
SLEEP, WAKE, ADAPTER = "sleep", "wake", "adapter"
"""What the first process tells the others, each with what else there is to say."""


class _NoPins(Pins):
    """Keeps nothing longer for those who have it: other processes do not know of them."""

    def add(self, owner: object, keys: Sequence[bytes]) -> None:
        """Does nothing."""


class _Together:
    """Does what both ends have in common, in one process of several."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        engine.pins = _NoPins()

    @property
    def lock(self) -> RLock:
        return self._engine.lock

    @property
    def num_rows(self) -> int:
        return self._engine.num_rows

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    @property
    def is_asleep(self) -> bool:
        return self._engine.is_asleep

    def check_alive(self) -> None:
        """Does what `Engine.check_alive` does."""
        self._engine.check_alive()

    def replace_weights(self, weights: Weights, *, secret: bytes) -> None:
        """Does what `Engine.replace_weights` does, in this process: within `Leader.everywhere`."""
        self._engine.replace_weights(weights, secret=secret)

    def metrics(self) -> list[Metric]:
        """Returns those of this process, which are those of all but for times."""
        return self._engine.metrics()

    def check(self) -> None:
        """Raises RuntimeError if pages, rows and requests do not add up."""
        self._engine.check()


class Leader(_Together):
    """Stands in front of the first process's engine: what runs requests talks to it as to an
    `Engine`.

    What is cut off half way ends the engine: nobody knows then how far the others have come. So
    an interrupt comes behind a step, but for a second one.
    """

    def __init__(self, engine: Engine, others: Sender) -> None:
        super().__init__(engine)
        self._others = others
        self._known: dict[Request, Submission] = {}
        """What the others know and has not finished, by its first sample: callers give it other
        ids.
        """
        self._shared: set[tuple[str, bytes]] = set()
        """Path and digest of the adapters that all have read."""
        self._is_under_way = False
        self._aborted: list[Submission] = []
        """To be ended behind what is under way."""
        self._tell_end = finalize(self, _end, others)
        # At its exit JAX waits for the others, and they for the end: what is registered last is
        # called first.
        atexit.register(_end_at_exit, ref(self))

    def add(self, submission: Submission) -> None:
        """Queues what `Intake` made, in all processes. Raises: as `Engine.add`."""
        with self.lock:
            self._engine.check_awake()
            if submission.samples[0] not in self._known:
                self._both([ADD, submission.to_json()], partial(self._add, submission))

    def _add(self, submission: Submission) -> None:
        self._known[submission.samples[0]] = submission
        self._engine.add(submission)

    def abort(self, submission: Submission) -> None:
        """Ends what is left of it in all processes, as `Engine.abort` does."""
        if is_forked():
            return
        with self.lock:
            if self._is_under_way:
                self._aborted.append(submission)
            elif self._tell_end.alive and (known := self._known.get(submission.samples[0])):
                self._both([ABORT, known.number], partial(self._abort, known))

    def _abort(self, known: Submission) -> None:
        self._engine.abort(known)
        del self._known[known.samples[0]]

    def step(self) -> list[Request]:
        """Takes a step in all processes. Raises: as `Engine.step`, which ends the engine here."""
        with self.lock:
            self._engine.check_alive()
            return self._both([STEP], self._step)

    def _step(self) -> list[Request]:
        got = self._engine.step()
        if any(request.finish_reason is not None for request in got):
            self._known = {
                one: known for one, known in self._known.items() if not known.is_finished
            }
        return got

    def agree_on(self, lora: LoRARequest, adapter: Adapter) -> None:
        """Has the others read an adapter. Raises: CheckpointError where one of them cannot, or
        reads another one.
        """
        key = lora.path, adapter.digest
        with self.lock:
            if key in self._shared:
                return
            read = adapter_to_json(lora, adapter)
            if self.everywhere(ADAPTER, partial(of_all, False), *read).any():
                raise CheckpointError(
                    f"{lora.path}: expected an adapter that all processes of this engine read "
                    f"alike, got an error in another one, which says more"
                )
            self._shared.add(key)

    def forget(self) -> None:
        """Makes nothing that is computed so far be found again in the prefix cache."""
        self.everywhere(FORGET, self._engine.forget)

    def sleep(self, *, keeps_weights: bool) -> None:
        """Does what `Engine.sleep` does, in all processes."""
        with self.lock:
            self._engine.check_tired()
            sleep = partial(self._engine.sleep, keeps_weights=keeps_weights)
            self.everywhere(SLEEP, sleep, keeps_weights)

    def wake_up(self, what: Collection[str]) -> None:
        """Does what `Engine.wake_up` does, in all processes."""
        with self.lock:
            self._engine.check_rested(what)
            self.everywhere(WAKE, partial(self._engine.wake_up, what), sorted(what))

    def everywhere(self, name: str, function: Callable[[], T], *what: Any) -> T:
        """Calls a function, and in the others what they have for this name with what is given."""
        with self.lock:
            self._engine.check_alive()
            # Programs of several threads XLA runs in any order on a CPU, and this may be another.
            self._engine.wait()
            return self._both([name, *what], function)

    def end(self) -> None:
        """Ends every request, and takes no more; `Follower.follow` returns."""
        with self.lock:
            self._tell_end()
            self._engine.end()

    def _both(self, message: Sequence[Any], change: Callable[[], T]) -> T:
        """Has the others do what `change` does here."""
        sent = written(message)  # what cannot be said ends nothing
        with _interrupts_behind():
            is_done, self._is_under_way = False, True
            try:
                self._others.send(sent)
                result = change()
                is_done = True
            finally:
                self._is_under_way = False
                if not is_done:
                    self._tell_end.detach()
                    self._others.close()  # without a word
                    self._engine.end()
        while self._aborted:
            self.abort(self._aborted.pop())
        return result


class Follower(_Together):
    """Stands in front of the engine of another process than the first, which does what that one
    does.
    """

    def __init__(self, engine: Engine, first: Receiver) -> None:
        super().__init__(engine)
        self._first = first

    def follow(
        self,
        make: Callable[[Mapping[str, Any]], Submission],
        functions: Mapping[str, Callable[..., Any]],
    ) -> None:
        """Does what the first process does until that ends the engine.

        `make` makes of a message the submission that it is of. functions: what
        `Leader.everywhere` calls here. Raises: EngineDeadError where the first process has gone
        without a word, and what a step raises.
        """
        engine, known = self._engine, dict[int, Submission]()
        functions = {
            FORGET: engine.forget,
            SLEEP: lambda keeps_weights: engine.sleep(keeps_weights=keeps_weights),
            WAKE: engine.wake_up,
            **functions,
        }
        with closing(self._first):
            while True:
                name, *what = self._first.receive()
                if name == ADD:
                    submission = make(*what)
                    known[submission.number] = submission
                    engine.add(submission)
                elif name == ABORT:
                    engine.abort(known.pop(*what))
                elif name == STEP:
                    if any(request.finish_reason is not None for request in engine.step()):
                        known = {n: one for n, one in known.items() if not one.is_finished}
                elif name == END:
                    return self.end()
                else:
                    functions[name](*what)

    def add(self, submission: Submission) -> NoReturn:
        raise ValueError(ONLY_FIRST)

    def step(self) -> NoReturn:
        raise ValueError(ONLY_FIRST)

    def forget(self) -> NoReturn:
        raise ValueError(ONLY_FIRST)

    def sleep(self, *, keeps_weights: bool) -> NoReturn:
        raise ValueError(ONLY_FIRST)

    def wake_up(self, what: Collection[str]) -> NoReturn:
        raise ValueError(ONLY_FIRST)

    def abort(self, submission: Submission) -> None:
        """Does nothing: nobody can have added one here."""

    def end(self) -> None:
        """Ends every request, and takes no more."""
        with self.lock:
            self._first.close()
            self._engine.end()


ONLY_FIRST = (
    "expected the first process (jax.process_index() 0) to ask, got another one of this engine: "
    "call follow() here"
)


@contextmanager
def _interrupts_behind() -> Iterator[None]:
    """Has a signal that ends what runs, as Ctrl-C does, come behind the block; a second one comes
    at once. Signals come in the main thread only.
    """
    if current_thread() is not main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    handlers = {number: getsignal(number) for number in (SIGINT, SIGTERM)}
    own = {number: handler for number, handler in handlers.items() if callable(handler)}

    def note(number: int, frame: FrameType | None) -> None:
        came.append((number, frame))
        if len(came) > 1:
            own[Signals(number)](number, frame)

    try:
        for number in own:
            signal(number, note)
        yield
    finally:
        for number, handler in own.items():
            signal(number, handler)
        for which, frame in came[:1]:
            own[Signals(which)](which, frame)


def _end_at_exit(leader: ref[Leader]) -> None:
    """Ends it behind the step that another thread takes."""
    one = leader()
    if one is not None and not is_forked():
        one.end()


def _end(others: Sender) -> None:
    """Tells the others that there is no more to do; in a fork they are not its own."""
    if not is_forked():
        with suppress(EngineDeadError):
            others.send(written([END]))
        others.close()
