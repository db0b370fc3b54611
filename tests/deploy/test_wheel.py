"""The source distribution builds, and its wheel serves in an environment that has no source tree and no compiler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from benchmarks.installing import environment, install, served
from ridgeline import __version__
from ridgeline.ops.native.build import compiler
from ridgeline.ops.native.files import TARGETS, cpu_flags, target_path
from tools.imports import ROOT

DOCUMENTS = ("README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11)}
"""Symbol versions of the tag manylinux_2_28: AlmaLinux 8, with the libstdc++ of GCC 8."""

pytestmark = [pytest.mark.long, pytest.mark.skipif(compiler() is None, reason="no C++ compiler")]


def call(hook: str, tree: Path, output: Path, **variables: str) -> Path:
    """The file that a hook of PEP 517 makes from a tree."""
    output.mkdir(exist_ok=True)
    code = f"import sys; from setuptools import build_meta; print(build_meta.{hook}(sys.argv[1]))"
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CPU_LIBRARIES")}
    command = [sys.executable, "-c", code, str(output)]
    done = subprocess.run(command, cwd=tree, env={**clean, **variables}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return output / done.stdout.splitlines()[-1]


def package_files(root: Path) -> set[str]:
    """Files of the package below `root`, compiled ones left out."""
    paths = (path for path in (root / "ridgeline").rglob("*") if path.is_file())
    return {str(path.relative_to(root)) for path in paths if path.suffix not in (".pyc", ".so")}


def symbol_versions(library: Path) -> Iterable[tuple[str, tuple[int, ...]]]:
    """Versions of the symbols that a library asks for: (GLIBC, (2, 27))."""
    listed = subprocess.run(["objdump", "-T", str(library)], capture_output=True, text=True, check=True).stdout
    for name, number in re.findall(r"\((GLIBC|GLIBCXX|CXXABI)_([\d.]+)\)", listed):
        yield name, tuple(int(part) for part in number.split("."))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    tree = folder / "tree"
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so"))
    for name in (*DOCUMENTS, "pyproject.toml", "setup.py", "MANIFEST.in"):
        shutil.copy(ROOT / name, tree)
    with tarfile.open(call("build_sdist", tree, folder / "dist")) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"ridgeline-{__version__}"


@pytest.fixture(scope="module")
def wheel(sdist: Path, pytestconfig: pytest.Config) -> Path:
    """A wheel with the library for this CPU alone, which pytest keeps until its sources change (a minute of a core)."""
    name = next(target.name for target in TARGETS if target.needs <= cpu_flags())
    cache = getattr(pytestconfig, "cache", None)
    kept = str(sdist / "libraries" if cache is None else cache.mkdir("libraries"))
    return call("build_wheel", sdist, sdist.parent / "wheels", CPU_LIBRARIES=kept, CPU_TARGETS=name)


def test_source_distribution(sdist: Path) -> None:
    assert package_files(sdist / "src") == package_files(ROOT / "src")
    assert all((sdist / name).read_bytes() == (ROOT / name).read_bytes() for name in DOCUMENTS)


def test_a_wheel_without_libraries_is_for_every_platform(sdist: Path) -> None:
    made = call("build_wheel", sdist, sdist.parent / "pure")
    assert made.name == f"ridgeline-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(made) as archive:
        assert not any(name.endswith(".so") for name in archive.namelist())


def test_contents(wheel: Path, tmp_path: Path) -> None:
    assert wheel.name == f"ridgeline-{__version__}-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    assert package_files(tmp_path) == package_files(ROOT / "src")
    (information,) = tmp_path.glob("*.dist-info")
    assert (information / "licenses/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert "ridgeline = ridgeline.cli.main:main" in (information / "entry_points.txt").read_text()
    (library,) = tmp_path.rglob("*.so")
    target = next(target for target in TARGETS if target.needs <= cpu_flags())
    assert library == target_path(target, tmp_path / "ridgeline/ops/native/shipped")
    for name, version in symbol_versions(library):
        assert version <= NEWEST[name], (name, version)


def test_it_serves_without_source_tree_and_compiler(wheel: Path, tmp_path: Path) -> None:
    """The libraries of the wheel are opened, and an answer streams."""
    python = environment(tmp_path / "venv", offline=True)
    install(python, wheel, offline=True, options=[])
    program = python.parent / "ridgeline"
    variables = {"PATH": str(program.parent), "HOME": str(tmp_path)}
    version = subprocess.run([program, "--version"], env=variables, capture_output=True, text=True, check=True).stdout
    assert __version__ in version
    doctor = subprocess.run([program, "doctor"], env=variables, capture_output=True, text=True, check=False).stdout
    assert re.search(r"cpu operations.*of the package", doctor), doctor
    ready, token = served(program, tmp_path)
    assert 0 < ready < token < 60
