"""A model folder read layer by layer in any supported number format. At most one layer is in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ridgeline.compress.grid import Codes
from ridgeline.compress.inputs import Product
from ridgeline.compress.storage import Integers, Storage, Tensors, read_storage
from ridgeline.core.errors import ConfigError, UnsupportedModel
from ridgeline.models.build import DTYPES
from ridgeline.models.config import read_spec
from ridgeline.models.stored import KEY
from ridgeline.models.tensor_names import require_llama
from ridgeline.models.unquantized_modules import check_modules
from ridgeline.models.weights import EMBEDDING, FINAL_NORM, HEAD, LINEARS, UNUSED, checkpoint_files, opened, short_name

LAYER = "layers"
LINEAR_NAMES = tuple(name for names in LINEARS.values() for name in names)
"""The linears of a layer, in order of use."""


class Checkpoint:
    """A model folder.

    Attributes:
        config: the parsed config.json.
        spec: the model without its number format.
        storage: the layout of the linears.
        files: the weight files.
    """

    def __init__(self, folder: Path, *, needs_weights: bool = True) -> None:
        """Read config.json and the names of the tensors. needs_weights: whether a folder without weight files is refused."""
        self.folder = folder
        try:
            self.config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"Cannot read {folder / 'config.json'}: {getattr(error, 'strerror', None) or error}."
            ) from None
        self.spec = read_spec({key: value for key, value in self.config.items() if key != KEY})
        require_llama(self.spec)
        if self.spec.has_experts:
            raise ConfigError(
                f"{folder} is a model with experts, which compression does not support: serve it with --quantization int8, int4 or "
                "fp8-weight, which quantize its experts while they load."
            )
        self.storage: Storage = read_storage(self.config)
        check_modules(self.config, self.spec)
        self.files = checkpoint_files(folder) if needs_weights or any(folder.glob("*.safetensors*")) else ()
        self._locations: dict[str, tuple[Path, str]] = {}
        for path in self.files:
            with opened(path) as shard:
                for name in shard.offset_keys():
                    if not UNUSED.search(name):
                        self._locations[short_name(name)] = path, name

    @property
    def product(self) -> Product:
        """How the linears of the model multiply."""
        return self.storage.product

    @property
    def dtype(self) -> torch.dtype:
        """Type of the tensors that are stored in floats."""
        return DTYPES[self.spec.dtype]

    @property
    def bytes(self) -> int:
        """Size of the weight files."""
        return sum(path.stat().st_size for path in self.files)

    def full_name(self, short: str) -> str:
        """Return the name of a tensor in the files."""
        if short not in self._locations:
            raise UnsupportedModel(f"The checkpoint {self.folder} lacks the tensor {short}.")
        return self._locations[short][1]

    def tensor(self, short: str) -> torch.Tensor:
        """Read a tensor as it is stored."""
        name = self.full_name(short)
        with opened(self._locations[short][0]) as shard:
            return shard.get_tensor(name)

    def tensors_outside_layers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (full name, tensor) of embedding, final norm and head."""
        for short, (_, name) in self._locations.items():
            if not short.startswith(LAYER + "."):
                yield name, self.tensor(short)

    def stored_layer(self, index: int) -> Tensors:
        """Read the tensors of a layer as they are stored, by their names in the layer ("self_attn.q_proj.weight")."""
        prefix = f"{LAYER}.{index}."
        return {short.removeprefix(prefix): self.tensor(short) for short in self._locations if short.startswith(prefix)}

    def prefix(self, index: int) -> str:
        """Return the prefix of a layer's tensors in the files, such as "model.layers.3."."""
        short = f"{LAYER}.{index}.input_layernorm.weight"
        return self.full_name(short).removesuffix("input_layernorm.weight")

    def layer(self, index: int) -> Tensors:
        """Read weights, biases and norms of a layer in float32, by their names in the layer."""
        stored = self.stored_layer(index)
        dense: Tensors = {}
        for linear in LINEAR_NAMES:
            full_names = {name: stored.pop(name) for name in list(stored) if name.startswith(linear + ".")}
            parts = {name.removeprefix(linear + "."): tensor for name, tensor in full_names.items()}
            bias = parts.pop("bias", None)
            try:
                dense[f"{linear}.weight"] = self.storage.weight(parts)
            except KeyError as error:
                raise UnsupportedModel(
                    f"The checkpoint {self.folder} lacks the tensor {linear}.{error.args[0]} of layer {index}."
                ) from None
            if bias is not None:
                dense[f"{linear}.bias"] = bias.float()
        return dense | {name: tensor.float() for name, tensor in stored.items()}

    def codes(self, index: int) -> dict[str, Codes]:
        """Read the codes of a layer's linears, by their names in the layer. Empty if the checkpoint stores no integers."""
        storage = self.storage
        if not isinstance(storage, Integers):
            return {}
        stored = self.stored_layer(index)
        return {
            linear: storage.codes(
                {name.removeprefix(linear + "."): stored[name] for name in stored if name.startswith(linear + ".")}
            )
            for linear in LINEAR_NAMES
        }

    def embedding(self) -> torch.Tensor:
        """Read the embedding, float32 [vocab, d_model]."""
        return self.tensor(EMBEDDING).float()

    def final_norm(self) -> torch.Tensor:
        """Read the weight of the norm before the head, float32 [d_model]."""
        return self.tensor(FINAL_NORM).float()

    def head(self) -> torch.Tensor:
        """Read the output projection, float32 [vocab, d_model]."""
        return self.embedding() if self.spec.tied else self.tensor(HEAD).float()
