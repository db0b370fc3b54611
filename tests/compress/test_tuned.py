"""Compression with training behind it: nearer to the original, in the form that was asked for, interrupted or not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ridgeline.cli.main import main
from ridgeline.compress.checkpoint import LINEAR_NAMES, Checkpoint
from ridgeline.compress.evaluate import Evaluator
from ridgeline.compress.job import Job
from ridgeline.compress.layerwise import LayerwiseRunner, batches
from ridgeline.compress.recipes import read_recipe
from ridgeline.compress.tuned import ROWS, STEPS, TunedJob, Tuning, default_steps
from ridgeline.core.errors import ConfigError
from ridgeline.core.sampling import SamplingParams
from ridgeline.llm import LLM
from ridgeline.quality.texts import Window

from ..cli.conftest import tiny
from .test_compress import model, quiet, texts

__all__ = ["model", "tiny"]
FEW = 24
FEWEST = 8
"""Steps of a run whose answers nobody judges. As one of FEW it is saved after every step."""
CPU = torch.device("cpu")


def job(source: Path, recipe: str, out: Path, steps: int = FEW, rate: float = 2e-3) -> TunedJob:
    ids = torch.tensor(texts(20)).flatten()
    return TunedJob(Checkpoint(source), read_recipe(recipe), texts(), Tuning(ids, 32, steps, 8, rate), out)


@pytest.fixture(scope="module")
def judge(model: Path) -> Evaluator:
    return Evaluator(Checkpoint(model), [Window(ids, 1, place) for place, ids in enumerate(texts(6))])


@pytest.mark.parametrize(
    "recipe",
    [
        "sparsegpt-2:4",
        "gqa-1",
        *(
            pytest.param(recipe, marks=pytest.mark.long)
            for recipe in ("gptq-int3-g32", "magnitude-50", "rtn-int3-g32", "awq-int4-g32", "neurons-25", "layers-1")
        ),
    ],
)
def test_training_brings_the_answers_back(model: Path, judge: Evaluator, recipe: str, tmp_path: Path) -> None:
    Job(Checkpoint(model), read_recipe(recipe), texts(), tmp_path / "plain").run(quiet)
    tuned = job(model, recipe, tmp_path / "tuned", rate=4e-4 if "-int4" in recipe else 2e-3)
    tuned.build(quiet)
    assert not (tmp_path / "tuned").exists()
    tuned.publish()
    plain, after = Checkpoint(tmp_path / "plain"), Checkpoint(tmp_path / "tuned")
    assert after.spec.params == plain.spec.params and after.bytes <= plain.bytes
    assert after.storage == plain.storage and after.config == plain.config
    assert judge.measure(after).figures["kl"].value < 0.95 * judge.measure(plain).figures["kl"].value
    assert tuned.loss > 0
    if "magnitude" in recipe or "sparse" in recipe:
        weights = [after.layer(0)[f"{name}.weight"] for name in LINEAR_NAMES]
        assert all(float((weight == 0).float().mean()) == pytest.approx(0.5, abs=0.01) for weight in weights)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain", "tuned"]


@pytest.mark.parametrize("recipe", ["smoothquant-w8a8", pytest.param("rtn-w8a8", marks=pytest.mark.long)])
def test_eight_bit_weights_and_inputs_are_trained_too(
    model: Path, judge: Evaluator, recipe: str, tmp_path: Path
) -> None:
    Job(Checkpoint(model), read_recipe(recipe), texts(), tmp_path / "plain").run(quiet)
    tuned = job(model, recipe, tmp_path / "tuned", rate=2e-4)
    tuned.build(quiet)
    tuned.publish()
    plain, after = Checkpoint(tmp_path / "plain"), Checkpoint(tmp_path / "tuned")
    assert after.config == plain.config and after.bytes == plain.bytes
    assert judge.measure(after).figures["kl"].value < 0.95 * judge.measure(plain).figures["kl"].value


@pytest.mark.parametrize(
    "recipe",
    [
        "gptq-int4-g32",
        pytest.param("wanda-2:4", marks=pytest.mark.long),
        pytest.param("heads-50", marks=pytest.mark.long),
    ],
)
def test_an_interrupted_run_goes_on_and_ends_the_same(model: Path, recipe: str, tmp_path: Path) -> None:
    whole = job(model, recipe, tmp_path / "whole", FEWEST)
    whole.build(quiet)
    whole.publish()
    seen: list[int] = []

    def stopped(stage: str, done: int, total: int) -> None:
        if stage == "training":
            seen.append(done)
            if done == FEWEST // 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job(model, recipe, tmp_path / "again", FEWEST).build(stopped)
    again = job(model, recipe, tmp_path / "again", FEWEST)

    def counted(stage: str, done: int, total: int) -> None:
        if stage == "training":
            seen.append(done)

    again.build(counted)
    again.publish()
    assert seen.count(0) == 1  # it did not begin again
    first, other = Checkpoint(tmp_path / "whole"), Checkpoint(tmp_path / "again")
    for index in range(len(first.spec.layers)):
        ours, theirs = first.stored_layer(index), other.stored_layer(index)
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_another_run_does_not_go_on_with_old_weights(model: Path, tmp_path: Path) -> None:
    def stopped(stage: str, done: int, total: int) -> None:
        if stage == "training" and done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job(model, "rtn-int4-g32", tmp_path / "out").build(stopped)
    begun: list[tuple[str, int]] = []
    job(model, "rtn-int4-g32", tmp_path / "out", steps=4).build(lambda stage, done, total: begun.append((stage, done)))
    assert begun[0] == ("layers", 1) and ("training", 0) in begun


def test_few_texts_are_read_few_times() -> None:
    assert default_steps(10**9, ROWS, 512) == STEPS
    assert default_steps(100_000, ROWS, 512) * ROWS * 512 <= 200_000
    assert default_steps(600, ROWS, 512) == 1


def test_what_cannot_be_trained_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--tune-steps and --tune-rows must be at least 1"):
        job(model, "rtn-int4-g32", tmp_path / "out", steps=0)
    with pytest.raises(ConfigError, match="960 tokens, fewer than the 2048 of a row: give more text"):
        ids = torch.tensor(texts(20)).flatten()
        TunedJob(Checkpoint(model), read_recipe("rtn-int4-g32"), [], Tuning(ids, 2048, 1, 1, 1e-3), tmp_path / "out")
    with pytest.raises(ConfigError, match="does not converge.*give a smaller --tune-rate"):
        job(model, "rtn-int4-g32", tmp_path / "out", rate=float("inf")).build(quiet)
    assert not list(tmp_path.iterdir())


def with_tokenizer(model: Path, tiny: Path, folder: Path) -> Path:
    """A copy of the model with the tokenizer of another folder."""
    folder.mkdir()
    for path in (*model.iterdir(), tiny / "tokenizer.json", tiny / "tokenizer_config.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize(
    "recipe",
    [
        "awq-int4-g32",
        pytest.param("gptq-int4-g32", marks=pytest.mark.long),
        pytest.param("smoothquant-w8a8", marks=pytest.mark.long),
    ],
)
def test_the_engine_serves_a_model_trained_on_its_grid(model: Path, tiny: Path, recipe: str, tmp_path: Path) -> None:
    tuned = job(with_tokenizer(model, tiny, tmp_path / "source"), recipe, tmp_path / "out", FEWEST, 4e-4)
    tuned.build(quiet)
    tuned.publish()
    prompt = list(texts(1)[0][:20])
    llm = LLM(str(tmp_path / "out"), dtype="float32", max_model_len=64, max_num_seqs=2, kv_cache_memory=1_000_000)
    sampling = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    token = llm.generate([prompt], sampling)[0].choices[0].logprobs[0]
    llm.close()
    folder = Checkpoint(tmp_path / "out")
    ids = [tuple(prompt)]
    states = LayerwiseRunner(folder.spec, 20).states(folder, batches(ids), lambda _: None)[0][0, -1]
    expected = torch.log_softmax(states @ folder.head().T, -1)
    assert token.token == int(expected.argmax())
    # The engine rounds inputs to 15 bits, and how sums are rounded differs among processors: far tails may move by more.
    assert list(token.top_logprobs) == pytest.approx(expected.topk(5).values.tolist(), rel=4e-3, abs=0.05)


@pytest.mark.long
def test_one_command_from_checkpoint_to_card(
    tiny: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out, corpus = with_tokenizer(model, tiny, tmp_path / "source"), tmp_path / "out", tmp_path / "corpus.jsonl"
    corpus.write_text(
        "".join(json.dumps({"text": f"The number {index} follows {index - 1}. "}) + "\n" for index in range(60))
    )
    words = [
        "compress",
        str(source),
        "--recipe",
        "gptq-int3-g32",
        "--out",
        str(out),
        "--device",
        "cpu",
        "--length",
        "64",
    ]
    words += ["--judged-tokens", "200", "--speed-tokens", "4"]
    assert main([*words, "--tune-steps", "3"]) == 2
    assert "--tune-steps applies to training: give --tune FILE" in capsys.readouterr().err
    assert main([*words, "--tune", str(corpus), "--tune-steps", "3", "--tune-rows", "2"]) == 0
    card = json.loads((out / "compression.json").read_text())
    trained = card["training"]
    assert (trained["texts"], trained["steps"], trained["tokens"]) == ("corpus.jsonl", 3, 3 * 2 * 64)
    assert trained["unique_tokens"] > 600 and trained["loss"] > 0
    assert card["recipe"] == "gptq-int3-g32" and card["quality"]["kl"]["value"] > 0
    assert "Trained afterwards to match the original: 3 steps" in (out / "README.md").read_text()
    assert card["speed"]["tok_s"]["after"] > 0
    assert card["kv_bytes_per_token"]["after"] == card["kv_bytes_per_token"]["before"]
    assert (out / "tokenizer.json").is_file() and not list(tmp_path.glob(".*"))
