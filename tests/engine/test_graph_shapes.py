"""Which steps have CUDA graphs, padded to what."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ridgeline.engine import graph_shapes
from ridgeline.engine.graph_shapes import buckets, draft_limits, draft_shapes, mixed_shapes
from ridgeline.engine.graphs import GraphExecutor
from ridgeline.engine.shape import Sizes, StepShape
from ridgeline.ops.capture import Uncaptured
from ridgeline.ops.step import SHORT
from ridgeline.speculation.build import LOGIT_ROWS
from ridgeline.speculation.state import DraftLimits
from tests.engine.runners import MAX_LEN, PAGE, make_runner, make_step, pair
from tests.engine.test_runner_plans import sizes


def test_no_graph_is_captured_twice_where_all_contexts_are_short() -> None:
    model = pair("llama-gqa")[1]
    room = make_step(model).longest - MAX_LEN  # for drafts, behind the longest context

    def captured(longest: int) -> int:
        totals: list[int] = []
        step = make_step(model, make_runner(model, Sizes(6, 64, longest - room, 200)))
        assert step.longest == longest
        with torch.inference_mode():
            GraphExecutor(step, sizes(6, 16), Uncaptured).capture(lambda stage, done, total: totals.append(total))
        return totals[-1]

    assert captured(SHORT + PAGE) == captured(SHORT) + 2, "one and two rows have another for longer ones"


def test_which_steps_have_a_graph() -> None:
    graphs = GraphExecutor(make_step(pair("llama-gqa")[1]), sizes(6, 64), Uncaptured)

    def padded(tokens: int, rows: int, width: int = 1) -> StepShape | None:
        return graphs.padded(StepShape(rows, rows, tokens, tokens, width), fused_sampling=True)

    assert graphs.padded(StepShape.decoding(5), fused_sampling=False) == StepShape.decoding(6)
    assert padded(17, 6) == StepShape.mixed(7, 32)
    assert padded(64, 1) == StepShape.mixed(7, 64)
    assert padded(65, 1) is None
    assert padded(20, 7) is None, "no row would be left for padding"
    assert padded(20, 4, width=3) is None


def test_which_mixed_steps_of_many_rows_have_a_graph() -> None:
    spec = pair("llama-gqa")[1].spec

    def shapes(tokens: int, quantization: str = "", most: int = 10_000) -> list[StepShape]:
        """most: query tokens whose feed-forward products are as much work as a graph may have."""
        wide = tuple(replace(layer, d_ff=graph_shapes.CROWDED_WORK // (most * 1024)) for layer in spec.layers)
        of = replace(spec, d_model=1024, layers=wide, quantization=quantization)
        return [shape for shape in mixed_shapes(sizes(64, tokens), of) if shape.tokens > 128]

    assert shapes(255) == [StepShape.mixed(33, 192)], "few tokens"
    sizes_of = [(shape.tokens, shape.rows) for shape in shapes(400)]
    assert sizes_of == [(192, 33), (256, 33), (256, 65), (384, 33), (384, 65), (400, 65)]
    assert [shape.tokens for shape in shapes(400, most=300) if shape.rows == 65] == [256], (
        "the device takes longer than Python"
    )
    found_of = [[shape.tokens for shape in shapes(400, name, most=300) if shape.rows == 65] for name in ("int8", "fp8")]
    assert found_of == [[256], [256, 384, 400]], "with inputs of 8 bits it takes half the time"


def test_which_steps_with_drafts_have_a_graph() -> None:
    graphs = GraphExecutor(make_step(pair("llama-gqa")[1]), sizes(256, 64, (0, 1, 3)), Uncaptured)

    def padded(tokens: int, rows: int, width: int, tree: bool = False, fused_sampling: bool = True) -> StepShape | None:
        return graphs.padded(StepShape(rows, rows, tokens, width, width, tokens - rows, tree), fused_sampling)

    assert padded(8, 4, 2) == StepShape.verifying(4, 1, False)
    assert padded(7, 4, 2) == StepShape.verifying(8, 1, False), "a row is left for padding"
    assert padded(7, 3, 3) == StepShape.verifying(4, 3, False)
    assert padded(256, 128, 2) == StepShape.verifying(128, 1, False)
    assert padded(255, 128, 2) == StepShape.verifying(160, 1, False)
    assert padded(70, 66, 2) == StepShape.verifying(96, 1, False), "a step launched by Python takes longer"
    assert (
        padded(8, 4, 2, tree=True) is None and padded(5, 1, 5) is None and padded(8, 4, 2, fused_sampling=False) is None
    )
    assert graphs.padded(StepShape(4, 3, 8, 3, 2, 3), fused_sampling=True) is None, "a row reads a part of its prompt"


def test_drafts_of_the_host_are_chains_and_trees() -> None:
    assert draft_shapes(sizes(64, 64), False) == {False: [], True: []}
    chosen = draft_shapes(sizes(64, 64, (2,), 8), True)
    for tree in (False, True):
        assert (StepShape.verifying(64, 2, tree) in chosen[tree]) is tree
        assert [shape.tokens for shape in chosen[tree]] == sorted(shape.tokens for shape in chosen[tree])


@pytest.mark.parametrize("most", [8, 11, 30])
@pytest.mark.parametrize("tree", [False, True])
def test_every_step_within_the_limits_of_host_drafts_has_a_graph(most: int, tree: bool) -> None:
    """However the nodes are distributed over the rows."""
    model, held = pair("llama-gqa")[1], sizes(200, 64, (), most)
    graphs, tokens = GraphExecutor(make_step(model), held, Uncaptured), draft_limits(held, model.spec).host_tokens

    def padded(drafts: list[int]) -> StepShape | None:
        rows, width = len(drafts), 1 + max(drafts)
        return graphs.padded(StepShape(rows, rows, rows + sum(drafts), width, width, sum(drafts), tree), True)

    drafted = 0
    for rows in range(1, 200):
        nodes = min(most, tokens // rows - 1)
        for drafts in ([nodes] * rows, [nodes] + [0] * (rows - 1), [number % (1 + nodes) for number in range(rows)]):
            if not any(drafts):
                continue
            shape = padded(drafts)
            assert shape is not None, drafts
            assert shape.tokens < 4 * (rows + sum(drafts)), "and not one far too large"
            drafted += 1
    assert drafted > 300
    assert padded([1] * 130) is None and padded([most] * 100) is None


def test_devices_without_graphs_limit_drafts_by_the_memory_of_logits_alone() -> None:
    spec = pair("llama-gqa")[1].spec
    eager = draft_limits(replace(sizes(64, 64, (), 8), graphs=False), spec)
    assert eager == DraftLimits(LOGIT_ROWS) and eager.host_tokens > LOGIT_ROWS and not eager.prompt_tokens
    assert draft_limits(sizes(64, 64, (), 8), spec) == DraftLimits(LOGIT_ROWS, 256, 64)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 100, 250, 512])
def test_buckets_reach_every_size(rows: int) -> None:
    sizes = buckets(rows)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == rows and sizes[0] == 1
