"""Ranks that divide the experts say what a single rank says: uneven parts, copies of hot experts, prefixes, preemption, hybrids."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from ridgeline.core.config import ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.expert_parallel import rank_tokens, read_load
from ridgeline.core.experts import ExpertSpec
from ridgeline.engine.local import LocalEngine
from ridgeline.metrics.metrics import Metrics
from ridgeline.models.build import served_spec
from ridgeline.models.config import read_model
from ridgeline.wire.messages import StepStats
from tests.engine.test_group import CONFIG, Answers, answers, opened, requests
from tests.metrics.test_metrics import replace_step, scrape
from tests.models.families import save

FEW_BLOCKS = {"kv_cache_memory": 10 * 6_144}
CONTEXT, PIPELINE = {"context_parallel_size": 2}, {"pipeline_parallel_size": 2}
CASES = {
    "five over two": ("mixtral", 2, {}, {}, ()),
    "five over four": ("mixtral", 4, {}, {}, ()),
    "eight over four": ("qwen3-moe", 4, {}, {}, ()),
    "one for each token": ("mixtral-one", 2, {}, {}, ()),
    "dense layers between": ("qwen3-moe-mixed", 2, {}, {}, ()),
    "biases and sinks": ("gpt-oss", 2, {}, {}, ()),
    "int8": ("qwen3-moe", 2, {"quantization": "int8"}, {}, ()),
    "preempted": ("qwen3-moe", 2, {"max_model_len": 128}, FEW_BLOCKS, ()),
    "stages": ("qwen3-moe", 2, {}, PIPELINE, ()),
    "context": ("qwen3-moe", 2, {}, CONTEXT, ()),
    "copies": ("qwen2-moe", 2, {}, {}, (6, 1)),
    "copies over four": ("mixtral", 4, {}, {}, (4,)),
    "copies, a divided stream": ("qwen3-moe", 2, {}, {"sequence_parallel": True}, (0, 7)),
    "copies, stages, context": ("qwen3-moe", 2, {}, PIPELINE | CONTEXT, (0, 7)),
    "copies, deterministic": ("qwen3-moe", 2, {}, {"deterministic": True}, (2, 3)),
}
"""Name -> family, tensor-parallel ranks, options of model and engine, hot experts."""
SHORT = ("copies",)


def write_load(path: Path, layers: int, experts: int, hot: tuple[int, ...]) -> None:
    """What /metrics answers when the hot experts got most tokens."""
    metrics = Metrics("tiny")
    tokens = [9 if expert in hot else expert % 3 for expert in range(experts)]
    metrics.on_step(replace_step(expert_tokens=[tokens] * layers))
    path.write_bytes(metrics.render())


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.long] * (case not in SHORT)) for case in CASES])
def test_ranks_say_what_a_single_rank_says(case: str, tmp_path: Path) -> None:
    family, ranks, model, engine, hot = CASES[case]
    save(family, tmp_path)
    whole: dict[str, object] = {"expert_parallel": True}
    if hot:
        layers = [layer.experts for layer in read_model(tmp_path)[0].layers if layer.experts]
        write_load(tmp_path / "load.txt", len(layers), layers[0].count, hot)
        whole |= {"redundant_experts": len(hot), "expert_load": str(tmp_path / "load.txt")}
    single = replace(CONFIG, deterministic=engine.get("deterministic", False))
    with opened(tmp_path, single, **model) as engine_alone:
        expected = answers(engine_alone)
    with opened(tmp_path, replace(CONFIG, tensor_parallel_size=ranks, **engine), **model, **whole) as several:
        tokens, records = served(several)
        assert tokens == expected
        tokens, more = served(several)
        assert tokens == expected, "from cached prefixes"
    records += more
    assert any(record.preempted for record in records) or case != "preempted"
    for record in records:
        for counts, parts in zip(record.expert_tokens, record.rank_tokens, strict=True):
            assert len(parts) == ranks and abs(sum(counts) - sum(parts)) < ranks, "copies share their tokens"
            if case == "five over two":
                assert parts == [sum(counts[:3]), sum(counts[3:])]
    assert any(record.rank_tokens for record in records)


def served(engine: LocalEngine) -> tuple[Answers, list[StepStats]]:
    """The tokens of all requests, and the records of the steps. Later requests come later and are more urgent."""
    tokens, records = defaultdict[str, list[int]](list), list[StepStats]()
    waiting = [msgspec.structs.replace(submit, priority=-number) for number, submit in enumerate(requests())]
    while waiting or not engine.engine.idle:
        if waiting:
            engine.submit(waiting.pop(0))
        frame = engine.engine.turn()
        for delta in frame.each() if frame is not None else ():
            tokens[f"{delta.id}/{delta.choice}"].extend(delta.tokens)
        if frame is not None and frame.stats is not None:
            records.append(frame.stats)
    engine._open.clear()
    return tokens, records


def test_each_rank_holds_its_part_and_the_copies() -> None:
    for count in range(1, 9):
        for ranks in range(1, count + 1):
            for hot in ((), (0,), (count - 1, 0) if count > 1 else ()):
                spec = ExpertSpec(count, 1, 8, whole=True, hot=tuple(sorted(hot))).on_rank(ranks)
                held = [spec.held(rank) for rank in range(ranks)]
                assert [expert for part in held for expert in part] == list(range(count))
                assert max(map(len, held)) == len(held[0]) <= min(map(len, held)) + 1
                copies = [spec.copies(rank) for rank in range(ranks)]
                assert all({*part, *hot} == set(both) for part, both in zip(held, copies, strict=True))
                assert all(len(set(both)) == len(both) for both in copies)
                gate_up = next(matrix for matrix in spec.matrices(16) if matrix.name == "gate_up")
                assert gate_up.copies == max(map(len, copies))


def test_tokens_of_ranks() -> None:
    spec = ExpertSpec(5, 2, 8, whole=True).on_rank(2)
    assert rank_tokens([8, 1, 1, 4, 2], spec) == [10, 6]
    assert rank_tokens([8, 1, 1, 4, 2], replace(spec, hot=(0,))) == [6, 10]
    metrics = Metrics("tiny")
    metrics.on_step(replace_step(expert_tokens=[[8, 1, 1, 4, 2]] * 2, rank_tokens=[[10, 6], [8, 8]]))
    samples = scrape(metrics)
    assert [samples[f"ridgeline:expert_rank_tokens_total[rank={rank}]"] for rank in range(2)] == [18, 14]
    assert samples["ridgeline:expert_rank_imbalance"] == (10 / 8 + 1) / 2


def test_loads_are_read_from_metrics(tmp_path: Path) -> None:
    """Of several engines the sum; the experts with most tokens are hot, and of equal ones the first."""
    metrics = Metrics("tiny")
    metrics.on_step(replace_step(expert_tokens=[[3, 0, 5, 1, 5]] * 3))
    metrics.on_step(replace_step(expert_tokens=[[0, 9, 0, 0, 0]] * 3), engine=1)
    path = tmp_path / "load.txt"
    path.write_bytes(metrics.render())
    assert [read_load(str(path))[2, expert] for expert in range(5)] == [3, 9, 5, 1, 5]
    save("mixtral", tmp_path)
    model = ModelConfig(str(tmp_path), expert_parallel=True, redundant_experts=2, expert_load=str(path))
    spec = served_spec(read_model(tmp_path)[0], model)
    assert {layer.experts.hot for layer in spec.layers if layer.experts} == {(1, 2)}
    plain = served_spec(read_model(tmp_path)[0], replace(model, redundant_experts=0, expert_load=""))
    held = [model.on_rank(2).weight_bytes for model in (spec, plain)]
    assert held[0] > held[1], "a rank holds copies"


def test_loads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    save("mixtral", tmp_path)
    load, empty = tmp_path / "load.txt", tmp_path / "empty.txt"
    write_load(load, 3, 5, (1,))
    empty.write_text("# nothing")
    write_load(tmp_path / "short.txt", 2, 5, (1,))
    write_load(tmp_path / "wide.txt", 3, 6, (1,))
    copied = {"expert_parallel": True, "redundant_experts": 1, "expert_load": str(load)}
    cases: list[tuple[dict[str, object], str]] = [
        ({"expert_load": str(tmp_path / "none")}, "cannot be read"),
        ({"expert_load": str(empty)}, "has no sample of expert_tokens_total"),
        ({"expert_load": str(tmp_path / "short.txt")}, "has tokens of 2 layers with experts, and the model has 3"),
        ({"expert_load": str(tmp_path / "wide.txt")}, "3 with 5 each"),
        ({"redundant_experts": 5}, "fewer than the 5 experts"),
        ({"redundant_experts": -1}, "give 0 or more"),
        ({"expert_load": ""}, "give both"),
        ({"redundant_experts": 0}, "give both"),
        ({"expert_parallel": False}, "add --expert-parallel"),
    ]
    for options, reason in cases:
        with (
            pytest.raises(ConfigError, match=reason),
            opened(tmp_path, replace(CONFIG, tensor_parallel_size=2), **{**copied, **options}),
        ):
            pass
