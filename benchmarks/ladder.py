"""`ridgeline ladder` as a result file, with what ran where:

    python benchmarks/ladder.py [--out benchmarks/results/ladder.json] [--commit NAME] [MODEL and options of the command]

On this repository's model and texts: `--text tests/data/heldout.jsonl --plot FILE.svg`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from common import cpu_name, provenance, write_rows

from ridgeline.cli.main import main as ridgeline


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    parser.add_argument("--commit", default="", help="what runs, where there is no git to ask")
    options, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ladder.json"
        if status := ridgeline(["ladder", *rest, "--out", str(path)]):
            return status
        rows = json.loads(path.read_text(encoding="utf-8"))
    if options.out:
        device = rows[0]["device"]
        facts = provenance(cpu_name() if device == "cpu" else device, options.commit)
        place = "cpu" if device == "cpu" else "gpu"
        write_rows(options.out, [row | {"row": f"{row['row']}-{place}"} | facts for row in rows])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
