"""Draw a small sample of the corpus: of the test split for the tests of the package, of the valid split to calibrate with.

python training/heldout.py --corpus CORPUS --out tests/data/heldout.jsonl
python training/heldout.py --corpus CORPUS --split valid --times 2 --out src/ridgeline/assets/calibration.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random

from corpus import KINDS, Document, read_split

BUDGET = {"prose": 48_000, "docs": 45_000, "code": 45_000, "math": 18_000, "dialogue": 18_000}  # bytes
LONGEST = 14_000  # bytes of one document


def draw(documents: list[Document], budget: int) -> list[Document]:
    """Whole documents in random order, each no longer than LONGEST, as many as fit the budget."""
    drawn: list[Document] = []
    for document in Random(0).sample(documents, len(documents)):
        size = len(document.text.encode())
        if size <= min(LONGEST, budget):
            budget -= size
            drawn.append(document)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--split", default="test", help="test or valid")
    parser.add_argument("--times", type=int, default=1, help="how many times the usual number of bytes")
    arguments = parser.parse_args()
    licences = {
        row["repo"]: row["licence"] for row in json.loads((arguments.corpus / "sources.json").read_text("utf-8"))
    }
    documents = list(read_split(arguments.corpus, arguments.split))
    with arguments.out.open("w", encoding="utf-8") as file:
        for kind in KINDS:
            for document in draw([d for d in documents if d.kind == kind], BUDGET[kind] * arguments.times):
                repository = document.source.split(":")[0]
                row = {"source": document.source, "licence": licences[repository], "kind": kind, "text": document.text}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
