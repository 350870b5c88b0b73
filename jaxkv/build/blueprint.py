"""An engine that could be: all that follows from what was asked for, from a model's config and from
the kind of its devices, before there are weights or pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxkv.build.codecs import (
    Codecs,
    check_keys,
    check_widths,
    describe_codecs,
    exact_layers,
    group_codecs,
)
from jaxkv.build.limits import are_alike, auto_dtype, auto_page_size, make_limits, with_windows
from jaxkv.build.memory import Budget, Memory
from jaxkv.build.options import ABOUT, EngineOptions
from jaxkv.build.pool import plan_pool
from jaxkv.config import EngineConfig, bfloat16_as_bits, is_int
from jaxkv.holding.retention import full_pages
from jaxkv.kv.codecs import Codec, PlainCodec, RotatingCodec, get_codec
from jaxkv.kv.layout import HeadMajorLayout, LaneRowsLayout, PageLayout
from jaxkv.kv.policies import SparseAttention, get_policy, resolve
from jaxkv.kv.state import PagedKV, Store, choosing, empty_store
from jaxkv.models.families import Layout
from jaxkv.models.paged import heads_of
from jaxkv.models.spec import ModelSpec
from jaxkv.ops.attention import BACKENDS, Backend, Heads, Needs, Xla, choose_backend
from jaxkv.placement import K_AFFINE, OnMesh, Placement, most_context, place
from jaxkv.programs.compiled import Programs
from jaxkv.programs.draft import Draft
from jaxkv.programs.filling import fill
from jaxkv.programs.rounding import quantise
from jaxkv.weights.adapters import empty_adapters
from jaxkv.weights.dummy import leaf_arrays, sure_leaves, weight_shapes
from jaxkv.weights.load import Kept
from jaxkv.weights.packing import METHODS, num_bytes
from jaxkv.weights.tree import Weights, with_draft, with_layer_leaf

if TYPE_CHECKING:
    from jaxkv.programs.executables import ProgramFiles


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """Holds what an engine is built from, and says what it takes. Making one reads no weights and
    allocates nothing, and the devices may be stand-ins of which only `platform` is known.

    spec: the model's, with the layers that have a codec or a page table of their own apart. dtype:
    of the weights, never "auto". codecs: one for each KV group. limits: with a pool of one page
    until `with_pages` says how many there are. backend_reason: why it is this one. draft: a draft
    model's, which has a part of every page.
    """

    options: EngineOptions
    spec: ModelSpec
    layout: Layout
    dtype: str
    placement: Placement
    codecs: Codecs
    limits: EngineConfig
    backend: str
    backend_reason: str
    draft: Blueprint | None = None

    @property
    def platform(self) -> str:
        return self.placement.devices[0].platform

    @property
    def num_devices(self) -> int:
        return self.placement.size

    @property
    def kv_copies(self) -> str:
        """Says how many devices have the same of each KV head: "2", or "1 or 2" where layers differ
        in it; nothing where each has its own.
        """
        placement, groups = self.placement, (one for one in self.spec.groups if one.layers)
        parts = [group.num_parts(placement.size) for group in groups]
        counts = {placement.size // (count * placement.token_parts(count)) for count in parts}
        return " or ".join(map(str, sorted(counts))) if max(counts, default=1) > 1 else ""

    @property
    def attention(self) -> Backend:
        """Returns the backend with those of its fields that are options of the engine or follow
        from its devices.
        """
        backend: Any = BACKENDS[self.backend]
        names = [one.name for one in fields(backend) if one.name in ABOUT]
        given = {name: getattr(self.options, name) for name in names}
        if isinstance(backend, Xla):
            given["on_lanes"] = self.platform == "tpu"
        if self.placement.context > 1:
            given["tokens_over"] = self.placement.axis
        return replace(backend, **given)

    def attention_over(self, num_parts: int) -> Backend:
        """Returns the backend as it is to KV groups whose heads are divided into so many parts."""
        backend: Any = self.attention
        if self.placement.context > 1 and self.placement.token_parts(num_parts) == 1:
            return replace(backend, tokens_over=None)
        return backend

    @property
    def kv_cache_dtype(self) -> str:
        """Says for people how the cache is stored: "int8", or "int8, layers 0, 3 in bfloat16"."""
        return describe_codecs(self.spec, self.codecs)

    @property
    def low_codecs(self) -> Codecs | None:
        """Returns the codecs of the pages that the policy demotes; None if it demotes none."""
        policy = get_policy(self.limits.kv_policy)
        if policy is None or policy.low is None:
            return None
        # None of those that pages are demoted to has another form elsewhere.
        return tuple(
            get_codec(policy.low, platform="cpu", dtype=codec.dtype) for codec in self.codecs
        )

    @property
    def fits_keys(self) -> bool:
        """Says whether keys are to be fitted to being quantised (`programs.fit_keys`), in some
        pages at least.
        """
        asked = self.spec.attention
        if "embed" not in self.layout.top:  # a layer that predicts, which text alone does not run
            return False
        if asked.cap or asked.has_sinks:  # where an offset of all scores changes the softmax
            return False
        if self.spec.num_kinds > 1:  # no stack has the keys of all layers
            return False
        if self.spec.states:  # what is fitted would need slots for them
            return False
        if any(group.latent_dim for group in self.spec.groups):  # keys are values too
            return False
        if asked.index is not None:  # what is measured attends to all keys
            return False
        if asked.has_distances:  # what is measured has scores of queries and keys alone
            return False
        return any(codec.fits_keys for codec in self.codecs + (self.low_codecs or ()))

    # --- other blueprints

    def with_pages(self, num_pages: int) -> Blueprint:
        """Returns the same engine with a pool of so many pages."""
        return replace(self, limits=replace(self.limits, num_pages=num_pages))

    def on(self, devices: Sequence[jax.Device]) -> Blueprint:
        """Returns the same engine on other devices of the same platform."""
        options, spec, layout = self.options, self.spec, self.layout
        placement, draft = _place(options, spec, layout, devices, self.draft)
        return replace(self, placement=placement, draft=draft)

    @property
    def quantization(self) -> str | None:
        """Returns what weights are quantised to as they are loaded; None for those that are stored
        so.
        """
        return None if self.layout.quantisation else self.options.quantization

    @property
    def kept(self) -> Kept:
        """Says how weights are kept."""
        return Kept(
            dtype=self.dtype,
            as_bits=self.dtype == "bfloat16" and bfloat16_as_bits(self.platform),
            placement=self.placement,
            check=self.options.load_format != "unchecked",
            quantization=self.quantization,
            quantise=quantise,
            fill=None if self.platform == "cpu" else fill,
        )

    # --- what it takes, in bytes of one device

    @cached_property
    def page_nbytes(self) -> int:
        """Counts one page over all layers of a store, with what a policy has beside each: part of a
        demoted page, or the extremes of its keys; and with the draft model's part. One that holds
        nothing counts as a byte, so that there is an end to how many fit.
        """
        limits, nbytes, low = self.limits, self._page_nbytes(self.codecs), self.low_codecs
        if self.draft is not None:
            nbytes += self.draft.page_nbytes
        if (hidden := self._hidden) is not None:
            nbytes += hidden.nbytes
        if limits.read_pages:
            nbytes += sum(
                len(group.layers) * 2 * heads.num_kv_heads * heads.head_dim * 4
                for group, heads in zip(self.spec.groups, self._heads, strict=True)
                if group.window is None
            )
        if low is None:
            return max(1, nbytes)
        return nbytes + -(-self._page_nbytes(low) * limits.low_row_pages // limits.row_pages)

    def _page_nbytes(self, codecs: Codecs) -> int:
        """Counts one page over all layers of a store, stored in these codecs."""
        nbytes = 0
        for num_layers, heads, codec, num_parts in self._stores(codecs):
            attention = self.attention_over(num_parts)
            page = attention.page_layout(heads, self.limits.block_size, codec)
            nbytes += num_layers * page.nbytes // self.placement.token_parts(num_parts)
        return nbytes

    def _stores(self, codecs: Codecs) -> list[tuple[int, Heads, Codec, int]]:
        """Lists the stores, each with its layers, what attention has to do there, its codec, and
        into how many parts devices divide its heads: one for all KV groups if their pages are
        alike, else one for each. Pages in other codecs, that they are demoted to, are divided as
        they are.
        """
        sizes = [len(group.layers) for group in self.spec.groups]
        parts = [group.num_parts(self.num_devices) for group in self.spec.groups]
        each = list(zip(sizes, self._heads, codecs, parts, strict=True))
        if not are_alike(self.spec, self.codecs) or self.limits.read_pages:
            return each
        # Groups with page tables of their own take turns: a page is of one of them.
        total = max(sizes) if len(self.limits.windows) > 1 else sum(sizes)
        return [(max(1, total), *each[0][1:])]

    @property
    def _hidden(self) -> PageLayout | None:
        """Says how a page has the hidden state of its last token (`programs.draft`): as the row of
        a page of one token, on a TPU in rows of 128 lanes, as XLA would copy the store wherever it
        writes else; None where nothing reads it.
        """
        if self.draft is None or self.draft.layout.hidden_states is None:
            return None
        size = self.draft.spec.hidden_size
        kind = LaneRowsLayout if self.platform == "tpu" else HeadMajorLayout
        codec = PlainCodec(dtype="float32")
        return kind(num_kv_heads=1, head_dim=size, page_size=1, codec=codec, latent_dim=size)

    @cached_property
    def slot_nbytes(self) -> int:
        """Counts the recurrent state of one row, over all layers."""
        size, nbytes = self.num_devices, 0
        for state in self.spec.states:
            for array in state.arrays:
                parts = 1 if array.axis is None else size
                nbytes += (
                    len(state.layers) * num_bytes(array.shape, jnp.dtype(array.dtype)) // parts
                )
        return nbytes

    @property
    def state_nbytes(self) -> int:
        """Counts the recurrent states of all slots."""
        return self.limits.num_slots * self.slot_nbytes

    @property
    def token_nbytes(self) -> int:
        """Counts one token of the KV cache, on all devices together."""
        nbytes = self._page_nbytes(self.codecs) * len(self.limits.windows)
        if (hidden := self._hidden) is not None:
            nbytes += hidden.nbytes
        own = nbytes * self.num_devices // self.limits.block_size
        return own if self.draft is None else own + self.draft.token_nbytes

    def sequence_nbytes(self, context: int) -> int:
        """Counts the KV cache of so many tokens, or of what its policy and windows leave, on all
        devices together.
        """
        pages = -(-context // self.limits.block_size)
        held = self.limits.row_pages_for(pages)
        if held == pages * len(self.limits.windows):
            return context * self.token_nbytes
        return held * self.page_nbytes * self.num_devices

    @cached_property
    def weight_bytes(self) -> int:
        """Counts the weights, a draft model's too; a head that may be tied is."""
        total = 0 if self.draft is None else self.draft.weight_bytes
        kept = self.kept
        for leaf in sure_leaves(self.spec, self.layout, self.quantization):
            arrays = leaf_arrays(leaf, self.layout.quantisation, kept)
            for suffix, (shape, dtype) in arrays.items():
                parts = self.placement.weight(leaf.path + suffix, shape)
                total += num_bytes(shape, dtype) // math.prod(map(self.placement.num_parts, parts))
        return total

    # --- what is built from it

    def budget(self, memory: Memory, weights: Weights, files: ProgramFiles | None = None) -> Budget:
        """Returns the pages that the pool gets and why; see `plan_pool`. `weights` may be
        shapes. `files`: as for `programs`.
        """
        return plan_pool(
            self.limits,
            self.page_nbytes,
            memory.with_states(self.state_nbytes),
            memory_bytes=self.options.kv_cache_memory_bytes,
            pages_override=self.options.num_gpu_blocks_override,
            programs_for=lambda limits, num_pages: replace(self, limits=limits).programs(
                weights, num_pages, files
            ),
        )

    def programs(
        self, weights: Weights, num_pages: int | None = None, files: ProgramFiles | None = None
    ) -> Programs:
        """Returns the programs of this engine, not compiled. `weights` may be shapes.

        num_pages: pages of the pool, by default those of the limits, which bound the length of
        rows all the same. files: where they are kept for the next start.
        """
        sized = self if num_pages is None else self.with_pages(num_pages)
        return Programs(
            weights,
            sized.abstract_kv(),
            spec=self.spec,
            config=self.limits,
            backend=self.attention,
            draft=self._draft,
            placement=self.placement,
            files=files,
        )

    @property
    def _draft(self) -> Draft | None:
        """Returns what the programs need of the draft model; None without one."""
        draft = self.draft
        if draft is None:
            return None
        return Draft(
            spec=draft.spec, backend=draft.attention, hidden_states=draft.layout.hidden_states
        )

    def empty_adapters(self) -> dict[str, Any]:
        """Allocates room for the adapters of requests; {} without enable_lora."""
        if not self.options.enable_lora:
            return {}
        return empty_adapters(
            self.spec,
            self.layout,
            self.placement,
            count=self.options.max_loras,
            rank=self.options.max_lora_rank,
            dtype=self.dtype,
        )

    def abstract_weights(self) -> Weights:
        """Returns the shapes of the loaded weights on their devices, which may be those of a
        topology.
        """
        spec, placement = self.spec, self.placement
        weights: Weights = weight_shapes(spec, self.layout, self.kept)
        if self.draft is not None:
            weights = with_draft(weights, self.draft.abstract_weights())
        if not self.fits_keys:
            return weights
        # The leaf that `programs.fit_keys` adds.
        shape = (spec.num_layers, spec.groups[0].num_kv_heads * 2 * spec.groups[0].head_dim)
        parts = placement.weight(K_AFFINE, shape)
        return with_layer_leaf(weights, "k_affine", placement.abstract(shape, jnp.float32, parts))

    def empty_kv(self) -> PagedKV:
        """Returns the engine's zeroed KV state as the backend keeps it, on its devices.

        Raises: ValueError if the pool has more heads x pages than int32 can count.
        """
        self._check_count()
        if self.draft is not None:
            self.draft.with_pages(self.limits.num_pages)._check_count()
        return self._empty(self.placement)

    def _check_count(self) -> None:
        for num_layers, heads, _, num_parts in self._stores(self.codecs):
            kv_heads = heads.num_kv_heads * num_parts
            count = num_layers * self.limits.num_pages * 2 * kv_heads
            if count >= 2**31:
                raise ValueError(
                    f"num_gpu_blocks_override: expected layers x pages x 2 KV heads < 2**31, got "
                    f"{count}"
                )

    def abstract_kv(self) -> PagedKV:
        """Returns the shapes of `empty_kv` on devices that may be those of a topology. Allocates
        nothing.
        """
        kv = jax.eval_shape(partial(self._empty, None))
        return jax.tree.map(
            lambda x, parts: self.placement.abstract(x.shape, x.dtype, parts),
            kv,
            self.placement.kv(kv),
        )

    @property
    def _heads(self) -> tuple[Heads, ...]:
        return heads_of(self.spec, num_devices=self.num_devices)

    def _empty(self, placement: Placement | None) -> PagedKV:
        """Returns `empty_kv`. placement: where it is allocated; without one on the default device,
        whatever it is divided over.
        """
        limits = self.limits

        def where(parts: PartitionSpec) -> jax.sharding.Sharding | None:
            return None if placement is None else placement.sharding(parts)

        def empty(
            num_layers: int, heads: Heads, codec: Codec, num_parts: int, num_pages: int
        ) -> Store:
            attention = self.attention_over(num_parts)
            layout = attention.page_layout(heads, limits.block_size, codec)
            pages, extremes = self.placement.of_pages(num_parts)
            made = empty_store(
                num_layers=num_layers,
                layout=layout,
                num_pages=num_pages,
                num_devices=num_parts,
                device=where(pages),
            )
            if not limits.read_pages or heads.window is not None:
                return made
            return choosing(
                made,
                heads.num_kv_heads * num_parts,
                heads.head_dim,
                num_read=limits.read_pages,
                device=where(extremes),
            )

        stores = [empty(*store, limits.num_pages) for store in self._stores(self.codecs)]
        if (low := self.low_codecs) is not None:
            of_low = (empty(*store, limits.num_low_pages) for store in self._stores(low))
            stores = [replace(store, low=of) for store, of in zip(stores, of_low, strict=True)]
        states = tuple(
            tuple(
                jnp.zeros(
                    (len(state.layers) * limits.num_slots, *array.shape),
                    array.dtype,
                    device=where(parts),
                )
                for array, parts in zip(state.arrays, parts_of, strict=True)
            )
            for state, parts_of in zip(self.spec.states, self.placement.states, strict=True)
        )
        kv = PagedKV(tuple(stores), states=states)
        if self.draft is None:
            return kv
        own = self.draft.with_pages(limits.num_pages)._empty(placement).stores
        if (hidden := self._hidden) is not None:
            num_pages, device = limits.num_pages, where(PartitionSpec())
            store = empty_store(num_layers=1, layout=hidden, num_pages=num_pages, device=device)
            own = (*own, store)
        return replace(kv, stores=(*kv.stores, *own), num_draft=len(own))


def _check_quantization(asked: str | None, layout: Layout) -> None:
    """Raises ValueError for a method that is none, or another one than weights are stored by."""
    stored = layout.quantisation
    if stored is not None and asked not in (None, stored.method.partition(",")[0]):
        raise ValueError(
            f"quantization: expected None for weights that are stored quantised "
            f"({stored.method}), got {asked!r}"
        )
    if stored is None and asked not in (None, *METHODS):
        raise ValueError(
            f"quantization: expected None or one of {', '.join(METHODS)} for weights that are not "
            f"stored quantised, got {asked!r}"
        )


def make_blueprint(
    options: EngineOptions,
    spec: ModelSpec,
    layout: Layout,
    devices: Sequence[jax.Device],
    *,
    stored_dtype: str | None = None,
    keeps_all: bool = False,
    pooled: str = "",
    draft: Blueprint | None = None,
) -> Blueprint:
    """Derives all that an engine is built from.

    devices: the first `tensor_parallel_size` of them are used. stored_dtype: what "auto" takes for
    the dtype of weights that have been converted. keeps_all: rows keep what is behind windows too,
    in one page table. pooled: as in `EngineConfig`. draft: of the draft model, which keeps all;
    then rows of this one do too.
    Raises: ValueError for an option that this model or platform has no room for,
    NotImplementedError for a backend or policy that cannot do what was asked for.
    """
    if keeps_all:
        options = _as_far_as_divided(options, spec)
    skipped = options.kv_cache_dtype_skip_layers
    spec = spec.apart(exact_layers(spec, skipped))
    _check_quantization(options.quantization, layout)
    try:
        placement, draft = _place(options, spec, layout, devices, draft)
    except ValueError as error:
        if not keeps_all:
            raise
        raise ValueError(f"speculative_config: of the draft model, {error}") from error
    platform = placement.devices[0].platform
    dtype = options.dtype
    if dtype == "auto":
        dtype = stored_dtype or auto_dtype(platform)
    codecs = group_codecs(spec, options.kv_cache_dtype, skipped, platform=platform, dtype=dtype)
    # A policy says itself what stays. The pages of a draft model are those of one table.
    is_plain = not keeps_all and draft is None and resolve(options.kv_policy) is None
    heads = heads_of(spec, num_devices=placement.size)
    page_size = auto_page_size(platform, heads, codecs) if is_plain else auto_page_size(platform)
    limits = make_limits(options, spec, platform, page_size=page_size)
    _check_parts(limits.block_size, options.decode_context_parallel_size, spec)
    limits = replace(limits, pooled=pooled)
    if is_plain:
        spec, limits = with_windows(spec, limits, codecs)
        codecs = group_codecs(spec, options.kv_cache_dtype, skipped, platform=platform, dtype=dtype)
    backend, reason = _choose_backend(options, spec, placement, codecs, limits)
    everything = Blueprint(
        options=options,
        spec=spec,
        layout=layout,
        dtype=dtype,
        placement=placement,
        codecs=codecs,
        limits=replace(limits, aligned_len=BACKENDS[backend].aligned_len),
        backend=backend,
        backend_reason=reason,
        draft=draft,
    )
    _check_tiers(everything)
    if not spec.kv_layers and options.kv_cache_memory_bytes is not None:
        raise ValueError(
            f"kv_cache_memory_bytes: expected None for a model without keys and values, got "
            f"{options.kv_cache_memory_bytes!r}"
        )
    _check_speculation(everything)
    return _under_policy(everything)


def _as_far_as_divided(options: EngineOptions, spec: ModelSpec) -> EngineOptions:
    """Returns the options of a draft model, of which fewer devices may have the same KV heads than
    of its model. What cannot be is left to whoever refuses it.
    """
    size, context = options.tensor_parallel_size, options.decode_context_parallel_size
    if not is_int(size) or not is_int(context) or size < 1:
        return options
    context = math.gcd(context, most_context(spec, size))
    return replace(options, decode_context_parallel_size=context)


def _place(
    options: EngineOptions,
    spec: ModelSpec,
    layout: Layout,
    devices: Sequence[jax.Device],
    draft: Blueprint | None,
) -> tuple[Placement, Blueprint | None]:
    """Returns where a model is, and its draft model on the same mesh."""
    own = partial(
        place,
        *(spec, layout, devices, options.tensor_parallel_size),
        context=options.decode_context_parallel_size,
        by_expert=options.enable_expert_parallel,
    )
    if draft is None:
        return own(), None
    asked = draft.options
    placement = place(
        *(draft.spec, draft.layout, devices, asked.tensor_parallel_size),
        context=asked.decode_context_parallel_size,
        by_expert=asked.enable_expert_parallel,
        beside=OnMesh(spec, layout, options.decode_context_parallel_size),
    )
    beside = OnMesh(draft.spec, draft.layout, asked.decode_context_parallel_size)
    return own(beside=beside).with_draft(placement), replace(draft, placement=placement)


def _check_parts(page_size: int, context: int, spec: ModelSpec) -> None:
    """Raises: ValueError for a page whose tokens cannot be divided between so many devices."""
    pool = 1 if spec.attention.index is None else spec.attention.index.pool
    if context & (context - 1):
        raise ValueError(
            f"decode_context_parallel_size: expected a power of 2, as the tokens of a page are "
            f"(block_size), got {context}"
        )
    if context > 1 and page_size % (context * pool):
        together = "" if pool == 1 else f" x the {pool} tokens that are chosen together"
        raise ValueError(
            f"block_size: expected a multiple of decode_context_parallel_size {context}{together}, "
            f"got {page_size}"
        )


def _check_tiers(blueprint: Blueprint) -> None:
    """Raises: ValueError for host memory or a disk beside what they do not hold."""
    options, limits = blueprint.options, blueprint.limits
    if options.kv_host_bytes:
        what = "kv_host_bytes: expected 0"
    elif options.kv_disk is not None:
        what = "kv_disk: expected None"
    else:
        return
    if limits.has_states:
        raise ValueError(f"{what} for a model with recurrent states, which are not kept there")
    if resolve(options.kv_policy) is not None:
        raise ValueError(f"{what} with kv_policy {options.kv_policy}")
    if not options.enable_prefix_caching:
        raise ValueError(f"{what} with enable_prefix_caching=False")


def _check_speculation(blueprint: Blueprint) -> None:
    """Raises: NotImplementedError where proposals that do not hold could not be taken back."""
    options, limits = blueprint.options, blueprint.limits
    if limits.speculation is None:
        return
    if resolve(options.kv_policy) is not None:
        kept = f"kv_policy {options.kv_policy}, which would see proposals that do not hold"
    elif limits.pooled:
        kept = "a model that pools, which decodes nothing"
    else:
        return
    raise NotImplementedError(f"speculative_config: expected None for {kept}")


def _choose_backend(
    options: EngineOptions,
    spec: ModelSpec,
    placement: Placement,
    codecs: Codecs,
    limits: EngineConfig,
) -> tuple[str, str]:
    """Returns the backend and why it is this one."""
    device, asked = placement.devices[0], resolve(options.kv_policy)
    kv_policy = options.kv_policy if asked is not None and asked.asks_backend else None
    longest = -(-limits.max_model_len // limits.block_size)
    pages_per_row = max(limits.held_pages(longest, window) for window in limits.windows)
    needs = [
        Needs(
            page_size=limits.block_size,
            num_rows=limits.max_num_seqs,
            pages_per_row=pages_per_row,
            codec=codec,
            platform=device.platform,
            compute_capability=getattr(device, "compute_capability", None),
            kv_policy=kv_policy,
            token_parts=placement.token_parts(group.num_parts(placement.size)),
        )
        for group, codec in zip(spec.groups, codecs, strict=True)
    ]
    heads = heads_of(spec, num_devices=placement.size)
    return choose_backend(options.backend, heads, needs, deterministic=options.deterministic)


def _under_policy(everything: Blueprint) -> Blueprint:
    """Returns the blueprint with what its policy leaves of each row under a budget, in tokens.

    Raises: ValueError for an unknown policy or a budget that is too small, NotImplementedError for
    a codec of the pages that cannot be demoted from.
    """
    limits, codecs = everything.limits, everything.codecs
    name, budget = everything.options.kv_policy, everything.options.kv_budget
    asked = resolve(name)
    if asked is None:
        if budget is not None:
            raise ValueError(f"kv_budget: expected None with kv_policy {name}, got {budget!r}")
        return everything
    if limits.has_states:
        raise NotImplementedError(
            f"kv_policy {name}: expected full for a model whose layers keep recurrent states"
        )
    if everything.placement.context > 1:
        raise NotImplementedError(
            f"kv_policy {name}: expected full with decode_context_parallel_size "
            f"{everything.options.decode_context_parallel_size}"
        )
    if everything.spec.attention.index is not None:
        raise NotImplementedError(
            f"kv_policy {name}: expected full for a model whose tokens choose the keys they attend "
            "to"
        )
    limits = replace(limits, kv_policy=name)
    low = replace(everything, limits=limits).low_codecs
    rotating = [codec.name for codec in codecs if isinstance(codec, RotatingCodec)]
    if (low is not None or isinstance(asked, SparseAttention)) and rotating:
        raise NotImplementedError(
            f"kv_policy {name}: expected a kv_cache_dtype without a rotation, got {rotating[0]}"
        )
    is_latent = any(group.latent_dim for group in everything.spec.groups)
    if isinstance(asked, SparseAttention) and is_latent and everything.num_devices > 1:
        # The heads of each device would choose other pages of rows that all of them share.
        raise NotImplementedError(
            f"kv_policy {name}: expected tensor_parallel_size 1 with latent attention, got "
            f"{everything.num_devices}"
        )
    ratio = 1.0
    if low is not None:
        for codec in low:
            check_keys(everything.spec, codec)
        check_widths(everything.spec, low)
        ratio = everything._page_nbytes(low) / everything._page_nbytes(codecs)
        if ratio >= 1:
            raise ValueError(
                f"kv_policy {name}: expected a kv_cache_dtype larger than {low[0].name}, got "
                f"{codecs[0].name}"
            )
    most = full_pages(asked, budget, page_size=limits.block_size)
    if isinstance(asked, SparseAttention):
        return replace(everything, limits=replace(limits, read_pages=most))
    full, demoted = min(most, limits.pages_per_row), 0
    if low is not None and budget is not None:
        demoted = int((budget / limits.block_size - full) / ratio)
    return replace(everything, limits=replace(limits, row_pages=full, low_row_pages=demoted))
