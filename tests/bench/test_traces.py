"""Every trace format, from excerpts and from rows in their layout (tests/data/traces/SOURCES.md)."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from ridgeline.bench.traces import read_trace
from ridgeline.core.errors import ConfigError

DATA = Path(__file__).parents[1] / "data" / "traces"


def test_azure() -> None:
    trace = read_trace(DATA / "azure.csv")
    assert trace.timed
    assert [(ask.input, ask.output) for ask in trace.requests] == [(374, 44), (396, 109), (879, 55), (91, 16), (91, 16)]
    assert trace.requests[1].at_s == pytest.approx(4.314579, abs=1e-6)  # seven fractional digits


def test_azure_of_2024_has_zones(tmp_path: Path) -> None:
    file = tmp_path / "week.csv"
    rows = "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01Z,10,7\n"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    assert read_trace(file).requests[1].at_s == pytest.approx(0.99007)


def test_mooncake(tmp_path: Path) -> None:
    trace = read_trace(DATA / "mooncake.jsonl")
    assert trace.timed and trace.requests[0].input == 6758 and trace.requests[0].blocks[:3] == (0, 1, 2)
    assert all(len(ask.blocks) == -(-ask.input // ask.block) for ask in trace.requests)
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress((DATA / "mooncake.jsonl").read_bytes()))
    assert read_trace(packed).requests == trace.requests


def test_burstgpt_leaves_failures_out() -> None:
    trace = read_trace(DATA / "burstgpt.csv")
    assert [(ask.at_s, ask.input, ask.output) for ask in trace.requests] == [
        (0, 472, 18),
        (40, 1087, 230),
        (113, 417, 276),
    ]
    assert trace.skipped == 1


def test_sharegpt_replays_growing_conversations() -> None:
    trace = read_trace(DATA / "sharegpt.json")
    texts = ["How deep is the sea?", "Name a tree.", "And the Baltic?", "Is that much?"]
    assert [ask.text for ask in trace.requests] == [texts[0], texts[1], "Name a sea.", *texts[2:]]
    assert trace.requests[0].output == 7
    assert trace.skipped == 1 and not trace.timed
    alone, other, *turns = trace.requests
    assert alone.session == other.session == -1 and alone.history == ()
    assert len({ask.session for ask in turns}) == 1 and turns[0].session >= 0
    assert turns[2].history == ("Name a sea.", "The North Sea.", "And the Baltic?", "Fifty metres.")
    assert [ask.input for ask in turns] == [3, 3 + 4 + 4, 3 + 4 + 4 + 3 + 3], "about four characters per token"


WEKA = (
    '{"id": "one", "block_size": 64, "requests": [{"t": 0.0, "type": "s", "in": 130, "out": 20, "hash_ids": [1, 2, 3]},'
    ' {"t": 5.0, "requests": [{"t": 1.5, "in": 70, "out": 5, "hash_ids": [9, 8]}]},'
    ' {"t": 4.0, "type": "n", "in": 200, "out": 0, "hash_ids": [1, 2, 3, 4]}]}'
)


def test_weka_keeps_blocks_of_conversations_apart(tmp_path: Path) -> None:
    file = tmp_path / "agents.jsonl"
    file.write_text(WEKA + "\n" + WEKA.replace('"t": 0.0', '"t": 0.5') + "\n")
    trace = read_trace(file)
    assert trace.timed and trace.skipped == 2, "answers without a token are no requests"
    assert [(ask.at_s, ask.input, ask.session) for ask in trace.requests] == [
        (0, 130, 0),
        (0.5, 130, 1),
        (6.5, 70, 0),
        (6.5, 70, 1),
    ]
    assert all(ask.block == 64 and len(ask.blocks) == -(-ask.input // 64) for ask in trace.requests)
    assert not set(trace.requests[0].blocks) & set(trace.requests[1].blocks)
    single = tmp_path / "one.json"
    single.write_text(WEKA.replace("[{", "[\n{", 1))
    assert [ask.input for ask in read_trace(single).requests] == [130, 70]


def test_prompts() -> None:
    trace = read_trace(DATA / "prompts.jsonl")
    assert [ask.text for ask in trace.requests] == ["Tell me of the sea.", "Tell me of the wind."]
    assert trace.requests[0].output == 12


def test_a_prompt_may_hold_other_separators_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a\u2028b"}\r\n{"prompt": "c"}\n', encoding="utf-8")
    assert [ask.text for ask in read_trace(path).requests] == ["a\u2028b", "c"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("vidur.csv", "arrived_at,num_prefill_tokens,num_decode_tokens\n2.5,10,20\n3.0,30,40\n"),
        ("lens.json", '{"name": "w", "lens": [[10, 20], [30, 40]]}'),
        ("lens-lines.json", '{\n "name": "w",\n "lens": [[10, 20], [30, 40]]\n}\n'),
    ],
)
def test_plain_lengths(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert [(ask.input, ask.output) for ask in read_trace(file).requests] == [(10, 20), (30, 40)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2\n", "unknown columns in its first line"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "line 2"),
        ('{"timestamp": 1, "input_length": 5}\n', "line 1: the key 'output_length' is missing"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 5}\nnonsense\n', "line 2"),
        ("[]", "contains no request"),
        ("", "unknown columns in its first line"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "bad"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_trace(file)
    with pytest.raises(ConfigError, match="Cannot read the trace"):
        read_trace(tmp_path / "absent")
