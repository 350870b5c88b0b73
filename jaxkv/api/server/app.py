"""Answers OpenAI's HTTP interface with an `AsyncLLM`: routes, streams and errors."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter as Tally
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from jaxkv.api.async_llm import AsyncLLM
from jaxkv.api.batch_files.sources import MAX_LINE_BYTES, parse
from jaxkv.api.openai_answers import Answer
from jaxkv.api.openai_format import (
    CHAT,
    COMPLETIONS,
    Asked,
    AskedTokens,
    BodyError,
    code_of,
    key_of,
    read_body,
    read_text,
    read_tokens,
)
from jaxkv.api.openai_responses import (
    RESPONSES,
    AskedResponse,
    ResponseAnswer,
    read_response,
)
from jaxkv.api.openai_vectors import ALIASES, POOLING, AskedPooling, read_pooling
from jaxkv.api.response_parts import parser_of
from jaxkv.api.server.adapters import Names
from jaxkv.api.server.limits import (
    AnyJSONResponse,
    Bodies,
    Gate,
    Guard,
    Refusal,
    as_refusal,
    while_connected,
)
from jaxkv.api.server.options import ServeOptions
from jaxkv.config import RequestOutputKind
from jaxkv.engine.metrics import Counter, Gauge, prometheus_text
from jaxkv.errors import Catch, CheckpointError, EngineDeadError
from jaxkv.requests.outputs import CompletionOutput, RequestOutput
from jaxkv.version import VERSION

LOG = logging.getLogger("jaxkv.server")

PREFIX = "jaxkv:"

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
"""vLLM's."""

T = TypeVar("T")


class App:
    """Is what a server knows: its model, its limits and what it has answered.

    `asgi` is the application. `on_death` is called once the engine has ended by itself.
    """

    def __init__(self, llm: AsyncLLM, tokenizer: Any, options: ServeOptions, *, name: str) -> None:
        self.names = Names(llm, options, name)
        self.on_death: Callable[[], None] = lambda: None
        self.gate = Gate(options.max_concurrent_sequences)
        self.counting = Gate(options.max_concurrent_sequences)
        self._llm = llm
        self._tokenizer = tokenizer
        template = options.response_template
        self._parser = None if template is None else parser_of(tokenizer, template)
        self._defaults = llm.get_default_sampling_params()
        self._bodies = Bodies(options.max_body_bytes, options.send_timeout_s)
        self._created = int(time.time())
        self._answered: Tally[tuple[str, int]] = Tally()
        urls = {url: url for url in (COMPLETIONS, CHAT, RESPONSES, *POOLING)} | ALIASES
        routes = [
            Route("/health", self._health),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/version", self._version),
            Route("/metrics", self._metrics),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route(LOAD, self._load_adapter, methods=["POST"]),
            Route(UNLOAD, self._unload_adapter, methods=["POST"]),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            *(Route(path, _Work(self, url), methods=["POST"]) for path, url in urls.items()),
        ]
        guard = Middleware(
            Guard,
            keys=options.keys,
            send_timeout_s=options.send_timeout_s,
            routes=routes,
            answered=self._answered,
        )
        # In front of the guard: a browser asks without a key whether it may ask, and shows a page
        # no error that does not name its origin.
        cors = Middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins or (),
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
        )
        self.asgi = Starlette(
            routes=routes,
            middleware=[cors, guard] if options.allowed_origins else [guard],
            exception_handlers={
                Refusal: self._on_refusal,
                HTTPException: self._on_refusal,
                EngineDeadError: self._on_dead_engine,
            },
        )
        self.asgi.router.redirect_slashes = False

    async def end(self) -> None:
        """Ends the engine, and so every request: each is answered that there is no more."""
        self.on_death = lambda: None  # it has not ended by itself
        await asyncio.to_thread(self._llm.shutdown)

    # --- routes

    async def _health(self, request: Request) -> Response:
        try:
            await self._llm.check_health()
        except TimeoutError as error:
            raise Refusal(503, str(error)) from error
        return AnyJSONResponse({"status": "ok"})

    async def _version(self, request: Request) -> Response:
        return AnyJSONResponse({"version": VERSION})

    async def _metrics(self, request: Request) -> Response:
        answered = [
            Counter(
                PREFIX + "http_requests",
                "Answers of the server.",
                count,
                labels={"path": path, "status": str(status)},
            )
            for (path, status), count in sorted(self._answered.items())
        ]
        admitted = Gauge(
            PREFIX + "num_sequences_admitted", "Sequences that run or wait.", self.gate.num_in
        )
        metrics = [*await self._llm.get_metrics(PREFIX), *answered, admitted]
        return PlainTextResponse(
            prometheus_text(metrics), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def _models(self, request: Request) -> Response:
        return AnyJSONResponse({"object": "list", "data": [*map(self._described, self.names)]})

    async def _model(self, request: Request) -> Response:
        return AnyJSONResponse(self._described(request.path_params["name"]))

    def _described(self, name: str) -> dict[str, Any]:
        """Returns what /v1/models says of a name. Raises: Refusal for one that is not known."""
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "jaxkv",
            "parent": None if self.names.adapter(name) is None else self.names.model,
            "max_model_len": self._llm.max_model_len,
        }

    async def _load_adapter(self, request: Request) -> Response:
        body = await self._read(request, dict)
        with self.gate.enter(1, "lora_name"), _refusing(body):
            name = await self.names.load(body)
        return PlainTextResponse(f"Success: LoRA adapter {name!r} is loaded.")

    async def _unload_adapter(self, request: Request) -> Response:
        body = await self._read(request, dict)
        with _refusing(body):
            name = self.names.unload(body)
        return PlainTextResponse(f"Success: LoRA adapter {name!r} is unloaded.")

    async def _tokenize(self, request: Request) -> Response:
        asked = await self._read(request, read_text)

        def write(tokens: list[int]) -> dict[str, Any]:
            about = {"count": len(tokens), "max_model_len": self._llm.max_model_len}
            names = self._tokenizer.convert_ids_to_tokens
            strings = {"token_strs": names(tokens)} if asked.strings else {}
            return {**about, "tokens": tokens, **strings}

        return await self._of_tokens(request, asked, write)

    async def _detokenize(self, request: Request) -> Response:
        asked = await self._read(request, read_tokens)
        return await self._of_tokens(request, asked, lambda ids: {"prompt": self._decode(ids)})

    async def _of_tokens(
        self, request: Request, asked: AskedTokens, write: Callable[[list[int]], dict[str, Any]]
    ) -> Response:
        """Returns what is to be written of the tokens of a prompt, however long. Raises: Refusal;
        ClientDisconnect, with which nothing is computed any more.
        """
        self.names.adapter(asked.model)

        async def work() -> Response:
            try:
                tokens = await self._llm.tokens_of(
                    asked.prompt, add_special_tokens=asked.add_special_tokens
                )
            except ValueError as error:
                raise Refusal(400, str(error), key=asked.key) from error
            # Not in the event loop's thread: hundreds of thousands take long.
            return await asyncio.to_thread(lambda: AnyJSONResponse(write(tokens)))

        # A gate of their own: who has no place to generate may still count.
        with self.counting.enter(1, asked.key):
            return await while_connected(request.receive, work())

    async def read(self, request: Request, url: str) -> Asked | AskedResponse | AskedPooling:
        """Reads what a request for text, vectors or scores asks for. Raises: Refusal, also where
        this model cannot do it.
        """

        def reader(body: dict[str, Any]) -> Asked | AskedResponse | AskedPooling:
            if url in POOLING:
                return read_pooling(url, body)
            if url == RESPONSES:
                return read_response(body, self._defaults, parser=self._parser)
            return read_body(url, body, self._defaults, parser=self._parser)

        asked = await self._read(request, reader)
        self.names.adapter(asked.model)
        if self._llm.pools is not isinstance(asked, AskedPooling):
            makes = "vectors and scores, not text" if self._llm.pools else "text, not vectors"
            raise Refusal(400, f"the model makes {makes} (jaxkv serve --runner)", key="model")
        return asked

    async def _read(self, request: Request, reader: Callable[[dict[str, Any]], T]) -> T:
        """Returns what a reader of bodies makes of a request's. Raises: Refusal."""

        def read() -> T:
            return reader(parse(raw, MAX_LINE_BYTES))

        async with self._bodies.read(request) as raw:
            try:
                # Not in the event loop's thread: a large one takes long.
                return await asyncio.to_thread(read)
            except BodyError as error:
                raise Refusal(400, str(error), key=error.key) from error
            except ValueError as error:
                raise Refusal(400, f"body: {error}") from error

    # --- pooling

    async def pool(self, asked: AskedPooling) -> Response:
        """Returns the answer to a request for vectors or scores. Raises: Refusal."""
        with self.gate.enter(asked.num_sequences, asked.of_inputs):
            lora = self.names.adapter(asked.model)
            with _refusing(asked.keys, asked.of_inputs):
                write = await asked.answer(self._llm, self.names.shown(asked.model), lora)
        # Not in the event loop's thread: millions of numbers take long.
        return await asyncio.to_thread(lambda: AnyJSONResponse(write()))

    # --- generating

    async def outputs(self, asked: Asked) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Yields (number of the input, its newest output) until each has ended, and holds
        their places as long. Raises: Refusal.
        """
        of_inputs = next(key for key in ("prompt", "messages", "input") if key in asked.keys)
        with self.gate.enter(asked.num_sequences, "n" if asked.params.n > 1 else of_inputs):
            lora = self.names.adapter(asked.model)
            # An output of all tokens so far is made for each step that somebody reads.
            kind = asked.params.output_kind if asked.stream else RequestOutputKind.FINAL_ONLY
            params = replace(asked.params, output_kind=kind)
            with _refusing(asked.keys, of_inputs):
                generate = partial(self._llm.generate, lora_request=lora)
                streams = [generate(one, params) for one in asked.inputs]
                async with aclosing(_merged(streams)) as outputs:
                    async for number, output in outputs:
                        for one in output.outputs:
                            _check_whole(one)
                        yield number, output

    async def complete(self, asked: Asked | AskedResponse) -> Response:
        """Returns the answer to a request for text that is not streamed. Raises: Refusal."""
        last: dict[int, RequestOutput] = {}
        chat = asked.chat if isinstance(asked, AskedResponse) else asked
        async with aclosing(self.outputs(chat)) as outputs:
            async for number, output in outputs:
                last[number] = output
        answer: Answer | ResponseAnswer = self._answer(chat)
        if isinstance(asked, AskedResponse):
            answer = ResponseAnswer(asked, self._answer(chat))
        write = partial(answer.whole, [last[number] for number in range(len(last))])
        # Not in the event loop's thread: log-probabilities of long prompts take long.
        return await asyncio.to_thread(lambda: AnyJSONResponse(write()))

    async def events(self, asked: Asked) -> AsyncGenerator[bytes]:
        """Yields the chunks of a streamed answer. Raises: Refusal."""
        answer = self._answer(asked)

        def written(number: int, output: RequestOutput) -> list[bytes]:
            return [_event(json.dumps(chunk)) for chunk in answer.chunks(number, output)]

        async with aclosing(self.outputs(asked)) as outputs:
            async for one in outputs:
                if asked.echo and asked.top is not None:
                    # Not in the event loop's thread, as in `complete`.
                    chunks = await asyncio.to_thread(written, *one)
                else:
                    chunks = written(*one)
                for chunk in chunks:
                    yield chunk
        if asked.include_usage:
            yield _event(json.dumps(answer.usage_chunk()))
        yield _event("[DONE]")

    async def response_events(self, asked: AskedResponse) -> AsyncGenerator[bytes]:
        """Yields the events of a streamed response. Raises: Refusal."""
        answer = ResponseAnswer(asked, self._answer(asked.chat))
        begins = answer.begin()
        async with aclosing(self.outputs(asked.chat)) as outputs:
            async for _, output in outputs:
                for event in chain(begins, answer.events(output)):
                    yield _event(json.dumps(event), event["type"])
                begins = []

    def _answer(self, asked: Asked) -> Answer:
        model = self.names.shown(asked.model)
        return Answer(asked=asked, model=model, decode=self._decode, parser=self._parser)

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    # --- what is refused

    async def _on_refusal(self, request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == 404:
            path = request.scope["path"]
            hint = "" if path.startswith("/v1/") else "; a client's base_url ends with /v1"
            error = Refusal(404, f"{request.method} {path:.200}: nothing is answered here{hint}")
        if isinstance(error, HTTPException) and error.status_code == 405:
            asked, headers = (
                f"{request.method} {request.scope['path']:.200}",
                dict(error.headers or {}),
            )
            message = f"{asked}: expected {headers.get('Allow', 'another method')}"
            error = Refusal(405, message, headers=headers)
        return as_refusal(error).response()

    async def _on_dead_engine(self, request: Request, error: Exception) -> Response:
        self.on_death()
        return as_refusal(error).response()


@contextmanager
def _refusing(keys: Collection[str], other: str | None = None) -> Iterator[None]:
    """Raises Refusal for a ValueError, with the one of these keys that it names, or else `other`.
    An adapter that cannot be read is no fault of the client, who does not hear where it is.
    """
    try:
        yield
    except CheckpointError as error:
        LOG.error("an adapter cannot be read: %s", error)
        raise Refusal(500, "model: its adapter cannot be read", key="model") from error
    except ValueError as error:
        key = key_of(error, keys) or other
        raise Refusal(400, str(error), key=key, code=code_of(error)) from error


def _check_whole(output: CompletionOutput) -> None:
    """Raises: Refusal for one that the end of the engine has ended, ValueError where its grammar
    has.
    """
    if output.finish_reason == "abort":
        if output.stop_reason is not None:
            raise ValueError(f"structured_outputs: {output.stop_reason}")
        raise Refusal(503, "the server is shutting down")


@dataclass(frozen=True, eq=False)
class _Work:
    """Is the application behind a route that generates text, or makes vectors or scores."""

    app: App
    url: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        app.gate.check()
        asked = await app.read(Request(scope, receive), self.url)
        if isinstance(asked, AskedResponse) and asked.chat.stream:
            await while_connected(receive, self._stream(app.response_events(asked), send))
        elif isinstance(asked, Asked) and asked.stream:
            await while_connected(receive, self._stream(app.events(asked), send))
        else:
            work = app.pool(asked) if isinstance(asked, AskedPooling) else app.complete(asked)
            answer = await while_connected(receive, work)
            await answer(scope, receive, send)

    async def _stream(self, events: AsyncGenerator[bytes], send: Send) -> None:
        """Sends the events. What fails before the first one is raised, what fails later is an
        event.
        """
        async with aclosing(events):
            first = await anext(events)
            headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
            headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            with Catch() as caught:
                await _send_event(send, first)
                async for event in events:
                    await _send_event(send, event)
        if isinstance(caught.error, ClientDisconnect):
            raise caught.error
        if caught.error is not None:
            LOG.error("a stream failed: %r", caught.error)
            if isinstance(caught.error, EngineDeadError):
                self.app.on_death()
            body = as_refusal(caught.error).body
            if self.url == RESPONSES:
                error = json.dumps({**body["error"], "type": "error", **body})
                await _send_event(send, _event(error, "error"))
            else:
                await _send_event(send, _event(json.dumps(body)))
        await send({"type": "http.response.body", "body": b""})


def _event(data: str, name: str = "") -> bytes:
    """Returns an event of a stream, of which responses have the name too."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {data}\n\n".encode()


async def _send_event(send: Send, event: bytes) -> None:
    await send({"type": "http.response.body", "body": event, "more_body": True})


async def _merged(
    streams: Sequence[AsyncGenerator[RequestOutput]],
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """Yields (number of the stream, output), whichever comes first, until each has ended. Raises:
    what one of them raises, with its number where that is about its prompt.
    """
    waiting = {_next(stream): number for number, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = waiting.pop(task)
                try:
                    output = task.result()
                except ValueError as error:
                    if len(streams) == 1 or isinstance(error, CheckpointError):
                        raise
                    raise ValueError(f"{error} (prompt {number} of the {len(streams)})") from error
                if not output.finished:
                    waiting[_next(streams[number])] = number
                yield number, output
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


def _next(stream: AsyncGenerator[RequestOutput]) -> asyncio.Task[RequestOutput]:
    async def get() -> RequestOutput:
        return await anext(stream)

    return asyncio.ensure_future(get())
