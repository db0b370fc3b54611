"""Start the server: the OpenAI API for one model. Without MODEL it serves the model shipped with Ridgeline.

This process is the service; it starts the process of the engine and never loads torch itself.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from ridgeline.cli.flags import Given, Parser, parser_for
from ridgeline.cli.show import Stages, chosen, configuration, stages_text
from ridgeline.core.config import ServiceConfig
from ridgeline.core.resolve import CONFIGS, Resolved, resolve
from ridgeline.engine.policy import admission
from ridgeline.models.hub import resolve_model
from ridgeline.service.address import Address
from ridgeline.service.launch import begin
from ridgeline.service.listen import bind
from ridgeline.speculation.options import check_files, read_wanted

SHIPPED_NAME = "ridgeline-14m"
"""What the API calls the model that comes with Ridgeline."""


def parser() -> Parser:
    return parser_for("serve", __doc__ or "", CONFIGS)


class Announcer:
    """Tells the terminal how the start goes: bars while loading, then configuration, address and a first request.

    started: time.perf_counter() at which the user began to wait, before anything was imported for the service.
    """

    def __init__(self, given: Given, folder: Path, console: Console, stages: Stages, started: float) -> None:
        self._given = given
        self._folder = folder
        self._console = console
        self._stages = stages
        self._started = started

    def listening(self, url: str) -> None:
        self._console.print(f"[dim]listening on {url}; /health answers 503 until the model is loaded[/dim]")

    def loading(self, stage: str, done: int, total: int) -> None:
        self._stages(stage, done, total)

    def restarting(self, lost: str) -> None:
        self._started = time.perf_counter()
        text = f"restarting the engine: {lost}; requests get 503 until it is ready"
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def restarted(self, url: str) -> None:
        seconds = time.perf_counter() - self._started
        self._console.print(f"[bold]ready again[/bold] after {seconds:.1f} s: {url}/v1", highlight=False)

    def ready(self, url: str, facts: Mapping[str, Any]) -> None:
        self._stages.__exit__(None, None, None)
        resolved = read(self._given, chosen(facts))
        self._console.print(configuration(resolved))
        seconds = time.perf_counter() - self._started
        self._console.print(f"\n[bold]ready[/bold] in {seconds:.1f} s: {url}/v1", highlight=False)
        if stages := stages_text(facts.get("startup_s") or {}):
            self._console.print(f"[dim]the engine took {stages}[/dim]", highlight=False)
        self._console.print(
            first_request(url, self._folder, resolved.service), highlight=False, soft_wrap=True, markup=False
        )


def read(given: Given, settled: Mapping[str, Any] | None = None) -> Resolved:
    """The configuration of this process: what was typed, its environment, the file that was named, and what model and
    hardware settled."""
    found = resolve(given.flags, environ=os.environ, file=given.config, hardware=settled)
    if found.model.model:
        return found
    named = {"served_model_name": SHIPPED_NAME, **(settled or {})}
    return resolve(given.flags, environ=os.environ, file=given.config, hardware=named)


def first_request(url: str, folder: Path, service: ServiceConfig) -> str:
    """A curl line that gets an answer from this server."""
    if has_template(folder) or service.chat_template:
        path, body = "chat/completions", {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}
    else:
        path, body = "completions", {"prompt": "Once upon a time", "max_tokens": 64}
    key = " -H 'authorization: Bearer YOUR-KEY'" if service.api_key else ""
    return f"curl {url}/v1/{path}{key} -H 'content-type: application/json' -d {shlex.quote(json.dumps(body))}"


def has_template(folder: Path) -> bool:
    """Whether a model folder brings a chat template."""
    config = folder / "tokenizer_config.json"
    return (folder / "chat_template.jinja").is_file() or (
        config.is_file() and '"chat_template"' in config.read_text(encoding="utf-8")
    )


def check(resolved: Resolved) -> None:
    """Raise ConfigError for options that the engine or the service would refuse after both have begun. Those with a fixed set
    of values have been checked by `resolve`."""
    admission(resolved.engine.batching)
    check_files(read_wanted(resolved.engine))
    Address.read(resolved.service)
    if resolved.service.allowed_origins:
        # Only here: what it needs is imported while the engine's process imports torch.
        import_module("ridgeline.service.origins").Origins.parse(resolved.service.allowed_origins)
    if resolved.service.allowed_hosts:
        import_module("ridgeline.service.hosts").Hosts.parse(resolved.service.allowed_hosts, resolved.service.host)


def run(given: Given) -> int:
    started = time.perf_counter()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    resolved = read(given)
    check(resolved)
    with ExitStack() as cleanup:
        listeners = [cleanup.enter_context(sock) for sock in bind(resolved.service.host, resolved.service.port)]
        folder = _find_models(resolved)
        begun = begin(resolved.model, resolved.engine)
        cleanup.callback(begun.process.kill)  # it has ended already, unless the service never came to speak to it
        # Only now: what the service is made of is imported while the engine's process imports torch.
        server = import_module("ridgeline.service.server")
        console = Console(stderr=True)
        stages = cleanup.enter_context(Stages(console))
        announcer = Announcer(given, folder, console, stages, started)
        uvloop.run(server.serve(resolved, folder, listeners, begun, announcer))
    return 0


def _find_models(resolved: Resolved) -> Path:
    """The folder of the served model. Raises ConfigError when it, or the reference model beside it, cannot be had."""
    folder = resolve_model(resolved.model)
    if (reference := resolved.service.shadow_model) and not resolved.service.shadow_url:
        resolve_model(
            replace(resolved.model, model=reference, revision=None)
        )  # a name that is none is an error now, not a warning later
    return folder
