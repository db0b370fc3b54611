"""A model is named by what it holds, not by where it lies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline.models.config import read_model
from ridgeline.models.eagle_files import head_hash
from ridgeline.models.fingerprint import SAMPLE, content_hash
from ridgeline.models.hub import shipped_model
from tests.models.families import save
from tests.speculation.published import eagle, save_head


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save("llama-gqa", tmp_path / "model")
    return tmp_path / "model"


def _change(folder: Path, name: str, place: int) -> None:
    """Add 1 to one value of a tensor; the file keeps its size and header."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name].view(-1)[place] += 1
    save_file(tensors, path, metadata={"format": "pt"})


def test_copies_are_equal(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "README.md").write_text("notes are no part of a model")
    assert content_hash(folder) == content_hash(tmp_path / "copy")


def test_a_changed_config_is_another_model(folder: Path) -> None:
    before, without = content_hash(folder), content_hash(folder, weights=False)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_theta": 1234.0}))
    assert content_hash(folder) != before
    assert content_hash(folder, weights=False) != without


def test_a_changed_header_is_another_model(folder: Path) -> None:
    before = content_hash(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({name: tensor.to(torch.float16) for name, tensor in tensors.items()}, path)
    assert content_hash(folder) != before


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight"])
def test_changed_weights_are_another_model(folder: Path, name: str) -> None:
    """One value is enough if it is sampled: any of a small tensor, the last one of a large one."""
    before = content_hash(folder)
    size = load_file(folder / "model.safetensors")[name].nbytes
    _change(folder, name, 0 if size <= SAMPLE else -1)
    assert content_hash(folder) != before


def test_one_value_between_the_samples_escapes(folder: Path) -> None:
    """What the docstring admits."""
    before, name = content_hash(folder), "model.embed_tokens.weight"
    assert load_file(folder / "model.safetensors")[name].nbytes > 4 * SAMPLE
    _change(folder, name, 0)
    assert content_hash(folder) == before


def test_a_pickled_head(tmp_path: Path) -> None:
    """Copies are equal, and one changed value makes another head, by the CRC-32 at the end of the file."""
    spec = read_model(shipped_model())[0]
    hashes = []
    for copy, change in enumerate((0, 0, 1)):
        keys, tensors = eagle(spec)
        tensors["embed_tokens.weight"][1000, 7] += change
        head = save_head(tmp_path / str(copy), (keys, tensors), pickled=True)
        hashes.append(head_hash(head))
    assert hashes[0] == hashes[1] != hashes[2]
    head = save_head(tmp_path / "safetensors", (keys, tensors))
    assert head_hash(head) == content_hash(head)


def test_all_files_of_an_index_count(folder: Path, tmp_path: Path) -> None:
    split = tmp_path / "split"
    save("llama-gqa", split, max_shard_size="100KB")
    assert len(list(split.glob("*.safetensors"))) > 1
    before, path = content_hash(split), max(split.glob("*.safetensors"))
    tensors = load_file(path)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    assert content_hash(split) != before


def test_weights_that_are_made_up_need_no_files(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert content_hash(folder, weights=False)
