"""The server answers what the engine would, to OpenAI's own client and to whoever writes HTTP by
hand; who asks too much, wrongly, slowly or without a key gets a status, and others notice nothing.
"""

import asyncio
import json
import logging
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters import make_adapter
from jaxkv.api import async_llm, cli, engine_thread
from jaxkv.api.async_llm import AsyncLLM
from jaxkv.api.openai_answers import Answer
from jaxkv.api.openai_vectors import POOLING
from jaxkv.config import SamplingParams
from jaxkv.engine.engine import Engine
from jaxkv.lora.request import LoRARequest
from jaxkv.requests import reading
from jaxkv.requests.outputs import RequestOutput
from jaxkv.requests.pooling import PoolingParams
from jaxkv.testing import engine_of
from jaxkv.version import VERSION
from tiny import make_checkpoint, tiny_config
from tokenizers_ import save_tokenizer

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")

from jaxkv.api.server import app  # noqa: E402
from jaxkv.api.server.adapters import Names  # noqa: E402
from jaxkv.api.server.limits import Gate, Refusal  # noqa: E402
from jaxkv.api.server.options import ServeOptions  # noqa: E402
from jaxkv.api.server.run import Server, listen, url_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compile")

PAGE = Path(__file__).parents[2] / "docs" / "server.md"
MAX_LEN, PATIENCE_S = 128, 60
OPTIONS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 8,
    "dtype": "float32",
    "lazy_compile": True,
    "max_model_len": MAX_LEN,
}
TEMPLATE = (
    "{{ bos_token }}{% if tools %}[{{ tools[0].function.name }}]{% endif %}{% if mode %}({{ mode }})"
    "{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}={{ call.function.arguments.x }}{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CHAT = [{"role": "user", "content": "The end of"}]
GREEDY = {"temperature": 0, "max_tokens": 9, "ignore_eos": True}
LIMITS = {"temperature": 0, "max_tokens": 9}
DRAWN = {"temperature": 1.5, "max_tokens": 9, "ignore_eos": True, "seed": 5}
PROMPTS = ["Once upon a time", "The end"]
LONG = {"prompt": "The", "temperature": 0, "max_tokens": 120, "ignore_eos": True}


class Pace:
    """In the place of an engine's step: rests before each one."""

    def __init__(self, engine: Engine) -> None:
        self.rest_s = 0.0
        self._step = engine.step

    def __call__(self) -> list:
        time.sleep(self.rest_s)
        return self._step()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    directory = make_checkpoint(
        tmp_path_factory.mktemp("server") / "model", tiny_config("llama", vocab_size=420)
    )
    save_tokenizer(directory, chat_template=TEMPLATE)
    return directory


@pytest.fixture(scope="module")
def llm(checkpoint) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(checkpoint, **OPTIONS)
    engine_of(llm).step = Pace(engine_of(llm))
    yield llm
    llm.shutdown()


@pytest.fixture
def slowly(llm) -> Iterator[None]:
    engine_of(llm).step.rest_s = 0.1
    yield
    engine_of(llm).step.rest_s = 0.0


class Running:
    """A server that runs in a thread of its own."""

    def __init__(self, llm: AsyncLLM, *, name: str = "tiny", **options: Any) -> None:
        limits = ServeOptions(port=0, **options)
        self.socket = listen(limits)
        # So that a client that does not read is felt soon.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        self.address = self.socket.getsockname()[:2]
        self.url = url_of(self.socket)
        self.server = Server(llm, asyncio.run(llm.get_tokenizer()), limits, name)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})
        self.thread.start()
        wait_for(lambda: self.server.started)

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(PATIENCE_S)

    def client(self, key: str = "none") -> Any:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def ask(
        self, path: str, body: Any = None, *, headers: str = "", method: str | None = None
    ) -> tuple[int, dict[str, str], Any]:
        """Sends a request written by hand. Returns status, headers and body of the answer."""
        sent = (
            body
            if isinstance(body, bytes)
            else b""
            if body is None
            else json.dumps(body).replace("Infinity", "1e999").encode()
        )
        method = method or ("GET" if body is None else "POST")
        with self.connect() as connection:
            head = (
                f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(sent)}\r\n{headers}"
            )
            connection.sendall(f"{head}Connection: close\r\n\r\n".encode() + sent)
            return read_answer(connection)

    @contextmanager
    def connect(self) -> Iterator[socket.socket]:
        with closing(socket.create_connection(self.address, PATIENCE_S)) as connection:
            yield connection


def read_answer(connection: socket.socket) -> tuple[int, dict[str, str], Any]:
    with connection.makefile("rb") as file:
        status = int(file.readline().split()[1])
        lines = iter(lambda: file.readline().decode().strip(), "")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        body = file.read(int(headers["content-length"]))
    is_json = headers["content-type"] == "application/json"
    return status, headers, json.loads(body) if is_json else body.decode()


@pytest.fixture(scope="module")
def start(llm) -> Iterator[Callable[..., Running]]:
    with ExitStack() as stack:

        def begin(**options: Any) -> Running:
            running = Running(llm, **options)
            stack.callback(running.close)
            return running

        yield begin


@pytest.fixture(scope="module")
def running(start) -> Running:
    return start(max_body_bytes=2**20)


@pytest.fixture
def server(running, llm) -> Iterator[Running]:
    """The module's server, which every test must leave without requests and pages in use."""
    yield running
    wait_for(lambda: is_empty(llm) and not running.server.app.gate.num_in)


@pytest.fixture(scope="module")
def client(running) -> Any:
    with running.client() as client:
        yield client


def wait_for(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_empty(llm: AsyncLLM) -> bool:
    scheduler = engine_of(llm).scheduler
    return not engine_of(llm).has_work and not scheduler.allocator.num_used


def generated(
    llm: AsyncLLM, prompt: Any, *, lora_request: LoRARequest | None = None, **params: Any
) -> RequestOutput:
    async def last() -> RequestOutput:
        own = {"lora_request": lora_request}
        async for output in llm.generate(prompt, SamplingParams(**params), **own):
            newest = output
        return newest

    return asyncio.run(last())


def computed(call: Coroutine[Any, Any, list[Any]]) -> list[Any]:
    return asyncio.run(call)


def error_of(answer: tuple[int, dict, Any]) -> tuple[int, str | None, str]:
    status, _, body = answer
    assert body["error"].keys() == {"message", "type", "param", "code"}
    return status, body["error"]["param"], body["error"]["message"]


# --- what is answered


def test_completions_are_what_the_engine_generates(server, client, llm):
    extra = {"ignore_eos": True}
    answer = client.completions.create(
        model="tiny", prompt=PROMPTS, n=2, seed=5, max_tokens=9, temperature=1.5, extra_body=extra
    )
    outputs = [generated(llm, prompt, n=2, **DRAWN) for prompt in PROMPTS]
    expected = [(one.text, one.finish_reason) for output in outputs for one in output.outputs]
    assert [(one.text, one.finish_reason) for one in answer.choices] == expected
    assert [one.index for one in answer.choices] == [0, 1, 2, 3]
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    counted = answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens
    assert counted == (num_prompt, 36, num_prompt + 36)
    assert (answer.model, answer.object) == ("tiny", "text_completion")


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_echo_scores_the_prompt_in_front_of_the_output(server, client, llm, max_tokens):
    ids = generated(llm, PROMPTS[0], temperature=0).prompt_token_ids
    answer = client.completions.create(
        model="tiny", prompt=[ids], echo=True, logprobs=2, temperature=0, max_tokens=max_tokens
    )
    (choice,) = answer.choices
    assert answer.usage.completion_tokens == max_tokens
    params = {"temperature": 0, "max_tokens": max_tokens or 1, "logprobs": 2, "prompt_logprobs": 2}
    output = generated(llm, {"prompt_token_ids": ids}, **params)
    of_output = list(zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True))
    scored = [*zip(ids[1:], output.prompt_logprobs[1:], strict=True), *of_output[:max_tokens]]
    shown = choice.logprobs
    assert shown.token_logprobs == [None, *(entry[token].logprob for token, entry in scored)]
    assert shown.tokens[1:] == [entry[token].decoded_token for token, entry in scored]
    texts = [{one.decoded_token for one in entry.values()} for _, entry in scored]
    assert [top and top.keys() for top in shown.top_logprobs] == [None, *texts]
    assert (
        "".join(shown.tokens)
        == choice.text
        == f"<s>{PROMPTS[0]}" + "".join(shown.tokens[len(ids) :])
    )
    assert shown.text_offset == [len("".join(shown.tokens[:i])) for i in range(len(shown.tokens))]


def test_chats_are_what_the_engine_makes_of_their_messages(server, client, llm):
    answer = client.chat.completions.create(
        model="tiny",
        messages=CHAT,
        temperature=0,
        max_completion_tokens=9,
        logprobs=True,
        top_logprobs=3,
    )
    (expected,) = generated(llm, CHAT, temperature=0, max_tokens=9, logprobs=3).outputs
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert choice.finish_reason == expected.finish_reason
    for token, shown, entry in zip(
        expected.token_ids, choice.logprobs.content, expected.logprobs, strict=True
    ):
        assert shown.logprob == entry[token].logprob
        assert {(one.token, one.logprob) for one in shown.top_logprobs} == {
            (one.decoded_token, one.logprob) for one in entry.values() if one.rank <= 3
        }
        if shown.bytes is not None:
            assert bytes(shown.bytes).decode() == shown.token


def test_tools_and_arguments_of_calls_reach_the_template(server, client, llm):
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"x": 7}'}}
    messages = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]}]
    told = {"messages": messages, "tools": TOOLS, "chat_template_kwargs": {"mode": "fast"}}
    for choice, shown in (("auto", "<s>[look](fast)"), ("none", "<s>(fast)")):
        text = f"{shown}<|user|>The end of<|end|><|assistant|>=7<|end|><|assistant|>"
        answer = client.chat.completions.create(
            model="tiny",
            messages=messages,
            tools=TOOLS,
            tool_choice=choice,
            temperature=0,
            max_tokens=5,
            extra_body={"chat_template_kwargs": {"mode": "fast"}},
        )
        expected = generated(
            llm, {"prompt_token_ids": tokens_of(llm, text)}, temperature=0, max_tokens=5
        )
        assert answer.choices[0].message.content == expected.outputs[0].text
        assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    _, _, body = server.ask("/tokenize", {k: told[k] for k in told if k != "tools"})
    assert body["tokens"] == tokens_of(llm, text)


def streamed(client, **asked) -> tuple[dict, str]:
    """Returns the message that the chunks of a stream make up, and its finish_reason."""
    message = {"reasoning": "", "content": "", "tool_calls": []}
    with client.chat.completions.create(model="tiny", stream=True, **asked) as chunks:
        for chunk in chunks:
            (choice,) = chunk.choices
            told = choice.delta.model_dump()
            for part in ("reasoning", "content"):
                message[part] += told.get(part) or ""
            for call in told["tool_calls"] or ():
                if call["id"] is not None:
                    assert call["index"] == len(message["tool_calls"])
                    message["tool_calls"].append((call["function"]["name"], ""))
                name, arguments = message["tool_calls"][call["index"]]
                arguments += call["function"]["arguments"]
                message["tool_calls"][call["index"]] = name, arguments
    return message, choice.finish_reason


def whole(client, **asked) -> tuple[dict, str]:
    """Returns the same of an answer that is not streamed."""
    answer = client.chat.completions.create(model="tiny", **asked)
    (choice,) = answer.choices
    told = choice.message.model_dump()
    calls = told["tool_calls"] or ()
    assert len({call["id"] for call in calls}) == len(calls)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    assert (told["content"] is None) is (bool(calls) and not told["content"])
    texts = {part: told.get(part) or "" for part in ("reasoning", "content")}
    return {**texts, "tool_calls": calls}, choice.finish_reason


@pytest.mark.parametrize("half", ["", "\\ud83d"])
def test_answers_are_taken_apart_in_streams_as_in_whole(start, llm, half):
    call = f'{{"name": "look", "arguments": {{"x": "é{half}"}}}}'
    text = f"<think>\nHm.</think>\nI look.<tool_call>{call}</tool_call>"
    form = {"structured_outputs": {"choice": [text]}}
    asked = {"messages": CHAT, "temperature": 0, "max_tokens": 99, "extra_body": form}
    found = [("look", f'{{"x": "é{half}"}}')]
    apart = {"reasoning": "Hm.", "content": "I look."}
    parsing = start(response_template="qwen3")
    with parsing.client() as client:
        for read in (whole, streamed):
            with_tools = read(client, **asked, tools=TOOLS)
            assert with_tools == ({**apart, "tool_calls": found}, "tool_calls")
            message, reason = read(client, **asked)  # nobody may call
            assert (message["reasoning"], message["tool_calls"], reason) == ("Hm.", [], "stop")
            assert message["content"].startswith("I look.{")
            hidden = {**asked, "extra_body": {**form, "include_reasoning": False}}
            message, _ = read(client, **hidden, tools=TOOLS)
            assert message == {"reasoning": "", "content": "I look.", "tool_calls": found}
            cut = {**asked, "max_tokens": len(tokens_of(llm, text[: text.index("é")]))}
            message, reason = read(client, **cut, tools=TOOLS)
            assert (message["tool_calls"], reason) == ([], "length")
            assert message["content"].startswith('I look.{"name": "look"')
    wait_for(lambda: is_empty(llm))


def test_responses_say_what_chats_say(start, llm):
    """To OpenAI's client, which adds up the events of a stream by itself."""
    call = '{"name": "look", "arguments": {"x": "\u00e9"}}'
    text = f"<think>\nHm.</think>\nI look.<tool_call>{call}</tool_call>"
    asked = {"temperature": 0, "extra_body": {"structured_outputs": {"choice": [text]}}}
    own = asked | {"model": "tiny", "max_output_tokens": 99, "input": CHAT}
    own["tools"] = [{"type": "function", **TOOLS[0]["function"]}]
    parsing = start(response_template="qwen3")
    with parsing.client() as client:
        message, reason = whole(client, **asked, messages=CHAT, max_tokens=99, tools=TOOLS[:1])
        answer = client.responses.create(**own)
        with client.responses.stream(**own) as events:
            streamed = events.get_final_response()
        for one in (answer, streamed):
            reasoning, said, called = one.output
            assert reasoning.content[0].text == message["reasoning"] == "Hm."
            assert one.output_text == said.content[0].text == message["content"] == "I look."
            assert [(called.name, called.arguments)] == message["tool_calls"]
            assert (one.status, reason) == ("completed", "tool_calls")
            assert one.usage.output_tokens == len(tokens_of(llm, text))
        *_, last = client.responses.create(**own | {"max_output_tokens": 5}, stream=True)
        assert last.response.incomplete_details.reason == "max_output_tokens"
    long = {"input": "x" * 9999, "stream": True}
    status, body = error_of(parsing.ask("/v1/responses", long))[:2]
    assert (status, body) == (400, "input")
    wait_for(lambda: is_empty(llm))


def test_tools_that_have_to_be_called_are_called(client, llm):
    kinds = {"type": "object", "properties": {"x": {"enum": ["a", "b"]}}, "required": ["x"]}
    kinds["additionalProperties"] = False
    tools = [
        {"type": "function", "function": {"name": name, "parameters": kinds}}
        for name in ("look", "go")
    ]
    asked = {"messages": CHAT, "tools": tools, "max_tokens": 300, "temperature": 1, "seed": 3}
    named = {"type": "function", "function": {"name": "go"}}
    one = {"tool_choice": "required", "parallel_tool_calls": False}
    for choice, names in ((one, {"look", "go"}), ({"tool_choice": named}, {"go"})):
        message, reason = whole(client, **asked, **choice)
        assert (message, reason) == streamed(client, **asked, **choice)
        ((name, arguments),) = message["tool_calls"]
        assert name in names
        assert json.loads(arguments)["x"] in "ab"
        assert (message["content"], reason) == ("", "stop" if names == {"go"} else "tool_calls")
    message, reason = whole(client, **{**asked, "max_tokens": 9}, tool_choice="required")
    assert (message["tool_calls"], reason, message["content"][0]) == ([], "length", "{")
    wait_for(lambda: is_empty(llm))


def test_a_form_of_an_answer_begins_behind_what_the_model_reasons(start, llm, tmp_path):
    """A bias makes the model reason as long as it does, which is nothing."""
    reasoning = {"open": "<|user|>", "close": "<|end|>"}
    template = {"start_anchor": "<|assistant|>", "fields": {"reasoning": reasoning, "content": {}}}
    file = tmp_path / "template.json"
    file.write_text(json.dumps(template))
    begin, end = tokens_of(llm, "<|user|><|end|>")
    form = {"type": "object", "properties": {"x": {"enum": ["a", "b"]}}, "required": ["x"]}
    form["additionalProperties"] = False
    tools = [{"type": "function", "function": {"name": "look", "parameters": form}}]
    asked = {"messages": CHAT, "max_tokens": 300, "temperature": 0}
    one = {"tool_choice": "required", "parallel_tool_calls": False}
    in_form = {"type": "json_schema", "json_schema": {"name": "x", "schema": form}}
    with start(response_template=str(file)).client() as client:
        for bias in ({begin: 90, end: 99}, {begin: -99}):
            biased = {**asked, "logit_bias": {str(key): value for key, value in bias.items()}}
            ids = {"extra_body": {"return_token_ids": True}}
            answer = client.chat.completions.create(
                model="tiny", **biased, **ids, response_format=in_form
            )
            tokens = answer.choices[0].model_dump()["token_ids"]
            assert (tokens[:2] == [begin, end]) is (bias[begin] > 0)
            for read in (whole, streamed):
                message, reason = read(client, **biased, response_format=in_form)
                assert json.loads(message["content"])["x"] in "ab"
                assert (message["reasoning"], reason) == ("", "stop")
                message, _ = read(client, **biased, tools=tools, **one)
                ((name, arguments),) = message["tool_calls"]
                assert (name, json.loads(arguments)["x"] in "ab") == ("look", True)
                assert message["content"] == ""
    wait_for(lambda: is_empty(llm))


def test_an_answer_that_was_begun_goes_on(server, llm):
    messages = [*CHAT, {"role": "assistant", "content": "One by"}]
    text = "<s><|user|>The end of<|end|><|assistant|>One by"
    begun = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    _, _, body = server.ask("/v1/chat/completions", begun | {"temperature": 0, "max_tokens": 5})
    prompt = {"prompt_token_ids": tokens_of(llm, text)}
    expected = generated(llm, prompt, temperature=0, max_tokens=5)
    assert body["choices"][0]["message"]["content"] == expected.outputs[0].text
    for wrong, key in ((1, "add_generation_prompt"), (True, "messages")):
        answer = server.ask("/v1/chat/completions", begun | {"add_generation_prompt": wrong})
        assert error_of(answer)[:2] == (400, key)


def tokens_of(llm: AsyncLLM, text: str) -> list[int]:
    return asyncio.run(llm.get_tokenizer()).encode(text, add_special_tokens=False)


@pytest.mark.parametrize("changes", [{}, {"echo": True, "logprobs": 2}, {"stop": [*"aeinst"]}])
def test_a_stream_has_what_a_whole_answer_has(server, client, monkeypatch, changes):
    made, news = [], engine_thread._Live.news
    monkeypatch.setattr(
        engine_thread._Live, "news", lambda live: made.append(live.stream) or news(live)
    )
    asked = {"model": "tiny", "prompt": PROMPTS, "n": 2, **changes, "max_tokens": 9, "seed": 5}
    asked |= {"temperature": 1.5}
    whole = client.completions.create(**asked)
    assert len(made) == len(PROMPTS)  # no output before the last one, which nobody would read
    got: dict[int, Any] = {}
    *chunks, last = client.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    for chunk in chunks:
        (one,) = chunk.choices
        assert (chunk.usage, chunk.id) == (None, last.id)
        before = got.setdefault(one.index, {"text": "", "scores": [], "offsets": []})
        assert "reason" not in before
        before["text"] += one.text
        if one.logprobs:
            before["scores"] += one.logprobs.top_logprobs
            before["offsets"] += one.logprobs.text_offset
        if one.finish_reason:
            before["reason"] = one.finish_reason, one.stop_reason
    assert len(chunks) > len(got) == len(whole.choices)
    for one in whole.choices:
        scores = one.logprobs.top_logprobs if one.logprobs else []
        offsets = one.logprobs.text_offset if one.logprobs else []
        expected = {
            "text": one.text,
            "scores": scores,
            "offsets": offsets,
            "reason": (one.finish_reason, one.stop_reason),
        }
        assert got[one.index] == expected
    if "stop" in changes:
        stopped = {one.stop_reason for one in whole.choices if one.finish_reason == "stop"}
        assert stopped & {*changes["stop"]}
    assert last.choices == []
    assert last.usage.model_dump(exclude={"prompt_tokens_details"}) == whole.usage.model_dump(
        exclude={"prompt_tokens_details"}
    )


def test_each_chunk_may_have_the_usage_so_far(server, client):
    asked = {"model": "tiny", "prompt": PROMPTS, "n": 2, "seed": 5, "max_tokens": 9}
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.completions.create(**asked, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert 0 < counts[0] < counts[-1]
    assert chunks[-1].choices == []
    whole = client.completions.create(**asked).usage
    assert chunks[-1].usage.total_tokens == chunks[-2].usage.total_tokens == whole.total_tokens


def test_a_streamed_chat_begins_with_its_role(server, client):
    asked = {"model": "tiny", "messages": CHAT, "temperature": 0, "max_tokens": 20}
    whole = client.chat.completions.create(**asked)
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    assert (chunks[0].delta.role, chunks[0].delta.content) == ("assistant", "")
    text = "".join(chunk.delta.content or "" for chunk in chunks)
    assert (text, chunks[-1].finish_reason) == (
        whole.choices[0].message.content,
        whole.choices[0].finish_reason,
    )


def test_names_of_tokens_are_looked_up_beside_the_event_loop(server, monkeypatch):
    tokenizer, loops = server.server.app._tokenizer, []
    name = tokenizer.convert_ids_to_tokens

    def noted(ids: list[int]) -> list[str]:
        loops.append(asyncio._get_running_loop())
        return name(ids)

    monkeypatch.setattr(tokenizer, "convert_ids_to_tokens", noted)
    assert server.ask("/tokenize", {"prompt": PROMPTS[0], "return_token_strs": True})[0] == 200
    assert loops == [None]


@pytest.mark.parametrize(
    ("changes", "is_beside"), [({"echo": True, "logprobs": 1}, True), ({}, False)]
)
def test_scores_of_prompts_are_written_beside_the_event_loop(
    server, monkeypatch, changes, is_beside
):
    loops, chunks = set(), Answer.chunks

    def noted(answer: Answer, *output: Any) -> Iterator[dict]:
        loops.add(asyncio._get_running_loop())
        return chunks(answer, *output)

    monkeypatch.setattr(Answer, "chunks", noted)
    body = json.dumps({**GREEDY, "prompt": PROMPTS[0], "stream": True, **changes}).encode()
    with server.connect() as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        connection.sendall(f"{head}Connection: close\r\n\r\n".encode() + body)
        with connection.makefile("rb") as file:
            assert b"[DONE]" in file.read()
    assert (None in loops, len(loops)) == (is_beside, 1)


def test_models_tokens_health_version_and_metrics(server, client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").model_extra["max_model_len"] == MAX_LEN
    _, _, body = server.ask("/tokenize", {"prompt": PROMPTS[0]})
    assert (body["count"], body["max_model_len"]) == (len(body["tokens"]), MAX_LEN)
    _, _, text = server.ask("/detokenize", {"tokens": body["tokens"]})
    assert text == {"prompt": f"<s>{PROMPTS[0]}"}
    nulls = {"prompt": PROMPTS[0], "messages": None, "tools": None, "model": None}
    assert server.ask("/tokenize", nulls)[2] == body
    assert server.ask("/detokenize", {"tokens": body["tokens"], "model": None})[2] == text
    _, _, bare = server.ask("/tokenize", {"prompt": PROMPTS[0], "add_special_tokens": False})
    assert bare["tokens"] == body["tokens"][1:]
    _, _, named = server.ask("/tokenize", {"prompt": PROMPTS[0], "return_token_strs": True})
    assert named == body | {"token_strs": named["token_strs"]}
    assert named["token_strs"][0] == "<s>"
    assert server.ask("/health")[::2] == (200, {"status": "ok"})
    assert server.ask("/ping")[::2] == server.ask("/ping", {})[::2] == (200, {"status": "ok"})
    assert server.ask("/version")[::2] == (200, {"version": VERSION})
    status, headers, body = server.ask("/metrics")
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    lines = body.splitlines()
    assert 'jaxkv:http_requests_total{path="/tokenize",status="200"} ' in body
    assert 'jaxkv:http_requests_total{path="/v1/models/{name}",status="200"} ' in body
    assert "jaxkv:num_requests_running 0" in lines


def test_tokens_are_counted_whatever_the_context_has_room_for(server, monkeypatch):
    text = "The end " * 2 * MAX_LEN
    for prompt in ({"prompt": text}, {"messages": [{"role": "user", "content": text}]}):
        _, _, body = server.ask("/tokenize", prompt)
        assert body["count"] == len(body["tokens"]) > body["max_model_len"] == MAX_LEN
        assert text in server.ask("/detokenize", {"tokens": body["tokens"]})[2]["prompt"]
    assert server.ask("/tokenize", {"prompt": "", "add_special_tokens": False})[2]["tokens"] == []
    assert server.ask("/detokenize", {"tokens": []})[2] == {"prompt": ""}
    monkeypatch.setattr(reading, "MOST_AT_ONCE", MAX_LEN)
    monkeypatch.setattr(reading, "CHARS_PER_TOKEN", 1)
    assert error_of(server.ask("/tokenize", {"prompt": "x" * 10**5}))[:2] == (400, "prompt")
    assert error_of(server.ask("/detokenize", {"tokens": body["tokens"]}))[:2] == (400, "tokens")


def test_prompts_with_unlike_salts_share_no_pages(server):
    body = {**LONG, "prompt": "x" * 60, "max_tokens": 1}

    def num_cached(**more: str) -> int:
        usage = server.ask("/v1/completions", {**body, **more})[2]["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert (
        num_cached(cache_salt="a") == num_cached(cache_salt="b") == 0 < num_cached(cache_salt="a")
    )


# --- adapters

KEY = "Authorization: Bearer one\r\n"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def lora_dir(checkpoint, tmp_path_factory) -> Path:
    """Two adapters, a broken one, and a link out of the directory to a third."""
    where = tmp_path_factory.mktemp("loras")
    for seed, name in enumerate(("a", "b", "broken")):
        make_adapter(where / "in" / name, checkpoint, seed=seed)
    (where / "in/broken/adapter_model.safetensors").write_bytes(b"x" * 100)
    make_adapter(where / "out", checkpoint, seed=9)
    (where / "in/link").symlink_to(where / "out")
    (where / "in/loop").symlink_to(where / "in/loop")
    (where / "in/files").mkdir()
    for file in (where / "out").iterdir():
        (where / "in/files" / file.name).symlink_to(file)
    return where / "in"


@pytest.fixture(scope="module")
def adapted(checkpoint, lora_dir) -> Iterator[Running]:
    """A server that has adapters, and lets those who have its key load more."""
    llm = AsyncLLM(checkpoint, **OPTIONS, enable_lora=True, max_loras=2)
    engine_of(llm).step = Pace(engine_of(llm))
    modules = [f"a={lora_dir / 'a'}"]
    modules += [json.dumps({"name": "b", "path": str(lora_dir / "b"), "base_model_name": "tiny"})]
    options = {"lora_modules": modules, "lora_dir": str(lora_dir), "api_key": ["one"]}
    with closing(Running(llm, **options)) as running:
        running.llm = llm
        asyncio.run(running.server.app.names.read())
        yield running
    llm.shutdown()


def test_the_model_of_a_request_may_be_an_adapter(adapted, lora_dir):
    """Which the engine computes with, streams and chats too; unknown ones are 404."""
    with adapted.client("one") as client:
        models = {model.id: model.model_extra["parent"] for model in client.models.list()}
        assert models == {"tiny": None, "a": "tiny", "b": "tiny"}
        assert client.models.retrieve("a").id == "a"
        texts = []
        for number, name in enumerate(("tiny", "a", "b")):
            lora = None if name == "tiny" else LoRARequest(name, number, lora_dir / name)
            want = generated(adapted.llm, PROMPTS[0], lora_request=lora, **GREEDY).outputs[0].text
            answer = client.completions.create(
                model=name, prompt=PROMPTS[0], extra_body={"ignore_eos": True}, **LIMITS
            )
            assert (answer.model, answer.choices[0].text) == (name, want)
            want = generated(adapted.llm, CHAT, lora_request=lora, **GREEDY).outputs[0].text
            chunks = client.chat.completions.create(
                model=name, messages=CHAT, stream=True, extra_body={"ignore_eos": True}, **LIMITS
            )
            chunks = list(chunks)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == want
            assert {chunk.model for chunk in chunks} == {name}
            texts.append(answer.choices[0].text)
        assert len(set(texts)) == 3
    for path, body in (
        ("/v1/completions", {"model": "c", "prompt": "a"}),
        ("/v1/chat/completions", {"model": "c", "messages": CHAT}),
        ("/tokenize", {"model": "c", "prompt": "a"}),
    ):
        status, param, message = error_of(adapted.ask(path, body, headers=KEY))
        assert (status, param) == (404, "model")
        assert message == "model: expected 'tiny' or an adapter of /v1/models, got 'c'"
    assert adapted.ask("/tokenize", {"model": "a", "prompt": "a"}, headers=KEY)[0] == 200


def test_adapters_are_loaded_and_unloaded_by_those_who_have_the_key(adapted, lora_dir):
    def ask(path: str, body: dict, headers: str = KEY) -> tuple[int, dict, Any]:
        return adapted.ask(path, body, headers=headers)

    def says() -> tuple[int, str]:
        status, _, body = ask("/v1/completions", {"model": "new", "prompt": "The", **GREEDY})
        return status, body["choices"][0]["text"] if status == 200 else body["error"]["code"]

    body = {"lora_name": "new", "lora_path": "a"}
    assert error_of(ask(LOAD, body, headers=""))[0] == 401
    assert says() == (404, "model_not_found")
    assert ask(LOAD, body)[::2] == (200, "Success: LoRA adapter 'new' is loaded.")
    first = says()
    assert first[0] == 200
    assert error_of(ask(LOAD, body))[:2] == (400, "lora_name")
    assert ask(LOAD, body | {"lora_path": str(lora_dir / "b"), "load_inplace": True})[0] == 200
    assert says()[0] == 200
    assert says() != first
    assert error_of(ask(UNLOAD, {"lora_name": "new", "lora_int_id": 99}))[0] == 404
    assert ask(UNLOAD, {"lora_name": "new"})[::2] == (
        200,
        "Success: LoRA adapter 'new' is unloaded.",
    )
    assert says() == (404, "model_not_found")
    assert error_of(ask(UNLOAD, {"lora_name": "new"}))[:2] == (404, "lora_name")
    assert error_of(ask(UNLOAD, {"lora_name": "tiny"}))[:2] == (404, "lora_name")


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"lora_path": "../out"}, "lora_path", "expected an adapter in the directory of --lora-d"),
        ({"lora_path": "/etc"}, "lora_path", "expected an adapter in the directory of --lora-dir"),
        ({"lora_path": "link"}, "lora_path", "expected an adapter in the directory of --lora-dir"),
        ({"lora_path": "files"}, "lora_path", "expected an adapter in the directory of --lora-dir"),
        ({"lora_path": "loop"}, "lora_path", "expected a"),
        ({"lora_path": "a\0b"}, "lora_path", "expected an adapter in the directory of --lora-dir"),
        ({"lora_path": "x" * 300}, "lora_path", "expected"),
        ({"lora_path": ""}, "lora_path", "expected an adapter in the directory of --lora-dir"),
        ({"lora_path": "nothing"}, "lora_path", "nothing: expected a directory with adapter_con"),
        ({"lora_path": "broken"}, "lora_path", "broken/adapter_model.safetensors: expected"),
        ({"lora_path": 3}, "lora_path", "expected a text, got 3"),
        ({"lora_name": "tiny"}, "lora_name", "expected a name that no model here has, got 'tiny'"),
        ({"lora_name": "a"}, "lora_name", "expected a name that no model here has, got 'a'"),
        ({"lora_name": "tiny", "load_inplace": True}, "lora_name", "expected a name that no"),
        ({"lora_name": ""}, "lora_name", "expected a name of 1 to 200 characters"),
        ({"lora_name": "x" * 201}, "lora_name", "expected a name of 1 to 200 characters"),
        ({"is_3d_lora_weight": True}, "is_3d_lora_weight", "unknown, or not supported"),
    ],
)
def test_no_adapter_outside_of_its_directory_is_loaded(adapted, lora_dir, body, param, says):
    given = {"lora_name": "new", "lora_path": "a"} | body
    status, key, message = error_of(adapted.ask(LOAD, given, headers=KEY))
    assert (status, key) == (400, param)
    assert says in message
    assert str(lora_dir) not in message
    assert list(adapted.server.app.names) == ["tiny", "a", "b"]


def test_an_adapter_whose_files_have_broken_is_an_error_of_the_server(adapted, lora_dir):
    copy = lora_dir / "copy"
    shutil.copytree(lora_dir / "a", copy)
    body = {"lora_name": "copy", "lora_path": "copy"}
    assert adapted.ask(LOAD, body, headers=KEY)[0] == 200
    shutil.rmtree(copy)
    answer = adapted.ask("/v1/completions", {"model": "copy", "prompt": "a"}, headers=KEY)
    assert error_of(answer) == (500, "model", "model: its adapter cannot be read")
    assert adapted.ask(UNLOAD, {"lora_name": "copy"}, headers=KEY)[0] == 200
    wait_for(lambda: is_empty(adapted.llm) and not adapted.server.app.gate.num_in)


def test_a_model_is_called_by_its_whole_name_or_the_last_part_of_it(llm):
    names = Names(llm, ServeOptions(), "org/tiny")
    asked = (None, "org/tiny", "tiny")
    assert [names.adapter(name) for name in asked] == [None] * 3
    assert [names.shown(name) for name in asked] == ["org/tiny"] * 3
    for name in ("org", "iny", ""):
        with pytest.raises(Refusal, match="model: expected 'org/tiny', got"):
            names.adapter(name)


def test_a_model_may_have_several_names(start, capsys):
    running = start(name="tiny", served_model_name=["tiny", "org/second"])
    with running.client() as client:
        assert [model.id for model in client.models.list()] == ["tiny", "org/second"]
        for name in ("tiny", "org/second", "second"):
            assert client.completions.create(model=name, prompt="a", **LIMITS).model == "tiny"
    flags = ["--served-model-name", "a", "b", "--enable-lora", "--lora-modules", "b=c"]
    assert cli.main(["serve", *flags]) == 2
    assert "lora_modules: expected a name that no model here has" in capsys.readouterr().err


def test_a_server_without_a_directory_loads_no_adapter(server, checkpoint):
    for path in (LOAD, UNLOAD):
        answer = server.ask(path, {"lora_name": "a", "lora_path": str(checkpoint)})
        assert error_of(answer)[0] == 403
        assert "expected a server with --lora-dir" in error_of(answer)[2]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--lora-modules a=b", "lora_modules: expected --enable-lora with it"),
        ("--lora-dir . --api-key k", "lora_dir: expected --enable-lora with it"),
        ("--enable-lora --lora-dir .", "lora_dir: expected api_key or JAXKV_API_KEY with it"),
        ("--enable-lora --lora-dir ./no --api-key k", "lora_dir: expected a directory, got"),
        ("--enable-lora --lora-modules a", "lora_modules: expected name=path, got 'a'"),
        ("--enable-lora --lora-modules =b", "lora_modules: expected a name of 1 to 200"),
        ("--enable-lora --lora-modules a=b a=c", "expected a name that no model here has, got 'a'"),
        ("--enable-lora --model x/y --lora-modules y=b", "a name that no model here has, got 'y'"),
        ('--enable-lora --lora-modules {"name":"a"}', 'expected {"name": ..., "path": ...}'),
        ("--enable-lora --lora-modules [3]", 'expected {"name": ..., "path": ...}'),
        ("--enable-lora --lora-modules {", "lora_modules: expected name=path or JSON"),
        (
            '--enable-lora --lora-modules {"name":"a","path":"b","base_model_name":"other"}',
            "lora_modules: expected base_model_name 'demo', got 'other'",
        ),
    ],
)
def test_modules_that_cannot_be_are_refused_before_anything_is_loaded(flags, says, capsys):
    assert cli.main(["serve", "--port", "0", *flags.split()]) == 2
    assert says in capsys.readouterr().err


# --- vectors and scores


@pytest.fixture(scope="module")
def pooling(checkpoint) -> Iterator[Running]:
    """A server with few places, of a model that pools."""
    llm = AsyncLLM(checkpoint, **OPTIONS, runner="pooling")
    engine_of(llm).step = Pace(engine_of(llm))
    with closing(Running(llm, max_concurrent_sequences=4)) as running:
        running.llm = llm
        yield running
    llm.shutdown()


@pytest.mark.parametrize("changes", [{}, {"encoding_format": "float"}, {"dimensions": 10}])
def test_vectors_are_what_the_engine_makes(pooling, changes):
    inputs = [*PROMPTS, "The end of"]
    with pooling.client() as client:  # which asks for base64 unless it is told otherwise
        answer = client.embeddings.create(model="tiny", input=inputs, user="me", **changes)
        (ids,) = client.embeddings.create(model="tiny", input=[5, 6, 7]).data
    params = PoolingParams(dimensions=changes.get("dimensions"))
    want = computed(pooling.llm.embed(inputs, pooling_params=params))
    assert [one.index for one in answer.data] == [0, 1, 2]
    for one, output in zip(answer.data, want, strict=True):
        np.testing.assert_array_equal(np.float32(one.embedding), output.outputs.embedding)
    count = sum(len(output.prompt_token_ids) for output in want)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (count, count)
    assert (answer.model, len(ids.embedding)) == ("tiny", 48)


def test_scores_and_rankings_are_those_of_the_engine(pooling):
    texts = ["The end", "Once upon", "by one by one"]
    want = [one.outputs.score for one in computed(pooling.llm.score(PROMPTS[0], texts))]
    status, _, scored = pooling.ask("/v1/score", {"text_1": PROMPTS[0], "text_2": texts})
    assert status == 200
    assert [(one["index"], one["score"]) for one in scored["data"]] == list(enumerate(want))
    body = {"model": "tiny", "query": PROMPTS[0], "documents": texts, "top_n": 2}
    status, _, ranked = pooling.ask("/v1/rerank", body)
    assert status == 200
    best = sorted(range(3), key=lambda index: -want[index])[:2]
    found = [(one["index"], one["relevance_score"]) for one in ranked["results"]]
    assert found == [(index, want[index]) for index in best]
    assert ranked["results"][0]["document"] == {"text": texts[best[0]]}
    assert ranked["usage"] == scored["usage"]
    for path in ("/rerank", "/v2/rerank"):
        assert pooling.ask(path, body)[2]["results"] == ranked["results"]
    same = pooling.ask("/score", {"text_1": PROMPTS[0], "text_2": texts})[2]
    assert same["data"] == scored["data"]
    alone = [computed(pooling.llm.embed(text))[0].prompt_token_ids for text in (PROMPTS[0], *texts)]
    num_tokens = 3 * len(alone[0]) + sum(map(len, alone[1:]))
    assert scored["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    _, _, bare = pooling.ask("/v1/rerank", body | {"return_documents": False, "top_n": 0})
    assert [one.keys() for one in bare["results"]] == [{"index", "relevance_score"}] * 3


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("embeddings", {"input": "a", "model": "other"}, "model", "expected 'tiny'"),
        ("embeddings", {"input": ""}, "input", "empty"),
        ("embeddings", {"input": ["a", ""]}, "input", "prompt 1"),
        ("embeddings", {"input": ["a"] * 5}, "input", "at most 4 sequences"),
        ("embeddings", {"input": "long " * 200}, "input", "tokens; expected at most"),
        ("embeddings", {"input": [1, 999]}, "input", "token ids from 0"),
        ("embeddings", {"input": {"a": 1}}, "input", "a list of either"),
        ("embeddings", {"input": "\ud800"}, "input", "Unicode"),
        ("embeddings", {"input": "a", "dimensions": 49}, "dimensions", "at most 48, got 49"),
        ("embeddings", {"input": "a", "dimensions": 0}, "dimensions", "a number >= 1"),
        ("embeddings", {"input": "a", "dimensions": True}, "dimensions", "a whole number"),
        ("embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format", "base64"),
        ("embeddings", {"input": "a", "stream": True}, "stream", "not supported"),
        ("score", {"text_1": "a"}, "text_2", "a text or a list of texts"),
        ("score", {"text_1": ["a", "b"], "text_2": "a"}, "text_1", "one text or 1"),
        ("score", {"text_1": "a", "text_2": ["b", [1]]}, "text_2", "a list of texts"),
        ("score", {"text_1": ["a", ""], "text_2": ["b", "c"]}, "text_1", "an empty one at 1"),
        ("rerank", {"documents": ["a"]}, "query", "expected a text"),
        ("rerank", {"query": "", "documents": ["a"]}, "query", "expected a text, got none"),
        ("rerank", {"query": "a", "documents": ["b", ""]}, "documents", "an empty one at 1"),
        ("rerank", {"query": "a", "documents": []}, "documents", "a list of texts"),
        ("rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", ">= 0"),
        ("completions", {"prompt": "a"}, "model", "makes vectors and scores"),
    ],
)
def test_what_has_no_vector_is_refused_by_its_key(pooling, path, body, param, says):
    refused = error_of(pooling.ask(f"/v1/{path}", body))
    assert refused[:2] == (404 if body.get("model") else 400, param)
    assert says in refused[2]
    assert pooling.server.app.gate.num_in == 0


def test_bodies_that_are_no_objects_have_no_vectors(pooling, server):
    for body in (b"{", b"[1]", b'{"input": NaN}', b'{"input": "\xff"}'):
        assert error_of(pooling.ask("/v1/embeddings", body))[0] == 400
    refused = error_of(server.ask("/v1/embeddings", {"input": "a"}))
    assert refused == (400, "model", "the model makes text, not vectors (jaxkv serve --runner)")


def test_vectors_take_places_until_they_are_made_or_their_client_goes(pooling):
    gate, engine = pooling.server.app.gate, engine_of(pooling.llm)
    engine.step.rest_s = 0.5
    with pooling.connect() as connection:
        body = json.dumps({"input": [[i + 3] * 120 for i in range(3)]}).encode()
        head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_for(lambda: gate.num_in == 3)
        status, headers, _ = pooling.ask("/v1/embeddings", {"input": ["a", "b"]})
        assert status == 429
        assert int(headers["retry-after"]) >= 1
        wait_for(lambda: engine.has_work)
    wait_for(lambda: not gate.num_in)
    wait_for(lambda: is_empty(pooling.llm))
    engine.step.rest_s = 0.0
    metrics = asyncio.run(pooling.llm.get_metrics(""))
    assert any(one.labels == {"finished_reason": "abort"} and one.value for one in metrics)


# --- what is refused


@pytest.mark.parametrize(
    ("path", "changes", "status", "param", "says"),
    [
        ("completions", {"model": "other"}, 404, "model", "expected 'tiny', got 'other'"),
        ("completions", {"prompt": ""}, 400, "prompt", "empty"),
        ("completions", {"prompt": "long " * 200}, 400, "prompt", "tokens; expected at most"),
        ("completions", {"prompt": [1, 999]}, 400, "prompt", "token ids from 0"),
        ("completions", {"prompt": [[1], [999]]}, 400, "prompt", "[999] (prompt 1 of the 2)"),
        ("completions", {"prompt": "\ud800"}, 400, "prompt", "Unicode"),
        ("completions", {"logprobs": 21}, 400, "logprobs", "at most 20, got 21"),
        ("completions", {"n": 2, "temperature": 0}, 400, "n", "expected 1 with greedy"),
        ("completions", {"n": 300}, 400, "n", "at most 256 sequences"),
        ("completions", {"logit_bias": {"999": 1}}, 400, "logit_bias", "token ids"),
        ("completions", {"prompt": ["a"] * 257}, 400, "prompt", "at most 256 sequences"),
        ("completions", {"n": 300}, 400, "n", "--max-concurrent-sequences 300"),
        ("completions", {"prompt": ["a", {"prompt": "b"}]}, 400, "prompt", "a list of either"),
        ("completions", {"prompt": [True]}, 400, "prompt", "a list of either"),
        ("completions", {"temperature": 1e999}, 400, "temperature", "finite"),
        ("completions", {"frobnicate": 1}, 400, "frobnicate", "unknown"),
        ("completions", {"\ud800": 1}, 400, "\ud800", "unknown"),
        ("completions", {"logit_bias": {"9" * 5000: 1}}, 400, "logit_bias", "token ids as keys"),
        ("completions", {"stream": True, "top_p": 2}, 400, "top_p", "in (0, 1], got 2"),
        ("completions", {"stream": True, "prompt": ""}, 400, "prompt", "empty"),
        ("chat/completions", {"messages": []}, 400, "messages", "at least one"),
        ("chat/completions", {"max_completion_tokens": 0}, 400, "max_completion_tokens", ">= 1"),
        ("chat/completions", {"messages": [{"role": "user"}, 7]}, 400, "messages", "objects"),
        ("chat/completions", {"messages": [1, 2]}, 400, "messages", "list of objects"),
        ("chat/completions", {"messages": [{"content": "a"}]}, 400, "messages", "message 0: role"),
        (
            "chat/completions",
            {"messages": [*CHAT, {"role": 5, "content": "a"}], "stream": True},
            400,
            "messages",
            "message 1: role: expected a text",
        ),
        (
            "chat/completions",
            {"chat_template_kwargs": {"tools": 1}},
            400,
            "chat_template_kwargs",
            "",
        ),
        (
            "chat/completions",
            {"chat_template_kwargs": {"chat_template": "x"}},
            400,
            "chat_template_kwargs",
            "expected no chat_template",
        ),
        (
            "chat/completions",
            {"reasoning_effort": "low"},
            400,
            "reasoning_effort",
            "expected what the chat template reads",
        ),
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "20"),
        ("chat/completions", {"tool_choice": "required"}, 400, "tool_choice", "expected tools"),
        (
            "chat/completions",
            {
                "tool_choice": "required",
                "tools": [{"function": {"name": "a", "parameters": {"type": "wrong"}}}],
            },
            400,
            "tools",
            "structured_outputs: ",
        ),
        ("chat/completions", {"tool_choice": "any"}, 400, "tool_choice", '"required" or'),
        ("chat/completions", {"tools": [*TOOLS, 1]}, 400, "tools", "expected objects, got 1"),
        ("chat/completions", {"chat_template": "x"}, 400, "chat_template", "not supported"),
    ],
)
def test_what_is_not_possible_is_refused_by_its_key(server, path, changes, status, param, says):
    content = {"prompt": "The"} if path == "completions" else {"messages": CHAT}
    refused = error_of(server.ask(f"/v1/{path}", {**content, **changes}))
    assert refused[:2] == (status, param)
    assert says in refused[2]


@pytest.mark.parametrize("prompt", ["long " * 200, "x" * 10**5, [3] * MAX_LEN])
def test_a_prompt_that_is_too_long_has_openais_code(server, prompt):
    _, _, body = server.ask("/v1/completions", {"prompt": prompt})
    assert body["error"]["code"] == "context_length_exceeded"
    assert f"maximum context length is {MAX_LEN} tokens" in body["error"]["message"]
    _, _, body = server.ask("/v1/completions", {"prompt": ""})
    assert body["error"]["code"] is None


def test_a_grammar_that_cannot_be_followed_is_refused_by_its_key(server, monkeypatch):
    pytest.importorskip("llguidance")
    from jaxkv.requests.grammar import Grammar

    schema = {"name": "x", "schema": {"type": "nothing"}}
    body = {"messages": CHAT, "response_format": {"type": "json_schema", "json_schema": schema}}
    status, key, message = error_of(server.ask("/v1/chat/completions", body))
    assert (status, key) == (400, "response_format")
    assert "valid grammar" in message
    # Some is too much for the parser only when it has come so far.
    monkeypatch.setattr(Grammar, "accept", lambda self, token: setattr(self, "lost", True))
    error = property(lambda self: "too complex" if hasattr(self, "lost") else "")
    monkeypatch.setattr(Grammar, "error", error)
    body["response_format"] = {"type": "json_object"}
    expected = (400, "response_format", "structured_outputs: too complex")
    assert error_of(server.ask("/v1/chat/completions", body)) == expected


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "expected JSON"),
        (b"{", "expected JSON"),
        (b"[1]", "expected a JSON object"),
        (b'{"prompt": NaN}', "NaN"),
        (b'{"prompt": "a", "prompt": "b"}', "each key once"),
        (b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", "nested"),
        (b'{"prompt": "\xff"}', "body: expected JSON in UTF-8, not compressed, got"),
    ],
)
def test_a_body_that_is_no_object_is_refused(server, body, says):
    status, _, message = error_of(server.ask("/v1/completions", body))
    assert status == 400
    assert says in message


@pytest.mark.parametrize(
    "changes",
    [
        {"x" * 5000: 1},
        {"structured_outputs": {"x" * 5000: 1}},
        {"prompt": ["x" * 100] * 3, "bad_words": ["x" * 5000]},
    ],
)
def test_an_error_does_not_send_back_what_is_long(server, changes):
    status, _, body = server.ask("/v1/completions", {"prompt": "a", **changes})
    assert status == 400
    assert len(json.dumps(body)) < 2500


def test_unknown_paths_methods_and_keys_of_other_routes_get_openais_error(server):
    for path, told in (
        ("/v1/nothing", "GET /v1/nothing: nothing is answered here"),
        ("/models", "GET /models: nothing is answered here; a client's base_url ends with /v1"),
    ):
        assert error_of(server.ask(path)) == (404, None, told)
    assert error_of(server.ask("/health/"))[0] == 404
    assert error_of(server.ask("/v1/models/other"))[:2] == (404, "model")
    refused = error_of(server.ask("/v1/completions"))
    assert refused == (405, None, "GET /v1/completions: expected POST")
    assert error_of(server.ask("/tokenize", {}))[:2] == (400, "prompt")
    long = {"role": "user", "tool_calls": [{"function": {"arguments": "9" * 5000}}]}
    assert error_of(server.ask("/tokenize", {"messages": [long]}))[:2] == (400, "messages")
    assert error_of(server.ask("/tokenize", {"prompt": "a", "tools": []}))[:2] == (400, "prompt")
    assert error_of(server.ask("/detokenize", {"tokens": [-1]}))[:2] == (400, "tokens")
    assert error_of(server.ask("/detokenize", {"tokens": ["a"]}))[:2] == (400, "tokens")
    with server.connect() as connection:
        connection.sendall(b"\x16\x03\x01 what\r\n\r\n")
        assert connection.recv(99).startswith(b"HTTP/1.1 400")


def test_what_fails_unexpectedly_is_answered_counted_and_in_the_log(server, monkeypatch, caplog):
    def fail(*_: object) -> None:
        raise ArithmeticError("secret")

    monkeypatch.setattr(logging.getLogger("uvicorn"), "propagate", True)
    monkeypatch.setattr(type(server.server.app), "_described", fail)
    refused = error_of(server.ask("/v1/models/tiny"))
    assert refused == (500, None, "the request failed: ArithmeticError")
    wait_for(lambda: "ArithmeticError: secret" in caplog.text)
    counted = 'jaxkv:http_requests_total{path="/v1/models/{name}",status="500"} 1'
    assert counted in server.ask("/metrics")[2].splitlines()


def test_a_body_is_held_until_it_has_been_read(server, monkeypatch):
    bodies, held = server.server.app._bodies, []

    def parse(raw: bytes, max_bytes: int) -> dict[str, Any]:
        held.append((len(raw), bodies._num_held))
        return read(raw, max_bytes)

    read = app.parse
    monkeypatch.setattr(app, "parse", parse)
    assert server.ask("/tokenize", {"prompt": "The"})[0] == 200
    assert (held, bodies._num_held) == ([(17, 17)], 0)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_100_megabytes_are_refused_and_not_held(server, is_chunked):
    part, held = b"x" * 2**20, []
    length = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {100 * 2**20}"
    with server.connect() as connection:
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n".encode())
        if not is_chunked:  # what is too long by its own word is not waited for
            refused = error_of(read_answer(connection))
        for _ in range(100):
            connection.sendall(b"%x\r\n%s\r\n" % (len(part), part) if is_chunked else part)
            held.append(server.server.app._bodies._num_held)
        if is_chunked:
            connection.sendall(b"0\r\n\r\n")
            refused = error_of(read_answer(connection))
        assert refused == (413, None, "expected a body of at most 1048576 bytes")
        # The connection goes on.
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_answer(connection)[0] == 200
    assert max(held) <= 2**20 + 2**18
    assert not server.server.app._bodies._num_held


def test_every_route_asks_for_a_key(start, monkeypatch):
    monkeypatch.setenv("JAXKV_API_KEY", "of the environment")
    of_environment, given = start(), start(api_key=["one", "två"])
    paths = ["/health", "/version", "/metrics", "/v1/models", "/v1/nothing"]
    posting = ("/v1/completions", "/v1/chat/completions", "/tokenize", *POOLING)
    bodies = {path: {"prompt": "a"} for path in posting}
    for path in [*paths, *bodies]:
        for headers in ("", "Authorization: Bearer wrong\r\n", "Authorization: Basic one\r\n"):
            answer = given.ask(path, bodies.get(path), headers=headers)
            assert (error_of(answer)[0], answer[1]["www-authenticate"]) == (401, "bearer")
    assert given.ask("/health", headers="Authorization: Bearer one\r\n")[0] == 200
    with of_environment.client("of the environment") as client:
        assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.AuthenticationError), of_environment.client("one") as client:
        client.models.list()


def test_pages_of_allowed_origins_may_ask_and_read_errors(start, server):
    given = start(allowed_origins=["https://chat.example.com"], api_key=["one"])
    own, other = "Origin: https://chat.example.com\r\n", "Origin: https://example.org\r\n"
    asking = "Access-Control-Request-Method: POST\r\n"
    asking += "Access-Control-Request-Headers: authorization\r\n"
    allows = "access-control-allow-origin"
    status, headers, _ = given.ask("/v1/completions", headers=own + asking, method="OPTIONS")
    assert (status, headers[allows]) == (200, "https://chat.example.com")
    assert "authorization" in headers["access-control-allow-headers"]
    status, headers, _ = given.ask("/v1/models", headers=own)
    assert (status, headers[allows]) == (401, "https://chat.example.com")
    assert given.ask("/v1/completions", headers=other + asking, method="OPTIONS")[0] == 400
    assert allows not in given.ask("/v1/models", headers=other)[1]
    assert allows not in server.ask("/health", headers=own)[1]
    with pytest.raises(ValueError, match=r"allowed_origins: expected .* https://example.com"):
        ServeOptions(allowed_origins=['["*"]'])


# --- who asks too much, goes, or is slow


def test_nobody_is_given_no_time_to_send_a_body():
    for seconds in (0, 86401):
        with pytest.raises(ValueError, match=r"send_timeout_s: .* above 0, at most 86400"):
            ServeOptions(send_timeout_s=seconds)
    assert ServeOptions(drain_s=0).drain_s == 0


@pytest.mark.usefixtures("slowly")
def test_who_comes_when_all_places_are_taken_is_told_when_to_come_again(start):
    server = start(max_concurrent_sequences=2)
    with server.client() as client:
        first = client.completions.create(
            model="tiny",
            stream=True,
            n=2,
            temperature=1,
            prompt="The",
            max_tokens=60,
            extra_body={"ignore_eos": True},
        )
        next(first)
        for body in (LONG, b"not looked at"):
            status, headers, error = server.ask("/v1/completions", body)
            assert (status, error["error"]["code"]) == (429, "overloaded")
            assert 1 <= int(headers["retry-after"]) <= 60
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="tiny", prompt="The")
        assert server.ask("/health")[0] == 200
        assert sum(len(chunk.choices) for chunk in first) > 2
    assert error_of(server.ask("/v1/completions", {"prompt": ["a"] * 3}))[:2] == (400, "prompt")
    assert server.ask("/v1/completions", {**LONG, "max_tokens": 1})[0] == 200


def test_the_time_to_come_again_is_how_long_places_are_held():
    gate = Gate(4)
    gate._stays_s.extend([10.0, 30.0])
    with gate.enter(4, "n"):
        for count, seconds in ((1, "5"), (3, "15"), (4, "20")):
            with pytest.raises(Refusal) as caught:
                gate.check(count)
            assert caught.value.headers == {"Retry-After": seconds}
    with pytest.raises(ValueError, match="at once"), gate.enter(4, "n"):
        raise ValueError("refused at once")
    assert len(gate._stays_s) == 3  # what was refused stayed for no time, which says nothing


@pytest.mark.usefixtures("slowly")
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_ends_when_its_client_goes(server, llm, is_stream):
    body = json.dumps({**LONG, "stream": is_stream, "prompt": ["The"] * 3}).encode()
    with server.connect() as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        if is_stream:
            connection.recv(1)
        wait_for(lambda: len(engine_of(llm).scheduler.running) == 3)
    left = time.monotonic()
    wait_for(lambda: is_empty(llm))
    assert time.monotonic() - left < 1.2  # the rest would take 15 steps


def test_nothing_is_counted_for_a_client_that_has_gone(start, llm, monkeypatch):
    server, counted, may_go_on = start(max_concurrent_sequences=1), [], threading.Event()
    count = async_llm.tokens_of

    def noted(intake: Any, prompt: Any, **options: Any) -> list[int]:
        counted.append(prompt["prompt"])
        return count(intake, prompt, **options)

    monkeypatch.setattr(async_llm, "tokens_of", noted)
    llm._tokenizing.submit(may_go_on.wait, PATIENCE_S)
    gate, body = server.server.app.counting, b'{"prompt": "gone"}'
    with server.connect() as connection:
        head = f"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_for(lambda: gate.num_in == 1)
        assert server.ask("/tokenize", {"prompt": "more"})[0] == 429
    wait_for(lambda: not gate.num_in)
    may_go_on.set()
    assert server.ask("/tokenize", {"prompt": "here"})[0] == 200
    assert counted == ["here"]


def test_a_client_that_does_not_read_is_left_and_holds_up_nobody(start, llm):
    server = start(send_timeout_s=1.0)
    body = {"messages": CHAT, "stream": True, "n": 20, "logprobs": True, "top_logprobs": 20}
    sent = json.dumps({**body, "ignore_eos": True}).encode()
    with closing(socket.socket()) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(server.address)
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(sent)}\r\n\r\n"
        )
        connection.sendall(head.encode() + sent)
        wait_for(lambda: server.server.app.gate.num_in == 20)
        assert server.ask("/v1/completions", {**LONG, "max_tokens": 3})[0] == 200
        wait_for(lambda: not server.server.app.gate.num_in)
        wait_for(lambda: is_empty(llm))
        received = b"".join(iter(lambda: connection.recv(2**16), b""))
    assert b"[DONE]" not in received


def test_a_body_that_does_not_come_is_not_waited_for(start):
    server = start(send_timeout_s=0.3)
    with server.connect() as connection:
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        started = time.monotonic()
        assert error_of(read_answer(connection))[0] == 408
        assert time.monotonic() - started < 3


# --- the end


@pytest.mark.usefixtures("slowly")
def test_what_runs_is_finished_when_the_server_ends(start, llm):
    server = start()
    with server.client() as client:
        stream = client.completions.create(
            model="tiny",
            stream=True,
            prompt="The",
            temperature=0,
            max_tokens=60,
            extra_body={"ignore_eos": True},
        )
        first = next(stream).choices[0].text
        server.server.should_exit = True
        wait_for(lambda: not server.socket.fileno() > 0)
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(server.address, 1)
        chunks = [chunk.choices[0] for chunk in stream]
    expected = generated(llm, "The", temperature=0, max_tokens=60, ignore_eos=True).outputs[0]
    assert first + "".join(chunk.text for chunk in chunks) == expected.text
    assert chunks[-1].finish_reason == "length"
    server.thread.join(PATIENCE_S)
    assert not server.thread.is_alive()


@pytest.mark.parametrize("is_urgent", [False, True])
def test_who_is_not_answered_when_the_server_ends_is_told_so(checkpoint, is_urgent, caplog):
    own = AsyncLLM(checkpoint, **OPTIONS)
    engine_of(own).step = Pace(engine_of(own))
    engine_of(own).step.rest_s = 0.2
    server = Running(own, drain_s=60 if is_urgent else 0.1)
    with ThreadPoolExecutor() as pool, server.client() as client:
        whole = pool.submit(server.ask, "/v1/completions", LONG)
        own_key = {"ignore_eos": True}
        stream = client.completions.create(
            model="tiny", prompt="The", stream=True, max_tokens=120, extra_body=own_key
        )
        next(stream)
        wait_for(lambda: server.server.app.gate.num_in == 2)
        server.server.should_exit = True
        server.server.force_exit = is_urgent
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            list(stream)
        assert error_of(whole.result())[0] == 503
        server.thread.join(PATIENCE_S)
    assert (server.thread.is_alive(), server.server.engine_died) == (False, False)
    assert "Traceback" not in caplog.text


def test_a_step_that_does_not_end_is_told_of(server, llm, monkeypatch):
    gate, is_in, step = threading.Event(), threading.Event(), engine_of(llm).step

    def stuck() -> list:
        with engine_of(llm).lock:
            is_in.set()
            gate.wait(PATIENCE_S)
        return step()

    with ExitStack() as stack:
        pool, patch = map(stack.enter_context, (ThreadPoolExecutor(), monkeypatch.context()))
        stack.callback(gate.set)
        patch.setattr(engine_of(llm), "step", stuck)
        asked = pool.submit(server.ask, "/v1/completions", LONG)
        assert is_in.wait(PATIENCE_S)
        assert server.ask("/health")[0] == 200
        assert "jaxkv:num_requests_waiting 1" in server.ask("/metrics")[2].splitlines()
        assert "0 pages in use" in asyncio.run(asyncio.wait_for(llm.describe(), PATIENCE_S))
        patch.setattr(engine_thread, "STUCK_S", -1.0)  # every step is too long
        for path in ("/health", "/ping"):
            status, _, message = error_of(server.ask(path))
            assert status == 503
            assert message.startswith("expected a step of the engine to end within")
        gate.set()
        assert asked.result()[0] == 200
        wait_for(lambda: is_empty(llm))
        assert server.ask("/health")[0] == 200


def test_a_server_ends_with_its_engine(checkpoint):
    mortal = AsyncLLM(checkpoint, **OPTIONS)
    server = Running(mortal)
    assert server.ask("/health")[0] == 200
    mortal.shutdown()
    assert error_of(server.ask("/v1/completions", LONG))[0] == 503
    server.thread.join(PATIENCE_S)
    assert (server.thread.is_alive(), server.server.engine_died) == (False, True)


def test_the_command_says_what_is_wrong_before_it_loads_anything(capsys):
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", "--port", str(port)]) == 2
        assert f"127.0.0.1, port {port}: Address already in use" in capsys.readouterr().err
    assert cli.main(["serve", "--host", "nowhere.invalid"]) == 2
    assert "host: expected an address of this machine, got" in capsys.readouterr().err
    assert cli.main(["serve", "--response-template", "other"]) == 2
    assert "response_template: expected checkpoint, deepseek_r1, gpt" in capsys.readouterr().err
    assert cli.main(["serve", "--port", "-1"]) == 2
    assert "port: expected a number from 0 to 65535, got -1" in capsys.readouterr().err
    assert cli.main(["serve", "--api-key", " "]) == 2
    assert (
        "api_key: expected None or a list of texts, none empty, got list" in capsys.readouterr().err
    )
    assert cli.main(["serve", "a", "--model", "b"]) == 2
    assert "model: expected it once, got 'a' and --model 'b'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--disable-log-requests"], "--disable-log-requests: vLLM's, which sets nothing here"),
        (["--no-enable-log-requests"], "--no-enable-log-requests: vLLM's, not built here"),
        (["--swap-space=4"], "--swap-space: vLLM's, which sets nothing here: leave it out"),
        (["--reasoning-parser", "qwen3"], "not built here (nearest: --response-template)"),
        (["--enable-auto-tool-choice"], "--enable-auto-tool-choice: vLLM's, not built here"),
        (["-pp", "2"], "-pp: vLLM's, not built here"),
        (["-pcp", "2"], "-pcp: vLLM's, not built here (nearest: tensor_parallel_size"),
        (["-ac", "{}"], "-ac: vLLM's, not built here (nearest: backend)"),
        (["--enforce-eager"], "--enforce-eager: vLLM's, not built here (nearest: --lazy-compile)"),
        (["--enable_log_outputs"], "--enable-log-outputs: vLLM's, not built here"),
        (["--max-log-len", "9"], "--max-log-len: vLLM's, not built here"),
        (["-O3"], "-O3: vLLM's, which sets nothing here: leave it out"),
        (["--config", "a.yaml"], "--config: vLLM's, not built here (nearest: the flags"),
        (["--no-deterministic"], "--no-deterministic: an argument of LLM that this command has no"),
        (["--max-model-length", "9"], "unrecognized argument, did you mean --max-model-len?"),
        (["--max-model-len", "1q"], "expected a whole number such as 4096, 4k (4,000) or 4K"),
    ],
)
def test_vllms_flags_that_are_not_here_are_refused_by_name(flags, says, capsys, tmp_path):
    with pytest.raises(SystemExit) as caught:
        cli.main(["serve", str(tmp_path), *flags])  # a model that is none: no server begins
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_flags_that_vllms_command_has_of_the_engine_are_here(capsys, tmp_path):
    flags = ["--no-enable-prefix-caching", "--seed", "1", "--num_gpu_blocks_override=9"]
    assert cli.main(["serve", str(tmp_path), "--port", "0", *flags, "--lazy-compile"]) == 2
    assert f"{tmp_path}/config.json: not found" in capsys.readouterr().err


@pytest.mark.parametrize("flag", [[], ["--model"]])
def test_a_model_may_stand_first_as_in_vllms_command(capsys, tmp_path, flag):
    assert cli.main(["serve", *flag, str(tmp_path), "--port", "0"]) == 2
    assert f"{tmp_path}/config.json: not found" in capsys.readouterr().err


def test_what_the_documentation_shows_works(llm, pooling, capsys):
    if not PAGE.is_file():
        pytest.skip("docs are in the checkout only")
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    with closing(Running(llm, name="demo")) as server:
        names: dict[str, Any] = {}
        for language, text in blocks:
            answering = pooling if "/v1/embeddings" in text else server
            block = text.replace("http://127.0.0.1:8000", answering.url)
            if language == "python":
                exec(compile(block, str(PAGE), "exec"), names)  # noqa: S102
            elif language == "bash" and shutil.which("curl"):
                block = block.replace("curl ", "curl --silent --show-error --fail ")
                shown = subprocess.run(["bash", "-euc", block], capture_output=True, text=True)
                assert (shown.returncode, shown.stderr) == (0, "")
                assert '"total_tokens"' in shown.stdout
                assert ("data: [DONE]" in shown.stdout) == (answering is server)
            elif language == "sh":
                command = shlex.split(block.splitlines()[-1])
                assert cli._parser().parse_args(command[1:]).max_model_len == 4096
        names["client"].close()
    kinds = [language for language, _ in blocks]
    assert kinds == ["sh", "bash", "python", "python", "python", "toml", "bash"]
    shown = f"{names['chunk'].usage.completion_tokens}\n{names['response'].output_text}\n"
    assert capsys.readouterr().out.endswith(shown)


@pytest.mark.slow
def test_sigterm_lets_the_command_finish_what_runs(checkpoint):
    run = "import sys; from jaxkv.api.cli import main; sys.exit(main(sys.argv[1:]))"
    flags = ["--model", str(checkpoint), "--port", "0", "--dtype", "float32", "--drain-s", "20"]
    command = [sys.executable, "-c", run, "serve", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        url = process.stderr.readline().split()[-1]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=5) as client:
            stream = client.completions.create(
                model=str(checkpoint), prompt="The", stream=True, max_tokens=200, temperature=0
            )
            next(stream)
            process.send_signal(signal.SIGTERM)
            assert [chunk.choices[0].finish_reason for chunk in stream][-1] is not None
        assert process.wait(PATIENCE_S) == 0
        assert process.stderr.read() == ""
