"""Recurrent rules over ragged steps are the recurrence token by token, in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.ops.recurrent import (
    DecayingAverage,
    Diagonal,
    Gains,
    Largest,
    Levels,
    LinearAttention,
    Rows,
    Selected,
    Selective,
    Tokens,
    Weighted,
    drive,
    run,
    short_conv,
)
from jaxkv.programs.draft import packed
from jaxkv.programs.inputs import empty_batch

pytestmark = pytest.mark.usefixtures("quick_compile")

NUM_ROWS, NUM_SLOTS, NUM_LAYERS, LAYER = 7, 9, 3, 1
SLOT_OF = [4, 0, 8, 5, 1, 7, NUM_SLOTS]
"""The last row is padding."""

STEPS = [
    {3: 70, 4: 5, 5: 2},
    {0: 1, 4: 1, 3: 33},
    {0: 1, 5: 1, 2: 17, 4: 64},
    dict.fromkeys(range(6), 1),
    {0: 1, 3: 1, 5: 1},
]
"""Tokens that each row has in each step, rows with one first; the last two are decode steps."""

quick_jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})

KEY_HEADS, HEADS, X, Y, KERNEL = 2, 6, 8, 5, 4


def log_decay(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """From hardly any to one that leaves nothing of a block."""
    return -np.exp(rng.normal(-2, 3, shape))


def linear_tokens(rng: np.random.Generator, count: int, *, by_channel: bool, delta: bool) -> Tokens:
    q, k = rng.normal(size=(2, count, KEY_HEADS, X))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    k[count // 3 : count // 2] = k[0]  # tokens that repeat
    v = rng.normal(size=(count, HEADS, Y))
    decay = log_decay(rng, count, HEADS, *([X] * by_channel))
    return Tokens(q, k, v, decay, rng.uniform(size=(count, HEADS)) if delta else None)


def linear_reference(tokens: Tokens) -> np.ndarray:
    state, found = np.zeros((HEADS, X, Y)), []
    for t in range(len(tokens.v)):
        q, k = (np.repeat(x[t], HEADS // KEY_HEADS, axis=0) for x in (tokens.q, tokens.k))
        state = state * np.exp(tokens.decay[t].reshape(HEADS, -1))[..., None]
        added = tokens.v[t]
        if tokens.beta is not None:
            added = tokens.beta[t][:, None] * (added - np.einsum("hxy,hx->hy", state, k))
        state = state + k[..., None] * added[:, None]
        found.append(np.einsum("hxy,hx->hy", state, q))
    return np.array(found)


def diagonal_reference(tokens: Gains) -> np.ndarray:
    state, found = np.zeros(X), []
    for decay, gain in zip(*tokens, strict=True):
        state = np.exp(decay) * state + gain
        found.append(state)
    return np.array(found)


A_XN = -np.exp(np.random.default_rng(1).normal(size=(X, Y)))


def selective_reference(tokens: Selected) -> np.ndarray:
    state, found = np.zeros((X, Y)), []
    for delta, x, b, c in zip(*tokens, strict=True):
        b, c = (np.repeat(one, X // len(one), axis=0) for one in (b, c))
        state = np.exp(delta[:, None] * A_XN) * state + (delta * x)[:, None] * b
        found.append((state * c).sum(axis=1))
    return np.array(found)


DECAY_X, BONUS_X = np.exp(np.random.default_rng(1).normal(-2, 2, X)), np.linspace(-9, 9, X)


def average_reference(tokens: Weighted) -> np.ndarray:
    """By the weights of all tokens, over that of the heaviest."""
    (key, value, _), found = tokens, []
    for t in range(len(key)):
        behind = np.arange(t - 1, -1, -1)[:, None]
        weight = np.concatenate([key[:t] - behind * DECAY_X, [key[t] + BONUS_X]])
        weight = np.exp(weight - weight.max(axis=0))
        found.append((weight * value[: t + 1]).sum(axis=0) / weight.sum(axis=0))
    return np.array(found)


def average_case(rng, count):
    key = rng.normal(0, 100, (count, X))  # whose exp float32 has no room for
    tokens = Weighted(key, rng.normal(size=(count, X)), np.ones(count))
    rule = DecayingAverage(*(jnp.asarray(x, jnp.float32) for x in (DECAY_X, BONUS_X)))
    return rule, tokens, average_reference(tokens)


def largest_case(rng, count):
    tokens = Levels(log_decay(rng, count, X), rng.normal(-1, 2, (count, X)), np.ones(count))
    level, found = np.zeros(X), []
    for decay, least, _ in zip(*tokens, strict=True):
        level = np.maximum(level + decay, least)
        found.append(level)
    return Largest(), tokens, np.array(found)


def linear_case(rng, count, by_channel=False, delta=False):
    tokens = linear_tokens(rng, count, by_channel=by_channel, delta=delta)
    return LinearAttention(by_channel=by_channel), tokens, linear_reference(tokens)


def diagonal_case(rng, count):
    tokens = Gains(log_decay(rng, count, X), rng.normal(size=(count, X)))
    return Diagonal(), tokens, diagonal_reference(tokens)


def selective_case(rng, count, parts=()):
    step = np.exp(rng.normal(-1, 2, (count, X)))
    rest = (rng.normal(size=(count, *size)) for size in ((X,), (*parts, Y), (*parts, Y)))
    tokens = Selected(step, *rest)
    each = tokens if parts else tokens._replace(b=tokens.b[:, None], c=tokens.c[:, None])
    return Selective(jnp.asarray(A_XN, jnp.float32)), tokens, selective_reference(each)


RULES = {
    "gated_delta": (lambda *of: linear_case(*of, delta=True), (HEADS, X, Y)),
    "kda": (lambda *of: linear_case(*of, by_channel=True, delta=True), (HEADS, X, Y)),
    "ssd": (linear_case, (HEADS, X, Y)),
    "rg_lru": (diagonal_case, (X,)),
    "selective": (selective_case, (X, Y)),
    "decaying average": (average_case, (X, 3)),
    "largest": (largest_case, (X,)),
    "selective by parts": (lambda *of: selective_case(*of, parts=(2,)), (X, Y)),
}


def run_steps(advance, tokens_of: list, shape: tuple[int, ...]) -> list[np.ndarray]:
    """Returns what `advance(inputs, pool, rows) -> (y, pool)` makes of each row over all steps, in a
    pool where all that is not the rows' own is NaN, and stays so.
    """
    rng = np.random.default_rng(3)
    pool = jnp.full((NUM_LAYERS * NUM_SLOTS, *shape), jnp.nan, jnp.float32)
    kept = rng.normal(size=(NUM_LAYERS, NUM_SLOTS, *shape)).astype(np.float32)
    kept[LAYER, SLOT_OF[:6]] = np.nan  # a new row begins with zeros whatever is there
    pool = jnp.asarray(kept.reshape(pool.shape))
    held, found = np.zeros(NUM_ROWS, np.int32), [[] for _ in range(NUM_ROWS)]
    for step in STEPS:
        decode_only = set(step.values()) == {1}
        batch = empty_batch(NUM_ROWS if decode_only else 128, NUM_ROWS)
        row_of = list(range(NUM_ROWS))  # of the step -> of the test
        if not decode_only:
            row_of = [*step, *(row for row in range(NUM_ROWS) if row not in step)]
        inputs = padding_of(tokens_of[0], len(batch.token_T))
        token, places = 0, {}
        for b, row in enumerate(row_of):
            start = b if decode_only else token
            count = step.get(row, 0)
            batch.start_B[b], batch.count_B[b] = start, count
            own = slice(start, start + count)
            batch.row_T[own], places[row] = b, own
            taken = slice(held[row], held[row] + count)
            for into, source in zip(
                jax.tree.leaves(inputs), jax.tree.leaves(tokens_of[row]), strict=True
            ):
                into[own] = source[taken]
            token += count
        num_decode = NUM_ROWS if decode_only else sum(n == 1 for n in step.values())
        batch = replace(
            batch,
            num_decode=np.int32(num_decode),
            num_rows=np.int32(NUM_ROWS if decode_only else len(step)),
            decode_only=decode_only,
        )
        slot_B = np.int32([SLOT_OF[row] for row in row_of])
        rows = Rows(slot_B, held[row_of], batch, np.int32(LAYER), NUM_SLOTS)
        y, pool = advance(inputs, pool, rows)
        for row, count in step.items():
            found[row].append(np.asarray(y)[places[row]])
            held[row] += count
        now = np.array(pool).reshape(kept.shape)
        is_own = np.zeros((NUM_LAYERS, NUM_SLOTS), bool)
        is_own[LAYER, [SLOT_OF[row] for row in range(6) if held[row]]] = True
        np.testing.assert_array_equal(now[~is_own], kept[~is_own])
    return [np.concatenate(of) if of else None for of in found]


def padding_of(tokens, count: int):
    return jax.tree.map(lambda x: np.full((count, *x.shape[1:]), np.nan), tokens)


def lengths() -> list[int]:
    return [sum(step.get(row, 0) for step in STEPS) for row in range(NUM_ROWS)]


@pytest.mark.parametrize("name", RULES)
def test_steps_and_blocks_are_the_recurrence(name, monkeypatch):
    """Chunks of any length, decoding rows, rows that rest, new rows in used slots."""
    monkeypatch.setattr(drive, "DECODE_ROWS", 3)
    make, shape = RULES[name]
    rng = np.random.default_rng(0)
    rules, tokens_of, want = zip(*(make(rng, max(n, 1)) for n in lengths()), strict=True)

    @quick_jit
    def advance(inputs, pool, rows):
        return run(rules[0], inputs, pool, rows._replace(num_slots=NUM_SLOTS))

    for row, got in enumerate(run_steps(advance, list(tokens_of), shape)):
        if got is not None:
            bound = 2e-5 * max(1.0, np.abs(want[row]).max())
            np.testing.assert_allclose(got, want[row], rtol=0, atol=bound)


@pytest.mark.parametrize("dilation", [1, 3])
def test_short_convolution_sees_the_last_tokens_of_its_row(dilation):
    rng = np.random.default_rng(0)
    kernel, bias = rng.normal(size=(X, KERNEL)), rng.normal(size=X)
    tokens_of = [rng.normal(size=(max(n, 1), X)) for n in lengths()]

    @quick_jit
    def advance(x, pool, rows):
        rows = rows._replace(num_slots=NUM_SLOTS)
        weights = jnp.asarray(kernel), pool, rows, jnp.asarray(bias)
        return short_conv(x, *weights, dilation=dilation)

    num_before = (KERNEL - 1) * dilation
    for row, got in enumerate(run_steps(advance, tokens_of, (X, num_before))):
        if got is not None:
            padded, count = np.pad(tokens_of[row], ((num_before, 0), (0, 0))), len(tokens_of[row])
            want = bias + sum(
                padded[i * dilation : i * dilation + count] * kernel[:, i] for i in range(KERNEL)
            )
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", [*RULES, "convolution", "dilated convolution"])
def test_states_after_each_token_are_those_of_steps_with_one(name, monkeypatch):
    """To the bit, in the slots that a step is given; all others stay as they are."""
    # What XLA:CPU of jax 0.10 makes of a product and a sum is one rounding or two, by program.
    is_exact = name != "selective" or jax.__version_info__ >= (0, 11)
    same = partial(np.testing.assert_allclose, rtol=0, atol=0 if is_exact else 2e-6)
    monkeypatch.setattr(drive, "DECODE_ROWS", 2)
    count_B, len_B, slot_B = np.int32([3, 0, 1, 4, 2]), np.int32([5, 0, 0, 3, 0]), [4, 1, 0, 22, 3]
    num_rows, most, num_slots = 5, 4, 24
    after_BA = np.concatenate([np.array(slot_B)[:, None], 5 + np.arange(15).reshape(5, 3)], axis=1)
    rng = np.random.default_rng(0)
    if "convolution" in name:
        kernel, bias = jnp.asarray(rng.normal(size=(X, KERNEL)), jnp.float32), jnp.ones(X)
        dilation = 1 + name.startswith("dilated")
        shape, tokens = (X, (KERNEL - 1) * dilation), rng.normal(size=(num_rows * most, X))
        advance = partial(_convolve, kernel=kernel, bias=bias, dilation=dilation)
    else:
        make, shape = RULES[name]
        rule, tokens, _ = make(rng, num_rows * most)
        advance = partial(run, rule)
    tokens_BA = jax.tree.map(
        lambda x: np.float32(x).reshape(num_rows, most, *np.shape(x)[1:]), tokens
    )
    pool = jnp.asarray(rng.normal(size=(2 * num_slots, *shape)), jnp.float32)

    @partial(jax.jit, static_argnames="size")
    def step(inputs, pool, len_B, count_B, after_BA=None, *, size=1):
        batch = packed(jnp.zeros((num_rows, size), jnp.int32), len_B, count_B)
        rows = Rows(jnp.asarray(slot_B), len_B, batch, jnp.int32(1), num_slots, after_BA)
        return advance(inputs, pool, rows)

    place = np.concatenate([row * most + np.arange(n) for row, n in enumerate(count_B)])

    def pack(x):
        flat = x.reshape(-1, *x.shape[2:])
        missing = np.full((len(flat) - len(place), *x.shape[2:]), np.nan, np.float32)
        return np.concatenate([flat[place], missing])

    inputs = jax.tree.map(pack, tokens_BA)
    y_T, found = step(inputs, pool, len_B, count_B, after_BA, size=most)
    start_B, now = np.cumsum(count_B) - count_B, pool
    expected = np.array(pool)
    for j in range(most):
        live_B = (j < count_B).astype(np.int32)
        inputs = jax.tree.map(lambda x, j=j: x[:, j], tokens_BA)
        y_B, now = step(inputs, now, len_B + j, live_B)
        for row in np.flatnonzero(live_B):
            expected[num_slots + after_BA[row, j]] = now[num_slots + slot_B[row]]
            same(y_T[start_B[row] + j], y_B[row])
    same(found, expected)


def _convolve(x_TX, pool, rows, *, kernel, bias, dilation):
    return short_conv(x_TX, kernel, pool, rows, bias, dilation=dilation)


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("by_channel", [False, True])
def test_a_decoding_row_has_the_same_bits_beside_others(by_channel, size):
    """With small and with large states, which are read in ways of their own."""
    rng, heads, num_slots = np.random.default_rng(0), 4, 12
    q, k = rng.normal(size=(2, num_slots, 2, size)).astype(np.float32)
    v = rng.normal(size=(num_slots, heads, size)).astype(np.float32)
    decay = -np.abs(rng.normal(size=(num_slots, heads, *[size] * by_channel))).astype(np.float32)
    beta = rng.uniform(size=(num_slots, heads)).astype(np.float32)
    pool = jnp.asarray(rng.normal(size=(num_slots, heads, size, size)), jnp.float32)

    @jax.jit
    def step(tokens, pool, slot_B):
        count_B = jnp.ones_like(slot_B)
        batch = packed(jnp.zeros((len(slot_B), 1), jnp.int32), 5 * count_B, count_B)
        rows = Rows(slot_B, 5 * count_B, batch, jnp.int32(0), num_slots)
        return run(LinearAttention(by_channel=by_channel), tokens, pool, rows)

    def alone_or_not(*slots):
        slot_B = np.int32(slots)
        return step(Tokens(*(x[slot_B] for x in (q, k, v, decay, beta))), pool, slot_B)

    together, found = alone_or_not(*range(num_slots))
    for pair in ((0, 1), (9, 3)):
        y, pool_of_pair = alone_or_not(*pair)
        np.testing.assert_array_equal(y, together[np.array(pair)])
        np.testing.assert_array_equal(pool_of_pair[np.array(pair)], found[np.array(pair)])


def test_a_chunk_has_the_same_bits_beside_a_longer_one():
    """A CPU makes a shorter block of few tokens, however many tokens the step has."""
    rng, heads, size, few = np.random.default_rng(0), 4, 16, drive.SHORT - 7
    q, k = rng.normal(size=(2, 2 * drive.SHORT, 2, size)).astype(np.float32)
    v = rng.normal(size=(len(q), heads, size)).astype(np.float32)
    decay = -np.abs(rng.normal(size=(len(q), heads))).astype(np.float32)
    pool = jnp.zeros((2, heads, size, size), jnp.float32)

    @partial(jax.jit, static_argnums=0)
    def step(num_tokens, tokens, pool, counts):
        batch = replace(empty_batch(num_tokens, len(counts)), count_B=counts)
        batch = replace(batch, start_B=jnp.cumsum(counts) - counts, num_rows=jnp.int32(2))
        rows = Rows(jnp.arange(2), jnp.zeros(2, jnp.int32), batch, jnp.int32(0), 2)
        tokens = jax.tree.map(lambda x: x[:num_tokens], tokens)
        return run(LinearAttention(), tokens, pool, rows)

    tokens = Tokens(q, k, v, decay)
    alone, kept = step(drive.SHORT, tokens, pool, jnp.int32([few, 0]))
    beside, found = step(len(q), tokens, pool, jnp.int32([few, len(q) - few]))
    np.testing.assert_array_equal(alone[:few], beside[:few])
    np.testing.assert_array_equal(kept[0], found[0])
