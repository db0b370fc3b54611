"""Prefix chains and hits, with groups whose windows differ."""

from array import array

from ridgeline.core.spec import KvGroup
from ridgeline.kv.prefix import PrefixIndex, chain_root, extend_chain

WHOLE = KvGroup((0,), None, 8)
LOCAL = KvGroup((1,), 5, 8)
SIZE = 4


def chain_of(tokens: list[int], salt: str = "") -> list[bytes]:
    chain: list[bytes] = []
    extend_chain(chain, array("i", tokens), SIZE, chain_root(salt, "model"))
    return chain


def test_a_chain_covers_full_blocks_and_every_token_before_them() -> None:
    chain = chain_of(list(range(11)))
    assert len(chain) == 2
    assert chain_of([99, *range(1, 11)])[1] != chain[1]
    assert chain_of(list(range(8)) + [5, 6])[:2] == chain
    grown = chain[:1]
    extend_chain(grown, array("i", range(11)), SIZE, chain_root("", "model"))
    assert grown == chain


def test_salt_and_fingerprint_separate_tenants_and_models() -> None:
    tokens = list(range(8))
    assert chain_of(tokens, "a") != chain_of(tokens, "b")
    other: list[bytes] = []
    extend_chain(other, array("i", tokens), SIZE, chain_root("a", "other model"))
    assert other != chain_of(tokens, "a")


def test_a_hit_is_the_longest_prefix_and_never_longer_than_asked() -> None:
    index = PrefixIndex([WHOLE], SIZE)
    chain = chain_of(list(range(16)))
    for number, key in enumerate(chain[:3]):
        assert index.insert(key, 0, number + 1)
    assert index.match(chain, 4) == (3, [[1, 2, 3]])
    assert index.match(chain, 2) == (2, [[1, 2]])
    index.evict(2)
    assert index.match(chain, 4) == (1, [[1]])
    assert not index.holds(2)


def test_a_second_block_for_the_same_key_is_not_remembered() -> None:
    index = PrefixIndex([WHOLE], SIZE)
    (key,) = chain_of(list(range(4)))
    assert index.insert(key, 0, 1)
    assert not index.insert(key, 0, 2)
    assert not index.holds(2)


def test_a_windowed_group_needs_only_what_the_next_token_sees() -> None:
    """Window 5 sees 4 positions back: exactly the last block of a hit, whatever was freed before it."""
    index = PrefixIndex([WHOLE, LOCAL], SIZE)
    chain = chain_of(list(range(16)))
    for number, key in enumerate(chain):
        index.insert(key, 0, 10 + number)
    index.insert(chain[2], 1, 22)
    assert index.match(chain, 4) == (3, [[10, 11, 12], [0, 0, 22]])
    index.evict(22)
    assert index.match(chain, 4)[0] == 0


def test_an_entry_goes_when_its_last_block_goes() -> None:
    index = PrefixIndex([WHOLE, LOCAL], SIZE)
    (key,) = chain_of(list(range(4)))
    index.insert(key, 0, 1)
    index.insert(key, 1, 2)
    index.evict(1)
    assert len(index) == 1
    index.evict(2)
    assert len(index) == 0
    index.insert(key, 0, 3)
    assert index.clear() == [3]
    assert len(index) == 0 and not index.holds(3)
