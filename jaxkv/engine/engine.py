"""The engine: schedules requests, runs the compiled steps, and turns what they return into tokens
and text.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxkv.config import EngineConfig
from jaxkv.engine.beams import search_on
from jaxkv.engine.metrics import Counter, Gauge, Metric, Recorder
from jaxkv.engine.pages import freed_nbytes, is_computed, move_pages, observe, page_norms
from jaxkv.engine.plan import LoopPlan, Pairs, StepPlan
from jaxkv.engine.rows import RowTables
from jaxkv.engine.scheduler import Scheduler
from jaxkv.holding.hold import Kept
from jaxkv.kv.state import PagedKV, Statistics
from jaxkv.models.decoder import Weights
from jaxkv.ops.attention import Batch
from jaxkv.ops.sampling import NO_TOKEN, Sampled, Scores
from jaxkv.programs.buckets import fit_bucket
from jaxkv.programs.compiled import Programs
from jaxkv.requests.beam import BeamSearch
from jaxkv.requests.outputs import Logprob
from jaxkv.requests.request import Request, Submission


@dataclass(frozen=True, slots=True)
class Observed:
    """Holds what policies want of a step that is on its way.

    `statistics` of each KV group are for what the step's rows had in `kept` when it was launched;
    `norms` were measured behind the step for one hold each.
    """

    kept: tuple[Kept | None, ...]
    statistics: tuple[Statistics, ...]
    norms: list[tuple[Kept, tuple[jax.Array, jax.Array]]]

    def note(self) -> None:
        """Waits for it, and gives every hold its part."""
        for statistics in self.statistics:
            observe(self.kept, statistics)
        for kept, (keys_W, values_W) in self.norms:
            kept.norms = np.asarray(keys_W), np.asarray(values_W)


@dataclass(frozen=True, slots=True)
class Flight:
    """A step or loop on its way: its requests, each with the tokens that come to it, and what the
    device will return.

    `batch` and `scores` are those of a step. A request that has ended meanwhile takes nothing from
    it.
    """

    rows: list[tuple[Request, int]]
    sampled: Sampled
    num_padded_rows: int
    observed: Observed | None
    batch: Batch | None = None
    scores: Scores | None = None


class Engine:
    """Owns the KV state and everything mutable around it. One thread at a time.

    What a step sampled is read when the next one is on its way, so that the device does not wait
    for the host. The next one begins with tokens that only the device knows
    (`programs.step.Newest`), as if no request ended with them; what it computes for one that did is
    dropped.

    `make_kv` makes an empty KV state again should an interrupt destroy it half way.
    `decode_token` names single tokens in logprobs (None without a tokenizer).
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
    ) -> None:
        self.weights = weights
        self.programs = programs
        self.scheduler = Scheduler(config)
        self.kv = kv
        self._make_kv = make_kv
        self._newest_R = _no_tokens(config)
        self._flight: Flight | None = None
        self._rows = RowTables(config, programs.spec.vocab_size, programs.placement)
        self._requests: set[Request] = set()
        self._watching: set[Request] = set()
        """Requests that need all tokens before the next is sampled; some may be gone since the last
        step.
        """
        self._decode_token = decode_token
        self._recorder = Recorder()
        self._stepping = False
        self._failed = False
        self._aborted: list[Request] = []

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(self, submission: Submission) -> None:
        """Queues what `Intake` made."""
        for request in submission.samples:
            self._requests.add(request)
            if request.needs_tokens:
                self._watching.add(request)
            self._recorder.added(request)
            self.scheduler.add(request)

    def abort(self, submission: Submission) -> None:
        """Ends what is left of it (finish_reason "abort") and frees what that holds; having
        finished is no error.

        During a step, where the garbage collector may close a forgotten stream, it waits for the
        step's end.
        """
        for request in submission.samples:
            self._abort(request)

    def _abort(self, request: Request) -> None:
        """Ends the request, a beam with all of its search."""
        if self._stepping:
            self._aborted.append(request)
            return
        for one in request.beams or (request,):
            if one in self._requests:
                self._requests.remove(one)
                one.finish_reason = "abort"
                self._recorder.ended(one)
                self.scheduler.remove(one)

    def step(self) -> list[Request]:
        """Launches the next step or decode loop, then reads the one before it.

        Returns the requests that got tokens; finished ones are out already. An exception on the way
        ends the requests
        of both: their tokens, text and pages may disagree. Where it took the KV state with it, the
        others are computed anew.
        """
        self._stepping, under_way, requests, is_done = True, self._flight, [], False
        try:
            self._restore_lost_kv()
            got = []
            if self._watching:
                if not self._watching.isdisjoint(self._flying + self.scheduler.running):
                    got, self._flight = self._read(self._flight), None
                self._watching &= self._requests
            if self.scheduler.needs_results:
                got, self._flight = got + self._read(self._flight), None
            plan, before = self.scheduler.plan(), self._flight
            if plan is None:
                self._flight = None
            else:
                requests = plan.requests
                self._flight = self._launch(plan, requests)
            got += self._read(before)
            is_done = True
            return got
        finally:
            self._stepping = False
            lost = [] if is_done else _requests_of(under_way) + requests
            if lost:
                self._flight, self._failed = None, True
            for request in [*self._aborted, *lost]:
                self._abort(request)
            self._aborted.clear()

    @property
    def _flying(self) -> list[Request]:
        """Requests that have tokens coming."""
        return _requests_of(self._flight)

    def metrics(self) -> list[Metric]:
        """What there is to watch now, under vLLM's names without its prefix."""
        scheduler, allocator, programs = self.scheduler, self.scheduler.allocator, self.programs
        return [
            Gauge(
                "num_requests_running",
                "Requests under way.",
                len(self._requests) - scheduler.num_waiting,
            ),
            Gauge("num_requests_waiting", "Requests that wait for a row.", scheduler.num_waiting),
            Gauge(
                "kv_cache_usage_perc",
                "Part of the pages in use.",
                allocator.num_used / allocator.num_pages,
            ),
            Counter(
                "prefix_cache_queries",
                "Prompt tokens that were looked up.",
                scheduler.num_looked_up,
            ),
            Counter("prefix_cache_hits", "Prompt tokens that were found.", scheduler.num_found),
            Counter(
                "num_preemptions", "Requests that gave their pages back.", scheduler.num_preemptions
            ),
            *(
                Counter(
                    "kv_policy_pages",
                    "Full pages that policies were asked about, by what became of them.",
                    count,
                    labels={"outcome": outcome},
                )
                for outcome, count in scheduler.eviction.outcomes.items()
            ),
            Counter(
                "kv_policy_bytes_freed",
                "Bytes of pages that policies gave back.",
                freed_nbytes(self.kv, scheduler.eviction.outcomes),
            ),
            Counter("programs_compiled", "Programs compiled.", programs.num_compiled),
            Counter("compile_seconds", "Time that took.", programs.compile_s),
            *self._recorder.metrics(),
            Gauge(
                "kv_cache_bytes_per_token",
                "Bytes of pages per token that they hold, mean over steps.",
                self._recorder.bytes_per_token(self.kv.nbytes, allocator),
            ),
        ]

    def check(self) -> None:
        """Raises RuntimeError if pages, rows and requests do not add up."""
        self.scheduler.check()
        self._rows.check(self.scheduler.running)
        known = {*self.scheduler.waiting, *self.scheduler.running}
        leaving = {request for request in self._flying if request.is_leaving}
        if known | (leaving & self._requests) != self._requests or known & leaving:
            raise RuntimeError("scheduler and engine disagree about which requests exist")

    def _launch(self, plan: StepPlan | LoopPlan, requests: list[Request]) -> Flight:
        self._recorder.begun(requests)
        if plan.demotions or plan.copies:
            self._move_pages(plan.copies, plan.demotions)
            self.scheduler.copied()
        return (
            self._launch_loop(plan, requests)
            if isinstance(plan, LoopPlan)
            else self._launch_step(plan, requests)
        )

    def _move_pages(self, copies: Pairs, demotions: Pairs) -> None:
        self.kv = move_pages(self.programs, self.kv, self._rows, copies=copies, demotions=demotions)

    def _launch_step(self, plan: StepPlan, requests: list[Request]) -> Flight:
        num_tokens = sum(count for _, count in plan.work)
        size = fit_bucket(self.programs.token_buckets, num_tokens)
        num_rows = self.programs.num_step_rows(size)
        program, batch = self.programs.step(size), self._rows.batch(plan.work, size, num_rows)
        position_B = self._rows.positions(requests, num_rows)
        kv, newest, sampling = self._rows.bind(self.kv, self._newest_R, requests, position_B)
        self.kv, newest, sampled, scores = program(self.weights, kv, newest, batch, sampling)
        self._newest_R = newest.token_R
        self._recorder.step(num_tokens, size)
        rows = self.scheduler.launched(plan)
        # What a chunk fills is held, what a loop may fill is not yet.
        self._recorder.pages(self.scheduler.running, self.scheduler.allocator)
        return Flight(rows, sampled, num_rows, self._observed(plan, requests), batch, scores)

    def _launch_loop(self, plan: LoopPlan, requests: list[Request]) -> Flight:
        num_rows = fit_bucket(self.programs.row_buckets, len(requests))
        program = self.programs.loop(num_rows)
        position_B = self._rows.positions(requests, num_rows)
        rows = self._rows.decode_rows(plan.work, position_B)
        kv, newest, sampling = self._rows.bind(self.kv, self._newest_R, requests, position_B)
        self.kv, newest, _, sampled = program(
            self.weights, kv, newest, rows, sampling, np.int32(plan.num_steps)
        )
        self._newest_R = newest.token_R
        self._recorder.pages(self.scheduler.running, self.scheduler.allocator)
        coming = self.scheduler.launched(plan)
        return Flight(coming, sampled, num_rows, self._observed(plan, requests))

    def _observed(self, plan: StepPlan | LoopPlan, requests: list[Request]) -> Observed | None:
        """Takes along what policies will want of the step that was just launched, and launches
        behind it what measures pages.
        """
        found = tuple(group.statistics for group in self.kv.groups if group.statistics is not None)
        norms = [
            (kept, page_norms(self.programs, self._rows.without_rows(self.kv, 1), pages))
            for kept, pages in plan.measures
        ]
        if not found and not norms:
            return None
        return Observed(tuple(request.hold.kept for request in requests), found, norms)

    def _read(self, flight: Flight | None) -> list[Request]:
        """Waits for what the device returns and gives every request its part."""
        if flight is None:
            return []
        if flight.observed is not None:
            flight.observed.note()
        token_Bn = np.atleast_2d(flight.sampled.token_B).T.copy()
        # A row that rests does so from then on.
        num_B = np.count_nonzero(token_Bn != NO_TOKEN, axis=1)
        out = flight.sampled
        if any(request.logprobs is not None for request, _ in flight.rows):
            out = jax.tree.map(np.asarray, out)
            out = out if flight.batch is None else jax.tree.map(lambda x: x[None], out)
        if flight.batch is None:
            self._count_loop(num_B, flight.num_padded_rows)
        else:
            self._take_prompt_logprobs(flight)
        got, going_on, now = [], [], time.monotonic()
        # Of a hundred rows hardly one needs more than its tokens added, so those stay bytes. Only
        # the last one can be a
        # stop token: the device draws none after it.
        packed, width = token_Bn.tobytes(), token_Bn[0].nbytes
        last_B = token_Bn[np.arange(len(num_B)), num_B - 1].tolist()
        rows = zip(flight.rows, num_B.tolist(), last_B, range(0, len(packed), width), strict=False)
        for one, num_tokens, last, start in rows:
            request, num_coming = one
            if not num_coming or request.finish_reason is not None:
                continue
            got.append(request)
            is_whole = num_tokens == num_coming and last not in request.stop_ids
            if is_whole and request.is_plain and len(request.tokens) + num_coming < request.max_len:
                request.tokens.frombytes(packed[start : start + num_tokens * token_Bn.itemsize])
                going_on.append(one)
            else:
                row = start // width
                self._accept(
                    request, token_Bn[row, :num_tokens].tolist(), num_coming, out, row, now
                )
        self._recorder.generated(going_on, now)
        return got

    def _count_loop(self, num_B: np.ndarray, num_padded_rows: int) -> None:
        num_steps, possible = int(num_B.max()), self.scheduler.config.max_num_seqs
        self._recorder.loop(int(num_B.sum()), num_steps * num_padded_rows, num_steps * possible)

    def _accept(
        self,
        request: Request,
        tokens: list[int],
        num_coming: int,
        out: Sampled,
        row: int,
        now: float,
    ) -> None:
        """Adds the row's new tokens up to the first that ends the request, and their text."""
        if len(tokens) != num_coming and (not tokens or tokens[-1] not in request.stop_ids):
            raise RuntimeError(
                f"request {request.id}: {num_coming} tokens to come, got {len(tokens)}"
            )
        if request.search is not None:
            self._accept_candidates(request, request.search, out, row, now)
            return
        start = len(request.tokens)
        if request.looks_at_each or tokens[-1] in request.stop_ids:
            self._accept_one_by_one(request, tokens, out, row)
        else:
            request.tokens.extend(tokens)
            if len(request.tokens) >= request.max_len:
                request.finish_reason = request.limit
        # Text can wait for the end of the chunk unless a stop string may end it in the middle.
        if request.text is not None and not request.params.stop:
            new = request.tokens[start:]
            request.text.push(new[:-1] if self._hides(request, new[-1]) else new)
        self._recorder.generated([(request, len(request.tokens) - start)], now)
        if request.finish_reason is not None:
            self._finish(request)

    def _accept_candidates(
        self, request: Request, search: BeamSearch, out: Sampled, row: int, now: float
    ) -> None:
        best = slice(search.num_candidates)
        request.candidates = (
            np.array(out.best_BK[0, row, best]),
            np.array(out.best_logprob_BK[0, row, best]),
        )
        request.num_tokens = len(request.tokens)  # what was sampled is none of its tokens
        if not search_on(search, request.beams):
            return
        for beam in request.beams:
            self._recorder.generated([(beam, 1)], now)
            if search.is_over:
                beam.finish_reason = "stop"
                self._finish(beam)

    def _accept_one_by_one(
        self, request: Request, tokens: list[int], out: Sampled, row: int
    ) -> None:
        for i, token in enumerate(tokens):
            request.tokens.append(token)
            if request.logprobs is not None:
                request.logprobs.append(self._logprobs(request, out, i, row, token))
                request.cumulative_logprob += request.logprobs[-1][token].logprob
            if self._ends(request, token):
                return

    def _ends(self, request: Request, token: int) -> bool:
        enough = request.num_new > request.params.min_tokens
        if token in request.stop_ids and enough:
            request.finish_reason = "stop"
            request.stop_reason = None if token == request.eos_id else token
        if (
            request.text is not None
            and request.params.stop_strings
            and not self._hides(request, token)
        ):
            found = request.text.push([token], search=enough)
            if found is not None and request.finish_reason is None:
                request.finish_reason, request.stop_reason = "stop", found
        if request.finish_reason is None and request.is_full:
            request.finish_reason = request.limit
        return request.finish_reason is not None

    def _hides(self, request: Request, token: int) -> bool:
        """Whether this is the stop token that ended the request, whose text is given out only on
        demand.
        """
        ended = request.finish_reason == "stop" and token in request.stop_ids
        return ended and not request.params.include_stop_str_in_output

    def _finish(self, request: Request) -> None:
        if request.text is not None:
            request.text.end()
        self._recorder.ended(request)
        self._requests.remove(request)
        self.scheduler.remove(request)

    def _logprobs(
        self, request: Request, out: Sampled, i: int, row: int, token: int
    ) -> dict[int, Logprob]:
        one = Scores(
            out.logprob_B[i, row],
            out.rank_B[i, row],
            out.best_BK[i, row],
            out.best_logprob_BK[i, row],
        )
        return self._entry(token, one, request.params.logprobs or 0)

    def _take_prompt_logprobs(self, flight: Flight) -> None:
        """Entries of the prompt tokens that this step has scored, in order."""
        batch, requests = flight.batch, [request for request, _ in flight.rows]
        if batch is None or all(request.prompt_logprobs is None for request in requests):
            return
        scores, targets = jax.tree.map(np.asarray, flight.scores), np.asarray(batch.target_T)
        for request, start, count in zip(requests, batch.start_B, batch.count_B, strict=False):
            entries = [] if request.prompt_logprobs is None else request.prompt_logprobs
            for t in start + np.flatnonzero(targets[start : start + count] != NO_TOKEN):
                one = Scores(
                    scores.logprob_T[t],
                    scores.rank_T[t],
                    scores.best_TK[t],
                    scores.best_logprob_TK[t],
                )
                entry = self._entry(int(targets[t]), one, request.params.prompt_logprobs or 0)
                entries.append(entry)

    def _entry(self, token: int, scores: Scores, count: int) -> dict[int, Logprob]:
        """The token's own logprob first, then the `count` likeliest ones (-1: all)."""

        def named(token: int, logprob: float, rank: int) -> Logprob:
            return Logprob(logprob, rank, self._decode_token(token) if self._decode_token else None)

        entry = {token: named(token, float(scores.logprob_T), int(scores.rank_T))}
        best = slice(None if count < 0 else count)
        others = zip(
            scores.best_TK[best].tolist(), scores.best_logprob_TK[best].tolist(), strict=True
        )
        for rank, (other, logprob) in enumerate(others, start=1):
            entry.setdefault(other, named(other, logprob, rank))
        return entry

    def _restore_lost_kv(self) -> None:
        """A new empty pool where a step that failed took the contents of the old one."""
        if self._failed and not is_computed(self.kv.pools):
            self.scheduler.start_over()
            for pool in self.kv.pools:
                pool.delete()  # before there is a second one
            self.kv, self._newest_R = self._make_kv(), _no_tokens(self.scheduler.config)
        self._failed = False


def _requests_of(flight: Flight | None) -> list[Request]:
    return [] if flight is None else [request for request, _ in flight.rows]


def _no_tokens(config: EngineConfig) -> Any:
    return np.full(config.max_num_seqs, NO_TOKEN, np.int32)
