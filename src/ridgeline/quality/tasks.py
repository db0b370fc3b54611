"""Questions with known answers, asked of a server of the OpenAI API as any client would ask them, and scored by exact rules.

A file has one JSON object per line. What is asked: `prompt`, continued as text, or `messages` (with `tools`), answered as a
chat. What is right, one of:

- `exact`: the answer, white space around it dropped, is one of these texts.
- `pattern`: this regular expression is found in the answer.
- `call`: the answer's first tool call is of this `name` with these `arguments`.
- `choices` and `answer` (a place in them): the continuation of `prompt` to which the model gives the highest probability.

`task` names the group a question counts in; `max_tokens` ends an answer. A chat answer that is cut there is wrong.
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
from ridgeline.quality.drift import CONFIDENCE, RESAMPLES, Estimate
from ridgeline.quality.scores import Progress
from ridgeline.quality.served import AT_ONCE, Endpoint

MAX_TOKENS = 192
"""Tokens of an answer, where a question does not say how many."""
RULES = ("exact", "pattern", "call", "choices")
_MEMBERS = {"task", "prompt", "messages", "tools", "max_tokens", "answer", "source", "licence", *RULES}
_NORMAL = 1.959964
"""Of a normal distribution, 95 % lie within so many standard deviations."""

Rule = Literal["exact", "pattern", "call", "choices"]


@dataclass(frozen=True, slots=True)
class Question:
    """task: the group it counts in. asked: prompt, or messages and tools. right: what `rule` accepts.

    answer: for choices, the place of the right one.
    """

    task: str
    asked: Mapping[str, Any]
    rule: Rule
    right: Any
    answer: int = 0
    max_tokens: int = MAX_TOKENS


@dataclass(frozen=True, slots=True)
class Tally:
    """figures: task_accuracy (share of questions answered rightly), and where a reference was asked too,
    task_accuracy_reference and task_drop (share that it has more). by_task: task -> (asked, right of the reference, right);
    the reference's is None where none was asked.
    """

    asked: int
    figures: Mapping[str, Estimate]
    by_task: Mapping[str, tuple[int, int | None, int]]


def shipped_tasks() -> Path:
    """Questions of the kinds that the model shipped with Ridgeline was trained to answer."""
    return Path(str(files("ridgeline").joinpath("assets", "tasks.jsonl")))


# --- the file ---------------------------------------------------------------------------------------------------------


def read_tasks(path: Path) -> list[Question]:
    """The questions of a file. Raises ConfigError naming line and member."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"Cannot read the questions of --tasks {path}: {getattr(error, 'strerror', None) or error}.", param="tasks"
        ) from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(_question(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path}, line {number}: {error}", param="tasks") from None
    if not found:
        raise ConfigError(f"{path} contains no questions.", param="tasks")
    return found


def _question(said: Any) -> Question:
    """Raises ValueError with what is wrong."""
    if not isinstance(said, dict):
        raise ValueError("the line must be a JSON object.")
    if unknown := sorted(set(said) - _MEMBERS):
        raise ValueError(f"the key {unknown[0]!r} is unknown; known keys are {', '.join(sorted(_MEMBERS))}.")
    if ("prompt" in said) == ("messages" in said):
        raise ValueError('give either "prompt" or "messages".')
    rules = [one for one in RULES if one in said]
    if len(rules) != 1:
        raise ValueError(f"give one of {', '.join(RULES)}, which defines the correct answer.")
    rule: Rule = rules[0]  # type: ignore[assignment]
    most = said.get("max_tokens", MAX_TOKENS)
    if not isinstance(most, int) or most < 1:
        raise ValueError(f"max_tokens is {most!r}: give a whole number above 0.")
    asked = {name: said[name] for name in ("prompt", "messages", "tools") if name in said}
    if "prompt" in asked and not (isinstance(asked["prompt"], str) and asked["prompt"]):
        raise ValueError("prompt must be a text that is not empty.")
    _check_rule(rule, said)
    return Question(str(said.get("task", "all")), asked, rule, said[rule], said.get("answer", 0), most)


def _check_rule(rule: Rule, said: Mapping[str, Any]) -> None:
    right = said[rule]
    if rule in ("exact", "choices") and not (isinstance(right, list) and right and all(map(_is_text, right))):
        raise ValueError(f"{rule} must be a list of texts that are not empty.")
    if rule == "pattern":
        try:
            re.compile(right)
        except (re.error, TypeError) as error:
            raise ValueError(f"pattern is not a regular expression: {error}.") from None
    if rule == "call":
        shape = (
            isinstance(right, dict) and isinstance(right.get("name"), str) and isinstance(right.get("arguments"), dict)
        )
        if not shape or "tools" not in said or "messages" not in said:
            raise ValueError(
                'call must be {"name": ..., "arguments": {...}}, and the line needs "messages" and "tools".'
            )
    if rule == "choices":
        answer = said.get("answer")
        if "prompt" not in said:
            raise ValueError('choices need "prompt" instead of "messages".')
        if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(right):
            raise ValueError(f"answer is {answer!r}: give the index of the correct choice, starting at 0.")


def _is_text(one: Any) -> bool:
    return isinstance(one, str) and bool(one)


# --- asking -----------------------------------------------------------------------------------------------------------


def ask(endpoint: Endpoint, questions: Sequence[Question], progress: Progress) -> list[bool]:
    """Whether each question is answered rightly, greedily. Raises EngineFailed with what the server said."""
    model = endpoint.model or endpoint.first_model()
    found: dict[int, bool] = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        waiting = {pool.submit(_is_right, endpoint, model, one): place for place, one in enumerate(questions)}
        try:
            for one in as_completed(waiting):
                found[waiting[one]] = one.result()
                progress("tasks", len(found), len(questions))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [found[place] for place in range(len(questions))]


def _is_right(endpoint: Endpoint, model: str, question: Question) -> bool:
    try:
        if question.rule == "choices":
            weights = [_likelihood(endpoint, model, question.asked["prompt"], one) for one in question.right]
            return weights.index(max(weights)) == question.answer
        body = {"model": model, **question.asked, "max_tokens": question.max_tokens, "temperature": 0.0}
        if "prompt" in question.asked:
            text = endpoint.call("/v1/completions", body)["choices"][0]["text"]
            return _accepts(question, text, [])
        choice = endpoint.call("/v1/chat/completions", body)["choices"][0]
        message = choice["message"]
        ended = choice["finish_reason"] != "length"
        return ended and _accepts(question, message.get("content") or "", message.get("tool_calls") or [])
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise EngineFailed(
            f"The answer of {endpoint.url} is not an answer of the OpenAI API ({type(error).__name__}: {error})."
        ) from None


def _accepts(question: Question, text: str, calls: Sequence[Mapping[str, Any]]) -> bool:
    right = question.right
    if question.rule == "call":
        if not calls:
            return False
        made = calls[0]["function"]
        try:
            return bool(made["name"] == right["name"] and json.loads(made["arguments"]) == right["arguments"])
        except ValueError:
            return False
    if question.rule == "exact":
        return text.strip() in right
    return re.search(right, text) is not None


def _likelihood(endpoint: Endpoint, model: str, prompt: str, choice: str) -> float:
    """Log-probability of `choice` behind `prompt`, in nats: of every token that holds a character of it.

    Raises EngineFailed for a server that does not score what it echoes.
    """
    whole = prompt + choice
    body = {"model": model, "prompt": whole, "max_tokens": 1, "temperature": 0.0, "echo": True, "logprobs": 1}
    said = endpoint.call("/v1/completions", body)["choices"][0]
    scores, begun = said.get("logprobs") or {}, said["text"].find(whole)
    if begun < 0 or not scores.get("text_offset"):
        raise EngineFailed(
            f"{endpoint.url} does not score choices: its /v1/completions must support echo with logprobs."
        )
    starts = [one - begun for one in scores["text_offset"]]
    values = zip(starts, [*starts[1:], len(whole) + 1], scores["token_logprobs"], strict=True)
    return float(sum(value for start, end, value in values if end > len(prompt) and start < len(whole)))


# --- counting ---------------------------------------------------------------------------------------------------------


def count(questions: Sequence[Question], right: Sequence[bool], reference: Sequence[bool] | None) -> Tally:
    """What was answered rightly, beside a reference's answers to the same questions.

    Intervals (95 %): of a share Wilson's (1927), of the drop a bootstrap's over questions, each with both its answers.
    """
    figures = {"task_accuracy": _share(right)}
    if reference is not None:
        figures["task_accuracy_reference"] = _share(reference)
        figures["task_drop"] = _drop(reference, right)
    by_task: dict[str, tuple[int, int | None, int]] = {}
    for name in dict.fromkeys(one.task for one in questions):
        mine = [place for place, one in enumerate(questions) if one.task == name]
        before = None if reference is None else sum(reference[place] for place in mine)
        by_task[name] = (len(mine), before, sum(right[place] for place in mine))
    return Tally(len(questions), figures, by_task)


def _share(right: Sequence[bool]) -> Estimate:
    asked, p, z = len(right), sum(right) / len(right), _NORMAL
    middle = (p + z * z / (2 * asked)) / (1 + z * z / asked)
    half = z / (1 + z * z / asked) * sqrt(p * (1 - p) / asked + z * z / (4 * asked * asked))
    return Estimate(p, max(0.0, middle - half), min(1.0, middle + half))


def _drop(reference: Sequence[bool], right: Sequence[bool]) -> Estimate:
    change = np.array(reference, np.float64) - np.array(right, np.float64)
    chosen = np.random.default_rng(0).integers(len(change), size=(RESAMPLES, len(change)))
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(change[chosen].mean(1), [tail, 100 - tail])
    return Estimate(float(change.mean()), float(low), float(high))
