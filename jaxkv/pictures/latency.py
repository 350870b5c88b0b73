"""Draws how long requests took to their first token and for each one after it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from jaxkv.config import one_or_several
from jaxkv.pictures.markup import Picture, svg, tag, text, title
from jaxkv.requests.outputs import RequestOutput

PERCENTS = (50, 90, 99)
MAX_POINTS = 200
"""Corners of one curve."""

LEFT, TOP, WIDTH, HEIGHT, GAP = 52, 60, 300, 150, 80


@dataclass(frozen=True, slots=True)
class Latencies:
    """Holds, in seconds and in rising order, the time to the first token (TTFT) of each request,
    and per output token after it (TPOT) of those with more than one.
    """

    ttft: tuple[float, ...]
    tpot: tuple[float, ...]


def measured(outputs: Iterable[RequestOutput]) -> Latencies:
    """Returns the latencies of those that have been measured; the engine's metrics count the same
    way.
    """
    ttft, tpot = [], []
    for output in outputs:
        times = output.metrics
        if times is None or times.first_token_time is None:
            continue
        ttft.append(times.first_token_time - times.arrival_time)
        num_tokens = len(output.outputs[0].token_ids) if output.outputs else 0
        if times.finished_time is not None and num_tokens > 1:
            tpot.append((times.finished_time - times.first_token_time) / (num_tokens - 1))
    return Latencies(tuple(sorted(ttft)), tuple(sorted(tpot)))


def percentile(rising: Sequence[float], percent: float) -> float:
    """Returns the least of the values that so many percent do not exceed. Raises: ValueError if
    there is none.
    """
    if not rising:
        raise ValueError("expected at least one value, got none")
    return rising[max(0, ceil(len(rising) * percent / 100) - 1)]


def latencies(outputs: RequestOutput | Iterable[RequestOutput]) -> Picture:
    """Draws which part of the requests took at most how long: TTFT and TPOT, with the 50th, 90th
    and 99th percentile.
    """
    found = measured(one_or_several("outputs", outputs, RequestOutput))
    lines, said = [text(12, 22, "Latency", class_="head")], []
    named = (("time to first token (TTFT)", found.ttft), ("per output token (TPOT)", found.tpot))
    for i, (name, rising) in enumerate(named):
        x = LEFT + i * (WIDTH + GAP)
        lines.append(text(x, TOP - 14, f"{name}, {len(rising):,} requests"))
        if rising:
            lines += _curve(x, rising)
            figures = (f"p{percent} {_say(percentile(rising, percent))}" for percent in PERCENTS)
            said.append(f"{name}: {', '.join(figures)}")
    height = TOP + HEIGHT + 24 + 16 * (len(PERCENTS))
    description = "; ".join(said) or "Nothing was measured."
    return svg("Latency of requests", description, 2 * (LEFT + WIDTH) + 60, height, lines)


def _curve(left: int, rising: Sequence[float]) -> list[str]:
    scale, bottom = WIDTH / (rising[-1] or 1.0), TOP + HEIGHT
    lines = [tag("path", class_="line", d=f"M{left} {TOP}V{bottom}H{left + WIDTH}")]
    for part in (0, 50, 100):
        y = bottom - HEIGHT * part / 100
        lines.append(text(left - 5, y + 4, f"{part}%", class_="soft", text_anchor="end"))
    lines.append(text(left, bottom + 15, "0", class_="soft"))
    end = _say(rising[-1])
    lines.append(text(left + WIDTH, bottom + 15, end, class_="soft", text_anchor="end"))
    step = max(1, -(-len(rising) // MAX_POINTS))
    ranks = [*range(step, len(rising), step), len(rising)]
    corners = ((rising[n - 1] * scale, HEIGHT * n / len(rising)) for n in ranks)
    data = "".join(f"H{left + x:.1f}V{bottom - y:.1f}" for x, y in corners)
    lines.append(tag("path", class_="edge", d=f"M{left} {bottom}{data}"))
    for i, percent in enumerate(PERCENTS):
        value = percentile(rising, percent)
        x, y = left + value * scale, bottom - HEIGHT * percent / 100
        said = f"p{percent}: {_say(value)}"
        dot = tag("circle", title(said), cx=x, cy=y, r=4, fill="#d55e00")
        lines += [dot, text(left, bottom + 32 + 16 * i, f"{percent}% took at most {_say(value)}")]
    return lines


def _say(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
