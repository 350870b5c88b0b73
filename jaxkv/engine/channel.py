"""Carries messages in order from the first process of an engine to its others."""

from __future__ import annotations

import hmac
import json
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import jax

from jaxkv.errors import EngineDeadError
from jaxkv.processes import from_first, num_processes

LIMIT_S = 60.0
"""The others connect within it: all have come as far when the first one says where it listens."""

KEY_LIMIT_S = 5.0
"""Whoever connects sends the key within it."""

HOST_BYTES, PORT_BYTES, KEY_BYTES, SIZE_BYTES = 256, 4, 32, 8

GONE = "the first process of this engine has ended, or cannot be reached any more"


class Sender:
    """Is the first process's end. `where` (host, port) and `key` are what the others connect with;
    whoever does not know the key is sent away. Nothing is encrypted: the network between hosts that
    share a model is theirs.
    """

    def __init__(self, host: str, num_others: int) -> None:
        self.key = secrets.token_bytes(KEY_BYTES)
        self._num_others = num_others
        self._listening = socket.create_server((host, 0))
        self.where = (host, self._listening.getsockname()[1])
        self._others: list[socket.socket] = []

    def accept(self) -> None:
        """Waits for the others. Raises: TimeoutError."""
        self._listening.settimeout(LIMIT_S)
        with self._listening:
            while len(self._others) < self._num_others:
                one, _ = self._listening.accept()
                if self._knows_key(one):
                    # Each message is small, and waited for.
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    one.settimeout(None)
                    self._others.append(one)
                else:
                    one.close()

    def _knows_key(self, other: socket.socket) -> bool:
        other.settimeout(KEY_LIMIT_S)
        with suppress(EngineDeadError):
            return hmac.compare_digest(_received(other, KEY_BYTES), self.key)
        return False

    def send(self, message: Sequence[Any]) -> None:
        """Sends a message, of what JSON has. Raises: EngineDeadError where another has gone."""
        data = json.dumps(message, separators=(",", ":")).encode()
        frame = len(data).to_bytes(SIZE_BYTES, "little") + data
        try:
            for one in self._others:
                one.sendall(frame)
        except OSError as error:
            raise EngineDeadError(
                "another process of this engine has ended, or cannot be reached any more"
            ) from error

    def close(self) -> None:
        self._listening.close()
        for one in self._others:
            one.close()


class Receiver:
    """Is another process's end."""

    def __init__(self, where: tuple[str, int], key: bytes) -> None:
        try:
            self._first = socket.create_connection(where, timeout=LIMIT_S)
        except OSError as error:
            raise ValueError(
                f"master_addr: expected the address at which other hosts reach the first process, "
                f"got none or one where nothing answers ({where[0]}, port {where[1]}: {error})"
            ) from error
        self._first.sendall(key)
        self._first.settimeout(None)

    def receive(self) -> Any:
        """Waits for the next message. Raises: EngineDeadError where the first process has gone."""
        size = int.from_bytes(_received(self._first, SIZE_BYTES), "little")
        return json.loads(_received(self._first, size))

    def close(self) -> None:
        self._first.close()


def _received(other: socket.socket, num_bytes: int) -> bytes:
    """Waits for so many bytes. Raises: EngineDeadError if no more come."""
    data = bytearray()
    try:
        while len(data) < num_bytes:
            piece = other.recv(min(num_bytes - len(data), 2**20))
            if not piece:
                raise EngineDeadError(GONE)
            data += piece
    except OSError as error:
        raise EngineDeadError(GONE) from error
    return bytes(data)


def _own_address() -> str:
    """Returns the address from which this host reaches others; by its name that may be one that
    only itself can reach.
    """
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect(("192.0.2.1", 9))  # of nobody (RFC 5737): it only looks for a route
        return str(asking.getsockname()[0])
    return socket.gethostbyname(socket.gethostname())


def connect(devices: Sequence[jax.Device], host: str | None) -> Sender | Receiver | None:
    """Returns this process's end of the channel between those of an engine with these devices; None
    if that is one alone. host: the first one's, where the others reach it; None: as it is found.
    """
    count = num_processes(devices)
    if count == 1:
        return None
    size = HOST_BYTES + PORT_BYTES + KEY_BYTES
    if jax.process_index():
        told = from_first(b"", size)
        first = told[:HOST_BYTES].rstrip(b"\0").decode()
        port, key = told[HOST_BYTES:-KEY_BYTES], told[-KEY_BYTES:]
        return Receiver((first, int.from_bytes(port, "little")), key)
    host = host or _own_address()
    sender = Sender(host, count - 1)
    where = host.encode().ljust(HOST_BYTES, b"\0")
    from_first(where + sender.where[1].to_bytes(PORT_BYTES, "little") + sender.key, size)
    sender.accept()
    return sender
