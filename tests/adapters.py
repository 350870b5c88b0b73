"""Adapters made on the spot, as PEFT writes them, and the checkpoints that they become when they
are merged into the weights.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

PREFIX = "base_model.model."
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


PEFT = {
    "alpha_pattern": {},
    "bias": "none",
    "ensure_weight_tying": False,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "loftq_config": {},
    "lora_bias": False,
    "lora_dropout": 0.05,
    "megatron_core": "megatron.core",
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "rank_pattern": {},
    "task_type": "CAUSAL_LM",
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "auto_mapping": None,
    "corda_config": None,
    "eva_config": None,
    "exclude_modules": None,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "lora_ga_config": None,
    "megatron_config": None,
    "modules_to_save": None,
    "monteclora_config": None,
    "revision": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "use_bdlora": None,
    "velora_config": None,
}
"""What PEFT 0.21.2 writes beside the rank and the modules."""


def make_adapter(
    directory: Path,
    base: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    targets: tuple[str, ...] = TARGETS,
    ranks: Mapping[str, int] | None = None,
    transposed: Collection[str] = (),
    **config: object,
) -> Path:
    """Writes an adapter of the checkpoint `base` whose products are about as large as its weights.
    ranks: of modules that have another one, by their whole names. transposed: modules whose weights
    are stored [in, out].
    """
    directory.mkdir(parents=True)
    rng, tensors = np.random.default_rng(seed), {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(targets) and weight.ndim == 2:
            own = (ranks or {}).get(module, rank)
            rows, columns = weight.shape[::-1] if module in transposed else weight.shape
            down = rng.normal(0, columns**-0.5, (own, columns)).astype(np.float32)
            up = rng.normal(0, own**-0.5, (rows, own)).astype(np.float32)
            tensors |= {
                f"{PREFIX}{module}.lora_A.weight": down,
                f"{PREFIX}{module}.lora_B.weight": up,
            }
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    written = PEFT | {
        "base_model_name_or_path": str(base.name),
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(targets),
    }
    (directory / "adapter_config.json").write_text(json.dumps(written | config))
    return directory


def merged(
    directory: Path,
    base: Path,
    adapter: Path,
    scale: float | Mapping[str, float] = 1.0,
    *,
    transposed: Collection[str] = (),
) -> Path:
    """Writes the checkpoint whose weights have the adapter in them. scale: of all, or by module.
    transposed: as in `make_adapter`.
    """
    shutil.copytree(base, directory)
    weights = load_file(base / "model.safetensors")
    own = load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in own if name.endswith("lora_A.weight")]:
        module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        down, up = own[name], own[name.replace("lora_A", "lora_B")]
        factor = scale if isinstance(scale, float) else scale[module]
        product = (up.astype(np.float64) @ down.astype(np.float64) * factor).astype(np.float32)
        weights[f"{module}.weight"] += product.T if module in transposed else product
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
