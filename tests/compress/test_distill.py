"""Losses against the formulas, Medusa's shifts, and a student that becomes its teacher."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ridgeline.compress.decoder import TrainableDecoder
from ridgeline.compress.distill import Distillation, LossWeights, MedusaModule, kl, medusa_loss, rejection_rate
from ridgeline.compress.generate import generate, noise_keys
from ridgeline.compress.train import Schedule, TokenRows, Trainer, Training
from ridgeline.core.errors import ConfigError
from ridgeline.core.spec import LayerSpec, ModelSpec, Rope

LAYER = LayerSpec(2, 1, 8, 32, Rope(dim=8))
SPEC = ModelSpec("LlamaForCausalLM", 40, 16, (LAYER, LAYER), 128, tied=True)


def decoder(seed: int, spec: ModelSpec = SPEC) -> TrainableDecoder:
    torch.manual_seed(seed)
    model = TrainableDecoder(spec)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def rows() -> torch.Tensor:
    return torch.randint(0, 40, (3, 20), generator=torch.Generator().manual_seed(1))


def test_kl_is_that_of_torch() -> None:
    student, teacher = torch.randn(2, 3, 7), torch.randn(2, 3, 7)
    p, q = torch.distributions.Categorical(logits=teacher / 2), torch.distributions.Categorical(logits=student / 2)
    torch.testing.assert_close(kl(student, teacher, 2.0), torch.distributions.kl_divergence(p, q).mean() * 4)
    assert kl(teacher, teacher) == 0


def test_refused_is_what_the_rejection_rule_refuses() -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(1, 5), torch.randn(1, 5)
    p, q = (teacher / 0.8).softmax(-1)[0], (student / 0.8).softmax(-1)[0]
    drafts = torch.multinomial(q, 200_000, replacement=True)
    kept = torch.rand(200_000) < (p / q)[drafts]
    assert float(rejection_rate(student, teacher, 0.8)) == pytest.approx(1 - kept.float().mean().item(), abs=0.005)


def test_terms_add_up() -> None:
    student, teacher = decoder(1), decoder(2)
    parts = [
        LossWeights(),
        LossWeights(logits=0, overlap=1),
        LossWeights(logits=0, text=1),
        LossWeights(logits=0, states=1, pairs=((0, 0), (2, 2))),
    ]
    alone = [Distillation(student, teacher, part)(rows()) for part in parts]
    recipe = LossWeights(logits=0.5, overlap=2, text=3, states=4, pairs=((0, 0), (2, 2)))
    together = Distillation(student, teacher, recipe)(rows())
    torch.testing.assert_close(together, 0.5 * alone[0] + 2 * alone[1] + 3 * alone[2] + 4 * alone[3])
    text = F.cross_entropy(student(rows())[:, :-1].flatten(0, 1), rows()[:, 1:].flatten())
    torch.testing.assert_close(alone[2], text)
    a, b = student.streams(rows()), teacher.streams(rows())
    torch.testing.assert_close(alone[3], (F.mse_loss(a[0], b[0]) + F.mse_loss(a[2], b[2])) / 2)
    together.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ConfigError, match="vocabulary of the student has 41 tokens and that of the teacher 40"):
        Distillation(decoder(1, replace(SPEC, vocab_size=41)), decoder(2))
    with pytest.raises(ConfigError, match="widths 24 and 16"):
        Distillation(decoder(1, replace(SPEC, d_model=24)), decoder(2), LossWeights(states=1, pairs=((0, 0),)))


def test_a_student_comes_near_its_teacher(tmp_path: Path) -> None:
    teacher, student = decoder(2), decoder(1)
    loss = Distillation(student, teacher)
    text = torch.randint(0, 40, (4000,), generator=torch.Generator().manual_seed(4), dtype=torch.int16)
    before = loss(rows()).item()
    Trainer(student, loss, TokenRows(text, 8, 24), Training(Schedule(200, warmup=5), 0.02, 0.02), tmp_path).run()
    assert loss(rows()).item() < before / 3


def test_head_k_learns_what_the_model_says_k_places_later() -> None:
    heads, width, vocab = MedusaModule(6, heads=2), 6, 9
    hidden, wanted, unembed = torch.randn(2, 8, width), torch.randn(2, 8, vocab), torch.randn(vocab, width)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_()
    terms = []
    for k, head in enumerate(heads, 1):
        places = [(row, place) for row in range(2) for place in range(0, 6, 2)]
        said = [F.linear(head(hidden[row, place]), unembed) for row, place in places]
        terms.append(
            torch.stack(
                [kl(logits, wanted[row, place + k]) for logits, (row, place) in zip(said, places, strict=True)]
            ).mean()
        )
    mean = (0.8 * terms[0] + 0.64 * terms[1]) / (0.8 + 0.64)
    got = medusa_loss(heads, hidden, wanted, lambda x: F.linear(x, unembed), stride=2)
    torch.testing.assert_close(got, mean)
    assert sorted(heads.state_dict()) == [
        "0.0.linear.bias",
        "0.0.linear.weight",
        "1.0.linear.bias",
        "1.0.linear.weight",
    ]


def test_untrained_heads_repeat_the_models_own() -> None:
    hidden = torch.randn(3, 6)
    assert all(torch.equal(head(hidden), hidden) for head in MedusaModule(6, heads=3, layers=2))


@torch.no_grad()
def test_written_text_is_what_the_model_says() -> None:
    model = decoder(2)
    prompts = rows()[:, :5]
    greedy = generate(model, prompts, 12, torch.zeros(3), noise_keys(1, 3, prompts.device))
    assert torch.equal(greedy[:, :5], prompts)
    assert torch.equal(greedy[:, 5:], model(greedy)[:, 4:-1].argmax(-1))


@torch.no_grad()
def test_written_text_depends_on_its_key_alone() -> None:
    model, temperature = decoder(2), torch.full((3,), 0.9)
    prompts, keys = rows()[:, :5], noise_keys(1, 3, torch.device("cpu"))
    together = generate(model, prompts, 12, temperature, keys)
    alone = generate(model, prompts[1:2], 12, temperature[:1], keys[1:2])
    assert torch.equal(alone[0], together[1])
    assert not torch.equal(together, generate(model, prompts, 12, temperature, noise_keys(2, 3, keys.device)))
