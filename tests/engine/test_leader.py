"""Engines of several processes, which are told the same, do the same, page for page."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace
from weakref import ref

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxkv import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from jaxkv.api import llm, part
from jaxkv.api.engine_thread import EngineThread, Stream
from jaxkv.build.joining import join
from jaxkv.build.model import DEMO
from jaxkv.build.options import EngineOptions
from jaxkv.engine import channel, leader
from jaxkv.engine.channel import MAX_STRANGERS, Receiver, Sender, written
from jaxkv.engine.leader import Follower, Leader, _end_at_exit
from jaxkv.engine.streams import complete
from jaxkv.errors import CheckpointError, EngineDeadError
from jaxkv.lora.request import LoRARequest
from jaxkv.requests.asked import UNSENT, Asked, params_of
from jaxkv.requests.pooling import PoolingParams
from jaxkv.requests.request import Request, Submission
from jaxkv.requests.trial import TRIALS
from jaxkv.testing import engine_of, intake_of

pytestmark = pytest.mark.usefixtures("quick_compile", "one_loop")

FEW = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 8,
    "max_model_len": 128,
    "num_gpu_blocks_override": 16,
    "dtype": "float32",
    "lazy_compile": True,
}
"""Fewer pages than four rows need: some are preempted."""

TEXTS = ["def add(a, b):", "class Stack:\n    def __init__(self", "x = [1, 2, 3]\n" * 5, "import"]

FIRST = "model.layers.0.self_attn.q_proj.weight"

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def compiled() -> LLM:
    """Has programs for all, and is asked alone."""
    return LLM(**FEW)


class Pair:
    """Two engines, as two processes would have them."""

    def __init__(self, compiled: LLM) -> None:
        llms = [LLM(**FEW) for _ in range(2)]
        self.engines = [engine_of(llm) for llm in llms]
        for engine in self.engines:
            engine.programs.executables = engine_of(compiled).programs.executables
        self.llm, self.intake = llms[0], intake_of(llms[0])
        self.other = llms[1]
        sender = Sender("localhost", 1)
        self.threads = ThreadPoolExecutor(2)
        accepted = self.threads.submit(sender.accept)
        receiver = Receiver(sender.where, sender.key)
        accepted.result()
        self.leader = self.llm._front = Leader(self.engines[0], sender)
        self.called: list[str] = []
        called = lambda *_: self.called.append("follower")  # noqa: E731
        functions = {"name": called, "compile": called, "adapter": llms[1]._read_with_others}
        functions["update"] = llms[1]._updated_with_others
        self.followed = self.threads.submit(
            Follower(self.engines[1], receiver).follow, intake_of(llms[1]).again, functions
        )
        self.seen: list[list] = [[], []]
        """What each engine had at each of its launches."""
        for engine, seen in zip(self.engines, self.seen, strict=True):
            engine.watchers.append(lambda scheduler, seen=seen: seen.append(held(scheduler)))

    def accept(self, params: SamplingParams, text: str = TEXTS[0], priority: int = 0) -> Submission:
        (submission,) = self.intake.accept([text], [params], [priority], None)
        return submission


def held(scheduler) -> tuple:
    rows = [
        (one.id, one.row, one.tokens.tolist(), list(one.hold.parts[0].pages))
        for one in scheduler.running
    ]
    waiting = [one.id for one in scheduler.waiting]
    return rows, waiting, scheduler.allocator.num_free, scheduler.num_found


@pytest.fixture
def pair(compiled) -> Iterator[Pair]:
    pair = Pair(compiled)
    yield pair
    pair.leader.end()
    pair.threads.shutdown()


def some_params(rng: random.Random) -> SamplingParams:
    most = rng.randrange(1, 50)
    kinds = [
        {"temperature": 0.0, "ignore_eos": True},
        {"temperature": 0.9, "n": 3},  # by seeds that follow from the engine's
        {"temperature": 0.0, "stop": ["self", "\n"], "logprobs": 1},
        {"structured_outputs": StructuredOutputsParams(regex="[a-z ]{5,40}")},
        {"presence_penalty": 0.5, "prompt_logprobs": 1, "bad_words": ["return x"]},
    ]
    return SamplingParams(max_tokens=most, **rng.choice(kinds))


def test_a_follower_has_the_same_requests_in_the_same_pages(pair):
    rng, live = random.Random(0), list[Submission]()
    for number in range(60):
        if number < 24:
            text = rng.choice(TEXTS) + rng.choice(["", "a", "b\n" * rng.randrange(9)])
            live.append(pair.accept(some_params(rng), text, rng.randrange(3)))
            pair.leader.add(live[-1])
        if number % 7 == 3:
            pair.leader.abort(rng.choice(live))
        if number == 20:
            pair.leader.forget()
        if pair.leader.has_work:
            pair.leader.step()
    while pair.leader.has_work:
        pair.leader.step()
    pair.leader.everywhere("name", lambda: None)
    while not pair.called:
        time.sleep(0.01)
    # Those of the follower are gone, but for what came last.
    assert num_requests() < 1.5 * sum(len(one.samples) for one in live)
    scheduler = pair.engines[0].scheduler
    assert scheduler.num_preemptions > 0
    assert scheduler.num_found > 0
    pair.leader.end()
    assert pair.followed.result(60) is None
    assert len(pair.seen[0]) > 40
    assert pair.seen[0] == pair.seen[1]
    for engine in pair.engines:
        engine.check()
        assert engine.scheduler.allocator.num_used == 0


def num_requests() -> int:
    gc.collect()
    return sum(isinstance(one, Request) for one in gc.get_objects())


def test_a_search_is_the_same(pair, compiled):
    params = BeamSearchParams(beam_width=3, max_tokens=10)
    for _ in complete(pair.leader, enumerate(pair.intake.accept_searches(TEXTS[:2], params))):
        pass
    pair.leader.end()
    pair.followed.result(60)
    assert pair.seen[0] == pair.seen[1]
    assert pair.seen[0]


def test_what_is_aborted_within_a_step_ends_behind_it_in_both(pair, monkeypatch):
    submission = pair.accept(SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    pair.leader.add(submission)
    step = pair.engines[0].step

    def begun() -> list:
        """As where the garbage collector closes a stream before anything else."""
        if len(pair.seen[0]) == 2:
            pair.leader.abort(submission)
        return step()

    monkeypatch.setattr(pair.engines[0], "step", begun)
    while pair.leader.has_work:
        pair.leader.step()
    assert submission.samples[0].finish_reason == "abort"
    pair.leader.end()
    pair.followed.result(60)
    assert pair.seen[0] == pair.seen[1]
    assert len(pair.seen[0]) == 3
    assert not pair.engines[1].has_work


def test_a_function_is_called_in_both(pair):
    assert pair.leader.everywhere("name", lambda: pair.called.append("leader") or 5) == 5
    pair.leader.end()
    pair.followed.result(60)
    assert sorted(pair.called) == ["follower", "leader"]


def test_what_is_cut_off_half_way_ends_the_engine(pair, monkeypatch):
    submission = pair.accept(GREEDY)
    pair.leader.add(submission)
    with monkeypatch.context() as patch:
        patch.setattr(pair.engines[0], "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pair.leader.step()
    assert submission.samples[0].finish_reason == "abort"
    pair.leader.abort(submission)  # as whoever was interrupted does
    for call in (pair.leader.step, lambda: pair.leader.add(pair.accept(GREEDY))):
        with pytest.raises(EngineDeadError):
            call()
    with pytest.raises(EngineDeadError, match="the first process of this engine has ended"):
        pair.followed.result(60)


def test_an_interrupt_comes_behind_a_step(pair, monkeypatch):
    submission = pair.accept(GREEDY)
    pair.leader.add(submission)
    step = pair.engines[0].step

    def interrupting() -> list:
        os.kill(os.getpid(), signal.SIGINT)
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(pair.engines[0], "step", interrupting)
        with pytest.raises(KeyboardInterrupt):
            pair.leader.step()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    while pair.leader.has_work:
        pair.leader.step()
    assert submission.samples[0].finish_reason == "length"
    pair.leader.end()
    assert pair.followed.result(60) is None
    assert pair.seen[0] == pair.seen[1]


def test_an_interrupt_comes_behind_an_error_too(pair, monkeypatch):
    pair.leader.add(pair.accept(GREEDY))

    def failing() -> list:
        os.kill(os.getpid(), signal.SIGINT)
        raise ValueError

    monkeypatch.setattr(pair.engines[0], "step", failing)
    with pytest.raises(KeyboardInterrupt):
        pair.leader.step()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def interrupted() -> None:
    raise KeyboardInterrupt


def test_what_cannot_be_told_ends_nothing(pair):
    with pytest.raises(TypeError, match="not JSON serializable"):
        pair.leader.everywhere("name", lambda: None, object())
    pair.leader.add(pair.accept(replace(GREEDY, skip_clone=object())))  # nobody reads that
    while pair.leader.has_work:
        pair.leader.step()
    pair.leader.end()
    assert pair.followed.result(60) is None
    assert pair.seen[0] == pair.seen[1]
    assert pair.called == []


def test_what_all_are_called_for_waits_for_what_is_launched(pair, monkeypatch):
    """On a CPU XLA runs programs of two threads in any order, and other processes in theirs."""
    order, wait = [], pair.engines[0].wait
    monkeypatch.setattr(pair.engines[0], "wait", lambda: order.append("wait") or wait())
    pair.leader.add(pair.accept(GREEDY))
    pair.leader.step()
    pair.leader.everywhere("name", lambda: order.append(pair.engines[0].is_ready))
    assert order == ["wait", True]


def test_an_exit_ends_it(pair):
    submission = pair.accept(GREEDY)
    pair.leader.add(submission)
    _end_at_exit(ref(pair.leader))
    assert submission.samples[0].finish_reason == "abort"
    assert pair.followed.result(60) is None


def test_all_processes_compile(pair, monkeypatch):
    monkeypatch.setattr(pair.llm, "_compile_all", lambda: pair.called.append("leader"))
    pair.llm.wait_until_compiled()
    pair.leader.end()
    pair.followed.result(60)
    assert sorted(pair.called) == ["follower", "leader"]


def test_the_fingerprints_of_an_engine_that_sleeps_are_refused_and_it_goes_on(pair):
    pair.llm.sleep()
    with pytest.raises(ValueError, match="expected an engine that is awake"):
        pair.llm.identity()
    pair.llm.wake_up()
    pair.llm.generate(TEXTS[0], GREEDY, use_tqdm=False)


@pytest.fixture
def said(monkeypatch) -> list[int]:
    """Has what both say to each other, as two processes do by `of_all`."""
    said, both = [], threading.Barrier(2)

    def of_all(number: int) -> np.ndarray:
        said.append(number)
        both.wait(60)
        found = np.array(said[-2:])
        both.wait(60)
        return found

    for module in (leader, llm):
        monkeypatch.setattr(module, "of_all", of_all)
    return said


@pytest.mark.parametrize("have_read", [False, True])
def test_weights_that_one_process_cannot_take_none_takes(pair, said, monkeypatch, have_read):
    def failing(where: str, when_read: Callable[[], None]) -> None:
        if have_read:
            when_read()
        raise ValueError("broken here")

    monkeypatch.setattr(pair.other, "_loaded_from", failing)
    weights = pair.engines[0].weights
    with pytest.raises(CheckpointError, match="expected weights that all processes can read"):
        pair.llm.update_weights(str(DEMO))
    assert sorted(said) == [False] * (3 if have_read else 1) + [True]
    assert pair.engines[0].weights is weights
    pair.llm.generate(TEXTS[0], GREEDY, use_tqdm=False)


def test_who_was_accepted_before_new_weights_has_the_same_pages(pair, said):
    params = SamplingParams(temperature=0.0, max_tokens=20)
    before = pair.accept(params, TEXTS[2])
    pair.llm.update_weights(str(DEMO))
    pair.leader.add(before)
    while pair.leader.has_work:
        pair.leader.step()
    pair.llm.generate(TEXTS[2], params, use_tqdm=False)
    pair.leader.end()
    assert pair.followed.result(60) is None
    assert pair.engines[0].scheduler.num_found > 0
    assert pair.seen[0] == pair.seen[1]


def test_all_processes_have_the_same_adapter_or_none(pair, said, monkeypatch):
    own, lora = SimpleNamespace(digest=b"own"), LoRARequest("a", 1, "/adapters/a")
    found = iter([None, SimpleNamespace(digest=b"another"), own])
    monkeypatch.setattr(
        pair.other._intake, "adapter_of", lambda lora: next(found) or pair.intake.adapter_of(lora)
    )
    intake = pair.llm._make_intake()
    monkeypatch.setattr(intake, "adapter_of", lambda lora: own)
    for _ in range(2):  # it has none, then another one
        with pytest.raises(ValueError, match="/adapters/a: expected an adapter that all"):
            intake.accept([TEXTS[0]], [GREEDY], [0], [lora])
    for _ in range(2):
        assert intake.agreed_adapter_of(lora) is own
    assert len(said) == 6
    pair.llm.generate(TEXTS[0], GREEDY, use_tqdm=False)
    pair.leader.end()
    assert pair.followed.result(60) is None


def test_a_follower_keeps_no_pages_for_anybody(pair):
    pair.engines[1].pins.add(pair, [b"key"])
    pair.llm.generate(TEXTS[0], GREEDY, use_tqdm=False)
    pair.leader.end()
    pair.followed.result(60)
    assert not pair.engines[1].scheduler.allocator.pins


def test_an_end_that_no_step_has_met_reaches_every_stream(pair, monkeypatch):
    thread = EngineThread(pair.llm)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)

    def refuse(message: bytes) -> None:
        raise EngineDeadError("gone")

    async def run() -> None:
        loop = asyncio.get_running_loop()
        long = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        streams = [Stream("a"), Stream("b")]
        adds = [partial(thread.add, one, loop, TEXTS[0], long, 0, None) for one in streams]
        await thread.ask(adds[0])
        await streams[0].get()

        def fail() -> None:
            monkeypatch.setattr(pair.leader._others, "send", refuse)
            adds[1]()

        with pytest.raises(EngineDeadError, match="gone"):
            await thread.ask(fail)
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(drained(streams[0]), 20)
        with pytest.raises(EngineDeadError):
            await thread.ask(lambda: None)

    thread.start()
    asyncio.run(run())
    thread._thread.join(20)  # what it raises is for the hook above


async def drained(stream: Stream) -> None:
    while not (await stream.get()).finished:
        pass


def test_a_leader_that_nobody_has_any_more_has_ended(pair):
    submission = pair.accept(GREEDY)
    pair.leader.add(submission)
    pair.leader._tell_end()
    pair.leader.abort(submission)  # as a stream does that is left open at the exit
    assert pair.followed.result(60) is None


def test_a_grammar_is_tried_once(compiled, monkeypatch):
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[q-z]{2,5}"))
    (submission,) = intake_of(compiled).accept(["a"], [params], None, None)
    other = intake_of(LLM(**FEW))
    monkeypatch.setattr(TRIALS, "check", timed_out)
    made = other.again(json.loads(json.dumps(submission.to_json())))
    assert made.samples[0].draw.grammar.mask().tolist()
    with pytest.raises(ValueError, match="expected another form"):
        other.accept(["a"], [replace(params, structured_outputs=WORDS)], None, None)


WORDS = StructuredOutputsParams(regex="[0-4]{2,5}")


def timed_out(source: str) -> None:
    raise ValueError("another form")


def test_who_cannot_reach_the_first_process_is_told():
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ValueError, match=f"where nothing answers .localhost, port {port}: "):
        Receiver(("localhost", port), b"")


def test_a_stranger_is_sent_away():
    sender = Sender("localhost", 1)
    with ThreadPoolExecutor(1) as threads:
        accepted = threads.submit(sender.accept)
        stranger = socket.create_connection(sender.where)
        stranger.sendall(b"x" * 32)
        assert stranger.recv(1) == b""
        receiver = Receiver(sender.where, sender.key)
        accepted.result()
        sender.send(written(["step"]))
        assert receiver.receive() == ["step"]
        stranger.close(), receiver.close(), sender.close()


def test_strangers_hold_up_nobody():
    sender = Sender("localhost", 2)
    with ThreadPoolExecutor(1) as threads:
        accepted = threads.submit(sender.accept)
        strangers = [socket.create_connection(sender.where) for _ in range(MAX_STRANGERS + 9)]
        strangers[-1].sendall(sender.key[:-1])
        with suppress(OSError):  # it is cut off
            strangers[-2].sendall(b"x" * 2**22)
        receivers = [Receiver(sender.where, sender.key) for _ in range(2)]
        accepted.result(3)
        assert strangers[0].recv(1) == b""
        sender.send(written([1]))
        assert [one.receive() for one in receivers] == [[1], [1]]
        for one in (*strangers, *receivers, sender):
            one.close()


def test_who_waits_for_a_message_hears_of_the_end_that_another_thread_makes():
    sender = Sender("localhost", 1)
    receiver = Receiver(sender.where, sender.key)
    sender.accept()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(receiver.receive)
        time.sleep(0.1)
        receiver.close(), receiver.close()
        try:
            with pytest.raises(EngineDeadError):
                waiting.result(5)
        finally:
            sender.close()


def test_who_does_not_come_is_counted(monkeypatch):
    monkeypatch.setattr(channel, "LIMIT_S", 0.2)
    sender = Sender("localhost", 2)
    receiver = Receiver(sender.where, sender.key)
    with pytest.raises(TimeoutError, match="expected 2 other processes of this engine"):
        sender.accept()
    receiver.close(), sender.close()


@pytest.mark.parametrize("name", ["127.0.0.1", "::1", None])
def test_the_others_reach_the_first_process_by_any_of_its_addresses(name):
    if name == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("this system has no IPv6")
    sender = Sender("localhost", 1)
    host = channel._own_address() if name is None else name
    receiver = Receiver((host, sender.where[1]), sender.key)
    sender.accept()
    sender.send(written([1]))
    assert receiver.receive() == [1]
    receiver.close(), sender.close()


SAID = {
    "n": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "repetition_penalty": 1.5,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 2**63,
    "stop": ("a", "\u20ac"),
    "stop_token_ids": [7],
    "bad_words": ["b"],
    "ignore_eos": True,
    "max_tokens": None,
    "min_tokens": 3,
    "logprobs": 4,
    "prompt_logprobs": 5,
    "prompt_logprobs_start": 2,
    "logit_bias": {11: 0.5},
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "kv_policy": "streaming",
    "kv_budget": 64,
    "kv_protect": [(0, 3)],
    "thinking_token_budget": 0,
    "reasoning": ("", "\u20ac</a>"),
    "spaces_between_special_tokens": False,
    "best_of": 2,
}
"""A value for each parameter that may have another one than its default, but for those below."""

APART = {
    "detokenize": False,
    "allowed_token_ids": [3, 4],
    "structured_outputs": StructuredOutputsParams(
        json={"type": "object"}, reasoning=("<a>", "</a>")
    ),
}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(**SAID),
        *(SamplingParams(**{name: value}) for name, value in APART.items()),
        BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True, length_penalty=0.5),
        PoolingParams(dimensions=8, normalize=False, activation=True, truncate_prompt_tokens=-1),
    ],
    ids=lambda params: type(params).__name__,
)
def test_all_that_was_asked_for_is_told(params):
    asked = Asked(5, params, 2, "salt")
    lora = LoRARequest("a", 1, "/adapters/a")
    adapter = SimpleNamespace(digest=b"own")
    message = json.loads(json.dumps(asked.to_json("text", [1, 2], lora, adapter)))
    # A tuple comes as a list.
    assert json.dumps(vars_of(params_of(message))) == json.dumps(vars_of(params))
    assert message["prompt"] == {"prompt": "text", "prompt_token_ids": [1, 2], "cache_salt": "salt"}
    assert (message["number"], message["priority"]) == (5, 2)
    assert LoRARequest(*message["lora"][0]) == lora
    assert message["lora"][1] == b"own".hex()


def vars_of(params: object) -> dict:
    found = {one.name: getattr(params, one.name) for one in fields(params)}
    inner = found.get("structured_outputs")
    found |= {} if inner is None else {"structured_outputs": vars_of(inner)}
    return {name: value for name, value in found.items() if name not in UNSENT}


def test_no_parameter_is_forgotten():
    for one in fields(SamplingParams):
        if one.name in SAID or one.name in APART or one.name in UNSENT:
            continue
        with pytest.raises(ValueError, match=one.name):
            SamplingParams(**{one.name: 1})  # there is nothing to be told


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"node_rank": 1}, "node_rank: expected none with nnodes=1, got 1"),
        ({"master_addr": "10.0.0.1"}, "master_addr: expected none with nnodes=1"),
        (
            {"nnodes": 2, "node_rank": 2, "master_addr": "a"},
            "node_rank: expected a number below nnodes=2, got 2",
        ),
        (
            {"nnodes": 2, "node_rank": 1},
            "master_addr: expected an address with node_rank, got None",
        ),
        ({"nnodes": 0}, "nnodes: expected a number >= 1, got 0"),
        ({"nnodes": 2, "master_port": 5}, "master_port: expected 29501 without master_addr"),
    ],
)
def test_processes_that_cannot_find_each_other_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        EngineOptions(**given)
    EngineOptions(nnodes=1, node_rank=0, master_addr="127.0.0.1", master_port=29501)  # vLLM's


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({}, ()),
        ({"master_addr": "fd00::1", "node_rank": 1}, ("[fd00::1]:29501", 3, 1)),
        # JAX asks what has started the job which process this is.
        ({"master_addr": "host", "master_port": 5}, ("host:5", 3, None)),
    ],
)
def test_what_jax_is_asked_to_join_by(monkeypatch, given, asked):
    said, before = [], signal.getsignal(signal.SIGTERM)

    def initialize(*args: object) -> None:
        said.append(args)
        signal.signal(signal.SIGTERM, lambda *_: None)  # as JAX does

    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    join(EngineOptions(nnodes=3, **given))
    assert said == [asked]
    assert signal.getsignal(signal.SIGTERM) is before


def test_processes_compare_what_they_are_before_they_try_kernels(monkeypatch):
    def differ(parts: dict) -> None:
        raise ValueError("unlike others")

    monkeypatch.setattr(part, "num_processes", lambda devices: 2)
    monkeypatch.setattr(part, "check_same", differ)
    monkeypatch.setattr(part, "make_tested", lambda make, options: pytest.fail("tried"))
    with pytest.raises(ValueError, match="unlike others"):
        LLM(**FEW)


def test_one_process_has_nobody_to_follow(compiled):
    assert not compiled.is_follower
    with pytest.raises(ValueError, match="follow: expected another process than the first"):
        compiled.follow()


RUN = """
import json, sys
from jaxkv import LLM, SamplingParams
from jaxkv.testing import engine_of

few, texts, rank, port, other = *map(json.loads, sys.argv[1:5]), sys.argv[5]
say = lambda what: print(">", json.dumps(what), flush=True)  # among lines of what connects them
shared = few | {"nnodes": 2, "node_rank": rank, "master_addr": "localhost", "master_port": port}
shared |= {"tensor_parallel_size": 2, "kv_cache_dtype": "int8"}
params = SamplingParams(temperature=0.0, max_tokens=12, prompt_logprobs=0)

def refused(call):
    try:
        call()
    except (ValueError, NotImplementedError) as error:
        say(str(error))

def generated():
    return [
        [one.outputs[0].token_ids] + [[*each.values()][0].logprob for each in one.prompt_logprobs[1:]]
        for one in llm.generate(texts, params, use_tqdm=False)
    ]

for unlike in (
    {"max_num_seqs": 2 + rank},
    {"enable_prefix_caching": bool(rank)},
    {"skip_tokenizer_init": bool(rank)},
    {"num_gpu_blocks_override": 16 + rank},
):
    refused(lambda: LLM(**shared | unlike))
llm = LLM(**shared)
if llm.is_follower:
    refused(lambda: llm.generate("import", use_tqdm=False))
    refused(lambda: llm.update_weights(other))
    refused(llm.identity)
    refused(llm.wait_until_compiled)
    llm.follow()
else:
    session = llm.session("def add(a, b):\\n    return")
    refused(lambda: session.save("anywhere"))
    refused(lambda: llm.update_weights({"x": 1}))
    refused(lambda: llm.update_weights("/not/there"))
    say(session.generate(SamplingParams(temperature=0.0, max_tokens=9))[1].token_ids)
    say([llm.identity(), generated()])
    llm.sleep(level=1)
    llm.wake_up()
    say(generated())
    llm.update_weights(other)
    say(generated())
    engine_of(llm).check()
    # An engine of its own takes this process's device, and nobody follows.
    say(LLM(**few).generate("import", params, use_tqdm=False)[0].outputs[0].token_ids)
"""


def run_both(*arguments: object) -> list[list]:
    """Returns what the two processes say."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    flags = "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RUN, *map(json.dumps, (FEW, TEXTS, rank, port)), *arguments],
            env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [one.communicate(timeout=120)[0].splitlines() for one in processes]
    finally:
        for one in processes:
            one.kill()
    assert [one.returncode for one in processes] == [0, 0]
    return [[json.loads(line[2:]) for line in lines if line[:2] == "> "] for lines in said]


def check_like(outputs: list, found: list) -> None:
    for output, (tokens, *logprobs) in zip(outputs, found, strict=True):
        assert output.outputs[0].token_ids == tokens
        want = [next(iter(one.values())).logprob for one in output.prompt_logprobs[1:]]
        # What is all but between two values of int8 may be rounded to either.
        np.testing.assert_allclose(logprobs, want, atol=0.02)


def test_two_processes_give_what_one_gives(compiled, tmp_path):
    other = shutil.copytree(DEMO, tmp_path / "other")
    (file,) = other.glob("*.safetensors")
    tensors = load_file(file)
    save_file(tensors | {FIRST: 3 * tensors[FIRST]}, file)
    first, second = run_both(str(other))
    assert first[0].endswith("unlike others: max_num_seqs 2")
    assert second[0].endswith("unlike others: max_num_seqs 3")
    assert first[1].endswith("unlike others: enable_prefix_caching False")
    assert "unlike others: tokenizer '" in first[2]
    assert first[3].endswith("unlike others: kv_cache_memory_bytes, num_gpu_blocks_override 16")
    first, second = first[3:], second[3:]
    assert len(second) == 5
    for said in second[1:]:
        assert "expected the first process (jax.process_index() 0) to ask" in said
    assert first[1].startswith("save, restore: expected an engine of one process")
    assert first[2].startswith("update_weights: expected a directory or hub id")
    assert first[3].startswith("/not/there: expected a directory with config.json")
    forked, (identity, before), slept, after, own = first[4:]
    assert slept == before
    params = SamplingParams(temperature=0.0, max_tokens=12, prompt_logprobs=0)
    with LLM(**FEW, kv_cache_dtype="int8") as llm:
        assert llm.identity() == identity
        session = llm.session("def add(a, b):\n    return")
        assert (
            session.generate(SamplingParams(temperature=0.0, max_tokens=9))[1].token_ids == forked
        )
        check_like(llm.generate(TEXTS, params, use_tqdm=False), before)
        llm.update_weights(other)
        check_like(llm.generate(TEXTS, params, use_tqdm=False), after)
    assert after != before
    (alone,) = compiled.generate("import", params, use_tqdm=False)
    assert alone.outputs[0].token_ids == own


@pytest.mark.slow
def test_a_server_of_two_processes_answers_until_one_is_lost(compiled):
    ports = []
    for _ in range(2):
        with socket.create_server(("localhost", 0)) as free:
            ports.append(free.getsockname()[1])
    flags = "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0"
    given = {"max-num-seqs": 4, "max-model-len": 128, "dtype": "float32", "tensor-parallel-size": 2}
    given |= {"nnodes": 2, "master-addr": "localhost", "master-port": ports[0], "port": ports[1]}
    line = [sys.executable, "-m", "jaxkv", "serve", "--lazy-compile"]
    line += [str(part) for name, value in given.items() for part in (f"--{name}", value)]
    processes = [
        subprocess.Popen(
            [*line, "--node-rank", str(rank)],
            env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
            stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    where = f"http://127.0.0.1:{ports[1]}"
    asked = {"prompt": TEXTS[0], "max_tokens": 12, "temperature": 0}
    try:
        until = time.monotonic() + 90
        while not is_healthy(where):
            assert time.monotonic() < until
            time.sleep(0.2)
        (alone,) = compiled.generate(TEXTS[0], GREEDY, use_tqdm=False)
        assert answer(where, asked)["choices"][0]["text"] == alone.outputs[0].text
        processes[1].kill()
        with pytest.raises(urllib.error.HTTPError, match="503"):
            answer(where, asked)
        assert not is_healthy(where)
    finally:
        for one in processes:
            one.kill()
            one.wait()


def answer(where: str, asked: dict) -> dict:
    request = urllib.request.Request(
        f"{where}/v1/completions", json.dumps(asked).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def is_healthy(where: str) -> bool:
    try:
        with urllib.request.urlopen(f"{where}/health", timeout=5) as response:
            return response.status == 200
    except OSError:  # which errors of HTTP are too
        return False
