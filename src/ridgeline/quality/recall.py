"""A synthetic recall task: how well a model reads back word-number pairs from its context.

A window has a list of pairs ("apple 7"), prose, and the pairs again in another order. A model that attends to the list predicts the
number after each repeated word; without it one in ten numbers is right. The prose sets the distance between list and questions.
Damage to keys, values or attention shows here before it shows in perplexity. Scores come from any Scorer (quality.scores).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from ridgeline.core.errors import ConfigError
from ridgeline.quality.drift import Estimate, bootstrap_mean
from ridgeline.quality.scores import Scores
from ridgeline.quality.texts import Window
from ridgeline.text.tokenizer import Tokenizer, encode_text

WORDS = tuple(
    "apple basket bridge button candle carpet castle chair circle cloud copper corner desert dragon engine feather finger flower "
    "forest garden hammer island jacket kettle ladder lemon market meadow mirror monkey needle orange paper pencil pepper pillow "
    "planet pocket rabbit ribbon river rocket saddle salmon shadow shell silver spider spoon spring stone street summer table "
    "temple thread ticket tiger tower tunnel valley velvet violin wagon window winter".split()
)
"""The words that a list draws from."""
PROSE = (
    "The wind turned to the north and it was quiet.",
    "A boat came in with the tide.",
    "They walked home along the road.",
    "Nobody spoke for a while.",
    "The lamp was still burning in the hall.",
    "She read the letter twice and put it away.",
    "He had been waiting there since the morning.",
    "It began to rain when they reached the house.",
)
"""Sentences between list and questions. They contain no number and none of WORDS."""


@dataclass(frozen=True, slots=True)
class RecallWindow:
    """One list with its questions."""

    window: Window
    """Scored from the first answer on. Each window is a document of its own."""
    answers: tuple[tuple[int, ...], ...]
    """Indices of the tokens of each answer among the scored tokens."""


@dataclass(frozen=True, slots=True)
class Recall:
    """Means over all answers, with 95 % intervals over windows."""

    answers: int
    accuracy: Estimate
    """Share of answers whose tokens are all the most probable ones."""
    probability: Estimate
    """Probability of an answer, the product of its tokens' probabilities."""


def recall_windows(tokenizer: Tokenizer, pairs: int, lengths: Sequence[int], seed: int = 0) -> list[RecallWindow]:
    """Generate a window for each of `lengths`, each with `pairs` questions. The same arguments give the same windows.

    Args:
        lengths: tokens of the windows. A window has as much prose as fits.
    Raises:
        ConfigError: the number of pairs is out of range, or a length is too small for them.
    """
    if not 1 <= pairs <= len(WORDS):
        raise ConfigError(f"A recall list cannot have {pairs} pairs: give 1 to {len(WORDS)}.", param="recall")
    prose_tokens = [len(tokenizer.encode(f"{sentence}\n", add_special_tokens=False)) for sentence in PROSE]
    return [
        _window(tokenizer, pairs, length, prose_tokens, Random(f"{seed} {index}"), index)
        for index, length in enumerate(lengths)
    ]


def _window(
    tokenizer: Tokenizer, pairs: int, length: int, prose_tokens: Sequence[int], draw: Random, document: int
) -> RecallWindow:
    numbers = {word: str(draw.randrange(10)) for word in draw.sample(WORDS, pairs)}
    questions = draw.sample(list(numbers), pairs)
    listed = _lines(numbers, list(numbers))
    shortest = encode_text(tokenizer.backend, listed + _lines(numbers, questions), add_special_tokens=True)
    room = length - len(shortest.ids)
    if room < 0:
        raise ConfigError(
            f"A recall list of {pairs} pairs with its questions takes {len(shortest.ids)} tokens, but a window has {length}: "
            "give fewer pairs or longer windows.",
            param="recall",
        )
    sentences: list[str] = []
    while True:
        sentence = draw.randrange(len(PROSE))
        room -= prose_tokens[sentence]
        if room < 0:
            break
        sentences.append(f"{PROSE[sentence]}\n")
    while True:
        head = listed + "".join(sentences)
        encoding = encode_text(tokenizer.backend, head + _lines(numbers, questions), add_special_tokens=True)
        if len(encoding.ids) <= length:
            break
        sentences.pop()  # A tokenizer may need more tokens for the whole text than for its sentences.
    positions = _answer_positions(encoding.offsets, len(head), [f"{word} " for word in questions])
    first = positions[0][0]
    answers = tuple(tuple(position - first for position in answer) for answer in positions)
    return RecallWindow(Window(tuple(encoding.ids), first, document), answers)


def _lines(numbers: dict[str, str], words: Sequence[str]) -> str:
    return "".join(f"{word} {numbers[word]}\n" for word in words)


def _answer_positions(
    offsets: Sequence[tuple[int, int]], start: int, questions: Sequence[str]
) -> list[tuple[int, ...]]:
    """Return the positions of the tokens that contain the digit after each question, from character `start` on."""
    positions = []
    for question in questions:
        digit = start + len(question)
        positions.append(tuple(index for index, (begin, end) in enumerate(offsets) if begin <= digit < end))
        start = digit + len("7\n")
    return positions


def measure_recall(windows: Sequence[RecallWindow], scores: Sequence[Scores]) -> Recall:
    """Compute the recall of a model from its scores of the windows, in the same order."""
    accuracies, probabilities = [], []
    for window, window_scores in zip(windows, scores, strict=True):
        correct = window_scores.top_ids[:, 0] == window_scores.token
        accuracies.append(np.mean([correct[list(answer)].all() for answer in window.answers]))
        probabilities.append(np.mean([np.exp(window_scores.logprob[list(answer)].sum()) for answer in window.answers]))
    return Recall(
        sum(len(window.answers) for window in windows),
        bootstrap_mean(np.array(accuracies, np.float64)),
        bootstrap_mean(np.array(probabilities, np.float64)),
    )
