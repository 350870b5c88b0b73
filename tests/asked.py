"""Requests of many lengths and kinds, for what stands in front of several engines."""

from __future__ import annotations

import numpy as np

from jaxkv import SamplingParams

LENGTHS = (1, 5, 40, 77, 64, 110, 33, 8, 9, 90)
"""Of prompts, in pages of 8 tokens; a step has at most 32."""


def prompts(seed: int = 0) -> list[dict]:
    rng = np.random.default_rng(seed)
    return [{"prompt_token_ids": rng.integers(3, 151, length).tolist()} for length in LENGTHS]


def params() -> list[SamplingParams]:
    """Greedy, and drawn several times with a seed, with log-probabilities."""
    kinds = [{"temperature": 0.0, "logprobs": 2}, {"temperature": 1.0, "seed": 5, "n": 3}]
    kinds.append({"temperature": 0.0, "prompt_logprobs": 1})
    more = {"max_tokens": 12, "ignore_eos": True}
    return [SamplingParams(**kinds[i % 3], **more) for i in range(len(LENGTHS))]
