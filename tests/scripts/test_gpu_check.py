"""The GPU kernels' check: what ptxas says becomes figures, and what must not be fails."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

PTXAS = """ptxas info    : Compiling entry function 'kernel' for 'sm_90a'
    40 bytes stack frame, 48 bytes spill stores, 72 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 40 bytes cumulative stack size, 1 bytes smem
"""


@pytest.fixture
def check(script):
    return script("gpu_check")


def test_what_ptxas_says_is_read(check, tmp_path):
    (tmp_path / "a_0.ptxas").write_text(PTXAS)
    (tmp_path / "a_0.mlir-passes.log").write_text("launch dynamic_shared_memory_size %c1024_i32 {")
    found = check._count(tmp_path / "a_0.ptxas")
    assert found == {"registers": 168, "spill_bytes": 48, "shared_bytes": 1024}


@pytest.mark.parametrize(
    ("kernel", "shape", "found", "fault"),
    [
        ("decode", "8b", {"spill_bytes": 0}, None),
        (
            "decode",
            "8b",
            {"spill_bytes": 4},
            "4 bytes of registers spilled per thread, expected none",
        ),
        ("prefill", "8b", {"reason": "Error: no"}, "Error: no"),
    ],
)
def test_spills_and_refusals_are_faults(check, kernel, shape, found, fault):
    assert check.faults({"kernel": kernel, "shape": shape} | found) == ([fault] if fault else [])


def test_bytes_and_operations_of_a_case(script):
    cases = script("gpu_cases")
    decode = cases.Case(kernel="decode", shape="8b", page_size=64, batch=32, context=4096)
    assert decode.kv_bytes == 32 * 4096 * 4096
    chunk = cases.Case(kernel="prefill", shape="8b", page_size=64, batch=1, context=cases.CHUNK)
    pairs = cases.CHUNK * (cases.CHUNK + 1) // 2  # each query and what it sees
    assert chunk.flops == 2 * 2 * 32 * 128 * pairs


@pytest.mark.slow
@pytest.mark.skipif(find_spec("jax_cuda13_plugin") is None, reason="jax-cuda13-plugin is missing")
def test_both_kernels_compile_without_a_gpu(scripts, tmp_path):
    command = [
        sys.executable,
        scripts / "gpu_check.py",
        "--compile",
        "--shapes",
        "h64",
        "--json",
        tmp_path / "out",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "8 compiled for sm_90, 0 failed" in done.stdout
    compiled = json.loads((tmp_path / "out").read_text())["compiled"]
    assert {one["kernel"] for one in compiled} == {"decode", "prefill"}
    assert all(one["registers"] > 32 and one["shared_bytes"] > 65536 for one in compiled)


def test_what_is_measured_is_written_cell_by_cell_and_shown(check, script, monkeypatch, tmp_path):
    bench = script("gpu_bench")
    right = {"ok": True, "error": 1e-3, "worst": 2e-3, "shape": "Shape()"}
    monkeypatch.setattr(bench, "check_right", lambda seed: right | {"seed": seed})
    monkeypatch.setattr(bench, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(bench, "matmul_rate", lambda: 8e14)
    monkeypatch.setattr(bench, "time_case", lambda case, backend: case.kv_bytes / 2e12)
    path = tmp_path / "out.json"
    options = SimpleNamespace(
        seeds=2, shapes=["8b"], deadline=60.0, max_gib=8.0, max_xla_gib=1.0, json=path
    )
    result: dict = {}
    bench.measure(options, result)
    assert json.loads(path.read_text()) == result
    decode = [one for one in result["cells"] if one["kernel"] == "decode" and "share" in one]
    assert [one["share"] for one in decode] == pytest.approx([0.5] * len(decode))
    assert (decode[0]["page_size"], decode[0]["batch"], decode[0]["context"]) == (64, 32, 4096)
    assert any(one.get("reason") == "too large" for one in result["cells"])
    assert "0 of 2 random batches wrong" in check.measured_table(result)
    options.deadline = -1.0
    bench.measure(options, result := {})
    assert {one["reason"] for one in result["cells"]} == {"no time left", "too large"}


@pytest.mark.slow
def test_an_engine_s_steps_are_measured_on_any_device(scripts, tmp_path):
    small = [
        "--shape",
        "toy",
        "--batches",
        "1,2",
        "--contexts",
        "32",
        "--requests",
        "4",
        "--copy-mib",
        "16",
    ]
    command = [
        sys.executable,
        scripts / "gpu_generate.py",
        *small,
        "--backends",
        "xla",
        "--json",
        tmp_path / "out",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    of = json.loads((tmp_path / "out").read_text())["xla"]
    assert [(one["batch"], one["context"]) for one in of["decode"]] == [(1, 32), (2, 32)]
    # Weights of 2 layers without the embedding, of which norms are float32, and 4 bytes x 2 layers
    # x 2 KV heads of 8 for each token.
    weights = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32) + 256 * 32
    norms = 2 * 2 * 32 + 32
    for one in of["decode"]:
        nbytes = 2 * weights + 4 * norms + one["batch"] * (32 + 64) * 4 * 2 * 2 * 8
        assert one["share"] == pytest.approx(
            nbytes / (one["step_ms"] / 1e3) / of["copy_bytes_per_s"]
        )
        assert one["host_ms"] > 0
    assert f"mixed load of 4: {of['mixed']['tokens_per_s']:.0f} tokens/s" in done.stdout
