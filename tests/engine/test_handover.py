"""What is computed on two engines, prompts on one and outputs on another, is what one engine
computes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import pytest

import jaxkv
from asked import LENGTHS, params, prompts
from families import text_config
from interrupt import Interrupt
from jaxkv import LLM, SamplingParams
from jaxkv.engine import handover
from jaxkv.engine.handover import Handover
from jaxkv.engine.streams import complete, stream
from jaxkv.errors import EngineDeadError
from jaxkv.requests.request import Submission
from jaxkv.testing import engine_of, intake_of
from tiny import SMALL, make_checkpoint, tiny_config

pytestmark = pytest.mark.usefixtures("quick_compile", "one_loop")


def small(directory: Path, **changes: object) -> LLM:
    return LLM(directory, **SMALL | changes)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), tiny_config("mistral-window"))


@pytest.fixture(scope="module")
def llms(directory) -> list[LLM]:
    """One that is asked alone, one for prompts and one for outputs, all on one device."""
    return [small(directory), small(directory), small(directory)]


@pytest.fixture
def front(llms) -> Handover:
    for llm in llms:
        llm.reset_prefix_cache()
    return Handover(engine_of(llms[1]), engine_of(llms[2]))


def submitted(llm: LLM, *given: list) -> list:
    return intake_of(llm).accept(*given, None)


def finish(front: Handover, submissions: list) -> list[list]:
    for _ in complete(front, enumerate(submissions)):
        pass
    outputs = [submission.output() for submission in submissions]
    return [[one.token_ids, one.finish_reason] for output in outputs for one in output.outputs]


def run_out(front: Handover) -> None:
    for _ in range(1000):
        if not front.has_work:
            return
        front.step()
    raise AssertionError("a request is lost")


def check(front: Handover, llms: list[LLM]) -> None:
    front.check()
    assert not front.has_work
    assert [engine_of(llm).scheduler.allocator.num_used for llm in llms] == [0, 0, 0]


def test_both_engines_sleep_or_none(llms, front):
    (submission,) = submitted(llms[2], prompts()[2:3], params()[:1])
    front.add(submission)
    with pytest.raises(ValueError, match="under way"):
        front.sleep(keeps_weights=True)
    assert not front.is_asleep
    front.abort(submission)  # nobody has told the prefill engine yet
    front.sleep(keeps_weights=True)
    assert not front.has_work
    front.wake_up(("weights", "kv_cache"))
    front.check()
    given = prompts()[2:4], params()[:2]
    want = finish(engine_of(llms[0]), submitted(llms[0], *given))
    assert finish(front, submitted(llms[2], *given)) == want


def test_tokens_are_those_of_one_engine_and_no_page_is_lost(front, llms):
    joint, before, here = llms
    wanted = joint.generate(prompts(), params(), use_tqdm=False)
    submissions = submitted(here, prompts(), params())
    found = finish(front, submissions)
    assert found == [
        [one.token_ids, one.finish_reason] for output in wanted for one in output.outputs
    ]
    check(front, llms)
    # All full pages that a request begins with came from the other engine, but for those whose
    # prompts are scored here, and those of a page or less.
    cached = [submission.output().num_cached_tokens for submission in submissions]
    assert cached == [
        0 if i % 3 == 2 or length <= 8 else (length - 1) // 8 * 8
        for i, length in enumerate(LENGTHS)
    ]
    # What the engine has already is not computed a second time elsewhere.
    num_before = engine_of(before).scheduler.num_looked_up
    assert finish(front, submitted(here, prompts()[3:4], params()[:1]))
    assert engine_of(before).scheduler.num_looked_up == num_before


def test_requests_that_are_not_handed_over_yet_wait(front, llms, monkeypatch):
    monkeypatch.setattr(llms[2], "_front", front)

    def num_waiting() -> list[float]:
        metrics = llms[2].get_metrics("")
        return [one.value for one in metrics if one.name == "num_requests_waiting"]

    for submission in submitted(llms[2], prompts()[2:5], params()[:2] + params()[:1]):
        front.add(submission)
    assert num_waiting() == [5]  # the second prompt has three samples
    while len(front._ready) < 3:
        front._collect(wait_s=10.0)
    assert num_waiting() == [5]
    run_out(front)
    assert num_waiting() == [0]


@pytest.mark.slow
def test_recurrent_states_go_over_with_their_pages(tmp_path):
    directory = make_checkpoint(tmp_path, text_config("lfm2"))
    llms = [small(directory) for _ in range(3)]
    front = Handover(engine_of(llms[1]), engine_of(llms[2]))
    asked = params()[:1] * 4
    wanted = llms[0].generate(prompts()[2:6], asked, use_tqdm=False)
    submissions = submitted(llms[2], prompts()[2:6], asked)
    found = finish(front, submissions)
    assert [tokens for tokens, _ in found] == [one.outputs[0].token_ids for one in wanted]
    cached = [submission.output().num_cached_tokens for submission in submissions]
    assert cached == [(length - 1) // 8 * 8 for length in LENGTHS[2:6]]
    check(front, llms)


def test_loops_are_short_as_prompts_come_between_them(front, llms, monkeypatch):
    seen, scheduler = set(), engine_of(llms[2]).scheduler
    plan = scheduler.plan

    def planned():
        made = plan()
        seen.add(getattr(made, "num_steps", 0))
        return made

    monkeypatch.setattr(scheduler, "plan", planned)
    assert finish(front, submitted(llms[2], prompts(6)[:6], params()[:1] * 6))
    check(front, llms)
    assert max(seen) == 2


@pytest.mark.slow
def test_a_pool_without_room_for_the_pages_computes_the_prompt_itself(front, llms, directory):
    tiny = small(directory, num_gpu_blocks_override=17)
    front = Handover(engine_of(llms[1]), engine_of(tiny))
    asked = [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)] * len(LENGTHS)
    wanted = llms[0].generate(prompts(1), asked, use_tqdm=False)
    found = finish(front, submitted(tiny, prompts(1), asked))
    assert [tokens for tokens, _ in found] == [one.outputs[0].token_ids for one in wanted]
    front.check()


def test_who_is_ended_before_the_prompt_is_computed_holds_nothing(front, llms):
    submissions = submitted(llms[2], prompts(2), params())
    for submission in submissions:
        front.add(submission)
    front.step()
    for submission in submissions:
        front.abort(submission)
        front.abort(submission)
    assert all(submission.is_finished for submission in submissions)
    run_out(front)
    check(front, llms)
    assert not engine_of(llms[1]).has_work
    (last,) = submitted(llms[2], prompts(3)[5:6], params()[:1])
    assert len(list(stream(front, last))) > 1
    check(front, llms)


def test_a_step_that_fails_ends_who_was_in_it_and_nobody_else(front, llms, monkeypatch):
    first, second = submitted(llms[2], prompts(4)[3:6:2], params()[:1] * 2)
    with monkeypatch.context() as patch:

        def fail(*_):
            raise RuntimeError("no step")

        patch.setattr(engine_of(llms[1]).programs, "step", fail)
        front.add(first)
        with pytest.raises(RuntimeError, match="no step"):
            run_out(front)
    assert [request.finish_reason for request in first.samples] == ["abort"]
    assert finish(front, [second])[0][1] == "length"
    check(front, llms)


@pytest.mark.parametrize("is_added", [False, True])
def test_an_interrupt_while_a_request_goes_over_neither_loses_nor_doubles_it(
    front, llms, monkeypatch, is_added
):
    (submission,) = submitted(llms[2], prompts(7)[5:6], params()[:1])
    front.add(submission)
    decode = engine_of(llms[2])
    add = decode.add

    def interrupt(submission: Submission) -> None:
        if is_added:
            add(submission)
        monkeypatch.setattr(decode, "add", add)
        raise KeyboardInterrupt

    monkeypatch.setattr(decode, "add", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_out(front)
    run_out(front)
    assert [len(one.token_ids) for one in submission.output().outputs] == [12]
    check(front, llms)


@pytest.mark.slow
def test_an_interrupt_at_any_line_loses_no_request_of_others(front, llms, monkeypatch):
    """Whoever presses Ctrl-C takes steps for the requests of others too."""
    monkeypatch.setattr(handover, "WAIT_S", 10.0)
    given, asked = prompts(5)[2:4], [SamplingParams(temperature=0.0, max_tokens=2)] * 2
    wanted = [one.outputs[0] for one in llms[0].generate(given, asked, use_tqdm=False)]
    at, was_cut_off = 0, True
    while was_cut_off:
        front.forget()
        submissions, was_cut_off = submitted(llms[2], given, asked), False
        for submission in submissions:
            front.add(submission)
        try:
            with Interrupt(at, files=(handover.__file__,)):
                run_out(front)
        except KeyboardInterrupt:
            was_cut_off = True
        run_out(front)
        found = [request.completion() for one in submissions for request in one.samples]
        for one, want in zip(found, wanted, strict=True):
            assert (one.token_ids, one.finish_reason) == (want.token_ids, want.finish_reason), at
        check(front, llms)
        at += 1
    assert at > 60


def test_what_is_computed_before_a_reset_is_not_handed_over_after_it(front, llms):
    (submission,) = submitted(llms[2], prompts(6)[5:6], params()[:1])
    front.add(submission)
    while not front._prefill.done:
        front._prefill.begin(is_full=False)
        front._prefill.wait(10.0)
    front.forget()
    run_out(front)
    assert submission.is_finished
    assert submission.output().num_cached_tokens == 0
    check(front, llms)


def test_a_long_prompt_gets_a_row_although_short_ones_always_wait(front, llms):
    short, asked = {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=2, ignore_eos=True)
    (long,) = submitted(llms[2], prompts(8)[3:4], params()[:1])
    front.add(long)
    while not front._ready:
        front._collect(wait_s=10.0)
    for _ in range(40):
        while len(front.scheduler.waiting) < 2:
            front.add(*submitted(llms[2], [short], [asked]))
        front.step()
    assert long.is_finished
    run_out(front)
    check(front, llms)


@pytest.mark.parametrize(("most_bytes", "most"), [(2**30, 9), (1, 1)])
def test_only_so_many_prompts_wait_in_host_memory(front, llms, monkeypatch, most_bytes, most):
    monkeypatch.setattr(handover, "HELD_BYTES", most_bytes)
    given = [prompts(seed)[3] for seed in range(20, 40)]
    submissions = submitted(llms[2], given, params()[:1] * 20)
    for submission in submissions:
        front.add(submission)
    for _ in range(20):
        front._collect(wait_s=10.0)
    assert 0 < len(front._ready) <= most
    front.abort(submissions[-1])  # frees what it holds all the same
    while front._prefill.leaving:
        front._collect(wait_s=0.0)
    run_out(front)
    assert [one.samples[0].finish_reason for one in submissions] == ["length"] * 19 + ["abort"]
    check(front, llms)


def test_a_stream_forgotten_in_the_prefill_thread_waits_for_nobody(front, llms):
    """So it is where `update_weights` has the lock, waits for that thread, and garbage is collected
    there.
    """
    (submission,) = submitted(llms[2], prompts()[3:4], params()[:1])
    front.add(submission)
    with front.lock:
        front._prefill._thread.submit(front.abort, submission).result(20)
    front.sleep(keeps_weights=True)
    assert submission.is_finished
    front.wake_up(("weights", "kv_cache"))
    check(front, llms)


def test_an_interrupt_between_new_weights_of_two_engines_mixes_none(front, llms, monkeypatch):
    given, decode = (prompts(9)[3:6], params()[:1] * 3), engine_of(llms[2])
    wanted = finish(engine_of(llms[0]), submitted(llms[0], *given))
    old = decode.weights, engine_of(llms[1]).weights
    new = [jax.tree.map(lambda x: 2 * x, weights) for weights in old]

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(decode, "replace_weights", interrupt)
        with pytest.raises(KeyboardInterrupt):
            front.replace_weights(*new, secret=b"1" * 32)
    assert finish(front, submitted(llms[2], *given)) == wanted
    front.replace_weights(*old, secret=b"2" * 32)
    submissions = submitted(llms[2], *given)
    assert finish(front, submissions) == wanted
    assert all(submission.output().num_cached_tokens for submission in submissions)
    check(front, llms)


def test_nothing_is_taken_after_the_end(llms, directory):
    one, two = small(directory), small(directory)
    front = Handover(engine_of(one), engine_of(two))
    submission, late = submitted(two, prompts()[3:5], params()[:1] * 2)
    front.add(submission)
    front.end()
    front.end()
    assert submission.is_finished
    assert not front.has_work
    with pytest.raises(EngineDeadError):
        front.add(late)
    with pytest.raises(EngineDeadError):
        front.forget()
    with pytest.raises(EngineDeadError):
        front.check_alive()


def test_the_end_comes_between_what_other_threads_do(llms, directory):
    one, two = small(directory), small(directory)
    front = Handover(engine_of(one), engine_of(two))
    (submission,) = submitted(two, prompts()[3:4], params()[:1])
    front.add(submission)
    gate = threading.Event()
    with ThreadPoolExecutor(2) as threads:
        # What comes behind this has not begun when the end comes.
        running = threads.submit(front._prefill.call, lambda _: gate.wait(20))
        while not running.running():
            time.sleep(0.001)
        front.step()
        waiting = threads.submit(front.forget)
        ending = threading.Thread(target=front.end)
        while front._prefill._thread._work_queue.qsize() != 2:
            time.sleep(0.001)
        ending.start()
        while not submission.is_finished:
            time.sleep(0.001)
        assert front.step() == []
        with pytest.raises(EngineDeadError):
            waiting.result(20)
        with pytest.raises(EngineDeadError):
            front.forget()
        gate.set()
        assert running.result(20)
        ending.join(20)
    assert not front.has_work


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_fork_waits_for_no_thread_and_has_nothing_to_end(front, llms):
    (submission,) = submitted(llms[2], prompts()[3:4], params()[:1])
    front.add(submission)
    child = os.fork()
    if not child:
        signal.alarm(20)  # ends what waits
        try:
            for call in (front.forget, front.step, partial(front.sleep, keeps_weights=True)):
                with pytest.raises(RuntimeError, match="one that was forked"):
                    call()
            with pytest.raises(RuntimeError, match="one that was forked"):
                front._prefill.call(lambda engine: engine.check())
            front.abort(submission)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert len(finish(front, [submission])) == 1
    check(front, llms)


def test_devices_that_do_not_divide_the_model_are_refused_by_the_name_that_was_given(
    directory, monkeypatch
):
    devices = jax.devices() * 4
    monkeypatch.setattr(jax, "devices", lambda: devices)
    with pytest.raises(ValueError, match=r"disaggregate: of a part, .* 2 KV heads, got 3"):
        small(directory, disaggregate=(3, 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"disaggregate": (1, 1)}, "disaggregate: expected at most 1 devices .* got 1 . 1"),
        ({"disaggregate": (1, 0)}, "disaggregate: expected None or two"),
        ({"disaggregate": 2}, "disaggregate: expected None or two"),
        ({"disaggregate": (1, 1), "tensor_parallel_size": 2}, "tensor_parallel_size: expected 1"),
        ({"disaggregate": (1, 1), "enable_prefix_caching": False}, "enable_prefix_caching"),
        ({"disaggregate": (1, 1), "kv_policy": "streaming", "kv_budget": 40}, "kv_policy: expec"),
        ({"disaggregate": (1, 1), "kv_host_bytes": 2**20}, "kv_host_bytes: expected 0"),
        (
            {"disaggregate": (1, 1), "kv_disk": "x", "kv_disk_bytes": 2**20},
            "kv_disk: expected None",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(directory, changes, message):
    with pytest.raises(ValueError, match=message):
        small(directory, **changes)


RUN = """
import asyncio, json, sys
from jaxkv import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from jaxkv.testing import engine_of, front_of
path, given = sys.argv[1], json.loads(sys.argv[2])
options, prompts = given["options"], given["prompts"]
params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=12, ignore_eos=True) for i in range(len(prompts))]

def run(**changes):
    llm = LLM(path, **options | changes)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    beams = llm.beam_search(prompts[2:4], BeamSearchParams(beam_width=2, max_tokens=5, ignore_eos=True))
    session = llm.session(prompts[3])
    _, said = session.generate(params[0])
    llm.reset_prefix_cache()
    front_of(llm).check()
    assert engine_of(llm).scheduler.allocator.num_used == 0
    found = [output.outputs[0].token_ids for output in outputs], [beam.tokens for one in beams for beam in one.sequences]
    llm.shutdown()
    return [*found, said.token_ids]

async def run_async(**changes):
    async def one(llm, i):
        async for output in llm.generate(prompts[i], params[i]):
            pass
        return output.outputs[0].token_ids
    async with AsyncLLM(path, **options | changes) as llm:
        return await asyncio.gather(*(one(llm, i) for i in range(len(prompts))))

print(json.dumps([run(tensor_parallel_size=2), run(disaggregate=(2, 2)), run(disaggregate=(1, 2)),
    asyncio.run(run_async(disaggregate=(2, 2)))]))
"""


@pytest.mark.slow
def test_two_and_two_devices_give_the_tokens_of_one_engine(tmp_path):
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64}
    make_checkpoint(tmp_path, tiny_config("llama-3", **heads))
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    env = os.environ | {
        "XLA_FLAGS": flags,
        "PYTHONPATH": str(Path(jaxkv.__file__).parents[1]),
    }
    given = json.dumps({"options": SMALL, "prompts": prompts()})
    command = [sys.executable, "-c", RUN, str(tmp_path), given]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    joint, *others, streamed = json.loads(done.stdout.splitlines()[-1])
    assert others == [joint, joint]
    assert streamed == joint[0]
