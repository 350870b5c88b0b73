"""Names what `jaxkv selftest` tries: shapes that have every mechanism of the kernels between them,
and what an interpreter runs in their place on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jaxkv.build.selftest import make_cases
from jaxkv.kv.codecs import get_codec
from jaxkv.ops.attention import BACKENDS, Backend, Heads
from jaxkv.ops.attention.mosaic_gpu import MosaicGpu
from jaxkv.ops.attention.pallas_tpu import PallasTpu
from jaxkv.programs.selftest import WINDOW, Case, cases_of

PLATFORMS = {"pallas_tpu": "tpu", "mosaic_gpu": "gpu"}
"""Kernels are for one of these."""

GPU_INTERPRETED_FROM = (0, 12)
"""A jax before has an interpreter that does not take the GPU kernels: that of 0.10 knows no
transposed parts of references, that of 0.11 has each warpgroup see the last arrival at a barrier,
which nobody waits for.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Describes one shape of `kernel`, and whether it is tried also where not all are asked for.
    is_part: what it does over a device's part of pages, of which there is one.
    """

    kernel: str
    heads: Heads
    codec: str = "bfloat16"
    page_size: int = 64
    is_usual: bool = True
    is_part: bool = False

    @property
    def name(self) -> str:
        return f"{self.kernel}, parts" if self.is_part else self.kernel

    @property
    def backend(self) -> Backend:
        """Returns the backend as it is on a device."""
        return self._over_parts(BACKENDS[self.kernel])

    def _over_parts(self, backend: Any) -> Backend:
        return replace(backend, tokens_over="devices") if self.is_part else backend

    def cases(self) -> list[Case]:
        """Returns its cases for a device."""
        codec = get_codec(self.codec, platform=PLATFORMS[self.kernel], dtype=self.dtype)
        return make_cases(self.heads, codec, self.page_size)

    @property
    def dtype(self) -> str:
        return "float32" if self.codec == "float32" else "bfloat16"

    def interpreted(self) -> tuple[Backend, list[Case]]:
        """Returns an interpreted backend and smaller cases that have the same mechanisms: of as
        many KV heads as lie side by side, with the smallest pages and blocks of two.
        """
        codec = get_codec(self.codec, platform=PLATFORMS[self.kernel], dtype=self.dtype)
        kv_heads = min(2, self.heads.num_kv_heads)
        heads = replace(
            self.heads,
            num_kv_heads=kv_heads,
            num_heads=kv_heads * min(2, self.heads.num_heads // self.heads.num_kv_heads),
        )
        if heads.latent_dim is not None:
            heads = replace(heads, head_dim=160, latent_dim=128)
        smallest = SMALLEST_PAGES[self.kernel].get(self.codec, 16)
        backend = self._over_parts(BACKENDS_ON_CPU[self.kernel](heads))
        return backend, cases_of(heads, codec, smallest, longest=5 * smallest)


SMALLEST_PAGES = {"pallas_tpu": {"int8": 32, "int4": 64}, "mosaic_gpu": {"int8": 64, "int4": 64}}


def _tpu(heads: Heads) -> Backend:
    from jax.experimental.pallas import tpu as pltpu

    from kernels_pallas.tpu import Tiles, layout_of, padded_head_dim

    joined = 1
    if heads.latent_dim is None:
        head_dim = padded_head_dim(heads.head_dim)
        joined = layout_of(kv_heads=heads.num_kv_heads, head_dim=head_dim).joined
    tiles = Tiles(decode_pages=2, decode_heads=joined, prefill_pages=2, prefill_queries=16)
    return PallasTpu(interpret=pltpu.InterpretParams(detect_races=True), tiles=tiles)


def _gpu(heads: Heads) -> Backend:
    # The one interpreter of jax that models a GPU's copies and barriers has no public name.
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return MosaicGpu(interpret=InterpretGPUParams(detect_races=True), num_processors=2)


BACKENDS_ON_CPU = {"pallas_tpu": _tpu, "mosaic_gpu": _gpu}


def _heads(num_heads: int, num_kv_heads: int, head_dim: int, **others: Any) -> Heads:
    named = {"window": None, **others}
    return Heads(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, **named)


LLAMA = _heads(32, 8, 128)
CUT = {"window": WINDOW, "has_sinks": True}
LATENT = _heads(16, 1, 576, latent_dim=512)

SHAPES = (
    Shape(kernel="pallas_tpu", heads=LLAMA),
    Shape(kernel="pallas_tpu", heads=LLAMA, codec="int8"),
    Shape(kernel="pallas_tpu", heads=LLAMA, codec="int4"),
    Shape(kernel="pallas_tpu", heads=LATENT),
    Shape(
        kernel="pallas_tpu", heads=_heads(128, 1, 576, latent_dim=512), page_size=16, is_part=True
    ),
    Shape(
        kernel="pallas_tpu",
        heads=_heads(8, 1, 128, cap=30.0),
        page_size=16,
        is_usual=False,
        is_part=True,
    ),
    # Two heads side by side in a register; key and value side by side.
    Shape(kernel="pallas_tpu", heads=_heads(32, 8, 64, cap=30.0, **CUT)),
    Shape(kernel="pallas_tpu", heads=_heads(8, 1, 64, cap=30.0), is_usual=False),
    Shape(kernel="pallas_tpu", heads=_heads(8, 1, 128, **CUT), page_size=16, is_usual=False),
    Shape(kernel="pallas_tpu", heads=_heads(8, 4, 256), page_size=128, is_usual=False),
    Shape(kernel="pallas_tpu", heads=LLAMA, codec="float32", is_usual=False),
    Shape(kernel="pallas_tpu", heads=_heads(32, 8, 64, **CUT), codec="int8", is_usual=False),
    Shape(kernel="pallas_tpu", heads=_heads(8, 1, 128, cap=30.0), codec="int4", is_usual=False),
    Shape(kernel="pallas_tpu", heads=LATENT, codec="int8", is_usual=False),
    Shape(kernel="mosaic_gpu", heads=LLAMA),
    Shape(kernel="mosaic_gpu", heads=LLAMA, codec="int8"),
    Shape(kernel="mosaic_gpu", heads=LLAMA, codec="int4"),
    Shape(kernel="mosaic_gpu", heads=_heads(32, 8, 64, cap=30.0, **CUT), page_size=16),
    Shape(kernel="mosaic_gpu", heads=_heads(8, 1, 128, **CUT), page_size=16, is_usual=False),
    Shape(kernel="mosaic_gpu", heads=_heads(8, 4, 256), page_size=128, is_usual=False),
    Shape(kernel="mosaic_gpu", heads=_heads(8, 4, 256, **CUT), codec="int8", is_usual=False),
    Shape(kernel="mosaic_gpu", heads=_heads(32, 8, 64, cap=30.0), codec="int4", is_usual=False),
)
