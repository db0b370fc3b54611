"""A model folder read layer by layer, in whatever numbers it is stored: at most one layer in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ridgeline.compress.inputs import Product
from ridgeline.compress.storage import Storage, Tensors, read_storage
from ridgeline.core.errors import ConfigError, UnsupportedModel
from ridgeline.models.build import DTYPES
from ridgeline.models.config import read_spec
from ridgeline.models.stored import KEY
from ridgeline.models.weights import EMBEDDING, FINAL_NORM, HEAD, LINEARS, UNUSED, checkpoint_files, opened, short_name

LAYER = "layers"
LINEAR_NAMES = tuple(name for names in LINEARS.values() for name in names)
"""The linears of a layer, in the order they are used."""


class Checkpoint:
    """A model folder. `config`: its parsed config.json; `spec` leaves the number format out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"Cannot read {folder / 'config.json'}: {getattr(error, 'strerror', None) or error}."
            ) from None
        self.spec = read_spec({key: value for key, value in self.config.items() if key != KEY})
        self.storage: Storage = read_storage(self.config)
        self.files = checkpoint_files(folder)
        self._where: dict[str, tuple[Path, str]] = {}
        for path in self.files:
            with opened(path) as shard:
                for name in shard.offset_keys():
                    if not UNUSED.search(name):
                        self._where[short_name(name)] = path, name

    @property
    def product(self) -> Product:
        """How its linears multiply."""
        return self.storage.product

    @property
    def dtype(self) -> torch.dtype:
        """Of what is stored in floats."""
        return DTYPES[self.spec.dtype]

    @property
    def bytes(self) -> int:
        """Size of its weight files."""
        return sum(path.stat().st_size for path in self.files)

    def full_name(self, short: str) -> str:
        """A tensor's name in the files."""
        if short not in self._where:
            raise UnsupportedModel(f"The checkpoint {self.folder} lacks the tensor {short}.")
        return self._where[short][1]

    def tensor(self, short: str) -> torch.Tensor:
        name = self.full_name(short)
        with opened(self._where[short][0]) as shard:
            return shard.get_tensor(name)

    def outside(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(full name, tensor) of everything that belongs to no layer: embedding, final norm, head."""
        for short, (_, name) in self._where.items():
            if not short.startswith(LAYER + "."):
                yield name, self.tensor(short)

    def stored(self, index: int) -> Tensors:
        """Tensors of a layer as they are stored, by their names within it ("self_attn.q_proj.weight")."""
        prefix = f"{LAYER}.{index}."
        return {short.removeprefix(prefix): self.tensor(short) for short in self._where if short.startswith(prefix)}

    def prefix(self, index: int) -> str:
        """What stands before the names of a layer's tensors in the files: "model.layers.3."."""
        short = f"{LAYER}.{index}.input_layernorm.weight"
        return self.full_name(short).removesuffix("input_layernorm.weight")

    def layer(self, index: int) -> Tensors:
        """Weights, biases and norms of a layer in float32, by their names within it."""
        found = self.stored(index)
        dense: Tensors = {}
        for linear in LINEAR_NAMES:
            own = {name: found.pop(name) for name in list(found) if name.startswith(linear + ".")}
            mine = {name.removeprefix(linear + "."): tensor for name, tensor in own.items()}
            bias = mine.pop("bias", None)
            try:
                dense[f"{linear}.weight"] = self.storage.weight(mine)
            except KeyError as error:
                raise UnsupportedModel(
                    f"The checkpoint {self.folder} lacks the tensor {linear}.{error.args[0]} of layer {index}."
                ) from None
            if bias is not None:
                dense[f"{linear}.bias"] = bias.float()
        return dense | {name: tensor.float() for name, tensor in found.items()}

    def embedding(self) -> torch.Tensor:
        return self.tensor(EMBEDDING).float()

    def final_norm(self) -> torch.Tensor:
        return self.tensor(FINAL_NORM).float()

    def head(self) -> torch.Tensor:
        """What logits are products with, float32 [vocab, d_model]."""
        return self.embedding() if self.spec.tied else self.tensor(HEAD).float()
