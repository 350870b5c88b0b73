"""Reads what config.json says of rotary embeddings."""

from __future__ import annotations

import math
from dataclasses import replace

from jaxkv.models.config_reader import MAX_SIZE, ConfigReader
from jaxkv.models.spec import RopeSpec

KINDS = ("default", "linear", "dynamic", "llama3", "longrope", "proportional", "yarn")
ALSO = {"su": "longrope", "mrope": "default"}
"""Older names, and what is the same for text alone."""


def read_rope(
    config: ConfigReader,
    section: ConfigReader | None = None,
    *,
    head_dim: int | None = None,
    interleaved: bool = False,
    partly: bool = False,
    reverse: bool = False,
) -> RopeSpec:
    """Reads one embedding from its section, by default the one that all layers share; what that
    leaves out is in `config`.

    head_dim: by default that of the config. partly: the family has heads of which a part is
    rotated.
    """
    rope = rope_section(config) if section is None else section
    head_dim = config.head_dim if head_dim is None else head_dim
    kind = _read_kind(rope)
    theta = config.number("rope_theta", 10000.0, at_least=1.001)
    theta = rope.number("rope_theta", theta, at_least=1.001)
    part = config.number("partial_rotary_factor", 1.0)
    part = rope.number("partial_rotary_factor", part)
    dim = head_dim if kind == "proportional" else int(head_dim * part)
    if head_dim % 2:
        raise config.fail("head_dim", f"an even number (rotary embedding pairs it), not {head_dim}")
    if not partly and dim != head_dim:
        reader = rope if "partial_rotary_factor" in rope.values else config
        raise reader.fail("partial_rotary_factor", "1 (this family rotates whole heads)")
    if not 2 <= dim <= head_dim or dim % 2:
        raise rope.fail(
            "partial_rotary_factor",
            f"a part of head_dim={head_dim} that is an even number of dimensions",
        )
    plain = RopeSpec(
        kind=kind,
        theta=theta,
        dim=0 if dim == head_dim else dim,
        interleaved=interleaved,
        reverse=reverse,
    )
    if kind == "default":
        return plain
    if kind == "proportional":
        return replace(plain, part=part, factor=rope.number("factor", 1.0))
    return _scaled(plain, config, rope, num_pairs=dim // 2)


def _read_kind(rope: ConfigReader) -> str:
    is_older = rope.get("type") is not None and "rope_type" not in rope.values
    key = "type" if is_older else "rope_type"
    given = rope.get(key, "default")
    kind = ALSO.get(given, given) if isinstance(given, str) else given
    if kind not in KINDS:
        raise rope.fail(key, ", ".join(KINDS[:-1]) + " or " + KINDS[-1])
    return str(kind)


def _scaled(
    plain: RopeSpec, config: ConfigReader, rope: ConfigReader, *, num_pairs: int
) -> RopeSpec:
    """Reads the parameters of an embedding that is made for longer sequences than it was trained
    with. num_pairs: of dimensions that are rotated.
    """
    if plain.kind == "linear":
        return replace(plain, factor=rope.number("factor"))
    max_len = config.max_len
    if plain.kind == "dynamic":
        factor = rope.number("factor", at_least=1.0)
        return replace(plain, factor=factor, original_max_len=max_len)
    original_max_len = rope.size("original_max_position_embeddings", max_len)
    # Beside the section it counts more than within, as in transformers.
    original_max_len = config.size("original_max_position_embeddings", original_max_len)
    plain = replace(plain, original_max_len=original_max_len)
    if plain.kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high < low:  # equal ones, as Llama 4 Scout has, leave nothing between
            raise rope.fail("high_freq_factor", f"at least low_freq_factor={low}")
        factor = rope.number("factor")
        return replace(plain, factor=factor, low_freq_factor=low, high_freq_factor=high)
    if plain.kind == "longrope":
        return replace(
            plain,
            attention_factor=_longrope_attention_factor(rope, max_len, original_max_len),
            short_factors=rope.numbers("short_factor", num_pairs),
            long_factors=rope.numbers("long_factor", num_pairs),
        )
    factor = rope.number("factor", max_len / original_max_len)
    return replace(
        plain,
        factor=factor,
        beta_fast=rope.number("beta_fast", 32.0, at_least=1e-3),
        beta_slow=rope.number("beta_slow", 1.0, at_least=1e-3),
        attention_factor=_yarn_attention_factor(rope, factor),
        truncate=rope.flag("truncate", True),
    )


def _longrope_attention_factor(rope: ConfigReader, max_len: int, original_max_len: int) -> float:
    if original_max_len < 2:
        key = "original_max_position_embeddings"
        shown = rope.replaced(**{key: original_max_len})
        raise shown.fail(key, "a number >= 2 (longrope divides by its logarithm)")
    factor = rope.number("factor", max_len / original_max_len)
    stretch = 1 + math.log(max(factor, 1)) / math.log(original_max_len)
    return rope.number("attention_factor", math.sqrt(stretch))


def read_layer_ropes(config: ConfigReader, kinds: list[str]) -> tuple[RopeSpec, ...]:
    """Reads each layer's embedding by its kind, such as "sliding_attention", under which
    `rope_parameters` has it; one that is there for all layers is that of all.
    """
    sections = config.section("rope_parameters")
    if not any(kind in sections.values for kind in kinds):
        return (read_rope(config),) * len(kinds)
    if config.get("rope_scaling") and config.get("rope_scaling") != sections.values:
        raise config.fail("rope_scaling", "none beside rope_parameters for each kind of layer")
    config = config.replaced(original_max_position_embeddings=None)
    of_kind = {kind: read_rope(config, sections.section(kind)) for kind in dict.fromkeys(kinds)}
    return tuple(of_kind[kind] for kind in kinds)


def rope_section(config: ConfigReader) -> ConfigReader:
    """Returns the section in either spelling: `rope_parameters` (transformers 5), or `rope_scaling`
    beside `rope_theta` (older files).
    """
    rope, older = config.section("rope_parameters"), config.section("rope_scaling")
    differs = any(rope.values.get(key) != value for key, value in older.values.items())
    if rope.values and differs:
        raise config.fail(
            "rope_scaling",
            "none beside a different rope_parameters: merge them into rope_parameters",
        )
    return rope if rope.values else older


def _yarn_attention_factor(rope: ConfigReader, factor: float) -> float:
    """Returns the factor on cos and sin: given, or 0.1 ln(factor) + 1 (arXiv 2309.00071, section
    3.4), or DeepSeek's mscale.
    """

    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        above, below = (rope.number(key) for key in ("mscale", "mscale_all_dim"))
        return yarn_mscale(above, factor) / yarn_mscale(below, factor)
    return yarn_mscale(1.0, factor)


def yarn_mscale(weight: float, factor: float) -> float:
    """Returns by what YaRN makes scores, on either side, larger. Source: arXiv 2309.00071, section
    3.4, with DeepSeek's weight.
    """
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def extended_len(rope: RopeSpec, max_len: int) -> int:
    """Returns the longest context that the scaled embedding is meant for: what vLLM derives from
    the same keys.
    """
    if rope.kind in ("linear", "dynamic"):
        return min(int(max_len * rope.factor), MAX_SIZE)
    if rope.kind == "yarn":
        return min(max(max_len, int(rope.original_max_len * rope.factor)), MAX_SIZE)
    return max_len
