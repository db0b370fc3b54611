"""Counts with their nouns, for messages."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """`1 token`, `2 tokens`: for nouns whose plural adds an s."""
    return f"{count} {noun}" + ("" if count == 1 else "s")
