"""What people touch: the right results in the right order, whatever happens in between, and nothing
left behind.
"""

import json
import math
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv import functional
from jaxkv.api.llm import LLM
from jaxkv.config import BeamSearchParams, SamplingParams
from jaxkv.errors import CheckpointError
from jaxkv.holding.allocator import KVHandle
from jaxkv.requests.outputs import RequestOutput
from jaxkv.requests.prompts import Prompt
from jaxkv.requests.request import Submission
from jaxkv.testing import engine_of, intake_of, model_of
from poison import poison_kv
from tokenizers_ import BOS, EOS, save_tokenizer

pytestmark = pytest.mark.usefixtures("quick_compile")

VOCAB = 420
SMALL = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 8,
    "dtype": "float32",
    "lazy_compile": True,
}
MAX_LEN = 128
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.5, max_tokens=20, ignore_eos=True)
PROMPTS = [
    "Once upon a time",
    {"prompt": "The end of"},
    {"prompt_token_ids": [9, 8, 7]},
    "One by one, by one, by one",
]
USER = {"role": "user", "content": "The end"}


@pytest.fixture(scope="module")
def shared(checkpoint) -> LLM:
    return LLM(checkpoint, max_model_len=MAX_LEN, **SMALL)


@pytest.fixture
def llm(shared) -> Iterator[LLM]:
    """The module's engine, which every test must leave empty."""
    yield shared
    assert_empty(shared)


@pytest.fixture
def make(shared, checkpoint) -> Callable[..., LLM]:
    """A new LLM with the compiled programs of the shared one, where the shapes are the same."""

    def make(model: Path = checkpoint, **options: object) -> LLM:
        llm = LLM(model, **SMALL | {"max_model_len": MAX_LEN} | options)
        if not {"num_gpu_blocks_override", "max_model_len", "dtype"} & options.keys():
            engine_of(llm).programs.executables = engine_of(shared).programs.executables
        return llm

    return make


def copy_of(
    checkpoint: Path, directory: Path, *, without: tuple[str, ...] = (), **files: object
) -> Path:
    """The checkpoint with some files left out and some JSON files written anew."""
    directory.mkdir(exist_ok=True)
    for file in checkpoint.iterdir():
        if file.name not in without:
            (directory / file.name).write_bytes(file.read_bytes())
    for stem, content in files.items():
        (directory / f"{stem}.json").write_text(
            content if isinstance(content, str) else json.dumps(content)
        )
    return directory


def assert_empty(llm: LLM) -> None:
    engine = engine_of(llm)
    engine.check()
    assert not engine.has_work
    assert engine.scheduler.allocator.num_used == 0
    assert len(engine.scheduler._free_rows) == 4


def run(llm: LLM, prompts: object, params: object = GREEDY) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def text_of(llm: LLM, ids: list[int], *, skip_special_tokens: bool = True) -> str:
    """Decoded at once; a last character that is not whole is left out."""
    return llm.get_tokenizer().decode(ids, skip_special_tokens=skip_special_tokens).rstrip("\ufffd")


def one(llm: LLM, prompt: object = PROMPTS[0], params: SamplingParams = GREEDY):
    (output,) = run(llm, prompt, params)
    return output.outputs[0]


def joined(pieces: list[RequestOutput]):
    """The stream as one output, and its last piece."""
    parts = [piece.outputs[0] for piece in pieces]
    assert all(part.finish_reason is None for part in parts[:-1])
    assert not any(piece.finished for piece in pieces[:-1])
    assert pieces[-1].finished
    whole = replace(parts[-1], text="".join(part.text for part in parts))
    whole.token_ids = [token for part in parts for token in part.token_ids]
    if whole.logprobs is not None:
        whole.logprobs = [entry for part in parts for entry in part.logprobs]
    return whole


# --- generate
# ---------------------------------------------------------------------------------------------------------


def test_results_come_in_input_order_each_with_its_own_parameters(llm):
    """Nine prompts of all kinds over four rows: each as if it were alone."""
    prompts = (PROMPTS * 3)[:9]
    params = [
        replace(GREEDY, max_tokens=1 + 3 * i)
        if i % 2
        else replace(DRAWN, max_tokens=30 - 3 * i, seed=i, top_k=40)
        for i in range(9)
    ]
    outputs = run(llm, prompts, params)
    assert [output.prompt for output in outputs[:4]] == [
        "Once upon a time",
        "The end of",
        None,
        PROMPTS[3],
    ]
    assert [len(ids) for ids in tokens(outputs)] == [p.max_tokens for p in params]
    for output, prompt, p in zip(outputs, prompts, params, strict=True):
        (alone,) = run(llm, prompt, p)
        assert alone.prompt_token_ids == output.prompt_token_ids
        assert alone.outputs == output.outputs
    assert len({output.request_id for output in outputs}) == 9
    assert all(output.finished and output.outputs[0].finished() for output in outputs)


def test_prompts_of_different_lengths_share_steps_without_touching_each_other(llm):
    """Also where the token budget leaves one token of a prompt to a step that holds a long chunk of
    another.
    """
    rng = np.random.default_rng(0)
    for lengths in ([31, 10], [15, 16, 3], [30, 1, 1, 9], [33, 31, 31], [40, 23, 1, 70], [32, 32]):
        prompts = [{"prompt_token_ids": rng.integers(3, VOCAB, size=n).tolist()} for n in lengths]
        together = tokens(run(llm, prompts, replace(GREEDY, max_tokens=5)))
        assert together == [
            tokens(run(llm, prompt, replace(GREEDY, max_tokens=5)))[0] for prompt in prompts
        ], lengths


def test_an_output_is_made_once(llm, monkeypatch):
    made, output = [], Submission.output
    monkeypatch.setattr(Submission, "output", lambda one: made.append(one.id) or output(one))
    outputs = run(llm, PROMPTS)
    assert [output.request_id for output in outputs] == made
    assert len(list(llm.as_completed((prompt, GREEDY) for prompt in PROMPTS))) == len(PROMPTS)
    assert len({*made}) == len(made) == 2 * len(PROMPTS)


def test_a_single_prompt_may_come_without_a_list(llm):
    for prompt in PROMPTS:
        assert tokens(run(llm, prompt)) == tokens(run(llm, [prompt]))
    assert run(llm, []) == []
    assert tokens(run(llm, tuple(PROMPTS))) == tokens(run(llm, PROMPTS))


def test_the_text_goes_on_where_the_prompt_ends(llm, make, tmp_path, checkpoint):
    save_tokenizer(tmp_path, "sentencepiece-like")
    for engine in (llm, make(tokenizer=tmp_path)):
        for output in run(
            engine, ["Once upon a time", "The end of the"], replace(GREEDY, max_tokens=40)
        ):
            before, ids = output.prompt_token_ids, output.outputs[0].token_ids
            whole = text_of(engine, before + ids)
            text = output.prompt + output.outputs[0].text
            if engine is llm:
                assert text == whole
            else:  # a decoder that shows nothing of a run of bytes with an invalid one: see tests/requests/test_text.py
                assert text.split("\ufffd")[0] == whole.split("\ufffd")[0]


def test_max_tokens_ends_with_length(llm):
    for count in (1, 8, 9, 17):
        completion = one(llm, params=replace(GREEDY, max_tokens=count))
        assert (len(completion.token_ids), completion.finish_reason, completion.stop_reason) == (
            count,
            "length",
            None,
        )
    longest = one(llm, params=GREEDY).token_ids
    assert one(llm, params=replace(GREEDY, max_tokens=9)).token_ids == longest[:9]


def test_without_max_tokens_the_context_is_the_end(llm):
    prompt = {"prompt_token_ids": [5] * 100}
    for params in (replace(GREEDY, max_tokens=None), replace(GREEDY, max_tokens=1000)):
        completion = one(llm, prompt, params)
        assert (len(completion.token_ids), completion.finish_reason) == (MAX_LEN - 100, "length")
    assert len(one(llm, {"prompt_token_ids": [5] * (MAX_LEN - 1)}).token_ids) == 1


def test_a_small_pool_is_the_end_too_and_serves_everyone_in_turn(make):
    llm = make(num_gpu_blocks_override=4)
    assert llm.num_kv_tokens == 32
    outputs = run(
        llm,
        [{"prompt_token_ids": [5] * n} for n in (25, 3, 31, 1)],
        replace(GREEDY, max_tokens=None),
    )
    assert [len(ids) for ids in tokens(outputs)] == [7, 29, 1, 31]
    assert {output.outputs[0].finish_reason for output in outputs} == {"capacity"}
    with pytest.raises(
        ValueError, match="the prompt has 32 tokens; the KV cache holds 32 of one request in all"
    ):
        run(llm, {"prompt_token_ids": [5] * 32})
    assert_empty(llm)


def test_a_seed_decides_and_another_seed_differs(llm):
    first = one(llm, params=replace(DRAWN, seed=1)).token_ids
    assert one(llm, params=replace(DRAWN, seed=1)).token_ids == first
    others = [
        one(llm, params=replace(DRAWN, seed=seed)).token_ids for seed in (2, 1 + 2**32, 2**32, -1)
    ]
    assert first not in others
    assert len({tuple(ids) for ids in others}) == 4
    assert (
        one(llm, params=DRAWN).token_ids != one(llm, params=DRAWN).token_ids
    )  # numbered submissions
    # Temperature 0 needs no seed, nor does the choice of one.
    assert one(llm, params=replace(DRAWN, top_k=1)).token_ids == one(llm).token_ids


def test_a_progress_bar_only_where_it_is_wanted(llm, capsys):
    run(llm, PROMPTS)
    list(llm.stream(PROMPTS[0], GREEDY))
    assert capsys.readouterr() == ("", "")
    llm.generate(PROMPTS, GREEDY)
    out, err = capsys.readouterr()
    assert out == ""
    assert "Processed prompts: 100%" in err
    assert "4/4" in err
    assert re.search(r"4/4 .*, \d+\.\d tokens/s\]", err)


# --- stopping
# ---------------------------------------------------------------------------------------------------------


def a_stop(llm: LLM, params: SamplingParams = GREEDY, at: int = 5) -> tuple[list[int], int]:
    """The tokens of a run, and the index of one that had not come before it and shows whole
    characters.
    """
    ids = one(llm, params=params).token_ids
    texts = [
        llm.get_tokenizer().decode(ids[:i], skip_special_tokens=True) for i in range(len(ids) + 1)
    ]
    whole = [text == text.rstrip("\ufffd") for text in texts]
    seen = [
        i for i in range(at, len(ids)) if whole[i] and whole[i + 1] and texts[i + 1] != texts[i]
    ]
    return ids, next(i for i in seen if ids[i] not in ids[:i])


def test_a_stop_token_is_kept_and_its_text_hidden(llm):
    ids, at = a_stop(llm)
    for stops in ([ids[at]], [ids[at], VOCAB - 1, ids[-1]]):
        completion = one(llm, params=replace(GREEDY, stop_token_ids=stops))
        assert completion.token_ids == ids[: at + 1]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", ids[at])
        assert completion.text == text_of(llm, ids[:at])
    shown = one(
        llm, params=replace(GREEDY, stop_token_ids=[ids[at]], include_stop_str_in_output=True)
    )
    assert shown.token_ids == ids[: at + 1]
    assert shown.text == text_of(llm, ids[: at + 1]) > completion.text


@pytest.mark.parametrize("key", ["generation_config", "config"])
def test_the_model_s_own_end_tokens_stop_unless_ignored(llm, make, checkpoint, tmp_path, key):
    ids, at = a_stop(llm)
    config = json.loads((checkpoint / "config.json").read_text())
    content = {"generation_config": {}, "config": config}[key] | {
        "eos_token_id": [ids[at], VOCAB - 1]
    }
    directory = copy_of(checkpoint, tmp_path, **{key: content})
    prompt = {"prompt_token_ids": llm.get_tokenizer().encode(PROMPTS[0])}
    # The main one needs no reason: the tokenizer's, and without a tokenizer the first in the file.
    for ending, reason in (
        (make(directory), ids[at]),
        (make(directory, skip_tokenizer_init=True), None),
    ):
        completion = one(ending, prompt, replace(GREEDY, ignore_eos=False))
        assert completion.token_ids == ids[: at + 1]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", reason)
        assert completion.text == (text_of(llm, ids[:at]) if ending.get_tokenizer() else "")
        assert one(ending, prompt, GREEDY).token_ids == ids
        both = one(ending, prompt, replace(GREEDY, ignore_eos=False, stop_token_ids=[ids[at]]))
        assert (both.token_ids, both.finish_reason) == (completion.token_ids, "stop")
        own = one(
            ending, prompt, replace(GREEDY, stop_token_ids=[ids[at]])
        )  # ignoring the model's, not the caller's
        assert (own.token_ids, own.stop_reason) == (completion.token_ids, ids[at])


def test_the_tokenizer_s_end_token_counts_too(make, checkpoint, tmp_path):
    llm = make(copy_of(checkpoint, tmp_path, generation_config={"eos_token_id": 77}))
    assert (model_of(llm).eos_ids, model_of(llm).eos_id) == ({77, EOS}, EOS)


def test_end_tokens_that_no_model_of_this_vocabulary_can_draw_are_left_out(
    make, checkpoint, tmp_path
):
    llm = make(copy_of(checkpoint, tmp_path, generation_config={"eos_token_id": [VOCAB, 77, -1]}))
    assert model_of(llm).eos_ids == {77, EOS}


def test_min_tokens_keeps_every_end_away(llm):
    ids, at = a_stop(llm, at=2)
    for minimum in (at + 1, at + 2, 15):
        completion = one(llm, params=replace(GREEDY, stop_token_ids=[ids[at]], min_tokens=minimum))
        assert len(completion.token_ids) >= minimum
        assert completion.token_ids[:at] == ids[:at]
        assert ids[at] not in completion.token_ids[:minimum]
    early = one(llm, params=replace(GREEDY, stop_token_ids=[ids[at]], min_tokens=at))
    assert early.token_ids == ids[: at + 1]
    text = one(llm).text
    stop = text[3:5]
    late = one(llm, params=replace(GREEDY, stop=stop, min_tokens=10))
    assert len(late.token_ids) > 10
    assert stop in late.text
    first = one(llm, params=replace(GREEDY, stop=stop))
    count = len(first.token_ids)
    assert one(llm, params=replace(GREEDY, stop=stop, min_tokens=count - 1)) == first
    assert len(one(llm, params=replace(GREEDY, stop=stop, min_tokens=count)).token_ids) > count


def test_min_tokens_keeps_an_ignored_end_token_away_as_vllm_does(llm):
    drawn_to_it = replace(GREEDY, ignore_eos=True, logit_bias={EOS: 100.0}, max_tokens=9)
    assert one(llm, params=drawn_to_it).token_ids == [EOS] * 9
    late = one(llm, params=replace(drawn_to_it, min_tokens=5)).token_ids
    assert EOS not in late[:5]
    assert late[5:] == [EOS] * 4


def test_a_stop_string_ends_the_text_and_is_named(llm):
    whole = one(llm, params=replace(DRAWN, seed=3, max_tokens=60))
    text = whole.text
    start = next(
        i
        for i in range(8, len(text) - 3)
        if text.find(text[i : i + 3]) == i and "\ufffd" not in text[i : i + 3]
    )
    stop = text[start : start + 3]
    params = replace(DRAWN, seed=3, max_tokens=60, stop=["never ever", stop])
    completion = one(llm, params=params)
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (
        text[:start],
        "stop",
        stop,
    )
    assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]
    assert stop in text_of(llm, completion.token_ids)
    assert stop not in text_of(llm, completion.token_ids[:-1])
    shown = one(llm, params=replace(params, include_stop_str_in_output=True))
    assert (shown.text, shown.token_ids) == (text[: start + 3], completion.token_ids)
    assert joined(list(llm.stream(PROMPTS[0], params))) == completion


def test_texts_without_special_tokens_with_them_and_none_at_all(llm):
    params = replace(DRAWN, temperature=20.0, seed=0, max_tokens=100)
    ids = one(llm, params=params).token_ids
    assert set(ids) & set(range(7))  # drawn almost evenly, so that special tokens are among them
    for skip in (True, False):
        completion = one(llm, params=replace(params, skip_special_tokens=skip))
        assert completion.token_ids == ids
        assert completion.text == text_of(llm, ids, skip_special_tokens=skip)
    silent = one(llm, params=replace(params, detokenize=False))
    assert (silent.text, silent.token_ids) == ("", ids)


# --- logprobs
# ---------------------------------------------------------------------------------------------------------


def test_logprobs_hold_the_sampled_token_and_the_k_best(llm):
    decode = llm.get_tokenizer().decode
    for k in (0, 1, 3, 20):
        completion = one(llm, params=replace(DRAWN, seed=5, logprobs=k))
        assert len(completion.logprobs) == len(completion.token_ids) == 20
        total = 0.0
        for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
            sampled = entry[token]
            best = sorted(entry.items(), key=lambda item: item[1].rank)
            assert [item[1].rank for item in best[:k]] == list(range(1, k + 1))
            assert len(entry) == (k if sampled.rank <= k else k + 1)
            values = [item[1].logprob for item in best]
            assert values == sorted(values, reverse=True)
            assert all(other.decoded_token == decode([t]) for t, other in entry.items())
            total += sampled.logprob
        assert completion.cumulative_logprob == pytest.approx(total)
    plain = one(llm, params=replace(DRAWN, seed=5))
    assert (plain.logprobs, plain.cumulative_logprob) == (None, None)
    assert plain.token_ids == completion.token_ids


def test_logprobs_are_a_distribution_and_the_same_in_decoding_as_in_prefill(llm):
    """Of the model's own logits, so they do not depend on how the token was drawn."""
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    drawn = one(llm, params=replace(DRAWN, seed=5, logprobs=20, max_tokens=10))
    for i in range(10):
        before = {"prompt_token_ids": ids + drawn.token_ids[:i]}
        (entry,) = one(llm, before, replace(GREEDY, logprobs=20, max_tokens=1)).logprobs
        best = [token for token, other in drawn.logprobs[i].items() if other.rank <= 20]
        assert set(best) == set(entry)
        for token in best:
            assert drawn.logprobs[i][token].logprob == pytest.approx(entry[token].logprob, abs=1e-4)
        assert 0.05 < sum(math.exp(other.logprob) for other in entry.values()) < 1.0


def test_neighbours_that_want_logprobs_change_nothing(llm):
    alone = run(llm, PROMPTS, GREEDY)
    mixed = run(
        llm, PROMPTS, [GREEDY, replace(GREEDY, logprobs=2), GREEDY, replace(GREEDY, logprobs=0)]
    )
    assert tokens(mixed) == tokens(alone)
    assert [output.outputs[0].logprobs is None for output in mixed] == [True, False, True, False]
    assert [len(entry) for entry in mixed[3].outputs[0].logprobs] == [1] * 20


# --- stream
# -----------------------------------------------------------------------------------------------------------

STREAMED = {
    "greedy": GREEDY,
    "seeded": replace(DRAWN, seed=7),
    "logprobs": replace(DRAWN, seed=7, logprobs=2),
    "one token": replace(GREEDY, max_tokens=1),
    "bytes": replace(DRAWN, seed=8, temperature=20.0, max_tokens=60),
    "stop": replace(DRAWN, seed=9, max_tokens=60, stop=["e", "never ever"]),
    "stop never met": replace(GREEDY, stop=["never ever"]),
    "no text": replace(GREEDY, detokenize=False),
}


@pytest.mark.parametrize("params", STREAMED.values(), ids=STREAMED)
def test_a_stream_is_generate_in_pieces(llm, params):
    for prompt in PROMPTS:
        pieces = list(llm.stream(prompt, params))
        assert joined(pieces) == one(llm, prompt, params)
        assert len(pieces) > 1 or params.max_tokens == 1 or params.stop
        (output,) = run(llm, prompt, params)
        assert {(piece.prompt, tuple(piece.prompt_token_ids)) for piece in pieces} == {
            (output.prompt, tuple(output.prompt_token_ids))
        }


def test_a_closed_stream_frees_its_pages_and_row(llm):
    for num_pieces in range(4):
        stream = llm.stream(PROMPTS[0], replace(GREEDY, max_tokens=60))
        for _ in range(num_pieces):
            next(stream)
        if num_pieces:
            assert engine_of(llm).scheduler.allocator.num_used > 0
        stream.close()
        assert_empty(llm)
    list(llm.stream(PROMPTS[0], GREEDY))
    assert_empty(llm)


def test_a_stream_that_is_never_read_holds_nothing(llm):
    stream = llm.stream(PROMPTS[0], GREEDY)
    assert_empty(llm)
    del stream


def test_two_streams_in_turn_are_each_what_they_would_be_alone(llm):
    params = [replace(DRAWN, seed=1, max_tokens=40), replace(GREEDY, max_tokens=25, logprobs=1)]
    alone = [one(llm, prompt, p) for prompt, p in zip(PROMPTS[:2], params, strict=True)]
    streams = [llm.stream(prompt, p) for prompt, p in zip(PROMPTS[:2], params, strict=True)]
    pieces: list[list[RequestOutput]] = [[], []]
    live = [0, 1]
    while live:
        for i in list(live):
            try:
                pieces[i].append(next(streams[i]))
                engine_of(llm).check()
            except StopIteration:
                live.remove(i)
    assert [joined(part) for part in pieces] == alone


def test_a_stream_goes_on_after_generate_ran_in_between(llm):
    params = replace(GREEDY, max_tokens=60)
    alone, others = one(llm, PROMPTS[0], params), tokens(run(llm, PROMPTS))
    for num_pieces in (1, 2, 5):
        stream = llm.stream(PROMPTS[0], params)
        pieces = [next(stream) for _ in range(num_pieces)]
        assert tokens(run(llm, PROMPTS)) == others
        engine_of(llm).check()
        assert joined(pieces + list(stream)) == alone
        assert_empty(llm)


def test_threads_that_share_an_engine_get_what_each_would_alone(llm):
    calls = [(prompt, replace(DRAWN, seed=seed)) for seed in range(3) for prompt in PROMPTS]
    alone = [llm.generate(*call, use_tqdm=False)[0].outputs for call in calls]
    with ThreadPoolExecutor(4) as threads:
        ran = list(threads.map(lambda call: llm.generate(*call, use_tqdm=False)[0].outputs, calls))
        streamed = threads.map(lambda call: [*llm.stream(*call)], calls)
        pieces = ["".join(one.outputs[0].text for one in stream) for stream in streamed]
    assert ran == alone
    assert pieces == [outputs[0].text for outputs in alone]


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_fork_of_a_process_in_which_jax_has_started_is_refused_by_name(llm, checkpoint):
    """Where it would wait for ever for threads that it has not, and for a lock that one of them
    has.
    """
    under_way = llm.stream(PROMPTS[0], GREEDY)
    next(under_way)
    model = functional.load(checkpoint, skip_tokenizer_init=True)
    kv = functional.empty(model, num_pages=2, num_rows=1)
    session, is_held, is_over = llm.session(PROMPTS[0]), threading.Event(), threading.Event()

    def hold() -> None:
        with engine_of(llm).lock:
            is_held.set()
            is_over.wait()

    calls = (
        lambda: run(llm, PROMPTS),
        lambda: next(under_way),
        lambda: LLM(checkpoint, **SMALL),
        lambda: functional.load(checkpoint),
        lambda: functional.prefill(model, kv, {0: [1]}),
        lambda: functional.decode(model, kv, {0: 1}, n=2),
        llm.wait_until_compiled,
        llm.reset_prefix_cache,
        llm.sleep,
        llm.page_table,
        lambda: llm.chat([{"role": "user", "content": "hi"}]),
        lambda: session.text,
        lambda: session.pages,
    )
    reads, writes = os.pipe()
    holder = threading.Thread(target=hold)
    holder.start()
    assert is_held.wait(20)
    child = os.fork()
    if not child:
        signal.alarm(20)  # ends what waits
        try:
            for call in calls:
                with pytest.raises(RuntimeError) as refusal:
                    call()
                os.write(writes, f"{refusal.value}\n".encode())
            llm.shutdown()  # which is for the parent to do
            os._exit(0)
        finally:
            os._exit(1)
    is_over.set()
    holder.join()
    os.close(writes)
    with open(reads, encoding="utf-8") as said:
        lines = said.readlines()
    assert os.waitpid(child, 0)[1] == 0
    assert len(lines) == len(calls)
    for line in lines:
        assert line.startswith("expected a process of its own, got one that was forked when JAX ha")
    assert sum(len(output.outputs[0].token_ids) for output in under_way) > 0


def test_a_stream_whose_request_the_engine_loses_does_not_hang(llm, monkeypatch):
    monkeypatch.setattr(engine_of(llm), "add", lambda _: None)
    monkeypatch.setattr(engine_of(llm), "step", lambda: pytest.fail("there is nothing to do"))
    with pytest.raises(RuntimeError, match="1 requests left the engine without a result"):
        next(llm.stream(PROMPTS[0], GREEDY))


def test_a_stream_refuses_at_the_call(llm):
    for prompt, params in (
        ("", GREEDY),
        ([1, "2"], GREEDY),
        (PROMPTS[0], replace(GREEDY, stop_token_ids=[VOCAB])),
    ):
        with pytest.raises(ValueError, match="prompt 0: "):
            llm.stream(prompt, params)


# --- errors leave nothing behind
# --------------------------------------------------------------------------------------


def broken_after(
    engine, monkeypatch, num_steps: int, error: BaseException, *, donated: bool = False
) -> None:
    """The engine fails in the device call after `num_steps` good ones; `donated`: with the pool
    already consumed.
    """
    calls = iter(range(10**6))
    programs = engine.programs

    def wrap(get):
        def broken(size: int):
            if next(calls) < num_steps:
                return get(size)

            def program(weights, kv, *_):
                if donated:
                    for store in kv.stores:
                        store.pages.delete()
                raise error

            return program

        return broken

    monkeypatch.setattr(programs, "step", wrap(programs.step))
    monkeypatch.setattr(programs, "loop", wrap(programs.loop))


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), RuntimeError("device"), MemoryError()], ids=repr
)
@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_an_error_in_a_step_leaves_nothing_behind(llm, monkeypatch, error, donated, num_steps):
    prompts = PROMPTS + PROMPTS[:2]  # two of them still wait
    before = tokens(run(llm, prompts))
    with monkeypatch.context() as patch:
        broken_after(engine_of(llm), patch, num_steps, error, donated=donated)
        with pytest.raises(type(error)):
            run(llm, prompts)
    assert_empty(llm)
    assert tokens(run(llm, prompts)) == before


class Failed:
    """What a device returns for an array that it failed to compute: nobody notices before it is
    read. `computed`: what it would have been.
    """

    def __init__(self, computed: jax.Array) -> None:
        self.computed = computed

    def is_deleted(self) -> bool:
        return False

    def delete(self) -> None:
        pass

    def block_until_ready(self) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: the device failed")

    def __array__(self, *_: object, **__: object) -> None:
        self.block_until_ready()


@pytest.mark.parametrize("num_calls", [0, 1, 2, 4])
def test_a_program_that_fails_on_the_device_leaves_nothing_behind(llm, monkeypatch, num_calls):
    """A step, the draw behind it, or a loop: from then on nothing is computed."""
    before, programs, calls = (
        tokens(run(llm, PROMPTS)),
        engine_of(llm).programs,
        iter(range(10**6)),
    )

    def wrap(get):
        def failing(size: int):
            good = get(size)

            def program(*inputs):
                known = jax.tree.map(lambda x: x.computed if isinstance(x, Failed) else x, inputs)
                outputs = good(*known)
                return outputs if next(calls) < num_calls else jax.tree.map(Failed, outputs)

            return program

        return failing

    with monkeypatch.context() as patch:
        for kind in ("step", "draw", "loop"):
            patch.setattr(programs, kind, wrap(getattr(programs, kind)))
        with pytest.raises(jax.errors.JaxRuntimeError, match="the device failed"):
            run(llm, PROMPTS)
    assert_empty(llm)
    assert tokens(run(llm, PROMPTS)) == before


def test_a_draw_that_fails_alone_leaves_nothing_behind(llm, monkeypatch):
    before, programs = tokens(run(llm, PROMPTS)), engine_of(llm).programs
    draw = programs.draw

    def failing(num_rows: int):
        return lambda *inputs: jax.tree.map(Failed, draw(num_rows)(*inputs))

    with monkeypatch.context() as patch:
        patch.setattr(programs, "draw", failing)
        # Read before the next step is launched, so that the pool is whole.
        patch.setattr(type(engine_of(llm).scheduler), "needs_results", True)
        with pytest.raises(jax.errors.JaxRuntimeError, match="the device failed"):
            run(llm, PROMPTS)
    assert_empty(llm)
    assert tokens(run(llm, PROMPTS)) == before


@pytest.mark.parametrize("donated", [False, True])
def test_an_error_in_a_stream_leaves_nothing_behind(llm, monkeypatch, donated):
    before = one(llm).token_ids
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    with monkeypatch.context() as patch:
        broken_after(engine_of(llm), patch, 0, KeyboardInterrupt(), donated=donated)
        with pytest.raises(KeyboardInterrupt):
            list(stream)
    assert_empty(llm)
    assert one(llm).token_ids == before


@pytest.mark.parametrize("donated", [False, True])
def test_an_error_in_a_step_that_a_stream_shared_ends_the_stream_with_abort(
    llm, monkeypatch, donated
):
    alone = one(llm)
    stream = llm.stream(PROMPTS[0], GREEDY)
    pieces = [next(stream)]
    with monkeypatch.context() as patch:
        broken_after(engine_of(llm), patch, 0, KeyboardInterrupt(), donated=donated)
        with pytest.raises(KeyboardInterrupt):
            run(llm, PROMPTS)
    assert_empty(llm)
    cut = joined(pieces + list(stream))
    assert (cut.finish_reason, cut.stop_reason) == ("abort", None)
    assert cut.token_ids == alone.token_ids[: len(cut.token_ids)]
    assert alone.text.startswith(cut.text)
    assert one(llm) == alone


@pytest.mark.parametrize("donated", [False, True])
def test_a_request_that_was_not_in_the_failed_step_goes_on_even_if_the_pool_was_lost(
    llm, monkeypatch, donated
):
    alone, engine = one(llm), engine_of(llm)
    prompts = [{"prompt_token_ids": [5] * 100}, PROMPTS[0]]  # the first one's prompt fills a step
    long, short = intake_of(llm).accept(prompts, [GREEDY] * 2)
    engine.add(long)
    engine.add(short)
    with monkeypatch.context() as patch:
        broken_after(engine, patch, 0, KeyboardInterrupt(), donated=donated)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    engine.check()
    assert [s.samples[0].finish_reason for s in (long, short)] == ["abort", None]
    while engine.has_work:
        engine.step()
    assert short.output().outputs[0] == alone
    assert_empty(llm)
    assert one(llm) == alone


def test_check_sees_pages_that_the_row_tables_do_not_have(llm):
    engine, stream = engine_of(llm), llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    engine.check()
    (request,), (table,) = engine.scheduler.running, engine._rows.tables
    for owner, name, wrong in [
        (table, "table_RW", table.table_RW + 1),
        (request.hold, "bound_len", 999),
    ]:
        right = getattr(owner, name)
        setattr(owner, name, wrong)
        with pytest.raises(RuntimeError, match=r"the (table has|row tables know)"):
            engine.check()
        setattr(owner, name, right)
    engine.check()
    stream.close()


def test_an_abort_during_a_step_waits_for_its_end(llm, monkeypatch):
    """The garbage collector may close a forgotten stream at any moment, also in the middle of a
    step.
    """
    alone, engine = one(llm), engine_of(llm)
    stream, other = (llm.stream(PROMPTS[0], GREEDY) for _ in range(2))
    next(stream)
    pieces = [next(other)]
    bind = engine._rows.bind

    def closing(*args):
        stream.close()
        engine.check()
        return bind(*args)

    with monkeypatch.context() as patch:
        patch.setattr(engine._rows, "bind", closing)
        pieces.append(next(other))
    engine.check()
    assert len(engine._requests) == 1
    assert engine._aborted == []
    assert joined(pieces + list(other)) == alone


# --- the front door
# ---------------------------------------------------------------------------------------------------


def test_generate_names_every_bad_index_before_any_work_starts(llm, make, monkeypatch):
    """And later calls give what a fresh engine gives, the seeds of unseeded requests included."""
    engine = make()
    with monkeypatch.context() as patch:
        patch.setattr(engine_of(engine), "step", None)
        patch.setattr(engine_of(engine), "add", None)
        bad = [
            "",
            "The end",
            {"prompt_token_ids": [VOCAB]},
            "x" * 1000,
            3,
            {"prompt_token_ids": [-1]},
            "\ud800",
        ]
        with pytest.raises(ValueError, match="prompt 0") as caught:
            run(engine, bad, DRAWN)
        lines = str(caught.value).split("\n")
        assert [line.split(":")[0] for line in lines] == [
            f"prompt {index}" for index in (0, 2, 3, 4, 5, 6)
        ]
        params = [DRAWN, replace(DRAWN, stop_token_ids=[-1]), DRAWN, None]
        with pytest.raises(
            ValueError, match=r"^prompt 1: stop_token_ids: .*\nprompt 3: sampling_params: [^\n]*$"
        ):
            run(engine, PROMPTS, params)
        for wrong in ([DRAWN] * 3, [DRAWN] * 5, []):
            with pytest.raises(
                ValueError, match=rf"sampling_params: expected one or 4 .*, got {len(wrong)}"
            ):
                run(engine, PROMPTS, wrong)
        with pytest.raises(ValueError, match="conversation 1: "):
            engine.chat([[USER], [{"role": "wizard", "content": "x"}]], DRAWN, use_tqdm=False)
        with pytest.raises(ValueError, match="prompt 0: "):
            engine.stream("", DRAWN)
    assert_empty(engine)
    assert [tokens(run(engine, PROMPTS, DRAWN)) for _ in range(2)] == [
        tokens(run(fresh, PROMPTS, DRAWN)) for fresh in [make()] for _ in range(2)
    ]
    # The seed of the engine and the number of the submission: two calls differ, and so does another
    # engine's seed.
    assert (
        len(
            {
                json.dumps(tokens(run(e, PROMPTS, DRAWN)))
                for e in (make(), make(seed=1), make(seed=2))
            }
        )
        == 3
    )


@pytest.mark.parametrize(
    "prompts",
    [None, 3, 1.5, b"The end", {"The end"}, iter(PROMPTS)],
    ids=lambda x: type(x).__name__,
)
def test_what_is_no_list_of_prompts_is_a_value_error(llm, prompts):
    with pytest.raises(
        ValueError,
        match=f"prompts: expected a prompt or a list of them, got {type(prompts).__name__}",
    ):
        run(llm, prompts)


@pytest.mark.parametrize("prompts", [[3.0, 4], [None], [b"The end"], [["The end"]]], ids=repr)
def test_a_list_of_something_else_names_its_indices(llm, prompts):
    with pytest.raises(ValueError, match="prompt 0: expected a text"):
        run(llm, prompts)


@pytest.mark.parametrize("params", [3, "greedy", {"temperature": 0}, [3, 3, 3, 3]], ids=repr)
def test_what_is_no_sampling_params_is_a_value_error(llm, params):
    with pytest.raises(ValueError, match="sampling_params: expected "):
        run(llm, PROMPTS, params)


BAD_ARGUMENTS = {
    "unknown": (
        {"max_model_length": 9},
        r"LLM: unknown argument max_model_length, did you mean max_model_len\?$",
    ),
    "a name of vLLM's": (
        {"cpu_offload_gb": 4},
        "cpu_offload_gb: expected 0 or 0.0 .a vLLM argument .* nearest: quantization., got 4$",
    ),
    "tensor_parallel_size": (
        {"tensor_parallel_size": 2},
        "_size: expected 1 to 1, the devices here, got 2",
    ),
    "tensor_parallel_size 0": (
        {"tensor_parallel_size": 0},
        "tensor_parallel_size: expected 1 to 1, .* got 0",
    ),
    "enable_prefix_caching": (
        {"enable_prefix_caching": 1},
        "enable_prefix_caching: expected True or False, got 1",
    ),
    "prefix_cache_secret": (
        {"prefix_cache_secret": "s"},
        "prefix_cache_secret: expected bytes or None, got str",
    ),
    "quantization": ({"quantization": "awq"}, "quantization: expected None .*, got 'awq'"),
    "tokenizer": (
        {"tokenizer": "x", "skip_tokenizer_init": True},
        "tokenizer: expected None with skip_tokenizer_init",
    ),
    "dtype": (
        {"dtype": "float16"},
        "dtype: expected one of auto, bfloat16, float32, got 'float16'",
    ),
    "kv_cache_dtype": (
        {"kv_cache_dtype": "fp2"},
        "kv_cache_dtype: expected auto or one of .*, got 'fp2'",
    ),
    "backend": ({"backend": "cuda"}, "backend: expected 'auto' or one of .*, got 'cuda'"),
    "max_model_len": (
        {"max_model_len": 257},
        r"max_model_len: expected at most 256 \(the checkpoint's\), got 257",
    ),
    "max_model_len 0": ({"max_model_len": 0}, "max_model_len: expected a number >= 1, got 0"),
    "max_num_seqs": (
        {"max_num_seqs": 33},
        "max_num_seqs: expected at most max_num_batched_tokens = 32, got 33",
    ),
    "max_num_batched_tokens": (
        {"max_num_batched_tokens": 8},
        "max_num_batched_tokens: expected at least 16, got 8",
    ),
    "block_size": ({"block_size": 10}, "block_size: expected one of .*, got 10"),
    "max_logprobs": ({"max_logprobs": -2}, "max_logprobs: expected a number >= 0, got -2"),
    "seed": ({"seed": -1}, "seed: expected .*, got -1"),
    "kv_cache_memory_bytes": (
        {"kv_cache_memory_bytes": 10},
        "kv_cache_memory_bytes: expected at least one page",
    ),
    "num_gpu_blocks_override": (
        {"num_gpu_blocks_override": 0},
        "num_gpu_blocks_override: expected a number >= 1",
    ),
    "both": ({"kv_cache_memory_bytes": 10**6, "num_gpu_blocks_override": 9}, "got both"),
    "gpu_memory_utilization": (
        {"gpu_memory_utilization": 1.5},
        "gpu_memory_utilization: expected a number in",
    ),
    "revision": ({"revision": "main"}, "expected no revision for a local directory, got 'main'"),
}


@pytest.mark.parametrize(("options", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_a_bad_argument_is_a_value_error_that_names_it(checkpoint, options, message):
    with pytest.raises(ValueError, match=message):
        LLM(checkpoint, **SMALL | options)


def test_vllm_s_arguments_may_be_given_where_they_change_nothing(make):
    nothing = {
        "tensor_parallel_size": 1,
        "quantization": None,
        "trust_remote_code": True,  # the tokenizer has no code of its own
    }
    assert tokens(run(make(**nothing), PROMPTS)) == tokens(run(make(), PROMPTS))


@pytest.mark.parametrize(
    ("backend", "message"),
    [("mosaic_gpu", ": expected a GPU, got cpu"), ("pallas_tpu", ": expected a TPU, got cpu")],
)
def test_a_named_backend_that_cannot_do_it_raises(checkpoint, backend, message):
    with pytest.raises(NotImplementedError, match=f"backend='{backend}'{message}"):
        LLM(checkpoint, backend=backend, **SMALL)


def test_a_missing_directory_or_file_is_named(checkpoint, tmp_path):
    with pytest.raises(
        CheckpointError, match=r"nothing-here: expected a directory with config\.json"
    ):
        LLM(tmp_path / "nothing-here", **SMALL)
    for missing, message in (
        ("config.json", r"config\.json: not found"),
        ("model.safetensors", r"expected .*model\.safetensors"),
        ("tokenizer", r"expected tokenizer\.json or tokenizer_config\.json, got neither"),
    ):
        without = (
            ("tokenizer.json", "tokenizer_config.json") if missing == "tokenizer" else (missing,)
        )
        directory = copy_of(checkpoint, tmp_path / missing, without=without)
        with pytest.raises(CheckpointError, match=message):
            LLM(directory, **SMALL)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "expected JSON"),
        ("[]", "expected a JSON object, got list"),
        ({"eos_token_id": 2.0}, "eos_token_id"),
        ({"eos_token_id": [2, True]}, "eos_token_id"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": list(range(65))}, "at most 64 token ids"),
    ],
)
def test_a_broken_generation_config_is_refused(checkpoint, tmp_path, content, message):
    with pytest.raises(CheckpointError, match=message):
        LLM(copy_of(checkpoint, tmp_path, generation_config=content), **SMALL)


# --- defaults, chat, tokenizers, description
# --------------------------------------------------------------------------


def test_generation_config_gives_the_default_parameters(llm, make, checkpoint, tmp_path):
    assert llm.get_default_sampling_params() == SamplingParams()
    given = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "max_new_tokens": 5,
        "do_sample": True,
    }
    asking = make(copy_of(checkpoint, tmp_path, generation_config=given))
    assert asking.get_default_sampling_params() == SamplingParams(
        temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, max_tokens=5
    )
    assert [len(ids) <= 5 for ids in tokens(run(asking, PROMPTS, None))] == [True] * 4
    assert tokens(run(make(), PROMPTS, None)) == tokens(run(make(), PROMPTS, SamplingParams()))


def test_a_repetition_penalty_of_the_model_s_own_is_used(llm, make, checkpoint, tmp_path):
    asking = make(copy_of(checkpoint, tmp_path, generation_config={"repetition_penalty": 1.7}))
    params = asking.get_default_sampling_params()
    assert params == SamplingParams(repetition_penalty=1.7)
    greedy = replace(params, temperature=0.0)
    assert tokens(run(asking, PROMPTS, greedy)) == tokens(run(llm, PROMPTS, greedy))
    assert tokens(run(llm, PROMPTS, greedy)) != tokens(
        run(llm, PROMPTS, replace(greedy, repetition_penalty=1.0))
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("repetition_penalty", 0),
        ("temperature", "hot"),
        ("temperature", math.nan),
        ("top_k", -5),
        ("top_p", [0.9]),
        ("min_p", True),
        ("max_new_tokens", "10"),
        ("max_new_tokens", 0),
    ],
)
def test_a_generation_config_that_asks_for_what_cannot_be_says_how_to_go_on(
    checkpoint, tmp_path, key, value
):
    directory = copy_of(checkpoint, tmp_path, generation_config={key: value})
    expected = rf"generation_config\.json: {key}: expected .*, got {re.escape(repr(value))}; "
    with pytest.raises(CheckpointError, match=expected + "correct it, or pass generation_config="):
        LLM(directory, **SMALL)


def test_a_generation_config_that_asks_for_what_cannot_be_may_be_left_out(
    make, checkpoint, tmp_path
):
    directory = copy_of(checkpoint, tmp_path, generation_config={"repetition_penalty": 0})
    llm = make(directory, generation_config="vllm")
    assert len(tokens(run(llm, PROMPTS, None))) == 4


def test_chat_is_generate_on_the_rendered_conversation(llm):
    tokenizer = llm.get_tokenizer()
    conversations = [[USER], [USER, {"role": "assistant", "content": "of"}, USER]]
    texts = [
        tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True)
        for c in conversations
    ]
    prompts = [
        {"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)} for text in texts
    ]
    want = run(llm, prompts)
    got = llm.chat(conversations, GREEDY, use_tqdm=False)
    assert tokens(got) == tokens(want)
    assert [output.prompt for output in got] == texts
    assert [output.prompt_token_ids for output in got] == [
        prompt["prompt_token_ids"] for prompt in prompts
    ]
    assert got[0].prompt_token_ids.count(BOS) == 1
    (single,) = llm.chat(conversations[0], GREEDY, use_tqdm=False)
    assert single.outputs == got[0].outputs
    (bare,) = llm.chat([USER], GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert bare.prompt == "<s><|user|>The end<|end|>\n"
    (own,) = llm.chat(
        [USER],
        GREEDY,
        use_tqdm=False,
        chat_template="{{ messages[0].content }} of{{ end }}",
        chat_template_kwargs={"end": "!"},
    )
    assert own.prompt == "The end of!"
    (open_end,) = llm.chat(
        [USER, {"role": "assistant", "content": "One by"}],
        GREEDY,
        use_tqdm=False,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert open_end.prompt.endswith("<|assistant|>One by")


@pytest.mark.parametrize("messages", [None, 3, USER, "The end", [3], [[USER], "The end"]], ids=repr)
def test_what_is_no_conversation_is_a_value_error(llm, messages):
    with pytest.raises(ValueError, match="message"):
        llm.chat(messages, GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, None) for name in ("use_tqdm", "add_generation_prompt", "continue_final_message")),
        ("add_generation_prompt", "no"),
        ("chat_template", 3),
        ("tools", {"name": "add"}),
    ],
)
def test_an_argument_of_another_kind_is_refused_by_name(llm, name, value):
    with pytest.raises(ValueError, match=f"^{name}: expected .*, got {re.escape(repr(value))}$"):
        llm.chat([USER], GREEDY, **{"use_tqdm": False, name: value})
    if name == "use_tqdm":
        with pytest.raises(
            ValueError, match=r"^use_tqdm: expected True, False or a class such as tqdm, got None$"
        ):
            llm.generate(PROMPTS, GREEDY, use_tqdm=None)
        with pytest.raises(
            ValueError, match=r"^use_tqdm: expected True, False or a class such as tqdm, got None$"
        ):
            llm.beam_search(PROMPTS, BeamSearchParams(beam_width=1, max_tokens=1), use_tqdm=None)


def test_the_tokenizer_may_come_from_another_directory_or_not_at_all(make, checkpoint, tmp_path):
    bare = copy_of(
        checkpoint, tmp_path / "bare", without=("tokenizer.json", "tokenizer_config.json")
    )
    save_tokenizer(tmp_path / "other", "sentencepiece-like")
    other = make(bare, tokenizer=tmp_path / "other")
    assert run(other, "The end")[0].prompt_token_ids == other.get_tokenizer().encode("The end")
    assert other.get_tokenizer().convert_ids_to_tokens(7) == "<0x00>"
    with pytest.raises(ValueError, match="chat: this tokenizer has no chat template"):
        other.chat([USER], GREEDY, use_tqdm=False)
    none = make(bare, skip_tokenizer_init=True)
    assert none.get_tokenizer() is None
    ids = {"prompt_token_ids": [9, 8, 7]}
    completion = one(none, ids, replace(GREEDY, logprobs=1))
    assert completion.token_ids == one(make(), ids).token_ids
    assert completion.text == ""
    assert {entry.decoded_token for part in completion.logprobs for entry in part.values()} == {
        None
    }
    for call in (lambda: run(none, "The end"), lambda: run(none, ids, SamplingParams(stop="x"))):
        with pytest.raises(ValueError, match="skip_tokenizer_init=True"):
            call()
    with pytest.raises(ValueError, match="chat: expected a tokenizer"):
        none.chat([USER], GREEDY, use_tqdm=False)


def test_describe_says_what_this_engine_is(llm, checkpoint):
    llm.wait_until_compiled()
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    text = llm.describe()
    used = engine_of(llm).scheduler.allocator.num_used
    for part in (
        str(checkpoint),
        "llama, 3 layers, 6 query heads",
        f"MiB float32 on {jax.devices()[0]}",
        "512 tokens = 64 pages of 8, 32 numbers per token and layer in float32",
        "MiB float32",
        f"{used} pages in use",
        "4 rows, 128 tokens per row, 32 tokens per step, 8 decode steps per loop",
        f"{engine_of(llm).programs.num_compiled} compiled in ",
        "steps of 32 tokens, loops of 2, 4 rows",
        "backend   xla (chosen by auto on a cpu)",
    ):
        assert part in text, text
    assert used > 0
    assert llm.num_kv_tokens == 512
    stream.close()


@pytest.mark.parametrize("kept", [0, 1])
def test_page_table_lists_the_memory_of_each_running_request(llm, kept):
    """With NaN in everything but the slots that the table gives a stream, that stream still ends as
    it would alone.
    """
    alone = one(llm, PROMPTS[kept])
    other, stream = llm.stream(PROMPTS[1 - kept], GREEDY), llm.stream(PROMPTS[kept], GREEDY)
    other_id = next(other).request_id
    pieces = [next(stream), next(stream)]
    table, stream_id = llm.page_table(), pieces[0].request_id
    assert table.keys() == {other_id, stream_id}
    assert sum(map(len, table.values())) == engine_of(llm).scheduler.allocator.num_used
    other.close()
    llm.reset_prefix_cache()  # what it holds is poisoned below
    assert llm.page_table() == {stream_id: table[stream_id]}
    # What steps that are under way store is there as well. The newest token of all is not stored
    # yet.
    num_read = len(pieces[0].prompt_token_ids) + sum(
        len(piece.outputs[0].token_ids) for piece in pieces
    )
    (running,) = engine_of(llm).scheduler.running
    num_stored = num_read + running.num_coming - 1
    engine_of(llm).kv = poison_kv(engine_of(llm).kv, [KVHandle(table[stream_id], num_stored)])
    assert joined(pieces + list(stream)) == alone
    assert llm.page_table() == {}


def test_the_public_names_are_those_of_the_package():
    assert jaxkv.LLM is LLM
    assert jaxkv.SamplingParams is SamplingParams
    assert jaxkv.PromptType is Prompt
    for name in set(jaxkv.__all__) - {"__version__", "PromptType"}:
        assert getattr(jaxkv, name).__name__ == name


def test_a_token_that_logprobs_list_is_decoded_once(llm, monkeypatch):
    """Entries list the same few tokens over and over; decoding them cost most of the time."""
    decoded, decode = [], llm.get_tokenizer().decode

    def counting(ids, **options):
        decoded.append(tuple(ids))
        return decode(ids, **options)

    monkeypatch.setattr(llm.get_tokenizer(), "decode", counting)
    params = replace(GREEDY, detokenize=False, logprobs=5, prompt_logprobs=5)
    for _ in range(2):
        (output,) = llm.generate([PROMPTS[2]], params, use_tqdm=False)
    assert len(decoded) == len(set(decoded))
    for entry in (output.prompt_logprobs or [])[1:] + output.outputs[0].logprobs:
        assert {one.decoded_token for one in entry.values()} == {decode([id]) for id in entry}
