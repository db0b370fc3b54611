"""Storage of compressed linears in a checkpoint: published layouts and their entry in config.json.

A storage converts one linear to named tensors and back (quant.layouts, quant.bitmask).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ridgeline.compress.grid import Codes, Grid
from ridgeline.compress.inputs import Product, float_product, int8_inputs
from ridgeline.core.errors import UnsupportedModel
from ridgeline.models.stored import HEAD, KEY, read_stored
from ridgeline.quant import bitmask
from ridgeline.quant.layouts import Published, decode, encode

Tensors = dict[str, torch.Tensor]
CompressedWeight = Codes | torch.Tensor
"""The result of a method for one linear: codes on a grid, or floats."""


class Storage(Protocol):
    """A way to store every linear of the layers."""

    @property
    def product(self) -> Product:
        """The product of a linear in this storage, given its weights as floats."""
        ...

    def pack(self, compressed: CompressedWeight, dtype: torch.dtype) -> Tensors:
        """Convert a linear to tensors, by the names after the linear's name ("weight_packed").

        dtype: type of tensors that stay in floats. Raises UnsupportedModel for what the layout cannot store.
        """
        ...

    def weight(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Restore the weights of a linear, float32 [out, in]."""
        ...

    def describe(self) -> dict[str, Any] | None:
        """Return the quantization_config of config.json. None: config.json has none."""
        ...


@dataclass(frozen=True, slots=True)
class Floats:
    """Weights in the checkpoint's floating-point type."""

    @property
    def product(self) -> Product:
        return float_product

    def pack(self, compressed: CompressedWeight, dtype: torch.dtype) -> Tensors:
        return {"weight": (compressed.dequantize() if isinstance(compressed, Codes) else compressed).to(dtype)}

    def weight(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return tensors["weight"].float()

    def describe(self) -> dict[str, Any] | None:
        return None


INT8 = Published("int-quantized", 8, 0)
"""W8A8: 8-bit weights with a scale per output. Inputs are rounded to 8 bits per token at run time."""


@dataclass(frozen=True, slots=True)
class Integers:
    """Integers in one of the layouts of quant.layouts. With INT8, inputs are rounded to 8 bits per token too."""

    form: Published

    @property
    def product(self) -> Product:
        return int8_inputs if self.form.layout == INT8.layout else float_product

    def pack(self, compressed: CompressedWeight, dtype: torch.dtype) -> Tensors:
        assert isinstance(compressed, Codes)
        scales = compressed.scales.to(compressed.grid.scale_dtype)
        return encode(self.form, compressed.codes, scales, compressed.zeros, compressed.g_idx)

    def codes(self, tensors: Mapping[str, torch.Tensor]) -> Codes:
        """Restore the codes of a linear."""
        codes, scales, zeros, g_idx = decode(self.form, tensors)
        return Codes(Grid(self.form.bits, self.form.group, zeros is None), codes, scales, zeros, g_idx)

    def weight(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.codes(tensors).dequantize()

    def describe(self) -> dict[str, Any] | None:
        form = self.form
        if form.layout == "awq":
            keys = {"bits": form.bits, "group_size": form.group or -1, "zero_point": form.zeros, "version": "gemm"}
            return {"quant_method": "awq", **keys, "modules_to_not_convert": [HEAD]}
        if form.layout in ("gptq", "gptq_v2"):
            keys = {"bits": form.bits, "group_size": form.group or -1, "sym": not form.zeros, "desc_act": form.order}
            return {"quant_method": "gptq", **keys, "checkpoint_format": form.layout, "lm_head": False}
        if form == INT8:
            weights_8bit = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
            return _tensors_config(form.layout, weights_8bit, {**weights_8bit, "strategy": "token", "dynamic": True})
        weights = {
            "num_bits": form.bits,
            "type": "int",
            "symmetric": not form.zeros,
            "strategy": "group" if form.group else "channel",
            "group_size": form.group or None,
            "actorder": "group" if form.order else None,
        }
        return _tensors_config("pack-quantized", weights, None)


@dataclass(frozen=True, slots=True)
class Bitmask:
    """Non-zero weights and a bit mask. structure: "unstructured" or an N:M pattern such as "2:4"."""

    structure: str = "unstructured"

    @property
    def product(self) -> Product:
        return float_product

    def pack(self, compressed: CompressedWeight, dtype: torch.dtype) -> Tensors:
        assert isinstance(compressed, torch.Tensor)
        return bitmask.pack(compressed.to(dtype))

    def weight(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return bitmask.unpack(tensors).float()

    def describe(self) -> dict[str, Any] | None:
        sparsity = {
            "format": "sparse-bitmask",
            "sparsity_structure": self.structure,
            "targets": ["Linear"],
            "ignore": [HEAD],
        }
        no_groups: dict[str, Any] = {}
        return {
            "quant_method": "compressed-tensors",
            "format": "dense",
            "quantization_status": "compressed",
            "config_groups": no_groups,
            "ignore": [HEAD],
            "sparsity_config": sparsity,
        }


def _tensors_config(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    """Return the quantization_config of compressed-tensors with one group for all linears but the head."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [HEAD],
    }


def read_storage(config: Mapping[str, Any]) -> Storage:
    """Return the storage of a checkpoint from its parsed config.json. Raises UnsupportedModel for an unknown format."""
    quantization_config = config.get(KEY)
    if quantization_config is None:
        return Floats()
    sparsity = (quantization_config.get("sparsity_config") or {}) if isinstance(quantization_config, dict) else {}
    if sparsity.get("format") == "sparse-bitmask" and not quantization_config.get("config_groups"):
        return Bitmask(str(sparsity.get("sparsity_structure", "unstructured")))
    stored = read_stored(config)
    if stored.integers is None:
        raise UnsupportedModel(
            f"config.json: the {stored.quantization} weights of {KEY} cannot be converted to floats: "
            "give the unquantized checkpoint."
        )
    return Integers(stored.integers)
