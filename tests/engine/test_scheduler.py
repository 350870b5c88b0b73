"""Who runs next, with which tokens and pages."""

from array import array
from dataclasses import replace

import pytest

from jaxkv.config import SamplingParams
from jaxkv.engine.scheduler import LoopPlan, Scheduler, StepPlan
from jaxkv.holding.allocator import KVHandle
from jaxkv.holding.hold import Hold
from jaxkv.holding.prefix import PageChain
from jaxkv.requests.beam import BeamSearch
from jaxkv.requests.intake import link
from jaxkv.requests.request import Request
from tiny import ENGINE

PARAMS = SamplingParams()


def request(prompt_len: int, num_new: int, name: str = "") -> Request:
    return Request(
        id=name,
        tokens=array("i", range(prompt_len)),
        prompt_len=prompt_len,
        params=PARAMS,
        max_len=prompt_len + num_new,
        hold=Hold(PageChain(name.encode()), prompt_len),  # nobody else's pages
    )


def scheduler(**changes: int) -> Scheduler:
    return Scheduler(replace(ENGINE, **changes))


def added(scheduler: Scheduler, *sizes: tuple[int, int]) -> list[Request]:
    requests = [request(*size, name=str(i)) for i, size in enumerate(sizes)]
    for one in requests:
        scheduler.add(one)
    return requests


def carry_out(scheduler: Scheduler, plan: StepPlan | LoopPlan) -> None:
    """Does to the requests what the engine would; those that are through are removed."""
    read(scheduler, scheduler.launched(plan))


def read(scheduler: Scheduler, rows: list[tuple[Request, int]]) -> None:
    for one, coming in rows:
        one.tokens.extend([-1] * coming)
        if one.is_full:
            one.finish_reason = "length"
            scheduler.remove(one)


def work_of(plan: StepPlan | LoopPlan | None) -> list[tuple[str, int]]:
    assert isinstance(plan, StepPlan)
    return [(one.id, count) for one, count in plan.work]


# --- admission
# --------------------------------------------------------------------------------------------------------


def test_nothing_to_do_is_no_plan():
    assert scheduler().plan() is None


def test_a_request_is_admitted_when_its_tokens_and_a_page_for_each_running_one_fit():
    one = scheduler(num_pages=10)
    first, second, third = added(
        one, (40, 20), (33, 20), (3, 3)
    )  # 5 and 5 pages; the third's would be free
    one.plan()
    assert one.running == [first]
    assert one.waiting == [second, third]  # nobody overtakes
    assert (first.row, second.row) == (0, None)
    one.remove(first)
    one.check()
    one.plan()
    assert one.running == [second, third]


def test_lower_priorities_go_first_and_push_nobody_out_without_need():
    one = scheduler(max_num_seqs=2)
    requests = [request(4, 9, name) for name in "abcd"]
    for late, priority in zip(requests, (0, 5, 0, -1), strict=True):
        late.priority = priority
        one.add(late)
        if late.id == "b":
            one.plan()
    a, b, c, d = requests
    assert (one.running, one.waiting) == ([a, b], [d, c])
    one.remove(b)
    one.plan()
    assert one.running == [d, a]
    one.check()


def test_the_last_in_order_gives_its_pages_back_when_others_need_them_and_comes_again():
    one = scheduler(num_pages=6)
    first, second = added(one, (15, 30), (9, 30))
    while not one.num_preemptions:
        carry_out(one, one.plan())
        one.check()
    assert (one.running, one.waiting) == ([first], [second])
    assert (second.row, second.hold.handle()) == (None, KVHandle())
    assert second.num_new > 0  # what it generated stays
    known = second.tokens[:]
    while one.running == [first]:
        carry_out(one, one.plan())
        one.check()
    one.plan()
    assert one.running == [second]
    assert second.tokens[: len(known)] == known


def test_no_more_requests_run_than_there_are_rows_and_each_has_its_own():
    one = scheduler(num_pages=64)
    requests = added(one, *[(2, 2)] * 6)
    one.plan()
    assert [r.row for r in requests] == [0, 1, 2, 3, None, None]
    one.remove(requests[1])
    one.plan()
    assert requests[4].row == 1
    one.check()


def leaving(one: Scheduler, *sizes: tuple[int, int]) -> tuple[list[Request], list]:
    """Requests whose last tokens are coming, with what nobody has read yet."""
    requests, coming = added(one, *sizes), []
    while any(request.num_left for request in requests):
        read(one, coming)
        coming = one.launched(one.plan())
    return requests, coming


def test_a_request_that_ends_by_length_leaves_all_its_full_pages_to_the_prefix_cache():
    one = scheduler(max_num_seqs=1)
    (first,), coming = leaving(one, (7, 2 + 2 * ENGINE.block_size))
    after = request(3, 9, "after")
    one.add(after)
    one.plan()
    assert one.running == [after]  # it has its row at once
    one.check()
    read(one, coming)
    one.check()
    again = Request(
        id="again",
        tokens=first.tokens + array("i", [1]),
        prompt_len=len(first.tokens) + 1,
        params=PARAMS,
        max_len=len(first.tokens) + 2,
        hold=Hold(PageChain(b"0"), len(first.tokens) + 1),
    )
    one.remove(after)
    one.add(again)
    one.plan()
    assert again.record.num_cached == len(first.tokens) - 1 == 3 * ENGINE.block_size


def test_pages_of_requests_whose_last_tokens_are_coming_go_to_those_who_need_them():
    one = scheduler(num_pages=6)
    (first, second), coming = leaving(one, (20, 4), (5, 1))
    late = request(40, 3, "late")
    one.add(late)
    one.plan()
    assert one.running == [late]
    assert first.hold.is_empty
    assert second.hold.is_empty
    assert not one.num_preemptions
    one.check()
    read(one, coming)
    one.check()


def test_what_starts_over_gives_the_same_pages_back_first_in_every_process():
    pages = []
    for _ in range(2):  # the order of a set of requests follows from where they lie in memory
        one = scheduler(max_num_seqs=16, num_pages=64)
        held = [request(1, 1) for _ in range(len(pages) * 7 + 1)]
        leaving(one, *[(1, 5)] * 16)
        one.plan()
        assert len(one.leaving) == 16
        one.start_over()
        pages.append(one.allocator.take(64))
        del held
    assert pages[0] == pages[1]


# --- what a step computes
# ---------------------------------------------------------------------------------------------


def test_a_long_prompt_comes_in_chunks_of_the_budget():
    one = scheduler()
    added(one, (40, 2))
    counts = []
    while isinstance(plan := one.plan(), StepPlan):
        counts.append(work_of(plan))
        carry_out(one, plan)
        one.check()
    assert counts == [[("0", 16)], [("0", 16)], [("0", 8)]]
    assert isinstance(plan, LoopPlan)


def test_decode_rows_come_first_and_chunks_fill_the_rest_of_the_budget():
    one = scheduler()
    requests = added(one, (4, 9), (3, 9))
    carry_out(one, one.plan())
    assert [r.num_pending for r in requests] == [1, 1]
    late = request(30, 2, "late")
    one.add(late)
    plan = one.plan()
    assert work_of(plan) == [("1", 1), ("0", 1), ("late", 14)]  # the shorter row first
    carry_out(one, plan)
    assert work_of(one.plan()) == [("1", 1), ("0", 1), ("late", 14)]


@pytest.mark.parametrize(
    ("prompt_len", "first"),
    [
        (512, 512),
        (600, 512),
        (1300, 512),
        (1537, 512),
        (1800, 1800),
        (130, 128),
        (280, 128),
        (300, 300),
        (18, 18),
        (40, 40),
    ],
)
def test_a_step_is_cut_where_padding_costs_more_than_another_step(prompt_len, first):
    one = Scheduler(
        replace(ENGINE, max_num_batched_tokens=2048, max_model_len=2000, num_pages=1000)
    )
    added(one, (prompt_len, 2))
    plan = one.plan()
    assert work_of(plan) == [("0", first)]
    carry_out(one, plan)
    if first < prompt_len:
        ((_, second),) = work_of(one.plan())
        rest = prompt_len - first
        assert second == {788: 512, 1025: 512, 152: 128}.get(rest, rest)  # it may be cut again


def test_prompts_share_a_step_in_the_order_in_which_they_came():
    one = scheduler()
    added(one, (10, 2), (10, 2), (2, 2))
    plan = one.plan()
    assert work_of(plan) == [("0", 10), ("1", 6)]
    carry_out(one, plan)
    assert work_of(one.plan()) == [("0", 1), ("1", 4), ("2", 2)]


@pytest.mark.parametrize(
    "sizes", [[(15, 2), (9, 2)], [(7, 2), (8, 2), (5, 2)], [(16, 2)], [(17, 2)]]
)
def test_pieces_of_one_token_come_before_longer_ones(sizes):
    """Also when the budget leaves a prompt just one token: the device takes the first rows for
    decode rows.
    """
    one = scheduler()
    added(one, *sizes)
    while isinstance(plan := one.plan(), StepPlan):
        counts = [count for _, count in plan.work]
        assert counts == sorted(counts, key=lambda count: count > 1)
        carry_out(one, plan)


def test_a_prompt_of_one_token_goes_straight_to_the_decode_loop():
    one = scheduler()
    (only,) = added(one, (1, 3))
    plan = one.plan()
    assert isinstance(plan, LoopPlan)
    assert plan.num_steps == 3
    assert len(only.hold.handle().pages) == 1


def test_the_loop_runs_as_long_as_the_longest_unless_somebody_waits():
    one = scheduler(max_num_seqs=2)
    requests = added(one, (2, 3), (2, 9))
    carry_out(one, one.plan())
    assert one.plan() == LoopPlan([(requests[0], 2), (requests[1], 4)], num_steps=4)  # decode_steps
    one.add(request(2, 2))
    assert one.plan() == LoopPlan(
        [(requests[0], 2), (requests[1], 2)], num_steps=2
    )  # until the first is done and makes room


def test_the_loop_reserves_the_pages_of_all_its_steps_and_no_more():
    one = scheduler(block_size=8)
    first, second = added(one, (7, 20), (7, 2))
    carry_out(one, one.plan())
    one.plan()
    # 7 stored; the loop stores tokens 8..11 of the first, and the last one of the second, whose
    # successor is the end.
    assert [len(r.hold.handle().pages) for r in (first, second)] == [2, 1]


# --- plans before the results of the last one are read
# ---------------------------------------------------------------


def test_a_plan_counts_on_what_the_last_one_samples():
    one = scheduler()
    (first,) = added(one, (8, 9))
    unread = [
        one.launched(one.plan()),
        one.launched(one.plan()),
    ]  # the prompt with one token, and four more
    assert (first.num_tokens, first.num_new, first.hold.handle().length) == (13, 0, 12)
    plan = one.plan()
    assert (plan.work, len(first.hold.handle().pages)) == ([(first, 4)], 2)
    for rows in unread:
        read(one, rows)
    assert (first.num_new, first.num_coming, first.row) == (5, 0, 0)
    one.check()


def test_a_request_whose_last_tokens_are_coming_makes_room_at_once():
    one = scheduler(max_num_seqs=1)
    first, second = added(one, (8, 5), (8, 5))
    carry_out(one, one.plan())
    rows = one.launched(one.plan())
    assert work_of(one.plan()) == [("1", 8)]
    assert (first.row, first.is_leaving, second.row) == (None, True, 0)
    read(one, rows)
    assert first.is_full
    one.check()


def test_a_request_that_was_preempted_waits_for_what_is_coming():
    one = scheduler()
    (first,) = added(one, (8, 9))
    rows = one.launched(one.plan())
    one._preempt(first)
    assert one.plan() is None
    read(one, rows)
    assert work_of(one.plan()) == [("0", 9)]


# --- removal
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4])
def test_remove_frees_rows_and_pages_at_any_moment(num_steps):
    one = scheduler(max_num_seqs=2)
    requests = added(one, (20, 9), (20, 9), (4, 4))
    for step in range(num_steps):
        plan = one.plan()
        if step < num_steps - 1:
            carry_out(
                one, plan
            )  # after the last plan nothing is carried out, as after an interrupt
        one.check()
    for gone in (requests[1], requests[2], requests[0]):
        one.remove(gone)
        one.check()
    assert (one.allocator.num_used, one.running, one.waiting) == (0, [], [])
    assert sorted(one._free_rows) == [0, 1]
    assert one.plan() is None


def test_many_that_wait_are_removed_without_looking_at_all_the_others_each_time():
    one = scheduler(max_num_seqs=2)
    compared = []

    class Priority(int):
        def __eq__(self, other):
            compared.append(other)
            return int(self) == other

        def __lt__(self, other):
            compared.append(other)
            return int(self) < other

        __hash__ = int.__hash__

    requests = [request(4, 9, str(number)) for number in range(256)]
    for late in requests:
        late.priority = Priority(0)
        one.add(late)
    compared.clear()
    for gone in reversed(requests):
        one.remove(gone)
    assert one.waiting == []
    assert len(compared) <= 256 * 2 * 9  # to find a place among 256


# --- check sees what is wrong
# -----------------------------------------------------------------------------------------


CORRUPTIONS = {
    "a page": lambda one: one.allocator.take(1),
    "a row twice": lambda one: one._free_rows.append(one.running[0].row),
    "a row lost": lambda one: one._free_rows.pop(),
    "a row of two": lambda one: setattr(one.running[1], "row", one.running[0].row),
    "a waiting row": lambda one: setattr(one.waiting[0], "row", 3),
    "a lost request": lambda one: one.running.pop(),
    "the order": lambda one: one.running.reverse(),
    "the order of those that wait": lambda one: one.waiting.reverse(),
    "when to list pages": lambda one: setattr(one.running[0].hold, "publish_len", 9),
    "a waiting page in the tables": lambda one: setattr(one.waiting[0].hold, "bound_len", 8),
    "a waiting page": lambda one: setattr(one.waiting[0], "hold", one.running[0].hold),
}


@pytest.mark.parametrize("corrupt", CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_check_sees_a_corruption(corrupt):
    one = scheduler(num_pages=6)
    # Three run, two wait for pages, one row is free.
    added(one, (4, 9), (4, 9), (4, 9), (30, 9), (30, 9))
    one.plan()
    one.check()
    corrupt(one)
    with pytest.raises(RuntimeError):
        one.check()


# --- beams
# ------------------------------------------------------------------------------------------------------------


def beams_with_one_tail(one: Scheduler, *, num_beams: int) -> list[Request]:
    """Beams that share all they have, 5 tokens of a page of 8, and have one more to compute."""
    beams = added(one, *[(5, 9)] * num_beams)
    link(tuple(beams), BeamSearch(num_beams, max_new=9, eos_ids=(), length_penalty=1.0))
    while any(beam.num_pending for beam in beams):
        for beam, _ in one.launched(one.plan()):
            beam.num_tokens = len(beam.tokens)
    for beam in beams[1:]:
        beam.hold.release()
        beam.hold = beams[0].hold.fork()
    for beam in beams:
        beam.tokens.append(-1)
        beam.num_tokens += 1
    return beams


def test_all_but_the_last_writer_of_a_shared_tail_get_a_copy():
    one = scheduler()
    beams = beams_with_one_tail(one, num_beams=3)
    (shared,) = {beam.hold.handle().pages for beam in beams}
    for beam in beams:
        beam.hold.bound_len = ENGINE.block_size
    plan = one.plan()
    assert plan.requests == beams
    assert plan.copies == tuple((shared[0], beam.hold.handle().pages[0]) for beam in beams[:2])
    assert beams[2].hold.handle().pages == shared
    assert [beam.hold.bound_len for beam in beams] == [0, 0, ENGINE.block_size], (
        "the tables have to take the copies over"
    )
    assert len({beam.hold.handle().pages for beam in beams}) == 3
    one.check()
    one.copied()
    assert one.plan().copies == ()


def test_beams_that_get_no_page_to_copy_to_give_way_and_drop_their_copies():
    one = scheduler(num_pages=3)
    beams = beams_with_one_tail(one, num_beams=3)
    held = KVHandle(tuple(one.allocator.take(2)))  # all that is free
    plan = one.plan()
    assert [beam.row is None for beam in beams] == [False, True, True]
    assert (plan.requests, plan.copies) == (beams[:1], ())
    one.allocator.release(held)
    one.check()


def test_a_copy_is_planned_until_it_is_made_or_its_beam_gives_way():
    one = scheduler()
    beams = beams_with_one_tail(one, num_beams=2)
    plan = one.plan()
    assert len(plan.copies) == 1
    assert one.plan().copies == plan.copies
    one._preempt(beams[0])
    assert one.plan().copies == ()
    one.check()
