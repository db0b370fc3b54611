"""Choose a writable folder for compiled bytecode when Python would not store it, and fill it with all cores."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import cache_from_source, find_spec
from pathlib import Path

UNUSED = r"/(_dynamo|_inductor|f2py|onnx|quantization|testing|tests|distributed/\w+)/"
"""Regular expression of folders of torch and numpy that an engine hardly imports: two thirds of torch."""
FEWEST_CORES = 4
"""Cores below which processes that compile would slow the imports down."""


def keep_bytecode(package: str, *others: str) -> None:
    """Store bytecode in `ridgeline/bytecode` of the user's cache ($XDG_CACHE_HOME or ~/.cache) if `package` is not compiled yet and
    Python may not write next to its source. Call it before the first import of `package`.

    Container images are often in this state (PYTHONDONTWRITEBYTECODE, installers that do not compile, folders that only root may
    write). Each start would then compile 1,500 modules, which takes longer than all other imports together. The first start
    compiles those of `package` and of `others` with all cores, while it imports them.
    """
    spec = find_spec(package)
    if spec is None or not spec.origin or sys.pycache_prefix:
        return
    cached = Path(cache_from_source(spec.origin))
    is_stored = cached.exists() or (os.access(Path(spec.origin).parent, os.W_OK) and not sys.dont_write_bytecode)
    if not is_stored:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(cache, "ridgeline", "bytecode")
        sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
        if not folder.exists() and len(os.sched_getaffinity(0)) >= FEWEST_CORES:
            _compile_beside([package, *others], folder)


def _compile_beside(packages: list[str], folder: Path) -> None:
    """Start to compile packages into `folder` with all cores, and do not wait."""
    specs = [find_spec(package) for package in packages]
    sources = [str(Path(spec.origin).parent) for spec in specs if spec is not None and spec.origin]
    environ = {**os.environ, "PYTHONPYCACHEPREFIX": str(folder), "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-S", "-m", "compileall", "-q", "-j", "0", "-x", UNUSED, *sources]
    subprocess.Popen(
        command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
