"""Break a fleet for some minutes while clients use it, and count how every request ends:

    python benchmarks/chaos.py --out benchmarks/results/chaos.json

`chaos_service` has the service and the means to break it, `chaos_load` the clients. Faults of processes come one after the other in
an order that --seed draws, each on a service that is whole again. Faults of connections and of the clock come beside them. Rows:
faults by kind, ends of requests, seconds until ready again after kills, and what is held at the end beyond the start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from chaos_load import ANSWERED, CUT, ERROR, LOST, TWICE, WRONG, Load
from chaos_service import Service, Wire
from common import cpu_name, provenance, write_rows

CLIENTS = 5
SLACK = {"descriptors": 2 * CLIENTS, "mb": 60.0}
"""By how much a process may hold more at the end than a fresh one: kept connections, as many as clients for each replica; MB. What
leaks with every fault is more."""
REST_S = 90.0
"""Idle connections are kept for at most 75 s."""
GRACE_S = 1.0
"""Between the end of a router and what its clients see of it."""


@dataclass
class Chaos:
    """A run. chance: draws victims and lengths."""

    service: Service
    load: Load
    chance: random.Random
    faults: Counter[str] = field(default_factory=Counter)
    engines_killed: int = 0
    recovery_s: dict[str, list[float]] = field(default_factory=dict)
    """Seconds from a fault until the service is whole again, by kind."""

    def engine(self) -> int:
        return self.chance.choice(self.service.engines())

    def serve(self) -> int:
        return self.chance.choice(self.service.serves())

    async def run(self, kinds: Sequence[str], say: Callable[[str], None] = print) -> None:
        """Make these faults in this order."""
        outside = [kind for kind in kinds if kind in OUTSIDE]
        inside = [kind for kind in kinds if kind not in OUTSIDE]
        await asyncio.gather(self._break_processes(inside, say), self._break_rest(outside))
        await self.service.until_ready()

    async def _break_processes(self, kinds: Sequence[str], say: Callable[[str], None]) -> None:
        """Each on a service that is whole."""
        for kind in kinds:
            began = time.monotonic()
            await FAULTS[kind](self)
            await self.service.until_ready(front=False)
            seconds = time.monotonic() - began
            self.faults[kind] += 1
            self.recovery_s.setdefault(kind, []).append(seconds)
            say(
                f"{sum(self.faults.values()):4} {kind:24} {seconds:6.2f} s  {self.load.requests} {dict(self.load.ended)}"
            )
            await asyncio.sleep(self.chance.uniform(0.2, 0.8))

    async def _break_rest(self, kinds: Sequence[str]) -> None:
        """Beside them."""
        for kind in kinds:
            await FAULTS[kind](self)
            for wire in self.service.wires:
                wire.mode = "pass"
            self.service.clock.move(0)
            self.faults[kind] += 1
            await asyncio.sleep(self.chance.uniform(1.0, 6.0))


Fault = Callable[[Chaos], Awaitable[None]]
FAULTS: dict[str, Fault] = {}


def fault(name: str) -> Callable[[Fault], Fault]:
    def enter(make: Fault) -> Fault:
        FAULTS[name] = make
        return make

    return enter


@fault("engine killed")
async def engine_killed(chaos: Chaos) -> None:
    chaos.service.kill(chaos.engine())
    chaos.engines_killed += 1


@fault("all engines killed")
async def all_engines_killed(chaos: Chaos) -> None:
    engines = chaos.service.engines()
    chaos.service.kill(*engines)
    chaos.engines_killed += len(engines)


@fault("replica killed")
async def replica_killed(chaos: Chaos) -> None:
    chaos.service.kill(chaos.serve())


@fault("fleet killed")
async def fleet_killed(chaos: Chaos) -> None:
    """The router of `ridgeline up` and with it all replicas."""
    chaos.service.kill(chaos.service.processes["up"].pid, *chaos.service.serves())


@fault("router killed")
async def router_killed(chaos: Chaos) -> None:
    service, killed = chaos.service, time.monotonic()
    service.kill(service.processes["route"].pid)
    service.processes["route"].wait()
    while (await service.get(service.url + "/version"))[0] != 200:
        await asyncio.sleep(0.02)
    service.front_ends.append((killed, time.monotonic()))


@fault("rolling restart")
async def rolling_restart(chaos: Chaos) -> None:
    service = chaos.service
    service.killed |= {*service.serves(), *service.engines()}  # others are to follow
    service.processes["up"].send_signal(signal.SIGHUP)


@fault("replica hung")
async def replica_hung(chaos: Chaos) -> None:
    await chaos.service.pause(chaos.serve(), chaos.chance.uniform(0.5, 4.0))


@fault("engine hung")
async def engine_hung(chaos: Chaos) -> None:
    await chaos.service.pause(chaos.engine(), chaos.chance.uniform(0.5, 4.0))


@fault("router hung")
async def router_hung(chaos: Chaos) -> None:
    name = chaos.chance.choice(("route", "up"))
    await chaos.service.pause(chaos.service.processes[name].pid, chaos.chance.uniform(0.5, 2.5))


@fault("replica hung for good")
async def replica_hung_for_good(chaos: Chaos) -> None:
    """The fleet replaces it after 30 s."""
    await _until_replaced(chaos, chaos.serve())


@fault("engine hung for good")
async def engine_hung_for_good(chaos: Chaos) -> None:
    """Its server replaces it after 30 s."""
    await _until_replaced(chaos, chaos.engine())


async def _until_replaced(chaos: Chaos, pid: int) -> None:
    chaos.service.killed.add(pid)
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 60.0
    while pid in {*chaos.service.serves(), *chaos.service.engines()}:
        assert time.monotonic() < deadline, f"process {pid} hangs and is not replaced"
        await asyncio.sleep(0.1)


@fault("replica slow")
async def replica_slow(chaos: Chaos) -> None:
    """A server or its engine gets a fifth of its time."""
    pid = chaos.chance.choice((chaos.serve, chaos.engine))()
    for _ in range(20):
        await chaos.service.pause(pid, 0.08)
        await asyncio.sleep(0.02)


@fault("disk full")
async def disk_full(chaos: Chaos) -> None:
    """No process can write to a file: logs and the pages of the KV cache on disk. Every second time an engine dies meanwhile."""
    try:
        chaos.service.allow_writes(False)
        await asyncio.sleep(chaos.chance.uniform(0.5, 1.5))
        if chaos.faults["disk full"] % 2:
            await engine_killed(chaos)
            await asyncio.sleep(2.0)
    finally:
        for _ in range(2):  # a process may have been starting at the first time
            chaos.service.allow_writes(True)
            await asyncio.sleep(0.2)


@fault("clock jump")
async def clock_jump(chaos: Chaos) -> None:
    """Of all processes, there and back."""
    chaos.service.clock.move(chaos.chance.choice((-86_400, -3_600, -30, 30, 3_600, 86_400, 400 * 86_400)))
    await asyncio.sleep(chaos.chance.uniform(0.5, 1.5))


@fault("malformed upstream")
async def malformed_upstream(chaos: Chaos) -> None:
    mode = Wire.MODES[chaos.faults["malformed upstream"] % len(Wire.MODES)]
    wires = chaos.service.wires if chaos.chance.random() < 0.25 else [chaos.chance.choice(chaos.service.wires)]
    for wire in wires:
        wire.mode = mode
    await asyncio.sleep(chaos.chance.uniform(0.3, 1.0))


@fault("half-open upstream")
async def half_open_upstream(chaos: Chaos) -> None:
    """A connection stays open and no byte comes: for all, or for those with an answer that has begun."""
    wire = chaos.chance.choice(chaos.service.wires)
    wire.mode = ("silent", "frozen")[chaos.faults["half-open upstream"] % 2]
    await asyncio.sleep(chaos.chance.uniform(0.5, 3.0))


@fault("slow upstream")
async def slow_upstream(chaos: Chaos) -> None:
    chaos.chance.choice(chaos.service.wires).mode = "slow"
    await asyncio.sleep(1.0)


async def _connections(chaos: Chaos, count: int) -> list[socket.socket]:
    """Connections to the front router, as soon as it listens."""
    address = ("127.0.0.1", chaos.service.ports["route"])
    while (await chaos.service.get(chaos.service.url + "/version"))[0] != 200:
        await asyncio.sleep(0.05)
    return [socket.create_connection(address, timeout=5.0) for _ in range(count)]


def _request(body: Mapping[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    return head.encode() + b"\r\n\r\n" + data


@fault("half-open clients")
async def half_open_clients(chaos: Chaos) -> None:
    """They send nothing, half a head or half a body, and then neither send nor read nor close for a while."""
    whole = _request({"prompt": "Half a request", "max_tokens": 4})
    opened = await _connections(chaos, 9)
    for number, connection in enumerate(opened):
        connection.sendall(whole[: (0, 40, len(whole) - 5)[number % 3]])
    await asyncio.sleep(chaos.chance.uniform(0.3, 1.0))
    for connection in opened:
        connection.close()


@fault("clients leave")
async def clients_leave(chaos: Chaos) -> None:
    """In the middle of streams, half of them with a reset."""
    opened = await _connections(chaos, 6)
    for connection in opened:
        connection.sendall(_request({"prompt": "A long story", "max_tokens": 400, "stream": True, "ignore_eos": True}))
    await asyncio.sleep(chaos.chance.uniform(0.05, 0.5))
    for number, connection in enumerate(opened):
        if number % 2:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()


COUNTS = {
    "engine killed": 10, "all engines killed": 6, "replica killed": 5, "fleet killed": 2, "router killed": 4, "rolling restart": 1,
    "replica hung": 5, "engine hung": 4, "router hung": 4, "replica hung for good": 1, "engine hung for good": 1, "replica slow": 4,
    "disk full": 6, "clock jump": 12, "malformed upstream": 18, "half-open upstream": 8, "slow upstream": 4,
    "half-open clients": 10, "clients leave": 10,
}  # fmt: skip
"""Faults of a full run."""
OUTSIDE = frozenset(
    {"clock jump", "malformed upstream", "half-open upstream", "slow upstream", "half-open clients", "clients leave"}
)
"""Faults that leave the processes as they are."""


def order(counts: Mapping[str, int], seed: int) -> list[str]:
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    random.Random(seed).shuffle(kinds)
    return kinds


@dataclass
class Report:
    requests: int
    refused: int
    faults: dict[str, int]
    engines_killed: int
    ended: dict[str, int]
    unexplained_cuts: list[str]
    bad: list[str]
    errors: dict[str, int]
    recovery_s: dict[str, list[float]]
    leaks: list[str]
    seconds: float
    latency_s: list[float]

    @property
    def kill_recovery_s(self) -> list[float]:
        """Seconds until the service was whole again after something died."""
        return [value for kind, values in self.recovery_s.items() if "killed" in kind for value in values]


async def break_and_count(
    folder: Path, kinds: Sequence[str], seed: int, least: int, say: Callable[[str], None]
) -> Report:
    """Make the faults under load; then let the clients go on until `least` requests have ended, and look for leaks."""
    began = time.monotonic()
    leaks: list[str] = []
    async with Service(folder) as service, Load(service.url, pause_s=0.3) as load:
        await load.learn()
        load.start(CLIENTS, seed)
        await asyncio.sleep(2.0)
        await load.stop()
        fresh = service.held()
        say(f"fresh: {fresh}")
        load.ended.clear()
        load.seconds.clear()
        chaos = Chaos(service, load, random.Random(seed))
        load.start(CLIENTS, seed + 100)
        try:
            await chaos.run(kinds, say)
            while load.requests < least:
                await asyncio.sleep(0.1)
        finally:
            await load.stop()
        leaks += await _leaks(service, fresh)
        say(f"left: {service.held()}")
        cuts = [cut for cut in load.cuts if not _explained(cut, service.front_ends)]
    leaks += [f"process {line}" for line in service.left]
    leaks += [f"file {path}" for path in service.temporary.rglob("*")]
    leaks += [f"file {path}" for path in (folder / "pages").rglob("*.tmp")]
    return Report(
        requests=load.requests,
        refused=load.refused,
        faults=dict(chaos.faults),
        engines_killed=chaos.engines_killed,
        ended=dict(load.ended),
        unexplained_cuts=[reason for _, _, reason in cuts],
        bad=load.bad,
        errors=dict(load.errors),
        recovery_s=chaos.recovery_s,
        leaks=leaks,
        seconds=time.monotonic() - began,
        latency_s=load.seconds,
    )


def _explained(cut: tuple[float, float, str], front_ends: Sequence[tuple[float, float]]) -> bool:
    """Whether the process that had the connection was killed meanwhile."""
    began, ended, _ = cut
    return any(began - GRACE_S <= killed <= ended + GRACE_S or killed <= began <= back for killed, back in front_ends)


async def _leaks(service: Service, fresh: Mapping[str, Any]) -> list[str]:
    """What is held once everything has come to rest. A connection without a request may take as long as it is kept."""
    deadline = time.monotonic() + REST_S
    while (leaks := await service.at_rest() + _beyond(fresh, service.held())) and time.monotonic() < deadline:
        await asyncio.sleep(0.5)
    return leaks


def _beyond(fresh: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    beyond = (
        []
        if now["processes"] == fresh["processes"]
        else [f"{now['processes']} processes, {fresh['processes']} at first"]
    )
    for kind, slack in SLACK.items():
        for role, value in now[kind].items():
            if value > fresh[kind][role] + slack:
                beyond.append(f"{kind} of {role}: {value:.0f}, {fresh[kind][role]:.0f} at first")
    return beyond


def rows(report: Report, machine: str) -> list[dict[str, Any]]:
    where = provenance(machine)
    recovery = report.kill_recovery_s or [0.0]
    values: list[tuple[str, float, str, float | None]] = [
        ("requests", report.requests, "requests", 2000),
        ("faults", sum(report.faults.values()), "faults", 100),
        ("engines-killed", report.engines_killed, "engines with a loaded model", 20),
        ("answered", report.ended.get(ANSWERED, 0), "requests", None),
        ("clear-errors", report.ended.get(ERROR, 0), "requests", None),
        (
            "cut-off-by-the-end-of-their-router",
            report.ended.get(CUT, 0) - len(report.unexplained_cuts),
            "requests",
            None,
        ),
        ("lost", report.ended.get(LOST, 0) + len(report.unexplained_cuts), "requests", 0),
        ("twice", report.ended.get(TWICE, 0), "requests", 0),
        ("wrong", report.ended.get(WRONG, 0), "requests", 0),
        ("not-accepted", report.refused, "connections", None),
        ("leaks", len(report.leaks), "blocks, sockets, files, processes", 0),
        ("ready-again-median-s", statistics.median(recovery), "s after a kill", None),
        ("ready-again-max-s", max(recovery), "s after a kill", None),
        ("latency-p50-s", statistics.median(report.latency_s), "s", None),
        ("latency-max-s", max(report.latency_s), "s", None),
        ("run-s", report.seconds, "s", None),
    ]
    for kind, count in sorted(report.faults.items()):
        name = kind.replace(" ", "-")
        values.append((f"faults-{name}", count, "faults", None))
        if seconds := report.recovery_s.get(kind):
            values.append((f"whole-again-{name}-s", statistics.median(seconds), "s, its length included", None))
    return [
        {"row": f"chaos-{name}", "value": round(value, 3), "unit": unit, "target": target} | where
        for name, value, unit, target in values
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=2000, help="at least so many")
    parser.add_argument("--only", default="", help="kinds and counts of faults, as in 'engine killed=3,clock jump=2'")
    parser.add_argument("--folder", default="", help="keep logs here (default: a temporary folder)")
    parser.add_argument("--machine", default="")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends what it has started
    counts = COUNTS
    if args.only:
        counts = {kind: int(count) for kind, _, count in (item.partition("=") for item in args.only.split(","))}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(args.folder or made)
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
        report = asyncio.run(
            break_and_count(
                folder, order(counts, args.seed), args.seed, args.requests, lambda text: print(text, flush=True)
            )
        )
    results = rows(report, args.machine or cpu_name())
    for row in results:
        print(f"{row['row']:44} {row['value']:10} {row['unit']}")
    for line in [*report.leaks, *report.bad, *report.unexplained_cuts, *map(str, report.errors.items())]:
        print(line)
    if args.out:
        write_rows(args.out, results)


if __name__ == "__main__":
    main()
