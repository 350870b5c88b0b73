"""Who runs next: promised pages are kept, first come is first served, and every token is computed once and in order."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from jaxkv.aot import fit_bucket, token_buckets
from jaxkv.config import EngineConfig, SamplingParams
from jaxkv.engine.request import Request
from jaxkv.engine.scheduler import STEP_COST, LoopPlan, Scheduler, StepPlan

PARAMS = SamplingParams()
CONFIG = EngineConfig(
    max_model_len=64,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    block_size=8,
    num_pages=16,
    decode_steps=4,
    seed=0,
)


def request(prompt_len: int, num_new: int, name: str = "") -> Request:
    return Request(
        id=name,
        prompt=None,
        tokens=list(range(prompt_len)),
        prompt_len=prompt_len,
        params=PARAMS,
        seed=0,
        max_len=prompt_len + num_new,
        stop_ids=frozenset(),
        eos_id=None,
        text=None,
    )


def scheduler(**changes: int) -> Scheduler:
    return Scheduler(replace(CONFIG, **changes))


def added(scheduler: Scheduler, *sizes: tuple[int, int]) -> list[Request]:
    requests = [request(*size, name=str(i)) for i, size in enumerate(sizes)]
    for one in requests:
        scheduler.add(one)
    return requests


def carry_out(
    scheduler: Scheduler, plan: StepPlan | LoopPlan, stops: Callable[[Request], bool] = lambda request: False
) -> list[tuple[Request, int]]:
    """Does to the requests what the engine would: (request, tokens computed); finished ones are removed."""
    done = []
    if isinstance(plan, StepPlan):
        for one, count in plan.work:
            one.handle = scheduler.allocator.advance(one.handle, one.handle.length + count)
            one.tokens += [-1] * (one.num_pending == 0)
            done.append((one, count))
    else:
        for one in plan.requests:
            most = min(plan.num_steps, one.num_left)
            count = next((n for n in range(1, most) if stops(one)), most)
            one.handle = scheduler.allocator.advance(one.handle, one.handle.length + count)
            one.tokens += [-1] * count
            done.append((one, count))
    for one, _ in done:
        if one.num_pending == 1 and len(one.tokens) > one.prompt_len and (one.num_left == 0 or stops(one)):
            one.finish_reason = "stop"
            scheduler.remove(one)
    return done


def work_of(plan: StepPlan | LoopPlan | None) -> list[tuple[str, int]]:
    assert isinstance(plan, StepPlan)
    return [(one.id, count) for one, count in plan.work]


# --- admission --------------------------------------------------------------------------------------------------------


def test_nothing_to_do_is_no_plan():
    assert scheduler().plan() is None


def test_a_request_is_admitted_when_all_pages_it_can_need_are_unpromised():
    one = scheduler(num_pages=10)
    first, second, third = added(one, (20, 20), (20, 21), (3, 3))  # 5 and 6 pages; the third's would be free
    one.plan()
    assert one.running == [first]
    assert list(one.waiting) == [second, third]  # nobody overtakes
    assert one.num_promised == 5
    assert (first.row, second.row) == (0, None)
    one.remove(first)
    one.check()
    one.plan()
    assert one.running == [second, third]
    assert one.num_promised == 7


def test_exactly_the_whole_pool_may_be_promised():
    one = scheduler(num_pages=10)
    added(one, (20, 20), (20, 20))
    one.plan()
    assert (len(one.running), one.num_promised) == (2, 10)
    one.check()


def test_no_more_requests_run_than_there_are_rows_and_each_has_its_own():
    one = scheduler(num_pages=64)
    requests = added(one, *[(2, 2)] * 6)
    one.plan()
    assert [r.row for r in requests] == [0, 1, 2, 3, None, None]
    one.remove(requests[1])
    one.plan()
    assert requests[4].row == 1
    one.check()


# --- what a step computes ---------------------------------------------------------------------------------------------


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
    [(256, 256), (300, 256), (384, 256), (385, 385), (640, 512), (769, 769), (1300, 1024), (130, 128), (18, 18)],
)
def test_a_step_is_cut_where_padding_costs_more_than_another_step(prompt_len, first):
    one = Scheduler(replace(CONFIG, max_num_batched_tokens=2048, max_model_len=2000, num_pages=1000))
    added(one, (prompt_len, 2))
    plan = one.plan()
    assert work_of(plan) == [("0", first)]
    carry_out(one, plan)
    if first < prompt_len:
        ((_, second),) = work_of(one.plan())
        assert second == {1300 - 1024: 256}.get(prompt_len - first, prompt_len - first)  # the rest may be cut again


def test_prompts_share_a_step_in_the_order_in_which_they_came():
    one = scheduler()
    added(one, (10, 2), (10, 2), (2, 2))
    plan = one.plan()
    assert work_of(plan) == [("0", 10), ("1", 6)]
    carry_out(one, plan)
    assert work_of(one.plan()) == [("0", 1), ("1", 4), ("2", 2)]


@pytest.mark.parametrize("sizes", [[(15, 2), (9, 2)], [(7, 2), (8, 2), (5, 2)], [(16, 2)], [(17, 2)]])
def test_pieces_of_one_token_come_before_longer_ones(sizes):
    """Also when the budget leaves a prompt just one token: the device takes the first rows for decode rows."""
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
    assert len(only.handle.pages) == 1


def test_the_loop_runs_as_long_as_the_longest_unless_somebody_waits():
    one = scheduler(max_num_seqs=2)
    requests = added(one, (2, 3), (2, 9))
    carry_out(one, one.plan())
    assert one.plan() == LoopPlan(requests, 4)  # decode_steps
    one.add(request(2, 2))
    assert one.plan() == LoopPlan(requests, 2)  # until the first is done and makes room


def test_the_loop_reserves_the_pages_of_all_its_steps_and_no_more():
    one = scheduler(block_size=8)
    first, second = added(one, (7, 20), (7, 2))
    carry_out(one, one.plan())
    one.plan()
    # 7 stored; the loop stores tokens 8..11 of the first, and the last one of the second, whose successor is the end.
    assert [len(r.handle.pages) for r in (first, second)] == [2, 1]


# --- removal ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4])
def test_remove_frees_rows_pages_and_promises_at_any_moment(num_steps):
    one = scheduler(max_num_seqs=2)
    requests = added(one, (20, 9), (20, 9), (4, 4))
    for step in range(num_steps):
        plan = one.plan()
        if step < num_steps - 1:
            carry_out(one, plan)  # after the last plan nothing is carried out, as after an interrupt
        one.check()
    for gone in (requests[1], requests[2], requests[0]):
        one.remove(gone)
        one.check()
    assert (one.num_promised, one.allocator.num_used, one.running, list(one.waiting)) == (0, 0, [], [])
    assert sorted(one._free_rows) == [0, 1]
    assert one.plan() is None


# --- check sees what is wrong -----------------------------------------------------------------------------------------


CORRUPTIONS = {
    "a page": lambda one: one.allocator.reserve(one.running[0].handle, 20),
    "a promise": lambda one: setattr(one, "num_promised", one.num_promised + 1),
    "a row twice": lambda one: one._free_rows.append(one.running[0].row),
    "a row lost": lambda one: one._free_rows.pop(),
    "a row of two": lambda one: setattr(one.running[1], "row", one.running[0].row),
    "a waiting row": lambda one: setattr(one.waiting[0], "row", 3),
    "a lost request": lambda one: one.running.pop(),
    "too much promised": lambda one: setattr(one, "config", replace(one.config, num_pages=5)),
}


@pytest.mark.parametrize("corrupt", CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_check_sees_a_corruption(corrupt):
    one = scheduler(num_pages=6)
    added(one, (4, 9), (4, 9), (4, 9), (4, 9))  # three run, one waits for pages, one row is free
    one.plan()
    one.check()
    corrupt(one)
    with pytest.raises(RuntimeError):
        one.check()


# --- thousands of requests --------------------------------------------------------------------------------------------


class Run:
    """Requests of random sizes at random times, some leaving early, with everything that must hold at every step."""

    def __init__(self, config: EngineConfig, num_requests: int, seed: int) -> None:
        self.config = config
        self.buckets = token_buckets(config.max_num_batched_tokens)
        self.rng = random.Random(seed)
        self.scheduler = Scheduler(config)
        self.requests = [self.random_request(i) for i in range(num_requests)]
        self.computed: dict[Request, int] = dict.fromkeys(self.requests, 0)
        self.aborted: set[Request] = set()
        self.admitted: list[Request] = []

    def random_request(self, number: int) -> Request:
        limit = min(self.config.max_model_len, self.config.num_pages * self.config.block_size)
        prompt_len = min(self.rng.choice([1, 2, self.rng.randint(1, limit - 1)]), limit - 1)
        return request(prompt_len, self.rng.randint(1, limit - prompt_len), str(number))

    def go(self) -> None:
        todo = list(reversed(self.requests))
        while todo or self.scheduler.running or self.scheduler.waiting:
            for _ in range(min(len(todo), self.rng.choice([0, 0, 1, 2, 9]))):
                self.scheduler.add(todo.pop())
            if self.rng.random() < 0.02:
                self.abort()
            before = list(self.scheduler.running)
            plan = self.scheduler.plan()
            self.scheduler.check()
            self.admitted += self.scheduler.running[len(before) :]
            assert self.scheduler.running[: len(before)] == before
            if plan is None:
                assert not self.scheduler.running
                assert not self.scheduler.waiting
                continue
            self.check(plan)
            for one, count in carry_out(self.scheduler, plan, stops=lambda _: self.rng.random() < 0.02):
                assert one.handle.length == self.computed[one] + count  # where it stopped, and no token twice
                self.computed[one] += count
            self.scheduler.check()

    def abort(self) -> None:
        present = [*self.scheduler.running, *self.scheduler.waiting]
        if present:
            gone = self.rng.choice(present)
            self.aborted.add(gone)
            self.scheduler.remove(gone)
            self.scheduler.check()

    def check(self, plan: StepPlan | LoopPlan) -> None:
        running, allocator = self.scheduler.running, self.scheduler.allocator
        for one in running:
            assert len(one.handle.pages) <= allocator.pages_for(one.max_len)
        assert allocator.num_used <= self.scheduler.num_promised <= self.config.num_pages
        if isinstance(plan, LoopPlan):
            assert set(plan.requests) == set(running)
            lengths = [one.handle.length for one in plan.requests]
            assert lengths == sorted(lengths), "rows of like length are neighbours"
            assert 1 <= plan.num_steps <= self.config.decode_steps
            for one in running:
                assert one.num_pending == 1
                stored = one.handle.length + min(plan.num_steps, one.num_left)
                assert stored <= len(one.handle.pages) * self.config.block_size
            return
        counts = [count for _, count in plan.work]
        pending = sum(one.num_pending for one in running)
        wanted = min(self.config.max_num_batched_tokens, pending)
        if sum(counts) != wanted:  # cut to what fills a program, where that costs less than padding
            rest = wanted - sum(counts) + sum(count == 1 for count in counts)
            assert sum(counts) in self.buckets
            assert sum(counts) + fit_bucket(self.buckets, rest) + STEP_COST < fit_bucket(self.buckets, wanted)
        assert {one for one in running if one.num_pending == 1} <= {one for one, _ in plan.work}
        assert len({one for one, _ in plan.work}) == len(counts)
        for one, count in plan.work:
            assert 1 <= count <= one.num_pending
            assert one.handle.length + count <= len(one.handle.pages) * self.config.block_size
        self.check_order(plan, counts)

    def check_order(self, plan: StepPlan, counts: list[int]) -> None:
        assert counts == sorted(counts, key=lambda count: count > 1), "pieces of one token come first"
        unfinished = [one for one, count in plan.work if count < one.num_pending]
        chunked = [one for one in self.scheduler.running if one.num_pending > 1]
        assert len(unfinished) <= 1  # an earlier prompt is finished before a later one gets anything
        served = {one for one, _ in plan.work if one.num_pending > 1}
        assert served == set(chunked[: len(served)])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replace(CONFIG, num_pages=8),
        replace(CONFIG, num_pages=3, block_size=8),
        replace(CONFIG, max_num_seqs=1),
        replace(CONFIG, max_num_seqs=16, num_pages=200, max_model_len=100),
        replace(CONFIG, max_num_seqs=9, max_num_batched_tokens=512, num_pages=400, max_model_len=600),
        replace(CONFIG, max_num_seqs=7, max_num_batched_tokens=50, num_pages=40, decode_steps=1),
    ],
    ids=["plain", "tight pool", "three pages", "one row", "as many rows as tokens", "large steps", "one step a loop"],
)
def test_every_request_is_computed_once_in_order_and_leaves_nothing(config, seed):
    run = Run(config, 300, seed)
    run.go()
    for one in run.requests:
        if one not in run.aborted:
            assert one.finish_reason == "stop"
            assert len(one.tokens) - one.prompt_len >= 1
            assert run.computed[one] == len(one.tokens) - 1  # all but the last new one, which nobody reads
    assert [one for one in run.requests if one in set(run.admitted)] == run.admitted  # first come, first served
    assert len(run.aborted) < len(run.requests) / 2
    assert (run.scheduler.num_promised, run.scheduler.allocator.num_used) == (0, 0)
    assert sorted(run.scheduler._free_rows) == list(range(config.max_num_seqs))
