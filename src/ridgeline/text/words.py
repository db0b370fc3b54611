"""Words of requests as token ids."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.core.errors import RequestError
from ridgeline.text.tokenizer import Tokenizer


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word as it begins a text and as it follows a space, for SamplingParams.bad_word_ids.

    A word that the model spells with other tokens is not among them, as in vLLM (SamplingParams.update_from_tokenizer).
    """
    ids: dict[tuple[int, ...], None] = {}
    for word in words:
        if not (text := word.lstrip()):
            raise RequestError(f"bad_words has {word!r}, a word of spaces: remove it.", param="bad_words")
        for variant in (text, " " + text):
            ids[tuple(tokenizer.encode(variant, add_special_tokens=False))] = None
    return tuple(filter(None, ids))


def breaker_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[int, ...]:
    """The token with which each text ends inside of another text, for Dry.breakers.

    Source: text-generation-webui (modules/sampler_hijack.py): the last token of the text after a letter.
    """
    return tuple(sorted({tokenizer.encode("a" + text, add_special_tokens=False)[-1] for text in texts}))
