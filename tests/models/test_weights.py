"""Checkpoints: sharded equals single, faults are named, made-up weights are deterministic, sizes are as predicted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline.compress.checkpoint import Checkpoint
from ridgeline.compress.decoder import load_decoder
from ridgeline.core.config import ModelConfig
from ridgeline.core.errors import ConfigError, UnsupportedModel
from ridgeline.core.spec import ModelSpec, kv_layout
from ridgeline.kv.store import KvStore
from ridgeline.models.build import build
from ridgeline.models.weights import short_name
from ridgeline.ops.reference import REFERENCE
from ridgeline.parallel.mesh import Mesh
from tests.models.families import FAMILIES, MORE, SHARING, save, save_with_images
from tests.models.paged import PagedRows

CPU = torch.device("cpu")


def load(folder: Path, device: torch.device = CPU, **options: object):
    return build(folder, model=ModelConfig(**options), ops=REFERENCE, device=device)


def run(model) -> torch.Tensor:
    return PagedRows(model).step([(1, list(range(3, 40)))])


def edit(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def owned(caches: Sequence[torch.Tensor], spec: ModelSpec) -> list[int]:
    """Bytes of the caches that layers do not share from another layer."""
    return [kv.nbytes for kv, layer in zip(caches, spec.layers, strict=True) if layer.share_from is None]


@pytest.mark.parametrize("name", sorted([*FAMILIES, *MORE, *SHARING]))
def test_predicted_sizes_equal_real_tensors(name, tmp_path):
    theirs = save(name, tmp_path)
    model = load(tmp_path)
    spec = model.spec
    if name not in SHARING:  # transformers has weights for keys that no layer of ours reads
        unused = 2 * spec.d_model if name == "opt" else 0  # rows of positions before the first token
        assert spec.params + unused == sum(parameter.numel() for parameter in theirs.parameters())
    assert spec.params == sum(tensor.numel() for tensor in model.decoder.tensors())
    assert spec.weight_bytes == sum(tensor.nbytes for tensor in model.decoder.tensors())
    cache = PagedRows(model, rows=1, max_tokens=32)
    slots = cache.store.pages * cache.layout.page_tokens
    assert spec.kv_bytes_per_token() * slots == sum(owned(cache.store.kv, spec))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", sorted([*FAMILIES, *MORE, *SHARING]))
def test_a_rank_holds_what_its_spec_says(name, ranks, tmp_path):
    """KV heads that are fewer than the ranks are on several of them; the last rank holds as much as the first."""
    save(name, tmp_path)
    for rank in (0, ranks - 1):
        build_rank = partial(
            build, tmp_path, model=ModelConfig(), ops=REFERENCE, device=torch.device("meta"), mesh=Mesh(rank, ranks)
        )
        if name == "smollm":
            with pytest.raises(ConfigError, match="3 heads"):
                build_rank()
            continue
        model = build_rank()
        assert model.rank_spec.weight_bytes == sum(tensor.nbytes for tensor in model.decoder.tensors())
        for layer, share in zip(model.decoder.layers, model.rank_spec.layers, strict=True):
            assert (layer.attention.shape.n_heads, layer.attention.shape.n_kv_heads) == (
                share.n_heads,
                share.written_heads,
            )
        layout = kv_layout(model.rank_spec, 16)
        store = KvStore(layout, model.rank_spec.layers, 3, torch.device("meta"))
        assert sum(owned(store.kv, model.rank_spec)) == model.rank_spec.kv_bytes_per_token() * 4 * 16


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_groups_cover_every_layer_once(name, tmp_path):
    save(name, tmp_path)
    spec = load(tmp_path, torch.device("meta")).spec
    layout = kv_layout(spec, 16)
    assert sorted(index for group in layout.groups for index in group.layers) == list(range(len(spec.layers)))
    for group in layout.groups:
        assert {spec.layers[index].window for index in group.layers} == {group.window}
        assert group.token_bytes == sum(spec.layers[index].kv_bytes(spec.kv) for index in group.layers)
        assert group.token_bytes * 16 <= layout.page_bytes


def test_sharded_checkpoint_equals_single_file(tmp_path):
    save("gemma3", tmp_path / "one")
    save("gemma3", tmp_path / "many", max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    steps: list[tuple[str, int, int]] = []
    many = build(
        tmp_path / "many",
        model=ModelConfig(),
        ops=REFERENCE,
        device=CPU,
        progress=lambda stage, done, total: steps.append((stage, done, total)),
    )
    assert torch.equal(run(load(tmp_path / "one")), run(many))
    assert [done for _, done, _ in steps] == sorted(done for _, done, _ in steps)
    assert steps[-1][0] == "weights" and steps[-1][1] == steps[-1][2]


def test_lost_shard_is_named(tmp_path):
    save("llama-gqa", tmp_path, max_shard_size="50KB")
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ConfigError, match=lost.name):
        load(tmp_path)


def test_cut_file_is_named(tmp_path):
    save("llama-gqa", tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match="model.safetensors is not a complete"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("there", "remedy"), [(True, "give this user the right to read it"), (False, "download it again")]
)
def test_a_file_that_may_not_be_read_is_named(
    there: bool, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors says FileNotFoundError of rights that are missing, too."""
    save("llama-gqa", tmp_path)

    def refuse(path: Path, **_: object) -> None:
        if not there:
            path.unlink(missing_ok=True)
        raise FileNotFoundError(f"No such file or directory: {path}")

    monkeypatch.setattr("ridgeline.models.weights.safe_open", refuse)
    for read in (load, Checkpoint, load_decoder) if there else (load,):
        with pytest.raises(ConfigError, match=rf"model.safetensors cannot be opened \(No such .*\): {remedy}"):
            read(tmp_path)


ODD = {
    "float32": (torch.nan, torch.inf, -torch.inf),
    "float16": (torch.nan, 1e5, -1e5),
    "bfloat16": (-torch.inf, 3.4e38),
}


@pytest.mark.parametrize("dtype", sorted(ODD))
def test_values_that_are_no_numbers_are_named(dtype: str, tmp_path: Path) -> None:
    """One in a norm, a bias, an embedding or a matrix, anywhere in it; the largest that the dtype holds is served."""
    save("qwen2", tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    for name in ("model.norm.weight", "model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.bias"):
        for value in ODD[dtype]:
            changed = {**whole, name: whole[name].clone()}
            changed[name].view(-1)[-1] = value
            save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
            with pytest.raises(UnsupportedModel, match=f"NaN, infinite or beyond {dtype} in {name}: download it again"):
                load(tmp_path, dtype=dtype)
    whole["model.norm.weight"].fill_(-torch.finfo(getattr(torch, dtype)).max)
    save_file(whole, tmp_path / "model.safetensors", {"format": "pt"})
    load(tmp_path, dtype=dtype)


def test_no_weights_and_other_formats(tmp_path):
    save("llama-gqa", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="load-format dummy"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="Convert pytorch_model.bin to safetensors first"):
        load(tmp_path)


def test_missing_and_unknown_tensors_are_named(tmp_path):
    save("llama-gqa", tmp_path)

    def change(tensors):
        tensors["model.layers.1.self_attn.k_proj.bias"] = torch.ones(32)
        del tensors["model.layers.0.mlp.up_proj.weight"]

    edit(tmp_path, change)
    with pytest.raises(
        UnsupportedModel, match="lacks the tensors layers.0.mlp.up_proj.weight.*layers.1.self_attn.k_proj.bias"
    ):
        load(tmp_path)


def test_wrong_shape_and_type_are_named(tmp_path):
    save("llama-gqa", tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(63)}))
    with pytest.raises(UnsupportedModel, match=r"model.norm.weight has shape \[63\].*\[64\]"):
        load(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}))
    with pytest.raises(UnsupportedModel, match="model.norm.weight has dtype torch.int8"):
        load(tmp_path)


def test_text_of_a_model_with_images(tmp_path):
    """Gemma 3 as published from 4B on: the text part is read, the tensors that see images are left alone."""
    theirs = save_with_images(tmp_path)
    tokens = list(range(3, 60))
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    ours = PagedRows(load(tmp_path)).step([(1, tokens)])
    assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert short_name("model.language_model.layers.0.x") == short_name("language_model.model.layers.0.x")


def test_tied_checkpoint_may_repeat_its_head(tmp_path):
    save("qwen2", tmp_path)
    expected = run(load(tmp_path))
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert torch.equal(run(load(tmp_path)), expected)


def test_bfloat16_is_near(tmp_path):
    theirs = save("llama-gqa", tmp_path, torch.bfloat16)
    tokens = list(range(3, 40))
    with torch.inference_mode():
        rounded = theirs(torch.tensor([tokens])).logits[0].float()
        exact = theirs.float()(torch.tensor([tokens])).logits[0]
    model = load(tmp_path)
    assert model.spec.dtype == "bfloat16"
    ours = PagedRows(model).step([(1, tokens)])
    # As far from the exact logits as transformers' own bfloat16 run, give or take.
    assert (ours - exact).abs().mean() <= 1.5 * (rounded - exact).abs().mean()


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3"])
def test_dummy_weights(name, tmp_path):
    save(name, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    first = run(load(tmp_path, load_format="dummy", seed=1))
    assert torch.equal(first, run(load(tmp_path, load_format="dummy", seed=1)))
    assert not torch.equal(first, run(load(tmp_path, load_format="dummy", seed=2)))
    assert 0.01 < first.std() < 10


def test_meta_device_holds_nothing(tmp_path):
    save("gemma2", tmp_path)
    model = load(tmp_path, torch.device("meta"))
    assert all(tensor.is_meta for tensor in model.decoder.tensors())
    assert model.spec.params == sum(tensor.numel() for tensor in model.decoder.tensors())


def test_options(tmp_path):
    save("llama-gqa", tmp_path)
    model = load(tmp_path, max_model_len=100, dtype="bfloat16")
    assert (model.spec.max_len, model.spec.dtype) == (100, "bfloat16")
    assert model.decoder.layers[0].attention.shape.cos_sin.shape[0] < 256
    save("mistral-window", tmp_path / "windows")
    assert load(tmp_path / "windows").spec.layers[0].window == 24
    assert load(tmp_path / "windows", max_model_len=24).spec.layers[0].window is None
    for options, said in (
        ({"max_model_len": 257}, "--max-model-len is 257: give 1 to 256"),
        ({"dtype": "int8"}, "dtype"),
        ({"load_format": "gguf"}, "--load-format 'gguf' is unknown"),
    ):
        with pytest.raises(ConfigError, match=said):
            load(tmp_path, **options)
