"""Compare a candidate model with a reference: perplexity and drift on fixed texts, questions with known answers, and limits
for CI.

REFERENCE and CANDIDATE are model folders, hub names, or addresses (http://...) of servers of the OpenAI API; REFERENCE may
also be a file that --save-reference wrote. The exit status is 1 if a limit is broken. The KL divergence uses the most probable
tokens that both models report (--top) and treats all other tokens as one. It is a lower bound, close to the true value for
20 tokens. --recall N measures on generated windows of N tokens how well both models read numbers back from a list. Questions
(--tasks) are sent through the API; for that, a model folder is served on a port of this machine.
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

from ridgeline.cli.flags import Arguments, Parser, check_output_paths, finite_number, parser_for, whole_number
from ridgeline.cli.hosted import Hosted, private
from ridgeline.cli.progress import find_model
from ridgeline.cli.serve import resolve_arguments
from ridgeline.cli.show import Stages, announcer
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import ConfigError, EngineFailed
from ridgeline.core.plural import counted
from ridgeline.core.sampling import MAX_LOGPROBS
from ridgeline.engine.local import LocalEngine
from ridgeline.models.config import read_model
from ridgeline.models.hub import resolve_model
from ridgeline.quality.drift import Drift, Estimate, by_document, measure, token_drift
from ridgeline.quality.recall import RecallWindow, measure_recall, recall_windows
from ridgeline.quality.scores import EngineScorer, Scorer, Scores, StoredScorer, store
from ridgeline.quality.served import Endpoint, ServerScorer
from ridgeline.quality.tasks import Question, Tally, ask, count, read_tasks
from ridgeline.quality.texts import Window, read_texts, windows
from ridgeline.quality.verdict import LIMITS, UNITS, Check, Comparison, check_limits, judge, report
from ridgeline.text.tokenizer import Tokenizer

WINDOW = 1024
RECALL_PAIRS, RECALL_WINDOWS = 16, 16
_SCHEMES = ("http://", "https://")
_SHOWN = {
    "perplexity_reference": ("perplexity of the reference", "{:.4f}"),
    "perplexity": ("perplexity of the candidate", "{:.4f}"),
    "perplexity_change": ("change of perplexity", "{:+.3%}"),
    "kl": ("KL, nats per token", "{:.5f}"),
    "kl_p99": ("KL, 99th percentile", "{:.4f}"),
    "top1": ("same most probable token", "{:.3%}"),
    "logprob_change": ("change of log-probability", "{:+.5f}"),
    "recall_accuracy_reference": ("recalled numbers of the reference", "{:.2%}"),
    "recall_accuracy": ("recalled numbers of the candidate", "{:.2%}"),
    "recall_probability_reference": ("probability of a number, reference", "{:.2%}"),
    "recall_probability": ("probability of a number, candidate", "{:.2%}"),
    "task_accuracy_reference": ("correct answers of the reference", "{:.2%}"),
    "task_accuracy": ("correct answers of the candidate", "{:.2%}"),
    "task_drop": ("loss of correct answers", "{:+.2%}"),
}


def parser() -> Parser:
    parser = parser_for("compare", __doc__ or "", (EngineConfig,), model=False)
    parser.add_argument(
        "reference", metavar="REFERENCE", help="folder, hub name, address of a server, or stored scores"
    )
    parser.add_argument("candidate", metavar="CANDIDATE", nargs="?", help="folder, hub name, or address of a server")
    texts = parser.add_argument_group("texts")
    texts.add_argument("--text", metavar="FILE", help='text file, or JSON lines with the key "text"')
    texts.add_argument(
        "--window", type=whole_number, metavar="N", help=f"tokens scored in one sequence (default: {WINDOW})"
    )
    texts.add_argument(
        "--overlap",
        type=whole_number,
        metavar="N",
        help="tokens at the start of a window that repeat the end of the previous one (default: 0)",
    )
    texts.add_argument(
        "--recall",
        type=whole_number,
        metavar="N",
        help=f"instead of --text: {RECALL_WINDOWS} windows of N tokens, each with a list of {RECALL_PAIRS} numbers to read back",
    )
    texts.add_argument(
        "--tasks", metavar="FILE", help="JSON lines with questions and their answers (docs/compression.md)"
    )
    texts.add_argument(
        "--limit-tokens",
        type=whole_number,
        metavar="N",
        help="stop after the window in which this number of tokens is reached",
    )
    _add_models(parser)
    limits = parser.add_argument_group("limits")
    for name, (figure, side) in LIMITS.items():
        help_text = f"fail if {figure} ({UNITS[figure]}) is {'above' if side == 'max' else 'below'} this"
        limits.add_argument(f"--{name.replace('_', '-')}", type=finite_number, metavar="X", help=help_text)
    parser.add_argument("--json", action="store_true", default=False, help="print one JSON object instead of a table")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON to a file")
    return parser


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
        type=whole_number,
        metavar="N",
        help=f"number of most probable tokens compared at each position (default: {MAX_LOGPROBS})",
    )
    models.add_argument(
        "--save-reference",
        metavar="FILE",
        help="write the scores of the reference to a file; CANDIDATE may be left out",
    )


def run(args: Arguments) -> int:
    options = vars(args.options)
    candidate, save_path = options.get("candidate"), options.get("save_reference")
    check_output_paths(options, "out", "save_reference")
    if candidate is None and save_path is None:
        raise ConfigError("There is no candidate to compare: give CANDIDATE or --save-reference FILE.")
    top = options.get("top", MAX_LOGPROBS)
    if not 1 <= top <= MAX_LOGPROBS:
        raise ConfigError(f"--top is {top}: give a whole number from 1 to {MAX_LOGPROBS}.", param="top")
    questions = read_tasks(Path(options["tasks"])) if "tasks" in options and candidate is not None else []
    limits = {name: options[name] for name in LIMITS if name in options}
    if candidate is None and limits:
        raise ConfigError("Limits need a candidate: give CANDIDATE.", param=next(iter(limits)))
    sides = Sides(args, options)
    check_limits(limits, texts=sides.has_texts, tasks=bool(questions), drop=not sides.is_stored)
    sides.check_servers()
    with Stages(Console(stderr=True)) as stages:
        drift = None
        if not questions or sides.has_texts:
            drift = _drift(sides, top, stages)
        tally = sides.answer_questions(questions, stages) if questions else None
    if candidate is None:
        return 0
    comparison = Comparison(options["reference"], candidate, top, drift, tally)
    checks = judge(comparison.figures, limits)
    summary = report(comparison, checks)
    if "out" in options:
        Path(options["out"]).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    if options["json"]:
        print(json.dumps(summary))
    else:
        show(Console(), comparison, checks)
    return 0 if summary["passed"] else 1


def _drift(sides: Sides, top: int, stages: Stages) -> Drift | None:
    """Score the texts with both models and compare. None if there is no candidate.

    Also saves the scores of the reference if --save-reference is given.
    """
    sequences = sides.windows()
    reference = sides.scores("reference", sequences, top, stages)
    sides.save_reference(sequences, reference)
    if not sides.has_candidate:
        return None
    candidate = sides.scores("candidate", sequences, top, stages)
    drifts = [
        token_drift(reference_scores, candidate_scores)
        for reference_scores, candidate_scores in zip(reference, candidate, strict=True)
    ]
    drift = measure(by_document(drifts, [window.document for window in sequences]))
    return replace(drift, figures={**drift.figures, **_recall_figures(sides.recall, reference, candidate)})


def _recall_figures(
    windows: list[RecallWindow], reference: list[Scores], candidate: list[Scores]
) -> dict[str, Estimate]:
    """Return the figures of --recall; none without windows."""
    if not windows:
        return {}
    before, after = measure_recall(windows, reference), measure_recall(windows, candidate)
    return {
        "recall_accuracy_reference": before.accuracy,
        "recall_accuracy": after.accuracy,
        "recall_probability_reference": before.probability,
        "recall_probability": after.probability,
    }


class Sides:
    """Reference and candidate of a comparison, one in memory at a time, and the sequences that both score."""

    def __init__(self, args: Arguments, options: Mapping[str, Any]) -> None:
        self._resolved = resolve_arguments(args)
        self._options = options
        self._stored: StoredScorer | None = None
        source = Path(options["reference"])
        if source.is_file():
            self._stored = StoredScorer(source)
        self._check()

    def _check(self) -> None:
        """Raise ConfigError for an option that is out of range or would have no effect."""
        options = self._options
        if "recall" in options and "text" in options:
            raise ConfigError("--recall generates its own texts: leave --text out.", param="recall")
        for name, minimum in (("window", 2), ("overlap", 0), ("limit_tokens", 1)):
            if name not in options:
                continue
            flag = f"--{name.replace('_', '-')}"
            if options[name] < minimum:
                raise ConfigError(f"{flag} is {options[name]}: give {minimum} or more.", param=name)
            if "text" not in options and self._stored is None:
                raise ConfigError(f"{flag} applies to texts: give --text FILE.", param=name)
        for side in ("reference", "candidate"):
            for name in (f"{side}_model", f"{side}_key_env"):
                if name in options and not str(options.get(side)).startswith(_SCHEMES):
                    raise ConfigError(
                        f"--{name.replace('_', '-')} applies to a server, and {side.upper()} is not a URL: leave it out.",
                        param=name,
                    )
            variable = options.get(f"{side}_key_env")
            if variable is not None and not os.environ.get(variable):
                raise ConfigError(
                    f"The environment variable {variable} is not set: set it to the API key of the server.",
                    param=f"{side}_key_env",
                )

    def check_servers(self) -> None:
        """Raise ConfigError for a server that does not answer, before any model is loaded."""
        for side in ("reference", "candidate"):
            if str(self._options.get(side)).startswith(_SCHEMES):
                try:
                    self._endpoint(side).call("/v1/models")
                except EngineFailed as error:
                    raise ConfigError(error.message, param=side) from None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self._tokenizer_folder())

    @property
    def has_texts(self) -> bool:
        """Whether there are texts to score: those of --text or --recall, or those of stored scores."""
        return "text" in self._options or "recall" in self._options or self._stored is not None

    @property
    def has_candidate(self) -> bool:
        return "candidate" in self._options

    @property
    def is_stored(self) -> bool:
        """Whether the reference is a file of scores. Such a reference cannot answer questions."""
        return self._stored is not None

    def save_reference(self, sequences: list[Window], scores: list[Scores]) -> None:
        """Write the scores of the reference to the file that --save-reference names, if any."""
        if "save_reference" in self._options:
            store(Path(self._options["save_reference"]), self._options["reference"], sequences, scores)

    @cached_property
    def recall(self) -> list[RecallWindow]:
        """The windows of --recall; empty without the option."""
        if "recall" not in self._options:
            return []
        length = self._fitting("recall", self._options["recall"])
        return recall_windows(self.tokenizer, RECALL_PAIRS, [length] * RECALL_WINDOWS)

    def windows(self) -> list[Window]:
        options = self._options
        if self.recall:
            return [window.window for window in self.recall]
        if "text" not in options:
            if self._stored is None:
                raise ConfigError(
                    "There is nothing to compare: give --text FILE, --recall N or --tasks FILE.", param="text"
                )
            return self._stored.windows()
        length = self._fitting("window", options.get("window", WINDOW))
        texts = read_texts(Path(options["text"]))
        tokenizer = self.tokenizer
        sequences = windows(
            texts, lambda text: tokenizer.encode(text, add_special_tokens=True), length, options.get("overlap", 0)
        )
        if not sequences:
            raise ConfigError(
                f"--text {options['text']} is too short to score: give a text of at least 2 tokens.", param="text"
            )
        kept, tokens = [], 0
        for sequence in sequences:
            if tokens < options.get("limit_tokens", 1 << 60):
                kept.append(sequence)
                tokens += sequence.tokens
        return kept

    def _fitting(self, name: str, length: int) -> int:
        """Return the length limited to the contexts of both models. Raises ConfigError if the option `name` exceeds it."""
        for side in ("reference", "candidate"):
            with suppress(_NoFolder):
                limit = read_model(self._folder(side))[0].max_len - 1
                if name in self._options and length > limit:
                    raise ConfigError(
                        f"--{name} is {length}: give at most {limit}, so that it fits into the context of the model.",
                        param=name,
                    )
                length = min(length, limit)
        return length

    def scores(self, side: str, sequences: list[Window], top: int, stages: Stages) -> list[Scores]:
        """Score the sequences with one model. Raises ConfigError or EngineFailed."""
        source = self._options[side]
        if side == "reference" and self._stored is not None:
            return self._stored.score(sequences, top, stages)
        if source.startswith(_SCHEMES):
            scorer: Scorer = ServerScorer(self._endpoint(side), self.tokenizer)
            return scorer.score(sequences, top, stages)
        model = replace(self._model(side), max_model_len=max(len(window.ids) for window in sequences) + 1)
        engine = LocalEngine.start(model, self._resolved.engine, stages)
        try:
            return EngineScorer(source, engine).score(sequences, top, stages)
        finally:
            engine.close()

    def answer_questions(self, questions: list[Question], stages: Stages) -> Tally:
        """Count correct answers of both models. A stored reference has none."""
        reference = None if self.is_stored else self._ask("reference", questions, stages)
        return count(questions, self._ask("candidate", questions, stages), reference)

    def _ask(self, side: str, questions: list[Question], stages: Stages) -> list[bool]:
        if self._options[side].startswith(_SCHEMES):
            return ask(self._endpoint(side), questions, stages)
        with Hosted(private(replace(self._resolved, model=self._model(side))), stages) as url:
            return ask(Endpoint(url), questions, stages)

    def _endpoint(self, side: str) -> Endpoint:
        key = os.environ.get(self._options.get(f"{side}_key_env", ""), "")
        return Endpoint(self._options[side], self._options.get(f"{side}_model", ""), key)

    def _model(self, side: str) -> ModelConfig:
        """Configuration of a model that runs in this process. --quantization applies to the candidate only."""
        config = self._resolved.model
        quantization = config.quantization if side == "candidate" else ""
        return replace(config, model=self._options[side], quantization=quantization)

    def _folder(self, side: str) -> Path:
        source = self._options.get(side)
        if source is None or source.startswith(_SCHEMES) or (side == "reference" and self._stored is not None):
            raise _NoFolder
        return find_model(self._model(side), announcer("text"))

    def _tokenizer_folder(self) -> Path:
        if "tokenizer" in self._options:
            return resolve_model(ModelConfig(model=self._options["tokenizer"], load_format="dummy"))
        for side in ("reference", "candidate"):
            with suppress(_NoFolder):
                return self._folder(side)
        raise ConfigError(
            "The tokenizer is unknown, because no model folder is given: give --tokenizer FOLDER.", param="tokenizer"
        )


class _NoFolder(Exception):
    """Raised for a side that is not a model folder: a server, a stored reference, or none."""


def show(console: Console, comparison: Comparison, checks: list[Check]) -> None:
    """Print the figures with their confidence intervals, and the result of each limit."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    figures, drift, tasks = comparison.figures, comparison.drift, comparison.tasks
    for name, (label, template) in _SHOWN.items():
        if (estimate := figures.get(name)) is None:
            continue
        interval = (
            ""
            if estimate.low is None or estimate.high is None
            else f"{template.format(estimate.low)} .. {template.format(estimate.high)}"
        )
        # + 0.0 turns -0.0 into 0.0.
        table.add_row(label, template.format(estimate.value + 0.0), f"[dim]{interval}[/dim]")
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
        has_interval = figures[LIMITS[check.limit][0]].low is not None
        note = " [dim](uncertain: the limit is inside the interval)[/dim]" if has_interval and not check.certain else ""
        flag = escape(f"--{check.limit.replace('_', '-')} {check.bound:g}")
        console.print(f"{word}  {flag}: {check.value:.5g}{note}", highlight=False)
