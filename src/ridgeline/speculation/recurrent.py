"""Recurrent draft: a small network that starts from the hidden state from which the target drew its last token.

z = mix(state) + embedding(token), y = z + out(attention(query(z'))), state <- norm(y + down(act(gate y') * up y')), ' being norms.
The next token is drawn from head(state). Token and state are the input of the next level. The draft is a fixed tree of the most
probable draws. The network imitates the target's final hidden state (as the features of EAGLE, Li et al. 2024; recurrent drafts:
Zhang et al. 2024, "Recurrent Drafter"; heads that see the previous token: Ankner et al. 2024, "Hydra"). It attends to keys and
values that one layer of the target has written (Du et al. 2024, "GliDe with a CaPE"): at every node to those of all tokens before
the last known one. So it keeps no state between steps: it reads no prompt, needs no catch-up and has no pages. A level of the tree
is six matrix products with a few million weights, stored as integers.

It samples with the target's noise, see ops.verify.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ridgeline.core.drafting import NetworkDrafts, counts_by_nodes
from ridgeline.core.errors import ConfigError
from ridgeline.core.spec import ModelSpec
from ridgeline.models.rope import SPARE_POSITIONS, rope_table
from ridgeline.ops.reference import int_dequantized, rotate
from ridgeline.ops.rows import Int
from ridgeline.ops.step import StepInputs
from ridgeline.ops.table import DraftCut, IntMatrix, Normed, Ops, RecurrentParts, RunRecurrent
from ridgeline.speculation.device import DeviceDrafter, DraftDraws, DraftRows, Views
from ridgeline.speculation.heads import Candidate, read_accuracies

MATRICES = ("mix", "query", "out", "gate_up", "down", "head")
"""Each is stored as NAME.codes uint8, rows of ops.reference.pack_bits, and NAME.scales float16 [out, groups], or [out] for one
group: weight = (code - 2^(bits - 1)) * scale. `formats` in config.json gives bits and group size by name. The default is ROWS: 8
bits and one scale per row."""
NORMS = ("query_norm", "inner_norm", "norm")
ROWS = (8, 1 << 20)
UNMEASURED = ((0.45, 0.12, 0.06, 0.04), (0.48, 0.12, 0.06), (0.52, 0.12), (0.55,), (0.6,), (0.6,))
"""Accuracies by depth and rank for a folder without them; about those of the shipped draft."""
UNMEASURED_CUT = DraftCut(node_cost=0.08, min_chance=0.15, sizes=(2, 3, 5))
"""Default for a folder without `verification`: the shipped draft, measured on two CPU cores."""


@dataclass(frozen=True, slots=True)
class RecurrentWeights:
    """Content of a draft folder.

    matrices: by name, in the layout of ops.reference.int_pack. norms: float32 [d_model]. ids: int32 [N], the tokens of the head.
    layer: index of the target's layer that it attends to. accuracies[depth][rank]: how often a draw equals the target's token if
    its ancestors do. cut: which nodes a CPU verifies.
    """

    matrices: dict[str, IntMatrix]
    norms: dict[str, Tensor]
    ids: Tensor
    layer: int
    accuracies: tuple[tuple[float, ...], ...] = UNMEASURED
    cut: DraftCut = UNMEASURED_CUT

    def dense(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The dequantized matrix `name`, [out, in]."""
        return int_dequantized(self.matrices[name]).to(device, dtype)


def load_recurrent(folder: Path, spec: ModelSpec) -> RecurrentWeights:
    """Read the draft in `folder` for the target `spec`. Raises ConfigError if files are missing, broken or for another model."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(
            f"Cannot read the recurrent draft in {folder} ({error}): it needs config.json and model.safetensors.",
            param="speculate",
        ) from None
    shapes = _shapes(config, spec)
    forms = {name: tuple(config.get("formats", {}).get(name, ROWS)) for name in shapes}
    wanted = dict.fromkeys(NORMS, (spec.d_model,)) | {"ids": shapes["head"][:1]}
    for name, (out, width) in shapes.items():
        bits, group = forms[name]
        wanted[f"{name}.codes"] = (out, -(-width // 32) * 4 * bits)
        wanted[f"{name}.scales"] = (out, -(-width // group)) if group < width else (out,)
    for name, shape in wanted.items():
        if name not in tensors or tuple(tensors[name].shape) != shape:
            actual = list(tensors[name].shape) if name in tensors else "missing"
            raise ConfigError(
                f"{folder}: tensor {name} is {actual}, but the served model needs {list(shape)}: use a draft that was trained for "
                "this model.",
                param="speculate",
            )
    if int(tensors["ids"].min()) < 0 or int(tensors["ids"].max()) >= spec.vocab_size:
        raise ConfigError(
            f"{folder}: the tensor ids has token ids outside 0..{spec.vocab_size - 1}: use a draft for this model.",
            param="speculate",
        )
    return RecurrentWeights(
        {name: _int_matrix(tensors, name, shape, forms[name]) for name, shape in shapes.items()},
        {name: tensors[name].float() for name in NORMS},
        tensors["ids"].int(),
        config["attended_layer"],
        read_accuracies(folder, config) or UNMEASURED,
        _read_cut(folder, config),
    )


def _read_cut(folder: Path, config: Mapping[str, Any]) -> DraftCut:
    """`verification` of a draft's config.json: node_cost (> 0), min_chance (0 to 1) and sizes, see DraftCut. Raises ConfigError."""
    options = config.get("verification", {})
    try:
        cut = replace(UNMEASURED_CUT, **options)
        cut = replace(cut, sizes=tuple(cut.sizes))
        valid = (
            cut.node_cost > 0 and 0 <= cut.min_chance <= 1 and all(type(size) is int and size > 0 for size in cut.sizes)
        )
    except TypeError:
        valid = False
    if not valid:
        raise ConfigError(
            f"{folder / 'config.json'}: verification must have node_cost (above 0), min_chance (0 to 1) and sizes (a list of node "
            "counts).",
            param="speculate",
        )
    return cut


def _int_matrix(
    tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], number_format: tuple[int, int]
) -> IntMatrix:
    return IntMatrix(
        tensors[f"{name}.codes"],
        tensors[f"{name}.scales"].view(shape[0], -1),
        None,
        number_format[0],
        number_format[1],
        shape[0],
        shape[1],
    )


def _shapes(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shape of every matrix. Sizes missing in config.json are 0, so that no tensor matches."""
    inner, outputs = (config.get(name) or 0 for name in ("intermediate_size", "draft_vocabulary_size"))
    at, width = config.get("attended_layer"), spec.d_model
    queries = sum(layer.n_heads * layer.head_dim for number, layer in enumerate(spec.layers) if number == at)
    return {
        "embedding": (spec.vocab_size, width),
        "mix": (width, width),
        "query": (queries, width),
        "out": (width, queries),
        "gate_up": (2 * inner, width),
        "down": (width, inner),
        "head": (outputs, width),
    }


class Recurrent(DeviceDrafter):
    """The drafter. spec: of the target, whose norm parameters and activation it uses. nodes: Candidates of the largest draft."""

    def __init__(
        self,
        weights: RecurrentWeights,
        spec: ModelSpec,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        nodes: Sequence[Candidate],
    ) -> None:
        self._spec, self._ops, self._nodes = spec, ops, tuple(nodes)
        parents = tuple(node.parent for node in nodes)
        self.parents = () if parents == tuple(range(-1, len(nodes) - 1)) else parents
        self.attended, self._layer = (weights.layer,), spec.layers[weights.layer]
        self._turn = rope_table(self._layer.rope, spec.max_len + SPARE_POSITIONS, device)
        self._ids = weights.ids.to(device)
        self._embedding = weights.dense("embedding", dtype, device)
        self.work = NetworkDrafts(
            counts_by_nodes(parents),
            counts_by_nodes([node.head for node in nodes]),
            sum(weights.matrices[name].out * weights.matrices[name].d_in for name in MATRICES),
            sum(weights.matrices[name].codes.nbytes + weights.matrices[name].scales.nbytes for name in MATRICES),
            self._layer,
            self._layer.slot_bytes(spec.kv),
        )
        parts = RecurrentParts(
            self._embedding,
            weights.matrices,
            weights.norms,
            self._turn,
            self._layer.head_dim,
            self._ids,
            torch.tensor(parents, dtype=torch.int32),
            torch.tensor([node.rank for node in nodes], dtype=torch.int32),
            spec.activation,
            spec.norm_eps,
            spec.norm_offset,
            weights.cut,
        )

        def by_nodes() -> RunRecurrent:
            self._matrices = {
                name: ops.matmul.unquantized.pack(weights.dense(name, dtype, device)) for name in MATRICES
            }
            self._norms = {name: norm.to(device, dtype) for name, norm in weights.norms.items()}
            return self._node_by_node

        self._run = ops.programs.recurrent(parts, by_nodes)

    def draft(self, draft_rows: DraftRows, count: int, views: Views) -> Tensor | None:
        return self._run(draft_rows, count, views)

    def _node_by_node(self, draft_rows: DraftRows, count: int, views: Views) -> Tensor | None:
        """Draft eagerly, one parent after the other: compute its state and draw its children's tokens from it."""
        known, nodes = draft_rows.known, self._nodes[:count]
        last = draft_rows.rows * draft_rows.state.tokens.shape[1] + known - 1
        draw = DraftDraws(self._ops, draft_rows, self._ids)
        states, tokens = {-2: draft_rows.hidden}, {-1: draft_rows.state.tokens.view(-1).index_select(0, last)}
        for above in dict.fromkeys(node.parent for node in nodes):
            depth = 0 if above < 0 else nodes[above].head + 1
            before = states[-2 if above < 0 else nodes[above].parent]
            states[above] = self._next(before, tokens[above], known + (depth - 1), draft_rows, views)
            logits = self._ops.matmul.unquantized.linear(states[above], self._matrices["head"], None)
            children = {node.rank: at for at, node in enumerate(nodes) if node.parent == above}
            for rank in range(max(children) + 1):
                token = draw(logits, known + depth)
                logits = logits.masked_fill(self._ids == token.unsqueeze(1), float("-inf"))
                if rank in children:
                    tokens[children[rank]] = token
        place = known.unsqueeze(1) + torch.arange(count, dtype=torch.int32, device=known.device)
        draft_rows.write(place, torch.stack([tokens[node] for node in range(count)], dim=1))
        return None

    def _next(self, state: Tensor, token: Tensor, place: Tensor, draft_rows: DraftRows, views: Views) -> Tensor:
        """The states after tokens int32 [S] at places int32 [S] of their rows. state: [S, D], the states before them."""
        matmul, matrices, norms = self._ops.matmul.unquantized, self._matrices, self._norms
        eps, offset = self._spec.norm_eps, self._spec.norm_offset
        mixed = matmul.linear_add(state, matrices["mix"], None, F.embedding(token, self._embedding))
        q = matmul.linear(Normed(mixed, norms["query_norm"], eps, offset), matrices["query"], None)
        q = rotate(q.view(len(q), -1, self._layer.head_dim), self._turn, place)
        # Attend as the last token whose key is written. A padding row reads the scratch page.
        lengths = draft_rows.state.ints.index_select(0, draft_rows.rows)[:, Int.LENGTH].clamp(min=1)
        number = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
        step = StepInputs(draft_rows.rows, number, lengths, place, number[:-1], 1, draft_rows.longest)
        [view] = views(torch.zeros(len(draft_rows.state.tables), len(q), dtype=torch.int64, device=q.device))
        mixed = matmul.linear_add(
            self._ops.attention.attend(q, q, q, view, step)[0].flatten(1), matrices["out"], None, mixed
        )
        normed = Normed(mixed, norms["inner_norm"], eps, offset)
        gated = matmul.linear_activate(normed, matrices["gate_up"], None, self._spec.activation)
        mixed = matmul.linear_add(gated, matrices["down"], None, mixed)
        return self._ops.tokenwise.rms_norm(mixed, norms["norm"], eps, offset)
