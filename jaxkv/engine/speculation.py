"""Decides which decode loops propose tokens ahead, keeps the rows' text for them on the device, and
counts what came of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxkv.config import Speculation
from jaxkv.engine.metrics import Counter, Metric
from jaxkv.models.decoder import head_of
from jaxkv.placement import bytes_per_device
from jaxkv.programs.compiled import Programs
from jaxkv.programs.speculation import Drafts
from jaxkv.requests.request import Request

CPU_COSTS, OTHER_COSTS = (1.2, 0.08), (1.15, 0.005)
"""What a step that verifies proposals is taken to cost, in steps without (docs/speculation.md): so
much, and so much for each token that it may verify. To it comes what a draft model takes.
"""

FIRST_GAIN = 1.5
"""What is expected of a row of which nothing is known yet."""

LEAST_GAIN = 1.1
"""Tokens of a row for the cost of a step below which it is not worth it."""

PAUSES = (64, 256)
"""Tokens that a row waits before it is tried again: the first time, and at most."""


@dataclass(slots=True, eq=False)
class _Row:
    """Holds what is known of the request that a row runs: how many of its tokens the device has as
    text, how much it gains (tokens for the cost of a step), and from how many tokens on it may
    propose.
    """

    request: Request
    text_len: int = 0
    gain: float = FIRST_GAIN
    pause: int = PAUSES[0]
    resumes_at: int = 0


class Speculator:
    """Has decode loops propose tokens ahead where that makes them shorter.

    A loop lasts as long as its slowest row. So it proposes if every row gains, by what the last
    loops of each have shown, and if there are few rows: many fill a step by themselves. Nothing
    that it decides changes tokens.
    """

    def __init__(self, programs: Programs, speculation: Speculation) -> None:
        config = programs.config
        self.most_rows = speculation.most_rows
        self._programs = programs
        self._reads_text = speculation.reads_text
        # A step of few rows costs what it reads, mostly weights: a draft model's once per proposal,
        # and once more to store the last one; a layer that predicts may have the model's head.
        own = {name: x for name, x in programs.draft_weights.items() if name != "own_tokens"}
        num_times, read = speculation.num_tokens + 1, bytes_per_device(own)
        if programs.draft is not None and programs.draft.hidden_states is not None:
            num_times -= 1
            if "own_head" not in own:
                read += bytes_per_device(head_of(programs.weights))
        least, each = CPU_COSTS if programs.device.platform == "cpu" else OTHER_COSTS
        self._least_cost = least + num_times * read / bytes_per_device(programs.weights)
        self._row_cost = each * speculation.num_tokens
        self._shape = (config.max_num_seqs, config.max_len)
        self._rows: dict[int, _Row] = {}
        self._text_RN: Any = None
        self.num_drafts = 0
        self.drafted_k = np.zeros(speculation.num_tokens, np.int64)
        self.accepted_k = np.zeros_like(self.drafted_k)

    def wants(self, requests: Sequence[Request]) -> bool:
        """Tells whether a loop of these requests is to propose tokens."""
        return 0 < len(requests) <= self.most_rows and all(map(self._gains, requests))

    def needs_results(self, requests: Sequence[Request]) -> bool:
        """Tells whether a loop of these requests is to propose tokens, and more than the newest one
        of them is neither in the text on the device nor on the host.
        """
        return self.wants(requests) and any(
            request.num_coming > 1 and not self._has_text(request) for request in requests
        )

    def take_text(self, requests: Sequence[Request]) -> Any:
        """Returns the rows' text for a loop, with that of these requests up to what the host knows.
        The loop consumes it: `keep_text` what it returns. None where nobody looks at it.
        """
        if not self._reads_text:
            return None
        text_RN = np.zeros(self._shape, np.int32) if self._text_RN is None else self._text_RN
        self._text_RN = None
        for request in requests:
            if request.row is not None and not self._has_text(request):
                token_N = np.zeros(self._shape[1], np.int32)
                token_N[: len(request.tokens)] = request.tokens
                row = np.int32(request.row)
                text_RN = self._programs.write_text()(text_RN, row, token_N)
        return text_RN

    def keep_text(self, text_RN: jax.Array | None, work: Sequence[tuple[Request, int]]) -> None:
        """Takes the text back that a loop of this work has added to."""
        self._text_RN = text_RN
        for request, count in work:
            self._row(request).text_len = request.hold.num_stored + count

    def reader(self, requests: Sequence[Request], drafts: Drafts) -> partial[None]:
        """Returns what is to be called when a loop of these requests has returned."""
        return partial(self._note, [self._row(request) for request in requests], drafts)

    def _note(self, rows: list[_Row], drafts: Drafts) -> None:
        plain_B, wide_B, drafted_Bk, accepted_Bk = (
            np.asarray(x)
            for x in (drafts.plain_B, drafts.wide_B, drafts.drafted_Bk, drafts.accepted_Bk)
        )
        self.num_drafts += int(drafted_Bk[:, 0].sum())
        self.drafted_k += drafted_Bk.sum(axis=0)
        self.accepted_k += accepted_Bk.sum(axis=0)
        wide_cost = self._least_cost + self._row_cost * len(rows)
        steps_B, cost_B = plain_B + wide_B, plain_B + wide_cost * wide_B
        num_B = steps_B + accepted_Bk.sum(axis=1)
        for row, steps, gain in zip(
            rows, steps_B.tolist(), (num_B / np.maximum(cost_B, 1)).tolist(), strict=False
        ):
            if not steps:
                continue
            row.gain = (row.gain + gain) / 2
            if row.gain >= LEAST_GAIN:
                row.pause = PAUSES[0]
            elif not self._is_paused(row):
                row.resumes_at = row.request.num_tokens + row.pause
                row.pause, row.gain = min(2 * row.pause, PAUSES[1]), LEAST_GAIN

    def _is_paused(self, row: _Row) -> bool:
        return row.request.num_tokens < row.resumes_at

    def _gains(self, request: Request) -> bool:
        return not self._is_paused(self._row(request))

    def _has_text(self, request: Request) -> bool:
        """Tells whether the device has all of a request's tokens but the newest one, or needs none
        of them.
        """
        return not self._reads_text or self._row(request).text_len >= request.num_tokens - 1

    def _row(self, request: Request) -> _Row:
        if request.row is None:
            raise RuntimeError(f"request {request.id} is to run without a row")
        row = self._rows.get(request.row)
        if row is None or row.request is not request:
            row = self._rows[request.row] = _Row(request)
        return row

    def start_again(self) -> None:
        """Forgets the rows and their text, whatever state they were left in."""
        self._rows.clear()
        self._text_RN = None

    def metrics(self) -> list[Metric]:
        """Returns what was proposed and held, under vLLM's names."""
        return [
            Counter("spec_decode_num_drafts", "Times that tokens were proposed.", self.num_drafts),
            Counter("spec_decode_num_draft_tokens", "Tokens proposed.", int(self.drafted_k.sum())),
            Counter(
                "spec_decode_num_accepted_tokens",
                "Tokens proposed that held.",
                int(self.accepted_k.sum()),
            ),
            *(
                Counter(
                    "spec_decode_num_accepted_tokens_per_pos",
                    "Tokens proposed that held, by how far ahead they were.",
                    count,
                    labels={"position": str(position)},
                )
                for position, count in enumerate(self.accepted_k.tolist())
            ),
        ]
