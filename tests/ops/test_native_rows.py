"""The row operations of the compiled library equal those in plain PyTorch, bit for bit, in what they return and in the rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from ridgeline.ops import native_cpu, rows
from ridgeline.ops.native.files import library_path
from ridgeline.ops.rows import Drafted, Int, Knob, RowState, Spread
from ridgeline.ops.sample import Limits, sample
from ridgeline.ops.table import Ops
from ridgeline.ops.verify import verify

ROWS, WIDTH, STOPS, VOCAB = 6, 64, 4, 3
GROUPS, PAGE_TOKENS = 3, 4


@pytest.fixture(scope="module")
def native(folder: Path) -> Ops:
    library, what = native_cpu.load(folder)
    assert library is not None and library_path(folder).exists(), what
    return library


@some.composite
def states(draw: Callable[..., int]) -> RowState:
    """Rows anywhere between their beginning and their end, of a vocabulary so small that drafts are often right and stops
    come often; row 0 as scratch."""
    number = torch.Generator().manual_seed(draw(some.integers(0, 1 << 30)))

    def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=number, dtype=torch.int32)

    ints = numbers(-1, VOCAB, ROWS, Int.STOP + STOPS)
    known = numbers(3, 30, ROWS)
    ints[:, Int.KNOWN], ints[:, Int.POSITION] = known, known - 1
    ints[:, Int.LENGTH] = known - 1 - numbers(0, 2, ROWS)
    ints[:, Int.DONE] = numbers(0, 4, ROWS) == 0
    ints[:, Int.LIMIT] = known + numbers(1, 12, ROWS)
    ints[:, Int.PROMPT] = known - numbers(0, 3, ROWS)
    ints[:, Int.MIN_TOKENS] = numbers(0, 6, ROWS)
    if draw(some.booleans()):
        ints[:, Int.STOP :] = -1
    ints[0, Int.DONE] = 1
    pages = numbers(1, 1000, GROUPS, ROWS, WIDTH // PAGE_TOKENS)
    return RowState(numbers(0, VOCAB, ROWS, WIDTH), ints, pages, PAGE_TOKENS)


def copy(state: RowState) -> RowState:
    return RowState(state.tokens.clone(), state.ints.clone(), state.tables, state.page_tokens)


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype is want.dtype and got.shape == want.shape
    assert torch.equal(got, want), f"{got}\n{want}"


def moved_alike(state: RowState, other: RowState) -> None:
    """Row 0 may have been written more than once; which of its tokens stays is nobody's business."""
    same(state.tokens[1:], other.tokens[1:])
    same(state.ints, other.ints)


# Some rows in any order, row 0 as often as it likes.
chosen = some.permutations(range(1, ROWS)).flatmap(
    lambda order: some.tuples(some.integers(1, ROWS - 1), some.integers(0, 3)).map(
        lambda sizes: [*order[: sizes[0]], *[0] * sizes[1]]
    )
)
often = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)


@often
@given(state=states(), chosen_rows=chosen, data=some.data())
def test_gather(native: Ops, state: RowState, chosen_rows: list[int], data: some.DataObject) -> None:
    """One token of each row, or any number with padding of the last row behind them."""
    spread = None
    if data.draw(some.booleans()):
        counts = data.draw(some.lists(some.integers(0, 5), min_size=len(chosen_rows), max_size=len(chosen_rows)))
        row_of = [row for row, n in enumerate(counts) for _ in range(n)] + [len(chosen_rows) - 1] * data.draw(
            some.integers(0, 2)
        )
        place = [at for n in counts for at in range(n)]
        place += [0] * (len(row_of) - len(place))
        tensors = [torch.tensor(numbers, dtype=torch.int32) for numbers in (counts, row_of, place)]
        spread = Spread(*tensors, -tensors[2] // 2 if data.draw(some.booleans()) else None)
    given_rows = torch.tensor(chosen_rows, dtype=torch.int32)
    got, want = native.sampler.gather(state, given_rows, spread), rows.gather(state, given_rows, spread)
    for name in ("tokens", "position", "slots", "length"):
        same(getattr(got, name), getattr(want, name))


@often
@given(
    numbers=some.randoms(use_true_random=False),
    count=some.integers(1, 5),
    wide=some.integers(1, 9),
    tree=some.booleans(),
)
def test_the_state_that_drew_last(native: Ops, numbers: Random, count: int, wide: int, tree: bool) -> None:
    """Rows that gained nothing count too; what lies behind the gained ones is not read."""
    chance = torch.Generator().manual_seed(numbers.randrange(1 << 30))
    packed = torch.randint(0, wide + 1, (count, 2 + wide), generator=chance, dtype=torch.int32)
    path = torch.randint(0, wide, (count, wide), generator=chance) if tree else None
    first = torch.randint(0, 9, (count,), generator=chance, dtype=torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        hidden = torch.randn(9 + wide, 48, generator=chance).to(dtype)
        got = native.sampler.last(packed, path, hidden, first)
        same(got, rows.last(packed, path, hidden, first))
        node = max(0, int(packed[-1, 0]) - 1)
        same(got[-1], hidden[int(first[-1]) + (node if path is None else int(path[-1, node]))])


@often
@given(state=states(), chosen_rows=chosen, data=some.data())
def test_advance(native: Ops, state: RowState, chosen_rows: list[int], data: some.DataObject) -> None:
    said = data.draw(some.lists(some.integers(0, VOCAB - 1), min_size=len(chosen_rows), max_size=len(chosen_rows)))
    drawn, given_rows, other = (
        torch.tensor(said, dtype=torch.int32),
        torch.tensor(chosen_rows, dtype=torch.int32),
        copy(state),
    )
    same(native.sampler.advance(state, given_rows, drawn), rows.advance(other, given_rows, drawn))
    moved_alike(state, other)


@some.composite
def trees(draw: Callable[..., int], count: int, wide: int) -> torch.Tensor:
    """Each node hangs on one before it."""
    parents = [[0, *(draw(some.integers(0, node)) for node in range(wide - 1))] for _ in range(count)]
    return torch.tensor(parents, dtype=torch.int64)


@often
@given(state=states(), chosen_rows=chosen, wide=some.integers(2, 12), data=some.data())
def test_verify(native: Ops, state: RowState, chosen_rows: list[int], wide: int, data: some.DataObject) -> None:
    """Chains and trees, drafts that are right by chance or on purpose, rows with fewer of them than others. In trees siblings may
    be equal here, which the rule does not ask for; even then the path is the reference's, beyond the kept nodes too."""
    count = len(chosen_rows)
    parent = data.draw(trees(count, wide)) if data.draw(some.booleans()) else None
    n_draft = torch.tensor(
        data.draw(some.lists(some.integers(0, wide - 1), min_size=count, max_size=count)), dtype=torch.int32
    )
    numbers = torch.Generator().manual_seed(data.draw(some.integers(0, 1 << 30)))
    nodes = 1 + n_draft
    drawn = torch.randint(0, VOCAB, (int(nodes.sum()),), generator=numbers, dtype=torch.int32)
    if data.draw(some.booleans()):
        drawn[:] = drawn[0]
        for row in chosen_rows:
            known = int(state.ints[row, Int.KNOWN])
            state.tokens[row, known : known + wide] = drawn[0]
    drafted = Drafted((nodes.cumsum(0) - nodes).int(), n_draft, wide, parent)
    given_rows, other = torch.tensor(chosen_rows, dtype=torch.int32), copy(state)
    got, path = native.sampler.verify(state, given_rows, drawn, drafted)
    want, want_path = verify(other, given_rows, drawn, drafted)
    same(got, want)
    assert (path is None) == (want_path is None)
    if path is not None and want_path is not None:
        same(path, want_path)
    moved_alike(state, other)


@pytest.mark.parametrize("tree", [False, True])
def test_all_drafts_are_kept_up_to_the_stop(native: Ops, tree: bool) -> None:
    """A case by hand: drafts 5 6 7 8 are all right, 7 is the row's stop."""
    ints = torch.zeros(2, Int.STOP + 1, dtype=torch.int32)
    ints[1] = torch.tensor([9, 9, 10, 0, 40, 10, 0, 0, 0, 0, 0, 0, 7])
    state = RowState(torch.zeros(2, 20, dtype=torch.int32), ints, torch.zeros(1, 2, 5, dtype=torch.int32), 4)
    state.tokens[1, 10:14] = torch.tensor([5, 6, 7, 8])
    drawn, first, four = (torch.tensor(given, dtype=torch.int32) for given in ([3, 5, 6, 7, 8, 9], [1], [4]))
    parent = torch.tensor([[0, 0, 1, 2, 3]]) if tree else None
    packed, path = native.sampler.verify(state, first, drawn, Drafted(first, four, 5, parent))
    assert packed[0, :5].tolist() == [3, 1, 5, 6, 7]
    assert ints[1, :4].tolist() == [12, 12, 13, 1]
    assert path is None or path.tolist() == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_nodes_lie_as_a_chain_would(native: Ops, dtype: torch.dtype) -> None:
    """Two groups, paths with gaps across pages, a chain's own, none: what stood at the kept nodes before stands in order, and
    nothing else has moved."""
    paths, gained = [[0, 2, 5, 7], [0, 1, 2, 3], [0, 4, 0, 0], [0, 0, 0, 0]], [4, 4, 2, 0]
    roots, chosen_rows = [6, 3, 11, 9], [3, 1, 4, 2]
    ints = torch.zeros(5, Int.STOP + 1, dtype=torch.int32)
    for row, root, count in zip(chosen_rows, roots, gained, strict=True):
        ints[row, Int.LENGTH] = root + count
    tables = torch.randperm(40, generator=torch.Generator().manual_seed(1)).int().view(2, 5, 4)
    run = torch.randn(60, 40, 6, PAGE_TOKENS, 8).to(dtype)[:, :, 1:4].transpose(0, 1)[:, 7]  # strides of its own
    state, before, wanted = (
        RowState(torch.zeros(5, 20, dtype=torch.int32), ints, tables, PAGE_TOKENS),
        run.clone(),
        run.clone(),
    )
    packed = torch.tensor([[count, 0] for count in gained], dtype=torch.int32)
    for row, root, path, count in zip(chosen_rows, roots, paths, gained, strict=True):
        for depth in range(1, count):
            (page, place), (old, old_place) = (divmod(root + at, PAGE_TOKENS) for at in (depth, path[depth]))
            wanted[tables[1, row, page], :, place] = before[tables[1, row, old], :, old_place]
    assert not torch.equal(wanted, before)
    plain = run.clone()
    given = (state, torch.tensor(chosen_rows, dtype=torch.int32), packed, torch.tensor(paths))
    native.sampler.keep(*given, [[], [run]], 3)
    rows.keep(*given, [[], [plain]], 3)
    same(run, wanted)
    # Page 0 is the scratch page, where nodes that stay are moved.
    same(plain[1:], wanted[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("deep", [False, True])
def test_draws_are_those_of_sample(native: Ops, dtype: torch.dtype, deep: bool) -> None:
    """Rows with one, two and three nodes, of any temperature and with any limits side by side."""
    number = torch.Generator().manual_seed(3)
    ints = torch.randint(1, 50, (ROWS, Int.STOP + STOPS), generator=number, dtype=torch.int32)
    tokens = torch.zeros(ROWS, WIDTH, dtype=torch.int32)
    state = RowState(tokens, ints, torch.zeros(GROUPS, ROWS, 1, dtype=torch.int32), PAGE_TOKENS)
    knobs = torch.zeros(ROWS, len(Knob) + 1)
    knobs[:, Knob.TEMPERATURE] = torch.tensor([0.0, 0.8, 1.0, 0.0, 2.0, 0.5])
    knobs[:, Knob.TOP_P] = torch.tensor([0.0, 0.9, 1.0, 0.5, 1.0, 0.3])
    knobs[:, Knob.MIN_P] = torch.tensor([0.0, 0.0, 0.0, 0.5, 0.1, 0.0])
    ints[:, Int.TOP_K] = torch.tensor([0, 30, 0, 5, -1, 3])
    each = torch.tensor([5, 1, 1, 1, 3, 4, 4, 2], dtype=torch.int32)
    logits = torch.randn(len(each), 1000, generator=number).to(dtype)
    key, place = ints[each, Int.KEY : Int.KEY + 2], ints[each, Int.KNOWN]
    temperature, top_p, min_p = (knobs[each, knob] for knob in (Knob.TEMPERATURE, Knob.TOP_P, Knob.MIN_P))
    limits = Limits(ints[each, Int.TOP_K], top_p, min_p)
    depth = torch.tensor([0, 0, 1, 1, 0, 0, 1, 0], dtype=torch.int32) if deep else None
    place = place if depth is None else place + depth
    got = native.sampler.draw(state, knobs, each, logits, depth)
    same(got, sample(logits, temperature, key, place, limits=limits))
    assert not torch.equal(got, sample(logits, temperature, key, place))
