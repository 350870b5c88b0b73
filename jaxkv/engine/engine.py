"""The engine: schedules requests, runs the compiled steps, and has their results read."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from threading import RLock
from typing import Any, TypeVar

import jax
import numpy as np

from jaxkv.config import EngineConfig
from jaxkv.engine.host_moves import HostMoves
from jaxkv.engine.metrics import Gauge, Metric, Recorder, engine_metrics
from jaxkv.engine.pages import is_computed, measure_pages, move_pages, slot_nbytes
from jaxkv.engine.plan import LoopPlan, StepPlan
from jaxkv.engine.results import Flight, Observed, Results
from jaxkv.engine.rows import RowTables
from jaxkv.engine.scheduler import STEP_COST, Scheduler
from jaxkv.engine.speculation import Speculator
from jaxkv.errors import EngineDeadError
from jaxkv.holding.hold import Hold
from jaxkv.holding.pins import Pins
from jaxkv.holding.tiers import Tiers
from jaxkv.kv.state import PagedKV, Statistics
from jaxkv.models.decoder import body_of, head_of
from jaxkv.ops.sampling import NO_TOKEN
from jaxkv.processes import kept_in_host, put_back
from jaxkv.programs.buckets import fit_bucket
from jaxkv.programs.compiled import Programs
from jaxkv.programs.pool import norm_of
from jaxkv.programs.process import check_process, is_forked
from jaxkv.programs.step import Newest
from jaxkv.requests.request import Request, Submission
from jaxkv.weights.tree import Weights, with_adapters, with_draft

T = TypeVar("T")

WEIGHTS, PAGES = "weights", "kv_cache"
"""`sleep` takes these off the device; the names are vLLM's."""

ENDED = "the engine has been shut down"

UNDER_WAY = "sleep: expected no requests under way: wait for them, or abort them"


class Engine:
    """Owns the KV state and everything mutable around it. Threads take turns at steps (`lock`).

    What a step sampled is read when the next one is on its way, so that the device does not wait
    for the host. The next one begins with tokens that only the device knows
    (`programs.step.Newest`), as if no request ended with them; what it computes for one that did is
    dropped.

    `make_kv` makes an empty KV state again should an interrupt destroy it half way, `make_adapters`
    the room for adapters (`weights.adapters.empty_adapters`). `draft`: the weights of a draft
    model, {} for none.
    `decode_token` names single tokens in logprobs (None without a tokenizer). lock: the one that
    engines share which take turns too.
    """

    def __init__(
        self,
        weights: Weights,
        kv: PagedKV,
        programs: Programs,
        config: EngineConfig,
        *,
        make_kv: Callable[[], PagedKV],
        decode_token: Callable[[int], str] | None,
        tiers: Tiers | None = None,
        adapters: Weights | None = None,
        make_adapters: Callable[[], Weights] = dict,
        draft: Weights | None = None,
        lock: RLock | None = None,
    ) -> None:
        # Reentrant: the garbage collector may abort a stream within a step.
        self._lock = RLock() if lock is None else lock
        self.weights = weights
        self.adapters: Weights = {} if adapters is None else adapters
        self._make_adapters = make_adapters
        self.draft: Weights = {} if draft is None else draft
        self.programs = programs
        self.scheduler = Scheduler(config, tiers)
        self.kv = kv
        self._moves = None if tiers is None else HostMoves(tiers, kv)
        self._make_kv = make_kv
        self._newest_R = _no_tokens(config)
        self._flight: Flight | None = None
        self._rows = RowTables(
            config, programs.spec.vocab_size, programs.placement, self.scheduler.adapters
        )
        speculation = config.speculation
        self._speculator = None if speculation is None else Speculator(programs, speculation)
        self._requests: set[Request] = set()
        self._watching: set[Request] = set()
        """Requests that may need all tokens before the next is sampled; some may be gone since the
        last step.
        """
        self._recorder = Recorder()
        self.results = Results(
            self.scheduler, self._requests, self._recorder, decode_token=decode_token
        )
        self._failed = self._is_ended = False
        self._away: frozenset[str] = frozenset()
        """These are off the device until `wake_up`."""
        self._kept: Any = None
        """The weights in host memory meanwhile, if they are kept."""
        self._kept_draft: Any = None
        """The draft model's weights in host memory meanwhile, which nobody else brings back."""
        self.secret = b""
        """Page keys are made with this since the weights were replaced: by `Intake`, which reads it
        here, and so by all or none.
        """
        self._is_changing = False
        """Bookkeeping may be half done: set before every change of it, taken back behind it."""
        self._is_under_way = False
        """A change is further up in this thread's calls: aborts wait for its end."""
        self._aborted: list[Request] = []
        self.pins = Pins()
        self.watchers: list[Callable[[Scheduler], None]] = []
        """Are shown the scheduler when a step has been launched."""
        self._touched: list[Flight | StepPlan | LoopPlan] = []
        """Those whose requests' tokens, text and pages may disagree if the step does not end."""

    @property
    def lock(self) -> RLock:
        """Returns the lock. Raises: RuntimeError in a fork of the process that made the engine,
        where nobody may be left to give it up.
        """
        check_process()
        return self._lock

    @property
    def _adapted(self) -> Weights:
        """Returns the weights with the adapters on the device and those of the draft model."""
        return with_draft(with_adapters(self.weights, self.adapters), self.draft)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def num_rows(self) -> int:
        """Counts the requests that may run at once."""
        return self.scheduler.config.max_num_seqs

    @property
    def is_ready(self) -> bool:
        """Tells whether what was launched last is done: a step launches the next thing at once and
        waits for nothing.
        """
        return self._flight is None or self._flight.is_done

    def wait(self) -> None:
        """Waits for what is launched, if anything is."""
        if self._flight is not None:
            jax.block_until_ready((self.kv, self._newest_R, self._flight.results))

    @property
    def num_owed(self) -> int:
        """Counts the tokens that its requests have still to compute before their next ones, and
        `STEP_COST` for each of them, which take part in later steps too.
        """
        pending = sum(request.num_pending for request in self._requests)
        return pending + STEP_COST * len(self._requests)

    def num_cached(self, request: Request) -> int:
        """Counts the first tokens of a request, not added yet, that the prefix cache has."""
        scheduler, hold = self.scheduler, Hold(request.hold.chain, request.prompt_len)
        most = min(scheduler.most_cached(request), request.prompt_len - 1)

        def look() -> int:
            hold.begin(scheduler.allocators)
            found = hold.take_cached(request.tokens, most)
            hold.release()
            return found

        return self.change(look)

    def add(self, submission: Submission) -> None:
        """Queues what `Intake` made, but for requests that are there already. Raises: ValueError
        while it sleeps.
        """
        with self.lock:
            self.check_awake()
            self.change(partial(self._add, submission))

    def _add(self, submission: Submission) -> None:
        for request in submission.samples:
            if request in self._requests:
                continue
            self._renew(request)
            self._requests.add(request)
            if request.may_need_tokens:
                self._watching.add(request)
            self._recorder.added(request)
            self.scheduler.add(request)

    def end(self) -> None:
        """Ends every request, and takes no more."""
        with self.lock:
            self._is_ended = True
            self.change(lambda: self._abort([*self._requests]))
            self._flight = self._kept = self._kept_draft = None
            self.change(self.leave_disk)

    def abort(self, submission: Submission) -> None:
        """Ends what is left of it (finish_reason "abort") and frees what that holds; having
        finished is no error.

        During a step, where the garbage collector may close a forgotten stream, it waits for the
        step's end. In a fork of the process that made the engine there is nothing to end.
        """
        if is_forked():
            return
        with self.lock:
            if self._is_under_way:
                self._aborted += submission.samples
            else:
                self.change(partial(self._abort, submission.samples))

    def _abort(self, requests: Sequence[Request]) -> None:
        """Ends these requests, a beam with all of its search."""
        for request in requests:
            for one in request.beams or (request,):
                if one in self._requests:
                    self._requests.remove(one)
                    one.finish_reason = "abort"
                    self._recorder.ended(one)
                    self.scheduler.remove(one)

    def forget(self) -> None:
        """Makes nothing that is computed so far be found again in the prefix cache."""
        with self.lock:
            self.check_alive()
            self.change(self._forget)

    def _forget(self) -> None:
        self.scheduler.forget()
        if self._moves is not None:
            self._moves.forget()

    def replace_weights(self, weights: Weights, *, secret: bytes) -> None:
        """Computes with these weights, of the same shapes, from the next step on. What was cached
        is not found again, and requests go on with the tokens that they have, computed anew.

        secret: of page keys that stand for these weights.
        """
        with self.lock:
            self.check_alive()
            self.change(partial(self._replace_weights, weights, secret))

    def _replace_weights(self, weights: Weights, secret: bytes) -> None:
        self.scheduler.start_over()
        self._forget()
        self.secret = secret
        for request in self._requests:
            self._renew(request)
        self.weights = weights
        self._restore_lost_adapters()
        self._restore_draft()
        self._away -= {WEIGHTS}
        self._kept = None

    def _renew(self, request: Request) -> None:
        """Gives a request other page keys that was accepted before the weights were replaced: its
        own stand for those that are no more, in what is on a disk too.
        """
        if self.secret not in (b"", request.hold.chain.secret):
            request.hold.chain = request.hold.chain.renewed(self.secret)

    @property
    def is_asleep(self) -> bool:
        return bool(self._away)

    def check_alive(self) -> None:
        """Raises EngineDeadError after `end`, RuntimeError in a fork of the process that made
        it.
        """
        check_process()
        if self._is_ended:
            raise EngineDeadError(ENDED)

    def check_awake(self) -> None:
        """Raises ValueError while it sleeps, and what `check_alive` raises."""
        self.check_alive()
        if self._away:
            away = ", ".join(sorted(self._away))
            raise ValueError(
                f"expected an engine that is awake, got one without its {away} on the device: call "
                f"wake_up() first"
            )

    def sleep(self, *, keeps_weights: bool) -> None:
        """Gives the device's memory back but for programs: that of the pages, with what is cached
        in them, and of the weights, which host memory gets if they are kept.

        Raises: ValueError with requests under way.
        """
        with self.lock:
            self.check_tired()
            self.change(partial(self._sleep, keeps_weights))

    def check_tired(self) -> None:
        """Raises: ValueError with requests under way."""
        self.check_alive()
        if self.has_work:
            raise ValueError(UNDER_WAY)

    def _sleep(self, keeps_weights: bool) -> None:
        self._flight = None
        self._keep_all()
        if self._moves is not None:
            self._moves.settle()  # what was copied out is on the device until then
        if self._speculator is not None:
            self._speculator.start_again()
        self.scheduler.start_over()
        if not keeps_weights:
            self._kept = None
        elif WEIGHTS not in self._away:
            self._kept = jax.tree.map(kept_in_host, self.weights)
        if WEIGHTS not in self._away:
            self._kept_draft = jax.tree.map(kept_in_host, self.draft)
        self._away = frozenset((WEIGHTS, PAGES))
        self.scheduler.adapters.start_again()
        for array in jax.tree.leaves((self.weights, self.draft, self.adapters, self.kv)):
            array.delete()

    def wake_up(self, what: Collection[str]) -> None:
        """Brings this back, pages without anything in them.

        Raises: ValueError where the weights were not kept, and nobody has given others.
        """
        with self.lock:
            self.check_rested(what)
            self.change(partial(self._wake_up, self._away.intersection(what)))

    def check_rested(self, what: Collection[str]) -> None:
        """Raises: ValueError where weights are asked for that were not kept."""
        self.check_alive()
        if WEIGHTS in self._away.intersection(what) and self._kept is None:
            raise ValueError(
                "wake_up: expected update_weights() first: sleep(level=2) has kept no weights"
            )

    def _wake_up(self, what: frozenset[str]) -> None:
        if WEIGHTS in what:
            self.weights = _put_back(self._kept, self.programs.weights)
            self._restore_lost_adapters()
            self._restore_draft()
            self._away -= {WEIGHTS}
            self._kept = None
        if PAGES in what:
            self.kv = self._make_kv()
            self._away -= {PAGES}

    def change(self, change: Callable[[], T]) -> T:
        """Makes a change of requests, rows and pages, and those that were to wait for its end.

        An exception may come between any two lines of it, an interrupt as well as a lack of memory.
        Then all bookkeeping is made anew: at once, or before the next change if that was cut off
        too. So no line has to be safe, no interrupt is held back, and a change costs assignments.
        Raises: RuntimeError in a fork of the process that made the engine.
        """
        with self.lock:
            if self._is_changing:
                self._start_again()
            try:
                try:
                    try:
                        self._is_changing = self._is_under_way = True
                        self.pins.change(self.scheduler.allocators)
                        result = change()
                        while self._aborted:
                            self._abort(self._aborted[:1])
                            del self._aborted[0]
                        self._is_changing = False
                    finally:
                        if self._is_changing:
                            self._start_again()
                finally:
                    self._is_under_way = False
            finally:  # the line above may be the one that is cut off
                self._is_under_way = False
            return result

    def _start_again(self) -> None:
        """Makes bookkeeping anew of the requests that there are: all wait, nothing is cached.

        Ends those whose tokens may disagree with their text. May be cut off itself, and is then
        begun anew.
        """
        lost = {*self._flying, *self._aborted}
        lost |= {one for touched in self._touched for one in touched.requests}
        lost |= {one for one in self._requests if one.finish_reason or lost & {*one.beams}}
        lost |= {one for one in self._requests if not self._requests.issuperset(one.beams)}
        for request in self._requests & lost:
            request.finish_reason = request.finish_reason or "abort"
            self._requests.remove(request)
            self._recorder.ended(request)
        self._flight, self._failed = None, True
        self._watching.clear()
        self._watching.update(one for one in self._requests if one.may_need_tokens)
        self.scheduler.start_again(self._requests)
        self.pins.start_again(self.scheduler.allocators)
        self._rows.start_again()
        if self._speculator is not None:
            self._speculator.start_again()
        self._touched.clear()
        self._aborted.clear()
        self._is_changing = False

    def step(self) -> list[Request]:
        """Launches the next step or decode loop, then reads the one before it.

        Returns the requests that got tokens; finished ones are out already. An exception on the way
        ends the requests of both: their tokens, text and pages may disagree. Where it took the KV
        state with it, the others are computed anew.
        """
        return self.change(self._step)

    def _step(self) -> list[Request]:
        got = self._go_on()
        self._touched.clear()
        if not self._requests:
            self._keep_all()
        return got

    def _go_on(self) -> list[Request]:
        """Launches what is next and reads what was before it, or reads only."""
        got: list[Request] = []
        if self._flight is not None:
            self._touched.append(self._flight)
        self._restore_lost_kv()
        if self._flight is not None and self.programs.is_compiling:
            # The next program may take seconds to come: nobody waits so long for tokens that are
            # there.
            got, self._flight = self.results.read(self._flight), None
            return got
        if self._watching:
            busy = self._watching.intersection(self._flying + self.scheduler.running)
            if any(request.needs_tokens for request in busy):
                got, self._flight = self.results.read(self._flight), None
            self._watching &= self._requests
        if self._moves is not None:
            self._moves.settle()
        if self.scheduler.needs_results or (
            self._speculator is not None and self._speculator.needs_results(self.scheduler.running)
        ):
            got, self._flight = got + self.results.read(self._flight), None
        plan, before = self.scheduler.plan(), self._flight
        if plan is None:
            if before is None and self.scheduler.is_loading and self.scheduler.tiers is not None:
                self.scheduler.tiers.wait()  # there is nothing else to do
            self._flight = None
        else:
            self._touched.append(plan)
            self._flight = self._launch(plan)
            for watch in self.watchers:
                watch(self.scheduler)
        return got + self.results.read(before)

    def _keep_all(self) -> None:
        """Has everything on its way to the disk that is listed: the next step may never come."""
        tiers = self.scheduler.tiers
        if self._moves is not None and tiers is not None and tiers.disk is not None:
            self.move_pages_aside()
            self._moves.settle()

    def leave_disk(self) -> None:
        """Writes what waits for a disk, and lets others have its directory. Within a change."""
        self._keep_all()
        if self.scheduler.tiers is not None:
            self.scheduler.tiers.close()

    @property
    def _flying(self) -> list[Request]:
        """Requests that have tokens coming."""
        return [] if self._flight is None else self._flight.requests

    def metrics(self, *, num_coming: int = 0) -> list[Metric]:
        """Returns what there is to watch now, under vLLM's names without its prefix. num_coming:
        requests that wait to be added.

        Takes no lock, as a step may be stuck: it only reads, and copies a dict that a step makes
        longer before it goes through it.
        """
        num_tables, speculator = len(self.scheduler.config.windows), self._speculator
        return [
            *engine_metrics(
                self.scheduler,
                self.kv,
                self.programs,
                num_requests=len(self._requests),
                num_coming=num_coming,
            ),
            *self._recorder.metrics(),
            *([] if speculator is None else speculator.metrics()),
            Gauge(
                "kv_cache_bytes_per_token",
                "Bytes of pages per token that they hold, mean over steps.",
                self._recorder.bytes_per_token(*slot_nbytes(self.kv), num_tables),
            ),
        ]

    def check(self) -> None:
        """Raises RuntimeError if pages, rows and requests do not add up, after what was cut off and
        could not be mended yet is.
        """
        if not self._is_under_way:
            self.change(lambda: None)
        self.scheduler.check()
        self.pins.check(self.scheduler.allocators)
        self._rows.check(self.scheduler.running)
        known = {*self.scheduler.waiting, *self.scheduler.running}
        leaving = {request for request in self._flying if request.is_leaving}
        if known | (leaving & self._requests) != self._requests or known & leaving:
            raise RuntimeError("scheduler and engine disagree about which requests exist")

    def _launch(self, plan: StepPlan | LoopPlan) -> Flight:
        requests = plan.requests
        self._recorder.begun(requests)
        self.move_pages_aside()
        for slot, adapter in self.scheduler.adapters.take_loads():
            write = self.programs.write_adapter()
            self.adapters = write(self.adapters, adapter.arrays, np.int32(slot))
        if plan.demotions or plan.copies or plan.state_copies:
            self._move_pages(plan)
        return (
            self._launch_loop(plan, requests)
            if isinstance(plan, LoopPlan)
            else self._launch_step(plan, requests)
        )

    def move_pages_aside(self) -> None:
        """Copies listed and evicted pages to host memory, where a tier keeps some, and those back
        that are found in one: before anything writes or reads pages that were taken.
        """
        if self._moves is not None:
            listed, evicted, loads = self.scheduler.take_moves()
            self._moves.out(self.kv, listed, is_leaving=False)
            self._moves.out(self.kv, evicted, is_leaving=True)
            self.kv = self._moves.back(self.kv, loads)

    def _move_pages(self, plan: StepPlan | LoopPlan) -> None:
        self.kv = move_pages(self.programs, self.kv, plan)
        self.scheduler.copied()

    def _launch_step(self, plan: StepPlan, requests: list[Request]) -> Flight:
        """Launches a step, and behind it the draw, or what takes vectors of a model that pools."""
        num_tokens = sum(count for _, count in plan.work)
        size = fit_bucket(self.programs.token_buckets, num_tokens)
        num_rows = self.programs.num_step_rows(size)
        pools = bool(self.scheduler.config.pooled)
        # First what is behind: should both be missing, the thread behind begins with the step.
        num_drawn = fit_bucket(self.programs.drawn_rows, len(requests))
        behind = self.programs.pool(size) if pools else self.programs.draw(num_drawn)
        program = self.programs.step(size)
        batch = self._rows.batch(plan.work, size, num_rows)
        row_B, position_B = self._rows.places(requests, num_rows)
        kv = self._rows.bind(self.kv, requests, row_B, position_B)
        newest = Newest(self._newest_R, row_B)
        start_s = time.monotonic()
        self.kv, last, hidden_TD, found = program(body_of(self._adapted), kv, newest, batch)
        sampled = scores = pooled_BD = None
        if pools:
            pooled_BD = behind(norm_of(self.weights), hidden_TD, batch)
        else:
            # Launched behind the step: the device has it in its queue before the step is done.
            head = head_of(self.weights)
            row_B, _ = self._rows.places(requests, num_drawn)
            newest = Newest(self._newest_R, row_B)
            sampling = self._rows.sampling_for(requests, row_B)
            newest, sampled = behind(head, last, newest, sampling)
            self._newest_R = newest.token_R
            target_T = np.asarray(batch.target_T)
            if (target_T != NO_TOKEN).any():
                scores = self.programs.scores(size)(head, hidden_TD, target_T)
        self._recorder.step(num_tokens, size)
        rows = self.scheduler.launched(plan)
        # What a chunk fills is held, what a loop may fill is not yet.
        self._recorder.pages(self.scheduler.running, self.scheduler.allocators)
        return Flight(
            rows,
            sampled,
            num_rows,
            start_s,
            self._observed(plan, requests, found),
            batch,
            scores,
            num_tokens=size,
            pooled_BD=pooled_BD,
        )

    def _launch_loop(self, plan: LoopPlan, requests: list[Request]) -> Flight:
        num_rows = fit_bucket(self.programs.row_buckets, len(requests))
        speculator, note, found = self._speculator, None, None
        if speculator is not None and not speculator.wants(requests):
            speculator = None
        program = (self.programs.loop if speculator is None else self.programs.speculate)(num_rows)
        row_B, position_B = self._rows.places(requests, num_rows)
        rows = self._rows.decode_rows(plan.work, position_B)
        kv = self._rows.bind(self.kv, requests, row_B, position_B)
        newest = Newest(self._newest_R, row_B)
        sampling = self._rows.sampling_for(requests, row_B)
        start_s = time.monotonic()
        if speculator is None:
            self.kv, newest, _, sampled, found = program(
                self._adapted, kv, newest, rows, sampling, np.int32(plan.num_steps)
            )
        else:
            text_RN = speculator.take_text(requests)
            self.kv, newest, text_RN, sampled, drafts = program(
                self._adapted, kv, newest, text_RN, rows, sampling
            )
            speculator.keep_text(text_RN, plan.work)
            note = speculator.reader(requests, drafts)
        self._newest_R = newest.token_R
        self._recorder.pages(self.scheduler.running, self.scheduler.allocators)
        coming = self.scheduler.launched(plan)
        observed = self._observed(plan, requests, found)
        return Flight(coming, sampled, num_rows, start_s, observed, note_drafts=note)

    def _observed(
        self, plan: StepPlan | LoopPlan, requests: list[Request], found: Statistics | None
    ) -> Observed | None:
        """Takes along what policies will want of the step that was just launched, and launches
        behind it what measures pages.
        """
        measured = [
            (kept, measure_pages(self.programs, self.kv, pages)) for kept, pages in plan.measures
        ]
        if found is None and not measured:
            return None
        return Observed(tuple(request.hold.kept for request in requests), found, measured)

    def _restore_draft(self) -> None:
        """Brings the draft model's weights back from where `sleep` has put them."""
        if WEIGHTS in self._away:
            self.draft = _put_back(self._kept_draft, self.programs.draft_weights)
            self._kept_draft = None

    def _restore_lost_adapters(self) -> None:
        """Makes new empty room for adapters where that was lost; no slot may be in use."""
        leaves = jax.tree.leaves(self.adapters)
        if leaves and not is_computed(leaves):
            for leaf in leaves:
                leaf.delete()
            self.adapters = self._make_adapters()

    def _restore_lost_kv(self) -> None:
        """Makes a new empty pool where a step that failed took the contents of the old one."""
        if self._failed:
            # Whoever had tokens that the host has not read has ended.
            self._newest_R = _no_tokens(self.scheduler.config)
            if not is_computed(self.kv.pools):
                self.scheduler.start_over()
                for pool in self.kv.pools:
                    pool.delete()  # before there is a second one
                self.kv = self._make_kv()
            self._restore_lost_adapters()
        self._failed = False


def _put_back(kept: Weights, like: Weights) -> Weights:
    """Puts weights that host memory has kept on the devices where they were."""
    return jax.tree.map(put_back, kept, like)


def _no_tokens(config: EngineConfig) -> Any:
    return np.full(config.max_num_seqs, NO_TOKEN, np.int32)
