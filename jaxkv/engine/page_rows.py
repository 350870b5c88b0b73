"""Keeps the page tables of the engine's rows as arrays, changed only where a hold has changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from jaxkv.config import MAX_INT32, EngineConfig
from jaxkv.holding.hold import Hold, Part
from jaxkv.kv.policies import Policy
from jaxkv.kv.state import BEHIND, PageTables


class PageRows:
    """Keeps one page table of every row of the engine, and of one row more, which stays without
    pages: the padding rows of a step.
    """

    def __init__(self, config: EngineConfig, number: int) -> None:
        self.number = number
        shape = (config.max_num_seqs + 1, config.table_width)
        self.page_size, self.aligned_len = config.block_size, config.aligned_len
        self.table_RW = np.zeros(shape, np.int32)
        plain_W = np.arange(shape[1], dtype=np.int32) * config.block_size
        self._plain_RW = np.broadcast_to(plain_W, shape)
        self.first_RW = np.tile(plain_W, (shape[0], 1))
        # Of rows whose positions are not the plain ones: pages of theirs have gone.
        self._gaps_R = np.zeros(shape[0], np.bool_)
        self._num_gone_R = np.zeros(shape[0], np.int32)

    def bind(self, changed: list[tuple[int, Hold]]) -> None:
        """Takes over, for these rows, the pages that their holds have got since the first
        `bound_len` tokens; all of them where none is known.
        """
        table_RW, page_size = self.table_RW, self.page_size
        for row, hold in changed:
            part = hold.parts[self.number]
            if not hold.bound_len and (part.num_gone or part.first or self._gaps_R[row]):
                self._set_first(row, hold, part)
            end = len(part.pages)
            if part.num_gone:
                end += self._num_in_front(hold, part)
            num_new = (hold.room_len - hold.bound_len) // page_size
            if num_new == 1:  # nearly always, and a slice costs several times as much
                table_RW[row, end - 1] = part.pages[-1]
            else:
                # Those that have gone have no place in the table.
                new = part.pages[-num_new:]
                table_RW[row, end - len(new) : end] = new

    def rows(self, row_B: np.ndarray, position_B: np.ndarray) -> PageTables:
        """Returns the tables of these rows, whose next tokens are at these positions.

        They are copies: the tables change while the device may still read what it was given.
        """
        table_BW: Any = self.table_RW.take(row_B, axis=0)
        first_BW: Any = self._plain_RW[: len(row_B)]
        len_B: Any = position_B
        if self._gaps_R.any():
            first_BW = self.first_RW.take(row_B, axis=0)
            len_B = position_B - self._num_gone_R.take(row_B)
        return PageTables(table_BW, first_BW, len_B)

    def start_again(self) -> None:
        """Has the positions of every row set anew, whatever state they were left in."""
        self._gaps_R[:-1] = True

    def check(self, row: int, hold: Hold) -> None:
        """Raises RuntimeError if the hold has other pages than the table says that it has."""
        part = hold.parts[self.number]
        unknown = (hold.room_len - hold.bound_len) // self.page_size
        start = self._num_in_front(hold, part)
        bound = part.pages[: max(0, len(part.pages) - unknown)]
        known = self.table_RW[row, start : start + len(bound)].tolist()
        if unknown < 0 or known != bound:
            raise RuntimeError(f"row {row}: the table has other pages than its {len(bound)}")

    def _num_in_front(self, hold: Hold, part: Part) -> int:
        """Counts the columns without a page before what a window has left."""
        return (
            0 if hold.retention is not None else part.num_gone % self.aligned_len // self.page_size
        )

    def _set_first(self, row: int, hold: Hold, part: Part) -> None:
        """Sets the positions of what a policy or a window has left."""
        self._gaps_R[row] = part.num_gone > 0
        in_front = self._num_in_front(hold, part)
        self._num_gone_R[row] = part.num_gone - in_front * self.page_size
        self.first_RW[row, :in_front] = BEHIND
        self.first_RW[row, in_front:] = part.firsts(self.first_RW.shape[1] - in_front)


class KeptRows:
    """Keeps what policies have left of every row of the engine: the demoted pages, and from where
    on its queries are observed.
    """

    def __init__(self, config: EngineConfig, policy: Policy) -> None:
        num_rows = config.max_num_seqs + 1
        self.page_size = config.block_size
        self._policy = policy
        self._low_RW = np.zeros((num_rows, config.low_row_pages), np.int32)
        self._low_first_RW = np.zeros_like(self._low_RW)
        self._low_len_R = np.zeros(num_rows, np.int32)
        self._since_R = np.full(num_rows, MAX_INT32, np.int32)

    def bind(self, changed: list[tuple[int, Hold]]) -> None:
        """Takes over, for these rows, what is kept of the holds of which no page is known yet."""
        for row, hold in changed:
            if hold.bound_len:
                continue
            kept = hold.kept
            if kept is None or hold.retention is None:
                self._low_len_R[row], self._since_R[row] = 0, MAX_INT32
                continue
            num_low = len(kept.low)
            self._low_RW[row, :num_low] = kept.low
            self._low_first_RW[row, :num_low] = kept.low_first
            self._low_len_R[row] = num_low * self.page_size
            self._since_R[row] = hold.retention.since(hold.evict_len)

    def added_to(self, tables: PageTables, row_B: np.ndarray) -> PageTables:
        """Returns the tables of these rows with what the engine's policy asks steps for."""
        low: Any = (self._low_RW, self._low_first_RW, self._low_len_R)
        since_B: Any = self._since_R.take(row_B)
        return replace(
            tables,
            low=PageTables(*(x.take(row_B, axis=0) for x in low)) if self._policy.low else None,
            since_B=since_B if self._policy.observes != 0 else None,
            focused=self._policy.focused,
        )
