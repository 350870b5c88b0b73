"""Host-side inputs of the steps: what is constant per running row is kept in arrays, the rest is
filled in per step.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np

from jaxkv.config import EngineConfig
from jaxkv.engine.page_rows import KeptRows, PageRows
from jaxkv.holding.adapters import AdapterSlots
from jaxkv.holding.hold import Hold
from jaxkv.kv.policies import get_policy
from jaxkv.kv.state import PagedKV
from jaxkv.ops.attention import Batch
from jaxkv.ops.sampling import NO_TOKEN, Sampling
from jaxkv.placement import Placement
from jaxkv.processes import to_devices
from jaxkv.programs.inputs import empty_rows, empty_sampling, packed_batch, set_drawn
from jaxkv.programs.loop import Rows
from jaxkv.requests.masks import ends_of, token_mask
from jaxkv.requests.request import Request

WIDE = ("allowed_BM", "bias_id_BE", "bias_BE", "history_BN")
"""Sampling parameters of more than a few values per row."""

PENALISING = ("repetition_B", "frequency_B", "presence_B", "prompt_len_B")

PARAMETERS = {field.name for field in fields(Sampling)}


class RowTables:
    """Keeps the page tables and sampling parameters of every row of the engine; a row belongs to
    one running request.

    The arrays have one row more, which stays as it is made: the padding rows of a step.

    What no request of a step uses is not gathered, and if it is wide not sent: the device keeps
    empty arrays of it.
    """

    def __init__(
        self,
        config: EngineConfig,
        vocab_size: int,
        placement: Placement | None,
        adapters: AdapterSlots,
    ) -> None:
        self.num_rows = config.max_num_seqs
        self.tables = tuple(PageRows(config, number) for number in range(len(config.windows)))
        policy = get_policy(config.kv_policy)
        self._kept = None if policy is None else KeptRows(config, policy)
        self.vocab_size = vocab_size
        self._whole = None if placement is None else placement.sharding()
        self.max_len = config.max_len
        # Without histories: they are written anew for each step from the requests' tokens.
        self.sampling = empty_sampling(self.num_rows + 1, vocab_size=vocab_size, max_len=0)
        self._min_len_R = np.zeros(self.num_rows + 1, np.int64)
        self._penalises_R = np.zeros(self.num_rows + 1, np.bool_)
        self._needs_host_R = np.zeros(self.num_rows + 1, np.bool_)
        self._empty: dict[int, Sampling] = {}
        self._same: tuple[bytes, Sampling] | None = None
        self._context_R = None if not config.has_contexts else np.zeros(self.num_rows + 1, np.int32)
        self._has_states = config.has_states
        self._adapters = adapters if config.num_adapters else None
        self._owner_R: list[Request | None] = [None] * self.num_rows

    def places(self, requests: list[Request], num_rows: int) -> tuple[Any, np.ndarray]:
        """Returns each one's row and the position of its next token, and those of padding."""
        row_B: Any = np.full(num_rows, self.num_rows, np.int32)
        row_B[: len(requests)] = [request.row for request in requests]
        position_B = np.zeros(num_rows, np.int32)
        position_B[: len(requests)] = [request.hold.num_stored for request in requests]
        return row_B, position_B

    def bind(
        self, kv: PagedKV, requests: list[Request], row_B: Any, position_B: np.ndarray
    ) -> PagedKV:
        """Returns the state of a step or loop of these running requests, so ordered, in these rows
        and at these positions, with padding behind them.
        """
        self._select(requests)
        tables = tuple(table.rows(row_B, position_B) for table in self.tables)
        if self._kept is not None:
            tables = (self._kept.added_to(tables[0], row_B),)
        if self._context_R is not None:
            context_B: Any = self._context_R.take(row_B)
            tables = tuple(replace(table, context_B=context_B) for table in tables)
        if self._has_states:  # in the slot of its row's number
            tables = tuple(replace(table, slot_B=row_B) for table in tables)
        if self._adapters is not None:
            adapter_B: Any = np.full(len(position_B), self._adapters.count, np.int32)
            slots = [self._adapters.slot_of(one.draw.adapter) for one in requests]
            adapter_B[: len(requests)] = slots
            tables = tuple(replace(table, adapter_B=adapter_B) for table in tables)
        return replace(kv, rows=tables)

    def _select(self, requests: list[Request]) -> None:
        """Takes over who is new in its row, and the pages of who has got others since."""
        owner_R, changed = self._owner_R, []
        for request in requests:
            row = request.row
            if row is None:
                raise RuntimeError(f"request {request.id} is to run without a row")
            if owner_R[row] is not request:
                owner_R[row] = request
                self._set_sampling(row, request)
                if self._context_R is not None:
                    self._context_R[row] = request.max_len
                self._same = None
            hold = request.hold
            if hold.bound_len != hold.room_len:
                changed.append((row, hold))
        if changed:
            self._set_pages(changed)

    def _set_pages(self, changed: list[tuple[int, Hold]]) -> None:
        if self._kept is not None:
            self._kept.bind(changed)
        for table in self.tables:
            table.bind(changed)
        for _, hold in changed:
            hold.bound_len = hold.room_len

    def _set_sampling(self, row: int, request: Request) -> None:
        params, table = request.params, self.sampling
        set_drawn(
            table,
            row,
            params,
            stop_ids=request.halt_ids,
            seed=request.draw.seed,
            sample=request.draw.sample,
        )
        ignored = request.ends.ignored_eos
        table.ignored_B[row] = NO_TOKEN if ignored is None else ignored
        table.logprobs_B[row] = params.logprobs is not None
        self._min_len_R[row] = request.prompt_len + params.min_tokens if params.min_tokens else 0
        self._penalises_R[row] = params.penalises
        self._needs_host_R[row] = request.needs_host
        table.repetition_B[row] = params.repetition_penalty
        table.frequency_B[row] = params.frequency_penalty
        table.presence_B[row] = params.presence_penalty
        table.prompt_len_B[row] = request.prompt_len
        bias = params.logit_bias or {}
        table.bias_id_BE[row] = NO_TOKEN
        table.bias_id_BE[row, : len(bias)] = list(bias)
        table.bias_BE[row, : len(bias)] = list(bias.values())
        has_words = params.allowed_token_ids is not None or bool(request.draw.bad_words)
        table.masked_B[row] = has_words or request.needs_host
        if request.draw.grammar is None:  # which is asked for every token
            self._set_mask(table.allowed_BM, row, request)

    def _set_mask(self, allowed_BM: Any, row: int, request: Request) -> None:
        thinking = request.draw.thinking
        if thinking is not None and request.needs_host and thinking.forced is not None:
            allowed_BM[row] = token_mask(self.vocab_size, [thinking.forced], ())
        elif request.draw.grammar is not None:
            allowed_BM[row] = request.draw.grammar.mask()
        elif self.sampling.masked_B[request.row]:
            forbidden = ends_of(request.draw.bad_words, request.tokens[request.prompt_len :])
            allowed_BM[row] = token_mask(
                self.vocab_size, request.params.allowed_token_ids, forbidden
            )

    def batch(self, work: list[tuple[Request, int]], num_tokens: int, num_rows: int) -> Batch:
        """Packs the given numbers of pending tokens of each request, decode rows first."""
        positions = [request.hold.num_stored for request, _ in work]
        chunks = [
            (NO_TOKEN,) if request.num_coming else request.tokens[start : start + count]
            for (request, count), start in zip(work, positions, strict=True)
        ]
        batch = packed_batch(chunks, positions, num_tokens, num_rows)
        target_T: Any = batch.target_T
        for (request, count), start in zip(work, batch.start_B, strict=False):
            self._set_targets(target_T[start : start + count], request)
        return batch

    def _set_targets(self, target_T: Any, request: Request) -> None:
        """Sets the prompt tokens that follow those of a chunk, from the first that has no logprobs
        yet.
        """
        if (known := request.output.prompt_logprobs) is None:
            return
        done = request.hold.num_stored
        first = max(len(known), done + 1)
        end = min(request.prompt_len, done + 1 + len(target_T))
        if first < end:
            target_T[first - done - 1 : end - done - 1] = request.tokens[first:end]

    def decode_rows(self, work: list[tuple[Request, int]], position_B: np.ndarray) -> Rows:
        """Returns rows at these positions that may get so many tokens; their newest one is on the
        device only where steps are under way.
        """
        rows, count = empty_rows(len(position_B)), len(work)
        rows.token_B[:count] = [
            r.tokens[-1] if r.num_tokens == len(r.tokens) else NO_TOKEN for r, _ in work
        ]
        rows.position_B[:] = position_B
        rows.budget_B[:count] = [num_tokens for _, num_tokens in work]
        return rows

    def sampling_for(self, requests: list[Request], row_B: np.ndarray) -> Sampling:
        """Returns the parameters of requests that were bound, in this order and in these rows;
        those past them are greedy and want nothing.
        """
        num_rows = len(row_B)
        sampling, rows = self._parameters(row_B), row_B[: len(requests)]
        changed: dict[str, Any] = {}
        if self._min_len_R[rows].any():
            changed["min_left_B"] = np.zeros(num_rows, np.int32)
            num_tokens = [request.num_tokens for request in requests]
            changed["min_left_B"][: len(rows)] = np.maximum(self._min_len_R[rows] - num_tokens, 0)
        if watched := np.flatnonzero(self._needs_host_R[rows]).tolist():
            changed["allowed_BM"] = np.array(sampling.allowed_BM)
            for row in watched:
                self._set_mask(changed["allowed_BM"], row, requests[row])
        if penalised := np.flatnonzero(self._penalises_R[rows]).tolist():
            changed["history_BN"] = np.full((num_rows, self.max_len), NO_TOKEN, np.int32)
            for row in penalised:
                changed["history_BN"][row, : len(requests[row].tokens)] = requests[row].tokens
        return replace(sampling, **changed) if changed else sampling

    def _parameters(self, row_B: np.ndarray) -> Sampling:
        """Returns what the tables hold of these rows. Decode loops of the same make it once."""
        key = row_B.tobytes()
        if self._same is None or self._same[0] != key:
            # Converted once, or each array would do it.
            table, rows = self.sampling, row_B.astype(np.intp)
            unused = {"history_BN", "min_left_B"}
            if not self._penalises_R[rows].any():
                unused.update(PENALISING)
            if not table.masked_B[rows].any():
                unused |= {"allowed_BM"}
            if (table.bias_id_BE[rows, 0] == NO_TOKEN).all():
                unused |= {"bias_id_BE", "bias_BE"}
            sent = {name: getattr(table, name)[rows] for name in PARAMETERS - unused}
            self._same = key, replace(self._empty_for(len(row_B)), **sent)
        return self._same[1]

    def _empty_for(self, num_rows: int) -> Sampling:
        """Returns parameters of rows that want nothing, the wide ones on the device."""
        if num_rows not in self._empty:
            empty = empty_sampling(num_rows, vocab_size=self.vocab_size, max_len=self.max_len)
            wide = {name: to_devices(getattr(empty, name), self._whole) for name in WIDE}
            self._empty[num_rows] = replace(empty, **wide)
        return self._empty[num_rows]

    def check(self, running: list[Request]) -> None:
        """Raises RuntimeError if a running request has other pages than the tables say that it
        has.
        """
        for request in running:
            for table in self.tables:
                if request.row is None:
                    raise RuntimeError(f"request {request.id} runs without a row")
                table.check(request.row, request.hold)

    def start_again(self) -> None:
        """Has every row taken over anew, whatever state it was left in."""
        self._owner_R = [None] * self.num_rows
        self._same = None
        for table in self.tables:
            table.start_again()
