"""Several streams: what a token gets has the same bits whatever the number of tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import numpy as np

import families
from jaxkv.models import hyper
from jaxkv.models.families import ConfigReader, read_family
from jaxkv.models.spec import ModelSpec
from jaxkv.ops.matrices import Matrix
from jaxkv.programs.compiler_options import COMPILER_OPTIONS

NUM_STREAMS, HIDDEN, NUM_TOKENS = 4, 64, 64


@partial(jax.jit, static_argnums=0, compiler_options=COMPILER_OPTIONS.get("cpu"))
def between(
    spec: ModelSpec, x_NTD: jax.Array, y_TD: jax.Array, w: dict[str, jax.Array]
) -> tuple[jax.Array, ...]:
    """Returns what comes into a block, the streams behind it, and hidden states; tokens come first."""
    matrices = {name: Matrix(leaf) if leaf.ndim == 2 else leaf for name, leaf in w.items()}
    x_TD, leave = hyper.enter(x_NTD, matrices, "block", spec)
    return x_TD, leave(y_TD).transpose(1, 0, 2), hyper.joined(x_NTD, w, spec)


def test_the_number_of_tokens_changes_no_bit():
    spec, _ = read_family(ConfigReader(families.text_config("hy_v4"), "config.json"))
    asked = replace(spec.scales.hyper, num_streams=NUM_STREAMS)
    spec = replace(spec, scales=replace(spec.scales, hyper=asked))
    rng = np.random.default_rng(0)
    w = {}
    for name, rows, scales in (("block", 2 * NUM_STREAMS, 2), (hyper.JOIN, NUM_STREAMS, 1)):
        shapes = {"": (rows, NUM_STREAMS * HIDDEN), "_bias": (rows,), "_scale": (scales,)}
        w |= {
            name + end: rng.normal(0, 0.1 if end == "" else 1, shape)
            for end, shape in shapes.items()
        }
    w = {name: x.astype(np.float32) for name, x in w.items()}
    x_NTD = rng.normal(size=(NUM_STREAMS, NUM_TOKENS, HIDDEN)).astype(np.float32)
    y_TD = rng.normal(size=(NUM_TOKENS, HIDDEN)).astype(np.float32)
    assert_same_bits(spec, x_NTD, y_TD, w)


def assert_same_bits(spec, x_NTD, y_TD, w) -> None:
    whole = between(spec, x_NTD, y_TD, w)
    for count in (2, 7, 16):
        part = between(spec, x_NTD[:, :count], y_TD[:count], w)
        for got, want in zip(part, whole, strict=True):
            np.testing.assert_array_equal(got, want[:count])


def test_the_number_of_tokens_changes_no_bit_of_gated_streams():
    spec, _ = read_family(ConfigReader(families.text_config("qwen4_exp_text"), "config.json"))
    rng, width, rank = np.random.default_rng(0), NUM_STREAMS * HIDDEN, 24
    shapes = {"down": (rank, width), "up": (width, rank), "inject": (NUM_STREAMS, width)}
    w = {}
    for name in ("block", hyper.JOIN):
        w[f"{name}_norm"] = rng.normal(size=width)
        w |= {f"{name}_{end}": rng.normal(0, 0.1, shape) for end, shape in shapes.items()}
    w = {name: x.astype(np.float32) for name, x in w.items()}
    x_NTD = rng.normal(size=(NUM_STREAMS, NUM_TOKENS, HIDDEN)).astype(np.float32)
    y_TD = rng.normal(size=(NUM_TOKENS, HIDDEN)).astype(np.float32)
    assert_same_bits(spec, x_NTD, y_TD, w)
