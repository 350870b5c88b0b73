"""What the first minutes on a device give is one JSON file and one picture, whatever fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

RIGHT = {"backend": "pallas_tpu", "case": "decode", "fault": None}
STEP = {"batch": 64, "share": 0.5, "tokens_per_s": 1234.0}
RESULT = {
    "versions": {"jax": "1"},
    "selftest": {"found": [RIGHT, RIGHT | {"case": "prefill", "fault": "outputs are off"}]},
    "kernels": {
        "device": "TPU v6e",
        "copy_bytes_per_s": 1e12,
        "cells": [
            {
                "case": "decode 8b",
                "bytes": 4,
                "pallas_tpu": {"seconds": 1e-4, "share": 0.8},
                "xla": {"reason": "RESOURCE_EXHAUSTED: no room"},
            }
        ],
    },
    "engine": {"auto": {"decode": [STEP]}, "xla": {"reason": "status 1: no room"}},
}


def test_all_that_failed_is_said_and_what_did_not_is_drawn(script):
    contact = script("first_contact")
    assert contact.faults(RESULT) == [
        "selftest: pallas_tpu, prefill: outputs are off",
        "kernels: decode 8b by xla: RESOURCE_EXHAUSTED: no room",
        "engine: xla: status 1: no room",
    ]
    drawn = contact.picture(RESULT)
    texts = [one.text for one in ElementTree.fromstring(drawn).iter() if one.text]
    for said in (
        "TPU v6e, jax 1",
        "self-test: 2 cases, 1 failed; bars: share of a copy's bandwidth",
        "decode 8b, pallas_tpu",
        "80%, 100 us",
        "engine auto, 64 rows",
        "50%, 1,234 tokens/s",
    ):
        assert said in texts


def test_a_device_that_does_nothing_is_a_result_too(script):
    contact = script("first_contact")
    dead = {"reason": "status 1: RuntimeError: no device"}
    result = {"versions": {"jax": "1"}, "selftest": dead, "kernels": dead, "engine": {}}
    assert contact.faults(result) == [
        f"{name}: {dead['reason']}" for name in ("selftest", "kernels")
    ]
    assert "no device, jax 1" in contact.picture(result)


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("print('a warning'); print('{\\n \"a\": 1\\n}\\nlast words')", {"a": 1}),
        ("print('{\\n \"a\": ')", {"output": ["{", ' "a": ']}),
        ("raise SystemExit('no device')", {"reason": "status 1: no device"}),
    ],
)
def test_a_stage_is_what_its_process_prints(script, program, found):
    got = script("first_contact").stage(["-c", program])
    assert {name: got[name] for name in found} == found


@pytest.mark.slow
def test_every_stage_runs_on_a_cpu(scripts: Path, tmp_path: Path):
    out = tmp_path / "contact"
    command = [sys.executable, scripts / "first_contact.py", "--quick", "--no-selftest"]
    subprocess.run([*command, "--out", out], check=True)
    result = json.loads(out.with_suffix(".json").read_text())
    (cell,) = result["kernels"]["cells"]
    assert cell["xla"]["share"] > 0
    assert [one["batch"] for one in result["engine"]["xla"]["decode"]] == [1, 2]
    assert out.with_suffix(".svg").read_text().startswith("<svg")
