"""Weights that stay in host memory: a step finds every linear in its buffer when it reads it, whenever the copies run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from ridgeline.core.config import ModelConfig
from ridgeline.core.host_weights import BUFFERS, host_weights
from ridgeline.core.spec import NUMBER_FORMATS, ModelSpec
from ridgeline.models.build import LoadedModel
from ridgeline.models.building import Build
from ridgeline.models.config import GenerationDefaults, read_spec
from ridgeline.models.decoder import Decoder
from ridgeline.models.weights import load_dummy
from ridgeline.ops.reference import REFERENCE
from ridgeline.parallel.mesh import ONE_DEVICE
from ridgeline.quant.blocks import BlockFormat
from ridgeline.quant.format import WeightFormat
from ridgeline.quant.fp8 import Fp8Format
from ridgeline.quant.integer import IntFormat
from ridgeline.quant.mixed import MixedFormat
from ridgeline.quant.streamed import BLOCK_BYTES, HostMemory, Pieces, StreamedFormat, WeightStream
from ridgeline.quant.unquantized import UnquantizedFormat
from tests.models.paged import PagedRows

CPU, F32 = torch.device("cpu"), torch.float32
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "attention_bias": True,
}
PROMPTS = [list(range(3, 40)), list(range(20, 31))]
FORMATS: dict[str, Callable[[], WeightFormat]] = {
    "": lambda: UnquantizedFormat(REFERENCE.matmul.unquantized, F32, CPU),
    "fp8": lambda: Fp8Format(REFERENCE.matmul.fp8, F32, CPU),
    "int4": lambda: IntFormat(REFERENCE.matmul.integer, NUMBER_FORMATS["int4"], F32, CPU),
    "q4_1": lambda: BlockFormat(REFERENCE.matmul, F32, CPU, NUMBER_FORMATS["q4_1"]),
    "llm-int8": lambda: MixedFormat(REFERENCE, NUMBER_FORMATS["llm-int8"], F32, CPU),
}


class EarlyLane:
    """Copies as soon as it may. What is still read from a buffer is then lost."""

    def __init__(self) -> None:
        self.copies: list[int] = []

    def copy(self, buffer: int, pieces: Pieces) -> None:
        self.copies.append(buffer)
        for target, source in pieces:
            target.copy_(source)

    def wait(self, buffer: int) -> None:
        pass

    @property
    def pending(self) -> int:
        return 0


class LateLane(EarlyLane):
    """Copies, in order, no earlier than a wait demands. What nothing waits for is not there."""

    def __init__(self) -> None:
        super().__init__()
        self._queue: list[tuple[int, Pieces]] = []

    def copy(self, buffer: int, pieces: Pieces) -> None:
        self._queue.append((buffer, pieces))

    def wait(self, buffer: int) -> None:
        while buffer in (waiting for waiting, _ in self._queue):
            super().copy(*self._queue.pop(0))

    @property
    def pending(self) -> int:
        return len(self._queue)


def model(form: WeightFormat, spec: ModelSpec) -> LoadedModel:
    decoder = Decoder(Build(spec, REFERENCE, form, ONE_DEVICE, F32, CPU), spec.max_len, form)
    load_dummy(decoder, ModelConfig().seed)
    decoder.finish_loading()
    return LoadedModel(spec, decoder, GenerationDefaults(), REFERENCE)


def pair(name: str, lane: EarlyLane, share: float = 0.6) -> tuple[LoadedModel, LoadedModel, int]:
    """A model on the device, the same one with a share of its linears in host memory, and how many these are."""
    spec = replace(read_spec(CONFIG), quantization=name)
    spec = replace(spec, host_bytes=int(share * spec.layer_bytes))
    linears = host_weights(spec).linears
    stream = WeightStream(len(linears), lane, HostMemory(pinned=False))
    return model(FORMATS[name](), spec), model(StreamedFormat(FORMATS[name](), linears, stream), spec), len(linears)


@pytest.mark.parametrize("lane", [EarlyLane, LateLane])
@pytest.mark.parametrize("name", FORMATS)
def test_a_model_in_two_memories_computes_the_same(name: str, lane: type[EarlyLane]) -> None:
    """Prompts, decode steps, and steps whose last layer runs for few tokens or none. Each step copies each linear once, and leaves
    no copy that nothing waited for, so that a graph can capture it."""
    copies = lane()
    resident, split, count = pair(name, copies)
    assert 8 < count < 4 * len(split.spec.layers) - 4
    rows, same = PagedRows(split), PagedRows(resident)
    for work, wanted in (
        (list(enumerate(PROMPTS)), None),
        ([(0, [5]), (1, [6])], None),
        ([(0, [7, 8, 9]), (1, list(range(40, 60)))], [3, 22]),
        ([(0, list(range(10, 30)))], []),
        ([(0, [5]), (1, [6])], None),
    ):
        copies.copies.clear()
        selected = None if wanted is None else torch.tensor(wanted, dtype=torch.int32)
        assert torch.equal(rows.step(work, selected), same.step(work, selected))
        assert copies.copies == [number % BUFFERS for number in range(count)] and not copies.pending


@pytest.mark.parametrize("lane", [EarlyLane, LateLane])
def test_other_orders_are_correct_too(lane: type[EarlyLane]) -> None:
    """Warm-up runs some of the layers, and retention by attention asks a layer for its queries before it runs it."""
    copies = lane()
    resident, split, _ = pair("", copies)
    for chosen in ((0, 3, 4), (2, 1, 4), (0, 0, 4)):
        parts = [
            PagedRows(replace(each, decoder=each.decoder.with_layers(chosen))).step(list(enumerate(PROMPTS)))
            for each in (split, resident)
        ]
        assert torch.equal(*parts)
    linears = [weight for layer in split.decoder.layers for _, weight in layer.attention.linears()]
    others = [weight for layer in resident.decoder.layers for _, weight in layer.attention.linears()]
    x = torch.randn(3, 64)
    for number in (0, 0, 5, 2, 2, 3, 9, 1):
        assert torch.equal(linears[number].apply(x), others[number].apply(x))
    assert torch.equal(*(PagedRows(each).step(list(enumerate(PROMPTS))) for each in (split, resident)))


@pytest.mark.parametrize("name", FORMATS)
def test_the_device_holds_two_buffers_of_the_largest(name: str) -> None:
    resident, split, _ = pair(name, LateLane())
    linears = [
        [
            weight.tensors()
            for layer in each.decoder.layers
            for _, weight in (*layer.attention.linears(), *layer.feed_forward.linears())
        ]
        for each in (resident, split)
    ]
    chosen = host_weights(split.spec).linears
    buffers = {tensor.untyped_storage().data_ptr(): tensor for number in chosen for tensor in linears[1][number]}
    assert len(buffers) == BUFFERS
    largest = max(sum(tensor.nbytes for tensor in linears[0][number]) for number in chosen)
    assert all(largest <= tensor.untyped_storage().nbytes() < largest + 4096 for tensor in buffers.values())
    for whole, moved in zip(*linears, strict=True):
        assert [(each.shape, each.stride(), each.dtype) for each in whole] == [
            (each.shape, each.stride(), each.dtype) for each in moved
        ]


def test_programs_of_whole_layers_are_off() -> None:
    """They read weights of several layers at a time."""
    resident, split, _ = pair("", LateLane())
    assert resident.decoder.parts() is not None and split.decoder.parts() is None


def test_host_memory_comes_in_blocks() -> None:
    memory = HostMemory(pinned=False)
    first, second, third = memory.take(1000), memory.take(BLOCK_BYTES), memory.take(24)
    assert [len(piece) for piece in first] == [1000] and [len(piece) for piece in third] == [24]
    assert [len(piece) for piece in second] == [BLOCK_BYTES - 1000, 1000]
    assert second[0].data_ptr() == first[0].data_ptr() + 1000 and third[0].data_ptr() == second[1].data_ptr() + 1000
