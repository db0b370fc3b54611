"""The recipes of `ridgeline compress`. The name of a recipe states method, number format and pattern."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from typing import Literal

from ridgeline.compress.gptq import Order
from ridgeline.compress.grid import Grid
from ridgeline.compress.prune import Pattern
from ridgeline.compress.smooth import ALPHA
from ridgeline.compress.storage import INT8, Bitmask, Floats, Integers, Storage
from ridgeline.core.errors import ConfigError
from ridgeline.core.spec import GROUPS
from ridgeline.quant.layouts import Layout, Published

Method = Literal[
    "rtn",
    "gptq",
    "awq",
    "smoothquant",
    "magnitude",
    "wanda",
    "sparsegpt",
    "heads",
    "neurons",
    "layers",
    "gqa",
    "gqa-pca",
    "distill",
]
NO_GRID = Grid(8)

EXAMPLES = {
    "rtn-int4-g128": "round to nearest, 4 bits, a scale for each 128 inputs",
    "gptq-int4-g128": "GPTQ: rounds input by input, later inputs compensate the error of earlier ones",
    "gptq-int4-g128-actorder": "GPTQ, inputs with large activations first",
    "gptq-int3-g128": "GPTQ with 3 bits",
    "awq-int4-g128": "AWQ: a finer grid for inputs with large activations, with zero points",
    "rtn-w8a8": "8-bit weights and activations, without smoothing",
    "smoothquant-w8a8": "SmoothQuant: 8-bit weights and activations, outliers of activations moved into weights",
    "magnitude-50": "the smallest half of the weights set to zero",
    "wanda-50": "Wanda: half of the weights set to zero, chosen by weight times activation",
    "wanda-2:4": "Wanda: two of every four weights set to zero",
    "sparsegpt-50": "SparseGPT: half of the weights set to zero, the others compensate the error",
    "sparsegpt-2:4": "SparseGPT: two of every four weights set to zero",
    "neurons-25": "a quarter of the feed-forward neurons removed: a smaller dense model",
    "heads-25": "a quarter of the attention heads removed",
    "layers-2": "two layers removed",
    "gqa-2": "key/value heads averaged in groups until two remain (gqa-1: multi-query attention): a smaller KV cache",
    "gqa-2-pca": "two key/value heads that are principal components of their groups on calibration texts",
    "distill": "a model of another shape (--student-config, --student) trained on the original's outputs for --tune FILE",
}
"""Recipes listed by the help. Other bits, groups, shares and patterns follow the same naming scheme."""
DRAFTERS = {
    "medusa": "Medusa heads for --speculate medusa:FOLDER, trained on --tune FILE",
    "recurrent": "a recurrent draft for --speculate recurrent:FOLDER, trained on --tune FILE",
    "draft": "a draft model (--student-config, --student) for --speculate draft:FOLDER, trained on --tune FILE",
}
"""Recipes that train a drafter (compress.drafter_job) instead of a compressed model."""

_QUANTIZED = re.compile(r"(rtn|gptq|awq)-int([348])-(?:g(\d+)|channel)(-zp|-sym)?(-actorder|-ordered)?")
_SPARSE = re.compile(r"(magnitude|wanda|sparsegpt)-(?:(\d+):(\d+)|(\d+))")
_STRUCTURED = re.compile(r"(heads|neurons|layers)-(\d+)")
_POOLED = re.compile(r"gqa-(\d+)(-pca)?")


@dataclass(frozen=True, slots=True)
class Recipe:
    """The method applied to every linear of the layers, and the storage of the result."""

    name: str
    method: Method
    storage: Storage
    grid: Grid = NO_GRID
    order: Order = "as stored"
    alpha: float = ALPHA
    pattern: Pattern = field(default=Pattern(0.0))
    amount: float = 0.0
    """Share of heads or neurons, or number of layers, that are removed. For gqa and gqa-pca, the key/value heads that remain."""

    @property
    def needs_texts(self) -> bool:
        """Whether the method needs calibration texts."""
        return self.method not in ("rtn", "magnitude", "gqa", "distill")

    @property
    def pools_heads(self) -> bool:
        """Whether the result has fewer key/value heads and all query heads."""
        return self.method in ("gqa", "gqa-pca")

    @property
    def bits(self) -> int | None:
        """Bits per weight. None: weights stay in floats."""
        return self.grid.bits if self.grid is not NO_GRID else None


def read_recipe(name: str) -> Recipe:
    """Parse the name of a recipe. Raises ConfigError that suggests a similar name."""
    if match := _QUANTIZED.fullmatch(name):
        return _quantized(name, match)
    if match := _SPARSE.fullmatch(name):
        return _sparse(name, match)
    if match := _STRUCTURED.fullmatch(name):
        method, count = match[1], int(match[2])
        if method != "layers" and not 0 < count < 100:
            raise ConfigError(f"The recipe {name!r} has a percentage of {count}: give 1 to 99.", param="recipe")
        amount = float(count) if method == "layers" else count / 100
        return Recipe(name, method, Floats(), amount=amount)  # type: ignore[arg-type]
    if match := _POOLED.fullmatch(name):
        return Recipe(name, "gqa-pca" if match[2] else "gqa", Floats(), amount=float(match[1]))
    if name == "distill":
        return Recipe(name, "distill", Floats())
    if name in ("rtn-w8a8", "smoothquant-w8a8"):
        method = name.partition("-")[0]
        return Recipe(name, method, Integers(INT8), Grid(8))  # type: ignore[arg-type]
    similar = difflib.get_close_matches(name, [*EXAMPLES, *DRAFTERS], n=1)
    hint = f"did you mean {similar[0]}?" if similar else f"examples are {', '.join(EXAMPLES)}."
    raise ConfigError(f"Unknown recipe {name!r}: {hint}", param="recipe")


def _quantized(name: str, match: re.Match[str]) -> Recipe:
    method, bits, group = match[1], int(match[2]), int(match[3] or 0)
    if group not in (0, *GROUPS):
        raise ConfigError(
            f"The recipe {name!r} is not possible: groups of {group} inputs cannot be served. Give "
            f"{', '.join(f'g{size}' for size in GROUPS)} or channel.",
            param="recipe",
        )
    zeros = match[4] == "-zp" or (match[4] is None and method == "awq")
    ordered = match[5] == "-ordered"
    if match[5] and method != "gptq":
        raise ConfigError(f"The recipe {name!r} is not possible: only gptq supports {match[5]}.", param="recipe")
    layout: Layout = {"rtn": "pack-quantized", "gptq": "gptq", "awq": "awq"}[method]  # type: ignore[assignment]
    if bits == 3 or (method == "gptq" and zeros):
        # Only this layout supports 3 bits and a zero point of 0.
        layout = "gptq_v2" if zeros else "gptq"
    elif method == "awq" and bits != 4:
        layout = "pack-quantized"
    order: Order = "groups" if ordered else "static" if match[5] else "as stored"
    grid = Grid(bits, group, not zeros)
    return Recipe(name, method, Integers(Published(layout, bits, group, zeros, ordered)), grid, order)  # type: ignore[arg-type]


def _sparse(name: str, match: re.Match[str]) -> Recipe:
    method = match[1]
    if match[2]:
        nonzeros, length = int(match[2]), int(match[3])
        if not 0 < nonzeros < length:
            raise ConfigError(
                f"The recipe {name!r} has the pattern {nonzeros}:{length}: the first number must be above 0 and below the second.",
                param="recipe",
            )
        pattern, structure = Pattern((length - nonzeros) / length, length), f"{nonzeros}:{length}"
    else:
        share = int(match[4])
        if not 0 < share < 100:
            raise ConfigError(f"The recipe {name!r} has a percentage of {share}: give 1 to 99.", param="recipe")
        pattern, structure = Pattern(share / 100), "unstructured"
    return Recipe(name, method, Bitmask(structure), pattern=pattern)  # type: ignore[arg-type]
