"""On a GPU: graphs, eager steps and the CPU say the same tokens in float32."""

from __future__ import annotations

import random

import pytest
import torch
import transformers

from ridgeline.engine.device import DeviceStep
from ridgeline.ops.noise import row_key, words
from tests.engine.runners import DeviceBench, alone
from tests.models.families import MORE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("exact_float32"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
KINDS: list[dict[str, object]] = [
    {},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 1.4, "seed": 4, "top_p": 0.8},
    {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"logprobs": 3, "logit_bias": ((7, 2.0),)},
    {"temperature": 1.0, "seed": 6, "allowed_token_ids": tuple(range(0, 320, 3))},
]


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(3, 320) for _ in range(draw.randrange(1, 50))] for _ in range(count)]


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-window", "gemma3", "windows-shared"])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kinds", [KINDS[:1], KINDS[:2], KINDS])
def test_the_device_says_what_the_cpu_says(
    family: str, depth: int, graphs: bool, kinds: list[dict[str, object]]
) -> None:
    """Rows join and leave at different steps, so that buckets change while they run."""
    bench = DeviceBench(family, device="cuda", rows=7, depth=depth, graphs=graphs)
    given = prompts(9)
    options = [{**kinds[number % len(kinds)], "max_tokens": 10 + 7 * number} for number in range(len(given))]
    for number, prompt in enumerate(given):
        bench.submit(f"r{number}", prompt, **options[number])  # type: ignore[arg-type]
    bench.run()
    for number, prompt in enumerate(given):
        assert bench.tokens[f"r{number}", 0] == alone(prompt, family, **options[number]), (number, options[number])
        assert bench.errors[f"r{number}", 0] == ""


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("family", sorted(MORE))
def test_other_families_on_the_device(family: str, graphs: bool) -> None:
    if not hasattr(transformers, f"{MORE[family][0]}Config"):
        pytest.skip(f"this transformers has no {MORE[family][0]}")
    bench = DeviceBench(family, device="cuda", rows=7, depth=1, graphs=graphs)
    given = prompts(5)
    for number, prompt in enumerate(given):
        bench.submit(f"r{number}", prompt, max_tokens=10 + 7 * number)
    bench.run()
    for number, prompt in enumerate(given):
        assert bench.tokens[f"r{number}", 0] == alone(prompt, family, max_tokens=10 + 7 * number), number


@pytest.mark.parametrize("graphs", [False, True])
def test_forks_preemption_and_ends(graphs: bool) -> None:
    plain = alone(max_tokens=30)
    bench = DeviceBench(device="cuda", depth=1, graphs=graphs, blocks=18, step_tokens=16)
    bench.submit("stop", stop_ids=(plain[9],), max_tokens=30)
    bench.submit("many", n=4, temperature=1.5, seed=2, max_tokens=40)
    bench.run()
    assert bench.preempted
    assert bench.tokens["stop", 0] == plain[: plain.index(plain[9]) + 1]
    again = DeviceBench(rows=1)
    again.submit("many", n=4, temperature=1.5, seed=2, max_tokens=40)
    again.run()
    assert all(bench.tokens["many", choice] == again.tokens["many", choice] for choice in range(4))


def test_noise_is_the_same_on_every_device() -> None:
    key = torch.tensor([row_key(seed, 1) for seed in range(50)], dtype=torch.int32)
    tokens = torch.arange(5000, dtype=torch.int32)
    assert torch.equal(words(key, tokens), words(key.cuda(), tokens.cuda()).cpu())


def test_out_of_memory_ends_the_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = DeviceBench(device="cuda", depth=1)
    forward = DeviceStep.forward

    def greedy_for_memory(*arguments: object) -> torch.Tensor:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        return forward(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(DeviceStep, "forward", greedy_for_memory)
        bench.submit("unlucky")
        bench.run()
    assert "memory" in bench.errors["unlucky", 0]
    bench.submit("next")
    bench.run()
    assert bench.tokens["next", 0] == alone()
