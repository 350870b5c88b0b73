"""Beams as requests: each has a row and a hold of its own, and takes another's sequence over by a
fork of its hold.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import numpy as np

from jaxkv.engine.scheduler import Scheduler
from jaxkv.holding.hold import Pairs
from jaxkv.requests.beam import Beam, BeamSearch
from jaxkv.requests.outputs import BeamSearchOutput, BeamSearchSequence, Logprob
from jaxkv.requests.request import Request, Submission

Decode = Callable[[Sequence[int]], str]


def search_on(search: BeamSearch, beams: tuple[Request, ...], scheduler: Scheduler) -> bool:
    """Gives every beam its next token, and the sequence before it, once the candidates of all are
    known.

    Returns whether they were. Where the search is over then, the beams stay as they are.
    """
    if any(beam.num_pending for beam in beams):
        return False
    tokens, logprobs = zip(
        *(beam.candidates for beam in beams if beam.candidates is not None), strict=True
    )
    chosen = search.advance(np.stack(tokens), np.stack(logprobs))
    if chosen:
        _take_over(beams, chosen)
        if scheduler.config.has_states:
            scheduler.copy_states(_take_rows(beams, [parent for parent, _ in chosen]))
    return True


def _take_over(beams: tuple[Request, ...], chosen: list[tuple[int, int]]) -> None:
    """Forks before it releases, so that a page which anyone goes on with never is free in
    between.
    """
    parents = [beams[parent] for parent, _ in chosen]
    forks = [parent.hold.fork() for parent in parents]
    tokens = [
        parent.tokens + array("i", [token])
        for parent, (_, token) in zip(parents, chosen, strict=True)
    ]
    for beam in beams:
        beam.hold.release()
    for beam, hold, known in zip(beams, forks, tokens, strict=True):
        beam.hold, beam.tokens = hold, known
        beam.num_tokens = len(known)
        beam.candidates = None


def _take_rows(beams: tuple[Request, ...], parents: list[int]) -> Pairs:
    """Gives the row of each parent, which has its recurrent state, to one that goes on with it, and
    rows of which nobody goes on to the others; returns from which row to which states are to be
    copied for those.
    """
    rows = [beam.row for beam in beams]
    left = [row for number, row in enumerate(rows) if number not in parents]
    pairs, taken = [], set[int]()
    for beam, parent in zip(beams, parents, strict=True):
        beam.row, source = rows[parent], rows[parent]
        if parent in taken:
            beam.row = left.pop()
            if source is None or beam.row is None:
                raise RuntimeError(f"beam {beam.id} goes on without a row")
            pairs.append((source, beam.row))
        taken.add(parent)
    return tuple(pairs)


def beam_output(
    submission: Submission,
    *,
    eos_id: int | None,
    include_stop: bool,
    decode: Decode | None,
    write: Decode | None = None,
) -> BeamSearchOutput:
    """Returns what the finished search of these beams has found. `eos_id`: the end token that needs
    no stop_reason. `decode` names tokens, `write` makes the text; None without a tokenizer.

    Raises: RuntimeError if it was ended, by another thread's step that failed or by a shutdown.
    """
    first = submission.samples[0]
    if first.search is None:
        raise RuntimeError(f"request {first.id} is no beam")
    if not first.search.is_over:
        raise RuntimeError(f"search {submission.id} has ended before it was over")
    prompt, eos_ids = first.tokens[: first.prompt_len], first.search.eos_ids

    def sequence(end: Beam) -> BeamSearchSequence:
        path = end.path()
        tokens = [*prompt, *(beam.token for beam in path)]
        stopped = end.token in eos_ids
        return BeamSearchSequence(
            tokens=tokens,
            logprobs=[_named(beam, decode) for beam in path],
            cum_logprob=float(end.cum_logprob),
            text=None
            if write is None
            else write(tokens[:-1] if stopped and not include_stop else tokens),
            finish_reason="stop" if stopped else "length",
            stop_reason=end.token if stopped and end.token != eos_id else None,
        )

    return BeamSearchOutput([sequence(beam) for beam in first.search.ended])


def _named(beam: Beam, decode: Decode | None) -> dict[int, Logprob]:
    likeliest = enumerate(zip(beam.token_K.tolist(), beam.logprob_K.tolist(), strict=True), start=1)
    return {
        token: Logprob(logprob, rank, None if decode is None else decode([token]))
        for rank, (token, logprob) in likeliest
    }
