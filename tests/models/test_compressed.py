"""Entries of several tokens, and what rows keep of tokens whose entries are not made yet."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import families
from jaxkv.models.compressed import Compression, _kept
from jaxkv.models.families import read_config, read_family
from jaxkv.models.rope import Ropes
from jaxkv.ops.attention import Batch
from jaxkv.ops.recurrent import Rows
from jaxkv.weights.load import Kept, load_weights
from jaxkv.weights.tree import layer_weights
from tiny import make_checkpoint

pytestmark = pytest.mark.usefixtures("quick_compile")

KEPT, SLOTS, LAYER = 4, 9, 1


def batch_of(counts: list[int], begins: list[int]) -> Batch:
    start_B = np.cumsum([0, *counts[:-1]])
    padding = 2
    position_T = [
        np.arange(begin, begin + count) for begin, count in zip(begins, counts, strict=True)
    ]
    return Batch(
        token_T=jnp.zeros(sum(counts) + padding, jnp.int32),
        position_T=jnp.asarray(np.concatenate([*position_T, [0] * padding]), jnp.int32),
        row_T=jnp.asarray(np.repeat(range(len(counts) + 1), [*counts, padding]), jnp.int32),
        start_B=jnp.asarray(start_B, jnp.int32),
        count_B=jnp.asarray(counts, jnp.int32),
        num_decode=jnp.int32(0),
        num_rows=jnp.int32(len(counts)),
    )


@pytest.mark.parametrize("counts", [[3, 1, 0], [11, 2, 5]])
def test_a_row_keeps_what_its_last_tokens_say_by_their_position(counts):
    rng, begins, slot_B = np.random.default_rng(0), [6, 0, 13], [2, 5, 7]
    pool = rng.normal(size=(2 * SLOTS, KEPT, 3)).astype(np.float32)
    said_TX = rng.normal(size=(sum(counts) + 2, 3)).astype(np.float32)
    slots = [s if n else SLOTS for s, n in zip(slot_B, counts, strict=True)]
    batch = batch_of(counts, begins)
    rows = Rows(jnp.asarray(slots), jnp.asarray(begins), batch, jnp.int32(LAYER), SLOTS)
    got = np.asarray(_kept(jnp.asarray(pool), jnp.asarray(said_TX), rows, KEPT))
    want, t = pool.copy(), 0
    for slot, begin, count in zip(slot_B, begins, counts, strict=True):
        for position in range(begin, begin + count):
            want[LAYER * SLOTS + slot, position % KEPT] = said_TX[t]
            t += 1
    np.testing.assert_array_equal(got, want)


def test_what_each_token_leaves_is_what_steps_of_one_token_leave():
    """In slots of their own, where any of them may be the last that holds."""
    rng, counts, begins = np.random.default_rng(1), [3, 1], [6, 9]
    pool = rng.normal(size=(2 * SLOTS, KEPT, 3)).astype(np.float32)
    said_TX = jnp.asarray(rng.normal(size=(6, 3)), jnp.float32)
    slot_B, after_BA = jnp.asarray([0, 1]), jnp.asarray([[2, 3, 4], [5, 6, 7]])
    begin_B, layer = jnp.asarray(begins), jnp.int32(LAYER)
    ahead = Rows(slot_B, begin_B, batch_of(counts, begins), layer, SLOTS, after_BA)
    got = np.asarray(_kept(jnp.asarray(pool), said_TX, ahead, KEPT))
    want, one, t = pool.copy(), jnp.asarray(pool), 0
    for row, (begin, count) in enumerate(zip(begins, counts, strict=True)):
        for j in range(count):
            batch = batch_of([1], [begin + j])
            rows = Rows(slot_B[row : row + 1], begin_B[:1] + j, batch, layer, SLOTS)
            said = jnp.concatenate([said_TX[t : t + 1], jnp.zeros((2, 3))])
            one, t = _kept(one, said, rows, KEPT), t + 1
            want[LAYER * SLOTS + after_BA[row, j]] = one[LAYER * SLOTS + row]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("layer", [1, 2])
def test_entries_are_the_same_however_a_prompt_is_cut(tmp_path, layer):
    """Those that overlap too, whose tokens are then of two steps and of a state."""
    path = make_checkpoint(tmp_path, families.text_config("deepseek_v4"))
    spec, layout = read_family(read_config(path))
    weights = load_weights(path, spec, layout, Kept(dtype="float32"))
    kind, (number_of,) = spec.layer_kinds[layer], spec.states_of(layer)
    index = spec.states[number_of].layers.index(layer)
    layers = spec.layers_of(kind)
    w = layer_weights(weights, jnp.int32(layers.index(layer)), kind, None)
    rng, num_tokens, slots = np.random.default_rng(2), 21, 3
    x_TD = jnp.asarray(rng.normal(size=(num_tokens, spec.hidden_size)), jnp.float32)

    @partial(jax.jit, static_argnums=1)
    def step(x_TD, count, begin, states):
        batch = batch_of([count], [0])
        batch = replace(batch, position_T=batch.position_T + begin)
        rows = Rows(jnp.asarray([1]), begin[None], batch, jnp.int32(index), slots)
        rope = Ropes(spec, batch.position_T).of(layers)(jnp.int32(layer))
        project = Compression(spec, layers, (number_of, lambda _: rows))
        x_RD = jnp.pad(jax.lax.dynamic_slice_in_dim(x_TD, begin, count), ((0, 2), (0, 0)))
        *_, how, states = project(x_RD, w, rope, states, jnp.int32(layer))
        return how.entry_EX, how.last_E, states

    def entries(count: int) -> np.ndarray:
        kept = [one.arrays[0].shape for one in spec.states]
        states, found = tuple((jnp.full((2 * slots, *x), jnp.nan),) for x in kept), []
        for begin in range(0, num_tokens, count):
            entry_EX, last_E, states = step(x_TD, count, jnp.int32(begin), states)
            found.append(np.asarray(entry_EX)[np.asarray(last_E) < count])
        return np.concatenate(found)

    whole = entries(num_tokens)
    assert whole.shape[0] == num_tokens // spec.states[number_of].mixer.rate
    assert np.isfinite(whole).all()
    for count in (7, 1):
        np.testing.assert_allclose(entries(count), whole, rtol=0, atol=1e-5)
