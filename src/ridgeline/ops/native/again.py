"""Work on a CPU once more without Python: the foreign calls that it made, in the memory that it made them in.

Between two kernels Python makes tensors and collects pointers, and does so cold, as the kernels leave nothing in the caches but
weights: of a small model's step that is a third. Where work consists of foreign calls, they are all there is to do again, as in
a CUDA graph.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

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


class Recording:
    """What work of one form did the second time, once that is recorded; done: how often without. named: the memory that the work
    is about, and what it held."""

    __slots__ = ("again", "done", "found", "held", "kept", "named", "__weakref__")

    def __init__(self) -> None:
        self.again: Callable[[], None] | None = None
        self.found: Any = None
        self.kept: Any = None
        self.done, self.named, self.held = 0, 0, b""


class Recorder:
    """See Ops.again. A form's recording lives as long as some work of that form."""

    def __init__(self, library: Library) -> None:
        self._library, self._forms = library, WeakValueDictionary[Hashable, Recording]()

    def __call__(
        self, work: Callable[..., Any], named: torch.Tensor | None = None, form: Hashable | None = None
    ) -> Again:
        if named is None or form is None:
            return Again(self._library, work, None, Recording())
        key = form, named.nbytes
        if (found := self._forms.get(key)) is None:
            self._forms[key] = found = Recording()
        return Again(self._library, work, named, found)


class Again:
    """Work that is recorded. The first time it is done as it stands, so that whatever it remembers is there; the second time it is
    recorded. From then on all of its calls are one."""

    __slots__ = ("recording", "_at", "_library", "_named", "_work")

    def __init__(
        self, library: Library, work: Callable[..., Any], named: torch.Tensor | None, recording: Recording
    ) -> None:
        self._library, self._work, self._named, self.recording = library, work, named, recording
        self._at = 0 if named is None else named.data_ptr()

    def __call__(self, *given: Any) -> Any:
        known = self.recording
        if known.again is None:
            known.done += 1
            return self._record(*given) if known.done == 2 else self._work(*given)
        if self._at == known.named:
            known.again()
        else:
            # The memory is that of work which may yet be done as it stands.
            ctypes.memmove(known.named, self._at, len(known.held))
            known.again()
            ctypes.memmove(known.named, known.held, len(known.held))
        return known.found

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
            known, named = self.recording, self._named
            known.again = partial(self._library.again, ctypes.addressof(words), len(calls))
            known.found, known.kept = found, (words, calls, witness.kept, named)
            if named is not None:
                known.named, known.held = self._at, ctypes.string_at(self._at, named.nbytes)
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
