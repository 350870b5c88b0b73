"""Overloads a server on loopback: four times what it can do, with clients that go, do not read or
send nonsense.

    python scripts/bench_serve.py --seconds 60

Starts `jaxkv serve` with the built-in demo model in a process of its own. As many clients as it has
rows, each with one request after the other, show what it can do; then requests come at random
moments, --overload times as often, whether or not those before were answered. Half of them are
streams. Of a hundred, five go before their answer has ended, one reads nothing of it, two send no
JSON, two ask for another model.

Every request must be answered with a status that it has earned, those that were let in within
--max-p99-s (99 of 100), and at the end the server must have no request and no page in use, be at
most --max-growth-mib larger than after the first quarter, and end by SIGTERM with status 0. Exit
status 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_generate import environment

WARM_UP = 0.25
KINDS = {"whole": 45, "stream": 45, "gone": 5, "unread": 1, "no json": 2, "other model": 2}
STATUS = {"no json": {400, 429}, "other model": {404, 429}}
"""Statuses that a kind may get; the others 200 or 429."""

TIMEOUT_S = 120.0
SEND_TIMEOUT_S = 5.0


@dataclass
class Tally:
    """Counts what clients saw; times in seconds."""

    statuses: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    whole_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    num_tokens: int = 0


class Clients:
    """Sends requests to a server and notes what comes back."""

    def __init__(self, port: int, seed: int) -> None:
        self.port = port
        self.rng = random.Random(seed)
        self.tally = Tally()

    async def ask(self, kind: str) -> None:
        """Sends one request of a kind."""
        started = time.monotonic()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                status, body, first_s = await self._exchange(kind)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            self.tally.wrong[f"{kind}: {type(error).__name__}"] += 1
            return
        took_s = time.monotonic() - started
        self.tally.statuses[f"{kind}: {status}"] += 1
        if status not in STATUS.get(kind, {200, 429}):
            self.tally.wrong[f"{kind}: {status}"] += 1
        elif status == 429:
            self.tally.refused_s.append(took_s)
        elif kind in ("whole", "stream"):
            self._check(kind, body)
            self.tally.whole_s.append(took_s)
            if kind == "stream":
                self.tally.first_s.append(first_s - started)

    def _check(self, kind: str, body: bytes) -> None:
        try:
            if kind == "stream":
                *events, done = body.decode().removesuffix("\n\n").split("\n\n")
                usage = json.loads(events[-1].removeprefix("data: "))["usage"]
                if done != "data: [DONE]":
                    raise ValueError(done)
            else:
                usage = json.loads(body)["usage"]
            self.tally.num_tokens += usage["completion_tokens"]
        except (ValueError, KeyError, TypeError) as error:
            self.tally.wrong[f"{kind}: {error!r:.60}"] += 1

    def _body(self, kind: str) -> bytes:
        if kind == "no json":
            return b'{"prompt": '
        words = ["def", "return", "import os", "class", "self.x", "for i in", "if not", "a, b"]
        body = {
            "prompt": " ".join(self.rng.choices(words, k=self.rng.randint(1, 40))),
            "max_tokens": self.rng.randint(1, 64),
            "n": self.rng.choice((1, 1, 1, 2)),
            "ignore_eos": True,
        }
        if kind in ("stream", "gone", "unread"):
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if kind == "unread":
            body |= {"logprobs": 20, "n": 4, "max_tokens": 100}
        return json.dumps(body | ({"model": "none"} if kind == "other model" else {})).encode()

    async def _exchange(self, kind: str) -> tuple[int, bytes, float]:
        """Returns status, body and when the body began."""
        body = self._body(kind)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**12)
        try:
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            status = int((await reader.readuntil(b"\r\n")).split()[1])
            headers = (await reader.readuntil(b"\r\n\r\n")).lower()
            first_s = time.monotonic()
            if kind == "unread" and status == 200:
                await asyncio.sleep(2 * SEND_TIMEOUT_S)
            if kind in ("gone", "unread") and status == 200:
                return status, b"", first_s
            answer = bytearray()
            if b"transfer-encoding: chunked" in headers:
                while num_bytes := int(await reader.readuntil(b"\r\n"), 16):
                    answer += (await reader.readexactly(num_bytes + 2))[:-2]
            else:
                answer += await reader.read(-1)
            return status, bytes(answer), first_s
        finally:
            writer.transport.abort()

    async def at_capacity(self, num_clients: int, seconds: float) -> float:
        """Asks with so many clients for so long. Returns the requests answered per second."""
        end = time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < end:
                await self.ask(self.rng.choice(("whole", "stream")))

        started = time.monotonic()
        await asyncio.gather(*(client() for _ in range(num_clients)))
        return len(self.tally.whole_s) / (time.monotonic() - started)

    async def overload(self, rate: float, seconds: float) -> int:
        """Sends so many requests per second at random moments. Returns how many there were."""
        asked = set()
        started = now = time.monotonic()
        while now - started < seconds:
            kind = self.rng.choices(list(KINDS), list(KINDS.values()))[0]
            asked.add(asyncio.ensure_future(self.ask(kind)))
            now += self.rng.expovariate(rate)
            await asyncio.sleep(max(0.0, now - time.monotonic()))
        await asyncio.gather(*asked)
        return len(asked)


class Server:
    """A `jaxkv serve` in a process of its own."""

    def __init__(self, *, rows: int, places: int) -> None:
        run = "import sys; from jaxkv.api.cli import main; sys.exit(main(sys.argv[1:]))"
        flags = ["--max-num-seqs", rows, "--max-model-len", 256, "--max-num-batched-tokens", 256]
        flags += ["--max-concurrent-sequences", places, "--send-timeout-s", SEND_TIMEOUT_S]
        command = [sys.executable, "-c", run, "serve", "--port", "0", *map(str, flags)]
        stderr, name = tempfile.mkstemp()
        self._said = Path(name)
        self.process = subprocess.Popen(command, stderr=stderr)
        os.close(stderr)
        while not (started := re.search(r" at http://.*:(\d+)\n", self.said())):
            if self.process.poll() is not None:
                sys.exit(f"the server did not start: {self.said()}")
            time.sleep(0.1)
        self.port = int(started[1])

    def said(self) -> str:
        """Returns its standard error so far."""
        return self._said.read_text()

    def mib(self) -> float:
        """Returns the resident memory."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024

    async def metrics(self) -> dict[str, float]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        text = (await reader.read(-1)).decode().partition("\r\n\r\n")[2]
        writer.close()
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def end(self) -> list[str]:
        """Ends it by SIGTERM. Returns what was wrong with it."""
        self.process.send_signal(signal.SIGTERM)
        status, said = self.process.wait(60), self.said()
        bad = [f"the server ended with status {status}"] if status else []
        return bad + ([f"the server failed: {said[-1000:]}"] if "Traceback" in said else [])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._said.unlink()


def percentiles(name: str, times_s: list[float]) -> dict[str, float]:
    if len(times_s) < 2:
        return {}
    cuts = statistics.quantiles(times_s, n=100, method="inclusive")
    return {f"{name} p50 s": cuts[49], f"{name} p99 s": cuts[98]}


async def bench(options: argparse.Namespace, server: Server) -> tuple[dict[str, Any], list[str]]:
    """Returns the figures, and a line for each thing that is not as it must be."""
    trial = Clients(server.port, options.seed)
    # The first requests find programs that are still being compiled.
    await trial.at_capacity(options.rows, options.trial_seconds)
    trial.tally = Tally()
    rate = await trial.at_capacity(options.rows, options.trial_seconds)
    clients = Clients(server.port, options.seed + 1)
    sizes: list[tuple[float, float]] = []

    async def watch() -> None:
        started = time.monotonic()
        while True:
            sizes.append((time.monotonic() - started, server.mib()))
            await asyncio.sleep(0.5)

    watching = asyncio.ensure_future(watch())
    started = time.monotonic()
    num_asked = await clients.overload(options.overload * rate, options.seconds)
    took_s = time.monotonic() - started
    watching.cancel()
    end = time.monotonic() + 3 * SEND_TIMEOUT_S
    metrics = await server.metrics()
    while metrics["jaxkv:num_sequences_admitted"] and time.monotonic() < end:
        await asyncio.sleep(0.2)
        metrics = await server.metrics()
    tally = clients.tally
    warm_mib = next(mib for passed_s, mib in sizes if passed_s >= WARM_UP * options.seconds)
    growth_mib = max(mib for _, mib in sizes) - warm_mib
    figures = {
        "answered per s at capacity": rate,
        "asked per s": num_asked / options.seconds,
        "asked": num_asked,
        **dict(sorted(tally.statuses.items())),
        "output tokens per s": tally.num_tokens / took_s,
        **percentiles("accepted", tally.whole_s),
        **percentiles("first token", tally.first_s),
        **percentiles("refused", tally.refused_s),
        "resident MiB after warm-up": warm_mib,
        "largest growth in MiB since": growth_mib,
        "part of pages in use": metrics["jaxkv:kv_cache_usage_perc"],
        "requests left": metrics["jaxkv:num_requests_running"]
        + metrics["jaxkv:num_requests_waiting"]
        + metrics["jaxkv:num_sequences_admitted"],
    }
    bad = [f"{name}: {count} times" for name, count in tally.wrong.items()]
    most = {"part of pages in use": 0, "requests left": 0, "accepted p99 s": options.max_p99_s}
    most["largest growth in MiB since"] = options.max_growth_mib
    bad += [
        f"{name}: {figures.get(name)}, at most {limit}"
        for name, limit in most.items()
        if figures.get(name, limit + 1) > limit
    ]
    if sum(tally.statuses.values()) + sum(tally.wrong.values()) < num_asked:
        bad.append("some requests have no answer")
    return figures, bad


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--trial-seconds", type=float, default=10)
    parser.add_argument("--overload", type=float, default=4)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--places", type=int, default=32, help="sequences that run or wait")
    parser.add_argument("--max-p99-s", type=float, default=20)
    parser.add_argument("--max-growth-mib", type=float, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write everything that was counted")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    server = Server(rows=options.rows, places=options.places)
    try:
        figures, bad = asyncio.run(bench(options, server))
        bad += server.end()
    finally:
        server.close()
    for name, value in figures.items():
        print(f"{name:30s}{value:12.3f}" if isinstance(value, float) else f"{name:30s}{value:8d}")
    if options.json:
        result = environment() | {"command": " ".join(sys.argv), "figures": figures, "bad": bad}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print("; ".join(bad) or "all as it must be", file=sys.stderr)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
