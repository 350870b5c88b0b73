"""Gated DeltaNet: its heads are divided over devices, and configs that cannot be are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import pytest

from jaxkv.errors import CheckpointError
from jaxkv.models.families import ConfigReader, read_family
from jaxkv.placement import place
from tiny import BASE, make_checkpoint

CONFIG = BASE | {
    "model_type": "qwen3_next",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "tie_word_embeddings": False,
}
KIMI = CONFIG | {
    "model_type": "kimi_linear",
    "num_experts_per_token": 2,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
}

# In a process of its own: how many devices a CPU has is fixed when JAX starts.
RUN = """
import json, sys
import numpy as np
from jaxkv import LLM, SamplingParams
from jaxkv.testing import engine_of
greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
rng = np.random.default_rng(0)
prompts = [{"prompt_token_ids": rng.integers(3, 150, n).tolist()} for n in (1, 40, 17)]
def run(size):
    llm = LLM(sys.argv[1], dtype="float32", tensor_parallel_size=size, skip_tokenizer_init=True, lazy_compile=True,
              max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64, block_size=8)
    outputs = llm.generate(prompts, greedy, use_tqdm=False)
    states = [array for arrays in engine_of(llm).kv.states for array in arrays]
    return {"tokens": [output.outputs[0].token_ids for output in outputs],
            "parts": [[shard.data.shape[1] for shard in array.addressable_shards] for array in states]}
print(json.dumps([run(1), run(2)]))
"""


@pytest.mark.slow
def test_two_devices_with_half_of_the_heads_give_the_same_tokens(tmp_path):
    path = make_checkpoint(tmp_path / "model", CONFIG)
    flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    env = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}"}
    command = [sys.executable, "-c", RUN, str(path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    one, two = json.loads(done.stdout)
    assert one["tokens"] == two["tokens"]
    # Channels of queries, keys and values, and key heads with their matrices.
    assert (one["parts"], two["parts"]) == ([[80], [2]], [[40, 40], [1, 1]])


def test_key_heads_that_devices_cannot_divide_are_refused():
    config = CONFIG | {"num_attention_heads": 8, "num_key_value_heads": 4}
    spec, layout = read_family(ConfigReader(config, "config.json"))
    with pytest.raises(ValueError, match="expected a divisor of the model's 2 recurrent"):
        place(spec, layout, jax.devices()[:1] * 4, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_value_heads": 3}, "linear_num_value_heads: expected a multiple of"),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads: expected a whole number from 1"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim: expected a whole number from 2"),
        ({"linear_conv_kernel_dim": 2**20}, "linear_conv_kernel_dim: expected a whole number"),
        ({"layer_types": ["mamba"] * 4}, "layer_types: expected a list of 4 out of"),
        ({"full_attention_interval": -1}, "full_attention_interval: expected a whole number"),
        ({"hidden_act": "gelu"}, "hidden_act: expected"),  # it would be the convolution's too
    ],
)
def test_a_config_that_cannot_be_is_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        read_family(ConfigReader(CONFIG | changes, "config.json"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"linear_attn_config": {"kda_layers": [0]}},
            "kda_layers: expected a list of whole numbers from 1",
        ),
        ({"linear_attn_config": {"num_heads": True}}, "num_heads: expected a whole number"),
        ({"linear_attn_config": 3}, "linear_attn_config: expected an object"),
        ({"mla_use_nope": False}, "mla_use_nope: expected True"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types: expected a list of 4"),
    ],
)
def test_a_config_of_kimi_linear_that_cannot_be_is_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        read_family(ConfigReader(KIMI | changes, "config.json"))


def test_published_configs_of_kimi_linear_count_layers_from_one():
    own = {"kda_layers": [1, 2, 4], "full_attn_layers": [3], "num_heads": 2, "head_dim": 8}
    spec, _ = read_family(ConfigReader(KIMI | {"linear_attn_config": own}, "config.json"))
    assert spec.states[0].layers == (0, 1, 3)
    assert spec.groups[0].layers == (2,)
