"""One checkpoint in transformers (float32, eager attention) and here: equal logits at every
position, equal tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxkv.models.families import ConfigReader, read_config, read_family
from jaxkv.models.rope import rope_frequencies
from jaxkv.testing import model_of
from jaxkv.weights.load import Kept, load_weights
from parity import (
    TOLERANCE,
    assert_generates_equal,
    assert_logits_equal,
    logits_of,
    prompts,
    reference_model,
    tiny_llm,
    torch,
)
from tiers import some
from tiny import LLAMA3, VARIANTS, make_checkpoint, tiny_config

__all__ = ["torch"]

pytestmark = pytest.mark.usefixtures("quick_compile", "one_loop")


NOTHING_BETWEEN = {"rope_parameters": LLAMA3 | {"rope_theta": 1e4, "high_freq_factor": 1.0}}
"""Llama 4 Scout's, whose factors are equal."""


@pytest.mark.parametrize(
    ("variant", "changes"), [*((one, {}) for one in VARIANTS), ("llama", NOTHING_BETWEEN)]
)
def test_frequencies_of_rotation_are_those_of_transformers(torch, variant, changes):
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = tiny_config(variant, **changes)
    theirs = LlamaRotaryEmbedding(AutoConfig.for_model(**config))
    spec, _ = read_family(ConfigReader(config, variant))

    np.testing.assert_allclose(
        rope_frequencies(spec.rope, spec.head_dim), theirs.inv_freq, rtol=1e-6
    )
    assert spec.rope.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-6)


LOGITS = {"llama-biases", "qwen2-mixed-windows", "qwen3"}
"""What else the others have is the rotation, how many heads there are or how windows are written; tests
below have llama and llama-3.
"""


@pytest.mark.parametrize("variant", some(VARIANTS, *LOGITS))
def test_logits_and_their_greedy_tokens_equal_transformers(torch, tmp_path, variant):
    make_checkpoint(tmp_path, tiny_config(variant))
    assert_logits_equal(torch, reference_model(torch, tmp_path), tiny_llm(tmp_path))


# Always: gemma3_text in test_every_family.py, which has windows too.
@pytest.mark.parametrize("variant", some(VARIANTS))
def test_generate_equals_transformers_generate(torch, tmp_path, variant):
    """Gemma 3 has, in the tests of families, a table for each kind of layer."""
    make_checkpoint(tmp_path, tiny_config(variant))
    assert_generates_equal(torch, reference_model(torch, tmp_path), tiny_llm(tmp_path))


def test_a_checkpoint_in_several_files_equals_transformers(torch, tmp_path):
    make_checkpoint(tmp_path, tiny_config("llama"), seed=1, shards=3)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    assert_logits_equal(torch, reference_model(torch, tmp_path), tiny_llm(tmp_path))


def test_a_tied_head_stored_with_other_values_is_used_as_transformers_uses_it(torch, tmp_path):
    make_checkpoint(tmp_path, tiny_config("llama-3"), seed=2)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][::-1].copy()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_logits_equal(torch, reference_model(torch, tmp_path), tiny_llm(tmp_path))


@pytest.mark.parametrize(
    "variant", ["llama-biases", pytest.param("qwen3-layer-types", marks=pytest.mark.slow)]
)
def test_bfloat16_weights_kept_as_bits_give_the_logits_of_bfloat16_weights(tmp_path, variant):
    # A vocabulary of more than one, but no whole number, of the pieces in which the head is
    # multiplied.
    config = tiny_config(variant, vocab_size=2048 + 100)
    llm = tiny_llm(make_checkpoint(tmp_path, config, dtype="bfloat16"), kv_cache_dtype="float32")
    spec, layout = read_family(read_config(tmp_path))
    bits, values = (
        load_weights(tmp_path, spec, layout, Kept(dtype="bfloat16", as_bits=flag))
        for flag in (True, False)
    )
    vectors = {"float32"}  # which stay so
    assert {leaf.dtype.name for leaf in jax.tree.leaves(bits)} - vectors == {"uint16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(values)} - vectors == {"bfloat16"}
    for got, want in zip(
        *(logits_of(llm, prompts(), weights=weights) for weights in (bits, values)), strict=True
    ):
        # The same products and roundings; where two sums differ in their last bit, one of 48 inputs
        # may round to the other bfloat16 neighbour (2^-8 apart), in some layer.
        np.testing.assert_allclose(got, want, rtol=0, atol=2**-8 * want.std())


@pytest.mark.parametrize("variant", some(["qwen3-biases", "llama-biases"], "qwen3-biases"))
def test_every_tensor_of_a_tiny_checkpoint_matters_far_more_than_the_tolerance(tmp_path, variant):
    llm = tiny_llm(make_checkpoint(tmp_path, tiny_config(variant)))
    weights, layers = dict(model_of(llm).weights), model_of(llm).weights["layers"]
    want = logits_of(llm, prompts())[2]
    for name, leaf in layers.items():
        neutral = jnp.ones_like(leaf) if "norm" in name else jnp.zeros_like(leaf)
        got = logits_of(llm, prompts(), weights=weights | {"layers": layers | {name: neutral}})[2]
        assert np.abs(got - want).max() > 100 * TOLERANCE * want.std(), name
