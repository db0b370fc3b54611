"""Requests of one engine use different LoRA adapters in the same steps; each gets what a model with its adapter merged gives."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ridgeline.core.adapters import SLOTS
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import ConfigError, RequestError
from ridgeline.core.resolve import split_options
from ridgeline.core.sampling import SamplingParams
from ridgeline.engine.executor import CapturedExecutor
from ridgeline.engine.graphs import GraphExecutor, GraphKey
from ridgeline.engine.local import LocalEngine
from ridgeline.engine.runner import Runner
from ridgeline.engine.shape import StepShape
from ridgeline.llm import LLM, LoRARequest
from ridgeline.models.hub import resolve_model
from ridgeline.ops import native_adapters
from ridgeline.ops.adapters import HostGroups
from ridgeline.ops.capture import Uncaptured
from ridgeline.wire.messages import Control, Reply, Submit
from tests.models.adapter_files import merge, write_adapter
from tests.models.families import save

PROMPTS = [[(11 * number + 3 * place) % 250 + 5 for place in range(40)] for number in range(3)]
SAMPLING = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=0)
ADAPTERS: Mapping[str, Mapping[str, Any]] = {
    "all": {"seed": 1},
    "some": {"seed": 2, "modules": ("v_proj", "gate_proj"), "r": 8, "lora_alpha": 4},
    "patterns": {"seed": 3, "rank_pattern": {"k_proj": 2}, "alpha_pattern": {"up_proj": 3}, "use_rslora": True},
}
ROUNDED_INPUTS = ("fp8", "fp8-weight", "w8a8", "llm-int8")
"""Number formats whose products round their input to fewer bits, so that the last bit of a sum may move it by a step."""
Answers = dict[str, tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its adapters, and the models into which they are merged."""
    folder = tmp_path_factory.mktemp("adapters")
    save("llama-gqa", folder / "base")
    for name, options in ADAPTERS.items():
        write_adapter(folder / "base", folder / name, **options)
        merge(folder / "base", folder / name, folder / f"merged-{name}")
    return folder


def start(folder: Path, **options: Any) -> LocalEngine:
    given = {"dtype": "float32", "max_model_len": 128, "device": "cpu", "threads": 1, "max_num_seqs": 8, **options}
    model, engine = split_options(given, ModelConfig, EngineConfig)
    return LocalEngine.start(ModelConfig(str(folder), **model), EngineConfig(kv_cache_memory=1 << 22, **engine))


def run(engine: LocalEngine, adapters: Sequence[str], prompt: int = 0) -> Answers:
    """The answers of one prompt with each adapter, in the same steps: tokens, and their log-probabilities."""
    for name in adapters:
        engine.submit(Submit(name or "base", PROMPTS[prompt], SAMPLING, 0.0, adapter=name))
    answers: Answers = {name: ([], []) for name in adapters}
    for delta in engine.deltas():
        assert delta.finish in ("", "length"), delta.error
        tokens, logprobs = answers["" if delta.id == "base" else delta.id]
        tokens += delta.tokens
        logprobs += [entry.logprob for entry in delta.logprobs or ()]
    return answers


def order(engine: LocalEngine, name: str, argument: str) -> dict[str, Any]:
    """The reply to an order, which is sent again while the engine reads files."""
    while True:
        (reply,) = engine.engine.handle(Control("1", name, argument))
        assert isinstance(reply, Reply)
        if not reply.facts.get("busy"):
            return reply.facts
        time.sleep(0.001)


@cache
def merged(root: Path, name: str, prompt: int) -> tuple[list[int], list[float]]:
    """What the model gives that has the adapter merged."""
    engine = start(root / (f"merged-{name}" if name else "base"))
    answer = run(engine, [""], prompt)[""]
    engine.close()
    return answer


def alone(root: Path, names: Sequence[str], prompt: int = 0) -> Answers:
    """What each model gives that has the adapter merged."""
    return {name: merged(root, name, prompt) for name in names}


def modules(root: Path, names: Sequence[str] = tuple(ADAPTERS)) -> str:
    return ",".join(f"{name}={root / name}" for name in names)


def same(got: Answers, expected: Answers, near: float = 2e-3) -> None:
    for name, (tokens, logprobs) in expected.items():
        assert got[name][0] == tokens, name
        assert got[name][1] == pytest.approx(logprobs, abs=near), name


def test_many_adapters_in_a_batch_equal_merged_models(root: Path) -> None:
    expected = alone(root, ["", *ADAPTERS])
    assert len({tuple(tokens) for tokens, _ in expected.values()}) == 4
    engine = start(root / "base", lora_modules=modules(root))
    assert [(entry["name"], entry["rank"]) for entry in engine.engine.setup.facts["adapters"]] == [
        ("all", 4),
        ("some", 8),
        ("patterns", 4),
    ]
    same(run(engine, ["all", "", "some", "patterns"]), expected)
    same(run(engine, ["patterns"]), {"patterns": expected["patterns"]})
    same(run(engine, [""]), {"": expected[""]})
    engine.close()


def test_a_step_has_the_kernels_of_adapters_if_a_row_has_one(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of a graph says so. A step without adapters replays the graph of a server without adapters."""
    expected = alone(root, ["", *ADAPTERS])
    engine = start(root / "base", lora_modules=modules(root), max_num_batched_tokens=64)
    runner = engine.engine.loop.runner
    assert isinstance(runner, Runner)
    runner.executor = graphs = GraphExecutor(runner._step, runner._sizes, Uncaptured)
    with torch.inference_mode():
        graphs.capture(lambda stage, done, total: None)
    keys = set(graphs._captured)
    assert {key._replace(adapted=False) for key in keys if key.adapted} == {
        key for key in keys if key.kind in ("step", "forward") and not key.adapted
    }
    replayed: list[tuple[str, bool]] = []
    monkeypatch.setattr(graphs, "_captured", {key: Noted(key, graphs._captured[key], replayed) for key in keys})
    same(run(engine, [""]), {"": expected[""]})
    assert set(replayed) == {("forward", False)}, "log-probabilities need the logits"
    replayed.clear()
    same(run(engine, ["all", "", "some", "patterns"]), expected)
    assert set(replayed) == {("forward", True)}
    for name in ("", "all"):
        replayed.clear()
        engine.submit(Submit(name or "base", PROMPTS[0], replace(SAMPLING, logprobs=None), 0.0, adapter=name))
        tokens = [token for delta in engine.deltas() for token in delta.tokens]
        assert tokens == expected[name][0]
        assert ("step", bool(name)) in replayed and ("step", not name) not in replayed
    engine.close()


class Noted:
    """Captured work that notes its replays."""

    def __init__(self, key: GraphKey, captured: Any, replayed: list[tuple[str, bool]]) -> None:
        self._kind, self._captured, self._replayed = (key.kind, key.adapted), captured, replayed

    def replay(self, *arguments: Any) -> Any:
        self._replayed.append(self._kind)
        return self._captured.replay(*arguments)


def test_a_cpu_records_steps_with_and_without_adapters(root: Path) -> None:
    """Two lists of calls for a shape, each of which serves whatever adapters the rows of later steps have, and slots later."""
    engine = start(root / "base", lora_modules=modules(root))
    executor = engine.engine.loop.runner.executor
    assert isinstance(executor, CapturedExecutor)
    sampling, names = replace(SAMPLING, logprobs=None), ["", *ADAPTERS]
    expected = alone(root, names)
    shape, lists = StepShape.decoding(2), list[Any]()
    for pair in (("", "all"), ("some", "patterns"), ("all", "some"), ("", ""), ("patterns", "")):
        for number, name in enumerate(pair):
            engine.submit(Submit(str(number), PROMPTS[0], sampling, 0.0, adapter=name))
        tokens: list[list[int]] = [[], []]
        for delta in engine.deltas():
            tokens[int(delta.id)] += delta.tokens
        assert tokens == [expected[name][0] for name in pair]
        loaded = executor._kept[shape, 0, True, pair != ("", "")]
        lists.append(loaded.captured)
        assert isinstance(loaded.captured, Uncaptured) or loaded.captured.recorded  # type: ignore[union-attr]
    assert lists[0] is lists[1] is lists[2] is lists[4] is not lists[3]
    order(engine, "unload_adapter", "some")
    order(engine, "load_adapter", f"again={root / 'all'}")
    for number, name in enumerate(("again", "patterns")):
        engine.submit(Submit(str(number), PROMPTS[0], sampling, 0.0, adapter=name))
    tokens = [[], []]
    for delta in engine.deltas():
        tokens[int(delta.id)] += delta.tokens
    assert tokens == [expected[name][0] for name in ("all", "patterns")], "the slot has another adapter"
    assert executor._kept[shape, 0, True, True].captured is lists[0]
    engine.close()


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"speculate": "reference"}], ids=str)
def test_a_gpu_gives_the_same(root: Path, options: dict[str, Any]) -> None:
    """In graphs, whose kernels read which row has which adapter, and after another adapter has come to a slot."""
    expected = alone(root, ["", *ADAPTERS])
    engine = start(root / "base", lora_modules=modules(root), device="cuda", **options)
    same(run(engine, ["all", "", "some", "patterns"]), expected)
    same(run(engine, ["patterns", "all"]), {name: expected[name] for name in ("patterns", "all")})
    order(engine, "unload_adapter", "some")
    order(engine, "load_adapter", f"again={root / 'all'}")
    same(run(engine, [""]), {"": expected[""]})
    same({"all": run(engine, ["again"])["again"]}, {"all": expected["all"]})
    engine.close()


def test_adapters_come_and_go_while_the_engine_runs(root: Path) -> None:
    """One slot serves one adapter after the other, and no prefix of one is used for another one, also under the same name."""
    expected = alone(root, ["", "all", "some"])
    engine = start(root / "base", enable_lora=True, max_loras=1)
    same(run(engine, [""]), {"": expected[""]})
    for name in ("all", "some", "all"):
        assert order(engine, "load_adapter", f"x={root / name}")["adapters"][0]["root"] == str(root / name)
        same({name: run(engine, ["x"])["x"]}, {name: expected[name]})
        assert "as many as --max-loras" in order(engine, "load_adapter", f"y={root / name}")["error"]
        assert "unload it first" in order(engine, "load_adapter", f"x={root / name}")["error"]
        assert order(engine, "unload_adapter", "x") == {"adapters": []}
        same(run(engine, [""]), {"": expected[""]})
    engine.submit(Submit("late", PROMPTS[0], SAMPLING, 0.0, adapter="x"))
    (refused,) = [delta for delta in engine.deltas() if delta.finish]
    assert refused.finish == "refused" and "'x' is not loaded" in refused.error
    assert "loaded are: none" in order(engine, "unload_adapter", "x")["error"]
    engine.close()


def test_a_prefix_is_found_by_requests_of_the_same_adapter_only(root: Path) -> None:
    engine = start(root / "base", lora_modules=modules(root))
    cached = {}
    for number, name in enumerate(["", "all", "some", "", "all", "some"]):
        engine.submit(Submit(str(number), PROMPTS[1], SAMPLING, 0.0, adapter=name))
        cached[number] = max(delta.cached for delta in engine.deltas())
    assert [cached[number] > 0 for number in range(6)] == [False] * 3 + [True] * 3
    engine.close()


def test_a_slot_is_not_taken_from_running_requests(root: Path) -> None:
    """A request goes on with its adapter when that is unloaded."""
    expected = alone(root, ["all"])
    engine = start(root / "base", lora_modules=modules(root, ["all"]), max_loras=1)
    engine.submit(Submit("all", PROMPTS[0], SAMPLING, 0.0, adapter="all"))
    tokens: list[int] = []
    for delta in engine.deltas():
        if not tokens:
            assert order(engine, "unload_adapter", "all") == {"adapters": []}
            assert "still run" in order(engine, "load_adapter", f"x={root / 'some'}")["error"]
        tokens += delta.tokens
    assert tokens == expected["all"][0]
    assert order(engine, "load_adapter", f"x={root / 'some'}")["adapters"][0]["name"] == "x"
    engine.close()


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"speculate": "reference"},
        {"speculate": "draft:FOLDER"},
        {"tensor_parallel_size": 2},
        {"max_num_batched_tokens": 16},
    ],
)
def test_adapters_go_with_drafts_ranks_and_chunks(root: Path, options: dict[str, Any]) -> None:
    expected = alone(root, ["all", ""])
    given = {key: str(value).replace("FOLDER", str(root / "base")) for key, value in options.items()}
    engine = start(root / "base", lora_modules=modules(root), **given)
    same(run(engine, ["all", ""]), expected)
    same(run(engine, ["all", ""]), expected)
    if "tensor_parallel_size" in options:
        assert "only at the start" in order(engine, "unload_adapter", "all")["error"]
    engine.close()


@pytest.mark.parametrize(
    "form",
    ["int8", *(pytest.param(form, marks=pytest.mark.long) for form in ("", "int4", *ROUNDED_INPUTS))],
)
def test_compiled_operations_add_to_every_format_what_the_definition_adds(
    root: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In programs of whole layers, in prompts, and in the last layer of a prompt, of which only some tokens are needed."""
    answers = []
    for path in ("definition", "compiled"):
        if path == "definition":
            monkeypatch.setattr(native_adapters, "NativeAdapters", lambda library, arena, gated: HostGroups(gated))
        engine = start(root / "base", quantization=form, lora_modules=modules(root), max_num_batched_tokens=48)
        answers.append(run(engine, ["", *ADAPTERS]))
        engine.close()
        monkeypatch.undo()
    same(answers[1], answers[0], near=5e-2 if form in ROUNDED_INPUTS else 5e-3)


@pytest.mark.long
@pytest.mark.parametrize("form", ["int4", "fp8"])
def test_quantized_models_have_adapters_too(root: Path, form: str) -> None:
    """Requests without an adapter get what they get from a server without adapters; others do not."""
    plain = start(root / "base", quantization=form)
    expected = run(plain, [""])
    plain.close()
    engine = start(root / "base", quantization=form, lora_modules=modules(root))
    answers = run(engine, ["", "all"])
    same(answers, expected)
    assert answers["all"][0] != expected[""][0]
    engine.close()


@pytest.mark.long
def test_adapters_go_with_all_of_that_together(root: Path) -> None:
    """An int4 base on two ranks that verify drafts, and prefixes found again: tokens as on one rank without drafts."""
    plain = start(root / "base", quantization="int4", lora_modules=modules(root))
    expected = run(plain, ["", *ADAPTERS])
    plain.close()
    options = {
        "quantization": "int4",
        "tensor_parallel_size": 2,
        "speculate": "reference",
        "max_num_batched_tokens": 32,
    }
    engine = start(root / "base", lora_modules=modules(root), **options)
    for _ in range(2):
        # Ranks round their parts of an input for themselves: int4 alone differs by 1e-3, also without an adapter.
        same(run(engine, ["", *ADAPTERS]), expected, near=1e-2)
    engine.submit(Submit("again", PROMPTS[0], SAMPLING, 0.0, adapter="some"))
    assert max(delta.cached for delta in engine.deltas()) > 0
    engine.close()


OFFLINE: dict[str, Any] = {"device": "cpu", "threads": 1, "dtype": "float32", "max_model_len": 128}
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the shipped model, and the model into which it is merged."""
    folder, base = tmp_path_factory.mktemp("shipped"), resolve_model(ModelConfig())
    write_adapter(base, folder / "a", seed=5)
    merge(base, folder / "a", folder / "merged")
    for file in base.glob("*token*"):
        (folder / "merged" / file.name).write_bytes(file.read_bytes())
    return folder


def test_offline_prompts_name_their_adapter(shipped: Path) -> None:
    """With vLLM's class, which loads the folder, or by the name of one that is loaded; each prompt its own."""
    sampling, prompt, lora = GREEDY, "def add(a, b):", LoRARequest("a", 1, shipped / "a")
    merged = LLM(shipped / "merged", **OFFLINE)
    expected = merged.generate(prompt, sampling)[0].text
    merged.close()
    plain = LLM(**OFFLINE)
    without = plain.generate(prompt, sampling)[0].text
    with pytest.raises(RequestError, match="--enable-lora"):
        plain.generate(prompt, sampling, lora_request=lora)
    plain.close()
    assert without != expected
    llm = LLM(enable_lora=True, **OFFLINE)
    answers = llm.generate([prompt] * 3, sampling, lora_request=[None, lora, LoRARequest("a")])
    assert [answer.text for answer in answers] == [without, expected, expected]
    assert llm.generate(prompt, sampling, "a")[0].text == expected
    assert "".join(llm.stream(prompt, sampling, lora_request=lora)) == expected
    for wrong, message in (
        ("b", "'b' is not loaded"),
        (1, "give a LoRARequest or a name"),
        (LoRARequest("a", 1, shipped), "loaded from"),
        (LoRARequest("c", 2, shipped / "nothing"), "adapter_config.json cannot be read"),
        ([lora, lora], "2 adapters for 1 prompt"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.generate(prompt, sampling, wrong)  # type: ignore[arg-type]
    llm.close()


def test_offline_adapters_of_the_start(shipped: Path) -> None:
    """Their ranks and number make the room; a chat names one too."""
    llm = LLM(lora={"a": shipped / "a", "b": shipped / "a"}, **OFFLINE)
    messages = [{"role": "user", "content": "Write a loop."}]
    plain, *adapted = (llm.chat(messages, GREEDY, name).text for name in ("", "a", "b"))
    assert adapted[0] == adapted[1] != plain
    with pytest.raises(RequestError, match="8 adapters are loaded"):
        for number in range(SLOTS):
            llm.chat(messages, GREEDY, LoRARequest(f"c{number}", number, shipped / "a"))
    llm.close()
    with pytest.raises(ConfigError, match="not a LoRA adapter"):
        LLM(lora={"a": shipped}, **OFFLINE)


@pytest.mark.long
def test_peft_gives_the_same(root: Path) -> None:
    """Adapters that PEFT itself has read, on the model of transformers."""
    peft = pytest.importorskip("peft")
    engine = start(root / "base", lora_modules=modules(root))
    answers = run(engine, list(ADAPTERS))
    engine.close()
    for name, (tokens, logprobs) in answers.items():
        base = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
        model = peft.PeftModel.from_pretrained(base, root / name).eval()
        with torch.inference_mode():
            logits = model(torch.tensor([PROMPTS[0] + tokens])).logits[0, len(PROMPTS[0]) - 1 : -1]
        expected = logits.log_softmax(-1)
        assert expected.argmax(-1).tolist() == tokens
        assert expected.max(-1).values.tolist() == pytest.approx(logprobs, abs=1e-3)


def test_options_are_checked_before_weights_load(root: Path) -> None:
    for options, message in (
        ({"lora_modules": f"{modules(root)},more={root / 'nothing'}"}, "adapter_config.json cannot be read"),
        ({"lora_modules": modules(root), "max_loras": 2}, "--max-loras is 2"),
        ({"lora_modules": modules(root), "max_lora_rank": 4}, "rank 8"),
        ({"enable_lora": True, "deterministic": True}, "--enable-lora with --deterministic"),
    ):
        with pytest.raises(ConfigError, match=message):
            start(root / "base", **options)


def test_models_without_a_gate_are_refused(tmp_path: Path) -> None:
    save("opt", tmp_path)
    with pytest.raises(
        ConfigError, match="--enable-lora with layers without a gate is not possible: .*Merge the adapter"
    ):
        start(tmp_path, enable_lora=True)
