"""Chat with a model in the terminal. --url names a running server; without it, a server is started for the chat.

/clear forgets the conversation, /exit (or the end of the input) ends the chat, Ctrl-C stops an answer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from typing import Any

from rich.console import Console

from ridgeline.cli.client import Answer, ChatClient
from ridgeline.cli.flags import Arguments, Parser, add_sampling, parser_for, read_sampling
from ridgeline.cli.hosted import Hosted, private
from ridgeline.cli.serve import resolve_arguments
from ridgeline.cli.show import Stages
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import ConfigError, RidgelineError

PROMPT = "> "


def parser() -> Parser:
    parser = parser_for("chat", __doc__ or "", (ModelConfig, EngineConfig))
    parser.add_argument("--url", metavar="URL", help="address of a running server, as in http://127.0.0.1:8000")
    parser.add_argument("--api-key", dest="key", metavar="TEXT", help="API key of the server that --url names")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling(parser, ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "stop"))
    return parser


def run(args: Arguments) -> int:
    console = Console(stderr=True)
    url = getattr(args.options, "url", None)
    if url is not None and (unused := [*args.flags, *(["config"] if args.config else [])]):
        raise ConfigError(
            f"{unused[0]} configures a server that this command starts, but --url names a running one: leave one of them out.",
            param=unused[0],
        )
    if url is None and hasattr(args.options, "key"):
        raise ConfigError("--api-key is the key of the server that --url names: give --url, too.", param="key")
    with ExitStack() as stack:
        if url is None:
            with Stages(console) as stages:
                url = stack.enter_context(Hosted(private(resolve_arguments(args)), stages))
        client = ChatClient(url, getattr(args.options, "key", None))
        client.connection().close()  # reports an invalid address before the user types
        answered = talk(client, getattr(args.options, "system", None), read_sampling(args), console)
    return 0 if answered or sys.stdin.isatty() else 1


def talk(client: ChatClient, system: str | None, options: Mapping[str, Any], console: Console) -> bool:
    """Send each line of standard input as a message; print answers to standard output and times to standard error.

    Returns: False if a request failed.
    """
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    answered = True
    for line in _lines():
        if line == "/clear":
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": line})
        try:
            _print_answer(client, messages, options)
        except RidgelineError as error:
            messages.pop()
            answered = False
            console.print(error.message, style="red", highlight=False, markup=False, soft_wrap=True)
            continue
        except KeyboardInterrupt:
            console.print("[dim](stopped)[/dim]")
        messages.append({"role": "assistant", "content": client.last.text})
        console.print(times(client.last), style="dim", highlight=False, soft_wrap=True)
    return answered


def times(answer: Answer) -> str:
    """Summarize an answer in one line: time to first token, tokens per second, token counts."""
    words = [f"TTFT {answer.ttft_s * 1e3:.0f} ms"] if answer.ttft_s is not None else ["no text"]
    if answer.tokens_per_s is not None:
        words.append(f"{answer.tokens_per_s:.1f} tokens/s")
    tokens = "token" if answer.prompt_tokens == 1 else "tokens"
    words.append(f"{answer.prompt_tokens} {tokens} in ({answer.cached_tokens} cached), {answer.output_tokens} out")
    if answer.finish_reason == "length":
        words.append("ended by max_tokens or the end of the context")
    if answer.finish_reason == "content_filter":
        words.append("withdrawn by the server's moderation")
    return ", ".join(words)


def _print_answer(client: ChatClient, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> None:
    try:
        with closing(client.stream(messages, options)) as pieces:  # type: ignore[type-var]
            for piece in pieces:
                print(piece, end="", flush=True)
    finally:
        print(flush=True)


def _lines() -> Iterator[str]:
    """Yield the non-empty lines of a terminal or a pipe, until /exit or the end of the input."""
    typed = sys.stdin.isatty()
    if typed:
        _line_editing()
    while True:
        try:
            line = input(PROMPT if typed else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print()
            return
        if line in ("/exit", "/quit"):
            return
        if line:
            yield line


def _line_editing() -> None:
    """Enable history and editing keys for `input`, if Python was built with readline."""
    with suppress(ModuleNotFoundError):
        import readline  # noqa: F401
