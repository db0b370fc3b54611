"""Imports point inwards only; what must live without torch does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.imports import EXCEPTIONS, NO_TORCH, ROOMS, ROOT, modules, table, violations

FREE_OF_TORCH = (
    "ridgeline", "ridgeline.cli.main", "ridgeline.cli.serve", "ridgeline.cli.chat", "ridgeline.engine.scheduler",
)  # fmt: skip


def test_the_table_holds() -> None:
    assert violations() == []


def test_the_table_names_only_packages_and_modules_that_exist() -> None:
    present = set(modules(ROOT))
    named = {*ROOMS, *EXCEPTIONS, *NO_TORCH}
    for allowed in (*ROOMS.values(), *EXCEPTIONS.values()):
        named.update(allowed)
    assert named <= present, named - present


def test_the_documentation_has_the_table() -> None:
    """`tools/imports.py --table` prints it."""
    assert f"\n{table()}\n" in (ROOT / "docs/imports.md").read_text()


def package(root: Path, **files: str) -> Path:
    """A small package named ridgeline: file names with __ for a folder."""
    source = root / "src" / "ridgeline"
    for name, text in {"__init__": "", **files}.items():
        path = source / (name.replace("___", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("module", "text", "complaint"),
    [
        ("core___a", "import numpy\n", "standard library"),
        ("core___a", "from ridgeline.wire import b\n", "may not import wire"),
        ("wire___a", "def f():\n    import json\n", "imported inside"),
        ("wire___a", "try:\n    import orjson\nexcept ImportError:\n    pass\n", "imported inside"),
        ("wire___a", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import json\n", "TYPE_CHECKING"),
        ("wire___a", "from . import b\n", "relative"),
        ("wire___a", "from ridgeline.cli import main\n", "nobody imports cli"),
        ("kv___blocks", "from ridgeline.ops import table\n", "may not import"),
        ("engine___scheduler", "from ridgeline.engine import runner\n", "may not import engine"),
        ("service___a", "import ridgeline.engine.local\n", "may not import engine"),
        ("service___a", "from ridgeline.hardware.probe import x\n", "may not import hardware"),
        ("service___a", "import torch\n", "reaches torch"),
        ("attic___a", "import json\n", "not in the import table"),
    ],
)
def test_a_breach_is_seen(tmp_path: Path, module: str, text: str, complaint: str) -> None:
    others = {
        "wire___b": "", "cli___main": "", "ops___table": "import torch\n", "engine___runner": "import torch\n",
        "engine___local": "", "hardware___probe": "x = 1\n",
    }  # fmt: skip
    problems = violations(package(tmp_path, **others, **{module: text}))
    assert any(complaint in line for line in problems), problems


def test_torch_is_found_behind_other_modules(tmp_path: Path) -> None:
    root = package(tmp_path, core___a="import ridgeline.core.b\n", core___b="", core___c="import torch\n")
    (root / "src/ridgeline/core/__init__.py").write_text("from ridgeline.core.c import x\n")
    assert any("core.a: reaches torch" in line for line in violations(root))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("import ridgeline.cli.b\n", "from ridgeline.cli.a import x\n"),
        (
            'from importlib import import_module\nx = import_module("ridgeline.cli.b").y\n',
            "from ridgeline.cli import a\n",
        ),
        (
            'import importlib\ndef f():\n    return importlib.import_module("ridgeline.cli.b")\n',
            "import ridgeline.cli.a\n",
        ),
        ("def f():\n    from ridgeline.cli.b import x\n", "import ridgeline.cli.a\n"),
        ("def f():\n    import ridgeline.cli.b\n", "def f():\n    import ridgeline.cli.a\n"),
        ('HOMES = {"b": "ridgeline.cli.b"}\nimport_module(HOMES["b"])\n', "import ridgeline.cli.a\n"),
        ('def f(name):\n    import_module(f"ridgeline.cli.{name}")\n', "import ridgeline.cli.a\n"),
    ],
)
def test_a_cycle_is_seen(tmp_path: Path, first: str, second: str) -> None:
    problems = violations(package(tmp_path, cli___a=first, cli___b=second))
    assert [line for line in problems if "import cycle: cli.a:" in line and "-> cli.b:" in line], problems


def test_a_cycle_of_three_is_seen_once_and_its_module_outside_is_not_in_it(tmp_path: Path) -> None:
    files = {"core___a": "b", "core___b": "c", "core___c": "a", "core___d": "a"}
    root = package(tmp_path, **{name: f"import ridgeline.core.{target}\n" for name, target in files.items()})
    assert [line.partition(";")[0] for line in violations(root)] == [
        "import cycle: core.a:1 -> core.b:1 -> core.c:1 -> core.a"
    ]


def test_a_deferred_import_obeys_the_table(tmp_path: Path) -> None:
    text = 'from importlib import import_module\nx = import_module("ridgeline.engine.local")\n'
    problems = violations(package(tmp_path, service___a=text, engine___local=""))
    assert any("service.a may not import engine.local" in line for line in problems), problems


def test_a_string_beside_import_module_is_no_import(tmp_path: Path) -> None:
    text = 'from importlib import import_module\nx = import_module("json")\ny = "ridgeline.core.b"\n'
    assert violations(package(tmp_path, core___a=text, core___b="import ridgeline.core.a\n")) == []


@pytest.mark.parametrize("module", FREE_OF_TORCH)
def test_importing_loads_no_torch(module: str) -> None:
    """The table reads syntax; this asks the interpreter, third-party packages included."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
