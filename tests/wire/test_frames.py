"""Frames survive any split of the stream; every message comes back as it went."""

from __future__ import annotations

import asyncio
import socket

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import ConfigError, EngineFailed
from ridgeline.core.plan import TokenLogprobs
from ridgeline.core.sampling import Grammar, SamplingParams
from ridgeline.wire.config import encode_config, receive_config
from ridgeline.wire.frames import LENGTH, FrameBuffer, body_length, down_decoder, encode, read_body, up_decoder
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

SAMPLING = SamplingParams(
    temperature=0.5, logit_bias=((3, -1.5),), stop=("x",), grammar=Grammar("regex", "a+"), logprobs=2, seed=-5
)
UP = [
    Submit("a", [1, 2, 3], SAMPLING, 12.5, -1, "salt", False),
    Cancel("a"),
    Finish("a", 1, "stop", 3),
    Control("c", "stats"),
]
SCORES = [TokenLogprobs(5, -0.5, 1, (5, 6), (-0.5, -1.0), 2.5)]
DOWN = [
    Deltas(
        1,
        [Delta("a", 0, [5], "stop", 5, 16, "", SCORES, SCORES, (0.1, 0.2, 0.3, 0)), Delta("b", 1)],
        StepStats(*range(13), 0.5, 0.25, 0.1, 0.2),
    ),
    Deltas(2, [], None, ["a", "b"], [0, 3], [17, 128_000]),
    Ready({"max_len": 5, "nested": {"a": [1.5]}}),
    Loading("weights", 1, 2),
    Heartbeat(5, True),
    Reply("c", {"free": 1}),
    Failed("because", "DoesNotFit"),
]


@pytest.mark.parametrize("message", UP, ids=lambda message: type(message).__name__)
def test_up_round_trip(message):
    assert up_decoder().decode(encode(message)[LENGTH.size :]) == message


@pytest.mark.parametrize("message", DOWN, ids=lambda message: type(message).__name__)
def test_down_round_trip(message):
    assert down_decoder().decode(encode(message)[LENGTH.size :]) == message


@given(st.lists(st.integers(1, 40), max_size=60))
@settings(max_examples=50, deadline=None)
def test_any_split_gives_the_same_frames(cuts):
    stream = b"".join(encode(message) for message in UP)
    held, bodies, start = FrameBuffer(), [], 0
    for cut in [*cuts, len(stream)]:
        held.feed(stream[start : start + cut])
        bodies += held.take()
        start += cut
    assert [up_decoder().decode(body) for body in bodies] == UP


def test_a_length_that_cannot_be_ends_the_stream():
    held = FrameBuffer()
    held.feed(b"\xff\xff\xff\xffxxxx")
    with pytest.raises(EngineFailed, match="the stream is corrupt"):
        held.take()
    assert body_length(b"\x05\x00\x00\x00") == 5


async def test_read_body_ends_with_the_stream_also_inside_a_frame():
    reader = asyncio.StreamReader()
    frame = encode(Heartbeat(1, False))
    reader.feed_data(frame + frame[:-1])
    reader.feed_eof()
    assert await read_body(reader) == frame[LENGTH.size :]
    assert await read_body(reader) is None


def test_config_crosses_and_leaves_what_follows():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        model, engine = ModelConfig(model="m", max_model_len=7), EngineConfig(batching="static:2")
        ours.sendall(encode_config(model, engine) + b"next")
        order = receive_config(theirs)
        assert (order.model, order.engine) == (model, engine)
        assert theirs.recv(10) == b"next"
        ours.sendall(LENGTH.pack(2) + b"[]")
        with pytest.raises(ConfigError):
            receive_config(theirs)
        ours.close()
        with pytest.raises(ConfigError, match="closed"):
            receive_config(theirs)


def test_unknown_message_is_an_error():
    with pytest.raises(msgspec.ValidationError):
        up_decoder().decode(msgspec.msgpack.encode(["nonsense", "id"]))
