"""What every test runs under. That each warning is an error is set in pyproject.toml."""

import gc
import importlib
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

# Before jax is imported: it reads these once.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = (
    "false"  # nothing is written to, or comes from, the user's own cache
)
if "PYTEST_XDIST_WORKER" not in os.environ:
    FOLDER = tempfile.TemporaryDirectory(prefix="jaxkv-tests-", ignore_cleanup_errors=True)
    os.environ["JAXKV_TESTS_FOLDER"] = FOLDER.name  # workers find it here
    # LLVM gets a program whole: these are so small that to divide them takes longer.
    FLAGS = ["--xla_cpu_parallel_codegen_split_count=1"]
    if version("jax") < "0.11":  # as engines' programs are compiled, by whose options is said why
        FLAGS.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join([*FLAGS, os.environ.get("XLA_FLAGS", "")])
# A GPU's threads that wait for each other in Pallas' interpreter each hold one of XLA's: with as many as a
# small machine has cores, all wait for ever.
os.environ.setdefault("PJRT_NPROC", "16")

import jax
import pytest
from jax._src.lru_cache import _CACHE_SUFFIX, LRUCache

from jaxkv.ops.attention import native, pallas_tpu
from jaxkv.programs import compiled, lowerings
from jaxkv.programs.compiled import Programs
from kernels_pallas import tpu
from tiny import make_checkpoint, tiny_config
from tokenizers_ import CHAT_TEMPLATE, save_tokenizer

# [B] + [T, B] is an error, not a guess. NaN checks stay off: tests poison unused pages with NaN on
# purpose.
jax.config.update("jax_numpy_rank_promotion", "raise")

# Modules often compile the same text, and so do workers: this run has a cache of its own. Processes that
# tests start have none.
jax.config.update("jax_enable_compilation_cache", True)
jax.config.update("jax_compilation_cache_dir", os.environ["JAXKV_TESTS_FOLDER"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
# No program says which lines each of its operations is from: to write that down is part of lowering.
jax.config.update("jax_traceback_in_locations_limit", 0)


def put_whole(self: LRUCache, key: str, value: bytes) -> None:
    """Writes an entry beside its place first: jax would let another worker read a part of it."""
    file, name = tempfile.mkstemp(dir=self.path)
    with os.fdopen(file, "wb") as part:
        part.write(value)
    os.replace(name, self.path / (key + _CACHE_SUFFIX))


LRUCache.put = put_whole

COMPILED: dict[object, dict] = {}
NUM_KEPT = 60
"""Programs that a module's tests keep for each other. Each takes hundreds of the memory mappings
that a process may have (65,530 on Linux); past them XLA crashes.
"""

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A small Llama with a tokenizer and a chat template, which nobody writes to."""
    directory = make_checkpoint(
        tmp_path_factory.mktemp("checkpoint") / "model", tiny_config("llama", vocab_size=420)
    )
    save_tokenizer(directory, chat_template=CHAT_TEMPLATE)
    return directory


@pytest.fixture(scope="session")
def scripts() -> Path:
    """The folder, which is in the checkout only."""
    if not SCRIPTS.is_dir():
        pytest.skip("scripts/ is in the checkout only")
    return SCRIPTS


@pytest.fixture(scope="module")
def script(scripts) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of scripts/, found as Python finds it when a script runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(scripts)
        yield importlib.import_module


@pytest.fixture(scope="module", autouse=True)
def own() -> Iterator[Callable[..., object]]:
    """Programs of equal engines are compiled once in a module."""
    with pytest.MonkeyPatch.context() as patch:
        shared = cache(lowerings.own)
        patch.setattr(lowerings, "own", shared)
        yield shared
    COMPILED.clear()
    jax.clear_caches()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _few_programs_are_kept(own) -> Iterator[None]:
    yield
    if len(jax.devices()[0].client.live_executables()) > NUM_KEPT:
        COMPILED.clear()
        own.cache_clear()


@pytest.fixture(scope="module")
def quick_compile() -> Iterator[None]:
    """Compiles without optimising, be it an engine's program, a reference or one operation, which
    takes a quarter of the time: for tests of what is around programs, and of numbers with a tolerance.
    Those of bits run what users run.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def as_users(quick_compile, own) -> Iterator[None]:
    """Compiles for a test of bits as users do, in a module of `quick_compile`."""

    def forget() -> None:
        COMPILED.clear()
        own.cache_clear()
        jax.clear_caches()

    forget()
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
    forget()


@pytest.fixture(scope="module")
def one_loop() -> Iterator[None]:
    """Engines have one decode loop, for all of their rows, where users' have one for few rows too:
    no program takes longer to compile. For tests of engines whose rows are few and come and go.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "row_buckets", lambda max_num_seqs, _: (max(2, max_num_seqs),))
        yield


@pytest.fixture(scope="module")
def xla_attends() -> Iterator[None]:
    """Has XLA attend, which machine code on a CPU would do else: it adds up in another order, and
    takes less memory.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "handler_for", lambda at: None)
        yield


@pytest.fixture
def small_tiles(monkeypatch) -> None:
    """TPU kernels have tiles that the interpreter compiles and goes over quickly: of one page, so
    that a row of few tokens has several.
    """

    def choose(*, layout: tpu.Layout, **_: object) -> tpu.Tiles:
        return tpu.Tiles(
            decode_pages=1, decode_heads=layout.joined, prefill_pages=1, prefill_queries=16
        )

    monkeypatch.setattr(pallas_tpu, "choose_tiles", choose)


@pytest.fixture
def compile_once(monkeypatch):
    """For tests whose every command makes an engine of its own: equal programs are not compiled
    again for that.
    """
    get = Programs._get

    def shared(self, kind, size):
        inputs = str((self._lowerings.weights, self._lowerings.kv))
        self.executables = COMPILED.setdefault(
            (self.spec, self.config, self.backend, inputs), self.executables
        )
        return get(self, kind, size)

    monkeypatch.setattr(Programs, "_get", shared)


def pytest_collection_finish() -> None:
    """Spares later collections of garbage what imports have made, and all tests, as they are there
    until the end: to go over them takes half a second each time.
    Those that go over everything come a third as often: each module ends with one.
    """
    gc.set_threshold(700, 10, 30)
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tells which files take the time."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.split("::")[0]] += report.duration
    slowest = [f"{total:5.0f} s  {file}" for file, total in seconds.most_common(20) if total >= 10]
    if slowest:
        terminalreporter.section("files of 10 seconds and more")
        terminalreporter.write_line("\n".join(slowest))
