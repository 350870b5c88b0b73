"""The GPU attention kernels on a GPU: compared with the float64 oracle, and timed. Run by
gpu_check.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from gpu_cases import CHUNK_CONTEXT, PAGES, QUANTISED, Case, attend, placed

MEASURED = ("8b", "70b", "70b-tp8", "mha")
BATCHES, CONTEXTS = (1, 8, 32, 64, 128, 256), (512, 2048, 4096, 8192, 32768)
REPEATS = 8
CACHE_BYTES = 60 << 20
"""Less than this of keys and values stays in an H200's cache from layer to layer, which all read
the same pages.
"""


def random_arrays(case: Case, backend: Any, seed: int) -> dict[str, Any]:
    """The pages, as the backend lays them out, in a random order; the rows' lengths are all the
    context.
    """
    import jax
    import jax.numpy as jnp

    keys = iter(jax.random.split(jax.random.key(seed), 8))
    arrays = case.arrays()
    vectors = ("q_TNH", "k_TKH", "v_TKH")
    found: dict[str, Any] = {
        name: jax.random.normal(next(keys), arrays[name][0], jnp.bfloat16) for name in vectors
    }
    num_pages, _, *page = case.page_shape
    _, layout = placed(case, backend)
    # The same few over and over: random numbers for all of a large pool would take several times
    # its memory.
    few = jax.random.normal(next(keys), (min(num_pages, 64), 1, layout.num_vectors, *page))

    @jax.jit
    def stored(few: jax.Array) -> list[jax.Array]:
        return [x[jnp.arange(num_pages) % len(x)] for x in layout.encode(few)]

    found["pages"], *scales = stored(few)
    if scales:
        (found["scales"],) = scales
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


def copy_bandwidth(nbytes: int = 4 << 30) -> float:
    """Bytes read and written per second by a copy of so many."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones(nbytes // 2, jnp.uint16)
    copy = jax.jit(lambda x: x + jnp.uint16(1))
    return 2 * x.nbytes / seconds(lambda: copy(x), repeats=5)


def matmul_rate() -> float:
    """FLOP/s of a bfloat16 matmul of 8192 x 8192 x 8192. Of random numbers: ones take less power,
    so more is done.
    """
    import jax
    import jax.numpy as jnp

    x = jax.random.normal(jax.random.key(0), (8192, 8192), jnp.bfloat16)
    dot = jax.jit(lambda a, b: a @ b)
    return 2 * 8192**3 / seconds(lambda: dot(x, x), repeats=10)


def time_case(case: Case, backend: Any) -> float:
    """Seconds of one layer."""
    import jax

    arrays = random_arrays(case, backend, 0)
    pages, scales = arrays.pop("pages"), arrays.pop("scales", None)
    # Given away and taken back: else each call would copy them.
    step = jax.jit(attend(case, backend, REPEATS), donate_argnames=("pages", "scales"))

    def run() -> Any:
        nonlocal pages, scales
        out, pages, scales = step(pages=pages, scales=scales, **arrays)
        return out

    return seconds(run, repeats=5) / REPEATS


def random_shape(seed: int) -> Any:
    import numpy as np

    from ragged import Shape

    rng = np.random.default_rng(seed)
    kv_heads, decode_only = int(rng.choice([1, 2, 4, 8])), bool(rng.random() < 0.5)
    num_bits = rng.choice([None, None, 8, 4])
    return Shape(
        kv_heads=kv_heads,
        num_heads=kv_heads * int(rng.choice([1, 2, 3, 4, 8])),
        head_dim=int(rng.choice([64, 128, 256])),
        page_size=int(rng.choice([64, 128] if num_bits else [16, 32, 64, 128])),
        window=rng.choice([None, 1, 17, 64, 200]),
        softcap=rng.choice([None, 2.0, 30.0]),
        sinks=bool(rng.random() < 0.5),
        decode_only=decode_only,
        num_bits=num_bits,
    )


def run_case(case: Any, num_processors: int) -> Any:
    """Attends a case of the tests."""
    import jax
    import jax.numpy as jnp

    from kernels_pallas import gpu
    from kernels_pallas.rows import Rows
    from ragged import LAYER, gpu_pages, sinks_of

    shape, pages = case.shape, gpu_pages(case)

    @jax.jit
    def step(q_TNH, pages, table_BW, first_BW, len_B, start_B, count_B):  # type: ignore[no-untyped-def]
        rows = Rows(table_BW, first_BW, len_B, start_B, count_B, shape.page_size, shape.window)
        schedule = gpu.make_schedule(
            rows,
            jnp.int32(case.num_decode),
            jnp.int32(case.num_rows),
            num_tokens=len(case.row_T),
            num_heads=shape.num_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            num_processors=num_processors,
            decode_only=shape.decode_only,
        )
        return gpu.ragged_paged_attention(
            q_TNH,
            pages,
            schedule,
            layer=LAYER,
            num_pages=len(case.held),
            scale=shape.head_dim**-0.5,
            softcap=shape.softcap,
            sinks_N=sinks_of(shape),
        )

    known = {name: x for name, x in case.arrays.items() if name not in ("k_TKH", "v_TKH")}
    return step(pages=pages, **known)


def check_right(seed: int) -> dict[str, Any]:
    """Error of random mixed batches against the float64 oracle of the tests."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    import numpy as np

    from ragged import NUM_ROWS, expected, random_case, stands_for

    case = random_case(seed, random_shape(seed))
    # On few processors each works through many items, one after the other.
    num_processors = (2, 132)[seed % 2]
    real_T = case.row_T < NUM_ROWS
    out, *again = (np.asarray(run_case(case, num_processors), np.float64)[real_T] for _ in range(3))
    same = all(np.array_equal(out, other) for other in again)
    want_TNH, _ = expected(stands_for(case))
    error, norm = (np.linalg.norm(x, axis=-1) for x in (out - want_TNH[real_T], want_TNH[real_T]))
    whole, worst = float(np.linalg.norm(error) / np.linalg.norm(norm)), float((error / norm).max())
    return {
        "seed": seed,
        "shape": str(case.shape),
        "num_processors": num_processors,
        "error": whole,
        "worst": worst,
        "same_bits": same,
        "ok": same and whole <= 2e-3 and worst <= 5e-3,
    }


def measured_cases(shapes: Iterable[str]) -> list[Case]:
    """The most telling ones first: a machine may be lent for minutes only."""
    cases = []
    for shape in shapes:
        cells = [(batch, context) for batch in BATCHES for context in CONTEXTS]
        cells.sort(key=lambda cell: cell != (32, 4096))
        decode = [
            Case(kernel="decode", shape=shape, page_size=64, batch=b, context=c) for b, c in cells
        ]
        small = [
            Case(kernel="decode", shape=shape, page_size=16, batch=b, context=4096)
            for b in (32, *BATCHES)
        ]
        uneven = [Case(kernel="decode", shape=shape, page_size=64, batch=32, context=4100)]
        chunk = {"kernel": "prefill", "shape": shape, "batch": 1, "context": CHUNK_CONTEXT}
        prefill = [Case(page_size=page, **chunk) for page in PAGES]
        quantised = [
            replace(case, codec=codec)
            for case in (decode[0], prefill[-1], *decode[1:])
            for codec in QUANTISED
        ]
        cases.append(
            [
                decode[0],
                small[0],
                *quantised[: len(QUANTISED)],
                *prefill,
                *quantised[len(QUANTISED) : 2 * len(QUANTISED)],
                *uneven,
                *decode[1:],
                *small[1:],
            ]
        )
        cases[-1] += quantised[2 * len(QUANTISED) :]
    # All shapes' first, then all second ones, ...
    return list(
        dict.fromkeys(case for row in zip_longest(*cases) for case in row if case is not None)
    )


def measure_cell(
    case: Case, options: argparse.Namespace, bandwidth: float, rate: float
) -> dict[str, Any]:
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
        else:
            cell["share"] = case.flops / cell["seconds"] / rate
        like_xla = case.codec == "bfloat16" and case.page_size == 64
        like_xla &= case.kernel == "prefill" or case.context == 4096
        if like_xla and case.kv_bytes <= options.max_xla_gib * 2**30:
            cell["xla_seconds"] = time_case(case, Xla())
    except (
        jax.errors.JaxRuntimeError
    ) as error:  # out of memory; the other cells can still be measured
        cell["reason"] = str(error).splitlines()[0]
    return cell


def measure(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Adds to `result`, and writes it after each cell."""
    options.ends = time.monotonic() + options.deadline
    result["right"], result["cells"] = [], []
    for seed in range(options.seeds):
        one = check_right(seed)
        result["right"].append(one)
        print(
            f"right: {one['ok']}  {one['error']:.1e} {one['worst']:.1e}  {one['shape']}", flush=True
        )
    bandwidth, rate = copy_bandwidth(), matmul_rate()
    result |= {"copy_bytes_per_s": bandwidth, "matmul_flops": rate}
    for case in measured_cases(options.shapes or MEASURED):
        result["cells"].append(measure_cell(case, options, bandwidth, rate))
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n")
