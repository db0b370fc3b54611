"""Checks the option `quantization` at start-up, against the formats and a checkpoint, and says what it quantizes."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.core.errors import ConfigError
from ridgeline.core.gpu_blocks import GPU_BLOCKS
from ridgeline.core.spec import NUMBER_FORMATS, ModelSpec

_CHECKPOINT_FORMATS = ("gptq", "awq", "compressed-tensors")
"""Names that other engines use for quantized checkpoints. They mean: the format that the checkpoint stores."""

HEAD_FORMAT = "int8"
"""Of the head beside layers in any format of the option. A step reads the whole head. Eight bits with a scale per token of the
vocabulary change the logits little beside what any of these formats changes (benchmarks/results/heads.json)."""


def check_format(requested: str) -> None:
    """Raises ConfigError for a value of the option `quantization` that no checkpoint can be served with."""
    if requested not in ("", *NUMBER_FORMATS, *_CHECKPOINT_FORMATS):
        raise _unknown_format(requested)


def check_experts(spec: ModelSpec, kind: str) -> None:
    """Raises ConfigError for experts in a number format in which a GPU has no products for them. kind: of the device, see
    core.gpu_blocks; a CPU multiplies by experts in every format."""
    name = spec.quantization
    if kind not in GPU_BLOCKS or not name or NUMBER_FORMATS[name].on_gpu_experts or not spec.has_experts:
        return
    served = (known for known, form in NUMBER_FORMATS.items() if form.on_gpu_experts)
    known = ", ".join(sorted(known for known in served if "-g" not in known and "-channel" not in known))
    raise ConfigError(
        f"A GPU has no products for experts in {name}, only in {known}: serve the model in one of these, or unquantized, or on a "
        "CPU (--device cpu).",
        param="quantization",
    )


def quantized(spec: ModelSpec, name: str) -> ModelSpec:
    """A model in floating point with layers in a format of NUMBER_FORMATS and a head in HEAD_FORMAT; "": as it is."""
    return replace(spec, quantization=name, head_format=HEAD_FORMAT if name else "")


def with_format(spec: ModelSpec, requested: str) -> ModelSpec:
    """The model of a checkpoint as it is served with the option `quantization`.

    Raises ConfigError for an unknown format, or for one that differs from the checkpoint's.
    """
    stored = spec.quantization
    known = ("", *NUMBER_FORMATS, *(_CHECKPOINT_FORMATS if stored else ()))
    if requested not in known or (not stored and requested in NUMBER_FORMATS and NUMBER_FORMATS[requested].published):
        raise _unknown_format(requested)
    if stored and requested not in ("", stored, *_CHECKPOINT_FORMATS):
        raise ConfigError(
            f"--quantization is {requested!r}, but the checkpoint is already quantized ({stored}): leave the option out, or serve "
            "the unquantized model.",
            param="quantization",
        )
    return spec if stored else quantized(spec, requested)


def _offered() -> list[str]:
    return [name for name, numbers in NUMBER_FORMATS.items() if not numbers.published]


def _unknown_format(requested: str) -> ConfigError:
    return ConfigError(
        f"--quantization {requested!r} is unknown: use {', '.join(name for name in _offered() if '-' not in name)}, "
        "fp8-weight, llm-int8, or int4-g64 and the like (3, 4 or 8 bits; g32 to g256 or channel; -zp for zero points).",
        param="quantization",
    )
