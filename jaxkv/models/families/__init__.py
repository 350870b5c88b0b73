"""Families by `model_type`: a family is a file of this folder with a `read` function."""

from __future__ import annotations

import difflib
import importlib
import json
import pkgutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv.errors import NO_GGUF, CheckpointError
from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, Leaf
from jaxkv.models.quantisation import IN_CONFIG, read_beside, read_quantisation
from jaxkv.models.rope import rope_frequencies
from jaxkv.models.spec import ModelSpec

SHARED = (
    *("base", "delta", "eagle", "experts", "hybrid", "latent"),
    *("ngrams", "predictor", "ssm", "streams"),
)
"""Files of this folder that are no family, but what several have in common."""

FAMILIES = tuple(
    sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in SHARED)
)
CONFIG, QUANTISATION = "config.json", "hf_quant_config.json"
MAX_CONFIG_BYTES = 10_000_000
DEFAULTS = Path(__file__).with_name("defaults.json")
"""Written by scripts/family_defaults.py."""

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "n_embd",
    "n_layer",
    "n_head",
    "ffn_hidden_size",
)
TEXT_OF = {
    "apertus1p5": "apertus1p5_text",
    "aria": "aria_text",
    "audioflamingo3": "qwen2",
    "aya_vision": "cohere2",
    "cohere2_vision": "cohere2",
    "cohere_compass": "cohere_compass_text",
    "cosmos3_edge": "cosmos3_edge_text",
    "cosmos3_omni": "qwen3_vl_text",
    "deepseek_vl": "llama",
    "deepseek_vl_hybrid": "llama",
    "dots3_note": "dots3_note_text",
    "emu3": "emu3_text_model",
    "ernie4_5_vl_moe": "ernie4_5_vl_moe_text",
    "exaone4_5": "exaone4",
    "fast_vlm": "qwen2",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "glm46v": "glm4v_text",
    "glm4v": "glm4v_text",
    "glm4v_moe": "glm4v_moe_text",
    "glm5_next": "glm5_next_text",
    "glm_ocr": "glm_ocr_text",
    "glmga": "glm4v_text",
    "got_ocr2": "qwen2",
    "granite4_vision": "granite4_vision_text",
    "granite_speech": "granite",
    "granite_speech_plus": "granite",
    "hunyuan_vl": "hunyuan_vl_text",
    "hy_v4_vl": "hy_v4_vl_text",
    "hyperclovax_vision_v2": "hyperclovax",
    "idefics2": "mistral",
    "idefics3": "llama",
    "inkling2": "inkling2_text",
    "inkling2_loop": "inkling2_loop_text",
    "inkling_mm_model": "inkling_text",
    "internvl": "qwen2",
    "internvl_chat": "qwen2",
    "janus": "llama",
    "kimi_k25": "deepseek_v3",
    "kimi_vl": "deepseek_v3",
    "lfm2_vl": "lfm2",
    "lfm3_vl": "lfm3",
    "lighton_ocr": "qwen3",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "llava_next_video": "llama",
    "llava_onevision": "qwen2",
    "minicpm_ocr": "qwen3_5_text",
    "minicpmv4_6": "qwen3_5_text",
    "minicpmv4_7": "qwen3_5_text",
    "minimax_m3_vl": "minimax_m3_vl_text",
    "mistral3": "mistral",
    "mistral_large4": "mistral_large4_text",
    "mllama": "mllama_text_model",
    "molmo2": "molmo2_text",
    "muse_glimmer": "muse_glimmer_text",
    "muse_spark": "muse_spark_text",
    "musicflamingo": "qwen2",
    "nemotron_h_omni": "nemotron_h",
    "ovis2": "qwen2",
    "paddleocr_vl": "paddleocr_vl_text",
    "perception_lm": "llama",
    "qianfan_ocr": "qwen3",
    "qwen2_5_omni": "qwen2_5_omni_thinker",
    "qwen2_5_omni_thinker": "qwen2_5_omni_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_audio": "qwen2",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_omni_moe": "qwen3_omni_moe_thinker",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen4_exp": "qwen4_exp_text",
    "smolvlm": "llama",
    "step3p7": "step3p5",
    "video_llama_3": "qwen2",
    "video_llava": "llama",
    "vipllava": "llama",
    "voxtral": "llama",
}
"""Models of several parts, each with the family of a text part that does not say which it is."""

SECTIONS = ("text_config", "llm_config", "thinker_config")
"""Where a model's text part is: the second in published files of Nemotron 3 Omni and InternVL. The
third is a model of several parts itself, Qwen Omni's without those that speak.
"""

RENAMED = {
    "PanguEmbedded": "pangu_embedded",
    "bailing_moe_v2": "bailing_moe",
    "exaone4_5_text": "exaone4",
    "gpt-sw3": "gpt2",
    "mimo": "qwen2",
    "modernbert-decoder": "modernbert_decoder",
    "nemotron-nas": "nemotron_nas",
    "openai-gpt": "openai_gpt",
}
"""Other names of families: older ones, those that no file can have, and those of models that are
another under their own name.
"""


DRAFT_KEYS = ("draft_vocab_size", "speculators_model_type")
"""Only configs of draft layers (`families.eagle`) have them, which are no models by themselves."""


def read_config(directory: Path, name: str = CONFIG) -> ConfigReader:
    """Reads a JSON file of a model directory, config.json with what files beside it say of weights.
    Raises: CheckpointError if it is missing, too large or not a JSON object.
    """
    path = directory / name
    if not path.is_file():
        instead = f"; {NO_GGUF}" if name == CONFIG and any(directory.glob("*.gguf")) else ""
        raise CheckpointError(
            f"{path}: not found; expected a Hugging Face model directory with a {name}{instead}"
        )
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise CheckpointError(
            f"{path}: expected at most {MAX_CONFIG_BYTES} bytes, got {path.stat().st_size}"
        )
    config = ConfigReader(check_json(path), str(path))
    beside = directory / QUANTISATION
    is_said = any(config.get(key) is not None for key in IN_CONFIG)
    if name != CONFIG or is_said or not beside.is_file():
        return config
    about = read_beside(read_config(directory, QUANTISATION))
    if about is None:
        return config
    values = {**config.values, "quantization_config": about}
    return ConfigReader(values, f"{path} with {QUANTISATION}")


def check_json(path: Path) -> dict[str, Any]:
    """Returns the object that a file holds. Raises: CheckpointError if it is anything else."""
    try:
        values = json.loads(path.read_bytes().decode(), object_pairs_hook=_consistent)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: expected JSON, got {error}: fetch the file again"
        ) from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return values


def _consistent(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the pairs as an object. Raises: ValueError for a key with two values, of which each
    program would take its own.
    """
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found and found[key] != value:
            raise ValueError(f"two values of {key!r:.80}")
        found[key] = value
    return found


def read_family(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    """Reads spec and layout by the config's `model_type`, those of its text part where it has
    several.

    Raises: CheckpointError for an unknown model_type, naming those that are spelt like it, and for
    rotary parameters that do not compute.
    """
    for key in DRAFT_KEYS:
        if config.get(key) is not None:
            raise config.fail(
                key,
                "none in a model's; a draft layer is given with the model that it is for, as "
                "speculative_config={'method': 'eagle3', 'model': ...}",
            )
    outer = _renamed(config)
    config = _renamed(text_part(outer))
    config.refuse("is_causal", True)
    model_type = config.values.get("model_type")
    if model_type not in FAMILIES:
        known = (*FAMILIES, *TEXT_OF)
        near = difflib.get_close_matches(str(model_type), known, n=3, cutoff=0.5)
        nearest = f"the nearest: {', '.join(near)}" if near else "none is spelt like it"
        expected = f"one of the {len(known)} that are read (docs/models.md; {nearest})"
        raise config.fail("model_type", expected)
    family = importlib.import_module(f"{__name__}.{model_type}")
    spec, layout = family.read(_with_defaults(config, is_part=config is not outer))
    for rope in {spec.rope, *spec.layer_ropes} - {None}:
        inv_freq = rope_frequencies(rope, spec.head_dim)
        if not np.isfinite(inv_freq).all():
            raise CheckpointError(
                f"{config.where}: expected finite rotary frequencies, got {inv_freq} from {rope}"
            )
    if (how := read_quantisation(config)) is not None:
        how = replace(how, skipped=(*how.skipped, *layout.plain))
    layout = replace(layout, quantisation=how)
    if config is not outer:
        layout = replace(layout, part_of=outer.get("model_type", "another model"))
    return spec, layout


def _renamed(config: ConfigReader) -> ConfigReader:
    if (name := config.get("model_type")) in tuple(RENAMED):
        return config.replaced(model_type=RENAMED[name])
    return config


def text_part(config: ConfigReader) -> ConfigReader:
    """Returns the reader of a model's text part: itself, unless it is one of several parts."""
    while isinstance(outer := config.values.get("model_type"), str) and outer in TEXT_OF:
        section = next((key for key in SECTIONS if config.get(key) is not None), None)
        if section is None:  # older files have its keys among the others
            config = config.replaced(model_type=TEXT_OF[outer])
            continue
        text = config.section(section)
        # The tie may be said on either level, and holds if one of them says so; a quantisation is
        # said on the outer one.
        keys = ("tie_word_embeddings", *IN_CONFIG)
        above = {key: config.get(key) for key in keys if key in config.values}
        if above.get("tie_word_embeddings") is True:
            text = text.replaced(tie_word_embeddings=True)
        above |= {"model_type": TEXT_OF[outer], **_written_defaults().get(outer, {})}
        config = text.with_defaults(above)
    return config


def _with_defaults(config: ConfigReader, *, is_part: bool) -> ConfigReader:
    """Returns a reader that finds what transformers takes for keys that a config.json leaves out or
    has under another name. Sizes are always there, but in a part of a model; a scaled rotary
    embedding is taken where there is no section about any, and with it the theta that it has.
    """
    found = dict(_written_defaults().get(config.values["model_type"], {}))
    rope, aliases = found.pop("rope_parameters", None), found.pop("aliases", {})
    given = {aliases[key]: config.get(key) for key in config.values if key in aliases}
    config = config.with_defaults(given)
    found = {key: value for key, value in found.items() if is_part or key not in SIZES}
    has_section = config.get("rope_parameters") is not None or config.get("rope_scaling")
    if rope is not None and not has_section:
        theta = config.get("rope_theta", found.get("rope_theta"))
        config = config.replaced(rope_parameters={"rope_theta": theta, **rope})
    return config.with_defaults(found)


@cache
def _written_defaults() -> dict[str, Any]:
    return json.loads(DEFAULTS.read_text())


__all__ = [
    "CONFIG",
    "FAMILIES",
    "QUANTISATION",
    "ConfigReader",
    "Layout",
    "Leaf",
    "check_json",
    "read_config",
    "read_family",
    "text_part",
]
