"""Random weights have the shapes of a checkpoint's, and a model made of them needs nothing but a
config.json.
"""

import json

import jax
import numpy as np
import pytest

from jaxkv import LLM, SamplingParams
from jaxkv.models.families import read_config, read_family
from jaxkv.placement import place
from jaxkv.weights.dummy import random_weights, weight_shapes
from jaxkv.weights.load import Kept, load_weights
from tiny import make_checkpoint, tiny_config

pytestmark = pytest.mark.usefixtures("quick_compile")


def described(weights: dict) -> dict:
    leaves = jax.tree_util.tree_leaves_with_path(weights)
    return {jax.tree_util.keystr(path): (x.shape, x.dtype, x.sharding) for path, x in leaves}


@pytest.mark.parametrize("family", ["llama-3", "qwen3", "qwen2-mixed-windows"])
@pytest.mark.parametrize(
    ("dtype", "as_bits"), [("float32", False), ("bfloat16", False), ("bfloat16", True)]
)
def test_they_are_like_a_checkpoint_s(tmp_path, family, dtype, as_bits):
    directory = make_checkpoint(tmp_path / "model", tiny_config(family))
    spec, layout = read_family(read_config(directory))
    placement = place(spec, layout, jax.devices())
    kept = Kept(dtype=dtype, as_bits=as_bits, placement=placement)
    real = load_weights(directory, spec, layout, kept)
    drawn = random_weights(spec, layout, kept, seed=0)
    assert described(drawn) == described(real)
    if not as_bits:
        assert described(weight_shapes(spec, layout, kept)) == described(real)


def test_a_matrix_keeps_the_variance_of_what_goes_through_it(tmp_path):
    directory = make_checkpoint(tmp_path / "model", tiny_config("llama"))
    spec, layout = read_family(read_config(directory))
    kept = Kept(dtype="float32", placement=place(spec, layout, jax.devices()))
    one, same, other = (random_weights(spec, layout, kept, seed=seed) for seed in (1, 1, 2))
    up = np.asarray(one["layers"]["up"])
    np.testing.assert_array_equal(up, same["layers"]["up"])
    assert not np.array_equal(up, other["layers"]["up"])
    assert not np.array_equal(up[0], up[1])
    np.testing.assert_allclose(up.var() * up.shape[-1], 1, rtol=0.05)
    np.testing.assert_array_equal(one["norm"], 1)


def test_a_config_alone_generates(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama")))
    options = {
        "skip_tokenizer_init": True,
        "max_num_seqs": 2,
        "max_model_len": 32,
        "lazy_compile": True,
    }
    llm = LLM(tmp_path, load_format="dummy", **options)
    (output,) = llm.generate(
        {"prompt_token_ids": [3, 4]}, SamplingParams(max_tokens=4, ignore_eos=True)
    )
    assert len(output.outputs[0].token_ids) == 4
    with pytest.raises(
        ValueError, match="load_format: expected one of auto, unchecked, dummy, got 'pt'"
    ):
        LLM(tmp_path, load_format="pt", **options)
