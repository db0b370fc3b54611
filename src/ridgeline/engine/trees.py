"""How the nodes of a draft tree hang together, as the device needs it; worked out once per shape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ridgeline.core.errors import EngineFailed

_SHAPES = 4096
"""Trees kept: those of a reference drafter differ from step to step."""


@dataclass(frozen=True, slots=True)
class Branches:
    """Of the last known token (node 0) and the n nodes of a tree: depth int32 [1 + n]; ancestors int64 [1 + n], bit j for
    node j, its own among them; parent int64 [1 + n], 0 for the root; levels: the largest depth."""

    depth: np.ndarray
    ancestors: np.ndarray
    parent: np.ndarray
    levels: int


@lru_cache(_SHAPES)
def branches(parents: tuple[int, ...]) -> Branches:
    """parents: of each node, -1 for the root. Raises EngineFailed if a parent does not come before its child."""
    depth, ancestors = [0], [1]
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise EngineFailed(f"Node {node} of a draft tree precedes its parent {parent}.")
        depth.append(depth[parent + 1] + 1)
        ancestors.append(ancestors[parent + 1] | 1 << (node + 1))
    signed = np.array(ancestors, dtype=np.uint64).view(np.int64)
    above = np.array([0, *(parent + 1 for parent in parents)], dtype=np.int64)
    return Branches(np.array(depth, dtype=np.int32), signed, above, max(depth))
