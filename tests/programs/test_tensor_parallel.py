"""Tokens do not depend on how many devices divide the model; each has its part, and a layer adds up
twice.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

import families
from adapters import make_adapter
from jaxkv.models.families import ConfigReader, read_family
from jaxkv.placement import place
from tiny import make_checkpoint, tiny_config

SIZES = (1, 2, 4)
FAST_SIZES = (1, 4)
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64}
CASES = {
    "vocabulary divided": ("llama-3", "float32", "auto", {"vocab_size": 152}),
    "biases, untied": ("llama-biases", "float32", "auto", {"vocab_size": 152}),
    "vocabulary whole": ("qwen2", "bfloat16", "auto", {}),
    "two KV groups": ("qwen2-mixed-windows", "float32", "auto", {}),
    "int8 pages": ("qwen2", "float32", "int8", {"vocab_size": 152}),
    "experts and a shared one": (
        "qwen2_moe",
        "float32",
        "auto",
        {"vocab_size": 152, "num_experts": 4, "use_sliding_window": False},
    ),
}
POLICIES = {
    "h2o_page": 1e-4,
    "page_norm": 1e-4,
    "quest": 1e-4,
    "streaming:int8": 0.02,
    "entropy": 0.02,
}
"""And how far logprobs may be apart: sums in another order round a few numbers of a demoted page
the other way, which is as much as where all pages are rounded.
"""
FAST = "vocabulary divided"

# In a process of its own: how many devices a CPU has is fixed when JAX starts.
RUN = """
import json, sys
from dataclasses import replace
from pathlib import Path
import jax, numpy as np
from safetensors.numpy import load_file
from jaxkv import LLM, BeamSearchParams, LoRARequest, SamplingParams
from jaxkv.engine import results
from jaxkv.programs.filling import fill
from jaxkv.programs.fit_keys import fit_keys
from jaxkv.testing import blueprint_of, engine_of, model_of
from jaxkv.weights.arrays import take_weights

observed, observe = [], results.observe

def observing(kept, statistics):
    observed.extend(np.asarray(statistics.mass_BW).ravel().tolist())
    observe(kept, statistics)

results.observe = observing
path, dtype, kv_dtype, policies, adapters, *sizes = sys.argv[1:]
greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=5, prompt_logprobs=2)
drawn = SamplingParams(seed=3, top_p=0.9, presence_penalty=0.3, max_tokens=12, ignore_eos=True)
rng = np.random.default_rng(0)
prompts = [{"prompt_token_ids": rng.integers(0, 150, n).tolist()} for n in (5, 40, 17)]

def logprobs(output):
    entries = [entry for entry in output.prompt_logprobs or () if entry] + (output.outputs[0].logprobs or [])
    return [one.logprob for entry in entries for one in entry.values()]

def bounded(size, policy):
    # All prompts are longer than what a row may hold in full.
    llm = LLM(path, dtype=dtype, tensor_parallel_size=size, skip_tokenizer_init=True, lazy_compile=True, max_num_seqs=2,
              max_num_batched_tokens=16, max_model_len=96, block_size=8, kv_policy=policy, kv_budget=64,
              enable_lora=bool(adapters))
    observed.clear()
    long = [{"prompt_token_ids": rng_of.integers(0, 150, n).tolist()}
            for rng_of in [np.random.default_rng(1)] for n in (70, 50)]
    outputs = llm.generate(long, greedy, use_tqdm=False)
    engine_of(llm).check()
    return {
        "tokens": [output.outputs[0].token_ids for output in outputs],
        "logprobs": [logprob for output in outputs for logprob in logprobs(output)],
        "observed": list(observed),
        "outcomes": dict(engine_of(llm).scheduler.eviction.outcomes),
        "adapted": adapted(llm) if adapters else None,
    }

def adapted(llm):
    # An engine less: of these prompts none is longer than what the policy leaves.
    loras = [LoRARequest(one, number, one) for number, one in enumerate(adapters.split(","), 1)]
    outputs = llm.generate(prompts, greedy, lora_request=[*loras, None], use_tqdm=False)
    engine_of(llm).check()
    return {
        "tokens": [output.outputs[0].token_ids for output in outputs],
        "logprobs": [logprob for output in outputs for logprob in logprobs(output)],
    }

def refilled(llm):
    # As on accelerators, of arrays that are all on one device, the last one.
    model, kept = model_of(llm), replace(blueprint_of(llm).kept, fill=fill)
    named = {name: x for file in Path(path).glob("*.safetensors") for name, x in load_file(file).items()}
    # What fits keys to quantised pages comes afterwards.
    own = model.weights | {"layers": {k: v for k, v in model.weights["layers"].items() if k != "k_affine"}}
    for tree in (named, jax.tree.map(np.array, own)):
        new = take_weights(jax.device_put(tree, jax.devices()[-1]), model.spec, model.layout, kept)
        assert jax.tree.all(jax.tree.map(lambda x, y: x.sharding == y.sharding, new, own))
        yield jax.tree.all(jax.tree.map(np.array_equal, new, own))

def run(size):
    llm = LLM(path, dtype=dtype, kv_cache_dtype=kv_dtype, tensor_parallel_size=size, skip_tokenizer_init=True,
              lazy_compile=True,
              max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64, block_size=8)
    outputs = llm.generate(prompts, [greedy, drawn, greedy], use_tqdm=False)
    again = llm.generate(prompts, drawn, use_tqdm=False)
    beams = llm.beam_search(prompts[:1], BeamSearchParams(beam_width=2, max_tokens=6))
    programs, pages = engine_of(llm).programs, engine_of(llm).kv.stores[0].pages
    engine_of(llm).check()
    return {
        "size": size,
        "tokens": [output.outputs[0].token_ids for output in outputs + again],
        "cached": [output.num_cached_tokens for output in again],
        "beams": [beam.tokens for output in beams for beam in output.sequences],
        "logprobs": [logprob for output in outputs for logprob in logprobs(output)],
        "affine": [x.tolist() for x in fit_keys(model_of(llm).weights, np.arange(32), spec=model_of(llm).spec,
                                                placement=blueprint_of(llm).placement)],
        "page_dtype": str(pages.dtype),
        "text": programs.loop(2).as_text(),
        "page_bytes": [shard.data.nbytes for shard in pages.addressable_shards],
        "all_page_bytes": pages.nbytes,
        "aliased": programs.loop(2).memory_analysis().alias_size_in_bytes,
        "weight_bytes": model_of(llm).weight_bytes,
        "vocabulary_bytes": sum(x.nbytes for name, x in model_of(llm).weights.items() if name in ("embed", "head")),
        "described": llm.describe(),
        "bounded": {policy: bounded(size, policy) for policy in policies.split(",") if policy},
        "refilled": list(refilled(llm)),
    }

print(json.dumps([run(int(size)) for size in sizes]))
"""


@pytest.fixture(
    scope="module",
    params=[pytest.param(c, marks=() if c == FAST else pytest.mark.slow) for c in CASES],
)
def runs(request, tmp_path_factory):
    variant, dtype, kv_dtype, changes = CASES[request.param]
    policies = {FAST: "h2o_page", "biases, untied": ",".join(POLICIES)}.get(request.param, "")
    config = (families.text_config if variant in families.VARIANTS else tiny_config)(variant)
    path = make_checkpoint(tmp_path_factory.mktemp("model"), config | HEADS | changes, dtype=dtype)
    adapters = [tmp_path_factory.mktemp("adapters") / str(seed) for seed in range(2)]
    for seed, directory in enumerate(adapters):
        make_adapter(directory, path, seed=seed)
    given = ",".join(map(str, adapters)) if request.param == FAST else ""
    flags = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={max(SIZES)} "
        f"--xla_backend_optimization_level=0"
    )
    sizes = map(str, FAST_SIZES if request.param == FAST else SIZES)
    command = [sys.executable, "-c", RUN, path, dtype, kv_dtype, policies, given, *sizes]
    env = os.environ | {"XLA_FLAGS": flags}
    # Less than pytest allows, which would leave it running.
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=290
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_number_of_devices_gives_the_same_tokens(runs):
    one, *others = runs
    for other in others:
        assert other["tokens"] == one["tokens"]
        assert other["cached"] == one["cached"]
        assert other["beams"] == one["beams"]
        # Float32 sums in another order; where pages are rounded, a few numbers go the other way.
        apart = 1e-4 if one["page_dtype"] == "float32" else 0.02
        np.testing.assert_allclose(other["logprobs"], one["logprobs"], rtol=0, atol=apart)
        np.testing.assert_allclose(other["affine"], one["affine"], rtol=0, atol=1e-5)
    assert any(one["cached"])
    assert np.abs(one["affine"]).max() > 0.01


def test_arrays_of_one_device_become_weights_that_are_divided(runs):
    assert [one["refilled"] for one in runs] == [[True, True]] * len(runs)


def test_every_number_of_devices_gives_the_same_tokens_with_adapters(runs):
    one = runs[0]
    wanted, *found = (
        [x["adapted"] for x in run["bounded"].values() if x["adapted"]] for run in runs
    )
    if not wanted:
        pytest.skip("one case has adapters")
    (wanted,) = wanted
    for (other,) in found:
        assert other["tokens"] == wanted["tokens"]
        np.testing.assert_allclose(other["logprobs"], wanted["logprobs"], rtol=0, atol=1e-4)
    assert len({*map(str, wanted["tokens"])}) == 3
    assert wanted["tokens"][0] != one["tokens"][0]


def test_every_number_of_devices_keeps_the_same_pages(runs):
    one, *others = runs
    for other in others:
        for policy, wanted in one["bounded"].items():
            found = other["bounded"][policy]
            assert found["tokens"] == wanted["tokens"]
            assert found["outcomes"] == wanted["outcomes"]
            assert bool(found["observed"]) == (policy in ("h2o_page", "entropy"))
            np.testing.assert_allclose(
                found["observed"], wanted["observed"], rtol=POLICIES[policy], atol=1e-3
            )
            np.testing.assert_allclose(
                found["logprobs"], wanted["logprobs"], rtol=0, atol=POLICIES[policy]
            )
    bounding = [found["outcomes"] for policy, found in one["bounded"].items() if policy != "quest"]
    assert all(
        outcomes["kept"] > 0 and outcomes["kept"] < sum(outcomes.values()) for outcomes in bounding
    )


def test_each_device_has_its_part_of_pages_and_weights(runs, request):
    changes = CASES[request.node.callspec.params["runs"]][3]
    one, *others = runs
    for other in others:
        size = other["size"]
        assert other["all_page_bytes"] == one["all_page_bytes"]
        assert other["page_bytes"] == [one["all_page_bytes"] // size] * size
        assert other["aliased"] >= one["all_page_bytes"] // size  # updated in place
        whole = 0 if "vocab_size" in changes else one["vocabulary_bytes"]
        divided = other["weight_bytes"] - whole
        assert divided < (one["weight_bytes"] - whole) / size + 5_000  # norms are whole
        assert f"each of {', '.join(f'cpu:{i}' for i in range(size))}" in other["described"]


def test_a_layer_adds_up_over_devices_twice(runs, request):
    changes = CASES[request.node.callspec.params["runs"]][3]
    for other in runs[1:]:
        num_sums, num_gathers = (
            other["text"].count(f" {op}(") for op in ("all-reduce", "all-gather")
        )
        is_divided = "vocab_size" in changes
        # The loop over layers has its body once. The other sum is the embedding's.
        assert num_sums == 2 + is_divided
        assert num_gathers == is_divided  # the logits


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (0, "expected 1 to 8, the devices here, got 0"),
        (9, "expected 1 to 8, the devices here, got 9"),
        (True, "expected 1 to 8, the devices here, got True"),
        ("2", "expected 1 to 8, the devices here, got '2'"),
        (3, "expected a divisor or a multiple of the model's 4 KV heads, got 3"),
    ],
)
def test_a_size_that_does_not_fit_is_refused(size, message):
    spec, layout = read_family(ConfigReader(tiny_config("llama", **HEADS), "config.json"))
    with pytest.raises(ValueError, match=f"tensor_parallel_size: {message}"):
        place(spec, layout, jax.devices()[:1] * 8, size)


def test_a_feed_forward_dimension_without_such_parts_is_refused():
    spec, layout = read_family(
        ConfigReader(tiny_config("llama", **HEADS, intermediate_size=90), "config.json")
    )
    with pytest.raises(
        ValueError, match="expected a divisor of the model's 90 feed-forward dimension, got 4"
    ):
        place(spec, layout, jax.devices()[:1] * 8, 4)
