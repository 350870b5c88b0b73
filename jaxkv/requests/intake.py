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
from typing import Any, TypeVar

import numpy as np

from jaxkv.build.model import Model
from jaxkv.config import PREFILL, BeamSearchParams, EngineConfig, SamplingParams, is_int
from jaxkv.holding.hold import Hold
from jaxkv.holding.prefix import PageChain, root_key
from jaxkv.holding.retention import Retention, check_served, full_pages, protecting
from jaxkv.kv.policies import Policy, resolve
from jaxkv.lora.request import LoRARequest
from jaxkv.ops.sampling import NUM_BIASES, NUM_STOP_TOKENS
from jaxkv.programs.process import check_process
from jaxkv.requests.adapters import AdapterFiles
from jaxkv.requests.beam import BeamSearch, num_candidates
from jaxkv.requests.chats import Chats
from jaxkv.requests.contents import RefusedChatError
from jaxkv.requests.grammar import Grammar, Grammars
from jaxkv.requests.masks import Word, encode_words
from jaxkv.requests.outputs import Logprob
from jaxkv.requests.pooling import PoolingParams
from jaxkv.requests.prompts import Pair, Prompt, are_plain, parse
from jaxkv.requests.request import Draw, Ends, Output, Request, Submission
from jaxkv.requests.text import TextStream, longest_token
from jaxkv.weights.adapters import Adapter

T = TypeVar("T")

MAX_CONTEXT = "This model's maximum context length is"
"""OpenAI's words, by which clients know that they should cut the prompt."""

MOST_AT_ONCE = 2**18
"""Characters or tokens that `tokens_of` takes however few of them the context has room for: other
prompts wait meanwhile, under a second for so many.
"""

CHARS_PER_TOKEN = 8
"""Above it `tokens_of` takes so many for each token of the context."""

Copies = dict[int, tuple[SamplingParams, Grammar | None] | ValueError]
"""By the `id` of what a call was given: a copy of the parameters with their grammar, or why they
are refused.
"""


class Intake:
    """Checks prompts and parameters against one model and engine, and numbers the submissions that
    pass.

    `cache_root` returns what stands now for all of the engine that a cached page depends on, and
    does not change under the lock. Without `share_prefixes` only the samples of one prompt share
    pages. `lock` is the engine's: a tokenizer is for one thread at a time.
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
    ) -> None:
        self._adapters = adapters
        self._model = model
        self._config = config
        self._cache_root = cache_root
        self.shares_prefixes = share_prefixes
        """Whether pages are found again by what they hold."""
        self._longest_token: float | None = None
        self._grammars: Grammars | None = None
        self._num_submitted = 0
        self._own_lock = RLock() if lock is None else lock

    @property
    def _lock(self) -> RLock:
        """Returns the lock. Raises: RuntimeError in a fork, where nobody may be left to give it
        up.
        """
        check_process()
        return self._own_lock

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

    def _read(self, requests: Sequence[LoRARequest | None]) -> list[Adapter | None]:
        """Reads the adapters of prompts before anybody's turn is taken for them. Raises: ValueError
        naming every bad index.
        """
        return _of_each("prompt", [partial(self.adapter_of, request) for request in requests])

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
        adapter: Adapter | None = None,
    ) -> Submission:
        prompt = self._pooled(prompt, params)
        submission = self._submission(prompt, PREFILL, 0, {}, number, adapter)
        submission.samples[0].output.reads_all = self._config.pooled != "last"
        return submission

    def render_pooled(
        self, prompts: Sequence[Prompt | Pair], params: Sequence[PoolingParams]
    ) -> list[dict[str, Any]]:
        """Renders token prompts of what `accept_pooling` takes, for it. Raises: ValueError as that
        does.
        """

        def render(prompt: Prompt | Pair, own: PoolingParams) -> dict[str, Any]:
            text, ids, salt = self.parse(self._pooled(prompt, own))
            return {"prompt": text, "prompt_token_ids": ids, "cache_salt": salt}

        with self._lock:
            asked = zip(prompts, params, strict=True)
            return _of_each("prompt", [partial(render, *one) for one in asked])

    def _pooled(self, prompt: Prompt | Pair, params: PoolingParams) -> Prompt:
        """Returns a prompt with as many tokens as are taken (-1: as the model takes), two texts as
        one.
        """
        most, longest = params.truncate_prompt_tokens, self._config.max_model_len
        if most is not None:
            most = longest if most == -1 else min(most, longest)
        if isinstance(prompt, Pair):
            return {"prompt_token_ids": self._pair(*prompt, most)}
        return prompt if most is None else self._truncated(prompt, most)

    def _truncated(self, prompt: Prompt, most: int) -> dict[str, Any]:
        """Returns the prompt with at most so many tokens."""
        text, ids, salt = parse(prompt)
        if ids is None:
            ids = self._encode(self._cut(text or "", most), truncation=True, max_length=most)
        return {"prompt": text, "prompt_token_ids": ids[:most], "cache_salt": salt}

    def _cut(self, text: str, most: int) -> str:
        """Cuts off what is certainly beyond so many tokens: a tokenizer takes seconds for
        megabytes.
        """
        if self._longest_token is None and self._model.tokenizer is not None:
            self._longest_token = longest_token(self._model.tokenizer)
        longest = most * (self._longest_token or 0)
        if len(text) <= longest:
            return text
        is_left = getattr(self._model.tokenizer, "truncation_side", "right") == "left"
        return text[-int(longest) :] if is_left else text[: int(longest)]

    def _pair(self, first: str, second: str, most: int | None) -> list[int]:
        """Returns the tokens of two texts as one prompt, as the tokenizer joins them, at most so
        many, cut as the tokenizer cuts. Raises: ValueError without a tokenizer, and for an empty
        text.
        """
        if most is None:
            return self._encode(first, second)
        first, second = self._cut(first, most), self._cut(second, most)
        return self._encode(first, second, truncation=True, max_length=most)[:most]

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
            made = _of_each("prompt", [partial(make, number, own) for number, (make, own) in each])
            self._num_submitted += len(made)
        return [replace(one, lora_request=lora) for one, lora in zip(made, loras, strict=True)]

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

    def render(
        self,
        conversations: Sequence[Any],
        extra: Mapping[str, Any] | None = None,
        content_format: str = "auto",
        *,
        any_length: bool = False,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """Renders token prompts of conversations by the chat template, which gets `extra` as well
        as `options`, and contents in a form of `requests.contents.FORMATS`. any_length: also those
        that the context has no room for, as `tokens_of` takes them.

        Raises: ValueError naming every bad index, or what `extra` says that is said elsewhere.
        """
        chats = Chats(self._model.tokenizer, extra, options, content_format)
        encode = partial(self._encode_any if any_length else self._encode, add_special_tokens=False)

        def rendered(messages: Any) -> dict[str, Any]:
            with self._lock:
                return chats.render(messages, encode)

        calls = [partial(rendered, messages) for messages in conversations]
        return _of_each("conversation", calls, RefusedChatError)

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
        return self._root(0, salt, context, adapter)

    def context_of(self, max_len: int) -> int:
        """Returns what pages depend on of how long their request may get."""
        return self._model.spec.context_of(min(max_len, self._config.max_model_len))

    @property
    def depends_on_context(self) -> bool:
        """Tells whether pages depend on how long their request may get."""
        return self._model.spec.depends_on_context

    @property
    def eos_id(self) -> int | None:
        """Returns the token that ends texts, None without one: others may end them too."""
        return self._model.eos_id

    @property
    def has_tokenizer(self) -> bool:
        """Tells whether texts can be made of tokens, and tokens of texts."""
        return self._model.tokenizer is not None

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, without special ones. Raises: ValueError without a
        tokenizer.
        """
        tokenizer = self._model.tokenizer
        if tokenizer is None:
            raise ValueError("text: expected a tokenizer, got skip_tokenizer_init=True")
        with self._lock:
            return tokenizer.decode(tokens, skip_special_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text that goes on with another one, so without special tokens.
        Raises: ValueError as `accept` does.
        """
        with self._lock:
            return self._encode(text, add_special_tokens=False)

    def tokens_of(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the tokens of a prompt that may be empty, or longer than the context, to count
        them. Raises: ValueError for one that is no prompt, or of very many characters or tokens.
        """
        with self._lock:
            text, ids, _ = parse(prompt)
            if ids is None:
                return self._encode_any(text or "", add_special_tokens=add_special_tokens)
            self._check_countable(len(ids), "tokens")
            return self._own_ids(ids)

    def parse(self, prompt: Prompt, room: int = 1) -> tuple[str | None, list[int], str]:
        """Returns (text, token ids, cache_salt) of a prompt that leaves room for so many tokens.
        Raises: ValueError as `accept` does.
        """
        text, ids, salt = parse(prompt)
        if ids is None:
            with self._lock:
                ids = self._encode(text or "")
        # Before anything is done for each: it may be a million.
        self._check_length(len(ids), room)
        return text, self._own_ids(ids), salt

    def _own_ids(self, ids: Sequence[Any] | np.ndarray) -> list[int]:
        """Returns a prompt's token ids as Python's numbers. Raises: ValueError as `accept` does."""
        tokens = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        if not are_plain(tokens):
            tokens = [i.item() if isinstance(i, np.integer) else i for i in tokens]
        self._check_ids("prompt", tokens)
        return tokens

    def _root(self, number: int, salt: str, context: int, adapter: Adapter | None) -> bytes:
        """Returns what the page keys of a submission begin with."""
        shared = "shared" if self.shares_prefixes else str(number)
        own = () if adapter is None else (adapter.digest.hex(),)
        return root_key(self._cache_root(), shared, salt, str(context), *own)

    def _search(
        self, prompt: Prompt, params: BeamSearchParams, number: int, adapter: Adapter | None = None
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
        submission = self._submission(prompt, of_beam, 0, {}, number, adapter, width)
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
        adapter: Adapter | None = None,
        num_samples: int | None = None,
    ) -> Submission:
        """Makes a submission. `copies`: the copies of parameters that this call has made."""
        if not is_int(priority):
            raise ValueError(f"priority: expected a whole number, got {priority!r}")
        made = self._copy(params, copies)
        if isinstance(made, ValueError):
            raise made
        params, grammar = made
        text, tokens, salt = self.parse(prompt)
        stop_ids = self._stop_ids(params)
        self._check_logprobs(params, len(tokens))
        bad_words = self._processing(params, stop_ids | {self._model.eos_id})
        retention = self._retention(params, len(tokens))
        max_len, at_max_len = self._limit(len(tokens), params, retention)
        root = self._root(number, salt, self._model.spec.context_of(max_len), adapter)
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
                    adapter=adapter,
                ),
                ends=ends,
                output=Output(
                    text=self._text_stream(tokens, params),
                    logprobs=None if params.logprobs is None else [],
                    prompt_logprobs=_unscored(params) if not sample else None,
                ),
                hold=Hold(PageChain(root, secret=self._cache_root()), len(tokens), retention),
                priority=priority,
            )
            for sample in range(num_samples)
        )
        return Submission(str(number), text, samples)

    def _copy(
        self, params: SamplingParams, copies: Copies
    ) -> tuple[SamplingParams, Grammar | None] | ValueError:
        """Returns a copy of parameters, whose fields may be assigned while the request runs, with
        their grammar; or why they are refused. It costs 50 us and more: once for all of a call.
        """
        if id(params) not in copies:
            try:
                copies[id(params)] = self._copied(params)
            except ValueError as error:
                copies[id(params)] = error
        return copies[id(params)]

    def _copied(self, params: SamplingParams) -> tuple[SamplingParams, Grammar | None]:
        if not isinstance(params, SamplingParams):
            raise ValueError(
                f"sampling_params: expected SamplingParams, got {type(params).__name__}"
            )
        own = params.clone()
        asked = own.structured_outputs
        return own, None if asked is None else self.grammars().compile(asked)

    def grammars(self) -> Grammars:
        """Returns what compiles grammars for the model's tokenizer. Raises: ValueError if none
        can be.
        """
        with self._lock:
            if self._grammars is None:
                model = self._model
                self._grammars = Grammars(model.tokenizer, model.spec.vocab_size, model.eos_ids)
            return self._grammars

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        own_stops = params.stop_token_ids or ()
        self._check_ids("stop_token_ids", own_stops)
        stop_ids = frozenset(own_stops) | (
            frozenset() if params.ignore_eos else self._model.eos_ids
        )
        if len(stop_ids) > NUM_STOP_TOKENS:
            raise ValueError(
                f"stop_token_ids: expected at most {NUM_STOP_TOKENS} with the model's own, got "
                f"{len(stop_ids)}"
            )
        if params.stop_strings and self._model.tokenizer is None:
            raise ValueError(
                "stop: expected a tokenizer for stop strings, got skip_tokenizer_init=True"
            )
        return stop_ids

    def _limit(
        self, prompt_len: int, params: SamplingParams, retention: Retention | None
    ) -> tuple[int, str]:
        """Returns the most tokens of prompt and output together, and the finish_reason of a request
        that reaches them.
        """
        config = self._config
        # What is pooled ends with a token that nobody draws or stores.
        num_unstored = int(bool(config.pooled))
        wanted = config.max_model_len + num_unstored
        if params.max_tokens is not None:
            wanted = min(wanted, prompt_len + params.max_tokens)
        if retention is not None:
            return wanted, "length"
        longest = min(config.num_pages, config.table_width) * config.block_size
        if config.has_windows:
            longest = config.max_len
        longest += num_unstored
        if prompt_len >= longest and 0 < config.row_pages < config.num_pages:
            raise ValueError(
                f"the prompt has {prompt_len} tokens; with kv_policy {config.kv_policy} of LLM a "
                f"row has {config.row_pages} pages of {config.block_size}, which hold {longest} of "
                f"a request that drops none: raise kv_budget of LLM, or leave kv_policy='full' out"
            )
        if prompt_len >= longest:
            raise ValueError(
                f"the prompt has {prompt_len} tokens; the KV cache holds {longest} of one request "
                f"in all ({config.num_pages} pages of {config.block_size}, kv_policy "
                f"{config.kv_policy}): raise kv_cache_memory_bytes or num_gpu_blocks_override, or "
                f"have a kv_policy"
            )
        return min(wanted, longest), "length" if wanted <= longest else "capacity"

    def _retention(self, params: SamplingParams, prompt_len: int) -> Retention | None:
        """Returns what bounds the request's cache: its own policy or the engine's, in its own
        budget or the engine's.

        Raises: ValueError for what the engine, as it was made, cannot do.
        """
        config = self._config
        name = config.kv_policy if params.kv_policy is None else params.kv_policy
        policy = resolve(name)
        check_served(policy, resolve(config.kv_policy))
        if not isinstance(policy, Policy):
            for field in ("kv_budget", "kv_protect"):
                if (got := getattr(params, field)) is not None:
                    raise ValueError(f"{field}: expected None with kv_policy {name}, got {got!r}")
            return None
        pages = config.row_pages
        if params.kv_budget is not None or not pages:
            pages = full_pages(policy, params.kv_budget, page_size=config.block_size)
            pages = min(pages, -(-config.max_model_len // config.block_size))
            if config.has_windows:  # no query sees more than a table's width
                pages = min(pages, config.table_width)
        most = min(config.table_width, config.num_pages // len(config.windows))
        if pages > most:
            held = f"{most} pages of {config.block_size} tokens in full precision"
            raise ValueError(
                f"kv_budget: expected what a row of this engine may hold ({held}), got {pages} "
                f"pages"
            )
        low = 0
        if policy.low and config.row_pages:
            low = config.low_row_pages * pages // config.row_pages
        retention = Retention(
            policy=policy, page_size=config.block_size, full_pages=pages, low_pages=low
        )
        return protecting(retention, params.kv_protect or (), prompt_len)

    def _check_logprobs(self, params: SamplingParams, prompt_len: int) -> None:
        if (start := params.prompt_logprobs_start) >= prompt_len:
            raise ValueError(
                f"prompt_logprobs_start: expected less than the prompt's {prompt_len} tokens, got "
                f"{start}"
            )
        size, most = self._model.spec.vocab_size, self._config.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name)
            if asked is not None and (size if asked == -1 else asked) > most:
                what = f"-1 (all {size} tokens)" if asked == -1 else asked
                raise ValueError(
                    f"{name}: expected at most {most}, got {what}; raise max_logprobs of LLM "
                    f"(-1: all)"
                )

    def _processing(self, params: SamplingParams, ends: frozenset[int | None]) -> tuple[Word, ...]:
        """Checks what changes the logits. Returns the tokens of the bad words. `ends` are out of
        reach at first where min_tokens is given.
        """
        bias, allowed = params.logit_bias or {}, params.allowed_token_ids
        self._check_ids("logit_bias", list(bias))
        if len(bias) > NUM_BIASES:
            raise ValueError(f"logit_bias: expected at most {NUM_BIASES} tokens, got {len(bias)}")
        self._check_ids("allowed_token_ids", allowed or ())
        if params.bad_words and self._model.tokenizer is None:
            raise ValueError(
                "bad_words: expected a tokenizer for bad words, got skip_tokenizer_init=True"
            )
        words = encode_words(self._model.tokenizer, params.bad_words or ())
        self._check_ids("bad_words", [token for word in words for token in word])
        out_of_reach = {word[-1] for word in words} | (ends if params.min_tokens else set())
        if allowed is not None and not set(allowed) - out_of_reach:
            raise ValueError(
                f"allowed_token_ids: expected at least one that ends no bad word and, with "
                f"min_tokens, no request, got {allowed}"
            )
        return words

    def _encode(self, text: str, *second: str, **options: Any) -> list[int]:
        """Returns the tokens of a text, or of two as one prompt. Raises: ValueError."""
        if self._model.tokenizer is None:
            raise ValueError(
                'expected {"prompt_token_ids": [...]} with skip_tokenizer_init=True, got a text'
            )
        for one in (text, *second):
            if not one:
                raise ValueError("the prompt is empty; expected at least one token")
            _check_unicode(one)
            if len(one) > self._config.max_model_len:
                self._check_characters(len(one))
        # What is too long is for the engine to say: a tokenizer's limit need not be the model's.
        return self._model.tokenizer.encode(text, *second, verbose=False, **options)

    def _encode_any(self, text: str, **options: Any) -> list[int]:
        """Returns the tokens of a text, which may be empty or longer than the context."""
        if self._model.tokenizer is None:
            raise ValueError("prompt: expected a tokenizer, got skip_tokenizer_init=True")
        _check_unicode(text)
        self._check_countable(len(text), "characters")
        return self._model.tokenizer.encode(text, verbose=False, **options)

    def _check_countable(self, count: int, what: str) -> None:
        """Refuses what would take seconds only to be counted."""
        most = max(MOST_AT_ONCE, CHARS_PER_TOKEN * self._config.max_model_len)
        if count > most:
            raise ValueError(f"the prompt has {count} {what}; expected at most {most}")

    def _check_characters(self, length: int) -> None:
        """Refuses what is certainly too long, since a tokenizer takes seconds for megabytes."""
        if self._longest_token is None:
            self._longest_token = longest_token(self._model.tokenizer)
        limit = self._config.max_model_len
        if length > (most := self._longest_token * limit):
            raise ValueError(
                f"the prompt has {length} characters, more than {limit} tokens can have "
                f"({most:.0f}); expected at most {limit - 1} tokens, so that one more fits into "
                f"max_model_len={limit}. {MAX_CONTEXT} {limit} tokens"
            )

    def _check_length(self, length: int, room: int) -> None:
        pools, longest = self._config.pooled, self._config.max_model_len
        if not length:
            raise ValueError("the prompt is empty; expected at least one token")
        if pools and length > longest:
            raise ValueError(
                f"the prompt has {length} tokens; expected at most max_model_len={longest}, or "
                f"truncate_prompt_tokens. {MAX_CONTEXT} {longest} tokens"
            )
        if not pools and length > longest - room:
            raise ValueError(
                f"the prompt has {length} tokens; expected at most {longest - 1}, so that one more "
                f"fits into max_model_len={longest}. {MAX_CONTEXT} {longest} tokens"
            )

    def _check_ids(self, what: str, ids: Sequence[int]) -> None:
        # JAX gathers clamp silently, so every id is checked here, before it reaches the device.
        size = self._model.spec.vocab_size
        if not ids or (are_plain(ids) and min(ids) >= 0 and max(ids) < size):
            return
        bad = [i for i in ids if not is_int(i) or not 0 <= i < size]
        if bad:
            raise ValueError(
                f"{what}: expected token ids from 0 to {size - 1}, got {bad[:5]!r:.200}"
            )

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


def _of_each(
    what: str, calls: Sequence[Callable[[], T]], refusal: type[ValueError] = ValueError
) -> list[T]:
    """Returns what the calls for each prompt or conversation return. Raises: ValueError naming
    every index that is refused.
    """
    made: list[T] = []
    problems = []
    for index, call in enumerate(calls):
        try:
            made.append(call())
        except refusal as error:
            problems.append(f"{what} {index}: {error}")
    if problems:
        raise ValueError("\n".join(problems))
    return made


def _check_unicode(text: str) -> None:
    """Raises ValueError for half of a surrogate pair, for which tokenizers raise their own."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is not valid Unicode: {error}") from error


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
