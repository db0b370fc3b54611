"""Inputs of logits processors: penalties, biases, masks, log-probabilities, and scores of prompt tokens. Temperature, top_k, top_p
and min_p are not among them: the sampler applies these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from ridgeline.core.plan import Logits, StepPlan
from ridgeline.decoding.masks import mask_words, read_mask
from ridgeline.engine.packet import Packet
from ridgeline.engine.row_table import RowTable


@dataclass(frozen=True, slots=True)
class LogitsInputs:
    """Which logits rows of a step are processed, as int32 indices into its N logits rows (None: no row).

    penalized: by presence, frequency and repetition. early: may need suppressed end tokens (min_tokens). bias: (logits row, token,
    bias) triples as three tensors. masked, words: rows with a mask of allowed tokens, and the packed masks. logprobs: rows whose
    log-probabilities are requested. tops, places, nodes: for each request with log-probabilities its number of alternatives, its
    index among the rows that draw, and its number of logits rows.
    """

    penalized: torch.Tensor | None = None
    early: torch.Tensor | None = None
    bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    masked: torch.Tensor | None = None
    words: torch.Tensor | None = None
    logprobs: torch.Tensor | None = None
    tops: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()


NO_INPUTS = LogitsInputs()


@dataclass(frozen=True, slots=True)
class Scores:
    """Query tokens to pool and to score, those to pool first. at: int32 [M], indices of query tokens. ids: int32 [M], the tokens to
    score after them; without meaning for those to pool. counts, tops: by place in the step, the number of scored tokens and of
    alternatives. pooled: by place in the step, the number of pooled tokens."""

    at: torch.Tensor
    ids: torch.Tensor
    counts: Mapping[int, int]
    tops: Mapping[int, int]
    pooled: Mapping[int, int]


class LogitsInputsBuilder:
    """Packs and builds LogitsInputs. plan: has masks and biases. drawing int32 [S]: device rows that draw. nodes int32 [S]: number
    of logits rows of each."""

    def __init__(self, plan: StepPlan, table: RowTable, drawing: np.ndarray, nodes: np.ndarray) -> None:
        self._masks, self._biases, self._vocab, self._nodes = plan.masks, plan.biases, table.vocab, nodes
        self._requests = [table[row] for row in drawing.tolist()]
        self._sampling = [request.join.sampling for request in self._requests]
        self._places = [place for place, wanted in enumerate(self._sampling) if wanted.logprobs is not None]

    def pack(self, packet: Packet) -> None:
        self._pack_index(packet, "penalized", [sampling.penalized for sampling in self._sampling])
        self._pack_index(packet, "early", [sampling.min_tokens > 0 for sampling in self._sampling])
        self._pack_index(packet, "logprobs", [sampling.logprobs is not None for sampling in self._sampling])
        self._pack_bias(packet)
        self._pack_masks(packet)

    def _pack_index(self, packet: Packet, name: str, wanted: Sequence[bool]) -> None:
        """Add the indices of the logits rows of the drawing rows in `wanted`."""
        if any(wanted):
            packet.add(name, np.flatnonzero(np.repeat(wanted, self._nodes)))

    def _pack_bias(self, packet: Packet) -> None:
        rows: list[int] = []
        tokens: list[int] = []
        values: list[float] = []
        counts = self._nodes.tolist()
        for end, nodes, request in zip(accumulate(counts), counts, self._requests, strict=True):
            biases = [(node, *bias) for bias in request.join.sampling.logit_bias for node in range(nodes)]
            for node, token, bias in biases + self._biases.get(request.join.row, []):
                if token < self._vocab:
                    rows.append(end - nodes + node)
                    tokens.append(token)
                    values.append(bias)
        if rows:
            packet.add("bias_rows", rows)
            packet.add("bias_tokens", tokens)
            packet.add("bias", values, np.float32)

    def _pack_masks(self, packet: Packet) -> None:
        size = 4 * mask_words(self._vocab)
        wanted, words = [], []
        for nodes, request in zip(self._nodes.tolist(), self._requests, strict=True):
            row_mask, allowed = self._masks.get(request.join.row), request.allowed
            node_masks = (
                []
                if row_mask is None
                else [row_mask[at * size :][:size] for at in range(max(1, len(row_mask) // size))]
            )
            masks = [read_mask(mask, self._vocab) for mask in node_masks]
            if allowed is not None:
                masks = [allowed] if row_mask is None else [mask & allowed for mask in masks]
            wanted.append(bool(masks))
            words += masks * (nodes // max(1, len(masks)))
        self._pack_index(packet, "masked", wanted)
        if words:
            packet.add("words", np.stack(words))

    def build(self, tensors: Mapping[str, torch.Tensor]) -> LogitsInputs:
        """got: the tensors that the packet became."""
        return LogitsInputs(
            penalized=tensors.get("penalized"),
            early=tensors.get("early"),
            bias=(tensors["bias_rows"], tensors["bias_tokens"], tensors["bias"]) if "bias" in tensors else None,
            masked=tensors.get("masked"),
            words=tensors.get("words"),
            logprobs=tensors.get("logprobs"),
            tops=tuple(self._sampling[place].logprobs or 0 for place in self._places),
            places=tuple(self._places),
            nodes=tuple(self._nodes[self._places].tolist()),
        )


class ScoreBuilder:
    """Packs and builds Scores for the rows of a plan that need logits or hidden states of query tokens that do not draw."""

    def __init__(self, plan: StepPlan, table: RowTable) -> None:
        self._plan = plan
        scored = [(place, table[plan.rows[place]]) for place, wanted in enumerate(plan.logits) if wanted == Logits.ALL]
        self._scored = dict(sorted(scored, key=lambda item: item[1].join.sampling.pooling is None))
        self._counts: dict[int, int] = {}
        self._pooled: dict[int, int] = {}

    def pack(self, packet: Packet) -> None:
        at: list[int] = []
        ids: list[int] = []
        starts = [0, *accumulate(self._plan.n_query)]
        for place, request in self._scored.items():
            wanted = np.array(self._plan.score_ids[request.join.row], dtype=np.int32)
            scored = np.flatnonzero(wanted >= 0)
            at += (starts[place] + scored).tolist()
            ids += wanted[scored].tolist()
            (self._counts if request.join.sampling.pooling is None else self._pooled)[place] = len(scored)
        packet.add("score_at", at)
        packet.add("score_ids", ids)

    def build(self, tensors: Mapping[str, torch.Tensor]) -> Scores:
        """got: the tensors that the packet became."""
        tops = {place: self._scored[place].join.sampling.prompt_logprobs or 0 for place in self._counts}
        return Scores(tensors["score_at"], tensors["score_ids"], self._counts, tops, self._pooled)
