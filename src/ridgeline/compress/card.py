"""The card of a compressed model: what was done, and size, memory, speed, perplexity, drift and tasks before and after."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ridgeline
from ridgeline.compress.checkpoint import Checkpoint
from ridgeline.compress.recipes import EXAMPLES, Recipe
from ridgeline.core.errors import RidgelineError
from ridgeline.core.plural import counted
from ridgeline.models.config import read_model
from ridgeline.quality.drift import Drift
from ridgeline.quality.tasks import Tally
from ridgeline.quality.verdict import task_counts

CARD = "compression.json"


@dataclass(frozen=True, slots=True)
class Served:
    """What both models do when they are served. device: where. speed: tokens per second of one request, before and after.

    tasks: the original is the reference. None: not asked for.
    """

    device: str
    speed: tuple[float, float] | None
    tasks: Tally | None


def card(
    recipe: Recipe,
    pair: tuple[Checkpoint, Checkpoint],
    calibration: Mapping[str, Any],
    drift: Drift | None,
    served: Served | None,
    training: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The card as data. pair: the original and the result. calibration: where the texts came from and how many tokens ran.
    drift: None if nobody judged; served: None if nobody served. training: texts, unique_tokens, tokens, steps and loss of what
    followed; None: nothing did.

    Sizes are bytes of the weight files; memory is what the weights take when served, None where nothing serves them yet.
    """
    source, result = pair
    return {
        "recipe": recipe.name,
        "method": recipe.method,
        "bits": recipe.bits,
        "group": recipe.grid.group if recipe.bits else None,
        "source": source.folder.name,
        "made": f"ridgeline {ridgeline.__version__}, {datetime.now(UTC):%Y-%m-%d}",
        "calibration": dict(calibration),
        "training": None if training is None else dict(training),
        "size_bytes": {"before": source.bytes, "after": result.bytes},
        "parameters": {"before": source.spec.params, "after": result.spec.params},
        "memory_bytes": {"before": _memory(source.folder), "after": _memory(result.folder)},
        "quality": None if drift is None else _quality(drift),
        "speed": None if served is None or served.speed is None else _speed(served.device, *served.speed),
        "tasks": None if served is None or served.tasks is None else _tasks(served.tasks),
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


def _speed(device: str, before: float, after: float) -> dict[str, Any]:
    return {"device": device, "tok_s": {"before": round(before, 1), "after": round(after, 1)}}


def _tasks(tally: Tally) -> dict[str, Any]:
    figures = {name: asdict(one) for name, one in tally.figures.items()}
    return {"questions": tally.questions, **figures, "by_task": task_counts(tally)}


def write_card(folder: Path, name: str, source: Path, found: Mapping[str, Any]) -> None:
    """Put the card into the folder: as JSON, and as README.md for people. name: what the model is called there."""
    (folder / CARD).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    readme = source / "README.md"
    head = _front(readme.read_text(encoding="utf-8")) if readme.is_file() else []
    lines = ["---", *head, f"base_model: {found['source']}", "---", "", f"# {name}", ""]
    what = EXAMPLES.get(found["recipe"])
    lines += [f"{found['source']}, compressed with `{found['recipe']}`{f' ({what})' if what else ''}.", ""]
    lines += ["| | before | after |", "| --- | --- | --- |", *_rows(found), ""]
    if found["quality"] is not None:
        lines += [_judged(found["quality"]), ""]
    if found["tasks"] is not None:
        lines += [_answered(found["tasks"]), ""]
    lines += [_calibrated(found["calibration"]), ""]
    if found["training"] is not None:
        lines += [_trained(found["training"]), ""]
    lines += [f"Made with {found['made']}."]
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
        return "not measured" if count is None else f"{count / 1e6:,.2f} MB"

    sizes, memory, count = found["size_bytes"], found["memory_bytes"], found["parameters"]
    rows = [row("weight files", size(sizes["before"]), size(sizes["after"]))]
    rows.append(row("weights in memory", size(memory["before"]), size(memory["after"])))
    rows.append(row("parameters", f"{count['before']:,}", f"{count['after']:,}"))
    if (quality := found["quality"]) is not None:
        before, after = quality["perplexity_reference"]["value"], quality["perplexity"]["value"]
        rows.append(row("perplexity", f"{before:.4f}", f"{after:.4f} ({quality['perplexity_change']['value']:+.2%})"))
        rows.append(row("KL from the original, nats per token", "0", f"{quality['kl']['value']:.5f}"))
        rows.append(row("same most probable token", "100 %", f"{quality['top1']['value']:.2%}"))
    if (speed := found["speed"]) is not None:
        name = f"tokens per second of one request, {speed['device']}"
        rows.append(row(name, *(f"{speed['tok_s'][when]:,.1f}" for when in ("before", "after"))))
    if (tasks := found["tasks"]) is not None:
        shares = (_interval(tasks[name]) for name in ("task_accuracy_reference", "task_accuracy"))
        rows.append(row(f"correct answers to {counted(tasks['questions'], 'question')}", *shares))
    return rows


def _interval(one: Mapping[str, float]) -> str:
    return f"{one['value']:.1%} ({one['low']:.1%} to {one['high']:.1%})"


def _answered(tasks: Mapping[str, Any]) -> str:
    drop = tasks["task_drop"]
    each = (
        f"{name} {one['right_reference']} and {one['right']} of {one['asked']}"
        for name, one in tasks["by_task"].items()
    )
    return (
        f"Both models answered the questions with greedy decoding. Correct answers before and after: {'; '.join(each)}. The "
        f"share of correct answers falls by {drop['value']:.1%} ({drop['low']:.1%} to {drop['high']:.1%}). All intervals are 95 %."
    )


def _judged(quality: Mapping[str, Any]) -> str:
    return (
        f"Perplexity and KL are measured on {quality['tokens']:,} tokens of {counted(quality['documents'], 'document')} that the "
        "calibration did not use, with activations in float32."
    )


def _calibrated(said: Mapping[str, Any]) -> str:
    if not said["tokens"]:
        return "The method needs no calibration."
    return f"Calibrated on {said['tokens']:,} tokens of {said['texts']}, in rows of at most {said['length']}."


def _trained(said: Mapping[str, Any]) -> str:
    return (
        f"Trained afterwards to match the original: {counted(said['steps'], 'step')}, {said['tokens']:,} tokens drawn from the "
        f"{said['unique_tokens']:,} tokens of {said['texts']}. The last loss is {said['loss']:.4f} nats per token."
    )
