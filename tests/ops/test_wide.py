"""Products of 65 to 256 tokens in CUDA C++: which it takes, how they are cut, that it compiles, and that they are right."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from ridgeline.ops.triton import cuda, linears, pairs, wide
from ridgeline.ops.triton.activation import activate
from ridgeline.ops.triton.launch import is_hopper
from ridgeline.ops.triton.wide import CHUNK, CLUSTERS, Plan, plan_for

HOPPER = torch.cuda.is_available() and is_hopper(torch.device("cuda"))
GATES = [(6144, 2048), (8192, 2048), (8192, 3072), (9728, 2560), (14336, 4096), (17408, 5120), (18944, 3584)]
DOWNS = [(2048, 8192), (2560, 9728), (3072, 8192), (3584, 18944), (4096, 14336), (5120, 17408), (5120, 25600)]
"""Outputs (of gate and up each) and inputs of models from 1.7B to 32B."""


def line(plan: Plan, n: int, k: int, gate: bool) -> tuple[list[tuple[int, int]], int, int]:
    """Shares of the clusters as wide.cu takes them, steps of a tile, and tiles."""
    steps, tiles = -(-k // wide.STEP), -(-n // (wide.PAIR * plan.half * (2 - gate)))
    if plan.split:
        shares = [
            (tile * steps + part * steps // plan.split, tile * steps + (part + 1) * steps // plan.split)
            for tile in range(tiles)
            for part in range(plan.split)
        ]
    else:
        clusters, units = min(CLUSTERS, tiles), 1 if plan.cut else steps
        every = tiles * steps // units
        shares = [(at * every // clusters * units, (at + 1) * every // clusters * units) for at in range(clusters)]
    return shares, steps, tiles


@pytest.mark.parametrize("tokens", [17, 64, 65, 100, 128, 129, 200, 240, 256])
@pytest.mark.parametrize(
    ("n", "k", "gate"), [*((*shape, True) for shape in GATES), *((*shape, False) for shape in DOWNS)]
)
def test_every_step_is_somebodys(tokens: int, n: int, k: int, gate: bool) -> None:
    """Once, in one wave; a tile that is cut has two parts, the last one its cluster's first work."""
    plan = plan_for(tokens, n, k, gate)
    if plan is None:
        return
    shares, steps, tiles = line(plan, n, k, gate)
    assert len(shares) <= CLUSTERS and shares[0][0] == 0 and shares[-1][1] == tiles * steps
    assert all(share[1] == two[0] for share, two in itertools.pairwise(shares))
    assert all(begin < end for begin, end in shares)
    if plan.split:
        assert plan.split * CHUNK <= plan.tokens and plan.split <= 64
    elif plan.cut:
        assert all(end - begin >= steps for begin, end in shares)
    else:
        assert all(begin % steps == 0 for begin, _ in shares)


def test_tiles_fit_their_steps() -> None:
    """The narrowest that holds them all, in memory that a program has."""
    for tokens in range(wide.FEWEST, 241):
        plan = plan_for(tokens, 17408, 5120, True)
        assert plan is not None and plan.tokens == min(width for width in wide.WIDTHS if width >= tokens)
        assert 4 <= plan.stages <= wide.MOST_STAGES
    for width in wide.WIDTHS:
        # Halves of x are whole swizzled rows of eight.
        assert width % (8 * wide.PAIR) == 0 and width % CHUNK == 0


@pytest.mark.parametrize(
    ("tokens", "n", "k", "gate"),
    [
        *((tokens, 14336, 4096, True) for tokens in (64, 113, 128, 257)),
        *((tokens, n, 2560, True) for tokens, n in ((16, 10240), (64, 8192), (64, 11264))),
        *((tokens, 4096, 14336, False) for tokens in (64, 128, 256)),
        (100, 3072, 1024, True),
        (256, 17408, 5120, True),
        (100, 4096, 4096, False),
        (100, 1024, 8192, False),
    ],
)
def test_what_others_do_as_well_is_theirs(tokens: int, n: int, k: int, gate: bool) -> None:
    assert plan_for(tokens, n, k, gate) is None


def test_gates_that_leave_a_wave_of_ring_tiles_empty_are_divided_evenly() -> None:
    """Of a 4B: 160 ring tiles are one wave and a fifth."""
    assert plan_for(64, 10240, 2560, True) == Plan(64, 40) and plan_for(17, 9728, 2560, True) == Plan(32, 40)


def test_gates_without_a_ring_are_cut_at_128_tokens() -> None:
    """As measured: 14B 102.2 -> 96.0 us in cut tiles, 104.3 in whole ones."""
    assert plan_for(128, 17408, 5120, True) == Plan(128, 64, cut=True)


def test_the_text_says_the_same_numbers() -> None:
    stated = dict(
        assignment.split(" = ")
        for line in wide.source(96).splitlines()
        if line.startswith("constexpr u32")
        for assignment in line.removeprefix("constexpr u32 ").partition(";")[0].split(", ")
    )
    for name in ("GROUPS", "HIGH", "STEP", "MOST_STAGES", "CHUNK", "STAGED"):
        assert int(stated[name]) == getattr(wide, name), name
    assert "#define BATCH 96" in wide.source(96) and "m64n96k16" in wide.source(96)


@pytest.mark.skipif(not cuda.available(), reason="needs the compiler that comes with torch for CUDA")
@pytest.mark.parametrize("width", [32, 256])
def test_it_compiles(width: int) -> None:
    code = cuda.compiled(wide.source(width))
    assert code.startswith(b"\x7fELF") and b"wide_product" in code


def numbers(*shape: int) -> torch.Tensor:
    noise = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(shape, generator=noise, device="cuda").bfloat16()


PLANS = [
    Plan(80, 56),
    Plan(32, 40),
    Plan(64, 40),
    Plan(112, 64, cut=True),
    Plan(208, 64, cut=True),
    Plan(256, 64, cut=True),
    Plan(256, 64),
    Plan(96, 40),
]


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("tokens", [1, 65, 100, 129, 255, 300, 511])
@pytest.mark.parametrize(("n", "k", "kind"), [(14336, 4096, "silu"), (9000, 1032, "gelu_tanh")])
def test_the_bits_of_gates_are_those_of_two_kernels(plan: Plan, tokens: int, n: int, k: int, kind: str) -> None:
    """To how sums that are cut are rounded; whatever does not fill a tile, and several tiles of tokens; nothing beyond the end."""
    x, weight = numbers(tokens, k), numbers(2 * n, k) * k**-0.5
    room = torch.full((tokens + 8, n), 7.0, device="cuda", dtype=torch.bfloat16)
    assert wide.planned(x, weight, room[:tokens], plan, kind)
    exact = (x.double() @ weight.double().t()).bfloat16()
    gate, up = exact.float().chunk(2, 1)
    want = (F.silu(gate) if kind == "silu" else F.gelu(gate, approximate="tanh")) * up
    scale = want.double().pow(2).mean().sqrt()
    assert (room[:tokens].double() - want.double()).pow(2).mean().sqrt() < 4e-3 * scale
    assert (room[tokens:] == 7).all()
    if not plan.cut:
        activated = activate(F.linear(x, weight), kind)
        assert (room[:tokens] != activated).float().mean() < 0.02


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    "plan", [Plan(80, 64, 4), Plan(96, 40, 4), Plan(112, 64, 3), Plan(160, 56, 5), Plan(224, 48, 6), *PLANS[:2]]
)
@pytest.mark.parametrize("tokens", [1, 65, 100, 129, 200, 255])
@pytest.mark.parametrize(("n", "k"), [(4096, 14336), (2568, 1032)])
def test_sums_join_the_stream(plan: Plan, tokens: int, n: int, k: int) -> None:
    x, weight, stream = numbers(tokens, k), numbers(n, k) * k**-0.5, numbers(tokens + 8, n)
    want = stream[:tokens].double() + x.double() @ weight.double().t()
    rest, again = stream[tokens:].clone(), stream.clone()
    if plan.split and -(-tokens // plan.tokens) * -(-n // (4 * plan.half)) * plan.split > CLUSTERS:
        return  # parts that meet must all be there at a time
    assert wide.planned(x, weight, stream[:tokens], plan, None)
    scale = want.pow(2).mean().sqrt()
    assert (stream[:tokens].double() - want).pow(2).mean().sqrt() < 2.5e-3 * scale
    assert torch.equal(stream[tokens:], rest)
    # The order of sums does not depend on time.
    for _ in range(5):
        other = again.clone()
        assert wide.planned(x, weight, other[:tokens], plan, None) and torch.equal(other, stream)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("tokens", [72, 129, 200])
def test_a_chain_in_a_graph(tokens: int) -> None:
    """Kernels that come up while others end, over other weights each: counters and parts are left as they were found."""
    x = numbers(tokens, 4096)
    gates, downs = [numbers(28672, 4096) / 64 + 0 * i for i in range(2)], [numbers(4096, 14336) / 120 for _ in range(2)]

    def run(stream: torch.Tensor) -> torch.Tensor:
        for gate, down in zip(gates * 2, downs * 2, strict=True):
            h = F.rms_norm(stream, (4096,))
            stream = linears.linear_add(linears.linear_activate(h, gate, None, "silu"), down, None, stream)
        return stream

    want = run(x.clone())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(wide, "plan_for", lambda *_: None)
        plain = run(x.clone())
    assert (want.double() - plain.double()).pow(2).mean().sqrt() < 2e-2 * plain.double().pow(2).mean().sqrt()
    at, graph = x.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(at)
    for _ in range(3):
        at.copy_(x)
        graph.replay()
        assert torch.equal(out, want)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_the_table_takes_it_where_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with a bias, an unknown activation, other numbers, rows that are not contiguous, or token counts that are others'."""
    x, weight, bias = numbers(100, 4096), numbers(28672, 4096), numbers(28672)
    taken: list[Plan] = []
    original = wide.planned
    monkeypatch.setattr(wide, "planned", lambda *given: taken.append(given[3]) or original(*given))
    linears.linear_activate(x, weight, None, "silu")
    assert taken == [plan_for(100, 14336, 4096, True)]
    apart = torch.cat((x, x), 1)[:, :4096]
    for given in (
        (x, weight, bias, "silu"),
        (x, weight, None, "swiglu_clamped"),
        (x.half(), weight.half(), None, "silu"),
        (apart, weight, None, "silu"),
        (x[:64], weight, None, "silu"),
    ):
        linears.linear_activate(*given)
    assert len(taken) == 1
    assert pairs.PAIR == wide.PAIR
