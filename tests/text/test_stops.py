from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.errors import RequestError
from ridgeline.text.stops import StopStrings

LETTERS = st.text("abé", min_size=1, max_size=5)


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The whole text at once: the earliest end of any stop string, of those the longest stop."""
    matches = [(start + len(stop), -len(stop), stop) for stop in stops if (start := text.find(stop)) >= 0]
    if not matches:
        return text, None
    end, _, stop = min(matches)
    return text[: end if include else end - len(stop)], stop


@given(
    parts=st.lists(st.text("abé", max_size=4), max_size=12),
    stops=st.lists(LETTERS, max_size=4),
    include=st.booleans(),
)
def test_streamed_search_equals_search_in_the_whole(parts: list[str], stops: list[str], include: bool) -> None:
    machine, shown, hit = StopStrings(stops, include_stop=include), "", None
    for count, part in enumerate(parts, start=1):
        text, hit = machine.push(part)
        shown += text
        if hit is not None:
            assert machine.tokens == count
            assert not any(stop in "".join(parts[: count - 1]) for stop in stops)
            break
    else:
        shown += machine.finish()
    assert (shown, hit) == naive("".join(parts), stops, include)


@given(parts=st.lists(st.text("abé", max_size=4), max_size=12), stops=st.lists(LETTERS, min_size=1, max_size=4))
def test_nothing_is_held_back_but_a_possible_start(parts: list[str], stops: list[str]) -> None:
    machine, seen, shown = StopStrings(stops), "", ""
    for part in parts:
        text, hit = machine.push(part)
        seen, shown = seen + part, shown + text
        if hit is not None:
            return
        held = seen[len(shown) :]
        starts = [size for stop in stops for size in range(len(stop)) if seen.endswith(stop[:size])]
        assert seen == shown + held and len(held) == max(starts)


def test_a_stop_string_across_tokens_is_counted_with_its_last_token() -> None:
    machine = StopStrings(["\n\nUser:"])
    assert [machine.push(part) for part in ["Hi", ".\n", "\nUs"]] == [("Hi", None), (".", None), ("", None)]
    assert machine.push("er: what") == ("", "\n\nUser:")
    assert machine.tokens == 4


def test_stops_before_min_tokens_are_text() -> None:
    machine = StopStrings(["x"], min_tokens=3)
    assert [machine.push("ax"), machine.push("bx"), machine.push("cx")] == [("ax", None), ("bx", None), ("c", "x")]
    machine = StopStrings(["aa"], min_tokens=3)
    assert [machine.push("a"), machine.push("a"), machine.push("a")] == [("", None), ("a", None), ("", "aa")]


def test_long_stop_strings_stay_cheap() -> None:
    machine = StopStrings(["a" * 50_000 + "b"])
    shown = "".join(machine.push("a" * 100)[0] for _ in range(1000)) + machine.finish()
    assert shown == "a" * 100_000


def test_no_stops_and_empty_stops() -> None:
    assert StopStrings([]).push("abc", tokens=2) == ("abc", None)
    with pytest.raises(RequestError) as caught:
        StopStrings(["a", ""])
    assert caught.value.param == "stop"
