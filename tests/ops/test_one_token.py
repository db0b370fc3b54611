"""All layers of one token in one kernel: which it takes, that it compiles, and its results where there is a Hopper GPU.

Gluon has no interpreter: without such a GPU, only the choice, the room in shared memory and that it compiles can be tested.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ridgeline.ops.reference import REFERENCE
from ridgeline.ops.table import Fp8Matrix, IntMatrix, LayerParts, Matrix, QkvShape

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from ridgeline.ops.triton import layers as kernels
from ridgeline.ops.triton import layers_forms as forms
from ridgeline.ops.triton import layers_integers as integers
from ridgeline.ops.triton import layers_keys as keys
from ridgeline.ops.triton import layers_launch, one_token
from ridgeline.ops.triton import layers_table as tables
from ridgeline.ops.triton.activation import KINDS
from ridgeline.ops.triton.integer import pack
from ridgeline.ops.triton.integer_matrix import dequantize
from ridgeline.ops.triton.tuning import GLUON_VERSIONS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
E4M3 = torch.float8_e4m3fn


def layer(model: int, heads: int, features: int, form: str) -> LayerParts:
    """A layer whose weights have no memory behind them."""

    def matrix(rows: int, k: int) -> Matrix:
        packed = torch.empty(rows, k, dtype=E4M3 if form == "fp8" else torch.bfloat16, device="meta")
        if form == "fp8":
            return Matrix(Fp8Matrix(packed, torch.empty(rows), torch.empty(0)), None)
        if form.startswith("int"):
            bits, group = int(form[3]), k if form.endswith("rows") else 128
            codes = torch.empty(rows, -(-k // 32) * 4 * bits, dtype=torch.uint8, device="meta")
            scales = torch.empty(rows, -(-k // group), dtype=torch.float16, device="meta")
            zeros = scales if form.endswith("zeros") else None
            return Matrix(IntMatrix(codes, scales, zeros, bits, group, rows, k), None)
        return Matrix(packed, None)

    norm = torch.empty(model, dtype=torch.bfloat16)
    shape = QkvShape(max(8, heads // 128), 8, 128, torch.empty(0, 2, 64), None, None, 1e-5, False)
    qkv = matrix(heads + 2048, model)
    return LayerParts(
        norm, qkv, shape, matrix(model, heads), norm, matrix(2 * features, model), matrix(model, features), "silu"
    )


@pytest.mark.parametrize(
    ("sizes", "form", "taken"),
    [
        ((4096, 4096, 14336), "bf16", True),
        ((2048, 2048, 6144), "bf16", True),
        ((1280, 1536, 4096), "bf16", False),
        ((1024, 2048, 3072), "bf16", False),
        ((4096, 4096, 14336), "fp8", True),
        ((4096, 4096, 14336), "int4", True),
        ((4096, 4096, 14336), "int8 rows", True),
        ((4096, 4096, 14336), "int4 zeros", False),
        ((4096, 4096, 14464), "int8", True),
        ((2560, 4096, 9728), "int4", True),
        ((4096, 4096, 14400), "int4", False),
        ((8192, 8192, 28672), "int4", True),
        ((1024, 2048, 3072), "int8", True),
        ((256, 256, 1024), "int8", False),
        ((1024, 2048, 3072), "fp8", False),
        ((2048, 2048, 6144), "fp8", True),
        ((8192, 8192, 28672), "fp8", True),
        ((8192, 8192, 262144), "fp8", False),
        ((4112, 4096, 14336), "fp8", False),
    ],
)
def test_which_layers_are_taken(sizes: tuple[int, int, int], form: str, taken: bool) -> None:
    """Large ones in 8 bits or fewer, all alike, whose rows the copy engine can address and whose inputs leave room for a ring."""
    parts = layer(*sizes, form)
    assert one_token.knows([parts, parts]) is taken
    assert not one_token.knows([parts, layer(4096, 4096, 14336, "fp8" if form == "bf16" else "bf16")])


def test_which_shares_of_ranks_are_taken() -> None:
    """Floats whose stream fits into the memory for sums."""
    for form, model, taken in (
        ("bf16", 4096, True),
        ("fp8", 4096, True),
        ("int4", 4096, False),
        ("bf16", 16512, False),
    ):
        parts = replace(layer(model, 2048, 7168, form), peers=lambda: None)
        assert one_token.knows([parts, parts]) is taken
        assert one_token.knows([replace(parts, peers=None)] * 2) or taken


def test_post_norms_are_taken_with_floats_on_one_rank() -> None:
    norm = torch.empty(4096, dtype=torch.bfloat16)
    for form, taken in (("bf16", True), ("fp8", True), ("int4", False)):
        parts = layer(4096, 4096, 14336, form)
        post = replace(parts, attention_post_norm=norm, feed_forward_post_norm=norm)
        assert one_token.knows([post, post]) is taken and one_token.knows([parts, parts])
        assert not one_token.knows([replace(post, peers=lambda: None)] * 2)
        assert not one_token.knows([parts, post])


def test_vectors_at_odd_places_are_not_taken() -> None:
    parts = layer(4096, 4096, 14336, "fp8")
    memory = torch.empty(4104, dtype=torch.bfloat16)
    odd = memory[(-memory.data_ptr() % 16) // 2 + 1 :][:4096]
    assert one_token.knows([parts, parts]) and not one_token.knows([parts, replace(parts, feed_forward_norm=odd)])


@pytest.mark.parametrize("sizes", [(64, 64, 1536), (4096, 4096, 14336), (8192, 8192, 28672)])
@pytest.mark.parametrize("form", ["bf16", "fp8", "int4", "int8 rows"])
def test_inputs_and_ring_fit(sizes: tuple[int, int, int], form: str) -> None:
    """And what warps exchange of attention: twice 16 heads, then 64 values of each warp for the heads of a group."""
    parts = layer(*sizes, form)
    of = one_token._layer(parts)
    held, digits = tables.input_lines(of), 2 if form.startswith("int") else 1
    for lines, (_, k) in zip(held, ((0, sizes[1]), (0, sizes[0]), (0, sizes[2])), strict=False):
        assert lines * 128 >= k * (2 if form == "bf16" else 1) and lines & (lines - 1) == 0
    group, dim = max(1, parts.shape.n_heads // parts.shape.n_kv_heads), parts.shape.head_dim
    assert held[3] * 128 * digits >= max(2 * 16 * dim * 2, 4 * 8 * 64 * group)
    stages = forms.stages_of(of)
    assert max(held) * 128 * digits + stages * tables.STAGE <= tables.MEMORY


def test_one_descriptor_for_matrices_anywhere() -> None:
    """Matrices alike lie at places of one grid, whatever lies between them."""
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 16 :]
    cut = [memory[start : start + 64 * 256].view(64, 256) for start in (48_000, 16_000, 400_000)]
    where = tables.places(cut)
    assert where.lowest is cut[1] and [place * where.step for place in where.places] == [32_000, 0, 384_000]
    assert tables.reachable(cut)
    assert not tables.reachable([cut[0], memory[8 : 8 + 64 * 256].view(64, 256)])
    alone = tables.places(cut[:1])
    assert alone.places == (0,) and alone.step > 0


def test_which_caches_the_copy_engine_brings() -> None:
    """Pages of a power of two slots, heads one behind the other, in 16 bytes; of several layers, at places of one grid."""
    memory = torch.zeros(1 << 18, dtype=torch.bfloat16)
    memory = memory[-memory.data_ptr() % 16 // 2 :]

    def cache(first: int, tokens: int, dim: int, apart: int | None = None) -> torch.Tensor:
        size = 2 * 2 * tokens * dim
        shape = (3, 2, 2, tokens, dim)
        return memory.as_strided(shape, (apart or size, size // 2, tokens * dim, dim, 1), first)

    two = [cache(8192, 16, 64, 3 * 4096), cache(0, 16, 64, 3 * 4096)]
    assert keys.streamable(two) and keys.streamable([cache(0, 64, 128)])
    blocks, where = keys.key_blocks(two)
    assert where == (1, 0) and blocks.base is two[1]
    assert list(blocks.strides) == [8192, 12288, 1024, 64, 1] and blocks.block_shape == [1, 1, 1, 16, 64]
    assert not keys.streamable([cache(0, 48, 64)]) and not keys.streamable([cache(0, 4, 64)])
    assert not keys.streamable([cache(0, 16, 64, 4100)]) and not keys.streamable([cache(4, 16, 64)])
    assert not keys.streamable([cache(0, 16, 64).transpose(2, 3)])


def described(number: str, blocks: Any) -> str:
    """A descriptor's type in a kernel's signature."""
    return f"tensordesc<{number}[{','.join(map(str, blocks.block_shape))}],{blocks.layout!r}>"


def unexpected(*_: object) -> torch.Tensor:
    """In the place of the layers one after the other, which nothing here needs."""
    raise AssertionError("the kernel took nothing")


def compile_for_hopper(
    fp8: bool,
    activation: str,
    heads: tuple[int, int, int],
    form: tuple[int, bool] = (0, False),
    page_tokens: int = 16,
    ranks: int = 1,
) -> int:
    """Compile the kernel as it would be launched, no GPU asked -> bytes of shared memory."""
    kernel, (bits, grouped) = kernels.layers_kernel, form
    parts = layer(4096, 4096, 14336, f"int{bits}{'' if grouped else ' rows'}" if bits else "fp8" if fp8 else "bf16")
    shape = replace(parts.shape, n_heads=heads[0], n_kv_heads=heads[1], head_dim=heads[2])
    of = one_token._layer(replace(parts, shape=shape))
    rows = (16, 16, 16, 16) if bits else (16, 8, 8, 4)
    numbers = {"part_ptr": "*fp32", "part_sums_ptr": "*fp32", "eps": "fp32", "scale": "fp32"}
    numbers |= dict.fromkeys(("table_ptr", "slot_ptr", "counter_ptr", "draws_ptr"), "*i64")
    numbers |= dict.fromkeys(("rows_ptr", "length_ptr", "position_ptr", "arrivals_ptr", "sums_ptr"), "*i32")
    numbers["peers_ptr"] = "*i64"
    types: dict[str, Any] = {name: "*bf16" if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
    types |= numbers | {"page_stride": "i64", "kind_stride": "i64"}
    constants: dict[str, Any] = {
        "LINES": tables.input_lines(of),
        "ROWS": rows,
        "STAGES": forms.stages_of(of),
        "GROUPS": integers.groups_of(of, 132),
        "KIND": KINDS[activation],
        "FORM": form,
    }
    memory = torch.zeros(16, 256, dtype=torch.int8 if bits else E4M3 if fp8 else torch.bfloat16)
    number = "i8" if bits else "fp8e4nv" if fp8 else "bf16"
    scales = tables.places([memory.view(torch.float16)]) if grouped else None
    for name, row in zip(("qkv", "out", "gate_up", "down"), rows, strict=True):
        where = tables.places([memory])
        types[f"{name}_desc"] = described(number, integers.code_blocks(where) if bits else tables.blocks(where, row))
        if scales is None:
            constants[f"{name}_scale_desc"] = None
        else:
            types[f"{name}_scale_desc"] = described("fp16", integers.scale_blocks(scales, bits))
    caches = [torch.zeros(2, 2, heads[1], page_tokens, heads[2], dtype=torch.bfloat16) for _ in range(2)]
    types["kv_desc"] = described("bf16", keys.key_blocks(caches)[0])
    constants |= {"OFFSET": True, "BIASES": 9, "PDL": True, "NORMS": 3 if fp8 else 0}
    constants |= {"SIZE": ranks} | ({"peers_ptr": None, "sums_ptr": None} if ranks == 1 else {})
    post = activation == "gelu_tanh"
    constants |= {"POST": post} | ({} if post else {"middle_ptr": None, "term_ptr": None})
    constants["SHAPE"] = (*heads, heads[2] // 2, page_tokens)
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    fixed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, signature, fixed, {})
    options = {"num_warps": 8, "maxnreg": layers_launch.REGISTERS}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return int(made.metadata.shared)


@pytest.mark.skipif(
    not triton.__version__.startswith(GLUON_VERSIONS),
    reason="Gluon kernels run with the versions of Triton in GLUON_VERSIONS",
)
@pytest.mark.parametrize(
    ("fp8", "activation", "heads", "form", "ranks"),
    [
        (True, "silu", (28, 4, 128), (0, False), 2),
        (False, "silu", (32, 8, 128), (4, True), 1),
        pytest.param(False, "gelu_tanh", (8, 4, 256), (0, False), 1, marks=pytest.mark.long),
        pytest.param(False, "silu", (14, 2, 64), (8, False), 1, marks=pytest.mark.long),
    ],
)
def test_the_kernel_compiles(
    apart: Callable[..., Any],
    fp8: bool,
    activation: str,
    heads: tuple[int, int, int],
    form: tuple[int, bool],
    ranks: int,
) -> None:
    assert apart(compile_for_hopper, fp8, activation, heads, form, 16, ranks) <= 227 << 10


# heads, KV heads, their size, what of it turns, model, features, whether with norms of heads and biases.
SIZES = (
    (32, 8, 128, 128, 4096, 14336, False),
    (16, 8, 128, 128, 1024, 3072, True),
    (14, 2, 64, 64, 896, 4864, False),
    (8, 1, 256, 128, 640, 1536, False),
    (10, 2, 64, 32, 640, 1152, True),
)


def off(out: torch.Tensor, want: torch.Tensor) -> float:
    return float((out.double() - want).norm() / want.norm())


# --- on a card --------------------------------------------------------------------------------------------------------


def rounded(x: torch.Tensor, fp8: bool) -> torch.Tensor:
    """An input as a product takes it, in float64."""
    x = x.to(torch.bfloat16).double()
    if not fp8:
        return x
    scale = x.abs().max().float() / 448
    return (x.float() / scale).to(E4M3).double() * scale.double()


def normed(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean() + 1e-6) * gain.double()


def random_layer(model: int, features: int, shape: QkvShape, form: str, bias: bool, post: bool = False) -> LayerParts:
    def matrix(rows: int, k: int) -> Matrix:
        drawn = torch.randn(rows, k, device=DEVICE) / k**0.5
        added = torch.randn(rows, device=DEVICE).to(torch.bfloat16) if bias else None
        if form == "bf16":
            return Matrix(drawn.to(torch.bfloat16), added)
        if form.startswith("int"):
            bits, group = int(form[3]), k if form.endswith("rows") else 128
            # Weights whose mean is not zero would make all of the stream one direction, which three layers blow up.
            codes = torch.randint(1, 1 << bits, (rows, k), dtype=torch.uint8, device=DEVICE)
            scales = (torch.rand(rows, k // group, device=DEVICE) + 0.5) * 4 / (1 << bits) / k**0.5
            return Matrix(pack(codes, scales, None, bits, group), added)
        scales = drawn.abs().amax(1) / 448
        return Matrix(Fp8Matrix((drawn / scales[:, None]).to(E4M3), scales, torch.empty(0)), added)

    norms = [(torch.rand(model, device=DEVICE) + 0.5).to(torch.bfloat16) for _ in range(4)]
    heads, rows = shape.n_heads * shape.head_dim, (shape.n_heads + 2 * shape.n_kv_heads) * shape.head_dim
    qkv, out = matrix(rows, model), matrix(model, heads)
    gate_up, down = matrix(2 * features, model), matrix(model, features)
    return LayerParts(norms[0], qkv, shape, out, norms[1], gate_up, down, "silu", None, *(norms[2:] if post else ()))


def times(matrix: Matrix, x: torch.Tensor) -> torch.Tensor:
    """matrix x in float64, with what is rounded on the way."""
    packed = matrix.packed
    if isinstance(packed, IntMatrix):
        out = dequantize(packed, torch.float32).double() @ rounded(x, fp8=False)
    elif isinstance(packed, Fp8Matrix):
        out = (packed.values.double() * packed.scales[:, None].double()) @ rounded(x, fp8=True)
    else:
        out = packed.double() @ rounded(x, fp8=False)
    return out if matrix.bias is None else out + matrix.bias.double()


def added(stream: torch.Tensor, term: torch.Tensor, post_norm: torch.Tensor | None) -> torch.Tensor:
    """The stream with a term, behind a norm if there is one, rounded as it is stored."""
    term = term if post_norm is None else normed(term.to(torch.bfloat16).double(), post_norm).to(torch.bfloat16)
    return (stream + term).to(torch.bfloat16).double()


def one_after_the_other(layers: list[LayerParts], x: torch.Tensor, views: list[Any], step: Any) -> torch.Tensor:
    """stream [model] in float64; attention by the reference."""
    for parts, view in zip(layers, views, strict=True):
        qkv = times(parts.qkv, normed(x, parts.attention_norm)).to(torch.bfloat16)[None]
        attended, _ = REFERENCE.attention.attend(
            *REFERENCE.attention.qkv_write(qkv, parts.shape, view, step), view, step
        )
        x = added(x, times(parts.out, attended.flatten()), parts.attention_post_norm)
        gate, up = times(parts.gate_up, normed(x, parts.feed_forward_norm)).chunk(2)
        x = added(x, times(parts.down, torch.nn.functional.silu(gate) * up), parts.feed_forward_post_norm)
    return x


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize(
    ("form", "heads", "kv_heads", "dim", "rope", "model", "features", "norms"),
    [
        *((form, *sizes) for form in ("bf16", "fp8") for sizes in SIZES),
        ("bf16", 32, 8, 64, 64, 2048, 8192, False),
        *((form, *SIZES[0]) for form in ("int4", "int8 rows")),
        *((form, *SIZES[1]) for form in ("int4", "int4 rows", "int8", "int8 rows")),
        ("int8 rows", *SIZES[2]),
        ("int4", 32, 8, 128, 128, 2560, 9728, True),
    ],
)
@pytest.mark.parametrize(
    ("length", "window"), [(1, None), (2, None), (150, None), (190, 33), (600, None), (5000, None), (5000, 1000)]
)
def test_layers_of_one_token(
    heads: int,
    kv_heads: int,
    dim: int,
    rope: int,
    model: int,
    features: int,
    norms: bool,
    form: str,
    length: int,
    window: int | None,
    batch: Callable[..., Any],
    qkv_shape: Callable[..., Any],
) -> None:
    """As the operations one after the other; the caches too; thrice the same."""
    torch.manual_seed(0)
    case = batch([(length, 1)], heads=heads, kv_heads=kv_heads, head_dim=dim, junk=1.0, window=window)
    case = case.to(DEVICE, torch.bfloat16)
    shape = qkv_shape(heads, kv_heads, dim, rope, norms, DEVICE)
    if norms:
        shape = replace(shape, q_norm=shape.q_norm.to(torch.bfloat16), k_norm=shape.k_norm.to(torch.bfloat16))
    # Rotary tables of tests are short.
    shape = replace(shape, norm_offset=False, cos_sin=shape.cos_sin.repeat(26, 1, 1))
    layers = [random_layer(model, features, shape, form, bias=norms) for _ in range(3)]
    views, twins = ([replace(case.view, kv=case.view.kv.clone()) for _ in layers] for _ in range(2))
    stream = torch.randn(1, model, device=DEVICE).to(torch.bfloat16)
    want = one_after_the_other(layers, stream[0].double(), twins, case.step)
    run, result = one_token.OneToken(layers, unexpected), []
    for _ in range(3):
        got = run(stream.clone(), views, case.step)
        assert off(got[0], want) < (6e-2 if form == "fp8" else 1e-2)
        result.append(got)
    for view, twin in zip(views, twins, strict=True):
        assert off(view.kv, twin.kv.double()) < (6e-2 if form == "fp8" else 1e-2)
    assert all(torch.equal(result[0], item) for item in result[1:])


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("form", ["bf16", "fp8"])
@pytest.mark.parametrize(("length", "window"), [(1, None), (190, 33), (1300, None)])
@pytest.mark.parametrize("count", [1, 3])
def test_layers_with_post_norms(
    form: str, length: int, window: int | None, count: int, batch: Callable[..., Any], qkv_shape: Callable[..., Any]
) -> None:
    """As the operations one after the other, and a hundred times the same: the stream alternates between two vectors. Norms make
    each term as large as the stream, so rounding to e4m3 counts more than without."""
    torch.manual_seed(0)
    case = batch([(length, 1)], heads=8, kv_heads=4, head_dim=256, junk=1.0, window=window).to(DEVICE, torch.bfloat16)
    shape = qkv_shape(8, 4, 256, 256, True, DEVICE)
    shape = replace(shape, q_norm=shape.q_norm.to(torch.bfloat16), k_norm=shape.k_norm.to(torch.bfloat16))
    shape = replace(shape, norm_offset=False, cos_sin=shape.cos_sin.repeat(26, 1, 1))
    layers = [random_layer(2560, 10240, shape, form, bias=False, post=True) for _ in range(count)]
    views, twins = ([replace(case.view, kv=case.view.kv.clone()) for _ in layers] for _ in range(2))
    stream = torch.randn(1, 2560, device=DEVICE).to(torch.bfloat16)
    want = one_after_the_other(layers, stream[0].double(), twins, case.step)
    run = one_token.OneToken(layers, unexpected)
    joined = torch.cat([run(stream.clone(), views, case.step) for _ in range(100)])
    assert off(joined[0], want) < (1e-1 if form == "fp8" else 1e-2)
    assert (joined == joined[0]).all()


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("form", ["bf16", "fp8", "int4", "int8 rows"])
@pytest.mark.parametrize("length", [1, 190, 1300])
def test_every_launch_gives_the_same(
    form: str, length: int, batch: Callable[..., Any], qkv_shape: Callable[..., Any]
) -> None:
    """Of so small layers that the ring holds more than one: memory of barriers that was used again once made one of a hundred
    launches differ."""
    heads, kv_heads, dim, rope, model, features, _norms = SIZES[1]
    case = batch([(length, 1)], heads=heads, kv_heads=kv_heads, head_dim=dim, junk=1.0).to(DEVICE, torch.bfloat16)
    shape = qkv_shape(heads, kv_heads, dim, rope, False, DEVICE)
    shape = replace(shape, norm_offset=False, cos_sin=shape.cos_sin.repeat(26, 1, 1))
    layers = [random_layer(model, features, shape, form, bias=False) for _ in range(3)]
    views = [replace(case.view, kv=case.view.kv.clone()) for _ in layers]
    run, stream = one_token.OneToken(layers, unexpected), torch.randn(1, model, device=DEVICE)
    joined = torch.cat([run(stream.to(torch.bfloat16), views, case.step) for _ in range(1000)])
    assert (joined == joined[0]).all()


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_what_goes_the_other_way(form: str, batch: Callable[..., Any], qkv_shape: Callable[..., Any]) -> None:
    """More tokens than one, and attention and caches that the kernel does not know."""
    case = batch([(150, 1)], heads=8, kv_heads=2, head_dim=64).to(DEVICE, torch.bfloat16)
    layers = [random_layer(512, 768, qkv_shape(8, 2, 64, 64, False, DEVICE), form, False) for _ in range(2)]
    otherwise, stream = torch.zeros(2, 3), torch.randn(1, 512, device=DEVICE).to(torch.bfloat16)
    run = one_token.OneToken(layers, lambda *_: otherwise)
    assert run(stream, [case.view] * 2, case.step).shape == (1, 512)
    assert run(stream.expand(2, -1), [case.view] * 2, case.step) is otherwise
    assert run(stream, [case.view] * 2, replace(case.step, max_length=1 << 20)) is not otherwise
    assert run(stream, [replace(case.view, softcap=30.0)] * 2, case.step) is otherwise
    assert run(stream, [replace(case.view, kv=case.view.kv.float())] * 2, case.step) is otherwise
