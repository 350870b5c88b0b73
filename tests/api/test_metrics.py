"""What an operator sees adds up with what was run."""

import re
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxkv import LLM, SamplingParams, prometheus_text
from jaxkv.engine.metrics import LATENCY_S, Histogram, Metric, Observations, Recorder
from jaxkv.engine.results import Results
from jaxkv.holding.hold import Allocators, Hold
from jaxkv.holding.prefix import PageChain
from jaxkv.requests.request import Request
from jaxkv.testing import engine_of
from tiny import ENGINE, SMALL, make_checkpoint, tiny_config

pytestmark = pytest.mark.usefixtures("quick_compile")

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": list(range(3 + i, 40 + 3 * i))} for i in range(6)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("metrics") / "model", tiny_config("llama"))


@pytest.fixture
def make(checkpoint, compile_once) -> Callable[..., LLM]:
    return lambda **options: LLM(checkpoint, **SMALL | options)


def named(metrics: list[Metric]) -> dict[str, Metric]:
    return {metric.name.removeprefix("jaxkv:"): metric for metric in metrics}


def value(llm: LLM, name: str) -> float:
    return named(llm.get_metrics())[name].value


def test_counts_are_those_of_what_was_run(make):
    llm = make()
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    assert (value(llm, "num_requests_running"), value(llm, "num_requests_waiting")) == (1, 0)
    num_used = sum(map(len, llm.page_table().values()))
    assert value(llm, "kv_cache_usage_perc") == num_used / SMALL["num_gpu_blocks_override"]
    stream.close()
    with pytest.raises(ValueError, match="prefix: expected a text, got 5"):
        llm.get_metrics(5)
    metrics = named(llm.get_metrics())
    assert metrics["prompt_tokens"].value == sum(
        len(p["prompt_token_ids"]) for p in [*PROMPTS, PROMPTS[0]]
    )
    assert metrics["generation_tokens"].value >= 6 * 20 + 1
    assert metrics["num_requests_running"].value == metrics["kv_cache_usage_perc"].value == 0
    assert (
        metrics["prefix_cache_hits"].value
        == sum(o.num_cached_tokens for o in outputs) + 36 // 8 * 8
    )
    assert metrics["prefix_cache_queries"].value == metrics["prompt_tokens"].value
    reasons = [m for m in llm.get_metrics() if m.name == "jaxkv:request_success"]
    assert {m.labels["finished_reason"]: m.value for m in reasons} == {"length": 6, "abort": 1}
    assert metrics["time_to_first_token_seconds"].count == 7
    assert metrics["inter_token_latency_seconds"].count == metrics["generation_tokens"].value - 7
    for name in (
        "e2e_request_latency",
        "request_queue_time",
        "request_prefill_time",
        "request_decode_time",
    ):
        assert metrics[f"{name}_seconds"].count == (7 if "prefill" in name else 6)
    assert metrics["request_time_per_output_token_seconds"].count == 6
    assert metrics["programs_compiled"].value == engine_of(llm).programs.num_compiled
    assert 0 < metrics["effective_batch"].value <= 1
    assert 0 < metrics["kv_cache_utilization"].value <= 1
    assert 0 <= metrics["step_padding"].value < 1


def test_tokens_count_whose_text_cannot_be_made(make, monkeypatch):
    """What one row's text raises ends the step; other rows had their tokens before."""
    llm, prompts = make(), [{"prompt_token_ids": [token, 9]} for token in (3, 4, 5)]
    accept = Results._accept

    def failing(self: Results, request: Request, *rest: Any) -> None:
        accept(self, request, *rest)
        if request.draw.seed == 5:
            raise OSError("no text")

    monkeypatch.setattr(Results, "_accept", failing)
    looked_at = replace(GREEDY, logprobs=0, seed=5)
    with pytest.raises(OSError, match="no text"):
        llm.generate(prompts, [GREEDY, GREEDY, looked_at], use_tqdm=False)
    assert value(llm, "generation_tokens") == 3


def test_the_times_of_a_request_are_in_order(make):
    for output in make().generate(PROMPTS, GREEDY, use_tqdm=False):
        times = output.metrics
        assert times.arrival_time <= times.first_scheduled_time <= times.first_token_time
        assert times.first_token_time <= times.last_token_time <= times.finished_time
        assert times.time_in_queue == pytest.approx(
            times.first_scheduled_time - times.arrival_time, abs=1e-5
        )


def test_a_single_full_row_wastes_what_can_be_counted(make):
    """One prompt of 32 tokens fills a step, 8 decode tokens fill a page: all but their page is
    held.
    """
    llm = make()
    llm.generate(
        {"prompt_token_ids": list(range(3, 35))}, replace(GREEDY, max_tokens=9), use_tqdm=False
    )
    metrics = named(llm.get_metrics())
    assert metrics["step_padding"].value == 0
    assert metrics["loop_padding"].value == 1 / 2  # a loop has two rows at least
    assert metrics["effective_batch"].value == 1 / 4
    assert metrics["kv_cache_utilization"].value == pytest.approx((32 + 32) / (32 + 40))


@pytest.mark.parametrize(
    ("changes", "num_low", "expected"),
    [
        ({}, 0, 10 * 24 / 20),
        ({"row_pages": 4, "low_row_pages": 2}, 2, (10 * 24 + 4 * 16) / (20 + 16)),
        ({"windows": (0, 64)}, 0, 2 * 10 * 24 / 20),
    ],
)
def test_bytes_per_token_are_those_of_pages_in_use(changes, num_low, expected):
    """20 tokens in 3 pages of 8, in every page table; a slot has 10 bytes, a demoted one 4."""
    config = replace(ENGINE, **changes)
    allocators, hold = Allocators(config), Hold(PageChain(b""), 20)
    hold.begin(allocators)
    allocators.extend([(hold, 20)])
    hold.advance(20)
    allocators.low.take(num_low)
    ids = array("i", range(20))
    one = Request(id="", tokens=ids, prompt_len=20, params=GREEDY, max_len=30, hold=hold)
    recorder = Recorder()
    recorder.pages([one], allocators)
    assert recorder.bytes_per_token(10, 4, len(config.windows)) == pytest.approx(expected)


@pytest.mark.slow
def test_preemptions_are_counted(make):
    llm = make(num_gpu_blocks_override=18)
    llm.generate(PROMPTS, replace(GREEDY, max_tokens=60), use_tqdm=False)
    assert value(llm, "num_preemptions") == engine_of(llm).scheduler.num_preemptions > 0


def test_a_histogram_counts_up_to_and_with_its_bound():
    seen = Observations()
    for observed in (0.0, LATENCY_S[0], LATENCY_S[0] * 1.01, LATENCY_S[-1] + 1):
        seen.add(observed)
    seen.add(0.3, times=3)
    metric = seen.metric("name", "help")
    assert metric.buckets[str(LATENCY_S[0])] == 2
    assert metric.buckets[str(LATENCY_S[1])] == 3
    assert metric.buckets[str(LATENCY_S[-1])] == 6
    assert metric.buckets["+Inf"] == metric.count == 7
    assert metric.sum == pytest.approx(2.01 * LATENCY_S[0] + LATENCY_S[-1] + 1 + 0.9)


def test_the_text_is_what_prometheus_reads(make):
    llm = make()
    llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    metrics = llm.get_metrics("vllm:")
    text = prometheus_text(metrics)
    assert "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 0\n" in text
    assert 'vllm:request_success_total{finished_reason="length"} 1\n' in text
    assert "# TYPE vllm:time_to_first_token_seconds histogram\n" in text
    assert 'vllm:time_to_first_token_seconds_bucket{le="+Inf"} 1\n' in text
    line = re.compile(r'[a-z0-9:_]+(\{[a-z_]+="[^"]*"\})? [0-9.e+-]+')
    assert all(row.startswith("# ") or line.fullmatch(row) for row in text.splitlines())
    histograms = [metric for metric in metrics if isinstance(metric, Histogram)]
    assert text.count("# TYPE") == len({metric.name for metric in metrics})
    assert text.count("_sum ") == len(histograms) == 10
