"""Training scripts import each other from their own folder."""

from __future__ import annotations

import sys
from pathlib import Path

# Last, because benchmarks has a module of the same name as one of training (drafters).
sys.path.append(str(Path(__file__).resolve().parents[2] / "training"))
