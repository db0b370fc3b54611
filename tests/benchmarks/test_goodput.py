"""What the goodput benchmark derives from a server's ledger, and the model folder it makes of a shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from goodput import equivalence, folder_of, found_among, gained, late_work

from ridgeline.core.errors import RidgelineError
from ridgeline.core.events import LateWork
from ridgeline.metrics import Metrics
from ridgeline.text.tokenizer import Tokenizer

from ..bench.rows import make_run, row
from ..metrics.test_live import step


def ended(tpot_s: float | None, prompt: int, cached: int, prefill_s: float) -> dict[str, Any]:
    return {"tpot_s": tpot_s, "prompt_tokens": prompt, "cached_tokens": cached, "spent": {"prefill_s": prefill_s}}


def test_an_output_token_is_weighed_against_prompt_tokens_that_were_computed() -> None:
    rows = [ended(0.004, 1000, 200, 0.04), ended(0.006, 100, 0, 0.004), ended(0.005, 400, 0, 0.024)]
    unfit = [ended(None, 100, 0, 9.0), ended(9.0, 64, 64, 0.001)]
    figures = equivalence([*rows, *unfit])
    assert figures == {
        "requests": 3, "ms_per_output_token": 5.0, "ms_per_input_token": 0.05, "input_tokens_per_output_token": 100.0,
    }  # fmt: skip


def test_late_work_is_read_from_what_the_server_exports() -> None:
    metrics = Metrics("m")
    before = late_work(metrics.render().decode())
    assert before == {"late_compiles": 0.0, "late_captures": 0.0, "late_s": 0.0}
    for late in ([LateWork("compile", "a", 0.5)], [LateWork("compile", "b", 0.25), LateWork("capture", "c", 1.0)]):
        metrics.on_step(step(late=late))
    after = late_work(metrics.render().decode())
    assert gained(after, before) == {"late_compiles": 2.0, "late_captures": 1.0, "late_s": 1.75}


def test_every_token_of_a_shape_has_text(tmp_path: Path) -> None:
    shape, place = tmp_path / "shape", tmp_path / "place"
    shape.mkdir()
    place.mkdir()
    (shape / "config.json").write_text(json.dumps({"vocab_size": 9000}))
    assert folder_of("", str(place)) == "" and folder_of(str(shape), str(place)) == str(place)
    tokenizer = Tokenizer.load(place)
    assert tokenizer.vocab_size == 9000
    assert tokenizer.decode([8999], skip_special_tokens=False) and tokenizer.encode("the sea", add_special_tokens=False)


def test_a_search_that_was_stopped_shows_what_it_has() -> None:
    good = [make_run([row(at) for at in range(20)], "ttft=200ms", rate=rate) for rate in (2.0, 4.0)]
    bad = make_run([row(at, ttft=1.0) for at in range(20)], "ttft=200ms", rate=8.0)
    result = found_among([*good, bad], 0.9, "after 5 s")
    assert (result.rate, result.bounded, result.stopped) == (4.0, True, "after 5 s") and result.best is good[1]
    assert found_among([bad], 0.9, "after 5 s").best is None
    with pytest.raises(RidgelineError, match="--patience"):
        found_among([], 0.9, "after 5 s")
