"""Sparse weights in the sparse-bitmask layout of compressed-tensors: one bit per weight, and the non-zero weights.

A checkpoint stores four tensors for a linear's weight [rows, columns]:

- `compressed` [nonzeros]: the non-zero weights, row by row.
- `bitmask` uint8 [rows, ceil(columns / 8)]: the first column is the lowest bit.
- `row_offsets` int64 [rows]: the index in `compressed` at which each row starts.
- `shape` int64 [2].

Weights become dense when they are loaded. A CPU with AVX-512 VBMI2 packs them again for its products (ops/native/sparse.h);
elsewhere the layout saves disk space only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from ridgeline.core.errors import UnsupportedModel

PARTS = ("compressed", "bitmask", "row_offsets", "shape")


def pack(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Convert weight [rows, columns] of any floating-point type to the tensors of PARTS."""
    nonzero = weight != 0
    counts = nonzero.sum(1)
    padded = F.pad(nonzero.to(torch.uint8), (0, -weight.shape[1] % 8)).unflatten(1, (-1, 8))
    return {
        "compressed": weight[nonzero],
        "bitmask": (padded << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8),
        "row_offsets": counts.cumsum(0) - counts,
        "shape": torch.tensor(weight.shape, dtype=torch.int64),
    }


def unpack(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Restore the dense weight from the tensors of PARTS. Raises UnsupportedModel if mask and values do not match."""
    rows, columns = parts["shape"].tolist()
    mask, values = parts["bitmask"], parts["compressed"]
    if tuple(mask.shape) != (rows, -(-columns // 8)):
        raise UnsupportedModel(
            f"has a bitmask of shape {list(mask.shape)}, which does not fit a matrix of shape {[rows, columns]}."
        )
    nonzero = (mask.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)[:, :columns].bool()
    if int(nonzero.sum()) != len(values):
        raise UnsupportedModel(f"has {len(values)} values, but {int(nonzero.sum())} bits are set in its mask.")
    return torch.zeros(rows, columns, dtype=values.dtype).masked_scatter_(nonzero, values)


def dense_tensors(
    names: Iterable[str], get: Callable[[str], torch.Tensor]
) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Yield (name, function that reads the tensor) for every tensor of a checkpoint.

    The four parts of a sparse weight become one dense tensor.
    """
    for name in names:
        linear, _, part = name.rpartition(".")
        if part == "compressed":
            yield f"{linear}.weight", partial(_read_dense, linear, get)
        elif part not in PARTS:
            yield name, partial(get, name)


def _read_dense(linear: str, get: Callable[[str], torch.Tensor]) -> torch.Tensor:
    try:
        return unpack({part: get(f"{linear}.{part}") for part in PARTS})
    except UnsupportedModel as error:
        raise UnsupportedModel(f"The tensor {linear}.weight {error.message}") from None
