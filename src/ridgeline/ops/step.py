"""Inputs of every layer and operation in a step: positions of tokens, and places of their keys and values.

Shapes: T query tokens of B scheduled rows, R device rows, P pages in a row's table. All tensors are on the device.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ridgeline.core.spec import KvFormat, restricts_last_layer
from ridgeline.ops.division import Division

SHORT = 2048
"""Most slots of a short context. For one or two rows, attention over longer contexts uses another kernel, so a GPU captures graphs
for both."""


@dataclass(frozen=True, slots=True)
class Selection:
    """How one layer selects pages (ops.selective).

    budget: slots that the only query of a row reads per KV head. bounds: bfloat16 [pages, 2, kv_heads, head_dim], the minimum and
    maximum of each element of the keys of a full page; those of other pages are undefined.
    """

    budget: int
    bounds: torch.Tensor


@dataclass(frozen=True, slots=True)
class KvView:
    """One layer's part of the paged cache.

    kv: [pages, 2, kv_heads, page_tokens, head_dim], keys at index 0 and values at 1; any strides except a contiguous
    last dimension (offsets must be computed in int64). Page 0 is scratch: padding writes there and no result depends on it.
    table: int32 [R, P], pages of each row in slot order. A windowed group's table entries behind the window are stale.
    slots: int64 [T], where each query token's key goes: page * page_tokens + place in the page.
    window: keys at most window - 1 positions back are seen (None: all). softcap: tanh cap of the scores. scale: of QK^T.
    format: what kv holds; None: the model's dtype. The operations were chosen for it at start-up (AttentionOps.kv_formats).
    scales: [pages, 2, kv_heads, page_tokens, scales of a vector], value = stored * scale; None: a format without scales.
    selection: None: every query reads all slots that it sees. chosen: a kernel of this layer writes `table`, so attention must wait
    for it before it reads page numbers.
    """

    kv: torch.Tensor
    table: torch.Tensor
    slots: torch.Tensor
    window: int | None
    softcap: float | None
    scale: float
    format: KvFormat | None = None
    scales: torch.Tensor | None = None
    selection: Selection | None = None
    chosen: bool = False

    @property
    def page_tokens(self) -> int:
        return self.kv.shape[3]

    @property
    def bits(self) -> int:
        """Bits of an element in a format with scales; 0: keys and values are in the model's dtype."""
        return 0 if self.scales is None or self.format is None else self.format.bits


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Device data of a step. Row i of the step owns query tokens q_start[i] .. q_start[i + 1] - 1.

    rows: int32 [B], device row of each scheduled row. q_start: int32 [B + 1]. length: int32 [B], slots the row holds with this
    step's keys written. position: int32 [T], sequence position of each query token. row_of: int32 [T], index into rows of each
    query token. max_query, max_length: host-side upper bounds over the step's rows. ancestors: int64 [T] for draft trees: bit j is
    set if the token sees the j-th query token of its own row (None: plain causal order). Bits only restrict the causal order of
    slots. A token always sees itself, and tokens from the 64th on follow plain causal order, so -1 (all bits set) is a row without
    a tree. key_positions: int32 [R, slots], positions of keys if a retention policy compacts slots (None: position == slot).
    adapters: int32 [R], slot of each device row's adapter, 0 for none (None: no row has one).
    selected: int32 [W], the query tokens that run through the linears after the last attention (None: all, in order). ranks: int32
    [R], the rank that attends for each device row, where ranks divide requests. share: a bound of the query tokens of each of them
    (0: T). division: the tokens are those of this rank, while linears that ranks share run for the tokens of all. derived:
    cache of tensors that an operation computed from this step's tensors and that later layers reuse (gather indices, masks). Keys
    name the operation and the tensors used. After an in-place change of the tensors, make a new StepInputs.
    """

    rows: torch.Tensor
    q_start: torch.Tensor
    length: torch.Tensor
    position: torch.Tensor
    row_of: torch.Tensor
    max_query: int
    max_length: int
    ancestors: torch.Tensor | None = None
    key_positions: torch.Tensor | None = None
    selected: torch.Tensor | None = None
    adapters: torch.Tensor | None = None
    ranks: torch.Tensor | None = None
    share: int = 0
    division: Division | None = None
    derived: dict[Hashable, Any] = field(init=False, default_factory=dict, compare=False, repr=False)

    @property
    def decode(self) -> bool:
        """Whether every row has exactly one query token (T == B). The host knows it; it is a shape, not a phase."""
        return self.max_query == 1

    @property
    def inputs(self) -> int:
        """Number of query tokens that run through a linear."""
        return len(self.position if self.selected is None else self.selected)

    def select(self, tokens: torch.Tensor) -> StepInputs:
        """The step for linears that run only these query tokens, int32 [W]."""
        return replace(self, selected=tokens)

    def row_of_inputs(self) -> torch.Tensor:
        """int32 [T or W]: index into rows of each token that runs through a linear."""
        return self.row_of if self.selected is None else self.row_of.index_select(0, self.selected)

    def position_of_inputs(self) -> torch.Tensor:
        """int32 [T or W]: sequence position of each token that runs through a linear."""
        return self.position if self.selected is None else self.position.index_select(0, self.selected)

    def one_row_per_token(self, tokens: torch.Tensor) -> StepInputs | None:
        """A step in which each of these query tokens, int32 [W], is a row of its own with the same visible keys.

        None if the mask is not plain causal order of slots, if reading a context per token costs more than it saves, or if
        there are more tokens than rows in the step: kernels for that shape are not warmed up."""
        narrowed = self.ancestors is not None or self.key_positions is not None
        if narrowed or len(tokens) > len(self.rows) or not restricts_last_layer(len(tokens), len(self.position)):
            return None
        row = self.row_of.index_select(0, tokens)
        behind = self.q_start.index_select(0, row + 1) - 1 - tokens
        length, position = self.length.index_select(0, row) - behind, self.position.index_select(0, tokens)
        count = torch.arange(len(tokens) + 1, dtype=torch.int32, device=tokens.device)
        rows = self.rows.index_select(0, row)
        return StepInputs(rows, count, length, position, count[:-1], 1, self.max_length, adapters=self.adapters)
