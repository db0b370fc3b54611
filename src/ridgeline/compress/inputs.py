"""Products with inputs rounded to 8 bits, simulated in floats: W8A8 and LLM.int8()."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ridgeline.ops.reference import OUTLIER, in_8_bits

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""The product of a linear: (x [..., in], weight [out, in], bias [out] or None) -> [..., out]."""


def float_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply without rounding."""
    return F.linear(x, weight, bias)


def int8_inputs(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply with inputs rounded to 8 bits per token. The weights are not rounded."""
    return F.linear(in_8_bits(x), weight, bias)


def w8a8(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply with inputs rounded to 8 bits per token and weights to 8 bits per output channel."""
    return F.linear(in_8_bits(x), in_8_bits(weight), bias)


def llm_int8(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply as LLM.int8(): an input is not rounded, nor are its weights, if any token of x reaches OUTLIER there.

    The other inputs are rounded as in `w8a8`.
    Source: Dettmers et al. 2022, section 3.2.
    """
    outliers = (x.abs() >= OUTLIER).flatten(0, -2).any(0)
    regular = F.linear(in_8_bits(x.masked_fill(outliers, 0.0)), in_8_bits(weight.masked_fill(outliers, 0.0)), bias)
    return regular + F.linear(x[..., outliers], weight[:, outliers])
