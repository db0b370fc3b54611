"""Axes place values where they belong, labels keep apart, what is drawn is well-formed."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from ridgeline.planner.svg import Axis, Chart, Guide, Line, Points, document, figure, page, si, table


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0, "", "0"), (1234, "", "1.23k"), (0.002, "s", "2 ms"), (999.6, "", "1k"), (4.8e12, "B/s", "4.8 TB/s"), (-1500, "", "-1.5k"),
     (1e-15, "", "0.001p"), (float("inf"), "s", "inf s")],
)  # fmt: skip
def test_si(value: float, unit: str, text: str) -> None:
    assert si(value, unit) == text


def test_linear_axis() -> None:
    axis = Axis.around([3.0, 97.0, float("nan")], "x")
    assert axis.low == 0 and axis.high > 97
    assert axis.ticks() == [0, 20, 40, 60, 80, 100] and axis.place(axis.low) == 0 and axis.place(axis.high) == 1
    assert Axis.around([-5.0, 5.0], "x").low == -5
    assert Axis.around([], "x").ticks()


def test_log_axis() -> None:
    axis = Axis.around([0.0, 1.0, 1e6], "x", log=True)
    assert 0 < axis.low < 1 and axis.high > 1e6
    assert axis.ticks() == [10.0**power for power in range(7)]
    assert axis.place(1000.0) == pytest.approx(0.5)
    assert Axis("x", 10, 100, log=True).ticks() == [10, 20, 50, 100]


def chart(*marks: Line | Points | Guide) -> Chart:
    return Chart("a <b> & c", Axis("x", 0, 10), Axis("y", 0, 10, unit="s"), marks)


def test_everything_drawn_is_well_formed() -> None:
    marks = (Line("l", ((0, 0), (5, 20), (float("nan"), 1))), Points("p", ((1, 1, "a&b"), (2, 2, ""))),
             Guide("SLO", y=3.0), Guide("here", x=4.0))  # fmt: skip
    root = ET.fromstring(document(chart(*marks)))
    way = next(element for element in root.iter() if element.tag.endswith("polyline")).attrib["points"].split()
    assert len(way) == 2  # what is no number is left out
    assert float(way[1].split(",")[1]) == 50  # what lies outside is drawn on the border
    text = figure(chart(*marks))
    assert "a &lt;b&gt; &amp; c" in text and "SLO" in text and "<style>" not in text
    ET.fromstring(text)


def test_labels_keep_apart() -> None:
    points = tuple((5 + index / 100, 5.0, f"operation {index}") for index in range(12))
    root = ET.fromstring(document(chart(Points("p", points))))
    labels = [element for element in root.iter() if element.attrib.get("class") == "label"]
    assert 0 < len(labels) < 12  # those without room are left to their tooltips
    places = [(float(label.attrib["x"]), float(label.attrib["y"])) for label in labels]
    for index, (x, y) in enumerate(places):
        assert all(abs(x - other) > 60 or abs(y - down) >= 12 for other, down in places[index + 1 :])
    assert len([element for element in root.iter() if element.tag.endswith("title")]) == 12


def test_page_and_table() -> None:
    html = page("T", table(("a", "b"), [("1", "<2>")]))
    assert "<td>&lt;2&gt;</td>" in html and "color-scheme" in html and html.startswith("<!doctype html>")
