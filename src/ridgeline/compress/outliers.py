"""Add outlier features to a model without changing its function, to test 8-bit inputs.

Large models have a few inputs about a hundred times larger than the others (Dettmers et al. 2022). Small models have none.
This module multiplies some channels of a norm's gain and divides the columns of the weights that read them. The factor is a
power of two by default, so weights are not rounded.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from ridgeline.compress.checkpoint import LINEAR_NAMES, Checkpoint
from ridgeline.compress.methods import linear_inputs
from ridgeline.core.errors import ConfigError

FACTOR = 128.0
CHANNELS = 6
"""1.5 % of the width of the packaged model (seven layers of width 384)."""


def add_outliers(
    source: Checkpoint, out: Path, channels: int = CHANNELS, factor: float = FACTOR, seed: int = 0
) -> None:
    """Write a copy of a model with `channels` outlier channels in the output of every norm of the residual stream.

    Raises ConfigError for norms that scale by (1 + weight), because the factor would be rounded.
    """
    spec = source.spec
    if spec.norm_offset:
        raise ConfigError(
            f"{source.folder} cannot get outlier channels: its norms scale by 1 + weight, so a factor would be rounded."
        )
    chosen = torch.randperm(spec.d_model, generator=torch.Generator().manual_seed(seed))[:channels]
    tensors = dict(source.tensors_outside_layers())
    for index in range(len(spec.layers)):
        stored, prefix = source.stored_layer(index), source.prefix(index)
        for linear_input in linear_inputs(spec):
            if linear_input.producer in LINEAR_NAMES:
                continue
            stored[f"{linear_input.producer}.weight"][chosen] *= factor
            for consumer in linear_input.consumers:
                stored[f"{consumer}.weight"][:, chosen] /= factor
        tensors.update({prefix + name: tensor for name, tensor in stored.items()})
    out.mkdir(parents=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    for path in source.folder.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
            shutil.copyfile(path, out / path.name)
