from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ridgeline.text.detokenize import Detokenizer
from ridgeline.text.tokenizer import Tokenizer
from tests.text.conftest import SENTENCES

KINDS = ["byte_level", "sentencepiece"]
IDS = st.lists(st.lists(st.one_of(st.integers(0, 300), st.integers(0, 640)), max_size=6), max_size=12)
PATIENT = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("kind", KINDS)
@PATIENT
@given(pushes=IDS, skip=st.booleans())
def test_parts_join_to_the_decoded_whole(
    kind: str, pushes: list[list[int]], skip: bool, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    stream = Detokenizer(tokenizer, skip_special_tokens=skip)
    text = "".join(stream.push(ids) for ids in pushes) + stream.finish()
    assert text == tokenizer.decode([index for ids in pushes for index in ids], skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
@PATIENT
@given(ids=st.lists(st.integers(0, 640), max_size=20))
def test_what_was_said_is_never_taken_back(kind: str, ids: list[int], request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    stream, said = Detokenizer(tokenizer), ""
    for end, index in enumerate(ids, start=1):
        said += stream.push([index])
        assert tokenizer.decode(ids[:end], skip_special_tokens=True).startswith(said)


@pytest.mark.parametrize("kind", KINDS)
@PATIENT
@given(prompt=st.sampled_from([*SENTENCES, ""]), ids=st.lists(st.integers(0, 640), max_size=12))
def test_text_goes_on_from_its_context(kind: str, prompt: str, ids: list[int], request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    context = [1, *tokenizer.encode(prompt and prompt + "x", add_special_tokens=True)]
    stream = Detokenizer(tokenizer, context=context)
    whole = tokenizer.decode([*context, *ids], skip_special_tokens=True)
    assert tokenizer.decode(context, skip_special_tokens=True) + stream.push(ids) + stream.finish() == whole


@pytest.mark.parametrize("kind", KINDS)
def test_characters_arrive_whole_and_at_once(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    for text in SENTENCES:
        stream = Detokenizer(tokenizer)
        parts = [stream.push([index]) for index in tokenizer.encode(text, add_special_tokens=False)]
        assert "".join(parts) + stream.finish() == text
        assert not any("\ufffd" in part for part in parts)
        if kind == "byte_level":
            assert "".join(parts) == text


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_begun_in_the_context_comes_out_whole(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode("fox \U0001f9ff.", add_special_tokens=False)
    texts = [tokenizer.decode(ids[:size], skip_special_tokens=True) for size in range(len(ids))]
    border = next(size for size, text in enumerate(texts) if text.endswith("\ufffd"))
    stream = Detokenizer(tokenizer, context=ids[:border])
    assert stream.push(ids[border:]) + stream.finish() == "\U0001f9ff."


def test_the_leading_space_goes_only_at_the_start_of_a_text(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("fox", add_special_tokens=False)
    assert Detokenizer(sentencepiece).push(ids) == "fox"
    for context in ("The", "\u00e9", "The quick brown fox" * 20):
        prompt = sentencepiece.encode(context, add_special_tokens=True)
        assert Detokenizer(sentencepiece, context=prompt).push(ids) == " fox"
