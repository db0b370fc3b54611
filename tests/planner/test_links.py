"""Collectives: against brute-force arithmetic, monotone, and the better of their algorithms."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.errors import ConfigError
from ridgeline.planner.cluster import LinkRates, read_cluster
from ridgeline.planner.links import LINE_SHARES, PROTOCOLS, Fabric, Level, Link

NVLINK, PCIE, NETWORK = Link("nvlink", 450e9, direct=True), Link("pcie", 32e9), Link("network", 50e9)
HOSTS = Fabric((Level(8, NVLINK), Level(math.inf, NETWORK)))
ranks, sizes = st.integers(2, 64), st.floats(1, 1e10)


def seconds(link: Link, hops: int, volume: float) -> float:
    """The alpha-beta model, written out."""
    return min(
        start + hops * hop + volume / (link.bytes_per_s * LINE_SHARES[link.kind] * share)
        for start, hop, share in PROTOCOLS[link.kind]
    )


def test_an_all_reduce_takes_the_quickest_algorithm() -> None:
    one_shot, ring = seconds(NVLINK, 1, 7 * 1024), seconds(PCIE, 14, 2 * 7 / 8 * 1e9)
    assert NVLINK.all_reduce(8, 1024) == pytest.approx(one_shot)
    assert PCIE.all_reduce(8, 1e9) == pytest.approx(ring)
    assert NVLINK.all_reduce(8, 1e9) == pytest.approx(seconds(NVLINK, 2, 2 * 7 / 8 * 1e9))
    assert PCIE.all_reduce(8, 8) == pytest.approx(seconds(PCIE, 6, 16))  # a tree has fewer hops than a ring


def test_large_messages_reach_the_published_rate() -> None:
    """NCCL's ring reaches a bus bandwidth of 365 to 370 GB/s on 2 to 8 H100 (github.com/NVIDIA/nccl issue 1455)."""
    for count in (2, 4, 8):
        bus = 2 * (count - 1) / count * 4e9 / NVLINK.all_reduce(count, 4e9)
        assert bus == pytest.approx(370e9, rel=0.02)


def test_hosts_reduce_inside_first() -> None:
    size = 1e8
    inside = 2 * NVLINK.all_gather(8, size)
    assert HOSTS.all_reduce(16, size) == pytest.approx(inside + NETWORK.all_reduce(2, size / 8))
    assert HOSTS.all_gather(16, size) == pytest.approx(NVLINK.all_gather(8, size) + NETWORK.all_gather(2, size / 8))
    assert HOSTS.all_to_all(16, size) == pytest.approx(NVLINK.all_to_all(8, size) + NETWORK.all_to_all(2, size))


def test_neighbours_at_a_stride() -> None:
    assert HOSTS.strided(4).levels == (Level(2, NVLINK), Level(math.inf, NETWORK))
    assert HOSTS.strided(8).levels == (Level(math.inf, NETWORK),)
    assert HOSTS.send(6, 7, 1e6) == pytest.approx(NVLINK.send(1e6))
    assert HOSTS.send(7, 8, 1e6) == pytest.approx(NETWORK.send(1e6))
    with pytest.raises(ValueError, match="No known link connects device 0 and device 8"):
        Fabric((Level(8, NVLINK),)).send(0, 8, 1.0)


@given(ranks, sizes, st.sampled_from([NVLINK, PCIE, NETWORK]))
def test_more_bytes_or_a_slower_link_take_no_less_time(count: int, size: float, link: Link) -> None:
    slower = Link(link.kind, link.bytes_per_s / 2, link.direct)
    for name in ("all_reduce", "all_gather", "all_to_all"):
        time = getattr(link, name)(count, size)
        assert getattr(link, name)(count, 2 * size) >= time
        assert getattr(slower, name)(count, size) >= time
    assert link.all_reduce(count, size) >= link.all_gather(count, size)


@given(ranks, sizes)
def test_a_group_of_one_needs_no_link(count: int, size: float) -> None:
    assert HOSTS.all_reduce(1, size) == HOSTS.all_gather(1, size) == HOSTS.all_to_all(1, size) == 0
    assert Fabric(()).reaches(1) and not Fabric(()).reaches(count) and HOSTS.reaches(count)


def test_a_cluster_has_the_links_of_the_table() -> None:
    h100 = read_cluster("16xh100")
    assert h100.count == 16 and h100.per_host == 8 and h100.usd_hour == pytest.approx(16 * 2.95)
    assert h100.fabric == Fabric((Level(8, NVLINK), Level(math.inf, NETWORK)))
    assert [level.link.kind for level in read_cluster("8 x H100 PCIe").fabric.levels] == ["nvlink", "pcie"]
    assert read_cluster("h200").fabric.levels == ()
    assert read_cluster("2xh100", LinkRates(within=1e9)).fabric.levels == (Level(2, Link("nvlink", 1e9, direct=True)),)


def test_unknown_links_are_named() -> None:
    assert "PCIe at 32 GB/s in one host is assumed" in read_cluster("4xl4").notes[0]
    assert "network between hosts of NVIDIA L40S is unknown" in read_cluster("16xl40s").notes[0]
    assert not read_cluster("16xl40s").fabric.reaches(16)
    assert "no layout spans them" in read_cluster("2xmi300x").notes[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0xh100", "is 0 devices: give 1 to 16384, as in 8xh100"),
        ("99999xh100", "is 99999 devices"),
        ("8xfoo", "Unknown accelerator 'foo'"),
        ("", "names no device"),
        ("8xh100,4xl4", "one kind of device"),
        ("4xedge tpu", "no FLOP/s or no memory bandwidth"),
    ],
)
def test_bad_devices_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_cluster(text)
    assert message in error.value.message and error.value.param == "gpus"
