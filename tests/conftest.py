"""What all tests share: no network, one thread, the same examples on every run, and no GPU test without a GPU."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

# Before torch is imported anywhere: tests use tiny tensors, on which a second thread only waits for the first.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
if find_spec("triton") is not None and not Path("/dev/nvidiactl").exists():
    # Before anything imports triton (transformers does): without a GPU its kernels run in the interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")
for name in [name for name in os.environ if name.startswith("RIDGELINE_")]:
    del os.environ[name]

settings.register_profile("house", deadline=None, derandomize=True)
settings.load_profile("house")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
