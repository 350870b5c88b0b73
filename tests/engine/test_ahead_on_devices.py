"""Tokens are proposed on several devices as on one: by a layer that predicts or a draft model, whose
KV heads may be divided otherwise than the model's, and each device has its part of both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3 import make_eagle
from jaxkv.tools.chips import parse_target
from jaxkv.tools.deployment import deploy
from predicting import make_predicting
from tiers import some
from tiny import make_checkpoint, tiny_config

RUN = """
import json, sys
import jaxkv.engine.speculation
from ahead import counted, prompts_of
from jaxkv import LLM, SamplingParams
from jaxkv.programs import compiled
from jaxkv.testing import blueprint_of, engine_of, model_of

compiled.row_buckets = lambda max_num_seqs, _: (max_num_seqs,)  # one loop
jaxkv.engine.speculation.LEAST_GAIN = 0.0  # whatever comes of it
path, ahead, size, asked = sys.argv[1], *map(json.loads, sys.argv[2:])
ahead |= {"num_speculative_tokens": 3, "disable_by_batch_size": 4}
greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, allowed_token_ids=[5, 7, 9, 11])
drawn = greedy.clone()
drawn.temperature, drawn.seed = 0.8, 3
prompts = prompts_of(150, 5)

def run(size, **asked):
    llm = LLM(path, dtype="float32", tensor_parallel_size=size, speculative_config=ahead,
              skip_tokenizer_init=True, lazy_compile=True, max_num_seqs=4, max_num_batched_tokens=32,
              max_model_len=96, block_size=8, num_gpu_blocks_override=60, **asked)
    outputs = [one for params in (greedy, drawn) for one in llm.generate(prompts, params, use_tqdm=False)]
    again = [{"prompt_token_ids": [*one.prompt_token_ids, *one.outputs[0].token_ids[:9]]} for one in outputs[:5]]
    outputs += llm.generate(again, greedy, use_tqdm=False)
    llm.sleep(level=1)
    llm.wake_up()
    outputs += llm.generate(prompts[-1], greedy, use_tqdm=False)
    engine = engine_of(llm)
    engine.check()
    shards = [one for x in engine.kv.pools for one in x.addressable_shards]
    return {
        "tokens": [one.outputs[0].token_ids for one in outputs],
        "counted": counted(llm),
        "found": engine.scheduler.num_found,
        "bytes": [sum(one.data.nbytes for one in shards if one.device.id == i) for i in range(size)],
        "planned": blueprint_of(llm).page_nbytes * 60 + blueprint_of(llm).state_nbytes,
        "sizes": model_of(llm).weight_bytes - blueprint_of(llm).weight_bytes,
        "own head": max([0, *(one.data.nbytes for one in engine.draft["own_head"].addressable_shards)])
                    if "own_head" in engine.draft and "head_tokens" not in engine.draft else 0,
    }

print(json.dumps([run(1), run(size, **asked)]))
"""


def runs(path: Path, ahead: dict, size: int, **asked: object) -> list[dict]:
    """Returns what came of one device and of several."""
    flags = f"--xla_force_host_platform_device_count={size} --xla_backend_optimization_level=0"
    folder = str(Path(__file__).parents[1])
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = os.pathsep.join([folder, env.get("PYTHONPATH", "")])
    given = [str(path), *map(json.dumps, (ahead, size, asked))]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *given],
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check(one: dict, several: dict) -> None:
    assert one["tokens"] == several["tokens"]
    assert several["counted"] == one["counted"]
    assert 0 < one["counted"]["accepted_tokens"] < one["counted"]["draft_tokens"]
    assert several["found"] == one["found"] > 0
    for own in (one, several):
        assert set(own["bytes"]) == {own["planned"]}
        # No config says whether the layer has a head of its own, unless it has fewer tokens.
        assert own["sizes"] == own["own head"]


ALL = {"decode_context_parallel_size": 2, "enable_expert_parallel": True}
SHARED = {"vocab_size": 152, "num_attention_heads": 8, "num_key_value_heads": 2}
PREDICTING = [
    ("deepseek_v3", 2, {}, ALL),
    ("deepseek_v32", 2, {}, ALL),
    ("glm4_moe_lite", 2, {}, {}),
    ("glm_moe_dsa-shared", 2, {}, {"decode_context_parallel_size": 2}),
    ("qwen3_next", 2, {}, {"enable_expert_parallel": True}),
    ("glm4_moe", 8, SHARED, {"decode_context_parallel_size": 4}),
    ("glm4_moe", 4, SHARED, ALL),
    ("glm4_moe", 4, SHARED, {"kv_host_bytes": 2**22}),
]


@pytest.mark.parametrize(
    ("variant", "size", "changes", "asked"), some(PREDICTING, PREDICTING[0]), ids=str
)
def test_a_layer_that_predicts(tmp_path, variant, size, changes, asked):
    path = make_predicting(tmp_path / "model", variant, own_head=True, **changes)
    check(*runs(path, {"method": "mtp"}, size, **asked))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "own", "size", "asked"),
    [
        (2, 8, 8, {"decode_context_parallel_size": 2}),  # which the draft model has no use for
        (8, 1, 8, {}),
        (4, 2, 8, {"decode_context_parallel_size": 2}),
        (8, 8, 2, {}),
    ],
)
def test_a_draft_model_with_other_heads(tmp_path, heads, own, size, asked):
    config = tiny_config("llama") | {"vocab_size": 152, "num_attention_heads": 8}
    made = [
        make_checkpoint(tmp_path / str(i), config | {"num_key_value_heads": one} | more)
        for i, (one, more) in enumerate(((heads, {}), (own, {"num_hidden_layers": 1})))
    ]
    check(*runs(made[0], {"model": str(made[1])}, size, **asked))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "own", "changes"),
    [
        (2, 2, {}),  # 30 rows of its head each
        (8, 4, {"draft_vocab_size": 152, "norm_before_residual": True}),
        (8, 8, {}),  # whose 60 rows 8 devices do not divide
    ],
)
def test_a_layer_that_was_trained_for_the_model(tmp_path, size, own, changes):
    shape = {"vocab_size": 152, "num_attention_heads": 8, "head_dim": 8}
    heads = {"num_key_value_heads": own}
    path = make_checkpoint(tmp_path / "model", tiny_config("qwen3") | shape)
    draft = make_eagle(tmp_path / "draft", path, **shape, **heads, **changes)
    ahead = {"method": "eagle3", "model": str(draft)}
    asked = {"decode_context_parallel_size": 2} if size == 8 else {}
    check(*runs(path, ahead, size, **asked))


def configs(folder: Path, *heads: tuple[int, int]) -> list[Path]:
    """Writes config.json of Llamas with so many heads and KV heads."""
    found = []
    for number, (count, kv_count) in enumerate(heads):
        changes = {"num_attention_heads": count, "num_key_value_heads": kv_count, "head_dim": 8}
        found.append(folder / str(number))
        found[-1].mkdir()
        (found[-1] / "config.json").write_text(json.dumps(tiny_config("llama") | changes))
    return found


@pytest.mark.parametrize(
    ("kv_heads", "own", "context", "shape", "contexts"),
    [
        (2, 8, 2, (2, 2, 2), (2, 1)),
        (8, 1, 1, (8,), (1, 1)),
        (4, 2, 2, (2, 2, 2), (2, 2)),
        (8, 2, 1, (2, 4), (1, 1)),
        (2, 4, 4, (2, 2, 2), (4, 2)),
    ],
)
def test_both_models_are_on_one_mesh(tmp_path, kv_heads, own, context, shape, contexts):
    model, draft = configs(tmp_path, (8, kv_heads), (8, own))
    ahead = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    asked = {"speculative_config": ahead, "decode_context_parallel_size": context}
    blueprint = deploy(model, parse_target("v5e:2x4"), block_size=64, **asked).blueprint
    placements = blueprint.placement, blueprint.draft.placement
    assert [one.mesh_shape for one in placements] == [shape] * 2
    assert tuple(one.context for one in placements) == contexts
    theirs = {path: axes for path, axes in placements[0].axes if path.startswith("draft.")}
    assert theirs == {f"draft.{path}": axes for path, axes in placements[1].axes}


@pytest.mark.parametrize(
    ("heads", "own", "error"),
    [
        ((8, 4), (6, 2), "of the draft model, tensor_parallel_size: .* 6 attention heads, got 8"),
        ((8, 4), (24, 3), "of the draft model, tensor_parallel_size: .* 3 KV heads, got 8"),
        ((6, 2), (8, 2), "^tensor_parallel_size: .* 6 attention heads, got 8"),
    ],
)
def test_a_draft_model_that_devices_cannot_divide_is_refused_as_one(tmp_path, heads, own, error):
    paths = configs(tmp_path, heads, own)
    ahead = {"method": "draft_model", "model": str(paths[1]), "num_speculative_tokens": 2}
    target, asked = parse_target("v5e:2x4"), {"speculative_config": ahead}
    with pytest.raises(ValueError, match=error):
        deploy(paths[0], target, **asked)
    for size, context, said in (("8", 1, "'8'"), (0, 1, "0"), (2, "2", "'2'")):
        sizes = {"tensor_parallel_size": size, "decode_context_parallel_size": context}
        with pytest.raises(ValueError, match=f"parallel_size: expected .* got {said}"):
            deploy(paths[0], target, **sizes, **asked)
