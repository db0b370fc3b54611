"""Sparse weights as compressed-tensors' sparse-bitmask stores them: a bit for every weight, and the weights that are not zero.

Of a linear's weight [rows, columns] a checkpoint brings `compressed` [not zero], row after row; `bitmask` uint8 [rows,
ceil(columns / 8)], the first column in the lowest bit; `row_offsets` int64 [rows], where each row begins in compressed; `shape`
int64 [2]. It is smaller on disk alone: weights are whole again when they are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from ridgeline.core.errors import UnsupportedModel

PARTS = ("compressed", "bitmask", "row_offsets", "shape")


def pack(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """weight [rows, columns] in any floating type -> its PARTS."""
    kept = weight != 0
    counts = kept.sum(1)
    padded = F.pad(kept.to(torch.uint8), (0, -weight.shape[1] % 8)).unflatten(1, (-1, 8))
    return {
        "compressed": weight[kept],
        "bitmask": (padded << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8),
        "row_offsets": counts.cumsum(0) - counts,
        "shape": torch.tensor(weight.shape, dtype=torch.int64),
    }


def unpack(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The weight that `pack` was given. Raises UnsupportedModel where mask and values contradict each other."""
    rows, columns = parts["shape"].tolist()
    mask, values = parts["bitmask"], parts["compressed"]
    if tuple(mask.shape) != (rows, -(-columns // 8)):
        raise UnsupportedModel(
            f"has a bitmask of shape {list(mask.shape)}, which does not fit a matrix of shape {[rows, columns]}."
        )
    kept = (mask.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)[:, :columns].bool()
    if int(kept.sum()) != len(values):
        raise UnsupportedModel(f"has {len(values)} values, but {int(kept.sum())} bits are set in its mask.")
    return torch.zeros(rows, columns, dtype=values.dtype).masked_scatter_(kept, values)


def whole(names: Iterable[str], get: Callable[[str], torch.Tensor]) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """(name, how to get it) of every tensor of a checkpoint, the parts of a sparse one as the weight they are."""
    for name in names:
        linear, _, part = name.rpartition(".")
        if part == "compressed":
            yield f"{linear}.weight", partial(_read, linear, get)
        elif part not in PARTS:
            yield name, partial(get, name)


def _read(linear: str, get: Callable[[str], torch.Tensor]) -> torch.Tensor:
    try:
        return unpack({part: get(f"{linear}.{part}") for part in PARTS})
    except UnsupportedModel as error:
        raise UnsupportedModel(f"The tensor {linear}.weight {error.message}") from None
