"""The thread that has an engine, and what goes between it and event loops: commands there, newest
states back.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import logging
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar
from weakref import WeakSet

from jaxkv.api.llm import LLM, Conversation
from jaxkv.api.pooling import PoolingCall
from jaxkv.config import RequestOutputKind, SamplingParams
from jaxkv.errors import Catch, EngineDeadError
from jaxkv.lora.request import LoRARequest
from jaxkv.programs.process import check_process, is_forked
from jaxkv.requests.outputs import RequestOutput
from jaxkv.requests.prompts import Prompt
from jaxkv.requests.request import Request, Submission

LOG = logging.getLogger("jaxkv")

STUCK_S = 300.0
"""Seconds after which a step that has not ended counts as stuck: what vLLM waits for a step too. A
long chunk takes seconds, and a program that a step has to wait for minutes.
"""

T = TypeVar("T")


class _Call:
    """Is a command whose result or exception somebody waits for: in `reply`."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.reply: Future[Any] = Future()
        self._function = function

    def __call__(self) -> None:
        if not self.reply.set_running_or_notify_cancel():
            return
        try:
            with Catch() as caught:
                self.reply.set_result(self._function())
            if caught.error is not None:
                self.reply.set_exception(caught.error)
        finally:
            if not self.reply.done():
                self.reply.set_exception(_dead(sys.exception()))

    def refuse(self, error: EngineDeadError) -> None:
        if self.reply.set_running_or_notify_cancel():
            self.reply.set_exception(error)


def _dead(cause: BaseException | None) -> EngineDeadError:
    """Makes what to raise once the thread has ended by this exception; None: it was told to end."""
    reason = (
        "was shut down"
        if cause is None
        else f"died of {type(cause).__name__}, which is the cause of this error"
    )
    error = EngineDeadError(f"the engine {reason}")
    error.__cause__ = cause
    return error


class Stream:
    """Is the reading end of a request. Touched by the thread of its event loop only, but for
    `is_aborted`: somebody has aborted it, maybe before the engine has heard of it.
    """

    def __init__(self, request_id: str) -> None:
        self.id = request_id
        self.is_aborted = False
        self.is_ended = False
        self._newest: RequestOutput | Exception
        self._trace: TracebackType | None = None
        self._ready = asyncio.Event()

    def put(self, newest: RequestOutput | Exception) -> None:
        """Takes the place of what has not been read."""
        self._newest = newest
        if isinstance(newest, Exception):
            self._trace = newest.__traceback__
        self._ready.set()

    async def get(self) -> RequestOutput:
        """Waits for something new. Raises: what ended the request, if that was an exception."""
        await self._ready.wait()
        self._ready.clear()
        if isinstance(self._newest, Exception):
            self.is_ended = True
            # Several streams may raise this one exception: each with the engine's trace, not with
            # those of the others.
            raise self._newest.with_traceback(self._trace)
        self.is_ended = self._newest.finished
        return self._newest


@dataclass(slots=True, eq=False)
class _Live:
    """Is the engine's end of a request, from being accepted to its end; `error` if that was an
    exception.
    """

    stream: Stream
    submission: Submission
    outbox: _Outbox
    error: Exception | None = None

    @property
    def is_wanted(self) -> bool:
        """Tells whether anybody takes what there is now: some want the last output only."""
        kind = self.submission.samples[0].params.output_kind
        is_last = self.submission.is_finished
        return is_last if kind is RequestOutputKind.FINAL_ONLY else self.submission.is_scored

    @property
    def is_aborted(self) -> bool:
        """Tells whether the engine has ended any of it; a grammar that does says why."""
        return any(
            request.finish_reason == "abort" and request.output.stop_reason is None
            for request in self.submission.samples
        )

    def news(self) -> RequestOutput | Exception:
        """Returns a state that the engine does not change any more: another thread will read it."""
        if self.error is not None:
            return self.error
        output = self.submission.output()
        scored, times = output.prompt_logprobs, output.metrics
        output.prompt_logprobs = None if scored is None else list(scored)
        output.metrics = None if times is None else replace(times)
        return output


class _Outbox:
    """Collects what has changed for the streams of one event loop.

    One delivery at a time is on its way there, for all streams together; what changes until it has
    arrived is merged into the next. So a loop that is slow or stuck costs neither memory nor work.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, post: Callable[[Callable[[], None]], None]
    ) -> None:
        self.live: set[_Live] = set()
        self.changed: dict[_Live, None] = {}
        self._loop = loop
        self._post = post
        self._is_ready = True

    def send(self, *, last: bool = False) -> None:
        """Sends what has changed, unless something is on its way. `last`: also then."""
        if self.changed and (self._is_ready or last):
            news = [(live.stream, live.news()) for live in self.changed]
            try:
                self._loop.call_soon_threadsafe(self._deliver, news)
            except RuntimeError:
                if not self._loop.is_closed():
                    raise
            self.changed.clear()
            self._is_ready = False

    def _deliver(self, news: list[tuple[Stream, RequestOutput | Exception]]) -> None:
        """Runs in the event loop's thread."""
        for stream, newest in news:
            stream.put(newest)
        self._post(self._arrived)

    def _arrived(self) -> None:
        self._is_ready = True


class EngineThread:
    """Is the thread that has the engine, and the tokenizer with it: neither is for two threads at a
    time. `AsyncLLM` makes tokens of prompts with a tokenizer of its own, in a thread of its own.
    Only what looks at an `AsyncSession` without awaiting takes the engine's lock elsewhere, and
    waits there for the end of a step.

    Others hand it commands through one queue, on which it waits when there is nothing else to do;
    what comes back goes through futures and outboxes. The first group of methods is for other
    threads, all else runs in this one.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._engine = llm._front
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # A daemon, because Python waits for other threads before it calls what is registered for
        # its exit.
        self._thread = threading.Thread(target=self._run, name="jaxkv-engine", daemon=True)
        self._is_ended = False
        self._cause: BaseException | None = None
        self._began_s: float | None = None
        """When the step began that runs."""
        self._is_stopping = False
        self._tokenizer: Any = None
        self._live: dict[str, _Live] = {}
        self._failed_for_nobody = False
        self._live_of: dict[Request, _Live] = {}
        self._outboxes: dict[asyncio.AbstractEventLoop, _Outbox] = {}

    # --- for other threads

    def start(self) -> None:
        self._thread.start()
        _STARTED.add(self._thread)

    def post(self, command: Callable[[], None]) -> None:
        """Has the command run between two steps, or never if the thread ends before. Safe in a
        finalizer.
        """
        self._commands.put(command)

    async def ask(self, function: Callable[[], T]) -> T:
        """Calls the function between two steps and returns what it does.

        Raises: EngineDeadError, and what the function raises.
        """
        call = _Call(function)
        self.post(call)
        # Asked afterwards: either the thread finds the call when it clears the queue at its end, or
        # this sees the end.
        self.check()
        return await asyncio.wrap_future(call.reply)

    def check(self) -> None:
        """Raises EngineDeadError once the thread has ended, RuntimeError where a fork has none."""
        check_process()
        if self._is_ended:
            raise _dead(self._cause)

    def check_step(self) -> None:
        """Raises TimeoutError while a step runs for longer than `STUCK_S`."""
        began_s = self._began_s
        if began_s is not None and (passed_s := time.monotonic() - began_s) > STUCK_S:
            raise TimeoutError(
                f"expected a step of the engine to end within {STUCK_S:.0f} s, got one that has "
                f"run for {passed_s:.0f} s: start the process again if it does not end"
            )

    def stop(self) -> None:
        self.post(self._stop)

    def shutdown(self) -> None:
        """Ends the thread, and then the engine. In a fork, which has neither, it does nothing: it
        is called there too when the process ends.
        """
        if is_forked():
            return
        self.stop()
        self._thread.join()
        self._llm.shutdown()

    # --- commands

    def add(
        self,
        stream: Stream,
        loop: asyncio.AbstractEventLoop,
        prompt: Prompt | Conversation,
        params: SamplingParams | None,
        priority: int,
        lora_request: LoRARequest | None,
    ) -> None:
        """Adds a request. Raises: ValueError if it is refused."""
        self._check_not_stopping()
        if stream.id in self._live:
            raise ValueError(f"request_id: expected one that is not in use, got {stream.id!r}")
        accepted = self._llm._accept_or_refuse((prompt, params, lora_request), priority)
        if isinstance(accepted, ValueError):
            raise accepted
        self._begin(stream, loop, accepted)
        if stream.is_aborted:
            self.abort([stream.id])

    def add_pooling(
        self,
        streams: list[Stream],
        loop: asyncio.AbstractEventLoop,
        call: PoolingCall[T],
        lora_request: Any,
    ) -> list[Submission]:
        """Adds the prompts of a call, and a stream for each of them to `streams`. Raises:
        ValueError if one is refused, and then adds none.
        """
        self._check_not_stopping()
        submissions = self._llm._accept_pooling(call, lora_request)
        for submission in submissions:
            streams.append(Stream(uuid.uuid4().hex))
            self._begin(streams[-1], loop, submission)
        return submissions

    def _check_not_stopping(self) -> None:
        if self._is_stopping:
            raise _dead(None)

    def _begin(self, stream: Stream, loop: asyncio.AbstractEventLoop, accepted: Submission) -> None:
        outbox = self._outboxes.get(loop)
        if outbox is None:
            outbox = self._outboxes[loop] = _Outbox(loop, self.post)
        live = _Live(stream, replace(accepted, id=stream.id), outbox)
        self._engine.add(live.submission)
        outbox.live.add(live)
        self._live[stream.id] = live
        self._live_of |= dict.fromkeys(live.submission.samples, live)

    def abort(self, ids: Collection[str]) -> None:
        """Ends the requests with a last output. ids: each once."""
        for live in [self._live[one] for one in ids if one in self._live]:
            self._engine.abort(live.submission)
            self._note(live)

    def close(self, stream: Stream) -> None:
        """Ends the request of a stream that nobody reads any more; having ended is no error."""
        live = self._live.get(stream.id)
        # Another request may have the id by now.
        if live is not None and live.stream is stream:
            self._engine.abort(live.submission)
            self._forget(live)
            live.outbox.changed.pop(live, None)

    def close_all(self, streams: Iterable[Stream]) -> None:
        """Does what `close` does with each."""
        for stream in streams:
            self.close(stream)

    def copied_tokenizer(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = copy.deepcopy(self._llm.get_tokenizer())
        return self._tokenizer

    def _stop(self) -> None:
        self._is_stopping = True
        self.abort(list(self._live))

    # --- the thread

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._end(sys.exception())

    def _serve(self) -> None:
        while self._engine.has_work or not self._is_stopping:
            self._obey()
            if not self._is_stopping:
                self._engine.check_alive()  # a command may have ended one of several processes
            if self._engine.has_work:
                self._step()
            self._send()

    def _obey(self) -> None:
        """Does what it was told so far. Waits if there is nothing else to do."""
        must_wait = not self._engine.has_work
        # What comes meanwhile waits for the next step, or those who ask without end would stop all
        # others.
        for _ in range(max(must_wait, self._commands.qsize())):
            self._commands.get()()

    def _step(self) -> None:
        got: list[Request] = []
        self._began_s = time.monotonic()
        with Catch() as caught:
            got = self._engine.step()
        self._began_s = None
        for request in got:
            if (live := self._live_of.get(request)) is not None and live.is_wanted:
                self._note(live)
        if caught.error is None:
            self._failed_for_nobody = False
        else:
            self._fail(caught.error)
        if self._live and not self._engine.has_work:
            raise RuntimeError(f"{len(self._live)} requests left the engine without a result")

    def _fail(self, error: Exception) -> None:
        """Gives an exception of a step to the requests that the engine has ended for it; the others
        go on.
        """
        concerned = [live for live in self._live.values() if live.is_aborted]
        if not concerned:
            if self._failed_for_nobody:
                # It would be raised again and again, and nobody would know.
                raise error
            # Those whose step it was may have gone meanwhile.
            self._failed_for_nobody = True
            LOG.warning("a step failed that concerns no request any more: %r", error)
        for live in concerned:
            live.error = error
            self._engine.abort(live.submission)
            self._note(live)
        for live in [live for live in self._live.values() if live.submission.is_finished]:
            self._note(live)
        with Catch() as dead:
            self._engine.check_alive()
        if dead.error is not None:  # one of several processes does not go on
            raise dead.error from error

    def _note(self, live: _Live) -> None:
        """Notes that there is something new to send."""
        live.outbox.changed[live] = None
        if live.error is not None or live.submission.is_finished:
            self._forget(live)

    def _forget(self, live: _Live) -> None:
        live.outbox.live.remove(live)
        del self._live[live.stream.id]
        for request in live.submission.samples:
            del self._live_of[request]

    def _send(self) -> None:
        for loop, outbox in list(self._outboxes.items()):
            if loop.is_closed():
                for live in list(outbox.live):
                    self.close(live.stream)
                outbox.changed.clear()
            outbox.send()
            if not outbox.live and not outbox.changed:
                del self._outboxes[loop]

    def _end(self, cause: BaseException | None) -> None:
        """Tells everybody who waits, or comes later, and lets `cause` go on to
        `threading.excepthook`.
        """
        for outbox in self._outboxes.values():
            # Also what ended and was not sent yet: to make an output may be what failed.
            outbox.changed |= dict.fromkeys(outbox.live)
            for live in outbox.changed if cause is not None else ():
                live.error = _dead(cause)
        self._cause = cause
        self._is_ended = True
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, _Call):
                command.refuse(_dead(cause))
        for outbox in self._outboxes.values():
            outbox.send(last=True)


_STARTED: WeakSet[threading.Thread] = WeakSet()


def _join_all() -> None:
    """Waits for threads whose engines were forgotten just now: they have been told to stop, and
    Python must not end under one that gives its engine's memory back.
    """
    for thread in list(_STARTED):
        thread.join()


# What is registered last is called first: JAX has registered when it was imported, and each engine
# that is not forgotten registers when it is made.
atexit.register(_join_all)
