"""Linears in host memory that steps of few tokens multiply on the CPU: the same results, and copies of the others only."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.formats import NUMBER_FORMATS
from ridgeline.core.host_weights import BUFFERS, Rates, computed_linears, host_weights, read_s
from ridgeline.models.config import read_spec
from ridgeline.ops.native_host import HostOps, host_ops
from ridgeline.ops.reference import REFERENCE
from ridgeline.quant.format import LinearShape, Part, WeightFormat
from ridgeline.quant.hosted import SIZES, Host, HostedWeight, divided
from ridgeline.quant.integer import IntFormat
from ridgeline.quant.streamed import HostMemory, Pieces, StreamedFormat, WeightStream
from ridgeline.quant.unquantized import UnquantizedFormat
from tests.models.paged import PagedRows
from tests.quant.test_streamed import CONFIG, CPU, F32, FORMATS, EarlyLane, LateLane, model


def hosted(name: str) -> Host:
    ops = host_ops()
    if ops is None:
        pytest.skip("needs the compiled operations of the CPU")
    forms: dict[str, WeightFormat] = {
        "": UnquantizedFormat(ops.ops.matmul.unquantized, F32, CPU),
        "int4": IntFormat(ops.ops.matmul.integer, NUMBER_FORMATS["int4"], F32, CPU),
    }
    return Host(ops, forms[name], REFERENCE.tokenwise.rms_norm, torch.Tensor.to, "silu", F32, pinned=False)


@pytest.mark.parametrize("lane", [EarlyLane, LateLane])
@pytest.mark.parametrize("name", ["", "int4"])
def test_few_tokens_are_multiplied_where_the_weights_lie(name: str, lane: type[EarlyLane]) -> None:
    host, copies = hosted(name), lane()
    spec = replace(read_spec(CONFIG), quantization=name)
    spec = replace(spec, host_bytes=int(0.6 * spec.layer_bytes))
    chosen = host_weights(spec)
    computed = computed_linears(chosen.sizes, Rates(2.0, 1.0))
    count = len(chosen.sizes)
    assert 0 < len(computed) < count
    stream = WeightStream(count, copies, HostMemory(pinned=False), computed, SIZES[-1])
    split = model(StreamedFormat(FORMATS[name](), chosen.linears, stream, partial(HostedWeight, host)), spec)
    rows, same = PagedRows(split), PagedRows(model(FORMATS[name](), spec))
    for work in (
        [(0, list(range(3, 40))), (1, list(range(20, 31)))],
        [(0, [5]), (1, [6])],
        [(0, [7, 8, 9]), (1, list(range(40, 52)))],
        [(0, [5])],
        [(0, list(range(10, 30)))],
    ):
        copies.copies.clear()
        torch.testing.assert_close(rows.step(work), same.step(work), rtol=2e-4, atol=2e-5)
        few = sum(len(tokens) for _, tokens in work) <= SIZES[-1]
        expected = [number % BUFFERS for number in range(count) if not (few and number in computed)]
        assert sorted(copies.copies) == sorted(expected) and not copies.pending


def test_rates_divide_the_linears() -> None:
    sizes = [50, 33, 235, 117] * 20
    assert computed_linears(sizes, Rates(0.0, 55.0)) == frozenset()
    for link, products in ((55.0, 92.0), (55.0, 10.0), (25.0, 200.0)):
        computed = computed_linears(sizes, Rates(products, link))
        seconds = sum(sizes[number] for number in computed) / products
        copies = (sum(sizes) - products * seconds) / link
        best = sum(sizes) / (link + products)
        assert max(seconds, copies) < 1.1 * best, (link, products)
    assert len(computed_linears(sizes, Rates(92.0, 55.0, call_s=2.0))) < len(computed_linears(sizes, Rates(92.0, 55.0)))


class TimedLane(EarlyLane):
    """Copies that take their seconds, one after the other, beside the work of a device."""

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__()
        self.rate = bytes_per_s
        self.now = self.link = 0.0
        self.arrived = [0.0] * BUFFERS

    def copy(self, buffer: int, pieces: Pieces) -> None:
        self.link = max(self.now, self.link) + sum(len(source) for _, source in pieces) / self.rate
        self.arrived[buffer] = self.link

    def wait(self, buffer: int) -> None:
        self.now = max(self.now, self.arrived[buffer])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=24), st.sampled_from((0.5, 1.0, 3.0)))
def test_the_predicted_order_is_that_of_the_copies(linears: list[tuple[int, bool]], products: float) -> None:
    """A step of WeightStream with copies that take time lasts as long as `read_s` says, also after one that ended early."""
    sizes = [512 * size for size, _ in linears]
    computed = frozenset(number for number, (_, multiplied) in enumerate(linears) if multiplied)
    rates, lane = Rates(products, 1.0, call_s=100.0), TimedLane(1.0)
    stream = WeightStream(len(sizes), lane, HostMemory(pinned=False), computed, few_tokens=1)
    for number, size in enumerate(sizes):
        stream.keep(number, [torch.zeros(size, dtype=torch.uint8)])
    for length in (len(sizes) // 2, len(sizes), len(sizes)):
        lane.now = lane.link = 0.0
        for number, size in enumerate(sizes[:length]):
            if number in computed:
                stream.skip(number, 1)
                lane.now += rates.call_s + size / rates.products
            else:
                stream.arrive(number, 1)
                stream.leave(number, 1)
        assert length < len(sizes) or lane.now == pytest.approx(read_s(sizes, computed, rates))


def test_a_host_without_memory_for_both_computes_nothing() -> None:
    host = hosted("")
    spec = read_spec(CONFIG)
    spec = replace(spec, host_bytes=int(0.6 * spec.layer_bytes))
    chosen = host_weights(spec)

    def with_free(free: int) -> Host:
        given = host.ops
        return replace(host, ops=HostOps(given.ops, given.record, lambda _: 1.0, lambda: free))

    computed, times = divided(chosen, spec, CPU, with_free(1 << 40))
    assert computed and times.few_tokens in SIZES and times.copies_s == chosen.bytes
    assert times.few_s < times.copies_s and times.step_s(1.0, 1) < times.step_s(1.0, 300)
    computed, times = divided(chosen, spec, CPU, with_free(chosen.bytes))
    assert not computed and times.few_tokens == 0 and times.step_s(1.0, 3) == times.copies_s


def test_work_that_cannot_be_recorded_is_left_to_copies() -> None:
    host = hosted("")
    assert all(rate.products > 0 for rate in host.rates(LinearShape(64, (Part(96, 96),)), CPU))
    plain = UnquantizedFormat(REFERENCE.matmul.unquantized, F32, CPU)
    assert replace(host, format=plain).rates(LinearShape(64, (Part(96, 96),)), CPU) == []


def test_calls_come_from_any_thread() -> None:
    """A driver's threads come and go; the products are made in turn, each completely."""
    host = hosted("")
    linears, x = [host._filled(LinearShape(512, (Part(256, 256),))) for _ in range(4)], torch.randn(16, 512)
    products = [host.products(512, linear.apply)[-1] for linear in linears]
    host.inputs(512).copy_(x)
    for product in products:
        product.result.zero_()
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(product.calls.enqueue, CPU) for product in products * 25]:
            future.result()
    expected = 0.01 * x.sum(1, keepdim=True).expand(16, 256)
    for product in products:
        torch.testing.assert_close(product.result, expected, rtol=1e-4, atol=1e-4)
