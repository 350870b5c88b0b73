"""A picture of plans: one stacked bar each, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from jaxkv.tools.chips import GIB

WIDTH, BAR, GAP, LEFT, TOP = 960, 28, 26, 150, 64
COLOURS = ("#4c6a92", "#5aa469", "#d9a441", "#a86b9d", "#d8d8d8")


def stacked_bars(
    title: str, parts: Sequence[str], bars: Sequence[tuple[str, Sequence[int], str]]
) -> str:
    """Draws SVG of bars, each (label, bytes of each part, what its end says), on one scale in GiB.

    parts: their names, at most as many as there are colours. Raises: ValueError if a bar has not
    one size per part.
    """
    if len(parts) > len(COLOURS) or any(len(sizes) != len(parts) for _, sizes, _ in bars):
        raise ValueError(f"expected bars of {len(parts)} parts, at most {len(COLOURS)}")
    scale = (WIDTH - LEFT - 190) / max(sum(sizes) for _, sizes, _ in bars)
    lines = [_text(12, 24, title, "font-size='15' font-weight='bold'")]
    for i, (name, colour) in enumerate(zip(parts, COLOURS, strict=False)):
        lines.append(f"<rect x='{LEFT + 150 * i}' y='36' width='12' height='12' fill='{colour}'/>")
        lines.append(_text(LEFT + 150 * i + 18, 46, name))
    for i, (label, sizes, end) in enumerate(bars):
        y, x = TOP + i * (BAR + GAP), float(LEFT)
        lines.append(_text(LEFT - 10, y + 18, label, "text-anchor='end'"))
        for name, size, colour in zip(parts, sizes, COLOURS, strict=False):
            said = f"<title>{escape(name)}: {size / GIB:.2f} GiB</title>"
            box = f"x='{x:.1f}' y='{y}' width='{size * scale:.1f}' height='{BAR}'"
            lines.append(f"<rect {box} fill='{colour}'>{said}</rect>")
            if size * scale > 50:
                lines.append(
                    _text(x + size * scale / 2, y + 18, f"{size / GIB:.2f}", "text-anchor='middle'")
                )
            x += size * scale
        lines.append(_text(x + 8, y + 18, end))
    height = TOP + len(bars) * (BAR + GAP)
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height}' "
        f"font-family='sans-serif'"
    )
    return "\n".join([f"{head} font-size='12'>", *lines, "</svg>", ""])


def _text(x: float, y: int, text: str, style: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y}' {style}>{escape(text)}</text>"
