"""Measures `update_weights` of arrays on the engine's device beside the same in host memory.

    python scripts/bench_update.py --shape 8b --json out.json  # where three copies have room
    python scripts/bench_update.py --shape 110m  # anywhere

The arrays are a checkpoint's tensors, as a trainer in the same process has them. Both kinds take
turns in one engine. Printed: seconds of each update (the first compiles what copies on the device)
and bytes per second; how much host memory the process has had at most; what the device had at most,
where it says so. A CPU reads both kinds of arrays where they are.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from bench_generate import environment
from bench_models import SHAPES, draw, leaves

from jaxkv import LLM


def tensors(config: dict[str, Any]) -> dict[str, jax.Array]:
    """Draws a checkpoint's arrays on the default device, one after the other."""
    rng = np.random.default_rng(0)
    return {name: jax.device_put(draw(rng, dims)) for name, dims in leaves(config)}


def seconds(llm: LLM, arrays: dict[str, Any]) -> float:
    start = time.perf_counter()
    llm.update_weights(arrays)
    return round(time.perf_counter() - start, 3)


def peak_host_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="110m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    config = SHAPES[asked.shape]
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(config))
        llm = LLM(
            directory,
            load_format="dummy",
            skip_tokenizer_init=True,
            lazy_compile=True,
            max_model_len=1024,
            max_num_seqs=8,
            num_gpu_blocks_override=256,
        )
        given = tensors(config)
        nbytes = sum(x.nbytes for x in given.values())
        before = peak_host_bytes()
        first = seconds(llm, given)
        on_device = [seconds(llm, given) for _ in range(asked.rounds)]
        host_growth = peak_host_bytes() - before
        in_host = {name: np.array(x) for name, x in given.items()}
        by_turns = [(seconds(llm, given), seconds(llm, in_host)) for _ in range(asked.rounds)]
    statistics = jax.devices()[0].memory_stats() or {}
    result = environment() | {
        "command": " ".join(sys.argv),
        "device": jax.devices()[0].device_kind,
        "nbytes": nbytes,
        "first_s": first,
        "on_device_s": on_device,
        "host_growth_bytes": host_growth,
        "by_turns_device_host_s": by_turns,
        "peak_device_bytes": statistics.get("peak_bytes_in_use"),
    }
    print(f"{asked.shape}, {nbytes} bytes; the first update of arrays on the device: {first} s")
    for name, spent in zip(
        ("on the device", "in host memory"), np.transpose(by_turns), strict=True
    ):
        print(f"{name:15s}{np.median(spent):8.3f} s {nbytes / np.median(spent) / 1e9:8.2f} GB/s")
    print(f"host memory grew by {host_growth} bytes with arrays on the device")
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
