"""Decides whom a server answers, and how much of its time and memory a request may take."""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from hashlib import sha256
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxkv.errors import Catch, EngineDeadError

T = TypeVar("T")

BODIES = 8
"""Bodies of the largest size that are held at once while requests come in."""

MAX_RETRY_S = 60
"""The longest wait that a refused client is told."""

MAX_MESSAGE_CHARS = 2000
"""A client is told so much of an error, which may quote what the client has sent."""

_KINDS = {401: "authentication_error", 429: "rate_limit_error"}


class AnyJSONResponse(JSONResponse):
    """Is JSON in which texts may have halves of surrogate pairs: what a client or a model has
    written is not always Unicode.
    """

    def render(self, content: Any) -> bytes:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode(errors="backslashreplace")  # \ud800, as JSON has it too


class Refusal(Exception):
    """A request is answered with an error. `key`: of its body, at fault; `headers`: of the
    answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        key: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.key, self.code, self.headers = status, key, code, headers

    @property
    def body(self) -> dict[str, Any]:
        """Returns OpenAI's error object, with the beginning of a very long message."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        about = {
            "message": str(self)[:MAX_MESSAGE_CHARS],
            "type": _KINDS.get(self.status, kind),
            "param": self.key,
            "code": self.code,
        }
        return {"error": about}

    def response(self) -> Response:
        return AnyJSONResponse(self.body, self.status, self.headers)


def as_refusal(error: Exception) -> Refusal:
    """Returns what a client is told of an error: of one in here, its kind only."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, HTTPException):
        return Refusal(error.status_code, error.detail, headers=dict(error.headers or {}))
    if isinstance(error, EngineDeadError):
        return Refusal(503, "the engine has ended")
    return Refusal(500, f"the request failed: {type(error).__name__}")


class Gate:
    """Counts the sequences that run or wait, and lets no more in than `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_in = 0
        self._stays_s: deque[float] = deque(maxlen=64)

    @contextmanager
    def enter(self, count: int, key: str) -> Iterator[None]:
        """Holds places for so many, which `key` of the body asks for. Raises: Refusal."""
        if count > self.limit:
            raise Refusal(
                400,
                f"{key}: expected at most {self.limit} sequences (prompts times n) in a request, "
                f"got {count}: send fewer, or start jaxkv serve with --max-concurrent-sequences "
                f"{count}",
                key=key,
            )
        self.check(count)
        self.num_in += count
        started = time.monotonic()
        try:
            yield
            # Not of those that were refused, or whose client has gone: they say nothing of others.
            self._stays_s.append(time.monotonic() - started)
        finally:
            self.num_in -= count

    def check(self, count: int = 1) -> None:
        """Raises Refusal unless so many places are free."""
        if self.num_in + count > self.limit:
            raise Refusal(
                429,
                f"the server is busy: {self.num_in} of {self.limit} sequences are under way",
                code="overloaded",
                headers={"Retry-After": str(self._retry_s(count))},
            )

    def _retry_s(self, count: int) -> int:
        """Estimates when so many places will be free, by how long the last requests stayed."""
        stay_s = sum(self._stays_s) / max(1, len(self._stays_s))
        return min(MAX_RETRY_S, max(1, math.ceil(stay_s * count / self.num_in)))


class Bodies:
    """Reads the bodies of requests, each and all together within a limit of bytes, each within a
    time.
    """

    def __init__(self, max_bytes: int, time_s: float) -> None:
        self._max_bytes = max_bytes
        self._time_s = time_s
        self._num_held = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """Gives the body, and counts it as held until the block ends. Raises: Refusal for one that
        is too large or slow; ClientDisconnect.
        """
        declared = request.headers.get("content-length", "0")
        self._check(int(declared) if declared.isdecimal() else 0)
        parts: list[bytes] = []
        num_bytes = 0
        try:
            try:
                async with asyncio.timeout(self._time_s):
                    async for part in request.stream():
                        parts.append(part)
                        num_bytes += len(part)
                        self._num_held += len(part)
                        self._check(num_bytes)
            except TimeoutError as error:
                raise Refusal(408, f"expected the body within {self._time_s:g} s") from error
            yield b"".join(parts)
        finally:
            self._num_held -= num_bytes

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise Refusal(
                413, f"expected a body of at most {self._max_bytes} bytes", code="body_too_large"
            )
        if self._num_held > BODIES * self._max_bytes:
            raise Refusal(
                429,
                "the server is busy with the bodies of other requests",
                code="overloaded",
                headers={"Retry-After": "1"},
            )


class Guard:
    """Lets those in who know a key, ends what is sent to a client that does not read, answers for
    what fails, and counts answers by path and status in `answered`.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Sequence[str],
        send_timeout_s: float,
        routes: Sequence[Route],
        answered: Counter[tuple[str, int]],
    ) -> None:
        self._app = app
        self._digests = [sha256(key.encode()).digest() for key in keys]
        self._send_timeout_s = send_timeout_s
        self._routes = routes
        self._answered = answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        has_begun = False

        async def send_in_time(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                self._answered[self._path(scope), message["status"]] += 1
            try:
                async with asyncio.timeout(self._send_timeout_s):
                    await send(message)
            except TimeoutError as error:
                raise ClientDisconnect from error

        with Catch() as caught:
            if not self._knows_key(Request(scope)):
                raise Refusal(
                    401,
                    "expected a valid key in the header Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            await self._app(scope, receive, send_in_time)
        error = caught.error
        if error is None or isinstance(error, ClientDisconnect):
            return
        if not has_begun:
            await as_refusal(error).response()(scope, receive, send_in_time)
        if not isinstance(error, Refusal):
            raise error  # for the log

    def _path(self, scope: Scope) -> str:
        """Returns the path that a request is counted by: that of its route, or "other"."""
        routes = (route for route in self._routes if route.matches(scope)[0] is not Match.NONE)
        route = next(routes, None)
        return "other" if route is None else route.path_format

    def _knows_key(self, request: Request) -> bool:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # Headers come as latin-1. All keys are compared, each in the same time whatever was given.
        digest = sha256(given.strip().encode("latin-1")).digest()
        known = [hmac.compare_digest(digest, one) for one in self._digests]
        return not known or (any(known) and scheme.lower() == "bearer")


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Returns what the work does, and ends it when the client goes. Raises: ClientDisconnect."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _gone(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
