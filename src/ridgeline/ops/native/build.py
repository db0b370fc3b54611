"""Compile the native operations for this machine's CPU: `python -m ridgeline.ops.native.build`.

Needs a C++17 compiler (g++ 11 or newer; the variable CXX names another). `make wheel` compiles the libraries of a wheel for several
kinds of CPU (files.py). A server without a library uses PyTorch operations and logs the reason.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

from ridgeline.core.errors import RidgelineError
from ridgeline.ops.native.files import FLAGS, QUIET, Target, library_path, sources, target_path, unsupported


def compiler() -> list[str] | None:
    """The compiler's command, or None if there is none."""
    command = shlex.split(os.environ.get("CXX", "g++"))
    return command if command and shutil.which(command[0]) else None


def why_not() -> str | None:
    """Reason why the library cannot be built here, or None."""
    if (reason := unsupported()) is not None:
        return reason
    return None if compiler() else "no C++ compiler was found (install g++ or set CXX)"


def build(folder: Path | None = None) -> Path:
    """Compile into `folder` (default: the user's cache) and return the library's path. An existing library is kept.

    Raises RidgelineError with the reason, or with the end of the compiler's output.
    """
    path = library_path(folder)
    if (reason := why_not()) is not None and not path.exists():
        raise RidgelineError(f"The native operations cannot be built: {reason}.")
    return _made(path, FLAGS)


def build_for(target: Target, folder: Path) -> Path:
    """Compile the library of a wheel for a target into `folder` and return its path. Needs no CPU of that kind."""
    if compiler() is None:
        raise RidgelineError("A wheel with compiled operations needs a C++ compiler: install g++ or set CXX.")
    return _made(target_path(target, folder), target.flags)


def _made(path: Path, flags: tuple[str, ...]) -> Path:
    """The library at `path`, compiled unless it exists."""
    command = compiler()
    if path.exists() or command is None:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    # Built in the same folder, so that the last step is a rename and no process opens a partial library.
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        units = [source for source in sources() if source.suffix == ".cpp"]
        objects = [str(Path(scratch) / f"{unit.stem}.o") for unit in units]
        start = (*command, *flags, *QUIET)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(lambda unit, made: _compile(*start, "-c", str(unit), "-o", made), units, objects))
        _compile(*start, *objects, "-o", str(made))
        made.replace(path)
    return path


def _compile(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RidgelineError(f"The native operations did not compile:\n{done.stderr[-4000:]}")


def main() -> int:
    """Build and open once; 0 if the library is usable."""
    try:
        path = build()
        # Imports torch, whose OpenMP library it shares; build_for works without torch.
        library = import_module("ridgeline.ops.native.binding").open_library(path)
    except (RidgelineError, OSError) as error:
        print(f"{error} Ridgeline runs without them, but slower.", file=sys.stderr)
        return 1
    print(f"native operations: {path} ({library.instructions}, compiled by {library.compiler})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
