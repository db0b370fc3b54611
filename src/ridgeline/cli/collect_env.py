"""Describe this machine for a bug report: versions, processor, memory, GPUs and the options set in the environment."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from ridgeline.cli.flags import Arguments, Parser, parser_for
from ridgeline.cli.show import bytes_text
from ridgeline.core.resolve import ENVIRONMENT, SECRETS
from ridgeline.hardware.probe import probe

PACKAGES = (
    "ridgeline", "torch", "triton", "numpy", "safetensors", "tokenizers", "jinja2", "aiohttp", "uvloop", "msgspec",
    "prometheus-client", "rich", "huggingface-hub", "llguidance", "transformers", "opentelemetry-sdk",
)  # fmt: skip


def parser() -> Parser:
    return parser_for("collect-env", __doc__ or "", (), model=False)


def run(args: Arguments) -> int:
    for name, value in facts():
        print(f"{name:18} {value}")
    return 0


def facts() -> list[tuple[str, str]]:
    """Collect (name, value) pairs. Does not import torch or open a GPU context."""
    machine = probe()
    lines = [
        ("python", sys.version.split()[0]),
        ("system", platform.platform()),
        ("processor", f"{machine.processor}, {machine.cores} cores, {' '.join(machine.features)}"),
        ("memory", f"{bytes_text(machine.host.memory_bytes)}, {bytes_text(machine.host.free_bytes)} free"),
    ]
    for index, gpu in enumerate(machine.gpus):
        note = "" if gpu.accelerator is not None else " (not in the hardware table)"
        lines.append((f"gpu {index}", f"{gpu.name}{note}, {bytes_text(gpu.memory_bytes)}"))
    lines += [(package, _version(package)) for package in PACKAGES]
    for name, value in sorted(os.environ.items()):
        if name.startswith((ENVIRONMENT, "CUDA_VISIBLE", "OMP_", "TORCH", "TRITON", "HF_HUB_OFFLINE")):
            secret = name.removeprefix(ENVIRONMENT).lower() in SECRETS
            lines.append((name, "***" if secret else value))
    return lines


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"
