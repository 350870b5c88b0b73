"""Describes layers that add what n-grams say (`models.ngrams`): how they hash, and their tensors.
Source: transformers' qwen4_exp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, count, islice

from jaxkv.config import is_int
from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import LAYER, Layout, Leaf, Part, leaf
from jaxkv.models.families.delta import MAX_KERNEL
from jaxkv.models.families.hybrid import with_leaves
from jaxkv.models.recurrent import Ngrams
from jaxkv.models.spec import ModelSpec, StateSpec

TABLES = "ple.ple_embedding."
MAX_NGRAM, MAX_TABLES = 16, 4096
SEED_STEP = 10007
"""Between the seeds of layers that add what n-grams say."""


def read_ngrams(config: ConfigReader, linear: list[int], *, channels: int) -> dict[int, Ngrams]:
    """Reads which layers, of those with linear attention, add what n-grams say to streams of so
    many channels in all, and how these are hashed.
    """
    if config.get("ple_layer_ids") in (None, []):
        return {}
    given = config.get("ple_layer_ids")
    if not isinstance(given, list) or not all(is_int(x) and x - 1 in linear for x in given):
        raise config.fail("ple_layer_ids", "a list of layers, the first 1, with linear attention")
    layers = [number - 1 for number in sorted(set(given))]
    end = config.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    vocab = config.size("vocab_size")
    if not is_int(end) or not 0 <= end < vocab:
        raise config.fail("eos_token_id", f"a token below {vocab}: n-grams end there")
    size = config.size("ngram_size", 3, at_least=2, at_most=MAX_NGRAM)
    kernel = config.size("ple_conv_kernel_size", 4, at_least=2, at_most=MAX_KERNEL)
    each = (size - 1) * config.size("heads_per_ngram", 8, at_most=MAX_TABLES)
    if each * len(layers) > MAX_TABLES:
        raise config.fail("heads_per_ngram", f"at most {MAX_TABLES} tables in all layers")
    base = config.size("ngram_vocab_size_base", 20_000_000, at_most=2**30)
    seed = config.size("seed", 1234, at_least=0, at_most=2**63 - 1)
    if (each + 1) * base >= 2**31:
        raise config.fail("ngram_vocab_size_base", "tables with fewer than 2**31 rows in a layer")
    primes = _primes(base)
    return {
        layer: Ngrams(
            multipliers=_multipliers(seed + SEED_STEP * index, size, vocab),
            table_sizes=tuple(islice(primes, each)),
            end=end,
            kernel=kernel,
            channels=channels,
        )
        for index, layer in enumerate(layers)
    }


def _primes(start: int) -> Iterator[int]:
    """Gives the primes from a number on, in order."""
    for number in count(max(2, start)):
        odd = range(3, math.isqrt(number) + 1, 2)
        if number == 2 or (number % 2 and all(number % divisor for divisor in odd)):
            yield number


def _multipliers(seed: int, count: int, vocab: int) -> tuple[int, ...]:
    """Draws odd numbers whose product with any token is less than 2**63, by SplitMix64 (Steele,
    Lea and Flood, 2014).
    """
    most, mask, gamma = max(1, (2**63 - 1) // vocab // 2), 2**64 - 1, 0x9E3779B97F4A7C15
    found = []
    for i in range(1, count + 1):
        x = seed + gamma * (i + 1) & mask
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        found.append(2 * ((x ^ x >> 31) % most) + 1)
    return tuple(found)


def with_ngrams(
    config: ConfigReader, found: tuple[ModelSpec, Layout], layer: int, keeper: Ngrams
) -> tuple[ModelSpec, Layout]:
    """Returns the decoder with what a layer makes of n-grams, whose tables have sizes of their
    own.
    """
    spec, layout = with_leaves(
        found, [layer], lambda leaves: {**leaves, **_leaves(config, found[0], keeper)}
    )
    sizes, prefix = keeper.table_sizes, LAYER.format(layer=layer) + TABLES
    told = {
        f"{prefix}layer_multipliers": keeper.multipliers,
        f"{prefix}ngram_heads_vocab_sizes": sizes,
        f"{prefix}ngram_heads_offsets": (0, *accumulate(sizes[:-1])),
    }
    state = StateSpec(layers=(layer,), mixer=keeper)
    spec = replace(spec, states=(*spec.states, state))
    return spec, replace(layout, told={**layout.told, **told})


def _leaves(config: ConfigReader, spec: ModelSpec, keeper: Ngrams) -> dict[str, Leaf]:
    """Describes the arrays that make of n-grams what joins the streams."""
    hidden, width = spec.hidden_size, keeper.channels
    size, num_tables = config.size("ple_embed_dim", spec.hidden_size), len(keeper.table_sizes)
    if size % num_tables:
        raise config.fail("ple_embed_dim", f"a multiple of the {num_tables} tables")
    unit = config.size("make_ngram_vocab_size_divisible_by", 128)
    num_rows = -(-sum(keeper.table_sizes) // unit) * unit
    table = leaf(
        f"{LAYER}{TABLES}ngram_embedding.weight",
        (num_rows, size // num_tables),
        ("ngrams", "channels"),  # a table may be larger than a device
        pieces="shard_{number}.weight",
    )
    found = {
        "ngram_rows": table,
        "ngram_key": leaf(f"{LAYER}ple.key_proj.weight", (width, size), (None, None)),
        "ngram_value": leaf(f"{LAYER}ple.value_proj.weight", (hidden, size), ("model", None)),
        # A vector here: what no matmul reads is not quantised.
        "ngram_conv": leaf(
            f"{LAYER}ple.conv1d.weight",
            (width * keeper.kernel,),
            (None,),
            part=Part(shape=(width, 1, keeper.kernel)),
        ),
    }
    for name in ("key", "query", "conv"):
        found[f"ngram_{name}_norm"] = leaf(f"{LAYER}ple.norm_{name}.weight", (width,), (None,))
    return found
