"""The recall task: windows that hold what they ask for, and a figure that falls when the answers are not in the context."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ridgeline.cli.main import main
from ridgeline.compress.checkpoint import Checkpoint
from ridgeline.compress.decoder import load_decoder
from ridgeline.compress.job import Job
from ridgeline.compress.recipes import read_recipe
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.engine.local import LocalEngine
from ridgeline.models.hub import shipped_model
from ridgeline.quality.recall import PROSE, WORDS, RecallWindow, measure_recall, recall_windows
from ridgeline.quality.scores import EngineScorer, Scores
from ridgeline.text.tokenizer import Tokenizer

from ..cli.conftest import tiny
from .test_scores import model, quiet

__all__ = ["model", "tiny"]


@pytest.fixture(scope="module", params=["bytes", "words"])
def tokenizer(request: pytest.FixtureRequest, tiny: Path) -> Tokenizer:
    """A tokenizer of single bytes, and one that joins the digit with the space before it."""
    return Tokenizer.load(tiny if request.param == "bytes" else shipped_model())


def text_of(tokenizer: Tokenizer, window: RecallWindow) -> str:
    return tokenizer.decode(window.window.ids, skip_special_tokens=True)


def test_every_answer_is_in_the_list_before_its_question(tokenizer: Tokenizer) -> None:
    for window in recall_windows(tokenizer, 6, [300, 500]):
        lines = text_of(tokenizer, window).splitlines()
        listed, prose, questions = lines[:6], lines[6:-6], lines[-6:]
        assert sorted(listed) == sorted(questions) and listed != questions
        assert all(re.fullmatch(r"[a-z]+ \d", line) for line in listed)
        assert prose and set(prose) <= set(PROSE)
        scored = window.window.ids[window.window.first :]
        for answer, question in zip(window.answers, questions, strict=True):
            digit = tokenizer.decode([scored[index] for index in answer], skip_special_tokens=True)
            assert digit.strip() == question[-1]
        assert window.answers[0][0] == 0


def test_windows_have_the_lengths_that_were_asked_for(tokenizer: Tokenizer) -> None:
    longest = max(len(tokenizer.encode(f"{sentence}\n", add_special_tokens=False)) for sentence in PROSE)
    windows = recall_windows(tokenizer, 3, [200, 1000, 200])
    for window, length in zip(windows, [200, 1000, 200], strict=True):
        assert length - longest <= len(window.window.ids) <= length
    assert [window.window.document for window in windows] == [0, 1, 2]
    assert windows[0].window.ids != windows[2].window.ids


def test_the_seed_decides(tokenizer: Tokenizer) -> None:
    assert recall_windows(tokenizer, 4, [200, 300], 1) == recall_windows(tokenizer, 4, [200, 300], 1)
    assert recall_windows(tokenizer, 4, [200], 1) != recall_windows(tokenizer, 4, [200], 2)


def test_prose_does_not_answer() -> None:
    said = " ".join(PROSE).lower()
    assert not re.search(r"\d", said) and not set(re.findall("[a-z]+", said)) & set(WORDS)
    assert len(set(WORDS)) == len(WORDS)


def test_what_does_not_fit_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="takes .* tokens, but a window has 20: give fewer pairs or longer windows"):
        recall_windows(tokenizer, 5, [20])
    for pairs in (0, len(WORDS) + 1):
        with pytest.raises(ConfigError, match=f"give 1 to {len(WORDS)}"):
            recall_windows(tokenizer, pairs, [5000])


def scores_of(window: RecallWindow, wrong: int = 0, logprob: float = -0.5) -> Scores:
    """Scores in which the last token of the first `wrong` answers is not the most probable one."""
    token = np.array(window.window.ids[window.window.first :], np.int32)
    top_ids = token.copy()[:, None]
    for answer in window.answers[:wrong]:
        top_ids[answer[-1]] += 1
    values = np.full(len(token), logprob, np.float32)
    return Scores(token, values, top_ids, values[:, None])


def test_an_answer_counts_if_all_its_tokens_are_the_most_probable(tokenizer: Tokenizer) -> None:
    windows = recall_windows(tokenizer, 4, [200, 200, 300])
    # Answers of two tokens, which other tokenizers have.
    windows = [replace(window, answers=tuple((a, a + 1) for (a,) in window.answers)) for window in windows]
    result = measure_recall(
        windows, [scores_of(windows[0]), scores_of(windows[1], wrong=3), scores_of(windows[2], wrong=1)]
    )
    assert result.answers == 12
    assert result.accuracy.value == pytest.approx(8 / 12)
    assert result.accuracy.low < 8 / 12 < result.accuracy.high
    assert result.probability.value == pytest.approx(np.exp(-1.0))
    perfect = measure_recall(windows, [scores_of(window) for window in windows])
    assert perfect.accuracy.value == perfect.accuracy.low == perfect.accuracy.high == 1


def scored(folder: Path, windows: list[RecallWindow]) -> list[Scores]:
    config = ModelConfig(model=str(folder), max_model_len=512)
    engine = LocalEngine.start(config, EngineConfig(device="cpu", max_num_seqs=2, kv_cache_memory=8 << 20, threads=1))
    try:
        return EngineScorer("it", engine).score([window.window for window in windows], 1, quiet)
    finally:
        engine.close()


def test_the_engine_scores_the_answers(model: Path) -> None:
    """Against plain PyTorch on the whole window."""
    windows = recall_windows(Tokenizer.load(model), 3, [200, 250])
    result = measure_recall(windows, scored(model, windows))
    decoder, right, probability = load_decoder(model, 512), [], []
    for window in windows:
        with torch.no_grad():
            logprobs = decoder(torch.tensor([window.window.ids]))[0].log_softmax(-1)
        for (index,) in window.answers:
            place = window.window.first + index
            token = window.window.ids[place]
            right.append(int(logprobs[place - 1].argmax()) == token)
            probability.append(float(logprobs[place - 1, token].exp()))
    assert result.answers == len(right) == 6
    assert result.accuracy.value == pytest.approx(np.mean(right))
    assert result.probability.value == pytest.approx(np.mean(probability), rel=1e-2)


@pytest.mark.long
def test_the_shipped_model_reads_the_list() -> None:
    """It recalls more from windows whose list has the answers than from those whose list is another window's."""
    tokenizer = Tokenizer.load(shipped_model())
    windows = recall_windows(tokenizer, 16, [400] * 8)
    others = windows[1:] + windows[:1]
    exchanged = []
    for window, other in zip(windows, others, strict=True):
        ids = other.window.ids[: other.window.first] + window.window.ids[window.window.first :]
        exchanged.append(replace(window, window=replace(window.window, ids=ids, first=other.window.first)))
    right, wrong = (measure_recall(group, scored(shipped_model(), group)) for group in (windows, exchanged))
    assert right.accuracy.value > 1.5 * wrong.accuracy.value
    assert right.probability.low > wrong.probability.high


def test_compare_measures_recall(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model with one key/value head, not yet trained, reads nothing back. The reference may be a stored one."""
    Job(Checkpoint(shipped_model()), read_recipe("gqa-1"), [], tmp_path / "pooled").run(quiet)
    kept, words = str(tmp_path / "kept.jsonl"), ["--recall", "300", "--device", "cpu", "--threads", "1", "--json"]
    words += ["--kv-cache-memory", "16M"]
    assert main(["compare", str(shipped_model()), "--save-reference", kept, *words]) == 0
    assert main(["compare", kept, str(tmp_path / "pooled"), "--min-top1", "0.9", *words]) == 1
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    figures = report["figures"]
    assert figures["recall_accuracy_reference"]["low"] > 2 * figures["recall_accuracy"]["high"]
    assert figures["recall_probability_reference"]["value"] > 10 * figures["recall_probability"]["value"]
    assert report["documents"] == 16 and figures["kl"]["value"] > 1
