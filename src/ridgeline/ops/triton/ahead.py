"""Compiling kernels side by side on a cold start.

Triton compiles a kernel when it is first launched, one after the other on one core. Here processes share it, forked from this
one as it stands, so that they import nothing and are handed nothing (threads would wait for each other: a seventh of the work
holds Python's lock). What has to be compiled is found by the very steps that will be served: they run once with every launch
left out. Nothing but the cache on disk passes from the processes to the launches that follow, so its key alone says what fits,
and a kernel that none of them could compile is compiled when it is launched, as without all this.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, MutableMapping
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from multiprocessing import active_children, get_context
from threading import Thread
from types import ModuleType
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.runtime import driver
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITCallable

Progress = Callable[[str, int, int], None]
Job = tuple[Any, dict[str, Any]]
"""A kernel, and what it is to be compiled for."""

LONGEST_S = 120.0
"""Without a kernel done for so long, a process that compiles hangs: what another thread held when it was forked stays locked in
it. The longest one takes 4 s."""
PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that a process gets when the one it was forked from ends."""

STAGE = "compile"

log = logging.getLogger(__name__)

_UNSET = frozenset(
    {torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty, torch.Tensor.new_empty_strided},
)
"""Operations whose result holds whatever lay in memory."""


def with_kernels(work: Callable[[], None], dry: Callable[[], None], progress: Progress) -> None:
    """Run `work`. If it meets a kernel that is not on disk, stop it, compile all that `dry` launches with as many processes
    as there are cores, and run `work` again.

    work: launches kernels and can be begun anew at any launch. dry: launches the same kernels on inputs for which zeros
    are in range; none of its launches runs, and what they would have written reads as zeros. progress: told how many
    kernels are done, of how many.
    """
    hashing().join()
    name_all()
    cores = len(os.sched_getaffinity(0))
    if cores > 1:
        try:
            with _stopped_by_compiling():
                work()
            return
        except _Cold:
            compile_all(dry, cores, progress)
    work()


def compile_all(dry: Callable[[], None], cores: int, progress: Progress) -> None:
    """Compile what `dry` launches, without launching any of it; see with_kernels. What fails is told in the log alone."""
    jobs: list[Job] = []
    try:
        with _unlaunched(lambda *job: jobs.append(job)), _Zeroed():
            dry()
    except Exception:
        log.warning("start-up did not find all kernels; the others are compiled at their first launch", exc_info=True)
    # The longest first: one that starts last is waited for alone.
    jobs.sort(key=lambda job: -_length(job[0], set()))
    workers = max(1, min(cores, len(jobs)))
    with ProcessPoolExecutor(workers, get_context("fork"), _become_worker, (os.getpid(), jobs)) as pool:
        compiling = {pool.submit(_compile, number) for number in range(len(jobs))}
        left = compiling
        while left:
            done, left = wait(left, LONGEST_S, FIRST_COMPLETED)
            if not done:  # its futures are done by that
                log.warning(
                    "start-up compiled no kernel for %g s and stops; the others are compiled at their first launch",
                    LONGEST_S,
                )
                for child in active_children():
                    child.kill()
            for number, future in enumerate(done, len(compiling) - len(left) - len(done) + 1):
                if error := future.exception() or future.result():
                    log.warning("start-up could not compile a kernel: %s", error)
                progress(STAGE, number, len(compiling))


@cache
def hashing() -> Thread:
    """The thread that hashes Triton's own files, a part of every kernel's key: a third of a second in which it hardly holds
    Python's lock. It begins when it is first asked for."""
    thread = Thread(target=triton_key, name="hashing", daemon=True)
    thread.start()
    return thread


def name_all() -> None:
    """Give every loaded kernel its part of the key, and first those it calls. Triton 3.6 puts the constants of what a kernel
    calls into it only if that has been named already (triton-lang/triton#10494), so the key would follow from the order in
    which kernels are first launched, or threads reach them, and a start would miss what another one compiled."""
    named: set[int] = set()
    for name, module in sorted(sys.modules.items()):
        if name.startswith(__package__):
            for value in vars(module).values():
                if isinstance(value, JITCallable):
                    _name(value, named)


def _name(kernel: JITCallable, named: set[int]) -> None:
    if id(kernel) not in named:
        named.add(id(kernel))
        for callee in _calls(kernel):
            _name(callee, named)
        _ = kernel.cache_key


def _calls(kernel: JITCallable) -> Iterator[JITCallable]:
    """What a kernel calls by a name of its module, or of a module that it names."""
    places = [kernel.__globals__]
    for name in kernel.fn.__code__.co_names:
        for place in list(places):
            value = place.get(name)
            if isinstance(value, JITCallable):
                yield value
            elif isinstance(value, ModuleType):
                places.append(vars(value))


def _length(kernel: JITCallable, counted: set[int]) -> int:
    """Characters of a kernel's source and of all that it calls."""
    if id(kernel) in counted:
        return 0
    counted.add(id(kernel))
    return len(kernel.src) + sum(_length(callee, counted) for callee in _calls(kernel))


class _Cold(Exception):
    """A kernel had to be compiled."""


@contextmanager
def _stopped_by_compiling() -> Iterator[None]:
    """Raises _Cold when a kernel has been compiled instead of being found on disk."""

    def listen(*, src: Any, cache_hit: bool, **_: object) -> None:
        if not cache_hit:
            log.info("compiling kernels: %s is not in the cache on disk", src.name)
            raise _Cold

    before, knobs.compilation.listener = knobs.compilation.listener, listen
    try:
        yield
    finally:
        knobs.compilation.listener = before


class _Unlaunched:
    """Stands where a launch looks for its compiled kernel, and does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None:
        return None

    def run(self, *_: object) -> None:
        return None


@contextmanager
def _unlaunched(record: Callable[[Any, dict[str, Any]], object]) -> Iterator[None]:
    """Skip the launch of kernels that are not loaded yet. Calls `record(kernel, compile arguments)` once for each of them."""
    placed: list[tuple[MutableMapping[str, object], str]] = []

    def skip(*, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        loaded = fn.jit_function.device_caches[compile["device"]][0]
        loaded[compile["key"]] = _Unlaunched()
        placed.append((loaded, compile["key"]))
        record(fn.jit_function, compile)
        return True

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, skip
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = before
        for loaded, key in placed:
            loaded.pop(key, None)


_jobs: list[Job] = []
"""Of a process that compiles."""


def _become_worker(parent: int, jobs: list[Job]) -> None:
    """A process that compiles ends with the one it was forked from: it holds that one's pipe to the service open, and its GPU. It
    frees nothing of what that one had, such as graphs of an engine before, which cannot be freed without their device."""
    gc.freeze()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    _jobs.extend(jobs)


def _compile(number: int) -> str:
    """Compile a kernel and the code that launches it into the cache on disk; why it failed, "" if it did not."""
    kernel, wanted = _jobs[number]
    target = kernel.device_caches[wanted["device"]][2]
    # JSON has no tuples, and the cache key tells them from lists.
    options = json.loads(wanted["specialization_data"])["options"]
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    try:
        source = kernel.ASTSource(kernel, wanted["signature"], wanted["constants"], wanted["configs"][0])
        made = triton.compile(source, target=target, options=options)
        driver.active.launcher_cls(source, made.metadata)
    except Exception as error:  # its own kind may not be one that can be sent
        return f"{type(error).__name__}: {error}"
    return ""


class _Zeroed(TorchFunctionMode):
    """New memory holds zeros, which are in range as an index of anything. Of functions as they are called here: to listen for
    what the dispatcher calls, torch imports its compiler, which takes seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func in _UNSET else out
