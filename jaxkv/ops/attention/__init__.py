"""Attention backends by name (the `backend` that people write)."""

from __future__ import annotations

from functools import partial

from jaxkv.ops.attention import xla
from jaxkv.ops.attention.base import AttendFn, Batch

BACKENDS: dict[str, AttendFn] = {"xla": xla.attend, "xla_deterministic": partial(xla.attend, deterministic=True)}
DETERMINISTIC = {"xla": "xla_deterministic"}
"""What `deterministic=True` takes in a backend's place."""
PLANNED = ("pallas_tpu", "mosaic_gpu")


def choose_backend(name: str) -> tuple[str, str]:
    """(backend, reason) for what a person asked for; only "auto" chooses.

    Raises: ValueError for an unknown name, NotImplementedError for a named backend that is not built.
    """
    if name == "auto":
        return "xla", f"chosen by auto: {' and '.join(PLANNED)} are not built yet"
    if name in BACKENDS:
        return name, "asked for by name"
    if name in PLANNED:
        raise NotImplementedError(f"backend={name!r} is not built yet; use 'auto' or one of {sorted(BACKENDS)}")
    raise ValueError(f"backend: expected 'auto' or one of {sorted([*BACKENDS, *PLANNED])}, got {name!r}")


__all__ = ["BACKENDS", "DETERMINISTIC", "AttendFn", "Batch", "choose_backend"]
