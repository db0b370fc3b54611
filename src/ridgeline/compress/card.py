"""The card of a compressed model: the recipe, and size, memory, KV cache, speed, perplexity, drift and tasks before and after."""

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
class ServedFigures:
    """Measurements of both models while they are served. None: not measured."""

    device: str
    speed: tuple[float, float] | None
    """Tokens per second of one request, before and after."""
    tasks: Tally | None
    """The original model is the reference."""


def card(
    recipe: Recipe,
    pair: tuple[Checkpoint, Checkpoint],
    calibration: Mapping[str, Any],
    drift: Drift | None,
    served: ServedFigures | None,
    training: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Build the card as JSON data.

    Sizes are bytes of the weight files, None for a served original without them. Memory is the size of the weights when served,
    None if no engine serves the format. KV bytes are those of a token in the cache of all layers, in the model's dtype.

    Args:
        pair: the original and the compressed model.
        calibration: source of the texts, number of tokens and row length.
        drift: None if drift was not measured.
        served: None if the models were not served.
        training: texts, unique_tokens, tokens, steps and loss. None: the model was not trained.
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
        "size_bytes": {"before": source.bytes or None, "after": result.bytes},
        "parameters": {"before": source.spec.params, "after": result.spec.params},
        "memory_bytes": {"before": _memory(source.folder), "after": _memory(result.folder)},
        "kv_bytes_per_token": {"before": source.spec.kv_bytes_per_token(), "after": result.spec.kv_bytes_per_token()},
        "quality": None if drift is None else _quality(drift),
        "speed": None if served is None or served.speed is None else _speed(served.device, *served.speed),
        "tasks": None if served is None or served.tasks is None else _tasks(served.tasks),
    }


def _memory(folder: Path) -> int | None:
    """Return the bytes of a model's weights when served, or None if it cannot be served."""
    try:
        return read_model(folder)[0].weight_bytes
    except RidgelineError:
        return None


def _quality(drift: Drift) -> dict[str, Any]:
    return {
        "tokens": drift.tokens,
        "documents": drift.documents,
        **{name: asdict(estimate) for name, estimate in drift.figures.items()},
    }


def _speed(device: str, before: float, after: float) -> dict[str, Any]:
    return {"device": device, "tok_s": {"before": round(before, 1), "after": round(after, 1)}}


def _tasks(tally: Tally) -> dict[str, Any]:
    figures = {name: asdict(estimate) for name, estimate in tally.figures.items()}
    return {"questions": tally.questions, **figures, "by_task": task_counts(tally)}


def write_card(folder: Path, name: str, source: Path, content: Mapping[str, Any]) -> None:
    """Write the card into the folder, as JSON and as README.md. name: title of the README."""
    (folder / CARD).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    readme = source / "README.md"
    front_matter = _front_matter(readme.read_text(encoding="utf-8")) if readme.is_file() else []
    lines = ["---", *front_matter, f"base_model: {content['source']}", "---", "", f"# {name}", ""]
    description = EXAMPLES.get(content["recipe"])
    lines += [
        f"{content['source']}, compressed with `{content['recipe']}`{f' ({description})' if description else ''}.",
        "",
    ]
    lines += ["| | before | after |", "| --- | --- | --- |", *_rows(content), ""]
    if content["quality"] is not None:
        lines += [_quality_text(content["quality"]), ""]
    if content["tasks"] is not None:
        lines += [_tasks_text(content["tasks"]), ""]
    lines += [_calibration_text(content["calibration"]), ""]
    if content["training"] is not None:
        lines += [_training_text(content["training"]), ""]
    lines += [f"Made with {content['made']}."]
    (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _front_matter(text: str) -> list[str]:
    """Return the lines about licence, language and library from the front matter of a model card."""
    match = re.match(r"---\n(.*?)\n---\n", text, re.S)
    lines = match[1].splitlines() if match else []
    return [line for line in lines if line.startswith(("license", "language", "pipeline_tag", "library_name"))]


def _rows(content: Mapping[str, Any]) -> Sequence[str]:
    def row(name: str, before: str, after: str) -> str:
        return f"| {name} | {before} | {after} |"

    def size(count: int | None) -> str:
        return "not measured" if count is None else f"{count / 1e6:,.2f} MB"

    sizes, memory, count = content["size_bytes"], content["memory_bytes"], content["parameters"]
    cache = content["kv_bytes_per_token"]
    rows = [row("weight files", size(sizes["before"]), size(sizes["after"]))]
    rows.append(row("weights in memory", size(memory["before"]), size(memory["after"])))
    rows.append(row("KV cache, bytes per token", f"{cache['before']:,}", f"{cache['after']:,}"))
    rows.append(row("parameters", f"{count['before']:,}", f"{count['after']:,}"))
    if (quality := content["quality"]) is not None:
        before, after = quality["perplexity_reference"]["value"], quality["perplexity"]["value"]
        rows.append(row("perplexity", f"{before:.4f}", f"{after:.4f} ({quality['perplexity_change']['value']:+.2%})"))
        rows.append(row("KL from the original, nats per token", "0", f"{quality['kl']['value']:.5f}"))
        rows.append(row("same most probable token", "100 %", f"{quality['top1']['value']:.2%}"))
    if (speed := content["speed"]) is not None:
        name = f"tokens per second of one request, {speed['device']}"
        rows.append(row(name, *(f"{speed['tok_s'][when]:,.1f}" for when in ("before", "after"))))
    if (tasks := content["tasks"]) is not None:
        shares = (_interval(tasks[name]) for name in ("task_accuracy_reference", "task_accuracy"))
        rows.append(row(f"correct answers to {counted(tasks['questions'], 'question')}", *shares))
    return rows


def _interval(estimate: Mapping[str, float]) -> str:
    return f"{estimate['value']:.1%} ({estimate['low']:.1%} to {estimate['high']:.1%})"


def _tasks_text(tasks: Mapping[str, Any]) -> str:
    drop = tasks["task_drop"]
    parts = (
        f"{name} {counts['right_reference']} and {counts['right']} of {counts['asked']}"
        for name, counts in tasks["by_task"].items()
    )
    return (
        f"Both models answered the questions with greedy decoding. Correct answers before and after: {'; '.join(parts)}. The "
        f"share of correct answers falls by {drop['value']:.1%} ({drop['low']:.1%} to {drop['high']:.1%}). All intervals are 95 %."
    )


def _quality_text(quality: Mapping[str, Any]) -> str:
    return (
        f"Perplexity and KL are measured on {quality['tokens']:,} tokens of {counted(quality['documents'], 'document')} that the "
        "calibration did not use, with activations in float32."
    )


def _calibration_text(calibration: Mapping[str, Any]) -> str:
    if not calibration["tokens"]:
        return "The method needs no calibration."
    return f"Calibrated on {calibration['tokens']:,} tokens of {calibration['texts']}, in rows of at most {calibration['length']}."


def _training_text(record: Mapping[str, Any]) -> str:
    return (
        f"Trained afterwards to match the original: {counted(record['steps'], 'step')}, {record['tokens']:,} tokens drawn from the "
        f"{record['unique_tokens']:,} tokens of {record['texts']}. The last loss is {record['loss']:.4f} nats per token."
    )
