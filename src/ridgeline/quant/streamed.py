"""Weights of linears that stay in host memory and are copied to the device in every step, for models larger than its memory.

Each of these linears has a fixed place in one of BUFFERS buffers on the device, taken in turn. While one is multiplied, the next
one is copied to the other buffer, on a stream of its own; the buffer that a linear leaves is filled with the one after the next.
Number formats do not know about it: the tensors of a loaded weight are moved, so that the same kernels read them from the buffer. A
step starts with the copy of the first linear and leaves no copy behind, so CUDA graphs capture the copies with the step.

Source: FlexGen (Sheng et al. 2023), section 4, for the schedule.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Protocol

import torch

from ridgeline.core.host_weights import BUFFERS
from ridgeline.ops.step import StepInputs
from ridgeline.ops.table import Activation, Matrix, Normed, Scaled
from ridgeline.quant.format import Expected, LinearShape, Share, Weight, WeightFormat

BLOCK_BYTES = 64 << 20
"""Bytes of a block of host memory. torch rounds pinned memory up to powers of two: blocks of one waste none."""
ALIGNED = 512
"""Alignment of a tensor in a buffer, as that of torch's allocator."""

Pieces = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Copies that together fill a place in a buffer: (part of the buffer, memory of the host), both uint8."""


class Lane(Protocol):
    """Copies from host memory to the buffers of a device, beside its other work."""

    def copy(self, buffer: int, pieces: Pieces) -> None:
        """Enqueue copies to a buffer. They start after the work that is enqueued on the device so far, which may read it."""

    def wait(self, buffer: int) -> None:
        """Work that is enqueued from now on starts after the last copies to this buffer."""


class CudaLane:
    """A stream of copies beside the current stream of a GPU. Implements Lane."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._left, self._arrived = ([torch.cuda.Event() for _ in range(BUFFERS)] for _ in range(2))

    def copy(self, buffer: int, pieces: Pieces) -> None:
        self._left[buffer].record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(self._left[buffer])
        with torch.cuda.stream(self._stream):
            for target, source in pieces:
                target.copy_(source, non_blocking=True)
            self._arrived[buffer].record(self._stream)

    def wait(self, buffer: int) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._arrived[buffer])


class HostMemory:
    """Blocks of host memory, from which the GPU copies directly if they are pinned."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, count: int) -> list[torch.Tensor]:
        """Pieces of `count` bytes together."""
        pieces = []
        while count:
            if not len(self._free):
                self._free = torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=self._pinned)
            pieces.append(self._free[:count])
            self._free = self._free[count:]
            count -= len(pieces[-1])
        return pieces


@dataclass(frozen=True, slots=True)
class _Kept:
    """A linear in host memory: its tensors with their form and first byte, its bytes."""

    tensors: Sequence[tuple[torch.Tensor, torch.Size, tuple[int, ...], int]]
    memory: Sequence[torch.Tensor]

    @property
    def size(self) -> int:
        return sum(len(piece) for piece in self.memory)


class WeightStream:
    """The `count` linears that stay in host memory, numbered in the order of their use, and those of them on the device.

    Any order is correct. An order other than that of the numbers is slower, because what was copied ahead is copied again.
    computed: those that steps of up to few_tokens tokens do not read on the device (quant.hosted).
    """

    def __init__(
        self,
        count: int,
        lane: Lane,
        memory: HostMemory,
        computed: frozenset[int] = frozenset(),
        few_tokens: int = 0,
    ) -> None:
        self._count, self._lane, self._memory = count, lane, memory
        self.computed, self.few_tokens = computed, few_tokens
        self._all = list(range(count))
        self._copied = [number for number in self._all if number not in computed]
        self._kept: dict[int, _Kept] = {}
        self._copies: list[Pieces] = []
        self._coming: set[int] = set()
        """Linears whose copies were enqueued and that were not used since. Each is the last one in its buffer."""
        self._reached = count
        """The last linear that was used."""

    # --- loading ------------------------------------------------------------------------------------------------------

    def keep(self, number: int, tensors: Sequence[torch.Tensor]) -> None:
        """Move the tensors of a loaded linear to host memory. After the last linear all get their places in the buffers."""
        flat = [_flat(tensor) for tensor in tensors]
        ends = list(accumulate(-(-len(data) // ALIGNED) * ALIGNED for data in flat))
        starts = [0, *ends[:-1]]
        memory, device = self._memory.take(ends[-1]), tensors[0].device
        packed = torch.empty(ends[-1], dtype=torch.uint8, device=device)
        for data, start in zip(flat, starts, strict=True):
            packed[start : start + len(data)].copy_(data)
        for piece, part in zip(memory, packed.split([len(piece) for piece in memory]), strict=True):
            piece.copy_(part)
        forms = [(tensor, tensor.shape, tensor.stride(), start) for tensor, start in zip(tensors, starts, strict=True)]
        self._kept[number] = _Kept(forms, memory)
        for tensor in tensors:
            tensor.set_(tensor.new_empty(0))  # type: ignore[call-overload]
        if len(self._kept) == self._count:
            self._place(device)

    def _place(self, device: torch.device) -> None:
        size = max(kept.size for kept in self._kept.values())
        buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        for number in range(self._count):
            kept, buffer = self._kept[number], buffers[number % BUFFERS]
            for tensor, shape, stride, start in kept.tensors:
                whole = buffer[start : start + _span(shape, stride) * tensor.itemsize].view(tensor.dtype)
                tensor.set_(whole.as_strided(shape, stride, whole.storage_offset()))  # type: ignore[call-overload]
            parts = buffer[: kept.size].split([len(piece) for piece in kept.memory])
            self._copies.append(list(zip(parts, kept.memory, strict=True)))

    # --- a step -------------------------------------------------------------------------------------------------------

    def arrive(self, number: int, tokens: int) -> None:
        """Work that is enqueued from now on finds the linear in its buffer, until `leave`. tokens: of the step."""
        self._reach(number)
        if number not in self._coming:
            self._coming.clear()
            self._copy(number)
            for following in range(number + 1, number + BUFFERS):
                self._send(number + 1, following % BUFFERS, tokens)
        self._lane.wait(number % BUFFERS)
        self._coming.discard(number)

    def leave(self, number: int, tokens: int) -> None:
        """The work that reads the linear is enqueued."""
        self._send(number + 1, number % BUFFERS, tokens)

    def skip(self, number: int, tokens: int) -> None:
        """The linear is multiplied in host memory. Where that is the first of a step, the copies of others start beside it."""
        self._reach(number)
        if not self._coming:
            following = (self._next(number + 1, buffer, tokens) for buffer in range(BUFFERS))
            for first in sorted(number for number in following if number is not None):
                self._copy(first)

    def _reach(self, number: int) -> None:
        if number <= self._reached:  # a step begins; the one before, to compile kernels, may have ended early
            self._coming.clear()
        self._reached = number

    def _send(self, first: int, buffer: int, tokens: int) -> None:
        if (number := self._next(first, buffer, tokens)) is not None:
            self._copy(number)

    def _next(self, first: int, buffer: int, tokens: int) -> int | None:
        """The next linear from `first` on that has its place in a buffer; None: there is none."""
        order = self._copied if tokens <= self.few_tokens else self._all
        return next((number for number in order[bisect_left(order, first) :] if number % BUFFERS == buffer), None)

    def _copy(self, number: int) -> None:
        self._lane.copy(number % BUFFERS, self._copies[number])
        self._coming.add(number)


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last of a tensor in memory."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in the order of its memory, which has no gaps."""
    assert _span(tensor.shape, tensor.stride()) == tensor.numel()
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def tokens_of(x: Activation) -> int:
    """Tokens of a linear's input."""
    return len(x.values if isinstance(x, Scaled) else x.x if isinstance(x, Normed) else x)


class StreamedWeight(Weight):
    """A linear that stays in host memory. It is loaded on the device, in the format that `create` makes, and then moved."""

    __slots__ = ("expects", "_create", "_missing", "_number", "_stream", "_weight")

    def __init__(self, stream: WeightStream, number: int, create: Callable[[], Weight]) -> None:
        self._stream, self._number, self._create = stream, number, create
        self.expects: Mapping[tuple[int, str], Expected] = create().expects
        self._missing = set(self.expects)
        self._weight: Weight | None = None

    def load(self, part: int, name: str, tensor: torch.Tensor) -> None:
        if self._weight is None:  # memory of the device is taken only while the linear is loaded
            self._weight = self._create()
        self._weight.load(part, name, tensor)
        self._missing.discard((part, name))
        if not self._missing:
            self._stream.keep(self._number, self._weight.tensors())

    def apply(self, x: Activation, step: StepInputs | None = None) -> torch.Tensor:
        assert self._weight is not None
        tokens = tokens_of(x)
        self._stream.arrive(self._number, tokens)
        out = self._weight.apply(x, step)
        self._stream.leave(self._number, tokens)
        return out

    def add(self, x: Activation, stream: torch.Tensor, step: StepInputs | None = None) -> torch.Tensor:
        assert self._weight is not None
        tokens = len(stream)
        self._stream.arrive(self._number, tokens)
        out = self._weight.add(x, stream, step)
        self._stream.leave(self._number, tokens)
        return out

    def activate(self, x: Activation, kind: str, step: StepInputs | None = None) -> Activation:
        assert self._weight is not None
        tokens = tokens_of(x)
        self._stream.arrive(self._number, tokens)
        out = self._weight.activate(x, kind, step)
        self._stream.leave(self._number, tokens)
        return out

    def matrix(self) -> Matrix | None:
        """None: programs that run whole layers read weights of several linears at a time."""
        return None

    def stored(self) -> Matrix:
        assert self._weight is not None
        return self._weight.stored()

    def tensors(self) -> tuple[torch.Tensor, ...]:
        assert self._weight is not None
        return self._weight.tensors()


@dataclass(slots=True)
class StreamedFormat:
    """A format whose linears with the numbers `linears` stay in host memory. Linears are created in the order of their use.
    computed: creates the weights of those that few tokens multiply where they lie; None: there are none."""

    base: WeightFormat
    linears: frozenset[int]
    stream: WeightStream
    computed: Callable[[WeightStream, int, Callable[[], Weight], LinearShape], Weight] | None = None
    name: str = "streamed"
    _created: int = field(default=0, init=False)
    _streamed: int = field(default=0, init=False)

    def create(self, shape: LinearShape, share: Share) -> Weight:
        number, self._created = self._created, self._created + 1
        if number not in self.linears:
            return self.base.create(shape, share)
        place, self._streamed = self._streamed, self._streamed + 1
        create = partial(self.base.create, shape, share)
        if self.computed is not None and place in self.stream.computed:
            return self.computed(self.stream, place, create, shape)
        return StreamedWeight(self.stream, place, create)
