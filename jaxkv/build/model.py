"""A model as the engine needs it: spec, weights on the device, tokenizer, and what its files say
about ending.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxkv.build.codecs import exact_layers
from jaxkv.build.tokenizer import load_tokenizer
from jaxkv.config import SamplingParams, bfloat16_as_bits, is_int
from jaxkv.models.families import ConfigReader, read_config, read_family
from jaxkv.models.spec import ModelSpec
from jaxkv.placement import Placement, bytes_per_device, place
from jaxkv.programs.fit_keys import fit_keys
from jaxkv.weights.dummy import random_weights
from jaxkv.weights.hub import WITHOUT_WEIGHTS, resolve_model, with_weights
from jaxkv.weights.load import load_weights, put
from jaxkv.weights.orbax import load_converted, stored_dtype
from jaxkv.weights.tree import Weights, with_layer_leaf

DEMO = Path(__file__).parents[1] / "demo"
"""The model that ships with jaxkv."""

GENERATION = "generation_config.json"
DTYPES = ("auto", "bfloat16", "float32")
LOAD_FORMATS = ("auto", "dummy")
FIT_TOKENS = 1024
"""At most, of the text that keys are fitted to."""

CALIBRATION = Path(__file__).with_name("calibration.txt")
"""A page of prose, code and data. What it is fitted to changes nothing but the rounding of keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """`generation` is generation_config.json, {} without one. `eos_ids` end a request unless it
    ignores them; `eos_id` is the main one, whose end needs no stop_reason. `weights` is {} until it
    is `loaded`, by `load`.
    """

    directory: Path
    spec: ModelSpec
    weights: Weights
    load: Callable[[], Weights]
    placement: Placement
    dtype: str
    tokenizer: Any | None
    generation: Mapping[str, Any]
    eos_ids: frozenset[int]
    eos_id: int | None

    def default_params(self) -> SamplingParams:
        """What generation_config.json asks for. Raises: ValueError if that is out of range."""
        names = {"max_new_tokens": "max_tokens"}
        keys = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
        given = {names.get(k, k): v for k in keys if (v := self.generation.get(k)) is not None}
        try:
            return SamplingParams(**given)
        except ValueError as error:
            raise ValueError(
                f"generation_config.json: {error}; pass sampling_params to set your own"
            ) from error

    def loaded(self, *, fits_keys: bool) -> Model:
        """With its weights on the device; `fits_keys`: as `with_fitted_keys`. Raises:
        CheckpointError, OSError.
        """
        model = replace(self, weights=self.load())
        return with_fitted_keys(model) if fits_keys else model

    @property
    def weight_bytes(self) -> int:
        """On each device."""
        return bytes_per_device(self.weights)


def find_model(
    model: str | os.PathLike[str],
    *,
    revision: str | None,
    tokenizer: str | os.PathLike[str] | None,
    skip_tokenizer_init: bool,
    dtype: str,
    load_format: str,
    tensor_parallel_size: int,
    seed: int,
    skip_layers: Any = None,
) -> Model:
    """What a model directory (or hub id) holds, but for its weights; the tokenizer may come from
    another one.

    Weights are neither read nor fetched before they are `loaded`: by then an engine has checked
    what it was asked for.
    The directory may be one that `jaxkv convert` made: dtype auto is then what it stores. With
    load_format "dummy" the weights are random, of `seed`, and none are read.
    Raises: ValueError for an unknown dtype, CheckpointError for anything wrong with the files.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    if load_format not in LOAD_FORMATS:
        raise ValueError(
            f"load_format: expected one of {', '.join(LOAD_FORMATS)}, got {load_format!r}"
        )
    is_dummy = load_format == "dummy"
    directory = resolve_model(model, revision=revision, only=WITHOUT_WEIGHTS)
    config = read_config(directory)
    spec, layout = read_family(config)
    loaded = None
    if not skip_tokenizer_init:
        loaded = load_tokenizer(
            directory if tokenizer is None else resolve_model(tokenizer, only=WITHOUT_WEIGHTS)
        )
    found = (directory / GENERATION).is_file()
    generation = read_config(directory, GENERATION) if found else ConfigReader({}, GENERATION)
    eos_ids = _eos_ids(config, generation, loaded, spec.vocab_size)
    stored = None if is_dummy else stored_dtype(directory, spec)
    spec = spec.apart(exact_layers(spec, skip_layers))
    placement = place(spec, layout, jax.devices(), tensor_parallel_size)
    platform = placement.devices[0].platform
    if dtype == "auto":
        dtype = stored or auto_dtype(platform)
    as_bits = dtype == "bfloat16" and bfloat16_as_bits(platform)
    made: Any = {"dtype": dtype, "as_bits": as_bits, "placement": placement}

    def load() -> Weights:
        if is_dummy:
            return random_weights(spec, layout, seed=seed, **made)
        from_files = load_weights if stored is None else load_converted
        return from_files(with_weights(model, directory), spec, layout, **made)

    return Model(
        directory=directory,
        spec=spec,
        weights={},
        load=load,
        placement=placement,
        dtype=dtype,
        tokenizer=loaded,
        generation=generation.values,
        eos_ids=frozenset(eos_ids),
        eos_id=eos_ids[0] if eos_ids else None,
    )


def calibration_tokens(spec: ModelSpec, tokenizer: Any | None) -> np.ndarray:
    """The text that keys are fitted to, [T] int32; random tokens where no tokenizer makes any of
    it.
    """
    num_tokens = min(FIT_TOKENS, spec.max_len)
    if tokenizer is not None:
        text = CALIBRATION.read_text(encoding="utf-8")
        if ids := tokenizer(text, truncation=True, max_length=num_tokens)["input_ids"]:
            return np.clip(np.array(ids, np.int32), 0, spec.vocab_size - 1)
    return np.random.default_rng(0).integers(0, spec.vocab_size, num_tokens, np.int32)


def with_fitted_keys(model: Model) -> Model:
    """The same function with keys that lose less by being quantised (`programs.fit_keys`)."""
    token_T = calibration_tokens(model.spec, model.tokenizer)
    affine = fit_keys(model.weights, token_T, spec=model.spec, placement=model.placement)
    return replace(
        model,
        weights=with_layer_leaf(
            model.weights, "k_affine", put(affine, "k_affine", model.placement)
        ),
    )


def auto_dtype(platform: str) -> str:
    """bfloat16, except on a CPU without instructions for it, where float32 is faster."""
    if platform != "cpu":
        return "bfloat16"
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text() if cpuinfo.is_file() else ""
    return "bfloat16" if "avx512_bf16" in flags or "amx_bf16" in flags else "float32"


def _eos_ids(
    config: ConfigReader, generation: ConfigReader, tokenizer: Any, vocab_size: int
) -> list[int]:
    """The tokenizer's end token first, then generation_config.json's, else config.json's.

    One outside the vocabulary is left out: it cannot be sampled.
    """
    reader = config if generation.get("eos_token_id") is None else generation
    given = reader.get("eos_token_id", [])
    ids = given if isinstance(given, list) else [given]
    if not all(is_int(i) for i in ids):
        raise reader.fail("eos_token_id", "a token id or a list of them")
    own = getattr(tokenizer, "eos_token_id", None)
    return [i for i in ([] if own is None else [own]) + ids if 0 <= i < vocab_size]
