"""Messages between a replay and its engines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops.errors import WireError
from kvops.inference.channel import MESSAGE_BYTES_MAX, Failed, Inbox, Message, Ready, Stop, Work, encode

WORK = Work(index=3, arrival_ms=1.5, input_tokens=700, hash_ids=[0, 1 << 62], seen_pages=1, settled_pages=0)
MESSAGES = st.lists(
    st.sampled_from([WORK, Stop(), Ready(pid=7), Failed(what="w", fix="f", exit_code=2, trace="")]),
    max_size=8,
)


@given(messages=MESSAGES, cuts=st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_messages_survive_any_cutting_of_the_stream(messages: list[Message], cuts: list[int]) -> None:
    """A stream gives bytes in any pieces; messages come out whole and in order."""
    stream = b"".join(map(encode, messages))
    inbox = Inbox()
    found: list[Message] = []
    place = 0
    while place < len(stream):
        step = cuts[place % len(cuts)]
        found += inbox.feed(stream[place : place + step])
        place += step

    assert found == messages


@pytest.mark.parametrize(
    "data",
    [
        (MESSAGE_BYTES_MAX + 1).to_bytes(4, "little"),
        b"\x03\x00\x00\x00abc",
        encode(Stop())[:4] + b"\xc1" * 20,
    ],
    ids=["huge", "no msgpack", "garbage"],
)
def test_what_is_no_message_ends_the_connection(data: bytes) -> None:
    """Neither memory for a made-up length nor an exception of the decoder."""
    with pytest.raises(WireError):
        Inbox().feed(data)
