"""LLM.int8(): which inputs are kept, what is multiplied with what, bytes, shares, and a model with outlier features served."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.compress.checkpoint import Checkpoint
from ridgeline.compress.outliers import add_outliers
from ridgeline.core.config import ModelConfig
from ridgeline.core.errors import UnsupportedModel
from ridgeline.core.spec import NUMBER_FORMATS, NumberFormat
from ridgeline.models.build import build
from ridgeline.models.hub import resolve_model
from ridgeline.ops.choose import choose
from ridgeline.ops.reference import REFERENCE, in_8_bits
from ridgeline.ops.table import Normed, Ops
from ridgeline.quant.format import LinearShape, Part, Share
from ridgeline.quant.mixed import MixedFormat, MixedWeight, least_precise_inputs
from ridgeline.text.tokenizer import Tokenizer
from tests.models.paged import PagedRows

CPU = torch.device("cpu")
FORM = NUMBER_FORMATS["llm-int8"]
HELD_OUT = Path(__file__).parents[1] / "data" / "heldout.jsonl"


def noise(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def made(
    shape: LinearShape,
    tensors: dict[tuple[int, str], torch.Tensor],
    share: Share = Share(),
    numbers: NumberFormat = FORM,
    ops: Ops = REFERENCE,
) -> MixedWeight:
    weight = MixedFormat(ops, numbers, torch.float32, CPU).create(shape, share)
    assert set(weight.expects) == set(tensors)
    for (part, name), tensor in tensors.items():
        weight.load(part, name, tensor)
    return weight


def test_the_smallest_columns_are_kept_but_not_empty_ones() -> None:
    weight = noise(16, 100)
    weight[:, [7, 40]] /= 50
    weight[:, 8] = 0.0
    assert least_precise_inputs(weight, 2).tolist() == [7, 40]


def test_kept_inputs_are_multiplied_exactly_and_the_rest_in_8_bits() -> None:
    """Kept inputs do not count for the step of a token's other inputs, however large they are."""
    shape = LinearShape(160, (Part(24, 1), Part(8, 1)), bias=True)
    weight, bias, x = noise(32, 160, seed=1), noise(32, seed=2), noise(5, 160, seed=3).clamp(-5, 5)
    kept = list(range(3, 35))
    weight[:, kept] /= 1000
    x[:, kept] *= 1000
    parts = zip(weight.split((24, 8)), bias.split((24, 8)), strict=True)
    mine = made(
        shape, {(i, n): t for i, pair in enumerate(parts) for n, t in zip(("weight", "bias"), pair, strict=True)}
    )
    near, far = x.clone(), x[:, kept].double() @ weight[:, kept].double().t()
    near[:, kept] = 0.0
    rest = weight.clone()
    rest[:, kept] = 0.0
    exact, rounded = (operand.double() @ rest.double().t() + far + bias for operand in (near, in_8_bits(near)))
    error = float((mine.apply(x).double() - rounded).norm() / (x @ weight.t() + bias).norm())
    assert error < 0.01  # what weights of 8 bits lose
    assert float((mine.apply(x).double() - exact).norm() / exact.norm()) < 0.015


def test_what_joins_a_product_is_the_plain_operation() -> None:
    weight = made(LinearShape(96, (Part(64, 1),)), {(0, "weight"): noise(64, 96, seed=1)})
    x, stream, gain = noise(3, 96, seed=2), noise(3, 64, seed=3), noise(96, seed=4)
    torch.testing.assert_close(weight.add(x, stream.clone()), stream + weight.apply(x), rtol=1e-4, atol=1e-4)
    normed = Normed(x, gain, 1e-5, False)
    product = weight.apply(REFERENCE.tokenwise.rms_norm(x, gain, 1e-5, False))
    torch.testing.assert_close(weight.apply(normed), product)
    torch.testing.assert_close(weight.activate(normed, "silu"), REFERENCE.tokenwise.activate(product, "silu"))
    assert weight.matrix() is None


@pytest.mark.parametrize("inputs", [20, 96, 100, 2080])
def test_predicted_bytes(inputs: int) -> None:
    weight = made(LinearShape(inputs, (Part(48, 1),)), {(0, "weight"): noise(48, inputs)})
    kept = FORM.kept_inputs(inputs)
    assert kept == {20: 20, 96: 32, 100: 32, 2080: 64}[inputs]
    assert sum(tensor.nbytes for tensor in weight.tensors()) == FORM.matrix_bytes(48, inputs, width=4)
    assert FORM.matrix_bytes(48, inputs) == replace(FORM, kept=0).matrix_bytes(48, inputs) + kept * (48 * 2 + 4)


def test_shares_sum_to_the_whole() -> None:
    """Ranks that share outputs keep the same inputs; those that share inputs choose among their own."""
    x, weight = noise(4, 256, seed=5), noise(32, 256, seed=6)
    rows = LinearShape(256, (Part(32, 4),), split="out")
    whole = made(rows, {(0, "weight"): weight}).apply(x)
    halves = [made(rows, {(0, "weight"): weight}, Share(rank, 2)).apply(x) for rank in range(2)]
    torch.testing.assert_close(torch.cat(halves, 1), whole, rtol=1e-5, atol=1e-5)
    columns = LinearShape(256, (Part(32, 1),), split="in", in_units=4)
    terms = [
        made(columns, {(0, "weight"): weight}, Share(rank, 2)).apply(x[:, rank * 128 : rank * 128 + 128])
        for rank in range(2)
    ]
    exact = x @ weight.t()
    assert float((sum(terms) - exact).norm()) < 1.5 * float((whole - exact).norm())


def test_what_cannot_be_held_is_refused() -> None:
    bad = noise(8, 64)
    bad[1, 2] = float("nan")
    with pytest.raises(
        UnsupportedModel, match="cannot be quantized to integers: it has values that are NaN or infinite"
    ):
        made(LinearShape(64, (Part(8, 1),)), {(0, "weight"): bad})


def perplexity(folder: Path, quantization: str, texts: int = 16, longest: int = 160) -> float:
    """Of held-out texts, by the operations that serve on this CPU, in bfloat16."""
    options = ModelConfig(model=str(folder), quantization=quantization, max_model_len=256, dtype="bfloat16")
    rows = PagedRows(build(folder, model=options, ops=choose(CPU, torch.bfloat16), device=CPU), rows=texts)
    tokenizer, lost, scored = Tokenizer.load(folder), 0.0, 0
    with HELD_OUT.open(encoding="utf-8") as lines:
        for row in range(texts):
            tokens = tokenizer.encode(json.loads(next(lines))["text"], add_special_tokens=True)[:longest]
            said = rows.step([(row, tokens)]).log_softmax(-1)[:-1]
            lost -= float(said.gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).sum())
            scored += len(tokens) - 1
    return math.exp(lost / scored)


def test_outlier_features_served(tmp_path: Path) -> None:
    """The model computes what the shipped one does: LLM.int8() costs it half a per cent at most, plain W8A8 everything."""
    folder = resolve_model(ModelConfig())
    add_outliers(Checkpoint(folder), tmp_path / "odd")
    plain = perplexity(tmp_path / "odd", "")
    assert abs(perplexity(tmp_path / "odd", "llm-int8") / plain - 1) < 0.005
    assert perplexity(tmp_path / "odd", "w8a8") > 10 * plain


@pytest.mark.long
@pytest.mark.parametrize("quantization", ["w8a8", "llm-int8"])
def test_integer_products_score_texts_as_well_as_pytorch(quantization: str) -> None:
    """The compiled operations sum integers, PyTorch multiplies the rounded inputs in floating point. An input between two steps may
    fall to either side, so single scores differ, but not their distance from the scores of the unquantized model."""
    prompts = [json.loads(line)["text"][:600] for line in HELD_OUT.read_text(encoding="utf-8").splitlines()[:8]]
    compiled = scores(prompts, quantization)
    eager, plain = scores(prompts, quantization, enforce_eager=True), scores(prompts, "")
    assert 0.85 < float((compiled - plain).abs().mean() / (eager - plain).abs().mean()) < 1.15
    assert float((compiled.mean() - plain.mean()).abs()) < 0.01


def scores(prompts: list[str], quantization: str, **options: Any) -> torch.Tensor:
    """Log-probabilities of all prompt tokens, scored together."""
    llm = LLM(quantization=quantization, device="cpu", dtype="float32", max_model_len=256, threads=1, **options)
    done = llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
    llm.close()
    return torch.tensor([token.logprob for completion in done for token in completion.prompt_logprobs or []])
