"""On a GPU: whatever is drafted, in graphs or not, requests say what the CPU says without drafts."""

from __future__ import annotations

import pytest
import torch

from ridgeline.engine.graph_shapes import draft_limits
from ridgeline.engine.shape import Sizes
from ridgeline.speculation.controller import Controller
from ridgeline.speculation.ngram import NGram
from ridgeline.speculation.speculator import Speculator
from tests.engine.runners import MAX_LEN, PROMPT, DeviceBench, alone, pair
from tests.engine.test_draft_graphs import watch
from tests.engine.test_drafters import OPTIONS, speculating

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("exact_float32"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("family", ["llama-gqa", "gemma3"])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("plain", [False, True], ids=["all-kinds", "plain-draws"])
@pytest.mark.parametrize("name", ["itself", "medusa", "recurrent", "recurrent-tree", "recycling", "eagle", "eagle3"])
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


@pytest.mark.parametrize("rows", [8, 32, 64])
def test_no_step_with_quotes_runs_without_a_graph(rows: int) -> None:
    """Requests come and go, 12 more than there are rows, and their answers stand in a document. The drafter is asked wherever it
    may be."""
    given = {f"r{number}": (PROMPT * 5)[number % 11 : 30 + number % 7] for number in range(rows + 12)}
    lengths = {name: 24 + 3 * (number % 9) for number, name in enumerate(given)}
    said = {name: alone(prompt, max_tokens=lengths[name]) for name, prompt in given.items()}
    sizes, spec = Sizes(rows, 256, MAX_LEN, 2000, host_drafts=11), pair("llama-gqa", "cuda")[1].spec
    quotes = NGram([prompt + said[name] for name, prompt in given.items()], min_chance=0.0)
    speculation = Speculator(quotes, None, Controller((0, 11), fixed=True), draft_limits(sizes, spec))
    bench = DeviceBench(
        "llama-gqa",
        device="cuda",
        depth=1,
        graphs=True,
        rows=rows,
        blocks=2000,
        step_tokens=256,
        speculation=speculation,
        host_drafts=11,
    )
    padded = watch(bench)
    for name, prompt in given.items():
        bench.submit(name, prompt, max_tokens=lengths[name])
    bench.run()
    assert bench.tokens == {(name, 0): tokens for name, tokens in said.items()}
    assert all(padded) and len(padded) > 10
    assert bench.scheduler.counts.accepted > 5 * rows
