"""The padded shapes that have CUDA graphs: few, so that capture takes seconds, and dense, so that padding costs little."""

from __future__ import annotations

from itertools import chain, product

from ridgeline.core.spec import NUMBER_FORMATS, ModelSpec
from ridgeline.engine.shape import Sizes, StepShape
from ridgeline.speculation.build import LOGIT_ROWS
from ridgeline.speculation.state import DraftLimits

MIXED_ROWS = 32
"""Rows of graphs of small mixed steps. Every unused row costs attention an idle program per layer and head."""
MIXED_TOKENS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Query tokens of small mixed steps that have a graph."""
CROWDED_TOKENS = (256, 384, 512, 640, 768, 896, 1024, 1152, 1280, 1408, 1536, 1792, 2048, 3072, 4096, 6144)
"""Query tokens of mixed steps with any number of rows that have a graph, besides the limit of a step."""
CROWDED_WORK = 1 << 37
"""Limit of (query tokens x elements of a feed-forward matrix) for graphs of mixed steps, for 16-bit weights. Above it the device
takes longer than Python needs to launch the step (20 to 40 ms for 32 layers on a quiet host, up to 57 on a busy one). An 8B model
reaches it with 2,340 tokens, in fp8 with 4,680."""
DRAFT_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256)
"""Rows of steps with device drafts that have a graph."""
HOST_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Rows of steps with host drafts that have a graph, besides a row for padding: rows seldom have as many nodes as one another."""
HOST_TOKENS = (4, 8, 16, 32, 64, 128, 256)
"""Query tokens of these graphs, in any distribution over the rows. Chains and trees need separate graphs, so sizes are few."""


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
    crowded = (span for span in (*CROWDED_TOKENS, tokens) if CROWDED_TOKENS[0] <= span <= min(tokens, most))
    shapes = {StepShape.mixed(few, span) for span in MIXED_TOKENS if span <= tokens}
    shapes |= {StepShape.mixed(min(rows, span) + 1, span) for span in crowded}
    return sorted(shapes, key=lambda shape: (shape.tokens, shape.rows))


def draft_shapes(sizes: Sizes, branches: bool) -> dict[bool, list[StepShape]]:
    """Shapes of steps with drafts that have a graph, by whether drafts are trees, the fewest query tokens first. The largest has
    more rows than a step, for padding.

    Args:
        branches: the device drafts trees.
    """
    rows, width = sizes.rows, 1 + sizes.host_drafts
    device_rows = [row for row in DRAFT_ROWS if row <= next((row for row in DRAFT_ROWS if row > rows), rows)]
    host_rows = {min(row, rows) + 1 for row in HOST_ROWS} if width > 1 else ()
    by_tree: dict[bool, list[StepShape]] = {}
    for tree in (False, True):
        shapes = {
            StepShape(row, row, tokens, width, width, tokens - row, tree)
            for row, tokens in product(host_rows, HOST_TOKENS)
            if row < tokens < 2 * row * width  # a larger one would be padding for the most part
        }
        if tree is branches:
            drafting = (
                StepShape.verifying(row, nodes, tree) for row, nodes in product(device_rows, sizes.drafts) if nodes
            )
            shapes |= {shape for shape in drafting if shape.tokens <= LOGIT_ROWS}
        by_tree[tree] = sorted(shapes, key=lambda shape: (shape.tokens, shape.rows))
    return by_tree


def draft_limits(sizes: Sizes, spec: ModelSpec) -> DraftLimits:
    """Sizes up to which steps have drafts."""
    mixed = mixed_shapes(sizes, spec) if sizes.graphs else []
    return DraftLimits(LOGIT_ROWS, HOST_TOKENS[-1], mixed[-1].tokens) if mixed else DraftLimits(LOGIT_ROWS)
