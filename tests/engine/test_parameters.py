"""Whole generations with every parameter equal a dense reference in numpy, alone and mixed, in
steps and in loops.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import jaxkv.build.limits
from dense import Dense
from jaxkv import LLM, RequestOutput, SamplingParams
from jaxkv.requests.masks import encode_words
from jaxkv.testing import engine_of, intake_of
from poison import poisoned
from tiers import some
from tiny import make_checkpoint, tiny_config
from tokenizers_ import save_tokenizer

pytestmark = pytest.mark.usefixtures("quick_compile", "one_loop")

VOCAB, NUM_NEW, NUM_CHUNK = 420, 20, 16
LEAD = 1e-4
"""Of a greedy token over the next, in logits; more than rounding can turn round."""

ODD = list(range(1, VOCAB, 2))
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
CASES = {
    "none": GREEDY,
    "presence": replace(GREEDY, presence_penalty=2.0),
    "presence below 0": replace(GREEDY, presence_penalty=-1.5),
    "frequency": replace(GREEDY, frequency_penalty=1.3),
    "frequency below 0": replace(GREEDY, frequency_penalty=-0.7),
    "repetition": replace(GREEDY, repetition_penalty=1.8),
    "repetition below 1": replace(GREEDY, repetition_penalty=0.6),
    "bias": replace(GREEDY, logit_bias={"9": 4.0, 11: 4.5, 300: -100}),
    "allowed": replace(GREEDY, allowed_token_ids=ODD),
    "min_tokens": replace(
        GREEDY, allowed_token_ids=ODD, stop_token_ids=ODD[::5], min_tokens=NUM_NEW
    ),
    "all": replace(
        GREEDY,
        presence_penalty=0.4,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        min_tokens=9,
        logit_bias={9: 3, 12: 50},
        allowed_token_ids=ODD,
        stop_token_ids=[11],
        bad_words=["t", "The"],
    ),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    directory = make_checkpoint(
        tmp_path_factory.mktemp("parameters") / "model", tiny_config("llama", vocab_size=VOCAB)
    )
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def new_llm(checkpoint) -> Callable[..., LLM]:
    """Engines that share their programs where the options are the same."""
    compiled: dict[str, dict] = {}

    def new_llm(**options: object) -> LLM:
        limits = {
            "max_num_seqs": 4,
            "max_num_batched_tokens": NUM_CHUNK,
            "block_size": 8,
            "max_model_len": 96,
        }
        llm = LLM(
            checkpoint,
            dtype="float32",
            lazy_compile=True,
            num_gpu_blocks_override=48,
            **limits | options,
        )
        programs = engine_of(llm).programs
        programs.executables = compiled.setdefault(
            f"{options} {jaxkv.build.limits.DECODE_STEPS}", programs.executables
        )
        return llm

    return new_llm


@pytest.fixture(scope="module")
def dense(checkpoint) -> Dense:
    return Dense(checkpoint, (None, None, None), "float32")


def run(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
    with poisoned(engine_of(llm)):
        return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


# The reference
# --------------------------------------------------------------------------------------------------------


def processed(
    x_V: np.ndarray,
    ids: list[int],
    generated: list[int],
    params: SamplingParams,
    words: list[tuple[int, ...]],
) -> np.ndarray:
    """vLLM's order: allowed, bad words, stop tokens before min_tokens, bias, penalties by
    counts.
    """
    gone = (
        set()
        if params.allowed_token_ids is None
        else set(range(VOCAB)) - set(params.allowed_token_ids)
    )
    gone |= {word[-1] for word in words if (*generated, word[-1])[-len(word) :] == word}
    gone |= set(params.stop_token_ids or ()) if len(generated) < params.min_tokens else set()
    x_V = np.where(np.isin(np.arange(VOCAB), list(gone)), -np.inf, x_V)
    for token, bias in (params.logit_bias or {}).items():
        x_V[token] += bias
    count_V = np.bincount(generated, minlength=VOCAB)
    seen_V = np.bincount(ids + generated, minlength=VOCAB) > 0
    factor = params.repetition_penalty
    x_V = np.where(seen_V, np.where(x_V > 0, x_V / factor, x_V * factor), x_V)
    return x_V - params.frequency_penalty * count_V - params.presence_penalty * (count_V > 0)


def reference(
    dense: Dense, ids: list[int], params: SamplingParams, words: list[tuple[int, ...]]
) -> tuple[list, float]:
    """The greedy tokens, and the smallest lead of one over the next likeliest."""
    generated, lead = [], np.inf
    while len(generated) < params.max_tokens and (
        not generated or generated[-1] not in (params.stop_token_ids or ())
    ):
        x_V = processed(dense.logits(ids + generated)[-1], ids, generated, params, words)
        *_, second, best = np.sort(x_V)
        lead = min(lead, best - second)
        generated.append(int(x_V.argmax()))
    return generated, lead


@pytest.fixture(scope="module")
def expected(dense, checkpoint) -> dict[str, tuple[list[int], list[int]]]:
    """A prompt for every case, and its tokens, which no rounding can change."""
    from jaxkv.build.tokenizer import load_tokenizer

    rng, tokenizer, made = np.random.default_rng(0), load_tokenizer(checkpoint), {}
    for name, params in CASES.items():
        words, lead = list(encode_words(tokenizer, params.bad_words or ())), 0.0
        while lead < LEAD:
            ids = rng.integers(0, VOCAB, rng.integers(1, 40)).tolist()
            tokens, lead = reference(dense, ids, params, words)
        made[name] = ids, tokens
    return made


# Tokens
# ---------------------------------------------------------------------------------------------------------------


def test_each_parameter_alone_and_all_mixed_equal_the_dense_reference(new_llm, expected, dense):
    llm = new_llm()
    prompts, want = [list(column) for column in zip(*expected.values(), strict=True)]
    params = list(CASES.values())
    assert (
        tokens_of(run(llm, prompts, params)) == want
    )  # four at a time: every row has other neighbours
    assert tokens_of(run(llm, prompts[::-1], params[::-1])) == want[::-1]
    for name in ("none", "frequency", "all"):
        ids, tokens = expected[name]
        assert tokens_of(run(llm, [ids], [CASES[name]])) == [tokens]
    differing = [
        name
        for name, (ids, tokens) in expected.items()
        if tokens != reference(dense, ids, GREEDY, [])[0]
    ]
    assert differing == [name for name in CASES if name != "none"]


@pytest.mark.parametrize("temperature", some([0.0, 1.2], 1.2))
def test_loops_of_8_equal_one_token_at_a_time(new_llm, expected, temperature, monkeypatch):
    prompts = [ids for ids, _ in expected.values()]
    params = [replace(one, temperature=temperature, seed=3, top_p=0.9) for one in CASES.values()]
    whole = tokens_of(run(new_llm(), prompts, params))
    # A neighbour with a word of several tokens gets one token of each loop.
    watched = replace(GREEDY, bad_words=["The end of"], max_tokens=90)
    llm = new_llm()
    sizes = loop_sizes(llm, monkeypatch)
    assert tokens_of(run(llm, [[5], *prompts], [watched, *params]))[1:] == whole
    assert {1} < set(sizes)
    monkeypatch.setattr(jaxkv.build.limits, "DECODE_STEPS", 1)
    assert tokens_of(run(new_llm(), prompts, params)) == whole


def loop_sizes(llm: LLM, monkeypatch) -> list[int]:
    """The number of steps of every decode loop to come."""
    sizes, plan_loop = [], engine_of(llm).scheduler._plan_loop

    def watched(ready):
        plan = plan_loop(ready)
        sizes.append(plan.num_steps)
        return plan

    monkeypatch.setattr(engine_of(llm).scheduler, "_plan_loop", watched)
    return sizes


def test_a_word_of_several_tokens_never_comes_and_all_else_does(new_llm, dense, monkeypatch):
    """Words are pairs and triples of tokens that greedy decoding did give."""
    llm = new_llm()
    rng, num_changed = np.random.default_rng(1), 0
    sizes = loop_sizes(llm, monkeypatch)
    for length in (1, 7, 20):
        ids, lead = [], 0.0
        while lead < LEAD:
            ids = rng.integers(0, VOCAB, length).tolist()
            plain, _ = reference(dense, ids, GREEDY, [])
            words = [tuple(plain[0:2]), tuple(plain[7:10]), (plain[3],)]
            want, lead = reference(dense, ids, GREEDY, words)
        (submission,) = intake_of(llm).accept([{"prompt_token_ids": ids}], [GREEDY])
        (sample,) = submission.samples
        draw = replace(sample.draw, bad_words=tuple(words))
        submission = replace(submission, samples=(replace(sample, draw=draw),))
        with poisoned(engine_of(llm)):
            llm._run([submission], use_tqdm=False)
        got = submission.output().outputs[0].token_ids
        assert got == want
        assert not any(
            tuple(got[i : i + len(word)]) == word for word in words for i in range(len(got))
        )
        assert got[0] == plain[0]  # the first token of a word may come
        num_changed += got != plain
    assert num_changed == 3
    assert set(sizes) == {1}


def test_bad_words_are_kept_out_of_the_text(new_llm):
    llm = new_llm()
    prompts, drawn = (
        [[5, 6, 7]] * 8,
        [replace(GREEDY, temperature=3.0, seed=seed) for seed in range(8)],
    )
    texts = [output.outputs[0].text for output in run(llm, prompts, drawn)]
    letters = [c for c in "etaoin" if any(c in text for text in texts)]
    assert letters
    tokenizer = llm.get_tokenizer()
    single = encode_words(tokenizer, letters)
    banned = [token for token in range(VOCAB - 40) if (token,) in single]
    outputs = run(llm, prompts, [replace(params, bad_words=letters) for params in drawn])
    assert not any(token in banned for ids in tokens_of(outputs) for token in ids)
    assert any(token in banned for ids in tokens_of(run(llm, prompts, drawn)) for token in ids)


# Logprobs
# -------------------------------------------------------------------------------------------------------------


def log_softmax(x_TV: np.ndarray) -> np.ndarray:
    return x_TV - np.log(np.exp(x_TV).sum(axis=1, keepdims=True))


def test_prompt_logprobs_come_once_from_a_prompt_begun_anew_with_a_chunk_under_way(new_llm):
    llm = new_llm(max_num_batched_tokens=NUM_CHUNK)
    ids = np.random.default_rng(3).integers(0, VOCAB, 50).tolist()
    params = replace(GREEDY, max_tokens=2, prompt_logprobs=2)
    (want,) = run(llm, [ids], [params])
    engine = engine_of(llm)
    (submission,) = intake_of(llm).accept([{"prompt_token_ids": ids}], [params])
    engine.add(submission)
    engine.step()
    engine.scheduler.start_over()
    while engine.has_work:
        engine.step()
    assert submission.output().prompt_logprobs == want.prompt_logprobs


@pytest.mark.parametrize("budget", some([NUM_CHUNK, 96], NUM_CHUNK))
def test_prompt_logprobs_equal_a_dense_pass_whatever_the_chunks(new_llm, dense, budget):
    """Prompts around the chunk of 16 and the pieces of 64 tokens, beside rows that decode and that
    do not ask.
    """
    llm = new_llm(max_num_batched_tokens=budget)
    decode, rng = llm.get_tokenizer().decode, np.random.default_rng(2)
    lengths = (1, 2, 15, 16, 17, 33, 64, 65, 66, 90, 20, 40)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in lengths]
    counts = [(5, 0, None, 20)[i % 4] if length != 2 else 1 for i, length in enumerate(lengths)]
    params = [
        replace(GREEDY, max_tokens=1 + i % 5, prompt_logprobs=count)
        for i, count in enumerate(counts)
    ]
    for ids, count, output in zip(prompts, counts, run(llm, prompts, params), strict=True):
        if count is None:
            assert output.prompt_logprobs is None
            continue
        assert len(output.prompt_logprobs) == len(ids)
        assert output.prompt_logprobs[0] is None
        want_TV = log_softmax(dense.logits(ids))[:-1]
        for token, want_V, entry in zip(ids[1:], want_TV, output.prompt_logprobs[1:], strict=True):
            assert next(iter(entry)) == token
            assert (
                abs(entry[token].rank - 1 - (want_V > want_V[token]).sum()) <= 1
            )  # neighbours within rounding
            best = {other for other, one in entry.items() if one.rank <= count}
            assert len(best) == count
            assert want_V[list(best)].min(initial=0) >= np.sort(want_V)[-max(count, 1)] - LEAD
            assert len(entry) == count + (entry[token].rank > count)
            for other, one in entry.items():
                assert one.logprob == pytest.approx(want_V[other], abs=1e-4)
                assert one.decoded_token == decode([other])


def test_prompt_logprobs_change_no_token_and_come_with_the_first_of_a_stream(new_llm, expected):
    llm = new_llm()
    for name in ("none", "all"):
        ids, tokens = expected[name]
        asked = replace(CASES[name], prompt_logprobs=3, logprobs=2)
        (output,) = run(llm, [ids], [asked])
        assert tokens_of([output]) == [tokens]
        pieces = list(llm.stream({"prompt_token_ids": ids}, asked))
        assert pieces[0].prompt_logprobs == output.prompt_logprobs
        assert [piece.prompt_logprobs for piece in pieces[1:]] == [None] * (len(pieces) - 1)
        assert len(pieces) > 1


@pytest.mark.slow
def test_the_whole_vocabulary_may_be_asked_for_where_the_engine_is_made_for_it(new_llm, dense):
    llm = new_llm(max_logprobs=-1)
    ids = np.random.default_rng(3).integers(0, VOCAB, 20).tolist()
    (output,) = run(llm, [ids], [replace(GREEDY, max_tokens=9, logprobs=-1, prompt_logprobs=-1)])
    tokens = output.outputs[0].token_ids
    want_TV = log_softmax(dense.logits(ids + tokens[:-1]))
    entries = output.prompt_logprobs[1:] + output.outputs[0].logprobs
    for want_V, entry in zip(want_TV, entries, strict=True):
        assert sorted(entry) == list(range(VOCAB))
        got_V = np.array([entry[token].logprob for token in range(VOCAB)])
        np.testing.assert_allclose(got_V, want_V, atol=1e-4, rtol=0)
        assert sorted(one.rank for one in entry.values()) == list(range(1, VOCAB + 1))
    narrow = new_llm(max_logprobs=2)
    (output,) = run(narrow, [ids], [replace(GREEDY, logprobs=2, prompt_logprobs=1)])
    assert {len(entry) for entry in output.outputs[0].logprobs} == {2}
    for count, asked in ((3, "3"), (-1, rf"-1 \(all {VOCAB} tokens\)")):
        for name in ("logprobs", "prompt_logprobs"):
            message = rf"{name}: expected at most 2, got {asked}; raise max_logprobs of LLM"
            with pytest.raises(ValueError, match=message):
                run(narrow, [ids], [replace(GREEDY, **{name: count})])
    for wrong in (-2, 1.0, "20", None, True):
        with pytest.raises(ValueError, match="max_logprobs: expected"):
            new_llm(max_logprobs=wrong)


def test_parameters_survive_json(new_llm, expected):
    """OpenAI's requests have strings as the keys of logit_bias."""
    params = SamplingParams(
        **json.loads(json.dumps({"logit_bias": {11: 3}, "temperature": 0, "max_tokens": NUM_NEW}))
    )
    assert params.logit_bias == {11: 3.0}
    ids, _ = expected["none"]
    llm = new_llm()
    assert tokens_of(run(llm, [ids], [params])) == tokens_of(
        run(llm, [ids], [replace(params, logit_bias={11: 3.0})])
    )
