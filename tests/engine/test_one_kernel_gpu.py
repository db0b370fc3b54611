"""On a GPU: an engine whose layers are large enough for the kernel that runs one token through all of them answers by it, and
thinks of its own answers what its other kernels think of them. In fp8-weight, which that kernel does not know, the products of few
and of many tokens are compared alone."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import pytest
import torch

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.sampling import SamplingParams
from ridgeline.engine.local import LocalEngine
from ridgeline.ops.step import SHORT
from ridgeline.ops.triton.layers_keys import UNSPLIT_SLOTS
from ridgeline.ops.triton.layers_launch import Layers
from ridgeline.speculation.controller import Controller
from ridgeline.wire.messages import StepStats, Submit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LARGE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
calls: list[int] = []
"""Tokens of each run of the kernel, while an engine starts: what it captures, and so what it replays."""
SAID = 48
APART = {"": 0.04, "fp8": 0.2, "int8": 0.04, "int4": 0.04, "fp8-weight": 0.04}
"""Nats, on average: prompts in fp8 also round what the weights are multiplied by, one token does not."""
FROM = {
    "short": 60,
    "across UNSPLIT_SLOTS": UNSPLIT_SLOTS.value - SAID // 2,
    "across SHORT": SHORT - SAID // 2,
    "long": 6444,
}
"""Tokens of a prompt. Behind UNSPLIT_SLOTS slots a KV head's keys are of several programs, behind SHORT steps have another
graph."""


@pytest.fixture(scope="module", params=[*APART])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, LocalEngine]]:
    folder: Path = tmp_path_factory.mktemp("large")
    (folder / "config.json").write_text(json.dumps(LARGE))
    model = ModelConfig(model=str(folder), load_format="dummy", max_model_len=8192, quantization=request.param)
    config = EngineConfig(max_num_seqs=4, kv_cache_memory=256 << 20, enable_prefix_caching=False)
    calls.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Layers, "__call__", counted(Layers.__call__))
        local = LocalEngine.start(model, config)
    yield request.param, local
    local.close()


def counted(call):  # type: ignore[no-untyped-def]
    def counting(self, stream, views, step):  # type: ignore[no-untyped-def]
        calls.append(stream.shape[0])
        return call(self, stream, views, step)

    return counting


def ask(
    local: LocalEngine, name: str, prompt: list[int], **sampling: object
) -> tuple[list[int], list[float], list[float]]:
    """Tokens of an answer, their log-probabilities, and those of the prompt's tokens from its second on."""
    said, logprobs, prompted = [], [], []
    params = SamplingParams(temperature=0.0, ignore_eos=True, **sampling)  # type: ignore[arg-type]
    request = Submit(name, prompt, params, time.monotonic())
    for delta in local.run([request]):
        assert delta.finish in ("", "length"), delta.error
        said += delta.tokens
        logprobs += [entry.logprob for entry in delta.logprobs or []]
        prompted += [entry.logprob for entry in delta.prompt_logprobs or []]
    return said, logprobs, prompted


@pytest.mark.parametrize("place", FROM)
def test_answers_are_what_other_kernels_would_say(engine: tuple[str, LocalEngine], place: str) -> None:
    """A prompt of many tokens runs through the products of many tokens: scored as one, an answer must be as likely as it was when
    it was said, but for what 16 bits round."""
    form, local = engine
    assert calls == [1] * len(calls) and bool(calls) is (form != "fp8-weight")  # it was captured, or ran
    prompt = [(7 * number + 3) % 4000 for number in range(FROM[place])]
    said, logprobs, _ = ask(local, f"say {place}", prompt, max_tokens=SAID, logprobs=0)
    _, _, scored = ask(local, f"score {place}", prompt + said, max_tokens=1, prompt_logprobs=0)
    assert len(said) == len(logprobs) == SAID
    apart = torch.tensor(logprobs) - torch.tensor(scored[-SAID:])
    assert apart.abs().mean() < APART[form] and apart.abs().max() < 5 * APART[form], apart


def test_one_request_after_the_other_gives_the_same(engine: tuple[str, LocalEngine]) -> None:
    _, local = engine
    prompt = list(range(100, 190))
    first, logprobs, _ = ask(local, "first", prompt, max_tokens=SAID, logprobs=0)
    ask(local, "between", list(range(900, 1400)), max_tokens=9)
    assert ask(local, "again", prompt, max_tokens=SAID, logprobs=0)[:2] == (first, logprobs)


def test_a_draft_that_is_the_target_is_nearly_always_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model runs through the kernel beside a target that verifies by others, its keys and values in the target's pages;
    drafting pauses and goes on. They agree but for what 16 bits round."""
    (tmp_path / "config.json").write_text(
        json.dumps(LARGE | {"hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64})
    )
    asked = cycle([4, 4, 4, 0, 0, 0, 0, 0, 4, 2, 2, 4, 4])
    monkeypatch.setattr(Controller, "choose", lambda self, rows, most: next(asked))
    calls.clear()
    monkeypatch.setattr(Layers, "__call__", counted(Layers.__call__))
    seen: list[StepStats] = []
    config = EngineConfig(
        max_num_seqs=2,
        max_num_batched_tokens=256,
        kv_cache_memory=256 << 20,
        enable_prefix_caching=False,
        speculate=f"draft:{tmp_path}",
    )
    model = ModelConfig(model=str(tmp_path), load_format="dummy", max_model_len=2048)
    local = LocalEngine.start(model, config, on_step=seen.append)
    assert calls == [1] * len(calls) != []
    said, _, _ = ask(local, "one", [(7 * number + 3) % 4000 for number in range(300)], max_tokens=400)
    local.close()
    drafted, accepted = (sum(getattr(record, name) for record in seen) for name in ("drafted", "accepted"))
    assert len(said) == 400
    assert accepted > 0.85 * drafted > 100, (accepted, drafted)
