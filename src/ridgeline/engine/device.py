"""One step on the device: gather, forward, draw, advance. Functions of device buffers that never wait for the device, so
that the same code runs eagerly, on a CPU, and inside a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ridgeline.decoding.logprobs import Ranked, rank, score
from ridgeline.decoding.masks import add_bias, apply_mask, hold_back
from ridgeline.decoding.penalties import Said, apply_penalties
from ridgeline.decoding.sampler import Filters, apply_filters
from ridgeline.decoding.verify import accept, until_end
from ridgeline.engine.batch import Batch, Wishes
from ridgeline.engine.rows import Knob, Rows
from ridgeline.kv.store import KvStore
from ridgeline.models.build import LoadedModel
from ridgeline.ops.noise import Purpose
from ridgeline.ops.rows import Int, Spread, ends, move
from ridgeline.ops.sample import greedy
from ridgeline.ops.step import KvView, StepInputs


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step leaves for the host, still on the device.

    packed: int32 [S, 2 + wide] for the rows that drew: tokens gained, flag, the drawn tokens (those beyond the gained
    ones mean nothing). logprobs: for wished rows, one per logit row. scores: for scored query tokens.
    """

    packed: torch.Tensor | None
    logprobs: Ranked | None = None
    scores: Ranked | None = None


@dataclass(frozen=True, slots=True)
class _Logits:
    """N logit rows that draw: their logits, device rows, those rows' columns, and where each drawn token will stand."""

    logits: torch.Tensor
    rows: torch.Tensor
    ints: torch.Tensor
    knobs: torch.Tensor
    place: torch.Tensor

    def pick(self, index: torch.Tensor) -> _Logits:
        mine = (self.logits, self.rows, self.ints, self.knobs, self.place)
        return _Logits(*(one.index_select(0, index) for one in mine))


class DeviceStep:
    """The model over rows and cache. `longest`: most slots a row can ever hold."""

    def __init__(self, model: LoadedModel, rows: Rows, store: KvStore, step_tokens: int) -> None:
        self.decoder, self.spec, self.ops, self.rows, self.store = model.decoder, model.spec, model.ops, rows, store
        device = rows.ints.device
        longest = max(step_tokens, rows.ints.shape[0]) + 1
        self._count = torch.arange(longest, dtype=torch.int32, device=device)
        spec = model.spec
        facts = ((layer.window, layer.softcap, spec.scale_of(layer)) for layer in spec.layers)
        self._layers = tuple(zip(store.kv, store.groups, facts, strict=True))
        self.longest = rows.tables.shape[2] * rows.page_tokens

    # --- forward ----------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, max_length: int) -> torch.Tensor:
        """Run the step's query tokens and move positions past those that no draw follows. max_length: bound of slots any
        row holds. -> hidden [T, d_model]."""
        rows, own, ragged = self.rows, batch.rows, batch.ragged
        if ragged is None:
            q_start, row_of, spread = self._count[: len(own) + 1], self._count[: len(own)], None
        else:
            if ragged.drafts is not None:
                self._write_drafts(*ragged.drafts)
            q_start, row_of = ragged.q_start, ragged.row_of
            spread = Spread(ragged.n_query, row_of, ragged.place)
        got = self.ops.gather(rows.state, own, spread)
        step = StepInputs(own, q_start, got.length, got.position, row_of, batch.shape.max_query, max_length)
        hidden = self.decoder.forward(got.tokens, self._views(got.slots), step)
        if ragged is not None:
            # A row that has ended advances by nothing here: all it knows was computed before.
            gone = ragged.advance.unsqueeze(1).expand(-1, int(Int.KNOWN))
            rows.ints[:, : Int.KNOWN].index_add_(0, own, gone)
        return hidden

    def _write_drafts(self, row: torch.Tensor, place: torch.Tensor, token: torch.Tensor) -> None:
        """Drafts stand after what the row knows, where the gather and the penalties find them."""
        at = row * self.rows.width + self.rows.ints[:, Int.KNOWN].index_select(0, row) + place
        self.rows.flat_tokens.index_copy_(0, at.long(), token)

    def _views(self, slots: torch.Tensor) -> list[KvView]:
        """Each layer's view, with the slots that this step's keys take in its group."""
        own, table = slots.unbind(0), self.rows.tables.unbind(0)
        return [KvView(kv, table[group], own[group], *facts) for kv, group, facts in self._layers]

    # --- finish -----------------------------------------------------------------------------------------------------

    def finish(self, batch: Batch, hidden: torch.Tensor, bound: int) -> Outcome:
        """Draw, verify, write the new tokens, move the rows on. bound: most tokens a row knows before its draw."""
        scores = self._score(batch, hidden)
        if not len(batch.sampled):
            return Outcome(None, None, scores)
        wanted = self._wanted(batch, hidden)
        drawn, logprobs = self._draw(batch, wanted, bound)
        return Outcome(self._advance(batch, wanted, drawn), logprobs, scores)

    def _score(self, batch: Batch, hidden: torch.Tensor) -> Ranked | None:
        scores = batch.scores
        if scores is None or not len(scores.at):
            return None
        top = max(scores.tops.values())
        chosen = hidden.index_select(0, scores.at)
        return score(self.decoder.logits, chosen, scores.ids, top, self.spec.vocab_size)

    def _wanted(self, batch: Batch, hidden: torch.Tensor) -> _Logits:
        wide, rows, ragged = batch.shape.wide, batch.sampled, batch.ragged
        logits = self.decoder.logits(hidden if ragged is None else hidden.index_select(0, ragged.at))
        if wide > 1:
            rows = rows.unsqueeze(1).expand(-1, wide).reshape(-1)
        ints = self.rows.ints.index_select(0, rows)
        place = ints[:, Int.KNOWN]
        if wide > 1:
            place = place + self._count[:wide].repeat(len(batch.sampled))
        return _Logits(logits, rows, ints, self.rows.knobs.index_select(0, rows), place)

    def _draw(self, batch: Batch, wanted: _Logits, bound: int) -> tuple[torch.Tensor, Ranked | None]:
        """Tokens int32 [N] and the log-probabilities of those who asked, of the logits as the model gave them."""
        logits, wishes = wanted.logits, batch.wishes
        asked = None if wishes.logprobs is None else logits.index_select(0, wishes.logprobs)
        if not batch.shape.plain:
            logits = self._process(wanted, wishes, bound + batch.shape.wide)
        if batch.shape.greedy:
            drawn = greedy(logits)
        else:
            heat, key = wanted.knobs[:, Knob.TEMPERATURE], wanted.ints[:, Int.KEY : Int.KEY + 2]
            drawn = self.ops.sample(logits, heat, key, wanted.place, Purpose.TOKEN)
        if asked is None or wishes.logprobs is None:
            return drawn, None
        return drawn, rank(asked, drawn.index_select(0, wishes.logprobs), max(wishes.tops))

    def _process(self, wanted: _Logits, wishes: Wishes, longest: int) -> torch.Tensor:
        """Penalties, biases, end tokens that come too early, masks, filters. Who did not ask stays as it is."""
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
        if wishes.filtered is not None:
            part = wanted.pick(wishes.filtered)
            heat, top_p, min_p = (part.knobs[:, knob] for knob in (Knob.TEMPERATURE, Knob.TOP_P, Knob.MIN_P))
            filters = Filters(heat, part.ints[:, Int.TOP_K], top_p, min_p, wishes.ranked, wishes.most_k)
            logits.index_copy_(0, wishes.filtered.long(), apply_filters(part.logits, filters))
        return logits

    def _advance(self, batch: Batch, wanted: _Logits, drawn: torch.Tensor) -> torch.Tensor:
        """Write the drawn tokens, flag ends, move the rows on. -> Outcome.packed."""
        state, wide = self.rows.state, batch.shape.wide
        if batch.ragged is None or wide == 1:
            return self.ops.advance(state, batch.sampled, drawn)
        flag = ends(state, wanted.rows, wanted.place, drawn)
        at = (wanted.rows * self.rows.width + wanted.place).long()
        live = 1 - wanted.ints[::wide, Int.DONE]
        # What the row drew is written only after its drafts were compared: they stand in the same places.
        grid, flags = drawn.view(-1, wide), flag.view(-1, wide)
        drafts = self.rows.flat_tokens.index_select(0, at).view(-1, wide)[:, :-1]
        count = until_end(flags > 0, accept(grid, drafts, batch.ragged.n_draft)).mul_(live)
        flag = flags.gather(1, (count - 1).clamp(min=0).long().unsqueeze(1)).squeeze(1) * live
        self.rows.flat_tokens.index_copy_(0, at, drawn)
        move(state, batch.sampled, count, flag)
        return torch.cat((torch.stack((count, flag), dim=1), grid), dim=1)
