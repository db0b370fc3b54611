"""Verification in one kernel: what counts of it is what ops.verify says."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from ridgeline.ops.rows import Drafted, Int, RowState
from ridgeline.ops.rows import last as plainly_last
from ridgeline.ops.verify import verify as plainly
from tests.combinations import crossed

pytest.importorskip("triton")

from ridgeline.ops.triton.verify import last, verify

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
VOCAB, WIDTH = 3, 64


def case(seed: int, nodes: int, tree: bool) -> tuple[RowState, torch.Tensor, torch.Tensor, Drafted]:
    """Rows between their beginning and their end; siblings in a tree differ, so some nodes are out of the vocabulary."""
    chance = random.Random(seed)
    rows = 5
    ints = torch.zeros(rows, Int.STOP + 4, dtype=torch.int32)
    tokens = torch.randint(0, VOCAB, (rows, WIDTH), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))
    parent = torch.zeros(rows, nodes + 1, dtype=torch.int64)
    for row in range(rows):
        known = chance.randint(3, 20)
        ints[row, : Int.STOP] = torch.tensor([known - 1, known - 1, known, int(row == 0), 0, 0, 0, 0, 1, 2, 0, 0])
        ints[row, Int.LIMIT] = known + chance.randint(1, nodes + 3)
        ints[row, Int.PROMPT] = known - chance.randint(0, 2)
        ints[row, Int.MIN_TOKENS] = chance.randint(0, 4)
        ints[row, Int.STOP :] = torch.tensor([chance.choice([-1, 2]), -1, -1, -1])
        for node in range(1, nodes + 1):
            parent[row, node] = chance.randint(0, node - 1) if tree else node - 1
            taken = {
                int(tokens[row, known + index - 1])
                for index in range(1, node)
                if parent[row, index] == parent[row, node]
            }
            free = [index for index in range(VOCAB) if index not in taken] or [100 + node]
            tokens[row, known + node - 1] = chance.choice(free)
    tensor = torch.tensor([3, 1, 4, 0, 0], dtype=torch.int32)
    n_draft = torch.tensor([chance.randint(0, nodes) for _ in tensor], dtype=torch.int32)
    first = (n_draft + 1).cumsum(0).int() - n_draft - 1
    number = torch.Generator().manual_seed(seed + 1)
    drawn = torch.randint(0, VOCAB, (int((n_draft + 1).sum()),), dtype=torch.int32, generator=number)
    state = RowState(tokens, ints, torch.zeros(1, rows, 4, dtype=torch.int32), 16)
    return state, tensor, drawn, Drafted(first, n_draft, nodes + 1, parent.index_select(0, tensor) if tree else None)


@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("nodes", [1, 3, 7, 12])
@pytest.mark.parametrize("seed", crossed(range(8), quick=lambda seed: DEVICE == "cuda" or seed < 3))
def test_verify(seed: int, nodes: int, tree: bool) -> None:
    state, result, drawn, drafted = case(seed, nodes, tree)
    there = replace(state, tokens=state.tokens.to(DEVICE), ints=state.ints.to(DEVICE), tables=state.tables.to(DEVICE))
    there = replace(there, tokens=there.tokens.clone(), ints=there.ints.clone())
    want, want_path = plainly(state, result, drawn, drafted)
    parent = None if drafted.parent is None else drafted.parent.to(DEVICE)
    moved = Drafted(drafted.first.to(DEVICE), drafted.count.to(DEVICE), drafted.columns, parent)
    got, path = verify(there, result.to(DEVICE), drawn.to(DEVICE), moved)
    got, wide = got.cpu(), nodes + 1
    assert torch.equal(there.ints.cpu(), state.ints)
    assert torch.equal(got[:, :2], want[:, :2])
    for index, row in enumerate(result.tolist()):
        count, known = int(want[index, 0]), int(state.ints[row, Int.KNOWN])
        assert torch.equal(got[index, 2 : 2 + count], want[index, 2 : 2 + count])
        if row:
            assert torch.equal(there.tokens[row, :known].cpu(), state.tokens[row, :known])
        if path is not None and want_path is not None:
            node, begin = 1 + int(drafted.count[index]), int(drafted.first[index])
            assert torch.equal(got[index, 2 + wide :][:node], drawn[begin : begin + node])
            assert torch.equal(path[index, :count].cpu(), want_path[index, :count])
            assert torch.equal(got[index, 2 + 2 * wide :][:count].long(), want_path[index, :count])


@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 1536)])
def test_the_state_that_drew_last(tree: bool, rows: int, width: int) -> None:
    """Rows that gained nothing count too: padding draws on."""
    wide, chance = 4, torch.Generator().manual_seed(rows)
    packed = torch.randint(0, wide + 1, (rows, 2 + wide), generator=chance, dtype=torch.int32)
    path = torch.randint(0, wide, (rows, wide), generator=chance) if tree else None
    hidden = torch.randn(rows * wide, width, generator=chance)
    given = packed.to(DEVICE), None if path is None else path.to(DEVICE)
    first = torch.randint(0, (rows - 1) * wide + 1, (rows,), generator=chance, dtype=torch.int32)
    got = last(*given, hidden.to(DEVICE), first.to(DEVICE))
    assert torch.equal(got.cpu(), plainly_last(packed, path, hidden, first))
    for row, count in enumerate(packed[:, 0].tolist()):
        node = max(0, count - 1)
        assert torch.equal(got[row].cpu(), hidden[int(first[row]) + (node if path is None else int(path[row, node]))])
