"""The row table: the state of each running request in a row, with a device part and a host part.

Only steps read and advance the device part. tokens: int32 [R, max_len + MARGIN], the known tokens of each row; the sampler appends
to them and the next step gathers them. ints: int32 [R, INTS] and knobs: float32 [R, KNOBS], columns as in ops.rows.Int and Knob.
tables: int32 [groups, R, P], the pages of each row in slot order. All are parts of one array, so that one scatter applies all
changes of a plan. Row 0 is the scratch row. It has always ended, so padding can point to it without effect.

The host part records which request holds a row, and has columns for questions about all rows of a step.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, compress

import numpy as np
import torch

from ridgeline.core.draft import MAX_DRAFT
from ridgeline.core.errors import ConfigError, EngineFailed
from ridgeline.core.plan import Join, StepPlan
from ridgeline.core.sampling import MAX_STOP_IDS
from ridgeline.core.spec import KvLayout
from ridgeline.decoding.masks import pack_allowed, read_mask
from ridgeline.engine.packet import Packet
from ridgeline.ops.noise import row_key
from ridgeline.ops.rows import Int, Knob, RowState

MARGIN = 2 * MAX_DRAFT + 8
"""Places beyond max_len. A draft may extend beyond the end, and a step in flight may still write a token and a draft to a row that
has ended."""


INTS = Int.STOP + MAX_STOP_IDS
KNOBS = len(Knob)
_ALIGN = 64
"""Alignment of tokens, ints, knobs and tables, in items, for kernels that read 16 bytes at a time."""


@dataclass(frozen=True, slots=True)
class RowRequest:
    """The request that holds a row. allowed: the packed mask of its allowed_token_ids, int32 words, or None."""

    join: Join
    allowed: np.ndarray | None


class RowTable:
    """`rows` usable rows (1 .. rows) and the scratch row, for requests of at most `max_len` tokens over `vocab` tokens.

    Host columns, by row: generation [rows + 2], 0 for a free row, -1 in the first and the last element, to which numbers out of
    range are clipped; greedy [rows + 1]; fused_sampling [rows + 1], the request needs only temperature, top_k, top_p and min_p;
    adapted [rows + 1], it has an adapter.
    """

    def __init__(self, layout: KvLayout, rows: int, max_len: int, vocab: int, device: torch.device) -> None:
        """Raises ConfigError if 31 bits cannot address the tokens."""
        self.width = max_len + MARGIN
        self.page_tokens = layout.page_tokens
        pages = -(-self.width // layout.page_tokens)
        shapes = ((rows + 1, self.width), (rows + 1, INTS), (rows + 1, KNOBS), (len(layout.groups), rows + 1, pages))
        sizes = [-(-math.prod(shape) // _ALIGN) * _ALIGN for shape in shapes]
        self._starts = (0, *accumulate(sizes[:-1]))
        """Offsets of tokens, ints, knobs and tables in memory."""
        if max(sizes) >= 1 << 31:
            raise ConfigError(
                f"{rows} requests of {max_len} tokens exceed 2^31 tokens: lower --max-num-seqs or --max-model-len.",
                param="max_num_seqs",
            )
        self._memory = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._host = self._memory.numpy() if device.type == "cpu" else None
        """The memory as an array on a CPU, which is written directly, without a packet; None on a GPU."""
        tokens, ints, knobs, tables = (
            part[: math.prod(shape)].view(shape) for part, shape in zip(self._memory.split(sizes), shapes, strict=True)
        )
        self.tokens, self.ints, self.knobs, self.tables = tokens, ints, knobs.view(torch.float32), tables
        self.adapters, self.ranks = self.ints[:, Int.ADAPTER], self.ints[:, Int.RANK]
        self.ints[0, Int.KNOWN] = 1
        self.ints[0, Int.RANK] = -1
        self.ints[0, Int.DONE] = 1
        self.ints[0, Int.LIMIT] = max_len
        self.ints[0, Int.STOP :] = -1
        self.knobs[0, Knob.TOP_P] = self.knobs[0, Knob.REPETITION] = 1.0
        self.vocab = vocab
        self.generation = np.zeros(rows + 2, dtype=np.int32)
        self.generation[[0, -1]] = -1
        self.greedy = np.ones(rows + 1, dtype=bool)
        self.fused_sampling = np.ones(rows + 1, dtype=bool)
        self.adapted = np.zeros(rows + 1, dtype=bool)
        self._requests: dict[int, RowRequest] = {}

    # --- which request holds a row ------------------------------------------------------------------------------------

    def __getitem__(self, row: int) -> RowRequest:
        return self._requests[row]

    def assign(self, plan: StepPlan) -> None:
        """Apply leaves and joins to the host part. `pack_changes` refuses a row out of range."""
        for row in plan.leaves:
            self._free(row)
        for join in plan.joins:
            if 0 < join.row < len(self.fused_sampling):
                self._take(join)

    def forget(self, plan: StepPlan) -> None:
        """Free the rows that the plan changes: the changes did not reach the device."""
        for row in (*(join.row for join in plan.joins), *plan.pages[::4]):
            self._free(row)

    def drop_lost(self, plan: StepPlan) -> tuple[StepPlan, list[int]]:
        """Replace rows whose upload was lost, so that they do not hold the planned request, by the scratch row without sampling.
        Returns the plan and the places of these rows in the step."""
        generations = self.generation.take(np.frombuffer(plan.rows, dtype=np.int32), mode="clip")
        lost = np.flatnonzero(generations != np.frombuffer(plan.generations, dtype=np.int32)).tolist()
        if not lost:
            return plan, lost
        rows, samples, logits, unread = plan.rows[:], plan.samples[:], plan.logits[:], plan.unread
        if unread:  # has an item for each row that draws
            drawing = compress(range(len(rows)), plan.samples)
            unread = array("i", [count for place, count in zip(drawing, unread, strict=True) if place not in lost])
        for place in lost:
            rows[place] = samples[place] = logits[place] = 0
        return replace(plan, rows=rows, samples=samples, logits=logits, unread=unread), lost

    def _take(self, join: Join) -> None:
        row, sampling = join.row, join.sampling
        allowed = None
        if sampling.allowed_token_ids is not None:
            allowed = read_mask(pack_allowed(sampling.allowed_token_ids, self.vocab), self.vocab)
        self._free(row)
        self._requests[row] = RowRequest(join, allowed)
        self.generation[row], self.greedy[row] = join.generation, sampling.greedy
        self.fused_sampling[row], self.adapted[row] = sampling.fused, join.adapter > 0

    def _free(self, row: int) -> None:
        if self._requests.pop(row, None) is not None:
            self.generation[row] = 0

    # --- device state -------------------------------------------------------------------------------------------------

    @property
    def state(self) -> RowState:
        return RowState(self.tokens, self.ints, self.tables, self.page_tokens)

    @property
    def flat_tokens(self) -> torch.Tensor:
        return self.tokens.view(-1)

    @property
    def temperature(self) -> torch.Tensor:
        """Temperatures of all rows, float32 [R]."""
        return self.knobs[:, Knob.TEMPERATURE]

    def pack_changes(self, plan: StepPlan, packet: Packet) -> None:
        """Add the changes of `plan` to `packet`: items and their offsets in memory. On a CPU, write them at once."""
        runs, entries = dict(self._runs(plan.joins)), self._entries(plan.pages)
        if plan.drops:
            drops = np.array(plan.drops, dtype=np.int64).reshape(-1, 2)
            lengths = self._starts[1] + drops[:, 0] * INTS + Int.LENGTH
            if self._host is not None:
                np.subtract.at(self._host, lengths, drops[:, 1])
            else:
                packet.add("lengths", lengths, np.int64)
                packet.add("dropped", drops[:, 1])
        if self._host is not None:
            for place, run in runs.items():
                self._host[place : place + len(run)] = run
            for place, page in entries.items():
                self._host[place] = page
        elif runs or entries:
            where = [np.arange(place, place + len(run)) for place, run in runs.items()]
            packet.add("where", np.concatenate([*where, np.array(list(entries), np.int64)]), np.int64)
            packet.add("items", np.concatenate([*runs.values(), np.array(list(entries.values()), np.int32)]))

    def write_changes(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the changes that `pack_changes` packed."""
        if "lengths" in tensors:
            self._memory.index_add_(0, tensors["lengths"], tensors["dropped"], alpha=-1)
        if "where" in tensors:
            self._memory.index_copy_(0, tensors["where"], tensors["items"])

    def pack_drafts(self, plan: StepPlan, packet: Packet) -> None:
        """Add host drafts to `packet`, int32 [3, N]: rows, places after the known tokens, tokens. On a CPU, write them at once."""
        if max(plan.drafts) < 0:
            return
        if self._host is None:
            rows, n_draft, tokens = (
                np.frombuffer(column, dtype=np.int32) for column in (plan.rows, plan.n_draft, plan.drafts)
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

    def write_drafts(self, plan: StepPlan, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write host drafts after the known tokens of each row, where gather and penalties read them. Device drafts are there
        already."""
        if "drafts" in tensors:
            row, place, token = tensors["drafts"].unbind(0)
            at = row * self.width + self.ints[:, Int.KNOWN].index_select(0, row) + place
            self.flat_tokens.index_copy_(0, at.long(), token)

    def _runs(self, joins: Sequence[Join]) -> Iterator[tuple[int, np.ndarray]]:
        """(offset in memory, content) of each part of a joining row. Of several joins for a row the last one counts."""
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
        """Offset in memory -> page, for entries of `tables`. Of several entries for a place the last one counts."""
        (_, rows, pages), start, each = self.tables.shape, self._starts[3], [iter(quads)] * 4
        return {start + (group * rows + row) * pages + at: page for row, group, at, page in zip(*each, strict=True)}


def _ints(join: Join) -> list[int]:
    """One row of `ints`, in the order of `Int`."""
    stops = (*join.stop_ids, *[-1] * (MAX_STOP_IDS - len(join.stop_ids)))
    moving = (join.computed, join.computed, len(join.tokens), 0)
    sampling = join.sampling
    bounds = (join.limit, join.prompt_len, sampling.min_tokens, sampling.top_k)
    return [*moving, *bounds, *row_key(join.seed, join.choice), join.adapter, join.rank, *stops]


def _knobs(join: Join) -> list[float]:
    """One row of `knobs`, in the order of `Knob`."""
    sampling = join.sampling
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
    return [sampling.temperature, sampling.top_p, sampling.min_p, *penalties]
