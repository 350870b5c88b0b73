"""What several engines compute that divide requests between them is what one computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from threading import RLock
from types import SimpleNamespace

import jax
import pytest

import jaxkv
from asked import params, prompts
from jaxkv import LLM, SamplingParams
from jaxkv.api.part import make_parts, make_replicated
from jaxkv.build.model import find_model
from jaxkv.build.options import EngineOptions
from jaxkv.engine.metrics import prometheus_text
from jaxkv.engine.replicas import Replicas
from jaxkv.engine.streams import complete
from jaxkv.requests.request import Submission
from jaxkv.testing import engine_of, intake_of
from tiny import SMALL, make_checkpoint, tiny_config

pytestmark = pytest.mark.usefixtures("quick_compile", "one_loop")

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), tiny_config("mistral-window"))


@pytest.fixture(scope="module")
def llm(directory) -> LLM:
    """Is asked alone, and makes submissions."""
    return LLM(directory, **SMALL)


@pytest.fixture(scope="module")
def engines(llm, directory) -> list:
    """Two that share a lock, on one device."""
    options = EngineOptions(directory, **SMALL)
    parts = [make_parts(options, find_model(options), jax.devices())[0] for _ in range(2)]
    made = make_replicated(parts)
    for engine in made:
        engine.programs.executables = engine_of(llm).programs.executables
    return made


@pytest.fixture
def front(engines) -> Replicas:
    front = Replicas(engines)
    front.forget()
    return front


def submitted(llm: LLM, given: list, asked: list | None = None) -> list[Submission]:
    return intake_of(llm).accept(given, asked or [GREEDY] * len(given), None, None)


def place_of(front: Replicas, engines: list, submission: Submission) -> int:
    """Adds a submission; returns the number of the engine that it has come to."""
    before = [len(engine.scheduler.waiting) for engine in engines]
    front.add(submission)
    after = [len(engine.scheduler.waiting) for engine in engines]
    return [new > old for old, new in zip(before, after, strict=True)].index(True)


def found(outputs: list) -> list:
    return [
        [(one.token_ids, one.logprobs) for one in output.outputs] + [output.prompt_logprobs]
        for output in outputs
    ]


def test_two_engines_give_what_one_gives(llm, engines, front):
    want = found(llm.generate(prompts(), params(), use_tqdm=False))
    submissions = submitted(llm, prompts(), params())
    for _ in complete(front, enumerate(submissions)):
        front.check()
    assert found([submission.output() for submission in submissions]) == want
    for engine in engines:
        assert engine.scheduler.allocator.num_used == 0
        assert engine.scheduler.num_looked_up > 0


def test_a_request_goes_where_its_beginning_is_unless_others_have_less_to_do(llm, engines, front):
    first, rest = prompts()[5]["prompt_token_ids"], prompts()[2:5]
    for _ in complete(front, enumerate(submitted(llm, [rest[0], first]))):
        pass
    longer = [{"prompt_token_ids": [*first, n]} for n in range(8)]
    taken = [place_of(front, engines, one) for one in submitted(llm, longer)]
    home = 1  # the other one had the first prompt to do when this one came
    # 104 tokens are in 13 full pages there: each adds 64 + 7 to what that engine has to do, and
    # 64 + 111 to the other one.
    assert taken == [home, home, 0, home, home, 0, home, home]
    front.check()
    while front.has_work:
        front.step()
    assert engines[home].scheduler.num_found >= 104


def test_no_engine_waits_for_another():
    steps = []

    def engine(number: int, ready: bool) -> SimpleNamespace:
        step = partial(steps.append, number)
        return SimpleNamespace(has_work=True, is_ready=ready, step=step, num_owed=0, lock=RLock())

    made = [engine(0, True), engine(1, False), engine(2, True)]
    front = Replicas(made)
    for _ in range(4):
        front.step()
    made[1].is_ready = True
    front.step()
    made[0].has_work = False
    front.step()
    assert steps == [0, 2, 0, 2, 1, 2]


class Ending:
    """An engine whose last request is ended, as the garbage collector may, while it is waited for."""

    is_ready, num_owed, step, lock = False, 0, staticmethod(list), RLock()

    def __init__(self) -> None:
        self.asked = 0

    @property
    def has_work(self) -> bool:
        self.asked += 1
        return self.asked < 5


def test_a_step_for_requests_that_end_meanwhile_ends_too():
    assert Replicas([Ending()]).step() == []


def test_weights_that_only_some_engines_have_got_are_not_computed_with(
    llm, engines, front, monkeypatch
):
    (submission,) = submitted(llm, prompts()[:1])
    weights = [engine.weights for engine in engines]
    with monkeypatch.context() as patched:
        patched.setattr(engines[1], "check_alive", partial(pytest.fail, "cut off"))
        with pytest.raises(pytest.fail.Exception):
            front.replace_weights(*weights, secret=b"one")
    with pytest.raises(ValueError, match="update_weights that was cut off: call it again"):
        front.add(submission)
    front.replace_weights(*weights, secret=b"two")
    front.add(submission)
    front.abort(submission)


def test_what_is_aborted_leaves_nothing(llm, engines, front):
    submissions = submitted(llm, prompts())
    for submission in submissions:
        front.add(submission)
    for _ in range(5):
        front.step()
    for submission in submissions:
        front.abort(submission)
    assert not front.has_work
    front.check()
    assert [engine.scheduler.allocator.num_used for engine in engines] == [0, 0]


def test_all_engines_sleep_or_none(llm, engines, front):
    want = found(llm.generate(prompts()[:3], GREEDY, use_tqdm=False))
    (submission,) = submitted(llm, prompts()[2:3])
    engines[1].add(submission)  # the first one would refuse by itself before another one sleeps
    with pytest.raises(ValueError, match="expected no requests under way"):
        front.sleep(keeps_weights=True)
    assert [engine.is_asleep for engine in engines] == [False, False]
    front.abort(submission)
    front.sleep(keeps_weights=True)
    assert [engine.is_asleep for engine in engines] == [True, True]
    with pytest.raises(ValueError, match="expected an engine that is awake"):
        front.add(submission)
    front.wake_up(["weights", "kv_cache"])
    submissions = submitted(llm, prompts()[:3])
    for _ in complete(front, enumerate(submissions)):
        pass
    assert found([one.output() for one in submissions]) == want


def test_metrics_of_one_name_stand_together(front):
    names = [metric.name for metric in front.metrics()]
    begun = [name for i, name in enumerate(names) if not i or name != names[i - 1]]
    assert len(names) >= 2 * len(begun)
    assert len(begun) == len({*begun})
    text = prometheus_text(front.metrics())
    assert all(f'time_to_first_token_seconds_count{{engine="{n}"}} ' in text for n in (0, 1))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data_parallel_size": 2}, "data_parallel_size: expected at most 1, as 1 devices"),
        ({"data_parallel_size": 0}, "data_parallel_size: expected a number >= 1, got 0"),
        ({"data_parallel_size": 2, "disaggregate": (1, 1)}, "expected 1 with disaggregate"),
        ({"data_parallel_size": 2, "kv_disk": "x", "kv_disk_bytes": 9}, "kv_disk: expected None"),
    ],
)
def test_what_cannot_be_is_refused(directory, changes, said):
    with pytest.raises(ValueError, match=said):
        LLM(directory, **SMALL | changes)


RUN = """
import asyncio, json, sys
from jaxkv import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from jaxkv.testing import front_of
first, second, given = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
options, prompts = given["options"], given["prompts"]
params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=12, ignore_eos=True) for i in range(len(prompts))]

def tokens(llm):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    front_of(llm).check()
    return [output.outputs[0].token_ids for output in outputs]

def refused(call):
    try:
        call()
    except ValueError as error:
        return "expected data_parallel_size 1" in str(error)

def run(beams=False, **changes):
    with LLM(first, **options | changes) as llm:
        said = [tokens(llm)]
        if beams:
            asked = BeamSearchParams(beam_width=2, max_tokens=5, ignore_eos=True)
            said += [beam.tokens for one in llm.beam_search(prompts[2:4], asked) for beam in one.sequences]
        llm.update_weights(second)
        said.append(tokens(llm))
        if changes:
            session = lambda: llm.session(prompts[0])
            assert all(map(refused, (session, llm.record_pages, llm.prefix_tree, llm.page_table)))
            assert llm.num_kv_tokens == 2 * llm._blueprint.limits.num_tokens
            on = [engine.kv.pools[0].devices() for engine in llm._engines]
            assert not on[0] & on[1] and "replica   on" in llm.describe()
        return said

async def streamed(**changes):
    async def one(llm, i):
        async for output in llm.generate(prompts[i], params[i]):
            pass
        return output.outputs[0].token_ids
    async with AsyncLLM(first, **options | changes) as llm:
        return await asyncio.gather(*(one(llm, i) for i in range(len(prompts))))

if given["is_short"]:
    print(json.dumps(run(data_parallel_size=2)))
else:
    four = {"data_parallel_size": 2, "tensor_parallel_size": 2}
    print(json.dumps([run(True), run(True, **four), asyncio.run(streamed(**four))]))
"""


def run_apart(directory: Path, other: Path, **given: object) -> list:
    num_devices = 2 if given["is_short"] else 4
    env = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices} "
        f"--xla_backend_optimization_level=0",
        "PYTHONPATH": str(Path(jaxkv.__file__).parents[1]),
    }
    given = json.dumps({"options": SMALL, **given})
    command = [sys.executable, "-c", RUN, str(directory), str(other), given]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_two_devices_give_the_tokens_of_one(llm, directory, tmp_path):
    other = make_checkpoint(tmp_path / "other", tiny_config("mistral-window"), seed=1)
    few = prompts()[:5]
    asked = [
        SamplingParams(temperature=i % 2, seed=i, max_tokens=12, ignore_eos=True)
        for i in range(len(few))
    ]
    want = []
    for weights in (directory, other, directory):
        llm.update_weights(weights)
        outputs = llm.generate(few, asked, use_tqdm=False)
        want.append([output.outputs[0].token_ids for output in outputs])
    assert want[0] == want[2] != want[1]
    assert run_apart(directory, other, prompts=few, is_short=True) == want[:2]


@pytest.mark.slow
def test_two_engines_of_two_devices_give_the_tokens_of_one_device(tmp_path):
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64}
    made = [
        make_checkpoint(tmp_path / str(seed), tiny_config("llama-3", **heads), seed=seed)
        for seed in (0, 1)
    ]
    alone, several, streamed = run_apart(*made, prompts=prompts(), is_short=False)
    assert several == alone
    assert streamed == alone[0]
