"""Which padded shapes have CUDA graphs: few enough to capture in seconds, and close enough that padding costs little."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from ridgeline.core.spec import NUMBER_FORMATS, ModelSpec
from ridgeline.engine.shape import Sizes, StepShape
from ridgeline.speculation.build import LOGIT_ROWS

MIXED_ROWS = 32
"""Rows that graphs of small mixed steps hold: every row costs their attention an idle program per layer and head."""
MIXED_TOKENS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Query tokens of those that have a graph."""
CROWDED_TOKENS = (256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 3072, 4096, 6144)
"""Query tokens of mixed steps of any number of rows that have one, beside the most that a step takes."""
CROWDED_WORK = 1 << 36
"""Query tokens times numbers of a feed-forward matrix above which they have none, in 16 bits: the device takes longer than Python
needs to launch such a step, which is 20 ms for 32 layers and at times 40. An 8B gets there with 1,170 tokens, in fp8 with 2,340."""
DRAFT_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256)
"""Rows of steps with drafts that have a graph."""
HOST_ROWS, HOST_NODES, HOST_TOKENS = (1, 2, 4, 8, 16, 32), (1, 3, 8), 256
"""Rows, nodes and query tokens of those whose drafts the host makes, beside its largest: chains and trees, so fewer of each."""


def buckets(rows: int) -> list[int]:
    """Numbers of rows that decode in one graph, up to `rows`: fine where a row more costs most, relative to the step."""
    sizes = chain((1, 2, 4), range(8, 64, 8), range(64, 256, 16), range(256, rows + 32, 32))
    fitting = [size for size in sizes if size < rows]
    return [*fitting, rows]


def mixed_shapes(sizes: Sizes, spec: ModelSpec) -> list[StepShape]:
    """Mixed steps that have a graph, in the order in which they are looked at. Each has one row more than a step may have, so that
    its padding tokens have a row of their own."""
    rows, tokens, form = sizes.rows, sizes.step_tokens, NUMBER_FORMATS.get(spec.quantization)
    work = CROWDED_WORK * (2 if form is not None and form.inputs_8bit else 1)
    few, most = min(rows, MIXED_ROWS) + 1, work // (spec.d_model * max(layer.d_ff for layer in spec.layers))
    shapes = {StepShape.mixed(few, span) for span in MIXED_TOKENS if span <= tokens}
    for span in (*CROWDED_TOKENS, tokens):
        if CROWDED_TOKENS[0] <= span <= min(tokens, most):
            shapes.add(StepShape.mixed(min(rows, span) + 1, span))
    return sorted(shapes, key=lambda shape: (shape.tokens, shape.rows))


def draft_shapes(sizes: Sizes, branches: bool) -> dict[bool, list[StepShape]]:
    """Steps with drafts that have a graph, by whether drafts are trees, those with the fewest query tokens first. branches: what
    the device drafts are trees. The largest has more rows than ever run, for padding."""
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
