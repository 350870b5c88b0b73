"""What there is of memory, what takes it, and the refusal of what cannot fit."""

import gc
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from safetensors.numpy import load_file

from jaxkv import LLM, SamplingParams
from jaxkv import functional as jk
from jaxkv.api import part
from jaxkv.build import memory as build_memory
from jaxkv.build.memory import (
    AMPLE,
    Budget,
    Memory,
    available_memory,
    check_room,
    device_memory,
)
from jaxkv.errors import CapacityError
from jaxkv.placement import bytes_per_device
from jaxkv.programs.compiled import ProgramMemory, Programs
from jaxkv.programs.lowerings import KINDS
from jaxkv.testing import budget_of, engine_of, model_of
from tiny import SMALL, make_checkpoint, tiny_config

pytestmark = pytest.mark.usefixtures("quick_compile", "xla_attends")

KIB, MIB = 1024, 2**20


# --- the memory that is left
# ------------------------------------------------------------------------------------------


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in (
        {"proc/meminfo": "MemTotal: 900 kB\nMemAvailable:     500 kB\n"} | files
    ).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V1, V2 = "sys/fs/cgroup/memory/memory.", "sys/fs/cgroup/memory."


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 500 * KIB),
        ({V2 + "max": "max\n", V2 + "current": "9\n"}, 500 * KIB),
        ({V2 + "max": f"{300 * KIB}\n", V2 + "current": f"{100 * KIB}\n"}, 200 * KIB),
        ({V2 + "max": f"{900 * KIB}\n", V2 + "current": "0\n"}, 500 * KIB),
        ({V2 + "max": "5\n", V2 + "current": "9\n"}, 0),
        ({V2 + "max": "5\n"}, 500 * KIB),
        ({V1 + "limit_in_bytes": f"{300 * KIB}\n", V1 + "usage_in_bytes": "0\n"}, 300 * KIB),
        ({V1 + "limit_in_bytes": "9223372036854771712\n", V1 + "usage_in_bytes": "0\n"}, 500 * KIB),
        (
            {V2 + "max": f"{300 * KIB}\n", V2 + "current": f"{250 * KIB}\n"}
            | {V2 + "stat": f"anon 9\ninactive_file {150 * KIB}\nactive_file {20 * KIB}\n"},
            200 * KIB,
        ),
        (
            {V1 + "limit_in_bytes": f"{300 * KIB}\n", V1 + "usage_in_bytes": f"{250 * KIB}\n"}
            | {V1 + "stat": f"cache 9\ninactive_file 7\ntotal_inactive_file {150 * KIB}\n"},
            200 * KIB,
        ),
    ],
    ids=[
        "none",
        "v2 unlimited",
        "v2",
        "v2 above",
        "v2 over",
        "half",
        "v1",
        "v1 unlimited",
        "v2 cached",
        "v1 cached",
    ],
)
def test_available_memory_is_the_lower_of_system_and_cgroup(tmp_path, files, expected):
    assert available_memory(system(tmp_path, files)) == expected


def test_available_memory_is_known_without_linux(tmp_path):
    assert available_memory(tmp_path) > 2**20


def test_this_machine_s_own_device_and_memory_are_understood():
    memory = device_memory(jax.devices()[0], weight_bytes=7, utilization=0.9)
    assert memory.free > 2**20
    assert (memory.used, memory.limit - memory.free) == (7, 7)
    assert 0 < memory.pool_limit <= memory.free


CPU = SimpleNamespace(platform="cpu")


@pytest.mark.parametrize(("utilization", "pool"), [(0.9, 250), (0.25, 250), (0.1, 100), (1, 250)])
def test_on_a_cpu_the_pool_may_take_a_quarter_of_the_available_memory(
    monkeypatch, utilization, pool
):
    monkeypatch.setattr(build_memory, "available_memory", lambda: 1000)
    memory = device_memory(CPU, weight_bytes=50, utilization=utilization)
    assert (memory.limit, memory.used, memory.free, memory.pool_limit) == (1050, 50, 1000, pool)


def test_several_engines_share_the_memory_of_a_cpu_each_with_weights_of_its_own(monkeypatch):
    # Asked with those of the first one loaded.
    monkeypatch.setattr(build_memory, "available_memory", lambda: 1000)
    memory = device_memory(CPU, weight_bytes=50, utilization=0.9, num_engines=3)
    assert (memory.free, memory.pool_limit) == (300, 75)


def test_weights_that_cannot_fit_are_refused_before_they_are_read(monkeypatch, tmp_path):
    directory = make_checkpoint(tmp_path, tiny_config("llama"))
    needed = model_of(LLM(directory, **SMALL)).weight_bytes
    monkeypatch.setattr(build_memory, "available_memory", lambda: needed)
    LLM(directory, **SMALL | {"num_gpu_blocks_override": 1})
    monkeypatch.setattr(build_memory, "available_memory", lambda: needed - 1)
    (directory / "model.safetensors").unlink()
    for load in (LLM, partial(jk.load, dtype="float32", skip_tokenizer_init=True)):
        options = SMALL if load is LLM else {}
        with pytest.raises(CapacityError, match=f"{needed} bytes needed, {needed - 1} free"):
            load(directory, **options)


def test_other_weights_that_cannot_fit_are_refused_before_they_are_taken(monkeypatch, tmp_path):
    config = tiny_config("llama")
    directory = make_checkpoint(tmp_path / "model", config)
    draft = make_checkpoint(tmp_path / "draft", config | {"num_hidden_layers": 1})
    llm = LLM(directory, **SMALL, speculative_config={"model": draft, "num_speculative_tokens": 2})
    # The draft model stays.
    needed = bytes_per_device(model_of(llm).weights)
    arrays = load_file(directory / "model.safetensors")
    broken = {name: x for name, x in arrays.items() if name != "model.norm.weight"}
    monkeypatch.setattr(build_memory, "available_memory", lambda: needed - 1)
    for source in (directory, broken):
        with pytest.raises(CapacityError, match=f"{needed} bytes needed, {needed - 1} free"):
            llm.update_weights(source)
    monkeypatch.setattr(build_memory, "available_memory", lambda: needed)
    for source in (directory, arrays):
        llm.update_weights(source)


def test_what_does_not_fit_beside_another_engine_is_refused_with_its_bytes():
    stats = {"bytes_limit": 1000, "bytes_in_use": 600}
    tpu = SimpleNamespace(platform="tpu", memory_stats=lambda: stats)
    check_room(tpu, 400, "weights", "quantise them")
    expected = "^weights: 401 bytes needed, 400 free; 600 are in use, by another LLM .*: quantise"
    with pytest.raises(CapacityError, match=expected):
        check_room(tpu, 401, "weights", "quantise them")
    stats["bytes_in_use"] = 0
    with pytest.raises(CapacityError, match=r"^weights: 1001 bytes needed, 1000 free: quantise"):
        check_room(tpu, 1001, "weights", "quantise them")


def test_on_an_accelerator_the_pool_has_what_is_left_of_its_share():
    stats = {"bytes_limit": 1000 * MIB, "bytes_in_use": 60 * MIB}
    tpu = SimpleNamespace(platform="tpu", memory_stats=lambda: stats)
    memory = device_memory(tpu, weight_bytes=50 * MIB, utilization=0.9)
    assert (memory.limit, memory.used, memory.free) == (900 * MIB, 60 * MIB, 840 * MIB)
    assert memory.pool_limit is None
    assert memory.source.startswith("gpu_memory_utilization=0.9 of 1000.0 MiB (memory_stats of ")


@pytest.mark.parametrize(
    ("limit", "pool_limit", "pages", "lazy", "behind", "expected"),
    [
        (AMPLE + 3 * MIB, MIB, 1, False, True, "background"),
        (AMPLE + 3 * MIB, MIB, 1, True, True, None),
        (AMPLE + MIB, MIB, 1, False, True, "background"),
        (AMPLE + MIB - 1, MIB, 1, False, True, "all"),
        # Several processes have the engine.
        (AMPLE + 3 * MIB, MIB, 1, False, False, "all"),
        # More is taken than is left, by who asked for so many pages.
        (4 * AMPLE, MIB, 2049, False, True, "all"),
        (4 * AMPLE, MIB, 2048, False, True, "background"),
        # An accelerator, where programs and pool depend on each other.
        (8 * AMPLE, None, 1, False, True, "all"),
    ],
)
def test_programs_are_compiled_behind_requests_where_they_are_sure_to_fit(
    limit, pool_limit, pages, lazy, behind, expected
):
    called = []
    programs = SimpleNamespace(
        compile_s=1.0,
        memory=[],
        wide_bytes=0,
        num_compiled=0,
        compile_all=lambda: called.append("all"),
        compile_in_background=lambda: called.append("background"),
    )
    memory = Memory(limit=limit, used=0, source="test", pool_limit=pool_limit)
    budget = Budget(
        memory=memory, num_pages=pages, page_nbytes=MIB, reason="", advice="", compile_s=2.0
    )
    budget.compile(programs, lazy=lazy, behind=behind)
    assert called == ([] if expected is None else [expected])
    assert programs.compile_s == 3.0


# --- an engine's
# ------------------------------------------------------------------------------------------------------

LIMITS = SMALL | {
    "lazy_compile": False,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 2,
    "max_model_len": 256,
}
PAGE = 3 * 4 * 8 * 8 * 4
"""Bytes: 3 layers, 2 KV heads' keys and values, 8 slots of 8 values, float32."""

ALL_ROWS = 2 * 256 // 8
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("budget"), tiny_config("llama"))


@pytest.fixture
def device_has(monkeypatch):
    """The device is an accelerator of so many bytes, in use are the weights; or a CPU whose pool
    may have `pool`.
    """

    def set_to(limit: int | None, pool: int | None = None) -> None:
        def memory(_: object, *, weight_bytes: int, **more: float) -> Memory:
            return Memory(limit=limit, used=weight_bytes, source="test device", pool_limit=pool)

        monkeypatch.setattr(part, "device_memory", memory)

    return set_to


@pytest.fixture
def compiled(monkeypatch):
    """(pages, programs compiled so far, pools that live) after each call of the compiler."""
    compile_each, seen = Programs._compile_each, []

    def compile_and_look(self: Programs, wanted: object) -> None:
        compile_each(self, wanted)
        seen.append((self.num_pages, self.num_compiled, len(pools())))

    gc.collect()
    monkeypatch.setattr(Programs, "_compile_each", compile_and_look)
    return seen


def make(checkpoint: Path, **changes: object) -> LLM:
    return LLM(checkpoint, **LIMITS | {"num_gpu_blocks_override": None} | changes)


def pools() -> list[int]:
    """Bytes of each that lives, by the shape of its pages."""
    return [
        x.nbytes
        for x in jax.live_arrays()
        if x.ndim == 4 and x.shape[1:] == (4, 8, 8) and not x.is_deleted()
    ]


def largest(engine: LLM) -> ProgramMemory:
    return max(engine_of(engine).programs.memory, key=lambda program: program.temp_bytes)


def test_the_pool_is_sized_and_allocated_once_after_everything_is_compiled(
    checkpoint, device_has, compiled
):
    before, limit = len(pools()), 860_000
    device_has(limit)
    engine = make(checkpoint, max_num_seqs=4)
    pages, programs = budget_of(engine).num_pages, engine_of(engine).programs
    assert 40 < pages < 2 * ALL_ROWS
    # The engine has those of the second try, the scores of prompts among them.
    assert [count for _, count, _ in compiled] == [4, 4, programs.num_programs + 1]
    assert compiled[-1][0] == pages
    assert {living for _, _, living in compiled} == {before}
    assert pools().count(pages * PAGE) == len(pools()) - before == 1
    spent = (
        model_of(engine).weight_bytes
        + pages * PAGE
        + programs.wide_bytes
        + largest(engine).temp_bytes
    )
    assert 0.98 * limit < spent <= limit
    assert engine.compile_s > budget_of(engine).compile_s > 0
    outputs = engine.generate([{"prompt_token_ids": [3, 1, 4]}] * 9, PARAMS, use_tqdm=False)
    assert {len(output.outputs[0].token_ids) for output in outputs} == {20}
    assert pools().count(pages * PAGE) == len(pools()) - before == 1
    assert len(compiled) == 3


def test_a_cpu_compiles_once_and_describe_names_every_part_and_the_program_that_takes_most(
    checkpoint, device_has, compiled
):
    device_has(8 * MIB, pool=4 * MIB)
    engine = make(checkpoint)
    programs = engine_of(engine).programs
    assert [(pages, count) for pages, count, _ in compiled] == [(ALL_ROWS, programs.num_programs)]
    used = (
        model_of(engine).weight_bytes,
        ALL_ROWS * PAGE,
        largest(engine).temp_bytes,
        programs.wide_bytes,
    )
    expected = [
        (8 * MIB, "limit: test device"),
        (
            used[0],
            "in use before the KV cache: weights, and on an accelerator whatever else there is",
        ),
        (used[1], f"KV cache: {ALL_ROWS} pages, what max_num_seqs x max_model_len needs"),
        (used[2], "temporaries of the largest program, the step of 16 tokens (by memory_analysis)"),
        (used[3], "kept for all programs: wide sampling parameters, code of what is compiled"),
        (8 * MIB - sum(used), "left"),
    ]
    shown = [line[10:].strip() for line in engine.describe().splitlines()[-6:]]
    assert shown == [f"{num_bytes / MIB:.1f} MiB  {what}" for num_bytes, what in expected]

    device_has(sum(used))
    make(checkpoint, num_gpu_blocks_override=ALL_ROWS)
    device_has(sum(used) - 1, pool=4 * MIB)
    compiled.clear()
    advice = "lower max_num_batched_tokens or max_num_seqs, or set num_gpu_blocks_override"
    with pytest.raises(
        CapacityError, match=f"{sum(used)} bytes needed, {sum(used) - 1} available .*: {advice}\n"
    ):
        make(checkpoint)
    assert len({living for _, _, living in compiled}) == 1


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"num_gpu_blocks_override": 900}, "num_gpu_blocks_override"),
        ({"kv_cache_memory_bytes": 900 * PAGE}, "kv_cache"),
    ],
)
def test_a_pool_that_was_asked_for_and_cannot_fit_is_refused_before_anything_is_compiled(
    checkpoint, device_has, compiled, asked, name
):
    device_has(2 * MIB)
    with pytest.raises(
        CapacityError, match=rf"\d+ bytes needed, {2 * MIB} available \(test device\): lower {name}"
    ) as e:
        make(checkpoint, **asked)
    assert int(str(e.value).split()[0]) > 900 * PAGE
    assert "KV cache: 900 pages, asked for by " in str(e.value)
    assert compiled == []


def test_what_is_compiled_later_is_not_known_yet(checkpoint, device_has, compiled):
    device_has(8 * MIB, pool=4 * MIB)
    engine = make(checkpoint, lazy_compile=True)
    assert "? MiB  temporaries of programs: not known yet, none is compiled" in engine.describe()
    engine.generate({"prompt_token_ids": [3, 1, 4]}, replace(PARAMS, max_tokens=1), use_tqdm=False)
    assert (
        "temporaries of the largest program of the 2 compiled so far, the step of 16 tokens"
        in engine.describe()
    )
    assert compiled == []


def test_a_device_that_does_not_say_what_it_has_is_no_hindrance_to_a_pool_that_was_asked_for(
    checkpoint, device_has
):
    device_has(None)
    engine = make(checkpoint, num_gpu_blocks_override=40, lazy_compile=True)
    assert "? MiB  limit: test device" in engine.describe()
    assert engine.describe().splitlines()[-1].split() == ["?", "MiB", "left"]


class Refusing:
    """Lowered, and then refused as a TPU's compiler does it, or with another error."""

    def __init__(self, message: str) -> None:
        self.message = message

    def compile(self, compiler_options: dict[str, str] | None) -> None:
        raise jax.errors.JaxRuntimeError(self.message)


def test_what_the_compiler_finds_no_room_for_is_a_capacity_error(
    checkpoint, device_has, monkeypatch
):
    device_has(2 * MIB)
    refusing = Refusing("RESOURCE_EXHAUSTED: Ran out of memory on HBM, 2.5G\nmore")
    refused = KINDS["step"]._replace(lower=lambda self, size: refusing)
    monkeypatch.setitem(KINDS, "step", refused)
    expected = (
        "no room for the step of 16 tokens with 2 pages of KV cache: RESOURCE_EXHAUSTED: Ran .* "
        "HBM, 2.5G$"
    )
    with pytest.raises(CapacityError, match=expected):
        make(checkpoint)
    monkeypatch.setattr(refusing, "message", "INTERNAL: something else")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        make(checkpoint)
