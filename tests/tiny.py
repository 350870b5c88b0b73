"""Tiny checkpoints made on the spot: every family and variant, with every weight drawn anew.

transformers' own initialisation (norms 1, biases 0) would give the same logits when a loader drops
them, so norms, biases and qk-norms are drawn too, far from their defaults.
"""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxkv.config import EngineConfig
from jaxkv.models.families import Layout, Leaf, read_config, read_family
from jaxkv.models.spec import ModelSpec
from jaxkv.weights.tree import stack_name, tree_leaves

SMALL = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 8,
    "max_model_len": 128,
    "num_gpu_blocks_override": 200,
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "lazy_compile": True,
}
"""Limits of an `LLM` that a test fills in seconds."""

ENGINE = EngineConfig(
    max_model_len=64,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    block_size=8,
    num_pages=16,
    decode_steps=4,
    seed=0,
)
"""The same of a scheduler without a model."""

BASE = {
    "vocab_size": 151,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

VARIANTS: dict[str, dict] = {
    "llama": {"model_type": "llama", "rope_theta": 10000.0},
    "llama-no-gqa": {"model_type": "llama", "num_key_value_heads": None, "rope_theta": 5e5},
    "llama-linear": {
        "model_type": "llama",
        "rope_theta": 1e4,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    "llama-3": {
        "model_type": "llama",
        "rope_parameters": LLAMA3 | {"rope_theta": 5e5},
        "tie_word_embeddings": True,
    },
    "llama-3-old-keys": {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": LLAMA3},
    "llama-yarn": {"model_type": "llama", "rope_parameters": YARN | {"rope_theta": 1e4}},
    "llama-yarn-no-truncate": {
        "model_type": "llama",
        "rope_parameters": YARN
        | {"rope_theta": 1e4, "truncate": False, "beta_fast": 16, "attention_factor": 1.3},
    },
    "llama-yarn-mscale": {
        "model_type": "llama",
        "rope_theta": 1e4,
        "rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.1},
    },
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-head-dim": {"model_type": "llama", "head_dim": 16, "hidden_act": "gelu_pytorch_tanh"},
    "smollm2": {  # 9 query heads, 3 KV heads, tied
        "model_type": "llama",
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rope_theta": 1e5,
        "tie_word_embeddings": True,
        "rope_interleaved": False,
    },
    "mistral": {"model_type": "mistral", "sliding_window": None, "rope_theta": 1e4},
    "mistral-window": {"model_type": "mistral", "sliding_window": 8, "rope_theta": 1e4},
    "mistral-head-dim": {
        "model_type": "mistral",
        "sliding_window": None,
        "head_dim": 20,
        "num_key_value_heads": 1,
    },
    "qwen2": {
        "model_type": "qwen2",
        "rope_theta": 1e6,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
    },
    "qwen2-yarn": {
        "model_type": "qwen2",
        "rope_theta": 1e6,
        "rope_scaling": YARN | {"type": "yarn"},
    },
    "qwen2-mixed-windows": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "qwen3": {
        "model_type": "qwen3",
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "qwen3-biases": {
        "model_type": "qwen3",
        "head_dim": 8,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "qwen3-layer-types": {
        "model_type": "qwen3",
        "head_dim": 8,
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}


def tiny_config(variant: str, **changes: object) -> dict:
    config = BASE | VARIANTS[variant] | changes
    return {
        key: value for key, value in config.items() if value is not None or key == "sliding_window"
    }


def draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Norm weights around 1 +- 0.3, biases +- 0.3, matrices of the size that keeps activations near
    1.
    """
    if "norm" in name:
        return rng.normal(1.0, 0.3, shape).astype(np.float32)
    scale = 0.3 if len(shape) < 2 else shape[-1] ** -0.5 * (2.0 if "embed" not in name else 4.0)
    return rng.normal(0.0, scale, shape).astype(np.float32)


def draw_leaf(rng: np.random.Generator, name: str, leaf: Leaf) -> np.ndarray:
    """Draws a tensor that a checkpoint has for a leaf: as `draw`, or any of its whole numbers."""
    shape, below = leaf.stored_shapes[0], leaf.info.below
    return draw(rng, name, shape) if below is None else rng.integers(below, size=shape)


def make_checkpoint(
    directory: Path, config: dict, *, seed: int = 0, shards: int = 1, dtype: str = "float32"
) -> Path:
    """Writes config.json and one or several safetensors files with an index, like a Hugging Face
    checkpoint.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    spec, layout = read_family(read_config(directory))
    rng = np.random.default_rng(seed)
    to = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    tensors = {
        name: draw_leaf(rng, name, leaf).astype(to if leaf.info.below is None else np.int64)
        for name, leaf in stored(spec, layout).items()
    }
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    names, weight_map = list(tensors), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
        "weight_map": weight_map,
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def stored(spec: ModelSpec, layout: Layout) -> dict[str, Leaf]:
    """Describes a checkpoint's tensors, layer after layer, without a tied head."""
    leaves = [leaf for leaf in tree_leaves(spec, layout) if leaf.one.same_as is None]
    found = {leaf.sources[0]: leaf.one for leaf in leaves if not leaf.is_stacked}
    for kind in range(spec.num_kinds):
        own = [leaf for leaf in leaves if leaf.stack == stack_name(kind)]
        for place in range(len(spec.layers_of(kind))):
            for leaf in own:
                # Of what layers share there are fewer.
                count = max(1, len(leaf.sources) // len(spec.layers_of(kind)))
                for source in leaf.sources[place * count : (place + 1) * count]:
                    found[source] = leaf.one
    return found
