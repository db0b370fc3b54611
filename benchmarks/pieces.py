"""The calls that make up one step, and its operations alone, on real weights and a filled cache.

Every layer's weights and cache take their turn, so that no operation finds them in the chip's cache when a real step
would not. Activations are random and shared by all layers, as a step's own are: just written, and small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.nn.functional as F

from ridgeline.core.spec import LayerSpec
from ridgeline.engine.runner import Runner
from ridgeline.models.build import LoadedModel
from ridgeline.models.layers import DecoderLayer, Linear
from ridgeline.ops.noise import Purpose
from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.table import Activation, Normed

Call = Callable[[], object]
Shares = Sequence[tuple[int, int]]
"""(cached, new) tokens of each row of a step."""
NAIVE = "attention, naive"
RUNS = {
    "embedding": ("embedding",),
    "norm+qkv": ("norm", "qkv"),
    "rope+kv write": ("rope+kv write",),
    "attention": ("attention",),
    "out+sum": ("out",),
    "norm+gate+up+act": ("norm", "gate+up", "activation"),
    "down+sum": ("down",),
    "final norm": ("norm",),
    "head": ("head",),
    "sampling": ("sampling",),
}
"""What a step calls, in its order, and the operations that each call covers: a device may do them in one kernel."""
ALONE = (NAIVE, "norm", "qkv", "out", "gate+up", "activation", "down")
"""Operations that a step does not call by themselves."""
BEHIND = frozenset(("out+sum", "norm+gate+up+act", "down+sum", "out", "gate+up", "activation", "down"))
"""What the last layer does for rows that draw alone."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a step's rows stand: inputs of every operation, and each layer's part of the cache."""

    step: StepInputs
    views: tuple[KvView, ...]


def place(model: LoadedModel, runner: Runner, shares: Shares) -> Place:
    """Rows 1, 2, ... of the runner hold `shares`, their pages given already."""
    device, rows = runner.device, runner.rows
    starts = torch.tensor([start for start, _ in shares], device=device)
    counts = torch.tensor([count for _, count in shares], device=device)
    row_of = torch.repeat_interleave(torch.arange(len(shares), device=device), counts)
    first = counts.cumsum(0) - counts
    position = starts[row_of] + torch.arange(len(row_of), device=device) - first[row_of]
    step = StepInputs(
        rows=torch.arange(1, len(shares) + 1, dtype=torch.int32, device=device),
        q_start=F.pad(counts.cumsum(0), (1, 0)).int(),
        length=(starts + counts).int(),
        position=position.int(),
        row_of=row_of.int(),
        max_query=max(count for _, count in shares),
        max_length=max(start + count for start, count in shares),
    )
    page = rows.page_tokens
    slots = rows.tables[:, row_of + 1, position // page].long() * page + position % page
    spec, store = model.spec, runner.store
    views = tuple(
        KvView(kv, rows.tables[group], slots[group], layer.window, layer.softcap, spec.scale_of(layer))
        for kv, group, layer in zip(store.kv, store.groups, spec.layers, strict=True)
    )
    return Place(step, views)


Maker = Callable[["Pieces", DecoderLayer, LayerSpec, KvView, "Shared"], Call]


class Pieces:
    """What a step runs (`run`), and the operations of core.operations each alone (`alone`), as lists of calls."""

    def __init__(self, model: LoadedModel, at: Place, shares: Shares) -> None:
        self._at, self._shares = at, shares
        self._spec, self._decoder, self._ops = model.spec, model.decoder, model.ops
        self._made: dict[tuple[str, int], torch.Tensor] = {}
        self._tokens = sum(count for _, count in shares)

    def _random(self, name: str, size: int) -> torch.Tensor:
        """Numbers of order one, [tokens, size]; the same tensor for the same name, so that layers share it."""
        if (name, size) not in self._made:
            like = self._decoder.embedding
            self._made[name, size] = torch.randn(self._tokens, size, dtype=like.dtype, device=like.device)
        return self._made[name, size]

    def run(self, name: str) -> list[Call]:
        """The calls of one of RUNS in a step. What the layers of a step share is computed by the first, each time."""
        if name in ("embedding", "final norm", "head", "sampling"):
            ends = {"embedding": self._embedding, "head": self._head, "sampling": self._sampling}
            return [ends.get(name, self._final_norm)()]
        makers: dict[str, Maker] = {
            "norm+qkv": Pieces._normed_qkv,
            "rope+kv write": Pieces._rope,
            "attention": Pieces._attention,
            "out+sum": Pieces._out_sum,
            "norm+gate+up+act": Pieces._normed_gate_up,
            "down+sum": Pieces._down_sum,
        }
        return list(self._layers(name, makers[name]))

    def alone(self, name: str) -> list[Call]:
        """The calls of one of ALONE in a step."""
        if name == "norm":
            return [*self._layers(name, Pieces._norms), self._final_norm()]
        makers: dict[str, Maker] = {
            "qkv": Pieces._qkv,
            NAIVE: Pieces._naive,
            "out": Pieces._out,
            "gate+up": Pieces._gate_up,
            "activation": Pieces._activation,
            "down": Pieces._down,
        }
        return list(self._layers(name, makers[name]))

    def _layers(self, name: str, make: Maker) -> Iterator[Call]:
        shared, behind = Shared(self._at.step), self._behind()
        layers = list(zip(self._decoder.layers, self._spec.layers, self._at.views, strict=True))
        for index, (layer, spec, view) in enumerate(layers, 1):
            stage = behind if name in BEHIND and index == len(layers) else self
            call = make(stage, layer, spec, view, shared)
            yield _after(shared.renew, call) if index == 1 else call

    def _behind(self) -> Pieces:
        """The pieces of the step's end: one token of each row."""
        made = copy(self)
        made._tokens, made._made = len(self._shares), {}
        return made

    # --- once per step ------------------------------------------------------------------------------------------------

    def _embedding(self) -> Call:
        table, ids = self._decoder.embedding, torch.randint(self._spec.vocab_size, (self._tokens,))
        ids = ids.int().to(table.device)
        return lambda: F.embedding(ids, table)

    def _final_norm(self) -> Call:
        return self._behind()._norm(self._decoder.final_norm)

    def _head(self) -> Call:
        hidden = self._random("hidden", self._spec.d_model)[: len(self._shares)]
        return lambda: self._decoder.logits(hidden)

    def _sampling(self) -> Call:
        rows, device = len(self._shares), self._decoder.embedding.device
        logits = torch.randn(rows, self._spec.vocab_size, device=device)
        temperature, where = torch.ones(rows, device=device), torch.full((rows,), 7, dtype=torch.int32, device=device)
        key = torch.arange(2 * rows, dtype=torch.int32, device=device).view(rows, 2)
        return lambda: self._ops.sampler.sample(logits, temperature, key, where, Purpose.TOKEN)

    # --- once per layer, as the step runs it --------------------------------------------------------------------------

    def _to_norm(self, weight: torch.Tensor) -> Normed:
        return Normed(self._random("to norm", self._spec.d_model), weight, self._spec.norm_eps, self._spec.norm_offset)

    def _normed_qkv(self, layer: DecoderLayer, _: LayerSpec, view: KvView, shared: Shared) -> Call:
        linear, x = layer.attention.qkv, self._to_norm(layer.attention_norm)
        return lambda: linear.apply(x, shared.step)

    def _rope(self, layer: DecoderLayer, spec: LayerSpec, view: KvView, shared: Shared) -> Call:
        merged = self._random("merged", (spec.n_heads + 2 * spec.n_kv_heads) * spec.head_dim)
        shape = layer.attention.shape
        return lambda: self._ops.attention.qkv_write(merged, shape, view, shared.step)

    def _attention(self, layer: DecoderLayer, spec: LayerSpec, view: KvView, shared: Shared) -> Call:
        q = self._queries(spec)
        k, v = (self._random(name, spec.n_kv_heads * spec.head_dim) for name in ("keys", "values"))
        k, v = (tensor.unflatten(1, (spec.n_kv_heads, spec.head_dim)) for tensor in (k, v))
        return lambda: self._ops.attention.attend(q, k, v, view, shared.step)

    def _out_sum(self, layer: DecoderLayer, spec: LayerSpec, view: KvView, shared: Shared) -> Call:
        x = self._random("heads", spec.n_heads * spec.head_dim)
        return self._joined(layer.attention.out, x, layer.attention_post_norm, shared)

    def _normed_gate_up(self, layer: DecoderLayer, _: LayerSpec, view: KvView, shared: Shared) -> Call:
        linear, x = layer.feed_forward.gate_up, self._to_norm(layer.feed_forward_norm)
        return lambda: linear.activate(x, self._spec.activation, shared.step)

    def _down_sum(self, layer: DecoderLayer, spec: LayerSpec, view: KvView, shared: Shared) -> Call:
        x = self._activated(spec, layer, shared)
        return self._joined(layer.feed_forward.down, x, layer.feed_forward_post_norm, shared)

    def _joined(self, linear: Linear, x: Activation, post_norm: torch.Tensor | None, shared: Shared) -> Call:
        """How a block ends; its result may lie in the stream's memory."""
        stream, spec = self._random("stream", self._spec.d_model), self._spec
        if post_norm is None:
            return lambda: linear.add(x, stream, shared.step)
        norm_add, rest = self._ops.tokenwise.norm_add, (post_norm, spec.norm_eps, spec.norm_offset)
        return lambda: norm_add(linear.apply(x, shared.step), *rest, stream)

    # --- once per layer, alone ----------------------------------------------------------------------------------------

    def _queries(self, spec: LayerSpec) -> torch.Tensor:
        return self._random("queries", spec.n_heads * spec.head_dim).unflatten(1, (spec.n_heads, spec.head_dim))

    def _activated(self, spec: LayerSpec, layer: DecoderLayer, shared: Shared) -> Activation:
        """What the last matrix takes, in its own format."""
        x, kind = self._random("normed", self._spec.d_model), self._spec.activation
        return shared.keep(
            f"activated {spec.d_ff} {self._tokens}", lambda: layer.feed_forward.gate_up.activate(x, kind, shared.step)
        )

    def _norm(self, weight: torch.Tensor) -> Call:
        spec, x = self._spec, self._random("to norm", self._spec.d_model)
        return lambda: self._ops.tokenwise.rms_norm(x, weight, spec.norm_eps, spec.norm_offset)

    def _norms(self, layer: DecoderLayer, _: LayerSpec, view: KvView, shared: Shared) -> Call:
        weights = [layer.attention_norm, layer.feed_forward_norm]
        weights += [norm for norm in (layer.attention_post_norm, layer.feed_forward_post_norm) if norm is not None]
        calls = [self._norm(weight) for weight in weights]
        return lambda: [call() for call in calls]

    def _qkv(self, layer: DecoderLayer, _: LayerSpec, view: KvView, shared: Shared) -> Call:
        linear, x = layer.attention.qkv, self._random("normed", self._spec.d_model)
        return lambda: linear.apply(x, shared.step)

    def _naive(self, layer: DecoderLayer, spec: LayerSpec, view: KvView, shared: Shared) -> Call:
        q = self._queries(spec)
        return lambda: naive_attention(q, view, self._shares)

    def _out(self, layer: DecoderLayer, spec: LayerSpec, view: KvView, shared: Shared) -> Call:
        linear, x = layer.attention.out, self._random("heads", spec.n_heads * spec.head_dim)
        return lambda: linear.apply(x, shared.step)

    def _gate_up(self, layer: DecoderLayer, _: LayerSpec, view: KvView, shared: Shared) -> Call:
        linear, x = layer.feed_forward.gate_up, self._random("normed", self._spec.d_model)
        return lambda: linear.apply(x, shared.step)

    def _activation(self, layer: DecoderLayer, spec: LayerSpec, view: KvView, shared: Shared) -> Call:
        wide, kind = self._random("wide", 2 * spec.d_ff), self._spec.activation
        if self._spec.quantization and wide.is_cuda:
            # Only where there is a GPU, since Triton is an extra; on a CPU the product quantizes what it reads.
            quantizing = import_module("ridgeline.ops.triton.quantize").activate
            return lambda: quantizing(wide, kind)
        return lambda: self._ops.tokenwise.activate(wide, kind)

    def _down(self, layer: DecoderLayer, spec: LayerSpec, view: KvView, shared: Shared) -> Call:
        linear, x = layer.feed_forward.down, self._activated(spec, layer, shared)
        return lambda: linear.apply(x, shared.step)


class Shared:
    """What the layers of one step share: its inputs with all that operations derive from them, and activations."""

    def __init__(self, step: StepInputs) -> None:
        self.step = step
        self._kept: dict[str, Any] = {}

    def renew(self) -> None:
        """The next step begins: nothing is derived yet."""
        self.step = replace(self.step)

    def keep(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]


def _after(first: Call, call: Call) -> Call:
    def both() -> object:
        first()
        return call()

    return both


def naive_attention(q: torch.Tensor, view: KvView, shares: Shares) -> torch.Tensor:
    """softmax(QK^T) V with the scores materialised, q [T, Hq, d] -> [T, Hq, d] in q's dtype: the textbook's way on a paged
    cache. Keys and values are gathered into one piece first, neighbouring rows of the same sizes are one batch, and the
    softmax is computed in float32."""
    out = torch.empty_like(q)
    row = 1
    ends = list(accumulate(count for _, count in shares))
    for (start, count), group in groupby(shares):
        size = len(list(group))
        first = ends[row - 1] - count
        positions = slice(first, first + size * count)
        pages = view.table[row : row + size, : -(-(start + count) // view.page_tokens)].long()
        kept = view.kv[pages].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, : start + count]
        part = q[positions].view(size, count, *q.shape[1:]).transpose(1, 2)
        out[positions] = _dense(part, kept[0], kept[1], view).transpose(1, 2).flatten(0, 1)
        row += size
    return out


def _dense(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: KvView) -> torch.Tensor:
    """q [B, Hq, n, d], keys and values [B, Hkv, S, d] whose last n slots are the queries' own -> [B, Hq, n, d]."""
    batch, heads, count, dim = q.shape
    kv_heads, slots = keys.shape[1], keys.shape[2]
    scores = q.reshape(batch, kv_heads, -1, dim) @ keys.transpose(2, 3) * view.scale
    if view.softcap is not None:
        scores = torch.tanh(scores / view.softcap) * view.softcap
    place = torch.arange(slots, device=q.device)
    behind = place[slots - count :, None] - place
    hidden = behind < 0 if view.window is None else (behind < 0) | (behind >= view.window)
    scores = scores.view(batch, kv_heads, heads // kv_heads, count, slots).masked_fill(hidden, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return (weights.view(batch, kv_heads, -1, slots) @ values).view(batch, heads, count, dim)
