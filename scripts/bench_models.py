"""Random Llama and Mixtral checkpoints for benchmarks: real shapes, weights drawn on the spot,
bfloat16 safetensors, and the same as GGUF.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

CONTEXT = int(os.environ.get("BENCH_CONTEXT", "2048"))
"""Tokens that a sequence of these models may have."""

COMMON = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}
COMMON |= {
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}


def shape(vocab: int, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int) -> dict:
    return COMMON | {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


SHAPES = {
    "toy": shape(256, 32, 64, 2, 4, 2),
    "110m": shape(32_000, 768, 2048, 12, 12, 4),
    "0.5b": shape(151_936, 896, 4864, 24, 14, 2),
    "1.1b": shape(32_000, 2048, 5632, 22, 32, 4),
    "moe": shape(32_000, 1024, 512, 24, 16, 8)
    | {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 32,
        "num_experts_per_tok": 8,
    },
    "8b": shape(128_256, 4096, 14_336, 32, 32, 8) | {"max_position_embeddings": 131_072},
}
"""config.json by name; heads are hidden / num_attention_heads wide (64, toy 8, 8b 128). 0.5b is
Qwen2.5-0.5B's shape without its biases, and with a head of its own. moe is Mixtral's architecture
in the size of Granite 3.0's 1B-A400M, with 32 experts, 8 for each token.
"""


def make_checkpoint(directory: Path, name: str, *, seed: int) -> Path:
    """Writes config.json and model.safetensors (about twice its bytes in memory meanwhile), or
    takes what is there.

    Raises: ValueError if the directory holds another model.
    """
    config, text = SHAPES[name], directory / "config.json"
    if text.is_file():
        if json.loads(text.read_text()) != config | {"seed": seed}:
            raise ValueError(
                f"{directory}: expected no model, or one of shape {name} and seed {seed}, got "
                f"another"
            )
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    # The config comes last: without it an interrupted write is no checkpoint.
    tensors = {leaf: draw(rng, dims) for leaf, dims in leaves(config)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    text.write_text(json.dumps(config | {"seed": seed}))
    return directory


def draw(rng: np.random.Generator, dims: tuple[int, ...]) -> np.ndarray:
    """Norms are 1; matrices keep activations near 1, so that the greedy token is a clear one."""
    if len(dims) == 1:
        return np.ones(dims, ml_dtypes.bfloat16)
    return (rng.standard_normal(dims, np.float32) * dims[1] ** -0.5).astype(ml_dtypes.bfloat16)


def leaves(config: dict) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor, as Hugging Face names them."""
    D, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = D // config["num_attention_heads"] * config["num_key_value_heads"]
    layer = {"input_layernorm": (D,), "post_attention_layernorm": (D,)}
    layer |= {"self_attn.q_proj": (D, D), "self_attn.k_proj": (kv, D), "self_attn.v_proj": (kv, D)}
    layer["self_attn.o_proj"] = (D, D)
    num_experts = config.get("num_local_experts", 0)
    for i in range(num_experts):
        expert = f"block_sparse_moe.experts.{i}"
        layer |= {f"{expert}.w1": (F, D), f"{expert}.w2": (D, F), f"{expert}.w3": (F, D)}
    if num_experts:
        layer["block_sparse_moe.gate"] = (num_experts, D)
    else:
        layer |= {"mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F)}
    top = {"model.embed_tokens": (V, D), "model.norm": (D,), "lm_head": (V, D)}
    top |= {
        f"model.layers.{i}.{k}": dims
        for i in range(config["num_hidden_layers"])
        for k, dims in layer.items()
    }
    return [(f"{name}.weight", dims) for name, dims in top.items()]


GGUF_UINT32, GGUF_INT32, GGUF_FLOAT32, GGUF_STRING, GGUF_ARRAY = 4, 5, 6, 8, 9
GGML_F32, GGML_BF16, GGML_Q4_0 = 0, 30, 2
ALIGNMENT = 32
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.w1": "ffn_gate_exps",
    "block_sparse_moe.w2": "ffn_down_exps",
    "block_sparse_moe.w3": "ffn_up_exps",
}


def make_gguf(directory: Path, dtype: str, *, in_4_bits: bool = False) -> Path:
    """Writes the checkpoint's model as `dtype`.gguf, which llama.cpp reads, beside it; its
    vocabulary has a name for each id. Source: docs/gguf.md of ggml.

    in_4_bits: matrices of layers are in Q4_0, in a file of that name.
    """
    config = json.loads((directory / "config.json").read_text())
    heads, vocab = config["num_attention_heads"], config["vocab_size"]
    tokens = [b"<unk>", b"<s>", b"</s>", *(f"t{i}".encode() for i in range(3, vocab))]
    numbers = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "rope.dimension_count": config["hidden_size"] // heads,
        "vocab_size": vocab,
    }
    if "num_local_experts" in config:
        numbers["expert_count"] = config["num_local_experts"]
        numbers["expert_used_count"] = config["num_experts_per_tok"]
    fields = [_field("general.architecture", GGUF_STRING, _text(b"llama"))]
    fields += [_field(f"llama.{k}", GGUF_UINT32, struct.pack("<I", n)) for k, n in numbers.items()]
    for key, value in (
        ("attention.layer_norm_rms_epsilon", config["rms_norm_eps"]),
        ("rope.freq_base", config["rope_theta"]),
    ):
        fields.append(_field(f"llama.{key}", GGUF_FLOAT32, struct.pack("<f", value)))
    fields.append(_field("tokenizer.ggml.model", GGUF_STRING, _text(b"llama")))
    names = struct.pack("<IQ", GGUF_STRING, vocab) + b"".join(map(_text, tokens))
    fields.append(_field("tokenizer.ggml.tokens", GGUF_ARRAY, names))
    for key, kind, values in (
        ("scores", GGUF_FLOAT32, np.zeros(vocab, np.float32)),
        ("token_type", GGUF_INT32, np.array([2, 3, 3] + [1] * (vocab - 3), np.int32)),
    ):
        array = struct.pack("<IQ", kind, vocab) + values.tobytes()
        fields.append(_field(f"tokenizer.ggml.{key}", GGUF_ARRAY, array))

    entries, data, offset = [], [], 0
    for name, x in _stacked(load_file(directory / "model.safetensors")).items():
        base = name.removesuffix(".weight")
        if base.startswith("model.layers."):
            _, _, number, part = base.split(".", 3)
            base = f"blk.{number}.{GGUF_NAMES[part]}"
        else:
            part, base = base, GGUF_NAMES[base]
        if part in ("self_attn.q_proj", "self_attn.k_proj"):
            # What a rotation turns stands side by side there, and half a head apart here.
            count = heads if "q_proj" in part else config["num_key_value_heads"]
            x = x.reshape(count, 2, -1, x.shape[1]).swapaxes(1, 2).reshape(x.shape)
        is_router = "gate_inp" in base
        if in_4_bits and x.ndim > 1 and base.startswith("blk.") and not is_router:
            raw, kind = _q4_0(x.astype(np.float32)), GGML_Q4_0
        elif x.ndim == 1 or is_router or dtype == "float32":
            raw, kind = x.astype(np.float32).tobytes(), GGML_F32
        else:
            raw, kind = np.ascontiguousarray(x).tobytes(), GGML_BF16
        dims = struct.pack(f"<I{x.ndim}Q", x.ndim, *x.shape[::-1])
        entries.append(_text(f"{base}.weight".encode()) + dims + struct.pack("<IQ", kind, offset))
        data.append(raw + bytes(-len(raw) % ALIGNMENT))
        offset += len(data[-1])
    head = b"GGUF" + struct.pack("<IQQ", 3, len(entries), len(fields))
    head += b"".join(fields) + b"".join(entries)
    path = directory / f"{'q4_0' if in_4_bits else dtype}.gguf"
    path.write_bytes(head + bytes(-len(head) % ALIGNMENT) + b"".join(data))
    return path


def _stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Stacks matrices of experts, which GGUF has as one tensor."""
    found: dict[str, Any] = {}
    for name, x in tensors.items():
        before, is_of_expert, after = name.partition(".experts.")
        if not is_of_expert:
            found[name] = x
            continue
        number, matrix = after.split(".", 1)
        found.setdefault(f"{before}.{matrix}", {})[int(number)] = x
    return {
        name: np.stack([x[i] for i in range(len(x))]) if isinstance(x, dict) else x
        for name, x in found.items()
    }


def _q4_0(x: np.ndarray) -> bytes:
    """Rounds blocks of 32 numbers to multiples of a scale, from -8 to 7: the largest becomes -8. A
    byte has one of the first 16 and one of the others.
    """
    blocks = x.reshape(-1, 32)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
    scale = (largest / -8).astype(np.float16)
    divisor = np.where(scale == 0, 1, scale).astype(np.float32)
    values = np.clip(np.rint(blocks / divisor) + 8, 0, 15).astype(np.uint8)
    pairs = values[:, :16] | values[:, 16:] << 4
    return np.concatenate([scale.view(np.uint8), pairs], axis=1).tobytes()


def _text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _field(key: str, kind: int, value: bytes) -> bytes:
    return _text(key.encode()) + struct.pack("<I", kind) + value
