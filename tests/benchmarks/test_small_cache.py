"""The siblings of benchmarks/small_cache.py: equal in size, trained on equal batches, and served with their small caches."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import small_cache
import torch
from small_cache import FULL, KINDS, SERVED, SIBLINGS, TINY, Run, config_of, kv_figures, sequences_that_fit, spec_of

from ridgeline.cli.hosted import Hosted, private
from ridgeline.compress.decoder import TrainableDecoder, load_decoder, save_decoder
from ridgeline.core.resolve import resolve
from ridgeline.core.spec import kv_layout
from ridgeline.models.config import read_spec
from ridgeline.quality.served import Endpoint, ServerScorer
from ridgeline.quality.texts import Window
from ridgeline.text.tokenizer import Tokenizer


def quiet(stage: str, done: int, total: int) -> None: ...


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pools as training/data.py writes them, of random ids."""
    work = tmp_path_factory.mktemp("siblings")
    (work / "pools").mkdir()
    chance = np.random.default_rng(0)
    for kind in KINDS:
        np.save(work / "pools" / f"train-{kind}.ids.npy", chance.integers(0, 8192, 400).astype(np.uint16))
    return work


def run(work: Path, only: str) -> Run:
    return Run(
        Namespace(work=work, only=only, tiny=True, tokens=2 * TINY.rows * TINY.length, corpus="", out=None, commit="")
    )


def test_siblings_have_one_size_and_ever_smaller_caches() -> None:
    specs = {row: spec_of(row, FULL) for row in SERVED}
    sizes = [spec.params for spec in specs.values()]
    assert max(sizes) < 30e6 and max(sizes) / min(sizes) < 1.005
    caches = [spec.kv_bytes(4096) for spec in specs.values()]
    assert caches == sorted(caches, reverse=True) and caches[0] > 20 * caches[-1]
    assert small_cache.ratio(FULL)["value"] > 20
    for name, sibling in SIBLINGS.items():
        decoder = TrainableDecoder(read_spec(config_of(sibling, TINY)), TINY.length)
        assert sum(weight.numel() for weight in decoder.parameters()) == kv_figures(spec_of(name, TINY), TINY)["params"]


@pytest.mark.parametrize("row", [*SERVED])
def test_the_sequences_of_a_row_fit_its_cache(row: str) -> None:
    layout = kv_layout(spec_of(row, FULL), FULL.page)
    for length in FULL.contexts:
        rows, out = sequences_that_fit(layout, FULL, length)
        assert rows * layout.pages_for(length + out, 1) * layout.page_bytes <= FULL.cache or rows == 1
        assert rows * length <= out * (FULL.chunk - rows)


@pytest.mark.long
def test_a_sibling_trains_once_and_is_served(pools: Path) -> None:
    """Its server, with a cache in int8 that layers share, scores tokens as the trained decoder does."""
    work = run(pools, "all")
    work.train()
    folder = pools / "shared"
    assert json.loads((folder / "config.json").read_text())["cla_share_factor"] == 2
    stored = (folder / "model.safetensors").read_bytes()
    shutil.rmtree(pools / "shared.run")
    work.train()
    assert (folder / "model.safetensors").read_bytes() == stored and not (pools / "mha").exists()
    decoder = load_decoder(folder)
    with torch.no_grad():  # after two steps layers are still close to the identity, and tokens equally likely
        for name, weight in decoder.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight")):
                weight.normal_(std=0.2)
    save_decoder(decoder, folder, json.loads((folder / "config.json").read_text()))
    ids = tuple(torch.randint(4, 8192, (60,), generator=torch.Generator().manual_seed(1)).tolist())
    flags = {
        "model": str(folder),
        "device": "cpu",
        "threads": "1",
        "kv_cache_dtype": "int8",
        "kv_cache_memory": "4194304",
    }
    with Hosted(private(resolve(flags, environ={})), quiet) as url:
        (scores,) = ServerScorer(Endpoint(url), Tokenizer.load(folder)).score([Window(ids, 1, 0)], 3, quiet)
    with torch.inference_mode():
        known = load_decoder(folder)(torch.tensor([ids]))[0, :-1].log_softmax(-1)
    want = known.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
    assert want.std() > 1
    assert np.sqrt(np.square(scores.logprob - want.numpy()).mean()) < 0.05 * want.std()


def test_batches_are_functions_of_their_number(pools: Path) -> None:
    """Every sibling sees the same rows, and a resumed training goes on with the next ones."""
    first, second = (small_cache.Rows(pools / "pools", TINY, torch.device("cpu")) for _ in range(2))
    second(0)
    assert torch.equal(first(7), second(7)) and not torch.equal(first(7), first(8))
    assert first(7).shape == (TINY.rows, TINY.length + 1)


def test_rows_say_what_is_counted_and_what_is_measured(pools: Path, tmp_path: Path) -> None:
    """Before any training the sizes are written; figures of the other stages join them. A dry run writes no results."""
    words = ["table", "--work", str(pools), "--out", str(tmp_path)]
    small_cache.main(words)
    rows = {row["row"]: row for row in json.loads((tmp_path / "small_cache.json").read_text())}
    assert rows["small-cache-all"]["machine"] == "any: counted" and "loss" not in rows["small-cache-all"]
    (ratio,) = json.loads((tmp_path / "kv.json").read_text())
    assert ratio["row"] == "small-cache-ratio" and ratio["value"] > ratio["target"]
    (pools / "loss.json").write_text(json.dumps([{"row": "all", "loss": 3.0}]))
    small_cache.main(words)
    rows = {row["row"]: row for row in json.loads((tmp_path / "small_cache.json").read_text())}
    assert rows["small-cache-all"]["loss"] == 3.0 and rows["small-cache-all"]["machine"] != "any: counted"
    with pytest.raises(SystemExit):
        small_cache.main([*words, "--tiny"])
