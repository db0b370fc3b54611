"""A calibration that was measured here is what the server predicts by; one of something else is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ridgeline.cli.main import main

from .served import Served, served

FLAGS = ("--device", "cpu", "--dtype", "float32", "--max-num-seqs", "4", "--max-model-len", "512", "--threads", "1")


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibrated") / "calibration.json"
    assert main(["calibrate", *FLAGS, "--most-tokens", "700", "--repeats", "1", "--out", str(path)]) == 0
    return path


def rests_on(server: Served) -> str:
    """What /metrics says the predictions rest on, after one answer."""
    answer = server.send("POST", "/v1/completions", {"prompt": "Once upon a time", "max_tokens": 8})
    assert answer.status == 200
    text = server.send("GET", "/metrics").data.decode()
    assert server.metric("decode_step_predicted_seconds") > 0 and server.metric("step_prediction_error") >= 0
    (label,) = re.findall(r'ridgeline:step_prediction_info\{.*calibration="([^"]*)".*\} 1.0', text)
    assert server.send("GET", "/dashboard/data").json["ceilings"]["calibration"] == label.replace("uncalibrated", "")
    return str(label)


@pytest.mark.long
def test_predictions_follow_the_calibration(calibration: Path, tmp_path: Path) -> None:
    facts = json.loads(calibration.read_text())
    with served(tmp_path, *FLAGS, "--calibration", str(calibration)) as server:
        assert rests_on(server).startswith(f"{facts['date']}, {facts['steps']} steps, median error ")
        calibrated = server.metric("decode_step_predicted_seconds")
    facts["factors"] |= {name: 100 * facts["factors"][name] for name in ("overhead_s", "row_s", "token_s", "launch_s")}
    facts["factors"] |= {name: facts["factors"][name] / 100 for name in facts["factors"] if name.endswith("_share")}
    calibration.with_name("slow.json").write_text(json.dumps(facts))
    with served(tmp_path, *FLAGS, "--calibration", str(calibration.with_name("slow.json"))) as server:
        rests_on(server)
        assert server.metric("decode_step_predicted_seconds") > 20 * calibrated


def test_without_one_they_say_so(server: Served) -> None:
    assert rests_on(server) == "uncalibrated"


@pytest.mark.long
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (("--dtype", "bfloat16"), "its dtype is 'float32', not 'bfloat16'"),
        (("--threads", "2"), "1 threads', not '"),
    ],
)
def test_one_of_something_else_is_refused(
    calibration: Path, tmp_path: Path, changed: tuple[str, ...], words: str
) -> None:
    with (
        pytest.raises(AssertionError) as error,
        served(tmp_path, *FLAGS, *changed, "--calibration", str(calibration)),
    ):
        pass
    said = " ".join(str(error.value).split())
    assert words in said and "run `ridgeline calibrate` with this model on this device" in said
