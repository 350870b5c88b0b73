"""The engine without an engine: a model, a KV state that is a value, and functions from one to the
next.

    model = load()
    kv = empty(model, num_pages=64, page_size=16, num_rows=4)
    kv, logits = prefill(model, kv, [prompt])
    kv, tokens = decode(model, kv, logits.argmax(axis=-1), n=32)
    kv = fork(kv, 0, to=1)
    kv = rewind(kv, 1, length=10)

There is no hidden state: who holds which page stands in the `State`, and free is what nobody holds.
`prefill` and `decode` run the engine's own programs, which write the pages in place. So they
consume the state that they are given: it and everything forked or rewound from the same arrays is
dead afterwards, a RuntimeError when it is used again. `jax.tree.map(jnp.copy, kv)` keeps one.
`fork` and `rewind` look at tables only, and consume nothing. Whatever is refused (ValueError,
CapacityError) is refused before anything runs, with the state as it was.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.build.blueprint import Blueprint, make_blueprint
from jaxkv.build.compile_cache import kernel_folder, use_compile_cache
from jaxkv.build.joining import devices_for
from jaxkv.build.memory import check_room
from jaxkv.build.model import find_model
from jaxkv.build.options import EngineOptions
from jaxkv.build.selftest import make_tested
from jaxkv.config import MAX_INT32, EngineConfig, SamplingParams, is_int, own
from jaxkv.holding.allocator import KVHandle
from jaxkv.holding.handles import cut, free_pages, reserve
from jaxkv.kv.codecs import PlainCodec
from jaxkv.kv.layout import HeadMajorLayout
from jaxkv.kv.state import PagedKV, PageTables, Store, empty_store
from jaxkv.models.spec import KVGroup, ModelSpec
from jaxkv.ops import native
from jaxkv.ops.attention import Backend
from jaxkv.ops.sampling import NO_TOKEN
from jaxkv.placement import Placement
from jaxkv.processes import own_device
from jaxkv.programs import continuation as continuing
from jaxkv.programs.buckets import fit_bucket, num_step_rows, row_buckets, token_buckets
from jaxkv.programs.inputs import bind_tables, empty_newest, empty_rows, next_chunks, packed_batch
from jaxkv.programs.loop import decode_loop
from jaxkv.programs.pages import copy_pages
from jaxkv.programs.process import check_process
from jaxkv.programs.step import logits_step
from jaxkv.pytree import pytree, static
from jaxkv.requests.by_row import (
    check_rows,
    checked_ids,
    prompts_by_row,
    sampling_of,
    tokens_by_row,
)
from jaxkv.weights.tree import Weights, chooses_by_token

GREEDY = SamplingParams(temperature=0.0)


@pytree
class Model:
    """Holds what `load` found: weights on their devices, and the blueprint of what runs them.
    Tokens in `eos_ids` end a row.
    """

    weights: Weights
    blueprint: Blueprint = static()
    eos_ids: frozenset[int] = static()
    tokenizer: Any | None = static()

    def __repr__(self) -> str:
        # Without the arrays, which a notebook would fetch from the device to show their numbers.
        spec = self.spec
        return f"<Model: {spec.family}, {spec.num_layers} layers, {self.blueprint.dtype}>"

    @property
    def spec(self) -> ModelSpec:
        return self.blueprint.spec

    @property
    def placement(self) -> Placement:
        return self.blueprint.placement


@pytree
class State:
    """Holds a KV cache: its pages on the device, and on the host what each row has of them.

    A row's pages are those that its tokens take, no more; rows may have the same ones.
    """

    paged: PagedKV
    rows: tuple[KVHandle, ...] = static()
    limits: EngineConfig = static()
    backend: Backend = static()
    groups: tuple[KVGroup, ...] = static()
    """Says which layers of its model keep which keys and values."""

    def __repr__(self) -> str:
        free, pages = len(self.free_pages), self.limits.num_pages
        return (
            f"<State: rows of {self.lengths} tokens, {free} of {pages} pages of "
            f"{self.limits.block_size} free>"
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens that each row holds."""
        return tuple(row.length for row in self.rows)

    @property
    def free_pages(self) -> tuple[int, ...]:
        """Ids of the pages that no row holds."""
        return free_pages(self.rows, self.limits.num_pages)


@pytree
class Continuation:
    """Holds the tokens behind those of a row of a `State`, of which it reads the pages only.

    A pytree of arrays that are all of its own, so programs may map it, scan with it as their carry
    and differentiate through it: see `extend`.
    """

    own: PagedKV

    @property
    def length(self) -> jax.Array:
        """Tokens in it, those of the row not counted: int32."""
        return self.own.rows[0].len_B[..., 0]


def load(
    path: str | os.PathLike[str] | None = None,
    *,
    dtype: str = "auto",
    backend: str = "auto",
    kv_cache_dtype: str = "auto",
    tensor_parallel_size: int = 1,
    decode_context_parallel_size: int = 1,
    enable_expert_parallel: bool = False,
    skip_tokenizer_init: bool = False,
) -> Model:
    """Loads a model: a directory, a hub id, or None for the demo model. Arguments as in `LLM`."""
    options = EngineOptions(
        path,
        dtype=dtype,
        backend=backend,
        kv_cache_dtype=kv_cache_dtype,
        tensor_parallel_size=tensor_parallel_size,
        decode_context_parallel_size=decode_context_parallel_size,
        enable_expert_parallel=enable_expert_parallel,
        skip_tokenizer_init=skip_tokenizer_init,
        runner="generate",
    )
    check_process()
    devices = devices_for(options)
    use_compile_cache(devices[0])
    native.prepare(kernel_folder(devices[0]))
    found = find_model(options)
    if found.spec.states:
        raise NotImplementedError(
            f"{found.directory}: its layers keep recurrent states, which rows here cannot share or "
            f"be rewound with; use LLM"
        )
    if found.spec.depends_on_context:
        raise NotImplementedError(
            f"{found.directory}: its rotary embedding depends on how long a sequence may get, "
            f"which rows here do not say; use LLM"
        )
    blueprint = make_blueprint(
        options,
        found.spec,
        found.layout,
        devices,
        stored_dtype=found.stored_dtype,
        # A row can be rewound to any length.
        keeps_all=True,
    )
    found = found.loaded(blueprint)
    return Model(
        blueprint=blueprint,
        weights=found.weights,
        eos_ids=found.eos_ids,
        tokenizer=found.tokenizer,
    )


OWN_NAMES = {
    "block_size": "page_size",
    "max_num_seqs": "num_rows",
    "num_gpu_blocks_override": "num_pages",
}
"""These are the names here of the engine's options, which errors name."""


def _own_number(value: Any) -> Any:
    """Returns a number of numpy or of JAX, which programs return, as Python's."""
    is_one = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    is_one = is_one and value.ndim == 0
    return value.item() if is_one else own(value)


def empty(
    model: Model,
    *,
    num_pages: int,
    page_size: int | None = None,
    num_rows: int = 8,
    max_num_batched_tokens: int = 2048,
) -> State:
    """Returns a state of empty rows. A longer prompt than `max_num_batched_tokens` goes through the
    model in several steps. page_size: in tokens; None: 16 on a CPU, 64 elsewhere.

    Raises: ValueError, CapacityError for more pages than the device has memory for.
    """
    given = {
        "num_pages": num_pages,
        "num_rows": num_rows,
        "max_num_batched_tokens": max_num_batched_tokens,
    } | ({} if page_size is None else {"page_size": page_size})
    for name, value in given.items():
        if not is_int(value) or not 1 <= value <= MAX_INT32:
            raise ValueError(f"{name}: expected a number from 1 on, got {value!r}")
    before = model.blueprint
    make = partial(
        make_blueprint,
        spec=before.spec,
        layout=before.layout,
        devices=before.placement.devices,
        stored_dtype=before.dtype,
        keeps_all=True,
    )
    try:
        options = replace(
            before.options,
            block_size=page_size,
            max_num_seqs=num_rows,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        sized = make_tested(make, options).with_pages(num_pages)
        needed = num_pages * sized.page_nbytes
        check_room(own_device(sized.placement.devices), needed, "num_pages", "lower it")
        paged = sized.empty_kv()
    except ValueError as error:
        name, _, what = str(error).partition(":")
        if name not in OWN_NAMES:
            raise
        raise ValueError(f"{OWN_NAMES[name]}:{what}") from error
    rows = (KVHandle(),) * num_rows
    return State(paged, rows, sized.limits, sized.attention, before.spec.groups)


def prefill(model: Model, kv: State, prompts: Any) -> tuple[State, jax.Array]:
    """Stores the tokens of some rows, after those that they hold already. Consumes `kv`.

    prompts: token ids by row, {row: ids}, or a list of them for the rows from 0 on.
    Returns the new state and the logits after each row's last token, [B, V] float32, in the order
    of `prompts`.
    """
    _check_fits(model, kv)
    asked = prompts_by_row(prompts, len(kv.rows), model.spec.vocab_size)
    kv = _with_room(kv, {row: len(ids) for row, ids in asked.items()})
    left, logits_of = asked, dict[int, jax.Array]()
    while left:
        chunks = next_chunks(left, kv.limits.max_num_batched_tokens)
        kv, logits_BV = _step(model, kv, chunks)
        logits_of.update(zip(chunks, logits_BV, strict=False))
        rests = {row: ids[len(chunks.get(row, ())) :] for row, ids in left.items()}
        left = {row: ids for row, ids in rests.items() if len(ids)}
    return kv, jnp.stack([logits_of[row] for row in asked])


def decode(
    model: Model,
    kv: State,
    tokens: Any,
    n: int = 32,
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
) -> tuple[State, np.ndarray]:
    """Generates up to n tokens for some rows on the device, then waits for them. Consumes `kv`.

    tokens: the next token of each row, not stored yet: {row: token}, or a list or array for the
    rows from 0 on. sampling: for all of them, or one each. A stop token ends its row; a row that
    is given one, or -1, has ended already and rests.
    Returns the new state and the new tokens, [B, n] int32, in the order of `tokens`, -1 after a
    row's end. A row's last one is not stored yet: give it to the next `decode` or `prefill`.
    """
    _check_fits(model, kv)
    if any(isinstance(pool, jax.core.Tracer) for pool in kv.paged.pools):
        raise ValueError("decode reads its tokens, so no program traces it: `extend` is for those")
    if not is_int(n := _own_number(n)) or not 1 <= n <= kv.limits.max_len:
        raise ValueError(f"n: expected a number of tokens from 1 to {kv.limits.max_len}, got {n!r}")
    newest = tokens_by_row(tokens, len(kv.rows), model.spec.vocab_size)
    given, padded = len(newest), fit_bucket(row_buckets(len(kv.rows)), len(newest))
    wanted = sampling_of(
        list(newest),
        sampling,
        eos_ids=model.eos_ids,
        num_rows=padded,
        vocab_size=model.spec.vocab_size,
    )
    rows = empty_rows(padded)
    rows.token_B[:] = [*newest.values(), *[NO_TOKEN] * (padded - given)]
    rows.position_B[:given] = [kv.rows[row].length for row in newest]
    has_ended_B = (rows.token_B == NO_TOKEN) | (wanted.stop_BE == rows.token_B[:, None]).any(axis=1)
    rows.budget_B[:] = np.where(has_ended_B, 0, n)

    budget = int(rows.budget_B.max())
    kv = _with_room(kv, dict(zip(newest, rows.budget_B.tolist(), strict=False)))
    paged, nothing = _bound(model, kv, list(newest), padded), empty_newest(len(kv.rows), padded)
    rows, wanted = jax.device_put((rows, wanted), model.placement.sharding())
    width, pieces = kv.limits.decode_steps, list[jax.Array]()
    for done in range(0, budget, width):
        # Of the loop before the last, which is done: the device goes on while this is read.
        if len(pieces) > 1 and (np.asarray(pieces[-2])[-1] == NO_TOKEN).all():
            break
        paged, _, rows, sampled, _ = decode_loop(
            model.weights,
            paged,
            nothing,
            rows,
            wanted,
            np.int32(min(width, budget - done)),
            spec=model.spec,
            backend=kv.backend,
            width=width,
            placement=model.placement,
        )
        pieces.append(sampled.token_B)
    token_Bn = np.full((given, n), NO_TOKEN, np.int32)
    if pieces:
        found = np.concatenate(pieces)[:n, :given].T
        token_Bn[:, : found.shape[1]] = found
    counts = (token_Bn != NO_TOKEN).sum(axis=1).tolist()
    kv = _stored(kv, paged, dict(zip(newest, counts, strict=True)))
    # A row that has ended early gives back what it did not need.
    held = {row: cut(kv.rows[row], kv.rows[row].length, kv.limits.block_size) for row in newest}
    return _with_rows(kv, held), token_Bn


def fork(kv: State, row: int, to: int) -> State:
    """Makes row `to` hold what `row` holds, in the same pages; what it held before is let go.

    Nothing is copied: of those that share a partly filled last page, whoever writes gets a copy.
    """
    check_rows((row, to), len(kv.rows))
    return _with_rows(kv, {to: kv.rows[row]})


def rewind(kv: State, row: int, length: int) -> State:
    """Cuts a row to its first `length` tokens; pages past them are free unless others hold them."""
    check_rows((row,), len(kv.rows))
    longest = kv.rows[row].length
    if not is_int(length := _own_number(length)) or not 0 <= length <= longest:
        raise ValueError(
            f"length: expected an int from 0 to {longest}, which row {row} holds, got {length!r}"
        )
    return _with_rows(kv, {row: cut(kv.rows[row], length, kv.limits.block_size)})


def continuation(kv: State, row: int, *, room: int) -> Continuation:
    """Returns an empty continuation of a row, with room for so many tokens, kept in float32.

    It does not hold the row's pages: give `extend` a state where they are as they were.
    """
    check_rows((row,), len(kv.rows))
    pages, length = kv.rows[row].pages, kv.rows[row].length
    longest = kv.limits.max_model_len
    if not is_int(room) or not 1 <= room <= longest - length:
        raise ValueError(
            f"room: expected a number of tokens from 1 to {longest - length}, behind the {length} "
            f"of row {row} of at most {longest}, got {room!r}"
        )
    (prefix,) = bind_tables(
        kv.paged,
        [pages],
        [length],
        num_rows=1,
        width=kv.limits.table_width,
        page_size=kv.limits.block_size,
    ).rows
    zero_BW = jnp.zeros((1, 1), jnp.int32)
    tables = PageTables(zero_BW, zero_BW + length, zero_BW[0], low=prefix)
    stores = tuple(_own_store(store, room) for store in kv.paged.stores)
    return Continuation(PagedKV(stores, (jax.tree.map(jnp.asarray, tables),)))


def embed(model: Model, tokens: Any) -> jax.Array:
    """Looks up the embeddings of token ids, [T] -> [T, D] float32: rows of the model's matrix, not
    scaled yet. Raises: ValueError for other ids, in a caller's program for another shape only.
    """
    if not isinstance(tokens, jax.core.Tracer):
        tokens = checked_ids("tokens", tokens, model.spec.vocab_size)
    elif tokens.ndim != 1 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens: expected token ids [T], got {tokens.aval}")
    _check_device(model)
    return continuing.embed(model.weights, tokens, spec=model.spec)


def extend(
    model: Model, kv: State, continuation: Continuation, embedded: jax.Array
) -> tuple[Continuation, jax.Array]:
    """Runs the next tokens of a continuation, given as embeddings [T, D]. Consumes nothing.

    For `jax.vmap`, `lax.scan` and `jax.grad` in programs of one's own; an ordinary call works too.
    All scores of the T tokens exist at once, so it is no way to store long prompts.
    Returns the continuation with these tokens, and the logits after each, [T, V] float32, which are
    NaN where there was no room.
    Raises: ValueError for embeddings of another shape, NotImplementedError for a model on several
    devices, with embeddings or experts by token in its layers or that chooses keys by blocks,
    RuntimeError for a consumed state.
    """
    _check_fits(model, kv)
    room, size = continuation.own.stores[0].page_size, model.spec.hidden_size
    embedded = jnp.asarray(embedded)
    if embedded.ndim != 2 or embedded.shape[1] != size or not 1 <= embedded.shape[0] <= room:
        raise ValueError(
            f"embedded: expected [T, {size}] of 1 to {room} tokens, got {list(embedded.shape)}"
        )
    _check_device(model)
    if model.spec.attention.near:
        raise NotImplementedError(
            f"extend: expected a model whose keys are not compressed, got {model.spec.family}"
        )
    index = model.spec.attention.index
    if index is not None and index.pool > 1:
        raise NotImplementedError(
            f"extend: expected a model that chooses single keys, got {model.spec.family}, which "
            f"chooses {index.pool} together: a continuation may begin among them"
        )
    if "own_embed" in model.weights or chooses_by_token(model.weights):
        raise NotImplementedError(
            "extend: layers of this model look up their tokens, which embeddings do not tell"
        )
    _check_alive(kv)
    own, logits_TV = continuing.extend(
        model.weights, kv.paged.stores, continuation.own, embedded, spec=model.spec
    )
    return Continuation(own), logits_TV


def _own_store(prefix: Store, room: int) -> Store:
    """Returns an empty store of a continuation: for each layer a page of all its tokens."""
    layout = HeadMajorLayout(
        num_kv_heads=prefix.layout.num_kv_heads,
        head_dim=prefix.layout.head_dim,
        page_size=room,
        codec=PlainCodec(dtype="float32"),
        latent_dim=prefix.layout.latent_dim,
        has_index_key=prefix.layout.has_index_key,
    )
    return empty_store(layout=layout, num_layers=prefix.num_layers, num_pages=1)


def _check_device(model: Model) -> None:
    if model.placement.size > 1:
        raise NotImplementedError(
            "continuations: expected a model on one device, got one that is divided over "
            f"{model.placement.size}"
        )


def _check_fits(model: Any, kv: Any) -> None:
    """Raises: ValueError for what is no model or no state, or a state of another shape."""
    if not isinstance(model, Model) or not isinstance(kv, State):
        got = f"{type(model).__name__}, {type(kv).__name__}"
        raise ValueError(f"expected a Model and a State, got {got}")
    if kv.groups != model.spec.groups:
        raise ValueError(
            f"expected a state that `empty` has made for a model with "
            f"{_layers(model.spec.groups)}, got one for {_layers(kv.groups)}"
        )


def _layers(groups: Sequence[KVGroup]) -> str:
    """Describes what layers keep, for errors."""
    return " and ".join(
        f"{len(one.layers)} layers of {one.num_kv_heads} KV heads of {one.head_dim}"
        + (f" (window {one.window})" if one.window else "")
        for one in groups
    )


def _check_alive(kv: State) -> None:
    """Raises: RuntimeError for a consumed state, and in a process that cannot compute."""
    check_process()
    # numpy's of a state that was on the host, and tracers in a caller's program
    own = [pool for pool in kv.paged.pools if isinstance(pool, jax.Array)]
    if any(not isinstance(pool, jax.core.Tracer) and pool.is_deleted() for pool in own):
        raise RuntimeError(
            "this state has been consumed by prefill or decode: go on with the one that they "
            "returned, or keep a copy first"
        )


def _with_rows(kv: State, changed: Mapping[int, KVHandle]) -> State:
    return replace(kv, rows=tuple(changed.get(i, row) for i, row in enumerate(kv.rows)))


def _with_room(kv: State, counts: Mapping[int, int]) -> State:
    """Returns the state with pages for so many more tokens of these rows, which only they write.

    Consumes `kv` where it copies a shared last page.
    Raises: RuntimeError for a consumed state, ValueError, CapacityError.
    """
    limits = kv.limits
    _check_alive(kv)
    for row, count in counts.items():
        if kv.rows[row].length + count > limits.max_len:
            raise ValueError(
                f"row {row}: expected at most {limits.max_len} tokens (what the model or the pool "
                f"is made for), got {kv.rows[row].length} + {count}"
            )
    sizes = {"num_pages": limits.num_pages, "page_size": limits.block_size}
    rows, copies = reserve(kv.rows, counts, **sizes)
    if copies:
        page_2C = np.zeros((2, len(rows)), np.int32)
        page_2C[:, : len(copies)] = np.transpose(copies)
        paged = copy_pages(replace(kv.paged, rows=()), *page_2C, np.int32(len(copies)))
        kv = replace(kv, paged=paged)
    return replace(kv, rows=rows)


def _stored(kv: State, paged: PagedKV, counts: Mapping[int, int]) -> State:
    """Returns the state after a program has stored so many more tokens of these rows."""
    lengths = {row: kv.rows[row].length + count for row, count in counts.items()}
    changed = {row: replace(kv.rows[row], length=length) for row, length in lengths.items()}
    return _with_rows(replace(kv, paged=paged), changed)


def _step(model: Model, kv: State, chunks: Mapping[int, np.ndarray]) -> tuple[State, jax.Array]:
    """Stores the next tokens of these rows; the logits are in their order."""
    counts = {row: len(ids) for row, ids in chunks.items()}
    size = fit_bucket(token_buckets(kv.limits.max_num_batched_tokens), sum(counts.values()))
    num_rows = num_step_rows(len(kv.rows), size)
    positions = [kv.rows[row].length for row in chunks]
    paged, logits_BV = logits_step(
        model.weights,
        _bound(model, kv, list(chunks), num_rows),
        packed_batch(list(chunks.values()), positions, size, num_rows),
        spec=model.spec,
        backend=kv.backend,
        placement=model.placement,
    )
    return _stored(kv, paged, counts), logits_BV


def _bound(model: Model, kv: State, rows: Sequence[int], num_rows: int) -> PagedKV:
    """Returns the device's part of the state with the tables of these rows, for one program."""
    return bind_tables(
        kv.paged,
        [kv.rows[row].pages for row in rows],
        [kv.rows[row].length for row in rows],
        num_rows=num_rows,
        width=kv.limits.table_width,
        page_size=kv.limits.block_size,
        sharding=model.placement.sharding(),
    )
