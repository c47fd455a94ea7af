"""What a client keeps of its connections between calls, and after the last one."""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from kvops.net.auth import Hello
from kvops.net.link import Address, LinkState
from kvops.net.wire import Frame, Kind
from kvops.store.breaker import FAILURES_TO_OPEN
from kvops.store.channel import (
    IDLE_LINKS_MAX,
    REGIONS_AGAIN_S,
    Identity,
    Idle,
    MasterChannel,
    StoreChannel,
    Trouble,
)
from kvops.store.model import Reason, StoreInfo, StoreState
from tests.net.servers import HELLO, SECRET, Echo, serve_echo


class FakeLink:
    """A connection that is in order until it is closed."""

    def __init__(self) -> None:
        self.state = LinkState.READY

    def close(self) -> None:
        self.state = LinkState.CLOSED


def make_channel(*, same_memory: bool = True) -> StoreChannel:
    hello = Hello(
        role="client", group="g", name="c", host="h", numa_node=0, pid=1, boot_id="b", nonce=os.urandom(16)
    )
    info = StoreInfo(
        id=1,
        name="store-0",
        host="h",
        numa_node=0,
        incarnation=7,
        boot_id="b",
        pid=1,
        address="127.0.0.1:1",
        unix_path="",
        http_address="",
        state=StoreState.READY,
        capacity_bytes=0,
        populated_bytes=0,
        used_bytes=0,
        objects=0,
        transports=["shm", "tcp"],
    )
    return StoreChannel(info, Identity(hello=hello, secret=b"s" * 32), same_memory=same_memory)


class FakeMapping:
    """Memory of a store's incarnation."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.dropped = False

    def drop(self) -> None:
        self.dropped = True


def test_idle_links_are_bounded() -> None:
    """No more connections are kept than a few; the others are closed."""
    idle, links = Idle(), [FakeLink() for _ in range(IDLE_LINKS_MAX + 1)]

    for link in links:
        idle.put(link)  # type: ignore[arg-type]

    assert [link.state for link in links].count(LinkState.CLOSED) == 1


def test_a_call_that_outlives_its_pool_leaves_no_connection() -> None:
    """A link that comes back after the pool was closed is closed, too."""
    idle, before, after = Idle(), FakeLink(), FakeLink()
    idle.put(before)  # type: ignore[arg-type]

    idle.close()
    idle.put(after)  # type: ignore[arg-type]

    assert (before.state, after.state) == (LinkState.CLOSED, LinkState.CLOSED)
    assert idle.take() is None


@pytest.mark.parametrize(
    ("closed", "incarnation", "kept"), [(False, 7, True), (False, 8, False), (True, 7, False)]
)
def test_memory_is_adopted_once_and_by_the_living(closed: bool, incarnation: int, kept: bool) -> None:
    """A mapping of another incarnation, a second one, or one for a closed pool is given up at once."""
    channel = make_channel()
    mapping, link, second = FakeMapping(incarnation), FakeLink(), FakeMapping(7)
    if closed:
        channel.close()

    channel.adopt(mapping, link)  # type: ignore[arg-type]

    assert mapping.dropped is not kept
    assert (channel.mapping is not None) is kept
    if kept:
        another: Any = FakeLink()
        channel.adopt(second, another)  # type: ignore[arg-type]
        assert second.dropped
        channel.close()
        assert mapping.dropped
        assert another.state is link.state is LinkState.CLOSED
    elif closed:
        assert link.state is LinkState.CLOSED


class Keeps(Echo):
    """A leader that answers questions, and keeps what it would have to promise to itself."""

    def frame(self, frame: Frame, body: bytes) -> None:
        if frame.kind == Kind.EXISTS:
            self.reply(frame, b"")


def test_calls_that_wait_side_by_side_are_one_silence() -> None:
    """A moment in which a leader says nothing fails all that wait then, and opens no breaker."""
    with (
        serve_echo(peer=Keeps) as address,
        closing(MasterChannel([address], Identity(hello=HELLO, secret=SECRET))) as channel,
        ThreadPoolExecutor(8) as threads,
    ):
        deadline = time.monotonic() + 30
        for _ in range(3):
            list(threads.map(lambda _: channel.call(Kind.EXISTS, b"", deadline=deadline), range(100)))
            together = time.monotonic() + 0.1
            waited = [threads.submit(channel.call, Kind.PUT_END, b"", deadline=together) for _ in range(8)]
            assert all(isinstance(one.exception(), Trouble) for one in waited)
            assert not channel.open


def timeouts(channel: MasterChannel, count: int) -> list[Reason]:
    """What becomes of so many calls whose answers never come."""
    found = []
    for _ in range(count):
        with pytest.raises(Trouble) as trouble:
            channel.call(Kind.PUT_END, b"", deadline=time.monotonic() + 0.02)
        found.append(trouble.value.reason)
    return found


def test_a_leader_that_keeps_an_answer_is_not_gone() -> None:
    """It waits for its standbys: such calls end at their deadline, and all others still go to it."""
    with (
        serve_echo(peer=Keeps) as address,
        closing(MasterChannel([address], Identity(hello=HELLO, secret=SECRET))) as channel,
    ):
        channel.call(Kind.EXISTS, b"", deadline=time.monotonic() + 30)

        reasons = timeouts(channel, 4 * FAILURES_TO_OPEN)
        channel.call(Kind.EXISTS, b"", deadline=time.monotonic() + 30)

    assert set(reasons) == {Reason.TIMEOUT}
    assert not channel.open


def test_a_leader_that_says_nothing_is_gone() -> None:
    """Its kernel takes connections while the process hangs: nobody waits for it more than twice."""
    with socket.create_server(("127.0.0.1", 0)) as hung:
        address = Address("127.0.0.1", hung.getsockname()[1])
        with closing(MasterChannel([address], Identity(hello=HELLO, secret=SECRET))) as channel:
            reasons = timeouts(channel, FAILURES_TO_OPEN + 1)

    assert reasons == [Reason.TIMEOUT] * FAILURES_TO_OPEN + [Reason.BREAKER_OPEN]


def test_a_store_is_asked_again_to_copy_by_itself() -> None:
    """One that was too slow once gets its bytes by the socket for a while only; one on another host always."""
    near, far = make_channel(), make_channel(same_memory=False)
    assert near.takes_regions(now_s=100.0)
    near.refused_regions(now_s=100.0)

    assert not near.takes_regions(now_s=100.0 + REGIONS_AGAIN_S / 2)
    assert near.takes_regions(now_s=100.0 + REGIONS_AGAIN_S)
    far.refused_regions(now_s=100.0)
    assert not far.takes_regions(now_s=1e9)
