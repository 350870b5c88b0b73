"""Derives the limits of an engine, its dtype and its page tables from its options, the model and
the platform.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from jaxkv.build.codecs import Codecs
from jaxkv.build.options import EngineOptions
from jaxkv.build.speculation import read_speculation
from jaxkv.config import DECODE_STEPS, EngineConfig, tpu_page_size
from jaxkv.kv.layout import HeadMajorLayout
from jaxkv.models.spec import ModelSpec
from jaxkv.ops import native
from jaxkv.ops.attention import Heads

MAX_TABLES = 8
"""Page tables of a row at most: each costs the host time in every step."""


def auto_dtype(platform: str) -> str:
    """Returns bfloat16, except where XLA multiplies on a CPU without instructions for it: float32
    is faster there.
    """
    if platform != "cpu":
        return "bfloat16"
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text() if cpuinfo.is_file() else ""
    has_bfloat16 = "avx512_bf16" in flags or "amx_bf16" in flags
    return "bfloat16" if has_bfloat16 or native.matmul_unused_because() is None else "float32"


def auto_page_size(platform: str, heads_G: tuple[Heads, ...] = (), codecs_G: Codecs = ()) -> int:
    """Returns the tokens of a page where none are asked for: on a TPU by what the largest page of
    all KV groups has on a device.
    """
    if platform != "tpu" or not heads_G:
        return 16 if platform == "cpu" else 64
    pages = [
        HeadMajorLayout(
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            page_size=64,
            codec=codec,
            latent_dim=heads.latent_dim,
        )
        for heads, codec in zip(heads_G, codecs_G, strict=True)
    ]
    return tpu_page_size(max(page.nbytes for page in pages) // 64)


def make_limits(
    options: EngineOptions, spec: ModelSpec, platform: str, *, page_size: int
) -> EngineConfig:
    """Returns the limits of an engine on a platform; the pool, one page, comes later. page_size:
    where none is asked for.

    Raises: ValueError for a figure out of range.
    """
    on_cpu, asked = platform == "cpu", options
    page_size = max(page_size, spec.entry_len)
    limits = EngineConfig(
        max_model_len=spec.max_len if asked.max_model_len is None else asked.max_model_len,
        max_num_seqs=(64 if on_cpu else 256) if asked.max_num_seqs is None else asked.max_num_seqs,
        max_num_batched_tokens=asked.max_num_batched_tokens,
        block_size=page_size if asked.block_size is None else asked.block_size,
        num_pages=1,
        decode_steps=DECODE_STEPS,
        seed=asked.seed,
        max_logprobs=spec.vocab_size if asked.max_logprobs == -1 else asked.max_logprobs,
        has_contexts=spec.depends_on_context,
        num_adapters=asked.max_loras if asked.enable_lora else 0,
    )
    num_ahead = 0
    if asked.speculative_config is not None:
        speculation = read_speculation(asked.speculative_config, limits.max_num_seqs)
        # A multiple of the tokens of a step whose proposals all hold: none of those are cut off.
        size = speculation.num_tokens + 1
        steps = -(-limits.decode_steps // size) * size
        limits = replace(limits, speculation=speculation, decode_steps=steps)
        num_ahead = speculation.num_slots
    if asked.num_state_snapshots and not (spec.states and asked.enable_prefix_caching):
        raise ValueError(
            f"num_state_snapshots: expected None for a model without recurrent states, or without "
            f"a prefix cache, got {asked.num_state_snapshots}"
        )
    if spec.states:
        given, caches = asked.num_state_snapshots, asked.enable_prefix_caching
        kept = max(8, limits.max_num_seqs // 4) if given is None else given
        limits = replace(limits, num_slots=limits.max_num_seqs + kept * caches + num_ahead)
    if limits.max_model_len > spec.max_len:
        raise ValueError(
            f"max_model_len: expected at most {spec.max_len} (the checkpoint's), got "
            f"{asked.max_model_len!r}"
        )
    if limits.block_size % spec.entry_len:
        raise ValueError(
            f"block_size: expected a multiple of the {spec.entry_len} tokens that {spec.family} "
            f"makes one entry of, got {limits.block_size}"
        )
    return limits


def with_windows(
    spec: ModelSpec, limits: EngineConfig, codecs: Codecs
) -> tuple[ModelSpec, EngineConfig]:
    """Gives the layers as many page tables as save the most bytes of the longest rows: one for all
    of them, or one for each of several KV groups of about as many layers.

    Groups of about as many layers, since one pool then has pages for all: whatever lengths its rows
    have, what one group gives back another can take. A group with fewer layers than the largest
    leaves part of its pages unused.
    """

    def seen(window: int | None) -> int:
        # A state is kept beside the page that ends with its token: that page has to stay.
        return max(2, window) if window and limits.has_states else window or 0

    shared = replace(limits, windows=(seen(spec.longest_window),))
    if len({group.window for group in spec.groups}) == 1 or not are_alike(spec, codecs):
        return spec, shared
    longest, best = -(-limits.max_model_len // limits.block_size), (spec, shared)
    least = len(spec.kv_layers) * shared.row_pages_for(longest)
    for size in range(max(len(group.layers) for group in spec.groups), 0, -1):
        cut = spec.cut(size)
        if len(cut.groups) > MAX_TABLES:
            break
        own = replace(limits, windows=tuple(seen(group.window) for group in cut.groups))
        if (num_pages := size * own.row_pages_for(longest)) < least:
            least, best = num_pages, (cut, own)
    return best


def are_alike(spec: ModelSpec, codecs: Codecs) -> bool:
    """Tells whether the pages of all KV groups are alike."""
    heads = {(group.num_kv_heads, group.head_dim, group.latent_dim) for group in spec.groups}
    return len(heads) == 1 and len(set(codecs)) == 1
