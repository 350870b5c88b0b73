"""What a plan counts is what an engine loads and allocates, and what papers and the compiler
say.
"""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import AbstractMesh, NamedSharding

from families import text_config
from jaxkv import LLM
from jaxkv.api import cli
from jaxkv.errors import CapacityError
from jaxkv.placement import TENSOR
from jaxkv.testing import config_of, engine_of, model_of
from jaxkv.tools.chips import CHIPS, GIB, Target, parse_target
from jaxkv.tools.deployment import Deployment, deploy
from jaxkv.tools.plan import Planned, make_plans, plan_by_compiler, plan_by_formula
from tiers import some
from tiny import SMALL, make_checkpoint, tiny_config

LLAMA_3_70B = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
}
LLAMA_3_8B = LLAMA_3_70B | {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
ROWS = {"max_num_seqs": 64, "max_model_len": 8192}
V6E = parse_target("v6e")


@pytest.fixture
def write(tmp_path):
    def write(config: dict) -> Path:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        return path

    return write


@pytest.fixture
def plan(capsys):
    """Runs `jaxkv plan`; returns (status, standard output, standard error)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        status = cli.main(["plan", *map(str, arguments)])
        return status, *capsys.readouterr()

    return run


MAMBA2 = {
    "model_type": "mamba2",
    "vocab_size": 32_768,
    "hidden_size": 4096,
    "num_hidden_layers": 64,
    "num_heads": 128,
    "head_dim": 64,
    "n_groups": 8,
    "state_size": 128,
}


def test_a_model_without_attention_has_rows_and_no_pool(write, plan, tmp_path):
    rows = ("--max-num-seqs", 32, "--max-model-len", 4096)
    picture = ("--svg", tmp_path / "plan.svg")
    status, out, _ = plan(write(MAMBA2), "--target", "v6e", *rows, "--context", 4096, *picture)
    assert status == 0
    assert "recurrent states: " in picture[1].read_text()
    assert "64 layers, no attention" in out
    assert re.search(r"KV cache of a token +0\.00 KiB\n", out)
    # 64 layers of 128 matrices of 128 x 64, and the last 3 inputs of their convolutions.
    nbytes = 64 * (128 * 128 * 64 + 3 * (128 * 64 + 2 * 8 * 128)) * 4
    assert re.search(rf"recurrent state of a row +{nbytes / 2**10:.2f} KiB\n", out)
    assert re.search(r"tokens +131,072\n +sequences of 4,096 +32\n", out)


def test_a_model_without_attention_takes_no_size_of_a_kv_cache(write):
    with pytest.raises(ValueError, match="kv_cache_memory_bytes: expected None for a model with"):
        deploy(write(MAMBA2), V6E, kv_cache_memory_bytes=2**20)


def test_llama_3_70b_takes_what_is_known_of_it(write, plan):
    target = ("--target", "v6e:2x4", "--sequences", 32)
    _, out, _ = plan(write(LLAMA_3_70B), *target, "--context", 131_072, 4096, 8192)
    assert re.search(r"KV cache of a token +320\.00 KiB\n", out)
    assert re.search(r"of a sequence of 131,072 +40\.00 GiB\n", out)
    assert re.search(r"of a sequence of 4,096 +1\.25 GiB\n", out)
    assert re.search(r"of a sequence of 8,192 +2\.50 GiB\n +of 32 of them +80\.00 GiB\n", out)
    config = write(LLAMA_3_70B | {"num_key_value_heads": 64})
    _, out, _ = plan(config, *target, "--context", 4096, "--backend", "xla")
    assert re.search(r"of a sequence of 4,096 +10\.00 GiB\n", out)


def test_rows_that_all_heads_share_are_on_every_device(write, plan):
    latent = {"num_key_value_heads": 64, "kv_lora_rank": 512, "q_lora_rank": 1536}
    latent |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    config = LLAMA_3_70B | latent | {"model_type": "youtu"}
    _, out, _ = plan(write(config), "--target", "v6e:2x4", "--context", 4096, "--backend", "xla")
    assert "KV cache of 576 numbers per token and layer in bfloat16" in out
    assert re.search(
        r"KV cache of a token +800\.00 KiB\n +all of it on each device +100\.00 KiB\n", out
    )


GEMMA = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_global_key_value_heads": 2}
GEMMA |= {"attention_k_eq_v": True}  # else all layers have as many KV heads


@pytest.mark.parametrize(
    ("config", "target", "heads"),
    [
        (
            LLAMA_3_70B | {"num_key_value_heads": 4},
            "v6e:2x4",
            "64 query and 4 KV .* .2 copies of each",
        ),
        (
            text_config("gemma4_text") | GEMMA,
            "v6e:2x2",
            "8 query and 4 KV .* .1 or 2 copies of each",
        ),
        (LLAMA_3_70B, "v6e:2x4", "64 query and 8 KV heads of 128, weights"),
    ],
)
def test_copies_of_kv_heads_are_named_where_devices_are_more(write, plan, config, target, heads):
    _, out, _ = plan(write(config), "--target", target, "--context", 256, "--backend", "xla")
    assert re.search(heads, out)


def test_a_token_takes_what_each_layer_takes(write, plan):
    def of_token(*options: object) -> float:
        # By name: that the kernels can is found out by tracing them.
        to = ("--target", "v6e", "--context", 4096, "--backend", "xla")
        _, out, _ = plan(write(LLAMA_3_8B), *to, *options)
        return float(re.search(r"KV cache of a token +([0-9.]+) KiB\n", out)[1])

    plain, small = of_token(), of_token("--kv-dtype", "int8")
    skipping = of_token("--kv-dtype", "int8", "--kv-cache-dtype-skip-layers", 0, 1, -1)
    assert skipping == pytest.approx((29 * small + 3 * plain) / 32, abs=0.01)
    assert small < skipping < plain


@pytest.mark.parametrize(
    ("changes", "target", "options", "page_size"),
    [
        ({}, "v6e", {}, 64),
        ({}, "v6e", {"kv_cache_dtype": "int8"}, 128),
        ({}, "v6e", {"kv_cache_dtype": "int8", "block_size": 32}, 32),
        ({}, "v6e", {"kv_policy": "streaming", "kv_budget": 4096, "kv_cache_dtype": "int8"}, 64),
        ({"num_key_value_heads": 4}, "v6e", {}, 128),
        ({}, "v6e:2x2", {}, 128),
    ],
)
def test_small_pages_of_a_tpu_have_twice_the_tokens(write, changes, target, options, page_size):
    size = {"tensor_parallel_size": 4} if ":" in target else {}
    config = write(LLAMA_3_8B | changes)
    found = deploy(config, parse_target(target), backend="xla", **size, **options)
    assert found.blueprint.limits.block_size == page_size


def test_a_draft_model_has_pages_of_as_many_tokens(write, tmp_path):
    draft = {"num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 512}
    other = tmp_path / "draft" / "config.json"
    other.parent.mkdir()
    other.write_text(json.dumps(LLAMA_3_8B | draft))
    config = write(LLAMA_3_8B | {"num_key_value_heads": 1})
    speculation = {"method": "draft_model", "model": str(other), "num_speculative_tokens": 3}
    blueprint = deploy(config, V6E, backend="xla", speculative_config=speculation).blueprint
    assert blueprint.draft.limits.block_size == blueprint.limits.block_size


LIMITS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size")


@pytest.mark.parametrize(
    "variant", ["llama-3", "llama-biases", "mistral", "qwen2-mixed-windows", "qwen3"]
)
def test_weights_and_pages_are_what_an_engine_has(tmp_path, variant):
    checkpoint = make_checkpoint(tmp_path / "model", tiny_config(variant))
    llm = LLM(checkpoint, **SMALL)
    # What page tables there are depends on the lengths.
    limits = {name: getattr(config_of(llm), name) for name in LIMITS}
    # A TPU's pages are padded.
    blueprint = deploy(checkpoint, V6E, dtype="float32", **limits).blueprint.on(jax.devices())
    assert blueprint.weight_bytes == model_of(llm).weight_bytes
    assert blueprint.page_nbytes * 200 == sum(
        store.pages.nbytes for store in engine_of(llm).kv.stores
    )
    num_tables = len(blueprint.limits.windows)
    assert blueprint.token_nbytes * 8 == blueprint.page_nbytes * num_tables


@pytest.mark.parametrize("vocab_size", [152, 151])
def test_each_device_has_its_part(tmp_path, vocab_size):
    sizes = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 128,  # smaller ones are padded
        "hidden_size": 64,
        "vocab_size": vocab_size,
    }
    path = make_checkpoint(tmp_path / "model", tiny_config("llama-biases") | sizes)
    options = {"backend": "xla", "block_size": 64}
    whole, part = (deploy(path, parse_target(to), **options).blueprint for to in ("v6e", "v6e:2x2"))
    mesh = AbstractMesh((4,), (TENSOR,))
    top = {name: leaf for name, leaf in part.layout.top.items() if leaf.same_as is None}
    leaves = [(name, leaf.info.shape) for name, leaf in top.items()]
    leaves += [
        (f"layers.{name}", (part.spec.num_layers, *leaf.info.shape))
        for name, leaf in part.layout.layers[0].items()
    ]

    def nbytes(path: str, dims: tuple[int, ...]) -> int:
        own = NamedSharding(mesh, part.placement.weight(path, dims)).shard_shape(dims)
        is_vector = len(dims) - (path not in top) == 1  # which stays float32
        return (4 if is_vector else 2) * math.prod(own)

    assert part.weight_bytes == sum(nbytes(*one) for one in leaves) < whole.weight_bytes
    assert part.page_nbytes * 4 == whole.page_nbytes


def check_parts(deployment: Deployment, plan) -> None:
    parts = (plan.weight_bytes, plan.temp_bytes, plan.kept_bytes, plan.pool_bytes, plan.left)
    assert min(parts) > 0
    assert (
        sum(parts)
        == plan.limit
        == int(
            deployment.target.chip.memory_gib
            * GIB
            * deployment.blueprint.options.gpu_memory_utilization
        )
    )
    assert plan.left < 0.01 * plan.limit + 3 * plan.page_nbytes


@pytest.mark.parametrize("backend", some(["pallas_tpu", "xla"], "xla"))
def test_the_parts_are_the_whole_and_the_pool_is_the_largest(write, backend):
    deployment = deploy(write(LLAMA_3_8B), V6E, backend=backend, **ROWS)
    found = plan_by_formula(deployment)
    check_parts(deployment, found)
    assert found.num_tokens == found.num_pages * 64
    assert found.num_sequences(65) == found.num_pages // 2
    assert found.num_sequences(64) == found.num_pages


@pytest.mark.slow
def test_what_does_not_fit_is_said_of_each_target(write, plan):
    status, out, _ = plan(write(LLAMA_3_70B), "--target", "v6e", "v6e:2x4")
    assert status == 0
    assert "v6e:1x1" in out
    assert "does not fit: 131.42 GiB of weights, 28.12 GiB available" in out
    assert "KV cache  " in out
    status, out, _ = plan(write(LLAMA_3_70B), "--target", "v6e")
    assert (status, "KV cache  " in out) == (1, False)
    with pytest.raises(CapacityError, match=r"weights, .* available"):
        plan_by_formula(deploy(write(LLAMA_3_70B), V6E))
    tight = deploy(write(LLAMA_3_8B), V6E, gpu_memory_utilization=0.48, **ROWS)
    assert re.search("bytes needed for one page", make_plans(tight, compile_too=False).refusal)


def test_json_and_picture_say_the_same(write, plan, tmp_path):
    picture = tmp_path / "plan.svg"
    targets = ("--target", "v6e", "tpu7x", "v6e:2x4")
    options = ("--backend", "xla", "--max-num-seqs", 64, "--json", "--svg", picture)
    options += ("--context", 1024, 4096)
    status, out, err = plan(write(LLAMA_3_8B), *targets, *options)
    assert (status, err) == (0, "")
    planned = json.loads(out)
    assert [one["target"] for one in planned] == ["v6e:1x1", "tpu7x:1x1x1", "v6e:2x4"]
    assert [one["tensor_parallel_size"] for one in planned] == [1, 2, 8]
    assert planned[0]["token_nbytes"] == 2 * 32 * 8 * 128 * 2
    fit = planned[0]["plans"][0]["num_sequences"]
    assert fit["1024"] >= 4 * fit["4096"] > 0
    drawn = xml.etree.ElementTree.parse(picture).getroot()
    boxes = [box for box in drawn.findall(".//{*}rect") if list(box)]
    widths = [float(box.get("width")) for box in boxes]
    names = ("weight_bytes", "pool_bytes", "temp_bytes", "kept_bytes", "left")
    sizes = [one["plans"][0][name] for one in planned for name in names]
    assert widths == pytest.approx([size * sum(widths) / sum(sizes) for size in sizes], abs=0.1)
    deployment = deploy(write(LLAMA_3_8B), V6E, backend="xla", **ROWS)
    shown = make_plans(deployment, compile_too=False)
    assert "KV cache: " in shown._repr_html_()
    assert Planned(deployment=shown.deployment, refusal="no")._repr_html_() is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "v9"], "target: expected one of v4, v5e, .*, got 'v9'"),
        (["--target", "v6e:2"], "target: expected v6e:AxB, got 'v6e:2'"),
        (["--target", "v4:2x2"], "target: expected v4:AxBxC, got 'v4:2x2'"),
        (["--target", "v6e:0x1"], "target: expected v6e:AxB"),
        (
            ["--target", "v6e:2x4", "--tensor-parallel-size", "3"],
            "expected a divisor or a multiple of the model's 8 KV heads, got 3",
        ),
        (
            ["--target", "v6e:2x4", "--tensor-parallel-size", "16"],
            "tensor_parallel_size: expected 1 to 8",
        ),
        (["--dtype", "int3"], "dtype: expected bfloat16 or float32, got 'int3'"),
        (["--kv-cache-dtype", "int3"], "kv_cache_dtype: expected auto or one of"),
        (["--context", "0"], "expected --context above 0"),
        (
            ["--context", "4096", "131073", "--backend", "xla"],
            "--context: expected at most max_model_len=131072, got",
        ),
        (["--sequences", "-1"], "--sequences from 0"),
        (
            ["--gpu-memory-utilization", "1.1"],
            r"gpu_memory_utilization: expected a number in \(0, 1\], got 1.1",
        ),
        (["--block-size", "5"], "block_size: expected one of"),
        (["--backend", "cuda"], "backend: expected 'auto' or one of"),
        (["--max-model-len", "200000"], "max_model_len: expected at most 131072"),
        (["--target", "v6e", "v6e:8x8"], "v6e:8x8: tensor_parallel_size: expected a divisor"),
    ],
)
def test_what_is_wrong_is_said(write, plan, arguments, message):
    status, _, err = plan(write(LLAMA_3_8B), *arguments)
    assert status == 2
    assert re.search(message, err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "4096", "0"], r"expected --context above 0 .*, got \[4096, 0\]"),
        (["--svg", "no/such/folder.svg"], "--svg: expected a file in a directory that is there"),
        (["--svg", "."], "--svg: expected a file in a directory that is there, got ."),
        (["--target", "v6e", "v6e:x"], "v6e:x"),
    ],
)
def test_arguments_are_looked_at_before_any_work(plan, monkeypatch, arguments, message):
    def read(*_: object) -> None:
        raise AssertionError("the model is read")

    monkeypatch.setattr("jaxkv.tools.deployment.find_config", read)
    status, out, err = plan("nothing/here", *arguments)
    assert (status, out) == (2, "")
    assert re.search(message, err)


def test_a_missing_or_broken_config_is_said(plan, tmp_path):
    status, _, err = plan(tmp_path / "config.json")
    assert (status, "not found" in err) == (2, True)
    (tmp_path / "config.json").write_text("{")
    status, _, err = plan(tmp_path)
    assert (status, "expected JSON" in err) == (2, True)


def test_of_a_hub_id_only_what_says_of_the_model_is_fetched(write, plan, monkeypatch):
    import huggingface_hub

    asked = []

    def snapshot_download(hub_id: str, **options: Any) -> Path:
        asked.append((hub_id, options["revision"], options["allow_patterns"]))
        return write(LLAMA_3_8B).parent

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert plan("org/name", "--target", "v6e", "--backend", "xla")[0] == 0
    assert asked == [("org/name", None, ["config.json", "hf_quant_config.json"])]


def test_a_target_without_its_compiler_names_what_to_install(monkeypatch):
    monkeypatch.setattr("jaxkv.tools.chips.find_spec", lambda name: None)
    with pytest.raises(
        RuntimeError, match=re.escape('v6e:1x1: its compiler is missing: pip install "jaxkv[tpu]"')
    ):
        V6E.devices()


@pytest.mark.skipif(
    find_spec("libtpu") is None, reason='libtpu is missing: pip install "jaxkv[tpu]"'
)
@pytest.mark.parametrize("kind", CHIPS)
def test_a_target_has_as_many_devices_as_its_compiler_says(kind):
    for shape in ((1,) * CHIPS[kind].dimensions, (2, 2, 1)[: CHIPS[kind].dimensions]):
        assert Target(kind, shape).num_devices == len(Target(kind, shape).devices())


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("libtpu") is None, reason='libtpu is missing: pip install "jaxkv[tpu]"'
)
@pytest.mark.parametrize("target", ["v5e:2x2", "v6e"])
@pytest.mark.parametrize("backend", ["pallas_tpu", "xla"])
def test_formula_and_compiler_agree_to_2_percent(write, target, backend):
    deployment = deploy(write(LLAMA_3_8B), parse_target(target), backend=backend, **ROWS)
    formula, compiled = plan_by_formula(deployment), plan_by_compiler(deployment)
    check_parts(deployment, formula)
    assert formula.num_tokens == pytest.approx(compiled.num_tokens, rel=0.02)
    assert jax.devices()[0].platform == "cpu"
