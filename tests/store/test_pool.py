"""A pool of real processes: what its users were promised, while its members are killed, stopped and restarted."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import shutil
import signal
import socket
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvops import PutOptions
from kvops.errors import KvopsError, Unreachable
from kvops.limits import PART_CHUNK_BYTES, STORE_SILENT_MS
from kvops.net.auth import Hello
from kvops.net.link import Address, Link, call
from kvops.net.wire import Kind
from kvops.store.client import Pool
from kvops.store.messages import PutStatus
from kvops.store.model import Outcome, Reason, StoreState
from tests.pool import CALL_MS, SEGMENT_BYTES, LocalPool, Member
from tests.store.rig import parse_put, put_rows
from tests.waiting import WAIT_S, until

pytestmark = pytest.mark.process

MIB = 1 << 20
SLACK_S = 20.0  # for a busy machine; a call that forgets its own deadline takes the client's
assert CALL_MS > 1_000 * SLACK_S
TTL_MS = 2_000
BRISK_MS = 400  # twice of it opens a breaker, before the master gives up a silent store by itself
assert 2 * BRISK_MS < STORE_SILENT_MS


@pytest.fixture(scope="module")
def running() -> Iterator[LocalPool]:
    pool = LocalPool()
    try:
        yield pool
    finally:
        pool.close()


@pytest.fixture
def pool(running: LocalPool) -> Iterator[LocalPool]:
    """A pool in order; what a test did to its members is undone afterwards."""
    yield running
    running.heal()


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """Keys of one test begin with this."""
    return f"{request.node.name}/"


def page(key: str, size: int) -> bytes:
    """Bytes that no other key has."""
    return (key.encode() * (size // len(key) + 1))[:size]


def spread(pool: LocalPool, prefix: str, *, per_store: int, size: int) -> dict[str, str]:
    """Objects on every store, each put by a client of that store's host: key → store."""
    where = {}
    for store in pool.stores:
        client = pool.connect(host=store.config["host"])
        keys = [f"{prefix}{store.name}/{i}" for i in range(per_store)]
        data = [page(key, size) for key in keys]
        assert {outcome.reason for outcome in client.batch_put_from(keys, data)} == {Reason.STORED}
        assert all(pool.store_of(client, key) is store for key in keys), "a writer's own host comes first"
        where |= dict.fromkeys(keys, store.name)
    return where


def read(client: Pool, keys: list[str], size: int, *, deadline_ms: int = CALL_MS) -> list[Outcome]:
    """A batch read; whatever is a hit has the right bytes."""
    buffers = [bytearray(size) for _ in keys]
    outcomes = client.batch_get_into(keys, buffers, deadline_ms=deadline_ms)
    for key, buffer, outcome in zip(keys, buffers, outcomes, strict=True):
        assert not outcome.ok or buffer == page(key, size)
    return outcomes


def given_up(client: Pool, member: Member) -> bool:
    """Whether the master names this process of a store no more; raises while the master does not answer."""
    assert member.process is not None
    return not [
        info
        for info in client.stores()
        if info.pid == member.process.pid and info.state is not StoreState.GONE
    ]


# What works.


@pytest.mark.parametrize("transports", [["shm"], ["tcp"], ["shm", "tcp"]], ids="+".join)
def test_put_and_get(pool: LocalPool, prefix: str, transports: list[str]) -> None:
    """What is put is read, by every transport, in every size; what was not put is a miss."""
    with pool.connect(transports=transports) as client:
        sizes = [1, 63, 64, 65_535, 65_536, 65_537, 3 * MIB + 1]
        keys = [f"{prefix}{size}" for size in sizes]
        data = [page(key, size) for key, size in zip(keys, sizes, strict=True)]
        stored = client.batch_put_from(keys, data)
        buffers = [bytearray(size) for size in sizes]

        outcomes = client.batch_get_into(keys, buffers)

        assert [outcome.reason for outcome in stored] == [Reason.STORED] * len(sizes)
        assert [(outcome.reason, outcome.size_bytes) for outcome in outcomes] == [
            (Reason.HIT, size) for size in sizes
        ]
        assert buffers == data
        assert client.put(keys[0], b"other").reason is Reason.EXISTS
        assert client.get(keys[0]) == data[0]
        assert client.get(f"{prefix}absent") is None
        assert client.batch_exists([keys[0], f"{prefix}absent"]) == [True, False]
        assert client.prefix_hits([*keys[:3], f"{prefix}absent", keys[4]]) == 3


def test_first_call_may_be_a_put(pool: LocalPool, prefix: str) -> None:
    """A client that knows the master's port alone stores its first object."""
    client = pool.connect(address=pool.master.addresses["listen"])

    assert client.put(f"{prefix}a", b"data").reason is Reason.STORED


def test_ranges(pool: LocalPool, prefix: str) -> None:
    """Any range of an object can be read, verified, and ends where the object does."""
    key, size = f"{prefix}a", 200_000
    data = page(key, size)
    for transports in (["shm"], ["tcp"]):
        client = pool.connect(transports=transports)
        client.put(key, data)
        for offset, length in ((0, 10), (65_536, 65_536), (65_535, 3), (199_990, 100), (123, 150_000)):
            buffer = bytearray(length)
            outcome = client.get_range_into(key, buffer, offset=offset)
            read_bytes = min(length, size - offset)
            assert (outcome.reason, outcome.size_bytes) == (Reason.HIT, read_bytes)
            assert buffer[:read_bytes] == data[offset : offset + length]
        beyond = client.get_range_into(key, bytearray(1), offset=size)
        assert (beyond.reason, beyond.size_bytes) == (Reason.REFUSED, size)


def test_buffers_of_another_size(pool: LocalPool, prefix: str) -> None:
    """A buffer that is too small is refused with the object's size, a larger one is filled up to it."""
    client, key = pool.connect(), f"{prefix}a"
    client.put(key, b"x" * 100)
    small, large = bytearray(99), bytearray(101)

    outcomes = client.batch_get_into([key, key], [small, large])

    assert [(o.ok, o.reason, o.size_bytes) for o in outcomes] == [
        (False, Reason.REFUSED, 100),
        (True, Reason.HIT, 100),
    ]
    assert small == bytes(99)
    assert large == b"x" * 100 + b"\0"


@pytest.mark.parametrize("transports", [["shm"], ["tcp"]], ids="+".join)
@pytest.mark.parametrize("kind", ["int8", "bool", "float16", "S1", ">f4"])
def test_buffers_of_any_numbers(pool: LocalPool, prefix: str, transports: list[str], kind: str) -> None:
    """Arrays of whatever numbers, of one byte or more, are filled as bytes are."""
    with pool.connect(transports=transports) as client:
        key, size = f"{prefix}{kind}", 3 * 65_536
        whole, some = (np.zeros(length // np.dtype(kind).itemsize, kind) for length in (size, 65_536))
        assert client.put(key, np.frombuffer(page(key, size), kind)).ok

        (outcome,) = client.batch_get_into([key], [whole])
        ranged = [client.get_range_into(key, some, offset=at) for at in (65_536, 1_000)]

        assert outcome.ok
        assert whole.tobytes() == page(key, size)
        assert [outcome.reason for outcome in ranged] == [Reason.HIT] * 2
        assert some.tobytes() == page(key, size)[1_000 : 1_000 + 65_536]


def test_calls_without_time_say_nothing_about_a_store(pool: LocalPool, prefix: str) -> None:
    """Readers whose time was over before they asked do not open a store's breaker for those who have some."""
    with pool.connect(transports=["tcp"]) as client:
        key = f"{prefix}key"
        assert client.put(key, page(key, MIB)).ok

        for _ in range(20):
            read(client, [key], MIB, deadline_ms=1)
            client.put(f"{key}2", page(key, MIB), deadline_ms=0)

        assert {store["breaker"] for store in client.health()["stores"]} == {"closed"}
        assert read(client, [key], MIB)[0].ok


def test_parts_by_several_ranks(pool: LocalPool, prefix: str) -> None:
    """Ranks write their ranges in any order, hanging up after it; the object is readable once all are there."""
    key, chunk = f"{prefix}a", PART_CHUNK_BYTES
    data = page(key, 5 * chunk + 100)
    ranges = [(4 * chunk, len(data)), (0, 2 * chunk), (2 * chunk, 4 * chunk)]
    reader = pool.connect()
    for start, end in ranges:
        assert reader.get(key) is None
        with pool.connect() as rank:
            outcome = rank.put_part(key, data[start:end], offset=start, total_size=len(data))
            assert outcome.reason is Reason.STORED

    assert reader.get(key) == data


def test_replicas_survive_a_store(pool: LocalPool, prefix: str) -> None:
    """With two replicas the death of one's store costs no object."""
    client = pool.connect(transports=["tcp"])
    keys = [f"{prefix}{i}" for i in range(8)]
    outcomes = client.batch_put_from(
        keys, [page(key, 10_000) for key in keys], options=PutOptions(replicas=2)
    )
    assert {outcome.reason for outcome in outcomes} == {Reason.STORED}
    pool.store_of(client, keys[0]).send(signal.SIGKILL)

    assert {outcome.reason for outcome in read(client, keys, 10_000)} == {Reason.HIT}


def test_ttl(pool: LocalPool, prefix: str) -> None:
    """An object with a TTL is gone after it."""
    client, numbers = pool.connect(), itertools.count()

    def read_in_time() -> str | None:
        """A key that the machine let us read before its TTL was over."""
        key, began = f"{prefix}{next(numbers)}", time.monotonic()
        assert client.put(key, b"x", options=PutOptions(ttl_ms=TTL_MS)).ok
        found = client.get(key)
        in_time = time.monotonic() - began < TTL_MS / 1_000
        assert not in_time or found == b"x"
        return key if in_time else None

    key = until(read_in_time, "an object is read before its TTL ends")
    until(lambda: client.get(key) is None, "the TTL ends")


def test_remove(pool: LocalPool, prefix: str) -> None:
    """A removed key is a miss at once and may be put anew; an absent one says so."""
    client, key = pool.connect(), f"{prefix}a"
    client.put(key, b"one")

    assert client.remove(key) == Outcome(True, Reason.HIT)
    assert client.get(key) is None
    assert client.remove(key).reason is Reason.MISS
    assert client.put(key, b"two").reason is Reason.STORED
    assert client.get(key) == b"two"


def test_full_pool_keeps_what_is_pinned(pool: LocalPool, prefix: str) -> None:
    """Writing more than the pool holds pushes the oldest out, and leaves what is pinned."""
    client, size = pool.connect(), 2 * MIB
    pinned = page(f"{prefix}pinned", size)
    until(lambda: client.put(f"{prefix}pinned", pinned, options=PutOptions(hard_pin=True)).ok, "room is made")
    keys = [f"{prefix}{i}" for i in range(2 * len(pool.stores) * SEGMENT_BYTES // size)]

    for key in keys:
        until(lambda key=key: client.put(key, page(key, size)).ok, "room is made")

    assert client.get(f"{prefix}pinned") == pinned
    assert client.get(keys[0]) is None
    assert client.get(keys[-1]) == page(keys[-1], size)
    for key in [f"{prefix}pinned", *keys]:
        client.remove(key)


def test_looking(pool: LocalPool, prefix: str) -> None:
    """stat and ls tell what lies where, page by page."""
    where = spread(pool, prefix, per_store=5, size=1_000)
    client = pool.connect()
    stat = client.stat(f"{prefix}store-1/0")
    assert stat is not None
    assert (stat["store"], stat["size_bytes"]) == ("store-1", 1_000)

    found: dict[str, str] = {}
    cursor: str | None = ""
    while cursor is not None:
        rows, cursor = client.ls(prefix=prefix, limit=4, cursor=cursor)
        found |= {row["key"]: row["store"] for row in rows}

    assert found == where


# Stores in trouble.


def test_store_is_killed(pool: LocalPool, prefix: str) -> None:
    """A killed store costs its own keys alone, and a put goes elsewhere."""
    where = spread(pool, prefix, per_store=4, size=MIB)
    victim = pool.stores[1]
    clients = [pool.connect(transports=transports) for transports in (["tcp"], ["shm", "tcp"])]
    for client in clients:
        assert {outcome.reason for outcome in read(client, list(where), MIB)} == {Reason.HIT}
    victim.send(signal.SIGKILL)

    for client in clients:
        outcomes = read(client, list(where), MIB)
        assert all(o.ok for o, name in zip(outcomes, where.values(), strict=True) if name != victim.name)
        until(lambda c=client: c.put(f"{prefix}new", b"x").ok, "a put goes elsewhere")
    until(lambda: given_up(client, victim), "the master gives it up")
    assert {
        o.reason for o, n in zip(read(client, list(where), MIB), where.values(), strict=True) if not o.ok
    } == {Reason.MISS}


def test_stopped_store_by_tcp(pool: LocalPool, prefix: str) -> None:
    """With one store stopped a batch has all the others' keys by its deadline; soon it costs nothing any more."""
    where = spread(pool, prefix, per_store=8, size=256 * 1024)
    client, victim = pool.connect(transports=["tcp"]), pool.stores[2]

    def as_promised() -> bool:
        """Whether it went so before the machine was too busy for a deadline that short."""
        until(lambda: all(o.ok for o in read(client, list(where), 256 * 1024)), "the store is used (again)")
        victim.send(signal.SIGSTOP)
        reasons, late = set(), 0
        for _ in range(3):
            began = time.monotonic()
            outcomes = read(client, list(where), 256 * 1024, deadline_ms=BRISK_MS)
            assert time.monotonic() - began < SLACK_S
            reasons |= {o.reason for o in outcomes if not o.ok}
            late += sum(
                not o.ok for o, name in zip(outcomes, where.values(), strict=True) if name != victim.name
            )
        victim.send(signal.SIGCONT)
        return not late and {Reason.TIMEOUT, Reason.BREAKER_OPEN} <= reasons

    until(as_promised, "the others' keys arrive, and the breaker opens")
    until(lambda: all(o.ok for o in read(client, list(where), 256 * 1024)), "the store is used again")


def test_stopped_store_by_shm(pool: LocalPool, prefix: str) -> None:
    """A stopped process's pages can still be read by those who mapped them."""
    where = spread(pool, prefix, per_store=4, size=100_000)
    client = pool.connect(transports=["shm"])
    assert {outcome.reason for outcome in read(client, list(where), 100_000)} == {Reason.HIT}
    pool.stores[0].send(signal.SIGSTOP)

    assert {outcome.reason for outcome in read(client, list(where), 100_000)} == {Reason.HIT}


def test_store_that_was_lost_comes_back(pool: LocalPool, prefix: str) -> None:
    """A store that was stopped until the master gave it up has all its objects again when it goes on."""
    where = spread(pool, prefix, per_store=4, size=10_000)
    client, victim = pool.connect(transports=["tcp"]), pool.stores[0]
    victim.send(signal.SIGSTOP)
    until(lambda: given_up(client, victim), "the master gives it up")

    victim.send(signal.SIGCONT)

    until(lambda: all(o.ok for o in read(client, list(where), 10_000)), "its objects are back")


def test_restarted_store_is_a_new_one(pool: LocalPool, prefix: str) -> None:
    """A restarted store's old objects are misses, never other bytes, and new ones are stored and read."""
    victim = pool.stores[1]
    keys = [
        key for key, name in spread(pool, prefix, per_store=4, size=10_000).items() if name == victim.name
    ]
    clients = [pool.connect(transports=transports, host="host-1") for transports in (["shm"], ["tcp"])]
    for client in clients:
        assert {outcome.reason for outcome in read(client, keys, 10_000)} == {Reason.HIT}
    victim.send(signal.SIGKILL)
    pool.start(victim)
    pool.wait_ready(victim)

    for client in clients:
        assert not any(outcome.ok for outcome in read(client, keys, 10_000))
    for client in clients:
        until(lambda c=client: c.put(keys[0], page(keys[0], 10_000)).ok, "it takes new objects")
        until(lambda c=client: read(c, keys[:1], 10_000)[0].ok, "they can be read")


def test_late_answers_touch_nothing(pool: LocalPool, prefix: str) -> None:
    """What a store sends after the deadline does not land in the caller's buffer."""
    victim, size = pool.stores[2], 8 * MIB
    writer = pool.connect(host="host-2")
    assert writer.put(f"{prefix}a", page("a", size)).ok
    client = pool.connect(transports=["tcp"])
    assert read(client, [f"{prefix}warm"], 1)[0].reason is Reason.MISS
    buffer = bytearray(b"\xaa" * size)
    victim.send(signal.SIGSTOP)

    outcome = client.batch_get_into([f"{prefix}a"], [buffer], deadline_ms=100)[0]
    assert outcome.reason is Reason.TIMEOUT
    before = bytes(buffer)
    victim.send(signal.SIGCONT)
    until(lambda: client.get(f"{prefix}a") == page("a", size), "the store answers again")

    assert buffer == before


def test_pool_that_fails_many_is_left_alone(pool: LocalPool, prefix: str) -> None:
    """When half of the hosts cannot use most stores nobody asks for a while; then the pool is used again."""
    where = spread(pool, prefix, per_store=1, size=1_000)
    clients = [pool.connect(host=f"host-{i}", transports=["tcp"]) for i in range(3)]
    for client in clients:
        assert {outcome.reason for outcome in read(client, list(where), 1_000)} == {Reason.HIT}

    def somebody_is_told() -> Pool | None:
        for store in pool.stores[:2]:
            store.send(signal.SIGSTOP)
        began = time.monotonic()
        while time.monotonic() - began < STORE_SILENT_MS / 1_000:  # given up by then: its keys are misses
            for client in clients:
                read(client, list(where), 1_000, deadline_ms=50)
            told = next((c for c in clients if c.health()["group"]["breaker"] == "open"), None)
            if told is not None:
                return told
        for store in pool.stores[:2]:
            store.send(signal.SIGCONT)
        for client in clients:
            until(lambda c=client: all(o.ok for o in read(c, list(where), 1_000)), "all is well again")
        return None

    client = until(somebody_is_told, "the group's breaker opens")
    assert client.get(f"{prefix}store-2/0", deadline_ms=50) is None
    until(lambda: client.batch_exists([f"{prefix}store-2/0"]) == [True], "the group's breaker closes")


# The master in trouble.


def test_restarted_master_has_every_object(pool: LocalPool, prefix: str) -> None:
    """After the master was killed and restarted every object is read again, by clients old and new."""
    where = spread(pool, prefix, per_store=20, size=10_000)
    client = pool.connect(transports=["tcp"])
    assert {outcome.reason for outcome in read(client, list(where), 10_000)} == {Reason.HIT}
    pool.master.send(signal.SIGKILL)
    assert not any(outcome.ok for outcome in read(client, list(where), 10_000, deadline_ms=200))

    pool.start(pool.master)

    for one in (client, pool.connect()):
        until(lambda c=one: all(o.ok for o in read(c, list(where), 10_000)), "every object is there")
    until(lambda: client.put(f"{prefix}new", b"x").ok, "new ones are stored")


def test_master_without_its_memory(pool: LocalPool, prefix: str) -> None:
    """A master that lost its state learns from the stores, in whatever order they come; clients notice."""
    where = spread(pool, prefix, per_store=5, size=10_000)
    keys = list(where)
    client = pool.connect(transports=["tcp"])
    for turn in range(2):  # the second time the same ids are given in another order
        assert {outcome.reason for outcome in read(client, keys, 10_000)} == {Reason.HIT}
        pool.master.send(signal.SIGKILL)
        shutil.rmtree(Path(pool.master.config["state_dir"]))
        late = pool.stores[turn]
        late.send(signal.SIGSTOP)
        pool.start(pool.master)
        pool.wait_ready(*[store for store in pool.stores if store is not late])
        late.send(signal.SIGCONT)
        pool.wait_ready(late)

        assert {outcome.reason for outcome in read(client, keys, 10_000)} == {Reason.HIT}
        new = [f"{prefix}{turn}/{i}" for i in range(20)]
        assert {o.reason for o in client.batch_put_from(new, [page(key, 10_000) for key in new])} == {
            Reason.STORED
        }
        keys += new


def test_stopped_master(pool: LocalPool, prefix: str) -> None:
    """A stopped master costs a deadline or two, then nothing; when it goes on, so does the client."""
    client, key = pool.connect(), f"{prefix}a"
    client.put(key, b"x")
    pool.master.send(signal.SIGSTOP)

    reasons = []
    for _ in range(4):
        began = time.monotonic()
        reasons.append(client.batch_get_into([key], [bytearray(1)], deadline_ms=100)[0].reason)
        assert time.monotonic() - began < SLACK_S
    assert reasons[0] is Reason.TIMEOUT
    assert reasons[-1] is Reason.BREAKER_OPEN
    assert client.put(f"{prefix}b", b"x").reason is Reason.BREAKER_OPEN

    pool.master.send(signal.SIGCONT)
    until(lambda: client.get(key) == b"x", "the master is asked again")


def test_no_master_at_all(pool: LocalPool) -> None:
    """Connecting, asking and closing without a master take no time and say what is the matter."""
    client = pool.connect(address=str(pool.base / "nobody"))

    assert client.get("a") is None
    assert client.batch_exists(["a"]) == [False]
    assert client.put("a", b"x").reason in (Reason.MASTER_DOWN, Reason.BREAKER_OPEN)
    with pytest.raises(Unreachable, match="kvops status"):
        client.stat("a")
    assert "nobody" in client.health()["master"]["last_error"]


# Clients in trouble.


def in_child(work: object) -> int:
    """Run ``work()`` in a forked child; its exit code, 0 when it returned True."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if work() else 1)  # type: ignore[operator]
        except Exception:  # noqa: BLE001 - a test says what broke in the child
            traceback.print_exc()
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_forked_client(pool: LocalPool, prefix: str) -> None:
    """A pool that was forked works in child and parent."""
    client, key = pool.connect(), f"{prefix}a"
    client.put(key, b"parent")
    assert client.get(key) == b"parent"

    code = in_child(lambda: client.get(key) == b"parent" and client.put(f"{key}2", b"child").ok)

    assert code == 0
    assert client.get(key) == b"parent"
    assert client.get(f"{key}2") == b"child"


def put_start(pool: LocalPool, key: str, size: int) -> Link:
    """A writer that was granted a put and does not go on."""
    hello = Hello(role="client", group="local", name="w", host="h", numa_node=0, pid=1, boot_id="", nonce=b"")
    secret = bytes.fromhex(pool.secret_file.read_text())
    link = Link(Address.parse(pool.master.addresses["listen"]), secret=secret, hello=hello)
    answer = call(
        link, Kind.PUT_START, put_rows([(key, size)]), request=1, deadline=time.monotonic() + WAIT_S
    )
    assert parse_put(answer, 1)[0][0] is PutStatus.GRANTED
    return link


def test_client_without_descriptors(pool: LocalPool, prefix: str) -> None:
    """A process that has no file descriptor left loses hits, not its mind; when it has some again, so does the pool."""
    client, key = pool.connect(), f"{prefix}a"
    assert client.put(key, b"bytes").ok

    def work() -> bool:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        taken = []
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        reasons = {client.batch_get_into([key], [bytearray(5)])[0].reason for _ in range(3)}
        reasons.add(client.put(f"{key}2", b"x").reason)
        expected = {Reason.MASTER_DOWN, Reason.BREAKER_OPEN}
        lost = reasons <= expected and client.batch_exists([key]) == [False] and client.get(key) is None
        for descriptor in taken:
            os.close(descriptor)
        return lost and until(lambda: client.get(key) == b"bytes", "the child reads again")

    assert in_child(work) == 0


def test_second_writer(pool: LocalPool, prefix: str) -> None:
    """While somebody writes a key it is a miss, and a second writer is told at once."""
    client, key = pool.connect(), f"{prefix}a"
    link = put_start(pool, key, 10)

    assert client.get(key) is None
    assert client.put(key, b"x" * 10) == Outcome(False, Reason.EXISTS)

    link.close()
    until(lambda: client.put(key, b"x" * 10).ok, "the first writer is given up")


def test_writer_killed_in_mid_put(pool: LocalPool, prefix: str) -> None:
    """A key whose writer was killed in the middle can be put by the next one at once."""
    client, key = pool.connect(), f"{prefix}a"
    ready, granted = os.pipe()
    pid = os.fork()
    if pid == 0:
        link = put_start(pool, key, 10)
        os.write(granted, b"x")
        signal.pause()
        link.close()
    try:
        assert os.read(ready, 1) == b"x"
        assert client.put(key, b"y" * 10).reason is Reason.EXISTS
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(granted)

    until(lambda: client.put(key, b"y" * 10).ok, "the dead writer is given up")
    assert client.get(key) == b"y" * 10


def test_wrong_secret(pool: LocalPool, tmp_path: Path) -> None:
    """A client with another secret reads nothing, and its health says why."""
    other = tmp_path / "secret"
    other.write_text("ab" * 32)
    other.chmod(0o600)
    client = pool.connect(secret_file=other)

    assert client.get("a") is None
    assert client.put("a", b"x").ok is False
    assert "secret" in client.health()["master"]["last_error"]


def test_garbage_at_the_ports(pool: LocalPool, prefix: str) -> None:
    """Whatever strangers send to master and stores, they are hung up on, and the pool serves on."""
    client, key = pool.connect(), f"{prefix}a"
    client.put(key, b"x")
    garbage = [b"GET / HTTP/1.1\r\n\r\n" * 100, os.urandom(100_000), b"KVOP" + os.urandom(100)]
    for member in (pool.master, *pool.stores):
        for address in (member.addresses["listen"], member.addresses["unix"]):
            for data in garbage:
                at = Address.parse(address)
                family = socket.AF_UNIX if at.is_unix else socket.AF_INET
                with socket.socket(family, socket.SOCK_STREAM) as sock:
                    sock.settimeout(WAIT_S)
                    sock.connect(at.host if at.is_unix else (at.host, at.port))
                    try:
                        sock.sendall(data)
                        while sock.recv(65_536):
                            pass
                    except ConnectionError:
                        pass

    assert client.get(key) == b"x"
    assert all(member.alive for member in (pool.master, *pool.stores))


def test_errors_have_a_fix(pool: LocalPool) -> None:
    """What a caller got wrong is an error that says what to do."""
    client = pool.connect()
    readonly = b"x"
    for wrong in (
        lambda: client.batch_get_into(["a"], [readonly]),
        lambda: client.batch_get_into(["a"], []),
        lambda: client.put("a", b""),
        lambda: client.put("", b"x"),
        lambda: client.put_part("a", b"x" * 10, offset=1, total_size=100),
        lambda: client.ls(store="nobody"),
    ):
        with pytest.raises(KvopsError) as error:
            wrong()
        assert error.value.fix
