"""lm-evaluation-harness as it is, `local-completions` against the server: what it finds is what `LLM` computes offline."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs the extra long (make test-long)")

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from ridgeline import LLM, SamplingParams
from ridgeline.models.hub import shipped_model

from .served import MODEL, Served

pytestmark = pytest.mark.long

HELD_OUT = Path(__file__).parents[1] / "data" / "heldout.jsonl"
QUESTIONS = 6
GENERATED = 24
RUNS: dict[str, dict[str, Any]] = {
    "ids": {"tokenizer_backend": "huggingface", "tokenized_requests": True, "num_concurrent": 4},
    "text": {"tokenizer_backend": "huggingface", "tokenized_requests": False},
    "batches, the backend found out": {"batch_size": 3},
}


def questions() -> list[dict[str, Any]]:
    """Held-out texts cut in the middle: which of three endings is the true one?"""
    texts = [json.loads(line)["text"].split() for line in HELD_OUT.read_text(encoding="utf-8").splitlines()]
    texts = [words for words in texts if len(words) > 60 and all(word.isascii() for word in words[:60])][:QUESTIONS]
    results = []
    for place, words in enumerate(texts):
        others = [" ".join(texts[(place + step) % len(texts)][40:46]) for step in (1, 2)]
        choices = [" ".join(words[40:46]), *others]
        results.append({"question": " ".join(words[:40]), "choices": choices, "gold": 0})
    assert len(results) == QUESTIONS
    return results


CHOICE_TASK = """
task: endings
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {cache}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
metric_list: [{{metric: acc}}]
"""
LIKELIHOOD_TASK = """
task: likely
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {cache}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{question}}}}"
doc_to_target: " {{{{choices[0]}}}}"
metric_list: [{{metric: perplexity, aggregation: perplexity, higher_is_better: false}}]
"""
ROLLING_TASK = """
task: rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {cache}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: word_perplexity}}]
"""
GENERATE_TASK = """
task: written
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {cache}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{until: ["\\n", "."], max_gen_toks: {tokens}, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    """A task manager that knows the tasks above and no others."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in questions()))
    for task in (CHOICE_TASK, LIKELIHOOD_TASK, ROLLING_TASK, GENERATE_TASK):
        text = task.format(data=data, cache=folder / "cache", tokens=GENERATED)
        (folder / f"{text.split()[1]}.yaml").write_text(text)
    return TaskManager(include_path=str(folder), include_defaults=False)


@pytest.fixture(scope="module")
def offline() -> Iterator[LLM]:
    model = LLM(dtype="float32", max_model_len=512, max_num_seqs=8, kv_cache_memory=5_000_000, threads=1)
    yield model
    model.close()


def run(server: Served, tasks: TaskManager, names: list[str], **arguments: Any) -> dict[str, list[Any]]:
    """Samples by task, in the order of the data."""
    given = {"model": MODEL, "base_url": f"{server.url}/v1/completions", "max_length": 512, **arguments}
    if given.get("tokenizer_backend", "auto") is not None:
        given["tokenizer"] = str(shipped_model())
    results = simple_evaluate(
        model="local-completions",
        model_args=given,
        tasks=names,
        task_manager=tasks,
        bootstrap_iters=0,
        log_samples=True,
    )
    samples = results["samples"]
    return {name: sorted(samples[name], key=lambda sample: sample["doc_id"]) for name in names}


@cache
def likelihood(llm: LLM, context: str, continuation: str) -> tuple[float, bool]:
    """Sum of the continuation's log-probabilities, and whether each of its tokens is the most probable one."""
    encode = llm.tokenizer.encode
    split = len(encode(context, add_special_tokens=False))
    ids = encode(context + continuation, add_special_tokens=False)
    scores = llm.generate([ids], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1))[0].prompt_logprobs
    assert scores is not None
    after = scores[split - 1 :]
    return sum(entry.logprob for entry in after), all(entry.rank == 1 for entry in after)


@pytest.mark.parametrize("kind", RUNS)
def test_likelihoods(server: Served, tasks: TaskManager, offline: LLM, kind: str):
    results = run(server, tasks, ["endings", "likely"], **RUNS[kind])
    for sample, question in zip(results["endings"], questions(), strict=True):
        expected = [likelihood(offline, question["question"], f" {choice}") for choice in question["choices"]]
        sums = [float(response[0][0]) for response in sample["resps"]]
        assert sums == pytest.approx([pair[0] for pair in expected], abs=1e-3)
        assert [str(response[0][1]) == "True" for response in sample["resps"]] == [pair[1] for pair in expected]
        best = max(range(3), key=lambda place: expected[place][0])
        assert sample["acc"] == float(best == 0)
    for sample, question in zip(results["likely"], questions(), strict=True):
        expected_sum, _ = likelihood(offline, question["question"], " " + question["choices"][0])
        assert float(sample["resps"][0][0][0]) == pytest.approx(expected_sum, abs=1e-3)


def test_rolling_likelihoods(server: Served, tasks: TaskManager, offline: LLM):
    results = run(server, tasks, ["rolling"], **RUNS["ids"])
    start = offline.tokenizer.token_bytes(0).decode()
    for sample, question in zip(results["rolling"], questions(), strict=True):
        expected, _ = likelihood(offline, start, question["question"])
        assert float(sample["resps"][0][0]) == pytest.approx(expected, abs=1e-2)


@pytest.mark.parametrize(
    "arguments",
    [
        RUNS["ids"],
        {"tokenizer_backend": None, "eos_string": "<|endoftext|>", "num_concurrent": 3},
    ],
    ids=["ids", "text"],
)
def test_generated_texts(server: Served, tasks: TaskManager, offline: LLM, arguments: dict[str, Any]):
    results = run(server, tasks, ["written"], **arguments)
    params = SamplingParams(temperature=0, max_tokens=GENERATED, stop=("\n", "."))
    expected = offline.generate([question["question"] for question in questions()], params)
    texts = [sample["resps"][0][0] for sample in results["written"]]
    assert texts == [completion.text for completion in expected]
    assert len(set(texts)) > 1
