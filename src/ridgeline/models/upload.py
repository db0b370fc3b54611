"""Uploads tensors of memory-mapped files to a GPU through a few pinned buffers, without a second copy on the host."""

from __future__ import annotations

import torch

BUFFER_BYTES = 32 << 20
BUFFERS = 3


class _Buffer:
    """A pinned buffer. `wait` waits until the copy engine has read it."""

    def __init__(self, size: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=cuda)
        self._read = torch.cuda.Event() if cuda else None

    def wait(self) -> None:
        if self._read is not None:
            self._read.synchronize()

    def send(self, to: torch.Tensor) -> None:
        """Enqueue the copy of the first len(to) bytes to `to`, uint8 on the device."""
        to.copy_(self.memory[: len(to)], non_blocking=True)
        if self._read is not None:
            self._read.record()


class Upload:
    """`upload(tensor)` returns a copy of the tensor on `device`, ready for work on the current stream.

    A copy from pageable memory would be staged by the driver while the host waits. Here the host fills one pinned buffer, with all
    its threads, while the copy engine reads another one.
    """

    def __init__(self, device: torch.device, buffer_bytes: int = BUFFER_BYTES, buffers: int = BUFFERS) -> None:
        self._device, self._size = device, buffer_bytes
        self._buffers = [_Buffer(buffer_bytes, device) for _ in range(buffers)]
        self._turn = 0

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        source, target = (data.contiguous().reshape(-1).view(torch.uint8) for data in (tensor, out))
        for first in range(0, len(source), self._size):
            piece = source[first : first + self._size]
            buffer = self._buffers[self._turn]
            self._turn = (self._turn + 1) % len(self._buffers)
            buffer.wait()
            buffer.memory[: len(piece)].copy_(piece)
            buffer.send(target[first : first + len(piece)])
        return out
