"""What a key adds to scores, where keys and queries are rounded to bfloat16 as pages round them."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.models.boosts import BOOST, GAIN, with_boosts
from jaxkv.ops.matrices import Matrix

TOKENS, HEADS, KV_HEADS, DIM = 5, 4, 2, 16


def test_pages_in_bfloat16_keep_twice_as_many_bits_of_what_a_key_adds():
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.normal(size=(TOKENS, count, DIM)).astype(np.float32)
        for count in (HEADS, KV_HEADS, KV_HEADS)
    )
    matrix = rng.normal(0, 0.2, (KV_HEADS, KV_HEADS * DIM)).astype(np.float32)
    gain = np.float32([0.3, 0.9])
    w = {BOOST: Matrix(jnp.asarray(matrix)), GAIN: jnp.asarray(gain)}
    large_q, large_k = jax.jit(lambda q, k, v: with_boosts(q, k, v, w, DIM, None))(q, k, v)
    rounded_q, rounded_k = (
        np.asarray(x[..., DIM:].astype(jnp.bfloat16).astype(jnp.float32))
        for x in (large_q, large_k)
    )
    got = np.einsum("tnh,tnh->tn", rounded_q[:, ::2], rounded_k) / DIM**0.5
    x = v.reshape(TOKENS, -1).astype(np.float64) @ matrix.T
    want = np.exp(gain * np.log1p(np.exp(x)))
    np.testing.assert_allclose(got, want, rtol=2**-15)
    np.testing.assert_array_equal(large_q[..., :DIM], q)
    np.testing.assert_array_equal(large_k[..., :DIM], k)


def test_devices_that_share_heads_add_what_one_device_adds():
    rng = np.random.default_rng(1)
    q, k, v = (
        rng.normal(size=(TOKENS, count, DIM)).astype(np.float32)
        for count in (HEADS, KV_HEADS, KV_HEADS)
    )
    matrix = rng.normal(0, 0.2, (KV_HEADS, KV_HEADS * DIM)).astype(np.float32)
    bias, gain = jnp.float32([0.5, -1.0]), jnp.float32([0.3, 0.9])

    def run(q, k, v, matrix, axis):
        w = {BOOST: Matrix(matrix), f"{BOOST}_bias": bias, GAIN: gain}
        return with_boosts(q, k, v, w, DIM, axis)

    def parts(x, axis):
        return jnp.stack(jnp.split(jnp.asarray(x), 2, axis))

    given = [parts(x, 1) for x in (q, k, v, matrix)]
    on_device = jax.vmap(partial(run, axis="devices"), axis_name="devices")
    for got, want in zip(on_device(*given), run(q, k, v, jnp.asarray(matrix), None), strict=True):
        np.testing.assert_allclose(jnp.concatenate(got, axis=1), want, rtol=1e-5, atol=1e-6)
