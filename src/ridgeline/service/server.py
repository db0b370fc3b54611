"""Start, serve, stop. The server listens at once and answers as soon as the engine is ready."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from aiohttp import http_exceptions, web

import ridgeline
from ridgeline.core.config import ServiceConfig
from ridgeline.core.errors import ConfigError, RidgelineError
from ridgeline.core.resolve import Resolved
from ridgeline.core.slo import Slo
from ridgeline.core.token_prices import TokenPrices
from ridgeline.metrics import Ceilings, Metrics
from ridgeline.service.access import Access
from ridgeline.service.address import Address
from ridgeline.service.answer_cache import AnswerCache
from ridgeline.service.app import make_app
from ridgeline.service.connection import Runner
from ridgeline.service.engines import connect_engines, launch_engines
from ridgeline.service.front import Front
from ridgeline.service.gate import Gate
from ridgeline.service.grammar_checks import GrammarChecks
from ridgeline.service.launch import Begun
from ridgeline.service.listen import cannot_listen
from ridgeline.service.moderation.watch import Moderation, make_moderation
from ridgeline.service.pooling import read_embedder, read_judge
from ridgeline.service.reference import Reference, make_reference
from ridgeline.service.shadow import Shadow
from ridgeline.service.state import Limits, ModelCard, Service
from ridgeline.service.supervisor import Supervisor
from ridgeline.service.warm_prefixes import WarmPrefix, read_prefixes, warm
from ridgeline.text.grammar_worker import GrammarWorker
from ridgeline.text.prompts import ChatTemplates, Parsers
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.wire.client import Client
from ridgeline.wire.messages import StepStats

_CLOSE_S = 2.0
"""Seconds in which connections may close after the drain."""
_LOOK_S = 0.05
"""Seconds between two polls of the engine's progress while it loads."""
_BACKLOG = 4096
"""Connections that wait to be accepted. The system drops others, and their clients wait for a second or more to try again."""
_NOTHING_RUNS = StepStats(-1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, steps=0)
"""A record without a step. It resets the gauges when the engine is lost."""

CEILING_NAMES = frozenset(field.name for field in fields(Ceilings))

log = logging.getLogger(__name__)
http_log = logging.getLogger(f"{__name__}.http")
"""Logger for aiohttp."""


async def listen(app: web.Application, address: Address, listeners: Sequence[socket.socket]) -> web.AppRunner:
    """Answer requests on bound sockets. Raises ConfigError if another process listens on the port by now."""
    runner = Runner(
        app,
        prefix=address.prefix,
        auto_decompress=False,  # `Bodies` decompresses only what it needs
        handler_cancellation=True,
        access_log=None,
        logger=http_log,
        shutdown_timeout=_CLOSE_S,
        keepalive_timeout=75,
    )
    await runner.setup()
    try:
        for listener in listeners:
            await web.SockSite(runner, listener, ssl_context=address.tls, backlog=_BACKLOG).start()
    except OSError as error:
        port = listener.getsockname()[1]
        await runner.cleanup()
        raise cannot_listen(address.host, port, error) from error
    return runner


def _is_server_error(record: logging.LogRecord) -> bool:
    """False for invalid HTTP from clients. It is answered with 400; a traceback for each would fill the log."""
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, (http_exceptions.HttpProcessingError, web.RequestPayloadError)):
        return True
    log.info("%s (%s)", record.getMessage(), type(error).__name__)
    return False


http_log.addFilter(_is_server_error)


class Server:
    """The HTTP side of a supervised engine.

    `start` listens, `open` answers requests, `keep_open` replaces lost engines, `stop` drains and closes.
    """

    def __init__(
        self, config: ServiceConfig, supervisor: Supervisor, metrics: Metrics, reference: Reference | None = None
    ) -> None:
        """supervisor: of a started engine; the caller stops it. reference: scores a share of the answers."""
        self.front = Front(config, supervisor.engine.client, metrics)
        self.port = config.port
        self._supervisor = supervisor
        self._address = Address.read(config)
        self._moderation = make_moderation(config, metrics.judged)
        self._reference = reference
        self._service: Service | None = None
        """Of the current engine, or of the last one until the next is ready."""
        self._prefixes: Sequence[WarmPrefix] = ()
        self._runner: web.AppRunner | None = None
        self._shadowing: asyncio.Task[None] | None = None

    async def start(self, listeners: Sequence[socket.socket]) -> None:
        """Listen on bound sockets (`listen.bind`). Until `open`, all routes that need the engine answer 503.

        Raises ConfigError if another process listens on the port by now.
        """
        self._runner = await listen(make_app(self.front), self._address, listeners)
        self.port = self._runner.addresses[0][1]

    @property
    def url(self) -> str:
        return self._address.url(self.port)

    async def open(self, folder: Path, name: str) -> None:
        """Load tokenizer and templates, wait for the engine, and answer requests. Raises the errors of these steps."""
        config, client = self.front.config, self.front.client
        tokenizer = await asyncio.to_thread(Tokenizer.load, folder)
        templates = await asyncio.to_thread(_read_templates, config, tokenizer)
        embedder = await asyncio.to_thread(read_embedder, config.pooling, folder)
        judge = await asyncio.to_thread(read_judge, config.pooling, folder, tokenizer)
        facts = await client.wait_ready()
        card = ModelCard(
            config.served_model_name or name,
            name,
            int(time.time()),
            facts.get("generation_defaults") or {},
            self.front.adapters,
        )
        await self.front.adapters.restored(client)
        service = _make_service(self.front, card, folder, (tokenizer, templates), self._moderation)
        service = replace(service, embedder=embedder, judge=judge)
        self._service = service
        if config.warm_prefix:
            self._prefixes = await asyncio.to_thread(read_prefixes, Path(config.warm_prefix))
        await warm(service, self._prefixes)
        self._answer(service)
        log.info("%s is served; sampling defaults %s, context %s", card.name, dict(card.defaults), facts["max_len"])

    async def keep_open(self, announce: Announce | None = None, *, while_awake: bool = False) -> None:
        """After `open`: start another engine whenever one is lost.

        Ends when it is cancelled. while_awake: also when a sleeping engine is lost. Raises EngineFailed when no restart is left.
        """
        announce = announce or Quiet()
        assert self._service is not None
        while True:
            lost = await self._supervisor.wait_lost()
            self.front.close(lost)
            if while_awake and self.front.sleep.level:
                await self._supervisor.engine.kill()
                return
            announce.restarting(lost)
            self.front.metrics.engine_restarted()
            self._service.pin_book.restarted(time.monotonic())
            self.front.metrics.on_step(_NOTHING_RUNS)
            # End the reference engine, too: the next engine is sized by the free memory.
            await self._end_shadowing()
            client = await self._supervisor.restart()
            try:
                await client.wait_ready()
                await self.front.sleep.restored(client)
                await self.front.adapters.restored(client)
                service = _renewed(self._service, client)
                await warm(service, self._prefixes)
            except RidgelineError:
                if client.failure is None:
                    raise  # the weights of the last update cannot be read any more: do not serve others
                continue  # wait_lost reports an engine that does not start
            self._answer(service)
            announce.restarted(self.url)

    def _answer(self, service: Service) -> None:
        """Open the front with a service whose engine is ready."""
        config, metrics, client = service.config, service.metrics, service.client
        facts = client.facts
        metrics.on_ready(facts["max_len"], int(facts.get("page_tokens", 0)), int(facts.get("blocks", 0)))
        metrics.live.ceilings = _ceilings(config, facts)
        metrics.live.token_prices = TokenPrices.parse(config.token_prices)
        self.front.keys.set_price(metrics.live.ceilings.price)
        if self._reference is not None:
            shadow = Shadow(client, metrics, self.front.sleep, self._reference, service.limits.request_tokens)
            self._shadowing = asyncio.get_running_loop().create_task(shadow.run())
            service = replace(service, shadow=shadow)
        self._service = service
        self.front.open(service)

    async def _end_shadowing(self) -> None:
        if self._shadowing is not None:
            self._shadowing.cancel()
            await asyncio.wait({self._shadowing})

    async def stop(self) -> None:
        """Drain, end remaining requests with an error, close. The supervisor stops the engine."""
        if self._shadowing is not None:
            self._shadowing.cancel()
        await self.front.drain()
        self.front.client.end_all("The server is shutting down: send the request to another replica.", "drain")
        if self._runner is not None:
            await self._runner.cleanup()
        await asyncio.to_thread(self.front.tracing.close)
        if self._service is not None:
            self._service.grammars.close()
        await self._end_shadowing()
        await self._moderation.close()


def _ceilings(config: ServiceConfig, facts: Mapping[str, Any]) -> Ceilings:
    """The device's ceilings as the engine reports them. A configured price replaces that of the hardware table."""
    known = {name: value for name, value in (facts.get("ceilings") or {}).items() if name in CEILING_NAMES}
    ceilings = Ceilings(**known)
    return ceilings if config.price_per_hour is None else replace(ceilings, price=config.price_per_hour)


def _make_service(
    front: Front, card: ModelCard, folder: Path, text: tuple[Tokenizer, ChatTemplates], moderation: Moderation
) -> Service:
    """The service for an engine that is ready."""
    tokenizer, templates = text
    facts = front.client.facts
    limits = Limits.of(facts, tokenizer)
    end_ids = list(facts.get("eos_ids") or ([] if tokenizer.eos_id is None else [tokenizer.eos_id]))
    return Service(
        config=front.config,
        client=front.client,
        metrics=front.metrics,
        card=card,
        tokenizer=tokenizer,
        templates=templates,
        grammars=GrammarChecks(GrammarWorker(folder, vocab_size=limits.vocab, end_ids=end_ids)),
        limits=limits,
        gate=_make_gate(front.config, facts),
        fingerprint=f"ridgeline-{ridgeline.__version__}",
        answers=AnswerCache(int(front.config.answer_cache_mb * (1 << 20))),
        moderation=moderation,
    )


def _renewed(service: Service, client: Client) -> Service:
    """The service with another engine of the same model. Tokenizer and templates are kept."""
    limits = Limits.of(client.facts, service.tokenizer)
    return replace(service, client=client, limits=limits, gate=_make_gate(service.config, client.facts), shadow=None)


def _make_gate(config: ServiceConfig, facts: Mapping[str, Any]) -> Gate:
    return Gate(config.max_queue, int(facts.get("max_num_seqs") or 1))


def _read_templates(config: ServiceConfig, tokenizer: Tokenizer) -> ChatTemplates:
    """The model's chat templates, or the configured one: a file, or the text itself if it contains a brace.

    Raises ConfigError for a template that is missing or not valid.
    """
    template = config.chat_template
    if template is not None and "{" not in template:
        try:
            template = Path(template).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"Cannot read the chat template {template} ({error.strerror}): give a Jinja file."
            ) from error
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"The chat template {template} is not UTF-8 text ({error}): give a Jinja file."
            ) from error
    sources = None if template is None else {"default": template}
    return ChatTemplates(
        tokenizer,
        sources,
        allow_special_in_content=config.allow_special_in_content,
        parsers=Parsers(config.reasoning_parser, config.tool_call_parser),
    )


class Announce(Protocol):
    """Receives the progress of a server: its start, and each replacement of its engine."""

    def listening(self, url: str) -> None: ...

    def loading(self, stage: str, done: int, total: int) -> None: ...

    def ready(self, url: str, facts: Mapping[str, Any]) -> None: ...

    def restarting(self, lost: str) -> None: ...

    def restarted(self, url: str) -> None: ...


class Quiet:
    """Ignores all announcements."""

    def listening(self, url: str) -> None: ...

    def loading(self, stage: str, done: int, total: int) -> None: ...

    def ready(self, url: str, facts: Mapping[str, Any]) -> None: ...

    def restarting(self, lost: str) -> None: ...

    def restarted(self, url: str) -> None: ...


async def serve(
    resolved: Resolved,
    folder: Path,
    listeners: Sequence[socket.socket],
    begun: Sequence[Begun],
    announce: Announce | None = None,
) -> None:
    """Run until SIGTERM or SIGINT.

    folder: the model folder. listeners: bound sockets. begun: the first engine processes of `resolved`. Raises ConfigError or
    EngineFailed if the server cannot start, and EngineFailed when the engine is lost and no restart is left.
    """
    config, model, engine = resolved.service, resolved.model, resolved.engine
    reference = make_reference(config, model, engine)
    announce = announce or Quiet()
    name = model.model or folder.name
    metrics = Metrics(config.served_model_name or name, config.metrics_alias, slo=Slo.parse(config.slo))
    first = await connect_engines(begun, resolved, metrics)
    supervisor = Supervisor(first, partial(launch_engines, resolved, metrics), config)
    server = Server(config, supervisor, metrics, reference)
    stopped = stop_signals(server.front)
    try:
        await server.start(listeners)
        announce.listening(server.url)
        await run_until(stopped, _run(server, folder, name, announce))
    except RidgelineError:
        server.front.hurry()  # no request can be answered any more
        raise
    finally:
        await server.stop()
        await supervisor.stop()


def stop_signals(access: Access) -> asyncio.Event:
    """An event that SIGTERM and SIGINT set. The first signal drains, the second ends the drain. SIGHUP reads the API keys again."""
    stopped = asyncio.Event()

    def stop() -> None:
        if stopped.is_set():
            access.hurry()
        stopped.set()

    if access.config.api_keys:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, partial(access.keys.reload, changed_only=False))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    return stopped


async def _run(server: Server, folder: Path, name: str, announce: Announce) -> None:
    """Open the server and keep it open."""
    watching = asyncio.ensure_future(_watch_loading(server.front.client, announce))
    try:
        await server.open(folder, name)
        await watching
    finally:
        watching.cancel()
    announce.ready(server.url, server.front.client.facts)
    await server.keep_open(announce)


async def run_until(stopped: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until it ends or `stopped` is set, which cancels it. Raises its error."""
    running, stop = asyncio.ensure_future(work), asyncio.ensure_future(stopped.wait())
    try:
        await asyncio.wait({running, stop}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    finally:
        running.cancel()
        stop.cancel()
        await asyncio.gather(running, stop, return_exceptions=True)


async def _watch_loading(client: Client, announce: Announce) -> None:
    """Announce the engine's progress until it is ready."""
    announced = None
    while not client.ready.is_set():
        if client.loading is not None and client.loading is not announced:
            announced = client.loading
            announce.loading(announced.stage, announced.done, announced.total)
        await asyncio.sleep(_LOOK_S)
