"""Draws when requests waited and ran, and writes the same as a trace for chrome://tracing and
Perfetto.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise
from typing import Self, TextIO

from jaxkv.config import one_or_several
from jaxkv.pictures.markup import Picture, hatch, shorten, svg, tag, text, title
from jaxkv.requests.outputs import RequestMetrics, RequestOutput

MAX_LANES = 100
"""Requests of one picture; a trace has all."""

COLOUR = {"queue": "var(--kept)", "prefill": "#e69f00", "decode": "#0072b2", "preempted": "#d55e00"}
LEFT, WIDTH, LANE, TOP = 120, 700, 18, 62


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a request's time: queue, prefill, decode or preempted, in Unix seconds."""

    name: str
    start: float
    end: float


def phases(metrics: RequestMetrics | None) -> list[Phase]:
    """Divides the time of a request, up to what is known of it, into phases that follow each other
    without a gap. What is computed anew after a preemption belongs to the phase that it was in.
    """
    if metrics is None:
        return []
    known = [metrics.first_scheduled_time, metrics.first_token_time, metrics.last_token_time]
    ends = [metrics.finished_time, *reversed(known)]
    end = next((one for one in ends if one is not None), None)
    if end is None:
        return []
    names, borders = ["queue"], [metrics.arrival_time]
    for name, start in zip(("prefill", "decode"), known[:2], strict=True):
        if start is not None:
            names.append(name)
            borders.append(min(max(start, borders[-1]), end))
    whole = [Phase(n, *span) for n, span in zip(names, pairwise([*borders, end]), strict=True)]
    for start, until in metrics.preemptions:
        gap = Phase("preempted", min(start, end), end if until is None else min(until, end))
        whole = [part for phase in whole for part in _around(phase, gap)]
        whole.append(gap)
    return sorted((one for one in whole if one.end > one.start), key=lambda phase: phase.start)


def _around(phase: Phase, gap: Phase) -> list[Phase]:
    """Returns what a gap leaves of a phase."""
    before = Phase(phase.name, phase.start, min(phase.end, gap.start))
    after = Phase(phase.name, max(phase.start, gap.end), phase.end)
    return [one for one in (before, after) if one.end > one.start]


def timeline(outputs: RequestOutput | Iterable[RequestOutput]) -> Picture:
    """Draws a lane for each request: in the queue, prefill, decode, preempted.

    Of more than `MAX_LANES` it draws those that came first, and says how many are left out.
    """
    lanes = _lanes(outputs)
    shown, begin = lanes[:MAX_LANES], lanes[0][1][0].start if lanes else 0.0
    span = max([parts[-1].end - begin for _, parts in shown], default=0.0) or 1.0
    scale, height = WIDTH / span, TOP + LANE * len(shown)
    lines = [text(12, 22, f"{len(shown):,} requests over {span:.3g} s", class_="head")]
    for i, (name, colour) in enumerate(COLOUR.items()):
        lines.append(_bar(name, colour, LEFT + 110.0 * i, 32.0, 22.0))
        lines.append(text(LEFT + 110 * i + 28, 42, name))
    lines += _axis(span, scale, height)
    for row, (output, parts) in enumerate(shown):
        y = TOP + row * LANE
        name = shorten(str(output.request_id), 16)
        lines.append(text(LEFT - 8, y + 11, name, text_anchor="end"))
        for part in parts:
            said = f"request {shorten(str(output.request_id), 80)}: {part.name}"
            bar = _bar(
                part.name,
                COLOUR[part.name],
                LEFT + (part.start - begin) * scale,
                float(y),
                (part.end - part.start) * scale,
                f"{said} {part.end - part.start:.3g} s",
            )
            lines.append(bar)
    notes = [f"{len(lanes) - len(shown):,} requests left out."] if len(shown) < len(lanes) else []
    lines += [text(LEFT, height + 36, note, class_="soft") for note in notes]
    totals = dict.fromkeys(COLOUR, 0.0)
    for _, parts in lanes:
        for part in parts:
            totals[part.name] += part.end - part.start
    sums = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in totals.items())
    said = f"Over all requests: {sums}. {' '.join(notes)}"
    return svg(
        "Timeline of requests", said, LEFT + WIDTH + 30, height + 30 + 16 * len(notes), lines
    )


def chrome_trace(outputs: RequestOutput | Iterable[RequestOutput]) -> str:
    """Returns the phases of all requests as JSON that chrome://tracing and Perfetto open: a thread
    for each request, times in microseconds since the first one came.
    """
    lanes, file = _lanes(outputs), StringIO()
    with ChromeTrace(file, lanes[0][1][0].start if lanes else 0.0) as trace:
        for output, _ in lanes:
            trace.add(output, f"request {output.request_id}")
    return file.getvalue()


class ChromeTrace:
    """Writes the phases of requests into a file as they are added, and its end where the `with`
    block ends: JSON that chrome://tracing and Perfetto open, a thread for each request. Times are
    in microseconds since `begin` (Unix seconds, by default now). It holds no request.
    """

    def __init__(self, file: TextIO, begin: float | None = None) -> None:
        self._file = file
        self._begin = time.time() if begin is None else begin
        self._num_requests = 0
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.write("]}")

    def add(self, output: RequestOutput, name: str) -> None:
        """Writes the phases of a request; one without times is left out. Raises: ValueError for
        what is no output.
        """
        if not isinstance(output, RequestOutput):
            raise ValueError(f"output: expected a RequestOutput, got {output!r:.80}")
        parts = phases(output.metrics)
        if not parts:
            return
        self._num_requests += 1
        place = {"pid": 1, "tid": self._num_requests}
        events = [{"ph": "M", "name": "thread_name", **place, "args": {"name": name}}]
        args = {
            "prompt_tokens": len(output.prompt_token_ids),
            "cached_tokens": output.num_cached_tokens,
            "output_tokens": [len(one.token_ids) for one in output.outputs],
            "finish_reason": [one.finish_reason for one in output.outputs],
        }
        for part in parts:
            start, end = (round((one - self._begin) * 1e6) for one in (part.start, part.end))
            times = {"ts": start, "dur": end - start}
            events.append(
                {"ph": "X", "name": part.name, "cat": "request", **place, **times, "args": args}
            )
        comma = ",\n" if self._num_requests > 1 else "\n"
        self._file.write(comma + ",\n".join(map(json.dumps, events)))


def _lanes(
    outputs: RequestOutput | Iterable[RequestOutput],
) -> list[tuple[RequestOutput, list[Phase]]]:
    """Returns the requests that have any time, by when they came. Raises: ValueError for what is
    no output.
    """
    given = one_or_several("outputs", outputs, RequestOutput)
    lanes = [(output, parts) for output in given if (parts := phases(output.metrics))]
    return sorted(lanes, key=lambda lane: lane[1][0].start)


def _bar(name: str, colour: str, x: float, y: float, width: float, said: str = "") -> str:
    """Draws a phase. Waiting is thin and what was preempted hatched, so colours say nothing
    alone.
    """
    is_waiting = name in ("queue", "preempted")
    top, height = (y + 4, 5.0) if is_waiting else (y, 13.0)
    box = {"x": x, "y": top, "width": max(width, 0.5), "height": height}
    content = title(said) if said else ""
    drawn = tag("rect", content, class_=name, fill=colour, **box)
    if name == "preempted":
        drawn += tag("path", class_="hatch", d=hatch(x, top, width, height, 3.0))
    return drawn


def _axis(span: float, scale: float, height: float) -> list[str]:
    step = 10.0 ** len(str(int(span * 1e6))) / 1e7
    step = next(step * factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 8)
    lines = []
    for i in range(int(span / step + 1e-9) + 1):
        x = LEFT + i * step * scale
        lines.append(tag("path", class_="line", d=f"M{x:.1f} {TOP - 4}V{height}"))
        said = f"{i * step:.6g} s"
        lines.append(text(x, height + 16, said, class_="soft", text_anchor="middle"))
    return lines
