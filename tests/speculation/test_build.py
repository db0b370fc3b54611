"""The option `speculate`: what it may name, what it refuses, and that every way of drafting leaves the text as it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from ridgeline import LLM, Completion, SamplingParams
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.sampling import Grammar
from ridgeline.engine import device
from ridgeline.engine.engine import Engine
from ridgeline.models.build import served_spec
from ridgeline.models.config import read_model
from ridgeline.models.decoder import Decoder
from ridgeline.models.hub import shipped_model
from ridgeline.speculation.build import DEVICE_DRAFTERS, HOST_DRAFTERS, memory_of_drafters, wanted_by
from ridgeline.speculation.controller import Controller
from ridgeline.speculation.options import DRAFTERS, read_wanted
from ridgeline.wire.messages import Deltas, StepStats
from tests.combinations import crossed
from tests.engine.opened import opened_controllers, opened_engines

ASSETS = shipped_model().parent
WAYS = (
    "reference",
    "lookahead",
    "recycling",
    f"draft:{shipped_model()}",
    f"medusa:{ASSETS / 'medusa'}",
    f"recurrent:{ASSETS / 'recurrent'}",
    f"reference+lookahead+recurrent:{ASSETS / 'recurrent'}",
    "auto",
    "lookahead:w=4,n=5,g=4",
)
QUICK_WAYS = 7
"""The last two are ways of before in other words."""
PROMPTS = (
    "def add(a, b):\n    return a + b\n\ndef add(a, b):\n    return",
    "The capital of France is Paris. The capital of France is Paris. The capital of",
    "Once upon a time there was",
)
KINDS = (
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, max_tokens=24, seed=5, logprobs=2),
    SamplingParams(temperature=1.0, max_tokens=24, seed=8, top_k=40, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=0.9, max_tokens=20, seed=6, top_p=0.9, repetition_penalty=1.2, min_tokens=12),
    SamplingParams(
        temperature=0.7,
        seed=7,
        max_tokens=60,
        grammar=Grammar("json_schema", json.dumps({"type": "object", "properties": {"name": {"type": "string"}}})),
    ),
)


class Opened(NamedTuple):
    """A model, the engine that it runs and the controllers of its drafts."""

    llm: LLM
    engine: Engine
    controllers: list[Controller]


@cache
def opened(way: str) -> Opened:
    with opened_engines() as engines, opened_controllers() as controllers:
        llm = LLM(speculate=way, dtype="float32", device="cpu", max_model_len=512, max_num_seqs=8, threads=1)
    return Opened(llm, engines[0], controllers)


def engine(way: str) -> LLM:
    return opened(way).llm


@cache
def plain(kind: int) -> list[Completion]:
    return engine("").generate(PROMPTS, KINDS[kind])


def wanted(speculate: str, **options: object) -> object:
    return read_wanted(EngineConfig(speculate=speculate, **options))  # type: ignore[arg-type]


# Each kind has a way that drafts on the host or on the device; test-long tries all kinds with all ways.
@pytest.mark.parametrize(
    ("way", "kind"),
    crossed(WAYS, range(len(KINDS)), quick=lambda way, kind: way < QUICK_WAYS and kind == (way + 4) % len(KINDS)),
)
def test_the_text_is_that_of_plain_decoding(way: str, kind: int) -> None:
    """All prompts in one batch, in float32: token for token, and each token's log-probability."""
    for got, want in zip(engine(way).generate(PROMPTS, KINDS[kind]), plain(kind), strict=True):
        assert got.choices[0].token_ids == want.choices[0].token_ids
        assert got.choices[0].finish == want.choices[0].finish
        for item, other in zip(got.choices[0].logprobs or (), want.choices[0].logprobs or (), strict=True):
            assert item.token == other.token and item.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.fixture
def always_drafting(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[StepStats]]:
    """Makes an engine draft in every step, whether it pays or not. Returns the list that takes the records of the steps to come."""
    return lambda way: drafting(opened(way), monkeypatch.setattr)


def drafting(model: Opened, set_attribute: Callable[..., None]) -> list[StepStats]:
    steps: list[StepStats] = []
    _, running, controllers = model
    turn = running.turn

    def recorded() -> Deltas | None:
        frame = turn()
        if frame is not None and frame.stats is not None:
            steps.append(frame.stats)
        return frame

    set_attribute(running, "turn", recorded)
    for controller in controllers:
        set_attribute(controller, "fixed", True)
    return steps


@pytest.mark.parametrize("way", crossed(WAYS, quick=lambda way: way < QUICK_WAYS))
def test_drafts_are_kept(way: str, always_drafting: Callable[[str], list[StepStats]]) -> None:
    """On text that repeats itself every way is right at times; what it drafted and kept is counted. Always drafted: whether that
    pays depends on who else uses the machine."""
    steps = always_drafting(way)
    engine(way).generate([PROMPTS[1]], replace(KINDS[0], max_tokens=150))
    drafted, accepted = (sum(getattr(step, name) for step in steps) for name in ("drafted", "accepted"))
    assert drafted >= accepted > 0
    assert accepted == sum(sum(step.accepted_at) for step in steps)
    assert 0 < sum(step.drafts for step in steps) <= drafted


def test_rows_without_drafts_pay_for_none(
    always_drafting: Callable[[str], list[StepStats]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a row with drafts each other row has its one product with the head, and its one penalty."""
    llm, heads, penalties = engine("reference"), [], []
    steps = always_drafting("reference")
    logits, apply = Decoder.logits, device.apply_penalties
    monkeypatch.setattr(Decoder, "logits", lambda self, hidden: heads.append(len(hidden)) or logits(self, hidden))
    monkeypatch.setattr(device, "apply_penalties", lambda rows, how: penalties.append(len(rows)) or apply(rows, how))
    sampling = replace(KINDS[0], temperature=0.2, presence_penalty=0.01, seed=3)
    llm.generate([PROMPTS[1], *[PROMPTS[2]] * 5], sampling)
    assert sum(step.accepted for step in steps) > 0
    total = (
        sum(step.running + step.drafted for step in steps) + 6
    )  # a step that ends a row no longer counts it as running
    assert heads == penalties and sum(heads) <= total


def test_what_auto_means() -> None:
    assert wanted("auto") == wanted("reference")
    result, auto = ASSETS / "recurrent", EngineConfig(speculate="auto")
    spec = read_model(shipped_model())[0]
    assert wanted_by(auto, spec, ASSETS, "cpu") == wanted_by(auto, spec, shipped_model(), "cuda") == wanted("auto")
    assert wanted_by(auto, replace(spec, quantization="int4"), shipped_model(), "cpu") == wanted("auto")
    actual = wanted_by(auto, spec, shipped_model(), "cpu")
    assert (actual.host, actual.device, actual.folder) == (("reference",), "recurrent", result)
    assert opened("auto").engine.setup.facts["speculate"] == ["reference", "recurrent"]
    assert not wanted("off").max_nodes and not wanted("").max_nodes  # type: ignore[attr-defined]


def test_what_users_of_vllm_write() -> None:
    actual = wanted('{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}')
    assert (actual.host, actual.max_nodes, actual.sizes) == (("reference",), 5, (0, 1, 2, 3, 4, 5))  # type: ignore[attr-defined]
    actual = wanted("reference+lookahead:n=5,g=8")
    assert (actual.host, actual.lookahead, actual.max_nodes) == (("reference", "lookahead"), (7, 5, 8), 60)  # type: ignore[attr-defined]
    actual = wanted('{"model": "some/folder", "num_speculative_tokens": 3}')
    assert (actual.device, actual.folder, actual.max_nodes) == ("draft", Path("some/folder"), 3)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("speculate", "options", "words"),
    [
        ("hydra", {}, "'hydra' is unknown"),
        ("draft", {}, "must name a folder"),
        ("recycling:x", {}, "must not name a folder"),
        ("lookahead:w=15,n=5,g=15", {}, "a draft has at most 63"),
        ("reference+lookahead:x", {}, "'x' is not one of w=, n= and g="),
        ("recycling+medusa:x", {}, "'medusa:x' cannot be joined to 'recycling'"),
        ('{"method": "hydra", "model": "x"}', {}, "'hydra' is unknown"),
        ("{nonsense", {}, "cannot be read"),
        ('{"method": "ngram", "num_speculative_tokens": "5"}', {}, "'5', not a whole number from 1 to 63"),
        ('{"method": "ngram", "num_speculative_tokens": 64}', {}, "64, not a whole number from 1 to 63"),
    ],
)
def test_refusals(speculate: str, options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        wanted(speculate, **options)
    assert caught.value.param == "speculate"


def drafts(folder: Path) -> EngineConfig:
    return EngineConfig(speculate=f"draft:{folder}", max_num_seqs=8)


@pytest.mark.parametrize("text", ["medusa:{}", "recurrent:{}", "reference:{}/file"])
def test_what_cannot_be_opened_is_refused_before_weights_are_read(text: str, tmp_path: Path) -> None:
    spec = served_spec(read_model(shipped_model())[0], ModelConfig())
    with pytest.raises(ConfigError, match=f"--speculate: .*{tmp_path}.*(has no config.json|is not a file)"):
        memory_of_drafters(EngineConfig(speculate=text.format(tmp_path)), spec, ASSETS, "cpu")


def test_a_draft_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    config = json.loads((shipped_model() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 5000}))
    spec = served_spec(read_model(shipped_model())[0], ModelConfig())
    with pytest.raises(ConfigError, match="draft model has 5000 tokens, that of the served model 8192"):
        memory_of_drafters(drafts(tmp_path), spec, ASSETS, "cpu")
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    with pytest.raises(ConfigError, match="shorter than the served 4096"):
        memory_of_drafters(drafts(tmp_path), spec, ASSETS, "cpu")


def test_memory_is_planned_for_the_draft() -> None:
    spec = served_spec(read_model(shipped_model())[0], ModelConfig())
    asked, beside = memory_of_drafters(drafts(shipped_model()), spec, ASSETS, "cpu")
    assert asked == wanted(f"draft:{shipped_model()}")
    draft = read_model(shipped_model())[0]
    assert beside.layers == draft.layers and beside.bytes == draft.weight_bytes and beside.logit_rows == 40


def test_every_drafter_of_the_option_can_be_opened() -> None:
    """An entry of one table without one of the other would be a name that the option accepts and nobody opens."""
    assert {name for name, kind in DRAFTERS.items() if kind.on_host} == {*HOST_DRAFTERS}
    assert {name for name, kind in DRAFTERS.items() if not kind.on_host} | {""} == {*DEVICE_DRAFTERS}
