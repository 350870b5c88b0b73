"""Computes prompts on one engine and outputs on another, each on devices of its own, so that no
next token waits for the long prompt of another request.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import RLock, current_thread
from typing import TypeVar

from jaxkv.config import PREFILL
from jaxkv.engine.engine import ENDED, UNDER_WAY, Engine
from jaxkv.engine.metrics import Metric, arrived
from jaxkv.engine.saving import extract, form_of, insert, page_form
from jaxkv.engine.scheduler import Scheduler
from jaxkv.errors import CapacityError, Catch, EngineDeadError
from jaxkv.holding.hold import Hold
from jaxkv.kv.saved import Origin, SavedPages
from jaxkv.programs.process import check_process, is_forked
from jaxkv.requests.request import Request, Submission
from jaxkv.weights.tree import Weights

T = TypeVar("T")

LOOP_STEPS = 2
"""Steps of a decode loop at most: prompts come between two loops, at any time."""

WAIT_S = 0.02
"""How long a step waits for a prompt where nothing else is to be done: whoever has a request to add
or to end comes in between.
"""

HELD_BYTES = 2**30
"""Bytes of prompts that are computed and wait in host memory, with which no more are computed."""

THREAD = "jaxkv-prefill"


@dataclass(slots=True)
class _Coming:
    """Holds a submission that the decode engine does not have yet, and the full pages of its prompt
    once that is computed, if they are still there.
    """

    submission: Submission
    is_computed: bool = False
    saved: SavedPages | None = None
    num_bytes: int = 0
    """Counts those of `saved`."""


class Handover:
    """Stands in front of two engines, which know nothing of each other, as one: what runs requests
    talks to it as to an `Engine`.

    A prompt goes to the prefill engine as a request of its own (its twin). Its full pages, read
    into host memory, are put into the decode engine's prefix cache, and only then does the request
    come there: it finds them, computes what is left of its prompt, at most a page, and goes on as
    it would alone. Where pages are evicted before it comes, or there is no room for them, it
    computes its prompt itself.

    The prefill engine is touched by one thread only, which takes its steps; everything else happens
    in the steps of the decode engine, under its lock. An interrupt may come between any two lines
    there: nothing is taken out of one place before it is in the next one, and may be put there
    twice.
    """

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        # Pages that are alike are copied as they are, others by token.
        forms = [page_form(prefill.kv), page_form(decode.kv)]
        if forms[0] != forms[1]:
            forms = [form_of(prefill.kv), form_of(decode.kv)]
        if forms[0] != forms[1]:
            raise NotImplementedError(
                f"disaggregate: expected as many devices for prompts as for outputs with a "
                f"quantised KV cache, whose pages differ: {forms[0]}, {forms[1]}"
            )
        self._prefill, self._decode = _Prefill(prefill, forms[0], decode.lock), decode
        decode.scheduler.loop_steps = min(LOOP_STEPS, decode.scheduler.config.decode_steps)
        self._coming: dict[Request, _Coming] = {}
        """Submissions by their twins."""
        self._moving: Request | None = None
        """The twin of the one that is being given to the decode engine, which may have it."""
        self._given: Sequence[Request] = ()
        """The requests that were given to the decode engine last."""
        self._is_mixed = False
        """The engines may have different weights: one has got new ones."""
        self._is_under_way = False
        self._aborted: list[Submission] = []
        """To be ended: a step, or who called the prefill engine's thread, was in the way."""

    @property
    def lock(self) -> RLock:
        return self._decode.lock

    @property
    def scheduler(self) -> Scheduler:
        return self._decode.scheduler

    @property
    def num_rows(self) -> int:
        return self._decode.num_rows

    @property
    def has_work(self) -> bool:
        return self._decode.has_work or bool(self._coming or self._prefill.leaving)

    def add(self, submission: Submission) -> None:
        """Queues what `Intake` made."""
        with self.lock:
            self.check_alive()
            self._decode.check_awake()
            if not self._is_worth_it(submission.samples[0]):
                self._decode.add(submission)
                return
            for request in submission.samples:
                arrived(request)
            twin = _twin(submission.samples[0])
            self._coming[twin] = _Coming(submission)
            self._prefill.arriving.append(twin)

    def abort(self, submission: Submission) -> None:
        """Ends what is left of it, as `Engine.abort` does: in a step, where the garbage collector
        may close a forgotten stream, it waits; in the prefill engine's thread too, which whoever
        has the lock may be waiting for. What the prefill engine holds is free at the next step. In
        a fork of the process that made the engines there is nothing to end.
        """
        if is_forked():
            return
        if current_thread().name.startswith(THREAD):
            self._aborted.append(submission)
            return
        with self.lock:
            if self._is_under_way:
                self._aborted.append(submission)
                return
            for twin, coming in list(self._coming.items()):
                if coming.submission is submission:
                    self._let_go(twin)
            self._decode.abort(submission)

    def step(self) -> list[Request]:
        """Takes over prompts that are computed, then takes a step of the decode engine. Returns the
        requests that got tokens.

        Raises: as `Engine.step`, and what a step of the prefill engine has raised.
        """
        with self.lock:
            try:
                try:
                    self._is_under_way = True
                    self._collect(wait_s=0 if self._decode.has_work or self._ready else WAIT_S)
                    self._hand_over()
                finally:
                    self._is_under_way = False
            finally:  # the line above may be the one that is cut off
                self._is_under_way = False
                self._end_aborted()
            return self._decode.step() if self._decode.has_work else []

    def _end_aborted(self) -> None:
        while self._aborted:
            self.abort(self._aborted[0])
            del self._aborted[0]

    def forget(self) -> None:
        """Makes nothing that is computed so far be found again in the prefix caches."""
        self._prefill.call(lambda engine: engine.forget())
        with self.lock:
            self._drop_saved()
            self._decode.forget()

    def _drop_saved(self) -> None:
        """Drops the pages that are computed and not handed over."""
        self._note()
        for coming in list(self._coming.values()):
            coming.saved = None

    def replace_weights(self, weights: Weights, of_prefill: Weights, *, secret: bytes) -> None:
        """Does what `Engine.replace_weights` does, on both engines. Where it is cut off no pages
        are handed over before it was done again.
        """
        with self.lock:  # no step gives pages of the new weights to the old ones meanwhile
            self._is_mixed = True
            self._prefill.call(lambda engine: engine.replace_weights(of_prefill, secret=secret))
            self._drop_saved()
            self._decode.replace_weights(weights, secret=secret)
            self._is_mixed = False

    @property
    def is_asleep(self) -> bool:
        return self._decode.is_asleep

    def check_alive(self) -> None:
        """Does what `Engine.check_alive` does."""
        self._prefill.check_alive()

    def sleep(self, *, keeps_weights: bool) -> None:
        """Does what `Engine.sleep` does, on both engines or, if one refuses, on neither."""
        with self.lock:
            self.check_alive()
            self._end_aborted()
            if self._coming:
                raise ValueError(UNDER_WAY)
            self._prefill.call(lambda _: self._prefill.obey())  # what was aborted is there still
            self._decode.sleep(keeps_weights=keeps_weights)
            self._prefill.call(lambda engine: engine.sleep(keeps_weights=keeps_weights))

    def wake_up(self, what: Collection[str]) -> None:
        """Does what `Engine.wake_up` does, on both engines."""
        with self.lock:
            self._prefill.call(lambda engine: engine.wake_up(what))
            self._decode.wake_up(what)

    def end(self) -> None:
        """Ends every request, and takes no more."""
        with self.lock:
            self._prefill.stop()
            for twin in list(self._coming):
                self._let_go(twin)
        # Without the lock: the thread that is waited for may want it, where the garbage collector
        # closes a forgotten stream.
        self._prefill.end()
        self._decode.end()

    def metrics(self) -> list[Metric]:
        """Returns those of the decode engine; a request that it does not have yet waits."""
        coming = [len(one.submission.samples) for one in list(self._coming.values())]
        return self._decode.metrics(num_coming=sum(coming))

    def check(self) -> None:
        """Raises RuntimeError if pages, rows and requests of either engine do not add up."""
        self._prefill.call(lambda engine: engine.check())
        self._decode.check()

    def _is_worth_it(self, request: Request) -> bool:
        """Tells whether the decode engine lacks more than a page of the prompt, and can use pages:
        prompt tokens that are to be scored it has to see, and under a policy it decides what stays.
        """
        size = self.scheduler.config.block_size
        most = self.scheduler.most_cached(request)
        if request.hold.retention is not None or most < request.prompt_len - 1:
            return False
        return request.prompt_len - self._decode.num_cached(request) > size

    @property
    def _ready(self) -> list[Request]:
        """Lists the twins of those that are computed."""
        return [twin for twin, coming in self._coming.items() if coming.is_computed]

    def _collect(self, *, wait_s: float) -> None:
        """Notes what the prefill engine has computed, and has it go on. Raises: what a step has
        raised.
        """
        try:
            self._prefill.begin(is_full=self._is_full)
            self._prefill.wait(wait_s)
        finally:
            self._note()
        self._prefill.begin(is_full=self._is_full)

    @property
    def _is_full(self) -> bool:
        """Tells whether prompts that are computed take as much host memory as they may."""
        held = [one.num_bytes for one in self._coming.values() if one.saved is not None]
        return len(self._ready) >= self.scheduler.config.max_num_seqs or sum(held) >= HELD_BYTES

    def _note(self) -> None:
        """Notes what the prefill engine has computed, and ends requests that a step has ended."""
        done = self._prefill.done
        while done:
            twin, saved = done[0]
            coming = self._coming.get(twin)
            if coming is not None and twin.finish_reason == "abort":
                self._let_go(twin)
            elif coming is not None:
                coming.saved, coming.is_computed = saved, True
                coming.num_bytes = 0 if saved is None else saved.nbytes
            done.popleft()

    def _hand_over(self) -> None:
        """Gives the decode engine prompts, the next one when the last one has a row: pages that
        wait there for a row might be evicted. Others that wait there do not count, as there might
        always be one.
        """
        self._move()
        while (ready := self._ready) and not self._is_held_up:
            twin = min(ready, key=lambda twin: twin.order)
            coming = self._coming[twin]
            # Pages that cannot be written are not tried again.
            saved, coming.saved = coming.saved, None
            if saved is not None and not self._is_mixed:
                with suppress(CapacityError):
                    insert(self._decode, saved, twin.hold.chain.root)
            self._moving = twin
            self._move()

    @property
    def _is_held_up(self) -> bool:
        """Tells whether what was given to the decode engine last still waits for a row there."""
        return bool(self.scheduler.waiting) and any(map(_waits, self._given))

    def _move(self) -> None:
        """Gives the decode engine a submission, or what an interrupt has left of doing so."""
        twin = self._moving
        if twin is not None and twin in self._coming:
            submission = self._coming[twin].submission
            self._decode.add(submission)
            self._given = submission.samples
            del self._coming[twin]
        self._moving = None

    def _let_go(self, twin: Request) -> None:
        """Ends a submission that the decode engine does not have yet."""
        for request in self._coming[twin].submission.samples:
            request.finish_reason = "abort"
        self._prefill.leaving.append(twin)
        del self._coming[twin]


class _Prefill:
    """Takes the steps of the prefill engine, in a thread that nothing else is done in. `lock` is
    held by whoever has it take some.
    """

    def __init__(self, engine: Engine, form: str, lock: RLock) -> None:
        self.arriving: deque[Request] = deque()
        self.leaving: deque[Request] = deque()
        """Twins that other threads want computed, and that they want no more."""
        self.done: deque[tuple[Request, SavedPages | None]] = deque()
        """Twins that have ended, computed or not, with their full pages if those are still there,
        for other threads to take.
        """
        self._engine = engine
        self._lock = lock
        self._running: list[Request] = []
        self._is_ended = False
        size = engine.scheduler.config.block_size
        # Both engines have the same model: what it is nobody asks.
        self._origin = Origin(
            model="", dtype="", codec="", form=form, page_size=size, weights="", tokenizer=""
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=THREAD)
        self._steps: Future[None] | None = None

    def wait(self, wait_s: float) -> None:
        """Waits so long at most until a prompt is done. Raises: what a step has raised."""
        if self._steps is not None and wait([self._steps], wait_s).done:
            steps, self._steps = self._steps, None
            steps.result()

    def begin(self, *, is_full: bool) -> None:
        """Has steps taken, if there is anything to do and the thread is not at it. is_full: no more
        prompts are computed, as pages of those that are done take host memory.
        """
        if self._is_ended or self._steps is not None:
            return
        if is_full:
            self._steps = self._thread.submit(self.obey) if self.leaving else None
        elif self.arriving or self.leaving or self._engine.has_work:
            self._steps = self._thread.submit(self._take_steps)

    def check_alive(self) -> None:
        """Raises EngineDeadError after `stop`, RuntimeError in a fork, which lacks the thread."""
        check_process()
        if self._is_ended:
            raise EngineDeadError(ENDED)

    def call(self, function: Callable[[Engine], T]) -> T:
        """Returns function(engine), between two prompts. Raises: as `check_alive`."""
        check_process()
        with self._lock:  # `stop` comes before this or behind it
            self.check_alive()
            reply = self._thread.submit(function, self._engine)
        try:
            return reply.result()
        except CancelledError as error:
            raise EngineDeadError(ENDED) from error

    def stop(self) -> None:
        """Begins no more steps and calls; those that wait for their turn never come. Under the
        lock.
        """
        self._is_ended = True
        self._steps = None
        self._thread.shutdown(wait=False, cancel_futures=True)

    def end(self) -> None:
        """Ends every request, after `stop`."""
        self._thread.shutdown()
        self._engine.end()
        self.arriving.clear()
        self.leaving.clear()

    def _take_steps(self) -> None:
        """Takes steps until a prompt is done, or none is left."""
        while True:
            self.obey()
            saved: dict[Request, SavedPages | None] = {}
            with Catch() as caught:
                if self._engine.has_work:
                    self._engine.step()
                for twin in self._ended():
                    if twin.finish_reason != "abort":
                        saved[twin] = self._pages(twin)
            ended = self._ended()
            self._running = [twin for twin in self._running if twin.finish_reason is None]
            self.done += [(twin, saved.get(twin)) for twin in ended]
            if caught.error is not None:
                raise caught.error
            if ended or not self._engine.has_work:
                return

    def obey(self) -> None:
        """Adds the twins that arrive and ends those that leave, in the engine's thread."""
        while self.arriving:
            twin = self.arriving.popleft()
            self._running.append(twin)
            self._engine.add(_submission(twin))
        while self.leaving:
            self._engine.abort(_submission(self.leaving.popleft()))

    def _ended(self) -> list[Request]:
        return [twin for twin in self._running if twin.finish_reason is not None]

    def _pages(self, twin: Request) -> SavedPages | None:
        tokens = twin.tokens[: twin.prompt_len - 1]
        return extract(self._engine, tokens, twin.hold.chain.root, self._origin, {})


def _waits(request: Request) -> bool:
    """Tells whether a request that an engine has, or had, has no row and needs one."""
    return request.row is None and request.finish_reason is None and not request.is_leaving


def _twin(request: Request) -> Request:
    """Returns a request that computes the prompt of this one."""
    return Request(
        id=request.id,
        tokens=array("i", request.tokens),
        prompt_len=request.prompt_len,
        params=PREFILL,
        hold=_hold(request),
        max_len=request.prompt_len + 1,
        priority=request.priority,
    )


def _hold(request: Request) -> Hold:
    chain = request.hold.chain
    return Hold(replace(chain, keys=[], packed=[]), request.prompt_len)


def _submission(twin: Request) -> Submission:
    return Submission(twin.id, None, (twin,))
