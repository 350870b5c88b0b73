"""Draws what memory is divided into, a stacked bar for each device or plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxkv.pictures.markup import COLOURS, Picture, svg, tag, text, title

UNITS = {"GiB": 2**30, "MiB": 2**20}
MAX_PARTS = 6
WIDTH, BAR, GAP, LEFT, TOP = 960, 28, 26, 150, 64


def stacked_bars(
    said: str, parts: Sequence[str], bars: Sequence[tuple[str, Sequence[int], str]]
) -> Picture:
    """Draws bars, each (label, bytes of each part, what its end says), on one scale: in GiB, or in
    MiB where no bar has a GiB.

    parts: their names, at most six; "left" is drawn in grey. Raises: ValueError if a bar has not
    one size per part.
    """
    _check(parts, bars)
    pairs = zip(parts, COLOURS, strict=False)
    shades = ["var(--kept)" if name == "left" else colour for name, colour in pairs]
    longest = max([1, *(sum(sizes) for _, sizes, _ in bars)])
    unit = "GiB" if longest >= UNITS["GiB"] else "MiB"
    scale, said = (WIDTH - LEFT - 190) / longest, f"{said}, {unit}"
    lines = [text(12, 24, said, class_="head")]
    for i, (name, shade) in enumerate(zip(parts, shades, strict=True)):
        lines.append(tag("rect", fill=shade, x=12 + 150 * i, y=36, width=12, height=12))
        lines.append(text(30 + 150 * i, 46, name))
    for i, (label, sizes, end) in enumerate(bars):
        y, x = TOP + i * (BAR + GAP), float(LEFT)
        lines.append(text(LEFT - 10, y + 18, label, text_anchor="end"))
        for name, size, shade in zip(parts, sizes, shades, strict=True):
            width, amount = size * scale, f"{size / UNITS[unit]:.2f}"
            box = {"x": x, "y": y, "width": width, "height": BAR}
            lines.append(tag("rect", title(f"{name}: {amount} {unit}"), fill=shade, **box))
            lines.append(tag("path", class_="edge", d=f"M{x:.1f} {y}v{BAR}"))
            if width > 50:
                middle = {"text_anchor": "middle", "class_": "soft"}
                lines.append(text(x + width / 2, y + BAR + 14, amount, **middle))
            x += width
        lines.append(text(x + 8, y + 18, end))
    sums = (
        f"{label}: "
        + ", ".join(f"{n} {x / UNITS[unit]:.2f}" for n, x in zip(parts, sizes, strict=True))
        for label, sizes, _ in bars
    )
    return svg(said, "; ".join(sums), WIDTH, TOP + len(bars) * (BAR + GAP), lines)


def _check(parts: Any, bars: Any) -> None:
    if not isinstance(parts, Sequence) or len(parts) > MAX_PARTS:
        raise ValueError(f"parts: expected at most {MAX_PARTS} names, got {parts!r:.80}")
    for bar in bars if isinstance(bars, Sequence) else [bars]:
        is_bar = isinstance(bar, Sequence) and len(bar) == 3 and isinstance(bar[1], Sequence)
        if not is_bar or len(bar[1]) != len(parts):
            raise ValueError(
                f"bars: expected bars of {len(parts)} parts, each (label, sizes, text), got "
                f"{bar!r:.80}"
            )
