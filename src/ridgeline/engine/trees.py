"""Depths, ancestors and parents of draft trees as the device needs them, cached by the parents of a tree."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ridgeline.core.errors import EngineFailed

_SHAPES = 4096
"""Size of the cache. Trees of the n-gram drafter differ from step to step."""


@dataclass(frozen=True, slots=True)
class Branches:
    """Arrays of a tree: the last known token (node 0) and its n draft nodes. depth int32 [1 + n]. ancestors int64 [1 + n]: bit j is
    set for ancestor j and for the node itself. parent int64 [1 + n]: 0 for the root. levels: the largest depth."""

    depth: np.ndarray
    ancestors: np.ndarray
    parent: np.ndarray
    levels: int


@lru_cache(_SHAPES)
def branches(parents: tuple[int, ...]) -> Branches:
    """parents: of each draft node, -1 for the root. Raises EngineFailed if a parent does not precede its child."""
    depth, ancestors = [0], [1]
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise EngineFailed(f"Node {node} of a draft tree precedes its parent {parent}.")
        depth.append(depth[parent + 1] + 1)
        ancestors.append(ancestors[parent + 1] | 1 << (node + 1))
    signed = np.array(ancestors, dtype=np.uint64).view(np.int64)
    above = np.array([0, *(parent + 1 for parent in parents)], dtype=np.int64)
    return Branches(np.array(depth, dtype=np.int32), signed, above, max(depth))
