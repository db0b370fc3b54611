"""A server that drafts: the same answers, and /metrics tells what was drafted and kept."""

from __future__ import annotations

from pathlib import Path

from .served import Served, served

FLAGS = ("--device", "cpu", "--dtype", "float32", "--max-num-seqs", "4", "--max-model-len", "512", "--threads", "1")
ASK = {
    "prompt": "one two three four one two three four one two",
    "max_tokens": 60,
    "temperature": 0,
    "ignore_eos": True,
}


def test_auto(server: Served, tmp_path: Path) -> None:
    plain = server.send("POST", "/v1/completions", ASK).json
    with served(tmp_path, *FLAGS, "--speculate", "auto") as drafting:
        drafted = drafting.send("POST", "/v1/completions", ASK).json
        streamed = drafting.send("POST", "/v1/completions", ASK | {"stream": True})
        assert streamed.status == 200
        accepted = drafting.metric("spec_decode_num_accepted_tokens_total")
        assert drafting.metric("spec_decode_num_draft_tokens_total") >= accepted > 0
        assert drafting.metric("spec_decode_num_drafts_total") > 0
        text = drafting.send("GET", "/metrics").data.decode()
        assert "spec_decode_num_accepted_tokens_per_pos_total{" in text and 'position="0"' in text
    assert drafted["choices"][0]["text"] == plain["choices"][0]["text"]
    assert drafted["usage"] == plain["usage"]
