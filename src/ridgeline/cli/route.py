"""Route requests to several servers: one address for all of them, with the OpenAI API.

Each --replica is the address of a running server with the same model. A request goes to the server that is predicted to answer
first, by the prompts that it has cached and the work that it has.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

import uvloop

from ridgeline.cli.flags import Arguments, Parser, add_options, parser_for
from ridgeline.cli.show import announcer
from ridgeline.core.config import ServiceConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.logs import configure_logging
from ridgeline.core.plural import counted
from ridgeline.core.process import with_rare_collections
from ridgeline.core.resolve import resolve
from ridgeline.service.fleet.options import SHARED, RouterConfig, check_shared, read_router, read_url
from ridgeline.service.fleet.server import serve_router
from ridgeline.service.listen import bind
from ridgeline.service.trace import make_tracing


def parser() -> Parser:
    parser = parser_for("route", __doc__ or "", (RouterConfig,), model=False)
    parser.add_argument("--replica", metavar="URL", action="append", help="address of a server; give it once for each")
    add_options(parser, (ServiceConfig,), SHARED)
    return parser


def run(args: Arguments) -> int:
    options = vars(args.options)
    replicas = [read_url(text) for text in options.pop("replica", ())]
    if not replicas:
        raise ConfigError(
            "No server is given: add --replica URL for each, as in http://127.0.0.1:8001.", param="replica"
        )
    if len(set(replicas)) < len(replicas):
        raise ConfigError("A server is given twice with --replica: keep one.", param="replica")
    router = read_router(options, "flag")
    service = check_shared(resolve(args.flags, environ=os.environ, file=args.config).service)
    configure_logging(service.log_level, service.log_format)
    make_tracing(service).close()
    say = announcer(service.log_format)
    with ExitStack() as cleanup:
        listeners = [cleanup.enter_context(sock) for sock in bind(service.host, service.port)]

        def announce(url: str) -> None:
            say(f"listening on {url}; routing to {counted(len(replicas), 'server')}")

        uvloop.run(with_rare_collections(serve_router(service, router, replicas, listeners, announce)))
    return 0
