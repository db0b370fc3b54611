"""A feed-forward block of experts. It is called as FeedForward is."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ridgeline.core.experts import ExpertSpec
from ridgeline.models.building import Build, gather, sum_terms
from ridgeline.ops.experts import by_expert, divide_copies, route
from ridgeline.ops.reference import clamped_swiglu
from ridgeline.ops.step import StepInputs
from ridgeline.ops.table import FloatInput, Grouped, Matrix, apply_norm
from ridgeline.quant.format import LinearShape, Part, Share, Weight
from ridgeline.quant.unquantized import UnquantizedFormat


class GatedPair:
    """down(act(gate(x)) * up(x)): one expert. share: a rank's part of its width, which computes a term of the sum. bias: of gate,
    up and down. chosen: by the router."""

    __slots__ = ("gate_up", "down", "_kind")

    def __init__(self, build: Build, width: int, share: Share, bias: bool = False, chosen: bool = False) -> None:
        d_model = build.spec.d_model
        half = Part(width, width)
        gate_up = LinearShape(d_model, (half, half), bias, "out", of_expert=chosen)
        self.gate_up = build.form.create(gate_up, share)
        self.down = build.form.create(LinearShape(width, (Part(d_model, 1),), bias, "in", width, chosen), share)
        self._kind = build.spec.activation

    def __call__(self, x: torch.Tensor, step: StepInputs) -> torch.Tensor:
        if self._kind == "swiglu_clamped":
            return self.down.apply(clamped_swiglu(self.gate_up.apply(x, step)), step)
        return self.down.apply(self.gate_up.activate(x, self._kind, step), step)


class Experts:
    """stream + the sum of the experts that the router chose for each token, and of the expert that all tokens share.

    load: int64 [experts], tokens that each expert got since the start. On a mesh each rank computes a term of the sum: with its
    part of each expert, or with the experts that it holds.
    """

    __slots__ = (
        "router",
        "experts",
        "shared",
        "shared_gate",
        "load",
        "_spec",
        "_held",
        "_numbers",
        "_is_hot",
        "_gathered",
        "_mesh",
        "_rms_norm",
        "_ops",
        "_grouped",
        "_kind",
    )

    def __init__(self, build: Build, spec: ExpertSpec) -> None:
        d_model = build.spec.d_model
        plain = UnquantizedFormat(build.ops.matmul.unquantized, build.dtype, build.device)
        self.router = plain.create(LinearShape(d_model, (Part(spec.count, spec.count),), spec.bias), Share())
        part = Share(build.mesh.rank, build.mesh.size)
        on_rank = spec.on_rank(part.size)
        self._held, self._numbers = on_rank.held(part.rank), on_rank.copies(part.rank)
        alone = Share() if spec.whole else part
        self.experts = tuple(GatedPair(build, spec.width, alone, spec.bias, chosen=True) for _ in self._numbers)
        self._is_hot = torch.isin(torch.arange(spec.count), torch.tensor(spec.hot)) if spec.hot else None
        self.shared = GatedPair(build, spec.shared_width, part) if spec.shared_width else None
        self.shared_gate = plain.create(LinearShape(d_model, (Part(1, 1),)), Share()) if spec.shared_width else None
        self.load = torch.zeros(spec.count, dtype=torch.int64, device=build.device)
        self._spec, self._mesh, self._rms_norm = spec, build.mesh, build.ops.tokenwise.rms_norm
        self._ops, self._kind = build.ops.experts, build.spec.activation
        self._gathered = gather(build)
        self._grouped: Grouped | None = None

    def __call__(self, x: FloatInput, stream: torch.Tensor, step: StepInputs) -> torch.Tensor:
        x = apply_norm(self._gathered(x, step), self._rms_norm)
        out = self._sum(x, step)
        if self.shared is not None and self.shared_gate is not None:
            out += torch.sigmoid(self.shared_gate.apply(x).float()) * self.shared(x, step)
        return stream + sum_terms(self._mesh, out.to(stream.dtype), stream, step)

    def _sum(self, x: torch.Tensor, step: StepInputs) -> torch.Tensor:
        """Sum of the chosen experts' outputs, float32."""
        logits, per_token, normalized = self.router.apply(x), self._spec.per_token, self._spec.normalized
        if self._grouped is not None:
            return self._grouped(x, logits, per_token, normalized, self.load)
        chosen = route(logits, per_token, normalized)
        counts = torch.bincount(chosen.experts.flatten(), minlength=self._spec.count)
        self.load += counts
        if self._is_hot is not None:  # by position, so that a token's sum does not depend on the other tokens
            mine = step.position_of_inputs() % self._mesh.size == self._mesh.rank
            chosen = divide_copies(chosen, self._is_hot, mine)
            counts = torch.bincount(chosen.experts.flatten(), minlength=self._spec.count)

        def run(expert: int, rows: torch.Tensor | None) -> torch.Tensor:
            pair = self.experts[self._numbers.index(expert)]
            if rows is None:
                return pair(x, step)
            selected = rows if step.selected is None else step.selected.index_select(0, rows)
            return pair(x.index_select(0, rows), step.select(selected))

        return by_expert(x.shape[1], chosen, counts.tolist(), run, self._numbers)

    def linears(self) -> Iterator[tuple[str, Weight]]:
        """Every weight by its name in models.weights; those of an expert start with its number."""
        yield "router", self.router
        for number, expert in zip(self._numbers, self.experts, strict=False):
            yield f"{number}.gate_up", expert.gate_up
            yield f"{number}.down", expert.down
        if self.shared is not None and self.shared_gate is not None:
            yield "shared_gate", self.shared_gate
            yield "shared_gate_up", self.shared.gate_up
            yield "shared_down", self.shared.down

    def tensors(self) -> Iterator[torch.Tensor]:
        for _, weight in self.linears():
            yield from weight.tensors()
        if self._grouped is not None:
            yield from self._grouped.tensors()

    def finish_loading(self) -> None:
        """All weights are loaded: hand those of the experts to a device that groups them."""
        if self._ops is not None and self.experts:
            gate_up, down = zip(*((each.gate_up.stored(), each.down.stored()) for each in self.experts), strict=True)
            self.experts = ()
            self._grouped = self._ops.group(gate_up, down, self._kind, self._held)

    def matrices(self) -> tuple[Matrix | None, Matrix | None]:
        """As FeedForward.matrices: programs that run whole layers do not know experts."""
        return None, None
