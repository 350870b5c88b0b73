"""KV caches in which some layers are stored in another codec than the rest."""

from __future__ import annotations

from typing import Any

from jaxkv.config import is_int
from jaxkv.kv.codecs import Codec, PlainCodec, RotatingCodec, get_codec
from jaxkv.models.spec import ModelSpec

WINDOWED = "sliding_window"

Codecs = tuple[Codec, ...]
"""One for each KV group."""


def exact_layers(spec: ModelSpec, asked: Any) -> frozenset[int]:
    """Returns the layers that `kv_cache_dtype_skip_layers` names: numbers, as such or as text,
    below 0 from the end; or "sliding_window" for all that have one.

    Raises: ValueError for anything else.
    """
    if asked is None:
        return frozenset()
    if not isinstance(asked, (list, tuple)):
        raise ValueError(f"kv_cache_dtype_skip_layers: expected a list, got {asked!r:.80}")
    layers: set[int] = set()
    for one in asked:
        number = int(one) if isinstance(one, str) and one.removeprefix("-").isdecimal() else one
        if one == WINDOWED:
            layers |= {
                layer for group in spec.groups if group.window is not None for layer in group.layers
            }
        elif is_int(number) and -spec.num_layers <= number < spec.num_layers:
            layers.add(number % spec.num_layers)
        else:
            raise ValueError(
                f"kv_cache_dtype_skip_layers: expected layers from {-spec.num_layers} to "
                f"{spec.num_layers - 1} or "
                f"{WINDOWED!r}, got {one!r:.80}"
            )
    return frozenset(layers)


def group_codecs(
    spec: ModelSpec, name: str, skip_layers: Any, *, platform: str, dtype: str
) -> Codecs:
    """Returns a codec for each KV group of a model whose `skip_layers` are apart: the model's own
    `dtype` for those layers, the codec called `name` for the rest.

    Raises: ValueError as `get_codec` and `exact_layers` do, and if that codec does not quantise and
    layers are named; NotImplementedError if the model's keys do not allow it.
    """
    codec, exact = get_codec(name, platform=platform, dtype=dtype), exact_layers(spec, skip_layers)
    if exact and isinstance(codec, PlainCodec):
        raise ValueError(
            f"kv_cache_dtype_skip_layers: expected None with kv_cache_dtype {codec.name}, got "
            f"{skip_layers!r:.80}"
        )
    check_keys(spec, codec)
    plain = get_codec("auto", platform=platform, dtype=dtype)
    codecs = tuple(plain if exact.issuperset(group.layers) else codec for group in spec.groups)
    check_widths(spec, codecs)
    return codecs


def check_widths(spec: ModelSpec, codecs: Codecs) -> None:
    """Raises: ValueError for heads of a size that a codec does not have, with the model's own size
    where pages hold more of them.
    """
    for group, codec in zip(spec.groups, codecs, strict=True):
        try:
            codec.width(group.head_dim)
        except ValueError as error:
            if group.head_dim == spec.head_dim:
                raise
            raise ValueError(
                f"{error}, since pages hold more of {spec.family}'s heads than their "
                f"{spec.head_dim} numbers: int8 takes any size"
            ) from error


def check_keys(spec: ModelSpec, codec: Codec) -> None:
    """Raises: NotImplementedError for a codec that rounds the positions which keys hold where
    scores fall with distance, for one that rotates what keys are chosen by into the rest, and for
    one that rounds a row as a whole where entries lie across rows.
    """
    if spec.attention.index is not None and isinstance(codec, RotatingCodec):
        raise NotImplementedError(
            f"{spec.family}: expected a kv_cache_dtype without a rotation, since its tokens choose "
            f"keys by a part of what pages hold, got {codec.name}"
        )
    if spec.attention.near and not isinstance(codec, PlainCodec):
        raise NotImplementedError(
            f"{spec.family}: expected pages in bfloat16 or float32, since an entry lies across the "
            f"rows of its tokens, got {codec.name}: leave kv_cache_dtype and kv_policy out"
        )
    if spec.attention.slopes and not isinstance(codec, PlainCodec):
        raise NotImplementedError(
            f"{spec.family}: expected pages in bfloat16 or float32, since keys hold their position "
            f"(ALiBi), got {codec.name}: leave kv_cache_dtype and kv_policy out"
        )


def describe_codecs(spec: ModelSpec, codecs: Codecs) -> str:
    """Names the codecs for people: "int8", or "int8, layers 0, 3 in bfloat16"."""
    layers: dict[str, list[int]] = {}
    for group, codec in zip(spec.groups, codecs, strict=True):
        layers.setdefault(codec.name, []).extend(group.layers)
    main, *others = sorted(layers, key=lambda name: name in ("bfloat16", "float32"))
    return main + "".join(
        f", layers {', '.join(map(str, sorted(layers[name])))} in {name}" for name in others
    )
