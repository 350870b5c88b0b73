"""Many users at once: each gets what it would get alone, whoever else comes, goes, dawdles or
fails.
"""

import asyncio
import gc
import math
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import jaxkv
from jaxkv.api.async_llm import AsyncLLM
from jaxkv.api.engine_thread import Stream, _Live
from jaxkv.api.llm import LLM
from jaxkv.config import RequestOutputKind, SamplingParams
from jaxkv.engine.engine import Engine
from jaxkv.engine.metrics import Metric
from jaxkv.errors import EngineDeadError
from jaxkv.lora.request import LoRARequest
from jaxkv.requests import grammar
from jaxkv.requests.outputs import RequestOutput
from jaxkv.requests.request import Request
from jaxkv.structured import StructuredOutputsParams
from jaxkv.testing import blocking, engine_of, intake_of, thread_of
from tiers import some

pytestmark = pytest.mark.usefixtures("quick_compile")

VOCAB, MAX_LEN, PATIENCE_S = 420, 128, 300
OPTIONS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 8,
    "dtype": "float32",
    "lazy_compile": True,
}
OPTIONS |= {"max_model_len": MAX_LEN}
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
LONG = replace(GREEDY, max_tokens=100)
DRAWN = SamplingParams(temperature=1.5, max_tokens=30, ignore_eos=True)
PROMPTS = [
    "Once upon a time",
    {"prompt": "The end of"},
    {"prompt_token_ids": [9, 8, 7]},
    "One by one, by one, by one",
]
MIXED = [
    (PROMPTS[0], replace(DRAWN, seed=1)),
    (PROMPTS[1], replace(DRAWN, seed=2, max_tokens=60, stop=["e", "never ever"])),
    (PROMPTS[2], LONG),
    (PROMPTS[3], replace(DRAWN, seed=3, logprobs=2, prompt_logprobs=1)),
    (PROMPTS[3], replace(DRAWN, seed=4, n=3, prompt_logprobs=0)),
    (PROMPTS[0], replace(GREEDY, stop="never ever")),
    ({"prompt_token_ids": [5] * 100}, replace(DRAWN, seed=5, logprobs=0)),
    (PROMPTS[2], replace(DRAWN, seed=6, temperature=20.0, max_tokens=60)),
    (PROMPTS[1], replace(GREEDY, max_tokens=1)),
    (PROMPTS[2], replace(GREEDY, detokenize=False)),
]


@pytest.fixture(scope="module")
def sync(checkpoint) -> LLM:
    """What is right."""
    return LLM(checkpoint, **OPTIONS)


@pytest.fixture(scope="module")
def make(sync, checkpoint) -> Iterator[Callable[[], AsyncLLM]]:
    """A new AsyncLLM with the compiled programs of `sync`; ended with the module at the latest."""
    made = []

    def make() -> AsyncLLM:
        llm = AsyncLLM(checkpoint, **OPTIONS)
        engine_of(llm).programs.executables = engine_of(sync).programs.executables
        engine_of(llm).step = Pace(engine_of(llm))
        made.append(weakref.ref(llm))
        return llm

    yield make
    for reference in made:
        if (llm := reference()) is not None:
            llm.shutdown()


@pytest.fixture(scope="module")
def shared(make) -> AsyncLLM:
    return make()


@pytest.fixture
def llm(shared) -> Iterator[AsyncLLM]:
    """The module's engine, in a loop of its own for every test, which must leave it empty."""
    yield shared
    run(assert_soon_empty(shared))


class Pace:
    """In the place of an engine's step: takes none once all that can run have `enough` tokens,
    while the thread goes on doing what it is told. `rest_s`: the pause before each step.
    """

    def __init__(self, engine: Engine) -> None:
        self.enough: float = math.inf
        self.rest_s = 0.0
        self.engine = engine
        self._step = engine.step

    def __call__(self) -> list:
        running, num_rows = (
            self.engine.scheduler.running,
            self.engine.scheduler.config.max_num_seqs,
        )
        all_run = len(running) == min(len(self.engine._requests), num_rows)
        if all_run and all(request.num_new >= self.enough for request in running):
            time.sleep(0.001)
            return []
        time.sleep(self.rest_s)
        return self._step()


@pytest.fixture
def pace(llm) -> Iterator[Pace]:
    """Of the shared one."""
    pace = engine_of(llm).step
    yield pace
    pace.enough, pace.rest_s = math.inf, 0.0


def run(awaitable: Awaitable[Any]) -> Any:
    """In an event loop of its own; whatever hangs fails."""

    async def guarded() -> Any:
        return await asyncio.wait_for(awaitable, PATIENCE_S)

    return asyncio.run(guarded())


def assert_free(llm: AsyncLLM) -> None:
    """To be called after something that was awaited, when the thread has nothing to do."""
    engine, thread = engine_of(llm), thread_of(llm)
    engine.check()
    assert not engine.has_work
    assert engine.scheduler.allocator.num_used == 0
    assert (thread._live, thread._live_of) == ({}, {})


async def assert_soon_empty(llm: AsyncLLM) -> None:
    """After the commands so far, nothing is left of any request or event loop."""
    for _ in range(5):  # a generator that was forgotten is closed by a task that a callback makes
        await asyncio.sleep(0)
    await llm.is_sleeping()
    for _ in range(1000):  # the thread looks after its outboxes when it has answered
        if thread_of(llm)._outboxes:
            await asyncio.sleep(0.001)
    assert thread_of(llm)._outboxes == {}
    assert_free(llm)


async def arrived(llm: AsyncLLM, count: int) -> None:
    """Waits until the engine has so many requests."""
    while len(thread_of(llm)._live) < count:
        await asyncio.sleep(0.001)


async def held_up(llm: AsyncLLM) -> threading.Event:
    """Has the thread wait for what is returned."""
    gate = threading.Event()
    thread_of(llm).post(gate.wait)
    while thread_of(llm)._commands.qsize():
        await asyncio.sleep(0.001)
    return gate


async def posted(llm: AsyncLLM, count: int) -> None:
    """Waits until so many commands wait for the thread, which is held up."""
    while thread_of(llm)._commands.qsize() < count:
        await asyncio.sleep(0.001)


async def collect(outputs: AsyncGenerator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in outputs]


async def last(outputs: AsyncGenerator[RequestOutput]) -> RequestOutput:
    return (await collect(outputs))[-1]


async def ended(*coroutines: Coroutine[Any, Any, Any]) -> list[Any]:
    """Results and exceptions."""
    return await asyncio.gather(*coroutines, return_exceptions=True)


def alone(sync: LLM, prompt: object, params: SamplingParams) -> RequestOutput:
    (output,) = sync.generate([prompt], params, use_tqdm=False)
    return output


def assert_same(output: RequestOutput, expected: RequestOutput) -> None:
    """Tokens and text are the same, log-probabilities nearly (their bits:
    tests/engine/test_reproducible.py).
    """

    def exact(output: RequestOutput) -> list[object]:
        rest = [replace(one, logprobs=None, cumulative_logprob=None) for one in output.outputs]
        return [
            output.prompt,
            output.prompt_token_ids,
            output.finished,
            rest,
            [list(entry) for entry in scored(output)],
        ]

    def scored(output: RequestOutput) -> list[dict]:
        groups = [output.prompt_logprobs, *(one.logprobs for one in output.outputs)]
        return [entry for group in groups for entry in group or () if entry]

    assert exact(output) == exact(expected)
    for one, other in zip(scored(output), scored(expected), strict=True):
        assert [x.logprob for x in one.values()] == pytest.approx(
            [x.logprob for x in other.values()], abs=1e-5
        )


def gauge(metrics: list[Metric], name: str) -> float:
    (value,) = [metric.value for metric in metrics if metric.name == f"jaxkv:{name}"]
    return value


# --- generate
# ---------------------------------------------------------------------------------------------------------


def test_many_at_once_get_what_each_would_get_alone(llm, sync):
    """Ten requests of all kinds over four rows, two times each; what was given out on the way are
    beginnings of it.
    """
    requests = MIXED * 2

    async def main() -> list[list[RequestOutput]]:
        streams = [
            llm.generate(prompt, params, f"r{i}") for i, (prompt, params) in enumerate(requests)
        ]
        return await asyncio.gather(*map(collect, streams))

    for i, outputs in enumerate(run(main())):
        expected = alone(sync, *requests[i])
        final = outputs[-1]
        assert_same(final, expected)
        assert {output.request_id for output in outputs} == {f"r{i}"}
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        for before, output in zip(outputs, [*outputs[1:], final], strict=True):
            for part, whole in zip(before.outputs, output.outputs, strict=True):
                assert whole.text.startswith(part.text)
                assert part.token_ids == whole.token_ids[: len(part.token_ids)]
                assert (
                    part.logprobs is None or part.logprobs == whole.logprobs[: len(part.token_ids)]
                )


def test_outputs_do_not_change_once_they_are_given_out(llm, pace):
    async def main() -> None:
        pace.rest_s = 0.02  # to see them one by one
        for request in (MIXED[3], MIXED[4]):
            given, copies = [], []
            async for output in llm.generate(*request):
                given.append(output)
                copies.append(deepcopy(output))
            assert len(given) > 2
            assert given == copies
            assert [output.metrics for output in given] == [output.metrics for output in copies]
            assert given[0].prompt_token_ids is given[-1].prompt_token_ids  # which may be long
            assert given[0].metrics.finished_time is None
            assert given[-1].metrics.finished_time is not None

    run(main())
    (submission,) = intake_of(llm).accept([PROMPTS[0]], [replace(GREEDY, prompt_logprobs=1)])
    output = _Live(Stream("r"), submission, None).news()
    submission.samples[0].output.prompt_logprobs.append(
        {}
    )  # as steps do while the prompt is computed
    assert output.prompt_logprobs == [None]


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_samples_that_are_ahead_of_the_scores_of_their_prompt_wait_for_them(llm, sync, pace, kind):
    prompt = {"prompt_token_ids": list(range(3, 100))}  # 12 pages, and a token for two samples
    params = replace(DRAWN, n=3, seed=8, prompt_logprobs=0)
    pace.rest_s = 0.01  # the loop sees each step's results

    async def main() -> list[RequestOutput]:
        await last(llm.generate(prompt, GREEDY))
        return await collect(llm.generate(prompt, replace(params, output_kind=kind)))

    outputs, wanted = run(main()), alone(sync, prompt, params)
    assert_same(replace(wanted, outputs=[]), replace(outputs[0], outputs=[], finished=True))
    left = outputs[1:] if kind is RequestOutputKind.DELTA else []
    assert [output.prompt_logprobs for output in left] == [None] * len(left)


def test_a_request_that_comes_while_another_runs_finishes_before_it(llm, sync, pace):
    short = replace(GREEDY, max_tokens=5)

    async def main() -> tuple[RequestOutput, RequestOutput]:
        pace.enough = 1
        first = llm.generate(PROMPTS[0], LONG)
        assert not (await anext(first)).finished
        second = asyncio.create_task(last(llm.generate(PROMPTS[1], short)))
        await arrived(llm, 2)
        pace.enough = math.inf
        return await last(first), await second

    first, second = run(main())
    assert second.metrics.finished_time < first.metrics.finished_time
    assert_same(first, alone(sync, PROMPTS[0], LONG))
    assert_same(second, alone(sync, PROMPTS[1], short))


def test_ids_are_made_up_and_parameters_and_conversations_are_as_everywhere(llm, sync):
    messages = [{"role": "user", "content": "The end"}]

    async def main() -> list[RequestOutput]:
        streams = [llm.generate(PROMPTS[0]) for _ in range(3)]
        return await asyncio.gather(*map(last, streams), last(llm.generate(messages, GREEDY)))

    *outputs, chat = run(main())
    assert len({output.request_id for output in outputs}) == 3
    assert {len(output.outputs[0].token_ids) for output in outputs} == {16}
    assert llm.get_default_sampling_params() == SamplingParams()
    (expected,) = sync.chat(messages, GREEDY, use_tqdm=False)
    assert chat.outputs == expected.outputs


def test_the_lowest_priority_goes_first(llm, pace):
    """Four rows are taken, one of them for a short while: the last two to come wait for that
    one.
    """

    async def main() -> tuple[RequestOutput, ...]:
        pace.enough = 1
        running = [
            llm.generate(PROMPTS[0], replace(LONG, max_tokens=n)) for n in (100, 100, 100, 60)
        ]
        await asyncio.gather(*map(anext, running))
        waiting = [
            asyncio.create_task(last(llm.generate(PROMPTS[1], GREEDY, priority=p))) for p in (5, -1)
        ]
        await arrived(llm, 6)
        pace.enough = math.inf
        later, sooner, *_ = await asyncio.gather(*waiting, *map(last, running))
        return later, sooner

    later, sooner = run(main())
    assert sooner.metrics.first_scheduled_time < later.metrics.first_scheduled_time


def test_two_threads_with_loops_of_their_own_share_one_engine(llm, sync):
    results: dict[int, list[RequestOutput]] = {}

    async def main() -> list[RequestOutput]:
        return await asyncio.gather(*(last(llm.generate(*request)) for request in MIXED))

    def thread(i: int) -> None:
        results[i] = run(main())

    threads = [threading.Thread(target=thread, args=(i,)) for i in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    for outputs in (results[0], results[1]):
        for output, request in zip(outputs, MIXED, strict=True):
            assert_same(output, alone(sync, *request))


# --- one that ends early
# ----------------------------------------------------------------------------------------------


def test_abort_ends_the_iterator_with_a_last_output_and_nobody_else_s(llm, sync, pace):
    async def main() -> None:
        pace.enough = 1
        other = asyncio.create_task(last(llm.generate(PROMPTS[1], LONG)))
        streams = [llm.generate(PROMPTS[0], LONG, f"r{i}") for i in range(3)]
        given = await asyncio.gather(*map(anext, streams[:2]))
        third = asyncio.create_task(collect(streams[2]))
        await asyncio.sleep(0)
        await llm.abort("r0")
        await llm.abort(["r1", "never heard of", "r2", "r1"])
        await llm.abort("r1")
        pace.enough = math.inf
        whole = alone(sync, PROMPTS[0], LONG).outputs[0]
        for outputs in [*[await collect(stream) for stream in streams[:2]], await third]:
            (completion,) = outputs[-1].outputs
            assert (completion.finish_reason, completion.stop_reason) == ("abort", None)
            assert outputs[-1].finished
            assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]
            assert len(completion.token_ids) < 100
            assert whole.text.startswith(completion.text)
        assert given[0].outputs[0].token_ids
        assert_same(await other, alone(sync, PROMPTS[1], LONG))

    run(main())


@pytest.mark.parametrize("ids", [5, None, ["r", 5], [["r"]]])
def test_abort_takes_ids_only(llm, ids):
    with pytest.raises(ValueError, match="request_id: expected a str or several, got"):
        run(llm.abort(ids))


def test_abort_frees_before_it_returns(llm, pace):
    async def main() -> None:
        pace.enough = 1
        stream = llm.generate(PROMPTS[0], LONG, "r")
        await anext(stream)
        assert engine_of(llm).scheduler.allocator.num_used > 0
        await llm.abort("r")
        assert_free(llm)
        assert (await last(stream)).outputs[0].finish_reason == "abort"

    run(main())


def test_the_last_output_after_an_abort_has_the_text_that_could_have_begun_a_stop_string(
    llm, sync, pace
):
    whole = alone(sync, PROMPTS[0], GREEDY).outputs[0].text
    stop = whole + "never ever"  # so that all of the text is held back

    async def main() -> list[RequestOutput]:
        pace.enough = 1
        stream = llm.generate(PROMPTS[0], replace(GREEDY, stop=stop), "r")
        first = await anext(stream)
        await llm.abort("r")
        return [first, *await collect(stream)]

    first, *_, final = run(main())
    assert first.outputs[0].text == "" < final.outputs[0].text
    assert whole.startswith(final.outputs[0].text)


def test_abort_of_a_request_that_waits_for_a_row(llm, pace):
    async def main() -> None:
        pace.enough = 1
        running = [llm.generate(PROMPTS[0], LONG) for _ in range(4)]
        await asyncio.gather(*map(anext, running))
        waiting = asyncio.create_task(collect(llm.generate(PROMPTS[1], LONG, "r")))
        await asyncio.sleep(0)
        await llm.abort("r")
        pace.enough = math.inf
        (output,) = await waiting
        assert (output.finished, output.outputs[0].token_ids, output.outputs[0].finish_reason) == (
            True,
            [],
            "abort",
        )
        assert [output.finished for output in await asyncio.gather(*map(last, running))] == [
            True
        ] * 4

    run(main())


@pytest.mark.parametrize("method", ["_compile_grammar", "_read_adapters"])
def test_abort_of_a_request_whose_grammar_or_adapter_takes_long(llm, monkeypatch, method):
    async def main() -> RequestOutput:
        is_asked, is_done = asyncio.Event(), asyncio.Event()
        really = getattr(llm, method)

        async def slow(asked: Any) -> Any:
            is_asked.set()
            await is_done.wait()
            return await really(asked)

        monkeypatch.setattr(llm, method, slow)
        reading = asyncio.create_task(last(llm.generate(PROMPTS[0], LONG, "r")))
        await is_asked.wait()
        await llm.abort("r")
        is_done.set()
        return await reading

    (completion,) = run(main()).outputs
    assert (completion.token_ids, completion.finish_reason) == ([], "abort")


def test_grammars_that_take_long_hold_up_those_that_are_not_known_only(llm, monkeypatch):
    pytest.importorskip("llguidance")
    have_begun, may_end = threading.Event(), threading.Event()

    async def main() -> None:
        forms = [
            replace(GREEDY, structured_outputs=StructuredOutputsParams(regex=f"a{{{one},}}"))
            for one in range(1, 42)
        ]
        before = [await last(llm.generate("The", one)) for one in (GREEDY, forms[0])]
        grammars = intake_of(llm).grammars()
        make = grammars._made

        def slow(source: str) -> Any:
            have_begun.set()
            may_end.wait(PATIENCE_S)
            return make(source)

        monkeypatch.setattr(grammars, "_made", slow)
        # More than asyncio's own threads are on any machine.
        others = [asyncio.create_task(last(llm.generate("The", one))) for one in forms[1:]]
        try:
            await asyncio.to_thread(have_begun.wait, PATIENCE_S)
            async with asyncio.timeout(PATIENCE_S / 10):
                now = [await last(llm.generate("The", one)) for one in (GREEDY, forms[0])]
        finally:
            may_end.set()
        assert [one.outputs for one in now] == [one.outputs for one in before]
        assert all(one.finished for one in await asyncio.gather(*others))

    run(main())


def test_those_who_wait_for_an_adapter_take_no_thread_from_others(llm, monkeypatch):
    have_begun, may_end = threading.Event(), threading.Event()

    def slow(request: LoRARequest) -> None:
        have_begun.set()
        may_end.wait(PATIENCE_S)

    async def main() -> None:
        monkeypatch.setattr(intake_of(llm), "adapter_of", slow)
        lora = LoRARequest("a", 1, "a")
        # More than asyncio's own threads are on any machine.
        others = [asyncio.create_task(llm.add_lora(lora)) for _ in range(40)]
        try:
            await asyncio.to_thread(have_begun.wait, PATIENCE_S)
            async with asyncio.timeout(PATIENCE_S / 10):
                assert await asyncio.to_thread(int) == 0
        finally:
            may_end.set()
        await asyncio.gather(*others)

    run(main())


def test_a_grammar_is_compiled_once_however_many_come_before_its_request(llm, monkeypatch):
    pytest.importorskip("llguidance")
    monkeypatch.setattr(grammar, "KEPT", 1)
    compiled, read = [], llm._read_adapters

    async def main() -> None:
        grammars, are_compiled = intake_of(llm).grammars(), asyncio.Event()
        make = grammars._made

        def made(source: str) -> Any:
            compiled.append(source)
            return make(source)

        async def late(asked: Any) -> Any:
            if len(compiled) == 4:
                are_compiled.set()
            await are_compiled.wait()
            return await read(asked)

        monkeypatch.setattr(grammars, "_made", made)
        monkeypatch.setattr(llm, "_read_adapters", late)
        forms = [StructuredOutputsParams(regex=f"b{{{one},}}") for one in range(1, 5)]
        await asyncio.gather(
            *(last(llm.generate("The", replace(GREEDY, structured_outputs=one))) for one in forms)
        )

    run(main())
    assert len(compiled) == 4


def test_abort_before_the_first_iteration_means_nothing(llm, sync):
    async def main() -> RequestOutput:
        stream = llm.generate(PROMPTS[0], GREEDY, "r")
        await llm.abort("r")
        return await last(stream)

    assert_same(run(main()), alone(sync, PROMPTS[0], GREEDY))


@pytest.mark.parametrize("is_running", [False, True])
def test_a_cancelled_task_ends_its_request(llm, pace, is_running):
    async def main() -> None:
        pace.enough = 1
        seen, running = [], asyncio.Event()

        async def read() -> None:
            async for output in llm.generate(PROMPTS[0], LONG, "r"):
                seen.append(output)
                running.set()

        task = asyncio.create_task(read())
        await (running.wait() if is_running else asyncio.sleep(0))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await assert_soon_empty(llm)
        assert not any(output.finished for output in seen)

    run(main())


def test_a_request_that_is_cancelled_before_the_engine_looks_at_it_never_begins(llm):
    async def main() -> None:
        arrived = gauge(await llm.get_metrics(), "prompt_tokens")
        gate = await held_up(llm)
        task = asyncio.create_task(collect(llm.generate(PROMPTS[0], LONG)))
        await posted(llm, 1)
        task.cancel()
        await ended(task)
        gate.set()
        await assert_soon_empty(llm)
        assert gauge(await llm.get_metrics(), "prompt_tokens") == arrived

    run(main())


def test_closing_and_forgetting_an_iterator_end_its_request(llm, pace):
    async def main() -> None:
        pace.enough = 1
        closed, never_read = (llm.generate(PROMPTS[0], LONG) for _ in range(2))
        await anext(closed)
        await closed.aclose()
        await never_read.aclose()
        await assert_soon_empty(llm)
        async for _ in llm.generate(PROMPTS[0], LONG):
            break
        gc.collect()
        await assert_soon_empty(llm)

    run(main())


def test_a_loop_that_ends_takes_its_requests_along(llm, pace):
    async def main() -> None:
        pace.enough = 1
        task = asyncio.create_task(last(llm.generate(PROMPTS[0], LONG)))
        stream = llm.generate(PROMPTS[0], LONG)
        await anext(stream)
        main.kept = task, stream

    run(main())
    run(assert_soon_empty(llm))


def test_so_does_a_loop_that_is_closed_without_any_care(llm, pace):
    loop = asyncio.new_event_loop()
    streams = [llm.generate(PROMPTS[0], LONG) for _ in range(2)]
    pace.enough = 1
    for stream in streams:
        loop.run_until_complete(asyncio.wait_for(anext(stream), PATIENCE_S))
    assert len(thread_of(llm)._live) == 2
    loop.close()
    run(assert_soon_empty(llm))


# --- refusals
# ---------------------------------------------------------------------------------------------------------


def test_a_refusal_is_raised_where_it_was_asked_for_and_nowhere_else(llm, sync):
    bad = {
        "the prompt is empty": ("",),
        "expected token ids from 0 to 419": ({"prompt_token_ids": [VOCAB]},),
        "expected a text": (3,),
        "the prompt has": ("x" * 1000,),
        "sampling_params: expected SamplingParams, got str": (PROMPTS[0], "greedy"),
        "stop_token_ids: expected token ids": (PROMPTS[0], replace(GREEDY, stop_token_ids=[VOCAB])),
        "request_id: expected a text or None, got int": (PROMPTS[0], GREEDY, 3),
        "conversation has no|expected a list of": ([3.5],),
        "expected a text, token ids": (["one", "two"],),
    }

    async def main() -> list[Any]:
        running = llm.generate(PROMPTS[0], LONG)
        await anext(running)
        priority = last(llm.generate(PROMPTS[0], GREEDY, priority="high"))
        return await ended(
            last(running), *(last(llm.generate(*one)) for one in bad.values()), priority
        )

    good, *refused, priority = run(main())
    assert_same(good, alone(sync, PROMPTS[0], LONG))
    for message, error in zip(
        [*bad, "priority: expected a whole number"], [*refused, priority], strict=True
    ):
        assert type(error) is ValueError
        with pytest.raises(ValueError, match=f"^(prompt: )?({message})"):
            raise error


def test_an_id_is_for_one_request_at_a_time(llm, sync, pace):
    async def main() -> None:
        pace.enough = 1
        first = llm.generate(PROMPTS[0], LONG, "r")
        await anext(first)
        with pytest.raises(
            ValueError, match="request_id: expected one that is not in use, got 'r'"
        ):
            await last(llm.generate(PROMPTS[1], GREEDY, "r"))
        assert "r" in thread_of(llm)._live
        # Now it ends, unread, and the id has another request: closing the old iterator is nothing
        # to that.
        await llm.abort("r")
        second = llm.generate(PROMPTS[1], GREEDY, "r")
        pieces = [await anext(second)]
        await first.aclose()
        pace.enough = math.inf
        pieces += await collect(second)
        assert_same(pieces[-1], alone(sync, PROMPTS[1], GREEDY))

    run(main())


# --- readers that dawdle
# ----------------------------------------------------------------------------------------------


def test_a_slow_reader_gets_the_newest_state_only(llm, sync, pace):
    async def main() -> list[RequestOutput]:
        pace.enough = 1
        slow = llm.generate(PROMPTS[0], GREEDY)
        first = await anext(slow)
        pace.enough = math.inf
        await last(llm.generate(PROMPTS[1], LONG))
        return [first, *await collect(slow)]

    first, final = run(main())
    assert not first.finished
    assert_same(final, alone(sync, PROMPTS[0], GREEDY))


def test_for_a_reader_of_the_last_output_no_other_one_is_made(llm, sync, pace, monkeypatch):
    made, news = [], _Live.news
    monkeypatch.setattr(_Live, "news", lambda live: made.append(live) or news(live))
    pace.rest_s = 0.02
    params = replace(DRAWN, n=2, seed=8, output_kind=RequestOutputKind.FINAL_ONLY)
    output = run(last(llm.generate(PROMPTS[0], params)))
    assert len(made) == 1
    assert_same(output, alone(sync, PROMPTS[0], params))


def test_one_delivery_serves_all_streams_and_a_stuck_loop_gets_no_second_one(
    llm, sync, pace, monkeypatch
):
    engine, steps, calls, largest = engine_of(llm), [], [], []
    idle = threading.Event()
    step = engine.step

    def counted() -> list:
        got = step()
        steps.append(len(got))
        largest.append(max(len(outbox.changed) for outbox in thread_of(llm)._outboxes.values()))
        if not engine.has_work:
            idle.set()
        return got

    async def main(stuck: bool) -> list[RequestOutput]:
        loop = asyncio.get_running_loop()
        pace.enough = 1
        streams = [llm.generate(PROMPTS[0], LONG) for _ in range(4)]
        await asyncio.gather(*map(anext, streams))
        call = loop.call_soon_threadsafe
        monkeypatch.setattr(
            loop, "call_soon_threadsafe", lambda *args: (calls.append(args), call(*args))
        )
        steps.clear()
        idle.clear()
        pace.enough = math.inf
        if stuck:
            assert idle.wait(PATIENCE_S)
            assert len(calls) <= 1
            assert sum(map(bool, steps)) > 5
        return await asyncio.gather(*map(collect, streams))

    monkeypatch.setattr(engine, "step", counted)
    for stuck in (False, True):
        calls.clear()
        outputs = run(main(stuck))
        assert all(one[-1].outputs == alone(sync, PROMPTS[0], LONG).outputs for one in outputs)
        assert len(calls) <= len(steps) + 1
        assert max(largest) <= 4
        assert all(len(one) <= 2 for one in outputs) or not stuck


# --- failures
# ---------------------------------------------------------------------------------------------------------


def break_once(llm: AsyncLLM, error: BaseException, *, donated: bool = False) -> None:
    """The next device call fails; `donated`: with the pool already consumed."""
    programs = engine_of(llm).programs

    def broken(size: int) -> Callable:
        patch.undo()

        def program(weights, kv, *_):
            if donated:
                for store in kv.stores:
                    store.pages.delete()
            raise error

        return program

    patch = pytest.MonkeyPatch()
    patch.setattr(programs, "step", broken)
    patch.setattr(programs, "loop", broken)


@pytest.fixture
def deaths(monkeypatch) -> list[type[BaseException]]:
    """What threads died of. Without this pytest fails the test, as Python would print the
    traceback.
    """
    seen: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))
    return seen


@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize("kind", [RuntimeError, TypeError, MemoryError])
def test_a_failed_step_is_raised_by_those_that_were_in_it(llm, sync, kind, donated):
    """At most four of six are in the step; those that wait go on, also where the pool went with
    it.
    """
    error = kind("one for all")

    async def main() -> list[Any]:
        gate = await held_up(llm)
        tasks = [
            asyncio.create_task(last(llm.generate(PROMPTS[i % 4], GREEDY, f"r{i}")))
            for i in range(6)
        ]
        await posted(llm, 6)
        break_once(llm, error, donated=donated)
        gate.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = run(main())
    in_step = [result for result in results if result is error]
    assert 0 < len(in_step) < 6
    for i, result in enumerate(results):
        assert result is error or result.outputs == alone(sync, PROMPTS[i % 4], GREEDY).outputs
    # The engine's trace and this iterator's, not those of all the others.
    trace, frames = error.__traceback__, 0
    while trace is not None:
        trace, frames = trace.tb_next, frames + 1
    assert frames < 20


def test_a_failed_step_in_the_middle_leaves_those_that_wait(llm, sync, pace):
    error = RuntimeError("device")

    async def main() -> list[Any]:
        pace.enough = 1
        # The fourth has no row: it is not in the step, and ends all the same.
        several = replace(DRAWN, n=4, seed=1, max_tokens=60)
        running = [llm.generate(PROMPTS[1], LONG), llm.generate(PROMPTS[0], several)]
        await asyncio.gather(*map(anext, running))
        waiting = [asyncio.create_task(last(llm.generate(PROMPTS[3], LONG))) for _ in range(2)]
        await arrived(llm, 4)
        (parts,) = [
            live.submission.samples
            for live in thread_of(llm)._live.values()
            if len(live.submission.samples) == 4
        ]
        assert [part.row is None for part in parts] == [False] * 3 + [True]
        break_once(llm, error)
        pace.enough = math.inf
        results = await ended(*map(last, running), *waiting)
        assert [part.finish_reason for part in parts] == ["abort"] * 4
        return results

    *failed, third, fourth = run(main())
    assert failed == [error, error]
    for output in (third, fourth):
        assert_same(output, alone(sync, PROMPTS[3], LONG))


def test_a_failed_step_that_concerns_nobody_any_more_ends_nothing(
    llm, pace, sync, monkeypatch, caplog
):
    """Its request is gone when it is read, because the next one's tokens must be read before
    planning.
    """
    engine, failed = engine_of(llm), []
    read = engine.results.read

    def fail_once(flight: Any) -> list[Any]:
        if flight is not None and not failed:
            failed.append(flight)
            raise RuntimeError("device")
        return read(flight)

    def leave() -> None:
        assert engine._flight is not None
        monkeypatch.setattr(engine.results, "read", fail_once)
        thread_of(llm).abort(["gone"])

    async def main() -> RequestOutput:
        pace.enough = 1
        stream = llm.generate(PROMPTS[0], replace(LONG, presence_penalty=0.5), "gone")
        await anext(stream)
        await thread_of(llm).ask(leave)
        pace.enough = math.inf
        result = await last(llm.generate(PROMPTS[1], GREEDY))
        assert failed
        return result

    with caplog.at_level("WARNING", logger="jaxkv"):
        result = run(main())
    assert result.outputs == alone(sync, PROMPTS[1], GREEDY).outputs
    assert "a step failed that concerns no request any more: RuntimeError('device')" in caplog.text


def test_a_prompt_that_takes_long_to_tokenize_does_not_stop_the_others(llm, sync, monkeypatch):
    """Whose place in the order of those that come later it keeps."""
    slow, may_end, kind = "The end of it", threading.Event(), type(blocking(llm).get_tokenizer())
    encode = kind.encode

    def stuck(tokenizer: object, text: str, *args: object, **options: object) -> list[int]:
        if text == slow:
            assert may_end.wait(60)
        return encode(tokenizer, text, *args, **options)

    async def main() -> tuple[list[RequestOutput], list[Any]]:
        session = await llm.session("Once")
        running = llm.generate(PROMPTS[0], LONG)
        await anext(running)
        with monkeypatch.context() as patch:
            patch.setattr(kind, "encode", stuck)
            others = (llm.tokens_of(slow), llm.session(slow), session.extend(slow))
            counted = [asyncio.create_task(one) for one in (*others, session.logprobs([slow]))]
            late = [asyncio.create_task(last(llm.generate(one, GREEDY))) for one in (slow, "x")]
            found = await asyncio.wait_for(last(running), 30)
            may_end.set()
            return [found, *await asyncio.gather(*late)], await asyncio.gather(*counted)

    try:
        outputs, (tokens, begun, longer, scores) = run(main())
    finally:
        may_end.set()
    wanted = ((PROMPTS[0], LONG), (slow, GREEDY), ("x", GREEDY))
    for output, (prompt, params) in zip(outputs, wanted, strict=True):
        assert_same(output, alone(sync, prompt, params))
    assert tokens == list(begun.tokens) == outputs[1].prompt_token_ids
    assert longer.text == "Once" + slow
    assert len(scores[0]) == len(tokens) - 1  # without the one that begins a prompt


def test_who_asks_without_end_does_not_stop_the_others(llm, sync):
    is_asking = threading.Event()
    is_asking.set()

    def ask_again() -> None:
        if is_asking.is_set():
            thread_of(llm).post(ask_again)

    async def main() -> RequestOutput:
        ask_again()
        try:
            return await asyncio.wait_for(last(llm.generate(PROMPTS[1], GREEDY)), PATIENCE_S)
        finally:
            is_asking.clear()

    assert run(main()).outputs == alone(sync, PROMPTS[1], GREEDY).outputs


def test_what_a_failed_step_has_finished_before_it_failed_is_a_result(llm, sync, monkeypatch):
    error, engine, params = (
        RuntimeError("ours"),
        engine_of(llm),
        replace(GREEDY, max_tokens=1),
    )
    accept, accepted = engine.results._accept, []

    def accept_one(request: Any, *args: Any) -> None:
        if accepted:
            raise error
        accepted.append(request.id)
        accept(request, *args)

    async def main() -> list[Any]:
        gate = await held_up(llm)
        tasks = [asyncio.create_task(last(llm.generate(PROMPTS[i], params))) for i in range(3)]
        await posted(llm, 3)
        with monkeypatch.context() as patch:
            patch.setattr(engine.results, "_accept", accept_one)
            gate.set()
            return await asyncio.gather(*tasks, return_exceptions=True)

    results = run(main())
    assert results.count(error) == 2
    for i, result in enumerate(results):
        if result is not error:
            assert_same(result, alone(sync, PROMPTS[i], params))


async def everything_raises(llm: AsyncLLM, match: str) -> None:
    calls = (
        lambda: last(llm.generate(PROMPTS[0], GREEDY)),
        lambda: llm.abort("r"),
        llm.get_metrics,
        llm.describe,
        llm.reset_prefix_cache,
        llm.get_tokenizer,
    )
    for call in calls:
        with pytest.raises(EngineDeadError, match=match):
            await call()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_the_thread_s_death_reaches_everybody(make, deaths, error):
    llm = make()
    pace = engine_of(llm).step

    async def main() -> list[Any]:
        pace.enough = 1
        running = [llm.generate(PROMPTS[i], LONG) for i in range(4)]
        await asyncio.gather(*map(anext, running))
        waiting = last(llm.generate(PROMPTS[0], GREEDY))
        break_once(llm, error)
        pace.enough = math.inf
        results = await ended(*map(last, running), waiting)
        await everything_raises(llm, f"the engine died of {type(error).__name__}")
        return results

    results = run(main())
    assert [type(result) for result in results] == [EngineDeadError] * 5
    assert {result.__cause__ for result in results} == {error}
    llm.shutdown()
    assert deaths == [type(error)]


def test_death_reaches_the_one_whose_command_it_was_and_those_behind_it(make, monkeypatch, deaths):
    llm = make()
    pace = engine_of(llm).step

    def accept(*_: object) -> None:
        raise SystemExit

    async def main() -> list[Any]:
        pace.enough = 1
        running = llm.generate(PROMPTS[0], LONG)
        await anext(running)
        gate = await held_up(llm)
        monkeypatch.setattr(intake_of(llm), "accept", accept)
        first = [last(running), last(llm.generate(PROMPTS[0], GREEDY))]
        tasks = [asyncio.create_task(one) for one in first]
        await posted(llm, 1)
        tasks += [asyncio.create_task(one) for one in (llm.abort("r"), llm.is_sleeping())]
        await posted(llm, 3)
        gate.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(result) for result in run(main())] == [EngineDeadError] * 4
    llm.shutdown()
    assert deaths == [SystemExit]


def test_an_error_that_concerns_no_request_is_the_end_and_not_an_endless_loop(
    make, monkeypatch, deaths
):
    llm, error = make(), ZeroDivisionError()
    pace = engine_of(llm).step

    def plan() -> None:
        raise error

    async def main() -> list[Any]:
        pace.enough = 1
        running = llm.generate(PROMPTS[0], LONG)
        await anext(running)
        monkeypatch.setattr(engine_of(llm).scheduler, "plan", plan)
        pace.enough = math.inf
        return await ended(last(running), last(llm.generate(PROMPTS[0], GREEDY)))

    running, waiting = run(main())
    assert error in (running, running.__cause__)  # it may have had tokens coming
    assert type(waiting) is EngineDeadError
    assert waiting.__cause__ is error
    llm.shutdown()
    assert deaths == [ZeroDivisionError]


def test_a_request_that_the_engine_loses_does_not_hang(make, monkeypatch, deaths):
    llm = make()
    pace = engine_of(llm).step

    def lose() -> list:
        for live in thread_of(llm)._live.values():
            engine_of(llm).abort(live.submission)
        return []

    async def main() -> list[Any]:
        pace.enough = 1
        running = llm.generate(PROMPTS[0], LONG)
        await anext(running)
        monkeypatch.setattr(engine_of(llm), "step", lose)
        return await ended(last(running))

    (result,) = run(main())
    assert type(result) is EngineDeadError
    assert str(result.__cause__) == "1 requests left the engine without a result"
    llm.shutdown()
    assert deaths == [RuntimeError]


@pytest.mark.parametrize("at_the_end", [False, True])
def test_an_output_that_cannot_be_made_does_not_hang(make, monkeypatch, deaths, at_the_end):
    llm = make()
    pace = engine_of(llm).step
    completion = Request.completion

    def broken(request: Request) -> Any:
        if at_the_end and not request.finish_reason:
            return completion(request)
        raise ZeroDivisionError

    async def main() -> list[Any]:
        pace.enough = 1
        running = [llm.generate(PROMPTS[i], params) for i, params in enumerate((GREEDY, LONG))]
        await asyncio.gather(*map(anext, running))
        monkeypatch.setattr(Request, "completion", broken)
        pace.enough = math.inf
        return await ended(*map(last, running))

    assert [type(result) for result in run(main())] == [EngineDeadError] * 2
    llm.shutdown()
    assert deaths == [ZeroDivisionError]


def test_an_error_in_a_command_is_its_caller_s(llm, monkeypatch):
    error = OSError("no such line")

    def reset() -> None:
        raise error

    async def main() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(blocking(llm), "reset_prefix_cache", reset)
            with pytest.raises(OSError, match="no such line"):
                await llm.reset_prefix_cache()
        await llm.reset_prefix_cache()

    run(main())


# --- the end
# ----------------------------------------------------------------------------------------------------------


def test_shutdown_ends_everything_and_twice_is_fine(make, sync):
    llm = make()
    pace = engine_of(llm).step

    async def main() -> None:
        async with llm as same:
            assert same is llm
            pace.enough = 1
            streams = [llm.generate(PROMPTS[0], LONG) for _ in range(6)]
            await asyncio.gather(*map(anext, streams[:4]))
            waiting = [asyncio.create_task(last(stream)) for stream in streams[4:]]
            await arrived(llm, 6)
        assert_free(llm)
        assert not thread_of(llm)._thread.is_alive()
        assert engine_of(llm).kv.stores[0].pages.is_deleted()
        whole = alone(sync, PROMPTS[0], LONG).outputs[0]
        for output in await asyncio.gather(*map(last, streams[:4]), *waiting):
            (completion,) = output.outputs
            assert completion.finish_reason == "abort"
            assert whole.token_ids[: len(completion.token_ids)] == completion.token_ids
        await everything_raises(llm, "the engine was shut down")
        llm.shutdown()

    run(main())
    assert llm.num_kv_tokens == 512
    llm.shutdown()


def test_shutdown_reaches_a_loop_that_is_stuck(make):
    """What it has not seen yet does not keep the last output away."""
    llm = make()
    pace = engine_of(llm).step

    async def main() -> RequestOutput:
        pace.enough = 1
        stream = llm.generate(PROMPTS[0], LONG)
        await anext(stream)
        pace.enough = 10
        (live,) = thread_of(llm)._live.values()
        while live.submission.samples[0].num_new < 10 or live.outbox._is_ready:
            time.sleep(0.001)
        llm.shutdown()
        return await last(stream)

    assert run(main()).outputs[0].finish_reason == "abort"


def test_requests_behind_the_shutdown_are_refused(make):
    llm = make()

    async def main() -> list[Any]:
        gate = await held_up(llm)
        before = asyncio.create_task(last(llm.generate(PROMPTS[0], LONG)))
        await posted(llm, 1)
        thread_of(llm).stop()
        behind = asyncio.create_task(last(llm.generate(PROMPTS[0], LONG)))
        await posted(llm, 3)
        gate.set()
        return await asyncio.gather(before, behind, return_exceptions=True)

    before, behind = run(main())
    assert before.outputs[0].finish_reason == "abort"
    assert type(behind) is EngineDeadError


def test_who_is_forgotten_ends_and_gives_its_memory_back(make):
    llm = make()
    run(last(llm.generate(PROMPTS[0], GREEDY)))
    thread, engine = thread_of(llm)._thread, weakref.ref(engine_of(llm))
    del llm
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    del thread
    gc.collect()
    assert engine() is None


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_fork_that_ends_leaves_the_engine_alone(llm, sync):
    child = os.fork()
    if not child:
        signal.alarm(20)  # ends what waits
        try:
            thread_of(llm).shutdown()  # which is called when the process ends
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    output = run(last(llm.generate(PROMPTS[0], GREEDY)))
    assert_same(output, alone(sync, PROMPTS[0], GREEDY))


UNFINISHED = """
import asyncio, ctypes, sys
from jaxkv import AsyncLLM, SamplingParams

llm = AsyncLLM(sys.argv[1], max_num_seqs=4, max_num_batched_tokens=32, block_size=8, lazy_compile=True)
params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)

async def first():
    stream = llm.generate("Once upon a time", params)
    return (await anext(stream)).finished, stream

async def exit():
    print((await first())[0])
    sys.exit(3)

def leave():
    loop = asyncio.new_event_loop()
    tasks = [loop.create_task(first()) for _ in range(100)]
    print(loop.run_until_complete(tasks[0])[0])
    # As the exit of Python finds it: 100 requests, of which asyncio would say that nobody has awaited them.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object((loop, tasks)))

{end}
"""
ENDINGS = {
    "nothing was asked": ("print(False)", 0),
    "a request was closed just now": ("asyncio.run(exit())", 3),
    "a hundred run": ("leave()", 0),
    "it was forgotten just now": ("print(asyncio.run(first())[0]); del llm", 0),
}


@pytest.mark.parametrize("ending", some(ENDINGS, "a hundred run", "it was forgotten just now"))
def test_a_program_may_end_without_shutdown(checkpoint, ending):
    end, code = ENDINGS[ending]
    program = UNFINISHED.format(end=end)
    env = os.environ | {"PYTHONPATH": str(Path(jaxkv.__file__).parents[1])}
    command = [sys.executable, "-P", "-c", program, str(checkpoint)]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "False\n", "")


# --- the rest
# ---------------------------------------------------------------------------------------------------------


def test_what_an_llm_tells_it_tells_too(llm, sync, pace):
    async def main() -> None:
        pace.enough = 1
        assert llm.num_kv_tokens == sync.num_kv_tokens
        stream = llm.generate(PROMPTS[0], LONG)
        await anext(stream)
        assert "4 rows, 128 tokens per row" in await llm.describe()
        assert gauge(await llm.get_metrics(), "num_requests_running") == 1
        await stream.aclose()
        assert {metric.name.split(":")[0] for metric in await llm.get_metrics("vllm:")} == {"vllm"}
        tokenizer = await llm.get_tokenizer()
        assert tokenizer is await llm.get_tokenizer()
        assert tokenizer is not blocking(llm).get_tokenizer()
        assert tokenizer.encode("The end") == sync.get_tokenizer().encode("The end")

    run(main())


def test_the_prefix_cache_is_emptied_in_its_turn(llm):
    prompt = {"prompt_token_ids": [7] * 40}

    async def main() -> list[int]:
        found = []
        for reset in (False, False, True):
            if reset:
                assert await llm.reset_prefix_cache()
            found.append((await last(llm.generate(prompt, GREEDY))).num_cached_tokens)
        return found

    assert run(main()) == [0, 32, 0]


def test_arguments_are_those_of_llm(checkpoint):
    with pytest.raises(ValueError, match="unknown argument enforce_egar, did you"):
        AsyncLLM(checkpoint, enforce_egar=True)
    with pytest.raises(TypeError):
        AsyncLLM(checkpoint, "tokenizer")
