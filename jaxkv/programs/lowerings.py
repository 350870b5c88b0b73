"""Says how each program of an engine is lowered: by which function, and for arguments of which
shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jax.stages import Compiled

from jaxkv.config import EngineConfig
from jaxkv.kv.policies import get_policy
from jaxkv.kv.state import PagedKV
from jaxkv.models.decoder import body_of, head_of
from jaxkv.models.spec import ModelSpec
from jaxkv.ops.attention import Backend
from jaxkv.ops.sampling import Sampling
from jaxkv.placement import Placement
from jaxkv.programs.adapters import write_adapter
from jaxkv.programs.buckets import drawn_rows, num_step_rows
from jaxkv.programs.draft import Draft
from jaxkv.programs.draw import draw, prompt_scores
from jaxkv.programs.inputs import (
    abstract_full,
    empty_batch,
    empty_newest,
    empty_rows,
    empty_sampling,
    empty_tables,
)
from jaxkv.programs.loop import decode_loop
from jaxkv.programs.pages import copy_pages, copy_states, demote_pages, measure_pages
from jaxkv.programs.pool import norm_of, pool
from jaxkv.programs.speculation import speculative_loop, write_text
from jaxkv.programs.step import Last, Newest, step
from jaxkv.weights.tree import Weights, adapters_of


class Lowering(NamedTuple):
    """Holds a jitted function and the abstract arguments that it is for. It is traced when it is
    compiled only: what comes from files need not be.
    """

    jitted: Any
    arguments: tuple[Any, ...]

    def compile(self, options: Mapping[str, str] | None) -> Compiled:
        return self.jitted.lower(*self.arguments).compile(options)


@dataclass(frozen=True, kw_only=True)
class Lowerings:
    """Holds what the programs of one engine are lowered for. weights, kv: shapes."""

    weights: Weights
    kv: PagedKV
    spec: ModelSpec
    config: EngineConfig
    backend: str | Backend
    draft: Draft | None
    placement: Placement | None

    def step(self, num_tokens: int) -> Lowering:
        rows = num_step_rows(self.config.max_num_seqs, num_tokens)
        batch, newest = self._whole(empty_batch(num_tokens, rows)), self._newest_for(rows)
        inputs = (body_of(self.weights), self._kv_for(rows), newest, batch)
        static = {"backend": self.backend, "draft": self.draft, **self._model}
        return lowering(step, *inputs, donate=("kv",), **static)

    def draw(self, num_rows: int) -> Lowering:
        most = drawn_rows(self.config.max_num_seqs)[-1]
        last = Last(
            hidden_RD=abstract_full((most, self.spec.hidden_size), 0, np.float32),
            position_R=abstract_full((most,), 0),
            ended_R=abstract_full((most,), 0, np.bool_),
        )
        inputs = (self._whole(last), self._newest_for(num_rows), self.sampling_for(num_rows))
        static = {"num_logprobs": self.config.max_logprobs, **self._model}
        return lowering(draw, head_of(self.weights), *inputs, donate=(), **static)

    def scores(self, num_tokens: int) -> Lowering:
        size = (num_tokens, self.spec.hidden_size)
        inputs = self._whole((abstract_full(size, 0, np.float32), abstract_full((num_tokens,), 0)))
        static = {"num_logprobs": self.config.max_logprobs, **self._model}
        return lowering(prompt_scores, head_of(self.weights), *inputs, donate=(), **static)

    def pool(self, num_tokens: int) -> Lowering:
        hidden_TD = abstract_full((num_tokens, self.spec.hidden_size), 0, np.float32)
        batch = empty_batch(num_tokens, num_step_rows(self.config.max_num_seqs, num_tokens))
        inputs = (norm_of(self.weights), *self._whole((hidden_TD, batch)))
        return lowering(pool, *inputs, donate=(), kind=self.config.pooled, **self._model)

    def loop(self, num_rows: int) -> Lowering:
        rows, n = self._whole((empty_rows(num_rows), np.int32(0)))
        kv, newest = self._kv_for(num_rows), self._newest_for(num_rows)
        inputs = (self.weights, kv, newest, rows, self.sampling_for(num_rows), n)
        return lowering(decode_loop, *inputs, donate=("kv", "rows"), **self._loop)

    def speculate(self, num_rows: int) -> Lowering:
        rows, sampling = self._whole(empty_rows(num_rows)), self.sampling_for(num_rows)
        kv, newest = self._kv_for(num_rows), self._newest_for(num_rows)
        inputs = (self.weights, kv, newest, self.text_RN, rows, sampling)
        static = {"speculation": self.config.speculation, **self._loop}
        return lowering(speculative_loop, *inputs, donate=("kv", "text_RN"), **static)

    def text(self, num_tokens: int) -> Lowering:
        row, token_N = self._whole((np.int32(0), abstract_full((num_tokens,), 0)))
        return lowering(write_text, self.text_RN, row, token_N, donate=("text_RN",))

    def copy(self, num_pages: int) -> Lowering:
        pages_C, n = self._whole((np.zeros(num_pages, np.int32), np.int32(0)))
        return lowering(copy_pages, self.kv, pages_C, pages_C, n, donate=("kv",))

    def states(self, num_states: int) -> Lowering:
        slots_C, n = self._whole((np.zeros(num_states, np.int32), np.int32(0)))
        inputs = (self.kv, slots_C, slots_C, n)
        return lowering(copy_states, *inputs, donate=("kv",), num_slots=self.config.num_slots)

    def demote(self, num_pages: int) -> Lowering:
        pages_C, n = self._whole((np.zeros(num_pages, np.int32), np.int32(0)))
        return lowering(demote_pages, self.kv, pages_C, pages_C, n, donate=("kv",))

    def measure(self, num_pages: int) -> Lowering:
        policy = get_policy(self.config.kv_policy)
        if policy is None or policy.measure is None:
            raise ValueError(f"kv_policy {self.config.kv_policy}: nothing is measured")
        pages = self._whole(np.zeros(num_pages, np.int32))
        return lowering(measure_pages, self.kv, pages, donate=(), measure=policy.measure)

    def adapter(self, count: int) -> Lowering:
        adapters, size = adapters_of(self.weights), self.placement

        def one(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            num_layers, _, *rest = leaf.shape
            if size is None:
                return jax.ShapeDtypeStruct((num_layers, *rest), leaf.dtype)
            layers, _, *parts = size.weight(path[-1].key, leaf.shape)
            return size.abstract((num_layers, *rest), leaf.dtype, PartitionSpec(layers, *parts))

        own_adapter = jax.tree_util.tree_map_with_path(one, adapters)
        inputs = (adapters, own_adapter, self._whole(np.int32(0)))
        return lowering(write_adapter, *inputs, donate=("adapters",), placement=self.placement)

    @property
    def _model(self) -> dict[str, Any]:
        """Returns the static arguments that all programs of a model take."""
        return {"spec": self.spec, "placement": self.placement}

    @property
    def _loop(self) -> dict[str, Any]:
        """Returns the static arguments that all decode loops take."""
        config = self.config
        steps = {"width": config.decode_steps, "num_logprobs": config.max_logprobs}
        return {"backend": self.backend, "draft": self.draft, **steps, **self._model}

    @property
    def text_RN(self) -> Any:
        """Returns the shape of the rows' text, None where no proposal is looked up in it."""
        if self.config.speculation is None or not self.config.speculation.reads_text:
            return None
        return self._whole(abstract_full((self.config.max_num_seqs, self.config.max_len), 0))

    def _newest_for(self, num_rows: int) -> Newest:
        return self._whole(empty_newest(self.config.max_num_seqs, num_rows))

    def sampling_for(self, num_rows: int) -> Sampling:
        sizes = {"vocab_size": self.spec.vocab_size, "max_len": self.config.max_len}
        return self._whole(empty_sampling(num_rows, **sizes, make=abstract_full))

    def _kv_for(self, num_rows: int) -> PagedKV:
        """Returns the shapes of the KV state with the tables of so many rows."""
        return replace(
            self.kv, rows=self._whole(empty_tables(self.config, num_rows, abstract_full))
        )

    def _whole(self, tree: Any) -> Any:
        """Returns the shapes of inputs that every device has."""
        sharding = (
            self.placement.sharding()
            if self.placement is not None and self.placement.size > 1
            else None
        )
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=sharding), tree
        )


def lowering(jitted: Any, *arguments: Any, donate: tuple[str, ...], **static: Any) -> Lowering:
    """Returns how a function of a module is lowered for these arguments."""
    return Lowering(own(jitted, donate=donate, **static), arguments)


def own(jitted: Any, *, donate: tuple[str, ...], **static: Any) -> Any:
    """Jits a function of a module once more, for one caller: what jax traces and compiles it keeps
    as long as the function lives, which a module's does for ever.
    """
    return jax.jit(partial(jitted.__wrapped__, **static), donate_argnames=donate)


def lower(function: Callable[..., Any], *arguments: Any, donate: int) -> Any:
    """Lowers `function` alone, for the devices that its abstract arguments are on; the argument
    `donate` is given away.
    """
    return jax.jit(function, donate_argnums=donate).lower(*arguments)


class Kind(NamedTuple):
    """Says what programs of a kind have in common: what their size counts; how one of a size is
    lowered; which of its arguments and results are counted elsewhere, as they are there whether it
    runs or not; and whether it reads or writes the pool, which is counted elsewhere too.
    """

    unit: str
    lower: Callable[[Lowerings, int], Lowering]
    counted: Callable[[Lowerings, int], Any]
    has_pool: bool


def _nothing(lowerings: Lowerings, size: int) -> None:
    return None


KINDS = {
    "step": Kind("tokens", Lowerings.step, lambda x, n: body_of(x.weights), True),
    "draw": Kind(
        "rows",
        Lowerings.draw,
        lambda x, n: (head_of(x.weights), x.sampling_for(n)),
        False,
    ),
    "scores": Kind("tokens", Lowerings.scores, lambda x, n: head_of(x.weights), False),
    "pool": Kind("tokens", Lowerings.pool, lambda x, n: norm_of(x.weights), False),
    "loop": Kind("rows", Lowerings.loop, lambda x, n: (x.weights, x.sampling_for(n)), True),
    "speculate": Kind(
        "rows",
        Lowerings.speculate,
        lambda x, n: (x.weights, x.sampling_for(n), x.text_RN),
        True,
    ),
    "text": Kind("tokens", Lowerings.text, lambda x, n: x.text_RN, False),
    "copy": Kind("pages", Lowerings.copy, _nothing, True),
    "states": Kind("slots", Lowerings.states, _nothing, True),
    "demote": Kind("pages", Lowerings.demote, _nothing, True),
    "measure": Kind("pages", Lowerings.measure, _nothing, True),
    "adapter": Kind("slot", Lowerings.adapter, lambda x, n: adapters_of(x.weights), False),
}
"""What there is of each kind is what `Programs` says."""
