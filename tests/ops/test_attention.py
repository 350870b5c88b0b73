"""Attention in XLA, and the kernels' oracle, equal float64 numpy while all memory that no row holds
is NaN.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import (
    AS_USERS,
    NUM_LAYERS,
    NUM_ROWS,
    TOLERANCE,
    Case,
    Shape,
    contents,
    decode,
    decode_case,
    only_layer,
    random_case,
    scale_of,
    step_case,
)
from jaxkv.ops.attention import (
    Batch,
    BlockIndex,
    Heads,
    Index,
    LatentMaps,
    Place,
    PoolKeys,
    Terms,
    dense,
    expanded,
    sweep,
    xla,
)
from jaxkv.ops.matrices import HeadMatrices
from kernels_pallas import reference
from tiers import some

pytestmark = pytest.mark.usefixtures("quick_compile")

ROUNDING = 2.0**-8
"""Largest relative error of a bfloat16. Queries are drawn as bfloat16 and scales are powers of two,
so that with bfloat16 pages only the softmax weights are rounded: an output is off by at most this
part of the weighted mean of |value|.
"""


HEADS = itertools.cycle([(6, 2, 16), (4, 4, 16), (4, 1, 64), (3, 1, 16), (4, 2, 64)])
DTYPES = itertools.cycle(["float32", "bfloat16"])
SHAPES = [
    Shape(size, window, *next(HEADS), next(DTYPES))
    for size, window in itertools.product((8, 16, 128), (None, 8, 300))
]
QUANTISED = [
    Shape(8, None, 4, 2, 16, "fp8_e4m3"),
    Shape(16, 8, 6, 2, 64, "int8"),
    Shape(16, None, 4, 1, 64, "int4"),
]
QUANTISED += [Shape(128, 300, 4, 2, 16, "turboquant2.5")]
FAST = [SHAPES[5], QUANTISED[2]]
"""A window, bfloat16 and a codec with offsets are among them; float32 has decode rows below."""
FLOAT32 = SHAPES[::2]
SHAPES += QUANTISED


def each(shapes: list[Shape], *fast: Shape) -> list:
    """All of them, slow but for these. A shape is a tuple and one parameter."""
    return [
        shape if shape in fast else pytest.param(shape, marks=pytest.mark.slow) for shape in shapes
    ]


STATIC = ("scale", "window", "chunk")
ATTEND = {
    "xla": jax.jit(xla.read, static_argnames=STATIC),
    "dense": jax.jit(
        lambda *args, **asked: (dense.read(*args, **asked), None), static_argnames=STATIC
    ),
    "xla_deterministic": jax.jit(partial(xla.read, deterministic=True), static_argnames=STATIC),
}
READ_AS_USERS = jax.jit(xla.read, static_argnames=STATIC, compiler_options=AS_USERS)
ATTEND_ORACLE = jax.jit(
    reference.ragged_paged_attention, static_argnames=("scale", "window", "num_pages")
)


def expected(
    case: Case, *, layer: int, window: int | None, chunk: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Outputs token by token in float64, from nothing but what its row holds, and the same of
    |value|; zeros for padding.
    """
    q_TNH, store, tables, batch = case
    pages = np.concatenate(contents(store)[:, layer], axis=2)  # [P, S, 2K, H]
    out, of_abs = np.zeros(q_TNH.shape), np.zeros(q_TNH.shape)
    for t, row in enumerate(batch.row_T):
        if row == NUM_ROWS:
            continue
        slots = np.arange(tables.len_B[row])
        page, slot = slots // store.page_size, slots % store.page_size
        position_J = tables.first_BW[row, page] + slot
        seen_J = position_J <= batch.position_T[t]
        if window is not None:
            seen_J &= position_J > batch.position_T[t] - window
        if chunk is not None:
            seen_J &= position_J // chunk == batch.position_T[t] // chunk
        held = pages[tables.table_BW[row, page], slot][seen_J]  # [J, 2K, H]
        keys, values = np.split(
            held.repeat(q_TNH.shape[1] // store.num_kv_heads, axis=1), 2, axis=1
        )
        scores = scale_of(case) * np.einsum("nh,jnh->nj", q_TNH[t].astype(np.float64), keys)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out[t], of_abs[t] = (np.einsum("nj,jnh->nh", weights, x) for x in (values, np.abs(values)))
    return out, of_abs


def oracle(case: Case, *, layer: int, window: int | None) -> np.ndarray:
    q_TNH, store, tables, batch = case
    arrays = (
        decode(store.codec, store.pages),
        tables.table_BW,
        tables.first_BW,
        tables.len_B,
    )  # float pages, not bits
    call = partial(
        ATTEND_ORACLE, num_pages=store.num_pages, scale=scale_of(case), layer=layer, window=window
    )
    return np.asarray(call(q_TNH, *arrays, batch.row_T, batch.position_T)[0])


def run_backend(
    backend: str, case: Case, *, layer: int, window: int | None, chunk: int | None = None
) -> np.ndarray:
    out_TNH, _ = ATTEND[backend](
        case.q_TNH, case.at(layer), case.batch, scale=scale_of(case), window=window, chunk=chunk
    )
    return np.asarray(out_TNH)


def assert_equal(
    got: np.ndarray, want: np.ndarray, batch: Batch, *, slack: np.ndarray | float = 0.0
) -> None:
    real_T = batch.row_T < NUM_ROWS  # outputs of padding tokens are unspecified
    assert np.isfinite(want).all()
    excess = np.abs(got - want) - np.broadcast_to(slack, want.shape)
    assert excess[real_T].max(initial=0) <= TOLERANCE  # NaN fails too


def slack_of(backend: str, case: Case, of_abs: np.ndarray) -> np.ndarray:
    """What rounded weights may cost: nothing for float32 pages, nor for decode rows on a CPU,
    unless the backend is to treat them as prefill.
    """
    prefill_T = case.batch.row_T >= int(case.batch.num_decode)
    rounded_T = (prefill_T | (backend == "xla_deterministic")) & (
        case.store.codec.name == "bfloat16"
    )
    return np.where(rounded_T[:, None, None], ROUNDING * of_abs, 0.0)


@pytest.mark.parametrize("shape", each(SHAPES, *FAST), ids=lambda shape: "-".join(map(str, shape)))
def test_backends_and_oracle_equal_float64_on_ragged_steps(shape):
    for seed in range(3):
        layer = seed % NUM_LAYERS
        case = step_case(seed, shape, num_tokens=300 if shape.page_size == 16 else 120)
        case = case._replace(store=only_layer(case.store, layer))
        want, of_abs = expected(case, layer=layer, window=shape.window)
        for backend in ATTEND:
            got = run_backend(backend, case, layer=layer, window=shape.window)
            assert_equal(got, want, case.batch, slack=slack_of(backend, case, of_abs))
        from_oracle = oracle(case, layer=layer, window=shape.window)
        assert_equal(from_oracle, want, case.batch)
        assert not from_oracle[case.batch.row_T == NUM_ROWS].any()


@pytest.mark.parametrize(
    "shape", each(FLOAT32, *FLOAT32[:4:2]), ids=lambda shape: "-".join(map(str, shape))
)
def test_backends_and_oracle_equal_float64_on_decode_rows_with_resting_ones(shape):
    for seed in range(3):
        layer = (seed + 1) % NUM_LAYERS
        case = decode_case(seed, shape)
        case = case._replace(store=only_layer(case.store, layer))
        want, _ = expected(case, layer=layer, window=shape.window)
        for backend in ATTEND:
            assert_equal(
                run_backend(backend, case, layer=layer, window=shape.window), want, case.batch
            )
        assert_equal(oracle(case, layer=layer, window=shape.window), want, case.batch)


def use_large_blocks(monkeypatch: pytest.MonkeyPatch, num_keys: int) -> None:
    """Has programs do what they do where they do not run on a CPU, with blocks of so many keys."""

    def elsewhere(*args: object, default: Callable, **_: object) -> object:
        return default(*args)

    monkeypatch.setattr(jax.lax, "platform_dependent", elsewhere)
    monkeypatch.setattr(xla, "LARGE_KEYS", num_keys)
    monkeypatch.setattr(xla, "LARGE_QUERIES", 32)
    monkeypatch.setattr(xla, "QUERY_BLOCK", 16)
    monkeypatch.setattr(xla, "LARGE_SLOTS", num_keys * NUM_ROWS)


@pytest.mark.parametrize(
    ("num_rows", "num_keys"), [(1, 4096), (8, 2048), (33, 256), (256, 128), (20_000, 128)]
)
def test_few_rows_gather_many_keys_at_once(num_rows, num_keys):
    assert xla.decode_keys(num_rows) == num_keys


@pytest.mark.parametrize(
    "shape", each(SHAPES[2:4], SHAPES[3]), ids=lambda shape: "-".join(map(str, shape))
)
def test_the_larger_blocks_of_other_platforms_equal_float64(monkeypatch, shape):
    """Rows and chunks of more blocks than one, and of fewer slots than a block has."""
    use_large_blocks(monkeypatch, 256)
    read = jax.jit(partial(xla.read, window=shape.window), static_argnames=STATIC)
    for case in (step_case(1, shape, num_tokens=300), decode_case(1, shape)):
        case = case._replace(store=only_layer(case.store, 1))
        want, of_abs = expected(case, layer=1, window=shape.window)
        got, _ = read(case.q_TNH, case.at(1), case.batch, scale=scale_of(case))
        slack = ROUNDING * of_abs if case.store.codec.name == "bfloat16" else 0.0
        assert_equal(np.asarray(got), want, case.batch, slack=slack)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("int4", marks=pytest.mark.slow)])
def test_values_that_are_the_first_numbers_of_keys_equal_float64(dtype):
    case = step_case(1, Shape(16, None, 4, 1, 24, dtype), num_tokens=120)
    keys = case.store.pages[:, :1]
    twice = replace(case.store, pages=jnp.concatenate([keys, keys], axis=1))
    want, _ = expected(case._replace(store=twice), layer=1, window=None)
    latent = replace(case.store, pages=keys, layout=replace(case.store.layout, latent_dim=16))
    for backend in ("xla", "dense"):
        got = run_backend(backend, case._replace(store=only_layer(latent, 1)), layer=1, window=None)
        assert got.shape == (*want.shape[:2], 16)
        assert_equal(got, want[..., :16], case.batch)


@jax.jit
def at_once(q_TNH, at, batch, prepared, **few):
    """Latent attention with all scores at once."""
    terms = Terms(24**-0.5, np.dtype(np.float32), **few)
    return dense.Dense().attend(q_TNH, None, None, at, batch, prepared, terms).out_TNH


LATENT = [("float32", None, "cpu"), ("float32", 300, "gpu"), ("int4", None, "cpu")]


@pytest.mark.parametrize(("dtype", "window", "platform"), some(LATENT, LATENT[1]))
def test_chunks_of_latent_attention_equal_float64_absorbed_and_expanded(
    monkeypatch, dtype, window, platform
):
    """Rows of one token and short chunks are absorbed, long ones expanded: blocks of fewer queries
    and rows than there are, which begin and end within them.
    """
    if platform != "cpu":
        use_large_blocks(monkeypatch, 32)
    monkeypatch.setattr(xla, "LEAST_QUERIES", 40)
    monkeypatch.setattr(expanded, "QUERIES", 16)
    monkeypatch.setattr(expanded, "ROWS", 32)
    rng, (num_heads, rank) = np.random.default_rng(0), (4, 16)
    up = [rng.normal(size=(NUM_LAYERS, num_heads, *x)) * 0.3 for x in ((rank, 12), (10, rank))]
    maps = LatentMaps(*(HeadMatrices(x.astype(np.float32), jnp.int32(1)) for x in up))
    shape, forms = Shape(16, window, num_heads, 1, 24, dtype), set[bool]()
    in_parts = jax.jit(partial(xla.read, scale=24**-0.5, window=window))
    for seed in (2, 3):
        case = step_case(seed, shape, num_tokens=240)
        keys = case.store.pages[:, :1]
        twice = replace(case.store, pages=jnp.concatenate([keys, keys], axis=1))
        layout = replace(case.store.layout, latent_dim=rank)
        latent = only_layer(replace(case.store, pages=keys, layout=layout), 1)
        q_TNH = case.q_TNH[..., :20]
        plain_TNR = np.einsum("tnc,nrc->tnr", q_TNH[..., :12], up[0][1])
        absorbed = case._replace(
            store=twice, q_TNH=np.concatenate([plain_TNR, q_TNH[..., 12:]], axis=-1)
        )
        want, _ = expected(absorbed, layer=1, window=window)
        want = np.einsum("tnr,nvr->tnv", want[..., :rank], up[1][1])
        at = case._replace(store=latent).at(1)
        got, _ = in_parts(q_TNH, at, case.batch, maps=maps)
        assert got.shape == want.shape
        assert_equal(np.asarray(got), want, case.batch)
        prepared = (jnp.zeros(0, jnp.int32), window, None)
        got = at_once(q_TNH, at, case.batch, prepared, maps=maps)
        assert_equal(np.asarray(got), want, case.batch)
        chunks = case.batch.count_B[int(case.batch.num_decode) : int(case.batch.num_rows)]
        forms |= set((chunks >= 40).tolist())
    assert forms == {False, True}


@pytest.mark.parametrize("num_chosen", some([20, 1000], 20))
def test_chosen_keys_are_those_of_all_scores_at_once(num_chosen):
    """In decode rows and chunks, of rows with more keys than are chosen and with fewer."""
    rng, num_heads, rank = np.random.default_rng(0), 4, 12
    up = [rng.normal(size=(NUM_LAYERS, num_heads, *x)) * 0.3 for x in ((rank, 10), (9, rank))]
    maps = LatentMaps(*(HeadMatrices(x.astype(np.float32), jnp.int32(1)) for x in up))
    case = step_case(2, Shape(16, None, num_heads, 1, 24, "float32"), num_tokens=240)
    layout = replace(case.store.layout, latent_dim=rank)
    latent = replace(case.store, pages=case.store.pages[:, :1], layout=layout)
    at = case._replace(store=only_layer(latent, 1)).at(1)
    num_tokens = len(case.q_TNH)
    index = Index(
        q_TIH=jnp.asarray(rng.normal(size=(num_tokens, 16, 8)), jnp.float32),
        weight_TI=jnp.asarray(rng.normal(size=(num_tokens, 16)), jnp.float32),
        num_chosen=num_chosen,
    )
    q_TNH, nothing = case.q_TNH[..., :14], (jnp.zeros(0, jnp.int32), None, None)
    in_parts = jax.jit(partial(xla.read, window=None, scale=24**-0.5))
    few = {"maps": maps, "index": index}
    got, _ = in_parts(q_TNH, at, case.batch, **few)
    want = at_once(q_TNH, at, case.batch, nothing, **few)
    assert_equal(np.asarray(got), np.asarray(want, np.float64), case.batch)
    every = at_once(q_TNH, at, case.batch, nothing, maps=maps)
    real_T = case.batch.row_T < NUM_ROWS
    assert (num_chosen == 1000) == np.allclose(every[real_T], want[real_T], atol=1e-4)


DIVIDED = [(None, "cpu", None), (300, "gpu", None), (None, "cpu", 20), (None, "gpu", 20)]


@pytest.mark.parametrize(("window", "platform", "num_chosen"), some(DIVIDED, DIVIDED[1]))
def test_devices_that_divide_the_tokens_of_pages_give_what_one_gives(
    monkeypatch, window, platform, num_chosen
):
    """Of latent attention: each has some heads, and stores and reads some tokens of each page."""
    if platform != "cpu":
        use_large_blocks(monkeypatch, 64)
    monkeypatch.setattr(xla, "LEAST_QUERIES", 40)
    monkeypatch.setattr(expanded, "QUERIES", 16)
    monkeypatch.setattr(expanded, "ROWS", 32)
    rng, num_devices, (num_heads, rank) = np.random.default_rng(0), 2, (4, 12)
    case = step_case(2, Shape(16, window, num_heads, 1, 24, "float32"), num_tokens=240)
    layout = replace(case.store.layout, latent_dim=rank)
    store = only_layer(replace(case.store, pages=case.store.pages[:, :1], layout=layout), 1)
    # A row's last 8 numbers are what it is chosen by.
    q_TNH = case.q_TNH[..., : 22 if num_chosen is None else 14]
    k_T1H = rng.normal(size=(len(q_TNH), 1, 24))
    up = [rng.normal(size=(num_heads, *x)).astype(np.float32) for x in ((rank, 10), (9, rank))]
    index = None
    if num_chosen is not None:
        q_TIH, weight_TI = (rng.normal(size=(len(q_TNH), 6, *x)) for x in ((8,), ()))
        index = Index(jnp.float32(q_TIH), jnp.float32(weight_TI), num_chosen=num_chosen)
    heads = Heads(num_heads=num_heads, num_kv_heads=1, head_dim=24, window=window, latent_dim=rank)

    def attend(
        q_TNH: jax.Array, pages: jax.Array, up: list[jax.Array], backend: xla.Xla
    ) -> tuple[jax.Array, jax.Array]:
        own, batch, tables = (
            replace(store, pages=pages),
            *jax.tree.map(jnp.asarray, (case.batch, case.tables)),
        )
        before = replace(tables, len_B=tables.len_B - batch.count_B)
        maps = LatentMaps(*(HeadMatrices(x[None], jnp.int32(0)) for x in up))
        terms = Terms(24**-0.5, np.dtype(np.float32), maps=maps, index=index)
        found = backend.attend(
            *(q_TNH, jnp.float32(k_T1H), None, Place(own, 1, tables), batch),
            *(backend.prepare(own, before, batch, heads), terms),
        )
        assert found.store.layout == layout
        return found.out_TNH, found.store.pages

    def parts(x: np.ndarray, axis: int) -> jax.Array:
        return jnp.stack(np.split(np.asarray(x), num_devices, axis))

    want, written = jax.jit(partial(attend, backend=xla.Xla()))(q_TNH, store.pages, up)
    divided = partial(attend, backend=xla.Xla(tokens_over="devices"))
    given = parts(q_TNH, 1), parts(store.pages, 2), [parts(x, 0) for x in up]
    out, pages = jax.jit(jax.vmap(divided, axis_name="devices"))(*given)
    np.testing.assert_array_equal(np.concatenate(pages, 2), written)
    assert_equal(np.concatenate(out, 1), np.asarray(want, np.float64), case.batch)


def with_index_key(rng: np.random.Generator) -> tuple[Case, Place]:
    """Returns a step, and a layer whose tokens have one more key each."""
    case = step_case(3, Shape(16, None, 4, 2, 16, "float32"), num_tokens=240)
    keys, values = np.split(np.asarray(case.store.pages), 2, axis=1)
    more = np.where(np.isnan(keys[:, :1]), np.nan, rng.normal(size=keys[:, :1].shape))
    pages = jnp.asarray(np.concatenate([keys, more, values], axis=1), jnp.float32)
    layout = replace(case.store.layout, has_index_key=True)
    one = only_layer(replace(case.store, pages=pages, layout=layout), 1)
    return case, case._replace(store=one).at(1)


POOLS = [(8, 24), (1, 20), (128, 1024)]


@pytest.mark.parametrize(("pool", "num_chosen"), some(POOLS, POOLS[0]))
def test_pools_chosen_by_their_mean_are_those_of_all_scores_at_once(pool, num_chosen):
    """In decode rows and chunks, of rows with more keys than are chosen and with fewer."""
    rng = np.random.default_rng(0)
    case, at = with_index_key(rng)
    q_TIH = jnp.asarray(rng.normal(size=(len(case.q_TNH), 16, 12)), jnp.float32)
    pool_keys = PoolKeys(
        *(jnp.asarray(rng.normal(size=size), jnp.float32) for size in (12, 4)),
        eps=1e-6,
        factor=1.0,
        interleaved=False,
    )
    index = Index(q_TIH, jnp.ones(q_TIH.shape[:2]), num_chosen, pool, pool_keys)
    options = {"scale": 0.25, "window": None}
    got, _ = jax.jit(partial(xla.read, **options))(case.q_TNH, at, case.batch, index=index)
    at_once = jax.jit(partial(dense.read, **options))
    want, every = (at_once(case.q_TNH, at, case.batch, index=one) for one in (index, None))
    assert_equal(np.asarray(got), np.asarray(want, np.float64), case.batch)
    real_T = case.batch.row_T < NUM_ROWS
    assert (num_chosen == 1024) == np.allclose(every[real_T], want[real_T], atol=1e-4)


BLOCKS = [(128, 2), (8, 3), (128, 9)]


@pytest.mark.parametrize(("pool", "num_chosen"), some(BLOCKS, BLOCKS[1]))
def test_chosen_blocks_are_those_of_all_scores_at_once(pool, num_chosen):
    """Of pages that decode rows alone read where blocks are as large as those of a sweep, and of
    masks; each KV head has its own.
    """
    rng = np.random.default_rng(0)
    case, at = with_index_key(rng)
    q_TKH = jnp.asarray(rng.normal(size=(len(case.q_TNH), 2, 12)), jnp.float32)
    index = BlockIndex(q_TKH, num_chosen=num_chosen, num_local=1, pool=pool)
    reads = []
    narrowed = sweep._chosen_rows

    def counted(*given):
        reads.append(given)
        return narrowed(*given)

    options = {"scale": 0.25, "window": None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "_chosen_rows", counted)
        got, _ = jax.jit(partial(xla.read, **options))(case.q_TNH, at, case.batch, index=index)
    assert bool(reads) == ((pool, num_chosen) == (128, 2))
    at_once = jax.jit(partial(dense.read, **options))
    want, every = (at_once(case.q_TNH, at, case.batch, index=one) for one in (index, None))
    assert_equal(np.asarray(got), np.asarray(want, np.float64), case.batch)
    real_T = case.batch.row_T < NUM_ROWS
    assert (num_chosen == 9) == np.allclose(every[real_T], want[real_T], atol=1e-4)


@pytest.mark.parametrize("chunk", [24, pytest.param(300, marks=pytest.mark.slow)])
def test_queries_see_their_own_chunk_only(chunk):
    """Chunks that begin within pages and blocks of keys, in decode rows and in prefill chunks."""
    shape = Shape(16, chunk, 4, 2, 16, "float32")
    for case in (step_case(1, shape, num_tokens=300), decode_case(1, shape)):
        case = case._replace(store=only_layer(case.store, 1))
        want, _ = expected(case, layer=1, window=chunk, chunk=chunk)
        for backend in ATTEND:
            got = run_backend(backend, case, layer=1, window=chunk, chunk=chunk)
            assert_equal(got, want, case.batch)


def test_a_batch_of_resting_rows_gives_no_nan():
    shape = SHAPES[0]
    zeros = np.zeros(NUM_ROWS, int)
    scalars = {
        "num_decode": np.int32(NUM_ROWS),
        "num_rows": np.int32(NUM_ROWS),
        "decode_only": True,
    }
    case = random_case(
        np.random.default_rng(0),
        shape,
        zeros,
        zeros,
        num_tokens=NUM_ROWS,
        start_B=np.arange(NUM_ROWS),
        **scalars,
    )
    for backend in ATTEND:
        assert not run_backend(backend, case, layer=0, window=shape.window).any()
    assert not oracle(case, layer=0, window=shape.window).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_oracle_writes_rounded_values_into_one_layer_and_drops_padding(dtype):
    rng = np.random.default_rng(0)
    num_pages, size, shape = 3, 8, (2, 16)
    dest_T = np.array(
        [5, 0, 23, num_pages * size, num_pages * size + 7]
    )  # a full pool and two kinds of padding
    k_TKH, v_TKH = rng.normal(size=(2, len(dest_T), *shape)).astype(np.float32)
    before = jnp.asarray(rng.normal(size=(NUM_LAYERS * num_pages, 4, size, 16)), dtype)
    after = reference.write_pages(before, k_TKH, v_TKH, dest_T, layer=0, num_pages=num_pages)
    want = np.array(before)
    for t, dest in enumerate(dest_T[:3]):
        want[dest // size, :, dest % size] = np.concatenate([k_TKH[t], v_TKH[t]]).astype(want.dtype)
    np.testing.assert_array_equal(np.asarray(after).astype(np.float32), want.astype(np.float32))


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    some(
        itertools.product((16, 64, 96, 128), ("float32", "bfloat16")),
        (96, "bfloat16"),
    ),
)
def test_a_chunk_gets_the_same_bits_in_programs_of_all_sizes(head_dim, dtype):
    shape = Shape(16, None, 4, 2, head_dim, dtype)
    len_B, count_B = np.array([140, 0]), np.array([13, 0])
    scalars = {"num_decode": np.int32(0), "num_rows": np.int32(1), "start_B": np.zeros(2, int)}

    def first_tokens(case: Case) -> np.ndarray:
        options = {"scale": scale_of(case), "window": None}
        found = np.asarray(READ_AS_USERS(case.q_TNH, case.at(0), case.batch, **options)[0])
        assert not found[13:].any()  # padding, which a CPU's matmuls leave out if it is zeros
        return found[:13]

    large = random_case(np.random.default_rng(0), shape, len_B, count_B, num_tokens=256, **scalars)
    want = first_tokens(large)
    assert np.isfinite(want).all()
    for size in (16, 64):
        names = ("token_T", "position_T", "row_T")
        batch = replace(large.batch, **{name: getattr(large.batch, name)[:size] for name in names})
        small = large._replace(q_TNH=large.q_TNH[:size], batch=batch)
        np.testing.assert_array_equal(first_tokens(small), want)
