"""Turns what steps return into tokens, text and log-probabilities of requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxkv.engine.beams import search_on
from jaxkv.engine.metrics import Recorder
from jaxkv.engine.pages import observe
from jaxkv.engine.scheduler import Scheduler
from jaxkv.holding.hold import Kept
from jaxkv.kv.state import Statistics
from jaxkv.ops.attention import Batch
from jaxkv.ops.sampling import NO_TOKEN, Sampled, Scores
from jaxkv.requests.beam import BeamSearch
from jaxkv.requests.outputs import Logprob
from jaxkv.requests.request import Request


@dataclass(frozen=True, slots=True)
class Observed:
    """Holds what policies want of a step that is on its way.

    `statistics` are for what the step's rows had in `kept` when it was launched;
    `measured` are figures of pages that were measured behind the step, for one hold each.
    """

    kept: tuple[Kept | None, ...]
    statistics: Statistics | None
    measured: list[tuple[Kept, jax.Array]]

    def note(self) -> None:
        """Waits for it, and gives every hold its part."""
        if self.statistics is not None:
            observe(self.kept, self.statistics)
        for kept, measured_W in self.measured:
            kept.measured = np.asarray(measured_W)


@dataclass(frozen=True, slots=True)
class Flight:
    """Holds a step or loop on its way: its requests, each with the tokens that come to it, and what
    the device will return.

    It was launched at `start_s` of the monotonic clock. `batch`, `scores` and `num_tokens`, with
    padding, are those of a step; one that pools has `pooled_BD` in place of tokens. Reading a loop
    that has proposed tokens calls `note_drafts`. A request that has ended meanwhile takes nothing
    from it.
    """

    rows: list[tuple[Request, int]]
    sampled: Sampled | None
    num_padded_rows: int
    start_s: float
    observed: Observed | None
    batch: Batch | None = None
    scores: Scores | None = None
    num_tokens: int = 0
    pooled_BD: jax.Array | None = None
    note_drafts: Callable[[], None] | None = None

    @property
    def requests(self) -> list[Request]:
        return [request for request, _ in self.rows]

    @property
    def results(self) -> Any:
        """Returns what the device computes, as arrays."""
        return self.sampled, self.scores, self.pooled_BD

    @property
    def is_done(self) -> bool:
        """Tells whether the device has computed it. Devices work in order, so its last result
        tells.
        """
        last: Any = self.pooled_BD if self.sampled is None else self.sampled.token_B
        return last is None or last.is_ready()


class Results:
    """Reads flights: gives every request its tokens, and takes those that end with them out of the
    scheduler and of `requests`.

    `decode_token` names single tokens in logprobs (None without a tokenizer).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        requests: set[Request],
        recorder: Recorder,
        *,
        decode_token: Callable[[int], str] | None,
    ) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self._recorder = recorder
        self._decode_token = decode_token
        self._read_s = 0.0
        """When the flight before was read."""

    def read(self, flight: Flight | None) -> list[Request]:
        """Waits for what the device returns and gives every request its part."""
        if flight is None:
            return []
        if flight.observed is not None:
            flight.observed.note()
        if flight.note_drafts is not None:
            flight.note_drafts()
        if flight.sampled is None:
            return self._take_pooled(flight)
        token_Bn = np.atleast_2d(flight.sampled.token_B).T.copy()
        # A row that rests does so from then on.
        num_B = np.count_nonzero(token_Bn != NO_TOKEN, axis=1)
        out = flight.sampled
        # Rows are mostly plain, and a list of flags costs half of what the others' question does.
        special = False in [request.is_plain for request, _ in flight.rows]
        if special and any(request.output.logprobs is not None for request, _ in flight.rows):
            out = jax.tree.map(np.asarray, out)
            out = out if flight.batch is None else jax.tree.map(lambda x: x[None], out)
        if flight.batch is None:
            num_steps = int(num_B.max())
            padded, possible = flight.num_padded_rows, self._scheduler.config.max_num_seqs
            self._recorder.loop(int(num_B.sum()), num_steps * padded, num_steps * possible)
        else:
            self._take_prompt_logprobs(flight)
        got, going_on, now = [], [], time.monotonic()
        self._note_cost(flight, now)
        # Of a hundred rows hardly one needs more than its tokens added, so those stay bytes. Only
        # the last one can be a stop token: the device draws none after it.
        packed, width = token_Bn.tobytes(), token_Bn[0].nbytes
        last_B = token_Bn[np.arange(len(num_B)), num_B - 1].tolist()
        rows = zip(flight.rows, num_B.tolist(), last_B, range(0, len(packed), width), strict=False)
        try:
            for one, num_tokens, last, start in rows:
                request, num_coming = one
                if not num_coming or request.finish_reason is not None:
                    continue
                got.append(request)
                is_whole = num_tokens == num_coming and last not in request.ends.stop_ids
                is_going = is_whole and len(request.tokens) + num_coming < request.max_len
                if is_going and request.is_plain:
                    request.tokens.frombytes(packed[start : start + num_tokens * token_Bn.itemsize])
                    going_on.append(one)
                else:
                    row = start // width
                    self._accept(
                        request, token_Bn[row, :num_tokens].tolist(), num_coming, out, row, now
                    )
        finally:  # making text of one row's tokens may raise, and the others' count all the same
            self._recorder.generated(going_on, now)
        return got

    def _note_cost(self, flight: Flight, now: float) -> None:
        if self._scheduler.tiers is not None:
            costs = self._scheduler.tiers.costs
            costs.stepped(flight.num_tokens, now - max(flight.start_s, self._read_s))
            self._read_s = now

    def _take_pooled(self, flight: Flight) -> list[Request]:
        """Adds what a step has given of vectors; returns the requests that are done with it."""
        pooled_BD, batch = np.asarray(flight.pooled_BD), flight.batch
        if batch is None:
            raise RuntimeError("a step that pools has no batch")
        self._note_cost(flight, time.monotonic())
        position_T, kind = np.asarray(batch.position_T), self._scheduler.config.pooled
        got = []
        for row, (request, num_coming) in enumerate(flight.rows):
            if request.finish_reason is not None:
                continue
            output, begins = request.output, position_T[batch.start_B[row]] == 0
            if begins or kind == "last":  # also where it was preempted and begins again
                output.pooled_D = pooled_BD[row]
            elif kind == "mean" and output.pooled_D is not None:
                output.pooled_D = output.pooled_D + pooled_BD[row]
            if num_coming:
                if kind == "mean" and output.pooled_D is not None:
                    output.pooled_D = output.pooled_D / np.float32(request.prompt_len)
                request.num_tokens = len(request.tokens)
                request.finish_reason = "stop"
                self._end(request)
                got.append(request)
        return got

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
        num_missing = num_coming - len(tokens)
        if num_missing and (not tokens or tokens[-1] not in request.halt_ids):
            raise RuntimeError(
                f"request {request.id}: {num_coming} tokens to come, got {len(tokens)}"
            )
        if request.search is not None:
            self._accept_candidates(request, request.search, out, row, now)
            return
        start = len(request.tokens)
        try:
            if request.looks_at_each or tokens[-1] in request.ends.stop_ids:
                self._accept_one_by_one(request, tokens, out, row)
            else:
                request.tokens.extend(tokens)
                if len(request.tokens) >= request.max_len:
                    request.finish_reason = request.ends.at_max_len
            # A mark of its grammar ended its part of a loop: what the plan counted on did not come.
            if num_missing and request.finish_reason is None:
                request.num_tokens = len(request.tokens)
                if not request.hold.is_empty:  # new weights had it give all of that back meanwhile
                    request.hold.num_stored -= num_missing
            if request.output.logprobs is None:
                self._add_forced(request)
            # Text can wait for the end of the chunk unless a stop string may end it in the middle.
            if request.output.text is not None and not request.params.stop:
                new = request.tokens[start:]
                is_hidden = len(new) > 0 and self._hides(request, new[-1])
                request.output.text.push(new[:-1] if is_hidden else new)
        finally:
            if (count := len(request.tokens) - start) > 0:
                self._recorder.generated([(request, count)], now)
        if request.finish_reason is not None:
            self._end(request)

    def _accept_candidates(
        self, request: Request, search: BeamSearch, out: Sampled, row: int, now: float
    ) -> None:
        best = slice(search.num_candidates)
        request.candidates = (
            np.array(out.scores.best_TK[0, row, best]),
            np.array(out.scores.best_logprob_TK[0, row, best]),
        )
        request.num_tokens = len(request.tokens)  # what was sampled is none of its tokens
        if not search_on(search, request.beams, self._scheduler):
            return
        for beam in request.beams:
            self._recorder.generated([(beam, 1)], now)
            if search.is_over:
                beam.finish_reason = "stop"
                self._end(beam)

    def _accept_one_by_one(
        self, request: Request, tokens: list[int], out: Sampled, row: int
    ) -> None:
        grammar = request.draw.grammar
        for i, token in enumerate(tokens):
            if grammar is not None and grammar.error:  # so the token was drawn of all there are
                request.finish_reason, request.output.stop_reason = "abort", grammar.error
                return
            request.tokens.append(token)
            if request.output.logprobs is not None:
                one = out.scores.at((i, row))
                entry = self._entry(token, one, request.params.logprobs or 0)
                request.output.logprobs.append(entry)
                request.output.cumulative_logprob += entry[token].logprob
            if self._ends(request, token):
                return

    def _add_forced(self, request: Request) -> None:
        """Adds the tokens to which grammar or budget leave no other: the next step stores all of
        them and draws what follows. Their logprobs nobody computes.
        """
        while request.finish_reason is None and (token := request.draw.forced()) is not None:
            request.tokens.append(token)
            request.num_tokens = len(request.tokens)  # nothing else of it is on its way
            self._ends(request, token)

    def _ends(self, request: Request, token: int) -> bool:
        grammar, thinking = request.draw.grammar, request.draw.thinking
        if grammar is not None:
            grammar.accept(token)
        if thinking is not None and not thinking.is_over:
            thinking.accept(token)
        enough = request.num_new > request.params.min_tokens
        if token in request.ends.stop_ids and enough:
            request.finish_reason = "stop"
            request.output.stop_reason = None if token == request.ends.eos_id else token
        if (
            request.output.text is not None
            and request.params.stop_strings
            and not self._hides(request, token)
        ):
            found = request.output.text.push([token], search=enough)
            if found is not None and request.finish_reason is None:
                request.finish_reason, request.output.stop_reason = "stop", found
        if grammar is not None and request.finish_reason is None:
            if grammar.error:
                request.finish_reason, request.output.stop_reason = "abort", grammar.error
            elif grammar.is_done:
                request.finish_reason = "stop"
        if request.finish_reason is None and request.is_full:
            request.finish_reason = request.ends.at_max_len
        return request.finish_reason is not None

    def _hides(self, request: Request, token: int) -> bool:
        """Tells whether this is the stop token that ended the request, whose text is given out only
        on demand.
        """
        ended = request.finish_reason == "stop" and token in request.ends.stop_ids
        return ended and not request.params.include_stop_str_in_output

    def _end(self, request: Request) -> None:
        self._recorder.ended(request)
        self._requests.remove(request)
        self._scheduler.remove(request)

    def _take_prompt_logprobs(self, flight: Flight) -> None:
        """Adds the entries of the prompt tokens that this step has scored, in order."""
        batch, requests = flight.batch, flight.requests
        if batch is None or flight.scores is None:
            return
        scores, targets = jax.tree.map(np.asarray, flight.scores), np.asarray(batch.target_T)
        position_T = np.asarray(batch.position_T)
        for request, start, count in zip(requests, batch.start_B, batch.count_B, strict=False):
            if (entries := request.output.prompt_logprobs) is None:
                continue
            for t in start + np.flatnonzero(targets[start : start + count] != NO_TOKEN):
                if position_T[t] + 1 != len(entries):
                    continue  # scored before: preempted and begun anew with that step under way
                wanted = request.params.prompt_logprobs or 0
                entries.append(self._entry(int(targets[t]), scores.at(t), wanted))

    def _entry(self, token: int, scores: Scores, count: int) -> dict[int, Logprob]:
        """Returns the token's own logprob first, then the `count` likeliest ones (-1: all)."""

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
