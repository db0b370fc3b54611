"""Start, serve, stop: the listening socket is there at once, the answers as soon as the engine is."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Protocol

from aiohttp import http_exceptions, web

import ridgeline
from ridgeline.core.config import ServiceConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.resolve import Resolved
from ridgeline.core.slo import Slo
from ridgeline.metrics import Ceilings, Metrics
from ridgeline.service.app import make_app
from ridgeline.service.connection import Runner
from ridgeline.service.front import Front
from ridgeline.service.gate import Gate
from ridgeline.service.grammar_checks import GrammarChecks
from ridgeline.service.launch import Begun, connect
from ridgeline.service.listen import cannot_listen
from ridgeline.service.reference import Reference, make_reference
from ridgeline.service.shadow import Shadow
from ridgeline.service.state import Limits, ModelCard, Service
from ridgeline.text.chat import ChatTemplates
from ridgeline.text.grammar import GrammarCompiler
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.wire.client import EngineClient

_CLOSE_S = 2.0
"""Seconds that connections get to close after the drain."""
_LOOK_S = 0.05
"""Seconds between two looks at the engine's progress while it loads."""
_BACKLOG = 1024

CEILING_NAMES = frozenset(one.name for one in fields(Ceilings))

log = logging.getLogger(__name__)
http_log = logging.getLogger(f"{__name__}.http")
"""Where aiohttp writes."""


def _ours(record: logging.LogRecord) -> bool:
    """False for what a stranger sent that is no HTTP: it is answered 400, and a traceback of each would fill the log."""
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, (http_exceptions.HttpProcessingError, web.RequestPayloadError)):
        return True
    log.info("%s (%s)", record.getMessage(), type(error).__name__)
    return False


http_log.addFilter(_ours)


class Server:
    """The HTTP side of one engine. `start` listens, `open` answers, `stop` drains and closes."""

    def __init__(
        self, config: ServiceConfig, client: EngineClient, metrics: Metrics, reference: Reference | None = None
    ) -> None:
        """reference: scores a share of the answers again."""
        self.front = Front(config, client, metrics)
        self.port = config.port
        self._reference = reference
        self._runner: web.AppRunner | None = None
        self._shadowing: asyncio.Task[None] | None = None

    async def start(self, listeners: Sequence[socket.socket]) -> None:
        """Listen on bound sockets (`listen.bind`). Until `open` every route but the small ones answers 503. Raises ConfigError
        when another process listens on the port by now."""
        config = self.front.config
        runner = Runner(
            make_app(self.front),
            handler_cancellation=True,
            access_log=None,
            logger=http_log,
            shutdown_timeout=_CLOSE_S,
            keepalive_timeout=75,
        )
        await runner.setup()
        try:
            for listener in listeners:
                await web.SockSite(runner, listener, backlog=_BACKLOG).start()
        except OSError as error:
            await runner.cleanup()
            raise cannot_listen(config.host, config.port, error) from error
        self._runner = runner
        self.port = runner.addresses[0][1]

    @property
    def url(self) -> str:
        return f"http://{self.front.config.host}:{self.port}"

    async def open(self, folder: Path, name: str) -> None:
        """Read the model folder's text side, wait for the engine, and answer. Raises what either of them raises."""
        config, client = self.front.config, self.front.client
        tokenizer = await asyncio.to_thread(Tokenizer.load, folder)
        templates = _read_templates(config, tokenizer)
        facts = await client.wait_ready()
        card = ModelCard(
            config.served_model_name or name, name, int(time.time()), facts.get("generation_defaults") or {}
        )
        metrics = self.front.metrics
        metrics.on_ready(facts["max_len"], int(facts.get("page_tokens", 0)), int(facts.get("blocks", 0)))
        metrics.live.ceilings = _ceilings(config, facts)
        service = _make_service(self.front, card, tokenizer, templates)
        if self._reference is not None:
            shadow = Shadow(config, client, metrics, self._reference, service.limits.most)
            self._shadowing = asyncio.get_running_loop().create_task(shadow.run())
            service = replace(service, shadow=shadow)
        self.front.open(service)
        log.info("%s is served; sampling defaults %s, context %s", card.name, dict(card.defaults), facts["max_len"])

    async def stop(self) -> None:
        """Drain, end with an error what is left, close. The engine is the caller's to stop."""
        if self._shadowing is not None:
            self._shadowing.cancel()
        await self.front.drain()
        self.front.client.end_all("The server is shutting down: send the request to another replica.", "drain")
        if self._runner is not None:
            await self._runner.cleanup()
        if self._shadowing is not None:
            await asyncio.wait({self._shadowing})


def _ceilings(config: ServiceConfig, facts: Mapping[str, Any]) -> Ceilings:
    """What the engine says of its device, and what it costs: as configured, else as the table has it."""
    known = {name: value for name, value in (facts.get("ceilings") or {}).items() if name in CEILING_NAMES}
    found = Ceilings(**known)
    return found if config.price_per_hour is None else replace(found, price=config.price_per_hour)


def _make_service(front: Front, card: ModelCard, tokenizer: Tokenizer, templates: ChatTemplates) -> Service:
    """The service of an engine that is ready."""
    facts = front.client.facts
    limits = Limits.of(facts, tokenizer)
    ends = list(facts.get("eos_ids") or ([] if tokenizer.eos_id is None else [tokenizer.eos_id]))
    return Service(
        config=front.config,
        client=front.client,
        metrics=front.metrics,
        card=card,
        tokenizer=tokenizer,
        templates=templates,
        grammars=GrammarChecks(GrammarCompiler(tokenizer, vocab_size=limits.vocab, end_ids=ends)),
        limits=limits,
        gate=Gate(front.config.max_queue, int(facts.get("max_num_seqs") or 1)),
        fingerprint=f"ridgeline-{ridgeline.__version__}",
    )


def _read_templates(config: ServiceConfig, tokenizer: Tokenizer) -> ChatTemplates:
    """The model's chat templates, or the one given instead: a file, or the text itself (it has a brace, a path has none).

    Raises ConfigError for one that is missing or not valid.
    """
    given = config.chat_template
    if given is None:
        return ChatTemplates(tokenizer.templates, tokenizer.specials)
    if "{" not in given:
        try:
            given = Path(given).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"the chat template {given} cannot be read ({error.strerror}): give a Jinja file."
            ) from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"the chat template {given} is no text in UTF-8 ({error}): give a Jinja file.") from error
    return ChatTemplates({"default": given}, tokenizer.specials)


class Announce(Protocol):
    """Who wants to know how far a server has come."""

    def listening(self, url: str) -> None: ...

    def loading(self, stage: str, done: int, total: int) -> None: ...

    def ready(self, url: str, facts: Mapping[str, Any]) -> None: ...


class Quiet:
    """Tells nobody."""

    def listening(self, url: str) -> None: ...

    def loading(self, stage: str, done: int, total: int) -> None: ...

    def ready(self, url: str, facts: Mapping[str, Any]) -> None: ...


async def serve(
    resolved: Resolved,
    folder: Path,
    listeners: Sequence[socket.socket],
    begun: Begun,
    announce: Announce | None = None,
) -> None:
    """Run until SIGTERM or SIGINT. folder: the model's files on this disk. listeners: bound sockets. begun: the engine
    process of `resolved`.

    Raises ConfigError or EngineFailed for what cannot start. An engine that dies later does not end the server: requests
    get errors and /health says why, so that whoever supervises it can see and decide.
    """
    config, model = resolved.service, resolved.model
    reference = make_reference(config, model, resolved.engine)
    told = announce or Quiet()
    name = model.model or folder.name
    metrics = Metrics(config.served_model_name or name, config.metrics_alias, slo=Slo.parse(config.slo))
    process = await connect(begun, metrics.on_step)
    server = Server(config, process.client, metrics, reference)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        """The first signal drains, the second one does not wait."""
        if stopped.is_set():
            server.front.hurry()
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    opening = watching = None
    try:
        await server.start(listeners)
        told.listening(server.url)
        watching = loop.create_task(_watch_loading(process.client, told))
        opening = loop.create_task(server.open(folder, name))
        if await _opened(opening, stopped):
            await watching
            told.ready(server.url, process.client.facts)
            await stopped.wait()
    finally:
        for task in (opening, watching):
            if task is not None:
                task.cancel()
        await server.stop()
        await process.stop()


async def _opened(opening: asyncio.Task[None], stopped: asyncio.Event) -> bool:
    """True when the server is open, False when it was stopped before; an error of `opening` is raised."""
    stop = asyncio.ensure_future(stopped.wait())
    await asyncio.wait({opening, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if opening.done():
        opening.result()
    return opening.done()


async def _watch_loading(client: EngineClient, announce: Announce) -> None:
    """Pass the engine's progress on until it is ready."""
    seen = None
    while not client.ready.is_set():
        if client.loading is not None and client.loading is not seen:
            seen = client.loading
            announce.loading(seen.stage, seen.done, seen.total)
        await asyncio.sleep(_LOOK_S)
