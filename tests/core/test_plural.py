"""Counts in messages."""

from __future__ import annotations

from ridgeline.core.plural import counted


def test_one_is_singular_and_all_else_plural() -> None:
    assert [counted(count, "token") for count in (0, 1, 2)] == ["0 tokens", "1 token", "2 tokens"]
