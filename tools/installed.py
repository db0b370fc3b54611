"""`installed.py NAME MAJOR.MINOR`: exit status 0 when this interpreter has the package in that version or a newer one.

`make setup` asks so before it installs torch: what the user has is left alone.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, version


def installed(name: str, least: str) -> bool:
    try:
        installed_version = version(name)
    except PackageNotFoundError:
        return False
    have, want = (tuple(int(part) for part in re.findall(r"\d+", text)[:2]) for text in (installed_version, least))
    return have >= want


if __name__ == "__main__":
    sys.exit(0 if installed(sys.argv[1], sys.argv[2]) else 1)
