"""Quantised checkpoints made on the spot, with the weights that their bits stand for, computed
value by value.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxkv import LLM
from jaxkv.models.families import read_config, read_family
from jaxkv.placement import place
from jaxkv.testing import model_of
from jaxkv.weights.dummy import weight_shapes
from jaxkv.weights.load import Kept, load_weights
from jaxkv.weights.packing import (
    DYNAMIC,
    FACTOR,
    SCALES,
    TABLE,
    ZEROS,
    base_name,
    from_pairs,
    num_bytes,
)
from jaxkv.weights.safetensors import Checkpoint
from jaxkv.weights.tree import EXPERT
from parity import logits_of
from tiny import SMALL, make_checkpoint, tiny_config

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG = tiny_config("qwen2", **SIZES)
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


def fp8_rows(rng: np.random.Generator, shape: tuple[int, int]) -> Stored:
    values = rng.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(0.01, 0.1, (shape[0], 1)).astype(np.float32)
    parts = {"weight": values, "weight_scale": scale, "input_scale_ub": np.float32([1200])}
    return parts, values.astype(np.float32) * scale


def packed(rng: np.random.Generator, shape: tuple[int, int], *, has_zeros: bool = False) -> Stored:
    values = rng.integers(0, 16, shape)
    scale = rng.uniform(0.01, 0.1, (shape[0], shape[1] // GROUP)).astype(np.float32)
    zero = rng.integers(0, 16, scale.shape) if has_zeros else np.full(scale.shape, 8)
    want = (values - zero.repeat(GROUP, axis=1)).astype(np.float32) * scale.repeat(GROUP, axis=1)
    size = np.array(shape, np.int64)
    parts = {"weight_packed": words(values, 4), "weight_scale": scale, "weight_shape": size}
    # They are packed along the rows.
    return parts | ({"weight_zero_point": words(zero.T, 4).T} if has_zeros else {}), want


def gptq(rng: np.random.Generator, shape: tuple[int, int], *, reorder: bool = False) -> Stored:
    out, width = shape
    values, group = rng.integers(0, 16, shape), np.arange(width) // GROUP
    if reorder:
        group = rng.permutation(group)
    zero = rng.integers(0, 16, (width // GROUP, out))
    scale = rng.uniform(0.01, 0.1, zero.shape).astype(np.float32)
    want = np.zeros(shape, np.float32)
    for j in range(width):
        want[:, j] = (values[:, j] - zero[group[j]]) * scale[group[j]]
    # GPTQModel takes one from each zero point in a subtraction of whole words.
    less = (words(zero, 4).view(np.uint32) - np.uint32(0x11111111)).view(np.int32)
    parts = {"qweight": words(values, 4).T.copy(), "qzeros": less, "scales": scale}
    return parts | {"g_idx": group.astype(np.int32)}, want


def awq(rng: np.random.Generator, shape: tuple[int, int]) -> Stored:
    out, width = shape
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    values, zero = rng.integers(0, 16, (width, out)), rng.integers(0, 16, (width // GROUP, out))
    scale = rng.uniform(0.01, 0.1, zero.shape).astype(np.float32)
    want = (values - zero.repeat(GROUP, axis=0)).astype(np.float32) * scale.repeat(GROUP, axis=0)
    parts = {"qweight": words(values, 4, order), "qzeros": words(zero, 4, order), "scales": scale}
    return parts, want.T


FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FP4 += [-x for x in FP4]
NF4 = np.sort(np.random.default_rng(4).uniform(-1, 1, 16)).astype(np.float32)


def in_bytes(codes: np.ndarray) -> np.ndarray:
    """Packs pairs, the first in the lower half."""
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).astype(np.uint8)


def nvfp4(rng: np.random.Generator, shape: tuple[int, int], *, form: str = "ct") -> Stored:
    codes = rng.integers(0, 16, shape)
    scale = rng.uniform(1, 400, (shape[0], shape[1] // 16)).astype(ml_dtypes.float8_e4m3fn)
    factor = np.float32(rng.uniform(0.5e-3, 2e-3))
    want = np.array(FP4)[codes] * scale.astype(float).repeat(16, axis=1)
    if form == "modelopt":
        parts = {"weight": in_bytes(codes), "weight_scale": scale, "weight_scale_2": factor}
        parts["input_scale"] = np.float32(1)
        return parts, (want * float(factor)).astype(np.float32)
    parts = {"weight_packed": in_bytes(codes), "weight_scale": scale}
    parts["weight_global_scale"] = np.array([factor * 2**20], np.float32)
    parts["input_global_scale"] = np.ones(1, np.float32)
    return parts, (want / float(parts["weight_global_scale"][0])).astype(np.float32)


def mxfp4_pack(rng: np.random.Generator, shape: tuple[int, int]) -> Stored:
    codes = rng.integers(0, 16, shape)
    scale = rng.integers(117, 124, (shape[0], shape[1] // 32)).astype(np.uint8)
    want = np.array(FP4)[codes] * 2.0 ** (scale.repeat(32, axis=1) - 127.0)
    return {"weight_packed": in_bytes(codes), "weight_scale": scale}, want.astype(np.float32)


def nf4(rng: np.random.Generator, shape: tuple[int, int], *, nested: bool = True) -> Stored:
    codes = rng.integers(0, 16, shape)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": list(shape)}
    count = -(-codes.size // 64)
    largest = rng.uniform(0.02, 0.2, count).astype(np.float32)
    parts = {"quant_map": NF4, "absmax": largest}
    if nested:
        state |= {"nested_blocksize": 256, "nested_offset": 0.1, "nested_dtype": "float32"}
        parts["nested_quant_map"] = np.linspace(-1, 1, 256, dtype=np.float32)
        parts["nested_absmax"] = rng.uniform(0.02, 0.08, -(-count // 256)).astype(np.float32)
        parts["absmax"] = rng.integers(0, 256, count).astype(np.uint8)
        largest = parts["nested_quant_map"][parts["absmax"]].astype(float)
        largest = largest * parts["nested_absmax"].astype(float).repeat(256)[:count] + 0.1
    want = NF4[codes].astype(float) * largest.repeat(64)[: codes.size].reshape(shape)
    parts["quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    swapped = codes.reshape(-1, 2)[:, ::-1]
    stored = {"weight": in_bytes(swapped)} | {f"weight.{last}": x for last, x in parts.items()}
    return stored, want.astype(np.float32)


def compressed(form: str, **weights: object) -> dict:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


FP8 = {"quant_method": "fp8", "weight_block_size": [40, 24]}
BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
CASES: dict[str, tuple[dict, Callable[..., Stored]]] = {
    "fp8": (FP8, fp8_blocks),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8_rows),
    "int8": (
        compressed("int-quantized", num_bits=8, strategy="channel", group_size=-1),
        int8_rows,
    ),
    "packed": (compressed("pack-quantized", num_bits=4, group_size=GROUP), packed),
    "packed-asymmetric": (
        compressed("pack-quantized", num_bits=4, group_size=GROUP, symmetric=False),
        partial(packed, has_zeros=True),
    ),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, gptq),
    "gptq-act-order": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
        lambda rng, shape: gptq(rng, shape, reorder=True),
    ),
    "nvfp4": (compressed("nvfp4-pack-quantized", num_bits=4, group_size=16), nvfp4),
    "mxfp4": (compressed("mxfp4-pack-quantized", num_bits=4, group_size=32), mxfp4_pack),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        lambda rng, shape: nvfp4(rng, shape, form="modelopt"),
    ),
    "nf4": (BITSANDBYTES, nf4),
    "nf4-simple": (BITSANDBYTES, lambda rng, shape: nf4(rng, shape, nested=False)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
}


def quantised(tmp_path: Path, case: str, config: dict = CONFIG) -> tuple[Path, Path]:
    """Makes the directories of a checkpoint with quantised layers and of what it stands for."""
    about, quantise = CASES[case]
    rng = np.random.default_rng(0)
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
    return written(tmp_path / "small", stored, config | {"quantization_config": about}), plain


def written(directory: Path, tensors: dict[str, np.ndarray], config: dict) -> Path:
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def loaded(directory: Path, load: Callable[..., dict] = load_weights, **options: object) -> dict:
    """The weight tree, in which quantised matrices are what they stand for."""
    spec, layout = read_family(read_config(directory))
    weights = load(directory, spec, layout, Kept(dtype="float32", **options))
    return {
        name: meant(leaf) if isinstance(leaf, dict) else np.asarray(leaf)
        for name, leaf in weights.items()
    }


def meant(stack: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    stack = {
        name: x.reshape(-1, *x.shape[2:]) if name.startswith(EXPERT) else x
        for name, x in stack.items()
    }
    found = {}
    for name in {base_name(name) for name in stack}:
        x = np.asarray(stack[name])
        if x.ndim == 4:
            scales = np.asarray(stack.get(name + SCALES, stack.get(name + DYNAMIC)))[..., None]
            values = (from_pairs(x) if x.dtype == np.uint8 else x).astype(np.float32)
            if name + TABLE in stack:
                codes = values.astype(int) % 16
                values = np.stack(
                    [table[own] for table, own in zip(stack[name + TABLE], codes, strict=True)]
                )
            if name + ZEROS in stack:
                values -= np.asarray(stack[name + ZEROS], np.float32)[..., None]
            values = (values * scales.astype(np.float32)).swapaxes(1, 2)
            x = values.reshape(*values.shape[:2], -1)
            if name + FACTOR in stack:
                x *= np.asarray(stack[name + FACTOR])[:, None, None]
        found[name] = x
    return found


def packed_names(directory: Path, load: Callable[..., dict] = load_weights) -> set[str]:
    spec, layout = read_family(read_config(directory))
    return packed_leaves(load(directory, spec, layout, Kept(dtype="float32"))["layers"])


def packed_leaves(stack: dict[str, jax.Array]) -> set[str]:
    """The names of the leaves that are kept quantised."""
    return {name for name in stack if {name + SCALES, name + DYNAMIC} & stack.keys()}


def check_planned(directory: Path) -> None:
    """Checks that a config says the shapes of what is loaded, but for zero points."""
    spec, layout = read_family(read_config(directory))
    kept = Kept(dtype="float32", placement=place(spec, layout, jax.devices()[:1]))
    planned = weight_shapes(spec, layout, kept)
    loaded = load_weights(directory, spec, layout, kept)

    def shapes(weights: dict) -> dict:
        arrays = {name: x for name, x in weights["layers"].items() if not name.endswith(ZEROS)}
        return {name: x.shape for name, x in arrays.items()}

    assert shapes(planned) == shapes(loaded)


def check_equal(got: dict, want: dict) -> None:
    """Up to the rounding of one product."""
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=0), got, want)


def tensors_of(directory: Path) -> dict[str, np.ndarray]:
    """Those of the checkpoint, of 8-bit floats too, which safetensors reads not to numpy."""
    with Checkpoint.open(directory) as checkpoint:
        return {name: np.array(checkpoint.read(name)) for name in checkpoint.names}


def stored_bytes(directory: Path, among: str = "_proj") -> int:
    """Counts what a file has of quantised weights."""
    parts = tensors_of(directory)
    return sum(x.nbytes for name, x in parts.items() if among in name and not name.endswith("bias"))


def mxfp4(tmp_path: Path) -> tuple[Path, Path]:
    """Directories of a gpt-oss whose experts are stored in pairs of 4 bits, and of what they
    mean.
    """
    config = tiny_config("llama") | {"hidden_size": 64, "intermediate_size": 96}
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
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router"]
    about = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    about = {"quantization_config": about}
    return written(tmp_path / "small", stored, config | about), plain


def logprobs(llm: LLM) -> np.ndarray:
    """Returns logprobs behind 1 token and behind each of 24, over the whole vocabulary. By one
    program: an engine would compile several that multiply by the same weights.
    """
    logits_TV = np.concatenate(logits_of(llm, [[5], [(7 * i) % 97 for i in range(24)]]))
    return logits_TV - np.log(np.exp(logits_TV).sum(axis=1, keepdims=True))


def make(directory: Path, **options: object) -> LLM:
    return LLM(directory, **SMALL | options)


def kept_bytes(llm: LLM) -> int:
    """Counts the bytes of what stays quantised on the device."""
    stack = model_of(llm).weights["layers"]
    kept = packed_leaves(stack) | {name for name in stack if base_name(name) != name}
    return sum(num_bytes(stack[name].shape, stack[name].dtype) for name in kept)
