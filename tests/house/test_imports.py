"""Imports point inwards only; what must live without torch does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.imports import violations

FREE_OF_TORCH = (
    "ridgeline", "ridgeline.cli.main", "ridgeline.cli.serve", "ridgeline.cli.chat", "ridgeline.engine.scheduler",
)  # fmt: skip


def test_the_table_holds() -> None:
    assert violations() == []


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
    found = violations(package(tmp_path, **others, **{module: text}))
    assert any(complaint in line for line in found), found


def test_torch_is_found_behind_other_modules(tmp_path: Path) -> None:
    root = package(tmp_path, core___a="import ridgeline.core.b\n", core___b="", core___c="import torch\n")
    (root / "src/ridgeline/core/__init__.py").write_text("from ridgeline.core.c import x\n")
    assert any("core.a: reaches torch" in line for line in violations(root))


@pytest.mark.parametrize("module", FREE_OF_TORCH)
def test_importing_loads_no_torch(module: str) -> None:
    """The table reads syntax; this asks the interpreter, third-party packages included."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
