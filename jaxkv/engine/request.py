"""A request on its way through the engine: host state only."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxkv.config import SamplingParams
from jaxkv.engine.allocator import KVHandle
from jaxkv.engine.outputs import CompletionOutput, Logprob, RequestOutput
from jaxkv.engine.text import TextStream


@dataclass(slots=True, eq=False)
class Request:
    """Tokens so far, what of them is in the KV state (`handle`), and the text made of the new ones.

    `max_len` bounds prompt and output together. `stop_ids` end it: the caller's, and unless ignore_eos the model's own,
    of which `eos_id` is the one that needs no stop_reason. `row` is its place in the row tables while it runs.
    `bad_words` are token ids of what must not come. `prompt_logprobs` grows with the prompt.
    """

    id: str
    prompt: str | None
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    seed: int
    max_len: int
    stop_ids: frozenset[int]
    eos_id: int | None
    text: TextStream | None
    bad_words: tuple[tuple[int, ...], ...] = ()
    handle: KVHandle = field(default_factory=KVHandle)
    row: int | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_given: int = 0

    @property
    def num_pending(self) -> int:
        """Tokens that are not in the KV state yet: 1 when decoding, more during prefill."""
        return len(self.tokens) - self.handle.length

    @property
    def num_left(self) -> int:
        """Tokens that it may still generate."""
        return self.max_len - len(self.tokens)

    @property
    def min_left(self) -> int:
        """Tokens that must come before a stop token may."""
        return max(0, self.params.min_tokens - (len(self.tokens) - self.prompt_len))

    @property
    def needs_host(self) -> bool:
        """Whether what may come next is made on the host from the token before it, so that no loop may run ahead."""
        return any(len(word) > 1 for word in self.bad_words)

    def output(self) -> RequestOutput:
        """Everything so far."""
        return self._output(self.text.text if self.text else "", 0)

    def new_output(self) -> RequestOutput:
        """What is new since the last call."""
        start, self.num_given = self.num_given, len(self.tokens) - self.prompt_len
        return self._output(self.text.take() if self.text else "", start)

    def _output(self, text: str, start: int) -> RequestOutput:
        completion = CompletionOutput(
            index=0,
            text=text,
            token_ids=self.tokens[self.prompt_len + start :],
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs[start:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=self.tokens[: self.prompt_len],
            outputs=[completion],
            finished=self.finish_reason is not None,
            prompt_logprobs=None if start else self.prompt_logprobs,
        )
