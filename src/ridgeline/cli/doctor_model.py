"""Checks of a model for `ridgeline doctor`: its files, and whether Ridgeline serves its architecture."""

from __future__ import annotations

import json
from pathlib import Path

from ridgeline.cli.doctor_machine import Check
from ridgeline.cli.show import bytes_text
from ridgeline.core.errors import RidgelineError
from ridgeline.gguf.folder import LINK, SUFFIX, model_folder
from ridgeline.hardware.probe import probe
from ridgeline.models.config import read_model

_INDEX = "model.safetensors.index.json"


def check_model(name: str) -> list[Check]:
    """name: a model folder, a GGUF file, or a hub name, which is not downloaded."""
    folder = Path(name).expanduser()
    weights = folder if folder.suffix == SUFFIX and folder.is_file() else None
    if not folder.is_dir() and weights is None:
        remedy = "give its folder to check it before the start; the start downloads a hub name."
        return [Check("model", "warn", f"{name} is not a folder", remedy)]
    try:
        folder = model_folder(weights) if weights else folder
        spec, _ = read_model(folder)
    except (RidgelineError, OSError, ValueError) as error:
        return [
            Check("model", "fail", str(error), "give a model folder in the layout of Hugging Face, or a GGUF file.")
        ]
    checks = [Check("model", "ok", f"{weights or folder}: {spec.architecture}, {len(spec.layers)} layers")]
    missing = [file for file in ("tokenizer.json",) if not (folder / file).is_file()] + _missing_weights(folder)
    if missing:
        checks.append(Check("model files", "fail", f"missing: {', '.join(missing[:3])}", "download the model again."))
        return checks
    size = sum(file.stat().st_size for file in ([weights] if weights else folder.glob("*.safetensors")))
    device = probe().device()
    detail = f"{bytes_text(size)} of weights, {bytes_text(device.free_bytes)} free on {device.name}"
    if size > device.free_bytes:
        checks.append(Check("model files", "warn", detail, f"`ridgeline fit {name}` says with which options it fits."))
    else:
        checks.append(Check("model files", "ok", detail))
    return checks


def _missing_weights(folder: Path) -> list[str]:
    """Files of weights that the folder should have."""
    if (folder / LINK).is_file():
        return []
    index = folder / _INDEX
    if not index.is_file():
        return [] if any(folder.glob("*.safetensors")) else ["*.safetensors"]
    try:
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError):
        return [_INDEX]
    return sorted(file for file in files if not (folder / file).is_file())
