"""The GPU kernels' check: what ptxas says becomes figures, and what must not be fails."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

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
        ("decode", "8b", {"spill_bytes": 4}, "4 bytes of registers spilled, expected at most 0"),
        ("prefill", "h256", {"spill_bytes": 128}, None),
        ("prefill", "h256", {"spill_bytes": 132}, "132 bytes of registers spilled, expected at most 128"),
        ("prefill", "8b", {"reason": "Error: no"}, "Error: no"),
    ],
)
def test_spills_and_refusals_are_faults(check, kernel, shape, found, fault):
    assert check.faults({"kernel": kernel, "shape": shape} | found) == ([fault] if fault else [])


def test_bytes_and_operations_of_a_case(check):
    decode = check.Case(kernel="decode", shape="8b", page_size=64, batch=32, context=4096)
    assert decode.kv_bytes == 32 * 4096 * 4096
    chunk = check.Case(kernel="prefill", shape="8b", page_size=64, batch=1, context=check.CHUNK)
    pairs = check.CHUNK * (check.CHUNK + 1) // 2  # each query and what it sees
    assert chunk.flops == 2 * 2 * 32 * 128 * pairs


@pytest.mark.slow
@pytest.mark.skipif(find_spec("jax_cuda13_plugin") is None, reason="jax-cuda13-plugin is missing")
def test_both_kernels_compile_without_a_gpu(scripts, tmp_path):
    command = [sys.executable, scripts / "gpu_check.py", "--compile", "--shapes", "h64", "--json", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "4 compiled for sm_90, 0 failed" in done.stdout
    compiled = json.loads((tmp_path / "out").read_text())["compiled"]
    assert {one["kernel"] for one in compiled} == {"decode", "prefill"}
    assert all(one["registers"] > 32 and one["shared_bytes"] > 65536 for one in compiled)
