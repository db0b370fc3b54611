"""Questions with known answers, sent to a server with the OpenAI API and scored by exact rules.

A file has one JSON object per line. The request is `prompt`, which the model continues, or `messages` (with `tools`), which
the model answers as a chat. One of these keys defines the correct answer:

- `exact`: the answer without surrounding white space is one of these texts.
- `pattern`: this regular expression matches somewhere in the answer.
- `call`: the first tool call of the answer has this `name` and these `arguments`.
- `choices` and `answer` (an index in them): the continuation of `prompt` with the highest probability under the model.

`task` names the group of a question. `max_tokens` limits the answer. A chat answer that reaches the limit is wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.resources import files
from math import sqrt
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ridgeline.core.errors import ConfigError, EngineFailed
from ridgeline.quality.drift import Estimate, bootstrap_mean
from ridgeline.quality.scores import Progress
from ridgeline.quality.served import CONCURRENT_REQUESTS, Endpoint

MAX_TOKENS = 192
"""Default limit of the tokens of an answer."""
RULES = ("exact", "pattern", "call", "choices")
_KEYS = {"task", "prompt", "messages", "tools", "max_tokens", "answer", "source", "licence", *RULES}
_Z_95 = 1.959964
"""95 % of a normal distribution lie within this many standard deviations."""

Rule = Literal["exact", "pattern", "call", "choices"]


@dataclass(frozen=True, slots=True)
class Question:
    """A question with the rule that defines its correct answer."""

    task: str
    """Group of the question."""
    request: Mapping[str, Any]
    """Prompt, or messages and tools."""
    rule: Rule
    accepted: Any
    """What `rule` accepts."""
    answer: int = 0
    """For choices, the index of the correct one."""
    max_tokens: int = MAX_TOKENS


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of correct answers."""

    questions: int
    figures: Mapping[str, Estimate]
    """task_accuracy (share of correct answers). With a reference also task_accuracy_reference and task_drop (difference)."""
    by_task: Mapping[str, tuple[int, int | None, int]]
    """(questions, correct of the reference, correct) by task. Without a reference the second is None."""


def shipped_tasks() -> Path:
    """Return the packaged questions, of the kinds that the packaged model was trained to answer."""
    return Path(str(files("ridgeline").joinpath("assets", "tasks.jsonl")))


# --- the file ---------------------------------------------------------------------------------------------------------


def read_tasks(path: Path) -> list[Question]:
    """Read the questions of a file. Raises ConfigError that names the line and the key."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"Cannot read the questions of --tasks {path}: {getattr(error, 'strerror', None) or error}.", param="tasks"
        ) from None
    questions = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            questions.append(_question(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path}, line {number}: {error}", param="tasks") from None
    if not questions:
        raise ConfigError(f"{path} contains no questions.", param="tasks")
    return questions


def _question(entry: Any) -> Question:
    """Parse one line. Raises ValueError that states the mistake."""
    if not isinstance(entry, dict):
        raise ValueError("the line must be a JSON object.")
    if unknown := sorted(set(entry) - _KEYS):
        raise ValueError(f"the key {unknown[0]!r} is unknown; known keys are {', '.join(sorted(_KEYS))}.")
    if ("prompt" in entry) == ("messages" in entry):
        raise ValueError('give either "prompt" or "messages".')
    rules = [name for name in RULES if name in entry]
    if len(rules) != 1:
        raise ValueError(f"give one of {', '.join(RULES)}, which defines the correct answer.")
    rule: Rule = rules[0]  # type: ignore[assignment]
    max_tokens = entry.get("max_tokens", MAX_TOKENS)
    if not isinstance(max_tokens, int) or max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens!r}: give a whole number above 0.")
    request = {name: entry[name] for name in ("prompt", "messages", "tools") if name in entry}
    if "prompt" in request and not (isinstance(request["prompt"], str) and request["prompt"]):
        raise ValueError("prompt must be a text that is not empty.")
    _check_rule(rule, entry)
    return Question(str(entry.get("task", "all")), request, rule, entry[rule], entry.get("answer", 0), max_tokens)


def _check_rule(rule: Rule, entry: Mapping[str, Any]) -> None:
    accepted = entry[rule]
    if rule in ("exact", "choices") and not (
        isinstance(accepted, list) and accepted and all(map(_is_nonempty_text, accepted))
    ):
        raise ValueError(f"{rule} must be a list of texts that are not empty.")
    if rule == "pattern":
        try:
            re.compile(accepted)
        except (re.error, TypeError) as error:
            raise ValueError(f"pattern is not a regular expression: {error}.") from None
    if rule == "call":
        shape = (
            isinstance(accepted, dict)
            and isinstance(accepted.get("name"), str)
            and isinstance(accepted.get("arguments"), dict)
        )
        if not shape or "tools" not in entry or "messages" not in entry:
            raise ValueError(
                'call must be {"name": ..., "arguments": {...}}, and the line needs "messages" and "tools".'
            )
    if rule == "choices":
        answer = entry.get("answer")
        if "prompt" not in entry:
            raise ValueError('choices need "prompt" instead of "messages".')
        if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(accepted):
            raise ValueError(f"answer is {answer!r}: give the index of the correct choice, starting at 0.")


def _is_nonempty_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


# --- requests ---------------------------------------------------------------------------------------------------------


def ask(endpoint: Endpoint, questions: Sequence[Question], progress: Progress) -> list[bool]:
    """Return whether each greedy answer is correct. Raises EngineFailed with the server's message."""
    model = endpoint.model or endpoint.first_model()
    correct: dict[int, bool] = {}
    with ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool:
        futures = {
            pool.submit(_is_correct, endpoint, model, question): index for index, question in enumerate(questions)
        }
        try:
            for future in as_completed(futures):
                correct[futures[future]] = future.result()
                progress("tasks", len(correct), len(questions))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [correct[index] for index in range(len(questions))]


def _is_correct(endpoint: Endpoint, model: str, question: Question) -> bool:
    try:
        if question.rule == "choices":
            logprobs = [
                _choice_logprob(endpoint, model, question.request["prompt"], choice_text)
                for choice_text in question.accepted
            ]
            return logprobs.index(max(logprobs)) == question.answer
        body = {"model": model, **question.request, "max_tokens": question.max_tokens, "temperature": 0.0}
        if "prompt" in question.request:
            text = endpoint.call("/v1/completions", body)["choices"][0]["text"]
            return _matches(question, text, [])
        choice = endpoint.call("/v1/chat/completions", body)["choices"][0]
        message = choice["message"]
        finished = choice["finish_reason"] != "length"
        return finished and _matches(question, message.get("content") or "", message.get("tool_calls") or [])
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise EngineFailed(
            f"The answer of {endpoint.url} is not an answer of the OpenAI API ({type(error).__name__}: {error})."
        ) from None


def _matches(question: Question, text: str, calls: Sequence[Mapping[str, Any]]) -> bool:
    accepted = question.accepted
    if question.rule == "call":
        if not calls:
            return False
        call = calls[0]["function"]
        try:
            return bool(call["name"] == accepted["name"] and json.loads(call["arguments"]) == accepted["arguments"])
        except ValueError:
            return False
    if question.rule == "exact":
        return text.strip() in accepted
    return re.search(accepted, text) is not None


def _choice_logprob(endpoint: Endpoint, model: str, prompt: str, choice: str) -> float:
    """Return the log-probability of `choice` after `prompt` in nats, over all tokens that contain a character of it.

    Raises EngineFailed if the server does not score echoed tokens.
    """
    text = prompt + choice
    body = {"model": model, "prompt": text, "max_tokens": 1, "temperature": 0.0, "echo": True, "logprobs": 1}
    completion = endpoint.call("/v1/completions", body)["choices"][0]
    scores, text_start = completion.get("logprobs") or {}, completion["text"].find(text)
    if text_start < 0 or not scores.get("text_offset"):
        raise EngineFailed(
            f"{endpoint.url} does not score choices: its /v1/completions must support echo with logprobs."
        )
    starts = [offset - text_start for offset in scores["text_offset"]]
    values = zip(starts, [*starts[1:], len(text) + 1], scores["token_logprobs"], strict=True)
    return float(sum(value for start, end, value in values if end > len(prompt) and start < len(text)))


# --- statistics -------------------------------------------------------------------------------------------------------


def count(questions: Sequence[Question], correct: Sequence[bool], reference: Sequence[bool] | None) -> Tally:
    """Count correct answers, and compare them with a reference's answers to the same questions.

    The 95 % interval of an accuracy is Wilson's (1927). That of the drop is a paired bootstrap over questions.
    """
    figures = {"task_accuracy": _accuracy(correct)}
    if reference is not None:
        figures["task_accuracy_reference"] = _accuracy(reference)
        figures["task_drop"] = _drop(reference, correct)
    by_task: dict[str, tuple[int, int | None, int]] = {}
    for name in dict.fromkeys(question.task for question in questions):
        indices = [index for index, question in enumerate(questions) if question.task == name]
        reference_correct = None if reference is None else sum(reference[index] for index in indices)
        by_task[name] = (len(indices), reference_correct, sum(correct[index] for index in indices))
    return Tally(len(questions), figures, by_task)


def _accuracy(correct: Sequence[bool]) -> Estimate:
    total, p, z = len(correct), sum(correct) / len(correct), _Z_95
    center = (p + z * z / (2 * total)) / (1 + z * z / total)
    margin = z / (1 + z * z / total) * sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    return Estimate(p, max(0.0, center - margin), min(1.0, center + margin))


def _drop(reference: Sequence[bool], correct: Sequence[bool]) -> Estimate:
    return bootstrap_mean(np.array(reference, np.float64) - np.array(correct, np.float64))
