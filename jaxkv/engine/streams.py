"""Loops that take an engine's steps until requests are done."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from jaxkv.engine.engine import Engine
from jaxkv.engine.handover import Handover
from jaxkv.engine.leader import Follower, Leader
from jaxkv.engine.replicas import Replicas
from jaxkv.requests.outputs import RequestOutput
from jaxkv.requests.request import Submission

Front = Engine | Handover | Replicas | Leader | Follower
"""An engine, or what stands in front of several as one."""


def complete(
    engine: Front, arriving: Iterator[tuple[int, Submission | ValueError]]
) -> Generator[tuple[int, Submission | ValueError]]:
    """Runs what arrives and yields it when it has finished, a refusal at once."""
    # As many again as can finish in one step: the scheduler never looks at an empty queue while
    # more are to come.
    window = 2 * engine.num_rows
    taken: dict[int, Submission] = {}
    try:
        while True:
            while len(taken) < window and (arrived := next(arriving, None)) is not None:
                index, submission = arrived
                if isinstance(submission, ValueError):
                    yield index, submission
                else:
                    taken[index] = submission
                    engine.add(submission)
            if not taken:
                return
            # Asked of the requests, not of `step`: a stream that is read between two results takes
            # steps too, and so do other threads.
            with engine.lock:
                # The first sample first, which for thousands at each step costs a fifth.
                finished = [
                    (index, one)
                    for index, one in taken.items()
                    if one.samples[0].finish_reason is not None and one.is_finished
                ]
                if not finished:
                    _step(engine, len(taken))
            for index, one in finished:
                del taken[index]
                yield index, one
    finally:
        # After an error, an interrupt or `close` nothing of this call may stay behind.
        try:
            for submission in taken.values():
                engine.abort(submission)
        finally:
            # An interrupt may come here too; having been ended is no error.
            for submission in taken.values():
                engine.abort(submission)


def _step(engine: Front, num_waiting: int) -> None:
    """Takes a step for so many requests that have not finished. Raises: RuntimeError if the engine
    has none, which would be asked without end.
    """
    if not engine.has_work:
        raise RuntimeError(f"{num_waiting} requests left the engine without a result")
    engine.step()


def stream(engine: Front, submission: Submission) -> Iterator[RequestOutput]:
    """Yields what is new of the submission as it comes; closing the iterator ends it."""
    try:
        engine.add(submission)
        while True:
            with engine.lock:
                new = submission.new_output()
                if new is None:
                    _step(engine, 1)
                    continue
            yield new
            if new.finished:
                return
    finally:
        try:
            engine.abort(submission)
        finally:
            engine.abort(submission)
