"""Draws the prefix cache: which beginnings of sequences are kept, and where they part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxkv.config import one_or_several
from jaxkv.pictures.markup import Picture, hatch, shorten, svg, tag, text, title

MAX_ENDS = 60
"""Ends of branches, each a line of the picture."""

MAX_RUNS = 400
"""Boxes of one picture."""

LEFT, TOP, WIDTH, LINE = 12, 62, 800, 22


@dataclass(frozen=True, slots=True)
class CachedPage:
    """Holds a page of the prefix index: the page before it, if any, its token ids, and how many
    sequences hold it now.
    """

    page: int
    parent: int | None
    tokens: tuple[int, ...]
    num_holders: int = 0


@dataclass(slots=True)
class _Run:
    """Collects pages that follow each other without a branch, with as many holders each. `start`
    counts the pages before it; `line` and `num_lines` say where it is drawn.
    """

    pages: list[CachedPage]
    start: int
    after: list[_Run] = field(default_factory=list)
    num_pages: int = 0
    line: int = 0
    num_lines: int = 0


def prefix_tree(
    pages: Sequence[CachedPage], decode: Callable[[Sequence[int]], str] | None = None
) -> Picture:
    """Draws the tree from left to right, a box for each run of pages without a branch: coloured
    where sequences hold them, hatched where several do, grey where they are only kept.

    decode: makes text of token ids, for the boxes. Of more than `MAX_ENDS` ends or `MAX_RUNS` boxes
    the branches with most pages are drawn, and the pages that are left out counted.
    """
    pages = one_or_several("pages", pages, CachedPage)
    roots = _runs(pages)
    shown, num_lines = _places(roots)
    depth = max((run.start + len(run.pages) for run in shown), default=1)
    lines = [text(LEFT, 22, f"Prefix cache: {len(pages):,} pages", class_="head")]
    lines += _legend()
    for run in shown:
        lines += _box(run, WIDTH / depth, decode)
    num_shown = sum(len(run.pages) for run in shown)
    notes = [f"{len(pages) - num_shown:,} pages left out."] if num_shown < len(pages) else []
    height = TOP + num_lines * LINE
    lines += [text(LEFT, height + 14, note, class_="soft") for note in notes]
    held = sum(page.num_holders > 0 for page in pages)
    said = f"{len(pages):,} pages, {held:,} of them held by sequences now. {' '.join(notes)}"
    return svg("Prefix cache as a tree", said, 2 * LEFT + WIDTH, height + 22, lines)


def _runs(pages: Sequence[CachedPage]) -> list[_Run]:
    """Joins pages into runs, and counts the pages of each with all that follow. Returns those that
    begin sequences.
    """
    after: dict[int | None, list[CachedPage]] = {}
    for page in pages:
        after.setdefault(page.parent, []).append(page)
    roots = [_Run([page], 0) for page in after.get(None, ())]
    found = list(roots)
    for run in found:  # grows: a tree may be deeper than Python's calls
        while True:
            last = run.pages[-1]
            following = after.get(last.page, [])
            if len(following) != 1 or following[0].num_holders != last.num_holders:
                break
            run.pages.append(following[0])
        run.after = [_Run([page], run.start + len(run.pages)) for page in following]
        found += run.after
    for run in reversed(found):
        run.after.sort(key=lambda one: -one.num_pages)
        run.num_pages = len(run.pages) + sum(one.num_pages for one in run.after)
    return sorted(roots, key=lambda run: -run.num_pages)


def _places(roots: list[_Run]) -> tuple[list[_Run], int]:
    """Gives runs their lines, as far as there are some. Returns those that are drawn, and the
    number of lines.
    """
    shown, line, ahead = list[_Run](), 0, list(reversed(roots))
    while ahead and line < MAX_ENDS and len(shown) < MAX_RUNS:
        run = ahead.pop()
        run.line = line
        shown.append(run)
        ahead += reversed(run.after)
        line += not run.after
    for run in reversed(shown):
        run.num_lines = max(1, sum(one.num_lines for one in run.after))
    return shown, max((run.line + run.num_lines for run in shown), default=0)


def _box(run: _Run, scale: float, decode: Callable[[Sequence[int]], str] | None) -> list[str]:
    first, last = run.pages[0], run.pages[-1]
    x, y = LEFT + run.start * scale, float(TOP + run.line * LINE)
    width, height = len(run.pages) * scale, float(run.num_lines * LINE - 3)
    ids = f"first {first.page}, last {last.page}"
    said = f"{len(run.pages):,} pages ({ids}), held by {first.num_holders}"
    label = f"{len(run.pages):,}"
    if decode is not None:
        begins = shorten(decode(first.tokens), 200)
        said, label = f"{said}: {begins!r}", repr(begins)[1:-1]
    fill = {"fill": "#56b4e9", "fill_opacity": "0.45"} if first.num_holders else {}
    kind = "run" if first.num_holders else "run empty"
    box = {"x": x, "y": y, "width": max(width - 1.5, 0.8), "height": height}
    content = title(said)
    lines = [tag("rect", content, class_=kind, data_pages=len(run.pages), **fill, **box)]
    if first.num_holders > 1:
        strokes = hatch(x, y + height - 4, max(width - 1.5, 0.8), 4.0)
        lines.append(tag("path", class_="hatch", d=strokes))
    num_characters = int((width - 8) / 7.5)
    if num_characters >= 2:
        lines.append(text(x + 4, y + 13, shorten(label, num_characters)))
    return lines


def _legend() -> list[str]:
    held = tag("rect", fill="#56b4e9", fill_opacity="0.45", x=LEFT, y=36, width=22, height=12)
    kept = tag("rect", class_="empty", x=LEFT + 280, y=36, width=22, height=12)
    several = tag("path", class_="hatch", d=hatch(LEFT + 130, 42, 22, 4))
    return [
        *(held, text(LEFT + 28, 46, "held now"), several),
        *(text(LEFT + 158, 46, "by several"), kept, text(LEFT + 308, 46, "kept for others")),
    ]
