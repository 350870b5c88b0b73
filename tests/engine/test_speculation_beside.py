"""Tokens that are proposed ahead are those of the plain engine in rows of adapters too."""

from __future__ import annotations

import pytest

from adapters import make_adapter
from jaxkv import LLM, LoRARequest
from speculating import DRAWN, FEW, ahead_of, num_accepted, prompts_of, proposes_always, tokens_of
from tiny import SMALL

__all__ = ["proposes_always"]

OPTIONS = SMALL | {"enable_lora": True, "max_loras": 2, "skip_tokenizer_init": False}


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile", "one_loop", "proposes_always")
def test_rows_of_adapters_propose_beside_others(checkpoint, tmp_path):
    plain, ahead = LLM(checkpoint, **OPTIONS), LLM(checkpoint, **OPTIONS, **ahead_of(4))
    paths = [make_adapter(tmp_path / str(seed), checkpoint, seed=seed) for seed in (1, 2)]
    first, second = (LoRARequest(f"a{i}", i + 1, path) for i, path in enumerate(paths))
    prompts, loras = prompts_of(6, 420, 40), [first, None, second, first, None, second]
    want, got = (
        tokens_of(llm.generate(prompts, [FEW, DRAWN] * 3, use_tqdm=False, lora_request=loras))
        for llm in (plain, ahead)
    )
    assert got == want
    assert num_accepted(ahead) > 0
