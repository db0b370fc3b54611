"""What a draft model's folder may ask for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.core.errors import ConfigError
from ridgeline.core.spec import ModelSpec
from ridgeline.models.config import read_model
from ridgeline.models.hub import shipped_model
from ridgeline.speculation.options import read_vocabulary


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return read_model(shipped_model())[0]


def config(folder: Path, **keys: object) -> Path:
    (folder / "config.json").write_text(json.dumps(keys), encoding="utf-8")
    return folder


def test_tokens_come_in_ascending_order(spec: ModelSpec, tmp_path: Path) -> None:
    """Of equal scores the lower token wins, in the draft as in the target."""
    assert read_vocabulary(config(tmp_path, draft_vocabulary=[9, 4, 7]), spec) == (4, 7, 9)


def test_without_a_list_it_says_all(spec: ModelSpec, tmp_path: Path) -> None:
    assert read_vocabulary(config(tmp_path), spec) == ()


@pytest.mark.parametrize("listed", [[1, 1], [-1], [8192], ["a"], [True], 5, None])
def test_a_list_that_names_no_tokens_is_refused(spec: ModelSpec, tmp_path: Path, listed: object) -> None:
    with pytest.raises(ConfigError, match="draft_vocabulary"):
        read_vocabulary(config(tmp_path, draft_vocabulary=listed), spec)


def test_a_head_of_its_own_is_not_cut(spec: ModelSpec, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tied"):
        read_vocabulary(config(tmp_path, draft_vocabulary=[1]), replace(spec, tied=False))
