"""Write the questions that `ridgeline compress` and `ridgeline compare --tasks` ask the shipped model.

    python training/tasks.py --out src/ridgeline/assets/tasks.jsonl

Small talk, facts and sums are those that training made up (`synthetic.py`), so that they ask what was taught; tool calls are
made up anew, under names that training never drew together; `probes.jsonl` adds its own. Endings are of the held-out documents
in tests/data: which of three continues the text?
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from probes import QUESTIONS, messages, schema
from synthetic import CAPITALS, DAYS, KNOWN, tool_conversation

HELD_OUT = Path(__file__).parents[1] / "tests" / "data" / "heldout.jsonl"
CALLS, ENDINGS = 48, 48
BEGINNING, ENDING = 40, 8  # words
FENCED = r"(?s)^\s*```python\n.*\breturn \S.*\n```\s*$"

Row = dict[str, Any]


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def facts() -> Iterator[Row]:
    for country, city in CAPITALS.items():
        yield {"task": "capital", "messages": user(f"What is the capital of {country}?"), "pattern": re.escape(city)}
    for asks, answer in KNOWN.items():
        exact = [answer]
        yield {"task": "fact", "messages": user(asks.split("|")[0]), "exact": exact}
    for day, following in zip(DAYS, [*DAYS[1:], DAYS[0]], strict=True):
        yield {"task": "fact", "messages": user(f"Which day comes after {day}?"), "pattern": f"^{following}"}


def probed() -> Iterator[Row]:
    """Probes as questions. Those about documents accept nearly any answer, and capitals are asked above."""
    for probe in map(json.loads, QUESTIONS.read_text(encoding="utf-8").splitlines()):
        if probe["group"] in ("docs", "capital"):
            continue
        row: Row = {"task": probe["group"], "messages": messages(probe)}
        if "call" in probe:
            row |= {"task": "tool call", "tools": [schema(*tool) for tool in probe["tools"]], "call": probe["call"]}
        elif "python" in probe:
            row["pattern"] = FENCED
        elif "last" in probe:
            row["pattern"] = rf"(?<!\d){probe['last']}\D*$"
        else:
            row["pattern"] = "|".join(map(re.escape, probe["contains"]))
        yield row


def calls(rng: Random) -> Iterator[Row]:
    count = 0
    while count < CALLS:
        made = tool_conversation(rng)
        at = next((place for place, message in enumerate(made["messages"]) if "tool_calls" in message), None)
        if at is None:
            continue
        count += 1
        call = made["messages"][at]["tool_calls"][0]["function"]
        yield {"task": "tool call", "messages": made["messages"][:at], "tools": made["tools"], "call": call}


def endings(rng: Random) -> Iterator[Row]:
    """Held-out texts cut behind their beginning, with the endings of two others of their kind as wrong answers."""
    rows = [json.loads(line) for line in HELD_OUT.read_text(encoding="utf-8").splitlines()]
    words = [(row, row["text"].split()) for row in rows]
    long = [(row, text) for row, text in words if len(text) >= BEGINNING + ENDING]
    rng.shuffle(long)
    for row, text in long[:ENDINGS]:
        others = [other for source, other in long if source["kind"] == row["kind"] and other is not text]
        wrong = [other[BEGINNING : BEGINNING + ENDING] for other in rng.sample(others, 2)]
        choices = [" " + " ".join(words) for words in (text[BEGINNING : BEGINNING + ENDING], *wrong)]
        right = choices[0]
        rng.shuffle(choices)
        asked = {"prompt": " ".join(text[:BEGINNING]), "choices": choices, "answer": choices.index(right)}
        yield {"task": f"ending, {row['kind']}", **asked, "source": row["source"], "licence": row["licence"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    rng = Random("tasks")
    rows = [*probed(), *facts(), *calls(rng), *endings(rng)]
    out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(len(rows), "questions")


if __name__ == "__main__":
    main()
