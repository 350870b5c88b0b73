"""Allocator, prefix cache and scheduler in random traffic, against what each request would get if
it were alone.

The device is a list: slot (page, s) holds a number made of everything up to its token, as keys and
values do, and the next token is made of the number before it. A wrong, stale or foreign page
therefore changes what a request gets.
"""

import random
import zlib
from array import array
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from jaxkv.config import EngineConfig, SamplingParams
from jaxkv.engine.beams import search_on
from jaxkv.engine.scheduler import LoopPlan, Scheduler, StepPlan
from jaxkv.holding.hold import Hold, Kept
from jaxkv.holding.prefix import PageChain
from jaxkv.holding.retention import Retention
from jaxkv.kv.policies import Held, Measure, Policy, Room, keep_best
from jaxkv.requests.beam import BeamSearch
from jaxkv.requests.intake import link
from jaxkv.requests.request import Draw, Request
from jaxkv.weights.adapters import Adapter
from tiers import some
from tiny import ENGINE

PARAMS = SamplingParams()
NUM_TOKENS = 3
"""So few that sequences often begin alike."""

ADAPTERS = [None, *(Adapter(bytes([number]), {}) for number in range(5))]

MOST_AT_ONCE = 60
"""Requests, waiting or running."""


def after(state: int, token: int) -> int:
    return hash((state, token))


def before_all(root: bytes) -> int:
    """What a sequence begins with: the same in every process, where hash(bytes) is not."""
    return zlib.crc32(root)


def states_of(root: bytes, tokens: list[int]) -> list[int]:
    """What each slot of a sequence holds."""
    states = [before_all(root)]
    for token in tokens:
        states.append(after(states[-1], token))
    return states[1:]


def sampled(state: int, seed: int) -> int:
    return hash((state, seed)) % NUM_TOKENS


def is_end(state: int, seed: int) -> bool:
    return hash((state, seed, -2)) % 50 == 0


def alone(request: Request) -> list[int]:
    """The tokens of a request that nobody disturbs."""
    tokens = request.tokens[: request.prompt_len].tolist()
    state = states_of(request.hold.chain.root, tokens)[-1]
    while True:
        tokens.append(sampled(state, request.draw.seed))
        if len(tokens) == request.max_len or is_end(state, request.draw.seed):
            return tokens
        state = after(state, tokens[-1])


def candidates(state: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """All tokens that may follow, the likeliest first, with their log-probabilities."""
    rng = random.Random(hash((state, seed)))
    likely = sorted((-rng.random(), token) for token in range(NUM_TOKENS))[::-1]
    return np.array([token for _, token in likely]), np.array(
        [value for value, _ in likely], np.float32
    )


def new_search(width: int, max_new: int) -> BeamSearch:
    return BeamSearch(width, max_new=max_new, eos_ids=[1], length_penalty=0.7)


def found(search: BeamSearch) -> list[list[int]]:
    return [[beam.token for beam in end.path()] for end in search.ended]


def alone_beams(first: Request) -> list[list[int]]:
    """What a search finds that nobody disturbs."""
    search = new_search(len(first.beams), first.num_left)
    states = [states_of(first.hold.chain.root, first.tokens)[-1]] * search.width
    while not search.is_over:
        tokens, logprobs = zip(
            *(candidates(state, first.draw.seed) for state in states), strict=True
        )
        chosen = search.advance(np.stack(tokens), np.stack(logprobs))
        states = [after(states[parent], token) for parent, token in chosen]
    return found(search)


@dataclass(eq=False)
class Sequence:
    """What the device knows of a request: tokens that nobody may have read yet, the states of what
    it has stored, and whether the newest token is its end.
    """

    tokens: list[int]
    states: list[int] = field(default_factory=list)
    has_ended: bool = False


@dataclass(frozen=True)
class Part:
    """What a request gets from a step: new tokens, or the state that a beam's candidates follow
    from.
    """

    request: Request
    coming: int
    tokens: list[int]
    state: int | None


def never_traced(k_WKSH: object, v_WKSH: object):
    """Stands where a policy says what it measures: `Traffic` has the figures, nothing computes."""
    raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class ByLot(Policy):
    """Keeps, demotes and drops at random, as far as it may. What is measured of a page is the
    position of its first token.
    """

    name: str = "by_lot"
    low: str | None = "int4"
    measure: Measure | None = never_traced

    def select(self, held: Held, room: Room) -> np.ndarray:
        assert (held.measured_W == np.where(held.is_low_W, 0, held.first_W)).all()
        rng = np.random.default_rng(held.first_W.tolist())
        fewer = Room(room.full, int(rng.integers(0, room.low + 1)))
        return keep_best(rng.random(len(held.first_W)), held, fewer)


@dataclass
class Traffic:
    """`reads_late`: how often a plan is made while the results of the one before it are still to
    come. `budgets`: how many of the requests forget.
    """

    config: EngineConfig
    seed: int
    reads_late: float = 0.7
    searches: float = 0.0
    budgets: float = 0.0
    num_steps: int = 0
    num_aborted: int = 0
    num_copies: int = 0
    num_demoted: int = 0
    finished: list[Request] = field(default_factory=list)
    computed: Counter = field(default_factory=Counter)
    sequences: dict[Request, Sequence] = field(default_factory=dict)
    flight: list[Part] = field(default_factory=list)
    measured: list[tuple[Kept, np.ndarray]] = field(default_factory=list)
    tables: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.scheduler = Scheduler(self.config)
        self.slots: list[list[int | None]] = [
            [None] * self.config.block_size for _ in range(self.config.num_pages)
        ]
        self.position_of = [-1] * self.config.num_pages
        self.in_slot: list[int | None] = [None] * self.config.num_slots
        """The recurrent states: each is that of the last token."""
        self.in_place: list[Adapter | None] = [None] * (self.config.num_adapters + 1)
        self.num_loads = 0
        """The adapters on the device, and none behind them."""
        self.low_slots: list[list[int | None]] = [
            [None] * self.config.block_size
        ] * self.config.num_low_pages
        self.expected: dict[Request, list[int] | list[list[int]]] = {}
        limit = self.config.max_len - 1
        self.beginnings = [
            self.rng.choices(range(NUM_TOKENS), k=self.rng.randint(0, limit)) for _ in range(6)
        ]

    def new_requests(self) -> list[Request]:
        """One to three that share a prompt and its pages, now and then as beams of a search."""
        rng, limit = self.rng, self.config.max_len
        prompt = [
            *rng.choice(self.beginnings),
            *rng.choices(range(NUM_TOKENS), k=rng.choice([1, 2, 9])),
        ][: limit - 1]
        root, seed, priority = (
            rng.choice([b"one", b"two"]),
            rng.getrandbits(16),
            rng.choice([0, 0, 0, -1, 5]),
        )
        adapter = rng.choice(ADAPTERS) if self.config.num_adapters else None
        root += b"" if adapter is None else adapter.digest
        max_len = rng.randint(len(prompt) + 1, limit)
        is_search, width = rng.random() < self.searches, rng.choice([1, 1, 1, 3])
        retention = None
        if self.config.row_pages and rng.random() < self.budgets:
            pages = rng.randint(4, self.config.row_pages)
            low = rng.randint(0, self.config.low_row_pages)
            options = {"page_size": self.config.block_size, "full_pages": pages, "low_pages": low}
            retention = Retention(policy=ByLot(), **options)
        elif self.config.row_pages:
            max_len = min(max_len, self.config.row_pages * self.config.block_size)
            prompt = prompt[: max_len - 1]
        if is_search:  # what the front door lets in
            width = min(rng.randint(1, 4), self.config.max_num_seqs, self.config.num_pages)
            if retention is None or width * retention.full_pages > self.config.num_pages:
                max_len = min(max_len, self.longest_of(width))
            prompt = prompt[: max_len - 1]
        requests = [
            Request(
                id=f"{self.num_steps}-{sample}",
                tokens=array("i", prompt),
                prompt_len=len(prompt),
                params=PARAMS,
                max_len=max_len,
                draw=Draw(
                    seed=seed if is_search else seed + sample, sample=sample, adapter=adapter
                ),
                hold=Hold(PageChain(root), len(prompt), retention),
                priority=priority,
            )
            for sample in range(width)
        ]
        if is_search:
            link(tuple(requests), new_search(width, requests[0].num_left))
        return requests

    def longest_of(self, width: int) -> int:
        """The longest beams of a search that fits alone, in tokens."""
        config, pages = self.config, -(-self.config.max_model_len // self.config.block_size)
        while width * config.row_pages_for(pages) > config.num_pages:
            pages -= 1
        return pages * config.block_size

    def expect(self, requests: list[Request]) -> None:
        for request in requests:
            self.expected[request] = alone_beams(request) if request.search else alone(request)
            self.sequences[request] = Sequence(list(request.tokens))
            self.scheduler.add(request)

    def run(self, num_steps: int, *, arrivals: float) -> None:
        """Random arrivals and aborts for so many steps, then whatever is left to its end."""
        while self.num_steps < num_steps or self.expected:
            self.num_steps += 1
            if self.num_steps <= num_steps:
                self.disturb(arrivals)
            if self.rng.random() > self.reads_late or self.must_read():
                self.read()
            plan = self.scheduler.plan()
            self.scheduler.check()
            before, self.flight = (self.flight, self.measured), []
            self.measured = []
            if plan is None:
                assert before[0] or not self.expected
            else:
                work = self.work_of(plan)
                first = min(self.scheduler.running, key=lambda request: request.order)
                assert first.num_pending == 0 or dict(work)[first] >= 1, (
                    "the first in order always advances"
                )
                self.demote(plan.demotions)
                self.copy(plan.copies)
                for source, target in plan.state_copies:
                    self.in_slot[target] = self.in_slot[source]
                self.launch(plan, work)
            self.read(*before)
            self.scheduler.check()

    def must_read(self) -> bool:
        one = self.scheduler
        return one.needs_results or any(request.needs_tokens for request in one.running)

    def disturb(self, arrivals: float) -> None:
        # A queue that only grew would cost more and test no more.
        if self.rng.random() < arrivals and len(self.expected) < MOST_AT_ONCE:
            self.expect(self.new_requests())
        if self.expected and self.rng.random() < 0.01:
            gone = self.rng.choice(list(self.expected))
            for one in gone.beams or (gone,):
                self.scheduler.remove(one)
                del self.expected[one], self.sequences[one]
            self.num_aborted += 1
        if self.rng.random() < 0.01:
            if self.must_read():
                self.read()
            self.scheduler.plan()  # and an interrupt before anything of it is done
        if self.rng.random() < 0.001:
            self.scheduler.forget()
        if self.rng.random() < 0.001:
            self.read()
            self.scheduler.start_over()
            self.slots = [[None] * self.config.block_size for _ in self.slots]
            self.in_slot = [None] * self.config.num_slots
            self.low_slots = [[None] * self.config.block_size] * len(self.low_slots)

    def work_of(self, plan: StepPlan | LoopPlan) -> list[tuple[Request, int]]:
        if isinstance(plan, LoopPlan):
            holds = [request.hold for request in plan.requests]
            keep_all = not self.scheduler.bounded and 0 in self.config.windows
            lengths = [one.num_stored if keep_all else one.handle().length for one in holds]
            assert lengths == sorted(lengths), "rows of like length are neighbours"
            assert 1 <= plan.num_steps <= self.config.decode_steps
            assert set(plan.requests) == {
                request for request in self.scheduler.running if request.num_pending
            }
            assert all(request.needs_host for request in plan.requests if request.search)
            rooms = [
                1 if one.needs_host else min(one.num_left, one.hold.evict_len - one.hold.num_stored)
                for one in plan.requests
            ]
            assert plan.work == list(
                zip(plan.requests, [min(plan.num_steps, room) for room in rooms], strict=True)
            )
            return plan.work
        counts = [count for _, count in plan.work]
        assert counts == sorted(counts, key=lambda count: count > 1), (
            "pieces of one token come first"
        )
        assert sum(counts) <= self.config.max_num_batched_tokens
        decoding = {request for request in self.scheduler.running if request.num_pending == 1}
        assert decoding <= {request for request, _ in plan.work}
        assert all(1 <= count <= request.num_pending for request, count in plan.work)
        return plan.work

    def launch(self, plan: StepPlan | LoopPlan, work: list[tuple[Request, int]]) -> None:
        """What the device does with the plan, in order: store, look at everything before, sample,
        rest after an end.
        """
        places = self.scheduler.adapters
        for place, adapter in places.take_loads():
            self.in_place[place] = adapter
            self.num_loads += 1
        for request, _ in work:
            assert self.in_place[places.slot_of(request.draw.adapter)] is request.draw.adapter
        starts = [(request, request.hold.num_stored, count) for request, count in work]
        for (request, coming), (planned, start, count) in zip(
            self.scheduler.launched(plan), starts, strict=True
        ):
            assert request is planned
            self.bind(request)
            known = len(self.sequences[request].tokens)
            state = self.advance(request, start, count)
            self.flight.append(Part(request, coming, self.sequences[request].tokens[known:], state))
        for kept, pages in plan.measures:
            self.measured.append((kept, np.array([self.position_of[page] for page in pages])))
        for request in self.scheduler.running:
            self.check_sees_itself(request, request.hold.num_stored)  # nobody wrote over it

    def bind(self, request: Request) -> None:
        """As the row tables do: only the pages that they do not have yet."""
        hold = request.hold
        new = (hold.room_len - hold.bound_len) // self.config.block_size
        for number, part in enumerate(hold.parts):
            before = self.tables.get((request.row, number), [])
            first = max(0, len(part.pages) - new)
            self.tables[request.row, number] = before[:first] + part.pages[first:]
            assert self.tables[request.row, number] == part.pages
        hold.bound_len = hold.room_len

    def advance(self, request: Request, start: int, count: int) -> int | None:
        """The last state that it stores, at positions from `start` on."""
        sequence = self.sequences[request]
        self.check_sees_itself(request, start)
        if self.config.has_states and not sequence.has_ended and start:
            assert self.in_slot[request.row] == sequence.states[start - 1]
        state = None
        for position in range(start, start + count):
            if sequence.has_ended:
                for slots, at in self.slots_of(request, position):
                    slots[at] = None  # of no use, and nobody else's
                continue
            state = self.store(request, position)
            if position + 1 == len(sequence.tokens) and request.search is None:
                sequence.tokens.append(sampled(state, request.draw.seed))
                sequence.has_ended = is_end(state, request.draw.seed)
        if self.config.has_states and state is not None:
            self.in_slot[request.row] = state
        return state

    def slots_of(self, request: Request, position: int) -> list[tuple[list, int]]:
        """The slots of a token in each page table, as (slots of the page, which one)."""
        found, size = [], self.config.block_size
        for part in request.hold.parts:
            page, at = divmod(position - part.num_gone, size)
            found.append((self.slots[part.pages[page]], at))
            if not at:
                self.position_of[part.pages[page]] = position
        return found

    def store(self, request: Request, position: int) -> int:
        """Writes the token's slots; returns what they hold."""
        sequence, before = self.sequences[request], before_all(request.hold.chain.root)
        if position:
            slots, at = self.slots_of(request, position - 1)[0]
            before = slots[at]
        state = after(before, sequence.tokens[position])
        for slots, at in self.slots_of(request, position):
            slots[at] = state
        if (position + 1) % self.config.block_size == 0 and position + 1 < request.prompt_len:
            self.computed[state] += 1
        return state

    def read(
        self,
        flight: list[Part] | None = None,
        measured: list[tuple[Kept, np.ndarray]] | None = None,
    ) -> None:
        """The host learns what was sampled and measured (by default in the newest flight)."""
        if flight is None:
            flight, self.flight = self.flight, []
            measured, self.measured = self.measured, []
        for kept, position_W in measured:
            kept.measured = position_W
        for part in flight:
            request = part.request
            assert len(part.tokens) <= part.coming
            if request not in self.expected:
                continue
            sequence = self.sequences[request]
            if request.search is not None and part.coming:
                self.read_candidates(request, part.state)
            request.tokens.extend(part.tokens)
            if request.is_full or (
                sequence.has_ended and len(request.tokens) == len(sequence.tokens)
            ):
                request.finish_reason = "stop"
        for request in [part.request for part in flight if part.request in self.expected]:
            for one in request.beams or (request,):
                if one.finish_reason is not None and one in self.expected:
                    self.finish(one)

    def read_candidates(self, request: Request, state: int) -> None:
        request.candidates = candidates(state, request.draw.seed)
        request.num_tokens = len(request.tokens)
        if search_on(request.search, request.beams, self.scheduler):
            for beam in request.beams:
                self.sequences[beam] = Sequence(list(beam.tokens))
                beam.finish_reason = "stop" if request.search.is_over else None

    def finish(self, request: Request) -> None:
        assert (
            found(request.search) if request.search else request.tokens.tolist()
        ) == self.expected.pop(request)
        fresh = PageChain(request.hold.chain.root)
        assert [
            fresh.page(i, request.tokens, self.config.block_size)[0]
            for i in range(len(request.hold.chain.keys))
        ] == (request.hold.chain.keys)
        del self.sequences[request]
        self.finished.append(request)
        self.scheduler.remove(request)

    def demote(self, demotions: tuple[tuple[int, int], ...]) -> None:
        for source, target in demotions:
            self.low_slots[target] = list(self.slots[source])
        self.num_demoted += len(demotions)
        if demotions:
            self.scheduler.copied()

    def copy(self, copies: tuple[tuple[int, int], ...]) -> None:
        """As the device does: one after the other."""
        for source, target in copies:
            self.slots[target] = list(self.slots[source])
            self.position_of[target] = self.position_of[source]
        self.num_copies += len(copies)
        self.scheduler.copied()

    def check_sees_itself(self, request: Request, length: int) -> None:
        """Every slot of its first tokens that it holds has what it would have were it alone."""
        if request not in self.sequences:
            return
        hold, sequence, size = request.hold, self.sequences[request], self.config.block_size
        length, states = min(length, len(sequence.tokens) - 1), sequence.states
        while len(states) < length:
            before = states[-1] if states else before_all(hold.chain.root)
            states.append(after(before, sequence.tokens[len(states)]))
        for part in hold.parts:
            if part.window:  # all that the next query sees is there, and not more than may be
                assert part.num_gone <= max(0, hold.num_stored - part.window + 1)
                assert len(part.pages) <= self.config.window_pages(part.window)
            for first, page in zip(part.firsts(len(part.pages)), part.pages, strict=True):
                own = states[first : min(length, first + size)]
                assert self.slots[page][: len(own)] == own
        kept = hold.kept
        for first, page in [] if kept is None else zip(kept.low_first, kept.low, strict=True):
            assert self.low_slots[page] == states[first : first + size]


ENGINES = {
    "plain": ENGINE,
    "tight pool": replace(ENGINE, num_pages=8),
    "three pages": replace(ENGINE, num_pages=3),
    "one row": replace(ENGINE, max_num_seqs=1),
    "more rows than pages": replace(
        ENGINE, max_num_seqs=16, num_pages=12, max_num_batched_tokens=32
    ),
    "plenty": replace(ENGINE, max_num_seqs=8, num_pages=100, max_num_batched_tokens=64),
    "one step a loop": replace(
        ENGINE, max_num_seqs=7, max_num_batched_tokens=50, num_pages=40, decode_steps=1
    ),
}


def crossed(configs: dict[str, Any], often: float, seldom: float, *names: str) -> list:
    """Pairs of names and how many requests search: `seldom` is slow but for these names."""
    cases = [(name, searches) for searches in (often, seldom) for name in configs]
    return some(cases, *cases[: len(configs)], *((name, seldom) for name in names))


@pytest.mark.parametrize("config", ENGINES.values(), ids=ENGINES)
def test_every_request_gets_what_it_gets_alone_and_leaves_nothing(config):
    check(Traffic(config, seed=1), num_steps=300)


@pytest.mark.parametrize(("name", "searches"), crossed(ENGINES, 0.4, 1.0, "plain", "tight pool"))
def test_searches_among_others_find_what_they_find_alone(name, searches):
    config = ENGINES[name]
    traffic = Traffic(config, seed=4, searches=searches)
    check(traffic, num_steps=500)
    assert sum(request.search is not None for request in traffic.finished) > 20
    assert traffic.num_copies > 0 or config.max_num_seqs == 1


FORGETFUL = {
    "plain": replace(ENGINE, max_model_len=200, row_pages=6, low_row_pages=5, num_pages=20),
    "tight pool": replace(ENGINE, max_model_len=150, row_pages=5, low_row_pages=9, num_pages=7),
    "many rows": replace(ENGINE, max_model_len=120, row_pages=4, max_num_seqs=12, num_pages=30),
}


@pytest.mark.parametrize(("name", "searches"), crossed(FORGETFUL, 0.3, 0.0, "plain"))
def test_requests_that_forget_disturb_nobody_and_hold_what_is_theirs(name, searches):
    """Next tokens follow from the state of the last one alone, so they are the same however much is
    forgotten.
    """
    config = FORGETFUL[name]
    traffic = Traffic(config, seed=6, searches=searches, budgets=0.6)
    check(traffic, num_steps=500)
    one = traffic.scheduler
    assert (one.allocators.low.num_used, one.bounded, one.eviction.demotions) == (0, set(), ())
    assert one.eviction.outcomes["dropped"] > 100
    assert bool(traffic.num_demoted) is bool(config.low_row_pages)


WINDOWED = {
    "plain": replace(ENGINE, max_model_len=200, windows=(20,), num_pages=24),
    "tight pool": replace(ENGINE, max_model_len=150, windows=(9,), num_pages=7),
    "many rows": replace(ENGINE, max_model_len=120, windows=(33,), max_num_seqs=12, num_pages=40),
    "smaller than a row": replace(ENGINE, max_model_len=120, windows=(40,), num_pages=6),
    "two tables": replace(ENGINE, max_model_len=120, windows=(20, 0), num_pages=44),
    "four tables, tight pool": replace(
        ENGINE, max_model_len=90, windows=(9, 9, 0, 30), num_pages=36
    ),
}


@pytest.mark.parametrize(
    ("name", "searches"), crossed(WINDOWED, 0.3, 0.0, "plain", "four tables, tight pool")
)
def test_pages_behind_the_window_go_and_nobody_misses_them(name, searches):
    config = WINDOWED[name]
    traffic = Traffic(config, seed=8, searches=searches)
    check(traffic, num_steps=300)
    if config.max_len > config.table_width * config.block_size:
        longest = max(len(request.tokens) for request in traffic.finished)
        assert longest > config.table_width * config.block_size


RECURRENT = {
    "plain": replace(ENGINE, num_slots=7),
    "tight pool": replace(ENGINE, num_pages=8, num_slots=5),
    "more rows than pages": replace(ENGINES["more rows than pages"], num_slots=19),
    "plenty": replace(ENGINES["plenty"], num_slots=40),
    "two tables": replace(WINDOWED["two tables"], num_slots=8),
    "one window": replace(WINDOWED["plain"], num_slots=8),
}


@pytest.mark.parametrize("config", RECURRENT.values(), ids=RECURRENT)
def test_every_row_goes_on_from_its_own_recurrent_state(config):
    check(Traffic(config, seed=9, searches=0.3), num_steps=300)


ADAPTED = {
    "one place": replace(ENGINE, num_adapters=1),
    "tight pool": replace(ENGINE, num_pages=8, num_adapters=2),
    "more rows than pages": replace(ENGINES["more rows than pages"], num_adapters=3),
}


@pytest.mark.parametrize(("name", "searches"), crossed(ADAPTED, 0.5, 0.0, "one place"))
def test_adapters_take_turns_in_few_places_and_nobody_waits_for_ever(name, searches):
    traffic = Traffic(ADAPTED[name], seed=11, searches=searches)
    check(traffic, num_steps=1000)
    assert traffic.num_loads > 50


@pytest.mark.slow
@pytest.mark.parametrize("config", ADAPTED.values(), ids=ADAPTED)
@pytest.mark.parametrize("searches", [0.0, 0.3, 1.0])
def test_a_hundred_thousand_steps_with_adapters(config, searches):
    for seed in range(3):
        check(Traffic(config, seed=seed, searches=searches), num_steps=10_000)


@pytest.mark.slow
@pytest.mark.parametrize("config", RECURRENT.values(), ids=RECURRENT)
@pytest.mark.parametrize("searches", [0.0, 0.3, 1.0])
def test_sixty_thousand_steps_with_recurrent_states(config, searches):
    for seed in range(3):
        check(Traffic(config, seed=seed, searches=searches), num_steps=20_000)


@pytest.mark.slow
@pytest.mark.parametrize("config", WINDOWED.values(), ids=WINDOWED)
@pytest.mark.parametrize("searches", [0.0, 0.3, 1.0])
def test_a_hundred_thousand_steps_behind_windows(config, searches):
    for seed in range(3):
        check(Traffic(config, seed=seed, searches=searches), num_steps=10_000)


@pytest.mark.slow
@pytest.mark.parametrize("config", ENGINES.values(), ids=ENGINES)
def test_a_million_steps(config):
    check(Traffic(config, seed=2), num_steps=150_000)


@pytest.mark.slow
@pytest.mark.parametrize("config", FORGETFUL.values(), ids=FORGETFUL)
@pytest.mark.parametrize("searches", [0.0, 0.3, 1.0])
def test_a_quarter_of_a_million_steps_with_policies(config, searches):
    for seed in range(3):
        check(Traffic(config, seed=seed, searches=searches, budgets=0.7), num_steps=10_000)


@pytest.mark.slow
@pytest.mark.parametrize("config", ENGINES.values(), ids=ENGINES)
def test_half_a_million_steps_with_searches(config):
    for seed in range(7):  # from the start again, or those that wait become more and more
        check(Traffic(config, seed=seed, searches=0.3), num_steps=10_000)


def check(traffic: Traffic, *, num_steps: int) -> None:
    traffic.run(num_steps, arrivals=0.3)
    one, config = traffic.scheduler, traffic.config
    assert len(traffic.finished) > num_steps / 20
    assert traffic.num_aborted < len(traffic.finished)
    assert (one.running, one.waiting, one.allocator.num_used) == ([], [], 0)
    assert sorted(one._free_rows) == list(range(config.max_num_seqs))
    assert one.num_found > 0 or (
        traffic.searches and config.num_pages < 8
    )  # three beams of a page leave nothing
    if config.num_pages < 16:
        assert one.num_preemptions > 0


def test_a_page_of_a_prompt_is_computed_once_however_many_have_it():
    traffic = Traffic(
        replace(ENGINES["plenty"], num_pages=1500), seed=3
    )  # nothing has to leave the cache
    traffic.disturb = lambda arrivals: traffic.expect(traffic.new_requests())
    traffic.run(80, arrivals=1.0)
    assert len(traffic.computed) > 20
    assert set(traffic.computed.values()) == {1}
    assert sum(request.record.num_cached > 0 for request in traffic.finished) > 50
