"""Runs a server until it is told to end."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
import sys
from typing import Any

import uvicorn

from jaxkv.api.async_llm import AsyncLLM
from jaxkv.api.server.app import App
from jaxkv.api.server.options import ServeOptions

TELLING_S = 5
"""Seconds in which requests that have not ended in time are told so."""


class Server(uvicorn.Server):
    """Serves a model at a socket, from `run` until a signal or the end of its engine. `engine_died`
    tells which.
    """

    def __init__(self, llm: AsyncLLM, tokenizer: Any, options: ServeOptions, name: str) -> None:
        self.app = App(llm, tokenizer, options, name=name)
        self.app.on_death = self._on_death
        self.engine_died = False
        self._drain_s = options.drain_s
        config = uvicorn.Config(
            self.app.asgi,
            http="h11",
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=math.ceil(options.drain_s) + TELLING_S,
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to listen, and says where."""
        await super().startup(sockets)
        for at in sockets or ():
            print(
                f"jaxkv: serving {self.app.names.model} at {url_of(at)}",
                file=sys.stderr,
                flush=True,
            )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answers what is under way, with an error what has not ended in `drain_s` or by a second
        Ctrl-C: uvicorn would cut it off.
        """
        ending = asyncio.create_task(self._end_late())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
        if left := {*self.server_state.tasks}:
            await self.app.end()
            await asyncio.wait(left, timeout=TELLING_S)

    async def _end_late(self) -> None:
        await asyncio.sleep(self._drain_s)
        await self.app.end()

    def _on_death(self) -> None:
        self.engine_died = self.should_exit = True


def listen(options: ServeOptions) -> socket.socket:
    """Takes the address, at which nobody is answered before the server runs. Raises: OSError."""
    asked = options.host, options.port
    try:
        found = socket.getaddrinfo(*asked, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise OSError(
            f"host: expected an address of this machine, got {options.host!r}: {error.strerror}"
        ) from error
    family, kind, protocol, _, address = found[0]
    taken = socket.socket(family, kind, protocol)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
    except OSError as error:
        taken.close()
        raise OSError(f"{options.host}, port {options.port}: {error.strerror}") from error
    return taken


def serve(llm: AsyncLLM, at: socket.socket, options: ServeOptions, name: str) -> int:
    """Serves the model under this name until SIGTERM or Ctrl-C, after which the requests under way
    have `drain_s` to end in; then ends the engine. Returns the exit status: 1 if the engine has
    died.
    """
    try:
        server = Server(llm, asyncio.run(llm.get_tokenizer()), options, name)
        asyncio.run(server.app.names.read())
        # uvicorn raises the signal once more when it has ended.
        on_term = signal.signal(signal.SIGTERM, lambda *_: None)
        try:
            server.run(sockets=[at])
        finally:
            signal.signal(signal.SIGTERM, on_term)
        return int(server.engine_died)
    finally:
        llm.shutdown()


def url_of(at: socket.socket) -> str:
    """Returns the address of a server that listens there."""
    host, port = at.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
