"""Drift of a compressed model from its original, computed exactly from all logits with memory for one layer.

`ridgeline compare` measures served models. This module needs no engine. It supports models larger than memory and number
formats that no engine serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F

from ridgeline.compress.layerwise import CPU, LayerwiseRunner, Model, Streams, batches
from ridgeline.quality.drift import Drift, TokenDrift, by_document, measure
from ridgeline.quality.texts import Window

CHUNK_BYTES = 64 << 20
"""Maximum bytes of one model's logits at a time."""


class Evaluator:
    """Measures candidates against a reference on fixed texts. device: where layers run."""

    def __init__(
        self,
        reference: Model,
        windows: Sequence[Window],
        progress: Callable[[int], None] = lambda _: None,
        device: torch.device = CPU,
    ) -> None:
        self._device = device
        self._windows = windows
        self._ids = batches([window.ids for window in windows])
        self._reference = self._states(reference, progress)
        self._head, self._softcap = reference.head().to(device), reference.spec.final_softcap

    def measure(self, candidate: Model, progress: Callable[[int], None] = lambda _: None) -> Drift:
        """Measure the drift of a candidate from the reference. KL is over the whole vocabulary."""
        states = self._states(candidate, progress)
        head = candidate.head().to(self._device)
        parts = list(self._compare(states, head))
        return measure(by_document(parts, [window.document for window in self._windows]))

    def _states(self, model: Model, progress: Callable[[int], None]) -> Streams:
        """Compute the final hidden states [T, d_model] of each window."""
        runner = LayerwiseRunner(model.spec, max(len(window.ids) for window in self._windows), self._device)
        return [row for rows in runner.states(model, self._ids, progress) for row in rows]

    @torch.inference_mode()
    def _compare(self, states: Streams, head: torch.Tensor) -> Iterator[TokenDrift]:
        rows = max(1, CHUNK_BYTES // (4 * head.shape[0]))
        for window, reference, candidate in zip(self._windows, self._reference, states, strict=True):
            # The hidden state at a position predicts the next token.
            scored = slice(window.first - 1, len(window.ids) - 1)
            next_ids = torch.tensor(window.ids[window.first :], device=self._device).unsqueeze(1)
            chunks = zip(
                reference[scored].split(rows), candidate[scored].split(rows), next_ids.split(rows), strict=True
            )
            drifts = [
                self._drift(reference_chunk, candidate_chunk, head, ids)
                for reference_chunk, candidate_chunk, ids in chunks
            ]
            yield TokenDrift(*(torch.cat(values).double().cpu().numpy() for values in zip(*drifts, strict=True)))

    def _drift(
        self, reference: torch.Tensor, candidate: torch.Tensor, head: torch.Tensor, next_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        p = F.log_softmax(self._logits(reference, self._head), -1)
        q = F.log_softmax(self._logits(candidate, head), -1)
        kl = F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
        same = (p.argmax(-1) == q.argmax(-1)).float()
        return kl, same, p.gather(1, next_ids).squeeze(1), q.gather(1, next_ids).squeeze(1)

    def _logits(self, states: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        out = F.linear(states, head)
        cap = self._softcap
        return out if cap is None else torch.tanh(out / cap) * cap
