"""Work on a CPU once more without Python: the list of foreign calls that it made, in the memory that it made them in.

Between two kernels Python makes tensors and collects pointers, and does so cold, as the kernels leave nothing in the caches but
weights: of a small model's step that is a third. Every function of the library appends its calls to the library's log while
somebody records (binding.Foreign). Where work consists of foreign calls, that list is all there is to repeat, as in a CUDA graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.overrides import TorchFunctionMode

from ridgeline.ops.native.binding import Call, Library

MOST_BYTES = 2 << 20
"""Of memory that captured work keeps; larger work gains nothing."""
_ALLOCATIONS = frozenset({"empty", "empty_like", "new_empty"})
_NO_COMPUTATION = frozenset(
    {"__get__", "__len__", "data_ptr", "dim", "element_size", "is_contiguous", "numel", "size", "stride"}
    | {"expand", "narrow", "split_with_sizes", "unbind", "view"}  # of the same memory
)
_MAY_COPY = frozenset({"__getitem__", "contiguous"})
"""What copies, unless what it returns lies where it was."""


class CallListCapture:
    """Captures work as a list of foreign calls. Is a Capture: the first replay is the work as it stands, so that whatever it
    remembers is there, the second is recorded, and from then on all of its calls are one. Work in which torch computes or reads a
    value runs as it stands for good. What was captured of a form lives as long as some work of that form."""

    def __init__(self, library: Library) -> None:
        self._library, self._forms = library, WeakValueDictionary[Hashable, CallList]()

    def __call__(
        self, work: Callable[..., Any], inputs: torch.Tensor | None = None, form: Hashable | None = None
    ) -> CapturedCalls:
        if inputs is None or form is None:
            return CapturedCalls(self._library, work, None, CallList())
        key = form, inputs.nbytes
        if (calls := self._forms.get(key)) is None:
            self._forms[key] = calls = CallList()
        return CapturedCalls(self._library, work, inputs, calls)


class CallList:
    """What work of one form calls, once `words` says so in the form of replay.cpp.

    runs: how often such work ran without. result: what the recorded work returned. kept: what the words point to. inputs:
    address of the recorded work's own, and content: what they held.
    """

    __slots__ = ("content", "count", "inputs", "kept", "result", "runs", "words", "__weakref__")

    def __init__(self) -> None:
        self.words, self.count, self.runs = 0, 0, 0
        self.result: Any = None
        self.kept: Any = None
        self.inputs, self.content = 0, b""

    @property
    def ready(self) -> bool:
        return self.count > 0

    def fill(self, calls: list[Call], result: Any, kept: Any, inputs: torch.Tensor | None) -> None:
        """From now on these calls are what work of this form does."""
        each = [word for function, arguments in calls for word in function.words(arguments)]
        words = (ctypes.c_int64 * len(each))(*each)
        self.words, self.count = ctypes.addressof(words), len(calls)
        self.result, self.kept = result, (words, calls, kept, inputs)
        if inputs is not None:
            self.inputs, self.content = inputs.data_ptr(), ctypes.string_at(inputs.data_ptr(), inputs.nbytes)


class CapturedCalls:
    """One work, and the list of calls of its form."""

    __slots__ = ("calls", "_address", "_inputs", "_library", "_work")

    def __init__(
        self, library: Library, work: Callable[..., Any], inputs: torch.Tensor | None, calls: CallList
    ) -> None:
        self._library, self._work, self._inputs, self.calls = library, work, inputs, calls
        self._address = 0 if inputs is None else inputs.data_ptr()

    def replay(self, *given: Any) -> Any:
        """See Captured."""
        calls, replay = self.calls, self._library.replay
        if not calls.ready:
            calls.runs += 1
            return self._record(*given) if calls.runs == 2 else self._work(*given)
        if self._address == calls.inputs:
            replay(calls.words, calls.count)
        else:
            # These inputs are those of work that may yet run as it stands.
            ctypes.memmove(calls.inputs, self._address, len(calls.content))
            replay(calls.words, calls.count)
            ctypes.memmove(calls.inputs, calls.content, len(calls.content))
        return calls.result

    def _record(self, *given: Any) -> Any:
        witness, log = _Witness(), self._library.log
        log.calls = calls = list[Call]()
        try:
            with witness:
                result = self._work(*given)
        finally:
            log.calls = None
        if calls and not witness.computed and sum(tensor.nbytes for tensor in witness.allocated) <= MOST_BYTES:
            self.calls.fill(calls, result, witness.allocated, self._inputs)
        return result


class _Witness(TorchFunctionMode):
    """Keeps the tensors that are allocated. computed: torch computed or read a value itself, which no list of calls repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.computed, self.allocated = False, list[torch.Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.__name__
        if name in _ALLOCATIONS:
            self.allocated.append(result)
        elif name in _MAY_COPY:
            self.computed |= result.untyped_storage().data_ptr() != args[0].untyped_storage().data_ptr()
        elif name not in _NO_COMPUTATION:
            self.computed = True
        return result
