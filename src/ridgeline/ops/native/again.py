"""Work on a CPU once more without Python: the foreign calls that it made, in the memory that it made them in.

Between two kernels Python makes tensors and collects pointers, and does so cold, as the kernels leave nothing in the caches but
weights: of a small model's step that is a third. Where work consists of foreign calls, they are all there is to do again, as in
a CUDA graph.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ridgeline.ops.native.binding import Library

MOST_BYTES = 2 << 20
"""Of memory that recorded work keeps; larger work gains nothing."""
_MAKES = frozenset({"empty", "empty_like", "new_empty"})
_TELLS = frozenset(
    {"__get__", "__len__", "data_ptr", "dim", "element_size", "is_contiguous", "numel", "size", "stride"}
    | {"expand", "narrow", "split_with_sizes", "unbind", "view"}  # of the same memory
)
_MAY_TELL = frozenset({"__getitem__", "contiguous"})
"""What copies, unless what it returns lies where it was."""


class _Witness(TorchFunctionMode):
    """Keeps the tensors that are made. alone: torch computed nothing itself and read no value."""

    def __init__(self) -> None:
        super().__init__()
        self.alone, self.kept = True, list[torch.Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, name = func(*args, **(kwargs or {})), func.__name__
        if name in _MAKES:
            self.kept.append(found)
        elif name in _MAY_TELL:
            self.alone &= found.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()
        elif name not in _TELLS:
            self.alone = False
        return found


class Again:
    """See Ops.again. The first time the work is done as it stands, so that whatever it remembers is there; the second time it is
    recorded. From then on all of its calls are one."""

    __slots__ = ("_again", "_found", "_kept", "_library", "_times", "_work")

    def __init__(self, library: Library, work: Callable[..., Any]) -> None:
        self._library, self._work, self._times = library, work, 0
        self._again: Callable[[], None] | None = None

    def __call__(self, *given: Any) -> Any:
        if self._again is not None:
            self._again()
            return self._found
        self._times += 1
        return self._record(*given) if self._times == 2 else self._work(*given)

    def _record(self, *given: Any) -> Any:
        calls: list[tuple[Any, tuple[Any, ...]]] = []

        def told(found: Any, function: Any, arguments: tuple[Any, ...]) -> Any:
            calls.append((function, arguments))
            return found

        witness = _Witness()
        for one in self._library.functions:
            one.errcheck = told
        try:
            with witness:
                found = self._work(*given)
        finally:
            for one in self._library.functions:
                del one.errcheck
        if calls and witness.alone and sum(one.nbytes for one in witness.kept) <= MOST_BYTES:
            each = [word for function, arguments in calls for word in self._words(function, arguments)]
            words = (ctypes.c_int64 * len(each))(*each)
            self._again = partial(self._library.again, ctypes.addressof(words), len(calls))
            self._found, self._kept = found, (words, calls, witness.kept)
        return found

    def _words(self, function: Any, arguments: tuple[Any, ...]) -> list[int]:
        """As native/again.cpp reads them. What pointers point to lives as long as the arguments do."""
        kinds = zip(function.argtypes, arguments, strict=True)
        return [self._library.callers[function.__name__], len(arguments), *(_word(kind, one) for kind, one in kinds)]


def _word(kind: Any, value: Any) -> int:
    if kind is ctypes.c_float:
        return int.from_bytes(struct.pack("f", value), "little")
    value = getattr(value, "_obj", value)  # what byref names
    if isinstance(value, ctypes.c_void_p):
        value = value.value
    if isinstance(value, bytes):
        value = ctypes.cast(ctypes.c_char_p(value), ctypes.c_void_p).value
    return int(value or 0) if value is None or isinstance(value, int) else ctypes.addressof(value)
