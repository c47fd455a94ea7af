"""What writers on a store's own host can do to it, by mistake or on purpose: nothing that lasts."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from kvops.errors import KvopsError, Unreachable
from kvops.files import read_secret
from kvops.limits import GIB, MIB, REGION_BYTES_MAX, REGIONS_MAX, REGIONS_OF_ALL_MAX
from kvops.net import wire
from kvops.net.auth import Hello
from kvops.net.link import Address, Link, call, establish, receive, send
from kvops.net.wire import Kind, encode
from kvops.store.client_core import PutPlan
from kvops.store.clock import boot_id
from kvops.store.keys import NAMESPACE_DEFAULT, index_digests
from kvops.store.model import PutOptions, Reason
from kvops.transfer import messages as tm
from kvops.transfer.layout import chunk_digests
from kvops.transfer.messages import NodeStatus
from kvops.transfer.model import WRITES_PER_FRAME_MAX, SliceState, WriteSlice
from kvops.transfer.region import SEALS, Region
from tests import huge
from tests.pool import LocalPool, Member
from tests.waiting import WAIT_S, until

pytestmark = pytest.mark.process

U32, U64 = 2**32 - 1, 2**64 - 1


def soon() -> float:
    """A deadline that only something broken misses."""
    return time.monotonic() + WAIT_S


def holdings(store: Member) -> Counter[str]:
    """What a store's process holds: descriptors, mapped files and threads, by kind."""
    assert store.process is not None
    process = Path(f"/proc/{store.process.pid}")
    held = Counter(thread=len(list((process / "task").iterdir())))
    for descriptor in (process / "fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            held[descriptor.readlink().name.partition(":")[0]] += 1
    held.update(line.split()[5] for line in (process / "maps").read_text().splitlines() if "memfd" in line)
    return held


@pytest.fixture(scope="module")
def running() -> Iterator[LocalPool]:
    with closing(LocalPool(stores=1)) as pool:
        yield pool


@pytest.fixture
def pool(running: LocalPool) -> Iterator[LocalPool]:
    """A master and a store; afterwards it is the same process, holds no more than before, and serves."""
    running.heal()
    (store,) = running.stores
    assert store.process is not None
    pid = store.process.pid
    until(lambda: not connections(store), "nobody is connected any more")
    before = holdings(store)
    yield running
    assert store.alive, running.log(store)
    with running.connect() as client:
        assert client.put("afterwards", b"still served").ok
        assert client.get("afterwards") == b"still served"
        client.remove("afterwards")
    running.heal()
    assert store.process.pid == pid
    until(lambda: not holdings(store) - before, "the store lets go of what it was given")


def connections(store: Member) -> int:
    """How many a store has accepted on its Unix socket."""
    listed = Path("/proc/net/unix").read_text().splitlines()
    return sum(line.endswith(store.config["unix_path"]) for line in listed) - 1  # one listens


@pytest.fixture
def store(pool: LocalPool) -> Member:
    return pool.stores[0]


def connected(pool: LocalPool, address: str) -> Link:
    """A connection that has proved the secret."""
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
    link = Link(Address.parse(address), secret=read_secret(pool.secret_file), hello=hello)
    establish(link, deadline=soon())
    return link


@pytest.fixture
def link(pool: LocalPool, store: Member) -> Iterator[Link]:
    """A connection to the store's Unix socket."""
    with closing(connected(pool, store.config["unix_path"])) as made:
        yield made


@pytest.fixture
def region() -> Iterator[Region]:
    """Memory of a writer's: 16 MiB."""
    with closing(Region(16 * MIB)) as made:
        yield made


def begin(link: Link, *, number: int, size_bytes: int) -> bytes:
    """Ask to register; the store's first answer."""
    send(link, Kind.REGISTER, tm.REGISTER.pack(number, 0, size_bytes), request=number)
    return receive(link, Kind.REGISTER, request=number, deadline=soon())


def offer(link: Link, fd: int, *, number: int = 1, size_bytes: int) -> bytes:
    """Register a descriptor; the store's last answer."""
    answer = begin(link, number=number, size_bytes=size_bytes)
    if answer == tm.GO_ON:
        socket.send_fds(link.sock, [b"\0"], [fd])
        answer = receive(link, Kind.REGISTER, request=number, deadline=soon())
    return answer


def serves(link: Link) -> bool:
    """Whether the connection is of use still."""
    everything = encode(tm.ListQuery(prefix="", limit=1, cursor=0))
    return bool(call(link, Kind.LIST, everything, request=9, deadline=soon()))


class Put:
    """A put by hand: the master grants memory, the test says what is written there, and how."""

    def __init__(self, pool: LocalPool, key: str, data: memoryview) -> None:
        info = pool.connect().stores()[0]
        self._master = connected(pool, pool.addresses[0])
        digests = index_digests(NAMESPACE_DEFAULT, [key])
        self._plan = PutPlan(NAMESPACE_DEFAULT, [key], [key.encode()], [data], digests, PutOptions(), None)
        try:
            self._plan.started(self._ask(Kind.PUT_START, self._plan.start_body()))
            ((self.piece,),) = self._plan.groups(lambda _: info).values()
        except BaseException:
            self.close()
            raise

    def _ask(self, kind: Kind, body: bytes) -> bytes:
        return call(self._master, kind, body, request=1, deadline=soon())

    def end(self) -> Reason:
        """Tell the master that all of it is written."""
        self.piece.state = SliceState.DONE
        self._plan.ended(self._ask(Kind.PUT_END, self._plan.end_body()))
        return self._plan.outcomes[0].reason

    def close(self) -> None:
        """Give it up, if it has not ended."""
        self._master.close()


def row(
    piece: WriteSlice,
    *,
    number: int = 1,
    at: int = 0,
    digests: bytes | None = None,
    generation: int | None = None,
    offset: int | None = None,
    key: bytes | None = None,
    length: int | None = None,
    body_bytes: int | None = None,
) -> bytes:
    """One registered write: as a correct writer names it, but for what a test says."""
    key = piece.key if key is None else key
    head = tm.WRITE_HEAD.pack(
        piece.digest,
        piece.key_digest,
        piece.generation if generation is None else generation,
        piece.offset if offset is None else offset,
        piece.size,
        0,
        piece.size,
        piece.chunk,
        0,
        0,
        piece.flags,
        len(key),
    )
    body = head + key + (chunk_digests(piece.data, piece.chunk) if digests is None else digests)
    return (
        tm.SOURCE.pack(
            number,
            len(body) if body_bytes is None else body_bytes,
            at,
            piece.size if length is None else length,
        )
        + body
    )


def write(link: Link, *rows: bytes) -> list[tuple[int, int]]:
    """Send registered writes; status and whether the object is whole, of each."""
    answer = call(link, Kind.WRITE_REGISTERED, b"".join(rows), request=2, deadline=soon())
    return [(status, sealed) for status, sealed, _ in tm.WRITE_REPLY.iter_unpack(answer)]


# What is offered.


def sealed(size_bytes: int, *, seals: int = SEALS, flags: int = 0) -> int:
    """A descriptor of memory that cannot shrink."""
    fd = os.memfd_create("offered", os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def again(fd: int, flags: int) -> int:
    """The same memory, opened once more."""
    try:
        return os.open(f"/proc/self/fd/{fd}", flags)
    finally:
        os.close(fd)


def pipe() -> int:
    """The end of a pipe from which nothing will ever come."""
    reading, writing = os.pipe()
    os.close(writing)
    return reading


OFFERS: dict[str, tuple[Callable[[], int], int]] = {
    "not sealed": (lambda: sealed(MIB, seals=0), MIB),
    "may grow": (lambda: sealed(MIB, seals=fcntl.F_SEAL_SHRINK), MIB),
    "may lose its seals": (lambda: sealed(MIB, seals=fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW), MIB),
    "smaller": (lambda: sealed(MIB), 2 * MIB),
    "larger": (lambda: sealed(2 * MIB), MIB),
    "nothing": (lambda: sealed(0), 0),
    "absurd": (lambda: sealed(MIB), U64),
    "negative, were it signed": (lambda: sealed(MIB), 1 << 63),
    "for writing alone": (lambda: again(sealed(MIB), os.O_WRONLY), MIB),
    "a name alone": (lambda: again(sealed(MIB), os.O_PATH), MIB),
    "a pipe": (pipe, MIB),
    "a directory": (lambda: os.open("/", os.O_RDONLY), MIB),
    "a file": (lambda: os.open(__file__, os.O_RDONLY), Path(__file__).stat().st_size),
    "a device": (lambda: os.open("/dev/zero", os.O_RDONLY), MIB),
    "a socket": (lambda: socket.socket(socket.AF_UNIX).detach(), MIB),
    "a file on tmpfs": (lambda: os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR), 0),
}


@pytest.mark.parametrize("what", OFFERS)
def test_what_is_no_region_is_refused(link: Link, what: str) -> None:
    """Only memory that is sealed, whole and readable is taken; the connection goes on."""
    make, size_bytes = OFFERS[what]
    fd = make()
    try:
        assert offer(link, fd, size_bytes=size_bytes) == tm.NOT_REGISTERED
    finally:
        os.close(fd)
    assert serves(link)


def test_of_two_descriptors_one_is_taken(link: Link, region: Region) -> None:
    """The kernel drops what was not asked for; nothing stays behind in the store."""
    assert begin(link, number=1, size_bytes=region.size_bytes) == tm.GO_ON
    socket.send_fds(link.sock, [b"\0"], [region.fd, region.fd, region.fd])
    assert receive(link, Kind.REGISTER, request=1, deadline=soon()) == tm.REGISTERED
    assert serves(link)


@pytest.mark.parametrize("sends", [b"\0", b"", b"never"], ids=["a byte alone", "an end", "nothing"])
def test_a_descriptor_that_does_not_come_ends_its_connection(
    pool: LocalPool, link: Link, region: Region, sends: bytes
) -> None:
    """Nobody waits for it without end, and nobody else waits at all."""
    assert begin(link, number=1, size_bytes=region.size_bytes) == tm.GO_ON
    if sends == b"\0":
        link.sock.send(sends)
    elif not sends:
        link.sock.shutdown(socket.SHUT_WR)
    assert pool.connect().put("meanwhile", b"d").ok
    with pytest.raises(Unreachable):
        receive(link, Kind.REGISTER, request=1, deadline=soon())
    pool.connect().remove("meanwhile")


def test_a_number_that_is_given_again(pool: LocalPool, link: Link, region: Region) -> None:
    """The later region takes the place of the earlier one."""
    with closing(Region(MIB)) as other:
        region.view[:5], other.view[:5] = b"first", b"later"
        assert offer(link, region.fd, size_bytes=region.size_bytes) == tm.REGISTERED
        assert offer(link, other.fd, size_bytes=other.size_bytes) == tm.REGISTERED
        with closing(Put(pool, "k", other.view[:5])) as put:
            assert write(link, row(put.piece)) == [(NodeStatus.OK, 1)]
            assert put.end() is Reason.STORED
    client = pool.connect()
    assert client.get("k") == b"later"
    client.remove("k")


def test_a_connection_registers_so_much_and_no_more(link: Link, region: Region) -> None:
    """Beyond it a writer goes on by the socket."""
    answers = [
        offer(link, region.fd, number=number, size_bytes=region.size_bytes)
        for number in range(REGIONS_MAX + 1)
    ]
    assert answers == [tm.REGISTERED] * REGIONS_MAX + [tm.NOT_REGISTERED]
    assert serves(link)


def test_all_connections_register_so_much_and_no_more(pool: LocalPool, store: Member, region: Region) -> None:
    """However many regions writers offer, descriptors are left for those who only want to be served."""
    with ExitStack() as stack:
        answers: Counter[bytes] = Counter()
        for _ in range(300):
            link = stack.enter_context(closing(connected(pool, store.config["unix_path"])))
            answers.update(
                offer(link, region.fd, number=number, size_bytes=region.size_bytes)
                for number in range(REGIONS_MAX)
            )
        assert answers[tm.REGISTERED] == REGIONS_OF_ALL_MAX
        assert answers[tm.NOT_REGISTERED]
        with pool.connect() as client:
            assert client.put("beside", b"served").ok
            assert client.get("beside") == b"served"
            client.remove("beside")


def test_the_largest_region_costs_a_store_nothing(pool: LocalPool, store: Member, link: Link) -> None:
    """A store that mapped regions of 1 TiB would soon have no address space left, and die of it."""
    assert store.process is not None
    status = Path(f"/proc/{store.process.pid}/status")

    def address_space() -> int:
        return int(status.read_text().partition("VmSize:")[2].split()[0]) << 10

    before = address_space()
    fd = sealed(REGION_BYTES_MAX)
    try:
        for number in range(REGIONS_MAX):
            assert offer(link, fd, number=number, size_bytes=REGION_BYTES_MAX) == tm.REGISTERED
    finally:
        os.close(fd)
    assert address_space() - before < GIB


def test_memory_that_nobody_touched_stays_untouched(pool: LocalPool, link: Link, region: Region) -> None:
    """Pages that a writer never wrote are zeros, and not taken at the store's cost by copying them."""
    zeros = memoryview(bytes(8 * MIB))
    assert offer(link, region.fd, size_bytes=region.size_bytes) == tm.REGISTERED
    with closing(Put(pool, "zeros", zeros)) as put:
        assert write(link, row(put.piece, at=4 * MIB)) == [(NodeStatus.OK, 1)]
        assert put.end() is Reason.STORED
    client = pool.connect()
    assert client.get("zeros") == zeros
    client.remove("zeros")
    assert os.fstat(region.fd).st_blocks == 0


def test_a_store_outlives_memory_that_is_gone(pool: LocalPool, link: Link) -> None:
    """Huge pages that a writer gave back and somebody else has taken: touching a mapping of them is SIGBUS."""
    size = 2 * MIB
    with huge.reserved(1), ExitStack() as stack:
        fd = sealed(size, flags=os.MFD_HUGETLB)
        stack.callback(os.close, fd)
        with mmap.mmap(fd, size) as memory:
            memory[:4] = b"data"
            assert offer(link, fd, size_bytes=size) == tm.REGISTERED
            give_back(fd, size)
        rest = sealed(size * huge.free(), flags=os.MFD_HUGETLB)
        stack.callback(os.close, rest)
        with mmap.mmap(rest, 0) as others:
            for at in range(0, len(others), size):
                others[at] = 1
            assert huge.free() == 0
            zeros = memoryview(bytes(size))
            with closing(Put(pool, "gone", zeros)) as put:
                assert write(link, row(put.piece)) == [(NodeStatus.OK, 1)]


def give_back(fd: int, size: int) -> None:
    """Punch a hole as large as all of it: fallocate(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    keep_size_and_punch = 0x01 | 0x02
    code = libc.fallocate(fd, keep_size_and_punch, ctypes.c_long(0), ctypes.c_long(size))
    assert code == 0, os.strerror(ctypes.get_errno())


# What is written.


def test_bytes_that_changed_are_never_read(pool: LocalPool, link: Link, region: Region) -> None:
    """A writer whose memory changes between its hash and the store's copy has stored nothing that can be read."""
    data = region.view[: 3 * MIB]
    data[:] = os.urandom(len(data))
    assert offer(link, region.fd, size_bytes=region.size_bytes) == tm.REGISTERED
    with closing(Put(pool, "torn", data)) as put:
        named = row(put.piece)
        data[2 * MIB] ^= 1  # one bit
        assert write(link, named) == [(NodeStatus.OK, 1)]
        assert put.end() is Reason.STORED

    for transport in ("shm", "tcp"):
        with pool.connect(transports=[transport]) as reader:
            assert reader.get("torn") is None
            (outcome,) = reader.batch_get_into(["torn"], [bytearray(len(data))])
            assert outcome.reason is Reason.CORRUPT
            whole = reader.get_range_into("torn", bytearray(MIB), offset=0)
            assert whole.ok, "the part that did not change is what was put"
    pool.connect().remove("torn")


def test_a_write_where_it_may_not(pool: LocalPool, link: Link, region: Region) -> None:
    """Each is answered by itself, touches nothing, and the others of its frame are carried out."""
    client = pool.connect()
    kept = os.urandom(MIB)
    assert client.put("kept", kept).ok
    stat = client.stat("kept")
    assert stat is not None
    region.view[:MIB] = os.urandom(MIB)
    assert offer(link, region.fd, size_bytes=region.size_bytes) == tm.REGISTERED
    with closing(Put(pool, "mine", region.view[:MIB])) as put:
        piece = put.piece
        foreign = write(
            link,
            row(piece, offset=stat["offset"], generation=stat["generation"] - 1),
            row(piece, offset=stat["offset"], generation=stat["generation"]),
            row(piece, generation=0),
            row(piece, offset=1 << 40),
            row(piece, offset=piece.offset + 1),
            row(piece, offset=U64 & -64),
        )
        assert not {(NodeStatus.OK, 0), (NodeStatus.OK, 1)} & set(foreign)
        assert write(link, row(piece), row(piece), row(piece, key=b"another")) == [
            (NodeStatus.OK, 1),
            (NodeStatus.OK, 1),  # it is whole already
            (NodeStatus.REFUSED, 0),
        ]
        assert put.end() is Reason.STORED
    assert client.get("kept") == kept
    assert client.get("mine") == region.view[:MIB]
    for key in ("kept", "mine"):
        client.remove(key)


@pytest.mark.parametrize(
    ("size", "named"),
    [
        (64, lambda piece: b"short"),
        (64, lambda piece: row(piece, number=77)),
        (97, lambda piece: row(piece, at=16 * MIB - 96)),
        (64, lambda piece: row(piece, at=16 * MIB)),
        (64, lambda piece: row(piece, at=U64)),
        (64, lambda piece: row(piece, at=U64 - 62)),
        (64, lambda piece: row(piece, length=U64)),
        (64, lambda piece: row(piece, length=0)),
        (64, lambda piece: row(piece, length=63)),
        (64, lambda piece: row(piece, length=65)),
        (64, lambda piece: row(piece, digests=b"")),
        (64, lambda piece: row(piece, digests=bytes(16))),
        (64, lambda piece: row(piece, body_bytes=U32)),
        (64, lambda piece: row(piece, body_bytes=0)),
        (64, lambda piece: row(piece) * (WRITES_PER_FRAME_MAX + 1)),
    ],
    ids=[
        "no source",
        "not registered",
        "reaches beyond",
        "begins behind",
        "absurd offset",
        "offset and length beyond 64 bits",
        "absurd length",
        "nothing",
        "less than it says",
        "more than it says",
        "without digests",
        "with too many digests",
        "absurd body",
        "empty body",
        "too many",
    ],
)
def test_a_write_that_contradicts_itself_ends_its_connection(
    pool: LocalPool, link: Link, region: Region, size: int, named: Callable[[WriteSlice], bytes]
) -> None:
    """The store says why, hangs up, and serves everybody else."""
    assert offer(link, region.fd, size_bytes=region.size_bytes) == tm.REGISTERED
    with closing(Put(pool, "k", region.view[:size])) as put, pytest.raises(Unreachable, match="write"):
        write(link, named(put.piece))


def test_answers_that_nobody_reads(pool: LocalPool, store: Member, link: Link, region: Region) -> None:
    """A writer that sends and never reads its answers is not read from any more; others are served."""
    assert offer(link, region.fd, size_bytes=region.size_bytes) == tm.REGISTERED
    with closing(Put(pool, "k", region.view[:64])) as put:
        frame = wire.pack(Kind.WRITE_REGISTERED, row(put.piece, generation=1))
        frames = memoryview(frame * (2 * MIB // len(frame)))
        link.sock.settimeout(0.5)
        sent = 0
        with suppress(TimeoutError):
            while sent < 256 * MIB:
                sent += link.sock.send(frames[sent % len(frames) :])
        assert sent < 256 * MIB, "it went on taking requests"
        assert pool.connect().put("beside", b"served").ok
        pool.connect().remove("beside")


@pytest.mark.parametrize("ends", ["close", "reset"])
def test_a_writer_that_leaves_in_the_middle_of_a_copy(
    pool: LocalPool, store: Member, region: Region, ends: str
) -> None:
    """Its memory and connection are let go of, and what it had not ended is never readable."""
    region.view[:] = bytes(8) * (len(region.view) // 8)
    for number in range(5):
        key = f"left/{number}"
        with closing(connected(pool, store.config["unix_path"])) as link:
            assert offer(link, region.fd, size_bytes=region.size_bytes) == tm.REGISTERED
            with closing(Put(pool, key, region.view[: 4 * MIB])) as put:
                link.sock.setblocking(True)
                link.sock.sendall(wire.pack(Kind.WRITE_REGISTERED, row(put.piece) * 8))
                if ends == "reset":
                    link.sock.shutdown(socket.SHUT_RDWR)
        assert pool.connect().get(key) is None


def test_a_region_is_of_one_connection(pool: LocalPool, link: Link, region: Region) -> None:
    """Another one, even of the same writer, cannot name it."""
    assert offer(link, region.fd, size_bytes=region.size_bytes) == tm.REGISTERED
    with (
        closing(connected(pool, pool.stores[0].config["unix_path"])) as other,
        closing(Put(pool, "k", region.view[:64])) as put,
        pytest.raises(KvopsError, match="registered"),
    ):
        write(other, row(put.piece))
