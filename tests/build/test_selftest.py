"""An engine has a kernel only where its self-test has passed; what came out is remembered, also of
a kernel that hung or took its process with it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from threading import Event

import jax
import pytest

from families import text_config
from jaxkv import LLM
from jaxkv.build import compile_cache
from jaxkv.build import selftest as guard
from jaxkv.build.blueprint import Blueprint, make_blueprint
from jaxkv.build.options import EngineOptions
from jaxkv.errors import KernelError
from jaxkv.kv.codecs import get_codec
from jaxkv.kv.layout import LaneLayout
from jaxkv.models.families import read_config, read_family
from jaxkv.ops import attention
from jaxkv.ops.attention import BACKENDS, Heads
from jaxkv.ops.attention.pallas_tpu import PallasTpu
from jaxkv.programs.selftest import Trial
from jaxkv.tools.engine_job import attention_of
from tiny import make_checkpoint, tiny_config

RIGHT = Trial(None, 1.0, 0.001)
WRONG = Trial("outputs are 0.3 of their norm off XLA's", 1.0, 0.001)
HEADS = Heads(num_heads=4, num_kv_heads=2, head_dim=128, window=None)
(CASE, _) = guard.make_cases(HEADS, get_codec("bfloat16", platform="tpu"), 64)
SHAPE = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}
LIMITS = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 64, "block_size": 16}
LIMITS |= {"dtype": "float32"}


@pytest.fixture
def trials(monkeypatch, tmp_path):
    """In place of the kernel: answers in turn, which are called if they can be; tells what was
    tried.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    answers, tried = [RIGHT], []

    def try_case(case, backend, device):
        tried.append(case)
        answer = answers[min(len(tried), len(answers)) - 1]
        return answer() if callable(answer) else answer

    monkeypatch.setattr(guard, "try_case", try_case)
    return answers, tried


def find(**options: object) -> guard.Verdict:
    (device, *_) = jax.devices()
    folder = guard.report_folder(device)
    return guard.find_verdict(CASE, "pallas_tpu", PallasTpu(), device, folder, **options)


def test_a_case_is_tried_once(trials):
    _, tried = trials
    first = find()
    assert first == find()
    assert first.fault is None
    assert tried == [CASE]
    find(again=True)
    assert len(tried) == 2


@pytest.mark.parametrize("name", ["VERSION", "version", "digest_of_sources"])
def test_what_was_found_with_other_versions_does_not_count(trials, monkeypatch, name):
    find()
    monkeypatch.setattr(guard, name, "9" if name == "VERSION" else lambda *_: "other")
    find()
    assert len(trials[1]) == 2


def test_a_damaged_report_is_made_anew(trials):
    report = find().report
    for text in ("", "{", "[]", '{"verdict": {"case": "x"}}', '{"verdict": 1}'):
        report.write_text(text)
        assert find().report == report
    assert len(trials[1]) == 6
    assert json.loads(report.read_text())["device"] == jax.devices()[0].device_kind


def test_without_a_folder_it_is_tried_every_time(trials, monkeypatch):
    def others(folder):
        return True

    monkeypatch.setattr(compile_cache, "others_may_write", others)
    assert find().report is None
    assert find().fault is None
    assert len(trials[1]) == 2


def test_neither_a_full_disk_nor_one_without_locks_keeps_an_engine_from_starting(
    trials, monkeypatch
):
    def refused(*_: object):
        raise OSError(errno.ENOSYS, "Function not implemented")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refused)
        assert find().fault is None
    find().report.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(guard.os, "replace", refused)
        assert find().report is None
        ended = Event()
        trials[0][:] = [lambda: RIGHT if ended.wait() else WRONG]
        with pytest.raises(KernelError, match=r"Start again: with backend='xla', as no folder"):
            find(limit_s=0.05)
        ended.set()


def test_a_process_that_ends_while_another_opens_its_file_has_not_died(trials, monkeypatch):
    mark = find().report.with_suffix(".running")
    first, lock = guard._marked(mark), fcntl.flock
    first.__enter__()

    def late(file: int, kind: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        first.__exit__(None, None, None)
        lock(file, kind)

    monkeypatch.setattr(fcntl, "flock", late)
    with guard._marked(mark) as died:
        assert not died


def test_an_exception_is_a_fault_with_its_trace(trials):
    def refused():
        raise NotImplementedError("no such operation\nat line 3")

    trials[0][:] = [refused]
    verdict = find()
    assert verdict.fault == "NotImplementedError: no such operation"
    assert "in refused" in verdict.trace
    assert find() == verdict


def test_a_hung_kernel_ends_this_start_and_is_known_at_the_next(trials):
    ended = Event()
    trials[0][:] = [lambda: RIGHT if ended.wait() else WRONG]
    try:
        with pytest.raises(KernelError, match=r"it did not end within 0.1 s; .* Start again"):
            find(limit_s=0.1)
        assert find().fault == "it did not end within 0.1 s"
    finally:
        ended.set()


def test_a_device_that_answers_no_more_ends_this_start(trials, monkeypatch):
    def out_of_bounds():
        raise jax.errors.JaxRuntimeError("INTERNAL: illegal memory access")

    def dead(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: the device is lost")

    trials[0][:] = [out_of_bounds]
    with monkeypatch.context() as patch:
        patch.setattr(guard.jax, "device_put", dead)
        with pytest.raises(KernelError, match="illegal memory access; this process cannot go on"):
            find()
    assert find().fault == "JaxRuntimeError: INTERNAL: illegal memory access"


def test_an_interrupt_says_nothing_about_the_kernel(trials, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(guard, "_watch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            find()
    assert find().fault is None


KILLED = """
import os, signal, sys, jax
from pathlib import Path
from jaxkv.build.selftest import _marked
with _marked(Path(sys.argv[1])):
    print("running", flush=True)
    sys.stdin.read()
"""


def test_a_process_that_died_of_it_is_known(trials, tmp_path):
    mark = find().report.with_suffix(".running")
    find().report.unlink()
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with child:
        assert child.stdout.readline() == "running\n"
        assert find().fault is None  # somebody else is at it, and alive
        find().report.unlink()
        child.send_signal(signal.SIGKILL)
    assert find().fault == guard.DIED
    assert not mark.exists()
    assert find(again=True).fault is None


@pytest.fixture
def kernels(trials, monkeypatch, tmp_path):
    """A CPU as if it had kernels of its own; returns a model that they take."""
    monkeypatch.setitem(BACKENDS, "interpreted", PallasTpu(interpret=True))
    monkeypatch.setattr(PallasTpu, "refuses", lambda *_: None)  # it traces a step
    monkeypatch.setitem(attention.PREFERRED, "cpu", ("interpreted",))
    monkeypatch.setattr(guard, "needs_trial", lambda blueprint: blueprint.backend == "interpreted")
    return make_checkpoint(tmp_path / "model", tiny_config("llama", **SHAPE))


def blueprint_of(path: Path, backend: str, **changes: object) -> Blueprint:
    spec, layout = read_family(read_config(path))
    options = EngineOptions(path, backend=backend, **LIMITS | changes)
    make = partial(make_blueprint, spec=spec, layout=layout, devices=jax.devices()[:1] * 4)
    return guard.make_tested(make, options)


def test_auto_takes_the_kernel_that_passes(kernels, trials):
    blueprint = blueprint_of(kernels, "auto")
    assert blueprint.backend == "interpreted"
    assert blueprint.backend_reason == "chosen by auto on a cpu, self-test passed"
    kinds = [(case.decode_only, case.heads.num_heads, case.codec.name) for case in trials[1]]
    assert kinds == [(True, 2, "float32"), (False, 2, "float32")]


SHARED = {"num_attention_heads": 8, "num_key_value_heads": 2}
BY_KIND = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_global_key_value_heads": 2}
BY_KIND |= {"attention_k_eq_v": True, "num_kv_shared_layers": 0, "intermediate_size": 96}


@pytest.mark.parametrize(
    ("variant", "changes", "size", "parts", "others"),
    [
        ("deepseek_v3", {}, 2, [(6, 1, 128, 24)], []),
        ("llama", SHARED, 4, [(4, 1, 64)], []),
        ("gemma4_text", BY_KIND, 4, [(4, 1, 64)], [(2, 1, 64)]),
    ],
)
def test_where_devices_divide_pages_a_part_for_their_heads_is_tried(
    kernels, trials, monkeypatch, tmp_path, variant, changes, size, parts, others
):
    asked: list[int] = []
    monkeypatch.setattr(
        PallasTpu, "refuses", lambda self, heads, needs: asked.append(needs.token_parts)
    )
    config = tiny_config("llama") if variant == "llama" else text_config(variant)
    path = make_checkpoint(tmp_path / "model", config | changes)
    divided = {"tensor_parallel_size": size, "decode_context_parallel_size": 2, "block_size": 32}
    blueprint = blueprint_of(path, "auto", **divided)
    assert set(asked) == ({1, 2} if others else {2})
    assert blueprint.attention.tokens_over == blueprint.placement.axis
    tried = {(case.heads.num_heads, case.page_size) for case in trials[1]}
    assert tried == {(heads[0], 16) for heads in parts} | {(heads[0], 32) for heads in others}
    wanted = [{"heads": heads, "page_size": 32, "is_part": False} for heads in others]
    wanted += [{"heads": heads, "page_size": 16, "is_part": True} for heads in parts]
    assert list(attention_of(blueprint)) == wanted
    kinds = {type(store.layout) for store in blueprint.with_pages(8).abstract_kv().stores}
    assert (LaneLayout in kinds) == bool(others)
    assert kinds - {LaneLayout}


def test_auto_falls_back_and_says_why(kernels, trials, caplog):
    trials[0][:] = [RIGHT, WRONG]
    with (
        caplog.at_level(logging.WARNING, logger="jaxkv"),
        LLM(kernels, skip_tokenizer_init=True, lazy_compile=True, **LIMITS) as llm,
    ):
        lines = llm.describe().splitlines()
    line = next(line for line in lines if line.startswith("backend "))
    assert "backend   xla (chosen by auto on a cpu: interpreted failed its self-test" in line
    assert "(prefill, 2/1 heads of 128, float32, pages of 16): outputs are 0.3 of" in line
    (record,) = caplog.records
    assert "backend: xla, as interpreted failed its self-test" in record.getMessage()
    report = json.loads(Path(line.partition("try again: ")[2].removesuffix(")")).read_text())
    assert report["verdict"]["fault"] == WRONG.fault


def test_a_kernel_that_was_asked_for_by_name_raises(kernels, trials):
    trials[0][:] = [WRONG]
    with pytest.raises(KernelError, match=r"backend='interpreted': .* failed its self-test"):
        blueprint_of(kernels, "interpreted")


def test_on_a_cpu_nothing_is_tried(trials, tmp_path):
    path = make_checkpoint(tmp_path / "model", tiny_config("llama"))
    assert blueprint_of(path, "auto").backend_reason == "chosen by auto on a cpu"
    assert trials[1] == []
