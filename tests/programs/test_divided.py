"""Devices that divide the tokens of latent attention's pages, or experts: results are those of one
device, and each has its part of the cache and of the weights.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import pytest

from families import VARIANTS, text_config
from jaxkv.build.blueprint import make_blueprint
from jaxkv.build.model import find_model
from jaxkv.build.options import EngineOptions
from tiers import some
from tiny import SMALL, make_checkpoint, tiny_config

RUN = """
import json, sys
import numpy as np
from jaxkv import LLM, SamplingParams
from jaxkv.ops.attention import xla
from jaxkv.testing import blueprint_of, engine_of, model_of

xla.LEAST_QUERIES = 20  # chunks of prompts in both forms
path, folder, asked = sys.argv[1:]
greedy = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=1)
drawn = SamplingParams(seed=3, top_p=0.9, n=2, max_tokens=10, ignore_eos=True, logprobs=0)
prompts = [{"prompt_token_ids": np.random.default_rng(n).integers(3, 150, n).tolist()} for n in (5, 42, 17)]

def scored(outputs):
    entries = [entry for one in outputs for own in one.outputs for entry in own.logprobs]
    return [value.logprob for entry in entries for value in entry.values()]

def run(size, **divided):
    llm = LLM(path, dtype="float32", tensor_parallel_size=size, **divided, skip_tokenizer_init=True,
              lazy_compile=True, max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64, block_size=8, num_gpu_blocks_override=40)
    outputs = llm.generate(prompts, [greedy, drawn, greedy], use_tqdm=False)
    again = llm.generate(prompts[1:], greedy, use_tqdm=False)
    llm.session(prompts[1]).save(f"{folder}/{size}")
    # Recurrent states lie as devices divide them.
    restored = [llm.restore(f"{folder}/{size if engine_of(llm).kv.states else 1}").generate(greedy)[1]]
    engine_of(llm).check()
    kv, stacks = engine_of(llm).kv, [x for x in model_of(llm).weights.values() if isinstance(x, dict)]
    return {
        "tokens": [own.token_ids for one in outputs + again for own in one.outputs] + [one.token_ids for one in restored],
        "cached": [one.num_cached_tokens for one in again],
        "logprobs": scored(outputs),
        "bytes": [sum(s.data.nbytes for x in kv.pools for s in x.addressable_shards if s.device.id == i) for i in range(size)],
        "counted": blueprint_of(llm).page_nbytes * 40,
        "of all": kv.nbytes,
        "experts": [x.data.shape[1] for own in stacks if "expert_up" in own for x in own["expert_up"].addressable_shards],
        "weights": model_of(llm).weight_bytes == blueprint_of(llm).weight_bytes,
        "described": llm.describe(),
    }

asked = json.loads(asked)
method = asked.pop("quantization", None)
print(json.dumps([run(1, quantization=method), run(2, quantization=method, **asked)]))
"""


TOKENS, EXPERTS = {"decode_context_parallel_size": 2}, {"enable_expert_parallel": True}
DIVIDED = [
    ("deepseek_v3", TOKENS | EXPERTS),
    ("kimi_linear", TOKENS | EXPERTS),
    ("gpt_oss", EXPERTS),  # biases
    ("muse_spark_text", EXPERTS),  # a norm of what each expert gives
    ("deepseek_v3", EXPERTS | {"quantization": "int8"}),
]


@pytest.mark.parametrize(("variant", "asked"), some(DIVIDED, DIVIDED[0]))
def test_two_devices_give_the_results_of_one_and_have_half_of_it(tmp_path, variant, asked):
    config = (text_config if variant in VARIANTS else tiny_config)(variant)
    path = make_checkpoint(tmp_path / "model", config)
    flags = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2 "
        f"--xla_backend_optimization_level=0"
    )
    done = subprocess.run(
        [sys.executable, "-c", RUN, path, tmp_path, json.dumps(asked)],
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
        timeout=290,
    )
    assert done.returncode == 0, done.stderr
    one, two = json.loads(done.stdout)
    assert two["tokens"] == one["tokens"]
    assert two["cached"] == one["cached"]
    assert any(one["cached"])
    assert two["logprobs"] == pytest.approx(one["logprobs"], abs=1e-4)
    assert two["experts"] == [count // 2 for count in one["experts"] for _ in range(2)] != []
    assert one["weights"]
    assert two["weights"]
    assert two["of all"] == one["of all"]
    assert "devices divide" not in one["described"]
    assert ("2 devices divide each page's tokens" in two["described"]) == (
        TOKENS.items() <= asked.items()
    )
    if (variant, asked) == DIVIDED[0]:  # without states
        assert one["bytes"] == [one["of all"]] == [one["counted"]]
        assert two["bytes"] == [two["of all"] // 2] * 2 == [two["counted"]] * 2


@pytest.mark.parametrize(
    ("variant", "asked", "error"),
    [
        (
            "deepseek_v3",
            {"decode_context_parallel_size": 3},
            "a divisor of 4, got 3: so many of 4 devices have",
        ),
        ("deepseek_v3", {"decode_context_parallel_size": True}, "a divisor of 4, got True"),
        (
            "deepseek_v3",
            {"tensor_parallel_size": 1},
            "expected 1, got 4, with tensor_parallel_size 1",
        ),
        (
            "deepseek_v3",
            {"tensor_parallel_size": 16, "decode_context_parallel_size": 16, "block_size": 8},
            "16, got 8",
        ),
        (
            "llama",
            {"tensor_parallel_size": 6, "decode_context_parallel_size": 3},
            "decode_context_parallel_size: expected a power of 2, .*, got 3",
        ),
        (
            "glm5_next_text",
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "block_size": 8},
            "2 x the 8 tokens that are chosen together, got 8",
        ),
        ("deepseek_v3", {"kv_policy": "streaming", "kv_budget": 64}, "expected full with decode"),
        (
            "mixtral",
            {"enable_expert_parallel": True, "decode_context_parallel_size": 1},
            "a divisor of the model's 6 experts, got 4",
        ),
        (
            "llama",
            {"enable_expert_parallel": True, "decode_context_parallel_size": 1},
            "enable_expert_parallel: expected False for a model without experts",
        ),
        (
            "llama",
            {},
            "expected a divisor of 2, got 4: so many of 4 devices have the same KV heads",
        ),
        ("mamba", {}, "expected 1, got 4, for a model without attention"),
        ("deepseek_v4", {}, "expected 1, got 4, for a model that makes one entry"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(tmp_path, variant, asked, error):
    config = (text_config if variant in VARIANTS else tiny_config)(variant)
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4)
    sizes = dict.fromkeys((*heads, "intermediate_size", "moe_intermediate_size"), 16)
    pool, width = {"index_kpool": 8}, {"intermediate_size": 96}
    changes = {
        "deepseek_v3": sizes,
        "glm5_next_text": pool,
        "llama": width,
        "mixtral": heads,
    }
    path = make_checkpoint(tmp_path, config | changes.get(variant, {}))
    given = {"tensor_parallel_size": 4, "decode_context_parallel_size": 4} | asked
    options = EngineOptions(path, **SMALL | given)
    model = find_model(options)
    with pytest.raises((ValueError, NotImplementedError), match=error):
        make_blueprint(options, model.spec, model.layout, jax.devices()[:1] * 16)
