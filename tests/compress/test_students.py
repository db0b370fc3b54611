"""Students of a shape of their own, taught by the original or by a server, and drafters that the engine uses."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from ridgeline.cli.hosted import Hosted, private
from ridgeline.cli.main import main
from ridgeline.cli.show import Stages
from ridgeline.compress.checkpoint import Checkpoint
from ridgeline.compress.decoder import TrainableDecoder, save_decoder
from ridgeline.compress.distill import kl
from ridgeline.compress.drafter_job import attended_layer
from ridgeline.compress.served_teacher import Lessons, top_kl
from ridgeline.compress.train import Schedule, TokenRows, Trainer, Training
from ridgeline.compress.tune import trainable_decoder
from ridgeline.core.errors import ConfigError
from ridgeline.core.resolve import resolve
from ridgeline.core.sampling import SamplingParams
from ridgeline.llm import LLM
from ridgeline.models.config import read_spec
from ridgeline.quality.texts import read_texts
from ridgeline.text.tokenizer import Tokenizer

from ..cli.conftest import CONFIG, tiny

__all__ = ["tiny"]
SHAPE = {**CONFIG, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
QUIET = ("--length", "64", "--device", "cpu", "--speed-tokens", "0")
SAMPLING = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tiny: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer, trained on the corpus for a moment, so that there is something to learn from it."""
    out = tmp_path_factory.mktemp("teacher") / "model"
    torch.manual_seed(1)
    config = {**CONFIG, "torch_dtype": "bfloat16"}
    decoder = TrainableDecoder(read_spec(config), 512)
    tokenizer = Tokenizer.load(tiny)
    ids = [token for text in read_texts(corpus) for token in tokenizer.encode(text, add_special_tokens=True)]

    def loss(rows: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(decoder(rows)[:, :-1].flatten(0, 1), rows[:, 1:].flatten())

    Trainer(decoder, loss, TokenRows(torch.tensor(ids), 8, 64), Training(Schedule(60), 0.01, 0.01), out.parent).run()
    save_decoder(decoder, out, config)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / name).write_bytes((tiny / name).read_bytes())
    return out


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    lines = [
        {"text": f"The number {index} follows {index - 1}, and {2 * index} is twice as much. " * 3}
        for index in range(60)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    config = private(resolve({"model": str(folder), "device": "cpu"}, environ=os.environ))
    with Hosted(config, Stages(Console(stderr=True))) as url:
        yield url


def config_file(place: Path, **changes: object) -> Path:
    path = place / "student.json"
    path.write_text(json.dumps({**SHAPE, **changes}))
    return path


def compress(folder: Path, recipe: str, corpus: Path, out: Path, *words: object) -> int:
    common = ("--recipe", recipe, "--tune", corpus, "--out", out, *QUIET, "--tune-rows", "8")
    return main(["compress", *map(str, (folder, *common, *words))])


def drift(folder: Path, student: Path, corpus: Path) -> float:
    """KL of a student from the model, nats per token."""
    tokenizer = Tokenizer.load(folder)
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=True)[:48] for text in read_texts(corpus)[:8]])
    with torch.no_grad():
        return float(
            kl(trainable_decoder(Checkpoint(student), 64)(ids), trainable_decoder(Checkpoint(folder), 64)(ids))
        )


def test_a_student_of_any_shape_learns_from_the_original(folder: Path, corpus: Path, tmp_path: Path) -> None:
    student = config_file(tmp_path)
    assert (
        compress(folder, "distill", corpus, tmp_path / "first", "--student-config", student, "--tune-steps", "40") == 0
    )
    made = Checkpoint(tmp_path / "first")
    assert (made.spec.d_model, len(made.spec.layers)) == (32, 1)
    card = json.loads((tmp_path / "first" / "compression.json").read_text())
    assert card["recipe"] == "distill" and card["quality"]["kl"]["value"] > 0
    assert card["parameters"]["after"] < card["parameters"]["before"]
    # It goes on from a folder, and comes nearer.
    words = ("--student", tmp_path / "first", "--tune-steps", "40")
    assert compress(folder, "distill", corpus, tmp_path / "second", *words) == 0
    log = json.loads((tmp_path / "second" / "compression.json").read_text())["training"]
    assert log["loss"] < 0.97 * card["training"]["loss"]
    llm = LLM(str(tmp_path / "second"), device="cpu", max_model_len=128, max_num_seqs=2, kv_cache_memory=1_000_000)
    assert len(llm.generate("The number", SAMPLING)[0].choices[0].token_ids) == 40
    llm.close()


@pytest.mark.parametrize("logprobs", [20, pytest.param(0, marks=pytest.mark.long)])
def test_a_server_teaches_without_its_weights(
    folder: Path, corpus: Path, server: str, tmp_path: Path, logprobs: int, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (bare / name).write_bytes((folder / name).read_bytes())
    given = ("--student-config", config_file(tmp_path), "--teacher-url", server, "--teacher-logprobs", logprobs)
    results = []
    for steps in (1, 60):
        out = tmp_path / f"after-{steps}"
        assert compress(bare, "distill", corpus, out, *given, "--tune-steps", steps) == 0
        results.append(json.loads((out / "compression.json").read_text()))
    assert results[1]["training"]["loss"] < 0.9 * results[0]["training"]["loss"]
    assert results[1]["quality"] is None and results[1]["size_bytes"]["before"] is None
    assert f"ridgeline compare {server}" in capsys.readouterr().out
    assert drift(folder, tmp_path / "after-60", corpus) < 0.95 * drift(folder, tmp_path / "after-1", corpus)


def test_the_loss_on_top_tokens_is_the_kl_with_the_others_as_one_outcome() -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 3, 9), torch.randn(2, 3, 9)
    p, q = teacher.softmax(-1), student.softmax(-1)
    top = p.topk(4, -1).indices

    def merged(values: torch.Tensor) -> torch.Tensor:
        kept = values.gather(-1, top)
        return torch.cat((kept, 1 - kept.sum(-1, keepdim=True)), -1)

    expected = (merged(p) * (merged(p) / merged(q)).log()).sum(-1).mean()
    torch.testing.assert_close(top_kl(student, top, p.gather(-1, top).log()), expected)
    missing = torch.cat((top, torch.full_like(top[..., :1], -1)), -1)
    padded = torch.cat((p.gather(-1, top).log(), torch.full((2, 3, 1), -torch.inf)), -1)
    torch.testing.assert_close(top_kl(student, missing, padded), expected)


def test_sampled_rows_count_only_what_the_teacher_wrote() -> None:
    torch.manual_seed(0)
    student = TrainableDecoder(read_spec(SHAPE), 64)
    ids = torch.randint(0, 200, (2, 8), dtype=torch.int32)
    nothing = torch.empty(2, 7, 0)
    lessons = Lessons(ids, torch.tensor([8, 5]), 3, nothing.int(), nothing)
    logprobs = student(ids.long()).log_softmax(-1)
    wanted = [(0, place) for place in range(3, 8)] + [(1, 3), (1, 4)]
    expected = -torch.stack([logprobs[row, place - 1, ids[row, place].long()] for row, place in wanted]).mean()
    torch.testing.assert_close(lessons.loss(student, torch.tensor([0, 1])), expected)


@pytest.mark.parametrize(
    "kind", ["draft", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("medusa", "recurrent"))]
)
def test_a_trained_drafter_keeps_the_answers(
    folder: Path, corpus: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / kind
    words = ("--student-config", config_file(tmp_path)) if kind == "draft" else ()
    assert compress(folder, kind, corpus, out, "--tune-steps", "12", *words) == 0
    printed = capsys.readouterr().out
    assert f"ridgeline serve {folder} --speculate {kind}:{out}" in printed
    assert not list(tmp_path.glob(".*"))
    options = {
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 256,
        "max_num_seqs": 2,
        "kv_cache_memory": 4_000_000,
    }
    answers = []
    for speculate in ("", f"{kind}:{out}"):
        llm = LLM(str(folder), speculate=speculate, **options)
        answers.append(
            [answer.choices[0].token_ids for answer in llm.generate(["The number 7", "and 12 is"], SAMPLING)]
        )
        llm.close()
    assert answers[0] == answers[1]


def test_training_makes_medusa_heads_better(folder: Path, corpus: Path, tmp_path: Path) -> None:
    """The accuracies are measured on held-out text and text that the model writes."""
    first = []
    for steps in (1, 60):
        out = tmp_path / f"heads-{steps}"
        assert compress(folder, "medusa", corpus, out, "--tune-steps", steps) == 0
        first.append(json.loads((out / "config.json").read_text())["accuracies"][0][0])
    assert first[1] > first[0]


@pytest.mark.parametrize(
    ("recipe", "changes", "words", "message"),
    [
        (
            "distill",
            {"vocab_size": 321},
            (),
            "vocab_size of --student-config .* is 321, but the teacher has 320 tokens: give",
        ),
        (
            "draft",
            {"max_position_embeddings": 32},
            (),
            "max_position_embeddings .* is 32, but rows have 64 tokens: lower --length",
        ),
        ("distill", {"quantization_config": {"bits": 4}}, (), "has a quantization_config: leave it out"),
        ("distill", {"architectures": ["Unknown"]}, (), "--student-config .*student.json: .*Unknown"),
        (
            "medusa",
            {},
            (),
            "--student-config does not apply to the recipe medusa: use --recipe distill or --recipe draft",
        ),
        (
            "draft",
            {},
            ("--teacher-url", "http://127.0.0.1:9"),
            "--teacher-url does not apply to the recipe draft: use --recipe distill",
        ),
        ("distill", {}, ("--teacher-logprobs", "3"), "--teacher-logprobs applies to a server: give --teacher-url URL"),
        ("draft", {}, ("--judged-tokens", "64"), "--judged-tokens does not apply to the recipe draft, which measures"),
        ("distill", {}, ("--student", "."), "--student and --student-config exclude each other"),
        (
            "distill",
            {},
            ("--teacher-url", "http://127.0.0.1:9", "--teacher-logprobs", "21"),
            "--teacher-logprobs is 21: give 0 to 20",
        ),
    ],
)
def test_errors_name_the_option_and_the_remedy(
    folder: Path, corpus: Path, tmp_path: Path, recipe: str, changes: dict[str, object], words: tuple[str, ...], message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    student = ("--student-config", config_file(tmp_path, **changes))
    assert compress(folder, recipe, corpus, tmp_path / "out", *student, *words) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert re.search(message, error), error
    assert [path.name for path in tmp_path.iterdir()] == ["student.json"]


def test_a_student_with_another_tokenizer_is_refused(
    folder: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in folder.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["T"], vocab["e"] = vocab["e"], vocab["T"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert compress(folder, "distill", corpus, tmp_path / "out", "--student", other) == 2
    assert "gives other tokens than the teacher's: give a student with the teacher's" in capsys.readouterr().err


def test_what_is_missing_is_named(
    folder: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert main(["compress", str(folder), "--recipe", "medusa", "--out", out]) == 2
    assert "The recipe medusa trains on texts: give --tune FILE" in capsys.readouterr().err
    for recipe in ("distill", "draft"):
        assert compress(folder, recipe, corpus, tmp_path / "out") == 2
        assert (
            f"The recipe {recipe} needs a student: give --student-config CONFIG.json or --student"
            in capsys.readouterr().err
        )
    assert compress(folder, "medusa", corpus, tmp_path / "out", "--tune-rows", "6") == 2
    assert "--tune-rows a multiple of 4" in capsys.readouterr().err
    assert compress(folder, "distill", corpus, tmp_path / "out", "--student", tmp_path / "none") == 2
    assert "is not a model folder: it has no config.json" in capsys.readouterr().err


def test_a_server_that_does_not_answer_is_named(
    folder: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--student-config", config_file(tmp_path), "--teacher-url", "http://127.0.0.1:9")
    assert compress(folder, "distill", corpus, tmp_path / "out", *words) == 1
    assert "Cannot reach http://127.0.0.1:9" in capsys.readouterr().err


def test_a_recurrent_draft_attends_to_a_layer_without_a_window() -> None:
    windows = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}
    with pytest.raises(ConfigError, match="layers all have a window or a softcap: use the recipe medusa or draft"):
        attended_layer(read_spec({**CONFIG, **windows}))
    assert attended_layer(read_spec(CONFIG)) == 1
