"""Words of requests as token ids."""

from __future__ import annotations

import pytest

from ridgeline.core.errors import RequestError
from ridgeline.models.hub import shipped_model
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.text.words import bad_word_ids, breaker_ids


def test_a_word_is_banned_at_the_start_of_a_text_and_after_a_space() -> None:
    tokenizer = Tokenizer.load(shipped_model())
    words = bad_word_ids(tokenizer, [" light", "a lighthouse", "light"])
    texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in words]
    assert texts == ["light", " light", "a lighthouse", " a lighthouse"]
    with pytest.raises(RequestError, match="bad_words has ' ', a word of spaces: remove it"):
        bad_word_ids(tokenizer, ["a", " "])


def test_a_breaker_is_the_last_token_of_its_text() -> None:
    tokenizer = Tokenizer.load(shipped_model())
    assert [tokenizer.decode([index], skip_special_tokens=False) for index in breaker_ids(tokenizer, ["\n"])] == ["\n"]
    assert len(breaker_ids(tokenizer, ["\n", ":", '"', "*"])) == 4
