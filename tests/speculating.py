"""What tests of tokens that are proposed ahead share: requests whose proposals often hold, and how
many did.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

import jaxkv.engine.speculation
from jaxkv import LLM, AsyncLLM, RequestOutput, SamplingParams
from jaxkv.testing import engine_of

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
FEW = replace(GREEDY, allowed_token_ids=[5, 7, 9, 11])
"""With so few tokens a proposal often holds, whatever the model."""

DRAWN = replace(FEW, temperature=0.8, top_p=0.9, seed=5)


@pytest.fixture
def proposes_always(monkeypatch) -> None:
    """Proposes wherever it may: a model with random weights seldom says what its prompt says."""
    monkeypatch.setattr(jaxkv.engine.speculation, "LEAST_GAIN", 0.0)


def ahead_of(rows: int, method: dict = NGRAM) -> dict:
    return {"speculative_config": method | {"disable_by_batch_size": rows}}


def prompts_of(count: int, vocab_size: int, longest: int) -> list[dict]:
    """Prompts of all lengths, most of which repeat themselves."""
    rng = np.random.default_rng(4)
    made = []
    for number in range(count):
        part = rng.integers(3, vocab_size, rng.integers(2, 20)).tolist()
        made.append({"prompt_token_ids": (part * longest)[: 5 + number % (longest - 4)]})
    return made


def num_accepted(llm: LLM | AsyncLLM) -> int:
    return int(engine_of(llm)._speculator.accepted_k.sum())


def tokens_of(outputs: Iterable[RequestOutput]) -> list[list[int]]:
    return [one.token_ids for output in outputs for one in output.outputs]
