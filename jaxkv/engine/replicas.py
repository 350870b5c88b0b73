"""Divides requests between equal engines, each with all weights and a KV cache on devices of its
own (data parallelism).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from threading import RLock

from jaxkv.engine.engine import UNDER_WAY, Engine
from jaxkv.engine.metrics import Metric
from jaxkv.engine.scheduler import STEP_COST
from jaxkv.requests.request import Request, Submission
from jaxkv.weights.tree import Weights

POLL_S = 0.0002
"""How long to wait before engines are asked again whether one of them is done: none can be waited
for alone, as another one may be done before it.
"""


class Replicas:
    """Stands in front of engines that share a lock and know nothing of each other, as one: what
    runs requests talks to it as to an `Engine`.

    A submission goes to the engine that has the least to compute before it, with what that has to
    compute of its prompt: one that has its beginning in the prefix cache is preferred, unless
    others have much less to do. It stays there, with all of its samples. One thread takes the steps
    of all engines, each when the device is done with what it had, so that none waits for another.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = tuple(engines)
        self._owed = [0] * len(self._engines)
        """Tokens that each engine has to compute before what comes next, as of its last step."""
        self._turns = list(range(len(self._engines)))
        """The engines, the one first that has taken no step for longest."""
        self._is_mixed = False
        """The engines may have different weights: some have got new ones."""

    @property
    def lock(self) -> RLock:
        return self._engines[0].lock

    @property
    def num_rows(self) -> int:
        return sum(engine.num_rows for engine in self._engines)

    @property
    def has_work(self) -> bool:
        return any(engine.has_work for engine in self._engines)

    def add(self, submission: Submission) -> None:
        """Queues what `Intake` made on one of the engines. Raises: ValueError while one sleeps, or
        after an update of weights that was cut off.
        """
        request = submission.samples[0]
        with self.lock:
            for engine in self._engines:
                engine.check_awake()
            if self._is_mixed:
                raise ValueError(
                    "expected engines of equal weights, got an update_weights that was cut off: "
                    "call it again"
                )
            owed = [
                num if engine.has_work else 0
                for engine, num in zip(self._engines, self._owed, strict=True)
            ]
            found = [engine.num_cached(request) for engine in self._engines]
            costs = [num - cached for num, cached in zip(owed, found, strict=True)]
            one = costs.index(min(costs))
            self._engines[one].add(submission)
            new = request.prompt_len - found[one] + STEP_COST * len(submission.samples)
            self._owed[one] = owed[one] + new

    def abort(self, submission: Submission) -> None:
        """Ends what is left of it, as `Engine.abort` does."""
        for engine in self._engines:
            engine.abort(submission)

    def step(self) -> list[Request]:
        """Takes a step of an engine whose devices are done. Returns the requests that got tokens.

        Raises: as `Engine.step`.
        """
        with self.lock:
            one = self._next()
            try:
                return self._engines[one].step()
            finally:
                self._owed[one] = self._engines[one].num_owed

    def _next(self) -> int:
        """Waits for the first engine that has something to do and is done with what it had: of
        several the one that has waited longest, which comes last the next time. Returns any where
        nothing is left to do: the garbage collector may end the last request meanwhile.
        """
        while self.has_work:
            for one in self._turns:
                engine = self._engines[one]
                if engine.has_work and engine.is_ready:
                    self._turns = [*(other for other in self._turns if other != one), one]
                    return one
            time.sleep(POLL_S)
        return self._turns[0]

    def forget(self) -> None:
        """Makes nothing that is computed so far be found again in the prefix caches."""
        for engine in self._engines:
            engine.forget()

    def replace_weights(self, *weights: Weights, secret: bytes) -> None:
        """Does what `Engine.replace_weights` does, each engine with weights on its devices. Where
        it is cut off no requests are taken before it was done again.
        """
        with self.lock:
            self.check_alive()
            self._is_mixed = True
            for engine, own in zip(self._engines, weights, strict=True):
                engine.replace_weights(own, secret=secret)
            self._is_mixed = False

    @property
    def is_asleep(self) -> bool:
        return any(engine.is_asleep for engine in self._engines)

    def check_alive(self) -> None:
        """Does what `Engine.check_alive` does."""
        self._engines[0].check_alive()

    def sleep(self, *, keeps_weights: bool) -> None:
        """Does what `Engine.sleep` does, on all engines or, if one refuses, on none."""
        with self.lock:
            self.check_alive()
            if self.has_work:
                raise ValueError(UNDER_WAY)
            for engine in self._engines:
                engine.sleep(keeps_weights=keeps_weights)

    def wake_up(self, what: Collection[str]) -> None:
        """Does what `Engine.wake_up` does, on all engines."""
        with self.lock:
            for engine in self._engines:
                engine.wake_up(what)

    def end(self) -> None:
        """Ends every request, and takes no more."""
        with self.lock:
            for engine in self._engines:
                engine.end()

    def metrics(self) -> list[Metric]:
        """Returns those of each engine with its number as a label, as vLLM has them; those of one
        name stand together, as Prometheus reads them.
        """
        found: dict[str, list[Metric]] = {}
        for number, engine in enumerate(self._engines):
            for metric in engine.metrics():
                labels = {"engine": str(number), **metric.labels}
                found.setdefault(metric.name, []).append(replace(metric, labels=labels))
        return [metric for metrics in found.values() for metric in metrics]

    def check(self) -> None:
        """Raises RuntimeError if pages, rows and requests of an engine do not add up."""
        for engine in self._engines:
            engine.check()
