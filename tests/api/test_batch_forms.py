"""OpenAI's form of a batch, inputs of every kind, and what keeps runs apart: each answer is what
`generate` or `chat` gives, and nothing in a line is ignored.
"""

import base64
import gzip
import io
import itertools
import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from adapters import make_adapter
from jaxkv.api import cli
from jaxkv.api.batch_files import open_lines, open_output, run, run_batch, sources
from jaxkv.api.llm import LLM
from jaxkv.config import SamplingParams
from jaxkv.lora.request import LoRARequest
from jaxkv.ray import Generate
from jaxkv.requests.grammar import Grammar
from jaxkv.requests.pooling import PoolingParams

SMALL = {
    "max_model_len": 128,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "block_size": 8,
    "dtype": "float32",
}
FLAGS = [
    part for name, value in SMALL.items() for part in (f"--{name.replace('_', '-')}", str(value))
]
GREEDY = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
USER_ONLY = {"role": "user"}
USER = {"role": "user", "content": "The end"}
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
pytestmark = pytest.mark.usefixtures("quick_compile", "compile_once")


@pytest.fixture(scope="module")
def llm(checkpoint) -> LLM:
    return LLM(checkpoint, **SMALL, lazy_compile=True)


def line(custom_id: object, url: str, **body: object) -> dict:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": url,
        "body": {"model": "model", **body},
    }


def dumped(rows: list[dict]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.fixture
def rows_of(tmp_path, llm) -> Callable[..., list[dict]]:
    """Writes the input, if one is given, runs it and returns the rows of the output."""

    def run_lines(
        source: bytes | list[dict] | None = None,
        params: SamplingParams | dict | None = None,
        name: str = "out",
        retry_errors: bool = False,
        **options: object,
    ) -> list[dict]:
        path, output = tmp_path / "in.jsonl", tmp_path / f"{name}.jsonl"
        if source is not None:
            path.write_bytes(source if isinstance(source, bytes) else dumped(source))
        with (
            open_lines(str(path)) as lines,
            open_output(output, lines, retry_errors=retry_errors) as rows,
        ):
            run_batch(
                llm, lines, rows, GREEDY if params is None else params, use_tqdm=False, **options
            )
        return [json.loads(row) for row in output.read_bytes().splitlines()]

    return run_lines


def by_id(rows: list[dict]) -> dict[str, dict]:
    """Rows by their custom_id, each there once."""
    assert len({row["custom_id"] for row in rows}) == len(rows)
    return {row["custom_id"]: row for row in rows}


def message_of(row: dict) -> str:
    assert row.keys() == {"id", "custom_id", "response", "error"}
    assert row["response"] is None
    assert row["error"]["code"] == "invalid_request"
    return row["error"]["message"]


# --- adapters


@pytest.mark.slow
def test_a_line_names_its_adapter_as_its_model(tmp_path, checkpoint, capsys):
    """In both forms; rows of adapters with other content are not mixed."""
    loras = [
        LoRARequest(name, seed + 1, make_adapter(tmp_path / name, checkpoint, seed=seed))
        for seed, name in enumerate("ab")
    ]
    adapted = LLM(checkpoint, **SMALL, enable_lora=True, lazy_compile=True)
    params = SamplingParams(**GREEDY)
    want = {
        lora.lora_name if lora else "model": adapted.generate(
            "The end", params, use_tqdm=False, lora_request=lora
        )[0]
        .outputs[0]
        .text
        for lora in (*loras, None)
    }
    assert len(set(want.values())) == 3
    lines = [line(f"{i}", COMPLETION, prompt="The end", model=x) for i, x in enumerate(want)]
    lines += [{"id": x, "prompt": "The end", "model": x} for x in want]
    lines += [
        line("no", COMPLETION, prompt="a", model="c"),
        {"id": "bad", "prompt": "a", "model": 3},
    ]
    (tmp_path / "in.jsonl").write_bytes(dumped(lines))
    output = tmp_path / "out.jsonl"

    def run_command(*changes: str, has_adapters: bool = True) -> int:
        modules = [f"{lora.lora_name}={lora.lora_path}" for lora in loras]
        command = ["batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(output), "--quiet"]
        command += ["--model", str(checkpoint), *FLAGS, "--temperature", "0", "--max-tokens", "6"]
        command += ["--ignore-eos", "--enable-lora"]
        command += ["--lora-modules", *modules, *changes] if has_adapters else []
        return cli.main(command)

    assert run_command() == 0
    rows = [json.loads(row) for row in output.read_bytes().splitlines()]
    texts = {row["id"]: row["text"] for row in rows if "text" in row}
    assert texts == want
    answers = by_id([row for row in rows if "custom_id" in row])
    for i, name in enumerate(want):
        body = answers[f"{i}"]["response"]["body"]
        assert (body["model"], body["choices"][0]["text"]) == (name, want[name])
    assert "model: expected" in message_of(answers["no"])
    assert "or an adapter of --lora-modules" in message_of(answers["no"])
    assert [row["error"] for row in rows if row["id"] == "bad"] == [
        "line 8: model: expected a text, got int"
    ]
    assert run_command() == 0
    assert run_command(has_adapters=False) == 2
    assert "adapters: expected {'a': " in capsys.readouterr().err
    shutil.copyfile(
        tmp_path / "b/adapter_model.safetensors", tmp_path / "a/adapter_model.safetensors"
    )
    assert run_command() == 2
    assert "adapters: expected {'a': " in capsys.readouterr().err
    assert run_command(f"a={tmp_path}") == 2
    assert "lora_modules: expected a name that no model here has" in capsys.readouterr().err


# --- answers
# ----------------------------------------------------------------------------------------------------------

CHATS = [USER, {"role": "assistant", "content": "of"}, USER]
ASKED = {  # the line, and what gives the same
    "chat": (line("", CHAT, messages=[USER]), [USER], {}),
    "more": (
        line("", CHAT, messages=CHATS, max_completion_tokens=9, stop=["e"], user="me", stream=None),
        CHATS,
        {"max_tokens": 9, "stop": ["e"]},
    ),
    "two": (
        line("", CHAT, messages=[USER], n=2, temperature=1.5, seed=3, top_k=50),
        [USER],
        {"n": 2, "temperature": 1.5, "seed": 3, "top_k": 50},
    ),
    "scored": (
        line("", CHAT, messages=[USER], logprobs=True, top_logprobs=2, temperature=2, seed=1),
        [USER],
        {"logprobs": 2, "temperature": 2, "seed": 1},
    ),
    "template": (
        line("", CHAT, messages=[USER], tools=[], chat_template_kwargs={}, cache_salt="a"),
        [USER],
        {},
    ),
    "text": (
        line("", COMPLETION, prompt="Once upon", logit_bias={"9": 100}, echo=False),
        "Once upon",
        {"logit_bias": {"9": 100}},
    ),
    "ids": (
        line("", COMPLETION, prompt=[9, 8, 7], logprobs=2, temperature=2, seed=1),
        {"prompt_token_ids": [9, 8, 7]},
        {"logprobs": 2, "temperature": 2, "seed": 1},
    ),
    "listed": (
        line("", COMPLETION, prompt=["Once upon"], max_tokens=2),
        "Once upon",
        {"max_tokens": 2},
    ),
}


def test_a_line_without_a_model_is_for_the_one_that_runs(llm, rows_of):
    named, unnamed = (line(name, COMPLETION, prompt="The end", temperature=0) for name in "ab")
    del unnamed["body"]["model"]
    first, second = (by_id(rows_of([named, unnamed]))[name]["response"]["body"] for name in "ab")
    assert second["model"] == llm.model_names[0]
    assert second["choices"] == first["choices"]


def test_each_body_is_what_chat_or_generate_gives(llm, rows_of):
    rows = by_id(rows_of([one | {"custom_id": name} for name, (one, *_) in ASKED.items()]))
    for name, (asked, prompt, changes) in ASKED.items():
        params = replace(SamplingParams(**GREEDY), **changes)
        call = llm.chat if isinstance(prompt, list) else llm.generate
        (output,) = call(prompt, params, use_tqdm=False)
        row, is_chat = rows[name], asked["url"] == CHAT
        assert row.keys() == {"id", "custom_id", "response", "error"}
        assert (row["error"], row["response"]["status_code"]) == (None, 200)
        body = row["response"]["body"]
        assert (body["model"], body["object"]) == (
            "model",
            "chat.completion" if is_chat else "text_completion",
        )
        num_prompt = len(output.prompt_token_ids)
        num_new = sum(len(one.token_ids) for one in output.outputs)
        usage = {key: value for key, value in body["usage"].items() if key.endswith("tokens")}
        assert usage == {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
        }
        assert len(body["choices"]) == len(output.outputs)
        for index, (choice, want) in enumerate(zip(body["choices"], output.outputs, strict=True)):
            assert (choice["index"], choice["finish_reason"]) == (index, want.finish_reason)
            shown = choice["message"]["content"] if is_chat else choice["text"]
            assert shown == want.text
            if "logprobs" not in changes:
                assert choice["logprobs"] is None
                continue
            scored = zip(want.token_ids, want.logprobs, strict=True)
            chosen = [(entry[token].decoded_token, entry[token].logprob) for token, entry in scored]
            if is_chat:
                content = choice["logprobs"]["content"]
                assert [(one["token"], one["logprob"]) for one in content] == chosen
                assert {len(one["top_logprobs"]) for one in content} == {2}
                likeliest = [max(e.values(), key=lambda x: x.logprob) for e in want.logprobs]
                assert [one["top_logprobs"][0]["token"] for one in content] == [
                    one.decoded_token for one in likeliest
                ]
                assert all(
                    one["bytes"] is None or bytes(one["bytes"]).decode() == one["token"]
                    for one in content
                )
            else:
                columns = choice["logprobs"]
                assert (
                    list(zip(columns["tokens"], columns["token_logprobs"], strict=True)) == chosen
                )
                assert columns["text_offset"][:2] == [0, len(columns["tokens"][0])]
                assert all(len(top) in (2, 3) for top in columns["top_logprobs"])
    assert len({row["id"] for row in rows.values()}) == len(rows)


def test_what_a_line_leaves_out_is_the_run_s_else_the_model_s_and_the_endpoint_s(llm, rows_of):
    lines = [
        line("chat", CHAT, messages=[USER], temperature=0, ignore_eos=True),
        line("text", COMPLETION, prompt="Once upon", temperature=0, ignore_eos=True),
    ]
    for params, want in (
        ({}, {"chat": 128, "text": 16}),
        ({"max_tokens": 5}, {"chat": 5, "text": 5}),
        (SamplingParams(max_tokens=7), {"chat": 7, "text": 7}),
    ):
        rows = by_id(rows_of(lines, params, name=str(len(repr(params)))))
        usage = {name: row["response"]["body"]["usage"] for name, row in rows.items()}
        assert usage["text"]["completion_tokens"] == want["text"]
        if want["chat"] == 128:  # all of the context
            assert usage["chat"]["total_tokens"] == 128
        else:
            assert usage["chat"]["completion_tokens"] == want["chat"]


REFUSED = {  # in place of parts of a line, what the message says
    "no id": ({"custom_id": None}, "custom_id: expected a text, got None"),
    "a number": ({"custom_id": 3}, "custom_id: expected a text, got 3"),
    "a key": ({"params": {}}, "unknown keys: params"),
    "method": ({"method": "GET"}, "method: expected 'POST', got 'GET'"),
    "no url": ({"url": None}, "url: expected /v1/chat/completions or /v1/completions, got None"),
    "embeddings": ({"url": "/v1/embeddings"}, "url: .* got '/v1/embeddings' .*either text or vec"),
    "moderations": ({"url": "/v1/moderations"}, "url: .* got '/v1/moderations' .*not built here"),
    "body": ({"body": [1]}, "body: expected an object, got list"),
    "model": ({"model": "gpt-4o"}, "model: expected '.*' or 'model', .* got 'gpt-4o'"),
    "effort": (
        {"reasoning_effort": "low"},
        "reasoning_effort: expected what the chat template reads",
    ),
    "its place": (
        {"url": COMPLETION, "prompt": "a", "reasoning_effort": "low"},
        "reasoning_effort: unknown, or not supported",
    ),
    "guided": ({"guided_json": {}}, "guided_json: unknown, .*nearest: structured_outputs"),
    "json": (
        {"response_format": {"type": "xml"}},
        'response_format: expected {"type": "text"}.*, got {"type": "xml"}',
    ),
    "stream": ({"stream": True}, "stream: expected false in a batch, got true"),
    "choice": ({"tool_choice": "required"}, "tool_choice: expected tools with it, got none"),
    "messages": ({"messages": "x"}, "messages: expected a list"),
    "role": ({"messages": [{"role": "wizard", "content": "x"}]}, "unknown role wizard"),
    "prompt": ({"prompt": "x"}, "prompt: unknown, or not supported"),
    "n": ({"n": 2}, "n: expected 1 with greedy sampling"),
    "range": ({"top_p": 2}, "top_p: expected .*, got 2"),
    "too many": ({"logprobs": True, "top_logprobs": 200}, "logprobs: .*20"),
    "two prompts": (
        {"url": COMPLETION, "prompt": ["a", "b"]},
        "prompt: expected one in a line, got 2",
    ),
    "empty": ({"url": COMPLETION, "prompt": ""}, "the prompt is empty"),
    "suffix": ({"url": COMPLETION, "prompt": "a", "suffix": "b"}, 'suffix: expected "" .*got "b"'),
    "kwargs": ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs: expected no tools"),
}


def _refused(name: str) -> dict:
    changes = REFUSED[name][0]
    of_line = {
        key: value
        for key, value in changes.items()
        if key in ("custom_id", "method", "url", "body", "params")
    }
    whole = line(name, CHAT, messages=[USER]) | of_line
    if changes.get("url") == COMPLETION:
        del whole["body"]["messages"]
    rest = {key: value for key, value in changes.items() if key not in of_line}
    return whole | ({"body": whole["body"] | rest} if rest else {})


def test_what_is_wrong_or_not_supported_is_named_in_the_line_s_error(rows_of):
    lines = [_refused(name) for name in REFUSED]
    rows = rows_of(dumped(lines) + b"nonsense\n" + dumped([line("no id", CHAT, messages=[USER])]))
    errors = {row["custom_id"] or row["id"]: row for row in rows}
    for number, name in enumerate(REFUSED, 1):
        key = f"batch_req_line_{number}" if name in ("no id", "a number") else name
        assert re.search(REFUSED[name][1], message_of(errors[key])), (name, errors[key])
    nonsense = errors[f"batch_req_line_{len(lines) + 1}"]
    assert message_of(nonsense).startswith(f"line {len(lines) + 1}: expected JSON")
    assert errors["no id"]["error"] is None
    assert len(rows) == len(lines) + 2
    assert rows_of() == rows


def test_a_form_is_asked_for_by_a_line_or_the_run_and_without_it_there_is_no_answer(
    rows_of, llm, monkeypatch
):
    """In both forms of a line, and from Ray's columns."""
    pytest.importorskip("llguidance")
    asked = {"structured_outputs": {"choice": ["The"]}}
    plain, openai = {"id": 1, "prompt": "a"}, line("2", COMPLETION, prompt="a", **asked)
    (row,) = rows_of([plain | {"params": asked}], name="line")
    assert (row["text"], row["finish_reason"]) == ("The", "stop")
    params = GREEDY | {"ignore_eos": False} | asked
    assert rows_of([plain], params, name="run") == [row]
    (row,) = rows_of([plain | {"params": {"structured_outputs": {"a": 1}}}], name="odd")
    assert "structured_outputs: expected some of json" in row["error"]
    # Some is too much for the parser only when it has come so far.
    monkeypatch.setattr(Grammar, "accept", lambda self, token: setattr(self, "lost", True))
    error = property(lambda self: "too complex" if hasattr(self, "lost") else "")
    monkeypatch.setattr(Grammar, "error", error)
    lines = [plain | {"params": asked}, openai]
    rows = rows_of(lines, name="lost")
    assert {row["id"]: row["error"] for row in rows}[1] == "structured_outputs: too complex"
    assert message_of(next(row for row in rows if "custom_id" in row)) == rows[0]["error"]
    columns = {"line": np.array([json.dumps(one) for one in lines], object)}
    by_ray = [json.loads(row) for row in Generate(llm, params=GREEDY)(columns)["row"]]
    assert by_ray == sorted(rows, key=lambda row: "custom_id" in row)
    with pytest.raises(ValueError, match=r"max_errors: expected at most 0 .*too complex"):
        rows_of(lines, name="many", max_errors=0)


def test_answers_to_chats_are_taken_apart_by_a_template(rows_of):
    """As the server does it; an answer of a completion is its text."""
    pytest.importorskip("llguidance")
    asked = {"structured_outputs": {"choice": ["<think>Hm.</think>So."]}, "max_tokens": 90}
    lines = [line("a", CHAT, messages=[USER], **asked), line("b", COMPLETION, prompt="a", **asked)]
    rows = rows_of(lines, {}, response_template="qwen3")
    apart, text = (by_id(rows)[key]["response"]["body"]["choices"][0] for key in "ab")
    assert (apart["message"]["reasoning"], apart["message"]["content"]) == ("Hm.", "So.")
    assert text["text"] == "<think>Hm.</think>So."
    for other in (None, "gpt_oss"):
        with pytest.raises(ValueError, match=r"response_template"):
            rows_of(None, {}, response_template=other)


def test_any_text_is_a_custom_id_and_the_first_line_with_it_counts(rows_of):
    ids = ["", "0", "\ud800", "\x00\n", "é" * 5000, "batch_req_line_1", "null"]
    lines = [line(one, COMPLETION, prompt="The end", max_tokens=1) for one in ids]
    again = line("0", COMPLETION, prompt="One by one", max_tokens=2)
    plain = {"id": "0", "prompt": "One by one"}
    rows = rows_of([*lines, again, plain, {"id": 0, "prompt": "One by one"}])
    counted = [row for row in rows if row.get("response")]
    assert sorted(row["custom_id"] for row in counted) == sorted(ids)
    assert {row["response"]["body"]["usage"]["completion_tokens"] for row in counted} == {1}
    (twice,) = (row for row in rows if row.get("error") and "custom_id" in row)
    assert (twice["id"], twice["custom_id"]) == (f"batch_req_line_{len(ids) + 1}", None)
    assert "custom_id: expected one that no line above has, got '0'" in message_of(twice)
    assert {"text", "error"} == {
        key for row in rows for key in ("text", "error") if key in row and "custom_id" not in row
    }
    assert rows_of() == rows


# --- inputs and outputs
# -----------------------------------------------------------------------------------------------

LINES = [
    line("a", CHAT, messages=[USER]),
    line("b", COMPLETION, prompt="Once upon"),
    {"id": 3, "prompt": "The end", "params": {"max_tokens": 2}},
    line("d", COMPLETION, prompt=[9, 8, 7], stop=None),
]


def texts(rows: list[dict]) -> dict[object, object]:
    """What the rows say, by id."""
    found = {}
    for row in rows:
        if "custom_id" in row:
            choice = row["response"]["body"]["choices"][0]
            found[row["custom_id"]] = choice.get("text") or choice["message"]["content"]
        else:
            found[row["id"]] = row["text"]
    assert len(found) == len(rows)
    return found


@pytest.fixture
def command(checkpoint, tmp_path, capsysbinary) -> Callable[..., tuple[int, bytes, bytes]]:
    def run_command(source: str, output: str, *more: str) -> tuple[int, bytes, bytes]:
        flags = ["--temperature", "0", "--max-tokens", "6", "--ignore-eos", "--quiet"]
        paths = ["-i", source, "-o", output, "--model", str(checkpoint)]
        status = cli.main(["batch", *paths, *FLAGS, *flags, *more])
        return status, *capsysbinary.readouterr()

    return run_command


def test_gzipped_lines_and_standard_input_and_output_give_the_same(
    tmp_path, rows_of, command, monkeypatch
):
    want = texts(rows_of(LINES))
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(dumped(LINES)))
    assert command(str(tmp_path / "in.jsonl.gz"), str(tmp_path / "gz"))[0] == 0
    assert texts(list(map(json.loads, (tmp_path / "gz").read_bytes().splitlines()))) == want
    with (tmp_path / "in.jsonl").open("rb") as file:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(file))
        status, out, err = command("-", "-")
    assert (status, err) == (0, b"")
    assert texts(list(map(json.loads, out.splitlines()))) == want
    whole = gzip.compress(dumped(LINES))
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-30])
    (tmp_path / "bits.jsonl.gz").write_bytes(whole[:10] + b"\xff" * 30)
    (tmp_path / "sum.jsonl.gz").write_bytes(whole[:-8] + bytes(4) + whole[-4:])
    for source, output, more, message in (
        ("cut.jsonl.gz", "x", [], "cut.jsonl.gz: expected a whole gzip file, got one cut off"),
        ("bits.jsonl.gz", "x", [], "bits.jsonl.gz: expected a gzip file, got a broken one: Err"),
        ("sum.jsonl.gz", "x", [], "sum.jsonl.gz: expected a gzip file, got a broken one: CRC"),
        ("in.jsonl", "x.gz", [], "x.gz: expected JSON lines as output"),
        ("in.jsonl", "-", ["--retry-errors"], "retry_errors: expected a file"),
    ):
        path = output if output == "-" else str(tmp_path / output)
        status, out, err = command(str(tmp_path / source), path, *more)
        assert (status, out) == (2, b"")
        assert message in err.decode()


def test_nulls_of_a_column_are_absent_and_those_of_json_in_it_are_not():
    body = {"schema": {"const": None}, "messages": [{"role": "user", "name": None}]}
    for given, kept in ((json.dumps(body), body), (body, {"schema": {}, "messages": [USER_ONLY]})):
        row = {"custom_id": "1", "body": given, "params": None, "prompt": None}
        assert sources._without_nulls(row) == {"custom_id": "1", "body": kept}


def test_the_rows_of_a_parquet_file_are_lines(tmp_path, rows_of, llm):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    want = texts(rows_of(LINES))
    as_text = [one | {"body": json.dumps(one["body"])} for one in LINES if "body" in one]
    for name, lines in (
        ("objects", [LINES[0], LINES[1], LINES[2]]),
        ("texts", [*as_text, LINES[2]]),
    ):
        path = tmp_path / f"{name}.parquet"
        columns = {key: None for one in lines for key in one}
        parquet.write_table(pyarrow.Table.from_pylist([columns | one for one in lines]), path)
        with open_lines(str(path)) as source, open_output(tmp_path / name, source) as rows:
            run_batch(llm, source, rows, GREEDY, use_tqdm=False)
        got = texts(list(map(json.loads, (tmp_path / name).read_bytes().splitlines())))
        assert got == {key: want[key] for key in got}
        assert len(got) == len(lines)
    deep = '{"a":' * 900 + "1" + "}" * 900
    odd = ["{", deep, '{"model": "m", "model": "m"}', '{"model": NaN}', "[]"]
    bad = [
        {"custom_id": str(i), "url": CHAT, "method": "POST", "body": body}
        for i, body in enumerate(odd)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(bad), tmp_path / "odd.parquet")
    with (
        open_lines(str(tmp_path / "odd.parquet")) as source,
        open_output(tmp_path / "odd", source) as rows,
    ):
        assert run_batch(llm, source, rows, GREEDY, use_tqdm=False).num_errors == len(odd)
    (tmp_path / "no.parquet").write_bytes(b"PAR1 nonsense")
    with (
        pytest.raises(ValueError, match=r"no.parquet: expected a Parquet file"),
        open_lines(str(tmp_path / "no.parquet")),
    ):
        pass


@pytest.fixture(scope="module")
def pooling(checkpoint) -> LLM:
    return LLM(checkpoint, **SMALL, lazy_compile=True, runner="pooling")


def test_lines_for_embeddings_get_the_vectors_of_embed(tmp_path, llm, pooling):
    url = "/v1/embeddings"
    good = [
        line("text", url, input="The end"),
        line("long", url, input="The end of " * 9, dimensions=7, user="me"),
        line("ids", url, input=[9, 8, 7], encoding_format="base64"),
        line("one", url, input=["The end"], encoding_format="float"),
    ]
    wrong = {
        "input: expected one in a line, got 2": line("two", url, input=["a", "b"]),
        "input: expected a text, a list": line("none", url),
        "dimensions: expected at most 48": line("wide", url, input="a", dimensions=4800),
        "dimensions: expected None, a number": line("zero", url, input="a", dimensions=0),
        "encoding_format: expected one of": line("form", url, input="a", encoding_format="int8"),
        "wizard: unknown": line("wizard", url, input="a", wizard=1),
        "model: expected": line("model", url, input="a", model="other"),
        "empty": line("empty", url, input=""),
        "either text or vectors": line("chat", CHAT, messages=[USER]),
        "this model makes vectors": {"id": "plain", "prompt": "x"},
    }
    path = tmp_path / "in.jsonl"
    path.write_bytes(dumped(good + list(wrong.values())))
    for _ in range(2):  # the second start has nothing to do
        with path.open("rb") as lines, open_output(tmp_path / "out", lines) as rows:
            counts = run_batch(pooling, lines, rows, use_tqdm=False)
    assert (counts.num_written, counts.num_errors) == (0, len(wrong))
    found = [json.loads(row) for row in (tmp_path / "out").read_bytes().splitlines()]
    by = {row.get("custom_id") or row["id"]: row for row in found}
    assert len(by) == len(found) == len(good) + len(wrong)
    for message, one in wrong.items():
        error = by[one.get("custom_id", "plain")]["error"]
        assert message in (error if isinstance(error, str) else error["message"])
    for one in good:
        asked = one["body"]["input"]
        params = PoolingParams(dimensions=one["body"].get("dimensions"))
        prompt = asked[0] if asked == ["The end"] else asked
        (want,) = pooling.embed(prompt, pooling_params=params, use_tqdm=False)
        body = by[one["custom_id"]]["response"]["body"]
        (item,) = body["data"]
        vector = item["embedding"]
        if one["custom_id"] == "ids":
            vector = np.frombuffer(base64.b64decode(vector), "<f4")
        np.testing.assert_allclose(vector, want.outputs.embedding, atol=1e-6)
        assert body["usage"]["prompt_tokens"] == len(want.prompt_token_ids)
    with (
        path.open("rb") as lines,
        open_output(tmp_path / "out", lines) as rows,
        pytest.raises(ValueError, match="engine: expected"),
    ):
        run_batch(llm, lines, rows, use_tqdm=False)
    odd = dict(pooling.embed_as_completed(["The end", ("x", "y"), ("x", None), (3, None)]))
    assert [isinstance(odd[i], ValueError) for i in range(4)] == [True, True, False, True]
    with pytest.raises(ValueError, match="got a model that generates"):
        next(llm.embed_as_completed([("The end", None)]))


def test_shards_are_all_lines_each_once(rows_of):
    lines = [{"id": i, "prompt": "The end"} for i in range(10)] + [{"prompt": "no id"}]
    shards = [rows_of(lines, name=f"shard{i}", shard=(i, 3)) for i in range(3)]
    assert [len(rows) for rows in shards] == [3, 4, 4]
    assert sorted(row["id"] for rows in shards for row in rows if row["id"] is not None) == list(
        range(10)
    )
    for shard in ((3, 3), (-1, 3), (0, 0), (True, 2), "0/3"):
        with pytest.raises(ValueError, match=r"shard: expected \(i, n\)"):
            rows_of(lines, name="none", shard=shard)


def test_error_rows_are_done_again_where_asked_and_too_many_end_the_run(tmp_path, rows_of):
    good, bad = line("good", CHAT, messages=[USER]), line("bad", CHAT, messages="x")
    rows = rows_of(dumped([good, bad]) + b"{\n")
    assert rows_of(dumped([good, line("bad", CHAT, messages=[USER])]) + b"\n") == rows
    (tmp_path / "out.jsonl").rename(tmp_path / "elsewhere")
    (tmp_path / "out.jsonl").symlink_to(tmp_path / "elsewhere")
    again = rows_of(retry_errors=True)
    assert (tmp_path / "elsewhere").read_bytes() == dumped(again)
    assert again[0] == next(row for row in rows if row["custom_id"] == "good")
    assert (len(again), again[1]["custom_id"], again[1]["error"]) == (2, "bad", None)
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(ValueError, match=r"other\.jsonl, line 1"):
        rows_of(name="other", retry_errors=True)
    assert not [*tmp_path.glob("*.new")]
    lines = [line(str(i), CHAT, messages="x") for i in range(5)]
    with pytest.raises(
        ValueError, match=r"max_errors: expected at most 3 .*messages: expected a list"
    ):
        rows_of(lines, name="many", max_errors=3)
    assert len((tmp_path / "many.jsonl").read_bytes().splitlines()) == 4
    assert len(rows_of(name="many", max_errors=1)) == 5
    with pytest.raises(ValueError, match="max_errors: expected None or"):
        rows_of(lines, name="many", max_errors=-1)


def test_rows_of_another_model_or_other_parameters_are_not_mixed(
    tmp_path, rows_of, llm, monkeypatch
):
    rows = rows_of([LINES[2]])
    more = [*LINES[1:3]]
    message = r"params: expected {'top_k': 0}, with which its 1 rows .*, got {'top_k': 5}: name"
    with pytest.raises(ValueError, match=rf"out.jsonl: {message}"):
        rows_of(more, GREEDY | {"top_k": 5})
    with pytest.raises(ValueError, match=r"out.jsonl: params: expected"):
        rows_of(more, GREEDY | {"seed": 5})
    here = llm.identity()
    with monkeypatch.context() as patch:
        patch.setattr(LLM, "identity", lambda self: here | {"weights": "other"})
        with pytest.raises(ValueError, match=r"out.jsonl: engine: expected .*got .*'other'"):
            rows_of(more)
    assert len(rows_of(more)) == 2
    (tmp_path / "out.jsonl.manifest.json").unlink()
    with pytest.raises(ValueError, match=r"2 rows, but out.jsonl.manifest.json is not beside it"):
        rows_of(more)
    (tmp_path / "out.jsonl").unlink()
    assert rows_of([LINES[2]]) == rows


def test_lines_of_a_file_are_sorted_so_that_prompts_share_their_beginnings(
    tmp_path, llm, monkeypatch
):
    """More beginnings than the cache holds, in turn: a whole window of them computes each in the two rows
    that begin at once, and not again."""
    begins = [f"{i}" + " One by one by one the robot counted stars." * 2 for i in range(12)]
    lines = [
        {"id": f"{i} {j}", "prompt": f"{begin} {j}", "params": {"max_tokens": 1}}
        for j in range(6)
        for i, begin in enumerate(begins)
    ]
    path = tmp_path / "in.jsonl"
    path.write_bytes(dumped(lines))
    cached, outputs = {}, {}
    for size in (1, 1000):
        monkeypatch.setattr(run, "WINDOW_LINES", size)
        llm.reset_prefix_cache()
        with open_lines(str(path)) as source, open_output(tmp_path / f"{size}", source) as rows:
            counts = run_batch(llm, source, rows, GREEDY, use_tqdm=False)
        outputs[size] = sorted((tmp_path / f"{size}").read_bytes().splitlines())
        cached[size] = counts.num_cached_tokens / counts.num_prompt_tokens
    assert outputs[1] == outputs[1000]
    assert cached[1000] > cached[1] + 0.3, cached


def by_error(rows: list[dict]) -> tuple[list[dict], list[dict]]:
    """Those with a result, and those that say why there is none."""
    return [row for row in rows if not row.get("error")], [row for row in rows if row.get("error")]


def test_wherever_the_output_was_cut_the_next_run_makes_it_whole(tmp_path, rows_of):
    source = dumped(LINES) + b"nonsense\n" + dumped([line("e", CHAT, messages=[])])
    drawn = {"temperature": 1.5, "max_tokens": 6, "seed": 3}
    whole = rows_of(source, drawn)
    written = (tmp_path / "out.jsonl").read_bytes()
    ends = [0, *(match.end() for match in re.finditer(b"\n", written))]
    for at in sorted({*ends, *((a + b) // 2 for a, b in itertools.pairwise(ends)), 3}):
        (tmp_path / "out.jsonl").write_bytes(written[:at])
        rows = rows_of(None, drawn)
        assert rows[: written[:at].count(b"\n")] == whole[: written[:at].count(b"\n")]
        (done, refused), (want, want_refused) = by_error(rows), by_error(whole)
        assert texts(done) == texts(want)
        assert sorted(map(str, refused)) == sorted(map(str, want_refused))
        assert (len(done), len(refused)) == (4, 2)
