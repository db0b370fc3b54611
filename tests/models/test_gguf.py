"""GGUF files: equal logits for every type, equal tokens, and clear errors."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from ridgeline.cli.main import main
from ridgeline.cli.show import bytes_text
from ridgeline.core.config import ModelConfig
from ridgeline.core.errors import ConfigError, RidgelineError, UnsupportedModel
from ridgeline.gguf.file import TYPES, read_file
from ridgeline.gguf.folder import model_folder
from ridgeline.llm import LLM, SamplingParams
from ridgeline.models import build as builder
from ridgeline.models.build import build, load, served_spec
from ridgeline.models.config import read_model
from ridgeline.models.fingerprint import content_hash
from ridgeline.models.hub import resolve_model
from ridgeline.ops import native_cpu
from ridgeline.ops.native.arena import LANES
from ridgeline.ops.reference import REFERENCE
from ridgeline.parallel.mesh import Mesh
from ridgeline.quant.blocks import dequantize
from ridgeline.text.tokenizer import Tokenizer
from tests.models.gguf_files import BOS, END, TOKENS, TOOL, Options, Written, write
from tests.models.paged import PagedRows

CPU = torch.device("cpu")
TEXT = "hello world, don't 12 345  Ünï\n\n<tool> x"


def logits(folder: Path, **options: object) -> torch.Tensor:
    model = build(folder, model=ModelConfig(dtype="float32", **options), ops=REFERENCE, device=CPU)
    return PagedRows(model).step([(1, list(range(3, 25)))])


def folder_of(written: Written) -> Path:
    return resolve_model(ModelConfig(model=str(written.path)), cache=written.folder.parent / "cache")


@pytest.mark.parametrize(
    ("kind", "served"),
    [
        (Kind.F32, ("float32", "")),
        (Kind.F16, ("float16", "")),
        (Kind.BF16, ("bfloat16", "")),
        (Kind.Q8_0, ("bfloat16", "int8-g32")),
        (Kind.Q4_0, ("bfloat16", "int4-g32")),
        (Kind.Q4_1, ("bfloat16", "q4_1")),
        (Kind.Q5_0, ("bfloat16", "q5_0")),
        (Kind.Q5_1, ("bfloat16", "q5_1")),
        (Kind.Q4_K, ("bfloat16", "q4_k")),
        (Kind.Q5_K, ("bfloat16", "q5_k")),
        (Kind.Q6_K, ("bfloat16", "q6_k")),
    ],
)
def test_logits_equal_those_of_the_dequantized_weights(kind, served, tmp_path):
    """Blocks stay blocks: their scales and codes are those of the file."""
    head = kind if served[1] == "" else Kind.Q6_K
    written = write(tmp_path, Options(kind=kind, head=head))
    folder = folder_of(written)
    ours, theirs = logits(folder), logits(written.folder)
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))
    spec, _ = read_model(folder)
    assert (spec.dtype, spec.quantization) == served


@pytest.mark.parametrize(
    "options",
    [
        Options("qwen2", Kind.Q8_0, head=None),
        Options("qwen3", Kind.Q4_K),
        Options("llama", Kind.Q8_0, config={"attention_bias": True}),
        Options(
            "gemma3",
            Kind.Q8_0,
            head=None,
            config={
                "num_hidden_layers": 7,
                "sliding_window": 8,
                "query_pre_attn_scalar": 64,
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                    "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
                },
            },
            metadata={
                "gemma3.attention.key_length": 64,
                "gemma3.attention.sliding_window": 8,
                "gemma3.rope.freq_base": 1_000_000.0,
                "gemma3.rope.scaling.type": "linear",
                "gemma3.rope.scaling.factor": 8.0,
            },
        ),
    ],
)
def test_families(options, tmp_path):
    """Biases of queries and keys are permuted in a llama, and a tied head has no tensor."""
    if options.architecture == "qwen3":
        options.metadata = {"qwen3.attention.key_length": 64, "qwen3.attention.value_length": 64}
    written = write(tmp_path, options)
    ours, theirs = logits(folder_of(written)), logits(written.folder)
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


def layer_bytes(path: Path) -> int:
    """Bytes of the layers in a file."""
    file = read_file(path)
    return sum(tensor.size for name, tensor in file.tensors.items() if name.startswith("blk."))


def head_bytes(path: Path, name: str = "output.weight") -> tuple[int, int]:
    """Bytes of the head in a file, and of the rows that pad it to blocks of the compiled operations."""
    tensor = read_file(path).tensors[name]
    return tensor.size, tensor.size // len(TOKENS) * (-len(TOKENS) % LANES)


MIXTURES = {
    "as Q4_K_M": {"v_proj": Kind.Q6_K, "down_proj": Kind.Q6_K},
    "each another": {
        "q_proj": Kind.Q5_K,
        "k_proj": Kind.Q8_0,
        "v_proj": Kind.Q5_0,
        "gate_proj": Kind.Q4_0,
        "up_proj": Kind.Q5_1,
    },
    "some floats": {"o_proj": Kind.F32, "down_proj": Kind.Q4_1},
}


@pytest.mark.parametrize("kinds", MIXTURES.values(), ids=MIXTURES)
def test_files_with_several_types(kinds, tmp_path):
    """Logits of the reference and of compiled operations; the layers take the bytes that they have in the file."""
    written = write(tmp_path, Options(kind=Kind.Q4_K, head=Kind.Q6_K, kinds=kinds, config={"num_hidden_layers": 2}))
    folder = folder_of(written)
    ours, theirs = logits(folder), logits(written.folder)
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))
    spec, _ = read_model(folder)
    in_file = layer_bytes(written.path)
    assert spec.quantization == "q4_k" and abs(spec.layer_bytes / in_file - 1) < (
        0.02 if "o_proj" not in kinds else 0.7
    )
    native, detail = native_cpu.load()
    if native is None:
        pytest.skip(detail)
    model = build(folder, model=ModelConfig(dtype="float32"), ops=native, device=CPU)
    head, padding = head_bytes(written.path)
    assert sum(tensor.nbytes for tensor in model.decoder.head.tensors()) == head + padding
    assert model.spec.weight_bytes + padding == sum(tensor.nbytes for tensor in model.decoder.tensors())
    blocks = [part for layer in model.decoder.layers for part in (layer.attention, layer.feed_forward)]
    held = sum(tensor.nbytes for block in blocks for _, weight in block.linears() for tensor in weight.tensors())
    assert abs(held / in_file - 1) < 0.02
    assert torch.allclose(
        PagedRows(model).step([(1, list(range(3, 25)))]), theirs, rtol=0, atol=1e-3 * float(theirs.abs().max())
    )


@pytest.mark.parametrize("kinds", [{}, *MIXTURES.values()], ids=["Q4_K", *MIXTURES])
def test_a_gpu_converts_what_it_multiplies_slowly(kinds, tmp_path, monkeypatch):
    """The reference computes as a GPU's operations would: no linear is in blocks but those that are integers with scales."""
    written = write(tmp_path, Options(kind=Kind.Q4_K, head=Kind.Q6_K, kinds=kinds, config={"num_hidden_layers": 2}))
    folder = folder_of(written)
    monkeypatch.setattr(builder, "served_spec", lambda spec, model, kind: served_spec(spec, model, "cuda"))
    model = build(folder, model=ModelConfig(dtype="float32"), ops=REFERENCE, device=CPU)
    names = {name for layer in model.spec.layers for name in layer.formats} | {model.spec.quantization}
    assert names == {""} and not model.spec.head_format
    assert model.spec.weight_bytes == sum(tensor.nbytes for tensor in model.decoder.tensors())
    theirs = logits(written.folder)
    ours = PagedRows(model).step([(1, list(range(3, 25)))])
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))
    checkpoint = read_model(folder)[0]
    stays = served_spec(checkpoint, ModelConfig(), "hopper")
    assert stays.layers == checkpoint.layers and stays.head_format == checkpoint.head_format
    assert served_spec(checkpoint, ModelConfig(dtype="float32"), "hopper").weight_bytes == model.spec.weight_bytes


def test_one_float_makes_its_linear_float(tmp_path):
    """Queries, keys and values are one matrix, which is either in blocks or in the model's dtype."""
    written = write(tmp_path, Options(kind=Kind.Q8_0, kinds={"v_proj": Kind.F16}))
    folder = folder_of(written)
    ours, theirs = logits(folder), logits(written.folder)
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))
    assert read_model(folder)[0].layers[0].formats == ("", "", "", *["int8-g32"] * 4)


def test_a_head_in_blocks_beside_layers_in_floats(tmp_path):
    written = write(tmp_path, Options(kind=Kind.F16, head=Kind.Q6_K))
    folder = folder_of(written)
    ours, theirs = logits(folder), logits(written.folder)
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))
    spec = read_model(folder)[0]
    assert (spec.quantization, spec.head_format, set(spec.layers[0].formats)) == ("q6_k", "q6_k", {""})


def test_a_tied_head_stays_in_blocks(tmp_path, monkeypatch):
    """It takes the bytes of the file's embedding. A GPU that does not keep these blocks uses the embedding's memory."""
    written = write(tmp_path, Options(kind=Kind.Q8_0, head=None, kinds={"embed_tokens": Kind.Q6_K}))
    folder = folder_of(written)
    theirs = logits(written.folder)
    assert torch.allclose(logits(folder), theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))
    native, options = native_cpu.load()[0], {"model": ModelConfig(dtype="float32"), "device": CPU}
    model = build(folder, ops=native or REFERENCE, **options)
    size, rows = head_bytes(written.path, "token_embd.weight")
    padding = rows if native else 0
    assert model.spec.tied and model.spec.head_format == "q6_k" and model.spec.head_bytes == size
    assert sum(tensor.nbytes for tensor in model.decoder.head.tensors()) == size + padding
    assert model.spec.weight_bytes + padding == sum(tensor.nbytes for tensor in model.decoder.tensors())
    monkeypatch.setattr(builder, "served_spec", lambda spec, model, kind: served_spec(spec, model, "cuda"))
    converted = build(folder, ops=REFERENCE, **options)
    assert converted.spec.shares_embedding and not converted.spec.head_format
    assert converted.spec.weight_bytes == sum(tensor.nbytes for tensor in converted.decoder.tensors())
    ours = PagedRows(converted).step([(1, list(range(3, 25)))])
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


def test_ranks_share_a_head_in_blocks(tmp_path):
    """270 tokens over four ranks: the last one has two rows of zeros."""
    folder = folder_of(write(tmp_path, Options(kind=Kind.Q8_0, head=Kind.Q6_K)))
    options = {"model": ModelConfig(dtype="float32"), "ops": REFERENCE, "device": CPU}
    x, size = torch.randn(3, 256), len(TOKENS)
    parts = [load(folder, mesh=Mesh(rank, 4), **options).decoder.head.apply(x) for rank in range(4)]
    together = torch.cat(parts, 1)
    torch.testing.assert_close(together[:, :size], load(folder, **options).decoder.head.apply(x))
    assert together.shape == (3, 272) and not together[:, size:].any()


def test_blocks_are_not_quantized_again(tmp_path):
    for kind in (Kind.Q8_0, Kind.Q6_K):
        with pytest.raises(ConfigError, match="already quantized"):
            logits(folder_of(write(tmp_path / kind.name, Options(kind=kind))), quantization="int4")


def test_scales_that_are_no_numbers_are_refused(tmp_path):
    written = write(tmp_path, Options(kind=Kind.Q4_K))
    stored = read_file(written.path).tensors["blk.0.ffn_down.weight"]
    content = bytearray(written.path.read_bytes())
    content[stored.start : stored.start + 2] = b"\x00\x7e"
    written.path.write_bytes(content)
    with pytest.raises(UnsupportedModel, match="down_proj.weight has scales that are NaN or infinite"):
        logits(folder_of(written))


@pytest.mark.parametrize("kind", [kind for kind in TYPES.values() if kind.elements > 1], ids=lambda kind: kind.name)
def test_blocks_equal_llama_cpp(kind):
    """Random bytes, so that every code, scale and minimum occurs."""
    name = kind.name
    blocks = np.random.default_rng(0).integers(0, 256, (500, kind.size), dtype=np.uint8)
    with np.errstate(all="ignore"):  # some scales are NaN or infinite
        theirs = gguf.quants.dequantize(blocks, Kind[name])
    ours = dequantize(name, torch.from_numpy(blocks)).numpy()
    assert ours.shape == (500, kind.elements) and np.array_equal(ours, theirs, equal_nan=True)


def test_byte_level_tokenizer(tmp_path):
    tokenizer = Tokenizer.load(folder_of(write(tmp_path, Options())))
    ids = tokenizer.encode(TEXT, add_special_tokens=True)
    assert tokenizer.decode(ids, skip_special_tokens=True) == TEXT
    assert {TOKENS.index("hello"), TOKENS.index("Ġworld"), TOOL} <= set(ids) and ids[0] != BOS
    assert TOKENS.index("12") not in ids  # Qwen's pre-tokenizer separates digits
    assert (tokenizer.bos_id, tokenizer.eos_id) == (BOS, END)
    assert tokenizer.special_ids == {BOS, END} and tokenizer.markup_ids == {TOOL}
    assert "bos_token" in tokenizer.templates["default"]


@pytest.mark.parametrize(("pre", "first", "joined"), [("llama-bpe", BOS, True), ("smollm", None, False)])
def test_pre_tokenizers(pre, first, joined, tmp_path):
    """Llama 3 begins with its BOS token and joins up to three digits."""
    tokenizer = Tokenizer.load(folder_of(write(tmp_path, Options(metadata={"tokenizer.ggml.pre": pre}))))
    ids = tokenizer.encode("12 hello", add_special_tokens=True)
    assert (ids[0] == BOS) == (first == BOS) and (TOKENS.index("12") in ids) == joined
    assert tokenizer.decode(ids, skip_special_tokens=True) == "12 hello"


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
PIECES += [*"▁helowrd", "he", "ll", "hell", "hello", "▁hello", "▁w", "or", "▁wor", "▁world", "ld"]


def scored() -> dict[str, object]:
    kinds = [2, 3, 3, *[6] * 256]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.tokens": PIECES,
        "tokenizer.ggml.scores": [-float(index) for index in range(len(PIECES))],
        "tokenizer.ggml.token_type": kinds + [1] * (len(PIECES) - len(kinds)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def test_scored_tokenizer(tmp_path):
    tokenizer = Tokenizer.load(folder_of(write(tmp_path, Options(metadata=scored()))))
    ids = tokenizer.encode("hello world é", add_special_tokens=True)
    pieces = [PIECES[index] for index in ids]
    assert pieces[0] == "<s>" and pieces[-3:] == ["▁", "<0xC3>", "<0xA9>"]
    # Pieces of higher scores are joined first: "or" before "▁wor" cannot be, its score is lower than that of "▁w".
    assert pieces[1:-3] == ["▁hello", "▁world"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello world é"


def test_scored_tokenizer_without_a_space_before_the_text(tmp_path):
    """As Gemma's."""
    metadata = {**scored(), "tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    tokenizer = Tokenizer.load(folder_of(write(tmp_path, Options(metadata=metadata))))
    ids = tokenizer.encode("hello world", add_special_tokens=True)
    assert [PIECES[index] for index in ids] == ["hello", "▁world"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello world"


def test_frequencies_of_llama_3(tmp_path):
    """The file has factors; config.json gets the parameters from which Llama 3.1 computes them."""
    config = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0}
    config |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS as FREQUENCIES

    scaled, _ = FREQUENCIES["llama3"](LlamaConfig(head_dim=64, rope_parameters=config), CPU)
    factors = (10_000.0 ** -(torch.arange(32) / 32) / scaled).numpy()
    folder = folder_of(write(tmp_path, Options(tensors={"rope_freqs.weight": factors})))
    written = json.loads((folder / "config.json").read_text())["rope_scaling"]
    assert written == {key: value for key, value in config.items() if key != "rope_theta"}
    assert logits(folder).isfinite().all()
    with pytest.raises(UnsupportedModel, match="not those of a Llama 3"):
        folder_of(write(tmp_path / "odd", Options(tensors={"rope_freqs.weight": factors * 1.5})))


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"general.architecture": "mamba"}, "'mamba' is not read: supported are llama, qwen2, qwen3, gemma3"),
        ({"split.count": 3}, "llama-gguf-split --merge"),
        ({"llama.expert_count": 8}, "experts"),
        ({"llama.attention.sliding_window": 8}, "llama.attention.sliding_window is not supported"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.dimension_count": 32}, "not the size of a head, 64"),
        ({"tokenizer.ggml.model": "t5"}, "'t5' is not read"),
        ({"tokenizer.ggml.pre": "viking"}, "'viking' is not read"),
        ({"tokenizer.ggml.merges": ["a b"]}, "'a b', which is not a pair of tokens"),
        ({"tokenizer.ggml.eos_token_id": 999}, "eos_token_id is 999"),
        ({"llama.block_count": None}, "lacks the metadata llama.block_count"),
    ],
)
def test_refused_metadata(metadata, said, tmp_path):
    written = write(tmp_path, Options(metadata=metadata))
    with pytest.raises((UnsupportedModel, ConfigError), match=said):
        folder_of(written)


def test_refused_types(tmp_path):
    written = write(tmp_path, Options(tensors={"blk.0.extra.weight": np.zeros(256, np.int8)}))
    with pytest.raises(UnsupportedModel, match="blk.0.extra.weight has type I8, which is not read"):
        folder_of(written)
    unknown = write(tmp_path / "b", Options(tensors={"blk.0.extra.weight": np.ones(256, np.float32)}))
    with pytest.raises(UnsupportedModel, match="unknown tensors blk.0.extra.weight"):
        logits(folder_of(unknown))


def test_damaged_files(tmp_path):
    """A file that ends early, anywhere, and one that is something else."""
    written = write(tmp_path, Options(kind=Kind.Q4_0))
    content = written.path.read_bytes()
    for size in (4, 9, 100, 3000, len(content) // 2, len(content) - 64):
        written.path.write_bytes(content[:size])
        with pytest.raises(ConfigError, match="not a complete GGUF file"):
            folder_of(written)
    written.path.write_bytes(b"GGML" + content[4:])
    with pytest.raises(ConfigError, match="is not a GGUF file"):
        folder_of(written)
    written.path.write_bytes(content[:4] + (1).to_bytes(4, "little") + content[8:])
    with pytest.raises(UnsupportedModel, match="version 1 of GGUF"):
        folder_of(written)


def test_changed_bytes_of_the_header(tmp_path):
    """Whatever the header says, a file is read or refused with a message."""
    written = write(tmp_path, Options())
    content, draw = written.path.read_bytes(), Random(5)
    refused = 0
    for _ in range(40):
        changed = bytearray(content)
        for _ in range(3):
            changed[draw.randrange(8, 900)] = draw.choice((0, 1, 255))
        written.path.write_bytes(changed)
        try:
            read_model(folder_of(written))
        except RidgelineError:
            refused += 1
    assert 20 < refused <= 40


def test_folder_follows_the_file(tmp_path):
    """The same file has the same folder; another content at the same path has another one, and another hash."""
    written = write(tmp_path, Options())
    first = folder_of(written)
    assert first == folder_of(written)
    before = content_hash(first)
    content = bytearray(written.path.read_bytes())
    content[-1] ^= 1
    written.path.write_bytes(content)
    second = folder_of(written)
    assert second != first and content_hash(second) != before
    with pytest.raises(ConfigError, match="give the file, for example .*tiny.gguf"):
        resolve_model(ModelConfig(model=str(tmp_path)))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME"):
        model_folder(written.path, tmp_path / "file")


def test_fit_names_the_types(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options = Options(kind=Kind.Q4_K, kinds={"v_proj": Kind.Q6_K, "o_proj": Kind.Q6_K})
    for kind, formats in ((Kind.Q6_K, "q4_k, q6_k, embedding and head in"), (Kind.F16, "q4_k, the rest in")):
        options.kinds["o_proj"] = options.kinds["v_proj"] = kind
        written = write(tmp_path, options)
        assert main(("fit", str(written.path), "--device", "cpu")) == 0
        out = " ".join(capsys.readouterr().out.split())
        size = read_model(folder_of(written))[0].weight_bytes
        assert f"weights {bytes_text(size)} in {formats} bfloat16" in out


@pytest.mark.parametrize(
    ("kind", "kinds"),
    [
        (Kind.Q8_0, {}),
        (Kind.Q4_K, MIXTURES["as Q4_K_M"]),
        *(pytest.param(kind, {}, marks=pytest.mark.long) for kind in (Kind.Q4_K, Kind.Q6_K)),
    ],
)
def test_end_to_end(kind, kinds, tmp_path):
    """An engine serves the file: greedy tokens are those of the dequantized weights with the reference operations."""
    written = write(tmp_path, Options(kind=kind, head=Kind.Q6_K, kinds=kinds))
    folder = folder_of(written)
    model = LLM(folder, dtype="float32", max_model_len=64)
    try:
        answer = model.generate(["hello world"], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))[0]
    finally:
        model.close()
    expected = []
    for _ in range(4):
        served = build(written.folder, model=ModelConfig(dtype="float32"), ops=REFERENCE, device=CPU)
        expected.append(int(PagedRows(served).step([(1, [*answer.prompt_ids, *expected])])[-1].argmax()))
    assert answer.choices[0].token_ids == expected and answer.choices[0].finish == "length"
