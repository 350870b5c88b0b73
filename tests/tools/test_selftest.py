"""`jaxkv selftest`: one line for each case, also for one that its process did not live through."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from jaxkv.api import cli
from jaxkv.build.selftest import Verdict
from jaxkv.tools import selftest
from jaxkv.tools.selftest_shapes import PLATFORMS, SHAPES

CASES = [["pallas_tpu", "decode"], ["pallas_tpu", "prefill"], ["pallas_tpu", "latent"]]
RIGHT = {"fault": None, "compile_s": 1.0, "run_s": 0.002, "trace": None, "report": None}
WRONG = RIGHT | {"fault": "outputs are off", "report": "/cache/report.json"}

CHILD = """
import json, os, sys, time
given, cases, ends = map(json.loads, sys.argv[1:])
print("a warning", flush=True)
print(json.dumps({"device": "chip", "versions": "jax 1", "cases": cases}), flush=True)
for backend, case in cases[given["skip"]:]:
    end = ends[case]
    if end == "dies":
        os.abort()
    if end == "hangs":
        time.sleep(60)
    if end == "stops":
        print("it did not end within 2 s", flush=True)
        os._exit(3)
    print(json.dumps({"backend": backend, "case": case} | end), flush=True)
"""


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command with processes whose cases end as given."""

    def command(ends: dict, *arguments: str) -> tuple[int, str, str]:
        def start(given):
            words = [json.dumps(one) for one in (given, CASES, ends)]
            pipe = subprocess.PIPE
            return subprocess.Popen(
                [sys.executable, "-c", CHILD, *words], stdout=pipe, stderr=pipe, text=True
            )

        monkeypatch.setattr(selftest, "_start", start)
        return cli.main(["selftest", *arguments]), *capsys.readouterr()

    return command


def test_all_right_is_status_0(run):
    status, out, _ = run(dict.fromkeys(("decode", "prefill", "latent"), RIGHT))
    assert status == 0
    assert out.splitlines()[0] == "chip (jax 1): 3 cases"
    assert [line.split()[:3] for line in out.splitlines()[1:4]] == [
        ["ok", "pallas_tpu", case] for _, case in CASES
    ]
    assert out.endswith("3 tried, 0 failed.\n")


def test_only_a_report_that_was_written_is_named():
    wrong = Verdict(case="prefill", backend="pallas_tpu", fault="outputs are off")
    assert selftest._said(wrong)["report"] is None
    assert selftest._said(replace(wrong, report=Path("/report")))["report"] == "/report"
    assert selftest._said(replace(wrong, fault=None, report=Path("/report")))["report"] is None


def test_a_fault_is_status_1_and_names_the_report(run):
    status, out, _ = run({"decode": RIGHT, "prefill": WRONG, "latent": RIGHT})
    assert status == 1
    assert "FAILED  pallas_tpu         prefill" in out
    assert "error: pallas_tpu, prefill: outputs are off\n  for an issue: /cache/report.json" in out


@pytest.mark.parametrize(
    ("end", "fault"),
    [
        ("dies", "the process ended with status -6: a warning"),
        ("stops", "the process ended with status 3: it did not end within 2 s"),
        ("hangs", "the process ended with status -9: a warning"),
    ],
)
def test_what_ends_its_process_is_a_fault_and_the_others_are_still_tried(
    run, monkeypatch, end, fault
):
    monkeypatch.setattr(selftest, "START_S", 2.0)
    status, out, _ = run(
        {"decode": RIGHT, "prefill": end, "latent": RIGHT}, "--limit", "1", "--json"
    )
    assert status == 1
    found = json.loads(out)
    assert found["device"] == "chip"
    assert [one["fault"] for one in found["found"]] == [None, fault, None]


def test_a_process_that_finds_no_device_is_status_2(monkeypatch, capsys):
    command = [sys.executable, "-c", "raise SystemExit('RuntimeError: no device')"]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    monkeypatch.setattr(selftest, "_start", lambda given: subprocess.Popen(command, **pipe))
    assert cli.main(["selftest"]) == 2
    assert capsys.readouterr().err == (
        "jaxkv: selftest: the process ended with status 1: RuntimeError: no device\n"
    )


def test_an_interrupt_leaves_no_timer_behind():
    """The command would not end before it."""

    def interrupted():
        raise KeyboardInterrupt

    pipe = SimpleNamespace(readline=interrupted)

    def timers() -> set[threading.Thread]:
        return {one for one in threading.enumerate() if isinstance(one, threading.Timer)}

    before = timers()  # of tests before this one
    with pytest.raises(KeyboardInterrupt):
        next(selftest._lines(SimpleNamespace(stdout=pipe, kill=lambda: None), 60.0))
    for timer in timers() - before:
        timer.join(5.0)
        assert not timer.is_alive()


@pytest.mark.parametrize("limit", ["0", "-1", "nan", "inf"])
def test_a_limit_is_seconds(run, limit):
    status, _, err = run({}, "--limit", limit)
    assert status == 2
    assert "--limit: expected seconds above 0" in err


def test_the_usual_shapes_have_every_codec_and_mechanism():
    for kernel in PLATFORMS:
        usual = [shape for shape in SHAPES if shape.kernel == kernel and shape.is_usual]
        assert {shape.codec for shape in usual} == {"bfloat16", "int8", "int4"}
        assert any(one.heads.window and one.heads.cap and one.heads.has_sinks for one in usual)
        for shape in usual:
            assert [case.decode_only for case in shape.cases()] == [True, False]


@pytest.mark.parametrize("version", [(0, 10, 2), (0, 11, 2), (0, 12, 0)])
def test_an_interpreter_is_given_what_it_takes(monkeypatch, version):
    monkeypatch.setattr(jax, "__version_info__", version)
    jobs = list(selftest._jobs(jax.devices()[0], None, every=False))
    of_tpus = {"pallas_tpu", "pallas_tpu, parts"}
    assert {name for name, *_ in jobs} == of_tpus | (
        set(PLATFORMS) if version >= (0, 12) else set()
    )
    assert {name for name, backend, _ in jobs if backend.tokens_over} == {"pallas_tpu, parts"}


@pytest.mark.slow
def test_the_kernels_pass_in_their_interpreters(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli.main(["selftest", "--all", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["found"]
    assert {one["fault"] for one in found} == {None}
    assert len(found) >= 24
