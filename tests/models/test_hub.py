"""Where models are found, and what is said when they are not; the hub is played by a function."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ridgeline.core.config import ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.models import hub

ANSWER = SimpleNamespace(headers={}, request=None)


def test_folder_wins(tmp_path):
    """The hub would refuse such a name."""
    (tmp_path / "config.json").write_text("{}")
    assert hub.resolve_model(ModelConfig(model=str(tmp_path))) == tmp_path


@pytest.mark.parametrize(
    ("name", "said"),
    [("", "no config.json"), ("a/b/c", "does not exist"), ("file.bin", "a file"), ("file.gguf", "not a GGUF file")],
)
def test_bad_paths(name, said, tmp_path):
    if name.startswith("file"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ConfigError, match=said):
        hub.resolve_model(ModelConfig(model=f"{tmp_path}/{name}"))


@pytest.mark.parametrize("name", ["missing.gguf", "models/missing.GGUF", "./missing", "../missing/model"])
def test_a_path_that_does_not_exist_is_not_asked_of_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"^{tmp_path}/.* does not exist: check the path"):
        hub.resolve_model(ModelConfig(model=name), snapshot=lambda *_, **__: pytest.fail("asked"))


def test_only_what_is_needed_is_downloaded():
    asked = {}

    def download(name, **options):
        asked.update(options, name=name)
        return "/cache/model"

    folder = hub.resolve_model(ModelConfig(model="org/model", revision="v2"), snapshot=download)
    assert folder == Path("/cache/model")
    assert asked["name"] == "org/model" and asked["revision"] == "v2"
    assert "*.safetensors" in asked["allow_patterns"] and "*.bin" not in asked["allow_patterns"]
    hub.resolve_model(ModelConfig(model="org/model", load_format="dummy"), snapshot=download)
    assert "*.safetensors" not in asked["allow_patterns"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (GatedRepoError("gated", response=ANSWER), "HF_TOKEN"),
        (RepositoryNotFoundError("none", response=ANSWER), "check the name"),
        (RevisionNotFoundError("none", response=ANSWER), "revision 'v2'"),
        (LocalEntryNotFoundError("offline"), "hf download org/model"),
        (OfflineModeIsEnabled("offline"), "hf download org/model"),
        (HTTPError("no route"), "hf download org/model"),
    ],
)
def test_errors_name_the_remedy(error, said):
    def download(*_, **__):
        raise error

    with pytest.raises(ConfigError, match=said):
        hub.resolve_model(ModelConfig(model="org/model", revision="v2"), snapshot=download)


def test_shipped_model(tmp_path):
    with pytest.raises(ConfigError, match="shipped model is missing"):
        hub.resolve_model(ModelConfig(), shipped=tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert hub.resolve_model(ModelConfig(), shipped=tmp_path) == tmp_path
