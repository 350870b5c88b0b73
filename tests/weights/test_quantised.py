"""A quantised checkpoint loads as the one whose weights are the values that its bits stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxkv import LLM, SamplingParams
from jaxkv.errors import CheckpointError
from jaxkv.models.families import read_config, read_family
from jaxkv.testing import model_of
from jaxkv.weights.load import load_weights
from jaxkv.weights.orbax import convert, load_converted
from jaxkv.weights.packing import (
    DYNAMIC,
    METHODS,
    SCALES,
    ZEROS,
    base_name,
    from_pairs,
    num_bytes,
    packing_for,
    quantise,
)
from tiers import some
from tiny import SMALL, make_checkpoint, tiny_config

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
GROUP = 16

Stored = tuple[dict[str, np.ndarray], np.ndarray]
"""Tensors by their last name, and the weight that they stand for."""


def words(values: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Packs along the last axis, one value after the other."""
    per_word = 32 // bits
    packed = np.zeros((values.shape[0], values.shape[1] // per_word), np.uint32)
    for column in range(values.shape[1]):
        place = column % per_word if order is None else order[column % per_word]
        field = values[:, column].astype(np.uint32) << np.uint32(place * bits)
        packed[:, column // per_word] |= field
    return packed.view(np.int32)


def fp8_blocks(rng: np.random.Generator, shape: tuple[int, int]) -> Stored:
    out, width = shape
    values = rng.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(0.01, 0.1, (-(-out // 40), -(-width // 24))).astype(np.float32)
    want = np.zeros(shape, np.float32)
    for i in range(out):
        for j in range(width):
            want[i, j] = np.float32(values[i, j]) * scale[i // 40, j // 24]
    return {"weight": values, "weight_scale_inv": scale}, want


def int8_rows(rng: np.random.Generator, shape: tuple[int, int]) -> Stored:
    values = rng.integers(-128, 128, shape).astype(np.int8)
    scale = rng.uniform(1e-4, 1e-3, (shape[0], 1)).astype(np.float32)
    return {"weight": values, "weight_scale": scale}, values.astype(np.float32) * scale


def packed(rng: np.random.Generator, shape: tuple[int, int]) -> Stored:
    values = rng.integers(0, 16, shape)
    scale = rng.uniform(0.01, 0.1, (shape[0], shape[1] // GROUP)).astype(np.float32)
    want = (values - 8).astype(np.float32) * scale.repeat(GROUP, axis=1)
    size = np.array(shape, np.int64)
    return {"weight_packed": words(values, 4), "weight_scale": scale, "weight_shape": size}, want


def gptq(rng: np.random.Generator, shape: tuple[int, int], *, reorder: bool = False) -> Stored:
    out, width = shape
    values, group = rng.integers(0, 16, shape), np.arange(width) // GROUP
    if reorder:
        group = rng.permutation(group)
    zero = rng.integers(0, 15, (width // GROUP, out))
    scale = rng.uniform(0.01, 0.1, zero.shape).astype(np.float32)
    want = np.zeros(shape, np.float32)
    for j in range(width):
        want[:, j] = (values[:, j] - (zero[group[j]] + 1)) * scale[group[j]]
    parts = {"qweight": words(values, 4).T.copy(), "qzeros": words(zero, 4), "scales": scale}
    return parts | {"g_idx": group.astype(np.int32)}, want


def awq(rng: np.random.Generator, shape: tuple[int, int]) -> Stored:
    out, width = shape
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    values, zero = rng.integers(0, 16, (width, out)), rng.integers(0, 16, (width // GROUP, out))
    scale = rng.uniform(0.01, 0.1, zero.shape).astype(np.float32)
    want = (values - zero.repeat(GROUP, axis=0)).astype(np.float32) * scale.repeat(GROUP, axis=0)
    parts = {"qweight": words(values, 4, order), "qzeros": words(zero, 4, order), "scales": scale}
    return parts, want.T


def compressed(form: str, **weights: object) -> dict:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


FP8 = {"quant_method": "fp8", "weight_block_size": [40, 24]}
CASES: dict[str, tuple[dict, Callable[..., Stored]]] = {
    "fp8": (FP8, fp8_blocks),
    "int8": (compressed("int-quantized", num_bits=8, strategy="channel"), int8_rows),
    "packed": (compressed("pack-quantized", num_bits=4, group_size=GROUP), packed),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, gptq),
    "gptq-act-order": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
        lambda rng, shape: gptq(rng, shape, reorder=True),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
}


def quantised(tmp_path: Path, case: str) -> tuple[Path, Path]:
    """Makes the directories of a checkpoint with quantised layers and of what it stands for."""
    about, quantise = CASES[case]
    config, rng = tiny_config("qwen2", **SIZES), np.random.default_rng(0)
    plain = make_checkpoint(tmp_path / "plain", config)
    tensors = load_file(plain / "model.safetensors")
    stored = {}
    for name in sorted(tensors):
        if "_proj.weight" in name:
            parts, tensors[name] = quantise(rng, tensors[name].shape)
            module = name.removesuffix(".weight")
            stored |= {f"{module}.{last}": np.ascontiguousarray(x) for last, x in parts.items()}
        else:
            stored[name] = tensors[name]
    save_file(
        {name: np.ascontiguousarray(x) for name, x in tensors.items()}, plain / "model.safetensors"
    )
    small = tmp_path / "small"
    small.mkdir()
    save_file(stored, small / "model.safetensors")
    (small / "config.json").write_text(json.dumps(config | {"quantization_config": about}))
    return small, plain


def loaded(directory: Path, load: Callable[..., dict] = load_weights, **options: object) -> dict:
    """The weight tree, in which quantised matrices are what they stand for."""
    spec, layout = read_family(read_config(directory))
    weights = load(directory, spec, layout, dtype="float32", **options)
    return {
        name: meant(leaf) if isinstance(leaf, dict) else np.asarray(leaf)
        for name, leaf in weights.items()
    }


def meant(stack: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    found = {}
    for name in {base_name(name) for name in stack}:
        x = np.asarray(stack[name])
        if x.ndim == 4:
            scales = np.asarray(stack.get(name + SCALES, stack.get(name + DYNAMIC)))[..., None]
            values = (from_pairs(x) if x.dtype == np.uint8 else x).astype(np.float32)
            if name + ZEROS in stack:
                values -= np.asarray(stack[name + ZEROS], np.float32)[..., None]
            values = (values * scales.astype(np.float32)).swapaxes(1, 2)
            x = values.reshape(*values.shape[:2], -1)
        found[name] = x
    return found


def packed_names(directory: Path) -> set[str]:
    spec, layout = read_family(read_config(directory))
    layers = load_weights(directory, spec, layout, dtype="float32")["layers"]
    return {name for name, x in layers.items() if x.ndim == 4}


MATRICES = {"q", "k", "v", "o", "gate", "up", "down"}
STAY = {"fp8": {"down"}, "gptq-act-order": set()}
"""Which matrices stay packed where not all do: 64 columns are no whole blocks of 24."""


@pytest.mark.parametrize("case", CASES)
def test_weights_are_what_the_stored_bits_stand_for(tmp_path, case):
    small, plain = quantised(tmp_path, case)
    jax.tree.map(np.testing.assert_array_equal, loaded(small), loaded(plain))
    assert packed_names(small) == STAY.get(case, MATRICES)
    convert(small, tmp_path / "converted", dtype="float32")
    again = loaded(tmp_path / "converted", load_converted)
    jax.tree.map(np.testing.assert_array_equal, again, loaded(plain))


def mxfp4(tmp_path: Path) -> tuple[Path, Path]:
    """Directories of a gpt-oss whose experts are stored in pairs of 4 bits, and of what they
    mean.
    """
    config = tiny_config("llama") | {"hidden_size": 64, "intermediate_size": 32}
    config |= {"model_type": "gpt_oss", "num_local_experts": 3, "num_experts_per_tok": 2}
    plain, rng = make_checkpoint(tmp_path / "plain", config), np.random.default_rng(0)
    tensors = load_file(plain / "model.safetensors")
    stored, meaning = {}, [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    for name in sorted(tensors):
        if not name.endswith("_proj") or ".experts." not in name:
            stored[name] = tensors[name]
            continue
        experts, inner, outer = tensors[name].shape
        bits = rng.integers(0, 16, (experts, outer, inner))
        scales = rng.integers(117, 124, (experts, outer, inner // 32))
        want = np.zeros(tensors[name].shape, np.float32)
        for e, o, i in np.ndindex(*bits.shape):
            value = meaning[bits[e, o, i] % 8] * (-1 if bits[e, o, i] >= 8 else 1)
            want[e, i, o] = value * 2.0 ** (int(scales[e, o, i // 32]) - 127)
        tensors[name] = want
        pairs = bits.reshape(experts, outer, inner // 32, 16, 2)
        stored[f"{name}_blocks"] = (pairs[..., 0] + 16 * pairs[..., 1]).astype(np.uint8)
        stored[f"{name}_scales"] = scales.astype(np.uint8)
    save_file(tensors, plain / "model.safetensors")
    small = tmp_path / "small"
    small.mkdir()
    save_file(stored, small / "model.safetensors")
    about = {"quantization_config": {"quant_method": "mxfp4"}}
    (small / "config.json").write_text(json.dumps(config | about))
    return small, plain


def test_experts_in_mxfp4_are_what_their_bits_stand_for(tmp_path):
    small, plain = mxfp4(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, loaded(small), loaded(plain))
    tensors = load_file(small / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    tensors[f"{name}_scales"] = tensors[f"{name}_scales"][:, :-1].copy()
    save_file(tensors, small / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=rf"{name}: expected uint8 blocks .* got blocks uint8"
    ):
        loaded(small)


def logprobs(llm: LLM) -> np.ndarray:
    """Of 24 tokens of a prompt and 4 more, each over the whole vocabulary."""
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=-1, prompt_logprobs=-1)
    prompt = {"prompt_token_ids": [(7 * i) % 97 for i in range(24)]}
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    return np.array([[entry[token].logprob for token in sorted(entry)] for entry in entries])


def make(directory: Path, **options: object) -> LLM:
    return LLM(directory, **SMALL | {"max_logprobs": -1} | options)


def kept_bytes(llm: LLM) -> int:
    """Of what stays quantised, on the device."""
    stack = model_of(llm).weights["layers"]
    kept = {name for name in stack if base_name(name) != name or stack[name].ndim == 4}
    return sum(num_bytes(stack[name].shape, stack[name].dtype) for name in kept)


@pytest.mark.parametrize("case", some(CASES, "awq", "int8"))
def test_a_model_computes_what_its_dequantised_weights_do(tmp_path, case):
    small, plain = quantised(tmp_path, case)
    llm = make(small)
    want = logprobs(make(plain))
    np.testing.assert_allclose(logprobs(llm), want, rtol=0, atol=2e-4 * want.std())
    if case in ("awq", "int8"):
        parts = load_file(small / "model.safetensors")
        stored = sum(
            x.nbytes for name, x in parts.items() if "_proj" in name and "bias" not in name
        )
        assert kept_bytes(llm) == pytest.approx(stored, rel=0.05)


@pytest.mark.parametrize("method", some(METHODS, "int4", "int8_dynamic"))
def test_weights_are_quantised_as_asked(tmp_path, method):
    """The model computes with the values that are nearest to its own among those it may have."""
    config = tiny_config("qwen2", **SIZES)
    source = make_checkpoint(tmp_path / "model", config)
    llm = make(source, quantization=method)
    weights, own = meant(model_of(llm).weights["layers"]), loaded(source)["layers"]
    tensors = load_file(source / "model.safetensors")
    modules = {name: f"self_attn.{name}_proj" for name in "qkvo"}
    modules |= {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    for name, module in modules.items():
        most = {"int4": 0.3, "fp8": 1 / 16}.get(method, 0.51 / 127)  # 4 bits may cut off 0.3
        bound = most * np.abs(own[name]).max(axis=2, keepdims=True)
        assert (np.abs(weights[name] - own[name]) <= bound).all(), name
        assert (weights[name] != own[name]).any()
        for layer, x in enumerate(weights[name]):
            tensors[f"model.layers.{layer}.{module}.weight"] = np.ascontiguousarray(x)
    save_file(tensors, source / "model.safetensors")
    want, got = logprobs(make(source)), logprobs(llm)
    if method == "int8_dynamic":  # activations are quantised too
        assert 1e-3 < np.abs(got - want).mean() / want.std() < 0.1
    else:
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-4 * want.std())


def test_four_bits_cut_off_what_costs_less_than_it_spares():
    w = np.random.default_rng(0).standard_t(3, size=(64, 256)).astype(np.float32)
    made = quantise(w, packing_for("int4", 256))
    got = made[""].astype(np.float32) * made[SCALES][..., None]
    groups = w.reshape(64, 2, 128).swapaxes(0, 1)
    scale = np.abs(groups).max(axis=2, keepdims=True) / 7
    plain = np.rint(groups / scale) * scale
    error, before = (np.square(x - groups).sum(axis=2) for x in (got, plain))
    assert (error <= before * (1 + 1e-6)).all()
    assert error.sum() < 0.9 * before.sum()


def test_a_matrix_that_four_bits_have_no_groups_for_is_refused(tmp_path):
    config = tiny_config("qwen2", **SIZES | {"intermediate_size": 84})
    with pytest.raises(ValueError, match="multiple of 8 for int4, got 84 columns on 1 devices"):
        make(make_checkpoint(tmp_path / "model", config), quantization="int4")


def test_what_is_stored_quantised_is_not_quantised_again(tmp_path):
    small, _ = quantised(tmp_path, "awq")
    with pytest.raises(ValueError, match=r"quantization: expected None .*\(awq\), got 'int8'"):
        make(small, quantization="int8")
    assert "stored as awq" in make(small, quantization="awq").describe()
    with pytest.raises(ValueError, match=r"one of int8, int4, int8_dynamic, fp8 .*, got 'awq'"):
        make(tmp_path / "plain", quantization="awq")


@pytest.mark.parametrize("size", [[64.0, 96.0], [64], [-64, 96], [[96, 64]]])
def test_a_shape_that_is_none_is_named(tmp_path, size):
    small, _ = quantised(tmp_path, "packed")
    tensors = load_file(small / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight_shape"
    save_file(tensors | {name: np.array(size)}, small / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name}: expected two whole numbers"):
        loaded(small)


def test_biases_of_zeros_that_the_model_has_not_are_left_out(tmp_path):
    """Older GPTQ files have one for every layer."""
    small, plain = quantised(tmp_path, "gptq")
    tensors, name = load_file(small / "model.safetensors"), "model.layers.1.mlp.down_proj.bias"
    save_file(tensors | {name: np.zeros(64, np.float16)}, small / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, loaded(small), loaded(plain))
    save_file(tensors | {name: np.ones(64, np.float16)}, small / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"does not use: {name}"):
        loaded(small)


def test_scales_of_activations_and_of_a_cache_are_left_out(tmp_path):
    small, plain = quantised(tmp_path, "int8")
    tensors, layer = load_file(small / "model.safetensors"), "model.layers.1.self_attn."
    for name in ("k_scale", "q_proj.input_scale"):
        tensors[layer + name] = np.ones(1, np.float32)
    save_file(tensors, small / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, loaded(small), loaded(plain))


def test_an_engine_says_what_stays_quantised(tmp_path):
    small, _ = quantised(tmp_path, "gptq")
    text = LLM(small, **SMALL).describe()
    assert "MiB of them quantised: q, k, v, o, gate, up, down in int4 by 16; stored as gptq" in text


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method: expected one of awq"),
        ({"quant_method": "gptq", "bits": 3}, "bits: expected 4 or 8, got 3"),
        ({"quant_method": "awq", "bits": 4, "version": "marlin"}, "version: expected one of"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "expected two whole numbers"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups"),
        (compressed("nvfp4-pack-quantized", num_bits=4), "format: expected one of"),
        (compressed("float-quantized", num_bits=4), "num_bits: expected 8"),
        ("fp8", "quantization_config: expected an object"),
    ],
)
def test_what_is_not_built_is_refused_by_name(tmp_path, about, message):
    (tmp_path / "config.json").write_text(
        json.dumps(tiny_config("qwen2") | {"quantization_config": about})
    )
    with pytest.raises(CheckpointError, match=message):
        read_family(read_config(tmp_path))


@pytest.mark.parametrize(
    ("case", "last", "change"),
    [
        ("int8", "weight_scale", lambda x: x[:-1]),
        ("packed", "weight_scale", lambda x: x[:, :-1]),
        ("packed", "weight_packed", lambda x: x[:, :-1]),
        ("gptq", "qzeros", lambda x: x[:-1]),
        ("gptq", "g_idx", lambda x: x + 99),
        ("gptq", "qweight", lambda x: x.astype(np.int16)),
        ("awq", "scales", lambda x: x[:, :-1]),
        ("awq", "qzeros", None),
    ],
)
def test_parts_that_do_not_fit_together_are_named(tmp_path, case, last, change):
    small, _ = quantised(tmp_path, case)
    tensors = load_file(small / "model.safetensors")
    name = f"model.layers.0.mlp.up_proj.{last}"
    part = tensors.pop(name)
    if change is not None:
        tensors[name] = np.ascontiguousarray(change(part))
    save_file(tensors, small / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.up_proj\.weight: expected"):
        loaded(small)
