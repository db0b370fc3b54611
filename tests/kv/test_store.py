"""The cache's memory: every layer has its own bytes in every page, whatever the format."""

from __future__ import annotations

import pytest
import torch

from ridgeline.core.spec import KV_FORMATS, KvFormat, LayerSpec, ModelSpec, Rope, kv_layout
from ridgeline.kv.store import KvStore
from ridgeline.ops.rows import Int, RowState, keep

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

FORMATS = {
    "float32": KV_FORMATS["float32"],
    "bfloat16": KV_FORMATS["bfloat16"],
    "a scale for each vector": KvFormat("int8-test", "int8", 8, "float16"),
    "groups of packed integers": KvFormat("int4-test", "uint8", 4, "float16", group=4),
    "fp8 with float32 scales": KvFormat("fp8-test", "float8_e4m3fn", 8, "float32"),
}


def spec_of(name: str, kv_format: KvFormat = FORMATS["float32"], ranks: int = 1) -> ModelSpec:
    """One that names the format, as long as the format's name is known."""
    spec = ModelSpec("Tiny", 32, 32, tuple(MODELS[name]), 64, dtype="float32", kv_format=kv_format.name)
    return spec.on_rank(ranks)


def store(name: str) -> KvStore:
    spec = spec_of(name)
    return KvStore(kv_layout(spec, PAGE), spec.layers, BLOCKS, CPU)


def layers_with_cache(name: str) -> list[int]:
    return [index for index, layer in enumerate(MODELS[name]) if layer.share_from is None]


@pytest.mark.parametrize("name", MODELS)
def test_layers_of_a_page_never_overlap(name: str) -> None:
    """Groups share pages (a page belongs to one group at a time); layers of one group never share bytes."""
    cache = store(name)
    for group in cache.layout.groups:
        for index in group.layers:
            layer = MODELS[name][index]
            assert cache.kv[index].shape == (BLOCKS + 1, 2, layer.n_kv_heads, PAGE, layer.head_dim)
            cache.kv[index].fill_(index + 1)
        for index in group.layers:
            assert bool((cache.kv[index] == index + 1).all())


@pytest.mark.parametrize("name", MODELS)
def test_a_page_is_one_run_of_bytes(name: str) -> None:
    """The pages of different groups are interchangeable: same base, same size."""
    cache = store(name)
    size = cache.layout.page_bytes
    assert cache.flat.numel() == (BLOCKS + 1) * size
    for index in layers_with_cache(name):
        cache.flat.zero_()
        cache.kv[index][3].fill_(1.0)
        touched = cache.flat.nonzero()
        assert 3 * size <= int(touched.min()) and int(touched.max()) < 4 * size


@pytest.mark.parametrize("name", MODELS)
def test_copies_follow_each_other(name: str) -> None:
    cache = store(name)
    for index in layers_with_cache(name):
        for page in range(BLOCKS + 1):
            cache.kv[index][page].fill_(page)
    cache.copy_pages([1, 2, 2, 3, 4, 1])
    for index in layers_with_cache(name):
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


@pytest.fixture(params=FORMATS.values(), ids=FORMATS)
def kv_format(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> KvFormat:
    """A format that models can name during the test."""
    test_format: KvFormat = request.param
    monkeypatch.setitem(KV_FORMATS, test_format.name, test_format)
    return test_format


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_predicted_bytes_are_those_of_the_tensors(name: str, kv_format: KvFormat, ranks: int) -> None:
    """Values and scales of all layers, each in bytes of its own, are what the formulas of the spec say, on every rank."""
    spec = spec_of(name, kv_format, ranks)
    cache = KvStore(kv_layout(spec, PAGE), spec.layers, BLOCKS, CPU)
    slots, total = cache.pages * PAGE, 0
    for number, group in enumerate(cache.layout.groups):
        parts = [part[index] for index in group.layers for part in (cache.kv, cache.scales) if part[index] is not None]
        for value, part in enumerate(parts, start=1):
            part.view(torch.uint8).fill_(value)
        for value, part in enumerate(parts, start=1):
            assert bool((part.view(torch.uint8) == value).all()), "parts overlap"
        size = sum(part.nbytes for part in parts)
        assert size == group.token_bytes * slots == sum(run.nbytes for run in cache.runs[number])
        assert (
            cache.flat.view(cache.pages, -1)[:, group.token_bytes * PAGE :].count_nonzero() == 0 or len(cache.runs) > 1
        )
        total += size
    assert total == spec.kv_bytes_per_token() * slots
    assert cache.flat.nbytes == cache.pages * cache.layout.page_bytes


def test_scales_go_where_their_values_go(kv_format: KvFormat) -> None:
    """When pages are copied, and when slots move along the accepted path of a draft tree."""
    spec = spec_of("plain", kv_format)
    cache = KvStore(kv_layout(spec, PAGE), spec.layers, BLOCKS, CPU)
    parts = [part.view(torch.uint8) for part in (*cache.kv, *cache.scales) if part is not None]
    for part in parts:
        for slot in range(cache.pages * PAGE):
            part[slot // PAGE, :, :, slot % PAGE] = slot
    ints, tables = torch.zeros(2, Int.STOP, dtype=torch.int32), torch.tensor([[[0, 0], [1, 2]]], dtype=torch.int32)
    ints[1, Int.LENGTH] = 3
    state, row = RowState(torch.zeros(2, 8, dtype=torch.int32), ints, tables, PAGE), torch.ones(1, dtype=torch.int32)
    # Nodes 2 and 5 behind the root, in slots 2 and 5, are kept: they belong into slots 1 and 2.
    keep(state, row, torch.tensor([[3, 0]], dtype=torch.int32), torch.tensor([[0, 2, 5]]), cache.runs, 2)
    cache.copy_pages([2, 3])
    for part in parts:
        assert bool((part[1, :, :, 1] == PAGE + 2).all()) and bool((part[1, :, :, 2] == PAGE + 5).all())
        assert torch.equal(part[3], part[2])


def test_layers_of_another_layout_are_refused() -> None:
    """A rank has fewer heads than its model: their sizes must not be mixed up."""
    spec = spec_of("plain")
    with pytest.raises(AssertionError, match="other layers"):
        KvStore(kv_layout(spec.on_rank(2), PAGE), spec.layers, BLOCKS, CPU)
