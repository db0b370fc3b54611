"""`ridgeline place` end to end: the table, JSON that is read again as the previous placement, limits, and bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ridgeline.cli.main import main
from tests.cli.test_planning import LLAMA, run

GPUS = """
[[gpu]]
kind = "h100"
count = 4
owned = true

[[gpu]]
kind = "own card"
memory = "40G"
usd_hour = 1
count = 2
"""
MODELS = f"""
[[model]]
name = "chat"
model = "{LLAMA}"
quantization = "fp8"
replicas = 2
requests = 16
spread = true

[[model]]
name = "code"
layers = 48
width = 8192
heads = 64
kv_heads = 8
d_ff = 22016
vocab_size = 32000
quantization = "int8"
replicas = 2
share = 0.5
"""


def written(folder: Path, text: str, name: str = "fleet.toml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_place_shows_gpus_models_and_what_is_idle(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("highspy")
    out = run(capsys, "place", written(tmp_path, GPUS + MODELS))
    assert re.search(r"\$ per hour; bound .*, gap 0.00% \(", out)
    assert re.search(r"^2 +h100:0, h100:1 +chat, code +\d", out, re.MULTILINE) and re.search(r"chat +2 +2 +2", out)
    assert "2 GPUs in use, $0.20 per hour, 1,400 W" in out
    assert "idle: 2 x h100, 2 x own card" in out and "move" not in out


def test_place_as_json_is_read_again_and_only_what_is_new_moves(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("highspy")
    text = GPUS + MODELS
    before = run(capsys, "place", written(tmp_path, text), "--json")
    facts = json.loads(before)
    assert facts["goal"] == "cheapest" and facts["gap"] < 1e-6 and not facts["moves"]
    assert sum(len(gpu["models"]) for gpu in facts["gpus"]) == len(facts["replicas"]) == 4
    assert all(0 < gpu["used_bytes"] <= gpu["memory_bytes"] for gpu in facts["gpus"])
    previous = written(tmp_path, before, "before.json")
    more = written(tmp_path, text.replace("replicas = 2\nrequests", "replicas = 3\nrequests"), "more.toml")
    after = json.loads(run(capsys, "place", more, "--previous", previous, "--json"))
    assert [move["model"] for move in after["moves"]] == ["chat"] and not after["ended"]
    same = run(capsys, "place", written(tmp_path, text), "--previous", previous)
    assert "moves: none" in same
    without = written(tmp_path, text.replace('name = "code"', 'name = "other"'), "other.toml")
    ended = run(capsys, "place", without, "--previous", previous)
    assert ended.count("ends: code on h100:") == 2 and ended.count("move: other starts on") == 2


def test_place_fills_given_gpus_by_rate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = f"""
goal = "most"
[[gpu]]
kind = "l4"
count = 2
[[model]]
name = "chat"
model = "{LLAMA}"
quantization = "fp8"
rate = 100
slo = "tpot=100ms"
"""
    facts = json.loads(run(capsys, "place", written(tmp_path, text), "--first-fit", "--json"))
    served = facts["models"][0]["served"]
    assert 0 < served < 100 and len(facts["replicas"]) == 2 and facts["method"] == "first fit decreasing"
    assert facts["objective"] == pytest.approx(served) and facts["bound"] >= served


def test_place_writes_a_page_for_who_pays(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    out = run(capsys, "place", written(tmp_path, GPUS + MODELS), "--html", str(page))
    text = page.read_text()
    rate = re.search(r"in use, \$([\d.]+) per hour", out)
    assert rate and f"<b>${rate[1]} per hour</b>" in text and "per month" in text
    assert "<td>price of h100 +20%</td>" in text and "<td>load of every model -20%</td>" in text
    assert "What binds" in text and "<svg" in text and "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert main(["place", written(tmp_path, GPUS + MODELS), "--html", str(tmp_path)]) == 2
    assert "is a folder: give the name of a file" in capsys.readouterr().err


def test_place_says_what_to_relax(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = written(tmp_path, GPUS.replace("count = 4", "count = 1").replace("count = 2", "count = 0") + MODELS)
    assert main(["place", path]) == 1
    error = capsys.readouterr().err
    assert "serves all load" in error or "serves all load" in error.replace("\n", " ")
    assert "Relax one of: " in error and "of h100" in error and "the load, to " in error


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('kind = "h100"', 'kind = "h900"', "gpu 1: kind is 'h900': give its memory, or a name of the hardware table."),
        ('memory = "40G"', 'memory = "lots"', "gpu 2: memory is 'lots': give a whole number of at least 1."),
        (
            "usd_hour = 1",
            "",
            "gpu 2: usd_hour is None: the price of own card is unknown: give usd_hour, or owned = true",
        ),
        ("count = 4", "", "gpu 1: count is None: say how many are owned."),
        ("count = 4", "cuont = 4", "gpu 1 has an unknown key 'cuont': did you mean count?"),
        ('quantization = "fp8"', 'quantization = "fp9"', "model 1: "),
        ("requests = 16", "requests = 0", "model 1: requests is 0: give a whole number of at least 1."),
        ("requests = 16", "rate = 3\nrequests = 16", "model 1: requests is 16: leave it out: it follows from rate."),
        ("spread = true", 'apart = ["cod"]', "apart of chat has 'cod': name other models of the file (chat, code)"),
        (
            "spread = true",
            "tensor_parallel_sizes = [3]",
            "tensor_parallel_sizes is [3]: give some of 1, 2, 4, 8 and 16.",
        ),
        ("heads = 64", "heads = 60", "model 2: heads is 60: heads divide width"),
        ("share = 0.5", "share = 2", "model 2: share is 2: give a share of a GPU's time of at most 1."),
        ('name = "code"', 'name = "chat"', "two models have the name 'chat'"),
        ("replicas = 2\nrequests = 16", "", "model 1: rate is None: give rate, in requests per second, or the number"),
        (
            "requests = 16",
            "requests = 16000",
            "no GPU holds chat (h100: memory: a replica with room for 16,000 requests",
        ),
    ],
)
def test_place_names_bad_input(
    old: str, new: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = GPUS + MODELS
    assert text.count(old)
    assert main(["place", written(tmp_path, text.replace(old, new, 1))]) == 2
    assert message in capsys.readouterr().err


def test_place_names_bad_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = written(tmp_path, GPUS + MODELS)
    cases = (
        ((written(tmp_path, GPUS, "a.toml"),), "has no [[model]]"),
        ((written(tmp_path, 'goal = "best"' + GPUS + MODELS, "b.toml"),), "goal is 'best': write cheapest or most."),
        ((path, "--previous", path), "is not a placement: give the output of `ridgeline place --json`."),
        ((path, "--seconds", "0"), "--seconds is 0: give a number above 0."),
        ((str(tmp_path / "absent.toml"),), "absent.toml"),
    )
    for words, message in cases:
        assert main(["place", *words]) == 2
        assert message in capsys.readouterr().err
