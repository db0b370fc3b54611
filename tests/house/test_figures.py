"""Every figure beside a citation of a result file is a value of that file: README and docs cannot keep figures that a new run
replaced.

A paragraph, or the table after it, cites `benchmarks/results/NAME.json`. Each of its numbers must be a value of a cited file,
rounded as printed and in the printed unit; or a ratio or difference of two other numbers of the same paragraph or row. What is
neither stands in ELSEWHERE with its source, or has a test of its own. A wrong number passes where it happens to be a value of the
file: `test_figures_that_are_off_are_noticed` says how many do not.
"""

from __future__ import annotations

import bisect
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
CITATION = re.compile(r"results/([\w.]+?\.json)")
NUMBER = re.compile(r"(?<![\w.,-])([-\N{MINUS SIGN}]?)(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?\s?(%|MB|MiB|GB|ms\b|µs)?(?!\w)")
NOT_MEASURED = re.compile(
    r"`[^`]*`|\]\([^)]*\)|\b(?:Python|[Tt]orch|Triton|CUDA|vLLM|python) \d+(?:\.\d+)+|\b20\d\d(?:-\d\d-\d\d)?\b"
)
"""Code, links, versions and years."""
SMALLEST = 20
"""Smaller whole numbers are counts ("4 bits", "16 requests"), not measurements."""
ELSEWHERE: dict[tuple[str, str], str] = {
    ("docs/compression.md", "512"): "a length of prompts, of the command in pruned.json",
    ("docs/compression.md", "40%"): "the share of zeros from which packing pays, of the log",
    ("docs/compression.md", "160"): "million tokens of training, of training/README.md",
    ("docs/compression.md", "5.47"): "cited: Llama-2-7B, AWQ",
    ("docs/compression.md", "27%"): "cited: Llama-2-7B, Wanda",
    ("docs/compression.md", "88"): "right answers of 183, a share in tasks.json",
    ("docs/compression.md", "95%"): "the level of intervals",
    ("docs/figures.md", "13.0"): "the version of CUDA",
    ("docs/figures.md", "120"): "joules of the products of a prompt; a test below adds them up",
    ("docs/kv.md", "131,072"): "counted from the shape",
    ("docs/kv.md", "4,096"): "the 4k of row names",
    ("docs/measures.md", "512"): "a length of prompts, of the command in curves.json",
    ("docs/speculation.md", "512"): "a name: AVX-512",
}
"""Numbers beside citations that no result file has."""
COMPUTED = {"28%": "28%"}
"""Printed numbers that follow from several rows; a test below computes each."""
SCALES: dict[str, tuple[float, ...]] = {
    "%": (1.0, 100.0),
    "MB": (1e-6, 1.0),
    "MiB": (2.0**-20,),
    "GB": (1e-9, 1.0),
    "ms": (1.0, 1e3, 1e-3),
    "µs": (1.0, 1e6, 1e3),
    "": (1.0, 1e3, 1e-3, 100.0, 1e6, 1e-6, 2.0**-20),
}
"""By printed unit: factors from a value of a file, in its own unit, to the printed number. Headers of tables state units that
their cells leave out."""


@dataclass(frozen=True, slots=True)
class Printed:
    """A printed number. Its value lies within `half` of it."""

    text: str
    value: float
    half: float
    unit: str


def numbers(text: str) -> list[Printed]:
    """The measurements of a paragraph or row, without those in code and in links."""
    printed = []
    for sign, whole, fraction, unit in NUMBER.findall(NOT_MEASURED.sub(" ", text)):
        digits = whole.replace(",", "")
        if not fraction and not unit and int(digits) <= SMALLEST:
            continue
        zeros = len(digits) - len(digits.rstrip("0")) if not fraction and len(digits) > 3 else 0
        half = 0.5 * 10.0 ** (zeros - max(len(fraction) - 1, 0))
        value = float(digits + fraction) * (-1.0 if sign else 1.0)
        printed.append(Printed(f"{sign}{whole}{fraction}{unit}", value, half, unit))
    return printed


def passages(text: str) -> Iterator[tuple[str, frozenset[str]]]:
    """Paragraphs, list items and rows of tables, each with the files that it cites; a table cites those of the paragraph before it
    or of its heading."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    heading, last = frozenset[str](), frozenset[str]()
    for part in re.split(r"\n\s*\n|\n(?=[-|#])", text):
        cited = frozenset(CITATION.findall(part))
        if part.startswith("#"):
            heading = last = cited
        elif part.startswith("|"):
            last |= cited
            yield part, last
        else:
            last = cited | heading
            yield part, last if cited else cited


@cache
def values(name: str) -> tuple[float, ...]:
    """All numbers of a result file, also whole ones in names and commands, in ascending order."""

    def within(item: Any) -> Iterator[float]:
        if isinstance(item, dict):
            for key, value in item.items():
                if key not in ("date", "commit", "machine"):
                    yield from within(key)
                    yield from within(value)
        elif isinstance(item, list):
            for value in item:
                yield from within(value)
        elif isinstance(item, str):
            yield from map(float, re.findall(r"(?<![\d.])\d+(?![\d.])", item))
        elif isinstance(item, int | float):
            yield float(item)

    return tuple(sorted(set(within(json.loads((RESULTS / name).read_text(encoding="utf-8"))))))


def holds(numbers_of_file: Sequence[float], low: float, high: float) -> bool:
    """Whether a value lies in [low, high]."""
    slack = 1e-9 * max(1.0, abs(high))
    index = bisect.bisect_left(numbers_of_file, low - slack)
    return index < len(numbers_of_file) and numbers_of_file[index] <= high + slack


def stated(printed: Printed, name: str) -> bool:
    """Whether a file has the number, in its own unit; a percentage also as the change that a ratio or a share is."""
    low, high = printed.value - printed.half, printed.value + printed.half
    # A small number without a unit is a ratio, a time or a difference in points.
    scales = SCALES[printed.unit] if printed.unit or printed.value >= 10 else (1.0, 1e-3, 100.0)
    ranges = [(low / scale, high / scale) for scale in scales]
    if printed.unit == "%":
        ranges += [(1 + low / 100, 1 + high / 100), (1 - high / 100, 1 - low / 100), (-high / 100, -low / 100)]
    return any(holds(values(name), *limits) for limits in ranges)


def derived(printed: Printed, others: Sequence[Printed]) -> bool:
    """Whether a number is the ratio, the change or the difference of two others beside it."""
    low, high = printed.value - printed.half, printed.value + printed.half
    for above, below in itertools.permutations(others, 2):
        if below.value - below.half <= 0:
            continue
        least = (above.value - above.half) / (below.value + below.half)
        most = (above.value + above.half) / (below.value - below.half)
        apart, blur = abs(above.value - below.value), above.half + below.half
        ranges = [(least, most), (apart - blur, apart + blur)]
        if printed.unit == "%":
            ranges += [
                (100 * (least - 1), 100 * (most - 1)),
                (100 * (1 - most), 100 * (1 - least)),
                (100 * least, 100 * most),
            ]
        if any(start <= high and end >= low for start, end in ranges):
            return True
    return False


def missing(part: str, cited: frozenset[str]) -> list[Printed]:
    printed = numbers(part)
    return [
        number
        for index, number in enumerate(printed)
        if not any(stated(number, name) for name in sorted(cited))
        and not derived(number, printed[:index] + printed[index + 1 :])
    ]


@pytest.mark.parametrize("page", PAGES)
def test_figures_are_those_of_the_result_files(page: str) -> None:
    parts = passages((ROOT / page).read_text(encoding="utf-8"))
    absent = [
        f"{number.text} in {part[:80]!r}"
        for part, cited in parts
        if cited and "sparse.json" not in cited
        for number in missing(part, cited)
        if (page, number.text) not in ELSEWHERE and number.text not in COMPUTED
    ]
    assert not absent, f"{page}: not in the cited result files: {absent}"


@pytest.mark.parametrize("page", ["README.md", "docs/figures.md", "docs/compression.md", "docs/speculation.md"])
def test_figures_that_are_off_are_noticed(page: str) -> None:
    """If all measurements were a twentieth larger, many would have no place in the files (fewer among ratios near 1)."""
    noticed = total = 0
    for part, cited in passages((ROOT / page).read_text(encoding="utf-8")):
        printed = numbers(part) if cited else []
        for number in printed:
            off = replace(number, value=round(1.05 * number.value / (2 * number.half)) * 2 * number.half)
            total += 1
            noticed += not any(stated(off, name) for name in cited) and not derived(off, printed)
    assert total > 20 and noticed > total / 7, (noticed, total)


def rows(name: str) -> dict[str, dict[str, Any]]:
    return {row["row"]: row for row in json.loads((RESULTS / name).read_text(encoding="utf-8"))}


def test_deterministic_serving_costs_what_the_page_says() -> None:
    times = rows("deterministic.json")
    plain, kept = (
        times[f"llama-3.1-8b-bfloat16-gpu-{mode}-b64-tpot-ms"]["value"] for mode in ("plain", "deterministic")
    )
    assert COMPUTED["28%"] == f"{kept / plain - 1:.0%}"


def test_the_products_of_a_prompt_take_the_joules_that_the_page_says() -> None:
    products = ("norm+qkv", "out+sum", "norm+gate+up+act", "down+sum")
    joules = [rows("ledger.json")[f"llama-3.1-8b-prefill:8192-{name}"]["joules"] for name in products]
    (printed,) = re.findall(r"about 140 J, (\d+) of\s+them in", (ROOT / "docs/figures.md").read_text(encoding="utf-8"))
    assert round(sum(joules)) == int(printed)


def test_sparse_products_are_the_sums_of_a_layer() -> None:
    """The table adds up the four products of a layer."""
    text = (ROOT / "docs/compression.md").read_text(encoding="utf-8")
    sums: dict[tuple[str, int], list[float]] = {}
    for row in rows("sparse.json").values():
        if "dense_us" in row:
            total = sums.setdefault((row["dtype"], row["tokens"]), [0.0, 0.0])
            total[0] += row["dense_us"]
            total[1] += row["searched_us"]
    lines = [
        line for line in text.splitlines() if re.fullmatch(r"\| [\d,]+ \|( [\d,]+ \| [\d,]+ \| [\d.]+x \|){2}", line)
    ]
    assert len(lines) == 5
    for line in lines:
        tokens, *cells = (cell.strip().replace(",", "").rstrip("x") for cell in line.strip("|").split("|"))
        expected = [*sums["bf16", int(tokens)], *sums["fp8", int(tokens)]]
        assert [int(cells[index]) for index in (0, 1, 3, 4)] == pytest.approx(expected, abs=1)
        assert [float(cells[index]) for index in (2, 5)] == pytest.approx(
            [expected[0] / expected[1], expected[2] / expected[3]], abs=0.006
        )
