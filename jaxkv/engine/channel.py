"""Carries messages in order from the first process of an engine to its others."""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from selectors import EVENT_READ, DefaultSelector
from typing import Any

import jax

from jaxkv.errors import EngineDeadError
from jaxkv.processes import from_first, num_processes

LIMIT_S = 60.0
"""The others connect within it: all have come as far when the first one says where it listens."""

MAX_STRANGERS = 64
"""So many may be connected who have not sent the key yet: for one more the first of them goes."""

KEEP_ALIVE_S = 60

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
        # At every address: that by which others reach this host may be none of its own, or stand
        # for another one here, as the host's own name often does.
        self._listening = (
            socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
            if socket.has_dualstack_ipv6()
            else socket.create_server(("", 0))
        )
        self.where = (host, self._listening.getsockname()[1])
        self._others: list[socket.socket] = []

    def accept(self) -> None:
        """Waits for the others, whoever else connects. Raises: TimeoutError."""
        until = time.monotonic() + LIMIT_S
        with self._listening, closing(_Strangers(self._listening, self.key)) as strangers:
            while num_missing := self._num_others - len(self._others):
                if (left_s := until - time.monotonic()) < 0:
                    raise TimeoutError(
                        f"expected {self._num_others} other processes of this engine to connect "
                        f"within {LIMIT_S:.0f} s, {num_missing} of them did not"
                    )
                for one in strangers.known(left_s):
                    one.setblocking(True)
                    # Each message is small, and waited for.
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    # Some networks forget connections on which nothing comes for 10 minutes.
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    if hasattr(socket, "TCP_KEEPIDLE"):
                        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE_S)
                    self._others.append(one)

    def send(self, message: bytes) -> None:
        """Sends what `written` makes. Raises: EngineDeadError where another process has gone."""
        try:
            for one in self._others:
                one.sendall(message)
        except OSError as error:
            raise EngineDeadError(
                "another process of this engine has ended, or cannot be reached any more"
            ) from error

    def close(self) -> None:
        self._listening.close()
        for one in self._others:
            one.close()


class _Strangers:
    """Has those who connect and have not sent the key yet. Waits for none of them: one that is
    silent holds up nobody.
    """

    def __init__(self, listening: socket.socket, key: bytes) -> None:
        self._listening, self._key = listening, key
        self._said: dict[socket.socket, bytes] = {}
        self._events = DefaultSelector()
        listening.setblocking(False)
        self._events.register(listening, EVENT_READ, listening)

    def known(self, within_s: float) -> list[socket.socket]:
        """Waits for something to come, and returns those who have sent the key with it."""
        found = []
        for one in [event.data for event, _ in self._events.select(within_s)]:
            if one is self._listening:
                self._meet()
            elif one in self._said and self._knows_key(one):
                found.append(one)
        return found

    def _meet(self) -> None:
        with suppress(OSError):  # it has gone again
            one, _ = self._listening.accept()
            one.setblocking(False)
            self._events.register(one, EVENT_READ, one)
            self._said[one] = b""
            if len(self._said) > MAX_STRANGERS:
                self._forget(next(iter(self._said))).close()

    def _knows_key(self, one: socket.socket) -> bool:
        """Reads on; sends it away if it has said something else."""
        piece = b""
        with suppress(OSError):
            piece = one.recv(KEY_BYTES - len(self._said[one]))
        self._said[one] += piece
        if piece and len(self._said[one]) < KEY_BYTES:
            return False
        is_known = hmac.compare_digest(self._said[one], self._key)
        self._forget(one)
        if not is_known:
            one.close()
        return is_known

    def _forget(self, one: socket.socket) -> socket.socket:
        self._events.unregister(one)
        del self._said[one]
        return one

    def close(self) -> None:
        for one in list(self._said):
            self._forget(one).close()
        self._events.close()


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
        """Ends it, for a thread too that waits for a message."""
        with suppress(OSError):
            self._first.shutdown(socket.SHUT_RDWR)
        self._first.close()


def written(message: Sequence[Any]) -> bytes:
    """Returns a message, of what JSON has, as it is sent."""
    data = json.dumps(message, separators=(",", ":")).encode()
    return len(data).to_bytes(SIZE_BYTES, "little") + data


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
