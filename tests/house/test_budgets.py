"""The budget tool sees what is too large, and only that."""

from __future__ import annotations

import pytest

from tools.budgets import breaches, code_lines, room_of


def texts(source: str) -> list[str]:
    return [str(one) for one in breaches("a.py", source)]


def test_functions() -> None:
    body = "    x = 1\n"
    assert texts("def f():\n" + body * 59) == []
    assert texts("def f():\n" + body * 60) == ["a.py:1: f has 61 lines (at most 60): name a part of it."]
    assert len(texts("class A:\n    async def f(self):\n" + "        x = 1\n" * 60)) == 1


@pytest.mark.parametrize("decorator", ["@triton.jit", "@triton.jit(debug=True)", "@jit"])
def test_kernels_may_be_longer_and_take_more(decorator: str) -> None:
    head = f"{decorator}\ndef f(a, b, c, d, e, f, g, h):\n"
    assert texts(head + "    x = 1\n" * 149) == []
    assert len(texts(head + "    x = 1\n" * 150)) == 1


def test_files() -> None:
    assert texts("x = 1\n" * 500) == []
    assert "a.py:501: file has 501 lines" in texts("x = 1\n" * 501)[0]


@pytest.mark.parametrize(
    ("signature", "fine"),
    [
        ("a, b, c, d, e, f", True),
        ("self, a, b, c, d, e, f", True),
        ("a, b, c, d, e, f, g", False),
        ("a, b, /, c, *d, e, f, **g", False),
        ("cls, *, a, b, c, d, e, f, g", False),
    ],
)
def test_parameters(signature: str, fine: bool) -> None:
    assert (texts(f"def f({signature}): pass\n") == []) is fine


def test_a_test_takes_as_many_cases_as_it_likes() -> None:
    assert texts("def test_f(a, b, c, d, e, f, g): pass\n") == []


def test_code_lines_leave_out_prose() -> None:
    source = '"""Doc.\n\nMore."""\n\n# comment\nx = 1  # why\n\ndef f():\n    """Doc."""\n    return """a\nb"""\n'
    assert code_lines(source) == 4


def test_rooms() -> None:
    assert room_of("src/ridgeline/kv/blocks.py") == "kv" and room_of("src/ridgeline/llm.py") == "."
