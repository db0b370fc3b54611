"""/v1/embeddings, driven by the official client, and the files that say how a model pools."""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from array import array
from pathlib import Path
from typing import Any

import openai
import pytest

from ridgeline.core.errors import ConfigError
from ridgeline.service.pooling import read_embedder, read_judge
from ridgeline.service.state import Embedder

from .live import MODEL, Live, behaviour, counts, ids, live, tokenizer


def client_of(server: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)


def raw(tokens: list[int]) -> list[float]:
    """What the fake engine makes of a prompt."""
    return [len(tokens), tokens[0], tokens[-1], 3.0]


def unit(values: list[float]) -> list[float]:
    return [value / math.hypot(*values) for value in values]


@pytest.mark.parametrize("form", ["float", "base64", None])
def test_inputs_of_every_kind(endless: Live, form: Any):
    """The client asks for base64 unless it is told otherwise."""
    given = {} if form is None else {"encoding_format": form}
    single = client_of(endless).embeddings.create(model=MODEL, input="hello", **given)
    several = client_of(endless).embeddings.create(model=MODEL, input=["hello", "the end"], **given)
    tokens = client_of(endless).embeddings.create(model=MODEL, input=[7, 8, 9], **given)
    lists = client_of(endless).embeddings.create(model=MODEL, input=[[7, 8, 9], [5]], **given)
    prompts = [[ids("hello")], [ids("hello"), ids("the end")], [[7, 8, 9]], [[7, 8, 9], [5]]]
    for answer, expected in zip((single, several, tokens, lists), prompts, strict=True):
        assert [item.index for item in answer.data] == list(range(len(expected)))
        assert (answer.model, answer.usage.prompt_tokens) == (MODEL, sum(map(len, expected)))
        assert answer.usage.total_tokens == answer.usage.prompt_tokens
        for item, prompt in zip(answer.data, expected, strict=True):
            vector: Any = item.embedding
            if form == "base64":  # who asks for it gets it
                vector = array("f", base64.b64decode(vector)).tolist()
            assert vector == pytest.approx(unit(raw(prompt)), abs=1e-6)
    (sent,) = [submit for submit in endless.engine.submits if submit.tokens == [5]][:1]
    assert (sent.sampling.pooling, sent.sampling.n) == ("last", 1)


def test_dimensions_and_norms(endless: Live):
    client = client_of(endless)
    short = client.embeddings.create(model=MODEL, input=[7, 8, 9], dimensions=2)
    assert short.data[0].embedding == pytest.approx(unit(raw([7, 8, 9])[:2]), abs=1e-6)
    whole = client.embeddings.create(model=MODEL, input=[7, 8, 9], extra_body={"normalize": False})
    assert whole.data[0].embedding == raw([7, 8, 9])
    with live(behaviour(counts), pooling="mean") as mean:
        answer = client_of(mean).embeddings.create(model=MODEL, input=[7, 8, 9], extra_body={"normalize": False})
    assert answer.data[0].embedding == pytest.approx([value / 3 for value in raw([7, 8, 9])])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": []}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"input": [[1], ["a"]]}, "input[1]"),
        ({"input": [1, 1 << 20]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": ["a", "b" * 4000]}, "input[1]"),
        ({"input": "a", "dimensions": 5}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "normalize": 1}, "normalize"),
        ({"input": "a", "model": "other"}, "model"),
    ],
)
def test_what_is_refused(endless: Live, body: dict[str, Any], param: str):
    answer = endless.send("POST", "/v1/embeddings", body)
    assert answer.status in (400, 404) and answer.json["error"]["param"] == param
    assert endless.send("POST", "/v1/embeddings", {"input": "a"}).status == 200


def test_metrics_have_the_requests(endless: Live):
    count = re.compile(r"^ridgeline:request_success_total\S*length\S* (\S+)$", re.MULTILINE)
    before = count.search(endless.send("GET", "/metrics").data.decode())
    endless.send("POST", "/v1/embeddings", {"input": ["hello", "hello"]})
    after = count.search(endless.send("GET", "/metrics").data.decode())
    assert before is not None and after is not None and float(after[1]) == float(before[1]) + 2
    (row,) = endless.send("GET", "/requests?limit=1").json["data"]
    assert (row["prompt_tokens"], row["output_tokens"], row["cut"]) == (2 * len(ids("hello")), 0, "")


def test_an_answer_is_cached_and_no_judge_is_asked():
    """A judge that cannot be reached would withdraw every text."""
    with live(behaviour(counts), answer_cache_mb=1.0, moderation="http://127.0.0.1:9/none") as server:
        first, again = (server.send("POST", "/v1/embeddings", {"input": ["hello", "the end"]}).json for _ in range(2))
        assert first["data"] == again["data"] and len(first["data"]) == 2
        assert len(server.engine.submits) == 2


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({"pooling_mode": "cls"}, "cls"),
    ],
)
def test_files_of_sentence_transformers(config: dict[str, Any], expected: Any, tmp_path: Path):
    assert read_embedder("auto", tmp_path) == Embedder("last", True)
    kinds = ["Transformer", "Pooling"]
    modules = [
        {"idx": place, "name": str(place), "path": f"{place}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for place, kind in enumerate(kinds)
    ]
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 4, **config}))
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert read_embedder("auto", tmp_path) == Embedder(expected, False)
    assert read_embedder("mean", tmp_path) == Embedder("mean", False)
    (tmp_path / "modules.json").write_text(json.dumps([*modules, {"type": "x.Normalize", "path": ""}]))
    assert read_embedder("auto", tmp_path) == Embedder(expected, True)
    (tmp_path / "modules.json").write_text(json.dumps([*modules, {"type": "x.Dense", "path": ""}]))
    with pytest.raises(ConfigError, match="Dense"):
        read_embedder("auto", tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    for bad in (
        {"pooling_mode_max_tokens": True},
        {},
        {**config, "pooling_mode_weightedmean_tokens": True, "pooling_mode": "max"},
    ):
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(bad))
        with pytest.raises(ConfigError, match="give --pooling last, mean or cls"):
            read_embedder("auto", tmp_path)


HEAD = array("f", range(400))
"""Of 100 tokens, four numbers each."""


def write_reranker(folder: Path, kind: str = "BF16", **config: Any) -> None:
    """The files of Qwen3-Reranker that are read, with sentence-transformers' modules."""
    rows = HEAD.tobytes() if kind == "F32" else b"".join(struct.pack("<f", number)[2:] for number in HEAD)
    rows = struct.pack("<400e", *HEAD) if kind == "F16" else rows
    header = json.dumps(
        {"lm_head.weight": {"dtype": kind, "shape": [100, 4], "data_offsets": [8, 8 + len(rows)]}}
    ).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8) + rows)
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], **config}))
    modules = [{"type": "a.Transformer", "path": ""}, {"type": "b.LogitScore", "path": "1_LogitScore"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir(exist_ok=True)
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps({"true_token_id": 40, "false_token_id": 3}))


@pytest.mark.parametrize("kind", ["BF16", "F16", "F32"])
def test_a_reranker_names_its_tokens(kind: str, tmp_path: Path):
    write_reranker(tmp_path, kind)
    assert read_embedder("auto", tmp_path) == read_embedder("yes-no", tmp_path) == Embedder("last", False)
    judge = read_judge("auto", tmp_path, tokenizer())
    assert judge is not None and list(judge.weights) == [148.0] * 4
    assert judge.score([1.0, -1.0, 1.0, -1.0]) == 0.5
    assert judge.score([0.01, 0.0, 0.0, 0.0]) == pytest.approx(1 / (1 + math.exp(-1.48)))
    assert (judge.score([-1e9] * 4), judge.score([1e9] * 4)) == (0.0, 1.0)
    assert read_judge("last", tmp_path, tokenizer()) is None


def test_what_cannot_be_asked(tmp_path: Path):
    assert read_judge("auto", tmp_path, tokenizer()) is None
    write_reranker(tmp_path, tie_word_embeddings=True)
    with pytest.raises(ConfigError, match="embed_tokens"):
        read_judge("auto", tmp_path, tokenizer())
    write_reranker(tmp_path, architectures=["LlamaForCausalLM"])
    with pytest.raises(ConfigError, match="is a LlamaForCausalLM"):
        read_judge("auto", tmp_path, tokenizer())
    write_reranker(tmp_path)
    with pytest.raises(ConfigError, match='no tokens for "yes"'):
        read_judge("yes-no", tmp_path, tokenizer())
    for wrong, message in (((1, None), 'no tokens for "yes"'), ((1, 100), "token 100 of 100")):
        (tmp_path / "1_LogitScore" / "config.json").write_text(
            json.dumps(dict(zip(("true_token_id", "false_token_id"), wrong, strict=True)))
        )
        with pytest.raises(ConfigError, match=message):
            read_judge("auto", tmp_path, tokenizer())
