"""A model with outlier features that computes what another one computes: to see what 8-bit inputs do to such models.

Small models have none of the few inputs, a hundred times larger than the rest, that large ones have (Dettmers et al. 2022).
Multiplying some channels of a norm's gain and dividing the columns of the weights that read them makes them. A factor that is
a power of two changes no digit of any weight.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from ridgeline.compress.checkpoint import LINEAR_NAMES, Checkpoint
from ridgeline.compress.methods import sources
from ridgeline.core.errors import ConfigError

FACTOR = 128.0
CHANNELS = 6
"""About what a model of seven layers of width 384 would have: 1.5 % of the width."""


def add_outliers(
    source: Checkpoint, out: Path, channels: int = CHANNELS, factor: float = FACTOR, seed: int = 0
) -> None:
    """Write a copy of a model with `channels` outlier channels behind every norm of the stream.

    Raises ConfigError for norms that scale by (1 + weight), whose gain a factor would round.
    """
    spec = source.spec
    if spec.norm_offset:
        raise ConfigError(
            f"{source.folder} cannot get outlier channels: its norms scale by 1 + weight, so a factor would be rounded."
        )
    chosen = torch.randperm(spec.d_model, generator=torch.Generator().manual_seed(seed))[:channels]
    tensors = dict(source.outside())
    for index in range(len(spec.layers)):
        stored, prefix = source.stored(index), source.prefix(index)
        for one in sources(spec):
            if one.maker in LINEAR_NAMES:
                continue
            stored[f"{one.maker}.weight"][chosen] *= factor
            for reader in one.readers:
                stored[f"{reader}.weight"][:, chosen] /= factor
        tensors.update({prefix + name: tensor for name, tensor in stored.items()})
    out.mkdir(parents=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    for path in source.folder.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
            shutil.copyfile(path, out / path.name)
