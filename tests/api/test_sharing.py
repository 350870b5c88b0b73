"""Requests that share pages, wait for pages and lose them end as they do alone; and nothing is left
behind.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from jaxkv.api.llm import LLM
from jaxkv.config import SamplingParams
from jaxkv.requests.outputs import RequestOutput
from jaxkv.testing import engine_of, intake_of
from poison import poisoned
from tiny import SMALL, make_checkpoint, tiny_config

pytestmark = pytest.mark.usefixtures("quick_compile", "one_loop")

PAGE = SMALL["block_size"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": list(range(3 + i, 23 + 3 * i))} for i in range(3)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("cache") / "model", tiny_config("llama", vocab_size=420)
    )


@pytest.fixture
def make(checkpoint, compile_once) -> Callable[..., LLM]:
    return lambda **options: LLM(checkpoint, **SMALL | options)


def run(
    llm: LLM, prompts: object, params: object = GREEDY, **options: object
) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False, **options)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def assert_empty(llm: LLM) -> None:
    engine = engine_of(llm)
    engine.check()
    assert not engine.has_work
    assert engine.scheduler.allocator.num_used == 0


def test_a_prefix_that_was_computed_is_found_and_gives_the_same(make):
    """Hit = miss, around page borders, with NaN in all memory that neither a request nor the cache
    holds.
    """
    llm, fresh = make(), make(enable_prefix_caching=False)
    ids = [3 + 7 * i % 400 for i in range(60)]
    for length in (PAGE - 1, PAGE, PAGE + 1, 3 * PAGE - 1, 3 * PAGE, 3 * PAGE + 1, 60):
        prompt = {"prompt_token_ids": ids[:length]}
        with poisoned(engine_of(llm)):
            first, again = (
                run(llm, [prompt])[0],
                run(llm, [prompt, {"prompt_token_ids": [*ids[: length - 1], 2]}])[0],
            )
        assert again.num_cached_tokens == (length - 1) // PAGE * PAGE
        assert first.num_cached_tokens <= again.num_cached_tokens
        (alone,) = run(fresh, [prompt])
        assert alone.num_cached_tokens == 0
        assert tokens([first, again]) == tokens([alone, alone])
    assert_empty(llm)


def test_a_salt_of_its_own_and_a_reset_find_nothing(make):
    llm = make()
    prompt = {"prompt_token_ids": list(range(3, 43))}
    assert [run(llm, [prompt])[0].num_cached_tokens > 0 for _ in range(2)] == [False, True]
    salted = prompt | {"cache_salt": "mine"}
    assert [run(llm, [salted])[0].num_cached_tokens > 0 for _ in range(2)] == [False, True]
    llm.reset_prefix_cache()
    assert run(llm, [prompt])[0].num_cached_tokens == 0
    assert run(llm, [prompt])[0].num_cached_tokens > 0


def test_an_output_that_ended_by_its_length_is_found_by_what_continues_it(make):
    llm, ids = make(), list(range(3, 33))
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    (output,) = run(llm, [{"prompt_token_ids": ids}], params)
    (again,) = run(llm, [{"prompt_token_ids": ids + output.outputs[0].token_ids}], params)
    assert (
        again.num_cached_tokens > len(ids) + 8
    )  # not what the last loop stored: nobody has read that in time


def test_what_a_request_has_computed_before_a_reset_is_not_found_after_its_end(make):
    llm, ids = make(), [3, 1, 4]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    for is_reset in (True, False):
        tokens, stream = list(ids), llm.stream({"prompt_token_ids": ids}, params)
        while len(tokens) < 20:
            tokens += next(stream).outputs[0].token_ids
        if is_reset:
            llm.reset_prefix_cache()
        tokens += [token for new in stream for token in new.outputs[0].token_ids]
        assert (run(llm, [{"prompt_token_ids": tokens}])[0].num_cached_tokens > 0) is not is_reset
        llm.reset_prefix_cache()


def test_samples_share_the_pages_of_their_prompt_and_are_each_what_they_are_alone(make):
    llm, ids = make(), list(range(3, 83))
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=20)
    full = 79 // PAGE
    most = []
    step = engine_of(llm).step
    with poisoned(engine_of(llm)):
        poisoned_step = engine_of(llm).step
        engine_of(llm).step = lambda: (
            most.append(engine_of(llm).scheduler.allocator.num_used),
            poisoned_step(),
        )[1]
        (together,) = run(llm, [{"prompt_token_ids": ids}], params)
    engine_of(llm).step = step
    assert max(most) <= full + 3 * (-(-100 // PAGE) - full)
    assert [completion.index for completion in together.outputs] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in together.outputs}) == 3
    (again,) = run(make(enable_prefix_caching=False), [{"prompt_token_ids": ids}], params)
    assert tokens_of_samples(again) == tokens_of_samples(together)
    first = run(llm, [{"prompt_token_ids": ids}], replace(params, n=1))[0].outputs[0].token_ids
    assert first == together.outputs[0].token_ids
    assert_empty(llm)


def tokens_of_samples(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def test_a_stream_of_samples_joins_to_them(make):
    llm = make()
    params = SamplingParams(n=2, temperature=1.0, seed=5, max_tokens=20)
    joined_samples: dict[int, list[int]] = {0: [], 1: []}
    pieces = list(llm.stream(PROMPTS[0], params))
    for piece in pieces:
        for completion in piece.outputs:
            joined_samples[completion.index] += completion.token_ids
    assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    (whole,) = run(llm, [PROMPTS[0]], params)
    assert list(joined_samples.values()) == tokens_of_samples(whole)


def test_the_first_output_of_samples_has_all_scores_of_their_prompt(make):
    """The second sample needs one token of a prompt that is cached, the first one all of it."""
    llm, ids = make(max_num_batched_tokens=16), list(range(3, 3 + 8 * PAGE + 1))
    prompt = {"prompt_token_ids": ids}
    run(llm, [prompt])
    params = SamplingParams(n=2, temperature=1.0, seed=5, max_tokens=20, prompt_logprobs=0)
    first, *rest = llm.stream(prompt, params)
    assert len(first.prompt_logprobs) == len(ids)
    assert [piece.prompt_logprobs for piece in rest] == [None] * len(rest)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0, seed=3, max_tokens=40)])
def test_preempted_requests_end_as_undisturbed_ones(make, params):
    """A pool with room for two of six: the others give way and come again."""
    prompts = [{"prompt_token_ids": list(range(3 + i, 3 + i + 20 + i))} for i in range(6)]
    params = replace(params, max_tokens=40, ignore_eos=True)
    roomy, tight = make(), make(num_gpu_blocks_override=2 * 66 // PAGE + 2)
    expected = tokens(run(roomy, prompts, params))
    assert engine_of(roomy).scheduler.num_preemptions == 0
    with poisoned(engine_of(tight)):
        assert tokens(run(tight, prompts, params)) == expected
    assert engine_of(tight).scheduler.num_preemptions > 0
    assert_empty(tight)


def test_priority_decides_who_comes_first(make):
    llm = make(max_num_seqs=1)
    outputs = run(llm, PROMPTS[:3], replace(GREEDY, max_tokens=5), priority=[3, 2, 1])
    assert tokens(outputs) == tokens(run(llm, PROMPTS[:3], replace(GREEDY, max_tokens=5)))
    order = []
    accepted = intake_of(llm).accept(PROMPTS[:3], [replace(GREEDY, max_tokens=5)] * 3, [3, 2, 1])
    for submission in accepted:
        engine_of(llm).add(submission)
    while engine_of(llm).has_work:
        engine_of(llm).step()
        order += [
            i for i, submission in enumerate(accepted) if submission.is_finished and i not in order
        ]
    assert order == [2, 1, 0]
    for bad, message in (
        ([1], "expected a list of 3"),
        ([1, 2, "3"], "priority: expected a whole number"),
    ):
        with pytest.raises(ValueError, match=message):
            run(llm, PROMPTS[:3], GREEDY, priority=bad)


def test_prompt_logprobs_are_complete_however_much_of_the_prompt_is_cached(make):
    llm, prompt = make(), {"prompt_token_ids": list(range(3, 43))}
    params = replace(GREEDY, prompt_logprobs=2)
    (first,), (again,) = run(llm, prompt, params), run(llm, prompt, params)
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 0)
    assert again.prompt_logprobs == first.prompt_logprobs
    assert len(first.prompt_logprobs) == 40
    assert run(llm, prompt)[0].num_cached_tokens > 0  # its pages are there for others


def test_a_prompt_that_loses_its_pages_before_the_first_token_is_counted_once(make):
    llm = make(max_num_batched_tokens=16)
    engine, prompt = engine_of(llm), {"prompt_token_ids": list(range(3, 103))}
    run(llm, prompt)
    (submission,) = intake_of(llm).accept([prompt | {"cache_salt": "another"}], [GREEDY])
    engine.add(submission)
    engine.step()
    engine.scheduler._preempt(submission.samples[0])  # its first pages are cached now
    while engine.has_work:
        engine.step()
    assert (engine.scheduler.num_looked_up, engine.scheduler.num_found) == (200, 0)
    assert submission.output().num_cached_tokens == 0
    assert_empty(llm)
