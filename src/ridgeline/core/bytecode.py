"""Where Python keeps what it compiles, if it would not keep it at all."""

from __future__ import annotations

import os
import sys
from importlib.util import cache_from_source, find_spec
from pathlib import Path


def keep_bytecode(package: str) -> None:
    """Keep what this process compiles in `ridgeline/bytecode` of the user's cache ($XDG_CACHE_HOME or ~/.cache) if `package`
    lies here uncompiled and Python may not write beside it: images are made so (PYTHONDONTWRITEBYTECODE, installers that do not
    compile, folders that only root may write), and each start would compile 1,500 modules, which takes longer than all else that
    it imports. Whatever is compiled already, or can be, stays as it is. Before `package` is imported.
    """
    found = find_spec(package)
    if found is None or not found.origin or sys.pycache_prefix:
        return
    beside = Path(cache_from_source(found.origin))
    kept = beside.exists() or (os.access(Path(found.origin).parent, os.W_OK) and not sys.dont_write_bytecode)
    if not kept:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        sys.pycache_prefix, sys.dont_write_bytecode = str(Path(cache, "ridgeline", "bytecode")), False
