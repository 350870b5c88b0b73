"""Tile sizes of the TPU kernels by what the compiler issues for them, kept in kernels_pallas/tuned/
as budgets.

    # every budgeted case, with the tiles that `choose_tiles` gives
    python scripts/tune_tpu.py
    # also with half and twice of each tile size
    python scripts/tune_tpu.py --sweep --shape 8b
    # instead of keeping what the same compiler found before
    python scripts/tune_tpu.py --chip v6e --again
    # with another jax and libtpu: budgets that hold for both
    python scripts/tune_tpu.py --widen

Needs pip install "jaxkv[tpu]", no TPU. Each case takes some 9 s of one core, a sweep three to five
times that. What is done is written at once, so that the same command goes on after a stop.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from jaxkv.tools.apart import compile_apart
from jaxkv.tools.check import ALL, AT_ONCE, TARGETS, named_cases, versions
from jaxkv.tools.kernels import KERNELS, SHAPES, Case

TUNED = Path(__file__).parents[1] / "kernels_pallas" / "tuned"
MARGIN = 0.03
"""Added to the ratio that was found: another compiler's choices, not another kernel."""

FIGURES = ("issue_cycles", "measured", "ratio", "spills")
TILES = {"decode": ("decode_pages",), "prefill": ("prefill_pages", "prefill_queries")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chip", choices=TARGETS, action="append")
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--kernel", choices=KERNELS, action="append")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--widen", action="store_true")
    args = parser.parse_args()
    cases = list(
        budgeted(args.chip or TARGETS, args.shape or tuple(SHAPES), args.kernel or KERNELS)
    )
    missing = [case for case in cases if args.again or args.sweep or not is_known(case)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for case, entry in zip(
            missing, pool.map(sweep if args.sweep else measure, missing), strict=True
        ):
            keep(case, widened(case, entry) if args.widen else entry)
            print(
                f"{case}: {entry['measured']:.3f}, {entry['spills']} spills, {entry['tiles']}",
                flush=True,
            )


def budgeted(chips: Any, shapes: Any, kernels: Any) -> Iterator[Case]:
    """Yields what `jaxkv check --all` compiles without a model."""
    for name, dtype in ALL:
        yield from named_cases(chips, [name] if name in shapes else [], kernels, dtype=dtype)


def measure(case: Case) -> dict[str, Any]:
    found = compile_apart(case)
    if "reason" in found:
        raise SystemExit(f"{case}: {found['reason']}")
    return entry_of(case, found)


def sweep(case: Case) -> dict[str, Any]:
    """What `measure` finds, and beside it the issue cycles of the tiles around the rule's that
    spill no more.

    Where some save enough to be worth it, `choose_tiles` is to be changed.
    """
    ruled, swept = measure(case), {}
    for name in TILES[case.kernel]:
        for size in (ruled["tiles"][name] // 2, ruled["tiles"][name] * 2):
            other = replace(case, tiles=((name, size),))
            found = compile_apart(other) if size else {"reason": "no tiles"}
            print(f"  {case} {name} {size}: {found.get('ratio', found.get('reason'))}", flush=True)
            if "reason" not in found and found["spills"] <= ruled["spills"]:
                # Cycles and not their ratio to the DMAs': smaller blocks of queries read more,
                # which is not better.
                swept[f"{name} {size}"] = found["issue_cycles"]
    return ruled | {"swept": swept}


def entry_of(case: Case, found: dict[str, Any]) -> dict[str, Any]:
    names = ("kernel", "heads", "dtype", "page_size", "context", "batch", "queries")
    return {
        "shape": case.name,
        "case": {name: value for name, value in asdict(case).items() if name in names},
        "tiles": found["tiles"],
        "issue_cycles": found["issue_cycles"],
        "measured": found["ratio"],
        "ratio": with_margin(found["ratio"]),
        "at": {name: with_margin(one["ratio"]) for name, one in found["at"].items()},
        "spills": found["spills"],
        "versions": versions(),
    }


def widened(case: Case, entry: dict[str, Any]) -> dict[str, Any]:
    """Returns the kept entry of this case with the larger of each figure; this one if there is none
    with these tiles.
    """
    for kept in read(case.chip):
        if (kept["case"], kept["tiles"]) == (json.loads(json.dumps(entry["case"])), entry["tiles"]):
            both = {name: max(kept[name], entry[name]) for name in FIGURES}
            before = kept.get("at", {})
            at = {name: max(before.get(name, 0.0), one) for name, one in entry["at"].items()}
            compilers = f"{kept['versions']}; {entry['versions']}"
            return kept | both | {"at": at, "versions": compilers}
    return entry


def with_margin(ratio: float) -> float:
    return round(ratio * (1 + MARGIN), 3)


def is_known(case: Case) -> bool:
    nothing: dict[str, Any] = {
        "tiles": None,
        "issue_cycles": 0,
        "ratio": 0.0,
        "at": {},
        "spills": 0,
    }
    wanted = json.loads(json.dumps(entry_of(case, nothing)))
    return any(
        entry["case"] == wanted["case"] and wanted["versions"] in entry["versions"].split("; ")
        for entry in read(case.chip)
    )


def read(chip: str) -> list[dict[str, Any]]:
    path = TUNED / f"{chip}.json"
    return json.loads(path.read_text())["kernels"] if path.is_file() else []


def keep(case: Case, entry: dict[str, Any]) -> None:
    entry = json.loads(json.dumps(entry))
    same = [one for one in read(case.chip) if one["case"] == entry["case"]]
    others = [one for one in read(case.chip) if one not in same]
    entry = {name: value for one in same for name, value in one.items() if name == "swept"} | entry
    entries = sorted([*others, entry], key=lambda one: json.dumps(one["case"], sort_keys=True))
    lines = ",\n  ".join(json.dumps(one) for one in entries)
    TUNED.mkdir(exist_ok=True)
    (TUNED / f"{case.chip}.json").write_text(
        f'{{"margin": {MARGIN}, "kernels": [\n  {lines}\n]}}\n'
    )


if __name__ == "__main__":
    main()
