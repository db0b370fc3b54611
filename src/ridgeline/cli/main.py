"""Entry point of `ridgeline COMMAND`: imports the module of the command, and turns errors into one line and an exit status."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Protocol

import ridgeline
from ridgeline.cli.flags import Arguments, Parser, read_flags, search_help
from ridgeline.core.errors import ConfigError, RequestError, RidgelineError

COMMANDS: Mapping[str, str] = {
    "serve": "start the server: the OpenAI API over one model",
    "route": "route requests to several servers: by cached prefixes and load",
    "up": "start a fleet of servers behind a router, from a file",
    "chat": "talk to a model in the terminal",
    "generate": "complete prompts without a server",
    "batch": "run a file of requests on a server in idle time: submit, status, get, cancel",
    "usage": "show what API keys have used on a server",
    "bench": "measure a server under load: latency, throughput, goodput",
    "compress": "make a model smaller: quantize or prune it; report size, speed and quality",
    "compare": "compare a model with a reference: perplexity, drift, limits for CI",
    "ladder": "measure speed, memory and drift step by step: eager, compiled, int8, int4, speculation",
    "fit": "check whether a model fits into memory, and print the command that serves it",
    "simulate": "serve a trace by replicas behind the router in virtual time: latencies, hits, cost, losses, autoscaling",
    "plan": "rank parallel layouts of a model on several GPUs: time, memory, price, and why",
    "place": "place several models on GPUs of several kinds: the cheapest GPUs, or the most load",
    "roofline": "roofline of a model on an accelerator: the limit of each operation",
    "calc": "calculators: KV cache, cost, energy, renting or buying",
    "calibrate": "measure steps on this machine, for accurate predictions of step times",
    "diagnose": "find the bottleneck of a running server, and suggest remedies",
    "doctor": "check this machine, a model and a running server: what is wrong, and the remedy",
    "collect-env": "describe this machine for a bug report",
}


class Command(Protocol):
    """Interface of a command's module."""

    def parser(self) -> Parser: ...

    def run(self, args: Arguments) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status: 2 for a usage error, 1 for a failure."""
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # print "?" for characters that the terminal cannot encode
            stream.reconfigure(errors="replace")
    try:
        return _run(words)
    except (ConfigError, RequestError) as error:
        print(f"ridgeline: {error.message}", file=sys.stderr)
        return 2
    except RidgelineError as error:
        print(f"ridgeline: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of standard output has closed the pipe
        _drop_output()
        return 141
    except OSError as error:
        if error.filename is not None:
            print(f"ridgeline: {error.filename}: {error.strerror}.", file=sys.stderr)
            return 2
        if error.errno != errno.ENOSPC:
            raise
        _drop_output()
        print(f"ridgeline: Cannot write the output: {error.strerror}.", file=sys.stderr)
        return 1


def _drop_output() -> None:
    """Redirect standard output to /dev/null, so that the final flush does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if words[0] in ("-V", "--version"):
        print(ridgeline.__version__)
        return 0
    name, arguments = words[0], words[1:]
    if name not in COMMANDS:
        raise ConfigError(f"Unknown command {name!r}. Commands are {', '.join(COMMANDS)}.")
    # Imported on demand, so that a command loads only what it needs: `serve` must start without torch.
    command: Command = import_module(f"ridgeline.cli.{name.replace('-', '_')}")  # type: ignore[assignment]
    parser = command.parser()
    help_words = [word.partition("=")[2] for word in arguments if word.startswith("--help=")]
    if help_words:
        print(search_help(parser, help_words[0]), end="")
        return 0
    return command.run(read_flags(parser, arguments))


def usage() -> str:
    """The overview of all commands."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {text}" for name, text in COMMANDS.items()]
    head = (
        f"Ridgeline {ridgeline.__version__}: an LLM inference server.\n\nusage: ridgeline COMMAND [MODEL] [options]\n"
    )
    return "\n".join(
        [head, *lines, "", "`ridgeline COMMAND --help` shows a command's options, `--help=WORD` searches them."]
    )


if __name__ == "__main__":
    sys.exit(main())
