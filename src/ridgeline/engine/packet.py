"""What a step uploads: many small arrays in one buffer, one copy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

_ALIGN = 16
"""Items that every array starts at a multiple of. Kernels are compiled apart for pointers that are not aligned to 16
bytes; without this each new mix of offsets would cost a compilation in the middle of serving."""


class Packet:
    """Collects int32 and float32 arrays by name; `send` copies them to the device as one pinned buffer."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: dict[str, np.ndarray] = {}

    def add(self, name: str, values: object, kind: type = np.int32) -> None:
        """values: anything numpy reads, or an object with a buffer of 4-byte items; kind: np.int32 or np.float32."""
        self._parts[name] = np.ascontiguousarray(values, dtype=kind)

    def send(self, device: torch.device) -> Mapping[str, torch.Tensor]:
        """Tensors on `device` by name; never waits. torch keeps the pinned buffer until the copy is done."""
        if not self._parts:
            return {}
        places: dict[str, int] = {}
        size = 0
        for name, part in self._parts.items():
            places[name] = size
            size += -(-part.size // _ALIGN) * _ALIGN
        buffer = torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        flat = buffer.numpy()
        for name, part in self._parts.items():
            flat[places[name] : places[name] + part.size] = part.reshape(-1).view(np.int32)
        sent = buffer.to(device, non_blocking=True)
        found: dict[str, torch.Tensor] = {}
        for name, part in self._parts.items():
            one = sent[places[name] : places[name] + part.size]
            found[name] = (one.view(torch.float32) if part.dtype == np.float32 else one).view(part.shape)
        return found
