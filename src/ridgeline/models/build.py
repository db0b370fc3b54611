"""From a model folder to a decoder with weights: read the spec, make room by format and share, stream them in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ridgeline.core.config import ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.spec import ModelSpec
from ridgeline.models.config import GenerationDefaults, drop_idle_windows, read_model
from ridgeline.models.decoder import Decoder
from ridgeline.models.layers import Build
from ridgeline.models.weights import Progress, load_checkpoint, load_dummy
from ridgeline.ops.table import Ops
from ridgeline.parallel.mesh import ONE_DEVICE, Mesh
from ridgeline.quant.plain import PlainFormat

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder ready to run. `spec.dtype` and `spec.max_len` are those served, not those of the checkpoint."""

    spec: ModelSpec
    decoder: Decoder
    generation_defaults: GenerationDefaults


def served_spec(spec: ModelSpec, model: ModelConfig) -> ModelSpec:
    """The spec with the dtype and context length that `model` asks for. Raises ConfigError naming the option."""
    dtype = spec.dtype if model.dtype == "auto" else model.dtype
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} cannot be served; use one of {', '.join(DTYPES)}.", param="dtype")
    longest = model.max_model_len or spec.max_len
    if not 1 <= longest <= spec.max_len:
        raise ConfigError(
            f"max_model_len {longest} is outside the model's context of {spec.max_len} tokens: lower it.",
            param="max_model_len",
        )
    return replace(spec, dtype=dtype, max_len=longest, layers=drop_idle_windows(spec.layers, longest))


def build(
    model_dir: Path,
    *,
    model: ModelConfig,
    ops: Ops,
    device: torch.device,
    mesh: Mesh = ONE_DEVICE,
    progress: Progress | None = None,
) -> LoadedModel:
    """A decoder on `device` with its weights, in model.dtype (auto: the checkpoint's) and up to model.max_model_len.

    model.load_format dummy needs config.json alone. On the meta device nothing is allocated or read.
    Raises ConfigError or UnsupportedModel.
    """
    checkpoint, defaults = read_model(model_dir)
    spec = served_spec(checkpoint, model)
    dtype = DTYPES[spec.dtype]
    form = PlainFormat(ops, dtype, device)
    decoder = Decoder(Build(spec, ops, form, mesh, dtype, device), spec.max_len)
    if model.load_format == "dummy" or device.type == "meta":
        load_dummy(decoder, model.seed, progress)
    elif model.load_format in ("auto", "safetensors"):
        load_checkpoint(decoder, model_dir, progress)
    else:
        raise ConfigError(f"load_format {model.load_format!r} is unknown: use auto or dummy.", param="load_format")
    return LoadedModel(spec, decoder, defaults)
