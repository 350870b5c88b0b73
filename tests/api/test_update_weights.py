"""Weights that are replaced while the engine stays, and memory that it gives away for a while: both
against an engine that was made with those weights.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxkv import LLM, AsyncLLM, CheckpointError, SamplingParams
from jaxkv.engine.handover import Handover
from jaxkv.testing import engine_of, front_of, model_of
from tiny import SMALL, make_checkpoint, tiny_config

pytestmark = pytest.mark.usefixtures("quick_compile", "one_loop")

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(3, 151, length).tolist() for length in (40, 9, 70)]
CONFIG = tiny_config("llama")


@pytest.fixture(scope="module")
def old(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("old") / "model", CONFIG)


@pytest.fixture(scope="module")
def new(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("new") / "model", CONFIG, seed=1)


@pytest.fixture(scope="module")
def llm(old) -> LLM:
    return LLM(old, **SMALL)


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    front_of(llm).check()
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def want(llm, new) -> tuple[list[list[int]], list[list[int]]]:
    """The tokens of the old weights, and those of the new ones."""
    other = LLM(new, **SMALL)
    engine_of(other).programs.executables = engine_of(llm).programs.executables
    both = tokens(llm), tokens(other)
    assert both[0] != both[1]
    return both


def nested(arrays: dict[str, np.ndarray]) -> dict:
    """Has a dict within for everything before the last dot."""
    tree: dict = {}
    for name, array in arrays.items():
        branch, _, last = name.rpartition(".")
        tree.setdefault(branch, {})[last] = array
    return tree


def test_other_weights_give_their_tokens_at_once_and_compile_nothing(llm, want, old, new):
    arrays = {name: jnp.asarray(x) for name, x in load_file(new / "model.safetensors").items()}
    tree = jax.tree.map(np.asarray, model_of(LLM(new, **SMALL)).weights)
    count = engine_of(llm).programs.num_compiled
    for source in (new, str(new), arrays, nested(arrays), tree):
        assert tokens(llm) == want[0]  # what is cached now must not be found again
        identity = llm.identity()["weights"]
        llm.update_weights(source)
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == want[1]
        assert [output.num_cached_tokens for output in outputs] == [0, 0, 0]
        assert llm.identity()["weights"] != identity
        llm.update_weights(old)
    assert engine_of(llm).programs.num_compiled == count
    # What was given is the caller's still.
    assert not any(array.is_deleted() for array in arrays.values())


@pytest.mark.parametrize("is_replaced", [False, True])
def test_sessions_find_their_pages_after_an_update_that_was_cut_off(
    llm, want, old, new, monkeypatch, is_replaced
):
    llm.update_weights(new)
    front = front_of(llm)
    replace_weights = front.replace_weights

    def interrupt(*args: object, **keywords: object) -> None:
        if is_replaced:
            replace_weights(*args, **keywords)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(front, "replace_weights", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.update_weights(old)
    session = llm.session({"prompt_token_ids": PROMPTS[2]})
    assert len(session.pages) == len(PROMPTS[2]) // 8
    llm.update_weights(old)
    assert tokens(llm) == want[0]


def test_sessions_of_before_claim_the_pages_of_the_new_weights(llm, old):
    session = llm.session({"prompt_token_ids": PROMPTS[2]})
    (fork,) = session.fork(1)
    llm.update_weights(old)
    assert session.pages == ()
    later, _ = session.generate(SamplingParams(max_tokens=1, ignore_eos=True))
    assert len(session.pages) == len(PROMPTS[2]) // 8
    assert session.pages == fork.pages == later.pages[: len(session.pages)]
    del later
    engine = engine_of(llm)
    engine.check()
    assert len(engine.scheduler.allocator.pins) == len(session.pages)


def deleted() -> jax.Array:
    array = jnp.ones(48)
    array.delete()
    return array


def test_what_does_not_fit_leaves_the_old_weights_whole(llm, want, new, tmp_path):
    arrays = load_file(new / "model.safetensors")
    name, other = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
    endless: dict = {}
    endless["model"] = endless
    wrong = {
        r"up_proj.weight: expected shape .* got \(80, 47\)": {name: arrays[name][:, :-1]},
        r"expected finite values as float32, got nan": {other: arrays[other] * np.nan},
        r"does not use: model.layers.3": {"model.layers.3.mlp.up_proj.weight": arrays[name]},
        r"expected one of float32.* got int32": {other: np.zeros(48, np.int32)},
        r"model.norm.weight: expected a numpy or jax array, got list; jax.numpy.from_dlpack": {
            other: [1.0]
        },
        r"expected texts as names, got 3": {3: arrays[other]},
        r"model.norm.weight: .* one that was deleted": {other: deleted()},
        r"model.norm.weight: expected a .* got ndarray of .*O": {other: np.zeros(48, [("a", "O")])},
        r"model.norm.weight: expected a .* of key<fry>": {other: jax.random.key(0)},
        r"dicts within dicts without end": {"model": endless},
    }
    cases = {message: arrays | change for message, change in wrong.items()}
    cases[f"missing tensor {name}"] = {k: x for k, x in arrays.items() if k != name}
    tree = jax.tree.map(np.asarray, model_of(llm).weights)
    cases["missing array norm; give"] = {k: x for k, x in tree.items() if k != "norm"}
    cases[r"norm: expected shape \(48,\), got \(47,\)"] = tree | {"norm": tree["norm"][1:]}
    cases["weights: expected a directory, .* got None"] = None
    deeper = tmp_path / "deeper"
    make_checkpoint(deeper, CONFIG | {"num_hidden_layers": 4})
    cases["got a config.json of another one"] = deeper
    cases["got nothing there"] = tmp_path / "nowhere"
    for message, source in cases.items():
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            llm.update_weights(source)
    assert tokens(llm) == want[0]


@pytest.mark.slow
def test_weights_are_quantised_as_when_they_are_loaded(old, new):
    options = SMALL | {"quantization": "int8", "dtype": "bfloat16"}
    want = tokens(LLM(new, **options))
    llm = LLM(old, **options)
    assert tokens(llm) != want
    for source in (load_file(new / "model.safetensors"), new):
        llm.update_weights(source)
        assert tokens(llm) == want
        llm.update_weights(old)
    tree = jax.tree.map(np.asarray, model_of(LLM(new, **SMALL)).weights)
    llm.update_weights(tree)
    assert tokens(llm) == want


def test_a_request_under_way_goes_on_with_the_new_weights(llm, want, new, old):
    long = replace(GREEDY, max_tokens=30)
    known = llm.generate(PROMPTS[0], long, use_tqdm=False)[0].outputs[0].token_ids
    stream, got = llm.stream(PROMPTS[0], long), []
    while len(got) < 3:
        got += next(stream).outputs[0].token_ids
    llm.update_weights(new)
    engine_of(llm).check()
    said = got + [token for output in stream for token in output.outputs[0].token_ids]
    assert len(said) == 30
    # Up to a loop of tokens was under way; behind those the new weights' own follow.
    same = next(i for i, token in enumerate(said) if token != known[i])
    assert len(got) <= same
    rest = replace(GREEDY, max_tokens=30 - same)
    (again,) = llm.generate([PROMPTS[0] + known[:same]], rest, use_tqdm=False)
    assert again.outputs[0].token_ids == said[same:]
    llm.update_weights(old)


def test_what_a_request_lists_later_is_not_found_by_keys_that_were_made_before(llm, new, old):
    llm.reset_prefix_cache()
    stream = llm.stream(PROMPTS[2], replace(GREEDY, max_tokens=50))
    next(stream)
    session = llm.session(PROMPTS[2])
    assert len(session.pages) == 8
    keys = session._claim.keys
    llm.update_weights(new)
    assert session.pages == ()
    for _ in range(3):  # until its prompt is computed anew and listed
        next(stream)
    assert not engine_of(llm).scheduler.allocator.listed(keys)
    assert len(session.pages) == 8
    assert llm.session(PROMPTS[2]).pages == session.pages
    stream.close()
    llm.update_weights(old)


def test_sleep_gives_the_memory_away_and_wake_up_brings_it_back(llm, want, new, old):
    engine = engine_of(llm)
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    with pytest.raises(ValueError, match="sleep: expected no requests under way"):
        llm.sleep()
    stream.close()
    count = engine.programs.num_compiled
    for level in (1, 2):
        assert tokens(llm) == want[0]
        identity = llm.identity()
        arrays = jax.tree.leaves((engine.weights, engine.kv.pools))
        llm.sleep(level)
        llm.sleep(level)
        assert llm.is_sleeping
        assert all(array.is_deleted() for array in arrays)
        for call in (lambda: tokens(llm), lambda: llm.session([7] * 9), llm.identity):
            with pytest.raises(ValueError, match=r"^expected an engine that is awake"):
                call()
        assert llm.describe()
        assert llm.get_metrics()
        if level == 2:
            with pytest.raises(ValueError, match=r"expected update_weights\(\) first"):
                llm.wake_up()
            llm.update_weights(new)
            llm.wake_up(["kv_cache"])
        else:
            llm.wake_up(["weights"])
            assert llm.is_sleeping
            llm.wake_up()
        assert not llm.is_sleeping
        llm.wake_up()
        assert tokens(llm) == want[level - 1]
        assert (llm.identity() == identity) == (level == 1)
    assert engine.programs.num_compiled == count
    llm.update_weights(old)
    for call in (lambda: llm.sleep(0), lambda: llm.wake_up("weights"), lambda: llm.wake_up([])):
        with pytest.raises(ValueError, match=r"^(level|tags): expected"):
            call()


def test_what_stands_behind_the_prefix_cache_is_emptied_too(old, new, want, tmp_path):
    options = SMALL | {"kv_host_bytes": 2**22, "kv_disk": tmp_path / "pages"}
    options["kv_disk_bytes"] = 2**24
    with LLM(old, **options) as llm:
        assert tokens(llm) == want[0]
        llm.sleep()
        llm.wake_up()
        kept = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert kept[0].num_cached_tokens > 0  # from the disk: its weights are the same
        accepted = llm.stream(PROMPTS[2][::-1], GREEDY)  # of which the engine knows nothing yet
        llm.update_weights(new)
        pages = {
            metric.name: metric.value for metric in llm.get_metrics("") if "pages" in metric.name
        }
        assert pages["kv_disk_pages"] == pages["kv_host_pages"] == 0
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [output.num_cached_tokens for output in outputs] == [0, 0, 0]
        assert [output.outputs[0].token_ids for output in outputs] == want[1]
        assert [output.num_cached_tokens for output in accepted][-1] == 0
    with LLM(old, **options) as llm:  # no page of the new weights is taken for one of the old
        assert tokens(llm) == want[0]
        (output,) = llm.generate([PROMPTS[2][::-1]], GREEDY, use_tqdm=False)
        assert output.num_cached_tokens == 0


def test_asyncio(old, new, want, llm):
    async def main() -> list[list[int]]:
        async with AsyncLLM(old, **SMALL) as served:
            engine_of(served).programs.executables = engine_of(llm).programs.executables
            await served.sleep(2)
            assert await served.is_sleeping()
            with pytest.raises(ValueError, match="awake"):
                await anext(served.generate(PROMPTS[0], GREEDY))
            await served.update_weights(new)
            await served.wake_up()
            read = [[one async for one in served.generate(p, GREEDY)][-1] for p in PROMPTS]
            return [output.outputs[0].token_ids for output in read]

    assert asyncio.run(main()) == want[1]


@pytest.mark.slow
def test_both_engines_of_a_handover_have_the_new_weights(llm, old, new, want):
    parts = [LLM(old, **SMALL) for _ in range(2)]
    others = [LLM(new, **SMALL) for _ in range(2)]
    for one in (*parts, *others):
        engine_of(one).programs.executables = engine_of(llm).programs.executables
    first, second = map(engine_of, parts)
    front = Handover(first, second)
    parts[1]._front = front
    assert tokens(parts[1]) == want[0]
    front.replace_weights(*(model_of(one).weights for one in others), secret=b"new")
    parts[1].reset_prefix_cache()
    assert tokens(parts[1]) == want[1]
    front.sleep(keeps_weights=True)
    assert front.is_asleep
    with pytest.raises(ValueError, match="awake"):
        tokens(parts[1])
    front.wake_up(("weights", "kv_cache"))
    assert tokens(parts[1]) == want[1]
    front.end()


def test_a_tied_head_is_stored_once_in_what_is_given(tmp_path):
    config = tiny_config("qwen2")
    old, new = (make_checkpoint(tmp_path / str(seed), config, seed=seed) for seed in (0, 1))
    arrays = load_file(new / "model.safetensors")
    save_file(
        arrays | {"lm_head.weight": arrays["model.embed_tokens.weight"]}, new / "a.safetensors"
    )
    (new / "model.safetensors").unlink()
    llm = LLM(old, **SMALL)
    llm.update_weights(new)
    assert "head" not in model_of(llm).weights
    own_head = arrays | {"lm_head.weight": -arrays["model.embed_tokens.weight"]}
    with pytest.raises(CheckpointError, match=r"got others: head$"):
        llm.update_weights(own_head)
