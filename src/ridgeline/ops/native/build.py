"""Compile the native operations for this machine's CPU: `python -m ridgeline.ops.native.build`.

Needs a C++17 compiler (g++ 11 or newer; the variable CXX names another). Nothing else builds them: a server without the library
uses PyTorch operations and logs the reason.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ridgeline.core.errors import RidgelineError
from ridgeline.ops.native.binding import FLAGS, QUIET, library_path, open_library, sources, unsupported


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
    if path.exists():
        return path
    command = compiler()
    if (reason := why_not()) is not None or command is None:
        raise RidgelineError(f"The native operations cannot be built: {reason}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Built in the same folder, so that the last step is a rename and no process opens a partial library.
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        units = [source for source in sources() if source.suffix == ".cpp"]
        objects = [str(Path(scratch) / f"{unit.stem}.o") for unit in units]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(lambda unit, made: _compile(command, "-c", str(unit), "-o", made), units, objects))
        _compile(command, *objects, "-o", str(made))
        made.replace(path)
    return path


def _compile(command: list[str], *words: str) -> None:
    done = subprocess.run([*command, *FLAGS, *QUIET, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RidgelineError(f"The native operations did not compile:\n{done.stderr[-4000:]}")


def main() -> int:
    """Build and open once; 0 if the library is usable."""
    try:
        path = build()
        library = open_library(path)
    except (RidgelineError, OSError) as error:
        print(f"{error} Ridgeline runs without them, but slower.", file=sys.stderr)
        return 1
    print(f"native operations: {path} ({library.instructions}, compiled by {library.compiler})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
