"""Power of a device from what it does: idle power, and parts that grow with the use of its memory bandwidth and its arithmetic.

The three shares are fitted to four measured batches of Llama-3.1-8B on an H100 (ML.ENERGY leaderboard v3, vLLM 0.11, bfloat16: 486
W at batch 8, 560 W at 32, 669 W at 128, 691 W at 256, of 700 W). Other cards may differ, so results say what they rest on.
"""

from __future__ import annotations

from dataclasses import dataclass

IDLE, MEMORY, COMPUTE = 0.14, 0.79, 3.8
"""Shares of the design power: without work, and for each unit of memory bandwidth and of peak FLOP/s in use."""


@dataclass(frozen=True, slots=True)
class Use:
    """Shares of the published peaks that a device uses on average. flops: of FLOP/s. bytes: of memory bandwidth."""

    flops: float
    bytes: float


def watts(design: float, use: Use) -> float:
    """Mean power of a device, at most its design power."""
    return design * min(1.0, IDLE + MEMORY * use.bytes + COMPUTE * use.flops)
