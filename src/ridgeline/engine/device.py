"""One step on the device: gather, forward, draw, advance. Functions of device buffers that never wait for the device, so
that the same code runs eagerly, on a CPU, and inside a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ridgeline.decoding.logprobs import Ranked, rank, score
from ridgeline.decoding.masks import add_bias, apply_mask, hold_back
from ridgeline.decoding.penalties import Said, apply_penalties
from ridgeline.decoding.verify import verify
from ridgeline.engine.batch import Batch, Scores, Wishes
from ridgeline.engine.row_table import RowTable
from ridgeline.kv.store import KvStore
from ridgeline.models.build import LoadedModel
from ridgeline.ops.noise import Purpose
from ridgeline.ops.rows import Gathered, Int, Knob, Spread
from ridgeline.ops.sample import Limits, greedy
from ridgeline.ops.step import KvView, StepInputs
from ridgeline.speculation.device import Behind, DeviceDrafter, NoDrafter


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step leaves for the host, still on the device.

    packed: int32 [S, 2 + wide] for the rows that drew: tokens gained, flag, the drawn tokens (those beyond the gained
    ones mean nothing); with trees int32 [S, 2 + 3 wide]: then what was drawn behind each node, and the nodes of the path.
    logprobs: for wished rows, one per logit row, along the path. scores: for scored query tokens. worth: of DeviceDrafter.draft.
    """

    packed: torch.Tensor | None
    logprobs: Ranked | None = None
    scores: Ranked | None = None
    worth: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Logits:
    """N logit rows that draw: their logits as the head gives them, device rows, those rows' columns, and where each drawn
    token will stand."""

    logits: torch.Tensor
    rows: torch.Tensor
    ints: torch.Tensor
    knobs: torch.Tensor
    place: torch.Tensor
    """Where the token drawn from each will stand in its row."""

    def pick(self, index: torch.Tensor) -> _Logits:
        mine = (self.logits, self.rows, self.ints, self.knobs, self.place)
        return _Logits(*(one.index_select(0, index) for one in mine))


_Layer = tuple[Tensor, int, tuple[Any, ...]]
"""Its cache, its group, and the rest of its KvView."""


class DeviceStep:
    """The model over rows and cache. `longest`: most slots a row can ever hold."""

    def __init__(
        self, model: LoadedModel, rows: RowTable, store: KvStore, step_tokens: int, drafter: DeviceDrafter = NoDrafter()
    ) -> None:
        self.decoder, self.spec, self.ops, self.rows, self.store = model.decoder, model.spec, model.ops, rows, store
        self.drafter = drafter
        device = rows.ints.device
        # Graphs may have up to twice as many rows, for padding.
        longest = max(step_tokens, 2 * rows.ints.shape[0]) + 1
        self._count = torch.arange(longest, dtype=torch.int32, device=device)
        spec = model.spec
        facts = ((layer.window, layer.softcap, spec.scale_of(layer)) for layer in (*spec.layers, *drafter.layers))
        layers = tuple(zip(store.kv, store.groups, facts, strict=True))
        self._layers = layers[: len(spec.layers)]
        guests = (*layers[len(spec.layers) :], *(layers[at] for at in drafter.attended))
        self._guest_views = partial(self._views, guests)
        """Of the drafter's layers, then of those that it attends to."""
        self.longest = rows.tables.shape[2] * rows.page_tokens

    def of_each_kind(self) -> DeviceStep:
        """The same step through one layer of each kind: it launches the same kernels and computes nothing of worth."""
        first: dict[Hashable, int] = {}
        for index, (kind, (kv, group, facts)) in enumerate(zip(self.decoder.kinds(), self._layers, strict=True)):
            # Triton tells pointers apart by 16 bytes: four int32 of a group's tables and slots.
            form = (group % 4, facts, kv.shape, kv.stride(), kv.dtype, kv.data_ptr() % 16)
            first.setdefault((kind, form), index)
        # The last one goes on with the wanted tokens alone.
        chosen = (*first.values(), len(self._layers) - 1)
        made = copy(self)
        made.decoder = self.decoder.only(chosen)
        made._layers = tuple(self._layers[index] for index in chosen)
        return made

    # --- forward ----------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, max_length: int) -> torch.Tensor:
        """Run the step's query tokens and move positions past those that no draw follows. max_length: bound of slots any
        row holds. -> hidden [W, d_model]: of the query tokens that want logits, then of those to score."""
        ragged, (got, step) = batch.ragged, self._gathered(batch, max_length)
        wanted = None if ragged is None or (batch.shape.even and batch.scores is None) else ragged.at
        if wanted is not None and batch.scores is not None:
            wanted = torch.cat((wanted, batch.scores.at))
        hidden = self.decoder.forward(got.tokens, self._views(self._layers, got.slots), step, wanted)
        if batch.shape.chunked:
            self.drafter.read(got.tokens, self._guest_views, got.slots, step)
        if ragged is not None and (hidden.is_cuda or batch.shape.chunked or batch.shape.sampling is not None):
            # A row that has ended advances by nothing here: all it knows was computed before.
            gone = ragged.advance.unsqueeze(1).expand(-1, int(Int.KNOWN))
            self.rows.ints[:, : Int.KNOWN].index_add_(0, batch.rows, gone)
        return hidden

    def read(self, batch: Batch) -> None:
        """Have the drafter read a batch's query tokens."""
        got, step = self._gathered(batch, self.longest)
        self.drafter.read(got.tokens, self._guest_views, got.slots, step)

    def _gathered(self, batch: Batch, max_length: int) -> tuple[Gathered, StepInputs]:
        own, ragged = batch.rows, batch.ragged
        tree = None if ragged is None else ragged.tree
        if ragged is None:
            q_start, row_of, spread = self._count[: len(own) + 1], self._count[: len(own)], None
        else:
            q_start, row_of = ragged.q_start, ragged.row_of
            spread = Spread(ragged.n_query, row_of, ragged.place, None if tree is None else tree.shift)
        got, ancestors = self.ops.gather(self.rows.state, own, spread), None if tree is None else tree.ancestors
        step = StepInputs(own, q_start, got.length, got.position, row_of, batch.shape.max_query, max_length, ancestors)
        return got, step

    def _views(self, layers: Sequence[_Layer], slots: torch.Tensor) -> list[KvView]:
        """Each layer's view, with the slots that this step's keys take in its group."""
        own, table = slots.unbind(0), self.rows.tables.unbind(0)
        return [KvView(kv, table[group], own[group], *facts) for kv, group, facts in layers]

    # --- finish -----------------------------------------------------------------------------------------------------

    def finish(self, batch: Batch, hidden: Tensor, bound: int, learn: bool | None = None) -> tuple[Outcome, Tensor]:
        """Draw, verify, write the new tokens, move the rows on. bound: most tokens a row knows before its draw. learn: the drafter
        sees the logits; None: if it wants to. -> what the host is told, and, where something is drafted ahead, the hidden state
        that drew the last token of each row that drew, [S, d_model]."""
        scores, draws = None, len(batch.owners)
        if batch.scores is not None:
            scores, hidden = self._score(batch.scores, hidden[draws:]), hidden[:draws]
        if not draws:
            return Outcome(None, None, scores), hidden
        drawn, logprobs = self._drawn(batch, hidden, bound, learn)
        packed, path = self._advance(batch, drawn)
        if batch.nodes is not None and batch.ahead:
            hidden = self.ops.last(packed, path, hidden, batch.nodes.drafted.first)
        return Outcome(packed, _along(logprobs, batch, path), scores), hidden

    def draft(self, rows: Tensor, hidden: Tensor, ahead: int, greedy: bool) -> Tensor | None:
        """Draft `ahead` nodes for the next step of device rows int32 [S], behind what they know by now. hidden: from finish.
        -> as DeviceDrafter.draft."""
        behind = Behind(self.rows.state, rows, self.rows.temperature, hidden, self.longest, greedy)
        return self.drafter.draft(behind, ahead, self._guest_views)

    def _score(self, scores: Scores, hidden: torch.Tensor) -> Ranked | None:
        if not len(hidden):
            return None
        return score(self.decoder.logits, hidden, scores.ids, max(scores.tops.values()), self.spec.vocab_size)

    def _wanted(self, batch: Batch, hidden: torch.Tensor) -> _Logits:
        """hidden: of the query tokens that want logits."""
        rows, nodes, logits = batch.owners, batch.nodes, self.decoder.logits(hidden)
        ints = self.rows.ints.index_select(0, rows)
        place = known = ints[:, Int.KNOWN]
        if nodes is not None:
            place, known = known + nodes.depth, known + nodes.number
        self.drafter.see(self.rows.state, rows, known, logits)
        return _Logits(logits, rows, ints, self.rows.knobs.index_select(0, rows), place)

    def _drawn(self, batch: Batch, hidden: Tensor, bound: int, learn: bool | None) -> tuple[Tensor, Ranked | None]:
        """As _draw; hidden: of the query tokens that want logits. Where nobody wishes anything, in one call."""
        nodes, fused, rows = batch.nodes, self.ops.draw, self.rows
        learn = self.drafter.learns() if learn is None else learn
        if fused is None or not batch.shape.plain or batch.wishes.logprobs is not None or learn:
            return self._draw(batch, self._wanted(batch, hidden), bound)
        depth = None if nodes is None else nodes.depth
        return fused(rows.state, rows.knobs, batch.owners, self.decoder.logits(hidden), depth), None

    def _draw(self, batch: Batch, wanted: _Logits, bound: int) -> tuple[torch.Tensor, Ranked | None]:
        """Tokens int32 [N] and the log-probabilities of those who asked, of the logits as the model gave them."""
        logits, wishes = wanted.logits, batch.wishes
        asked = None if wishes.logprobs is None else logits.index_select(0, wishes.logprobs)
        if not batch.shape.plain:
            logits = self._process(replace(wanted, logits=logits.float()), wishes, bound + batch.shape.wide)
        if batch.shape.greedy:
            drawn = greedy(logits)
        else:
            heat, top_p, min_p = (wanted.knobs[:, knob] for knob in (Knob.TEMPERATURE, Knob.TOP_P, Knob.MIN_P))
            key, limits = wanted.ints[:, Int.KEY : Int.KEY + 2], Limits(wanted.ints[:, Int.TOP_K], top_p, min_p)
            drawn = self.ops.sample(logits, heat, key, wanted.place, Purpose.TOKEN, limits)
        if asked is None or wishes.logprobs is None:
            return drawn, None
        return drawn, rank(asked, drawn.index_select(0, wishes.logprobs), max(wishes.tops))

    def _process(self, wanted: _Logits, wishes: Wishes, longest: int) -> torch.Tensor:
        """Penalties, biases, end tokens that come too early, masks, of float32. Who did not ask stays as it is."""
        logits = wanted.logits
        if wishes.penalized is not None:
            part = wanted.pick(wishes.penalized)
            tokens = self.rows.tokens[:, :longest].index_select(0, part.rows)
            knobs = (part.knobs[:, knob] for knob in (Knob.PRESENCE, Knob.FREQUENCY, Knob.REPETITION))
            said = Said(tokens, part.place, part.ints[:, Int.PROMPT], *knobs)
            logits.index_copy_(0, wishes.penalized.long(), apply_penalties(part.logits, said))
        if wishes.bias is not None:
            add_bias(logits, *wishes.bias)
        if wishes.early is not None:
            part = wanted.pick(wishes.early)
            early = part.place - part.ints[:, Int.PROMPT] < part.ints[:, Int.MIN_TOKENS]
            held = hold_back(part.logits, part.ints[:, Int.STOP :], early)
            logits.index_copy_(0, wishes.early.long(), held)
        if wishes.masked is not None and wishes.words is not None:
            part_logits = logits.index_select(0, wishes.masked)
            logits.index_copy_(0, wishes.masked.long(), apply_mask(part_logits, wishes.words))
        return logits

    def _advance(self, batch: Batch, drawn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Verify, write the drawn tokens, flag ends, move the rows on. -> Outcome.packed; of trees the path (decoding.verify)."""
        state = self.rows.state
        if batch.nodes is None:
            return self.ops.advance(state, batch.sampled, drawn), None
        packed, path = (self.ops.verify or verify)(state, batch.sampled, drawn, batch.nodes.drafted)
        if path is not None and self.ops.keep is not None:
            for group, runs in enumerate(self.store.runs):
                for run in runs:
                    self.ops.keep(state, batch.sampled, packed, path, group, run)
        elif path is not None:
            self._gather_path(batch, path, packed[:, 0])
        return packed, path

    def _gather_path(self, batch: Batch, path: torch.Tensor, count: torch.Tensor) -> None:
        """Move the keys and values of kept nodes to where those of a chain would lie. count int32 [S]: tokens gained, the nodes
        kept and one more, by which the rows have moved on."""
        root = self.rows.ints[:, Int.LENGTH].index_select(0, batch.sampled) - count
        depth = self._count[1 : batch.shape.deep + 1].long()
        source = path[:, 1 : batch.shape.deep + 1]
        goes = (depth < count.unsqueeze(1)) & (source != depth)
        slots = root.long().unsqueeze(1) + torch.stack((source, depth.expand_as(source)))
        size, own = self.rows.page_tokens, batch.sampled.long().unsqueeze(1)
        for group, table in enumerate(self.rows.tables.unbind(0)):
            pages = table.long()[own, slots // size]
            # Whoever stays moves within the scratch page.
            source_slot, target_slot = (goes * (pages * size + slots % size)).flatten(1).unbind(0)
            self.store.move_slots(group, source_slot, target_slot)


def _along(ranked: Ranked | None, batch: Batch, path: torch.Tensor | None) -> Ranked | None:
    """The log-probabilities of rows that asked, in the order of their path instead of their nodes."""
    if ranked is None or path is None:
        return ranked
    wishes = batch.wishes
    own = [(place, node) for place, nodes in zip(wishes.places, wishes.nodes, strict=True) for node in range(nodes)]
    first = [at - node for at, (_, node) in enumerate(own)]
    places, nodes, begins = torch.tensor([*zip(*own, strict=True), first], device=path.device)
    order = path[places, nodes] + begins
    return Ranked(*(column.index_select(0, order) for column in ranked))
