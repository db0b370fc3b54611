"""Published heads from a folder to answers: `LLM`, `ridgeline generate`, and heads for another model."""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline import LLM, SamplingParams
from ridgeline.cli.main import main
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.spec import ModelSpec
from ridgeline.engine.local import LocalEngine
from ridgeline.models.build import LoadedModel, build
from ridgeline.models.config import read_model
from ridgeline.models.eagle import load_head
from ridgeline.models.eagle_files import read_eagle, read_mtp
from ridgeline.models.hub import shipped_model
from ridgeline.ops.choose import choose
from ridgeline.ops.reference import REFERENCE
from ridgeline.speculation.controller import Controller
from ridgeline.speculation.eagle import Eagle
from ridgeline.speculation.interface import NO_SPECULATION
from ridgeline.speculation.speculator import DeviceTraits, Speculator
from ridgeline.wire.messages import Submit
from tests.combinations import crossed
from tests.engine.runners import MAX_LEN, PROMPT, DeviceBench
from tests.models.families import save
from tests.speculation.published import DEEPSEEK, LAYOUTS, eagle, mtp, save_head, save_layout
from tests.speculation.test_eagle import save_with_mtp

PROMPTS = [[5, 9, 2, 77, 41], [41, 8, 8, 9] * 6]
NODES = 4


@cache
def shipped_spec() -> ModelSpec:
    return read_model(shipped_model())[0]


def said(model: Path, speculate: str, device: str = "cpu") -> list[list[int]]:
    """Answers to both prompts, greedy and then sampled."""
    options: dict[str, Any] = {"dtype": "float32", "device": device, "max_model_len": 128}
    answers = []
    with closing(LLM(str(model), speculate=speculate, **options)) as llm:  # a GPU has room for one cache
        for way in (SamplingParams(temperature=0.0), SamplingParams(temperature=0.9, seed=3)):
            answers += llm.generate(PROMPTS, replace(way, max_tokens=20, ignore_eos=True))
    return [answer.choices[0].token_ids for answer in answers]


@cache
def said_without_drafts() -> list[list[int]]:
    return said(shipped_model(), "")


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=[] if layout in ("eagle-speculators", "eagle3-sglang") else [pytest.mark.long])
        for layout in LAYOUTS
    ],
)
def test_answers_are_those_without_drafts(tmp_path: Path, layout: str) -> None:
    save_layout(tmp_path, layout, shipped_spec())
    assert said(shipped_model(), f"eagle:{tmp_path}") == said_without_drafts()


@pytest.mark.parametrize("name", ["deepseek", pytest.param("mimo", marks=pytest.mark.long)])
def test_answers_with_mtp_layers_are_those_without_drafts(tmp_path: Path, name: str) -> None:
    save_with_mtp(tmp_path, name)
    for path in shipped_model().glob("tokenizer*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert said(tmp_path, "reference+mtp") == said(tmp_path, "")


def test_ridgeline_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_layout(tmp_path, "eagle3", shipped_spec())
    words = [
        "generate",
        str(shipped_model()),
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "-p",
        "The sea",
        "--max-tokens",
        "12",
    ]
    printed = []
    for speculate in (
        "",
        f"eagle:{folder}",
        json.dumps({"method": "eagle3", "model": str(folder), "num_speculative_tokens": 2}),
    ):
        option = "--speculative-config" if speculate.startswith("{") else "--speculate"
        assert main([*words, f"{option}={speculate}"]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] and printed == printed[:1] * 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_for_another_model(tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By name, in one line, before the model's weights are read where config.json tells."""
    save("qwen2", tmp_path / "other")
    other, _ = read_model(tmp_path / "other")
    folder = save_layout(tmp_path / "head", layout, other)
    words = ["generate", str(shipped_model()), "--device", "cpu", "-p", "a", "--speculate", f"eagle:{folder}"]
    assert main(words) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith(f"ridgeline: --speculate: {folder} cannot be used as a head: ")
    assert "in the served model" in lines[-1] and lines[-1].endswith("use a head for this model.")


def test_a_vocabulary_map_of_another_model(tmp_path: Path) -> None:
    keys, tensors = LAYOUTS["eagle3"](shipped_spec())
    tensors["d2t"] = tensors["d2t"] + 200_000
    save_head(tmp_path, (keys, tensors))
    with pytest.raises(ConfigError, match="d2t does not give 96 different tokens from 0 to 8191: download it again"):
        LLM(str(shipped_model()), device="cpu", max_model_len=128, speculate=f"eagle:{tmp_path}")


@pytest.mark.parametrize("layout", ["eagle3", pytest.param("eagle", marks=pytest.mark.long)])
def test_steps_without_drafts_are_recorded_on_a_cpu(tmp_path: Path, layout: str) -> None:
    """A head follows every step. If torch computed a value meanwhile, Python would run each step."""
    folder = save_layout(tmp_path, layout, shipped_spec())
    config = EngineConfig(device="cpu", speculate=f"eagle:{folder}", max_num_seqs=1, kv_cache_memory=1 << 26)
    with closing(LocalEngine.start(ModelConfig(), config)) as engine:
        steps = engine.engine.loop.runner.executor  # type: ignore[attr-defined]
        if engine.engine.setup.facts["ops"] != "native":
            pytest.skip("needs the compiled operations")
        engine.engine.loop.scheduler._speculation = NO_SPECULATION
        engine.submit(
            Submit("r", PROMPT, SamplingParams(max_tokens=12, ignore_eos=True), time.monotonic(), cache=False)
        )
        assert not any(delta.error for delta in engine.deltas())
        [kept] = steps._kept.values()
        assert kept.captured.recorded


# --- a head that is right ---------------------------------------------------------------------------------------------


def last_token_alone(folder: Path, device: str) -> LoadedModel:
    """A model whose next token depends on the last one alone: layers that add nothing, embeddings whose norm changes nothing."""
    save("llama-gqa", folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    embedding = tensors["model.embed_tokens.weight"]
    embedding.div_(embedding.square().mean(1, keepdim=True).sqrt())
    tensors["model.norm.weight"].fill_(1)
    keys = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(keys), encoding="utf-8")
    spec, _ = read_model(folder)
    layer = passing_on(mtp(spec, DEEPSEEK), "eh_proj", 64)
    save_file(tensors | layer, path)
    place = torch.device(device)
    ops = REFERENCE if device == "cpu" else choose(place, torch.float32)
    return build(folder, model=ModelConfig(max_model_len=MAX_LEN), ops=ops, device=place)


def passing_on(tensors: dict[str, torch.Tensor], fc: str, width: int) -> dict[str, torch.Tensor]:
    """The head's state is the embedding."""
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", f"{fc}.bias")):
            tensor.zero_()
        elif name.endswith(("norm.weight", "enorm.weight")) and "layernorm" not in name:
            tensor.fill_(1)
        elif name.endswith(f"{fc}.weight"):
            tensor.copy_(torch.cat((torch.eye(width), torch.zeros(width, width)), 1))
    return tensors


@pytest.mark.parametrize(("form", "depth"), crossed(("eagle", "mtp"), (0, 1), quick=lambda form, depth: form != depth))
def test_a_head_that_is_right_is_always_kept(tmp_path: Path, form: str, depth: int) -> None:
    check_right_head(tmp_path, form, depth=depth)


def check_right_head(folder: Path, form: str, device: str = "cpu", **facts: object) -> None:
    """Greedy and sampled, every node is kept: places draw with the noise of the target's, from the same logits."""
    target, width = last_token_alone(folder / "model", device), 64
    if form == "eagle":
        keys, tensors = eagle(target.spec)
        del tensors["embed_tokens.weight"]
        save_head(folder / "head", (keys, passing_on(tensors, "fc", width)))
        files = read_eagle(folder / "head", target.spec)
    else:
        files = read_mtp(folder / "model", target.spec)
    drafter = Eagle(load_head(files, target, folder), target)
    speculation = Speculator(None, DeviceTraits(NODES, follows_target=True), Controller((0, NODES), fixed=True))
    drafted = {"drafter": drafter, "speculation": speculation, "drafts": (0, NODES), **facts}
    plain = DeviceBench(model=target, device=device)
    bench = DeviceBench(model=target, device=device, step_tokens=16, **drafted)
    ways = ({}, {"temperature": 0.9, "seed": 3}, {"temperature": 1.2, "seed": 4, "top_p": 0.9})
    for run in (plain, bench):
        for number, way in enumerate(ways):
            run.submit(f"r{number}", PROMPT[number:] * 2, max_tokens=40, **way)  # type: ignore[arg-type]
        run.run()
    assert bench.tokens == plain.tokens
    counts = bench.scheduler.counts
    assert counts.accepted >= counts.drafted - 3 * NODES > 60, "the last draft of each may reach over the limit"
