"""The first minutes on a TPU or GPU that nobody here has: one command, one JSON file, one picture.

    python scripts/first_contact.py --out contact        # contact.json and contact.svg
    python scripts/first_contact.py --out contact --quick        # everything very small, anywhere

In turn, each in processes of its own: `jaxkv selftest`, which compares the attention kernels with
XLA's; the time of a layer's attention by kernels and by XLA, as share of the bandwidth of a large
copy; an engine with random weights of Llama-3.1-8B's shape, or of 1.1B where that does not fit. A
stage that fails is noted, and the others go on. The JSON file is written after every stage. What to
do with both: docs/first-contact.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench_generate import environment
from gpu_cases import CHUNK_CONTEXT, Case

KERNELS = {"tpu": "pallas_tpu", "gpu": "mosaic_gpu"}
ENGINES = {"tpu": "auto", "gpu": "mosaic_gpu"}
"""This is measured beside XLA; "auto" on a TPU takes the kernels where their self-test passes."""

BYTES_OF_8B = 20 << 30
"""A device with less gets the model of 1.1B."""

STAGE_S = 1800
REPOSITORY = Path(__file__).parents[1]


def cases(quick: bool) -> list[Case]:
    if quick:
        return [Case(kernel="decode", shape="70b-tp8", page_size=64, batch=2, context=128)]
    decode = [
        Case(kernel="decode", shape=shape, page_size=64, batch=batch, context=2048, codec=codec)
        for shape in ("8b", "70b-tp8")
        for batch in (1, 64)
        for codec in ("bfloat16", "int8")
    ]
    chunk = Case(kernel="prefill", shape="8b", page_size=64, batch=1, context=CHUNK_CONTEXT)
    return [*decode, chunk]


def time_kernels(quick: bool) -> dict[str, Any]:
    """In a process of its own: each case by the kernels and by XLA."""
    import jax
    from gpu_bench import copy_bandwidth, time_case

    from jaxkv.ops.attention import BACKENDS

    device, *_ = jax.devices()
    stats = device.memory_stats() or {}
    bandwidth = copy_bandwidth((16 if quick else 1024) << 20)
    names = [name for platform, name in KERNELS.items() if platform == device.platform]
    found = []
    for case in cases(quick):
        cell: dict[str, Any] = {"case": label(case), "bytes": case.kv_bytes}
        for name in [*names, "xla"]:
            try:
                seconds = time_case(case, BACKENDS[name])
            except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
                # It does not fit or is refused; the others can still be measured.
                cell[name] = {"reason": f"{type(error).__name__}: {error}".splitlines()[0]}
                continue
            cell[name] = {"seconds": seconds}
            if case.kernel == "decode":
                cell[name]["share"] = case.kv_bytes / seconds / bandwidth
        found.append(cell)
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "num_devices": len(jax.devices()),
        "runtime": device.client.platform_version,
        "memory_bytes": stats.get("bytes_limit"),
        "copy_bytes_per_s": bandwidth,
        "cells": found,
    }


def label(case: Case) -> str:
    """The case in a few words."""
    return f"{case.kernel} {case.shape} {case.codec}, {case.batch} x {case.context:,}"


def stage(command: list[str], output: Path | None = None) -> dict[str, Any]:
    """Returns what a process writes as JSON, to `output` or as its last lines; or why it failed."""
    paths = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    print(f"== {' '.join(command)}", flush=True)
    try:
        done = subprocess.run(
            [sys.executable, *command],
            env=os.environ | {"PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=STAGE_S,
        )
    except subprocess.TimeoutExpired:
        return {"reason": f"it did not end within {STAGE_S} s"}
    text = output.read_text() if output is not None and output.exists() else done.stdout
    begin = text.find("{\n")
    if begin < 0 or (done.returncode and output is not None):
        lines = done.stdout.strip().splitlines() or ["it said nothing"]
        return {"reason": f"status {done.returncode}: {lines[-1]}", "output": lines[-40:]}
    try:
        found: dict[str, Any] = json.JSONDecoder().raw_decode(text, begin)[0]
    except ValueError as error:
        return {"reason": f"no JSON: {error}", "output": text.splitlines()[-40:]}
    return found


def engine(backend: str, shape: str, quick: bool) -> dict[str, Any]:
    """Decode steps and a mixed load of an engine with random weights."""
    sizes = ["--batches", "1,64", "--contexts", "1024", "--requests", "128", "--copy-mib", "256"]
    if quick:
        sizes = ["--batches", "1,2", "--contexts", "32", "--requests", "4", "--copy-mib", "16"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "engine.json"
        script = str(Path(__file__).with_name("gpu_generate.py"))
        options = ["--shape", shape, "--backends", backend, "--json", str(path)]
        found = stage([script, *options, *sizes], path)
    return found.get(backend, found)


def faults(result: dict[str, Any]) -> list[str]:
    """Returns what went wrong, a line each."""
    lines = [
        f"{name}: {result[name]['reason']}"
        for name in ("selftest", "kernels")
        if "reason" in result[name]
    ]
    lines += [
        f"selftest: {one['backend']}, {one['case']}: {one['fault']}"
        for one in result["selftest"].get("found", ())
        if one["fault"] is not None
    ]
    for cell in result["kernels"].get("cells", ()):
        lines += [
            f"kernels: {cell['case']} by {name}: {of['reason']}"
            for name, of in cell.items()
            if isinstance(of, dict) and "reason" in of
        ]
    lines += [
        f"engine: {name}: {of['reason']}" for name, of in result["engine"].items() if "reason" in of
    ]
    return lines


def picture(result: dict[str, Any]) -> Any:
    """Bars: of each decode case the share of the bandwidth, by kernels and by XLA; what an engine
    decodes.
    """
    from jaxkv.pictures import markup

    kernels = result["kernels"]
    bars = [
        (f"{cell['case']}, {name}", of["share"], f"{of['share']:.0%}, {of['seconds'] * 1e6:.0f} us")
        for cell in kernels.get("cells", ())
        for name, of in cell.items()
        if isinstance(of, dict) and "share" in of
    ]
    bars += [
        (
            f"engine {name}, {one['batch']} rows",
            one["share"],
            f"{one['share']:.0%}, {one['tokens_per_s']:,.0f} tokens/s",
        )
        for name, of in result["engine"].items()
        for one in of.get("decode", ())
    ]
    head = f"{kernels.get('device', 'no device')}, jax {result['versions']['jax']}"
    body = [markup.text(12, 24, head, class_="head")]
    tried = result["selftest"].get("found", ())
    failed = sum(one["fault"] is not None for one in tried)
    said = f"self-test: {len(tried)} cases, {failed} failed; bars: share of a copy's bandwidth"
    body.append(markup.text(12, 44, said, class_="soft"))
    left, width = 300, 420
    body.append(markup.tag("path", d=f"M{left + width} 54V{60 + 22 * len(bars)}", class_="line"))
    for i, (name, share, end) in enumerate(bars):
        y, colour = 60 + 22 * i, markup.COLOURS["xla" in name]
        body.append(markup.text(left - 8, y + 12, name, text_anchor="end"))
        long = min(share, 1.3) * width
        body.append(markup.tag("rect", x=left, y=y, width=long, height=16, fill=colour))
        body.append(markup.text(left + long + 6, y + 12, end))
    description = "; ".join(f"{name}: {end}" for name, _, end in bars)
    return markup.svg(f"First contact: {head}", description, 920, 80 + 22 * len(bars), body)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("contact"), help="without .json or .svg")
    parser.add_argument("--shape", choices=("toy", "110m", "1.1b", "8b"), help="of the engine")
    parser.add_argument("--quick", action="store_true", help="small cases and a toy engine")
    parser.add_argument("--no-selftest", action="store_true", help="leave the self-test out")
    parser.add_argument("--kernels", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kernels:
        print(json.dumps(time_kernels(options.quick), indent=1))
        return 0
    result = environment() | {"command": " ".join(sys.argv), "engine": {}, "selftest": {}}

    def write() -> None:
        options.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")

    if not options.no_selftest:
        result["selftest"] = stage(["-m", "jaxkv", "selftest", "--json"])
        write()
    quick = ["--quick"] if options.quick else []
    result["kernels"] = kernels = stage([__file__, "--kernels", *quick])
    write()
    if "reason" not in kernels:
        fits = (kernels["memory_bytes"] or 0) >= BYTES_OF_8B
        shape = options.shape or ("toy" if options.quick else "8b" if fits else "1.1b")
        result["shape"] = shape
        for backend in dict.fromkeys([ENGINES.get(kernels["platform"], "xla"), "xla"]):
            result["engine"][backend] = engine(backend, shape, options.quick)
            write()
    picture(result).save(options.out.with_suffix(".svg"))
    failed = faults(result)
    for line in failed:
        print(f"error: {line}")
    print(f"{options.out.with_suffix('.json')}, {options.out.with_suffix('.svg')}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
