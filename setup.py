"""CPU_LIBRARIES=FOLDER (`make wheel`): the wheel brings the compiled CPU operations, for this platform only. FOLDER keeps the
libraries for the next build. CPU_TARGETS="avx2 avx512" brings fewer (files.py has the names). Without CPU_LIBRARIES a wheel has
Python code and C++ sources, and installs everywhere.

Everything else stands in pyproject.toml.
"""

import os
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

SOURCES = Path(__file__).resolve().parent / "src"


class BuildWithLibraries(build_py):
    def run(self):
        super().run()
        sys.path.insert(0, str(SOURCES))
        from ridgeline.ops.native.build import build_for
        from ridgeline.ops.native.files import SHIPPED, TARGETS

        folder = Path(self.build_lib, SHIPPED.relative_to(SOURCES))
        folder.mkdir(exist_ok=True)
        wanted = os.environ.get("CPU_TARGETS", "").split() or [target.name for target in TARGETS]
        if unknown := set(wanted) - {target.name for target in TARGETS}:
            raise SystemExit(f"CPU_TARGETS: {', '.join(sorted(unknown))} are no targets; files.py has the names.")
        for target in (target for target in TARGETS if target.name in wanted):
            print(f"compiled operations for {target.name}", flush=True)
            shutil.copy(build_for(target, Path(os.environ["CPU_LIBRARIES"])), folder)


class AnyPython(bdist_wheel):
    """The libraries are opened with ctypes, so that every version of Python can use them."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class WithLibraries(Distribution):
    def has_ext_modules(self):
        return True


if os.environ.get("CPU_LIBRARIES"):
    setup(distclass=WithLibraries, cmdclass={"build_py": BuildWithLibraries, "bdist_wheel": AnyPython})
else:
    setup()
