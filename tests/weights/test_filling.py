"""Arrays of jax become the weights that arrays of numpy become, from device to device."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import families
from jaxkv.errors import CheckpointError
from jaxkv.models.families import read_config, read_family
from jaxkv.programs.filling import fill
from jaxkv.programs.rounding import quantise
from jaxkv.weights import arrays as own_trees
from jaxkv.weights import safetensors
from jaxkv.weights.arrays import take_weights
from jaxkv.weights.load import Kept
from tiny import make_checkpoint, tiny_config

pytestmark = pytest.mark.usefixtures("quick_compile")


def refuse(x: jax.Array) -> None:
    raise AssertionError(f"an array of {x.shape} goes by way of host memory")


def read(directory: Path) -> dict[str, np.ndarray]:
    return {k: x for file in directory.glob("*.safetensors") for k, x in load_file(file).items()}


@pytest.mark.parametrize(
    ("variant", "as_bits"),
    [("llama", False), ("llama", True), ("gpt2", False), ("mixtral", False), ("gpt_oss", False)],
)
def test_arrays_on_devices_are_no_way_in_host_memory(tmp_path, monkeypatch, variant, as_bits):
    directory = make_checkpoint(tmp_path / "model", families.text_config(variant))
    spec, layout = read_family(read_config(directory))
    kept = Kept(dtype="bfloat16", as_bits=as_bits, fill=fill)
    given = read(directory)
    want = take_weights(given, spec, layout, kept)
    on_devices = {name: jnp.asarray(x) for name, x in given.items()}
    for module in (safetensors, own_trees):
        monkeypatch.setattr(module, "in_host_memory", refuse)
    for source in (on_devices, want):
        got = take_weights(source, spec, layout, kept)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for (path, x), y in zip(
            jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
        ):
            assert x.dtype == y.dtype, path
            np.testing.assert_array_equal(x, y, err_msg=str(path))


def test_of_a_tree_that_is_quantised_one_matrix_at_a_time_is_in_host_memory(tmp_path, monkeypatch):
    directory = make_checkpoint(tmp_path / "model", families.text_config("mixtral"))
    spec, layout = read_family(read_config(directory))
    tree = take_weights(read(directory), spec, layout, Kept(dtype="bfloat16", as_bits=True))
    kept = Kept(dtype="bfloat16", quantization="int8", quantise=quantise, fill=fill)
    want = take_weights(jax.tree.map(np.asarray, tree), spec, layout, kept)
    shapes, in_host_memory = [], own_trees.in_host_memory
    monkeypatch.setattr(
        own_trees, "in_host_memory", lambda x: shapes.append(x.shape) or in_host_memory(x)
    )
    jax.tree.map(np.testing.assert_array_equal, take_weights(tree, spec, layout, kept), want)
    assert {*map(len, shapes)} == {2}


def test_what_is_not_finite_on_a_device_is_named(tmp_path):
    directory = make_checkpoint(tmp_path / "model", tiny_config("llama"))
    spec, layout = read_family(read_config(directory))
    given = {name: jnp.asarray(x) for name, x in read(directory).items()}
    name = "model.layers.1.mlp.up_proj.weight"
    given[name] = given[name].at[0, 7].set(jnp.nan)
    with pytest.raises(CheckpointError, match=rf"{name}: expected finite .* got nan at index 7 "):
        take_weights(given, spec, layout, Kept(dtype="float32", fill=fill))
    unchecked = take_weights(given, spec, layout, Kept(dtype="float32", fill=fill, check=False))
    assert np.isnan(unchecked["layers"]["up"][1, 0, 7])
