"""Takes what pictures show from an engine: its pages now or step by step, its prefix cache, its
memory.
"""

from __future__ import annotations

from array import array
from typing import Self

from jaxkv.build.memory import Budget
from jaxkv.engine.engine import Engine
from jaxkv.engine.scheduler import Scheduler
from jaxkv.pictures.markup import Picture, escape, html, tag
from jaxkv.pictures.memory import stacked_bars
from jaxkv.pictures.pages import PageFrame, page_map
from jaxkv.pictures.prefix import CachedPage, prefix_tree
from jaxkv.programs.compiled import Programs
from jaxkv.requests.intake import Intake

GIB = 2**30

MAX_FRAMES = 512
"""Steps that a recording keeps: an even number."""

KEY_LEN = 32
"""Bytes of the key of a page of the first page table; those of others have their number behind
it.
"""


def page_frame(scheduler: Scheduler, step: int | None = None) -> PageFrame:
    """Returns who holds which pages now: what runs, and what only waits for its last tokens."""
    requests = (*scheduler.running, *scheduler.leaving)
    return PageFrame(
        num_pages=scheduler.allocator.num_pages,
        holders=tuple(
            (
                f"request {request.id}",
                tuple(page for part in request.hold.parts for page in part.pages),
            )
            for request in requests
        ),
        cached=scheduler.allocator.cached,
        step=step,
    )


class PageRecording:
    """Notes at each step who holds which pages, inside of its `with` block: made by
    `LLM.record_pages`. A notebook shows it as a page map with a slider.

    It keeps `MAX_FRAMES` steps at most: of a longer run every second one, then every fourth.
    """

    def __init__(self, engine: Engine) -> None:
        self.frames: list[PageFrame] = []
        self.num_steps = 0
        self._engine = engine
        self._stride = 1

    def __enter__(self) -> Self:
        with self._engine.lock:
            self._engine.watchers.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Notes nothing more. Twice is fine."""
        with self._engine.lock:
            if self._note in self._engine.watchers:
                self._engine.watchers.remove(self._note)

    def picture(self) -> Picture:
        """Draws the steps. Raises: ValueError if there were none."""
        return page_map(self.frames)

    def _repr_html_(self) -> str | None:
        return self.picture() if self.frames else None

    def _note(self, scheduler: Scheduler) -> None:
        if self.num_steps % self._stride == 0:
            if len(self.frames) == MAX_FRAMES:
                del self.frames[1::2]
                self._stride *= 2
            self.frames.append(page_frame(scheduler, self.num_steps))
        self.num_steps += 1


def cached_pages(scheduler: Scheduler) -> list[CachedPage]:
    """Returns the prefix cache as a tree: the pages of the first page table without a window. Pages
    of one with a window are found without those before them, so nothing says what they follow.
    """
    windows = scheduler.config.windows
    if 0 not in windows:
        return []
    table = windows.index(0)
    return [
        CachedPage(one.page, one.parent, tuple(array("i", one.tokens)), one.num_holders)
        for one in scheduler.allocator.listed_pages()
        if (one.key[KEY_LEN:] or b"\0") == table.to_bytes()
    ]


def prefix_picture(engine: Engine, intake: Intake) -> Picture:
    """Draws the prefix cache, with its texts if there is a tokenizer."""
    with engine.lock:
        pages = cached_pages(engine.scheduler)
    return prefix_tree(pages, intake.decode if intake.has_tokenizer else None)


def engine_html(description: str, engine: Engine, budget: Budget) -> Picture:
    """Shows a description of an engine, its memory, and its pages now."""
    with engine.lock:
        frame, memory = page_frame(engine.scheduler), _memory(budget, engine.programs)
    return html(tag("pre", escape(description)), memory, page_map(frame))


def _memory(budget: Budget, programs: Programs) -> Picture:
    """Draws what takes a part of the device's memory; what is left stands beside it, which on a CPU
    would leave no room for the rest.
    """
    parts = budget.parts(programs)
    limit, taken = budget.memory.limit, sum(parts.values())
    left = "" if limit is None else f"{(limit - taken) / GIB:.2f} GiB left"
    return stacked_bars("Memory of the device", list(parts), [("in use", [*parts.values()], left)])
