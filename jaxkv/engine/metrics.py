"""Counts what an operator watches: counters, gauges and histograms under vLLM's names, and each
request's own times.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxkv.engine.pages import freed_nbytes
from jaxkv.engine.scheduler import Scheduler
from jaxkv.holding.hold import Allocators
from jaxkv.holding.host import HostPages
from jaxkv.holding.tiers import Tiers
from jaxkv.kv.state import PagedKV
from jaxkv.programs.compiled import Programs
from jaxkv.requests.request import Request

LATENCY_S = (
    0.001,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
)
"""Upper bounds of the histograms' buckets, in seconds."""

TOKENS = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))
"""Upper bounds of the buckets of histograms that count tokens."""


@dataclass(frozen=True, slots=True)
class Metric:
    """Holds one value. `labels` are as Prometheus has them."""

    name: str
    help: str
    labels: dict[str, str] = field(default_factory=dict, kw_only=True)


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    value: float


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    value: float


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """Holds a distribution. `buckets`: upper bound -> how many observations were at most that."""

    count: int
    sum: float
    buckets: dict[str, int]


class Metrics(list[Metric]):
    """Is the list of metrics that `LLM.get_metrics` returns, which notebooks show as tables."""

    def _repr_html_(self) -> str:
        from jaxkv.pictures.tables import Distribution, Figure, metrics_html

        figures = [
            Figure(_labelled(one.name, one.labels), one.help, one.value)
            for one in self
            if isinstance(one, (Gauge, Counter))
        ]
        distributions = [
            Distribution(one.name, one.help, one.count, one.sum, tuple(one.buckets.items()))
            for one in self
            if isinstance(one, Histogram)
        ]
        return metrics_html(figures, distributions)


class Observations:
    """Counts by bucket, of `LATENCY_S` or other upper bounds."""

    def __init__(self, bounds: Sequence[float] = LATENCY_S) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def metric(self, name: str, help: str) -> Histogram:
        total, buckets = 0, {}
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self.counts, strict=True):
            total += count
            buckets[bound] = total
        return Histogram(name, help, total, self.sum, buckets)


def arrived(request: Request) -> None:
    """Notes that a request has come to the first engine that it comes to."""
    request.record.times.arrival_time = time.time()
    request.record.arrived_s = time.monotonic()


class Recorder:
    """Takes note of what the engine does. Cheap enough for every step: a few additions."""

    def __init__(self) -> None:
        self.prompt_tokens = self.generation_tokens = 0
        self.finished: Tally[str] = Tally()
        self.ttft, self.itl, self.tpot, self.e2e = (Observations() for _ in range(4))
        self.queue, self.prefill, self.decode, self.inference = (Observations() for _ in range(4))
        self.prompt_lens, self.output_lens = (Observations(TOKENS) for _ in range(2))
        self.num_tokens = self.num_padded_tokens = 0
        self.num_row_steps = self.num_padded_row_steps = self.num_possible_row_steps = 0
        self.held_slots = self.allocated_slots = self.low_slots = 0

    def added(self, request: Request) -> None:
        if not request.record.arrived_s:
            arrived(request)

    def begun(self, requests: Iterable[Request]) -> None:
        """Notes that a step of these requests begins."""
        now = time.monotonic()
        for record in [one.record for one in requests if one.record.last_token_s is None]:
            times = record.times
            if times.time_in_queue is None:
                times.time_in_queue = now - record.arrived_s
                times.first_scheduled_time = times.arrival_time + times.time_in_queue

    def pages(self, running: Iterable[Request], allocators: Allocators) -> None:
        """Counts the pages in use. Called once per step."""
        # A page that is being filled is never shared, so what is allocated and not held is each
        # request's own.
        allocated = allocators.pages.num_used * allocators.page_size
        free = [request.hold.room_len - request.hold.num_stored for request in running]
        self.allocated_slots += allocated
        self.held_slots += allocated - sum(free) * len(allocators.config.windows)
        self.low_slots += allocators.low.num_used * allocators.page_size  # those are full

    def bytes_per_token(self, slot_nbytes: float, low_slot_nbytes: float, num_tables: int) -> float:
        """Divides the bytes of pages in use by the tokens in them, each with a slot in every page
        table; 0.0 before the first step. Arguments: bytes of a slot, of a demoted one, page tables
        of a row.
        """
        nbytes = self.allocated_slots * slot_nbytes + self.low_slots * low_slot_nbytes
        return num_tables * _share(nbytes, self.held_slots + self.low_slots)

    def step(self, num_tokens: int, padded_tokens: int) -> None:
        self.num_tokens += num_tokens
        self.num_padded_tokens += padded_tokens

    def loop(self, num_row_steps: int, padded_row_steps: int, possible_row_steps: int) -> None:
        self.num_row_steps += num_row_steps
        self.num_padded_row_steps += padded_row_steps
        self.num_possible_row_steps += possible_row_steps

    def generated(self, got: Iterable[tuple[Request, int]], now: float) -> None:
        """Notes so many more tokens of each, at `now` on the monotonic clock; those of one loop
        came at once and share its time evenly.
        """
        since, num_gaps, num_rows = now, 0, 0
        for request, num_tokens in got:
            record = request.record
            before, record.last_token_s = record.last_token_s, now
            self.generation_tokens += num_tokens
            if before is None:
                self._begins(request, now)
                before, num_tokens = now, num_tokens - 1
            # The rows of a loop mostly come one after the other with the same figures.
            if before != since or num_tokens != num_gaps:
                self._count_gaps(now - since, num_gaps, num_rows)
                since, num_gaps, num_rows = before, num_tokens, 0
            num_rows += 1
        self._count_gaps(now - since, num_gaps, num_rows)

    def _begins(self, request: Request, now: float) -> None:
        times = request.record.times
        passed = now - request.record.arrived_s
        times.first_token_time = times.arrival_time + passed
        self.prompt_tokens += request.prompt_len
        self.ttft.add(passed)
        self.prefill.add(passed - (times.time_in_queue or 0.0))

    def _count_gaps(self, time_s: float, num_gaps: int, num_rows: int) -> None:
        if num_gaps:
            self.itl.add(time_s / num_gaps, num_gaps * num_rows)

    def ended(self, request: Request) -> None:
        times = request.record.times
        times.finished_time = times.arrival_time + time.monotonic() - request.record.arrived_s
        self.finished[request.finish_reason or "abort"] += 1
        if times.first_token_time is None or request.finish_reason == "abort":
            return
        total, queued = times.finished_time - times.arrival_time, times.time_in_queue or 0.0
        self.e2e.add(total)
        self.queue.add(queued)
        decode = times.finished_time - times.first_token_time
        self.decode.add(decode)
        self.inference.add(total - queued)
        self.prompt_lens.add(request.prompt_len)
        self.output_lens.add(request.num_new)
        if request.num_new > 1:
            self.tpot.add(decode / (request.num_new - 1))

    def metrics(self) -> list[Metric]:
        return [
            Counter(
                "prompt_tokens",
                "Prompt tokens of requests that have generated.",
                self.prompt_tokens,
            ),
            Counter("generation_tokens", "Generated tokens.", self.generation_tokens),
            *(
                Counter(
                    "request_success",
                    "Requests by how they ended.",
                    count,
                    labels={"finished_reason": reason},
                )
                for reason, count in sorted(self.finished.items())
            ),
            self.ttft.metric("time_to_first_token_seconds", "From arrival to the first token."),
            self.itl.metric(
                "inter_token_latency_seconds",
                "Between tokens; those of one decode loop share its time.",
            ),
            self.tpot.metric(
                "request_time_per_output_token_seconds", "(e2e - TTFT) / (tokens - 1) of a request."
            ),
            self.e2e.metric("e2e_request_latency_seconds", "From arrival to the end."),
            self.queue.metric("request_queue_time_seconds", "From arrival to the first step."),
            self.prefill.metric(
                "request_prefill_time_seconds", "From the first step to the first token."
            ),
            self.decode.metric("request_decode_time_seconds", "From the first token to the end."),
            self.inference.metric(
                "request_inference_time_seconds", "From the first step to the end."
            ),
            self.prompt_lens.metric("request_prompt_tokens", "Tokens of a request's prompt."),
            self.output_lens.metric("request_generation_tokens", "Tokens that a request got."),
            Gauge(
                "kv_cache_utilization",
                "Held / allocated slots, mean over steps.",
                _share(self.held_slots, self.allocated_slots),
            ),
            Gauge(
                "effective_batch",
                "Rows that decoded / rows that could, mean over decode steps.",
                _share(self.num_row_steps, self.num_possible_row_steps),
            ),
            Gauge(
                "step_padding",
                "Part of the steps' tokens that was padding.",
                _padding(self.num_tokens, self.num_padded_tokens),
            ),
            Gauge(
                "loop_padding",
                "Part of the decode loops' rows that was padding.",
                _padding(self.num_row_steps, self.num_padded_row_steps),
            ),
        ]


def engine_metrics(
    scheduler: Scheduler, kv: PagedKV, programs: Programs, *, num_requests: int, num_coming: int
) -> list[Metric]:
    """Returns what there is to watch of scheduler, pages and programs, with so many requests under
    way and so many that wait to be added.
    """
    allocator, num_waiting = scheduler.allocator, len(scheduler.waiting)
    outcomes = scheduler.eviction.outcomes
    return [
        Gauge(
            "num_requests_running",
            "Requests under way.",
            max(0, num_requests - num_waiting),  # one may just be leaving both
        ),
        Gauge("num_requests_waiting", "Requests that wait for a row.", num_waiting + num_coming),
        Gauge(
            "kv_cache_usage_perc",
            "Part of the pages in use.",
            allocator.num_used / allocator.num_pages,
        ),
        Counter(
            "prefix_cache_queries", "Prompt tokens that were looked up.", scheduler.num_looked_up
        ),
        Counter("prefix_cache_hits", "Prompt tokens that were found.", scheduler.num_found),
        *_tier_metrics(scheduler.tiers),
        Counter(
            "num_preemptions", "Requests that gave their pages back.", scheduler.num_preemptions
        ),
        *(
            Counter(
                "kv_policy_pages",
                "Full pages that policies were asked about, by what became of them.",
                count,
                labels={"outcome": outcome},
            )
            for outcome, count in outcomes.items()
        ),
        Counter(
            "kv_policy_bytes_freed",
            "Bytes of pages that policies gave back.",
            freed_nbytes(kv, outcomes),
        ),
        Counter(
            "programs_compiled", "Programs compiled.", programs.num_compiled - programs.num_loaded
        ),
        Counter(
            "programs_loaded", "Programs that an earlier start had compiled.", programs.num_loaded
        ),
        Counter("compile_seconds", "Time that all of them took.", programs.compile_s),
    ]


def _tier_metrics(tiers: Tiers | None) -> list[Metric]:
    """Returns what host memory and a disk keep and have been of use for; zeros without them."""
    host, disk = (HostPages(0), None) if tiers is None else (tiers.host, tiers.disk)
    return [
        Counter(
            "kv_host_hits",
            "Prompt tokens of these that were found in host memory.",
            host.num_found,
        ),
        Gauge("kv_host_pages", "Pages that host memory keeps.", len(host)),
        Counter(
            "kv_disk_hits",
            "Prompt tokens of these that were found on the disk.",
            0 if disk is None else disk.num_found,
        ),
        Counter(
            "kv_disk_refused",
            "Requests whose pages on the disk were computed again, as that is faster.",
            0 if tiers is None else tiers.costs.num_refused,
        ),
        Gauge("kv_disk_pages", "Pages that the disk keeps.", 0 if disk is None else len(disk)),
        Gauge("kv_disk_bytes", "Bytes of their files.", 0 if disk is None else disk.num_bytes),
        Counter(
            "kv_disk_damaged",
            "Files that were not what their hash says, and so count as missing.",
            0 if disk is None else disk.num_damaged,
        ),
        Counter(
            "kv_disk_left_out",
            "Pages that left the device unwritten because too many waited for the disk.",
            0 if disk is None else disk.num_left_out,
        ),
    ]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _padding(num_real: int, num_padded: int) -> float:
    """Returns which part of what was computed was padding."""
    return 1 - num_real / num_padded if num_padded else 0.0


def _labelled(name: str, labels: Mapping[str, str]) -> str:
    """Returns a metric's name with its labels as Prometheus writes them."""
    written = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return f"{name}{{{written}}}" if written else name


def prometheus_text(metrics: Iterable[Metric]) -> str:
    """Formats the metrics in Prometheus' text format 0.0.4."""
    lines: list[str] = []
    described = set()
    for metric in metrics:
        kind = type(metric).__name__.lower()
        name = f"{metric.name}_total" if isinstance(metric, Counter) else metric.name
        if name not in described:
            described.add(name)
            lines += [f"# HELP {name} {metric.help}", f"# TYPE {name} {kind}"]
        if isinstance(metric, Histogram):
            labels = metric.labels
            lines += [
                f"{_labelled(f'{name}_bucket', labels | {'le': bound})} {count}"
                for bound, count in metric.buckets.items()
            ]
            lines += [
                f"{_labelled(f'{name}_sum', labels)} {metric.sum}",
                f"{_labelled(f'{name}_count', labels)} {metric.count}",
            ]
        elif isinstance(metric, (Gauge, Counter)):
            lines.append(f"{_labelled(name, metric.labels)} {metric.value}")
    return "\n".join(lines) + "\n"
