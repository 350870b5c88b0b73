"""The GPU attention kernels: right, and how fast, where there is a Hopper GPU; if they compile
where there is none.

    python scripts/gpu_check.py                    what this machine can do; a table last
    python scripts/gpu_check.py --compile          compile for sm_90 even with a GPU here
    # one case for each mechanism, for CI
    python scripts/gpu_check.py --compile --short
    # an engine's largest step and loop for an H200, too
    python scripts/gpu_check.py --compile --config config.json
    # everything that was measured or counted, too
    python scripts/gpu_check.py --json out.json

Compiling needs no GPU: pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt of jax's version.
Each kernel is compiled in a process of its own, and nothing is run: registers, spills and shared
memory are ptxas' account.

Measured: correctness against the float64 oracle on random ragged batches, unowned memory NaN; the
bandwidth of a large copy, and decode at batch 1 to 256 x context 512 to 32K beside XLA's path, as
bytes of keys and values per second and share of that bandwidth; prefill as TFLOP/s beside a large
matmul. A layer's time is that of REPEATS in one program, with the step's schedule and the write of
its keys and values; below some 50 MB they are read from the cache. Cells whose pages pass --max-gib
are not run, nor those that come after --deadline; --json is written after every cell.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench_generate import environment
from gpu_bench import measure
from gpu_cases import CHUNK_CONTEXT, PAGES, QUANTISED, QUANTISED_PAGES, SHAPES, Case, attend

ENGINE_PAGES = 8000
SHORT = (("8b", 16), ("h64", 64), ("h256", 64))
"""Shapes, and the page size of each, that the short form has in bfloat16."""

SHORT_QUANTISED = (("int8", "8b"), ("int8", "h256"), ("int4", "8b"))

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
"""  # noqa: E501


def compile_cases(*, short: bool = False) -> list[Case]:
    """All shapes, page sizes, codecs and a window; `short`: one case for each of their mechanisms,
    which are the size of a head, of a page, quantised pages and a window.
    """
    context = {"decode": 4096, "prefill": CHUNK_CONTEXT}
    plain = [
        Case(
            kernel=kernel,
            shape=shape,
            page_size=page,
            batch=32 if kernel == "decode" else 1,
            context=context[kernel],
        )
        for kernel in context
        for shape in SHAPES
        for page in PAGES
    ]
    windows = [
        Case(kernel=kernel, shape="8b", page_size=16, batch=2, context=CHUNK_CONTEXT, window=1000)
        for kernel in context
    ]
    quantised = [
        replace(case, codec=codec, page_size=64)
        for codec in QUANTISED
        for case in (*plain, *windows)
        if case.page_size in QUANTISED_PAGES or case.window
    ]
    if short:
        one_size = [case for case in plain if (case.shape, case.page_size) in SHORT]
        few = [case for case in quantised if (case.codec, case.shape) in SHORT_QUANTISED]
        return one_size + windows + [case for case in few if case.window is None]
    return plain + windows + quantised


@contextmanager
def h200() -> Iterator[Any]:
    """A device to compile for that is not here."""
    import jax
    from jax.experimental import topologies
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType

    options = {
        "platform": "cuda",
        "topology_name": "deviceless",
        "topology": "1x1x1",
        "target_config": H200,
    }
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
        arrays = {
            name: jax.ShapeDtypeStruct(*of, sharding=whole) for name, of in case.arrays().items()
        }
        step = jax.jit(attend(case, MosaicGpu()), donate_argnames=("pages", "scales"))
        return _memory(step.lower(**arrays).compile())


def compile_engine_here(config: str, kv_cache_dtype: str) -> dict[str, Any]:
    """The largest step and loop of an engine with default limits, but a pool of ENGINE_PAGES, in
    this process.
    """
    from jaxkv.build.blueprint import make_blueprint
    from jaxkv.build.options import EngineOptions
    from jaxkv.models.families import read_family
    from jaxkv.placement import bytes_per_device
    from jaxkv.tools.chips import CountedDevice
    from jaxkv.tools.deployment import find_config

    spec, layout = read_family(find_config(config))
    options = EngineOptions(
        config, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype, backend="mosaic_gpu"
    )
    counted: Any = CountedDevice(0, platform="gpu", compute_capability="9.0")
    blueprint = make_blueprint(options, spec, layout, [counted]).with_pages(ENGINE_PAGES)
    with h200() as device:
        blueprint = blueprint.on([device])
        programs = blueprint.programs(blueprint.abstract_weights())
        # Those that have the pool; a draw and scores have not.
        programs.step(programs.token_buckets[-1])
        programs.loop(programs.row_buckets[-1])
        pool = {"pool_bytes": bytes_per_device(blueprint.abstract_kv().pools)}
        return {name: _memory(program) | pool for name, program in programs.compiled.items()}


def _memory(compiled: Any) -> dict[str, int]:
    memory = compiled.memory_analysis()
    return {
        "temporary_bytes": memory.temp_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
    }


def apart(option: str, argument: str, **environment: str) -> dict[str, Any]:
    """What a process of its own prints for `option`, or why it ended."""
    env = {**os.environ, **WITHOUT_GPU, **environment}
    done = subprocess.run(
        [sys.executable, __file__, option, argument], env=env, capture_output=True, text=True
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "Error" in line]
        return {
            "reason": lines[-1] if lines else f"the compiler ended with status {done.returncode}"
        }
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compile_apart(case: Case) -> dict[str, Any]:
    """What ptxas says of the case's kernel, or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        dump = {
            "MOSAIC_GPU_DUMP_PTXAS": "1",
            "MOSAIC_GPU_DUMP_MLIR_PASSES": "1",
            "MOSAIC_GPU_DUMP_TO": folder,
        }
        found = apart("--one", json.dumps(asdict(case)), **dump)
        counted = [_count(path) for path in sorted(Path(folder).glob("*.ptxas"))]
    if "reason" in found:
        return found
    # A step with chunks has both kernels: the one that was asked for is the one that takes more
    # registers.
    return found | (
        max(counted, key=lambda one: one["registers"]) if case.kernel == "prefill" else counted[0]
    )


def _count(ptxas: Path) -> dict[str, int]:
    text = ptxas.read_text()
    passes = ptxas.with_name(ptxas.stem + ".mlir-passes.log")
    shared = (
        re.findall(r"dynamic_shared_memory_size %c(\d+)_i32", passes.read_text())
        if passes.exists()
        else []
    )
    patterns = {"registers": r"Used (\d+) registers", "spill_bytes": r"(\d+) bytes spill stores"}
    found = {name: max(map(int, re.findall(pattern, text))) for name, pattern in patterns.items()}
    return found | {"shared_bytes": int(shared[-1]) if shared else 0}


def compile_all(cases: Iterable[Case]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        cases = list(cases)
        return [
            asdict(case) | found
            for case, found in zip(cases, pool.map(compile_apart, cases), strict=True)
        ]


def faults(found: dict[str, Any]) -> list[str]:
    """What must not be."""
    if "reason" in found:
        return [found["reason"]]
    spilled = found["spill_bytes"]
    return [f"{spilled} bytes of registers spilled per thread, expected none"] if spilled else []


def engine_faults(found: dict[str, Any]) -> list[str]:
    """A pool that is not updated in place would be copied."""
    if "reason" in found:
        return [found["reason"]]
    return [
        (
            f"{name}: {memory['aliased_bytes']} bytes updated in place, expected the pool's "
            f"{memory['pool_bytes']}"
        )
        for name, memory in found.items()
        if memory["aliased_bytes"] < memory["pool_bytes"]
        or memory["temporary_bytes"] > memory["pool_bytes"] // 2
    ]


def compiled_table(found: list[dict[str, Any]]) -> str:
    columns = f"{'registers':>11s}{'spilled':>9s}{'shared KiB':>12s}"
    rows = [f"{'kernel':8s}{'shape':9s}{'codec':9s}{'page':>5s}{'window':>8s}{columns}"]
    for one in found:
        head = f"{one['kernel']:8s}{one['shape']:9s}{one['codec']:9s}"
        head += f"{one['page_size']:5d}{one['window'] or '-':>8}"
        if "reason" in one:
            rows.append(f"{head}  {one['reason']}")
        else:
            numbers = f"{one['registers']:11d}{one['spill_bytes']:9d}"
            rows.append(f"{head}{numbers}{one['shared_bytes'] / 1024:12.1f}")
    return "\n".join(rows)


def engine_table(found: dict[str, Any]) -> str:
    rows = [f"error: {fault}" for fault in engine_faults(found)]
    for name, memory in found.items() if "reason" not in found else ():
        aliased, temporary = memory["aliased_bytes"] / 2**20, memory["temporary_bytes"] / 2**20
        rows.append(
            f"{name}: pool of {aliased:,.0f} MiB updated in place, {temporary:,.1f} MiB of "
            f"temporaries"
        )
    return "\n".join(rows)


def measured_table(result: dict[str, Any]) -> str:
    columns = f"{'page':>5s}{'batch':>6s}{'context':>8s}"
    columns += f"{'us':>10s}{'share':>8s}{'XLA us':>10s}"
    rows = [f"{'kernel':8s}{'shape':9s}{'codec':9s}{columns}"]
    order = ("kernel", "shape", "codec", "page_size", "batch")
    for one in sorted(result["cells"], key=lambda one: tuple(one[name] for name in order)):
        head = f"{one['kernel']:8s}{one['shape']:9s}{one['codec']:9s}{one['page_size']:5d}"
        head += f"{one['batch']:6d}{one['context']:8d}"
        if "share" not in one:
            rows.append(f"{head}  {one['reason']}")
            continue
        xla = f"{one['xla_seconds'] * 1e6:10.1f}" if "xla_seconds" in one else f"{'-':>10s}"
        cached = "  (cache)" if one.get("from_cache") else ""
        rows.append(f"{head}{one['seconds'] * 1e6:10.1f}{one['share']:8.1%}{xla}{cached}")
    wrong = sum(not one["ok"] for one in result["right"])
    copied, multiplied = result["copy_bytes_per_s"] / 1e12, result["matmul_flops"] / 1e12
    rows.append(
        f"share: of a copy's {copied:.2f} TB/s (decode), of a matmul's {multiplied:.0f} TFLOP/s "
        f"(prefill)"
    )
    rows.append(f"{wrong} of {len(result['right'])} random batches wrong")
    return "\n".join(rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--compile", action="store_true", help="compile only, even where there is a GPU"
    )
    parser.add_argument(
        "--short", action="store_true", help="when compiling: one case for each mechanism"
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="only these")
    parser.add_argument(
        "--deadline", type=float, default=540, help="seconds after which no further cell is begun"
    )
    parser.add_argument("--seeds", type=int, default=8, help="random batches that are compared")
    parser.add_argument(
        "--max-gib", type=float, default=96, help="keys and values of a cell, at most"
    )
    parser.add_argument(
        "--max-xla-gib", type=float, default=8, help="of a cell that XLA is timed at too"
    )
    parser.add_argument("--json", type=Path, help="write everything that was measured or counted")
    parser.add_argument(
        "--config", help="when compiling: a model's config.json, whose engine is compiled too"
    )
    parser.add_argument(
        "--kv-cache-dtype",
        default="bfloat16",
        choices=("bfloat16", *QUANTISED),
        help="of that engine",
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--one-engine", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.one or options.one_engine:
        one, engine = options.one, options.one_engine
        print(
            json.dumps(
                compile_here(Case(**json.loads(one)))
                if one
                else compile_engine_here(*json.loads(engine))
            )
        )
        return
    if options.compile:
        os.environ.update(WITHOUT_GPU)
    import jax

    result: dict[str, Any] = environment() | {"command": " ".join(sys.argv)}
    if options.compile or jax.devices()[0].platform != "gpu":
        cases = [
            case
            for case in compile_cases(short=options.short)
            if not options.shapes or case.shape in options.shapes
        ]
        result["compiled"] = compile_all(cases)
        print(compiled_table(result["compiled"]))
        failed = [(one, fault) for one in result["compiled"] for fault in faults(one)]
        for one, fault in failed:
            print(f"error: {one['kernel']} {one['shape']}, pages of {one['page_size']}: {fault}")
        if options.config:
            result["engine"] = apart(
                "--one-engine", json.dumps([options.config, options.kv_cache_dtype])
            )
            failed += [(options.config, fault) for fault in engine_faults(result["engine"])]
            print(engine_table(result["engine"]))
        print(
            f"{len(cases)} compiled for sm_90, {len(failed)} failed (jax {jax.__version__}). "
            f"Nothing was run."
        )
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
