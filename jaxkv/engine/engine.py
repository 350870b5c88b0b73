"""The engine: schedules requests, runs the compiled steps, and turns what they return into tokens and text."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from jaxkv.aot import Programs, fit_bucket
from jaxkv.config import EngineConfig
from jaxkv.engine.beam import BeamSearch
from jaxkv.engine.branch import search_on
from jaxkv.engine.metrics import Counter, Gauge, Metric, Recorder
from jaxkv.engine.outputs import Logprob
from jaxkv.engine.request import Request, Submission
from jaxkv.engine.rows import RowTables
from jaxkv.engine.scheduler import LoopPlan, Scheduler, StepPlan
from jaxkv.kv.state import PagedKV
from jaxkv.models.decoder import Weights
from jaxkv.ops.attention import Batch
from jaxkv.ops.sampling import NO_TOKEN, Sampled, Scores


class Engine:
    """Owns the KV state and everything mutable around it. One thread at a time.

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
        self._rows = RowTables(config, programs.spec.vocab_size)
        self._requests: set[Request] = set()
        self._decode_token = decode_token
        self._recorder = Recorder()
        self._stepping = False
        self._aborted: list[Request] = []

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(self, submission: Submission) -> None:
        """Queues what `Intake` made."""
        for request in submission.samples:
            self._requests.add(request)
            self._recorder.added(request)
            self.scheduler.add(request)

    def abort(self, submission: Submission) -> None:
        """Ends what is left of it (finish_reason "abort") and frees what that holds; having finished is no error.

        During a step, where the garbage collector may close a forgotten stream, it waits for the step's end.
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
        """Runs the next step or decode loop. Returns the requests that got tokens; finished ones are out already.

        An exception on the way ends the requests that were in the step: their tokens, text and pages may disagree.
        Where it took the KV state with it, the others are computed anew.
        """
        self._stepping, begun = True, list[Request]()
        try:
            self._restore_lost_kv()
            plan = self.scheduler.plan()
            if plan is None:
                return []
            begun = plan.requests if isinstance(plan, LoopPlan) else [request for request, _ in plan.work]
            self._recorder.begun(begun, self.scheduler.running, self.scheduler.allocator)
            for request in begun:
                self._rows.update(request)
            self._copy_pages(plan.copies)
            got = self._run_loop(plan) if isinstance(plan, LoopPlan) else self._run_step(plan)
            begun = []
            return got
        finally:
            self._stepping = False
            for request in [*self._aborted, *begun]:
                self._abort(request)
            self._aborted.clear()

    def metrics(self) -> list[Metric]:
        """What there is to watch now, under vLLM's names without its prefix."""
        scheduler, allocator, programs = self.scheduler, self.scheduler.allocator, self.programs
        return [
            Gauge("num_requests_running", "Requests that hold a row.", len(scheduler.running)),
            Gauge("num_requests_waiting", "Requests that wait for one.", len(self._requests) - len(scheduler.running)),
            Gauge("kv_cache_usage_perc", "Part of the pages in use.", allocator.num_used / allocator.num_pages),
            Counter("prefix_cache_queries", "Prompt tokens that were looked up.", scheduler.num_looked_up),
            Counter("prefix_cache_hits", "Prompt tokens that were found.", scheduler.num_found),
            Counter("num_preemptions", "Requests that gave their pages back.", scheduler.num_preemptions),
            Counter("programs_compiled", "Programs compiled.", programs.num_compiled),
            Counter("compile_seconds", "Time that took.", programs.compile_s),
            *self._recorder.metrics(),
        ]

    def check(self) -> None:
        """Raises RuntimeError if pages, rows and requests do not add up."""
        self.scheduler.check()
        known = {*self.scheduler.waiting, *self.scheduler.running}
        if known != self._requests:
            raise RuntimeError("scheduler and engine disagree about which requests exist")

    def _copy_pages(self, copies: tuple[tuple[int, int], ...]) -> None:
        if not copies:
            return
        num_rows = self.scheduler.config.max_num_seqs
        page_2C = np.zeros((2, num_rows), np.int32)
        page_2C[:, : len(copies)] = np.transpose(copies)
        self.kv = self.programs.copy()(self._rows.state_for(self.kv, [], num_rows), *page_2C, np.int32(len(copies)))
        self.scheduler.copied()

    def _run_step(self, plan: StepPlan) -> list[Request]:
        requests = [request for request, _ in plan.work]
        size = fit_bucket(self.programs.token_buckets, sum(count for _, count in plan.work))
        num_rows = self.programs.num_step_rows(size)
        program = self.programs.step(size)
        batch = self._rows.batch(plan.work, size, num_rows)
        self.kv, sampled, scores = program(
            self.weights,
            self._rows.state_for(self.kv, requests, num_rows),
            batch,
            self._rows.sampling_for(requests, num_rows),
        )
        self._take_prompt_logprobs(requests, batch, scores)
        out = jax.tree.map(lambda x: np.asarray(x)[None], sampled)
        tokens_of = _tokens_of_rows(out)
        self._recorder.step(sum(count for _, count in plan.work), size)
        got = []
        for row, (request, count) in enumerate(plan.work):
            length = request.handle.length + count
            request.handle = self.scheduler.allocator.advance(request.handle, length)
            if request.num_pending == 0:
                self._accept(request, tokens_of[row], out, row)
                got.append(request)
        return got

    def _run_loop(self, plan: LoopPlan) -> list[Request]:
        num_rows = fit_bucket(self.programs.row_buckets, len(plan.requests))
        program = self.programs.loop(num_rows)
        self.kv, _, sampled = program(
            self.weights,
            self._rows.state_for(self.kv, plan.requests, num_rows),
            self._rows.decode_rows(plan.requests, plan.num_steps, num_rows),
            self._rows.sampling_for(plan.requests, num_rows),
            np.int32(plan.num_steps),
        )
        out = jax.tree.map(np.asarray, sampled)
        tokens_of = _tokens_of_rows(out)
        num_stored = [len(tokens) for tokens in tokens_of]
        num_steps, possible = max(num_stored), self.scheduler.config.max_num_seqs
        self._recorder.loop(sum(num_stored), num_steps * num_rows, num_steps * possible)
        for row, request in enumerate(plan.requests):
            length = request.handle.length + num_stored[row]
            request.handle = self.scheduler.allocator.advance(request.handle, length)
            self._accept(request, tokens_of[row], out, row)
        return plan.requests

    def _accept(self, request: Request, tokens: list[int], out: Sampled, row: int) -> None:
        """Adds the row's new tokens up to the first that ends the request, and their text."""
        if request.search is not None:
            self._accept_candidates(request, request.search, out, row)
            return
        start = len(request.tokens)
        # Of a hundred rows hardly one needs a look at every token, and looking is most of what the host does.
        if request.logprobs is None and request.stop_ids.isdisjoint(tokens) and not request.params.stop:
            request.tokens += tokens
            if request.num_left == 0:
                request.finish_reason = request.limit
        else:
            self._accept_one_by_one(request, tokens, out, row)
        self._recorder.generated(request, len(request.tokens) - start)
        # Text can wait for the end of the chunk unless a stop string may end it in the middle.
        if request.text is not None and not request.params.stop:
            new = request.tokens[start:]
            request.text.push(new[:-1] if self._hides(request, new[-1]) else new)
        if request.finish_reason is not None:
            self._finish(request)

    def _accept_candidates(self, request: Request, search: BeamSearch, out: Sampled, row: int) -> None:
        best = slice(search.num_candidates)
        request.candidates = np.array(out.best_BK[0, row, best]), np.array(out.best_logprob_BK[0, row, best])
        if not search_on(search, request.beams, self.scheduler.allocator):
            return
        for beam in request.beams:
            self._recorder.generated(beam, 1)
            if search.is_over:
                beam.finish_reason = "stop"
                self._finish(beam)

    def _accept_one_by_one(self, request: Request, tokens: list[int], out: Sampled, row: int) -> None:
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
        if request.text is not None and request.params.stop_strings and not self._hides(request, token):
            found = request.text.push([token], search=enough)
            if found is not None and request.finish_reason is None:
                request.finish_reason, request.stop_reason = "stop", found
        if request.finish_reason is None and request.num_left == 0:
            request.finish_reason = request.limit
        return request.finish_reason is not None

    def _hides(self, request: Request, token: int) -> bool:
        """Whether this is the stop token that ended the request, whose text is given out only on demand."""
        ended = request.finish_reason == "stop" and token in request.stop_ids
        return ended and not request.params.include_stop_str_in_output

    def _finish(self, request: Request) -> None:
        if request.text is not None:
            request.text.end()
        self._recorder.ended(request)
        self._requests.remove(request)
        self.scheduler.remove(request)

    def _logprobs(self, request: Request, out: Sampled, i: int, row: int, token: int) -> dict[int, Logprob]:
        one = Scores(out.logprob_B[i, row], out.rank_B[i, row], out.best_BK[i, row], out.best_logprob_BK[i, row])
        return self._entry(token, one, request.params.logprobs or 0)

    def _take_prompt_logprobs(self, requests: list[Request], batch: Batch, scores: Scores) -> None:
        """Entries of the prompt tokens that this step has scored, in order."""
        if all(request.prompt_logprobs is None for request in requests):
            return
        scores, targets = jax.tree.map(np.asarray, scores), np.asarray(batch.target_T)
        for request, start, count in zip(requests, batch.start_B, batch.count_B, strict=False):
            entries = [] if request.prompt_logprobs is None else request.prompt_logprobs
            for t in start + np.flatnonzero(targets[start : start + count] != NO_TOKEN):
                one = Scores(scores.logprob_T[t], scores.rank_T[t], scores.best_TK[t], scores.best_logprob_TK[t])
                entry = self._entry(int(targets[t]), one, request.params.prompt_logprobs or 0)
                entries.append(entry)

    def _entry(self, token: int, scores: Scores, count: int) -> dict[int, Logprob]:
        """The token's own logprob first, then the `count` likeliest ones (-1: all)."""

        def named(token: int, logprob: float, rank: int) -> Logprob:
            return Logprob(logprob, rank, self._decode_token(token) if self._decode_token else None)

        entry = {token: named(token, float(scores.logprob_T), int(scores.rank_T))}
        best = slice(None if count < 0 else count)
        others = zip(scores.best_TK[best].tolist(), scores.best_logprob_TK[best].tolist(), strict=True)
        for rank, (other, logprob) in enumerate(others, start=1):
            entry.setdefault(other, named(other, logprob, rank))
        return entry

    def _restore_lost_kv(self) -> None:
        """A new empty pool after an interrupt between donating the old one and receiving its successor."""
        if any(group.pages.is_deleted() for group in self.kv.groups):
            self.scheduler.start_over()
            self.kv = self._make_kv()


def _tokens_of_rows(out: Sampled) -> list[list[int]]:
    """What each row sampled: a row that rests does so from then on."""
    num_B = np.count_nonzero(out.token_B != NO_TOKEN, axis=0).tolist()
    return [tokens[:num] for tokens, num in zip(out.token_B.T.tolist(), num_B, strict=True)]
