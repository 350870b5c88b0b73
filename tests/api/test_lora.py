"""Adapters of many requests in one batch, against checkpoints with the same adapters merged into
their weights.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from adapters import make_adapter, merged
from jaxkv import LLM, AsyncLLM, CheckpointError, LoRARequest, SamplingParams, SavedFileError
from jaxkv.testing import engine_of, intake_of
from tiny import SMALL

pytestmark = pytest.mark.usefixtures("quick_compile", "one_loop")

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=5)
SCORED = replace(GREEDY, prompt_logprobs=2)
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(3, 151, length).tolist() for length in (40, 9, 70, 20, 33, 5, 50, 12, 17)]
LAYER = "model.layers.1.self_attn.q_proj"
NUM = 8
OPTIONS = SMALL | {"max_num_seqs": 9, "skip_tokenizer_init": False}
LORA = {"enable_lora": True, "max_lora_rank": 16}
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def base(checkpoint) -> Path:
    return checkpoint


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory) -> list[tuple[Path, object]]:
    """Eight of them, of all forms that are read, each with the scales of its modules."""
    where = tmp_path_factory.mktemp("adapters")
    made: list[tuple[Path, object]] = []
    for seed in range(NUM - 3):
        adapter = make_adapter(where / str(seed), base, seed=seed, rank=2 + 3 * seed)
        made.append((adapter, 1.0))
    rooted = make_adapter(where / "rs", base, seed=5, rank=9, use_rslora=True, lora_alpha=6)
    made.append((rooted, 2.0))
    some = {"targets": ("q_proj", "down_proj"), "lora_alpha": 16}
    made.append((make_adapter(where / "some", base, seed=6, rank=8, **some), 2.0))
    own = {"rank_pattern": {"layers.1.self_attn.q_proj": 5}, "alpha_pattern": {"v_proj": 7}}
    ranks = {LAYER: 5}
    last = make_adapter(where / "own", base, seed=7, rank=3, lora_alpha=3, ranks=ranks, **own)
    names = load_file(base / "model.safetensors")
    scales = {name.removesuffix(".weight"): 1.0 for name in names}
    scales |= {LAYER: 3 / 5} | {name: 7 / 3 for name in scales if name.endswith("v_proj")}
    return [*made, (last, scales)]


@pytest.fixture(scope="module")
def loras(adapters) -> list[LoRARequest]:
    return [LoRARequest(f"a{i}", i + 1, path) for i, (path, _) in enumerate(adapters)]


@pytest.fixture(scope="module")
def checkpoints(base, adapters, tmp_path_factory) -> list[Path]:
    """What each adapter makes of the model, and the model itself."""
    where = tmp_path_factory.mktemp("merged")
    made = [merged(where / str(i), base, *one) for i, one in enumerate(adapters)]
    return [*made, base]


@pytest.fixture(scope="module")
def plain(base) -> LLM:
    return LLM(base, **OPTIONS)


@pytest.fixture(scope="module")
def want(plain, checkpoints) -> list:
    """The outputs of each checkpoint, alone, for its prompt."""
    found = []
    for checkpoint, prompt in zip(checkpoints, PROMPTS, strict=True):
        plain.update_weights(checkpoint)
        found += plain.generate([prompt], SCORED, use_tqdm=False)
    return found


@pytest.fixture(scope="module")
def llm(base) -> LLM:
    llm = LLM(base, **OPTIONS, **LORA, max_loras=NUM)
    llm.wait_until_compiled()
    return llm


@pytest.fixture(scope="module")
def small(base) -> LLM:
    """An engine whose pages and places for adapters are fewer than requests would like."""
    llm = LLM(base, **OPTIONS | {"num_gpu_blocks_override": 18}, **LORA, max_loras=2)
    llm.wait_until_compiled()
    return llm


def tokens(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def logprobs(output) -> list[dict[int, float]]:
    entries = [*(output.prompt_logprobs or [None])[1:], *output.outputs[0].logprobs]
    return [{token: one.logprob for token, one in entry.items()} for entry in entries]


def assert_same(outputs, want) -> None:
    assert tokens(outputs) == tokens(want)
    for got, expected in zip(outputs, want, strict=True):
        for entry, other in zip(logprobs(got), logprobs(expected), strict=True):
            shared = entry.keys() & other.keys()
            assert len(shared) >= 2
            np.testing.assert_allclose(
                [entry[one] for one in shared], [other[one] for one in shared], atol=TOLERANCE
            )


def test_eight_adapters_in_one_batch_are_each_alone_with_its_weights_merged(llm, loras, want):
    count = engine_of(llm).programs.num_compiled
    outputs = llm.generate(PROMPTS, SCORED, lora_request=[*loras, None], use_tqdm=False)
    assert_same(outputs, want)
    assert [output.lora_request for output in outputs] == [*loras, None]
    assert len({str(one) for one in tokens(outputs)}) == NUM + 1
    assert engine_of(llm).programs.num_compiled == count + len(
        engine_of(llm).programs.token_buckets
    )
    engine_of(llm).check()


def test_adapters_take_turns_in_fewer_slots_and_compile_nothing(small, loras, want, monkeypatch):
    engine = engine_of(small)
    count, most = engine.programs.num_compiled, 0

    def watch(scheduler) -> None:
        nonlocal most
        scheduler.check()
        running = {one.draw.adapter.digest for one in scheduler.running if one.draw.adapter}
        most = max(most, len(running))

    write, writes = engine.programs.write_adapter, []
    monkeypatch.setattr(engine.programs, "write_adapter", lambda: writes.append(1) or write())
    engine.watchers.append(watch)
    given, order = [*loras, None], [0, 1, 2, 8, 3, 0, 4, 5, 6, 7, 1, 0]
    prompts, own = [PROMPTS[i] for i in order], [given[i] for i in order]
    outputs = small.generate(prompts, GREEDY, lora_request=own, use_tqdm=False)
    engine.watchers.clear()
    assert tokens(outputs) == tokens([want[i] for i in order])
    assert engine.programs.num_compiled == count
    assert most == 2
    assert len(writes) >= 9
    before = len(writes)
    small.generate(PROMPTS[:1], GREEDY, lora_request=loras[0], use_tqdm=False)
    assert len(writes) == before  # it was the last one, and is still there
    engine.check()


def test_preempted_rows_go_on_with_their_adapters(small, llm, loras):
    params, own = replace(GREEDY, max_tokens=60, logprobs=None), [*loras[:2], None, *loras[:2]]
    outputs = [
        one.generate(PROMPTS[:5], params, lora_request=own, use_tqdm=False) for one in (small, llm)
    ]
    assert tokens(outputs[0]) == tokens(outputs[1])
    engine = engine_of(small)
    assert engine.scheduler.num_preemptions > 0
    engine.check()
    small.reset_prefix_cache()
    assert engine.scheduler.allocator.num_free == engine.scheduler.allocator.num_pages


def test_the_prefix_cache_goes_by_what_an_adapter_computes(llm, adapters, loras, want, tmp_path):
    llm.reset_prefix_cache()
    prompt = PROMPTS[2]

    def cached(lora: LoRARequest | None) -> int:
        (output,) = llm.generate([prompt], GREEDY, lora_request=lora, use_tqdm=False)
        return output.num_cached_tokens

    assert [cached(one) for one in (loras[2], None, loras[1])] == [0, 0, 0]
    assert [cached(one) for one in (loras[2], None, loras[1])] == [64, 64, 64]
    # Another name, number and path, the same content; then the same names and another content.
    copy = tmp_path / "copy"
    shutil.copytree(adapters[2][0], copy)
    assert cached(LoRARequest("other", 77, copy)) == 64
    shutil.copytree(adapters[3][0], copy, dirs_exist_ok=True)
    assert cached(LoRARequest("other", 77, copy)) == 0
    (output,) = llm.generate(
        [PROMPTS[3]], GREEDY, lora_request=LoRARequest("other", 77, copy), use_tqdm=False
    )
    assert tokens([output]) == tokens([want[3]])
    config = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 1}))
    assert cached(LoRARequest("other", 77, copy)) == 0


def test_chats_streams_sessions_and_async_calls_take_adapters(
    llm, base, loras, want, tmp_path, monkeypatch
):
    lora, prompt, params = loras[0], PROMPTS[0], GREEDY
    streamed = [one for out in llm.stream(prompt, params, lora_request=lora) for one in out.outputs]
    assert [t for one in streamed for t in one.token_ids] == tokens(want)[0]
    session = llm.session(prompt, lora_request=lora)
    longer, output = session.generate(params)
    assert output.token_ids == tokens(want)[0]
    assert len(session.pages) == 5
    assert session.lora_request == lora
    scored = session.logprobs([output.token_ids[:2]])
    best = [want[0].outputs[0].logprobs[i][output.token_ids[i]].logprob for i in (0, 1)]
    np.testing.assert_allclose(scored[0], best, atol=TOLERANCE)
    longer.save(tmp_path / "session")
    llm.reset_prefix_cache()
    for other in (None, loras[1]):
        with pytest.raises(SavedFileError, match="lora_request: expected the adapter that"):
            llm.restore(tmp_path / "session", lora_request=other)
    restored = llm.restore(tmp_path / "session", lora_request=lora)
    assert restored.tokens == longer.tokens
    assert len(restored.pages) == 6
    assert restored.generate(params)[1].token_ids == longer.generate(params)[1].token_ids
    # An adapter whose files change meanwhile is the one or the other, not first this and then that.
    adapter_of, asked = intake_of(llm).adapter_of, []
    with monkeypatch.context() as patch:
        patch.setattr(
            intake_of(llm), "adapter_of", lambda one: asked.append(one) or adapter_of(one)
        )
        llm.restore(tmp_path / "session", lora_request=lora)
        assert asked == [lora]
        longer.save(tmp_path / "again")
        assert asked == [lora] * 2

    async def run() -> list[list[int]]:
        async with AsyncLLM(base, **OPTIONS, **LORA, max_loras=NUM) as served:
            engine_of(served).programs.executables = engine_of(llm).programs.executables

            async def one(i: int) -> list[int]:
                async for out in served.generate(
                    PROMPTS[i], params, lora_request=[*loras, None][i]
                ):
                    last = out
                return last.outputs[0].token_ids

            with pytest.raises(CheckpointError, match="expected a directory"):
                async for _ in served.generate(
                    prompt, params, lora_request=LoRARequest("x", 1, tmp_path / "none")
                ):
                    pass
            session = await served.session(prompt, lora_request=lora)
            _, output = await session.generate(params)
            found = await asyncio.gather(*(one(i) for i in range(NUM + 1)))
            return [output.token_ids, *found]

    assert asyncio.run(run()) == [tokens(want)[0], *tokens(want)]


def test_a_chat_has_its_adapter(llm, plain, checkpoints, loras):
    message = [{"role": "user", "content": "The end"}]
    params = replace(GREEDY, logprobs=None)
    with_it = llm.chat(message, params, lora_request=loras[0], use_tqdm=False)
    without = llm.chat(message, params, use_tqdm=False)
    plain.update_weights(checkpoints[0])
    assert tokens(with_it) == tokens(plain.chat(message, params, use_tqdm=False))
    assert tokens(with_it) != tokens(without)


def test_adapters_come_back_after_sleep_and_other_weights(small, base, loras, checkpoints, want):
    llm = small

    def run() -> list[list[int]]:
        return tokens(llm.generate(PROMPTS[:2], GREEDY, lora_request=loras[:2], use_tqdm=False))

    assert run() == tokens(want[:2])
    for level in (1, 2):
        llm.sleep(level)
        if level == 2:
            llm.update_weights(base)
        llm.wake_up()
        assert run() == tokens(want[:2])
    identity = llm.identity()
    llm.update_weights(checkpoints[0])
    assert run()[0] != tokens(want)[0]
    llm.update_weights(base)
    assert run() == tokens(want[:2])
    assert llm.identity() == identity  # says nothing of adapters


@pytest.mark.slow
def test_quantised_weights_take_adapters(base, loras, adapters, plain, tmp_path):
    """Weights that int8 holds exactly, so that the adapter is all that is added to them."""
    exact = tmp_path / "exact"
    shutil.copytree(base, exact)
    weights = load_file(base / "model.safetensors")
    for name, weight in weights.items():
        if "proj" in name:
            scale = np.abs(weight).max(axis=1, keepdims=True) / 127
            weights[name] = (np.round(weight / scale) * scale).astype(np.float32)
    save_file(weights, exact / "model.safetensors", metadata={"format": "pt"})
    plain.update_weights(merged(tmp_path / "m", exact, *adapters[1]))
    want = plain.generate(PROMPTS[:2], GREEDY, use_tqdm=False)
    quantised = LLM(exact, **OPTIONS, **LORA, quantization="int8")
    got = quantised.generate(PROMPTS[:2], GREEDY, lora_request=loras[1], use_tqdm=False)
    assert_same(got, want)


@pytest.mark.slow
def test_bits_depend_neither_on_chunks_nor_on_the_cache(base, loras):
    llm = LLM(base, **OPTIONS, **LORA, max_loras=2, deterministic=True)
    alone = llm.generate([PROMPTS[2]], GREEDY, lora_request=loras[2], use_tqdm=False)
    again = llm.generate(
        [PROMPTS[6], PROMPTS[2]], GREEDY, lora_request=[loras[3], loras[2]], use_tqdm=False
    )
    assert again[1].num_cached_tokens
    assert not alone[0].num_cached_tokens
    assert again[1].outputs == alone[0].outputs
    llm.reset_prefix_cache()
    whole = LLM(base, **OPTIONS | {"max_num_batched_tokens": 128}, **LORA, deterministic=True)
    assert whole.generate([PROMPTS[2]], GREEDY, lora_request=loras[2], use_tqdm=False)[
        0
    ].outputs == (alone[0].outputs)


def test_an_interrupt_loses_no_adapter(small, loras, want, monkeypatch):
    """It may come between giving the room for adapters away and getting it back."""
    engine = engine_of(small)
    small.generate(PROMPTS[:1], GREEDY, lora_request=loras[0], use_tqdm=False)

    def interrupted():
        for leaf in jax.tree.leaves(engine.adapters):
            leaf.delete()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.programs, "write_adapter", interrupted)
        with pytest.raises(KeyboardInterrupt):
            small.generate(PROMPTS[:1], GREEDY, lora_request=loras[3], use_tqdm=False)
    engine.check()
    outputs = small.generate(PROMPTS[:2], GREEDY, lora_request=loras[:2], use_tqdm=False)
    assert tokens(outputs) == tokens(want[:2])
    engine.check()


def test_what_adapters_do_not_go_with_is_refused(base, plain, loras):
    with pytest.raises(
        ValueError, match=r"prompt 0: lora_request: expected None without LLM.enabl"
    ):
        plain.generate(PROMPTS[:1], GREEDY, lora_request=loras[0])
    with pytest.raises(ValueError, match="lora_request: expected one for all or 2"):
        plain.generate(PROMPTS[:2], GREEDY, lora_request=loras[:1])
    with pytest.raises(ValueError, match="enable_lora: expected False with disaggregate"):
        LLM(base, **OPTIONS, **LORA, disaggregate=(1, 1))
    with pytest.raises(ValueError, match="max_cpu_loras: expected None or at least max_loras=4"):
        LLM(base, **OPTIONS, **LORA, max_loras=4, max_cpu_loras=2)
    for given, name in (
        ({"lora_name": ""}, "lora_name"),
        ({"lora_int_id": 0}, "lora_int_id"),
        ({"lora_path": None}, "lora_path"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            LoRARequest(**{"lora_name": "a", "lora_int_id": 1, "lora_path": "b"} | given)
