"""How many pages a TPU would get, without having one: python scripts/plan_memory.py [--topology v5e:1x1] ...

Compiles with libtpu's ahead-of-time topology on a Linux x86-64 CPU (`pip install "jax[tpu]"`), runs the same code that
`LLM` sizes its pool with, then compiles the largest step and loop (or with --all every program) for the pool that was
chosen, and shows whether the prediction holds. Nothing is allocated.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace
from importlib import metadata
from typing import Any

# Before jax is imported: it reads these once.
os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost")
os.environ.update(ALLOW_MULTIPLE_LIBTPU_LOAD="1")

import jax
import jax.numpy as jnp
import jaxlib.version
from bench_models import shape
from jax.experimental import topologies

from jaxkv.aot import Programs
from jaxkv.config import EngineConfig
from jaxkv.engine.budget import MIB, Budget, Memory
from jaxkv.engine.pool import abstract_kv, bytes_per_page, fit_line, plan_pool
from jaxkv.kv.codecs import get_codec
from jaxkv.models.families import ConfigReader, Layout, read_family
from jaxkv.models.spec import ModelSpec
from jaxkv.sharding import Placement, bytes_per_device, place

USABLE_GIB = {"v4": 15.25, "v5e": 15.75, "v5p": 95.7, "v6e": 31.25, "tpu7x": 94.75}
"""Of one device, as its compiler says when a program does not fit."""


def main() -> None:
    args = parse()
    one_chip = {"chips_per_host_bounds": [1, 1, 1]} if args.topology.endswith(":1x1") else {}
    devices: Any = topologies.get_topology_desc(args.topology, "tpu", **one_chip).devices
    config = shape(args.vocab, args.hidden, args.ffn, args.layers, args.heads, args.kv_heads)
    spec, layout = read_family(ConfigReader(config | {"max_position_embeddings": args.max_model_len}, "config.json"))
    placement = place(spec, layout, devices, args.tensor_parallel_size)
    weights = abstract_weights(spec, layout, placement)
    weight_bytes = bytes_per_device(weights)
    codec = get_codec("bfloat16", platform="tpu")
    limits = EngineConfig(
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=2048,
        block_size=64,
        num_pages=1,
        decode_steps=8,
        seed=0,
    )
    tried: list[Programs] = []

    def programs_for(config: EngineConfig, num_pages: int) -> Programs:
        kv = abstract_kv(spec, replace(config, num_pages=num_pages), codec, backend=args.backend, placement=placement)
        tried.append(Programs(weights, kv, spec=spec, config=config, backend=args.backend, placement=placement))
        return tried[-1]

    print(f"jax {jax.__version__}, jaxlib {jaxlib.version.__version__}, libtpu {metadata.version('libtpu')}")
    where = f"{args.topology} ({placement.size} x {devices[0].device_kind})"
    print(f"{where}, backend {args.backend}, {args.layers} layers of {args.hidden}")
    usable = int(USABLE_GIB[args.topology.split(":")[0]] * 2**30)
    limit = int(usable * args.utilization)
    source = f"{args.utilization} of {usable / MIB:.1f} MiB"
    memory = Memory(limit=limit, used=weight_bytes, source=source)
    page_nbytes = bytes_per_page(spec, page_size=limits.block_size, codec=codec, num_devices=placement.size)
    budget = plan_pool(
        limits, page_nbytes, memory, memory_bytes=None, pages_override=args.pages, programs_for=programs_for
    )
    show(budget, tried)
    programs = programs_for(replace(limits, num_pages=budget.num_pages), budget.num_pages)
    started = time.perf_counter()
    if args.all:
        programs.compile_all()
    else:
        programs.compile_largest()
    budget.check(programs)
    print(f"compiled for {budget.num_pages} pages in {time.perf_counter() - started:.0f} s")
    show_programs(programs)
    print("\n".join(budget.lines(programs)))


def parse() -> argparse.Namespace:
    """By default 16 layers of the Llama-3-8B shape."""
    parser = argparse.ArgumentParser(description="Sizes the KV cache of a TPU that need not be there.")
    parser.add_argument("--topology", default="v5e:1x1", help=f"of {', '.join(USABLE_GIB)} (default: %(default)s)")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--utilization", type=float, default=0.9)
    parser.add_argument("--backend", default="xla")
    parser.add_argument("--pages", type=int, help="instead of fitting their number")
    parser.add_argument("--all", action="store_true", help="compile every program for the pool, not only the largest")
    sizes = {"layers": 16, "hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "vocab": 128_256}
    for name, default in (sizes | {"max_num_seqs": 64, "max_model_len": 8192}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    return parser.parse_args()


def abstract_weights(spec: ModelSpec, layout: Layout, placement: Placement) -> dict[str, Any]:
    """The stacked weight tree's shapes in bfloat16, on devices that need not exist."""

    def abstract(name: str, *dims: int) -> jax.ShapeDtypeStruct:
        return placement.abstract(dims, jnp.bfloat16, placement.weight(name, len(dims)))

    weights: dict[str, Any] = {name: abstract(name, *leaf.info.shape) for name, leaf in layout.top.items()}
    weights["layers"] = {name: abstract(name, spec.num_layers, *leaf.info.shape) for name, leaf in layout.layer.items()}
    return weights


def show(budget: Budget, tried: list[Programs]) -> None:
    """What was measured, and the lines through it."""
    for programs in tried:
        print(f"tried {programs.num_pages} pages, {programs.compile_s:.0f} s")
        show_programs(programs)
    if len(tried) >= 2:
        for pair in zip(tried[-2].memory, tried[-1].memory, strict=True):
            fixed, per_page = fit_line(*((p.num_pages, m.temp_bytes) for p, m in zip(tried[-2:], pair, strict=True)))
            predicted = (fixed + per_page * budget.num_pages) / MIB
            print(
                f"{pair[0].name}: a = {fixed / MIB:.1f} MiB, b = {per_page / budget.page_nbytes:.2f} pages per page; "
                f"{predicted:.1f} MiB at {budget.num_pages} pages"
            )
    print(f"chosen: {budget.num_pages} pages of {budget.page_nbytes / MIB:.2f} MiB, {budget.reason}")


def show_programs(programs: Programs) -> None:
    for one in programs.memory:
        print(f"  {one.name}: {one.temp_bytes / MIB:.1f} MiB of temporaries, {one.code_bytes / MIB:.1f} of code")


if __name__ == "__main__":
    main()
