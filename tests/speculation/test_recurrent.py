"""Recurrent drafts: what is trained is what drafts, compiled or not, and folders that do not fit are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline.compress.decoder import TrainableDecoder, load_decoder
from ridgeline.compress.distill import LossWeights
from ridgeline.compress.generate import generate
from ridgeline.compress.recurrent import (
    DEPTH,
    OFF_PATH_WEIGHT,
    RecurrentModule,
    recurrent_losses,
    save_recurrent,
    teacher_targets,
)
from ridgeline.core.errors import ConfigError
from ridgeline.core.spec import LayerSpec, ModelSpec, Rope
from ridgeline.models.config import read_model
from ridgeline.models.hub import shipped_model
from ridgeline.models.rope import rope_table
from ridgeline.ops import native_cpu
from ridgeline.ops.native_recurrent import NativeRecurrent
from ridgeline.ops.noise import Purpose, draw_key, exponential
from ridgeline.ops.reference import INT_REFERENCE, REFERENCE
from ridgeline.ops.rows import Int, RowState
from ridgeline.ops.step import KvView
from ridgeline.ops.table import DraftCut, Ops, Programs
from ridgeline.speculation.device import DraftRows
from ridgeline.speculation.heads import Candidate, tree
from ridgeline.speculation.recurrent import UNMEASURED, UNMEASURED_CUT, Recurrent, load_recurrent
from ridgeline.text.tokenizer import Tokenizer
from tests.combinations import crossed

LAYER = LayerSpec(4, 2, 16, 64, Rope(dim=16))
SPEC = ModelSpec("LlamaForCausalLM", 60, 96, (LAYER, LAYER), 512, tied=True)
CPU = torch.device("cpu")
KNOWN = (2, 3, 40, 333)
PAGE, PAGES = 16, 32
HELD_OUT = Path(__file__).parents[1] / "data" / "heldout.jsonl"
UNSAID = 1
"""What rows hold behind what they know; no draft says it."""
CUT = DraftCut(node_cost=0.08, min_chance=0.15, sizes=(2, 5))
ROUNDED = 0.02
"""What a draw may lack of the best logit, on the mean over rows, where inputs are rounded to 8 bits (0.005 is what it does)."""
COUNT = 5
CHAIN = tuple(Candidate(node - 1, node, 0) for node in range(COUNT))
TREE = tree(UNMEASURED, 12)


def module(seed: int = 0) -> RecurrentModule:
    torch.manual_seed(seed)
    draft = RecurrentModule(SPEC, torch.arange(0, 60, 2), 1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return draft


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_recurrent(module(), tmp_path, SPEC)
    return tmp_path


def drafter(
    folder: Path, ops: Ops, dtype: torch.dtype = torch.float32, nodes: tuple[Candidate, ...] = CHAIN
) -> Recurrent:
    return Recurrent(replace(load_recurrent(folder, SPEC), cut=CUT), SPEC, ops, dtype, CPU, nodes)


def rows(seed: int = 0) -> tuple[RowState, torch.Tensor, torch.Tensor]:
    """A row for each of KNOWN behind the scratch row, the hidden states they begin with, and a layer's cache."""
    chance = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 60, (len(KNOWN) + 1, 512), generator=chance, dtype=torch.int32)
    ints = torch.zeros(len(KNOWN) + 1, 14, dtype=torch.int32)
    ints[1:, Int.KNOWN] = torch.tensor(KNOWN)
    ints[1:, Int.LENGTH] = torch.tensor(KNOWN) - 1
    ints[:, Int.KEY] = torch.arange(len(KNOWN) + 1)
    for row, known in enumerate(KNOWN):
        tokens[row + 1, known:] = UNSAID
    hidden = torch.randn(len(KNOWN), SPEC.d_model, generator=chance)
    kv = torch.randn(1 + len(KNOWN) * PAGES, 2, LAYER.n_kv_heads, PAGE, LAYER.head_dim, generator=chance)
    count = 1 + torch.randperm(len(KNOWN) * PAGES, generator=chance).view(len(KNOWN), PAGES)
    tables = torch.cat((torch.zeros(1, PAGES, dtype=torch.int32), count.int())).unsqueeze(0)
    return RowState(tokens, ints, tables, PAGE), hidden, kv


def held(row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that a row has written, [1, kv_heads, KNOWN - 1, head_dim] each."""
    state, _, kv = rows()
    pages = kv[state.tables[0, row + 1].long()].permute(1, 2, 0, 3, 4).flatten(2, 3)
    return pages[0, None, :, : KNOWN[row] - 1], pages[1, None, :, : KNOWN[row] - 1]


def following(draft: RecurrentModule, state: torch.Tensor, tokens: torch.Tensor, depth: int) -> torch.Tensor:
    """The module's next states of all rows, [len(KNOWN), d_model]; depth: tokens drafted so far."""
    turn, result = rope_table(LAYER.rope, 600, CPU), []
    for row, (item, token) in enumerate(zip(state, tokens, strict=True)):
        (k, v), chains = held(row), KNOWN[row] - 1
        wide = item.expand(1, chains, -1), token.expand(1, chains)
        result.append(draft(*wide, k, v, turn[depth + 1 : depth + 1 + chains])[0, -1])
    return torch.stack(result)


def drafted(
    recurrent: Recurrent,
    temperature: float,
    dtype: torch.dtype = torch.float32,
    count: int = COUNT,
    alone: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What it drafts for each row, or for one alone, int32 [rows, count], and what of it is worth verifying; nothing else of the
    rows may change."""
    state, hidden, kv = rows()
    kv = kv.to(dtype)
    before, asked = state.tokens.clone(), range(len(KNOWN)) if alone is None else (alone,)
    each = torch.tensor(asked, dtype=torch.int32) + 1
    # A column, as rows have it.
    temperatures = torch.full((len(KNOWN) + 1, 3), temperature)[:, 0]

    def views(slots: torch.Tensor) -> list[KvView]:
        return [KvView(kv, state.tables[0], slots[0], None, None, SPEC.scale_of(LAYER))]

    worth = recurrent.draft(
        DraftRows(state, each, temperatures, hidden[list(asked)].to(dtype), 512, temperature == 0), count, views
    )
    stacked = torch.stack([state.tokens[row + 1, KNOWN[row] : KNOWN[row] + count] for row in asked])
    for row, said in zip(asked, stacked, strict=True):
        before[row + 1, KNOWN[row] : KNOWN[row] + count] = said
    assert torch.equal(state.tokens, before)
    return stacked, worth


def scored(
    draft: RecurrentModule, nodes: tuple[Candidate, ...], tensor: torch.Tensor, temperature: float
) -> list[torch.Tensor]:
    """The perturbed logits [rows, outputs] that each node of a drafted tree was drawn from, with the noise of its place."""
    state, hidden, _ = rows()
    states, every = {-2: hidden}, []
    said = {-1: torch.tensor([int(state.tokens[row + 1, known - 1]) for row, known in enumerate(KNOWN)])}
    for at, node in enumerate(nodes):
        if node.parent not in states:
            above = -2 if node.parent < 0 else nodes[node.parent].parent
            states[node.parent] = following(draft, states[above], said[node.parent], node.head)
        place = torch.tensor(KNOWN, dtype=torch.int32) + node.head
        keys = draw_key(state.ints[1:, Int.KEY : Int.KEY + 2], place, Purpose.TOKEN)
        every.append(draft.lm_head(states[node.parent]) - temperature * exponential(keys, draft.ids.int()).log())
        said[at] = tensor[:, at].long()
    return every


def trained(folder: Path) -> RecurrentModule:
    """The module with the weights that are left in 4 bits."""
    actual = module()
    actual.load(load_recurrent(folder, SPEC))
    return actual


@torch.no_grad()
def test_what_drafts_is_what_was_trained(folder: Path) -> None:
    """Greedy chains of the module."""
    draft, (state, now, _) = trained(folder), rows()
    tokens = torch.tensor([int(state.tokens[row + 1, known - 1]) for row, known in enumerate(KNOWN)])
    for depth, wanted in enumerate(drafted(drafter(folder, REFERENCE), 0.0)[0].T):
        now = following(draft, now, tokens, depth)
        logits = draft.lm_head(now)
        actual = logits.gather(1, wanted.long().unsqueeze(1) // 2)
        assert bool((actual >= logits.max(1, keepdim=True).values - 1e-4).all()), "the likeliest, up to rounding"
        tokens = wanted.long()


def test_what_it_learns_from() -> None:
    """Its loss at each place is that of the teacher's distribution behind the tokens of the chain, by how likely a draft is to get
    there: the chance that a token of the text is drafted where the teacher has drawn it, or OFF_PATH_WEIGHT."""
    torch.manual_seed(2)
    teacher, draft = TrainableDecoder(SPEC), module()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    text = torch.randint(0, 60, (2, 20))
    losses = recurrent_losses(draft, teacher, text, LossWeights(logits=0, overlap=1, temperature=0.8))
    cache = teacher.cache(*text.shape)
    hidden, turn = teacher.hidden(text, cache), rope_table(LAYER.rope, 20, CPU)
    p = (teacher.logits(hidden) / 0.8).softmax(-1)[..., draft.ids]
    refused = torch.zeros(DEPTH, 2, 20 - DEPTH)
    for start in range(20 - DEPTH):
        # All chains but the last one stand in for others: it sees the keys of the tokens up to its own.
        now, k, v = hidden[:, start], cache[1].k[:, :, : start + 1], cache[1].v[:, :, : start + 1]
        reached = torch.ones(2)
        for depth, at in enumerate(range(start + 1, start + 1 + DEPTH)):
            expand = turn[at].expand(start + 1, -1, -1)
            now = draft(now[:, None].expand(-1, start + 1, -1), text[:, at, None].expand(-1, start + 1), k, v, expand)[
                :, -1
            ]
            q = (draft.lm_head(now) / 0.8).softmax(-1)
            refused[depth, :, start] = reached * (1 - torch.minimum(p[:, at], q).sum(-1))
            if at + 1 < 20:
                said = text[:, at + 1, None] == draft.ids  # odd tokens are never drafted
                right = torch.where(said, (q / p[:, at]).clamp(max=1), 0).sum(-1)
                reached = reached * (OFF_PATH_WEIGHT + (1 - OFF_PATH_WEIGHT) * right)
    torch.testing.assert_close(losses, refused.mean((1, 2)))


def test_what_is_multiplied_with_is_what_is_stored(folder: Path) -> None:
    """In every linear, in groups of inputs; gradients are those of weights that lie there already."""
    draft, stored = module(), load_recurrent(folder, SPEC)
    parts = {
        "mix": draft.mix,
        "query": draft.q_proj,
        "out": draft.o_proj,
        "down": draft.mlp.down_proj,
        "head": draft.lm_head,
    }
    for name, linear in parts.items():
        weight = stored.dense(name, torch.float32, CPU).requires_grad_()
        assert stored.matrices[name].bits == 4 and stored.matrices[name].scales.shape[1] == -(-weight.shape[1] // 64)
        assert not torch.equal(linear.weight, weight)
        x = torch.randn(3, weight.shape[1])
        torch.testing.assert_close(linear(x), x @ weight.T, rtol=0, atol=1e-5)
        linear(x).square().sum().backward()
        (x @ weight.T).square().sum().backward()
        torch.testing.assert_close(linear.weight.grad, weight.grad, rtol=1e-4, atol=1e-4)
    gate, up = (linear(torch.eye(SPEC.d_model)).T for linear in (draft.mlp.gate_proj, draft.mlp.up_proj))
    torch.testing.assert_close(torch.cat((gate, up)), stored.dense("gate_up", torch.float32, CPU), rtol=0, atol=1e-6)


def test_matrices_that_no_format_names_are_in_8_bits(folder: Path) -> None:
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    codes = torch.randint(0, 256, (SPEC.d_model, SPEC.d_model), dtype=torch.uint8)
    scales = torch.rand(SPEC.d_model).half()
    save_file(tensors | {"mix.codes": codes, "mix.scales": scales}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"mix.codes is \[96, 96\], but the served model needs \[96, 48\]"):
        load_recurrent(folder, SPEC)
    del config["formats"]["mix"]
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_recurrent(folder, SPEC)
    wanted = (codes.float() - 128) * scales.float().unsqueeze(1)
    assert torch.equal(weights.dense("mix", torch.float32, CPU), wanted)
    x = torch.randn(2, SPEC.d_model)
    torch.testing.assert_close(INT_REFERENCE.linear(x, weights.matrices["mix"], None), x @ wanted.T)


def test_a_draft_goes_on_from_one_that_says_other_tokens(folder: Path) -> None:
    torch.manual_seed(3)
    wider = RecurrentModule(SPEC, torch.arange(0, 60, 3), 1)
    before = wider.lm_head.weight.detach().clone()
    wider.load(load_recurrent(folder, SPEC))
    known = trained(folder)
    both = wider.ids % 2 == 0
    torch.testing.assert_close(wider.lm_head.weight[both], known.lm_head.weight[known.ids % 3 == 0])
    assert torch.equal(wider.lm_head.weight[~both], before[~both])
    assert torch.equal(wider.mix.weight, known.mix.weight) and wider.ids.tolist() == list(range(0, 60, 3))


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_tree_holds_the_likeliest_draws(folder: Path, temperature: float) -> None:
    """Behind each node that has children those of the highest perturbed logits, with the noise of their place, by rank."""
    assert any(node.rank > 1 for node in TREE) and any(node.parent >= 0 and node.rank for node in TREE)
    result, worth = drafted(drafter(folder, REFERENCE, nodes=TREE), temperature, count=len(TREE))
    assert worth is None
    for at, (node, scores) in enumerate(zip(TREE, scored(trained(folder), TREE, result, temperature), strict=True)):
        wanted = scores.topk(node.rank + 1).values[:, -1]
        torch.testing.assert_close(
            scores.gather(1, result[:, at : at + 1].long() // 2)[:, 0], wanted, rtol=0, atol=1e-4
        )
    for parent in {node.parent for node in TREE}:
        siblings = result[:, [at for at, node in enumerate(TREE) if node.parent == parent]]
        assert all(len(set(row)) == len(row) for row in siblings.tolist())


@torch.no_grad()
@pytest.mark.parametrize(
    ("nodes", "temperature"), crossed((CHAIN, TREE), (0.0, 0.9), quick=lambda nodes, temperature: nodes == temperature)
)
def test_compiled_drafts_are_those_of_plain_operations(
    folder: Path, temperature: float, nodes: tuple[Candidate, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    native, why = native_cpu.load()
    if native is None:
        pytest.skip(why)
    compiled, plain = (
        drafter(folder, native, nodes=nodes),
        drafter(folder, replace(native, programs=Programs()), nodes=nodes),
    )
    runs = Mock(side_effect=NativeRecurrent.__call__)
    monkeypatch.setattr(NativeRecurrent, "__call__", lambda *given: runs(*given))
    assert bool(compiled.parents) is (nodes is TREE)
    stopped = alike = asked = 0
    for count in range(1, len(nodes) + 1):
        result, worth = drafted(compiled, temperature, count=count)
        assert runs.call_count == count
        other, said = drafted(plain, temperature, count=count)[0], result != UNSAID
        assert runs.call_count == count, "plain operations run none of the compiled ones"
        assert torch.equal(other, drafted(drafter(folder, REFERENCE, nodes=nodes), temperature, count=count)[0])
        alike += int((result == other)[said].sum())
        asked += int(said.sum())
        other = torch.where(said, result, other)
        for at, scores in enumerate(scored(trained(folder), nodes[:count], other, temperature)):
            wanted = scores.topk(nodes[at].rank + 1).values[:, -1]
            lost = (wanted - scores.gather(1, other[:, at : at + 1].long() // 2)[:, 0])[said[:, at]]
            assert float(lost.abs().sum()) <= ROUNDED * len(lost), "as good a draw as the inputs' 8 bits can tell"
        assert bool((result[result != UNSAID] % 2 == 0).all()), "only tokens that it may say"
        drawn, item = chances(folder, nodes[:count], other, temperature)
        assert [bool(column.any()) for column in (result != UNSAID).T] == drawn
        price = len(KNOWN) / (1 + CUT.node_cost * (len(KNOWN) - 1))
        costs = [price * CUT.node_cost * len(KNOWN) * size for size in range(1, count + 1)]
        gains = [float(item[:, : size + 1].detach().sum()) - cost for size, cost in enumerate(costs)]
        best = max((at for at in range(count) if at + 1 in (*CUT.sizes, count)), key=gains.__getitem__)
        assert worth is not None and set(worth.tolist()) == {best + 1 if gains[best] > 0 else 0}
        stopped += not all(drawn)
    assert stopped, "some drafts are cut"
    assert alike > 0.95 * asked
    together, _ = drafted(compiled, temperature)
    for row, item in enumerate(together):
        result, _ = drafted(compiled, temperature, alone=row)
        assert torch.equal(torch.where(result == UNSAID, item, result), torch.where(item == UNSAID, result, item))
    result, _ = drafted(drafter(folder, native, torch.bfloat16, nodes), temperature, torch.bfloat16)
    assert result.shape == (len(KNOWN), COUNT)


@torch.no_grad()
def test_drafts_of_one_size_and_other_trees_take_turns(folder: Path) -> None:
    """What a tree grows from is kept from draft to draft."""
    native, why = native_cpu.load()
    if native is None:
        pytest.skip(why)
    size = min(len(CHAIN), len(TREE))
    forms = [nodes[:size] for nodes in (CHAIN, TREE)]
    assert [node.parent for node in forms[0]] != [node.parent for node in forms[1]]
    alone = []
    for nodes in forms:
        for count in (1, size):  # the first one ends what is kept of another tree
            actual = drafted(drafter(folder, native, nodes=nodes), 0.9, count=count)
        alone.append(actual)
    for turn in (0, 1, 0, 0, 1):
        actual = drafted(drafter(folder, native, nodes=forms[turn]), 0.9, count=size)
        assert all(torch.equal(item, other) for item, other in zip(actual, alone[turn], strict=True))


def chances(
    folder: Path, nodes: tuple[Candidate, ...], tensor: torch.Tensor, temperature: float
) -> tuple[list[bool], torch.Tensor]:
    """Of a tree that was drafted whole: which nodes are reached by a draft that stops where no node of a level is likely, and the
    chances that it gives each, float32 [rows, nodes]."""
    result, drawn, ends = torch.zeros(len(KNOWN), len(nodes)), [False] * len(nodes), False
    every = scored(trained(folder), nodes, tensor, temperature)
    for depth in range(max(node.head for node in nodes) + 1):
        level = [at for at, node in enumerate(nodes) if node.head == depth]
        if ends:
            break
        for at in level:
            share = every[at].softmax(1).gather(1, tensor[:, at : at + 1].long() // 2)[:, 0]
            result[:, at] = share * (1 if nodes[at].parent < 0 else result[:, nodes[at].parent])
            drawn[at] = True
        ends = not bool((result[:, level] > CUT.min_chance).any())
    return drawn, result


def test_what_is_verified_is_read_from_the_folder(folder: Path) -> None:
    assert load_recurrent(folder, SPEC).cut == UNMEASURED_CUT
    config = json.loads((folder / "config.json").read_text())
    for given, wanted in (
        ({"node_cost": 0.2, "sizes": [4]}, DraftCut(0.2, UNMEASURED_CUT.min_chance, (4,))),
        ({"node_cost": 0}, None),
        ({"min_chance": 2}, None),
        ({"sizes": [0]}, None),
        ({"price": 1}, None),
        (3, None),
    ):
        (folder / "config.json").write_text(json.dumps(config | {"verification": given}))
        if wanted is not None:
            assert load_recurrent(folder, SPEC).cut == wanted
        else:
            with pytest.raises(ConfigError, match="verification"):
                load_recurrent(folder, SPEC)


def test_noise_is_the_targets(folder: Path) -> None:
    """Rows with other keys draw other tokens at the same places, and the same row the same again."""
    item = drafter(folder, REFERENCE)
    warm, _ = drafted(item, 3.0)
    assert torch.equal(warm, drafted(item, 3.0)[0])
    assert not torch.equal(warm, drafted(item, 0.0)[0])


def test_the_shipped_draft_fits_the_shipped_model() -> None:
    assets = shipped_model().parent
    spec = read_model(shipped_model())[0]
    ids = load_recurrent(assets / "recurrent", spec).ids.tolist()
    assert ids == sorted(set(ids)), "of equal scores the lower token wins, in the draft as in the target"
    assert 0 in ids, "a draft must be able to end"
    assert sum(path.stat().st_size for path in assets.rglob("*") if path.is_file()) < 40 * 2**20


@pytest.mark.long
@torch.no_grad()
def test_the_shipped_draft_is_right_as_often_as_when_it_was_shipped() -> None:
    """On held-out documents, as they are and as the model goes on with them greedily: first tokens, and tokens of chains of DEPTH.
    The bounds are 0.03 under what was measured."""
    teacher, tokenizer = load_decoder(shipped_model()), Tokenizer.load(shipped_model())
    weights = load_recurrent(shipped_model().parent / "recurrent", teacher.spec)
    draft = RecurrentModule(teacher.spec, weights.ids.long(), weights.layer)
    draft.load(weights)
    texts = [json.loads(line)["text"] for line in HELD_OUT.read_text(encoding="utf-8").splitlines()[::5]]
    encoded = [tokenizer.encode(text[:2000], add_special_tokens=False)[:160] for text in texts]
    read = torch.tensor([item for item in encoded if len(item) == 160])
    keys = torch.zeros(len(read), 2, dtype=torch.int32)
    said = generate(teacher, read[:, :64], 96, torch.zeros(len(read)), keys)
    for rows, first, together in ((read, 0.329, 0.60), (said, 0.627, 1.66)):
        given, state, alive, result = teacher_targets(teacher, draft, rows, 1.0), None, 1, []
        for depth in range(1, DEPTH + 1):
            here = given.at(depth)
            state = draft(given.hidden if state is None else state, here.text, here.k, here.v, here.rotary)
            alive = alive * (draft.lm_head(state).argmax(-1) == here.next_index)[:, 64 : 96 + 64 - DEPTH - 1]
            result.append(float(alive.double().mean()))
        assert result[0] > first and sum(result) > together, result


def test_folders_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Cannot read the recurrent draft in"):
        load_recurrent(tmp_path / "nowhere", SPEC)
    with pytest.raises(ConfigError, match=r"embedding.codes is \[60, 96\], but the served model needs \[61, 96\]"):
        load_recurrent(folder, replace(SPEC, vocab_size=61))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 17}))
    with pytest.raises(ConfigError, match="tensor gate_up.codes is"):
        load_recurrent(folder, SPEC)
    (folder / "config.json").write_text(json.dumps(config | {"attended_layer": 2}))
    with pytest.raises(ConfigError, match="tensor query.codes is"):
        load_recurrent(folder, SPEC)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"ids": tensors["ids"] + 40}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="token ids outside 0..59"):
        load_recurrent(folder, SPEC)
