"""Random outputs of a grammar: at each step any token its mask allows."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np

from ridgeline.text.grammar import GrammarState
from ridgeline.text.tokenizer import Tokenizer

CLOSERS = ('"', "}", "]", "<", "\n")


def allowed(state: GrammarState) -> list[int]:
    bits = np.unpackbits(np.frombuffer(state.mask(), np.uint8), bitorder="little")
    return [int(index) for index in np.flatnonzero(bits)]


def walk(
    state: GrammarState, tokenizer: Tokenizer, end_id: int, rng: Random, *, patience: int = 30, limit: int = 300
) -> list[int] | None:
    """Tokens up to the end token (not included); None when the walk does not end in `limit` steps.

    After `patience` steps it ends, or closes what is open, as soon as it may.
    """
    closers = [tokenizer.token_id(text) for text in CLOSERS]
    tokens: list[int] = []
    for step in range(limit):
        choices = allowed(state)
        if end_id in choices and (step >= patience or len(choices) < 3 or rng.random() < 0.1):
            return tokens
        choices = [index for index in choices if index != end_id]
        closing = [index for index in closers if index in choices] if step >= patience else []
        token = closing[0] if closing and rng.random() < 0.9 else rng.choice(choices)
        state.accept([token])
        tokens.append(token)
    return None


def outputs(
    start: Callable[[], GrammarState], tokenizer: Tokenizer, end_id: int, *, count: int = 30, hide: bool = True
) -> list[str]:
    """Texts of `count` walks that ended, with at most twice as many tries."""
    rng, texts = Random(0), []
    for _ in range(2 * count):
        tokens = walk(start(), tokenizer, end_id, rng)
        if tokens is not None:
            texts.append(tokenizer.decode(tokens, skip_special_tokens=hide))
        if len(texts) == count:
            return texts
    raise AssertionError(f"only {len(texts)} of {2 * count} walks came to an end")
