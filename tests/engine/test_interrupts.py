"""An exception between any two lines of the host's bookkeeping costs nothing but the requests that
it concerns: an interrupt comes where it likes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from interrupt import HOST, Interrupt
from jaxkv import LLM, SamplingParams
from jaxkv.api import session
from jaxkv.api.session import Claim
from jaxkv.config import BeamSearchParams
from jaxkv.testing import engine_of
from tiny import SMALL, make_checkpoint, tiny_config

pytestmark = pytest.mark.usefixtures("quick_compile", "one_loop")

PROMPTS = [{"prompt_token_ids": ids} for ids in ([5] * 17, [7, 8, 9], [5] * 18, [4, 3])]
PARAMS = SamplingParams(temperature=0.0, max_tokens=11, ignore_eos=True, detokenize=False)


def generate(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def search(llm: LLM) -> list[list[int]]:
    params = BeamSearchParams(beam_width=2, max_tokens=5, ignore_eos=True)
    found = llm.beam_search(PROMPTS[:2], params)
    return [one.tokens for output in found for one in output.sequences]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    config = tiny_config("llama", num_hidden_layers=1)
    return make_checkpoint(tmp_path_factory.mktemp("model"), config)


def make(directory: Path, **options: Any) -> LLM:
    # Too few pages for all at once: some are preempted.
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "max_model_len": 64}
    return LLM(directory, **SMALL | limits | {"num_gpu_blocks_override": 8} | options)


@pytest.fixture(scope="module")
def shared(directory) -> LLM:
    return make(directory)


def interrupted(llm: LLM, run: Callable[[LLM], Any], num_draws: int, offset: int = 0) -> None:
    want = run(llm)  # compiles
    engine_of(llm).forget()
    with Interrupt() as whole:
        assert run(llm) == want
    for draw in range(num_draws):
        engine_of(llm).forget()
        at = (whole.num_lines * draw + offset) // num_draws
        with pytest.raises(KeyboardInterrupt), Interrupt(at):
            run(llm)
        engine_of(llm).check()
        assert not engine_of(llm).has_work, at
        assert engine_of(llm).scheduler.allocator.num_used == 0, at
        assert run(llm) == want, at


@pytest.mark.parametrize("run", [generate, search])
def test_an_interrupt_at_any_line_leaves_nothing_behind(shared, run):
    interrupted(shared, run, 25, offset=13)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "run"),
    [
        ({}, generate),
        ({}, search),
        ({"kv_policy": "streaming:int8", "kv_budget": 64}, generate),
        ({"kv_policy": "h2o_page", "kv_budget": 64}, generate),
    ],
)
def test_nor_does_one_at_many_lines(directory, options, run):
    interrupted(make(directory, **options), run, 500)


def test_the_requests_of_others_go_on(shared):
    """They are computed anew, unless the step that was cut off was theirs too."""
    llm, engine = shared, engine_of(shared)
    (alone,) = llm.generate(PROMPTS[:1], PARAMS, use_tqdm=False)
    cut = 0
    for at in range(0, 2000, 97):
        stream = llm.stream(PROMPTS[0], PARAMS)
        got = list(next(stream).outputs[0].token_ids)
        with pytest.raises(KeyboardInterrupt), Interrupt(at):
            generate(llm)
        engine.check()
        pieces = list(stream)
        got += [token for piece in pieces for token in piece.outputs[0].token_ids]
        assert got == alone.outputs[0].token_ids[: len(got)], at
        cut += pieces[-1].outputs[0].finish_reason == "abort"
        assert not engine.has_work
    assert 0 < cut < 21


def test_a_claim_that_is_cut_off_at_any_line_keeps_no_page(shared):
    engine, files = engine_of(shared), (*HOST, session.__file__)
    with Interrupt(files=files) as whole:
        Claim(engine, [b"one", b"two"])
    for at in range(whole.num_lines):
        with pytest.raises(KeyboardInterrupt), Interrupt(at, files):
            Claim(engine, [b"one", b"two"])
        engine.check()
        assert not engine.scheduler.allocator.pins, at
