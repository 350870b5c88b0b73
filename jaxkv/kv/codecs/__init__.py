"""Page codecs by name (the `kv_cache_dtype` that people write)."""

from __future__ import annotations

from jaxkv.config import bfloat16_as_bits
from jaxkv.kv.codecs.base import Codec
from jaxkv.kv.codecs.plain import PlainCodec

CODECS = ("bfloat16", "float32")


def get_codec(name: str, *, platform: str) -> Codec:
    """The codec called `name` in the form that `platform` (cpu, gpu, tpu) handles well.

    Raises: ValueError for an unknown name, listing the known ones.
    """
    if name not in CODECS:
        raise ValueError(f"kv_cache_dtype: expected auto or one of {', '.join(CODECS)}, got {name!r}")
    return PlainCodec(dtype=name, as_bits=name == "bfloat16" and bfloat16_as_bits(platform))


__all__ = ["CODECS", "Codec", "PlainCodec", "get_codec"]
