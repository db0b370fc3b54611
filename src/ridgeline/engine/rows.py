"""The device's rows: what it knows of every running request. The host never reads them; steps do.

tokens: int32 [R, max_len + MARGIN], all a row knows; the sampler appends, the next step gathers. ints: int32
[R, INTS], knobs: float32 [R, KNOBS], columns as in ops.rows.Int and Knob. tables: int32 [groups, R, P], each row's pages in
slot order.
Row 0 is scratch: it is always done, so that padding may point at it and nothing moves. All lie in one array, so that what a plan
changes, wherever it lies, is one scatter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch

from ridgeline.core.draft import MAX_DRAFT
from ridgeline.core.errors import EngineFailed
from ridgeline.core.plan import Join, StepPlan
from ridgeline.core.sampling import MAX_STOP_IDS
from ridgeline.core.spec import KvLayout
from ridgeline.engine.packet import Packet
from ridgeline.ops.noise import row_key
from ridgeline.ops.rows import Int, Knob, RowState

MARGIN = 2 * MAX_DRAFT + 8
"""Places beyond max_len: a draft may reach over the end, and a row that has ended may still be written by the step in
flight, which drafts again behind what it draws."""


INTS = Int.STOP + MAX_STOP_IDS
KNOBS = len(Knob)
_ALIGN = 64
"""Items to whose multiples tokens, ints, knobs and tables are aligned, for kernels that read 16 bytes at a time."""


class Rows:
    """`rows` usable rows (1 .. rows) and the scratch row, for requests of at most `max_len` tokens."""

    def __init__(self, layout: KvLayout, rows: int, max_len: int, device: torch.device) -> None:
        self.width = max_len + MARGIN
        self.page_tokens = layout.page_tokens
        pages = -(-self.width // layout.page_tokens)
        shapes = ((rows + 1, self.width), (rows + 1, INTS), (rows + 1, KNOBS), (len(layout.groups), rows + 1, pages))
        sizes = [-(-math.prod(shape) // _ALIGN) * _ALIGN for shape in shapes]
        self._starts = (0, *accumulate(sizes[:-1]))
        """Where tokens, ints, knobs and tables begin in memory."""
        self._memory = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._host = self._memory.numpy() if device.type == "cpu" else None
        """The same memory, where it is the host's: written to directly, without a packet."""
        tokens, ints, knobs, tables = (
            part[: math.prod(shape)].view(shape) for part, shape in zip(self._memory.split(sizes), shapes, strict=True)
        )
        self.tokens, self.ints, self.knobs, self.tables = tokens, ints, knobs.view(torch.float32), tables
        self.ints[0, Int.KNOWN] = 1
        self.ints[0, Int.DONE] = 1
        self.ints[0, Int.LIMIT] = max_len
        self.ints[0, Int.STOP :] = -1
        self.knobs[0, Knob.TOP_P] = self.knobs[0, Knob.REPETITION] = 1.0

    @property
    def state(self) -> RowState:
        return RowState(self.tokens, self.ints, self.tables, self.page_tokens)

    @property
    def flat_tokens(self) -> torch.Tensor:
        return self.tokens.view(-1)

    @property
    def heat(self) -> torch.Tensor:
        """Temperatures of all rows, float32 [R]."""
        return self.knobs[:, Knob.TEMPERATURE]

    def pack(self, plan: StepPlan, packet: Packet) -> None:
        """Add what `plan` changes to `packet`: items, and where in memory they go. On a CPU it is written."""
        runs, entries = dict(self._runs(plan.joins)), self._entries(plan.pages)
        if self._host is not None:
            for place, run in runs.items():
                self._host[place : place + len(run)] = run
            for place, page in entries.items():
                self._host[place] = page
        elif runs or entries:
            where = [np.arange(place, place + len(run)) for place, run in runs.items()]
            packet.add("where", np.concatenate([*where, np.array(list(entries), np.int64)]), np.int64)
            packet.add("items", np.concatenate([*runs.values(), np.array(list(entries.values()), np.int32)]))

    def apply(self, got: Mapping[str, torch.Tensor]) -> None:
        """Write what `pack` sent."""
        if "where" in got:
            self._memory.index_copy_(0, got["where"], got["items"])

    def pack_drafts(self, plan: StepPlan, packet: Packet) -> None:
        """As `pack`, the drafts that the host brings, int32 [3, N]: rows, places behind what these know, tokens."""
        if max(plan.drafts) < 0:
            return
        if self._host is None:
            rows, n_draft, tokens = (
                np.frombuffer(one, dtype=np.int32) for one in (plan.rows, plan.n_draft, plan.drafts)
            )
            place = np.arange(len(tokens)) - np.repeat(np.cumsum(n_draft) - n_draft, n_draft)
            packet.add("drafts", np.stack((np.repeat(rows, n_draft), place, tokens))[:, tokens >= 0])
            return
        end = 0
        for row, count in zip(plan.rows, plan.n_draft, strict=True):
            end += count
            if count and plan.drafts[end - 1] >= 0:
                at = row * self.width + int(self._host[self._starts[1] + row * INTS + Int.KNOWN])
                self._host[at : at + count] = plan.drafts[end - count : end]

    def write_drafts(self, plan: StepPlan, got: Mapping[str, torch.Tensor]) -> None:
        """Drafts stand after what a row knows, where the gather and the penalties find them, and the device's own already do."""
        if "drafts" in got:
            row, place, token = got["drafts"].unbind(0)
            at = row * self.width + self.ints[:, Int.KNOWN].index_select(0, row) + place
            self.flat_tokens.index_copy_(0, at.long(), token)

    def _runs(self, joins: Sequence[Join]) -> Iterator[tuple[int, np.ndarray]]:
        """Where in memory the parts of each row begin, and what they are; of several joins for one row the last counts."""
        tokens, ints, knobs, _ = self._starts
        for row, join in {join.row: join for join in joins}.items():
            yield tokens + row * self.width, self._checked(join)
            yield ints + row * INTS, np.array(_ints(join), dtype=np.int32)
            yield knobs + row * KNOBS, np.array(_knobs(join), dtype=np.float32).view(np.int32)

    def _checked(self, join: Join) -> np.ndarray:
        if not 0 < join.row < len(self.ints) or len(join.stop_ids) > MAX_STOP_IDS:
            raise EngineFailed(f"A new request has row {join.row} and {len(join.stop_ids)} stop ids: out of range.")
        if not join.computed < len(join.tokens) <= self.width - MARGIN:
            raise EngineFailed(f"A new request has {len(join.tokens)} tokens, {join.computed} computed: out of range.")
        return np.array(join.tokens, dtype=np.int32)

    def _entries(self, quads: Sequence[int]) -> dict[int, int]:
        """Where in memory entries of `tables` lie, and their pages; of several entries for one place the last counts."""
        (_, rows, pages), start, each = self.tables.shape, self._starts[3], [iter(quads)] * 4
        return {start + (group * rows + row) * pages + at: page for row, group, at, page in zip(*each, strict=True)}


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
