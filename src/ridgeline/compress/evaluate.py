"""What a compressed model says of given texts beside its original: exact, from all logits, with memory for one layer.

`ridgeline compare` measures what is served; this needs no engine, works for models that do not fit, and knows numbers that
nothing serves yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F

from ridgeline.compress.walk import CPU, Model, Streams, Walk, batches
from ridgeline.quality.drift import Drift, TokenDrift, by_document, measure
from ridgeline.quality.texts import Window

PIECE_BYTES = 64 << 20
"""Most bytes of one model's logits at a time."""


class Judge:
    """A reference and texts; candidates are held against what the reference says of them. device: where layers run."""

    def __init__(
        self,
        reference: Model,
        windows: Sequence[Window],
        progress: Callable[[int], None] = lambda _: None,
        device: torch.device = CPU,
    ) -> None:
        self._device = device
        self._windows = windows
        self._ids = batches([one.ids for one in windows])
        self._reference = self._states(reference, progress)
        self._head, self._softcap = reference.head().to(device), reference.spec.final_softcap

    def measure(self, candidate: Model, progress: Callable[[int], None] = lambda _: None) -> Drift:
        """Drift of the candidate from the reference, KL over the whole vocabulary."""
        states = self._states(candidate, progress)
        head = candidate.head().to(self._device)
        parts = list(self._compare(states, head))
        return measure(by_document(parts, [one.document for one in self._windows]))

    def _states(self, model: Model, progress: Callable[[int], None]) -> Streams:
        """Final states [T, d_model] of each window."""
        walk = Walk(model.spec, max(len(one.ids) for one in self._windows), self._device)
        return [row for rows in walk.states(model, self._ids, progress) for row in rows]

    @torch.inference_mode()
    def _compare(self, states: Streams, head: torch.Tensor) -> Iterator[TokenDrift]:
        rows = max(1, PIECE_BYTES // (4 * head.shape[0]))
        for window, ours, theirs in zip(self._windows, self._reference, states, strict=True):
            # The state before a token says what it thinks of it.
            scored = slice(window.first - 1, len(window.ids) - 1)
            following = torch.tensor(window.ids[window.first :], device=self._device).unsqueeze(1)
            pieces = zip(ours[scored].split(rows), theirs[scored].split(rows), following.split(rows), strict=True)
            found = [self._piece(one, other, head, ids) for one, other, ids in pieces]
            yield TokenDrift(*(torch.cat(values).double().cpu().numpy() for values in zip(*found, strict=True)))

    def _piece(
        self, ours: torch.Tensor, theirs: torch.Tensor, head: torch.Tensor, following: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        p = F.log_softmax(self._logits(ours, self._head), -1)
        q = F.log_softmax(self._logits(theirs, head), -1)
        kl = F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
        same = (p.argmax(-1) == q.argmax(-1)).float()
        return kl, same, p.gather(1, following).squeeze(1), q.gather(1, following).squeeze(1)

    def _logits(self, states: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        out = F.linear(states, head)
        cap = self._softcap
        return out if cap is None else torch.tanh(out / cap) * cap
