"""Published layouts of integers: words computed bit by bit here, both ways, and what a layout cannot hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ridgeline.core.errors import UnsupportedModel
from ridgeline.ops.reference import dequantized
from ridgeline.quant.layouts import Layout, Published, decode, encode


def made(outputs: int, inputs: int, form: Published) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    noise = torch.Generator().manual_seed(outputs + inputs)
    codes = torch.randint(0, 1 << form.bits, (outputs, inputs), generator=noise, dtype=torch.uint8)
    scales = (torch.rand(outputs, form.groups(inputs), generator=noise) + 0.01).half().float()
    zeros = torch.randint(1, 1 << form.bits, scales.shape, generator=noise, dtype=torch.uint8)
    return codes, scales, zeros if form.zeros else None


def word(codes: list[int], bits: int) -> int:
    """One signed 32-bit word, the first code in the lowest bits."""
    return int(np.array(sum(code << bits * at for at, code in enumerate(codes)), dtype=np.uint32).view(np.int32))


@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_tensors_words(bits: int) -> None:
    """Codes along the inputs, zero points along the outputs; rows end in half-empty words."""
    form, per = Published("pack-quantized", bits, 32, zeros=True), 32 // bits
    codes, scales, zeros = made(5, 67, form)
    assert zeros is not None
    encoded = encode(form, codes, scales, zeros)
    assert encoded["weight_shape"].tolist() == [5, 67] and encoded["weight_packed"].shape == (5, -(-67 // per))
    assert encoded["weight_zero_point"].shape == (-(-5 // per), 3)
    for row in range(5):
        for at in range(0, 67, per):
            assert encoded["weight_packed"][row, at // per] == word(codes[row, at : at + per].tolist(), bits)
    for column in range(3):
        assert encoded["weight_zero_point"][0, column] == word(zeros[:per, column].tolist(), bits)
    assert torch.equal(encoded["weight_scale"].float(), scales)


def test_gptq_words() -> None:
    form = Published("gptq", 4, 32, zeros=True)
    codes, scales, zeros = made(32, 64, form)
    assert zeros is not None
    encoded = encode(form, codes, scales, zeros)
    for out in range(32):
        for at in range(0, 64, 8):
            assert encoded["qweight"][at // 8, out] == word(codes[out, at : at + 8].tolist(), 4)
    for group in range(2):
        for out in range(0, 32, 8):
            less = [int(zeros[out + i, group]) - 1 for i in range(8)]
            assert encoded["qzeros"][group, out // 8] == word(less, 4)
    assert encoded["g_idx"].tolist() == [k // 32 for k in range(64)]
    plain = encode(Published("gptq_v2", 4, 32, zeros=True), codes, scales, zeros)
    assert plain["qzeros"][0, 0] == word(zeros[:8, 0].tolist(), 4)


def test_gptq_of_three_bits_crosses_words() -> None:
    """Ten codes and two bits of the eleventh in the first word of three."""
    form = Published("gptq", 3, 0)
    codes, scales, _ = made(32, 32, form)
    words = encode(form, codes, scales)["qweight"][:, 7].tolist()
    run = sum(int(code) << 3 * at for at, code in enumerate(codes[7].tolist()))
    assert [word & 0xFFFFFFFF for word in words] == [run >> 32 * at & 0xFFFFFFFF for at in range(3)]


def test_awq_words() -> None:
    form = Published("awq", 4, 32, zeros=True)
    codes, scales, zeros = made(16, 64, form)
    assert zeros is not None
    encoded = encode(form, codes, scales, zeros)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    for k in range(64):
        for out in (0, 8):
            assert encoded["qweight"][k, out // 8] == word([int(codes[out + i, k]) for i in order], 4)
    assert encoded["qzeros"][1, 1] == word([int(zeros[8 + i, 1]) for i in order], 4)
    assert torch.equal(encoded["scales"].float(), scales.t())


FORMS = [
    *(
        Published("pack-quantized", bits, group, zeros)
        for bits in (4, 8)
        for group in (0, 32)
        for zeros in (False, True)
    ),
    *(
        Published(layout, bits, 64, zeros)
        for layout in ("gptq", "gptq_v2")
        for bits in (3, 4, 8)
        for zeros in (False, True)
    ),  # type: ignore[arg-type]
    Published("awq", 4, 32, True),
    Published("awq", 4, 0, False),
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_what_was_written_is_read(form: Published) -> None:
    size = (32, 128) if form.layout != "pack-quantized" else (11, 75)
    codes, scales, zeros = made(*size, form)
    actual = encode(form, codes, scales, zeros)
    for name, expected in form.expected_tensors(*size).items():
        assert tuple(actual[name].shape) == expected.shape and actual[name].dtype in expected.dtypes, name
    assert set(actual) == set(form.expected_tensors(*size))
    back = decode(form, actual)
    assert torch.equal(back[0], codes) and torch.equal(back[1], scales) and back[3] is None
    assert (back[2] is None) == (zeros is None) and (zeros is None or torch.equal(back[2], zeros))  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["pack-quantized", "gptq"])
def test_the_order_of_inputs_survives(layout: Layout) -> None:
    form = Published(layout, 4, 32, order=True)
    codes, scales, _ = made(32, 96, form)
    g_idx = torch.arange(96)[torch.randperm(96, generator=torch.Generator().manual_seed(0))] // 32
    back = decode(form, encode(form, codes, scales, g_idx=g_idx))
    assert back[3] is not None and torch.equal(back[3], g_idx)


def test_the_formula() -> None:
    """A weight is (code - zero) * scale, without zero points (code - half) * scale."""
    codes = torch.tensor([[0, 7, 15, 8]], dtype=torch.uint8)
    scales, zeros = torch.tensor([[0.5, 2.0]]), torch.tensor([[3, 8]], dtype=torch.uint8)
    assert dequantized(codes, scales, zeros, 4, 2).tolist() == [[-1.5, 2.0, 14.0, 0.0]]
    assert dequantized(codes, scales, None, 4, 2).tolist() == [[-4.0, -0.5, 14.0, 0.0]]


@pytest.mark.parametrize(
    ("form", "size", "said"),
    [
        (Published("pack-quantized", 3, 32), (32, 64), "3 bits"),
        (Published("awq", 4, 32), (12, 64), "12 outputs"),
        (Published("gptq", 4, 32), (32, 60), "60 inputs"),
    ],
)
def test_what_a_layout_cannot_hold_is_refused(form: Published, size: tuple[int, int], said: str) -> None:
    codes, scales, zeros = made(*size, form)
    with pytest.raises(UnsupportedModel, match=said):
        encode(form, codes, scales, zeros)


def test_contradictions_are_refused() -> None:
    form = Published("gptq", 4, 32, zeros=True)
    codes, scales, zeros = made(32, 64, form)
    assert zeros is not None
    with pytest.raises(UnsupportedModel, match="zero points of 0"):
        encode(form, codes, scales, torch.zeros_like(zeros))
    encoded = encode(form, codes, scales, zeros)
    with pytest.raises(UnsupportedModel, match="symmetric"):
        decode(Published("gptq", 4, 32), encoded)
    encoded["g_idx"][5] = 2
    with pytest.raises(UnsupportedModel, match=r"outside 0\.\.1"):
        decode(form, encoded)
