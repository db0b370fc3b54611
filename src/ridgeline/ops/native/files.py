"""Files of the compiled operations: sources, libraries compiled on this machine, and libraries that a wheel brings.

Imports no torch: setup.py compiles the libraries of a wheel where torch is not installed.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

_SHARED = ("-std=c++17", "-O3", "-fopenmp", "-shared", "-fPIC", "-fvisibility=hidden")
FLAGS = (*_SHARED, "-march=native")
# GCC 12's headers deliberately leave destinations of some intrinsics uninitialized.
QUIET = ("-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized")
NEEDED = frozenset({"avx2", "f16c", "fma"})
"""CPU flags of the minimum instruction set. The compiler uses the best set that the CPU has (native/simd.h)."""
SHIPPED = Path(__file__).parent / "shipped"
"""Folder of the libraries that a wheel brings; absent elsewhere."""


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of CPU that a wheel brings a library for. needs: the CPU flags that the compiler may use, as in /proc/cpuinfo."""

    name: str
    needs: frozenset[str]

    @property
    def flags(self) -> tuple[str, ...]:
        """Compiler flags: those instructions, and symbols that older systems have (portable.h)."""
        instructions = (f"-m{flag.replace('amx_', 'amx-').replace('_', '')}" for flag in sorted(self.needs))
        return (*_SHARED, *instructions, "-include", str(Path(__file__).parent / "portable.h"))


_AVX2 = NEEDED | {"bmi2"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI = _AVX512 | {"avx512_vnni"}
_VBMI = _VNNI | {"avx512vbmi", "avx512_vbmi2"}
_BF16 = _VBMI | {"avx512_bf16"}
TARGETS = (
    Target("amx", _BF16 | {"amx_tile", "amx_bf16", "amx_int8"}),
    Target("avx512-bf16", _BF16),
    Target("avx512-vbmi", _VBMI),
    Target("avx512-vnni", _VNNI),
    Target("avx512", _AVX512),
    Target("avx2-vnni", _AVX2 | {"avx_vnni"}),
    Target("avx2", _AVX2),
)
"""Best first. First CPUs: Sapphire Rapids, Zen 4, Ice Lake, Cascade Lake, Skylake-X, Alder Lake, Haswell and Zen."""


def sources() -> tuple[Path, ...]:
    """All source files of the library, headers included, in a fixed order."""
    here = Path(__file__).parent
    return tuple(sorted((*here.glob("*.cpp"), *here.glob("*.h"))))


def cpu_flags() -> frozenset[str]:
    """This CPU's flags; empty without /proc/cpuinfo or on a CPU that is not x86."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), frozenset())


def unsupported() -> str | None:
    """Reason why this CPU cannot run the library, or None."""
    lacking = sorted(NEEDED - cpu_flags())
    return f"this CPU lacks {', '.join(lacking)}" if lacking else None


def library_path(folder: Path | None = None, abilities: frozenset[str] | None = None) -> Path:
    """Path of the library for these sources and a CPU, in `folder` (default: the user's cache). abilities: the CPU's flags; None:
    this CPU's (cpu_flags).

    The name contains a hash of sources, compiler flags and CPU flags, so a library that does not match is never opened.
    """
    if folder is None:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ridgeline"
    return folder / f"native-{_key(*FLAGS, *sorted(cpu_flags() if abilities is None else abilities))}.so"


def target_path(target: Target, folder: Path = SHIPPED) -> Path:
    """Path of a wheel's library for a target, in `folder`. Its name contains a hash of sources and CPU flags."""
    return folder / f"{target.name}-{_key(*_SHARED, *sorted(target.needs))}.so"


def find_library(
    folder: Path | None = None, shipped: Path = SHIPPED, abilities: frozenset[str] | None = None
) -> Path | None:
    """The library that was compiled for a CPU in `folder` (library_path), else the best one that the wheel brings, else None.

    abilities: the CPU's flags; None: this CPU's.
    """
    if (compiled := library_path(folder, abilities)).exists():
        return compiled
    flags = cpu_flags() if abilities is None else abilities
    fitting = (target_path(target, shipped) for target in TARGETS if target.needs <= flags)
    return next((path for path in fitting if path.exists()), None)


def _key(*words: str) -> str:
    key = hashlib.sha256()
    for source in sources():
        key.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    key.update(" ".join(words).encode())
    return key.hexdigest()[:24]
