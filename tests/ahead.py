"""What tests of tokens that are proposed ahead have in common."""

from __future__ import annotations

import numpy as np

from jaxkv import LLM, SamplingParams
from jaxkv.testing import engine_of
from poison import poisoned


def prompts_of(vocab_size: int, count: int = 6) -> list[dict]:
    """Prompts of all lengths, most of which repeat themselves."""
    rng = np.random.default_rng(2)
    made = []
    for number in range(count):
        part = rng.integers(3, vocab_size, 2 + 3 * number).tolist()
        made.append({"prompt_token_ids": (part * 9)[: 7 * number + 5]})
    return made


def counted(llm: LLM) -> dict[str, float]:
    """What was proposed and accepted so far; by position in the order of positions."""
    names = ("drafts", "draft_tokens", "accepted_tokens")
    metrics = llm.get_metrics()
    found = {
        name: one.value
        for name in names
        for one in metrics
        if one.name == f"jaxkv:spec_decode_num_{name}"
    }
    by_position = [one for one in metrics if one.name.endswith("accepted_tokens_per_pos")]
    return found | {f"at {one.labels['position']}": one.value for one in by_position}


def assert_same(
    plain: LLM, ahead: LLM, prompts: list, params: SamplingParams | list[SamplingParams]
) -> None:
    """Tokens, ends, texts and log-probabilities are equal, to the last bit; nothing is held after
    it.
    """
    outputs = []
    for llm in (plain, ahead):
        with poisoned(engine_of(llm)):
            outputs.append(llm.generate(prompts, params, use_tqdm=False))
        assert engine_of(llm).scheduler.allocator.num_used == 0
    for want, got in zip(*([one.outputs[0] for one in each] for each in outputs), strict=True):
        assert (got.token_ids, got.finish_reason, got.stop_reason, got.text) == (
            want.token_ids,
            want.finish_reason,
            want.stop_reason,
            want.text,
        )
        for mine, theirs in zip(got.logprobs or [], want.logprobs or [], strict=True):
            assert mine.keys() == theirs.keys()
            assert [one.rank for one in mine.values()] == [one.rank for one in theirs.values()]
            assert [one.logprob for one in mine.values()] == [
                one.logprob for one in theirs.values()
            ]
