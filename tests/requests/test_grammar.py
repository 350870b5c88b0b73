"""A grammar that takes for ever ends nothing but its own request, and each is compiled once."""

from __future__ import annotations

import subprocess
import time

import numpy as np
import pytest

from jaxkv.requests import grammar, trial
from jaxkv.structured import StructuredOutputsParams
from tokenizers_ import save_tokenizer

llguidance = pytest.importorskip("llguidance")

HARMLESS = StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "null"}}})


def endless(number: int = 24) -> StructuredOutputsParams:
    """Returns a schema that takes twice as long with each pattern more; 18 take half a second."""
    patterns = [{"type": "string", "pattern": f"^.*a{i:03}.*$"} for i in range(number)]
    return StructuredOutputsParams(json={"allOf": patterns})


@pytest.fixture
def grammars(tmp_path, monkeypatch):
    from transformers import PreTrainedTokenizerFast

    save_tokenizer(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    monkeypatch.setattr(trial, "CPU_S", 1)
    trials = trial.Trials()
    monkeypatch.setattr(grammar, "TRIALS", trials)
    yield grammar.Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    trials.close()


def test_a_grammar_that_takes_for_ever_is_refused_and_the_next_one_is_not(grammars):
    begun = time.thread_time()
    for _ in range(2):  # it is not tried again
        with pytest.raises(ValueError, match=r"structured_outputs: expected one that llguidance"):
            grammars.compile(endless())
    assert not grammars.compile(HARMLESS).error
    assert time.thread_time() - begun < 1.0  # of a processor, here: others go on meanwhile


def test_a_process_that_was_killed_is_replaced(grammars, monkeypatch):
    assert not grammars.compile(HARMLESS).error
    process = grammar.TRIALS._process
    process.kill()
    process.wait()
    assert not grammars.compile(StructuredOutputsParams(regex="a+")).error
    assert grammar.TRIALS._process is not process


def test_a_process_that_was_interrupted_at_its_start_is_replaced(grammars, monkeypatch):
    popen = subprocess.Popen

    def interrupted(*args, **options):
        process = popen(*args, **options)

        def readline():
            del process.stdout.readline
            raise KeyboardInterrupt

        process.stdout.readline = readline
        return process

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", interrupted)
        with pytest.raises(KeyboardInterrupt):
            grammars.compile(HARMLESS)
    assert not grammars.compile(HARMLESS).error


def test_a_process_is_ended_by_the_clock_where_it_gets_no_processor(grammars, monkeypatch):
    monkeypatch.setattr(trial, "WALL_S", 0.3)
    before = dict(grammars._kept)
    with pytest.raises(ValueError, match="too busy for: ask again"):
        grammars.compile(endless())
    assert grammars._kept == before


def test_each_grammar_is_tried_and_compiled_once_and_followed_apart(grammars, monkeypatch):
    made, make = [], grammars._made
    monkeypatch.setattr(grammars, "_made", lambda source: made.append(source) or make(source))
    one, other = (grammars.compile(StructuredOutputsParams(regex="ab|cd")).copy() for _ in range(2))
    assert len(made) == 1
    letters = {letter: grammars._tokenizer.tokenize_str(letter)[0] for letter in "ac"}
    before = other.mask().copy()
    one.accept(letters["a"])
    assert (other.mask() == before).all()
    assert (one.mask() != before).any()
    other.accept(letters["c"])
    assert (one.mask() != other.mask()).any()


def test_a_grammar_behind_reasoning_holds_from_there_on(grammars, tmp_path):
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    opens, closes = tokenizer.convert_tokens_to_ids(["<|user|>", "<|end|>"])
    a, b, c = (tokenizer.convert_tokens_to_ids(letter) for letter in "abc")
    plain = grammars.compile(StructuredOutputsParams(regex="ab|cd"))
    marks = grammar.marks_of(tokenizer, ("<|user|>", "<|end|>"))
    two = grammar.marks_of(tokenizer, ("", "<|end|>c<|user|>"))

    def allowed(one: grammar.Grammar) -> set[int]:
        bits = np.unpackbits(one.mask().view(np.uint8), bitorder="little")
        return set(np.flatnonzero(bits[: len(tokenizer)]).tolist())

    all_of_them, first = set(range(len(tokenizer))), allowed(plain)
    behind = plain.copy()
    behind.accept(a)
    assert {opens, closes}.isdisjoint(first)
    for marked, prompt, tokens, want in (
        (marks, "x", [], first | {opens}),
        (marks, "x<|user|>y<|end|>z", [], first | {opens}),
        (marks, "x", [a], allowed(behind)),
        (marks, "x", [opens], all_of_them),
        (marks, "x", [opens, b, opens, closes], first),
        (marks, "x", [opens, closes, a], allowed(behind)),
        (marks, "x<|user|>\n", [b, closes], first),
        (marks, "x<|user|>y<|end|>\n\n", [], first),
        (two, "x", [opens, closes, c, closes, c], all_of_them),
        (two, "x", [opens, closes, c, closes, c, opens], first),
        (two, "x<|end|>c<|user|>", [], first),
    ):
        one = plain.behind(marked).answering(prompt)
        for token in tokens:
            assert one.forced() is None
            one.accept(token)
        assert allowed(one) == allowed(one.copy()) == want, (prompt, tokens)
    one.accept(a)
    assert (one.forced(), one.is_done) == (b, False)
    one.accept(b)
    assert one.is_done
    for texts in (("ab", "<|end|>"), ("<|user|>", "end"), ("<|user|><|user|>", "<|end|>")):
        with pytest.raises(ValueError, match=r"reasoning: expected marks that the tokenizer has"):
            grammar.marks_of(tokenizer, texts)


def test_only_the_last_grammars_are_kept(grammars, monkeypatch):
    monkeypatch.setattr(grammar, "KEPT", 2)
    for text in ("a", "b", "a", "c"):
        grammars.compile(StructuredOutputsParams(regex=text))
    assert len(grammars._kept) == 2
