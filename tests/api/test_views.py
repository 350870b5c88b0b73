"""What notebooks show of an engine are its own numbers."""

import asyncio
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from jaxkv import LLM, AsyncLLM, SamplingParams
from jaxkv.api.views import MAX_FRAMES, PageRecording, cached_pages, page_frame
from jaxkv.pictures import chrome_trace
from jaxkv.pictures.timeline import phases
from jaxkv.testing import blocking, engine_of
from tiny import SMALL

pytestmark = pytest.mark.usefixtures("quick_compile")

GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
OPTIONS = SMALL | {"max_num_seqs": 2, "num_gpu_blocks_override": 14}
PROMPTS = [{"prompt_token_ids": [*range(3, 30), *range(30 + i, 40 + 3 * i)]} for i in range(6)]


@pytest.fixture(scope="module")
def llm(checkpoint):
    """Has pages for a part of what is asked for."""
    return LLM(checkpoint, **OPTIONS)


def drawn(picture: str) -> ElementTree.Element:
    return ElementTree.fromstring(picture)


def test_a_recording_has_the_allocators_numbers_of_each_step(llm, monkeypatch):
    engine, expected = engine_of(llm), []

    def look(scheduler):
        scheduler.check()
        allocator = scheduler.allocator
        references = {page: n for page, n in enumerate(allocator._references) if n}
        listed = set(filter(allocator.is_listed, range(allocator.num_pages)))
        expected.append((references, listed - references.keys(), allocator.num_free))

    monkeypatch.setattr(engine, "watchers", [look])
    session = llm.session(PROMPTS[0])  # pages that are kept longer than others are cached too
    expected.clear()
    with session, llm.record_pages() as pages:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert len(pages.frames) == pages.num_steps == len(expected) > 5
    for step, (frame, (references, cached, num_free)) in enumerate(
        zip(pages.frames, expected, strict=True)
    ):
        assert (frame.step, frame.references(), {*frame.cached}) == (step, references, cached)
        assert frame.num_pages - len(references) == num_free
    assert any(count > 1 for frame in pages.frames for count in frame.references().values())
    names = {name for frame in pages.frames for name, _ in frame.holders}
    assert names == {f"request {output.request_id}" for output in outputs}
    assert len(drawn(pages._repr_html_()).findall(".//{*}g[@class='frame']")) == len(expected)
    llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    assert len(pages.frames) == pages.num_steps < len(expected)
    assert engine.watchers == [look]


def test_an_async_llm_records_and_draws_the_same(llm, checkpoint):
    async def main() -> None:
        async with AsyncLLM(checkpoint, **OPTIONS) as served:
            engine = engine_of(served)
            engine.programs.executables = engine_of(llm).programs.executables
            seen: list[int] = []
            engine.watchers.append(lambda scheduler: seen.append(scheduler.allocator.num_used))
            async with served.record_pages() as pages:
                first = [one async for one in served.generate(PROMPTS[0], GREEDY)][-1]
            await served.is_sleeping()
            num_recorded = pages.num_steps
            again = [one async for one in served.generate(PROMPTS[0], GREEDY)][-1]
            assert again.outputs[0].token_ids == first.outputs[0].token_ids
            assert pages.num_steps == num_recorded < len(seen)
            used = [len(frame.references()) for frame in pages.frames]
            assert used == seen[:num_recorded]
            assert {name for frame in pages.frames for name, _ in frame.holders}
            assert await served.prefix_tree() == blocking(served).prefix_tree()
            drawn(await served.prefix_tree())
            pages.stop()

    asyncio.run(main())


def test_a_long_recording_keeps_steps_evenly(llm):
    recording, scheduler = PageRecording(engine_of(llm)), engine_of(llm).scheduler
    assert recording._repr_html_() is None
    for _ in range(5 * MAX_FRAMES):
        recording._note(scheduler)
    assert [frame.step for frame in recording.frames] == list(range(0, 5 * MAX_FRAMES, 8))


def test_times_of_preemption_are_noted_and_shown(llm):
    before = engine_of(llm).scheduler.num_preemptions
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    preemptions = [one for output in outputs for one in output.metrics.preemptions]
    assert len(preemptions) == engine_of(llm).scheduler.num_preemptions - before > 0
    for output in outputs:
        times = output.metrics
        borders = [border for pair in times.preemptions for border in pair]
        assert sorted(borders) == borders
        assert all(times.first_scheduled_time <= one <= times.finished_time for one in borders)
        waited = sum(end - start for start, end in times.preemptions)
        shown = (part.end - part.start for part in phases(times) if part.name == "preempted")
        assert sum(shown) == pytest.approx(waited, abs=1e-6)
    assert "preempted" in chrome_trace(outputs)


def test_notebooks_show_outputs_engine_metrics_and_sessions(llm):
    session = llm.session(PROMPTS[0])
    outputs = llm.generate([one.prompt for one in (session, session)], GREEDY, use_tqdm=False)
    assert type(outputs[:1]) is list
    for shown in (outputs, outputs[0], llm.get_metrics(), llm, session):
        drawn(shown._repr_html_())
    boxes = drawn(session._repr_html_()).findall(".//li")
    where = [box.findtext("span") for box in boxes]
    size = SMALL["block_size"]
    assert where[:-1] == [f"page {page}" for page in session.pages]
    assert where[-1] == "not cached"
    assert len(boxes) == -(-len(session) // size)
    assert boxes[0].findtext("pre") == " ".join(map(str, session.tokens[:size]))
    session.close()
    assert session._repr_html_() is None
    rows = drawn(llm.get_metrics()._repr_html_()).findall(".//tr")
    figures = {row.findtext("td/code"): [*row.itertext()][1] for row in rows}
    assert figures["jaxkv:num_preemptions"] == str(engine_of(llm).scheduler.num_preemptions)
    whole = drawn(llm._repr_html_())
    widths = [float(box.get("width")) for box in whole.findall(".//{*}rect") if len(box)]
    assert whole.findtext("pre") == llm.describe()
    assert len(widths) >= 4


def test_a_prefix_tree_has_what_the_index_lists(llm):
    llm.reset_prefix_cache()
    llm.generate(PROMPTS[:3], replace(GREEDY, max_tokens=2), use_tqdm=False)
    scheduler = engine_of(llm).scheduler
    pages = cached_pages(scheduler)
    assert sorted(page.page for page in pages) == sorted(scheduler.allocator.cached)
    size = SMALL["block_size"]
    shared = tuple(PROMPTS[0]["prompt_token_ids"][:size])
    (root,) = [page for page in pages if page.parent is None]
    assert (root.tokens, root.num_holders) == (shared, 0)
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    held = [page for page in cached_pages(scheduler) if page.num_holders]
    assert {page.page for page in held} <= {*page_frame(scheduler).references()}
    boxes = drawn(llm.prefix_tree()).findall(".//{*}rect[@data-pages]")
    assert sum(int(box.get("data-pages")) for box in boxes) == len(cached_pages(scheduler))
    stream.close()
