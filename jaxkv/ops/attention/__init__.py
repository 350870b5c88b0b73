"""Attention backends by name (the `backend` that people write)."""

from __future__ import annotations

from collections.abc import Sequence

from jaxkv.ops.attention.base import (
    Attended,
    Attention,
    Backend,
    Batch,
    Heads,
    LatentMaps,
    Needs,
    Place,
    Terms,
)
from jaxkv.ops.attention.distances import Distances
from jaxkv.ops.attention.index import AnyIndex, BlockIndex, Entries, EntryShape, Index, PoolKeys
from jaxkv.ops.attention.mosaic_gpu import MosaicGpu
from jaxkv.ops.attention.pallas_tpu import PallasTpu
from jaxkv.ops.attention.xla import Xla

BACKENDS: dict[str, Backend] = {
    "xla": Xla(),
    "xla_deterministic": Xla(deterministic=True),
    "pallas_tpu": PallasTpu(),
    "mosaic_gpu": MosaicGpu(),
}
PREFERRED = {"tpu": ("pallas_tpu",), "gpu": ("mosaic_gpu",)}
"""What "auto" tries first on a platform."""


def check_backend(name: str) -> None:
    """Raises: ValueError for an unknown name, and for the one that `deterministic=True` takes."""
    names = sorted(BACKENDS.keys() - {"xla_deterministic"})
    if name != "auto" and name not in names:
        raise ValueError(f"backend: expected 'auto' or one of {names}, got {name!r}")


def choose_backend(
    name: str, heads: Sequence[Heads], needs: Sequence[Needs], *, deterministic: bool = False
) -> tuple[str, str]:
    """Returns (backend, reason) for what a person asked for, for KV groups with these heads and
    needs; only "auto" chooses.

    Raises: as `check_backend`, and NotImplementedError for a named backend that cannot do this.
    """
    check_backend(name)
    platform = needs[0].platform
    if deterministic:
        return _choose_deterministic(name, platform)
    if name != "auto":
        if reason := _refusal(name, heads, needs):
            raise NotImplementedError(f"backend={name!r}: {reason}")
        return name, "asked for by name"
    reasons = {other: _refusal(other, heads, needs) for other in PREFERRED.get(platform, ())}
    for other, reason in reasons.items():
        if reason is None:
            return other, f"chosen by auto on a {platform}"
    refused = "; ".join(f"{other}: {reason}" for other, reason in reasons.items())
    return "xla", f"chosen by auto on a {platform}" + (f": {refused}" if refused else "")


def _refusal(name: str, heads: Sequence[Heads], needs: Sequence[Needs]) -> str | None:
    if (policy := needs[0].kv_policy) is not None and not isinstance(BACKENDS[name], Xla):
        return f"kv_policy {policy}: only xla observes, measures, demotes or chooses pages"
    reasons = (BACKENDS[name].refuses(*of_group) for of_group in zip(heads, needs, strict=True))
    return next(filter(None, reasons), None)


def _choose_deterministic(name: str, platform: str) -> tuple[str, str]:
    if platform != "cpu":
        raise NotImplementedError(
            f"deterministic=True: known to hold on a CPU only, not on {platform}"
        )
    if name not in ("auto", "xla"):
        raise NotImplementedError(
            f"deterministic=True: expected backend 'auto' or 'xla', got {name!r}"
        )
    return "xla_deterministic", "deterministic=True"


__all__ = [
    "BACKENDS",
    "AnyIndex",
    "Attended",
    "Attention",
    "Backend",
    "Batch",
    "BlockIndex",
    "Distances",
    "Entries",
    "EntryShape",
    "Heads",
    "Index",
    "LatentMaps",
    "Needs",
    "Place",
    "PoolKeys",
    "Terms",
    "Xla",
    "check_backend",
    "choose_backend",
]
