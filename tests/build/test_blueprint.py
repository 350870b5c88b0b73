"""What an engine would be is known before there are weights, and is the same wherever it is asked."""

import json
from dataclasses import dataclass, replace
from types import SimpleNamespace

import jax
import pytest

from jaxkv import LLM
from jaxkv.build import limits
from jaxkv.build.blueprint import Blueprint, make_blueprint
from jaxkv.build.options import EngineOptions
from jaxkv.models.families import ConfigReader, read_family
from jaxkv.ops.attention import BACKENDS
from jaxkv.ops.attention.xla import Xla
from jaxkv.programs.compiled import Programs
from jaxkv.testing import blueprint_of, engine_of, model_of
from jaxkv.tools.chips import CountedDevice, parse_target
from jaxkv.tools.deployment import deploy
from tiny import SMALL, make_checkpoint, tiny_config

OPTIONS = {"dtype": "float32", "block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 32}
POLICIES = [
    {},
    {"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": (0,)},
    {"kv_policy": "streaming:int8", "kv_budget": 64},
    {"kv_policy": "quest", "kv_budget": 64},
]


def blueprint_for(variant: str, devices: list, **options: object) -> Blueprint:
    spec, layout = read_family(ConfigReader(tiny_config(variant), "config.json"))
    return make_blueprint(EngineOptions(**OPTIONS | options), spec, layout, devices)


def shapes(tree: object) -> object:
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def names(programs: Programs) -> tuple:
    return programs.num_programs, programs.token_buckets, programs.row_buckets, programs.wide_bytes


@pytest.mark.parametrize("options", POLICIES, ids=lambda one: "-".join(map(str, one.values())))
def test_the_pool_is_as_abstract_and_as_many_bytes_as_the_blueprint_says(options):
    blueprint = blueprint_for("qwen3", jax.devices(), **options)
    pages = 6 * max(1, blueprint.limits.row_pages)  # so that no part of a demoted page is rounded
    blueprint = blueprint.with_pages(pages)
    kv = blueprint.empty_kv()
    assert shapes(kv) == shapes(blueprint.abstract_kv())
    assert abs(kv.nbytes - pages * blueprint.page_nbytes) < pages


@pytest.mark.parametrize("options", POLICIES, ids=lambda one: "-".join(map(str, one.values())))
def test_an_engine_and_a_plan_of_the_same_model_agree(tmp_path, options):
    """On page bytes, bytes of weights, limits and programs; the plan has a chip's backend."""
    checkpoint = make_checkpoint(tmp_path, tiny_config("qwen3"))
    given = OPTIONS | {"max_model_len": 128} | options
    llm = LLM(checkpoint, skip_tokenizer_init=True, lazy_compile=True, **given)
    planned = deploy(checkpoint, parse_target("v6e"), backend="xla", **given).blueprint
    built = blueprint_of(llm)
    # Pages of small heads are padded on a chip, so that other demoted ones take as many bytes.
    assert planned.page_nbytes > built.page_nbytes
    here = replace(planned.on(jax.devices()), limits=built.limits)
    assert here.page_nbytes == built.page_nbytes
    assert planned.weight_bytes == built.weight_bytes
    if not built.fits_keys:
        assert built.weight_bytes == model_of(llm).weight_bytes
    limits = planned.with_pages(built.limits.num_pages).limits
    assert replace(limits, low_row_pages=built.limits.low_row_pages) == built.limits
    assert (planned.codecs, planned.backend) == (built.codecs, built.backend)
    assert names(here.programs(here.abstract_weights())) == names(engine_of(llm).programs)
    assert shapes(here.abstract_weights()) == shapes(model_of(llm).weights)


def test_a_field_of_a_backend_that_is_an_option_has_its_value(monkeypatch):
    @dataclass(frozen=True)
    class Seeded(Xla):
        seed: int = 0

    monkeypatch.setitem(BACKENDS, "seeded", Seeded())
    blueprint = blueprint_for("llama", jax.devices(), backend="seeded", seed=7)
    assert blueprint.attention == Seeded(seed=7)
    programs = blueprint.programs(blueprint.abstract_weights())
    assert programs.backend == blueprint.attention
    exact = blueprint_for("llama", jax.devices(), deterministic=True)
    assert exact.attention == Xla(deterministic=True)


def test_a_blueprint_needs_neither_weights_nor_devices(tmp_path):
    """A directory with a config alone: everything is known, and what is wrong is said."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama")))
    before = len(jax.live_arrays())
    blueprint = blueprint_for("llama", [CountedDevice(0)], dtype="auto", block_size=None)
    assert (blueprint.platform, blueprint.dtype) == ("tpu", "bfloat16")
    assert (blueprint.limits.block_size, blueprint.limits.num_pages) == (128, 1)
    assert len(jax.live_arrays()) == before
    for wrong, message in (
        ({"kv_cache_dtype": "int2"}, "kv_cache_dtype: expected auto or one of"),
        ({"max_model_len": 10**6}, "max_model_len: expected at most"),
        ({"num_state_snapshots": 2}, "num_state_snapshots: expected None for a model without"),
        ({"kv_budget": 64}, "kv_budget: expected None with kv_policy full, got 64"),
    ):
        with pytest.raises(ValueError, match=message):
            LLM(tmp_path, **SMALL | wrong)


def test_what_multiplies_says_which_dtype_a_cpu_has_by_itself(monkeypatch):
    monkeypatch.setattr(limits, "Path", lambda _: SimpleNamespace(is_file=lambda: False))
    reasons = {None: "bfloat16", "llvmlite is not installed": "float32"}
    for reason, dtype in reasons.items():
        monkeypatch.setattr(limits.native, "matmul_unused_because", lambda reason=reason: reason)
        assert limits.auto_dtype("cpu") == dtype
        assert limits.auto_dtype("tpu") == "bfloat16"
