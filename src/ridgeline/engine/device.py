"""One step on the device: gather, forward, sample, advance. The functions only enqueue work on device buffers and never
synchronize, so the same code runs eagerly, on a CPU, and under CUDA graph capture.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ridgeline.core.plan import Compaction
from ridgeline.core.spec import KvFormat
from ridgeline.decoding.logprobs import Ranked, rank, score
from ridgeline.decoding.masks import add_bias, apply_mask, suppress_stop_tokens
from ridgeline.decoding.penalties import TokenHistory, apply_penalties
from ridgeline.engine.batch import Batch
from ridgeline.engine.logits_inputs import NO_INPUTS, LogitsInputs, Scores
from ridgeline.engine.row_table import RowTable
from ridgeline.kv.compact import attention_mass, choose, keys_of, move, slots_needed
from ridgeline.kv.store import KvStore
from ridgeline.models.adapters import Linears
from ridgeline.models.build import LoadedModel
from ridgeline.ops.columns import columns
from ridgeline.ops.noise import Purpose
from ridgeline.ops.rows import Gathered, Int, Knob, Spread
from ridgeline.ops.sample import Limits, greedy
from ridgeline.ops.step import KvView, Selection, StepInputs
from ridgeline.speculation.device import DeviceDrafter, DraftRows, DrawnTokens, NoDrafter, QueryTokens


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a step, on the device.

    packed: for the rows that drew, int32 [S, 2 + width]: tokens gained, flag, drawn tokens (undefined beyond the gained ones).
    With trees int32 [S, 2 + 3 width]: then the token drawn after each node, and the nodes of the accepted path.
    logprobs: of rows that requested them, one for each logits row, along the path. scores: of the query tokens to score.
    worth: result of DeviceDrafter.draft. pooled: float64 [P, d_model], sum of the hidden states of each row's pooled query tokens.
    """

    packed: torch.Tensor | None
    logprobs: Ranked | None = None
    scores: Ranked | None = None
    worth: torch.Tensor | None = None
    pooled: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Logits:
    """N logits rows to sample from: the logits of the head, their device rows, and the columns of these rows."""

    logits: torch.Tensor
    rows: torch.Tensor
    ints: torch.Tensor
    knobs: torch.Tensor
    place: torch.Tensor
    """int32 [N]: index in the row at which the drawn token is stored."""

    def pick(self, index: torch.Tensor) -> _Logits:
        columns = (self.logits, self.rows, self.ints, self.knobs, self.place)
        return _Logits(*(column.index_select(0, index) for column in columns))


_Facts = tuple[int | None, float | None, float, KvFormat]
"""Window, soft cap, scale and format of a layer's KvView."""
_Layer = tuple[Tensor, Tensor | None, Selection | None, int, _Facts]
"""KV cache of a layer, scales of the cache, selection of pages, KV group, remaining fields of its KvView."""


class DeviceStep:
    """Runs steps of the model over the row table and the KV cache. longest: most slots that a row can hold."""

    def __init__(
        self, model: LoadedModel, rows: RowTable, store: KvStore, step_tokens: int, drafter: DeviceDrafter = NoDrafter()
    ) -> None:
        self.decoder, self.spec, self.ops, self.rows, self.store = model.decoder, model.spec, model.ops, rows, store
        self.drafter, self.mesh = drafter, model.mesh
        device = rows.ints.device
        # Graphs may have up to twice as many rows, for padding.
        longest = max(step_tokens, 2 * rows.ints.shape[0]) + 1
        self._count = torch.arange(longest, dtype=torch.int32, device=device)
        spec = model.rank_spec
        kv_format = store.layout.format
        assert kv_format == spec.kv, "the cache is laid out for another format than the operations were checked for"
        facts = (
            (layer.window, layer.softcap, spec.scale_of(layer), kv_format) for layer in (*spec.layers, *drafter.layers)
        )
        layers = tuple(zip(store.kv, store.scales, store.selections, store.groups, facts, strict=True))
        self._layers = layers[: len(spec.layers)]
        drafter_layers = (*layers[len(spec.layers) :], *(layers[at] for at in drafter.attended))
        self._drafter_views = partial(self._views, drafter_layers)
        """Views of the drafter's own layers, then of the target's layers that it attends to."""
        self.longest = rows.tables.shape[2] * rows.page_tokens
        self.has_adapters = bool(Linears.of(self.decoder).weights)
        """Steps of adapted batches run other kernels."""
        self.state_width = spec.d_model + drafter.extra
        """Elements of a token's hidden state, what the drafter appends included."""

    def one_layer_of_each_kind(self) -> DeviceStep:
        """A step through one layer of each kind, for warm-up: it launches the same kernels, and its results are meaningless."""
        first: dict[Hashable, int] = {}
        for index, (kind, (kv, _, selection, group, facts)) in enumerate(
            zip(self.decoder.layer_kinds(), self._layers, strict=True)
        ):
            # Triton specializes kernels for pointers aligned to 16 bytes, which are four int32 of a group's tables and slots.
            form = (group % 4, facts, kv.shape, kv.stride(), kv.dtype, kv.data_ptr() % 16, selection is None)
            first.setdefault((kind, form), index)
        # The last layer runs attention and MLP only for tokens whose logits are needed.
        chosen = (*first.values(), len(self._layers) - 1)
        reduced = copy(self)
        reduced.decoder = self.decoder.with_layers(chosen)
        reduced._layers = tuple(self._layers[index] for index in chosen)
        return reduced

    # --- forward ----------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, max_length: int) -> torch.Tensor:
        """Run the step's query tokens, and advance rows past the tokens that no sampling follows.

        Args:
            max_length: upper bound of the slots of a row.
        Returns:
            hidden [W, state_width]: of the query tokens whose logits are needed, then of those to score.
        """
        ragged, (gathered, step) = batch.ragged, self._gathered(batch, max_length)
        all_logits_needed = ragged is None or not (batch.shape.chunked or batch.scores is not None)
        wanted = None if all_logits_needed or ragged is None else ragged.at
        if wanted is not None and batch.scores is not None:
            wanted = torch.cat((wanted, batch.scores.at))
        views = self._views(self._layers, gathered.slots)
        hidden, features = self.drafter.states(self.decoder, gathered.tokens, views, step, wanted)
        if ragged is not None and batch.shape.chunked:
            query = QueryTokens(self.rows.state, gathered.tokens, gathered.slots, step, features)
            self.drafter.read(query, self._drafter_views)
        if ragged is not None and (hidden.is_cuda or batch.shape.chunked):
            # A row that has ended advances by 0 here: all its tokens are computed.
            advance = ragged.advance.unsqueeze(1).expand(-1, int(Int.KNOWN))
            self.rows.ints[:, : Int.KNOWN].index_add_(0, batch.rows, advance)
        return hidden

    def read(self, batch: Batch) -> None:
        """Run the drafter over the query tokens of a batch."""
        gathered, step = self._gathered(batch, self.longest)
        self.drafter.read(QueryTokens(self.rows.state, gathered.tokens, gathered.slots, step), self._drafter_views)

    def _gathered(self, batch: Batch, max_length: int) -> tuple[Gathered, StepInputs]:
        rows, ragged = batch.rows, batch.ragged
        tree = None if ragged is None else ragged.tree
        if ragged is None:
            q_start, row_of, spread = self._count[: len(rows) + 1], self._count[: len(rows)], None
        else:
            q_start, row_of = ragged.q_start, ragged.row_of
            spread = Spread(ragged.n_query, row_of, ragged.place, None if tree is None else tree.shift)
        gathered, ancestors = (
            self.ops.sampler.gather(self.rows.state, rows, spread),
            None if tree is None else tree.ancestors,
        )
        step = StepInputs(
            rows,
            q_start,
            gathered.length,
            gathered.position,
            row_of,
            batch.shape.max_query,
            max_length,
            ancestors,
            adapters=self.rows.adapters if batch.adapted else None,
            ranks=self.rows.ranks,
            share=batch.shape.share,
        )
        return gathered, step

    def _drawn_after(self, batch: Batch) -> tuple[Gathered, StepInputs]:
        """The query tokens from whose states a step draws, before the rows advance."""
        if not batch.shape.chunked:
            return self._gathered(batch, self.longest)
        rows, nodes, count = batch.owners, batch.nodes, self._count
        q_start, row_of = count[: len(rows) + 1], count[: len(rows)]
        spread = None if nodes is None else Spread(nodes.number + 1, row_of, nodes.number, nodes.depth - nodes.number)
        gathered = self.ops.sampler.gather(self.rows.state, rows, spread)
        return gathered, StepInputs(rows, q_start, gathered.length, gathered.position, row_of, 1, self.longest)

    def _views(self, layers: Sequence[_Layer], slots: torch.Tensor) -> list[KvView]:
        """The KvView of each layer. slots: where the keys and values of this step are stored, by group."""
        group_slots, table = slots.unbind(0), self.rows.tables.unbind(0)
        return [
            KvView(kv, table[group], group_slots[group], *facts, scales, selection)
            for kv, scales, selection, group, facts in layers
        ]

    def measure(self, compaction: Compaction) -> Tensor:
        """The pages with which each head keeps the share of its attention mass, int64 []: the head that needs most decides."""
        size = self.rows.page_tokens
        needed = [
            slots_needed(mass, compaction.blocks * size, compaction.share)[0].amax()
            for *_, mass in self._observed(compaction)
        ]
        return ((torch.stack(needed).amax() + size - 1) // size).clamp(min=1)

    def compact(self, compaction: Compaction) -> None:
        """Copy the slots to which a row's last tokens attend most to fewer pages."""
        targets, size = torch.tensor(compaction.targets, device=self.rows.ints.device), self.rows.page_tokens
        for group, pages, view, mass in self._observed(compaction):
            chosen = choose(mass, compaction.blocks * size, targets.shape[1] * size, compaction.share)
            for part in (view.kv,) if view.scales is None else (view.kv, view.scales):
                move(part, pages[: compaction.blocks], targets[group], chosen)

    def _observed(self, compaction: Compaction) -> Iterator[tuple[int, Tensor, KvView, Tensor]]:
        """Of each layer: its group, the row's pages, its KvView and attention_mass. The last tokens run through the layers once
        more, and their keys and values go to the scratch page."""
        device, end, count = self.rows.ints.device, compaction.computed, compaction.observed
        # Each in memory of its own: Triton compiles separate kernels for pointers that are not aligned to 16 bytes.
        row, length = (
            torch.tensor([number], dtype=torch.int32, device=device) for number in (compaction.row, compaction.slots)
        )
        tokens = self.rows.tokens[compaction.row, end - count : end]
        position = torch.arange(end - count, end, dtype=torch.int32, device=device)
        step = StepInputs(
            row,
            self._count[:2] * count,
            length,
            position,
            torch.zeros_like(position),
            count,
            compaction.slots,
            adapters=self.rows.adapters,
        )
        scratch = (position % self.rows.page_tokens).long().expand(len(self.rows.tables), -1)
        pages = torch.tensor(compaction.pages, device=device)
        views = self._views(self._layers, scratch)
        for queries, view, layer in zip(self.decoder.queries(tokens, views, step), views, self._layers, strict=True):
            of_group = pages[layer[3]]
            yield layer[3], of_group, view, attention_mass(queries, keys_of(view, of_group, compaction.slots), view)

    # --- finish -----------------------------------------------------------------------------------------------------

    def finish(self, batch: Batch, hidden: Tensor, bound: int, learn: bool = False) -> tuple[Outcome, Tensor]:
        """Sample, verify drafts, write the new tokens and advance the rows.

        Args:
            bound: most tokens that a row knows before sampling.
            learn: the drafter sees the logits.
        Returns:
            The outcome, and the hidden states. If the step drafts ahead, these are [S, state_width]: the state from which the last
            token of each row was drawn.
        """
        scores, pooled, draws, nodes = None, None, len(batch.owners), batch.nodes
        states, hidden = hidden, columns(self.ops.tokenwise, hidden, 0, self.spec.d_model)
        if batch.scores is not None:
            (scores, pooled), hidden, states = self._score(batch.scores, hidden[draws:]), hidden[:draws], states[:draws]
        if not draws:
            return Outcome(None, None, scores, pooled=pooled), states
        drawn, logprobs = self._drawn(batch, hidden, bound, learn)
        self.drafter.follow(DrawnTokens(drawn, states, partial(self._drawn_after, batch)), self._drafter_views)
        packed, path = self._advance(batch, drawn)
        if nodes is not None and batch.ahead:
            states = self.ops.sampler.last(packed, path, states, nodes.drafted.first)
        return Outcome(packed, _along(logprobs, batch, path), scores, pooled=pooled), states

    def draft(self, rows: Tensor, hidden: Tensor, ahead: int, greedy: bool) -> Tensor | None:
        """Draft `ahead` nodes for the next step of device rows int32 [S], after their last known tokens. hidden: from finish.
        Returns the result of DeviceDrafter.draft."""
        behind = DraftRows(self.rows.state, rows, self.rows.temperature, hidden, self.longest, greedy)
        return self.drafter.draft(behind, ahead, self._drafter_views)

    def _score(self, scores: Scores, hidden: torch.Tensor) -> tuple[Ranked | None, torch.Tensor | None]:
        """Outcome.scores and Outcome.pooled. hidden: of the query tokens in `scores`."""
        sizes = list(scores.pooled.values())
        *parts, hidden = hidden.split([*sizes, len(hidden) - sum(sizes)])
        # In float64, so that float32 does not show the order of a sum, which depends on the chunks of a prompt.
        pooled = torch.stack([part.double().sum(dim=0) for part in parts]) if parts else None
        if not len(hidden):
            return None, pooled
        ids = scores.ids[sum(sizes) :]
        return score(self.decoder.logits, hidden, ids, max(scores.tops.values()), self.spec.vocab_size), pooled

    def _wanted(self, batch: Batch, hidden: torch.Tensor) -> _Logits:
        """Logits to sample from. hidden: of the query tokens whose logits are needed."""
        rows, nodes, logits = batch.owners, batch.nodes, self.decoder.logits(hidden)
        ints = self.rows.ints.index_select(0, rows)
        place = known = ints[:, Int.KNOWN]
        if nodes is not None:
            place, known = known + nodes.depth, known + nodes.number
        self.drafter.see(self.rows.state, rows, known, logits)
        return _Logits(logits, rows, ints, self.rows.knobs.index_select(0, rows), place)

    def _drawn(self, batch: Batch, hidden: Tensor, bound: int, learn: bool) -> tuple[Tensor, Ranked | None]:
        """Head and _draw. Without logits processors this is one operation. hidden: of the query tokens whose logits are needed."""
        nodes, rows = batch.nodes, self.rows
        if batch.inputs is not NO_INPUTS or learn:
            return self._draw(batch, self._wanted(batch, hidden), bound)
        depth = None if nodes is None else nodes.depth
        return self.ops.sampler.draw(rows.state, rows.knobs, batch.owners, self.decoder.logits(hidden), depth), None

    def _draw(self, batch: Batch, wanted: _Logits, bound: int) -> tuple[torch.Tensor, Ranked | None]:
        """Sample tokens int32 [N]. Log-probabilities are of the unprocessed logits, for the rows that requested them."""
        logits, inputs = wanted.logits, batch.inputs
        unprocessed = None if inputs.logprobs is None else logits.index_select(0, inputs.logprobs)
        if inputs is not NO_INPUTS:
            logits = self._process(replace(wanted, logits=logits.float()), inputs, bound + batch.shape.width)
        if batch.greedy:
            drawn = greedy(logits)
        else:
            temperature, top_p, min_p = (wanted.knobs[:, knob] for knob in (Knob.TEMPERATURE, Knob.TOP_P, Knob.MIN_P))
            key, limits = wanted.ints[:, Int.KEY : Int.KEY + 2], Limits(wanted.ints[:, Int.TOP_K], top_p, min_p)
            drawn = self.ops.sampler.sample(logits, temperature, key, wanted.place, Purpose.TOKEN, limits)
        if unprocessed is None or inputs.logprobs is None:
            return drawn, None
        return drawn, rank(unprocessed, drawn.index_select(0, inputs.logprobs), max(inputs.tops))

    def _process(self, wanted: _Logits, inputs: LogitsInputs, longest: int) -> torch.Tensor:
        """Apply penalties, biases, min_tokens and masks to float32 logits, in place for the rows that requested them."""
        logits = wanted.logits
        if inputs.penalized is not None:
            part = wanted.pick(inputs.penalized)
            tokens = self.rows.tokens[:, :longest].index_select(0, part.rows)
            knobs = (part.knobs[:, knob] for knob in (Knob.PRESENCE, Knob.FREQUENCY, Knob.REPETITION))
            history = TokenHistory(tokens, part.place, part.ints[:, Int.PROMPT], *knobs)
            logits.index_copy_(0, inputs.penalized.long(), apply_penalties(part.logits, history))
        if inputs.bias is not None:
            add_bias(logits, *inputs.bias)
        if inputs.early is not None:
            part = wanted.pick(inputs.early)
            early = part.place - part.ints[:, Int.PROMPT] < part.ints[:, Int.MIN_TOKENS]
            suppressed = suppress_stop_tokens(part.logits, part.ints[:, Int.STOP :], early)
            logits.index_copy_(0, inputs.early.long(), suppressed)
        if inputs.masked is not None and inputs.words is not None:
            part_logits = logits.index_select(0, inputs.masked)
            logits.index_copy_(0, inputs.masked.long(), apply_mask(part_logits, inputs.words))
        return logits

    def _advance(self, batch: Batch, drawn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Verify drafts, write the drawn tokens, flag ends, advance the rows. Returns Outcome.packed, and for trees the accepted
        path (ops.verify)."""
        state = self.rows.state
        if batch.nodes is None:
            return self.ops.sampler.advance(state, batch.sampled, drawn), None
        packed, path = self.ops.sampler.verify(state, batch.sampled, drawn, batch.nodes.drafted)
        if path is not None:
            self.ops.sampler.keep(state, batch.sampled, packed, path, self.store.runs, batch.shape.width - 1)
        return packed, path


def _along(ranked: Ranked | None, batch: Batch, path: torch.Tensor | None) -> Ranked | None:
    """Reorder log-probabilities from the order of nodes to the order of the accepted path."""
    if ranked is None or path is None:
        return ranked
    inputs = batch.inputs
    logit_rows = [
        (place, node) for place, nodes in zip(inputs.places, inputs.nodes, strict=True) for node in range(nodes)
    ]
    first = [at - node for at, (_, node) in enumerate(logit_rows)]
    places, nodes, begins = torch.tensor([*zip(*logit_rows, strict=True), first], device=path.device)
    order = path[places, nodes] + begins
    return Ranked(*(column.index_select(0, order) for column in ranked))
