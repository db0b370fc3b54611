"""The card of a compressed model: what was done, and size, memory, perplexity and drift before and after."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ridgeline
from ridgeline.compress.checkpoint import Checkpoint
from ridgeline.compress.recipes import EXAMPLES, Recipe
from ridgeline.core.errors import RidgelineError
from ridgeline.models.config import read_model
from ridgeline.quality.drift import Drift

CARD = "compression.json"


def card(
    recipe: Recipe, source: Checkpoint, result: Checkpoint, calibration: Mapping[str, Any], drift: Drift | None
) -> dict[str, Any]:
    """The card as data. calibration: where the texts came from and how many tokens ran. drift: None if nobody judged.

    Sizes are bytes of the weight files; memory is what the weights take when served, None where nothing serves them yet.
    """
    return {
        "recipe": recipe.name,
        "method": recipe.method,
        "bits": recipe.bits,
        "group": recipe.grid.group if recipe.bits else None,
        "source": source.folder.name,
        "made": f"ridgeline {ridgeline.__version__}, {datetime.now(UTC):%Y-%m-%d}",
        "calibration": dict(calibration),
        "size_bytes": {"before": source.bytes, "after": result.bytes},
        "parameters": {"before": source.spec.params, "after": result.spec.params},
        "memory_bytes": {"before": _memory(source.folder), "after": _memory(result.folder)},
        "quality": None if drift is None else _quality(drift),
    }


def _memory(folder: Path) -> int | None:
    """Bytes of the weights of a model as it is served."""
    try:
        return read_model(folder)[0].weight_bytes
    except RidgelineError:
        return None


def _quality(drift: Drift) -> dict[str, Any]:
    return {
        "tokens": drift.tokens,
        "documents": drift.documents,
        **{name: asdict(one) for name, one in drift.figures.items()},
    }


def write_card(folder: Path, source: Path, found: Mapping[str, Any]) -> None:
    """Put the card into the folder: as JSON, and as README.md for people."""
    (folder / CARD).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    readme = source / "README.md"
    head = _front(readme.read_text(encoding="utf-8")) if readme.is_file() else []
    lines = ["---", *head, f"base_model: {found['source']}", "---", "", f"# {folder.name}", ""]
    what = EXAMPLES.get(found["recipe"])
    lines += [f"{found['source']}, compressed with `{found['recipe']}`{f' ({what})' if what else ''}.", ""]
    lines += ["| | before | after |", "| --- | --- | --- |", *_rows(found), ""]
    if found["quality"] is not None:
        lines += [_judged(found["quality"]), ""]
    lines += [_calibrated(found["calibration"]), "", f"Made with {found['made']}."]
    (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _front(text: str) -> list[str]:
    """What a source's card says of licence and language."""
    found = re.match(r"---\n(.*?)\n---\n", text, re.S)
    lines = found[1].splitlines() if found else []
    return [line for line in lines if line.startswith(("license", "language", "pipeline_tag", "library_name"))]


def _rows(found: Mapping[str, Any]) -> Sequence[str]:
    def row(name: str, before: str, after: str) -> str:
        return f"| {name} | {before} | {after} |"

    def size(count: int | None) -> str:
        return "not served yet" if count is None else f"{count / 1e6:,.2f} MB"

    sizes, memory, count = found["size_bytes"], found["memory_bytes"], found["parameters"]
    rows = [row("weight files", size(sizes["before"]), size(sizes["after"]))]
    rows.append(row("weights in memory", size(memory["before"]), size(memory["after"])))
    rows.append(row("parameters", f"{count['before']:,}", f"{count['after']:,}"))
    if (quality := found["quality"]) is not None:
        before, after = quality["perplexity_reference"]["value"], quality["perplexity"]["value"]
        rows.append(row("perplexity", f"{before:.4f}", f"{after:.4f} ({quality['perplexity_change']['value']:+.2%})"))
        rows.append(row("KL from the original, nats per token", "0", f"{quality['kl']['value']:.5f}"))
        rows.append(row("same most probable token", "100 %", f"{quality['top1']['value']:.2%}"))
    return rows


def _judged(quality: Mapping[str, Any]) -> str:
    return (
        f"Judged token by token over the same past, on {quality['tokens']:,} tokens of {quality['documents']} documents that "
        "calibration did not see; activations in float32."
    )


def _calibrated(said: Mapping[str, Any]) -> str:
    if not said["tokens"]:
        return "The method needs no calibration."
    return f"Calibrated on {said['tokens']:,} tokens of {said['texts']}, in rows of at most {said['length']}."
