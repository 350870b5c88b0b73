"""Shows outputs, sessions and metrics as HTML that a notebook draws in place of their names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxkv.pictures.latency import latencies
from jaxkv.pictures.markup import Picture, escape, html, shorten, tag
from jaxkv.pictures.timeline import timeline
from jaxkv.requests.outputs import CompletionOutput, RequestOutput

MAX_ROWS = 20
"""A table of outputs shows so many completions."""

MAX_CHARACTERS = 400
"""A text longer than this is cut."""

MAX_BOXES = 64
"""A session is drawn with so many pages."""


def outputs_html(outputs: Sequence[RequestOutput]) -> Picture:
    """Shows prompts and completions as a table, and below it when the requests ran and how long
    they took. What is left out of it is said.
    """
    pairs = [(output, one) for output in outputs for one in output.outputs or (None,)]
    head = ("request", "prompt", "completion", "tokens", "ended by")
    shown = [_row(output, one) for output, one in pairs[:MAX_ROWS]]
    content = [_table(head, shown, numbers=(3,))]
    if len(shown) < len(pairs):
        content.append(
            _note(f"{len(pairs) - len(shown):,} of {len(pairs):,} completions left out.")
        )
    if any(output.metrics is not None for output in outputs):
        content.append(timeline(outputs))
        if len(outputs) > 1:
            content.append(latencies(outputs))
    return html(*content)


def _row(output: RequestOutput, one: CompletionOutput | None) -> list[str]:
    prompt = output.prompt
    if prompt is None:
        prompt = " ".join(map(str, output.prompt_token_ids[:MAX_CHARACTERS]))
    number, done = "0", "no completion"
    if one is not None:
        number, done = f"{len(one.token_ids):,}", one.finish_reason or "not yet"
    size = f"{len(output.prompt_token_ids):,} + {number}"
    name = str(output.request_id) + (f"-{one.index}" if one is not None and one.index else "")
    written = "" if one is None else one.text
    return [escape(shorten(name, 40)), _pre(prompt), _pre(written), size, escape(done)]


@dataclass(frozen=True, slots=True)
class TokenPage:
    """Holds the token ids of a page, and the page that has them now; None where they are to be
    computed when they are needed.
    """

    tokens: tuple[int, ...]
    page: int | None


def sequence_html(
    said: str, pages: Sequence[TokenPage], decode: Callable[[Sequence[int]], str] | None
) -> Picture:
    """Shows a sequence as a box for each page of its tokens; dashed where none is cached. decode:
    makes text of token ids; None: the ids are shown.
    """
    ends = MAX_BOXES // 2
    first = pages if len(pages) <= MAX_BOXES else pages[:ends]
    last = () if len(pages) <= MAX_BOXES else pages[-ends:]
    boxes = [_page(one, decode) for one in first]
    if last:
        left_out = f"{len(pages) - len(first) - len(last):,} pages left out"
        boxes += [tag("li", left_out, class_="gone"), *(_page(one, decode) for one in last)]
    return html(tag("div", escape(said)), tag("ol", "".join(boxes)) if boxes else "")


def _page(one: TokenPage, decode: Callable[[Sequence[int]], str] | None) -> str:
    where = "not cached" if one.page is None else f"page {one.page}"
    said = " ".join(map(str, one.tokens)) if decode is None else decode(one.tokens)
    content = tag("span", where, class_="soft") + _pre(said)
    return tag("li", content, **({"class_": "gone"} if one.page is None else {}))


@dataclass(frozen=True, slots=True)
class Figure:
    """Holds a counter or gauge: what it is called, said to be, and its value."""

    name: str
    help: str
    value: float


@dataclass(frozen=True, slots=True)
class Distribution:
    """Holds a histogram: (upper bound, observations at most that) in rising order; the last bound
    is "+Inf".
    """

    name: str
    help: str
    count: int
    sum: float
    buckets: tuple[tuple[str, int], ...]

    def bound(self, percent: float) -> str:
        """Returns the least bound that so many percent of the observations do not exceed."""
        return next(bound for bound, count in self.buckets if count >= self.count * percent / 100)


def metrics_html(figures: Sequence[Figure], distributions: Sequence[Distribution]) -> Picture:
    """Shows metrics as two tables: distributions with the buckets in which their percentiles are,
    and single figures.
    """
    head = ("", "count", "mean", "50% at most", "90% at most", "99% at most", "")
    some = [one for one in distributions if one.count]
    rows = [
        [
            tag("code", escape(one.name)),
            f"{one.count:,}",
            f"{one.sum / one.count:.4g}",
            *(one.bound(percent) for percent in (50, 90, 99)),
            escape(one.help),
        ]
        for one in some
    ]
    single = [
        [tag("code", escape(one.name)), f"{one.value:,.6g}", escape(one.help)] for one in figures
    ]
    content = [_table(head, rows, numbers=range(1, 6))] if rows else []
    empty = [one.name for one in distributions if not one.count]
    if empty:
        content.append(_note(f"Nothing observed yet: {', '.join(empty)}."))
    return html(*content, _table(("", "value", ""), single, numbers=(1,)))


def _pre(said: str) -> str:
    """Writes a text with its lines and spaces."""
    return tag("pre", escape(shorten(said, MAX_CHARACTERS)) or " ")


def _note(said: str) -> str:
    return tag("div", escape(said), class_="soft")


def _table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] = ()
) -> str:
    """Writes a table of cells that are markup already; `numbers` are columns set flush right."""

    def line(name: str, cells: Sequence[str]) -> str:
        written = (
            tag(name, cell or " ", **({"class_": "number"} if column in numbers else {}))
            for column, cell in enumerate(cells)
        )
        return tag("tr", "".join(written))

    body = "".join(line("td", cells) for cells in rows)
    return tag(
        "table", f"<thead>{line('th', [escape(one) for one in head])}</thead><tbody>{body}</tbody>"
    )
