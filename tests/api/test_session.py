"""Sessions are values: what is made of one leaves it as it was, and gives what a request of the same
tokens gives alone.
"""

import asyncio
import copy
import gc
import pickle
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxkv.api.async_llm import AsyncLLM
from jaxkv.api.llm import LLM
from jaxkv.api.session import AsyncSession
from jaxkv.config import RequestOutputKind, SamplingParams
from jaxkv.errors import EngineDeadError
from jaxkv.kv.saved import SavedPages
from jaxkv.requests.outputs import CompletionOutput, RequestOutput
from jaxkv.testing import engine_of
from poison import poisoned
from tiny import SMALL, make_checkpoint, tiny_config

pytestmark = pytest.mark.usefixtures("quick_compile", "one_loop")

PAGE = SMALL["block_size"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
FEW = SamplingParams(temperature=1.0, max_tokens=5, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("sessions") / "model", tiny_config("llama", vocab_size=420)
    )


@pytest.fixture
def make(checkpoint, compile_once) -> Callable[..., LLM]:
    return lambda **options: LLM(checkpoint, **SMALL | options)


def ids(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 420, length).tolist()


def alone(llm: LLM, tokens: list[int], params: SamplingParams = GREEDY) -> list[int]:
    prompt = {"prompt_token_ids": tokens, "cache_salt": "alone"}
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids


def test_a_session_says_that_its_request_was_ended(make, monkeypatch):
    """As it is where a step of another thread fails."""
    llm = make()
    session, engine, added = llm.session({"prompt_token_ids": ids(21)}), engine_of(llm), []
    add = engine.add
    monkeypatch.setattr(engine, "add", lambda one: (added.append(one), add(one)))
    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", lambda: [engine.abort(one) for one in added])
        for call in (session.generate, lambda: session.logprobs([[5], [6, 7]])):
            with pytest.raises(RuntimeError, match="ended by a step of another thread"):
                call()
    assert len(session.logprobs([[5], [6, 7]])) == 2


def test_what_is_made_of_a_session_leaves_it_as_it_was(make):
    llm = make()
    with poisoned(engine_of(llm)):
        s0 = llm.session({"prompt_token_ids": ids(21)})
        s1 = s0.extend(ids(9, 1))
        s2, out = s1.generate(GREEDY)
        s3, other = s1.generate(FEW)
        assert (len(s0), len(s1), len(s2)) == (21, 30, 36)
        assert s2.tokens == (*ids(21), *ids(9, 1), *out.token_ids)
        assert out.token_ids == alone(llm, ids(21) + ids(9, 1))
        assert other.token_ids == alone(llm, ids(21) + ids(9, 1), FEW) != out.token_ids[:5]
        assert s1.generate(GREEDY)[1].token_ids == out.token_ids
        again, _ = s2.rewind(tokens=4).generate(GREEDY)
        assert again.tokens[:36] == s2.tokens
        assert s2.rewind(to=s1).tokens == s1.tokens
        assert s1.pages == s2.pages[:3] == s3.pages[:3] == s2.rewind(tokens=12).pages


def test_forks_share_every_page_and_take_no_steps(make):
    llm = make()
    session = llm.session({"prompt_token_ids": ids(40)})
    num_steps = engine_of(llm).programs.compile_s, engine_of(llm).scheduler.num_looked_up
    forks = [*session.fork(62), copy.copy(session), *copy.deepcopy([session])]
    with pytest.raises(TypeError, match="save\\(path\\) writes it"):
        pickle.dumps(session)
    assert {fork.pages for fork in forks} == {session.pages}
    assert len(session.pages) == 5
    assert (engine_of(llm).programs.compile_s, engine_of(llm).scheduler.num_looked_up) == num_steps
    prompts = [fork.prompt for fork in forks[:4]]
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=4) for seed in range(4)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [32] * 4  # all but the last page
    grown = [fork.after(output) for fork, output in zip(forks[:4], outputs, strict=True)]
    assert len({one.tokens for one in grown}) == 4


def test_a_claim_keeps_pages_from_those_that_nobody_claims(make):
    """Until they are needed: then the session is computed anew, and says the same."""
    llm = make(num_gpu_blocks_override=24)
    engine = engine_of(llm)
    session = llm.session({"prompt_token_ids": ids(40)})
    want = alone(llm, ids(40))

    def others(first: int) -> None:
        for seed in range(first, first + 6):
            alone(llm, ids(60, seed))

    others(1)
    assert len(session.pages) == 5
    many = [{"prompt_token_ids": ids(60, seed)} for seed in range(20, 23)]
    llm.generate(many, replace(GREEDY, max_tokens=60), use_tqdm=False)  # takes the whole pool
    assert not session.pages
    assert session.generate(GREEDY)[1].token_ids == want
    assert len(session.pages) == 5
    fork = session.fork(1)[0]
    session.close()
    others(30)
    assert len(fork.pages) == 5
    assert engine.scheduler.allocator.pins
    (before,) = llm.generate(fork.prompt, GREEDY, use_tqdm=False)
    assert before.num_cached_tokens == 32
    for length in range(9):  # nothing runs, and nothing is left of those that go
        fork.rewind(tokens=length)
    assert (len(engine.pins._new), len(engine.pins._owned)) == (0, 1)
    prompt = fork.prompt
    del fork
    gc.collect()
    others(40)
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
    engine.check()
    assert not engine.scheduler.allocator.pins


def test_continuations_are_scored_behind_a_session(make):
    """Scores equal those of whole prompts; all but what is behind the last full page is read."""
    llm = make()
    session = llm.session({"prompt_token_ids": ids(45)})
    continuations = [ids(length, length) for length in (1, 3, 8, 30)]
    got = session.logprobs(continuations)
    whole = [
        {"prompt_token_ids": ids(45) + piece, "cache_salt": "alone"} for piece in continuations
    ]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    for output, scores in zip(llm.generate(whole, params, use_tqdm=False), got, strict=True):
        pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        want = [entry[token].logprob for token, entry in pairs if entry][44:]
        assert len(scores) == len(want)
        np.testing.assert_allclose(scores, want, rtol=0, atol=1e-5)
    scored = replace(params, prompt_logprobs_start=41)
    output = llm.generate(session.prompt, scored, use_tqdm=False)[0]
    assert output.num_cached_tokens == 40
    assert [entry is None for entry in output.prompt_logprobs] == [True] * 41 + [False] * 4
    # What precedes the first scored token is computed, a page border or not.
    output = llm.generate(session.prompt, replace(scored, prompt_logprobs_start=40), use_tqdm=False)
    assert output[0].num_cached_tokens == 32


def test_a_chat_goes_on_message_by_message(compile_once, tmp_path):
    llm = LLM(**SMALL | {"skip_tokenizer_init": False})
    template = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}"
    template += (
        "{% if add_generation_prompt %}<assistant> {% endif %}{% if tools and at %}{% endif %}"
    )
    ask = {"role": "user", "content": "Name a colour"}
    chat = llm.session([ask], chat_template=template)
    answered, out = chat.generate(replace(GREEDY, max_tokens=8))
    want = llm.chat([ask], replace(GREEDY, max_tokens=8), chat_template=template, use_tqdm=False)
    assert out.token_ids == want[0].outputs[0].token_ids
    more = answered.extend({"role": "user", "content": "Another one"})
    assert [one["role"] for one in more.messages] == ["user", "assistant", "user"]
    whole = llm.chat(list(more.messages), GREEDY, chat_template=template, use_tqdm=False)[0]
    assert more.tokens == tuple(whole.prompt_token_ids)
    assert more.rewind(to=chat).tokens == chat.tokens
    bare, _ = chat.generate(replace(GREEDY, max_tokens=8, detokenize=False))
    assert bare.messages == answered.messages
    with pytest.raises(ValueError, match="began as"):
        answered.rewind(to=llm.session([ask], chat_template=template + "{# another #}"))
    for wrong in ("text", [1, 2]):
        with pytest.raises(ValueError, match="message"):
            chat.extend(wrong)
    with pytest.raises(ValueError, match="to="):
        chat.rewind(tokens=1)
    with pytest.raises(ValueError, match=r"tools: .*docstring"):
        llm.session([ask], chat_template=template, tools=[lambda x: x])
    odd = llm.session([ask], chat_template=template, chat_template_kwargs={"at": {1, 2}})
    with pytest.raises(ValueError, match=r"values that JSON has: .* set is not"):
        odd.save(tmp_path / "odd")
    words = llm.session("Once upon a time")
    longer = words.extend(" there was")
    assert longer.text == "Once upon a time there was"
    assert longer.tokens[: len(words)] == words.tokens


def test_an_async_session_is_awaited(checkpoint, make, tmp_path, monkeypatch):
    want = make().session({"prompt_token_ids": ids(20)}).extend(ids(5, 1))
    more = replace(GREEDY, max_tokens=40)

    async def run() -> tuple:
        async with AsyncLLM(checkpoint, **SMALL) as llm:
            begun = await llm.session({"prompt_token_ids": ids(20)})
            session = await begun.extend(ids(5, 1))
            delta = replace(more, output_kind=RequestOutputKind.DELTA)
            grown, out = await session.generate(delta)
            (tmp_path / "there").touch()
            with monkeypatch.context() as patch:
                patch.setattr(AsyncSession, "_saved", lambda _: pytest.fail("there is a file"))
                with pytest.raises(FileExistsError, match="expected a new file"):
                    await session.save(tmp_path / "there")
            scores = await session.logprobs([ids(4, 2)])
            await session.save(tmp_path / "saved")
            readers = []

            def load(path: Path) -> SavedPages:
                readers.append(threading.current_thread().name)
                return read(path)

            with monkeypatch.context() as patch:
                read = SavedPages.load
                patch.setattr(SavedPages, "load", load)
                restored = await llm.restore(tmp_path / "saved")
            assert (restored.tokens, restored.pages) == (session.tokens, session.pages)
            assert readers not in (["jaxkv-engine"], ["MainThread"])
            ended = RequestOutput("0", None, [], [CompletionOutput(0, "", [])], True)
            ended.outputs[0].finish_reason = "abort"

            async def generate(*_, **__):
                yield ended

            with monkeypatch.context() as patch:
                patch.setattr(llm, "generate", generate)
                for call in (session.extend([5]), session.logprobs([[5]]), llm.session([5])):
                    with pytest.raises(EngineDeadError, match="was ended by"):
                        await call
            return session.tokens, grown.tokens, out.token_ids, scores

    tokens, grown, out, scores = asyncio.run(run())
    assert tokens == want.tokens
    assert (grown, out) == ((*tokens, *out), want.generate(more)[1].token_ids)
    np.testing.assert_allclose(scores, want.logprobs([ids(4, 2)]), rtol=0, atol=1e-5)


def test_what_a_session_cannot_do_is_refused_by_name(make):
    llm = make()
    session = llm.session({"prompt_token_ids": ids(10)})
    other = llm.session({"prompt_token_ids": ids(10, 1)})
    refused = {
        "count": lambda: session.fork(0),
        "one of": lambda: session.rewind(),
        "from 0 to 9": lambda: session.rewind(tokens=10),
        "began as": lambda: session.rewind(to=other),
        "session that this": lambda: session.rewind(
            to=llm.session({"prompt_token_ids": ids(10), "cache_salt": "another"})
        ),
        "all of it": lambda: session.after([*llm.stream(session.prompt, GREEDY)][-1]),
        "n: expected 1": lambda: session.generate(SamplingParams(n=2)),
        "at least one": lambda: session.extend([]),
        "tokenizer": lambda: session.extend("text"),
        "token ids from 0": lambda: session.extend([10**6]),
        "expected a list": lambda: session.logprobs("text"),
        "this session's prompt": lambda: session.after(
            llm.generate(other.prompt, GREEDY, use_tqdm=False)[0]
        ),
        "expected a RequestOutput": lambda: session.after("text"),
        "index": lambda: session.after(llm.generate(session.prompt, GREEDY, use_tqdm=False)[0], 1),
        "expected a text, token ids": lambda: llm.session(5),
        "token ids.*got list": lambda: llm.session(["one text", "another"]),
        "tools": lambda: llm.session({"prompt_token_ids": [5]}, tools=5),
        "chat messages": lambda: llm.session({"prompt_token_ids": [5]}, tools=[]),
        "max_model_len": lambda: session.extend([5] * 200),
        "prompt_logprobs_start": lambda: llm.generate(
            other.prompt,
            SamplingParams(prompt_logprobs=0, prompt_logprobs_start=10),
            use_tqdm=False,
        ),
    }
    for reason, act in refused.items():
        with pytest.raises(ValueError, match=reason):
            act()
    with pytest.raises(ValueError, match="began as"):
        session.rewind(to=make().session({"prompt_token_ids": ids(5)}))
    for name in ("tokens", "messages"):
        with pytest.raises(AttributeError):
            setattr(session, name, ())
    assert session.extend(np.array(ids(3, 2))).tokens == (*ids(10), *ids(3, 2))
    with pytest.raises(ValueError, match="enable_prefix_caching"):
        make(enable_prefix_caching=False).session({"prompt_token_ids": ids(10)})
    assert session.generate(GREEDY)[1].token_ids == alone(llm, ids(10))
