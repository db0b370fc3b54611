"""With `deterministic` a request's tokens and log-probabilities are its own: bit-equal alone, in company, in chunks, after
preemption and behind a prefix hit. On the model that ships with Ridgeline."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.plan import TokenLogprobs
from ridgeline.core.sampling import SamplingParams
from ridgeline.engine.local import LocalEngine
from ridgeline.ops import choose as choosing
from ridgeline.ops import native_cpu
from ridgeline.ops.table import Ops
from ridgeline.wire.messages import Submit

Answers = dict[str, tuple[list[int], list[TokenLogprobs]]]
VOCAB = 8192
PREFIX = [random.Random(7).randrange(4, VOCAB) for _ in range(70)]
ANSWER = 16
ROOM = EngineConfig(
    max_num_seqs=8,
    max_num_batched_tokens=512,
    kv_cache_memory=32 << 20,
    block_size=16,
    deterministic=True,
    enable_prefix_caching=False,
)
SAMPLING = [
    SamplingParams(temperature=0.0, logprobs=5),
    SamplingParams(temperature=1.0, seed=1, logprobs=0),
    SamplingParams(temperature=0.8, seed=2, top_p=0.9, logprobs=2),
    SamplingParams(temperature=1.2, seed=3, top_k=40, top_p=0.95, repetition_penalty=1.1),
    # Alone a draw from what the head gives, beside the others from their float32.
    SamplingParams(temperature=1.2, seed=4, top_k=40, top_p=0.95, min_p=0.01),
]
QUANTIZED = ["fp8", "fp8-weight", "int4", "w8a8", "llm-int8"]
BUILT = ["bfloat16", "float32", *QUANTIZED]
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def kinds(*on_cpu: str) -> list[Any]:
    """(device, dtype): these on a CPU, every one on a GPU."""
    return [("cpu", dtype) for dtype in on_cpu] + [pytest.param("cuda", dtype, marks=ON_GPU) for dtype in BUILT]


def kinds_with(values: Sequence[int], few: Sequence[str], rare: Sequence[str]) -> list[Any]:
    """(value, device, dtype): the first value with every dtype; on a CPU the others with `few` alone. Those of `rare` are long."""
    cpu = [
        pytest.param(value, "cpu", dtype, marks=[pytest.mark.long] * (dtype in rare))
        for value in values
        for dtype in (BUILT if value == values[0] else few)
    ]
    cuda = [pytest.param(value, "cuda", dtype, marks=ON_GPU) for value in values for dtype in BUILT]
    return cpu + cuda


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """An engine sets them for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def requests(answer: int = ANSWER) -> list[Submit]:
    """Half of the prompts begin alike."""
    draw = random.Random(3)
    made = []
    for number in range(8):
        suffix = [draw.randrange(4, VOCAB) for _ in range(draw.choice((1, 5, 33, 100, 170)))]
        sampling = replace(SAMPLING[number % len(SAMPLING)], max_tokens=answer, ignore_eos=True)
        made.append(Submit(f"r{number}", PREFIX + suffix if number % 2 else suffix, sampling, float(number)))
    return made


def replace_prompt(request: Submit, size: int) -> Submit:
    """The same request after the first `size` tokens of PREFIX."""
    return Submit(request.id, PREFIX[:size], request.sampling, request.arrival)


class Session:
    """One engine; `ask` returns what each request was told."""

    def __init__(self, device: str, dtype: str, config: EngineConfig) -> None:
        if device == "cpu" and dtype in BUILT and native_cpu.load(fixed=True)[0] is None:
            pytest.skip("the native operations are not built")
        model = ModelConfig(max_model_len=288, dtype="bfloat16" if dtype in QUANTIZED else dtype)
        if dtype in QUANTIZED:
            model = replace(model, quantization=dtype)
        self.engine = LocalEngine.start(model, replace(config, device=device))
        self.cached: dict[str, int] = {}
        self.preempted: list[str] = []

    def ask(self, given: Sequence[Submit]) -> Answers:
        answers: Answers = {request.id: ([], []) for request in given}
        for delta in self.engine.run(given):
            assert not delta.error
            answers[delta.id][0].extend(delta.tokens)
            answers[delta.id][1].extend(delta.logprobs or [])
            if delta.cached >= 0:
                self.cached[delta.id] = delta.cached
            if delta.finish and delta.times and delta.times[3]:
                self.preempted.append(delta.id)
        assert all(len(answers[request.id][0]) == request.sampling.max_tokens for request in given)
        return answers


@cache
def alone(device: str, dtype: str) -> Answers:
    """What each request is told when nobody else is there and all of its prompt fits one step."""
    session = Session(device, dtype, ROOM)
    answers: Answers = {}
    for request in requests():
        answers |= session.ask([request])
    return answers


# A step in flight changes when a step is planned, not which products compute it: one dtype is enough.
# fp8 and llm-int8 have inputs in 8 bits like w8a8, int4 and float32 have weights and inputs like fp8-weight.
@pytest.mark.parametrize(
    ("steps_in_flight", "device", "dtype"), kinds_with([0, 1], ["bfloat16"], ["w8a8", "fp8-weight"])
)
def test_in_company(steps_in_flight: int, device: str, dtype: str) -> None:
    assert Session(device, dtype, replace(ROOM, steps_in_flight=steps_in_flight)).ask(requests()) == alone(
        device, dtype
    )


@pytest.mark.parametrize("step_tokens", [16, pytest.param(50, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        *kinds("bfloat16", "int4"),
        *(
            pytest.param("cpu", name, marks=pytest.mark.long)
            for name in ("float32", "llm-int8", "fp8", "fp8-weight", "w8a8")
        ),
    ],
)
def test_in_chunks(step_tokens: int, device: str, dtype: str) -> None:
    """How much of a prompt a step takes depends on who else decodes meanwhile."""
    assert Session(device, dtype, replace(ROOM, max_num_batched_tokens=step_tokens)).ask(requests()) == alone(
        device, dtype
    )


LONG = ("float32", "int4", "w8a8", "llm-int8", "fp8", "fp8-weight")
"""On a CPU bfloat16 stands for them: chunks, in which other dtypes run as well, are what recomputes tokens."""


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        *kinds(*(name for name in BUILT if name not in LONG)),
        *(pytest.param("cpu", name, marks=pytest.mark.long) for name in LONG),
    ],
)
def test_after_preemption(device: str, dtype: str) -> None:
    """Tokens that were decoded one by one are recomputed as parts of chunks."""
    given = [replace_prompt(request, 5 + number) for number, request in enumerate(requests(answer=50))]
    tight = Session(device, dtype, replace(ROOM, kv_cache_memory=(2 if dtype == "float32" else 1) * 1280 * 1024))
    got = tight.ask(given)
    preempted = [request for request in given if request.id in tight.preempted]
    others = [request for request in given if request not in preempted]
    assert preempted
    roomy = Session(device, dtype, ROOM)
    for request in preempted[:3] + others[:1]:
        assert roomy.ask([request]) == {request.id: got[request.id]}
    assert not roomy.preempted


# Behind a hit a prompt is computed as in test_in_chunks, where every dtype is.
@pytest.mark.parametrize(("device", "dtype"), [*kinds("float32"), pytest.param("cpu", "fp8", marks=pytest.mark.long)])
def test_behind_a_prefix_hit(device: str, dtype: str) -> None:
    session = Session(device, dtype, replace(ROOM, enable_prefix_caching=True))
    for _ in range(2):
        assert session.ask(requests()) == alone(device, dtype)
    assert all(session.cached[f"r{number}"] > 0 for number in (1, 3, 5, 7))


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Ops | None]:
    """The compiled operations; an engine takes the last of this list."""
    libraries = [native_cpu.load(fixed=True)[0]]
    monkeypatch.setattr(choosing.native_cpu, "load", lambda fixed: (libraries[-1], "replaced"))
    return libraries


def test_a_cpu_without_compiled_operations(loaded: list[Ops | None]) -> None:
    """Each token alone: slow, and as invariant. For quantized products there is no such thing."""
    loaded.append(None)
    few = [replace_prompt(request, size) for request, size in zip(requests(answer=4)[:3], (3, 24, 11), strict=True)]
    session = Session("cpu", "auto", ROOM)
    assert session.engine.engine.setup.facts["ops"] == "cpu, batch-invariant"
    want: Answers = {}
    for request in few:
        want |= session.ask([request])
    assert session.ask(few) == want
    assert Session("cpu", "auto", replace(ROOM, max_num_batched_tokens=16)).ask(few) == want
    for name in ("fp8", "int4", "llm-int8"):
        with pytest.raises(ConfigError, match=f"does not support --quantization {name} on cpu: use no quantization"):
            LocalEngine.start(ModelConfig(quantization=name), replace(ROOM, device="cpu"))


def test_a_format_without_invariant_products_is_refused_by_name(loaded: list[Ops | None]) -> None:
    """What there is instead is named."""
    library = loaded[0]
    if library is None:
        pytest.skip("the native operations are not built")
    without = replace(library, matmul=replace(library.matmul, without_kernel=frozenset({"fp8-weight"})))
    loaded.append(without)
    with pytest.raises(
        ConfigError,
        match="--deterministic does not support --quantization fp8-weight on cpu: use --quantization fp8 or",
    ):
        LocalEngine.start(ModelConfig(quantization="fp8-weight"), replace(ROOM, device="cpu"))
