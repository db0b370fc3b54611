"""Which library a CPU gets: compiled here, or the best that a wheel brings."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from ridgeline.ops.native.files import NEEDED, TARGETS, Target, find_library, library_path, target_path

ABILITIES = {
    "Sapphire Rapids": ("amx", TARGETS[0].needs),
    "Zen 4": ("avx512-bf16", TARGETS[1].needs),
    "Cascade Lake": ("avx512-vnni", TARGETS[3].needs | {"mpx"}),
    "Cooper Lake, which has no VBMI": ("avx512-vnni", TARGETS[3].needs | {"avx512_bf16"}),
    "Zen 3": ("avx2", TARGETS[-1].needs | {"vaes"}),
}


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    """A folder with the files of a wheel."""
    for target in TARGETS:
        target_path(target, tmp_path).touch()
    return tmp_path


def test_better_targets_come_first() -> None:
    assert not any(earlier.needs <= later.needs for earlier, later in combinations(TARGETS, 2))
    assert all(target.needs >= NEEDED for target in TARGETS)


@pytest.mark.parametrize(("name", "abilities"), ABILITIES.values(), ids=ABILITIES)
def test_the_best_that_fits(name: str, abilities: frozenset[str], shipped: Path, tmp_path: Path) -> None:
    library = find_library(tmp_path / "cache", shipped, abilities)
    assert library is not None and library.name.startswith(f"{name}-") and library.parent == shipped


def test_a_cpu_that_is_too_old_gets_none(shipped: Path, tmp_path: Path) -> None:
    assert find_library(tmp_path / "cache", shipped, NEEDED) is None


def test_a_library_compiled_here_comes_first(shipped: Path, tmp_path: Path) -> None:
    abilities = TARGETS[0].needs
    compiled = library_path(tmp_path, abilities)
    compiled.touch()
    assert find_library(tmp_path, shipped, abilities) == compiled


def test_nothing_without_files(tmp_path: Path) -> None:
    assert find_library(tmp_path, tmp_path, TARGETS[0].needs) is None


def test_flags_of_the_compiler() -> None:
    flags = Target("some", frozenset({"avx512_bf16", "amx_tile", "avx_vnni", "avx512vbmi"})).flags
    assert {"-mavx512bf16", "-mamx-tile", "-mavxvnni", "-mavx512vbmi"} <= set(flags)
    assert "-march=native" not in flags
