"""On a GPU: whatever is drafted, in graphs or not, requests say what the CPU says without drafts."""

from __future__ import annotations

import pytest
import torch

from tests.engine.runners import PROMPT, alone
from tests.engine.test_drafters import OPTIONS, speculating

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def exact_float32():
    """TF32 would move logits by shape."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("family", ["llama-gqa", "gemma3"])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("plain", [False, True], ids=["all-kinds", "plain-draws"])
@pytest.mark.parametrize("name", ["itself", "medusa", "recurrent", "recurrent-tree", "recycling"])
def test_speculated_is_plain(family: str, graphs: bool, plain: bool, name: str) -> None:
    """Plain draws run in the graphs of steps with drafts, the others beside them."""
    kinds = (
        {name: OPTIONS[name] for name in ("greedy",)} | {"warm": {"temperature": 0.9, "seed": 3}} if plain else OPTIONS
    )
    bench = speculating(family, name, device="cuda", depth=1, graphs=graphs, step_tokens=32)
    given = {kind: PROMPT[number:] + PROMPT[: number + 9] for number, kind in enumerate(kinds)}
    for kind, prompt in given.items():
        bench.submit(kind, prompt, **kinds[kind])  # type: ignore[arg-type]
        bench.turn()
    bench.run()
    for kind, prompt in given.items():
        assert bench.tokens[kind, 0] == alone(prompt, family, **kinds[kind])
    counts = bench.scheduler.counts
    assert counts.drafted > 0
    if name == "itself" and plain:
        assert counts.accepted >= counts.drafted - 2 * 3
