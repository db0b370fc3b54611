"""Copies between the pool of a GPU and pinned host memory."""

import pytest
import torch

from ridgeline.kv.copies import CudaLink

pytestmark = pytest.mark.gpu
PAGES, BYTES = 96, 1 << 21


def test_pages_leave_before_others_come_to_their_blocks() -> None:
    # More pages than the staging memory holds, in every order; each block's page leaves and another comes at once.
    pool = torch.randint(0, 256, (PAGES, BYTES), dtype=torch.uint8, device="cuda")
    before = pool.cpu()
    leaving = [torch.empty(BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(PAGES)]
    coming = [torch.randint(0, 256, (BYTES,), dtype=torch.uint8).pin_memory() for _ in range(PAGES)]
    out, back = torch.randperm(PAGES).tolist(), torch.randperm(PAGES).tolist()
    refilled = set(out[: PAGES // 2])
    link = CudaLink(pool)
    link.down(out, leaving, refilled)
    blocks = [block for block in back if block in refilled]
    link.up(coming[: len(blocks)], blocks).wait()
    # The step after them: it writes to blocks that were staged.
    pool[torch.tensor(sorted(set(out) - refilled), device="cuda")] = 7
    torch.cuda.synchronize()
    for block, row in zip(out, leaving, strict=True):
        assert torch.equal(row, before[block]), block
    for block, row in zip(blocks, coming, strict=False):
        assert torch.equal(pool[block].cpu(), row), block
