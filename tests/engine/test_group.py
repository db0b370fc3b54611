"""One model over several processes: the same tokens as on one, and an end with a reason when a process is lost."""

from __future__ import annotations

import os
import signal
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import ConfigError, DoesNotFit, EngineFailed
from ridgeline.core.plan import Compaction, Join, StepPlan, Transfer
from ridgeline.core.sampling import Grammar, SamplingParams
from ridgeline.engine.group import GroupRunner
from ridgeline.engine.local import LocalEngine
from ridgeline.engine.rank_link import ARRAYS, decode_step, encode_step
from ridgeline.models.hub import shipped_model
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.wire.messages import Cancel, Submit
from tests.models.families import save

CONFIG = EngineConfig(device="cpu", kv_cache_memory=1 << 24, max_num_seqs=4, max_num_batched_tokens=24, threads=1)
Answers = dict[str, list[int]]

numbers = st.integers(-(1 << 31), (1 << 31) - 1)


@given(
    arrays=st.lists(st.lists(st.integers(-128, 127), max_size=4), min_size=len(ARRAYS), max_size=len(ARRAYS)),
    tokens=st.lists(numbers, min_size=1, max_size=4),
    masks=st.dictionaries(st.integers(0, 9), st.binary(max_size=4)),
    scores=st.dictionaries(st.integers(0, 9), st.lists(numbers)),
    number=st.integers(0, 9),
)
def test_a_plan_arrives_as_it_was_sent(
    arrays: list[list[int]], tokens: list[int], masks: dict[int, bytes], scores: dict[int, list[int]], number: int
) -> None:
    plan = StepPlan(number, bound=7, ahead=2, masks=masks, score_ids=scores, cancels=tokens)
    for (name, code), values in zip(ARRAYS.items(), arrays, strict=True):
        setattr(plan, name, array(code, values))
    sampling = SamplingParams(temperature=0.5, grammar=Grammar("regex", "a+"), logit_bias={3: 1.5})
    plan.joins = [Join(0, 1, array("i", tokens), 1, 0, 9, (2, 3), 5, 0, sampling)]
    plan.transfers = [Transfer(1, (4, 5), "own blocks", (1, 2))]
    plan.compactions = [Compaction(1, 70, 60, 8, 3, [[1, 2, 3, 4]], [[5, 6]])]
    sent, collected = decode_step(encode_step("e", number, 3, plan), "e", number)
    sent.joins = [replace(join, tokens=array("i", join.tokens)) for join in sent.joins]
    sent.transfers = [
        replace(transfer, blocks=tuple(transfer.blocks), pages=tuple(transfer.pages)) for transfer in sent.transfers
    ]
    assert (sent, collected) == (plan, 3)
    for epoch, expected in (("other", number), ("e", number + 1)):
        with pytest.raises(EngineFailed, match=f"step {number} of group e arrived instead of step {expected} of"):
            decode_step(encode_step("e", number, 3, plan), epoch, expected)


@contextmanager
def opened(folder: Path, config: EngineConfig, **model: object) -> Iterator[LocalEngine]:
    engine = LocalEngine.start(ModelConfig(str(folder), dtype="float32", **model), config)  # type: ignore[arg-type]
    try:
        yield engine
    finally:
        engine.close()


def requests() -> Iterator[Submit]:
    """Prompts that share a prefix, more than run at once, with everything that a plan can carry."""
    shared = [5, 9, 2, 77, 41, 200, 13, 8, 300, 11, 6, 17, 18, 19, 20, 21, 22]
    kinds = (
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.9, max_tokens=20, seed=3, logprobs=2),
        SamplingParams(temperature=0.7, max_tokens=20, seed=4, repetition_penalty=1.3, top_p=0.9),
        SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=1),
        SamplingParams(temperature=0.8, max_tokens=16, seed=5, n=2),
    )
    for number, sampling in enumerate((*kinds, *kinds)):
        yield Submit(str(number), [*shared, number + 30, *shared[: 3 * number]], sampling, arrival=0.0)


def answers(engine: LocalEngine) -> Answers:
    tokens: Answers = {}
    for delta in engine.run(requests()):
        assert delta.finish != "error", delta.error
        tokens.setdefault(f"{delta.id}/{delta.choice}", []).extend(delta.tokens)
    return tokens


CASES = {
    "grouped heads": ("llama-gqa", {}, {}),
    "one KV head": ("llama-mqa-tied", {}, {}),
    "windows": ("gemma2", {}, {}),
    "int8": ("llama-gqa", {"quantization": "int8"}, {}),
    "int8 cache": ("llama-gqa", {"kv_cache_dtype": "int8"}, {}),
    "bounded cache": ("llama-gqa", {}, {"kv_retention": "window:keep=16,sinks=1", "block_size": 4}),
    "compressed prompts": ("llama-gqa", {}, {"kv_retention": "heavy:keep=16,window=4", "block_size": 4}),
    "drafts": ("llama-gqa", {}, {"speculate": "reference+lookahead"}),
    "experts": ("mixtral", {}, {"speculate": "reference+lookahead"}),
    "whole experts": ("qwen2-moe", {"expert_parallel": True}, {"speculate": "reference+lookahead"}),
    "few blocks": ("llama-gqa", {"max_model_len": 128}, {"kv_cache_memory": 13 * 12_288}),
    "deterministic": ("qwen3", {}, {"deterministic": True}),
}


SHORT = {("drafts", "two stages")}
"""The others are long: `drafts` has prefix hits and preemption. test_hosts.py asks two ranks that share layers the same."""
TENSOR, PIPELINE, CONTEXT = ({f"{axis}_parallel_size": 2} for axis in ("tensor", "pipeline", "context"))
DIVIDED = {"sequence_parallel": True}
WAYS = {
    "two ranks": TENSOR,
    "two stages": PIPELINE,
    "three stages": {"pipeline_parallel_size": 3},
    "both": TENSOR | PIPELINE,
    "context": CONTEXT,
    "three contexts": {"context_parallel_size": 3},
    "context and tensor": CONTEXT | TENSOR,
    "all": CONTEXT | TENSOR | PIPELINE | DIVIDED,
    "divided stream": TENSOR | DIVIDED,
}
TRIED = [
    pytest.param(case, way, marks=[pytest.mark.long] * ((case, way) not in SHORT))
    for case in CASES
    for way in WAYS
    if (case != "compressed prompts" or way == "two ranks")
    and (case != "bounded cache" or way != "three contexts")
    and (case != "whole experts" or "tensor_parallel_size" in WAYS[way])
    and (case != "deterministic" or "sequence_parallel" not in WAYS[way])
]


@pytest.mark.parametrize(("case", "way"), TRIED)
def test_ranks_say_what_one_says(case: str, way: str, tmp_path: Path) -> None:
    family, model, engine = CASES[case]
    save(family, tmp_path)
    config = replace(CONFIG, **engine)  # type: ignore[arg-type]
    with opened(tmp_path, config, **{**model, "expert_parallel": False}) as single:
        expected = answers(single)
    # Bytes of the cache are per rank: with half of the heads or of a block, half of them hold as many tokens.
    sizes = WAYS[way]
    memory = (config.kv_cache_memory or 0) // sizes.get("tensor_parallel_size", 1)
    memory //= sizes.get("context_parallel_size", 1)
    parts = replace(config, **sizes, kv_cache_memory=memory)
    with opened(tmp_path, parts, **model) as several:
        assert answers(several) == expected
        assert several.engine.setup.facts["options"]["tensor_parallel_size"] == parts.tensor_parallel_size
        assert answers(several) == expected, "from cached prefixes"


def test_two_ranks_hold_a_prompt_that_one_refuses(tmp_path: Path) -> None:
    """Each has half of every block; drafts are trees, whose accepted nodes move between the ranks."""
    save("llama-gqa", tmp_path)
    prompt = [7 * number % 320 for number in range(200)]
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    short = replace(CONFIG, kv_cache_memory=12 * 12_288, speculate="reference+lookahead")
    with (
        pytest.raises(DoesNotFit, match="one sequence of 256 tokens takes 208896 bytes"),
        opened(tmp_path, short),
    ):
        pass
    tokens, sizes = [], []
    for config in (replace(short, context_parallel_size=2), replace(short, kv_cache_memory=20 * 12_288)):
        with opened(tmp_path, config) as engine:
            submit = Submit("long", prompt, sampling, arrival=0.0)
            tokens.append([token for delta in engine.run([submit]) for token in delta.tokens])
            layout = engine.engine.loop.scheduler.layout
            sizes.append((layout.page_tokens, layout.page_bytes))
    assert tokens[0] == tokens[1] and len(tokens[0]) == 40
    assert sizes == [(32, 12_288), (16, 12_288)], "a rank holds half of the slots of a block"


def test_experts_are_divided_only_where_it_can_be(tmp_path: Path) -> None:
    save("mixtral", tmp_path)
    cases = [
        ({}, "divides the experts among --tensor-parallel-size or --data-parallel-size ranks, which are 1"),
        ({"tensor_parallel_size": 3}, "cannot be"),
    ]
    for sizes, reason in cases:
        with pytest.raises(ConfigError, match=reason), opened(tmp_path, replace(CONFIG, **sizes), expert_parallel=True):
            pass
    save("llama-gqa", tmp_path / "dense")
    with (
        pytest.raises(ConfigError, match="this model has no experts"),
        opened(tmp_path / "dense", replace(CONFIG, tensor_parallel_size=2), expert_parallel=True),
    ):
        pass


@pytest.mark.long
def test_four_ranks_with_fewer_kv_heads(tmp_path: Path) -> None:
    save("llama-gqa", tmp_path)
    with opened(tmp_path, CONFIG) as single, opened(tmp_path, replace(CONFIG, tensor_parallel_size=4)) as four:
        assert answers(four) == answers(single)
        layouts = [engine.engine.loop.scheduler.layout for engine in (single, four)]
    assert layouts[1].page_bytes == layouts[0].page_bytes // 2, "two KV heads: four ranks hold one each, twice"


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("olmo2", TENSOR),
        ("olmo2", TENSOR | {"deterministic": True}),
        ("olmo2", {"tensor_parallel_size": 4}),
        ("olmo2", TENSOR | PIPELINE | CONTEXT | DIVIDED),
        ("olmoe", TENSOR | PIPELINE),
    ],
    ids=["two ranks", "deterministic", "copies of KV heads", "all", "experts"],
)
def test_norms_of_all_heads_over_several_ranks(family: str, sizes: dict[str, object], tmp_path: Path) -> None:
    save(family, tmp_path)
    single = replace(CONFIG, deterministic=bool(sizes.get("deterministic")))
    several = replace(single, **sizes)  # type: ignore[arg-type]
    with opened(tmp_path, single) as engine, opened(tmp_path, several) as ranks:
        expected = answers(engine)
        assert answers(ranks) == expected
        assert answers(ranks) == expected, "from cached prefixes"


@pytest.mark.long
def test_grammars_and_a_draft_model_over_two_ranks() -> None:
    encode = Tokenizer.load(shipped_model()).encode
    sampling = SamplingParams(temperature=0.8, seed=2, max_tokens=40, grammar=Grammar("regex", "[a-z ]{30,40}"))
    submits = [Submit(name, encode("Once", add_special_tokens=False), sampling, arrival=0.0) for name in "ab"]
    tokens = []
    for ranks in (1, 2):
        config = replace(
            CONFIG, tensor_parallel_size=ranks, speculate=f"draft:{shipped_model()}", kv_cache_memory=1 << 26
        )
        with opened(shipped_model(), config) as engine:
            tokens.append([(delta.id, token) for delta in engine.run(submits) for token in delta.tokens])
    assert sorted(tokens[0]) == sorted(tokens[1]) and len(tokens[0]) > 10


@pytest.mark.long
def test_grammars_and_cancelled_requests_with_parts_of_the_keys() -> None:
    """A cancelled request leaves no block behind, on any rank; what the others say does not change."""
    encode = Tokenizer.load(shipped_model()).encode
    grammar = SamplingParams(temperature=0.8, seed=2, max_tokens=40, grammar=Grammar("regex", "[a-z ]{30,40}"))
    said = []
    for ranks in (1, 2):
        config = replace(CONFIG, context_parallel_size=ranks, speculate="lookahead", kv_cache_memory=1 << 26)
        with opened(shipped_model(), config) as engine:
            prompt = encode("Once upon a time " * 8, add_special_tokens=False)
            tokens: dict[str, list[int]] = {}
            for delta in engine.run([Submit(name, prompt, grammar, arrival=0.0) for name in "abc"]):
                tokens.setdefault(delta.id, []).extend(delta.tokens)
                engine.engine.handle(Cancel("b"))
            assert engine.engine.loop.scheduler.leases.pool.used == 0
            said.append((tokens["a"], tokens["c"]))
    assert said[0] == said[1] and len(said[0][0]) > 5


def ended_within(seconds: float, pids: list[int]) -> bool:
    deadline = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() and "Z" not in _state(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


@pytest.mark.parametrize(
    ("blow", "busy", "reason"),
    [
        (signal.SIGKILL, True, "rank 2 has ended with status -9"),
        pytest.param(signal.SIGKILL, False, "rank 2 has ended with status -9", marks=pytest.mark.long),
        pytest.param(signal.SIGSTOP, True, "rank 2 has sent nothing for 4 s", marks=pytest.mark.long),
        pytest.param(signal.SIGSTOP, False, "rank 2 has sent nothing for 4 s", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"tensor_parallel_size": 4}, marks=pytest.mark.long),
        pytest.param(CONTEXT | TENSOR, marks=pytest.mark.long),
        pytest.param(TENSOR | PIPELINE, marks=pytest.mark.long),
        {"pipeline_parallel_size": 3},
    ],
    ids=["ranks", "parts of the keys", "both", "stages"],
)
def test_a_lost_rank_ends_the_engine(
    sizes: dict[str, int], blow: signal.Signals, busy: bool, reason: str, tmp_path: Path
) -> None:
    """Within five seconds, with the reason, and no process stays."""
    save("llama-gqa", tmp_path)
    with opened(tmp_path, replace(CONFIG, **sizes)) as engine:
        runner = engine.engine.loop.runner
        assert isinstance(runner, GroupRunner)
        pids = [follower.process.pid for follower in runner._group.followers]
        if busy:
            for request in requests():
                engine.submit(request)
            engine.engine.turn()
        os.kill(pids[1], blow)
        began = time.monotonic()
        with pytest.raises(EngineFailed, match=f"A rank of the model is lost: {reason}"):
            while time.monotonic() - began < 10:
                engine.engine.turn()
                time.sleep(0.01)
        assert time.monotonic() - began < 5.5
        engine._open.clear()
    assert ended_within(1.0, pids)


def test_a_rank_that_draws_other_tokens_ends_the_engine(tmp_path: Path) -> None:
    save("llama-gqa", tmp_path)
    with opened(tmp_path, replace(CONFIG, tensor_parallel_size=2)) as engine:
        runner = engine.engine.loop.runner
        assert isinstance(runner, GroupRunner)
        collect: Callable[..., object] = runner._runner.collect

        def other_tokens() -> object:
            result = collect()
            result.tokens[:] = [token ^ 1 for token in result.tokens]  # type: ignore[attr-defined]
            return result

        runner._runner.collect = other_tokens  # type: ignore[method-assign, assignment]
        for request in requests():
            engine.submit(request)
        with pytest.raises(EngineFailed, match="drew other tokens than another rank in step"):
            for _ in range(100):
                engine.engine.turn()
                time.sleep(0.01)
        engine._open.clear()


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        (
            "llama-gqa",
            {"tensor_parallel_size": 3},
            "4 heads and a feed-forward width of 96 cannot be split over 3 devices",
        ),
        ("llama-gqa", {"pipeline_parallel_size": 4}, "give 1 to 3, the number of layers"),
        ("llama-gqa", {"pipeline_parallel_size": 2, "steps_in_flight": 1}, "Leave --steps-in-flight out"),
        ("llama-gqa", {"context_parallel_size": 2, "block_size": 5}, "Leave --block-size out, or give a multiple"),
    ],
)
def test_what_several_ranks_cannot_do_is_refused(
    family: str, options: dict[str, object], words: str, tmp_path: Path
) -> None:
    save(family, tmp_path)
    with pytest.raises(ConfigError, match=words):
        LocalEngine.start(ModelConfig(str(tmp_path)), replace(CONFIG, **options))  # type: ignore[arg-type]
