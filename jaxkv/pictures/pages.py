"""Draws who holds which pages of the pool: at one moment, or step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxkv.config import one_or_several
from jaxkv.pictures.markup import COLOURS, Picture, hatch, html, shorten, svg, tag, text, title

MAX_PAGES = 2048
"""Squares of one picture."""

MAX_SQUARES = 40_000
"""Squares of all steps together."""

MAX_NAMES = 14
"""Holders in the legend."""

SIZE, PITCH, LEFT, TOP = 12, 14, 56, 46


@dataclass(frozen=True, slots=True)
class PageFrame:
    """Holds who has which pages, at some moment or after the `step` that it names was launched.

    holders: (name, page ids) of each sequence that has any. cached: pages that nobody holds and the
    prefix cache finds.
    """

    num_pages: int
    holders: tuple[tuple[str, tuple[int, ...]], ...]
    cached: tuple[int, ...] = ()
    step: int | None = None

    def references(self) -> Counter[int]:
        """Counts the holders of each page that has any, as the allocator counts references."""
        return Counter(page for _, pages in self.holders for page in pages)

    def describe(self) -> str:
        """Says how the pool is used, in one line."""
        counts = self.references()
        shared = sum(count > 1 for count in counts.values())
        empty = self.num_pages - len(counts) - len(self.cached)
        when = "" if self.step is None else f"step {self.step}: "
        return (
            f"{when}{len(counts):,} of {self.num_pages:,} pages held, {shared:,} of "
            f"them by several; {len(self.cached):,} cached, {empty:,} empty"
        )


def page_map(frames: PageFrame | Sequence[PageFrame]) -> Picture:
    """Draws a square for each page, in the colour of who holds it; of one that several hold, which
    is hatched, in that of the first.

    One frame gives SVG, several give HTML with a slider over them. Of a pool of more than
    `MAX_PAGES` pages it draws those that are held, of many steps as many as `MAX_SQUARES` squares
    allow; what is left out is said below. Raises: ValueError without a frame, for frames of unlike
    pools, and for pages that the pool does not have.
    """
    frames = one_or_several("frames", frames, PageFrame)
    if not frames:
        raise ValueError("frames: expected at least one, got none: no step has run")
    for number, frame in enumerate(frames):
        _check(f"frames[{number}]", frame, frames[-1].num_pages)
    places, shown = _places(frames), _evenly(frames)
    owners = dict.fromkeys(name for frame in frames for name, _ in frame.holders)
    colour = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(owners)}
    columns = _columns(len(places))
    end = TOP + -(-len(places) // columns) * PITCH + 16
    legend = _legend(colour, end)
    notes = _left_out(frames, shown, places)
    is_several = len(shown) > 1
    *before, last = [_frame(one, places, colour) for one in shown]
    groups = [*(tag("g", one, class_="frame", style="display:none") for one in before)]
    groups.append(tag("g", last, class_="frame"))
    body = [*_grid(places, columns), *groups, *legend]
    below = end + 18 * -(-(len(legend) // 2) // 4) + 6
    body += [text(LEFT, below + 16 * i, note, class_="soft") for i, note in enumerate(notes)]
    picture = svg(
        "Pages of the KV cache",
        f"{shown[-1].describe()}. {' '.join(notes)}",
        LEFT + max(columns * PITCH, 4 * 150) + 20,
        below + 16 * len(notes) + 4,
        body,
    )
    return html(_slider(len(shown)), picture) if is_several else picture


def _check(where: str, frame: PageFrame, num_pages: int) -> None:
    if frame.num_pages != num_pages:
        raise ValueError(
            f"{where}: num_pages: expected that of the last frame, {num_pages}, got "
            f"{frame.num_pages}"
        )
    for name, pages in (*frame.holders, ("cached", frame.cached)):
        for page in (min(pages), max(pages)) if len(pages) else ():
            if not 0 <= page < num_pages:
                raise ValueError(
                    f"{where}: {name}: expected page ids from 0 to {num_pages - 1}, got {page}"
                )


def _places(frames: Sequence[PageFrame]) -> dict[int, tuple[int, int]]:
    """Returns where the pages are drawn that are: column and row, by page id."""
    num_pages = frames[-1].num_pages
    pages: Sequence[int] = range(num_pages)
    if num_pages > MAX_PAGES:
        held = {page for frame in frames for page in frame.references()}
        cached = {page for frame in frames for page in frame.cached} - held
        pages = sorted([*sorted(held), *sorted(cached)][:MAX_PAGES])
    columns = _columns(len(pages))
    return {page: (i % columns, i // columns) for i, page in enumerate(pages)}


def _columns(num_squares: int) -> int:
    return 32 if num_squares <= 512 else 64


def _evenly(frames: Sequence[PageFrame]) -> Sequence[PageFrame]:
    """Returns as many frames as there may be squares, the first and the last among them."""
    most = max(len(frame.references()) + len(frame.cached) for frame in frames)
    count = max(2, min(len(frames), MAX_SQUARES // min(max(most, 64), MAX_PAGES)))
    if count >= len(frames):
        return frames
    return [frames[i * (len(frames) - 1) // (count - 1)] for i in range(count)]


def _left_out(
    frames: Sequence[PageFrame], shown: Sequence[PageFrame], places: Mapping[int, object]
) -> list[str]:
    notes = []
    if len(shown) < len(frames):
        notes.append(f"{len(frames) - len(shown):,} of {len(frames):,} recorded steps left out.")
    last = frames[-1]
    if len(places) < last.num_pages:
        held = sum(page not in places for page in last.references())
        cached = sum(page not in places for page in last.cached)
        notes.append(
            f"{last.num_pages - len(places):,} of {last.num_pages:,} pages left out; in the last "
            f"step {held:,} of these are held and {cached:,} cached."
        )
    return notes


def _grid(places: Mapping[int, tuple[int, int]], columns: int) -> list[str]:
    """Draws all squares as empty ones, with the id of the first page of each row."""
    ids = list(places)[::columns]
    return [
        text(12, 20, "Pages of the KV cache", class_="head"),
        *(
            text(LEFT - 6, TOP + i * PITCH + 10, f"{page:,}", class_="soft", text_anchor="end")
            for i, page in enumerate(ids)
        ),
        tag("path", class_="empty", d=_squares(places, places)),
    ]


def _frame(
    frame: PageFrame, places: Mapping[int, tuple[int, int]], colour: Mapping[str, str]
) -> str:
    """Draws what has changed from empty: each page once, so that a thousand holders of the same
    pages cost no more than one.
    """
    said = frame.describe()
    paths = [title(said), text(12, 37, said, class_="soft")]
    cached = _squares(frame.cached, places)
    if cached:
        paths.append(_path(f"cached, held by nobody: {len(frame.cached):,} pages", cached, "kept"))
    shared = list[int]()
    for names, pages in _together(frame).items():
        shared += pages if len(names) > 1 else ()
        if squares := _squares(pages, places):
            said = f"{shorten(', '.join(names[:20]), 200)}: {len(pages):,} pages"
            said = f"{said}, held by {len(names):,}" if len(names) > 1 else said
            paths.append(_path(said, squares, "page", fill=colour[names[0]]))
    corners = [_corner(places[page]) for page in shared if page in places]
    if corners:
        strokes = "".join(hatch(x, y, SIZE, SIZE, SIZE / 2) for x, y in corners)
        paths.append(tag("path", class_="hatch", pointer_events="none", d=strokes))
    return "\n".join(paths)


def _together(frame: PageFrame) -> dict[tuple[str, ...], list[int]]:
    """Groups pages by who holds them."""
    holders: dict[int, list[str]] = {}
    for name, pages in frame.holders:
        for page in pages:
            holders.setdefault(page, []).append(name)
    groups: dict[tuple[str, ...], list[int]] = {}
    for page, names in holders.items():
        groups.setdefault(tuple(names), []).append(page)
    return groups


def _path(said: str, data: str, class_: str, **attributes: object) -> str:
    return tag("path", title(said), class_=class_, **attributes, d=data)


def _corner(place: tuple[int, int]) -> tuple[int, int]:
    return LEFT + place[0] * PITCH, TOP + place[1] * PITCH


def _squares(pages: Sequence[int] | Mapping[int, object], places: Mapping) -> str:
    corners = [_corner(places[page]) for page in pages if page in places]
    return "".join(f"M{x} {y}h{SIZE}v{SIZE}h-{SIZE}z" for x, y in corners)


def _legend(colour: Mapping[str, str], y: int) -> list[str]:
    """Draws samples and names, four in a row: a list of pairs."""
    items = [
        (tag("rect", class_="empty", x=0, y=0, width=SIZE, height=SIZE), "empty"),
        (tag("rect", class_="kept", x=0, y=0, width=SIZE, height=SIZE), "cached"),
        (tag("path", class_="hatch", d=hatch(0, 0, SIZE, SIZE, SIZE / 2)), "held by several"),
    ]
    for name, shade in list(colour.items())[:MAX_NAMES]:
        box = tag("rect", fill=shade, x=0, y=0, width=SIZE, height=SIZE)
        items.append((box, shorten(name, 20)))
    if len(colour) > MAX_NAMES:
        items.append((tag("g", " "), f"and {len(colour) - MAX_NAMES:,} more"))
    drawn = []
    for i, (sample, said) in enumerate(items):
        at_x, at_y = LEFT + i % 4 * 150, y + i // 4 * 18
        drawn.append(tag("g", sample, transform=f"translate({at_x} {at_y})"))
        drawn.append(text(at_x + SIZE + 6, at_y + 10, said))
    return drawn


_SHOW = (
    "const all=this.closest('.jaxkv').querySelectorAll('g.frame');"
    "all.forEach((one,i)=>one.style.display=i==this.value?'':'none');"
    "this.ariaValueText=all[this.value].querySelector('title').textContent"
)


def _slider(count: int) -> str:
    knob = tag(
        "input",
        type="range",
        min=0,
        max=count - 1,
        value=count - 1,
        style="width:22em;vertical-align:middle",
        oninput=_SHOW,
    )
    return tag("label", f"step {knob}", style="padding:6px 12px;display:block")
