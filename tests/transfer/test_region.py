"""Registered memory: a store on the writer's host copies from it, and is never harmed by it."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvops.errors import Refused, Unreachable, UsageError
from kvops.files import read_secret
from kvops.limits import REGION_BYTES_MAX, REGIONS_MAX
from kvops.net.auth import Hello
from kvops.net.link import Address, Link, call, establish, receive, send
from kvops.net.wire import Kind, encode
from kvops.store.client import Pool
from kvops.store.clock import boot_id
from kvops.store.model import Reason
from kvops.transfer import messages as tm
from kvops.transfer.region import Region, Regions, borrow
from tests.pool import ROOT, LocalPool, Member
from tests.waiting import WAIT_S, until

MIB = 1 << 20


@pytest.fixture(scope="module")
def running() -> Iterator[LocalPool]:
    with closing(LocalPool(stores=1)) as pool:
        yield pool


@pytest.fixture
def pool(running: LocalPool) -> Iterator[LocalPool]:
    """A master and a store, in order."""
    yield running
    running.heal()


def copied_bytes(store: Member) -> int:
    """What a store says it has copied from registered memory."""
    with urllib.request.urlopen(f"http://{store.addresses['http']}/metrics", timeout=WAIT_S) as page:
        lines = page.read().decode().splitlines()
    name = "kvops_store_registered_bytes_total"
    return int(float(next(line for line in lines if line.startswith(name)).split()[1]))


def fill(memory: memoryview) -> memoryview:
    """Give every page bytes of its own."""
    for at in range(0, len(memory), 4096):
        memory[at : at + 8] = (at * 2_654_435_761 % 2**64).to_bytes(8, "little")
    return memory


def register(client: Pool, memory: memoryview) -> None:
    """Put until the store knows the region: the first put goes by the socket."""
    assert client.put("first", memory[:4096]).ok
    client.remove("first")


def test_a_put_from_registered_memory_sends_no_payload(pool: LocalPool) -> None:
    """Objects of every size come out as they went in, and the store has copied them by itself."""
    client = pool.connect()
    memory = fill(client.allocate(8 * MIB))
    register(client, memory)
    before = copied_bytes(pool.stores[0])
    sizes = [1, 4096, 65_537, 3 * MIB + 5, *[5_000] * 150]
    spans = list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))
    keys = [f"k{number}" for number in range(len(sizes))]

    outcomes = client.batch_put_from(keys, [memory[start:end] for start, end in spans])

    assert {outcome.reason for outcome in outcomes} == {Reason.STORED}
    assert [client.get(key) for key in keys] == [bytes(memory[start:end]) for start, end in spans]
    assert copied_bytes(pool.stores[0]) - before == sum(sizes)
    for key in keys:
        client.remove(key)


def test_a_store_lets_go_of_memory(pool: LocalPool) -> None:
    """A writer's memory is mapped for as long as it is connected."""
    (store,) = pool.stores
    assert store.process is not None
    maps = Path(f"/proc/{store.process.pid}/maps")
    until(lambda: "kvops-region" not in maps.read_text(), "writers of other tests are gone")
    client = pool.connect()
    register(client, fill(client.allocate(MIB)))
    assert "kvops-region" in maps.read_text()
    client.close()
    until(lambda: "kvops-region" not in maps.read_text(), "nothing is mapped any more")


def test_one_batch_may_mix_memory(pool: LocalPool) -> None:
    """Registered, foreign, read-only and reaching beyond: each object arrives, in the order of the keys."""
    client = pool.connect()
    memory = fill(client.allocate(MIB))
    register(client, memory)
    data = [
        memory[:9_000],
        bytes(5_000),
        memory[9_000:20_000].toreadonly(),
        memory[20_000:],
        b"x" * 70_000,
        memory[:1],
    ]
    keys = [f"k{number}" for number in range(len(data))]

    assert {outcome.reason for outcome in client.batch_put_from(keys, data)} == {Reason.STORED}

    assert [client.get(key) for key in keys] == [bytes(view) for view in data]
    for key in keys:
        client.remove(key)


def test_a_restarted_store_is_told_anew(pool: LocalPool) -> None:
    """Registered memory is a connection's: another process of the store gets it again."""
    client = pool.connect()
    memory = fill(client.allocate(MIB))
    register(client, memory)
    (store,) = pool.stores
    store.send(signal.SIGKILL)
    pool.start(store)
    pool.wait_ready(store)

    def stored() -> bool:
        client.put("again", memory[:50_000])
        return client.get("again") == memory[:50_000]

    until(stored, "puts work again")
    until(lambda: client.put(f"more{time.monotonic()}", memory[:100]).ok and copied_bytes(store), "it copies")


def test_memory_outlives_the_pool_it_came_from(pool: LocalPool) -> None:
    """After ``close`` an engine's pages are still its own; another pool sends them by the socket."""
    client = pool.connect()
    memory = fill(client.allocate(MIB))
    client.close()

    with pool.connect() as other:
        assert other.put("k", memory[:5_000]).ok
        assert other.get("k") == memory[:5_000]
        other.remove("k")


def test_a_store_outlives_a_writer_that_dies(pool: LocalPool) -> None:
    """A writer killed in the middle of its puts takes no store along: mapped pages stay."""
    program = """
import kvops, sys
pool = kvops.connect(sys.argv[1], secret_file=sys.argv[2], host="host-0", deadline_ms=30000)
memory = pool.allocate(16 << 20)
for number in range(10_000):
    pool.batch_put_from([f"w{number % 7}/{i}" for i in range(16)], [memory[i << 20 : i + 1 << 20] for i in range(16)])
    for i in range(16):
        pool.remove(f"w{number % 7}/{i}")
    print(number, flush=True)
"""
    writer = subprocess.Popen(
        [sys.executable, "-c", program, pool.addresses[0], str(pool.secret_file)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )
    assert writer.stdout is not None
    try:
        with writer.stdout as lines:
            for _ in range(3):
                assert lines.readline()
            writer.kill()
    finally:
        writer.kill()
        writer.wait(WAIT_S)
    assert pool.stores[0].alive
    client = pool.connect()
    until(lambda: client.put("after", b"data").ok, "the store serves")
    assert client.get("after") == b"data"


# What a store thinks of other people's memory.


@pytest.fixture
def link(pool: LocalPool) -> Iterator[Link]:
    """A connection to the store's Unix socket."""
    hello = Hello(
        role="client",
        group="local",
        name="t",
        host="host-0",
        numa_node=0,
        pid=os.getpid(),
        boot_id=boot_id(),
        nonce=os.urandom(16),
    )
    made = Link(
        Address.parse(pool.stores[0].config["unix_path"]), secret=read_secret(pool.secret_file), hello=hello
    )
    establish(made, deadline=time.monotonic() + WAIT_S)
    yield made
    made.close()


def offer(link: Link, fd: int, *, number: int, size_bytes: int) -> bytes:
    """Register a descriptor by hand; the store's last answer."""
    deadline = time.monotonic() + WAIT_S
    send(link, Kind.REGISTER, tm.REGISTER.pack(number, 0, size_bytes), request=number)
    answer = receive(link, Kind.REGISTER, request=number, deadline=deadline)
    if answer == tm.GO_ON:
        socket.send_fds(link.sock, [b"\0"], [fd])
        answer = receive(link, Kind.REGISTER, request=number, deadline=deadline)
    return answer


def serves(link: Link) -> bool:
    """Whether the connection is of use still."""
    return bool(call(link, Kind.LIST, LIST_ALL, request=9, deadline=time.monotonic() + WAIT_S))


LIST_ALL = encode(tm.ListQuery(prefix="", limit=1, cursor=0))


def test_memory_that_could_shrink_is_refused(link: Link) -> None:
    """A store that mapped it would die of SIGBUS; the connection goes on."""
    fd = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, MIB)
    try:
        assert offer(link, fd, number=1, size_bytes=MIB) == tm.NOT_REGISTERED
    finally:
        os.close(fd)
    assert serves(link)


def test_memory_of_another_size_is_refused(link: Link) -> None:
    """What is said to be there must be there."""
    region = Region(MIB)
    assert offer(link, region.fd, number=1, size_bytes=2 * MIB) == tm.NOT_REGISTERED
    assert offer(link, region.fd, number=1, size_bytes=MIB) == tm.REGISTERED
    region.close()


def test_a_connection_registers_so_much_and_no_more(link: Link) -> None:
    """Beyond it a writer goes on by the socket."""
    region = Region(4096)
    answers = [offer(link, region.fd, number=number, size_bytes=4096) for number in range(1, REGIONS_MAX + 2)]
    assert answers == [tm.REGISTERED] * REGIONS_MAX + [tm.NOT_REGISTERED]
    assert serves(link)
    region.close()


@pytest.mark.parametrize(
    "body",
    [
        b"short",
        tm.SOURCE.pack(77, 200, 0, 64) + bytes(200),
        tm.SOURCE.pack(1, tm.WRITE_HEAD.size + 8, 4000, 97)
        + tm.WRITE_HEAD.pack(*[b""] * 2, *[0] * 4, 97, 4096, *[0] * 4)
        + bytes(8),
        tm.SOURCE.pack(1, tm.WRITE_HEAD.size, 0, 64)
        + tm.WRITE_HEAD.pack(*[b""] * 2, *[0] * 4, 64, 64, 0, 0, 0, 9_999),
    ],
    ids=["no source", "not registered", "beyond the region", "a key that is not there"],
)
def test_a_write_from_nowhere_ends_its_connection(pool: LocalPool, link: Link, body: bytes) -> None:
    """The store says why, hangs up, and serves everybody else."""
    region = Region(4096)
    assert offer(link, region.fd, number=1, size_bytes=4096) == tm.REGISTERED
    with pytest.raises(Unreachable, match="write"):
        call(link, Kind.WRITE_REGISTERED, body, request=2, deadline=time.monotonic() + WAIT_S)
    assert pool.connect().put("k", b"d").ok
    region.close()


def test_a_descriptor_that_never_comes_ends_its_connection(pool: LocalPool, link: Link) -> None:
    """Nobody waits for it without end, and nobody else waits at all."""
    send(link, Kind.REGISTER, tm.REGISTER.pack(1, 0, 4096), request=1)
    assert receive(link, Kind.REGISTER, request=1, deadline=time.monotonic() + WAIT_S) == tm.GO_ON
    assert pool.connect().put("k2", b"d").ok
    with pytest.raises(Unreachable):
        receive(link, Kind.REGISTER, request=1, deadline=time.monotonic() + WAIT_S)


# The writer's side alone.


def test_a_buffer_is_found_in_its_region() -> None:
    """By where it lies: whole buffers inside one region, nothing that reaches out of it."""
    regions = Regions()
    first, second = regions.allocate(8192), regions.allocate(4096)
    found = regions.find(second[100:200])
    assert found is not None
    assert found[1] == 100
    assert regions.find(memoryview(bytearray(10))) is None
    assert regions.find(first[:10].toreadonly()) is None
    regions.close()
    assert regions.find(first) is None


@pytest.mark.parametrize("size", [0, -1, REGION_BYTES_MAX + 1])
def test_no_region_of_an_absurd_size(size: int) -> None:
    """The error says what may be asked for."""
    with pytest.raises(UsageError, match="region"):
        Region(size)


def test_what_is_borrowed_cannot_be_written() -> None:
    """A store's mapping of a writer's memory is read-only, and sees what the writer writes."""
    region = Region(4096)
    borrowed = borrow(os.dup(region.fd), 4096)
    region.view[:4] = b"data"
    assert borrowed[:4] == b"data"
    assert borrowed.readonly
    with pytest.raises(Refused, match="size"):
        borrow(os.dup(region.fd), 8192)
    region.close()
