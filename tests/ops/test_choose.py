"""The choice of operations, and that it says why."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from ridgeline.core.errors import ConfigError
from ridgeline.ops.choose import choose, choose_invariant
from ridgeline.ops.cpu import CPU
from ridgeline.ops.cpu_invariant import CPU_INVARIANT
from ridgeline.ops.table import Ops


def test_a_cpu_gets_plain_operations_where_none_were_built(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        ops = choose(torch.device("cpu"), torch.bfloat16, load=lambda: (None, "not built: run this"))
    assert ops.name == "cpu"
    assert "run this" in caplog.text


def test_a_cpu_gets_native_operations_where_they_were_built() -> None:
    built = replace(CPU, name="native")

    def load() -> tuple[Ops, str]:
        return built, "AVX-512"

    assert choose(torch.device("cpu"), torch.bfloat16, load=load) is built
    assert choose(torch.device("cpu"), torch.bfloat16, eager=True, load=load) is CPU


def test_without_triton_a_gpu_gets_the_reference_and_a_warning() -> None:
    """Or is refused, where operations have to be batch-invariant."""
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from ridgeline.core.errors import ConfigError; from ridgeline.ops import choose as module\n"
        "print(module.choose(torch.device('cuda'), torch.bfloat16).name)\n"
        "try: module.choose_invariant(torch.device('cuda'), torch.bfloat16)\n"
        "except ConfigError as error: print(error.message)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    chosen, refused = ended.stdout.splitlines()
    assert chosen == "reference" and "pip install triton" in ended.stderr
    assert refused.startswith("--deterministic is not possible on this device: triton is not installed")


def test_unknown_devices_and_dtypes_get_the_reference(caplog: pytest.LogCaptureFixture) -> None:
    assert choose(torch.device("meta"), torch.bfloat16).name == "reference"
    assert choose(torch.device("cpu"), torch.float64).name == "reference"
    assert "float64" in caplog.text


def test_batch_invariant_operations_are_chosen_or_refused() -> None:
    """Never anything else in their place."""
    built, cpu = replace(CPU, name="native"), torch.device("cpu")

    def load(fixed: bool) -> tuple[Ops | None, str]:
        return built if fixed else None, "AVX-512"

    assert choose_invariant(cpu, torch.bfloat16, load) is built
    assert choose_invariant(cpu, torch.float16, load) is CPU_INVARIANT
    with pytest.raises(ConfigError, match="float64"):
        choose_invariant(cpu, torch.float64, load)
