"""Compaction: copies the slots that matter most to fewer pages, for each head of keys and values its own, in plain PyTorch.

All heads keep equally many slots, so that one table serves them. Keys were rotated when they were written, and every kept key
precedes all later queries, so attention needs no positions of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ridgeline.ops.step import KvView
from ridgeline.ops.stored import pages_of

POOL = 7
"""Neighbouring slots whose largest mass each slot gets, so that a chosen slot brings the tokens around it (SnapKV, section 4.2)."""
SINKS = 4
"""First slots that a head with recent slots keeps too."""


def attention_mass(queries: torch.Tensor, keys: torch.Tensor, view: KvView) -> torch.Tensor:
    """Attention that each slot gets from the last tokens: float32 [kv_heads, slots].

    Args:
        queries: [W, heads, d], rotated, of the tokens in the last W slots.
        keys: [kv_heads, slots, d], rotated.
    """
    count, slots = len(queries), keys.shape[1]
    grouped = queries.float().unflatten(1, (len(keys), -1)).permute(1, 2, 0, 3)
    scores = grouped @ keys.float().unsqueeze(1).transpose(2, 3) * view.scale
    if view.softcap is not None:
        scores = torch.tanh(scores / view.softcap) * view.softcap
    place = torch.arange(slots, device=keys.device)
    later = place > place[slots - count :].unsqueeze(1)
    return scores.masked_fill(later, -torch.inf).softmax(-1).sum((1, 2))


def choose(mass: torch.Tensor, candidates: int, count: int, share: float = 0.0) -> torch.Tensor:
    """The `count` slots that each head keeps among the first ones, in order: int64 [kv_heads, count]. Those of most mass; with a
    share, those of the head's policy."""
    order = slots_needed(mass, candidates, share)[1] if share else _by_mass(mass, candidates)
    return order[:, :count].sort(dim=1).values


def _by_mass(mass: torch.Tensor, candidates: int) -> torch.Tensor:
    """The first slots of each head in the order of their mass, int64 [kv_heads, candidates]. Neighbours have the same largest mass;
    the stable order takes the earlier one on every device, which topk does not."""
    pooled = F.max_pool1d(mass[:, :candidates], POOL, stride=1, padding=POOL // 2)
    return pooled.argsort(dim=1, descending=True, stable=True)


def slots_needed(mass: torch.Tensor, candidates: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of the first slots each head needs to keep a share of its mass, int64 [kv_heads], and these slots in the order in
    which its policy takes them, int64 [kv_heads, candidates].

    Each head has the policy that needs fewest, after FastGen (Ge et al. 2023, arXiv:2310.01801): the first and the most recent
    slots, or those of most mass. The slots after the candidates are kept.
    """
    place = torch.arange(candidates, device=mass.device)
    recent = torch.cat((place[:SINKS], place[SINKS:].flip(0)))
    most = _by_mass(mass, candidates)
    orders = torch.stack((recent.expand_as(most), most))
    # Mass that is lost if a slot and those after it in the order go.
    lost = mass[:, :candidates].expand_as(orders).gather(2, orders).flip(2).cumsum(2).flip(2)
    needed = (lost >= (1 - share) * mass.sum(1, keepdim=True)).sum(2)
    return needed.amin(0), torch.where((needed[0] <= needed[1]).unsqueeze(1), orders[0], orders[1])


def keys_of(view: KvView, pages: torch.Tensor, slots: int) -> torch.Tensor:
    """The keys [kv_heads, slots, d] in the first slots of these pages."""
    return pages_of(view, pages)[:, 0].transpose(0, 1).flatten(1, 2)[:, :slots]


def move(part: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, kept: torch.Tensor) -> None:
    """Fill the target pages with the kept slots of the source pages. part: keys and values, or their scales, [pages, 2, kv_heads,
    page_tokens, width]. kept: from `choose`."""
    stored = part.view(torch.uint8)  # PyTorch does not index tensors of e4m3 on every device
    slots = stored[sources].permute(1, 2, 0, 3, 4).flatten(2, 3)
    chosen = slots.gather(2, kept[None, :, :, None].expand(2, -1, -1, slots.shape[-1]))
    stored[targets] = chosen.unflatten(2, (len(targets), -1)).permute(2, 0, 1, 3, 4)
