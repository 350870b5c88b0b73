"""Reads `speculative_config`, whose keys are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxkv.build.options import IS_PATH, IS_TEXT_OR_NONE, EngineOptions
from jaxkv.config import Speculation, is_int
from jaxkv.models.families import ConfigReader, Layout, read_family
from jaxkv.models.families.eagle import read_eagle
from jaxkv.models.families.predictor import PREDICTING, read_predictor
from jaxkv.models.spec import ModelSpec

NGRAM, DRAFT_MODEL, MTP, EAGLE = "ngram", "draft_model", "mtp", "eagle3"

OF_DRAFT = ("model", "revision", "quantization", "draft_tensor_parallel_size")
KEYS = {
    NGRAM: ("prompt_lookup_max", "prompt_lookup_min"),
    DRAFT_MODEL: OF_DRAFT,
    EAGLE: OF_DRAFT,
    MTP: (),
}
"""By method, beside those of all methods."""

COMMON_KEYS = ("method", "num_speculative_tokens", "disable_by_batch_size")

MOST_TOKENS = 32
"""Tokens ahead at most: each takes memory for its logits."""

DEFAULT_LOOKUP = 5
"""How many tokens must have come before, as in vLLM, where neither end is given."""

ROWS_PER_SPECULATING = 8
"""By default as many rows speculate as this part of `max_num_seqs`: with more of them a step has
enough to compute without proposals.
"""


def read_speculation(given: Mapping[str, Any], max_num_seqs: int) -> Speculation:
    """Returns what the keys ask for. Raises: ValueError naming the key for what is not possible."""
    method = _method(given)
    keys = (*COMMON_KEYS, *KEYS[method])
    for key, value in given.items():
        if key not in keys and value is not None:
            raise ValueError(
                f"speculative_config: expected the keys {', '.join(keys)} with method "
                f"{method!r}, got {key!r}"
            )

    def number(key: str, default: int | None, most: int | None = None) -> int:
        value: Any = default if given.get(key) is None else given[key]
        if not is_int(value) or value < 1 or (most is not None and value > most):
            to = "" if most is None else f" and <= {most}"
            raise ValueError(
                f"speculative_config: expected {key} to be a number >= 1{to}, got {value!r}"
            )
        return int(value)

    num_tokens = number("num_speculative_tokens", None, MOST_TOKENS)
    most_rows = number(
        "disable_by_batch_size", max(1, max_num_seqs // ROWS_PER_SPECULATING), max_num_seqs
    )
    if method != NGRAM:
        return Speculation(method=method, num_tokens=num_tokens, most_rows=most_rows)
    either = given.get("prompt_lookup_max") or given.get("prompt_lookup_min") or DEFAULT_LOOKUP
    longest = number("prompt_lookup_max", either)
    return Speculation(
        method=method,
        num_tokens=num_tokens,
        most_rows=most_rows,
        longest=longest,
        shortest=number("prompt_lookup_min", longest, longest),
    )


def _method(given: Mapping[str, Any]) -> str:
    """Returns the method; as in vLLM a model without one is a draft model."""
    method = given.get("method")
    if method is None and given.get("model") is not None:
        return DRAFT_MODEL
    if method not in KEYS:
        raise ValueError(
            f"speculative_config: expected a method out of {', '.join(KEYS)}, got {method!r}"
        )
    return str(method)


def draft_options(options: EngineOptions, spec: ModelSpec) -> EngineOptions | None:
    """Returns what the draft model for a model of this spec is built from, which may be a layer of
    the model's own; None if no draft model is asked for. It is as the model in all that its keys do
    not say.

    Raises: ValueError naming the key for what is not possible.
    """
    given = options.speculative_config
    if given is None or (method := _method(given)) == NGRAM:
        return None
    if method == MTP:
        names = ("model", "revision", "quantization", "enable_expert_parallel")
        given = {name: getattr(options, name) for name in names}
    elif given.get("model") is None:
        raise ValueError(
            f"speculative_config: expected model with method {method!r}: a directory or a hub id, "
            f"got None"
        )
    IS_PATH("speculative_config: model", given["model"])
    IS_TEXT_OR_NONE("speculative_config: revision", given.get("revision"))
    size = given.get("draft_tensor_parallel_size")
    if size not in (None, options.tensor_parallel_size):
        raise ValueError(
            f"speculative_config: expected draft_tensor_parallel_size "
            f"{options.tensor_parallel_size}, the model's, got {size!r}"
        )
    return EngineOptions(
        model=given["model"],
        revision=given.get("revision"),
        quantization=given.get("quantization"),
        enable_expert_parallel=given.get("enable_expert_parallel", False),
        skip_tokenizer_init=True,
        runner="generate",
        max_model_len=spec.max_len if options.max_model_len is None else options.max_model_len,
        **{name: getattr(options, name) for name in SHARED},
    )


SHARED = (
    "dtype",
    "load_format",
    "hf_token",
    "download_dir",
    "kv_cache_dtype",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "tensor_parallel_size",
    "decode_context_parallel_size",
    "backend",
    "deterministic",
    "seed",
)
"""Options of the engine that are a draft model's too."""


def own_predictor(
    options: EngineOptions, spec: ModelSpec, layout: Layout
) -> tuple[ModelSpec, Layout] | None:
    """Returns spec and layout of the layer that proposes tokens, where it is the model's own; None
    if another one is asked for, or none.

    Raises: ValueError for a model without such a layer, NotImplementedError for one of which it is
    not known how it is computed.
    """
    given = options.speculative_config
    if given is None or _method(given) != MTP:
        return None
    where = "speculative_config: method 'mtp': expected"
    if not layout.num_predictors:
        raise ValueError(
            f"{where} a model with a layer that predicts later tokens (num_nextn_predict_layers in "
            f"config.json), got {spec.family} without one"
        )
    if spec.family not in PREDICTING:
        raise NotImplementedError(f"{where} one of {', '.join(PREDICTING)}, got {spec.family}")
    if layout.num_predictors > 1:
        raise NotImplementedError(
            f"{where} one layer that predicts later tokens, got {layout.num_predictors}"
        )
    return read_predictor(spec, layout)


def read_draft(
    config: ConfigReader, *, options: EngineOptions, spec: ModelSpec, layout: Layout
) -> tuple[ModelSpec, Layout]:
    """Returns spec and layout of what another checkpoint has to propose tokens to a model of these:
    a model, or a layer that was trained for this one.

    Raises: CheckpointError, NotImplementedError.
    """
    if options.speculative_config is None or _method(options.speculative_config) != EAGLE:
        return read_family(config)
    return read_eagle(config, spec, layout)


def check_draft(
    draft: ModelSpec, drafting: EngineOptions, spec: ModelSpec, *, key: str = "model"
) -> None:
    """Raises: ValueError or NotImplementedError, saying what was expected, for a draft model that
    cannot propose tokens to a model of this spec. drafting: its `draft_options`. key: what it was
    asked for by.
    """
    max_len = drafting.max_model_len or draft.max_len
    where = f"speculative_config: {key}: expected"
    if draft.vocab_size != spec.vocab_size:
        raise ValueError(
            f"{where} one with the model's vocabulary of {spec.vocab_size} tokens, got one of "
            f"{draft.vocab_size}"
        )
    if draft.max_len < max_len:
        raise ValueError(
            f"{where} one for sequences of max_model_len={max_len} tokens, got one for "
            f"{draft.max_len}: lower max_model_len"
        )
    if draft.states:
        raise NotImplementedError(
            f"{where} one without recurrent states, which proposals that do not hold change, got "
            f"{draft.family}"
        )
    if draft.depends_on_context:
        raise NotImplementedError(
            f"{where} one whose rotary embeddings do not depend on how long a request may get, got "
            f"{draft.family}"
        )
