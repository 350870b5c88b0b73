"""Experts that a checkpoint stores quantised stay so on the device, and are what their bits stand
for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import families
from jaxkv.errors import CheckpointError
from jaxkv.testing import model_of
from jaxkv.weights.orbax import convert, load_converted
from jaxkv.weights.packing import METHODS
from quantised import (
    CASES,
    SIZES,
    check_equal,
    check_planned,
    fp8_blocks,
    kept_bytes,
    loaded,
    logprobs,
    make,
    meant,
    mxfp4,
    mxfp4_pack,
    packed_leaves,
    packed_names,
    quantised,
    stored_bytes,
    tensors_of,
    written,
)
from tiers import some
from tiny import make_checkpoint, tiny_config

pytestmark = pytest.mark.usefixtures("quick_compile", "one_loop")

EXPERTS = {"expert_gate", "expert_up", "expert_down"}
QWEN = tiny_config("llama", **SIZES) | {"model_type": "qwen3_moe", "num_experts": 3}
QWEN |= {"num_experts_per_tok": 2, "moe_intermediate_size": 96}
GRANITE = tiny_config("llama", **SIZES) | {"model_type": "granitemoe", "num_local_experts": 3}
GRANITE |= {"num_experts_per_tok": 2}
GPT_OSS = tiny_config("llama", **SIZES) | {"model_type": "gpt_oss", "num_local_experts": 3}
GPT_OSS |= {"num_experts_per_tok": 2, "intermediate_size": 80}
STAY = {"fp8": {"expert_down"}, "gptq-act-order": set()}
STAY |= {case: {"expert_gate", "expert_up"} for case in ("nf4", "nf4-simple")}
"""Which experts stay packed where not all do: 64 columns are no whole blocks of 24, 96 none of
64.
"""


@pytest.mark.parametrize("case", some(CASES, "fp8", "packed", "nvfp4"))
def test_experts_of_a_tensor_each_stay_packed(tmp_path, case):
    small, plain = quantised(tmp_path, case, QWEN)
    check_equal(loaded(small), loaded(plain))
    assert packed_names(small) & EXPERTS == STAY.get(case, EXPERTS)


def fp8_fused(tmp_path: Path, config: dict, names: tuple[str, str]) -> tuple[Path, Path]:
    """Directories of a model whose experts are in two tensors of fp8 by blocks [40, 24], and of
    what they stand for.
    """
    plain, rng = make_checkpoint(tmp_path / "plain", config), np.random.default_rng(0)
    tensors = tensors_of(plain)
    stored = dict(tensors)
    for name in tensors:
        if name.endswith(names):
            made = [fp8_blocks(rng, x.shape) for x in tensors[name]]
            tensors[name] = np.stack([want for _, want in made])
            stored[name] = np.stack([parts["weight"] for parts, _ in made])
            stored[f"{name}_scale_inv"] = np.stack([p["weight_scale_inv"] for p, _ in made])
    about = {"quant_method": "fp8", "weight_block_size": [40, 24]}
    about["modules_to_not_convert"] = ["self_attn"]
    save_file(tensors, plain / "model.safetensors")
    return written(tmp_path / "small", stored, config | {"quantization_config": about}), plain


FUSED = {
    # [E, out, in]: blocks of 24 columns divide the 96 of the way down.
    "granitemoe": (GRANITE, ("input_linear.weight", "output_linear.weight"), {"expert_down"}),
    # [E, in, out]: blocks of 40 rows divide the 80 of the way down.
    "gpt_oss": (GPT_OSS, ("gate_up_proj", "down_proj"), {"expert_down"}),
}


def fp8_with_fp4(tmp_path: Path) -> tuple[Path, Path]:
    """Directories of a model as DeepSeek V4 is published, experts of 4 bits beside weights of 8, and
    of what they stand for. All scales are powers of two, under a name of their own.
    """
    config = families.text_config("deepseek_v4") | {"hidden_size": 64, "moe_intermediate_size": 32}
    config |= {"q_lora_rank": 32, "o_lora_rank": 32, "head_dim": 32, "index_head_dim": 32}
    kinds = {"layer_types": config["layer_types"][1:3], "mlp_layer_types": ["hash_moe", "moe"]}
    config |= kinds | {"num_hidden_layers": 2}
    plain, rng = make_checkpoint(tmp_path / "plain", config), np.random.default_rng(0)
    tensors, e8m0 = tensors_of(plain), np.dtype(ml_dtypes.float8_e8m0fnu)
    stored = dict(tensors)
    for name, x in tensors.items():
        if ".ffn.experts." in name:
            parts, want = mxfp4_pack(rng, x.shape)
            value, scale = parts["weight_packed"].view(np.int8), parts["weight_scale"].view(e8m0)
        elif any(part in name for part in (".attn.w", ".wq_b.", ".shared_experts.")):
            value = rng.normal(size=x.shape).astype(ml_dtypes.float8_e4m3fn)
            shape = (-(-x.shape[0] // 16), -(-x.shape[1] // 32))
            scale = rng.integers(120, 124, shape).astype(np.uint8).view(e8m0)
            of_each = scale.astype(np.float32).repeat(16, axis=0).repeat(32, axis=1)
            want = value.astype(np.float32) * of_each[: x.shape[0], : x.shape[1]]
        else:
            continue
        tensors[name], stored[name] = want, value
        stored[f"{name.removesuffix('weight')}scale"] = scale
    save_file(tensors, plain / "model.safetensors")
    about = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [16, 32]}
    config |= {"quantization_config": about, "expert_dtype": "fp4"}
    return written(tmp_path / "small", stored, config), plain


def test_experts_of_4_bits_stand_beside_weights_of_8(tmp_path):
    small, plain = fp8_with_fp4(tmp_path)
    check_equal(loaded(small), loaded(plain))
    assert packed_names(small) >= EXPERTS
    check_planned(small)
    assert "stored as fp8 (experts: fp4)" in make(small).describe()


@pytest.mark.slow
def test_a_model_with_experts_of_4_bits_computes_what_its_dequantised_weights_do(tmp_path):
    small, want = (logprobs(make(directory)) for directory in fp8_with_fp4(tmp_path))
    np.testing.assert_allclose(small, want, rtol=0, atol=2e-4 * want.std())


@pytest.mark.parametrize("family", FUSED)
def test_experts_of_one_tensor_in_fp8_stay_packed(tmp_path, family):
    config, names, packed = FUSED[family]
    small, plain = fp8_fused(tmp_path, config, names)
    check_equal(loaded(small), loaded(plain))
    assert packed_names(small) == packed
    check_planned(small)


def test_experts_of_gpt_oss_stay_packed(tmp_path):
    small, plain = mxfp4(tmp_path)
    check_equal(loaded(small), loaded(plain))
    check_planned(small)
    convert(small, tmp_path / "converted", dtype="float32")
    check_equal(loaded(tmp_path / "converted", load_converted), loaded(plain))
    for directory in (small, tmp_path / "converted"):
        llm = make(directory)
        assert kept_bytes(llm) == pytest.approx(stored_bytes(small, "experts"), rel=0.05)
        assert (
            "quantised: expert_gate, expert_up, expert_down in codes of 4 bits by 32; "
            "stored as mxfp4"
        ) in llm.describe()
    want = logprobs(make(plain))
    np.testing.assert_allclose(logprobs(llm), want, rtol=0, atol=2e-4 * want.std())


@pytest.mark.parametrize(
    ("last", "change", "message"),
    [
        ("scales", lambda x: x[:, :-1], "they make|scales of its"),
        ("scales", lambda x: x[:-1], "parts of 3 experts"),
        ("scales", lambda x: x.astype(np.float32), "scales in float8_e8m0fnu"),
        ("scales", None, "'scales'"),
        ("scales", lambda x: np.full_like(x, 255), "expected finite values"),
        ("blocks", lambda x: x.astype(np.int16), "4 bits in uint8"),
        ("blocks", lambda x: x.reshape(*x.shape[:2], -1), "expected shape"),
        ("blocks", lambda x: x[:, :, :, :8], "expected shape"),
    ],
)
def test_experts_in_mxfp4_that_do_not_fit_are_named(tmp_path, last, change, message):
    small, _ = mxfp4(tmp_path)
    tensors, name = tensors_of(small), "model.layers.1.mlp.experts.down_proj"
    part = tensors.pop(f"{name}_{last}")
    if change is not None:
        tensors[f"{name}_{last}"] = np.ascontiguousarray(change(part))
    save_file(tensors, small / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name}.*({message})"):
        loaded(small)


@pytest.mark.parametrize("method", some(METHODS, "int4"))
@pytest.mark.parametrize("family", FUSED)
def test_experts_of_one_tensor_are_quantised_as_asked(tmp_path, family, method):
    config, *_ = FUSED[family]
    source = make_checkpoint(tmp_path / "model", config)
    llm = make(source, quantization=method)
    stack = meant(model_of(llm).weights["layers"])
    own = loaded(source)["layers"]
    assert packed_leaves(model_of(llm).weights["layers"]) > EXPERTS
    for name in EXPERTS:
        most = {"int4": 0.3, "fp8": 1 / 16}.get(method, 0.51 / 127)
        bound = most * np.abs(own[name]).max(axis=2, keepdims=True)
        assert (np.abs(stack[name] - own[name]) <= bound).all(), name
        assert (stack[name] != own[name]).any()


TWO = """
import json, sys
from jaxkv import LLM, SamplingParams
params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=5)
prompts = [{"prompt_token_ids": [(7 * i + n) % 97 for i in range(n)]} for n in (24, 7)]
found = []
for size in (1, 2):
    llm = LLM(sys.argv[1], tensor_parallel_size=size, dtype="float32", max_num_seqs=2, block_size=8,
              max_num_batched_tokens=32, max_model_len=64, skip_tokenizer_init=True,
              lazy_compile=True, num_gpu_blocks_override=32)
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    logprobs = [one.logprob for out in outputs for entry in out.logprobs for one in entry.values()]
    found.append([[out.token_ids for out in outputs], logprobs, llm.describe()])
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mxfp4", "nvfp4"])
def test_two_devices_with_packed_experts_give_the_tokens_of_one(tmp_path, case):
    """Each device has half of a group of 32 columns of gpt-oss's way down."""
    small, _ = mxfp4(tmp_path) if case == "mxfp4" else quantised(tmp_path, case, QWEN)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-c", TWO, small],
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (tokens, logprobs, _), (tokens_of_two, logprobs_of_two, text) = json.loads(done.stdout)
    assert tokens_of_two == tokens
    np.testing.assert_allclose(logprobs_of_two, logprobs, rtol=0, atol=1e-4)
    assert "expert_down in codes of 4 bits by 16" in text
