"""Adapters beside everything else: with each feature, requests of several adapters in one batch are
what the same engine makes of merged weights, or what each request is alone; and whatever comes, one
after the other or broken, nothing is left behind.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from adapters import make_adapter, merged
from jaxkv import LLM, AsyncLLM, BeamSearchParams, LoRARequest, RequestOutput, SamplingParams
from jaxkv.engine import speculation
from jaxkv.engine.engine import Engine
from jaxkv.requests import adapters
from jaxkv.testing import engine_of
from jaxkv.weights.adapters import CONFIG, TENSORS, Adapter
from tiny import SMALL

pytestmark = pytest.mark.usefixtures("quick_compile", "one_loop", "compile_once")

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=3)
AMONG_FOUR = replace(GREEDY, max_tokens=24, allowed_token_ids=[5, 6, 7, 8])
"""So that what comes was often there before, and may be proposed."""

RNG = np.random.default_rng(1)
PROMPTS = [RNG.integers(3, 151, length).tolist() for length in (45, 60, 38)]
OPTIONS = SMALL | {"num_gpu_blocks_override": 18}
"""With so few pages that not all prompts run at once."""

LORA = {"enable_lora": True, "max_loras": 1}
TWO = {"enable_lora": True, "max_loras": 2}
SOME = 2**20


@pytest.fixture(scope="module")
def loras(checkpoint, tmp_path_factory) -> list[LoRARequest]:
    where = tmp_path_factory.mktemp("adapters")
    made = [make_adapter(where / str(i), checkpoint, seed=i, rank=3 + i) for i in range(2)]
    return [LoRARequest(f"a{i}", i + 1, path) for i, path in enumerate(made)]


@pytest.fixture(scope="module")
def checkpoints(checkpoint, loras, tmp_path_factory) -> list[Path]:
    """What the adapters make of the model, and the model itself."""
    where = tmp_path_factory.mktemp("merged")
    made = [merged(where / one.lora_name, checkpoint, Path(one.path)) for one in loras]
    return [*made, checkpoint]


@pytest.fixture(scope="module")
def plain(checkpoint) -> LLM:
    return LLM(checkpoint, **OPTIONS)


@pytest.fixture(scope="module")
def want(plain, checkpoints) -> list[list[int]]:
    return tokens(each_merged(plain, checkpoints))


@pytest.fixture
def llm(checkpoint) -> LLM:
    return LLM(checkpoint, **OPTIONS, **LORA)


def each_merged(llm: LLM, checkpoints: list[Path], params: SamplingParams = GREEDY) -> list:
    found = []
    for directory, prompt in zip(checkpoints, PROMPTS, strict=True):
        llm.update_weights(directory)
        found += llm.generate([prompt], params, use_tqdm=False)
    return found


def tokens(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def logprobs(outputs) -> list[list[float]]:
    """Of the tokens that were chosen."""
    return [
        [scores[token].logprob for token, scores in zip(one.token_ids, one.logprobs, strict=True)]
        for output in outputs
        for one in output.outputs
    ]


def leaves_nothing(engine: Engine) -> bool:
    engine.check()
    engine.forget()
    allocator = engine.scheduler.allocator
    return not engine.has_work and allocator.num_free == allocator.num_pages


CASES = {
    "a policy": {"kv_policy": "h2o_page", "kv_budget": 40},
    "proposed tokens": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 1,
            "disable_by_batch_size": SMALL["max_num_seqs"],
        }
    },
    "demoted pages": {"kv_policy": "quest", "kv_budget": 40},
    "no cache, one chunk": {"enable_prefix_caching": False, "max_num_batched_tokens": 256},
}


@pytest.mark.slow  # always: beams of several, and requests of several in tests/api/test_lora.py
@pytest.mark.parametrize("case", CASES)
def test_several_in_a_batch_are_each_alone_with_its_weights_merged(
    checkpoint, checkpoints, loras, case, monkeypatch
):
    monkeypatch.setattr(speculation, "LEAST_GAIN", 0.0)  # proposes wherever it may
    params = AMONG_FOUR if "speculative_config" in CASES[case] else GREEDY
    want = each_merged(LLM(checkpoint, **OPTIONS | CASES[case]), checkpoints, params)
    llm = LLM(checkpoint, **OPTIONS | CASES[case], **TWO)
    for _ in range(2):
        got = llm.generate(PROMPTS, params, lora_request=[*loras, None], use_tqdm=False)
        assert tokens(got) == tokens(want)
        np.testing.assert_allclose(logprobs(got), logprobs(want), atol=2e-4)
    assert len({str(one) for one in tokens(got)}) == len(PROMPTS)
    if "speculative_config" in CASES[case]:
        metrics = {metric.name: metric for metric in llm.get_metrics()}
        assert metrics["jaxkv:spec_decode_num_accepted_tokens"].value > 0
    assert leaves_nothing(engine_of(llm))


ROUNDED = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8 pages": {"kv_cache_dtype": "int8"},
    "int4 weights": {"quantization": "int4"},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ROUNDED)
def test_what_is_rounded_is_near_merged_weights_and_the_same_alone(
    checkpoint, checkpoints, plain, loras, case
):
    options = ROUNDED[case]
    llm, scored = LLM(checkpoint, **OPTIONS | options, **TWO), replace(GREEDY, prompt_logprobs=0)
    got = llm.generate(PROMPTS, scored, lora_request=[*loras, None], use_tqdm=False)
    llm.reset_prefix_cache()
    for output, prompt, lora in zip(got, PROMPTS, [*loras, None], strict=True):
        (alone,) = llm.generate([prompt], scored, lora_request=lora, use_tqdm=False)
        assert alone.outputs == output.outputs
    if "quantization" in options:  # what is merged is rounded in another way
        return
    for output, directory in zip(got, checkpoints, strict=True):
        scores = []
        for engine in (llm, plain):
            engine.update_weights(directory)
            asked, one = [output.prompt_token_ids], replace(scored, max_tokens=1)
            scores.append(prompt_logprobs(engine.generate(asked, one, use_tqdm=False)[0]))
        rounded, exact = scores
        far = np.abs(prompt_logprobs(output) - exact).mean()
        assert far < 2 * np.abs(rounded - exact).mean()


def prompt_logprobs(output: RequestOutput) -> np.ndarray:
    pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return np.array([scores[token].logprob for token, scores in pairs])


@pytest.mark.slow
def test_pages_in_host_memory_and_on_a_disk_are_of_their_adapter(checkpoint, loras, want, tmp_path):
    options = OPTIONS | {"kv_host_bytes": SOME}
    options |= {"kv_disk": tmp_path / "disk", "kv_disk_bytes": 2**24}
    given = [*loras, None]

    def run(llm: LLM, number: int, lora: LoRARequest | None) -> tuple[list[int], int]:
        (output,) = llm.generate([PROMPTS[number]], GREEDY, lora_request=lora, use_tqdm=False)
        return output.outputs[0].token_ids, output.num_cached_tokens

    with LLM(checkpoint, **options, **LORA) as llm:
        first = [run(llm, i, given[i]) for i in range(3)]
        assert [found for found, _ in first] == want
        assert [cached for _, cached in first] == [0, 0, 0]
        again = [run(llm, i, given[i]) for i in range(3)]  # whose pages had to leave the device
        assert [found for found, _ in again] == want
        assert all(cached >= 32 for _, cached in again)
        assert run(llm, 0, loras[1])[1] == 0
    with LLM(checkpoint, **options, **LORA) as llm:
        last = [run(llm, i, given[i]) for i in range(3)]
        assert [found for found, _ in last] == want
        assert all(cached >= 32 for _, cached in last)
        assert run(llm, 1, None)[1] == 0


@pytest.mark.slow
def test_beams_of_several_adapters_are_those_of_merged_weights(llm, plain, checkpoints, loras):
    params = BeamSearchParams(beam_width=2, max_tokens=6)
    given, want = [*loras, None], []
    for directory, prompt in zip(checkpoints, PROMPTS, strict=True):
        plain.update_weights(directory)
        want += plain.beam_search([prompt], params)
    got = llm.beam_search(PROMPTS, params, lora_request=given)
    for one, other in zip(got, want, strict=True):
        assert [beam.tokens for beam in one.sequences] == [beam.tokens for beam in other.sequences]
        np.testing.assert_allclose(
            [beam.cum_logprob for beam in one.sequences],
            [beam.cum_logprob for beam in other.sequences],
            atol=1e-3,
        )
    assert leaves_nothing(engine_of(llm))


def test_a_request_that_is_aborted_gives_its_adapter_s_place_to_the_next(checkpoint, loras, want):
    long = replace(GREEDY, max_tokens=60, logprobs=None)

    async def run() -> list[int]:
        async with AsyncLLM(checkpoint, **OPTIONS, **LORA) as llm:
            assert await llm.add_lora(loras[1])
            stream = llm.generate(PROMPTS[0], long, "first", lora_request=loras[0])
            await anext(stream)
            waiting = llm.generate(PROMPTS[1], GREEDY, "second", lora_request=loras[1])
            second = asyncio.ensure_future(anext(waiting))
            gone = llm.generate(PROMPTS[1], GREEDY, "third", lora_request=loras[1])
            third = asyncio.ensure_future(anext(gone))
            while len(engine_of(llm).scheduler.waiting) < 2:
                await asyncio.sleep(0.001)
            await llm.abort(["first", "third"])
            assert [output async for output in stream][-1].outputs[0].finish_reason == "abort"
            assert (await third).outputs[0].finish_reason == "abort"
            last = await second
            async for output in waiting:
                last = output
            while (engine := engine_of(llm)).has_work:
                await asyncio.sleep(0.001)
            assert leaves_nothing(engine)
        return last.outputs[0].token_ids

    assert asyncio.run(run()) == want[1]


def test_an_adapter_that_is_replaced_in_use_is_the_old_one_for_those_under_way(
    llm, loras, want, tmp_path
):
    directory = tmp_path / "changing"
    shutil.copytree(loras[0].path, directory)
    lora = LoRARequest("changing", 1, directory)
    stream = llm.stream(PROMPTS[0], GREEDY, lora_request=lora)
    old = next(stream).outputs[0].token_ids
    for name in (CONFIG, TENSORS):  # in place, which cuts the files first
        shutil.copyfile(Path(loras[1].path) / name, directory / name)
    new = llm.generate([PROMPTS[1]], GREEDY, lora_request=lora, use_tqdm=False)
    old = [*old, *(token for output in stream for token in output.outputs[0].token_ids)]
    assert [old, *tokens(new)] == want[:2]
    assert leaves_nothing(engine_of(llm))


def test_a_file_with_other_bytes_and_the_times_that_it_had_is_read_again(checkpoint, llm, tmp_path):
    """As a copy that keeps times leaves it, of files that an archive has given one time."""
    one, other = (make_adapter(tmp_path / str(seed), checkpoint, seed=seed) for seed in (8, 9))
    file, loras = one / TENSORS, [LoRARequest("a", 1, one), LoRARequest("b", 2, other)]
    before, old = file.stat(), llm.lora_digest(loras[0])
    with file.open("r+b") as stream:
        stream.write((other / TENSORS).read_bytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_ino, file.stat().st_size) == (before.st_ino, before.st_size)
    assert llm.lora_digest(loras[0]) == llm.lora_digest(loras[1]) != old


def test_files_that_change_while_they_are_read_are_refused(llm, loras, tmp_path, monkeypatch):
    directory = tmp_path / "changing"
    shutil.copytree(loras[0].path, directory)
    read = adapters.read_adapter

    def read_and_change(where, *arguments, **options):
        adapter = read(where, *arguments, **options)
        config = json.loads((where / CONFIG).read_text())
        (where / CONFIG).write_text(json.dumps(config | {"lora_alpha": 77}))
        return adapter

    lora = LoRARequest("changing", 1, directory)
    with monkeypatch.context() as patch:
        patch.setattr(adapters, "read_adapter", read_and_change)
        with pytest.raises(ValueError, match="expected files that stay as they are while"):
            llm.generate([PROMPTS[0]], GREEDY, lora_request=lora)
    llm.generate([PROMPTS[0]], GREEDY, lora_request=lora, use_tqdm=False)


@pytest.mark.parametrize("path", ["x" * 300, "~nobody-of-this-name/x", "a\0b", "/dev/null", "/"])
def test_paths_that_are_no_directory_of_an_adapter_are_refused(llm, path):
    with pytest.raises(ValueError, match=r"prompt 0: .*expected .*adapter"):
        llm.generate([PROMPTS[0]], GREEDY, lora_request=LoRARequest("a", 1, path))


@pytest.mark.parametrize("count", [24, pytest.param(2000, marks=pytest.mark.slow)])
def test_adapters_one_after_the_other_leave_nothing(llm, loras, tmp_path, count, monkeypatch):
    """Each another by its scale; the tensors are one file, behind links as hubs have them."""
    engine, short = engine_of(llm), replace(GREEDY, max_tokens=2, logprobs=None)
    config = json.loads((Path(loras[0].path) / CONFIG).read_text())
    sizes, objects, outputs = [], [], set()
    write, writes = engine.programs.write_adapter, []
    monkeypatch.setattr(engine.programs, "write_adapter", lambda: writes.append(1) or write())
    known = {
        id(one): one for one in gc.get_objects() if type(one) is Adapter
    }  # of engines of other tests
    for number in range(count):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / CONFIG).write_text(json.dumps(config | {"lora_alpha": 1 + number / 7}))
        (directory / TENSORS).symlink_to(Path(loras[0].path) / TENSORS)
        lora = LoRARequest(f"adapter {number}", number + 1, directory)
        (output,) = llm.generate([PROMPTS[0]], short, lora_request=lora, use_tqdm=False)
        outputs.add(str(output.outputs[0].token_ids))
        if number in (11, count - 1):
            gc.collect()
            living = [
                one for one in gc.get_objects() if type(one) is Adapter and id(one) not in known
            ]
            assert len(living) <= LORA["max_loras"] + 1  # and the last one's request
            del living
            slots = engine.scheduler.adapters
            sizes.append((engine.programs.num_compiled, len(slots._slot_of), len(slots._num_users)))
            objects.append(len(gc.get_objects()))
    assert len(outputs) > 1
    assert len(writes) == count
    assert sizes[0] == sizes[1]
    assert objects[1] - objects[0] < 5000
    assert leaves_nothing(engine)
