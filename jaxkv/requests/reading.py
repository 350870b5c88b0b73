"""Reads prompts: from texts, token ids and conversations to the tokens that a model and an engine
have room for, and back to text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from threading import RLock
from typing import Any, TypeVar

import numpy as np

from jaxkv.build.model import Model
from jaxkv.config import EngineConfig, are_plain, is_int
from jaxkv.programs.process import check_process
from jaxkv.requests.chats import Chats
from jaxkv.requests.contents import RefusedChatError, read_messages
from jaxkv.requests.pooling import PoolingParams
from jaxkv.requests.prompts import Pair, Prompt, parse
from jaxkv.requests.text import longest_token

T = TypeVar("T")

MAX_CONTEXT = "This model's maximum context length is"
"""OpenAI's words, by which clients know that they should cut the prompt."""

MOST_AT_ONCE = 2**18
"""Characters or tokens that `tokens_of` takes however few of them the context has room for: other
prompts wait meanwhile, under a second for so many.
"""

CHARS_PER_TOKEN = 8
"""Above it `tokens_of` takes so many for each token of the context."""

PIECE_CHARS, SPARE_TOKENS = 2**16, 64
"""Very long texts are looked at in pieces of so many characters, which may have so many tokens
more than they add to the whole.
"""

MOST_VALUES = 2**14
"""Objects, lists, texts and numbers that a conversation may have however few tokens the context has
room for, which is above it the limit: a template takes 5 us for each, in which steps are slower and
other prompts wait.
"""


class PromptReader:
    """Turns prompts into tokens for one model and engine, and tokens into text. `lock` is the
    engine's: a tokenizer is for one thread at a time.
    """

    def __init__(self, model: Model, config: EngineConfig, *, lock: RLock | None = None) -> None:
        self._model = model
        self._config = config
        self._own_lock = RLock() if lock is None else lock

    @property
    def _lock(self) -> RLock:
        """Returns the lock. Raises: RuntimeError in a fork, where nobody may be left to give it
        up.
        """
        check_process()
        return self._own_lock

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

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text that goes on with another one, so without special tokens.
        Raises: ValueError as `accept` does.
        """
        with self._lock:
            return self._encode(text, add_special_tokens=False)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of tokens. Raises: ValueError without a tokenizer."""
        tokenizer = self._model.tokenizer
        if tokenizer is None:
            raise ValueError("text: expected a tokenizer, got skip_tokenizer_init=True")
        with self._lock:
            return tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)

    def render(
        self,
        conversations: Sequence[Any],
        extra: Mapping[str, Any] | None = None,
        content_format: str = "auto",
        *,
        effort: str | None = None,
        any_length: bool = False,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """Renders token prompts of conversations by the chat template, which gets `extra` as well
        as `options`, and contents in a form of `requests.contents.FORMATS`. effort: how much the
        model reasons, as `Chats` takes it. any_length: also those that the context has no room for,
        as `tokens_of` takes them.

        Raises: ValueError naming every bad index, or what `extra` says that is said elsewhere.
        """
        self._check_num_values("tools", options.get("tools"))
        self._check_num_values("chat_template_kwargs", extra)
        chats = Chats(self._model.tokenizer, extra, options, content_format, effort)
        encode = partial(self._encode_any if any_length else self._encode, add_special_tokens=False)

        def rendered(messages: Any) -> dict[str, Any]:
            messages = read_messages(messages)  # of arguments in JSON each value counts
            self._check_num_values("messages", messages)
            with self._lock:
                return chats.render(messages, encode)

        calls = [partial(rendered, messages) for messages in conversations]
        return of_each("conversation", calls, RefusedChatError)

    def render_pooled(
        self, prompts: Sequence[Prompt | Pair], params: Sequence[PoolingParams]
    ) -> list[dict[str, Any]]:
        """Renders token prompts of what `accept_pooling` takes, for it. Raises: ValueError as that
        does.
        """

        def render(prompt: Prompt | Pair, own: PoolingParams) -> dict[str, Any]:
            text, ids, salt = self.parse(self.pooled(prompt, own))
            return {"prompt": text, "prompt_token_ids": ids, "cache_salt": salt}

        with self._lock:
            asked = zip(prompts, params, strict=True)
            return of_each("prompt", [partial(render, *one) for one in asked])

    def pooled(self, prompt: Prompt | Pair, params: PoolingParams) -> Prompt:
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
        longest = most * self._longest_token
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

    @cached_property
    def _longest_token(self) -> float:
        """Returns the most characters that one token may stand for; 0 without a tokenizer."""
        tokenizer = self._model.tokenizer
        return 0.0 if tokenizer is None else longest_token(tokenizer)

    @property
    def eos_id(self) -> int | None:
        """Returns the token that ends texts, None without one: others may end them too."""
        return self._model.eos_id

    @property
    def has_tokenizer(self) -> bool:
        """Tells whether texts can be made of tokens, and tokens of texts."""
        return self._model.tokenizer is not None

    def _own_ids(self, ids: Sequence[Any] | np.ndarray) -> list[int]:
        """Returns a prompt's token ids as Python's numbers. Raises: ValueError as `accept` does."""
        tokens = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        if not are_plain(tokens):
            tokens = [i.item() if isinstance(i, np.integer) else i for i in tokens]
        check_ids("prompt", tokens, self._model.spec.vocab_size)
        return tokens

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
            if len(one) > self._most_at_once and not options.get("truncation"):
                self._check_pieces(one, self._model.tokenizer.encode)
        # What is too long is for the engine to say: a tokenizer's limit need not be the model's.
        return self._model.tokenizer.encode(text, *second, verbose=False, **options)

    def _encode_any(self, text: str, **options: Any) -> list[int]:
        """Returns the tokens of a text, which may be empty or longer than the context."""
        if self._model.tokenizer is None:
            raise ValueError("prompt: expected a tokenizer, got skip_tokenizer_init=True")
        _check_unicode(text)
        self._check_countable(len(text), "characters")
        return self._model.tokenizer.encode(text, verbose=False, **options)

    @property
    def _most_at_once(self) -> int:
        return max(MOST_AT_ONCE, CHARS_PER_TOKEN * self._config.max_model_len)

    def _check_countable(self, count: int, what: str) -> None:
        """Refuses what would take seconds only to be counted."""
        if count > (most := self._most_at_once):
            raise ValueError(f"the prompt has {count} {what}; expected at most {most}")

    def _check_pieces(self, text: str, encode: Callable[..., list[int]]) -> None:
        """Refuses a very long text once a part of it has too many tokens: all of it may take many
        seconds. Few texts have so many characters and fit, and those take twice as long.
        """
        limit, count = self._config.max_model_len, 0
        for start in range(0, len(text), PIECE_CHARS):
            piece = text[start : start + PIECE_CHARS]
            num_tokens = len(encode(piece, verbose=False, add_special_tokens=False))
            count += max(0, num_tokens - SPARE_TOKENS)
            if count > limit:
                raise ValueError(
                    f"the prompt has more than {count} tokens; expected at most {limit - 1}, so "
                    f"that one more fits into max_model_len={limit}. {MAX_CONTEXT} {limit} tokens"
                )

    def _check_num_values(self, name: str, given: Any) -> None:
        """Refuses what a template would take seconds for, and the context has no room for: each
        value is a token at least.
        """
        most = max(MOST_VALUES, limit := self._config.max_model_len)
        count, left = 0, [given]
        while left and count <= most:
            one = left.pop()
            count += 1
            if isinstance(one, Mapping):
                left.extend(one.values())
            elif isinstance(one, list | tuple):
                left.extend(one)
        if left:
            raise RefusedChatError(
                f"{name}: expected at most {most} objects, lists, texts and numbers in all, got "
                f"more. {MAX_CONTEXT} {limit} tokens"
            )

    def _check_characters(self, length: int) -> None:
        """Refuses what is certainly too long, since a tokenizer takes seconds for megabytes."""
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


def check_ids(what: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises ValueError for an id that is none. JAX gathers clamp silently, so every id is checked
    before it reaches the device.
    """
    if not ids or (are_plain(ids) and min(ids) >= 0 and max(ids) < vocab_size):
        return
    bad = [i for i in ids if not is_int(i) or not 0 <= i < vocab_size]
    if bad:
        raise ValueError(
            f"{what}: expected token ids from 0 to {vocab_size - 1}, got {bad[:5]!r:.200}"
        )


def of_each(
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
