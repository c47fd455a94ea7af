"""What a pool's trail says of a call is what the master says of the key, and times are in order."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from kvops.limits import LEASE_TTL_MS
from kvops.net.wire import Kind
from kvops.store.model import Reason
from kvops.store.trail import Trail, boot_ns
from tests.pool import LocalPool
from tests.waiting import WAIT_S, until

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    pool = LocalPool()
    try:
        yield pool
    finally:
        pool.close()


def test_a_read_leaves_its_place_its_lease_and_who_answered(pool: LocalPool) -> None:
    """Of each key: where it lay, in which generation, until when it may be read; and the term of the master."""
    client, trail = pool.connect(), Trail()
    client.follow(trail)
    began_ns = boot_ns()

    stored = client.batch_put_from(["a", "b"], [b"x" * 5_000, b"y" * 6_000])
    given = dict(trail.places)
    start = trail.first(Kind.PUT_START)
    read = client.batch_get_into(["a", "absent", "b"], [bytearray(6_000) for _ in range(3)])

    assert {one.reason for one in stored} == {Reason.STORED}
    assert [one.ok for one in read] == [True, False, True]
    assert start is not None
    assert sorted(given) == [0, 1]
    assert sorted(trail.places) == [0, 2]
    for index, key, at in ((0, "a", 0), (1, "b", 2)):
        known = client.stat(key)
        # ``stat`` is a call of its own, and has begun another trail.
        assert known is not None
        assert given[index].generation == known["generation"]
        assert given[index].offset == known["offset"]
        assert given[index].size_bytes == known["size_bytes"]
        assert given[index].store == read[at].store
    client.batch_get_into(["a", "absent", "b"], [bytearray(6_000) for _ in range(3)])
    found = trail.first(Kind.LOOKUP)
    assert found is not None
    assert [trail.places[0], trail.places[2]] == [given[0], given[1]]
    assert found.term == start.term > 0
    assert found.incarnation == start.incarnation
    assert (
        began_ns < start.asked_ns < start.answered_ns < found.asked_ns < found.answered_ns <= trail.ended_ns
    )
    held_ms = (trail.lease_until_ns - found.asked_ns) / 1e6
    assert 0 < held_ms <= LEASE_TTL_MS + 1


def test_threads_do_not_see_each_others_calls(pool: LocalPool) -> None:
    """A trail shows the looker's own last call, and what is counted is the looker's own, too."""
    client, trail = pool.connect(), Trail()
    client.follow(trail)
    client.batch_put_from(["mine"], [b"z" * 5_000])
    mine, sent = dict(trail.places), trail.requests

    def other() -> None:
        client.batch_get_into(["mine"] * 4, [bytearray(5_000) for _ in range(4)])
        assert len(trail.places) == 4

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(WAIT_S)

    assert trail.places == mine
    assert trail.requests == sent > 0


def test_a_lease_is_not_renewed_for_what_is_gone(pool: LocalPool) -> None:
    """A reader that waits for a store does not take a lease as renewed that its master could not renew."""
    store = pool.stores[1]
    writer, trail = pool.connect(host=store.config["host"]), Trail()
    reader = pool.connect(transports=["tcp"])
    reader.follow(trail)
    assert writer.put("gone", b"x" * 5_000).ok
    assert reader.batch_get_into(["gone"], [bytearray(5_000)])[0].ok
    removed_ns: list[int] = []

    def remove() -> None:
        writer.remove("gone", deadline_ms=1_000)  # the store stands still: nobody says that it is cleared
        until(lambda: writer.batch_exists(["gone"]) == [False], "the master names it no more")
        removed_ns.append(boot_ns())

    store.send(signal.SIGSTOP)
    try:
        remover = threading.Timer(0.2, remove)
        remover.start()
        outcome = reader.batch_get_into(["gone"], [bytearray(5_000)], deadline_ms=5_000)[0]
        remover.join()
    finally:
        pool.heal()

    assert not outcome.ok
    assert trail.lease_until_ns <= removed_ns[0] + LEASE_TTL_MS * 1_000_000


def test_without_a_trail_nothing_is_kept(pool: LocalPool) -> None:
    """Once nobody follows any more, calls leave what was there alone."""
    client, trail = pool.connect(), Trail()
    client.follow(trail)
    client.batch_put_from(["kept"], [b"z" * 5_000])
    before = trail.last

    client.follow(None)
    client.batch_get_into(["kept"], [bytearray(5_000)])

    assert trail.last is before
