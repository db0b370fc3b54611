"""Complete prompts in this process, without a server.

Prompts come from --prompt TEXT (may be repeated), from --file FILE (one per line), or from standard input (one prompt).
Completions go to standard output, all other messages to standard error.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from ridgeline.cli.flags import Arguments, Parser, add_sampling, parser_for, read_sampling
from ridgeline.cli.serve import resolve_arguments
from ridgeline.cli.show import Stages
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.plural import counted
from ridgeline.core.sampling import SamplingParams
from ridgeline.llm import LLM, Completion


def parser() -> Parser:
    parser = parser_for("generate", __doc__ or "", (ModelConfig, EngineConfig))
    parser.add_argument("--prompt", "-p", action="append", metavar="TEXT", help="a prompt; may be repeated")
    parser.add_argument("--file", metavar="FILE", help="file with one prompt per line")
    parser.add_argument(
        "--chat", action="store_true", default=False, help="send each prompt as a user message of a chat"
    )
    parser.add_argument("--json", action="store_true", default=False, help="print one JSON object per prompt")
    add_sampling(parser)
    return parser


def run(args: Arguments) -> int:
    prompts = _prompts(args)
    sampling = SamplingParams(**{"max_tokens": 128, **read_sampling(args)})
    console = Console(stderr=True)
    resolved = resolve_arguments(args)
    config = {**asdict(resolved.model), **asdict(resolved.engine)}
    with Stages(console) as stages:
        llm = LLM(config.pop("model"), progress=stages, **config)
    started = time.perf_counter()
    try:
        if args.options.chat:
            completions = [llm.chat([{"role": "user", "content": prompt}], sampling) for prompt in prompts]
        else:
            completions = llm.generate(prompts, sampling)
    finally:
        llm.close()
    seconds = time.perf_counter() - started
    for prompt, completion in zip(prompts, completions, strict=True):
        _show(prompt, completion, as_json=args.options.json, several=len(prompts) > 1)
    tokens = sum(len(choice.token_ids) for completion in completions for choice in completion.choices)
    console.print(
        f"[dim]{counted(tokens, 'token')} in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s[/dim]", highlight=False
    )
    errors = [choice.error for completion in completions for choice in completion.choices if choice.error]
    for error in dict.fromkeys(errors):
        print(f"ridgeline: {error}", file=sys.stderr)
    return 1 if errors else 0


def _prompts(args: Arguments) -> list[str]:
    prompts = list(getattr(args.options, "prompt", None) or [])
    file = getattr(args.options, "file", None)
    try:
        if file is not None:
            prompts += [line for line in Path(file).read_text(encoding="utf-8-sig").split("\n") if line.strip()]
        if not prompts and not sys.stdin.isatty():
            prompts = [sys.stdin.read().rstrip("\n")]
    except OSError as error:
        raise ConfigError(f"Cannot read the prompts of --file {file}: {error.strerror}.", param="file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file or 'Standard input'} is not UTF-8 text ({error}).", param="file") from None
    if not any(prompts):
        raise ConfigError("No prompt is given: use --prompt TEXT, --file FILE or standard input.")
    return prompts


def _show(prompt: str, completion: Completion, *, as_json: bool, several: bool) -> None:
    if as_json:
        choices: list[dict[str, Any]] = [
            {"text": choice.text, "finish_reason": choice.finish, "tokens": len(choice.token_ids)}
            | ({"error": choice.error} if choice.error else {})
            for choice in completion.choices
        ]
        print(json.dumps({"prompt": prompt, "choices": choices}, ensure_ascii=False))
        return
    for choice in completion.choices:
        print(f"{prompt}{choice.text}" if several else choice.text)
