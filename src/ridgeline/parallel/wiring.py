"""Which ranks work together on each axis of the mesh, and how their devices reach one another: a value, chosen once for each group.

Ranks of one host are neighbours. So the ranks that share a layer are on one host wherever the sizes allow it, and stages of a
pipeline, which exchange least, are on different ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Wiring(Enum):
    """How the ranks of a group are connected.

    GLOO: processes on CPUs, of one host or several. NCCL: GPUs of several hosts; NCCL makes every sum. PEERS: GPUs of one host,
    which may map each other's memory (CUDA IPC); NCCL, and kernels of our own for small sums (ops.triton.peers).
    """

    GLOO = "gloo"
    NCCL = "NCCL"
    PEERS = "NCCL and peer memory"


@dataclass(frozen=True, slots=True)
class Axes:
    """The ranks that one rank works with, itself included, as numbers among all ranks of the model.

    tensor: those that share each layer. context: those that share keys and values, of the same part of each layer. stages: those
    with the same place in each stage, the first stage first. all: of the model.
    """

    tensor: range
    context: range
    stages: range
    all: range

    @staticmethod
    def of(rank: int, tensor: int, context: int, stages: int) -> Axes:
        """Ranks that share layers are neighbours, then those that share keys and values, then stages. The first ranks are the last
        stage, which draws the tokens."""
        size = tensor * context
        row, block = rank // tensor * tensor, rank // size * size
        return Axes(
            range(row, row + tensor),
            range(block + rank % tensor, block + size, tensor),
            range(rank % size, stages * size, size)[::-1],
            range(stages * size),
        )


def wiring(ranks: range, per_host: int | None, device: str) -> Wiring:
    """How these ranks are connected.

    Args:
        per_host: ranks of each host, which are neighbours; None: all ranks are on one host.
        device: "cpu" or "cuda".
    """
    if device == "cpu":
        return Wiring.GLOO
    one_host = per_host is None or ranks[0] // per_host == ranks[-1] // per_host
    return Wiring.PEERS if one_host else Wiring.NCCL
