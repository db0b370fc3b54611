"""Experts as checkpoints of gpt-oss store them, in floating point or in MXFP4, as tensors of each expert while they are read.

In floating point `gate_up_proj` is [experts, d_model, 2 width] and `down_proj` [experts, width, d_model]. In MXFP4 `_blocks` are
uint8 [experts, outputs, groups, 16] and `_scales` uint8 [experts, outputs, groups]: a byte holds two e2m1 values, the first one in
its low bits, and the 32 values of a group are multiplied by 2^(scale - 127). They are given in the blocks of GGUF, which
quant.blocks reads: the scale, then bytes with values i and i + 16. Outputs of gate and up alternate.
Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.2 and 6.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from ridgeline.core.errors import UnsupportedModel

Get = Callable[[], torch.Tensor]
Tensors = Iterator[tuple[str, Get]]
"""(name in the checkpoint, function that reads the tensor)."""

KINDS = ("", "_bias", "_blocks", "_scales")
SUFFIXES = {f"{name}_proj{kind}": (name, kind) for name in ("gate_up", "down") for kind in KINDS}


def in_blocks(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """blocks uint8 [outputs, groups, 16], scales uint8 [outputs, groups] -> uint8 [outputs, groups, 17]."""
    if blocks.shape[:-1] != scales.shape or blocks.shape[-1] != 16 or {blocks.dtype, scales.dtype} != {torch.uint8}:
        raise UnsupportedModel(f"has blocks {list(blocks.shape)} and scales {list(scales.shape)}, which is not MXFP4.")
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(2)
    return torch.cat((scales.unsqueeze(-1), codes[..., :16] | codes[..., 16:] << 4), -1)


def separate_stacked(tensors: Tensors) -> Tensors:
    """Yield the tensors of a checkpoint with one tensor for each projection of each expert, [outputs, inputs]."""
    parts: dict[str, Get] = {}
    for name, get in tensors:
        block, _, suffix = name.rpartition(".experts.")
        if suffix not in SUFFIXES:
            yield name, get
            continue
        linear, kind = SUFFIXES[suffix]
        if kind in ("", "_bias"):
            yield from _experts(block, linear, "bias" if kind else "weight", partial(_floats, get))
            continue
        stem = f"{block}.experts.{linear}_proj"
        parts[f"{stem}{kind}"] = get
        if f"{stem}_blocks" in parts and f"{stem}_scales" in parts:
            both = parts.pop(f"{stem}_blocks"), parts.pop(f"{stem}_scales")
            yield from _experts(block, linear, "weight", partial(_codes, name, *both))
    if parts:
        raise UnsupportedModel(f"The checkpoint has {', '.join(parts)} in a file without its blocks or scales.")


Part = Callable[[int, slice], torch.Tensor]
"""(expert, its outputs) -> their weights or biases."""


def _floats(get: Get) -> tuple[int, Part]:
    tensor = get()
    by_output = tensor.transpose(1, 2) if tensor.dim() == 3 else tensor
    return len(tensor), lambda expert, outputs: by_output[expert][outputs]


def _codes(name: str, blocks_of: Get, scales_of: Get) -> tuple[int, Part]:
    blocks, scales = blocks_of(), scales_of()

    def part(expert: int, outputs: slice) -> torch.Tensor:
        try:
            return in_blocks(blocks[expert][outputs], scales[expert][outputs])
        except UnsupportedModel as error:
            raise UnsupportedModel(f"The tensor {name} {error.message}") from None

    return len(blocks), part


def _experts(block: str, linear: str, suffix: str, read: Callable[[], tuple[int, Part]]) -> Tensors:
    """The tensors of each expert, which are read when they are asked for."""
    count, part = read()
    halves = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
    projections = halves if linear == "gate_up" else {"down_proj": slice(None)}
    for expert in range(count):
        for projection, outputs in projections.items():
            yield f"{block}.experts.{expert}.{projection}.{suffix}", partial(part, expert, outputs)
