"""One model over several GPUs: the tokens of one GPU in float32, from graphs, and an end with a reason when a rank is lost."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import ConfigError, EngineFailed
from ridgeline.core.sampling import Grammar, SamplingParams
from ridgeline.engine.graphs import GraphExecutor
from ridgeline.engine.group import GroupRunner
from ridgeline.engine.local import LocalEngine
from ridgeline.models.hub import shipped_model
from ridgeline.ops.triton.one_token import OneToken
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.wire.messages import Submit
from tests.engine.helpers import counted
from tests.engine.test_group import CASES as CPU_CASES
from tests.engine.test_group import CONTEXT, DIVIDED, PIPELINE, TENSOR, answers, ended_within, opened, requests
from tests.engine.test_one_kernel_gpu import APART, LARGE, SAID, ask
from tests.models.families import save

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
CONFIG = EngineConfig(
    device="cuda", kv_cache_memory=1 << 24, max_num_seqs=4, max_num_batched_tokens=32, block_size=16, threads=1
)
RETENTION = {"kv_retention": "heavy:keep=40,window=8", "block_size": 16}
CASES = CPU_CASES | {
    "compressed prompts": ("llama-gqa", {}, RETENTION),
    "norms of all heads": ("olmo2", {}, {}),  # their mean square is summed over ranks
}
WAYS = {
    "tensor": TENSOR,
    "stages": PIPELINE,
    "context": CONTEXT,
    "divided stream": TENSOR | DIVIDED,
    "requests": {"data_parallel_size": 2},
}
TRIED = [
    *(("grouped heads", way) for way in WAYS if way != "requests"),
    *(("windows", way) for way in ("tensor", "stages", "context")),
    *(
        (case, "tensor")
        for case in ("int8", "drafts", "experts", "whole experts", "deterministic", "compressed prompts", "few blocks")
    ),
    ("experts", "requests"),
    ("whole experts", "requests"),
    ("drafts", "stages"),
    ("one KV head", "tensor"),
    *(("norms of all heads", way) for way in ("tensor", "divided stream")),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in {family for family, _, _ in CASES.values()}:
        save(family, folder / family)
    return folder


@cache
def expected(folders: Path, case: str) -> dict[str, list[int]]:
    family, model, engine = CASES[case]
    with opened(folders / family, replace(CONFIG, **engine), **{**model, "expert_parallel": False}) as single:  # type: ignore[arg-type]
        return answers(single)


@pytest.mark.parametrize(("case", "way"), TRIED)
def test_gpus_say_what_one_says(case: str, way: str, folders: Path) -> None:
    family, model, engine = CASES[case]
    config = replace(CONFIG, **engine, **WAYS[way])  # type: ignore[arg-type]
    if way == "context":
        config = replace(config, block_size=32)
    memory = (config.kv_cache_memory or 0) // config.tensor_parallel_size  # with half of the heads, half as many bytes
    with opened(folders / family, replace(config, kv_cache_memory=memory), **model) as several:
        assert answers(several) == expected(folders, case)
        assert answers(several) == expected(folders, case), "from cached prefixes"


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
@pytest.mark.parametrize("sizes", [TENSOR | PIPELINE, {"tensor_parallel_size": 4}, CONTEXT | TENSOR], ids=str)
def test_four_gpus_say_what_one_says(sizes: dict[str, Any], folders: Path) -> None:
    with opened(folders / "llama-gqa", replace(CONFIG, block_size=32, **sizes)) as several:
        assert answers(several) == expected(folders, "grouped heads")


def plain() -> list[Submit]:
    """Requests without logits processors, greedy and sampled, with prompts in several chunks."""
    kinds = (
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.9, max_tokens=20, seed=3, top_p=0.9, ignore_eos=True),
    )
    prompts = [[7 * number % 320 for number in range(3, length)] for length in (9, 60, 21, 45)]
    return [Submit(str(at), prompt, kinds[at % 2], arrival=0.0) for at, prompt in enumerate(prompts)]


@pytest.mark.parametrize("way", ["tensor", "stages", "context"])
def test_steps_run_as_graphs(way: str, folders: Path) -> None:
    """Decode steps and mixed steps, none of them eagerly."""
    config = replace(CONFIG, block_size=32, **WAYS[way])  # type: ignore[arg-type]
    with opened(folders / "llama-gqa", config) as engine:
        runner = engine.engine.loop.runner
        assert isinstance(runner, GroupRunner)
        executor = runner._runner.executor  # type: ignore[attr-defined]
        assert isinstance(executor, GraphExecutor)
        calls: list[str] = []
        executor._step.forward = counted(executor._step.forward, calls)  # type: ignore[method-assign]
        executor._replay = counted(executor._replay, calls)  # type: ignore[method-assign]
        tokens = [token for delta in engine.run(plain()) for token in delta.tokens]
    assert len(tokens) == 2 * (24 + 20)
    assert calls.count("_replay") > 20 and "forward" not in calls


@pytest.mark.parametrize("case", ["grouped heads", "windows"])
def test_keys_of_long_prompts_travel_between_gpus(case: str, folders: Path) -> None:
    """Prompts in chunks beside others, whose tokens are those of one GPU."""
    family, model, engine = CASES[case]
    prompts = [[(7 * number + row) % 320 for number in range(3, length)] for row, length in enumerate((200, 150, 90))]
    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    submits = [Submit(str(at), prompt, sampling, arrival=0.0) for at, prompt in enumerate(prompts)]
    tokens = []
    for sizes in ({}, CONTEXT):
        config = replace(CONFIG, block_size=32, max_num_batched_tokens=128, **engine, **sizes)  # type: ignore[arg-type]
        with opened(folders / family, config, **model) as several:
            tokens.append(sorted((delta.id, token) for delta in several.run(submits) for token in delta.tokens))
    assert tokens[0] == tokens[1] and len(tokens[0]) == 3 * 16


def test_a_grammar_and_a_draft_model_over_two_gpus() -> None:
    encode = Tokenizer.load(shipped_model()).encode
    sampling = SamplingParams(temperature=0.8, seed=2, max_tokens=40, grammar=Grammar("regex", "[a-z ]{30,40}"))
    submits = [Submit(name, encode("Once", add_special_tokens=False), sampling, arrival=0.0) for name in "ab"]
    tokens = []
    for ranks in (1, 2):
        config = replace(
            CONFIG, tensor_parallel_size=ranks, speculate=f"draft:{shipped_model()}", kv_cache_memory=1 << 26
        )
        with opened(shipped_model(), config) as engine:
            tokens.append(sorted((delta.id, token) for delta in engine.run(submits) for token in delta.tokens))
    assert tokens[0] == tokens[1] and len(tokens[0]) > 10


@pytest.mark.parametrize("form", ["", "fp8"])
def test_a_lone_token_runs_through_one_kernel_per_gpu(form: str, tmp_path: Path) -> None:
    """Its answer is as likely as when it is scored as a prompt, whose products and sums are kernels of their own."""
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    model = ModelConfig(model=str(tmp_path), load_format="dummy", max_model_len=8192, quantization=form)
    config = EngineConfig(
        max_num_seqs=4, kv_cache_memory=256 << 20, enable_prefix_caching=False, tensor_parallel_size=2
    )
    engine = LocalEngine.start(model, config)
    try:
        runner = engine.engine.loop.runner
        assert isinstance(runner, GroupRunner)
        assert isinstance(runner._runner.executor._step.decoder._run, OneToken)  # type: ignore[attr-defined]
        for length in (60, 1500):
            prompt = [(7 * number + 3) % 4000 for number in range(length)]
            said, logprobs, _ = ask(engine, f"say {length}", prompt, max_tokens=SAID, logprobs=0)
            again, _, _ = ask(engine, f"again {length}", prompt, max_tokens=SAID, logprobs=0)
            _, _, scored = ask(engine, f"score {length}", prompt + said, max_tokens=1, prompt_logprobs=0)
            assert said == again and len(said) == SAID
            apart = torch.tensor(logprobs) - torch.tensor(scored[-SAID:])
            assert apart.abs().mean() < APART[form] and apart.abs().max() < 5 * APART[form], apart
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("blow", "reason"),
    [(signal.SIGKILL, "rank 1 has ended with status -9"), (signal.SIGSTOP, "rank 1 has sent nothing for 4 s")],
)
@pytest.mark.parametrize("way", ["tensor", "stages", "context"])
def test_a_lost_rank_ends_the_engine(way: str, blow: signal.Signals, reason: str, folders: Path) -> None:
    """Within five seconds, with the reason, although a kernel waits for the rank; and another engine starts afterwards."""
    config = replace(CONFIG, block_size=32, **WAYS[way])  # type: ignore[arg-type]
    with opened(folders / "llama-gqa", config) as engine:
        runner = engine.engine.loop.runner
        assert isinstance(runner, GroupRunner)
        pids = [follower.process.pid for follower in runner._group.followers if follower.process is not None]
        for request in requests():
            engine.submit(request)
        engine.engine.turn()
        os.kill(pids[0], blow)
        began = time.monotonic()
        with pytest.raises(EngineFailed, match=f"A rank of the model is lost: {reason}"):
            while time.monotonic() - began < 10:
                engine.engine.turn()
        assert time.monotonic() - began < 5.5
        engine._open.clear()
    assert ended_within(1.0, pids)
    if blow == signal.SIGKILL:
        with opened(folders / "llama-gqa", config) as again:
            assert answers(again) == expected(folders, "grouped heads")


def test_more_ranks_than_gpus_are_refused(folders: Path) -> None:
    count = torch.cuda.device_count()
    config = replace(CONFIG, pipeline_parallel_size=2, tensor_parallel_size=count)
    with (
        pytest.raises(
            ConfigError, match=f"needs {2 * count} GPUs on this host, and torch finds {count}: lower the sizes"
        ),
        opened(folders / "llama-gqa", config),
    ):
        pass
