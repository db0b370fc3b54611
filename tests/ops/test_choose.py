"""The choice of operations, and that it says why."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from ridgeline.core.errors import ConfigError
from ridgeline.ops import choose as choosing
from ridgeline.ops.choose import choose, choose_invariant


def test_a_cpu_gets_plain_operations_where_none_were_built(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choosing.native_cpu, "load", lambda: (None, "not built: run this"))
    with caplog.at_level(logging.INFO):
        assert choose(torch.device("cpu"), torch.bfloat16).name == "cpu"
    assert "run this" in caplog.text


def test_a_cpu_gets_native_operations_where_they_were_built(monkeypatch: pytest.MonkeyPatch) -> None:
    built = replace(choosing.CPU, name="native")
    monkeypatch.setattr(choosing.native_cpu, "load", lambda: (built, "AVX-512"))
    assert choose(torch.device("cpu"), torch.bfloat16) is built
    assert choose(torch.device("cpu"), torch.bfloat16, eager=True) is choosing.CPU


def test_without_triton_a_gpu_gets_the_reference_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choosing, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert choose(torch.device("cuda"), torch.bfloat16).name == "reference"
    assert "pip install triton" in caplog.text


def test_unknown_devices_and_dtypes_get_the_reference(caplog: pytest.LogCaptureFixture) -> None:
    assert choose(torch.device("meta"), torch.bfloat16).name == "reference"
    assert choose(torch.device("cpu"), torch.float64).name == "reference"
    assert "float64" in caplog.text


def test_batch_invariant_operations_are_chosen_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never anything else in their place."""
    built = replace(choosing.CPU, name="native")
    monkeypatch.setattr(choosing.native_cpu, "load", lambda fixed: (built if fixed else None, "AVX-512"))
    cpu = torch.device("cpu")
    assert choose_invariant(cpu, torch.bfloat16) is built
    assert choose_invariant(cpu, torch.float16) is choosing.CPU_ALONE
    with pytest.raises(ConfigError, match="float64"):
        choose_invariant(cpu, torch.float64)
    monkeypatch.setattr(choosing, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="triton"):
        choose_invariant(torch.device("cuda"), torch.bfloat16)
