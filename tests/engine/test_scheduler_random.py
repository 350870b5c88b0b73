"""Allocator, prefix cache and scheduler in random traffic, against what each request would get if it were alone.

The device is a list: slot (page, s) holds a number made of everything up to its token, as keys and values do, and the
next token is made of the number before it. A wrong, stale or foreign page therefore changes what a request gets.
"""

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from jaxkv.config import EngineConfig, SamplingParams
from jaxkv.engine.allocator import KVHandle
from jaxkv.engine.prefix import PageChain
from jaxkv.engine.request import Request
from jaxkv.engine.scheduler import LoopPlan, Scheduler, StepPlan
from tiny import ENGINE

PARAMS = SamplingParams()
NUM_TOKENS = 3
"""So few that sequences often begin alike."""


def after(state: int, token: int) -> int:
    return hash((state, token))


def states_of(root: bytes, tokens: list[int]) -> list[int]:
    """What each slot of a sequence holds."""
    states = [hash(root)]
    for token in tokens:
        states.append(after(states[-1], token))
    return states[1:]


def sampled(state: int, seed: int) -> int:
    return hash((state, seed)) % NUM_TOKENS


def is_end(state: int, seed: int) -> bool:
    return hash((state, seed, "end")) % 50 == 0


def alone(request: Request) -> list[int]:
    """The tokens of a request that nobody disturbs."""
    tokens = request.tokens[: request.prompt_len]
    state = states_of(request.chain.root, tokens)[-1]
    while True:
        tokens.append(sampled(state, request.seed))
        if len(tokens) == request.max_len or is_end(state, request.seed):
            return tokens
        state = after(state, tokens[-1])


@dataclass(eq=False)
class Sequence:
    """What the device knows of a request: tokens that nobody may have read yet, the states of what it has stored, and
    whether the newest token is its end."""

    tokens: list[int]
    states: list[int] = field(default_factory=list)
    has_ended: bool = False


@dataclass
class Traffic:
    """`reads_late`: how often a plan is made while the results of the one before it are still to come."""

    config: EngineConfig
    seed: int
    reads_late: float = 0.7
    num_steps: int = 0
    num_aborted: int = 0
    finished: list[Request] = field(default_factory=list)
    computed: Counter = field(default_factory=Counter)
    sequences: dict[Request, Sequence] = field(default_factory=dict)
    flight: list[tuple[Request, int, list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.scheduler = Scheduler(self.config)
        self.slots: list[list[int | None]] = [[None] * self.config.block_size for _ in range(self.config.num_pages)]
        self.expected: dict[Request, list[int]] = {}
        limit = self.config.max_len - 1
        self.beginnings = [self.rng.choices(range(NUM_TOKENS), k=self.rng.randint(0, limit)) for _ in range(6)]

    def new_requests(self) -> list[Request]:
        """One to three that share a prompt and its pages."""
        rng, limit = self.rng, self.config.max_len
        prompt = [*rng.choice(self.beginnings), *rng.choices(range(NUM_TOKENS), k=rng.choice([1, 2, 9]))][: limit - 1]
        root, seed, priority = rng.choice([b"one", b"two"]), rng.getrandbits(16), rng.choice([0, 0, 0, -1, 5])
        max_len = rng.randint(len(prompt) + 1, limit)
        return [
            Request(
                id=f"{self.num_steps}-{sample}",
                tokens=list(prompt),
                prompt_len=len(prompt),
                params=PARAMS,
                seed=seed + sample,
                max_len=max_len,
                stop_ids=frozenset(),
                eos_id=None,
                text=None,
                chain=PageChain(root),
                sample=sample,
                priority=priority,
            )
            for sample in range(rng.choice([1, 1, 1, 3]))
        ]

    def run(self, num_steps: int, *, arrivals: float) -> None:
        """Random arrivals and aborts for so many steps, then whatever is left to its end."""
        while self.num_steps < num_steps or self.expected:
            self.num_steps += 1
            if self.num_steps <= num_steps:
                self.disturb(arrivals)
            if self.rng.random() > self.reads_late:
                self.read()
            plan = self.scheduler.plan()
            self.scheduler.check()
            before, self.flight = self.flight, []
            if plan is None:
                assert before or not self.expected
            else:
                work = self.work_of(plan)
                first = min(self.scheduler.running, key=lambda request: request.order)
                assert dict(work)[first] >= 1, "the first in order always advances"
                self.launch(plan, work)
            self.read(before)
            self.scheduler.check()

    def disturb(self, arrivals: float) -> None:
        if self.rng.random() < arrivals:
            for request in self.new_requests():
                self.scheduler.add(request)
                self.expected[request] = alone(request)
                self.sequences[request] = Sequence(list(request.tokens))
        if self.expected and self.rng.random() < 0.01:
            gone = self.rng.choice(list(self.expected))
            self.scheduler.remove(gone)
            del self.expected[gone], self.sequences[gone]
            self.num_aborted += 1
        if self.rng.random() < 0.001:
            self.scheduler.allocator.forget()
        if self.rng.random() < 0.001:
            self.read()
            self.scheduler.start_over()
            self.slots = [[None] * self.config.block_size for _ in self.slots]

    def work_of(self, plan: StepPlan | LoopPlan) -> list[tuple[Request, int]]:
        if isinstance(plan, LoopPlan):
            lengths = [request.handle.length for request in plan.requests]
            assert lengths == sorted(lengths), "rows of like length are neighbours"
            assert 1 <= plan.num_steps <= self.config.decode_steps
            assert set(plan.requests) == set(self.scheduler.running)
            assert plan.work == [(request, min(plan.num_steps, request.num_left)) for request in plan.requests]
            return plan.work
        counts = [count for _, count in plan.work]
        assert counts == sorted(counts, key=lambda count: count > 1), "pieces of one token come first"
        assert sum(counts) <= self.config.max_num_batched_tokens
        decoding = {request for request in self.scheduler.running if request.num_pending == 1}
        assert decoding <= {request for request, _ in plan.work}
        assert all(1 <= count <= request.num_pending for request, count in plan.work)
        return plan.work

    def launch(self, plan: StepPlan | LoopPlan, work: list[tuple[Request, int]]) -> None:
        """What the device does with the plan, in order: store, look at everything before, sample, rest after an end."""
        starts = [(request, request.handle, count) for request, count in work]
        for (request, coming), (planned, handle, count) in zip(self.scheduler.launched(plan), starts, strict=True):
            assert request is planned
            sequence = self.sequences.get(request)
            new = self.advance(request, handle, count) if sequence is not None else []
            self.flight.append((request, coming, new))
        for request, _ in work:
            self.check_sees_itself(request, request.handle)  # nobody wrote over it

    def advance(self, request: Request, handle: KVHandle, count: int) -> list[int]:
        """The tokens that it samples."""
        sequence, size = self.sequences[request], self.config.block_size
        self.check_sees_itself(request, handle)
        known = len(sequence.tokens)
        for at in range(handle.length, handle.length + count):
            if sequence.has_ended:
                self.slots[handle.pages[at // size]][at % size] = None  # of no use, and nobody else's
                continue
            state = self.store(request, handle, at)
            if at + 1 == len(sequence.tokens):
                sequence.tokens.append(sampled(state, request.seed))
                sequence.has_ended = is_end(state, request.seed)
        return sequence.tokens[known:]

    def store(self, request: Request, handle: KVHandle, at: int) -> int:
        """Writes the token's slot; returns what it holds."""
        size, sequence = self.config.block_size, self.sequences[request]
        before = self.slots[handle.pages[(at - 1) // size]][(at - 1) % size] if at else hash(request.chain.root)
        state = after(before, sequence.tokens[at])
        self.slots[handle.pages[at // size]][at % size] = state
        if (at + 1) % size == 0 and at + 1 < request.prompt_len:
            self.computed[state] += 1
        return state

    def read(self, flight: list[tuple[Request, int, list[int]]] | None = None) -> None:
        """The host learns what was sampled (by default in the newest flight)."""
        if flight is None:
            flight, self.flight = self.flight, []
        for request, coming, tokens in flight:
            assert len(tokens) <= coming
            if request not in self.expected:
                continue
            request.tokens += tokens
            sequence = self.sequences[request]
            if request.is_full or (sequence.has_ended and len(request.tokens) == len(sequence.tokens)):
                request.finish_reason = "stop"
                assert request.tokens == self.expected.pop(request)
                del self.sequences[request]
                self.finished.append(request)
                self.scheduler.remove(request)

    def check_sees_itself(self, request: Request, handle: KVHandle) -> None:
        """Every slot of it that is stored holds what it would hold were the request alone."""
        if request not in self.sequences:
            return
        sequence, size = self.sequences[request], self.config.block_size
        length, states = min(handle.length, len(sequence.tokens) - 1), sequence.states
        while len(states) < length:
            states.append(after(states[-1] if states else hash(request.chain.root), sequence.tokens[len(states)]))
        for index, page in enumerate(handle.pages[: -(-length // size)]):
            own = states[index * size : min(length, (index + 1) * size)]
            assert self.slots[page][: len(own)] == own


ENGINES = {
    "plain": ENGINE,
    "tight pool": replace(ENGINE, num_pages=8),
    "three pages": replace(ENGINE, num_pages=3),
    "one row": replace(ENGINE, max_num_seqs=1),
    "more rows than pages": replace(ENGINE, max_num_seqs=16, num_pages=12, max_num_batched_tokens=32),
    "plenty": replace(ENGINE, max_num_seqs=8, num_pages=100, max_num_batched_tokens=64),
    "one step a loop": replace(ENGINE, max_num_seqs=7, max_num_batched_tokens=50, num_pages=40, decode_steps=1),
}


@pytest.mark.parametrize("config", ENGINES.values(), ids=ENGINES)
def test_every_request_gets_what_it_gets_alone_and_leaves_nothing(config):
    check(Traffic(config, seed=1), num_steps=1500)


@pytest.mark.slow
@pytest.mark.parametrize("config", ENGINES.values(), ids=ENGINES)
def test_a_million_steps(config):
    check(Traffic(config, seed=2), num_steps=150_000)


def check(traffic: Traffic, *, num_steps: int) -> None:
    traffic.run(num_steps, arrivals=0.3)
    one, config = traffic.scheduler, traffic.config
    assert len(traffic.finished) > num_steps / 20
    assert traffic.num_aborted < len(traffic.finished)
    assert (one.running, one.waiting, one.allocator.num_used) == ([], [], 0)
    assert sorted(one._free_rows) == list(range(config.max_num_seqs))
    assert one.num_found > 0
    if config.num_pages < 16:
        assert one.num_preemptions > 0


def test_a_page_of_a_prompt_is_computed_once_however_many_have_it():
    traffic = Traffic(replace(ENGINES["plenty"], num_pages=3000), seed=3)  # nothing has to leave the cache
    traffic.disturb = lambda arrivals: [
        (
            traffic.scheduler.add(request),
            traffic.expected.update({request: alone(request)}),
            traffic.sequences.update({request: Sequence(list(request.tokens))}),
        )
        for request in traffic.new_requests()
    ]
    traffic.run(200, arrivals=1.0)
    assert len(traffic.computed) > 20
    assert set(traffic.computed.values()) == {1}
    assert sum(request.num_cached > 0 for request in traffic.finished) > 50
