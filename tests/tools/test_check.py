"""`jaxkv check`: what the compiler found becomes a table, a reason per failure and an exit
status.
"""

from __future__ import annotations

import json
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from jaxkv.api import cli
from jaxkv.tools import apart
from jaxkv.tools import check as report
from jaxkv.tools.chips import GIB
from jaxkv.tools.engine_job import EngineJob
from jaxkv.tools.kernels import Case, case_of

needs_compiler = pytest.mark.skipif(
    find_spec("libtpu") is None, reason='libtpu is missing: pip install "jaxkv[tpu]"'
)
SMALL = Path(__file__).with_name("small.json")
TILES = {"decode_pages": 16, "prefill_pages": 8, "prefill_queries": 128}
KERNEL = {
    "bundles": 3670,
    "dma_bytes": 2**29,
    "ratio": 0.3,
    "at": {},
    "spills": 0,
    "vmem_bytes": 2**23,
    "tiles": TILES,
}
PROGRAM = {"name": "step of 16 tokens", "copies": [], "collectives": []}
PROGRAM |= {f"{name}_bytes": 2**20 for name in ("argument", "aliased", "temporary", "code")}
COPY = {
    "argument": "weights['layers']['q']",
    "instruction": "copy.3",
    "nbytes": 2**21,
    "depth": 1,
    "into_vmem": False,
}
ENGINE = {
    "num_devices": 1,
    "backend": "pallas_tpu",
    "backend_reason": "asked for",
    "memory": ["memory"],
}
GROUP = {"heads": [32, 8, 128], "page_size": 64, "is_part": False}
ENGINE |= {"programs": [PROGRAM], "attention": [GROUP], "kv_dtype": "bfloat16"}


@pytest.fixture
def compiler(monkeypatch):
    """In place of the real one; tells which jobs it was given."""
    answers: dict[type, dict] = {Case: KERNEL, EngineJob: ENGINE}
    jobs: list = []

    def compile_apart(job):
        jobs.append(job)
        return answers[type(job)] | {"compile_s": 1.0}

    monkeypatch.setattr(report, "compile_apart", compile_apart)
    monkeypatch.setattr(report, "find_spec", lambda name: True)
    monkeypatch.setattr(report, "versions", lambda: "compiler 1")
    budget = {"ratio": 0.4, "at": {"64 x 2,049": 0.5}, "spills": 0, "tiles": TILES}
    monkeypatch.setattr(report, "budget_of", lambda case: budget)
    return answers, jobs


@pytest.fixture
def check(capsys):
    def run(*arguments: str) -> tuple[int, str, str]:
        return cli.main(["check", *arguments]), *capsys.readouterr()

    return run


def test_without_a_model_a_few_shapes_are_compiled_for_three_chips(compiler, check):
    status, out, err = check()
    _, jobs = compiler
    assert status == 0
    assert out.endswith("24 checked, 0 failed (compiler 1). Compiled, not run.\n")
    assert {(job.chip, job.kernel) for job in jobs} == {
        (chip, kernel) for chip in ("v5e", "v6e", "tpu7x") for kernel in ("decode", "prefill")
    }
    assert {job.dtype for job in jobs} == {"bfloat16", "int4"}
    first, *lines = err.splitlines()
    assert first == "24 to compile, 2 at a time: about 3 min"
    assert len(lines) == 24
    # 1 s each: the estimate follows what is measured.
    seconds = [int(re.search(r"about (\d+) s left$", line)[1]) for line in lines[:-1]]
    assert seconds[-1] <= 3
    assert max(seconds) < 90
    assert re.fullmatch(r"\[24/24\] .*: 1.0 s", lines[-1])


def test_all_shapes_are_compiled_when_asked_for(compiler, check):
    status, out, _ = check("--all")
    assert status == 0
    assert out.endswith("78 checked, 0 failed (compiler 1). Compiled, not run.\n")
    assert {job.dtype for job in compiler[1]} == {"bfloat16", "float32", "int8", "int4"}


def test_a_dtype_is_that_of_all_shapes(compiler, check):
    check("--target", "v6e", "--kv-cache-dtype", "int8", "--kernel", "decode")
    # Two are compiled at once: the order is that of threads.
    assert sorted((job.name, job.dtype) for job in compiler[1]) == [
        ("70b-tp8", "int8"),
        ("8b", "int8"),
        ("h64-tp8", "int8"),
    ]


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({"ratio": 0.401}, "compute/DMA ratio 0.401, expected at most 0.4"),
        ({"at": {"64 x 2,049": {"ratio": 0.501}}}, "ratio 0.501 at 64 x 2,049, expected .* 0.5"),
        ({"spills": 3}, "3 spills of vector registers, expected at most 0"),
        ({"tiles": TILES | {"decode_pages": 8}}, "tiles .*, which the sweep found"),
        ({"reason": "Mosaic failed\nat length"}, "Mosaic failed"),
    ],
)
def test_a_kernel_past_its_budget_fails(compiler, check, found, reason):
    compiler[0][Case] = KERNEL | found
    status, out, _ = check("--target", "v6e", "--shape", "8b", "--kernel", "decode")
    assert status == 1
    (line,) = [line for line in out.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: decode 8b v6e")
    assert re.search(reason, line)


def test_a_kernel_without_a_budget_is_only_counted(compiler, check, monkeypatch):
    monkeypatch.setattr(report, "budget_of", lambda case: {})
    compiler[0][Case] = KERNEL | {"spills": 3, "ratio": 9.5}
    status, out, _ = check("--target", "v6e", "--shape", "8b", "--kernel", "decode")
    assert status == 0
    assert out.splitlines()[1].split()[-6:] == ["512.0", "9.500", "-", "3", "8.0", "ok"]


def test_a_model_is_checked_with_the_kernels_at_its_own_shape(compiler, check):
    status, out, _ = check("some/model", "--target", "v6e", "--pages", "7", "--json")
    _, jobs = compiler
    assert status == 0
    assert [type(job) for job in jobs] == [EngineJob, Case, Case]
    assert jobs[0].options == (("num_gpu_blocks_override", 7),)
    assert jobs[0].target == "v6e:1x1"
    assert [job.heads for job in jobs[1:]] == [(32, 8, 128)] * 2
    found = json.loads(out)
    assert [one["ok"] for one in found["checked"]] == [True] * 3
    assert found["checked"][0]["programs"] == [PROGRAM]


def test_each_shape_of_a_models_heads_is_checked(compiler, check, monkeypatch):
    monkeypatch.setitem(ENGINE, "attention", [GROUP, GROUP | {"heads": [32, 4, 256]}])
    check("some/model", "--target", "v6e", "--kernel", "decode")
    assert [job.heads for job in compiler[1][1:]] == [(32, 8, 128), (32, 4, 256)]


def test_where_devices_divide_pages_decode_is_checked_over_a_part(compiler, check, monkeypatch):
    part = {"heads": [128, 1, 640, 512], "page_size": 16, "is_part": True}
    monkeypatch.setitem(ENGINE, "attention", [part])
    check("some/model", "--target", "v6e")
    (case,) = compiler[1][1:]
    assert (case.kernel, case.name, case.page_size, case.is_part) == ("decode", "mla", 16, True)


def test_one_kernel_of_a_model_is_checked_at_the_context_that_is_asked_for(compiler, check):
    check("some/model", "--target", "v6e", "--kernel", "decode", "--context", "8192")
    _, case = compiler[1]
    assert (case.kernel, case.context, case.heads) == ("decode", 8192, (32, 8, 128))


def test_a_large_copy_fails_and_is_named(compiler, check):
    copies = [COPY, COPY | {"into_vmem": True}]
    compiler[0][EngineJob] = ENGINE | {"backend": "xla", "programs": [PROGRAM | {"copies": copies}]}
    status, out, _ = check("some/model", "--target", "v5e")
    assert status == 1
    for into in ("", " into VMEM before it is used"):
        line = f"copies weights['layers']['q']{into}, 2.0 MiB, inside 1 loop (copy.3)"
        assert f"step of 16 tokens: {line}" in out


def test_what_the_caller_can_mend_is_status_2(compiler, check, monkeypatch):
    for arguments, message in (
        (["--target", "v9"], "target: expected one of v4, .*, got 'v9'"),
        (["--shape", "9b"], "shape: expected one of 8b, .*, got '9b'"),
        (["--kv-cache-dtype", "fp8_e4m3"], "kv_cache_dtype: expected one of .*, got 'fp8_e4m3'"),
        (["--max-model-len", "64"], "max_model_len: expected a MODEL beside it, got none"),
        (["--context", "511"], "--context: expected at least 512, got 511"),
        (["--context", "0", "--kernel", "decode"], "--context: expected at least 1, got 0"),
    ):
        status, out, err = check(*arguments)
        assert (status, out) == (2, "")
        assert re.fullmatch(f"jaxkv: {message}\n", err)
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    status, out, err = check("--target", "v6e")
    assert (status, out) == (2, "")
    assert 'pip install "jaxkv[tpu]"' in err


def test_a_compiler_that_dies_is_a_reason():
    died = subprocess.CompletedProcess([], -11, stdout="", stderr="noise\n")
    assert apart._read(died) == {"reason": "the compiler died of signal 11"}
    raised = subprocess.CompletedProcess(
        [], 1, stdout="", stderr="Traceback\nTypeError: no such thing\n"
    )
    assert apart._read(raised)["reason"].endswith("status 1: TypeError: no such thing")


@needs_compiler
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--tensor-parallel-size", "3", "--target", "v6e:2x4"],
            "expected a divisor or a multiple of the model's 2 KV heads, got 3",
        ),
        (
            ["--target", "v6e", "--max-model-len", "9999"],
            "max_model_len: expected at most 2048 .*, got 9999",
        ),
        (["--target", "v6e", "--block-size", "10"], r"block_size: expected one of .*, got 10"),
    ],
)
def test_an_engine_that_cannot_be_is_refused_before_it_is_compiled(check, arguments, message):
    status, out, err = check(str(SMALL), *arguments)
    assert (status, out) == (2, "")
    assert re.search(message, err)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("target", ["v5e:2x2", "tpu7x"])
def test_the_engines_programs_copy_neither_weights_nor_pool_and_add_up_twice_per_layer(target):
    options = (("tensor_parallel_size", 2), ("max_num_seqs", 16), ("max_num_batched_tokens", 256))
    found = apart.compile_apart(
        EngineJob(
            model=str(SMALL), target=target, options=(*options, ("num_gpu_blocks_override", 8000))
        )
    )
    assert found["backend"] == "pallas_tpu"
    step, loop, copy = found["programs"]
    page_bytes = 4 * 2 * 64 * 64 * 2  # layers, keys and values of one head, 64 tokens
    for program in (step, loop, copy):
        assert program["copies"] == []
        assert program["aliased_bytes"] >= 8000 * page_bytes
    for program in (step, loop):
        sums = [
            one
            for one in program["collectives"]
            if one["kind"] == "all-reduce" and one["per_layer"]
        ]
        assert [one["count"] for one in sums] == [2]
    assert copy["collectives"] == []


@pytest.mark.slow
@needs_compiler
def test_the_xla_backend_is_seen_to_copy_the_pool():
    options = (("backend", "xla"), ("max_num_seqs", 16), ("max_num_batched_tokens", 256))
    pages = ("num_gpu_blocks_override", 8000)
    job = EngineJob(model=str(SMALL), target="v5e", options=(*options, pages))
    verdict = report.judge(job, apart.compile_apart(job))
    assert any("copies kv.stores[0].pages" in fault for fault in verdict.faults)


@pytest.mark.slow
@needs_compiler
def test_a_pool_slightly_larger_than_what_fits_is_refused_with_needed_and_available():
    memory, page_bytes = 15.75 * GIB * 0.9, 2 * 4 * 2 * 64 * 64 * 2
    pages = ("num_gpu_blocks_override", int(memory * 1.02 / page_bytes))
    options = (("max_num_seqs", 16), ("max_num_batched_tokens", 256), pages)
    job = EngineJob(model=str(SMALL), target="v5e", options=options)
    found = apart.compile_apart(job)
    assert "bytes needed" in found["reason"]
    assert "lower num_gpu_blocks_override" in found["reason"]


def test_a_case_says_what_it_is():
    assert (
        str(case_of("decode", "8b", "v6e"))
        == "decode 8b v6e bfloat16, pages of 64, 64 x 2048 tokens"
    )
