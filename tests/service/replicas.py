"""Scripted replicas and a router in front of them, all in the event loop of the test."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from ridgeline.core.config import ServiceConfig
from ridgeline.service.fleet.options import RouterConfig
from ridgeline.service.fleet.server import RouterServer, routing
from ridgeline.service.listen import bind

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
EVENTS = [b'data: {"choices":[{"delta":{"content":"%d"}}]}\n\n' % number for number in range(4)] + [b"data: [DONE]\n\n"]
PATIENCE_S = 10.0

Script = Callable[["FakeReplica", web.Request], Awaitable[web.StreamResponse]]


class FakeReplica:
    """A server whose answers and health are scripted. script: handles each request for an answer."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.targets: list[str] = []
        self.sent = 0
        """Events of the last answer so far, where the script counts them."""
        self.left = 0
        """Requests whose client left."""
        self.health: tuple[int, Any] = (200, {"status": "ok", "step": 0})
        self.health_headers: dict[str, str] = {}
        self.steps = False
        """Whether each health check sees another step."""
        self.key = ""
        """What requests must send. "": nothing."""
        self.deaf = False
        """Health checks get no answer."""
        self.gate = asyncio.Event()
        """What scripts may wait for."""
        self.running = 0

    async def __aenter__(self) -> FakeReplica:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/{path:.+}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.gate.set()
        await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        if self.deaf:
            await asyncio.sleep(3600)
        status, body = self.health
        if self.steps:
            body["step"] += 1
        return web.json_response(body, status=status, headers=self.health_headers)

    async def _models(self, request: web.Request) -> web.Response:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "no key"}}, status=401)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        return web.json_response({"object": "list", "data": [{"id": "m", "root": "root/m", "max_model_len": 8}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.targets.append(request.raw_path)
        self.bodies.append(await request.json())
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.running += 1
        try:
            return await self.script(self, request)
        except asyncio.CancelledError:
            self.left += 1
            raise
        finally:
            self.running -= 1


async def streams(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
    """All events at once."""
    response = await begin(request)
    for event in EVENTS:
        await response.write(event)
    return response


async def waits(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
    """The first event, and the rest once the gate is open."""
    response = await begin(request)
    await response.write(EVENTS[0])
    await replica.gate.wait()
    for event in EVENTS[1:]:
        await response.write(event)
    return response


async def thinks(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
    """Nothing until the gate is open."""
    await replica.gate.wait()
    return await streams(replica, request)


async def drops(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
    """Closes the connection without an answer."""
    request.transport.abort()
    raise asyncio.CancelledError


async def breaks(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
    """Closes the connection within the second event."""
    response = await begin(request)
    await response.write(EVENTS[0])
    await response.write(EVENTS[1][:-4])
    await replica.gate.wait()
    request.transport.abort()
    raise asyncio.CancelledError


def refuses(status: int, **headers: str) -> Script:
    async def answer(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        error = {"message": "no", "type": "t", "param": None, "code": None}
        return web.json_response({"error": error}, status=status, headers=names)

    return answer


async def begin(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream", "x-from": "replica"})
    await response.prepare(request)
    return response


@asynccontextmanager
async def starved(turn_s: float) -> AsyncIterator[None]:
    """Every turn of the event loop takes turn_s, as if the process had a part of a core: what comes waits in the sockets."""

    async def block() -> None:
        while True:
            time.sleep(turn_s)
            await asyncio.sleep(0)

    blocking = asyncio.create_task(block())
    try:
        yield
    finally:
        blocking.cancel()


class Routed:
    """A router with replicas, and a client."""

    def __init__(self, server: RouterServer, replicas: list[FakeReplica], client: aiohttp.ClientSession) -> None:
        self.server, self.replicas, self.client = server, replicas, client
        self.balancer = server.balancer

    async def chat(self, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
        url = f"{self.server.url}/v1/chat/completions"
        async with self.client.post(url, json={**CHAT, **fields}, headers=headers) as reply:
            return Answer(reply.status, {k.lower(): v for k, v in reply.headers.items()}, await reply.read())

    async def get(self, path: str, headers: dict[str, str] | None = None) -> Answer:
        async with self.client.get(self.server.url + path, headers=headers) as reply:
            return Answer(reply.status, {k.lower(): v for k, v in reply.headers.items()}, await reply.read())

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.005)

    def state(self, number: int) -> str:
        return self.balancer.router.replicas[f"replica-{number}"].state.value

    async def at_rest(self) -> None:
        """Nothing runs or waits in the router."""
        router = self.balancer.router
        await self.until(lambda: not router.queue and all(not replica.running for replica in router.replicas.values()))
        assert all(not replica.backlog for replica in router.replicas.values())
        assert all(not upstream.exchanges for upstream in self.balancer.upstreams.values())


class Answer:
    def __init__(self, status: int, headers: dict[str, str], data: bytes) -> None:
        self.status, self.headers, self.data = status, headers, data

    @property
    def json(self) -> Any:
        return json.loads(self.data)


@asynccontextmanager
async def routed(*scripts: Script, service: dict[str, Any] | None = None, **router: Any) -> AsyncIterator[Routed]:
    """A router with one replica for each script, all up."""
    config = ServiceConfig(**{"port": 0, "drain_s": 1.0, **(service or {})})
    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(FakeReplica(script)) for script in scripts]
        listeners = bind(config.host, config.port)
        server = await stack.enter_async_context(routing(config, RouterConfig(**router), listeners))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        running = Routed(server, replicas, client)
        for number, replica in enumerate(replicas):
            server.balancer.add(f"replica-{number}", replica.url)
            async with asyncio.timeout(PATIENCE_S):
                await server.balancer.until_up(f"replica-{number}")
            replica.headers.clear()  # of the first health check
        yield running
        for replica in replicas:
            replica.gate.set()
        await running.at_rest()
