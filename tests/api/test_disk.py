"""Pages that are kept on a disk come back as they were, after a restart too."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from families import text_config
from jaxkv.api.llm import LLM
from jaxkv.config import BeamSearchParams, SamplingParams
from jaxkv.engine import engine as engines
from jaxkv.engine.beams import beam_output
from jaxkv.errors import DirectoryInUseError
from jaxkv.holding import disk, tiers
from jaxkv.holding.costs import Costs
from jaxkv.programs.compiled import Programs
from jaxkv.testing import engine_of, intake_of
from poison import poisoned
from tiny import SMALL, make_checkpoint, tiny_config

pytestmark = pytest.mark.usefixtures("quick_compile", "one_loop", "compile_once")

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
OWN = {"num_gpu_blocks_override": 26}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("disk") / "model", tiny_config("llama"))


@pytest.fixture
def make(checkpoint) -> Callable[..., LLM]:
    return lambda model=checkpoint, **options: LLM(model, **SMALL | OWN | options)


@pytest.fixture
def on_disk(tmp_path) -> dict[str, object]:
    return {"kv_disk": tmp_path / "pages", "kv_disk_bytes": 2**24}


@pytest.fixture
def loads_always(monkeypatch) -> None:
    """A model that is computed in no time: whether a page is loaded must not depend on the clock."""
    monkeypatch.setattr(Costs, "pays", lambda *_, **__: True)


def ids(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 150, length).tolist()


def values(llm: LLM) -> dict[str, float]:
    return {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics("")}


def ask(llm: LLM, *prompts: list[int], salt: str = "") -> list[tuple[list[int], int]]:
    """Tokens, and how many of the prompt were found."""
    asked = [{"prompt_token_ids": prompt, "cache_salt": salt} for prompt in prompts]
    outputs = llm.generate(asked, GREEDY, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.num_cached_tokens) for output in outputs]


def test_pages_that_leave_and_nobody_wants_are_counted_once(make, on_disk, monkeypatch):
    monkeypatch.setattr(disk, "WAITING_BYTES", 0)
    llm = make(**on_disk)
    engine = engine_of(llm)
    engine._moves.out(engine.kv, [(0, b"listed")], is_leaving=False)
    assert values(llm)["kv_disk_left_out"] == 0
    engine._moves.out(engine.kv, [(0, b"leaving")], is_leaving=True)
    assert values(llm)["kv_disk_left_out"] == 1


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"kv_host_bytes": 2**16, "kv_cache_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param({"model": "windows", "num_gpu_blocks_override": 40}, marks=pytest.mark.slow),
    ],
    ids=["", "host-int8", "windows"],
)
@pytest.mark.usefixtures("loads_always")
def test_conversations_go_on_after_a_restart(make, on_disk, tmp_path, options):
    """Eight of them in a pool for two, several at once, with NaN in all memory that nobody owns.
    All full pages are found, those too that were on the device when the first engine ended.
    """
    if "model" in options:
        config = tiny_config("qwen2-mixed-windows")
        options = options | {"model": make_checkpoint(tmp_path / "model", config)}
    plain = make(**{**options, "kv_host_bytes": 0})
    turns: dict[int, list[int]] = {talk: ids(30, talk) for talk in range(8)}
    num_asked = num_found = 0
    for turn in range(3):
        if turn in (0, 2):
            llm = make(**options, **on_disk)
        with poisoned(engine_of(llm)):
            for first in range(0, 8, 2):
                talks = [first, first + 1]
                got = ask(llm, *(turns[talk] for talk in talks))
                want = ask(plain, *(turns[talk] for talk in talks))
                for talk, (tokens, found), (wanted, _) in zip(talks, got, want, strict=True):
                    assert tokens == wanted
                    if turn:
                        num_asked += (len(turns[talk]) - 7) // 8 * 8
                        num_found += found
                    turns[talk] += tokens + ids(6, 10 * talk + turn)
            engine_of(llm).check()
        if turn == 1:
            counts = values(llm)
            assert counts["kv_disk_pages"] > 40
            llm.shutdown()
    assert num_found == num_asked
    assert values(llm)["kv_disk_hits"] > 300
    assert engine_of(llm).scheduler.tiers.costs.read.num * 8 >= values(llm)["kv_disk_hits"]
    assert f"{on_disk['kv_disk']} keeps up to" in llm.describe()
    llm.shutdown()


def test_all_is_on_its_way_when_the_last_request_ends(make, on_disk, monkeypatch):
    """Also while programs are compiled, when a step reads only."""
    for is_compiling in (False, True):
        monkeypatch.setattr(Programs, "is_compiling", is_compiling)
        llm = make(**on_disk)
        ask(llm, ids(60, is_compiling))
        assert values(llm)["kv_disk_pages"] == 8 * (1 + is_compiling)
        llm.shutdown()


def test_pages_that_the_device_has_lost_are_not_written(make, on_disk, tmp_path, monkeypatch):
    """Pages that were restored after a step had failed, and before the next one sees that all that
    was on the device is lost.
    """
    llm = make(**on_disk)
    llm.session({"prompt_token_ids": ids(40, 0)}).save(tmp_path / "saved")
    llm.reset_prefix_cache()
    engine_of(llm)._failed = True
    monkeypatch.setattr(engines, "is_computed", lambda _: False)
    llm.restore(tmp_path / "saved")
    ask(llm, ids(5, 1))
    assert values(llm)["kv_disk_pages"] == 1  # what was asked last, with the answer


@pytest.mark.usefixtures("loads_always")
def test_damaged_files_are_computed_again(make, on_disk):
    llm, prompts = make(**on_disk), [ids(60, seed) for seed in range(2)]
    want = [tokens for tokens, _ in ask(llm, *prompts)]
    llm.shutdown()
    files = sorted(on_disk["kv_disk"].glob("*.page"))
    assert len(files) == 16  # the first 64 tokens of each are known when it ends
    for file in files:
        data = bytearray(file.read_bytes())
        data[60] ^= 1
        file.write_bytes(data)
    files[0].write_bytes(files[0].read_bytes()[:100])
    llm = make(**on_disk)
    with poisoned(engine_of(llm)):
        got = ask(llm, *prompts)
    assert got == [(tokens, 0) for tokens in want]
    assert values(llm)["kv_disk_damaged"] == 14  # of the last page one token is always computed
    llm.reset_prefix_cache()
    assert sorted(on_disk["kv_disk"].glob("*.page")) == []
    llm.shutdown()


@pytest.mark.usefixtures("loads_always")
def test_nobody_finds_what_is_of_another_salt_secret_or_model(make, on_disk, checkpoint, tmp_path):
    prompt = ids(60, 0)
    llm = make(**on_disk)
    ask(llm, prompt, salt="one")
    llm.shutdown()
    other = make_checkpoint(tmp_path / "other", tiny_config("llama"), seed=1)
    for found, options, salt in (
        (0, {}, "two"),
        (0, {"prefix_cache_secret": b"secret"}, "one"),
        (0, {"model": other}, "one"),
        (56, {}, "one"),
    ):
        model = options.pop("model", checkpoint)
        llm = LLM(model, **SMALL | OWN | on_disk | options)
        (answer,) = ask(llm, prompt, salt=salt)
        assert answer[1] == found
        llm.shutdown()
    names = [file.name for file in on_disk["kv_disk"].iterdir() if "page" not in file.suffix]
    assert sorted(names) == ["lock", "secret"]


def test_what_is_sooner_computed_is_not_loaded(make, on_disk, monkeypatch):
    prompt, llm = ids(60, 0), make(**on_disk)
    (want,) = ask(llm, prompt)
    for seed in range(1, 5):
        ask(llm, ids(60, seed))
    costs = engine_of(llm).scheduler.tiers.costs
    assert min(costs.computed.num, costs.step_s) > 0
    costs.read.add(1, 1000.0)
    assert ask(llm, prompt) == [(want[0], 0)]
    assert values(llm)["kv_disk_refused"] == 1
    llm.shutdown()


@pytest.mark.usefixtures("loads_always")
def test_an_interrupt_while_pages_are_read_ends_nothing_else(make, on_disk, monkeypatch):
    prompt, llm = ids(60, 0), make(**on_disk)
    (want,) = ask(llm, prompt)
    for seed in range(1, 5):
        ask(llm, ids(60, seed))
    engine = engine_of(llm)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, poisoned(engine):
        patch.setattr(engine.scheduler.tiers, "wait", interrupt)
        patch.setattr(engine.scheduler.tiers, "is_coming", lambda _: True)
        with pytest.raises(KeyboardInterrupt):
            ask(llm, prompt)
    engine.check()
    assert ask(llm, prompt) == [(want[0], 56)]
    own = engine.scheduler.tiers
    num_bytes, own.disk.num_bytes = own.disk.num_bytes, 0
    own._reads["somebody"] = None
    engine._is_changing = True  # as an interrupt in the middle of a change leaves it
    engine.check()
    assert (own.disk.num_bytes, own._reads) == (num_bytes, {})
    llm.shutdown()


@pytest.mark.parametrize("ahead_bytes", [0, 2**30])
@pytest.mark.usefixtures("loads_always")
def test_more_requests_than_rows_wait_for_their_pages(make, on_disk, monkeypatch, ahead_bytes):
    """Those behind the first one too, where not much is read ahead. One that is aborted leaves
    nothing behind.
    """
    monkeypatch.setattr(tiers, "AHEAD_BYTES", ahead_bytes)
    prompts = [ids(60, seed) for seed in range(8)]
    llm = make(**on_disk)
    want = [tokens for tokens, _ in ask(llm, *prompts)]
    llm.shutdown()
    llm = make(**on_disk)
    engine = engine_of(llm)
    with poisoned(engine):
        stream = llm.stream({"prompt_token_ids": prompts[0]}, GREEDY)
        next(stream)
        stream.close()
        assert ask(llm, *prompts) == [(tokens, 56) for tokens in want]
    assert engine.scheduler.tiers._reads == {}
    llm.shutdown()


@pytest.mark.usefixtures("loads_always")
def test_a_beam_waits_behind_a_request_whose_pages_are_read(make, on_disk, monkeypatch):
    """The others of its search wait for it, and it for somebody who goes first."""
    llm = make(**on_disk)
    engine, first = engine_of(llm), {"prompt_token_ids": ids(60, 0)}
    (want,) = ask(llm, first["prompt_token_ids"])
    for seed in range(1, 5):
        ask(llm, ids(60, seed))
    own, prompts = engine.scheduler.tiers, [{"prompt_token_ids": ids(20, 9)}]
    params = BeamSearchParams(beam_width=2, max_tokens=9)
    (expected,) = llm.beam_search(prompts, params)
    (search,) = intake_of(llm).accept_searches(prompts, params)
    with poisoned(engine):
        engine.add(search)
        for _ in range(3):
            engine.step()
        engine.change(lambda: engine.scheduler._preempt(search.samples[1]))
        (sooner,) = intake_of(llm).accept([first], [GREEDY], [-1])
        engine.add(sooner)
        answers, is_coming = iter([True] * 9), own.is_coming
        monkeypatch.setattr(own, "is_coming", lambda hold: next(answers, False) or is_coming(hold))
        while engine.has_work:
            engine.step()
    assert (sooner.output().outputs[0].token_ids, sooner.output().num_cached_tokens) == (
        want[0],
        56,
    )
    found = beam_output(search, eos_id=None, include_stop=False, decode=None)
    assert [one.tokens for one in found.sequences] == [one.tokens for one in expected.sequences]
    llm.shutdown()


def test_what_a_disk_does_not_keep_is_refused_by_name(make, on_disk, checkpoint, tmp_path):
    for reason, options in (
        ("kv_disk: expected None with kv_policy", {"kv_policy": "streaming", "kv_budget": 64}),
        ("kv_disk: expected None with enable", {"enable_prefix_caching": False}),
        ("kv_disk_bytes: expected a number >= 0", {"kv_disk_bytes": -1}),
        ("kv_disk_bytes: expected a number > 0 with", {"kv_disk_bytes": 0}),
        ("kv_disk_bytes: .* 0 without", {"kv_disk": None}),
        ("kv_disk_bytes: expected room for a page", {"kv_disk_bytes": 100}),
        ("kv_disk: expected None or the path", {"kv_disk": 1}),
        ("kv_disk: expected a directory that can be made", {"kv_disk": __file__}),
    ):
        with pytest.raises(ValueError, match=reason):
            make(**on_disk | options)
    states = make_checkpoint(tmp_path / "model", text_config("lfm2"))
    with pytest.raises(ValueError, match=r"kv_disk: expected None .*recurrent states"):
        LLM(states, **SMALL, **on_disk)
    llm = make(**on_disk)
    with pytest.raises(DirectoryInUseError, match="no other engine"):
        make(**on_disk)
    llm.shutdown()
