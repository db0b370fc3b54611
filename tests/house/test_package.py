"""What pyproject.toml says of the package: its files, versions, extras and the documents that come with it."""

from __future__ import annotations

import re
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ridgeline import __version__
from tools.imports import ROOT

SETTINGS: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = SETTINGS["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
OF_USERS = ("structured", "otel", "cluster", "plan")


def missing(package: Path, patterns: list[str]) -> list[str]:
    """Files of a package that neither Python's modules nor patterns of package data bring."""
    brought = {path for pattern in patterns for path in package.glob(pattern)}
    files = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return sorted(
        str(path.relative_to(package)) for path in files if path.suffix not in (".py", ".so") and path not in brought
    )


def test_every_file_is_package_data() -> None:
    assert missing(ROOT / "src/ridgeline", SETTINGS["tool"]["setuptools"]["package-data"]["ridgeline"]) == []


def test_a_missing_file_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for name in ("m.py", "x.css", "a/y.css", "a/z.toml"):
        (tmp_path / name).touch()
    assert missing(tmp_path, ["a/*.css"]) == ["a/z.toml", "x.css"]


def test_every_folder_of_modules_is_a_package() -> None:
    """setuptools leaves out folders without __init__.py."""
    folders = {path.parent for path in (ROOT / "src/ridgeline").rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_versions_of_python() -> None:
    (least,) = re.findall(r"^>=3\.(\d+)$", PROJECT["requires-python"])
    named = [int(name) for name in re.findall(r"Python :: 3\.(\d+)\b", "\n".join(PROJECT["classifiers"]))]
    assert named and min(named) == int(least)
    assert SETTINGS["tool"]["ruff"]["target-version"] == f"py3{least}"
    assert SETTINGS["tool"]["mypy"]["python_version"] == f"3.{least}"
    assert f"sys.version_info < (3, {least})" in (ROOT / "Makefile").read_text()


def test_license_is_an_expression() -> None:
    assert PROJECT["license"] == "Apache-2.0" and not any(name.startswith("License") for name in PROJECT["classifiers"])
    assert all((ROOT / name).is_file() for name in PROJECT["license-files"])


def test_commands_exist() -> None:
    for target in PROJECT["scripts"].values():
        module, _, name = target.partition(":")
        assert callable(getattr(import_module(module), name))


def test_extras() -> None:
    """`all` has each extra of users; where an extra for development asks for the same distribution, it asks the same."""
    assert EXTRAS["all"] == [f"ridgeline[{','.join(OF_USERS)}]"]
    assert set(EXTRAS) == {*OF_USERS, "all", "dev", "long", "wheel"}
    of_users = {re.split(r"[<>=!]", line)[0]: line for name in OF_USERS for line in EXTRAS[name]}
    for line in EXTRAS["dev"] + EXTRAS["long"]:
        assert line == of_users.get(re.split(r"[<>=!]", line)[0], line)


def test_messages_name_extras_that_exist() -> None:
    """`pip install 'ridgeline[...]'` in code and documents."""
    pages = (*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md")
    named = {name for page in pages for name in re.findall(r"ridgeline\[([\w,]+)\]", page.read_text())}
    assert {extra for name in named for extra in name.split(",")} <= set(EXTRAS) and len(named) > 3


@pytest.mark.parametrize("name", ["CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_documents(name: str) -> None:
    """They are in the source distribution, README names them, and their links exist."""
    assert name in (ROOT / "MANIFEST.in").read_text().split() and f"({name})" in (ROOT / "README.md").read_text()
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / name).read_text())
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0] == __version__ and len(set(versions)) == len(versions)
