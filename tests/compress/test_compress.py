"""Whole models compressed: folders that the decoder serves, interruptions, mistakes, the card, and outlier features."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline.cli.main import main
from ridgeline.compress import inputs
from ridgeline.compress.checkpoint import Checkpoint
from ridgeline.compress.decoder import TrainableDecoder, load_decoder, save_decoder
from ridgeline.compress.evaluate import Evaluator
from ridgeline.compress.job import Job
from ridgeline.compress.layerwise import LayerwiseRunner, WithProduct, batches, collect_statistics
from ridgeline.compress.methods import fold
from ridgeline.compress.outliers import add_outliers
from ridgeline.compress.recipes import read_recipe
from ridgeline.compress.texts import calibration_rows, evaluation_windows, split
from ridgeline.core.config import ModelConfig
from ridgeline.core.errors import ConfigError, UnsupportedModel
from ridgeline.core.spec import ModelSpec
from ridgeline.models.build import build
from ridgeline.models.config import read_spec
from ridgeline.ops.reference import REFERENCE, in_8_bits
from ridgeline.quality.texts import Window

from ..cli.conftest import CONFIG, tiny
from ..models.families import save
from ..models.paged import PagedRows

__all__ = ["tiny"]
SMALL = {**CONFIG, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}


def quiet(stage: str, done: int, total: int) -> None: ...


def texts(count: int = 12, length: int = 48) -> list[tuple[int, ...]]:
    draw = random.Random(5)
    return [tuple(draw.randrange(3, 256) for _ in range(length)) for _ in range(count)]


def sequences() -> list[Window]:
    return [Window(ids, 1, place) for place, ids in enumerate(texts(6))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights whose inputs depend on each other and differ in size, as a trained model's do."""
    folder = tmp_path_factory.mktemp("small")
    torch.manual_seed(3)
    decoder = TrainableDecoder(read_spec(SMALL), 512)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.dim() == 1:
                parameter.mul_(torch.logspace(-0.7, 0.7, len(parameter))[torch.randperm(len(parameter))])
            elif "embed" in name:
                parameter.copy_(torch.randn(len(parameter), 12) @ torch.randn(12, parameter.shape[1]) * 0.3)
            else:
                parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5)
    save_decoder(decoder, folder, {**SMALL, "torch_dtype": "float32"})
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def judge(model: Path) -> Evaluator:
    return Evaluator(Checkpoint(model), sequences())


def made(model: Path, name: str, out: Path) -> Checkpoint:
    Job(Checkpoint(model), read_recipe(name), texts(), out).run(quiet)
    return Checkpoint(out)


def logits(folder: Path, ids: tuple[int, ...]) -> torch.Tensor:
    """By the decoder that serves."""
    loaded = build(folder, model=ModelConfig(), ops=REFERENCE, device=torch.device("cpu"))
    return PagedRows(loaded).step([(0, ids)])


@pytest.mark.parametrize("family", ["llama-mha-bias", "qwen2", "qwen3-window", "gemma2", "gemma3"])
def test_walking_layer_by_layer_is_the_decoder_that_serves(family: str, tmp_path: Path) -> None:
    save(family, tmp_path)
    source = Checkpoint(tmp_path)
    ids = texts(1)[0]
    walk = LayerwiseRunner(source.spec, len(ids))
    states = walk.states(source, batches([ids]), lambda _: None)[0][0]
    served = build(tmp_path, model=ModelConfig(), ops=REFERENCE, device=torch.device("cpu")).decoder.logits(states)
    torch.testing.assert_close(served, logits(tmp_path, ids), rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("family", ["llama-mha-bias", "qwen2", "gemma2", "llama-gqa"])
@pytest.mark.parametrize("recipe", ["awq-int4-g32", "smoothquant-w8a8"])
def test_folding_keeps_the_function(family: str, recipe: str, tmp_path: Path) -> None:
    save(family, tmp_path)
    source = Checkpoint(tmp_path)
    walk = LayerwiseRunner(source.spec, 48)
    streams = walk.embed(batches(texts()), source.embedding(), source.dtype)
    weights = source.layer(0)
    layer = walk.module(0, weights)
    with collect_statistics(layer) as seen:
        before = walk.run(0, layer, streams)
    folded = fold(read_recipe(recipe), source.spec, source.spec.layers[0], weights, seen)
    assert all(float((factor - 1).abs().max()) > 0.01 for factor in folded.divided.values())
    after = walk.run(0, walk.module(0, folded.weights), streams)
    for earlier, other in zip(before, after, strict=True):
        torch.testing.assert_close(other, earlier, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "name", ["rtn-int4-g32", "gptq-int4-g32", "gptq-int4-g32-ordered", "awq-int4-g32", "sparsegpt-50", "rtn-w8a8"]
)
def test_what_is_written_is_served(model: Path, name: str, tmp_path: Path) -> None:
    """The engine's decoder reads the folder and says what the walk says of it."""
    folder = made(model, name, tmp_path / "out")
    assert folder.bytes < 0.75 * Checkpoint(model).bytes
    ids = texts(1)[0]
    states = LayerwiseRunner(folder.spec, len(ids)).states(folder, batches([ids]), lambda _: None)[0][0]
    torch.testing.assert_close(logits(tmp_path / "out", ids), states @ folder.head().T, rtol=1e-2, atol=2e-2)


def test_calibrated_methods_drift_less(model: Path, judge: Evaluator, tmp_path: Path) -> None:
    def drift(name: str) -> float:
        return judge.measure(made(model, name, tmp_path / name.replace(":", "-"))).figures["kl"].value

    plain = drift("rtn-int3-g32")
    assert drift("gptq-int3-g32") < 0.8 * plain
    assert drift("awq-int3-g32-sym") < plain
    magnitude = drift("magnitude-50")
    assert drift("sparsegpt-50") < drift("wanda-50") < magnitude
    assert drift("rtn-w8a8") < 0.1 * plain


def test_the_judge_is_exact(model: Path, judge: Evaluator) -> None:
    """Against the definition on the whole model at once."""
    decoder = load_decoder(model, 64)
    with torch.no_grad():
        logprobs = decoder(torch.tensor([sequence.ids for sequence in sequences()])).log_softmax(-1)
        for layer in decoder.layers:
            for linear in (module for module in layer.modules() if isinstance(module, torch.nn.Linear)):
                linear.weight.copy_(in_8_bits(linear.weight))
        changed = decoder(torch.tensor([sequence.ids for sequence in sequences()])).log_softmax(-1)

    def weights_alone(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return inputs.float_product(x, in_8_bits(weight), bias)

    drift = judge.measure(WithProduct(Checkpoint(model), weights_alone))
    ids = torch.tensor([sequence.ids for sequence in sequences()])[:, 1:].unsqueeze(2)
    kl = (logprobs.exp() * (logprobs - changed)).sum(-1)[:, :-1].mean()
    assert drift.figures["kl"].value == pytest.approx(float(kl), rel=1e-3)
    perplexity = torch.exp(-changed[:, :-1].gather(2, ids).mean())
    assert drift.figures["perplexity"].value == pytest.approx(float(perplexity), rel=1e-4)
    same = (logprobs.argmax(-1) == changed.argmax(-1))[:, :-1].double().mean()
    assert drift.figures["top1"].value == pytest.approx(float(same))


# --- smaller shapes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("neurons-34", {"intermediate_size": 64}),
        ("heads-50", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}),
        ("layers-1", {"num_hidden_layers": 2}),
    ],
)
def test_structured_pruning_leaves_a_smaller_dense_model(
    model: Path, name: str, shape: dict[str, int], tmp_path: Path
) -> None:
    folder = made(model, name, tmp_path / "out")
    assert {key: folder.config[key] for key in shape} == shape
    source = Checkpoint(model)
    assert folder.spec.params < source.spec.params and folder.bytes < source.bytes
    assert torch.isfinite(logits(tmp_path / "out", texts(1)[0])).all()


def test_neurons_that_do_nothing_go_first(model: Path, judge: Evaluator, tmp_path: Path) -> None:
    """A model widened by neurons that nobody reads is the old model again."""
    wide, tensors = tmp_path / "wide", load_file(model / "model.safetensors")
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    for name in [name for name in tensors if ".mlp." in name]:
        along = 1 if "down_proj" in name else 0
        shape = list(tensors[name].shape)
        shape[along] = 32
        more = torch.zeros(shape) if along else torch.randn(shape)
        tensors[name] = torch.cat((tensors[name], more), along).index_select(along, order)
    wide.mkdir()
    save_file(tensors, wide / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps({**config, "intermediate_size": 128}))
    folder = made(wide, "neurons-25", tmp_path / "out")
    assert folder.spec.layers[0].d_ff == 96
    assert judge.measure(folder).figures["kl"].value < 1e-4


def test_windows_and_layer_kinds_survive_the_loss_of_layers(tmp_path: Path) -> None:
    save("gemma3", tmp_path / "source")
    source = Checkpoint(tmp_path / "source")
    folder = made(tmp_path / "source", "layers-2", tmp_path / "out")

    def kinds(spec: ModelSpec) -> list[int | None]:
        return [layer.window for layer in spec.layers]

    assert len(kinds(folder.spec)) == len(kinds(source.spec)) - 2
    assert set(kinds(folder.spec)) <= set(kinds(source.spec))
    assert torch.isfinite(logits(tmp_path / "out", texts(1)[0])).all()


# --- interruptions and mistakes ---------------------------------------------------------------------------------------


class Stopped(Exception):
    """The user lost patience."""


def stop_after(layers: int) -> Callable[[str, int, int], None]:
    def progress(stage: str, done: int, total: int) -> None:
        if done == layers:
            raise Stopped

    return progress


@pytest.mark.parametrize("name", ["gptq-int4-g32", "smoothquant-w8a8", "sparsegpt-50", "neurons-34"])
def test_an_interrupted_run_goes_on_and_ends_the_same(model: Path, name: str, tmp_path: Path) -> None:
    whole = made(model, name, tmp_path / "whole")
    out = tmp_path / "out"
    with pytest.raises(Stopped):
        Job(Checkpoint(model), read_recipe(name), texts(), out).run(stop_after(2))
    assert not out.exists()
    part = tmp_path / ".out.part"
    before = {path.name: path.stat().st_mtime_ns for path in part.glob("layer-*")}
    assert len(before) == 2
    again: dict[str, int] = {}

    def progress(stage: str, done: int, total: int) -> None:
        again.update({path.name: path.stat().st_mtime_ns for path in part.glob("layer-*")})

    Job(Checkpoint(model), read_recipe(name), texts(), out).run(progress)
    assert {name: again[name] for name in before} == before
    assert not part.exists()
    for index in range(3):
        stored, wanted = Checkpoint(out).stored_layer(index), whole.stored_layer(index)
        assert stored.keys() == wanted.keys()
        assert all(torch.equal(stored[key], wanted[key]) for key in wanted)


def test_a_run_interrupted_while_it_is_judged_need_not_begin_again(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    folder = Job(Checkpoint(model), read_recipe("rtn-int4-g32"), [], out).build(quiet)
    assert not out.exists() and Checkpoint(folder).stored_layer(0)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    again = Job(Checkpoint(model), read_recipe("rtn-int4-g32"), [], out)
    assert again.build(stop_after(1)) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    again.publish()
    assert sorted(path.name for path in out.iterdir()) == sorted(before.keys() - {"job.json"})


def test_another_run_does_not_go_on_with_old_layers(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(Stopped):
        Job(Checkpoint(model), read_recipe("rtn-int4-g32"), [], out).run(stop_after(2))
    folder = made(model, "rtn-int8-g32", out)
    assert {folder.stored_layer(index)["mlp.up_proj.weight_packed"].shape for index in range(3)} == {(96, 16)}


def spoilt(model: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    return folder


def test_a_layer_that_cannot_be_compressed_is_named_and_nothing_is_left(model: Path, tmp_path: Path) -> None:
    def nan(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.2.mlp.up_proj.weight"][3, 5] = float("nan")

    bad = spoilt(model, tmp_path / "bad", nan)
    for name, said in {
        "rtn-int4-g32": "layers.2.mlp.up_proj.weight cannot be compressed: it holds NaN",
        "wanda-3:5": "layers.0.self_attn.q_proj.weight cannot be pruned 3:5: its 64 inputs",
    }.items():
        with pytest.raises(UnsupportedModel, match=said):
            made(bad, name, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad"]


def test_what_cannot_begin_is_refused(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="needs calibration texts"):
        Job(Checkpoint(model), read_recipe("gptq-int4-g32"), [], out)
    made(model, "rtn-int4-g32", out)
    with pytest.raises(ConfigError, match="exists: give a folder"):
        made(model, "rtn-int4-g32", out)
    with pytest.raises(UnsupportedModel, match="already compressed"):
        made(out, "rtn-int4-g32", tmp_path / "twice")
    with pytest.raises(ConfigError, match="removes nothing"):
        made(model, "neurons-1", tmp_path / "none")
    with pytest.raises(ConfigError, match="3 of 3 layers cannot be removed"):
        made(model, "layers-3", tmp_path / "none")
    assert not (tmp_path / ".none.part").exists()


# --- outlier features -------------------------------------------------------------------------------------------------


def test_outliers_break_naive_w8a8_and_neither_smoothquant_nor_llm_int8(
    model: Path, judge: Evaluator, tmp_path: Path
) -> None:
    source = Checkpoint(model)
    add_outliers(source, tmp_path / "odd", channels=3)
    odd = Checkpoint(tmp_path / "odd")
    assert judge.measure(odd).figures["kl"].value < 1e-6

    def kl(candidate: WithProduct | Checkpoint) -> float:
        return judge.measure(candidate).figures["kl"].value

    usual, naive = kl(WithProduct(source, inputs.w8a8)), kl(WithProduct(odd, inputs.w8a8))
    assert naive > 30 * usual
    assert kl(made(tmp_path / "odd", "rtn-w8a8", tmp_path / "naive")) > 30 * usual
    assert kl(made(tmp_path / "odd", "smoothquant-w8a8", tmp_path / "smooth")) < 3 * usual
    assert kl(WithProduct(odd, inputs.llm_int8)) < 3 * usual


# --- texts and the command --------------------------------------------------------------------------------------------


def test_judging_texts_are_others() -> None:
    given, judging = split([f"text {number}" for number in range(9)])
    assert len(given) == 7 and len(judging) == 2 and not set(given) & set(judging)
    given, judging = split(["abcdefgh"])
    assert given + judging == ["abcdef", "gh"]


def test_rows_and_windows_stay_within_their_tokens() -> None:
    def encode(text: str) -> list[int]:
        return list(range(int(text)))

    rows = calibration_rows(["100", "40", "500", "20"], encode, 64, 256)
    assert all(32 <= len(row) <= 64 for row in rows)
    assert 256 <= sum(map(len, rows)) < 256 + 64
    assert [len(row) for row in rows] == sorted(map(len, rows), reverse=True)
    windows = evaluation_windows(["100", "40", "500"], encode, 64, 200)
    assert 200 <= sum(window.tokens for window in windows) < 264


def test_compress_writes_a_card(
    tiny: Path,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    for path in (*model.iterdir(), tiny / "tokenizer.json", tiny / "tokenizer_config.json"):
        (source / path.name).write_bytes(path.read_bytes())
    (source / "README.md").write_text("---\nlicense: mit\n---\n\n# It\n")
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(
        json.dumps({"task": "any", "prompt": "a", "pattern": "(?s).*", "max_tokens": 2})
        + "\n"
        + json.dumps({"task": "none", "prompt": "a", "exact": ["no such answer"], "max_tokens": 2})
    )
    sample = tmp_path / "sample.txt"
    sample.write_text("One text that is not the package's own. " * 80)
    words = ["--length", "64", "--calibration-tokens", "700", "--judged-tokens", "200", "--device", "cpu"]
    words += ["--calibration", str(sample)]
    words += ["--tasks", str(tasks), "--speed-tokens", "4"]
    monkeypatch.setenv("RIDGELINE_THREADS", "1")
    monkeypatch.setenv("RIDGELINE_KV_CACHE_MEMORY", "1M")
    assert main(["compress", str(source), "--recipe", "awq-int4-g32", "--out", str(out), *words]) == 0
    said = capsys.readouterr().out
    assert "perplexity" in said and "correct answers to 2 questions" in said
    card = json.loads((out / "compression.json").read_text())
    assert (card["recipe"], card["bits"], card["group"]) == ("awq-int4-g32", 4, 32)
    assert card["size_bytes"]["after"] == sum(path.stat().st_size for path in out.glob("*.safetensors"))
    assert card["memory_bytes"]["after"] < card["memory_bytes"]["before"]
    assert card["quality"]["kl"]["value"] > 0 and card["calibration"]["tokens"] >= 700
    assert card["calibration"]["texts"] == "sample.txt"
    assert card["speed"]["tok_s"]["before"] > 0 and card["speed"]["tok_s"]["after"] > 0
    assert card["tasks"]["task_accuracy"]["value"] == card["tasks"]["task_accuracy_reference"]["value"] == 0.5
    assert card["tasks"]["by_task"]["any"] == {"asked": 1, "right_reference": 1, "right": 1}
    readme = (out / "README.md").read_text()
    assert "| correct answers to 2 questions | 50.0%" in readme
    assert readme.startswith("---\nlicense: mit\nbase_model: source\n---\n") and "| perplexity |" in readme
    assert (out / "tokenizer.json").is_file()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give --recipe NAME"),
        (("--recipe", "rtn-int4-g32"), "give --out FOLDER"),
        (("--recipe", "nonsense", "--out", "/tmp/never"), "Unknown recipe 'nonsense'"),
        (("--recipe", "gptq-int4-g7", "--out", "/tmp/never"), "groups of 7 inputs cannot be served"),
        (("--recipe", "rtn-int4-g32", "--out", "/tmp/never", "--speed-tokens", "-1"), "give 0 for none"),
        (("--recipe", "rtn-int4-g32", "--out", "/tmp/never", "--device", "gpu"), "give auto, cpu or cuda"),
        (("--recipe", "rtn-int4-g32", "--out", "/tmp/never", "--length", "8"), "--length is 8: give 64 or more"),
        (
            ("--recipe", "rtn-int4-g32", "--out", "/tmp/never", "--tasks", "/nowhere"),
            "Cannot read the questions of --tasks /nowhere",
        ),
        (("--recipe", "rtn-int4-g32", "--out", "/tmp/never", "--length", "1M"), "the context of the model"),
        (("--recipe", "rtn-int4-g32", "--out", "/tmp/never", "--judged-tokens", "-5"), "--judged-tokens is -5"),
        (("--recipe", "gptq-int4-g32", "--out", "/tmp/never", "--calibration-tokens", "0"), "give 1 or more"),
        (("--recipe", "rtn-int4-g32", "--out", "/tmp/never", "--tune", "x", "--tune-rows", "0"), "--tune-rows is 0"),
    ],
)
def test_mistakes_are_named(model: Path, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compress", str(model), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_missing_sample_of_texts_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--recipe", "rtn-int4-g32", "--out", "/tmp/never", "--calibration", "/nowhere.txt", "--length", "64")
    assert main(["compress", *words]) == 2
    assert "Cannot read the text /nowhere.txt" in capsys.readouterr().err


def test_layers_that_cannot_go_are_refused_before_the_texts_are_run(model: Path, tmp_path: Path) -> None:
    for count in (0, 99):
        with pytest.raises(ConfigError, match="layers cannot be removed"):
            Job(Checkpoint(model), read_recipe(f"layers-{count}"), [(1, 2, 3)], tmp_path / "out")


def test_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compress", "--recipe", "help"]) == 0
    assert "gptq-int4-g128" in capsys.readouterr().out
