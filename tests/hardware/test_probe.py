"""The probe reads this machine, and says nothing rather than something wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ridgeline.hardware.bandwidth import matmul_rate, read_bandwidth, with_measured_rates
from ridgeline.hardware.probe import (
    Device,
    Machine,
    _cgroup_limit,
    probe,
    process_age_s,
    resolve_accelerator,
    visible_gpus,
)
from ridgeline.hardware.table import lookup

GPUS = tuple(Device("cuda", f"gpu {index}", 1, 1) for index in range(4))


def test_this_machine() -> None:
    machine = probe()
    assert machine.cores >= 1 and machine.processor
    assert machine.host.memory_bytes >= machine.host.free_bytes > 0
    assert machine.device("cpu") == machine.host
    assert machine.host.accelerator is not None


def test_the_processor_that_is_meant_is_this_one() -> None:
    row = replace(lookup("epyc"), name="x, 2 cores")
    machine = Machine("x", 2, (), Device("cpu", "x", 1, 1, row), GPUS)
    for name in ("cpu", "CPU"):
        assert resolve_accelerator(name, lambda: machine) == row
    assert resolve_accelerator("h200").name == "NVIDIA H200 SXM" and "EPYC" in resolve_accelerator("epyc").name


def test_the_row_of_this_machine_has_its_own_figures() -> None:
    machine = probe()
    row = machine.host.accelerator
    assert row is not None and row.name.startswith(machine.processor) and row.kind == "cpu" and row.serves
    assert row.memory_bytes == machine.host.memory_bytes


def test_the_first_gpu_unless_told_otherwise() -> None:
    host = Device("cpu", "x", 1, 1)
    assert Machine("x", 1, (), host, GPUS).device() == GPUS[0]
    assert Machine("x", 1, (), host, GPUS).device("cpu") == host
    assert Machine("x", 1, (), host, ()).device() == host


@pytest.mark.parametrize(
    ("listed", "indices"),
    [(None, [0, 1, 2, 3]), ("", []), ("-1", []), ("2,0", [2, 0]), ("1,9,2", [1]), ("GPU-a,GPU-b", [0, 1])],
)
def test_visible_devices(listed: str | None, indices: list[int]) -> None:
    assert visible_gpus(GPUS, listed) == tuple(GPUS[index] for index in indices)


def test_a_container_has_less(tmp_path: Path) -> None:
    assert _cgroup_limit(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    assert _cgroup_limit(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("600\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 200\n")
    assert _cgroup_limit(tmp_path) == (1000, 400)


def test_measured_ceilings_are_numbers() -> None:
    device = torch.device("cpu")
    assert read_bandwidth(device, 1 << 20, 2) > 0
    assert matmul_rate(device, torch.float32, 64, 2) > 0


def test_measured_rates_stand_in_for_unknown_figures_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeline.hardware.bandwidth.measured_rates", lambda device, dtype: (3e9, 2e9))
    known = lookup("epyc")
    assert with_measured_rates(known, "bfloat16") is known
    blind = replace(known, flops={}, memory=replace(known.memory, bandwidth=0.0))
    row = with_measured_rates(blind, "bfloat16")
    assert (row.peak("bfloat16"), row.bandwidth, row.measured) == (3e9, 2e9, ("dense", "memory.gb_s"))
    row = with_measured_rates(replace(known, memory=blind.memory), "bfloat16")
    assert (row.flops, row.bandwidth, row.measured) == (known.flops, 2e9, ("memory.gb_s",))
    edge = lookup("edge tpu")
    assert with_measured_rates(edge, "bfloat16") is edge  # this machine cannot measure another device


def test_age_of_this_process(tmp_path: Path) -> None:
    first = process_age_s()
    assert 0 < first <= process_age_s()
    # A name may hold spaces and parentheses; the process of this file started with the machine.
    (tmp_path / "stat").write_text("7 (a) b) S " + " ".join(["1"] * 18) + " 0 9 9")
    assert process_age_s(tmp_path / "stat") >= process_age_s()
    assert process_age_s(tmp_path / "none") == 0.0
