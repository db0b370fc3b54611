"""Benchmarks are scripts that import each other from their own folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
# The profiler of memory would say on the terminal that it starts and stops.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
