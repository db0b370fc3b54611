"""Weights that differ by request, as adapters do: every linear of a layer is told which rows its tokens belong to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from ridgeline.core.config import ModelConfig
from ridgeline.models.build import LoadedModel
from ridgeline.models.building import Build
from ridgeline.models.config import GenerationDefaults, read_spec
from ridgeline.models.decoder import Decoder
from ridgeline.models.weights import load_dummy
from ridgeline.ops.reference import REFERENCE
from ridgeline.ops.step import StepInputs
from ridgeline.ops.table import Activation, Matrix, apply_norm
from ridgeline.parallel.mesh import ONE_DEVICE
from ridgeline.quant.format import Expected, LinearShape, Share, Weight
from ridgeline.quant.unquantized import UnquantizedFormat
from tests.models.paged import PagedRows

CPU = torch.device("cpu")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
PROMPTS = [list(range(3, 40)), list(range(20, 31))]


@dataclass(frozen=True)
class Scaled(Weight):
    """A linear whose output is multiplied by a factor of the device row that a token belongs to."""

    base: Weight
    factors: torch.Tensor
    token_counts: list[int]

    @property
    def expects(self) -> Mapping[tuple[int, str], Expected]:
        return self.base.expects

    def load(self, part: int, name: str, tensor: torch.Tensor) -> None:
        self.base.load(part, name, tensor)

    def apply(self, x: Activation, step: StepInputs | None = None) -> torch.Tensor:
        assert step is not None
        rows = step.rows.long()[step.row_of_inputs().long()]
        self.token_counts.append(len(rows))
        return self.base.apply(x) * self.factors[rows].unsqueeze(1)

    def add(self, x: Activation, stream: torch.Tensor, step: StepInputs | None = None) -> torch.Tensor:
        return stream + self.apply(x, step)

    def activate(self, x: Activation, kind: str, step: StepInputs | None = None) -> torch.Tensor:
        return REFERENCE.tokenwise.activate(self.apply(apply_norm(x, REFERENCE.tokenwise.rms_norm), step), kind)

    def matrix(self) -> Matrix | None:
        return None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.base.tensors()


@dataclass(frozen=True)
class ScaledFormat:
    base: UnquantizedFormat
    factors: torch.Tensor
    token_counts: list[int] = field(default_factory=list)
    name: str = "scaled"

    def create(self, shape: LinearShape, share: Share) -> Weight:
        return Scaled(self.base.create(shape, share), self.factors, self.token_counts)


def model(factors: Sequence[float]) -> tuple[LoadedModel, ScaledFormat]:
    """The same random weights for any factors, one for each device row."""
    spec = read_spec({**CONFIG, "torch_dtype": "float32"})
    form = ScaledFormat(UnquantizedFormat(REFERENCE.matmul.unquantized, torch.float32, CPU), torch.tensor(factors))
    decoder = Decoder(Build(spec, REFERENCE, form, ONE_DEVICE, torch.float32, CPU), spec.max_len, form.base)
    load_dummy(decoder, ModelConfig().seed)
    decoder.finish_loading()
    return LoadedModel(spec, decoder, GenerationDefaults(), REFERENCE), form


@pytest.mark.parametrize("wanted", [None, [], [36, 47], [5, 36], [4, 5, 6, 7, 36, 47]])
def test_every_linear_knows_the_rows_of_its_tokens(wanted: list[int] | None) -> None:
    """A step of two rows gives each row what it gets alone, also where the last layer goes on for a few tokens only."""
    both, form = model((1.5, 0.5))
    selected = None if wanted is None else torch.tensor(wanted, dtype=torch.int32)
    got = PagedRows(both).step(list(enumerate(PROMPTS)), selected)
    assert len(form.token_counts) == 4 * len(both.spec.layers) - (3 if wanted == [] else 0)
    parts = []
    for row, factor in enumerate((1.5, 0.5)):
        alone, _ = model((factor, factor))
        parts.append(PagedRows(alone).step([(row, PROMPTS[row])]))
    whole = torch.cat(parts)
    torch.testing.assert_close(got, whole if wanted is None else whole[wanted])
    unscaled, _ = model((1.0, 1.0))
    assert not torch.allclose(PagedRows(unscaled).step(list(enumerate(PROMPTS))), whole)
