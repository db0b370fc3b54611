"""Uploads the many small arrays of a step as one buffer with one copy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

_ALIGN = 16
"""Alignment of every array, in items. Triton compiles separate kernels for pointers that are not aligned to 16 bytes; without
alignment a new mix of offsets would compile a kernel while requests wait."""
_KINDS: dict[type, torch.dtype] = {np.int32: torch.int32, np.int64: torch.int64, np.float32: torch.float32}


class Packet:
    """Collects arrays by name; `send` copies them to the device as one pinned buffer."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: dict[str, tuple[np.ndarray, type]] = {}

    def add(self, name: str, values: object, kind: type = np.int32) -> None:
        """values: anything numpy reads, or an object with a buffer of such items; kind: np.int32, np.int64 or np.float32."""
        self._parts[name] = np.ascontiguousarray(values, dtype=kind), kind

    def send(self, device: torch.device) -> Mapping[str, torch.Tensor]:
        """Tensors on `device` by name. Does not synchronize: torch keeps the pinned buffer until the copy has ended."""
        if not self._parts:
            return {}
        items = [part.reshape(-1).view(np.int32) for part, _ in self._parts.values()]
        sizes = [count for item in items for count in (item.size, -item.size % _ALIGN)]
        buffer = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
        flat, place = buffer.numpy(), 0
        for item in items:
            flat[place : place + item.size] = item
            place += item.size + -item.size % _ALIGN
        sent = buffer.to(device, non_blocking=True).split_with_sizes(sizes)[::2]
        tensors: dict[str, torch.Tensor] = {}
        for (name, (part, kind)), uploaded in zip(self._parts.items(), sent, strict=True):
            typed = uploaded if kind is np.int32 else uploaded.view(_KINDS[kind])
            tensors[name] = typed if part.ndim == 1 else typed.view(part.shape)
        return tensors
