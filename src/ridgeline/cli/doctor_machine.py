"""Checks of this machine for `ridgeline doctor`."""

from __future__ import annotations

import os
import re
import resource
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from ridgeline.cli.show import bytes_text
from ridgeline.core.plural import counted
from ridgeline.hardware.probe import Machine, probe

_GIB = 1 << 30
_FILES = 4096
"""Open files below which a server with many streams runs out of them: each takes one."""
_PROCESSES = 1024
_LEAST_MEMORY, _LEAST_SHARED, _LEAST_DISK = 2 * _GIB, _GIB, 5 * _GIB
_FULL_DISK = _GIB // 4
_DRIVER = re.compile(r"Kernel Module.*?\s(\d+\.\d+[\d.]*)")


@dataclass(frozen=True, slots=True)
class Check:
    """A finding. state: ok, warn (the server works, with a disadvantage) or fail. remedy: "" if state is ok."""

    name: str
    state: str
    detail: str
    remedy: str = ""


def check_machine() -> list[Check]:
    """All checks of this machine. Imports torch."""
    machine = probe()
    torch_check, torch = check_torch(*_torch_range())
    checks = [check_python(sys.version_info[:3]), torch_check]
    if torch is not None:
        checks += [check_gpus(machine, torch, driver_version()), check_triton(machine, _version("triton"))]
        checks.append(check_native())
    checks += [
        check_memory(machine.host.free_bytes, machine.host.memory_bytes),
        check_limit("open files", resource.getrlimit(resource.RLIMIT_NOFILE)[0], _FILES, "ulimit -n 65536"),
        check_limit("processes", resource.getrlimit(resource.RLIMIT_NPROC)[0], _PROCESSES, "ulimit -u 4096"),
        check_shared_memory(Path("/dev/shm"), len(machine.gpus)),
    ]
    return checks + [check_disk(name, path) for name, path in folders()]


def check_python(now: Sequence[int]) -> Check:
    text = ".".join(map(str, now))
    if tuple(now[:2]) < (3, 11):
        return Check("python", "fail", text, "install Python 3.11 or newer.")
    return Check("python", "ok", text)


def check_torch(least: str, below: str) -> tuple[Check, Any]:
    """The check, and the module; None if it cannot be imported. least, below: the versions that Ridgeline allows."""
    try:
        torch = import_module("torch")
    except (ImportError, OSError) as error:
        remedy = f"pip install 'torch>={least},<{below}'"
        return Check("torch", "fail", f"cannot be imported ({error})", remedy), None
    number = str(torch.__version__)
    if not _parts(least) <= _parts(number) < _parts(below):
        return Check("torch", "fail", number, f"pip install 'torch>={least},<{below}'"), torch
    return Check(
        "torch", "ok", f"{number}, {'CPU build' if torch.version.cuda is None else f'CUDA {torch.version.cuda}'}"
    ), torch


def check_gpus(machine: Machine, torch: Any, driver: str) -> Check:
    """GPUs, their driver, and whether torch can use them."""
    if not machine.gpus:
        return Check("gpu", "ok", "none: models run on the processor")
    names = ", ".join(f"{gpu.name} ({bytes_text(gpu.memory_bytes)})" for gpu in machine.gpus)
    detail = f"{counted(len(machine.gpus), 'GPU')}: {names}; driver {driver or 'unknown'}"
    if torch.version.cuda is None:
        return Check(
            "gpu",
            "fail",
            f"{detail}; torch is a CPU build",
            "install a torch for CUDA: pip install --force-reinstall torch",
        )
    if not torch.cuda.is_available():
        remedy = f"update the driver to one that supports CUDA {torch.version.cuda}, and check CUDA_VISIBLE_DEVICES."
        return Check("gpu", "fail", f"{detail}; torch cannot use it", remedy)
    unknown = [gpu.name for gpu in machine.gpus if gpu.accelerator is None]
    if unknown:
        remedy = "run `ridgeline calibrate`: without it predicted step times are guesses."
        return Check("gpu", "warn", f"{detail}; {unknown[0]} is not in the hardware table", remedy)
    return Check("gpu", "ok", detail)


def check_triton(machine: Machine, number: str) -> Check:
    if not machine.gpus:
        return Check("triton", "ok", f"{number or 'not installed'}; only GPUs need it")
    if not number or _parts(number) < (3, 6):
        return Check("triton", "fail", number or "not installed", "pip install 'triton>=3.6'")
    return Check("triton", "ok", number)


def check_native() -> Check:
    """The compiled operations of a CPU. Torch has been imported, whose OpenMP library they share."""
    binding, build, files = (import_module(f"ridgeline.ops.native.{name}") for name in ("binding", "build", "files"))
    path, command = files.find_library(), "python -m ridgeline.ops.native.build"
    if (reason := files.unsupported()) is not None:
        return Check(
            "cpu operations", "warn", f"not compiled: {reason}", "use another machine, or a GPU: PyTorch is slower."
        )
    if path is None:
        first = "" if build.compiler() else "apt-get install g++, then "
        return Check("cpu operations", "warn", "not compiled, so PyTorch is used, which is slower", f"{first}{command}")
    try:
        library = binding.open_library(path)
    except OSError as error:
        return Check("cpu operations", "warn", f"cannot be loaded ({error})", f"rm {path}; {command}")
    origin = "of the package" if path.parent == files.SHIPPED else "compiled here"
    return Check("cpu operations", "ok", f"{library.instructions}, {origin}, {library.compiler}")


def check_memory(free: int, total: int) -> Check:
    detail = f"{bytes_text(free)} of {bytes_text(total)} free"
    if free < _LEAST_MEMORY:
        return Check(
            "memory",
            "warn",
            detail,
            "end other processes, or raise the container's limit; `ridgeline fit MODEL` says what fits.",
        )
    return Check("memory", "ok", detail)


def check_limit(name: str, soft: int, least: int, command: str) -> Check:
    """A limit of the shell (ulimit)."""
    detail = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    if soft != resource.RLIM_INFINITY and soft < least:
        return Check(name, "warn", f"limit {detail}", f"{command} (systemd: LimitNOFILE=, LimitNPROC=)")
    return Check(name, "ok", f"limit {detail}")


def check_shared_memory(path: Path, gpus: int) -> Check:
    """Several GPUs exchange data through it (NCCL), if they have no faster way."""
    try:
        total = shutil.disk_usage(path).total
    except OSError as error:
        return Check("shared memory", "warn", f"{path}: {error.strerror}", "mount a tmpfs on /dev/shm.")
    if gpus > 1 and total < _LEAST_SHARED:
        return Check(
            "shared memory",
            "warn",
            f"{bytes_text(total)} for {gpus} GPUs",
            "docker run --shm-size=1g, or an emptyDir of medium Memory on /dev/shm.",
        )
    return Check("shared memory", "ok", bytes_text(total))


def check_disk(name: str, path: Path) -> Check:
    """Free space, and whether files can be written. path: a folder that may not exist yet."""
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    if not os.access(there, os.W_OK):
        return Check(name, "fail", f"{there} cannot be written", "change its owner, or name another folder.")
    free = shutil.disk_usage(there).free
    detail = f"{bytes_text(free)} free in {path}"
    if free < _LEAST_DISK:
        return Check(
            name, "fail" if free < _FULL_DISK else "warn", detail, "delete files, or name a folder on another disk."
        )
    return Check(name, "ok", detail)


def folders() -> list[tuple[str, Path]]:
    """Folders that a server writes: models of the hub, compiled code, files of batches and use of keys."""
    home, environ = Path.home(), os.environ
    cache = Path(environ.get("XDG_CACHE_HOME") or home / ".cache")
    models = environ.get("HF_HUB_CACHE") or Path(environ.get("HF_HOME") or cache / "huggingface") / "hub"
    return [
        ("disk, models", Path(models)),
        ("disk, kernels", Path(environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")),
        ("disk, state", Path(environ.get("XDG_STATE_HOME") or home / ".local" / "state") / "ridgeline"),
    ]


def driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Version of the NVIDIA driver, or ""."""
    try:
        match = _DRIVER.search(path.read_text())
    except OSError:
        return ""
    return match[1] if match else ""


def _torch_range() -> tuple[str, str]:
    """(least, below) of the torch that this installation asks for."""
    try:
        line = next(line for line in requires("ridgeline") or () if re.match(r"torch[<>=! ]", line))
    except (PackageNotFoundError, StopIteration):
        return "2.11", "3"
    least, below = re.search(r">=([\d.]+)", line), re.search(r"<([\d.]+)", line)
    return least[1] if least else "2.11", below[1] if below else "3"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _parts(number: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", number.partition("+")[0])[:2])
