"""Runs a server until it is told to end."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from typing import Any

import uvicorn

from jaxkv.api.async_llm import AsyncLLM
from jaxkv.api.server.app import App
from jaxkv.api.server.options import ServeOptions


class Server(uvicorn.Server):
    """Serves a model at a socket, from `run` until a signal or the end of its engine. `engine_died`
    tells which.
    """

    def __init__(self, llm: AsyncLLM, tokenizer: Any, options: ServeOptions, name: str) -> None:
        self.app = App(llm, tokenizer, options, name=name)
        self.app.on_death = self._on_death
        self.engine_died = False
        config = uvicorn.Config(
            self.app.asgi,
            http="h11",
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=max(1, round(options.drain_s)),
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

    def _on_death(self) -> None:
        self.engine_died = self.should_exit = True


def listen(options: ServeOptions) -> socket.socket:
    """Takes the address, at which nobody is answered before the server runs. Raises: OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
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
