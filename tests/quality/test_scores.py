"""Who can be asked: the engine, a stored file, servers of both dialects; and the command over them."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ridgeline.cli.main import main
from ridgeline.compress.decoder import TrainableDecoder, load_decoder, save_decoder
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import ConfigError, EngineFailed
from ridgeline.engine.local import LocalEngine
from ridgeline.models.config import read_spec
from ridgeline.quality.scores import EngineScorer, Scores, StoredScorer, store
from ridgeline.quality.served import Endpoint, ServerScorer
from ridgeline.quality.texts import Window, windows
from ridgeline.text.tokenizer import Tokenizer

from ..cli.conftest import CONFIG, tiny

__all__ = ["tiny"]
TEXTS = ["The quick brown fox jumps over the lazy dog.", "Ridges lie where memory meets arithmetic."]
TOP = 5


def quiet(stage: str, done: int, total: int) -> None: ...


@pytest.fixture(scope="module")
def model(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny folder with random weights, large enough that tokens differ."""
    folder = tmp_path_factory.mktemp("scored")
    torch.manual_seed(1)
    decoder = TrainableDecoder(read_spec(CONFIG), 512)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.2)
    save_decoder(decoder, folder, CONFIG)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def sequences(model: Path) -> list[Window]:
    tokenizer = Tokenizer.load(model)
    return windows(TEXTS, lambda text: tokenizer.encode(text, add_special_tokens=True), 24, 4)


@pytest.fixture(scope="module")
def known(model: Path, sequences: list[Window]) -> list[torch.Tensor]:
    """What the model says of each window's scored tokens by plain PyTorch: log-probabilities [n, vocab]."""
    decoder = load_decoder(model, 512)
    with torch.no_grad():
        return [
            decoder(torch.tensor([sequence.ids]))[0, sequence.first - 1 : -1].log_softmax(-1) for sequence in sequences
        ]


def check(scored: list[Scores], known: list[torch.Tensor], sequences: list[Window]) -> None:
    for scores_of_window, logprobs, window in zip(scored, known, sequences, strict=True):
        token = torch.tensor(window.ids[window.first :])
        logprob = logprobs.gather(1, token.unsqueeze(1)).squeeze(1)
        np.testing.assert_array_equal(scores_of_window.token, token.numpy())
        np.testing.assert_allclose(scores_of_window.logprob, logprob.numpy(), atol=1e-3)
        np.testing.assert_allclose(scores_of_window.top_logprobs, logprobs.topk(TOP).values.numpy(), atol=1e-3)
        np.testing.assert_array_equal(scores_of_window.top_ids[:, 0], logprobs.argmax(-1).numpy())


@pytest.fixture(scope="module")
def scored(model: Path, sequences: list[Window]) -> list[Scores]:
    config = ModelConfig(model=str(model), max_model_len=64)
    engine = LocalEngine.start(config, EngineConfig(device="cpu", max_num_seqs=2, kv_cache_memory=1 << 20, threads=1))
    try:
        return EngineScorer("tiny", engine).score(sequences, TOP, quiet)
    finally:
        engine.close()


def test_the_engine_says_what_the_model_says(
    scored: list[Scores], known: list[torch.Tensor], sequences: list[Window]
) -> None:
    check(scored, known, sequences)


def test_stored_scores_come_back(scored: list[Scores], sequences: list[Window], tmp_path: Path) -> None:
    path = tmp_path / "scores.jsonl"
    store(path, "tiny", sequences, scored)
    again = StoredScorer(path)
    assert again.windows() == sequences
    for scores_of_window, other in zip(again.score(sequences, TOP - 1, quiet), scored, strict=True):
        np.testing.assert_array_equal(scores_of_window.top_ids, other.top_ids[:, : TOP - 1])
        np.testing.assert_allclose(scores_of_window.logprob, other.logprob, atol=1e-5)
    with pytest.raises(ConfigError, match="--top is 6: give at most 5"):
        again.score(sequences, TOP + 1, quiet)
    with pytest.raises(ConfigError, match="other texts"):
        again.score(sequences[:1], TOP, quiet)
    head, row = path.read_text().splitlines()[:2]
    for content in (
        '{"a": 1}\n',
        "[1]\n",
        "",
        head,
        head + '\n{"ids": [1, 2]}',
        head + "\n" + row.replace("[", "[0, ", 1),
    ):
        (tmp_path / "x").write_text(content)
        with pytest.raises(ConfigError, match="does not contain complete scores"):
            StoredScorer(tmp_path / "x")


class Provider(BaseHTTPRequestHandler):
    """A server that scores prompts with a plain model, by ids or as OpenAI's echo does."""

    decoder: TrainableDecoder
    tokenizer: Tokenizer
    dialect: str
    asked: list[dict[str, Any]]

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "there"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append({**body, "key": self.headers.get("authorization")})
        if self.dialect == "neither":
            self._send(200, {"choices": [{"text": "", "logprobs": None}]})
        elif self.dialect == "broken":
            self._send(400, {"error": {"message": "no such thing"}})
        else:
            self._send(200, {"choices": [self._scores(body["prompt"], body["logprobs"])]})

    def _scores(self, ids: list[int], top: int) -> dict[str, Any]:
        with torch.no_grad():
            logprobs = self.decoder(torch.tensor([ids]))[0, :-1].log_softmax(-1)
        best = logprobs.topk(top)
        token_logprobs = [float(row[token]) for row, token in zip(logprobs, ids[1:], strict=True)]
        pairs = [dict(zip(i.tolist(), v.tolist(), strict=True)) for i, v in zip(best.indices, best.values, strict=True)]
        if self.dialect == "ids":
            alternatives = [
                {**pair, token: value} for pair, token, value in zip(pairs, ids[1:], token_logprobs, strict=True)
            ]
            listed = [{str(name): {"logprob": value} for name, value in pair.items()} for pair in alternatives]
            return {"text": "", "prompt_logprobs": [None, *listed]}
        texts = [{self.tokenizer.token_text(name): value for name, value in pair.items()} for pair in pairs]
        # One more token was generated; it is nobody's prompt.
        return {
            "text": "",
            "logprobs": {
                "token_logprobs": [None, *token_logprobs, -1.0],
                "top_logprobs": [None, *texts, {}],
                "tokens": [],
            },
        }

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def provider(model: Path, dialect: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    asked: list[dict[str, Any]] = []
    facts = {
        "decoder": load_decoder(model, 512),
        "tokenizer": Tokenizer.load(model),
        "dialect": dialect,
        "asked": asked,
    }
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Here", (Provider,), facts))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_server_that_names_ids(model: Path, known: list[torch.Tensor], sequences: list[Window]) -> None:
    with provider(model, "ids") as (url, asked):
        scorer = ServerScorer(Endpoint(url + "/v1", api_key="secret"), Tokenizer.load(model))
        check(scorer.score(sequences, TOP, quiet), known, sequences)
    assert scorer.name.startswith("there at http")
    assert {request["key"] for request in asked} == {"Bearer secret"}
    assert {request["model"] for request in asked} == {"there"}


def test_a_server_that_names_texts(model: Path, known: list[torch.Tensor], sequences: list[Window]) -> None:
    """The tiny vocabulary has ids without a text of their own; those alternatives are left out, never taken for others."""
    tokenizer = Tokenizer.load(model)
    with provider(model, "echo") as (url, _):
        scored = ServerScorer(Endpoint(url, "x"), tokenizer).score(sequences, TOP, quiet)
    named = 0
    for scores_of_window, logprobs, window in zip(scored, known, sequences, strict=True):
        token = torch.tensor(window.ids[window.first :])
        np.testing.assert_allclose(
            scores_of_window.logprob, logprobs.gather(1, token.unsqueeze(1)).squeeze(1).numpy(), atol=1e-3
        )
        for place, ids in enumerate(scores_of_window.top_ids):
            for rank, token_id in enumerate(ids):
                if token_id >= 0:
                    named += 1
                    assert scores_of_window.top_logprobs[place, rank] == pytest.approx(
                        float(logprobs[place, token_id]), abs=1e-3
                    )
                else:
                    assert math.isinf(scores_of_window.top_logprobs[place, rank])
    assert named > sum(sequence.tokens for sequence in sequences)


@pytest.mark.parametrize(
    ("dialect", "said"), [("neither", "does not score prompts"), ("broken", "answered with status 400.*no such")]
)
def test_servers_that_cannot(model: Path, sequences: list[Window], dialect: str, said: str) -> None:
    with provider(model, dialect) as (url, _), pytest.raises(EngineFailed, match=said):
        ServerScorer(Endpoint(url, "x"), Tokenizer.load(model)).score(sequences, TOP, quiet)


# --- the command ------------------------------------------------------------------------------------------------------

OPTIONS = ("--device", "cpu", "--threads", "1", "--kv-cache-memory", "1M", "--window", "24", "--json")


@pytest.mark.long
def test_compare_ends_as_the_limits_say(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, kept = tmp_path / "text.jsonl", tmp_path / "kept.jsonl"
    text.write_text("\n".join(json.dumps({"text": line}) for line in TEXTS))
    assert main(["compare", str(model), "--text", str(text), "--save-reference", str(kept), *OPTIONS]) == 0
    assert main(["compare", str(kept), str(model), "--max-kl", "1e-4", "--min-top1", "0.999", *OPTIONS]) == 0
    same = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert same["passed"] and same["figures"]["kl"]["value"] < 1e-5
    out = tmp_path / "report.json"
    words = ["--quantization", "fp8", "--max-kl", "1e-9", "--out", str(out), *OPTIONS]
    assert main(["compare", str(model), str(model), "--text", str(text), *words]) == 1
    broken = json.loads(out.read_text())
    assert broken["figures"]["kl"]["value"] > 1e-6
    assert [check["passed"] for check in broken["checks"]] == [False]


def test_compare_serves_a_folder_to_ask_it(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = tmp_path / "tasks.jsonl"
    rows: list[dict[str, Any]] = [
        {"prompt": "The", "pattern": "(?s).*"},
        {"prompt": "The", "choices": [" fox", " fox jumps over"], "answer": 0},
    ]
    tasks.write_text("\n".join(json.dumps({"max_tokens": 2, **row}) for row in rows))
    text = tmp_path / "text.txt"
    text.write_text(TEXTS[0])
    words = ["--text", str(text), "--tasks", str(tasks), "--max-task-drop", "0.1", *OPTIONS]
    assert main(["compare", str(model), str(model), *words]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["figures"]["task_drop"]["value"] == 0 and facts["figures"]["kl"]["value"] < 1e-5
    assert facts["tasks"] == {"all": {"asked": 2, "right_reference": 2, "right": 2}}


def test_compare_asks_servers(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXTS[0])
    with provider(model, "ids") as (url, _), provider(model, "ids") as (other, _):
        words = ["--text", str(text), "--tokenizer", str(model), "--max-kl", "1e-6", "--window", "24"]
        assert main(["compare", url, other, *words]) == 0
        assert main(["compare", url, other, "--text", str(text)]) == 2
    said = capsys.readouterr()
    assert "same most probable token" in said.out
    assert "give --tokenizer FOLDER" in said.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give CANDIDATE or --save-reference FILE"),
        (("{model}",), "give --text FILE"),
        (("{model}", "--text", "{model}/config.json", "--top", "99"), "from 1 to 20"),
        (("{model}", "--text", "/nowhere"), "Cannot read the text /nowhere: No such file or directory."),
        (("{model}", "--text", "{model}/config.json", "--limit-tokens", "0"), "--limit-tokens is 0"),
        (("{model}", "--text", "{model}/config.json", "--window", "1M"), "--window is 1048576: give at most"),
        (("{model}", "--text", "{model}/config.json", "--overlap", "-1"), "--overlap is -1"),
        (("{model}", "--window", "64"), "--window applies to texts"),
        (("{model}", "--recall", "512"), "--recall is 512: give at most 511"),
        (("{model}", "--recall", "100"), "but a window has 100"),
        (("{model}", "--recall", "400", "--text", "t"), "--recall generates its own texts: leave --text out"),
        (
            ("{model}", "--text", "{model}/config.json", "--min-top1", "95"),
            "--min-top1 is 95: give a value from 0 to 1 (a share, not a percentage)",
        ),
        (("{model}", "--text", "{model}/config.json", "--reference-model", "x"), "REFERENCE is not a URL"),
        (
            ("http://127.0.0.1:1", "--text", "{model}/config.json"),
            "Cannot reach http://127.0.0.1:1",
        ),
        (("http://127.0.0.1:1", "--text", "t", "--candidate-key-env", "NO_SUCH"), "variable NO_SUCH is not set"),
        (("--save-reference", "/tmp/never", "--text", "t", "--max-kl", "1"), "Limits need a candidate"),
    ],
)
def test_mistakes_are_named(model: Path, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(model), *(word.format(model=model) for word in words)]) == 2
    assert said in capsys.readouterr().err
