"""What a plan changes in the rows is the same whether it is written to directly, as on a CPU, or sent in a packet."""

from __future__ import annotations

from array import array

import pytest
import torch

from ridgeline.core.draft import DEVICE
from ridgeline.core.plan import Join, StepPlan
from ridgeline.core.sampling import SamplingParams
from ridgeline.core.spec import KV_FORMATS, KvGroup, KvLayout
from ridgeline.engine.packet import Packet
from ridgeline.engine.row_table import RowTable
from ridgeline.ops.rows import Int

LAYOUT = KvLayout((KvGroup((0,), None, 8), KvGroup((1,), 16, 8)), 4, 64, KV_FORMATS["float32"])
CPU = torch.device("cpu")


def join(row: int, tokens: list[int], computed: int = 0) -> Join:
    sampling = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, presence_penalty=0.5)
    return Join(row, row + 10, tokens, 3, computed, 60, (7, 9), 1 << 40, 1, sampling)


PLANS = (
    StepPlan(
        1, joins=[join(2, list(range(3, 40)), 5), join(1, [5])], pages=array("i", [2, 0, 0, 4, 2, 1, 3, 6, 1, 0, 0, 9])
    ),
    # Of several entries for one place the last counts, of several joins for one row too.
    StepPlan(2, pages=array("i", [2, 0, 1, 4, 2, 0, 1, 8])),
    StepPlan(3, joins=[join(3, [1, 2, 3]), join(3, [4, 4])]),
    # Row 2 brings two nodes, row 1's are the device's own, row 3 has none.
    StepPlan(
        4,
        rows=array("i", [2, 1, 3]),
        n_draft=array("i", [2, 1, 0]),
        drafts=array("i", [50, 51, DEVICE]),
        pages=array("i", [3, 1, 2, 5]),
    ),
)


@pytest.fixture
def both() -> tuple[RowTable, RowTable]:
    direct, sent = RowTable(LAYOUT, 4, 64, 500, CPU), RowTable(LAYOUT, 4, 64, 500, CPU)
    sent._host = None
    return direct, sent


def change(rows: RowTable, plan: StepPlan) -> bool:
    """As Runner does; whether anything was sent."""
    packet = Packet()
    rows.pack_changes(plan, packet)
    if plan.drafts:
        rows.pack_drafts(plan, packet)
    got = packet.send(CPU)
    rows.write_changes(got)
    if plan.drafts:
        rows.write_drafts(plan, got)
    return bool(got)


def content(rows: RowTable) -> torch.Tensor:
    parts = rows.tokens, rows.ints, rows.knobs.view(torch.int32), rows.tables
    return torch.cat([part.flatten() for part in parts])


def test_memory_is_the_same_both_ways(both: tuple[RowTable, RowTable]) -> None:
    direct, sent = both
    for plan in PLANS:
        before = content(sent)
        assert not change(direct, plan) and change(sent, plan)
        assert torch.equal(content(direct), content(sent)) and not torch.equal(before, content(sent))


def test_what_is_written_stands_where_steps_read_it(both: tuple[RowTable, RowTable]) -> None:
    for rows in both:
        for plan in PLANS:
            change(rows, plan)
        assert rows.tokens[2, :37].tolist() == list(range(3, 40)) and rows.tokens[2, 37:40].tolist() == [50, 51, 0]
        assert rows.tokens[1, :2].tolist() == [5, 0] and rows.tokens[3, :2].tolist() == [4, 4]
        assert rows.ints[2, : Int.KNOWN + 1].tolist() == [5, 5, 37] and rows.ints[3, Int.KNOWN] == 2
        assert rows.temperature[1:4].tolist() == pytest.approx([0.7] * 3) and rows.temperature[4] == 0
        assert rows.tables[0, 2, :3].tolist() == [4, 8, 0] and rows.tables[1, 2, 3] == 6
        assert rows.tables[0, 1, 0] == 9 and rows.tables[1, 3, 2] == 5 and int(rows.tables.count_nonzero()) == 5


def test_dropped_slots_shorten_a_row_and_not_the_one_that_joins_in_its_place(both: tuple[RowTable, RowTable]) -> None:
    for rows in both:
        change(rows, StepPlan(1, joins=[join(2, list(range(3, 40)), 20), join(3, list(range(9)), 8)]))
        change(rows, StepPlan(2, joins=[join(3, [1, 2, 3], 2)], drops=array("i", [2, 8, 3, 4, 2, 4])))
        assert rows.ints[2, : Int.KNOWN + 1].tolist() == [20, 8, 37]
        assert rows.ints[3, : Int.KNOWN + 1].tolist() == [2, 2, 3]
