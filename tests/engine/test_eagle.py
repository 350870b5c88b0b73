"""With an EAGLE-3 draft layer the tokens are those without it, and what it proposes is what its
tensors say: transformers' layers in float64, over whole sequences.

Before every step all memory that no request owns is NaN, the hidden states beside pages too.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import parity
from ahead import assert_same, counted, prompts_of
from eagle3 import EagleReference, eagle_config, make_eagle
from families import hf_config, make_hf_model, text_config
from jaxkv import LLM
from jaxkv.errors import CheckpointError
from jaxkv.models import decoder
from jaxkv.testing import blueprint_of, engine_of, model_of
from jaxkv.tools.chips import parse_target
from jaxkv.tools.deployment import deploy
from parity import prompts, tiny_llm, torch
from predicting import (
    GREEDY,
    NUM_AHEAD,
    check_proposals,
    noted,
    proposing_every_other_time,
)
from tiny import SMALL, make_checkpoint, tiny_config

__all__ = ["noted", "torch"]

pytestmark = pytest.mark.usefixtures("quick_compile", "one_loop")

DRAWN = replace(GREEDY, temperature=0.8, top_p=0.95, seed=3)


def ahead_by(draft: Path, **keys: object) -> dict:
    config = {"method": "eagle3", "model": draft, "num_speculative_tokens": NUM_AHEAD}
    return {"speculative_config": {**config, "disable_by_batch_size": 4, **keys}}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("eagle") / "model", tiny_config("qwen3"))


@pytest.fixture(scope="module")
def draft(model) -> Path:
    return make_eagle(model.with_name("draft"), model)


@pytest.fixture(scope="module")
def ahead(model, draft) -> LLM:
    """With so few pages that rows lose theirs."""
    few = SMALL | {"num_gpu_blocks_override": 20, "kv_host_bytes": 2**22}
    return LLM(model, **few, **ahead_by(draft))


FORMS = {
    "speculators": {"speculators": True},
    "speculators, as published": {"speculators": True, "norm_before_residual": False},
    "names of a model": {"prefix": "model.", "norm_before_residual": True},
    "qwen3": {"block": "qwen3", "speculators": True, "norm_output": True},
    "norms": {"norm_before_fc": True, "fc_norm": True},
    "the model's vocabulary": {"draft_vocab_size": 151},
    "a copy of embeddings": {"embed_factor": 1.0},
    "other embeddings": {"embed_factor": 2.0},
    "hidden states": {"eagle_config": {"use_aux_hidden_state": False}},
}


def test_proposals_are_what_the_layers_tensors_say(torch, model, draft, ahead):
    check_proposals(EagleReference(torch, model, draft), ahead, prompts_of(151, 6)[2:])
    assert counted(ahead)["at 1"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_proposals_of_other_forms_are_what_their_tensors_say(torch, tmp_path, model, form):
    made = make_eagle(tmp_path / "draft", model, **FORMS[form])
    llm = LLM(model, **SMALL, **ahead_by(made))
    check_proposals(EagleReference(torch, model, made), llm, prompts_of(151, 6)[2:])
    assert counted(llm)["at 1"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant",
    ["cohere2", "deepseek_v3", "gemma2", "gpt_neox", "gpt_oss", "granite", "nemotron_h"],
)
def test_aux_streams_are_what_comes_into_transformers_layers(torch, tmp_path, monkeypatch, variant):
    model = make_hf_model(torch, hf_config(variant), tmp_path)
    llm = tiny_llm(tmp_path)
    num_layers, tokens = model_of(llm).spec.num_layers, prompts()[-1]

    def aux_streams(weights, kv, batch, *, spec, backend) -> jax.Array:
        aux_layers = tuple(range(num_layers))
        ran = decoder.forward(weights, kv, batch, spec=spec, backend=backend, aux_layers=aux_layers)
        return ran.aux_TX

    aux_streams = jax.jit(aux_streams, static_argnames=("spec", "backend"))
    monkeypatch.setattr(parity, "all_logits", aux_streams)
    (got,) = parity.logits_of(llm, [tokens])
    found = model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    want = torch.cat(found.hidden_states[:num_layers], dim=-1)[0].numpy()
    assert np.abs(got - want).max() < 1e-3 * want.std()


@pytest.mark.slow
def test_pages_are_complete_wherever_those_of_the_model_are(torch, model, draft, ahead):
    """In chunks, in pages that rows lose and find again, behind loops that proposed nothing, and
    behind a sleep.
    """
    reference, engine = EagleReference(torch, model, draft), engine_of(ahead)
    prompts = prompts_of(151, 6)[2:]
    whole = check_proposals(reference, ahead, prompts, max_tokens=40)
    assert engine.scheduler.num_preemptions > 0
    hits = engine.scheduler.num_found
    again = [{"prompt_token_ids": tokens[:-2]} for tokens in whole]
    check_proposals(reference, ahead, again, max_tokens=16)
    assert engine.scheduler.num_found > hits
    with proposing_every_other_time(engine):
        check_proposals(reference, ahead, prompts, max_tokens=50)
    ahead.sleep(level=1)
    ahead.wake_up()
    check_proposals(reference, ahead, prompts)


def test_tokens_are_those_without(model, ahead):
    """Drawn ones too, where no allowed token is one that the layer may propose as well, and rows
    that lose their pages.
    """
    plain = LLM(model, **SMALL)
    prompts = prompts_of(151, 6)
    assert_same(plain, ahead, prompts, replace(GREEDY, logprobs=3))
    asked = [replace(DRAWN, seed=seed) for seed in range(4)]
    asked.append(replace(DRAWN, allowed_token_ids=[7, 11, 12]))
    asked.append(replace(DRAWN, repetition_penalty=1.3, min_tokens=9, stop_token_ids=[9]))
    assert_same(plain, ahead, prompts, asked)
    found = counted(ahead)
    assert 0 < found["accepted_tokens"] < found["draft_tokens"]


def test_memory_is_what_was_planned(model, draft, ahead):
    engine, blueprint = engine_of(ahead), blueprint_of(ahead)
    assert blueprint.page_nbytes * blueprint.limits.num_pages == engine.kv.nbytes
    size = SMALL["block_size"] * 2 * 2 * 4
    assert blueprint.page_nbytes == 3 * 16 * size + 8 * size + 48 * 4
    assert {"own_head", "head_tokens"} <= set(engine.draft)
    assert "own_tokens" not in engine.draft
    assert blueprint.weight_bytes == sum(
        leaf.nbytes for leaf in jax.tree.leaves((engine.weights, engine.draft))
    )
    assert "\ndraft     " in ahead.describe()
    target, pages = parse_target("v6e:1x1"), {"block_size": 64, "backend": "xla"}
    planned = deploy(model, target, **pages, **ahead_by(draft)).blueprint.page_nbytes
    assert planned > deploy(model, target, **pages).blueprint.page_nbytes


@pytest.mark.parametrize("is_same", [True, False])
def test_embeddings_are_the_models_unless_others_are_stored(tmp_path, model, is_same):
    """A copy of the model's takes no memory; others are the layer's own."""
    made = make_eagle(tmp_path / "draft", model, draft_vocab_size=151)
    tensors, theirs = (load_file(x / "model.safetensors") for x in (made, model))
    tensors["embed_tokens.weight"] = theirs["model.embed_tokens.weight"] * (1 if is_same else 2)
    tensors["lm_head.weight"] = theirs["lm_head.weight"] * (1 if is_same else 2)
    save_file(tensors, made / "model.safetensors")
    llm = LLM(model, **SMALL, **ahead_by(made))
    names = {"own_tokens", "own_head"} & set(engine_of(llm).draft)
    assert names == (set() if is_same else {"own_tokens", "own_head"})


def write(directory: Path, config: dict) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


REFUSED = {
    "draft_vocab_size: expected a whole number from 1 to 151": {"draft_vocab_size": 152},
    "model_type: expected one of llama, qwen3": {"model_type": "mistral"},
    "architectures: expected those of EAGLE-3": {"architectures": ["PeagleLlamaForCausalLM"]},
    "num_hidden_layers: expected 1": {"num_hidden_layers": 2},
    "vocab_size: expected the model's, 151": {"vocab_size": 150},
    "target_hidden_size: expected the model's": {"target_hidden_size": 64},
    "logit_scale: expected 1.0": {"logit_scale": 0.5},
    "ids: expected a list of whole numbers from 0 to 3": {
        "eagle_aux_hidden_state_layer_ids": [2, 4]
    },
    "ids: expected numbers of the model's layers": {"eagle_aux_hidden_state_layer_ids": []},
    "num_aux_hidden_states: expected as many": {"num_aux_hidden_states": 2},
    "norm_output: expected true or false": {"norm_output": "yes"},
    "speculators_model_type: expected one of eagle3": {"speculators_model_type": "dflash"},
    "eagle_config: expected an object": {"eagle_config": 3},
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_config_of_another_layer_is_refused_by_its_key(tmp_path, model, message):
    other = write(tmp_path / "draft", eagle_config(**REFUSED[message]))
    with pytest.raises(CheckpointError, match=message):
        LLM(model, **SMALL, **ahead_by(other))


def test_what_it_cannot_do_is_refused_by_name(tmp_path, model, draft):
    for speculators in (False, True):
        layer = write(tmp_path / f"layer-{speculators}", eagle_config(speculators=speculators))
        for options in ({"model": layer}, {"model": model, **ahead_by(layer, method=None)}):
            with pytest.raises(CheckpointError, match="'method': 'eagle3'"):
                LLM(**SMALL | options)
    with pytest.raises(ValueError, match="expected model with method 'eagle3'"):
        LLM(model, **SMALL, **ahead_by(None))
    tensors = load_file(draft / "model.safetensors")
    broken = write(tmp_path / "broken", eagle_config())
    wrong = {
        "missing tensor fc.weight": {"fc.weight": None},
        "does not use: more": {"more": np.zeros(3, np.float32)},
        "d2t: .* from 0 to 150": {"d2t": np.full(60, 151)},
        r"q_proj.weight: expected shape \(48, 96\)": {
            "midlayer.self_attn.q_proj.weight": np.zeros((48, 48), np.float32)
        },
    }
    for message, changes in wrong.items():
        changed = {name: x for name, x in (tensors | changes).items() if x is not None}
        save_file(changed, broken / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            LLM(model, **SMALL, **ahead_by(broken))
    for variant in ("gemma3n_text", "deepseek_v4", "dory", "rwkv"):
        config = text_config(variant)
        other = write(tmp_path / variant, config)
        changes = {"vocab_size": config["vocab_size"], "hidden_size": config["hidden_size"]}
        layer = write(tmp_path / f"{variant}-layer", eagle_config(**changes))
        with pytest.raises(NotImplementedError, match="expected a model of one stream"):
            LLM(other, **SMALL, **ahead_by(layer))
