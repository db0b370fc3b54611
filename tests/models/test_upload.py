"""Tensors come through the buffers as they were, whatever their size and type."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ridgeline.core.config import ModelConfig
from ridgeline.models import weights
from ridgeline.models.build import build
from ridgeline.models.upload import Upload
from ridgeline.ops.reference import REFERENCE
from tests.models.families import save

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_tensors_arrive_whole(dtype: torch.dtype, device: str) -> None:
    upload = Upload(torch.device(device), buffer_bytes=13, buffers=2)
    for shape in ((), (0, 3), (1,), (5, 7), (3, 4, 5)):
        tensor = (torch.randn(shape) * 8).to(dtype)
        got = upload(tensor)
        assert got.device.type == device and got.dtype == dtype and got.shape == tensor.shape
        assert torch.equal(got.cpu().reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_a_part_of_a_tensor_arrives_too() -> None:
    tensor = torch.arange(40.0).view(5, 8)
    assert torch.equal(Upload(torch.device("cpu"), 16)(tensor[1:4, 2:5]), tensor[1:4, 2:5])


def test_a_result_is_never_overwritten() -> None:
    upload = Upload(torch.device("cpu"), 8, buffers=1)
    first = upload(torch.ones(9))
    upload(torch.zeros(9))
    assert first.eq(1).all()


@pytest.mark.parametrize("quantization", ["", "fp8"])
def test_a_checkpoint_through_the_buffers_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    save("llama-gqa", tmp_path)

    def tensors() -> list[torch.Tensor]:
        model = ModelConfig(quantization=quantization)
        loaded = build(tmp_path, model=model, ops=REFERENCE, device=torch.device("cpu"))
        return list(loaded.decoder.tensors())

    straight = tensors()
    monkeypatch.setattr(weights, "_unchanged", Upload(torch.device("cpu"), 100))
    for mine, other in zip(tensors(), straight, strict=True):
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))
