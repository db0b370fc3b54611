"""The device's rows: what it knows of every running request. The host never reads them; steps do.

tokens: int32 [R, max_len + MARGIN], all a row knows; the sampler appends, the next step gathers. ints: int32
[R, INTS], knobs: float32 [R, KNOBS], columns as in Int and Knob. tables: int32 [groups, R, P], each row's pages in slot order.
Row 0 is scratch: it is always done, so that padding may point at it and nothing moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum

import numpy as np
import torch

from ridgeline.core.draft import MAX_DRAFT
from ridgeline.core.errors import EngineFailed
from ridgeline.core.plan import Join, StepPlan
from ridgeline.core.sampling import MAX_STOP_IDS
from ridgeline.core.spec import KvLayout
from ridgeline.engine.packet import Packet
from ridgeline.ops.noise import row_key
from ridgeline.ops.rows import Int, RowState

MARGIN = 2 * MAX_DRAFT + 8
"""Places beyond max_len: a draft may reach over the end, and a row that has ended may still be written by the step in
flight, which drafts again behind what it draws."""


class Knob(IntEnum):
    """Columns of `knobs`."""

    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2
    PRESENCE = 3
    FREQUENCY = 4
    REPETITION = 5


INTS = Int.STOP + MAX_STOP_IDS
KNOBS = len(Knob)


class Rows:
    """`rows` usable rows (1 .. rows) and the scratch row, for requests of at most `max_len` tokens."""

    def __init__(self, layout: KvLayout, rows: int, max_len: int, device: torch.device) -> None:
        self.width = max_len + MARGIN
        self.page_tokens = layout.page_tokens
        pages = -(-self.width // layout.page_tokens)
        self.tokens = torch.zeros(rows + 1, self.width, dtype=torch.int32, device=device)
        self.ints = torch.zeros(rows + 1, INTS, dtype=torch.int32, device=device)
        self.knobs = torch.zeros(rows + 1, KNOBS, dtype=torch.float32, device=device)
        self.tables = torch.zeros(len(layout.groups), rows + 1, pages, dtype=torch.int32, device=device)
        self.ints[0, Int.KNOWN] = 1
        self.ints[0, Int.DONE] = 1
        self.ints[0, Int.LIMIT] = max_len
        self.ints[0, Int.STOP :] = -1
        self.knobs[0, Knob.REPETITION] = 1.0

    @property
    def state(self) -> RowState:
        return RowState(self.tokens, self.ints, self.tables, self.page_tokens)

    @property
    def flat_tokens(self) -> torch.Tensor:
        return self.tokens.view(-1)

    def heat(self, rows: torch.Tensor) -> torch.Tensor:
        """Temperatures float32 [S] of rows int32 [S]."""
        if rows.is_cuda:
            return self.knobs[:, Knob.TEMPERATURE].index_select(0, rows)
        return torch.from_numpy(self.knobs.numpy()[rows.numpy(), Knob.TEMPERATURE])

    def pack(self, plan: StepPlan, packet: Packet) -> list[Join]:
        """Add what `plan` changes to `packet`; returns the joins that count (of several for one row, the last)."""
        joins = list({join.row: join for join in plan.joins}.values())
        if joins:
            packet.add("join_rows", [join.row for join in joins])
            packet.add("join_ints", [_ints(join) for join in joins])
            packet.add("join_knobs", [_knobs(join) for join in joins], np.float32)
            for join in joins:
                packet.add(f"join_{join.row}", self._checked(join))
        if plan.pages:
            where, pages = self._entries(plan.pages)
            packet.add("page_at", where)
            packet.add("pages", pages)
        return joins

    def apply(self, got: Mapping[str, torch.Tensor], joins: Sequence[Join]) -> None:
        """Write what `pack` sent: joins first, then page tables."""
        if joins:
            at = got["join_rows"].long()
            self.ints.index_copy_(0, at, got["join_ints"])
            self.knobs.index_copy_(0, at, got["join_knobs"])
            for join in joins:
                self.tokens[join.row, : len(join.tokens)].copy_(got[f"join_{join.row}"])
        if "pages" in got:
            self.tables.view(-1).index_copy_(0, got["page_at"].long(), got["pages"])

    def pack_drafts(self, plan: StepPlan, packet: Packet) -> None:
        """Add the drafts that the host brings, int32 [3, N]: rows, places behind what these know, tokens. Not on a CPU, whose
        memory they are written to directly."""
        if not self.tokens.is_cuda or max(plan.drafts) < 0:
            return
        rows, n_draft, tokens = (np.frombuffer(one, dtype=np.int32) for one in (plan.rows, plan.n_draft, plan.drafts))
        place = np.arange(len(tokens)) - np.repeat(np.cumsum(n_draft) - n_draft, n_draft)
        packet.add("drafts", np.stack((np.repeat(rows, n_draft), place, tokens))[:, tokens >= 0])

    def write_drafts(self, plan: StepPlan, got: Mapping[str, torch.Tensor]) -> None:
        """Drafts stand after what a row knows, where the gather and the penalties find them, and the device's own already do."""
        if "drafts" in got:
            row, place, token = got["drafts"].unbind(0)
            at = row * self.width + self.ints[:, Int.KNOWN].index_select(0, row) + place
            self.flat_tokens.index_copy_(0, at.long(), token)
        elif not self.tokens.is_cuda and max(plan.drafts) >= 0:
            tokens, known, end = self.tokens.numpy(), self.ints.numpy()[:, Int.KNOWN], 0
            for row_of, count in zip(plan.rows, plan.n_draft, strict=True):
                end += count
                if count and plan.drafts[end - 1] >= 0:
                    tokens[row_of, known[row_of] : known[row_of] + count] = plan.drafts[end - count : end]

    def _checked(self, join: Join) -> np.ndarray:
        if not 0 < join.row < len(self.ints) or len(join.stop_ids) > MAX_STOP_IDS:
            raise EngineFailed(f"A join asks for row {join.row} and {len(join.stop_ids)} stop ids.")
        if not join.computed < len(join.tokens) <= self.width - MARGIN:
            raise EngineFailed(f"A join brings {len(join.tokens)} tokens, {join.computed} of them computed.")
        return np.array(join.tokens, dtype=np.int32)

    def _entries(self, quads: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Flat places in `tables` and their pages; of several entries for one place the last counts."""
        flat = np.array(quads, dtype=np.int64).reshape(-1, 4)
        _, rows, pages = self.tables.shape
        where = (flat[:, 1] * rows + flat[:, 0]) * pages + flat[:, 2]
        last = dict(zip(where.tolist(), flat[:, 3].tolist(), strict=True))
        return np.array(list(last), dtype=np.int32), np.array(list(last.values()), dtype=np.int32)


def _ints(join: Join) -> list[int]:
    """One row of `ints`, in the order of `Int`."""
    stops = (*join.stop_ids, *[-1] * (MAX_STOP_IDS - len(join.stop_ids)))
    moving = (join.computed, join.computed, len(join.tokens), 0)
    sampling = join.sampling
    bounds = (join.limit, join.prompt_len, sampling.min_tokens, sampling.top_k)
    return [*moving, *bounds, *row_key(join.seed, join.choice), *stops]


def _knobs(join: Join) -> list[float]:
    """One row of `knobs`, in the order of `Knob`."""
    one = join.sampling
    penalties = (one.presence_penalty, one.frequency_penalty, one.repetition_penalty)
    return [one.temperature, one.top_p, one.min_p, *penalties]
