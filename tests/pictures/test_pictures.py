"""Pictures are well-formed, say what they were given in as many elements, and let no text become
markup.
"""

import json
from collections import Counter
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from random import Random
from xml.etree import ElementTree

import numpy as np
import pytest

from handles import filled
from jaxkv.holding.allocator import KVHandle, PageAllocator
from jaxkv.pictures import (
    CachedPage,
    ChromeTrace,
    PageFrame,
    Picture,
    chrome_trace,
    latencies,
    page_map,
    prefix_tree,
    stacked_bars,
    timeline,
)
from jaxkv.pictures.latency import measured, percentile
from jaxkv.pictures.markup import STYLE, escape, hatch
from jaxkv.pictures.pages import MAX_PAGES, MAX_SQUARES
from jaxkv.pictures.prefix import MAX_ENDS
from jaxkv.pictures.tables import (
    MAX_BOXES,
    MAX_ROWS,
    Distribution,
    Figure,
    TokenPage,
    metrics_html,
    outputs_html,
    sequence_html,
)
from jaxkv.pictures.timeline import MAX_LANES, phases
from jaxkv.requests.outputs import (
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    RequestOutputs,
)

HOSTILE = "</title></svg><script>alert('x')</script>\"' onload=\"a\" &amp; \x00\x1b\ud800\uffff]]>é\u202e🙂"


def drawn(picture: Picture) -> ElementTree.Element:
    """Parses a picture, and looks for what none may have."""
    picture.encode("ascii")
    root = ElementTree.fromstring(picture)
    for element in root.iter():
        name = element.tag.rpartition("}")[2]
        assert name not in ("script", "image", "use", "foreignObject", "a", "iframe")
        assert not {"href", "src", "onload", "onerror"} & set(element.keys())
    for image in [root, *root] if root.tag == "div" else [root]:
        if image.tag.endswith("svg"):
            assert image.get("role") == "img"
            assert image.findtext("{*}title")
            assert image.findtext("{*}desc")
    assert "url(" not in picture
    assert picture.count("//") == picture.count('xmlns="http://www.w3.org/2000/svg"')
    return root


def said(root: ElementTree.Element) -> str:
    return "".join(root.itertext())


def output(number: int, times: RequestMetrics | None, num_tokens: int = 5) -> RequestOutput:
    one = CompletionOutput(0, f"text {number}", [7] * num_tokens, finish_reason="length")
    return RequestOutput(str(number), "prompt", [1, 2, 3], [one], True, metrics=times)


def some_outputs(count: int) -> list[RequestOutput]:
    random, found = Random(0), []
    for number in range(count):
        times = np.cumsum([1e9 + 20 * random.random(), *(random.random() for _ in range(3))])
        come, scheduled, first, done = times.tolist()
        wait = scheduled - come
        metrics = RequestMetrics(come, scheduled, wait, first, done, done)
        if number % 3 == 1:
            metrics.preemptions = ((scheduled + 0.3 * (first - scheduled), first + 0.01),)
        if number % 3 == 2:
            starts = [first + part * (done - first) for part in (0.2, 0.6)]
            metrics.preemptions = tuple((one, one + 0.2 * (done - first)) for one in starts)
        found.append(output(number, metrics, num_tokens=1 + number % 9))
    return found


def allocated() -> tuple[PageAllocator, dict[str, KVHandle]]:
    """An allocator with pages that are held by one, by several, and by nobody."""
    allocator, handles = PageAllocator(96, 4), {}
    for name, length in (("a", 40), ("b", 21), ("c", 8)):
        handles[name] = filled(allocator, length)
    handles["d"] = allocator.fork(handles["a"])
    handles["e"] = allocator.fork(KVHandle(handles["a"].pages, 12))
    for name in ("b", "c"):
        keys = [(f"{name}{i}".encode(), b"") for i in range(handles[name].length // 4)]
        handles[name], _ = allocator.publish(handles[name], 0, keys)
    allocator.release(handles.pop("c"))
    allocator.check(handles.values())
    return allocator, handles


def frame_of(allocator: PageAllocator, handles: dict[str, KVHandle], step: int = 0) -> PageFrame:
    holders = tuple((name, handle.pages) for name, handle in handles.items())
    return PageFrame(allocator.num_pages, holders, allocator.cached, step)


def squares(frame: ElementTree.Element) -> dict[str, int]:
    """Counts the squares under each title of a frame, and the strokes of hatching."""
    paths = frame.findall("{*}path")
    return {path.findtext("{*}title", "hatch"): path.get("d").count("M") for path in paths}


def test_a_page_map_has_the_squares_of_the_allocators_own_tables():
    allocator, handles = allocated()
    root = drawn(page_map(frame_of(allocator, handles)))
    (frame,) = root.findall(".//{*}g[@class='frame']")
    references = Counter(page for handle in handles.values() for page in handle.pages)
    num_shared = sum(count > 1 for count in references.values())
    assert (len(references), num_shared) == (allocator.num_used, 10)
    strokes = hatch(0, 0, 12, 12, 6).count("M")
    assert squares(frame) == {
        "cached, held by nobody: 2 pages": 2,
        "b: 6 pages": 6,
        "a, d: 7 pages, held by 2": 7,
        "a, d, e: 3 pages, held by 3": 3,
        "hatch": num_shared * strokes,
    }
    assert root.find("{*}path[@class='empty']").get("d").count("M") == allocator.num_pages
    empty = allocator.num_pages - allocator.num_used - len(allocator.cached)
    assert f"16 of 96 pages held, 10 of them by several; 2 cached, {empty} empty" in said(frame)


def test_a_slider_shows_each_step_and_the_last_one_at_first():
    allocator, handles = allocated()
    frames = [frame_of(allocator, handles)]
    while len(handles) > 1:
        allocator.release(handles.pop(next(iter(handles))))
        frames.append(frame_of(allocator, handles, len(frames)))
    root = drawn(page_map(frames))
    groups = root.findall(".//{*}g[@class='frame']")
    assert [group.get("style") for group in groups] == [*["display:none"] * 3, None]
    for group, frame in zip(groups, frames, strict=True):
        held = [num for title, num in squares(group).items() if " pages" in title]
        assert sum(held) == len(frame.references()) + len(frame.cached)
        assert frame.describe() in said(group)
    knob = root.find(".//input")
    assert (knob.get("min"), knob.get("max"), knob.get("value")) == ("0", "3", "3")
    with pytest.raises(ValueError, match="frames: expected at least one"):
        page_map([])


def test_pages_that_the_pool_does_not_have_are_refused():
    good = PageFrame(4, (("a", (0, 3)),), (1,))
    for bad, said in (
        (replace(good, holders=(("a", (0, 4)),)), "a: expected page ids from 0 to 3, got 4"),
        (replace(good, holders=(("a", (-1, 2)),)), "a: expected page ids from 0 to 3, got -1"),
        (replace(good, cached=(9,)), "cached: expected page ids from 0 to 3, got 9"),
        (replace(good, num_pages=5), "num_pages: expected that of the last frame, 4, got 5"),
    ):
        with pytest.raises(ValueError, match=rf"frames\[1\]: {said}"):
            page_map([good, bad, good])


@pytest.mark.parametrize("draw", [timeline, chrome_trace, latencies, page_map, prefix_tree])
def test_what_cannot_be_drawn_is_refused(draw):
    kind = {page_map: "PageFrame", prefix_tree: "CachedPage"}.get(draw, "RequestOutput")
    name = {page_map: "frames", prefix_tree: "pages"}.get(draw, "outputs")
    for bad, said in (("a", "'a'"), (5, "5"), (None, "None")):
        with pytest.raises(ValueError, match=f"{name}: expected a {kind} or several, got {said}"):
            draw(bad)
    with pytest.raises(ValueError, match=rf"{name}: expected a {kind} or several, got \[0\]"):
        draw([[0]])


def test_what_is_no_output_gets_into_no_trace():
    with ChromeTrace(StringIO()) as trace, pytest.raises(ValueError, match=r"output: .* got 'a'"):
        trace.add("a", "name")


def test_pictures_of_a_large_pool_and_many_requests_are_bounded_and_say_so():
    holders = tuple((f"r{i}", tuple(range(900 * i, 900 * i + 90))) for i in range(60))
    frame = PageFrame(100_000, holders, tuple(range(60_000, 70_000)))
    picture = page_map([replace(frame, step=step) for step in range(100)])
    root = drawn(picture)
    assert len(picture) < 1_000_000
    shown = root.findall(".//{*}g[@class='frame']")
    assert len(shown) == MAX_SQUARES // MAX_PAGES
    assert shown[-1].findtext("{*}title").startswith("step 99: 5,400 of 100,000 pages held")
    assert sum(num for title, num in squares(shown[0]).items() if title[0] == "r") == MAX_PAGES
    assert f"{100 - len(shown)} of 100 recorded steps left out." in said(root)
    assert "97,952 of 100,000 pages left out; in the last step 3,352 of these are held" in said(
        root
    )
    assert "and 46 more" in said(root)
    many = tuple((f"r{i}", tuple(range(2000))) for i in range(128))
    assert len(page_map(PageFrame(2000, many))) < 400_000
    outputs = some_outputs(10_000)
    picture = outputs_html(outputs)  # with a timeline and latencies
    root = drawn(picture)
    assert len(picture) < 200_000
    assert f"{10_000 - MAX_LANES:,} requests left out." in said(root)
    assert f"{10_000 - MAX_ROWS:,} of 10,000 completions left out." in said(root)


@pytest.mark.parametrize("count", [0, 1, 8])
def test_a_timeline_has_a_bar_for_each_phase_and_phases_add_up_to_the_metrics(count):
    outputs, names = some_outputs(count), Counter()
    for one in outputs:
        parts, times = phases(one.metrics), one.metrics
        assert all(before.end == after.start for before, after in pairwise(parts))
        assert (parts[0].start, parts[-1].end) == (times.arrival_time, times.finished_time)
        sums = Counter()
        for part in parts:
            sums[part.name] += part.end - part.start
            names[part.name] += 1
        waited = sum(end - start for start, end in times.preemptions)
        assert sums["queue"] == pytest.approx(times.time_in_queue, abs=1e-5)
        assert sums["preempted"] == pytest.approx(waited, abs=1e-5)
        inference = times.finished_time - times.first_scheduled_time
        assert sums["prefill"] + sums["decode"] == pytest.approx(inference - waited, abs=1e-5)
    bars = [bar for bar in drawn(timeline(outputs)).findall(".//{*}rect") if len(bar)]
    assert Counter(bar.get("class") for bar in bars) == names


def test_phases_end_with_what_is_known():
    assert phases(None) == phases(RequestMetrics(arrival_time=5.0)) == []
    running = RequestMetrics(1.0, 2.0, 1.0, 4.0, 6.0, None, ((3.0, 5.0), (7.0, None)))
    spans = [(part.name, part.start, part.end) for part in phases(running)]
    assert spans == [
        ("queue", 1.0, 2.0),
        ("prefill", 2.0, 3.0),
        ("preempted", 3.0, 5.0),
        ("decode", 5.0, 6.0),
    ]
    aborted = RequestMetrics(1.0, finished_time=3.0)
    assert [part.name for part in phases(aborted)] == ["queue"]
    preempted = replace(running, finished_time=9.0)
    assert [part.name for part in phases(preempted)][-2:] == ["decode", "preempted"]
    backwards = RequestMetrics(5.0, 4.0, -1.0, 3.0, 6.0, 6.0)  # a clock that was set back
    assert [(part.name, part.start) for part in phases(backwards)] == [("decode", 5.0)]


def test_a_chrome_trace_has_the_phases_of_each_request_one_after_the_other():
    outputs = some_outputs(30)
    outputs[3].request_id = HOSTILE
    trace = json.loads(chrome_trace(outputs))
    events = trace["traceEvents"]
    threads = {one["tid"]: one["args"]["name"] for one in events if one["ph"] == "M"}
    assert sorted(threads.values()) == sorted(f"request {one.request_id}" for one in outputs)
    spans = [one for one in events if one["ph"] == "X"]
    assert min(one["ts"] for one in spans) == 0
    assert {one["pid"] for one in spans} == {1}
    by_name = {f"request {one.request_id}": one for one in outputs}
    for thread, name in threads.items():
        own = sorted((one for one in spans if one["tid"] == thread), key=lambda one: one["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(own))
        times = by_name[name].metrics
        whole = (times.finished_time - times.arrival_time) * 1e6
        assert sum(one["dur"] for one in own) == pytest.approx(whole, abs=2)
        assert len(own) == len(phases(times))
    assert json.loads(chrome_trace([]))["traceEvents"] == []


def test_percentiles_are_numpys_and_latencies_vllms():
    outputs = [*some_outputs(157), output(-1, None), output(-2, RequestMetrics(1.0))]
    found = measured(outputs)
    timed = [one for one in outputs if one.metrics and one.metrics.first_token_time]
    assert len(found.ttft) == 157
    for values, rising in (
        ([x.metrics.first_token_time - x.metrics.arrival_time for x in timed], found.ttft),
        (
            [
                (x.metrics.finished_time - x.metrics.first_token_time)
                / (len(x.outputs[0].token_ids) - 1)
                for x in timed
                if len(x.outputs[0].token_ids) > 1
            ],
            found.tpot,
        ),
    ):
        for percent in (0, 1, 50, 90, 99, 100):
            expected = np.percentile(values, percent, method="inverted_cdf")
            assert percentile(rising, percent) == expected
    root = drawn(latencies(outputs))
    assert len(root.findall(".//{*}circle")) == 6
    p99 = percentile(found.ttft, 99)
    assert f"99% took at most {p99:.3g} s" in said(root)
    drawn(latencies([]))
    with pytest.raises(ValueError, match="at least one value"):
        percentile((), 50)


def test_a_prefix_tree_has_each_page_once_in_the_place_that_it_has():
    sizes = {"system": 6, "first": 4, "second": 3, "third": 2, "other": 5}
    parents = {"first": "system", "second": "system", "third": "second"}
    last, pages = {None: None}, []
    for name, size in sizes.items():
        parent = last[parents.get(name)]
        for i in range(size):
            held = 2 if name == "system" else int(name == "third" and i > 0)
            pages.append(CachedPage(100 + len(pages), parent, (ord(name[0]),) * 4, held))
            parent = pages[-1].page
        last[name] = parent
    root = drawn(prefix_tree(pages[::-1], lambda ids: bytes(ids).decode()))
    boxes = root.findall(".//{*}rect[@data-pages]")
    runs = sorted(int(box.get("data-pages")) for box in boxes)
    assert runs == [1, 4, 4, 5, 6]  # the third is cut where somebody begins to hold it
    by_title = {box.findtext("{*}title"): box for box in boxes}
    system = by_title["6 pages (first 100, last 105), held by 2: 'ssss'"]
    end = float(system.get("x")) + float(system.get("width"))
    for title in (
        "4 pages (first 106, last 109), held by 0: 'ffff'",
        "4 pages (first 110, last 113), held by 0: 'ssss'",
    ):
        assert float(by_title[title].get("x")) == pytest.approx(end + 1.5, abs=0.11)
    held = [box for box in boxes if "empty" not in box.get("class")]
    assert sum(int(box.get("data-pages")) for box in held) == 7
    assert len(root.findall(".//{*}path[@class='hatch']")) == 2  # the legend's is one
    drawn(prefix_tree([]))


def test_a_deep_and_a_wide_prefix_tree_are_bounded():
    deep, parent = [], None
    for i in range(3_000):  # deeper than Python's calls
        deep += [CachedPage(2 * i, parent, (1,)), CachedPage(2 * i + 1, parent, (2,))]
        parent = 2 * i
    wide = [CachedPage(i, None, (1,), i % 2) for i in range(100_000)]
    for pages in (deep, wide):
        picture = prefix_tree(pages, lambda ids: "x" * 10_000)
        root = drawn(picture)
        assert len(picture) < 200_000
        boxes = root.findall(".//{*}rect[@data-pages]")
        num_shown = sum(int(box.get("data-pages")) for box in boxes)
        assert f"{len(pages) - num_shown:,} pages left out." in said(root)
        lines = {box.get("y") for box in boxes}
        assert len(lines) <= MAX_ENDS


def test_hostile_texts_become_no_markup():
    one = CompletionOutput(0, HOSTILE, [1], finish_reason="stop")
    times = RequestMetrics(1.0, 2.0, 1.0, 3.0, 4.0, 4.0)
    bad = RequestOutput(HOSTILE, HOSTILE, [1], [one, replace(one, index=1)], True, metrics=times)
    frame = PageFrame(8, ((HOSTILE, (0, 1)), (HOSTILE + "2", (1, 2))), (3,))
    pictures = [
        page_map(frame),
        page_map([frame, frame]),
        timeline(bad),
        latencies(bad),
        outputs_html([bad]),
        prefix_tree([CachedPage(0, None, (1,))], lambda ids: HOSTILE),
        sequence_html(HOSTILE, [TokenPage((1,), 0), TokenPage((1,), None)], lambda ids: HOSTILE),
        metrics_html(
            [Figure(HOSTILE, HOSTILE, 1.0)],
            [Distribution(HOSTILE, HOSTILE, 1, 1.0, (("+Inf", 1),))],
        ),
        stacked_bars(HOSTILE, [HOSTILE], [(HOSTILE, [3], HOSTILE)]),
    ]
    for picture in pictures:
        assert "alert" in said(drawn(picture)) or picture == pictures[3]
        assert "<script" not in picture
    assert ElementTree.fromstring(f"<a b='{escape(HOSTILE)}'/>").get("b").startswith("</title>")


def test_tables_show_what_there_is():
    outputs = RequestOutputs([*some_outputs(3), output(9, None, 0)])
    assert isinstance(outputs, list)
    root = drawn(Picture(outputs._repr_html_()))
    assert len(root.findall(".//tbody/tr")) == 4
    assert len(root.findall("{*}svg")) == 2
    assert len(drawn(Picture(outputs[3]._repr_html_())).findall("{*}svg")) == 0
    pages = [TokenPage((1, 2), None if i % 2 else i) for i in range(200)]
    boxes = drawn(sequence_html("a session", pages, None)).findall(".//li")
    assert len(boxes) == MAX_BOXES + 1
    assert "136 pages left out" in said(boxes[MAX_BOXES // 2])
    assert sum(box.get("class") == "gone" for box in boxes) == MAX_BOXES // 2 + 1
    buckets = (("0.1", 5), ("0.5", 9), ("+Inf", 10))
    some = Distribution("ttft", "help", 10, 4.0, buckets)
    rows = drawn(metrics_html([], [some, Distribution("none", "", 0, 0.0, ())])).findall(".//tr")
    assert [said(cell) for cell in rows[1]][:6] == ["ttft", "10", "0.4", "0.1", "0.5", "+Inf"]


def test_a_bar_is_as_wide_as_its_part():
    parts = ["weights", "recurrent states", "KV cache", "temporaries", "code", "left"]
    sizes = [[2**30 * size for size in row] for row in ([1, 2, 3, 4, 5, 6], [6, 0, 0, 0, 0, 1])]
    root = drawn(stacked_bars("memory", parts, [("one", sizes[0], ""), ("two", sizes[1], "")]))
    boxes = [box for box in root.findall(".//{*}rect") if len(box)]
    starts, widths = ([float(box.get(name)) for box in boxes] for name in ("x", "width"))
    assert sum(widths[:6]) == pytest.approx(620, abs=0.3)  # the longest one
    for i in (*range(5), *range(6, 11)):
        assert starts[i + 1] == pytest.approx(starts[i] + widths[i], abs=0.11)
    expected = [size * sum(widths) / sum(map(sum, sizes)) for row in sizes for size in row]
    assert widths == pytest.approx(expected, abs=0.1)
    with pytest.raises(ValueError, match="at most 6"):
        stacked_bars("", [*parts, "one more"], [])
    for bad in ([("bar", [1], "")], [("bar", [1, 2])], [5], 5):
        with pytest.raises(ValueError, match=r"expected bars of 2 parts, .* got [5(]"):
            stacked_bars("", ["a", "b"], bad)
    with pytest.raises(ValueError, match="parts: expected at most 6 names, got 5"):
        stacked_bars("", 5, [])


def test_a_picture_is_saved_as_what_it_is(tmp_path):
    whole, piece = timeline([]), outputs_html([])
    assert (repr(whole)[-4:], repr(piece)[-5:]) == ("SVG>", "HTML>")
    assert whole._repr_html_() == whole
    for picture, name in ((whole, "a.svg"), (whole, "a.html"), (piece, "b.html")):
        picture.save(tmp_path / name)
        assert (tmp_path / name).read_text() == picture
    for picture, name in ((piece, "b.svg"), (whole, "a.png")):
        with pytest.raises(ValueError, match="path: expected a name that ends in"):
            picture.save(tmp_path / name)


def test_both_themes_set_the_same_colours():
    blocks = [block.split("}")[0] for block in STYLE.split("{") if block.startswith("--paper")]
    names = [[one.split(":")[0] for one in block.split(";") if one[:2] == "--"] for block in blocks]
    assert len(blocks) == 4
    assert names[0] == names[1] == names[2] == names[3]
    used = {part.split(")")[0] for part in STYLE.split("var(")[1:]}
    assert used <= set(names[0])
