"""Checks what a request asks for against the model and what the engine, as it was made, can do."""

from __future__ import annotations

from jaxkv.build.model import Model
from jaxkv.config import EngineConfig, SamplingParams
from jaxkv.holding.retention import Retention, check_served, full_pages, protecting
from jaxkv.kv.policies import Policy, resolve
from jaxkv.ops.sampling import NUM_BIASES, NUM_STOP_TOKENS
from jaxkv.requests.masks import Word, encode_words
from jaxkv.requests.reading import check_ids


def stop_ids(
    params: SamplingParams,
    eos_ids: frozenset[int],
    vocab_size: int,
    halts: frozenset[int] = frozenset(),
) -> frozenset[int]:
    """Returns the tokens that end a request, with the model's own unless it ignores them. halts:
    others behind which the device waits for the host. Raises: ValueError.
    """
    own_stops = params.stop_token_ids or ()
    check_ids("stop_token_ids", own_stops, vocab_size)
    found = frozenset(own_stops) | (frozenset() if params.ignore_eos else eos_ids)
    if len(found | halts) > NUM_STOP_TOKENS:
        raise ValueError(
            f"stop_token_ids: expected at most {NUM_STOP_TOKENS} with the model's own"
            f"{' and the end of its reasoning' if halts else ''}, got {len(found | halts)}"
        )
    return found


def limit(
    params: SamplingParams, config: EngineConfig, prompt_len: int, retention: Retention | None
) -> tuple[int, str]:
    """Returns the most tokens of prompt and output together, and the finish_reason of a request
    that reaches them.
    """
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


def retention_of(params: SamplingParams, config: EngineConfig, prompt_len: int) -> Retention | None:
    """Returns what bounds the request's cache: its own policy or the engine's, in its own
    budget or the engine's.

    Raises: ValueError for what the engine, as it was made, cannot do.
    """
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
            f"kv_budget: expected what a row of this engine may hold ({held}), got {pages} pages"
        )
    low = 0
    if policy.low and config.row_pages:
        low = config.low_row_pages * pages // config.row_pages
    retention = Retention(
        policy=policy, page_size=config.block_size, full_pages=pages, low_pages=low
    )
    return protecting(retention, params.kv_protect or (), prompt_len)


def check_logprobs(
    params: SamplingParams, model: Model, config: EngineConfig, prompt_len: int
) -> None:
    """Raises ValueError for log-probabilities that are too many, or of no token of the prompt."""
    if (start := params.prompt_logprobs_start) >= prompt_len:
        raise ValueError(
            f"prompt_logprobs_start: expected less than the prompt's {prompt_len} tokens, got "
            f"{start}"
        )
    size, most = model.spec.vocab_size, config.max_logprobs
    for name in ("logprobs", "prompt_logprobs"):
        asked = getattr(params, name)
        if asked is not None and (size if asked == -1 else asked) > most:
            what = f"-1 (all {size} tokens)" if asked == -1 else asked
            raise ValueError(
                f"{name}: expected at most {most}, got {what}; raise max_logprobs of LLM (-1: all)"
            )


def processing(
    params: SamplingParams, model: Model, ends: frozenset[int | None]
) -> tuple[Word, ...]:
    """Checks what changes the logits. Returns the tokens of the bad words. `ends` are out of
    reach at first where min_tokens is given.
    """
    bias, allowed = params.logit_bias or {}, params.allowed_token_ids
    check_ids("logit_bias", list(bias), model.spec.vocab_size)
    if len(bias) > NUM_BIASES:
        raise ValueError(f"logit_bias: expected at most {NUM_BIASES} tokens, got {len(bias)}")
    check_ids("allowed_token_ids", allowed or (), model.spec.vocab_size)
    if params.bad_words and model.tokenizer is None:
        raise ValueError(
            "bad_words: expected a tokenizer for bad words, got skip_tokenizer_init=True"
        )
    words = encode_words(model.tokenizer, params.bad_words or ())
    check_ids("bad_words", [token for word in words for token in word], model.spec.vocab_size)
    out_of_reach = {word[-1] for word in words} | (ends if params.min_tokens else set())
    if allowed is not None and not set(allowed) - out_of_reach:
        raise ValueError(
            f"allowed_token_ids: expected at least one that ends no bad word and, with "
            f"min_tokens, no request, got {allowed}"
        )
    return words
