"""Training: its operations and cost, and when it pays.

A training that makes requests cheaper (a smaller model, distillation, quantization-aware training) pays when T <= p x N: its cost T
is at most the saving p of one request times the number N of requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TRAINING_FLOPS = 6
"""FLOPs per parameter and training token: 2 forward, 4 backward. Attention scores are not counted (Kaplan et al. 2020)."""
SERVING_FLOPS = 2
"""FLOPs per parameter and served token, prompt or output."""
MFU = 0.4
"""Usual share of the peak that a training reaches. Llama 3 405B on 16,384 H100: 0.38 to 0.43 (Llama team 2024)."""


@dataclass(frozen=True, slots=True)
class Training:
    """One training of a model with `params` parameters on `tokens` tokens."""

    params: float
    tokens: float

    @property
    def flops(self) -> float:
        return TRAINING_FLOPS * self.params * self.tokens

    @property
    def tokens_per_param(self) -> float:
        """Training tokens per parameter. About 20 gives the least loss for its FLOPs (Hoffmann et al. 2022); more is spent to
        make a smaller model as good, which pays by its cheaper requests."""
        return self.tokens / self.params

    @property
    def served_tokens(self) -> float:
        """Tokens served with as many FLOPs as the training took."""
        return self.flops / (SERVING_FLOPS * self.params)

    def device_hours(self, flops_s: float, mfu: float = MFU) -> float:
        """Hours of a device with the peak `flops_s`."""
        return self.flops / (flops_s * mfu) / 3600


@dataclass(frozen=True, slots=True)
class Payback:
    """The rule T <= p x N."""

    training_usd: float
    """T."""
    saved_usd: float
    """p: dollars that each request saves. Not above 0: nothing is saved."""

    @property
    def requests(self) -> float:
        """The number of requests from which on the training pays. Infinite if nothing is saved."""
        return self.training_usd / self.saved_usd if self.saved_usd > 0 else math.inf

    def pays(self, requests: float) -> bool:
        """Whether the training pays for N = `requests`."""
        return self.training_usd <= self.saved_usd * requests
