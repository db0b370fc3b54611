"""On a GPU: an engine with a part of its weights in host memory says what it says with all of them on the device, in graphs and
eagerly, and holds no more of them on the device than it planned."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.host_weights import host_weights
from ridgeline.core.sampling import SamplingParams
from ridgeline.engine.local import LocalEngine
from ridgeline.models.build import DTYPES, build, served_spec
from ridgeline.models.config import read_model
from ridgeline.ops.choose import choose
from ridgeline.wire.messages import Submit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
"""Layers small enough that the engine without the option runs them one by one, too, with the same kernels."""
SHARE = 0.6
"""Of the layers' bytes, in host memory."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("split")
    (root / "config.json").write_text(json.dumps({**SHAPE, "torch_dtype": "bfloat16"}))
    return root


def models(folder: Path, dtype: str, quantization: str) -> tuple[ModelConfig, ModelConfig]:
    """The model on the device, and with a share of its weights in host memory."""
    options = {"load_format": "dummy", "dtype": dtype, "quantization": quantization}
    whole = ModelConfig(str(folder), **options)  # type: ignore[arg-type]
    share = SHARE * served_spec(read_model(folder)[0], whole).layer_bytes / (1 << 30)
    return whole, ModelConfig(str(folder), cpu_offload_gb=share, **options)  # type: ignore[arg-type]


def answers(model: ModelConfig, **options: object) -> dict[str, list[int]]:
    """Tokens of eight requests of different lengths, some longer than a step, the last of which repeats the first."""
    config = EngineConfig(max_num_seqs=6, max_num_batched_tokens=256, kv_cache_memory=256 << 20, **options)  # type: ignore[arg-type]
    engine = LocalEngine.start(model, config)
    draw, tokens = random.Random(1), dict[str, list[int]]()
    prompts = [[draw.randrange(3, 4000) for _ in range(length)] for length in (300, 5, 700, 64, 1, 130, 20)]
    for rounds in (list(enumerate(prompts)), [(7, prompts[0])]):
        requests = [
            Submit(f"{number}", prompt, SamplingParams(max_tokens=20 + 3 * number, temperature=1.0, seed=number), 0.0)
            for number, prompt in rounds
        ]
        for delta in engine.run(requests):
            assert not delta.error, delta.error
            tokens.setdefault(delta.id, []).extend(delta.tokens)
    engine.close()
    return tokens


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [("float32", ""), ("float32", "int4"), ("bfloat16", "fp8")],
)
def test_tokens_do_not_depend_on_where_weights_are(
    folder: Path, dtype: str, quantization: str, enforce_eager: bool
) -> None:
    """float32: few tokens are multiplied on the CPU, which adds in another order. fp8: all are multiplied on the GPU."""
    whole, split = models(folder, dtype, quantization)
    assert answers(split, enforce_eager=enforce_eager) == answers(whole, enforce_eager=enforce_eager)


@pytest.mark.parametrize(
    "options",
    [{"speculate": "reference"}, {"speculate": "recycling"}, {"deterministic": True}, {"kv_offload_gb": 0.1}],
    ids=str,
)
def test_it_goes_with_drafts_fixed_sums_and_tiers(folder: Path, options: dict[str, object]) -> None:
    whole, split = models(folder, "float32", "")
    assert answers(split, **options) == answers(whole, **options)


@pytest.mark.parametrize("quantization", ["", "int4"])
def test_a_model_is_loaded_within_the_memory_that_the_plan_gives_it(folder: Path, quantization: str) -> None:
    """Also while it is loaded: a linear is on the device only until it is complete."""
    device = torch.device("cuda", torch.cuda.current_device())
    _, split = models(folder, "bfloat16", quantization)
    ops = choose(device, DTYPES["bfloat16"], eager=False)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = build(folder, model=split, ops=ops, device=device)
    spec, moved = model.spec, host_weights(model.spec)
    held, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    planned, slack = spec.weight_bytes - moved.saved_bytes, 8 << 20  # rotary tables, rounding of small tensors
    assert planned - slack < held < planned + slack
    assert peak < held + 16 * moved.largest + slack < spec.weight_bytes + 16 * moved.largest
