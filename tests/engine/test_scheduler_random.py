"""Allocator, prefix cache and scheduler in random traffic, against what each request would get if it were alone.

The device is a list: slot (page, s) holds a number made of everything up to its token, as keys and values do, and the
next token is made of the number before it. A wrong, stale or foreign page therefore changes what a request gets.
"""

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

import pytest

from jaxkv.config import EngineConfig, SamplingParams
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


@dataclass
class Traffic:
    config: EngineConfig
    seed: int
    num_steps: int = 0
    num_aborted: int = 0
    finished: list[Request] = field(default_factory=list)
    computed: Counter = field(default_factory=Counter)
    states: defaultdict[Request, list[int]] = field(default_factory=lambda: defaultdict(list))

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
            plan = self.scheduler.plan()
            self.scheduler.check()
            if plan is None:
                assert not self.expected
                continue
            work = self.work_of(plan)
            first = min(self.scheduler.running, key=lambda request: request.order)
            assert dict(work)[first] >= 1, "the first in order always advances"
            self.compute(work)
            self.scheduler.check()

    def disturb(self, arrivals: float) -> None:
        if self.rng.random() < arrivals:
            for request in self.new_requests():
                self.scheduler.add(request)
                self.expected[request] = alone(request)
        if self.expected and self.rng.random() < 0.01:
            gone = self.rng.choice(list(self.expected))
            self.scheduler.remove(gone)
            del self.expected[gone]
            self.num_aborted += 1
        if self.rng.random() < 0.001:
            self.scheduler.allocator.forget()
        if self.rng.random() < 0.001:
            self.scheduler.start_over()
            self.slots = [[None] * self.config.block_size for _ in self.slots]

    def work_of(self, plan: StepPlan | LoopPlan) -> list[tuple[Request, int]]:
        if isinstance(plan, LoopPlan):
            lengths = [request.handle.length for request in plan.requests]
            assert lengths == sorted(lengths), "rows of like length are neighbours"
            assert 1 <= plan.num_steps <= self.config.decode_steps
            assert set(plan.requests) == set(self.scheduler.running)
            return [(request, min(plan.num_steps, request.num_left)) for request in plan.requests]
        counts = [count for _, count in plan.work]
        assert counts == sorted(counts, key=lambda count: count > 1), "pieces of one token come first"
        assert sum(counts) <= self.config.max_num_batched_tokens
        decoding = {request for request in self.scheduler.running if request.num_pending == 1}
        assert decoding <= {request for request, _ in plan.work}
        assert all(1 <= count <= request.num_pending for request, count in plan.work)
        return plan.work

    def compute(self, work: list[tuple[Request, int]]) -> None:
        """What the device and the engine do: store, look at everything before, sample, stop."""
        for request, count in work:
            self.check_sees_itself(request)
            if request.num_pending > 1:
                self.store_prompt(request, count)
            else:
                self.decode(request, count)
        for request, _ in work:
            self.check_sees_itself(request)  # nobody wrote over it
            if request.finish_reason is not None:
                assert request.tokens == self.expected.pop(request)
                del self.states[request]
                self.finished.append(request)
                self.scheduler.remove(request)

    def check_sees_itself(self, request: Request) -> None:
        size, length = self.config.block_size, request.handle.length
        states = self.states[request]
        while len(states) < length:
            states.append(after(states[-1] if states else hash(request.chain.root), request.tokens[len(states)]))
        for index, page in enumerate(request.handle.pages[: -(-length // size)]):
            own = states[index * size : min(length, (index + 1) * size)]
            assert self.slots[page][: len(own)] == own

    def store(self, request: Request) -> int:
        """Writes the next token's slot; returns what it holds."""
        size, at = self.config.block_size, request.handle.length
        before = self.slots[request.handle.pages[(at - 1) // size]][(at - 1) % size] if at else hash(request.chain.root)
        state = after(before, request.tokens[at])
        self.slots[request.handle.pages[at // size]][at % size] = state
        request.handle = self.scheduler.allocator.advance(request.handle, at + 1)
        if (at + 1) % size == 0 and at + 1 < request.prompt_len:
            self.computed[state] += 1
        return state

    def store_prompt(self, request: Request, count: int) -> None:
        state = [self.store(request) for _ in range(count)][-1]
        if request.num_pending == 0:
            self.sample(request, state)

    def decode(self, request: Request, count: int) -> None:
        for _ in range(count):
            self.sample(request, self.store(request))
            if request.finish_reason is not None:
                return

    def sample(self, request: Request, state: int) -> None:
        request.tokens.append(sampled(state, request.seed))
        if request.num_left == 0 or is_end(state, request.seed):
            request.finish_reason = "stop"


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
        (traffic.scheduler.add(request), traffic.expected.update({request: alone(request)}))
        for request in traffic.new_requests()
    ]
    traffic.run(200, arrivals=1.0)
    assert len(traffic.computed) > 20
    assert set(traffic.computed.values()) == {1}
    assert sum(request.num_cached > 0 for request in traffic.finished) > 50
