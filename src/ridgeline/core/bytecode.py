"""Choose a writable folder for compiled bytecode when Python would not store it."""

from __future__ import annotations

import os
import sys
from importlib.util import cache_from_source, find_spec
from pathlib import Path


def keep_bytecode(package: str) -> None:
    """Store bytecode in `ridgeline/bytecode` of the user's cache ($XDG_CACHE_HOME or ~/.cache) if `package` is not compiled yet and
    Python may not write next to its source. Call it before the first import of `package`.

    Container images are often in this state (PYTHONDONTWRITEBYTECODE, installers that do not compile, folders that only root may
    write). Each start would then compile 1,500 modules, which takes longer than all other imports together.
    """
    spec = find_spec(package)
    if spec is None or not spec.origin or sys.pycache_prefix:
        return
    cached = Path(cache_from_source(spec.origin))
    is_stored = cached.exists() or (os.access(Path(spec.origin).parent, os.W_OK) and not sys.dont_write_bytecode)
    if not is_stored:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        sys.pycache_prefix, sys.dont_write_bytecode = str(Path(cache, "ridgeline", "bytecode")), False
