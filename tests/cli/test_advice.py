"""When a model does not fit, the message names one command, and that command works."""

from __future__ import annotations

import shlex
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.cli.flags import parser_for, read_flags
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import DoesNotFit
from ridgeline.core.fit import Deployment, Space, size
from ridgeline.core.quantization import quantized
from ridgeline.core.resolve import CONFIGS, resolve
from ridgeline.core.sizing import GIB, Memory
from ridgeline.core.spec import LayerSpec, ModelSpec, Rope

LAYER = LayerSpec(32, 8, 128, 14336, Rope(500_000.0, 128))
LLAMA_8B = ModelSpec("LlamaForCausalLM", 128_256, 4096, (LAYER,) * 32, 131_072)


def advised(message: str) -> tuple[ModelConfig, EngineConfig] | None:
    """The configuration of the command in a message, read by the command line itself."""
    _, separator, command = message.partition("This command works: ")
    if not separator:
        assert "No option makes it fit" in message
        return None
    words = shlex.split(command)
    assert words[:2] == ["ridgeline", "serve"]
    resolved = resolve(read_flags(parser_for("serve", "", CONFIGS), words[2:]).flags)
    return resolved.model, resolved.engine


@settings(deadline=None, max_examples=150)
@given(
    memory=st.integers(1, 200).map(lambda count: count * GIB),
    kind=st.sampled_from(["cpu", "cuda"]),
    share=st.floats(0.02, 1.0).map(lambda value: round(value, 3)),
    cache=st.none() | st.integers(1, 300 * GIB),
    rows=st.none() | st.integers(1, 4096),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    formats=st.sampled_from([(), ("fp8", "int4", "int3"), ("int8", "int4-g64")]),
)
def test_the_one_command_works(
    memory: int, kind: str, share: float, cache: int | None, rows: int | None, dtype: str, formats: tuple[str, ...]
) -> None:
    spec = replace(LLAMA_8B, dtype=dtype)
    space, device = Space(formats), Memory(kind, memory)
    engine = EngineConfig(gpu_memory_utilization=share, kv_cache_memory=cache, max_num_seqs=rows)
    model = ModelConfig("my model", dtype=dtype)
    try:
        size(Deployment(spec, engine, device, model, space=space))
        return
    except DoesNotFit as error:
        advice = advised(error.message)
    if advice is None:
        smallest = min(quantized(LLAMA_8B, name).weight_bytes for name in ("", *formats))
        assert memory < smallest / 0.8 + 2 * GIB
        return
    asked, changed = advice
    assert asked.model == "my model"
    length = asked.max_model_len or spec.max_len
    served = replace(quantized(spec, asked.quantization), dtype=asked.dtype, max_len=length)
    plan = size(Deployment(served, changed, device, asked))
    assert plan.sequences >= 1 and plan.total_bytes <= plan.usable_bytes
