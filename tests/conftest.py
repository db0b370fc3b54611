"""What all tests share: no network, one thread, the same examples on every run, and no GPU test without a GPU."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.forkserver
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from hypothesis import settings

from .interpreter import keep_types

# Before torch is imported anywhere: tests use tiny tensors, on which a second thread only waits for the first.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# And where a test asks for two, those of all workers share the cores: who waits for a slice of work sleeps. By default it spins
# first, which takes ten times as long once other threads want the core.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
if find_spec("triton") is not None and not Path("/dev/nvidiactl").exists():
    # Before anything imports triton (transformers does): without a GPU its kernels run in the interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")
for name in [name for name in os.environ if name.startswith("RIDGELINE_")]:
    del os.environ[name]

settings.register_profile("house", deadline=None, derandomize=True)
settings.load_profile("house")


gc.disable()  # until all tests are collected: nothing of them is garbage, and looking for it takes a tenth of a run


def pytest_collection_finish() -> None:
    """Leave what collection made out of later searches for garbage, and search once in 10,000 new objects instead of 700: the
    trees of large modules grow by a million."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """The registries of products decide as on an H200. Call it with False for a machine without the CUDA compiler."""
    from ridgeline.ops.triton import kernels

    for name in ("_on_gpu", "is_hopper"):
        monkeypatch.setattr(kernels, name, lambda device: True)
    monkeypatch.setattr(kernels, "gluon", lambda device, name: object())

    def compiler(available: bool) -> None:
        monkeypatch.setattr(kernels.cuda, "available", lambda: available)

    compiler(True)
    return compiler


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Any]:
    """Triton's interpreter, which is a module, mended in four places. Version 3.6 makes loop bounds of arrays of one element,
    which numpy 2.4 no longer converts. It patches triton.language at each call of one function by another and never takes
    that back, which is half of its time: it is enough once a launch, if all is patched that any function may see. And version
    3.9 makes a mask of integers where a comparison of numbers is broadcast, and then refuses it. A number that e4m3 rounds up to a
    power of two becomes the one below. `keep_types` halves the rest of its time."""
    import torch
    from triton import language
    from triton.runtime import interpreter as module

    bounds, patch_for, scope, in_effect = module._patch_lang_tensor, module._patch_lang, module._LangPatchScope, False
    anything = SimpleNamespace(__globals__={"tl": language, "core": language.core})

    class Launch(scope):  # type: ignore[misc, valid-type]
        def restore(self) -> None:
            nonlocal in_effect
            super().restore()
            in_effect = False

    def bounded(tensor: Any, scope: Any) -> None:
        bounds(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def patch_once(fn: Any) -> Any:
        nonlocal in_effect
        if in_effect:
            return scope()
        in_effect = True
        return patch_for(anything)

    convert_float = module._convert_float

    def converted(values: Any, of: Any, to: Any, rounding: Any) -> Any:
        if (of, to) != (language.float32, language.float8e4nv):
            return convert_float(values, of, to, rounding)
        floats = torch.from_numpy(numpy.ascontiguousarray(values).view(numpy.float32))
        return floats.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    def splat(self: Any, kind: Any, number: Any) -> Any:
        return module.TensorHandle(numpy.full(kind.shape, number.data), number.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.InterpreterBuilder, "create_splat", splat)
        patch.setattr(module, "_convert_float", converted)
        patch.setattr(module, "_patch_lang_tensor", bounded)
        patch.setattr(module, "_patch_lang", patch_once)
        patch.setattr(module, "_LangPatchScope", Launch)
        keep_types(patch, module)
        yield module


@pytest.fixture(scope="session")
def apart() -> Iterator[Callable[..., Any]]:
    """Call a function of a module in a process of its own, where Triton's interpreter, which stays in the way once it was used,
    never was: apart(function, *arguments) -> its result; what it raises is raised. All are forked from one that has imported
    torch and triton."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "triton.experimental.gluon"])
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        multiprocessing.forkserver.ensure_running()
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


@pytest.fixture
def exact_float32() -> Iterator[None]:
    """Products on a GPU without TF32, which would move logits by shape."""
    import torch

    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
