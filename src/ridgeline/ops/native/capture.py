"""Capture and replay for the CPU: a list of the foreign calls that the work made, and the memory that they used.

Between two kernels Python allocates tensors and collects pointers. It runs with cold caches, because the kernels fill them with
weights; this takes a third of a small model's step. While a capture records, every function of the library appends its calls to the
library's log (binding.Foreign). If the work consists of foreign calls, replaying the list repeats it, as in a CUDA graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ridgeline.ops.native.binding import Call, Library

MAX_BYTES = 2 << 20
"""Maximum memory that captured work may keep. Larger work gains nothing from a capture."""
_ALLOCATIONS = frozenset({"empty", "empty_like", "new_empty"})
_NO_COMPUTATION = frozenset(
    {"__get__", "__len__", "data_ptr", "dim", "element_size", "is_contiguous", "numel", "size", "stride"}
    | {"expand", "narrow", "split", "split_with_sizes", "unbind", "view"}  # views
)
_MAY_COPY = frozenset({"__getitem__", "contiguous"})
"""Calls that copy, unless the result has the same address."""


class CallListCapture:
    """Capture work as a list of foreign calls. Implements Capture."""

    def __init__(self, library: Library) -> None:
        self.library = library

    def __call__(self, work: Callable[..., Any]) -> CapturedCalls:
        return CapturedCalls(self.library, work)


class CapturedCalls:
    """Work that is recorded at its second replay and replayed in one call from the third on.

    The first replay runs the work itself, which fills its caches. Work in which torch computes or reads a value, or that
    allocates more than MAX_BYTES, is never replaced by a list of calls."""

    __slots__ = ("_calls", "_count", "_kept", "_library", "_result", "_runs", "_work")

    def __init__(self, library: Library, work: Callable[..., Any]) -> None:
        self._library, self._work = library, work
        self._runs = self._count = self._calls = 0
        """Number of runs of the work itself; number of recorded calls; their address, in the format of replay.cpp."""
        self._result: Any = None
        self._kept: Any = None
        """_result: returned by the recorded run. _kept: the memory that the recorded calls use."""

    @property
    def recorded(self) -> bool:
        """Whether replays run the recorded calls."""
        return self._count > 0

    def replay(self, *arguments: Any) -> Any:
        """See Captured."""
        if self._count:
            self._library.replay(self._calls, self._count)
            return self._result
        self._runs += 1
        return self._record(*arguments) if self._runs == 2 else self._work(*arguments)

    def _record(self, *arguments: Any) -> Any:
        result, recorded = record(self._library, partial(self._work, *arguments))
        if recorded is not None and sum(tensor.nbytes for tensor in recorded.allocated) <= MAX_BYTES:
            self._calls, self._count = recorded.calls, recorded.count
            self._result, self._kept = result, recorded
        return result


@dataclass(frozen=True, slots=True)
class Recorded:
    """The calls that a piece of work made. words: the number of threads and of calls, then the calls in the format of replay.cpp.
    kept, allocated: the memory that they use."""

    words: ctypes.Array[ctypes.c_int64]
    kept: Sequence[Call]
    allocated: Sequence[torch.Tensor]

    @property
    def calls(self) -> int:
        """Address of the first call."""
        return ctypes.addressof(self.words) + 16

    @property
    def count(self) -> int:
        return len(self.kept)


def record(library: Library, work: Callable[[], Any], pinned: bool = False) -> tuple[Any, Recorded | None]:
    """Run work, and record its calls: (what it returned, the calls). None: it makes no calls, or torch computes or reads a value.
    pinned: tensors that it allocates are in pinned memory."""
    witness, log = _Witness(pinned), library.log
    log.calls = calls = list[Call]()
    try:
        with witness:
            result = work()
    finally:
        log.calls = None
    if not calls or witness.computed:
        return result, None
    words = [max(1, torch.get_num_threads() - 1), len(calls)]  # the thread that launches steps keeps a core
    words += [word for function, arguments in calls for word in function.words(arguments)]
    return result, Recorded((ctypes.c_int64 * len(words))(*words), calls, witness.allocated)


class _Witness(TorchFunctionMode):
    """Records the tensors that are allocated. computed: torch computed or read a value, which a list of calls cannot repeat."""

    def __init__(self, pinned: bool) -> None:
        super().__init__()
        self._pinned = {"pin_memory": True} if pinned else {}
        self.computed, self.allocated = False, list[torch.Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        result = func(*args, **(kwargs or {}), **(self._pinned if name in _ALLOCATIONS else {}))
        if name in _ALLOCATIONS:
            self.allocated.append(result)
        elif name in _MAY_COPY:
            self.computed |= result.untyped_storage().data_ptr() != args[0].untyped_storage().data_ptr()
        elif name not in _NO_COMPUTATION:
            self.computed = True
        return result
