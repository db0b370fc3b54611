"""EAGLE heads and MTP layers on a GPU: drafts are the published network's, right drafts are kept, and answers do not change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ridgeline.models.eagle import load_head
from ridgeline.models.eagle_files import read_eagle
from ridgeline.models.hub import shipped_model
from ridgeline.speculation.controller import Controller
from ridgeline.speculation.eagle import Eagle
from ridgeline.speculation.speculator import DeviceTraits, Speculator
from tests.engine.runners import PROMPT, DeviceBench, pair
from tests.speculation.published import save_layout
from tests.speculation.test_eagle import NODES, Recording, case, check_drafts, drafting
from tests.speculation.test_published_heads import check_right_head, said, shipped_spec

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("exact_float32"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("name", ["eagle", "eagle3", "eagle3-speculators"])
def test_drafts_are_those_of_the_published_network(tmp_path: Path, name: str, graphs: bool) -> None:
    """The oracle and the plain answers are the CPU's. In graphs drafts cannot be read, so there answers are compared alone."""
    made, target = case(name), pair("llama-gqa", DEVICE)[1]
    save_layout(tmp_path, name, target.spec)
    head = load_head(read_eagle(tmp_path, target.spec), target, tmp_path)
    drafter = Eagle(head, target) if graphs else Recording(head, target)
    plain = drafting(made)
    speculation = Speculator(None, DeviceTraits(NODES, follows_target=True), Controller((0, NODES), fixed=True))
    facts = {"speculation": speculation, "drafter": drafter, "drafts": (0, NODES), "step_tokens": 32}
    bench = DeviceBench(device=DEVICE, model=target, graphs=graphs, depth=1, **facts)
    for run in (plain, bench):
        run.submit("one", PROMPT * 3, max_tokens=12)
        run.turn()
        run.submit("two", PROMPT[::-1], max_tokens=10, temperature=0.9, seed=3)
        run.run()
    assert bench.tokens == plain.tokens and bench.scheduler.counts.drafted > 0
    if isinstance(drafter, Recording):
        made.drafter.drafts[:] = [draft for draft in drafter.drafts if is_greedy(draft[0])]
        check_drafts(made, 8)


def is_greedy(known: list[int]) -> bool:
    """Whether tokens are of the request that does not sample, whose drafts the oracle knows."""
    return known[: len(PROMPT)] == PROMPT


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("form", ["eagle", "mtp"])
def test_a_head_that_is_right_is_always_kept(tmp_path: Path, form: str, graphs: bool) -> None:
    check_right_head(tmp_path, form, DEVICE, graphs=graphs, depth=1)


def test_answers_of_the_shipped_model(tmp_path: Path) -> None:
    """From the option to the answer, with graphs and the controller."""
    plain = said(shipped_model(), "", DEVICE)
    for layout in ("eagle", "eagle3"):
        folder = save_layout(tmp_path / layout, layout, shipped_spec())
        assert said(shipped_model(), f"eagle:{folder}", DEVICE) == plain
