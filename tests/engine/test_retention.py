"""What a retention policy drops is gone, what it keeps is read at its old position, and its blocks return to the pool."""

from __future__ import annotations

import pytest
import torch

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.sampling import SamplingParams
from ridgeline.core.spec import KvLayout
from ridgeline.kv.retention import KEEP_ALL, Retention, read_retention
from ridgeline.llm import LLM
from tests.engine.helpers import PLAIN, WINDOWED
from tests.engine.runners import MAX_LEN, PAGE, PROMPT, DeviceBench, alone, pair
from tests.engine.test_runner import Guesser

SINKS, KEEP = 1, 3 * PAGE
WINDOW = Retention("window", SINKS, KEEP, KEEP + PAGE, PAGE)
LONG = [3 + 7 * at % 250 for at in range(50)]


def read(text: str, layout: KvLayout = PLAIN, drafter: str = "", *, deterministic: bool = False) -> Retention:
    return read_retention(EngineConfig(kv_retention=text, deterministic=deterministic), layout, drafter)


def run(bench: DeviceBench) -> dict[str, list[int]]:
    """Run all requests. Returns, for each, how many slots were dropped when each token was computed."""
    dropped: dict[str, list[int]] = {}
    while not bench.scheduler.idle:
        before = [(request, request.computed, request.dropped) for request in bench.scheduler.running]
        bench.turn()
        for request, computed, count in before:
            of_request = dropped.setdefault(request.id, [0] * computed)
            of_request.extend([count] * (request.computed - computed))
    return dropped


def masked_greedy(family: str, prompt: list[int], answer: list[int], dropped: list[int]) -> list[int]:
    """What transformers draws after the prompt and after each token of the answer, where each token sees what its step kept."""
    tokens = prompt + answer[:-1]
    seen = torch.ones(len(tokens), len(tokens)).tril().bool()
    for place, count in enumerate(dropped[: len(tokens)]):
        seen[place, SINKS * PAGE : SINKS * PAGE + count] = False
    mask = torch.zeros(seen.shape).masked_fill(~seen, -1e9)[None, None]
    with torch.inference_mode():
        logits = pair(family)[0](torch.tensor([tokens]), attention_mask=mask).logits[0]
    return logits[len(prompt) - 1 :].argmax(1).tolist()


@pytest.mark.parametrize(("family", "step_tokens"), [("llama-gqa", 24), ("llama-gqa", 64), ("cla", 24)])
def test_answers_are_those_of_a_model_that_sees_sinks_and_recent_tokens(family: str, step_tokens: int) -> None:
    """A long prompt drops most blocks at once, a short one a block at a time; the prompt's chunks change nothing."""
    bench = DeviceBench(family, retention=WINDOW, step_tokens=step_tokens)
    prompts = {"long": LONG, "short": PROMPT}
    for name, prompt in prompts.items():
        bench.submit(name, prompt, max_tokens=70)
    dropped = run(bench)
    for name, prompt in prompts.items():
        answer = bench.tokens[name, 0]
        assert len(answer) == 70
        assert answer == masked_greedy(family, prompt, answer, dropped[name])
    for name, prompt in prompts.items():
        for place, count in enumerate(dropped[name]):
            expected = (place - KEEP) // PAGE * PAGE if place > max(len(prompt), WINDOW.most - 1) else 0
            assert count == expected
    whole = DeviceBench(family)
    whole.submit("long", LONG, max_tokens=70)
    whole.run()
    assert bench.tokens["long", 0] != whole.tokens["long", 0], "nothing that matters was dropped"


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_row_is_bounded_and_all_blocks_return(depth: int) -> None:
    """Many long answers run at once in a pool that holds two of them with all their keys."""
    bench = DeviceBench(retention=WINDOW, blocks=2 * MAX_LEN // PAGE, depth=depth, prefix_cache=False)
    for name in range(6):
        bench.submit(str(name), [*PROMPT, name], max_tokens=150)
    most = 0
    while not bench.scheduler.idle:
        bench.turn()
        most = max([most, *(len(request.tables[0]) for request in bench.scheduler.running)])
    assert not bench.scheduler.counts.preempted
    assert most <= WINDOW.most // PAGE + 1
    assert all(len(tokens) == 150 for tokens in bench.tokens.values())
    assert bench.leases.pool.free == bench.leases.total


def test_a_dropped_prompt_stays_in_the_prefix_cache_and_forks_share_it() -> None:
    """Blocks are published with the keys of the whole prompt; those of tokens that have seen less are not."""
    bench = DeviceBench(retention=WINDOW)
    bench.submit("first", LONG, max_tokens=60)
    bench.run()
    published = bench.leases.prefix
    assert sum(published.holds(block) for block in range(200)) == len(LONG) // PAGE
    bench.submit("again", LONG, max_tokens=60)
    bench.submit("forks", LONG, n=3, max_tokens=60)
    bench.submit("longer", [*LONG, *bench.tokens["first", 0][:20]], max_tokens=5)
    bench.run()
    assert bench.scheduler.counts.prefix_hits
    expected = bench.tokens.pop(("first", 0))
    longer = bench.tokens.pop(("longer", 0))
    assert all(tokens == expected for tokens in bench.tokens.values())
    assert longer == alone([*LONG, *expected[:20]], max_tokens=2) + longer[2:]


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
def test_drafts_are_verified_over_what_is_kept(trees: bool) -> None:
    """The nodes of a step see what the step before has kept: a block may leave some tokens later than without drafts."""
    plain = DeviceBench(retention=WINDOW)
    plain.submit("one", LONG, max_tokens=100)
    plain.run()
    guesser = Guesser({"one": plain.tokens["one", 0]}, 0.6, trees=trees)
    bench = DeviceBench(retention=WINDOW, speculation=guesser)
    bench.submit("one", LONG, max_tokens=100)
    dropped = run(bench)
    answer = bench.tokens["one", 0]
    assert bench.scheduler.counts.accepted
    assert answer == masked_greedy("llama-gqa", LONG, answer, dropped["one"])


def test_a_preempted_request_is_computed_again() -> None:
    bench = DeviceBench(retention=WINDOW, blocks=12, prefix_cache=False)
    for name in range(4):
        bench.submit(str(name), [*PROMPT, name], max_tokens=60)
    bench.run()
    assert bench.preempted
    assert all(len(tokens) == 60 for tokens in bench.tokens.values())
    assert bench.leases.pool.free == bench.leases.total


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("most", "use all, or window:sinks=4,keep=1024"),
        ("all:keep=4", "use all"),
        ("window", "give numbers of tokens"),
        ("window:sinks=4", "say how many tokens stay"),
        ("window:keep=12,keep=13", "give numbers"),
        ("window:keep=many", "give numbers"),
        ("window:sinks=5,keep=11", "keep at least 12 tokens"),
    ],
)
def test_a_policy_that_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(text)
    assert caught.value.param == "kv_retention"


def test_what_does_not_compose_is_refused() -> None:
    text = "window:keep=64"
    assert read(text) == Retention(text, 1, 64, 68, 4)
    assert read("all", WINDOWED, "draft", deterministic=True) is KEEP_ALL
    with pytest.raises(ConfigError, match="windows of their own"):
        read(text, WINDOWED)
    with pytest.raises(ConfigError, match="--deterministic needs all"):
        read(text, deterministic=True)
    with pytest.raises(ConfigError, match="use --speculate reference"):
        read(text, drafter="draft")


@pytest.mark.parametrize("options", [{}, {"speculate": "auto"}, {"speculate": "recycling"}, {"kv_cache_dtype": "int4"}])
def test_the_shipped_model_answers_with_a_bounded_cache(options: dict[str, str]) -> None:
    """Native operations, captured steps and drafters that read the cache: as if nothing was dropped, up to where it is."""
    answers, sampling = [], SamplingParams(max_tokens=300, temperature=0.8, seed=3)
    for retention in ("all", "window:keep=64"):
        facts = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory": 1 << 25} | options
        llm = LLM(device="cpu", threads=1, kv_retention=retention, **facts)
        answers.append(llm.generate("The history of the city begins", sampling)[0].choices[0].token_ids)
        llm.close()
    whole, kept = answers
    assert kept[:70] == whole[:70]
    assert kept != whole
