"""How many pages there are: what was asked for, else what all rows need, else what the memory holds."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxkv.config import EngineConfig
from jaxkv.engine import pool
from jaxkv.engine.pool import available_memory, bytes_per_page, choose_num_pages, empty_kv
from jaxkv.errors import CapacityError
from jaxkv.kv.codecs import get_codec
from jaxkv.models.families import ConfigReader, read_family
from tiny import tiny_config

LIMITS = EngineConfig(
    max_model_len=100, max_num_seqs=4, max_num_batched_tokens=32, block_size=16, num_pages=1, decode_steps=8, seed=0
)
ALL_ROWS = 4 * 7
KIB = 1024
CPU = SimpleNamespace(platform="cpu")


def chosen(device: object = CPU, limits: EngineConfig = LIMITS, **options: object) -> int:
    options = {"memory_bytes": None, "pages_override": None, "utilization": 0.9} | options
    return choose_num_pages(limits, KIB, device, **options)


def accelerator(limit: int, in_use: int) -> SimpleNamespace:
    stats = {"bytes_limit": limit, "bytes_in_use": in_use}
    return SimpleNamespace(platform="tpu", memory_stats=lambda: stats)


@pytest.fixture
def available(monkeypatch):
    def set_to(num_bytes: int) -> None:
        monkeypatch.setattr(pool, "available_memory", lambda: num_bytes)

    return set_to


def test_by_default_every_row_gets_its_full_length(available):
    available(10**9)
    assert chosen() == ALL_ROWS
    assert chosen(limits=replace(LIMITS, max_model_len=97)) == ALL_ROWS
    assert chosen(limits=replace(LIMITS, max_model_len=96)) == 4 * 6
    assert chosen(accelerator(10**9, 0)) == ALL_ROWS


def test_on_a_cpu_at_most_a_quarter_of_the_available_memory(available):
    available(80 * KIB)
    assert chosen() == 20
    assert chosen(utilization=0.1) == 8


def test_on_an_accelerator_what_weights_and_steps_leave():
    assert chosen(accelerator(100 * KIB, 70 * KIB), utilization=0.9) == 18  # (90 - 70) x 0.9


def test_no_room_for_a_page_is_a_capacity_error(available):
    available(4 * KIB - 4)
    with pytest.raises(CapacityError, match="1024 bytes needed for one page of KV cache, 1023 free"):
        chosen()
    with pytest.raises(CapacityError, match=r"-.* free"):
        chosen(accelerator(100 * KIB, 99 * KIB))


def test_a_device_that_does_not_say_what_it_has_must_be_told():
    silent = SimpleNamespace(platform="tpu", memory_stats=lambda: None)
    with pytest.raises(CapacityError, match="does not say how much memory it has; pass kv_cache_memory_bytes"):
        chosen(silent)
    assert chosen(silent, memory_bytes=2 * KIB) == 2


def test_what_was_asked_for_is_what_there_is(available):
    available(0)
    assert chosen(pages_override=3) == 3
    assert chosen(pages_override=10**6) == 10**6
    assert chosen(memory_bytes=5 * KIB + 1023) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_bytes": KIB, "pages_override": 1}, "got both"),
        ({"memory_bytes": 1023}, "kv_cache_memory_bytes: expected at least one page, 1024, got 1023"),
        ({"memory_bytes": 2048.0}, "kv_cache_memory_bytes: .* got 2048.0"),
        ({"memory_bytes": True}, "kv_cache_memory_bytes: .* got True"),
        ({"pages_override": 0}, "num_gpu_blocks_override: expected a number >= 1, got 0"),
        ({"pages_override": 1.5}, "num_gpu_blocks_override: .* got 1.5"),
        ({"pages_override": True}, "num_gpu_blocks_override: .* got True"),
        ({"utilization": 0}, r"gpu_memory_utilization: expected a number in \(0, 1\], got 0"),
        ({"utilization": 1.01}, "gpu_memory_utilization: .* got 1.01"),
        ({"utilization": float("nan")}, "gpu_memory_utilization: .* got nan"),
    ],
)
def test_a_figure_out_of_range_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        chosen(**options)


# --- the memory that is left ------------------------------------------------------------------------------------------


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in ({"proc/meminfo": "MemTotal: 900 kB\nMemAvailable:     500 kB\n"} | files).items():
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
    ids=["none", "v2 unlimited", "v2", "v2 above", "v2 over", "half", "v1", "v1 unlimited", "v2 cached", "v1 cached"],
)
def test_available_memory_is_the_lower_of_system_and_cgroup(tmp_path, files, expected):
    assert available_memory(system(tmp_path, files)) == expected


def test_available_memory_is_known_without_linux(tmp_path):
    assert available_memory(tmp_path) > 2**20


# --- the pool itself --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["llama", "qwen2-mixed-windows"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_page_costs_what_the_pool_allocates_for_it(variant, dtype):
    spec, _ = read_family(ConfigReader(tiny_config(variant), "config.json"))
    codec = get_codec(dtype, platform="cpu")
    config = replace(LIMITS, num_pages=5)
    kv = empty_kv(spec, config, codec, jax.devices()[0])
    assert sum(group.pages.nbytes for group in kv.groups) == 5 * bytes_per_page(spec, page_size=16, codec=codec)
    assert [group.num_layers for group in kv.groups] == [len(group.layers) for group in spec.groups]
    assert {(group.num_pages, group.page_size) for group in kv.groups} == {(5, 16)}
    assert not any(np.asarray(group.pages).astype(np.float32).any() for group in kv.groups)


def test_a_pool_that_int32_cannot_count_is_refused_before_it_is_allocated():
    spec, _ = read_family(ConfigReader(tiny_config("llama"), "config.json"))
    codec = get_codec("float32", platform="cpu")
    with pytest.raises(ValueError, match=r"num_gpu_blocks_override: expected layers x pages x .* < 2\*\*31, got "):
        empty_kv(spec, replace(LIMITS, num_pages=2**31 // 12 + 1), codec, jax.devices()[0])


def test_this_machine_s_own_device_and_memory_are_understood():
    assert 1 <= choose_num_pages(
        LIMITS, KIB, jax.devices()[0], memory_bytes=None, pages_override=None, utilization=0.9
    ) <= ALL_ROWS  # fmt: skip
