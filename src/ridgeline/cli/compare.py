"""Compare a candidate model with a reference: perplexity and drift on fixed texts, questions with known answers, and limits
for CI.

REFERENCE and CANDIDATE are model folders, hub names, or addresses (http://...) of servers of the OpenAI API; REFERENCE may
also be a file that --save-reference wrote. The exit status is 1 if a limit is broken. The divergence uses the most probable
tokens that both sides report (--top) and treats all others as one token: it is a lower bound, close to the true value for
20 tokens. Questions (--tasks) are asked through the API; for that, a model folder is served on a port of this machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ridgeline.cli.flags import Given, Parser, check_places, finite, parser_for, whole
from ridgeline.cli.hosted import Hosted, private
from ridgeline.cli.serve import read
from ridgeline.cli.show import Stages
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import ConfigError, EngineFailed
from ridgeline.core.plural import counted
from ridgeline.core.sampling import MAX_LOGPROBS
from ridgeline.engine.local import LocalEngine
from ridgeline.models.config import read_model
from ridgeline.models.hub import resolve_model
from ridgeline.quality.drift import Drift, by_document, measure, token_drift
from ridgeline.quality.scores import EngineScorer, Scorer, Scores, StoredScorer, store
from ridgeline.quality.served import Endpoint, ServerScorer
from ridgeline.quality.tasks import Question, Tally, ask, count, read_tasks
from ridgeline.quality.texts import Window, read_texts, windows
from ridgeline.quality.verdict import LIMITS, Check, Comparison, check_limits, judge, report
from ridgeline.text.tokenizer import Tokenizer

WINDOW = 1024
_SCHEMES = ("http://", "https://")
_SHOWN = {
    "perplexity_reference": ("perplexity of the reference", "{:.4f}"),
    "perplexity": ("perplexity of the candidate", "{:.4f}"),
    "perplexity_change": ("change of perplexity", "{:+.3%}"),
    "kl": ("KL, nats per token", "{:.5f}"),
    "kl_p99": ("KL, 99th percentile", "{:.4f}"),
    "top1": ("same most probable token", "{:.3%}"),
    "logprob_change": ("change of log-probability", "{:+.5f}"),
    "task_accuracy_reference": ("correct answers of the reference", "{:.2%}"),
    "task_accuracy": ("correct answers of the candidate", "{:.2%}"),
    "task_drop": ("loss of correct answers", "{:+.2%}"),
}


def parser() -> Parser:
    found = parser_for("compare", __doc__ or "", (EngineConfig,), model=False)
    found.add_argument("reference", metavar="REFERENCE", help="folder, hub name, address of a server, or stored scores")
    found.add_argument("candidate", metavar="CANDIDATE", nargs="?", help="folder, hub name, or address of a server")
    text = found.add_argument_group("texts")
    text.add_argument("--text", metavar="FILE", help='text file, or JSON lines with the key "text"')
    text.add_argument("--window", type=whole, metavar="N", help=f"tokens scored in one sequence (default: {WINDOW})")
    text.add_argument(
        "--overlap",
        type=whole,
        metavar="N",
        help="tokens at the start of a window that repeat the end of the previous one (default: 0)",
    )
    text.add_argument(
        "--tasks", metavar="FILE", help="JSON lines with questions and their answers (docs/compression.md)"
    )
    text.add_argument(
        "--limit-tokens",
        type=whole,
        metavar="N",
        help="stop after the window in which this number of tokens is reached",
    )
    _add_models(found)
    limits = found.add_argument_group("limits")
    for name, (figure, side) in LIMITS.items():
        words = f"fail if {figure} is {'above' if side == 'max' else 'below'} this"
        limits.add_argument(f"--{name.replace('_', '-')}", type=finite, metavar="X", help=words)
    found.add_argument("--json", action="store_true", default=False, help="print one JSON object instead of a table")
    found.add_argument("--out", metavar="FILE", help="also write the JSON to a file")
    return found


def _add_models(parser: Parser) -> None:
    models = parser.add_argument_group("models")
    models.add_argument(
        "--dtype", metavar="NAME", help="dtype of models that run in this process: auto, bfloat16, float16 or float32"
    )
    models.add_argument("--quantization", metavar="NAME", help="number format of a candidate that runs in this process")
    models.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        help="model folder whose tokenizer is used (default: the first model folder given)",
    )
    models.add_argument(
        "--reference-model", metavar="NAME", help="name of the model on the reference server (default: its first model)"
    )
    models.add_argument(
        "--candidate-model", metavar="NAME", help="name of the model on the candidate server (default: its first model)"
    )
    models.add_argument(
        "--reference-key-env", metavar="NAME", help="environment variable with the API key of the reference server"
    )
    models.add_argument(
        "--candidate-key-env", metavar="NAME", help="environment variable with the API key of the candidate server"
    )
    models.add_argument(
        "--top",
        type=whole,
        metavar="N",
        help=f"most probable tokens compared at each position (default: {MAX_LOGPROBS})",
    )
    models.add_argument(
        "--save-reference",
        metavar="FILE",
        help="write the scores of the reference to a file; CANDIDATE may be left out",
    )


def run(given: Given) -> int:
    rest = vars(given.rest)
    candidate, save = rest.get("candidate"), rest.get("save_reference")
    check_places(rest, "out", "save_reference")
    if candidate is None and save is None:
        raise ConfigError("There is no candidate to compare: give CANDIDATE or --save-reference FILE.")
    top = rest.get("top", MAX_LOGPROBS)
    if not 1 <= top <= MAX_LOGPROBS:
        raise ConfigError(f"--top is {top}: give a whole number from 1 to {MAX_LOGPROBS}.", param="top")
    questions = read_tasks(Path(rest["tasks"])) if "tasks" in rest and candidate is not None else []
    limits = {name: rest[name] for name in LIMITS if name in rest}
    if candidate is None and limits:
        raise ConfigError("Limits need a candidate: give CANDIDATE.", param=next(iter(limits)))
    sides = Sides(given, rest)
    check_limits(limits, texts=sides.has_texts, tasks=bool(questions), drop=not sides.is_stored)
    sides.reach()
    with Stages(Console(stderr=True)) as stages:
        drift = None
        if not questions or sides.has_texts:
            drift = _drift(sides, top, stages)
        tasks = sides.answered(questions, stages) if questions else None
    if candidate is None:
        return 0
    found = Comparison(rest["reference"], candidate, top, drift, tasks)
    checks = judge(found.figures, limits)
    told = report(found, checks)
    if "out" in rest:
        Path(rest["out"]).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    if rest["json"]:
        print(json.dumps(told))
    else:
        show(Console(), found, checks)
    return 0 if told["passed"] else 1


def _drift(sides: Sides, top: int, stages: Stages) -> Drift | None:
    """What both say of the texts; None where only a reference was wanted, which is kept."""
    sequences = sides.windows()
    reference = sides.scores("reference", sequences, top, stages)
    sides.keep(sequences, reference)
    if not sides.has_candidate:
        return None
    other = sides.scores("candidate", sequences, top, stages)
    parts = [token_drift(ours, theirs) for ours, theirs in zip(reference, other, strict=True)]
    return measure(by_document(parts, [one.document for one in sequences]))


class Sides:
    """The two models of a comparison, one in memory at a time, and the sequences both are asked about."""

    def __init__(self, given: Given, rest: Mapping[str, Any]) -> None:
        self._resolved = read(given)
        self._rest = rest
        self._stored: StoredScorer | None = None
        named = Path(rest["reference"])
        if named.is_file():
            self._stored = StoredScorer(named)
        self._check()

    def _check(self) -> None:
        """Raise ConfigError for an option that cannot be meant, or that nobody would read."""
        rest = self._rest
        for name, least in (("window", 2), ("overlap", 0), ("limit_tokens", 1)):
            if name not in rest:
                continue
            flag = f"--{name.replace('_', '-')}"
            if rest[name] < least:
                raise ConfigError(f"{flag} is {rest[name]}: give {least} or more.", param=name)
            if "text" not in rest and self._stored is None:
                raise ConfigError(f"{flag} applies to texts: give --text FILE.", param=name)
        for side in ("reference", "candidate"):
            for name in (f"{side}_model", f"{side}_key_env"):
                if name in rest and not str(rest.get(side)).startswith(_SCHEMES):
                    raise ConfigError(
                        f"--{name.replace('_', '-')} applies to a server, and {side.upper()} is not a URL: leave it out.",
                        param=name,
                    )
            variable = rest.get(f"{side}_key_env")
            if variable is not None and not os.environ.get(variable):
                raise ConfigError(
                    f"The environment variable {variable} is not set: set it to the API key of the server.",
                    param=f"{side}_key_env",
                )

    def reach(self) -> None:
        """Raise ConfigError for a server that does not answer, before a model is loaded to be compared with it."""
        for side in ("reference", "candidate"):
            if str(self._rest.get(side)).startswith(_SCHEMES):
                try:
                    self._endpoint(side).call("/v1/models")
                except EngineFailed as error:
                    raise ConfigError(error.message, param=side) from None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self._tokenizer_folder())

    @property
    def has_texts(self) -> bool:
        """Whether there is something to score: texts that were given, or those of stored scores."""
        return "text" in self._rest or self._stored is not None

    @property
    def has_candidate(self) -> bool:
        return "candidate" in self._rest

    @property
    def is_stored(self) -> bool:
        """Whether the reference is a file, which answers no questions."""
        return self._stored is not None

    def keep(self, sequences: list[Window], scores: list[Scores]) -> None:
        """Write the reference's scores where --save-reference says."""
        if "save_reference" in self._rest:
            store(Path(self._rest["save_reference"]), self._rest["reference"], sequences, scores)

    def windows(self) -> list[Window]:
        rest = self._rest
        if "text" not in rest:
            if self._stored is None:
                raise ConfigError("There is nothing to compare: give --text FILE or --tasks FILE.", param="text")
            return self._stored.windows()
        longest = rest.get("window", WINDOW)
        for side in ("reference", "candidate"):
            with suppress(_NotHere):
                most = read_model(self._folder(side))[0].max_len - 1
                if "window" in rest and longest > most:
                    raise ConfigError(
                        f"--window is {longest}: give at most {most}, what fits into the context of the model.",
                        param="window",
                    )
                longest = min(longest, most)
        texts = read_texts(Path(rest["text"]))
        tokenizer = self.tokenizer
        found = windows(
            texts, lambda one: tokenizer.encode(one, add_special_tokens=True), longest, rest.get("overlap", 0)
        )
        if not found:
            raise ConfigError(
                f"--text {rest['text']} is too short to score: give a text of at least 2 tokens.", param="text"
            )
        kept, tokens = [], 0
        for one in found:
            if tokens < rest.get("limit_tokens", 1 << 60):
                kept.append(one)
                tokens += one.tokens
        return kept

    def scores(self, side: str, sequences: list[Window], top: int, stages: Stages) -> list[Scores]:
        """What the side says of the sequences. Raises ConfigError or EngineFailed."""
        named = self._rest[side]
        if side == "reference" and self._stored is not None:
            return self._stored.score(sequences, top, stages)
        if named.startswith(_SCHEMES):
            scorer: Scorer = ServerScorer(self._endpoint(side), self.tokenizer)
            return scorer.score(sequences, top, stages)
        model = replace(self._model(side), max_model_len=max(len(one.ids) for one in sequences) + 1)
        engine = LocalEngine.start(model, self._resolved.engine, stages)
        try:
            return EngineScorer(named, engine).score(sequences, top, stages)
        finally:
            engine.close()

    def answered(self, questions: list[Question], stages: Stages) -> Tally:
        """How many questions each side answers rightly; a stored reference answers none."""
        reference = None if self.is_stored else self._ask("reference", questions, stages)
        return count(questions, self._ask("candidate", questions, stages), reference)

    def _ask(self, side: str, questions: list[Question], stages: Stages) -> list[bool]:
        if self._rest[side].startswith(_SCHEMES):
            return ask(self._endpoint(side), questions, stages)
        with Hosted(private(replace(self._resolved, model=self._model(side))), stages) as url:
            return ask(Endpoint(url), questions, stages)

    def _endpoint(self, side: str) -> Endpoint:
        key = os.environ.get(self._rest.get(f"{side}_key_env", ""), "")
        return Endpoint(self._rest[side], self._rest.get(f"{side}_model", ""), key)

    def _model(self, side: str) -> ModelConfig:
        """What the options say of a side in this process; the number format is the candidate's alone."""
        plain = self._resolved.model
        quantization = plain.quantization if side == "candidate" else ""
        return replace(plain, model=self._rest[side], quantization=quantization)

    def _folder(self, side: str) -> Path:
        named = self._rest.get(side)
        if named is None or named.startswith(_SCHEMES) or (side == "reference" and self._stored is not None):
            raise _NotHere
        return resolve_model(self._model(side))

    def _tokenizer_folder(self) -> Path:
        if "tokenizer" in self._rest:
            return resolve_model(ModelConfig(model=self._rest["tokenizer"], load_format="dummy"))
        for side in ("reference", "candidate"):
            with suppress(_NotHere):
                return self._folder(side)
        raise ConfigError(
            "The tokenizer is unknown, because no model folder is given: give --tokenizer FOLDER.", param="tokenizer"
        )


class _NotHere(Exception):
    """A side of which no folder is known."""


def show(console: Console, found: Comparison, checks: list[Check]) -> None:
    """The figures with their intervals, and what the limits say."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    figures, drift, tasks = found.figures, found.drift, found.tasks
    for name, (words, form) in _SHOWN.items():
        if (one := figures.get(name)) is None:
            continue
        interval = "" if one.low is None or one.high is None else f"{form.format(one.low)} .. {form.format(one.high)}"
        table.add_row(words, form.format(one.value + 0.0), f"[dim]{interval}[/dim]")  # nothing is not less than nothing
    console.print(table)
    if drift is not None:
        console.print(
            f"[dim]{counted(drift.tokens, 'token')} of {counted(drift.documents, 'document')}; 95 % intervals over documents[/dim]"
        )
    if tasks is not None:
        rows = (
            f"{name} {after}/{asked}" if before is None else f"{name} {before} to {after} of {asked}"
            for name, (asked, before, after) in tasks.by_task.items()
        )
        console.print(f"[dim]{counted(tasks.questions, 'question')}: {', '.join(rows)}[/dim]", highlight=False)
    for check in checks:
        word = "[green]kept[/green]" if check.passed else "[red]broken[/red]"
        known = figures[LIMITS[check.limit][0]].low is not None
        doubt = " [dim](uncertain: the limit is inside the interval)[/dim]" if known and not check.certain else ""
        flag = escape(f"--{check.limit.replace('_', '-')} {check.bound:g}")
        console.print(f"{word}  {flag}: {check.value:.5g}{doubt}", highlight=False)
