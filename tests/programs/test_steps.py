"""The device interface: a decode loop is its steps, chunks are their whole, a fork is two runs,
padding is nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import contents, held
from handles import reserved
from jaxkv.holding.allocator import KVHandle, PageAllocator
from jaxkv.kv.codecs import get_codec
from jaxkv.kv.state import PagedKV, empty_store
from jaxkv.models.decoder import head_of
from jaxkv.models.families import read_config, read_family
from jaxkv.models.paged import heads_of
from jaxkv.ops.attention import BACKENDS
from jaxkv.ops.sampling import NO_TOKEN, Sampled, Sampling
from jaxkv.programs.draw import draw
from jaxkv.programs.inputs import (
    bind_tables,
    empty_batch,
    empty_newest,
    empty_rows,
    empty_sampling,
    packed_batch,
)
from jaxkv.programs.loop import Rows, decode_loop
from jaxkv.programs.pages import copy_pages
from jaxkv.programs.step import Newest, step
from jaxkv.weights.load import Kept, load_weights
from poison import owned_slots, poison_kv
from tiny import make_checkpoint, tiny_config

pytestmark = pytest.mark.usefixtures("quick_compile")

NUM_ROWS, NUM_TOKENS, WIDTH = 4, 64, 8
NUM_PAGES, SIZE, TABLE = 24, 8, 6
VOCAB = 151
NOBODY = empty_newest(NUM_ROWS, NUM_ROWS)
TOLERANCE = 2e-5
"""Log-probabilities near -5 in float32, computed in batches of another shape."""


@dataclass
class Device:
    """Weights and the current KV state; every call runs with NaN in whatever `handles` do not
    own.
    """

    weights: dict
    spec: object
    kv: PagedKV

    def bind(self, handles: list[KVHandle], alive: list[KVHandle] | None = None) -> PagedKV:
        """The state with these handles as rows; `alive` ones (default: the same) keep what they
        hold.
        """
        pages, lengths = ([getattr(one, x) for one in handles] for x in ("pages", "length"))
        sizes = {"num_rows": NUM_ROWS, "width": TABLE, "page_size": SIZE}
        kv = bind_tables(self.kv, pages, lengths, **sizes)
        return poison_kv(kv, handles if alive is None else alive)

    def step(
        self, handles: list[KVHandle], chunks: list[list[int]], sampling: Sampling, **alive
    ) -> Sampled:
        """One ragged step of the given next tokens of each row; single tokens first. A row may have
        none.
        """
        positions = [handle.length for handle in handles]
        batch = packed_batch(chunks, positions, NUM_TOKENS, NUM_ROWS)
        kv = self.bind(handles, **alive)
        self.kv, last, *_ = step(self.weights, kv, NOBODY, batch, spec=self.spec, backend="xla")
        _, out = draw(head_of(self.weights), last, NOBODY, sampling, spec=self.spec)
        return jax.tree.map(np.asarray, out)

    def loop(
        self, handles: list[KVHandle], rows: Rows, sampling: Sampling, n: int
    ) -> tuple[Rows, Sampled]:
        static = {"spec": self.spec, "backend": "xla", "width": WIDTH}
        self.kv, _, *out, _ = decode_loop(
            self.weights, self.bind(handles), NOBODY, rows, sampling, np.int32(n), **static
        )
        return jax.tree.map(np.asarray, tuple(out))

    def held(self, handle: KVHandle) -> list[np.ndarray]:
        """What the handle's slots hold in every layer of each store."""
        return [held(store, handle) for store in self.kv.stores]


@pytest.fixture(
    scope="module",
    params=["llama-biases", pytest.param("qwen2-mixed-windows", marks=pytest.mark.slow)],
)
def loaded(request, tmp_path_factory):
    directory = make_checkpoint(tmp_path_factory.mktemp("steps"), tiny_config(request.param))
    spec, layout = read_family(read_config(directory))
    return load_weights(directory, spec, layout, Kept(dtype="float32")), spec


@pytest.fixture
def device(loaded) -> Device:
    weights, spec = loaded
    codec = get_codec("float32", platform="cpu")
    stores = (
        empty_store(
            num_layers=len(group.layers),
            layout=BACKENDS["xla"].page_layout(heads, SIZE, codec),
            num_pages=NUM_PAGES,
        )
        for group, heads in zip(spec.groups, heads_of(spec), strict=True)
    )
    return Device(weights, spec, PagedKV(tuple(stores)))


@pytest.fixture
def allocator() -> PageAllocator:
    """One that hands out pages in an order of its own."""
    made = PageAllocator(NUM_PAGES, SIZE)
    np.random.default_rng(0).shuffle(made._empty)
    return made


def make_sampling(**fields: object) -> Sampling:
    made = empty_sampling(NUM_ROWS, vocab_size=VOCAB, max_len=TABLE * SIZE)
    made.logprobs_B[:] = True
    made.seed_B2[:, 1] = np.arange(NUM_ROWS) + 5
    for name, value in fields.items():
        getattr(made, name)[:] = value
    return made


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 151, length).tolist()


def prefill(device: Device, allocator: PageAllocator, prompts: list[list[int]]) -> list[KVHandle]:
    """Everything but the last token of each prompt, in one step; room for WIDTH more."""
    handles = [reserved(allocator, len(ids) + WIDTH) for ids in prompts]
    device.step(handles, [ids[:-1] for ids in prompts], make_sampling())
    return [
        KVHandle(handle.pages, len(ids) - 1) for handle, ids in zip(handles, prompts, strict=True)
    ]


def assert_close(got: Sampled, want: Sampled) -> None:
    assert got.token_B.tolist() == want.token_B.tolist()
    live = want.token_B != NO_TOKEN
    ours, theirs = got.scores.at(live), want.scores.at(live)
    assert ours.rank_T.tolist() == theirs.rank_T.tolist()
    assert ours.best_TK.tolist() == theirs.best_TK.tolist()
    for name in ("logprob_T", "best_logprob_TK"):
        np.testing.assert_allclose(
            getattr(ours, name), getattr(theirs, name), rtol=0, atol=TOLERANCE
        )


# The loop
# -------------------------------------------------------------------------------------------------------------

PROMPTS = [prompt(1, 18), prompt(2, 8), prompt(3, 23), prompt(4, 5)]
BUDGETS = [8, 5, 8, 0]


def by_steps(
    device: Device, handles: list[KVHandle], rows: Rows, sampling: Sampling, n: int
) -> tuple[list[KVHandle], Rows, Sampled]:
    """The decode loop written on the host: n steps of one token per live row, which join the
    history.
    """
    sampling = replace(sampling, history_BN=sampling.history_BN.copy())
    token_B, position_B, budget_B = (
        x.copy() for x in (rows.token_B, rows.position_B, rows.budget_B)
    )
    outs = []
    for i in range(n):
        live = [row for row in range(NUM_ROWS) if budget_B[row] > 0]
        now = jax.tree.map(np.copy, sampling)
        now.min_left_B[:] = np.maximum(sampling.min_left_B - i, 0)
        compact = jax.tree.map(
            lambda x, live=live: np.concatenate([x[live], np.delete(x, live, axis=0)]), now
        )
        chunks = [[token_B[row]] for row in live]
        one = device.step([handles[row] for row in live], chunks, compact, alive=handles)
        out = jax.tree.map(
            lambda x, live=live: np.full((NUM_ROWS, *x.shape[1:]), NO_TOKEN, x.dtype), one
        )
        for place, row in enumerate(live):
            for all_B, one_B in zip(jax.tree.leaves(out), jax.tree.leaves(one), strict=True):
                all_B[row] = one_B[place]
            token_B[row] = one.token_B[place]
            sampling.history_BN[row, (sampling.history_BN[row] != NO_TOKEN).sum()] = token_B[row]
            position_B[row] += 1
            budget_B[row] = 0 if token_B[row] in sampling.stop_BE[row] else budget_B[row] - 1
            handles[row] = KVHandle(handles[row].pages, handles[row].length + 1)
        outs.append(out)
    return handles, Rows(token_B, position_B, budget_B), jax.tree.map(lambda *x: np.stack(x), *outs)


def start(device: Device, allocator: PageAllocator) -> tuple[list[KVHandle], Rows]:
    rows = empty_rows(NUM_ROWS)
    rows.token_B[:] = [ids[-1] for ids in PROMPTS]
    rows.position_B[:] = [len(ids) - 1 for ids in PROMPTS]
    rows.budget_B[:] = BUDGETS
    return prefill(device, allocator, PROMPTS), rows


def use_penalties(sampling: Sampling) -> None:
    """Strong ones, with the prompts as histories; row 1 has none."""
    sampling.frequency_B[:], sampling.presence_B[:] = [2, 0, -2, 1], [1, 0, -1, 1]
    sampling.repetition_B[0] = 2
    for row, ids in enumerate(PROMPTS):
        sampling.history_BN[row, : len(ids)] = ids
        sampling.prompt_len_B[row] = len(ids)


@pytest.mark.parametrize("n", [1, 3, WIDTH])
@pytest.mark.parametrize(("min_left", "penalties"), [(0, False), (4, False), (0, True)])
def test_a_decode_loop_of_n_is_n_steps(device, allocator, n, min_left, penalties):
    handles, rows = start(device, allocator)
    sampling = make_sampling(
        temperature_B=[0, 1.2, 0.8, 1], top_k_B=[5, 9, 151, 3], top_p_B=[1, 0.9, 1, 1]
    )
    sampling.stop_BE[2, :60] = np.arange(40, 100)  # row 2 soon meets one of them, if it may
    sampling.min_left_B[2] = min_left
    if penalties:
        use_penalties(sampling)
    before = jax.tree.map(jnp.copy, device.kv)
    *_, want_rows, want = by_steps(device, list(handles), rows, sampling, n)
    want_kv, device.kv = device.kv, before
    got_rows, got = device.loop(handles, rows, sampling, n)
    assert_close(jax.tree.map(lambda x: x[:n], got), want)
    assert (got.token_B[n:] == NO_TOKEN).all()
    assert jax.tree.map(np.ndarray.tolist, got_rows) == jax.tree.map(np.ndarray.tolist, want_rows)
    stored_B = (want.token_B != NO_TOKEN).sum(axis=0)
    assert device.kv.rows[0].len_B.tolist() == [
        h.length + n for h, n in zip(handles, stored_B.tolist(), strict=True)
    ]
    for handle, count in zip(handles, stored_B.tolist(), strict=True):
        handle = KVHandle(handle.pages, handle.length + count)
        for got_x, want_x in zip(
            device.held(handle), replace(device, kv=want_kv).held(handle), strict=True
        ):
            np.testing.assert_allclose(got_x, want_x, rtol=0, atol=TOLERANCE)
    if n == WIDTH and penalties:
        plain = make_sampling(
            temperature_B=[0, 1.2, 0.8, 1], top_k_B=[5, 9, 151, 3], top_p_B=[1, 0.9, 1, 1]
        )
        device.kv = before
        assert (
            device.loop(handles, rows, plain, n)[1].token_B[:, 0].tolist()
            != got.token_B[:, 0].tolist()
        )
    elif n == WIDTH:  # the cases are what they are meant to be
        assert stored_B[[0, 1, 3]].tolist() == [8, 5, 0]
        assert min_left < stored_B[2] < 8


def test_stop_tokens_are_out_of_reach_until_min_tokens_and_end_the_row_after(device, allocator):
    handles, rows = start(device, allocator)
    rows.budget_B[:] = WIDTH
    sampling = make_sampling(min_left_B=[0, 1, 3, 7])
    sampling.stop_BE[:, :60] = np.arange(60)
    sampling.temperature_B[:] = 2.0
    _, out = device.loop(handles, rows, sampling, WIDTH)
    for row, min_left in enumerate((0, 1, 3, 7)):
        tokens = [token for token in out.token_B[:, row].tolist() if token != NO_TOKEN]
        stops = [i for i, token in enumerate(tokens) if token < 60]
        assert len(tokens) == WIDTH or stops == [len(tokens) - 1]
        assert not stops or stops[0] >= min_left


def test_a_loop_ends_when_every_row_has_ended_and_resting_rows_store_nothing(device, allocator):
    handles, rows = start(device, allocator)
    sampling = make_sampling()
    _, free = device.loop(handles, rows, sampling, WIDTH)
    sampling.stop_BE[:, 0] = free.token_B[0]  # the first token of each row ends it
    device.kv = device.bind(handles)
    before = [device.held(handle) for handle in handles]
    got_rows, out = device.loop(handles, rows, sampling, WIDTH)
    assert out.token_B[0, :3].tolist() == free.token_B[0, :3].tolist()
    assert (out.token_B[1:] == NO_TOKEN).all()
    assert (out.token_B[:, 3] == NO_TOKEN).all()
    assert got_rows.budget_B.tolist() == [0] * NUM_ROWS
    longer = [
        KVHandle(handle.pages, handle.length + (row < 3)) for row, handle in enumerate(handles)
    ]
    owned_PS = owned_slots(longer, num_pages=NUM_PAGES, page_size=SIZE)
    for store in device.kv.stores:
        assert (~np.isnan(contents(store)).any(axis=(0, 1, 4, 5)) == owned_PS).all()
    for old, handle in zip(before, handles, strict=True):
        for x, y in zip(old, device.held(handle), strict=True):
            np.testing.assert_array_equal(x, y)


def test_a_row_that_has_ended_on_the_device_rests_and_stays_ended(device, allocator):
    handles, rows = start(device, allocator)
    sampling = make_sampling()
    _, free = device.loop(handles, rows, sampling, WIDTH)
    sampling.stop_BE[2, 0] = free.token_B[0, 2]
    rows.token_B[1] = NO_TOKEN  # `newest` has it: the row has ended
    newest = Newest(
        token_R=np.full(NUM_ROWS, NO_TOKEN, np.int32), row_B=np.arange(NUM_ROWS, dtype=np.int32)
    )
    static = {"spec": device.spec, "backend": "xla"}
    kv = device.bind(handles)
    kv, newest, _, out, _ = decode_loop(
        device.weights, kv, newest, rows, sampling, np.int32(2), **static, width=WIDTH
    )
    token_nB = np.asarray(out.token_B)
    assert (token_nB[:, 1] == NO_TOKEN).all()
    assert token_nB[:2, 2].tolist() == [free.token_B[0, 2], NO_TOKEN]
    assert np.asarray(newest.token_R)[:3].tolist() == [free.token_B[1, 0], NO_TOKEN, NO_TOKEN]

    batch = empty_batch(NUM_TOKENS, NUM_ROWS)
    for row in range(3):
        batch.token_T[row], batch.row_T[row], batch.start_B[row], batch.count_B[row] = (
            NO_TOKEN,
            row,
            row,
            1,
        )
        batch.position_T[row] = handles[row].length + 2
    batch = replace(batch, num_decode=np.int32(3), num_rows=np.int32(3))
    _, last, *_ = step(device.weights, kv, newest, batch, **static)
    newest, sampled = draw(head_of(device.weights), last, newest, make_sampling(), spec=device.spec)
    assert np.asarray(newest.token_R)[:3].tolist() == [int(sampled.token_B[0]), NO_TOKEN, NO_TOKEN]


def test_a_loop_over_resting_rows_changes_nothing(device, allocator):
    handles, rows = start(device, allocator)
    rows.budget_B[:] = 0
    device.kv = device.bind(handles)
    before = [np.asarray(store.pages) for store in device.kv.stores]
    got_rows, out = device.loop(handles, rows, make_sampling(), WIDTH)
    assert (out.token_B == NO_TOKEN).all()
    assert got_rows.token_B.tolist() == rows.token_B.tolist()
    assert got_rows.position_B.tolist() == rows.position_B.tolist()
    for old, store in zip(before, device.kv.stores, strict=True):
        np.testing.assert_array_equal(old, store.pages)


# Chunks, padding, donation
# --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "chunks",
    [[40, 1], [1, 40], [8, 8, 8, 8, 8, 1], [7, 9, 25], [1] * 41, [39, 2], [16, 25]],
    ids=str,
)
def test_a_prompt_in_chunks_is_the_whole_prompt(device, allocator, chunks):
    ids = prompt(7, 41)
    handle = reserved(allocator, 41)
    whole = device.step([handle], [ids], make_sampling())
    stored = device.held(KVHandle(handle.pages, 41))
    allocator.release(handle)
    handle = reserved(allocator, 41)  # other pages, and all NaN again
    for count in chunks:
        out = device.step([handle], [ids[handle.length : handle.length + count]], make_sampling())
        handle = KVHandle(handle.pages, handle.length + count)
    assert_close(jax.tree.map(lambda x: x[:1], out), jax.tree.map(lambda x: x[:1], whole))
    for got, want in zip(device.held(handle), stored, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


def test_rows_of_a_ragged_step_equal_steps_of_their_own(device, allocator):
    """Decode rows, the last token of a prompt and prefill chunks together."""
    prompts = [prompt(1, 9), prompt(2, 16), prompt(3, 30), prompt(4, 17)]
    done, counts = [8, 15, 9, 14], [1, 1, 21, 2]
    handles = [reserved(allocator, len(ids)) for ids in prompts]
    device.step(handles, [ids[:n] for ids, n in zip(prompts, done, strict=True)], make_sampling())
    handles = [KVHandle(handle.pages, n) for handle, n in zip(handles, done, strict=True)]
    before = jax.tree.map(jnp.copy, device.kv)
    new = [ids[n:][:count] for ids, n, count in zip(prompts, done, counts, strict=True)]
    together = device.step(handles, new, make_sampling(temperature_B=1.0))
    for row in range(NUM_ROWS):
        device.kv = jax.tree.map(jnp.copy, before)
        sampling = jax.tree.map(
            lambda x, row=row: np.roll(x, -row, axis=0), make_sampling(temperature_B=1.0)
        )
        alone = device.step([handles[row]], [new[row]], sampling)
        assert_close(
            *(
                jax.tree.map(lambda x, i=i: x[i : i + 1], out)
                for i, out in ((row, together), (0, alone))
            )
        )


def test_padding_of_a_step_and_a_loop_leaves_a_full_pool_alone(device):
    """Page P of layer l would be page 0 of layer l+1: every slot of every layer is owned and must
    keep its value.
    """
    rng = np.random.default_rng(0)
    pages = rng.permutation(NUM_PAGES).reshape(NUM_ROWS, TABLE).tolist()
    everything = [KVHandle(tuple(row), TABLE * SIZE) for row in pages]
    handles = [
        KVHandle(handle.pages, handle.length - (row == 2)) for row, handle in enumerate(everything)
    ]
    stores = (
        replace(store, pages=jnp.asarray(rng.normal(size=store.pages.shape), store.pages.dtype))
        for store in device.kv.stores
    )
    device.kv = replace(device.kv, stores=tuple(stores))
    full = [np.asarray(store.pages) for store in device.kv.stores]
    last_page, last_slot = pages[2][-1], SIZE - 1

    def assert_only_the_last_slot_of_row_2_changed() -> None:
        for old, store in zip(full, device.kv.stores, strict=True):
            new = np.array(store.pages)
            own = np.arange(store.num_layers) * NUM_PAGES + last_page
            assert (new[own, :, last_slot] != old[own, :, last_slot]).all()
            new[own, :, last_slot] = old[own, :, last_slot]
            np.testing.assert_array_equal(new, old)

    device.step([handles[2]], [[7]], make_sampling(), alive=everything)
    assert_only_the_last_slot_of_row_2_changed()
    rows = empty_rows(NUM_ROWS)
    rows.token_B[2], rows.position_B[2], rows.budget_B[2] = 9, TABLE * SIZE - 1, 1
    device.loop(handles, rows, make_sampling(), WIDTH)
    assert_only_the_last_slot_of_row_2_changed()


def test_steps_consume_the_state_they_are_given(device, allocator):
    handles, rows = start(device, allocator)
    kv = device.bind(handles)
    batch, sampling = empty_batch(NUM_TOKENS, NUM_ROWS), make_sampling()
    static = {"spec": device.spec, "backend": "xla"}
    after, *_ = step(device.weights, kv, NOBODY, batch, **static)
    assert all(store.pages.is_deleted() for store in kv.stores)
    args = (device.weights, after, NOBODY, rows, sampling, np.int32(1))
    again, *_ = decode_loop(*args, **static, width=WIDTH)
    assert all(store.pages.is_deleted() for store in after.stores)
    copy_pages(replace(again, rows=()), np.int32([0]), np.int32([1]), np.int32(1))
    assert all(store.pages.is_deleted() for store in again.stores)
    with pytest.raises(RuntimeError, match=r"deleted|donated"):
        np.asarray(again.stores[0].pages)


def test_pages_are_copied_one_after_the_other(device):
    """A page that was read may be written by a later copy; what is past the first n is not looked
    at.
    """
    first = device.kv.stores[0]
    pages = np.random.default_rng(0).normal(size=first.pages.shape).astype(first.pages.dtype)
    kv = PagedKV((replace(first, pages=jnp.array(pages)),))
    copied = copy_pages(kv, np.int32([3, 0, 4]), np.int32([1, 3, 2]), np.int32(2)).stores[0]
    by_layer = pages.reshape(first.num_layers, first.num_pages, -1)
    want = by_layer.copy()
    want[:, 1], want[:, 3] = by_layer[:, 3], by_layer[:, 0]
    np.testing.assert_array_equal(np.asarray(copied.pages).reshape(want.shape), want)


# Fork
# -----------------------------------------------------------------------------------------------------------------


def continuations(device: Device, handles: list[KVHandle], tokens: list[int]) -> Sampled:
    rows = empty_rows(NUM_ROWS)
    for row, (handle, token) in enumerate(zip(handles, tokens, strict=True)):
        rows.token_B[row], rows.position_B[row], rows.budget_B[row] = token, handle.length, WIDTH
    return device.loop(handles, rows, make_sampling(), WIDTH)[1]


@pytest.mark.parametrize("length", [21, 16, 3, 8, 1])
def test_continuations_of_a_fork_equal_independent_runs(device, allocator, length):
    ids, ways = prompt(9, length), [10, 20, 30]
    fresh = prefill(device, allocator, [[*ids, way] for way in ways])
    want = continuations(device, fresh, ways)
    for handle in fresh:
        allocator.release(handle)
    (whole,) = prefill(device, allocator, [[*ids, 0]])
    parent = allocator.fork(whole)
    allocator.release(whole)  # gives back what was reserved
    handles = [parent]
    for _ in ways[1:]:
        # The second one forks the first fork.
        child, copy = allocator.own_tail(allocator.fork(handles[-1]))
        assert (copy is not None) == (length % SIZE > 0)
        assert child.pages[: length // SIZE] == parent.pages[: length // SIZE]
        if copy is not None:
            kv = replace(device.bind([], alive=handles), rows=())
            device.kv = copy_pages(kv, *np.int32(copy)[:, None], np.int32(1))
        handles.append(child)
    allocator.check(handles)
    handles = [reserved(allocator, length + WIDTH, handle) for handle in handles]
    got = continuations(device, handles, ways)
    assert_close(jax.tree.map(lambda x: x[:, :3], got), jax.tree.map(lambda x: x[:, :3], want))
    assert len({tuple(tokens) for tokens in got.token_B[:, :3].T.tolist()}) == 3
