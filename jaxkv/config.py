"""Holds what people set: engine limits and sampling parameters, checked when made."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from enum import IntEnum
from numbers import Integral, Real
from typing import Any, TypeVar

import jaxlib.version

from jaxkv.structured import StructuredOutputsParams, are_marks

T = TypeVar("T")

PAGE_SIZES = (8, 16, 32, 64, 128)
TPU_PAGE_NBYTES = 2**18
"""A page of one layer has as many bytes on a TPU where 128 tokens do. The kernels start a DMA for
each page, which costs the same whatever it moves (docs/benchmarks/tpu_kernels.md).
"""
MAX_INT32 = 2**31 - 1
MAX_FLOAT32 = (2 - 2**-23) * 2.0**127
MIN_FLOAT32 = 2.0**-126
"""The smallest above 0 that devices do not flush to 0."""

MAX_LOG_POWER = 60.0
"""Natural logarithm of the largest power of a length: times any sum of log-probabilities it is
still a float32.
"""

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM: dividing by less would overflow."""


MAX_WORD_CHARS = 256
MAX_MARK_CHARS = 4096
"""The longest bad word: a tokenizer takes seconds for a text of a million characters, and the
engine waits for it.
"""


def _expect(ok: bool, name: str, expected: str, got: Any) -> None:
    if not ok:
        # Not all of it: whoever is refused megabytes need not be sent them back.
        raise ValueError(f"{name}: expected {expected}, got {got!r:.200}")


@dataclass(frozen=True, slots=True)
class Check:
    """Says of one value whether it is possible, and in words what is. `is_secret`: an error names
    the type of a value that is not, instead of the value.
    """

    expected: str
    holds: Callable[[Any], bool]
    is_secret: bool = False

    def __call__(self, name: str, value: Any) -> None:
        """Raises ValueError naming the field unless the value is possible."""
        if not self.holds(value):
            # Not all of it: whoever is refused megabytes need not be sent them back.
            got = type(value).__name__ if self.is_secret else f"{value!r:.200}"
            raise ValueError(f"{name}: expected {self.expected}, got {got}")


IS_BOOL = Check("True or False", lambda value: isinstance(value, bool))


def bfloat16_as_bits(platform: str) -> bool:
    """Tells whether arrays of bfloat16 are kept as uint16 bits on `platform`: on a CPU with jaxlib
    0.10.

    That XLA:CPU converts the whole operand of a bfloat16 gather, scatter or slice to float32 (37 ms
    against 12 for one decode attention over 32 rows x 1,024 tokens, 85 against 10 for a scan over
    12 layers' MLPs); a bitcast is cheap.
    """
    return platform == "cpu" and jaxlib.version.__version_info__ < (0, 11)


def tpu_page_size(token_nbytes: int) -> int:
    """Returns the tokens of a page on a TPU, where a token has so many bytes in a layer."""
    return 64 if 64 * token_nbytes >= TPU_PAGE_NBYTES else PAGE_SIZES[-1]


def is_int(value: Any) -> bool:
    """Tells whether it is an int that is not a bool (Python counts True as 1; no caller means
    that).
    """
    return isinstance(value, int) and not isinstance(value, bool)


def are_plain(ids: Sequence[Any]) -> bool:
    """Tells whether all are Python's ints, without a call for each: there may be many."""
    return set(map(type, ids)) <= {int}


def own(value: Any) -> Any:
    """Returns numpy's numbers as Python's, and copies of lists, which their givers may change."""
    if type(value) in (list, tuple):
        return type(value)(value if are_plain(value) else map(own, value))
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def one_or_several(name: str, given: Any, kind: type[T]) -> list[T]:
    """Returns one of a kind, or several, as a list. Raises: ValueError for anything else."""
    is_one = isinstance(given, (kind, str)) or not isinstance(given, Iterable)
    found = [given] if is_one else list(given)
    for one in found:
        if not isinstance(one, kind):
            raise ValueError(f"{name}: expected a {kind.__name__} or several, got {one!r:.80}")
    return found


def take_over(config: Any) -> None:
    """Makes the values of a frozen dataclass its `own`."""
    for field in fields(config):
        object.__setattr__(config, field.name, own(getattr(config, field.name)))


def _is_number(value: Any) -> bool:
    """Tells whether it is a finite number as the device knows it: float32."""
    return (is_int(value) or isinstance(value, float)) and abs(value) <= MAX_FLOAT32


@dataclass(frozen=True, kw_only=True, slots=True)
class Speculation:
    """Says how decode loops propose tokens ahead, `num_tokens` of them, and with how many rows at
    most. method: "ngram", as they came where the last `longest` tokens, or fewer but at least
    `shortest`, have come before (`ops.prompt_lookup`); "draft_model", as a smaller model draws them
    (`programs.draft`); "mtp", as a layer that the model ships for it draws them; or "eagle3", as
    one does that is trained for the model.
    """

    method: str
    num_tokens: int
    most_rows: int
    longest: int = 0
    shortest: int = 0

    @property
    def num_slots(self) -> int:
        """Counts the recurrent states of rows after all proposed tokens."""
        return self.num_tokens * self.most_rows

    @property
    def reads_text(self) -> bool:
        """Tells whether proposals are looked up in what rows have so far."""
        return self.method == "ngram"


NO_NUMBERS = ("kv_policy", "windows", "has_contexts", "pooled", "speculation")
"""These limits are of other kinds; all others are whole numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Limits of one engine. Lengths and budgets are in tokens, `block_size` is the tokens per page.

    Under a `kv_policy` a row holds at most `row_pages` pages and `low_row_pages` demoted ones;
    row_pages 0: as many as its length takes. A decoding query reads at most `read_pages` of each
    row; 0: all. A row has a page table for each of `windows`: the tokens that queries see of it at
    most, whose pages a row gives back when no later query sees them; 0: all tokens. What is left
    begins in a table at a multiple of `aligned_len` tokens. `has_contexts`: rotary embeddings
    depend on how long a row may get. `num_slots`: places for the recurrent state of a row, the
    first ones those of the rows, the last ones for states after proposed tokens; 0: the model has
    none. `num_adapters`: places for adapters on the
    device. `pooled`: which hidden states of a prompt are wanted (`programs.pool.KINDS`) in place of
    tokens; "": none. `speculation`: None without.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_pages: int
    decode_steps: int
    seed: int
    max_logprobs: int = 20
    kv_policy: str = "full"
    row_pages: int = 0
    low_row_pages: int = 0
    read_pages: int = 0
    windows: tuple[int, ...] = (0,)
    aligned_len: int = 1
    has_contexts: bool = False
    num_slots: int = 0
    num_adapters: int = 0
    pooled: str = ""
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        may_be_zero = {"seed", "max_logprobs", "row_pages", "low_row_pages", "read_pages"}
        may_be_zero |= {"num_slots", "num_adapters"}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in NO_NUMBERS:
                _expect(is_int(value), field.name, "a whole number", value)
                least = 0 if field.name in may_be_zero else 1
                _expect(value >= least, field.name, f"a number >= {least}", value)
        some = isinstance(self.windows, tuple) and len(self.windows) > 0
        some = some and all(is_int(window) and window >= 0 for window in self.windows)
        _expect(some, "windows", "at least one number >= 0", self.windows)
        _expect(self.seed < 2**64, "seed", "a number below 2**64", self.seed)
        _expect(
            self.block_size in PAGE_SIZES, "block_size", f"one of {PAGE_SIZES}", self.block_size
        )
        _expect(
            self.max_num_batched_tokens >= 16,
            "max_num_batched_tokens",
            "at least 16",
            self.max_num_batched_tokens,
        )
        _expect(
            self.max_num_seqs <= self.max_num_batched_tokens,
            "max_num_seqs",
            f"at most max_num_batched_tokens = {self.max_num_batched_tokens}",
            self.max_num_seqs,
        )

    @property
    def has_states(self) -> bool:
        """Tells whether rows have a recurrent state beside their pages."""
        return self.num_slots > 0

    @property
    def snapshot_slots(self) -> range:
        """Returns the places that the prefix cache keeps states in."""
        num_ahead = 0 if self.speculation is None else self.speculation.num_slots
        return range(self.max_num_seqs, self.num_slots - num_ahead)

    @property
    def num_low_pages(self) -> int:
        """Counts the demoted pages of the pool: as many for each other page as a row has."""
        return (
            -(-self.num_pages * self.low_row_pages // self.row_pages) if self.low_row_pages else 0
        )

    @property
    def table_width(self) -> int:
        """Counts the pages per row of the page table: what the longest sequence takes, or its
        policy or window leaves, with the columns in front of that.
        """
        longest = -(-self.max_len // self.block_size)
        in_front = max(0, self.aligned_len // self.block_size - 1)
        return max(
            min(longest, self.held_pages(longest, window) + (in_front if window else 0))
            for window in self.windows
        )

    @property
    def pages_per_row(self) -> int:
        """Counts the pages of one row of max_model_len tokens, or as many as its policy and windows
        leave, in all of its tables.
        """
        return self.row_pages_for(-(-self.max_model_len // self.block_size))

    def row_pages_for(self, num_pages: int) -> int:
        """Counts the pages, in all of its tables, of a row that is so many pages long."""
        return sum(self.held_pages(num_pages, window) for window in self.windows)

    def held_pages(self, num_pages: int, window: int) -> int:
        """Counts the pages of a row's table that are left of so many."""
        most = self.row_pages or self.window_pages(window)
        return min(num_pages, most) if most else num_pages

    def window_pages(self, window: int) -> int:
        """Returns the most pages that a table holds where queries see `window` tokens; 0: no limit.

        A step writes up to max_num_batched_tokens behind the window, which may begin anywhere in
        its first page.
        """
        if not window:
            return 0
        step = max(self.max_num_batched_tokens, self.decode_steps)
        return -(-(window - 1 + self.block_size - 1 + step) // self.block_size)

    @property
    def num_tokens(self) -> int:
        """Counts the tokens that the pool holds where none have gone."""
        return self.num_pages // len(self.windows) * self.block_size

    @property
    def has_windows(self) -> bool:
        """Tells whether rows give back pages that no later query sees."""
        return any(self.windows)

    @property
    def max_len(self) -> int:
        """Returns the longest prompt and output together that fit into the limit and the pool, in
        tokens. A row that has as many pages as a policy or windows leave gets no longer.
        """
        longest = -(-self.max_model_len // self.block_size)
        num_pages = bisect_right(range(longest + 1), self.num_pages, key=self.row_pages_for) - 1
        return min(self.max_model_len, num_pages * self.block_size)


DECODE_STEPS = 8
"""Tokens per row between two looks of the host."""


MAX_SAMPLES = 1024
"""Samples of one prompt: each has its own copy of the prompt on the host from the start."""

_NOT_BUILT = {
    "flat_logprobs": "lists of dicts, which logprobs always are",
    "logprob_token_ids": "logprobs=-1, which has every token",
    "prompt_logprob_start": "prompt_logprobs_start",
    "prompt_logprob_token_ids": "prompt_logprobs=-1, which has every token",
    "repetition_detection": "repetition_penalty",
    "routed_experts_prompt_start": "",
    "stream_interval": "",
    "trace_decode_token_ids": "",
    "truncate_prompt_tokens": "token ids that are cut before",
    "guided_decoding": "structured_outputs",
    "logits_processors": "logit_bias, allowed_token_ids and bad_words",
    "skip_reading_prefix_cache": "a cache_salt of the prompt's own",
    "extra_args": "",
    "watermarking": "",
}
"""Fields of vLLM's that have one possible value, None, and what is nearest to them."""

_OFF = ("flat_logprobs", "skip_reading_prefix_cache", "watermarking")
"""Those of them that may also be False."""


ELSEWHERE = {
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "min_length": "min_tokens",
    "do_sample": "temperature, 0 for greedy",
    "num_return_sequences": "n",
    "num_beams": "LLM.beam_search",
    "use_beam_search": "LLM.beam_search",
    "stop_strings": "stop",
    "eos_token_id": "stop_token_ids",
    "bad_words_ids": "bad_words",
    "sequence_bias": "logit_bias",
    "output_scores": "logprobs",
    "top_logprobs": "logprobs",
    "response_format": "structured_outputs",
}
"""Names of parameters in transformers, OpenAI's interface and older versions of vLLM, and what is
nearest to them.
"""


def nearest_parameter(name: str) -> str:
    """Returns which parameter may be meant by a name that `SamplingParams` does not have, "" if
    none.
    """
    known = SamplingParams.__dataclass_fields__.keys()
    if name.startswith("guided_") and name not in known:
        return "structured_outputs"
    if name in known or name in ELSEWHERE:
        return ELSEWHERE.get(name) or _NOT_BUILT.get(name, "")
    close = get_close_matches(name[:100], known - _NOT_BUILT.keys(), n=1, cutoff=0.8)
    return close[0] if close else ""


class RequestOutputKind(IntEnum):
    """Says what `AsyncLLM.generate` yields: everything so far, what is new since the last output,
    or only the last output.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def _are_texts(value: Any) -> bool:
    return value is None or (
        isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)
    )


def _are_ids(value: Any) -> bool:
    is_list = isinstance(value, list | tuple)
    return value is None or (is_list and (are_plain(value) or all(map(is_int, value))))


def _are_reasoning(value: Any) -> bool:
    is_short = are_marks(value) and sum(map(len, value)) <= MAX_MARK_CHARS
    return is_short and not any("\ud800" <= c <= "\udfff" for c in "".join(value))


def _checked_bias(given: Any) -> dict[int, float]:
    """Reads a bias as vLLM takes it: ids through int(), since JSON has string keys, and values held
    within [-100, 100].
    """
    _expect(isinstance(given, dict), "logit_bias", "a dict of token id -> number", given)
    bias = {}
    for token, value in ((own(token), own(value)) for token, value in given.items()):
        is_text = isinstance(token, str) and len(token) < 20 and token.strip().isdecimal()
        is_id = is_int(token) or is_text
        _expect(is_id, "logit_bias", "token ids as keys", token)
        number = (is_int(value) or isinstance(value, float)) and value == value  # false for NaN
        _expect(number, "logit_bias", f"a number for token {token}", value)
        bias[int(token)] = float(min(100, max(-100, value)))
    return bias


_CHECKS: dict[str, Check] = {
    "n": Check(f"a number from 1 to {MAX_SAMPLES}", lambda x: is_int(x) and 1 <= x <= MAX_SAMPLES),
    "temperature": Check("a finite float32 number >= 0", lambda x: _is_number(x) and x >= 0),
    "top_p": Check("a float32 number in (0, 1]", lambda x: _is_number(x) and MIN_FLOAT32 <= x <= 1),
    "min_p": Check("a number in [0, 1]", lambda x: _is_number(x) and 0 <= x <= 1),
    "top_k": Check(
        "0 or -1 (off), or a positive number below 2**31",
        lambda x: is_int(x) and -1 <= x <= MAX_INT32,
    ),
    "seed": Check(
        "None or a 64-bit whole number",
        lambda x: x is None or (is_int(x) and -(2**63) <= x < 2**64),
    ),
    "max_tokens": Check("None or a number >= 1", lambda x: x is None or (is_int(x) and x >= 1)),
    "min_tokens": Check(
        "a number from 0 to 2**31 - 1", lambda x: is_int(x) and 0 <= x <= MAX_INT32
    ),
    **dict.fromkeys(
        ("logprobs", "prompt_logprobs"),
        Check("None, -1 (all) or a number >= 0", lambda x: x is None or (is_int(x) and x >= -1)),
    ),
    "prompt_logprobs_start": Check("a number >= 0", lambda x: is_int(x) and 0 <= x <= MAX_INT32),
    **dict.fromkeys(
        (
            *("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"),
            "spaces_between_special_tokens",
        ),
        IS_BOOL,
    ),
    "output_kind": Check("a RequestOutputKind", lambda x: isinstance(x, RequestOutputKind)),
    "kv_policy": Check("None or the name of one", lambda x: isinstance(x, str | None)),
    **dict.fromkeys(
        ("presence_penalty", "frequency_penalty"),
        Check("a number in [-2, 2]", lambda x: _is_number(x) and -2 <= x <= 2),
    ),
    "repetition_penalty": Check(
        "a finite float32 number > 0", lambda x: _is_number(x) and x >= MIN_FLOAT32
    ),
    **dict.fromkeys(
        ("stop_token_ids", "allowed_token_ids"), Check("a list of token ids", _are_ids)
    ),
    "thinking_token_budget": Check(
        "None, -1 (no limit) or a number from 0 to 2**31 - 1",
        lambda x: x is None or (is_int(x) and -1 <= x <= MAX_INT32),
    ),
    "reasoning": Check(
        'None or two texts, as ("<think>", "</think>")', lambda x: x is None or _are_reasoning(x)
    ),
}
"""Says of fields of `SamplingParams` what they may be by themselves."""


@dataclass(kw_only=True, slots=True)
class SamplingParams:
    """Says how one request samples: vLLM's field names, defaults and meaning.

    A temperature below 1e-5 is greedy. `top_k` 0 or -1, `top_p` 1 and `min_p` 0 are off. `seed`
    None or -1: it follows from the engine's. `max_tokens=None`: as many as the context allows. `n`
    samples share the prompt's pages; more than one needs a temperature.
    `presence_penalty` and `frequency_penalty` are subtracted from the logits of generated tokens,
    once and per occurrence; `repetition_penalty` divides positive and multiplies negative logits of
    tokens in prompt or output.
    `logit_bias`: token id (an int, or a string of one as in OpenAI's JSON) -> what is added, held
    within [-100, 100].
    `allowed_token_ids`: only these may come. `bad_words` may not, with or without a space in front;
    one of several tokens is kept from ending; none is longer than 256 characters.
    `structured_outputs`: what the text must be; those two and min_tokens do not go with it.
    `thinking_token_budget`: the most tokens that an answer reasons before its end is written for
    it; None or -1: no limit. `reasoning`: the texts around that, as ("<think>", "</think>"), None
    for those of `LLM(reasoning_config=)`; the second may lead to the answer by a sentence before
    its mark, the first be empty where every answer begins with reasoning.
    `logprobs=k`: the k likeliest tokens and the sampled one, `prompt_logprobs=k` the same of the
    prompt's tokens, from position `prompt_logprobs_start` on, before which they may come out of the
    prefix cache; -1 is all of the vocabulary.
    `LLM(max_logprobs=)` bounds both.
    `kv_policy`, `kv_budget`: another policy or budget of the request's cache than the engine's
    (None), in tokens, or "full". `kv_protect`: (begin, end) positions of the prompt's tokens whose
    pages no policy touches.
    `output_kind` is for `AsyncLLM.generate`. `spaces_between_special_tokens` changes nothing, as in
    vLLM with the tokenizers of today, nor does `skip_clone`. `best_of` may be n.
    Fields may be assigned: whatever takes parameters checks them again, and takes a copy.
    Raises: ValueError naming the field for a value out of range, and for a field that is not built
    yet.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    bad_words: list[str] | tuple[str, ...] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | tuple[int, ...] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    kv_policy: str | None = None
    kv_budget: int | None = None
    kv_protect: list[tuple[int, int]] | tuple[tuple[int, int], ...] | None = None
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None
    reasoning: tuple[str, str] | list[str] | None = None
    guided_decoding: Any = None
    logits_processors: Any = None
    skip_reading_prefix_cache: bool | None = None
    extra_args: dict[str, Any] | None = None
    flat_logprobs: bool | None = None
    logprob_token_ids: list[int] | None = None
    prompt_logprob_start: int | None = None
    prompt_logprob_token_ids: Any = None
    repetition_detection: Any = None
    routed_experts_prompt_start: int | None = None
    stream_interval: int | None = None
    trace_decode_token_ids: Any = None
    watermarking: bool | None = None
    skip_clone: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    best_of: int | None = None

    def __new__(cls, *args: Any, **given: Any) -> SamplingParams:
        for name in given:
            if name not in cls.__dataclass_fields__:
                near = nearest_parameter(name)
                hint = f", did you mean {near}?" if near else ""
                raise TypeError(f"SamplingParams: unknown parameter {name!r}{hint}")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        take_over(self)
        for name, nearest in _NOT_BUILT.items():
            value = getattr(self, name)
            empty = value is None or (isinstance(value, list | dict) and not value)
            if not (empty or (value is False and name in _OFF)):
                near = f" (nearest: {nearest})" if nearest else ""
                raise ValueError(
                    f"{name}={value!r:.200} is not supported yet; leave it at None{near}"
                )
        for name, check in _CHECKS.items():
            check(name, getattr(self, name))
        if self.n > 1 and self.temperature < GREEDY_BELOW:
            raise ValueError(
                f"n: expected 1 with greedy sampling (temperature {self.temperature}), got {self.n}"
            )
        if self.max_tokens is not None:
            at_most = f"at most max_tokens={self.max_tokens}"
            _expect(self.min_tokens <= self.max_tokens, "min_tokens", at_most, self.min_tokens)
        if (start := self.prompt_logprobs_start) and self.prompt_logprobs is None:
            raise ValueError(
                f"prompt_logprobs_start: expected 0 without prompt_logprobs, got {start}"
            )
        ranks_none = self.best_of is None or (is_int(self.best_of) and self.best_of == self.n)
        _expect(ranks_none, "best_of", f"None or n={self.n}", self.best_of)
        self._check_structured()
        self._check_words()
        if self.logit_bias is not None:
            self.logit_bias = _checked_bias(self.logit_bias)

    @classmethod
    def from_optional(cls, **given: Any) -> SamplingParams:
        """Makes parameters of which those that are None are the default, but for max_tokens."""
        return cls(**{k: v for k, v in given.items() if v is not None or k == "max_tokens"})

    def clone(self) -> SamplingParams:
        """Returns a copy with lists of its own, checked again: ValueError as when one is made."""
        return replace(self)

    def _check_structured(self) -> None:
        structured = self.structured_outputs
        if structured is not None:
            is_one = isinstance(structured, StructuredOutputsParams)
            _expect(is_one, "structured_outputs", "StructuredOutputsParams", structured)
            self.structured_outputs = replace(structured)
            for name in ("allowed_token_ids", "bad_words", "min_tokens"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name}: expected none with structured_outputs, which might then have no "
                        f"token left, got {getattr(self, name)!r:.80}"
                    )

    def _check_words(self) -> None:
        listed = isinstance(self.stop, str) or _are_texts(self.stop)
        _expect(
            listed and "" not in self.stop_strings,
            "stop",
            "a string or a list of strings, none empty",
            self.stop,
        )
        _expect(
            self.detokenize or not self.stop_strings,
            "stop",
            "no stop strings with detokenize=False",
            self.stop,
        )
        words = _are_texts(self.bad_words) and all(word.strip() for word in self.bad_words or ())
        _expect(words, "bad_words", "a list of words, none empty", self.bad_words)
        for word in self.bad_words or ():
            if len(word) > MAX_WORD_CHARS:
                raise ValueError(
                    f"bad_words: expected words of at most {MAX_WORD_CHARS} characters, got one of "
                    f"{len(word)}"
                )
            # A tokenizer raises errors of its own for half of a surrogate pair.
            _expect(
                not any("\ud800" <= c <= "\udfff" for c in word), "bad_words", "valid Unicode", word
            )
        some = self.allowed_token_ids is None or len(self.allowed_token_ids) > 0
        _expect(some, "allowed_token_ids", "None or at least one token id", self.allowed_token_ids)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def penalises(self) -> bool:
        """Tells whether a token's logit depends on the tokens before it."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


PREFILL = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
"""Computes a prompt: its first new token is drawn and dropped, or, where it is pooled, not even
drawn.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class BeamSearchParams:
    """Says how `LLM.beam_search` searches: vLLM's field names and defaults, transformers' algorithm
    (early_stopping=False).

    The `beam_width` best sequences of up to `max_tokens` tokens, by their sum of log-probabilities
    divided by length ** length_penalty; the length is in generated tokens, and includes an end
    token. With `ignore_eos` none ends before max_tokens. `include_stop_str_in_output`: the text has
    the end token's too (`tokens` always have it), with `skip_special_tokens` no special ones.
    `temperature` has one possible value: nothing is drawn. Other fields of vLLM's may be None.
    Raises: ValueError naming the field for a value out of range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: Any = None
    skip_special_tokens: bool = False
    watermarking: bool | None = None
    allowed_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        take_over(self)
        for name in ("structured_outputs", "watermarking", "allowed_token_ids"):
            _expect(getattr(self, name) is None, name, "None (not built)", getattr(self, name))
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            _expect(is_int(value) and 1 <= value <= MAX_INT32, name, "a number >= 1", value)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            _expect(
                isinstance(getattr(self, name), bool), name, "True or False", getattr(self, name)
            )
        greedy = _is_number(self.temperature) and self.temperature == 0
        _expect(greedy, "temperature", "0.0 (a beam search draws nothing)", self.temperature)
        # Sums of log-probabilities are divided by this power, in float32.
        penalty = self.length_penalty
        fits = _is_number(penalty) and abs(penalty) * math.log(self.max_tokens) <= MAX_LOG_POWER
        within = (
            f"a number for which {self.max_tokens} (max_tokens) ** length_penalty is far within "
            f"float32"
        )
        _expect(fits, "length_penalty", within, penalty)
