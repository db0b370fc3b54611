"""How a compressed linear lies in a checkpoint: published layouts, with what config.json says of them.

A storage turns one linear into named tensors and back, by quant.layouts and quant.bitmask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ridgeline.compress.grid import Codes, Grid
from ridgeline.compress.inputs import Product, int8_tokens, plain
from ridgeline.core.errors import UnsupportedModel
from ridgeline.models.stored import HEAD, KEY, read_stored
from ridgeline.quant import bitmask
from ridgeline.quant.layouts import Published, decode, encode

Tensors = dict[str, torch.Tensor]
Settled = Codes | torch.Tensor
"""A linear as a method leaves it: on a grid, or in floats."""


class Storage(Protocol):
    """One way to store every linear of the layers."""

    @property
    def product(self) -> Product:
        """How a linear of this storage multiplies, given its weights as floats."""
        ...

    def pack(self, settled: Settled, dtype: torch.dtype) -> Tensors:
        """Tensors of a linear by the names behind its own ("weight_packed"). dtype: of what stays in floats.

        Raises UnsupportedModel for what the layout cannot hold."""
        ...

    def weight(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The linear's weights, float32 [out, in]."""
        ...

    def describe(self) -> dict[str, Any] | None:
        """quantization_config of config.json; None: there is none."""
        ...


@dataclass(frozen=True, slots=True)
class Floats:
    """The checkpoint's own floating-point type."""

    @property
    def product(self) -> Product:
        return plain

    def pack(self, settled: Settled, dtype: torch.dtype) -> Tensors:
        return {"weight": (settled.dequantize() if isinstance(settled, Codes) else settled).to(dtype)}

    def weight(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return tensors["weight"].float()

    def describe(self) -> dict[str, Any] | None:
        return None


INT8 = Published("int-quantized", 8, 0)
"""W8A8: weights with a scale per output, inputs rounded per token as they come."""


@dataclass(frozen=True, slots=True)
class Integers:
    """Integers with a scale per group, one of quant.layouts; with INT8 inputs are rounded to 8 bits per token as well."""

    form: Published

    @property
    def product(self) -> Product:
        return int8_tokens if self.form.layout == INT8.layout else plain

    def pack(self, settled: Settled, dtype: torch.dtype) -> Tensors:
        assert isinstance(settled, Codes)
        scales = settled.scales.to(settled.grid.scale_dtype)
        return encode(self.form, settled.codes, scales, settled.zeros, settled.g_idx)

    def weight(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        codes, scales, zeros, g_idx = decode(self.form, tensors)
        grid = Grid(self.form.bits, self.form.group, zeros is None)
        return Codes(grid, codes, scales, zeros, g_idx).dequantize()

    def describe(self) -> dict[str, Any] | None:
        form = self.form
        if form.layout == "awq":
            named = {"bits": form.bits, "group_size": form.group or -1, "zero_point": form.zeros, "version": "gemm"}
            return {"quant_method": "awq", **named, "modules_to_not_convert": [HEAD]}
        if form.layout in ("gptq", "gptq_v2"):
            named = {"bits": form.bits, "group_size": form.group or -1, "sym": not form.zeros, "desc_act": form.order}
            return {"quant_method": "gptq", **named, "checkpoint_format": form.layout, "lm_head": False}
        if form == INT8:
            eight = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
            return _tensors_config(form.layout, eight, {**eight, "strategy": "token", "dynamic": True})
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
    """Weights that are not zero, row after row, and a bit for every weight. structure: "unstructured" or as "2:4"."""

    structure: str = "unstructured"

    @property
    def product(self) -> Product:
        return plain

    def pack(self, settled: Settled, dtype: torch.dtype) -> Tensors:
        assert isinstance(settled, torch.Tensor)
        return bitmask.pack(settled.to(dtype))

    def weight(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return bitmask.unpack(tensors).float()

    def describe(self) -> dict[str, Any] | None:
        sparsity = {
            "format": "sparse-bitmask",
            "sparsity_structure": self.structure,
            "targets": ["Linear"],
            "ignore": [HEAD],
        }
        plain_groups: dict[str, Any] = {}
        return {
            "quant_method": "compressed-tensors",
            "format": "dense",
            "quantization_status": "compressed",
            "config_groups": plain_groups,
            "ignore": [HEAD],
            "sparsity_config": sparsity,
        }


def _tensors_config(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    """compressed-tensors' description of one group for all linears but the head."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [HEAD],
    }


def read_storage(config: Mapping[str, Any]) -> Storage:
    """How the checkpoint of a parsed config.json stores its linears. Raises UnsupportedModel naming what is not known."""
    said = config.get(KEY)
    if said is None:
        return Floats()
    sparsity = (said.get("sparsity_config") or {}) if isinstance(said, dict) else {}
    if sparsity.get("format") == "sparse-bitmask" and not said.get("config_groups"):
        return Bitmask(str(sparsity.get("sparsity_structure", "unstructured")))
    stored = read_stored(config)
    if stored.integers is None:
        raise UnsupportedModel(
            f"config.json: the {stored.quantization} weights of {KEY} cannot be converted to floats: "
            "give the unquantized checkpoint."
        )
    return Integers(stored.integers)
