"""Compiling side by side, with a driver that has a target and no GPU: Triton compiles, and what it launches is noted."""

from __future__ import annotations

import gc
import importlib
import os
import pkgutil
import random
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITCallable

import ridgeline.ops.triton
from ridgeline.ops.triton import ahead

STEPS = (16, 32, 64)


class PaperDriver:
    """A Hopper GPU that runs nothing."""

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.utils = self

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 * 1024}

    def load_binary(self, name: str, *_: object) -> tuple[object, object, int, int, int]:
        return name, name, 32, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        with open(Path(knobs.cache.dir) / "built", "a", encoding="utf-8") as built:  # by whichever process
            built.write(f"{metadata.hash} {os.getpid()}\n")
        return lambda *_: self.launched.append(metadata.hash)


@triton.jit
def double(x_ptr, out_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    tl.store(out_ptr + at, tl.load(x_ptr + at) * 2)


@triton.jit
def broken(x_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(x_ptr + tl.arange(0, N), no_such_name)  # type: ignore[name-defined]  # noqa: F821


def steps() -> list[torch.Tensor]:
    """What each step's kernel left, looked up in a table as an embedding is."""
    left = []
    for n in STEPS:
        for _ in range(3):
            out = torch.empty(n, dtype=torch.int32)
            double[(1,)](torch.ones(n, dtype=torch.int32), out, N=n, num_warps=1)
            torch.zeros(1).index_select(0, out)
            left.append(out)
    return left


def prepare_twice(cache: Path) -> None:
    """Cold, then warm in the same process."""
    knobs.cache.dir = str(cache)
    paper = PaperDriver()
    driver.set_active(paper)
    textses: list[tuple[str, int, int]] = []
    begun: list[int] = []
    hits: list[bool] = []

    def work() -> None:
        begun.append(len(paper.launched))
        for n in STEPS:
            double[(1,)](torch.ones(n, dtype=torch.int32), torch.empty(n, dtype=torch.int32), N=n, num_warps=1)

    def dry() -> None:
        assert all(not out.any() for out in steps())
        assert not paper.launched

    ahead.os.sched_getaffinity = lambda pid: {0, 1}  # type: ignore[attr-defined]
    with ahead.compiling(work, dry, lambda *item: textses.append(item)):
        assert begun == [0, 0]
        assert {(stage, total) for stage, _, total in textses} == {(ahead.STAGE, len(STEPS))}
    assert len(set(paper.launched)) == len(paper.launched) == len(STEPS)
    # The launcher, which all variants share, was built ahead, by another process, and found by each launch in this one.
    built = [line.split() for line in (cache / "built").read_text().splitlines()]
    assert {name for name, process in built if int(process) == os.getpid()} == set(paper.launched)
    assert len(built) == 1 + len(STEPS)

    double.device_caches.clear()
    knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    begun.clear()
    with ahead.compiling(work, lambda: pytest.fail("nothing is missing"), lambda *item: textses.append(item)):
        assert knobs.runtime.jit_cache_hook is None
    assert begun == [len(STEPS)]
    double.device_caches.clear()
    work()
    assert hits == [True] * len(STEPS)
    assert knobs.runtime.jit_cache_hook is None


def prepare_with_errors(cache: Path) -> None:
    """A kernel that does not compile, and a warm-up that breaks off."""
    knobs.cache.dir = str(cache)
    driver.set_active(PaperDriver())
    textses: list[tuple[str, int, int]] = []

    def dry() -> None:
        broken[(1,)](torch.ones(16), N=16)
        double[(1,)](torch.ones(16), torch.ones(16), N=16)
        raise RuntimeError("the rest is unknown")

    with ahead.compiled_beside(dry, 2, lambda *item: textses.append(item)):
        pass
    assert textses[-1] == (ahead.STAGE, 2, 2)
    assert not double.device_caches[0][0]
    assert not broken.device_caches[0][0]


def prepare_with_one_that_hangs(cache: Path) -> None:
    """A process that never ends is not waited for; what it had to do compiles when it is launched."""
    knobs.cache.dir = str(cache)
    driver.set_active(PaperDriver())
    ahead.LONGEST_S = 3.0
    ready = ahead.triton.compile

    def hang(source: Any, **given: Any) -> Any:
        return time.sleep(600) if source.fn is double else ready(source, **given)

    ahead.triton.compile = hang
    textses: list[tuple[str, int, int]] = []
    began = time.monotonic()

    def dry() -> None:
        double[(1,)](torch.ones(16), torch.ones(16), N=16)

    with ahead.compiled_beside(dry, 2, lambda *item: textses.append(item)):
        pass
    assert textses[-1] == (ahead.STAGE, 1, 1)
    assert time.monotonic() - began < 60


def prepare_beside_warm_up(cache: Path) -> None:
    """Processes compile while the dry run goes on, and a launch waits for the process that compiles its kernel."""
    knobs.cache.dir = str(cache)
    paper = PaperDriver()
    driver.set_active(paper)
    ready = ahead.triton.compile

    def compile_slowly(source: Any, **given: Any) -> Any:
        (cache / "begun").touch()
        time.sleep(1)
        return ready(source, **given)

    def launch() -> None:
        double[(1,)](torch.ones(16), torch.ones(16), N=16)

    def dry() -> None:
        launch()
        until = time.monotonic() + 60
        while not (cache / "begun").exists() and time.monotonic() < until:
            time.sleep(0.01)
        assert (cache / "begun").exists() and not paper.launched

    ahead.triton.compile = compile_slowly
    hits: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    with ahead.compiled_beside(dry, 2, lambda *_: None):
        launch()
        assert hits == [True] and len(paper.launched) == 1
    assert knobs.runtime.jit_cache_hook is None


class Graph:
    """What can be freed where it was made alone."""

    def __init__(self, freed: Path) -> None:
        self.freed, self.held_by = freed, self

    def __del__(self) -> None:
        self.freed.write_text(str(os.getpid()))


def prepare_beside_an_engine_that_went(cache: Path) -> None:
    """A process that compiles leaves alone what the one it was forked from has yet to free."""
    gc.disable()
    Graph(cache / "freed")

    def become(parent: int) -> None:
        ahead._become_worker(parent)
        gc.collect()

    child = get_context("fork").Process(target=become, args=(os.getpid(),))
    child.start()
    child.join()
    assert child.exitcode == 0 and not (cache / "freed").exists()
    gc.collect()
    assert (cache / "freed").read_text() == str(os.getpid())


def name_in_any_order() -> None:
    """A kernel's key is the same whichever kernels were named or launched before it, and no constant in it stands beside
    another of the same name: Triton sorts these by where their modules lie in memory."""
    modules = [
        importlib.import_module(f"{ridgeline.ops.triton.__name__}.{iter_module.name}")
        for iter_module in pkgutil.iter_modules(ridgeline.ops.triton.__path__)
    ]
    kernels = [value for module in modules for value in vars(module).values() if isinstance(value, JITCallable)]
    assert len(kernels) > 100
    results = []
    for seed in range(4):
        everything = {id(item): item for item in (*kernels, *of_triton())}
        for value in everything.values():
            value.hash, value.used_global_vals = None, {}
        if seed < 3:
            ahead.name_all()
        random.Random(seed).shuffle(kernels)
        results.append({kernel.__qualname__ + kernel.__module__: kernel.cache_key for kernel in kernels})
    assert results[0] == results[1] == results[2]
    if triton.__version__.startswith("3.6."):  # 3.9 names kernels alike in any order by itself
        assert results[0] != results[3], "Triton names kernels alike in any order by itself: name_all may go"
    ahead.name_all()
    for kernel in kernels:
        names = [name for name, _ in kernel.used_global_vals]
        values = {(name, str(value)) for (name, _), (value, _) in kernel.used_global_vals.items()}
        assert len(set(names)) == len(values), (kernel, names)


def of_triton() -> list[Any]:
    """Functions of Triton's own that kernels may call."""
    item = [vars(module) for name, module in list(sys.modules.items()) if name.startswith("triton.") and module]
    return [value for module in item for value in module.values() if isinstance(value, JITCallable)]


def test_memory_that_was_not_written_reads_as_zeros() -> None:
    like, made = torch.full((1000,), 7.0), []

    def allocate() -> None:
        made.append(torch.empty(1000))
        made.append(torch.empty_like(like))
        made.append(torch.empty_strided((1000,), (1,)))
        made.append(like.new_empty(1000))
        made.append(like.new_empty_strided((1000,), (1,)))

    torch.use_deterministic_algorithms(True)  # which fills such memory with NaN
    try:
        allocate()
        assert len(made) == 5 and all(item.isnan().all() for item in made)
        made.clear()
        with ahead.compiled_beside(allocate, 1, lambda *_: None):
            pass
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(made) == 5 and not any(item.any() for item in made)


@pytest.mark.parametrize(
    "case",
    [
        prepare_twice,
        prepare_with_errors,
        prepare_with_one_that_hangs,
        prepare_beside_warm_up,
        prepare_beside_an_engine_that_went,
    ],
)
def test_kernels_compile_side_by_side(apart: Callable[..., Any], case: Callable[[Path], None], tmp_path: Path) -> None:
    apart(case, tmp_path)


def test_a_kernel_has_one_name(apart: Callable[..., Any]) -> None:
    apart(name_in_any_order)
