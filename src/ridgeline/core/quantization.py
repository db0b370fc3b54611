"""Checks the option `quantization` at start-up, against the formats and a checkpoint."""

from __future__ import annotations

from ridgeline.core.errors import ConfigError
from ridgeline.core.spec import NUMBER_FORMATS

_CHECKPOINT_FORMATS = ("gptq", "awq", "compressed-tensors")
"""Names that other engines use for quantized checkpoints. They mean: the format that the checkpoint stores."""


def check_format(requested: str) -> None:
    """Raises ConfigError for a value of the option `quantization` that no checkpoint can be served with."""
    if requested not in ("", *NUMBER_FORMATS, *_CHECKPOINT_FORMATS):
        raise _unknown_format(requested)


def resolve_format(stored: str, requested: str) -> str:
    """The number format to serve a model with.

    stored: the checkpoint's format, "" for none. requested: the option `quantization`. Raises ConfigError for an unknown format, or
    for one that differs from the checkpoint's.
    """
    known = ("", *NUMBER_FORMATS, *(_CHECKPOINT_FORMATS if stored else ()))
    if requested not in known or (not stored and requested in NUMBER_FORMATS and NUMBER_FORMATS[requested].published):
        raise _unknown_format(requested)
    if stored and requested not in ("", stored, *_CHECKPOINT_FORMATS):
        raise ConfigError(
            f"--quantization is {requested!r}, but the checkpoint is already quantized ({stored}): leave the option out, or serve "
            "the unquantized model.",
            param="quantization",
        )
    return stored or requested


def _offered() -> list[str]:
    return [name for name, numbers in NUMBER_FORMATS.items() if not numbers.published]


def _unknown_format(requested: str) -> ConfigError:
    return ConfigError(
        f"--quantization {requested!r} is unknown: use {', '.join(name for name in _offered() if '-' not in name)}, "
        "fp8-weight, llm-int8, or int4-g64 and the like (3, 4 or 8 bits; g32 to g256 or channel; -zp for zero points).",
        param="quantization",
    )
