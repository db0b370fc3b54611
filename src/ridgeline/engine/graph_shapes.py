"""The padded shapes that have CUDA graphs: few, so that capture takes seconds, and dense, so that padding costs little."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from ridgeline.core.spec import NUMBER_FORMATS, ModelSpec
from ridgeline.engine.shape import Sizes, StepShape
from ridgeline.speculation.build import LOGIT_ROWS

MIXED_ROWS = 32
"""Rows of graphs of small mixed steps. Every unused row costs attention an idle program per layer and head."""
MIXED_TOKENS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Query tokens of small mixed steps that have a graph."""
CROWDED_TOKENS = (256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 3072, 4096, 6144)
"""Query tokens of mixed steps with any number of rows that have a graph, besides the limit of a step."""
CROWDED_WORK = 1 << 36
"""Limit of (query tokens x elements of a feed-forward matrix) for graphs of mixed steps, for 16-bit weights. Above it the device
takes longer than Python needs to launch the step (20 to 40 ms for 32 layers). An 8B model reaches it with 1,170 tokens, in fp8 with
2,340."""
DRAFT_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256)
"""Rows of steps with device drafts that have a graph."""
HOST_ROWS, HOST_NODES, HOST_TOKENS = (1, 2, 4, 8, 16, 32), (1, 3, 8), 256
"""Rows, nodes (besides the largest draft) and most query tokens of steps with host drafts that have a graph. Chains and trees need
separate graphs, so there are fewer sizes."""


def buckets(rows: int) -> list[int]:
    """Padded batch sizes of decode graphs, up to `rows`. They are denser where a padding row costs relatively more."""
    sizes = chain((1, 2, 4), range(8, 64, 8), range(64, 256, 16), range(256, rows + 32, 32))
    fitting = [size for size in sizes if size < rows]
    return [*fitting, rows]


def mixed_shapes(sizes: Sizes, spec: ModelSpec) -> list[StepShape]:
    """Shapes of mixed steps that have a graph, in order of search. Each has a spare row that holds the padding tokens."""
    rows, tokens, form = sizes.rows, sizes.step_tokens, NUMBER_FORMATS.get(spec.quantization)
    work = CROWDED_WORK * (2 if form is not None and form.inputs_8bit else 1)
    few, most = min(rows, MIXED_ROWS) + 1, work // (spec.d_model * max(layer.d_ff for layer in spec.layers))
    shapes = {StepShape.mixed(few, span) for span in MIXED_TOKENS if span <= tokens}
    for span in (*CROWDED_TOKENS, tokens):
        if CROWDED_TOKENS[0] <= span <= min(tokens, most):
            shapes.add(StepShape.mixed(min(rows, span) + 1, span))
    return sorted(shapes, key=lambda shape: (shape.tokens, shape.rows))


def draft_shapes(sizes: Sizes, branches: bool) -> dict[bool, list[StepShape]]:
    """Shapes of steps with drafts that have a graph, by whether drafts are trees, the fewest query tokens first. The largest has
    more rows than a step, for padding.

    Args:
        branches: the device drafts trees.
    """
    rows, host_nodes = sizes.rows, sizes.host_drafts
    most = next((row for row in DRAFT_ROWS if row > rows), rows)

    def fitting(heights: Sequence[int], drafts: Sequence[int], tokens: int, tree: bool) -> set[StepShape]:
        shapes = {StepShape.verifying(row, nodes, tree) for row in heights for nodes in drafts if row <= most}
        return {shape for shape in shapes if shape.tokens <= tokens}

    few = [*(nodes for nodes in HOST_NODES if nodes < host_nodes), host_nodes] if host_nodes else []
    by_tree: dict[bool, list[StepShape]] = {}
    for tree in (False, True):
        shapes = fitting(HOST_ROWS, few, HOST_TOKENS, tree)
        if tree is branches:
            shapes |= fitting(DRAFT_ROWS, [nodes for nodes in sizes.drafts if nodes], LOGIT_ROWS, tree)
        by_tree[tree] = sorted(shapes, key=lambda shape: (shape.tokens, shape.rows))
    return by_tree
