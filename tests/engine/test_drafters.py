"""Device drafters under the scheduler: whatever they draft, requests say what they would say without."""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Iterable, Sequence
from itertools import cycle, repeat
from pathlib import Path

import pytest
import torch

from ridgeline.compress.recurrent import RecurrentModule, save_recurrent
from ridgeline.core.cost import step_work
from ridgeline.core.draft import EMPTY_DRAFT, Draft
from ridgeline.core.drafting import FollowingDrafts, NetworkDrafts
from ridgeline.core.events import StepCounts
from ridgeline.core.plan import StepPlan
from ridgeline.core.spec import DTYPE_BYTES
from ridgeline.models.eagle import load_head
from ridgeline.models.eagle_files import read_eagle
from ridgeline.speculation.controller import Controller
from ridgeline.speculation.device import DeviceDrafter, DraftRows, Views
from ridgeline.speculation.draft_model import DraftModel
from ridgeline.speculation.eagle import Eagle
from ridgeline.speculation.heads import MedusaHeads, tree
from ridgeline.speculation.interface import RequestView
from ridgeline.speculation.medusa import Medusa
from ridgeline.speculation.recurrent import UNMEASURED, Recurrent, load_recurrent
from ridgeline.speculation.recycling import Recycling
from ridgeline.speculation.speculator import DeviceTraits, Speculator
from tests.combinations import crossed
from tests.engine.runners import PROMPT, DeviceBench, alone, pair
from tests.speculation.published import eagle, eagle3, save_head

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
    heads = MedusaHeads({name: tensor.to(device) for name, tensor in tensors.items()}, model.ops)
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
    with tempfile.TemporaryDirectory() as name:
        heads_of = [
            save_head(Path(name) / str(at), made) for at, made in enumerate((eagle(model.spec), eagle3(model.spec)))
        ]
        first, third = (Eagle(load_head(read_eagle(at, model.spec), model, at), model) for at in heads_of)
    return {
        "eagle": (first, DeviceTraits(4, follows_target=True)),
        "eagle3": (third, DeviceTraits(3, follows_target=True)),
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


class Scripted(Controller):
    """A controller that asks for given numbers of nodes, and notes of how many it learns."""

    def __init__(self, sizes: Sequence[int], asked: Iterable[int] | None = None) -> None:
        super().__init__(tuple(sizes), fixed=asked is None)
        self._asked = None if asked is None else iter(asked)
        self.learned: list[int] = []

    def choose(self, rows: int, most: int) -> int:
        return super().choose(rows, most) if self._asked is None else next(self._asked)

    def observe(self, nodes: int, kept: list[int]) -> None:
        self.learned.append(nodes)
        super().observe(nodes, kept)


class Judged(DeviceDrafter):
    """The recurrent draft, whose draft of each step is worth verifying to the given number of nodes."""

    def __init__(self, inner: DeviceDrafter, worth: Iterable[int]) -> None:
        self._inner, self._worth = inner, iter(worth)
        self.layers, self.attended, self.parents = inner.layers, inner.attended, inner.parents

    def draft(self, behind: DraftRows, count: int, views: Views) -> torch.Tensor:
        self._inner.draft(behind, count, views)
        return torch.full((len(behind.rows),), next(self._worth), dtype=torch.int32)


class Noted(StepCounts):
    """seen: numbers of nodes that were verified."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def verified(self, drafted: int, accepted: int) -> None:
        self.seen.add(drafted)
        super().verified(drafted, accepted)


class Partly(Speculator):
    """Drops drafts of two nodes, as if a host drafter had more to say and that came to nothing."""

    def propose(self, request: RequestView, nodes: int) -> Draft:
        drafts = super().propose(request, nodes)
        return EMPTY_DRAFT if len(drafts.tokens) == 2 else drafts


PLACES = (
    *(("llama-gqa", 0), ("mistral-window", 1), ("gemma3", 1), ("windows-shared", 1)),
    *(("llama-gqa", 1), ("mistral-window", 0), ("gemma3", 0)),
)
"""Families and numbers of steps in flight. The first four are quick."""
DRAFTING = ("itself", "medusa", "eagle3", "recurrent-tree", "recycling", "recurrent", "eagle")
"""The first five are quick: the last two are of the same classes as others."""


@pytest.mark.parametrize(
    ("place", "name"),
    crossed(
        PLACES,
        DRAFTING,
        quick=lambda place, name: name < 5 and place == name % 4,
    ),
)
def test_speculated_is_plain(place: tuple[str, int], name: str) -> None:
    """In a batch, prompts in chunks, requests that come later; sampled, logged and penalized rows too."""
    family, depth = place
    bench = speculating(family, name, depth=depth, step_tokens=16)
    given = {kind: PROMPT[number:] + PROMPT[: number + 9] for number, kind in enumerate(OPTIONS)}
    for kind, prompt in given.items():
        bench.submit(kind, prompt, **OPTIONS[kind])  # type: ignore[arg-type]
        bench.turn()
    bench.submit("late", PROMPT[::-1])
    bench.run()
    for kind, prompt in given.items():
        assert bench.tokens[kind, 0] == alone(prompt, family, **OPTIONS[kind])
    assert bench.tokens["late", 0] == alone(PROMPT[::-1], family)
    assert [logprob.token for logprob in bench.logprobs["warm", 0]] == bench.tokens["warm", 0]
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


def test_a_draft_model_reads_what_was_said_while_it_was_off() -> None:
    """Sizes change from step to step, so drafting pauses and goes on."""
    drafter, shape = drafters("llama-gqa")["itself"]
    controller = Scripted((0, 1, 3), [3, 0, 0, 0, 3, 1, 1, 0, 3, 3] * 9)
    bench = DeviceBench(speculation=Speculator(None, shape, controller), drafter=drafter, depth=1)
    bench.submit("one", max_tokens=60)
    bench.run()
    assert bench.tokens["one", 0] == alone(max_tokens=60)
    assert bench.scheduler.counts.accepted >= bench.scheduler.counts.drafted - 3 > 0


def judged(worth: Iterable[int], speculator: type[Speculator] = Speculator) -> tuple[DeviceBench, Scripted]:
    """A bench whose recurrent draft has four nodes in every step, and its controller."""
    drafter, shape = drafters("llama-gqa")["recurrent"]
    controller = Scripted((0, shape.max_nodes))
    speculation = speculator(None, shape, controller)
    return DeviceBench(speculation=speculation, drafter=Judged(drafter, worth), drafts=controller.sizes), controller


@pytest.mark.parametrize("worth", [0, 2])
def test_no_more_is_verified_than_is_worth_it(worth: int) -> None:
    """Of four nodes that are drafted in every step; the controller learns that the others are never kept."""
    bench, controller = judged(repeat(worth))
    bench.scheduler.counts = counts = Noted()
    bench.submit("one", PROMPT)
    bench.run()
    assert bench.tokens["one", 0] == alone(PROMPT, "llama-gqa")
    assert counts.seen == ({worth} if worth else set()), "fewer only where an answer ends"
    assert set(controller.learned) == {4}, "those that were cut among them"


def test_a_cut_is_forgotten_with_the_draft_it_was_made_to() -> None:
    """A draft that is cut and never verified, as a host drafter has more to say, leaves the next one whole."""
    bench, controller = judged(cycle((2, 4, 3)), Partly)
    bench.submit("one", PROMPT)
    bench.run()
    assert bench.tokens["one", 0] == alone(PROMPT, "llama-gqa")
    assert len(controller.learned) > 5 and set(controller.learned) == {4}


def test_drafters_state_their_work() -> None:
    """For two rows that draw: FLOPs of all products and of attention, and the weights that passes read."""
    known, spec = drafters("llama-gqa"), pair("llama-gqa", "cpu")[1].spec
    plan = StepPlan(1, n_query=array("i", [1, 1]), n_draft=array("i", [0, 0]), samples=array("b", [1, 1]), ahead=3)
    plan.unread = array("i", [1, 1])
    work = {name: drafter.work.of(plan, [30, 40]) for name, (drafter, _) in known.items()}
    passes = [step_work(spec, [(28, 2), (38, 2)]), *[step_work(spec, [(29, 1), (39, 1)])] * 2]
    assert work["itself"] == (sum(step.flops for step in passes), sum(step.bytes for step in passes))
    assert work["recycling"] == (0, 0)
    chain = known["recurrent"][0]
    assert isinstance(chain, Recurrent) and isinstance(chain.work, NetworkDrafts)
    attention = spec.layers[chain.attended[0]].attention_flops(0, 1) * 70
    assert work["recurrent"][0] == 3 * (2 * 2 * chain.work.elements + attention)
    assert chain.work.stored_bytes < chain.work.elements * 2 < work["recurrent"][1], "8 bits, read once for each level"
    head, _ = known["eagle"]
    assert isinstance(head.work, FollowingDrafts)
    width, [layer] = spec.d_model, head.layers
    heads, pairs = layer.n_heads * layer.head_dim, 2 * layer.n_kv_heads * layer.head_dim
    read = 2 * width**2 + (heads + pairs) * width
    node = read + width * heads + 3 * width * layer.d_ff + spec.embedding_params
    attention = 3 * layer.attention_flops(0, 1) * 70
    assert work["eagle"][0] == 2 * 2 * (read + 3 * node) + attention, "every token is read, and three nodes are drafted"
    plan.ahead = 0
    idle = {name: drafter.work.of(plan, [30, 40]) for name, (drafter, _) in known.items()}
    assert idle.pop("eagle") == (2 * 2 * read, read * DTYPE_BYTES[spec.dtype]) and idle.pop("eagle3")[0] > 0
    assert {*idle.values()} == {(0, 0)}


def test_medusa_heads_state_their_work() -> None:
    """Two heads of a single block share the target's head: all run once for a draft."""
    model = pair("llama-gqa", "cpu")[1]
    width, head = model.spec.d_model, model.spec.embedding_params
    tensors = {f"{number}.0.linear.weight": torch.zeros(width, width) for number in range(2)}
    tensors |= {f"{number}.0.linear.bias": torch.zeros(width) for number in range(2)}
    work = MedusaHeads(tensors, model.ops).work([0, 0, 1], model.spec)
    plan = StepPlan(1, n_query=array("i", [1]), n_draft=array("i", [0]), samples=array("b", [1]), ahead=3)
    stored = (2 * width**2 + head) * DTYPE_BYTES[model.spec.dtype]
    assert work.of(plan, [9]) == (2 * 2 * (width**2 + head), stored)
    plan.ahead = 2
    assert work.of(plan, [9]) == (2 * (width**2 + head), stored), "the second head is not needed"
