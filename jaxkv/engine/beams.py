"""Beams as requests: each has a row and a handle of its own, and takes another's sequence over by
its page table.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import numpy as np

from jaxkv.holding.allocator import KVHandle, PageAllocator
from jaxkv.holding.retention import Kept
from jaxkv.requests.beam import Beam, BeamSearch
from jaxkv.requests.outputs import BeamSearchOutput, BeamSearchSequence, Logprob
from jaxkv.requests.request import Request, Submission

Decode = Callable[[Sequence[int]], str]


def search_on(
    search: BeamSearch, beams: tuple[Request, ...], allocator: PageAllocator, low: PageAllocator
) -> bool:
    """Gives every beam its next token, and the sequence before it, once the candidates of all are
    known.

    `low`: the allocator of demoted pages.

    Returns whether they were. Where the search is over then, the beams stay as they are.
    """
    if any(beam.num_pending for beam in beams):
        return False
    tokens, logprobs = zip(
        *(beam.candidates for beam in beams if beam.candidates is not None), strict=True
    )
    chosen = search.advance(np.stack(tokens), np.stack(logprobs))
    if chosen:
        _take_over(beams, chosen, allocator, low)
    return True


def _take_over(
    beams: tuple[Request, ...],
    chosen: list[tuple[int, int]],
    allocator: PageAllocator,
    low: PageAllocator,
) -> None:
    """Forks before it releases, so that a page which anyone goes on with never is free in
    between.
    """
    parents = [
        (beam.tokens, beam.handle, beam.chain, beam.num_published, beam.publish_len)
        for beam in beams
    ]
    remained = [(beam.kept, beam.num_gone, beam.evict_len) for beam in beams]
    for beam, (parent, token) in zip(beams, chosen, strict=True):
        tokens, handle, chain, beam.num_published, beam.publish_len = parents[parent]
        kept, beam.num_gone, beam.evict_len = remained[parent]
        beam.tokens = tokens + array("i", [token])
        beam.num_tokens = len(beam.tokens)
        beam.handle, beam.num_bound = allocator.fork(handle), 0
        beam.chain = chain.copy()
        beam.candidates = None
        if kept is not None:
            beam.kept = kept.copy()
            low.fork(_demoted(kept, low))
    for _, handle, *_ in parents:
        allocator.release(handle)
    for kept, *_ in remained:
        if kept is not None:
            low.release(_demoted(kept, low))


def _demoted(kept: Kept, low: PageAllocator) -> KVHandle:
    return KVHandle(tuple(kept.low), len(kept.low) * low.page_size)


def beam_output(
    submission: Submission, *, eos_id: int | None, include_stop: bool, decode: Decode | None
) -> BeamSearchOutput:
    """What the finished search of these beams has found. `eos_id`: the end token that needs no
    stop_reason.
    """
    first = submission.samples[0]
    if first.search is None:
        raise RuntimeError(f"request {first.id} is no beam")
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
            if decode is None
            else decode(tokens[:-1] if stopped and not include_stop else tokens),
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
