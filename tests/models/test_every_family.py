"""Every family in transformers (float32, eager attention) and here: equal logits at every position,
equal tokens, from the checkpoint that transformers writes.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import families
from families import ALONE, LONG, MECHANISMS, VARIANTS, WRAPPED, hf_config, make_hf_model
from jaxkv import SamplingParams
from jaxkv.models.decoder import embed_scale
from jaxkv.models.families import FAMILIES, ConfigReader, read_config, read_family
from jaxkv.models.spec import AttentionSpec
from jaxkv.ops.attention import xla
from jaxkv.ops.attention.dense import Dense
from jaxkv.testing import model_of
from jaxkv.weights.load import Kept, load_weights
from parity import (
    TOLERANCE,
    assert_generates_equal,
    assert_logits_equal,
    logits_of,
    prompts,
    tiny_llm,
    torch,
)
from tiny import make_checkpoint, tiny_config

__all__ = ["torch"]

pytestmark = pytest.mark.usefixtures("quick_compile", "one_loop")

DENSE = {
    *("axk2", "dory", "dots3_note_text", "falcon_h1", "gemma3n_text", "gemma4_text", "glm5_next"),
    *("glm_moe_dsa-shared", "hrm_text", "jetmoe", "llama4", "longcat_flash", "mimo_v2_flash"),
    *("minimax", "minimax_m3_vl", "modernbert_decoder", "muse_spark", "nemotron_h-latent"),
    *("qwen3_next", "qwen4_exp", "xlstm", "zamba", "zamba2", "zaya"),
}
"""Attend with all scores at once: their many unlike layers take half as long to compile so. What
XLA's blocks are asked by them others are asked too, in tests/ops/test_attention.py or here.
"""


@pytest.fixture(autouse=True)
def latent_attention_in_both_forms(monkeypatch):
    """Of the prompts' lengths some are attended absorbed then, and some expanded."""
    monkeypatch.setattr(xla, "LEAST_QUERIES", 20)


def variants(quick: set[str]) -> list:
    return [
        pytest.param(variant, marks=[] if variant in quick else pytest.mark.slow)
        for variant in (*ALONE, *WRAPPED)
        # Which transformers rotates anew as its sequence grows: see below.
        if variant != "llama-dynamic"
    ]


@pytest.mark.parametrize("variant", variants(MECHANISMS - DENSE))
def test_logits_and_their_greedy_tokens_equal_transformers(torch, tmp_path, variant):
    model = make_hf_model(torch, hf_config(variant), tmp_path)
    assert_logits_equal(torch, model, tiny_llm(tmp_path))


@pytest.mark.parametrize("variant", sorted(DENSE))
def test_logits_of_all_scores_at_once_equal_transformers(torch, tmp_path, variant):
    model = make_hf_model(torch, hf_config(variant), tmp_path)
    assert_logits_equal(torch, model, tiny_llm(tmp_path), backend=Dense())


@pytest.mark.parametrize("variant", variants({"gemma3_text"}))
def test_generate_equals_transformers_generate(torch, tmp_path, variant):
    model = make_hf_model(torch, hf_config(variant), tmp_path)
    assert_generates_equal(torch, model, tiny_llm(tmp_path))


def test_values_are_clipped_behind_norms_of_all_of_them(torch, tmp_path):
    config = hf_config("olmoe")
    config.clip_qkv = 0.7
    model = make_hf_model(torch, config, tmp_path)
    assert_logits_equal(torch, model, tiny_llm(tmp_path))


GEMMAS = ("gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "vaultgemma")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", GEMMAS)
def test_the_factor_on_embeddings_is_rounded_as_in_transformers(torch, variant, dtype):
    """The square root of 48 is 6.928, and 6.9375 in bfloat16."""
    config = hf_config(variant)
    spec, _ = read_family(ConfigReader(config.to_dict(), "config.json"))
    module = import_module(type(config).__module__.replace("configuration", "modeling"))
    kind = next(x for name, x in vars(module).items() if name.endswith("TextScaledWordEmbedding"))
    given = (config.vocab_size, config.hidden_size, 0, config.hidden_size**0.5)
    theirs = kind(*given).to(getattr(torch, dtype))
    torch.nn.init.normal_(theirs.weight)
    embed_VD = theirs.weight.float().numpy().astype(dtype)
    got = jnp.float32(embed_VD) * embed_scale({"embed": jnp.asarray(embed_VD)}, spec)
    want = theirs(torch.arange(config.vocab_size)).float().numpy()
    np.testing.assert_array_equal(got.astype(dtype).astype(jnp.float32), want)


class Limited:
    """Stands for an activation in transformers whose product has bounds."""

    def __init__(self, act, limit: float) -> None:
        self._act, self._limit = act, limit

    def __call__(self, gate):
        self._acted = self._act(gate).clamp(max=self._limit)
        return self

    def __mul__(self, up):
        return self._acted * up.clamp(-self._limit, self._limit)


@pytest.mark.slow
def test_limits_of_ling_3_are_those_of_each_layer(torch, tmp_path):
    """transformers 5.24 does not read them: its layers get them here."""
    limits = {"experts": [0, 0, 0.3, 0.5], "shared_experts": [0, 0.2, 0, 0.4]}
    model = make_hf_model(torch, hf_config("bailing_hybrid"), tmp_path)
    for name, limit_L in limits.items():
        for layer, limit in zip(model.model.layers, limit_L, strict=True):
            if limit:
                module = getattr(layer.mlp, name)
                act = module.act_fn
                del module.act_fn
                module.act_fn = Limited(act, limit)
    path, keys = tmp_path / "config.json", ("expert", "share_expert")
    lists = {f"{key}_swiglu_limit_list": x for key, x in zip(keys, limits.values(), strict=True)}
    path.write_text(json.dumps(json.loads(path.read_text()) | lists))
    assert_logits_equal(torch, model, tiny_llm(tmp_path))


@pytest.mark.parametrize("variant", ["phi3-longrope", "llama-dynamic"])
def test_a_sequence_that_gets_longer_is_rotated_otherwise(torch, tmp_path, variant):
    model = make_hf_model(torch, hf_config(variant), tmp_path)
    llm = tiny_llm(tmp_path, max_num_batched_tokens=128)
    rng = np.random.default_rng(5)
    sequences = [rng.integers(0, 151, length).tolist() for length in (20, 90)]
    for ids, got in zip(sequences, logits_of(llm, sequences), strict=True):
        want = model(torch.tensor([ids])).logits[0].numpy()
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * want.std())


def test_long_sequences_of_phi_3_5_moe_have_its_long_factors(torch, tmp_path):
    """As in the model's own code: transformers 5.24 does not tell its factors how long they are."""
    model = make_hf_model(torch, hf_config("phimoe-longrope"), tmp_path)
    llm = tiny_llm(tmp_path, max_num_batched_tokens=128)
    rng, rotation = np.random.default_rng(5), model.model.rotary_emb
    sequences, told = [rng.integers(0, 151, n).tolist() for n in (20, 90)], rotation.rope_init_fn
    for ids, got in zip(sequences, logits_of(llm, sequences), strict=True):
        rotation.rope_init_fn = partial(told, seq_len=len(ids))
        want = model(torch.tensor([ids])).logits[0].numpy()
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * want.std())


def test_rwkv_is_what_transformers_computes_in_training(torch, tmp_path):
    """Where it halves nothing. Of a stream that is halved the epsilon of norms is a larger part,
    which is 4e-4 of the logits' deviation here and more with more layers.
    """
    model = make_hf_model(torch, hf_config("rwkv-halved"), tmp_path).train()
    for ids, got in zip(prompts(), logits_of(tiny_llm(tmp_path), prompts()), strict=True):
        want = model(torch.tensor([ids])).logits[0].numpy()
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * want.std())


def test_the_engine_rotates_by_how_long_a_request_may_get(torch, tmp_path):
    """Requests that begin alike share no pages where their keys differ."""
    model = make_hf_model(torch, hf_config("phi3-longrope"), tmp_path)
    llm = tiny_llm(tmp_path)
    ids = np.random.default_rng(6).integers(0, 151, 60).tolist()
    limits = [3, 100]  # 63 and 160 tokens at most, on both sides of the original length
    got = [
        llm.generate(
            {"prompt_token_ids": ids},
            SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True, logprobs=1),
            use_tqdm=False,
        )[0]
        for limit in limits
    ]
    assert [output.num_cached_tokens for output in got] == [0, 0]
    long = torch.tensor([ids + list(got[1].outputs[0].token_ids)])
    for output, whole in ((got[0], torch.tensor([ids])), (got[1], long)):
        logits = model(whole).logits[0, len(ids) - 1]
        (first, *_), (listed, *_) = output.outputs[0].token_ids, output.outputs[0].logprobs
        assert first == int(logits.argmax())
        want = float(logits.log_softmax(-1)[first])
        assert abs(listed[first].logprob - want) < TOLERANCE * float(logits.std())
    assert LONG["original_max_position_embeddings"] == 64


def test_every_family_has_a_variant():
    assert {variant.split("-")[0] for variant in VARIANTS} | ELSEWHERE == set(FAMILIES)


def test_kimi_k2_is_deepseek_v3():
    common = families.text_config("deepseek_v3") | {"num_nextn_predict_layers": 0}
    config = ConfigReader(common, "config.json")
    (one, its), (other, others) = (
        read_family(config.replaced(model_type=name)) for name in ("kimi_k2", "deepseek_v3")
    )
    assert its == others
    assert replace(one, family="deepseek_v3") == other


def test_gpt_sw3_is_gpt2():
    """transformers has its class of model for both names."""
    gpt2 = ConfigReader(families.text_config("gpt2"), "config.json")
    assert read_family(gpt2.replaced(model_type="gpt-sw3")) == read_family(gpt2)


def test_mimo_is_qwen2_with_a_layer_that_predicts():
    """vLLM's class is Qwen2's too. Source of the keys: XiaomiMiMo/MiMo-7B-RL."""
    qwen2 = families.text_config("qwen2") | {"num_nextn_predict_layers": 1}
    mimo = ConfigReader(qwen2 | {"model_type": "mimo"}, "config.json")
    spec, layout = read_family(mimo)
    assert (spec, layout) == read_family(ConfigReader(qwen2, "config.json"))
    name = "model.mtp_layers.0.input_proj.weight"
    assert any(re.fullmatch(pattern, name) for pattern in layout.derived)


def test_internlm2_is_llama_with_one_matrix_of_queries_keys_and_values(tmp_path):
    config = tiny_config("llama")
    kv_heads, (llama, other) = config["num_key_value_heads"], (tmp_path / "llama", tmp_path / "2")
    tensors = load_file(make_checkpoint(llama, config) / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        stem = f"model.layers.{layer}"
        parts = [tensors.pop(f"{stem}.self_attn.{name}_proj.weight") for name in "qkv"]
        width = config["hidden_size"]
        dim = len(parts[1]) // kv_heads
        heads = [part.reshape(kv_heads, -1, dim, width) for part in parts]
        fused = np.concatenate(heads, axis=1).reshape(-1, width)
        tensors[f"{stem}.attention.wqkv.weight"] = fused
    names = {"model.embed_tokens": "model.tok_embeddings", "lm_head": "output"}
    names |= {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"}
    names |= {"self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1"}
    names |= {"mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2"}
    for name, own in names.items():
        tensors = {key.replace(name, own): x for key, x in tensors.items()}
    other.mkdir()
    save_file(tensors, other / "model.safetensors")
    config |= {"model_type": "internlm2", "bias": False}
    (other / "config.json").write_text(json.dumps(config))
    assert_same_model(llama, other)
    assert_same_model(other, part_of_another(other, "internvl_chat", "llm_config"))


def test_the_text_part_of_kimi_vl_is_deepseek_v3(torch, tmp_path):
    """And of InternVL as its authors publish it what it says it is: neither is in transformers."""
    make_hf_model(torch, hf_config("deepseek_v3"), tmp_path / "1")
    assert_same_model(tmp_path / "1", part_of_another(tmp_path / "1", "kimi_vl", "text_config"))


def part_of_another(directory: Path, outer: str, section: str) -> Path:
    """Writes the checkpoint again as the text part of another model."""
    whole = directory.with_name(outer)
    whole.mkdir()
    config = {"model_type": outer, section: json.loads((directory / "config.json").read_text())}
    (whole / "config.json").write_text(json.dumps(config))
    tensors = load_file(directory / "model.safetensors")
    tensors = {f"language_model.{name}": x for name, x in tensors.items()}
    tensors["vision_model.encoder.layers.0.norm1.weight"] = np.zeros(2, np.float32)
    save_file(tensors, whole / "model.safetensors")
    return whole


def assert_same_model(one: Path, other: Path) -> None:
    models = [read_family(read_config(directory)) for directory in (one, other)]
    assert replace(models[1][0], family=models[0][0].family) == models[0][0]
    trees = [
        load_weights(directory, *model, Kept(dtype="float32"))
        for directory, model in zip((one, other), models, strict=True)
    ]
    jax.tree.map(np.testing.assert_array_equal, *trees)


def test_the_text_part_of_gemma3n_is_found_among_the_others(torch, tmp_path):
    """transformers cannot make the whole model without timm: a checkpoint of it is put together."""
    config, (alone, whole) = hf_config("gemma3n_text"), (tmp_path / "alone", tmp_path / "whole")
    make_hf_model(torch, config, alone)
    whole.mkdir()
    outer = {"model_type": "gemma3n", "text_config": config.to_dict()}
    (whole / "config.json").write_text(json.dumps(outer))
    tensors = load_file(alone / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): x for name, x in tensors.items()}
    tensors["model.vision_tower.conv_stem.weight"] = np.zeros((2, 2), np.float32)
    save_file(tensors, whole / "model.safetensors")
    one, other = (model_of(tiny_llm(directory)) for directory in (alone, whole))
    assert one.spec == other.spec
    jax.tree.map(np.testing.assert_array_equal, one.weights, other.weights)


def test_experts_for_images_of_ernie_4_5_vl_stay_behind(torch, tmp_path):
    make_hf_model(torch, hf_config("ernie4_5_vl_moe"), tmp_path)
    weights = load_weights(tmp_path, *read_family(read_config(tmp_path)), Kept(dtype="float32"))
    tensors = load_file(tmp_path / "model.safetensors")
    stem, count = "model.layers.1.mlp.experts.{}.up_proj.weight", 6
    assert stem.format(2 * count - 1) in tensors  # those for images follow
    want = [tensors[stem.format(expert)] for expert in range(count)]
    np.testing.assert_array_equal(weights["layers_1"]["expert_up"][0], want)


def test_minicpm_is_granite_by_other_names():
    common = families.SMALL | {"num_hidden_layers": 4, "hidden_size": 48}
    minicpm = {"model_type": "minicpm", "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16}
    granite = {
        "model_type": "granite",
        "embedding_multiplier": 12,
        "residual_multiplier": 0.7,
        "logits_scaling": 3,
        "attention_multiplier": 8**-0.5,
    }
    (one, its), (other, others) = (
        read_family(ConfigReader(common | own, "config.json")) for own in (minicpm, granite)
    )
    assert its == others
    plain = AttentionSpec(scale=8**-0.5)
    assert replace(one, family="granite", attention=plain) == other


ELSEWHERE = {"internlm2", "kimi_k2", "minicpm", "qwen2", "qwen3"}
ELSEWHERE |= {"bailing_moe", "chatglm", "deepseek", "nemotron_nas", "orion", "pangu_embedded"}
"""Families that are tested below, in test_outside_transformers.py, or with the variants of
tests/tiny.py.
"""
