"""The books of the block pool balance under any sequence of operations."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.kv.blocks import BlockPool

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["take", "share", "release", "forget"]), st.integers(0, 30)), max_size=200
)


@settings(max_examples=200, deadline=None)
@given(total=st.integers(1, 12), operations=OPERATIONS)
def test_free_plus_used_is_total_under_any_operations(total: int, operations: list[tuple[str, int]]) -> None:
    evicted: list[int] = []
    pool = BlockPool(total, evicted.append)
    holders: list[int] = []
    remembered: set[int] = set()
    for name, number in operations:
        if name == "take" and pool.free:
            block = pool.take()
            assert block not in holders
            assert block not in remembered or evicted[-1] == block
            remembered.discard(block)
            holders.append(block)
        elif name == "share" and (holders or remembered):
            choices = sorted(set(holders) | remembered)
            block = choices[number % len(choices)]
            pool.share(block)
            remembered.discard(block)
            holders.append(block)
        elif name == "release" and holders:
            block = holders.pop(number % len(holders))
            keep = number % 2 == 0
            pool.release(block, keep=keep)
            if keep and block not in holders:
                remembered.add(block)
        elif name == "forget" and remembered:
            block = sorted(remembered)[number % len(remembered)]
            pool.forget(block)
            remembered.discard(block)
        assert pool.free + pool.used == pool.total
        assert pool.used == len(set(holders))
        assert pool.cached == len(remembered)
        pool.check()


def test_cached_blocks_are_evicted_last_and_oldest_first() -> None:
    evicted: list[int] = []
    pool = BlockPool(3, evicted.append)
    first, second, third = pool.take(), pool.take(), pool.take()
    pool.release(second, keep=True)
    pool.release(first, keep=True)
    pool.release(third, keep=False)
    assert [pool.take(), pool.take(), pool.take()] == [third, second, first]
    assert evicted == [second, first]


def test_a_block_released_twice_is_an_error() -> None:
    pool = BlockPool(1, lambda block: None)
    block = pool.take()
    pool.release(block, keep=False)
    try:
        pool.release(block, keep=False)
    except AssertionError as error:
        assert "more often than taken" in str(error)
    else:
        raise AssertionError("no error")
