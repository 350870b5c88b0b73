"""Compiles the TPU attention kernels without a TPU and counts what their schedule issues, against what DMAs take.

    python scripts/tpu_cost.py                                        the shapes and chips that docs/benchmarks reports
    python scripts/tpu_cost.py --chip v6e --shape 8b --context 8192   one of them
    python scripts/tpu_cost.py --kernel prefill --json

Needs libtpu (pip install "jax[tpu]"), on any x86-64 Linux machine. The ratio is a lower bound on issue cycles (bundles
per loop x trips, regions included, the whole kernel) over the cycles that the bytes of the pages take at the chip's
published bandwidth. Above 1 a kernel cannot be memory bound; below 1 nothing is proven. It compares kernels under one
compiler. It is not a speed: latency, stalls and bank conflicts are not in it, and nothing was run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

CHIPS = {  # topology, bytes per second of one core's HBM, clock (derived: peak operations / operations per cycle)
    "v5e": ("v5e:2x2", 820e9, 1.5e9),
    "v6e": ("v6e:2x2", 1640e9, 1.75e9),
    "tpu7x": ("tpu7x:2x2x1", 3690e9, 2.2e9),
}
SHAPES = {  # query heads, KV heads, head_dim
    "8b": (32, 8, 128),
    "70b-tp8": (8, 1, 128),
    "mha": (32, 32, 128),
    "mqa": (16, 1, 128),
    "h64": (32, 8, 64),
    "h64-tp8": (8, 1, 64),
    "h256": (8, 4, 256),
}
REPORTED = [(shape, chip) for shape in ("8b", "70b-tp8") for chip in ("v6e", "tpu7x")]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel at one shape. context: tokens that each of `batch` rows holds; queries: of the one prefill chunk."""

    kernel: str
    shape: str
    chip: str
    page_size: int
    context: int
    batch: int
    queries: int
    dtype: str
    pages: int | None = None
    far: bool = False


def lower(case: Case):
    """(the kernel's call, lowered for the chip, its tiles); with `far`, a pool of more than 2^31 bytes.

    jax is imported late, here and below: the environment comes first.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from kernels_pallas import tpu

    num_heads, kv_heads, head_dim = SHAPES[case.shape]
    layout = tpu.layout_of(kv_heads=kv_heads, head_dim=head_dim)
    page_shape, dtype = (layout.rows, case.page_size, layout.width), jnp.dtype(case.dtype)
    tiles = tpu.choose_tiles(layout=layout, page_size=case.page_size, itemsize=dtype.itemsize, num_heads=num_heads)
    if case.pages:
        tiles = tpu.Tiles(**(asdict(tiles) | {f"{case.kernel}_pages": case.pages}))
    decodes = case.kernel == "decode"
    width = -(-case.context // case.page_size)
    num_pages = case.batch * width + 1
    num_layers = 1 + (2**33 // (num_pages * int(np.prod(page_shape)) * dtype.itemsize) if case.far else 0)
    num_tokens = case.batch if decodes else case.queries

    def step(q_TNH, k_TKH, v_TKH, pages, table_BW, first_BW, len_B, start_B, count_B, layer):
        num_decode = case.batch if decodes else 0
        schedule = tpu.make_schedule(
            table_BW, first_BW, len_B, start_B, count_B, num_decode, case.batch, num_tokens=num_tokens,
            page_size=case.page_size, window=None, tiles=tiles, decode_only=decodes,
        )  # fmt: skip
        return tpu.ragged_paged_attention(
            q_TNH, k_TKH, v_TKH, pages, schedule, layer=layer, num_pages=num_pages, scale=head_dim**-0.5
        )

    device = topologies.get_topology_desc(CHIPS[case.chip][0], "tpu").devices[0]
    sharding = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())
    table, row = ((case.batch, width), jnp.int32), ((case.batch,), jnp.int32)
    kv = ((num_tokens, kv_heads, head_dim), dtype)
    shapes = [((num_tokens, num_heads, head_dim), dtype), kv, kv, ((num_layers * num_pages, *page_shape), dtype)]
    shapes += [table, table, row, row, row, ((), jnp.int32)]
    arguments = [jax.ShapeDtypeStruct(*shape, sharding=sharding) for shape in shapes]
    return jax.jit(step, donate_argnums=3).lower(*arguments), tiles


def count(case: Case, folder: Path) -> dict:
    """Compiles the case (in this process, once) and counts."""
    lowered, tiles = lower(case)
    memory = lowered.compile().memory_analysis()
    from tpu_schedule import read_schedule

    schedule = read_schedule(folder, f"paged_{case.kernel}")
    _, kv_heads, head_dim = SHAPES[case.shape]
    itemsize = 4 if case.dtype == "float32" else 2
    _, bandwidth, clock = CHIPS[case.chip]
    token_bytes = 2 * kv_heads * head_dim * itemsize
    cost = _decode if case.kernel == "decode" else _prefill
    found = cost(case, schedule, tiles)
    read_bytes = found.pop("read_tokens") * token_bytes
    dma = read_bytes / bandwidth * clock
    main = max(schedule.loops, key=lambda loop: loop.units["MXU"])
    busy = {name: round(main.units[name] / slots / main.own, 3) for name, slots in schedule.capacity.items()}
    return asdict(case) | found | {
        "dma_cycles": round(dma),
        "ratio": round(found["issue_cycles"] / dma, 3),
        "spills": main.units["VSTORE:SPILL"],
        "loops": [{"depth": loop.depth, "own": loop.own} for loop in schedule.loops],
        "busy": {name: share for name, share in busy.items() if ":" not in name},
        "vmem_bytes": schedule.vmem_bytes,
        "smem_bytes": schedule.smem_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "tiles": asdict(tiles),
    }  # fmt: skip


def _decode(case: Case, schedule, tiles) -> dict:
    """Rounds of the one loop with matmuls; the loops in it clear what a block fetches past its row's end."""
    from kernels_pallas.tpu.tiles import SLOTS

    (main,) = [loop for loop in schedule.loops if loop.depth == 1 and loop.units["MXU"]]
    block = tiles.decode_pages * case.page_size
    blocks = -(-case.context // block)
    cleared = blocks * tiles.decode_pages - case.context // case.page_size
    rounds = -(-case.batch * blocks // SLOTS)
    clear = sum(loop.own for loop in schedule.inner(main)) / len(schedule.inner(main))
    cycles = schedule.outside_loops + rounds * main.own + case.batch * cleared * clear
    return {
        "issue_cycles": round(cycles),
        "cycles_per_row": round(cycles / case.batch),
        "loop_own": main.own,
        "loop_trips": rounds,
        "read_tokens": case.batch * case.context,
    }


def _prefill(case: Case, schedule, tiles) -> dict:
    """A block of keys runs one of two regions: without a mask, or with (blocks that hold the queries themselves)."""
    regions = sorted((region for region in schedule.regions if region.units["MXU"]), key=lambda region: region.start)
    inner = [region for region in regions if not any(region.holds(other) for other in regions)]
    whole, masked = inner
    blocks = max((loop for loop in schedule.loops if loop.holds(whole)), key=lambda loop: loop.depth)
    size, slots = tiles.prefill_queries, tiles.prefill_pages * case.page_size
    begins = range(case.context - case.queries, case.context, size)
    whole_trips = sum((begin + 1) // slots for begin in begins)
    trips = sum(-(-min(begin + size, case.context) // slots) for begin in begins)
    around = blocks.own - whole.own - masked.own
    cycles = schedule.outside_loops + whole_trips * whole.own + (trips - whole_trips) * masked.own + trips * around
    share = whole.units["MXU"] / schedule.capacity["MXU"] / whole.own
    return {
        "issue_cycles": round(cycles),
        "whole_block": whole.own,
        "masked_block": masked.own,
        "around_block": around,
        "trips": trips,
        "mxu_share": round(share, 3),
        "mxu_share_all": round(trips * whole.units["MXU"] / schedule.capacity["MXU"] / cycles, 3),
        "busy_whole": {n: round(whole.units[n] / c / whole.own, 3) for n, c in schedule.capacity.items()},
        "read_tokens": sum(min(begin + size, case.context) for begin in begins),
    }


def run(case: Case) -> dict:
    """`count` in a process of its own: libtpu reads where to dump once."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true",
        }
        command = [sys.executable, __file__, "--worker", folder, json.dumps(asdict(case))]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{case}: {done.stderr.strip()[-2000:]}")
        return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        case = Case(**json.loads(sys.argv[3]))
        print(json.dumps({"temporary_bytes": _compile(case)} if case.far else count(case, Path(sys.argv[2]))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", choices=("decode", "prefill"), default="decode")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--chip", choices=CHIPS)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--context", type=int, help="default: 2048 for decode, 8192 for prefill")
    parser.add_argument("--batch", type=int, help="rows; default: 64 for decode, 1 for prefill")
    parser.add_argument("--queries", type=int, default=512, help="of the prefill chunk")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--pages", type=int, help="pages per block, instead of the tuned number")
    parser.add_argument("--far", action="store_true", help="compile only, with page offsets past 2^31 bytes")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    decodes = args.kernel == "decode"
    for shape, chip in REPORTED:
        if (args.shape or args.chip) and (shape, chip) != REPORTED[0]:
            break
        case = Case(
            kernel=args.kernel,
            shape=args.shape or shape,
            chip=args.chip or chip,
            page_size=args.page_size,
            context=args.context or (2048 if decodes else 8192),
            batch=args.batch or (64 if decodes else 1),
            queries=args.queries,
            dtype=args.dtype,
            pages=args.pages,
            far=args.far,
        )
        found = run(case)
        print(json.dumps(found) if args.json or args.far else describe(found))


def _compile(case: Case) -> int:
    return lower(case)[0].compile().memory_analysis().temp_size_in_bytes


def describe(found: dict) -> str:
    head = f"{found['kernel']} {found['shape']} {found['chip']} page {found['page_size']} context {found['context']}"
    sizes = f"VMEM {found['vmem_bytes'] / 2**20:.1f} MiB, SMEM {found['smem_bytes'] / 2**10:.0f} KiB"
    if found["kernel"] == "decode":
        detail = f"{found['loop_own']} bundles x {found['loop_trips']} trips"
    else:
        blocks = f"{found['whole_block']}/{found['masked_block']}/+{found['around_block']}"
        detail = f"block {blocks}, MXU slots used {found['mxu_share']:.0%} ({found['mxu_share_all']:.0%} of all)"
    return (
        f"{head}: ratio {found['ratio']:.3f} = {found['issue_cycles']} / {found['dma_cycles']}, {detail}, "
        f"spills {found['spills']}, {sizes}"
    )


if __name__ == "__main__":
    main()
