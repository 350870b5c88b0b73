"""Beam search: the tokens of transformers' for every beam, whatever runs beside it and whoever has
to give way.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxkv import LLM, BeamSearchOutput, BeamSearchParams, BeamSearchSequence, SamplingParams
from jaxkv.engine.beams import beam_output
from jaxkv.engine.plan import Plan
from jaxkv.testing import engine_of, intake_of
from poison import poisoned
from tiers import some
from tiny import SMALL, make_checkpoint, tiny_config
from tokenizers_ import save_tokenizer

pytestmark = pytest.mark.usefixtures("quick_compile", "one_loop")

PAGE = SMALL["block_size"]
VOCAB = 151
EOS = {"no": None, "one": [7], "many": list(range(7, VOCAB, 10))}
"""End tokens. Of 15 among 151 enough come up for a search to be over before max_tokens."""
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE - 1, 3 * PAGE, 21)
"""Of prompts: around page borders."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Checkpoints by family and end tokens; the weights do not depend on these."""
    folder = tmp_path_factory.mktemp("beam")
    for family in ("llama", "qwen3-layer-types"):
        for name, ids in EOS.items():
            config = tiny_config(family, vocab_size=VOCAB) | {
                "eos_token_id": ids,
                "bos_token_id": None,
            }
            make_checkpoint(folder / f"{family} {name}", config)
    return folder


@pytest.fixture
def make(folder, compile_once):
    def make(family: str = "llama", eos: str = "many", **options: Any) -> LLM:
        return LLM(
            folder / f"{family} {eos}", **SMALL | {"max_num_seqs": 5, "max_logprobs": 80} | options
        )

    return make


def prompts_of(lengths: tuple[int, ...], seed: int = 0) -> list[dict]:
    rng = np.random.default_rng(seed)
    return [{"prompt_token_ids": rng.integers(0, VOCAB, length).tolist()} for length in lengths]


def tokens_of(outputs: list[BeamSearchOutput]) -> list[list[list[int]]]:
    return [[sequence.tokens for sequence in output.sequences] for output in outputs]


def assert_empty(llm: LLM) -> None:
    engine = engine_of(llm)
    engine.check()
    assert not engine.has_work
    assert engine.scheduler.allocator.num_used == 0


# --- transformers is the law
# ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(folder):
    """(family, end tokens, prompt, parameters) -> the tokens of all beams, by transformers in
    float32.
    """
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)  # these models are too small for two, which would wait for each other
    from transformers import AutoModelForCausalLM

    models = {}

    def search(family: str, eos: str, prompt: dict, params: BeamSearchParams) -> list[list[int]]:
        if family not in models:
            models[family] = AutoModelForCausalLM.from_pretrained(
                folder / f"{family} no", dtype=torch.float32, attn_implementation="eager"
            ).eval()
        ids = None if params.ignore_eos else EOS[eos]
        models[family].generation_config.eos_token_id = ids
        models[family].generation_config.pad_token_id = 0
        with torch.no_grad():
            found = (
                models[family]
                .generate(
                    torch.tensor([prompt["prompt_token_ids"]]),
                    attention_mask=torch.ones(1, len(prompt["prompt_token_ids"]), dtype=torch.long),
                    num_beams=params.beam_width,
                    num_return_sequences=params.beam_width,
                    do_sample=False,
                    length_penalty=params.length_penalty,
                    max_new_tokens=params.max_tokens,
                )
                .tolist()
            )
        return [cut(tokens, len(prompt["prompt_token_ids"]), ids or []) for tokens in found]

    return search


def cut(tokens: list[int], prompt_len: int, eos_ids: list[int]) -> list[int]:
    """Without the padding after the end token."""
    ends = [i for i, token in enumerate(tokens) if i >= prompt_len and token in eos_ids]
    return tokens[: ends[0] + 1] if ends else tokens


SETTINGS = [("llama", eos, penalty) for eos in EOS for penalty in (1, 0.0, 2.0, -1.0, 0.6)]
SETTINGS = some(SETTINGS, SETTINGS[12])
SETTINGS += some(("qwen3-layer-types", eos, 1.0) for eos in EOS)


@pytest.mark.parametrize(("family", "eos", "length_penalty"), SETTINGS)
def test_all_beams_are_those_of_transformers(make, reference, family, eos, length_penalty):
    """Prompts of different length together, around page borders; all widths."""
    llm = make(family, eos)
    for width in (1, 2, 3, 4, 5):
        prompts = prompts_of(LENGTHS, seed=width)[width % 3 :: 1 if width == 4 else 3]
        params = BeamSearchParams(beam_width=width, max_tokens=19, length_penalty=length_penalty)
        got = tokens_of(llm.beam_search(prompts, params))
        for prompt, beams in zip(prompts, got, strict=True):
            assert beams == reference(family, eos, prompt, params)
    assert_empty(llm)


# --- what comes back
# --------------------------------------------------------------------------------------------------


def test_a_sequence_tells_its_tokens_logprobs_and_how_it_ended(make):
    llm = make()
    prompts = prompts_of((PAGE + 3,) * 6, seed=5)
    params = BeamSearchParams(beam_width=4, max_tokens=9)
    outputs = llm.beam_search(prompts, params)
    assert [len(output.sequences) for output in outputs] == [4] * 6
    start, reasons = PAGE + 3, set()
    sequences = [one for output in outputs for one in output.sequences]
    for number, sequence in enumerate(sequences):
        assert isinstance(sequence, BeamSearchSequence)
        assert sequence.tokens[:start] == prompts[number // 4]["prompt_token_ids"]
        new, last = sequence.tokens[start:], sequence.tokens[-1]
        assert sequence.text is None
        assert len(sequence.logprobs) == len(new)
        assert all(len(entry) == 4 * 16 for entry in sequence.logprobs)
        assert sequence.cum_logprob == pytest.approx(
            sum(entry[token].logprob for token, entry in zip(new, sequence.logprobs, strict=True)),
            rel=1e-6,
        )
        (scored,) = llm.generate(
            {"prompt_token_ids": sequence.tokens},
            SamplingParams(max_tokens=1, prompt_logprobs=1),
            use_tqdm=False,
        )
        own = [
            entry[token].logprob
            for token, entry in zip(new, scored.prompt_logprobs[start:], strict=True)
        ]
        assert sequence.cum_logprob == pytest.approx(sum(own), rel=1e-5)
        stopped = last in EOS["many"]
        assert sequence.finish_reason == ("stop" if stopped else "length")
        assert sequence.stop_reason == (last if stopped and last != EOS["many"][0] else None)
        assert stopped or len(new) == 9
        reasons.add((sequence.finish_reason, sequence.stop_reason is None))
    assert reasons == {("stop", True), ("stop", False), ("length", True)}
    for output in outputs:
        scores = [one.cum_logprob / (len(one.tokens) - start) for one in output.sequences]
        assert scores == sorted(scores, reverse=True)
    (ignoring,) = llm.beam_search(prompts[:1], replace(params, ignore_eos=True))
    assert {(len(one.tokens) - start, one.finish_reason) for one in ignoring.sequences} == {
        (9, "length")
    }


@pytest.mark.slow
def test_the_text_leaves_the_end_token_out_unless_asked(tmp_path, compile_once):
    save_tokenizer(make_checkpoint(tmp_path, tiny_config("llama", vocab_size=420)))
    llm = LLM(tmp_path, **SMALL | {"skip_tokenizer_init": False})
    decode = llm.get_tokenizer().decode
    params = BeamSearchParams(beam_width=3, max_tokens=40, length_penalty=-2.0)  # short ones first
    prompts = ["Once upon a time", "The end of", "the next one", "by one"]
    outputs = (
        llm.beam_search(prompts, replace(params, include_stop_str_in_output=on))
        for on in (False, True)
    )
    plain, whole = ([one for output in found for one in output.sequences] for found in outputs)
    assert [one.tokens for one in plain] == [one.tokens for one in whole]
    assert sum(one.finish_reason == "stop" for one in plain) > 0
    for without, with_end in zip(plain, whole, strict=True):
        assert with_end.text == decode(with_end.tokens)
        hidden = without.tokens[:-1] if without.finish_reason == "stop" else without.tokens
        assert without.text == decode(hidden)
        assert without.logprobs[0][without.tokens[-len(without.logprobs)]].decoded_token is not None


def test_nothing_at_the_context_end_is_lost(make):
    """A search that max_model_len ends is one with so many max_tokens."""
    llm = make()
    (prompt,) = prompts_of((SMALL["max_model_len"] - 10,))
    ended, asked = (
        llm.beam_search(prompt, BeamSearchParams(beam_width=3, max_tokens=n)) for n in (50, 10)
    )
    assert tokens_of(ended) == tokens_of(asked)
    assert {one.finish_reason for one in ended[0].sequences} <= {"length", "stop"}


# --- pages
# ------------------------------------------------------------------------------------------------------------


def beams_of(llm: LLM) -> list[Any]:
    return [request for request in engine_of(llm).scheduler.running if request.search is not None]


def common(a: list[int], b: list[int]) -> int:
    """Tokens that two sequences begin with alike."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def test_beams_share_all_full_pages_of_their_past_and_copy_only_tails_that_others_hold(
    make, monkeypatch
):
    llm = make()
    engine = engine_of(llm)
    copied: list[tuple[int, int]] = []
    move_pages = engine._move_pages

    def recorded(plan: Plan) -> None:
        copied.extend(plan.copies)
        move_pages(plan)

    plan, before = engine.scheduler.plan, []

    def planned() -> Any:
        beams = beams_of(llm)
        tails = [
            beam.hold.handle().pages[-1]
            for beam in beams
            if beam.hold.handle().length % PAGE and beam.num_pending
        ]
        full = {
            page
            for beam in beams
            for page in beam.hold.handle().pages[: beam.hold.handle().length // PAGE]
        }
        before[:] = len(tails) - len(set(tails)), full  # the last holder writes in place
        return plan()

    monkeypatch.setattr(engine, "_move_pages", recorded)
    monkeypatch.setattr(engine.scheduler, "plan", planned)
    (submission,) = intake_of(llm).accept_searches(
        prompts_of((3 * PAGE + 2,)), BeamSearchParams(beam_width=4, max_tokens=40, ignore_eos=True)
    )
    engine.add(submission)
    num_shared_tails = 0
    while engine.has_work:
        copied.clear()
        engine.step()
        expected, full = before
        assert len(copied) == expected
        assert not full & {page for copy in copied for page in copy}
        num_shared_tails += expected
        for a, b in combinations(beams_of(llm), 2):
            if a.num_new and b.num_new:
                alike = min(common(a.tokens, b.tokens), a.hold.handle().length) // PAGE
                assert a.hold.handle().pages[:alike] == b.hold.handle().pages[:alike]
    assert num_shared_tails > 40
    assert_empty(llm)


# --- whatever runs beside it
# ------------------------------------------------------------------------------------------


def test_searches_are_the_same_alone_together_and_among_other_requests(make):
    """More beams than rows, and requests of other kinds that come while they run; NaN in all memory
    nobody owns.
    """
    llm = make()
    prompts = prompts_of(LENGTHS, seed=5)
    params = BeamSearchParams(beam_width=3, max_tokens=17)
    alone = [tokens_of(llm.beam_search(prompt, params))[0] for prompt in prompts]
    with poisoned(engine_of(llm)):
        assert tokens_of(llm.beam_search(prompts, params)) == alone
    drawn = SamplingParams(temperature=1.0, seed=3, max_tokens=30, ignore_eos=True)
    others = prompts_of((5, 17, 40), seed=6)
    expected = [
        output.outputs[0].token_ids for output in llm.generate(others, drawn, use_tqdm=False)
    ]
    llm.reset_prefix_cache()
    with poisoned(engine_of(llm)):
        submitted = [intake_of(llm).accept([other], [drawn])[0] for other in others]
        engine_of(llm).add(submitted[0])
        searches = intake_of(llm).accept_searches(prompts, params)
        for number, search in enumerate(searches):
            engine_of(llm).add(search)
            if number in (2, 4):
                engine_of(llm).add(submitted[number // 2])
        while engine_of(llm).has_work:
            engine_of(llm).step()
    found = [
        beam_output(search, eos_id=None, include_stop=False, decode=None) for search in searches
    ]
    assert tokens_of(found) == alone
    got = [one.output().outputs[0].token_ids for one in submitted]
    assert got == expected
    assert_empty(llm)


@pytest.mark.parametrize(("rows", "caching"), some([(5, True), (9, True), (9, False)], (9, True)))
def test_preempted_searches_end_as_undisturbed_ones(make, rows, caching):
    """A pool that one search fills if its beams share nothing: the others give way and come
    again.
    """
    prompts = prompts_of((21, 40, 3, 25, 33), seed=7)
    params = BeamSearchParams(beam_width=3, max_tokens=24, ignore_eos=True)
    tight = make(
        max_num_seqs=rows, num_gpu_blocks_override=3 * 64 // PAGE, enable_prefix_caching=caching
    )
    expected = [tokens_of(tight.beam_search(prompt, params))[0] for prompt in prompts]
    assert engine_of(tight).scheduler.num_preemptions == 0
    with poisoned(engine_of(tight)):
        assert tokens_of(tight.beam_search(prompts, params)) == expected
    assert (engine_of(tight).scheduler.num_preemptions > 0) == (rows > 5)
    assert_empty(tight)


def test_a_search_loses_some_of_its_beams_and_computes_their_candidates_anew(make):
    llm, params = make(), BeamSearchParams(beam_width=4, max_tokens=30, ignore_eos=True)
    prompts = prompts_of((13, 30))
    expected = tokens_of(llm.beam_search(prompts, params))
    searches = intake_of(llm).accept_searches(prompts, params)
    for search in searches:
        engine_of(llm).add(search)
    rng = np.random.default_rng(0)
    with poisoned(engine_of(llm)):
        while engine_of(llm).has_work:
            engine_of(llm).step()
            running = beams_of(llm)
            if running and rng.random() < 0.3:
                engine_of(llm).scheduler._preempt(running[rng.integers(len(running))])
    found = [
        beam_output(search, eos_id=None, include_stop=False, decode=None) for search in searches
    ]
    assert tokens_of(found) == expected
    assert_empty(llm)


@pytest.mark.parametrize("num_steps", range(1, 5))
def test_a_search_under_way_goes_on_after_its_pages_are_lost(make, num_steps):
    """At any step, the last one included: here with weights that are replaced by the same ones."""
    llm, params = make(), BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True)
    expected = tokens_of(llm.beam_search(prompts_of((13,)), params))
    (search,) = intake_of(llm).accept_searches(prompts_of((13,)), params)
    engine = engine_of(llm)
    engine.add(search)
    with poisoned(engine):
        for _ in range(num_steps):
            engine.step()
        assert engine.has_work
        engine.replace_weights(engine.weights, secret=b"")
        engine.check()
        for _ in range(20):
            engine.step()
    assert (
        tokens_of([beam_output(search, eos_id=None, include_stop=False, decode=None)]) == expected
    )
    assert_empty(llm)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("where", ["_launch_loop", "_move_pages", "_launch_step"])
def test_an_interrupted_search_leaves_nothing_behind(make, monkeypatch, error, where):
    llm, params = make(), BeamSearchParams(beam_width=4, max_tokens=12)
    prompts = prompts_of((13, 9, 30))
    expected = tokens_of(llm.beam_search(prompts, params))
    run, calls = getattr(engine_of(llm), where), []

    def interrupted(*args: object) -> object:
        calls.append(args)
        if len(calls) == 2:
            raise error("between two steps")
        return run(*args)

    with monkeypatch.context() as patch:
        patch.setattr(engine_of(llm), where, interrupted)
        with pytest.raises(error, match="between two steps"):
            llm.beam_search(prompts, params)
    assert_empty(llm)
    assert tokens_of(llm.beam_search(prompts, params)) == expected


def test_one_beam_that_is_ended_ends_its_search_alone(make):
    llm, params = make(), BeamSearchParams(beam_width=2, max_tokens=12)
    expected = tokens_of(llm.beam_search(prompts_of((9,)), params))
    gone, kept = intake_of(llm).accept_searches(prompts_of((13,)) + prompts_of((9,)), params)
    for search in (gone, kept):
        engine_of(llm).add(search)
    for _ in range(4):
        engine_of(llm).step()
    engine_of(llm).abort(replace(gone, samples=gone.samples[1:]))
    engine_of(llm).check()
    assert [beam.finish_reason for beam in gone.samples] == ["abort", "abort"]
    assert not any(beam in gone.samples for beam in beams_of(llm))
    with pytest.raises(RuntimeError, match="has ended before it was over"):
        beam_output(gone, eos_id=None, include_stop=False, decode=None)
    while engine_of(llm).has_work:
        engine_of(llm).step()
    assert tokens_of([beam_output(kept, eos_id=None, include_stop=False, decode=None)]) == expected
    assert_empty(llm)


# --- the front door
# ---------------------------------------------------------------------------------------------------


BAD_PARAMS = {
    "beam_width: expected a number >= 1, got 0": {"beam_width": 0},
    "beam_width: expected a number >= 1, got True": {"beam_width": True},
    "max_tokens: expected a number >= 1, got None": {"max_tokens": None},
    "ignore_eos: expected True or False, got 1": {"ignore_eos": 1},
    "include_stop_str_in_output: expected True or False": {"include_stop_str_in_output": "yes"},
    "temperature: expected 0.0 .*, got 0.7": {"temperature": 0.7},
    "temperature: expected 0.0 .*, got nan": {"temperature": float("nan")},
    "length_penalty: expected a number .*, got inf": {"length_penalty": float("inf")},
    "length_penalty: expected a number .*, got 40": {"length_penalty": 40},
    "length_penalty: expected a number .*, got '1'": {"length_penalty": "1"},
}


@pytest.mark.parametrize("message", BAD_PARAMS)
def test_a_parameter_out_of_range_is_named(message):
    with pytest.raises(ValueError, match=f"^{message}"):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 10} | BAD_PARAMS[message])


def test_a_search_that_cannot_run_is_refused_with_every_bad_index(make):
    llm = make(num_gpu_blocks_override=20, max_logprobs=64)
    prompts = [*prompts_of((9, 60)), {"prompt_token_ids": [VOCAB]}, *prompts_of((100,))]
    with pytest.raises(ValueError, match="prompt") as refused:
        llm.beam_search(prompts, BeamSearchParams(beam_width=4, max_tokens=10))
    lines = str(refused.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["prompt 1", "prompt 2", "prompt 3"]
    assert lines[0] == (
        "prompt 1: beam_width: 4 beams of 70 tokens may need 36 pages, the KV cache has 20: raise "
        "kv_cache_memory_bytes or num_gpu_blocks_override"
    )
    assert "prompt: expected token ids from 0 to 150, got [151]" in lines[1]
    for width, message in (
        (
            5,
            (
                "beam_width: 5 beams need the 80 likeliest tokens of each, and max_logprobs of LLM "
                "is 64: raise it"
            ),
        ),
        (6, "beam_width: expected at most max_num_seqs=5, got 6"),
    ):
        eos = {"ignore_eos": width == 6}
        with pytest.raises(ValueError, match=f"^prompt 0: {message}"):
            llm.beam_search(prompts[:1], BeamSearchParams(beam_width=width, max_tokens=10, **eos))
    for bad in (SamplingParams(), None):
        with pytest.raises(ValueError, match="params: expected BeamSearchParams, got"):
            llm.beam_search(prompts[:1], bad)
    with pytest.raises(ValueError, match="prompts: expected a prompt or a list of them, got int"):
        llm.beam_search(3, BeamSearchParams(beam_width=2, max_tokens=10))
    assert llm.beam_search([], BeamSearchParams(beam_width=2, max_tokens=10)) == []
    assert_empty(llm)


def test_a_search_needs_no_more_logprobs_than_there_are_tokens(make):
    llm = make(max_logprobs=-1, max_num_seqs=40, max_num_batched_tokens=40)
    (search,) = intake_of(llm).accept_searches(
        prompts_of((9,)), BeamSearchParams(beam_width=40, max_tokens=8)
    )
    assert search.samples[0].params.logprobs == VOCAB < search.samples[0].search.num_candidates
