"""Tokens that are proposed ahead are those of the plain engine beside everything else that an
engine does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from adapters import make_adapter
from jaxkv import LLM, AsyncLLM, LoRARequest
from speculating import DRAWN, FEW, ahead_of, num_accepted, prompts_of, proposes_always, tokens_of
from tiny import SMALL

__all__ = ["proposes_always"]

pytestmark = pytest.mark.usefixtures("proposes_always")

OPTIONS = SMALL | {"enable_lora": True, "max_loras": 2, "skip_tokenizer_init": False}


def same(plain: LLM, ahead: LLM, prompts: Sequence, params, **options) -> None:
    """Tokens are equal, and some of them were proposed."""
    before = num_accepted(ahead)
    want, got = (
        tokens_of(llm.generate(prompts, params, use_tqdm=False, **options))
        for llm in (plain, ahead)
    )
    assert got == want
    assert num_accepted(ahead) > before


@pytest.fixture(scope="module")
def pair(quick_compile, one_loop, checkpoint) -> tuple[LLM, LLM]:
    """The same engine without and with proposals."""
    return LLM(checkpoint, **OPTIONS), LLM(checkpoint, **OPTIONS, **ahead_of(4))


@pytest.mark.slow
def test_rows_of_adapters_propose_beside_others(pair, checkpoint, tmp_path):
    paths = [make_adapter(tmp_path / str(seed), checkpoint, seed=seed) for seed in (1, 2)]
    first, second = (LoRARequest(f"a{i}", i + 1, path) for i, path in enumerate(paths))
    prompts, loras = prompts_of(6, 420, 40), [first, None, second, first, None, second]
    same(*pair, prompts, [FEW, DRAWN] * 3, lora_request=loras)


def test_sessions_are_forked_and_taken_back(pair):
    found = []
    for llm in pair:
        start = llm.session({"prompt_token_ids": [5, 7, 9, 11] * 6})
        whole, out = start.generate(FEW)
        (fork,) = whole.rewind(tokens=7).fork(1)
        _, other = fork.generate(DRAWN)
        _, again = start.generate(FEW)
        assert again.token_ids == out.token_ids
        found.append([out.token_ids, other.token_ids, whole.tokens])
    assert found[0] == found[1]
    assert num_accepted(pair[1]) > 0


def test_after_sleep_the_text_of_rows_is_written_anew(pair):
    _, ahead = pair
    same(*pair, prompts_of(3, 420, 40), FEW)
    ahead.sleep(1)
    ahead.wake_up()
    same(*pair, prompts_of(3, 420, 40), FEW)


def test_who_is_cancelled_leaves_its_row_to_others(pair, checkpoint):
    """Requests go after their first tokens; those that follow get their rows."""
    plain, _ = pair
    llm = AsyncLLM(checkpoint, **OPTIONS, **ahead_of(4))
    prompts = prompts_of(12, 420, 40)

    async def ask(number: int) -> list[int]:
        tokens: list[int] = []
        async for output in llm.generate(prompts[number], FEW):
            tokens = output.outputs[0].token_ids
            if number % 3 == 1:
                break
        return tokens

    async def ask_all() -> list[list[int]]:
        return await asyncio.gather(*map(ask, range(12)))

    try:
        got = asyncio.run(ask_all())
    finally:
        llm.shutdown()
    want = tokens_of(plain.generate(prompts, FEW, use_tqdm=False))
    assert all(mine == theirs[: len(mine)] for mine, theirs in zip(got, want, strict=True))
    assert [len(tokens) for tokens in got[::3]] == [FEW.max_tokens] * 4
    assert num_accepted(llm) > 0
