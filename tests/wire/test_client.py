"""EngineClient against a scripted peer: order, cancel, failure, silence."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest
from msgspec.structs import replace

from ridgeline.core.errors import ConfigError, DoesNotFit, EngineFailed, RidgelineError, Unavailable
from ridgeline.core.sampling import SamplingParams
from ridgeline.wire.client import FAILURES, SILENCE_S, STALL_S, EngineClient
from ridgeline.wire.frames import encode, read_body, up_decoder
from ridgeline.wire.messages import (
    Cancel,
    Control,
    Delta,
    Deltas,
    Failed,
    Finish,
    Heartbeat,
    Loading,
    Ready,
    Reply,
    StepStats,
    Submit,
)

STATS = StepStats(7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 4, 0.0, 0.0, 0.0, 0.0)


class Peer:
    """The engine's end, by hand, and a clock that stands still."""

    def __init__(self) -> None:
        self.now = 100.0
        self.steps: list[StepStats] = []

    @classmethod
    async def start(cls, **options) -> Peer:
        """clock: of the client; by default that of the peer."""
        peer = cls()
        ours, theirs = socket.socketpair()
        peer.reader, peer.writer = await asyncio.open_connection(sock=theirs)
        reader, writer = await asyncio.open_connection(sock=ours)
        peer.client = EngineClient(reader, writer, on_step=peer.steps.append, **{"clock": lambda: peer.now, **options})
        return peer

    def send(self, *messages) -> None:
        for message in messages:
            self.writer.write(encode(message))

    async def hear(self):
        body = await asyncio.wait_for(read_body(self.reader), 5)
        return None if body is None else up_decoder().decode(body)


@pytest.fixture
async def peer():
    made = await Peer.start()
    yield made
    await made.client.close()
    made.writer.close()


def request(name: str = "a", **sampling) -> Submit:
    return Submit(name, [1, 2], SamplingParams(**sampling), 0.0)


async def take_all(subscription) -> list[Delta]:
    deltas = []
    while not subscription.over:
        deltas += await asyncio.wait_for(subscription.take(), 5)
    return deltas


async def test_ready_brings_facts_and_loading_is_seen(peer):
    peer.send(Loading("weights", 2, 5))
    while peer.client.loading is None:
        await asyncio.sleep(0)
    assert "weights 2/5" in peer.client.trouble
    peer.send(Ready({"max_len": 9}))
    assert await peer.client.wait_ready() == {"max_len": 9}
    assert peer.client.trouble is None


async def test_deltas_reach_their_request_in_order(peer):
    first, two = peer.client.submit(request("a")), peer.client.submit(request("b", n=2))
    assert await peer.hear() == request("a")
    assert await peer.hear() == request("b", n=2)
    assert peer.client.open_choices == 3
    peer.send(
        Deltas(1, [Delta("b", 1, [5])], None, ["a", "nobody"], [0, 0], [1, 9]),
        Deltas(2, [Delta("a", 0, [2], "stop"), Delta("b", 0, [6], "length"), Delta("b", 1, [7], "stop")], STATS),
    )
    assert [delta.tokens for delta in await take_all(first)] == [[1], [2]]
    assert [(delta.choice, delta.tokens) for delta in await take_all(two)] == [(1, [5]), (0, [6]), (1, [7])]
    assert peer.client.open_choices == 0
    assert peer.steps == [STATS] and peer.client.last_step == 7


async def test_several_requests_are_read_together(peer):
    both = peer.client.submit(request("a"), request("b"))
    peer.send(Deltas(1, [Delta("b", 0, [1], "stop")]), Deltas(2, [Delta("a", 0, [2], "stop")]))
    assert [delta.id for delta in await take_all(both)] == ["b", "a"]
    with pytest.raises(ValueError, match="in use"):
        peer.client.submit(request("c"))
        peer.client.submit(request("d"), request("c"))


async def test_close_cancels_once_and_only_what_runs(peer):
    subscription = peer.client.submit(request("a"), request("b"))
    await peer.hear(), await peer.hear()
    peer.send(Deltas(1, [Delta("a", 0, [1], "stop")]))
    await subscription.take()
    subscription.close()
    subscription.close()
    peer.client.send(Control("end", "stats"))
    assert await peer.hear() == Cancel("b")
    assert await peer.hear() == Control("end", "stats")
    assert subscription.over


async def test_a_choice_the_service_ended_hears_no_more(peer):
    subscription = peer.client.submit(request("a", n=2))
    await peer.hear()
    subscription.finish("a", 0, "stop", 3)
    subscription.finish("a", 0, "stop", 3)
    peer.send(Deltas(1, [Delta("a", 0, [1]), Delta("a", 1, [2], "stop")]))
    assert [delta.choice for delta in await take_all(subscription)] == [1]
    assert await peer.hear() == Finish("a", 0, "stop", 3)


async def test_silence_is_an_empty_list(peer):
    subscription = peer.client.submit(request())
    assert await subscription.take(0.01) == []
    assert not subscription.over


async def test_control_is_answered_or_fails(peer):
    asked = asyncio.ensure_future(peer.client.control("stats"))
    order = await peer.hear()
    peer.send(Reply(order.id, {"free": 3}))
    assert await asked == {"free": 3}
    with pytest.raises(EngineFailed, match="did not answer"):
        await peer.client.control("stats", timeout=0.01)
    asked = asyncio.ensure_future(peer.client.control("drain"))
    await asyncio.sleep(0)
    peer.writer.close()
    with pytest.raises(EngineFailed, match="ended"):
        await asked


@pytest.mark.parametrize("end", ["eof", "failed", "gap", "garbage"])
async def test_every_end_of_the_engine_reaches_every_request(peer, end):
    peer.send(Ready({}), Deltas(1, []))
    first, two = peer.client.submit(request("a")), peer.client.submit(request("b", n=2))
    await peer.hear(), await peer.hear()
    peer.send(Deltas(2, [Delta("a", 0, [1])]))
    if end == "eof":
        peer.writer.close()
    elif end == "failed":
        peer.send(Failed("out of memory: use a smaller model."))
    elif end == "gap":
        peer.send(Deltas(4, []))
    else:
        peer.writer.write(b"\x01\x00\x00\x00\xc1")
    news = await take_all(first)
    assert news[0].tokens == [1] and news[-1].finish == "error"
    assert [(delta.choice, delta.finish) for delta in await take_all(two)] == [(0, "error"), (1, "error")]
    assert peer.client.failure and peer.client.failure == news[-1].error == peer.client.trouble
    assert peer.client.open_choices == 0
    with pytest.raises(Unavailable, match="Send the request again"):
        peer.client.submit(request("c"))
    with pytest.raises(EngineFailed):
        await peer.client.wait_ready()


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("ConfigError", ConfigError),
        ("DoesNotFit", DoesNotFit),
        ("EngineFailed", EngineFailed),
        ("KeyError", EngineFailed),
    ],
)
async def test_a_mistake_of_the_users_is_told_from_a_failure(peer, kind: str, error: type[RidgelineError]):
    """The command line ends with 2 for the one and with 1 for the other."""
    peer.send(Failed("give another model.", kind))
    with pytest.raises(RidgelineError, match="another model") as caught:
        await peer.client.wait_ready()
    assert type(caught.value) is error


async def test_last_words_say_why_the_process_ended():
    async def last_words() -> str:
        return "it was killed"

    peer = await Peer.start(last_words=last_words)
    peer.writer.close()
    with pytest.raises(EngineFailed, match="it was killed"):
        await peer.client.wait_ready()
    await peer.client.close()


async def test_a_refused_message_ends_its_request(peer):
    subscription = peer.client.submit(request("a"))
    peer.send(Reply("a", {"error": "could not read it"}))
    assert (await take_all(subscription))[0].error == "could not read it"


async def test_a_reader_that_falls_behind_is_cut_off():
    peer = await Peer.start()
    peer.client.max_unread = 100
    subscription = peer.client.submit(request("a", max_tokens=None))
    await peer.hear()
    for number in range(1, 10):
        peer.send(Deltas(number, [Delta("a", 0, list(range(50)))]))
    message = await peer.hear()
    assert message == Cancel("a", "slow_reader")
    news = await take_all(subscription)
    assert news[-1].finish == "error" and "slow" in news[-1].error and len(news) < 10
    assert subscription.cut == "slow_reader"
    await peer.client.close()


async def test_steps_that_only_fail_are_no_progress(peer):
    """A lost device fails every step: an engine that goes on failing is not healthy until a step succeeds."""
    peer.send(Ready({}))
    await peer.client.wait_ready()

    async def step(number: int, failed: int) -> None:
        peer.send(Deltas(number, [], replace(STATS, step=number, failed=failed)))
        while peer.client.last_step != number:
            await asyncio.sleep(0)

    for number in range(1, FAILURES):
        await step(number, 1)
        assert peer.client.trouble is None
    await step(FAILURES, 1)
    assert f"the last {FAILURES} steps of the engine failed" in peer.client.trouble
    await step(FAILURES + 1, 0)
    assert peer.client.trouble is None


async def test_trouble_tells_slow_from_stuck(peer):
    """A request that waits for its batch, or in a long step, is no trouble while the engine's heart beats."""
    peer.send(Ready({}))
    await peer.client.wait_ready()
    peer.now += SILENCE_S + 1
    assert "silent" in peer.client.trouble

    async def beats(turns, every: float = SILENCE_S - 1) -> None:
        for turn in turns:
            peer.now += every
            heard = peer.client.last_heard
            peer.send(Heartbeat(turn, True))
            while peer.client.last_heard == heard:
                await asyncio.sleep(0)

    await beats([1])
    peer.now += STALL_S + 1
    subscription = peer.client.submit(request())
    await beats([1, 1, 1])
    assert peer.client.trouble is None  # one long step, so far
    await beats([1] * int(STALL_S / (SILENCE_S - 1)))
    assert "has not finished a step" in peer.client.trouble
    await beats(range(2, 40))
    assert peer.client.trouble is None  # no step, but the heart turns
    peer.now += SILENCE_S + 1
    assert "silent" in peer.client.trouble
    subscription.close()


async def ready(peer) -> None:
    peer.send(Ready({}))
    await peer.client.wait_ready()


async def test_a_lost_engine_is_noticed_without_a_request(peer):
    await ready(peer)
    waiting = asyncio.ensure_future(peer.client.wait_lost())
    peer.writer.close()
    assert await asyncio.wait_for(waiting, 5) == "the engine process has ended." == peer.client.failure


@pytest.mark.parametrize("stuck", ["silent", "has not finished a step"])
async def test_a_stuck_engine_is_given_up(peer, stuck: str):
    await ready(peer)
    subscription = peer.client.submit(request())
    peer.now += STALL_S + 1
    if stuck == "has not finished a step":
        peer.client.last_heard = peer.now
    reason = await asyncio.wait_for(peer.client.wait_lost(), 5)
    assert stuck in reason and reason == peer.client.failure == peer.client.trouble
    (end,) = await take_all(subscription)
    assert (end.finish, end.error) == ("error", reason)
    with pytest.raises(Unavailable, match=stuck):
        peer.client.submit(request("b"))


async def test_a_service_that_is_late_itself_blames_no_engine():
    """Beats wait in the socket while the loop is blocked, again and again."""
    peer = await Peer.start(clock=None, silence_s=0.4)
    await ready(peer)
    waiting = asyncio.ensure_future(peer.client.wait_lost())
    for turn in range(4):
        peer.send(Heartbeat(turn, False))
        await asyncio.sleep(0)
        time.sleep(0.6)
        assert peer.client.trouble is None, "nothing was read meanwhile"
        await asyncio.sleep(0)
    peer.writer.close()
    assert await asyncio.wait_for(waiting, 10) == "the engine process has ended."


async def test_an_order_whose_reply_waits_unread_has_not_failed(peer):
    order = asyncio.create_task(peer.client.control("state", timeout=0.4))
    message = await peer.hear()
    peer.send(Reply(message.id, {"fine": 1}))
    await asyncio.sleep(0)
    time.sleep(0.6)
    assert await order == {"fine": 1}


async def test_silence_is_noticed_when_it_lasts_long_enough():
    peer = await Peer.start(clock=None, silence_s=0.2)
    await ready(peer)
    assert "silent" in await asyncio.wait_for(peer.client.wait_lost(), 10)
    await peer.client.close()
    peer.writer.close()


async def test_loading_may_take_any_time(peer):
    waiting = asyncio.ensure_future(peer.client.wait_lost())
    peer.now += 100 * STALL_S
    peer.send(Loading("weights", 1, 2))
    while peer.client.loading is None:
        await asyncio.sleep(0)
    assert not waiting.done()
    peer.send(Failed("out of memory"))
    assert await asyncio.wait_for(waiting, 5) == "out of memory"
