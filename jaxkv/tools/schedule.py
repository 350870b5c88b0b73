"""Reads the schedule that libtpu dumps for a Pallas kernel: bundles, loops, regions, units, spills,
VMEM.

A bundle is what a core issues in one cycle, if nothing stalls. So a loop costs at least its bundles
times its trips; latency, stalls and bank conflicts are not in the dump.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+((?:[A-Z]{2})?)\s*:\s*(>*)\s*(.*)$")
BRANCH = re.compile(r"sbr\.rel \([^)]*\) target = \$region(\d+)")
REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
ALLOCATION = re.compile(
    r"#allocation(\d+) \[shape = '[^']*', space=(\w+), size = (0x[0-9a-f]+)([^\]]*)\]"
)


@dataclass(kw_only=True)
class Span:
    """Bundles start <= i < end: a loop's body, or what a forward branch skips. `own` leaves inner
    loops out.
    """

    start: int
    end: int
    depth: int
    own: int = 0
    units: dict[str, float] = field(default_factory=dict)

    def holds(self, other: Span) -> bool:
        return self.start <= other.start and other.end <= self.end and self is not other


@dataclass(kw_only=True)
class Schedule:
    """loops in order of their start; regions: what branches skip. capacity: slots per bundle of
    each unit.
    """

    bundles: int
    loops: list[Span]
    regions: list[Span]
    capacity: dict[str, int]
    spills: int
    """Registers stored to VMEM for want of room, anywhere in the kernel."""

    vmem_bytes: int
    smem_bytes: int

    @property
    def outside_loops(self) -> int:
        return self.bundles - sum(loop.end - loop.start for loop in self.loops if loop.depth == 1)

    def inner(self, outer: Span) -> list[Span]:
        return [loop for loop in self.loops if outer.holds(loop) and loop.depth == outer.depth + 1]


def read_schedule(folder: Path, kernel: str) -> Schedule:
    """Reads the schedule of the one kernel whose name contains `kernel`. Raises: ValueError unless
    there is exactly one.
    """
    found = [
        path
        for path in folder.glob(f"*{kernel}*-final_bundles.txt")
        if "schedule-analysis" not in path.name
    ]
    if len(found) != 1:
        raise ValueError(f"expected one dump of {kernel!r} in {folder}, got {len(found)}")
    prefix = re.sub(r"-\d+-final_bundles\.txt$", "", found[0].name)
    depths, texts, starts_loop = _read_bundles(found[0])
    (table,) = folder.glob(f"{_escaped(prefix)}-*-final_hlo-static-per-bundle-utilization.txt")
    capacity, rows = _read_units(table)
    if len(rows) != len(texts):
        raise ValueError(f"expected the units of {len(texts)} bundles, got {len(rows)}")
    loops, regions = _loops(depths, starts_loop), _regions(depths, texts)
    for span in [*loops, *regions]:
        inside = [loop for loop in loops if span.holds(loop)]
        inside = [loop for loop in inside if not any(other.holds(loop) for other in inside)]
        own = [
            i for i in range(span.start, span.end) if not any(k.start <= i < k.end for k in inside)
        ]
        span.own = len(own)
        span.units = {name: sum(rows[i][n] for i in own) for n, name in enumerate(capacity)}
    (memory,) = folder.glob(f"{_escaped(prefix)}-*-pre-finalize-registers-and-allocations.txt")
    allocations = {
        m[1]: m for m in ALLOCATION.finditer(memory.read_text()) if "fixed_abs" not in m[4]
    }
    space = {
        name: sum(int(m[3], 16) for m in allocations.values() if m[2] == name)
        for name in ("vmem", "smem")
    }
    return Schedule(
        bundles=len(texts),
        loops=loops,
        regions=regions,
        capacity=capacity,
        spills=sum(row[list(capacity).index("VSTORE:SPILL")] for row in rows),
        vmem_bytes=space["vmem"],
        smem_bytes=space["smem"],
    )


def _escaped(name: str) -> str:
    return re.sub(r"([\[\]*?])", r"[\1]", name)


def _read_bundles(path: Path) -> tuple[list[int], list[str], list[bool]]:
    depths: list[int] = []
    texts: list[str] = []
    starts_loop: list[bool] = []
    for line in path.read_text(errors="replace").splitlines():
        match = BUNDLE.match(line)
        if match is None:
            if texts:  # a bundle goes on over the next line
                texts[-1] += " " + line.strip()
            continue
        # An empty bundle carries no depth of its own.
        empty = not match[2] and match[3].startswith("{}")
        depths.append(depths[-1] if empty and depths else len(match[2]))
        texts.append(match[3])
        starts_loop.append(match[1] == "LB")
    return depths, texts, starts_loop


def _read_units(path: Path) -> tuple[dict[str, int], list[list[int]]]:
    """Slots per bundle of each unit, and how many of them each bundle uses."""
    lines = path.read_text().splitlines()
    head = next(i for i, line in enumerate(lines) if re.match(r"^[A-Z]+, ", line))
    # libtpu 0.0.52 has another name for it, beside which it counts what is pushed as MATPUSH.
    names = [name.strip().replace("MATMUL", "MXU") for name in lines[head].split(",")]
    capacity = dict(zip(names, map(int, lines[head + 1].split()), strict=True))
    numbers = (line.split() for line in lines[head + 2 :] if re.match(r"^\s*\d+( \d+)+\s*$", line))
    return capacity, [[int(n) for n in row] for row in numbers]


def _loops(depths: list[int], starts_loop: list[bool]) -> list[Span]:
    loops = []
    for start in (i for i, starts in enumerate(starts_loop) if starts):
        depth = depths[start]
        stop = next(
            (i for i in range(start + 1, len(depths)) if starts_loop[i] and depths[i] <= depth),
            len(depths),
        )
        # Bundles of what follows the loop may lie in its tail, and carry their own depth.
        end = max(i for i in range(start, stop) if depths[i] >= depth) + 1
        loops.append(Span(start=start, end=end, depth=depth))
    return loops


def _regions(depths: list[int], texts: list[str]) -> list[Span]:
    begins: dict[str, int] = {}
    for i, text in enumerate(texts):
        for match in REGION.finditer(text):
            begins.setdefault(match[1], i)
    branches = ((i, branch[1]) for i, text in enumerate(texts) if (branch := BRANCH.search(text)))
    targets = ((i, begins.get(region, 0)) for i, region in branches)
    return [Span(start=i + 1, end=target, depth=depths[i]) for i, target in targets if target > i]
