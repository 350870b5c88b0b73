"""Compiles every program of an engine ahead of time and keeps it by shape: nothing is compiled by
surprise.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from threading import BoundedSemaphore, Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.stages import Compiled

from jaxkv.config import EngineConfig
from jaxkv.errors import CapacityError, Catch, EngineDeadError
from jaxkv.kv.policies import get_policy
from jaxkv.kv.state import PagedKV, Store
from jaxkv.models.spec import ModelSpec
from jaxkv.ops.attention import Backend
from jaxkv.placement import Placement, bytes_per_device
from jaxkv.processes import num_processes, true_in_all
from jaxkv.programs.background import Background, Progress, likely_first
from jaxkv.programs.buckets import (
    drawn_rows,
    fit_bucket,
    num_step_rows,
    row_buckets,
    token_buckets,
)
from jaxkv.programs.compiler_options import compiler_options
from jaxkv.programs.draft import Draft
from jaxkv.programs.lowerings import KINDS, Lowering, Lowerings
from jaxkv.weights.tree import Weights, draft_of, without_adapters, without_draft

if TYPE_CHECKING:
    from jaxkv.programs.executables import ProgramFiles

DEMOTED_AT_ONCE = COPIED_AT_ONCE = 64
"""Pages, or recurrent states, of one call: more take several."""


class ProgramMemory(NamedTuple):
    """Counts what one program takes on its device beside weights and pool, in bytes, by the
    compiler's own account.

    temp_bytes while it runs: temporaries, the inputs and outputs that are not weights, pool or
    sampling parameters (`Programs.wide_bytes`), and what padding adds to those. code_bytes as long
    as it is kept.
    """

    name: str
    temp_bytes: int
    code_bytes: int


class Programs:
    """Holds the compiled steps (by packed tokens T), draws and decode loops (by rows) of one
    engine, and its copy of pages.

    `step(T)`, `draw(R)`, `loop(R)` and `copy()` give an executable, compiling it on first use;
    `compile_all` compiles them all, `compile_in_background` too while the first are used already.
    Any thread may ask. Not compiled so are those of `scores(T)`: most engines score no prompts, and
    the first that is scored compiles that for every T. A model that pools has `step(T)` and
    `pool(T)` only. With speculation there is `speculate(R)` too, and `write_text()` where that
    looks at it. With a `draft` the weights have those of that model (`weights.tree.with_draft`).
    """

    def __init__(
        self,
        weights: Weights,
        kv: PagedKV,
        *,
        spec: ModelSpec,
        config: EngineConfig,
        backend: str | Backend,
        draft: Draft | None = None,
        placement: Placement | None = None,
        files: ProgramFiles | None = None,
    ) -> None:
        self.config = config
        self.spec = spec
        self.backend = backend
        self.draft = draft
        self.placement = placement
        self.token_buckets = token_buckets(config.max_num_batched_tokens)
        self.row_buckets = row_buckets(config.max_num_seqs, self.device.platform)
        self.drawn_rows = drawn_rows(config.max_num_seqs)
        self.compile_s = 0.0
        """Seconds in which something was compiled."""
        self.waited_s = 0.0
        """Seconds that users of programs have waited for one; not those of `compile_all`."""
        self.num_loaded = 0
        """Programs of `executables` that came from files."""
        self._files = files
        self._turns: dict[tuple[str, int], Lock] = {}
        """Held by the thread that makes a program."""
        self._at_once = BoundedSemaphore(self._num_at_once)
        self._failed: dict[tuple[str, int], Exception] = {}
        """What the background could not compile, and why."""
        self._counting = Lock()
        self._background: Background | None = None
        self._is_stopped = False
        self._progress: Progress | None = None
        self._lowerings = Lowerings(
            weights=jax.tree.map(_abstract, weights),
            kv=jax.tree.map(_abstract, kv),
            spec=spec,
            config=config,
            backend=backend,
            draft=draft,
            placement=placement,
        )
        self.executables: dict[tuple[str, int], Compiled] = {}
        self._memory: dict[tuple[str, int], ProgramMemory] = {}

    @property
    def num_compiled(self) -> int:
        return len(self.executables)

    def num_step_rows(self, num_tokens: int) -> int:
        """Returns the rows of the step program for T packed tokens."""
        return num_step_rows(self.config.max_num_seqs, num_tokens)

    def step(self, num_tokens: int) -> Compiled:
        return self._get("step", num_tokens)

    def draw(self, num_rows: int) -> Compiled:
        return self._get("draw", num_rows)

    def loop(self, num_rows: int) -> Compiled:
        return self._get("loop", num_rows)

    def speculate(self, num_rows: int) -> Compiled:
        """Returns the decode loop of R rows that proposes tokens ahead."""
        return self._get("speculate", num_rows)

    def write_text(self) -> Compiled:
        """Returns the program that sets the text of one row, in which proposals are looked up."""
        return self._get("text", self.config.max_len)

    @property
    def speculative_rows(self) -> list[int]:
        """Lists the row counts of the loops that propose tokens ahead."""
        speculation = self.config.speculation
        if speculation is None:
            return []
        largest = fit_bucket(self.row_buckets, speculation.most_rows)
        return [rows for rows in self.row_buckets if rows <= largest]

    def scores(self, num_tokens: int) -> Compiled:
        """Returns the program that scores prompt tokens of a step of T packed tokens."""
        if ("scores", num_tokens) not in self.executables:
            with self._waiting():
                self._compile_each(("scores", size) for size in self.token_buckets)
        return self.executables["scores", num_tokens]

    def pool(self, num_tokens: int) -> Compiled:
        """Returns the program that takes vectors from a step of T packed tokens."""
        return self._get("pool", num_tokens)

    def copy(self) -> Compiled:
        """Returns the program that copies up to `num_copies` pages."""
        return self._get("copy", self.num_copies)

    @property
    def num_copies(self) -> int:
        """Counts the pages that may be partly filled: one of each row in each of its tables."""
        return self.config.max_num_seqs * len(self.config.windows)

    def demote(self) -> Compiled:
        """Returns the program that demotes up to DEMOTED_AT_ONCE pages."""
        return self._get("demote", DEMOTED_AT_ONCE)

    def copy_states(self) -> Compiled:
        """Returns the program that copies up to COPIED_AT_ONCE recurrent states."""
        return self._get("states", COPIED_AT_ONCE)

    def write_adapter(self) -> Compiled:
        """Returns the program that writes an adapter to its slot."""
        return self._get("adapter", 1)

    def measure(self) -> Compiled:
        """Returns the program that measures the pages of one row."""
        return self._get("measure", self.config.table_width)

    @property
    def num_pages(self) -> int:
        """Returns the pages of the pool that they are for."""
        return self._lowerings.kv.stores[0].num_pages

    @property
    def memory(self) -> list[ProgramMemory]:
        """Returns the memory of every program that is compiled."""
        compiled = list(self.executables)  # the background may add one
        for key in compiled:
            if key not in self._memory:
                self._memory[key] = self._memory_of(*key)  # 14 ms
        return [self._memory[key] for key in compiled]

    @property
    def weights(self) -> Weights:
        """Returns the shapes that they are for, without those of adapters and a draft model."""
        return without_draft(without_adapters(self._lowerings.weights))

    @property
    def draft_weights(self) -> Weights:
        """Returns the shapes of the draft model's weights, {} without one."""
        return draft_of(self._lowerings.weights)

    @property
    def stores(self) -> tuple[Store, ...]:
        """Returns the stores of the KV state that they are for, as shapes."""
        return self._lowerings.kv.stores

    @property
    def compiled(self) -> dict[str, Compiled]:
        """Returns every program that is compiled, by the name that `memory` gives it."""
        return {_name(*key): program for key, program in dict(self.executables).items()}

    @property
    def num_programs(self) -> int:
        """Counts the programs that `compile_all` compiles."""
        return len(self._every)

    @property
    def wide_bytes(self) -> int:
        """Counts the bytes of the sampling parameters that stay on the device for every row count,
        whatever runs, and of the rows' text.
        """
        if self.config.pooled:
            return 0
        counts = {*self.drawn_rows, *self.row_buckets}
        wide = sum(bytes_per_device(self._lowerings.sampling_for(count)) for count in counts)
        return wide + bytes_per_device(self._lowerings.text_RN)

    @property
    def _every(self) -> list[tuple[str, int]]:
        every = [("step", size) for size in self.token_buckets]
        if self.config.pooled:
            every += [("pool", size) for size in self.token_buckets]
        else:
            every += [("draw", size) for size in self.drawn_rows]
            every += [("loop", size) for size in self.row_buckets]
            every.append(("copy", self.num_copies))
            every += [("speculate", size) for size in self.speculative_rows]
            every += [] if self._lowerings.text_RN is None else [("text", self.config.max_len)]
        if self.config.has_states:
            every.append(("states", COPIED_AT_ONCE))
        if self.config.num_adapters:
            every.append(("adapter", 1))
        policy = get_policy(self.config.kv_policy)
        if policy is not None and policy.low:
            every.append(("demote", DEMOTED_AT_ONCE))
        if policy is not None and policy.measure is not None:
            every.append(("measure", self.config.table_width))
        return every

    def compile_all(self) -> None:
        """Compiles what is missing; waits for the background where that is at it.

        Raises: what the background has met, EngineDeadError once they are stopped.
        """
        if self._background is not None:
            self._background.wait()
        for error in self._failed.values():
            raise error
        self._compile_each(self._every)

    def stop(self) -> None:
        """Ends compiling with the programs that are being compiled, whoever waits for more."""
        self._is_stopped = True
        if self._background is not None:
            self._background.stop()

    def compile_in_background(self) -> None:
        """Has them all compiled by a thread, those first that are likely wanted first. One that is
        wanted before that its user compiles; one that cannot be compiled raises when it is used.
        """
        if self._background is not None:
            raise RuntimeError("the programs are being compiled already")
        self._progress = Progress(self.num_programs)
        self._background = Background(
            likely_first(self._every), self._compile_behind, at_end=self._progress.clear
        )

    @property
    def is_compiling(self) -> bool:
        """Says whether programs are compiled in the background: one that is wanted next may not be
        there yet.
        """
        return self._background is not None and not self._background.has_ended

    def compile_largest(self) -> None:
        """Compiles the step, the draw, the scores and the loop that need the most memory."""
        tokens, rows = self.token_buckets[-1], self.row_buckets[-1]
        if self.config.pooled:
            self._compile_each([("step", tokens), ("pool", tokens)])
            return
        largest = [
            ("step", tokens),
            ("draw", self.drawn_rows[-1]),
            ("scores", tokens),
            ("loop", rows),
        ]
        self._compile_each(largest + [("speculate", size) for size in self.speculative_rows[-1:]])

    def take_over(self, other: Programs) -> None:
        """Takes what other programs of the same model and limits have compiled: what has no pool
        is the same for any, all is for a pool of the same size.
        """

        def depends_on(programs: Programs) -> tuple[object, ...]:
            config = programs.config
            return replace(config, num_pages=1), config.max_len, config.table_width

        if depends_on(self) != depends_on(other):
            return
        same_pool = self.num_pages == other.num_pages
        for key, program in dict(other.executables).items():
            if same_pool or not KINDS[key[0]].has_pool:
                self.executables.setdefault(key, program)

    def _compile_each(self, wanted: Iterable[tuple[str, int]]) -> None:
        """Compiles what is missing."""
        missing = [key for key in wanted if key not in self.executables]
        if not missing:
            return
        started = time.perf_counter()
        progress = self._progress = Progress(self.num_compiled + len(missing))
        try:
            with ThreadPoolExecutor(self._num_at_once) as pool:
                if self.placement is not None and num_processes(self.placement.devices) > 1:
                    self._take_what_all_have(missing, list(pool.map(self._find, missing)))
                list(pool.map(self._compile_once, missing))
        finally:
            progress.clear()
            self._progress = None
            self._count(time.perf_counter() - started)

    def _take_what_all_have(
        self, keys: Sequence[tuple[str, int]], found: Sequence[Compiled | None]
    ) -> None:
        """Takes from what was found in files what every process has found, be it nothing."""
        in_all = true_in_all([program is not None for program in found])
        for key, program, is_taken in zip(keys, found, in_all, strict=True):
            if program is not None and is_taken:
                self.executables[key] = program
                self.num_loaded += 1

    def _find(self, key: tuple[str, int]) -> Compiled | None:
        if self._files is None:
            return None
        lowering = KINDS[key[0]].lower(self._lowerings, key[1])
        return self._files.find(lowering.arguments, **self._parts(_name(*key)))

    def _compile_behind(self, key: tuple[str, int]) -> None:
        """Compiles one in the background."""
        with Catch() as caught:
            self._count(self._compile_once(key))
        if caught.error is not None:
            caught.error.add_note(f"This was met while compiling the {_name(*key)}.")
            self._failed[key] = caught.error

    def _compile_once(self, key: tuple[str, int]) -> float:
        """Compiles one, unless another thread has just done so, and returns the seconds that took.
        Raises: what that met.
        """
        with self._turns.setdefault(key, Lock()):
            if key in self._failed:
                raise self._failed[key]
            if key in self.executables:
                return 0.0
            if self._is_stopped:
                raise EngineDeadError("the engine was shut down before its programs were compiled")
            with self._at_once:
                started = time.perf_counter()
                self.executables[key] = self._compile(*key)
                return time.perf_counter() - started

    def _count(self, seconds: float) -> None:
        with self._counting:
            self.compile_s += seconds

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Counts the seconds inside as waited for."""
        started = time.perf_counter()
        try:
            yield
        finally:
            with self._counting:
                self.waited_s += time.perf_counter() - started

    @property
    def device(self) -> jax.Device:
        """Returns one of the devices that they are for."""
        return jax.devices()[0] if self.placement is None else self.placement.devices[0]

    @property
    def _num_at_once(self) -> int:
        """Counts the compilations at a time, which run outside Python's lock. libtpu 0.0.42.1 has
        died of two.
        """
        return 1 if self.device.platform == "tpu" else 2

    def _get(self, kind: str, size: int) -> Compiled:
        key = (kind, size)
        if key not in self.executables:
            with self._waiting():
                self._count(self._compile_once(key))
        return self.executables[key]

    def _compile(self, kind: str, size: int) -> Compiled:
        try:
            return self._load_or_compile(
                _name(kind, size), KINDS[kind].lower(self._lowerings, size)
            )
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            # A TPU's compiler refuses what its memory cannot hold.
            what = (
                f"the compiler finds no room for the {_name(kind, size)} with {self.num_pages} "
                f"pages of KV cache"
            )
            raise CapacityError(f"{what}: {str(error).splitlines()[0]}") from error

    def _load_or_compile(self, name: str, lowering: Lowering) -> Compiled:
        def compile_now() -> Compiled:
            if (progress := self._progress) is not None:
                progress.show(self.num_compiled + 1)
            return lowering.compile(self._options)

        if self._files is None:
            return compile_now()
        compiled, is_loaded = self._files.take(compile_now, lowering.arguments, **self._parts(name))
        with self._counting:
            self.num_loaded += is_loaded
        return compiled

    @property
    def _options(self) -> Mapping[str, str] | None:
        return compiler_options(self.device, self._lowerings.weights)

    def _parts(self, name: str) -> dict[str, Any]:
        """Returns what a program depends on beside its arguments."""
        return {
            "name": name,
            "options": self._options,
            "spec": self.spec,
            "config": replace(self.config, seed=0),  # which no program reads
            "backend": self.backend,
            "draft": self.draft,
            "placement": self.placement,
        }

    def _memory_of(self, kind: str, size: int) -> ProgramMemory:
        memory = self.executables[kind, size].memory_analysis()
        if memory is None:
            raise NotImplementedError(
                "this device's compiler does not say how much memory a program takes"
            )
        counted = bytes_per_device(KINDS[kind].counted(self._lowerings, size))
        if KINDS[kind].has_pool:
            counted += bytes_per_device(self._lowerings.kv.pools)
        # An output that takes over an argument's memory (the pool) counts in both sizes, and once
        # in the alias size.
        arguments_and_outputs = (
            memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        )
        return ProgramMemory(
            name=_name(kind, size),
            temp_bytes=memory.temp_size_in_bytes + arguments_and_outputs - counted,
            code_bytes=memory.generated_code_size_in_bytes,
        )


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))


def _name(kind: str, size: int) -> str:
    return f"{kind} of {size} {KINDS[kind].unit}"
