"""Products whose inputs are rounded to 8 bits, computed in floats: what W8A8 and LLM.int8() do to a model's numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ridgeline.ops.reference import OUTLIER, in_8_bits

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(x [..., in], weight [out, in], bias [out] or None) -> [..., out]: how a linear multiplies."""


def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Nothing is rounded."""
    return F.linear(x, weight, bias)


def int8_tokens(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Inputs in 8 bits per token; the weights are taken as they are."""
    return F.linear(in_8_bits(x), weight, bias)


def w8a8(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Inputs in 8 bits per token, weights in 8 bits per output channel."""
    return F.linear(in_8_bits(x), in_8_bits(weight), bias)


def llm_int8(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """LLM.int8(): inputs of which some token of x reaches OUTLIER stay as they are, with their weights; the rest as in
    `w8a8` (Dettmers et al. 2022, section 3.2)."""
    outliers = (x.abs() >= OUTLIER).flatten(0, -2).any(0)
    usual = F.linear(in_8_bits(x.masked_fill(outliers, 0.0)), in_8_bits(weight.masked_fill(outliers, 0.0)), bias)
    return usual + F.linear(x[..., outliers], weight[:, outliers])
