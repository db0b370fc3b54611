"""Beam search: the algorithm on small tables, what it is refused with, and the answers of a server."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest

from ridgeline.core.config import EngineConfig, ModelConfig, ServiceConfig
from ridgeline.models.hub import shipped_model
from ridgeline.service.beams import BeamSearch
from ridgeline.service.call import Beams
from tests.models.beams import theirs

from .live import Live
from .real import real_server

LETTERS = 3
END = LETTERS - 1


def table(seed: int) -> dict[tuple[int, ...], list[float]]:
    """Log-probabilities after every text of at most three tokens."""
    draw, made = random.Random(seed), {}
    for length in range(4):
        for text in itertools.product(range(LETTERS), repeat=length):
            weights = [draw.random() for _ in range(LETTERS)]
            made[text] = [math.log(weight / sum(weights)) for weight in weights]
    return made


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -0.5])
@pytest.mark.parametrize("seed", range(4))
def test_a_search_that_is_wide_enough_finds_the_best_answers(seed: int, length_penalty: float) -> None:
    model = table(seed)
    search = BeamSearch(Beams(LETTERS**4, frozenset({END}), length_penalty), 4)
    while not search.over:
        search.advance([dict(enumerate(model[beam.tokens])) for beam in search.running])
    scores = {}
    for length in range(1, 5):
        for text in itertools.product(range(LETTERS), repeat=length):
            if END not in text[:-1] and (text[-1] == END or length == 4):
                total = sum(model[text[:at]][token] for at, token in enumerate(text))
                scores[text] = total / length**length_penalty
    assert {beam.tokens: pytest.approx(beam.score) for beam in search.finished} == scores
    assert [beam.score for beam in search.finished] == sorted(scores.values(), reverse=True)


def test_early_stopping_ends_with_the_first_finished_beams() -> None:
    model = {0: math.log(0.6), 1: math.log(0.05), END: math.log(0.35)}
    rounds = {}
    for early in (True, False, "never"):
        search = BeamSearch(Beams(2, frozenset({END}), 0.5, early), 8)
        rounds[early] = 0
        while not search.over:
            search.advance([model] * len(search.running))
            rounds[early] += 1
    assert rounds == {True: 2, False: 5, "never": 7}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 3}, "best_of"),
        ({"length_penalty": 2}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"use_beam_search": True, "n": 3, "best_of": 2}, "best_of"),
        ({"use_beam_search": True, "n": 40}, "n"),
        ({"use_beam_search": True, "logprobs": 1}, "logprobs"),
        ({"use_beam_search": True, "logprobs": 0}, "logprobs"),
        ({"use_beam_search": True, "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"use_beam_search": True, "repetition_penalty": 1.2}, "repetition_penalty"),
        ({"use_beam_search": True, "prompt": ["hi"] * 100, "best_of": 15}, "best_of"),
        ({"use_beam_search": True, "guided_regex": "a"}, "guided_regex"),
        ({"use_beam_search": True, "stop": "a"}, "stop"),
        ({"use_beam_search": True, "bad_words": ["a"]}, "bad_words"),
    ],
)
def test_what_does_not_combine_is_refused_by_name(polite: Live, fields: dict[str, object], param: str) -> None:
    answer = polite.send("POST", "/v1/completions", {"prompt": "hi", **fields})
    assert (answer.status, answer.error["param"]) == (400, param)
    assert param in answer.error["message"]


@pytest.mark.long
def test_a_server_answers_as_transformers() -> None:
    folder = Path(shipped_model())
    model = ModelConfig(model=str(folder), dtype="float32")
    engine = EngineConfig(max_num_seqs=8, kv_cache_memory=40_000_000, threads=1)
    with real_server(folder, ServiceConfig(), engine, model) as server:
        for prompt, width, penalty, early in (
            ("Once upon a time", 4, 1.0, False),
            ("The answer is", 3, 0.0, True),
            ("def add(a, b):", 2, 2.0, "never"),
        ):
            beams = {"use_beam_search": True, "n": width, "length_penalty": penalty, "early_stopping": early}
            body = {"prompt": prompt, "max_tokens": 24, **beams}
            answer = server.send("POST", "/v1/completions", body)
            assert answer.status == 200, answer.data
            texts = [choice["text"] for choice in answer.json["choices"]]
            assert texts == theirs(prompt, 24, num_beams=width, length_penalty=penalty, early_stopping=early)
        chat = {"messages": [{"role": "user", "content": "Hi!"}], "max_tokens": 12, "use_beam_search": True, "n": 2}
        answer = server.send("POST", "/v1/chat/completions", chat)
        assert len({choice["message"]["content"] for choice in answer.json["choices"]}) == 2
        record = server.get("/requests").json["data"][0]
        assert record["output_tokens"] == answer.json["usage"]["completion_tokens"] and record["joules"] >= 0
        stats = server.get("/admin/stats").json
        assert (stats["running"], stats["waiting"], stats["used"]) == (0, 0, 0)
