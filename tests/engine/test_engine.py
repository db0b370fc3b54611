"""The engine as the service sees it: orders in, deltas out, nothing lost and nothing that can end it."""

from __future__ import annotations

import dataclasses
import math
import signal
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ridgeline.core.events import LateWork, StepCounts, StepUpdates, Update
from ridgeline.engine import process
from ridgeline.engine.engine import Engine
from ridgeline.engine.local import LocalEngine
from ridgeline.engine.process import serve
from ridgeline.metrics.account import Accounted
from ridgeline.wire.frames import FrameBuffer, down_decoder, encode
from ridgeline.wire.inbox import Inbox
from ridgeline.wire.messages import Cancel, Control, Delta, Deltas, Finish, Heartbeat, Reply, StepStats
from tests.engine.constrained import engine_of, make, submit
from tests.engine.helpers import VOCAB, Bench, oracle


def test_a_request_runs_to_its_end_and_its_news_are_complete() -> None:
    local = LocalEngine(make(depth=1))
    prompt = list(range(9))
    news = list(local.run([submit("a", prompt, max_tokens=6, seed=3, ignore_eos=True)]))
    assert [token for delta in news for token in delta.tokens] == oracle(prompt, 6, seed=3)
    assert news[0].cached == 0
    assert news[-1].finish == "length" and news[-1].times is not None
    assert all(not delta.finish for delta in news[:-1])


def turned(engine: Engine, steps: int, last_step: int) -> Any:
    """The frame of a turn that commits so many steps, changes no other figure and ends with `last_step`."""
    scheduler = engine.loop.scheduler
    scheduler.last_step = last_step - steps

    def turn() -> StepUpdates:
        scheduler.last_step += steps
        return StepUpdates()

    engine.loop.turn = turn  # type: ignore[method-assign]
    return engine.turn()


def test_a_record_has_each_figure_in_its_place() -> None:
    """They are told apart by their order alone."""
    engine = make(depth=0)
    for number in range(5):
        engine.handle(submit(f"{number}", [1, 2, 3], max_tokens=20, ignore_eos=True))
    for _ in range(4):
        engine.turn()
    loop, scheduler, pool = engine.loop, engine.loop.scheduler, engine.loop.scheduler.leases.pool
    figures = iter(range(1000, 2000))
    names = [field.name for field in dataclasses.fields(StepCounts)]
    counts = StepCounts(**{name: next(figures) for name in names})  # type: ignore[arg-type]
    scheduler.counts = counts
    account = Accounted(*(float(next(figures)) for _ in Accounted._fields))
    late = [LateWork("compile", "kernel", 1.0)]
    parts: Any = {"account": SimpleNamespace(step=lambda *_: account), "late": SimpleNamespace(take=lambda: late)}
    engine.setup = dataclasses.replace(engine.setup, **parts)
    loop.plan_s, loop.commit_s, engine.reply_s, loop.device_s, loop.idle_s = (float(next(figures)) for _ in range(5))
    scheduler.leases.waste_inside = lambda running: 0.25  # type: ignore[method-assign]
    reply_s = engine.reply_s
    frame = turned(engine, steps=1, last_step=32)  # the waste is read in every 32nd step
    record = frame.stats
    expected = {
        **{name: getattr(counts, name) for name in names},
        **account._asdict(),
        **{name: getattr(loop, name) for name in ("plan_s", "commit_s", "device_s", "idle_s")},
        **{f"blocks_{name}": getattr(pool, name) for name in ("used", "cached", "total")},
        "step": scheduler.last_step,
        "running": len(scheduler.running),
        "waiting": scheduler.queued,
        "waste_inside": 0.25,
        "waste_between": scheduler.layout.padding,
        "host_s": loop.plan_s + loop.commit_s + reply_s,
        "reply_s": reply_s,
        "steps": 1,
        "late": late,
        "expert_tokens": [],
        "tiers": [],
        "pins": [("blocks", "", 0), ("prefixes", "", 0)],
        "rank_tokens": [],
    }
    assert {name: getattr(record, name) for name in StepStats.__struct_fields__} == expected
    assert len({expected[name] for name in ("step", "running", "waiting", "steps")}) == 4
    engine.handle(Cancel("4"))  # the queue changes, and no step follows
    idle = turned(engine, steps=0, last_step=32).stats
    assert (idle.steps, idle.idle_s, idle.flops, idle.late) == (0, 0.0, 0.0, late)


def test_end_tokens_of_the_model_stop_unless_ignored() -> None:
    prompt = list(range(9))
    text = oracle(prompt, 200, seed=3, stop=(5,))
    assert text[-1] == 5
    news = list(LocalEngine(make()).run([submit("a", prompt, max_tokens=200, seed=3)]))
    assert news[-1].finish == "stop" and news[-1].stop_id == 5
    assert sum(len(delta.tokens) for delta in news) == len(text)


def test_max_tokens_is_cut_at_the_context() -> None:
    news = list(LocalEngine(make(blocks=80)).run([submit("a", [1] * 250, max_tokens=None, ignore_eos=True)]))
    assert sum(len(delta.tokens) for delta in news) == 6 and news[-1].finish == "length"


@pytest.mark.parametrize(
    ("tokens", "options", "word"),
    [
        ([], {}, "prompt"),
        ([1] * 256, {}, "255"),
        ([VOCAB], {}, "token id"),
        ([-1], {}, "token id"),
        ([1], {"stop_token_ids": tuple(range(20, 40))}, "stop_token_ids"),
        ([1] * 90, {"max_tokens": 100}, "KV cache"),
    ],
)
def test_what_can_never_run_is_refused_with_a_reason(tokens: list[int], options: dict[str, Any], word: str) -> None:
    engine = make(blocks=30)
    local = LocalEngine(engine)
    (refusal,) = local.run([submit("bad", tokens, **options)])
    assert refusal.finish == "refused" and word in refusal.error
    assert engine.idle
    assert list(local.run([submit("good", [1, 2], max_tokens=2)]))[-1].finish


def test_a_stop_string_found_by_the_service_ends_the_choice_silently() -> None:
    engine = make(depth=1)
    engine.handle(submit("a", [1, 2], max_tokens=50, n=2, ignore_eos=True))
    for _ in range(6):
        engine.turn()
    engine.handle(Finish("a", 0, "stop", 2))
    engine.handle(Finish("a", 0, "stop", 2))
    later = [delta for _ in range(200) if (frame := engine.turn()) for delta in frame.each()]
    assert engine.idle
    assert {delta.choice for delta in later} == {1}


def test_orders_are_answered() -> None:
    engine = make()
    (stats,) = engine.handle(Control("1", "stats"))
    assert isinstance(stats, Reply)
    assert stats.facts["free"] + stats.facts["used"] == stats.facts["total"] and stats.facts["model"] == "toy"
    list(LocalEngine(engine).run([submit("a", list(range(20)), max_tokens=2)]))
    (reset,) = engine.handle(Control("2", "reset_prefix_cache"))
    assert isinstance(reset, Reply) and reset.facts["forgotten"] == 5
    (unknown,) = engine.handle(Control("3", "dance"))
    assert isinstance(unknown, Reply) and "dance" in unknown.facts["error"]
    engine.handle(Control("4", "drain"))
    engine.handle(submit("late", [1]))
    refused = engine.turn()
    assert refused is not None and "shutting down" in refused.deltas[0].error and engine.idle


def test_closing_the_news_cancels_what_is_left() -> None:
    engine = make(depth=1)
    local = LocalEngine(engine)
    news = local.run([submit("a", [1, 2], max_tokens=100, ignore_eos=True)])
    next(news)
    news.close()
    assert engine.idle and engine.loop.scheduler.leases.pool.used == 0


def test_step_records_add_up() -> None:
    stats = []
    local = LocalEngine(make(depth=1), stats.append)
    list(local.run([submit(f"r{i}", list(range(10 + i)), max_tokens=5, ignore_eos=True) for i in range(4)]))
    assert sum(record.output_tokens for record in stats) == 20
    assert (
        sum(record.prompt_tokens for record in stats) + sum(record.prefix_hits for record in stats) == 10 + 11 + 12 + 13
    )
    assert all(0 <= record.waste_inside < 1 for record in stats)
    assert all(record.host_s == record.plan_s + record.commit_s + record.reply_s > 0 for record in stats)
    assert all(record.plan_s > 0 and record.commit_s > 0 for record in stats) and all(
        record.reply_s > 0 for record in stats[1:]
    )


@pytest.mark.parametrize("end", ["cancel", "finish"])
def test_the_last_to_go_is_told_though_no_step_follows(end: str) -> None:
    """What operators see never shows requests that have gone; the record counts no step."""
    engine = make()
    engine.handle(submit("a", [1, 2], max_tokens=50, ignore_eos=True))
    frame = engine.turn()
    assert frame is not None and frame.stats is not None
    assert (frame.stats.running, frame.stats.steps, frame.stats.step) == (1, 1, 1)
    engine.handle(Cancel("a") if end == "cancel" else Finish("a", 0, "stop", 1))
    frame = engine.turn()
    assert frame is not None and frame.stats is not None
    assert (frame.stats.running, frame.stats.waiting, frame.stats.blocks_used, frame.stats.steps) == (0, 0, 0, 0)
    assert engine.turn() is None and engine.idle


def test_who_waits_for_a_batch_is_counted_before_it_opens() -> None:
    engine = make(batching="static:2")
    engine.handle(submit("a", [1, 2], max_tokens=2))
    frame = engine.turn()
    assert frame is not None and frame.stats is not None and (frame.stats.waiting, frame.stats.steps) == (1, 0)
    assert engine.turn() is None and 9 < engine.loop.wait_seconds() < 10


def test_the_local_engine_sleeps_until_a_batch_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(batching="dynamic:2,2500")
    engine = engine_of(bench)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        bench.clock.now += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    news = list(LocalEngine(engine).run([submit("a", [1, 2], max_tokens=2, ignore_eos=True)]))
    assert news[-1].finish == "length"
    assert len(slept) <= 2 and 2.4 < sum(slept) < 2.5
    assert engine.loop.wait_seconds() == math.inf


def test_a_long_step_does_not_stop_the_pulse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beats go out while the loop is held up in one step, and tell that it does not turn."""
    monkeypatch.setattr(process, "HEARTBEAT_S", 0.005)
    ours, theirs = socket.socketpair()
    engine = make()
    launch, go = engine.loop.runner.launch, threading.Event()
    engine.loop.runner.launch = lambda plan: (go.wait(20), launch(plan))[1]  # type: ignore[method-assign]
    thread = threading.Thread(target=serve, args=(engine, Inbox(theirs)), daemon=True)
    thread.start()
    ours.settimeout(20)
    ours.sendall(encode(submit("a", [1, 2, 3], max_tokens=1, ignore_eos=True)))
    buffer, decoder = FrameBuffer(), down_decoder()
    turns: list[int] = []
    while turns.count(engine.loop.turns) < 3 or not engine.loop.scheduler.steps_in_flight:
        buffer.feed(ours.recv(1 << 16))
        messages = [decoder.decode(body) for body in buffer.take()]
        assert not any(isinstance(message, Deltas) and message.deltas for message in messages)
        turns += [message.turn for message in messages if isinstance(message, Heartbeat)]
    go.set()
    ours.sendall(encode(Control("x", "stop")))
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize("depth", [0, 1])
def test_records_name_the_step_that_was_committed(depth: int) -> None:
    stats: list[StepStats] = []
    local = LocalEngine(make(depth=depth, fail_at=[2]), stats.append)
    news = list(local.run([submit("a", [1, 2], max_tokens=9, ignore_eos=True)]))
    assert [(record.step, record.steps, record.failed) for record in stats[:2]] == [(1, 1, 0), (2, 1, 1)]
    assert news[-1].finish == "error"


def test_times_come_with_the_first_tokens_and_with_the_end() -> None:
    """A choice that the service ends itself is never told its end, but its waiting time must be known."""
    news = list(LocalEngine(make()).run([submit("a", [1, 2], max_tokens=5, ignore_eos=True)]))
    assert [delta.times is not None for delta in news] == [True, False, False, False, True]
    first, last = news[0].times, news[-1].times
    assert first is not None and last is not None
    assert first[:2] == last[:2] and first[2] == 0 < last[2]


def test_the_process_serves_over_its_socket_until_told_to_stop() -> None:
    """The real inbox and the real serving loop: submit, cancel, beats while idle, stop."""
    ours, theirs = socket.socketpair()
    engine = make()
    thread = threading.Thread(target=serve, args=(engine, Inbox(theirs)), daemon=True)
    thread.start()
    ours.settimeout(20)
    ours.sendall(encode(submit("a", [1, 2, 3], max_tokens=4, seed=0, ignore_eos=True)))
    buffer, decoder = FrameBuffer(), down_decoder()
    tokens: list[int] = []
    beats = 0
    while not beats or len(tokens) < 4:
        buffer.feed(ours.recv(1 << 16))
        for body in buffer.take():
            message = decoder.decode(body)
            beats += isinstance(message, Heartbeat)
            if isinstance(message, Deltas):
                tokens += [token for delta in message.each() for token in delta.tokens]
    assert tokens == oracle([1, 2, 3], 4)
    ours.sendall(encode(Cancel("unknown")) + encode(Control("x", "stop")))
    thread.join(20)
    assert not thread.is_alive()


def test_deltas_carry_every_field_of_an_update() -> None:
    """The border's Delta and the scheduler's Update are one record; nothing is dropped between them. The engine adds tickets."""
    assert [*(field.name for field in dataclasses.fields(Update)), "ticket"] == list(Delta.__struct_fields__)


@pytest.fixture()
def interrupts() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, as in a shell; a process that is started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("depth", [0, 1])
def test_an_interrupt_in_a_step_ends_the_requests_and_the_engine_goes_on(depth: int) -> None:
    engine = make(depth=depth)
    local = LocalEngine(engine)
    plain, steps = engine.loop.runner.collect, 0

    def collect() -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:
            signal.raise_signal(signal.SIGINT)  # between taking a result and committing it, say
        return plain()

    engine.loop.runner.collect = collect  # type: ignore[method-assign]
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        list(local.run([submit("a", list(range(20)), max_tokens=50), submit("b", [1, 2], max_tokens=50)]))
    assert steps >= 3 and engine.idle and signal.getsignal(signal.SIGINT) is before
    assert sum(len(delta.tokens) for delta in local.run([submit("c", [1, 2, 3], max_tokens=7, ignore_eos=True)])) == 7


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_between_steps_comes_at_once() -> None:
    local = LocalEngine(make())
    with pytest.raises(KeyboardInterrupt):
        for _ in local.run([submit("a", [1, 2], max_tokens=50)]):
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("the interrupt waited")
    assert local.engine.idle
