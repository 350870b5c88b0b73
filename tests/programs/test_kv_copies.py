"""More devices than KV heads: each has a copy of one, or a part of each page's tokens, and results
are those of one device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding

from adapters import make_adapter
from families import VARIANTS, text_config
from jaxkv.axes import axis_names
from jaxkv.models.families import read_config, read_family
from jaxkv.placement import place
from jaxkv.weights.orbax import convert
from jaxkv.weights.tree import LAYERS, tree_leaves
from tiers import some
from tiny import make_checkpoint, tiny_config

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
    # KV heads by the kind of layer; a cap would make all logits alike.
    "gemma4_text": NEMO
    | {"num_global_key_value_heads": 1, "attention_k_eq_v": True, "final_logit_softcapping": None},
}


@pytest.mark.parametrize("variant", CASES)
def test_four_devices_have_whole_kv_heads(tmp_path, variant):
    config = (text_config if variant in VARIANTS else tiny_config)(variant)
    directory = make_checkpoint(tmp_path, config | CASES[variant])
    spec, layout = read_family(read_config(directory))
    placement = place(spec, layout, jax.devices()[:1] * 4, 4)
    mesh = AbstractMesh(placement.mesh_shape, placement.mesh_names)
    found = set()
    for leaf in tree_leaves(spec, layout):
        axes = leaf.one.info.logical_axes
        if "kv_heads" not in axes:
            continue
        kind = int((leaf.stack or LAYERS).removeprefix(LAYERS).removeprefix("_") or 0)
        group, _ = spec.group_of(spec.layers_of(kind)[0])
        heads = spec.groups[group].num_kv_heads
        parts = placement.weight(leaf.path, leaf.shape)
        own = NamedSharding(mesh, parts).shard_shape(leaf.shape)
        axis = len(leaf.shape) - len(axes) + axes.index("kv_heads")
        assert own[axis] * min(heads, 4) == leaf.shape[axis]
        assert own[:axis] + own[axis + 1 :] == leaf.shape[:axis] + leaf.shape[axis + 1 :]
        found.add(heads)
    assert found == {group.num_kv_heads for group in spec.groups}


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
    spec, layout = read_family(read_config(directory))
    with pytest.raises(ValueError, match=message):
        place(spec, layout, jax.devices()[:1] * 4, 4)


@pytest.mark.parametrize(("context", "shape"), [(1, (3, 4)), (2, (3, 2, 2)), (4, (3, 4))])
def test_tokens_are_divided_over_the_last_axes_and_heads_over_the_first(tmp_path, context, shape):
    heads = {"num_attention_heads": 12, "num_key_value_heads": 3, "intermediate_size": 96}
    spec, layout = read_family(
        read_config(
            make_checkpoint(tmp_path, tiny_config("llama") | HEADS | heads | {"head_dim": 8})
        )
    )
    placement = place(spec, layout, jax.devices()[:1] * 12, 12, context=context)
    assert placement.mesh_shape == shape
    mesh = AbstractMesh(placement.mesh_shape, placement.mesh_names)
    pages, extremes = (NamedSharding(mesh, parts) for parts in placement.of_pages(3))
    assert pages.shard_shape((5, 6, 16, 8)) == (5, 2, 16 // context, 8)
    assert extremes.shard_shape((5, 2, 3, 8)) == (5, 2, 1, 8)
    # Neighbours have the same heads, and of these neighbours the parts of their pages.
    first = [placement.mesh_names.index(name) for name in axis_names(pages.spec[1])]
    assert first == [0]
    last = [placement.mesh_names.index(name) for name in axis_names((*pages.spec, None)[2])]
    assert last == ([] if context == 1 else [len(shape) - 1])


@pytest.mark.parametrize(
    ("kv_heads", "context", "parts"),
    [((6, 4), 1, "4, 6 with 12"), ((4, 1), 4, "3, 4 with 12 and decode_context_parallel_size 4")],
)
def test_numbers_of_kv_heads_that_do_not_divide_each_other_are_refused(
    tmp_path, kv_heads, context, parts
):
    heads = {"num_attention_heads": 12, "attention_k_eq_v": True}
    heads |= dict(zip(("num_key_value_heads", "num_global_key_value_heads"), kv_heads, strict=True))
    directory = make_checkpoint(tmp_path, text_config("gemma4_text") | NEMO | heads)
    spec, layout = read_family(read_config(directory))
    with pytest.raises(NotImplementedError, match=f"divide each other .*, got parts of {parts}$"):
        place(spec, layout, jax.devices()[:1] * 12, 12, context=context)


RUN = """
import json, sys
from pathlib import Path
import jax, numpy as np
from safetensors.numpy import load_file
from jaxkv import LLM, LoRARequest, SamplingParams, functional as jk
from jaxkv.testing import blueprint_of, engine_of, model_of

path, converted, folder, asked, adapter = sys.argv[1:]
greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0, prompt_logprobs=0)
prompts = [{"prompt_token_ids": np.random.default_rng(n).integers(3, 150, n).tolist()} for n in (5, 30)]
adapters = [LoRARequest("a", 1, adapter), None] if adapter else None
named = {name: x for file in Path(path).glob("*.safetensors") for name, x in load_file(file).items()}

def run(size, path, *sources, **more):
    llm = LLM(path, dtype="float32", tensor_parallel_size=size, skip_tokenizer_init=True, lazy_compile=True, max_num_seqs=2,
              max_num_batched_tokens=32, max_model_len=64, block_size=8, num_gpu_blocks_override=40, enable_lora=bool(adapter), **more)
    for source in sources:
        llm.update_weights(source)
    outputs = llm.generate(prompts, params, lora_request=adapters, use_tqdm=False)
    session = llm.session(prompts[1])
    session.save(f"{folder}/{size}")
    # Quantised pages lie as devices divide them.
    anew = stored["kv_cache_dtype"] != "auto"
    restored = [llm.restore(f"{folder}/{one}", convert=anew).generate(greedy)[1].token_ids for one in {1, size}]
    engine_of(llm).check()
    scored = [[entry for entry in [*one.prompt_logprobs[1:], *one.outputs[0].logprobs]] for one in outputs]
    kv, weights = engine_of(llm).kv, model_of(llm).weights
    return llm, {
        "tokens": [one.outputs[0].token_ids for one in outputs],
        "restored": restored,
        "logprobs": [value.logprob for entries in scored for entry in entries for value in entry.values()],
        "bytes": [sum(s.data.nbytes for x in kv.pools for s in x.addressable_shards if s.device.id == i) for i in range(size)],
        "counted": blueprint_of(llm).page_nbytes * 40,
        "weights": model_of(llm).weight_bytes == blueprint_of(llm).weight_bytes,
        "affine": np.asarray(weights["layers"].get("k_affine", [])).ravel().tolist(),
        "described": llm.describe(),
    }

def by_functions(**more):
    model = jk.load(path, dtype="float32", skip_tokenizer_init=True, **more)
    kv = jk.empty(model, num_pages=20, page_size=8, num_rows=3, max_num_batched_tokens=32)
    kv, logits = jk.prefill(model, kv, [one["prompt_token_ids"] for one in prompts])
    kv = jk.fork(kv, 1, to=2)
    kv, tokens = jk.decode(model, kv, [*logits.argmax(axis=1).tolist(), 5], n=5)
    return tokens.tolist()

stored, divided = json.loads(asked)
llm, one = run(1, path, **stored)
tree = jax.tree.map(np.asarray, model_of(llm).weights)
tree["layers"].pop("k_affine", None)
four = run(4, converted, named, tree, path, **stored, **divided)[1]
if divided["decode_context_parallel_size"] > 1:
    one["functional"], four["functional"] = by_functions(), by_functions(tensor_parallel_size=4, **divided)
print(json.dumps([one, four]))
"""


RUNS = [(variant, 1, "auto") for variant in CASES if variant != "llama-biases"]
RUNS += [("llama-biases", 1, "int8"), ("llama-biases", 2, "auto"), ("llama-biases", 2, "int4")]
RUNS += [("falcon", 4, "auto"), ("falcon", 2, "auto"), ("gemma4_text", 4, "auto")]


@pytest.mark.parametrize(
    ("variant", "context", "kv_dtype"), some(RUNS, *RUNS[len(CASES) - 1 :][:2])
)
def test_four_devices_give_the_results_of_one(tmp_path, variant, context, kv_dtype):
    config = (text_config if variant in VARIANTS else tiny_config)(variant)
    path = make_checkpoint(tmp_path / "model", config | CASES[variant])
    adapter = ""
    if variant == "llama-biases":
        adapter = tmp_path / "adapter"
        make_adapter(adapter, path, seed=0)
    convert(path, tmp_path / "converted", dtype="float32")
    flags = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4 "
        f"--xla_backend_optimization_level=0"
    )
    asked = json.dumps([{"kv_cache_dtype": kv_dtype}, {"decode_context_parallel_size": context}])
    done = subprocess.run(
        [sys.executable, "-c", RUN, path, tmp_path / "converted", tmp_path, asked, adapter],
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
        timeout=290,
    )
    assert done.returncode == 0, done.stderr
    one, four = json.loads(done.stdout)
    assert four["tokens"] == one["tokens"]
    assert four["restored"] == one["restored"] * 2
    assert four.get("functional") == one.get("functional")
    np.testing.assert_allclose(four["logprobs"], one["logprobs"], rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(four["affine"], one["affine"], rtol=0, atol=1e-5)
    assert any(one["affine"]) == (kv_dtype != "auto")
    # Means and factors of keys come on top.
    assert one["weights"] == four["weights"] == (kv_dtype == "auto")
    assert one["bytes"] == [one["counted"]]
    assert four["bytes"] == [four["counted"]] * 4
    is_partly = (variant, context) == ("falcon", 2)
    assert ("copies of each KV head" in four["described"]) == (context == 1 or is_partly)
    assert ("devices divide each page's tokens" in four["described"]) == (context > 1)
    if context > 1:
        assert four["bytes"] == [one["counted"] // (2 if is_partly else 4)] * 4
    else:
        assert four["bytes"][0] > one["counted"] // 4
    assert "copies" not in one["described"]
