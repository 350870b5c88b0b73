"""How many pages there are: what was asked for, else what all rows need, else what memory and
programs leave.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxkv.build.blueprint import Blueprint, make_blueprint
from jaxkv.build.memory import Budget, Memory, device_memory
from jaxkv.build.options import EngineOptions
from jaxkv.build.pool import MARGIN, fit_line, plan_pool
from jaxkv.config import EngineConfig
from jaxkv.errors import CapacityError
from jaxkv.kv.state import write
from jaxkv.models.families import ConfigReader, read_family
from jaxkv.ops.attention import BACKENDS, Attended, xla
from jaxkv.programs.compiled import ProgramMemory, Programs
from tiny import tiny_config

pytestmark = pytest.mark.usefixtures("quick_compile")

LIMITS = EngineConfig(
    max_model_len=100,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    block_size=16,
    num_pages=1,
    decode_steps=8,
    seed=0,
)
ALL_ROWS = 4 * 7
KIB = 1024
MANY_ROWS = replace(LIMITS, max_num_seqs=32, max_model_len=10**6)


class FakePrograms:
    """A step and a loop whose temporaries are lines over the pool's pages, and a compiler that
    refuses large pools.
    """

    wide_bytes, num_programs, code_bytes = 300, 7, 11

    def __init__(
        self, lines: list[tuple[int, int]], refused: int, config: EngineConfig, num_pages: int
    ) -> None:
        self.config, self.num_pages, self.refused, self.compile_s = config, num_pages, refused, 1.0
        self.memory = [
            ProgramMemory(str(i), a + b * num_pages, self.code_bytes)
            for i, (a, b) in enumerate(lines)
        ]

    def take_over(self, other: "FakePrograms") -> None:
        assert other.num_pages != self.num_pages
        self.memory.reverse()  # what is taken over comes first

    def compile_largest(self) -> None:
        if self.num_pages >= self.refused:
            raise CapacityError(f"refused {self.num_pages}")


def with_lines(*lines: tuple[int, int], refused: int = 2**31) -> Callable[..., FakePrograms]:
    return partial(FakePrograms, list(lines), refused)


def never(config: EngineConfig, num_pages: int) -> Programs:
    raise AssertionError("nothing was to be compiled")


def pool_of(at_most: int) -> Memory:
    """A CPU's, where the pool may take so many bytes."""
    return Memory(limit=2**60, used=0, source="", pool_limit=at_most)


def accelerator(limit: int, used: int = 0) -> Memory:
    return Memory(limit=limit, used=used, source="")


def planned(memory: Memory, limits: EngineConfig = LIMITS, **options: object) -> Budget:
    options = {"memory_bytes": None, "pages_override": None, "programs_for": never} | options
    return plan_pool(limits, KIB, memory, **options)


def chosen(*args: object, **options: object) -> int:
    return planned(*args, **options).num_pages


def test_by_default_every_row_gets_its_full_length():
    assert chosen(pool_of(10**9)) == ALL_ROWS
    assert chosen(pool_of(10**9), replace(LIMITS, max_model_len=97)) == ALL_ROWS
    assert chosen(pool_of(10**9), replace(LIMITS, max_model_len=96)) == 4 * 6
    assert chosen(accelerator(10**9), programs_for=with_lines((10**6, KIB))) == ALL_ROWS
    assert planned(pool_of(10**9)).reason == "what max_num_seqs x max_model_len needs"


def test_else_as_many_as_the_pool_may_have():
    assert chosen(pool_of(20 * KIB)) == 20
    assert chosen(pool_of(20 * KIB - 1)) == 19
    assert planned(pool_of(20 * KIB)).reason == "as many as memory allows"
    with pytest.raises(
        CapacityError, match="1024 bytes needed for one page of KV cache, 1023 free"
    ):
        chosen(pool_of(KIB - 1))


def sizes_up_to(most: int) -> list[int]:
    """Sizes of a pool that memory decides on an accelerator: 64 between two powers of two."""
    return [
        size
        for exponent in range(20)
        for size in range(2**exponent, 2 ** (exponent + 1), max(1, 2**exponent // 64))
        if size <= most
    ]


def test_a_little_more_or_less_memory_gives_the_same_pool():
    long = replace(LIMITS, max_num_seqs=1000, max_num_batched_tokens=1000)
    sizes = {chosen(pool_of(num_pages * KIB), long) for num_pages in range(320, 336)}
    assert sizes == {320}
    assert chosen(pool_of(319 * KIB), long) == 304
    # Never less than a row needs.
    kept = replace(long, max_model_len=16 * 400, kv_policy="streaming", row_pages=319)
    assert chosen(pool_of(319 * KIB), kept) == 319
    with pytest.raises(CapacityError, match="319 pages needed"):
        chosen(pool_of(318 * KIB), kept)


def test_what_was_asked_for_is_what_there_is_and_nothing_is_compiled_to_learn_that():
    for memory in (pool_of(0), accelerator(0), Memory(limit=None, used=0, source="silent")):
        assert chosen(memory, pages_override=3) == 3
        assert chosen(memory, pages_override=10**6) == 10**6
        assert chosen(memory, memory_bytes=5 * KIB + 1023) == 5
    assert planned(pool_of(0), memory_bytes=5 * KIB).reason == "asked for by kv_cache_memory_bytes"


def test_a_device_that_does_not_say_what_it_has_must_be_told():
    silent = SimpleNamespace(platform="tpu", memory_stats=lambda: None)
    memory = device_memory(silent, weight_bytes=9, utilization=0.9)
    with pytest.raises(
        CapacityError,
        match="does not say how much memory it has; pass kv_cache_memory_bytes or num_gpu",
    ):
        chosen(memory)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_bytes": KIB, "pages_override": 1}, "got both"),
        (
            {"memory_bytes": 1023},
            "kv_cache_memory_bytes: expected at least one page, 1024, got 1023",
        ),
        ({"memory_bytes": 2048.0}, "kv_cache_memory_bytes: .* got 2048.0"),
        ({"memory_bytes": True}, "kv_cache_memory_bytes: .* got True"),
        ({"pages_override": 0}, "num_gpu_blocks_override: expected a number >= 1, got 0"),
        ({"pages_override": 1.5}, "num_gpu_blocks_override: .* got 1.5"),
        ({"pages_override": True}, "num_gpu_blocks_override: .* got True"),
    ],
)
def test_a_figure_out_of_range_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        chosen(pool_of(10**9), **options)


# --- the size that the programs leave
# ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "line"),
    [
        ((10, 1100), (30, 1300), (1000, 10)),
        ((30, 1300), (10, 1100), (1000, 10)),
        ((10, 500), (30, 500), (500, 0)),
        ((10, 600), (30, 500), (600, 0)),  # less for a larger pool: nothing to build on
        ((10, 100), (13, 110), (60, 4)),  # 3.33 a page, in whole bytes
        ((10, 100), (20, 900), (-700, 80)),
    ],
)
def test_the_line_through_two_measurements(first, second, line):
    assert fit_line(first, second) == line
    for pages, nbytes in (first, second):
        assert line[0] + line[1] * pages >= nbytes


def test_the_pool_is_the_largest_that_fits_beside_the_programs():
    """Against trying every size, for random memories and pairs of lines."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        lines = [(int(rng.integers(0, 50 * KIB)), int(rng.integers(0, 3 * KIB))) for _ in range(2)]
        memory = accelerator(
            int(rng.integers(150, 2000)) * KIB, used=int(rng.integers(0, 50)) * KIB
        )
        kept = FakePrograms.wide_bytes + FakePrograms.num_programs * FakePrograms.code_bytes
        room = memory.limit * (1 - MARGIN) - memory.used - kept

        def fits(pages: int, room: float = room, lines: list = lines) -> bool:
            return pages * KIB + max(a + b * pages for a, b in lines) <= room + 1

        best = max(pages for pages in range(1, 2001) if fits(pages))
        budget = planned(memory, MANY_ROWS, programs_for=with_lines(*lines))
        assert budget.num_pages == sizes_up_to(best)[-1]
        assert (budget.reason, budget.compile_s) == ("as many as memory allows", 2.0)


def test_rows_of_programs_that_only_try_the_compiler_are_as_long_as_all_others():
    seen = []

    def programs_for(config: EngineConfig, num_pages: int) -> FakePrograms:
        seen.append((config.max_len, num_pages))
        return with_lines((0, 0))(config, num_pages)

    chosen(accelerator(8 * KIB), replace(LIMITS, max_model_len=4000), programs_for=programs_for)
    assert seen == [(4000, 4), (4000, 7)]


@pytest.mark.parametrize("refused", [400, 200, 100, 20, 3])
def test_pools_that_the_compiler_refuses_are_tried_smaller(refused):
    memory = accelerator(1000 * KIB)
    room = 990 * KIB - 300 - 77
    found = chosen(memory, MANY_ROWS, programs_for=with_lines((0, 2 * KIB), refused=refused))
    assert found == sizes_up_to(room // (3 * KIB))[-1]


def test_no_room_for_a_page_beside_the_programs_is_a_capacity_error():
    with pytest.raises(CapacityError, match="refused"):
        chosen(accelerator(1000 * KIB), programs_for=with_lines((0, 0), refused=2))
    expected = (
        "51312 bytes needed for one page of KV cache and the programs, 50311 free: lower "
        "max_num_batched_tokens"
    )
    with pytest.raises(CapacityError, match=expected):
        chosen(accelerator(51200, used=0), programs_for=with_lines((50000, 288)))
    with pytest.raises(CapacityError, match=r"needed for one page .* -\d+ free"):
        chosen(accelerator(10 * KIB, used=11 * KIB), programs_for=with_lines((0, 0)))


# --- against real programs
# --------------------------------------------------------------------------------------------


def blueprint_of(variant: str, **options: object) -> Blueprint:
    spec, layout = read_family(ConfigReader(tiny_config(variant), "config.json"))
    asked = EngineOptions(block_size=16, **{"dtype": "float32"} | options)
    return make_blueprint(asked, spec, layout, jax.devices())


class Copying(xla.Xla):
    """The XLA path behind two copies of the pool, as a compiler makes them that wants another
    layout.
    """

    def attend(self, q, k, v, at, batch, prepared, terms):
        dest_T, window, _ = prepared
        store = write(at.store, k, v, dest_T=dest_T, layer=at.layer)
        pages = jax.lax.optimization_barrier(store.pages[::-1])
        copied = at._replace(store=store.with_arrays(pages[::-1]))
        out, statistics = xla.read(q, copied, batch, scale=terms.scale, window=window)
        return Attended(out, store, statistics)


def temporaries(programs: Programs) -> dict[str, int]:
    return {one.name: one.temp_bytes for one in programs.memory}


@pytest.mark.slow
def test_temporaries_are_as_predicted_and_the_sum_fits(monkeypatch):
    monkeypatch.setitem(BACKENDS, "copying", Copying())
    blueprint = blueprint_of("llama", backend="copying")
    weights, page_nbytes = blueprint.abstract_weights(), blueprint.page_nbytes
    made: list[Programs] = []

    def programs_for(limits: EngineConfig, num_pages: int) -> Programs:
        made.append(replace(blueprint, limits=limits).programs(weights, num_pages))
        return made[-1]

    stats = {"bytes_limit": 7 * 2**20, "bytes_in_use": 2**20}
    fake = SimpleNamespace(platform="tpu", memory_stats=lambda: stats)
    memory = device_memory(fake, weight_bytes=2**20, utilization=0.9)
    before = len(jax.live_arrays())
    limits = replace(LIMITS, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=4000)
    budget = plan_pool(
        limits,
        page_nbytes,
        memory,
        memory_bytes=None,
        pages_override=None,
        programs_for=programs_for,
    )
    assert len(jax.live_arrays()) == before
    (small, large), num_pages = made, budget.num_pages
    lines = {
        name: fit_line((small.num_pages, temp_bytes), (large.num_pages, temporaries(large)[name]))
        for name, temp_bytes in temporaries(small).items()
    }
    slopes = [round(b / page_nbytes) for _, b in lines.values()]
    assert slopes.count(0) == 2  # what draws and scores takes no pages
    assert sorted(slopes)[2] >= 1
    assert num_pages < memory.free // (page_nbytes * (1 + max(slopes)))
    programs = programs_for(replace(limits, num_pages=num_pages), num_pages)
    budget.compile(programs, lazy=False)
    largest = temporaries(programs)
    for name in ("step of 16 tokens", "draw of 2 rows", "loop of 2 rows"):
        a, b = lines[name]
        assert abs(largest[name] - (a + b * num_pages)) < 256
    spent = memory.used + budget.pool_bytes + max(largest.values()) + programs.wide_bytes
    assert 0.98 * memory.limit < spent <= memory.limit
    assert programs.compile_s > budget.compile_s > 0
    with pytest.raises(CapacityError, match=f"available .*: {budget.advice}"):
        replace(budget, num_pages=num_pages + num_pages // 10).check(programs)


# --- the pool itself
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["llama", "qwen2-mixed-windows"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_page_costs_what_the_pool_allocates_for_it(variant, dtype):
    blueprint = blueprint_of(variant, kv_cache_dtype=dtype).with_pages(5)
    kv = blueprint.empty_kv()
    assert kv.nbytes == 5 * blueprint.page_nbytes
    # Groups whose pages are alike share a store.
    assert [store.num_layers for store in kv.stores] == [blueprint.spec.num_layers]
    assert {(store.num_pages, store.page_size) for store in kv.stores} == {(5, 16)}
    assert not any(np.asarray(store.pages).astype(np.float32).any() for store in kv.stores)


def test_a_pool_that_int32_cannot_count_is_refused_before_it_is_allocated():
    blueprint = blueprint_of("llama").with_pages(2**31 // 12 + 1)
    with pytest.raises(
        ValueError, match=r"num_gpu_blocks_override: expected layers x pages x .* < 2\*\*31, got "
    ):
        blueprint.empty_kv()
