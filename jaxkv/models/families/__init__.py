"""Families by `model_type`: a family is a file of this folder with a `read` function."""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv.errors import CheckpointError
from jaxkv.models.families.base import ConfigReader, Layout, Leaf
from jaxkv.models.rope import rope_frequencies
from jaxkv.models.spec import ModelSpec

FAMILIES = tuple(
    sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")
)
MAX_CONFIG_BYTES = 10_000_000


def read_config(directory: Path, name: str = "config.json") -> ConfigReader:
    """Reads a JSON file of a model directory. Raises: CheckpointError if it is missing, too large
    or not a JSON object.
    """
    path = directory / name
    if not path.is_file():
        raise CheckpointError(
            f"{path}: not found; expected a Hugging Face model directory with a {name}"
        )
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise CheckpointError(
            f"{path}: expected at most {MAX_CONFIG_BYTES} bytes, got {path.stat().st_size}"
        )
    return ConfigReader(check_json(path), str(path))


def check_json(path: Path) -> dict[str, Any]:
    """Returns the object that a file holds. Raises: CheckpointError if it is anything else."""
    try:
        values = json.loads(path.read_bytes().decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: expected JSON, got {error}: fetch the file again"
        ) from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return values


def read_family(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    """Reads spec and layout by the config's `model_type`.

    Raises: CheckpointError for an unknown model_type, listing the known, and for rotary parameters
    that do not compute.
    """
    model_type = config.values.get("model_type")
    if model_type not in FAMILIES:
        raise config.fail("model_type", f"one of {', '.join(FAMILIES)}")
    spec, layout = importlib.import_module(f"{__name__}.{model_type}").read(config)
    inv_freq, _ = rope_frequencies(spec)
    if not np.isfinite(inv_freq).all():
        raise CheckpointError(
            f"{config.where}: expected finite rotary frequencies, got {inv_freq} from {spec.rope}"
        )
    return spec, layout


__all__ = ["FAMILIES", "ConfigReader", "Layout", "Leaf", "check_json", "read_config", "read_family"]
