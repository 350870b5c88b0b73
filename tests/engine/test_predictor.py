"""With the layer that a checkpoint ships to predict tokens, the tokens are those without it, and
what it proposes is what its tensors say: transformers' layers in float64, over whole sequences.

Before every step all memory that no request owns is NaN, the hidden states beside pages too.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ahead import assert_same, counted, prompts_of
from families import text_config
from jaxkv import LLM, BeamSearchParams
from jaxkv.errors import CheckpointError
from jaxkv.kv.codecs import PlainCodec
from jaxkv.kv.layout import HeadMajorLayout, LaneRowsLayout
from jaxkv.kv.state import PagedKV, PageTables, empty_store
from jaxkv.programs.draft import last_hidden, with_hidden
from jaxkv.programs.inputs import empty_batch
from jaxkv.testing import blueprint_of, engine_of
from jaxkv.tools.chips import parse_target
from jaxkv.tools.deployment import deploy
from parity import torch
from predicting import (
    GREEDY,
    NUM_AHEAD,
    Reference,
    check_proposals,
    make_predicting,
    noted,
    proposing_every_other_time,
    sequences,
)
from tiny import SMALL, make_checkpoint

__all__ = ["noted", "torch"]

pytestmark = pytest.mark.usefixtures("quick_compile", "one_loop")

DRAWN = replace(GREEDY, temperature=0.8, top_p=0.95, seed=3)
AHEAD = {
    "speculative_config": {
        "method": "mtp",
        "num_speculative_tokens": NUM_AHEAD,
        "disable_by_batch_size": SMALL["max_num_seqs"],
    }
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Its copy of the head is another head."""
    folder = tmp_path_factory.mktemp("predictor") / "model"
    return make_predicting(folder, "glm4_moe", own_head=True)


@pytest.fixture(scope="module")
def ahead(model) -> LLM:
    """With so few pages that rows lose theirs."""
    few = SMALL | {"num_gpu_blocks_override": 20, "kv_host_bytes": 2**22}
    return LLM(model, **few, **AHEAD)


VARIANTS = [
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa-shared",
    "qwen3_next",
]


def test_proposals_are_what_the_layers_tensors_say(torch, model, ahead):
    check_proposals(Reference(torch, model), ahead, prompts_of(151, 6)[2:])
    assert counted(ahead)["at 1"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_proposals_of_other_families_are_what_their_tensors_say(torch, tmp_path, variant):
    made = make_predicting(tmp_path, variant, own_head=True)
    llm = LLM(made, **SMALL, **AHEAD)
    check_proposals(Reference(torch, made), llm, prompts_of(151, 6)[2:])
    assert counted(llm)["at 1"] > 0


@pytest.mark.slow
def test_pages_are_complete_wherever_those_of_the_model_are(torch, model, ahead):
    """In chunks, behind loops that proposed nothing, in pages that others have filled, forked or
    lost, and back from the host.
    """
    reference, engine = Reference(torch, model), engine_of(ahead)
    prompts = prompts_of(151, 6)[2:]
    whole = check_proposals(reference, ahead, prompts, max_tokens=40)
    assert engine.scheduler.num_preemptions > 0
    drawn = sequences(ahead, prompts[1:2], replace(DRAWN, n=3, seed=None, max_tokens=20))
    beams = ahead.beam_search(prompts[2:3], BeamSearchParams(beam_width=3, max_tokens=12))
    beams = [one.tokens for output in beams for one in output.sequences]
    for some_of in (drawn, beams, whole):
        hits = engine.scheduler.num_found
        again = [{"prompt_token_ids": tokens[:-2]} for tokens in some_of[:3]]
        check_proposals(reference, ahead, again, max_tokens=16)
        assert engine.scheduler.num_found > hits
    with proposing_every_other_time(engine):
        check_proposals(reference, ahead, prompts, max_tokens=50)


def test_tokens_are_those_without(model, ahead):
    """Drawn ones too, beside whatever a request asks for, and rows that lose their pages."""
    plain = LLM(model, **SMALL)
    prompts = prompts_of(151, 6)
    assert_same(plain, ahead, prompts, replace(GREEDY, logprobs=3))
    asked = [replace(DRAWN, seed=seed) for seed in range(5)]
    asked.append(replace(DRAWN, repetition_penalty=1.3, min_tokens=9, stop_token_ids=[9]))
    assert_same(plain, ahead, prompts, asked)
    found = counted(ahead)
    assert 0 < found["accepted_tokens"] < found["draft_tokens"]


def test_memory_is_what_was_planned(model, ahead):
    engine, blueprint = engine_of(ahead), blueprint_of(ahead)
    assert blueprint.page_nbytes * blueprint.limits.num_pages == engine.kv.nbytes
    alone = 3 * (page := SMALL["block_size"] * 2 * 2 * 8 * 4)
    assert blueprint.page_nbytes == alone + page + 48 * 4
    own_head = engine.draft["own_head"].nbytes  # no config says that there is one
    assert blueprint.weight_bytes + own_head == sum(
        leaf.nbytes for leaf in jax.tree.leaves((engine.weights, engine.draft))
    )
    assert "\ndraft     " in ahead.describe()
    target, pages = parse_target("v6e:1x1"), {"block_size": 64, "backend": "xla"}
    planned = deploy(model, target, **pages, **AHEAD).blueprint.page_nbytes
    assert planned > deploy(model, target, **pages).blueprint.page_nbytes


@pytest.mark.parametrize("kind", [HeadMajorLayout, LaneRowsLayout])
def test_a_hidden_state_comes_back_from_the_page_of_its_token(kind):
    """One row ends within its second page and has filled its first one, the other rests."""
    size, dims, plain = 4, 200, PlainCodec(dtype="float32")
    layout = kind(num_kv_heads=1, head_dim=dims, page_size=1, codec=plain, latent_dim=dims)
    pages = HeadMajorLayout(num_kv_heads=1, head_dim=8, page_size=size, codec=plain)
    stores = [empty_store(num_layers=1, layout=one, num_pages=5) for one in (pages, layout)]
    tables = PageTables(np.int32([[3, 1], [2, 0]]), np.int32([[0, 4]] * 2), np.int32([2, 0]))
    kv = PagedKV(tuple(stores), rows=(tables,), num_draft=1)
    batch = empty_batch(8, 2)
    batch.position_T[:4], batch.row_T[:4] = [2, 3, 4, 5], 0
    hidden_TD = np.random.default_rng(0).normal(size=(8, dims)).astype(np.float32)
    kv = with_hidden(kv, batch, hidden_TD, np.int32([4, 0]))
    for length, want in ((6, hidden_TD[3]), (4, hidden_TD[1]), (0, np.zeros(dims))):
        rows = (replace(tables, len_B=np.int32([length, 0])),)
        got = np.asarray(last_hidden(replace(kv, rows=rows)))
        np.testing.assert_array_equal(got, [want, np.zeros(dims)])


@pytest.mark.slow
def test_nothing_compiles_after_the_start_nor_after_sleep(ahead):
    engine = engine_of(ahead)
    ahead.wait_until_compiled()
    prompts = prompts_of(151, 4)
    before = sequences(ahead, prompts, GREEDY)
    assert engine.programs.num_compiled == engine.programs.num_programs
    ahead.sleep(level=1)
    ahead.wake_up()
    assert sequences(ahead, prompts, GREEDY) == before


def test_what_it_cannot_do_is_refused_by_name(tmp_path):
    def refused(kind: type[Exception], match: str, directory: Path, **options) -> None:
        with pytest.raises(kind, match=match):
            LLM(directory, **SMALL | AHEAD | options)

    def without_weights(name: str, variant: str, count: int) -> Path:
        config = text_config(variant) | {"num_nextn_predict_layers": count}
        directory = make_checkpoint(tmp_path / name, config)
        (directory / "model.safetensors").unlink()
        return directory

    refused(ValueError, "num_nextn_predict_layers", without_weights("none", "glm4_moe", 0))
    refused(NotImplementedError, "got 2", without_weights("two", "glm4_moe", 2))
    refused(ValueError, "num_nextn_predict_layers", without_weights("no", "qwen3_next", 0))
    refused(NotImplementedError, "got dots1", without_weights("other", "dots1", 1))
    missing = make_checkpoint(tmp_path / "missing", text_config("qwen3_next"))
    refused(CheckpointError, r"missing tensor mtp\.", missing)
    made = make_predicting(tmp_path / "made", "glm4_moe")
    config = AHEAD["speculative_config"] | {"model": str(made)}
    refused(ValueError, "got 'model'", made, speculative_config=config)
    tensors = load_file(made / "model.safetensors")
    join = "model.layers.3.eh_proj.weight"
    save_file(tensors | {join: tensors[join][:, :48]}, made / "model.safetensors")
    refused(CheckpointError, r"eh_proj\.weight: expected shape \(48, 96\)", made)
    del tensors[join]
    save_file(tensors, made / "model.safetensors")
    refused(CheckpointError, r"missing tensor model\.layers\.3\.eh_proj\.weight", made)
    LLM(made, **SMALL)
