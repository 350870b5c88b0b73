"""The GPU attention kernels: right, and how fast, where there is a Hopper GPU; if they compile where there is none.

    python scripts/gpu_check.py                    what this machine can do; a table last
    python scripts/gpu_check.py --compile          compile for sm_90 even with a GPU here
    python scripts/gpu_check.py --compile --config config.json     an engine's largest step and loop for an H200, too
    python scripts/gpu_check.py --json out.json    everything that was measured or counted, too

Compiling needs no GPU: pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt of jax's version. Each kernel is
compiled in a process of its own, and nothing is run: registers, spills and shared memory are ptxas' account.

Measured: correctness against the float64 oracle on random ragged batches, unowned memory NaN; the bandwidth of a large
copy, and decode at batch 1 to 256 x context 512 to 32K beside XLA's path, as bytes of keys and values per second and
share of that bandwidth; prefill as TFLOP/s beside a large matmul. A layer's time is that of REPEATS in one program,
with the step's schedule and the write of its keys and values; below some 50 MB they are read from the cache. Cells
whose pages pass --max-gib are not run, nor those that come after --deadline; --json is written after every cell.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

SHAPES = {  # query heads, KV heads, head_dim
    "8b": (32, 8, 128),
    "70b": (64, 8, 128),
    "70b-tp8": (8, 1, 128),
    "mha": (32, 32, 128),
    "h64": (32, 8, 64),
    "h256": (8, 4, 256),
}
PAGES = (16, 64)
BATCHES, CONTEXTS = (1, 8, 32, 64, 128, 256), (512, 2048, 4096, 8192, 32768)
MEASURED = ("8b", "70b", "70b-tp8", "mha")
CHUNK, CHUNK_CONTEXT = 2048, 8192
REPEATS = 8
CACHE_BYTES = 60 << 20
ENGINE_PAGES = 8000
AT_ONCE = 2
WITHOUT_GPU = {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 patch: 0 } device_description_str: "NVIDIA H200"
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel. Decode: `batch` rows of `context` tokens; prefill: one chunk of CHUNK queries that ends there."""

    kernel: str
    shape: str
    page_size: int
    batch: int
    context: int
    window: int | None = None
    statistics: bool = False

    @property
    def pages_per_row(self) -> int:
        return -(-self.context // self.page_size)

    @property
    def num_tokens(self) -> int:
        return self.batch if self.kernel == "decode" else CHUNK

    @property
    def page_shape(self) -> tuple[int, int, int, int]:
        _, kv_heads, head_dim = SHAPES[self.shape]
        return self.batch * self.pages_per_row, 2 * kv_heads, self.page_size, head_dim

    @property
    def kv_bytes(self) -> int:
        """Of the keys and values that a decode step reads."""
        _, kv_heads, head_dim = SHAPES[self.shape]
        return self.batch * self.context * 2 * kv_heads * head_dim * 2

    @property
    def flops(self) -> int:
        """Of a chunk's two matmuls, what the causal mask leaves of them."""
        num_heads, _, head_dim = SHAPES[self.shape]
        return 4 * num_heads * head_dim * (CHUNK * self.context - CHUNK * (CHUNK - 1) // 2)

    def arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of what `attend` takes."""
        num_heads, kv_heads, head_dim = SHAPES[self.shape]
        rows = (self.batch,)
        return {
            "q_TNH": ((self.num_tokens, num_heads, head_dim), "bfloat16"),
            "k_TKH": ((self.num_tokens, kv_heads, head_dim), "bfloat16"),
            "v_TKH": ((self.num_tokens, kv_heads, head_dim), "bfloat16"),
            "pages": (self.page_shape, "bfloat16"),
            "table_BW": ((self.batch, self.pages_per_row), "int32"),
            "first_BW": ((self.batch, self.pages_per_row), "int32"),
            "len_B": (rows, "int32"),
        }


def attend(case: Case, backend: Any, repeats: int = 1) -> Callable[..., Any]:
    """A step's schedule and attention of so many layers, each asking with what the one before it answered, all with the
    same pages, by a backend of jaxkv. -> (out, pages)"""
    import jax
    import jax.numpy as jnp

    from jaxkv.kv.codecs import PlainCodec
    from jaxkv.kv.state import GroupKV
    from jaxkv.ops.attention import Batch, Heads

    num_heads, kv_heads, head_dim = SHAPES[case.shape]
    count = 1 if case.kernel == "decode" else CHUNK

    def run(q_TNH, k_TKH, v_TKH, pages, table_BW, first_BW, len_B):  # type: ignore[no-untyped-def]
        group = GroupKV(pages, table_BW, first_BW, len_B - count, codec=PlainCodec(dtype="bfloat16"), num_layers=1)
        token_T = jnp.arange(case.num_tokens, dtype=jnp.int32)
        decodes = case.kernel == "decode"
        batch = Batch(
            token_T=token_T,
            position_T=len_B - 1 if decodes else len_B[0] - CHUNK + token_T,
            row_T=token_T if decodes else jnp.zeros_like(token_T),
            start_B=jnp.arange(case.batch, dtype=jnp.int32) * count,
            count_B=jnp.full(case.batch, count, jnp.int32),
            num_decode=jnp.int32(case.batch if decodes else 0),
            num_rows=jnp.int32(case.batch),
            decode_only=decodes,
        )
        heads = Heads(num_heads=num_heads, num_kv_heads=kv_heads, head_dim=head_dim, window=case.window)
        prepared = backend.prepare(group, batch, heads)
        stepped = GroupKV(pages, table_BW, first_BW, len_B, codec=group.codec, num_layers=1)
        options: Any = {"layer": 0, "scale": head_dim**-0.5, "out_dtype": q_TNH.dtype}

        def layer(_: Any, carried: tuple[Any, Any]) -> tuple[Any, Any]:
            held = replace(stepped, pages=carried[1])
            out, after = backend.attend(carried[0], k_TKH, v_TKH, held, batch, prepared, **options)
            return out.astype(q_TNH.dtype), after.pages

        return jax.lax.fori_loop(0, repeats, layer, (q_TNH, pages))

    return run


# --- without a GPU


def compile_cases() -> list[Case]:
    context = {"decode": 4096, "prefill": CHUNK_CONTEXT}
    plain = [
        Case(kernel=kernel, shape=shape, page_size=page, batch=32 if kernel == "decode" else 1, context=context[kernel])
        for kernel in context
        for shape in SHAPES
        for page in PAGES
    ]
    return plain + [
        Case(kernel=kernel, shape="8b", page_size=16, batch=2, context=CHUNK_CONTEXT, window=1000) for kernel in context
    ]


@contextmanager
def h200() -> Iterator[Any]:
    """A device to compile for that is not here."""
    import jax
    from jax.experimental import topologies
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType

    options = {"platform": "cuda", "topology_name": "deviceless", "topology": "1x1x1", "target_config": H200}
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield topologies.get_topology_desc(**options).devices[0]


def compile_here(case: Case) -> dict[str, Any]:
    """In this process, whose environment says where Mosaic dumps to."""
    import jax
    from jax.sharding import SingleDeviceSharding

    from jaxkv.ops.attention.mosaic_gpu import MosaicGpu

    with h200() as device:
        whole = SingleDeviceSharding(device)
        arrays = {name: jax.ShapeDtypeStruct(*of, sharding=whole) for name, of in case.arrays().items()}
        step = jax.jit(attend(case, MosaicGpu()), donate_argnames="pages")
        return _memory(step.lower(**arrays).compile())


def compile_engine_here(config: str) -> dict[str, Any]:
    """The largest step and loop of an engine with default limits, but a pool of ENGINE_PAGES, in this process."""
    import jax.numpy as jnp

    from jaxkv.aot import Programs
    from jaxkv.config import engine_limits
    from jaxkv.engine.pool import abstract_kv
    from jaxkv.kv.codecs import get_codec
    from jaxkv.models.families import read_family
    from jaxkv.report.deployment import find_config
    from jaxkv.sharding import bytes_per_device, place

    spec, layout = read_family(find_config(config))
    with h200() as device:
        placement = place(spec, layout, [device])
        limits = replace(engine_limits("gpu", spec.max_len), num_pages=ENGINE_PAGES)
        codec = get_codec("bfloat16", platform="gpu")
        kv = abstract_kv(spec, limits, codec, backend="mosaic_gpu", placement=placement)

        def weights(leaves: Any, *lead: int) -> dict[str, Any]:
            shapes = {name: leaf.info.shape for name, leaf in leaves.items() if leaf.same_as is None}
            return {name: placement.abstract((*lead, *shape), jnp.bfloat16) for name, shape in shapes.items()}

        tree = weights(layout.top) | {"layers": weights(layout.layer, spec.num_layers)}
        programs = Programs(tree, kv, spec=spec, config=limits, backend="mosaic_gpu", placement=placement)
        programs.compile_largest()
        pool = {"pool_bytes": bytes_per_device([group.pages for group in kv.groups])}
        return {name: _memory(program) | pool for name, program in programs.compiled.items()}


def _memory(compiled: Any) -> dict[str, int]:
    memory = compiled.memory_analysis()
    return {"temporary_bytes": memory.temp_size_in_bytes, "aliased_bytes": memory.alias_size_in_bytes}


def apart(option: str, argument: str, **environment: str) -> dict[str, Any]:
    """What a process of its own prints for `option`, or why it ended."""
    env = {**os.environ, **WITHOUT_GPU, **environment}
    done = subprocess.run([sys.executable, __file__, option, argument], env=env, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "Error" in line]
        return {"reason": lines[-1] if lines else f"the compiler ended with status {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compile_apart(case: Case) -> dict[str, Any]:
    """What ptxas says of the case's kernel, or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        dump = {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_MLIR_PASSES": "1", "MOSAIC_GPU_DUMP_TO": folder}
        found = apart("--one", json.dumps(asdict(case)), **dump)
        counted = [_count(path) for path in sorted(Path(folder).glob("*.ptxas"))]
    if "reason" in found:
        return found
    # A step with chunks has both kernels: the one that was asked for is the one that takes more registers.
    return found | (max(counted, key=lambda one: one["registers"]) if case.kernel == "prefill" else counted[0])


def _count(ptxas: Path) -> dict[str, int]:
    text = ptxas.read_text()
    passes = ptxas.with_name(ptxas.stem + ".mlir-passes.log")
    shared = re.findall(r"dynamic_shared_memory_size %c(\d+)_i32", passes.read_text()) if passes.exists() else []
    patterns = {"registers": r"Used (\d+) registers", "spill_bytes": r"(\d+) bytes spill stores"}
    found = {name: max(map(int, re.findall(pattern, text))) for name, pattern in patterns.items()}
    return found | {"shared_bytes": int(shared[-1]) if shared else 0}


def compile_all(cases: Iterable[Case]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        cases = list(cases)
        return [asdict(case) | found for case, found in zip(cases, pool.map(compile_apart, cases), strict=True)]


def faults(found: dict[str, Any]) -> list[str]:
    """What must not be. Results of 256 columns fill the registers of prefill: some are spilled, in bytes per thread."""
    if "reason" in found:
        return [found["reason"]]
    allowed = 128 if (found["kernel"], found["shape"]) == ("prefill", "h256") else 0
    spilled = found["spill_bytes"]
    return [f"{spilled} bytes of registers spilled, expected at most {allowed}"] if spilled > allowed else []


def engine_faults(found: dict[str, Any]) -> list[str]:
    """A pool that is not updated in place would be copied."""
    if "reason" in found:
        return [found["reason"]]
    return [
        f"{name}: {memory['aliased_bytes']} bytes updated in place, expected the pool's {memory['pool_bytes']}"
        for name, memory in found.items()
        if memory["aliased_bytes"] < memory["pool_bytes"] or memory["temporary_bytes"] > memory["pool_bytes"] // 2
    ]


# --- with one


def random_arrays(case: Case, seed: int) -> dict[str, Any]:
    """The pages in a random order; the rows' lengths are all the context."""
    import jax
    import jax.numpy as jnp

    keys = iter(jax.random.split(jax.random.key(seed), 8))
    shapes = {name: shape for name, (shape, dtype) in case.arrays().items() if dtype == "bfloat16"}
    num_pages, *page = shapes.pop("pages")
    found: dict[str, Any] = {name: jax.random.normal(next(keys), shape, jnp.bfloat16) for name, shape in shapes.items()}
    # The same few over and over: random numbers for all of a large pool would take several times its memory.
    few = jax.random.normal(next(keys), (min(num_pages, 64), *page), jnp.bfloat16)
    found["pages"] = jax.jit(lambda few: few[jnp.arange(num_pages) % len(few)])(few)
    order = jax.random.permutation(next(keys), case.batch * case.pages_per_row)
    first = jnp.arange(case.pages_per_row, dtype=jnp.int32) * case.page_size
    found["table_BW"] = order.astype(jnp.int32).reshape(case.batch, -1)
    found["first_BW"] = jnp.broadcast_to(first, found["table_BW"].shape)
    found["len_B"] = jnp.full(case.batch, case.context, jnp.int32)
    return found


def seconds(run: Callable[[], Any], *, repeats: int = 20, rounds: int = 5) -> float:
    """The fastest round's mean."""
    import jax

    jax.block_until_ready(run())
    best = float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(repeats):
            out = run()
        jax.block_until_ready(out)
        best = min(best, (time.perf_counter() - started) / repeats)
    return best


def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy of 4 GiB."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones(2**31, jnp.uint16)
    copy = jax.jit(lambda x: x + jnp.uint16(1))
    return 2 * x.nbytes / seconds(lambda: copy(x), repeats=5)


def matmul_rate() -> float:
    """FLOP/s of a bfloat16 matmul of 8192 x 8192 x 8192. Of random numbers: ones take less power, so more is done."""
    import jax
    import jax.numpy as jnp

    x = jax.random.normal(jax.random.key(0), (8192, 8192), jnp.bfloat16)
    dot = jax.jit(lambda a, b: a @ b)
    return 2 * 8192**3 / seconds(lambda: dot(x, x), repeats=10)


def time_case(case: Case, backend: Any) -> float:
    """Seconds of one layer."""
    import jax

    arrays = random_arrays(case, 0)
    pages = arrays.pop("pages")
    # Given away and taken back: else each call would copy them.
    step = jax.jit(attend(case, backend, REPEATS), donate_argnames="pages")

    def run() -> Any:
        nonlocal pages
        out, pages = step(pages=pages, **arrays)
        return out

    return seconds(run, repeats=5) / REPEATS


def check_right(seed: int) -> dict[str, Any]:
    """Error of random mixed batches against the float64 oracle of the tests."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    import jax
    import jax.numpy as jnp
    import numpy as np

    from kernels_pallas import gpu, reference
    from kernels_pallas.rows import Rows
    from ragged import LAYER, NUM_ROWS, Shape, expected, random_case, sinks_of

    rng = np.random.default_rng(seed)
    kv_heads = int(rng.choice([1, 2, 4, 8]))
    shape = Shape(
        kv_heads=kv_heads,
        num_heads=kv_heads * int(rng.choice([1, 2, 3, 4, 8])),
        head_dim=int(rng.choice([64, 128, 256])),
        page_size=int(rng.choice([16, 32, 64, 128])),
        window=rng.choice([None, 1, 17, 64, 200]),
        softcap=rng.choice([None, 2.0, 30.0]),
        sinks=bool(rng.random() < 0.5),
        decode_only=bool(rng.random() < 0.5),
    )
    case = random_case(seed, shape)
    # On few processors each works through many items, one after the other.
    num_processors = int(rng.choice([2, 132]))

    @jax.jit
    def step(q_TNH, k_TKH, v_TKH, pages, table_BW, first_BW, len_B, start_B, count_B):  # type: ignore[no-untyped-def]
        rows = Rows(table_BW, first_BW, len_B, start_B, count_B, shape.page_size, shape.window)
        sizes = {"num_heads": shape.num_heads, "kv_heads": kv_heads, "head_dim": shape.head_dim}
        counts = (jnp.int32(case.num_decode), jnp.int32(case.num_rows))
        cut: Any = {"num_tokens": len(case.row_T), "num_processors": num_processors}
        schedule = gpu.make_schedule(rows, *counts, **sizes, **cut, decode_only=shape.decode_only)
        pages = reference.write_pages(pages, k_TKH, v_TKH, case.dest_T, layer=LAYER, num_pages=len(case.held))
        options: Any = {"layer": LAYER, "num_pages": len(case.held), "scale": shape.head_dim**-0.5}
        options |= {"softcap": shape.softcap, "sinks_N": sinks_of(shape)}
        return gpu.ragged_paged_attention(q_TNH, pages, schedule, **options)[0]

    runs = [np.asarray(step(pages=jnp.asarray(case.pages), **case.arrays), np.float64) for _ in range(3)]
    out, real_T = runs[0], case.row_T < NUM_ROWS
    same = all(np.array_equal(run[real_T], out[real_T]) for run in runs)
    want = expected(case)[0][real_T]
    error, norm = (np.linalg.norm(x, axis=-1) for x in (out[real_T] - want, want))
    whole, worst = float(np.linalg.norm(error) / np.linalg.norm(norm)), float((error / norm).max())
    found = {"seed": seed, "shape": str(shape), "num_processors": num_processors, "error": whole, "worst": worst}
    return found | {"same_bits": same, "ok": same and whole <= 2e-3 and worst <= 5e-3}


def measured_cases(shapes: Iterable[str]) -> list[Case]:
    """The most telling ones first: a machine may be lent for minutes only."""
    cases = []
    for shape in shapes:
        cells = [(batch, context) for batch in BATCHES for context in CONTEXTS]
        cells.sort(key=lambda cell: cell != (32, 4096))
        decode = [Case(kernel="decode", shape=shape, page_size=64, batch=b, context=c) for b, c in cells]
        small = [Case(kernel="decode", shape=shape, page_size=16, batch=b, context=4096) for b in (32, *BATCHES)]
        uneven = [Case(kernel="decode", shape=shape, page_size=64, batch=32, context=4100)]
        chunk = {"kernel": "prefill", "shape": shape, "batch": 1, "context": CHUNK_CONTEXT}
        prefill = [Case(page_size=page, **chunk) for page in PAGES]
        cases.append([decode[0], small[0], *prefill, *uneven, *decode[1:], *small[1:]])
    # All shapes' first, then all second ones, ...
    return list(dict.fromkeys(case for row in zip_longest(*cases) for case in row if case is not None))


def measure_cell(case: Case, options: argparse.Namespace, bandwidth: float, rate: float) -> dict[str, Any]:
    import jax

    from jaxkv.ops.attention.mosaic_gpu import MosaicGpu
    from jaxkv.ops.attention.xla import Xla

    cell: dict[str, Any] = asdict(case)
    if case.kv_bytes > options.max_gib * 2**30:
        return cell | {"reason": "too large"}
    if time.monotonic() > options.ends:
        return cell | {"reason": "no time left"}
    try:
        cell["seconds"] = time_case(case, MosaicGpu())
        if case.kernel == "decode":
            cell["share"] = case.kv_bytes / cell["seconds"] / bandwidth
            cell["from_cache"] = case.kv_bytes < CACHE_BYTES
            if case.page_size == 64 and case.context == 4096 and case.kv_bytes <= options.max_xla_gib * 2**30:
                cell["xla_seconds"] = time_case(case, Xla())
        else:
            cell["share"] = case.flops / cell["seconds"] / rate
    except jax.errors.JaxRuntimeError as error:  # out of memory; the other cells can still be measured
        cell["reason"] = str(error).splitlines()[0]
    return cell


def measure(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Adds to `result`, and writes it after each cell."""
    options.ends = time.monotonic() + options.deadline
    result["right"], result["cells"] = [], []
    for seed in range(options.seeds):
        one = check_right(seed)
        result["right"].append(one)
        print(f"right: {one['ok']}  {one['error']:.1e} {one['worst']:.1e}  {one['shape']}", flush=True)
    bandwidth, rate = copy_bandwidth(), matmul_rate()
    result |= {"copy_bytes_per_s": bandwidth, "matmul_flops": rate}
    for case in measured_cases(options.shapes or MEASURED):
        result["cells"].append(measure_cell(case, options, bandwidth, rate))
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n")


# --- both


def compiled_table(found: list[dict[str, Any]]) -> str:
    rows = [f"{'kernel':8s}{'shape':9s}{'page':>5s}{'window':>8s}{'registers':>11s}{'spilled':>9s}{'shared KiB':>12s}"]
    for one in found:
        head = f"{one['kernel']:8s}{one['shape']:9s}{one['page_size']:5d}{one['window'] or '-':>8}"
        if "reason" in one:
            rows.append(f"{head}  {one['reason']}")
        else:
            rows.append(f"{head}{one['registers']:11d}{one['spill_bytes']:9d}{one['shared_bytes'] / 1024:12.1f}")
    return "\n".join(rows)


def engine_table(found: dict[str, Any]) -> str:
    rows = [f"error: {fault}" for fault in engine_faults(found)]
    for name, memory in found.items() if "reason" not in found else ():
        aliased, temporary = memory["aliased_bytes"] / 2**20, memory["temporary_bytes"] / 2**20
        rows.append(f"{name}: pool of {aliased:,.0f} MiB updated in place, {temporary:,.1f} MiB of temporaries")
    return "\n".join(rows)


def measured_table(result: dict[str, Any]) -> str:
    rows = [f"{'kernel':8s}{'shape':9s}{'page':>5s}{'batch':>6s}{'context':>8s}{'us':>10s}{'share':>8s}{'XLA us':>10s}"]
    for one in sorted(result["cells"], key=lambda one: (one["kernel"], one["shape"], -one["page_size"], one["batch"])):
        head = f"{one['kernel']:8s}{one['shape']:9s}{one['page_size']:5d}{one['batch']:6d}{one['context']:8d}"
        if "share" not in one:
            rows.append(f"{head}  {one['reason']}")
            continue
        xla = f"{one['xla_seconds'] * 1e6:10.1f}" if "xla_seconds" in one else f"{'-':>10s}"
        cached = "  (cache)" if one.get("from_cache") else ""
        rows.append(f"{head}{one['seconds'] * 1e6:10.1f}{one['share']:8.1%}{xla}{cached}")
    wrong = sum(not one["ok"] for one in result["right"])
    copied, multiplied = result["copy_bytes_per_s"] / 1e12, result["matmul_flops"] / 1e12
    rows.append(f"share: of a copy's {copied:.2f} TB/s (decode), of a matmul's {multiplied:.0f} TFLOP/s (prefill)")
    rows.append(f"{wrong} of {len(result['right'])} random batches wrong")
    return "\n".join(rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="compile only, even where there is a GPU")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="only these")
    parser.add_argument("--deadline", type=float, default=540, help="seconds after which no further cell is begun")
    parser.add_argument("--seeds", type=int, default=8, help="random batches that are compared")
    parser.add_argument("--max-gib", type=float, default=96, help="keys and values of a cell, at most")
    parser.add_argument("--max-xla-gib", type=float, default=8, help="of a cell that XLA is timed at too")
    parser.add_argument("--json", type=Path, help="write everything that was measured or counted")
    parser.add_argument("--config", help="when compiling: a model's config.json, whose engine is compiled too")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--one-engine", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.one or options.one_engine:
        one, engine = options.one, options.one_engine
        print(json.dumps(compile_here(Case(**json.loads(one))) if one else compile_engine_here(engine)))
        return
    if options.compile:
        os.environ.update(WITHOUT_GPU)
    import jax
    from bench_generate import environment

    result: dict[str, Any] = environment() | {"command": " ".join(sys.argv)}
    if options.compile or jax.devices()[0].platform != "gpu":
        cases = [case for case in compile_cases() if not options.shapes or case.shape in options.shapes]
        result["compiled"] = compile_all(cases)
        print(compiled_table(result["compiled"]))
        failed = [(one, fault) for one in result["compiled"] for fault in faults(one)]
        for one, fault in failed:
            print(f"error: {one['kernel']} {one['shape']}, pages of {one['page_size']}: {fault}")
        if options.config:
            result["engine"] = apart("--one-engine", options.config)
            failed += [(options.config, fault) for fault in engine_faults(result["engine"])]
            print(engine_table(result["engine"]))
        print(f"{len(cases)} compiled for sm_90, {len(failed)} failed (jax {jax.__version__}). Nothing was run.")
    else:
        result["device"] = jax.devices()[0].device_kind
        measure(options, result)
        failed = [one for one in result["right"] if not one["ok"]]
        print(measured_table(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
