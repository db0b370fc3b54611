"""The router's decisions: which replica, who waits, who is refused. Times are arguments."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from ridgeline.core.errors import Overloaded, Unavailable
from ridgeline.service.autoscale import Arrivals
from ridgeline.service.fair_queue import FairQueue
from ridgeline.service.prefix_index import ENTRY_BYTES, MAX_HOLDERS, PrefixIndex, chunk_hashes
from ridgeline.service.progress import Progress
from ridgeline.service.routing import (
    SAMPLED,
    Breaker,
    Capacity,
    Demand,
    Policy,
    Router,
    State,
    least_work,
    round_robin,
)
from ridgeline.service.routing import prefix_aware as prefix


def fleet(count: int = 2, policy: Policy = prefix, capacity: Capacity = Capacity(), **options: int) -> Router:
    router = Router(policy, PrefixIndex(chunk_tokens=100), **options)
    for number in range(count):
        router.add(f"r{number}", capacity)
        router.set_state(f"r{number}", State.UP, 0.0)
    return router


def sent(router: Router, demand: Demand, now: float = 0.0) -> str:
    replica = router.arrive(demand, now).replica
    assert replica is not None
    return replica.name


def computed(router: Router, demand: Demand) -> str:
    """Send a request whose prompt is computed at once."""
    ticket = router.arrive(demand, 0.0)
    router.first_token(ticket, 0.0)
    assert ticket.replica is not None
    return ticket.replica.name


def test_round_robin_takes_turns() -> None:
    router = fleet(3, round_robin)
    names = [sent(router, Demand(10)) for _ in range(9)]
    assert set(names[:3]) == {"r0", "r1", "r2"} and names == names[:3] * 3


def test_least_work_prefers_the_shorter_backlog() -> None:
    router = fleet(2, least_work)
    first = router.arrive(Demand(10_000), 0.0)
    other = router.arrive(Demand(100), 0.0)
    assert other.replica is not first.replica
    assert router.arrive(Demand(100), 0.0).replica is other.replica, "100 tokens wait there, 10,000 at the other"
    router.first_token(first, 1.0)
    router.finish(first, 1.5)
    assert router.arrive(Demand(100), 2.0).replica is not other.replica


def test_a_cached_prefix_draws_requests_until_its_backlog_costs_more() -> None:
    router = fleet(2)
    chunks = tuple(range(10))
    assert router.index.chunk_tokens == 100
    home = computed(router, Demand(1000, chunks))
    names = [sent(router, Demand(1000, chunks)) for _ in range(400)]
    assert names[0] == home
    counts = Counter(names)
    assert min(counts.values()) > 100, "one hot prefix does not keep the other replica idle"
    assert router.totals.cached_tokens > 0.99 * 398 * 999


def test_predicted_wait_weighs_the_hit_against_the_queue() -> None:
    router = fleet(2, capacity=Capacity(prefill_tokens_s=1000, decode_s=0.0))
    home = router.arrive(Demand(500, (1, 2, 3, 4, 5)), 0.0).replica
    long = router.arrive(Demand(2000), 0.0).replica
    assert long is not home
    assert router.arrive(Demand(600, (1, 2, 3, 4, 5, 6)), 0.0).replica is home, "600 tokens there, 2,600 at the other"
    assert router.arrive(Demand(10_000, (9,)), 0.0).replica is home, "600 wait there, 2,000 at the other"
    assert router.arrive(Demand(600, (1, 2, 3, 4, 5, 6)), 0.0).replica is long, (
        "the hit saves less than the queue costs"
    )


def test_ties_are_random_and_repeat_with_the_seed() -> None:
    def firsts(seed: int) -> list[str]:
        return [sent(fleet(4, seed=seed), Demand(10)) for _ in range(1)]

    names = Counter(sent(fleet(4, seed=seed), Demand(10)) for seed in range(200))
    assert set(names) == {"r0", "r1", "r2", "r3"} and min(names.values()) > 20
    assert firsts(7) == firsts(7)


def test_a_large_fleet_is_sampled_and_its_prefixes_are_reached() -> None:
    router = fleet(20 * SAMPLED)
    chunks = tuple(range(50))
    home = computed(router, Demand(5000, chunks))
    assert sent(router, Demand(5000, chunks)) == home
    counts = Counter(sent(router, Demand(100)) for _ in range(10 * SAMPLED))
    assert max(counts.values()) <= 2


def test_requests_wait_at_the_limit_and_leave_as_places_come_free() -> None:
    router = fleet(2, capacity=Capacity(limit=1), max_waiting=2)
    running = [router.arrive(Demand(10), 0.0) for _ in range(2)]
    waiting = [router.arrive(Demand(10), 0.0) for _ in range(2)]
    assert [ticket.replica for ticket in waiting] == [None, None]
    with pytest.raises(Overloaded) as refusal:
        router.arrive(Demand(10), 0.0)
    assert refusal.value.retry_after_s > 0
    assert router.finish(running[0], 1.0) == [waiting[0]]
    assert router.finish(waiting[1], 1.0) == [], "its client has left"
    assert router.finish(running[1], 1.0) == [] and not router.queue


def test_retry_after_follows_the_rate_of_ends() -> None:
    router = fleet(1, capacity=Capacity(limit=1), max_waiting=5)
    ticket = router.arrive(Demand(10), 0.0)
    for _ in range(5):
        router.arrive(Demand(10), 0.0)
    now = 0.0
    for _ in range(100):
        now += 0.5
        (ticket,) = router.finish(ticket, now)
        router.arrive(Demand(10), now)
    assert router.refusal(now).retry_after_s == pytest.approx(2.5, rel=0.2)


def test_requests_wait_for_an_engine_that_is_being_started() -> None:
    router = fleet(2)
    router.set_state("r0", State.DOWN, 0.0)
    router.set_state("r1", State.STARTING, 0.0)
    ticket = router.arrive(Demand(10), 0.0)
    assert ticket.replica is None and not router.dispatch(0.0)
    (again,) = router.set_state("r1", State.UP, 1.0)
    assert again is ticket and ticket.replica is not None and ticket.replica.name == "r1"
    router.set_state("r1", State.STARTING, 1.0)
    router.replicas["r1"].draining = True
    with pytest.raises(Unavailable, match="No replica is up"):
        router.arrive(Demand(10), 1.0)


def test_no_replica_up_is_another_error_than_no_room() -> None:
    router = fleet(2)
    router.set_state("r0", State.DOWN, 0.0)
    assert sent(router, Demand(10)) == "r1"
    router.set_state("r1", State.DOWN, 0.0)
    with pytest.raises(Unavailable, match="No replica is up"):
        router.arrive(Demand(10), 0.0)
    router.expected = 1
    ticket = router.arrive(Demand(10), 0.0)
    assert ticket.replica is None
    assert router.set_state("r0", State.UP, 1.0) == [ticket]


def test_stalled_replicas_are_the_last_resort() -> None:
    router = fleet(2)
    router.set_state("r0", State.STALLED, 0.0)
    assert {sent(router, Demand(10)) for _ in range(20)} == {"r1"}
    router.set_state("r1", State.STALLED, 0.0)
    assert len({sent(router, Demand(10)) for _ in range(50)}) == 2


def test_draining_and_removed_replicas_get_nothing_and_lose_nothing() -> None:
    router = fleet(2, capacity=Capacity(limit=1))
    first = router.arrive(Demand(10), 0.0)
    assert first.replica is not None
    first.replica.draining = True
    second = router.arrive(Demand(10), 0.0)
    waiting = router.arrive(Demand(10), 0.0)
    assert router.finish(first, 1.0) == []
    router.remove(first.replica.name if first.replica else "r0" if second.replica.name == "r1" else "r1")
    assert router.finish(second, 1.0) == [waiting]


def test_a_retry_goes_elsewhere_and_ends_after_three() -> None:
    router = fleet(3)
    ticket = router.arrive(Demand(10), 0.0)
    tried = [ticket.replica.name]
    for _ in range(2):
        router.finish(ticket, 0.0, failed=True)
        assert router.retry(ticket, 0.0)
        tried.append(ticket.replica.name)
    assert sorted(tried) == ["r0", "r1", "r2"]
    router.finish(ticket, 0.0, failed=True)
    assert not router.retry(ticket, 0.0)
    assert all(replica.running == replica.backlog == 0 for replica in router.replicas.values())


def test_a_retry_waits_before_all_others() -> None:
    router = fleet(2, capacity=Capacity(limit=1))
    first, second = (router.arrive(Demand(10), 0.0) for _ in range(2))
    waiting = router.arrive(Demand(10, priority=-5), 0.0)
    router.set_state(first.replica.name, State.DOWN, 0.0)
    router.finish(first, 0.0, failed=True)
    assert router.retry(first, 0.0) and first.replica is None
    assert router.finish(second, 1.0) == [first]
    assert router.finish(first, 2.0) == [waiting]


def test_breaker() -> None:
    breaker = Breaker(failures=2, cooldown_s=1.0, longest_s=4.0)
    breaker.ended(0.0, True)
    assert breaker.allows(0.0)
    breaker.ended(0.0, False)
    breaker.ended(0.0, True)
    breaker.ended(0.0, True)
    assert not breaker.allows(0.9) and breaker.allows(1.0)
    breaker.sent()
    assert not breaker.allows(1.0), "one trial at a time"
    breaker.ended(1.0, None)
    assert breaker.allows(1.0), "a client that left says nothing"
    opened = []
    for now in (1.0, 3.0, 7.0, 11.0):
        breaker.sent()
        breaker.ended(now, True)
        opened.append(next(later for later in range(20) if breaker.allows(now + later)))
    assert opened == [2, 4, 4, 4]
    breaker.sent()
    breaker.ended(20.0, False)
    assert breaker.closed


def test_a_failing_replica_is_left_alone_and_tried_again() -> None:
    router = fleet(2, least_work)
    router.set_state("r1", State.DOWN, 0.0)
    for _ in range(3):
        router.finish(router.arrive(Demand(10), 0.0), 0.0, failed=True)
    waiting = router.arrive(Demand(10), 0.0)
    assert waiting.replica is None, "r0 is up, but its circuit is open"
    assert router.dispatch(0.5) == []
    assert router.dispatch(1.5) == [waiting]


def test_a_session_stays_until_its_replica_is_full() -> None:
    router = fleet(2, least_work, capacity=Capacity(limit=5))
    names = [sent(router, Demand(1000, session="s")) for _ in range(10)]
    assert len(set(names[:5])) == 1 and len(set(names[5:])) == 1 and names[0] != names[5]


def test_rows_of_batches_take_the_room_that_replicas_say_and_no_place_of_online_requests() -> None:
    router = fleet(2, capacity=Capacity(limit=2))
    assert router.row_limit(0.0) == 0 and router.send_row(Demand(100), 1, 0.0) is None
    router.replicas["r0"].row_limit, router.replicas["r1"].row_limit = 3, 2
    assert router.row_limit(0.0) == 5
    rows = [router.send_row(Demand(100), 1, 0.0) for _ in range(6)]
    assert Counter(row.replica.name for row in rows if row is not None) == {"r0": 3, "r1": 2} and rows[5] is None
    online = [router.arrive(Demand(100), 0.0) for _ in range(5)]
    assert [ticket.replica is None for ticket in online] == [False] * 4 + [True], "rows count in no limit"
    router.finish(rows[0], 1.0)
    assert router.row_limit(1.0) == 0, "no row before a request that waits"
    router.finish(online[0], 1.0)
    assert router.send_row(Demand(100), 1, 1.0).replica is router.replicas["r0"]
    assert sum(replica.running for replica in router.replicas.values()) == 4


def test_a_row_with_more_choices_than_there_is_room_runs_alone() -> None:
    router = fleet(1)
    router.replicas["r0"].row_limit = 2
    row = router.send_row(Demand(100), 5, 0.0)
    assert row is not None and router.send_row(Demand(100), 1, 0.0) is None
    router.finish(row, 0.0)
    router.set_state("r0", State.STALLED, 0.0)
    assert router.row_limit(0.0) == 0 and router.send_row(Demand(100), 1, 0.0) is None


def test_prompt_tokens_that_a_replica_has_do_not_arrive() -> None:
    router = fleet(1)
    arrivals, prompt = Arrivals(router.totals), Demand(1000, chunk_hashes(b"x" * 4000, 400))
    computed(router, prompt)
    assert arrivals.rates(2.0) == (0.5, 500.0)
    for _ in range(4):
        computed(router, prompt)
    requests, tokens = arrivals.rates(2.0)
    assert requests == 2.0 and 0 < tokens < 300, "most of a known prompt is cached"
    assert arrivals.rates(1.0) == (0.0, 0.0)


def test_the_fleet_learns_its_speed_and_stays_even_while_idle() -> None:
    router, now, names = fleet(4), 0.0, Counter[str]()
    for _ in range(400):
        now += 1.0
        ticket = router.arrive(Demand(2000), now)
        names[ticket.replica.name] += 1
        router.first_token(ticket, now + 0.05)
        router.finish(ticket, now + 0.06)
    assert router.replicas["r0"].prefill_tokens_s == pytest.approx(40_000, rel=0.05)
    assert min(names.values()) > 60


def test_a_slow_replica_gets_fewer_requests() -> None:
    router, now, open_tickets, names = fleet(2, least_work), 0.0, [], Counter[str]()
    for _ in range(400):
        now += 0.2
        for ticket in [ticket for ticket in open_tickets if ticket[0] <= now]:
            open_tickets.remove(ticket)
            router.finish(ticket[1], now)
        ticket = router.arrive(Demand(2000), now)
        names[ticket.replica.name] += 1
        open_tickets.append((now + (1.5 if ticket.replica.name == "r0" else 0.3), ticket))
    assert names["r1"] > 3 * names["r0"] > 0


def test_random_operations_leave_nothing_behind() -> None:
    """Whatever happens to requests and replicas, each request ends once, and counts return to zero."""
    chance = random.Random(1)
    router = fleet(5, capacity=Capacity(limit=3), max_waiting=10)
    open_tickets, now = [], 0.0
    for _ in range(3000):
        now += chance.random()
        action = chance.random()
        if action < 0.45:
            try:
                chunks = tuple(range(chance.randrange(5)))
                open_tickets.append(
                    router.arrive(Demand(chance.randrange(1, 900), chunks, str(chance.randrange(3))), now)
                )
            except (Overloaded, Unavailable):
                continue
        elif action < 0.85 and open_tickets:
            ticket = open_tickets.pop(chance.randrange(len(open_tickets)))
            if chance.random() < 0.5:
                router.first_token(ticket, now)
            waited = ticket.replica is None
            router.finish(ticket, now, failed=chance.choice([True, False, None]))
            if not waited and chance.random() < 0.3 and router.retry(ticket, now):
                open_tickets.append(ticket)
        elif action < 0.97:
            router.set_state(f"r{chance.randrange(5)}", chance.choice(list(State)), now)
        else:
            name = f"r{chance.randrange(5)}"
            router.add(name, Capacity(limit=3))
        assert all(0 <= replica.running <= 3 and replica.backlog >= 0 for replica in router.replicas.values())
    for ticket in open_tickets:
        router.finish(ticket, now, failed=None)
    assert not router.queue
    assert all(replica.running == replica.backlog == 0 for replica in router.replicas.values())


def test_queue_classes_and_tenants() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(6):
        queue.push(f"big{number}", "big", 0, 100)
    for number in range(3):
        queue.push(f"small{number}", "small", 0, 100)
    queue.push("batch", "small", 10, 1)
    queue.push("urgent", "big", -10, 1000)
    queue.remove("big1")
    order = [queue.pop() for _ in range(len(queue))]
    assert order[0] == "urgent" and order[-1] == "batch" and "big1" not in order
    assert order[1:6] == ["big0", "small0", "small1", "big2", "small2"]
    with pytest.raises(IndexError):
        queue.pop()


def test_tenants_share_by_tokens() -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for number in range(100):
        queue.push(("long", number), "long", 0, 1000)
        queue.push(("short", number), "short", 0, 100)
    counts = Counter(queue.pop()[0] for _ in range(44))
    assert counts == {"short": 40, "long": 4}


def test_index_finds_the_longest_prefix_per_replica() -> None:
    index = PrefixIndex(chunk_tokens=10)
    for replica in (1, 2):
        index.add_replica(replica, 1000)
    index.add(1, (1, 2, 3))
    index.add(2, (1, 2, 3, 4))
    assert index.hits((1, 2, 3, 4, 5)) == {1: 30, 2: 40}
    assert index.hits((1, 9, 3)) == {1: 10, 2: 10} and index.hits((9, 1)) == {}
    index.remove_replica(2)
    assert index.hits((1, 2, 3, 4)) == {1: 30}


def test_index_is_bounded_and_drops_the_ends_of_old_prefixes_first() -> None:
    index = PrefixIndex(max_bytes=10 * ENTRY_BYTES, chunk_tokens=1)
    index.add_replica(1, 1000)
    index.add(1, range(8))
    index.add(1, range(100, 106))
    assert len(index) == 10 and index.used_bytes <= 10 * ENTRY_BYTES
    assert index.hits(range(8)) == {1: 4} and index.hits(range(100, 106)) == {1: 6}


def test_index_forgets_what_a_small_cache_has_evicted() -> None:
    index = PrefixIndex(chunk_tokens=10)
    index.add_replica(1, 50)
    index.add(1, (1, 2, 3))
    index.add(1, (1, 2, 3, 4))
    assert index.hits((1, 2, 3)) == {1: 30}
    index.add(1, range(10, 15))
    assert index.hits((1, 2, 3)) == {}


def test_index_keeps_a_bounded_number_of_holders() -> None:
    index = PrefixIndex(chunk_tokens=10)
    for replica in range(100):
        index.add_replica(replica, 1000)
        index.add(replica, (1,))
    assert set(index.hits((1,))) == set(range(100 - MAX_HOLDERS, 100))


def test_hashes_chain_and_are_salted() -> None:
    first, second = chunk_hashes(b"a" * 35, 10), chunk_hashes(b"a" * 20 + b"b" * 10, 10)
    assert len(first) == len(second) == 3 and first[:2] == second[:2] and first[2] != second[2]
    assert not set(first) & set(chunk_hashes(b"a" * 35, 10, b"tenant"))


def test_progress() -> None:
    progress = Progress(stall_s=1.0)
    assert progress.checked(0.0, 5, 0, 2) is State.UP
    assert progress.checked(0.9, 5, 0, 2) is State.UP
    assert progress.checked(1.1, 5, 0, 2) is State.STALLED
    assert progress.checked(1.2, 5, 1, 2) is State.UP, "a byte came"
    assert progress.checked(3.0, 6, 1, 2) is State.UP, "a step was made"
    assert progress.checked(9.0, 6, 1, 0) is State.UP, "nothing to do is no stall"
    assert progress.failed() is State.DOWN
    quiet = Progress(stall_s=1.0)
    assert [quiet.checked(now, None, 0, 1) for now in (0.0, 50.0)] == [State.UP, State.UP], "it reports no steps"
