"""Latent attention: one row per token, however it is computed, stored, shared or divided."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest

from jaxkv import LLM, BeamSearchParams, RequestOutput, SamplingParams
from jaxkv.build.blueprint import make_blueprint
from jaxkv.build.options import EngineOptions
from jaxkv.errors import CheckpointError
from jaxkv.models.families import ConfigReader, read_family
from jaxkv.ops.attention import xla
from jaxkv.testing import engine_of
from poison import poisoned
from tiny import BASE, make_checkpoint

pytestmark = pytest.mark.usefixtures("quick_compile", "one_loop")

CONFIG = BASE | {
    "model_type": "deepseek_v3",
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
    "num_hidden_layers": 2,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
APART = {"float32": 1e-4, "int8": 0.05}
"""How far logprobs may be: sums in another order; numbers of int8 that round the other way."""


@pytest.fixture(autouse=True)
def prompts_are_long_chunks(monkeypatch):
    """Prompts that run whole are attended expanded, chunks of 16 tokens and decode rows absorbed."""
    monkeypatch.setattr(xla, "LEAST_QUERIES", 20)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("latent") / "model", CONFIG)


def new_llm(checkpoint: Any, **options: Any) -> LLM:
    # One size of steps.
    sizes = {"max_num_seqs": 2, "block_size": 8, "max_num_batched_tokens": 63}
    made = {"skip_tokenizer_init": True, "dtype": "float32", "lazy_compile": True}
    return LLM(checkpoint, **sizes | made | options)


def prompts() -> list[dict[str, list[int]]]:
    """Makes prompts of which two begin alike."""
    rng = np.random.default_rng(2)
    ids = [rng.integers(3, 151, length).tolist() for length in (41, 23, 9)]
    return [{"prompt_token_ids": one} for one in (*ids, ids[0][:30] + ids[2])]


def generate(llm: LLM) -> list[RequestOutput]:
    with poisoned(engine_of(llm)):
        outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
    assert engine_of(llm).scheduler.allocator.num_used == 0
    return outputs


def assert_same(some: list[RequestOutput], others: list[RequestOutput], apart: float) -> None:
    for (one,), (other,) in ((a.outputs, b.outputs) for a, b in zip(some, others, strict=True)):
        assert one.token_ids == other.token_ids
        listed = [[x.logprob for step in y.logprobs for x in step.values()] for y in (one, other)]
        np.testing.assert_allclose(*listed, rtol=0, atol=apart)


@pytest.mark.parametrize("kv_dtype", ["float32", pytest.param("int8", marks=pytest.mark.slow)])
def test_chunks_cached_pages_and_preemption_change_nothing(tmp_path, kv_dtype):
    """Of layers of one kind: those of two are divided below."""
    checkpoint = make_checkpoint(tmp_path / "model", CONFIG | {"first_k_dense_replace": 0})
    options = {"kv_cache_dtype": kv_dtype}
    whole = new_llm(checkpoint, enable_prefix_caching=False, **options)
    wanted = generate(whole)
    # Chunks of 16 tokens; the first two rows would take 15 pages.
    small = {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 11}
    llm = new_llm(checkpoint, **small, **options)
    found = generate(llm)
    assert engine_of(llm).scheduler.num_preemptions > 0
    assert_same(found, wanted, APART[kv_dtype])
    again = generate(llm)
    assert any(output.num_cached_tokens for output in again)
    assert_same(again, wanted, APART[kv_dtype])
    asked = BeamSearchParams(beam_width=2, max_tokens=6)
    beams = [one.beam_search(prompts()[1:2], asked)[0].sequences for one in (whole, llm)]
    assert [one.tokens for one in beams[0]] == [one.tokens for one in beams[1]]


def test_deepseek_v3_keeps_576_numbers_per_token_and_layer(tmp_path):
    config = CONFIG | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    llm = new_llm(make_checkpoint(tmp_path, config), num_gpu_blocks_override=16)
    assert "576 numbers per token and layer in float32" in llm.describe()
    assert engine_of(llm).kv.nbytes == 16 * 8 * 2 * 576 * 4


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("kv_lora_rank", 0, "kv_lora_rank: expected a whole number from 1"),
        ("kv_lora_rank", None, "kv_lora_rank: expected a whole number from 1"),
        ("kv_lora_rank", 2**40, "kv_lora_rank: expected a whole number from 1"),
        ("q_lora_rank", -1, "q_lora_rank: expected a whole number from 1"),
        ("qk_nope_head_dim", 0, "qk_nope_head_dim: expected a whole number from 1"),
        ("qk_rope_head_dim", 7, "qk_rope_head_dim: expected an even number"),
        ("v_head_dim", "16", "v_head_dim: expected a whole number from 1"),
        ("num_key_value_heads", 2, "num_key_value_heads: expected 4, one for each query head"),
        ("rope_interleave", "yes", "rope_interleave: expected true or false"),
    ],
)
def test_a_config_of_no_latent_attention_is_refused(key, value, message):
    config = {**CONFIG, key: value}
    if value is None:
        config.pop(key)
        config["model_type"] = "kimi_k2"  # whose configs nothing is known to leave out
    with pytest.raises(CheckpointError, match=message):
        read_family(ConfigReader(config, "config.json"))


def test_a_checkpoint_without_what_expands_latents_is_refused(checkpoint, tmp_path):
    from safetensors.numpy import load_file, save_file

    name = "model.layers.0.self_attn.kv_b_proj.weight"
    tensors = load_file(checkpoint / "model.safetensors")
    tensors.pop(name)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(CheckpointError, match=f"missing tensor {name}"):
        new_llm(tmp_path)


def test_devices_that_would_choose_other_pages_are_refused(checkpoint):
    spec, layout = read_family(ConfigReader(CONFIG, "config.json"))
    options = EngineOptions(kv_policy="quest", kv_budget=64, tensor_parallel_size=2)
    with pytest.raises(NotImplementedError, match="tensor_parallel_size 1 with latent attention"):
        make_blueprint(options, spec, layout, jax.devices()[:1] * 2)


RUN = """
import json, sys
from jaxkv import LLM, BeamSearchParams, SamplingParams
from jaxkv.ops.attention import xla
from jaxkv.testing import engine_of, model_of

xla.LEAST_QUERIES = 12
path, kv_dtype, policy, *sizes = sys.argv[1:]
greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
prompts = [{"prompt_token_ids": list(range(3, 3 + n))} for n in (70, 9, 41)]
found = []
for size in map(int, sizes):
    llm = LLM(path, dtype="float32", kv_cache_dtype=kv_dtype, tensor_parallel_size=size, max_num_seqs=2,
              skip_tokenizer_init=True, lazy_compile=True, block_size=8, max_num_batched_tokens=16,
              num_gpu_blocks_override=32, max_model_len=96,
              **({"kv_policy": policy, "kv_budget": 64} if policy else {}))
    outputs = [llm.generate(prompts, greedy, use_tqdm=False) for _ in range(2)]
    beams = [] if policy else llm.beam_search(prompts[:1], BeamSearchParams(beam_width=2, max_tokens=6))
    engine_of(llm).check()
    pages = engine_of(llm).kv.stores[0].pages
    k_up = model_of(llm).weights["layers_1"]["k_up"]
    found.append({
        "tokens": [output.outputs[0].token_ids for some in outputs for output in some],
        "beams": [beam.tokens for output in beams for beam in output.sequences],
        "pages": [shard.data.nbytes == pages.nbytes for shard in pages.addressable_shards],
        "heads": [shard.data.shape[1] for shard in k_up.addressable_shards],
    })
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kv_dtype", "policy"), [("auto", ""), ("int8", ""), ("auto", "h2o_page")])
def test_every_number_of_devices_gives_the_same_tokens(checkpoint, kv_dtype, policy):
    """Each has its heads and experts' parts, and all rows."""
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    done = subprocess.run(
        [sys.executable, "-c", RUN, checkpoint, kv_dtype, policy, "1", "2", "4"],
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    one, *others = json.loads(done.stdout)
    for size, other in zip((2, 4), others, strict=True):
        assert (other["tokens"], other["beams"]) == (one["tokens"], one["beams"])
        assert other["pages"] == [True] * size
        assert other["heads"] == [4 // size] * size
