"""Device drafters under the scheduler: whatever they draft, requests say what they would say without."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.compress.recurrent import RecurrentModule, save_recurrent
from ridgeline.core.draft import NOTHING, Draft
from ridgeline.core.events import StepCounts
from ridgeline.engine.request import Request
from ridgeline.speculation.controller import Controller
from ridgeline.speculation.device import DeviceDrafter, DraftRows
from ridgeline.speculation.draft_model import DraftModel
from ridgeline.speculation.heads import MedusaHeads, tree
from ridgeline.speculation.medusa import Medusa
from ridgeline.speculation.recurrent import UNMEASURED, Recurrent, load_recurrent
from ridgeline.speculation.recycling import Recycling
from ridgeline.speculation.speculator import DeviceTraits, Speculator
from tests.engine.runners import PROMPT, DeviceBench, alone, pair

OPTIONS: dict[str, dict[str, object]] = {
    "greedy": {},
    "warm": {"temperature": 0.9, "seed": 3, "logprobs": 1},
    "filtered": {"temperature": 1.3, "seed": 4, "top_p": 0.8},
    "penalized": {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.3},
}


def drafters(family: str, device: str = "cpu") -> dict[str, tuple[DeviceDrafter, DeviceTraits]]:
    """The target drafting for itself is always right; heads of noise are hardly ever."""
    model = pair(family, device)[1]
    width = model.spec.d_model
    chance = torch.Generator().manual_seed(0)
    tensors = {f"{head}.0.linear.weight": torch.randn(width, width, generator=chance) for head in range(3)}
    tensors |= {f"{head}.0.linear.bias": torch.zeros(width) for head in range(3)}
    heads = MedusaHeads({name: one.to(device) for name, one in tensors.items()}, model.ops)
    medusa = Medusa(heads, model.decoder.logits, 6)
    recycling = Recycling(model.spec.vocab_size, torch.device(device))
    with tempfile.TemporaryDirectory() as name:
        draft = RecurrentModule(model.spec, torch.arange(model.spec.vocab_size - 3), len(model.spec.layers) // 2)
        torch.nn.init.normal_(draft.o_proj.weight, std=0.1)
        save_recurrent(draft, Path(name), model.spec)
        weights = load_recurrent(Path(name), model.spec)
    facts = (weights, model.spec, model.ops, torch.float32, torch.device(device))
    chain = Recurrent(*facts, tree([row[:1] for row in UNMEASURED], 4))
    branching = Recurrent(*facts, tree(UNMEASURED, 9))
    return {
        "recurrent": (chain, DeviceTraits(4, chain.parents)),
        "recurrent-tree": (branching, DeviceTraits(9, branching.parents)),
        "itself": (DraftModel(model), DeviceTraits(3, reads_tokens=True)),
        "medusa": (medusa, DeviceTraits(6, medusa.parents)),
        "recycling": (recycling, DeviceTraits(9, recycling.parents[:9])),
    }


def speculating(family: str, name: str, nodes: tuple[int, ...] | None = None, **facts: object) -> DeviceBench:
    drafter, shape = drafters(family, str(facts.get("device", "cpu")))[name]
    sizes = (0, shape.max_nodes) if nodes is None else nodes
    speculation = Speculator(None, shape, Controller(sizes, fixed=nodes is None))
    return DeviceBench(family, speculation=speculation, drafter=drafter, drafts=sizes, **facts)


@pytest.mark.parametrize(
    ("family", "depth"),
    [
        *(("llama-gqa", 0), ("mistral-window", 1), ("gemma3", 1)),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in (("llama-gqa", 1), ("mistral-window", 0), ("gemma3", 0))
        ),
    ],
)
@pytest.mark.parametrize("name", ["itself", "medusa", "recurrent", "recurrent-tree", "recycling"])
def test_speculated_is_plain(family: str, depth: int, name: str) -> None:
    """In a batch, prompts in chunks, requests that come later; sampled, logged and penalized rows too."""
    bench = speculating(family, name, depth=depth, step_tokens=16)
    given = {one: PROMPT[number:] + PROMPT[: number + 9] for number, one in enumerate(OPTIONS)}
    for one, prompt in given.items():
        bench.submit(one, prompt, **OPTIONS[one])  # type: ignore[arg-type]
        bench.turn()
    bench.submit("late", PROMPT[::-1])
    bench.run()
    for one, prompt in given.items():
        assert bench.tokens[one, 0] == alone(prompt, family, **OPTIONS[one])
    assert bench.tokens["late", 0] == alone(PROMPT[::-1], family)
    assert [one.token for one in bench.logprobs["warm", 0]] == bench.tokens["warm", 0]
    assert bench.scheduler.counts.drafted > 0


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-window", "gemma3"])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_draft_that_is_the_target_is_always_right(family: str, depth: int) -> None:
    """Which holds only if it has read every token, with its own keys where they belong."""
    bench = speculating(family, "itself", depth=depth)
    bench.submit("greedy")
    bench.submit("warm", PROMPT[::-1], temperature=0.9, seed=3)
    bench.run()
    counts = bench.scheduler.counts
    # The last draft of each may reach over the limit.
    assert counts.accepted >= counts.drafted - 2 * 3 > 0


def test_a_draft_model_reads_what_was_said_while_it_was_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes change from step to step, so drafting pauses and goes on."""
    drafter, shape = drafters("llama-gqa")["itself"]
    controller = Controller((0, 1, 3))
    asked = iter([3, 0, 0, 0, 3, 1, 1, 0, 3, 3] * 9)
    monkeypatch.setattr(Controller, "choose", lambda self, rows, most: next(asked))
    bench = DeviceBench(speculation=Speculator(None, shape, controller), drafter=drafter, depth=1)
    bench.submit("one", max_tokens=60)
    bench.run()
    assert bench.tokens["one", 0] == alone(max_tokens=60)
    assert bench.scheduler.counts.accepted >= bench.scheduler.counts.drafted - 3 > 0


@pytest.mark.parametrize("worth", [0, 2])
def test_no_more_is_verified_than_is_worth_it(worth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four nodes that are drafted in every step; the controller learns that the others are never kept."""
    bench, seen, learned = speculating("llama-gqa", "recurrent"), set[int](), list[int]()
    draft, verified, learn = Recurrent.draft, StepCounts.verified, Controller.observe

    def drafted(self: Recurrent, behind: DraftRows, *facts: Any) -> torch.Tensor:
        draft(self, behind, *facts)
        return torch.full((len(behind.rows),), worth, dtype=torch.int32)

    def counted(self: StepCounts, nodes: int, accepted: int) -> None:
        seen.add(nodes)
        verified(self, nodes, accepted)

    def learns(self: Controller, nodes: int, kept: list[int]) -> None:
        learned.append(nodes)
        learn(self, nodes, kept)

    monkeypatch.setattr(Recurrent, "draft", drafted)
    monkeypatch.setattr(StepCounts, "verified", counted)
    monkeypatch.setattr(Controller, "observe", learns)
    bench.submit("one", PROMPT)
    bench.run()
    assert bench.tokens["one", 0] == alone(PROMPT, "llama-gqa")
    assert seen == ({worth} if worth else set()), "fewer only where an answer ends"
    assert set(learned) == {4}, "those that were cut among them"


def test_a_cut_is_forgotten_with_the_draft_it_was_made_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that is cut and never verified, as a host drafter has more to say, leaves the next one whole."""
    bench, learned = speculating("llama-gqa", "recurrent"), list[int]()
    draft, propose, learn = Recurrent.draft, Speculator.propose, Controller.observe
    steps = iter(range(1000))

    def drafted(self: Recurrent, behind: DraftRows, *facts: Any) -> torch.Tensor:
        draft(self, behind, *facts)
        return torch.full((len(behind.rows),), (2, 4, 3)[next(steps) % 3], dtype=torch.int32)

    def proposes(self: Speculator, request: Request, most: int) -> Draft:
        found = propose(self, request, most)
        return NOTHING if len(found.tokens) == 2 else found

    def learns(self: Controller, nodes: int, kept: list[int]) -> None:
        learned.append(nodes)
        learn(self, nodes, kept)

    monkeypatch.setattr(Recurrent, "draft", drafted)
    monkeypatch.setattr(Speculator, "propose", proposes)
    monkeypatch.setattr(Controller, "observe", learns)
    bench.submit("one", PROMPT)
    bench.run()
    assert bench.tokens["one", 0] == alone(PROMPT, "llama-gqa")
    assert len(learned) > 5 and set(learned) == {4}
