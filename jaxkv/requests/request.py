"""A request on its way through the engine: host state only."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxkv.config import SamplingParams
from jaxkv.holding.hold import Hold
from jaxkv.lora.request import LoRARequest
from jaxkv.requests.asked import Asked
from jaxkv.requests.beam import BeamSearch
from jaxkv.requests.grammar import Grammar
from jaxkv.requests.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from jaxkv.requests.text import TextStream
from jaxkv.requests.thinking import Thinking
from jaxkv.weights.adapters import Adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Says what a request's tokens are drawn by: its seed, which sample of a prompt it is, the
    token ids of words that must not come, where it is in the grammar that it follows, how much it
    may still reason, and the adapter that its model has.
    """

    seed: int = 0
    sample: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    thinking: Thinking | None = None
    adapter: Adapter | None = None

    def forced(self) -> int | None:
        """Returns the only token that may come next, None where there are others."""
        if self.thinking is not None and (token := self.thinking.forced) is not None:
            return token
        return None if self.grammar is None else self.grammar.forced()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Says what ends a request beside `max_len`, where its finish_reason is `at_max_len`.

    stop_ids: the caller's, and unless ignore_eos the model's own, of which `eos_id` is the one that
    needs no stop_reason; else it is `ignored_eos`, which comes only after min_tokens too.
    """

    stop_ids: frozenset[int] = frozenset()
    eos_id: int | None = None
    ignored_eos: int | None = None
    at_max_len: str = "length"


@dataclass(slots=True, kw_only=True)
class Output:
    """Collects what a request gives out beside its tokens, and how much its caller has got.

    `prompt_logprobs` grows with the prompt. The first `num_given` tokens have been given to a
    stream, and the end too if `is_given`. Of a request that pools, `pooled_D` is what its steps so
    far have given, and with `reads_all` no token of its prompt may come out of the prefix cache.
    """

    text: TextStream | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    cumulative_logprob: float = 0.0
    stop_reason: int | str | None = None
    num_given: int = 0
    is_given: bool = False
    pooled_D: np.ndarray | None = None
    reads_all: bool = False


@dataclass(slots=True, kw_only=True)
class Record:
    """Notes what happened to a request: when, what came out of the prefix cache, how often it gave
    its pages back.

    `arrived_s` is `times.arrival_time` on the monotonic clock, `last_token_s` is on that one too.
    """

    times: RequestMetrics = field(default_factory=RequestMetrics)
    arrived_s: float = 0.0
    last_token_s: float | None = None
    num_cached: int = 0
    num_preemptions: int = 0

    def preempted(self) -> None:
        """Notes that it gives its pages back."""
        self.num_preemptions += 1
        self.times.preemptions = (*self.times.preemptions, (self._now(), None))

    def resumed(self) -> None:
        """Notes that it gets pages again, if it was preempted."""
        if self.times.preemptions and self.times.preemptions[-1][1] is None:
            *before, (start, _) = self.times.preemptions
            self.times.preemptions = (*before, (start, self._now()))

    def _now(self) -> float:
        """Returns the Unix time by the monotonic clock, as all of its times are."""
        return self.times.arrival_time + time.monotonic() - self.arrived_s


@dataclass(slots=True, eq=False)
class Request:
    """Carries one sample of a prompt through the engine: what its caller asked for and what came of
    it, and what its sequence holds of the KV state (its `hold`).

    `max_len` bounds prompt and output together. `row` is its place in the row tables while it runs.

    `num_tokens` counts prompt and output, with the tokens that steps sample which nobody has read
    yet. Plans count on those, as if the request would not end before: its hold counts what those
    steps store.

    A beam's next token comes from its `search`, once that knows the candidates (tokens,
    log-probabilities) of all its `beams`, this one included: until then the last token computed is
    the last there is, and nothing is pending.
    """

    id: str
    tokens: array[int]
    prompt_len: int
    params: SamplingParams
    hold: Hold
    max_len: int
    draw: Draw = Draw()
    ends: Ends = Ends()
    priority: int = 0
    arrival: int = 0
    row: int | None = None
    output: Output = field(default_factory=Output)
    finish_reason: str | None = None
    record: Record = field(default_factory=Record)
    search: BeamSearch | None = None
    beams: tuple[Request, ...] = field(default=(), repr=False)
    candidates: tuple[np.ndarray, np.ndarray] | None = None
    num_tokens: int = field(init=False)
    needs_host: bool = field(init=False)
    """Whether what may come next is made on the host from the token before it, as a mask."""
    is_plain: bool = field(init=False)
    """Whether its new tokens are all that anybody wants of a step: no text, log-probabilities or
    beams.
    """

    def __post_init__(self) -> None:
        self.num_tokens = len(self.tokens)
        thinking = self.draw.thinking
        # Elsewhere the end of reasoning is written when the tokens before it are read.
        has_end = thinking is not None and (
            self.output.logprobs is not None or thinking.forced is not None
        )
        self.needs_host = has_end or self.draw.grammar is not None or self._has_long_words
        self.is_plain = self.output.text is None and not self.looks_at_each

    @property
    def _has_long_words(self) -> bool:
        return any(len(word) > 1 for word in self.draw.bad_words)

    @property
    def looks_at_each(self) -> bool:
        """Tells whether each new token has to be looked at, not only the last one."""
        thinking = self.draw.thinking
        return (
            self.output.logprobs is not None
            or bool(self.params.stop)
            or self.draw.grammar is not None
            or (thinking is not None and not thinking.is_over)
        )

    @property
    def halt_ids(self) -> frozenset[int]:
        """Returns the tokens behind which the device draws no other of a loop: those that end it,
        and where its grammar may begin to hold.
        """
        grammar = self.draw.grammar
        return self.ends.stop_ids if grammar is None else self.ends.stop_ids | grammar.halts

    @property
    def rests(self) -> bool:
        """Tells whether it gets one token of a loop, as the host has to see that first."""
        if not self.needs_host:
            return False
        grammar, thinking = self.draw.grammar, self.draw.thinking
        if thinking is not None and thinking.forced is not None:
            return True
        if grammar is not None:
            return not grammar.is_free
        return thinking is None or self._has_long_words

    @property
    def may_need_tokens(self) -> bool:
        """Tells whether `needs_tokens` is ever true of it."""
        return self.draw.thinking is not None or self.needs_tokens

    @property
    def needs_tokens(self) -> bool:
        """Tells whether its part in the next step is made from all tokens before it, so that those
        must have been read.
        """
        return self.needs_host or self.params.penalises or self.num_free <= 0

    @property
    def num_free(self) -> int:
        """Counts the tokens that it may be given before what is coming has been read."""
        thinking = self.draw.thinking
        if thinking is None or (room := thinking.room) is None:
            return self.num_left
        return min(self.num_left, room - self.num_coming)

    @property
    def order(self) -> tuple[int, int]:
        """Orders requests: who comes first."""
        return self.priority, self.arrival

    @property
    def most_cached(self) -> int:
        """Returns how many of its first tokens may come out of the prefix cache. The last one is
        computed, since no page holds what comes after it; so is what precedes a prompt token that
        is still to be scored.
        """
        scored = self.output.prompt_logprobs
        if self.output.reads_all:
            return 0
        if scored is None or len(scored) == self.prompt_len:
            return len(self.tokens) - 1
        return len(scored) - 1

    @property
    def num_new(self) -> int:
        """Counts the tokens generated and read so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def num_coming(self) -> int:
        """Counts the tokens that are sampled but not read."""
        return self.num_tokens - len(self.tokens)

    @property
    def num_known(self) -> int:
        """Counts the tokens that are in the KV state and have been read. The newest one read may be
        an end that is not stored.
        """
        return min(self.hold.num_stored, len(self.tokens) - 1)

    @property
    def num_pending(self) -> int:
        """Counts the tokens that are not in the KV state yet: 1 when decoding, more during prefill,
        0 of a beam that waits.
        """
        return self.num_tokens - self.hold.num_stored

    @property
    def num_ready(self) -> int:
        """Counts the pending tokens before the policy is asked again, or a state is kept."""
        return min(self.num_tokens, self.hold.stop_len) - self.hold.num_stored

    @property
    def is_due(self) -> bool:
        """Tells whether its policy is to be asked; not where only its last token is to come, which
        is never stored.
        """
        return self.hold.is_due and self.hold.num_stored < self.max_len - 1

    @property
    def num_left(self) -> int:
        """Counts the tokens that it may still generate, beyond those that are coming."""
        return self.max_len - self.num_tokens

    @property
    def is_full(self) -> bool:
        """Tells whether all the tokens that it may have are here."""
        return len(self.tokens) >= self.max_len

    @property
    def is_leaving(self) -> bool:
        """Tells whether all that it needs is coming: it has given back its row and pages. A beam
        without a row waits for one, as its search may go on with another's tokens.
        """
        is_last = self.num_left == 0 and self.num_coming > 0
        return self.row is None and is_last and not self.beams

    def metrics(self) -> RequestMetrics:
        """Returns its times, up to the newest token."""
        record, times = self.record, self.record.times
        if record.last_token_s is not None:
            times.last_token_time = times.arrival_time + record.last_token_s - record.arrived_s
        times.num_generation_tokens = self.num_new
        return times

    def completion(self) -> CompletionOutput:
        """Returns everything so far; until it ends without what may turn out to begin a stop
        string.
        """
        text = self.output.text
        if text is None:
            return self._completion("", 0)
        return self._completion(text.text if self.finish_reason else text.shown, 0)

    def new_completion(self) -> CompletionOutput:
        """Returns what is new since the last call."""
        output, text = self.output, ""
        start, output.num_given = output.num_given, self.num_new
        if output.text is not None:
            if self.finish_reason is not None:
                output.text.end()
            text = output.text.take()
        return self._completion(text, start)

    def _completion(self, text: str, start: int) -> CompletionOutput:
        output = self.output
        wants = output.logprobs is not None
        return CompletionOutput(
            index=self.draw.sample,
            text=text,
            token_ids=self.tokens[self.prompt_len + start :].tolist(),
            cumulative_logprob=output.cumulative_logprob if wants else None,
            logprobs=None if output.logprobs is None else output.logprobs[start:],
            finish_reason=self.finish_reason,
            stop_reason=output.stop_reason,
        )


@dataclass(frozen=True, slots=True)
class Submission:
    """Holds what a caller asked for: a prompt with its samples, each a request of its own to the
    engine. `asked`: what `Intake` made it from.
    """

    id: str
    prompt: str | None
    samples: tuple[Request, ...]
    lora_request: LoRARequest | None = None
    asked: Asked | None = None
    _prompt_token_ids: list[int] = field(default_factory=list, compare=False, repr=False)

    @property
    def prompt_token_ids(self) -> list[int]:
        """Returns the tokens of the prompt, the same list to all outputs: to make one of a long
        prompt takes longer than a step of the engine.
        """
        if not self._prompt_token_ids:
            first = self.samples[0]
            self._prompt_token_ids.extend(first.tokens[: first.prompt_len])
        return self._prompt_token_ids

    @property
    def number(self) -> int:
        """Returns the number that `Intake` gave it."""
        return self._asked.number

    @property
    def _asked(self) -> Asked:
        if self.asked is None:
            raise RuntimeError(f"submission {self.id} does not say what it was made from")
        return self.asked

    def to_json(self) -> dict[str, Any]:
        """Returns what `Intake.again` makes the same submission of in another process."""
        adapter = self.samples[0].draw.adapter
        return self._asked.to_json(self.prompt, self.prompt_token_ids, self.lora_request, adapter)

    @property
    def is_finished(self) -> bool:
        return None not in [request.finish_reason for request in self.samples]

    @property
    def is_scored(self) -> bool:
        """Tells whether the first sample has all log-probabilities of the prompt that are asked
        for. Others may be ahead of it: a cached prefix spares them the prompt. What they have
        waits, so that the first output has them.
        """
        first, scored = self.samples[0], self.samples[0].output.prompt_logprobs
        return scored is None or len(scored) == first.prompt_len or first.finish_reason is not None

    def output(self) -> RequestOutput:
        """Returns everything so far."""
        completions = [request.completion() for request in self.samples]
        return self._output(completions, self.samples[0].output.prompt_logprobs)

    def new_output(self) -> RequestOutput | None:
        """Returns what is new since the last call, of the samples that have something new; None if
        there is nothing.
        """
        if not self.is_scored:
            return None
        changed = [
            r
            for r in self.samples
            if r.num_new > r.output.num_given or (r.finish_reason and not r.output.is_given)
        ]
        if not changed:
            return None
        first = self.samples[0]
        begins = first in changed and not first.output.num_given
        prompt_logprobs = first.output.prompt_logprobs if begins else None
        is_rest = len(changed) < len(self.samples) or any(r.output.num_given for r in changed)
        for request in changed:
            request.output.is_given = request.finish_reason is not None
        output = self._output([request.new_completion() for request in changed], prompt_logprobs)
        output.is_rest = is_rest
        return output

    def _output(
        self,
        completions: list[CompletionOutput],
        prompt_logprobs: list[dict[int, Logprob] | None] | None,
    ) -> RequestOutput:
        first = self.samples[0]
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=completions,
            finished=self.is_finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=first.record.num_cached,
            metrics=first.metrics(),
            lora_request=self.lora_request,
        )
