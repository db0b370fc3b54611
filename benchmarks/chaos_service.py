"""The service that a chaos run breaks: `ridgeline route` in front of `ridgeline up` with two replicas, and the means to break them.

    clients -> ridgeline route -> two wires -> ridgeline up -> two replicas, each with its engine

All are commands as a user starts them. Signals kill and stop processes, a `Wire` (a TCP proxy of this process) breaks connections,
a library that is loaded before libc's moves the clock (`CLOCK`), and RLIMIT_FSIZE 0 refuses every write to a file, as a full disk
does. Whoever supervises the two commands, systemd or Kubernetes, is played by `Service.keep`: it starts a command again that has
ended.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

import ridgeline

MARK = "CHAOS_RUN"
"""Environment variable by which every process of a run is matches, whoever its parent is."""
PATIENCE_S = 60.0
REPLICAS = 2
SERVE = {"threads": 1, "max_num_seqs": 8, "dtype": "float32", "kv_cache_memory": "5M", "max_model_len": 512}
OPTIONS = ("--stall-s", "1", "--idle-s", "6", "--drain-s", "5")
"""Of `ridgeline route`."""

CLOCK = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile long *shift;
__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("CHAOS_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *page = file < 0 ? MAP_FAILED : mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    if (file >= 0) close(file);
    if (page != MAP_FAILED) shift = page;
}
int clock_gettime(clockid_t id, struct timespec *now) {
    int status = syscall(SYS_clock_gettime, id, now);
    if (!status && shift && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += *shift;
    return status;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec value;
    clock_gettime(CLOCK_REALTIME, &value);
    now->tv_sec = value.tv_sec;
    now->tv_usec = value.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *now) {
    struct timespec value;
    clock_gettime(CLOCK_REALTIME, &value);
    if (now) *now = value.tv_sec;
    return value.tv_sec;
}
"""
"""The wall clock of every process that loads it is moved by the seconds in the file CHAOS_CLOCK. CLOCK_MONOTONIC stays."""


class Clock:
    """Moves the wall clock of the processes of a run. environment: of each of them."""

    def __init__(self, folder: Path) -> None:
        source, library, seconds = folder / "clock.c", folder / "clock.so", folder / "clock"
        source.write_text(CLOCK)
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
        seconds.write_bytes(bytes(8))
        with seconds.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), 8)
        self.environment = {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(seconds)}

    def move(self, seconds: int) -> None:
        """Move it to `seconds` from the true time."""
        self._page[:] = struct.pack("q", seconds)


class Wire:
    """A TCP proxy to a port of this machine. mode: what it does to answers.

    pass: nothing. garbage: bytes that are not HTTP. cut: half of the bytes, then a reset. close: the end instead of an answer.
    short: a head that promises more bytes than follow. chunk: a chunk with a length that is no number. head: a head of 100 KB.
    silent: no byte passes and the connection stays open. frozen: as silent, for connections whose answer has begun. slow: 64 bytes
    at a time.
    """

    MODES = ("garbage", "cut", "close", "short", "chunk", "head")

    def __init__(self, target: int) -> None:
        self.mode, self._target = "pass", target
        self._chance = random.Random(1)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            upstream, sink = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        pumps = [
            asyncio.ensure_future(self._pump(reader, sink)),
            asyncio.ensure_future(self._answers(upstream, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            writer.close()
            sink.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frozen = False
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                frozen = frozen or (self.mode == "frozen" and b"event-stream" not in data)
                if self.mode == "silent" or frozen:
                    await asyncio.sleep(20.0)
                    return
                if self.mode == "slow":
                    for start in range(0, len(data), 64):
                        writer.write(data[start : start + 64])
                        await asyncio.sleep(0.02)
                elif self.mode in self.MODES:
                    writer.write(self._malformed(self.mode, data))
                    await asyncio.sleep(0)
                    if self.mode == "cut":
                        writer.transport.abort()
                    return
                else:
                    writer.write(data)
                await writer.drain()

    def _malformed(self, mode: str, data: bytes) -> bytes:
        head = b"HTTP/1.1 200 OK\r\n"
        return {
            "garbage": self._chance.randbytes(200) + b"\r\n\r\n",
            "cut": data[: len(data) // 2],
            "close": b"",
            "short": head + b'content-type: application/json\r\ncontent-length: 9999\r\n\r\n{"id":',
            "chunk": head + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\nzz\r\ndata",
            "head": head + b"x-long: " + b"x" * 100_000 + b"\r\n\r\n",
        }[mode]


def children(pid: int, word: str = "") -> list[int]:
    """Child processes whose command has `word`, the oldest first."""
    with suppress(OSError):
        matches = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return [child for child in matches if word in command(child)]
    return []


def command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def descriptors(pid: int) -> Counter[str]:
    """Open descriptors of a process by kind: socket, pipe, file, anon."""
    kinds: Counter[str] = Counter()
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                target = os.readlink(entry)
                kinds[target.split(":")[0] if ":" in target else "file"] += 1
    return kinds


def resident_mb(pid: int) -> float:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    return 0.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class Service:
    """Use it as an async context manager. folder: for logs, and for the temporary files of all processes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.temporary = folder, folder / "tmp"
        self.temporary.mkdir()
        (folder / "pages").mkdir()
        self.clock = Clock(folder)
        self.ports = {"route": free_port(), "up": free_port()}
        self.url = f"http://127.0.0.1:{self.ports['route']}"
        self.wires = [Wire(self.ports["up"]) for _ in range(2)]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.starts: Counter[str] = Counter()
        self.killed: set[int] = set()
        """Processes that a fault has ended."""
        self.front_ends: list[tuple[float, float]] = []
        """When `ridgeline route` was killed, and when it listened again."""

    async def __aenter__(self) -> Service:
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
        for wire in self.wires:
            await wire.start()
        router = {"port": self.ports["up"], "drain_s": 5.0, "stall_s": 1.0}
        serve = SERVE | {"kv_offload_gb": 0.01, "kv_disk": str(self.folder / "pages"), "kv_disk_gb": 0.02}
        (self.folder / "fleet.json").write_text(json.dumps({"replicas": REPLICAS, "serve": serve, "router": router}))
        self.commands = {
            "up": ("up", str(self.folder / "fleet.json")),
            "route": (
                *("route", "--port", str(self.ports["route"]), *OPTIONS),
                *(word for wire in self.wires for word in ("--replica", wire.url)),
            ),
        }
        for name in self.commands:
            self.start(name)
        self._keeping = asyncio.ensure_future(self.keep())
        try:
            await self.until_ready()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._keeping.cancel()
        self.heal()
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 60.0
        while self.marked() and time.monotonic() < deadline:
            for process in self.processes.values():
                process.poll()
            await asyncio.sleep(0.1)
        self.left = [f"{pid} {command(pid)}" for pid in self.marked()]
        for pid in self.marked():
            os.kill(pid, signal.SIGKILL)
        for process in self.processes.values():
            process.wait()
        for wire in self.wires:
            await wire.close()
        await self.session.close()

    def start(self, name: str) -> None:
        self.starts[name] += 1
        environment = {key: value for key, value in os.environ.items() if not key.startswith("RIDGELINE_")}
        environment["PYTHONPATH"] = str(Path(ridgeline.__file__).parents[1])
        environment |= {MARK: str(self.folder), "TMPDIR": str(self.temporary), **self.clock.environment}
        with (self.folder / f"{name}.log").open("ab") as output:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "ridgeline", *self.commands[name]],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )

    async def keep(self) -> None:
        """Start a command again that has ended, as systemd does."""
        while True:
            for name, process in self.processes.items():
                if process.poll() is not None:
                    self.start(name)
            await asyncio.sleep(0.1)

    # --- who runs -----------------------------------------------------------------------------------------------------

    def marked(self) -> list[int]:
        """All processes of the run that have not ended."""
        mark, matches = f"{MARK}={self.folder}".encode(), []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdecimal() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    matches.append(int(entry.name))
        return matches

    def serves(self) -> list[int]:
        """The processes of the replicas."""
        return children(self.processes["up"].pid, "ridgeline serve")

    def engines(self) -> list[int]:
        return [engine for serve in self.serves() for engine in children(serve, "ridgeline.engine")]

    async def get(self, url: str) -> tuple[int, Any]:
        """Status and body; status 0: no answer."""
        try:
            async with asyncio.timeout(5.0), self.session.get(url) as reply:
                return reply.status, await reply.json(content_type=None)
        except (aiohttp.ClientError, OSError, ValueError):
            return 0, None

    async def replicas(self) -> list[dict[str, Any]]:
        status, body = await self.get(f"http://127.0.0.1:{self.ports['up']}/admin/replicas")
        return body["data"] if status == 200 else []

    async def ready(self, *, front: bool = True) -> str:
        """Why the service is not whole; "": every process runs, has loaded the model and answers. front: and the wires work."""
        serves, engines = self.serves(), self.engines()
        if len(serves) != REPLICAS or len(engines) != REPLICAS or self.killed & {*serves, *engines}:
            return f"{len(serves)} replicas and {len(engines)} engines run"
        replicas = await self.replicas()
        if [replica["state"] for replica in replicas] != ["up"] * REPLICAS:
            return f"replicas: {[(replica['state'], replica['trouble']) for replica in replicas]}"
        for replica in replicas:
            if (await self.get(replica["url"] + "/health"))[0] != 200:
                return f"{replica['name']} does not answer"
        status, body = await self.get(f"{self.url}/admin/replicas")
        states = [replica["state"] for replica in body["data"]] if status == 200 else []
        if states and not front:
            return ""
        return "" if states == ["up"] * len(self.wires) else f"the front router sees {states}"

    async def until_ready(self, *, front: bool = True) -> None:
        """Wait until the service is whole. Raises TimeoutError."""
        began = time.monotonic()
        while trouble := await self.ready(front=front):
            if time.monotonic() - began > PATIENCE_S:
                raise TimeoutError(f"not ready after {PATIENCE_S:g} s: {trouble}")
            await asyncio.sleep(0.05)

    # --- means ----------------------------------------------------------------------------------------------------------

    def kill(self, *pids: int) -> None:
        for pid in pids:
            self.killed.add(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def pause(self, pid: int, seconds: float) -> None:
        """Stop a process and let it go on."""
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(seconds)
            os.kill(pid, signal.SIGCONT)

    def allow_writes(self, allowed: bool) -> None:
        """Refuse every write to a file by any process of the run, or allow them again."""
        for pid in self.marked():
            with suppress(OSError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (-1 if allowed else 0, -1))

    def heal(self) -> None:
        """End every fault."""
        self.clock.move(0)
        self.allow_writes(True)
        for wire in self.wires:
            wire.mode = "pass"
        for pid in self.marked():
            with suppress(OSError):
                os.kill(pid, signal.SIGCONT)

    # --- what is held ---------------------------------------------------------------------------------------------------

    def held(self) -> dict[str, Any]:
        """Processes, and descriptors and memory by role: the most of any process of the role."""
        serves, engines = self.serves(), self.engines()
        roles = {
            "route": [self.processes["route"].pid],
            "up": [self.processes["up"].pid],
            "serve": serves,
            "engine": engines,
        }
        return {
            "processes": len(self.marked()),
            "descriptors": {role: max(descriptors(pid).total() for pid in pids) for role, pids in roles.items()},
            "mb": {role: max(map(resident_mb, pids)) for role, pids in roles.items()},
        }

    async def at_rest(self) -> list[str]:
        """What the routers and engines still hold although no client waits."""
        held = []
        for name, url in (("route", self.url), ("up", f"http://127.0.0.1:{self.ports['up']}")):
            _, body = await self.get(f"{url}/admin/replicas")
            rows = body["data"] if body else [{"name": "none answers", "running": -1, "backlog_tokens": 0}]
            held += [f"{name}: {row}" for row in rows if row["running"] or row["backlog_tokens"]]
        for replica in await self.replicas():
            _, stats = await self.get(replica["url"] + "/admin/stats")
            if not stats or stats["running"] or stats["waiting"] or stats["used"] or stats["free"] != stats["total"]:
                held.append(f"{replica['name']}: {stats}")
        return held
