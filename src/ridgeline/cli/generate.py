"""Complete prompts in this process, without a server: --prompt TEXT (may be repeated), --file FILE with one per line, or
one prompt from standard input. Text goes to standard output, everything else to standard error.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from ridgeline.cli.flags import Given, Parser, add_sampling, parser_for, read_sampling
from ridgeline.cli.serve import read
from ridgeline.cli.show import Stages
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.plural import counted
from ridgeline.core.sampling import SamplingParams
from ridgeline.llm import LLM, Completion


def parser() -> Parser:
    found = parser_for("generate", __doc__ or "", (ModelConfig, EngineConfig))
    found.add_argument("--prompt", "-p", action="append", metavar="TEXT", help="a prompt; may be repeated")
    found.add_argument("--file", metavar="FILE", help="file with one prompt per line")
    found.add_argument("--chat", action="store_true", default=False, help="send each prompt as a user's message")
    found.add_argument("--json", action="store_true", default=False, help="print one JSON object per prompt")
    add_sampling(found)
    return found


def run(given: Given) -> int:
    prompts = _prompts(given)
    sampling = SamplingParams(**{"max_tokens": 128, **read_sampling(given)})
    console = Console(stderr=True)
    resolved = read(given)
    options = {**asdict(resolved.model), **asdict(resolved.engine)}
    with Stages(console) as stages:
        llm = LLM(options.pop("model"), progress=stages, **options)
    started = time.perf_counter()
    try:
        if given.rest.chat:
            found = [llm.chat([{"role": "user", "content": prompt}], sampling) for prompt in prompts]
        else:
            found = llm.generate(prompts, sampling)
    finally:
        llm.close()
    seconds = time.perf_counter() - started
    for prompt, completion in zip(prompts, found, strict=True):
        _show(prompt, completion, as_json=given.rest.json, several=len(prompts) > 1)
    tokens = sum(len(choice.token_ids) for completion in found for choice in completion.choices)
    console.print(
        f"[dim]{counted(tokens, 'token')} in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s[/dim]", highlight=False
    )
    failed = [choice.error for completion in found for choice in completion.choices if choice.error]
    for error in dict.fromkeys(failed):
        print(f"ridgeline: {error}", file=sys.stderr)
    return 1 if failed else 0


def _prompts(given: Given) -> list[str]:
    prompts = list(getattr(given.rest, "prompt", None) or [])
    file = getattr(given.rest, "file", None)
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
            {"text": one.text, "finish_reason": one.finish, "tokens": len(one.token_ids)}
            | ({"error": one.error} if one.error else {})
            for one in completion.choices
        ]
        print(json.dumps({"prompt": prompt, "choices": choices}, ensure_ascii=False))
        return
    for choice in completion.choices:
        print(f"{prompt}{choice.text}" if several else choice.text)
