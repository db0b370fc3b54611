"""The products of a few tokens equal float64: on a GPU where there is one, else in Triton's interpreter.

The interpreter computes a bf16 product wrongly, so it is asked for float32 and float16 only; it knows no programmatic
dependent launch, which the kernels leave out there.
"""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton")

from ridgeline.ops.reference import REFERENCE
from ridgeline.ops.table import Normed
from ridgeline.ops.triton.gemm_small import matrix_product
from ridgeline.ops.triton.gemv import resident_product, vector_product
from ridgeline.ops.triton.shapes import MatrixTile, ResidentTile, VectorTile, tile_for
from ridgeline.ops.triton.table import TRITON
from tests.combinations import crossed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])


def error(out: torch.Tensor, want: torch.Tensor) -> float:
    """Relative, in the 2-norm."""
    return float((out.double() - want).norm() / want.norm())


def close(out: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, plain: torch.Tensor | None = None) -> None:
    """Error against float64; shape and dtype as FloatOps.linear promises. plain: the reference's result, one operation after
    the other, each rounded to dtype: an error no larger than its own is right too."""
    assert out.shape == want.shape
    assert out.dtype == dtype
    allowed = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}[dtype]
    if plain is not None:
        allowed = max(allowed, 1.1 * error(plain, want))
    assert error(out, want) < allowed


def near(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    close(out, x.double() @ weight.double().T + (0 if bias is None else bias.double()), x.dtype)


def operands(tokens: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, weight, bias = torch.randn(tokens, k), torch.randn(n, k), 20 * torch.randn(n)
    return x.to(DEVICE, dtype), weight.to(DEVICE, dtype), bias.to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("n", "k", "tile"),
    [
        (37, 264, VectorTile(2, 256, 2)),
        (8, 512, VectorTile(1, 256, 2)),
    ],
)
def test_vector_products(tokens: int, n: int, k: int, tile: VectorTile, dtype: torch.dtype) -> None:
    x, weight, bias = operands(tokens, n, k, dtype)
    near(vector_product(x, weight, None, tile), x, weight, None)
    near(vector_product(x, weight, bias, tile), x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize(("tokens", "n", "k"), [(5, 37, 264), (16, 128, 256), (17, 150, 320), (40, 64, 1000)])
def test_matrix_products(tokens: int, n: int, k: int, splits: int, dtype: torch.dtype) -> None:
    """Edges in every direction; a token count over the tile's batch makes several tiles of tokens."""
    x, weight, bias = operands(tokens, n, k, dtype)
    tile = MatrixTile(16, 64, 64, 4, 2, splits=splits)
    near(matrix_product(x, weight, None, tile), x, weight, None)
    near(matrix_product(x, weight, bias, tile), x, weight, bias)


def normed(tokens: int, k: int, dtype: torch.dtype, offset: bool) -> Normed:
    """A norm that is still to be done, of values far from 1."""
    x, gain = 30 * torch.randn(tokens, k), 0.2 * torch.randn(k)
    return Normed(x.to(DEVICE, dtype), gain.to(DEVICE, dtype), 1e-1, offset)


def values(x: Normed) -> torch.Tensor:
    return REFERENCE.tokenwise.rms_norm(x.x.double(), x.weight.double(), x.eps, x.offset)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize(("n", "k", "tile"), [(37, 264, ResidentTile(2, 2, 3)), (8, 512, ResidentTile(1, 2, 100))])
def test_resident_products_norm_as_they_read(
    tokens: int, offset: bool, n: int, k: int, tile: ResidentTile, dtype: torch.dtype
) -> None:
    """Fewer programs than groups of rows, and more; with a norm that is still to be done, and without."""
    x, (plain, weight, bias) = normed(tokens, k, dtype, offset), operands(tokens, n, k, dtype)
    near(resident_product(plain, weight, bias, tile), plain, weight, bias)
    want = values(x) @ weight.double().T
    close(resident_product(x, weight, None, tile), want, dtype)
    close(resident_product(x, weight, bias, tile), want + bias.double(), dtype)


RESIDENTS = [ResidentTile(4, 2, 7), ResidentTile(2, 2, 64)]
MATRICES = [MatrixTile(16, 64, 64, 4, 2), MatrixTile(16, 64, 64, 4, 2, splits=3)]
# (features, kind, dtype)
GATES = (
    [(*gate, dtype) for gate in ((64, "silu"), (75, "gelu_tanh")) for dtype in DTYPES]
    if DEVICE == "cuda"
    else [(64, "silu", torch.float32), (75, "gelu_tanh", torch.float16)]
)


def product(
    x: torch.Tensor | Normed,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: VectorTile | ResidentTile | MatrixTile,
    stream: torch.Tensor | None = None,
    kind: str | None = None,
) -> torch.Tensor:
    if isinstance(tile, ResidentTile):
        return resident_product(x, weight, bias, tile, stream, kind)
    assert isinstance(x, torch.Tensor)
    if isinstance(tile, MatrixTile):
        return matrix_product(x, weight, bias, tile, stream, kind)
    return vector_product(x, weight, bias, tile, stream)


JOINED: list[tuple[int, VectorTile | ResidentTile | MatrixTile]] = [
    *((tokens, VectorTile(4, 128, 2)) for tokens in (1, 2, 3, 4)),
    *((tokens, tile) for tokens in (1, 2) for tile in RESIDENTS),
    *((tokens, tile) for tokens in (3, 19) for tile in MATRICES),
]
ONE_DTYPE = crossed(
    JOINED, DTYPES, quick=lambda place, dtype: DEVICE == "cuda" or (place + place // 2 + dtype) % 2 == 0
)
"""In the slow interpreter each with one dtype, such that each tile has all dtypes."""


@pytest.mark.parametrize(("joined", "dtype"), ONE_DTYPE)
def test_the_stream_joins_the_product(
    joined: tuple[int, VectorTile | ResidentTile | MatrixTile], dtype: torch.dtype
) -> None:
    """In its own memory, to which nothing else is written."""
    tokens, tile = joined
    x, weight, bias = operands(tokens, 150, 320, dtype)
    for added in (None, bias):
        memory = torch.randn(tokens + 2, 150).mul(30).to(DEVICE, dtype)
        before, stream = memory.clone(), memory[1:-1]
        out = product(x, weight, added, tile, stream)
        assert out.data_ptr() == stream.data_ptr()
        want = before[1:-1].double() + x.double() @ weight.double().T
        close(out, want if added is None else want + added.double(), dtype)
        assert torch.equal(memory[0], before[0]) and torch.equal(memory[-1], before[-1])


@pytest.mark.parametrize(
    ("tokens", "tile"),
    [
        *((tokens, tile) for tokens in (1, 2) for tile in RESIDENTS),
        *((tokens, tile) for tokens in (3, 19) for tile in MATRICES),
    ],
)
@pytest.mark.parametrize(("features", "kind", "dtype"), GATES)
def test_gate_and_up_come_out_activated(
    features: int, kind: str, tokens: int, tile: ResidentTile | MatrixTile, dtype: torch.dtype
) -> None:
    """Also where a tile reaches behind the gates; with a norm before the product where that can be inside."""
    _, weight, bias = operands(tokens, 2 * features, 320, dtype)
    weight, x = weight / 16, normed(tokens, 320, dtype, False)
    given = x if isinstance(tile, ResidentTile) else (x.x / 30)
    wide = values(given) if isinstance(given, Normed) else given.double()
    for added in (None, bias / 20):
        sums = wide @ weight.double().T + (0 if added is None else added.double())
        close(product(given, weight, added, tile, None, kind), REFERENCE.tokenwise.activate(sums, kind), dtype)


@pytest.mark.parametrize("tokens", [0, 1, 4, 5, 64, 300])
def test_what_joins_a_product(tokens: int) -> None:
    """Whatever path a shape takes: the norm before it, the stream added to it, the activation of gate and up."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    x, weight, bias = operands(tokens, 96, 128, dtype)
    weight, deferred = weight / 8, normed(tokens, 128, dtype, True)
    stream = torch.randn(tokens, 96, device=DEVICE).to(dtype)
    for added in (None, bias):
        outs = (
            TRITON.matmul.unquantized.linear(deferred, TRITON.matmul.unquantized.pack(weight), added),
            TRITON.matmul.unquantized.linear_add(x, TRITON.matmul.unquantized.pack(weight), added, stream.clone()),
            TRITON.matmul.unquantized.linear_activate(deferred, TRITON.matmul.unquantized.pack(weight), added, "silu"),
        )
        more = 0 if added is None else added.double()
        sums = values(deferred) @ weight.double().T + more
        wants = (
            sums,
            stream.double() + x.double() @ weight.double().T + more,
            REFERENCE.tokenwise.activate(sums, "silu"),
        )
        plains = (
            REFERENCE.matmul.unquantized.linear(deferred, weight, added),
            REFERENCE.matmul.unquantized.linear_add(x, weight, added, stream),
            REFERENCE.matmul.unquantized.linear_activate(deferred, weight, added, "silu"),
        )
        for out, want, plain in zip(outs, wants, plains, strict=True):
            assert out.shape == want.shape
            if tokens:
                close(out, want, dtype, plain)


def test_a_split_product_leaves_its_counters_as_they_were() -> None:
    """The same call twice gives the same bits: the parts are added in one order, and the last program starts anew."""
    x, weight, bias = operands(9, 150, 640, torch.float32)
    tile = MatrixTile(16, 64, 64, 4, 2, splits=4)
    first = matrix_product(x, weight, bias, tile)
    for _ in range(3):
        assert torch.equal(matrix_product(x, weight, bias, tile), first)


def test_rows_may_be_part_of_a_wider_tensor() -> None:
    wide, weight, bias = torch.randn(9, 512, device=DEVICE), torch.randn(40, 256, device=DEVICE), None
    x = wide[:, 256:]
    near(vector_product(x[:3], weight, bias, VectorTile(1, 256, 2)), x[:3], weight, bias)
    near(matrix_product(x, weight, bias, MatrixTile(16, 64, 64, 4, 2)), x, weight, bias)
    near(TRITON.matmul.unquantized.linear(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("tokens", [0, 1, 4, 5, 64, 256, 300])
@pytest.mark.parametrize(("n", "k"), [(48, 64), (31, 70)])
def test_linear(tokens: int, n: int, k: int) -> None:
    """Whatever path a shape takes."""
    x, weight, bias = operands(tokens, n, k, torch.bfloat16 if DEVICE == "cuda" else torch.float32)
    out = TRITON.matmul.unquantized.linear(x, TRITON.matmul.unquantized.pack(weight), bias)
    assert out.shape == (tokens, n)
    if tokens:
        near(out, x, weight, bias)


COUNTS = [1, 2, 3, 4, 5, 16, 17, 40, 64, 65, 128, 129]
SIZES = [(128, 64), (4096, 1024), (28672, 4096), (151936, 1024), (576, 576), (4096, 14336), (4096, 5120), (8192, 8192)]
SIZES += [(1024, 2048), (1024, 6144), (2048, 4096), (5120, 13824), (3584, 18944)]


def check_configuration(tokens: int, n: int, k: int, gate: bool, norm: bool) -> None:
    """A pipeline must fit a processor's shared memory, a batch must hold the tokens, splits must not outnumber blocks."""
    tile = tile_for(tokens, n, k, norm, gate)
    if isinstance(tile, MatrixTile):
        assert (tile.rows + tile.batch) * tile.block * 2 * tile.stages <= 225 * 1024
        assert tile.batch >= tokens and not norm
        assert 1 <= tile.splits <= -(-k // tile.block)
    elif isinstance(tile, ResidentTile):
        assert tokens <= 2 and (tile.rows > 1 or not gate)
        assert k <= 32 * 32 * tile.warps
        assert tile.rows * (1 << (k - 1).bit_length()) * 2 * (tile.stages - 1) <= 200 * 1024
    elif isinstance(tile, VectorTile):
        assert tokens <= 4 and not norm and not gate
    else:
        assert norm or gate or tokens > 1


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("gate", [False, True])
def test_configurations_fit_the_chip(gate: bool, norm: bool) -> None:
    """Of every product with every number of tokens: see check_configuration."""
    for tokens, (n, k) in itertools.product(COUNTS, SIZES):
        check_configuration(tokens, n, k, gate, norm)


@pytest.mark.parametrize(
    ("k", "block"),
    [(4096, 4096), (3584, 2048), (2048, 2048), (1024, 1024), (5120, 1024), (3072, 1024), (2560, 512), (2304, 512)],
)
def test_blocks_of_a_head_hold_little_beyond_its_inputs(k: int, block: int) -> None:
    """What they hold costs as if it were there: of 2,560 inputs in blocks of 2,048 a head took 215 us for 174."""
    tile = tile_for(1, 151936, k)
    assert isinstance(tile, VectorTile) and tile.block == block


@pytest.mark.parametrize(
    ("n", "k", "ours"),
    [(28672, 4096, True), (19456, 2560, True), (37888, 3584, False), (34816, 5120, False), (51200, 5120, False)],
)
def test_gates_whose_tiles_do_not_divide_are_left_alone(n: int, k: int, ours: bool) -> None:
    """Of 128 tokens: one round of the chip, or several that are nearly full."""
    assert (tile_for(128, n, k, gate=True) is not None) is ours
    assert tile_for(128, n, k) is None and tile_for(128, 151936, k) is None, "cuBLAS runs plain products and heads"


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 4, 7, 16, 33, 64, 100, 128, 250])
def test_a_captured_chain_of_products(tokens: int) -> None:
    """Products start before the one that makes their input has ended; in a graph, on the model's own shapes."""
    if DEVICE != "cuda":
        pytest.skip("needs a CUDA device")
    weights = [torch.randn(n, k, device=DEVICE).bfloat16() / 64 for n, k in ((4096, 1024), (1024, 4096)) * 3]
    first = torch.randn(tokens, 1024, device=DEVICE).bfloat16()

    def chain() -> list[torch.Tensor]:
        outs = [first]
        for weight in weights:
            outs.append(TRITON.matmul.unquantized.linear(outs[-1], weight, None))
        return outs

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = chain()
    for _ in range(3):
        first.normal_()
        for out in outs[1:]:
            out.fill_(float("nan"))
        graph.replay()
        for x, out, weight in zip(outs[:-1], outs[1:], weights, strict=True):
            near(out, x, weight, None)
