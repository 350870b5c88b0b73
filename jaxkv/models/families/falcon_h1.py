"""Falcon-H1: Mamba2 and attention side by side in every layer, with factors on everything. Source:
arXiv 2507.22448.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.bamba import NAMES
from jaxkv.models.families.base import QKV, Layout, mlp_biased, read_decoder
from jaxkv.models.families.hybrid import with_mixer
from jaxkv.models.families.ssm import mamba2_leaves, read_mamba2
from jaxkv.models.recurrent.mamba2 import PROJECTED
from jaxkv.models.spec import AttentionSpec, ModelSpec, Scales


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    hidden, head_dim = config.size("hidden_size"), config.head_dim
    into, out = (config.number(f"attention_{one}_multiplier", 1.0) for one in ("in", "out"))
    has_biases = config.flag("attention_bias", False)
    if has_biases and (into, out) != (1.0, 1.0):
        raise config.fail("attention_bias", "false, because attention has multipliers (not built)")
    gate, down = _factors(config, "mlp_multipliers", 2)
    biased = (*QKV, "o") * has_biases + mlp_biased(config)
    spec, _ = read = read_decoder(
        config,
        names=NAMES,
        biased=biased,
        attention=AttentionSpec(
            scale=head_dim**-0.5 * config.number("key_multiplier", 1.0) * into**2
        ),
        scales=Scales(
            embed=config.number("embedding_multiplier", 1.0),
            values=into * out,
            gate=gate,
            mlp=down,
            logits=config.number("lm_head_multiplier", 1.0),
        ),
    )
    has_size = config.get("mamba_d_ssm") is not None
    inner = config.size("mamba_d_ssm") if has_size else config.size("mamba_expand", 2) * hidden
    mixer = read_mamba2(
        config,
        inner=inner,
        norm_eps=spec.norm_eps,
        activation=config.choice("hidden_act", "silu", ("silu",)),
        norms_first=config.flag("mamba_norm_before_gate", True),
        factors=_factors(config, "ssm_multipliers", len(PROJECTED)),
        in_factor=config.number("ssm_in_multiplier", 1.0),
        out_factor=config.number("ssm_out_multiplier", 1.0),
    )
    leaves = mamba2_leaves(
        mixer,
        f"{NAMES.layer}mamba.",
        hidden,
        has_norm=config.flag("mamba_rms_norm", False),
        has_conv_bias=config.flag("mamba_conv_bias", True),
        has_in_bias=config.flag("mamba_proj_bias", False),
        has_out_bias=config.flag("projectors_bias", False),
    )
    return with_mixer(read, range(spec.num_layers), mixer, leaves, beside=True)


def _factors(config: ConfigReader, key: str, count: int) -> tuple[float, ...]:
    return (1.0,) * count if config.get(key) is None else config.numbers(key, count)
