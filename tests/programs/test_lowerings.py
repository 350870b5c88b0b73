"""Programs of all mechanisms are traced by a jax beside which there is no torch to compare with:
each gives back what it is given to write in.
"""

from collections import Counter
from importlib.util import find_spec
from typing import Any

import jax
import pytest

from families import MECHANISMS, hf_config
from jaxkv.build.blueprint import Blueprint, make_blueprint
from jaxkv.build.options import EngineOptions
from jaxkv.models.families import ConfigReader, read_family
from jaxkv.programs.lowerings import KINDS
from jaxkv.weights.tree import with_adapters
from tiny import tiny_config

pytestmark = pytest.mark.skipif(
    find_spec("torch") is not None, reason="elsewhere these programs run, beside transformers"
)

LIMITS = {"dtype": "float32", "block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 16}
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "adapters": {"enable_lora": True},
    "demoted pages": {"kv_policy": "entropy:int8", "kv_budget": 64},
    "measured pages": {"kv_policy": "page_norm", "kv_budget": 64},
    "pages that are chosen": {"kv_policy": "quest", "kv_budget": 64},
    "proposed tokens": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "int4 weights": {"quantization": "int4"},
}


def blueprint_of(config: dict[str, Any], **options: Any) -> Blueprint:
    model = read_family(ConfigReader(config, "config.json"))
    return make_blueprint(EngineOptions(**LIMITS | options), *model, jax.devices()).with_pages(16)


def assert_gives_back(blueprint: Blueprint, kinds: set[str]) -> None:
    """What is donated to a program has the shape of a result."""
    weights = with_adapters(blueprint.abstract_weights(), blueprint.empty_adapters())
    programs = blueprint.programs(weights)
    for kind, size in programs._every:
        if kind in kinds:
            step = KINDS[kind].lower(programs._lowerings, size)
            traced = step.jitted.trace(*step.arguments)
            given = [x for x in jax.tree.leaves(traced.args_info) if x.donated]
            donated, made = (
                Counter((x.shape, x.dtype) for x in jax.tree.leaves(tree))
                for tree in (given, traced.out_info)
            )
            assert made
            assert not donated - made
            assert donated or kind in ("draw", "measure")


# And two recurrences that others have in other forms.
@pytest.mark.parametrize("variant", [*sorted(MECHANISMS), "lfm2", "recurrent_gemma"])
def test_steps_of_every_mechanism(variant):
    assert_gives_back(blueprint_of(hf_config(variant).to_dict()), {"step"})


@pytest.mark.parametrize("options", OPTIONS)
def test_programs_of_every_kind(options):
    config = tiny_config("qwen3", vocab_size=151)
    assert_gives_back(blueprint_of(config, **OPTIONS[options]), set(KINDS))
