"""Work that is recorded: done again it does what it did, with whatever its tensors hold by then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.sampling import SamplingParams
from ridgeline.engine import executor
from ridgeline.engine.local import LocalEngine
from ridgeline.models.hub import shipped_model
from ridgeline.ops import native_cpu
from ridgeline.ops.capture import Captured, Uncaptured
from ridgeline.ops.native import capture
from ridgeline.ops.native.binding import Library, open_library
from ridgeline.ops.native.capture import CallListCapture, CapturedCalls
from ridgeline.ops.native.files import library_path, unsupported
from ridgeline.ops.table import Normed, Ops
from ridgeline.speculation.recycling import Recycling
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.wire.messages import Submit
from tests.engine.opened import opened_controllers
from tests.engine.runners import Recorded

pytestmark = pytest.mark.skipif(unsupported() is not None, reason="the library does not run here")


@pytest.fixture(scope="module")
def native(folder: Path) -> Ops:
    ops, what = native_cpu.load(folder)
    assert ops is not None, what
    return ops


@pytest.fixture(scope="module")
def library(folder: Path) -> Library:
    return open_library(library_path(folder))


def recorded(work: Captured) -> bool:
    """Whether the third time is no call of the work."""
    assert isinstance(work, CapturedCalls)
    for _ in range(2):
        work.replay()
    return work.recorded


def test_memory_is_what_it_is_when_work_is_done_again(native: Ops) -> None:
    table, ids, weight = torch.randn(32, 48), torch.tensor([3, 7, 1], dtype=torch.int32), torch.ones(48)
    calls = []

    def work() -> torch.Tensor:
        calls.append(1)
        return native.tokenwise.rms_norm(native.tokenwise.embed(table, ids, 2.0), weight, 1e-5, False)

    capture = native.capture(work)
    for step in range(5):
        ids.copy_(torch.tensor([step, 2 * step, 31 - step]))
        replay = capture.replay()
        want = torch.nn.functional.rms_norm(table[ids.long()] * 2.0, (48,), weight, 1e-5)
        torch.testing.assert_close(replay, want)
    assert len(calls) == 2, "as it stands, then recorded"


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(lambda x: x + 1, id="torch computes"),
        pytest.param(lambda x: x.add_(1), id="in place"),
        pytest.param(lambda x: x[:, ::2].contiguous(), id="copies"),
        pytest.param(lambda x: x[torch.tensor([2, 0])], id="picks"),
        pytest.param(lambda x: x[[2, 0]], id="picks by a list"),
        pytest.param(lambda x: x[0, 0].item(), id="reads a value"),
        pytest.param(lambda x: x.numpy(), id="leaves torch"),
        pytest.param(lambda x: torch.zeros(3), id="makes memory that is not empty"),
    ],
)
def test_what_torch_computes_or_tells_is_not_recorded(native: Ops, more: Callable[[torch.Tensor], object]) -> None:
    table, ids = torch.randn(32, 48), torch.tensor([3, 7, 1], dtype=torch.int32)
    assert recorded(native.capture(lambda: native.tokenwise.embed(table, ids, 1.0)))
    assert not recorded(native.capture(lambda: more(native.tokenwise.embed(table, ids, 1.0))))


def test_views_are_recorded(native: Ops) -> None:
    table, ids = torch.randn(32, 48), torch.tensor([3, 7, 1], dtype=torch.int32)
    capture = native.capture(lambda: native.tokenwise.embed(table, ids, 1.0)[1:, :4].contiguous()[:1])
    assert not recorded(capture), "of a part a copy is made"
    part = native.capture(
        lambda: native.tokenwise.embed(table, ids.contiguous(), 1.0)[1:, None].expand(-1, 2, -1).unbind(1)[0]
    )
    assert recorded(part)
    ids.fill_(5)
    assert torch.equal(part.replay(), table[[5, 5]])


@pytest.mark.parametrize("kind", ["norm", "gate", "linear", "added", "gated", "fp8", "weights in fp8", "integers"])
def test_each_function_is_given_its_own_arguments(native: Ops, kind: str) -> None:
    """Pointers, whole numbers and floats, as they come."""
    x, weight, bias, base = torch.randn(3, 64), torch.randn(128, 64), torch.randn(128), torch.randn(3, 128)
    normed = Normed(x, torch.rand(64), 0.125, True)
    packed, small = native.matmul.unquantized.pack(weight), (weight * 8).to(torch.float8_e4m3fn)
    scales, codes = torch.rand(128), torch.randint(1, 15, (128, 64), dtype=torch.uint8)
    eight = {"fp8": native.matmul.fp8, "weights in fp8": native.matmul.fp8_weight}
    matrices = {name: ops.pack(small, scales) for name, ops in eight.items()}
    integer = native.matmul.integer.pack(codes, torch.rand(128, 2), None, 4, 32)

    def work() -> torch.Tensor:
        if kind == "norm":
            return native.tokenwise.rms_norm(x, normed.weight, normed.eps, normed.offset)
        if kind == "gate":
            return native.tokenwise.activate(x, "gelu_tanh")
        if kind == "linear":
            return native.matmul.unquantized.linear(normed, packed, bias)
        if kind == "added":
            return native.matmul.unquantized.linear_add(x, packed, bias, base)
        if kind == "gated":
            return native.matmul.unquantized.linear_activate(normed, packed, bias, "silu")
        if kind == "integers":
            return native.matmul.integer.linear(normed, integer, bias)
        return eight[kind].linear(normed, matrices[kind], bias, torch.float32)

    capture = native.capture(work)
    assert recorded(capture)
    for _ in range(3):
        x.normal_()
        held = base.normal_().clone()
        copy = capture.replay().clone()
        base.copy_(held)
        assert torch.equal(copy, work()) and copy.isfinite().all()


def test_what_takes_much_memory_is_not_kept(native: Ops) -> None:
    table, most = torch.randn(32, 1024), capture.MAX_BYTES // (1024 * 4)
    for rows in (most, most + 1):
        ids = torch.arange(rows, dtype=torch.int32) % 32
        work = native.capture(lambda ids=ids: native.tokenwise.embed(table, ids, 1.0))
        assert recorded(work) == (rows == most)


def test_a_recording_that_fails_leaves_nothing_behind(library: Library) -> None:
    def fails() -> None:
        raise ValueError("at the second time")

    result = CallListCapture(library)(fails)
    for _ in range(3):
        with pytest.raises(ValueError, match="second"):
            result.replay()
    assert library.log.calls is None


PROMPTS = ("The history of the city begins", "def add(a, b):\n    return", "Once upon a time")


@pytest.fixture(
    scope="module",
    params=[
        ("", 1),
        ("recurrent", 0),
        *(
            pytest.param(case, marks=pytest.mark.long)
            for case in (("", 0), ("recurrent", 1), ("reference+recurrent", 0))
        ),
    ],
)
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[LocalEngine, LocalEngine]]:
    """One that records its steps, and one that does not."""
    drafters, flight = request.param
    speculate = drafters.replace("recurrent", f"recurrent:{shipped_model().parent / 'recurrent'}")
    config = EngineConfig(device="cpu", speculate=speculate, max_num_seqs=8, steps_in_flight=flight)
    with pytest.MonkeyPatch.context() as patch:
        # In float32, where tokens do not depend on how many nodes a step verifies.
        model = ModelConfig(dtype="float32")
        start = LocalEngine.start(model, config)
        loaded = native_cpu.load
        patch.setattr(native_cpu, "load", lambda *given, **named: _plainly(loaded(*given, **named)))
        plain = LocalEngine.start(model, config)
    yield start, plain
    for item in (start, plain):
        item.close()


def _plainly(loaded: tuple[Ops | None, str]) -> tuple[Ops | None, str]:
    ops, name = loaded
    assert ops is not None
    return replace(ops, capture=Uncaptured), name


@pytest.mark.parametrize(
    ("rows", "sampling"),
    [
        pytest.param(1, {"temperature": 0.0}, marks=pytest.mark.long),
        pytest.param(3, {"temperature": 0.8}, marks=pytest.mark.long),
        (3, {"top_k": 30, "top_p": 0.9, "min_p": 0.02}),
    ],
)
def test_an_engine_says_the_same(engines: tuple[LocalEngine, LocalEngine], rows: int, sampling: dict[str, Any]) -> None:
    tokenizer = Tokenizer.load(shipped_model())
    said: list[dict[str, list[int]]] = []
    for engine in engines:
        texts: dict[str, list[int]] = {}
        for at, text in enumerate(PROMPTS[:rows]):
            tokens = tokenizer.encode(text, add_special_tokens=False)
            wish = SamplingParams(**sampling, max_tokens=30 + 10 * at, ignore_eos=True, seed=at)
            engine.submit(Submit(f"{at}", tokens, wish, time.monotonic(), cache=False))
        for delta in engine.deltas():
            texts.setdefault(delta.id, []).extend(delta.tokens)
        said.append(texts)
    assert said[0] == said[1]
    assert {len(tokens) for tokens in said[0].values()} == {30 + 10 * at for at in range(rows)}


def test_requests_that_follow_are_served_by_what_was_captured(
    engines: tuple[LocalEngine, LocalEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However they draw, they say what they say without; only greedy ones, and those that process logits, differ from the others.
    fresh: the two steps of a shape that build and record it."""
    engine, plain = engines
    runner = engine.engine.loop.runner
    runner.executor.forget()  # type: ignore[attr-defined]
    recorded: Any = Recorded(runner)  # type: ignore[arg-type]
    engine.engine.loop.runner = recorded

    def fresh_steps(number: int, **options: Any) -> int:
        sampling, said = SamplingParams(max_tokens=12, ignore_eos=True, **options), []
        recorded.results.clear()
        for local in (engine, plain):
            local.submit(
                Submit(f"next {number}", list(range(20 + number, 40)), sampling, time.monotonic(), cache=False)
            )
            said.append([token for delta in local.deltas() for token in delta.tokens])
        assert said[0] == said[1] and len(said[0]) == 12
        return sum(result.fresh for result in recorded.results)

    asked: list[dict[str, Any]] = [
        {"temperature": 0.8, "seed": 1},
        {"temperature": 0.8, "seed": 2},
        {"temperature": 1.4, "seed": 2, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.0},
        {"temperature": 0.0},
        {"temperature": 0.8, "logit_bias": ((7, 5.0),)},
        {"temperature": 0.8, "seed": 3},
    ]
    fresh = [fresh_steps(number, **options) for number, options in enumerate(asked)]
    if engine.engine.setup.facts["speculate"]:  # else it depends on times how many nodes are verified
        return
    assert fresh == [2, 0, 0, 2, 0, 0, 0]
    monkeypatch.setattr(executor, "MOST_SHAPES", 1)
    runner.executor.forget()  # type: ignore[attr-defined]
    fresh = [fresh_steps(number, temperature=value) for number, value in enumerate((0.8, 0.8, 0.0, 0.0, 0.8))]
    assert fresh == [2, 0, 2, 0, 2], "there is room for one"


def test_rows_whose_drafts_differ_in_length_are_recorded() -> None:
    """Some quote more of their text than others, or nothing: such steps are done again as they were recorded, and say what plain
    decoding says."""
    said: list[dict[str, list[int]]] = []
    uneven: list[bool] = []
    for speculate in ("", "reference"):
        config = EngineConfig(device="cpu", speculate=speculate, max_num_seqs=8)
        with opened_controllers() as controllers:
            engine = LocalEngine.start(ModelConfig(dtype="float32"), config)
        runner = engine.engine.loop.runner
        assert bool(controllers) is bool(speculate)
        for controller in controllers:
            controller.fixed = True
        steps = runner.executor  # type: ignore[attr-defined]

        def noted(loaded: Any, plan: Any, run: Callable[[Any, Any], Any] = steps.run) -> Any:
            shape = loaded.batch.shape
            if loaded.captured is not None and shape.logits < shape.draws * shape.width:
                uneven.append(loaded.captured.recorded)
            return run(loaded, plan)

        steps.run = noted
        texts: dict[str, list[int]] = {}
        for at in range(12):
            tokens = [300 + number for number in range(4 + at % 3)] * 6
            sampling = SamplingParams(temperature=0.3 * (at % 2), max_tokens=30, ignore_eos=True, seed=at)
            engine.submit(Submit(f"{at}", tokens, sampling, time.monotonic(), cache=False))
        for delta in engine.deltas():
            texts.setdefault(delta.id, []).extend(delta.tokens)
        said.append(texts)
        engine.close()
    assert said[0] == said[1]
    assert any(uneven), "done again"


def test_a_drafter_learns_from_steps_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its wish decides whether a step is done again as it was recorded, in the first request and in the next."""
    config = EngineConfig(device="cpu", speculate="recycling", max_num_seqs=8)
    engine = LocalEngine.start(ModelConfig(), config)
    seen: list[int] = []
    see = Recycling.see
    monkeypatch.setattr(Recycling, "see", lambda *given: (seen.append(1), see(*given)))
    item = iter([False] * 20 + [True] * 30 + [False] * 1000)
    monkeypatch.setattr(Recycling, "learns", lambda drafter: next(item))
    monkeypatch.setattr(Recycling, "draft", lambda *given: None)
    for number, (steps, learned) in enumerate(((30, 10), (40, 20))):
        seen.clear()
        sampling = SamplingParams(temperature=0.0, max_tokens=steps + 1, ignore_eos=True)
        engine.submit(Submit(f"learns {number}", list(range(20, 40)), sampling, time.monotonic(), cache=False))
        for _ in engine.deltas():
            pass
        assert abs(len(seen) - learned) <= 2
    engine.close()
