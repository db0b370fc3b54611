"""Talk to a model in the terminal. With --url to a server that runs, else to one that lives as long as the talk.

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
from ridgeline.core.errors import RidgelineError

PROMPT = "> "


def parser() -> Parser:
    found = parser_for("chat", __doc__ or "", (ModelConfig, EngineConfig))
    found.add_argument("--url", metavar="URL", help="server to talk to (http://127.0.0.1:8000)")
    found.add_argument("--api-key", dest="key", metavar="TEXT", help="its key")
    found.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling(found, ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "stop"))
    return found


def run(given: Given) -> int:
    console = Console(stderr=True)
    url = getattr(given.rest, "url", None)
    with ExitStack() as stack:
        if url is None:
            with Stages(console) as stages:
                url = stack.enter_context(Hosted(private(read(given)), stages))
        client = ChatClient(url, getattr(given.rest, "key", None))
        talk(client, getattr(given.rest, "system", None), read_sampling(given), console)
    return 0


def talk(client: ChatClient, system: str | None, options: Mapping[str, Any], console: Console) -> None:
    """Answer line after line of standard input. Text goes to standard output, times to standard error."""
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    for line in _lines():
        if line == "/clear":
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": line})
        try:
            _print_answer(client, messages, options)
        except RidgelineError as error:
            messages.pop()
            console.print(error.message, style="red", highlight=False, markup=False, soft_wrap=True)
            continue
        except KeyboardInterrupt:
            console.print("[dim](stopped)[/dim]")
        messages.append({"role": "assistant", "content": client.last.text})
        console.print(times(client.last), style="dim", highlight=False, soft_wrap=True)


def times(answer: Answer) -> str:
    """One line about an answer: time to the first token, speed, tokens."""
    words = [f"TTFT {answer.ttft_s * 1e3:.0f} ms"] if answer.ttft_s is not None else ["no text"]
    if answer.tokens_per_s is not None:
        words.append(f"{answer.tokens_per_s:.1f} tokens/s")
    words.append(f"{answer.prompt_tokens} tokens in ({answer.cached_tokens} cached), {answer.output_tokens} out")
    if answer.finish_reason == "length":
        words.append("cut at max_tokens or the context's end")
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
