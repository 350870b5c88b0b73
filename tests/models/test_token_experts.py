"""Layers whose experts a table has for each token id: they compute what transformers' do, and the
table stays whole numbers on every way into the weight tree.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from safetensors.numpy import load_file, save_file

import parity
from families import text_config
from jaxkv import LLM
from jaxkv import functional as jk
from jaxkv.errors import CheckpointError
from jaxkv.models.families import mixtral, read_config, read_family
from jaxkv.models.families.base import table
from jaxkv.placement import place
from jaxkv.programs.rounding import quantise
from jaxkv.testing import model_of
from jaxkv.weights.arrays import take_weights
from jaxkv.weights.dummy import random_weights
from jaxkv.weights.load import Kept, load_weights
from jaxkv.weights.orbax import convert, load_converted
from jaxkv.weights.tree import LAYERS, TOKEN_EXPERTS, chooses_by_token
from parity import torch
from tiny import SMALL, make_checkpoint

__all__ = ["torch"]

pytestmark = pytest.mark.usefixtures("quick_compile", "one_loop")

CONFIG = text_config("mixtral") | {"sliding_window": None}
VOCAB, EXPERTS, USED = (
    CONFIG[key] for key in ("vocab_size", "num_local_experts", "num_experts_per_tok")
)
TABLES = "model.layers.{layer}.block_sparse_moe.gate.tid2eid"
TENSOR = TABLES.format(layer=0)
ROUTER = {"score": "sqrtsoftplus", "scale": 1.5}


@pytest.fixture(autouse=True)
def by_token(monkeypatch):
    """Makes a family of Mixtral: its first layer has a table, and routers score otherwise."""
    read_mixtral = mixtral.read

    def read(config: Any) -> Any:
        spec, layout = read_mixtral(config)
        spec = replace(spec, router=replace(spec.router, **ROUTER), layer_kinds=(0, 1, 1))
        one = table(TABLES, (spec.vocab_size, spec.router.num_used), below=EXPERTS)
        (plain,) = layout.layers
        return spec, replace(layout, layers=(plain | {TOKEN_EXPERTS: one}, plain))

    monkeypatch.setattr(mixtral, "read", read)


@pytest.fixture
def path(tmp_path) -> Path:
    return make_checkpoint(tmp_path / "model", CONFIG)


def stored_table(path: Path) -> np.ndarray:
    return load_file(path / "model.safetensors")[TENSOR]


def with_table(path: Path, numbers: np.ndarray) -> Path:
    file = path / "model.safetensors"
    save_file(load_file(file) | {TENSOR: numbers}, file, metadata={"format": "pt"})
    return path


def loaded(path: Path, reader: Any = load_weights, **options: Any) -> dict[str, Any]:
    return reader(path, *read_family(read_config(path)), Kept(**{"dtype": "float32"} | options))


def assert_has(weights: dict[str, Any], numbers: np.ndarray) -> None:
    leaf = weights[LAYERS][TOKEN_EXPERTS]
    assert leaf.dtype == np.int32
    np.testing.assert_array_equal(leaf, numbers.reshape(1, -1))


@pytest.mark.slow
def test_layers_compute_what_transformers_routers_choose(path, torch):
    """As deepseek_v4 does among the families."""
    deepseek = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    (path / "plain").mkdir()
    (path / "plain" / "config.json").write_text((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    numbers = tensors.pop(TENSOR)
    save_file(tensors, path / "plain" / "model.safetensors", metadata={"format": "pt"})
    model = parity.reference_model(torch, path / "plain")
    how = {"scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5, "vocab_size": VOCAB}
    how |= {"num_local_experts": EXPERTS, "num_experts_per_tok": USED}
    config, ids = SimpleNamespace(**how, hidden_size=CONFIG["hidden_size"]), []

    class OfLastIds(deepseek.DeepseekV4HashRouter):
        def forward(self, hidden: Any) -> Any:
            return super().forward(hidden, ids[-1])

    for layer, block in enumerate(model.model.layers):
        router = (OfLastIds if layer == 0 else deepseek.DeepseekV4TopKRouter)(config)
        router.weight = block.mlp.gate.weight
        block.mlp.gate = router
        if layer == 0:
            router.tid2eid.copy_(torch.from_numpy(numbers))
        else:
            router.e_score_correction_bias.zero_()
    model.model.embed_tokens.register_forward_pre_hook(lambda _, given: ids.append(given[0]))
    llm = parity.tiny_llm(path)
    parity.assert_logits_equal(torch, model, llm)
    parity.assert_generates_equal(torch, model, llm)


@pytest.mark.parametrize("stored", [np.int32, np.int64])
def test_it_is_the_checkpoints_whatever_the_weights_are(path, stored):
    numbers = stored_table(with_table(path, stored_table(path).astype(stored)))
    assert numbers.dtype == stored
    assert len(np.unique(numbers)) == EXPERTS
    for options in (
        {},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "as_bits": True},
        {"quantization": "int8", "quantise": quantise},
    ):
        assert_has(loaded(path, **options), numbers)


def test_it_is_converted_as_it_is(path, tmp_path):
    convert(path, tmp_path / "out", dtype="bfloat16")
    for dtype in ("bfloat16", "float32"):
        for options in ({}, {"quantization": "int8", "quantise": quantise}):
            found = loaded(tmp_path / "out", load_converted, dtype=dtype, **options)
            assert_has(found, stored_table(path))


def test_it_is_taken_from_arrays(path):
    spec, layout = read_family(read_config(path))
    tree, numbers = loaded(path), stored_table(path)
    assert_has(take_weights(tree, spec, layout, Kept(dtype="bfloat16", as_bits=True)), numbers)
    past = np.full((1, numbers.size), EXPERTS)
    for other, message in (
        (past, "token_experts: expected whole numbers from 0 to"),
        (past.astype(np.uint16), "token_experts: expected one of int32, int64, got uint16"),
    ):
        given = tree | {LAYERS: tree[LAYERS] | {TOKEN_EXPERTS: other}}
        with pytest.raises(CheckpointError, match=message):
            take_weights(given, spec, layout, Kept(dtype="float32"))


@pytest.mark.parametrize("number", [-1, EXPERTS, 2**32])
def test_an_expert_that_there_is_not_is_refused_by_name(path, number):
    numbers = stored_table(path)
    numbers[7, 1] = number
    with_table(path, numbers)
    where = rf"tensor {TENSOR}: expected whole numbers from 0 to {EXPERTS - 1}, got {number} at"
    with pytest.raises(CheckpointError, match=rf"{where} index {7 * USED + 1} of its values"):
        loaded(path)
    loaded(path, check=False)


def test_a_table_of_other_numbers_is_refused_by_name(path):
    with_table(path, stored_table(path).astype(np.float32))
    with pytest.raises(CheckpointError, match=f"{TENSOR}: expected one of int32, int64, got float"):
        loaded(path)


def test_random_weights_have_experts_that_there_are(path):
    spec, layout = read_family(read_config(path))
    placement = place(spec, layout, jax.devices())
    for as_bits in (False, True):
        kept = Kept(dtype="bfloat16", as_bits=as_bits, placement=placement)
        drawn = random_weights(spec, layout, kept, seed=0)
        assert_has(drawn, (np.arange(VOCAB * USED) % EXPERTS).reshape(VOCAB, USED))
        assert jax.tree.map(np.shape, drawn) == jax.tree.map(np.shape, loaded(path))


def test_each_device_has_all_of_it(path):
    spec, layout = read_family(read_config(path))
    placement = place(spec, layout, jax.devices() * 2, 2)
    assert placement.weight(f"layers.{TOKEN_EXPERTS}", (1, VOCAB * USED)) == PartitionSpec(
        None, None
    )


def test_new_weights_have_a_table_of_their_own(path, tmp_path):
    llm = LLM(path, **SMALL)
    other = make_checkpoint(tmp_path / "other", CONFIG, seed=1)
    llm.update_weights(other)
    assert_has(model_of(llm).weights, stored_table(other))


def test_embeddings_without_tokens_are_refused_by_name(path):
    model = jk.load(path, dtype="float32", skip_tokenizer_init=True)
    assert chooses_by_token(model.weights)
    kv = jk.prefill(model, jk.empty(model, num_pages=4, page_size=8, num_rows=1), {0: [3, 4]})[0]
    with pytest.raises(NotImplementedError, match="layers of this model look up their tokens"):
        jk.extend(model, kv, jk.continuation(kv, 0, room=4), jk.embed(model, np.int32([5])))
