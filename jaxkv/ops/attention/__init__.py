"""Attention backends by name (the `backend` that people write)."""

from __future__ import annotations

from functools import partial

import jax

from jaxkv.ops.attention import xla
from jaxkv.ops.attention.base import AttendFn, Batch

BACKENDS: dict[str, AttendFn] = {"xla": xla.attend, "xla_deterministic": partial(xla.attend, deterministic=True)}
PLANNED = ("pallas_tpu", "mosaic_gpu")


def choose_backend(name: str, *, deterministic: bool = False) -> tuple[str, str]:
    """(backend, reason) for what a person asked for; only "auto" chooses.

    Raises: ValueError for an unknown name, NotImplementedError for a named backend that is not built.
    """
    if deterministic:
        return _choose_deterministic(name)
    if name == "auto":
        return "xla", f"chosen by auto: {' and '.join(PLANNED)} are not built yet"
    if name in BACKENDS:
        return name, "asked for by name"
    if name in PLANNED:
        raise NotImplementedError(f"backend={name!r} is not built yet; use 'auto' or one of {sorted(BACKENDS)}")
    raise ValueError(f"backend: expected 'auto' or one of {sorted([*BACKENDS, *PLANNED])}, got {name!r}")


def _choose_deterministic(name: str) -> tuple[str, str]:
    platform = jax.default_backend()
    if platform != "cpu":
        raise NotImplementedError(f"deterministic=True: known to hold on a CPU only, not on {platform}")
    if name not in ("auto", "xla", "xla_deterministic"):
        choose_backend(name)  # raises its own errors
        raise NotImplementedError(f"deterministic=True: expected backend 'auto' or 'xla', got {name!r}")
    return "xla_deterministic", "deterministic=True"


__all__ = ["BACKENDS", "AttendFn", "Batch", "choose_backend"]
