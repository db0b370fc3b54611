"""Start the server: the OpenAI API for one model. Without MODEL, it serves the model shipped with Ridgeline.

With --node-rank above 0 this host runs no service: its processes follow those of host 0 (several hosts share a model).
"""

# This process is the service. It starts the engine process, and does not import torch itself.

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from ridgeline.cli.flags import Arguments, Parser, parser_for
from ridgeline.cli.progress import Lines, find_model
from ridgeline.cli.show import Stages, announcer, configuration, engine_options, server_console, stages_text
from ridgeline.core.config import ServiceConfig
from ridgeline.core.logs import configure_logging
from ridgeline.core.process import with_rare_collections
from ridgeline.core.resolve import CONFIGS, Resolved, resolve
from ridgeline.engine.hosts import check_hosts, run_host
from ridgeline.engine.policy import admission
from ridgeline.hardware.probe import nvidia_gpus
from ridgeline.service.address import Address
from ridgeline.service.batches.settings import DayWindow, read_impact
from ridgeline.service.keys.settings import check_keys
from ridgeline.service.launch import begin_engines, check_engines
from ridgeline.service.listen import bind
from ridgeline.speculation.options import check_files, read_wanted

SHIPPED_NAME = "ridgeline-14m"
"""Name of the shipped model in the API."""


def parser() -> Parser:
    return parser_for("serve", __doc__ or "", CONFIGS)


class Announcer:
    """Prints the progress of the start: bars while loading, then configuration, address and an example request.

    started: time.perf_counter() when the command began, before the service was imported.
    """

    def __init__(self, args: Arguments, folder: Path, console: Console, stages: Stages, started: float) -> None:
        self._args = args
        self._folder = folder
        self._console = console
        self._stages = stages
        self._started = started

    def listening(self, url: str) -> None:
        self._console.print(
            f"[dim]listening on {url}; /health answers 503 until the model is loaded[/dim]", soft_wrap=True
        )

    def loading(self, stage: str, done: int, total: int) -> None:
        self._stages(stage, done, total)

    def restarting(self, reason: str) -> None:
        self._started = time.perf_counter()
        text = f"restarting the engine: {reason}; requests get 503 until it is ready"
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def restarted(self, url: str) -> None:
        seconds = time.perf_counter() - self._started
        self._console.print(f"[bold]ready again[/bold] after {seconds:.1f} s: {url}/v1", highlight=False)

    def ready(self, url: str, facts: Mapping[str, Any]) -> None:
        self._stages.__exit__(None, None, None)
        resolved = resolve_arguments(self._args, engine_options(facts))
        self._console.print(configuration(resolved, facts), highlight=False, soft_wrap=True, markup=False)
        seconds = time.perf_counter() - self._started
        self._console.print(f"\n[bold]ready[/bold] in {seconds:.1f} s: {url}/v1", highlight=False)
        if stages := stages_text(facts.get("startup_s") or {}):
            self._console.print(f"[dim]the engine took {stages}[/dim]", highlight=False)
        self._console.print(
            first_request(url, self._folder, resolved.service), highlight=False, soft_wrap=True, markup=False
        )


class LogAnnouncer:
    """Logs the progress of the start, for --log-format json."""

    def __init__(self, say: Callable[[str], None], lines: Lines) -> None:
        self._say, self._lines = say, lines

    def listening(self, url: str) -> None:
        self._say(f"listening on {url}; /health answers 503 until the model is loaded")

    def loading(self, stage: str, done: int, total: int) -> None:
        self._lines(stage, done, total)

    def restarting(self, reason: str) -> None:
        self._say(f"restarting the engine: {reason}; requests get 503 until it is ready")

    def restarted(self, url: str) -> None:
        self._say(f"ready again: {url}/v1")

    def ready(self, url: str, facts: Mapping[str, Any]) -> None:
        self._lines.__exit__(None, None, None)
        self._say(f"ready: {url}/v1")


def resolve_arguments(args: Arguments, hardware: Mapping[str, Any] | None = None) -> Resolved:
    """Resolve the configuration from flags, environment and --config file.

    hardware: options that the engine derived from model and hardware. They replace defaults only.
    """
    resolved = resolve(args.flags, environ=os.environ, file=args.config, hardware=hardware)
    if resolved.model.model:
        return resolved
    with_name = {"served_model_name": SHIPPED_NAME, **(hardware or {})}
    return resolve(args.flags, environ=os.environ, file=args.config, hardware=with_name)


def first_request(url: str, folder: Path, service: ServiceConfig) -> str:
    """An example request to this server, as a curl command."""
    if has_template(folder) or service.chat_template:
        path, body = "chat/completions", {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}
    else:
        path, body = "completions", {"prompt": "Once upon a time", "max_tokens": 64}
    key = " -H 'authorization: Bearer YOUR-KEY'" if service.api_key or service.api_keys else ""
    return f"curl {url}/v1/{path}{key} -H 'content-type: application/json' -d {shlex.quote(json.dumps(body))}"


def has_template(folder: Path) -> bool:
    """Whether a model folder contains a chat template."""
    config = folder / "tokenizer_config.json"
    return (folder / "chat_template.jinja").is_file() or (
        config.is_file() and '"chat_template"' in config.read_text(encoding="utf-8")
    )


def check(resolved: Resolved) -> None:
    """Raise ConfigError for options that engine or service would reject after both have started.

    `resolve` has already checked the options with a fixed set of values.
    """
    admission(resolved.engine.batching)
    check_hosts(resolved.engine)
    check_engines(resolved.service)
    check_files(read_wanted(resolved.engine))
    Address.read(resolved.service)
    DayWindow.parse(resolved.service.batch_window)
    read_impact(resolved.service.batch_impact)
    if resolved.service.allowed_origins:
        # Imported on demand: without these options, the import runs later, while the engine process imports torch.
        import_module("ridgeline.service.origins").Origins.parse(resolved.service.allowed_origins)
    if resolved.service.warm_prefix:
        import_module("ridgeline.service.warm_prefixes").read_prefixes(Path(resolved.service.warm_prefix))
    check_keys(resolved.service)
    if resolved.service.moderation:
        judges = import_module("ridgeline.service.moderation.judges")
        judges.make_judge(resolved.service.moderation, resolved.service.moderation_api_key)
    if resolved.service.otlp_traces_endpoint:
        import_module("ridgeline.service.trace").make_tracing(resolved.service).close()
    if resolved.service.allowed_hosts:
        import_module("ridgeline.service.hosts").Hosts.parse(resolved.service.allowed_hosts, resolved.service.host)


def run(args: Arguments) -> int:
    started = time.perf_counter()
    resolved = resolve_arguments(args)
    configure_logging(resolved.service.log_level, resolved.service.log_format)
    if resolved.service.models:
        return _serve_models(args, resolved)
    check(resolved)
    say = announcer(resolved.service.log_format)
    if resolved.service.join:
        run_engine_host = import_module("ridgeline.service.remote_engines").run_engine_host
        return int(run_engine_host(resolved, lambda line: print(line, file=sys.stderr)))
    if resolved.engine.node_rank:
        return run_host(resolved.engine, find_model(resolved.model, say), lambda line: print(line, file=sys.stderr))
    with ExitStack() as cleanup:
        listeners = [cleanup.enter_context(sock) for sock in bind(resolved.service.host, resolved.service.port)]
        folder = _find_models(resolved, say)
        engines = begin_engines(resolved)
        for engine in engines:
            cleanup.callback(engine.process.kill)  # no effect if the service has stopped it
        # Imported late, so that this import runs while the engine process imports torch.
        server = import_module("ridgeline.service.server")
        announce: Announcer | LogAnnouncer
        if resolved.service.log_format == "text":
            console = server_console()
            announce = Announcer(args, folder, console, cleanup.enter_context(Stages(console)), started)
        else:
            announce = LogAnnouncer(say, cleanup.enter_context(Lines(say)))
        uvloop.run(with_rare_collections(server.serve(resolved, folder, listeners, engines, announce)))
    return 0


def _serve_models(args: Arguments, resolved: Resolved) -> int:
    """Run a server with the models of a file."""
    from_file = import_module("ridgeline.service.models.file").read_models
    entries = from_file(Path(resolved.service.models), args.flags, os.environ, args.config, bool(nvidia_gpus()))
    for entry in entries:
        check(entry.resolved)
    say = announcer(resolved.service.log_format)

    def announce(url: str) -> None:
        names = ", ".join(entry.name for entry in entries)
        say(f"listening on {url}; models: {names}")

    with ExitStack() as cleanup:
        listeners = [cleanup.enter_context(sock) for sock in bind(resolved.service.host, resolved.service.port)]
        placed = [(entry, find_model(entry.resolved.model, say)) for entry in entries]
        serve_models = import_module("ridgeline.service.models.serve").serve_models
        uvloop.run(with_rare_collections(serve_models(resolved.service, placed, listeners, announce)))
    return 0


def _find_models(resolved: Resolved, say: Callable[[str], None]) -> Path:
    """Folder of the served model. Raises ConfigError if it or the reference model (--shadow-model) is not available."""
    folder = find_model(resolved.model, say)
    if (reference := resolved.service.shadow_model) and not resolved.service.shadow_url:
        # Checked here, so that an invalid name is an error now and not a warning later.
        find_model(replace(resolved.model, model=reference, revision=None), say)
    return folder
