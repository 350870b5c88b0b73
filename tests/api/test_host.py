"""Pages that the device has no room for come back from host memory as they were."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from families import text_config
from jaxkv.api.llm import LLM
from jaxkv.config import SamplingParams
from jaxkv.engine import host_moves, pages
from jaxkv.holding.costs import Pace
from jaxkv.testing import engine_of
from poison import poisoned
from tiny import SMALL, make_checkpoint, tiny_config

pytestmark = pytest.mark.usefixtures("quick_compile", "one_loop")

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SOME = 2**20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("host") / "model", tiny_config("llama"))


@pytest.fixture(scope="module")
def windows(tmp_path_factory) -> Path:
    """A model with two page tables, of which one is for windows."""
    config = tiny_config("qwen2-mixed-windows")
    return make_checkpoint(tmp_path_factory.mktemp("windows") / "model", config)


@pytest.fixture
def make(checkpoint, compile_once) -> Callable[..., LLM]:
    return lambda model=checkpoint, **options: LLM(model, **SMALL | options)


def ids(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 150, length).tolist()


@pytest.mark.parametrize(
    ("model", "kv_cache_dtype", "num_pages"),
    [
        pytest.param("checkpoint", "auto", 26, marks=pytest.mark.slow),
        pytest.param("checkpoint", "int8", 26, marks=pytest.mark.slow),
        ("windows", "auto", 40),
    ],
    ids=["auto", "int8", "windows"],
)
def test_conversations_that_take_turns_find_their_pages_again(
    make, request, model, kv_cache_dtype, num_pages
):
    """Eight of them in a pool for two, several at once, with NaN in all memory that nobody owns."""
    own = {"kv_cache_dtype": kv_cache_dtype, "num_gpu_blocks_override": num_pages}
    own["model"] = request.getfixturevalue(model)
    llm, plain = make(kv_host_bytes=SOME, **own), make(**own)
    turns: dict[int, list[int]] = {talk: ids(30, talk) for talk in range(8)}
    with poisoned(engine_of(llm)):
        for turn in range(3):
            for first in range(0, 8, 2):
                talks = [first, first + 1]
                prompts = [{"prompt_token_ids": turns[talk]} for talk in talks]
                outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
                wanted = plain.generate(prompts, GREEDY, use_tqdm=False)
                for talk, got, want in zip(talks, outputs, wanted, strict=True):
                    assert got.outputs[0].token_ids == want.outputs[0].token_ids
                    if turn:  # all full pages of what was there after the last turn
                        known = len(turns[talk]) - 6
                        assert got.num_cached_tokens == (known - 1) // 8 * 8
                    turns[talk] += got.outputs[0].token_ids + ids(6, 10 * talk + turn)
                engine_of(llm).check()
    metrics = {metric.name: metric for metric in llm.get_metrics("")}
    assert metrics["kv_host_pages"].value > 40
    assert metrics["kv_host_hits"].value > 400
    assert "host memory keeps" in llm.describe()


def test_what_is_on_its_way_to_host_memory_is_forgotten_too(make):
    engine = engine_of(llm := make(kv_host_bytes=SOME))
    llm.generate({"prompt_token_ids": ids(60, 0)}, GREEDY, use_tqdm=False)
    for is_forgotten in (False, True):
        key = b"forgotten" if is_forgotten else b"kept"
        engine._moves.out(engine.kv, [(0, key)], is_leaving=True)
        if is_forgotten:
            assert llm.reset_prefix_cache()
        engine._moves.settle()
        assert (key in engine.scheduler.tiers.host) == (not is_forgotten)


def test_sleep_leaves_no_copies_of_pages_on_the_device(make):
    engine = engine_of(llm := make(kv_host_bytes=SOME))
    engine._moves.out(engine.kv, [(0, b"kept")], is_leaving=True)
    assert any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(engine._moves._coming))
    llm.sleep()
    assert not engine._moves._coming
    assert b"kept" in engine.scheduler.tiers.host


@pytest.mark.parametrize("num_pages", [0.5, 2, 40])
def test_only_so_many_pages_are_in_flight_either_way(make, monkeypatch, num_pages):
    """Those of so many bytes, but one at least, and no more than that are moved at once."""
    engine = engine_of(make(kv_host_bytes=SOME))
    page_bytes = pages.page_nbytes(engine.kv)[0]
    monkeypatch.setattr(pages, "IN_FLIGHT_BYTES", int(num_pages * page_bytes))
    moves = engine._moves = host_moves.HostMoves(engine.scheduler.tiers, engine.kv)
    given = [(page, str(page).encode()) for page in range(48)]
    most = max(num_pages, 1) * page_bytes
    moves.out(engine.kv, given, is_leaving=True)
    found = [leaf for *_, own in moves._coming for leaf in jax.tree.leaves(own)]
    assert 0 < sum(leaf.nbytes for leaf in found if isinstance(leaf, jax.Array)) <= most
    moves.settle()
    host, in_flight, write = engine.scheduler.tiers.host, [0], host_moves.write_pages

    def written(kv, page_C, arrays, n, *, s):
        in_flight[-1] += sum(array.nbytes for array in arrays)
        return write(kv, page_C, arrays, n, s=s)

    with monkeypatch.context() as patch:
        patch.setattr(host_moves, "write_pages", written)
        patch.setattr(jax, "block_until_ready", lambda _: in_flight.append(0))
        for some in (given[:24], given[24:]):  # those of two steps
            engine.kv = moves.back(engine.kv, [(page, host.get(key)) for page, key in some])
    assert max(in_flight) <= most
    assert sum(in_flight) >= 48 * page_bytes


def test_steps_without_pages_to_load_cost_pages_nothing(make):
    llm = make(kv_host_bytes=SOME, num_gpu_blocks_override=16)
    for seed in (0, 1, 0, 1):  # after the first load, which compiles, one that is measured
        llm.generate({"prompt_token_ids": ids(100, seed)}, GREEDY, use_tqdm=False)
    copied = engine_of(llm).scheduler.tiers.costs.copied
    before = replace(copied)
    llm.generate({"prompt_token_ids": ids(5, 2)}, GREEDY, use_tqdm=False)
    assert copied == before != Pace()


def test_the_least_used_pages_leave_host_memory_first(make):
    llm = make(kv_host_bytes=SOME, num_gpu_blocks_override=16)
    page = engine_of(llm).scheduler.tiers.host
    page.most = 6
    for seed in range(6):
        llm.generate({"prompt_token_ids": ids(60, seed)}, GREEDY, use_tqdm=False)
    assert len(page) == 6
    (output,) = llm.generate({"prompt_token_ids": ids(60, 0)}, GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == 0


def test_a_failure_between_taking_and_loading_loses_no_page(make, monkeypatch):
    """Pages that were not loaded are not found: the requests are computed anew."""
    llm = make(kv_host_bytes=SOME, num_gpu_blocks_override=16)
    engine = engine_of(llm)
    prompt = {"prompt_token_ids": ids(60, 0)}
    (want,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    for seed in range(1, 4):
        llm.generate({"prompt_token_ids": ids(60, seed)}, GREEDY, use_tqdm=False)

    def fail(*_: object) -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as patch, poisoned(engine):
        patch.setattr(engine._moves, "back", fail)
        with pytest.raises(RuntimeError, match="no"):
            llm.generate(prompt, GREEDY, use_tqdm=False)
    engine.check()
    (again,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert again.outputs[0].token_ids == want.outputs[0].token_ids
    engine.check()


def test_what_host_memory_does_not_hold_is_refused_by_name(make, tmp_path):
    for reason, options in (
        ("kv_policy", {"kv_policy": "streaming", "kv_budget": 64}),
        ("enable_prefix_caching", {"enable_prefix_caching": False}),
        ("number >= 0", {"kv_host_bytes": -1}),
    ):
        with pytest.raises(ValueError, match=f"kv_host_bytes.*{reason}"):
            make(**{"kv_host_bytes": 1} | options)
    with pytest.raises(ValueError, match=r"kv_host_bytes: expected room for a page, \d+ bytes"):
        make(kv_host_bytes=100)
    states = make_checkpoint(tmp_path / "model", text_config("lfm2"))
    with pytest.raises(ValueError, match=r"kv_host_bytes.*recurrent states"):
        make(model=states, kv_host_bytes=1)
