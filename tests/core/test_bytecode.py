"""What Python compiles is kept where it would not be, and only there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ridgeline

CODE = """
import sys
from ridgeline.core.bytecode import keep_bytecode
keep_bytecode("large")
import large
print(large.__cached__)
"""


@pytest.mark.parametrize(("refused", "compiled"), [(True, False), (True, True), (False, False)])
def test_kept_once_where_nothing_else_keeps_it(tmp_path: Path, refused: bool, compiled: bool) -> None:
    package, cache = tmp_path / "large", tmp_path / "cache"
    package.mkdir()
    (package / "__init__.py").write_text("NUMBER = 1")
    source = Path(ridgeline.__file__).parents[1]

    def run(refused: bool) -> Path:
        environ = {**os.environ, "PYTHONPATH": f"{source}:{tmp_path}", "XDG_CACHE_HOME": str(cache)}
        environ["PYTHONDONTWRITEBYTECODE"] = "1" if refused else ""
        done = subprocess.run([sys.executable, "-c", CODE], env=environ, capture_output=True, text=True, check=True)
        return Path(done.stdout.strip())

    if compiled:
        run(False)
    kept = run(refused)
    assert kept.is_file()
    assert (cache in kept.parents) is (refused and not compiled)
    assert (cache / "ridgeline").exists() is (refused and not compiled)
    written = kept.stat().st_mtime_ns
    assert run(refused) == kept and kept.stat().st_mtime_ns == written


CORES = """
import os
os.sched_getaffinity = lambda pid: set(range(4))
"""


def test_the_first_start_compiles_modules_beside_its_imports(tmp_path: Path) -> None:
    packages, cache = [tmp_path / "large", tmp_path / "also"], tmp_path / "cache"
    for package in packages:
        package.mkdir()
        (package / "__init__.py").write_text("NUMBER = 1")
        (package / "later.py").write_text("NUMBER = 2")
    source = Path(ridgeline.__file__).parents[1]
    environ = {**os.environ, "PYTHONPATH": f"{source}:{tmp_path}", "XDG_CACHE_HOME": str(cache)}
    environ["PYTHONDONTWRITEBYTECODE"] = "1"
    code = CORES + CODE.replace('keep_bytecode("large")', 'keep_bytecode("large", "also", "absent")')
    subprocess.run([sys.executable, "-c", code], env=environ, check=True, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while len(list(cache.rglob("later.*.pyc"))) < len(packages):
        assert time.monotonic() < until
        time.sleep(0.05)
