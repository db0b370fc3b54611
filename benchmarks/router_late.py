"""A router that is offered more than its core can carry, with and without admission:

    python benchmarks/router_late.py --out benchmarks/results/service.json

The router runs on the last core. A load generator and a replica, which do nothing that costs time, share another one. Requests come
at a fixed rate, each asks for a stream of --events events, and no client retries. Rows `router-late-{on,off}-{rate}`: shares of the
requests that got the whole stream, that were refused, and that ended otherwise; time to the first event of the whole streams, and
what a stream took beyond the time in which the replica sends it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import uvloop
from common import cpu_name, provenance, write_rows
from router_cost import LISTENING, core_of_router, cpu_seconds

DATA = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
EVENT = b"%x\r\n%b\r\n" % (len(DATA), DATA)
LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
HEALTH = b'{"status":"ok","step":0}'
BODY = b'{"model":"m","messages":[{"role":"user","content":"%d %b"}],"stream":true}'
COMMAND = """
import sys
from ridgeline.cli.main import main
from ridgeline.service.fleet import balancer
balancer.LATE_S = float(sys.argv.pop(1))
main()
"""


class Replica(asyncio.Protocol):
    """Answers each request with a stream whose events come at fixed times."""

    events, pause_s = 10, 0.1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._rest = 0
        """Bytes of a request that are still to come."""

    def data_received(self, data: bytes) -> None:
        if self._rest:
            self._rest -= len(data)
            if not self._rest:
                self._begin()
        elif data.startswith(b"GET /health"):
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(HEALTH), HEALTH))
        elif data.startswith(b"GET"):
            self._transport.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        elif (length := LENGTH.search(data)) is not None:
            self._rest = data.index(b"\r\n\r\n") + 4 + int(length[1]) - len(data)
            if not self._rest:
                self._begin()

    def _begin(self) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        self._transport.write(head + EVENT)
        asyncio.get_running_loop().call_later(self.pause_s, self._send, 1)

    def _send(self, sent: int) -> None:
        if self._transport.is_closing():
            return
        if sent == self.events:
            self._transport.write(b"0\r\n\r\n")
        else:
            self._transport.write(EVENT)
            asyncio.get_running_loop().call_later(self.pause_s, self._send, sent + 1)


@dataclass(slots=True)
class Sent:
    """A request. due: when it is to be sent. status: of the answer; 0: none. whole: it came to its end."""

    due: float
    status: int = 0
    first_s: float = 0.0
    end_s: float = 0.0
    whole: bool = False


class Client(asyncio.Protocol):
    """One request on a connection of its own. text: of all prompts."""

    text = b""

    def __init__(self, sent: Sent, number: int, left: asyncio.Future[None]) -> None:
        self._sent, self._number, self._left = sent, number, left
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        body = BODY % (self._number, self.text)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        self._transport.write(head + b"content-length: %d\r\n\r\n%b" % (len(body), body))

    def data_received(self, data: bytes) -> None:
        sent = self._sent
        now = asyncio.get_running_loop().time() - sent.due
        if not sent.status:
            sent.status, sent.first_s = int(data[9:12]), now
        self._tail = (self._tail + data)[-64:]
        if sent.status != 200 or self._tail.endswith(b"0\r\n\r\n"):
            sent.end_s, sent.whole = now, sent.status == 200 and b"error" not in self._tail
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._left.done():
            self._left.set_result(None)


async def load(port: int, rate: float, seconds: float, patience_s: float) -> list[Sent]:
    """Requests at a fixed rate. A client waits patience_s for the end of its answer."""
    loop = asyncio.get_running_loop()

    async def ask(sent: Sent, number: int) -> None:
        left = loop.create_future()
        transport = None
        try:
            async with asyncio.timeout_at(sent.due + patience_s):
                transport, _ = await loop.create_connection(lambda: Client(sent, number, left), "127.0.0.1", port)
                await left
        except (TimeoutError, OSError):
            pass
        finally:
            if transport is not None:
                transport.abort()

    began, tasks, all_sent = loop.time(), [], []
    for number in range(int(rate * seconds)):
        sent = Sent(began + number / rate)
        all_sent.append(sent)
        if (wait := sent.due - loop.time()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(ask(sent, number)))
    await asyncio.gather(*tasks)
    return all_sent


async def measure(arguments: argparse.Namespace, late_s: float, rate: float) -> dict[str, Any]:
    server = await asyncio.get_running_loop().create_server(Replica, "127.0.0.1", 0, backlog=4096)
    async with router(late_s, server.sockets[0].getsockname()[1], arguments.core) as (port, process):
        await load(port, 20.0, 1.0, 10.0)
        before, began = cpu_seconds(process.pid), asyncio.get_running_loop().time()
        start = os.times()
        sent = await load(port, rate, arguments.seconds, arguments.patience)
        passed = asyncio.get_running_loop().time() - began
        used, mine = cpu_seconds(process.pid) - before, os.times()
    server.close()
    ended = [each for each in sent if each.whole]
    first = statistics.quantiles((each.first_s for each in ended), n=100)
    planned = Replica.events * Replica.pause_s
    beyond = statistics.quantiles((each.end_s - planned for each in ended), n=100)
    refused = sum(each.status == 429 for each in sent)
    return {
        "row": f"router-late-{'off' if late_s == float('inf') else 'on'}-{rate:g}",
        "value": round(len(ended) / len(sent), 4),
        "statuses": dict(Counter(each.status for each in sent)),
        "refused": round(refused / len(sent), 4),
        "lost": round((len(sent) - len(ended) - refused) / len(sent), 4),
        "ended_per_s": round(len(ended) / arguments.seconds, 1),
        "first_event_p50_s": round(first[49], 3),
        "first_event_p99_s": round(first[98], 3),
        "beyond_p50_s": round(beyond[49], 3),
        "beyond_p99_s": round(beyond[98], 3),
        "router_core": round(used / passed, 2),
        "load_core": round((mine.user + mine.system - start.user - start.system) / passed, 2),
        "seconds": arguments.seconds,
        "prompt_kb": arguments.prompt_kb,
        "patience_s": arguments.patience,
    }


@asynccontextmanager
async def router(late_s: float, replica: int, core: int) -> AsyncIterator[tuple[int, subprocess.Popen[str]]]:
    """A router on one core that refuses requests above late_s: its port and process."""
    options = ["route", "--port", "0", "--replica-limit", "100000", "--replica", f"http://127.0.0.1:{replica}"]
    command = [sys.executable, "-c", COMMAND, str(late_s), *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        os.sched_setaffinity(process.pid, {core})
        port = await asyncio.to_thread(_port, process)
        threading.Thread(target=deque, args=(process.stderr, 0), daemon=True).start()  # reads its log
        yield port, process
    finally:
        process.kill()
        process.wait()


def _port(process: subprocess.Popen[str]) -> int:
    assert process.stderr is not None
    for line in process.stderr:
        if match := re.search(LISTENING, line):
            port = urlsplit(match[1]).port
            assert port is not None
            return port
    raise RuntimeError("the router did not start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON file to merge rows into")
    parser.add_argument("--commit", default="")
    parser.add_argument("--rates", default="1000", help="requests per second, comma-separated")
    parser.add_argument("--limits", default="inf,0.5", help="lateness from which on the router refuses; inf: never")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--patience", type=float, default=30.0, help="seconds after which a client gives up")
    parser.add_argument("--prompt-kb", type=int, default=128)
    parser.add_argument("--events", type=int, default=10)
    arguments = parser.parse_args()
    machine, arguments.core = cpu_name(), core_of_router()
    with suppress(PermissionError):  # other work must not make the load late
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    Replica.events, Client.text = arguments.events, b"word " * (arguments.prompt_kb * 1024 // 5)
    for rate in map(float, arguments.rates.split(",")):
        for late_s in map(float, arguments.limits.split(",")):
            row = uvloop.run(measure(arguments, late_s, rate))
            print(row, flush=True)
            if arguments.out:
                write_rows(arguments.out, [{**row, **provenance(machine, arguments.commit)}])


if __name__ == "__main__":
    main()
