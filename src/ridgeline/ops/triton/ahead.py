"""Parallel compilation of kernels on a cold start.

Triton compiles a kernel at its first launch, in sequence on one core. Here forked processes share the work. A fork needs no
imports. Threads would contend for the GIL, which a seventh of the work holds. The kernels to compile are collected by a dry run of
the steps that will be served, with every launch skipped. A process begins to compile each as soon as the dry run launches it. Then
warm-up runs beside the processes and waits where it needs a kernel that is not compiled yet. The processes pass results only
through Triton's cache on disk, so its key alone decides what is reused. A kernel that no process could compile is compiled at its
first launch, as without this module.
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
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from importlib import import_module
from multiprocessing import active_children, get_context
from threading import Thread
from types import ModuleType
from typing import Any, NamedTuple

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.runtime import driver
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITCallable

Progress = Callable[[str, int, int], None]


class Job(NamedTuple):
    """A kernel, by its module and name, and those arguments of Triton's jit_cache_hook that are NEEDED to compile it. launcher:
    compile its launcher too."""

    module: str
    name: str
    wanted: dict[str, Any]
    launcher: bool


LONGEST_S = 120.0
"""Seconds without a finished kernel after which a compiling process counts as hung: locks that another thread held at the fork stay
locked. The slowest kernel takes 4 s."""
NEEDED = ("device", "signature", "constants", "configs", "specialization_data")
"""Compile arguments that a process needs. All can be pickled."""
NICENESS = 5
"""Added to the nice value of compiling processes."""
PR_SET_PDEATHSIG = 1
"""prctl(2): signal that a process receives when its parent ends."""

STAGE = "compile"

log = logging.getLogger(__name__)

_UNSET = frozenset(
    {torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty, torch.Tensor.new_empty_strided},
)
"""Operations that return uninitialised memory."""


@contextmanager
def compiling(work: Callable[[], None], dry: Callable[[], None], progress: Progress) -> Iterator[None]:
    """Run `work`, then the body. If `work` needs a kernel that is not on disk, stop it, start to compile all kernels that `dry`
    launches with one process per core, and run `work` again beside them.

    Args:
        work: launches kernels. It must be restartable at any launch.
        dry: launches the kernels of `work` and of the body on inputs for which zeros are in range. No launch runs, and outputs read
            as zeros.
        progress: called with the stage, the number of finished kernels and their total.
    """
    hashing().join()
    name_all()
    cores = len(os.sched_getaffinity(0))
    with ExitStack() as stack:
        try:
            with _stopped_by_compiling() if cores > 1 else nullcontext():
                work()
        except _Cold:
            stack.enter_context(compiled_beside(dry, cores, progress))
            work()
        yield


@contextmanager
def compiled_beside(dry: Callable[[], None], cores: int, progress: Progress) -> Iterator[None]:
    """Compile the kernels that `dry` launches, without launching them, while the body runs; see compiling. Failures are only
    logged."""
    with ProcessPoolExecutor(cores, get_context("fork"), _become_worker, (os.getpid(),)) as pool:
        jobs = _Jobs(pool, progress)
        try:
            with _unlaunched(jobs.add), _Zeroed():
                dry()
        except Exception:
            log.warning(
                "start-up did not find all kernels; the others are compiled at their first launch", exc_info=True
            )
        progress(STAGE, *jobs.progress)
        with _hook(jobs.await_kernel):
            yield
        jobs.finish()


class _Jobs:
    """Kernels that a pool of processes compiles."""

    def __init__(self, pool: ProcessPoolExecutor, progress: Progress) -> None:
        self._pool, self._progress = pool, progress
        self._futures: dict[tuple[int, str], tuple[Future[str], Future[str]]] = {}
        """The job that compiles a variant and the one that compiles its launcher, by id of the kernel and Triton's key."""
        self._launchers: dict[tuple[object, ...], Future[str]] = {}
        """The job that compiles a launcher, by id of the kernel and types of its arguments."""

    @property
    def progress(self) -> tuple[int, int]:
        """Number of finished jobs and of all."""
        return sum(future.done() for future, _ in self._futures.values()), len(self._futures)

    def add(self, kernel: Any, wanted: dict[str, Any]) -> None:
        # Kernels that differ in tiles and constants alone have the same launcher, which takes a C compiler a third of a second.
        types = (str(name).partition("[")[0] for name in wanted["signature"].values())
        like = (id(kernel), *types)
        needed = {name: wanted[name] for name in NEEDED}
        job = Job(kernel.fn.__module__, kernel.fn.__name__, needed, like not in self._launchers)
        future = self._pool.submit(_compile, job)
        self._futures[id(kernel), wanted["key"]] = future, self._launchers.setdefault(like, future)

    def await_kernel(self, *, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        """Triton's jit_cache_hook: wait until the kernel is on disk. Returns False: Triton loads it from there."""
        for future in self._futures.get((id(fn.jit_function), compile["key"]), ()):
            self._await(future)
        return False

    def finish(self) -> None:
        """Wait for all jobs and log failures."""
        for future, _ in self._futures.values():
            self._await(future)
            if error := future.exception() or future.result():
                log.warning("start-up could not compile a kernel: %s", error)

    def _await(self, future: Future[str]) -> None:
        while not future.done():
            unfinished = [each for each, _ in self._futures.values() if not each.done()]
            if unfinished and not wait(unfinished, LONGEST_S, FIRST_COMPLETED).done:
                log.warning(
                    "start-up compiled no kernel for %g s and stops; the others are compiled at their first launch",
                    LONGEST_S,
                )
                for child in active_children():  # killing the children completes their futures
                    child.kill()
            self._progress(STAGE, *self.progress)


@cache
def hashing() -> Thread:
    """Thread that hashes Triton's own files, a part of every kernel's cache key. It takes a third of a second and rarely holds the
    GIL. The first call starts it."""
    thread = Thread(target=triton_key, name="hashing", daemon=True)
    thread.start()
    return thread


def name_all() -> None:
    """Compute the cache key of every loaded kernel, callees first.

    Triton 3.6 includes the constants of a callee only if the callee's key exists already (triton-lang/triton#10494). Otherwise keys
    would depend on the order of first launches or on threads, and a start would not find kernels that another start compiled.
    """
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
    """Kernels that a kernel calls by a name of its module, or of a module that it names."""
    places = [kernel.__globals__]
    for name in kernel.fn.__code__.co_names:
        for place in list(places):
            value = place.get(name)
            if isinstance(value, JITCallable):
                yield value
            elif isinstance(value, ModuleType):
                places.append(vars(value))


class _Cold(Exception):
    """A kernel had to be compiled."""


@contextmanager
def _stopped_by_compiling() -> Iterator[None]:
    """Raise _Cold when a kernel was compiled because the cache on disk lacks it."""

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
    """Placeholder for a compiled kernel. Launching it does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None:
        return None

    def run(self, *_: object) -> None:
        return None


@contextmanager
def _unlaunched(record: Callable[[Any, dict[str, Any]], object]) -> Iterator[None]:
    """Skip launches of kernels that are not loaded yet, and call `record(kernel, compile arguments)` once for each of them."""
    placed: list[tuple[MutableMapping[str, object], str]] = []

    def skip(*, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        loaded = fn.jit_function.device_caches[compile["device"]][0]
        loaded[compile["key"]] = _Unlaunched()
        placed.append((loaded, compile["key"]))
        record(fn.jit_function, compile)
        return True

    try:
        with _hook(skip):
            yield
    finally:
        for loaded, key in placed:
            loaded.pop(key, None)


@contextmanager
def _hook(hook: Callable[..., bool]) -> Iterator[None]:
    """Call `hook` before Triton compiles or loads a kernel. If it returns True, the launch is skipped."""
    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, hook
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = before


def _become_worker(parent: int) -> None:
    """Initialise a compiling process. It ends with its parent, because it keeps the parent's pipe to the service and its GPU open.
    It never frees objects of the parent, such as CUDA graphs of a previous engine, which cannot be freed without their device. Its
    priority is lower than that of the parent, which runs warm-up meanwhile."""
    gc.freeze()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.nice(NICENESS)


def _compile(job: Job) -> str:
    """Compile a kernel into the cache on disk. Returns the error, "" on success."""
    wanted = job.wanted
    # JSON has no tuples, but the cache key distinguishes tuples from lists.
    options = json.loads(wanted["specialization_data"])["options"]
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    try:
        kernel = vars(import_module(job.module))[job.name]
        name_all()
        target = kernel.device_caches[wanted["device"]][2]
        source = kernel.ASTSource(kernel, wanted["signature"], wanted["constants"], wanted["configs"][0])
        made = triton.compile(source, target=target, options=options)
        if job.launcher:
            driver.active.launcher_cls(source, made.metadata)
    except Exception as error:  # some exception types cannot be pickled
        return f"{type(error).__name__}: {error}"
    return ""


class _Zeroed(TorchFunctionMode):
    """Make new memory hold zeros, which are valid as any index. It intercepts the functions that are called here: with a dispatch
    mode torch would import its compiler, which takes seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func in _UNSET else out
