"""Holds what people get back, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from jaxkv.lora.request import LoRARequest


@dataclass(frozen=True, slots=True)
class Logprob:
    """Holds the natural-log probability of a token under the model's own distribution; rank 1 is
    the likeliest.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """Holds one completion. `finish_reason` is None while running, "stop" or "length" after,
    "capacity" where the KV cache holds no longer sequence ("abort" in a stream that an error
    elsewhere ended).

    `stop_reason` is the stop string or stop token id that ended it, None for the model's own end
    token or "length".
    `logprobs` has one dict per token: token id -> Logprob. In a stream, text, token_ids and
    logprobs are what is new. The fields behind `stop_reason` are vLLM's for what is not built here.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: None = None
    routed_experts: None = None
    sampling_mask: None = None
    spec_decode_metrics: None = None
    weight_versions: None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Tells when things happened to a request: Unix times, `time_in_queue` in seconds. None: it has
    not happened. vLLM's newer names are there too; its times with `_ts` count from another moment,
    so that only their differences are the same.

    preemptions: (when it gave its pages back, when it got some again) of each time that it was
    preempted.
    """

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    time_in_queue: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    preemptions: tuple[tuple[float, float | None], ...] = ()
    num_generation_tokens: int = 0

    @property
    def queued_ts(self) -> float:
        """Returns when it came."""
        return self.arrival_time

    @property
    def scheduled_ts(self) -> float | None:
        """Returns when it was first planned in a step."""
        return self.first_scheduled_time

    @property
    def first_token_ts(self) -> float | None:
        """Returns when its first token was there."""
        return self.first_token_time

    @property
    def last_token_ts(self) -> float | None:
        """Returns when its newest token was there."""
        return self.last_token_time

    @property
    def first_token_latency(self) -> float | None:
        """Returns the seconds until its first token."""
        first = self.first_token_time
        return None if first is None else first - self.arrival_time

    @property
    def num_preemptions(self) -> int:
        """Counts how often it gave its pages back."""
        return len(self.preemptions)


@dataclass(slots=True)
class RequestOutput:
    """Holds a request with its completions. `prompt` is None when token ids were given.

    `prompt_logprobs`, if asked for, has one entry per prompt token: None for the first, then token
    id -> Logprob. In a stream the first output has it. `num_cached_tokens` of the prompt (for n >
    1: the first sample's) came from the prefix cache. `metrics`: its times (for n > 1: the first
    sample's). The fields behind that are vLLM's for what is not built here, and None. `is_rest`: in
    a stream others with what came before have been given out.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = field(default=None, compare=False)
    lora_request: LoRARequest | None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    multi_modal_placeholders: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    num_cache_creation_tokens: None = None
    prompt_token_id_logprobs: None = None
    is_rest: bool = field(default=False, compare=False, repr=False)

    def _repr_html_(self) -> str:
        return RequestOutputs([self])._repr_html_()


class RequestOutputs(list[RequestOutput]):
    """Is the list of results that `LLM.generate` returns, which notebooks show as a table and a
    timeline.
    """

    def _repr_html_(self) -> str:
        from jaxkv.pictures.tables import outputs_html

        return outputs_html(self)


def new_since(output: RequestOutput, before: RequestOutput | None) -> RequestOutput:
    """Returns what is new in an output since another one of the same request: text, token_ids and
    logprobs of the completions that have something new, prompt_logprobs in the first.
    """
    if before is None:
        return output
    earlier = {one.index: one for one in before.outputs}
    changed = [_newer(one, earlier[one.index]) for one in output.outputs]
    outputs = [one for one in changed if one is not None]
    return replace(output, outputs=outputs, prompt_logprobs=None, is_rest=True)


def _newer(now: CompletionOutput, before: CompletionOutput) -> CompletionOutput | None:
    start = len(before.token_ids)
    if len(now.token_ids) == start and now.finish_reason == before.finish_reason:
        return None
    return replace(
        now,
        text=now.text[len(before.text) :],
        token_ids=now.token_ids[start:],
        logprobs=None if now.logprobs is None else now.logprobs[start:],
    )


@dataclass(slots=True)
class BeamSearchSequence:
    """Holds one of the sequences that a beam search found.

    `tokens` and `text` are prompt and output together, as in vLLM (text: None without a tokenizer).
    `cum_logprob` is the sum of the output's log-probabilities, not divided by its length.
    `logprobs` has one dict per output token: the likeliest tokens there. `finish_reason` is "stop"
    where an end token ended it (`stop_reason` is None for the model's own first one, else its id),
    else "length".
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """Holds the `beam_width` best sequences for one prompt, best first."""

    sequences: list[BeamSearchSequence]
