"""A model as the engine needs it: spec, weights on the device, tokenizer, and what its files say
about ending.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxkv.build.blueprint import Blueprint
from jaxkv.build.memory import check_room
from jaxkv.build.options import IS_PATH, EngineOptions
from jaxkv.build.pooling import MODULES, Pooling, pooling_layout, read_pooling
from jaxkv.build.speculation import check_draft, draft_options, own_predictor, read_draft
from jaxkv.build.tokenizer import check_vocabulary, load_tokenizer
from jaxkv.config import SamplingParams, is_int
from jaxkv.errors import CheckpointError
from jaxkv.models.families import ConfigReader, Layout, read_config, read_family, text_part
from jaxkv.models.spec import ModelSpec
from jaxkv.ops.sampling import NUM_STOP_TOKENS
from jaxkv.placement import K_AFFINE, Placement, bytes_per_device
from jaxkv.processes import own_device
from jaxkv.programs.fit_keys import fit_keys
from jaxkv.weights.arrays import flat, take_weights
from jaxkv.weights.dummy import random_weights
from jaxkv.weights.hub import OF_CODE, WITHOUT_WEIGHTS, Access, resolve_model, with_weights
from jaxkv.weights.load import load_weights, put, with_quantised_head
from jaxkv.weights.orbax import load_converted, stored_dtype
from jaxkv.weights.packing import WITH_HEAD, packing_for
from jaxkv.weights.tree import HEAD, Weights, with_layer_leaf

GENERATION = "generation_config.json"
DEMO = Path(__file__).parents[1] / "demo"
"""The model that ships with jaxkv."""

DEFAULTED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
"""Keys of generation_config.json that are parameters of requests."""

FIT_TOKENS = 1024
"""At most, of the text that keys are fitted to."""

CALIBRATION = Path(__file__).with_name("calibration.txt")
"""A page of prose, code and data. What it is fitted to changes nothing but the rounding of keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """Holds what a model's files say, and its weights once it is `loaded`, {} before.

    `spec` is the family's, and once loaded the blueprint's. `generation` is what `default_params`
    reads: generation_config.json, {} without one, and what was overridden. `eos_ids` end a request
    unless it ignores them; `eos_id` is the main one, whose end needs no stop_reason. `stored_dtype`
    is that of weights which `jaxkv convert` has stored. `pooling`: what becomes of hidden
    states, None of a model that generates. `draft`: the model that proposes tokens to this one.
    """

    directory: Path
    spec: ModelSpec
    layout: Layout
    stored_dtype: str | None
    pooling: Pooling | None = None
    tokenizer: Any | None
    generation: Mapping[str, Any]
    eos_ids: frozenset[int]
    eos_id: int | None
    weights: Weights
    draft: Model | None = None

    def default_params(self) -> SamplingParams:
        """Returns what generation_config.json asks for. Raises: CheckpointError if that is out of
        range.
        """
        try:
            return _params_of(self.generation)
        except ValueError as error:
            raise CheckpointError(
                f"{self.directory / GENERATION}: {error}; correct it, or pass "
                f"generation_config='vllm', which leaves out what the file says"
            ) from error

    def loaded(
        self, blueprint: Blueprint, *, when_read: Callable[[], None] = lambda: None
    ) -> Model:
        """Returns the model with its weights on the blueprint's devices. when_read: is called when
        they are, before programs run that read them. Raises: CheckpointError, OSError,
        CapacityError for weights that are sure not to fit, before they are read.
        """
        self._check_room(blueprint, f"weights of {self.directory}")
        weights, pooling, draft = self._load(blueprint), self.pooling, self.draft
        when_read()
        if draft is not None and blueprint.draft is not None:
            draft = draft.loaded(blueprint.draft)._sharing(weights)
        if pooling is not None:
            files, size = self._files(blueprint.options), self.spec.hidden_size
            pooling = pooling.loaded(files, self.layout, size)
        return replace(self, pooling=pooling, draft=draft)._fitted(weights, blueprint)

    def _sharing(self, weights: Weights) -> Model:
        """Returns a layer that predicts without what it repeats of its model's weights; any other
        draft model as it is.
        """
        theirs = {
            "own_tokens": weights.get("embed"),
            "own_head": weights.get(HEAD, weights.get("embed")),
        }
        repeated = {
            name: own
            for name, own in self.weights.items()
            if (other := theirs.get(name)) is not None
            and (own.shape, own.dtype) == (other.shape, other.dtype)
            and bool((own == other).all())
        }
        for array in repeated.values():
            array.delete()
        kept = {name: x for name, x in self.weights.items() if name not in repeated}
        return replace(self, weights=kept)

    def on(self, blueprint: Blueprint) -> Model:
        """Returns the model with a copy of its weights on the devices of another blueprint like its
        own. Raises: CapacityError for weights that are sure not to fit.
        """
        self._check_room(blueprint, f"a copy of the weights of {self.directory}")
        draft, place = self.draft, blueprint.placement.copied
        draft = None if draft is None else replace(draft, weights=place(draft.weights))
        return replace(self, weights=place(self.weights), draft=draft)

    @staticmethod
    def _check_room(blueprint: Blueprint, what: str) -> None:
        check_room(
            own_device(blueprint.placement.devices),
            blueprint.weight_bytes,
            what,
            "quantise them (quantization), divide them over more devices (tensor_parallel_size), "
            "or free memory (before update_weights: sleep(level=2))",
        )

    def updated(
        self, blueprint: Blueprint, source: Any, *, when_read: Callable[[], None] = lambda: None
    ) -> Model:
        """Returns the model with other weights, of a directory or hub id or of arrays
        (`weights.arrays`), on the blueprint's devices; its own are as they were, and its draft
        model stays. when_read: as `loaded` has it, for those of a directory or hub id.

        Raises: CheckpointError for weights of another model or that break a rule of loading,
        ValueError for what is no weights at all, OSError.
        """
        blueprint = replace(blueprint, draft=None)  # whose weights need no room a second time
        if isinstance(source, Mapping):
            self._check_room(blueprint, "weights")
            weights, pooling = self._load(blueprint, source), self.pooling
            if pooling is not None:
                arrays, embed = flat(source), self.layout.top["embed"].source
                if embed in arrays:  # which a tied head is
                    arrays.setdefault("lm_head.weight", arrays[embed])
                pooling = pooling.with_head(arrays, Path("weights"), self.spec.hidden_size)
            return replace(self, pooling=pooling)._fitted(weights, blueprint)._like(self)
        IS_PATH("weights", source)
        if source is None:
            raise ValueError("weights: expected a directory, a hub id or arrays, got None")
        own = blueprint.options
        options = replace(
            own,
            model=source,
            revision=None,
            tokenizer=None,
            tokenizer_revision=None,
            skip_tokenizer_init=True,
            speculative_config=None,
            runner="generate" if self.pooling is None else "pooling",
            load_format="auto" if own.load_format == "dummy" else own.load_format,
        )
        found = find_model(options, self.tokenizer)
        if found.spec.joined() != self.spec.joined():
            raise CheckpointError(
                f"{found.directory}: expected weights of the model that was loaded, got a "
                f"config.json of another one"
            )
        # A directory of weights alone does not say how they are pooled.
        if os.path.lexists(found.directory / MODULES) and found.pooling != self.pooling:
            raise CheckpointError(
                f"{found.directory}: {MODULES}: expected the pooling of the model that was loaded, "
                f"got another one"
            )
        blueprint = replace(blueprint, options=options, layout=found.layout)
        other = replace(
            self,
            directory=found.directory,
            layout=found.layout,
            stored_dtype=found.stored_dtype,
            draft=None,
        )
        loaded = other.loaded(blueprint, when_read=when_read)._like(self)
        return replace(loaded, draft=self.draft)

    def _like(self, other: Model) -> Model:
        """Returns itself. Raises: CheckpointError, with its weights given back, unless their arrays
        are like the other model's.
        """
        forms = [
            jax.tree.map(lambda x: f"{x.dtype.name}{x.shape}", one.weights) for one in (self, other)
        ]
        if forms[0] != forms[1]:
            for array in jax.tree.leaves(self.weights):
                array.delete()
            new, old = (dict(jax.tree_util.tree_leaves_with_path(form)) for form in forms)
            differing = [path for path in new.keys() | old if new.get(path) != old.get(path)]
            named = sorted(".".join(key.key for key in path) for path in differing)
            raise CheckpointError(
                f"{self.directory}: expected weights that are stored as those that were loaded, "
                f"got others: {', '.join(named)[:200]}"
            )
        return self

    def _fitted(self, weights: Weights, blueprint: Blueprint) -> Model:
        if blueprint.fits_keys:
            tokens = calibration_tokens(blueprint.spec, self.tokenizer)
            weights = with_fitted_keys(weights, tokens, blueprint.spec, blueprint.placement)
        return replace(self, spec=blueprint.spec, weights=weights)

    def _load(self, blueprint: Blueprint, arrays: Mapping[str, Any] | None = None) -> Weights:
        """Loads the weights from the model's directory, or takes these."""
        options, spec, kept = blueprint.options, blueprint.spec, blueprint.kept
        layout = blueprint.layout
        if options.load_format == "dummy" and arrays is None:
            return random_weights(spec, layout, kept, seed=options.seed)
        load: Callable[..., dict[str, Any]] = take_weights
        source: Any = arrays
        if arrays is None:
            load = load_weights if self.stored_dtype is None else load_converted
            source = self._files(options)
        weights = load(source, spec, layout, kept)
        if blueprint.quantization in WITH_HEAD and HEAD in layout.top:
            packing = packing_for(blueprint.quantization, spec.hidden_size, dtype=kept.dtype)
            weights = with_quantised_head(weights, packing, kept)
        return weights

    def _files(self, options: EngineOptions) -> Path:
        """Returns the model's directory, in which its weights are now too."""
        return with_weights(_given(options), self.directory, _access(options))

    @property
    def weight_bytes(self) -> int:
        """Counts the weights on each device, a draft model's too."""
        own = bytes_per_device(self.weights)
        return own if self.draft is None else own + self.draft.weight_bytes


def find_model(
    options: EngineOptions,
    tokenizer: Any | None = None,
    read: Callable[[ConfigReader], tuple[ModelSpec, Layout]] = read_family,
) -> Model:
    """Reads what a model directory (or hub id) holds, but for its weights; the tokenizer may come
    from another one, or be given. read: reads its config.json.

    Weights are neither read nor fetched before the model is `loaded`: by then a blueprint has been
    made, and so everything checked that was asked for.
    Raises: CheckpointError for anything wrong with the files, ValueError for hf_overrides that
    nothing reads.
    """
    access = _access(options)
    only = WITHOUT_WEIGHTS + (OF_CODE if options.trust_remote_code else ())
    directory = resolve_model(_given(options), revision=options.revision, only=only, access=access)
    written = config = read_config(directory)
    overrides = options.hf_overrides or {}
    if overrides:
        values = _overridden(config.values, overrides)
        config = ConfigReader(values, f"{config.where} with hf_overrides")
    spec, layout = read(config)
    if not options.skip_tokenizer_init:
        where, revision = directory, options.tokenizer_revision
        if options.tokenizer is not None or revision is not None:
            other = _given(options) if options.tokenizer is None else options.tokenizer
            where = resolve_model(
                other, revision=revision, only=only, access=access, option="tokenizer"
            )
        tokenizer = load_tokenizer(where, trust_remote_code=options.trust_remote_code)
        if options.chat_template is not None:
            tokenizer.chat_template = _template(options.chat_template)
        check_vocabulary(tokenizer, spec.vocab_size, where)
    # One that is there and no file is no missing one.
    found = os.path.lexists(directory / GENERATION)
    pooling = read_pooling(directory, config, spec, layout, options.runner, tokenizer)
    layout = layout if pooling is None else pooling_layout(layout)
    generation = read_config(directory, GENERATION) if found else ConfigReader({}, GENERATION)
    defaults = {} if options.generation_config == "vllm" else generation.values
    eos_ids = _eos_ids(config, generation, tokenizer, spec.vocab_size)
    if unread := [*_unread(overrides, written.values, config.asked)]:
        raise ValueError(
            f"hf_overrides: expected keys of {written.where}, or others that are read from it, got "
            f"{', '.join(unread)}: leave out what changes nothing"
        )
    is_dummy = options.load_format == "dummy"
    model = Model(
        directory=directory,
        spec=spec,
        layout=layout,
        stored_dtype=None if is_dummy else stored_dtype(directory, spec),
        pooling=pooling,
        tokenizer=tokenizer,
        generation={**defaults, **_overriding(options.override_generation_config)},
        eos_ids=frozenset(eos_ids),
        eos_id=eos_ids[0] if eos_ids else None,
        weights={},
    )
    return replace(model, draft=_find_draft(options, model))


def _find_draft(options: EngineOptions, model: Model) -> Model | None:
    """Reads the files of the draft model for this one; None if none is asked for."""
    drafting = draft_options(options, model.spec)
    if drafting is None:
        return None
    own = own_predictor(options, model.spec, model.layout)
    if own is None:
        read = partial(read_draft, options=options, spec=model.spec, layout=model.layout)
        draft = find_model(drafting, model.tokenizer, read)
    elif model.stored_dtype is None:
        draft = replace(model, spec=own[0], layout=own[1], generation={}, eos_ids=frozenset())
    else:
        raise CheckpointError(
            f"{model.directory}: expected the checkpoint that was converted, for method 'mtp': "
            f"`jaxkv convert` leaves the layer out that predicts later tokens"
        )
    check_draft(draft.spec, drafting, model.spec, key="model" if own is None else "method")
    return draft


def _access(options: EngineOptions) -> Access:
    return Access(token=options.hf_token, cache_dir=options.download_dir)


def _overridden(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values with these in their place; objects are merged key by key."""
    merged = dict(values)
    for key, value in changes.items():
        is_object = isinstance(value, Mapping) and isinstance(values.get(key), Mapping)
        merged[key] = _overridden(values[key], value) if is_object else value
    return merged


def _unread(changes: Mapping[str, Any], values: Mapping[str, Any], asked: Any) -> Iterator[str]:
    """Yields the keys of changes that no value has and nobody asked for: what they say is lost. In
    an object whose keys nobody asked for they are names, such as those of modules.
    """
    for key, value in changes.items():
        if key not in values and key not in asked:
            yield key
        elif isinstance(value, Mapping) and asked.get(key):
            own = values.get(key)
            inner = _unread(value, own if isinstance(own, Mapping) else {}, asked[key])
            yield from (f"{key}.{name}" for name in inner)


def _params_of(generation: Mapping[str, Any]) -> SamplingParams:
    """Returns what values of a generation_config.json ask for. Raises: ValueError."""
    given = {k: v for k in DEFAULTED if (v := generation.get(k)) is not None}
    most = given.pop("max_new_tokens", None)
    if most is not None and (not is_int(most) or most < 1):
        raise ValueError(f"max_new_tokens: expected a number >= 1, got {most!r}")
    return SamplingParams(**given, **({} if most is None else {"max_tokens": most}))


def _overriding(changes: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Returns what overrides generation_config.json. Raises: ValueError for what changes nothing,
    or is out of range.
    """
    changes = changes or {}
    if unknown := sorted(changes.keys() - {*DEFAULTED}):
        raise ValueError(
            f"override_generation_config: expected only {', '.join(DEFAULTED)}, got "
            f"{', '.join(unknown)}"
        )
    try:
        _params_of(changes)
    except ValueError as error:
        raise ValueError(f"override_generation_config: {error}") from error
    return changes


def _template(given: str | os.PathLike[str]) -> str:
    """Returns a chat template: the text of a file, or what was given where that is a template."""
    if isinstance(given, str) and any(mark in given for mark in "{}\n"):
        return given
    path = Path(given).expanduser()
    if not path.is_file():
        raise ValueError(f"chat_template: expected a file or the text of a template, got {given!r}")
    return path.read_text(encoding="utf-8")


def _given(options: EngineOptions) -> str | os.PathLike[str]:
    return DEMO if options.model is None else options.model


def calibration_tokens(spec: ModelSpec, tokenizer: Any | None) -> np.ndarray:
    """Returns the text that keys are fitted to, [T] int32; random tokens where no tokenizer makes
    any of it.
    """
    num_tokens = min(FIT_TOKENS, spec.max_len)
    if tokenizer is not None:
        text = CALIBRATION.read_text(encoding="utf-8")
        if ids := tokenizer(text, truncation=True, max_length=num_tokens)["input_ids"]:
            return np.clip(np.array(ids, np.int32), 0, spec.vocab_size - 1)
    return np.random.default_rng(0).integers(0, spec.vocab_size, num_tokens, np.int32)


def with_fitted_keys(
    weights: Weights, token_T: np.ndarray, spec: ModelSpec, placement: Placement
) -> Weights:
    """Returns weights of the same function with keys that lose less by being quantised
    (`programs.fit_keys`).
    """
    affine = fit_keys(weights, token_T, spec=spec, placement=placement)
    return with_layer_leaf(weights, "k_affine", put(affine, K_AFFINE, placement))


def _eos_ids(
    config: ConfigReader, generation: ConfigReader, tokenizer: Any, vocab_size: int
) -> list[int]:
    """Returns the tokenizer's end token first, then generation_config.json's, else config.json's,
    which may have them in its text part.

    One outside the vocabulary is left out: it cannot be sampled.
    """
    readers = (generation, config, text_part(config))
    reader = next((one for one in readers if one.get("eos_token_id") is not None), config)
    given = reader.get("eos_token_id", [])
    ids = given if isinstance(given, list) else [given]
    if not all(is_int(i) for i in ids):
        raise reader.fail("eos_token_id", "a token id or a list of them")
    own = getattr(tokenizer, "eos_token_id", None)
    ids = [i for i in ([] if own is None else [own]) + ids if 0 <= i < vocab_size]
    if len({*ids}) > NUM_STOP_TOKENS:
        raise reader.fail("eos_token_id", f"at most {NUM_STOP_TOKENS} token ids")
    return ids
