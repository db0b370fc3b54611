"""Acceptance of drafts: how many drafts of a step are kept. Pure functions.

A deterministic drafter proposes token d with probability 1. The rule of Leviathan et al. (2023, section 2.3) and Chen et al. (2023,
algorithm 2) then keeps d with probability min(1, p(d) / 1) = p(d), and after a rejection draws from p without d, renormalized.
Drawing y from p once, keeping d if y = d and returning y otherwise, has the same distribution: P(y = d) = p(d), and y given y != d
follows p without d. It also makes speculation exact: the draw is the one that decoding without speculation makes at that position
(ops.noise), so tokens are equal, not only their distribution. For greedy rows it is the exact match.

A drafter that samples uses the same noise: given the noise its proposal is a fixed token, and the rule is the one above. Draft and
target then agree wherever their perturbed logits have the same largest entry.

In a tree the target draws once after every node, with the noise of the node's position, which nodes of one depth share. From the
root the path continues at the child that equals the draw. Siblings differ, so the path is unique, and its tokens are again those of
decoding without speculation.
"""

from __future__ import annotations

import torch

from ridgeline.ops.rows import Drafted, Int, RowState, ends, move


def accept(drawn: torch.Tensor, drafts: torch.Tensor, n_draft: torch.Tensor) -> torch.Tensor:
    """Accepted drafts of chains per row, int32 [S]: the longest prefix of drafts that equals the drawn tokens.

    drawn: int32 [S, K + 1], a token drawn from the target after each of 0 .. K drafts. drafts: int32 [S, K]. n_draft:
    int32 [S], number of drafts of the row. The row gains drawn[:, : accepted + 1].
    """
    place = torch.arange(drafts.shape[1], device=drafts.device, dtype=torch.int32)
    right = (drawn[:, :-1] == drafts) & (place < n_draft.unsqueeze(1))
    return right.int().cumprod(dim=1).sum(dim=1).int()


def accept_path(
    drawn: torch.Tensor, drafts: torch.Tensor, n_draft: torch.Tensor, parent: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepted drafts of trees per row, int32 [S], and the path to them, int64 [S, K + 1]: its nodes from the root on. Node 0 is
    the last known token and node i the i-th draft. Entries after the path are undefined.

    drawn: int32 [S, K + 1], the draw after each node. drafts: int32 [S, K]. n_draft: int32 [S]. parent: int64 [S, K + 1], parent of
    each node, which precedes it; 0 for the root. The row gains drawn at path[:, : accepted + 1].
    """
    nodes = parent.shape[1]
    place = torch.arange(nodes, device=drafts.device, dtype=torch.int32)
    right = torch.ones(parent.shape, dtype=torch.bool, device=drafts.device)
    right[:, 1:] = drawn.gather(1, parent)[:, 1:] == drafts
    right &= place <= n_draft.unsqueeze(1)
    # A node is on the path if it and all its ancestors match. Each round doubles the number of ancestors covered.
    above = parent
    for _ in range((nodes - 1).bit_length()):
        right = right & right.gather(1, above)
        above = above.gather(1, above)
    depth = right.cumsum(dim=1) - 1
    path = parent.new_zeros(len(parent), nodes + 1)
    path.scatter_(1, torch.where(right, depth, nodes), place.long().expand_as(parent))
    return depth[:, -1].int(), path[:, :nodes]


def until_end(ends: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
    """Tokens a row gains, int32 [S]: accepted + 1, or fewer if one of them ends the request (it is the last one).

    ends: bool [S, K + 1], whether each drawn token is a stop or reaches the limit.
    """
    open_before = ends.int().cumsum(dim=1) - ends.int() == 0
    place = torch.arange(ends.shape[1], device=ends.device, dtype=torch.int32)
    return (open_before & (place <= accepted.unsqueeze(1))).sum(dim=1).int()


def verify(
    state: RowState, rows: torch.Tensor, drawn: torch.Tensor, drafted: Drafted
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Verify the drafts of device rows int32 [S] and append the tokens drawn along the accepted path. Rows that are done do not
    change. drawn int32 [N]: one token for each row of logits that `drafted` describes.

    Returns: int32 [S, 2 + columns]: tokens gained, flag, those tokens. For trees int32 [S, 2 + 3 columns]: also the token drawn
    after each node, and the path. The path is also the second result, int64 [S, columns]; None for chains. Entries after a row's
    tokens are undefined.
    """
    columns, n_draft, parent = drafted.columns, drafted.count, drafted.parent
    node = torch.arange(columns, dtype=torch.int32, device=rows.device)
    drawn = drawn[drafted.first.unsqueeze(1) + torch.minimum(node, n_draft.unsqueeze(1))]
    ints, row_index = state.ints.index_select(0, rows), rows.unsqueeze(1)
    place = ints[:, Int.KNOWN].unsqueeze(1) + node
    at = (row_index * state.tokens.shape[1] + place).long().flatten()
    # Read the drafts before the drawn tokens overwrite them: both use the same places.
    drafts = state.tokens.view(-1).index_select(0, at).view(-1, columns)[:, :-1]
    tokens, path = drawn, None
    if parent is None:
        accepted = accept(drawn, drafts, n_draft)
    else:
        accepted, path = accept_path(drawn, drafts, n_draft, parent)
        tokens = drawn.gather(1, path)
    live = 1 - ints[:, Int.DONE]
    flags = ends(state, row_index.expand(-1, columns).flatten(), place.flatten(), tokens.flatten()).view(-1, columns)
    count = until_end(flags > 0, accepted).mul_(live)
    flag = flags.gather(1, (count - 1).clamp(min=0).long().unsqueeze(1)).squeeze(1) * live
    state.tokens.view(-1).index_copy_(0, at, tokens.flatten())
    move(state, rows, count, flag)
    packed = [torch.stack((count, flag), dim=1), tokens]
    if path is not None:
        packed += [drawn, path.int()]
    return torch.cat(packed, dim=1), path
