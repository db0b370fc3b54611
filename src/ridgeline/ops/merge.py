"""Attention over a set of keys from attention over its parts: for keys on several devices, shared prefixes, offloaded keys.

`AttentionOps.attend` computes a part as a row of its own. The row's table begins with the part's first page, `length` counts the
part's slots, and positions are relative to the part's first slot. A query token after the part is a row of one
query token, because it sees all of the part. `length` is 0 where a query token sees no slot of the part, for example where the
complete part is outside its window. Each slot belongs to one part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.table import Attend


def merge_attention(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine attention over disjoint sets of keys.

        lse = log(sum_i exp(lse_i)),  out = sum_i exp(lse_i - lse) * out_i

    Args:
        parts: at least one (out [T, Hq, d], normalised over its own keys; lse float32 [T, Hq], natural logarithm). Where lse
            is -inf, the part has no keys, and its out must be finite.
    Returns:
        out [T, Hq, d] in the first part's dtype, summed in float32, and lse float32 [T, Hq]; 0 and -inf where no part has keys.
    Source: FlashAttention-2 (Dao 2023, arXiv:2307.08691), section 3.1; between devices Ring Attention (Liu et al. 2023,
        arXiv:2310.01889).
    """
    each = torch.stack([lse for _, lse in parts])
    lse = torch.logsumexp(each, 0)
    weights = torch.exp(each - lse.masked_fill(lse == float("-inf"), 0.0)).unsqueeze(-1)
    out = weights[0] * parts[0][0]
    for weight, (part, _) in zip(weights[1:], parts[1:], strict=True):
        out.addcmul_(weight, part.float())
    return out.to(parts[0][0].dtype), lse


def with_sinks(attend: Attend, sinks: torch.Tensor) -> Attend:
    """`attend` with a logit for each query head that joins the softmax's sum and has no value (gpt-oss).

    The output is that of attention without the sink, times the keys' share of the sum: exp(lse) / (exp(lse) + exp(sink)). So every
    device's attention serves, with every KV format, window and draft tree. sinks: [Hq].
    """

    def attend_with_sinks(
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        view: KvView,
        step: StepInputs,
        lse_needed: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        out, lse = attend(q, k, v, view, step, True)
        assert lse is not None
        logits = sinks.to(lse.dtype)
        share = torch.sigmoid(lse - logits).unsqueeze(-1)
        return (out * share).to(out.dtype), torch.logaddexp(lse, logits) if lse_needed else None

    return attend_with_sinks
