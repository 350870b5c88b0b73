"""Reads a compiled program (HLO text): which copies of weights or pool it makes, and its
collectives.

Every instruction is followed from the program's arguments: what only moves elements (a copy, a
slice, a transpose, a fusion of those) still is the argument it came from, what computes is not. So
an activation that happens to have a weight's size is never taken for one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

NAME = r"%([\w.\-]+)"
HEADER = re.compile(rf"^(?:ENTRY )?{NAME} \(.*\{{$")
INSTRUCTION = re.compile(rf"^\s+(?:ROOT )?{NAME} = (.*)$")
PART = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
CALLED = re.compile(rf"\b(?:calls|to_apply|body)={NAME}|branch_computations=\{{([^}}]*)\}}")
ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}")
ARGUMENT = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
LAYER_LOOP = re.compile(r'op_name="[^"]*\blayers/while"')
"""The decoder names its loop. Those around it go over tokens, those inside over pieces of a
layer.
"""

MOVES = {
    "copy",
    "transpose",
    "reshape",
    "slice",
    "dynamic-slice",
    "convert",
    "concatenate",
    "pad",
    "reverse",
}
MOVES |= {"all-gather"}
IN_PLACE = {"dynamic-update-slice", "scatter"}
"""Their first operand is updated where it lies; where it cannot be, the compiler adds a copy."""

COLLECTIVES = {
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
}


@dataclass(frozen=True, slots=True)
class Array:
    """Part of an instruction's result; not in HBM: in VMEM, mostly."""

    dtype: str
    dims: tuple[int, ...]
    in_hbm: bool

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        bits = 8 if self.dtype == "pred" else int((re.search(r"\d+", self.dtype) or "0")[0])
        return self.size * bits // 8


@dataclass(frozen=True, slots=True)
class Instruction:
    """`called`: computations that it runs. `text`: operands and attributes as they are printed."""

    name: str
    opcode: str
    parts: tuple[Array, ...]
    operands: tuple[str, ...]
    called: tuple[str, ...]
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """An argument, or a layer's part of it, written once more to HBM. `depth`: loops around it.
    into_vmem: to VMEM instead, by an operation of the layer loop that nothing else runs beside, so
    that a matmul begins only when all of its weight is there.
    """

    argument: str
    instruction: str
    nbytes: int
    depth: int
    into_vmem: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """nbytes: of all `count` results together, of one pass through the layer loop's body or of all
    else.
    """

    kind: str
    per_layer: bool
    count: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Origin:
    """Says where a value comes from: an argument's name, and whether it was moved on the way."""

    argument: str
    moved: bool = False


Source = Origin | tuple[Any, ...] | None
"""Of a value; of a tuple, one for each part."""


def read_program(text: str, *, slices: dict[str, int]) -> tuple[list[Copy], list[Collective]]:
    """slices: by the name of an argument, such as weights['layers']['q'], the elements of it that
    count as large.
    """
    walk = _Walk(_computations(text), slices)
    entry = re.search(rf"^ENTRY {NAME}", text, re.MULTILINE)
    if entry is None:
        raise ValueError("expected the text of a compiled program, got one without ENTRY")
    walk.run(entry[1], (), (), record=True)
    return walk.copies, _summed(walk)


def _summed(walk: _Walk) -> list[Collective]:
    totals: dict[tuple[str, bool], list[int]] = {}
    for kind, nbytes, loops in walk.collectives:
        totals.setdefault((kind, bool(walk.layer_loops & set(loops))), []).append(nbytes)
    return [
        Collective(kind=kind, per_layer=per_layer, count=len(sizes), nbytes=sum(sizes))
        for (kind, per_layer), sizes in sorted(totals.items())
    ]


@dataclass(slots=True)
class _Walk:
    """Runs through the computations from the entry, each where it is called."""

    computations: dict[str, list[Instruction]]
    slices: dict[str, int]
    copies: list[Copy] = field(default_factory=list)
    collectives: list[tuple[str, int, tuple[str, ...]]] = field(default_factory=list)
    layer_loops: set[str] = field(default_factory=set)
    is_started: bool = False
    """Whether what runs was started ahead, and others run beside it."""

    def run(
        self, name: str, given: tuple[Source, ...], loops: tuple[str, ...], *, record: bool
    ) -> Source:
        """Finds the source of the computation's result, of the sources of its parameters. `record`:
        not inside a fusion.
        """
        sources: dict[str, Source] = {}
        source: Source = None
        for each in self.computations[name]:
            operands = tuple(sources.get(operand) for operand in each.operands)
            if each.opcode == "parameter":
                source = given[int(each.text.split(")")[0])] if given else self._argument(each)
            else:
                source = self._source(each, operands, loops, record)
            if record:
                self._record(each, source, loops)
                source = _settled(source)
            sources[each.name] = source
        return source

    def _argument(self, parameter: Instruction) -> Source:
        found = ARGUMENT.search(parameter.text)
        name = found[1].replace("\\", "") if found else parameter.name
        return Origin(name) if name in self.slices else None

    def _source(
        self, each: Instruction, operands: tuple[Source, ...], loops: tuple[str, ...], record: bool
    ) -> Source:
        first = operands[0] if operands else None
        if each.opcode == "tuple":
            return operands
        if each.opcode == "get-tuple-element":
            found = re.search(r"index=(\d+)", each.text)
            return first[int(found[1])] if isinstance(first, tuple) and found else None
        if each.opcode == "while":
            return self._loop(each, first, (*loops, each.name), record)
        if each.opcode == "conditional":
            given = operands[1:] if len(each.called) > 1 else operands
            branches = zip(each.called, given, strict=True)
            results = [self.run(name, (one,), loops, record=record) for name, one in branches]
            return next((result for result in results if result is not None), None)
        if each.opcode == "fusion":
            return self.run(each.called[0], operands, loops, record=False)
        if each.opcode.endswith("-start"):
            return self._started(each, operands, loops, record)
        if each.opcode.endswith("-done"):
            return first[1] if isinstance(first, tuple) and len(first) > 1 else None
        if each.opcode == "call":
            return self.run(each.called[0], operands, loops, record=record)
        if each.opcode == "custom-call":
            return _aliased(each, operands)
        if each.opcode in MOVES:
            return next(
                (Origin(one.argument, True) for one in operands if isinstance(one, Origin)), None
            )
        return first if each.opcode in IN_PLACE | {"bitcast", "optimization-barrier"} else None

    def _loop(
        self, each: Instruction, init: Source, loops: tuple[str, ...], record: bool
    ) -> Source:
        if LAYER_LOOP.search(each.text):
            self.layer_loops.add(each.name)
        return self.run(each.called[0], (init,), loops, record=record)

    def _started(
        self, each: Instruction, operands: tuple[Source, ...], loops: tuple[str, ...], record: bool
    ) -> Source:
        """Returns (operands, result, ...) as the matching -done takes it apart."""
        if each.called:
            self.is_started = True
            found = self.run(each.called[0], operands, loops, record=record)
            self.is_started = False
            return (operands, found)
        if each.opcode.removesuffix("-start") in MOVES:
            return (
                operands,
                next((Origin(o.argument, True) for o in operands if isinstance(o, Origin)), None),
            )
        return None

    def _record(self, each: Instruction, source: Source, loops: tuple[str, ...]) -> None:
        kind = each.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            self.collectives.append((kind, max(part.nbytes for part in each.parts), loops))
        is_ahead = self.is_started or each.opcode.endswith("-start")
        waits = not is_ahead and bool(self.layer_loops & set(loops))
        for origin, part in _moved(each, source):
            if (part.in_hbm or waits) and part.size >= self.slices[origin.argument]:
                copy = Copy(
                    argument=origin.argument,
                    instruction=each.name,
                    nbytes=part.nbytes,
                    depth=len(loops),
                    into_vmem=not part.in_hbm,
                )
                self.copies.append(copy)


def _moved(each: Instruction, source: Source) -> Iterator[tuple[Origin, Array]]:
    """Returns what the instruction itself has moved, with where to."""
    if each.opcode in ("parameter", "tuple", "get-tuple-element", "while", "conditional", "call"):
        return
    if each.opcode.endswith("-start"):
        if each.called or not isinstance(source, tuple):
            return  # its computation was recorded on its own
        # A copy's destination comes first, elsewhere the operands do. What leaves VMEM again was
        # there to be used: the compiler makes room.
        is_copy = each.opcode == "copy-start"
        source, parts = source[1], each.parts[:1] if is_copy else each.parts[1:2]
        if is_copy and not each.parts[1].in_hbm:
            return
    else:
        parts = each.parts
    pairs = (
        zip(source, parts, strict=False)
        if isinstance(source, tuple)
        else ((source, part) for part in parts[:1])
    )
    for one, part in pairs:
        if isinstance(one, Origin) and one.moved:
            yield one, part


def _aliased(call: Instruction, operands: tuple[Source, ...]) -> Source:
    """Says which operands a kernel's results alias: they are its own, but for those that take over
    an operand's memory.
    """
    start = call.text.find("output_to_operand_aliasing=")
    found = (
        {m[1]: operands[int(m[2])] for m in ALIAS.finditer(call.text, start)} if start >= 0 else {}
    )
    return found[""] if "" in found else tuple(found.get(str(i)) for i in range(len(call.parts)))


def _settled(source: Source) -> Source:
    """Forgets the moves of a copy that is recorded; only what is moved again counts."""
    if isinstance(source, tuple):
        return tuple(map(_settled, source))
    return source and Origin(source.argument)


def _computations(text: str) -> dict[str, list[Instruction]]:
    computations: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in text.splitlines():
        if header := HEADER.match(line):
            current = computations.setdefault(header[1], [])
        elif match := INSTRUCTION.match(line):
            current.append(_instruction(match[1], match[2]))
    return computations


def _instruction(name: str, rest: str) -> Instruction:
    end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    opcode, _, text = rest[end:].strip().partition("(")
    operands = text[: _closing("(" + text) - 1]
    called = [
        each for m in CALLED.finditer(text) for each in (m[1] and [m[1]]) or re.findall(NAME, m[2])
    ]
    parts = tuple(
        Array(m[1], tuple(map(int, filter(None, m[2].split(",")))), "S(" not in (m[3] or ""))
        for m in PART.finditer(rest[:end])
    )
    return Instruction(name, opcode, parts, tuple(re.findall(NAME, operands)), tuple(called), text)


def _closing(text: str) -> int:
    """Finds where the parenthesis closes that the text begins with."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"expected a closing parenthesis in {text[:80]!r}")
