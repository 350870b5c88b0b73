"""Batch files: every line gets its row, exactly once and the same one, however often and wherever
it was cut off.
"""

import importlib.util
import itertools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import jaxkv
from jaxkv.api import cli
from jaxkv.api.batch_files import BatchCounts, journal, open_output, run, run_batch, sources
from jaxkv.api.llm import LLM
from jaxkv.config import SamplingParams
from jaxkv.requests.outputs import RequestOutput
from jaxkv.testing import engine_of
from tiers import some

VOCAB = 420
SMALL = {
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 8,
    "dtype": "float32",
}
OPTIONS = [
    part for name, value in SMALL.items() for part in (f"--{name.replace('_', '-')}", str(value))
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
USER = {"role": "user", "content": "The end"}
pytestmark = pytest.mark.usefixtures("quick_compile", "one_loop", "compile_once")


@pytest.fixture(scope="module")
def shared_llm(checkpoint) -> LLM:
    return LLM(checkpoint, **SMALL, lazy_compile=True)


@pytest.fixture
def llm(shared_llm) -> Iterator[LLM]:
    """The module's engine, which every test must leave empty."""
    yield shared_llm
    assert_empty(shared_llm)


def assert_empty(llm: LLM) -> None:
    engine_of(llm).check()
    assert not engine_of(llm).has_work
    assert engine_of(llm).scheduler.allocator.num_used == 0


def one(llm: LLM, prompt: object, params: SamplingParams = GREEDY) -> RequestOutput:
    (output,) = (llm.chat if isinstance(prompt, list) else llm.generate)(
        prompt, params, use_tqdm=False
    )
    return output


def results(llm: LLM, requests: object) -> dict[int, object]:
    """What `as_completed` yields by index: token ids and finish reason, or the ValueError."""
    yielded = list(llm.as_completed(requests))
    assert len({index for index, _ in yielded}) == len(yielded)
    return {
        index: result if isinstance(result, ValueError) else result.outputs
        for index, result in yielded
    }


# --- LLM.as_completed
# -------------------------------------------------------------------------------------------------

MIXED = [
    ("Once upon a time", replace(GREEDY, max_tokens=40)),
    ({"prompt": "The end of"}, replace(GREEDY, max_tokens=2)),
    ({"prompt_token_ids": [9, 8, 7]}, replace(DRAWN, seed=3)),
    ([USER], replace(GREEDY, max_tokens=5)),
    ([USER, {"role": "assistant", "content": "of"}, USER], replace(DRAWN, seed=4, max_tokens=30)),
    ("One by one", replace(DRAWN, seed=5, max_tokens=1)),
] * 3


def test_as_completed_gives_what_generate_and_chat_give_in_order_of_finishing(llm):
    assert results(llm, iter(MIXED)) == {i: one(llm, *pair).outputs for i, pair in enumerate(MIXED)}
    order = [index for index, _ in llm.as_completed(MIXED)]
    assert order != sorted(order)
    assert order[0] == 1  # the shortest of the first four
    assert results(llm, []) == {}


def test_as_completed_takes_the_default_parameters_for_none(llm):
    lone, default = (
        replace(llm.get_default_sampling_params(), seed=7),
        llm.get_default_sampling_params(),
    )
    assert len(results(llm, [("The end", None)])[0][0].token_ids) <= default.max_tokens
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LLM, "get_default_sampling_params", lambda self: lone)
        assert results(llm, [("The end", None)]) == {0: one(llm, "The end", lone).outputs}


REFUSED = {
    "empty": ("", GREEDY),
    "too long": ("x" * 500, GREEDY),
    "token id": ({"prompt_token_ids": [VOCAB]}, GREEDY),
    "no prompt": (3, GREEDY),
    "no params": ("The end", "greedy"),
    "unknown role": ([{"role": "wizard", "content": "x"}], GREEDY),
    "no messages": ([], GREEDY),
    "no pair": "The end",
    "three": ("The end", GREEDY, GREEDY),
}


def test_a_refused_request_is_its_own_value_error_and_no_one_else_s(llm):
    """Also when there are more of them in a row than the engine takes at once."""
    requests = [*REFUSED.values(), *MIXED[:6], *list(REFUSED.values()) * 3, *MIXED[:6]]
    got = results(llm, requests)
    for index, pair in enumerate(requests):
        if pair in REFUSED.values():
            assert isinstance(got[index], ValueError)
            assert not re.search("prompt 0|conversation 0", str(got[index]))
        else:
            assert got[index] == one(llm, *pair).outputs
    assert "unknown role wizard" in str(got[5])
    assert str(got[7]) == "expected (prompt, SamplingParams or None), got str"


def test_no_more_is_taken_than_the_window_and_the_queue_never_runs_dry(llm, monkeypatch):
    """Of an endless source: 8 requests for 4 rows, before every step."""
    num_taken, held = 0, []
    step = engine_of(llm).step
    monkeypatch.setattr(
        engine_of(llm), "step", lambda: held.append(len(engine_of(llm)._requests)) or step()
    )

    def endless() -> Iterator[tuple[str, SamplingParams]]:
        nonlocal num_taken
        for num_taken in itertools.count(1):
            yield "The end", replace(GREEDY, max_tokens=1 + num_taken % 7)

    completed = llm.as_completed(endless())
    assert num_taken == 0
    for num_given, _ in enumerate(itertools.islice(completed, 100)):
        assert num_taken - num_given <= 8
    completed.close()
    assert set(held) == {8}
    assert_empty(llm)


@pytest.mark.parametrize("num_given", [0, 1, 5])
def test_closing_or_a_failing_source_or_step_leaves_nothing_behind(llm, monkeypatch, num_given):
    completed = llm.as_completed(iter(MIXED))
    list(itertools.islice(completed, num_given))
    completed.close()
    assert_empty(llm)

    def failing() -> Iterator[object]:
        yield from MIXED[: 8 + num_given]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(llm.as_completed(failing()))
    assert_empty(llm)
    completed = llm.as_completed(iter(MIXED))
    list(itertools.islice(completed, num_given))
    with monkeypatch.context() as patch:
        patch.setattr(engine_of(llm), "_launch", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            list(completed)
    assert_empty(llm)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_other_calls_between_two_results_change_nothing(llm):
    """They take steps too, in which these requests may finish."""
    alone = {i: one(llm, *pair).outputs for i, pair in enumerate(MIXED)}
    got = {}
    for index, result in llm.as_completed(iter(MIXED)):
        got[index] = result.outputs
        assert one(llm, "Once upon a time", replace(GREEDY, max_tokens=40)).outputs == alone[0]
    assert got == alone


def test_what_an_error_in_another_call_ended_says_abort(llm, monkeypatch):
    completed = llm.as_completed(iter(MIXED))
    got = [next(completed)]
    with monkeypatch.context() as patch:
        patch.setattr(engine_of(llm), "_launch", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            one(llm, "The end")
    got += completed
    assert sorted(index for index, _ in got) == list(range(len(MIXED)))
    ended = [index for index, result in got if result.outputs[0].finish_reason == "abort"]
    assert 0 < len(ended) <= 8  # those of the step that failed and of the one that was under way
    assert all(
        result.outputs == one(llm, *MIXED[index]).outputs
        for index, result in got
        if index not in ended
    )


@pytest.mark.parametrize("requests", [None, 3], ids=repr)
def test_what_cannot_be_iterated_is_refused_at_the_call(llm, requests):
    with pytest.raises(
        ValueError, match=f"requests: expected an iterable .*, got {type(requests).__name__}"
    ):
        llm.as_completed(requests)


# --- files
# ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path, llm) -> Callable[..., tuple[list[dict], BatchCounts]]:
    """Writes the input if one is given and runs it; returns the output's rows and the counts."""

    def run(
        source: bytes | list[dict] | None = None,
        params: SamplingParams | None = GREEDY,
        name: str = "out",
        model: str | None = None,
    ) -> tuple[list[dict], BatchCounts]:
        path = tmp_path / "in.jsonl"
        if source is not None:
            path.write_bytes(source if isinstance(source, bytes) else dumped(source))
        with path.open("rb") as lines, open_output(tmp_path / f"{name}.jsonl", lines) as rows:
            counts = run_batch(llm, lines, rows, params, served_model_name=model, use_tqdm=False)
        return [
            json.loads(row) for row in (tmp_path / f"{name}.jsonl").read_bytes().splitlines()
        ], counts

    return run


def dumped(rows: list[dict]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def in_order(rows: list[dict]) -> list[dict]:
    return sorted(rows, key=lambda row: json.dumps(row))


def row_of(llm: LLM, line_id: object, prompt: object, params: SamplingParams) -> dict:
    output = one(llm, prompt, params)
    done = output.outputs[0]
    shown = {"text": done.text} if params.detokenize else {"token_ids": done.token_ids}
    counts = {
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_output_tokens": len(done.token_ids),
    }
    return {"id": line_id, **shown, "finish_reason": done.finish_reason, **counts}


LINES = [
    {"id": 1, "prompt": "Once upon a time"},
    {"id": "1", "prompt": "Once upon a time", "params": {"max_tokens": 3}},
    {"id": "ids", "prompt_token_ids": [9, 8, 7], "params": {"detokenize": False, "max_tokens": 30}},
    {"id": "chat", "messages": [USER, {"role": "assistant", "content": "of"}, USER]},
    {"id": "", "prompt": "One by one", "params": {"temperature": 2, "seed": 5, "top_k": 50}},
    {
        "id": -7,
        "params": {"stop": ["e", " "], "max_tokens": None, "min_tokens": 2},
        "prompt": "The end of",
    },
]


def test_each_row_is_what_generate_gives_for_its_line(llm, files):
    want = []
    for line in LINES:
        prompt = line.get("messages") or {
            key: line[key] for key in ("prompt", "prompt_token_ids") if key in line
        }
        want.append(row_of(llm, line["id"], prompt, replace(GREEDY, **line.get("params", {}))))
    rows, counts = files(LINES)
    assert in_order(rows) == in_order(want)
    assert [next(iter(row)) for row in rows] == ["id"] * len(LINES)
    num_tokens = sum(row["num_output_tokens"] for row in want)
    assert (counts.num_written, counts.num_skipped, counts.num_errors) == (6, 0, 0)
    assert counts.num_output_tokens == num_tokens


def test_without_parameters_the_model_s_own_apply_and_logprobs_have_no_place(llm, files):
    rows, _ = files([{"id": 0, "prompt": "The end", "params": {"temperature": 0}}], None)
    assert rows == [
        row_of(llm, 0, "The end", replace(llm.get_default_sampling_params(), temperature=0.0))
    ]
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(ValueError, match=f"^{name}: expected None"):
            files([{"id": 1, "prompt": "The end"}], replace(GREEDY, **{name: 1}))


def test_a_sampled_line_depends_on_the_run_s_seed_and_its_id_alone(files):
    lines = [{"id": i, "prompt": "Once upon a time"} for i in (*range(9), *"012345678")]
    rows, _ = files(lines, DRAWN)
    assert len({row["text"] for row in rows}) == len(lines)
    assert in_order(files(lines[::-1], DRAWN, "reversed")[0]) == in_order(rows)
    assert in_order(files(lines, replace(DRAWN, seed=0), "zero")[0]) == in_order(rows)
    alone, _ = files(lines[-1:], DRAWN, "alone")
    assert alone[0] in rows
    other, _ = files(lines, replace(DRAWN, seed=1), "other")
    assert not {row["text"] for row in other} & {row["text"] for row in rows}
    for seed in (None, -1):
        same, _ = files([line | {"params": {"seed": seed}} for line in lines], DRAWN, f"seed{seed}")
        assert in_order(same) == in_order(rows)


def test_the_seed_of_a_line_is_the_same_in_every_version():
    """Or a run that goes on after an update would not be the same run; numpy and hashlib promise
    that it can be.
    """
    seeds = [run.seed_for(*of) for of in ((0, 1), (0, "1"), (2**64 - 1, "\ud800"))]
    assert seeds == [2127240200087265450, 4875855158820106941, 7438654425704650499]


def test_a_model_without_a_tokenizer_gives_token_ids(checkpoint, tmp_path):
    bare = LLM(checkpoint, **SMALL, skip_tokenizer_init=True, lazy_compile=True)
    (tmp_path / "in").write_bytes(dumped([{"id": 0, "prompt_token_ids": [9, 8, 7]}]))
    with (tmp_path / "in").open("rb") as lines, open_output(tmp_path / "out", lines) as rows:
        run_batch(bare, lines, rows, GREEDY, use_tqdm=False)
    row = json.loads((tmp_path / "out").read_bytes())
    assert row["token_ids"] == one(bare, {"prompt_token_ids": [9, 8, 7]}).outputs[0].token_ids
    assert "text" not in row


# --- bad lines
# --------------------------------------------------------------------------------------------------------

DEEP = 100_000
BAD = {  # the line, whether its id can be used, what the row says
    "text": (b"nonsense", False, "expected JSON, got an error at character 0"),
    "two": (
        b'{"id": 1} {"id": 2}',
        False,
        "expected JSON, got an error at character 10: Extra data",
    ),
    "list": (b'["id"]', False, "expected a JSON object, got list"),
    "no id": (b'{"prompt": "x"}', False, "id: expected .*, got None"),
    "bool id": (b'{"id": true, "prompt": "x"}', False, "id: expected .*, got True"),
    "float id": (b'{"id": 1.0, "prompt": "x"}', False, "id: expected .*, got 1.0"),
    "long id twice": (
        b'{"id": "' + b"x" * 5000 + b'", "id": 1}',
        False,
        "expected each key once, got several of id",
    ),
    "used id": (
        b'{"id": "good 0", "prompt": "x"}',
        False,
        "id: expected one that no line above has, got 'good 0'",
    ),
    "key twice": (
        b'{"id": "k", "prompt": "x", "id": "l"}',
        False,
        "expected each key once, got several of id",
    ),
    "not UTF-8": (b'{"id": "u", "prompt": "\xff"}', False, "'utf-8' codec can't decode byte 0xff"),
    "UTF-16": ('{"id": 1, "prompt": "x"}'.encode("utf-16"), False, "'utf-8' codec can't decode"),
    "NaN": (
        b'{"id": "n", "prompt": "x", "params": {"top_p": NaN}}',
        False,
        "expected JSON, got NaN",
    ),
    "Infinity": (b'{"id": "i", "prompt": -Infinity}', False, "expected JSON, got -Infinity"),
    "huge number": (
        b'{"id": ' + b"9" * 5000 + b"}",
        False,
        "limit .* for integer string conversion",
    ),
    "deep": (b"[" * DEEP + b"]" * DEEP, False, "expected at most 64 nested"),
    "deep object": (b'{"id":' * DEEP + b"1" + b"}" * DEEP, False, "expected at most 64 nested"),
    "deep message": (
        b'{"id": "m", "messages": ' + b"[" * 65 + b"]" * 65 + b"}",
        False,
        "expected at most 64 nested",
    ),
    "too long": (
        b'{"id": "t", "prompt": "' + b"x" * 2**20 + b'"}',
        False,
        "expected at most 1048576 bytes",
    ),
    "unknown key": (
        b'{"id": "a", "prompt": "x", "temperature": 1}',
        True,
        "line .*: unknown keys: temperature",
    ),
    "no prompt": (b'{"id": "b"}', True, "line .*: expected one of prompt, .*, got none"),
    "two prompts": (
        b'{"id": "c", "prompt": "x", "messages": []}',
        True,
        "line .*: .* got prompt and messages",
    ),
    "messages": (
        b'{"id": "d", "messages": "The end"}',
        True,
        "line .*: messages: expected a list, got str",
    ),
    "a message": (b'{"id": "e", "messages": ["The end"]}', True, "expected a list of .* messages"),
    "role": (
        b'{"id": "f", "messages": [{"role": "wizard", "content": "x"}]}',
        True,
        "unknown role wizard",
    ),
    "no messages": (b'{"id": "g", "messages": []}', True, "expected a list of .* messages"),
    "params": (
        b'{"id": "h", "prompt": "x", "params": [1]}',
        True,
        "line .*: params: expected an object, got list",
    ),
    "unknown param": (
        b'{"id": "o", "prompt": "x", "params": {"heat": 1}}',
        True,
        "line .*: params: unknown .*: heat",
    ),
    "n": (b'{"id": "n", "prompt": "x", "params": {"n": 2}}', True, "not possible in a batch: n"),
    "foreign": (
        b'{"id": "foreign", "prompt": "x", "params": {"max_new_tokens": 2}}',
        True,
        r"not possible in a batch: max_new_tokens \(nearest: max_tokens\)",
    ),
    "logprobs": (
        b'{"id": "p", "prompt": "x", "params": {"logprobs": 1}}',
        True,
        "not possible in a batch: logprobs",
    ),
    "prompt_logprobs": (
        b'{"id": "p1", "prompt": "x", "params": {"prompt_logprobs": 1}}',
        True,
        "in a batch: prompt_logprobs",
    ),
    "a bias": (
        b'{"id": "p2", "prompt": "x", "params": {"logit_bias": {"x": 1}}}',
        True,
        "logit_bias: expected token ids",
    ),
    "param": (
        b'{"id": "q", "prompt": "x", "params": {"top_p": 1e999}}',
        True,
        "line .*: top_p: expected .*, got inf",
    ),
    "not built": (
        b'{"id": "r", "prompt": "x", "params": {"truncate_prompt_tokens": 2}}',
        True,
        "line .*: truncate_prompt_tokens=2 is not supported yet",
    ),
    "no text": (b'{"id": "s", "prompt": 3}', True, "prompt: expected a text, got int"),
    "empty": (b'{"id": "v", "prompt": ""}', True, "the prompt is empty"),
    "bad word": (
        b'{"id": 5, "prompt": "x", "params": {"bad_words": ["\\ud800"]}}',
        True,
        "bad_words: expected valid",
    ),
    "surrogate": (b'{"id": "w\\ud800", "prompt": "\\ud800"}', True, "not valid Unicode"),
    "too many tokens": (
        b'{"id": "y", "prompt": "' + b"x" * 500 + b'"}',
        True,
        "the prompt has 501 tokens",
    ),
    "token id": (
        b'{"id": "z", "prompt_token_ids": [-1]}',
        True,
        "prompt: expected token ids from 0",
    ),
    "long message": (
        b'{"id": "0", "prompt": "x", "params": {"' + b"k" * 5000 + b'": 1}}',
        True,
        "line .*kkk",
    ),
}


@pytest.fixture
def bad_input(monkeypatch) -> bytes:
    """Good and bad lines in turn; the last good one has no line end, one has that of Windows, and
    blank lines count.
    """
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 2**20)
    good = (b'{"id": "good %d", "prompt": "The end"}' % i for i in itertools.count())
    lines = [line for bad, *_ in BAD.values() for line in (next(good), b"", bad)]
    lines[0] += b"\r"
    return b"\n".join([*lines, b" \t", next(good)])


def test_a_bad_line_is_an_error_row_and_no_one_else_s_trouble(llm, files, bad_input):
    rows, counts = files(bad_input)
    good = row_of(llm, 0, "The end", GREEDY)
    want = [good | {"id": f"good {i}"} for i in range(len(BAD) + 1)]
    assert in_order([row for row in rows if "error" not in row]) == in_order(want)
    errors = {row.get("line", row["id"]): row for row in rows if "error" in row}
    assert len(rows) == len(want) + len(BAD)
    for i, (name, (line, usable, message)) in enumerate(BAD.items()):
        number = 3 * i + 3
        row = errors[json.loads(line)["id"] if usable else number]
        assert row.keys() == ({"id", "error"} if usable else {"id", "line", "error"}), name
        assert re.search(message, row["error"]), (name, row)
        assert len(row["error"]) < 1100
        if row["error"].startswith("line ") or not usable:
            assert row["error"].startswith(f"line {number}: "), name
    assert (counts.num_written, counts.num_errors) == (len(rows), len(BAD))
    again, counts = files()
    assert again == rows
    assert (counts.num_written, counts.num_skipped, counts.num_errors) == (0, len(rows), len(BAD))


# --- going on
# ---------------------------------------------------------------------------------------------------------


def cuts(rows: bytes) -> list[int]:
    """Every end of a line, one byte to either side, and the middle of every line."""
    ends = [0, *(match.end() for match in re.finditer(b"\n", rows))]
    middles = [(a + b) // 2 for a, b in itertools.pairwise(ends)]
    return sorted(
        {at for end in ends for at in (end - 1, end, end + 1) if 0 <= at <= len(rows)}
        | set(middles)
    )


@pytest.mark.parametrize("every", some([3, 1], 3))  # of four cuts in each line
def test_wherever_the_output_was_cut_the_next_run_makes_it_whole(tmp_path, files, every):
    """Sampled, with lines of every kind: the rows that were whole stay, the others come out as they
    would have.
    """
    strange = b'nonsense\n{"id": 1, "prompt": "The end"}\n{"id": "empty", "prompt": ""}\n{"prompt": "no id"}\n'
    source = (
        dumped(LINES)
        + strange
        + dumped([{"id": i, "prompt": "Once upon a time"} for i in range(2, 6)])
    )
    whole, _ = files(source, DRAWN)
    path = tmp_path / "out.jsonl"
    written = path.read_bytes()
    assert len(whole) == 14
    for at in cuts(written)[::every]:
        path.write_bytes(written[:at])
        num_kept = written[:at].count(b"\n")
        rows, counts = files(None, DRAWN)
        assert rows[:num_kept] == whole[:num_kept]
        assert in_order(rows) == in_order(whole)
        assert (counts.num_written, counts.num_skipped) == (14 - num_kept, num_kept)
        assert counts.num_errors == 4


def test_a_disk_that_is_full_stops_the_run_and_the_next_one_goes_on(tmp_path, files):
    """In the middle of a row; then, with nothing of the next one written, between two."""
    whole, _ = files([line | {"id": f"{line['id']} {i}"} for i in range(5) for line in LINES])
    output = tmp_path / "full.jsonl"
    message = "The rows before it are whole, and the same command goes on after them"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = (tmp_path / "out.jsonl").stat().st_size // 2
    for expected in (rf"full.jsonl: .*; disk full\? {message}", rf"{message}: '.*full.jsonl'"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            with pytest.raises(OSError, match=expected):
                files(name="full")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert output.stat().st_size == limit
        output.write_bytes(output.read_bytes().rpartition(b"\n")[0] + b"\n")
        limit = output.stat().st_size
    assert in_order(files(name="full")[0]) == in_order(whole)


FOREIGN = {
    "text": b"Dear diary,\n",
    "input": dumped(LINES),
    "zeros": b'{"id": 1, "error": "x"}\n' + bytes(40) + b'\n{"id": 2, "error": "x"}\n',
    "torn in the middle": b'{"id": 1, "error": "x"}\n{"id": 2, "err\n{"id": 3, "error": "x"}\n',
    "line without number": b'{"id": null, "error": "x"}\n',
    "id that is none": b'{"id": [1], "error": "x"}\n',
    "one foreign line without end": b'{"model_type": "llama"}',
    "a row of another writer without end": b'{"error": "x", "id": 1}',
}


def test_what_editors_leave_in_input_and_output_costs_no_line(tmp_path, files):
    """A byte order mark before the first line of one, blank lines in the other."""
    rows, _ = files(b"\xef\xbb\xbf" + dumped(LINES[:2]))
    assert {row["id"] for row in rows if "error" not in row} == {1, "1"}
    (tmp_path / "out.jsonl").write_bytes(b"\n" + dumped(rows[:1]) + b" \r\n\n" + dumped(rows[1:]))
    with (
        open(tmp_path / "in.jsonl", "rb") as source,
        open_output(tmp_path / "out.jsonl", source) as out,
    ):
        assert (out.num_rows, len(out.ids), 1 in out.ids, "1" in out.ids) == (2, 2, True, True)


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_an_output_that_holds_something_else_is_refused_and_left_as_it_is(tmp_path, files, content):
    (tmp_path / "out.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=r"out\.jsonl, line \d: expected .*is it the right file\?"):
        files(LINES)
    assert (tmp_path / "out.jsonl").read_bytes() == content


def test_the_input_itself_or_no_regular_file_is_refused_as_output(tmp_path, files):
    files(LINES)
    os.link(tmp_path / "in.jsonl", tmp_path / "hard.jsonl")
    (tmp_path / "soft.jsonl").symlink_to(tmp_path / "in.jsonl")
    for name in ("in", "hard", "soft"):
        with pytest.raises(
            ValueError, match=f"{name}.jsonl: expected an output that is not the input"
        ):
            files(name=name)
    assert (tmp_path / "in.jsonl").read_bytes() == dumped(LINES)
    (tmp_path / "null.jsonl").symlink_to("/dev/null")
    with pytest.raises(ValueError, match="expected a regular file"):
        files(name="null")


@pytest.mark.parametrize(("sync_s", "want"), [(0.0, 8), (1e9, 2)])
def test_rows_are_synced_now_and_then_and_at_the_end(files, monkeypatch, sync_s, want):
    """So is the manifest."""
    synced = []
    monkeypatch.setattr(journal, "SYNC_S", sync_s)
    monkeypatch.setattr(os, "fsync", synced.append)
    files(LINES)
    assert len(synced) == want


# --- the command
# ------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(checkpoint, tmp_path, capsys) -> Callable[..., tuple[int, str, str]]:
    """Runs `jaxkv batch` with the tiny model on in.jsonl; returns (status, standard output,
    standard error).
    """

    def run(*arguments: str, output: str = "command") -> tuple[int, str, str]:
        paths = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / f"{output}.jsonl")]
        greedy = ["--temperature", "0", "--max-tokens", "12", "--ignore-eos", "--min-p", "0"]
        status = cli.main(
            ["batch", *paths, "--model", str(checkpoint), *OPTIONS, *greedy, *arguments]
        )
        return status, *capsys.readouterr()

    return run


def rows_in(path: Path) -> list[dict]:
    return [json.loads(row) for row in path.read_bytes().splitlines()]


def test_the_command_writes_the_rows_and_says_how_many(tmp_path, files, command):
    want, _ = files(dumped(LINES) + b"nonsense\n")
    status, out, err = command()
    assert (status, out) == (0, "")
    assert in_order(rows_in(tmp_path / "command.jsonl")) == in_order(want)
    assert "Processed prompts: 100%" in err
    summary = json.loads(err.splitlines()[-1])
    assert (summary["num_written"], summary["num_skipped"], summary["num_errors"]) == (7, 0, 1)
    assert summary["num_output_tokens"] == sum(row.get("num_output_tokens", 0) for row in want)
    assert summary["num_prompt_tokens"] == sum(row.get("num_prompt_tokens", 0) for row in want)
    assert summary["tokens_per_s"] > 0
    again = json.loads(command()[2].splitlines()[-1])
    assert (again["num_written"], again["num_skipped"], again["num_errors"]) == (0, 7, 1)
    assert command("--quiet") == (0, "", "")
    traced = tmp_path / "trace.json"
    assert command("--quiet", "--trace", str(traced), output="quiet") == (0, "", "")
    events = json.loads(traced.read_text())["traceEvents"]
    names = sorted(one["args"]["name"] for one in events if one["ph"] == "M")
    assert names == sorted(f"line {row['id']}" for row in want if "error" not in row)
    assert {"prefill", "decode"} <= {one["name"] for one in events}
    assert min(one["ts"] for one in events if one["ph"] == "X") >= 0
    assert in_order(rows_in(tmp_path / "quiet.jsonl")) == in_order(want)
    command("--temperature", "2", "--seed", "3", output="drawn")
    drawn, _ = files(params=replace(GREEDY, temperature=2.0, seed=3), name="drawn too")
    assert in_order(rows_in(tmp_path / "drawn.jsonl")) == in_order(drawn) != in_order(want)


def test_what_the_caller_can_mend_is_status_2_before_the_model_is_loaded(
    tmp_path, command, monkeypatch
):
    monkeypatch.setattr("jaxkv.api.llm.LLM", None)
    status, _, err = command()
    assert (status, (tmp_path / "command.jsonl").exists()) == (2, False)
    assert "No such file or directory" in err
    (tmp_path / "in.jsonl").write_bytes(dumped(LINES))
    for arguments, message in (
        (["--temperature", "-1"], "temperature: expected .*, got -1.0"),
        (
            ["-o", str(tmp_path / "in.jsonl")],
            ".*in.jsonl: expected an output that is not the input",
        ),
        (
            ["--trace", str(tmp_path / "in.jsonl")],
            "trace: expected a file of its own, got .*in.jsonl",
        ),
    ):
        status, out, err = command(*arguments)
        assert (status, out) == (2, "")
        assert re.fullmatch(f"jaxkv: {message}\n", err)
    with pytest.raises(SystemExit):
        cli.main(["batch", "-i", "in.jsonl"])


def test_limits_of_the_engine_reach_it(tmp_path, command):
    (tmp_path / "in.jsonl").write_bytes(dumped(LINES))
    for option, value in (
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 8),
        ("max_model_len", 1000),
    ):
        status, _, err = command(f"--{option.replace('_', '-')}", str(value))
        assert (status, err.count("\n")) == (2, 1)
        assert re.match(f"jaxkv: {option}: expected .*, got {value}\n", err)


@pytest.fixture
def interruptible():
    """A shell's background job is started with SIGINT ignored, and so is all that it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_status_130_and_the_same_command_goes_on(
    tmp_path, files, command, monkeypatch, number
):
    want, _ = files(LINES)
    append, handler = journal.RowFile.append, signal.getsignal(signal.SIGTERM)

    def interrupted(self, row):
        append(self, row)
        if self.num_rows == 3:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(journal.RowFile, "append", interrupted)
        assert command("--quiet") == (
            130,
            "",
            "jaxkv: stopped; the same command goes on where this one ended\n",
        )
    assert signal.getsignal(signal.SIGTERM) == handler
    assert len(rows_in(tmp_path / "command.jsonl")) == 3
    assert command("--quiet") == (0, "", "")
    assert in_order(rows_in(tmp_path / "command.jsonl")) == in_order(want)


def test_the_script_gives_the_rows_of_the_command(tmp_path, checkpoint, monkeypatch):
    """Also after a cut."""
    monkeypatch.setattr("jaxkv.api.llm.LLM", partial(LLM, **SMALL, lazy_compile=True))
    path = Path(__file__).parents[2] / "scripts" / "batch_generate.py"
    spec = importlib.util.spec_from_file_location("batch_generate", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    # The first prompt is empty, and the last ones are too long.
    (tmp_path / "in.jsonl").write_bytes(
        dumped([{"id": i, "prompt": "The end " * i} for i in range(0, 80, 5)])
    )
    arguments = ["-i", str(tmp_path / "in.jsonl"), "--model", str(checkpoint)]
    assert (
        cli.main(
            [
                *("batch", *arguments, "-o", str(tmp_path / "command"), *OPTIONS),
                *("--temperature", "0", "--max-tokens", "128"),
            ]
        )
        == 0
    )
    script.main([*arguments, "-o", str(tmp_path / "script")])
    want = rows_in(tmp_path / "command")
    assert {"error" in row for row in want} == {True, False}
    assert in_order(rows_in(tmp_path / "script")) == in_order(want)
    written = (tmp_path / "script").read_bytes()
    for at in (
        0,
        1,
        len(written) // 2,
        written.index(b"\n"),
        written.index(b"\n") + 1,
        len(written) - 1,
    ):
        (tmp_path / "script").write_bytes(written[:at])
        script.main([*arguments, "-o", str(tmp_path / "script")])
        assert in_order(rows_in(tmp_path / "script")) == in_order(want)


# --- processes
# --------------------------------------------------------------------------------------------------------


class Command:
    """`jaxkv batch` in a process of its own, which finds its programs compiled after the first
    time.
    """

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.output = directory / "killed.jsonl"
        self._log = directory / "log"
        self._arguments = arguments
        self._env = os.environ | {
            "PYTHONPATH": str(Path(jaxkv.__file__).parents[1]),
            "JAX_ENABLE_COMPILATION_CACHE": "true",
            "JAX_COMPILATION_CACHE_DIR": str(directory / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
        }

    def start(self, source: Path, output: Path | None = None) -> subprocess.Popen:
        code = "import sys; from jaxkv.api.cli import main; sys.exit(main())"
        paths = ["-i", str(source), "-o", str(output or self.output)]
        command = [sys.executable, "-P", "-c", code, "batch", *paths, *self._arguments, "--quiet"]
        with self._log.open("wb") as log:
            return subprocess.Popen(command, env=self._env, stderr=log)

    def finish(self, source: Path, output: Path | None = None) -> None:
        assert self.start(source, output).wait() == 0, self._log.read_text()

    def kill_at(self, process: subprocess.Popen, num_rows: int, delay_s: float = 0.0) -> None:
        """Ends it without warning `delay_s` after the output has `num_rows` rows."""
        while process.poll() is None and self.rows.count(b"\n") < num_rows:
            time.sleep(0.005)
        time.sleep(delay_s)
        process.kill()
        assert process.wait() == -signal.SIGKILL, self._log.read_text()

    @property
    def rows(self) -> bytes:
        return self.output.read_bytes() if self.output.exists() else b""


def test_a_second_process_is_refused_while_the_first_one_writes(tmp_path, files):
    want, _ = files(LINES)
    second = Command(tmp_path)
    with (tmp_path / "in.jsonl").open("rb") as lines, open_output(second.output, lines):
        assert second.start(tmp_path / "in.jsonl").wait() == 2
    assert (
        tmp_path / "log"
    ).read_text() == f"jaxkv: {second.output}: another process is writing to this output\n"
    assert files(name="killed")[0] == want


def test_an_output_that_another_process_has_replaced_by_now_is_refused(tmp_path, monkeypatch):
    (tmp_path / "in.jsonl").write_text("{}")
    output, other = tmp_path / "out.jsonl", tmp_path / "other.jsonl"
    other.write_text("")
    lock = journal.lock

    def lock_late(file: object) -> None:
        other.replace(output)  # what taking error rows out ends with
        lock(file)

    monkeypatch.setattr(journal, "lock", lock_late)
    with (
        (tmp_path / "in.jsonl").open("rb") as lines,
        pytest.raises(ValueError, match="another process has put a new file here"),
        open_output(output, lines),
    ):
        raise AssertionError("opened a file that has no name any more")


def as_openai(line: dict) -> dict:
    """The same line as OpenAI writes it."""
    body = {"model": "demo", "prompt": line["prompt"], **line["params"]}
    return {
        "custom_id": f"line {line['id']}",
        "method": "POST",
        "url": "/v1/completions",
        "body": body,
    }


def told(rows: list[dict]) -> list[dict]:
    """The rows, without what depends on the time and on what ran before."""
    for row in rows:
        if row.get("response") is not None:
            del row["response"]["body"]["created"]
            del row["response"]["body"]["usage"]["prompt_tokens_details"]
    return in_order(rows)


def test_killed_it_loses_nothing_and_repeats_nothing(tmp_path, checkpoint, files):
    """Half of the lines are OpenAI's. The input is a pipe that stays open, so that a run cannot end
    before it is killed.
    """
    lines = [
        {"id": i, "prompt": "The end " * (1 + i % 5), "params": {"max_tokens": 4 + i % 21}}
        for i in range(60)
    ]
    lines = [as_openai(line) if line["id"] % 2 else line for line in lines]
    want, _ = files(lines, GREEDY, model="demo")
    limits = ["--served-model-name", "demo", *OPTIONS, "--temperature", "0", "--max-tokens", "12"]
    command = Command(tmp_path, "--model", str(checkpoint), *limits, "--ignore-eos")
    os.mkfifo(path := tmp_path / "pipe")
    pipe = os.open(path, os.O_RDWR)
    process = command.start(path)
    os.write(pipe, dumped(lines[:50]))
    command.kill_at(process, 42)
    os.close(pipe)
    kept = command.rows
    assert 42 <= kept.count(b"\n") < 50
    rows, counts = files(lines, GREEDY, name=command.output.stem, model="demo")
    assert command.output.read_bytes().startswith(kept[: kept.rindex(b"\n") + 1])
    assert counts.num_skipped == kept.count(b"\n")
    assert told(rows) == told(want)


NUM_KILLS = 20


@pytest.mark.slow
def test_killed_at_random_moments_it_loses_nothing_and_repeats_nothing(tmp_path):
    rng = np.random.default_rng(0)
    words = [
        "def",
        "class",
        "import",
        "return",
        "self",
        "os",
        "path",
        "(",
        ")",
        ":",
        "\n",
        "x",
        "=",
        "1",
    ]
    lines = [
        as_openai(
            {
                "id": i,
                "prompt": " ".join(rng.choice(words, 3 + i % 13)),
                "params": {"max_tokens": 4 + i % 21},
            }
        )
        for i in range(2000)
    ]
    source = tmp_path / "in.jsonl"
    source.write_bytes(dumped(lines))
    limits = ["--max-model-len", "128", "--max-num-seqs", "16", "--max-num-batched-tokens", "64"]
    named = ["--dtype", "float32", "--served-model-name", "demo"]
    command = Command(tmp_path, *limits, *named, "--temperature", "0")
    command.finish(source, tmp_path / "undisturbed.jsonl")
    # A goal that is there already is a kill during the start.
    for num_rows in sorted(rng.integers(0, 1600, NUM_KILLS).tolist()):
        command.kill_at(command.start(source), num_rows, rng.uniform(0, 0.3))
    command.finish(source)
    rows = rows_in(command.output)
    assert len({row["custom_id"] for row in rows}) == len(rows) == 2000
    assert told(rows) == told(rows_in(tmp_path / "undisturbed.jsonl"))
