"""Start a fleet of servers behind a router, as a YAML, TOML or JSON file describes it, and keep it running.

SIGHUP, or POST /admin/restart, replaces all servers one after the other. docs/fleet.md describes the file.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import ExitStack
from pathlib import Path

import uvloop

from ridgeline.cli.flags import Arguments, Parser, parser_for
from ridgeline.cli.show import announcer
from ridgeline.core.logs import configure_logging
from ridgeline.core.process import with_rare_collections
from ridgeline.service.fleet.file import read_fleet
from ridgeline.service.fleet.kubernetes import manifest
from ridgeline.service.fleet.launcher import Launcher, LocalLauncher, known_keys
from ridgeline.service.fleet.ray_cluster import RayLauncher
from ridgeline.service.fleet.up import run_fleet
from ridgeline.service.listen import bind
from ridgeline.service.trace import make_tracing


def parser() -> Parser:
    parser = parser_for("up", __doc__ or "", (), model=False)
    parser.add_argument("file", metavar="FILE", help="the fleet file")
    parser.add_argument(
        "--kubernetes",
        metavar="IMAGE",
        help="print the Kubernetes objects of the fleet with this image, and start nothing",
    )
    return parser


def run(args: Arguments) -> int:
    logging.getLogger("ridgeline.service.fleet.fleet").setLevel(
        logging.INFO
    )  # decisions of the autoscaler with their inputs
    file = read_fleet(Path(args.options.file), os.environ)
    configure_logging(file.service.log_level, file.service.log_format)
    if image := getattr(args.options, "kubernetes", None):
        print(json.dumps(manifest(file, image), indent=2))
        return 0
    make_tracing(file.service).close()
    say = announcer(file.service.log_format)
    with ExitStack() as cleanup:
        listeners = [cleanup.enter_context(sock) for sock in bind(file.service.host, file.service.port)]
        keys = known_keys(file.service)
        launcher: Launcher
        if file.fleet.launcher == "ray":
            launcher = RayLauncher(file.fleet, file.serve, keys)
        else:
            launcher = LocalLauncher(file.serve, file.gpus, keys, say)
        uvloop.run(with_rare_collections(run_fleet(file, launcher, listeners, say)))
    return 0
