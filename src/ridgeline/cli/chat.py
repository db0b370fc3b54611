"""Chat with a model in the terminal: with --url on a running server, otherwise on one that is started for the chat.

/clear forgets the conversation, /exit (or the end of the input) ends it, Ctrl-C stops an answer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from typing import Any

from rich.console import Console

from ridgeline.cli.client import Answer, ChatClient
from ridgeline.cli.flags import Given, Parser, add_sampling, parser_for, read_sampling
from ridgeline.cli.hosted import Hosted, private
from ridgeline.cli.serve import read
from ridgeline.cli.show import Stages
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import ConfigError, RidgelineError

PROMPT = "> "


def parser() -> Parser:
    found = parser_for("chat", __doc__ or "", (ModelConfig, EngineConfig))
    found.add_argument("--url", metavar="URL", help="a running server (http://127.0.0.1:8000)")
    found.add_argument("--api-key", dest="key", metavar="TEXT", help="its key")
    found.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling(found, ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "stop"))
    return found


def run(given: Given) -> int:
    console = Console(stderr=True)
    url = getattr(given.rest, "url", None)
    if url is not None and (idle := [*given.flags, *(["config"] if given.config else [])]):
        raise ConfigError(
            f"{idle[0]} configures a server that this command starts, but --url names a running one: leave one of them out.",
            param=idle[0],
        )
    if url is None and hasattr(given.rest, "key"):
        raise ConfigError("--api-key is the key of the server that --url names: give --url, too.", param="key")
    with ExitStack() as stack:
        if url is None:
            with Stages(console) as stages:
                url = stack.enter_context(Hosted(private(read(given)), stages))
        client = ChatClient(url, getattr(given.rest, "key", None))
        client.connection().close()  # a wrong address is refused before anything is typed
        answered = talk(client, getattr(given.rest, "system", None), read_sampling(given), console)
    return 0 if answered or sys.stdin.isatty() else 1


def talk(client: ChatClient, system: str | None, options: Mapping[str, Any], console: Console) -> bool:
    """Send each line of standard input as a message. Answers go to standard output, times to standard error. Returns False if
    a request failed."""
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
    """One line about an answer: time to first token, tokens per second, token counts."""
    words = [f"TTFT {answer.ttft_s * 1e3:.0f} ms"] if answer.ttft_s is not None else ["no text"]
    if answer.tokens_per_s is not None:
        words.append(f"{answer.tokens_per_s:.1f} tokens/s")
    tokens = "token" if answer.prompt_tokens == 1 else "tokens"
    words.append(f"{answer.prompt_tokens} {tokens} in ({answer.cached_tokens} cached), {answer.output_tokens} out")
    if answer.finish_reason == "length":
        words.append("ended by max_tokens or the end of the context")
    return ", ".join(words)


def _print_answer(client: ChatClient, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> None:
    try:
        with closing(client.stream(messages, options)) as pieces:  # type: ignore[type-var]
            for piece in pieces:
                print(piece, end="", flush=True)
    finally:
        print(flush=True)


def _lines() -> Iterator[str]:
    """Lines of the terminal or of a pipe, without empty ones, until /exit or the end."""
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
    """History and editing keys for `input`, where Python was built with them."""
    with suppress(ModuleNotFoundError):
        import readline  # noqa: F401
