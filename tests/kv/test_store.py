"""The cache's memory: every layer has its own bytes in every page."""

from __future__ import annotations

import pytest
import torch

from ridgeline.core.spec import LayerSpec, ModelSpec, Rope, kv_layout
from ridgeline.kv.store import KvStore

BLOCKS, PAGE = 5, 4
CPU = torch.device("cpu")


def layer(window: int | None = None, heads: int = 2, share_from: int | None = None) -> LayerSpec:
    return LayerSpec(4, heads, 8, 16, Rope(), window, None, share_from)


MODELS = {
    "plain": [layer() for _ in range(3)],
    "windows": [layer(6), layer(6), layer(6), layer(), layer(6), layer(6)],
    "uneven": [layer(6, 1), layer(6, 1), layer(6, 1), layer(None, 4), layer(None, 4)],
    "shared": [layer(), layer(), layer(share_from=1)],
}


def store(name: str) -> KvStore:
    spec = ModelSpec("Tiny", 32, 32, tuple(MODELS[name]), 64, dtype="float32")
    return KvStore(kv_layout(spec, PAGE), spec.layers, BLOCKS, CPU)


def own(name: str) -> list[int]:
    return [index for index, one in enumerate(MODELS[name]) if one.share_from is None]


@pytest.mark.parametrize("name", MODELS)
def test_layers_of_a_page_never_overlap(name: str) -> None:
    """Groups share pages (a page belongs to one group at a time); layers of one group never share bytes."""
    cache = store(name)
    for group in cache.layout.groups:
        cache.flat.zero_()
        for index in group.layers:
            one = MODELS[name][index]
            assert cache.kv[index].shape == (BLOCKS + 1, 2, one.n_kv_heads, PAGE, one.head_dim)
            cache.kv[index].add_(index + 1)
        for index in group.layers:
            assert bool((cache.kv[index] == index + 1).all())


@pytest.mark.parametrize("name", MODELS)
def test_a_page_is_one_run_of_bytes(name: str) -> None:
    """The pages of different groups are interchangeable: same base, same size."""
    cache = store(name)
    elements = cache.layout.page_bytes // 4
    assert cache.flat.numel() == (BLOCKS + 1) * elements
    for index in own(name):
        cache.flat.zero_()
        cache.kv[index][3].fill_(1.0)
        touched = cache.flat.nonzero()
        assert 3 * elements <= int(touched.min()) and int(touched.max()) < 4 * elements


@pytest.mark.parametrize("name", MODELS)
def test_copies_follow_each_other(name: str) -> None:
    cache = store(name)
    for index in own(name):
        for page in range(BLOCKS + 1):
            cache.kv[index][page].fill_(page)
    cache.copy_pages([1, 2, 2, 3, 4, 1])
    for index in own(name):
        assert [float(page.mean()) for page in cache.kv[index]] == [0, 4, 1, 1, 4, 5]


def test_shared_layers_read_their_source() -> None:
    cache = store("shared")
    assert cache.kv[2].data_ptr() == cache.kv[1].data_ptr()
    assert cache.groups[2] == cache.groups[1]


def test_groups_cover_all_layers() -> None:
    cache = store("windows")
    assert all(index in cache.layout.groups[group].layers for index, group in enumerate(cache.groups))
    assert len(set(cache.groups)) > 1


def test_starts_clean() -> None:
    """Masked keys are multiplied by zero; garbage could be NaN."""
    assert not store("plain").flat.any()
    assert store("plain").flat.nbytes == (BLOCKS + 1) * store("plain").layout.page_bytes
