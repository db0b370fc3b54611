from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.text.reasoning import ReasoningSplitter, Tags, detect_tags, starts_inside
from tests.text import templates

THINK = Tags("<think>", "</think>")


def split(parts: list[str], *, inside: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter(THINK, inside=inside)
    pieces = [*(splitter.push(part) for part in parts), splitter.finish()]
    return "".join(shown for shown, _ in pieces), "".join(hidden for _, hidden in pieces)


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>\nlet me see\n</think>\n\nIt is 4.", False, ("It is 4.", "let me see")),
        ("\n<think>a < b </thin k></think>c", False, ("c", "a < b </thin k>")),
        ("a</think> b", True, ("b", "a")),
        ("<think></think>b", False, ("b", "")),
        ("It is <think>4</think>.", False, ("It is <think>4</think>.", "")),
        ("<think>a</think>b <think>c</think>", False, ("b <think>c</think>", "a")),
        ("<think>never ends ", False, ("", "never ends")),
        ("  plain  text ", False, ("  plain  text ", "")),
        ("<thin", False, ("<thin", "")),
        ("", False, ("", "")),
    ],
)
@given(data=st.data())
def test_split_at_any_borders(text: str, inside: bool, expected: tuple[str, str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split(parts, inside=inside) == expected


def test_hidden_text_streams() -> None:
    splitter = ReasoningSplitter(THINK)
    assert splitter.push("<think>one ") == ("", "one")
    assert splitter.push("two<") == ("", " two")
    assert splitter.push("3") == ("", "<3")


def test_without_tags_everything_is_visible() -> None:
    splitter = ReasoningSplitter(None)
    assert splitter.push(" <think>a") == (" <think>a", "") and splitter.finish() == ("", "")


def test_tags_come_from_the_template_and_the_prompt() -> None:
    assert detect_tags(templates.QWEN) == THINK and detect_tags(templates.CHATML) is None
    assert starts_inside(THINK, "<|im_start|>assistant\n<think>\n")
    assert not starts_inside(THINK, "<|im_start|>assistant\n<think>\n\n</think>\n\n")
