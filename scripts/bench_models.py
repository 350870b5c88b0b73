"""Random Llama checkpoints for benchmarks: real shapes, weights drawn on the spot, bfloat16
safetensors.
"""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

COMMON = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}
COMMON |= {
    "max_position_embeddings": 2048,
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
    "1.1b": shape(32_000, 2048, 5632, 22, 32, 4),
    "8b": shape(128_256, 4096, 14_336, 32, 32, 8) | {"max_position_embeddings": 131_072},
}
"""config.json by name; heads are hidden / num_attention_heads wide (64, toy 8, 8b 128)."""


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
    layer |= {
        "self_attn.o_proj": (D, D),
        "mlp.gate_proj": (F, D),
        "mlp.up_proj": (F, D),
        "mlp.down_proj": (D, F),
    }
    top = {"model.embed_tokens": (V, D), "model.norm": (D,), "lm_head": (V, D)}
    top |= {
        f"model.layers.{i}.{k}": dims
        for i in range(config["num_hidden_layers"])
        for k, dims in layer.items()
    }
    return [(f"{name}.weight", dims) for name, dims in top.items()]
