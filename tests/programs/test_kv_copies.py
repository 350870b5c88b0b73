"""More devices than KV heads: each has a copy of one, and results are those of one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from adapters import make_adapter
from families import VARIANTS, text_config
from jaxkv.build.blueprint import make_blueprint
from jaxkv.build.model import find_model
from jaxkv.build.options import EngineOptions
from jaxkv.build.origin import WeightNames, origin_of
from jaxkv.errors import CheckpointError, SavedFileError
from jaxkv.models.families import read_config, read_family
from jaxkv.placement import place, with_copies
from jaxkv.programs.filling import fill
from jaxkv.programs.rounding import quantise
from jaxkv.weights.arrays import take_weights
from jaxkv.weights.load import Kept, load_weights
from jaxkv.weights.orbax import convert
from tiers import some
from tiny import SMALL, make_checkpoint, tiny_config

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}
FALCON = {"num_attention_heads": 8, "hidden_size": 64}
NEMO = HEADS | {"head_dim": 8}
CASES = {
    "llama-biases": HEADS,
    "phi3": HEADS,  # q, k and v in one tensor
    "falcon": FALCON,  # the same, with one KV head
    "glm4": NEMO,
    "olmo2": HEADS,  # a norm over all KV heads
    "stablelm-parallel": HEADS,  # and one of its own for each, in tensors of their own
    "gemma4_text": NEMO | {"num_global_key_value_heads": 1},  # KV heads by the kind of layer
}


@pytest.mark.parametrize("variant", some(CASES, *[one for one in CASES if one != "gemma4_text"]))
def test_each_kv_head_is_there_as_often_as_devices_need_it(tmp_path, variant):
    config = (text_config if variant in VARIANTS else tiny_config)(variant)
    directory = make_checkpoint(tmp_path, config | CASES[variant])
    spec, layout = read_family(read_config(directory))
    copied = with_copies(spec, layout, 4)
    place(*copied, jax.devices()[:1] * 4, 4)
    assert with_copies(*copied, 4) == copied
    for method in (None, "int8"):
        kept = Kept(dtype="float32", quantization=method, quantise=quantise)
        one = load_weights(directory, spec, layout, kept)
        four = load_weights(directory, *copied, kept)
        assert jax.tree.structure(one) == jax.tree.structure(four)
        num_copied = 0
        named = jax.tree_util.tree_leaves_with_path(one)
        for (path, x), y in zip(named, jax.tree.leaves(four), strict=True):
            if x.shape == y.shape:
                np.testing.assert_array_equal(x, y, err_msg=str(path))
                continue
            (axis,) = (i for i, (a, b) in enumerate(zip(x.shape, y.shape, strict=True)) if a != b)
            copies = y.shape[axis] // x.shape[axis]
            heads = x.reshape(*x.shape[:axis], 4 // copies, -1, *x.shape[axis + 1 :])
            want = np.repeat(heads, copies, axis).reshape(y.shape)
            np.testing.assert_array_equal(want, y, err_msg=str(path))
            num_copied += 1
        assert num_copied >= 2
    # Arrays that are on devices already become the same.
    given = {k: x for file in directory.glob("*.safetensors") for k, x in load_file(file).items()}
    kept = replace(kept, quantization=None, fill=fill)
    filled = take_weights({k: jnp.asarray(x) for k, x in given.items()}, *copied, kept)
    want = load_weights(directory, *copied, kept)
    jax.tree.map(np.testing.assert_array_equal, filled, want)


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        ("llama", {"num_attention_heads": 6}, "a divisor of the model's 6 attention heads, got 4"),
        ("llama", {"num_key_value_heads": 1, "num_attention_heads": 3}, "3 attention heads, got 4"),
        ("diffllama", {"num_attention_heads": 4}, "2 pairs of attention heads, got 4"),
    ],
)
def test_query_heads_have_to_be_divided_all_the_same(tmp_path, variant, changes, message):
    config = (text_config if variant in VARIANTS else tiny_config)(variant)
    directory = make_checkpoint(tmp_path, config | HEADS | {"head_dim": 8} | changes)
    spec, layout = with_copies(*read_family(read_config(directory)), 4)
    with pytest.raises(ValueError, match=message):
        place(spec, layout, jax.devices()[:1] * 4, 4)


def test_trees_with_other_copies_are_refused_with_what_to_give_instead(tmp_path):
    directory = make_checkpoint(tmp_path, tiny_config("llama", **HEADS))
    spec, layout = read_family(read_config(directory))
    models = [with_copies(spec, layout, size) for size in (2, 4)]
    kept = Kept(dtype="float32")
    for given, wanted in (models, models[::-1]):
        tree = load_weights(directory, *given, kept)
        with pytest.raises(CheckpointError, match=r"layers.k: .* as many copies of its KV heads"):
            take_weights(tree, *wanted, kept)


def test_stored_trees_have_no_copies(tmp_path):
    directory = make_checkpoint(tmp_path / "model", tiny_config("llama", **HEADS))
    convert(directory, tmp_path / "converted", dtype="float32")
    options = EngineOptions(tmp_path / "converted", **SMALL | {"tensor_parallel_size": 4})
    model = find_model(options)
    several = make_blueprint(options, model.spec, model.layout, jax.devices()[:1] * 4)
    with pytest.raises(ValueError, match=r"KV heads for weights that jaxkv convert has .*, got 4"):
        model.loaded(several)


def test_what_is_saved_with_other_copies_is_refused_with_why(tmp_path):
    directory = make_checkpoint(tmp_path, tiny_config("llama", **HEADS))
    found = []
    for size in (1, 2, 4):
        options = EngineOptions(directory, **SMALL | {"tensor_parallel_size": size})
        model, devices = find_model(options), jax.devices()[:1] * size
        blueprint = make_blueprint(options, model.spec, model.layout, devices)
        weights = load_weights(directory, blueprint.spec, blueprint.layout, Kept(dtype="float32"))
        found.append(origin_of(model, weights, blueprint, "", WeightNames()))
    one, two, four = found
    assert one == two
    with pytest.raises(SavedFileError, match="or with other copies of KV heads"):
        one.check(four, "a file")


RUN = """
import json, sys
from pathlib import Path
import numpy as np
from safetensors.numpy import load_file
from jaxkv import LLM, LoRARequest, SamplingParams
from jaxkv.testing import engine_of

path, adapter = sys.argv[1:]
params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0, prompt_logprobs=0)
prompts = [{"prompt_token_ids": np.random.default_rng(n).integers(3, 150, n).tolist()} for n in (5, 30)]

def run(size):
    llm = LLM(path, dtype="float32", tensor_parallel_size=size, skip_tokenizer_init=True, lazy_compile=True, max_num_seqs=2,
              max_num_batched_tokens=32, max_model_len=64, block_size=8, enable_lora=True)
    named = {name: x for file in Path(path).glob("*.safetensors") for name, x in load_file(file).items()}
    for source in (named, path):
        llm.update_weights(source)
    outputs = llm.generate(prompts, params, lora_request=[LoRARequest("a", 1, adapter), None], use_tqdm=False)
    engine_of(llm).check()
    scored = [[entry for entry in [*one.prompt_logprobs[1:], *one.outputs[0].logprobs]] for one in outputs]
    return {
        "tokens": [one.outputs[0].token_ids for one in outputs],
        "logprobs": [value.logprob for entries in scored for entry in entries for value in entry.values()],
        "described": llm.describe(),
    }

print(json.dumps([run(1), run(4)]))
"""


def test_four_devices_give_the_tokens_of_one_with_two_kv_heads(tmp_path):
    path = make_checkpoint(tmp_path / "model", tiny_config("llama", **HEADS))
    make_adapter(tmp_path / "adapter", path, seed=0)
    flags = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4 "
        f"--xla_backend_optimization_level=0"
    )
    done = subprocess.run(
        [sys.executable, "-c", RUN, path, tmp_path / "adapter"],
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    one, four = json.loads(done.stdout)
    assert four["tokens"] == one["tokens"]
    np.testing.assert_allclose(four["logprobs"], one["logprobs"], rtol=0, atol=1e-4)
    assert "2 copies of each KV head" in four["described"]
    assert "copies" not in one["described"]
