"""The front door: from what people write to a `Request`, or one clear ValueError and nothing else
changed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from functools import partial
from threading import RLock
from typing import Any

import numpy as np

from jaxkv.build.model import Model
from jaxkv.config import PREFILL, BeamSearchParams, EngineConfig, SamplingParams, is_int
from jaxkv.errors import CheckpointError
from jaxkv.holding.hold import Hold
from jaxkv.holding.prefix import PageChain, root_key
from jaxkv.lora.request import LoRARequest
from jaxkv.programs.process import check_process
from jaxkv.requests import checks
from jaxkv.requests.adapters import AdapterFiles
from jaxkv.requests.asked import Asked, Params, params_of
from jaxkv.requests.beam import BeamSearch, num_candidates
from jaxkv.requests.grammar import BehindReasoning, Grammar, Grammars, marks_of
from jaxkv.requests.outputs import Logprob
from jaxkv.requests.pooling import PoolingParams
from jaxkv.requests.prompts import Pair, Prompt
from jaxkv.requests.reading import PromptReader, of_each
from jaxkv.requests.request import Draw, Ends, Output, Request, Submission
from jaxkv.requests.text import TextStream
from jaxkv.requests.thinking import Bounds, Thinking, bounds_of
from jaxkv.weights.adapters import Adapter

Copied = tuple[SamplingParams, Grammar | None, Bounds | None]
"""A copy of parameters, with their grammar and what bounds the reasoning of an answer."""

Copies = dict[int, Copied | ValueError]
"""By the `id` of what a call was given, what was made of it, or why it is refused."""


class Intake(PromptReader):
    """Checks prompts and parameters against one model and engine, and numbers the submissions that
    pass.

    `cache_root` returns what stands now for all of the engine that a cached page depends on, and
    does not change under the lock. `agree`, of an engine of several processes, raises ValueError
    for an adapter that not all of them have. Without `share_prefixes` only the samples of one
    prompt share pages. reasoning: the texts around what the model reasons, where a request does not
    say.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        *,
        cache_root: Callable[[], bytes],
        share_prefixes: bool,
        lock: RLock | None = None,
        adapters: AdapterFiles | None = None,
        agree: Callable[[LoRARequest, Adapter], None] | None = None,
        reasoning: tuple[str, str] | None = None,
    ) -> None:
        super().__init__(model, config, lock=lock)
        self._reasoning = reasoning
        self._adapters, self._agree = adapters, agree
        self._cache_root = cache_root
        self.shares_prefixes = share_prefixes
        """Whether pages are found again by what they hold."""
        self._grammars: Grammars | None = None
        self._num_submitted = 0

    def accept(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        priorities: Sequence[int] | None = None,
        lora_requests: Sequence[LoRARequest | None] | None = None,
    ) -> list[Submission]:
        """Makes one submission per prompt; lower priorities go first. lora_requests: the adapter of
        each, None for none.

        Raises: ValueError naming every bad index, with nothing numbered.
        """
        self._check_generates()
        priorities = [0] * len(prompts) if priorities is None else priorities
        asked = zip(prompts, params, priorities, strict=True)
        copies: Copies = {}
        for one in params:  # before anybody's turn is taken for them: some grammars take seconds
            self._copy(one, copies)
        return self._make([partial(self._submission, *one, copies) for one in asked], lora_requests)

    def adapter_of(self, request: LoRARequest | None) -> Adapter | None:
        """Returns the adapter of a request, read from its files where it is not kept. Any thread
        may ask. Raises: ValueError.
        """
        if request is None:
            return None
        if self._adapters is None:
            raise ValueError("lora_request: expected None of an engine without adapters")
        return self._adapters.get(request)

    def agreed_adapter_of(self, request: LoRARequest | None) -> Adapter | None:
        """Does what `adapter_of` does, and has all processes of the engine read it. Where requests
        are made only. Raises: ValueError, also where another one reads none or another one.
        """
        adapter = self.adapter_of(request)
        if self._agree is not None and request is not None and adapter is not None:
            self._agree(request, adapter)
        return adapter

    def same_adapter(self, lora: Sequence[Any], digest: str) -> Adapter | None:
        """Reads the adapter that another process has read, as `asked.adapter_to_json` names it.
        Raises: ValueError for another one.
        """
        adapter = self.adapter_of(LoRARequest(*lora))
        if adapter is not None and adapter.digest.hex() != digest:
            raise CheckpointError(
                f"{lora[-1]}: expected the adapter that the first process has read (SHA-256 "
                f"{digest}), got {adapter.digest.hex()}"
            )
        return adapter

    def _read(self, requests: Sequence[LoRARequest | None]) -> list[Adapter | None]:
        """Reads the adapters of prompts before anybody's turn is taken for them. Raises: ValueError
        naming every bad index.
        """
        return of_each("prompt", [partial(self.agreed_adapter_of, one) for one in requests])

    def accept_searches(
        self,
        prompts: Sequence[Prompt],
        params: BeamSearchParams,
        lora_requests: Sequence[LoRARequest | None] | None = None,
    ) -> list[Submission]:
        """Makes one submission per prompt, whose samples are the beams of its search. Raises:
        ValueError as `accept` does.
        """
        self._check_generates()
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"params: expected BeamSearchParams, got {type(params).__name__}")
        makers = [partial(self._search, prompt, params) for prompt in prompts]
        return self._make(makers, lora_requests)

    def accept_pooling(
        self,
        prompts: Sequence[Prompt | Pair],
        params: Sequence[PoolingParams],
        lora_requests: Sequence[LoRARequest | None] | None = None,
    ) -> list[Submission]:
        """Makes one submission per prompt, of whose hidden states a vector is made. Raises:
        ValueError as `accept` does, and for a model that generates.
        """
        if not self._config.pooled:
            raise ValueError('expected LLM(runner="pooling"), got a model that generates')
        makers = [partial(self._pooling, *one) for one in zip(prompts, params, strict=True)]
        return self._make(makers, lora_requests)

    def _pooling(
        self,
        prompt: Prompt | Pair,
        params: PoolingParams,
        number: int,
        adapter: Adapter | None,
    ) -> Submission:
        prompt = self.pooled(prompt, params)
        submission = self._submission(prompt, PREFILL, 0, {}, number, adapter, asked=params)
        submission.samples[0].output.reads_all = self._config.pooled != "last"
        return submission

    def _check_generates(self) -> None:
        if self._config.pooled:
            raise ValueError(
                "expected a model that generates, got one that pools: embed, classify, score and "
                'reward are its calls; LLM(runner="generate") generates'
            )

    def _make(
        self,
        makers: Sequence[Callable[[int, Adapter | None], Submission]],
        lora_requests: Sequence[LoRARequest | None] | None,
    ) -> list[Submission]:
        check_process()
        loras = [None] * len(makers) if lora_requests is None else lora_requests
        adapters = self._read(loras)
        with self._lock:
            each = enumerate(zip(makers, adapters, strict=True), self._num_submitted)
            made = of_each("prompt", [partial(make, number, own) for number, (make, own) in each])
            self._num_submitted += len(made)
        return [replace(one, lora_request=lora) for one, lora in zip(made, loras, strict=True)]

    def again(self, message: Mapping[str, Any]) -> Submission:
        """Makes the submission that another process has made, of what `Asked.to_json` says of it:
        with the same number, and so the same seeds. Raises: as `accept`.
        """
        prompt, params, priority = message["prompt"], params_of(message), message["priority"]
        lora, adapter, number = None, None, message["number"]
        if message["lora"] is not None:
            lora, adapter = LoRARequest(*message["lora"][0]), self.same_adapter(*message["lora"])
        if isinstance(params, SamplingParams) and params.structured_outputs is not None:
            # All processes go on with it, however long it takes in one of them.
            self.grammars().compile(params.structured_outputs, is_tried=True)
        with self._lock:
            if isinstance(params, BeamSearchParams):
                made = self._search(prompt, params, number, adapter)
            elif isinstance(params, PoolingParams):
                made = self._pooling(prompt, params, number, adapter)
            else:
                made = self._submission(prompt, params, priority, {}, number, adapter)
        return replace(made, lora_request=lora)

    def apart(self) -> Intake:
        """Returns one for another thread, with a tokenizer and a lock of its own. It is for tokens
        of prompts, and what sessions know of them; this one makes submissions.
        """
        other, tokenizer = copy(self), deepcopy(self._model.tokenizer)
        # Weights that are replaced or put to sleep must not stay here.
        other._model = replace(
            self._model, tokenizer=tokenizer, weights={}, pooling=None, draft=None
        )
        other._own_lock = RLock()
        return other

    def page_keys(
        self, tokens: Sequence[int], salt: str, adapter: Adapter | None
    ) -> Sequence[bytes]:
        """Returns what the full pages of these tokens are found by, where requests may get as long
        as the engine allows.
        """
        size, longest = self._config.block_size, self._config.max_model_len
        chain = PageChain(self.page_root(salt, adapter, self.context_of(longest)))
        chain.pages(0, len(tokens) // size, array("i", tokens), size)
        return chain.keys

    def page_root(self, salt: str, adapter: Adapter | None, context: int) -> bytes:
        """Returns what keys of pages begin with, which may depend on the context (`context_of`)."""
        return root_key(self._cache_root(), *self._parts(0, salt, context, adapter))

    def context_of(self, max_len: int) -> int:
        """Returns what pages depend on of how long their request may get."""
        return self._model.spec.context_of(min(max_len, self._config.max_model_len))

    @property
    def depends_on_context(self) -> bool:
        """Tells whether pages depend on how long their request may get."""
        return self._model.spec.depends_on_context

    def _parts(
        self, number: int, salt: str, context: int, adapter: Adapter | None
    ) -> tuple[str, ...]:
        """Returns what the page keys of a submission begin with, beside the secret."""
        shared = "shared" if self.shares_prefixes else str(number)
        own = () if adapter is None else (adapter.digest.hex(),)
        return (shared, salt, str(context), *own)

    def _search(
        self, prompt: Prompt, params: BeamSearchParams, number: int, adapter: Adapter | None
    ) -> Submission:
        config, width = self._config, params.beam_width
        eos_ids = frozenset() if params.ignore_eos else self._model.eos_ids
        wanted = min(num_candidates(width, len(eos_ids)), self._model.spec.vocab_size)
        if wanted > config.max_logprobs:
            raise ValueError(
                f"beam_width: {width} beams need the {wanted} likeliest tokens of each, and "
                f"max_logprobs of LLM is {config.max_logprobs}: raise it (-1: all)"
            )
        if width > config.max_num_seqs:
            raise ValueError(
                f"beam_width: expected at most max_num_seqs={config.max_num_seqs}, got {width}"
            )
        # A beam ends when its search says so, not at an end token.
        of_beam = SamplingParams(
            temperature=0.0,
            max_tokens=params.max_tokens,
            ignore_eos=True,
            logprobs=wanted,
            detokenize=False,
        )
        submission = self._submission(
            prompt, of_beam, 0, {}, number, adapter, num_samples=width, asked=params
        )
        first = submission.samples[0]
        length = min(first.prompt_len + params.max_tokens, config.max_model_len)
        retention = first.hold.retention
        held = length if retention is None else min(length, retention.limit)
        of_one = -(-held // config.block_size)
        needed = width * config.row_pages_for(of_one)
        if needed > config.num_pages:
            raise ValueError(
                f"beam_width: {width} beams of {length} tokens may need {needed} pages, the KV "
                f"cache has {config.num_pages}: raise kv_cache_memory_bytes or "
                f"num_gpu_blocks_override"
            )
        search = BeamSearch(
            width,
            max_new=length - first.prompt_len,
            eos_ids=eos_ids,
            length_penalty=params.length_penalty,
        )
        link(submission.samples, search)
        return submission

    def _submission(
        self,
        prompt: Prompt,
        params: SamplingParams,
        priority: int,
        copies: Copies,
        number: int,
        adapter: Adapter | None,
        *,
        num_samples: int | None = None,
        asked: Params | None = None,
    ) -> Submission:
        """Makes a submission. `copies`: the copies of parameters that this call has made. asked:
        what the caller gave, where that is not these parameters.
        """
        if not is_int(priority):
            raise ValueError(f"priority: expected a whole number, got {priority!r}")
        made = self._copy(params, copies)
        if isinstance(made, ValueError):
            raise made
        params, grammar, bounds = made
        text, tokens, salt = self.parse(prompt)
        thinking: Thinking | None = None
        if bounds is not None or isinstance(grammar, BehindReasoning):
            whole = self.decode(tokens, skip_special_tokens=False) if text is None else text
            if isinstance(grammar, BehindReasoning):
                grammar = grammar.answering(whole)
            if bounds is not None:
                thinking = Thinking(bounds, tokens, whole, self._model.tokenizer)
        model, config, size = self._model, self._config, len(tokens)
        halts = frozenset[int]() if grammar is None else grammar.halts
        stop_ids = checks.stop_ids(params, model.eos_ids, model.spec.vocab_size, halts)
        checks.check_logprobs(params, model, config, size)
        bad_words = checks.processing(params, model, stop_ids | {model.eos_id})
        retention = checks.retention_of(params, config, size)
        max_len, at_max_len = checks.limit(params, config, size, retention)
        context = self._model.spec.context_of(max_len)
        chain = PageChain.begun(self._cache_root(), *self._parts(number, salt, context, adapter))
        num_samples = params.n if num_samples is None else num_samples
        seed = self._seed(params, number)
        ends = Ends(
            stop_ids=stop_ids,
            eos_id=None if params.ignore_eos else self._model.eos_id,
            ignored_eos=self._model.eos_id if params.ignore_eos else None,
            at_max_len=at_max_len,
        )
        samples = tuple(
            Request(
                id=str(number) if num_samples == 1 else f"{number}-{sample}",
                tokens=array("i", tokens),
                prompt_len=len(tokens),
                params=params,
                max_len=max_len,
                draw=Draw(
                    seed=seed,
                    sample=sample,
                    bad_words=bad_words,
                    grammar=None if grammar is None else grammar.copy(),
                    thinking=None if thinking is None else thinking.copy(),
                    adapter=adapter,
                ),
                ends=ends,
                output=Output(
                    text=self._text_stream(tokens, params),
                    logprobs=None if params.logprobs is None else [],
                    prompt_logprobs=_unscored(params) if not sample else None,
                ),
                hold=Hold(chain.copy(), len(tokens), retention),
                priority=priority,
            )
            for sample in range(num_samples)
        )
        source = Asked(number, params if asked is None else asked, priority, salt)
        return Submission(str(number), text, samples, asked=source)

    def _copy(self, params: SamplingParams, copies: Copies) -> Copied | ValueError:
        """Returns a copy of parameters, whose fields may be assigned while the request runs, with
        what follows from them; or why they are refused. It costs 50 us and more: once for all of a
        call.
        """
        if id(params) not in copies:
            try:
                copies[id(params)] = self._copied(params)
            except ValueError as error:
                copies[id(params)] = error
        return copies[id(params)]

    def _copied(self, params: SamplingParams) -> Copied:
        if not isinstance(params, SamplingParams):
            raise ValueError(
                f"sampling_params: expected SamplingParams, got {type(params).__name__}"
            )
        own = params.clone()
        asked, grammar = own.structured_outputs, None
        if asked is not None:
            grammar = self.grammars().compile(asked)
            if asked.reasoning is not None:
                with self._lock:
                    grammar = grammar.behind(marks_of(self._model.tokenizer, asked.reasoning))
        return own, grammar, self._bounds(own)

    def _bounds(self, params: SamplingParams) -> Bounds | None:
        """Returns what bounds the reasoning of an answer. Raises: ValueError where nobody says how
        this model marks it.
        """
        budget, form = params.thinking_token_budget, params.structured_outputs
        if budget in (None, -1):
            return None
        texts = params.reasoning or (None if form is None else form.reasoning) or self._reasoning
        if texts is None:
            raise ValueError(
                "thinking_token_budget: expected the texts around reasoning with it, as "
                'reasoning=("<think>", "</think>") or LLM(reasoning_config='
                '{"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"})'
            )
        with self._lock:
            return bounds_of(self._model.tokenizer, (texts[0], texts[1]), budget)

    def grammars(self) -> Grammars:
        """Returns what compiles grammars for the model's tokenizer. Raises: ValueError if none
        can be.
        """
        with self._lock:
            if self._grammars is None:
                model = self._model
                self._grammars = Grammars(model.tokenizer, model.spec.vocab_size, model.eos_ids)
            return self._grammars

    def _seed(self, params: SamplingParams, number: int) -> int:
        """Returns the request's own seed, or one that follows from the engine's and the number of
        the submission.
        """
        if params.seed not in (None, -1):
            return params.seed % 2**64
        high, low = np.random.SeedSequence([self._config.seed, number]).generate_state(2)
        return int(high) << 32 | int(low)

    def _text_stream(self, prompt: Sequence[int], params: SamplingParams) -> TextStream | None:
        tokenizer = self._model.tokenizer
        if tokenizer is None and params.stop_strings:
            raise ValueError(
                "stop: expected a tokenizer for stop strings, got skip_tokenizer_init=True"
            )
        if tokenizer is None or not params.detokenize:
            return None

        def decode(ids: Sequence[int]) -> str:
            return tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)

        return TextStream(
            decode,
            params.stop_strings,
            include_stop=params.include_stop_str_in_output,
            prompt=prompt,
        )


def _unscored(params: SamplingParams) -> list[dict[int, Logprob] | None] | None:
    """Returns the log-probabilities of a prompt before any is known: nothing precedes the first."""
    if params.prompt_logprobs is None:
        return None
    return [None] * max(1, params.prompt_logprobs_start)


def link(beams: tuple[Request, ...], search: BeamSearch) -> None:
    """Makes requests with one prompt the beams of one search."""
    for beam in beams:
        beam.search, beam.beams = search, beams
        beam.needs_host = True
        beam.is_plain = False
