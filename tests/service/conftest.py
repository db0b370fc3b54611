"""Servers that tests of one module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .live import Live, behaviour, counts, eos_id, ids, live, says

CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def endless() -> Iterator[Live]:
    """Answers go on until their limit: abcabc..., one letter further for each choice."""
    with live(behaviour(counts)) as running:
        yield running


@pytest.fixture(scope="module")
def polite() -> Iterator[Live]:
    """Says "Hello thé wörld" and ends; a JSON object under a grammar; a call where there are tools."""
    from .live import tokenizer

    def script(submit, choice):
        prompt = tokenizer().decode(submit.tokens, skip_special_tokens=False)
        text = CALL if "Tools:" in prompt else '{"a": 1}' if submit.sampling.grammar else "Hello thé wörld"
        return [*ids(text), eos_id()]

    with live(behaviour(script)) as running:
        yield running


@pytest.fixture(scope="module")
def thoughtful() -> Iterator[Live]:
    with live(behaviour(says("<think>hm</think>Yes.")), chat_template=THINKING) as running:
        yield running


THINKING = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if not enable_thinking %}<think></think>{% endif %}"
)
