"""The runner under the scheduler: what a request is told depends on the request alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ridgeline.core.draft import Draft
from ridgeline.core.plan import StepPlan
from ridgeline.speculation.interface import Speculation
from tests.combinations import crossed
from tests.engine.runners import MAX_LEN, PROMPT, DeviceBench, alone, answer, layout_of, pair

FAMILIES = ["llama-gqa", "mistral-window", "gemma3", "mixtral", "qwen3-moe"]
KINDS: dict[str, dict[str, object]] = {
    "greedy": {},
    "warm": {"temperature": 0.9, "seed": 11},
    "hot": {"temperature": 3.0, "seed": -5},
    "filtered": {"temperature": 1.2, "seed": 4, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "penalized": {
        "temperature": 0.7,
        "seed": 8,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.8,
        "presence_penalty": 0.3,
    },
    "biased": {"logit_bias": ((17, 3.0), (40, -100.0)), "min_tokens": 4, "stop_ids": (17,)},
    "allowed": {"temperature": 1.0, "seed": 6, "allowed_token_ids": tuple(range(0, 320, 3))},
    "logged": {"temperature": 1.0, "seed": 9, "logprobs": 3},
}


AT_EITHER_DEPTH = crossed(FAMILIES, (0, 1), quick=lambda family, depth: (family + depth) % 2 == 0)
"""Each family with one number of steps in flight, in turns: what a layer computes does not depend on it."""


def prompts(count: int, longest: int = 50) -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(3, 320) for _ in range(draw.randrange(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("family", [*FAMILIES, "cohere2", "gpt2", "gpt-oss"])
def test_greedy_equals_transformers(family: str) -> None:
    model, _ = pair(family)
    given = torch.tensor([PROMPT])
    with torch.inference_mode():
        out = model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=40, do_sample=False, eos_token_id=None
        )
    assert alone(family=family, max_tokens=40) == out[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize(("family", "depth"), AT_EITHER_DEPTH)
def test_chunked_is_unchunked(family: str, depth: int) -> None:
    prompt = prompts(1, 120)[0] * 3
    bench = DeviceBench(family, step_tokens=7, depth=depth)
    bench.submit("one", prompt)
    bench.run()
    assert bench.tokens["one", 0] == alone(prompt, family)


@pytest.mark.parametrize("depth", [0, pytest.param(1, marks=pytest.mark.long)])
def test_each_kind_in_one_batch_is_as_alone(depth: int) -> None:
    bench = DeviceBench(rows=len(KINDS), depth=depth, step_tokens=40)
    given = dict(zip(KINDS, prompts(len(KINDS)), strict=True))
    for name, prompt in given.items():
        bench.submit(name, prompt, **KINDS[name])  # type: ignore[arg-type]
    bench.run()
    for name, prompt in given.items():
        assert bench.tokens[name, 0] == alone(prompt, **KINDS[name]), name
    assert len({tuple(tokens) for tokens in bench.tokens.values()}) == len(KINDS)


@pytest.mark.parametrize(
    ("family", "depth"),
    crossed(FAMILIES, (0, 1), quick=lambda *at: (FAMILIES[at[0]], at[1]) in (("llama-gqa", 0), ("mistral-window", 1))),
)
def test_preempted_is_never_preempted(family: str, depth: int) -> None:
    given = {f"r{number}": prompt for number, prompt in enumerate(prompts(4, 30))}
    longest = max(map(len, given.values())) + 40
    blocks = layout_of(pair(family)[1]).pages_for(longest, 16) + 1
    bench = DeviceBench(family, depth=depth, blocks=blocks, step_tokens=16, prefix_cache=False)
    options = {"max_tokens": 40, "temperature": 0.8, "frequency_penalty": 0.6}
    for number, (name, prompt) in enumerate(given.items()):
        bench.submit(name, prompt, seed=number, **options)
    bench.run()
    assert bench.preempted
    for number, (name, prompt) in enumerate(given.items()):
        assert bench.tokens[name, 0] == alone(prompt, family, seed=number, **options)


@pytest.mark.parametrize(("family", "depth"), AT_EITHER_DEPTH)
def test_choices_share_a_prompt_and_part_ways(family: str, depth: int) -> None:
    bench = DeviceBench(family, depth=depth)
    bench.submit("many", n=4, temperature=1.5, seed=2)
    bench.run()
    assert len({tuple(tokens) for tokens in bench.tokens.values()}) == 4
    again = DeviceBench(family, rows=1, prefix_cache=False)
    again.submit("many", n=4, temperature=1.5, seed=2)
    again.run()
    assert bench.tokens == again.tokens


@pytest.mark.parametrize("family", [*FAMILIES, "cohere2", "gpt2", "gpt-oss"])
def test_cached_is_uncached(family: str) -> None:
    bench = DeviceBench(family)
    first, second = PROMPT * 4, PROMPT * 4 + [7, 8]
    bench.submit("first", first)
    bench.run()
    bench.submit("second", second)
    bench.run()
    assert bench.scheduler.counts.prefix_hits > 0
    assert bench.tokens["second", 0] == alone(second, family)


# --- ends -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
def test_ends(depth: int) -> None:
    plain = alone(max_tokens=20)
    stop = plain[7]
    first = plain.index(stop)
    bench = DeviceBench(depth=depth)
    bench.submit("stop", stop_ids=(3, stop), max_tokens=20)
    bench.submit("ignored", max_tokens=20)
    bench.submit("limit", stop_ids=(3,), max_tokens=5)
    bench.submit("context", PROMPT * 17, max_tokens=100)
    bench.run()
    assert bench.tokens["stop", 0] == plain[: first + 1]
    assert bench.finish["stop", 0] == "stop"
    assert bench.tokens["ignored", 0] == plain
    assert bench.tokens["limit", 0] == plain[:5]
    assert bench.finish["limit", 0] == "length"
    assert len(bench.tokens["context", 0]) == MAX_LEN - 17 * len(PROMPT)


@pytest.mark.parametrize("depth", [0, 1])
def test_min_tokens_holds_the_end_back(depth: int) -> None:
    """With min_tokens m an end may be token m + 1 at the earliest."""
    plain = alone(max_tokens=20)
    place = next(index for index in range(3, 20) if plain[index] not in plain[:index])
    bench = DeviceBench(depth=depth)
    for m in (place, place + 1, place + 6):
        bench.submit(f"m{m}", stop_ids=(plain[place],), min_tokens=m, max_tokens=20)
    bench.run()
    assert bench.tokens[f"m{place}", 0] == plain[: place + 1]
    for m in (place + 1, place + 6):
        held = bench.tokens[f"m{m}", 0]
        assert held[:place] == plain[:place]
        assert plain[place] not in held[:m] and len(held) > m


def test_stop_may_be_the_first_token() -> None:
    first = alone(max_tokens=1)
    bench = DeviceBench(depth=1)
    bench.submit("one", stop_ids=first)
    bench.run()
    assert bench.tokens["one", 0] == first


def test_seeds() -> None:
    first, same, other = (answer(temperature=1.0, seed=seed) for seed in (1, 1, 2))
    assert first == same != other


# --- drafts ---------------------------------------------------------------------------------------------------------


class Guesser(Speculation):
    """Drafts of random length, each token right with probability `skill`; in a tree, wrong ones beside it."""

    idle = False
    max_nodes = 12

    def __init__(self, answers: dict[str, list[int]], skill: float, *, trees: bool) -> None:
        self.answers, self.skill, self.trees, self.draw = answers, skill, trees, random.Random(5)

    def propose(self, request: Any, nodes: int) -> Draft:
        said = request.expected - request.prompt_len
        count = min(self.draw.randrange(0, 6), request.limit - request.expected - 1)
        truth = self.answers[request.id][said : said + max(0, count)]
        if not self.trees:
            return Draft(
                tuple(token if self.draw.random() < self.skill else self.draw.randrange(320) for token in truth)
            )
        tokens: list[int] = []
        parents: list[int] = []
        right = -1
        for token in truth:
            wrong = [candidate for candidate in self.draw.sample(range(320), 3) if candidate != token][
                : self.draw.randrange(3)
            ]
            candidates = [*wrong, *[token] * (self.draw.random() < self.skill)]
            self.draw.shuffle(candidates)
            tokens += candidates
            parents += [right] * len(candidates)
            if token not in candidates:
                break
            right = len(tokens) - len(candidates) + candidates.index(token)
        draft = Draft(tuple(tokens), tuple(parents)).first(nodes)
        return draft.chain() if request.sampling.penalized else draft


def all_pairs(family: int, skill: int, depth: int, trees: int) -> bool:
    """Each family with each skill once, and every other pair of values at least once."""
    return family < len(FAMILIES) and trees == (family + skill) % 2 and depth == (family // 2 + skill) % 2


@pytest.mark.parametrize(
    ("family", "skill", "depth", "trees"),
    crossed([*FAMILIES, "gpt-oss"], (0.0, 0.6, 1.0), (0, 1), (False, True), quick=all_pairs),
)
def test_speculated_is_plain(family: str, skill: float, depth: int, trees: bool) -> None:
    """Sampled, penalized and stopped rows too: the draw at a position is the one that plain decoding makes."""
    options: dict[str, dict[str, object]] = {
        "greedy": {},
        "warm": {"temperature": 0.9, "seed": 3, "logprobs": 1},
        "filtered": {"temperature": 1.3, "seed": 4, "top_p": 0.8, "repetition_penalty": 1.2},
    }
    given = dict(zip(options, prompts(len(options), 20), strict=True))
    answers = {name: alone(given[name], family, **options[name]) for name in options}
    stop = answers["greedy"][11]
    bench = DeviceBench(family, depth=depth, speculation=Guesser(answers, skill, trees=trees))
    for name, prompt in given.items():
        bench.submit(name, prompt, stop_ids=(stop,) if name == "greedy" else (), **options[name])  # type: ignore[arg-type]
    bench.run()
    assert bench.tokens["greedy", 0] == answers["greedy"][: answers["greedy"].index(stop) + 1]
    assert bench.tokens["warm", 0] == answers["warm"]
    assert bench.tokens["filtered", 0] == answers["filtered"]
    assert [logprob.token for logprob in bench.logprobs["warm", 0]] == answers["warm"]
    counts = bench.scheduler.counts
    assert counts.drafted > 0
    if skill == 1.0 and not trees:
        assert counts.accepted > counts.drafted // 2
    assert counts.accepted > 0 or not skill


# --- log-probabilities ----------------------------------------------------------------------------------------------


def expected_logprobs(family: str, tokens: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.log_softmax(pair(family)[0](torch.tensor([list(tokens)])).logits[0], dim=-1)


@pytest.mark.parametrize("family", ["llama-gqa", "gemma2"])
def test_logprobs_are_the_models(family: str) -> None:
    """Before temperature, bias and penalties."""
    bench = DeviceBench(family, depth=1)
    bench.submit("one", temperature=1.7, seed=3, logprobs=4, logit_bias=((9, 5.0),), presence_penalty=1.0)
    bench.submit("two", [4, 4, 8], logprobs=0)
    bench.run()
    tokens, logprobs = bench.tokens["one", 0], bench.logprobs["one", 0]
    expected = expected_logprobs(family, PROMPT + tokens)[len(PROMPT) - 1 : -1]
    assert len(logprobs) == len(tokens)
    for logprob, token, row in zip(logprobs, tokens, expected, strict=True):
        assert logprob.token == token
        assert logprob.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert logprob.rank == int((row > row[token]).sum()) + 1
        assert logprob.top_ids == tuple(row.topk(4).indices.tolist())
        assert logprob.top_logprobs == pytest.approx(row.topk(4).values.tolist(), abs=1e-4)
    assert all(logprob.rank == 1 and logprob.top_ids == () for logprob in bench.logprobs["two", 0])


@pytest.mark.parametrize("step_tokens", [64, 5])
def test_prompts_are_scored(step_tokens: int) -> None:
    bench = DeviceBench(step_tokens=step_tokens)
    bench.submit("one", prompt_logprobs=2, max_tokens=3)
    bench.submit("two", PROMPT[::-1], max_tokens=3)
    bench.run()
    expected = expected_logprobs("llama-gqa", PROMPT)
    scores = bench.scores["one"]
    assert [score.token for score in scores] == PROMPT[1:]
    for score, row in zip(scores, expected, strict=False):
        assert score.logprob == pytest.approx(float(row[score.token]), abs=1e-4)
        assert score.top_ids == tuple(row.topk(2).indices.tolist())
    assert "two" not in bench.scores
    assert bench.tokens["one", 0] == alone(max_tokens=3)


# --- grammar masks --------------------------------------------------------------------------------------------------


class Only:
    """Allows the given tokens, one after the other."""

    ready = True

    def __init__(self, tokens: Sequence[int]) -> None:
        self.left = list(tokens)

    def restrict(self, plan: StepPlan, row: int, draft: Draft) -> Draft:
        words = bytearray(320 // 8)
        words[self.left[0] // 8] = 1 << self.left[0] % 8
        plan.masks[row] = bytes(words)
        return draft

    def accept(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            assert self.left.pop(0) == token

    @property
    def finished(self) -> bool:
        return not self.left


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_masks(temperature: float) -> None:
    wanted = [31, 32, 0, 319, 64, 63]
    bench = DeviceBench(depth=1)
    bench.submit("free", temperature=0.5)
    bench.submit("bound", constraint=Only(wanted), temperature=temperature)
    bench.run()
    assert bench.tokens["bound", 0] == wanted
    assert bench.finish["bound", 0] == "stop"
    assert bench.tokens["free", 0] == alone(temperature=0.5)
