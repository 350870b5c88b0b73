"""Numbers that stand for weights are others as soon as one bit is, in every dtype, and the same for
float32 and what bfloat16 makes of it, on any number of devices.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkv.programs.digest import digests

DTYPES = (
    *("float16", "float8_e4m3fn", "float8_e8m0fnu", "uint16", "int8", "uint8", "int4", "int32"),
    "bfloat16",
)
SHAPES = ((), (6,), (3, 40), (2, 3, 5, 16))


def numbers(*arrays: jax.Array | np.ndarray) -> list[list[int]]:
    return [np.asarray(x).ravel().tolist() for x in digests([jnp.asarray(x) for x in arrays])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_value_counts(dtype, shape):
    rng = np.random.default_rng(0)
    values = np.array(rng.integers(0, 8, shape))
    (want,) = numbers(values.astype(jnp.dtype(dtype)))
    places = list(np.ndindex(shape))
    for place in [places[i] for i in {0, len(places) // 2, len(places) - 1}]:
        other = values.copy()
        other[place] = 2 if values[place] != 2 else 4
        assert numbers(other.astype(jnp.dtype(dtype))) != [want]
    moved = np.roll(values, 1)
    assert (numbers(moved.astype(jnp.dtype(dtype))) == [want]) == np.array_equal(moved, values)


def test_float32_counts_as_bfloat16():
    x = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
    x[0, :4] = 1e-41, -1e-39, 2.0**-133, 0.0
    short = x.astype(ml_dtypes.bfloat16)
    assert numbers(x) == numbers(short) == numbers(short.view(np.uint16))


@pytest.mark.parametrize("parts", [("x", None), (None, "x")])
def test_devices_that_divide_an_array_say_the_same(parts):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 24)).astype(np.float32))
    where = NamedSharding(Mesh(jax.devices()[:4], "x"), PartitionSpec(*parts))
    assert numbers(jax.device_put(x, where)) == numbers(x)
