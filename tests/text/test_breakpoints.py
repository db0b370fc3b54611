"""The tokens before a place of a conversation: every conversation with the same beginning has them, whatever its template."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.text.breakpoints import Place, common_length, tokens_before
from ridgeline.text.chat import RenderOptions
from ridgeline.text.prompts import ChatTemplates
from ridgeline.text.tokenizer import Tokenizer
from tests.text.conftest import write_model
from tests.text.test_prompts import BACKENDS, CONFIG, NAMES, SOURCES

SYSTEM = {"role": "system", "content": "Be brief and kind."}
BOOK = {"type": "text", "text": "A long story about a ridge"}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("look", "find")]


def conversation(question: str) -> list[dict[str, Any]]:
    return [
        SYSTEM,
        {"role": "user", "content": [BOOK, {"type": "text", "text": question}]},
        {"role": "assistant", "content": f"Yes, {question}"},
        {"role": "user", "content": f"{question}, and why?"},
    ]


@pytest.fixture(scope="module", params=["byte_level", "metaspace_first"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_model(tmp_path_factory.mktemp("model"), BACKENDS[request.param](), CONFIG))


@pytest.mark.parametrize("name", NAMES)
def test_conversations_that_agree_up_to_a_place_share_its_tokens(name: str, tokenizer: Tokenizer) -> None:
    encoder = ChatTemplates(tokenizer, {"default": SOURCES[name]}).choose(tools=False)
    places = [Place(messages=1), Place(messages=2, parts=1), Place(messages=2), Place(messages=4)]
    messages = conversation("who")
    prompt = encoder.encode(messages, options=RenderOptions(places=places))
    assert prompt.ids == encoder.encode(messages).ids
    system, book, question, everything = prompt.marks
    assert system <= book <= question <= everything <= len(prompt.ids)
    for mark, others in (
        (system, [SYSTEM, {"role": "user", "content": "hello"}]),
        (book, conversation("when")),
        (question, [*messages[:2], {"role": "assistant", "content": "No."}, {"role": "user", "content": "Hm."}]),
        (everything, [*messages, {"role": "assistant", "content": "So."}, {"role": "user", "content": "Oh."}]),
    ):
        if (name, mark) != ("MISTRAL", everything):  # another turn moves the system message, so no prefix stays
            assert encoder.encode(others).ids[:mark] == prompt.ids[:mark]
    if name not in ("GEMMA", "MISTRAL"):  # one joins the system message to a question, one moves it to the last
        assert system > 4
    if name != "MISTRAL":
        text = tokenizer.decode(prompt.ids[:book], skip_special_tokens=False)
        assert "long story about a" in text and "who" not in text


def test_places_after_tools(tokenizer: Tokenizer) -> None:
    encoder = ChatTemplates(tokenizer, {"default": SOURCES["QWEN"]}).choose(tools=True)
    options = RenderOptions(places=[Place(tools=1), Place(tools=2), Place(messages=1)])
    prompt = encoder.encode([SYSTEM, {"role": "user", "content": "who"}], tools=TOOLS, options=options)
    texts = [tokenizer.decode(prompt.ids[:mark], skip_special_tokens=False) for mark in prompt.marks]
    assert "look" in texts[0] and "find" not in texts[0]
    assert "find" in texts[1] and "who" not in texts[1]
    assert texts[1].startswith(texts[2][:40])
    without = encoder.encode([SYSTEM, {"role": "user", "content": "who"}], options=options)
    assert without.marks[:2] == (0, 0), "a request without tools has no place in them"


def test_control_tokens_and_repeated_marks_do_not_shift_places(tokenizer: Tokenizer) -> None:
    """A message that spells control tokens is text; the place after it is where it ends."""
    encoder = ChatTemplates(tokenizer, {"default": SOURCES["CHATML"]}).choose(tools=False)
    messages = [{"role": "user", "content": "<|im_end|> é <|im_start|>"}, {"role": "user", "content": "x"}]
    prompt = encoder.encode(messages, options=RenderOptions(places=[Place(messages=1)]))
    shorter = encoder.encode(messages[:1], options=RenderOptions(add_generation_prompt=False))
    assert prompt.ids[: prompt.marks[0]] == shorter.ids


def test_helpers() -> None:
    assert [common_length(*pair) for pair in (("abc", "abd"), ("", "a"), ("ab", "abc"), ("x", "y"))] == [2, 0, 2, 0]
    offsets = [(0, 0), (0, 2), (2, 5), (5, 6)]
    assert [tokens_before(offsets, position) for position in (0, 1, 2, 5, 9)] == [1, 1, 2, 3, 4]
