"""A model as the engine needs it: spec, weights on the device, tokenizer, and what its files say about ending."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxkv.config import bfloat16_as_bits, is_int
from jaxkv.engine.text import load_tokenizer
from jaxkv.errors import CheckpointError
from jaxkv.models.decoder import Weights
from jaxkv.models.families import ConfigReader, read_config, read_family
from jaxkv.models.spec import ModelSpec
from jaxkv.weights.hub import resolve_model
from jaxkv.weights.load import load_weights

DTYPES = ("auto", "bfloat16", "float32")


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """`generation` is generation_config.json ({} without one); `eos_ids` end a request unless it ignores them."""

    directory: Path
    spec: ModelSpec
    weights: Weights
    dtype: str
    tokenizer: Any | None
    generation: dict[str, Any]
    eos_ids: frozenset[int]

    @property
    def weight_bytes(self) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(self.weights))


def load_model(
    model: str | os.PathLike[str],
    *,
    revision: str | None,
    tokenizer: str | os.PathLike[str] | None,
    skip_tokenizer_init: bool,
    dtype: str,
    platform: str,
) -> Model:
    """Reads everything that a model directory (or hub id) holds; the tokenizer may come from another one.

    Raises: ValueError for an unknown dtype, CheckpointError for anything wrong with the files.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    directory = resolve_model(model, revision=revision)
    config = read_config(directory)
    spec, layout = read_family(config)
    # The tokenizer first: it is cheap, and a missing one should not cost the time of loading weights.
    loaded = None
    if not skip_tokenizer_init:
        loaded = load_tokenizer(directory if tokenizer is None else resolve_model(tokenizer))
    generation = _read_generation(directory)
    dtype = auto_dtype(platform) if dtype == "auto" else dtype
    return Model(
        directory=directory,
        spec=spec,
        weights=load_weights(
            directory, spec, layout, dtype=dtype, as_bits=dtype == "bfloat16" and bfloat16_as_bits(platform)
        ),
        dtype=dtype,
        tokenizer=loaded,
        generation=generation,
        eos_ids=_eos_ids(config, generation, loaded, spec.vocab_size),
    )


def auto_dtype(platform: str) -> str:
    """bfloat16, except on a CPU without instructions for it, where float32 is faster."""
    if platform != "cpu":
        return "bfloat16"
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text() if cpuinfo.is_file() else ""
    return "bfloat16" if "avx512_bf16" in flags or "amx_bf16" in flags else "float32"


def _read_generation(directory: Path) -> dict[str, Any]:
    path = directory / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected JSON, got {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return values


def _eos_ids(config: ConfigReader, generation: dict[str, Any], tokenizer: Any, vocab_size: int) -> frozenset[int]:
    """generation_config.json's end tokens, else config.json's, and the tokenizer's own."""
    given = generation.get("eos_token_id", config.values.get("eos_token_id"))
    ids = given if isinstance(given, list) else [] if given is None else [given]
    own = getattr(tokenizer, "eos_token_id", None)
    ids = [*ids, *([] if own is None else [own])]
    if not all(is_int(i) and 0 <= i < vocab_size for i in ids):
        raise config.fail("eos_token_id", f"token ids below vocab_size={vocab_size} (with the tokenizer's: {ids})")
    return frozenset(ids)
