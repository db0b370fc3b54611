"""The worked path: shapes are options, stages run once, a draft model is a student, and scripts know the options that it gives."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from dataclasses import asdict
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
import worked_path
from convert import convert
from model import SHAPES
from safetensors.torch import save_file

from ridgeline.compress import acceptance
from ridgeline.compress.decoder import TrainableDecoder, load_decoder
from ridgeline.compress.distill import Distillation
from ridgeline.compress.drafters import DRAFT_LOSS, Students
from ridgeline.models.config import read_model

ROOT = Path(__file__).resolve().parents[2]


def converted(folder: Path, shape: str) -> Path:
    """A model of a shape with random weights, as train.py and convert.py would write it."""
    torch.manual_seed(0)
    run = folder / f"{shape}.run"
    run.mkdir()
    decoder = TrainableDecoder(SHAPES[shape].spec())
    save_file({name: tensor.bfloat16() for name, tensor in decoder.state_dict().items()}, run / "model.safetensors")
    (run / "shape.json").write_text(json.dumps(asdict(SHAPES[shape])))
    convert(run, worked_path.TOKENIZER, folder / shape)
    return folder / shape


@pytest.mark.parametrize("shape", ["tiny", "tiny-draft"])
def test_a_run_is_converted_in_its_own_shape(tmp_path: Path, shape: str) -> None:
    spec = read_model(converted(tmp_path, shape))[0]
    assert (spec.d_model, len(spec.layers)) == (SHAPES[shape].width, SHAPES[shape].layers)


def test_the_worked_shapes_have_the_sizes_that_the_docs_state() -> None:
    sizes = {name: shape.spec().weight_bytes // 2 for name, shape in SHAPES.items()}  # bfloat16
    assert sizes["14m"] == 14_161_536
    assert sizes["107m"] == 106_980_096
    assert sizes["10m"] == 10_095_104


def test_a_draft_model_is_distilled_beside_the_other_students(tmp_path: Path) -> None:
    teacher, small = (load_decoder(converted(tmp_path, shape)) for shape in ("tiny", "tiny-draft"))
    rows = torch.randint(0, 8192, (1, 24), generator=torch.Generator().manual_seed(1))
    students = Students(teacher.requires_grad_(False), ["draft", "medusa", "recurrent"], torch.arange(64), 1, small)
    alone = Students(teacher, ["draft"], torch.arange(64), 1, small)
    expected = Distillation(small, teacher, DRAFT_LOSS)(rows)
    assert torch.allclose(alone.loss(teacher)(rows), expected), "the draft model's loss is its distillation"
    total = students.loss(teacher)(rows)
    total.backward()
    assert total > expected, "the other students' losses are added"
    assert all(parameter.grad is not None for parameter in small.parameters()), "the draft model is trained"


def test_a_draft_model_needs_a_folder(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The module has a name of its own here: benchmarks has one of the same name."""
    module_spec = spec_from_file_location("training_drafters", ROOT / "training" / "drafters.py")
    assert module_spec is not None and module_spec.loader is not None
    drafters = module_from_spec(module_spec)
    module_spec.loader.exec_module(drafters)
    monkeypatch.setattr("sys.argv", "x --model m --out o --students draft".split())
    with pytest.raises(SystemExit, match="2"):
        drafters.options()
    assert "--students draft needs --draft" in capsys.readouterr().err


def test_a_finished_stage_is_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("done", "logs"):
        (tmp_path / folder).mkdir()
    touch = [sys.executable, "-c", f"open({str(tmp_path / 'count')!r}, 'a').write('x')"]
    for _ in range(2):
        worked_path.finish("data", iter([touch]), tmp_path, dict(os.environ))
    assert (tmp_path / "count").read_text() == "x"
    assert "finished before" in capsys.readouterr().out


def test_a_failed_stage_ends_the_run_and_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(run: worked_path.Run) -> list[list[str]]:
        return [[sys.executable, "-c", "raise SystemExit('no such corpus')"], ["never"]]

    monkeypatch.setitem(worked_path.STAGES, "data", fails)
    assert worked_path.main(f"data target --corpus c --data d --work {tmp_path}".split()) == 1
    assert "no such corpus" in capsys.readouterr().err
    assert not list((tmp_path / "done").iterdir())


@pytest.mark.parametrize("sizes", [worked_path.FULL, worked_path.TINY])
def test_every_command_is_one_that_its_script_accepts(tmp_path: Path, sizes: worked_path.Sizes) -> None:
    """Each option of each command stands in its script."""
    args = Namespace(
        corpus=tmp_path, data=tmp_path, work=tmp_path, machine="m", commit="c", tiny=sizes is worked_path.TINY
    )
    args.target_seconds = args.draft_seconds = args.drafters_seconds = 1.0
    run = worked_path.Run(args, sizes)
    commands = [command for stage in worked_path.STAGES.values() for command in stage(run)]
    assert len(commands) >= 9
    for command in commands:
        text = Path(command[1]).read_text(encoding="utf-8")
        for word in command[2:]:
            if word.startswith("--"):
                assert f'"{word}"' in text, f"{command[1]} has no option {word}"


def test_converted_weights_are_those_of_the_run(tmp_path: Path) -> None:
    decoder = load_decoder(converted(tmp_path, "tiny-draft"))
    torch.manual_seed(0)
    expected = TrainableDecoder(SHAPES["tiny-draft"].spec())
    ids = torch.arange(12).unsqueeze(0)
    expected.cast_parameters(torch.bfloat16).cast_parameters(torch.float32)
    torch.testing.assert_close(decoder(ids), expected(ids))


def test_places_that_no_chain_reaches_have_accuracy_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = torch.tensor([[1, 0, 0, 0], [2, 0, 0, 0]])  # no first draw is right
    monkeypatch.setattr(acceptance, "draw_ranks", lambda *_: ranks)
    rows = torch.zeros(2, 320, dtype=torch.int64)
    text = acceptance.Text("docs", "read", rows, 64, None, torch.zeros(2, 2, dtype=torch.int32))
    figures = acceptance.recurrent_figures(None, None, text)
    assert figures["ranks"][0][:3] == [0.0, 0.5, 0.5], figures
    assert figures["ranks"][1] == [0.0] * acceptance.DRAWS, figures
